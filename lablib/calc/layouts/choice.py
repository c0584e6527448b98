"""The decision framework that guides print, as a function that asks in order, answers with numbers, and says why.

    choice = choose("llama-2-13b", gpus=8, gpu="a100", seq=4096, global_batch=64)
    choice.strategy             # "sharded data parallelism"
    print(*choice.reasons, sep=" ")

Each of `FAMILIES` is asked in turn, the simplest first. The first that fits and is within `patience` of the best of all,
which is less than the planner's own error, is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lablib.calc.flops import ALL_PAIRS
from lablib.calc.hardware import Accelerator
from lablib.calc.layouts.planner import NEAREST, PART_NAMES, Candidate, Layout, Plan, check_layout, layout_peak, plan
from lablib.calc.models import ModelConfig
from lablib.calc.units import GB

#: Families of layouts, simplest first: name, and the test that a layout of it passes.
FAMILIES = (
    "replicas",
    "sharded data parallelism",
    "tensor parallelism in the node",
    "pipeline stages",
    "context parallelism",
)
PATIENCE = 0.05  # of the best step: what simplicity may cost; less than the planner's own error


def family(layout: Layout) -> str:
    """Return the family of a layout: the last axis of the questions that it needs."""
    if layout.cp > 1:
        return FAMILIES[4]
    if layout.pp > 1:
        return FAMILIES[3]
    if layout.tp > 1:
        return FAMILIES[2]
    return FAMILIES[1] if layout.zero else FAMILIES[0]


@dataclass(frozen=True)
class Reason:
    """One question of the framework, answered.

    Attributes:
        layout: The fastest that fits, or the one that needs least; None if no layout of it can be.
        memory: Bytes of a rank of that layout; 0 without one.
        step: Predicted seconds of its step; None if it does not fit.
    """

    family: str
    fits: bool
    taken: bool
    layout: Layout | None
    memory: int
    step: float | None
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Choice:
    """The recommendation of the framework."""

    strategy: str
    candidate: Candidate
    reasons: tuple[Reason, ...]
    plan: Plan

    @property
    def layout(self) -> Layout:
        """The recommended layout."""
        return self.candidate.layout

    @property
    def links(self) -> str:
        """The links that its times assume, as a sentence."""
        return self.plan.cluster.links_text()

    @property
    def slower(self) -> float:
        """How much slower than the planner's best it is predicted to be, as a share."""
        return self.candidate.step / self.plan.best.step - 1


def choose(
    model: ModelConfig | str,
    *,
    gpus: int,
    gpu: str | Accelerator = "h100",
    seq: int | None = None,
    global_batch: int,
    patience: float = PATIENCE,
    **settings: object,
) -> Choice:
    """Return the simplest family of layouts that fits and is about as fast as any, with the reasons.

    Args:
        patience: How much slower than the best of all it may be, as a share.
    """
    if patience < 0:
        raise ValueError(f"patience={patience} must not be negative")
    found = plan(model, gpus=gpus, gpu=gpu, seq=seq, global_batch=global_batch, **settings)
    best = found.best
    reasons: list[Reason] = []
    for name in FAMILIES:
        own = next(found.candidates.walk(lambda layout, name=name: family(layout) == name), None)
        if own is None:
            reasons.append(_nothing(found, name))
            continue
        taken = own.step <= (1 + patience) * best.step
        reasons.append(_answer(found, name, own, taken))
        if taken:
            return Choice(name, own, tuple(reasons), found)
    raise RuntimeError(f"{best.layout} is of no family")  # the best one is taken at the latest


def _answer(found: Plan, name: str, own: Candidate, taken: bool) -> Reason:
    slower = own.step / found.best.step - 1
    text = (
        f"{name.capitalize()}: {own.layout} fits, {_gb(own.total_memory)} of {_gb(found.capacity)}, and takes "
        f"{own.step:.2f} s a step, MFU {found.mfu(own):.0%} ({ALL_PAIRS})"
    )
    if not taken:
        gaps = {part: own.seconds[part] - found.best.seconds[part] for part in own.seconds}
        worst = max(gaps, key=gaps.get)
        text += (
            f"; but {slower:.0%} slower than the best of all, {found.best.layout}: "
            f"{PART_NAMES[worst]} +{gaps[worst]:.2f} s"
        )
    elif slower >= 0.0005:  # of a step; below it would print as 0.0%
        text += f"; {slower:.1%} slower than the best of all, which is less than the planner can tell apart"
    else:
        text += "; no layout is faster" if slower == 0 else "; as fast as the best of all"
    if taken:
        text += f". Error of such times: {found.like(own).sentence}"
    return Reason(name, True, taken, own.layout, own.total_memory, own.step, text + ".")


def _nothing(found: Plan, name: str) -> Reason:
    """Say why no layout of a family fits: with the one that needs least."""
    load, nearest = found.load, None
    least = least_layout(found, name)
    if least is None:
        text = f"{name.capitalize()}: no such layout divides {load.global_batch} sequences, or the model, over {found.cluster.gpus} GPUs."
        return Reason(name, False, False, None, 0, None, text)
    peak = layout_peak(load, least, found.counting)
    memory = peak.memory
    term = max(memory, key=memory.get)
    nearest = (
        f"{name.capitalize()}: {least} peaks at {_gb(peak.total)} of {_gb(found.capacity)}; most of it is "
        f"{term}, {_gb(memory[term])}."
    )
    return Reason(name, False, False, least, peak.total, None, nearest)


def least_layout(found: Plan, name: str) -> Layout | None:
    """Return the layout of a family that needs least memory, with all recomputed, or None if none can be."""
    load, gpus = found.load, found.cluster.gpus
    tops = [t for t in range(found.cluster.gpus_per_node, 0, -1) if gpus % t == 0]
    trials: list[Layout] = []
    for zero in (0,) if name == FAMILIES[0] else (3, 2, 1):
        if name in FAMILIES[:2]:
            trials.append(Layout(dp=gpus, zero=zero, recompute="full"))
        elif name == FAMILIES[2]:
            trials += [Layout(tp=t, dp=gpus // t, zero=zero, recompute="full") for t in tops if t > 1]
    # Stages and split sequences: the search knows the shapes that never fit.
    if not trials:
        least = sorted(found.found.least.values(), key=lambda pair: pair[0])
        own = [layout for _, layout in least if family(layout) == name]
        trials = own[:NEAREST] + [layout for layout in found.candidates.too_large() if family(layout) == name]
    usable = [layout for layout in map(_normal, trials) if _can_be(found, layout)]
    return min(usable, key=lambda layout: layout_peak(load, layout, found.counting).total, default=None)


def _normal(layout: Layout) -> Layout:
    """Nothing to shard over one replica."""
    return replace(layout, zero=0) if layout.dp * layout.cp == 1 else layout


def _can_be(found: Plan, layout: Layout) -> bool:
    load = found.load
    try:
        check_layout(
            layout, load.model, gpus=found.cluster.gpus, seq=load.seq, global_batch=load.global_batch,
            sequence_parallel=load.sequence_parallel, cp_way=load.cp_way,
        )  # fmt: skip
    except ValueError:
        return False
    return True


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
