"""Worked exercises of rung 13, expert parallelism."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def route(logits, bias, k):
    """The bias has a say in the choice and none in the weights."""
    scores = logits.softmax(-1)
    chosen = (scores + bias).topk(k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def expert_bytes(tokens, size, experts, k, ep, per_node):
    """There and back, forward and backward: four times a way."""
    nodes = ep // per_node
    missed = math.comb(experts - experts // nodes, k) / math.comb(experts, k)
    ways = 4 * tokens * size
    return {
        "inside": ways * k * (per_node - 1) / ep,
        "across": ways * k * (ep - per_node) / ep,
        "once": ways * (nodes - 1) * (1 - missed),
    }


def groups_of(grid):
    """This rank's group along each axis of a grid."""
    sizes, names = tuple(grid.values()), tuple(grid)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return {axis: mesh.get_group(axis) for axis in grid}


def folded_step(job, dense, folded):
    """Sum every gradient over its copies, divide all by the number of losses."""
    losses = dense["dp"] * dense["cp"]
    dense, folded = groups_of(dense), groups_of(folded)
    model = job.model(dense["tp"], folded["ep"])
    job.loss(model).backward()
    squares = 0
    for name, p in model.named_parameters():
        copies, pieces = list(dense.values()), None  # on every rank
        if name.startswith("dense."):
            copies, pieces = [dense["dp"], dense["cp"]], dense["tp"]
        elif ".experts." in name:
            copies, pieces = [folded["edp"]], folded["ep"]
        for group in copies:
            dist.all_reduce(p.grad, group=group)
        p.grad /= losses
        square = p.grad.square().sum()
        if pieces is not None:
            dist.all_reduce(square, group=pieces)
        squares += square
    return model, squares.sqrt()


def watched(model):
    """Return a dict that a run fills with the output of each part, by name."""
    seen = {}

    def note(part, args, out):
        out = out[0] if type(out) is tuple else out  # a router's weights
        out.retain_grad()  # backward leaves its gradient in .grad
        seen[names[part]] = out

    names = {part: name for name, part in model.named_modules()}
    for part, name in names.items():
        if name.endswith(("router", "visit", "combine", "shared")):
            part.register_forward_hook(note)
    return seen


def find_fault(job):
    """All that may differ from one process, in order; the first that does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, split = job.alone(), job.split()
    found = []  # part, moment, whether it is wrong on this rank

    def compare(part, moment, mine, true):
        found.append((part, moment, not torch.allclose(mine, true)))

    def compare_state(part, moment):
        for name, true in alone.get_submodule(part).state_dict().items():
            if part.endswith("experts"):
                true = true.chunk(ranks)[rank]
            mine = split.get_submodule(part).state_dict()[name]
            compare(part, moment, mine, true)

    true, mine = watched(alone), watched(split)
    losses = [job.loss(model) for model in (alone, split)]
    for part in mine:
        if part.endswith("visit"):  # the way, or those who answer there?
            compare_state(part.replace("visit", "experts"), "forward")
        compare(part, "forward", mine[part], true[part].chunk(ranks)[rank])
    for loss in losses:
        loss.backward()
    for part in reversed(mine):
        if part.endswith(("router", "visit")):  # combine made their gradients
            taker = part.partition(".")[0] + ".combine"
            whole = ranks * true[part].grad  # of the mean over all ranks
            own = whole.chunk(ranks)[rank]
            compare(taker, "backward", mine[part].grad, own)
    for model in (alone, split):
        job.update(model)
    for i in range(len(alone)):
        for part in ("router", "experts", "shared"):
            compare_state(f"{i}.{part}", "update")
    said = [None] * ranks
    dist.all_gather_object(said, found)
    for by_rank in zip(*said, strict=True):
        where = [rank for rank, (*_, wrong) in enumerate(by_rank) if wrong]
        if where:
            return *by_rank[0][:2], where
    return None
