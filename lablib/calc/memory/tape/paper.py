"""The two ends of a transformer as tapes: the embedding, and final norm, head and loss.

The loss is where memory is lost with large vocabularies. In 16 bits, with n tokens and V words:

    logits                    2 n V    until the loss has read them
    logits in fp32            4 n V    until log-softmax has read them
    log-probabilities         4 n V    kept for backward
    gradient of these         4 n V    made by the loss's backward
    gradient of fp32 logits   4 n V    made by log-softmax's backward, while the two above are there
    gradient of logits        2 n V    what the head gets

The paper's kernel is Megatron-LM's: one operator, which keeps fp32 probabilities and turns them into the gradient.

One block as the papers' kernels run it: norms, activation functions and dropout are one operator each.

What it keeps is Korthikanti et al. 2022 (arXiv 2205.05198), section 4, as `lablib.calc.memory.activations.paper` sums it up.
What lives for a moment follows from the same operators: each makes its output, and in backward a gradient for each
input. No GPU has confirmed it yet.

Tensor parallelism: a column-parallel matrix reads the whole stream, a row-parallel one leaves a sum that every rank
adds to. With sequence parallelism the stream is gathered before, and again in backward, and reduce-scattered behind.
"""

from __future__ import annotations

from lablib.calc.memory.tape.blocks import BlockSetting, gathered_logits, read_by_all
from lablib.calc.memory.tape.operators import FP32, Eager
from lablib.calc.memory.tape.tape import NEW, NONE, SHARED, Tape, Value

MASK = 1


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


def gathered_linear(
    e: Eager,
    s: BlockSetting,
    outputs: list[tuple[Value, int, str, bool]],
    inputs: int,
    kind: str,
    labels: list[str],
    tokens: int = 0,
) -> list[Value]:
    """Return column-parallel layers of one input; with sequence parallelism they gather it, and keep the shard."""
    tokens, item = tokens or s.tokens, s.value
    x = outputs[0][0]
    split = s.sequence_parallel and s.tp > 1
    whole = e.make("all-gather", [x], tokens * inputs, item, label="gathered stream") if split else x
    results = []
    for (_, width, name, bias), label in zip(outputs, labels, strict=True):
        trained = not e.frozen
        results.append(
            e.make(
                name,
                [whole, x] if split else [x],
                tokens * width,
                item,
                gradient=[NEW, NONE] if split else NEW,
                keeps=[x] if trained else [],
                kind=kind,
                label=label,
                weight_gradient=(inputs * width + (width if bias else 0)) * e.gradient if trained else 0,
                backward_temporary=tokens * inputs * item if split and trained else 0,
            )
        )
    return results


def row_linear(
    e: Eager, s: BlockSetting, x: Value, inputs: int, kind: str, name: str, bias: bool, width: int = 0
) -> Value:
    """Return a row-parallel layer: the sum over ranks is whole, or with sequence parallelism a shard."""
    width = width or s.config.hidden
    tokens = e.numbers(x) // inputs
    trained = not e.frozen
    y = e.make(
        name,
        [x],
        tokens * width,
        e.item[x],
        keeps=[x] if trained else [],
        kind=kind,
        weight_gradient=(inputs * width + (width if bias else 0)) * e.gradient if trained else 0,
    )
    if s.sequence_parallel and s.tp > 1:
        y = e.make("reduce-scatter", [y], tokens * width // s.tp, e.item[x])
    return y


def paper_block(setting: BlockSetting) -> Tape:
    """Return the tape of one block."""
    return _PaperBlock(setting).e.tape


class _PaperBlock:
    def __init__(self, s: BlockSetting) -> None:
        self.s, self.c = s, s.config
        self.e = e = Eager(value=s.value, gradient=s.gradient, frozen=s.lora_rank > 0)
        e.tape.recomputing = s.recompute == "full"
        x = e.input("input of the block", s.stream * self.c.hidden, needs_grad=s.input_needs_grad)
        e.tape.hold(x)
        y = self.attention(paper_norm(e, s, x, "norm 1"))
        x = self.add(x, y, "attention", "the norm behind norm 1")
        y = self.experts if self.c.has_experts(s.layer) else self.mlp
        self.add(x, y(paper_norm(e, s, x, "norm 2")), "mlp", "the norm behind norm 2")
        if s.recompute == "full":
            e.tape.kinds[e.tape.inputs[0]] = "input"

    def add(self, x: Value, y: Value, kind: str, norm: str) -> Value:
        if self.c.norms_per_layer == 4:
            y = paper_norm(self.e, self.s, y, norm)
        if self.s.dropout:
            y = self.e.make(
                f"dropout of {kind}", [y], self.e.numbers(y), self.s.value, kind=kind, extra=self.e.numbers(y)
            )
        return self.e.add(x, y, f"add {kind}", label=f"stream behind {kind}")

    def columns(self, x: Value, layers: list[tuple[str, int]], kind: str, bias: bool) -> list[Value]:
        """Column-parallel layers of one input; each may have an adapter."""
        outputs = [(x, width, f"{name} projection", bias) for name, width in layers]
        made = gathered_linear(self.e, self.s, outputs, self.c.hidden, kind, labels=[name for name, _ in layers])
        return [
            self.adapted(y, x, self.c.hidden, width, kind, name) for y, (name, width) in zip(made, layers, strict=True)
        ]

    def adapted(self, y: Value, x: Value, inputs: int, outputs: int, kind: str, name: str) -> Value:
        s, e = self.s, self.e
        if not s.lora_rank or (s.lora_targets != "all" and kind != "attention"):
            return y
        down = e.linear(x, inputs, s.lora_rank, kind=kind, name=f"A of {name}", trained=True)
        up = e.linear(down, s.lora_rank, outputs, kind="adapters", name=f"B of {name}", trained=True)
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

        def matrix(y: Value, inputs: int, outputs: int, name: str, tokens: int) -> Value:
            return e.make(
                name,
                [y],
                tokens * outputs,
                s.value,
                keeps=[] if e.frozen else [y],
                kind="attention",
                weight_gradient=0 if e.frozen else inputs * outputs * e.gradient,
                label=f"output of {name}",
            )

        rank, rope = c.kv_lora_rank, c.qk_rope_head_dim
        queries = x
        if c.q_lora_rank:
            queries = matrix(x, c.hidden, c.q_lora_rank, "q into its latent", s.stream)
            queries = e.function("norm of q's latent", queries, kind="attention")
        latent = matrix(x, c.hidden, rank, "k and v into their latent", s.stream)
        key = matrix(x, c.hidden, rope, "rotary key", s.stream)
        normed = e.function("norm of the latent", latent, kind="attention")
        heads = c.num_heads // s.tp
        q = matrix(queries, c.q_lora_rank or c.hidden, heads * c.head_dim, "q out of its latent", s.tokens)
        k = matrix(normed, rank, heads * c.qk_nope_head_dim, "k out of the latent", s.tokens)
        v = matrix(normed, rank, heads * c.value_dim, "v out of the latent", s.tokens)
        # The rotary part is the same for all heads; attention reads keys of whole width.
        k = e.make("join k", [k, key], s.tokens * heads * c.head_dim, s.value, keeps=[key], kind="attention", label="k")
        return [q, k, v]

    def inner(self, x: Value, made: list[Value], width: int, kind: str) -> Value:
        e = self.e
        if self.c.gated_mlp:
            return e.make("SwiGLU", made, e.numbers(made[0]), e.item[x], keeps=made, kind=kind, label="SiLU(gate) × up")
        return e.function("GELU", made[0], kind=kind, label="output of GELU")

    def mlp(self, x: Value, ffn: int = 0) -> Value:
        c, e, s = self.c, self.e, self.s
        f = (ffn or c.ffn) // s.tp
        layers = [("gate", f), ("up", f)] if c.gated_mlp else [("up", f)]
        made = self.columns(x, layers, "mlp", c.mlp_bias)
        inner = self.inner(x, made, f, "mlp")
        y = row_linear(e, s, inner, f, "mlp", "down projection", c.mlp_bias)
        return self.adapted(y, inner, f, c.hidden, "mlp", "down")

    def experts(self, x: Value) -> Value:
        """Router, a copy of each token for each expert it visits, experts, and the weighted sum."""
        c, e, s = self.c, self.e, self.s
        k, f, h = c.experts_per_token, c.expert_ffn // s.tp, c.hidden
        router = e.make(
            "router",
            [x],
            s.stream * c.num_experts,
            FP32,
            keeps=[] if e.frozen else [x],
            kind="mlp",
            weight_gradient=0 if e.frozen else h * c.num_experts * e.gradient,
        )
        chosen = e.function("softmax of the router", router, kind="router", keeps_output=True)
        own = max(1, c.num_experts)
        copies = e.make("dispatch", [x], s.stream * k * h, s.value, label="copies of tokens")
        trained = 0 if e.frozen else e.gradient
        made = [
            e.make(
                f"{name} projection of the experts",
                [copies],
                s.tokens * k * f,
                s.value,
                keeps=[copies] if trained else [],
                kind="experts",
                weight_gradient=h * f * own * trained,
                label=f"{name} of the experts",
            )
            for name in (("gate", "up") if c.gated_mlp else ("up",))
        ]
        inner = self.inner(x, made, f, "experts")
        out = e.make(
            "down projection of the experts",
            [inner],
            s.stream * k * h,
            s.value,
            keeps=[inner] if trained else [],
            kind="experts",
            weight_gradient=h * f * own * trained,
        )
        y = e.make(
            "weighted sum", [out, chosen], s.stream * h, s.value, keeps=[out, chosen], kind="experts",
            gradient="new",
        )  # fmt: skip
        if c.num_shared_experts:
            y = e.add(y, self.mlp(x, c.num_shared_experts * c.expert_ffn), "add shared experts")
        return y


INT64 = 8
#: Labels of the head's tensors that are terms of their own.
LOSS_TERMS = {"logits": "logits", "logits in fp32": "logits_fp32"}
#: Operators behind the logits.
LOSS_OPERATORS = ("cast", "log-softmax", "negative log-likelihood", "cross-entropy")


def paper_head(setting: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss with the papers' kernels."""
    s, c = setting, setting.config
    e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
    words = -(-c.vocab // s.tp)
    x = e.input("stream behind the last block", s.stream * c.hidden)
    x = paper_norm(e, s, x, "final norm")
    logits = gathered_linear(e, s, [(x, words, "head", False)], c.hidden, "head", labels=["logits"])[0]
    e.tape.hold(logits)
    probabilities = s.tokens * words * FP32  # which become the gradient in place
    e.make("cross-entropy", [logits], 1, FP32, extra=probabilities, kind="logits")
    return e.tape


def eager_head(setting: BlockSetting) -> Tape:
    """Return the tape of final norm, head and loss in eager PyTorch; layer and recomputation do not matter."""
    s, c = setting, setting.config
    e = Eager(value=s.value, gradient=s.gradient, low=s.low, frozen=s.lora_rank > 0)
    words = -(-c.vocab // s.tp)
    x = e.input("stream behind the last block", s.stream * c.hidden, FP32 if s.low else s.value)
    norm = {"kind": "norms", "name": "final norm"}
    x = e.layernorm(x, c.hidden, **norm) if c.norm == "layernorm" else e.rmsnorm(x, c.hidden, **norm)
    if s.implementation.holds_variables:  # one of its forward until the loss is there, kept by a trained head or not
        e.tape.hold(x)
    if s.tp == 1:
        logits = e.linear(x, c.hidden, words, kind="head", name="head", label="logits")
    else:
        own = e.linear(read_by_all(e, s, x), c.hidden, words, kind="head", name="head", label="logits of this rank")
        logits = gathered_logits(e, s, own, words)
    e.tape.hold(logits)
    full = e.cast(logits, FP32, "logits in fp32")
    if s.implementation.holds_variables:
        # Each sequence's targets are padded by one and cut anew, and a variable holds the padded ones.
        e.tape.hold(e.tape.op("pad", [], (s.tokens + s.batch) * INT64, label="padded targets"))
    scores = e.function("log-softmax", full, kind="logits", keeps_output=True, label="log-probabilities")
    targets = s.tokens * INT64 if s.implementation.holds_variables or (s.batch > 1 and s.seq > 1) else 0
    e.make("negative log-likelihood", [scores], 1, FP32, extra=targets + FP32, kind="loss")
    return e.tape


def paper_embedding(setting: BlockSetting) -> Tape:
    """Return the tape of the embeddings with the papers' kernels: the table is split, a mask has 1 byte a value."""
    return _embedding(setting, -(-setting.config.vocab // setting.tp), NEW)


def eager_embedding(setting: BlockSetting) -> Tape:
    """Return the tape of the embeddings in eager PyTorch."""
    # Of one sequence both have the same shape in Hugging Face's GPT-2, so that one gradient is enough for both.
    same = setting.implementation.holds_variables and setting.batch == 1
    return _embedding(setting, setting.config.vocab, SHARED if same else NEW)


def _embedding(s: BlockSetting, words: int, position_gradient: str) -> Tape:
    """The tape of token and position embeddings and the dropout behind them."""
    c = s.config
    e = Eager(value=s.value, gradient=s.gradient, low=0, frozen=s.lora_rank > 0)
    item = FP32 if s.low else s.value
    trained = 0 if e.frozen else s.gradient
    indices = e.input("tokens", 1, 1, needs_grad=False, given=True)
    numbers = s.stream * c.hidden
    x = e.make(
        "embedding",
        [indices],
        numbers,
        item,
        gradient=NONE,
        weight_gradient=words * c.hidden * trained,
        # The head's gradient of the same table is there already, and this one is added to it.
        label="token embeddings",
    )
    if c.learned_positions:
        places = e.make(
            "positions",
            [indices],
            s.seq // s.cp * c.hidden,
            item,
            gradient=NONE,
            weight_gradient=c.max_positions * c.hidden * trained,
            label="position embeddings",
        )
        how = [SHARED, position_gradient]
        x = e.make("add positions", [x, places], numbers, item, gradient=how)
    if s.dropout:
        if s.implementation.eager:
            e.dropout(x, kind="embedding")
        else:
            e.make("dropout", [x], numbers, item, extra=numbers, kind="embedding")
    return e.tape
