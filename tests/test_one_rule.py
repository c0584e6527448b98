"""Two thousand drawn jobs, asked wherever a job can be asked: one yes or no, the same bytes, the same verdict."""

import random

import pytest

from lablib.calc.layouts.fit import setup
from lablib.calc.layouts.fit.settings import step_seconds
from lablib.calc.layouts.planner import FIELDS, Plan, layout_peak, plan, step_time
from lablib.calc.memory import RESERVE, run_config, verdict
from lablib.calc.memory.timeline import memory_peak

MODELS = ("llama-3-8b", "llama-3.2-1b", "qwen2.5-0.5b", "gpt2", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b")
GPU = "h100"


def draw(dice: random.Random) -> dict:
    """Return a job that may be impossible in any way, and more often in one than in many."""
    one = [dice.random() < 0.6 for _ in range(8)]
    tp, cp, dp = (1 if easy else dice.choice((2, 3, 4, 8)) for easy in one[:3])
    pp = 1 if one[3] else dice.choice((2, 4, 5))
    chunks = dice.choice((1, 1, 2)) if pp > 1 else 1
    return {
        "model": dice.choice(MODELS),
        "tp": tp,
        "cp": cp,
        "dp": dp,
        "pp": pp,
        "ep": 1 if one[4] else dice.choice((2, 4, 8, 16)),
        "etp": None if one[5] else dice.choice((1, 2)),
        "seq": 1024 if one[6] else dice.choice((512, 1000, 1022, 2048)),
        "cp_way": dice.choice(("ring", "gathered", "ulysses")),
        "sequence_parallel": tp > 1 and dice.random() < 0.7,
        "imbalance": 1.0 if one[7] else dice.choice((1.5, 3.0, 6.0)),
        "recompute": dice.choice(("none", "selective", "full")),
        "zero": dice.choice((0, 1, 2, 3)),
        "micro_batch": dice.choice((1, 2)),
        "virtual_stages": chunks,
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "num_microbatches": dice.choice((4, 6, 8)),
        "shard": dice.choice((2, 4, 8)) if dice.random() < 0.2 else None,
        "optimizer": dice.choice(("adamw", "adamw", "adamw-8bit", "sgd")),
        "offload": "none" if dice.random() < 0.8 else dice.choice(("optimizer", "gradients", "parameters")),
        "tuning": "full" if dice.random() < 0.8 else dice.choice(("lora", "qlora")),
    }


JOBS = [draw(random.Random(f"job {number}")) for number in range(2000)]


def gpus_of(job: dict) -> int:
    """Return the ranks of a job."""
    return job["dp"] * job["tp"] * job["cp"] * job["pp"]


def settings(job: dict) -> dict:
    """Return a job in the calculator's terms, with what the planner takes for granted said."""
    return {name: value for name, value in job.items() if name != "model"} | {"gradient_as_bucket_view": True}


def planned(job: dict) -> Plan:
    """Return the plan of the one layout that a job is."""
    return plan(
        job["model"], gpus=gpus_of(job), gpu=GPU, gpus_per_node=gpus_of(job), seq=job["seq"],
        global_batch=job["dp"] * job["micro_batch"] * job["num_microbatches"], cp_way=job["cp_way"],
        imbalance=job["imbalance"], sequence_parallel=job["sequence_parallel"], optimizer=job["optimizer"],
        offload=job["offload"], tuning=job["tuning"], reserve=RESERVE, **{name: job[name] for name in FIELDS},
    )  # fmt: skip


def asked(function):
    """Return what a function answers, or its words where it refuses."""
    try:
        return function()
    except ValueError as error:
        return str(error)


@pytest.mark.drawn
def test_everybody_says_the_same_of_two_thousand_jobs():
    """A yes of the planner is one of the calculator and of `fit`, with the same peak and the same verdict."""
    runs, other = 0, []
    for job in JOBS:
        run = asked(lambda job=job: run_config(job["model"], **settings(job)))
        fit = asked(lambda job=job: setup(job["model"], gpu=GPU, gpus_per_node=gpus_of(job), **settings(job)))
        found = asked(lambda job=job: planned(job))
        refused = [one for one in (run, fit, found) if isinstance(one, str)]
        if len(refused) in (1, 2):
            other.append((job, refused))
        elif not refused:
            runs += 1
            (layout,) = [*(one.layout for one in found.candidates), *(one.layout for one in found.dropped)]
            peak = layout_peak(found.load, layout, found.counting)
            assert step_seconds(fit) == pytest.approx(
                sum(step_time(found.load.step_work(layout), found.load.rates()).values())
            )
            assert peak.total == memory_peak(run).instant.total == fit.memory, job
            assert bool(found.candidates) == fit.within_budget == (verdict(peak.total, GPU).word == "fits"), job
    assert other == []
    assert runs > 200, "some of them can be"
