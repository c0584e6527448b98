"""What `lablib.launch.fsdp.shard` did to a model, as data and as a short table.

Which rows of a parameter a rank keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from lablib.calc.parallel import FSDPTraffic, Unit, UnshardedState, fsdp_traffic, gathered_timeline, padded
from lablib.calc.units import format_bytes


def own_rows(parameter: DTensor) -> tuple[int, int]:
    """Return the first and the end of the rows of dim 0 that this rank keeps.

    n ranks keep ceil(rows / n) each, as far as there are any: the last ones may keep fewer, or none.

    Args:
        parameter: Sharded by FSDP2: along dim 0 of one mesh dim, replicated over the other.

    Raises:
        ValueError: If it is sharded in another way.
    """
    sharded = [dim for dim, placement in enumerate(parameter.placements) if placement == Shard(0)]
    others = [p for p in parameter.placements if p != Shard(0) and not isinstance(p, Replicate)]
    if len(sharded) != 1 or others:
        raise ValueError(f"placements {parameter.placements}: expected one Shard(0), as FSDP2 makes them")
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    each = -(-rows // mesh.size(sharded[0]))
    first = min(rows, mesh.get_local_rank(sharded[0]) * each)
    return first, min(rows, first + each)


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What was sharded, over which ranks, in which precision.

    Attributes:
        units: The root first, then the others in the order of the model.
        wrap: The rule that chose them.
        shards: Ranks that share a parameter.
        replicas: Copies of the sharded model; above 1 it is hybrid sharding (HSDP).
        device: "cpu", "cuda", ...
        mesh: The mesh in words.
        reshard: `reshard_after_forward` of the units.
        root_reshard: The same of the root.
        param_bytes: Bytes of a gathered value.
        reduce_bytes: Bytes of a reduced gradient value.
        precision: What is cast to what, in words.
        prefetch: Units gathered ahead, or None for FSDP2's own choice.
        order: What was applied to each block, in this order.
        notes: What you may not expect.
    """

    units: tuple[Unit, ...]
    wrap: str
    shards: int
    replicas: int
    device: str
    mesh: str
    reshard: bool | int
    root_reshard: bool | int
    param_bytes: int
    reduce_bytes: int
    precision: str
    prefetch: int | None
    order: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        return sum(unit.params for unit in self.units)

    @property
    def params_per_rank(self) -> int:
        """Parameters that a rank keeps, padding included."""
        return sum(map(self.unit_shard, self.units))

    def unit_shard(self, unit: Unit) -> int:
        """Return the parameters of a unit that a rank keeps, padding included."""
        return padded(unit.shapes + unit.frozen, self.shards) // self.shards

    def traffic(self, *, micro_batches: int = 1, sync_every: bool = True, keep_gathered: bool = False) -> FSDPTraffic:
        """Return the collectives of one optimizer step of this model, as `lablib.calc.parallel.fsdp` counts them."""
        return fsdp_traffic(
            self.units,
            self.shards,
            replicas=self.replicas,
            reshard=self.reshard,
            root_reshard=self.root_reshard,
            param_bytes=self.param_bytes,
            reduce_bytes=self.reduce_bytes,
            micro_batches=micro_batches,
            sync_every=sync_every,
            keep_gathered=keep_gathered,
        )

    def gathered_timeline(self) -> list[UnshardedState]:
        """Return what is gathered after every event of a step of this model, by `lablib.calc.parallel.fsdp`.

        It is what the installed PyTorch does.
        """
        return gathered_timeline(
            self.units,
            self.shards,
            reshard=self.reshard,
            root_reshard=self.root_reshard,
            prefetch=self.prefetch,
            param_bytes=self.param_bytes,
            torch=torch.__version__,
        )

    def peak_unsharded_bytes(self) -> int:
        """Return the most bytes of gathered parameters that a rank holds at a time, besides its shards."""
        return max(moment.total for moment in self.gathered_timeline())

    def __str__(self) -> str:
        rows = [("unit", "params", "kept by a rank")]
        for names, unit in _runs(self.units):
            rows.append((names, f"{unit.params:,}", f"{self.unit_shard(unit):,}"))
        rows.append(("in all", f"{self.params:,}", f"{self.params_per_rank:,}"))
        width = [max(len(row[i]) for row in rows) for i in range(3)]
        table = [f"{a:{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}" for a, b, c in rows]
        facts = {
            "mesh": self.mesh,
            "precision": self.precision,
            "after forward": f"units {_kept(self.reshard)}, root {_kept(self.root_reshard)}",
            "prefetch": "FSDP2's own" if self.prefetch is None else f"{self.prefetch} ahead",
            "order": " -> ".join(self.order),
            "gathered": f"at most {format_bytes(self.peak_unsharded_bytes(), 'MB')} at a time",
        }
        return "\n".join([*table, *(f"{name}: {text}" for name, text in facts.items()), *self.notes])


def _kept(reshard: bool | int) -> str:
    if reshard is True:
        return "resharded"
    return "kept" if reshard is False else f"resharded over {reshard} ranks"


def _runs(units: tuple[Unit, ...]) -> list[tuple[str, Unit]]:
    """Return one line for each run of units of the same shapes."""
    lines: list[list[Unit]] = []
    for unit in units:
        if lines and (lines[-1][0].shapes, lines[-1][0].frozen) == (unit.shapes, unit.frozen):
            lines[-1].append(unit)
        else:
            lines.append([unit])
    return [
        ((same[0].name or "(root)") + (f" ... {same[-1].name}, {len(same)} units" if len(same) > 1 else ""), same[0])
        for same in lines
    ]
