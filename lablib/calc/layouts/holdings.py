"""What each rank of a layout holds: its groups, and its share of the batch, the sequence, the layers, heads and experts.

Which share a rank has follows from one coordinate each: samples from dp, tokens from cp, layers from pp, query heads from tp,
experts from ep. So ranks that differ in tp, cp or pp alone read the same samples, and a batch has dp times as many samples
as one of them reads. Chapter 07.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.layouts.meshes import Mesh
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import check_degrees, expert_groups, rank_experts, rank_samples, rank_tokens, split_heads
from lablib.calc.schedules.stages import stage_layers


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank holds.

    Attributes:
        groups: Its process groups as in `expert_groups`, those of experts only in a model that has any.
        samples: Of the global batch, for each micro-batch.
        tokens: Of each of these samples, a range for each chunk.
        layers: Of its pipeline stage, counted from 0.
        heads: Query heads of these layers.
        experts: Routed experts of each of these layers that has experts; none where no layer has.
        embedding: Whether its stage is the first.
        head: Whether its stage is the last, with the output head.
    """

    groups: dict[str, list[int]]
    samples: list[range]
    tokens: list[range]
    layers: range
    heads: range
    experts: range
    embedding: bool
    head: bool


def holdings(
    model: ModelConfig | str, ranks: Mesh, *, ep: int = 1, etp: int | None = None, seq: int, micro_batch: int = 1,
    rounds: int = 1, sampler: str = "contiguous", tokens: str = "zigzag",
) -> list[Holding]:  # fmt: skip
    """Return what every rank holds.

    Args:
        ranks: The mesh of attention: its own ep is 1.
        ep: Ranks that share the experts, folded over the ranks of a stage.
        etp: Ranks that split each expert; None means tp.
        seq: Tokens of a sample.
        rounds: Micro-batches of a step.
        sampler: One of `SAMPLERS`.
        tokens: "contiguous" or "zigzag", how cp cuts a sequence.

    Raises:
        ValueError: If the model cannot be split so.
    """
    config = resolve_model(model)
    if "edp" in ranks.order:
        raise ValueError("ranks has ep of its own: experts are folded over the stages of a mesh without it")
    tp, cp, dp, pp = (ranks.size(axis) for axis in ("tp", "cp", "dp", "pp"))
    check_degrees(config, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, seq=seq)
    found = expert_groups(
        tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=tp if etp is None else etp, order="-".join(ranks.order)
    )
    if not config.is_moe:
        found = {name: groups for name, groups in found.items() if name not in ("etp", "ep", "edp")}
    of_rank: list[dict[str, list[int]]] = [{} for _ in range(ranks.ranks)]
    for name, groups in found.items():
        for group in groups:
            for rank in group:
                of_rank[rank][name] = group
    stages, heads = stage_layers(config.num_layers, pp), split_heads(config.num_heads, config.num_kv_heads, tp)
    held = []
    for rank, groups in enumerate(of_rank):
        at = ranks.coordinates(rank)
        (layers,) = stages[at["pp"]]
        routed = config.is_moe and layers.stop > config.num_dense_layers
        held.append(
            Holding(
                groups=groups,
                samples=rank_samples(dp, at["dp"], micro_batch=micro_batch, rounds=rounds, sampler=sampler),
                tokens=rank_tokens(cp, at["cp"], tokens, seq),
                layers=layers,
                heads=heads[at["tp"]].queries,
                experts=rank_experts(config.num_experts, ep, groups["ep"].index(rank)) if routed else range(0),
                embedding=at["pp"] == 0,
                head=at["pp"] == pp - 1,
            )
        )
    return held
