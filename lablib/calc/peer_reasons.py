"""Why a peer is off where it is most off: one sentence each, its numbers computed, its cause checked.

A reason names the term with the largest gap in the peer's worst case; `why` refuses to say a sentence whose term is
no longer that one.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.memory_cases import Case
from lablib.calc.memory_timeline import memory_timeline
from lablib.calc.peer import Peer, parameters
from lablib.calc.peer_playbook import simple_parameters
from lablib.calc.peer_truth import gaps, main_cause, measured_bytes, measured_terms
from lablib.calc.recipes import recipe
from lablib.calc.units import format_bytes, format_count


@dataclass(frozen=True)
class Reason:
    """A sentence about a peer's worst case.

    Attributes:
        term: The term with the largest gap; "" where the peer is right, None for this course's own numbers, whose
            terms the memory table judges one by one.
        text: Format string. said_x, held_x and gap_x are bytes of term x as the peer counts them, as they were
            measured, and their difference; at_x are bytes of term x of `memory_timeline` at the peak.
    """

    term: str | None
    text: str


_MIXED = "2 + 2 + 4 bytes are the 4 + 4 of a recipe that keeps its weights in fp32"
_BLOCKS = (
    "It counts blocks alone: with {model} the head and the fp32 logits are {held_head} of the {measured} kept, and of "
    "them it has nothing."
)
_MOMENT = (
    "States and activations are {sum} of the {measured} that {model} reaches in its {peak_at}: the gradient of the "
    "logits, {at_logits_gradients}, and gathered weights, {at_gathered_weights}, are there too, and it counts neither."
)
_STEP = (
    "The peak of {model} is its {peak_at}, with {at_master_gradients} of fp32 gradients for the master weights and "
    "{at_optimizer_temporaries} of temporaries, and the activations that it adds are gone by then."
)
_CASTS = (
    "It knows no autocast: {held_casts} of the {measured} that {model} keeps are 16-bit copies of the matrices, which "
    "wait for backward."
)

REASONS: dict[tuple[str, str], Reason] = {
    ("ZeRO", "states"): Reason(
        "",
        f"Right to {{error}}: {_MIXED}, so one sum fits every mixed recipe, and only padding and norms that "
        "tensor parallelism does not split are missing.",
    ),
    ("ZeRO", "activations"): Reason(
        "blocks",
        "Twelve values a token and unit of width are {said_blocks} with {model}, whose blocks keep {held_blocks} "
        "for backward, beside {held_head} in head and loss.",
    ),
    ("Korthikanti et al.", "activations"): Reason(
        "inputs",
        "Its full recomputation keeps the whole input of every block, {said_inputs} in {model}; with sequence "
        "parallelism a rank has its share alone, {held_inputs}.",
    ),
    ("Transformer Math 101", "states"): Reason(
        "",
        f"Right to {{error}}: {_MIXED}, and in fp32 its sum is the recipe's own; only a shard's padding is missing.",
    ),
    ("Transformer Math 101", "activations"): Reason("head", _BLOCKS),
    ("Transformer Math 101", "total"): Reason("moment", _STEP),
    ("Ultra-Scale Playbook", "states"): Reason(
        "",
        f"Right to {{error}} where it is told the number of parameters: {_MIXED}, and only padding and norms that "
        "tensor parallelism does not split are missing.",
    ),
    ("Ultra-Scale Playbook, its N", "states"): Reason(
        "parameters",
        "Its N is {simple} where {model} has {parameters} parameters: 12h² is a block whose MLP has two matrices, "
        "each four times as wide as the stream, and this one has three.",
    ),
    ("Ultra-Scale Playbook", "activations"): Reason("head", _BLOCKS),
    ("Ultra-Scale Playbook", "total"): Reason("moment", _MOMENT),
    ("Megatron-LM's report", "states"): Reason(
        "weights",
        "Its {bytes_said} bytes a parameter are those of Megatron's own runs, which keep a 16-bit copy beside fp32 weights: "
        "{gap_weights} more than {model}, which keeps {bytes_held} under autocast.",
    ),
    ("Megatron-LM's report", "activations"): Reason("casts", _CASTS),
    ("Megatron-LM's report", "total"): Reason("moment", _STEP),
    ("EleutherAI's calculator", "states"): Reason(
        "moments",
        "Without ZeRO it divides only the weights by tensor-parallel ranks: it puts {said_moments} of moments on a "
        "rank of {model}, which holds {held_moments}.",
    ),
    ("EleutherAI's calculator", "activations"): Reason("casts", _CASTS),
    ("EleutherAI's calculator", "total"): Reason(
        "states",
        "Without ZeRO it divides only the weights by pipeline stages: it puts {said_states} of states on a rank of "
        "{model}, which holds {held_states}.",
    ),
    ("Transformers' docs", "states"): Reason(
        "gradients",
        "Its {bytes_said} bytes a parameter have a 16-bit copy of the weights and fp32 gradients; {model} under "
        "{recipe} keeps {bytes_held}, with 16-bit gradients, and autocast keeps as many, without the copy.",
    ),
    ("DeepSpeed", "states"): Reason(
        "gathered layer",
        "Of its {predicted} for {model} {said_gathered_layer} are the largest layer, whole, which the peak holds and "
        "the states do not; the rest is 18 bytes a parameter, where FSDP2 keeps {bytes_held}.",
    ),
    ("Accelerate", "states"): Reason(
        "weights",
        "Right in fp32, but in 16 bits it takes the largest of weights, gradients and optimizer, {predicted}, where "
        "{model} holds them together, {measured}.",
    ),
    ("this course", "states"): Reason("", "Exact to the byte in every case."),
    ("this course", "activations"): Reason(None, "Off by {error} at most, {gap} in {model}."),
    ("this course", "total"): Reason(None, "Off by {error} at most, {gap} in {model}."),
}


def _share(x: float) -> str:
    """Return a share in percent, with two digits."""
    return "less than 0.001%" if x < 1e-5 else f"{100 * x:.2g}%"


def _size(n: float) -> str:
    """Return bytes in the largest unit that leaves a digit before the point."""
    unit = next((name for name, least in (("GB", 1e8), ("MB", 1e5), ("kB", 1e3)) if n >= least), "")
    return format_bytes(n, unit) if unit else f"{n:.0f} bytes"


def fields(peer: Peer, case: Case, measured: dict, predicted: int) -> dict[str, str]:
    """Return the numbers that a sentence may use, as text.

    Args:
        peer: The peer.
        case: Its worst case.
        measured: Of the case's row.
        predicted: What the peer says.
    """
    held_bytes = measured_bytes(measured, peer.quantity)
    said, held = dict(peer.terms(case)), measured_terms(case, measured, peer.quantity)
    found = gaps(peer, case, measured)
    if "blocks" in said:
        held["blocks"] = said["blocks"] - found["blocks"]
    texts = {"model": case.model.name, "error": _share(abs(predicted / held_bytes - 1))}
    texts |= {"predicted": _size(predicted), "measured": _size(held_bytes)}
    for name, terms in (("said", said), ("held", held), ("gap", found)):
        texts |= {f"{name}_{t.replace(' ', '_')}": _size(abs(size)) for t, size in terms.items()}
    if peer.quantity == "total":
        peak = memory_timeline(step=case.step, out_of_place=True, **case.settings()).peak
        texts |= {"peak_at": peak.name} | {
            f"at_{term}": _size(size) for term, size in dict(peak.terms).items()
        }
    # Parameters that this rank holds, a shard's padding included.
    own = measured["states"]["weights"] / recipe(case.recipe).weights
    states = measured_bytes(measured, "states")
    model = case.model
    simple = simple_parameters(model.hidden, model.num_layers, model.vocab)
    return texts | {
        "bytes_said": f"{predicted / own:.0f}",
        "bytes_held": f"{states / own:.0f}",
        "sum": _size(states + measured["saved"]),
        "recipe": case.recipe,
        "gap": _size(abs(predicted - held_bytes)),
        "parameters": format_count(parameters(case)),
        "simple": format_count(simple),
    }


def why(peer: Peer, case: Case, measured: dict, predicted: int) -> str:
    """Return the sentence about a peer's worst case.

    Args:
        peer: The peer.
        case: Its worst case.
        measured: Of the case's row.
        predicted: What the peer says.

    Raises:
        ValueError: If there is no reason for this peer, or the case differs by another term than the reason names.
    """
    reason = REASONS.get((peer.name, peer.quantity))
    cause = main_cause(peer, case, measured)
    if reason is None or reason.term not in (cause, None):
        named = "missing" if reason is None else f"of {reason.term!r}"
        raise ValueError(
            f"{peer.name}, {peer.quantity}: in its worst case, {case.name}, the largest gap is in {cause!r}, and the "
            f"reason given is {named}; mend lablib.calc.peer_reasons"
        )
    return reason.text.format(**fields(peer, case, measured, predicted))
