"""Planted defects of rung 07: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lablib.calc.layouts import Mesh, score
from lablib.calc.layouts.planner import Layout, Workload, cluster, plan, step_time
from lablib.calc.parallel import expert_groups
from lablib.checks import rung07
from tests.planted import asked, listed


def _at(rank, sizes):
    at = {}
    for axis, size in sizes.items():
        rank, at[axis] = divmod(rank, size)
    return at


def _groups(sizes, axis):
    ranks = range(math.prod(sizes.values()))
    alike = {}
    for rank in ranks:
        at = _at(rank, sizes)
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

    without_the_idea_crossing_by_size = asked(
        _sketch, crosses=lambda sizes, gpus_per_node: lambda axis: sizes[axis] > gpus_per_node
    )
    crossing_by_the_first_group = asked(
        _sketch, crosses=lambda sizes, gpus_per_node: lambda axis: _leaves(_groups(sizes, axis)[0], gpus_per_node)
    )
    all_but_the_first_axis_cross = asked(_sketch, crosses=lambda sizes: lambda axis: axis != next(iter(sizes)))
    the_axes_by_their_names = asked(_sketch, sizes=lambda sizes: dict(sorted(sizes.items())))
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

    def without_the_idea_lablibs_mesh(sizes, gpus_per_node):
        found = Mesh(tuple(sizes.values()), tuple(sizes), gpus_per_node)
        return _sketch(sizes, gpus_per_node, groups=lambda _, axis: found.groups(axis))

    def without_the_idea_lablibs_expert_groups(sizes, gpus_per_node):
        axes = dict.fromkeys(("tp", "cp", "dp", "pp"), 1) | sizes
        order = "-".join([*sizes, *(axis for axis in axes if axis not in sizes), "ep"])
        found = expert_groups(**axes, ep=1, etp=1, order=order)
        return _sketch(sizes, gpus_per_node, groups=lambda _, axis: found[axis])

    lablibs_nodes_for_groups_of_ones_own = asked(_sketch, crosses=lambda sizes, gpus_per_node: (
        Mesh(tuple(sizes.values()), tuple(sizes), gpus_per_node).crosses))  # fmt: skip
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

    def right_each_rank_beside_each(sizes, gpus_per_node):
        """Coordinates anew for each pair of ranks: slow, and right."""

        def beside(sizes, axis):
            found = []
            for rank in range(math.prod(sizes.values())):
                group = []
                for other in range(math.prod(sizes.values())):
                    here, there = _at(rank, sizes), _at(other, sizes)
                    if all(here[name] == there[name] for name in sizes if name != axis):
                        group.append(other)
                if group not in found:
                    found.append(group)
            return found

        return _sketch(sizes, gpus_per_node, groups=beside)


_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _views(sizes, order=_ORDER, hsdp=None, **change):
    """One mesh of five axes and its flattened slices; a second view of the same world for FSDP."""
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    full = world._unflatten(0, [sizes[axis] for axis in order], order)
    pp, replicas, shards, cp, tp = (sizes[axis] for axis in _ORDER)
    held = world._unflatten(0, (pp, replicas, shards * cp, tp), ("pp", "dp_replicate", "fsdp", "tp"))
    made = {"batch": "dp_replicate dp_shard", "loss": "dp_replicate dp_shard cp", "norm": "pp dp_shard cp tp"}
    found = {"hsdp": hsdp(world, held, full) if hsdp else held["dp_replicate", "fsdp"]}
    for name, axes in ({axis: axis for axis in ("pp", "tp", "cp")} | made | change).items():
        one = tuple(sorted(axes.split(), key=order.index))
        found[name] = full[one[0]] if len(one) == 1 else full[one]._flatten(name)
    return found


class build_mesh:
    # The product is right, and no loss tells.
    without_the_idea_fastest_first = lambda sizes: _views(sizes, tuple(reversed(_ORDER)))
    without_the_idea_stages_in_the_node = lambda sizes: _views(sizes, ("dp_replicate", "dp_shard", "cp", "pp", "tp"))
    without_the_idea_sums_over_all_ranks = lambda sizes: _views(sizes, loss=" ".join(_ORDER), norm=" ".join(_ORDER))
    norm_over_the_replicas_too = lambda sizes: _views(sizes, norm=" ".join(_ORDER))
    loss_over_tp_too = lambda sizes: _views(sizes, loss="dp_replicate dp_shard cp tp")
    loss_of_whole_sequences_only = lambda sizes: _views(sizes, loss="dp_replicate dp_shard")
    batch_with_tp = lambda sizes: _views(sizes, batch="dp_replicate dp_shard tp")
    norm_without_shards = lambda sizes: _views(sizes, norm="pp tp")
    norm_of_a_stage = lambda sizes: _views(sizes, norm="dp_shard cp tp")
    norm_of_the_shards = lambda sizes: _views(sizes, norm="pp dp_shard cp")
    other_samples_for_each_cp_rank = lambda sizes: _views(sizes, batch="dp_replicate dp_shard cp")
    same_samples_for_the_shards = lambda sizes: _views(sizes, batch="dp_replicate")
    one_axis_for_fsdp = lambda sizes: _views(sizes, hsdp=lambda world, held, full: held["fsdp"])
    cp_left_out_of_fsdp = lambda sizes: _views(sizes, hsdp=lambda world, held, full: full["dp_replicate", "dp_shard"])
    cp_beside_the_shards = lambda sizes: _views(sizes, hsdp=lambda world, held, full: (
        full["dp_shard", "cp"] if sizes["cp"] > 1 else held["dp_replicate", "fsdp"]))  # fmt: skip
    cp_folded_only_into_shards_that_are_there = lambda sizes: _views(sizes, hsdp=lambda world, held, full: (
        full["dp_replicate", "dp_shard"] if sizes["dp_shard"] == 1 else held["dp_replicate", "fsdp"]))  # fmt: skip
    cp_among_the_replicas = lambda sizes: _views(sizes, hsdp=lambda world, held, full: (
        held["dp_replicate", "fsdp"] if sizes["dp_replicate"] == 1 else
        world._unflatten(0, (sizes["pp"], 2 * sizes["cp"], sizes["dp_shard"], sizes["tp"]), ("a", "r", "s", "b"))["r", "s"]))  # fmt: skip
    replicas_among_the_shards = lambda sizes: _views(sizes, hsdp=lambda world, held, full: world._unflatten(
        0, (sizes["pp"], 1, 8 // (sizes["pp"] * sizes["tp"]), sizes["tp"]), ("a", "r", "s", "b"))["r", "s"])  # fmt: skip
    batch_of_two_axes = lambda sizes: (made := _views(sizes)) | {"batch": made["hsdp"]}
    hsdp_of_another_mesh = lambda sizes: _views(sizes, hsdp=lambda world, held, full: DeviceMesh(
        "cpu", held.mesh.permute(0, 3, 1, 2), mesh_dim_names=("pp", "tp", "r", "s"))["r", "s"])  # fmt: skip
    names_in_place_of_meshes = lambda sizes: dict.fromkeys(("pp", "tp", "cp", "batch", "hsdp", "loss", "norm"), "tp")

    def shards_far_and_replicas_near(sizes):
        def turned(world, held, full):
            parts = sizes["dp_shard"] * sizes["cp"]
            names = ("pp", "fsdp", "dp_replicate", "tp")
            near = world._unflatten(0, (sizes["pp"], parts, sizes["dp_replicate"], sizes["tp"]), names)
            return near["fsdp", "dp_replicate"]

        return _views(sizes, hsdp=turned)

    right = lambda sizes: _views(sizes)

    def right_2(sizes):
        """Third solution: a mesh of its own for each purpose."""
        pp, replicas, shards, cp, tp = (sizes[axis] for axis in _ORDER)
        mesh = init_device_mesh("cpu", (pp, replicas, shards * cp, tp), mesh_dim_names=("pp", "r", "s", "tp"))
        read = init_device_mesh("cpu", (pp, replicas * shards, cp, tp), mesh_dim_names=("pp", "d", "cp", "tp"))
        mean = init_device_mesh("cpu", (pp, replicas * shards * cp, tp), mesh_dim_names=("pp", "all", "tp"))
        found = {"pp": mesh["pp"], "tp": mesh["tp"], "hsdp": mesh["r", "s"], "batch": read["d"], "cp": read["cp"]}
        return found | {"loss": mean["all"], "norm": mesh["pp", "s", "tp"]._flatten("parts")}

    def right_batch_in_another_order(sizes):
        """Replicas are counted before shards: nobody asked who reads which samples."""
        grid = torch.arange(8).view([sizes[axis] for axis in _ORDER]).permute(0, 3, 4, 2, 1).flatten(3).flatten(0, 2)
        return _views(sizes) | {"batch": DeviceMesh("cpu", grid, mesh_dim_names=("others", "batch"))["batch"]}

    def right_replicas_in_another_order(sizes):
        """A row for each replica, the last first."""
        pp, replicas, shards, cp, tp = (sizes[axis] for axis in _ORDER)
        grid = torch.arange(8).view(pp, replicas, shards * cp, tp).flip(1)
        held = DeviceMesh("cpu", grid, mesh_dim_names=("pp", "r", "s", "tp"))
        return _views(sizes) | {"hsdp": held["r", "s"], "tp": held["tp"]}

    def shards_from_the_last_to_the_first(sizes):
        """FSDP2 goes by the process group, whose ranks are sorted, and a DTensor by its place on the mesh."""
        pp, replicas, shards, cp, tp = (sizes[axis] for axis in _ORDER)
        grid = torch.arange(8).view(pp, replicas, shards * cp, tp).flip(2)
        held = DeviceMesh("cpu", grid, mesh_dim_names=("pp", "r", "s", "tp"))
        return _views(sizes) | {"hsdp": held["r", "s"], "tp": held["tp"]}


_COPIES = {"samples": {"pp", "tp"}, "embed": {"pp", "dp", "tp"}, "scale": {"dp", "tp"}, "up": {"dp"}, "down": {"dp"}}
_AXES = ("pp", "dp", "tp")


def _off(here, theirs, mesh, equal_parts=True, own_group=False, unseen=()):
    """Return what is wrong first and over which axes, from what all ranks hold."""
    me, found = mesh.get_coordinate(), {}
    for at, seen in theirs.items():
        for i, axis in enumerate(_AXES):
            other = theirs[(*at[:i], 1 - at[i], *at[i + 1 :])]
            if own_group and me != at:
                continue
            for what in seen.keys() & other.keys():
                copies, looks = axis in _COPIES[what.split(".")[-1]], (what[2:], axis) not in unseen
                if looks and (copies or equal_parts) and torch.allclose(seen[what] * 1.0, other[what] * 1.0) != copies:
                    found.setdefault(what, set()).add(axis)
    return next(((what, found[what]) for what in ("samples", *sorted(found)) if what in found), None)


def _find(job, mesh, norms=True, first=(), **how):
    seen, of_all = job.run(mesh), [None] * 8
    mine = {"samples": seen["samples"]} | seen["gradients"]
    dist.all_gather_object(of_all, (tuple(mesh.get_coordinate()), mine))
    theirs = dict(of_all)

    def squares(again=""):
        here = [(what, g) for at, held in theirs.items() for what, g in held.items() if what != "samples" and not any(
            i for i, axis in zip(at, _AXES, strict=True) if axis in _COPIES[what.split(".")[-1]] and axis != again)]  # fmt: skip
        return sum(g.square().sum().item() for _, g in here)

    found = _off(mine, theirs, mesh, **how)
    counted = [axis for axis in ("", *_AXES) if abs(seen["norm"] ** 2 / squares(axis) - 1) < 1e-4] + ["?"]
    if first and abs(seen["norm"] / job.alone()["norm"] - 1) > 1e-4:
        return first
    return found or (("norm", {counted[0]} - {"?"}) if norms and counted[0] else None)


class find_fault:
    without_the_idea_all_is_well = lambda job, mesh: None
    without_the_idea_always_the_same = lambda job, mesh: ("samples", {"tp"})
    without_the_idea_copies_alone = lambda job, mesh: _find(job, mesh, equal_parts=False)
    without_the_idea_the_norm_beside_one_process = lambda job, mesh: (
        ("norm", {"dp"}) if abs(job.run(mesh)["norm"] / job.alone()["norm"] - 1) > 1e-4 else None
    )

    def without_the_idea_asks_the_check(job, mesh):
        kind, where, axes = rung07._drawn(job._seed)
        first = {"l": "samples", "n": "norm"}.get(kind[:1], where)
        return (first, axes) if kind else None

    forgets_the_norm = lambda job, mesh: _find(job, mesh, norms=False)
    the_norm_before_all_else = lambda job, mesh: _find(job, mesh, first=("norm", {"dp"}))
    a_gain_along_tp_alone = lambda job, mesh: _find(job, mesh, unseen={("scale", "dp")})
    rows_along_dp_alone = lambda job, mesh: _find(job, mesh, unseen={("down", "tp")})
    each_rank_for_itself = lambda job, mesh: _find(job, mesh, norms=False, own_group=True)

    names_nothing_that_is_there = lambda job, mesh: ("the loader", {"tp"})

    def one_axis_where_there_are_two(job, mesh):
        found = _find(job, mesh)
        return found and (found[0], {min(found[1])})

    right = lambda job, mesh: _find(job, mesh)

    def right_2(job, mesh):
        """Third solution: numbers in place of tensors, gathered along each axis, then over all ranks."""
        seen = job.run(mesh)
        sums = {what: value.double().square().sum().item() for what, value in seen["gradients"].items()}
        marks = {what: value.double().flatten().cumsum(0).sum().item() for what, value in seen["gradients"].items()}
        marks["samples"], found, of_all = seen["samples"].double().flatten().cumsum(0).sum().item(), [], [None] * 8
        for i, axis in enumerate(_AXES):
            pair = [None, None]
            dist.all_gather_object(pair, marks, group=mesh.get_group(axis))
            for what in pair[0].keys() & pair[1].keys():
                same = math.isclose(pair[0][what], pair[1][what], rel_tol=1e-5)
                if same != (axis in _COPIES[what.split(".")[-1]]):
                    found.append((what != "samples", what, i))
        dist.all_gather_object(of_all, (mesh.get_coordinate(), sums, found))
        if off := sorted({one for *_, theirs in of_all for one in theirs}):
            return {"what": off[0][1], "axes": [_AXES[i] for _, what, i in off if what == off[0][1]]}
        for again in (None, *_AXES):
            total = 0.0
            for at, theirs, _ in of_all:
                extra = [a for a, i in zip(_AXES, at, strict=True) if i and a != again]
                total += sum(s for what, s in theirs.items() if not _COPIES[what.split(".")[-1]].intersection(extra))
            if math.isclose(total, seen["norm"] ** 2, rel_tol=1e-4):
                return again and ["norm", [again]]
        return "norm", []


_AGAIN = {"none": 0.0, "selective": 0.05, "full": 1 / 3}


def _fields(pp, dp, v, recompute, tp=8, zero=1):
    how = {"schedule": "interleaved", "virtual_stages": v} if v > 1 else {}
    return {"tp": tp, "pp": pp, "dp": dp, "zero": zero if dp > 1 else 0, "recompute": recompute} | how


def _layouts(job, tps=(8,), chunks=range(1, 17), modes=tuple(_AGAIN), zero=1):
    """Yield what a layout loses and its fields, for all that divide."""
    for tp, pp, v, recompute in product(tps, range(1, job.model.num_layers + 1), chunks, modes):
        dp = job.gpus // (tp * pp)
        if tp * pp * dp == job.gpus and job.global_batch % dp == 0:
            lost = (1 + (pp - 1) * dp / (v * job.global_batch)) * (1 + _AGAIN[recompute])
            yield lost, _fields(pp, dp, v, recompute, tp, zero)


def _first(job, key=lambda one: one[0], fits=None, **how):
    """Return the fields of the first that fits, in the order of a key."""
    fits = fits or (lambda fields: job.peak(**fields) <= job.memory)
    return next((fields for _, fields in sorted(_layouts(job, **how), key=key) if fits(fields)), {"dp": job.gpus})


class plan_cluster:
    # What was published for these models, with more replicas on more GPUs.
    def without_the_idea_a_table(job):
        pp = {126: 16, 105: 35, 128: 64}.get(job.model.num_layers, 8 if job.params < 2e11 else 16)
        return _fields(pp, job.gpus // (8 * pp), 1 if pp > 16 else 3, "selective")

    # What came of trying, cluster by cluster.
    def without_the_idea_a_row_for_each_depth(job):
        found = {126: (32, 4, "none"), 96: (4, 12, "none"), 105: (7, 15, "selective")}
        pp, v, recompute = found.get(job.model.num_layers, (16, 8, "selective"))
        return _fields(pp, job.gpus // (8 * pp), v, recompute)

    def without_the_idea_one_layer_a_chunk(job):
        found = {126: (32, 4, "none"), 96: (4, 12, "none"), 105: (7, 15, "selective")}
        pp, v, recompute = found.get(job.model.num_layers, (16, job.model.num_layers // 16, "selective"))
        return _fields(pp, job.gpus // (8 * pp), v, recompute)

    without_the_idea_one_recipe = lambda job: _fields(8, job.gpus // 64, 1, "selective")
    without_the_idea_whatever_fits = lambda job: _first(job, key=lambda one: -one[0])

    # Arithmetic of the planner's, no reason of one's own.
    without_the_idea_asks_the_planner = lambda job: plan(
        job.model, gpus=job.gpus, gpu="h100", seq=job.seq, global_batch=job.global_batch
    ).best.layout.as_dict()

    def without_the_idea_scores_them_all(job):
        found = [score(fields, "llama-405b") for _, fields in _layouts(job, modes=("none",), chunks=(1,))]
        return max(found, key=lambda one: one.points).layout

    def without_the_idea_the_planners_clock(job):
        load, one = Workload(job.model, cluster("h100", job.gpus), job.seq, job.global_batch), Layout(**_first(job))
        return one if step_time(load.step_work(one), load.rates()) else None

    def without_the_idea_reads_the_case(job):
        return job._case.published

    factors_that_do_not_multiply = lambda job: _first(job) | {"dp": 4}
    zero_in_quotes = lambda job: _first(job) | {"zero": "1"}
    everything_recomputed = lambda job: _first(job, modes=("full",))
    nothing_recomputed = lambda job: _first(job, modes=("none",))
    # Asks whether the weights fit, and not the states.
    weights_must_fit = lambda job: _first(job, fits=lambda fields: 2 * job.params / (8 * fields["pp"]) < job.memory)
    fewest_stages_at_any_price = lambda job: _first(job, key=lambda one: (one[1]["pp"], one[0]))
    # Right degrees without chunks: the pipeline is empty for nearly half of the step.
    one_chunk_a_rank = lambda job: _first(job, chunks=(1,))
    every_optimizer_whole = lambda job: _first(job, zero=0)
    # ZeRO-3 alone, as for a small model: it fits, and gathers all weights for every micro-batch.
    everything_sharded_over_replicas = lambda job: _fields(1, job.gpus, 1, "full", tp=1, zero=3)
    half_a_node = lambda job: _first(job, tps=(4,))

    right = lambda job: _first(job)
    right_degrees_as_floats = lambda job: _first(job, fits=lambda each: job.peak(**each | {"tp": 8.0}) <= job.memory)
    right_dictionary_of_a_layout = lambda job: Layout(**_first(job)).as_dict()

    def right_2(job):
        """Third solution: products and a bubble, by parameters and micro-batches, as a Layout."""

        def busy(fields):
            one, products = Layout(**fields), {"none": 6, "selective": 6.3, "full": 8}[fields["recompute"]]
            bubble = (one.pp - 1) / (one.virtual_stages * one.num_microbatches(job.global_batch))
            return products * job.params * (1 + bubble), one.pp

        return Layout(**_first(job, key=lambda one: busy(one[1])))


#: What an answer must be told, by defect.
SENTENCES = {
    "crossing_by_the_first_group": "tp leaves a node, if not with its first group",
    "crossing_if_stride_times_size_does_not_divide": "one rank is in one node",
    "without_the_idea_fastest_first": "As many ranks as should be, and not these in this order",
    "without_the_idea_stages_in_the_node": "As many ranks as should be, and not these in this order",
    "without_the_idea_sums_over_all_ranks": "The norm counts 2 replicas",
    "norm_over_the_replicas_too": "The norm counts 2 replicas",
    "loss_over_tp_too": "The loss is counted 2 times",
    "loss_of_whole_sequences_only": "lacks tokens",
    "norm_of_a_stage": "clips by a number of its own (rank 0 of pp2-dp_replicate2-dp_shard2-cp1-tp1, 0.",
    "the_axes_by_their_names": "if the axes are read from the last",
    "batch_with_tp": "The groups are of another size",
    "norm_without_shards": "The norm lacks parts",
    "names_nothing_that_is_there": "Return None for a healthy job",
    "norm_of_the_shards": "The norm lacks parts",
    "other_samples_for_each_cp_rank": "reads a part of the same samples",
    "same_samples_for_the_shards": "FSDP is data parallelism",
    "one_axis_for_fsdp": "`hsdp` has two",
    "cp_left_out_of_fsdp": "folded into its shards",
    "cp_beside_the_shards": "folded into its shards",
    "cp_folded_only_into_shards_that_are_there": "folded into its shards",
    "cp_among_the_replicas": "folded into its shards",
    "replicas_among_the_shards": "The right ranks, cut otherwise",
    "shards_from_the_last_to_the_first": "As many ranks as should be, and not these in this order",
    "without_the_idea_lablibs_expert_groups": "This calls lablib's functions",
    "lablibs_nodes_for_groups_of_ones_own": "This calls lablib's functions",
    "batch_of_two_axes": "`batch` has 2 axes",
    "hsdp_of_another_mesh": "slices of one mesh",
    "shards_far_and_replicas_near": "Shards and replicas are exchanged",
    "names_in_place_of_meshes": "is to be a DeviceMesh",
    "without_the_idea_all_is_well": "You find nothing in a job",
    "without_the_idea_always_the_same": "You name samples",
    "without_the_idea_copies_alone": "parts that are equal are a fault",
    "without_the_idea_the_norm_beside_one_process": "the axes are not dp",
    "without_the_idea_asks_the_check": "This asks the check",
    "forgets_the_norm": "add up yourself",
    "the_norm_before_all_else": "the axes are not dp",
    "rows_along_dp_alone": "the axes are not dp",
    "each_rank_for_itself": "You find nothing in a job",
    "one_axis_where_there_are_two": "the axes are not dp",
    "without_the_idea_asks_the_planner": "of the planner's search and clock",
    "without_the_idea_scores_them_all": "`challenge.score`",
    "without_the_idea_reads_the_case": "This asks the check",
    "factors_that_do_not_multiply": "ranks, but there are gpus=16384",
    "zero_in_quotes": "zero='1' does not exist",
    "one_chunk_a_rank": "leave the pipeline idle",
}
DEFECTS, SECOND_SOLUTIONS = listed(sketch, build_mesh, find_fault, plan_cluster)
