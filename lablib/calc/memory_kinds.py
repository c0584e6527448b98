"""The kinds of memory that PyTorch's trackers tell apart, and to which of them each term of the calculator belongs.

    by_kind(memory_timeline("gpt2").peak)       # {"weights": 497759232, "activations": ...}

The trackers (`torch.distributed._tools`, MemTracker and FSDPMemTracker) label a tensor when it is made, by who is
running then: forward makes activations, backward makes temporaries, the optimizer makes optimizer states. Hooks
relabel a few: a gradient once a parameter has it, FSDP2's buffers once a collective gets them. The calculator names
what a tensor is for. Here is which label that is, and why where the two words differ.
"""

from __future__ import annotations

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

#: Term -> kind. Terms of `training_memory` that no timeline of the grid has are not here.
TERMS = {
    "weights": "weights",
    # The master copy is a module of parameters like any other.
    "master_weights": "weights",
    "gathered_weights": "gathered weights",
    # The batch was there before forward began.
    "activations.tokens": "inputs",
    # A unit's weights are labelled when all of them have been copied out of the buffer.
    "arriving_weights": "activations",
    "momentum": "optimizer",
    "variance": "optimizer",
    # What is made between the hooks before and behind optimizer.step is labelled as the optimizer's, states or not.
    "optimizer_temporaries": "optimizer",
    "gradients": "gradients",
    "master_gradients": "gradients",
    "gradient_buckets": "gradient buckets",
    "all_gather_buffers": "all-gather buffers",
    # Made in forward, kept or not.
    "logits": "activations",
    "logits_fp32": "activations",
    "forward_values": "activations",
    "weight_casts": "activations",
    "attention_mask": "activations",
    "stage_outputs": "activations",
    # Outside of backward, before it begins: it is what the next stage sent.
    "received_gradient": "activations",
    # Made in backward.
    "logits_gradients": "temporary",
    "activation_gradients": "temporary",
    "adapter_gradients": "temporary",
    # A gradient gets its label when a parameter gets it. Until then it was made in backward like any other tensor:
    # while the operator that makes it runs, and while the first of two gradients of a tied table waits.
    "new_gradients": "temporary",
    "tied_gradient": "temporary",
    # FSDP2's gradients are labelled by the tracker when their unit's reduction begins, the root's at the very end.
    "root_gradients": "temporary",
}


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
    if term in TERMS:
        return TERMS[term]
    if term.startswith("activations."):
        return "activations"
    if term.startswith("recomputed"):
        # MemTracker knows that forward runs again while a module of the block does. What a block's own forward makes
        # between its modules, the stream, counts as backward's; so does selective recomputation, which runs a function.
        # FSDPMemTracker asks FSDP2's units alone, whose hooks are outside of what runs again.
        known = recompute == "full" and not fsdp2 and term != "recomputed_stream"
        return "activations" if known else "temporary"
    if term == "unsharded_gradients":
        return "unsharded gradients" if moment.at == "reduce-scatter" else "temporary"
    if term == "reduce_scatter_buffers":
        # Its label comes with the collective; fullest is the moment when gradients have been copied into it.
        return "temporary" if moment.at == "reduce-scatter" else "reduce-scatter buffers"
    if term == "operator_temporaries":
        return "activations" if moment.phase in ("forward", "loss") else "temporary"
    raise ValueError(f"term {term!r} has no kind: none of PyTorch's trackers was asked about it")


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
