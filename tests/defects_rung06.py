"""Planted defects of rung 06: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools

import numpy as np
from torch import nn

from tests.planted import asked, listed


def _count(root, units, reshard, micro_batches, sync_every, *, root_passes=1, freed_passes=2, last_again=True,
           gather_every=True, scatters_each=1, scatter_turns=None, root_scatters=True):  # fmt: skip
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
    always_reduces = asked(_count, scatter_turns=lambda micro_batches: micro_batches)
    root_without_gradients = lambda *case: _count(*case, root_scatters=False)
    root_not_gathered = lambda *case: _count(*case, root_passes=0)

    def root_kept_over_micro_batches(root, units, reshard, micro_batches, sync_every):
        counts = _count(root, units, reshard, micro_batches, sync_every)
        spared = micro_batches - 1
        return {**counts, "all_gathers": counts["all_gathers"] - spared, "gathered": counts["gathered"] - spared * root}

    def kept_over_micro_batches(root, units, reshard, micro_batches, sync_every):
        counts, spared = _count(root, units, reshard, micro_batches, sync_every), 0 if reshard else micro_batches - 1
        gathers, gathered = counts["all_gathers"] - spared * len(units), counts["gathered"] - spared * sum(units)
        return {**counts, "all_gathers": gathers, "gathered": gathered}

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

    # With a key more than was asked for.
    right_3 = lambda *case: {"case": case, **count_collectives.right(*case)}

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

    # Counts a shared table in both modules that have it, as if it were two.
    each_of_a_tied_pair = lambda model, least: _walk(model, least)
    # Counts it once, where it is met first.
    with_the_first_of_a_tied_pair = lambda model, least: _close(model, _inside_out(model), least, ties=False)
    # Closes none of the two, and then adds both up in the module around them.
    a_tied_pair_counts_twice = lambda model, least: _close(model, _inside_out(model), least, twice=True)
    least_is_in_bytes = lambda model, least: units_by_size.right(model, least // 4)
    outside_first = lambda model, least: list(reversed(units_by_size.right(model, least)))
    with_the_root = lambda model, least: [*units_by_size.right(model, least), ""]

    def lists_too(model, least):
        return _close(model, [(n, m) for n, m in sorted(model.named_modules(), key=_depth) if n], least)

    # Second solution: no recursion; the deepest modules first, each takes the parameters that are left.
    right = lambda model, least: _close(model, _inside_out(model), least)

    def right_2(model, least):
        """Third solution: each parameter is handed up from module to module until one of them closes."""
        names, open_, units = {}, {}, []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name.split(".")[:-1])
        for parameter, paths in names.items():  # a tied one begins where its names part
            home = ".".join(
                step[0] for step in itertools.takewhile(lambda step: len(set(step)) == 1, zip(*paths, strict=False))
            )
            open_[home] = open_.get(home, 0) + parameter.numel()
            for module in (
                ".".join(path[:n]) for path in paths for n in range(len(path), home.count(".") + bool(home), -1)
            ):
                open_.setdefault(module, 0)
        torn = {".".join(path[:n]) for paths in names.values() for path in paths for n in range(1, len(path) + 1)
                if any(other[:n] != path[:n] for other in paths)}  # fmt: skip
        while any(open_):
            deepest = max(open_, key=lambda name: (name.count("."), bool(name)))
            count = open_.pop(deepest)
            if count >= least and deepest not in torn and not isinstance(model.get_submodule(deepest), nn.ModuleList):
                units.append(deepest)
            else:
                above = deepest.rpartition(".")[0]
                open_[above] = open_.get(above, 0) + count
        return tuple(units)

    def right_3(model, least):
        """Fourth solution: a generator, which hands over each name as soon as a module closes."""
        open_ = {}
        for name, module in reversed(list(model.named_modules())):
            mine = {id(p): p for p in module.parameters(recurse=False)}
            for child, _ in module.named_children():
                mine |= open_[f"{name}.{child}".lstrip(".")]
            others = [m for n, m in model.named_modules() if not f"{n}.".startswith(f"{name}.")]
            elsewhere = any(id(p) in mine for m in others for p in m.parameters(recurse=False))
            closes = name and not elsewhere and sum(p.numel() for p in mine.values()) >= least
            closes = closes and not isinstance(module, nn.ModuleList)
            open_[name] = {} if closes else mine
            if closes:
                yield name

    lists_swallow_what_is_open = lambda model, least: _walk(model, least, list_keeps=True)
    own_parameters_forgotten = lambda model, least: _walk(model, least, own=False)

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


def _close(model, modules, least, *, ties=True, twice=False):
    """Close units in the order of `modules`, deepest first, on what is still open."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    open_ = {p: all_ if ties else all_[:1] for p, all_ in names.items()}
    units = []
    for name, _ in modules:
        inside = {p: sum(each.startswith(f"{name}.") for each in all_) for p, all_ in open_.items()}
        mine = [p for p, count in inside.items() if count]
        if any(inside[p] < len(open_[p]) for p in mine):
            continue
        if sum(p.numel() * (inside[p] if twice else 1) for p in mine) >= least:
            units.append(name)
            for each in mine:
                del open_[each]
    return units


def _write(disk, rank, ranks, step, state, barrier, *, folder="tmp", clear=True, wait_after_clear=True, wait=True,
           writers=None, content=None, publishers=(0,), forget_old=False):  # fmt: skip
    aside = f"{folder}-{step}"
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
    leaves_it_under_another_name = lambda *args: _write(*args, clear=False, folder=".step")
    clears_while_others_write = lambda *args: _write(*args, wait_after_clear=False)
    without_the_optimizer = asked(_write, content=lambda state, step: {"model": state["model"], "step": step})
    without_the_step = asked(_write, content=lambda state: dict(state))
    everybody_publishes = asked(_write, publishers=lambda ranks: range(ranks))
    nobody_publishes = lambda *args: _write(*args, publishers=())
    old_one_goes_first = lambda *args: _write(*args, forget_old=True)

    def clears_the_files_of_twice_as_many_ranks(disk, rank, ranks, step, state, barrier):
        for other in range(rank, 2 * ranks, ranks):
            disk.remove(f"tmp-{step}/rank-{other}")
        barrier()
        _write(disk, rank, ranks, step, state, barrier, clear=False)

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


def _wrappings(parts, tied, *, counts=None, tables=("root", "ends")):
    """Return wrappings with so many blocks in a unit; 0 for the parts of a block, None for all blocks in the root."""
    inner = list(parts)[1:-1]
    for blocks in [None, *range(len(inner) // 2 + 1)] if counts is None else counts:
        size = {None: len(inner), 0: 1}.get(blocks, 2 * (blocks or 0))
        units = [inner[i : i + size] for i in range(0, len(inner), size)] if blocks is not None else []
        yield from ([["embed"], *units, ["head"]] if at == "ends" and not tied else units for at in tables)


def _choose(parts, tied, budget, price, *, keep=(True, False), pick=lambda units, held, seconds: seconds, **rules):
    priced = [(u, r, *price(u, r)) for u in _wrappings(parts, tied, **rules) for r in keep]
    fits = [each for each in priced if each[2] <= budget]
    units, reshard, *_ = min(fits, key=lambda each: pick(each[0], *each[2:]), default=(None, None))
    return None if units is None else {"units": units, "reshard": reshard}


class choose_wrapping:
    without_the_idea_of_the_ends = lambda *case: _choose(*case, tables=("root",))
    without_the_idea_of_keeping = lambda *case: _choose(*case, keep=(True,))
    without_the_idea_of_freeing = lambda *case: _choose(*case, keep=(False,))
    without_the_idea_of_latency = lambda *case: _choose(*case, counts=(0, 1))
    without_the_idea_of_a_large_part = lambda *case: _choose(*case, counts=(None, 1, 2, 3, 4))
    without_the_idea_of_overlap = lambda *case: _choose(*case, counts=(None,))

    def without_the_idea_four_rules(parts, tied, budget, price):
        """Each of the named rules, its price, and the least: all that it takes is a loop."""
        rules = [*_wrappings(parts, tied, counts=(None, 0, 1), tables=("root",))]
        priced = [(price(units, keep)[::-1], units, keep) for units in rules for keep in (True, False)]
        fits = [each for each in priced if each[0][1] <= budget]
        return min(fits, key=lambda each: each[0])[1:] if fits else None

    def without_the_idea_tries_everything(parts, tied, budget, price):
        names, best = list(parts), (float("inf"), None)
        if tied:  # it knows at least that these stay together
            return _choose(parts, tied, budget, price)
        for cuts in itertools.product((False, True), repeat=len(names) - 1):
            units = [[names[0]]]
            for name, cut in zip(names[1:], cuts, strict=True):
                units += [[name]] if cut else []
                units[-1] += [] if cut else [name]
            held, seconds = price(units, True)
            if held <= budget:
                best = min(best, (seconds, units), key=lambda each: each[0])
        return best[1] and (best[1], True)

    def without_the_idea_one_recipe(parts, tied, budget, price):
        """What the takeaway says, and never a look at the numbers."""
        return {"units": next(iter(_wrappings(parts, tied, counts=(1,), tables=("ends",)))), "reshard": True}

    fewest_messages = lambda *case: _choose(*case, pick=lambda units, held, seconds: len(units))
    least_memory = lambda *case: _choose(*case, pick=lambda units, held, seconds: held)
    ignores_the_budget = asked(_choose, budget=10**12)
    half_of_the_budget_is_enough = asked(_choose, budget=lambda budget: budget // 2)

    def tables_alone(parts, tied, budget, price):
        return {"units": [["embed", "head"]] if tied else [["embed"], ["head"]], "reshard": True}

    def one_of_two_tables(parts, tied, budget, price):
        return _choose(parts, False, budget, price, tables=("ends",)) if tied else _choose(parts, tied, budget, price)

    def first_and_last_block_together(parts, tied, budget, price):
        return {"units": [["blocks.0.mlp", "blocks.1.mlp"]], "reshard": True}

    def modules_that_it_has_not(parts, tied, budget, price):
        return {"units": [[f"blocks.{i}"] for i in range(2)], "reshard": True}

    a_list_too_deep = lambda parts, tied, budget, price: {"units": [[["embed"]]], "reshard": True}
    the_price_itself = lambda parts, tied, budget, price: price([], True)

    def tries_for_ever(parts, tied, budget, price):
        while price([])[0] > 0:
            pass

    def right(parts, tied, budget, price):
        """Second solution: with the usual wrappings alone, and as a tuple."""
        usual = (None, 0, 1, 2, 4)
        answer = _choose(parts, tied, budget, price, counts=usual)
        return answer and (answer["units"], answer["reshard"])

    def right_2(parts, tied, budget, price):
        """Third solution: start from one recipe, and change one thing at a time as long as it helps."""
        state, best = (1, not tied, True), None

        def cost(state):
            blocks, ends, reshard = state
            units = next(iter(_wrappings(parts, tied, counts=(blocks,), tables=("ends" if ends else "root",))))
            held, seconds = price(units, reshard)
            return (max(0, held - budget), seconds), units

        seen = {}
        layers = (len(parts) - 2) // 2
        todo = [state]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen[state] = cost(state)
            if best is None or seen[state][0] <= seen[best][0]:
                best = state
                ends = state[1]
                steps = (None, 0, *range(1, layers + 1))
                todo += [(n, e, r) for n in steps for e in (ends, False) for r in (True, False)]
        over, _ = seen[best][0]
        return None if over else {"units": [set(unit) for unit in seen[best][1]], "reshard": best[2]}

    def right_3(parts, tied, budget, price):
        """Fourth solution: names for a unit of one part, numpy's True, and nothing for the root's tables."""
        answer = _choose(parts, tied, budget, price)
        if answer is None:
            return None
        units = [unit[0] if len(unit) == 1 else tuple(unit) for unit in reversed(answer["units"])]
        pair = [["head", "embed"]] if tied else []  # one call with both
        return {"reshard": np.bool_(answer["reshard"]), "units": [*pair, *units], "why": "the fastest that fits"}


DEFECTS, SECOND_SOLUTIONS = listed(count_collectives, units_by_size, write_checkpoint, choose_wrapping)

#: What the sentence about a defect must say.
SENTENCES = {
    "root_gathered_twice": "The root is not freed", "never_gathered_again": "gathered again in backward",
    "last_unit_not_again": "FSDP frees it like the others", "gathers_once_a_step": "Every micro-batch gathers",
    "always_reduces": "after the last one only", "root_without_gradients": "The root has gradients too",
    "scatters_in_forward_too": "Gradients exist in backward only", "counts_inner_units_again": "do not count again",
    "leaves_only": "from the inside to the outside", "outside_first": "would take the inner parameters first",
    "with_the_root": "The root is a unit anyway", "lists_too": "has no forward", "in_place": "half written",
    "leaves_it_under_another_name": "comes from a crashed job", "least_is_in_bytes": "fewer than",
    "clears_the_files_of_twice_as_many_ranks": "comes from a crashed job", "kept_over_micro_batches": "freed after each backward",
    "does_not_wait": "only when every rank has written", "leaves_the_rest_of_a_crash": "comes from a crashed job",
    "without_the_optimizer": "start its moments from zero", "without_the_step": "The step is not saved",
    "everybody_publishes": "one rank renames, once", "nobody_publishes": "nobody published it",
    "old_one_goes_first": "without any checkpoint", "polls": "what waits for the others is a barrier",
    "writes_for_ever": "never ends",
    "each_of_a_tied_pair": "torch stops", "with_the_first_of_a_tied_pair": "torch stops",
    "a_tied_pair_counts_twice": "of its own",
    "without_the_idea_of_the_ends": "The tables in the root", "without_the_idea_of_keeping": "room to keep",
    "without_the_idea_of_freeing": "Small units, freed", "without_the_idea_of_latency": "waits for the latency",
    "without_the_idea_of_a_large_part": "One part of a block is large", "without_the_idea_of_overlap": "Small units, freed",
    "without_the_idea_four_rules": "The tables in the root", "without_the_idea_tries_everything": "think of which can be the best",
    "without_the_idea_one_recipe": "room to keep", "fewest_messages": "room to keep",
    "least_memory": "waits for the latency", "ignores_the_budget": "Kept units pile up",
    "half_of_the_budget_is_enough": "something fits", "tables_alone": "smaller units hold less",
    "one_of_two_tables": "one table here", "first_and_last_block_together": "leaves out parts", "modules_that_it_has_not": "no part",
    "a_list_too_deep": "no part",
    "the_price_itself": "is True or False", "tries_for_ever": "tried",
    "root_not_gathered": "The root is gathered too", "root_kept_over_micro_batches": "from forward to backward only",
    "waits_for_an_empty_list": "It never ends", "lists_swallow_what_is_open": "what its children leave, lists too",
    "own_parameters_forgotten": "its own and what its children leave", "any_leaf_and_its_parent": "is no unit",
}  # fmt: skip
