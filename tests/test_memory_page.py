"""The page on the memory calculator: its headline comes from the table, and none of its results is typed in."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from lablib.view import memory as draw
from lablib.view.style import COLORS
from tests.evidence.cases import Case
from tests.evidence.grid import COUNTS, DRAWN, DRAWN_EXPERTS, RULES, SEED, drawn_experts, grid, held_out
from tests.evidence.headline import EARLIER, HELD_OUT, NOTICEABLE, headline, read_table, step_moments
from tests.evidence.table import broken, drifted, measured_row, predicted_anew, save_held_out
from tests.evidence.verdict import KINDS

ROWS = read_table()["rows"]
HELD = read_table(HELD_OUT)
BOOK = Path(__file__).resolve().parents[1] / "book"
PAGE, TABLES = (BOOK / f"memory_{name}.md" for name in ("calculator", "tables"))


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def _error(row, key):
    """The error of a number, from the file alone."""
    return row["predicted"][key] / row["measured"][key] - 1


def test_the_headline_is_the_worst_of_the_table() -> None:
    found = headline(ROWS)
    peaks = {row["name"]: abs(_error(row, "peak")) for row in ROWS if "peak" in row["measured"]}
    saved = {row["name"]: abs(_error(row, "saved")) for row in ROWS}
    assert (found["configurations"], found["peaks"]) == (len(ROWS), len(peaks))
    assert found["peak"]["name"] == max(peaks, key=peaks.__getitem__)
    assert found["peak"]["off"] == pytest.approx(max(peaks.values()))
    assert found["saved"]["off"] == pytest.approx(max(saved.values()))
    assert sorted(peaks.values())[len(peaks) // 2 - 1] <= found["typical_peak"] * (1 + 1e-6) + 1e-15
    exact = sum(row["predicted"]["states"] == row["measured"]["states"] for row in ROWS)
    assert found["states_exact"] == exact == len(ROWS)
    groups = [
        abs(row["predicted"]["groups"][group] - size) / row["measured"]["saved"]
        for row in ROWS
        for group, size in row["measured"]["groups"].items()
    ]
    assert found["saved_term"]["off"] == pytest.approx(max(groups))


@pytest.mark.parametrize("way", [0.9, 1.1])
@pytest.mark.parametrize("key", ["peak", "saved"])
def test_a_worse_row_becomes_the_headline(key: str, way: float) -> None:
    rows = copy.deepcopy(ROWS)
    # Any row but the present worst, whichever that is.
    before = headline(rows)[key]["name"]
    row = next(row for row in rows if key in row["measured"] and row["name"] != before)
    row["predicted"][key] = round(row["measured"][key] * way)
    worst = headline(rows)[key]
    assert worst["name"] == row["name"]
    assert worst["off"] == pytest.approx(0.1, rel=1e-3)
    assert headline(rows)["noticeable"][0] == worst


def test_one_byte_of_states_is_counted() -> None:
    rows = copy.deepcopy(ROWS)
    rows[3]["predicted"]["states"]["gradients"] += 1
    # Two terms that are wrong against each other are not exact, though their sum is.
    rows[5]["predicted"]["states"]["gradients"] += 1
    rows[5]["predicted"]["states"]["weights"] -= 1
    assert headline(rows)["states_exact"] == headline(ROWS)["states_exact"] - 2


def test_no_sum_is_noticeably_off() -> None:
    assert headline(ROWS)["noticeable"] == headline(HELD["rows"])["noticeable"] == []


def test_the_drawn_ones_are_drawn_and_not_chosen() -> None:
    cases = held_out()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) == sum(COUNTS.values())
    assert not set(names) & {case.name for case in grid()}
    assert {size: sum(case.size == size for case in cases) for size in COUNTS} == COUNTS
    for case in cases:
        row = asdict(case)
        assert all(rule.allows(row) for rule in RULES), case.name
    # The draw is the seed's, and another seed draws others.
    few = {"tiny": 5}
    assert held_out(1, few) == held_out(1, few) != held_out(2, few)
    experts = drawn_experts()
    assert len({case.name for case in experts} - {case.name for case in grid()}) == len(experts) == DRAWN_EXPERTS
    assert all(case.model.is_moe for case in experts)
    assert drawn_experts(1, 5) == drawn_experts(1, 5) != drawn_experts(2, 5)


def test_the_drawn_file_is_of_the_draw_and_no_bound_breaks(tmp_path) -> None:
    assert HELD["seed"] == SEED
    assert [Case(**row["case"]) for row in HELD["rows"]] == [*held_out(), *drawn_experts()]
    assert broken(HELD["rows"]) == []
    assert read_table(save_held_out(HELD["rows"], tmp_path / "again.json", HELD["versions"])) == HELD
    for row, anew in zip(HELD["rows"], predicted_anew(HELD["rows"]), strict=True):
        assert anew["predicted"] == row["predicted"], row["name"]


def test_what_earlier_draws_found_is_corrected() -> None:
    for earlier in read_table(EARLIER):
        assert earlier["seed"] != SEED
        assert earlier["then"] > NOTICEABLE, "without a miss there was no reason to draw anew"
        today = predicted_anew([earlier["worst"]])
        assert headline(today)["noticeable"] == []
        assert earlier["now"] == headline(today)["peak"]["off"]
        assert broken(today) == []


def test_a_drawn_one_measured_again() -> None:
    case = next(c for c in held_out() if c.implementation == "toy" and c.size == "tiny" and c.seq == 64)
    row = measured_row(case)
    assert drifted([row], HELD) == []


def _step(predicted: dict, measured: dict) -> dict:
    terms = {name: {"weights": size} for name, size in predicted.items()}
    return {"name": "a row", "predicted": {"moment_terms": terms}, "measured": {"moments": measured}}


def test_moments_are_those_of_both_sides() -> None:
    row = _step(
        {"states": 1, "forward of block 0": 2, "backward of the loss": 3, "optimizer step": 2},
        {"optimizer step": 2, "states": 1, "forward of block 0": 4, "backward of the loss": 3},
    )
    found = step_moments(row)
    assert [(m["phase"], sum(m["kinds"].values()), m["measured"]) for m in found] == [
        ("states", 1, 1),
        ("forward", 2, 4),
        ("loss", 3, 3),
        ("step", 2, 2),
    ]


@pytest.mark.parametrize(("reduction", "seen"), [(7, 7), (4, 5)])
def test_a_moment_that_no_tracker_names_is_seen_in_the_one_before(reduction: int, seen: int) -> None:
    row = _step({"backward of the embedding": 5, "gradient reduction": reduction}, {"backward of the embedding": 7})
    assert [(m["name"], m["kinds"]) for m in step_moments(row)] == [("backward of the embedding", {"weights": seen})]


def test_drawn_rows_have_their_steps() -> None:
    steps = read_table()["steps"]
    assert {step["name"] for step in steps} == {case.name for case in DRAWN}
    for step in steps:
        row = next(row for row in ROWS if row["name"] == step["name"])
        moments = step["moments"]
        assert moments == step_moments(row)
        assert {m["phase"] for m in moments} == {"states", "forward", "loss", "backward", "step"}
        assert max(moments, key=lambda m: m["measured"])["name"] == step["peak_at"]
        assert max(sum(m["kinds"].values()) for m in moments) == row["predicted"]["peak"]


def _prose(page: Path = PAGE) -> str:
    text = page.read_text(encoding="utf-8").split("---", 2)[2]
    text = re.sub(r"(?ms)^(`{3,})\{code-cell\}.*?^\1[ ]*$", "", text)
    return re.sub(r"(?ms)^```bash.*?^```$", "", text)


@pytest.mark.parametrize("page", [PAGE, TABLES], ids=lambda page: page.stem)
def test_the_page_types_no_result(page: Path) -> None:
    prose = re.sub(r"\{eval\}`[^`]*`|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "", _prose(page))
    unit = r"(?:GB|GiB|MB|MiB|KB|bytes?|B|percent|%|x|times|million|billion|configurations|cases|rows|of \d+)\b"
    # A model's name, what one could make up, the width of an fp32 number, and a segment of the allocator.
    allowed = {"8B", "5 percent", "600 bytes", "4 bytes", "2 MiB"}
    typed = {found[0] for found in re.finditer(rf"\b\d[\d,.]*\s?{unit}", prose)}
    assert typed - allowed == set()
    for row in ROWS:
        assert row["name"] not in prose


def test_what_is_not_proven_stands_before_the_proof() -> None:
    sections = re.findall(r"(?m)^## (.*)$", _prose())
    assert sections.index("What a GPU adds") < sections.index("What is not proven") < sections.index("Use it") + 3
    assert sections.index("What is not proven") < sections.index("How far off each number is")


def test_the_page_shows_the_worst_case_of_each_kind() -> None:
    shown = " ".join(re.findall(r"\{eval\}`[^`]*`", _prose())).replace("'", '"')
    for table in ("HEAD", "DRAWN_HEAD"):
        for part in ('"configurations"', '"states_exact"', '"saved"]["off"', '"peak"]["off"', '"typical_peak"'):
            assert f"{table}[{part}]" in shown
    assert 'WORST["name"]' in shown


def test_every_configuration_is_a_dot_on_its_strip() -> None:
    fig = draw.error_strips(
        {"states": [0, 0, 0], "peak": [0, 1e-8, 0.02]}, {"states": 0.0, "peak": 0.05}, named={"peak": (0.02, "worst")}
    )
    ax = fig.axes[0]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [3, 3]
    assert list(dots[1].get_xdata())[1:] == pytest.approx([1e-8, 0.02], rel=0.1)
    # Equal errors do not hide each other, and what is exact stands left of everything else.
    for line in dots:
        assert len(set(zip(line.get_xdata(), line.get_ydata(), strict=True))) == 3
    assert max(dots[0].get_xdata()) < 1e-10
    assert {text.get_text() for text in ax.texts} == {"allowed: 5%", "worst"}
    bounds = [list(line.get_xdata()) for line in ax.lines if line.get_marker() != "o"]
    assert bounds == [[0.05, 0.05]]


def test_a_step_is_layers_on_each_other_with_what_was_measured() -> None:
    fig = draw.step_memory(
        {"weights": [1, 1, 1], "activations": [0, 2, 1], "optimizer": [0, 0, 0]},
        phases=[("forward", 2), ("step", 1)],
        measured=[1, 3, 2],
        peak=(1, "peak"),
        ylabel="GB",
    )
    ax = fig.axes[0]
    values = [list(patch.get_data().values) for patch in ax.patches]
    assert values == [[1, 1, 1], [1, 3, 2]]
    assert list(ax.lines[0].get_ydata()) == [1, 3, 2]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["forward", "step"]
    assert {text.get_text() for text in fig.legends[0].get_texts()} == {"weights", "activations", "measured, in all"}
    with pytest.raises(ValueError, match="the phases have 2 moments"):
        draw.step_memory({"weights": [1]}, phases=[("forward", 2)], measured=[1, 1], peak=(0, ""), ylabel="GB")


def test_every_kind_of_memory_has_a_layer_and_every_layer_a_colour() -> None:
    assert set(draw.LAYER_BY_KIND) == set(KINDS)
    assert set(draw.LAYER_BY_KIND.values()) == set(draw.LAYERS)
    assert {role for _, role in draw.LAYERS.values()} <= set(COLORS)
