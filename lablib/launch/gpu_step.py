"""The memory of a training step on one GPU: what the program asks for, what the allocator gives, what CUDA takes besides.

    samples = measure_steps()                  # lab 01, on a GPU
    print(gpu_text(gpu_rows(samples)))         # beside what the calculator predicts

A step is played twice. The first makes the optimizer's states, the workspaces of cuBLAS and the kernels; the second is
measured. The peak is read moment by moment, from counters that each moment begins anew. Beside it the allocator's own
history is recorded, and replayed by `lablib.calc.runs.cuda_snapshot`: two ways to the same peak.

`requested` is what the program asks for, and what a calculator can predict; `allocated` is rounded by the allocator and
is `torch.cuda.max_memory_allocated`; `reserved` is what the allocator took from CUDA. On a CPU `LiveBytes` counts tensors,
and the three are the same, so `measure_step_memory(make, Counters())` runs without a GPU.

A sample has the measurement and the calculator's settings; the prediction is made when it is read.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lablib.calc.memory import RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import preset
from lablib.calc.runs import replay_snapshot
from lablib.launch import torch_private
from lablib.launch.measure import LiveBytes, measure_states
from lablib.launch.recompute import apply_strategy
from lablib.launch.records import SampleCache
from lablib.toys.precision import MasterWeights
from lablib.toys.transformer import Transformer

Settings = dict[str, Any]

#: What lab 01 weighs: the course's transformer in published sizes, by the arguments of `memory_timeline`.
TOY_STEPS: dict[str, Settings] = {
    f"{model}, {seq:,} tokens, {', '.join(how.values())}": {
        "model": model, "seq": seq, "implementation": "toy", "dropout": 0.0, **how
    }
    for model, seq in (("gpt2", 1000), ("gpt2-large", 1000), ("llama-3.2-1b", 2048))
    for how in (
        {"recipe": "fp32", "step": "foreach"},
        {"recipe": "pure-bf16", "step": "fused", "recompute": "full"},
        {"recipe": "autocast-bf16", "step": "fused", "attention": "plain"},
    )
}  # fmt: skip


#: Of a snapshot: more events than any step here has.
MAX_EVENTS = 2_000_000


class Counters:
    """Counters of memory; here of every tensor on the CPU that is made while they are on."""

    device = torch.device("cpu")

    def __enter__(self) -> Self:
        """Begin with nothing cached."""
        self._live = LiveBytes().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Give back what is cached."""
        self._live.__exit__(*error)

    def now(self) -> int:
        """Return the bytes that the program holds, as it asked for them."""
        return self._live.live

    def most(self) -> dict[str, int]:
        """Return the most bytes "requested", "allocated" and "reserved" since `reset`."""
        return dict.fromkeys(("requested", "allocated", "reserved"), self._live.peak)

    def reset(self) -> None:
        """Forget the peaks."""
        self._live.peak = self._live.live

    def outside(self) -> int:
        """Return the bytes in use on the device that no tensor and no cache has: CUDA's context, kernels, others."""
        return 0

    def release_workspaces(self) -> int:
        """Give back what libraries keep between calls, and return its bytes."""
        return 0

    def record(self) -> None:
        """Begin to record every event of the allocator."""

    def snapshot(self) -> dict[str, Any] | None:
        """Return PyTorch's snapshot since `record`, and stop recording; None where the device has none."""
        return None


class CudaCounters(Counters):
    """The same counters of PyTorch's caching allocator on one GPU."""

    def __init__(self, device: torch.device | str = "cuda:0") -> None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU here, and this measures the memory of one")
        if (backend := torch.cuda.memory.get_allocator_backend()) != "native":
            raise ValueError(f"the allocator is {backend!r}: unset its backend in PYTORCH_ALLOC_CONF to measure")
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


_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)$")
#: How many lines of the program a record names.
SITES = 8


@dataclass(frozen=True)
class Job:
    """A model on one device and how to train it.

    Attributes:
        loss: Runs forward on a batch that is there; backward starts from what it returns.
        micro_batches: Of a step; their gradients add up.
        autocast: Whether forward runs under autocast to bf16.
        master: The fp32 copy that the optimizer updates, or None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    micro_batches: int = 1
    autocast: bool = False
    master: MasterWeights | None = None

    def step(self, begin: Callable[[str], None]) -> None:
        """Take a training step; `begin` is told of each moment that no module's hook sees."""
        begin("states")
        device = next(self.model.parameters()).device.type
        for _ in range(self.micro_batches):
            begin("forward of the embedding")
            with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
                loss = self.loss()
            begin("backward of the loss")
            loss.backward()
            del loss
        begin("optimizer step")
        if self.master is not None:
            self.master.take_gradients()
        self.optimizer.step()
        if self.master is not None:
            self.master.give_weights()
        self.optimizer.zero_grad()


def toy_job(settings: Settings) -> Job:
    """Return the course's transformer as `TOY_STEPS` describe it, on torch's default device."""
    low = settings["recipe"] == "pure-bf16"
    model = Transformer(preset(settings["model"]), attention=settings.get("attention", "fused"))
    model.to(torch.bfloat16 if low else torch.float32)
    if settings.get("recompute"):
        apply_strategy(model, settings["recompute"])
    tokens = torch.zeros(1, settings["seq"] + 1, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{settings["step"]: True})
    return Job(model, optimizer, lambda: model.loss(tokens), autocast=settings["recipe"] == "autocast-bf16")


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step.

    Attributes:
        states: What lives from step to step, by term; gradients are not made yet.
        buffers: Tensors of the model that are not trained.
        before: Asked for when the step begins: states, buffers, the batch, workspaces and what is not known.
        workspaces: Of cuBLAS, which stay from step to step.
        peak: The most bytes "requested", "allocated" (`max_memory_allocated`) and "reserved".
        outside: What the device holds beyond `reserved`: CUDA's context, loaded kernels, other programs.
        moments: The most bytes requested in each moment of the step.
        snapshot: What the replayed snapshot says; None where the device has none.
    """

    states: dict[str, int]
    buffers: int
    before: int
    workspaces: int
    peak: dict[str, int]
    outside: int
    moments: dict[str, int]
    snapshot: dict[str, Any] | None


def measure_step_memory(make: Callable[[], Job], counters: Counters | None = None) -> StepMemory:
    """Play two training steps of a job with real tensors, and measure the second.

    Args:
        make: Called with the counters' device as torch's default device.
        counters: None for those of the first GPU.
    """
    with CudaCounters() if counters is None else counters as counters:
        with counters.device:
            job = make()
        job.step(lambda moment: None)
        states = measure_states(job.model, job.optimizer)
        del states["gradients"]
        moments = _Moments(counters, job.model)
        before = counters.now()
        counters.record()
        job.step(moments.begin)
        moments.begin("end")
        snapshot = counters.snapshot()
        moments.remove()
        return StepMemory(
            states,
            sum(buffer.nbytes for buffer in job.model.buffers()),
            before,
            counters.release_workspaces(),
            moments.peak,
            counters.outside(),
            moments.requested,
            None if snapshot is None else replay_peak(snapshot, moments.peak, counters.device.index or 0),
        )


def replay_peak(snapshot: Mapping[str, Any], peak: Mapping[str, int], device: int = 0) -> dict[str, Any]:
    """Return what a snapshot says about its peak, and where it contradicts the counters of the same step.

    Returns:
        events; the peaks of requested and reserved bytes again; "sites", the bytes of the largest lines at the peak;
        "disagrees", a sentence, empty if the peaks are equal to the byte.
    """
    try:
        history = replay_snapshot(snapshot, device)
    except ValueError as error:
        return {"disagrees": f"the snapshot cannot be replayed: {error}"}
    found = {"requested": max(history.requested), "reserved": max(history.reserved)}
    wrong = [f"{name} {found[name]:,}, counted {peak[name]:,}" for name in found if found[name] != peak[name]]
    if len(history.events) >= MAX_EVENTS:
        wrong.append("the beginning of the trace is lost")
    return {
        "events": len(history.events),
        **found,
        "sites": dict(list(history.peak().by_line().items())[:SITES]),
        "disagrees": f"replayed: {'; '.join(wrong)}" if wrong else "",
    }


def measure_steps(
    steps: Mapping[str, tuple[Settings, Callable[[], Job]]] | None = None,
    counters: Callable[[], Counters] = CudaCounters,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Weigh steps one after the other; one that does not fit is said so and stops nothing.

    Args:
        steps: By name the calculator's settings and what makes the job; None for those of `TOY_STEPS` that should fit.

    Returns:
        A sample a step: its name, its settings, and either everything of `StepMemory` or "failed", a sentence.
    """
    if steps is None:
        free = torch.cuda.mem_get_info(counters().device)[0]
        steps = {name: (how, lambda how=how: toy_job(how)) for name, how in steps_that_fit(TOY_STEPS, free).items()}
    kept, samples = SampleCache("01_memory"), []
    for name, (settings, make) in steps.items():
        start = time.perf_counter()

        def measure(settings=settings, make=make) -> dict[str, Any]:
            return {"settings": settings} | _sample(make, counters())

        sample = kept.sample({"name": name}, measure)
        samples.append(sample)
        say(f"{name}: {sample.get('failed') or 'weighed'}, {time.perf_counter() - start:.1f} s")
    return samples


def steps_that_fit(steps: Mapping[str, Settings], memory_bytes: int) -> dict[str, Settings]:
    """Return the steps that should fit in so many bytes beside the usual reserve, the smallest first."""
    peaks = {name: predicted_peak(settings) for name, settings in steps.items()}
    return {name: steps[name] for name in sorted(peaks, key=peaks.get) if peaks[name] + RESERVE <= memory_bytes}


def predicted_peak(settings: Settings) -> int:
    """Return the bytes that the calculator says about a step on a GPU, where no dispatch mode runs."""
    return memory_timeline(**settings).peak_bytes


def _sample(make: Callable[[], Job], counters: Counters) -> dict[str, Any]:
    try:
        return asdict(measure_step_memory(make, counters))
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except RuntimeError as error:  # an operator that this GPU does not have must not cost the other measurements
        return {"failed": str(error).partition("\n")[0]}


class _Moments:
    """Reads the counters whenever a moment of the step begins, in the model too."""

    def __init__(self, counters: Counters, model: nn.Module) -> None:
        self.counters, self.now, self.backward = counters, "", False
        self.requested: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        blocks = {int(found[1]): m for name, m in model.named_modules() if (found := _BLOCK.search(name))}
        self._hooks = []
        for number, block in blocks.items():
            last = number == max(blocks)
            self._hooks.append(block.register_forward_pre_hook(self._before(number)))
            self._hooks.append(block.register_forward_hook(self._after(number, last)))

    def begin(self, moment: str) -> None:
        """End the moment that is, and begin another."""
        most = self.counters.most()
        self.counters.reset()
        if self.now:
            self.requested[self.now] = max(most["requested"], self.requested.get(self.now, 0))
            self.peak = {name: max(size, self.peak.get(name, 0)) for name, size in most.items()}
        self.now, self.backward = moment, moment.startswith("backward")

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, number: int) -> Callable:
        def hook(block: nn.Module, inputs: tuple) -> None:
            if self.backward:  # a recomputed block: it belongs to the backward that wants it
                return
            stream = next((value for value in inputs if isinstance(value, Tensor)), None)
            if number == 0 and stream is not None and stream.requires_grad:
                stream.register_hook(lambda gradient: self.begin("backward of the embedding"))
            self.begin(f"forward of block {number}")

        return hook

    def _after(self, number: int, last: bool) -> Callable:
        def hook(block: nn.Module, inputs: tuple, output: Any) -> None:
            if self.backward:
                return
            stream = output[0] if isinstance(output, tuple) else output
            if stream.requires_grad:
                stream.register_hook(lambda gradient: self.begin(f"backward of block {number}"))
            if last:
                self.begin("loss")

        return hook


@dataclass(frozen=True)
class GpuRow:
    """One step of a record, and what the calculator says about it today, in bytes.

    Attributes:
        failed: Why there is no measurement; empty if there is one.
        measured: What the program asked for at the peak, without the workspaces.
        rounded: What the allocator adds to the requests at the peak.
        cached: What the allocator has from CUDA at its peak beyond what it gave at its own.
        problem: Where the snapshot contradicts the counters; empty if it does not.
    """

    name: str
    predicted: int
    failed: str = ""
    measured: int = 0
    rounded: int = 0
    cached: int = 0
    workspaces: int = 0
    outside: int = 0
    replayed: bool = False
    problem: str = ""

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of what was measured."""
        return self.predicted / self.measured - 1

    def cells(self) -> list[str]:
        """Return the row of a table under `GPU_HEADS`."""
        if self.failed:
            return [self.name, _mb(self.predicted), self.failed, *[""] * 5]
        sizes = (self.rounded, self.cached, self.workspaces, self.outside)
        return [self.name, _mb(self.predicted), _mb(self.measured), f"{1 + self.error:.4f}", *map(_mb, sizes)]


GPU_HEADS = ["configuration", "predicted", "asked for", "ratio", "rounding", "cached", "cuBLAS", "outside"]


def gpu_rows(samples: Iterable[Mapping[str, Any]]) -> list[GpuRow]:
    """Return the rows of a record."""
    rows = []
    for sample in samples:
        predicted = predicted_peak(sample["settings"])
        if failed := sample.get("failed", ""):
            rows.append(GpuRow(sample["name"], predicted, failed))
            continue
        peak, snapshot = sample["peak"], sample["snapshot"]
        rows.append(
            GpuRow(
                sample["name"],
                predicted,
                measured=peak["requested"] - sample["workspaces"],
                rounded=peak["allocated"] - peak["requested"],
                cached=peak["reserved"] - peak["allocated"],
                workspaces=sample["workspaces"],
                outside=sample["outside"],
                replayed=snapshot is not None,
                problem=(snapshot or {}).get("disagrees", ""),
            )
        )
    return rows


def gpu_text(rows: Sequence[GpuRow]) -> str:
    """Return the table as aligned text, and below it where a snapshot contradicts the counters."""
    lines = [GPU_HEADS, *(row.cells() for row in rows)]
    width = max(len(line[0]) for line in lines)
    text = [f"{line[0]:{width}}" + "".join(f"{cell:>14}" for cell in line[1:]).rstrip() for line in lines]
    return "\n".join([*text, *[f"{row.name}: {row.problem}" for row in rows if row.problem]])


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
