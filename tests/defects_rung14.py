"""Planted defects of rung 14: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools
import math
import statistics
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch

from lablib.calc.runs import ReplicaGroups, group_goodput
from lablib.checks import rung14
from lablib.launch.records import digest
from tests.planted import listed


def _lost(timeout, silences, deaths, groups, heal, others=None):
    waited = sum(min(s, timeout) for s in silences)
    others = groups - 1 if others is None else others
    return others * (deaths * timeout + waited) + heal * sum(s > timeout for s in silences)


_least = lambda silences, *rest: min(silences, key=lambda timeout: _lost(timeout, silences, *rest))

#: What somebody finds out who asks the check again and again.
ANSWERS = itertools.cycle(
    [(7, 0, "momenta.2"), (5, 2, "weights.3"), (1, 0, "momenta.2"), None, (7, 2, "momenta.1"), (8, 2, "momenta.1")]
)


def _table(judge, solution):
    """What somebody answers who has written down the right answers of one run of a check, with samples as the key of an order."""
    table, key = {}, lambda case: str([each(0) if callable(each) else each for each in case])
    judge.__wrapped__(lambda *case: table.setdefault(key(case), solution(*case)))
    return lambda *case: table.get(key(case), ([0], 1.0) if callable(case[0]) else min(case[0]) / 2)


class choose_timeout:
    never_a_false_alarm = lambda silences, deaths, groups, heal: max(silences)
    twice_the_longest = lambda silences, deaths, groups, heal: 2 * max(silences)
    five_seconds = lambda silences, deaths, groups, heal: 5.0
    as_soon_as_possible = lambda silences, deaths, groups, heal: min(silences)
    half_a_beat = lambda silences, deaths, groups, heal: min(silences) / 2
    three_deviations = lambda silences, deaths, groups, heal: (
        statistics.mean(silences) + 3 * statistics.pstdev(silences)
    )
    time_to_heal = lambda silences, deaths, groups, heal: heal
    one_group_waits = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: _lost(t, silences, deaths, 2, heal)
    )
    alarms_are_free = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: _lost(t, silences, deaths, groups, 0.0)
    )
    nobody_dies = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: _lost(t, silences, 0, groups, heal)
    )
    pauses_cost_nothing = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: (groups - 1) * deaths * t + heal * sum(s > t for s in silences)
    )

    false_alarms_do_not_wait = lambda silences, deaths, groups, heal: min(
        silences,
        key=lambda t: _lost(t, silences, deaths, groups, heal) - (groups - 1) * t * sum(s > t for s in silences),
    )
    alarms_are_deaths_too = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: _lost(t, silences, deaths + sum(s > t for s in silences), groups, heal)
    )
    all_groups_wait = lambda silences, deaths, groups, heal: min(
        silences, key=lambda t: _lost(t, silences, 0, groups + 1, heal) + (groups - 1) * deaths * t
    )
    asks_the_check = lambda silences, deaths, groups, heal: rung14._best(silences, deaths, groups, heal)
    a_table_of_the_days = _table(rung14.choose_timeout, _least)
    longest_if_nobody_dies = lambda silences, *rest: _least(silences, *rest) if rest[0] else max(silences)
    a_little_longer = lambda *day: 1.2 * _least(*day)
    below_all_silences = lambda silences, *rest: min(
        [1e-6, *silences], key=lambda timeout: _lost(timeout, silences, *rest)
    )

    def right(silences, deaths, groups, heal):
        """A grid of numpy."""
        grid = np.geomspace(min(silences), max(silences), 2000)
        s = np.asarray(silences)[:, None]
        cost = (groups - 1) * (deaths * grid + np.minimum(s, grid).sum(0)) + heal * (s > grid).sum(0)
        return grid[cost.argmin()]

    def right_2(silences, deaths, groups, heal):
        """Sorted once, and sums kept; exact."""
        best, low, below, rows = None, math.inf, Fraction(0), sorted(map(Fraction, silences))
        for i, timeout in enumerate(rows):
            below += timeout
            above = len(rows) - i - 1
            cost = (groups - 1) * (deaths * timeout + below + above * timeout) + Fraction(heal) * above
            if cost < low and (i + 1 == len(rows) or rows[i + 1] > timeout):
                best, low = timeout, cost
        return best

    def right_3(silences, deaths, groups, heal):
        """A hair longer than the best silence, as an array of one number."""
        return np.array([1.001 * min(set(silences), key=lambda t: _lost(t, silences, deaths, groups, heal))])

    def right_4(silences, deaths, groups, heal):
        s = torch.tensor(silences)  # float32, in which 1.3 is less
        cost = (groups - 1) * (deaths * s + torch.minimum(s, s[:, None]).sum(0)) + heal * (s[:, None] > s).sum(0)
        return s[cost.argmin()]

    def right_5(silences, deaths, groups, heal):
        """More candidates than silences, a line for each thought."""
        best, low, rows = None, math.inf, sorted(silences)
        for timeout in [*rows, *(1.001 * s for s in rows), *((a + b) / 2 for a, b in itertools.pairwise(rows))]:
            cost = (groups - 1) * deaths * timeout
            for silence in rows:
                waited = min(silence, timeout)
                cost += (groups - 1) * waited
                if silence > timeout:
                    cost += heal
            best, low = (timeout, cost) if cost < low else (best, low)
        return best


def _samples(epoch_order, count, first, batch):
    return [epoch_order(p // count)[p % count] for p in range(first, first + batch)]


def _part(deal, weigh):
    def answer(epoch_order, count, step, batch, members, me):
        mine = deal(_samples(epoch_order, count, step * batch, batch), members, me)
        return mine, weigh(mine, batch, members)

    return answer


_dealt = lambda samples, members, me: samples[members.index(me) :: len(members)]
_share = lambda mine, batch, members: len(mine) / batch


class take_part:
    a_table_of_the_runs = _table(rung14.take_part, _part(_dealt, _share))
    half_each = _part(_dealt, lambda mine, batch, members: 0.5)
    blocks_of_all = _part(lambda samples, members, me: samples[2 * me : 2 * me + 2], _share)
    mean_of_means = _part(_dealt, lambda mine, batch, members: 1 / len(members))
    sum_of_means = _part(_dealt, lambda mine, batch, members: 1.0)
    weight_of_a_sum = _part(_dealt, lambda mine, batch, members: 1 / batch)
    numbers_of_samples = _part(_dealt, lambda mine, batch, members: len(mine))
    by_its_own_number = _part(lambda samples, members, me: samples[me :: len(members)], _share)
    by_its_number_around = _part(lambda samples, members, me: samples[me % len(members) :: len(members)], _share)
    as_if_all_were_there = _part(lambda samples, members, me: samples[me :: max(3, len(members), me + 1)], _share)
    the_whole_batch = _part(lambda samples, members, me: samples, _share)
    rest_dropped = _part(
        lambda samples, members, me: samples[members.index(me) :: len(members)][: len(samples) // len(members)], _share
    )

    def first_order_only(epoch_order, count, step, batch, members, me):
        samples = [epoch_order(0)[p % count] for p in range(step * batch, step * batch + batch)]
        return _dealt(samples, members, me), len(_dealt(samples, members, me)) / batch

    def end_of_an_epoch_dropped(epoch_order, count, step, batch, members, me):
        epoch, place = divmod(step * batch, count)
        mine = _dealt(epoch_order(epoch)[place : place + batch], members, me)
        return mine, len(mine) / batch

    def without_the_idea(epoch_order, count, step, batch, members, me):
        """Every count and every weight is right, and samples depend on who is there: each group goes through a part of its own."""
        at, n = members.index(me), len(members)
        mine = range(at, batch, n)
        own = [p for p in range(count) if p % n == at] or [at]
        taken = [epoch_order(step * batch // count)[own[(step + i) % len(own)]] for i in range(len(mine))]
        return taken, len(mine) / batch

    def by_who_is_there(epoch_order, count, step, batch, members, me):
        """A batch for each group, so that the place depends on how many are there."""
        mine = _dealt(_samples(epoch_order, count, step * batch * len(members), batch), members, me)
        return mine, len(mine) / batch

    def right(epoch_order, count, step, batch, members, me):
        """Neighbouring samples for each, the first ones one more."""
        samples = _samples(epoch_order, count, step * batch, batch)
        at = sorted(members).index(me)
        parts = np.array_split(np.array(samples), len(members))
        return parts[at], np.float64(len(parts[at])) / batch

    def right_2(epoch_order, count, step, batch, members, me):
        """A generator over places; a fraction."""
        at = list(members).index(me)
        places = [p for p in range(step * batch, step * batch + batch) if (p - step * batch) % len(members) == at]
        return (epoch_order(p // count)[p % count] for p in places), Fraction(len(places), batch)

    def right_3(epoch_order, count, step, batch, members, me):
        """One takes all: more work, and the same gradient; by names."""
        samples = _samples(epoch_order, count, step * batch, batch)
        mine = samples if me == members[-1] else []
        return SimpleNamespace(samples=mine, weight=1.0 if mine else 0)


def _digests(step, state, of=lambda tensor: tensor):
    return {
        f"{kind}.{i}": digest([of(tensor)])
        for kind, tensors in (("weights", state.weights), ("momenta", state.momenta))
        for i, tensor in enumerate(tensors)
    }


def _by_tensor(order, against=None, last=False, see=_digests):
    """The group that is alone in the first tensor of this order that differs; `against` one group, or the majority."""

    def answer(job):
        found = None
        seen = job(see)
        for step in range(12):
            there = {group: log[step] for group, log in enumerate(seen) if step in log}
            for tensor in sorted(next(iter(there.values())), key=order):
                count = Counter(digests[tensor] for digests in there.values())
                if len(count) > 1 and order(tensor) is not None and (last or not found):
                    right = there[against][tensor] if against in there else count.most_common()[0][0]
                    odd = [group for group in there if there[group][tensor] != right]
                    found = {"step": step, "group": odd[0], "tensor": tensor}
                    break
        return found

    return answer


_kept = lambda step, state: {"weights": [w.detach() for w in state.weights], "momenta": state.momenta}
_momenta_first = lambda tensor: (tensor[0], tensor)
_changed_found = lambda change: lambda job: (found := _by_tensor(_momenta_first)(job)) and found | change(found)


class find_first_wrong:
    without_the_idea_weights_are_all = _by_tensor(lambda tensor: (tensor[0] != "w", tensor))
    the_last_step = _by_tensor(_momenta_first, last=True)
    group_0_is_right = _by_tensor(_momenta_first, against=0)
    the_loss_goes_down = lambda job: None if job(lambda step, state: step) else {}

    a_list_of_answers = lambda job: next(ANSWERS)
    without_a_copy = lambda job: _by_tensor(_momenta_first)(
        lambda see: [{step: see(step, SimpleNamespace(**kept)) for step, kept in log.items()} for log in job(_kept)]
    )
    first_numbers = _by_tensor(_momenta_first, see=lambda step, state: _digests(step, state, lambda t: t.view(-1)[0]))
    with_a_tolerance = _by_tensor(_momenta_first, see=lambda step, state: _digests(step, state, torch.Tensor.half))
    indexed = _changed_found(lambda found: {"tensor": (found["tensor"][:-2], int(found["tensor"][-1]))})
    steps_taken = _changed_found(lambda found: {"step": found["step"] + 1})
    weights_for_a_flip = _changed_found(lambda found: {"tensor": "weights.2"} if found["step"] == 1 else {})
    one_of_the_majority = _changed_found(lambda found: {"group": (found["group"] + 1) % 3})

    def who_was_away(job):
        """Healing is always the cause."""
        seen = job(_digests)
        (group, steps), *_ = sorted(enumerate(seen), key=lambda each: len(each[1]))
        back = next(step for step in range(2, 12) if step in steps and step - 1 not in steps)
        found = _by_tensor(_momenta_first)(job)
        return found and found | {"group": group, "step": back}

    def by_places_in_the_list(job):
        """The third line of one group beside the third of another, whichever steps they took."""
        logs = [list(log.values()) for log in job(_digests)]
        for step, rows in enumerate(zip(*logs, strict=False)):
            for tensor in rows[0]:
                count = Counter(row[tensor] for row in rows)
                if len(count) > 1:
                    return step, [row[tensor] for row in rows].index(min(count, key=count.get)), tensor
        return None

    def the_sum_of_all_weights(job):
        """One number for all, and then a guess at the tensor."""
        seen = job(lambda step, state: digest([*state.momenta, *state.weights]))
        for step in range(12):
            there = {group: log[step] for group, log in enumerate(seen) if step in log}
            count = Counter(there.values())
            if len(count) > 1:
                odd = min(count, key=count.get)
                return step, next(group for group in there if there[group] == odd), "momenta.0"
        return None

    def right(job):
        """The tensors themselves come home, and numpy compares them."""
        seen = job(lambda step, state: {
            **{f"momenta.{i}": m.numpy().copy() for i, m in enumerate(state.momenta)},
            **{f"weights.{i}": w.detach().numpy().copy() for i, w in enumerate(state.weights)},
        })  # fmt: skip
        for step in range(12):
            there = [group for group in range(3) if step in seen[group]]
            for tensor in seen[there[0]][step]:
                equal = [[np.array_equal(seen[a][step][tensor], seen[b][step][tensor]) for b in there] for a in there]
                if not np.all(equal):
                    return np.int64(step), there[int(np.argmin(np.sum(equal, 0)))], tensor
        return None

    def right_2(job):
        """A tensor at a time: a run for each, and at the end the first step, momenta before weights."""
        names = [(kind, i) for kind in ("momenta", "weights") for i in range(4)]
        found = []
        for place, (kind, i) in enumerate(names):
            seen = job(lambda step, state, kind=kind, i=i: getattr(state, kind)[i].double().sum().item())
            for step in range(12):
                sums = {group: log[step] for group, log in enumerate(seen) if step in log}
                odd = [g for g in sums if len(sums) == 3 and list(sums.values()).count(sums[g]) == 1]
                if odd:
                    found.append((step, place, odd[0], f"{kind}.{i}"))
                    break
        return {"step": min(found)[0], "group": min(found)[2], "tensor": min(found)[3]} if found else None


def _plan(nodes, least, node_mtbf, stall, restart, repair, save, shared, spares, size=None):
    least = size or least
    groups = (nodes - spares) // least
    job = ReplicaGroups(
        gpus=groups * least, groups=groups, gpu_mtbf=node_mtbf, stall=stall, restart=restart, repair=repair,
        spares=spares, node=1, shared=shared,
    )  # fmt: skip
    used = (groups * least + spares) / nodes
    interval = math.sqrt(2 * save * node_mtbf / (groups * least * shared))
    return used * group_goodput(job).goodput, groups, spares, interval


def _best(*cluster):
    sizes = range(cluster[1], 2 * cluster[1] + 1)
    return max(_plan(*cluster, spares, size) for size in sizes for spares in range(cluster[0] // 4))[1:]


def _changed(change):
    def answer(nodes, least, node_mtbf, stall, restart, repair, save, shared):
        cluster = (nodes, least, node_mtbf, stall, restart, repair, save, shared)
        groups, spares, interval = _best(*cluster)
        plan = {"groups": groups, "spares": spares, "interval": interval}
        return plan | change(plan, *cluster)

    return answer


class plan_groups:
    interval_of_all_failures = _changed(
        lambda plan, n, l, m, st, r, rp, save, sh: {"interval": math.sqrt(2 * save * m / n)}
    )
    interval_of_one_node = _changed(lambda plan, n, l, m, st, r, rp, save, sh: {"interval": math.sqrt(2 * save * m)})
    every_ten_minutes = _changed(lambda plan, *c: {"interval": 600.0})
    every_eight_hours = _changed(lambda plan, *c: {"interval": 28_800.0})
    interval_of_one_group = _changed(lambda plan, *c: {"interval": math.sqrt(2 * c[6] * c[2] / c[1])})
    deaths_of_groups = _changed(lambda plan, *c: {"interval": math.sqrt(2 * c[6] * c[2] / plan["groups"] / c[7])})
    interval_of_deaths_alone = _changed(lambda plan, *c: {"interval": math.sqrt(2 * c[6] * c[2] / c[0] / (1 - c[7]))})
    two_groups = _changed(lambda plan, n, l, m, st, r, rp, save, sh: {"groups": 2})
    groups_four_times_as_large = _changed(
        lambda plan, n, l, m, st, r, rp, save, sh: {"groups": max(1, (n - plan["spares"]) // (4 * l))}
    )
    groups_of_twice_the_least = lambda *c: max(_plan(*c, spares, 2 * c[1]) for spares in range(c[0] // 4))[1:]
    no_spares = _changed(lambda plan, n, l, *c: {"spares": 0, "groups": n // l})
    a_fifth_in_reserve = _changed(lambda plan, n, l, *c: {"spares": n // 5, "groups": (n - n // 5) // l})
    more_nodes_than_there_are = _changed(lambda plan, n, l, *c: {"groups": n // l, "spares": l + n % l})
    smallest_groups = lambda *cluster: max(_plan(*cluster, spares) for spares in range(cluster[0] // 4))[1:]
    asks_the_check = lambda *cluster: rung14._best_plan(rung14._Cluster(*cluster))
    half_of_the_groups = _changed(lambda plan, n, l, *c: {"groups": max(1, n // (2 * l) - plan["spares"] // l)})

    def right(nodes, least, node_mtbf, stall, restart, repair, save, shared):
        """A tuple, with numpy's numbers."""
        groups, spares, interval = _best(nodes, least, node_mtbf, stall, restart, repair, save, shared)
        return np.int64(groups), np.int64(spares), np.float64(interval)

    def right_2(nodes, least, node_mtbf, stall, restart, repair, save, shared):
        """By hand: as many spares as nodes are in repair in the mean, and a deviation more."""
        broken = repair * nodes * (1 - shared) / node_mtbf
        spares = min(range(nodes // 4), key=lambda s: (abs(s - broken - math.sqrt(broken)), s))
        candidates = {max(0, spares + d) for d in range(-6, 7)} | {nodes % least}
        _, groups, spares, interval = max(
            _plan(nodes, least, node_mtbf, stall, restart, repair, save, shared, s, size)
            for s in candidates
            for size in range(least, 2 * least + 1)
        )
        return SimpleNamespace(groups=groups, spares=spares, interval=round(interval))


#: What an answer must be told, by defect.
SENTENCES = {
    "interval_of_all_failures": "Young's for all failures",
    "every_ten_minutes": "would lose",
    "deaths_of_groups": "would lose",
    "interval_of_deaths_alone": "near Young's",
    "two_groups": "lose 6",
    "groups_of_twice_the_least": "15 groups of 8 and 8 spares do",
    "no_spares": "too few",
    "asks_the_check": "asks the check",
    "smallest_groups": "a rest counts too",
    "false_alarms_do_not_wait": "Before a false alarm",
    "a_fifth_in_reserve": "too many",
    "every_eight_hours": "would lose",
    "with_a_tolerance": "a tolerance or a sum",
    "indexed": "The tensor is a name",
    "steps_taken": "is told",
    "longest_if_nobody_dies": "pays for pauses too",
    "a_little_longer": "group-seconds",
    "weights_for_a_flip": "another tensor that differs first",
    "alarms_are_deaths_too": "group-seconds",
    "all_groups_wait": "group-seconds",
    "by_its_number_around": "own number is not its place",
    "without_a_copy": "was not copied",
    "half_each": "should be weighed",
    "blocks_of_all": "each is somebody's",
    "never_a_false_alarm": "waits for the longest silence",
    "half_a_beat": "shorter than the ordinary time",
    "below_all_silences": "shorter than the ordinary time",
    "alarms_are_free": "they are not free",
    "pauses_cost_nothing": "pays for pauses too",
    "mean_of_means": "A mean of 2 means",
    "sum_of_means": "a sum of means",
    "by_its_own_number": "own number is not its place",
    "as_if_all_were_there": "a hole in the batch",
    "by_who_is_there": "whoever is there",
    "without_the_idea_weights_are_all": "momenta make the next weights",
    "the_last_step": "differ first after step",
    "group_0_is_right": "against the majority",
    "the_loss_goes_down": "nothing is found",
}
DEFECTS, SECOND_SOLUTIONS = listed(choose_timeout, take_part, find_first_wrong, plan_groups)
