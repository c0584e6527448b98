"""One block of a transformer as a tape, in three implementations: the papers' kernels, our transformer, Hugging Face.

| `kernels` | norms | rotary | MLP | what it is |
|---|---|---|---|---|
| paper | one operator | in place | activation function and product are one operator | Korthikanti et al. 2022 |
| toy | RMSNorm in five operators, in fp32 | four products | two operators | `lablib.toys.transformer` |
| hf | the same | the same | the same; GPT-2's GELU in eight operators | Hugging Face's eager classes |

What a tape keeps is what `lablib.calc.activations` counts in closed form; the tests hold both to each other, and to
PyTorch. The tape knows more: what is alive at every operator, forward and backward.

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

from lablib.calc.tape import NONE, SHARED, Tape, Value
from lablib.calc.tape_eager import FP32, Eager
from lablib.calc.tape_setting import BlockSetting
from lablib.calc.tape_tensor import read_by_all, summed_up


def eager_block(setting: BlockSetting) -> Tape:
    """Return the tape of one block as eager PyTorch runs it; the papers' is `tape_paper.paper_block`."""
    return _EagerBlock(setting).tape


class _EagerBlock:
    """Writes one block as eager PyTorch runs it."""

    def __init__(self, s: BlockSetting) -> None:
        self.s, self.c = s, s.config
        self.e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
        self.tape = self.e.tape
        self.hf = s.kernels.holds_variables
        self.weights: Value | None = None
        self.tape.recomputing = s.recompute == "full"
        item = FP32 if s.low else s.value
        x = self.e.input("input of the block", s.stream * self.c.hidden, item, needs_grad=s.input_needs_grad)
        self.tape.hold(x)
        added = self.attention(self.norm(x, 1))
        if self.hf and self.c.family == "gpt2":
            self.tape.hold(added)  # a variable of its block's forward; Llama's is given another value
        x = self.add(x, added, "attention")
        y = self.mlp(self.norm(x, 2))
        if self.hf and self.weights:
            self.tape.use(self.weights)  # a variable of the layer's forward
        self.add(x, y, "the MLP")
        if s.recompute == "full":
            self.tape.kinds[self.tape.inputs[0]] = "input"

    def norm(self, x: Value, number: int) -> Value:
        how = {"kind": "norms", "name": f"norm {number}"}
        if self.c.norm == "layernorm":
            return self.e.layernorm(x, self.c.hidden, **how)
        return self.e.rmsnorm(x, self.c.hidden, **how)

    def add(self, x: Value, y: Value, of: str) -> Value:
        if self.s.dropout:
            y = self.e.dropout(y, kind="attention" if of == "attention" else "mlp", name=f"dropout of {of}")
        return self.e.add(x, y, f"add {of}", label=f"stream behind {of}")

    def linear(
        self, x: Value, inputs: int, outputs: int, kind: str, name: str, bias: bool, label: str = ""
    ) -> Value:
        s, e = self.s, self.e
        how = {"kind": kind, "name": name, "bias": bias, "label": label}
        if not s.lora_rank or (s.lora_targets == "attention" and kind != "attention"):
            return e.linear(x, inputs, outputs, **how)
        # As lablib.launch.lora has it: A first, so that its backward runs last, when x has its other gradient already.
        # Both matrices are cast to the dtype of x there, which leaves nothing for autocast to cache where that is 16 bits.
        own = {"kind": "adapters", "trained": True, "leaf": e.item[x] == s.value}
        down = e.linear(x, inputs, s.lora_rank, name=f"A of {name}", **own)
        y = e.linear(x, inputs, outputs, **how)
        up = e.linear(down, s.lora_rank, outputs, name=f"B of {name}", **own)
        return e.add(y, e.scale(up), label=label)

    def column(self, x: Value, outputs: int, kind: str, name: str, bias: bool, label: str = "") -> Value:
        x = read_by_all(self.e, self.s, x)
        return self.linear(x, self.c.hidden, outputs, kind, name, bias, label)

    def row(self, x: Value, inputs: int, kind: str, name: str, bias: bool) -> Value:
        y = self.linear(x, inputs, self.c.hidden, kind, name, bias)
        return summed_up(self.e, self.s, y, name)

    # Attention.

    def attention(self, x: Value) -> Value:
        c, e, t = self.c, self.e, self.s.tp
        q_width, kv_width = c.q_width // t, c.kv_width // t
        if self.hf and c.family == "gpt2":
            together = self.column(x, q_width + 2 * kv_width, "attention", "q, k, v", c.qkv_bias)
            n = self.s.tokens
            q, k, v = e.split(together, [n * q_width, n * kv_width, n * kv_width])
        else:
            q, k, v = (
                self.column(x, width, "attention", f"{name} projection", c.qkv_bias, label=name)
                for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
            )
        if not c.learned_positions:
            item = FP32 if self.s.low else self.s.value
            tables = [
                e.input(name, self.s.seq * c.head_dim, item, needs_grad=False, given=True)
                for name in ("cosines", "sines")
            ]
            q, k = e.rotate(q, *tables), e.rotate(k, *tables)
        before, self.tape.recomputing = self.tape.recomputing, self.s.recompute in ("selective", "full")
        mixed = self.fused(q, k, v) if self.s.fused else self.plain(q, k, v)
        self.tape.recomputing = before
        y = self.row(mixed, q_width, "attention", "output projection", c.attn_out_bias)
        for variable in (x, q, k, v):
            self.tape.use(variable)
        return y

    def fused(self, q: Value, k: Value, v: Value) -> Value:
        rows = self.s.tokens * self.c.num_heads // self.s.tp
        return self.e.fused_attention(q, k, v, rows, self.e.numbers(q), kind="attention")

    def plain(self, q: Value, k: Value, v: Value) -> Value:
        c, e, s = self.c, self.e, self.s
        wide = e.numbers(q)
        groups = c.num_heads // c.num_kv_heads
        pairs = s.batch * (c.num_heads // s.tp) * s.seq * s.seq // s.cp
        if groups > 1:
            k, v = e.copy(k, wide, "k"), e.copy(v, wide, "v")
        variables = [k, v]  # which a frame of Python holds to its end
        if s.low:  # by the matmul, so that keys are repeated before, in fp32 if rotation left them so
            q, k, v = (e.cast(x, s.low) for x in (q, k, v))
        # A batched product wants sequences and heads in one dim; a view cannot do that to both.
        many = s.batch > 1 and s.seq > 1 and c.num_heads // s.tp > 1
        if many:
            q = e.copy(q, label="q")
            k = k if groups > 1 else e.copy(k, label="k")
        scaled = e.scale(e.matmul(q, k, pairs, kind="attention", name="q kᵀ"))
        if self.hf:  # its mask is one for all blocks, and counted there
            scores = e.shift(scaled, "mask", label="masked scores")
        else:
            mask = e.make("mask", [], s.seq * s.seq // s.cp, e.item[q])
            scores = e.make(
                "add the mask",
                [scaled, mask],
                pairs,
                e.item[q],
                gradient=[SHARED, NONE],
                label="masked scores",
            )
            variables += [scaled, mask]
        # Llama asks for softmax in fp32; GPT-2 gets it under autocast, where its mask is fp32.
        if self.hf and (s.low or c.family != "gpt2"):
            full = e.cast(scores, FP32)
            weights = e.function("softmax", full, kind="scores", keeps_output=True, label="softmax output")
            e.tape.use(scores)
            weights = e.cast(weights, e.item[q], "weights")
        else:
            weights = e.function("softmax", scores, kind="scores", keeps_output=True, label="softmax output")
        if s.dropout:
            weights = e.dropout(weights, kind="scores", name="dropout of the weights")
        if many and groups == 1:
            v = e.copy(v, label="v")
        self.weights = weights
        self.tape.kinds.setdefault(weights.storage, "scores")
        mixed = e.matmul(weights, v, wide, kind="attention", name="weights × v")
        for variable in variables:
            e.tape.use(variable)
        return e.copy(mixed, label="attention output")

    # MLP.

    def mlp(self, x: Value) -> Value:
        c, e = self.c, self.e
        f = c.ffn // self.s.tp
        if c.gated_mlp:
            gate = self.column(x, f, "mlp", "gate projection", c.mlp_bias, label="output of gate")
            inner = e.function("SiLU", gate, kind="mlp", label="output of SiLU")
            up = self.column(x, f, "mlp", "up projection", c.mlp_bias, label="output of up")
            inner = e.times(inner, up, kind="mlp", name="SiLU(gate) × up", label="SiLU(gate) × up")
        else:
            up = self.column(x, f, "mlp", "up projection", c.mlp_bias, label="input of GELU")
            inner = (
                self.new_gelu(up) if self.hf else e.function("GELU", up, kind="mlp", label="output of GELU")
            )
        y = self.row(inner, f, "mlp", "down projection", c.mlp_bias)
        self.tape.use(x)
        return y

    def new_gelu(self, x: Value) -> Value:
        """GPT-2's GELU, `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, one operator for each sign."""
        e = self.e
        half = e.scale(x, "half", label="half of GELU's input")
        cube = e.function("cube", x, kind="mlp")
        angle = e.scale(e.add(x, e.scale(cube, "small part of the cube")), "angle")
        tanh = e.function("tanh", angle, kind="mlp", keeps_output=True, label="tanh")
        more = e.shift(tanh, "1 + tanh", label="1 + tanh")
        output = e.times(half, more, kind="mlp", name="GELU", label="output of GELU")
        e.tape.use(x)
        return output
