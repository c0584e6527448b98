"""What DeepSpeed's ZeRO holds on each rank, tensor by tensor: padding, whole tensors and buckets, to the byte.

The paper's stage 3 is `(w + g + K) ψ / N`: bytes of weights, gradients and optimizer a parameter, ψ parameters, N
ranks. DeepSpeed holds more: padding, which is nothing in a large model, and buckets, which at their default size show
in any.

- Stages 1 to 3: each rank has an fp32 copy of its part of the weights, in fp32 training too. Stage 0 has a whole one, in
  16 bits only.
- Stages 1 and 2: the array is padded to a multiple of 2 N values. Gradients are kept by whole tensors: those that a
  rank's part touches, at both of its ends.
- Stage 3: each tensor is cut by itself and padded to a multiple of N. Small ones stay whole beside their parts.
- Gradients travel in a bucket of `reduce_bucket_size` values, which is allocated whole, filled or not. With
  `overlap_comm` stages 1 and 2 have two. 500 million values, the default, are 1 GB in 16 bits.

    10 + 5 values on 2 ranks: padded to 16, parts of 8; rank 0 keeps the gradient of the first tensor, 10 values, and
    rank 1 those of both and the one value of padding, 16.

Held to DeepSpeed 0.19.8 on gloo, every rank of 2, 3 and 4; the record is book/data/memory_deepspeed.json.

Chapter: book/memory_calculator.md. Source: DeepSpeed, runtime/zero/stage_1_and_2.py, stage3.py,
partition_parameters.py and parameter_offload.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lablib.calc.choices import one_of
from lablib.calc.fsdp_shards import in_order
from lablib.calc.memory import run_config
from lablib.calc.models import ModelConfig
from lablib.calc.rank_memory import stage_tensors

FP32 = 4
REDUCE_BUCKET_SIZE = 500_000_000
PERSISTENCE_THRESHOLD = 100_000
VALUES = {"fp32": 4, "mixed-bf16": 2, "mixed-fp16": 2}


def deepspeed_states(
    sizes: Sequence[int],
    *,
    ranks: int,
    rank: int,
    stage: int,
    value: int = 2,
    reduce_bucket_size: int = REDUCE_BUCKET_SIZE,
    overlap_comm: bool = False,
    persistence_threshold: int = PERSISTENCE_THRESHOLD,
) -> dict[str, int]:
    """Return the bytes of states of one rank between backward and step with Adam, by term, and of its buckets.

    Args:
        sizes: Values of each parameter, in the order in which the model registers them.
        ranks: Data-parallel ranks, N.
        rank: Which one.
        stage: 0 to 3.
        value: Bytes of a weight and of a gradient: 2 or 4.
        reduce_bucket_size: Values in a bucket, as in DeepSpeed's configuration.
        overlap_comm: DeepSpeed's setting of this name; stages 1 and 2 fill one bucket while the other travels.
        persistence_threshold: `stage3_param_persistence_threshold`: tensors of up to so many values stay whole.

    Returns:
        "weights", "persistent_weights" (stage 3), "gradients", "master_weights", "momentum", "variance" and,
        from stage 1 on, "communication_buckets", which stage 3 has all the time and stages 1 and 2 during backward.

    Raises:
        ValueError: If the rank, the stage or the bytes of a value do not exist.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} is not one of the ranks={ranks}; use 0 to {ranks - 1}")
    if stage not in (0, 1, 2, 3) or value not in (2, FP32):
        raise ValueError(f"stage={stage!r} must be 0, 1, 2 or 3, and value={value!r} 2 or 4 bytes")
    bucket = reduce_bucket_size * value
    if stage == 0:
        params = sum(sizes)
        master = 0 if value == FP32 else params
        return _terms(params * value, params * value, master, params)
    if stage == 3:
        own = sum(-(-size // ranks) for size in sizes)
        terms = _terms(own * value, own * value, own, own)
        whole = sum(size for size in sizes if size <= persistence_threshold) * value
        return terms | {"persistent_weights": whole, "communication_buckets": bucket}
    padded = -(-sum(sizes) // (2 * ranks)) * 2 * ranks
    part = padded // ranks
    gradients = touched(sizes, rank * part, (rank + 1) * part)
    terms = _terms(padded * value, gradients * value, part, part)
    return terms | {"communication_buckets": bucket * (2 if overlap_comm else 1)}


def _terms(weights: int, gradients: int, master: int, moment: int) -> dict[str, int]:
    return {
        "weights": weights,
        "gradients": gradients,
        "master_weights": master * FP32,
        "momentum": moment * FP32,
        "variance": moment * FP32,
    }


def touched(sizes: Sequence[int], start: int, end: int) -> int:
    """Return the values of all tensors of which some lie between two places of the flat array, and padding there.

    Args:
        sizes: Values of each tensor.
        start: The first place.
        end: The place behind the last.
    """
    found, place = 0, 0
    for size in sizes:
        if place < end and place + size > start:
            found += size
        place += size
    return found + max(0, end - max(place, start))


def deepspeed_memory(
    model: ModelConfig | str, *, ranks: int, stage: int, recipe: str = "mixed-bf16", **settings: object
) -> list[dict[str, int]]:
    """Return what `deepspeed_states` says of a model, for every rank.

    Args:
        model: A ModelConfig, or the name of a preset.
        ranks: Data-parallel ranks.
        stage: 0 to 3.
        recipe: "mixed-bf16", "mixed-fp16" or "fp32".
        **settings: `kernels` ("hf" or "toy": they differ in how GPT-2's tensors are cut), and those of `deepspeed_states`.

    Raises:
        ValueError: As `deepspeed_states`, and if DeepSpeed is not known with the recipe.
    """
    one_of("recipe", recipe, VALUES)
    run = run_config(model, kernels=str(settings.pop("kernels", "hf")), recipe=recipe)
    tensors = stage_tensors(run, 0, [range(run.model.num_layers)])
    sizes = [prod(shape) for unit in tensors for shape in in_order(run, unit)]
    how = {"ranks": ranks, "stage": stage, "value": VALUES[recipe], **settings}
    return [deepspeed_states(sizes, rank=rank, **how) for rank in range(ranks)]
