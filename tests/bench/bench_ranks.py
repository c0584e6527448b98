"""Ranks from a live Jupyter kernel: how fast they start, and that failures are told right every time."""

from __future__ import annotations

import ast
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jupyter_client import KernelManager
from jupyter_client.manager import start_new_kernel

from lablib.launch.runs.elastic import descendants
from tests.bench.harness import Result, median

KERNELS = 3  # the first call can be measured once in each
AGAIN = 20
FAILURES = 20
INTERRUPTS = 200

SETUP = """
import os, signal, time
import torch
import torch.distributed as dist
from lablib.launch.ranks.run import RankError, RankTimeout, run_ranks
torch.nn.Linear(256, 256)(torch.ones(256, 256)).sum().backward()

def work():
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()

def timed():
    start = time.perf_counter()
    assert run_ranks(work, 4) == [4.0] * 4
    return time.perf_counter() - start

def fail(bad):
    if dist.get_rank() == bad:
        raise KeyError("lost")  # text of the cell
    dist.barrier()

def named(turn):
    try:
        run_ranks(fail, 4, turn % 4)
    except RankError as error:
        return error.rank == turn % 4 and "# text of the cell" in str(error)

def hang():
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()

def late():
    start = time.perf_counter()
    try:
        run_ranks(hang, 4, timeout=1)
    except RankTimeout as error:
        assert "signal.pause()" in error.waiting_at[1] and "dist.barrier()" in error.waiting_at[3]
        return time.perf_counter() - start - 1

def stay():
    print("pid", os.getpid())
    signal.pause()

def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
"""


class Kernel:
    """A Jupyter kernel that evaluates expressions."""

    def __init__(self, manager: KernelManager, client: object) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str) -> None:
        """Execute code; what it raises is raised here."""
        reply = self.client.execute_interactive(code, timeout=120, output_hook=lambda _: None)["content"]
        if reply["status"] != "ok":
            raise RuntimeError("\n".join(reply["traceback"]))

    def value(self, expression: str) -> object:
        """Evaluate an expression to a Python literal."""
        reply = self.client.execute_interactive(
            "", user_expressions={"it": expression}, timeout=120, output_hook=lambda _: None
        )["content"]["user_expressions"]["it"]
        if reply["status"] != "ok":
            raise RuntimeError(f"{reply['ename']}: {reply['evalue']}")
        return ast.literal_eval(reply["data"]["text/plain"])

    def interrupted(self, code: str, lines: int) -> list[str]:
        """Execute code, interrupt it after so many printed lines, and return them."""
        printed = ""

        def listen(message: dict) -> None:
            nonlocal printed
            if message["msg_type"] == "stream":
                printed += message["content"]["text"]
                if printed.count("\n") == lines:
                    self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, timeout=120, output_hook=listen)["content"]
        assert reply["ename"] == "KeyboardInterrupt", reply
        return printed.splitlines()


@contextmanager
def kernel() -> Iterator[Kernel]:
    """Start a Jupyter kernel in which torch is loaded and has run a backward pass."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        it = Kernel(manager, client)
        it.run(SETUP)
        yield it
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def interrupted_at_random(it: Kernel, count: int, seed: int, patience: float = 2.0) -> int:
    """Interrupt a cell that starts ranks, at random moments of its first 100 ms; return how many processes it left.

    Args:
        it: The kernel.
        count: How often.
        seed: Of the moments.
        patience: Seconds that a process may take to go.
    """
    chance, pid = random.Random(seed), it.value("os.getpid()")
    it.run("run_ranks(work, 1)")
    usual, left, pause = set(descendants(pid)), 0, threading.Event()
    for _ in range(count):
        request = it.client.execute("run_ranks(stay, 4)")
        _await_message(it, request, "execute_input")
        pause.wait(chance.uniform(0, 0.1))
        it.manager.interrupt_kernel()
        _await_message(it, request, "status", execution_state="idle")
        end = time.monotonic() + patience
        while (found := set(descendants(pid)) - usual) and time.monotonic() < end:
            pause.wait(0.02)
        left += len(found)
        for number in found:
            os.kill(number, signal.SIGKILL)
    return left


def _await_message(it: Kernel, request: str, kind: str, **content: str) -> None:
    while True:
        message = it.client.get_iopub_msg(timeout=90)
        ours = message["parent_header"].get("msg_id") == request and message["msg_type"] == kind
        if ours and content.items() <= message["content"].items():
            return


def results() -> list[Result]:
    """Measure what the course promises of ranks from a notebook."""
    first, again, named, late, left = [], [], [], [], []
    for _ in range(KERNELS):
        with kernel() as it:
            first.append(it.value("timed()"))
            again += [it.value("timed()") for _ in range(AGAIN)]
            if not named:
                named = [bool(it.value(f"named({turn})")) for turn in range(FAILURES)]
            late.append(it.value("late()"))
            pids = [int(line.split()[-1]) for line in it.interrupted("run_ranks(stay, 4, live=True)", 4)]
            left.append(it.value(f"sum(map(alive, {pids}))"))
    with kernel() as it:
        storm = interrupted_at_random(it, INTERRUPTS, seed=0)
    return [
        Result("four ranks, first call in a kernel", median(first), 3.0, "s", samples={"ours": first}),
        Result("four ranks, every later call", median(again), 0.25, "s", samples={"ours": again}),
        Result("first failing rank named, with its cell", sum(named), FAILURES, "of 20", more_is_better=True),
        Result("hung rank reported, after its timeout", median(late), 1.0, "s", samples={"ours": late}),
        Result("processes left after an interrupt", sum(left), 0, "", samples={"ours": left}),
        Result(f"processes left after {INTERRUPTS} interrupts at random moments of the start", storm, 0, ""),
    ]
