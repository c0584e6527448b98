"""Muon beside sharded data parallelism: four ways to bring whole matrices together, what each sends and computes.

N ranks, matrices of M values in all. Values sent beyond ZeRO's two transfers, over `(N-1)/N`:

    way        momentum           sent beyond               a rank computes
    gather     shards             M                         all factors
    home       shards             2 M/N, out and back       those of its home, dealt by FLOPs
    owner      whole matrices     0, transfers are padded   its own, dealt by size
    by shape   stacks of a shape  0, transfers are padded   its part of each stack, in one batch

The transfers are the reduce-scatter of gradients and the all-gather of weights; padded, each part is as large as the fullest.

Source: the products in torch/optim/_muon.py of torch 2.13; Liu et al. 2025 (arXiv 2502.16982) gathers. Chapter 05.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lablib.calc.models import ModelConfig, layer_tensors
from lablib.calc.parallel.zero import deal_out

Matrix = tuple[int, int]  # rows, columns

MUON_WAYS = ("gather", "home", "owner", "by shape")


@dataclass(frozen=True)
class MuonCost:
    """What Muon costs in one optimizer step, on the rank that has most of it.

    Attributes:
        zero: Bytes sent in the reduce-scatter and the all-gather, padding included.
        step: Bytes sent beyond them.
        flops: FLOPs of Newton-Schulz.
        held: Momentum over an even share.
        busy: FLOPs over an even share: N where every rank computes all.
    """

    zero: float
    step: float
    flops: int
    held: float
    busy: float

    @property
    def sent(self) -> float:
        """Bytes in all."""
        return self.zero + self.step


def muon_matrices(config: ModelConfig) -> list[Matrix]:
    """Return the matrices of a model's blocks; embeddings, head, norms and biases stay with Adam."""
    tensors = [tensor for layer in range(config.num_layers) for tensor in layer_tensors(config, layer)]
    shapes = [(tensor.outputs, tensor.inputs) for tensor in tensors for _ in range(tensor.copies)]
    return [shape for shape in shapes if min(shape) > 1]


def newton_schulz_flops(matrix: Matrix) -> int:
    """Return the FLOPs of a matrix's factor, `5 (4 s² l + 2 s³)` for the shorter side s and the longer one l.

    Each of five iterations has `A = X Xᵀ` with `2 s² l`, `A A` with `2 s³`, and `(b A + c A A) X` with `2 s² l`.
    """
    short, long = sorted(matrix)
    return 5 * (4 * short**2 * long + 2 * short**3)


def muon_cost(matrices: Sequence[Matrix], ranks: int, way: str, *, bytes_per_value: int = 2) -> MuonCost:
    """Return the cost of one way of `MUON_WAYS`.

    Args:
        matrices: (rows, columns) of every matrix that Muon updates.
        bytes_per_value: Of gradients, weights, momenta and factors as they are sent.

    Raises:
        ValueError: For an unknown way, no matrix, an empty one, or less than one rank.
    """
    matrices = [(rows, columns) for rows, columns in matrices]
    if way not in MUON_WAYS or ranks < 1 or min(map(min, matrices), default=0) < 1:
        raise ValueError(f"{way=} must be one of {MUON_WAYS}, {ranks=} at least 1, and sizes of matrices too")
    total, work = _sum(math.prod, matrices), _sum(newton_schulz_flops, matrices)
    held, step, busiest = total / ranks, 0.0, work
    if way == "gather":
        step = total * (ranks - 1) / ranks
    else:
        if way == "by shape":
            parts = [[m for m, count in Counter(matrices).items() for _ in range(-(-count // ranks))]]
        else:
            weight = newton_schulz_flops if way == "home" else math.prod
            parts = [[matrices[k] for k in mine] for mine in deal_out([weight(m) for m in matrices], ranks)]
        busiest = max(_sum(newton_schulz_flops, mine) for mine in parts)
        if way != "home":
            held = max(_sum(math.prod, mine) for mine in parts)
        else:  # of others' matrices what it holds goes out, and of its own factors what it does not hold
            step = max(total - own + (ranks - 1) * own for own in (_sum(math.prod, mine) for mine in parts)) / ranks
    return MuonCost(
        zero=2 * (ranks - 1) * held * bytes_per_value,
        step=step * bytes_per_value,
        flops=busiest,
        held=held * ranks / total,
        busy=busiest * ranks / work,
    )


def torch_muon_sent(matrices: Sequence[Matrix], ranks: int) -> float:
    """Return the bytes that a rank sends inside `torch.optim.Muon.step` under FSDP2, whose shards are rows.

    DTensor communicates for every product, in bf16. A wide or square matrix X is gathered for `X Xᵀ` and again for the last
    product, and `A` in between: `2 r c + r²` values an iteration. A tall one is transposed, so that it lies in columns and
    `A` is a sum over ranks, all-reduced for both of its uses: `4 c²`. An all-reduce of the norm comes before.
    It holds for torch 2.13 where the ranks divide all rows.
    """
    each = [2 * r * c + r**2 if r <= c else 4 * c**2 for r, c in matrices]
    return 2 * (5 * sum(each) + 2 * len(each)) * (ranks - 1) / ranks


def _sum(of: Callable[[Matrix], int], matrices: Sequence[Matrix]) -> int:
    return sum(map(of, matrices))
