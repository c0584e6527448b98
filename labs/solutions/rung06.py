"""Worked exercises of rung 06, FSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def apply_fsdp(model, mesh, most, fp32):
    """Shard the largest modules that fit, from the inside out; the root takes the rest."""
    bf16 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for name in fp32:  # first: the unit around it would take it
        full = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=torch.float32
        )
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=full)
    owners = [
        id(p) for m in model.modules() for p in m.parameters(recurse=False)
    ]

    def wrap(around):
        for child in around.children():
            values = list(child.parameters())
            size = 2 * sum(p.numel() for p in values)
            no_forward = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if no_forward or size > most:
                wrap(child)
            tied = any(owners.count(id(p)) > 1 for p in values)
            # Small ones, such as norms, stay with the unit around them.
            if not no_forward and not tied and size > most / 10:
                fully_shard(child, mesh=mesh, mp_policy=bf16)

    wrap(model)
    fully_shard(model, mesh=mesh, mp_policy=bf16, reshard_after_forward=False)


def find_fault(job):
    """Take a step, and ask each block whether its weights are fresh, have moved, and are the replicas'."""

    def rows(block):
        mine = [p.detach().to_local().flatten() for p in block.parameters()]
        return torch.cat(mine)

    model, optimizer = job.start()
    starts = [rows(block) for block in model.blocks]
    job.step(model, optimizer, 0)
    found = None
    for i, block in enumerate(model.blocks):
        gathered = not isinstance(next(block.parameters()), DTensor)
        block.reshard()
        mine = rows(block)
        ranks = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(ranks, mine)
        # Ranks 0 and 2 have the same rows, and so have 1 and 3.
        alike = all(torch.equal(ranks[r], ranks[r + 2]) for r in (0, 1))
        still = torch.equal(mine, starts[i])
        if gathered or still or not alike:
            what = "stale" if gathered else "still" if still else "apart"
            found = {"unit": f"blocks.{i}", "what": what}
    return found


def write_checkpoint(disk, rank, ranks, step, state, barrier):
    """Write aside, wait for all, rename."""
    aside = f"tmp-{step}"
    if rank == 0:
        disk.remove(aside)  # what a crashed job has left
    barrier()
    disk.write(f"{aside}/rank-{rank}", {**state, "step": step})
    barrier()
    if rank == 0:
        disk.rename(aside, f"step-{step}")
    barrier()


def choose_wrapping(parts, tied, budget, price):
    """Begin with the rule; what it holds and takes says which to try next."""
    inner = list(parts)[1:-1]  # attention and MLP of every block
    best, least = None, float("inf")

    def better(size, reshard):
        """Price units of so many parts: no more than the budget, and faster?"""
        nonlocal best, least
        units = [inner[i : i + size] for i in range(0, len(inner), size)]
        if size > len(inner):
            units = []  # all of it in the root: one collective
        elif (
            not tied
        ):  # a large table is unsharded throughout, if it is the root's
            units = [["embed"], *units, ["head"]]
        held, seconds = price(units, reshard)
        if held > budget or seconds >= least:
            return False
        best, least = {"units": units, "reshard": reshard}, seconds
        return True

    if not better(2, True):  # a block a unit does not fit: finer
        better(1, True)
        better(1, False)
        return best
    freed = not better(2, False)  # room to keep saves a gather
    size = 4
    # Latency: coarser as long as that is faster.
    while size <= len(inner) and better(size, freed):
        size *= 2
    better(len(inner) + 1, True)
    return best
