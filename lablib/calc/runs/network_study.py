"""The study of a cluster of two hosts as rows, each with a prediction beside the measurement. Chapter 10.

`labs/scripts/network_study.py` measures, on 4 ranks and 2 hosts, and returns samples: dictionaries with the seconds of
one repetition each (of a small array, the median of some in a row), from the slowest rank. A sample knows its conditions:

    part          what else it has, beside "seconds", "turn" (its repetition) and "card_bytes" (what left a host)
    "link"        where, rate, bytes: one round in which each rank that takes part sends and receives so many bytes;
                  "inside" are two ranks of a host, "across" two of different hosts, "ring" all ranks
    "all-reduce"  rate, algorithm, bytes
    "ddp"         rate, variant, micro_batches, ranks, gradient_bytes, buckets (bytes as sent), bytes_across, forward and
                  backward
    "placement"   rate, layout, bytes_across (leaving a host in a step, by the formula), loss

A rate is text, such as "500 Mb/s", or None for a link that is not throttled. Weak scaling efficiency is T_1/T_n, with T_1 a
step without communication on one rank while the others take theirs, because here they share one machine's processors.

Read `StudySettings` first, then `two_hosts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lablib.calc.communication import (
    Line,
    Topology,
    algorithm_rounds,
    fit_line,
    hierarchical_rounds,
    ring_all_reduce_bytes,
    tcp_bandwidth,
)
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import DDPStep, ddp_step_time, rank_params
from lablib.calc.params import count_params
from lablib.calc.units import parse_bandwidth

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Sizes and rates of the study, small enough that a sample is short.

    Attributes:
        link_rate: The link for exchanges and all-reduces.
        ddp_rates: Links for DDP, next to one that is not throttled.
        savings_rate: The link on which DDP's variants are compared.
        placement_rate: The link on which layouts are compared.
    """

    link_rate: str = "500 Mb/s"
    link_sizes: tuple[int, ...] = (64, 4096, 2**16, 2**18, 2**19)
    reduce_sizes: tuple[int, ...] = (2**10, 2**14, 2**17, 2**19)
    ddp_rates: tuple[str, ...] = ("2 Gb/s", "500 Mb/s", "100 Mb/s")
    savings_rate: str = "100 Mb/s"
    placement_rate: str = "100 Mb/s"
    turns: int = 3
    width: int = 256
    layers: int = 4
    tokens: int = 1536
    bucket_bytes: int = 2**18
    micro_batches: int = 3
    hidden: int = 64
    blocks: int = 2
    seq: int = 128
    batch: int = 8


#: DDP as it is, and what else is compared with it.
STUDY_VARIANTS = ("buckets", "one bucket", "accumulate", "bf16", "hierarchical")


#: The layouts; the first sends the fewest bytes across for a model that is large beside its batch.
STUDY_LAYOUTS = ("pp across, dp inside", "tp inside, dp across", "dp over all", "tp across, dp inside")


def link_bandwidth(rate: str | None) -> float:
    """Return the bytes of data per second that TCP carries over a link; infinite if it is not throttled."""
    return math.inf if rate is None else tcp_bandwidth(parse_bandwidth(rate))


def payload(card_bytes: float) -> float:
    """Return about how many bytes of data a network card has sent: without headers, with acknowledgements.

    On a wide link a card may send pieces of up to 64 KiB with one header each and count them so: then it is too few.
    """
    return tcp_bandwidth(card_bytes)


def seconds_of(samples: Iterable[Sample], **conditions: Any) -> list[float]:
    """Return the raw seconds of the samples that meet all conditions, in the order measured."""
    found = [s["seconds"] for s in samples if all(s.get(name) == value for name, value in conditions.items())]
    if not found:
        raise ValueError(f"no sample has {conditions}")
    return found


@dataclass(frozen=True)
class LinkFit:
    """Latency and bandwidth of exchanges inside, across or round the ring, fitted to the medians of all sizes."""

    where: str
    rate: str | None
    line: Line
    sizes: tuple[int, ...]
    medians: tuple[float, ...]


def link_fit(samples: Sequence[Sample], where: str = "across") -> LinkFit:
    """Fit α and W to the medians of a study's exchanges."""
    of_link = [s for s in samples if s["part"] == "link" and s["where"] == where]
    sizes = sorted({s["bytes"] for s in of_link})
    if not sizes:
        raise ValueError(f"the study has no exchanges {where!r}; use 'inside', 'across' or 'ring'")
    times = [median(seconds_of(of_link, bytes=size)) for size in sizes]
    return LinkFit(where, of_link[0]["rate"], fit_line(sizes, times), tuple(sizes), tuple(times))


@dataclass(frozen=True)
class Cluster:
    """The two hosts as the exchanges of a study describe them.

    Attributes:
        links: Bandwidth inside and across, one network card a host; no latency.
        pair: α of a round in which two ranks exchange a message, at least 0.
        ring: α of a round in which all ranks send one, at least 0: they share one machine's processors.
    """

    links: Topology
    pair: float
    ring: float

    def seconds(self, algorithm: str, size: int, itemsize: int = 4) -> float:
        """Return a collective's time: each round's bytes over `links`, and `pair`, or `ring` from 3 messages on."""
        numel, ranks = round(size / itemsize), self.links.ranks
        if algorithm == "hierarchical_all_reduce":
            todo = hierarchical_rounds(numel, ranks, self.links.ranks_per_node)
        else:
            todo = algorithm_rounds(algorithm, numel, ranks)
        waiting = sum(self.pair if len(sends) <= 2 else self.ring for sends in todo)
        return waiting + self.links.time(todo, itemsize)


def two_hosts(samples: Sequence[Sample]) -> Cluster:
    """Return the cluster that the exchanges of a study describe."""
    inside, across, ring = (link_fit(samples, where).line for where in ("inside", "across", "ring"))
    links = Topology(nodes=2, ranks_per_node=2, inside=inside.bandwidth, across=across.bandwidth)
    return Cluster(links, max(0.0, across.latency), max(0.0, ring.latency))


@dataclass(frozen=True)
class AllReduceRow:
    """One algorithm at one size in bytes: its seconds, predicted from the exchanges and measured."""

    algorithm: str
    bytes: int
    predicted: float
    measured: float
    samples: tuple[float, ...]


def all_reduce_rows(samples: Sequence[Sample]) -> list[AllReduceRow]:
    """Return every algorithm at every size of a study, by name and size."""
    cluster, rows = two_hosts(samples), []
    pairs = dict.fromkeys((s["algorithm"], s["bytes"]) for s in samples if s["part"] == "all-reduce")
    for algorithm, size in sorted(pairs):
        raw = tuple(seconds_of(samples, part="all-reduce", algorithm=algorithm, bytes=size))
        predicted = cluster.seconds(algorithm, size)
        rows.append(AllReduceRow(algorithm, size, predicted, median(raw), raw))
    return rows


def crossing(rows: Sequence[AllReduceRow], short: str, long: str, *, measured: bool) -> float | None:
    """Return the size in bytes from which `long` is the faster of two algorithms, None if it is not at the largest.

    Between two measured sizes it is where the ratio of the times passes 1, on scales that count factors.
    """
    times = {(row.algorithm, row.bytes): row.measured if measured else row.predicted for row in rows}
    sizes = sorted(size for name, size in times if name == long and (short, size) in times)
    gains = [math.log(times[short, size] / times[long, size]) for size in sizes]  # above 0: long is faster
    if not gains or gains[-1] <= 0:
        return None
    last = max((k for k, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return float(sizes[0])
    share = -gains[last] / (gains[last + 1] - gains[last])
    return math.exp((1 - share) * math.log(sizes[last]) + share * math.log(sizes[last + 1]))


@dataclass(frozen=True)
class ScalingRow:
    """DDP at one rate of the link.

    Attributes:
        compute: Seconds of a step without communication; an efficiency is this over the step's.
    """

    rate: str | None
    bytes_across: float
    compute: float
    predicted: float
    measured: float
    predicted_efficiency: float
    efficiency: float
    samples: tuple[float, ...]


def scaling_rows(samples: Sequence[Sample]) -> list[ScalingRow]:
    """Return DDP's step at every rate at which the study has it, the widest link first."""
    steps = [s for s in samples if s["part"] == "ddp" and s["variant"] == "buckets"]
    rows = []
    for rate in dict.fromkeys(s["rate"] for s in steps):
        raw = tuple(seconds_of(steps, rate=rate))
        sample = next(s for s in steps if s["rate"] == rate)
        step, measured = predicted_ddp_step(samples, sample), median(raw)
        efficiencies = step.compute / step.step, step.compute / measured
        rows.append(ScalingRow(rate, sample["bytes_across"], step.compute, step.step, measured, *efficiencies, raw))
    return sorted(rows, key=lambda row: link_bandwidth(row.rate), reverse=True)


@dataclass(frozen=True)
class SavingsRow:
    """One variant of DDP's step, at one rate; seconds are of one micro-batch.

    Attributes:
        bytes_across: Bytes that leave a host for each micro-batch.
        bought: The measured time of "buckets" over this one's; above 1 it is faster.
    """

    variant: str
    rate: str
    bytes_across: float
    predicted: float
    measured: float
    bought: float
    samples: tuple[float, ...]


def savings_rows(samples: Sequence[Sample]) -> list[SavingsRow]:
    """Return every variant at the rate where the study compares them; "buckets" comes first."""
    steps = [s for s in samples if s["part"] == "ddp" and s["variant"] in STUDY_VARIANTS]
    rate = next(s["rate"] for s in steps if s["variant"] != "buckets")
    found = {}
    for variant in STUDY_VARIANTS:
        sample = next(s for s in steps if s["variant"] == variant and s["rate"] == rate)
        m = sample["micro_batches"]
        raw = tuple(t / m for t in seconds_of(steps, variant=variant, rate=rate))
        found[variant] = sample["bytes_across"] / m, predicted_ddp_step(samples, sample).step / m, raw
    base = median(found["buckets"][2])
    return [
        SavingsRow(variant, rate, across, predicted, median(raw), base / median(raw), raw)
        for variant, (across, predicted, raw) in found.items()
    ]


def predicted_ddp_step(samples: Sequence[Sample], sample: Sample) -> DDPStep:
    """Return a step's predicted time: measured computation, and communication by the bytes that cross the link."""
    computing = [s for s in samples if s["part"] == "ddp" and s["variant"] == "compute"]
    forward, backward = (median(s[half] for s in computing) for half in ("forward", "backward"))
    buckets = sample["buckets"]
    # An all-reduce is taken to be as slow as a flat ring that lets as many bytes cross the link.
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


@dataclass(frozen=True)
class PlacementRow:
    """One layout at one rate.

    Attributes:
        bytes_across: Bytes that leave a host in a step, by the formula.
        counted: The same, counted by the network card, without what headers take.
        predicted: What those bytes take, bytes_across / W, and the step's time on the link that is not throttled, one
            after the other. What overlaps makes the step shorter.
    """

    layout: str
    rate: str | None
    bytes_across: float
    counted: float
    predicted: float
    measured: float
    loss: float
    samples: tuple[float, ...]


def layout_bytes(layout: str, config: ModelConfig, *, batch: int, seq: int, bytes_per_value: int = 4) -> float:
    """Return the bytes that leave the busier host in one training step, on two hosts of two ranks.

    Raises:
        ValueError: If the layout is unknown, or the model's embeddings are tied, which a pipeline would send too.
    """
    if config.tied:
        raise ValueError("tied embeddings would cross the link too; use a config with tied=False")
    stream = batch * seq * config.hidden
    values = {
        "dp over all": lambda: ring_all_reduce_bytes(count_params(config).total, 4),
        # Both ranks of a host send the half that they hold, and every norm is on both.
        "tp inside, dp across": lambda: 2 * ring_all_reduce_bytes(rank_params(config, 2), 2),
        "pp across, dp inside": lambda: float(stream),
        # f and g of every block, the embedding's sum and the gradient of the head's input; then the cross-entropy:
        # its highest logit, its sum and its target, for every token.
        "tp across, dp inside": lambda: float((4 * config.num_layers + 2) * stream + 3 * batch * seq),
    }
    if layout not in values:
        raise ValueError(f"layout={layout!r} is unknown; use one of {'; '.join(STUDY_LAYOUTS)}")
    return bytes_per_value * values[layout]()


def placement_rows(samples: Sequence[Sample]) -> list[PlacementRow]:
    """Return every layout of the study at the throttled rate, fewest bytes first."""
    steps = [s for s in samples if s["part"] == "placement"]
    rate = next(s["rate"] for s in steps if s["rate"] is not None)
    rows = []
    for layout in STUDY_LAYOUTS:
        last = [s for s in steps if s["layout"] == layout and s["rate"] == rate][-1]
        raw = tuple(seconds_of(steps, layout=layout, rate=rate))
        link = last["bytes_across"] / link_bandwidth(rate)
        counted = payload(last["card_bytes"])
        predicted = link + median(seconds_of(steps, layout=layout, rate=None))
        rows.append(
            PlacementRow(layout, rate, last["bytes_across"], counted, predicted, median(raw), last["loss"], raw)
        )
    return sorted(rows, key=lambda row: row.bytes_across)
