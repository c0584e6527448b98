"""Where a peer's number and the measured one differ, term by term: the terms' gaps sum to the whole gap.

What was measured comes whole. States are measured by term. What forward keeps is told apart by this course's terms,
which tests hold to autograd's hooks; a total by what else was measured:

| quantity | terms |
|---|---|
| states | weights (with an fp32 copy), gradients, moments |
| activations | norms, attention, mlp, embedding, head (with logits and loss), inputs (of recomputed blocks), |
| | casts (autocast's 16-bit copies of matrices), other (masks, outputs of a stage) |
| total | states, activations, moment: what is at the peak less both; negative where something is not there yet |

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from functools import cache

from lablib.calc.memory import training_memory
from lablib.calc.memory_cases import Case
from lablib.calc.memory_timeline import memory_timeline
from lablib.calc.peer import Peer, state_terms

#: Ratios as close as this need no cause.
CLOSE = 0.005
_KINDS = {
    "scores": "attention",
    "router": "mlp",
    "experts": "mlp",
    "dropout": "embedding",
    "logits": "head",
    "loss": "head",
    "input": "inputs",
    "tokens": "embedding",
    "weight_casts": "casts",
    "attention_mask": "attention",
}


def measured_bytes(measured: dict, quantity: str) -> int:
    """Return the measured number of a quantity.

    Args:
        measured: Of a row of the memory table.
        quantity: "states", "activations" or "total".

    Raises:
        ValueError: If it was not measured.
    """
    if quantity == "states":
        return sum(measured["states"].values())
    key = {"activations": "saved", "total": "peak"}[quantity]
    if key not in measured:
        raise ValueError(f"the row has no measured {quantity}: kernels of papers have no peak")
    return measured[key]


def measured_terms(case: Case, measured: dict, quantity: str) -> dict[str, float]:
    """Return the measured number by term.

    Args:
        case: The case.
        measured: Of its row.
        quantity: "states", "activations" or "total".
    """
    whole = measured_bytes(measured, quantity)
    if quantity == "states":
        return state_terms(measured["states"])
    if quantity == "activations":
        terms = dict.fromkeys(("norms", "attention", "mlp", "embedding", "head", "inputs", "casts"), 0)
        for name, size in _kept(case).items():
            kind = name.removeprefix("activations.")
            if kind == "input" and case.recompute == "selective":
                kind = "attention"  # q, k and v, from which its core runs again
            kind = _KINDS.get(kind, kind)
            if kind in terms:
                terms[kind] += size
        return terms | {"other": whole - sum(terms.values())}
    parts = {kind: measured_bytes(measured, kind) for kind in ("states", "activations")}
    return parts | {"moment": whole - sum(parts.values())}


@cache
def _kept(case: Case) -> dict[str, int]:
    """What forward keeps by this course's terms; the papers' kernels have no timeline. Only to be read."""
    if case.kernels == "paper":
        return dict(training_memory(**case.settings()).activation_terms)
    return dict(memory_timeline(step=case.step, out_of_place=True, **case.settings()).saved)


def gaps(peer: Peer, case: Case, measured: dict) -> dict[str, float]:
    """Return predicted less measured by term.

    An fp32 copy counts as weights: recipes differ in which of the two they call so. "blocks" of a peer stand for
    every kind that a block keeps, "kept" and "peak" for the whole.

    Args:
        peer: The peer.
        case: A case that it covers.
        measured: Of the case's row.
    """
    said, held = dict(peer.terms(case)), measured_terms(case, measured, peer.quantity)
    for terms in (said, held):
        if "fp32 copy" in terms:
            terms["weights"] += terms.pop("fp32 copy")
    for whole in {"kept", "peak"} & set(said):
        return {whole: said[whole] - sum(held.values())}
    if "blocks" in said:
        inside = ("norms", "attention", "mlp", "inputs")
        held = {"blocks": sum(held.pop(kind) for kind in inside)} | held
    return {term: said.get(term, 0) - held.get(term, 0) for term in dict.fromkeys((*said, *held))}


def main_cause(peer: Peer, case: Case, measured: dict) -> str:
    """Return the term with the largest gap, of the gap's own sign; "" where the numbers are close.

    "parameters" if the bytes of each are right and the peer has another number of them.

    Args:
        peer: The peer.
        case: A case that it covers.
        measured: Of the case's row.
    """
    found = gaps(peer, case, measured)
    gap, whole = sum(found.values()), measured_bytes(measured, peer.quantity)
    if abs(gap) <= CLOSE * whole:
        return ""
    if _another_count(peer, case, measured, (whole + gap) / whole):
        return "parameters"
    return max(found, key=lambda term: found[term] * (1 if gap > 0 else -1))


def _another_count(peer: Peer, case: Case, measured: dict, ratio: float) -> bool:
    """Moments have the same bytes in every recipe with fp32 ones, so they tell how many parameters a peer has."""
    said = peer.terms(case).get("moments", 0)
    held = measured_terms(case, measured, peer.quantity).get("moments", 0)
    return bool(said and held) and abs(said / held / ratio - 1) <= CLOSE
