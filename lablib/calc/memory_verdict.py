"""Predicted beside measured, term by term, and whether the calculator keeps its word.

| what | bound |
|---|---|
| states, each term | exact to the byte |
| what forward keeps, in all and in each group of modules | 1 percent of all that is kept |
| the peak of the step | 5 percent |

The measurements are those of `lablib.launch.memory_oracles`; here is arithmetic alone.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lablib.calc.memory import training_memory
from lablib.calc.memory_cases import Case
from lablib.calc.memory_grid import DRAWN
from lablib.calc.memory_timeline import memory_timeline

SAVED_BOUND, PEAK_BOUND = 0.01, 0.05
#: Terms of what forward keeps, by the modules that keep them.
GROUPS = {
    "norms": ("norms",),
    "attention": ("attention", "scores"),
    "mlp": ("mlp", "router", "experts"),
    "embedding": ("embedding", "dropout"),
    "head": ("head", "logits", "loss"),
}


@dataclass(frozen=True)
class Comparison:
    """One number, predicted and measured.

    Attributes:
        what: "states", "saved" or "peak", for a term with its name: "states: momentum", "saved: norms".
        predicted: Bytes.
        measured: Bytes.
        bound: The largest error allowed, as a share of `whole`; 0 where it must be exact.
        whole: What the error is a share of; the measured bytes themselves, or of all that is kept.
    """

    what: str
    predicted: int
    measured: int
    bound: float
    whole: int

    @property
    def error(self) -> float:
        """Predicted less measured, as a share of the whole."""
        if self.predicted == self.measured:
            return 0.0
        return (self.predicted - self.measured) / self.whole if self.whole else float("inf")

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 where both are nothing."""
        if self.predicted == self.measured:
            return 1.0
        return self.predicted / self.measured if self.measured else float("inf")

    @property
    def holds(self) -> bool:
        """Whether the error is within the bound."""
        return abs(self.error) <= self.bound


def predict(case: Case) -> dict[str, object]:
    """Return what the calculator says about a case, in the words of a measurement.

    Args:
        case: The case.

    Returns:
        "states" and "groups" by term, "saved", "peak", and "peak_at". Kernels "paper" have no peak: no paper says what
        an operator needs for a moment. "moments" are there for the cases that are drawn.
    """
    settings = case.settings()
    memory = training_memory(**settings)
    terms = {name.removeprefix("activations."): size for name, size in memory.activation_terms}
    found: dict[str, object] = {
        "states": dict(memory.state_terms),
        "groups": {group: sum(terms.get(term, 0) for term in names) for group, names in GROUPS.items()},
        "saved": memory.activations,
    }
    if case.kernels == "paper":
        return found
    # Under PyTorch's trackers, which are dispatch modes, autograd adds gradients out of place.
    timeline = memory_timeline(step=case.step, out_of_place=True, **settings)
    if case in DRAWN:
        found["moments"] = {moment.name: moment.total for moment in timeline.moments}
    # With autocast's casts, and without what the upper bounds of `training_memory` have too much.
    return found | {
        "saved": sum(timeline.saved.values()),
        "peak": timeline.peak_bytes,
        "peak_at": timeline.peak.name,
    }


def compare(predicted: dict, measured: dict) -> list[Comparison]:
    """Return every number that was predicted and measured.

    Args:
        predicted: From `predict`.
        measured: The same of `lablib.launch.memory_oracles`.
    """
    rows = [
        Comparison(
            f"states: {term}", predicted["states"].get(term, 0), measured["states"].get(term, 0), 0.0, 1
        )
        for term in dict.fromkeys((*predicted["states"], *measured["states"]))
    ]
    rows = [Comparison(r.what, r.predicted, r.measured, 0.0, r.measured) for r in rows]
    kept = measured["saved"]
    rows.append(Comparison("saved", predicted["saved"], kept, SAVED_BOUND, kept))
    rows += [
        Comparison(f"saved: {group}", predicted["groups"].get(group, 0), size, SAVED_BOUND, kept)
        for group, size in measured["groups"].items()
    ]
    if "peak" in predicted:
        rows.append(Comparison("peak", predicted["peak"], measured["peak"], PEAK_BOUND, measured["peak"]))
    return rows


def worst(comparisons: Iterable[Comparison], what: str) -> Comparison:
    """Return the comparison of one kind that is farthest off.

    Args:
        comparisons: Of one case or of many.
        what: "states", "saved" or "peak"; the terms of the first two count, too.

    Raises:
        ValueError: If there is none of this kind.
    """
    of_kind = [c for c in comparisons if c.what.partition(":")[0] == what]
    if not of_kind:
        raise ValueError(f"nothing of kind {what!r} was compared; use states, saved or peak")
    return max(of_kind, key=lambda comparison: abs(comparison.error))
