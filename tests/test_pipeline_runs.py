"""What the lab of rung 04 runs: bytes held against the prediction, emulated actions, medians that the simulator takes."""

import random

import pytest
import torch

from lablib.calc.schedules import Timeline, schedule, simulate, validate
from lablib.launch.layouts import (
    TORCH_SCHEDULES,
    fsdp_gathers,
    measured_times,
    microbatch_windows,
    predicted_peaks,
    torch_step,
    watched_step,
)
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Transformer, loss, tiny_config

SEED = random.SystemRandom().randrange(10**6)


def _count(schedules, configs, batch, seq):
    return [
        [watched_step(made, config, batch=batch, seq=seq, counts=True, steps=1) for made in schedules]
        for config in configs
    ]


def test_every_byte_that_a_schedule_holds_is_predicted():
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    p, batch, seq = 2, dice.randint(2, 3), dice.randint(3, 9)
    m = p * dice.randint(1, 3)
    sizes = {"num_layers": 5, "hidden": 8 * dice.randint(1, 3), "tied": False}
    configs = [tiny_config(family, **sizes) for family in ("gpt2", "llama")]
    schedules = [
        schedule(name, p, m, v)
        for name, v in (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1))
    ]
    ranks = run_ranks(_count, p, schedules, configs, batch, seq)
    for number, config in enumerate(configs):
        for i, made in enumerate(schedules):
            runs = [results[number][i] for results in ranks]
            predicted = predicted_peaks(made, config, batch=batch, seq=seq)
            assert [run.peak_bytes for run in runs] == predicted, (config.name, made.name)
            assert tuple(run.peak_in_flight for run in runs) == simulate(made).peak_in_flight
            assert sum(run.messages for run in runs) == 2 * (made.num_stages - 1) * m
        losses = [run.loss for run in ranks[-1][number]]
        assert losses == pytest.approx([losses[0]] * len(losses)), "every schedule takes the same step"


def test_an_emulated_action_lasts_as_long_as_it_is_told():
    config = tiny_config("gpt2", num_layers=4, hidden=8, tied=False)
    made = schedule("interleaved", 2, 2, 2)
    runs = run_ranks(_emulate, 2, made, config)
    for timeline in runs:
        assert timeline.schedule == made
        for event in timeline.events:
            # Two stages a rank: each takes half of the rank's time. Longer is the machine's affair.
            assert event.end - event.start >= {"F": 0.01, "B": 0.02}[event.action.kind] / 2


def _emulate(made, config):
    return watched_step(made, config, batch=1, seq=2, seconds={"F": 0.01, "B": 0.02}).timeline


def test_measured_times_are_medians_that_the_simulator_takes():
    made = schedule("zb-h1", 2, 3)
    given = {"forward": [1.0, 2.0], "input": [3.0, 4.0], "weight": [0.5, 0.25]}
    timeline = simulate(made, **given)
    assert measured_times(timeline) == given
    late = timeline.ranks[0][0]._replace(end=100.0)  # one action that was interrupted
    odd = Timeline(made, ((late, *timeline.ranks[0][1:]), timeline.ranks[1]), ())
    assert measured_times(odd) == given


def test_micro_batches_have_storages_of_their_own():
    windows = microbatch_windows(3, 2, 5)
    assert [tuple(window.shape) for window in windows] == [(2, 6)] * 3
    assert len({window.untyped_storage().data_ptr() for window in windows}) == 3
    assert all(a.equal(b) for a, b in zip(windows, microbatch_windows(3, 2, 5), strict=True))


def _torch_steps(config, m):
    return {name: torch_step(name, config, m, batch=1, seq=5) for name in TORCH_SCHEDULES}


def test_every_schedule_of_pytorch_takes_the_step_of_one_process():
    p, m = 2, 4
    config = tiny_config("gpt2", num_layers=4, hidden=16, tied=False)
    ranks = run_ranks(_torch_steps, p, config, m)
    torch.manual_seed(0)
    model = Transformer(config)
    windows = torch.cat(microbatch_windows(m, 1, 5))
    loss(model(windows[:, :-1]), windows).backward()
    for name in TORCH_SCHEDULES:
        runs = [results[name] for results in ranks]
        validate(runs[0].order)
        assert runs[0].order == runs[1].order
        assert [len(run.losses) for run in runs].count(m) == 1
        found = {key: grad for run in runs for key, grad in run.gradients.items()}
        assert set(found) == {key for key, _ in model.named_parameters()}
        # Sums of fp32 in another order: a thousand times the last digit of the largest gradient.
        largest = max(weight.grad.abs().max() for weight in model.parameters())
        for key, weight in model.named_parameters():
            assert (found[key] - weight.grad).abs().max() < 1e-4 * largest, (name, key)


def _gathers(config, m):
    return fsdp_gathers(config, m, reshard=True), fsdp_gathers(config, m, reshard=False)


def test_pytorch_gathers_a_resharded_stage_for_every_micro_batch_and_reduces_once():
    m = 3
    config = tiny_config("gpt2", num_layers=2, hidden=16, tied=False)
    for resharded, kept in run_ranks(_gathers, 4, config, m):
        assert resharded == (m + 1, 1)
        assert kept == (1, 1)
