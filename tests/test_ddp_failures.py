"""The jobs of rung 02's fault: all losses fall, a healthy one is one process, and what its name hides is what is there."""

from __future__ import annotations

import pytest

from lablib.checks.rung02 import StrangeJob
from lablib.launch.ranks import run_ranks

NUMBERS = range(20)  # each case four times


def _losses() -> list[list[float]]:
    return [StrangeJob(number).train() for number in NUMBERS]


@pytest.fixture(scope="module")
def means() -> list[list[float]]:
    """The mean loss of all ranks, by job and step."""
    by_rank = run_ranks(_losses, StrangeJob.ranks)
    return [[sum(step) / len(step) for step in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]


def test_every_loss_falls(means) -> None:
    """That is what makes these faults dangerous."""
    assert all(losses[-1] < losses[0] for losses in means)


def test_only_a_healthy_job_is_one_process(means) -> None:
    for number, losses in zip(NUMBERS, means, strict=True):
        job = StrangeJob(number)
        truth, alone = object.__getattribute__(job, "_truth")(0), job.alone()  # an answer may not ask this
        assert (losses == pytest.approx(alone, rel=1e-9)) == (truth is None), number
        if truth is not None:  # a step's gradient shows in the loss of the next
            assert losses[: truth[1] + 1] == pytest.approx(alone[: truth[1] + 1], rel=1e-9)


def test_the_job_of_the_lab_is_wrong_enough_to_see(means) -> None:
    assert abs(means[6][-1] - StrangeJob(6).alone()[-1]) > 0.01
