"""The study of rung 10: one job on 4 ranks and 2 hosts measures a link, collectives, DDP and the place of every axis.

    study = network_study()          # on this machine, about 12 s; where it has no cluster, the record is replayed
    for row in scaling_rows(study.samples): ...

Starting ranks on a cluster takes longer than measuring on it. So there is one launch, and rank 0 changes the links'
bandwidth between the parts.

Rows, predicted beside measured, are made of the samples by `lablib.calc.network_rows`, `lablib.calc.network_ddp_rows`
and `lablib.calc.network_placement`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.network_rows import link_bandwidth
from lablib.launch.cluster import Cluster, why_not
from lablib.launch.experiments import RECORD_SWITCH, Record, run_or_replay
from lablib.launch.network_clock import Sample, set_rate, slowest

NAME = "10_network_study"
HOSTS, RANKS_PER_HOST = 2, 2
PARTS = ("link", "all-reduce", "ddp", "placement")


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


@dataclass(frozen=True)
class Study:
    """What was measured, and where.

    Attributes:
        samples: Raw, as `lablib.calc.network_rows` describes them.
        record: Where they were replayed from or written to; None if they were measured just now and not kept.
        refused: Why this machine has no cluster, in one sentence; None if it has.
    """

    samples: list[Sample]
    record: Record | None
    refused: str | None


def network_study(settings: Settings | None = None) -> Study:
    """Measure on this machine; where it has no cluster, say why and replay the record.

    Args:
        settings: What to measure; by default what was recorded.

    Raises:
        FileNotFoundError: If there is neither a cluster nor a record.
        ClusterError: If a rank fails.
    """
    if os.environ.get(RECORD_SWITCH) == "1":
        record = run_or_replay(NAME, lambda: measure(settings))
        return Study(record.samples, record, None)
    refused = why_not()
    if refused is None:
        return Study(measure(settings), None, None)
    print(f"No cluster on this machine: {refused}.")
    record = run_or_replay(NAME, lambda: measure(settings))
    return Study(record.samples, record, refused)


def measure(settings: Settings | None = None, parts: Sequence[str] = PARTS) -> list[Sample]:
    """Return the samples of one job on the cluster.

    Args:
        settings: What to measure.
        parts: Which of `PARTS`.

    Raises:
        ValueError: If a part is unknown.
        Refused: If this machine has no cluster.
        ClusterError: If a rank fails.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"parts={unknown} are unknown; use {', '.join(PARTS)}")
    with Cluster(hosts=HOSTS) as cluster:
        job = (study_job, settings or Settings(), tuple(parts))
        return slowest(cluster.run_ranks(*job, ranks_per_host=RANKS_PER_HOST))


def study_job(settings: Settings, parts: Sequence[str]) -> list[Sample]:
    """Measure all parts on this rank, from the widest link to the narrowest.

    Args:
        settings: What to measure.
        parts: Which of `PARTS`.
    """
    from lablib.launch.network_parts import Parts  # here: torch is for the ranks alone

    todo = Parts(settings, parts)
    samples = todo.at_rate(None)
    rates = {*settings.ddp_rates, settings.link_rate, settings.savings_rate, settings.placement_rate}
    for rate in sorted(rates, key=link_bandwidth, reverse=True):
        if todo.has(rate):
            set_rate(rate)
            samples += todo.at_rate(rate)
    return samples
