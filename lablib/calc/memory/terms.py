"""Every term of the calculator, once: its name, its role, its formula, its source, and how it is confirmed.

A term is computed in `formulas`, in `timeline` or on a tape. Whoever lists, explains, compares or draws terms reads
them here. A name may have a part behind a dot: "activations.norms", "recomputed.mlp". `MemoryBreakdown`, which
`training_memory` returns, holds bytes by term, in three groups that sum to the total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ZERO = "Rajbhandari et al. 2019 (arXiv 1910.02054), section 3.1"
KORTHIKANTI = "counted as by Korthikanti et al. 2022 (arXiv 2205.05198), section 4"
DETTMERS = "Dettmers et al. 2023 (arXiv 2305.14314), section 3"
AUTOGRAD = "PyTorch, tools/autograd/derivatives.yaml"
ENGINE = "PyTorch, torch/csrc/autograd/engine.cpp"
LOSS = "PyTorch, torch.nn.functional.cross_entropy: log_softmax and nll_loss"
FSDP = "PyTorch, torch/distributed/fsdp/_fully_shard"
PIPELINING = "PyTorch, torch.distributed.pipelining"
ADAM = "PyTorch, torch/optim/adam.py"


@dataclass(frozen=True)
class Term:
    """One term.

    Attributes:
        role: "weights", "gradients", "optimizer", "activations" or "buffers": its colour in pictures.
        formula: How it is counted, in the letters of `lablib.calc.memory.timeline.explain`.
        source: Where the formula can be checked.
        proof: "exact": it follows from counting. "measured": tests hold it to PyTorch; "fsdp2": under FSDP2 alone.
            "unproven": no oracle on a CPU can see it.
        running: Whether its size is that of what the running operator makes, or needs.
    """

    name: str
    role: str
    formula: str
    source: str
    proof: str = "measured"
    running: bool = False


def _terms(role: str, source: str, *terms: tuple[str, str], **how: object) -> dict[str, Term]:
    """Terms of one role and source, (name, formula) each."""
    return {name: Term(name, role, formula, source, **how) for name, formula in terms}


ADAM_PAPER = "Kingma and Ba 2014 (arXiv 1412.6980)"
TERMS: dict[str, Term] = {
    # States.
    **_terms("weights", ZERO, ("weights", "bytes of a weight × ψ (/ N where weights are sharded)"), proof="exact"),
    **_terms(
        "weights",
        DETTMERS,
        ("quantized_weights", "ψ / 2"),
        ("quantization_constants", "ψ / 64 + 4 ψ / (64 × 256), and 4 a matrix"),
        proof="exact",
    ),
    **_terms(
        "gradients",
        ZERO,
        ("gradients", "bytes of a gradient × parameters whose backward is done (/ N where sharded)"),
        proof="exact",
    ),
    **_terms("gradients", "The Ultra-Scale Playbook (Hugging Face)", ("gradient_accumulation", "4 ψ"), proof="exact"),
    **_terms(
        "optimizer", "Megatron-LM documentation, distributed optimizer", ("gradient_copy", "4 ψ / N"), proof="exact"
    ),
    **_terms("optimizer", ZERO, ("master_weights", "4 ψ (/ N where the optimizer is sharded)"), proof="exact"),
    **_terms(
        "optimizer",
        ADAM_PAPER,
        ("momentum", "bytes of a moment × ψ (/ N); scales, tables and small tensors apart in 8 and 4 bits"),
        ("variance", "bytes of a moment × ψ (/ N); as momentum"),
        proof="exact",
    ),
    # What forward keeps.
    **_terms("activations", KORTHIKANTI, ("activations", "what operators of a block keep for backward")),
    **_terms("activations", AUTOGRAD, ("activations.tokens", "token ids")),
    **_terms(
        "buffers",
        "PyTorch, torch.amp",
        ("weight_casts", "bytes of a cast × matrices used so far, until their backward"),
    ),
    **_terms(
        "activations",
        LOSS,
        ("logits", "bytes of a value × n V"),
        ("logits_fp32", "4 n V: cross-entropy reads fp32"),
        ("logits_gradients", "4 n V for log-probabilities, 4 n V for fp32 logits, and the cast back"),
    ),
    **_terms("activations", "transformers, masking_utils", ("attention_mask", "bytes of a value × b s²")),
    **_terms(
        "activations",
        PIPELINING,
        ("stage_outputs", "bytes of a value × n h × micro-batches in flight"),
        ("stage_inputs", "bytes of a value × n h × micro-batches in flight"),
        ("received_gradient", "bytes of a value × n h: held until the stage's backward ends"),
    ),
    # Made in forward, or when it runs again; kept or not.
    **_terms(
        "activations",
        AUTOGRAD,
        ("forward_values", "what forward holds and backward will not need"),
        ("recomputed", "what the replay of the block has made again for its backward"),
        ("recomputed_values", "what the replay holds and backward will not need"),
        ("recomputed_stream", "the stream behind attention, which the replay of the block made"),
        running=True,
    ),
    **_terms(
        "buffers", AUTOGRAD, ("operator_temporaries", "what one operator's backward makes for itself"), running=True
    ),
    # Made in backward.
    **_terms(
        "activations",
        ENGINE,
        ("activation_gradients", "gradients of activations that wait for an operator"),
        ("adapter_gradients", "bytes of a value × n r: of A x, until A's backward has run, the last of a layer's"),
        running=True,
    ),
    **_terms(
        "gradients", ENGINE, ("new_gradients", "gradients of parameters that the running operator makes"), running=True
    ),
    **_terms(
        "gradients",
        ENGINE,
        (
            "tied_gradient",
            "bytes of a gradient × V h: the head's, the embedding's, and their sum if the head's is a view",
        ),
    ),
    # Data parallelism.
    **_terms(
        "buffers",
        FSDP,
        ("gathered_weights", "root and unit in use, whole, at the bytes of a gathered value"),
        ("arriving_weights", "the unit that is copied out of its buffer, at the bytes of a gathered value"),
        ("all_gather_buffers", "buffers of the unit in use and of the next, as large as they are"),
        ("reduce_scatter_buffers", "the last unit's gradients, padded, in the dtype of the reduction"),
        proof="fsdp2",
    ),
    **_terms(
        "gradients",
        FSDP,
        ("unsharded_gradients", "whole gradients of the unit in use"),
        (
            "reduced_shards",
            "the unit's shard in the dtypes of reduction and weights; with replicas, of units before it too",
        ),
        ("root_gradients", "whole gradients of the root, which wait for the end of backward"),
        proof="fsdp2",
    ),
    **_terms(
        "buffers", "PyTorch, DistributedDataParallel", ("gradient_buckets", "DDP's buckets, as large as all gradients")
    ),
    **_terms("buffers", ZERO, ("communication_buckets", "two buckets of ZeRO, or the largest unit"), proof="unproven"),
    **_terms(
        "buffers",
        "arXiv 2305.14314, section 3",
        ("dequantized_weights", "the largest matrix in the compute dtype"),
        proof="unproven",
    ),
    **_terms(
        "buffers",
        "Transformer Engine, module/base.py, get_dummy_wgrad",
        ("dummy_weight_gradients", "bytes of a weight × every shape of the blocks' matrices, once"),
        proof="unproven",
    ),
    **_terms("buffers", "torchtitan, models/common/rope.py", ("rotary_tables", "4 s d for each block")),
    **_terms("buffers", KORTHIKANTI, ("recomputed_layer", "what the largest layer computes again"), proof="unproven"),
    # The optimizer.
    **_terms(
        "gradients",
        "torch.optim: one dtype a parameter",
        ("master_gradients", "4 ψ (/ N where the optimizer is sharded): its fp32 copy"),
    ),
    **_terms(
        "optimizer",
        ADAM,
        ("optimizer_temporaries", "√variance of all tensors (foreach), or of the largest ones (for-loop)"),
    ),
}
ROLES = ("weights", "gradients", "optimizer", "activations", "buffers")


def find_term(name: str) -> Term:
    """Return a term by its name, or by what stands before the dot."""
    return TERMS[name] if name in TERMS else TERMS[name.partition(".")[0]]


Terms = tuple[tuple[str, int], ...]
WEIGHT_TERMS, GRADIENT_TERMS = (
    tuple(name for name, term in TERMS.items() if term.role == role and term.proof == "exact")
    for role in ("weights", "gradients")
)


def listed(terms: Mapping[str, int]) -> Terms:
    """Return terms as pairs; one that a run does not have is left out."""
    return tuple((name, size) for name, size in terms.items() if size)


def sum_by_role(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer, activations and buffers."""
    found = dict.fromkeys(ROLES, 0)
    for name, size in terms.items():
        found[find_term(name).role] += size
    return found


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of device memory on one rank at the peak of a training step.

    Attributes:
        stage: Pipeline stage that it describes, from 0.
        ranks: Ranks of the whole run.
        seq: Tokens in a sequence.
        state_terms: What lives from step to step: weights, gradients, optimizer.
        activation_terms: What forward keeps for backward, by kind, for all micro-batches in flight.
        buffer_terms: What exists for a part of the step: gathered weights, buckets, one recomputed layer. Estimates.
        host_terms: What offload moved to the CPU; not in the total.
    """

    model: str
    recipe: str
    stage: int
    ranks: int
    seq: int
    state_terms: Terms
    activation_terms: Terms
    buffer_terms: Terms
    host_terms: Terms

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term; they sum to `total`."""
        return dict(self.state_terms + self.activation_terms + self.buffer_terms)

    @property
    def total(self) -> int:
        """All bytes on the device: states, activations and buffers."""
        return self.states + self.activations + self.buffers

    @property
    def states(self) -> int:
        """Bytes of the model states: weights, gradients, optimizer."""
        return sum(dict(self.state_terms).values())

    @property
    def optimizer(self) -> int:
        """Bytes of the states that the optimizer owns: master copy, its own gradient copy and moments."""
        return self.by_role()["optimizer"]

    @property
    def activations(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(dict(self.activation_terms).values())

    @property
    def buffers(self) -> int:
        """Bytes of short-lived buffers; an estimate."""
        return sum(dict(self.buffer_terms).values())

    @property
    def host(self) -> int:
        """Bytes that offload holds in CPU memory, for this rank."""
        return sum(dict(self.host_terms).values())

    def by_role(self) -> dict[str, int]:
        """Return the bytes of weights, gradients, optimizer, activations and buffers; they sum to the total."""
        return sum_by_role(self.terms)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain dictionaries and numbers, as `rung memory --json` prints it."""
        numbers = ("model", "recipe", "stage", "ranks", "seq")
        numbers += ("total", "states", "optimizer", "activations", "buffers", "host")
        groups = ("state_terms", "activation_terms", "buffer_terms", "host_terms")
        return (
            {name: getattr(self, name) for name in numbers}
            | {"terms": self.terms}
            | {name: dict(getattr(self, name)) for name in groups}
        )
