"""Other calculators: each against the numbers of its own text, and the committed comparison against both sides."""

from __future__ import annotations

import copy
import importlib.util
import random

import pytest
from typer.testing import CliRunner

from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.calc.units import GB, GiB, MiB
from lablib.launch.records import repository_root
from tests.evidence import comparison
from tests.evidence import other_calculators as others
from tests.evidence.__main__ import app
from tests.evidence.cases import Case
from tests.evidence.comparison import deepspeed_record, drifted, held_bytes, meta_model, summary
from tests.evidence.grid import grid
from tests.evidence.headline import OTHERS, read_table
from tests.evidence.other_calculators import (
    CALCULATORS,
    QUANTITIES,
    Calculator,
    PaperSymbols,
    find_calculator,
    korthikanti_layer,
    symbols,
    zero_states,
)

TABLE = read_table()
COMMITTED = read_table(OTHERS)
OF = {row["name"]: row for row in TABLE["rows"]}
OWN = others.OWN
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `pip install -c constraints.txt -e '.[deepspeed]'` runs this test",
)


def covered(one: Calculator) -> list[Case]:
    return [case for case in grid() if not one.refuses(case)]


def letters(**sizes: int) -> PaperSymbols:
    return PaperSymbols(**{"s": 2048, "b": 1, "h": 4096, "a": 32, "layers": 32, "v": 32000} | sizes)


# Each text's own numbers.


@pytest.mark.parametrize(
    ("billions", "ranks", "stages"),
    [
        (7.5, 1, (120, 120, 120, 120)),
        (7.5, 4, (120, 52.5, 41.3, 30)),
        (7.5, 64, (120, 31.4, 16.6, 1.88)),
        (7.5, 1024, (120, 30.1, 15.1, 0.12)),
        (128, 64, (2048, 536, 284, 32)),
        (1000, 1024, (16000, 4011, 2013, 15.6)),
    ],
)
def test_zero_s_table_1(billions, ranks, stages) -> None:
    for stage, printed in enumerate(stages):
        found = zero_states(billions * 1e9, 2, 2, 12, ranks=ranks, stage=stage) / GB
        assert found == pytest.approx(printed, abs=0.06 if billions < 100 else 1)  # some cells are truncated


def test_zero_s_example_of_activations() -> None:
    # "The 1.5B parameter GPT-2 model trained with sequence length of 1K and batch size of 32 requires about 60 GB".
    assert others.zero_activations(1600, 32, 1024, 48) / GB == pytest.approx(60, rel=0.02)


def test_korthikanti_s_table_2_and_sentences() -> None:
    dice = random.Random(11)
    for _ in range(20):
        x = letters(s=dice.randint(1, 4096), b=dice.randint(1, 8), t=dice.choice((1, 2, 4, 8)))
        scores = 5 * x.a * x.s / x.h / x.t
        for split, factor in ((False, 10 + 24 / x.t), (True, 34 / x.t)):
            for kept in (False, True):
                found = korthikanti_layer(x, sequence_parallel=split, scores=kept)
                assert found == pytest.approx(x.sbh * (factor + scores * kept))
    # GPT-3 and MT-NLG: 5as/h is 80 and 64, and selective recomputation saves 70 and 65 percent.
    for a, h, term, saved in ((96, 12288, 80, 0.70), (128, 20480, 64, 0.65)):
        x = letters(a=a, h=h)
        assert korthikanti_layer(x) / x.sbh == 34 + term
        assert 1 - korthikanti_layer(x, scores=False) / korthikanti_layer(x) == pytest.approx(saved, abs=0.006)
    # Figure 7: both techniques together leave under 20 percent of the tensor-parallel baseline, full recomputation ~ 8.
    for a, h in ((64, 6144), (96, 12288)):
        x = letters(a=a, h=h, t=8)
        both = korthikanti_layer(x, sequence_parallel=True, scores=False)
        assert 0.16 < both / korthikanti_layer(x) < 0.20
        assert 0.07 < korthikanti_layer(x, full=True) / korthikanti_layer(x) < 0.09
    x = letters(t=8)
    assert others.korthikanti_ends(x) == pytest.approx(x.sbh / 8 * (1 + 4 * (1 + x.v / x.h)))
    assert others.korthikanti_ends(letters(p=4)) == 4 * letters().sbh


def test_the_playbook_s_pictures_and_table() -> None:
    # GiB of one sequence; the picture adds the mask of the embedding's dropout, sbh, which the formula has not.
    for sizes, drawn in (
        ({"h": 4096, "a": 32, "layers": 32}, {1024: 9.25390625, 4096: 97.015625, 16384: 1348.0625}),
        ({"h": 2048, "a": 32, "layers": 16}, {1024: 3.564453125, 8192: 168.515625}),
    ):
        for s, gib in drawn.items():
            x = letters(s=s, **sizes)
            assert (x.layers * korthikanti_layer(x) + x.sbh) / GiB == gib
    for s, gib in {1024: 4.25, 131072: 544.0}.items():
        assert 32 * korthikanti_layer(letters(s=s), scores=False) / GiB == gib
    # Its N with 4 bytes each, and one learned position a token.
    for hidden, layers, s, gib in ((4096, 32, 1024, 25.979034423828125), (2048, 16, 8192, 4.0426177978515625)):
        counted = others.simple_parameters(hidden, layers, 128256)
        assert 4 * (counted + s * hidden) / GiB == gib


def test_megatron_s_numbers() -> None:
    assert others.megatron_bytes() == 18
    # A log of a fork that prints the same sum: 4.1055 billion parameters over 2 ranks are 46983.28 MB (MiB).
    assert 4.1055e9 * others.megatron_bytes(2) / MiB == pytest.approx(46983.28, rel=2e-5)
    # Without biases and with a whole vocabulary its count is the model's own, but for a router.
    case = Case(implementation="hf", family="llama", size="8b", recipe="mixed-bf16", seq=2048)
    assert others.megatron_parameters(case) == count_params(preset("llama-3-8b")).total
    case = Case(implementation="paper", family="mixtral", size="8b", recipe="mixed-bf16", seq=1000)
    assert others.megatron_parameters(case) == count_params(preset("mixtral-8x7b")).total - 32 * 4096 * 8
    # With sequence parallelism its activations are table 2 of Korthikanti et al., and the tokens.
    sizes = {"family": "gpt2", "size": "8b", "seq": 2048, "recipe": "mixed-bf16", "recompute": "selective"}
    case = Case(implementation="paper", tensor="4+sp", **sizes)
    paper = find_calculator("Korthikanti et al.", "activations").formula(case)
    x = symbols(case)
    assert others.megatron_activations(case) == pytest.approx(paper + 8 * x.s * x.b / x.t)


def test_eleuther_s_log() -> None:
    # A run of the script in its pull request 37 prints 56.19 B parameters for these sizes.
    found = others.eleuther_parameters(8192, 80, 152064, 1024, width=3 * 8192)
    assert f"{found / 1e9:.2f}" == "56.19"


def test_accelerate_s_and_transformers_documentation() -> None:
    # bert-base-cased is 413.18 MB in float32; training takes 1.61 GB, in float16 826.36 MB (all binary).
    size = 413.18 * MiB
    assert max(others.accelerate_usage(size, mixed=False).values()) / GiB == pytest.approx(1.61, abs=0.005)
    assert max(others.accelerate_usage(size, mixed=True).values()) / MiB == pytest.approx(826.36, abs=0.005)
    found = [others.transformers_bytes(*how) for how in ((True,), (False,), (False, "sgd-momentum"))]
    assert found == [18, 16, 12]


# The table of calculators.


def test_every_calculator_cites_and_covers_something() -> None:
    keys = [(one.name, one.quantity) for one in CALCULATORS]
    assert len(set(keys)) == len(keys)
    bibliography = (repository_root() / "book" / "references.bib").read_text(encoding="utf-8")
    for one in CALCULATORS:
        assert one.quantity in QUANTITIES
        assert covered(one), (one.name, one.quantity)
        if one.name != OWN:
            assert f"{{{one.source.key}," in bibliography


def test_what_is_not_covered_is_refused_with_the_reason() -> None:
    case = Case(implementation="hf", recipe="fp32", tuning="lora")
    for one in CALCULATORS:
        if one.name != OWN:
            with pytest.raises(ValueError, match="does not cover tiny-llama"):
                one.predict(case)
    with pytest.raises(ValueError, match="no calculator is named 'ZeRO' and says 'total'; there are ZeRO: states"):
        find_calculator("ZeRO", "total")


# The committed comparison.


def test_nothing_drifted() -> None:
    """Every prediction again, Accelerate's by its own code."""
    found = CliRunner().invoke(app, ["memory-peers"])
    assert found.exit_code == 0, found.output


def test_the_summary_is_of_the_rows_and_the_rows_of_the_memory_table() -> None:
    for row in COMMITTED["rows"]:
        assert row["measured"] == held_bytes(OF[row["case"]]["measured"], row["quantity"])
    assert COMMITTED["summary"] == summary(COMMITTED["rows"])
    own = {row["quantity"]: row for row in COMMITTED["summary"] if row["calculator"] == OWN}
    assert own["states"]["worst"] == 1
    assert own["states"]["cases"] == own["activations"]["cases"] == len(grid())
    for row in COMMITTED["summary"]:
        assert row["low"] <= row["median"] <= row["high"]


def test_a_number_that_moved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = copy.deepcopy(COMMITTED)
    moved["rows"][0]["predicted"] += 1
    moved["summary"][1]["median"] = 9.0
    name = next(iter(moved["deepspeed"]["cases"]))
    moved["deepspeed"]["cases"][name]["gpu"] -= 1
    del moved["left_out"][2]
    found = drifted(moved, COMMITTED)
    assert len(found) == 4
    assert found[0].startswith("ZeRO, states, ")
    assert found[-1].startswith(f"DeepSpeed, {name}: was")
    monkeypatch.setattr(comparison, "compare", lambda **_: moved)
    said = CliRunner().invoke(app, ["memory-peers"])
    assert (said.exit_code, "ZeRO, states" in said.output) == (1, True)
    # Another version of Accelerate may count other buffers.
    other = copy.deepcopy(COMMITTED)
    other["versions"]["accelerate"] = "0.1"
    for row in other["rows"]:
        row["predicted"] += row["calculator"] == "Accelerate"
    assert drifted(other, COMMITTED) == []


# The installed ones.


@pytest.mark.parametrize("case", covered(find_calculator("Accelerate", "states"))[::3], ids=lambda case: case.name)
def test_accelerate_itself_says_the_formula(case: Case) -> None:
    """Its own code on a meta model: four or two times the model in fp32, and the buffers of rotary embeddings."""
    formula = find_calculator("Accelerate", "states").predict(case)
    buffers = 4 * sum(buffer.numel() for buffer in meta_model(case).buffers())
    assert comparison.accelerate_estimate(case) == formula + buffers * (4 if case.recipe == "fp32" else 2)


def test_deepspeed_s_record_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    one, record = find_calculator("DeepSpeed", "states"), COMMITTED["deepspeed"]
    assert list(record["cases"]) == [case.name for case in covered(one)]
    for name, said in record["cases"].items():
        case = Case(**OF[name]["case"])
        assert {k: v for k, v in said.items() if k != "gpu"} == others.deepspeed_arguments(case)
        assert said["gpu"] == pytest.approx(one.predict(case), abs=2)
    monkeypatch.setattr(comparison, "installed_version", lambda package: None)
    assert deepspeed_record(TABLE, record) == record
    with pytest.raises(ValueError, match="DeepSpeed is not installed, and its record is not of these cases"):
        deepspeed_record(TABLE, {"version": "0", "cases": {}})


@needs_deepspeed
@pytest.mark.filterwarnings("ignore")
def test_deepspeed_itself_says_the_record() -> None:
    for name, said in COMMITTED["deepspeed"]["cases"].items():
        assert comparison.deepspeed_estimate(Case(**OF[name]["case"])) == said


# The command and the picture.


def test_the_command_prints_the_committed_comparison() -> None:
    found = CliRunner().invoke(app, ["memory-peers", "--committed"])
    assert found.exit_code == 0
    assert all(one.name in found.output for one in CALCULATORS)
    wrong = CliRunner().invoke(app, ["memory-peers", "--committed", "--write"])
    assert (wrong.exit_code, "leave --committed out" in wrong.output) == (2, True)


def test_the_picture_has_a_line_for_every_summary() -> None:
    import matplotlib.pyplot as plt

    from lablib.view.memory import calculator_ratios

    fig = calculator_ratios(COMMITTED["summary"])
    (ax,) = fig.axes
    names = [f"{row['calculator']} ({row['cases']})" for row in COMMITTED["summary"]]
    assert [label.get_text() for label in ax.get_yticklabels()] == names
    dots = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert dots == [row["median"] for row in COMMITTED["summary"]]
    plt.close(fig)
    with pytest.raises(ValueError, match="quantity='time' must be one of states, activations, total"):
        calculator_ratios([{"quantity": "time"}])
