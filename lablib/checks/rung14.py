"""The checks of rung 14: a timeout, a group's part of a step, what is wrong first, and a cluster cut into groups."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.runs import ReplicaGroups, group_goodput, lost_time, simulate_groups, young_interval
from lablib.checks.judging import (
    NEW,
    Order,
    Sealed,
    as_float,
    by_name,
    check,
    close,
    epoch_orders,
    numbers,
    on_ranks,
    pair,
    refuse,
    some,
    whole,
)
from lablib.toys.replica_groups import Job, State

__all__ = ["WatchedJob", "choose_timeout", "find_first_wrong", "plan_groups", "take_part", "watched_job"]


# --- how long a silence may be ------------------------------------------------------------------------------

#: What an answer may lose more than the best one: a grid of a hundred values finds it.
_SLACK = 1.03


def _lost(timeout: float, silences: Sequence[float], deaths: int, groups: int, heal: float) -> float:
    """Return the group-seconds that a timeout costs in the time in which these silences and deaths came."""
    others, timeout = groups - 1, timeout * (1 + 1e-6)  # in float32 it may be a hair shorter than the silence
    waited = sum(min(silence, timeout) for silence in silences)
    declared = sum(silence > timeout for silence in silences)
    return others * (deaths * timeout + waited) + heal * declared


def _best(silences: Sequence[float], *rest: float) -> float:
    """Return the best timeout: just as long as one of the silences, since a longer one only waits more."""
    return min(silences, key=lambda timeout: _lost(timeout, silences, *rest))


@check(
    idea="The timeout is what every death costs the others, and who is silent for longer is declared dead though it lives.",
    section="The heartbeat: a stall for every death, and a false alarm for every pause",
    line="Add up for each candidate what deaths, waited pauses and false alarms cost, and try the silences that you saw.",
)
def choose_timeout(answer: Callable[[list[float], int, int, float], Any], seed: int = 14) -> str:
    """Judge `choose_timeout(silences, deaths, groups, heal)` by what the timeout costs on days drawn at random."""
    dice = random.Random(seed)
    few = [0.1] * 50 + [0.5, 3.0]
    days = [(few, 4, 3, 20.0), (few, 0, 3, 20.0), (few, 0, 3, 3.0), ([0.1] * 200 + [1.0] * 10 + [30.0], 2, 8, 400.0)]
    days.append(([0.1] * 50 + [1.0] * 10 + [1.3] * 10, 0, 11, 12.0))  # a false alarm is dear for having been waited for
    days.append(([0.05] + [0.1] * 100 + [1.0] * 50 + [3.5] * 25 + [30.0], 0, 2, 2.0))  # once, and by one group
    for chance in [dice] * 12 + [NEW] * 2:  # no table has the last two; few silences, so that two loops end
        beat = chance.choice((0.05, 0.1, 0.5))
        pauses = [beat * chance.paretovariate(0.7) for _ in range(chance.randint(3, 30))]
        days.append(
            (
                [beat] * (chance.randint(50, 400) // 3) + [min(pause, 600 * beat) for pause in pauses],
                chance.choice((0, 1, 3, 10, 40)),
                chance.choice((2, 4, 16, 64)),
                chance.choice((5.0, 60.0, 900.0)),
            )
        )
    for silences, deaths, groups, heal in days:
        shuffled = dice.sample(silences, len(silences))
        timeout = as_float(answer(list(shuffled), deaths, groups, heal), "The timeout")
        case = f"{len(silences)} silences up to {max(silences):.3g} s, {deaths} deaths, {groups} groups, {heal:g} s to heal"
        refuse(case, ("A timeout is a positive number of seconds, and finite", not 0 < timeout < float("inf")))
        best = _best(silences, deaths, groups, heal)
        least, given = (_lost(t, silences, deaths, groups, heal) for t in (best, timeout))
        if given > _SLACK * least + 1e-9 or timeout < 0.99 * min(silences):
            _explain_timeout(timeout, best, given, least, silences, deaths, groups, heal, case)
    return f"{len(days)} days: none of your timeouts costs 3 % more than the best one."


def _explain_timeout(
    timeout: float,
    best: float,
    given: float,
    least: float,
    silences: list[float],
    deaths: int,
    groups: int,
    heal: float,
    case: str,
) -> NoReturn:
    ordinary = Counter(silences).most_common(1)[0][0]

    def near(other: float) -> bool:
        """Say whether the timeout is this one, or only a little longer, and is not so near to the best one."""
        return [0.999 <= timeout / one <= 1.25 for one in (other, best)] == [True, False]

    def best_of(lost: Callable[[float], float]) -> float:
        return min(silences, key=lost)

    alone = best_of(lambda t: _lost(t, silences, deaths, 2, heal))
    free = best_of(lambda t: _lost(t, silences, deaths, groups, 0))
    unwaited = best_of(lambda t: _lost(t, silences, deaths, groups, heal) - _lost(t, silences, 0, groups, 0))
    late = best_of(lambda t: _lost(t, silences, deaths, groups, heal) - (groups - 1) * t * sum(s > t for s in silences))
    refuse(
        case,
        (f"{timeout:.3g} s is shorter than the ordinary time between two heartbeats, {ordinary:g} s: all are declared dead, "
         "again and again", timeout < ordinary),
        ("While a living group is silent the others wait for it, up to the timeout: a long timeout pays for pauses too",
         near(unwaited)),
        (f"This waits for the longest silence, so that nobody who lives is declared dead, and every death costs {groups - 1} "
         f"groups {timeout:.3g} s: with {deaths} deaths a false alarm is cheaper",
         deaths and timeout >= max(silences) and best < 0.9 * max(silences)),
        (f"A death costs all {groups - 1} others the timeout, not one group", deaths and near(alone)),
        (f"At {timeout:.3g} s {sum(s > timeout for s in silences)} silences are false alarms, of {heal:g} s to heal each: they are "
         "not free, and here a longer timeout costs less", near(free)),
        ("Before a false alarm all others have waited for the timeout: that is lost beside the healing", near(late)),
        (f"{timeout:.5g} s costs {given:,.0f} group-seconds, and {best:.5g} s costs {least:,.0f}: weigh deaths and waited pauses, "
         f"which cost {groups - 1} of {groups} groups, against the {heal:g} s of each false alarm", True),
    )  # fmt: skip


# --- a group's part of a step -------------------------------------------------------------------------------


def _quorums(dice: random.Random, groups: int, steps: int) -> list[list[int]]:
    """Return the members of each step, any but none, the same ones once or twice."""
    found = []
    while len(found) < steps:
        away = set(dice.sample(range(groups), dice.randint(0, groups - 1)))
        found += [[g for g in range(groups) if g not in away]] * dice.randint(1, 2)
    return found[:steps]


@check(
    kind="work",
    idea="A step is made of the same samples whoever is there; the quorum only deals them, and each counts once.",
    section="What a quorum changes: batch, weights of the mean, order of data",
    line="Write down the next `batch` places of the endless order, take those of your place among the members, and weigh your "
    "mean by your share of the batch.",
)
def take_part(answer: Callable[..., Any], seed: int = 14) -> str:
    """Judge `take_part(epoch_order, count, step, batch, members, me)` over runs whose quorum changes, steps void among them."""
    dice = random.Random(seed)
    runs = [(3, 24, 6, [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]), (2, 10, 5, [[0, 1], [1], [0, 1]])]
    for chance in [dice] * 10 + [NEW]:  # no table has the last one
        groups = chance.randint(2, 5)
        runs.append((groups, chance.randint(9, 40), chance.randint(2, 13), _quorums(chance, groups, 9)))
    steps = 0
    for groups, count, batch, quorums in runs:
        order = epoch_orders(dice, count)
        for step, members in enumerate(quorums):
            if dice.random() < 0.3:  # a step that is void is taken again, by fewer
                _judge_part(answer, order, count, step, batch, list(range(groups)), groups)
            _judge_part(answer, order, count, step, batch, members, groups)
            steps += 1
    return f"{steps} steps of {len(runs)} runs: every sample once, and every sample with the same weight."


def _judge_part(
    answer: Callable[..., Any], order: Order, count: int, step: int, batch: int, members: list[int], groups: int
) -> None:
    case = f"step={step}, batch={batch}, {count} samples an epoch, members {members} of {groups} groups"
    of_order, shares, weights = functools.partial(answer, order), [], []
    for me in members:
        otherwise = "Return a pair, the samples of this group and the weight of its mean."
        got, weight = pair(of_order(count, step, batch, list(members), me), otherwise, "samples", "weight")
        shares.append([whole(sample, f"A sample of group {me}") for sample in numbers(got, f"What group {me} takes")])
        weights.append(as_float(weight, f"The weight of group {me}"))
    right = [order(place // count)[place % count] for place in range(step * batch, (step + 1) * batch)]
    if sorted(sample for share in shares for sample in share) != sorted(right):
        _explain_part(shares, right, order, count, step, batch, members, groups, case)
    truth = [len(share) / batch for share in shares]
    if not all(close(w, t, rel=5e-3) for w, t, share in zip(weights, truth, shares, strict=True) if share):
        _explain_weight(weights, truth, shares, members, groups, batch, case)


def _explain_part(
    shares: list[list[int]],
    right: list[int],
    order: Order,
    count: int,
    step: int,
    batch: int,
    members: list[int],
    groups: int,
    case: str,
) -> NoReturn:
    together = sorted(sample for share in shares for sample in share)
    mine = [right[me::groups] for me in members]
    missing, extra = (sorted((Counter(a) - Counter(b)).elements()) for a, b in ((right, together), (together, right)))

    def batch_from(place: int, first_epoch: bool = False) -> list[int]:
        return sorted(order(0 if first_epoch else p // count)[p % count] for p in range(place, place + batch))

    refuse(
        case,
        ("Every group takes the whole batch: their mean is the gradient of one group, with more work",
         len(shares) > 1 and all(sorted(share) == sorted(right) for share in shares)),
        (f"Each takes what it would take if all {groups} groups were there: who is away leaves a hole in the batch, and its "
         "samples are never seen", len(members) < groups and all(sorted(s) == sorted(m) for s, m in zip(shares, mine, strict=True))),
        ("A group's own number is not its place among the members: deal by the place in `members`",
         (n := len(members)) > 1 and all(sorted(share) in [sorted(right[at::n]) for at in (me, me % n)]
                                         for share, me in zip(shares, members, strict=True))),
        ("Here all take the same samples", len(shares) > 1 and all(share == shares[0] for share in shares)),
        ("Every epoch has its own order: ask epoch_order for the epoch of each place", step * batch + batch > count
         and together == batch_from(step * batch, first_epoch=True)),
        ("A step takes the next `batch` places whoever is there, and this one begins where as many groups would stand that "
         "had always been there", any(together == batch_from(step * batch * n) for n in range(2, groups + 1)) and step),
        (f"Together they take {len(together)} samples, and a step has {batch}: each is somebody's", len(together) < batch),
        (f"The step's samples are {batch} places of the endless order, from {step * batch} on: of them "
         f"{some(missing) or 'none'} are not taken, and {some(extra)} are taken besides", True),
    )  # fmt: skip


def _explain_weight(
    weights: list[float],
    truth: list[float],
    shares: list[list[int]],
    members: list[int],
    groups: int,
    batch: int,
    case: str,
) -> NoReturn:
    n = len(members)

    def all_are(values: Sequence[float]) -> bool:
        return all(close(w, v, rel=1e-4) for w, v, share in zip(weights, values, shares, strict=True) if share)

    refuse(
        case,
        (f"Samples are right. A mean of {n} means weighs a sample of a small share more than one of a large: weigh by samples, "
         f"{some([len(s) for s in shares])} of {batch}", all_are([1 / n] * n)),
        (f"Samples are right. The mean is over who is there, {n}, and not over all {groups} groups",
         n < groups and all_are([1 / groups] * n)),
        ("Samples are right. These weights make a sum of means: with fewer groups its gradient is smaller, with more it is larger",
         all_are([1.0] * n)),
        ("Samples are right. This is the weight of a sum over samples: a group gives the mean over its own", all_are([1 / batch] * n)),
        ("Samples are right. These are numbers of samples: divide by the batch", all_are([len(s) for s in shares])),
        (f"Samples are right. Their means are weighed {some([round(w, 3) for w in weights])}, and should be weighed "
         f"{some([round(t, 3) for t in truth])}: every sample counts 1/{batch}", True),
    )  # fmt: skip


# --- which tensor is wrong first ----------------------------------------------------------------------------

_STEPS, _GROUPS = 12, 3
_TENSORS = 4  # weights of the toy's model, and as many momenta


class _Script(NamedTuple):
    """What happens in a job: who is away in which steps, and which tensor of which group is wrong from which step on."""

    away: int
    gone: int
    back: int
    group: int = 0
    step: int = 0
    tensor: str = ""  # "weights.2", "momenta.0"; empty if all is well

    @property
    def unhealed(self) -> bool:
        """Say whether the tensor is one that healing leaves out; otherwise a bit of it flips."""
        return self.step == self.back


class WatchedJob(Sealed):
    """Three groups, a process each, that train together; one is away for some steps, and heals when it is back.

    Call it with `watch(step, state)`: it runs on each group after each step that the group has taken, on the toy's
    `State`. It returns, by group, what `watch` returned for each step: `[{0: ..., 1: ...}, ...]`.
    """

    def __init__(self, script: _Script) -> None:
        self._script = script

    def __call__(self, watch: Callable[[int, State], Any]) -> list[dict[int, Any]]:
        """Run the job under watch; it is the same each time."""
        return on_ranks(_train_by, _GROUPS, self._script, watch)


def _train_by(script: _Script, watch: Callable[[int, State], Any]) -> dict[int, Any]:
    me, seen, state = dist.get_rank(), {}, State(Job())
    for step in range(_STEPS):
        there = [g for g in range(_GROUPS) if g != script.away or not script.gone <= step < script.back]
        mine = [] if me not in there else state.job.numbers(step)[there.index(me) :: len(there)]
        if step == script.back:
            _heal(state, script, me)
        gradient = state.backward(mine)[0]
        dist.all_reduce(gradient)  # who is away adds nothing: this stands for a process group of those who are there
        if me not in there:
            continue
        state.commit(gradient / state.job.batch)
        if step == script.step and me == script.group and script.tensor and not script.unhealed:
            flat = _named(state, script.tensor).view(-1)
            flat[len(flat) // 2] = torch.nextafter(flat[len(flat) // 2], flat.max() + 1)
        seen[step] = watch(step, state)
    return seen


def _heal(state: State, script: _Script, me: int) -> None:
    flat = state.flat()
    dist.broadcast(flat, (script.away + 1) % _GROUPS)
    if me == script.away:
        kept = _named(state, script.tensor).clone() if script.unhealed and script.tensor else None
        state.load(flat, script.back, 0)
        if kept is not None:
            _named(state, script.tensor).copy_(kept)


def _named(state: State, tensor: str) -> Tensor:
    kind, _, number = tensor.partition(".")
    return getattr(state, kind)[int(number)].detach()


def watched_job(seed: int) -> WatchedJob:
    """Return the job of a seed, for you to look at."""
    return WatchedJob(_script(random.Random(seed), ("unhealed weights", "unhealed momenta", "flip", "")[seed % 4]))


def _script(dice: random.Random, fault: str) -> _Script:
    away, gone = dice.randrange(_GROUPS), dice.randint(2, 4)
    back = gone + dice.randint(1, 3)
    tensor = f"{dice.choice(('weights', 'momenta'))}.{dice.randrange(_TENSORS)}"
    if fault == "flip":
        tensor = f"{tensor[:-1]}{int(tensor[-1]) & 2}"  # a matrix: in its sum the lowest bit of one number is lost
        return _Script(away, gone, back, dice.randrange(_GROUPS), dice.choice((back + 1, 1, back + 2)), tensor)
    if not fault:
        return _Script(away, gone, back)
    return _Script(away, gone, back, away, back, f"{fault.split()[1]}.{tensor[-1]}")


@check(
    kind="fault",
    idea="Groups that took a step together hold the same bits in everything that the next step reads; the first tensor that "
    "differs is the cause, and what differs later follows from it.",
    section="Healing: all states, over a link for each rank",
    line="Compare each tensor between groups, step by step, weights and momenta; take the group that stands against the other two.",
)
def find_first_wrong(answer: Callable[[WatchedJob], Any], seed: int = 14) -> str:
    """Judge `find_first_wrong(job)` on jobs of three ranks in which healing leaves a tensor out, a bit flips, or all is well."""
    dice = random.Random(seed)
    faults = ["unhealed momenta", "unhealed weights", "flip", "", "unhealed momenta", "flip"]
    drawn = [dice] * 4 + [NEW] * 2  # no list of answers has the last two
    for script in map(_script, drawn, faults):
        got = answer(WatchedJob(script))
        truth = (script.step, script.group, script.tensor) if script.tensor else None
        if got is not None:
            otherwise = "Return None, or a dictionary with step, group and tensor."
            named = by_name(got, "step", "group", "tensor", otherwise=otherwise)
            got = whole(named["step"], "The step"), whole(named["group"], "The group"), str(named["tensor"])
            unnamed = not re.fullmatch(r"(weights|momenta)\.\d", got[2])
            refuse("", ('The tensor is a name, as in "weights.2" or "momenta.0"', unnamed))
        if got != truth:
            _explain_first(got, truth, script)
    return (
        f"{len(faults)} jobs. In three healing left a tensor out, and nothing stopped. In torchft you hand the manager the two "
        "functions that save and load a state: what they leave out, an optimizer's states, a buffer, a scaler, is not healed."
    )


def _explain_first(got: Any, truth: Any, script: _Script) -> NoReturn:
    case = f"group {script.away} is away from step {script.gone} to {script.back - 1}"
    if truth is None:
        refuse(case, ("All three hold the same bits after every step taken together, and a group is accused", True))
    step, group, tensor = truth
    at, accused, which = got or (None, None, "")
    refuse(
        case,
        (f"After step {step} a tensor of group {group} differs in some bits, and nothing is found; a tolerance or a sum may "
         "hide a low bit", got is None),
        (f"The groups differ first after step {step}, as `watch` is told it, and not {at}. It may be a tensor that is "
         "not looked at or was not copied, or a group that is away", at != step),
        (f"Group {accused} is not the one against the majority", accused != group),
        (f"{which} differs as well, and follows: momenta make the next weights. Look at all that the next step reads",
         script.unhealed and which == tensor.replace("momenta", "weights") != tensor),
        ("Both are right, step and group; it is another tensor that differs first", True),
    )  # fmt: skip


# --- a cluster cut into groups ------------------------------------------------------------------------------

#: Share of all that a cluster could do, by which an answer may be below the best one found.
_MARGIN = 0.01
_FAILURES = 20_000  # that are played: two plans then differ by a tenth of the margin by chance


class _Cluster(NamedTuple):
    """What the exercise asks for; seconds, and nodes."""

    nodes: int
    least: int
    node_mtbf: float
    stall: float
    restart: float
    repair: float
    save: float
    shared: float

    def together(self, trained: int) -> float:
        """Return the seconds between two failures that take all groups of so many nodes."""
        return self.node_mtbf / (trained * self.shared)

    def done(self, groups: int, spares: int, interval: float, goodput: Callable[[ReplicaGroups], float]) -> float:
        """Return the share of what all nodes could do that a plan does."""
        trained = (self.nodes - spares) // groups * groups
        job = ReplicaGroups(gpus=trained, groups=groups, gpu_mtbf=self.node_mtbf, stall=self.stall, restart=self.restart,
                            repair=self.repair, spares=spares, node=1, shared=self.shared)  # fmt: skip
        lost = lost_time(interval, cost=self.save, mtbf=self.together(trained), restart=self.restart)
        return (trained + spares) / self.nodes * goodput(job) * lost.useful


def _best_plan(cluster: _Cluster) -> tuple[int, int, float]:
    found = []
    for spares in range(cluster.nodes // 4):
        left = cluster.nodes - spares
        for groups in {left // size for size in range(cluster.least, 2 * cluster.least + 1)} - {0}:
            found.append((groups, spares, young_interval(cluster.save, cluster.together(left // groups * groups))))
    return max(found, key=lambda plan: cluster.done(*plan, lambda job: group_goodput(job).goodput))


@check(
    idea="Small groups lose little with each node, spares fill the holes, and checkpoints are for what no group survives.",
    section="How many groups, how many spares, how often a checkpoint",
    line="Groups as small as memory and left-over nodes allow; try numbers of spares; Young's interval with the failures that "
    "take all groups.",
)
def plan_groups(answer: Callable[..., Any], seed: int = 14) -> str:
    """Judge `plan_groups(nodes, least, node_mtbf, stall, restart, repair, save, shared)` by playing what it plans."""
    dice = random.Random(seed)
    clusters = [_Cluster(128, 4, 154 * 86_400.0, 30.0, 600.0, 3 * 86_400.0, 120.0, 0.1)]
    for _ in range(4):
        clusters.append(_Cluster(
            dice.choice((64, 100, 250)), dice.choice((1, 2, 4, 8)), dice.choice((60, 150, 400)) * 86_400.0,
            dice.choice((10.0, 60.0)), dice.choice((300.0, 900.0)), dice.choice((3600.0, 86_400.0, 5 * 86_400.0)),
            dice.choice((60.0, 240.0)), dice.choice((0.02, 0.1, 0.3)),
        ))  # fmt: skip
    clusters.append(_Cluster(100, 8, 400 * 86_400.0, 60.0, 300.0, 5 * 86_400.0, 60.0, 0.3))  # eights leave a rest
    slow, nodes = 30 ** NEW.random(), NEW.randint(150, 350)  # the interval decides; no table has them
    clusters.append(_Cluster(nodes, 4, *(slow * seconds for seconds in (2 * 86_400.0, 1.0, 60.0, 7200.0, 20.0)), 0.3))
    for number, cluster in enumerate(clusters):
        _judge_plan(answer(*cluster), cluster, seed + number)
    return f"{len(clusters)} clusters: played, each of your plans is within 1 % of the best one."


def _judge_plan(got: Any, cluster: _Cluster, seed: int) -> None:
    nodes, least, node_mtbf, _, _, repair, _, shared = cluster
    case = (
        f"{nodes} nodes, {least} a group at least, a failure of a node in {node_mtbf / 86_400:.0f} days, {repair / 3600:.3g} h to "
        f"repair, {shared:.0%} of failures take all"
    )
    plan = by_name(got, "groups", "spares", "interval")
    groups, spares = (whole(plan[name], f"`{name}`") for name in ("groups", "spares"))
    interval = as_float(plan["interval"], "`interval`")
    refuse(
        case,
        ("There is at least one group, no negative number of spares, and an interval of some seconds",
         groups < 1 or spares < 0 or not interval > 0),
        (f"{groups} groups of {least} nodes and {spares} spares are more than {nodes} nodes", groups * least + spares > nodes),
        (f"Of all failures {shared:.0%} take all groups, and between two checkpoints {interval:,.0f} s apart they come again and again",
         interval > 20 * cluster.together(nodes)),
    )  # fmt: skip
    best = _best_plan(cluster)

    def played(groups: int, spares: int, interval: float) -> float:
        seconds = _FAILURES * node_mtbf / nodes
        return cluster.done(
            groups, spares, interval, lambda job: simulate_groups(job, seconds=seconds, seed=seed).goodput
        )

    ours, theirs = played(*best), played(groups, spares, interval)
    if theirs >= ours - _MARGIN:
        return
    size, larger = (nodes - spares) // groups, (nodes - best[1]) // best[0]
    idle = nodes - spares - groups * size
    rest = (nodes - best[1]) % size / nodes if size > larger else 0.0  # what this size leaves beside the best spares
    costs = {  # of each mistake: how much more the plan would do without it
        "idle": idle / nodes,
        "size": played(best[0], best[1], interval)
        - (resized := rest + played(max(1, (nodes - best[1]) // size), best[1], interval)),
        "interval": played(groups, spares, best[2]) - theirs,
        "spares": resized - theirs - idle / nodes,
    }
    main = max(costs, key=lambda name: costs[name])
    refuse(
        case,
        (f"Nodes that neither train nor are spares do nothing: here {idle} of {nodes}", main == "idle"),
        (f"{groups} groups of {size} nodes leave {nodes - groups * size} that do not train, and {best[0]} of {larger} leave "
         f"{nodes - best[0] * larger}: a rest counts too", main == "size" and size < larger),
        (f"Groups of {size} nodes lose {size} with each that fails, and {least} hold the model", main == "size"),
        ("The interval is near Young's for all failures, and most of them stop one group only: a checkpoint is read after those "
         f"that take all, {shared:.0%} of them", main == "interval" and 0.8 < interval / young_interval(cluster.save, node_mtbf / nodes) < 1.25),
        (f"The interval is {interval:,.0f} s, and {best[2]:,.0f} s would lose {costs['interval']:.1%} less of the time: Young's, "
         "with the failures that take all groups", main == "interval"),
        (f"{spares} spares are {'too many: they stand idle for longer than they are needed' if spares > best[1] else 'too few'}: "
         f"{best[1]} beside {best[0]} groups would do {ours - theirs:.1%} more", resized - rest > theirs),
        (f"{groups} groups of {size} and {spares} spares do {ours - theirs:.1%} less than {best[0]} of {larger} and {best[1]}", True),
    )  # fmt: skip
