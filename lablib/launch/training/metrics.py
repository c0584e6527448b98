"""Metrics of a run: one JSON line a step and rank in metrics-rank{r}.jsonl, with the keys of `METRIC_KEYS`.

The file is only appended to. A run that is resumed takes the steps after its checkpoint again and writes them again;
`read_metrics` returns each step as it counted in the end.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lablib.calc.hardware import known_accelerator
from lablib.launch.records import read_json_lines

#: Every key of a line, with its unit. Times are of this rank; "all ranks" is said where it is so.
METRIC_KEYS = {
    "step": "optimizer steps taken, this one included",
    "samples": "sequences trained on since the beginning, all ranks",
    "epoch": "passes over the data, samples / sequences that are trained on",
    "loss": "mean cross-entropy of the step's targets in nats, all ranks",
    "grad_norm": "norm of the whole gradient before clipping",
    "lr": "learning rate of the step",
    "tokens": "positions computed in the step, all ranks",
    "targets": "positions that have a loss, all ranks",
    "seconds": "wall time of the step, from reading its data to its loss on the host",
    "data_seconds": "part of it: reading the data and bringing it to the device",
    "forward_backward_seconds": "part of it: all micro-batches, with the communication that is not hidden",
    "update_seconds": "part of it: gradient norm, clipping, optimizer",
    "report_seconds": "part of it: reducing the loss over all ranks, waiting for the slowest",
    "between_seconds": "wall time since the step before ended: callbacks, checkpoints",
    "tokens_per_second": "tokens / seconds, all ranks",
    "tokens_per_second_per_rank": "the same divided by the ranks",
    "tflops_per_rank": "model TFLOP/s of a rank, all pairs of attention counted, recomputation left out",
    "mfu": "tflops_per_rank over the device's peak, 0 to 1; null where the peak is unknown",
    "hfu": "the same with recomputed FLOPs counted",
    "memory_bytes": "most memory in use during the step: allocated on the GPU, or resident so far on a CPU",
    "memory_reserved_bytes": "most memory that PyTorch held on the GPU; null on a CPU",
    "rank": "this rank",
    "world_size": "all ranks",
    "attempt": "how often torchrun had restarted the job",
    "time": "end of the step, seconds since 1970",
}

_PARTS = ("data", "forward_backward", "update", "report")


class StepClock:
    """Cuts a step into its parts: by events on a GPU, which runs behind the host, and by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun = time.perf_counter()
        self._marks: list[Any] = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.mark()

    def mark(self) -> None:
        """End a part of the step."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def times(self) -> dict[str, float]:
        """Return the step's time and its parts' in seconds, once all four have ended."""
        if self.device.type == "cuda":
            self._marks[-1].synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            parts = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        else:
            parts = [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]
        named = {f"{name}_seconds": seconds for name, seconds in zip(_PARTS, parts, strict=True)}
        return {"seconds": time.perf_counter() - self._begun, **named}


def memory(device: torch.device) -> dict[str, int | None]:
    """Return the step's memory, as `METRIC_KEYS` says."""
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.max_memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory_bytes": peak, "memory_reserved_bytes": None}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of a device for matrix products in a precision, or None where it is unknown."""
    if device.type != "cuda":
        return None
    gpu = known_accelerator(torch.cuda.get_device_name(device))
    return gpu.flops.get(precision) if gpu else None


def read_metrics(folder: str | Path, rank: int = 0, *, every_attempt: bool = False) -> list[dict[str, Any]]:
    """Return the steps of a run, in order, as a rank wrote them.

    Where a step was taken again after a restart, the last time counts, and what the run did after its checkpoint
    before it was stopped does not.
    """
    path = Path(folder) / f"metrics-rank{rank}.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is not there: has the run taken a step?")
    steps: list[dict[str, Any]] = []
    for metrics in read_json_lines(path):
        while not every_attempt and steps and steps[-1]["step"] >= metrics["step"]:
            steps.pop()
        steps.append(metrics)
    return steps
