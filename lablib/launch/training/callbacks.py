"""Callbacks of the trainer: those that watch a run, and those with which it survives; and `resume`.

    trainer = Trainer(config, callbacks=[PrintSteps(10), StragglerWatch(20), SaveEvery(100), StopOnSignal()])
    for sentence in resume(trainer):
        print(sentence)
    trainer.run()
    sys.exit(exit_code(trainer))

A step takes equally long on all ranks, because its collectives end for all at once. So `StragglerWatch` compares how
long each rank works before them: on a CPU the processor time of the training thread, which stands still while the
thread waits. A GPU's stream does not tell working from waiting, so there each rank is timed on the same small matrix
product now and then.

Exit codes of a rank:

    0       the run is finished
    143     it was stopped by a signal, and its last step is saved (128 + SIGTERM); start it again to continue
    1       it failed

torchrun turns every code but 0 into 1, and ends with 1 when it is told to stop itself. A scheduler that restarts a
stopped job should ask `finished(folder)`, not torchrun's code.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, schedule, supported_activities, tensorboard_trace_handler

from lablib.calc.hardware import no_figures
from lablib.calc.units import format_bytes
from lablib.launch.fsdp import complete_checkpoints, latest_checkpoint, read_info, verify_checkpoint
from lablib.launch.ranks import agree, from_rank_0, own_rank
from lablib.launch.records import JsonLines, RankLog
from lablib.launch.training.trainer import Callback, Trainer

STOPPED = 128 + signal.SIGTERM
_SIDE = 2048  # of the matrices of a probe


# --- watching -------------------------------------------------------------------------------------------------------


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
            print(format_metrics(metrics), flush=True)

    def on_end(self, trainer: Trainer) -> None:
        """Say how the run ended."""
        if trainer.rank == 0:
            why = f": {trainer.stop_reason}" if trainer.stop_reason else ""
            print(f"{trainer.outcome} after step {trainer.step}{why}", flush=True)


def format_metrics(metrics: dict[str, Any]) -> str:
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
            own = time_matmul(trainer.device) if trainer.device.type == "cuda" else self._times
            times: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(times, own, group=self._group)
            self.found = find_straggler(times, self.factor)
            if self.found:
                self.findings.append((trainer.step, self.found))
            self._times = []
        self._before = self._clock()


def time_matmul(device: torch.device, repeats: int = 5) -> list[float]:
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


# --- surviving ------------------------------------------------------------------------------------------------------


class SaveEvery(Callback):
    """Saves a checkpoint every so many steps, in the background, and one at the end."""

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} between checkpoints must be at least 1")
        self.steps = steps

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Save if it is time."""
        if trainer.step % self.steps == 0:
            trainer.finish_saving()  # a save in the background uses the group that `check_room` asks
            check_room(trainer.checkpoints)
            trainer.save(wait=False)

    def on_end(self, trainer: Trainer) -> None:
        """Save the last step; after a failure there is nothing to save."""
        if trainer.outcome in ("finished", "stopped"):
            trainer.save(wait=True)


class StopOnSignal(Callback):
    """Saves and stops on a signal: a machine that is taken away sends SIGTERM, Ctrl-C SIGINT, a lost terminal SIGHUP.

    A rank only takes note. All ranks agree at the end of the step, so they stop after the same one, and save it
    together. torchrun hands SIGTERM on to its ranks and kills them 30 s later: a step and a save must fit into that.
    Since torch 2.12 TORCH_ELASTIC_SHUTDOWN_TIMEOUT says how many seconds; less than whoever stops torchrun waits itself.

    A second Ctrl-C interrupts at once. What is ignored already, such as SIGHUP under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Begin to listen."""

        def note(number: int, frame: object) -> None:
            trainer.request_stop(signal.Signals(number).name)
            if number == signal.SIGINT:  # asked twice, somebody does not want to wait for the step
                signal.signal(number, signal.default_int_handler)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, note)

    def on_end(self, trainer: Trainer) -> None:
        """Save what a stopped run has learned, then listen no more: a second signal would cut the save short."""
        if trainer.outcome == "stopped":
            trainer.save(wait=True)
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class KillOnce(Callback):
    """Ends one rank with SIGKILL after a step: nothing can catch it, as with a broken machine.

    The first time only: the file `mark` is made before the kill, and where it exists nothing happens.
    """

    def __init__(self, rank: int, step: int, mark: str | Path) -> None:
        self.rank, self.step, self.mark = rank, step, Path(mark)

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Kill this process if it is its turn."""
        if trainer.step != self.step or self.mark.exists():
            return
        trainer.finish_saving()  # on all ranks: the restart then finds the same checkpoint every time
        if trainer.rank == self.rank:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class LogEvents(Callback):
    """Writes what happens to a run, rank by rank, to `lablib.launch.records.logs`: start, checkpoints, end.

    Give it last: an end is then logged once the others are through, `SaveEvery` with the last save, and not if one failed.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Log process, host, attempt and the step that the run starts from."""
        self._log = RankLog(trainer.folder / "events", trainer.rank)
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        ranks, host = trainer.world_size, os.uname().nodename
        self._log.write("start", step=trainer.step, ranks=ranks, attempt=attempt, pid=os.getpid(), host=host)
        self._saved = latest_checkpoint(trainer.checkpoints)

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Log a checkpoint that has become complete."""
        if (newest := latest_checkpoint(trainer.checkpoints)) != self._saved:
            self._saved = newest
            self._log.write("checkpoint", step=trainer.step, path=str(newest))

    def on_end(self, trainer: Trainer) -> None:
        """Log how the run ended."""
        self._log.write("end", step=trainer.step, outcome=trainer.outcome, reason=trainer.stop_reason)
        self._log.close()


def resume(trainer: Trainer) -> list[str]:
    """Continue from the newest undamaged checkpoint; every rank must call. Return in sentences what was done.

    A damaged one is renamed to "damaged-...", so that its step can be saved again.
    """
    chosen, sentences = _newest_undamaged(trainer.checkpoints)
    agree(lambda: _set_aside(trainer.checkpoints, chosen) if trainer.rank == 0 else None, "resuming failed")
    if chosen is None:
        return [*sentences, "there is no checkpoint to resume from: the run starts at step 0"]
    progress = trainer.resume(chosen)
    return [*sentences, f"resumed after step {progress.step}, saved by {progress.ranks} ranks"]


def finished(folder: str | Path, steps: int) -> bool:
    """Say whether a run has a checkpoint of its last step."""
    newest = latest_checkpoint(Path(folder) / "checkpoints")
    return newest is not None and read_info(newest)["step"] >= steps


def exit_code(trainer: Trainer) -> int:
    """Return the code that a rank should end with, as the module's head says."""
    return {"finished": 0, "stopped": STOPPED}.get(trainer.outcome or "", 1)


def _newest_undamaged(folder: Path) -> tuple[Path | None, list[str]]:
    sentences = []
    for path in from_rank_0(complete_checkpoints(folder)[::-1]):
        try:
            verify_checkpoint(path)
        except ValueError as error:
            sentences.append(str(error).removesuffix("; use an older one"))
        else:
            return path, sentences
    return None, sentences


def _set_aside(folder: Path, chosen: Path | None) -> None:
    """Rename the damaged checkpoints, which are those newer than the chosen one."""
    for path in reversed(complete_checkpoints(folder)):
        if path == chosen:
            return
        target = path.with_name(f"damaged-{path.name}")
        for again in range(1, 1000):
            if not target.exists():
                break
            target = path.with_name(f"damaged-{path.name}-{again}")
        path.rename(target)


def check_room(folder: str | Path) -> None:
    """See to it that another checkpoint of the same size fits; every rank must call.

    A checkpoint is written beside the old ones, so `keep` of them and one more must fit. The first one is of unknown
    size, and passes.
    """
    agree(lambda: _check(Path(folder)) if own_rank() == 0 else None, "looking at the disk failed")


def _check(folder: Path) -> None:
    newest = latest_checkpoint(folder)
    if newest is None:
        return
    size = sum(path.stat().st_size for path in newest.iterdir())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ValueError(
            f"the disk of {folder} has {format_bytes(free)} left, and a checkpoint takes {format_bytes(size)}: free "
            f"some room or keep fewer checkpoints; {newest.name} is whole, and the run resumes from there"
        )
