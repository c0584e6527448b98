"""The shoot-out: each peer against the numbers of its own text, and the committed comparison against both sides."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import random

import pytest
from typer.testing import CliRunner

from lablib.calc import peer_cookbook, peer_deepspeed, peer_megatron, peer_playbook, peer_reasons, peer_zero
from lablib.calc import peer_transformer_math as transformer_math
from lablib.calc.memory_cases import Case
from lablib.calc.memory_grid import grid
from lablib.calc.memory_headline import OTHERS, read_table
from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.calc.peer import SIXTEEN_BITS, Peer, Shape, shape
from lablib.calc.peer_accelerate import training_usage
from lablib.calc.peer_korthikanti import blocks, ends, layer
from lablib.calc.peer_reasons import REASONS, why
from lablib.calc.peer_truth import CLOSE, gaps, main_cause, measured_bytes, measured_terms
from lablib.calc.peers import PEERS, QUANTITIES, find_peer, peer_names
from lablib.calc.units import GB, GiB, MiB
from lablib.cli.main import app
from lablib.launch import peer_table
from lablib.launch.experiments import repository_root
from lablib.launch.peer_table import deepspeed_record, drifted, left_out, peer_rows, summary
from lablib.launch.peers import accelerate_usage, deepspeed_estimate, meta_model

TABLE = read_table()
COMMITTED = read_table(OTHERS)
BIBLIOGRAPHY = (repository_root() / "book" / "references.bib").read_text(encoding="utf-8")
OF = {row["name"]: row for row in TABLE["rows"]}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `pip install -c constraints.txt -e '.[deepspeed]'` runs this test",
)


def covered(peer: Peer) -> list[Case]:
    return [case for case in grid() if not peer.covers(case)]


def letters(**sizes: int) -> Shape:
    return Shape(
        **{"s": 2048, "b": 1, "h": 4096, "a": 32, "layers": 32, "v": 32000, "t": 1, "p": 1, "n": 1} | sizes
    )


# Each text's own numbers.

ZERO_TABLE_1 = [  # billions of parameters, ranks, GB under stages 1, 2, 3
    (7.5, 1, 120, 120, 120),
    (7.5, 4, 52.5, 41.3, 30),
    (7.5, 64, 31.4, 16.6, 1.88),
    (7.5, 1024, 30.1, 15.1, 0.12),
    (128, 64, 536, 284, 32),
    (1000, 1024, 4011, 2013, 15.6),
]


@pytest.mark.parametrize(("billions", "ranks", "one", "two", "three"), ZERO_TABLE_1)
def test_zero_s_table(billions: float, ranks: int, one: float, two: float, three: float) -> None:
    for stage, printed in ((0, 16 * billions), (1, one), (2, two), (3, three)):
        states = sum(peer_zero.model_states(billions * 1e9, ranks=ranks, stage=stage).values()) / GB
        assert states == pytest.approx(printed, abs=0.06 if billions < 100 else 1)  # some cells are truncated


def test_zero_s_example_of_activations() -> None:
    # "The 1.5B parameter GPT-2 model trained with sequence length of 1K and batch size of 32 requires about 60 GB".
    assert peer_zero.gpt_activations(1600, 32, 1024, 48) / GB == pytest.approx(60, rel=0.02)


def test_korthikanti_s_sentences() -> None:
    # GPT-3 and MT-NLG: 5as/h is 80 and 64, and selective recomputation saves 70 and 65 percent.
    for a, h, term, saved in ((96, 12288, 80, 0.70), (128, 20480, 64, 0.65)):
        x = letters(a=a, h=h)
        everything, selective = (sum(layer(x, scores=kept).values()) for kept in (True, False))
        assert everything / x.sbh == 34 + term
        assert 1 - selective / everything == pytest.approx(saved, abs=0.006)
    # Figure 7: both techniques together leave under 20 percent of the tensor-parallel baseline, full recomputation ~ 8.
    for a, h, layers in ((64, 6144, 48), (96, 12288, 96)):
        x = letters(a=a, h=h, layers=layers, t=8)
        baseline = sum(blocks(x).values())
        both = sum(blocks(x, sequence_parallel=True, scores=False).values())
        assert 0.16 < both / baseline < 0.20
        assert 0.07 < sum(blocks(x, full=True).values()) / baseline < 0.09


def test_korthikanti_s_table_2() -> None:
    dice = random.Random(11)
    for _ in range(50):
        x = letters(s=dice.randint(1, 4096), b=dice.randint(1, 8), t=dice.choice((1, 2, 4, 8)))
        scores = 5 * x.a * x.s / x.h
        rows = {
            (False, True): 10 + 24 / x.t + scores / x.t,
            (True, True): 34 / x.t + scores / x.t,
            (False, False): 10 + 24 / x.t,
            (True, False): 34 / x.t,
        }
        for (split, kept), factor in rows.items():
            found = sum(layer(x, sequence_parallel=split, scores=kept).values())
            assert found == pytest.approx(x.sbh * factor)
        assert layer(x, full=True) == {"inputs": 2 * x.sbh}


def test_korthikanti_s_ends() -> None:
    x = letters(t=8, p=1)
    assert ends(x)["head"] == pytest.approx(4 * x.sbh / 8 * (1 + x.v / x.h))
    assert ends(x)["embedding"] == x.sbh / 8
    assert ends(letters(p=4)) == {"embedding": 4 * letters().sbh, "head": 0}


#: The Playbook's pictures, in GiB: tokens to activations of one sequence, with scores and without.
LLAMA_8B = {1024: 9.25390625, 2048: 28.5078125, 4096: 97.015625, 8192: 354.03125, 16384: 1348.0625}
LLAMA_1B = {1024: 3.564453125, 2048: 12.12890625, 4096: 44.2578125, 8192: 168.515625}
WITHOUT_SCORES = {1024: 4.25, 4096: 17.0, 16384: 68.0, 65536: 272.0, 131072: 544.0}


def test_the_playbook_s_pictures_of_activations() -> None:
    for sizes, drawn in (
        ({"h": 4096, "a": 32, "layers": 32}, LLAMA_8B),
        ({"h": 2048, "a": 32, "layers": 16}, LLAMA_1B),
    ):
        for s, gib in drawn.items():
            x = letters(s=s, **sizes)
            # The picture adds the mask of the embedding's dropout, sbh, which the formula in the text has not.
            assert (sum(blocks(x).values()) + x.sbh) / GiB == gib
    for s, gib in WITHOUT_SCORES.items():
        assert sum(blocks(letters(s=s), scores=False).values()) / GiB == gib


def test_the_playbook_s_states() -> None:
    # Table: 1, 7, 70 and 405 billion parameters need 16, 112, 1120 and 6480 GB.
    for billions, printed in ((1, 16), (7, 112), (70, 1120), (405, 6480)):
        for mixed in (True, False):
            assert sum(peer_playbook.model_states(billions * 1e9, mixed=mixed).values()) == printed * GB
    # Pictures: 4 bytes for each of its N, and for one learned position a token; t divides parameters evenly.
    for hidden, layers, s, gib in (
        (4096, 32, 1024, 25.979034423828125),
        (4096, 32, 16384, 26.213409423828125),
        (3072, 28, 1024, 13.296180725097656),
        (2048, 16, 1024, 3.9879302978515625),
        (2048, 16, 8192, 4.0426177978515625),
    ):
        counted = peer_playbook.simple_parameters(hidden, layers, 128256)
        assert 4 * (counted + s * hidden) / GiB == gib


def test_transformer_math_s_bytes() -> None:
    for optimizer, kept in (("adamw", 12), ("adamw-8bit", 6), ("sgd-momentum", 8)):
        found = transformer_math.model_states(1, optimizer=optimizer)
        assert found["fp32 copy"] + found["moments"] == kept
        assert (found["weights"], found["gradients"]) == (2, 2)
        alone = transformer_math.model_states(1, optimizer=optimizer, mixed=False)
        assert (alone["weights"], alone["gradients"], alone["fp32 copy"]) == (4, 4, 0)
    for stage in range(4):  # the same sums as ZeRO's
        ours = transformer_math.model_states(7e9, ranks=64, stage=stage)
        assert ours == pytest.approx(peer_zero.model_states(7e9, ranks=64, stage=stage))


def test_megatron_s_bytes() -> None:
    assert sum(peer_megatron.bytes_per_parameter().values()) == 18
    for d in (1, 2, 64):
        assert sum(peer_megatron.bytes_per_parameter(d).values()) == pytest.approx(6 + 12 / d)
    # A log of a fork that prints the same sum: 4.1055 billion parameters over 2 ranks are 46983.28 MB (MiB).
    assert 4.1055e9 * sum(peer_megatron.bytes_per_parameter(2).values()) / MiB == pytest.approx(
        46983.28, rel=2e-5
    )


def test_megatron_s_parameters() -> None:
    # Without biases and with a whole vocabulary its count is the model's own.
    case = Case(kernels="hf", family="llama", size="8b", recipe="mixed-bf16", seq=2048)
    assert peer_megatron.shard_parameters(case) == count_params(preset("llama-3-8b")).total
    case = Case(kernels="paper", family="mixtral", size="8b", recipe="mixed-bf16", seq=1000)
    router = 32 * 4096 * 8
    assert peer_megatron.shard_parameters(case) == count_params(preset("mixtral-8x7b")).total - router


def test_megatron_s_activations_are_table_2_with_sequence_parallelism() -> None:
    case = Case(
        kernels="paper",
        family="gpt2",
        size="8b",
        seq=2048,
        recipe="mixed-bf16",
        recompute="selective",
        tensor="4+sp",
    )
    x = shape(case)
    paper = sum(blocks(x, sequence_parallel=True, scores=False).values()) + sum(ends(x).values())
    ids = 8 * x.s * x.b / x.t  # Megatron counts the tokens, too
    assert sum(peer_megatron.activations(case).values()) == pytest.approx(paper + ids)


def test_eleuther_s_log() -> None:
    # A run of the script in its pull request 37 prints 56.19 B parameters for these sizes.
    found = peer_cookbook.counted_parameters(8192, 80, 152064, 1024, width=3 * 8192)
    assert f"{found / 1e9:.2f}" == "56.19"


def test_eleuther_s_activations_are_korthikanti_s_at_two_bytes() -> None:
    peer = find_peer("EleutherAI's calculator", "activations")
    case = next(
        c
        for c in covered(peer)
        if c.recipe in SIXTEEN_BITS and c.attention == "plain" and c.recompute == "none" and c.tp == 1
    )
    assert peer.predict(case) == round(sum(blocks(shape(case)).values()))


def test_transformers_eighteen() -> None:
    assert sum(peer_deepspeed.documented_bytes(True).values()) == 18
    assert sum(peer_deepspeed.documented_bytes(False).values()) == 16
    assert sum(peer_deepspeed.documented_bytes(False, "sgd-momentum").values()) == 12


def test_accelerate_s_table_of_bert() -> None:
    # Documentation: bert-base-cased is 413.18 MB in float32; training takes 1.61 GB, in float16 826.36 MB (all binary).
    size = 413.18 * MiB
    assert max(training_usage(size, mixed=False).values()) / GiB == pytest.approx(1.61, abs=0.005)
    assert max(training_usage(size, mixed=True).values()) / MiB == pytest.approx(826.36, abs=0.005)


# What a peer is.


def test_every_peer_is_named_cites_and_covers_something() -> None:
    keys = [(peer.name, peer.quantity) for peer in PEERS]
    assert len(set(keys)) == len(keys)
    assert set(REASONS) == set(keys)
    assert len(peer_names()) >= 9
    for peer in PEERS:
        assert peer.quantity in QUANTITIES
        assert peer.citation
        assert peer.name == "this course" or (
            peer.url.startswith("https://") and f"{{{peer.key}," in BIBLIOGRAPHY
        )
        assert covered(peer), (peer.name, peer.quantity)
        for case in grid():
            assert isinstance(peer.covers(case), str)


def test_what_is_not_covered_is_refused_with_the_reason() -> None:
    case = Case(kernels="hf", recipe="fp32", tuning="lora")
    for peer in PEERS:
        if peer.name != "this course":
            assert peer.covers(case)
            with pytest.raises(ValueError, match="does not cover tiny-llama"):
                peer.predict(case)
    with pytest.raises(ValueError, match="no peer is named 'ZeRO' and says 'total'; there are ZeRO: states"):
        find_peer("ZeRO", "total")


def test_formulas_of_one_origin_agree_where_all_hold() -> None:
    peers = [
        p
        for p in PEERS
        if p.quantity == "activations" and p.name in ("Transformer Math 101", "Ultra-Scale Playbook")
    ]
    both = [case for case in grid() if not any(peer.covers(case) for peer in peers)]
    assert len(both) >= 5
    for case in both:
        assert len({peer.predict(case) for peer in peers}) == 1


def test_states_of_mixed_precision_are_sixteen_bytes_for_four_texts() -> None:
    """2 + 2 + 12 of the papers are the 4 + 4 + 8 of FSDP2: the identity behind the sentences."""
    names = ("ZeRO", "Transformer Math 101", "Ultra-Scale Playbook")
    for case in covered(find_peer("Ultra-Scale Playbook", "states")):
        measured = OF[case.name]["measured"]
        for name in names:
            peer = find_peer(name, "states")
            if not peer.covers(case):
                assert peer.predict(case) == pytest.approx(measured_bytes(measured, "states"), rel=2e-3)


# Both sides, term by term.


def test_gaps_sum_to_the_difference() -> None:
    for row in COMMITTED["rows"]:
        peer, case = find_peer(row["peer"], row["quantity"]), Case(**OF[row["case"]]["case"])
        if row["peer"] in (
            "Accelerate",
            "this course",
        ):  # judged by what they said, which may not be the formula
            continue
        whole = sum(gaps(peer, case, OF[row["case"]]["measured"]).values())
        assert whole == pytest.approx(row["predicted"] - row["measured"], abs=1)


def test_measured_terms_sum_to_what_was_measured() -> None:
    for row in TABLE["rows"]:
        case = Case(**row["case"])
        for quantity in QUANTITIES:
            if quantity == "total" and case.kernels == "paper":
                with pytest.raises(ValueError, match="no measured total"):
                    measured_bytes(row["measured"], quantity)
                continue
            terms = measured_terms(case, row["measured"], quantity)
            assert sum(terms.values()) == measured_bytes(row["measured"], quantity)
            if quantity == "activations" and case.tuning == "full" and case.pp == 1:
                # What no term names is masks: little. A stage keeps its outputs, too.
                assert abs(terms["other"]) <= 0.02 * sum(terms.values())


def test_a_cause_is_the_largest_gap_of_the_right_sign() -> None:
    for row in COMMITTED["rows"]:
        if row["peer"] in ("Accelerate", "this course"):
            continue
        peer, case = find_peer(row["peer"], row["quantity"]), Case(**OF[row["case"]]["case"])
        found = gaps(peer, case, OF[row["case"]]["measured"])
        if not row["cause"]:
            assert abs(sum(found.values())) <= CLOSE * row["measured"]
        elif row["cause"] != "parameters":
            # At least as large as its share of all terms of its sign.
            sign = math.copysign(1, sum(found.values()))
            same = [sign * gap for gap in found.values() if sign * gap > 0]
            assert sign * found[row["cause"]] == max(same)


def test_a_peer_with_another_number_of_parameters_is_told_so() -> None:
    peer = find_peer("Ultra-Scale Playbook, its N", "states")
    causes = {case.family: main_cause(peer, case, OF[case.name]["measured"]) for case in covered(peer)}
    assert causes["llama"] == "parameters"


# The sentences.


def test_every_summary_has_one_sentence_with_its_numbers() -> None:
    for row in COMMITTED["summary"]:
        assert row["why"].endswith(".")
        assert row["why"].count(". ") == 0, row["why"]
        assert "{" not in row["why"]


def test_a_stale_sentence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = find_peer("Ultra-Scale Playbook", "activations")
    row = next(r for r in COMMITTED["summary"] if (r["peer"], r["quantity"]) == (peer.name, peer.quantity))
    case, measured = Case(**OF[row["worst_case"]]["case"]), OF[row["worst_case"]]["measured"]
    assert why(peer, case, measured, peer.predict(case)) == row["why"]
    monkeypatch.setitem(
        peer_reasons.REASONS, (peer.name, peer.quantity), peer_reasons.Reason("norms", "Norms.")
    )
    with pytest.raises(ValueError, match=r"the largest gap is in 'head', and the reason given is of 'norms'"):
        why(peer, case, measured, peer.predict(case))
    monkeypatch.delitem(peer_reasons.REASONS, (peer.name, peer.quantity))
    with pytest.raises(ValueError, match="reason given is missing"):
        why(peer, case, measured, peer.predict(case))


def test_what_the_sentences_call_the_cause_is_most_of_the_gap() -> None:
    """Where one term is named alone, it is at least a third of the miss, and mostly all of it."""
    for row in COMMITTED["summary"]:
        reason = REASONS[row["peer"], row["quantity"]]
        if reason.term in ("", None, "parameters") or row["peer"] == "Accelerate":
            continue
        peer, measured = find_peer(row["peer"], row["quantity"]), OF[row["worst_case"]]["measured"]
        found = gaps(peer, Case(**OF[row["worst_case"]]["case"]), measured)
        assert found[reason.term] / sum(found.values()) > 1 / 3, row["peer"]


# The committed comparison.


def test_rows_are_of_the_memory_table() -> None:
    for row in COMMITTED["rows"]:
        assert row["measured"] == measured_bytes(OF[row["case"]]["measured"], row["quantity"])
        assert row["ratio"] == round(row["predicted"] / row["measured"], 4)
    for peer in PEERS:
        own = [
            r["case"] for r in COMMITTED["rows"] if (r["peer"], r["quantity"]) == (peer.name, peer.quantity)
        ]
        assert own == [case.name for case in covered(peer)]
    assert COMMITTED["left_out"] == left_out(TABLE)


def test_nothing_drifted() -> None:
    """Every prediction again, Accelerate's by its own code."""
    found = CliRunner().invoke(app, ["memory-peers"])
    assert found.exit_code == 0, found.output


def test_the_summary_is_of_the_rows() -> None:
    assert COMMITTED["summary"] == summary(COMMITTED["rows"], TABLE)
    for row in COMMITTED["summary"]:
        assert row["low"] <= row["median"] <= row["high"]
        assert row["worst"] in (row["low"], row["high"]) or row["worst"] == pytest.approx(
            row["high"], rel=1e-3
        )
    own = {row["quantity"]: row for row in COMMITTED["summary"] if row["peer"] == "this course"}
    assert own["states"]["worst"] == 1
    assert own["states"]["cases"] == own["activations"]["cases"] == len(grid())


def test_this_course_is_judged_by_what_it_says() -> None:
    for peer in (p for p in PEERS if p.name == "this course"):
        for case in covered(peer)[::9]:
            row = next(
                r
                for r in COMMITTED["rows"]
                if (r["case"], r["peer"], r["quantity"]) == (case.name, peer.name, peer.quantity)
            )
            assert peer.predict(case) == row["predicted"]


def test_a_number_that_moved_is_found() -> None:
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
    assert drifted(COMMITTED, COMMITTED) == []
    # Another version of Accelerate may count other buffers.
    other = copy.deepcopy(COMMITTED)
    other["versions"]["accelerate"] = "0.1"
    for row in other["rows"]:
        row["predicted"] += row["peer"] == "Accelerate"
    assert drifted(other, COMMITTED) == []


# The installed ones.


@pytest.mark.parametrize("case", covered(find_peer("Accelerate", "states"))[::3], ids=lambda case: case.name)
def test_accelerate_itself_says_the_formula(case: Case) -> None:
    """Its own code on a meta model: four or two times the model in fp32, and the buffers of rotary embeddings."""
    usage = accelerate_usage(case)
    formula = find_peer("Accelerate", "states").predict(case)
    buffers = 4 * sum(buffer.numel() for buffer in meta_model(case).buffers())
    assert max(usage.values()) == formula + buffers * (4 if case.recipe == "fp32" else 2)
    row = next(r for r in COMMITTED["rows"] if r["peer"] == "Accelerate" and r["case"] == case.name)
    assert row["predicted"] == max(usage.values())


def test_meta_models_need_real_kernels() -> None:
    with pytest.raises(ValueError, match="kernels='paper' cannot be built on the meta device"):
        meta_model(Case(kernels="paper"))


def test_deepspeed_s_record_is_the_formula() -> None:
    peer, record = find_peer("DeepSpeed", "states"), COMMITTED["deepspeed"]
    assert record["version"]
    assert list(record["cases"]) == [case.name for case in covered(peer)]
    for name, said in record["cases"].items():
        case = Case(**OF[name]["case"])
        assert {k: v for k, v in said.items() if k != "gpu"} == peer_deepspeed.estimator_arguments(case)
        assert said["gpu"] == pytest.approx(peer.predict(case), abs=2)


def test_without_deepspeed_its_record_must_be_of_these_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_table, "installed_version", lambda package: None)
    kept = COMMITTED["deepspeed"]
    assert deepspeed_record(TABLE, kept) == kept
    for wrong in (None, {"version": "0", "cases": {}}):
        with pytest.raises(
            ValueError, match="DeepSpeed is not installed, and its record is not of these cases"
        ):
            deepspeed_record(TABLE, wrong)


@needs_deepspeed
@pytest.mark.filterwarnings("ignore")
def test_deepspeed_itself_says_the_record() -> None:
    for name, said in COMMITTED["deepspeed"]["cases"].items():
        assert deepspeed_estimate(Case(**OF[name]["case"])) == said


# The command and the picture.


def test_the_command_prints_the_committed_comparison() -> None:
    found = CliRunner().invoke(app, ["memory-peers", "--committed"])
    assert found.exit_code == 0
    for name in peer_names():
        assert name in found.output
    wrong = CliRunner().invoke(app, ["memory-peers", "--committed", "--write"])
    assert wrong.exit_code == 2
    assert "leave --committed out" in wrong.output


def test_the_command_fails_where_something_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = copy.deepcopy(COMMITTED)
    moved["rows"][0]["predicted"] += 1
    monkeypatch.setattr(peer_table, "peer_table", lambda **_: moved)
    found = CliRunner().invoke(app, ["memory-peers"])
    assert found.exit_code == 1
    assert "ZeRO, states" in found.output


def test_what_is_written_is_read(tmp_path) -> None:
    path = peer_table.save_peers(COMMITTED, tmp_path / "peers.json")
    assert json.loads(path.read_text(encoding="utf-8")) == COMMITTED == read_table(path)


def test_the_picture_has_a_line_for_every_summary() -> None:
    import matplotlib.pyplot as plt

    from lablib.view.memory_peers import peer_ratios

    fig = peer_ratios(COMMITTED["summary"])
    (ax,) = fig.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        f"{r['peer']} ({r['cases']})" for r in COMMITTED["summary"]
    ]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in dots] == [row["median"] for row in COMMITTED["summary"]]
    plt.close(fig)
    with pytest.raises(ValueError, match="quantity='time' must be one of states, activations, total"):
        peer_ratios([{"quantity": "time"}])


def test_rows_can_be_made_for_one_peer() -> None:
    peer = find_peer("Korthikanti et al.", "activations")
    assert peer_rows(TABLE, [peer]) == [r for r in COMMITTED["rows"] if r["peer"] == peer.name]
