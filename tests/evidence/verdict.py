"""Predicted beside measured, term by term, and whether the calculator keeps its word.

| what | bound |
|---|---|
| states, each term | exact to the byte |
| what forward keeps, in all and in each group of modules | 1 percent of all that is kept |
| the peak of the step, in all | 5 percent |
| the peak by kind of memory | 5 percent of the whole peak |

Kinds are those that PyTorch's trackers tell apart; `KIND_OF` says to which each term of the calculator belongs. The
measurements are those of `tests.evidence.oracles`; here is arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lablib.calc.memory import training_memory
from lablib.calc.memory.timeline import MemoryInstant, memory_timeline
from lablib.calc.torch_versions import PINNED
from tests.evidence.cases import Case
from tests.evidence.grid import DRAWN

SAVED_BOUND, PEAK_BOUND = 0.01, 0.05

#: Terms of what forward keeps, by the modules that keep them.
GROUPS = {
    "norms": ("norms",),
    "attention": ("attention", "scores"),
    "mlp": ("mlp", "router", "experts"),
    "embedding": ("embedding", "dropout"),
    "head": ("head", "logits", "loss"),
}

KINDS = (
    "weights",
    "gathered weights",
    "optimizer",
    "gradients",
    "unsharded gradients",
    "gradient buckets",
    "reduce-scatter buffers",
    "all-gather buffers",
    "activations",
    "temporary",
    "buffers",
    "inputs",
)


#: What trackers call a term. They label a tensor when it is made, by who is running then: forward makes activations,
#: backward makes temporaries, the optimizer makes optimizer states. Hooks relabel a few: a gradient once a parameter has
#: it, FSDP2's buffers once a collective gets them. The master copy is a module of parameters like any other.
#: Source: torch.distributed._tools, mem_tracker.py and fsdp2_mem_tracker.py.
KIND_OF = {
    "weights": "weights",
    "master_weights": "weights",
    "gradients": "gradients",
    "master_gradients": "gradients",
    **dict.fromkeys(("momentum", "variance", "optimizer_temporaries"), "optimizer"),
    "activations.tokens": "inputs",  # the batch was there before forward began
    # A received gradient is outside of backward, before it begins. A unit's weights are gathered weights when all of them
    # have been copied out of the buffer.
    **dict.fromkeys(("activations", "weight_casts", "logits", "logits_fp32", "attention_mask"), "activations"),
    **dict.fromkeys(("stage_outputs", "received_gradient", "forward_values", "arriving_weights"), "activations"),
    # A gradient was made in backward like any other tensor until its parameter has it, and FSDP2's until their unit's
    # reduction begins, the root's at the very end.
    **dict.fromkeys(
        ("logits_gradients", "recomputed_stream", "activation_gradients", "adapter_gradients"), "temporary"
    ),
    **dict.fromkeys(("new_gradients", "tied_gradient", "reduced_shards", "root_gradients"), "temporary"),
    "gathered_weights": "gathered weights",
    "all_gather_buffers": "all-gather buffers",
    "gradient_buckets": "gradient buckets",
    "rotary_tables": "buffers",
}


def kind_of(term: str, instant: MemoryInstant, *, recompute: str = "none", fsdp2: bool = False) -> str:
    """Return the kind of a term at an instant."""
    name = term if term in KIND_OF else term.partition(".")[0]
    if name in ("recomputed", "recomputed_values"):
        # MemTracker knows that forward runs again while a module of the block does. What a block's own forward makes
        # between its modules, the stream, counts as backward's; so does selective recomputation, which runs a function.
        # FSDPMemTracker asks FSDP2's units alone, whose hooks are outside of what runs again.
        return "activations" if recompute == "full" and not fsdp2 else "temporary"
    if name == "operator_temporaries":
        return "activations" if instant.phase in ("forward", "loss") else "temporary"
    reducing = instant.at == "reduce-scatter"
    if name == "reduce_scatter_buffers":  # fullest when gradients have been copied into them, before the collective
        return "temporary" if reducing else "reduce-scatter buffers"
    if name == "unsharded_gradients":
        return "unsharded gradients" if reducing else "temporary"
    if name not in KIND_OF:
        raise ValueError(f"term {term!r} has no kind: none of PyTorch's trackers was asked about it")
    return KIND_OF[name]


def by_kind(instant: MemoryInstant, *, recompute: str = "none", fsdp2: bool = False) -> dict[str, int]:
    """Return the bytes of an instant by kind, in the order of `KINDS`; they sum to the instant's total."""
    found = dict.fromkeys(KINDS, 0)
    for term, size in instant.terms:
        found[kind_of(term, instant, recompute=recompute, fsdp2=fsdp2)] += size
    return {kind: size for kind, size in found.items() if size}


@dataclass(frozen=True)
class Comparison:
    """One number, predicted and measured.

    Attributes:
        what: "states", "saved" or "peak", for a part with its name: "states: momentum", "saved: norms",
            "peak: activations".
        predicted: Bytes.
        measured: Bytes.
        bound: The largest error allowed, as a share of `whole`; 0 where it must be exact.
        whole: What the error is a share of: the measured bytes themselves, all that is kept, or the whole peak.
    """

    what: str
    predicted: int
    measured: int
    bound: float
    whole: int

    @property
    def error(self) -> float:
        if self.predicted == self.measured:
            return 0.0
        return (self.predicted - self.measured) / self.whole if self.whole else float("inf")

    @property
    def ratio(self) -> float:
        if self.predicted == self.measured:
            return 1.0
        return self.predicted / self.measured if self.measured else float("inf")

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.bound


def predict(case: Case, at: str | None = None, torch: str = PINNED) -> dict[str, object]:
    """Return what the calculator says about a case, in the words of a measurement.

    Returns:
        "quick", the sums of `training_memory`; "states" and "groups" by term, "saved", "peak", "peak_at", and "peak_terms" by kind at the moment
        "peak_terms_at". Implementation "paper" has no peak: no paper says what an operator needs for a moment. "moments" and
        "moment_terms" are there for the cases that are drawn.
    """
    settings = case.settings() | {"torch": torch}
    memory = training_memory(**settings)
    terms = {name.removeprefix("activations."): size for name, size in memory.activation_terms}
    found: dict[str, object] = {
        "quick": {"total": memory.total, "saved": memory.activations},
        "states": dict(memory.state_terms),
        "groups": {group: sum(terms.get(term, 0) for term in names) for group, names in GROUPS.items()},
        "saved": memory.activations,
    }
    if case.implementation == "paper":
        return found
    # PyTorch's trackers are dispatch modes, under which backward writes into no tensor that is there.
    timeline = memory_timeline(step=case.step, out_of_place=True, **settings)
    how = {"recompute": case.recompute, "fsdp2": case.shards}
    if case in DRAWN:
        moments = _as_tracked(timeline.instants)
        found["moments"] = {name: moment.total for name, moment in moments.items()}
        found["moment_terms"] = {name: by_kind(moment, **how) for name, moment in moments.items()}
    moment = timeline.instant(at or "peak")
    # With autocast's casts, and without what the upper bounds of `training_memory` have too much.
    return found | {
        "saved": sum(timeline.saved.values()),
        "peak": timeline.peak_bytes,
        "peak_at": timeline.peak.name,
        "peak_terms": by_kind(moment, **how),
        "peak_terms_at": moment.name,
    }


def _as_tracked(moments: Iterable[MemoryInstant]) -> dict[str, MemoryInstant]:
    """The moments that a tracker tells apart: to it the last reduction is the end of the embedding's backward."""
    found: dict[str, MemoryInstant] = {}
    for moment in moments:
        name = "backward of the embedding" if moment.phase == "reduction" else moment.name
        if name not in found or moment.total > found[name].total:
            found[name] = moment
    return found


def compare(predicted: dict, measured: dict) -> list[Comparison]:
    """Return every number that was predicted and measured."""
    rows = [
        Comparison(f"states: {term}", predicted["states"].get(term, 0), measured["states"].get(term, 0), 0.0, 1)
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
        peak = measured["peak"]
        rows.append(Comparison("peak", predicted["peak"], peak, PEAK_BOUND, peak))
        here, there = predicted["peak_terms"], measured["peak_terms"]
        rows += [
            Comparison(f"peak: {kind}", here.get(kind, 0), there.get(kind, 0), PEAK_BOUND, peak)
            for kind in KINDS
            if kind in here or kind in there
        ]
    return rows
