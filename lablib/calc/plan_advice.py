"""The usual decision framework as a function that says why, and the usual table of layouts, checked.

The framework, as guides print it: replicate if the model fits; else split layers inside a node; else add pipeline
stages; then fill with replicas. Three corrections make it right:

- what must fit are the training states, 16 bytes a parameter with AdamW in mixed precision, not the weights;
- both tp and pp divide them, and ZeRO divides a part over dp besides;
- sharding over dp comes before tp and pp: it costs least until its traffic no longer hides behind compute.

States of 13 billion parameters are 208 GB: at tp=2 each rank holds 104 GB, which no 80 GB card does. With the optimizer
sharded over dp=4 it holds 45.5 GB, and fits.

`plan` replaces all this where there is a model and a cluster; this is what one does in the head first.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.plan_search import divisors
from lablib.calc.zero import zero_state_bytes

ROOM = 0.2  # of a device, for activations and buffers


@dataclass(frozen=True)
class Decision:
    """What the framework decides.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Replicas.
        zero: ZeRO stage.
        micro_batches: Least micro-batches a replica should have, 4 for every stage, or 1.
        states: Bytes of states on a rank.
        reasons: One sentence a step.
    """

    tp: int
    pp: int
    dp: int
    zero: int
    micro_batches: int
    states: int
    reasons: tuple[str, ...]


def state_bytes(params: float, *, tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0) -> int:
    """Return the bytes of training states on a rank, 16 a parameter over tp and pp, and over dp as ZeRO shards.

    Args:
        params: Parameters of the model.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Replicas.
        zero: ZeRO stage.

    Raises:
        ValueError: If a number is out of range.
    """
    for name, value in (("params", params), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return zero_state_bytes(-(-int(params) // (tp * pp)), dp, zero)


def decide(
    params: float,
    *,
    gpus: int,
    gpu: str | Accelerator = "h100",
    gpus_per_node: int = 8,
    global_batch: int | None = None,
) -> Decision:
    """Return the first layout of the framework whose states leave room for activations, with the reasons.

    In order: replicas; ZeRO 1 and 3; tp in the node with ZeRO 1; pipeline stages beside the whole node as tp.
    ZeRO 3 is passed over where a replica would have less than one sequence.

    Args:
        params: Parameters of the model.
        gpus: Devices.
        gpu: Accelerator.
        gpus_per_node: Devices of a node.
        global_batch: Sequences in a step; None means enough for any dp.

    Raises:
        ValueError: If nothing fits, or a number is out of range.
    """
    if gpus < 1 or gpus_per_node < 1 or (global_batch is not None and global_batch < 1):
        raise ValueError(
            f"gpus={gpus}, gpus_per_node={gpus_per_node}, global_batch={global_batch}: at least 1 each"
        )
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    budget = (1 - ROOM) * card.memory_bytes
    widths = [n for n in divisors(gpus) if n <= gpus_per_node and gpus_per_node % n == 0]
    stages = [(widths[-1], p, 1) for p in divisors(gpus // widths[-1]) if p > 1]
    trials = [(1, 1, 0), (1, 1, 1), (1, 1, 3)] + [(tp, 1, 1) for tp in widths[1:]] + stages
    reasons = []
    for tp, pp, zero in trials:
        dp = gpus // (tp * pp)
        if zero and dp == 1:
            zero = 0
        states = state_bytes(params, tp=tp, pp=pp, dp=dp, zero=zero)
        what = f"tp={tp} pp={pp} dp={dp} zero={zero}: {states / 1e9:.1f} GB of states a rank"
        if global_batch is not None and dp > global_batch:
            reasons.append(
                f"{what}; but dp={dp} replicas are more than the global_batch={global_batch} sequences."
            )
            continue
        if states > budget:
            reasons.append(
                f"{what}; more than the {budget / 1e9:.1f} GB of one {card.name} that activations leave."
            )
            continue
        reasons.append(f"{what}; fits in {budget / 1e9:.1f} GB. " + _why(tp, pp, zero, gpus_per_node))
        return Decision(tp, pp, dp, zero, 4 * pp if pp > 1 else 1, states, tuple(reasons))
    raise ValueError(
        f"params={params:.3g} do not fit on gpus={gpus} of {card.name} with tp up to {widths[-1]}: "
        + reasons[-1]
    )


def _why(tp: int, pp: int, zero: int, gpus_per_node: int) -> str:
    if pp > 1:
        return (
            f"tp fills the node of {gpus_per_node}, stages go across nodes because they send least, and a replica "
            f"should run at least {4 * pp} micro-batches: with 4 for each stage the bubble is below a quarter of the work."
        )
    if tp > 1:
        return "tp stays in the node: it sends in every layer and waits for it."
    return {
        0: "Replicas send gradients once a step, and backward hides that.",
        1: "Sharding the optimizer costs no traffic more than replicas.",
        3: "Sharding everything sends 1.5 times what replicas do; micro-batches must be long enough to hide it.",
    }[zero]


@dataclass(frozen=True)
class Example:
    """One row of the tables that guides print, and what is right about it.

    Attributes:
        name: Model size as printed.
        params: Parameters.
        gpus: Devices as printed.
        tp: As printed.
        pp: As printed.
        cp: As printed.
        dp: As printed, or None.
    """

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
    """Return whether a printed row can be as it stands, without ZeRO, and a sentence that says why or mends it.

    Args:
        example: The row.
        gpu: Accelerator.
    """
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
    if plain <= (1 - ROOM) * card.memory_bytes:
        return True, f"{share}: fits on one {card.name}"
    for zero in (1, 2, 3):
        sharded = state_bytes(example.params, tp=example.tp, pp=example.pp, dp=dp * example.cp, zero=zero)
        if sharded <= (1 - ROOM) * card.memory_bytes:
            return (
                False,
                f"{share}: does not fit on one {card.name}; zero={zero} over dp={dp} makes it {sharded / 1e9:.1f} GB",
            )
    return False, f"{share}: does not fit on one {card.name}, with ZeRO neither"
