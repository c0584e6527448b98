"""Worked exercises of rung 06, FSDP."""

from __future__ import annotations

from lablib.calc.parallel import fsdp_step
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
            count += open_parameters(
                f"{name}.{child_name}".lstrip("."), child
            )
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
    """Bytes held in backward and seconds of every rule, and the fastest one that fits."""
    peak, seconds = {}, {}
    for rule, (reshard, units) in rules.items():
        root, *rest = [unit.bytes for unit in units]
        moments = [
            root + 2 * root
        ]  # last: the root's gradients and their buffer
        buffer = 0  # of the last reduce-scatter
        for i in reversed(range(len(rest))):
            weights = rest[i]
            gradients = root + rest[i]
            before = (
                rest[:i] if not reshard else rest[:i][-1:]
            )  # kept, or gathered ahead
            there = root + sum(before) + gradients
            moments.append(there + weights + buffer)  # its backward has ended
            buffer = 2 * rest[i]
            moments.append(
                there + buffer
            )  # its weights are freed, its gradients copied
        peak[rule] = max(moments)
        seconds[rule] = fsdp_step(units, reshard=reshard).seconds
    fits = [rule for rule in rules if peak[rule] <= budget]
    return {
        "peak": peak,
        "seconds": seconds,
        "best": min(fits, key=seconds.get, default=None),
    }
