"""The time of a training step, from the work of a micro-batch: what is added, what overlaps, and the bubble.

    stage      T = matmul / e_matmul + (memory + tp + cp + ep + pp) / e_bandwidth
    pipeline   m T_max + (sum of the other stages' T) / v            (v chunks a stage: the bubble shrinks)
    step       pipeline + exposed data parallelism + optimizer

Collectives of tp, cp and ep, and the sends of pp, wait for their result and nothing hides them. Data parallelism hides:

- stages 0 and 1 send gradients once a step, behind the last micro-batch's backward, and gather weights behind the
  first forward;
- stage 2 scatters gradients after every micro-batch, behind its backward;
- stage 3 gathers weights for forward and again for backward, and scatters gradients, behind each micro-batch.

What is longer than the work that hides it is exposed. What is hidden is not free either: the kernels that send take
multiprocessors and memory bandwidth from those that compute, so hidden seconds cost `e_overlap` of themselves.
Latency is left out: bandwidth decides at these sizes.

The three e, the same for every layout, model and device, are the only fitted numbers; see `plan_fit`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.plan_work import Passes, Work

PARTS = ("matmul", "memory", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer")


@dataclass(frozen=True)
class Efficiency:
    """How close a run comes to the full rates.

    Attributes:
        matmul: Share of the rate of large matrix products.
        bandwidth: Share of a bandwidth, the memory's or a link's.
        overlap: Seconds that a second of hidden communication still costs.
    """

    matmul: float
    bandwidth: float
    overlap: float


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage does for one micro-batch, and how many stages are alike.

    Attributes:
        work: Forward and backward of all its layers, and of the head on the last one.
        count: Stages like it.
    """

    work: Passes
    count: int = 1


@dataclass(frozen=True)
class Job:
    """A step as work at full rates: all that `step_time` needs.

    Attributes:
        stages: The kinds of pipeline stages.
        micro_batches: Micro-batches of a replica, m.
        chunks: Chunks of layers in a stage, v.
        send: Seconds of one micro-batch's sends of a stage, both ways, at the link's full rate.
        scatter: Seconds of a reduce-scatter of a stage's gradients at full rate.
        gather: Seconds of an all-gather of a stage's weights at full rate.
        zero: ZeRO stage.
        optimizer: Seconds of the optimizer's memory traffic at full rate.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    chunks: int
    send: float
    scatter: float
    gather: float
    zero: int
    optimizer: float


def seconds(work: Work, rates: Efficiency) -> float:
    """Return how long work takes if nothing overlaps."""
    bytes_moved = work.memory + work.tp + work.cp + work.ep
    return work.matmul / rates.matmul + bytes_moved / rates.bandwidth


def step_time(job: Job, rates: Efficiency) -> dict[str, float]:
    """Return the seconds of a step by part; they sum to the step."""
    send = job.send / rates.bandwidth
    longest, others, slowest = -1.0, 0.0, job.stages[0]
    for stage in job.stages:
        each = seconds(stage.work.forward, rates) + seconds(stage.work.backward, rates) + send
        others += stage.count * each
        if each > longest:
            longest, slowest = each, stage
    m, forward, backward = job.micro_batches, slowest.work.forward, slowest.work.backward
    exposed, again = _exposed(job, seconds(forward, rates), seconds(backward, rates), rates)
    return {
        "matmul": m * (forward.matmul + backward.matmul) / rates.matmul,
        "memory": m * (forward.memory + backward.memory) / rates.bandwidth,
        "tp": m * (forward.tp + backward.tp) / rates.bandwidth,
        "cp": m * (forward.cp + backward.cp) / rates.bandwidth,
        "ep": m * (forward.ep + backward.ep) / rates.bandwidth,
        "pp": m * send,
        "dp": exposed + m * again,
        "bubble": (others - longest) / job.chunks,
        "optimizer": job.optimizer / rates.bandwidth,
    }


def _exposed(job: Job, forward: float, backward: float, rates: Efficiency) -> tuple[float, float]:
    """Seconds that data parallelism adds: once a step, and in every micro-batch."""
    scatter, gather = job.scatter / rates.bandwidth, job.gather / rates.bandwidth

    def added(sending: float, computing: float) -> float:
        return max(0.0, sending - computing) + rates.overlap * min(sending, computing)

    if job.zero == 3:
        return 0.0, added(gather, forward) + added(gather + scatter, backward)
    if job.zero == 2:
        return added(gather, forward), added(scatter, backward)
    return added(gather, forward) + added(scatter, backward), 0.0
