"""Goodput of machines that die: closed forms against simulations and published numbers, and in the bill.

Simulations are seeded. Where one is compared with a closed form, ten seeds give its mean and the standard error of that
mean, from the ten themselves, and the two are within five such errors.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import astuple, replace
from statistics import mean, stdev

import pytest
from typer.testing import CliRunner

from lablib.calc.layouts.planner import plan
from lablib.calc.runs import (
    LLAMA3_FAILURES,
    PUBLISHED_RUNS,
    RSC_FAILURES,
    RSC_MTTF_HOURS,
    ReplicaGroups,
    checkpointed_goodput,
    crossover,
    expected_ettr,
    group_goodput,
    lost_share,
    lost_time,
    mtbf_of_rate,
    plan_bill,
    rare_restarts,
    restart_instead,
    simulate_groups,
    simulate_restarts,
)
from lablib.calc.runs.replica_groups import restarting, stop_mtbf
from lablib.cli.main import app

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
RUNS = {run.name: run for run in PUBLISHED_RUNS}
EIGHT = {"gpus": 64, "groups": 8, "gpu_mtbf": 64 * HOUR, "stall": 60, "restart": 300, "repair": 20_000}
JOB = ["plan", "llama-3-8b", "--gpus", "256", "--seq", "8192", "--global-batch", "512", "--tokens", "15T"]


def agree(found, expected):
    error = stdev(found) / math.sqrt(len(found))
    assert abs(mean(found) - expected) <= 5 * error + 1e-12
    assert 5 * error < 0.1 * expected or expected == 0  # the bound says something


def llama(gpus, **changed):
    """As many groups of 128 GPUs as Llama 3's rate of failures takes, 5 % of the nodes spare."""
    common = {
        "gpu_mtbf": LLAMA3_FAILURES.gpu_mtbf,
        "stall": 30,
        "restart": 600,
        "repair": DAY,
        "spares": gpus * 5 // 800,
    }
    return ReplicaGroups(gpus=gpus, groups=gpus // 128, **common | changed)


def test_expected_ettr_is_the_first_order_of_the_law():
    # With a = (R + τ/2)/M and b = δ/τ: 1 - (1 - a)/(1 + b) = (a + b)/(1 + b), which is a + b but for (a + b) b/(1 + b).
    draw = random.Random(14)
    for _ in range(200):
        mtbf, interval = 10 ** draw.uniform(3, 6), 10 ** draw.uniform(1, 2.5)
        how = {"mtbf": mtbf, "cost": interval * draw.uniform(0, 0.2), "restart": mtbf * draw.uniform(0, 0.2)}
        first = lost_share(interval, **how | {"cost": max(how["cost"], 1e-9)})
        assert 0 <= first - (1 - expected_ettr(interval, **how)) <= first**2


def test_expected_ettr_gives_what_its_paper_prints():
    # RSC-1 as one job of 16,000 GPUs, restarts of 5 minutes: 0.7 at an hour between checkpoints, 0.93 at five minutes.
    mtbf = mtbf_of_rate(RSC_FAILURES["RSC-1"]) / 16_000
    assert expected_ettr(HOUR, mtbf=mtbf, restart=5 * MINUTE) == pytest.approx(0.7, abs=0.05)
    assert expected_ettr(5 * MINUTE, mtbf=mtbf, restart=5 * MINUTE) == pytest.approx(0.93, abs=0.005)
    # 0.9 on 100,000 GPUs that fail as RSC-2's takes 2 minutes for both.
    assert expected_ettr(120, mtbf=mtbf_of_rate(RSC_FAILURES["RSC-2"]) / 1e5, restart=120) > 0.9


def test_the_projections_follow_from_the_rate_and_what_was_counted_does_not():
    hours = {gpus: mtbf_of_rate(RSC_FAILURES["RSC-1"]) / gpus / HOUR for gpus in RSC_MTTF_HOURS}
    assert hours[16_384] == pytest.approx(RSC_MTTF_HOURS[16_384], abs=0.05)
    assert hours[131_072] == pytest.approx(RSC_MTTF_HOURS[131_072], abs=0.005)
    assert hours[1_024] > 3.5 * RSC_MTTF_HOURS[1_024]


def test_what_follows_for_published_runs():
    low, high = RUNS["Llama 3 405B"].predicted
    assert low < 0.90 < high  # "higher than 90 %" follows if a restart takes at most 10 to 20 minutes
    assert [round(seconds / MINUTE) for seconds in RUNS["Llama 3 405B"].longest_restart] == [11, 19]
    low, high = RUNS["ByteRobust, dense"].predicted
    assert low < 0.97 < high
    assert RUNS["OPT-175B"].predicted[0] > 0.59  # it does not follow: people and nodes came hours later
    assert RUNS["OPT-175B"].longest_restart[0] > 6 * HOUR
    low, high = RUNS["FT-HSDP"].predicted
    assert low < 0.80 < high
    # 44 % is (18 - 10)/18, as if each failure waited for the end of the restart before it.
    baseline = RUNS["FT-HSDP's baseline"]
    assert baseline.effective == pytest.approx(1 - baseline.restart / baseline.mtbf, abs=0.005)
    assert baseline.predicted[0] > 0.44


def test_published_runs_are_honest():
    for run in PUBLISHED_RUNS:
        assert "arXiv" in run.source
        assert (run.predicted is None) == (run.mtbf is None)
        if run.longest_restart:
            for cost, longest in zip((13.02, 0.01), run.longest_restart, strict=True):
                assert restarting(cost, run.mtbf, longest).useful == pytest.approx(run.effective)


@pytest.mark.parametrize(("interval", "cost", "restart"), [(600, 30, 400), (200, 30, 0), (4000, 300, 900)])
def test_played_restarts_agree_with_the_law(interval, cost, restart):
    how = {"cost": cost, "mtbf": HOUR, "restart": restart}
    law = lost_time(interval, **how)
    played = [simulate_restarts(interval, **how, intervals=10_000, seed=seed) for seed in range(10)]
    for name in ("useful", "checkpoint", "rework", "restart", "failures"):
        agree([getattr(one, name) for one in played], getattr(law, name))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"spares": 2},
        {"spares": 6},
        {"spares": 3, "restart": 1500, "min_groups": 6},
        {"repair": 0, "restart": 3000, "stall": 180},
        {"gpus": 16, "groups": 2, "gpu_mtbf": 16 * HOUR, "repair": 7200, "spares": 1, "node": 2},
        {"gpus": 16, "groups": 16, "gpu_mtbf": 16 * 1080, "node": 1, "stall": 180, "restart": 600, "repair": 0},
        {"spares": 4, "state_bytes": 8e12, "link": 1e9},
    ],
)
def test_played_groups_agree_with_the_closed_form(changed):
    job = ReplicaGroups(**EIGHT | changed)
    law = group_goodput(job)
    played = [simulate_groups(job, seconds=5e6, seed=seed) for seed in range(10)]
    for name in ("goodput", "living"):
        agree([getattr(one, name) for one in played], getattr(law, name))
    if not job.spares:  # where groups are independent, stalls are exact
        agree([one.stalled for one in played], law.stalled)
    for one in (law, *played):
        assert one.goodput + one.stalled + one.absent + one.idle == pytest.approx(1)
        assert min(astuple(one)) >= 0


def test_groups_by_hand():
    job = ReplicaGroups(**EIGHT)
    assert (job.mtbf, job.group_mtbf, job.idle) == (HOUR, 8 * HOUR, 0)
    # Without spares a group lives 8 h, is repaired and starts, whatever the others do.
    found = group_goodput(job)
    assert found.living == pytest.approx(8 * 8 * HOUR / (8 * HOUR + 20_000 + 300))
    # With a spare for each failure it is away for the start alone.
    many = group_goodput(replace(job, spares=60))
    assert many.living == pytest.approx(8 * 8 * HOUR / (8 * HOUR + 300))
    assert many.idle == pytest.approx(480 / 544)
    assert many.useful > found.useful
    # The last of two dies while the other is away: an alternating renewal each, alone for a chance a (1 - a).
    two = group_goodput(ReplicaGroups(**EIGHT | {"gpus": 16, "groups": 2, "gpu_mtbf": 16 * HOUR}))
    a = 2 * HOUR / (2 * HOUR + 20_300)
    assert two.all_gone == pytest.approx(2 * HOUR / (2 * a * (1 - a)))
    # 8e12 bytes over 8 GPUs that receive 1 GB/s each.
    assert replace(job, state_bytes=8e12, link=1e9).away == 300 + 1000


def test_more_spares_keep_more_groups_alive():
    living = [group_goodput(ReplicaGroups(**EIGHT, spares=spares)).living for spares in range(12)]
    assert living == sorted(living)
    assert living[-1] > 1.5 * living[0]


def test_groups_that_share_all_failures_restart_together():
    job = llama(16_384, shared=1.0)
    assert group_goodput(job).useful == 1
    assert rare_restarts(job, cost=13) == restart_instead(job, cost=13)
    alone = llama(16_384)
    assert stop_mtbf(alone) > 1e15  # never: no checkpoint is needed
    assert rare_restarts(alone, cost=13).useful == pytest.approx(1, abs=1e-6)


def test_groups_against_restarts_on_1024_and_16384_gpus():
    gain = {}
    for gpus in (1_024, 16_384):
        job = llama(gpus, shared=LLAMA3_FAILURES.share("Dependency"))
        gain[gpus] = checkpointed_goodput(job, cost=12.7) / restart_instead(job, cost=12.7).useful - 1
    assert 0 < gain[1_024] < 0.02 < gain[16_384]
    # So a step that takes 2 % more pays between them; at the crossover and not one group before.
    job = llama(1_024, shared=LLAMA3_FAILURES.share("Dependency"))
    groups = crossover(job, cost=12.7, slowdown=0.02)
    assert 1_024 < 128 * groups < 16_384
    for size, pays in ((groups, True), (groups - 1, False)):
        other = llama(128 * size, shared=job.shared, spares=round(job.spares * size / job.groups))
        assert (checkpointed_goodput(other, cost=12.7) / 1.02 > restart_instead(other, cost=12.7).useful) is pays
    assert crossover(job, cost=12.7, slowdown=0) == 2
    assert crossover(replace(job, shared=1.0), cost=12.7, slowdown=0.02) is None


def test_a_bill_by_replica_groups():
    found = plan("llama-3-8b", gpus=256, seq=8192, global_batch=512)
    together = plan_bill(found, tokens=15e12)
    made = plan_bill(found, tokens=15e12, replica_groups=together.replica_groups)
    assert together.with_groups == made
    assert together.replica_groups > 1
    assert made.goodput == made.lost.useful * made.group_goodput.useful > together.goodput
    assert made.days[1] * made.goodput == pytest.approx(together.days[1] * together.goodput)
    assert made.stop_mtbf == pytest.approx(made.mtbf / made.shared, rel=1e-6)
    assert f"{made.replica_groups} replica groups would have {made.goodput:.1%} by a model" in " ".join(
        together.text.split()
    )
    # No spare and a month of repair: a broken node costs its group that month.
    slow = plan_bill(found, tokens=15e12, replica_groups=8, spares=0, repair=30 * DAY)
    assert slow.goodput < together.goodput
    one = plan_bill(plan("llama-3-8b", gpus=8, seq=8192, global_batch=64), tokens=1e12)
    assert one.groups is one.with_groups is one.as_dict()["group_goodput"] is None
    assert "replica groups" not in one.text


def test_the_command_makes_the_bill_by_groups():
    found = plan("llama-3-8b", gpus=256, seq=8192, global_batch=512)
    made = plan_bill(found, tokens=15e12, replica_groups=4, repair=6 * HOUR)
    how = [*JOB, "--replica-groups", "4", "--repair", "6"]
    out = CliRunner().invoke(app, how).stdout
    assert out.endswith("\n\n" + made.text + "\n")
    assert max(map(len, out.splitlines())) <= 80
    assert "by a model of 4 replica groups of 64 GPUs" in " ".join(out.split())
    bill = json.loads(CliRunner().invoke(app, [*how, "--json"]).stdout)["bill"]
    assert bill == json.loads(json.dumps(made.as_dict()))
    assert bill["goodput"] == bill["group_goodput"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--replica-groups", "3"], "replica_groups=3 does not divide dp=256"),
        (["--replica-groups", "1"], "replica_groups=1 must be a whole number of at least 2"),
        (["--replica-groups", "64"], "makes groups of 4 GPUs, which are no whole nodes of 8"),
        (["--replica-groups", "32"], "a copy in each takes"),
        (["--replica-groups", "4", "--repair", "0"], "repair=0.0 must be a positive number"),
        (["--zero", "1", "--shard", "64", "--replica-groups", "8"], "which hold no whole copy"),
    ],
)
def test_what_cannot_be_groups_is_one_sentence(more, message):
    done = CliRunner().invoke(app, [*JOB, *more])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mtbf_of_rate(0), "rate=0 must be a positive number"),
        (lambda: expected_ettr(0, mtbf=1, restart=0), "interval=0 must be a positive number"),
        (lambda: expected_ettr(1, mtbf=1, restart=-1), "restart=-1 s and cost=0 s must not be negative"),
        (lambda: expected_ettr(4000, mtbf=HOUR, restart=2000), "loses more than the mtbf=3600 s"),
        (lambda: ReplicaGroups(**EIGHT | {"groups": 7}), "groups=7 does not divide gpus=64"),
        (lambda: ReplicaGroups(**EIGHT, min_groups=9), "min_groups=9 is more"),
        (lambda: ReplicaGroups(**EIGHT | {"stall": -1}), "stall=-1 must not be negative"),
        (lambda: ReplicaGroups(**EIGHT, link=0), "link=0 must be positive"),
        (lambda: ReplicaGroups(**EIGHT, shared=2), "shared=2 from 0 to 1"),
        (lambda: simulate_groups(ReplicaGroups(**EIGHT), seconds=0), "seconds=0 must be a positive number"),
        (lambda: crossover(ReplicaGroups(**EIGHT), cost=1, slowdown=-1), "slowdown=-1 must not be negative"),
    ],
)
def test_bad_input_is_one_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call()
