"""A router left alone, and two ways to balance it: training on the course's text, with the load of every expert.

Chapter 13 draws its figure of balance from these runs.

    "none"      the router follows the loss of the model
    "loss"      plus coefficient times the balance loss, counted over all ranks
    "bias"      no loss, but a bias that moves by `speed` after every step

The router is DeepSeek-V3's in all three. Both constants are larger than published ones, because these runs have tens of
steps and not a hundred thousand.

Shapes: B sequences of T = 32 + 1 tokens, L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from lablib.calc.errors import check_whole, must_divide, one_of
from lablib.calc.models import ModelConfig, Router
from lablib.toys import text
from lablib.toys.expert_parallel.experts import average_gradients
from lablib.toys.expert_parallel.moe_transformer import MoETransformer, tiny_mixture
from lablib.toys.expert_parallel.router import largest_share

BALANCING = ("none", "loss", "bias")


class Step(NamedTuple):
    """One step of training, of all ranks.

    Attributes:
        loss: Of the model, without the balance loss.
        share: Of the choices, those that fell on the most popular expert, in the layer where that is worst.
        starving: Experts of all layers that no token chose.
        counts: Tokens of each expert, a list for each layer.
    """

    loss: float
    share: float
    starving: int
    counts: list[list[int]]


class Groups(NamedTuple):
    """The process groups of one rank: all replicas, those that share the experts, those that hold the same ones."""

    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    edp: dist.ProcessGroup


def train_mixture(
    balancing: str,
    groups: Groups | None = None,
    *,
    config: ModelConfig | None = None,
    steps: int = 40,
    batch: int = 32,
    coefficient: float = 0.1,
    speed: float = 0.02,
) -> list[Step]:
    """Train a small mixture on the course's text and return what each step saw, the same on every rank.

    Args:
        balancing: One of `BALANCING`.
        groups: Of this rank; None is one process.
        config: None is `tiny_mixture` with DeepSeek-V3's router.
        batch: Sequences of a step, of all ranks together.
        coefficient: Of the balance loss, with "loss".
        speed: γ, with "bias".
    """
    one_of("balancing", balancing, BALANCING)
    ranks, rank = (1, 0) if groups is None else (groups.dp.size(), groups.dp.rank())
    check_whole("batch", batch, 1)
    must_divide("dp", ranks, "batch", batch)
    config = config or tiny_mixture(router=Router(score="sigmoid", bias=True))
    torch.manual_seed(0)
    model = MoETransformer(config, groups and groups.ep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    everyone = groups and groups.dp
    seen = []
    stream = text.batches(text.tokens(), batch=batch, seq=32, seed=0)
    for _, windows_BT in zip(range(steps), stream, strict=False):
        loss = model.loss(windows_BT.chunk(ranks)[rank])
        objective = loss + coefficient * model.balance_loss(everyone) if balancing == "loss" else loss
        optimizer.zero_grad()
        objective.backward()
        if groups is not None:
            average_gradients(model, groups.dp, groups.edp)
        optimizer.step()
        counts_LE = model.counts(everyone)
        if balancing == "bias":
            model.update_biases(counts_LE, speed)
        mean = loss.detach() / ranks
        if groups is not None:
            dist.all_reduce(mean, group=groups.dp)
        worst_E = max(counts_LE, key=largest_share)
        starving = int((counts_LE == 0).sum())
        seen.append(Step(mean.item(), largest_share(worst_E), starving, counts_LE.tolist()))
    return seen
