"""The planner's answer in sentences.

`plan_reasons` says why the winner wins: against the runner-up part by part, and against the best layout with one degree
changed. Read `plan_reasons`
first.
"""

from __future__ import annotations

from lablib.calc.flops import ALL_PAIRS
from lablib.calc.layouts.planner.calibration import Run
from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.peak import Counting
from lablib.calc.layouts.planner.search import Candidate, Plan

PART_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "latency": "launches and latency",
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-alls",
    "pp": "pipeline sends",
    "dp": "exposed data parallelism",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "step": "waiting for the slowest",
}
SMALL = 0.002  # of a step: differences below are not worth a word


def plan_reasons(result: Plan) -> list[str]:
    """Return the reasons as sentences: where the winner's time goes, why others lose, and what does not fit."""
    best = result.best
    shares = sorted(best.seconds.items(), key=lambda part: -part[1])
    lines = [
        f"{best.layout}: {best.step:.3f} s a step, MFU {result.mfu(best):.1%} ({ALL_PAIRS}), "
        f"peak {best.total_memory / 1e9:.1f} of {result.capacity / 1e9:.1f} GB, counted as "
        f"{result.counting.implementation}.",
        "Its time: "
        + ", ".join(f"{PART_NAMES[name]} {value / best.step:.1%}" for name, value in shares if value)
        + ".",
    ]
    terms = sorted(best.memory.items(), key=lambda term: -term[1])
    held = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in terms if size)
    lines.append(f"Its memory at the peak ({best.peak.at}): {held}.")
    distinct = result.distinct(2)
    if len(distinct) == 2:
        lines.append("Runner-up " + reason_against(best, distinct[1]))
    degrees = ("tp", "pp", "cp", "ep") if result.load.model.is_moe else ("tp", "pp", "cp")
    for field in (*degrees, "zero", "recompute", "micro_batch", "virtual_stages"):
        line = _other(result, field)
        if line:
            lines.append(line)
    return lines + _dropped(result)


def reason_against(best: Candidate, other: Candidate) -> str:
    """Return one sentence on what makes another layout slower, part by part, and what it saves."""
    gaps = {name: other.seconds[name] - best.seconds[name] for name in best.seconds}
    worth = [(gap, name) for name, gap in gaps.items() if abs(gap) > SMALL * best.step]
    costs = [f"{PART_NAMES[name]} +{gap:.3f} s" for gap, name in sorted(worth, reverse=True) if gap > 0]
    saves = [f"{-gap:.3f} s of {PART_NAMES[name]}" for gap, name in sorted(worth) if gap < 0]
    text = f"{other.layout} takes {other.step - best.step:.3f} s more ({other.step / best.step - 1:.1%})"
    if costs:
        text += ": " + ", ".join(costs)
    if saves:
        text += "; it saves " + ", ".join(saves)
    room = (other.total_memory - best.total_memory) / 1e9
    return text + f"; memory {room:+.1f} GB."


def _other(result: Plan, field: str) -> str | None:
    """The best layout in which one field differs from the winner's."""
    best = result.best
    mine = getattr(best.layout, field)
    other = next(result.candidates.walk(lambda layout: getattr(layout, field) != mine), None)
    return other and f"Without {field}={mine}: {reason_against(best, other)}"


def _dropped(result: Plan) -> list[str]:
    lines = [f"{count:,} layouts are not counted: {reason}." for reason, count in result.left_out.items()]
    total = sum(result.dropped_by.values())
    if not total:
        return [*lines, f"All {result.valid:,} valid layouts could fit."]
    terms = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in result.dropped_by.items())
    lines.append(f"{total:,} of {result.valid:,} valid layouts cannot fit; by their largest term: {terms}.")
    if result.dropped:
        near = result.dropped[0]
        lines.append(
            f"Nearest shape that never fits: {near.layout}, {near.excess / 1e9:.1f} GB too much, "
            f"most of it {near.term} ({near.memory[near.term] / 1e9:.1f} GB)."
        )
    return lines


#: Layouts as their papers print them, by preset, with devices per node, sequence and batch: worked examples. Llama 3:
#: table 4, second row; its chunks are ours. DeepSeek-V3 (arXiv 2412.19437), section 3.2: 2,048 GPUs, 16 stages, experts
#: over 8 nodes, ZeRO-1 and no tensor parallelism; schedule (theirs is DualPipe), recomputation and batch are ours.
WORKED_EXAMPLES = {
    "llama-3.1-405b": (
        Layout(tp=8, pp=16, dp=128, zero=2, schedule="interleaved", virtual_stages=8),
        {"gpus_per_node": 8, "seq": 8192, "global_batch": 2048},
    ),
    "deepseek-v3": (
        Layout(ep=64, pp=16, dp=128, zero=1, recompute="full"),
        {"gpus_per_node": 8, "seq": 4096, "global_batch": 15360},
    ),
}


def counting_of_run(run: Run, zero: int | None = None) -> Counting:
    """Return whose memory a published row's job has: Megatron-LM's, or with ZeRO 2 and 3 that of the papers' kernels.

    Args:
        zero: ZeRO stage, if not the row's.
    """
    implementation = "paper" if ((run.zero if zero is None else zero) or 0) > 1 else "megatron"
    return Counting(implementation=implementation, recipe=run.recipe, step="fused")
