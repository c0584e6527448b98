"""Every tensor that one block keeps for backward, by name: what a block's tape keeps.

    for tensor in block_tensors(config, batch=1, seq=2048, attention="plain"):
        print(tensor.name, tensor.count, tensor.bytes)

`differences` sets the papers' counting and that of `lablib.toys.transformer` side by side: each tensor that one has and
the other has not, or has in another size.

Letters: b sequences of s tokens, n = b s, h hidden, a query heads and k key heads of width d, f inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.memory.implementation import current_names
from lablib.calc.memory.tape import BlockSetting, Value, write_tape
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
        """Its bytes."""
        return self.values * self.size


@dataclass(frozen=True)
class Difference:
    """One tensor that the paper and eager PyTorch count differently.

    Attributes:
        paper: Its bytes in the paper's counting; 0 where the paper has none.
        toy: Its bytes in the toy; 0 where the toy has none.
        why: The cause, in one sentence.
    """

    name: str
    paper: int
    toy: int
    why: str


def block_tensors(config: ModelConfig, *, attention: str = "fused", **sizes: object) -> list[SavedTensor]:
    """Return the tensors that one block keeps, read off its tape in the order in which operators keep them.

    They sum to `layer_activations`.

    Args:
        config: The model, without experts and latent attention.
        attention: "plain" or "fused".
        **sizes: batch, seq, implementation, bytes_per_value and dropout, as in `layer_activations`.

    Raises:
        ValueError: As `layer_activations`, and if the model has experts or latent attention: their tensors depend on
            the implementation, and only their sums are counted.
    """
    setting = BlockSetting(config=config, attention=attention, **current_names(sizes))
    if config.is_moe or config.is_mla:
        what = "experts" if config.is_moe else "latent attention"
        raise ValueError(f"{config.name} has {what}: its tensors are summed by layer_activations, not listed")
    tape = write_tape("block", setting)
    keepers: dict[Value, list[str]] = {}
    for operator in tape.operators:
        for value in operator.keeps:
            if value.storage not in tape.given:
                keepers.setdefault(value.storage, []).append(operator.name)
    n, c = setting.tokens, config
    values = {"n": n, "n h": n * c.hidden, "n a d": n * c.q_width, "n k d": n * c.kv_width, "n a": n * c.num_heads}
    values |= {
        "n f": n * c.ffn,
        "a b s²": n * c.num_heads * setting.seq,
        "n (a + 2k) d": n * (c.q_width + 2 * c.kv_width),
    }
    repeated = setting.implementation.eager and attention == "plain"  # every query head gets its own keys and values
    found: list[SavedTensor] = []
    for storage, operators in keepers.items():
        readers = tuple(dict.fromkeys(_OPERATORS.get(name, name).removeprefix("the ") for name in operators))
        names = _names(storage.name, operators[0])
        for name in names:
            if name == "output of rotated":
                name = "k" if any(tensor.name == "q" for tensor in found) else "q"
            count = "n a d" if repeated and name in ("k", "v") else _count(name)
            size = storage.bytes // values[count] // len(names)
            found.append(SavedTensor(name, tape.kinds[storage], readers, count, values[count], size))
    return found


#: What the tape calls otherwise.
_OPERATORS = {"SwiGLU": "SiLU(gate) × up", "dropout of mlp": "dropout of the MLP"}
_TENSORS = {
    "mask of dropout of the weights": "weights after dropout",
    "output of dropout of the weights": "weights after dropout",
    "output of weights × v": "attention output",
    "statistics of fused attention": "softmax statistics",
    "statistics of dropout of mlp": "dropout mask of the MLP",
    "gate": "output of gate",
}
#: Values of a tensor by the start of its name; all others have n f.
_COUNTS = {
    "n": ("mean", "inverse"),
    "n a": ("softmax statistics",),
    "a b s²": ("softmax output", "weights", "dropout mask of the weights"),
    "n h": (
        "input of norm",
        "input of the norm",
        "input of the block",
        "stream",
        "normed value",
        "output of norm",
        "dropout mask",
    ),
    "n a d": ("q", "attention output"),
    "n k d": ("k", "v"),
    "n (a + 2k) d": ("output of q, k, v",),
}


def _names(name: str, keeper: str) -> list[str]:
    """Return the names of a storage that is kept first for an operator; LayerNorm's statistics are two."""
    norm = keeper.removeprefix("square in ")
    if name in _TENSORS:
        return [_TENSORS[name]]
    if name.startswith("statistics of norm"):
        return [f"mean of {norm}", f"inverse deviation of {norm}"]
    if name.startswith("statistics of dropout"):
        return [name.replace("statistics of dropout", "dropout mask")]
    if keeper.startswith("norm of "):
        return [f"{name} before its norm"]
    if norm.startswith(("norm ", "the norm ")):
        return [f"input of {norm}"]
    return [("input of GELU" if keeper == "GELU" else "output of up") if name == "up" else name]


def _count(name: str) -> str:
    return next((count for count, starts in _COUNTS.items() if name.startswith(starts)), "n f")


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
