"""The check of a checkpoint: ranks that take turns on a disk whose every moment is looked at.

Ranks run one at a time, and change at each disk operation and barrier. So any order of events can be played, always
the same way: rank 0 far ahead of the others, or far behind. A write takes two moments, and in between the file is
torn. The disk remembers what it held after every moment; a power cut may come at any of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from lablib.checks.report import Wrong, check
from lablib.checks.turns import Turns

_TORN = "torn"
Files = dict[str, Any]


class World(Turns):
    """Ranks that take turns; the first one in `order` that can run does.

    Args:
        ranks: How many.
        order: Who goes first whenever several could.
        files: What is on the disk already.
    """

    def __init__(self, ranks: int, order: Sequence[int], files: Files):
        super().__init__(ranks)
        self.order, self.files = order, copy.deepcopy(files)
        self.moments: list[Files] = [dict(self.files)]
        self.waiting: set[int] = set()  # at a barrier

    def able(self) -> list[int]:
        """Return who can go on, in order; a barrier opens when all ranks are there."""
        if len(self.waiting) == self.ranks:
            self.waiting.clear()
        return [rank for rank in self.order if rank not in self.waiting | self.done]

    def run(self, act: Callable[[Disk, int, Callable[[], None]], None]) -> None:
        """Run `act(disk, rank, barrier)` on every rank to its end; raise what a rank raised."""
        if not self.play(lambda rank: act(Disk(self, rank), rank, lambda: self._barrier(rank))):
            raise Wrong(
                "Some ranks wait at a barrier that the others never reach: all must call it equally often."
            )

    def _barrier(self, rank: int) -> None:
        self.waiting.add(rank)
        self.pause(rank)

    def changed(self, rank: int) -> None:
        """Remember the disk as it is now, and give the turn back."""
        self.moments.append(dict(self.files))
        self.pause(rank)


class Disk:
    """One rank's view of the disk that all share."""

    def __init__(self, world: World, rank: int):
        self._world, self._rank = world, rank

    def write(self, path: str, content: Any) -> None:
        """Write a file, folders included; it is torn until the write has ended."""
        self._world.files[path] = _TORN
        self._world.changed(self._rank)
        self._world.files[path] = copy.deepcopy(content)
        self._world.changed(self._rank)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder at once; the new name must be free."""
        files = self._world.files
        if not _inside(files, old):
            raise Wrong(f"Rank {self._rank} renames {old!r}, which is not there: one rank renames, once.")
        if _inside(files, new):
            raise Wrong(
                f"Rank {self._rank} renames {old!r} to {new!r}, which exists already: one rank renames, once."
            )
        for path in _inside(files, old):
            files[new + path[len(old) :]] = files.pop(path)
        self._world.changed(self._rank)

    def remove(self, path: str) -> None:
        """Remove a file or a folder; nothing happens if it is not there."""
        for inner in _inside(self._world.files, path):
            del self._world.files[inner]
        self._world.changed(self._rank)

    def exists(self, path: str) -> bool:
        """Say whether there is a file or a folder of that name."""
        return bool(_inside(self._world.files, path))


def _inside(files: Files, path: str) -> list[str]:
    return [each for each in files if each == path or each.startswith(f"{path}/")]


def _published(files: Files) -> dict[str, Files]:
    folders: dict[str, Files] = {}
    for path, content in files.items():
        folder, _, name = path.partition("/")
        if folder.startswith("step-"):
            folders.setdefault(folder, {})[name] = content
    return folders


def _state(rank: int, step: int) -> dict[str, list[int]]:
    return {"model": [rank, step], "optimizer": [10 * rank, step]}


#: Ranks, who goes first, and whether a crashed job of more ranks has left its folder behind.
_CASES = [
    (2, (0, 1), False),
    (2, (1, 0), False),
    (3, (0, 2, 1), False),
    (3, (2, 1, 0), True),
    (4, (1, 3, 0, 2), True),
]


@check
def write_checkpoint(answer: Callable[..., None]) -> str:
    """Judge `write_checkpoint(disk, rank, ranks, step, state, barrier)` at every moment, for several orders of ranks."""
    moments = 0
    for ranks, order, leftover in _CASES:
        old = {f"step-40/rank-{r}": {**_state(r, 40), "step": 40} for r in range(ranks)}
        if leftover:  # a job of more ranks died while it wrote this very step
            old |= {f"tmp-50/rank-{r}": {**_state(r, 49), "step": 50} for r in range(ranks + 2)}
        world = World(ranks, order, old)
        world.run(lambda disk, rank, barrier, n=ranks: answer(disk, rank, n, 50, _state(rank, 50), barrier))
        moments += len(world.moments)
        written: set[int] = set()  # ranks whose new file has been on the disk, whole
        for files in world.moments:
            written |= (there := _on_disk(files, ranks))
            _judge_moment(files, ranks, written - there)
        _judge_end(_published(world.moments[-1]), ranks)
    return f"{len(_CASES)} runs, {moments} moments, and a whole checkpoint to resume from at each of them."


def _on_disk(files: Files, ranks: int) -> set[int]:
    """Return the ranks whose part of the new checkpoint lies anywhere on the disk."""
    models = [content.get("model") for content in files.values() if isinstance(content, dict)]
    return {rank for rank in range(ranks) if _state(rank, 50)["model"] in models}


def _judge_moment(files: Files, ranks: int, lost: set[int]) -> None:
    found = _published(files)
    if early := [folder for folder in found if folder not in ("step-40", "step-50")]:
        raise Wrong(f"{early[0]!r} begins with step-, so a job that resumes takes it for whole while you still write "
                    "into it. Give the folder that you write aside another kind of name.")  # fmt: skip
    if not found:
        raise Wrong(
            "There is a moment without any checkpoint: the old one must stay until the new one is published."
        )
    for folder, content in found.items():
        if _TORN in content.values():
            raise Wrong(f"There is a moment when {folder} is visible and a file in it is half written. Write aside, "
                        "then rename.")  # fmt: skip
        absent = [r for r in range(ranks) if f"rank-{r}" not in content]
        missing = [f"rank-{r}" for r in absent]
        strangers = [name for name in content if not name.removeprefix("rank-").isdigit()]
        if missing and strangers:
            raise Wrong(f"{folder} holds {strangers[0]!r}, and the file of a rank is called {missing[0]!r}.")
        if lost & set(absent):
            raise Wrong(f"{folder} is published without {missing[0]}, which was written and then removed again: what a "
                        "crash has left must be cleared before anybody writes.")  # fmt: skip
        if missing:
            raise Wrong(f"There is a moment when {folder} is visible without {missing[0]}. It may be published only "
                        "when every rank has written.")  # fmt: skip


def _judge_end(found: dict[str, Files], ranks: int) -> None:
    if "step-50" not in found:
        raise Wrong("All ranks have returned, and there is no folder step-50: nobody published it.")
    content = found["step-50"]
    if len(content) > ranks:
        raise Wrong(f"step-50 holds {len(content)} files for {ranks} ranks: the rest comes from a crashed job, whose "
                    "folder nobody cleared.")  # fmt: skip
    for rank in range(ranks):
        state, right = content[f"rank-{rank}"], _state(rank, 50)
        if not isinstance(state, dict) or "model" not in state:
            raise Wrong("A rank's file is one dictionary: the keys of `state`, and beside them the key step.")
        if "optimizer" not in state:
            raise Wrong(
                "The optimizer state is not saved: the resumed run starts its moments from zero, without an error."
            )
        if "step" not in state:
            raise Wrong(
                "The step is not saved in the file: the learning rate of the resumed run hangs on it."
            )
        if state["model"] != right["model"] or state["optimizer"] != right["optimizer"]:
            whose = "a crashed job" if state["model"][1] != 50 else "another rank"
            raise Wrong(f"The file of rank {rank} holds the shard of {whose}.")
        if state["step"] != 50:
            raise Wrong("The saved step is not the one that was given.")
