"""The checks of rung 07: coordinates, a sketch by its groups, what each group sends, and three clusters to plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import SupportsIndex

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.layouts import AXES, CASES, Mesh, Score, mesh, plan_case, score
from lablib.calc.layouts.planner import PART_NAMES, Layout
from lablib.checks.report import Wrong, check, close

__all__ = ["coordinates", "group_traffic", "plan_cluster", "sketch"]

Sizes = dict[str, int]


def _mesh(sizes: Sizes, gpus_per_node: int = 8) -> Mesh:
    rest = [axis for axis in AXES if axis not in sizes]
    return mesh(**sizes, order=[*sizes, *rest], gpus_per_node=gpus_per_node)


def _draw(dice: random.Random) -> Sizes:
    """Two to four axes in any order, odd sizes included, of which at least two have several ranks."""
    while True:
        axes = dice.sample(AXES, dice.randint(2, 4))
        sizes = {axis: dice.choice((1, 2, 2, 3, 4, 5, 8)) for axis in axes}
        if sum(size > 1 for size in sizes.values()) >= 2 and _mesh(sizes).ranks <= 256:
            return sizes


def _shown(sizes: Sizes) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


# --- coordinates --------------------------------------------------------------------------------------------


@check
def coordinates(answer: Callable[[int, Sizes], Mapping[str, int]], seed: int = 7) -> str:
    """Judge `coordinates(rank, sizes)`: the eight ranks of the sketch, and meshes with odd sizes in any order."""
    dice = random.Random(seed)
    cases = [{"tp": 2, "dp": 2, "pp": 2}, {"tp": 2, "dp": 3, "pp": 4}, {"tp": 8, "cp": 2, "pp": 2, "dp": 2}]
    cases += [_draw(dice) for _ in range(12)]
    for sizes in cases:
        found = _mesh(sizes)
        for rank in dice.sample(range(found.ranks), min(found.ranks, 24)):
            right = {axis: at for axis, at in found.coordinates(rank).items() if axis in sizes}
            _judge_coordinates(answer(rank, dict(sizes)), right, rank, sizes)
    return f"{len(cases)} meshes, sizes that are no powers of two among them."


def _judge_coordinates(got: object, right: Sizes, rank: int, sizes: Sizes) -> None:
    case = f"rank {rank} of {_shown(sizes)}"
    if not isinstance(got, Mapping) or set(got) != set(sizes):
        raise Wrong(f"Return a dictionary with the keys {', '.join(sizes)}.")
    if not all(isinstance(at, Real | SupportsIndex) for at in got.values()):
        raise Wrong(f"A coordinate is a whole number ({case}).")
    if dict(got) == right:
        return
    for axis, at in got.items():
        if not 0 <= at < sizes[axis]:
            raise Wrong(
                f"{axis}={at} is not on an axis of {sizes[axis]}: positions go from 0 to {sizes[axis] - 1} and start "
                f"over, which is what the remainder is for ({case})."
            )
    backwards = _mesh(dict(reversed(sizes.items()))).coordinates(rank)
    if all(got[axis] == backwards[axis] for axis in sizes):
        first = next(axis for axis in sizes if sizes[axis] > 1)
        raise Wrong(
            f"The order is turned round: {first} comes first, so it changes from each rank to the next ({case})."
        )
    wrong = [axis for axis in sizes if got[axis] != right[axis]]
    raise Wrong(
        f"{wrong[0]} is {right[wrong[0]]}, not {got[wrong[0]]}: neighbours along an axis are as far apart as the product "
        f"of all sizes before it ({case})."
    )


# --- the sketch ---------------------------------------------------------------------------------------------


@check
def sketch(answer: Callable[[Sizes, int], Mapping[str, object]], seed: int = 77) -> str:
    """Judge `sketch(sizes, gpus_per_node)` by its groups and by the axes that leave a node: 8 GPUs first."""
    dice = random.Random(seed)
    eight = {"tp": 2, "dp": 2, "pp": 2}
    cases = [(eight, 8), (eight, 4), (eight, 2), ({"pp": 2, "dp": 2, "tp": 2}, 4), ({"tp": 4, "dp": 2}, 4)]
    # tp = 3 in nodes of 4: the first group sits in a node, the second does not.
    cases += [({"tp": 3, "dp": 4}, 4), ({"tp": 8, "pp": 4, "dp": 2}, 8), ({"tp": 8, "dp": 16, "pp": 8}, 8)]
    cases += [(_draw(dice), dice.choice((2, 4, 6, 8))) for _ in range(12)]
    for sizes, gpus_per_node in cases:
        _judge_sketch(answer(dict(sizes), gpus_per_node), sizes, gpus_per_node)
    return f"{len(cases)} layouts by their groups; the 8-GPU sketch in one node, in two, and in four."


def _judge_sketch(got: object, sizes: Sizes, gpus_per_node: int) -> None:
    found, case = _mesh(sizes, gpus_per_node), f"{_shown(sizes)} in nodes of {gpus_per_node}"
    if not isinstance(got, Mapping) or set(got) != {"groups", "crossing"}:
        raise Wrong("Return a dictionary with the keys groups and crossing.")
    groups, crossing = got["groups"], got["crossing"]
    if not isinstance(groups, Mapping) or set(groups) != set(sizes):
        raise Wrong(f"`groups` is a dictionary with a list of groups for each of {', '.join(sizes)}.")
    for axis in sizes:
        _judge_groups(groups[axis], axis, found, sizes, case)
    right = {axis for axis in sizes if found.crosses(axis)}
    try:
        named = set(crossing)
    except TypeError:
        raise Wrong("`crossing` is a list of axes.") from None
    if named - set(sizes):
        raise Wrong(f"`crossing` names axes: of {', '.join(sizes)} those with a group that leaves a node.")
    for axis in sorted(named ^ right):
        _explain_crossing(axis, axis in right, found, case)


def _judge_groups(got: object, axis: str, found: Mesh, sizes: Sizes, case: str) -> None:
    right = found.groups(axis)
    if not isinstance(got, Sequence) or not all(isinstance(group, Sequence) for group in got):
        raise Wrong(f"The groups of {axis} are a list of lists of ranks ({case}).")
    if not all(isinstance(rank, Real) for group in got for rank in group):
        raise Wrong(f"A group is a list of rank numbers ({case}).")
    mine = {tuple(sorted(group)) for group in got}
    if mine == set(map(tuple, right)) and len(got) == len(right):
        return
    members = [rank for group in got for rank in group]
    if len(members) == len(set(members)) and any(len(group) != found.size(axis) for group in got):
        size = next(len(group) for group in got if len(group) != found.size(axis))
        raise Wrong(
            f"A group of {axis} has {found.size(axis)} ranks, not {size}: the ranks that agree in every other "
            f"coordinate ({case})."
        )
    if sorted(members) != list(range(found.ranks)):
        raise Wrong(f"Each of the {found.ranks} ranks is in exactly one group of {axis} ({case}).")
    turned = _mesh(dict(reversed(sizes.items())), found.gpus_per_node).groups(axis)
    if mine == set(map(tuple, turned)):
        raise Wrong(
            f"The order is turned round: its first axis has neighbouring ranks, its last the farthest ({case})."
        )
    group = right[0]
    raise Wrong(
        f"The group of {axis} with rank 0 is {_listed(group)}: ranks {found.strides[axis]} apart, since that many lie "
        f"between neighbours along {axis} ({case})."
    )


def _listed(group: Sequence[int]) -> str:
    return ", ".join(map(str, group if len(group) <= 6 else [*group[:4], "...", group[-1]]))


def _explain_crossing(axis: str, leaves: bool, found: Mesh, case: str) -> None:
    if not leaves:
        raise Wrong(f"No group of {axis} leaves a node: each has all its ranks in one ({case}).")
    first = next(group for group in found.groups(axis) if len(found.nodes_of(group)) > 1)
    a, b = next((a, b) for a, b in pairwise(first) if found.node(a) != found.node(b))
    if first[0]:
        raise Wrong(
            f"Look at every group of {axis}, not only the first: ranks {a} and {b} are in one group and in two nodes "
            f"({case})."
        )
    raise Wrong(f"{axis} leaves a node: ranks {a} and {b} are in one group and in two nodes ({case}).")


# --- what each group sends ----------------------------------------------------------------------------------

_AXES = ("tp", "pp", "dp")


@check
def group_traffic(answer: Callable[..., Mapping[str, float]], seed: int = 7) -> str:
    """Judge `group_traffic(layers, stream, gradients, tp, pp, dp, micro_batches)` for a middle stage."""
    dice = random.Random(seed)
    # No two slips give the same number in the first case, so that the sentence names the right one.
    cases = [(6, 1000, 12000, 4, 3, 8, 5), (4, 1024, 16000, 2, 2, 2, 4)]
    cases.append((80, 134217728, 140 * 10**9, 8, 4, 2, 64))
    for _ in range(20):
        tp, pp, dp = (dice.choice((1, 2, 3, 4, 8)) for _ in range(3))
        gradients = tp * pp * dice.randint(10**3, 10**9)
        cases.append((pp * dice.randint(1, 12), dice.randint(1, 10**8), gradients, tp, pp, dp, dice.randint(1, 64)))
    for case in cases:
        _judge_traffic(answer(*case), *case)
    return f"{len(cases)} layouts, 70B on 64 GPUs among them."


def _judge_traffic(
    got: object, layers: int, stream: int, gradients: int, tp: int, pp: int, dp: int, micro_batches: int
) -> None:
    if not isinstance(got, Mapping) or set(got) != set(_AXES):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_AXES)}.")
    each = layers // pp * micro_batches  # passes of a micro-batch through a layer of this rank
    right = {
        "tp": 4 * each * ring_all_reduce_bytes(stream, tp),
        "pp": 2.0 * micro_batches * stream if pp > 1 else 0.0,
        "dp": ring_all_reduce_bytes(gradients / (tp * pp), dp),
    }
    case = f"tp={tp}, pp={pp}, dp={dp}, {layers} layers, {micro_batches} micro-batches"
    for axis in _AXES:
        if not close(got[axis], right[axis], rel=1e-9):
            explain = {"tp": _explain_tp, "pp": _explain_pp, "dp": _explain_dp}[axis]
            explain(float(got[axis]), right[axis], tp, pp, dp, micro_batches, case)


def _explain_tp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if tp == 1:
        raise Wrong(f"A tensor-parallel group of one rank sends nothing ({case}).")
    if close(got, 2 * right) or close(got, right / 2):
        raise Wrong(f"A layer has four all-reduces for each micro-batch, two in forward and two in backward ({case}).")
    if pp > 1 and close(got, right * pp):
        raise Wrong(f"A rank has the layers of its stage only, one part in {pp} of the model ({case}).")
    if m > 1 and close(got, right / m):
        raise Wrong(f"Every micro-batch passes every layer: tensor parallelism sends for each of the {m} ({case}).")
    if close(got, right * tp / (tp - 1)) or close(got, right * tp / (2 * (tp - 1))):
        raise Wrong(f"On a ring of t ranks each sends 2(t-1)/t times the message ({case}).")
    raise Wrong(f"A rank sends {right:,.0f} bytes to its tp group, not {got:,.0f} ({case}).")


def _explain_pp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if pp == 1:
        raise Wrong(f"With one stage there is no cut, and nothing to send ({case}).")
    if close(got, right / 2):
        raise Wrong(
            f"A middle stage sends twice for each micro-batch: activations on, and their gradient back ({case})."
        )
    if m > 1 and close(got, right / m):
        raise Wrong(f"Each of the {m} micro-batches crosses the cut on its own ({case}).")
    if close(got, right * (pp - 1)) or close(got, right * (pp - 1) / 2):
        raise Wrong(f"A stage sends over its own cuts only, whatever the number of stages ({case}).")
    raise Wrong(f"A rank of a middle stage sends {right:,.0f} bytes to its pp group, not {got:,.0f} ({case}).")


def _explain_dp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if dp == 1:
        raise Wrong(f"One replica has nobody to average with ({case}).")
    for what, factor in (("tp and pp", tp * pp), ("tp", tp), ("pp", pp)):
        if factor > 1 and close(got, right * factor):
            raise Wrong(
                f"A rank has gradients of what it holds: {what} divide{'' if ' ' in what else 's'} them ({case})."
            )
    if m > 1 and close(got, right * m):
        raise Wrong(f"Gradients are added up over the {m} micro-batches and sent once a step ({case}).")
    if close(got, right * dp / (dp - 1)) or close(got, right * dp / (2 * (dp - 1))):
        raise Wrong(f"On a ring of d ranks each sends 2(d-1)/d times the message ({case}).")
    raise Wrong(f"A rank sends {right:,.0f} bytes to its dp group, not {got:,.0f} ({case}).")


# --- three clusters -----------------------------------------------------------------------------------------

#: How much slower than the published layout an answer may be: beyond it the planner can tell the two apart.
_SLOWER = 1.10


@check
def plan_cluster(answer: Callable[[str], Mapping[str, int | str]]) -> str:
    """Judge `plan_cluster(case)`: for each real cluster a layout that runs and is about as fast as the published one."""
    done = []
    for name in CASES:
        fields = answer(name)
        if not isinstance(fields, Mapping | Layout):
            raise Wrong(f"{name}: return a dictionary of fields such as tp, pp, dp and zero, not {fields!r}.")
        judged = score(fields, name)
        if not judged.runs:
            raise Wrong(f"{name}: {judged.sentences[0]}")
        if judged.to_published > _SLOWER:
            raise Wrong(f"{name}: {judged.to_published:.2f} times the published layout's time. {_slow(judged)}")
        done.append(f"{name} {judged.points}")
    return f"Points of 100, the planner's best having 100: {', '.join(done)}."


def _slow(judged: Score) -> str:
    """The most specific sentence of a score, or the part of a step that loses most against the planner's best."""
    if len(judged.sentences) > 2:
        return judged.sentences[1]
    best = plan_case(judged.case.name).best.seconds
    part = max(judged.seconds, key=lambda name: judged.seconds[name] - best[name])
    return f"Look at {PART_NAMES[part]}: {judged.seconds[part]:.2f} s, where the planner's best has {best[part]:.2f} s."
