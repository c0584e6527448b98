"""Activations of a pipeline stage: the formulas of one layer, times layers, times micro-batches in flight.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections import Counter

from lablib.calc.activations import embedding_activations, head_activations, layer_activations
from lablib.calc.memory_stage import Stage
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import layer_tensors
from lablib.calc.toy_activations import FP32, INT64


def activation_terms(stage: Stage) -> dict[str, int]:
    """Return the bytes that a stage keeps from forward to backward, by kind.

    A stage's peak holds `in_flight` micro-batches of each of its chunks; Korthikanti et al. (arXiv 2205.05198),
    equation 5 and section 4.2.3. The first stage adds the embedding's, the last the head's: norm, logits, loss.
    Adapters add the r values between their two matrices; that the frozen matrices' own inputs are still kept is
    exact where every matrix has an adapter, and an upper bound otherwise.
    """
    run, counts = stage.run, stage.in_flight
    terms: Counter[str] = Counter()
    for chunk, count in zip(stage.chunks, counts, strict=True):
        for layer, alike in alike_layers(run, chunk).items():
            for kind, size in layer_kinds(run, layer, run.recompute).items():
                terms[f"activations.{kind}"] += count * alike * size
    if stage.is_first:
        embedding = embedding_activations(run.model, dropout=run.dropout, **_shape(run))
        terms["activations.embedding"] += counts[0] * sum(embedding.values())
    if stage.is_last:
        for kind, size in head_activations(run.model, **_shape(run)).items():
            terms[f"activations.{kind}"] += counts[-1] * size
    return dict(terms)


def recomputed_layer(stage: Stage) -> dict[str, int]:
    """Return what backward computes again for one layer before it can go through it: the largest layer's.

    It is what that layer would have kept without recomputation, less what it kept anyway. An estimate.
    """
    run = stage.run
    if run.recompute == "none":
        return {}
    recomputed = [
        sum(layer_kinds(run, layer, "none").values()) - sum(layer_kinds(run, layer, run.recompute).values())
        for chunk in stage.chunks
        for layer in alike_layers(run, chunk)
    ]
    return {"recomputed_layer": max(recomputed, default=0)}


def alike_layers(run: RunConfig, chunk: range) -> Counter[int]:
    """Return the first layer of each kind, with and without experts, and how many of the chunk are like it.

    Args:
        run: The run.
        chunk: Numbers of layers.
    """
    dense = run.model.num_dense_layers if run.model.is_moe else run.model.num_layers  # the first ones
    parts = range(chunk.start, min(chunk.stop, dense)), range(max(chunk.start, dense), chunk.stop)
    return Counter({part.start: len(part) for part in parts if part})


def fixed_activations(run: RunConfig, first: bool = True) -> dict[str, int]:
    """Return what a micro-batch keeps beside tapes: token ids, and position ids or rotary tables, shared by blocks.

    Args:
        run: The run.
        first: Whether it is the first stage; the others get no tokens, and make rotary tables of their own.
    """
    embedding = embedding_activations(run.model, dropout=0.0, **_shape(run))
    if not first:
        tables = 0 if run.model.learned_positions else embedding.get("positions", 0)
        embedding = {"positions": tables}
    if run.kernels.checkpoints_positions and run.recompute == "full" and not run.model.learned_positions:
        embedding["position_ids"] = run.seq * INT64  # an argument of every block, which a checkpoint holds
    if run.recipe.casts and run.kernels.eager and not run.model.learned_positions:
        embedding["positions"] *= FP32 // run.recipe.activation  # in the dtype of the stream
    tokens = embedding.pop("tokens", 0)
    return {"activations.tokens": tokens, "activations.embedding": sum(embedding.values())}


def layer_kinds(run: RunConfig, layer: int, recompute: str) -> dict[str, int]:
    """Return the bytes that one layer keeps of one micro-batch on one rank, by kind.

    Args:
        run: The run.
        layer: Number of the layer, from 0.
        recompute: "none", "selective" or "full".
    """
    kinds = layer_activations(
        run.model,
        layer=layer,
        attention=run.attention,
        recompute=recompute,
        dropout=run.dropout,
        **_shape(run),
    )
    if run.tuning != "full" and recompute != "full":
        kinds = kinds | {"adapters": _adapter_values(run, layer) * run.recipe.activation}
    return kinds


def _shape(run: RunConfig) -> dict[str, object]:
    return {
        "batch": run.micro_batch,
        "seq": run.seq,
        "kernels": run.kernels,
        "bytes_per_value": run.recipe.activation,
        "tp": run.tp,
        "sequence_parallel": run.sequence_parallel and run.tp > 1,
        "cp": run.cp,
    }


def _adapter_values(run: RunConfig, layer: int) -> int:
    """Values between the two matrices of every adapter of a layer; a routed expert sees its share of the tokens."""
    tokens = run.micro_batch * run.seq // run.cp
    visits = 0
    for tensor in layer_tensors(run.model, layer):
        if tensor.is_adapted and run.lora_targets in ("all", tensor.component):
            visits += tensor.copies * (
                run.model.experts_per_token / run.model.num_experts if tensor.is_expert else 1
            )
    return round(tokens * visits) * run.lora_rank


def gradients_meet(stage: Stage) -> str:
    """Return how the gradients of earlier micro-batches meet the activations of later ones.

    "never" with one micro-batch; "always" if forwards go on behind the first backward, so that as many are in flight
    as before; "fewer" if all forwards come first, as in GPipe, so that one is gone when gradients are there.
    """
    micro_batches = stage.run.num_microbatches
    if micro_batches is None:
        return "never" if stage.run.pp == 1 else "always"
    if micro_batches == 1:
        return "never"
    return "always" if micro_batches * stage.run.virtual_stages > sum(stage.in_flight) else "fewer"
