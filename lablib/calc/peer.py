"""What a peer of the memory calculator is, and what every peer is told of a case.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lablib.calc.memory_cases import Case
from lablib.calc.optimizers import find_optimizer
from lablib.calc.params import count_params

#: Recipes that people call mixed precision: an fp32 copy of the weights and 16-bit values in forward.
MIXED = ("mixed-bf16", "autocast-bf16", "fsdp2-mixed")
#: And those whose activations are 16 bits wide.
SIXTEEN_BITS = (*MIXED, "pure-bf16")


@dataclass(frozen=True)
class Peer:
    """A calculator that says one quantity.

    Attributes:
        name: Of the calculator.
        quantity: "states", "activations" or "total".
        citation: Where its formula is published.
        covers: Gets a case and returns "" or the reason why the peer does not claim it.
        terms: Gets a case and returns bytes by term.
        url: Where that is.
        key: Its entry in book/references.bib.
    """

    name: str
    quantity: str
    citation: str
    covers: Callable[[Case], str]
    terms: Callable[[Case], dict[str, float]]
    url: str = ""
    key: str = ""

    def predict(self, case: Case) -> int:
        """Return the bytes of one rank.

        Args:
            case: A case that the peer covers.

        Raises:
            ValueError: If it does not cover the case.
        """
        reason = self.covers(case)
        if reason:
            raise ValueError(f"{self.name} does not cover {case.name}: {reason}")
        return round(sum(self.terms(case).values()))


@dataclass(frozen=True)
class Shape:
    """The letters of the papers.

    Attributes:
        s: Tokens in a sequence.
        b: Sequences in a micro-batch.
        h: Width of the stream.
        a: Attention heads.
        layers: Blocks, L.
        v: Vocabulary, padded to a multiple of t.
        t: Tensor-parallel ranks.
        p: Pipeline stages.
        n: Data-parallel ranks, N.
    """

    s: int
    b: int
    h: int
    a: int
    layers: int
    v: int
    t: int
    p: int
    n: int

    @property
    def sbh(self) -> int:
        """Values of the stream in one micro-batch."""
        return self.s * self.b * self.h


def shape(case: Case) -> Shape:
    """Return the letters of a case."""
    model = case.model
    vocab = -(-model.vocab // case.tp) * case.tp
    sizes = (case.seq, case.micro_batch, model.hidden, model.num_heads, model.num_layers, vocab)
    return Shape(*sizes, case.tp, case.pp, case.dp)


def parameters(case: Case) -> int:
    """Return the parameters of the whole model, exactly."""
    return count_params(case.model).total


def moments(case: Case) -> int:
    """Return how many values the optimizer keeps for each parameter."""
    return len(find_optimizer(case.optimizer).moment_bytes(1, 4))


def keeps_scores(case: Case) -> bool:
    """Return whether the scores of every pair of tokens wait for backward."""
    return case.attention == "plain" and case.recompute == "none"


def state_terms(states: Mapping[str, float]) -> dict[str, float]:
    """Return states in the words of the peers.

    Args:
        states: Bytes by term, as the memory table has them.
    """
    moments_ = sum(states.get(term, 0) for term in ("momentum", "variance"))
    terms = {"weights": states["weights"], "fp32 copy": states.get("master_weights", 0)}
    return terms | {"gradients": states["gradients"], "moments": moments_}


def first_reason(*checks: tuple[bool, str]) -> str:
    """Return the text of the first check that is true, or ""."""
    return next((reason for refused, reason in checks if refused), "")


def only_full_tuning(case: Case) -> tuple[bool, str]:
    """Return a check: every parameter is trained."""
    return case.tuning != "full", "it counts full fine-tuning only"


def only_dense(case: Case) -> tuple[bool, str]:
    """Return a check: one MLP a block."""
    return case.model.is_moe, "its blocks have one MLP, no experts"


def only_sixteen_bits(case: Case) -> tuple[bool, str]:
    """Return a check: activations have 2 bytes."""
    return case.recipe not in SIXTEEN_BITS, "its activations have 2 bytes a value"


def only_four_times(case: Case) -> tuple[bool, str]:
    """Return a check: a GPT block whose MLP is as wide as the formula takes for granted."""
    model = case.model
    return (
        not model.gated_mlp and model.ffn != 4 * model.hidden,
        "it takes an MLP four times as wide as the stream for granted",
    )


def only_published(case: Case) -> tuple[bool, str]:
    """Return a check: sizes that somebody trains. Formulas drop what is small there, and is not in a tiny model."""
    return (
        case.size == "tiny",
        "it leaves out what is small in models of published sizes, and this one is tiny",
    )


def split_tiny(case: Case) -> tuple[bool, str]:
    """Return a check: not a tiny model over tensor-parallel ranks, where what is not split is no longer small."""
    return case.size == "tiny" and case.tp > 1, only_published(case)[1]


def only_even(case: Case) -> tuple[bool, str]:
    """Return a check: shards of equal size, as every formula of ZeRO has them."""
    return case.sharding == "zero1", "it divides evenly, and PyTorch's ZeRO-1 optimizer by whole tensors"


def only_megatron(case: Case) -> tuple[bool, str]:
    """Return a check: tensor parallelism as Megatron-LM has it, which splits the table of words too."""
    return (
        case.kernels != "paper" and case.tp > 1,
        "it divides all parameters by the tensor-parallel ranks, and PyTorch's plan leaves the embedding whole",
    )


def only_with_peak(case: Case) -> tuple[bool, str]:
    """Return a check: a peak was measured."""
    return case.kernels == "paper", "no peak is measured with the papers' kernels"
