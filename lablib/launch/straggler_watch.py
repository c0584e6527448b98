"""Who keeps the others waiting: the time that each rank works, without the time that it waits.

    watch = StragglerWatch(every=20)            # a callback of the trainer
    watch.found                                 # Straggler(rank=3, busy=1.91, others=1.02, waiting=0.35), or None

A step takes equally long on all ranks, because its collectives end for all at once. So look before the collective:
at the time a rank works until it gets there. On a CPU that is the processor time of the training thread, which stands
still while the thread waits. A GPU's stream does not tell working from waiting, so there each rank is given the same
small piece of work now and then, and timed.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lablib.launch.trainer import Callback, Trainer

_SIDE = 2048  # of the matrices of a probe


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: Which one.
        busy: Median of its times, in seconds.
        others: Median of those of all other ranks.
        waiting: Share of the time that the other ranks spend waiting for it, 1 - others / busy.
    """

    rank: int
    busy: float
    others: float

    @property
    def waiting(self) -> float:
        """Share of the time that the other ranks wait, on the median."""
        return 1 - self.others / self.busy

    def __str__(self) -> str:
        """Return one sentence."""
        return (
            f"rank {self.rank} works {self.busy:.3g} s where the others work {self.others:.3g} s: they wait "
            f"{self.waiting:.0%} of the time"
        )


def find_straggler(times: Sequence[Sequence[float]], factor: float = 1.25) -> Straggler | None:
    """Return the slowest rank if it is slower than the others by a factor, not only once but on the median.

    Args:
        times: For each rank, seconds of work before the collectives of several steps.
        factor: Slower than this counts.

    Raises:
        ValueError: If there are fewer than two ranks, a rank has no times, or the factor is not above 1.

    Chapter: book/11_practical_fsdp.md.
    """
    if len(times) < 2 or not all(times) or factor <= 1:
        raise ValueError(
            f"{len(times)} ranks must be at least 2, each with a time, and factor={factor} above 1"
        )
    busy = [median(each) for each in times]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = median(busy[:slowest] + busy[slowest + 1 :])
    return Straggler(slowest, busy[slowest], others) if busy[slowest] > factor * others else None


class StragglerWatch(Callback):
    """Compares the ranks' own times now and then; all ranks get the same finding.

    Args:
        every: Steps between two comparisons.
        factor: As of `find_straggler`.
        clock: Seconds that this rank has worked so far; by default the processor time of the calling thread. On a
            GPU it is not used.

    Attributes:
        found: The straggler of the last comparison, or None.
        findings: Step and straggler of every comparison that found one.
    """

    def __init__(
        self, every: int = 20, factor: float = 1.25, clock: Callable[[], float] = time.thread_time
    ) -> None:
        if every < 1 or factor <= 1:
            raise ValueError(f"every={every} must be at least 1, and factor={factor} above 1")
        self.every, self.factor, self._clock = every, factor, clock
        self.found: Straggler | None = None
        self.findings: list[tuple[int, Straggler]] = []
        self._times: list[float] = []

    def on_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        # A group of its own: a checkpoint may be on its way in that of the checkpoints.
        self._group = dist.new_group(backend="gloo")
        self._times, self._before = [], self._clock()

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Take this step's time; compare if it is time to."""
        now = self._clock()
        self._times.append(now - self._before)
        if trainer.step % self.every == 0 and dist.get_world_size() > 1:
            gpu = trainer.device.type == "cuda"
            times: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(times, probe(trainer.device) if gpu else self._times, group=self._group)
            self.found = find_straggler(times, self.factor)
            if self.found:
                self.findings.append((trainer.step, self.found))
            self._times, now = [], self._clock()
        self._before = now


def probe(device: torch.device, repeats: int = 5) -> list[float]:
    """Return seconds of the same matrix product, again and again, on this device alone.

    Args:
        device: To be timed.
        repeats: Products timed; one before them warms up.
    """
    a = torch.ones(_SIDE, _SIDE, device=device)
    out = torch.empty_like(a)
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return times[1:]
