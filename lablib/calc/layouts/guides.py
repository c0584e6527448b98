"""What guides print, as functions: the decision framework and rules of thumb.

    choice = choose("llama-2-13b", gpus=8, gpu="a100", seq=4096, global_batch=64)
    choice.strategy             # "sharded data parallelism"
    print(*choice.reasons, sep=" ")

Each of `FAMILIES` is asked in turn, the simplest first. The first is taken that fits, that ties with the fastest in the sense
of `Plan.ties`, and that measured runs are like, if runs are like any. The rules return rows to print.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3, for 4 micro-batches a stage; Narayanan et al. 2021
(arXiv 2104.04473), section 3, for tp inside the node and dp outermost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lablib.calc.flops import ALL_PAIRS
from lablib.calc.hardware import Accelerator
from lablib.calc.layouts.meshes import axis_bytes, mesh
from lablib.calc.layouts.planner import (
    FITTED,
    NEAREST,
    PART_NAMES,
    Candidate,
    Cluster,
    Layout,
    MicroBatch,
    Plan,
    check_layout,
    generation,
    layer_work,
    layout_peak,
    pass_seconds,
    plan,
)
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.schedules import schedule, simulate
from lablib.calc.units import GB

#: Families of layouts, simplest first: name, and the test that a layout of it passes.
FAMILIES = (
    "replicas",
    "sharded data parallelism",
    "tensor parallelism in the node",
    "pipeline stages",
    "context parallelism",
)


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
        """How much slower than the fastest layout it is predicted to be, as a share."""
        return self.candidate.step / self.plan.fastest.step - 1


def choose(
    model: ModelConfig | str,
    *,
    gpus: int,
    gpu: str | Accelerator = "h100",
    seq: int | None = None,
    global_batch: int,
    **settings: object,
) -> Choice:
    """Return the simplest family of layouts that fits and that no other is ahead of, with the reasons.

    A family that no measured run is like is passed over where the planner's first choice has such runs.
    """
    found = plan(model, gpus=gpus, gpu=gpu, seq=seq, global_batch=global_batch, **settings)
    judged = bool(found.like(found.best).ratios)
    reasons: list[Reason] = []
    for name in FAMILIES:
        own = next((one for one in found.tie if family(one.layout) == name), None) or next(
            found.candidates.walk(lambda layout, name=name: family(layout) == name), None
        )
        if own is None:
            reasons.append(_nothing(found, name))
            continue
        taken = found.ties(own) and bool(found.like(own).ratios) >= judged
        reasons.append(_answer(found, name, own, taken))
        if taken:
            return Choice(name, own, tuple(reasons), found)
    raise RuntimeError(f"{found.best.layout} is of no family")  # the first choice is taken at the latest


def _answer(found: Plan, name: str, own: Candidate, taken: bool) -> Reason:
    text = (
        f"{name.capitalize()}: {own.layout} fits, {_gb(own.total_memory)} of {_gb(found.capacity)}, and takes "
        f"{_seconds(found, own)} a step, MFU {found.mfu(own):.0%} ({ALL_PAIRS})"
    )
    slower, ahead = own.step / found.fastest.step - 1, found.ahead_of(own)
    if ahead:
        gaps = {part: own.seconds[part] - ahead.seconds[part] for part in own.seconds}
        worst = max(gaps, key=gaps.get)
        text += f"; but {ahead.layout} is ahead, {_seconds(found, ahead)}: {PART_NAMES[worst]} +{gaps[worst]:.2f} s"
    elif slower >= 0.0005:  # of a step; below it would print as 0.0%
        text += f"; {slower:.1%} slower than the fastest of all, {found.fastest.layout}, which is a tie"
    else:
        text += "; no layout is faster" if slower == 0 else "; as fast as the fastest of all"
    if taken or not ahead:
        text += f". Error of such times: {found.like(own).sentence}"
    return Reason(name, True, taken, own.layout, own.total_memory, own.step, text + ".")


def _seconds(found: Plan, candidate: Candidate) -> str:
    between = found.like(candidate).interval(candidate.step)
    more = f" ({between[0]:.3g} to {between[1]:.3g} s by measured runs)" if between else ""
    return f"{candidate.step:.2f} s{more}"


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
        f"{name.capitalize()}: {least} peaks at {_gb(peak.total)} of {_gb(found.capacity)}; the largest part is "
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


RULE = 4  # micro-batches for every stage


@dataclass(frozen=True)
class Bubble:
    """Idle time of one schedule.

    Attributes:
        p: Stages.
        over_ideal: Idle over ideal time, from the simulator.
        formula: (p-1)/(v m).
    """

    schedule: str
    p: int
    m: int
    v: int
    over_ideal: float
    formula: float

    @property
    def obeys(self) -> bool:
        """Whether it has 4 micro-batches for each stage."""
        return self.m >= RULE * self.p


def microbatch_rule(p: int, per_stage: Sequence[int] = (1, 2, 4, 8), v: int = 1) -> list[Bubble]:
    """Return the bubble for so many micro-batches a stage: with 4 it is (p-1)/(4p), below a quarter for any p.

    Where it fails: with v chunks, 4/v for a stage do as well. Llama 3 runs 16 sequences a replica through 16 ranks.
    """
    name = "interleaved" if v > 1 else "1f1b"
    rows = []
    for factor in per_stage:
        m = factor * p
        found = simulate(schedule(name, p, m, v))
        rows.append(Bubble(name, p, m, v, found.bubble_over_ideal, (p - 1) / (v * m)))
    return rows


def enough_microbatches(p: int, *, most: float = 0.25, v: int = 1) -> int:
    """Return the least m with (p-1)/(v m) at most `most`; interleaved, the least multiple of p."""
    if p < 1 or v < 1 or not most > 0:
        raise ValueError(f"p={p} and v={v} must be at least 1, and most={most} above 0")
    m = max(1, math.ceil((p - 1) / (most * v) - 1e-9))  # 0.1 is a little more than a tenth
    return m if v == 1 else -(-m // p) * p


@dataclass(frozen=True)
class TensorCost:
    """One layer under tensor parallelism.

    Attributes:
        compute: Seconds of a rank for forward and backward, without collectives.
    """

    tp: int
    crosses: bool
    compute: float
    collectives: float

    @property
    def share(self) -> float:
        """Collectives over the full time of the layer."""
        return self.collectives / (self.compute + self.collectives)

    @property
    def total(self) -> float:
        """Seconds of the layer."""
        return self.compute + self.collectives


def tensor_rule(
    model: ModelConfig | str,
    machine: Cluster,
    tps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    *,
    micro_batch: int = 1,
    seq: int = 4096,
) -> list[TensorCost]:
    """Return what a layer costs at every degree of tp, with the link that its group uses.

    Where it fails: on nodes of one GPU there is no inside; in a domain of 72 GPUs tp=16 is inside. And "inside" is no
    promise of cheap: without NVLink the share at tp=8 can be above what it is across nodes with.
    """
    config = resolve_model(model)
    rows = []
    for tp in tps:
        if config.num_heads % tp or tp > machine.gpus:
            continue
        passes = layer_work(
            config, machine, MicroBatch(size=micro_batch, seq=seq, tp=tp), layer=0, layout=Layout(tp=tp)
        )
        rates = FITTED.rates(generation(machine.gpu))
        both = [pass_seconds(work, rates) for work in (passes.forward, passes.backward)]
        collectives = sum(seconds["tp"] for seconds in both)
        full = sum(sum(seconds.values()) for seconds in both)
        grid = mesh(tp=tp, dp=max(1, machine.gpus // tp), gpus_per_node=machine.gpus_per_node)
        rows.append(TensorCost(tp, grid.crosses("tp"), full - collectives, collectives))
    if not rows:
        raise ValueError(f"no degree of {list(tps)} divides num_heads={config.num_heads}")
    return rows


@dataclass(frozen=True)
class OrderCost:
    """The communication of one order of the axes.

    Attributes:
        seconds: By axis, of one step at the links' full rates, nothing hidden.
    """

    order: str
    crosses: tuple[str, ...]
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all axes."""
        return sum(self.seconds.values())


ORDERS = ("tp-pp-dp", "tp-dp-pp", "dp-tp-pp", "pp-tp-dp", "dp-pp-tp", "pp-dp-tp")


def order_rule(
    model: ModelConfig | str,
    machine: Cluster,
    layout: Layout,
    *,
    seq: int,
    global_batch: int,
    orders: Sequence[str] = ORDERS,
) -> list[OrderCost]:
    """Return what every order of tp, pp and dp costs, cheapest first; an order decides which axis gets the node's link.

    Args:
        layout: tp, pp, dp and micro_batch are used.
    """
    sent = axis_bytes(model, layout, seq=seq, global_batch=global_batch)
    rows = []
    for order in orders:
        axes = order.split("-")
        if sorted(axes) != ["dp", "pp", "tp"]:
            raise ValueError(f"order={order!r} must name tp, pp and dp once each")
        grid = mesh(
            tp=layout.tp, pp=layout.pp, dp=layout.dp, order=[*axes, "cp", "ep"],
            gpus_per_node=machine.gpus_per_node, gpus=machine.gpus,
        )  # fmt: skip
        times = {axis: sent[axis] / _link(machine, axis, grid.size(axis), grid.strides[axis]) for axis in axes}
        crosses = tuple(axis for axis in axes if grid.crosses(axis))
        rows.append(OrderCost(order, crosses, times))
    return sorted(rows, key=lambda row: row.total)


def _link(machine: Cluster, axis: str, size: int, stride: int) -> float:
    """Bytes per second of a group; a stage sends to the next one alone, and one rank alone sends nothing."""
    if size == 1:
        return machine.intra
    return machine.hop(size, stride) if axis == "pp" else machine.bandwidth(size, stride)
