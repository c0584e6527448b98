"""The optimizer's state of a ZeRO model, whole and by parameter name, as checkpoints want it.

Shards depend on the number of ranks, names do not: what four ranks of stage 3 saved, one rank of stage 1 can load.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lablib.toys.collective_names import all_gather
from lablib.toys.flat_shards import FlatShards

MASTER = "master"


@torch.no_grad()
def gather(
    module: nn.Module, flats: list[FlatShards], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the state of every parameter, on every rank."""
    names = {p: name for name, p in module.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for flat in flats:
        mine = dict(optimizer.state.get(flat.updated, {}))
        if flat.master is not None:
            flat.adopt()
            mine[MASTER] = flat.updated.detach()
        for key, value in mine.items():
            parts = [value] * len(flat.params)  # one for all, such as the number of steps
            if isinstance(value, Tensor) and value.shape == flat.updated.shape:
                whole = value.new_empty(flat.world_size * flat.width)
                all_gather(whole, value, group=flat.group)
                parts = flat.split(whole)
            for p, part in zip(flat.params, parts, strict=True):
                states.setdefault(names[p], {})[key] = part.clone() if isinstance(part, Tensor) else part
    return states


def _is_per_element(value: object, p: Tensor) -> bool:
    """Whether a piece of state has a number for each of a parameter's; NAdam's `mu_product` is one for all."""
    return isinstance(value, Tensor) and value.shape == p.shape


@torch.no_grad()
def scatter(
    module: nn.Module,
    flats: list[FlatShards],
    optimizer: torch.optim.Optimizer,
    states: dict[str, dict[str, Tensor]],
) -> None:
    """Give every shard its piece of the state of the parameters.

    Args:
        module: As in `gather`.
        flats: As in `gather`.
        optimizer: As in `gather`.
        states: As from `gather`, the same on every rank.

    Raises:
        ValueError: If a parameter that is trained has no state, or not that of its neighbours; nothing is changed then.
    """
    names = {p: name for name, p in module.named_parameters()}
    for flat in flats:
        keys = {frozenset(states.get(names[p], {})) for p in flat.params}
        if len(keys) > 1 or (flat.master is not None) != (MASTER in next(iter(keys))):
            raise ValueError(
                f"the state of {names[flat.params[0]]} and its neighbours is not of this model: load what "
                "full_optimizer_state returned for the same module and master dtype"
            )
    for flat in flats:
        mine = {}
        for key, value in states.get(names[flat.params[0]], {}).items():
            mine[key] = value
            if key != "step" and all(_is_per_element(states[names[p]][key], p) for p in flat.params):
                whole = value.new_zeros(flat.world_size * flat.width)
                for p, part in zip(flat.params, flat.split(whole), strict=True):
                    part.copy_(states[names[p]][key])
                mine[key] = whole.chunk(flat.world_size)[flat.rank]
            mine[key] = mine[key].clone() if isinstance(value, Tensor) else value
        if flat.master is not None:
            flat.updated.copy_(mine.pop(MASTER))
        optimizer.state[flat.updated] = mine
