"""Worked exercises of rung 14, machines that die."""

import math
from collections import Counter

from lablib.calc.runs import ReplicaGroups, group_goodput


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


def who_is_wrong(log):
    """Only groups of one quorum must agree; a majority names one."""
    seen = {}
    for quorum, step, group, digest in log:
        seen.setdefault((step, quorum), {})[group] = digest
    for (step, _), digests in sorted(seen.items()):
        count = Counter(digests.values())
        if len(count) == 1:
            continue
        [(right, votes), *_] = count.most_common()
        odd = [g for g, digest in digests.items() if digest != right]
        sure = votes > len(digests) / 2 and len(odd) == 1
        return step, odd[0] if sure else None
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
