"""Ranks from a notebook: call one function on several real processes and get their results back.

    def work(x):
        t = torch.full((1,), float(dist.get_rank()))
        dist.all_reduce(t)
        return t.item() + x

    run_ranks(work, 4, 10.0)        # [16.0, 16.0, 16.0, 16.0]

The ranks are forked from a server process that has loaded torch and done nothing with it.
A fork of the notebook itself would inherit locks of threads that do not exist in the copy, and hang after
the first backward pass; a new interpreter for every rank would load torch every time.
The server loads torch and never lablib, so every call runs lablib as it is on disk.
In a notebook it starts when `lablib.launch` is imported, elsewhere with the first call.
Linux and macOS; on Windows, use WSL or the devcontainer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import cloudpickle

from lablib.launch.rank_server import Interrupts, ensure_server, no_main_module, server_pid, uninterrupted
from lablib.launch.ranks import rank_process
from lablib.launch.ranks.handle import Rank, cells, enumerate_ranks, find_waiting_line, readable
from lablib.launch.ranks.shared_machine import any_at_work, place
from lablib.launch.ranks.transport import check, check_device, environment, pickle_call

_GRACE_S = 1.0  # after the first failure: time for the others to say what they saw
_STACK_S = 1.0  # after the timeout: time for hung ranks to say where they stand
_LOAD_S = 60.0  # at least so long for a server's first answer, while it loads torch
_START_S = 5.0  # and so long for every later one
_HURRY_S = 1.0  # after an interrupt: time for a start to come to its end
_LOOK_S = 0.1
_ENDING_S = 5.0  # a server that was just killed refuses until the system has ended it
_LEAVE_S = 5.0  # after the last result: time for the ranks to leave by themselves
_TAIL = 10  # lines of standard error shown with a failure
_answered: set[int | None] = set()  # the servers that have loaded torch
_SILENT = "gives no answer: it is stopped, or stuck in the operating system"


class RankError(RuntimeError):
    """A rank failed.

    Attributes:
        rank: The rank that failed first.
        traceback: Its traceback with the text of notebook cells, or how its process ended.
    """

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class RankTimeout(TimeoutError):
    """Some ranks gave no result in time.

    Attributes:
        ranks: The ranks that were still at work.
        waiting_at: For each of them, the line it stood on.
        at_work: Whether one of them still computed, or waited for a core; otherwise they waited for each other.
    """

    def __init__(self, message: str, waiting_at: dict[int, str], at_work: bool = False) -> None:
        super().__init__(message)
        self.at_work = at_work
        self.ranks = sorted(waiting_at)
        self.waiting_at = waiting_at


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    threads: int = 1,
    device: str = "cpu",
    env: dict[str, str] | None = None,
    live: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on every rank of a new process group and return the results in rank order.

    Inside, `torch.distributed` is initialised and `dist.get_rank()` tells the ranks apart.
    What the ranks print comes back in whole lines, marked "[rank 0] ", in rank order at the end.
    What they write to standard error is shown only with a failure.
    Tensors come back as copies on the CPU.

    Args:
        fn: Any function; one from a notebook cell or a script is sent by value.
        timeout: Seconds until the call gives up and says where each rank stands; as many for the start.
        device: "cpu": gloo, and the ranks see no GPU, so they do the same on every machine. "cuda": each rank has
            a GPU of its own, NCCL for what is on it and gloo for the rest.
        env: Environment variables for the ranks, on top of this process's own as they are now. What
            libraries read while torch loads is fixed when the server starts.
        live: Print each line when it comes; the order of the ranks then changes from run to run.

    Raises:
        ValueError: For an argument that makes no sense, or fewer GPUs than ranks of "cuda", before anything starts.
        RuntimeError: If called inside a rank.
        RankError: If a rank fails; it names the one that failed first. All others are ended.
        RankTimeout: If a rank gives no result in time. All are ended.
    """
    __tracebackhide__ = True  # a failed cell shows the rank's traceback, not this function's
    if rank_process.inside_rank:
        raise RuntimeError("run_ranks was called inside a rank; start all ranks from the notebook")
    check(fn, world_size, timeout, threads, env)
    check_device(device, world_size, env)
    call = pickle_call(fn, args)
    ranks: list[Rank] = []
    # Interrupted half-way, a start or an end would leave processes that nobody knows of, or a folder.
    with place(), uninterrupted() as interrupts, tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = rank_process.Job(
            call=call,
            world_size=world_size,
            device=device,
            threads=threads,
            timeout=timeout,
            environ={**environment(), **(env or {})},
            # A file, not a port: nobody can take it, and TCPStore was seen to stall for 5 s at 8 ranks.
            meeting=os.path.join(folder, "meeting"),
            cells=cells(),
        )
        try:
            _start(ranks, job, live, interrupts)
            with interrupts.let_through():
                _collect(ranks, time.monotonic() + timeout)
            results = _results(ranks, timeout)
            _dismiss(ranks)
        finally:
            for rank in ranks:
                rank.kill()
            # One piece of text, so that a notebook stores the same output on every run.
            print("".join([rank.finish() for rank in ranks]), end="", flush=True)
    return results


def _rank(context: multiprocessing.context.BaseContext, number: int, job: rank_process.Job, live: bool) -> Rank:
    """Start a rank; where a server that is just ending refuses the first one, another server takes its place."""
    until = time.monotonic() + _ENDING_S
    while True:
        try:
            return Rank(context, number, job, live)
        except ConnectionRefusedError:
            if number or time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)
            ensure_server(context)


def _start(ranks: list[Rank], job: rank_process.Job, live: bool, interrupts: Interrupts) -> None:
    """Start all ranks; a server that gives no answer is ended, after the timeout or an interrupt."""
    context = multiprocessing.get_context("forkserver")
    started, lost = threading.Event(), ""
    with no_main_module():
        ensure_server(context)
        limit = max(job.timeout, _START_S if server_pid() in _answered else _LOAD_S)
        deadline = time.monotonic() + limit

        def watch() -> None:
            while not started.wait(_LOOK_S):
                now = time.monotonic()
                if now > deadline or any(now > when + _HURRY_S for when in interrupts.noted):
                    os.kill(server_pid(), signal.SIGKILL)
                    return

        threading.Thread(target=watch, daemon=True, name="watch-the-start").start()
        try:
            for number in range(job.world_size):
                ranks.append(_rank(context, number, job, live))
            _answered.add(server_pid())
        except (EOFError, OSError) as error:  # what it leaves of a rank ends when this exception does
            lost = f"{type(error).__name__}: {error}"
        finally:
            started.set()
    if lost and time.monotonic() > deadline:
        silent = dict.fromkeys(range(len(ranks), job.world_size), "not started")
        text = "gave no answer, and was ended; the next call starts another one"
        raise RankTimeout(
            f"no start of all ranks after {limit:g} s: the server that they are forked from {text}", silent
        )
    if lost:
        text = f"rank {len(ranks)} was not started ({lost})"
        raise RankError(f"{text}; call again, which starts a new server if the old one has ended", len(ranks), text)


def _collect(ranks: list[Rank], deadline: float) -> None:
    """Read from the ranks until all have reported, or until the deadline."""
    while True:
        sources = {source: rank for rank in ranks if not rank.report for source in rank.sources()}
        ready = wait(sources, max(0.0, deadline - time.monotonic())) if sources else []
        if not ready:
            return
        for rank in {sources[source] for source in ready}:
            rank.receive()
            if rank.failure:
                deadline = min(deadline, time.monotonic() + _GRACE_S)


def _results(ranks: list[Rank], timeout: float) -> list[Any]:
    """Return the results, or raise what kept a rank from giving one."""
    __tracebackhide__ = True
    failed = [rank for rank in ranks if rank.failure]
    late = [rank for rank in ranks if not rank.report]
    if failed:
        raise _error(failed)
    if late:
        raise _timeout(ranks, late, timeout)
    return [_load(rank) for rank in ranks]


def _load(rank: Rank) -> Any:
    try:
        return cloudpickle.loads(rank.report[1])
    except Exception as error:
        text = f"its result cannot be loaded here ({type(error).__name__}: {error})"
        raise RankError(f"rank {rank.number} returned, but {text}", rank.number, text) from error


def _dismiss(ranks: list[Rank]) -> None:
    """Let the ranks leave, now that nobody waits for them any more."""
    for rank in ranks:
        rank.dismiss()
    deadline = time.monotonic() + _LEAVE_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _error(failed: list[Rank]) -> RankError:
    first, *others = sorted(failed, key=lambda rank: rank.failure[:2])
    text = readable(first.failure[2])
    message = f"rank {first.number} failed first"
    if others:
        message += f"; {enumerate_ranks([rank.number for rank in others])} failed after it"
    message += f"\n\n{text}"
    place = find_waiting_line(first.stderr())
    if place:
        message += f"\n{place}"
    elif first.stderr():
        tail = "\n".join(first.stderr().splitlines()[-_TAIL:])
        message += f"\n\nLast lines of rank {first.number} on standard error:\n{tail}"
    return RankError(message, first.number, text)


def _timeout(ranks: list[Rank], late: list[Rank], timeout: float) -> RankTimeout:
    at_work = any_at_work(rank.process.pid for rank in late)
    for rank in late:
        rank.ask_for_stack()
    deadline = time.monotonic() + _STACK_S
    stacks = {rank.number: find_waiting_line(rank.read_stack(deadline)) or _SILENT for rank in late}
    lines = [f"  rank {rank.number}: {stacks.get(rank.number, 'has returned')}" for rank in ranks]
    who = enumerate_ranks([rank.number for rank in late])
    message = f"no result after {timeout:g} s from {who} of {len(ranks)}. Where they stand:\n"
    return RankTimeout(message + "\n".join(lines), stacks, at_work)
