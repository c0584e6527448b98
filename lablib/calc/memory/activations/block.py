"""Bytes that one micro-batch leaves behind on one rank for its backward pass, summed up by kind: counted, not fitted.

They are what the tapes of `lablib.calc.memory.tape` keep: "paper" (Korthikanti et al.), "toy" (`lablib.toys.transformer`),
"hf" (Hugging Face's eager classes), "torchtitan" and "megatron", whose kernels keep what the papers count.

With t ranks "toy" and "hf" are PyTorch's `parallelize_module` with Hugging Face's plan: heads and the MLP are divided,
the stream, its norms and the gathered logits are not. `toy_activations` counts `lablib.toys.tensor_parallel` instead.
"""

from __future__ import annotations

from lablib.calc.memory.implementation import check_config, current_names
from lablib.calc.memory.tape import FP32, INT64, BlockSetting, ids_and_positions, kept_by_kind
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import split_heads, variant

BOOL = 1


def layer_activations(config: ModelConfig, **sizes: object) -> dict[str, int]:
    """Return the bytes that one layer keeps for backward, for one micro-batch on one rank, by kind.

    Args:
        **sizes: Fields of `lablib.calc.memory.tape.BlockSetting`: batch and seq, and if wanted implementation,
            recompute, attention, layer, bytes_per_value, tp, sequence_parallel, cp, dropout, ...

    Returns:
        Bytes by kind: "norms", "attention", "scores" and "mlp", with experts "router" and "experts" too;
        under full recomputation "input" alone.

    Raises:
        ValueError: If a size is not positive, factors do not divide each other, or a name is unknown.
    """
    setting = _setting(config, sizes)
    kinds = () if setting.recompute == "full" else ("norms", "attention", "scores", "mlp")
    return dict.fromkeys(kinds, 0) | kept_by_kind("block", setting)


def embedding_activations(config: ModelConfig, **sizes: object) -> dict[str, int]:
    """Return the bytes that the embedding keeps, by kind: a dropout mask, sbh/t in the paper (section 4.3).

    Eager classes keep token and position indices or rotary tables as well, which the paper leaves out as too small.

    Sizes and errors are those of `layer_activations`.
    """
    setting = _setting(config, sizes)
    return ids_and_positions(setting) | {"dropout": sum(kept_by_kind("embedding", setting).values())}


def head_activations(config: ModelConfig, **sizes: object) -> dict[str, int]:
    """Return the bytes that the end keeps, by kind: inputs of final norm and head, and fp32 logits for the loss.

    The paper's sum with sequence parallelism (section 4.3) is `4sbh/t (1 + v/h)`.
    A vocabulary that t does not divide is rounded up: the largest shard counts.

    Sizes and errors are those of `layer_activations`.
    """
    return dict(kept_by_kind("head", _setting(config, sizes)))


def model_activations(config: ModelConfig, **sizes: object) -> dict[str, int]:
    """Return the bytes that a model on one device keeps for one micro-batch: embedding, layers and head.

    Sizes and errors are those of `layer_activations`.
    """
    # At most two kinds of layer exist: the first ones, dense, and the rest.
    dense = config.num_dense_layers if config.is_moe else config.num_layers
    layers = sum(
        count * sum(layer_activations(config, **sizes, layer=first).values())
        for first, count in ((0, dense), (dense, config.num_layers - dense))
        if count
    )
    return {
        "embedding": sum(embedding_activations(config, **sizes).values()),
        "layers": layers,
        "head": sum(head_activations(config, **sizes).values()),
    }


def _setting(config: ModelConfig, sizes: dict[str, object]) -> BlockSetting:
    return BlockSetting(config=config, **current_names(sizes, level=4))


def toy_activations(
    config: ModelConfig, *, batch: int, seq: int, tp: int, sequence_parallel: bool | str = False, rank: int = 0
) -> dict[str, int]:
    """Return what the parallel toy keeps on one rank for one micro-batch in fp32: "embedding", "layers" and "head".

    Args:
        config: A model that the toy transformer has.
        sequence_parallel: False, "keep" or "shard".
        rank: Whose: inner values and words need not be a multiple of t.

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
    n, h, value = batch * seq, config.hidden, FP32
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
        "layers": config.num_layers * (2 * _norm(config, stream, value) + 2 * entering + core + inner),
        # Softmax of these words, the mask of targets that are here and their columns.
        "head": _norm(config, stream, value) + entering + n * _part(config.vocab, tp, rank) * FP32 + n * (INT64 + BOOL),
    }


def _part(size: int, ranks: int, rank: int) -> int:
    return size * (rank + 1) // ranks - size * rank // ranks


def _norm(config: ModelConfig, tokens: int, value: int) -> int:
    """Return what one norm keeps: `n h + 2 n` values, or with RMSNorm `4 n h + 4 n` bytes and `n h` values."""
    if config.norm == "layernorm":
        return tokens * (config.hidden + 2) * value
    return tokens * (config.hidden + 1) * FP32 + tokens * config.hidden * value
