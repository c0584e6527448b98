"""One block of a transformer as a tape, in eager PyTorch: our transformer, and Hugging Face's classes.

| | norms | rotary | MLP | what it is |
|---|---|---|---|---|
| toy | RMSNorm in five operators, in fp32 | four products | two operators | `lablib.toys.transformer` |
| hf | the same | the same | the same; GPT-2's GELU in eight operators | Hugging Face's eager classes |
| torchtitan | one operator, which keeps its input and an fp32 number a token | one product of complex numbers, in fp32 | the same | torchtitan 0.3's Llama 3, with q, k and v in one matrix and three copies out of its output |

What else Hugging Face's classes do otherwise, as `transformers` 5 writes them:

| what | our transformer | Hugging Face |
|---|---|---|
| softmax of Llama's plain attention | in the model's dtype | in fp32, and a copy in the model's dtype |
| a sliding window, fused attention | none | a mask of numbers a layer, `b s²`, once s is as long; k and v for every query head |
| RMSNorm of Gemma and OLMo 2 | | the normed value in fp32; Gemma: 1 + weight too |
| q, k, v in one matrix (Phi-3, Pythia) | three matrices | v is a view of all three; q, k and the output are copies |
| Pythia's block | one half after the other | both norms read the same stream |

This is training mode with `use_cache=False`, no padding, `attn_implementation` "sdpa" or "eager", and dropout 0 unless
asked for. The tests hold what tapes keep and what is alive at every operator to PyTorch.

Tensor parallelism is PyTorch's, `parallelize_module` with Hugging Face's plan:

    q, k, v, gate, up    column-wise: every rank reads the full stream and makes its part of the outputs
    output, down         row-wise: every rank makes a part of every output's sum, and an all-reduce adds them up
    head                 column-wise, and its logits are gathered: the loss sees the full vocabulary
    embedding, norms     the same on every rank

A collective of DTensor is a function: it reads one tensor and makes another, so both are there while it runs.
Forward, of n tokens: the sums of this rank, `n h`, and those of all. Backward: each column-wise matrix has a gradient
of the stream of its own, and sums it up over the ranks before it meets the others.
"""

from __future__ import annotations

from lablib.calc.memory.tape.context import context_attention, own_ring
from lablib.calc.memory.tape.experts import routed_experts
from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.setting import FP32, BlockSetting
from lablib.calc.memory.tape.tape import NEW, NONE, SHARED, Tape, Value


def read_by_all(e: Eager, s: BlockSetting, x: Value) -> Value:
    """Return x as a column-wise matrix reads it: in backward its gradients are summed up over the ranks."""
    if s.tp == 1:
        return x
    return e.make("all-reduce of the gradient", [x], e.numbers(x), e.item[x], view=True, gradient=NEW)


def summed_up(e: Eager, s: BlockSetting, y: Value, name: str) -> Value:
    """Return the sum over ranks of what a row-wise matrix made."""
    if s.tp == 1:
        return y
    return e.make(f"all-reduce of the {name}", [y], e.numbers(y), e.item[y], gradient=SHARED)


def gathered_logits(e: Eager, s: BlockSetting, logits: Value, words: int) -> Value:
    """Return the logits of the full vocabulary: gathered rank by rank, then put in the order of the words."""
    padded = s.tokens * words * s.tp
    return e.make(
        "all-gather of the logits",
        [logits],
        s.tokens * s.config.vocab,
        e.item[logits],
        temporary=padded * e.item[logits],
        label="logits",
    )


def rmsnorm(e: Eager, s: BlockSetting, x: Value, width: int, *, kind: str, name: str) -> Value:
    """Return RMSNorm of x as the setting's implementation has it."""
    implementation = s.implementation
    wide, shifted = s.config.family in implementation.wide_norms, s.config.family in implementation.shifted_norms
    return e.rmsnorm(x, width, kind=kind, name=name, wide=wide, shifted=shifted)


def eager_block(setting: BlockSetting) -> Tape:
    """Return the tape of one block as eager PyTorch runs it."""
    block = _TorchtitanBlock if setting.implementation.fused_norms else _EagerBlock
    return block(setting).tape


class _EagerBlock:
    """Writes one block as eager PyTorch runs it."""

    def __init__(self, s: BlockSetting) -> None:
        self.s, self.c = s, s.config
        self.e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
        self.tape = self.e.tape
        self.hf = s.implementation.holds_variables
        self.weights: Value | None = None
        self.tape.recomputing = s.recompute == "full"
        item = FP32 if s.low else s.value
        x = self.e.input("input of the block", s.stream * self.c.hidden, item, needs_grad=s.input_needs_grad)
        self.tape.hold(x)
        behind = self.c.post_norm
        added = self.attention(x if behind else self.norm(x, 1))
        if behind:
            added = self.norm(added, 1)
        if self.hf and self.c.family in ("gpt2", "gpt-neox"):
            self.tape.hold(added)  # a variable of its block's forward; Llama's is given another value
        if self.c.parallel_block:
            y = self.mlp(self.norm(x, 2))
            self.tape.hold(y)
            y = self.add(y, added, "attention")
        else:
            x = self.add(x, added, "attention")
            y = self.mlp(x if behind else self.norm(x, 2))
        if behind:
            y = self.norm(y, 2)
        if self.hf and self.weights:
            self.tape.use(self.weights)  # a variable of the layer's forward
        self.add(x, y, "the MLP")
        if s.recompute == "full":
            self.tape.kinds[self.tape.inputs[0]] = "input"

    def norm(self, x: Value, number: int) -> Value:
        how = {"kind": "norms", "name": f"norm {number}"}
        if self.c.norm == "layernorm":
            return self.e.layernorm(x, self.c.hidden, **how)
        return rmsnorm(self.e, self.s, x, self.c.hidden, **how)

    def add(self, x: Value, y: Value, of: str) -> Value:
        if self.s.dropout:
            y = self.e.dropout(y, kind="attention" if of == "attention" else "mlp", name=f"dropout of {of}")
        return self.e.add(x, y, f"add {of}", label=f"stream behind {of}")

    def linear(self, x: Value, inputs: int, outputs: int, kind: str, name: str, bias: bool, label: str = "") -> Value:
        s, e = self.s, self.e
        how = {"kind": kind, "name": name, "bias": bias, "label": label}
        if not s.lora_rank or (s.lora_targets == "attention" and kind != "attention"):
            return e.linear(x, inputs, outputs, **how)
        # As lablib.launch.training.lora has it: A first, so that its backward runs last, when x has its other gradient already.
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
        c, e, t, implementation = self.c, self.e, self.s.tp, self.s.implementation
        q_width, kv_width = c.q_width // t, c.kv_width // t
        if c.family in implementation.joined_qkv:
            together = self.column(x, q_width + 2 * kv_width, "attention", "q, k, v", c.qkv_bias)
            sizes = [self.s.tokens * width for width in (q_width, kv_width, kv_width)]
            q, k, v = [e.slice(together, n) for n in sizes] if c.family == "phi3" else e.split(together, sizes)
        else:
            q, k, v = (
                self.column(x, width, "attention", f"{name} projection", c.qkv_bias, label=name)
                for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
            )
        if c.qk_norm:
            widths = [c.head_dim] * 2 if c.qk_norm_shared else [q_width, kv_width]
            q, k = (
                rmsnorm(e, self.s, y, width, kind="attention", name=f"norm of {name}")
                for name, y, width in zip("qk", (q, k), widths, strict=True)
            )
        if not c.learned_positions:
            item = FP32 if self.s.low or c.family in implementation.wide_tables else self.s.value
            tables = [
                e.input(name, self.s.seq // self.s.cp * c.turned_dim, item, needs_grad=False, given=True)
                for name in ("cosines", "sines")
            ]
            q, k = self.rotated(q, tables), self.rotated(k, tables)
        before, self.tape.recomputing = self.tape.recomputing, self.s.recompute in ("selective", "full")
        for part in (q, k, v):  # what a replay of the core starts from
            self.tape.kinds.setdefault(part.storage, "attention")
        mixed = self.fused(q, k, v) if self.s.fused else self.plain(q, k, v)
        self.tape.recomputing = before
        y = self.row(mixed, q_width, "attention", "output projection", c.attn_out_bias)
        for variable in (x, q, k, v):
            self.tape.use(variable)
        return y

    def rotated(self, x: Value, tables: list[Value]) -> Value:
        """Return queries or keys turned, as a whole or in part."""
        c, e, implementation = self.c, self.e, self.s.implementation
        if c.family not in implementation.joined_heads:
            turned = e.rotate(x, *tables)
            return e.cast(turned, e.item[x]) if c.family in implementation.wide_tables else turned
        part = e.numbers(x) * c.turned_dim // c.head_dim
        turned, rest = e.slice(x, part), e.slice(x, e.numbers(x) - part)
        turned = e.rotate(turned, *tables)
        return e.make("join", [turned, rest], e.numbers(x), e.item[turned], gradient=SHARED, label="output of rotated")

    def fused(self, q: Value, k: Value, v: Value) -> Value:
        c, e, s = self.c, self.e, self.s
        rows, wide = s.tokens * c.num_heads // s.tp, e.numbers(q)
        if s.cp > 1:
            if not self.hf:
                return own_ring(e, q, k, v, s.batch * c.num_heads, s.seq // s.cp, cp=s.cp)
            return context_attention(e, q, k, v, rows, cp=s.cp, way=s.cp_way)
        masks: list[Value] = []
        if s.implementation.masks_window(c, s.seq):
            # With a mask the kernel takes a key and a value for every query head, and makes a mask of numbers of the bools.
            if c.num_kv_heads < c.num_heads:
                k, v = e.copy(k, wide, "k"), e.copy(v, wide, "v")
            pairs = s.tokens * s.seq
            masks.append(e.make("mask", [], pairs, s.low or e.item[q], temporary=pairs, label="mask of the window"))
        mixed = e.fused_attention(q, k, v, rows, wide, kind="attention", masks=masks)
        # The kernel's output lies as its queries do: behind each other by head where they were put together.
        return e.copy(mixed, label="attention output") if c.family in s.implementation.joined_heads else mixed

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
        if many and c.family not in s.implementation.joined_heads:  # what is put together lies so already
            q = e.copy(q, label="q")
            k = k if groups > 1 else e.copy(k, label="k")
        scaled = e.scale(e.matmul(q, k, pairs, kind="attention", name="q kᵀ"))
        if self.hf:  # its mask is one for all blocks, and counted there
            scores = e.shift(scaled, "mask", label="masked scores")
        else:
            mask = e.make("mask", [], s.seq * s.seq // s.cp, e.item[q])
            scores = e.make(
                "add the mask", [scaled, mask], pairs, e.item[q], gradient=[SHARED, NONE], label="masked scores"
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
        if c.has_experts(self.s.layer):
            y = routed_experts(e, self.s, x)
            self.tape.use(x)
            return y
        f = c.ffn // self.s.tp
        if c.family in self.s.implementation.joined_gate:
            together = self.column(x, 2 * f, "mlp", "gate and up projection", c.mlp_bias, label="output of gate and up")
            gate, up = e.split(together, [self.s.tokens * f] * 2)
            inner = e.function("SiLU", gate, kind="mlp", label="output of SiLU")
            inner = e.times(up, inner, kind="mlp", name="SiLU(gate) × up", label="SiLU(gate) × up")
        elif c.gated_mlp:
            gate = self.column(x, f, "mlp", "gate projection", c.mlp_bias, label="output of gate")
            inner = e.function("SiLU", gate, kind="mlp", label="output of SiLU")
            up = self.column(x, f, "mlp", "up projection", c.mlp_bias, label="output of up")
            inner = e.times(inner, up, kind="mlp", name="SiLU(gate) × up", label="SiLU(gate) × up")
        else:
            up = self.column(x, f, "mlp", "up projection", c.mlp_bias, label="input of GELU")
            written_out = self.hf and c.family == "gpt2"
            inner = self.new_gelu(up) if written_out else e.function("GELU", up, kind="mlp", label="output of GELU")
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


class _TorchtitanBlock(_EagerBlock):
    """One block of torchtitan 0.3's Llama 3: torchtitan/models/llama3 and models/common; torch.nn.RMSNorm on a GPU."""

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
