"""DDP on two hosts: the step time and the scaling efficiency that a link allows, beside what was measured.

A flat ring over n ranks crosses the link between two hosts once in each direction: of the 2(n-1)/n · S bytes that
every rank sends, the link carries one rank's. So the link's bandwidth is the ring's. A hierarchical all-reduce sends
2(m-1)/m · S over it for m hosts.

    efficiency = T_1/T_n       weak scaling: as many samples on every rank

T_1 is a step without communication on one rank while the other ranks take theirs: on a cluster every rank has its own
processor, and here they share one machine's, with or without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lablib.calc.comm import ring_all_reduce_bytes
from lablib.calc.network_rows import Sample, link_bandwidth, link_fit, seconds_of
from lablib.calc.overlap import DDPStep, ddp_step_time

#: What a variant changes, in the order of the table.
VARIANTS = ("buckets", "one bucket", "accumulate", "bf16", "hierarchical")


@dataclass(frozen=True)
class ScalingRow:
    """DDP at one rate of the link.

    Attributes:
        rate: As text, or None if not throttled; the prediction is then what a link without cost would give.
        bytes_across: Bytes that leave a host in a step.
        compute: Seconds of a step without communication.
        predicted: Seconds of a step.
        measured: Median seconds of a step.
        predicted_efficiency: compute / predicted.
        efficiency: compute / measured.
        samples: The raw seconds.
    """

    rate: str | None
    bytes_across: float
    compute: float
    predicted: float
    measured: float
    predicted_efficiency: float
    efficiency: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class SavingsRow:
    """One way to spend less on communication, at one rate; seconds are of one micro-batch.

    Attributes:
        variant: One of `VARIANTS`.
        rate: Of the link, as text.
        bytes_across: Bytes that leave a host for each micro-batch.
        predicted: Seconds of a micro-batch.
        measured: Median seconds of a micro-batch.
        bought: The measured time of "buckets" over this one's; above 1 it is faster.
        predicted_bought: The same of the predicted times.
        samples: The raw seconds of a micro-batch.
    """

    variant: str
    rate: str
    bytes_across: float
    predicted: float
    measured: float
    bought: float
    predicted_bought: float
    samples: tuple[float, ...]


def scaling_rows(samples: Sequence[Sample]) -> list[ScalingRow]:
    """Return DDP's step at every rate of the study, the widest link first."""
    steps = [s for s in samples if s["part"] == "ddp" and s["variant"] == "buckets"]
    rows = []
    for rate in dict.fromkeys(s["rate"] for s in steps):
        raw = tuple(seconds_of(steps, rate=rate))
        sample = next(s for s in steps if s["rate"] == rate)
        step, measured = predicted_step(samples, sample), median(raw)
        rows.append(
            ScalingRow(
                rate,
                sample["bytes_across"],
                step.compute,
                step.step,
                measured,
                step.compute / step.step,
                step.compute / measured,
                raw,
            )
        )
    return sorted(rows, key=lambda row: link_bandwidth(row.rate), reverse=True)


def savings_rows(samples: Sequence[Sample]) -> list[SavingsRow]:
    """Return every variant at the rate where the study compares them; "buckets" comes first."""
    steps = [s for s in samples if s["part"] == "ddp" and s["variant"] in VARIANTS]
    rate = next(s["rate"] for s in steps if s["variant"] != "buckets")
    found = {}
    for variant in VARIANTS:
        sample = next(s for s in steps if s["variant"] == variant and s["rate"] == rate)
        m = sample["micro_batches"]
        raw = tuple(t / m for t in seconds_of(steps, variant=variant, rate=rate))
        found[variant] = sample["bytes_across"] / m, predicted_step(samples, sample).step / m, raw
    _, base_predicted, base_raw = found["buckets"]
    return [
        SavingsRow(
            variant,
            rate,
            across,
            predicted,
            median(raw),
            median(base_raw) / median(raw),
            base_predicted / predicted,
            raw,
        )
        for variant, (across, predicted, raw) in found.items()
    ]


def predicted_step(samples: Sequence[Sample], sample: Sample) -> DDPStep:
    """Return a step's predicted time: measured computation, and communication by the bytes that cross the link.

    Args:
        samples: Of a study; they tell the computation and the latency.
        sample: The step, one of its "ddp" samples.
    """
    computing = [s for s in samples if s["part"] == "ddp" and s["variant"] == "compute"]
    forward, backward = (median(s[half] for s in computing) for half in ("forward", "backward"))
    buckets = sample["buckets"]
    # An all-reduce is as slow as a flat ring would be on the bytes that it lets cross the link.
    flat = ring_all_reduce_bytes(sum(buckets), sample["ranks"])
    share = sample["bytes_across"] / flat
    return ddp_step_time(
        compute_forward=forward,
        compute_backward=backward,
        gradient_bytes=share * sum(buckets),
        ranks=sample["ranks"],
        bandwidth=link_bandwidth(sample["rate"]),
        latency=0.0 if sample["rate"] is None else max(0.0, link_fit(samples).line.latency),
        buckets=[share * size for size in buckets],
        micro_batches=sample["micro_batches"],
    )
