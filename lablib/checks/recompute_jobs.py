"""Situations in which somebody has to decide what to recompute, computed from real models, and the right choice."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from lablib.calc.models import preset
from lablib.calc.recompute import recompute_cost


@dataclass(frozen=True)
class Job:
    """One micro-batch of a model on one device. Bytes and FLOPs are those of a single block.

    Attributes:
        layers: Blocks, all alike.
        boundary: Bytes of a block's input.
        block: Bytes that a block keeps when nothing runs again, its input included.
        core: Bytes of these that selective recomputation drops and the replay brings back.
        behind: Bytes that backward has released of a block by the time the replay of its core starts.
        block_flops: FLOPs of a block's forward pass.
        core_flops: FLOPs of its attention core.
        budget: Bytes that are left for what blocks keep.
        name: Model, sequence length and kind of attention.
    """

    layers: int
    boundary: int
    block: int
    core: int
    behind: int
    block_flops: int
    core_flops: int
    budget: int = 0
    name: str = ""

    @property
    def words(self) -> str:
        """The situation in a few words."""
        return f"{self.name}, budget {self.budget:,} bytes"


def job_of(model: str, seq: int, attention: str, *, batch: int = 1, budget: int = 0) -> Job:
    """Return the situation of a model: 16-bit values, the paper's counting.

    Args:
        model: A preset without experts.
        seq: Tokens in a sequence.
        attention: "plain" or "fused".
        batch: Sequences.
        budget: Bytes that are left for what blocks keep.
    """
    config = preset(model)
    none, selective, full = (
        recompute_cost(config, strategy, batch=batch, seq=seq, attention=attention).units[0]
        for strategy in ("none", "selective", "full")
    )
    return Job(
        layers=config.num_layers,
        boundary=full.stored,
        block=none.stored,
        core=none.stored - selective.stored,
        behind=selective.released,
        block_flops=full.extra_flops,
        core_flops=selective.extra_flops,
        budget=budget,
        name=f"{model}, {batch} x {seq} tokens, {attention} attention",
    )


def selective_peak(job: Job) -> int:
    """Return the most that is kept when attention cores run again: at the end of forward, or in the last replay."""
    stored = job.layers * (job.block - job.core)
    return stored + max(0, job.core - job.behind)


def moments_of_first(job: Job, n: int) -> tuple[int, int]:
    """Return what is kept at the end of forward and at the first replay, when the first n blocks run again."""
    return n * job.boundary + (job.layers - n) * job.block, (n - 1) * job.boundary + job.block


def best_choice(job: Job) -> dict[str, Any] | None:
    """Return the choice that fits and computes least again: strategy, peak bytes and extra FLOPs; None if none fits."""
    found = [("none", job.layers * job.block, 0)]
    found.append(("selective", selective_peak(job), job.layers * job.core_flops))
    found += [
        (f"first:{n}", max(moments_of_first(job, n)), n * job.block_flops) for n in range(1, job.layers + 1)
    ]
    fitting = [choice for choice in found if choice[1] <= job.budget]
    if not fitting:
        return None
    return dict(zip(("strategy", "peak", "extra"), min(fitting, key=lambda choice: choice[2]), strict=True))


def jobs(dice: random.Random) -> list[Job]:
    """Return situations: real models, with budgets drawn and budgets just at, above and below a strategy's peak."""
    found = []
    for model, seq, attention in (
        ("gpt3-175b", 2048, "plain"),
        ("gpt2-xl", 1024, "plain"),
        ("llama-3-8b", 8192, "fused"),
        ("llama-3-8b", 2048, "plain"),
        ("llama-2-7b", 4096, "fused"),
    ):
        job = job_of(model, seq, attention, batch=dice.choice((1, 1, 2, 3)))
        n = dice.randint(1, job.layers)
        borders = [job.layers * job.block, selective_peak(job), max(moments_of_first(job, n))]
        borders.append(max(moments_of_first(job, job.layers)))
        budgets = [border + step for border in borders for step in (-1, 0, 1)]
        budgets += [dice.randint(job.boundary, job.layers * job.block) for _ in range(4)]
        found += [replace(job, budget=budget) for budget in budgets]
    return found
