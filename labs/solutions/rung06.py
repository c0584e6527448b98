"""Worked exercises of rung 06, FSDP."""

from __future__ import annotations

from torch import nn


def count_collectives(root, units, reshard, micro_batches, sync_every):
    """Messages and values of one optimizer step: the root is gathered once a pass, a freed unit twice."""
    gathers = 1 + len(units) * (2 if reshard else 1)
    gathered = root + sum(units) * (2 if reshard else 1)
    reductions = micro_batches if sync_every else 1
    return {
        "all_gathers": micro_batches * gathers,
        "reduce_scatters": reductions * (1 + len(units)),
        "gathered": micro_batches * gathered,
        "reduced": reductions * (root + sum(units)),
    }


def units_by_size(model, least):
    """Walk the tree bottom-up; a module with `least` parameters that are in no unit yet becomes one."""
    units = []

    def open_parameters(name, module):
        count = sum(p.numel() for p in module.parameters(recurse=False))
        for child_name, child in module.named_children():
            count += open_parameters(f"{name}.{child_name}".lstrip("."), child)
        if name and count >= least and not isinstance(module, nn.ModuleList):
            units.append(name)
            return 0
        return count

    open_parameters("", model)
    return units


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


def choose_wrapping(rules, budget):
    """Peak and messages of every rule, and the one that fits with the fewest messages."""
    peak, messages = {}, {}
    for rule, (root, *units) in rules.items():
        # The root is there throughout. A unit exists twice while it is copied, beside the buffer of the one before.
        copies = [2 * unit + before for before, unit in zip([root, *units], units, strict=False)]
        peak[rule] = root + max(copies, default=root)
        messages[rule] = (1 + 2 * len(units)) + (1 + len(units))
    fits = [rule for rule in rules if peak[rule] <= budget]
    return {"peak": peak, "messages": messages, "best": min(fits, key=messages.get, default=None)}
