"""Why the winner wins: against the runner-up part by part, and against the best layout with one degree changed."""

from __future__ import annotations

from lablib.calc.plan import Candidate, Plan

NAMES = {
    "matmul": "matrix products",
    "memory": "memory-bound kernels",
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-alls",
    "pp": "pipeline sends",
    "dp": "exposed data parallelism",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
SMALL = 0.002  # of a step: differences below are not worth a word


def why(result: Plan) -> list[str]:
    """Return the reasons as sentences: where the winner's time goes, why others lose, and what does not fit.

    Raises:
        ValueError: If nothing fits.
    """
    best = result.best
    shares = sorted(best.seconds.items(), key=lambda part: -part[1])
    lines = [
        f"{best.layout}: {best.step:.3f} s a step, MFU {result.mfu(best):.1%}, "
        f"{best.total_memory / 1e9:.1f} of {result.capacity / 1e9:.1f} GB.",
        "Its time: "
        + ", ".join(f"{NAMES[name]} {value / best.step:.1%}" for name, value in shares if value)
        + ".",
    ]
    terms = sorted(best.memory.items(), key=lambda term: -term[1])
    held = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f} GB" for name, size in terms if size)
    lines.append(f"Its memory: {held}.")
    distinct = result.distinct(2)
    if len(distinct) == 2:
        lines.append("Runner-up " + against(best, distinct[1]))
    for field in ("tp", "pp", "cp", "zero", "recompute", "micro_batch", "virtual_stages"):
        line = _other(result, field)
        if line:
            lines.append(line)
    return lines + _dropped(result)


def against(best: Candidate, other: Candidate) -> str:
    """Return one sentence on what makes another layout slower, part by part, and what it saves."""
    gaps = {name: other.seconds[name] - best.seconds[name] for name in best.seconds}
    worth = [(gap, name) for name, gap in gaps.items() if abs(gap) > SMALL * best.step]
    costs = [f"{NAMES[name]} +{gap:.3f} s" for gap, name in sorted(worth, reverse=True) if gap > 0]
    saves = [f"{-gap:.3f} s of {NAMES[name]}" for gap, name in sorted(worth) if gap < 0]
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
    for candidate in result.candidates:
        if getattr(candidate.layout, field) != mine:
            return f"Without {field}={mine}: {against(best, candidate)}"
    return None


def _dropped(result: Plan) -> list[str]:
    total = sum(result.dropped_by.values())
    if not total:
        return [f"All {result.valid:,} valid layouts fit."]
    terms = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in result.dropped_by.items())
    lines = [f"{total:,} of {result.valid:,} valid layouts do not fit; by their largest term: {terms}."]
    if result.dropped:
        near = result.dropped[0]
        lines.append(
            f"Nearest shape that never fits: {near.layout}, {near.excess / 1e9:.1f} GB too much, "
            f"most of it {near.term.replace('_', ' ')} ({near.memory[near.term] / 1e9:.1f} GB)."
        )
    return lines
