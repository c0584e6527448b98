"""ZeRO, the zero redundancy optimizer: data parallelism where ranks stop holding the same things.

    model = ZeRO2(module, lambda shards: torch.optim.AdamW(shards, lr=1e-3))
    model.backward(loss(model(x)))      # x is this rank's part of the batch; several times to accumulate
    model.step(max_norm=1.0)            # instead of the optimizer's step and zero_grad

What each rank holds of N, and sends, for ψ parameters with gradients and optimizer states:

    stage 1    all weights    all gradients     1/N of optimizer    2ψ(N-1)/N sent, as DDP
    stage 2    all weights    1/N               1/N                 2ψ(N-1)/N
    stage 3    1/N            1/N               1/N                 3ψ(N-1)/N

Read `flat_shards` first, then `stages_1_2` and `stage_3`.

Paper: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lablib.toys.zero.flat_shards import FlatShards
from lablib.toys.zero.stage_3 import ZeRO3
from lablib.toys.zero.stages_1_2 import ZeRO1, ZeRO2

__all__ = ["STAGES", "FlatShards", "ZeRO1", "ZeRO2", "ZeRO3", "held_bytes"]

#: The class of each stage.
STAGES: dict[int, type[ZeRO1]] = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}

# torch.optim's names for what `lablib.calc.parallel.state_terms` calls otherwise.
_MOMENTS = {"exp_avg": "momentum", "exp_avg_sq": "variance", "momentum_buffer": "momentum"}


def held_bytes(model: ZeRO1) -> dict[str, int]:
    """Return the bytes of model states in this rank's memory now, by the terms of `lablib.calc.parallel.zero`.

    Memory is counted, not tensors: a storage counts once, for the first term that has it, padding included.
    The optimizer's step counters and what stands in for resharded weights, one value a tensor, are left out.
    """
    tensors: dict[str, list[Tensor | None]] = {
        "weights": [*model.module.parameters(), *[t for f in model.flats for t in (f.full, f.shard)]],
        "gradients": [*[p.grad for p in model.module.parameters()], *_gradients(model)],
        "master_weights": [flat.sharded_param for flat in model.trained],
    }
    for flat in model.trained:
        for name, value in model.optimizer.state.get(flat.sharded_param, {}).items():
            if isinstance(value, Tensor) and name != "step":
                tensors.setdefault(_MOMENTS.get(name, name), []).append(value)
    seen = {flat.placeholder.untyped_storage().data_ptr() for flat in model.flats}
    return {term: _count(list_, seen) for term, list_ in tensors.items()}


def _gradients(model: ZeRO1) -> Iterable[Tensor | None]:
    for flat in model.trained:
        yield from (flat.unsharded_grad, flat.sharded_grad, flat.sharded_param.grad)


def _count(tensors: list[Tensor | None], seen: set[int]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    unique = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in seen}
    seen.update(unique)
    return sum(unique.values())
