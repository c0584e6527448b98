"""Offload: model states in CPU memory or on NVMe, and what the slow link then allows. Chapter 05.

Of N ranks each moves its shard over its own link. ZeRO-Offload sends 2 bytes of gradient down per parameter and step, and
2 bytes of weight up. ZeRO-Infinity asks what bandwidth W is enough: with `ait` FLOPs per byte moved, a device of peak P
reaches ait W / (ait W + P) without overlap.

Sources: Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840); Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857),
the part on bandwidth requirements.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.errors import one_of
from lablib.calc.parallel.zero import shard_size

#: Bytes of CPU memory that AdamW touches per parameter: master, m and v read and written, a gradient read, a weight
#: written, the last two in 16 bits.
CPU_ADAM_BYTES = 2 * 12 + 2 + 2

#: Kinds of data that ZeRO-Infinity moves.
KINDS = ("weights", "optimizer", "checkpoints")


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")


@dataclass(frozen=True)
class OffloadStep:
    """Where the time of a step with ZeRO-Offload goes, in seconds.

    Attributes:
        compute: Forward and backward on the device.
        down: Gradients on their way to the CPU.
        exposed_down: The part of it that backward does not hide.
        update: AdamW on the CPU, limited by CPU memory.
        up: New weights on their way to the device.
        step: The sum without the hidden part.
    """

    compute: float
    down: float
    exposed_down: float
    update: float
    up: float
    step: float

    @property
    def efficiency(self) -> float:
        """The device's share of the step: compute over step."""
        return self.compute / self.step


def offload_step(
    params: int,
    *,
    tokens: int,
    flops: float,
    host_bandwidth: float,
    cpu_bandwidth: float,
    ranks: int = 1,
    micro_batches: int = 1,
    delayed: bool = False,
) -> OffloadStep:
    """Return the time of a ZeRO-Offload step; collectives between devices, and all latencies, are left out.

    6 FLOPs per parameter and token, two thirds of them backward, which hides gradients on their way down. Micro-batches
    each send their gradients, which add up on the CPU. The update starts when the last gradient is there.

    Args:
        host_bandwidth: Bytes per second between a device and the CPU, per direction.
        cpu_bandwidth: Bytes per second of CPU memory that one rank gets.
        delayed: Update with the gradients of the step before, while this one runs (the paper's one-step delay).
    """
    _positive(
        params=params,
        tokens=tokens,
        flops=flops,
        host_bandwidth=host_bandwidth,
        cpu_bandwidth=cpu_bandwidth,
        ranks=ranks,
        micro_batches=micro_batches,
    )
    own = shard_size(params, ranks)
    backward = 4 * params * tokens / flops
    compute = micro_batches * 1.5 * backward
    down = micro_batches * 2 * own / host_bandwidth
    exposed = max(0.0, down - micro_batches * backward)
    update, up = CPU_ADAM_BYTES * own / cpu_bandwidth, 2 * own / host_bandwidth
    behind = update + up
    step = max(compute + exposed, behind) if delayed else compute + exposed + behind
    return OffloadStep(compute, down, exposed, update, up, step)


def arithmetic_intensity(kind: str, *, batch: int = 1, seq: int = 1, hidden: int = 1, every: int = 1) -> float:
    """Return FLOPs per byte moved, with full recomputation, as ZeRO-Infinity counts them.

    "weights" (and gradients): s b. "optimizer": s b / 4. "checkpoints", one for every c blocks of width h: 24 h c.
    """
    one_of("kind", kind, KINDS)
    _positive(batch=batch, seq=seq, hidden=hidden, every=every)
    if kind == "checkpoints":
        return 24.0 * hidden * every
    flops = 8 * batch * seq  # per parameter: 2 forward, 2 recomputed, 4 backward
    moved = {"weights": 3 * 2 + 2, "optimizer": 2 * 16}[kind]
    return flops / moved


def offload_efficiency(intensity: float, bandwidth: float, flops: float) -> float:
    """Return compute time over compute plus transfer time, ait W / (ait W + P), as in ZeRO-Infinity.

    Args:
        bandwidth: Bytes per second that one device gets.
        flops: FLOP/s that it reaches when nothing is in the way.
    """
    _positive(intensity=intensity, bandwidth=bandwidth, flops=flops)
    return intensity * bandwidth / (intensity * bandwidth + flops)


def needed_bandwidth(intensity: float, flops: float, target: float) -> float:
    """Return the bytes per second at which `efficiency` is `target`: P / ait · e / (1 - e)."""
    _positive(intensity=intensity, flops=flops)
    if not 0 < target < 1:
        raise ValueError(f"target={target} must lie between 0 and 1; no bandwidth reaches 1 without overlap")
    return flops / intensity * target / (1 - target)


def swap_seconds(params: int, *, ranks: int, bandwidth: float, bytes_per_param: float = 12) -> float:
    """Return the seconds to read and write a rank's optimizer state once: a step's NVMe traffic.

    Args:
        bandwidth: Bytes per second of NVMe that one rank gets; reading and writing alike.
        bytes_per_param: State per parameter, 12 for master weights and AdamW's moments.
    """
    _positive(params=params, ranks=ranks, bandwidth=bandwidth, bytes_per_param=bytes_per_param)
    return 2 * bytes_per_param * shard_size(params, ranks) / bandwidth
