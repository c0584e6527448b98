"""What a study of the two-host cluster says: its samples as rows, each with a prediction beside the measurement.

`lablib.launch.network_study` measures, on 4 ranks and 2 hosts, and returns samples: dictionaries with the raw seconds
of one repetition each, taken from the slowest rank. Here they become rows. A sample knows its conditions:

    part          what else it has, beside "seconds" and "turn" (its repetition)
    "link"        where, rate, bytes: one round in which each rank that takes part sends and receives so many bytes;
                  "inside" are two ranks of a host, "across" two of different hosts, "ring" all ranks
    "all-reduce"  rate, algorithm, bytes
    "ddp"         rate, variant, micro_batches, ranks, hosts, ranks_per_host, gradient_bytes, buckets (bytes as sent),
                  bytes_across; "alone" and "compute" also have forward and backward
    "placement"   rate, layout, bytes_across (leaving a host in a step, counted by the ranks)

A rate is text, such as "500 Mb/s", or None for a link that is not throttled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lablib.calc.collective_rounds import hierarchical_rounds, rounds
from lablib.calc.line_fit import Line, fit_line
from lablib.calc.topology import Topology, tcp_bandwidth
from lablib.calc.units import parse_bandwidth

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the study measures; sizes are such that a sample is short.

    Attributes:
        link_rate: The link for exchanges and all-reduces.
        link_sizes: Bytes of the exchanges.
        reduce_sizes: Bytes of the all-reduces.
        ddp_rates: Links for DDP, next to one that is not throttled.
        savings_rate: The link on which DDP's variants are compared; one of `ddp_rates`.
        placement_rate: The link on which layouts are compared.
        turns: Samples of each.
        width: Of DDP's linear layers.
        layers: How many.
        tokens: Rows on each rank.
        bucket_bytes: When a bucket of DDP is full.
        micro_batches: What one accumulated step holds.
        hidden: Width of the transformer that is placed.
        blocks: Its layers.
        seq: Tokens in a sequence.
        batch: Sequences of all ranks together.
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


def seconds_of(samples: Iterable[Sample], **conditions: Any) -> list[float]:
    """Return the raw seconds of the samples that meet all conditions, in the order measured.

    Args:
        samples: Of a study.
        **conditions: Names and values that a sample must have.

    Raises:
        ValueError: If there is none.
    """
    found = [s["seconds"] for s in samples if all(s.get(name) == value for name, value in conditions.items())]
    if not found:
        raise ValueError(f"no sample has {conditions}")
    return found


def link_bandwidth(rate: str | None) -> float:
    """Return the bytes of data per second that TCP carries over a link; infinite if it is not throttled.

    Args:
        rate: As "500 Mb/s".
    """
    return math.inf if rate is None else tcp_bandwidth(parse_bandwidth(rate))


def payload(card_bytes: float) -> float:
    """Return about how many bytes of data a throttled card has sent: without headers, but with acknowledgements.

    A card that is not throttled hands over pieces of up to 64 KiB with one header each, and counts them so.
    """
    return tcp_bandwidth(card_bytes)


@dataclass(frozen=True)
class LinkFit:
    """Latency and bandwidth between two ranks, from exchanges of many sizes.

    Attributes:
        where: "inside" a host, "across" two hosts, or "ring".
        rate: Of the link across, as text.
        line: The fitted t = α + S/W; its `.latency`, `.bandwidth` and `.residuals`.
        sizes: S of each point in bytes.
        medians: The time of each in seconds.
        predicted_bandwidth: What TCP can carry on a link of this rate, bytes per second; infinite inside.
    """

    where: str
    rate: str | None
    line: Line
    sizes: tuple[int, ...]
    medians: tuple[float, ...]
    predicted_bandwidth: float


def link_fit(samples: Sequence[Sample], where: str = "across") -> LinkFit:
    """Fit α and W to the medians of a study's exchanges.

    Args:
        samples: Of a study.
        where: "inside", "across" or "ring".

    Raises:
        ValueError: If there are no such samples.
    """
    of_link = [s for s in samples if s["part"] == "link" and s["where"] == where]
    sizes = sorted({s["bytes"] for s in of_link})
    if not sizes:
        raise ValueError(f"the study has no exchanges {where!r}; use 'inside', 'across' or 'ring'")
    times = [median(seconds_of(of_link, bytes=size)) for size in sizes]
    rate = of_link[0]["rate"]
    bandwidth = math.inf if where == "inside" else link_bandwidth(rate)
    return LinkFit(where, rate, fit_line(sizes, times), tuple(sizes), tuple(times), bandwidth)


@dataclass(frozen=True)
class Cluster:
    """The two hosts as the exchanges of a study describe them.

    Attributes:
        links: Bandwidth inside and across, one card a host; no latency.
        pair: α of a round in which two ranks exchange a message.
        ring: α of a round in which all ranks send one: they share one machine's processors, so it takes longer.
    """

    links: Topology
    pair: float
    ring: float

    def seconds(self, algorithm: str, size: int, itemsize: int = 4) -> float:
        """Return the time of a collective: for each round its latency, and the bytes through the busiest port.

        Args:
            algorithm: A name of `lablib.calc.collective_costs.ALGORITHMS`, or "hierarchical_all_reduce".
            size: S in bytes.
            itemsize: Bytes per element.
        """
        numel, ranks = round(size / itemsize), self.links.ranks
        hierarchical = algorithm == "hierarchical_all_reduce"
        todo = (
            hierarchical_rounds(numel, ranks, self.links.ranks_per_node)
            if hierarchical
            else rounds(algorithm, numel, ranks)
        )
        waiting = sum(self.pair if len(sends) <= 2 else self.ring for sends in todo)
        return waiting + self.links.time(todo, itemsize)


def two_hosts(samples: Sequence[Sample]) -> Cluster:
    """Return the cluster that the exchanges of a study describe."""
    inside, across, ring = (link_fit(samples, where).line for where in ("inside", "across", "ring"))
    links = Topology(nodes=2, ranks_per_node=2, inside=inside.bandwidth, across=across.bandwidth)
    return Cluster(links, max(0.0, across.latency), max(0.0, ring.latency))


@dataclass(frozen=True)
class AllReduceRow:
    """One algorithm at one size.

    Attributes:
        algorithm: A name of `lablib.calc.collective_costs.ALGORITHMS`, or "hierarchical_all_reduce".
        bytes: S.
        predicted: Seconds, from the fitted link.
        measured: Median seconds.
        samples: The raw seconds.
    """

    algorithm: str
    bytes: int
    predicted: float
    measured: float
    samples: tuple[float, ...]


def all_reduce_rows(samples: Sequence[Sample]) -> list[AllReduceRow]:
    """Return every algorithm at every size, predicted by the exchanges of the same study and measured."""
    cluster, rows = two_hosts(samples), []
    pairs = dict.fromkeys((s["algorithm"], s["bytes"]) for s in samples if s["part"] == "all-reduce")
    for algorithm, size in sorted(pairs):
        raw = tuple(seconds_of(samples, part="all-reduce", algorithm=algorithm, bytes=size))
        predicted = cluster.seconds(algorithm, size)
        rows.append(AllReduceRow(algorithm, size, predicted, median(raw), raw))
    return rows


def crossing(rows: Sequence[AllReduceRow], short: str, long: str, *, measured: bool) -> float | None:
    """Return the size in bytes from which `long` is the faster of two algorithms, None if it never is.

    Between two measured sizes it is where the ratio of the times passes 1, on scales that count factors.

    Args:
        rows: As `all_reduce_rows` returns them.
        short: The algorithm with fewer rounds.
        long: The one with fewer bytes over the link.
        measured: By the measured times; otherwise by the predicted ones.
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
