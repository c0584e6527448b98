"""The situations of rung 09's last exercise are those of the calculator, and have a right answer each."""

import random

import pytest

from lablib.calc.memory.activations import recompute_cost
from lablib.calc.models import preset
from lablib.checks.rung09 import best_choice, job_of, jobs, peaks_of_first, selective_peak

CASES = [("gpt3-175b", 2048, "plain"), ("llama-3-8b", 4096, "fused"), ("llama-2-7b", 1024, "plain")]


@pytest.mark.parametrize(("model", "seq", "attention"), CASES)
def test_what_a_job_keeps_is_what_the_calculator_says_without_embedding_and_head(model, seq, attention):
    job = job_of(model, seq, attention, batch=2)

    def moments(strategy):
        cost = recompute_cost(preset(model), strategy, batch=2, seq=seq, attention=attention)
        return (cost.blocks_bytes, max(size for when, size in cost.instants[1:]) - cost.embedding, cost.extra_flops)

    forward, backward, extra = moments("selective")
    assert selective_peak(job) == max(forward, backward)
    assert extra == job.layers * job.core_flops
    for n in (1, job.layers // 2, job.layers):
        forward, backward, extra = moments(f"first:{n}")
        # Without its head a model's last blocks keep what they kept at the end of forward when backward starts.
        assert max(peaks_of_first(job, n)) == max(forward, backward)
        assert extra == n * job.block_flops


def test_every_kind_of_answer_is_asked_for():
    seed = random.randrange(10**6)
    print("seed", seed)
    found = [best_choice(job) for job in jobs(random.Random(seed))]
    kinds = {choice["strategy"].split(":")[0] if choice else None for choice in found}
    assert kinds == {"none", "selective", "first", None}


def test_no_other_choice_fits_and_costs_less():
    for job in jobs(random.Random(3)):
        choice = best_choice(job)
        cheaper = [n for n in range(1, job.layers + 1) if max(peaks_of_first(job, n)) <= job.budget]
        if choice is None:
            assert not cheaper
            assert selective_peak(job) > job.budget
        elif choice["strategy"] == "selective":
            assert all(n * job.block_flops >= choice["extra"] for n in cheaper)
        elif choice["strategy"] != "none":
            assert int(choice["strategy"][6:]) == min(cheaper)
            assert job.layers * job.block > job.budget
