"""One block of torchtitan's Llama 3, and its end, as tapes.

| what | ours | torchtitan 0.3 |
|---|---|---|
| RMSNorm | five operators, in fp32 | one, which keeps its input and an fp32 number a token |
| q, k, v | three matrices | one, and three copies out of its output |
| rotary positions | four products in the dtype of the stream | one product of complex numbers, in fp32 |

The rest is the same: fused attention, SiLU and product as two operators, logits cast to fp32 for the loss.
Source: torchtitan/models/llama3 and models/common, version 0.3.0; torch.nn.RMSNorm on a GPU.
"""

from __future__ import annotations

from lablib.calc.memory.tape.blocks import _EagerBlock
from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.setting import FP32, BlockSetting
from lablib.calc.memory.tape.tape import Tape, Value


def fused_rmsnorm(e: Eager, x: Value, width: int, *, kind: str, name: str) -> Value:
    """Return RMSNorm in one operator: keeps its input, and an inverse root in fp32 for each token."""
    return e.make(
        name,
        [x],
        e.numbers(x),
        e.item[x],
        keeps=[x],
        extra=e.numbers(x) // width * FP32,
        weight_gradient=width * e.gradient,
        kind=kind,
        label=f"output of {name}",
    )


def torchtitan_block(setting: BlockSetting) -> Tape:
    """Return the tape of one block."""
    return _TorchtitanBlock(setting).tape


class _TorchtitanBlock(_EagerBlock):
    def norm(self, x: Value, number: int) -> Value:
        return fused_rmsnorm(self.e, x, self.c.hidden, kind="norms", name=f"norm {number}")

    def attention(self, x: Value) -> Value:
        c, e, n = self.c, self.e, self.s.tokens
        widths = {"q": c.q_width, "k": c.kv_width, "v": c.kv_width}
        together = self.column(x, sum(widths.values()), "attention", "q, k and v projection", c.qkv_bias)
        parts = e.split(together, [n * width for width in widths.values()])
        q, k, v = (e.copy(part, label=name) for part, name in zip(parts, widths, strict=True))
        table = e.input("rotary table", self.s.seq * c.head_dim, FP32, needs_grad=False, given=True)
        q, k = self.rotate(q, table), self.rotate(k, table)
        y = self.row(self.fused(q, k, v), c.q_width, "attention", "output projection", c.attn_out_bias)
        for variable in (x, q, k, v):
            self.tape.use(variable)
        return y

    def rotate(self, x: Value, table: Value) -> Value:
        """Turn pairs as complex numbers of fp32; the table is kept, and x is not."""
        full = self.e.cast(x, FP32)
        turned = self.e.times(full, table, kind="", name="rotation")
        return self.e.cast(turned, self.e.item[x], f"rotated {x.name}")


def torchtitan_head(s: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss, with the logits in one piece (`CrossEntropyLoss`)."""
    c = s.config
    e = Eager(value=s.value, gradient=s.gradient)
    x = e.input("stream behind the last block", s.stream * c.hidden)
    x = fused_rmsnorm(e, x, c.hidden, kind="norms", name="final norm")
    logits = e.linear(x, c.hidden, c.vocab, kind="head", name="head", label="logits")
    e.tape.hold(logits)
    full = e.cast(logits, FP32, "logits in fp32")
    scores = e.function("log-softmax", full, kind="logits", keeps_output=True, label="log-probabilities")
    # It keeps the targets, too, which are there anyway.
    e.make("negative log-likelihood", [scores], 1, FP32, extra=FP32, kind="loss")
    return e.tape
