"""Peaks of real steps without a tracker: what backward writes into is freed or kept as in your run.

    rows = [real_run(case) for case in REAL_RUNS]
    save_real_runs(rows)

PyTorch's trackers are dispatch modes, and under a mode autograd adds no gradient in place. Here a step runs on real
tensors with nothing but PyTorch's profiler, which notes what an allocator hands out and takes back. The peak is the
largest running sum of that, beside the states and the batch, which are there before.

What the profiler sees and the calculator does not count: AdamW's counters, the loss and its gradient, rotary
frequencies, the generator's state that a checkpoint keeps (5,056 bytes a block on a CPU), and what a kernel takes for
itself, such as oneDNN's copies of bf16 matrices.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lablib.calc.memory.timeline import memory_timeline
from lablib.launch.records import write_json
from tests.evidence.cases import Case
from tests.evidence.headline import TABLE
from tests.evidence.oracles import make_optimizer, measure_case, prepared

#: The largest error of a peak, as a share: all that the calculator leaves out is in it.
REAL_BOUND = 0.005

REAL_TABLE = TABLE.with_name("memory_real_runs.json")

#: Tables so large, and sequences so short, that the fullest instant is the sum of a tied table's two gradients.
_TABLES = tuple(
    Case(implementation=implementation, family=family, size="words", seq=8, recipe=recipe, optimizer="sgd")
    for family in ("qwen2", "gpt2", "llama")  # the last one is not tied
    for implementation in ("hf", "toy")
    for recipe in ("fp32", "pure-bf16", "autocast-bf16")
)
REAL_RUNS: tuple[Case, ...] = (
    *_TABLES,
    Case(family="qwen2", size="words", seq=8, optimizer="sgd", accumulate=3),
    Case(family="gpt2", size="words", seq=8, optimizer="sgd", recompute="full", micro_batch=3),
    # Of many experts, in a loop: gradients of one table add up, in place.
    Case(implementation="hf", family="mixtral-loop", recompute="full", micro_batch=3, optimizer="sgd"),
    Case(implementation="hf", family="mixtral-grouped", recompute="full", micro_batch=3, optimizer="sgd"),
    # Where blocks are the peak.
    *(Case(implementation=one, family="llama", seq=64, micro_batch=3, recompute="full") for one in ("hf", "toy")),
    Case(implementation="hf", family="llama", seq=64, tuning="lora", attention="plain"),
    # Shards of FSDP2 and of tensor parallelism; a pretended group answers.
    Case(family="qwen2", size="words", seq=8, optimizer="sgd", sharding="fsdp2", dp=2),
    Case(implementation="hf", family="mixtral-loop", sharding="fsdp2", dp=8, step="fused"),
    Case(family="llama", seq=64, micro_batch=3, optimizer="sgd", tensor="2"),
)


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at once while a function ran, beyond what was there before.

    Nothing that this process allocated on a GPU is counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"])):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


def real_peak(case: Case) -> int:
    """Return the bytes at the peak of a step, whose optimizer states exist already, on real tensors without a mode.

    Args:
        case: With weights in one copy; one rank of those that FSDP2 or tensor parallelism splits them over.
    """
    with prepared(case, nullcontext()) as (subject, _):
        model, tokens = subject.model, subject.tokens()
        optimizer = make_optimizer(case, model)

        def step() -> None:
            for _ in range(case.micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.recipe == "autocast-bf16"):
                    loss = subject.loss(model, tokens)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()

        step()
        gc.collect()
        there = [tokens, *model.parameters(), *model.buffers()]
        there += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in {id(t): t for t in there}.values()]
        return sum(tensor.nbytes for tensor in local) + allocated_peak(step)


def real_run(case: Case) -> dict[str, Any]:
    """Measure a case without a tracker and with one, and put what the calculator says of each beside it."""
    measured = {"real": real_peak(case), "tracked": measure_case(case, real=True).peak}
    return predicted_runs([{"name": case.name, "case": asdict(case), "measured": measured}])[0]


def predicted_runs(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with what the calculator says now, and their measurements as they are."""
    cases = [(row, Case(**row["case"])) for row in rows]
    return [row | {"tied": case.model.tied, "predicted": predicted(case)} for row, case in cases]


def predicted(case: Case) -> dict[str, int]:
    """Return the peaks that the calculator says, of a real run and of one under a tracker."""
    return {
        name: memory_timeline(step=case.step, out_of_place=mode, **case.settings()).peak_bytes
        for name, mode in (("real", False), ("tracked", True))
    }


def save_real_runs(rows: Iterable[dict[str, Any]], made: dict[str, str], path: Path = REAL_TABLE) -> Path:
    return write_json(path, {"versions": made, "bound": REAL_BOUND, "rows": list(rows)})
