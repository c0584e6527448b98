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
    homes = {}  # by parameter, the names of the modules that have it: more than one if it is tied
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(parameter, []).append(f"{name}.")

    def open_parameters(name, module):
        found = set(
            module.parameters(recurse=False)
        )  # a tied one counts once
        for child_name, child in module.named_children():
            found |= open_parameters(
                f"{name}.{child_name}".lstrip("."), child
            )
        # A parameter belongs to one unit: with its other half elsewhere it stays open.
        whole = all(
            home.startswith(f"{name}.") for p in found for home in homes[p]
        )
        count = sum(p.numel() for p in found)
        container = isinstance(module, nn.ModuleList)
        if name and whole and count >= least and not container:
            units.append(name)
            return set()
        return found

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


def choose_wrapping(parts, tied, budget, price):
    """Try each wrapping that a reason speaks for, and take the fastest that fits."""
    inner = list(parts)[1:-1]  # attention and MLP of every block
    wrappings = [[]]  # all in the root: one collective
    # Finer for memory, one block as the rule, several blocks where latency shows.
    for size in [1, *range(2, len(inner) + 1, 2)]:
        blocks = [inner[i : i + size] for i in range(0, len(inner), size)]
        wrappings.append(blocks)
        if (
            not tied
        ):  # a large table is unsharded throughout, if it is the root's
            wrappings.append([["embed"], *blocks, ["head"]])
    best, least = None, float("inf")
    for units in wrappings:
        for reshard in (True, False):
            held, seconds = price(units, reshard)
            if held <= budget and seconds < least:
                best, least = {"units": units, "reshard": reshard}, seconds
    return best
