"""Time something on every rank of the cluster, and read from the network card what really left the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from lablib.launch._cluster_network import CARD
from lablib.launch.cluster import throttle

Sample = dict[str, Any]


def set_rate(rate: str | None) -> None:
    """Throttle all links, from inside. Call it on every rank; nothing may be on its way.

    Args:
        rate: As for `lablib.launch.cluster.throttle`.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        throttle(rate)
    dist.barrier()


def card_bytes() -> int:
    """Return the bytes that this host's card has sent since it was made, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == CARD:
            return int(numbers.split()[8])  # after the eight columns of what came in
    return 0  # no cluster: nothing leaves


def timed(
    work: Callable[[], Any],
    *,
    turns: int,
    warm: int = 1,
    lead: int = 0,
    repeats: int = 1,
    **conditions: Any,
) -> list[Sample]:
    """Return one sample for each turn of some work; all ranks start each turn together.

    Args:
        work: What to time. If it returns a dictionary, the sample takes that in.
        turns: How often it is timed.
        warm: Turns before the first that counts.
        lead: Runs just before the clock starts, in every turn. A link that has rested lets a burst through at once;
            what leads uses it up.
        repeats: Runs in a row within one turn; seconds are the median run's.
        **conditions: What the samples shall say of themselves.
    """
    samples = []
    for turn in range(-warm, turns):
        dist.barrier()
        for _ in range(lead):
            work()
        sent, ticks = card_bytes(), [time.perf_counter()]
        for _ in range(repeats):
            said = work()
            ticks.append(time.perf_counter())
        dist.barrier()  # before the card is read again: the other rank of this host uses it too
        counted = (card_bytes() - sent) / repeats
        if turn >= 0:
            seconds = median(end - start for start, end in itertools.pairwise(ticks))
            sample = {**conditions, "turn": turn, "seconds": seconds, "card_bytes": round(counted)}
            samples.append(sample | (said if isinstance(said, dict) else {}))
    return samples


def slowest(by_rank: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return of every sample the slowest rank's, with the bytes of the card that sent the most.

    Args:
        by_rank: The samples of each rank, in the same order on all.
    """
    merged = []
    for same in zip(*by_rank, strict=True):
        worst = max(same, key=lambda sample: sample["seconds"])
        merged.append({**worst, "card_bytes": max(sample["card_bytes"] for sample in same)})
        if losses := [sample["loss"] for sample in same if sample.get("loss") is not None]:
            merged[-1]["loss"] = sum(losses) / len(losses)  # of the whole batch: every rank has as much of it
    return merged
