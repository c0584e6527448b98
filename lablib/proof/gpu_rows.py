"""The memory calculator on a GPU: which configurations are measured there, and what a record says about them.

    cases = gpu_cases(80 * GiB)
    rows = gpu_rows(record.samples)          # from labs/recorded/01_memory-1gpu.json
    print(gpu_text(rows))

A record has the measurements alone. What the calculator says is computed when the record is read, so a calculator that
changes is judged anew. The bytes that it predicts are compared with the bytes that the program asks for, less the
workspaces of cuBLAS, which no model asks for and which are measured as a number of their own.

The measurements are those of `lablib.proof.gpu_measure`. Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lablib.calc.memory import RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.proof.cases import Case
from lablib.proof.grid import grid, held_out

#: Name of the record, with the number of GPUs of the machine behind it.
NAME = "01_memory"

NOT_RECORDED = "No run on a GPU has been recorded yet: `rung labs run 01 --record` on a machine that has one makes it."

#: Of real size, as people train them on one GPU; the grid's and the drawn ones come besides.
_MODELS = (("gpt2", 1000), ("llama", 2048), ("qwen2", 2048))
_HOW = (
    {"recipe": "fp32", "step": "foreach"},
    {"recipe": "pure-bf16", "step": "fused", "recompute": "full"},
    {"recipe": "autocast-bf16", "step": "fused", "attention": "plain"},
    {"recipe": "mixed-bf16", "step": "foreach", "recompute": "full"},
)
NAMED = tuple(
    Case(implementation=implementation, family=family, size="small", seq=seq, **how)
    for family, seq in _MODELS
    for implementation in ("hf", "toy")
    for how in _HOW
)


def on_one_gpu(case: Case) -> bool:
    """Return whether a case is a job of one GPU with classes that exist there."""
    return case.implementation != "paper" and case.sharding == "none" and case.dp == case.tp == case.pp == 1


@cache
def predicted_peak(case: Case) -> int:
    """Return the bytes that the calculator says about a case on a GPU, where no dispatch mode runs."""
    return memory_timeline(step=case.step, **case.settings()).peak_bytes


def gpu_cases(memory_bytes: int, reserve: int = RESERVE) -> list[Case]:
    """Return the configurations that should fit on one GPU, the smallest first."""
    cases = dict.fromkeys(case for case in (*NAMED, *grid(), *held_out()) if on_one_gpu(case))
    return sorted((c for c in cases if predicted_peak(c) + reserve <= memory_bytes), key=predicted_peak)


@dataclass(frozen=True)
class GpuRow:
    """One configuration of a record, and what the calculator says about it."""

    sample: Mapping[str, Any]

    @property
    def case(self) -> Case:
        """The configuration."""
        return Case(**self.sample["case"])

    @property
    def name(self) -> str:
        """Its name."""
        return self.case.name

    @property
    def failed(self) -> str:
        """Why there is no measurement; empty if there is one."""
        return self.sample.get("failed", "")

    @property
    def predicted(self) -> int:
        """Bytes at the peak, by the calculator as it is today."""
        return predicted_peak(self.case)

    @property
    def measured(self) -> int:
        """Bytes that the program asked for at the peak, without the workspaces."""
        return self.sample["peak"]["requested"] - self.sample["workspaces"]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of what was measured."""
        return self.ratio - 1

    @property
    def rounded(self) -> int:
        """Bytes that the allocator adds to the requests at the peak."""
        return self.sample["peak"]["allocated"] - self.sample["peak"]["requested"]

    @property
    def cached(self) -> int:
        """Bytes that the allocator has from CUDA at its peak beyond what it gave at its own."""
        return self.sample["peak"]["reserved"] - self.sample["peak"]["allocated"]

    @property
    def problem(self) -> str:
        """Where the snapshot contradicts the counters; empty if it does not."""
        return (self.sample.get("snapshot") or {}).get("disagrees", "")


def gpu_rows(samples: Iterable[Mapping[str, Any]]) -> list[GpuRow]:
    """Return the rows of a record."""
    return [GpuRow(sample) for sample in samples]


def gpu_table(rows: Sequence[GpuRow]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the table: what was measured, and in a last line each what failed."""
    heads = ["configuration", "predicted", "asked for", "ratio", "rounding", "cached", "cuBLAS", "outside"]
    cells = []
    for row in rows:
        if row.failed:
            cells.append([row.name, _mb(row.predicted), row.failed, *[""] * 5])
            continue
        sizes = (row.rounded, row.cached, row.sample["workspaces"], row.sample["outside"])
        cells.append([row.name, _mb(row.predicted), _mb(row.measured), f"{row.ratio:.4f}", *map(_mb, sizes)])
    return heads, cells


def gpu_summary(rows: Sequence[GpuRow], where: str, date: str) -> str:
    """Return the result in sentences, the worst configuration named."""
    measured = [row for row in rows if not row.failed]
    if not measured:
        raise ValueError("the record has no measurement: every configuration failed")
    worst = max(measured, key=lambda row: abs(row.error))
    errors = sorted(abs(row.error) for row in measured)
    lines = [
        f"{len(measured)} configurations were measured on {where} on {date}.",
        f"The worst peak is off by {abs(worst.error):.2%}, in {worst.name}; the median is {errors[len(errors) // 2]:.3%}.",
    ]
    if failed := len(rows) - len(measured):
        lines.append(f"{failed} could not be measured; the table says why.")
    problems = [row for row in measured if row.problem]
    if problems:
        lines.append(f"In {len(problems)} the snapshot contradicts the counters, first in {problems[0].name}.")
    else:
        lines.append("In every one the memory snapshot, replayed, finds the peak of the counters to the byte.")
    return "\n".join(lines)


def gpu_section(record: Any) -> str:
    """Return what the page says about a record, as Markdown: the result and the table, or that there is none."""
    if record is None:
        return NOT_RECORDED
    rows = gpu_rows(record.samples)
    heads, cells = gpu_table(rows)
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{gpu_summary(rows, record.where, record.date[:10])}\n\n{table}"


def gpu_proven(record: Any) -> str:
    """Return what a record changes about what no oracle without a GPU can see."""
    if record is None:
        return "No recorded run has measured any of these yet."
    measured = sum(not row.failed for row in gpu_rows(record.samples))
    return (
        f"The recorded run has measured the first two, NCCL's buffers apart, in {measured} configurations, and the "
        "third is part of its ratios. "
        "Other streams, compilation, graphs and offload are in none of them."
    )


def gpu_text(rows: Sequence[GpuRow]) -> str:
    """Return the table as aligned text."""
    heads, cells = gpu_table(rows)
    width = max(len(line[0]) for line in [heads, *cells])
    lines = [f"{line[0]:{width}}" + "".join(f"{cell:>14}" for cell in line[1:]).rstrip() for line in [heads, *cells]]
    return "\n".join([*lines, *[f"{row.name}: {row.problem}" for row in rows if not row.failed and row.problem]])


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
