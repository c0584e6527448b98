"""Callbacks that watch a run: a line a step, the loss on held-out data, a profile, and the rank that others wait for.

    watch = StragglerWatch(every=20)            # a callback of the trainer
    watch.found                                 # Straggler(rank=3, busy=1.91, others=1.02), or None

A step takes equally long on all ranks, because its collectives end for all at once. So `StragglerWatch` compares how
long each rank works before them: on a CPU the processor time of the training thread, which stands still while the
thread waits. A GPU's stream does not tell working from waiting, so there each rank is timed on the same small matrix
product now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, schedule, supported_activities, tensorboard_trace_handler

from lablib.calc.hardware import no_figures
from lablib.launch.records import JsonLines
from lablib.launch.training.trainer import Callback, Trainer

_SIDE = 2048  # of the matrices of a probe


class PrintSteps(Callback):
    """Print loss, gradient norm, throughput, MFU and memory."""

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.every = every

    def on_start(self, trainer: Trainer) -> None:
        """Say what is trained."""
        if trainer.rank == 0:
            print(trainer.report, flush=True)
            print(
                f"{trainer.accumulation} micro-batches of {trainer.micro_batch} sequences a rank and step, "
                f"from step {trainer.step + 1} to {trainer.config.steps}",
                flush=True,
            )
            if trainer.device.type == "cuda" and trainer.peak is None:
                print(no_figures(torch.cuda.get_device_name(trainer.device)), flush=True)

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Print the step."""
        due = metrics["step"] % self.every == 0 or metrics["step"] == trainer.config.steps
        if trainer.rank == 0 and due:
            print(line(metrics), flush=True)

    def on_end(self, trainer: Trainer) -> None:
        """Say how the run ended."""
        if trainer.rank == 0:
            why = f": {trainer.stop_reason}" if trainer.stop_reason else ""
            print(f"{trainer.outcome} after step {trainer.step}{why}", flush=True)


def line(metrics: dict[str, Any]) -> str:
    """Return a step's metrics as one line."""
    parts = [
        f"step {metrics['step']:>5}",
        f"loss {metrics['loss']:.4f}",
        f"norm {metrics['grad_norm']:.2f}",
        f"lr {metrics['lr']:.2e}",
        f"{metrics['seconds']:.3f} s",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{metrics['memory_bytes'] / 2**30:.2f} GiB",
    ]
    if metrics["mfu"] is not None:
        parts.insert(-1, f"MFU {metrics['mfu']:.1%}")
    return "  ".join(parts)


class Validate(Callback):
    """Measures the loss on the held-out sequences every few steps, and writes it to `validation.jsonl`.

    Attributes:
        losses: Loss by step.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.every = every
        self.losses: dict[int, float] = {}

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Validate, on all ranks together."""
        if trainer.step % self.every:
            return
        loss = self.losses[trainer.step] = trainer.validate()
        if trainer.rank == 0:
            file = JsonLines(trainer.folder / "validation.jsonl")
            file.write({"step": trainer.step, "tokens": trainer.samples * trainer.config.seq, "loss": loss})
            file.close()
            print(f"step {trainer.step:>5}  held-out loss {loss:.4f}", flush=True)


class Profile(Callback):
    """Records some steps of every rank with PyTorch's profiler, to `traces/rank0.*.pt.trace.json` and so on.

    Args:
        skip: Steps before: the first ones compile, allocate and fill caches. One more warms the profiler up.
        steps: Steps that are recorded; each makes the file larger.
    """

    def __init__(self, skip: int = 5, steps: int = 2) -> None:
        if skip < 1 or steps < 1:
            raise ValueError(f"skip={skip} and steps={steps} must be at least 1")
        self.plan = schedule(skip_first=skip - 1, wait=0, warmup=1, active=steps, repeat=1)
        self._profiler: profile | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        write = tensorboard_trace_handler(str(trainer.folder / "traces"), worker_name=f"rank{trainer.rank}")
        # There is one cycle, so that acc_events keeps nothing more: without it torch 2.11 warns, and where a warning is
        # an error its profiler ends the process.
        how = {"schedule": self.plan, "on_trace_ready": write, "acc_events": True}
        self._profiler = profile(activities=supported_activities(), **how)
        self._profiler.start()

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Tell the profiler that a step has ended."""
        self._profiler.step()

    def on_end(self, trainer: Trainer) -> None:
        """Write what is recorded."""
        if self._profiler is not None:
            self._profiler.stop()


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, the median of its times in seconds, and that of all other ranks."""

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
    """Return the slowest rank if the median of its seconds is above `factor` times that of the others, by rank."""
    busy = [median(each) for each in times]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = median(busy[:slowest] + busy[slowest + 1 :])
    return Straggler(slowest, busy[slowest], others) if busy[slowest] > factor * others else None


class StragglerWatch(Callback):
    """Compares the ranks' own times every few steps; all ranks get the same finding.

    Attributes:
        found: The straggler of the last comparison, or None.
        findings: Step and straggler of every comparison that found one.
    """

    def __init__(self, every: int = 20, factor: float = 1.25, clock: Callable[[], float] = time.thread_time) -> None:
        if every < 1 or factor <= 1:
            raise ValueError(f"every={every} must be at least 1, and factor={factor} above 1")
        self.every, self.factor, self._clock = every, factor, clock
        self.found: Straggler | None = None
        self.findings: list[tuple[int, Straggler]] = []

    def on_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        # A group of its own: a checkpoint may be on its way in that of the checkpoints.
        self._group = dist.new_group(backend="gloo")
        self._times: list[float] = []
        self._before = self._clock()

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Take this step's time, and compare every few steps."""
        self._times.append(self._clock() - self._before)
        if trainer.step % self.every == 0 and dist.get_world_size() > 1:
            own = probe(trainer.device) if trainer.device.type == "cuda" else self._times
            times: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(times, own, group=self._group)
            self.found = find_straggler(times, self.factor)
            if self.found:
                self.findings.append((trainer.step, self.found))
            self._times = []
        self._before = self._clock()


def probe(device: torch.device, repeats: int = 5) -> list[float]:
    """Return the seconds of the same matrix product on a GPU, several times, after one to warm up."""
    a = torch.ones(_SIDE, _SIDE, device=device)
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return times[1:]
