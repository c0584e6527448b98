"""Bytes that one micro-batch leaves behind on one rank for its backward pass: counted, not fitted.

Two ways of counting, chosen by `implementation`:

**"paper"**: Korthikanti et al. 2022 (arXiv 2205.05198), section 4: every operator of a block keeps its input, values
have 2 bytes, dropout masks 1; norm statistics and indices are too small to count. For a GPT block (s tokens, b
sequences, h hidden, a heads, t-way tensor parallelism), equations 1, 2, 4 and 6 and table 2:

| what | bytes of one layer |
|---|---|
| nothing done | sbh (34 + 5as/h): attention 11sbh + 5as²b, MLP 19sbh, norms 4sbh |
| tensor parallelism | sbh (10 + 24/t + 5as/(ht)) |
| + sequence parallelism | sbh (34 + 5as/h) / t |
| + selective recomputation | the same without the term in as |
| full recomputation | 2sbh |

The same counting goes beyond the paper: without dropout a mask is nothing and the softmax output is kept once
(2as²b); grouped queries keep `a_kv d` for keys and values; SwiGLU, one operator, keeps gate and up, and the down
projection its output (3f a token); fused attention keeps q, k, v, its output and fp32 softmax statistics; an expert
keeps its copy of the tokens it visits; latent attention (MLA) its latents, before and after their norms, and
the full q, k, v. Routing is taken as balanced.

**"toy"**: what `lablib.toys.transformer` keeps under eager PyTorch on a CPU; see `lablib.calc.memory.activations.toy`.

**"hf"**: what Hugging Face's eager GPT-2, Llama, Qwen2 and Mistral keep; see `lablib.calc.memory.activations.hf`.

With t ranks these two are PyTorch's `parallelize_module` with Hugging Face's plan: heads and the MLP are divided, the
stream, its norms and the gathered logits are not.

What one tensor parallel rank keeps for backward, in the paper's counting and in the toy's.

**Paper** (Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 4), bytes of one GPT layer in 16 bits with dropout:

    tensor parallel              sbh (10 + 24/t + 5as/(ht))
    + sequence parallel "shard"  sbh (34 + 5as/h) / t
    + sequence parallel "keep"   the same and 4sbh (1 - 1/t): the two gathered inputs

**Toy**: `lablib.toys.tensor_parallel.model` under eager PyTorch on a CPU with fused attention and no dropout, as
`lablib.calc.memory.activations.toy` counts one process. With n = bs tokens, h hidden, a heads of width d, f inner values and V
words, what belongs to heads, inner values and words is divided by t. What belongs to the stream is divided by t only
with sequence parallelism; the input of the first matrices only with "shard".
"""

from __future__ import annotations

from lablib.calc.memory.activations.implementations import IMPLEMENTATIONS, accepts_old_names, find_implementation
from lablib.calc.memory.activations.paper import Share
from lablib.calc.memory.activations.toy import FP32, INT64, check_config, norm
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import split_heads, variant


@accepts_old_names
def layer_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    implementation: str = "paper",
    bytes_per_value: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
    cp: int = 1,
    recompute: str = "none",
    attention: str = "fused",
    dropout: float | None = None,
    layer: int | None = None,
) -> dict[str, int]:
    """Return the bytes that one layer keeps for backward, for one micro-batch on one rank, by kind.

    Args:
        seq: Tokens in a sequence, s, before context parallelism divides it.
        implementation: "paper", "toy" or "hf".
        bytes_per_value: 2 for bf16 and fp16, 4 for fp32.
        sequence_parallel: Whether norms, dropout and the stream are split over the tensor parallel ranks too.
        cp: Context parallel ranks; each holds `s / cp` tokens and sees every key.
        recompute: "none"; "selective": q, k, v are kept and the attention core is run again; "full": only the
            layer's input is kept (split by t with sequence parallelism, where the layer receives a shard).
        attention: "plain" keeps the scores of every pair of tokens, "fused" their statistics.
        dropout: Probability; only whether it is 0 matters. None: as published, which is dropout in the paper's
            GPT blocks and none in later families; none with the toy and Hugging Face's classes.
        layer: Which layer, from 0; it matters where some layers have experts. None: the last one.

    Returns:
        Bytes by kind: "norms", "attention", "scores" and "mlp", with experts "router" and "experts" too;
        under full recomputation "input" alone.

    Raises:
        ValueError: If a size is not positive, factors do not divide each other, or a name is unknown.
    """
    share = _share(config, batch, seq, implementation, bytes_per_value, tp, sequence_parallel, cp, dropout)
    _choose("recompute", recompute, ("none", "selective", "full"))
    _choose("attention", attention, ("plain", "fused"))
    # A ValueError if there is no such layer.
    experts = config.has_experts(config.num_layers - 1 if layer is None else layer)
    how = {"experts": experts, "recompute": recompute, "attention": attention}
    return find_implementation(implementation).layer(share, **how)


@accepts_old_names
def embedding_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    implementation: str = "paper",
    bytes_per_value: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
    cp: int = 1,
    dropout: float | None = None,
) -> dict[str, int]:
    """Return the bytes that the embedding keeps, by kind: a dropout mask, sbh/t in the paper (section 4.3).

    The toy keeps token and position indices or rotary tables as well, which the paper leaves out as too small.

    Args:
        implementation: "paper", "toy" or "hf".
        bytes_per_value: 2 or 4.
        sequence_parallel: Whether the stream is split over them; without it the mask is not divided.
        dropout: As in `layer_activations`.

    Raises:
        ValueError: As `layer_activations`.
    """
    share = _share(config, batch, seq, implementation, bytes_per_value, tp, sequence_parallel, cp, dropout)
    return find_implementation(implementation).embedding(share)


@accepts_old_names
def head_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    implementation: str = "paper",
    bytes_per_value: int = 2,
    tp: int = 1,
    sequence_parallel: bool = False,
    cp: int = 1,
) -> dict[str, int]:
    """Return the bytes that the end keeps, by kind: inputs of final norm and head, and fp32 logits for the loss.

    The paper's sum with sequence parallelism (section 4.3) is `4sbh/t (1 + v/h)`.
    A vocabulary that t does not divide is rounded up: the largest shard counts.

    Args:
        implementation: "paper", "toy" or "hf".
        bytes_per_value: 2 or 4.
        sequence_parallel: Whether the stream is split over them.

    Raises:
        ValueError: As `layer_activations`.
    """
    share = _share(config, batch, seq, implementation, bytes_per_value, tp, sequence_parallel, cp, None)
    return find_implementation(implementation).head(share)


@accepts_old_names
def model_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    implementation: str = "paper",
    bytes_per_value: int = 2,
    recompute: str = "none",
    attention: str = "fused",
    dropout: float | None = None,
) -> dict[str, int]:
    """Return the bytes that a whole model on one device keeps for one micro-batch: embedding, layers and head.

    Args:
        implementation: "paper", "toy" or "hf".
        bytes_per_value: 2 or 4.
        recompute: As in `layer_activations`.
        attention: As in `layer_activations`.
        dropout: As in `layer_activations`.

    Raises:
        ValueError: As `layer_activations`.
    """
    sizes = {"batch": batch, "seq": seq, "implementation": implementation, "bytes_per_value": bytes_per_value}
    how = {"recompute": recompute, "attention": attention, "dropout": dropout}
    # At most two kinds of layer exist: the first ones, dense, and the rest.
    dense = config.num_dense_layers if config.is_moe else config.num_layers
    layers = sum(
        count * sum(layer_activations(config, layer=first, **sizes, **how).values())
        for first, count in ((0, dense), (dense, config.num_layers - dense))
        if count
    )
    return {
        "embedding": sum(embedding_activations(config, dropout=dropout, **sizes).values()),
        "layers": layers,
        "head": sum(head_activations(config, **sizes).values()),
    }


def _share(
    config: ModelConfig,
    batch: int,
    seq: int,
    implementation: str,
    value: int,
    tp: int,
    sequence_parallel: bool,
    cp: int,
    dropout: float | None,
) -> Share:
    """Check every factor and return what one rank holds."""
    _choose("implementation", implementation, tuple(IMPLEMENTATIONS))
    _choose("bytes_per_value", value, (2, 4))
    for name, number in (("batch", batch), ("seq", seq), ("tp", tp), ("cp", cp)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}={number!r} must be a whole number of at least 1")
    whose = find_implementation(implementation)
    if dropout is None:
        dropout = whose.default_dropout(config)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
    if whose.eager:
        if cp > 1 or sequence_parallel:
            raise ValueError(
                f"implementation={implementation!r} knows tp alone: cp={cp} must be 1 and sequence_parallel={sequence_parallel} "
                "False; use implementation='paper' for more"
            )
        whose.check(config)
    widths = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "ffn": config.ffn}
    if config.is_moe:
        widths["expert_ffn"] = config.expert_ffn
    for name, width in widths.items():
        _divides("tp", tp, name, width)
    _divides("cp", cp, "seq", seq)
    if sequence_parallel:
        _divides("tp", tp, "seq / cp", seq // cp)
    return Share(
        config=config,
        seq=seq,
        tokens=batch * seq // cp,
        value=value,
        tp=tp,
        stream_split=tp if sequence_parallel else 1,
        dropout=dropout > 0,
    )


def _divides(name: str, factor: int, of: str, number: int) -> None:
    if number % factor == 0:
        return
    usable = [str(n) for n in range(1, min(number, factor) + 1) if number % n == 0]
    choices = f"{', '.join(usable[:-1])} or {usable[-1]}" if len(usable) > 1 else "1"
    raise ValueError(f"{name}={factor} does not divide {of}={number}; use {choices}")


def _choose(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


BOOL = 1


def paper_activations(
    config: ModelConfig, *, batch: int, seq: int, tp: int, sequence_parallel: bool | str = False, **how: object
) -> int:
    """Return the bytes that one layer keeps on one rank, in the counting of Korthikanti et al.

    Args:
        sequence_parallel: False, "keep" or "shard".
        **how: `recompute`, `attention`, `dropout` and `bytes_per_value` of `lablib.calc.memory.activations.block`.

    Raises:
        ValueError: If the variant is unknown, or tp does not divide what it splits.
    """
    kind = variant(sequence_parallel)
    split = layer_activations(config, batch=batch, seq=seq, tp=tp, sequence_parallel=kind is not False, **how)
    whole = 2 * batch * seq * config.hidden * int(how.get("bytes_per_value", 2)) if kind == "keep" else 0
    return sum(split.values()) + whole - whole // tp


def toy_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    tp: int,
    sequence_parallel: bool | str = False,
    rank: int = 0,
    bytes_per_value: int = 4,
) -> dict[str, int]:
    """Return what the parallel toy keeps on one rank for one micro-batch: "embedding", "layers" and "head".

    Args:
        config: A model that the toy transformer has.
        sequence_parallel: False, "keep" or "shard".
        rank: Whose: inner values and words need not be a multiple of t.
        bytes_per_value: 4 for fp32.

    Raises:
        ValueError: If the toy has no such model or variant, or tp does not split its heads or its sequence.
    """
    check_config(config)
    kind = variant(sequence_parallel)
    heads = split_heads(config.num_heads, config.num_kv_heads, tp)
    if not 0 <= rank < tp:
        raise ValueError(f"rank={rank} must be at least 0 and less than tp={tp}")
    if kind and seq % tp:
        raise ValueError(f"tp={tp} does not divide seq={seq}: the toy pads it; use {seq + -seq % tp}")
    n, h, value = batch * seq, config.hidden, bytes_per_value
    stream = n // tp if kind else n  # tokens of this rank in the stream
    entering = (n // tp if kind == "shard" else n) * h * value  # input of the first matrices of a half
    queries, keys = len(heads[rank].queries), len(heads[rank].keys)
    # Queries and the kernel's output, keys and values, and one fp32 statistic a head and token.
    core = n * 2 * (queries + keys) * config.head_dim * value + n * queries * FP32
    inner = n * _part(config.ffn, tp, rank) * value * (4 if config.gated_mlp else 2)
    index = (seq // tp if kind else seq) * INT64
    positions = index if config.learned_positions else 2 * seq * config.head_dim * value
    return {
        # Row numbers and the mask of the words that are here.
        "embedding": n * (INT64 + BOOL) + positions,
        "layers": config.num_layers * (2 * norm(config, stream, value) + 2 * entering + core + inner),
        # Softmax of these words, the mask of targets that are here and their columns.
        "head": norm(config, stream, value) + entering + n * _part(config.vocab, tp, rank) * FP32 + n * (INT64 + BOOL),
    }


def _part(size: int, ranks: int, rank: int) -> int:
    return size * (rank + 1) // ranks - size * rank // ranks
