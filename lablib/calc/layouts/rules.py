"""Rules of thumb that guides print, as functions: where each comes from, where it fails, and their tables corrected.

Each function returns rows to print, computed from `calc.schedules`, the planner and `mesh`. `audited_rows` judges the
tables of layouts by the training states, 16 bytes a parameter, where guides ask whether the weights fit.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3, for 4 micro-batches a stage; Narayanan et al. 2021
(arXiv 2104.04473), section 3, for tp inside the node and dp outermost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.layouts.choice import Choice, choose
from lablib.calc.layouts.meshes import axis_bytes, mesh
from lablib.calc.layouts.planner import (
    FITTED,
    Cluster,
    Layout,
    MicroBatch,
    generation,
    layer_work,
    megatron_gpt,
    pass_seconds,
)
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig, preset
from lablib.calc.parallel import zero_state_bytes
from lablib.calc.schedules import schedule, simulate

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

    Where it fails: with v chunks, 4/v for a stage do as well. Llama 3 runs 16 stages on 16 micro-batches.
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


ROOM = 0.2  # of a GPU, for activations and buffers


def state_bytes(params: float, *, tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0) -> int:
    """Return the bytes of training states on a rank, 16 a parameter over tp and pp, and over dp as ZeRO shards."""
    for name, value in (("params", params), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return zero_state_bytes(-(-int(params) // (tp * pp)), dp, zero)


@dataclass(frozen=True)
class Example:
    """One row of the tables that guides print, and what is right about it."""

    name: str
    params: float
    gpus: int
    tp: int
    pp: int
    cp: int = 1
    dp: int | None = None


#: Layouts as guides print them. The last three sizes and the long context are those of "modern" versions.
EXAMPLES = (
    Example("7B", 7e9, 8, 1, 1, dp=8),
    Example("13B", 13e9, 8, 2, 1, dp=4),
    Example("30B", 30e9, 16, 4, 2, dp=2),
    Example("70B", 70e9, 64, 8, 4, dp=2),
    Example("175B", 175e9, 512, 8, 16, dp=4),
    Example("175B", 175e9, 256, 8, 8, dp=4),
    Example("405B", 405e9, 16384, 8, 16, dp=128),
    Example("70B, 1M tokens", 70e9, 128, 8, 4, cp=8),
)


def check_example(example: Example, *, gpu: str | Accelerator = "h100") -> tuple[bool, str]:
    """Return whether a printed row can be as it stands, without ZeRO, and a sentence that says why or corrects it."""
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    width = example.tp * example.pp * example.cp
    if example.gpus % width or (example.dp or example.gpus // width) * width != example.gpus:
        return False, (
            f"tp={example.tp} x pp={example.pp} x cp={example.cp} = {width} ranks for one replica, but there are "
            f"{example.gpus}: at least {width} GPUs, or cp={example.gpus // (example.tp * example.pp)}"
        )
    dp = example.gpus // width
    plain = state_bytes(example.params, tp=example.tp, pp=example.pp)
    share = f"{plain / 1e9:.1f} GB of states a rank without ZeRO"
    if plain <= (1 - ROOM) * card.usable_bytes:
        return True, f"{share}: fits on one {card.name}"
    for zero in (1, 2, 3):
        sharded = state_bytes(example.params, tp=example.tp, pp=example.pp, dp=dp * example.cp, zero=zero)
        if sharded <= (1 - ROOM) * card.usable_bytes:
            return (
                False,
                f"{share}: does not fit on one {card.name}; zero={zero} over dp={dp} makes it {sharded / 1e9:.1f} GB",
            )
    return False, f"{share}: does not fit on one {card.name}, with ZeRO neither"


def pipeline_formula(params: float, tp: int, gpu: str | Accelerator = "a100", *, bytes_per_param: int = 16) -> float:
    """Return `bytes · ψ / (memory · tp)`, the stages that guides compute; they put in 2 bytes, the weights.

    70 billion parameters with tp=8 on 80 GiB: 0.20 with the weights, so one stage; 1.63 with the states, so two at the
    least, before any activation.
    """
    for name, value in (("params", params), ("tp", tp), ("bytes_per_param", bytes_per_param)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    return bytes_per_param * params / (card.memory_bytes * tp)


@dataclass(frozen=True)
class AuditedRow:
    """A row of the tables that guides print, judged and corrected.

    Attributes:
        holds: Whether it can be as it stands, without ZeRO.
        states: Bytes of states of a rank as printed, without ZeRO; 0 if the factors do not multiply.
        verdict: A sentence that says why, or what corrects it.
        choice: What the framework recommends for this model and number of GPUs; None if nothing fits.
        nothing: Why nothing fits, or "".
    """

    example: Example
    holds: bool
    states: int
    verdict: str
    choice: Choice | None
    nothing: str


#: A model of each size that the tables name; there is no published one of 30B among the presets.
MODELS: dict[str, ModelConfig] = {
    "7B": preset("llama-2-7b"),
    "13B": preset("llama-2-13b"),
    "30B": megatron_gpt(48, 7168, 56),
    "70B": preset("llama-2-70b"),
    "175B": preset("gpt3-175b"),
    "405B": preset("llama-3.1-405b"),
    "70B, 1M tokens": preset("llama-3.1-70b"),
}


def audited_rows(gpu: str | Accelerator = "a100", *, tokens: int = 2**22) -> list[AuditedRow]:
    """Return the usual table of layouts, each row judged, with what the framework says in its place.

    Sequences are 2,048 tokens, 8,192 for 405B and 1,048,576 in the last row.
    """
    return [_audit(example, gpu, tokens) for example in EXAMPLES]


def _audit(example: Example, gpu: str | Accelerator, tokens: int) -> AuditedRow:
    holds, verdict = check_example(example, gpu=gpu)
    width = example.tp * example.pp * example.cp
    states = state_bytes(example.params, tp=example.tp, pp=example.pp) if example.gpus % width == 0 else 0
    long = "1M" in example.name
    seq = 2**20 if long else 8192 if example.name == "405B" else 2048
    batch = max(tokens // seq, example.gpus)
    try:
        choice = choose(MODELS[example.name], gpus=example.gpus, gpu=gpu, seq=seq, global_batch=batch)
    except ValueError as error:
        return AuditedRow(example, holds, states, verdict, None, str(error))
    return AuditedRow(example, holds, states, verdict, choice, "")
