"""Which rows of a parameter a rank keeps."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate, Shard


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
