"""Ranks that take turns: threads that run one at a time, so that a check plays always the same way.

A rank runs until it calls `pause`, and goes on when it is the first that can. So any order of events can be played,
and it is seen at once when all ranks wait for each other. It backs the checks of a checkpoint and of all-reduces.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable


class _Stopped(BaseException):
    """Ends the thread of a rank that nobody will run again."""


class Endless(Exception):
    """Raised by `play` when a rank neither ends nor gives its turn back."""


class Turns:
    """Ranks that run one at a time; a subclass says which one can go on."""

    patience = 20.0  # seconds of one turn; a right answer needs thousandths

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.done: set[int] = set()
        self._turn = [threading.Semaphore(0) for _ in range(ranks)]
        self._back = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._over = False

    def able(self) -> Iterable[int]:
        """Return the ranks that can go on, the next one first; none if those that are left wait for each other."""
        raise NotImplementedError

    def play(self, act: Callable[[int], None]) -> bool:
        """Run `act(rank)` on every rank, and raise what a rank raised first.

        Returns:
            Whether all came to their end; False if they wait for each other.
        """
        threads = [threading.Thread(target=self._rank, args=(act, r), daemon=True) for r in range(self.ranks)]
        for thread in threads:
            thread.start()
        while len(self.done) < self.ranks and self._error is None:
            rank = next(iter(self.able()), None)
            if rank is None:
                break
            self._turn[rank].release()
            if not self._back.acquire(timeout=self.patience):
                self._over = True
                # A loop that calls nothing of ours can only be stopped from outside.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(threads[rank].ident or 0), ctypes.py_object(_Stopped)
                )
                self._error = Endless(f"Rank {rank} runs and runs: a loop of yours never ends, or does far too much.")
        self._over = True
        for turn in self._turn:
            turn.release()
        for thread in threads:
            thread.join(timeout=self.patience)
        if self._error is not None:
            raise self._error
        return len(self.done) == self.ranks

    def pause(self, rank: int) -> None:
        """Give the turn back, and go on when it comes again."""
        self._back.release()
        self._turn[rank].acquire()
        if self._over:
            raise _Stopped

    def _rank(self, act: Callable[[int], None], rank: int) -> None:
        self._turn[rank].acquire()
        try:
            if not self._over:
                act(rank)
        except _Stopped:
            return
        except BaseException as error:  # SystemExit too: the others wait for this rank's turn to end
            self._error = self._error or error
        self.done.add(rank)
        self._back.release()
