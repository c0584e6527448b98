"""Planted defects of rung 06: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import functools

import numpy as np
import torch
from torch import nn

from lablib.calc.parallel import fsdp_step, peak_held_bytes
from lablib.checks.rung06 import _gathered, _held
from tests.planted import listed


def _count(
    root,
    units,
    reshard,
    micro_batches,
    sync_every,
    *,
    root_passes=1,
    freed_passes=2,
    last_again=True,
    gather_every=True,
    scatters_each=1,
    scatter_turns=None,
    root_scatters=True,
):
    passes = freed_passes if reshard else 1
    skipped = 0 if last_again or not reshard or not units else 1
    turns = micro_batches if gather_every else 1
    reductions = scatter_turns or (micro_batches if sync_every else 1)
    return {
        "all_gathers": turns * (root_passes + passes * len(units) - skipped),
        "reduce_scatters": reductions * scatters_each * (root_scatters + len(units)),
        "gathered": turns * (root_passes * root + passes * sum(units) - skipped * (units or [0])[-1]),
        "reduced": reductions * scatters_each * (root * root_scatters + sum(units)),
    }


class count_collectives:
    root_gathered_twice = lambda *case: _count(*case, root_passes=2)
    never_gathered_again = lambda *case: _count(*case, freed_passes=1)
    last_unit_not_again = lambda *case: _count(*case, last_again=False)
    gathers_once_a_step = lambda *case: _count(*case, gather_every=False)
    scatters_in_forward_too = lambda *case: _count(*case, scatters_each=2)

    def always_reduces(root, units, reshard, micro_batches, sync_every):
        return _count(root, units, reshard, micro_batches, sync_every, scatter_turns=micro_batches)

    root_without_gradients = lambda *case: _count(*case, root_scatters=False)
    root_not_gathered = lambda *case: _count(*case, root_passes=0)

    def root_kept_over_micro_batches(root, units, reshard, micro_batches, sync_every):
        counts = _count(root, units, reshard, micro_batches, sync_every)
        spared = micro_batches - 1
        return {**counts, "all_gathers": counts["all_gathers"] - spared, "gathered": counts["gathered"] - spared * root}

    def waits_for_an_empty_list(root, units, reshard, micro_batches, sync_every):
        total = 0
        while units:
            total += units[-1]
        return _count(root, units, reshard, micro_batches, sync_every)

    def right(root, units, reshard, micro_batches, sync_every):
        """Second solution: write the messages down and count them."""
        gathers, scatters = [], []
        for turn in range(micro_batches):
            gathers += [root, *units]
            if reshard:
                gathers += reversed(units)
            if sync_every or turn == micro_batches - 1:
                scatters += [*reversed(units), root]
        return {
            "all_gathers": len(gathers),
            "reduce_scatters": len(scatters),
            "gathered": sum(gathers),
            "reduced": sum(scatters),
        }

    def right_2(root, units, reshard, micro_batches, sync_every):
        """Third solution: every unit by itself, and all of them added up in numpy."""
        sizes = np.array([root, *units])
        gathers = np.where(np.arange(len(sizes)) == 0, 1, 2 if reshard else 1) * micro_batches
        scatters = np.full(len(sizes), micro_batches if sync_every else 1)
        return {
            "reduced": (scatters * sizes).sum(),
            "gathered": (gathers * sizes).sum(),
            "reduce_scatters": scatters.sum(),
            "all_gathers": float(gathers.sum()),
        }


def _size(module):
    return sum(p.numel() for p in module.parameters())


def _inside_out(model):
    named = [(name, m) for name, m in model.named_modules() if name and not isinstance(m, nn.ModuleList)]
    return sorted(named, key=lambda item: -item[0].count("."))


class units_by_size:
    def counts_inner_units_again(model, least):
        return [name for name, module in _inside_out(model) if _size(module) >= least]

    def leaves_only(model, least):
        return [n for n, m in _inside_out(model) if not list(m.children()) and _size(m) >= least]

    outside_first = lambda model, least: list(reversed(units_by_size.right(model, least)))
    with_the_root = lambda model, least: [*units_by_size.right(model, least), ""]

    def lists_too(model, least):
        return _close(model, [(n, m) for n, m in sorted(model.named_modules(), key=_depth) if n], least)

    def right(model, least):
        """Second solution: no recursion; the deepest modules first, each takes the parameters that are left."""
        return _close(model, _inside_out(model), least)

    def right_2(model, least):
        """Third solution: each parameter is handed up from module to module until one of them closes."""
        open_, units = {}, []
        for name, parameter in model.named_parameters():
            home = name.rpartition(".")[0]
            open_[home] = open_.get(home, 0) + parameter.numel()
        while any(open_):
            deepest = max(open_, key=lambda name: (name.count("."), bool(name)))
            count = open_.pop(deepest)
            if count >= least and not isinstance(model.get_submodule(deepest), nn.ModuleList):
                units.append(deepest)
            else:
                above = deepest.rpartition(".")[0]
                open_[above] = open_.get(above, 0) + count
        return tuple(units)

    def right_3(model, least):
        """Fourth solution: a generator, which hands over each name as soon as a module closes."""
        open_ = {}
        for name, module in reversed(list(model.named_modules())):
            count = sum(p.numel() for p in module.parameters(recurse=False))
            count += sum(open_[f"{name}.{child}".lstrip(".")] for child, _ in module.named_children())
            closes = name and count >= least and not isinstance(module, nn.ModuleList)
            open_[name] = 0 if closes else count
            if closes:
                yield name

    def lists_swallow_what_is_open(model, least):
        return _walk(model, least, list_keeps=True)

    def own_parameters_forgotten(model, least):
        return _walk(model, least, own=False)

    def any_leaf_and_its_parent(model, least):
        """Closes at the size of a unit without asking what is inside a list."""
        return [name for name in units_by_size.right(model, least) if name.count(".") < 2]


def _walk(module, least, *, list_keeps=False, own=True):
    """Close units by recursion; a mistake about what is handed on, or about what a module has of its own."""
    units = []

    def open_in(name, module):
        children = list(module.named_children())
        count = sum(p.numel() for p in module.parameters(recurse=False)) if own or not children else 0
        count += sum(open_in(f"{name}.{child}".lstrip("."), inner) for child, inner in children)
        listed = isinstance(module, nn.ModuleList)
        if name and count >= least and (not listed or list_keeps):
            units.extend([] if listed else [name])
            return 0
        return count

    open_in("", module)
    return units


def _depth(item):
    return -item[0].count(".")


def _close(model, modules, least):
    """Close units in the order of `modules`, deepest first, on what is still open."""
    open_ = {name: p.numel() for name, p in model.named_parameters()}
    units = []
    for name, _ in modules:
        mine = [each for each in open_ if each.startswith(f"{name}.")]
        if sum(open_[each] for each in mine) >= least:
            units.append(name)
            for each in mine:
                del open_[each]
    return units


def _write(
    disk,
    rank,
    ranks,
    step,
    state,
    barrier,
    *,
    clear=True,
    wait_after_clear=True,
    wait=True,
    writers=None,
    content=None,
    publishers=(0,),
    forget_old=False,
):
    aside = f"tmp-{step}"
    if clear and rank == 0:
        disk.remove(aside)
    if wait_after_clear:
        barrier()
    if writers is None or rank in writers:
        disk.write(f"{aside}/rank-{rank}", {**state, "step": step} if content is None else content)
    if wait:
        barrier()
    if forget_old and rank == 0:
        disk.remove("step-40")
    if rank in publishers:
        disk.rename(aside, f"step-{step}")
    barrier()


class write_checkpoint:
    def in_place(disk, rank, ranks, step, state, barrier):
        disk.write(f"step-{step}/rank-{rank}", {**state, "step": step})
        barrier()

    does_not_wait = lambda *args: _write(*args, wait=False)
    leaves_the_rest_of_a_crash = lambda *args: _write(*args, clear=False)
    clears_while_others_write = lambda *args: _write(*args, wait_after_clear=False)

    def without_the_optimizer(disk, rank, ranks, step, state, barrier):
        _write(disk, rank, ranks, step, state, barrier, content={"model": state["model"], "step": step})

    def without_the_step(disk, rank, ranks, step, state, barrier):
        _write(disk, rank, ranks, step, state, barrier, content=dict(state))

    everybody_publishes = lambda *args: _write(*args, publishers=range(args[2]))
    nobody_publishes = lambda *args: _write(*args, publishers=())
    old_one_goes_first = lambda *args: _write(*args, forget_old=True)

    def right(disk, rank, ranks, step, state, barrier):
        """Second solution: a fresh folder name instead of clearing, and the last rank renames."""
        name = f"aside-of-{step}"
        while disk.exists(name):
            name += "-again"
        barrier()  # everybody has looked before anybody writes
        saved = {"step": step}
        saved.update(state)
        disk.write(f"{name}/rank-{rank}", saved)
        barrier()
        if rank == ranks - 1:
            disk.rename(name, f"step-{step}")

    def right_2(disk, rank, ranks, step, state, barrier):
        """Third solution: a folder of each rank's own, moved together by one of them while the name is still hidden."""
        if rank == ranks - 1:
            for old in (f"part-{step}", *(f"part-{step}-{r}" for r in range(ranks))):
                if disk.exists(old):
                    disk.remove(old)
        barrier()
        disk.write(f"part-{step}-{rank}/rank-{rank}", dict(step=step, **state))
        barrier()
        for turn in range(ranks):
            if turn == rank:
                disk.rename(f"part-{step}-{rank}/rank-{rank}", f"part-{step}/rank-{rank}")
            barrier()
        if rank == ranks - 1:
            disk.rename(f"part-{step}", f"step-{step}")

    def polls(disk, rank, ranks, step, state, barrier):
        disk.write(f"tmp-{step}/rank-{rank}", {**state, "step": step})
        if rank == 0:
            while not all(disk.exists(f"tmp-{step}/rank-{r}") for r in range(ranks)):
                pass
            disk.rename(f"tmp-{step}", f"step-{step}")

    def writes_for_ever(disk, rank, ranks, step, state, barrier):
        while not disk.exists(f"step-{step}"):
            disk.write(f"tmp-{step}/rank-{rank}", {**state, "step": step})
            barrier()


def _choose(rules, budget, *, time=None, pick=None, **mistake):
    """Return an answer with one mistake: of `rung06._held`, in the seconds, or in the choice."""
    held = mistake.pop("held", None) or functools.partial(_held, **mistake)
    peaks = {rule: held([unit.bytes for unit in units], reshard) for rule, (reshard, units) in rules.items()}
    time = time or (lambda units, reshard: fsdp_step(units, reshard=reshard).seconds)
    seconds = {rule: time(units, reshard) for rule, (reshard, units) in rules.items()}
    fits = [rule for rule in rules if peaks[rule] <= budget]
    pick = pick or (lambda rule: seconds[rule])
    best = min(
        fits, key=lambda rule: pick(rule) if pick.__code__.co_argcount == 1 else pick(rule, rules, peaks), default=None
    )
    return {"peak": peaks, "seconds": seconds, "best": best}


class choose_wrapping:
    def whole_model_at_once(rules, budget):
        return _choose(rules, budget, held=lambda sizes, _: sum(sizes))

    gathered_only = lambda rules, budget: _choose(rules, budget, held=_gathered)
    forgets_the_roots_gradients = lambda rules, budget: _choose(rules, budget, root=0)
    forgets_gradients = lambda rules, budget: _choose(rules, budget, own=0)
    forgets_the_buffer = lambda rules, budget: _choose(rules, budget, ratio=0)
    buffer_in_two_bytes = lambda rules, budget: _choose(rules, budget, ratio=1)
    nothing_gathered_ahead = lambda rules, budget: _choose(rules, budget, ahead=False)
    forgets_the_last_buffer = lambda rules, budget: _choose(rules, budget, behind=False)
    forgets_the_copy = lambda rules, budget: _choose(rules, budget, copies=False)
    forgets_the_end = lambda rules, budget: _choose(rules, budget, end=False)

    def frees_what_is_kept(rules, budget):
        return _choose(rules, budget, held=lambda sizes, _: _held(sizes, True))

    computing_only = lambda rules, budget: _choose(rules, budget, time=lambda units, _: fsdp_step(units).compute)

    def gathers_the_kept_again(rules, budget):
        return _choose(rules, budget, time=lambda units, _: fsdp_step(units).seconds)

    def nothing_overlaps(rules, budget):
        return _choose(rules, budget, time=lambda units, r: fsdp_step(units, reshard=r, prefetch=False).seconds)

    fewest_messages = lambda rules, budget: _choose(rules, budget, pick=lambda rule, rules, _: len(rules[rule][1]))
    least_memory = lambda rules, budget: _choose(rules, budget, pick=lambda rule, _, peaks: peaks[rule])
    five_units = lambda rules, budget: _choose(
        rules, budget, held=lambda sizes, _: 2 * sizes[0] + 5 * max(sizes[1:], default=0)
    )
    the_budget_itself_is_too_much = lambda rules, budget: {
        **_choose(rules, budget),
        "best": _choose(rules, budget - 1)["best"],
    }

    def weights_of_the_step(rules, budget):
        peaks = {rule: fsdp_step(units, reshard=reshard).peak for rule, (reshard, units) in rules.items()}
        return {**_choose(rules, budget), "peak": peaks}

    def the_whole_step(rules, budget):
        steps = {rule: fsdp_step(units, reshard=reshard) for rule, (reshard, units) in rules.items()}
        return {**_choose(rules, budget), "seconds": steps}

    ignores_the_budget = lambda rules, budget: {**_choose(rules, budget), "best": _choose(rules, 10**18)["best"]}

    def right(rules, budget):
        """Second solution: the calculators of lablib."""
        peak, times = {}, []
        for rule, (reshard, units) in rules.items():
            sizes = [unit.bytes // 2 for unit in units]
            peak[rule] = peak_held_bytes(sizes, 2, reshard=reshard, param_bytes=2, reduce_bytes=4)
            times.append((fsdp_step(units, reshard=reshard).seconds, rule))
        best = next((rule for _, rule in sorted(times) if peak[rule] <= budget), None)
        return {"peak": peak, "seconds": {rule: second for second, rule in times}, "best": best}

    def right_2(rules, budget):
        """Third solution: a list of what is there, changed event by event."""
        found = {"peak": {}, "seconds": {}, "best": None}
        for rule, (reshard, units) in rules.items():
            there = {("weights", 0): units[0].bytes, ("gradients", 0): units[0].bytes}
            if not reshard:
                there |= {("weights", i): unit.bytes for i, unit in enumerate(units)}
            most = 0
            for i in range(len(units) - 1, -1, -1):
                near = [i, i - 1] if i > 1 else [i]
                there |= {("weights", k): units[k].bytes for k in near} | {("gradients", i): units[i].bytes}
                most = max(most, sum(there.values()))
                there = {key: size for key, size in there.items() if key[0] != "buffer" and key != ("weights", i)}
                there["buffer", i] = 2 * units[i].bytes
                most = max(most, sum(there.values()))
                del there["gradients", i]
            found["peak"][rule] = np.float64(most)
            found["seconds"][rule] = max(bar.end for bar in fsdp_step(units, reshard=reshard).bars)
        for rule in sorted(rules, key=found["seconds"].get, reverse=True):
            if found["peak"][rule] <= budget:
                found["best"] = rule
        return found

    def right_3(rules, budget):
        """Fourth solution: the three formulas of the chapter, in tensors of fp32."""
        found = {"peak": {}, "seconds": {}}
        for rule, (reshard, units) in rules.items():
            root, *rest = torch.tensor([unit.bytes for unit in units], dtype=torch.float32)
            most = 3 * root
            for i, size in enumerate(rest):
                before = sum(rest[:i]) if not reshard else rest[i - 1] if i else 0
                behind = 2 * rest[i + 1] if i + 1 < len(rest) else 0
                most = torch.stack([most, 2 * root + 2 * size + before + behind, 2 * root + 3 * size + before]).max()
            found["peak"][rule], found["seconds"][rule] = most, torch.tensor(fsdp_step(units, reshard=reshard).seconds)
        fits = [rule for rule, bytes_ in found["peak"].items() if bytes_ <= budget]
        return {**found, "best": min(fits, key=found["seconds"].get) if fits else None}


DEFECTS, SECOND_SOLUTIONS = listed(count_collectives, units_by_size, write_checkpoint, choose_wrapping)

#: What the sentence about a defect must say.
SENTENCES = {
    "root_gathered_twice": "The root is not freed", "never_gathered_again": "gathered again in backward",
    "last_unit_not_again": "FSDP frees it like the others", "gathers_once_a_step": "Every micro-batch gathers",
    "always_reduces": "after the last one only", "root_without_gradients": "The root has gradients too",
    "scatters_in_forward_too": "Gradients exist in backward only", "counts_inner_units_again": "do not count again",
    "leaves_only": "from the inside to the outside", "outside_first": "would take the inner parameters first",
    "with_the_root": "The root is a unit anyway", "lists_too": "has no forward", "in_place": "half written",
    "does_not_wait": "only when every rank has written", "leaves_the_rest_of_a_crash": "comes from a crashed job",
    "without_the_optimizer": "starts its moments from zero", "without_the_step": "The step is not saved",
    "everybody_publishes": "one rank renames, once", "nobody_publishes": "nobody published it",
    "old_one_goes_first": "without any checkpoint", "polls": "what waits for the others is a barrier",
    "writes_for_ever": "never ends", "whole_model_at_once": "Not all weights are unsharded",
    "gathered_only": "what is gathered in forward", "forgets_the_roots_gradients": "The root's gradients stay unsharded",
    "forgets_gradients": "The gradients of the unit itself", "forgets_the_buffer": "copied into the buffer",
    "buffer_in_two_bytes": "has 4 bytes a value", "nothing_gathered_ahead": "the unit before it is gathered ahead",
    "forgets_the_last_buffer": "is still there while the next unit runs", "forgets_the_copy": "the moment of the copy",
    "forgets_the_end": "Look at the end", "frees_what_is_kept": "A unit that is kept after forward (reshard is False) is there",
    "computing_only": "computing alone", "gathers_the_kept_again": "is not gathered again",
    "nothing_overlaps": "leave `prefetch` as it is", "fewest_messages": "Few messages are not a short step",
    "least_memory": "The least memory is not asked for",
    "root_not_gathered": "The root has weights too", "root_kept_over_micro_batches": "from forward to backward only",
    "waits_for_an_empty_list": "It never ends", "lists_swallow_what_is_open": "what its children leave, lists too",
    "own_parameters_forgotten": "its own and what its children leave", "five_units": "a rule of thumb",
    "the_budget_itself_is_too_much": "that fits", "weights_of_the_step": "weights alone", "the_whole_step": "take its `.seconds`",
    "ignores_the_budget": "Nothing fits in", "any_leaf_and_its_parent": "is no unit",
}  # fmt: skip
