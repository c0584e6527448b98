"""One training step on a GPU, measured: what the program asks for, what the allocator gives, what CUDA takes besides.

    found = measure_on_gpu(Case(implementation="hf", size="small", seq=2048, recipe="pure-bf16", step="fused"))
    print(found.peak, found.workspaces, found.outside, found.moments)

A step is played twice. The first makes the optimizer's states, the workspaces of cuBLAS and the kernels; the second is
measured. The peak is read phase by phase, from counters that each phase begins anew. Beside it the allocator's own
history is recorded, and replayed by `lablib.calc.runs.cuda_snapshot`: two ways to the same peak.

Of the counters, `requested` is what the program asks for, and what a calculator can predict. `allocated` is rounded by
the allocator and is `torch.cuda.max_memory_allocated`; `reserved` is what the allocator took from CUDA. A CPU has none of
the three: there `LiveBytes` counts tensors, and the three are the same. So a step that is measured on a GPU can be tested
without one: `measure_on_gpu(case, Counters())`.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lablib.calc.runs import replay_snapshot
from lablib.launch import torch_private
from lablib.launch.measure import LiveBytes, measure_states
from lablib.launch.records import Kept
from lablib.proof.cases import Case
from lablib.proof.gpu_rows import NAME, gpu_cases, on_one_gpu
from lablib.proof.oracles import Master, build_model, make_optimizer

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
class GpuMeasured:
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


def measure_on_gpu(case: Case, counters: Counters | None = None) -> GpuMeasured:
    """Play two training steps of a case with real tensors, and weigh the second."""
    if not on_one_gpu(case):
        raise ValueError(
            f"{case.name}: a GPU is measured alone, with classes that exist: sharding='none', dp=tp=pp=1 and implementation "
            "'toy' or 'hf'"
        )
    with CudaCounters() if counters is None else counters as counters:
        with counters.device:  # every tensor is made there
            job = _Job(case, counters.device)
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
        return GpuMeasured(
            states,
            sum(buffer.nbytes for buffer in job.model.buffers()),
            before,
            counters.release_workspaces(),
            moments.peak,
            counters.outside(),
            moments.requested,
            None if snapshot is None else replayed(snapshot, moments.peak, counters.device.index or 0),
        )


def replayed(snapshot: Mapping[str, Any], peak: Mapping[str, int], device: int = 0) -> dict[str, Any]:
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


def measured_samples(
    cases: Iterable[Case] | None = None,
    counters: Callable[[], Counters] = CudaCounters,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure configurations one after the other; one that does not fit is said so and stops nothing.

    Returns:
        A sample a case: its name, its factors, and either everything of `GpuMeasured` or "failed", a sentence.
    """
    if cases is None:
        here = counters().device
        cases = gpu_cases(torch.cuda.mem_get_info(here)[0])
    kept, samples = Kept(NAME), []
    for case in cases:
        start = time.perf_counter()
        sample = kept.sample({"name": case.name, "case": asdict(case)}, lambda case=case: _sample(case, counters()))
        samples.append(sample)
        say(f"{case.name}: {sample.get('failed') or 'measured'}, {time.perf_counter() - start:.1f} s")
    return samples


def _sample(case: Case, counters: Counters) -> dict[str, Any]:
    try:
        return asdict(measure_on_gpu(case, counters))
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except RuntimeError as error:  # an operator that this GPU does not have must not cost the other measurements
        return {"failed": str(error).partition("\n")[0]}


class _Job:
    """A model, its optimizer and a batch on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        subject = build_model(case)
        self.loss, self.batch = subject.loss, subject.tokens()
        self.master = None
        if case.recipe == "mixed-bf16":
            self.master = Master(subject.model, build_model(case, working=True).model)
        self.model = subject.model if self.master is None else self.master.model
        self.optimizer = make_optimizer(case, subject.model)

    def step(self, begin: Callable[[str], None]) -> None:
        """Train on the batch, `accumulate` times, and step."""
        begin("states")
        for _ in range(self.case.micro_batches):
            begin("forward of the embedding")
            low = self.case.recipe == "autocast-bf16"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
                loss: Tensor = self.loss(self.model, self.batch)
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
