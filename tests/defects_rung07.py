"""Planted defects of rung 07: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from fractions import Fraction
from itertools import product

import numpy as np

from lablib.calc.layouts import CASES, plan_case, score
from lablib.calc.layouts.planner import Layout
from tests.planted import asked, listed


class coordinates:
    def slowest_first(rank, sizes):
        at = {}
        for axis, size in reversed(sizes.items()):
            rank, at[axis] = divmod(rank, size)
        return at

    def without_remainder(rank, sizes):
        at, stride = {}, 1
        for axis, size in sizes.items():
            at[axis] = rank // stride
            stride *= size
        return at

    def stride_of_the_neighbour(rank, sizes):
        """Divides by the size before it only, not by the product of all before it."""
        at, before = {}, 1
        for axis, size in sizes.items():
            at[axis] = rank // before % size
            before = size
        return at

    always_the_remainder = lambda rank, sizes: {axis: rank % size for axis, size in sizes.items()}
    counted_from_one = lambda rank, sizes: {axis: at + 1 for axis, at in coordinates.right(rank, sizes).items()}

    def right(rank, sizes):
        """Second solution: divide by the product of the sizes before, keep the remainder."""
        names = list(sizes)
        return {
            axis: rank // math.prod(sizes[name] for name in names[:i]) % sizes[axis] for i, axis in enumerate(names)
        }

    def right_2(rank, sizes):
        """Third solution: numpy, slowest axis first."""
        at = np.unravel_index(rank, list(sizes.values())[::-1])
        return dict(zip(reversed(sizes), at, strict=True))

    def right_counting(rank, sizes):
        """An odometer, turned on rank times."""
        at = dict.fromkeys(sizes, 0)
        for _ in range(rank):
            for axis in sizes:
                at[axis] = (at[axis] + 1) % sizes[axis]
                if at[axis]:
                    break
        return at


def _groups(sizes, axis):
    ranks = range(math.prod(sizes.values()))
    alike = {}
    for rank in ranks:
        at = coordinates.right(rank, sizes)
        alike.setdefault(tuple(at[name] for name in sizes if name != axis), []).append(rank)
    return list(alike.values())


def _leaves(group, gpus_per_node):
    return len({rank // gpus_per_node for rank in group}) > 1


def _sketch(sizes, gpus_per_node, groups=_groups, crosses=None):
    found = {axis: groups(sizes, axis) for axis in sizes}
    crosses = crosses or (lambda axis: any(_leaves(group, gpus_per_node) for group in found[axis]))
    return {"groups": found, "crossing": [axis for axis in sizes if crosses(axis)]}


class sketch:
    def every_group_is_neighbours(sizes, gpus_per_node):
        def neighbours(sizes, axis):
            n = math.prod(sizes.values())
            return [list(range(i, i + sizes[axis])) for i in range(0, n, sizes[axis])]

        return _sketch(sizes, gpus_per_node, groups=neighbours)

    the_order_turned_round = asked(
        _sketch, groups=lambda sizes: lambda _, axis: _groups(dict(reversed(sizes.items())), axis)
    )

    def ranks_that_are_equal_here(sizes, gpus_per_node):
        """Takes the ranks with the same coordinate on the axis for its group."""

        def same(sizes, axis):
            n = range(math.prod(sizes.values()))
            return [[r for r in n if coordinates.right(r, sizes)[axis] == i] for i in range(sizes[axis])]

        return _sketch(sizes, gpus_per_node, groups=same)

    without_the_idea_crossing_by_size = asked(
        _sketch, crosses=lambda sizes, gpus_per_node: lambda axis: sizes[axis] > gpus_per_node
    )
    crossing_by_the_first_group = asked(
        _sketch, crosses=lambda sizes, gpus_per_node: lambda axis: _leaves(_groups(sizes, axis)[0], gpus_per_node)
    )
    all_but_the_first_axis_cross = asked(_sketch, crosses=lambda sizes: lambda axis: axis != next(iter(sizes)))
    only_the_first_group = lambda *case: _sketch(*case, groups=lambda sizes, axis: _groups(sizes, axis)[:1])

    def crossing_if_stride_times_size_does_not_divide(sizes, gpus_per_node):
        """The rule of thumb, applied to an axis of one rank and to a node that the job does not fill."""
        spans, span = {}, 1
        for axis, size in sizes.items():
            span *= size
            spans[axis] = span
        return _sketch(sizes, gpus_per_node, crosses=lambda axis: gpus_per_node % spans[axis] != 0)

    def crossing_if_the_stride_leaves(sizes, gpus_per_node):
        strides = {axis: math.prod(list(sizes.values())[:i]) for i, axis in enumerate(sizes)}
        return _sketch(sizes, gpus_per_node, crosses=lambda axis: strides[axis] >= gpus_per_node)

    def a_loop_without_end(sizes, gpus_per_node):
        """Walks to the next rank of the first group, and never on from it."""
        groups, rank = {axis: [[0]] for axis in sizes}, 0
        while rank < math.prod(sizes.values()):
            groups[next(iter(sizes))][0].append(rank)
            groups[next(iter(sizes))][0].pop()
        return {"groups": groups, "crossing": []}

    one_group_of_all = lambda *case: _sketch(*case, groups=lambda sizes, axis: [list(range(math.prod(sizes.values())))])

    def right(sizes, gpus_per_node):
        """Second solution: every corner of the other axes, and from it along this one."""
        names, strides = list(sizes), {}
        for name in names:
            strides[name] = math.prod(sizes[other] for other in names[: names.index(name)])
        groups, crossing = {}, set()
        for axis in names:
            rest = [name for name in names if name != axis]
            groups[axis] = []
            for corner in product(*(range(sizes[name]) for name in rest)):
                first = sum(at * strides[name] for name, at in zip(rest, corner, strict=True))
                group = tuple(first + i * strides[axis] for i in range(sizes[axis]))
                groups[axis].append(group)
                if first // gpus_per_node != group[-1] // gpus_per_node:
                    crossing.add(axis)
        return {"groups": groups, "crossing": crossing}

    def right_2(sizes, gpus_per_node):
        """Third solution: a grid of numpy, whose axis is moved to the end and flattened; arrays as they come."""
        names = list(reversed(sizes))
        ranks = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in names])
        groups = {axis: np.moveaxis(ranks, names.index(axis), -1).reshape(-1, sizes[axis]) for axis in names}
        nodes = {axis: found // gpus_per_node for axis, found in groups.items()}
        return {"groups": groups, "crossing": np.array([a for a in names if (nodes[a] != nodes[a][:, :1]).any()])}

    def right_sets(sizes, gpus_per_node):
        """Sets of sets, and a truth value for each axis."""
        found = {axis: {frozenset(group) for group in _groups(sizes, axis)} for axis in sizes}
        leaves = {axis: any(_leaves(group, gpus_per_node) for group in found[axis]) for axis in sizes}
        return {"groups": found, "crossing": leaves}

    def right_by_neighbours(sizes, gpus_per_node):
        """Tuples of tuples from first rank and stride, and no node looked at twice."""
        strides, stride = {}, 1
        for axis, size in sizes.items():
            strides[axis], stride = stride, stride * size
        first = {axis: [r for r in range(stride) if r // strides[axis] % sizes[axis] == 0] for axis in sizes}
        groups = {
            axis: tuple(tuple(range(r, r + strides[axis] * sizes[axis], strides[axis])) for r in first[axis])
            for axis in sizes
        }
        crossing = tuple(a for a in sizes if any(g[0] // gpus_per_node < g[-1] // gpus_per_node for g in groups[a]))
        return {"groups": groups, "crossing": crossing}


def _with(case, **change):
    layers, stream, gradients, tp, pp, dp, m = case
    found = {
        "tp": 8 * (tp - 1) / tp * stream * m * (layers / pp),
        "pp": 2 * stream * m * (pp > 1),
        "dp": 2 * (dp - 1) / dp * gradients / tp / pp,
    }
    return {axis: value * change.get(axis, 1) for axis, value in found.items()}


class group_traffic:
    forward_only = lambda *case: _with(case, tp=1 / 2)
    layers_of_the_whole_model = lambda *case: _with(case, tp=case[4])
    tensor_parallelism_once_a_step = lambda *case: _with(case, tp=1 / case[6])
    # Counts the sizes of the messages, which nobody sends as such.
    messages_in_place_of_a_ring = lambda *case: _with(case, tp=case[3] / (2 * (case[3] - 1)) if case[3] > 1 else 1)
    activations_but_no_gradient_back = lambda *case: _with(case, pp=1 / 2)
    once_for_every_boundary = lambda *case: _with(case, pp=case[4] - 1)
    gradients_of_the_whole_model = lambda *case: _with(case, dp=case[3] * case[4])
    gradients_not_divided_by_tp = lambda *case: _with(case, dp=case[3])
    gradients_after_every_micro_batch = lambda *case: _with(case, dp=case[6])
    the_stream_divided_by_tp = lambda *case: _with(case, tp=1 / case[3])
    the_pipeline_divided_by_tp = lambda *case: _with(case, pp=1 / case[3])
    one_all_reduce_a_layer = lambda *case: _with(case, tp=1 / 4)
    micro_batches_shared_by_the_replicas = lambda *case: _with(case, tp=1 / case[5])
    what_is_received_counted_too = lambda *case: _with(case, pp=2)
    a_message_for_every_layer = lambda *case: _with(case, pp=case[0] // case[4])
    the_reduce_scatter_alone = lambda *case: _with(case, dp=1 / 2)
    gradients_divided_by_replicas = lambda *case: _with(case, dp=1 / case[5])
    three_passes_as_in_zero_3 = lambda *case: _with(case, dp=3 / 2)
    three_tenths_too_much = lambda *case: _with(case, dp=1.3)

    def right(layers, stream, gradients, tp, pp, dp, micro_batches):
        """Second solution: walk through a step and add up what leaves a rank."""
        sent = dict.fromkeys(("tp", "pp", "dp"), 0.0)
        piece = stream / tp * (tp - 1)  # a reduce-scatter or an all-gather
        for _ in range(micro_batches):
            for _layer in range(layers // pp):
                for _half in ("attention", "mlp"):
                    for _direction in ("forward", "backward"):
                        sent["tp"] += 2 * piece
            if pp > 1:
                sent["pp"] += stream + stream
        mine = gradients / tp / pp
        for _round in range(2 * (dp - 1)):
            sent["dp"] += mine / dp
        return sent

    def right_2(layers, stream, gradients, tp, pp, dp, micro_batches):
        """Third solution: reduce-scatters and all-gathers on fractions, rounded to whole bytes at the end."""

        def passes(size, ranks, count):
            return count * Fraction(size) * (ranks - 1) / ranks

        exact = {
            "dp": passes(Fraction(gradients) / tp / pp, dp, 2),
            "pp": Fraction(0 if pp == 1 else stream) * 2 * micro_batches,
            "tp": passes(stream, tp, 8 * Fraction(layers, pp) * micro_batches),
        }
        return {axis: round(value) for axis, value in exact.items()}

    def right_in_single_precision(*case):
        return {axis: np.float32(value) for axis, value in group_traffic.right(*case).items()}

    def rounds_of_a_ring_that_never_closes(layers, stream, gradients, tp, pp, dp, micro_batches):
        sent, at = 0, 1
        while at != 0:
            sent, at = sent + gradients, at % dp + 1
        return {"tp": 0, "pp": 0, "dp": sent}

    in_gigabytes = lambda *case: {axis: value / 1e9 for axis, value in _with(case).items()}

    def right_of_numpy(layers, stream, gradients, tp, pp, dp, micro_batches):
        """All three at once: sizes, times and rings as arrays."""
        sizes = np.array([stream, stream, gradients / (tp * pp)], dtype=np.float64)
        times = np.array([4 * micro_batches * layers / pp, 2 * micro_batches * (pp > 1), 1])
        rings = np.array([2 - 2 / tp, 1, 2 - 2 / dp])
        return dict(zip(("tp", "pp", "dp"), sizes * times * rings, strict=True))


_RIGHT = {
    "gpt-76b": {"tp": 8, "pp": 4, "dp": 32, "recompute": "full", "micro_batch": 2},
    "gpt-175b": {"tp": 8, "pp": 8, "dp": 1, "recompute": "selective"},
    "llama-405b": {"tp": 8, "cp": 2, "pp": 16, "dp": 64, "zero": 2, "schedule": "interleaved", "virtual_stages": 8},
}


def _for(one, **fields):
    """Return an answer that is right but for one case."""
    return lambda case: fields if case == one else _RIGHT[case]


class plan_cluster:
    # The early print of Llama 3's table: half of the GPUs have nothing to do.
    factors_that_do_not_multiply = lambda case: _RIGHT[case] | ({"cp": 16, "dp": 4} if case == "llama-405b" else {})

    # Asks whether the weights fit: 350 GB over 8 x 4 ranks do, the states do not.
    weights_must_fit = _for("gpt-175b", tp=8, pp=4, dp=2, recompute="full")
    everything_recomputed = lambda case: _RIGHT[case] | {"recompute": "full"}

    # ZeRO-3 alone, as for a small model: it fits, and gathers all weights for every micro-batch.
    everything_sharded_over_replicas = _for("gpt-175b", dp=64, zero=3, recompute="full")

    # Llama's degrees without its chunks: the pipeline is empty for nearly half of the step.
    one_micro_batch_a_stage = _for("llama-405b", tp=8, pp=16, dp=128, zero=2)
    a_stage_for_every_layer = _for("gpt-76b", tp=4, pp=60, dp=4)

    def right(case):
        """Second solution: try the layouts that put tp in the node, stages next, and score them."""
        found = []
        gpus = CASES[case].run.gpus
        for pp in (4, 8, 16):
            for recompute, chunks in product(("none", "selective"), (1, 2, 4, 5, 8)):
                fields = {"tp": 8, "pp": pp, "dp": gpus // (8 * pp), "recompute": recompute, "virtual_stages": chunks}
                fields |= {"zero": 1 if gpus > 8 * pp else 0, "schedule": "1f1b" if chunks == 1 else "interleaved"}
                found.append((score(fields, case).points, len(found), fields))
        return max(found)[2]

    right_stage_2_as_the_paper_says = lambda case: (
        _RIGHT[case] | ({"cp": 1, "dp": 128, "zero": 2} if case == "llama-405b" else {})
    )
    right_dictionary_of_the_planner = lambda case: plan_case(case).best.layout.as_dict()

    def right_2(case):
        """Third solution: from the states alone, without trying: the fewest stages whose states leave half of the GPU."""
        params, layers, gpus = {
            "gpt-76b": (76e9, 60, 1024),
            "gpt-175b": (175e9, 96, 64),
            "llama-405b": (405e9, 126, 16384),
        }[case]
        for pp in (4, 8, 16, 32):
            dp = gpus // (8 * pp)
            if dp == 1 or (8 + 12 / dp) * params / (8 * pp) < 45e9:
                break
        stages = (layers + 2 if (layers + 2) % (8 * pp) == 0 else layers) // pp
        chunks = 1 if dp == 1 else max(v for v in (1, 2, 5, 8) if stages % v == 0)
        return Layout(
            tp=8,
            pp=pp,
            dp=dp,
            zero=0 if dp == 1 else 2 if case == "llama-405b" else 1,  # eight stages a rank leave no room for gradients
            recompute="selective" if dp == 1 else "none",
            schedule="interleaved" if chunks > 1 else "1f1b",
            virtual_stages=chunks,
        )


#: What an answer must be told, by defect.
SENTENCES = {
    "slowest_first": "The order is reversed",
    "counted_from_one": "counted from 0",
    "crossing_by_the_first_group": "Look at every group of tp",
    "crossing_if_stride_times_size_does_not_divide": "one rank is in one node",
    "layers_of_the_whole_model": "one part in 4 of the model",
    "tensor_parallelism_once_a_step": "for each of the 13",
    "the_pipeline_divided_by_tp": "sends the whole stream",
    "in_gigabytes": "Return bytes, not GB",
    "a_loop_without_end": "It never ends",
    "rounds_of_a_ring_that_never_closes": "It never ends",
    "activations_but_no_gradient_back": "their gradient back",
    "gradients_not_divided_by_tp": "tp divides them too",
    "three_tenths_too_much": "no usual mistake gives that number (tp=1, pp=1, dp=2",
    "factors_that_do_not_multiply": "8192 ranks",
}
DEFECTS, SECOND_SOLUTIONS = listed(coordinates, sketch, group_traffic, plan_cluster)
