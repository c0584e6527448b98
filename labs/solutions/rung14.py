"""Worked exercises of rung 14, machines that die."""

import math
from collections import Counter

from lablib.calc.runs import ReplicaGroups, group_goodput
from lablib.launch.records import digest


def choose_timeout(silences, deaths, groups, heal):
    """A longer timeout than some silence only waits more: try these."""

    def lost(timeout):
        waited = sum(min(silence, timeout) for silence in silences)
        alarms = sum(silence > timeout for silence in silences)
        return (groups - 1) * (deaths * timeout + waited) + alarms * heal

    return min(silences, key=lost)


def take_part(epoch_order, count, step, batch, members, me):
    """The step says which samples, the quorum who takes them."""
    places = range(step * batch, (step + 1) * batch)
    samples = [epoch_order(p // count)[p % count] for p in places]
    mine = samples[members.index(me) :: len(members)]
    return mine, len(mine) / batch


def find_first_wrong(job):
    """Each tensor apart, and of those of a step a momentum before weights."""

    def look(step, state):
        named = {}
        for i in range(len(state.weights)):
            named[f"momenta.{i}"] = digest([state.momenta[i]])
            named[f"weights.{i}"] = digest([state.weights[i]])
        return dict(sorted(named.items()))  # momenta before weights

    seen = job(look)
    for step in sorted(set().union(*seen)):
        there = {g: log[step] for g, log in enumerate(seen) if step in log}
        for tensor in next(iter(there.values())):
            count = Counter(found[tensor] for found in there.values())
            if len(count) > 1:
                odd = min(count, key=count.get)
                group = next(g for g in there if there[g][tensor] == odd)
                return {"step": step, "group": group, "tensor": tensor}
    return None


def plan_groups(
    nodes, least, node_mtbf, stall, restart, repair, save, shared
):
    """Sizes and spares by trying; Young for what takes all."""

    def plan(size, spares):
        groups = (nodes - spares) // size
        trained = groups * size
        job = ReplicaGroups(
            gpus=trained,
            groups=groups,
            gpu_mtbf=node_mtbf,
            stall=stall,
            restart=restart,
            repair=repair,
            spares=spares,
            node=1,
            shared=shared,
        )
        together = node_mtbf / (trained * shared)  # all must restart
        interval = math.sqrt(2 * save * together)
        used = (trained + spares) / nodes
        done = used * group_goodput(job).goodput
        return done, groups, spares, interval

    _, groups, spares, interval = max(
        plan(size, spares)
        for size in range(least, 2 * least + 1)
        for spares in range(nodes // 4)
    )
    return {"groups": groups, "spares": spares, "interval": interval}
