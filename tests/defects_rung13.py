"""Planted defects of rung 13: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from collections import namedtuple
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_

from lablib.calc.models import Router
from lablib.calc.parallel import chance_met, dispatch_bytes
from lablib.toys.expert_parallel import TopKRouter, average_gradients
from tests.planted import asked, listed, told

Route = namedtuple("Route", "weights chosen")


def _top(scores, by, k, weigh=None):
    chosen = by.topk(k, dim=-1).indices
    weights = (scores if weigh is None else weigh).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def _chosen(logits, bias, k):
    """Return the scores and the experts with the largest helped scores."""
    scores = logits.softmax(-1)
    return scores, (scores + bias).topk(k, dim=-1).indices


class route:
    bias_forgotten = lambda logits, bias, k: _top(logits.softmax(-1), logits, k)
    bias_in_the_weights = lambda logits, bias, k: _top(logits.softmax(-1) + bias, logits.softmax(-1) + bias, k)
    bias_on_the_logits = lambda logits, bias, k: _top(logits.softmax(-1), logits + bias, k)
    bias_as_a_factor = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) * (1 + bias), k)
    half_the_bias = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) + bias / 2, k)
    bias_turned_round = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) - bias, k)

    def scores_not_divided(logits, bias, k):
        scores, chosen = _chosen(logits, bias, k)
        return scores.gather(-1, chosen), chosen

    def divided_by_all_scores_with_the_bias(logits, bias, k):
        helped = (logits.softmax(-1) + bias).topk(k, dim=-1)
        return helped.values, helped.indices

    def softmax_of_what_was_chosen(logits, bias, k):
        helped = (logits.softmax(-1) + bias).topk(k, dim=-1)
        return helped.values.softmax(-1), helped.indices

    a_second_softmax = told(scores_not_divided, lambda found: (found[0].softmax(-1), found[1]))
    divided_by_k = told(scores_not_divided, lambda found, k: (found[0] / k, found[1]))
    all_alike = told(scores_not_divided, lambda found, k: (torch.full_like(found[0], 1 / k), found[1]))

    over_the_tokens = lambda logits, bias, k: _top(logits.softmax(0), logits.softmax(0) + bias, k)

    def one_of_the_two_is_sorted(logits, bias, k):
        weights, chosen = _top(logits.softmax(-1), logits.softmax(-1) + bias, k)
        return weights, chosen.sort(-1).values

    experts_first = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) + bias, k)[::-1]

    sigmoids = lambda logits, bias, k: _top(logits.sigmoid(), logits.sigmoid() + bias, k)
    by_lablibs_router = lambda logits, bias, k: TopKRouter.choose(
        SimpleNamespace(bias_E=bias, rules=Router(), k=k), logits.softmax(-1)
    )
    smallest = lambda logits, bias, k: _top(logits.softmax(-1), -(logits.softmax(-1) + bias), k)
    beyond_floats = told(scores_not_divided, lambda found: ([[10**400] * len(row) for row in found[1]], found[1]))

    def right(logits, bias, k):
        """Arrays, the chosen by their numbers, and the weights as a softmax of the chosen logits alone."""
        x, b = logits.double().numpy(), bias.numpy()
        scores = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        chosen = np.sort(np.argsort(scores + b)[:, -k:])
        picked = np.exp(np.take_along_axis(x, chosen, -1))
        return picked / picked.sum(-1, keepdims=True), chosen

    def right_2(logits, bias, k):
        """Lists and a loop."""
        weights, chosen = [], []
        for row in logits.tolist():
            powers = [math.exp(value - max(row)) for value in row]
            scores = [power / sum(powers) for power in powers]
            best = sorted(range(len(row)), key=lambda e: scores[e] + float(bias[e]))[-k:]
            chosen.append(best)
            weights.append([scores[e] / sum(scores[i] for i in best) for e in best])
        return weights, chosen

    def right_3(logits, bias, k):
        """The largest one after the other, changing what was given; a named tuple."""
        scores = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
        left, chosen = scores + bias, []
        for _ in range(k):
            chosen.append(left.argmax(-1, keepdim=True))
            left = left.scatter(1, chosen[-1], -torch.inf)
        chosen = torch.cat(chosen, -1)
        weights = scores.gather(1, chosen)
        return Route(weights / weights.sum(-1, keepdim=True), chosen)


def _bytes(tokens, size, experts, k, ep, per_node, *, ways=4, **changed):
    nodes = ep // per_node
    missed = math.comb(experts - experts // nodes, k) / math.comb(experts, k)
    copies = {
        "inside": k * (per_node - 1) / ep,
        "across": k * (ep - per_node) / ep,
        "once": (nodes - 1) * (1 - missed),
    } | changed
    return {key: ways * tokens * size * each for key, each in copies.items()}


class expert_bytes:
    forward_only = lambda *case: _bytes(*case, ways=2)
    dispatch_forward_only = lambda *case: _bytes(*case, ways=1)
    combine_has_no_backward = lambda *case: _bytes(*case, ways=3)
    six_ways = lambda *case: _bytes(*case, ways=6)
    back_by_copies = told(_bytes, lambda right: right | {"once": (right["once"] + right["across"]) / 2})
    in_megabytes = lambda *case: _bytes(*case, ways=4e-6)
    both_ways_of_the_wire = lambda *case: _bytes(*case, ways=8)
    to_itself_as_well = asked(_bytes, inside=lambda k, ep, per_node: k * per_node / ep)
    all_that_leaves_the_rank = asked(_bytes, across=lambda k, ep: k * (ep - 1) / ep)
    all_over_the_network = asked(_bytes, across=lambda k: k)
    one_copy_of_a_token = asked(
        _bytes, inside=lambda ep, per_node: (per_node - 1) / ep, across=lambda ep, per_node: (ep - per_node) / ep
    )
    one_copy_in_all = asked(_bytes, once=lambda ep, per_node: (ep - per_node) / ep)
    k_copies_for_a_node = told(_bytes, lambda right, k: right | {"once": right["once"] * k})

    def all_experts_on_a_node(tokens, size, experts, k, ep, per_node):
        nodes = ep // per_node
        chance = math.comb(experts // nodes, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=(nodes - 1) * chance)

    def drawn_with_replacement(tokens, size, experts, k, ep, per_node):
        nodes = ep // per_node
        return _bytes(tokens, size, experts, k, ep, per_node, once=(nodes - 1) * (1 - (1 - 1 / nodes) ** k))

    by_lablibs_chance = asked(
        _bytes,
        once=lambda experts, k, ep, per_node: (ep / per_node - 1) * chance_met(experts * per_node // ep, experts, k),
    )
    by_lablibs_ways = asked(_bytes, across=lambda k, ep, per_node: dispatch_bytes(1, k, 1, ep // per_node, value=1) / 4)
    every_node = asked(_bytes, once=lambda ep, per_node: ep // per_node - 1)

    def own_node_too(tokens, size, experts, k, ep, per_node):
        n = ep // per_node
        missed = math.comb(experts - experts // n, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=n * (1 - missed))

    def a_copy_for_each_rank(tokens, size, experts, k, ep, per_node):
        missed = math.comb(experts - experts // ep, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=(ep - per_node) * (1 - missed))

    neighbours_forgotten = asked(_bytes, inside=lambda k, ep: k / ep)
    its_ranks_forgotten = asked(_bytes, across=lambda k, ep, per_node: k * (ep // per_node - 1) / ep)
    by_its_experts = told(_bytes, lambda right, experts, ep: right | {"inside": right["inside"] * experts / ep})
    each_pair_once = asked(_bytes, inside=lambda k, ep, per_node: k * (per_node - 1) / 2 / ep)
    nothing_saved = asked(_bytes, once=lambda k, ep, per_node: k * (ep - per_node) / ep)

    def right(tokens, size, experts, k, ep, per_node):
        """Rank by rank; the chance of a miss as a product; whole bytes."""
        ways, inside, across = 4 * tokens * size, Fraction(0), Fraction(0)
        for rank in range(1, ep):
            if rank < per_node:
                inside += Fraction(k, ep)
            else:
                across += Fraction(k, ep)
        elsewhere = experts - experts * per_node // ep
        missed = math.prod((Fraction(elsewhere - i, experts - i) for i in range(k)), start=Fraction(1))
        nodes_met = (ep // per_node - 1) * (1 - missed)
        return {"once": round(ways * nodes_met), "inside": ways * inside, "across": float(ways * across), "nodes": ep}

    def right_2(tokens, size, experts, k, ep, per_node):
        """The chance by logarithms of factorials, in numpy."""
        nodes = np.int64(ep // per_node)
        rest = experts - experts // int(nodes)
        lost = 0.0
        if rest >= k:
            logs = [math.lgamma(rest + 1), -math.lgamma(rest - k + 1)]
            logs += [-math.lgamma(experts + 1), math.lgamma(experts - k + 1)]
            lost = math.exp(math.fsum(logs))
        if nodes == 1:
            lost = 1.0
        sent = np.float64(4) * tokens * size
        there = sent * k * (1 - 1 / nodes)
        return {"inside": sent * k * (1 - 1 / ep) - there, "across": there, "once": sent * (nodes - 1) * (1 - lost)}


_KINDS = {"experts": ("edp", "ep"), "dense": ("dp cp", "tp"), "other": ("dp cp tp", "")}


def _kind(name):
    return next((kind for kind in ("experts", "dense") if kind in name), "other")


def _meshes(*grids):
    """Return the groups of all axes of some grids by name."""
    found = {}
    for grid in grids:
        mesh = init_device_mesh("cpu", tuple(grid.values()), mesh_dim_names=tuple(grid))
        found |= {axis: mesh.get_group(axis) for axis in grid}
    return found


def _folded(*, over=None, divided=None, squares="right", turned=dict, ep="ep", early=False, reduce=dist.all_reduce):
    """Build a step with one idea changed: axes to sum over, divisor (copies, sizes), squares, order of axes, the ep group."""
    over = {kind: axes for kind, (axes, _) in _KINDS.items()} | (over or {})

    def step(job, dense, folded):
        sizes = dense | folded
        groups = _meshes(turned(dense), turned(folded))
        model = job.model(groups["tp"], groups[ep])
        job.loss(model).backward()
        before, total, roots = [p.grad.clone() for p in model.parameters()], 0.0, 0.0
        for name, p in model.named_parameters():
            kind = _kind(name)
            for axis in over[kind].split():
                reduce(p.grad, group=groups[axis])
            copies = math.prod(sizes[axis] for axis in over[kind].split())
            p.grad /= divided(copies, sizes, kind) if divided else sizes["dp"] * sizes["cp"]
        for (name, p), first in zip(model.named_parameters(), before, strict=True):
            square = (first if early else p.grad).square().sum()
            pieces = _KINDS[_kind(name)][1] if squares in ("right", "roots") else ""
            if squares == "dense" and _kind(name) == "dense":
                pieces = "tp"
            if pieces:
                dist.all_reduce(square, group=groups[pieces])
            if squares == "copies":
                dist.all_reduce(square)
            total, roots = total + square, roots + square.sqrt()
        return model, roots if squares == "roots" else total.sqrt()

    return step


class folded_step:
    mean_over_the_copies_of_an_expert = _folded(
        divided=lambda copies, sizes, kind: copies if kind == "experts" else sizes["dp"] * sizes["cp"]
    )
    without_the_idea_mean_over_all_who_hold_it = _folded(divided=lambda copies, sizes, kind: copies)
    without_the_idea_as_ddp_does = _folded(
        over=dict.fromkeys(_KINDS, "dp cp tp"), divided=lambda copies, sizes, kind: copies
    )
    without_the_idea_experts_as_all_others = _folded(over={"experts": "dp cp"})
    experts_over_ep = _folded(over={"experts": "ep"})
    experts_left_alone = _folded(over={"experts": ""})
    router_not_over_tp = _folded(over={"other": "dp cp"})
    cp_forgotten = _folded(over={"dense": "dp", "other": "dp tp"}, divided=lambda copies, sizes, kind: sizes["dp"])
    cp_forgotten_in_the_divisor = _folded(divided=lambda copies, sizes, kind: sizes["dp"])
    tp_in_the_divisor = _folded(divided=lambda copies, sizes, kind: sizes["dp"] * sizes["cp"] * sizes["tp"])
    pieces_added = _folded(over={"dense": "dp cp tp"})
    summed_only = _folded(divided=lambda copies, sizes, kind: 1)
    divided_by_ep_as_well = _folded(
        divided=lambda copies, sizes, kind: sizes["dp"] * sizes["cp"] * (sizes["ep"] if kind == "experts" else 1)
    )
    first_axis_fastest = _folded(turned=lambda grid: dict(reversed(grid.items())))
    tp_of_neighbours = _folded(turned=lambda grid: dict(sorted(grid.items())))
    copied_to_all = _folded(reduce=lambda grad, group: dist.broadcast(grad, group=group, group_src=0))
    ep_out_of_dp = _folded(ep="dp")
    ep_out_of_tp = _folded(ep="tp")
    norm_of_a_ranks_own_part = _folded(squares="own")
    norm_without_other_experts = _folded(squares="dense")
    norm_counts_copies = _folded(squares="copies")
    norms_added = _folded(squares="roots")
    norm_before_the_sum = _folded(early=True)
    norm_squared = told(_folded(), lambda found: (found[0], found[1] ** 2))
    norm_of_the_sums = told(_folded(), lambda found, dense: (found[0], found[1] * dense["dp"] * dense["cp"]))
    norm_is_nan = told(_folded(), lambda found: (found[0], math.nan))
    nan_gradients = told(_folded(), lambda found: [p.grad.mul_(math.nan) for p in found[0].parameters()] and found)
    clipped = told(
        _folded(), lambda found: (clip_grads_with_norm_(found[0].parameters(), 1, found[1]) or found[0], found[1])
    )
    negated = told(_folded(), lambda found: [p.grad.neg_() for p in found[0].parameters()] and found)
    averaged_by_lablib = told(
        _folded(), lambda found: average_gradients(torch.nn.Identity(), dist.group.WORLD, dist.group.WORLD) or found
    )

    def without_the_idea_a_whole_copy_on_each_rank(job, dense, folded):
        alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
        job.loss(type(job)(job.seed, dense).model(alone, alone)).backward()
        return _folded()(job, dense, folded)

    def copied_from_one_process(job, dense, folded):
        model, norm = _folded()(job, dense, folded)
        job.loss(job.whole()).backward()
        return model, norm

    def right(job, dense, folded):
        """Divide the loss, and sum in one message a kind, over flattened meshes; the model and norm by name."""
        one, two = (
            init_device_mesh("cpu", tuple(grid.values()), mesh_dim_names=tuple(grid)) for grid in (dense, folded)
        )
        model = job.model(one.get_group("tp"), two.get_group("ep"))
        (job.loss(model) / (dense["dp"] * dense["cp"])).backward()
        axes = tuple(axis for axis in dense if axis != "tp")
        over = {
            "experts": two.get_group("edp"),
            "dense": one[axes]._flatten("losses").get_group(),
            "other": dist.group.WORLD,
        }
        kinds, squares = {}, 0.0
        for name, p in model.named_parameters():
            kinds.setdefault(_kind(name), []).append(p)
        for kind, held in kinds.items():
            message = torch.cat([p.grad.flatten() for p in held])
            dist.all_reduce(message, group=over[kind])
            copies = over[kind].size()
            own = message.square().sum() / copies  # each copy brings its share
            dist.all_reduce(own)
            squares += own.item()
            for p, part in zip(held, message.split([p.numel() for p in held]), strict=True):
                p.grad = part.view_as(p)
        return SimpleNamespace(model=model, norm=np.float64(squares**0.5))

    def right_2(job, dense, folded):
        """Groups from positions that are counted by hand, and all gradients gathered and added in Python."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def at(grid, r):
            place = {}
            for axis in reversed(grid):
                r, place[axis] = divmod(r, grid[axis])
            return place

        def like(grid, r, *fixed):
            return tuple(q for q in range(ranks) if all(at(grid, q)[axis] == at(grid, r)[axis] for axis in fixed))

        def group(grid, axis):
            found = {like(grid, r, *(a for a in grid if a != axis)) for r in range(ranks)}
            made = {members: dist.new_group(members) for members in sorted(found)}
            return next(g for members, g in made.items() if rank in members)

        model = job.model(group(dense, "tp"), group(folded, "ep"))
        job.loss(model).backward()
        everybody = [None] * ranks
        dist.all_gather_object(everybody, {n: p.grad for n, p in model.named_parameters()})
        squares = 0
        for name, p in model.named_parameters():
            grid, piece = {"experts": (folded, ["ep"]), "dense": (dense, ["tp"]), "other": (dense, [])}[_kind(name)]
            losses = dense["dp"] * dense["cp"]
            p.grad = sum(everybody[r][name] for r in like(grid, rank, *piece)) / losses
            for first in {like(grid, r, *piece) for r in range(ranks)}:
                squares += (sum(everybody[r][name] for r in first) / losses).square().sum()
        return [model, squares.sqrt()]


def _differences(job, *, experts=True):
    """Return what may differ from one process, in order: part, moment, and whether it does on this rank."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    models = job.alone(), job.split()
    logs = [{}, {}]
    for model, log in zip(models, logs, strict=True):
        for name, part in model.named_modules():
            if name.count(".") == 1 and not name.endswith("experts"):

                def note(part, args, out, name=name, log=log):
                    log[name] = out[0] if isinstance(out, tuple) else out
                    log[name].retain_grad()

                part.register_forward_hook(note)
    losses = [job.loss(model) for model in models]

    def state(name, moment):
        one, mine = (model.get_submodule(name).state_dict() for model in models)
        for key, true in one.items():
            true = true.chunk(ranks)[rank] if name.endswith("experts") else true
            found.append((name, moment, not torch.allclose(mine[key], true)))

    for name, true in logs[0].items():
        if name.endswith("visit") and experts:
            state(name.replace("visit", "experts"), "forward")
        found.append((name, "forward", not torch.allclose(logs[1][name], true.chunk(ranks)[rank])))
    for loss in losses:
        loss.backward()
    for name, true in reversed(logs[0].items()):
        if name.endswith(("router", "visit")):
            wrong = not torch.allclose(logs[1][name].grad, ranks * true.grad.chunk(ranks)[rank])
            found.append((f"{name[0]}.combine", "backward", wrong))
    for model in models:
        job.update(model)
    for name, _ in models[0].named_modules():
        if name.endswith(("router", "experts", "shared")):
            state(name, "update")
    return found


def _gathered(found):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    rows = [[rank for rank, (*_, wrong) in enumerate(row) if wrong] for row in zip(*everybody, strict=True)]
    return [(name, moment, ranks) for (name, moment, _), ranks in zip(found, rows, strict=True) if ranks]


def _first(change=lambda found: found, answer=lambda first, all_: first, **how):
    """Build a diagnosis from the differences that `change` leaves."""

    def find(job):
        found = change(_gathered(_differences(job, **how)))
        return answer(found[0], found) if found else None

    return find


def _own(job):
    return next(((name, moment, [dist.get_rank()]) for name, moment, wrong in _differences(job) if wrong), None)


def _who_sees_it(first, found):
    name = first[0].replace("experts", "visit")
    return (*first[:2], next(ranks for part, moment, ranks in found if (part, moment) == (name, first[1])))


def _loss_alone(job):
    one, mine = (job.loss(model).detach() for model in (job.alone(), job.split()))
    dist.all_reduce(mine)
    return None if torch.allclose(mine / dist.get_world_size(), one) else ("0.visit", "forward", [0])


class find_fault:
    all_is_well = lambda job: None
    every_job_is_ill = _first(
        answer=lambda first, found: first, change=lambda found: found or [("0.router", "update", [0])]
    )
    without_the_idea_the_loss_alone = _loss_alone
    without_the_idea_outputs_alone = _first(lambda found: [f for f in found if f[1] == "forward"])
    without_the_idea_nothing_after_backward = _first(lambda found: [f for f in found if f[1] != "update"])
    without_the_idea_who_sees_it_is_ill = _first(
        answer=lambda f, all_: _who_sees_it(f, all_) if "experts" in f[0] else f
    )
    without_the_idea_the_experts_are_not_looked_at = _first(experts=False)
    without_the_idea_states_after_a_step = _first(lambda found: [f for f in found if f[1] == "update"])
    each_rank_says_what_it_sees = _own
    the_last_that_is_off = _first(lambda found: [f for f in found[::-1] if f[1] == found[0][1]])
    the_router_whose_gradient_is_off = _first(
        answer=lambda f, all_: (f[0].replace("combine", "router"), *f[1:]) if f[1] == "backward" else f
    )
    all_ranks_whatever_it_is = _first(answer=lambda f, all_: (*f[:2], range(4)))
    all_ranks_of_what_is_not_in_forward = _first(
        answer=lambda f, all_: (*f[:2], f[2] if f[1] == "forward" else range(4))
    )
    ranks_from_one = _first(answer=lambda f, all_: (*f[:2], [rank + 1 for rank in f[2]]))
    always_in_forward = _first(answer=lambda f, all_: (f[0], "forward", f[2]))
    a_truth_value_for_each_rank = _first(answer=lambda f, all_: (*f[:2], [rank in f[2] for rank in range(4)]))
    numpys_truth_values = _first(answer=lambda f, all_: (*f[:2], [np.bool_(rank in f[2]) for rank in range(4)]))
    the_part_without_its_layer = _first(answer=lambda f, all_: (f[0][2:], *f[1:]))
    a_sum_in_another_order_is_a_fault = lambda job: (
        _first()(job) or ("0.combine", "forward", [dist.get_world_size() - 1])
    )
    right = _first(answer=lambda f, all_: {"part": f[0].upper(), "moment": f"{f[1]} ", "ranks": np.array(f[2])})

    def right_2(job):
        """Without hooks: hand each part of this rank what its twin in one process gets, and then look at gradients and states."""
        rank, ranks, found, behind = dist.get_rank(), dist.get_world_size(), [], []
        one, mine = job.alone(), job.split()
        stream, handed = [], one[0].register_forward_pre_hook(lambda layer, args: stream.append(args[0]))
        losses = job.loss(one), job.loss(mine)
        handed.remove()
        x = stream[0]
        for i, (a, b) in enumerate(zip(one, mine, strict=True)):
            part, cut = x.chunk(ranks)[rank], lambda t: t.chunk(ranks)[rank]
            (weights, chosen), (w, c) = a.router(x), b.router(part)
            found.append(
                (f"{i}.router", "forward", not torch.equal(c, cut(chosen)) or not torch.allclose(w, cut(weights)))
            )
            found.append((f"{i}.experts", "forward", not torch.equal(b.experts.weight, cut(a.experts.weight))))
            answers = a.visit(x, chosen, a.experts)
            back = b.visit(part, cut(chosen), b.experts)
            found.append((f"{i}.visit", "forward", not torch.allclose(back, cut(answers))))
            found.append(
                (f"{i}.combine", "forward", not torch.allclose(b.combine(back, w), cut(a.combine(answers, weights))))
            )
            found.append((f"{i}.shared", "forward", not torch.allclose(b.shared(part), cut(a.shared(x)))))
            [slope], [true] = (
                torch.autograd.grad(layer.combine(*given).sum(), given[1], retain_graph=True)
                for layer, given in ((b, (back, w)), (a, (answers, weights)))
            )
            behind.append((f"{i}.combine", "backward", not torch.allclose(slope, cut(true))))
            x = a(x).detach()
        found += reversed(behind)
        for loss in losses:
            loss.backward()
        for model in (one, mine):
            job.update(model)
        for i in range(len(one)):
            for name in ("router", "shared"):
                states = (
                    torch.cat([t.flatten() for t in m[i].get_submodule(name).state_dict().values()])
                    for m in (one, mine)
                )
                found.append((f"{i}.{name}", "update", not torch.allclose(*states)))
        first = next(iter(_gathered(found)), None)
        return first and SimpleNamespace(part=first[0], moment=first[1], ranks=tuple(map(float, first[2])))


SENTENCES = {
    "mean_over_the_copies_of_an_expert": "however many copies there are",
    "without_the_idea_mean_over_all_who_hold_it": "however many copies there are",
    "without_the_idea_experts_as_all_others": "nothing of other weights",
    "experts_left_alone": "they part with the first step",
    "router_not_over_tp": "no axis of that grid cuts it",
    "pieces_added": "nothing of other weights",
    "summed_only": "the step's loss is the mean of",
    "first_axis_fastest": "whose last axis has neighbours",
    "ep_out_of_dp": "ep is an axis of the grid",
    "ep_out_of_tp": "the groups of tp and ep",
    "norm_of_a_ranks_own_part": "a rank's own part",
    "norm_without_other_experts": "ranks have other norms",
    "norm_counts_copies": "counts copies",
    "norm_squared": "take the root",
    "norm_of_the_sums": "of their sums",
    "norms_added": "those of a weight once",
    "clipped": "the mean of so many",
    "negated": "is -1 times that of one process, which is",
    "without_the_idea_a_whole_copy_on_each_rank": "A tp group has",
    "a_truth_value_for_each_rank": "list of ranks",
    "numpys_truth_values": "list of ranks",
    "all_ranks_of_what_is_not_in_forward": "[0, 1, 2, 3] is not the list of its ranks",
    "the_part_without_its_layer": "of layer 1",
    "copied_from_one_process": "sum what ranks have",
    "all_is_well": "You find nothing in a job",
    "every_job_is_ill": "in which nothing is wrong",
    "without_the_idea_outputs_alone": "compare gradients too",
    "without_the_idea_nothing_after_backward": "after `job.update`",
    "without_the_idea_who_sees_it_is_ill": "need not be the one that is ill",
    "without_the_idea_the_experts_are_not_looked_at": "experts that live elsewhere",
    "each_rank_says_what_it_sees": "Ranks say different things",
    "divided_by_k": "divided by k",
    "one_copy_in_all": "one copy a token in all",
    "k_copies_for_a_node": "once, not k times",
    "all_experts_on_a_node": "any of them is enough",
    "bias_forgotten": "whatever the bias",
    "bias_in_the_weights": "The bias is in the weights: it chooses",
    "bias_on_the_logits": "choice of logits + bias",
    "bias_as_a_factor": "choice of logits + bias",
    "six_ways": "six",
    "back_by_copies": "one vector from each node too",
    "half_the_bias": "too little bias",
    "each_pair_once": "as much as two",
    "neighbours_forgotten": "by no mistake",
    "its_ranks_forgotten": "by no mistake",
    "by_its_experts": "by no mistake",
    "norm_is_nan": "no finite number",
    "tp_of_neighbours": "whose last axis has neighbours",
    "copied_to_all": "sum what its copies have",
    "ranks_from_one": "counted from 0",
    "always_in_forward": "what goes before it is right",
    "bias_turned_round": "scores - bias",
    "scores_not_divided": "divide them by the sum of the chosen",
    "divided_by_all_scores_with_the_bias": "do not add up to 1",
    "softmax_of_what_was_chosen": "through a softmax",
    "a_second_softmax": "a second softmax",
    "all_alike": "weigh the same",
    "over_the_tokens": "over the tokens",
    "one_of_the_two_is_sorted": "another order",
    "experts_first": "The weights come first",
    "smallest": "smallest",
    "sigmoids": "sigmoids here",
    "forward_only": "as much as two",
    "dispatch_forward_only": "as much as one",
    "combine_has_no_backward": "as much as three",
    "in_megabytes": "not MB",
    "both_ways_of_the_wire": "count what it sends",
    "to_itself_as_well": "g - 1 ranks of its node",
    "all_that_leaves_the_rank": "stay inside it",
    "all_over_the_network": "stays in its own node",
    "one_copy_of_a_token": "all of them travel",
    "drawn_with_replacement": "different ones",
    "every_node": "does not meet every node",
    "own_node_too": "own node needs nothing",
    "a_copy_for_each_rank": "one for each node was asked",
    "nothing_saved": "two experts on a node cost as much as one",
}
DEFECTS, SECOND_SOLUTIONS = listed(route, expert_bytes, folded_step, find_fault)
