"""What one tensor parallel rank keeps for backward, in the paper's counting and in the toy's.

**Paper** (Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 4), bytes of one GPT layer in 16 bits with dropout:

    tensor parallel              sbh (10 + 24/t + 5as/(ht))
    + sequence parallel "shard"  sbh (34 + 5as/h) / t
    + sequence parallel "keep"   the same and 4sbh (1 - 1/t): the two gathered inputs

**Toy**: `lablib.toys.tensor_parallel` under eager PyTorch on a CPU with fused attention and no dropout, as
`lablib.calc.toy_activations` counts one process. With n = bs tokens, h hidden, a heads of width d, f inner values and V
words, what belongs to heads, inner values and words is divided by t. What belongs to the stream is divided by t only
with sequence parallelism; the input of the first matrices only with "shard".

Chapter: book/03_tensor_parallelism.md
"""

from __future__ import annotations

from lablib.calc.activations import layer_activations
from lablib.calc.models import ModelConfig
from lablib.calc.tensor_parallel import split_heads, variant
from lablib.calc.toy_activations import FP32, INT64, check_config, norm

BOOL = 1


def paper_activations(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    tp: int,
    sequence_parallel: bool | str = False,
    **how: object,
) -> int:
    """Return the bytes that one layer keeps on one rank, in the counting of Korthikanti et al.

    Args:
        config: The model.
        batch: Sequences, b.
        seq: Tokens in a sequence, s.
        tp: Ranks, t.
        sequence_parallel: False, "keep" or "shard".
        **how: `recompute`, `attention`, `dropout` and `bytes_per_value` of `lablib.calc.activations`.

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
        batch: Sequences, b.
        seq: Tokens in a sequence, s.
        tp: Ranks, t.
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
        "head": norm(config, stream, value)
        + entering
        + n * _part(config.vocab, tp, rank) * FP32
        + n * (INT64 + BOOL),
    }


def _part(size: int, ranks: int, rank: int) -> int:
    return size * (rank + 1) // ranks - size * rank // ranks
