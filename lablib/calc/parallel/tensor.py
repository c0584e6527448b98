"""Tensor parallelism in numbers: heads of each rank, traffic, kept activations and time of a layer.

A layer has two halves, attention and MLP. Each is a column-parallel matrix, then a row-parallel one, and each has one
communication where the stream enters and one where it leaves. Three variants, by what `sequence_parallel` is:

| | `False` | `"keep"` | `"shard"` |
|---|---|---|---|
| the stream between halves | full on every rank | split over tokens | split over tokens |
| forward, entering, leaving | -, all-reduce | all-gather, reduce-scatter | all-gather, reduce-scatter |
| backward, leaving, entering | -, all-reduce | all-gather, reduce-scatter | all-gather, all-gather + reduce-scatter |
| elements sent a layer | 8bsh(t-1)/t | 8bsh(t-1)/t | 10bsh(t-1)/t |
| kept for backward, paper's bytes | sbh(10 + 24/t) + scores | sbh(4 + 30/t) + scores | 34sbh/t + scores |

with scores = 5as²b/t. "keep" keeps the gathered input of the first matrices, "shard" gathers it again in backward; the
bytes are computed in `lablib.calc.memory`.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Narayanan et al. 2021 (arXiv 2104.04473), section 3.2;
Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_bytes, ring_all_gather_time
from lablib.calc.errors import check_whole, either
from lablib.calc.models import ModelConfig, embedding_tensors, head_tensors, layer_tensors

#: Values of `sequence_parallel`: none, keep the gathered input, keep the shard only.
VARIANTS = (False, "keep", "shard")

_HALVES = 2

#: Collectives of one half, forward and backward.
_HALF = {
    False: ({"all_reduce": 1}, {"all_reduce": 1}),
    "keep": ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    "shard": ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 1}),
}


@dataclass(frozen=True)
class RankHeads:
    """The heads of one rank.

    Attributes:
        copies: How many ranks hold each of these key and value heads.
    """

    queries: range
    keys: range
    copies: int


def split_heads(num_heads: int, num_kv_heads: int, tp: int) -> list[RankHeads]:
    """Return which heads each rank computes: neighbouring ones, and the keys that their queries read.

    Up to `num_kv_heads` ranks the keys are split; beyond, each key head is on `tp / num_kv_heads` ranks.
    """
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("tp", tp)):
        check_whole(name, value, 1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: each key head serves equally many "
            f"query heads; use {either(n for n in range(1, num_heads + 1) if num_heads % n == 0)}"
        )
    usable = [n for n in range(1, num_heads + 1) if _fits(num_heads, num_kv_heads, n)]
    if tp not in usable:
        why = (
            f"does not divide num_heads={num_heads}"
            if num_heads % tp
            else f"and num_kv_heads={num_kv_heads} do not divide each other"
        )
        raise ValueError(f"tp={tp} {why}; use {either(usable)}")
    each, group = num_heads // tp, num_heads // num_kv_heads
    queries = [range(rank * each, (rank + 1) * each) for rank in range(tp)]
    copies = max(1, tp // num_kv_heads)
    return [RankHeads(mine, range(mine[0] // group, mine[-1] // group + 1), copies) for mine in queries]


def _fits(num_heads: int, num_kv_heads: int, tp: int) -> bool:
    return num_heads % tp == 0 and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)


def tp_degrees(config: ModelConfig, *, replicate_kv: bool = False) -> list[int]:
    """Return the degrees that leave every rank whole heads and equal parts of the MLP, ascending; a vocabulary can be padded.

    Args:
        replicate_kv: Also allow more ranks than key heads, each key head on several ranks.

    Raises:
        ValueError: If the model has experts or latent attention.
    """
    require_dense(config)
    most = config.num_heads if replicate_kv else config.num_kv_heads
    return [
        tp for tp in range(1, most + 1) if _fits(config.num_heads, config.num_kv_heads, tp) and config.ffn % tp == 0
    ]


def rank_params(config: ModelConfig, tp: int) -> int:
    """Return the parameters that one rank holds of the model: 1/t of matrices, all of norms and row biases.

    Args:
        tp: A degree of `tp_degrees`; the vocabulary is rounded up to a multiple of it.
    """
    _check(config, tp)
    tensors = embedding_tensors(config) + head_tensors(config)
    for layer in range(config.num_layers):
        tensors += layer_tensors(config, layer)
    return sum(tensor.local_params(tp) for tensor in tensors)


def layer_collectives(sequence_parallel: bool | str = False) -> dict[str, dict[str, int]]:
    """Return how often one layer calls each collective, in "forward" and in "backward", for one micro-batch."""
    forward, backward = _HALF[variant(sequence_parallel)]
    return {
        "forward": {op: _HALVES * calls for op, calls in forward.items()},
        "backward": {op: _HALVES * calls for op, calls in backward.items()},
    }


def layer_elements(*, batch: int, seq: int, hidden: int, tp: int, sequence_parallel: bool | str = False) -> float:
    """Return the numbers that one rank sends for one layer and micro-batch: 8bsh(t-1)/t, or 10bsh(t-1)/t.

    Narayanan et al. 2021, section 3.2, count the 8; an all-reduce is two of the ten gathers and scatters.
    """
    return _passes(sequence_parallel) * ring_all_gather_bytes(batch * seq * hidden, tp)


def _passes(sequence_parallel: bool | str) -> int:
    """Times that the stream goes round the ring once: an all-reduce twice, a gather or scatter once."""
    counts = layer_collectives(sequence_parallel)
    return sum(calls * (2 if op == "all_reduce" else 1) for part in counts.values() for op, calls in part.items())


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer on one rank, forward and backward, for one micro-batch.

    Attributes:
        communication: Collectives on a ring; the next product needs their result, so they are exposed.
    """

    compute: float
    communication: float

    @property
    def ratio(self) -> float:
        """Communication over computation."""
        return self.communication / self.compute

    @property
    def share(self) -> float:
        """Communication over the full time of the layer, if nothing overlaps."""
        return self.communication / (self.compute + self.communication)


def layer_times(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    tp: int,
    flops: float,
    bandwidth: float,
    latency: float = 0.0,
    bytes_per_value: int = 2,
    sequence_parallel: bool | str = False,
    scores: bool = True,
) -> LayerTimes:
    """Return how long one layer computes and communicates.

    Args:
        scores: Count the products of the scores too. Without them communication over compute is, for a GPT layer,
            `cF(t-1)/(9hW)`, whatever b and s are.
    """
    require_dense(config)
    matrices = sum(t.outputs * t.inputs * t.copies for t in layer_tensors(config, 0) if t.inputs > 1)
    products = 6 * batch * seq * matrices + scores * 12 * batch * seq**2 * config.q_width
    size = batch * seq * config.hidden * bytes_per_value
    each = ring_all_gather_time(size, tp, bandwidth=bandwidth, latency=latency)
    return LayerTimes(products / tp / flops, _passes(sequence_parallel) * each)


def variant(sequence_parallel: bool | str) -> bool | str:
    """Return `sequence_parallel` if it is one of `VARIANTS`; True does not say which of the two is meant."""
    if not any(sequence_parallel is known or sequence_parallel == known != 0 for known in VARIANTS):
        raise ValueError(f"sequence_parallel={sequence_parallel!r} must be False, 'keep' or 'shard'")
    return sequence_parallel


def _check(config: ModelConfig, tp: int) -> None:
    require_dense(config)
    usable = tp_degrees(config)
    if tp not in usable:
        raise ValueError(
            f"tp={tp} must divide num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads} and "
            f"ffn={config.ffn}; use {either(usable)}"
        )


def require_dense(config: ModelConfig) -> None:
    """Raise a ValueError if the model has experts or latent attention."""
    if config.is_moe or config.is_mla:
        raise ValueError(f"{config.name} has experts or latent attention; this count is for dense layers")
