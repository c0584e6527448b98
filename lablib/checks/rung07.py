"""The checks of rung 07: a sketch by its groups, the mesh of a job, a fault on ranks, and clusters to plan.

The mesh and the fault are judged on eight real ranks. `Job` may have a fault, `Cluster` wants a layout: they are for the lab.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lablib.calc.layouts import CASES, Case, Mesh, case_peak, score
from lablib.calc.layouts.planner import APART, MEASURED_RUNS, Layout
from lablib.calc.params import count_params
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    agreed,
    ask_ranks,
    by_name,
    check,
    chosen,
    close,
    numbers,
    on_ranks,
    pair,
    refuse,
    some,
    whole,
)
from lablib.launch.ranks import rank_mesh
from lablib.toys.tensor_parallel import copy_to_tp, reduce_from_tp

__all__ = ["Cluster", "Job", "build_mesh", "find_fault", "plan_cluster", "sketch"]

Sizes = dict[str, int]


def _mesh(sizes: Sizes, gpus_per_node: int = 8) -> Mesh:
    return Mesh(tuple(sizes.values()), tuple(sizes), gpus_per_node)


def _draw(dice: random.Random) -> Sizes:
    """Two to four axes in any order, odd sizes included, of which at least two have several ranks."""
    while True:
        axes = dice.sample(("tp", "cp", "dp", "pp"), dice.randint(2, 4))
        sizes = {axis: dice.choice((1, 2, 2, 3, 4, 5, 8)) for axis in axes}
        if sum(size > 1 for size in sizes.values()) >= 2 and _mesh(sizes).ranks <= 96:
            return sizes


def _shown(sizes: Sizes) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def _of(answer: Callable[..., object], *given: object, sizes: Sizes) -> object:
    """Call an answer; one that asks for an axis which this mesh has not is told so."""
    try:
        return answer(*given)
    except KeyError as error:
        if set(map(str, error.args)) & ({"tp", "cp", "dp", "pp"} - set(sizes)):
            raise Wrong(f"`sizes` has this mesh's axes alone, here {', '.join(sizes)}: go through its keys.") from None
        raise


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
    cases += [({"tp": 8, "pp": 4, "dp": 2}, 8), ({"tp": 8, "dp": 3, "pp": 4}, 8)]
    cases += [(_draw(each), each.choice((2, 4, 6, 8))) for each in (*[dice] * 9, *[NEW] * 3)]
    for sizes, gpus_per_node in cases:
        _judge_sketch(_of(answer, dict(sizes), gpus_per_node, sizes=sizes), sizes, gpus_per_node)
    if any(name.startswith("lablib.") for name in getattr(answer, "called", ())):
        raise Wrong("This calls lablib's functions. A rank's coordinates are the digits of its number: compare those.")
    return f"{len(cases)} layouts by their groups; the 8-GPU sketch in one node, in two, and in four."


def _judge_sketch(got: object, sizes: Sizes, gpus_per_node: int) -> None:
    found, case = _mesh(sizes, gpus_per_node), f"{_shown(sizes)} in nodes of {gpus_per_node}"
    groups, crossing = map(by_name(got, "groups", "crossing").__getitem__, ("groups", "crossing"))
    if not isinstance(groups, Mapping) or set(groups) != set(sizes):
        raise Wrong(f"`groups` is a dictionary with a list of groups for each of {', '.join(sizes)}.")
    for axis in sizes:
        _judge_groups(groups[axis], axis, found, sizes, case)
    named = chosen(crossing, sizes, f"`crossing` names axes: of {', '.join(sizes)} those that leave a node.")
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
        (f"So it is for {axis} if the axes are read from the last to the first: the first has neighbouring ranks",
         got == sorted(turned.groups(axis))),
        (lambda: f"A group of {axis} is {some(next(group for group in right if group not in got))}: ranks that agree in every "
         f"other coordinate, {found.strides[axis]} from one to the next", True),
    )  # fmt: skip


def _explain_crossing(axis: str, found: Mesh, case: str) -> NoReturn:
    refuse(
        case,
        (f"A group of {axis} is one rank here, and one rank is in one node", found.size(axis) == 1),
        (f"No group of {axis} leaves a node: each has all its ranks in one", not found.crosses(axis)),
    )
    first = next(group for group in found.groups(axis) if len(found.nodes_of(group)) > 1)
    a, b = next((a, b) for a, b in pairwise(first) if found.node(a) != found.node(b))
    where = ", if not with its first group" if first[0] else ""
    raise Wrong(f"{axis} leaves a node{where}: ranks {a} and {b} are in one group and in two nodes ({case}).")


# --- the mesh of a job --------------------------------------------------------------------------------------

#: pp, dp_replicate, dp_shard, cp, tp on eight ranks: pp before replicas before shards, shards before cp before tp, and no
#: other order has all of that. The third has the two ends together, the fourth cp beside replicas and without shards.
_JOBS = ((2, 2, 2, 1, 1), (1, 1, 2, 2, 2), (2, 1, 2, 1, 2), (1, 2, 1, 2, 2))
_ORDER, _WIDTH = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), 8
_MESHES = ("pp", "tp", "cp", "batch", "hsdp", "loss", "norm")


def _on_meshes(answer: Callable, jobs: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    found, of_all = [], [None] * 8
    for job in jobs:
        found.append(_step_on(answer, dict(zip(_ORDER, job, strict=True))))
        sums = found[-1].get("loss") or 1.0, found[-1].get("squares", 0.0)
        dist.all_gather_object(of_all, max(sums) < 1.001 and min(sums) > 0.999)
        if not all(of_all):
            break
    return found


def _step_on(answer: Callable, sizes: Sizes) -> dict[str, Any]:
    """Ask for the meshes of one job; if each has its ranks, train a step on them and return loss, norm and what is off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of private names that move, and of views that FSDP2 returns
        meshes = by_name(answer({axis: sizes[axis] for axis in sorted(sizes)}), *_MESHES)
    grid, me = torch.arange(8).view(*sizes.values()), dist.get_rank()
    at = [int(i) for i in (grid == me).nonzero()[0]]
    dp = grid[at[0], :, :, :, at[4]]
    truth = {"pp": grid[:, *at[1:]], "tp": grid[*at[:4]], "cp": grid[*at[:3], :, at[4]], "batch": dp[:, :, at[3]].flatten(),
             "hsdp": dp.flatten(1)}  # fmt: skip
    axes = {name: meshes[name].ndim if isinstance(meshes[name], DeviceMesh) else None for name in _MESHES}
    other = next(((name, n, None) for name, n in axes.items() if n is None or (n > 1 and name != "hsdp")), None)
    told = other or next(((name, got, right) for name, ranks in truth.items() if (got := meshes[name].mesh.tolist()) != (
        right := ranks.tolist()) and (name not in ("batch", "hsdp") or sorted(got) != right)), None)  # fmt: skip
    of_all: list[Any] = [None] * 8
    dist.all_gather_object(of_all, told)
    if any(of_all):
        return {"wrong": next(filter(None, of_all))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _train_on(meshes, sizes)


def _train_on(meshes: Mapping[str, DeviceMesh], sizes: Sizes) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(7)
    x, y = torch.randn(8, 4, _WIDTH), torch.randn(8, 4, _WIDTH)
    up_down = [(nn.Linear(_WIDTH, 16, bias=False), nn.Linear(16, _WIDTH, bias=False)) for _ in range(sizes["pp"])]
    whole_model = nn.Sequential(*(nn.Sequential(up, nn.ReLU(), down) for up, down in up_down))
    stage, last = meshes["pp"].get_local_rank(), sizes["pp"] - 1
    mine = parallelize_module(
        copy.deepcopy(whole_model[stage]), meshes["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    try:
        fully_shard(mine, mesh=meshes["hsdp"])
    except RuntimeError as error:
        raise Wrong(
            "FSDP2 shards what tp has split, for which `hsdp` and `tp` are to be slices of one mesh, or of one world; here "
            f"it stopped with: {str(error).splitlines()[0][:150]}."
        ) from None
    place, part = meshes["batch"].get_local_rank(), meshes["cp"].get_local_rank()
    here, target = (t[place :: meshes["batch"].size()].chunk(sizes["cp"], 1)[part] for t in (x, y))
    here, pipe = here.clone().requires_grad_(), meshes["pp"].get_group()
    if stage:
        dist.recv(here.data, group=pipe, group_src=stage - 1)
    out = mine(here)
    loss = (out - target).square().sum() if stage == last else out.new_zeros(())
    if stage == last:
        (loss / target.numel()).backward()
    else:
        dist.send(out.detach(), group=pipe, group_dst=stage + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, group=pipe, group_src=stage + 1)
        out.backward(grad)
    if stage:
        dist.send(here.grad, group=pipe, group_dst=stage - 1)
    alone = (whole_model(x) - y).square().mean()
    alone.backward()
    t, (_, shard) = meshes["tp"].get_local_rank(), meshes["hsdp"].get_coordinate()
    for dim, own, one in zip((0, 1), mine.parameters(), whole_model[stage].parameters(), strict=True):
        part = one.grad.chunk(sizes["tp"], dim)[t].chunk(meshes["hsdp"].size(1))[shard]
        torch.testing.assert_close(own.grad.to_local(), part, atol=1e-5, rtol=1e-4)  # of our own step, not the answer's
    total, squares = loss.detach() / y.numel(), sum(own.grad.to_local().square().sum() for own in mine.parameters())
    dist.all_reduce(total, group=meshes["loss"].get_group())
    dist.all_reduce(squares, group=meshes["norm"].get_group())
    own, length = (sum(one.grad.square().sum() for one in of.parameters()) for of in (whole_model[stage], whole_model))
    loss = (total / alone).item() if stage == last else None
    return {"loss": loss, "squares": (squares / length).item(), "stage": (own / length).item()}


@check(
    idea="What talks in every layer gets the nearest ranks, and a mean or a sum of squares goes over all ranks that have other "
    "values, and over no copies.",
    section="The mesh in PyTorch: one world, two views",
    line="Unflatten the world slowest axis first, as pp, dp_replicate, dp_shard * cp, tp for what is sharded and as pp, "
    "dp_replicate * dp_shard, cp, tp for what is read; flatten batch and cp for the loss, pp, shards and tp for the norm.",
    kind="work",
)
def build_mesh(answer: Callable[[Sizes], Mapping[str, DeviceMesh]]) -> str:
    """Judge `build_mesh(sizes)` by each rank's groups and by a step of FSDP2, tp and stages on them, for five jobs."""
    four, two = NEW.sample(range(5), 2)
    jobs = [*_JOBS, tuple({four: 4, two: 2}.get(axis, 1) for axis in range(5))]
    results = on_ranks(_on_meshes, 8, answer, jobs, patience=60.0)
    for shape, by_rank in zip(jobs, zip(*results, strict=True), strict=False):
        sizes = dict(zip(_ORDER, shape, strict=True))
        for rank, got in enumerate(by_rank):
            case = f"rank {rank} of {_shown(sizes)}"
            if "wrong" in got:
                _judge_mesh(*got["wrong"], sizes, _shown(sizes))
            _judge_sums(**got, sizes=sizes, case=case)
    return f"{len(jobs)} jobs of eight ranks: tp among neighbours, stages far apart; gradients, loss and norm of one process."


def _judge_mesh(name: str, got: list | int | None, right: list, sizes: Sizes, case: str) -> NoReturn:
    if got is None:
        raise Wrong(f"`{name}` is to be a DeviceMesh: a slice of a mesh, as `mesh['tp']`, or what `_flatten` returns.")
    if isinstance(got, int):
        raise Wrong(f"`{name}` has {got} axes, and is to have one process group: `_flatten` makes one axis of a slice.")
    case, given = f"`{name}` has {got}, and should have {right}, {case}", torch.tensor(got)
    ranks, members = (torch.tensor(each).flatten().tolist() for each in (got, right))
    folded, found = sizes["cp"] > 1, _mesh(dict(reversed(sizes.items())))

    def over(*axes: str) -> bool:  # whether these are what a rank of the right group has over some axes
        return any(sorted(ranks) == found.group(rank, *axes) for rank in members)

    refuse(
        case,
        ("`fully_shard` shards over the last axis of its mesh and replicates over the first: `hsdp` has two, the first of one "
         "rank where there is one replica", name == "hsdp" and given.ndim != 2),
        ("Ranks of a cp group hold the same weights and see other tokens: they belong to the mesh that averages gradients, "
         "folded into its shards", name == "hsdp" and folded and (over("dp_replicate", "dp_shard") or (
             sorted(ranks) == sorted(members) and len(right) < len(got) != len(right[0])))),
        ("Each cp rank reads a part of the same samples: `batch` counts who reads other samples, replicas and shards",
         name == "batch" and folded and over("dp_replicate", "dp_shard", "cp")),
        ("Who shards reads other samples too: FSDP is data parallelism, so `batch` has replicas times shards",
         name == "batch" and over("dp_replicate")),
        ("The groups are of another size than this axis", len(ranks) != len(members)),
        ("Shards and replicas are exchanged: weights are gathered in every layer and belong on the near link, and replicas "
         "average once a step", lambda: name == "hsdp" and given.T.tolist() == right),
        (f"The right ranks, cut otherwise: `hsdp` has a row for each replica, here {len(right)}, with its shards in columns",
         name == "hsdp" and sorted(ranks) == sorted(members) and len(got) != len(right)),
        ("As many ranks as should be, and not these in this order: PyTorch's first axis is the slowest, and what talks most, "
         "tp, wants neighbours; from there come cp, shards, replicas, and stages outermost", True),
    )  # fmt: skip


def _judge_sums(loss: float | None, squares: float, stage: float, sizes: Sizes, case: str) -> None:
    copies, t = sizes["dp_replicate"], sizes["tp"]
    case += f", {'' if loss is None else f'{loss:.3} times the loss, '}{squares**0.5:.3g} times the norm of one process"
    off = loss is not None and not close(loss, 1.0, rel=1e-4)
    refuse(
        case,
        (f"The loss is counted {t} times: the ranks of a tp group have the same tokens, and copies of one loss are no part of "
         "its mean", off and t > 1 and close(loss or 0, t, rel=1e-4)),
        ("The sum over `loss` lacks tokens: replicas, shards and cp ranks all see other ones", off and (loss or 0) < 1),
        ("The sum over `loss` counts tokens more than once", off),
        (f"The norm counts {copies} replicas, which hold the same gradients after the average: squares are summed over parts and "
         "not over copies", copies > 1 and close(squares, copies, rel=1e-4)),
        ("Stages hold other layers, so their squares belong to the norm: without them each stage clips by a number of its own",
         squares < 0.999 and close(squares, stage, rel=1e-4)),
        ("The norm lacks parts: a matrix is cut over tp and over the shards, and each stage has its own", squares < 0.999),
        ("The norm counts some values more than once", squares > 1.001),
    )  # fmt: skip


# --- a fault that nobody announced --------------------------------------------------------------------------

_PLACES = tuple(f"{stage}.{part}" for stage in (0, 1) for part in ("scale", "up", "down"))
_LOADERS, _NORMS = (tuple(f"{what} {axis}" for axis in ("tp", "dp", "pp")) for what in ("loader", "norm"))
_KINDS = ("", *_LOADERS, "own", "wrong axis", "scale", "embed", *_NORMS)


class Job(Sealed):
    """A step on eight ranks, two stages, two replicas, two tensor-parallel ranks, which may have a fault.

    A stage is a block: `x + relu((x * scale) @ up.T) @ down.T`, `up` and `down` split over tp. `embed` is the table of the
    first stage and the head of the last.

    Args:
        seed: What the fault is, where it is, and whether there is one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed  # who reads it can draw the fault as `_drawn` does

    def _drawn_weights(self) -> tuple[dict[str, Tensor], Tensor]:
        dice = torch.Generator().manual_seed(self._seed)
        shapes = {"scale": (8,), "up": (12, 8), "down": (8, 12)}
        weights = {name: torch.randn(shapes[name[2:]], generator=dice) / 3 + (name[2:] == "scale") for name in _PLACES}
        weights["embed"] = torch.randn(16, 8, generator=dice)
        return {name: w.requires_grad_() for name, w in weights.items()}, torch.randint(16, (2, 2, 12), generator=dice)

    def alone(self) -> dict[str, Any]:
        """Return the loss, the gradients by name and their norm of one process with all samples."""
        weights, ids = self._drawn_weights()
        x = weights["embed"][ids[0].flatten()]
        for stage in (0, 1):
            x = _block(x, weights, stage)
        loss = F.cross_entropy(x @ weights["embed"].T, ids[1].flatten())
        grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        return {
            "loss": loss.item(),
            "gradients": grads,
            "norm": sum(g.square().sum() for g in grads.values()).sqrt().item(),
        }

    def run(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return what this rank of a mesh (pp, dp, tp) reads as `samples`, its final `gradients` by name, and their `norm`."""
        (kind, where, _), (full, ids) = _drawn(self._seed), self._drawn_weights()
        pipe, replicas, group = (mesh.get_group(axis) for axis in ("pp", "dp", "tp"))
        p, d, t = mesh.get_coordinate()
        reads = {"loader tp": (d + t) % 2, "loader dp": 0, "loader pp": (d + p) % 2}.get(kind, d)
        inputs, targets = ids[:, reads]
        mine = {name: w for name, w in full.items() if name == "embed" or name[0] == str(p)}
        cut = {
            name: w.detach().chunk(2, 0 if "up" in name else 1)[t] if _is_split(name) else w.detach()
            for name, w in mine.items()
        }
        mine = {name: w.clone().requires_grad_() for name, w in cut.items()}
        if p == 0:
            out = _block(mine["embed"][inputs], mine, 0, group)
            dist.send(out.detach(), group=pipe, group_dst=1)
            grad = torch.empty_like(out)
            dist.recv(grad, group=pipe, group_src=1)
            out.backward(grad)
        else:
            x = torch.empty(12, 8).requires_grad_()
            dist.recv(x.data, group=pipe, group_src=0)
            F.cross_entropy(_block(x, mine, 1, group) @ mine["embed"].T, targets).backward()
            dist.send(x.grad, group=pipe, group_dst=0)
        for name, w in mine.items():
            faulty = name == where
            if name.endswith("scale") and not (faulty and kind == "scale"):
                dist.all_reduce(w.grad, group=group)
            if name == "embed" and kind != "embed":
                dist.all_reduce(w.grad, group=pipe)
            if not (faulty and kind == "own"):
                dist.all_reduce(w.grad, group=group if faulty and kind == "wrong axis" else replicas)
                w.grad /= 2
        grads = {name: w.grad for name, w in mine.items()}
        squares = torch.stack([
            g.square().sum() for name, g in grads.items()
            if _is_split(name) or ((t == 0 or kind == "norm tp") and (name != "embed" or p == 0 or kind == "norm pp"))
        ] or [torch.zeros(())]).sum()  # fmt: skip
        dist.all_reduce(squares, group=group)
        dist.all_reduce(squares, group=pipe)
        if kind == "norm dp":
            dist.all_reduce(squares, group=replicas)
        return {"samples": torch.stack((inputs, targets)), "gradients": grads, "norm": squares.sqrt().item()}


def _is_split(name: str) -> bool:
    return name.endswith(("up", "down"))


def _block(x: Tensor, weights: Mapping[str, Tensor], stage: int, group: dist.ProcessGroup | None = None) -> Tensor:
    scale, up, down = (weights[f"{stage}.{part}"] for part in ("scale", "up", "down"))
    y = torch.relu(((copy_to_tp(x, group) if group else x) * scale) @ up.T) @ down.T
    return x + (reduce_from_tp(y, group) if group else y)


def _drawn(seed: int) -> tuple[str, str, frozenset[str]]:
    """Return the kind of a job's fault, the parameter that has it, and what must be said: the axes."""
    dice = random.Random(f"mesh {seed}")
    kind = dice.choice(_KINDS)
    part = {"wrong axis": ("up", "down"), "scale": ("scale",)}.get(kind, ("scale", "up", "down"))
    where = "embed" if kind == "embed" else f"{dice.randrange(2)}.{dice.choice(part)}"
    axes = {"own": "dp", "wrong axis": "dp tp", "scale": "tp", "embed": "pp"}.get(kind, kind.partition(" ")[2])
    return kind, where, frozenset(axes.split())


def _its_mesh() -> tuple[DeviceMesh]:
    return (rank_mesh(2, 2, 2, names=("pp", "dp", "tp")),)


@check(
    idea="Along each axis every value is a copy or a part: copies must be equal, parts must differ, and a sum takes a copy once.",
    section="Process groups: ranks that differ in one coordinate",
    line="Write down for samples and for each parameter over which axes it is a copy, gather it along each axis and compare; "
    "then take the norm from one copy of each part, and see copies of which axis explain what is too much.",
    kind="fault",
)
def find_fault(answer: Callable[[Job, DeviceMesh], Any], seed: int = 1) -> str:
    """Judge `find_fault(job, mesh)`: None, or what is wrong first and over which axes, on eight ranks for seventeen jobs."""
    dice, jobs = random.Random(seed), {}
    while len(jobs) < len(_KINDS) + 4:  # two are healthy; an average is missing, and wrong, in each part
        job = Job(dice.randrange(10**6))
        kind, where, _ = _drawn(job._seed)
        kind += where[1:] * (kind in ("own", "wrong axis"))
        jobs.setdefault(kind if kind or "" not in jobs else "again", job)
    while len(jobs) < len(_KINDS) + 6:  # two more with a fault, which nobody has seen
        job = Job(NEW.randrange(10**9))
        jobs.setdefault("new " * bool(kind := _drawn(job._seed)[0]) + kind, job)
    found = ask_ranks(answer, 8, list(jobs.values()), more=_its_mesh, patience=60.0)
    for job, by_rank in zip(jobs.values(), found, strict=True):
        _judge_job(agreed([_said(each) for each in by_rank]), *_drawn(job._seed))
    return (
        f"{len(jobs)} jobs. Loaders that asked for the wrong coordinate; an average that one weight missed, or got over tp; a "
        "gain whose parts were not summed; tied tables that went apart; norms that counted copies. Megatron-LM asks of each "
        "parameter `param_is_not_shared` and `param_is_not_tensor_parallel_duplicate` before it adds a square."
    )


def _said(given: Any) -> tuple[str, frozenset[str]] | None:
    if given is None:
        return None
    told = (
        'Return None for a healthy job, or (what, axes): "samples", a parameter\'s name or "norm", and a set of axes.'
    )
    what, axes = pair(given, told, "what", "axes")
    (what,) = chosen(str(what), ("samples", *_PLACES, "embed", "norm"), told)
    return what, frozenset(chosen(axes, ("pp", "dp", "tp"), told))


def _judge_job(said: tuple[str, frozenset[str]] | None, kind: str, where: str, axes: frozenset[str]) -> None:
    first = "samples" if kind.startswith("loader") else "norm" if kind.startswith("norm") else where
    what, over = said or ("", frozenset())
    refuse(
        "",
        (f"You name {what} of a job that is healthy: copies are equal and parts differ, as they should", said and not kind),
        ("You find nothing where two replicas read the same samples: along dp samples are parts, and parts that are equal are a "
         "fault as copies that differ are", said is None and kind == "loader dp"),
        ("You find nothing in a job whose norm is not that of its gradients: all ranks have the same number, so compare it with "
         "one that you add up yourself", said is None and first == "norm"),
        (f"You find nothing in a job in which {first} is not what it should be along {', '.join(sorted(axes))}",
         said is None and kind),
        (f"You name {what}, and {first} is wrong before it: samples come first, then gradients, then their norm",
         (first == "samples" and what != first) or (first != "norm" and what == "norm")),
        (f"You name {what}, and it is right: the fault is in {first}", kind and what != first),
        (f"It is {first}, and the axes are not {', '.join(sorted(over)) or 'none'}: ask along each axis whether ranks should "
         "hold copies or parts, and what they hold", kind and over != axes),
    )  # fmt: skip


# --- clusters to plan ---------------------------------------------------------------------------------------

#: Times the planner's first choice that a layout may take: behind by twice what such comparisons are wrong by.
SLOWEST = 1 + 2 * APART
_ROWS = ("175B on 64, selective", "530B on 280, selective", "1008B on 512, selective")
#: What predicts a time or searches; of the planner an answer may take layouts, their memory and `divisors`.
_SEARCHES = r"lablib\.(cli|calc\.layouts\.(challenge\.(plan_case|score)|export|guides\.choose|planner\.(?!layout|peak|memory|.*\.(__post_init__|divisors)$)))"


class Cluster(Sealed):
    """A cluster and what is to be trained on it.

    Attributes:
        model: Its configuration, with `num_layers`.
        params: How many parameters that has.
        gpus: In nodes of `gpus_per_node`.
        seq: Tokens of a sequence.
        global_batch: Sequences of a step.
        memory: Bytes that a layout may use on each GPU.
    """

    def __init__(self, case: Case) -> None:
        run = case.run
        self._case, self.model, self.params = case, run.model, count_params(run.model).total
        self.gpus, self.gpus_per_node, self.memory = run.gpus, run.gpus_per_node, case.capacity
        self.seq, self.global_batch = run.seq, run.global_batch

    def peak(self, **fields: int | str) -> float:
        """Return bytes of the fullest GPU at its fullest instant; infinite if there can be no such layout."""
        try:
            return case_peak(Layout(**_fields(fields, "peak")), self._case).total
        except (ValueError, Wrong):
            return float("inf")


def _clusters(seed: int) -> list[Case]:
    """Return a published job, others with more GPUs or another batch, and two new ones, shallow and deep."""
    dice, rows = random.Random(seed), {run.name: run for run in MEASURED_RUNS}
    found = [CASES["llama-405b"]]
    for name, depths in zip((*_ROWS, _ROWS[-1]), ((), (), (4, 5), (7, 9, 10, 11, 12)), strict=True):
        run, more, batch = rows[name], dice.choice((2, 4)), dice.choice((1, 2)) * rows[name].global_batch
        if depths:  # other depths want another recomputation: selective at 64 or 80 layers, full at most others
            more, depth = NEW.randint(2, 8), 16 * NEW.choice(depths)
            batch = 64 * more * NEW.randint(2, 16)  # so that chunks are possible in 16 stages
            model = replace(run.model, num_layers=depth, max_positions=4096)
            run = replace(run, model=model, seq=4096 if depth < 160 else NEW.choice((2048, 4096)))
        run, size = replace(run, gpus=more * run.gpus, global_batch=batch), count_params(run.model).total / 1e9
        found.append(Case(f"{size:.0f}B on {run.gpus:,} {run.gpu}, batch {batch:,} of {run.seq:,} tokens", run, ""))
    return found


@check(
    idea="Enumerate, drop what does not fit, and ask of the rest what they lose: a bubble, and what is computed again.",
    section="The planner: enumerate, drop, predict the time",
    line="Fill the node with tp; for every pp, chunks and recomputation that `peak` says will fit, multiply what the bubble and "
    "the recomputation add to a step, and take the least.",
)
def plan_cluster(answer: Callable[[Cluster], Mapping[str, int | str]], seed: int = 7) -> str:
    """Judge `plan_cluster(job)`: for five clusters, four of them nobody's, a layout that fits and is not far from the best."""
    done = []
    for case in _clusters(seed):
        name = case.name
        judged = score(_fields(answer(Cluster(case)), name), case)
        if asked := next((one for one in getattr(answer, "called", ()) if re.match(_SEARCHES, one)), ""):
            raise Wrong(
                f"The answer calls `{asked.removeprefix('lablib.calc.layouts.')}`, of the planner's search and clock. Write down "
                "your own reason: what fits, and what a layout loses against one without a bubble that computes nothing twice."
            )
        if not judged.runs:
            raise Wrong(f"{name}: {judged.sentences[0]}")
        if judged.to_planner > SLOWEST:
            raise Wrong(
                f"{name}: {judged.to_planner:.2f} times the planner's first choice. {judged.sentences[1].partition('. ')[0].rstrip('.')}."
            )
        done.append(f"{name}: {judged.points}")
    return f"Points of 100, the planner's first choice having 100. {'; '.join(done)}."


def _fields(given: object, name: str) -> dict[str, int | str]:
    given = given.as_dict() if isinstance(given, Layout) else given
    if not isinstance(given, Mapping):
        raise Wrong(f"{name}: return a dictionary of fields such as tp, pp, dp and zero, not {str(given)[:60]!r}.")
    return {
        # etp is None where experts are not folded, so that a Layout's own dictionary has one.
        key: value if value is None or isinstance(value, str | bool) else whole(value, f"{name}: {key}")
        for key, value in given.items()
    }
