"""What the checks of rung 03 say where an answer fails or waits on its ranks: one sentence, no traceback, no hang."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lablib.checks import rung03
from lablib.checks.judging import on_ranks
from lablib.checks.judging import ranks as judging_ranks
from tests import defects_rung03
from tests.scripts import load
from tests.standing_ranks import standing_ranks


def test_ranks_that_wait_for_each_other_are_ended_with_a_sentence(monkeypatch):
    monkeypatch.setattr(rung03, "on_ranks", partial(on_ranks, patience=4.0))

    def only_rank_0_calls(x, up, up_bias, down, down_bias, group):
        part = x * 1.0
        if group.rank() == 0:
            dist.all_reduce(part, group=group)
        return part

    verdict = rung03.split_mlp(only_rank_0_calls)
    assert verdict.status == "wrong"
    assert "ranks 0, 3 had not come back: a collective waits until every rank" in verdict.message


def test_an_error_on_a_rank_is_one_sentence():
    def wrong_dim(x, up, up_bias, down, down_bias, group):
        mine = slice(0, x.shape[-1] // 2)
        return F.linear(x, up[:, mine])

    verdict = rung03.split_mlp(wrong_dim)
    assert verdict.status == "wrong"
    assert verdict.message.startswith("Your answer stopped on rank ")
    assert "\n" not in verdict.message


def _behind_tanh():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = torch.full((2,), 0.5, requires_grad=True)
        y = torch.tanh(x)
        dist.all_reduce(y)
        y.sum().backward()
    return x.grad, " ".join(str(warning.message) for warning in told)


def test_a_sum_in_place_is_wrong_behind_a_saved_output():
    for grad, told in on_ranks(_behind_tanh, 2):
        tanh = torch.tanh(torch.tensor(0.5))
        assert torch.allclose(grad, 1 - (2 * tanh) ** 2)  # of the sum, where 1 - tanh^2 is right
        assert "an autograd kernel was not registered" in told


def test_a_fault_is_found_whatever_is_drawn(monkeypatch):
    found = load("labs/solutions/rung03.py").find_fault
    with standing_ranks() as ranks:
        monkeypatch.setattr(judging_ranks, "run_ranks", ranks)
        for seed in (2, 3):
            assert rung03.find_fault(found, seed).status == "passed"
            assert rung03.find_fault(defects_rung03.find_fault.forward_alone, seed).status == "wrong"


def test_a_healthy_job_is_one_process_up_to_the_order_of_sums():
    """And a fault is larger by far: what `find_fault` may take for one lies in between."""
    kinds = {seed: rung03._drawn(seed)[0] for seed in range(24)}
    for found in on_ranks(_furthest, 2, list(kinds)):
        for (seed, kind), off in zip(kinds.items(), found, strict=True):
            assert off < 1e-5 if not kind else off > 1e-3, (seed, kind, off)


def _furthest(seeds):
    jobs = (rung03.Job(seed) for seed in seeds)
    return [max(defects_rung03._differences(job, dist.group.WORLD)[0].values()) for job in jobs]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda heads, kv, d, tp: None, "should be a list"),
        (lambda heads, kv, d, tp: [(range(d), range(d))] * tp, "needs query_rows, key_rows and sum_over"),
        (lambda heads, kv, d, tp: [{"query_rows": range(d)}] * tp, "needs query_rows, key_rows and sum_over"),
        (lambda heads, kv, d, tp: [(0.5, 1, [])] * tp, "should be a list"),
        (lambda heads, kv, d, tp: [([0.5], [1], [])] * tp, "should be a whole number"),
        (lambda heads, kv, d, tp: [(range(d), range(d), 0)] * tp, "sum_over of rank 0 should be a list"),
        (lambda heads, kv, d, tp: [(range(d), range(d), [tp])] * tp, "names ranks that do not exist"),
        (lambda heads, kv, d, tp: [(range(d), range(d), [])] * (tp - 1), "one triple for each"),
    ],
)
def test_heads_in_another_form_are_told_so(rows, said):
    verdict = rung03.split_qkv(rows)
    assert verdict.status == "wrong"
    assert said in verdict.message
