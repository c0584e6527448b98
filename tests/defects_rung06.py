"""Planted defects of rung 06: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from torch import nn

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


def _peak(root, units):
    return root + max((2 * b + a for a, b in zip([root, *units], units, strict=False)), default=root)


def _choose(rules, budget, *, peak=_peak, messages=lambda n: 3 * n + 2, pick=min):
    peaks = {rule: peak(root, units) for rule, (root, *units) in rules.items()}
    sent = {rule: messages(len(units) - 1) for rule, units in rules.items()}
    fits = [rule for rule in rules if peaks[rule] <= budget]
    return {"peak": peaks, "messages": sent, "best": pick(fits, key=sent.get, default=None)}


class choose_wrapping:
    def whole_model_at_once(rules, budget):
        return _choose(rules, budget, peak=lambda root, units: 2 * (root + sum(units)))

    def forgets_the_root(rules, budget):
        return _choose(rules, budget, peak=lambda root, units: _peak(root, units) - bool(units) * root)

    def forgets_the_buffers(rules, budget):
        return _choose(rules, budget, peak=lambda root, units: root + max(units, default=0))

    def forgets_the_one_before(rules, budget):
        return _choose(rules, budget, peak=lambda root, units: root + 2 * max(units, default=root / 2))

    gathers_only = lambda rules, budget: _choose(rules, budget, messages=lambda n: 1 + 2 * n)
    root_twice = lambda rules, budget: _choose(rules, budget, messages=lambda n: 3 * n + 3)
    most_messages = lambda rules, budget: _choose(rules, budget, pick=max)

    def right(rules, budget):
        """Second solution: walk through forward and look at each moment."""
        found = {"peak": {}, "messages": {}, "best": None}
        for rule, units in rules.items():
            root, before = units[0], 0
            moments = []
            for unit in units:
                whole = root + (unit if unit is not units[0] or before else 0)
                moments.append(whole + unit + before)
                before = unit
            found["peak"][rule] = max(moments)
            found["messages"][rule] = len(units) + (len(units) - 1) + len(units)
        for rule in sorted(rules, key=lambda rule: -found["messages"][rule]):
            if found["peak"][rule] <= budget:
                found["best"] = rule
        return found


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
    "old_one_goes_first": "without any checkpoint", "whole_model_at_once": "Not all units are whole at a time",
    "forgets_the_root": "The root stays gathered", "forgets_the_buffers": "exists twice while it is copied",
    "forgets_the_one_before": "The buffer of the unit before", "gathers_only": "Count both",
    "root_twice": "The root is gathered once", "most_messages": "fewer messages",
}  # fmt: skip
