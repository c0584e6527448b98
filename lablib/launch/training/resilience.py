"""Callbacks with which a run survives: checkpoints in the background, a clean stop on a signal, and `resume`.

    trainer = Trainer(config, callbacks=[SaveEvery(100), StopOnSignal()])
    for sentence in resume(trainer):
        print(sentence)
    trainer.run()
    sys.exit(exit_code(trainer))

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lablib.calc.units import format_bytes
from lablib.launch.fsdp import complete_checkpoints, latest_checkpoint, read_info, verify_checkpoint
from lablib.launch.ranks import agree, from_rank_0, own_rank
from lablib.launch.records import RankLog
from lablib.launch.training.trainer import Callback, Trainer

STOPPED = 128 + signal.SIGTERM


class SaveEvery(Callback):
    """Saves a checkpoint every so many steps, in the background unless `wait`, and one at the end."""

    def __init__(self, steps: int, *, wait: bool = False) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} between checkpoints must be at least 1")
        self.steps, self.wait = steps, wait

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Save if it is time."""
        if trainer.step % self.steps == 0:
            trainer.finish_saving()  # a save in the background uses the group that `check_room` asks
            check_room(trainer.checkpoints)
            trainer.save(wait=self.wait)

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

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) -> None:
        self.signals = signals
        self._before: dict[int, Any] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Begin to listen."""

        def note(number: int, frame: object) -> None:
            trainer.request_stop(signal.Signals(number).name)
            if number == signal.SIGINT:  # asked twice, somebody does not want to wait for the step
                signal.signal(number, signal.default_int_handler)

        for number in self.signals:
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
    """Writes what happens to a run, rank by rank, to `lablib.launch.records.logs`: start, checkpoints, end."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._saved: Path | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Log process, host, attempt and the step that the run starts from."""
        self._log = RankLog(self._folder or trainer.folder / "events", trainer.rank)
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
    chosen, told = _newest_undamaged(trainer.checkpoints)
    agree(lambda: _set_aside(trainer.checkpoints, chosen) if trainer.rank == 0 else None, "resuming failed")
    if chosen is None:
        return [*told, "there is no checkpoint to resume from: the run starts at step 0"]
    progress = trainer.resume(chosen)
    return [*told, f"resumed after step {progress.step}, saved by {progress.ranks} ranks"]


def finished(folder: str | Path, steps: int) -> bool:
    """Say whether a run has a checkpoint of its last step."""
    newest = latest_checkpoint(Path(folder) / "checkpoints")
    return newest is not None and read_info(newest)["step"] >= steps


def exit_code(trainer: Trainer) -> int:
    """Return the code that a rank should end with, as the module's head says."""
    return {"finished": 0, "stopped": STOPPED}.get(trainer.outcome or "", 1)


def _newest_undamaged(folder: Path) -> tuple[Path | None, list[str]]:
    told = []
    for path in from_rank_0(complete_checkpoints(folder)[::-1]):
        try:
            verify_checkpoint(path)
        except ValueError as error:
            told.append(str(error).replace("; use an older one", "; the one before it is used"))
        else:
            return path, told
    return None, told


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
