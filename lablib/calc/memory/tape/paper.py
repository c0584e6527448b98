"""One block as the papers count it: norms, activation functions and dropout are one operator each.

What it keeps is Korthikanti et al. 2022 (arXiv 2205.05198), section 4, as `lablib.calc.memory.activations.paper` sums it up.
What lives for less than that follows from the same operators: each makes its output, and in backward a gradient for each
input. No GPU has confirmed it yet.

Tensor parallelism: a column-parallel matrix reads the full stream, a row-parallel one leaves a sum that every rank
adds to. With sequence parallelism the stream is gathered before, and again in backward, and reduce-scattered behind.
"""

from __future__ import annotations

from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.setting import FP32, MASK, BlockSetting
from lablib.calc.memory.tape.tape import NEW, NONE, Tape, Value


def paper_norm(e: Eager, s: BlockSetting, x: Value, name: str) -> Value:
    """Return a norm in one operator, which keeps its input."""
    scales = 2 if s.config.norm == "layernorm" else 1
    return e.make(
        name,
        [x],
        e.numbers(x),
        e.item[x],
        keeps=[x],
        kind="norms",
        weight_gradient=0 if e.frozen else scales * s.config.hidden * e.gradient,
        label=f"output of {name}",
    )


def matrix(
    e: Eager, x: Value, tokens: int, width: int, out: int, *, name: str, kind: str, bias: bool = False, **how: object
) -> Value:
    """Return a matrix of so many tokens: trained, it keeps its input."""
    trained = 0 if e.frozen else e.gradient
    fused = e.fused_gradients and not e.frozen
    weights = (width * out * (not fused) + (out if bias else 0)) * trained
    reads = {"inputs": [x], "item": e.value, "keeps": [] if e.frozen else [x], "weight_gradient": weights} | how
    return e.make(name, numbers=tokens * out, kind=kind, **reads)


def gathered_linear(
    e: Eager, s: BlockSetting, x: Value, layers: dict[str, tuple[str, int]], kind: str, bias: bool
) -> list[Value]:
    """Return column-parallel layers of one input; with sequence parallelism they gather it, and keep the shard.

    Args:
        layers: Label and width of each output, by the layer's name.
    """
    hidden, how = s.config.hidden, {}
    if s.sequence_parallel and s.tp > 1:
        gathered = e.make("all-gather", [x], s.tokens * hidden, s.value, label="gathered stream")
        again = 0 if e.frozen else s.tokens * hidden * s.value
        how = {"inputs": [gathered, x], "gradient": [NEW, NONE], "backward_temporary": again}
    return [
        matrix(e, x, s.tokens, hidden, width, name=name, kind=kind, bias=bias, label=label, **how)
        for name, (label, width) in layers.items()
    ]


def row_linear(e: Eager, s: BlockSetting, x: Value, inputs: int, kind: str, name: str, bias: bool) -> Value:
    """Return a row-parallel layer: every rank gets the full sum, or with sequence parallelism a shard of it."""
    tokens, hidden = e.numbers(x) // inputs, s.config.hidden
    y = matrix(e, x, tokens, inputs, hidden, name=name, kind=kind, bias=bias)
    if s.sequence_parallel and s.tp > 1:
        y = e.make("reduce-scatter", [y], tokens * hidden // s.tp, e.item[x])
    return y


def paper_block(setting: BlockSetting) -> Tape:
    """Return the tape of one block."""
    return _PaperBlock(setting).e.tape


class _PaperBlock:
    def __init__(self, s: BlockSetting) -> None:
        self.s, self.c = s, s.config
        fused = s.implementation.accumulates_in_kernel
        self.joins = fused and not s.lora_rank
        self.e = e = Eager(value=s.value, gradient=s.gradient, frozen=s.lora_rank > 0, fused_gradients=fused)
        e.tape.recomputing = s.recompute == "full"
        x = e.input("input of the block", s.stream * self.c.hidden, needs_grad=s.input_needs_grad)
        e.tape.hold(x)
        before = not self.c.post_norm
        normed = paper_norm(e, s, x, "norm 1") if before else x
        y = self.attention(normed)
        behind = self.add(x, y, "attention", "the norm behind norm 1")
        if not self.c.parallel_block:
            x = behind
        if before and self.c.norms_per_layer > 1:
            normed = paper_norm(e, s, x, "norm 2")
        elif not before:
            normed = x
        mlp = self.experts if self.c.has_experts(s.layer) else self.mlp
        self.add(behind, mlp(normed), "mlp", "the norm behind norm 2")
        if s.recompute == "full":
            e.tape.kinds[e.tape.inputs[0]] = "input"

    def add(self, x: Value, y: Value, kind: str, norm: str) -> Value:
        if self.c.ends_with_norm:
            y = paper_norm(self.e, self.s, y, norm)
        if self.s.dropout:
            y = self.e.make(
                f"dropout of {kind}", [y], self.e.numbers(y), self.s.value, kind=kind, extra=self.e.numbers(y)
            )
        return self.e.add(x, y, f"add {kind}", label=f"stream behind {kind}")

    def columns(self, x: Value, layers: list[tuple[str, int]], kind: str, bias: bool) -> list[Value]:
        """Column-parallel layers of one input, which Megatron-LM joins; each may have an adapter."""
        if self.joins and len(layers) > 1:
            name, widths = " and ".join(name for name, _ in layers), [width for _, width in layers]
            whole = {f"{name} projection": (f"{name} together", sum(widths))}
            (together,) = gathered_linear(self.e, self.s, x, whole, kind, bias)
            return self.e.split(together, [self.s.tokens * width for width in widths])
        outputs = {f"{name} projection": (name, width) for name, width in layers}
        made = gathered_linear(self.e, self.s, x, outputs, kind, bias)
        return [
            self.adapted(y, x, self.c.hidden, width, kind, name) for y, (name, width) in zip(made, layers, strict=True)
        ]

    def adapted(self, y: Value, x: Value, inputs: int, outputs: int, kind: str, name: str, copies: int = 1) -> Value:
        s, e = self.s, self.e
        if not s.lora_rank or (s.lora_targets != "all" and kind != "attention"):
            return y
        own = {"trained": True, "copies": copies}
        down = e.linear(x, inputs, s.lora_rank, kind=kind, name=f"A of {name}", **own)
        up = e.linear(down, s.lora_rank, outputs, kind="adapters", name=f"B of {name}", **own)
        return e.add(y, e.scale(up))

    def attention(self, x: Value) -> Value:
        c, e, s = self.c, self.e, self.s
        q_width, kv_width = c.q_width // s.tp, c.kv_width // s.tp
        if c.is_mla:
            q, k, v = self.latent(x)
        else:
            layers = [("q", q_width), ("k", kv_width), ("v", kv_width)]
            q, k, v = self.columns(x, layers, "attention", c.qkv_bias)
            if c.qk_norm:
                q, k = (
                    e.function(f"norm of {name}", y, kind="attention", label=name) for name, y in (("q", q), ("k", k))
                )
        before, e.tape.recomputing = e.tape.recomputing, s.recompute in ("selective", "full")
        wide, rows = s.tokens * c.attn_width // s.tp, s.tokens * c.num_heads // s.tp
        if s.fused:
            mixed = e.fused_attention(q, k, v, rows, wide, kind="attention")
        else:
            pairs = rows * s.seq
            scores = e.matmul(q, k, pairs, kind="attention", name="q kᵀ")
            weights = e.function("softmax", scores, kind="scores", keeps_output=True, label="softmax output")
            if s.dropout:
                weights = e.make("dropout of the weights", [weights], pairs, s.value, kind="scores", extra=pairs * MASK)
            mixed = e.make("weights × v", [weights, v], wide, s.value, keeps=[weights, v], kind="attention")
            e.tape.kinds[weights.storage] = "scores"
        e.tape.recomputing = before
        y = row_linear(e, s, mixed, c.attn_width // s.tp, "attention", "output projection", c.attn_out_bias)
        return self.adapted(y, mixed, c.attn_width // s.tp, c.hidden, "attention", "output")

    def latent(self, x: Value) -> list[Value]:
        """DeepSeek's projections into latents, which every rank computes, and out of them by heads."""
        c, e, s = self.c, self.e, self.s

        def latent_matrix(y: Value, inputs: int, outputs: int, name: str, tokens: int) -> Value:
            return matrix(e, y, tokens, inputs, outputs, name=name, kind="attention", label=f"output of {name}")

        rank, rope = c.kv_lora_rank, c.qk_rope_head_dim
        queries = x
        if c.q_lora_rank:
            queries = latent_matrix(x, c.hidden, c.q_lora_rank, "q into its latent", s.stream)
            queries = e.function("norm of q's latent", queries, kind="attention")
        latent = latent_matrix(x, c.hidden, rank, "k and v into their latent", s.stream)
        key = latent_matrix(x, c.hidden, rope, "rotary key", s.stream)
        normed = e.function("norm of the latent", latent, kind="attention")
        heads = c.num_heads // s.tp
        q = latent_matrix(queries, c.q_lora_rank or c.hidden, heads * c.head_dim, "q out of its latent", s.tokens)
        k = latent_matrix(normed, rank, heads * c.qk_nope_head_dim, "k out of the latent", s.tokens)
        v = latent_matrix(normed, rank, heads * c.value_dim, "v out of the latent", s.tokens)
        # The rotary part is the same for all heads; attention reads keys of full width.
        k = e.make("join k", [k, key], s.tokens * heads * c.head_dim, s.value, keeps=[key], kind="attention", label="k")
        return [q, k, v]

    def inner(self, x: Value, made: list[Value], kind: str) -> Value:
        e = self.e
        if self.c.gated_mlp:
            numbers = sum(map(e.numbers, made)) // 2
            return e.make("SwiGLU", made, numbers, e.item[x], keeps=made, kind=kind, label="SiLU(gate) × up")
        return e.function("GELU", made[0], kind=kind, label="output of GELU")

    def mlp(self, x: Value, ffn: int = 0) -> Value:
        c, e, s = self.c, self.e, self.s
        f = (ffn or c.ffn) // s.tp
        layers = [("gate", f), ("up", f)] if c.gated_mlp else [("up", f)]
        if c.gated_mlp and self.joins:
            layers = [("gate and up", 2 * f)]
        made = self.columns(x, layers, "mlp", c.mlp_bias)
        inner = self.inner(x, made, "mlp")
        y = row_linear(e, s, inner, f, "mlp", "down projection", c.mlp_bias)
        return self.adapted(y, inner, f, c.hidden, "mlp", "down")

    def experts(self, x: Value) -> Value:
        """Router, a copy of each token for each expert it visits, experts, and the weighted sum."""
        c, e, s = self.c, self.e, self.s
        f, h = c.expert_ffn // s.tp, c.hidden
        visits = s.visits // (s.tp if s.sequence_parallel else 1)  # by copies that are split over tp, as the stream is
        router = matrix(e, x, s.stream, h, c.num_experts, name="router", kind="mlp", item=FP32)
        chosen = e.function("softmax of the router", router, kind="router", keeps_output=True)
        copies = e.make("dispatch", [x], visits * h, s.value, label="copies of tokens")
        local, own_f = c.num_experts // s.ep, c.expert_ffn // (s.etp or s.tp)  # experts of this rank, and their width
        inner = [("gate", 1), ("up", 1)] if c.gated_mlp else [("up", 1)]
        if c.gated_mlp and self.joins:
            inner = [("gate and up", 2)]

        def product(y: Value, tokens: int, inputs: int, outputs: int, name: str, widths: int, label: str = "") -> Value:
            trained = 0 if e.frozen or e.fused_gradients else widths * h * own_f * local * e.gradient
            how = {"kind": "experts", "weight_gradient": trained, "label": label}
            made = matrix(e, y, tokens, inputs, outputs, name=f"{name} projection of the experts", **how)
            sides = (h, own_f) if inputs == h else (own_f, h)
            return self.adapted(made, y, *sides, "experts", f"{name} of the experts", local)

        made = [
            product(copies, s.visits, h, widths * f, name, widths, f"{name} of the experts") for name, widths in inner
        ]
        out = product(self.inner(x, made, "experts"), visits, f, h, "down", 1)
        y = e.make("weighted sum", [out, chosen], s.stream * h, s.value, keeps=[out, chosen], kind="experts")
        if c.num_shared_experts:
            y = e.add(y, self.mlp(x, c.num_shared_experts * c.expert_ffn), "add shared experts")
        return y
