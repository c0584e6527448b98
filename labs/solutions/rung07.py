"""Worked exercises of rung 07, 3D parallelism."""

from __future__ import annotations


def sketch(sizes, gpus_per_node):
    """Ranks that agree in every other coordinate are a group.

    A rank's coordinates are the digits of its number, and the first
    axis is the digit that changes fastest.
    An axis leaves a node if any of its groups does.
    """
    ranks = 1
    for size in sizes.values():
        ranks *= size
    groups, crossing = {}, []
    for axis in sizes:
        alike = {}
        for rank in range(ranks):
            left, others = rank, []
            for name, size in sizes.items():
                left, at = divmod(left, size)
                if name != axis:
                    others.append(at)
            alike.setdefault(tuple(others), []).append(rank)
        groups[axis] = list(alike.values())
        for group in groups[axis]:
            nodes = {rank // gpus_per_node for rank in group}
            if len(nodes) > 1 and axis not in crossing:
                crossing.append(axis)
    return {"groups": groups, "crossing": crossing}


def build_mesh(sizes):
    """One world, unflattened twice: what is sharded, what is read."""
    from torch.distributed.device_mesh import init_device_mesh

    pp, replicas, shards, cp, tp = (
        sizes[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    ranks = pp * replicas * shards * cp * tp
    world = init_device_mesh("cpu", (ranks,), mesh_dim_names=("world",))
    held = world._unflatten(
        0,
        (pp, replicas, shards * cp, tp),
        ("pp", "dp_replicate", "fsdp", "tp"),
    )
    read = world._unflatten(
        0, (pp, replicas * shards, cp, tp), ("pp", "batch", "cp", "tp")
    )
    return {
        "pp": held["pp"],
        "tp": held["tp"],
        "cp": read["cp"],
        "batch": read["batch"],
        "hsdp": held["dp_replicate", "fsdp"],
        "loss": read["batch", "cp"]._flatten("loss"),
        "norm": held["pp", "fsdp", "tp"]._flatten("norm"),
    }


def find_fault(job, mesh):
    """Along each axis a value is a copy, or it is a part."""
    import torch.distributed as dist

    seen, axes = job.run(mesh), mesh.mesh_dim_names
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (mesh.get_coordinate(), seen))
    held = {}  # by what it is, and by the rank's coordinates
    for at, theirs in of_all:
        named = {"samples": theirs["samples"], **theirs["gradients"]}
        for what, value in named.items():
            held.setdefault(what, {})[at] = value.float()
    for what, by_rank in held.items():
        wrong = set()
        for at, value in by_rank.items():
            for i, axis in enumerate(axes):
                other = by_rank.get((*at[:i], 1 - at[i], *at[i + 1 :]))
                if other is None:
                    continue  # the other stage has other parameters
                near = (value - other).norm() <= 1e-4 * value.norm()
                if bool(near) != (axis in copied(what)):
                    wrong.add(axis)
        if wrong:
            return what, wrong

    def norm(again=()):
        """Of one copy of each part, or of all along these axes."""
        squares = 0.0
        for what in set(held) - {"samples"}:
            once = copied(what).difference(again)
            for at, value in held[what].items():
                here = dict(zip(axes, at, strict=True))
                if not any(here[axis] for axis in once):
                    squares += value.square().sum().item()
        return squares**0.5

    for again in ((), *((axis,) for axis in axes)):
        if abs(seen["norm"] / norm(again) - 1) < 1e-4:
            return ("norm", set(again)) if again else None
    return "norm", set()


def copied(what):
    """The axes along which ranks hold copies of it."""
    if what == "samples":
        return {"pp", "tp"}
    if what == "embed":
        return {"pp", "dp", "tp"}
    return {"dp", "tp"} if what.endswith("scale") else {"dp"}


def plan_cluster(job):
    """Enumerate, drop what does not fit, and lose as little as you can.

    tp fills the node, and replicas share their optimizer. What is left
    to lose is the bubble and what is computed again: a third of a step,
    or a few percent where attention alone is.
    """
    again = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
    best, least = None, float("inf")
    for pp in range(1, job.model.num_layers + 1):
        dp, left = divmod(job.gpus, job.gpus_per_node * pp)
        if left or job.global_batch % dp:
            continue
        micro_batches = job.global_batch // dp
        for stages in range(1, 17):  # of each rank
            bubble = (pp - 1) / (stages * micro_batches)
            for recompute, more in again.items():
                time = (1 + bubble) * (1 + more)
                if time >= least:
                    continue
                layout = {
                    "tp": job.gpus_per_node,
                    "pp": pp,
                    "dp": dp,
                    "zero": 1 if dp > 1 else 0,
                    "recompute": recompute,
                    "schedule": "interleaved" if stages > 1 else "1f1b",
                    "virtual_stages": stages,
                }
                if job.peak(**layout) <= job.memory:
                    best, least = layout, time
    return best
