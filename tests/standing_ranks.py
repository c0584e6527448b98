"""Ranks that are started once and called again and again: a check's many planted answers need no new ones each time.

They are real processes with a real process group. An answer that fails on them, or waits for ever, ends them, and is asked
again on ranks of its own, so its error is the one that a learner sees.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from lablib.launch.ranks import RankError, own_rank, pickle_call, pickle_result, run_ranks

_IDLE_S = 600.0  # a rank that nobody calls so long ends


@contextmanager
def standing_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Hand out what can stand for `run_ranks` until the end of the block."""
    pools: dict[int, _Pool] = {}

    def call(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> list[Any]:
        pool = pools.pop(world_size, None) or _Pool(world_size)
        results = pool.call(pickle_call(fn, args), timeout)
        if results is None:
            pool.end()
            return run_ranks(fn, world_size, *args, timeout=timeout)
        pools[world_size] = pool
        return results

    try:
        yield call
    finally:
        for pool in pools.values():
            pool.end()


class _Pool:
    """So many ranks, each at the other end of a socket."""

    def __init__(self, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-", dir="/tmp")  # a socket's path is short
        address = str(Path(self._folder.name, "s"))
        with Listener(address, "AF_UNIX") as listener:
            self._thread = threading.Thread(target=_run, args=(ranks, address))
            self._thread.start()
            lines = [listener.accept() for _ in range(ranks)]
        self._lines: list[Connection] = [line for _, line in sorted((line.recv(), line) for line in lines)]

    def call(self, job: bytes, timeout: float) -> list[Any] | None:
        """Return what the job returns on each rank, None if it fails on any or takes too long."""
        for line in self._lines:
            line.send_bytes(job)
        waiting, results = set(self._lines), {}
        while waiting and (ready := wait(waiting, timeout)):
            for line in ready:
                waiting.discard(line)
                if (result := line.recv_bytes()) == b"":
                    return None
                results[line] = cloudpickle.loads(result)
        return None if waiting else [results[line] for line in self._lines]

    def end(self) -> None:
        """Let the ranks leave; one that waits for ever is ended after those that leave."""
        for line in self._lines:
            line.close()
        self._thread.join()
        self._folder.cleanup()


def _run(ranks: int, address: str) -> None:
    with suppress(RankError):
        run_ranks(_serve, ranks, address, timeout=_IDLE_S)


def _serve(address: str) -> None:
    """Do on a rank what comes, until the line is closed."""
    with Client(address, "AF_UNIX") as line:
        line.send(own_rank())
        while True:
            try:
                fn, args = cloudpickle.loads(line.recv_bytes())
            except EOFError:
                raise SystemExit from None  # a failure, so that one which waits in a collective is ended
            try:
                line.send_bytes(pickle_result(fn(*args)))
            except BaseException:
                line.send_bytes(b"")
            _end_groups()


def _end_groups() -> None:
    """End what the answer made: each group has threads, and thousands of them would be there after fifty answers."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:  # plans by a mesh's shape name groups that are gone
        with contextlib.suppress(ImportError, AttributeError):  # names of torch 2.13; without them the ranks start anew
            from torch.distributed.tensor import _redistribute, debug

            _redistribute.clear_redistribute_planner_cache()
            _redistribute._gen_transform_infos.cache_clear()
            debug._clear_sharding_prop_cache()
    gc.collect()  # a group's threads end with the last who knows it
