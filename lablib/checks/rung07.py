"""The checks of rung 07: coordinates, a sketch by its groups, what each group sends, and three clusters to plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from typing import NoReturn

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.layouts import CASES, Mesh, Score, plan_case, score
from lablib.calc.layouts.planner import APART, PART_NAMES, Layout
from lablib.checks.judging import Wrong, check, chosen, close, close_bytes, numbers, refuse, some, whole

__all__ = ["coordinates", "group_traffic", "plan_cluster", "sketch"]

Sizes = dict[str, int]


def _mesh(sizes: Sizes, gpus_per_node: int = 8) -> Mesh:
    return Mesh(tuple(sizes.values()), tuple(sizes), gpus_per_node)


def _draw(dice: random.Random) -> Sizes:
    """Two to four axes in any order, odd sizes included, of which at least two have several ranks."""
    while True:
        axes = dice.sample(("tp", "cp", "dp", "pp"), dice.randint(2, 4))
        sizes = {axis: dice.choice((1, 2, 2, 3, 4, 5, 8)) for axis in axes}
        if sum(size > 1 for size in sizes.values()) >= 2 and _mesh(sizes).ranks <= 256:
            return sizes


def _shown(sizes: Sizes) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def _of(answer: Callable[..., object], *given: object, sizes: Sizes) -> object:
    """Call an answer; one that asks for an axis which this mesh has not is told so."""
    try:
        return answer(*given)
    except KeyError as error:
        if error.args[0] in {"tp", "cp", "dp", "pp"} - set(sizes):
            raise Wrong(
                f"`sizes` has the axes of this mesh only, here {', '.join(sizes)}: go through its keys."
            ) from None
        raise


# --- coordinates --------------------------------------------------------------------------------------------


@check(
    idea="A rank's number is written in digits, one for each axis, and the first axis is the digit that changes fastest.",
    section="Device mesh: eight GPUs by hand",
    line="Take the remainder of the rank by the first size as its coordinate, and go on with the quotient for the next axis.",
)
def coordinates(answer: Callable[[int, Sizes], Mapping[str, int]], seed: int = 7) -> str:
    """Judge `coordinates(rank, sizes)`: the eight ranks of the sketch, and meshes with odd sizes in any order."""
    dice = random.Random(seed)
    cases = [{"tp": 2, "dp": 2, "pp": 2}, {"tp": 2, "dp": 3, "pp": 4}, {"tp": 8, "cp": 2, "pp": 2, "dp": 2}]
    cases += [_draw(dice) for _ in range(12)]
    for sizes in cases:
        found = _mesh(sizes)
        for rank in sorted(dice.sample(range(found.ranks), min(found.ranks, 24))):
            _judge_coordinates(_of(answer, rank, dict(sizes), sizes=sizes), found.coordinates(rank), rank, sizes)
    return f"{len(cases)} meshes, sizes that are no powers of two among them."


def _judge_coordinates(given: object, right: Sizes, rank: int, sizes: Sizes) -> None:
    case = f"rank {rank} of {_shown(sizes)}"
    if not isinstance(given, Mapping) or set(given) != set(sizes):
        raise Wrong(f"Return a dictionary with the keys {', '.join(sizes)}.")
    got = {axis: whole(at, f"The coordinate {axis} of {case}") for axis, at in given.items()}
    if got == right:
        return
    off = [(axis, at, sizes[axis]) for axis, at in got.items() if not 0 <= at < sizes[axis]]
    first = next((axis for axis in sizes if sizes[axis] > 1), "")
    wrong = next(axis for axis in sizes if got[axis] != right[axis])
    refuse(
        case,
        ("Positions on an axis are counted from 0, as ranks are", all(got[axis] == right[axis] + 1 for axis in sizes)),
        (lambda: "{}={} is not on an axis of {}: positions go from 0 to {} and start over, which is what the remainder is "
         "for".format(*off[0], off[0][2] - 1), off),
        (f"The order is reversed: {first} comes first, so it changes from each rank to the next",
         got == _mesh(dict(reversed(sizes.items()))).coordinates(rank)),
        (f"{wrong} is {right[wrong]}, not {got[wrong]}: neighbours along an axis are as far apart as the product of all sizes "
         "before it", True),
    )  # fmt: skip


# --- the sketch ---------------------------------------------------------------------------------------------


@check(
    idea="A group of an axis is all ranks that agree in every other coordinate, so each rank is in one group of each axis.",
    section="Process groups: ranks that differ in one coordinate",
    line="Collect the ranks by their other coordinates, and call an axis crossing if any of its groups has ranks in two nodes.",
)
def sketch(answer: Callable[[Sizes, int], Mapping[str, object]], seed: int = 77) -> str:
    """Judge `sketch(sizes, gpus_per_node)` by its groups and by the axes that leave a node: 8 GPUs first."""
    dice = random.Random(seed)
    eight = {"tp": 2, "dp": 2, "pp": 2}
    cases = [(eight, 8), (eight, 4), (eight, 2), ({"pp": 2, "dp": 2, "tp": 2}, 4), ({"tp": 4, "dp": 2}, 4)]
    # tp = 3 in nodes of 4: the first group sits in a node, the second does not. Then an axis of one rank, and a job
    # that fills half of its node: "stride times size divides the node" is no rule for these.
    cases += [({"tp": 3, "dp": 4}, 4), ({"dp": 8, "cp": 1, "pp": 2}, 6), ({"tp": 3, "dp": 1}, 8)]
    cases += [({"tp": 8, "pp": 4, "dp": 2}, 8), ({"tp": 8, "dp": 16, "pp": 8}, 8)]
    cases += [(_draw(dice), dice.choice((2, 4, 6, 8))) for _ in range(12)]
    for sizes, gpus_per_node in cases:
        _judge_sketch(_of(answer, dict(sizes), gpus_per_node, sizes=sizes), sizes, gpus_per_node)
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
    otherwise = f"`crossing` names axes: of {', '.join(sizes)} those with a group that leaves a node."
    named = chosen(crossing, sizes, otherwise)
    for axis in sizes:
        if (axis in named) != found.crosses(axis):
            _explain_crossing(axis, found, case)


def _judge_groups(given: object, axis: str, found: Mesh, sizes: Sizes, case: str) -> None:
    right, size = found.groups(axis), found.size(axis)
    groups = [numbers(group, f"A group of {axis}") for group in numbers(given, f"`groups` of {axis}")]
    got = sorted(sorted(whole(rank, "A rank in a group") for rank in group) for group in groups)
    if got == sorted(right):
        return
    members, other = [rank for group in got for rank in group], [len(group) for group in got if len(group) != size]
    turned = _mesh(dict(reversed(sizes.items())), found.gpus_per_node)
    refuse(
        case,
        (f"A group of {axis} has {size} ranks, not {''.join(map(str, other[:1]))}: the ranks that agree in every other "
         "coordinate", len(members) == len(set(members)) and other),
        (f"Each of the {found.ranks} ranks is in exactly one group of {axis}", sorted(members) != list(range(found.ranks))),
        ("The order is reversed: the first axis has neighbouring ranks", got == sorted(turned.groups(axis))),
        (f"The group of {axis} with rank 0 is {some(right[0])}: ranks {found.strides[axis]} apart, since that many lie between "
         f"neighbours along {axis}", True),
    )  # fmt: skip


def _explain_crossing(axis: str, found: Mesh, case: str) -> NoReturn:
    refuse(
        case,
        (f"A group of {axis} is one rank here, and one rank is in one node", found.size(axis) == 1),
        (f"No group of {axis} leaves a node: each has all its ranks in one", not found.crosses(axis)),
    )
    first = next(group for group in found.groups(axis) if len(found.nodes_of(group)) > 1)
    a, b = next((a, b) for a, b in pairwise(first) if found.node(a) != found.node(b))
    look = f"Look at every group of {axis}, not only the first" if first[0] else f"{axis} leaves a node"
    raise Wrong(f"{look}: ranks {a} and {b} are in one group and in two nodes ({case}).")


# --- what each group sends ----------------------------------------------------------------------------------


#: The first case: no two mistakes of `_slips` give the same number for an axis, which a test holds.
FIRST = (20, 9240, 9240 * 28, 7, 4, 11, 13)


def _slips(axis: str, layers: int, t: int, p: int, d: int, m: int) -> tuple[tuple[float, str], ...]:
    """What a mistake makes of the right number, and what to say of it."""
    ring_t, ring_d = t / max(1, t - 1), d / max(1, d - 1)
    four = "A layer has four all-reduces for each micro-batch, two in forward and two in backward"
    cuts = "A stage sends over its own cuts only, whatever the number of stages"
    held = "A rank has gradients of what it holds"
    return {
        "tp": (
            (1 / 2, f"{four}, and an all-reduce passes its ring twice: half of that was counted"),
            (2, f"{four}: that was doubled"),
            (1 / 4, f"{four}: that is one for attention and one for the MLP in each direction"),
            (p, f"A rank has the layers of its stage only, one part in {p} of the model"),
            (1 / m, f"Every micro-batch passes every layer: tensor parallelism sends for each of the {m}"),
            (1 / d, "`micro_batches` are those of one replica already: dp does not divide them"),
            (ring_t / 2, "On a ring of t ranks each sends 2(t-1)/t times the stream, not the stream once"),
            (ring_t, "On a ring of t ranks each sends 2(t-1)/t times the stream, not twice the stream"),
            (t, "A piece on the ring is one part in t of the stream: 2(t-1)/t times the stream in all"),
            (1 / t, "Every rank of the group reduces the whole stream: only the pieces on the ring are divided by t"),
        ),
        "pp": (
            (1 / 2, "A middle stage sends twice for each micro-batch: activations on, and their gradient back"),
            (2, "Count what leaves the rank: what it receives was sent by its neighbours"),
            (1 / m, f"Each of the {m} micro-batches crosses the cut on its own"),
            (p - 1, cuts),
            ((p - 1) / 2, cuts),
            (p, cuts),
            (1 / t, "Here each rank sends the whole stream: the chapter divides by t where ranks gather their parts again"),
            (1 / (2 * t), "Each rank sends the whole stream here, undivided by t, and twice for each micro-batch: on and back"),
            (t, "A rank sends its own copy of the stream; its tp neighbours send theirs"),
            (layers // p, "Layers of one stage hand over inside the rank: only the last one's output is sent"),
        ),
        "dp": (
            (t * p, f"{held}: tp and pp divide them"),
            (t, f"{held}: tp divides them too"),
            (p, f"{held}: pp divides them too"),
            (m, f"Gradients are added up over the {m} micro-batches and sent once a step"),
            (ring_d, "On a ring of d ranks each sends 2(d-1)/d times the gradients, not twice the gradients"),
            (ring_d / 2, "On a ring of d ranks each sends 2(d-1)/d times the gradients, not the gradients once"),
            (1 / 2, "An all-reduce passes its ring twice: a reduce-scatter, then an all-gather"),
            (d, "A piece on the ring is one part in d of the gradients: 2(d-1)/d times them in all"),
            (1 / d, "Each replica has all gradients of its part: dp does not divide them"),
            (3 / 2, "That is ZeRO-3's traffic: here gradients are all-reduced, and no weights gathered"),
        ),
    }[axis] + ((1e-9, "Return bytes, not GB"),)  # fmt: skip


_NOTHING = {
    "tp": "A tensor-parallel group of one rank sends nothing",
    "pp": "With one stage there is no cut, and nothing to send",
    "dp": "One replica has nobody to average with",
}


@check(
    idea="An axis sends a size times how often: activations of each layer for tp, of each cut for pp, gradients once for dp.",
    section="What each axis sends: tp, cp, pp and dp in bytes",
    line="Multiply layers of one stage, micro-batches and four ring all-reduces for tp; two streams a micro-batch for pp; one "
    "ring all-reduce of the held gradients for dp.",
)
def group_traffic(answer: Callable[..., Mapping[str, float]], seed: int = 7) -> str:
    """Judge `group_traffic(layers, stream, gradients, tp, pp, dp, micro_batches)` for a middle stage."""
    dice = random.Random(seed)
    cases = [FIRST, (4, 1024, 16000, 2, 2, 2, 4), (80, 134217728, 140 * 10**9, 8, 4, 2, 64)]
    for _ in range(20):
        tp, pp, dp = (dice.choice((1, 2, 3, 4, 8)) for _ in range(3))
        gradients = tp * pp * dice.randint(10**3, 10**9)
        cases.append((pp * dice.randint(1, 12), dice.randint(1, 10**8), gradients, tp, pp, dp, dice.randint(1, 64)))
    for case in cases:
        wrong = _wrong_axis(answer(*case), case)
        if wrong:
            raise Wrong(_explain_traffic(answer, *wrong, case))
    return f"{len(cases)} layouts, 70B on 64 GPUs among them."


def _sent(layers: int, stream: int, gradients: int, tp: int, pp: int, dp: int, micro_batches: int) -> dict[str, float]:
    each = layers // pp * micro_batches  # passes of a micro-batch through a layer of this rank
    return {
        "tp": 4 * each * ring_all_reduce_bytes(stream, tp),
        "pp": 2.0 * micro_batches * stream if pp > 1 else 0.0,
        "dp": ring_all_reduce_bytes(gradients / (tp * pp), dp),
    }


def _wrong_axis(got: object, case: tuple[int, ...]) -> tuple[str, float] | None:
    """The first axis whose number is wrong, and the number; bytes may be rounded to a whole."""
    right = _sent(*case)
    if not isinstance(got, Mapping) or set(got) != set(right):
        raise Wrong(f"Return a dictionary with the keys {', '.join(right)}.")
    for axis, size in right.items():
        if not close_bytes(got[axis], size):  # mistakes are larger by far
            return axis, float(got[axis])
    return None


def _explain_traffic(answer: Callable[..., Mapping[str, float]], axis: str, got: float, case: tuple[int, ...]) -> str:
    layers, _, _, tp, pp, dp, m = case
    if {"tp": tp, "pp": pp, "dp": dp}[axis] == 1:
        return f"{_NOTHING[axis]} ({_traffic_case(case)})."
    right = _sent(*case)[axis]
    for change, sentence in _slips(axis, layers, tp, pp, dp, m):
        if abs(change - 1) > 1e-3 and close(got, right * change, rel=1e-5):
            return f"{sentence} ({_traffic_case(case)})."
    # No mistake that is known: the smallest case that fails says most.
    for tp, pp, dp, m in sorted(product((1, 2), repeat=4), key=sum):
        small = (pp, 1000, 1000 * tp * pp, tp, pp, dp, m)
        wrong = _wrong_axis(answer(*small), small)
        if wrong:
            (axis, got), case, right = wrong, small, _sent(*small)[wrong[0]]
            break
    return (
        f"A rank sends {right:,.0f} bytes to its {axis} group, not {got:,.0f}, and no usual mistake gives that number "
        f"({_traffic_case(case)}, a stream of {case[1]:,} bytes, gradients of {case[2]:,})."
    )


def _traffic_case(case: tuple[int, ...]) -> str:
    layers, _, _, tp, pp, dp, m = case
    return f"tp={tp}, pp={pp}, dp={dp}, {layers} layers, {m} micro-batches"


# --- three clusters -----------------------------------------------------------------------------------------


@check(
    idea="States first: bytes a parameter over tp times pp, less what ZeRO shards; then as little recomputation as still fits.",
    section="The planner: enumerate, drop, predict the time",
    line="Fill the node with tp, take the fewest stages that fit, make the rest replicas, and raise chunks until the bubble is small.",
)
def plan_cluster(answer: Callable[[str], Mapping[str, int | str]]) -> str:
    """Judge `plan_cluster(case)`: for each real cluster a layout that runs and is about as fast as the published one."""
    done = []
    for name in CASES:
        judged = score(_fields(answer(name), name), name)
        if not judged.runs:
            raise Wrong(f"{name}: {judged.sentences[0]}")
        if judged.to_published > 1 + APART:  # the published layout is ahead
            raise Wrong(f"{name}: {judged.to_published:.2f} times the published layout's time. {_slow(judged)}")
        done.append(f"{name} {judged.points}")
    return f"Points of 100, the planner's first choice having 100: {', '.join(done)}."


def _fields(given: object, name: str) -> Layout | dict[str, int | str]:
    if isinstance(given, Layout):
        return given
    if not isinstance(given, Mapping):
        raise Wrong(f"{name}: return a dictionary of fields such as tp, pp, dp and zero, not {given!r}.")
    return {
        # etp is None where experts are not folded, so that a Layout's own dictionary has one.
        key: value if value is None or isinstance(value, str | bool) else whole(value, f"{name}: {key}")
        for key, value in given.items()
    }


def _slow(judged: Score) -> str:
    """The most specific sentence of a score, or the part of a step that loses most against the planner's first choice."""
    if len(judged.sentences) > 2:
        return judged.sentences[1]
    best = plan_case(judged.case.name).best.seconds
    part = max(judged.seconds, key=lambda name: judged.seconds[name] - best[name])
    return f"Look at {PART_NAMES[part]}: {judged.seconds[part]:.2f} s, where the planner's first choice has {best[part]:.2f} s."
