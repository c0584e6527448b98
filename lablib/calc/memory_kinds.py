"""The kinds of memory that PyTorch's trackers tell apart, and to which of them each term of the calculator belongs.

    by_kind(memory_timeline("gpt2").peak)       # {"weights": 497759232, "activations": ...}

Why the two words differ, where they do, is said in `lablib.calc.memory_terms`.
"""

from __future__ import annotations

from lablib.calc.memory_terms import When, find_term
from lablib.calc.memory_timeline import MemoryMoment

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


def kind_of(term: str, moment: MemoryMoment, *, recompute: str = "none", fsdp2: bool = False) -> str:
    """Return the kind of a term at a moment.

    Args:
        term: Its name.
        moment: When.
        recompute: "none", "selective" or "full".
        fsdp2: Whether FSDP2 shards the run, so that FSDPMemTracker is asked.

    Raises:
        ValueError: If no tracker was asked about this term.
    """
    kind = find_term(term).kind
    if kind is None:
        raise ValueError(f"term {term!r} has no kind: none of PyTorch's trackers was asked about it")
    return kind if isinstance(kind, str) else kind(When(moment.phase, moment.at, recompute, fsdp2))


def by_kind(moment: MemoryMoment, *, recompute: str = "none", fsdp2: bool = False) -> dict[str, int]:
    """Return the bytes of a moment by kind, in the order of `KINDS`; they sum to the moment's total.

    Args:
        moment: Of a timeline.
        recompute: Of its run: "none", "selective" or "full".
        fsdp2: Whether FSDP2 shards the run, so that FSDPMemTracker is asked.

    Raises:
        ValueError: If a term has no kind.
    """
    found = dict.fromkeys(KINDS, 0)
    for term, size in moment.terms:
        found[kind_of(term, moment, recompute=recompute, fsdp2=fsdp2)] += size
    return {kind: size for kind, size in found.items() if size}
