"""The layers of a pipeline stage, and how many micro-batches are in flight there.

Four stages and 8 micro-batches. GPipe runs all forwards first, so every stage holds 8.
1F1B starts a backward as soon as it can: stage 0 holds 4, then 3, 2, 1.
Interleaving gives each stage v chunks of layers; with v = 2 stage 0 holds 11 chunks, which is 5.5 full stages.

    GPipe m      1F1B min(m, p - i)      interleaved (2 (p - 1 - i) + (v - 1) p + 1) / v

Stage 0 of the last is `p (1 + (p - 1)/(p v))`: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3.
The schedules are those of Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lablib.calc.errors import either

SCHEDULES = ("1f1b", "gpipe", "interleaved")


def chunk_layers(num_layers: int, pp: int, virtual_stages: int = 1) -> tuple[int, int, int] | None:
    """Return the layers of the first, every middle and the last chunk, or None if they cannot be cut so.

    Where they are not equal, embedding and head count as a layer each, as Llama 3's did: 126 + 2 over 16 stages. Where that
    is not enough, and a stage is one chunk, the first and the last hold what is left: 61 layers are 3 + 14 x 4 + 2. A stage
    without a layer is none, so that 61 layers make no 32 stages, 1 + 30 x 2 + 0.
    """
    chunks = pp * virtual_stages
    if num_layers % chunks == 0:
        return (num_layers // chunks,) * 3
    middle = -(-(num_layers + 2) // chunks)
    short = chunks * middle - num_layers
    if chunks == 1 or (short != 2 if virtual_stages > 1 else short > 2 * (middle - 1)):
        return None
    return middle - short // 2, middle, middle - (short - short // 2)


def layers_per_stage(num_layers: int, pp: int, virtual_stages: int = 1) -> list[int]:
    """Return the layers of each stage, all its chunks together, where nothing is said of them; a ValueError if they cannot be cut."""
    cut = chunk_layers(num_layers, pp, virtual_stages)
    if cut is None:
        usable = [n for n in range(1, num_layers + 1) if chunk_layers(num_layers, n, virtual_stages)]
        near = sorted(sorted(usable, key=lambda n: abs(n - pp))[:6])
        times = f" times virtual_stages={virtual_stages}" if virtual_stages > 1 else ""
        raise ValueError(
            f"pp={pp}{times} does not cut num_layers={num_layers}, nor {num_layers} + 2 (embedding and head as a "
            f"layer each), into even chunks; use {f'pp={either(near)}' if near else 'fewer virtual_stages'}, or give layers_per_stage"
        )
    first, middle, last = cut
    sizes = [middle * virtual_stages] * pp
    sizes[0] -= middle - first
    sizes[-1] -= middle - last
    return sizes


def stage_layers(
    num_layers: int, pp: int, virtual_stages: int = 1, layers_per_stage: Sequence[int] | None = None
) -> list[list[range]]:
    """Return the layers of every stage, as one range per chunk.

    Chunk c of stage i comes after chunk c of stage i - 1; the second chunks start after the last stage's first.

    Args:
        virtual_stages: Chunks in each stage, `v`.
        layers_per_stage: Layers of each stage where they are not equal, as Llama 3 did (arXiv 2407.21783, 3.3.2).
    """
    sizes = None if layers_per_stage is None else tuple(layers_per_stage)
    return [list(chunks) for chunks in _stages(num_layers, pp, virtual_stages, sizes)]


def layers_of_stage(
    num_layers: int, pp: int, virtual_stages: int, layers_per_stage: Sequence[int] | None, stage: int
) -> list[range]:
    """Return the layers of one stage, as one range per chunk; of many stages only the first question costs.

    Args:
        stage: Number of the stage, from 0.
    """
    sizes = None if layers_per_stage is None else tuple(layers_per_stage)
    return list(_stages(num_layers, pp, virtual_stages, sizes)[stage])


@lru_cache(maxsize=256)
def _stages(
    num_layers: int, pp: int, virtual_stages: int, sizes: tuple[int, ...] | None
) -> tuple[tuple[range, ...], ...]:
    if sizes is None:
        sizes = tuple(layers_per_stage(num_layers, pp, virtual_stages))
    if len(sizes) != pp or sum(sizes) != num_layers or min(sizes) < 0:
        below = ", one of them below 0" if sizes and min(sizes) < 0 else ""
        raise ValueError(
            f"layers_per_stage={list(sizes)} must have pp={pp} entries that sum to num_layers={num_layers}; "
            f"it has {len(sizes)} that sum to {sum(sizes)}{below}"
        )
    if 0 in sizes[1:-1]:
        raise ValueError(
            f"layers_per_stage={list(sizes)} leaves stage {sizes.index(0, 1)} nothing to do: only the first stage, "
            "which has the embedding, and the last, which has the head, can be without layers; "
            f"give it at least 1, or use pp={pp - sizes[1:-1].count(0)}"
        )
    # One layer less than a multiple, at the ends: the embedding stands for a layer of the first chunk, the head for one
    # of the last, as Megatron-LM counts them with --account-for-embedding-in-pipeline-split and -loss-.
    short = [-size % virtual_stages for size in sizes]
    if any(short[1:-1]) or max(short) > 1 or (pp == 1 and short[0]):
        raise ValueError(f"virtual_stages={virtual_stages} does not divide layers_per_stage={list(sizes)}")
    stages: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for chunk in range(virtual_stages):
        for number, size in enumerate(sizes):
            less = (number, chunk) in ((0, 0), (pp - 1, virtual_stages - 1)) and short[number]
            end = start + -(-size // virtual_stages) - less
            stages[number].append(range(start, end))
            start = end
    return tuple(tuple(chunks) for chunks in stages)


def in_flight(
    schedule: str, stage: int, pp: int, *, virtual_stages: int = 1, num_microbatches: int | None = None
) -> list[int]:
    """Return how many micro-batches each chunk of a stage holds at the stage's peak.

    Args:
        schedule: "1f1b", "gpipe" or "interleaved".
        stage: Number of the stage, from 0.
        pp: Pipeline stages, `p`.
        virtual_stages: Chunks in a stage, `v`; more than 1 only when interleaved.
        num_microbatches: Micro-batches of a step, `m`; None means enough to fill the pipeline. GPipe needs it.
    """
    if pp == 1:
        return [1] * virtual_stages
    if schedule == "gpipe":
        if num_microbatches is None:
            raise ValueError("schedule='gpipe' holds every micro-batch of the step: give num_microbatches")
        return [num_microbatches]
    chunks = 2 * (pp - 1 - stage) + (virtual_stages - 1) * pp + 1 if virtual_stages > 1 else pp - stage
    if num_microbatches is not None:
        chunks = min(chunks, num_microbatches * virtual_stages)
    # Forwards run p micro-batches through a chunk, then p through the next, and begin again.
    whole, left = divmod(chunks, pp * virtual_stages)
    return [whole * pp + min(max(left - chunk * pp, 0), pp) for chunk in range(virtual_stages)]
