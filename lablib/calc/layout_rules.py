"""Three rules of thumb: where each comes from, as arithmetic on the planner's own parts, and where each fails.

| rule | comes from | fails where |
|---|---|---|
| at least 4 micro-batches a stage | bubble (p-1)/m is then below 1/4 | chunks divide the bubble by v; the batch has not so many |
| tp inside the node | its collectives wait, in every layer | a node of one GPU; a node of 72; layers so wide that they pay |
| dp outermost | its messages leave once a step and hide | stages send less and wait less on a slow link |

Each function returns rows to print, and computes them from `schedule_sim`, `plan_work` and `mesh`.

Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.3, for the 4; Narayanan et al. 2021
(arXiv 2104.04473), section 3, for the other two.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.comm import ring_all_reduce_bytes
from lablib.calc.mesh import mesh
from lablib.calc.models import ModelConfig
from lablib.calc.plan_cluster import Cluster
from lablib.calc.plan_fit import EFFICIENCY
from lablib.calc.plan_layout import Layout
from lablib.calc.plan_time import seconds
from lablib.calc.plan_work import layer_work
from lablib.calc.run_config import resolve_model
from lablib.calc.schedules import schedule, simulate
from lablib.calc.tensors import embedding_tensors, head_tensors, layer_tensors

RULE = 4  # micro-batches for every stage


@dataclass(frozen=True)
class Bubble:
    """Idle time of one schedule.

    Attributes:
        schedule: Its name.
        p: Stages.
        m: Micro-batches.
        v: Chunks of a stage.
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

    Args:
        p: Stages.
        per_stage: Micro-batches over p.
        v: Chunks; more than 1 means the interleaved schedule.
    """
    name = "interleaved" if v > 1 else "1f1b"
    rows = []
    for factor in per_stage:
        m = factor * p
        found = simulate(schedule(name, p, m, v))
        rows.append(Bubble(name, p, m, v, found.bubble_over_ideal, (p - 1) / (v * m)))
    return rows


def enough_microbatches(p: int, *, most: float = 0.25, v: int = 1) -> int:
    """Return the least m with (p-1)/(v m) at most `most`; interleaved, the least multiple of p.

    Args:
        p: Stages.
        most: Idle over ideal time.
        v: Chunks.

    Raises:
        ValueError: If a number is out of range.
    """
    if p < 1 or v < 1 or not most > 0:
        raise ValueError(f"p={p} and v={v} must be at least 1, and most={most} above 0")
    m = max(1, math.ceil((p - 1) / (most * v) - 1e-9))  # 0.1 is a little more than a tenth
    return m if v == 1 else -(-m // p) * p


@dataclass(frozen=True)
class TensorCost:
    """One layer under tensor parallelism.

    Attributes:
        tp: Ranks.
        crosses: Whether the group leaves its node.
        compute: Seconds of a rank for forward and backward, without collectives.
        collectives: Seconds of them.
    """

    tp: int
    crosses: bool
    compute: float
    collectives: float

    @property
    def share(self) -> float:
        """Collectives over the whole layer."""
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

    Args:
        model: ModelConfig or preset.
        machine: The cluster.
        tps: Degrees; those that do not divide the heads are left out, and KV heads count as copied beyond their number.
        micro_batch: Sequences.
        seq: Tokens of a sequence.

    Raises:
        ValueError: If no degree divides the heads.
    """
    config = resolve_model(model)
    rows = []
    for tp in tps:
        if config.num_heads % tp or tp > machine.gpus:
            continue
        passes = layer_work(config, machine, layer=0, micro_batch=micro_batch, seq=seq, tp=tp)
        both = passes.forward + passes.backward
        collectives = both.tp / EFFICIENCY.bandwidth
        whole = seconds(passes.forward, EFFICIENCY) + seconds(passes.backward, EFFICIENCY)
        grid = mesh(tp=tp, dp=max(1, machine.gpus // tp), gpus_per_node=machine.gpus_per_node)
        rows.append(TensorCost(tp, grid.crosses("tp"), whole - collectives, collectives))
    if not rows:
        raise ValueError(f"no degree of {list(tps)} divides num_heads={config.num_heads}")
    return rows


@dataclass(frozen=True)
class OrderCost:
    """What one order of the axes costs in communication.

    Attributes:
        order: Axes, fastest first.
        crosses: The axes whose groups leave a node.
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


def axis_bytes(
    model: ModelConfig | str, layout: Layout, *, seq: int, global_batch: int, value: int = 2
) -> dict[str, float]:
    """Return the bytes that one rank sends along tp, dp and pp in a step; the middle stage's, forward and backward.

    tp: 8bsh(t-1)/t a layer and micro-batch. pp: bsh/t each way and micro-batch, as each tp rank sends its part.
    dp: 2(d-1)/d of the gradients of the largest stage.

    Args:
        model: ModelConfig or preset.
        layout: tp, pp, dp and micro_batch are used.
        seq: Tokens of a sequence.
        global_batch: Sequences of a step.
        value: Bytes of an activation and of a gradient.
    """
    config = resolve_model(model)
    m = layout.num_microbatches(global_batch)
    stream = layout.micro_batch * seq * config.hidden * value
    layers = -(-config.num_layers // layout.pp)
    ends = embedding_tensors(config) + head_tensors(config)
    block = sum(tensor.local_params(layout.tp) for tensor in layer_tensors(config, 0))
    held = layers * block + (sum(t.local_params(layout.tp) for t in ends) if layout.pp == 1 else 0)
    return {
        "tp": 4 * m * layers * ring_all_reduce_bytes(stream, layout.tp),
        "pp": 2 * m * stream / layout.tp if layout.pp > 1 else 0.0,
        "dp": ring_all_reduce_bytes(held * value, layout.dp),
    }


def order_rule(
    model: ModelConfig | str,
    machine: Cluster,
    layout: Layout,
    *,
    seq: int,
    global_batch: int,
    orders: Sequence[str] = ORDERS,
) -> list[OrderCost]:
    """Return what every order of tp, pp and dp costs, cheapest first.

    An order decides which axis gets the node's link. tp sends most, so it goes first. Between pp and dp there is no
    law: dp sends once a step and hides behind backward, pp sends little and is waited for. Compare their bytes.

    Args:
        model: ModelConfig or preset.
        machine: The cluster.
        layout: tp, pp, dp and micro_batch are used.
        seq: Tokens of a sequence.
        global_batch: Sequences of a step.
        orders: Axes joined by "-", fastest first.

    Raises:
        ValueError: If the layout does not have as many ranks as the cluster, or an order is not of the three axes.
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
        times = {axis: sent[axis] / _link(machine, grid.size(axis), grid.strides[axis]) for axis in axes}
        crosses = tuple(axis for axis in axes if grid.crosses(axis))
        rows.append(OrderCost(order, crosses, times))
    return sorted(rows, key=lambda row: row.total)


def _link(machine: Cluster, size: int, stride: int) -> float:
    """Bytes per second of a group; one rank alone sends nothing."""
    return machine.bandwidth(size, stride) if size > 1 else machine.intra
