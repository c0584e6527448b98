"""Record what torch.profiler sees of one step on every rank, and bring the traces of all ranks together.

    traces = step_traces("ddp", ranks=2)           # one trace a rank
    events = merge(traces)                         # lablib.calc.trace: one clock for all
    for rank, part in split(events, window_of(events, "step")).items(): ...

Inside a job of your own, `record_trace(step)` returns this rank's trace, on CPU or GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from lablib.calc.trace import Trace, parse
from lablib.launch.devices import rank_mesh
from lablib.launch.ranks import run_ranks
from lablib.launch.step_time import stack

#: The wrappers that `step_traces` knows.
WRAPPERS = ("ddp", "fsdp2")

#: How long the profiler stays on after the step at least and at most, in seconds.
SETTLE_S, PATIENCE_S = 0.02, 5.0


def record_trace(
    step: Callable[[], Any], *, name: str = "step", warm: int = 2, folder: str | Path | None = None
) -> Trace:
    """Return the trace of one step on this rank; all ranks begin it together.

    Args:
        step: What to profile. It runs `warm` times before: the first steps build buckets and touch memory.
        name: The annotation around it.
        warm: Steps that are not recorded.
        folder: Where to keep the file, `rank0.json` and so on, for chrome://tracing or Perfetto; None keeps none.
    """
    for _ in range(warm):
        step()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    many = dist.is_initialized()
    rank = dist.get_rank() if many else 0
    if many:
        dist.barrier()
    with profile(activities=activities) as profiler:
        with record_function(name):
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if many:
            _settle()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"rank{rank}.json"
        profiler.export_chrome_trace(str(file))
        return parse(file, rank)


def _settle() -> None:
    """Wait for gloo's threads: they wake the step before they note that a message has ended, or it would be lost."""
    deadline = time.monotonic() + PATIENCE_S
    time.sleep(SETTLE_S)
    while gloo_is_busy() and time.monotonic() < deadline:
        time.sleep(SETTLE_S)


def gloo_is_busy() -> bool:
    """Say whether a thread of gloo runs or waits for a core. One that waits for a message sleeps. Only Linux tells."""
    for file in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended since
            continue
        if name.startswith("pt_gloo") and rest.split()[0] == "R":
            return True
    return False


def step_traces(
    wrapper: str,
    *,
    ranks: int = 2,
    width: int = 512,
    layers: int = 4,
    tokens: int = 512,
    bucket_bytes: int = 2**20,
    folder: str | Path | None = None,
) -> list[Trace]:
    """Return the traces of a training step of PyTorch's own wrapper on CPU ranks, in rank order.

    Args:
        wrapper: "ddp" or "fsdp2".
        ranks: Processes.
        width: Of the linear layers.
        layers: How many.
        tokens: Rows on each rank.
        bucket_bytes: When a bucket of DDP is full; FSDP2 sends layer by layer.
        folder: Where to keep the files; None keeps none.

    Raises:
        ValueError: If the wrapper is unknown.
    """
    if wrapper not in WRAPPERS:
        raise ValueError(f"wrapper={wrapper!r} is unknown; use {' or '.join(WRAPPERS)}")
    place = None if folder is None else str(Path(folder).resolve())
    return run_ranks(traced_step, ranks, wrapper, width, layers, tokens, bucket_bytes, place)


def traced_step(
    wrapper: str, width: int, layers: int, tokens: int, bucket_bytes: int, folder: str | None
) -> Trace:
    """Train on this rank and return the trace of one step: forward, backward and SGD.

    Args:
        wrapper: As for `step_traces`, and so are the others.
        width: Of the linear layers.
        layers: How many.
        tokens: Rows on this rank.
        bucket_bytes: When a bucket is full.
        folder: Where to keep the file, or None.
    """
    model = stack(width, layers)
    if wrapper == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=rank_mesh())
        fully_shard(model, mesh=rank_mesh())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return record_trace(step, folder=folder)
