"""Run an answer on real ranks: a stub is no error there, and an error or a wait becomes one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lablib.checks.judging.guard import Wrong, guarded, line_in, refuse_peeking
from lablib.launch.ranks import RankError, RankTimeout, run_ranks
from lablib.toys import torch_names

PATIENCE = 20.0  # seconds until ranks that wait for each other are ended
MORE = 6  # times that, where a rank was at work: on a busy machine the answer may be right


def on_ranks(work: Callable[..., Any], ranks: int, *args: Any, patience: float = PATIENCE) -> list[Any]:
    """Return what `work(*args)` returns on each rank, where the answer is one of the arguments.

    Raises:
        Wrong: If a rank's answer stops with an error, never ends, or waits for others that do not come.
        NotImplementedError: If it is the untouched stub on any rank.
    """
    try:
        try:
            results = run_ranks(_attempt, ranks, work, args, timeout=patience)
        except RankTimeout as late:
            if not late.at_work:
                raise
            patience *= MORE
            results = run_ranks(_attempt, ranks, work, args, timeout=patience)
    except RankTimeout as late:
        who = f"rank {late.ranks[0]}" if len(late.ranks) == 1 else f"ranks {', '.join(map(str, late.ranks))}"
        raise Wrong(
            f"After {patience:.0f} s {who} had not come back: a collective waits until every rank of the group calls it, "
            "in the same order; a recv waits for its send. On a busy machine, ask once more."
        ) from None
    except RankError as error:
        ends = re.search(r"(?m)^\S.*", re.split(r"(?m)^  File .*", error.traceback)[-1])  # its text may have more lines
        last = ends[0] if ends else error.traceback
        if last.startswith(f"{Wrong.__module__}.Wrong: "):
            raise Wrong(last.partition(": ")[2]) from None
        raise Wrong(
            f"Your answer stopped on rank {error.rank}{line_in(error.traceback)} with {last[:200].rstrip('.')}."
        ) from None
    if any(status == "stub" for status, _ in results):
        raise NotImplementedError
    return [value for _, value in results]


def ask_ranks(
    answer: Callable[..., Any],
    ranks: int,
    jobs: Sequence[Any],
    *hidden: str,
    make: Callable[[Any], Any] | None = None,
    more: Callable[[], tuple] = tuple,
    patience: float = PATIENCE,
) -> list[list[Any]]:
    """Return, for each job, what `answer(job, *more())` says of it on each rank.

    Args:
        jobs: The jobs, or what `make` makes them of, on each rank.
        hidden: The functions that know where a fault was planted, as for `refuse_peeking`.

    Raises:
        Wrong: As `on_ranks`, and if an answer calls one of `hidden`.
        NotImplementedError: If it is the untouched stub on any rank.
    """
    return [
        list(said)
        for said in zip(*on_ranks(_ask, ranks, answer, jobs, hidden, make, more, patience=patience), strict=True)
    ]


def agreed(said: Sequence[Any]) -> Any:
    """Return what all ranks say of a job; raise `Wrong` if they say different things."""
    if any(each != said[0] for each in said):
        raise Wrong(
            "Ranks say different things about one job: what one of them sees, all must know, so let them exchange it."
        )
    return said[0]


def _ask(
    answer: Callable[..., Any], jobs: Sequence[Any], hidden: Sequence[str], make: Callable | None, more: Callable
) -> list:
    beside = more()
    found = [answer(make(job) if make else job, *beside) for job in jobs]
    refuse_peeking(answer, *hidden)
    return found


def _attempt(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    theirs, dist.all_to_all = dist.all_to_all, torch_names.all_to_all  # torch 2.11 would refuse a right answer
    try:
        with guarded():
            return "done", work(*args)
    except NotImplementedError:
        return "stub", None
    finally:
        dist.all_to_all = theirs
