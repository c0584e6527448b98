"""Every tensor that one block keeps for backward, by name: what `lablib.calc.memory.activations.block` sums up.

    for tensor in block_tensors(config, batch=1, seq=2048, attention="plain"):
        print(tensor.name, tensor.count, tensor.bytes)

Three ways of counting, as everywhere in the course.
"paper" is Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1, and the same counting for families that the paper
does not have; "toy" is what `lablib.toys.transformer` keeps under eager PyTorch on a CPU; "hf" is what Hugging Face's
eager classes keep.
`differences` sets them side by side: each tensor that one has and the other has not, or has in another size.

Letters: b sequences of s tokens, n = b s, h hidden, a query heads and k key heads of width d, f inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.memory.activations.block import layer_activations
from lablib.calc.memory.activations.share import FP32, MASK
from lablib.calc.memory.implementation import accepts_old_names, find_implementation
from lablib.calc.models import ModelConfig


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd keeps from forward to backward.

    Attributes:
        name: What it is: "input of norm 1", "q", "softmax output", ...
        kind: Which term of `layer_activations` it belongs to: "norms", "attention", "scores" or "mlp".
        keepers: The operators whose derivative needs it. Autograd keeps one copy for all of them.
        count: Its number of values, as a formula: "n h", "a b s²", ...
        values: Its number of values.
        size: Bytes of a value.
    """

    name: str
    kind: str
    keepers: tuple[str, ...]
    count: str
    values: int
    size: int

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.values * self.size


@dataclass(frozen=True)
class Difference:
    """One tensor that the paper and eager PyTorch count differently.

    Attributes:
        name: Which tensor.
        paper: Its bytes in the paper's counting; 0 where the paper has none.
        toy: Its bytes in the toy; 0 where the toy has none.
        why: The cause, in one sentence.
    """

    name: str
    paper: int
    toy: int
    why: str


@accepts_old_names
def block_tensors(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    implementation: str = "paper",
    bytes_per_value: int = 2,
    attention: str = "fused",
    dropout: float | None = None,
) -> list[SavedTensor]:
    """Return the tensors that one block keeps, in the order of the forward pass; they sum to `layer_activations`.

    Args:
        config: The model, without experts and latent attention.
        implementation: "paper", "toy" or "hf".
        bytes_per_value: 2 for bf16 and fp16, 4 for fp32.
        attention: "plain" or "fused".
        dropout: As in `layer_activations`: None is 0.1 for the paper's GPT blocks, and 0 elsewhere.

    Raises:
        ValueError: As `layer_activations`, and if the model has experts or latent attention: their tensors depend on
            the implementation, and only their sums are counted.
    """
    layer_activations(  # raises where a size or a name is wrong
        config,
        batch=batch,
        seq=seq,
        implementation=implementation,
        bytes_per_value=bytes_per_value,
        attention=attention,
        dropout=dropout,
    )
    if config.is_moe or config.is_mla:
        what = "experts" if config.is_moe else "latent attention"
        raise ValueError(f"{config.name} has {what}: its tensors are summed by layer_activations, not listed")
    whose = find_implementation(implementation)
    dropout = whose.default_dropout(config) if dropout is None else dropout
    block = _Block(
        config, batch, seq, bytes_per_value, whose.eager, attention == "fused", dropout > 0, whose.loss_in_root
    )
    return [*block.norm(1), *block.attention(), *block.norm(2), *block.mlp()]


@dataclass(frozen=True)
class _Block:
    config: ModelConfig
    batch: int
    seq: int
    value: int
    toy: bool
    fused: bool
    dropout: bool
    hf: bool = False

    @property
    def n(self) -> int:
        return self.batch * self.seq

    def make(self, name: str, kind: str, keepers: str, count: str, size: int = 0) -> SavedTensor:
        c = self.config
        values = {
            "n": self.n,
            "n h": self.n * c.hidden,
            "n a d": self.n * c.q_width,
            "n k d": self.n * c.kv_width,
            "n a": self.n * c.num_heads,
            "n f": self.n * c.ffn,
            "a b s²": c.num_heads * self.batch * self.seq**2,
        }[count]
        return SavedTensor(name, kind, tuple(keepers.split(", ")), count, values, size or self.value)

    def mask(self, name: str, kind: str, where: str, count: str = "n h") -> list[SavedTensor]:
        if not self.dropout:
            return []
        return [self.make(name, kind, f"dropout of {where}", count, self.value if self.toy else MASK)]

    def norm(self, number: int) -> list[SavedTensor]:
        kind, norm = "norms", f"norm {number}"
        if self.toy and self.config.norm == "rmsnorm":
            square, scale, weight = f"square in {norm}", f"scale in {norm}", f"weight of {norm}"
            return [
                self.make(f"input of {norm}", kind, f"{square}, {scale}", "n h", FP32),
                self.make(f"inverse root of {norm}", kind, f"inverse root in {norm}, {scale}", "n", FP32),
                self.make(f"normed value of {norm}", kind, weight, "n h"),
            ]
        kept = [self.make(f"input of {norm}", kind, norm, "n h")]
        if self.toy:
            kept += [
                self.make(f"mean of {norm}", kind, norm, "n"),
                self.make(f"inverse deviation of {norm}", kind, norm, "n"),
            ]
        # Families with four norms a layer put two of them behind attention and MLP.
        if self.config.norms_per_layer == 4:
            kept.append(self.make(f"input of the norm behind {norm}", kind, f"norm behind {norm}", "n h"))
        return kept

    def attention(self) -> list[SavedTensor]:
        kind = "attention"
        repeated = self.toy and not self.fused  # plain attention gives every query head its own keys and values
        keys = "n a d" if repeated else "n k d"
        first, second = ("fused attention",) * 2 if self.fused else ("q kᵀ", "weights × v")
        kept = [self.make("output of norm 1", kind, "q projection, k projection, v projection", "n h")]
        if self.config.qk_norm:
            kept += [
                self.make("q before its norm", kind, "norm of q", "n a d"),
                self.make("k before its norm", kind, "norm of k", "n k d"),
            ]
        kept += [self.make("q", kind, first, "n a d"), self.make("k", kind, first, keys)]
        if not self.fused:
            if self.hf and self.config.family != "gpt2" and self.value < FP32:
                kept.append(self.make("softmax output", "scores", "softmax", "a b s²", FP32))
                if not self.dropout:
                    kept.append(self.make("weights", "scores", second, "a b s²"))
            else:
                readers = "softmax" if self.dropout else f"softmax, {second}"
                kept.append(self.make("softmax output", "scores", readers, "a b s²"))
            kept += self.mask("dropout mask of the weights", "scores", "the weights", "a b s²")
            if self.dropout:
                kept.append(self.make("weights after dropout", "scores", second, "a b s²"))
        kept.append(self.make("v", kind, second, keys))
        if self.fused:
            kept.append(self.make("softmax statistics", kind, second, "n a", FP32))
        readers = f"{second}, output projection" if self.fused else "output projection"
        kept.append(self.make("attention output", kind, readers, "n a d"))
        return kept + self.mask("dropout mask of attention", kind, "attention")

    def mlp(self) -> list[SavedTensor]:
        kind, product = "mlp", "SiLU(gate) × up"
        if not self.config.gated_mlp:
            written_out = [
                self.make("half of GELU's input", kind, "GELU", "n f"),
                self.make("tanh", kind, "tanh", "n f"),
                self.make("1 + tanh", kind, "GELU", "n f"),
            ]
            kept = [
                self.make("output of norm 2", kind, "up projection", "n h"),
                self.make("input of GELU", kind, "cube" if self.hf else "GELU", "n f"),
                *(written_out if self.hf else []),
                self.make("output of GELU", kind, "down projection", "n f"),
            ]
        else:
            one = not self.toy  # for the paper SwiGLU is one operator, which keeps gate and up
            kept = [
                self.make("output of norm 2", kind, "gate projection, up projection", "n h"),
                self.make("output of gate", kind, product if one else "SiLU", "n f"),
                *([] if one else [self.make("output of SiLU", kind, product, "n f")]),
                self.make("output of up", kind, product, "n f"),
                self.make("SiLU(gate) × up", kind, "down projection", "n f"),
            ]
        return kept + self.mask("dropout mask of the MLP", kind, "the MLP")


_WHY = (
    ("inverse root", "the paper leaves norm statistics out; the toy keeps one fp32 number a token"),
    ("mean", "the paper leaves norm statistics out; LayerNorm keeps a mean a token"),
    ("inverse deviation", "the paper leaves norm statistics out; LayerNorm keeps one number a token"),
    ("normed value", "RMSNorm written out: the product with its weight keeps what it multiplies"),
    ("input of norm", "RMSNorm written out computes in fp32 and keeps its fp32 input"),
    ("dropout mask", "a GPU keeps a mask of 1 byte a value; a CPU keeps it scaled, in the dtype of the input"),
    ("output of SiLU", "SiLU and product are two operators, and the product keeps both factors"),
    ("k", "plain attention gives every query head its own copy of its key head"),
    ("v", "plain attention gives every query head its own copy of its value head"),
)


def differences(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    bytes_per_value: int = 2,
    attention: str = "fused",
    dropout: float | None = None,
) -> list[Difference]:
    """Return each tensor that the paper's counting and eager PyTorch on a CPU do not agree on.

    The sum of `toy - paper` is the difference of the two `layer_activations`.

    Args:
        config: A model that the toy has: of the gpt2 or llama family.
        bytes_per_value: 2 or 4.
        attention: "plain" or "fused".
        dropout: Probability in both; None: 0.1 for gpt2, 0 for llama.

    Raises:
        ValueError: As `block_tensors`.
    """
    if dropout is None:
        dropout = 0.1 if config.family == "gpt2" else 0.0
    how = {"batch": batch, "seq": seq, "bytes_per_value": bytes_per_value, "attention": attention}
    paper, toy = (
        {t.name: t.bytes for t in block_tensors(config, implementation=implementation, dropout=dropout, **how)}
        for implementation in ("paper", "toy")
    )
    names = [*toy, *(name for name in paper if name not in toy)]
    found = [(name, paper.get(name, 0), toy.get(name, 0)) for name in names]
    return [Difference(name, p, t, _why(name)) for name, p, t in found if p != t]


def _why(name: str) -> str:
    for start, why in _WHY:
        if name == start or (len(start) > 1 and name.startswith(start)):
            return why
    raise ValueError(f"no reason is known why {name!r} differs")
