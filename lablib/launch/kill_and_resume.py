"""The proof of resilience: a run that loses a rank to kill -9 learns the same as one that does not.

hit = kill_and_resume(folder, settings, save_every=4, kill=(1, 6))
calm = undisturbed(other_folder, settings)
hit.losses == calm                      # on the same number of ranks bit for bit
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lablib.launch.elastic import Job, torchrun
from lablib.launch.experiments import repository_root
from lablib.launch.ranks import run_ranks
from lablib.launch.train_config import TrainConfig
from lablib.launch.train_metrics import read_metrics

#: The trainer, with FSDP2 and checkpoints, and what the first optimizer of a process loads.
_PRELOAD = ("lablib.launch.resilience", "torch._dynamo")


@dataclass(frozen=True)
class Survivor:
    """A run that was killed and went on.

    Attributes:
        losses: Of each step, as it counted in the end.
        attempts: (attempt, step) of every step that was taken, those that the kill made void included.
        job: torchrun's return code, log and time.
    """

    losses: list[float]
    attempts: list[tuple[int, int]]
    job: Job

    @property
    def repeated(self) -> list[int]:
        """Steps that were taken twice: those between the checkpoint and the kill."""
        taken = [step for _, step in self.attempts]
        return sorted({step for step in taken if taken.count(step) > 1})


def kill_and_resume(
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    ranks: int = 2,
    save_every: int = 4,
    kill: tuple[int, int] = (1, 6),
    timeout: float = 120,
    device: str = "cpu",
) -> Survivor:
    """Train under torchrun, kill one rank with SIGKILL once, and let torchrun start the job again.

    Args:
        folder: Of the run; new.
        settings: Of `TrainConfig`, the folder apart.
        ranks: How many.
        save_every: Steps between checkpoints.
        kill: Rank, and the step after which it is killed.
        timeout: Seconds until all is ended.
        device: "cpu", or "cuda" for a GPU a rank.

    Raises:
        ValueError: If nothing would be killed, or the settings make no sense, before anything starts.
        RuntimeError: If the job did not come through; its log is in the message.
    """
    config = TrainConfig(folder=folder, **settings)
    config.batches_of(ranks)
    if not (0 <= kill[0] < ranks and 0 < kill[1] < config.steps):
        raise ValueError(
            f"kill={kill} must name one of {ranks} ranks and a step before the last, which is {config.steps}"
        )
    script = repository_root() / "labs" / "scripts" / "train_resilient.py"
    options = ["--save-every", str(save_every), "--kill", f"{kill[0]}:{kill[1]}"]
    job = torchrun(
        script,
        str(folder),
        json.dumps(dict(settings)),
        *options,
        ranks=ranks,
        max_restarts=1,
        timeout=timeout,
        preload=_PRELOAD,
        device=device,
    )
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}. {job.meaning or ''}\n{job.log[-4000:]}")
    lines = read_metrics(folder, every_attempt=True)
    return Survivor(
        losses=[step["loss"] for step in read_metrics(folder)],
        attempts=[(line["attempt"], line["step"]) for line in lines],
        job=job,
    )


def undisturbed(
    folder: str | Path, settings: Mapping[str, Any], *, ranks: int = 2, device: str = "cpu"
) -> list[float]:
    """Return the losses of the same run without checkpoints and without a kill.

    Args:
        folder: Of the run; new.
        settings: As of `kill_and_resume`.
        ranks: How many.
        device: As of `kill_and_resume`.
    """
    run_ranks(_train, ranks, TrainConfig(folder=folder, **settings), device=device)
    return [step["loss"] for step in read_metrics(folder)]


def _train(config: TrainConfig) -> None:
    from lablib.launch.trainer import Trainer

    Trainer(config).run()
