"""Counters of memory: CUDA's allocator on a GPU, every tensor that is alive on a CPU. One class each, the same words.

    with counters_of("cuda") as counters:
        counters.reset()
        ...
        counters.most()          # {"requested": ..., "allocated": ..., "reserved": ...}

`requested` is what the program asks for, and what a calculator can predict. `allocated` is rounded by the allocator
and is `torch.cuda.max_memory_allocated`; `reserved` is what the allocator took from CUDA. A CPU has none of the three:
there `lablib.launch.live_bytes` counts tensors, and the three are the same. So a step that is measured on a GPU can be
tested without one.
"""

from __future__ import annotations

import gc
from typing import Any, Protocol, Self

import torch

from lablib.launch import torch_private
from lablib.launch.live_bytes import LiveBytes

#: Of a snapshot: more events than any step here has.
MAX_EVENTS = 2_000_000


class Counters(Protocol):
    """What a measurement asks of a device."""

    device: torch.device

    def __enter__(self) -> Self:
        """Begin with nothing cached."""

    def __exit__(self, *error: object) -> None:
        """Give back what is cached."""

    def now(self) -> int:
        """Return the bytes that the program holds, as it asked for them."""

    def most(self) -> dict[str, int]:
        """Return the most bytes "requested", "allocated" and "reserved" since `reset`."""

    def reset(self) -> None:
        """Forget the peaks."""

    def outside(self) -> int:
        """Return the bytes in use on the device that no tensor and no cache has: CUDA's context, kernels, others."""

    def release_workspaces(self) -> int:
        """Give back what libraries keep between calls, and return its bytes."""

    def record(self) -> None:
        """Begin to record what the allocator does."""

    def snapshot(self) -> dict[str, Any] | None:
        """Return the snapshot since `record`, and stop; None where the device has none."""


class CudaCounters:
    """The counters of PyTorch's caching allocator on one GPU.

    Raises:
        ValueError: If there is no GPU, or its allocator is not PyTorch's own.
    """

    def __init__(self, device: torch.device | str = "cuda:0") -> None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU here, and this measures the memory of one")
        if (backend := torch.cuda.memory.get_allocator_backend()) != "native":
            raise ValueError(
                f"the allocator is {backend!r}: unset its backend in PYTORCH_ALLOC_CONF to measure"
            )
        self.device = torch.device(device)

    def __enter__(self) -> Self:
        self._clean()
        self.release_workspaces()
        self._clean()
        return self

    def __exit__(self, *error: object) -> None:
        torch_private.record_memory_history(enabled=None)
        self._clean()

    def _clean(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def now(self) -> int:
        """Return the bytes of all blocks, as they were asked for."""
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]

    def most(self) -> dict[str, int]:
        """Return the peaks of three counters of the allocator."""
        stats = torch.cuda.memory_stats(self.device)
        return {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}

    def reset(self) -> None:
        """Forget the peaks."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def outside(self) -> int:
        """Return what the driver counts and the allocator does not have."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def release_workspaces(self) -> int:
        """Free the workspaces of cuBLAS, and return their bytes."""
        torch.cuda.synchronize(self.device)
        before = self.now()
        torch_private.clear_cublas_workspaces()
        return before - self.now()

    def record(self) -> None:
        """Begin to record every event of the allocator."""
        torch_private.record_memory_history(enabled="all", stacks="python", max_entries=MAX_EVENTS)

    def snapshot(self) -> dict[str, Any]:
        """Return PyTorch's snapshot, and stop recording."""
        found = torch_private.memory_snapshot()
        torch_private.record_memory_history(enabled=None)
        return found


class CpuCounters:
    """Every tensor on the CPU that is made while the counters are on, by `LiveBytes`."""

    device = torch.device("cpu")

    def __enter__(self) -> Self:
        self._live = LiveBytes().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)

    def now(self) -> int:
        """Return the bytes of all tensors."""
        return self._live.live

    def most(self) -> dict[str, int]:
        """Return the most bytes of all tensors, by the three names."""
        return dict.fromkeys(("requested", "allocated", "reserved"), self._live.peak)

    def reset(self) -> None:
        """Forget the peak."""
        self._live.peak = self._live.live

    def outside(self) -> int:
        """There is nothing else to count."""
        return 0

    def release_workspaces(self) -> int:
        """Libraries keep nothing that PyTorch would see."""
        return 0

    def record(self) -> None:
        """There is nothing to record."""

    def snapshot(self) -> None:
        """A CPU has no snapshot."""


def counters_of(device: str) -> CudaCounters | CpuCounters:
    """Return the counters of a device.

    Args:
        device: "cuda", "cuda:1" or "cpu".

    Raises:
        ValueError: If it is not there.
    """
    return CpuCounters() if device == "cpu" else CudaCounters(device)
