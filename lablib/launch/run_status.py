"""How a run stands, from the files that its ranks write; works while it runs and after it has died.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lablib.launch.checkpoint_files import latest
from lablib.launch.train_metrics import read_metrics

_WINDOW = 20  # steps that a median is taken over
_SILENT = 10.0  # a rank is silent when its last line is older than so many steps


@dataclass(frozen=True)
class RankStatus:
    """One rank.

    Attributes:
        rank: Which one.
        last: The metrics of its last step, see `train_metrics.KEYS`.
        seconds: Median wall time of its last steps.
        waiting: Median share of a step that it waited in the report, for the slowest rank.
        age: Seconds since its last line.
    """

    rank: int
    last: dict[str, Any]
    seconds: float
    waiting: float
    age: float

    @property
    def silent(self) -> bool:
        """Whether it has not been heard of for longer than ten of its steps, and a second at least."""
        return self.age > max(1.0, _SILENT * self.seconds)


@dataclass(frozen=True)
class RunStatus:
    """All ranks of a run.

    Attributes:
        folder: Of the run.
        steps: That it is to take.
        ranks: Those that have written something.
        losses: Of all steps so far.
        checkpoint: Name of the newest complete checkpoint, or None.
        remaining: Seconds that the rest will take at the present pace; 0 when all steps are taken.
    """

    folder: Path
    steps: int
    ranks: tuple[RankStatus, ...]
    losses: tuple[float, ...]
    checkpoint: str | None
    remaining: float

    @property
    def step(self) -> int:
        """The last step that all ranks have taken."""
        return min(status.last["step"] for status in self.ranks)


def status(folder: str | Path, now: float) -> RunStatus:
    """Return how a run stands.

    Args:
        folder: Of the run.
        now: Seconds since 1970.

    Raises:
        ValueError: If no rank has taken a step there.

    Chapter: book/11_practical_fsdp.md.
    """
    folder = Path(folder)
    names = [path.stem.removeprefix("metrics-rank") for path in folder.glob("metrics-rank*.jsonl")]
    written = {rank: read_metrics(folder, rank) for rank in sorted(map(int, names))}
    written = {rank: steps for rank, steps in written.items() if steps}
    if not written:
        raise ValueError(f"no rank has taken a step in {folder}: is it the folder of a run?")
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    # A run that was resumed with fewer ranks leaves the files of the others behind.
    newest = max(written.values(), key=lambda steps: steps[-1]["time"])[-1]
    ranks = tuple(_rank(rank, steps, now) for rank, steps in written.items() if rank < newest["world_size"])
    steps = facts["config"]["steps"]
    pace = max(each.seconds + median(_column(written[each.rank], "between_seconds")) for each in ranks)
    done = min(each.last["step"] for each in ranks)
    found = latest(folder / "checkpoints")
    return RunStatus(
        folder=folder,
        steps=steps,
        ranks=ranks,
        losses=tuple(step["loss"] for step in written[min(written)]),
        checkpoint=found.name if found else None,
        remaining=max(0, steps - done) * pace,
    )


def _rank(rank: int, steps: list[dict[str, Any]], now: float) -> RankStatus:
    seconds, reports = _column(steps, "seconds"), _column(steps, "report_seconds")
    waiting = median(report / second for report, second in zip(reports, seconds, strict=True))
    return RankStatus(rank, steps[-1], median(seconds), waiting, now - steps[-1]["time"])


def _column(steps: list[dict[str, Any]], name: str) -> list[float]:
    return [step[name] for step in steps[-_WINDOW:]]
