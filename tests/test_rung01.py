"""Rung 01: its checks hold for every draw, agree with lablib's tables, and its figures draw what they are given."""

import pytest

from lablib.calc.parallel import zero_state_bytes
from lablib.calc.precision import recipe
from lablib.checks import rung01
from tests import defects_rung01

CASES = [(name, defect) for name, defects in defects_rung01.DEFECTS.items() for defect in defects]


@pytest.mark.parametrize("name", defects_rung01.SECOND_SOLUTIONS)
def test_right_answers_pass_whatever_is_drawn(name):
    answer = defects_rung01.SECOND_SOLUTIONS[name]
    assert {getattr(rung01, name)(answer, seed).status for seed in range(12)} == {"passed"}


@pytest.mark.parametrize(("name", "defect"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_defect_is_caught_whatever_is_drawn(name, defect):
    assert {getattr(rung01, name)(defect, seed).status for seed in range(12)} == {"wrong"}


def test_an_unexpected_error_of_an_answer_keeps_its_own_text():
    verdict = rung01.run_memory(lambda config, optimizer, seq, batch: seq + "tokens")
    assert (verdict.status, "stopped with TypeError" in verdict.message) == ("wrong", True)


def test_a_check_says_its_seed_and_what_it_drew(capsys):
    rung01.run_memory(defects_rung01.run_memory.right, 7)
    printed = capsys.readouterr().out
    assert "drawing cases with seed 7" in printed
    assert printed.count("layers, hidden") == 8


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "master"),
    [
        ("fp32", "fp32", ("fp32",), False),
        ("mixed-bf16", "bf16", ("bf16",), True),
        ("mixed-bf16-fp32-grads", "bf16", ("fp32",), True),
        ("mixed-bf16-fp32-accum", "bf16", ("bf16", "fp32"), True),
        ("pure-bf16-fp32-moments", "bf16", ("bf16",), False),
    ],
)
@pytest.mark.parametrize("optimizer", rung01.MOMENT_BYTES)
def test_the_exercise_counts_as_the_recipes_do(name, weights, gradients, master, optimizer):
    counted = defects_rung01.bytes_per_parameter.right(weights, gradients, master, optimizer)
    assert counted == recipe(name).bytes_per_param(optimizer)


@pytest.mark.parametrize("stage", range(4))
def test_the_exercise_shards_as_zero_does(stage):
    params, gpus = 13_015_864_320, 4
    strategy = ("ddp", "zero-1", "zero-2", "zero-3")[stage]
    gigabytes, _ = defects_rung01.fits.right(params, gpus, 80, strategy)
    assert gigabytes == pytest.approx(zero_state_bytes(params, gpus, stage) / 1e9, rel=1e-9)
