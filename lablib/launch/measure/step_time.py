"""Step time of data parallelism by its parts, and traces of one step from every rank.

    medians(step_times(widths=[512], tokens=[256], ranks=[1, 2]))   # compute, communication, both together
    traces = step_traces("ddp", ranks=2)                            # one trace a rank
    events = merge_traces(traces)                                   # lablib.calc.runs: one clock for all

Inside a job of your own, `record_trace(step)` returns this rank's trace, on CPU or GPU.

The model is a stack of square linear layers, so its computation is 6 FLOPs per parameter and token and nothing else.
A step is one forward and one backward pass; the optimizer does the same with or without other ranks and is left out.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lablib.launch.ranks import rank_mesh, run_ranks
from lablib.toys.data_parallel import BucketedDDP, OverlappedDDP

if TYPE_CHECKING:
    from lablib.calc.runs import Trace

#: What is timed, in the order of one round.
MODES = ("compute", "communication", "after backward", "overlapped")
#: The wrappers that `step_traces` knows.
WRAPPERS = ("ddp", "fsdp2")
#: How long the profiler stays on after the step at least and at most, in seconds.
SETTLE_S, PATIENCE_S = 0.02, 5.0


def linear_stack(width: int, layers: int = 4) -> nn.Sequential:
    """Return `layers` square linear layers with ReLU between, layers * width * (width + 1) parameters."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def step_times(
    *,
    widths: Sequence[int],
    tokens: Sequence[int],
    ranks: Sequence[int],
    modes: Sequence[str] = MODES,
    repeats: int = 5,
    bucket_bytes: int = 4 * 2**20,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Time one training step in every mode, for every model size, batch and number of ranks.

    Args:
        ranks: Numbers of ranks; with one rank only "compute" is timed.
        modes: Which of `MODES` to time: forward and backward without other ranks; gradients that are there
            already, copied into one bucket and reduced; the step whose one bucket leaves after backward; the
            step whose buckets leave during backward.

    Returns:
        One dictionary per sample: ranks, params, grad_bytes (of one gradient), tokens, mode, repeat, seconds.
    """
    if unknown := sorted(set(modes) - set(MODES)):
        raise ValueError(f"modes={unknown} are unknown; use {', '.join(MODES)}")
    for name, values in (("widths", widths), ("tokens", tokens), ("ranks", ranks), ("repeats", [repeats])):
        if not values or min(values) < 1:
            raise ValueError(f"{name}={list(values)} needs at least one number, all of them positive")
    samples = []
    for n in ranks:
        setting = (tuple(widths), tuple(tokens), tuple(modes), repeats, bucket_bytes, device)
        by_rank = run_ranks(_time_all, n, *setting, device=device)
        for same_sample in zip(*by_rank, strict=True):
            slowest = max(sample["seconds"] for sample in same_sample)
            samples.append({**same_sample[0], "seconds": slowest})
    return samples


def _time_all(
    widths: tuple[int, ...],
    tokens: tuple[int, ...],
    modes: tuple[str, ...],
    repeats: int,
    bucket_bytes: int,
    device: str,
) -> list[dict[str, Any]]:
    samples = []
    for width, count in itertools.product(widths, tokens):
        x = torch.randn(count, width, device=device)
        steps: dict[str, Callable[[], None]] = {"compute": _step(linear_stack(width).to(device), x)}
        params = sum(p.numel() for p in linear_stack(width).parameters())
        if dist.get_world_size() > 1:
            after = BucketedDDP(linear_stack(width).to(device), first_bytes=2**40)
            over = OverlappedDDP(linear_stack(width).to(device), first_bytes=2**18, bucket_bytes=bucket_bytes)
            steps["communication"] = _exchange(after, [torch.ones_like(p) for p in after.params])
            steps["after backward"] = _step(after, x)
            steps["overlapped"] = _step(over, x)
        fixed = {"ranks": dist.get_world_size(), "params": params, "grad_bytes": 4, "tokens": count}
        for repeat in range(-1, repeats):  # round -1 warms up
            for mode in (mode for mode in modes if mode in steps):
                seconds = _seconds(steps[mode], device)
                if repeat >= 0:
                    samples.append({**fixed, "mode": mode, "repeat": repeat, "seconds": seconds})
    return samples


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        # Gradients stay where they are: freeing and faulting in megabytes would be timed as communication.
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        if hasattr(model, "sync"):
            model.sync()

    return step


def _exchange(model: BucketedDDP, gradients: list[torch.Tensor]) -> Callable[[], None]:
    def exchange() -> None:
        for p, gradient in zip(model.params, gradients, strict=True):
            p.grad = gradient
        model.sync()

    return exchange


def _seconds(step: Callable[[], None], device: str) -> float:
    dist.barrier()  # all ranks start together; a late start would count as communication
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per number of ranks, model size and batch, with the median seconds of every mode."""
    groups: dict[tuple[int, int, int, int], dict[str, list[float]]] = {}
    for sample in samples:
        key = (sample["ranks"], sample["params"], sample["tokens"], sample["grad_bytes"])
        groups.setdefault(key, {}).setdefault(sample["mode"], []).append(sample["seconds"])
    names = ("ranks", "params", "tokens", "grad_bytes")
    return [
        dict(zip(names, key, strict=True)) | {mode: median(seconds) for mode, seconds in modes.items()}
        for key, modes in sorted(groups.items())
    ]


def trace_spans(timeline: Sequence[tuple[str, int, float]]) -> list[tuple[str, str, float, float, str]]:
    """Turn `model.timeline` of a toy DDP into bars: lane, role, start and end in milliseconds, label.

    Backward is cut where a gradient became ready; a bucket is on the link from its launch, or from the end
    of the bucket before it, until it is reduced.
    """
    origin = timeline[0][2]
    at = {(event, message): 1e3 * (seconds - origin) for event, message, seconds in timeline}
    # Of a bucket's gradients the last one stays in `at`: it is the one that counts.
    ready = {message: end for (event, message), end in at.items() if event == "gradient"}
    bars, start = [], 0.0
    for message, end in sorted(ready.items(), key=lambda item: item[1]):
        bars.append(("backward", "backward", start, end, str(message)))
        start = end
    if not ready:
        bars.append(("backward", "backward", 0.0, at["sync", 0], ""))
    free = 0.0
    for message in sorted(message for event, message in at if event == "launch"):
        start, free = max(at["launch", message], free), at["reduced", message]
        bars.append(("all-reduce", "communication", start, max(start, free), str(message)))
    return bars


def record_trace(
    step: Callable[[], Any], *, name: str = "step", warm: int = 2, folder: str | Path | None = None
) -> Trace:
    """Return the trace of one step on this rank; all ranks begin it together.

    Args:
        step: What to profile. It runs `warm` times before: the first steps build buckets and touch memory.
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
    with profile(activities=activities, acc_events=True) as profiler:  # else torch 2.11 warns
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
        from lablib.calc.runs import parse_trace  # every rank loads this module, and few read traces

        return parse_trace(file, rank)


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


def step_traces(wrapper: str, *, ranks: int = 2, width: int = 512, layers: int = 4, tokens: int = 512) -> list[Trace]:
    """Return the traces of a training step of PyTorch's own wrapper on CPU ranks, in rank order."""
    if wrapper not in WRAPPERS:
        raise ValueError(f"wrapper={wrapper!r} is unknown; use {' or '.join(WRAPPERS)}")
    return run_ranks(traced_step, ranks, wrapper, width, layers, tokens)


def traced_step(
    wrapper: str, width: int, layers: int, tokens: int, bucket_bytes: int = 2**20, folder: str | None = None
) -> Trace:
    """Train on this rank and return the trace of one step: forward, backward and SGD."""
    model = linear_stack(width, layers)
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
