"""Every faulty run shows its own symptom and nobody else's; the healthy one shows none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lablib.launch.ranks import run_ranks
from lablib.toys.data_parallel import DIAGNOSES, Chart, diagnosis, train_regression
from lablib.toys.data_parallel.faulty_runs import get_run

LETTERS = "ABCDE"
RANKS = 4


def charts_of_all(epochs: int) -> dict[str, Chart]:
    return {letter: train_regression(letter, epochs=epochs) for letter in LETTERS}


@pytest.fixture(scope="module")
def charts() -> dict[str, list[Chart]]:
    by_rank = run_ranks(charts_of_all, RANKS, 8)
    return {diagnosis(letter): [results[letter] for results in by_rank] for letter in LETTERS}


@pytest.fixture(scope="module")
def alone() -> Chart:
    healthy = next(letter for letter in LETTERS if diagnosis(letter) == "healthy")
    return run_ranks(charts_of_all, 1, 8)[0][healthy]


# The symptoms, each as one number or yes/no


def norm_factor(charts: list[Chart], alone: Chart) -> float:
    """First gradient norm on n ranks over that of one process on the same global batch."""
    return charts[0].gradient_norms[0] / alone.gradient_norms[0]


def start_apart(charts: list[Chart]) -> float:
    return max((chart.weights[0] - charts[0].weights[0]).abs().max().item() for chart in charts)


def distinct_samples(charts: list[Chart]) -> int:
    return len({index for chart in charts for index in chart.samples[0][0]})


def same_order(charts: list[Chart]) -> bool:
    return charts[0].samples[0] == charts[0].samples[1]


def healthy_curve(charts: list[Chart], alone: Chart) -> bool:
    means = [sum(losses) / len(charts) for losses in zip(*(chart.losses for chart in charts), strict=True)]
    return means == pytest.approx(alone.losses, rel=1e-3)


def test_the_healthy_one_is_one_process_divided(charts, alone) -> None:
    healthy = charts["healthy"]
    assert norm_factor(healthy, alone) == pytest.approx(1, rel=1e-4)
    assert healthy_curve(healthy, alone)
    for steps in zip(*(chart.weights for chart in healthy), strict=True):
        assert all(torch.equal(weights, steps[0]) for weights in steps)
    for epoch, steps in enumerate(alone.samples):
        for step, indices in enumerate(steps):
            assert sorted(i for chart in healthy for i in chart.samples[epoch][step]) == sorted(indices)


@pytest.mark.parametrize("illness", DIAGNOSES)
def test_each_has_its_own_symptom_only(charts, alone, illness: str) -> None:
    seen = charts[illness]
    summed, apart, same_data, no_epoch = (illness == name for name in DIAGNOSES[1:])
    if not (apart or same_data):  # those two see other gradients, of no simple size
        assert norm_factor(seen, alone) == pytest.approx(RANKS if summed else 1, rel=1e-4)
    assert (start_apart(seen) > 0.01) == apart
    assert distinct_samples(seen) == (2 if same_data else 8)
    assert same_order(seen) == no_epoch
    assert (len({chart.losses[0] for chart in seen}) == 1) == same_data
    assert healthy_curve(seen, alone) == (illness == "healthy")


@pytest.mark.parametrize("illness", DIAGNOSES)
def test_every_loss_falls(charts, illness: str) -> None:
    """That is what makes these failures dangerous."""
    curves = [chart.losses for chart in charts[illness]]
    first, last = (sum(sum(c[part]) for c in curves) for part in (slice(0, 6), slice(-6, None)))
    assert last < 0.9 * first


def wrap_own_model() -> list[str]:
    """A patient's parts have the interface of the right thing, and do not give themselves away."""
    names = []
    for letter in LETTERS:
        chosen = get_run(letter)
        model = chosen.wrap(nn.Linear(2, 1))
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        model.sync()
        sampler = chosen.sampler(10, ranks=dist.get_world_size(), rank=dist.get_rank())
        sampler.set_epoch(3)
        assert len(list(sampler)) == 5
        names.append(f"{chosen} {type(model).__name__} {type(sampler).__name__}".replace(letter, "X"))
    return names


def test_patients_look_alike() -> None:
    for names in run_ranks(wrap_own_model, 2):
        assert len(set(names)) == 1


def does_not_divide() -> None:
    with pytest.raises(ValueError, match="ranks=3 does not divide global_batch=8"):
        train_regression("A")


def test_bad_input() -> None:
    run_ranks(does_not_divide, 3)
    with pytest.raises(ValueError, match="no run 'Z'; there are A, B, C, D, E"):
        get_run("Z")
    assert sorted(diagnosis(letter) for letter in LETTERS) == sorted(DIAGNOSES)
