"""Planted defects of rung 05: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import dataclasses
import math

import numpy as np
import torch
import torch.distributed as dist

from lablib.calc.precision import find_optimizer
from lablib.toys.torch_names import all_gather, reduce_scatter
from tests.planted import asked, listed, told


def _bytes(params, ranks, stage, first=(3, 2, 1), each=(2, 2, 12), shard=None):
    own = -(-params // ranks) if shard is None else shard(params, ranks)
    names = ("weights", "gradients", "optimizer")
    return {
        name: size * (own if stage >= least else params) for name, least, size in zip(names, first, each, strict=True)
    }


class state_bytes:
    no_master_weights = lambda params, ranks, stage: _bytes(params, ranks, stage, each=(2, 2, 8))
    gradients_from_stage_1 = lambda params, ranks, stage: _bytes(params, ranks, stage, first=(3, 1, 1))
    weights_never = lambda params, ranks, stage: _bytes(params, ranks, stage, first=(4, 2, 1))
    weights_before_gradients = lambda params, ranks, stage: _bytes(params, ranks, stage, first=(2, 3, 1))

    def limits_of_many_ranks(params, ranks, stage):
        """Takes 4x and 8x for the factors of stages 1 and 2."""
        own = -(-params // ranks)
        return {
            "weights": 2 * (own if stage == 3 else params),
            "gradients": 2 * (params if stage < 2 else own if stage == 3 else 0),
            "optimizer": 12 * params if stage == 0 else 12 * own if stage == 3 else 0,
        }

    shards_rounded_down = lambda params, ranks, stage: _bytes(params, ranks, stage, shard=lambda p, n: p // n)
    fractions_of_a_parameter = lambda params, ranks, stage: _bytes(params, ranks, stage, shard=lambda p, n: p / n)
    shards_of_bytes = lambda params, ranks, stage: {
        name: -(-size * params // ranks) if stage >= least else size * params
        for name, size, least in (("weights", 2, 3), ("gradients", 2, 2), ("optimizer", 12, 1))
    }
    gradients_in_fp32 = lambda params, ranks, stage: _bytes(params, ranks, stage, each=(2, 4, 12))
    master_weights_with_the_weights = lambda params, ranks, stage: _bytes(params, ranks, stage, each=(6, 2, 8))

    def never_ends(params, ranks, stage):
        left = params
        while left:
            left -= ranks
        return _bytes(params, ranks, stage)

    of_the_last_rank = lambda *case: _bytes(*case, shard=lambda p, n: p + (n - 1) * (-p // n))
    of_all_ranks = told(_bytes, lambda found, ranks: {name: ranks * size for name, size in found.items()})
    fp32_gradients_in_the_optimizer = lambda *case: _bytes(*case, each=(2, 2, 16))
    one_too_many = lambda params, ranks, stage: _bytes(params, ranks, stage, shard=lambda p, n: p // n + 1)
    bits = lambda params, ranks, stage: _bytes(params, ranks, stage, each=(16, 16, 96))
    parameters_alone = lambda params, ranks, stage: _bytes(params, ranks, stage, each=(1, 1, 1))

    def right(params, ranks, stage):
        """Second solution: pad first, then cut."""
        padded = params + -params % ranks
        whole = {"weights": 2, "gradients": 2, "optimizer": 12}
        shards = {"optimizer": stage > 0, "gradients": stage > 1, "weights": stage > 2}
        return {name: size * (padded // ranks if shards[name] else params) for name, size in whole.items()}

    def right_2(params, ranks, stage):
        """Third solution: numpy, a table of who is cut, and floats that are whole."""
        cut = np.arange(4)[:, None] >= np.array([3, 2, 1])
        counts = np.where(cut[stage], np.ceil(params / ranks) if params < 2**50 else math.ceil(params / ranks), params)
        return dict(zip(("weights", "gradients", "optimizer"), counts * np.array([2, 2, 12]), strict=True))


def _mine(weights):
    return weights.chunk(dist.get_world_size())[dist.get_rank()]


def _mean_shard(gradient, momentum):
    mean = torch.empty_like(momentum)
    reduce_scatter(mean, gradient / dist.get_world_size())
    return mean


def _update_and_gather(weights, mean, momentum, lr):
    mine = _mine(weights)
    momentum.mul_(0.9).add_(mean)
    mine.sub_(lr * momentum)
    all_gather(weights, mine.clone())


#: What an answer keeps beside its momentum.
_FULL = {}


class zero2_step:
    def summed_not_averaged(weights, gradient, momentum, lr):
        mean = torch.empty_like(momentum)
        reduce_scatter(mean, gradient)
        _update_and_gather(weights, mean, momentum, lr)

    averaged_twice = lambda w, g, m, lr: _update_and_gather(w, _mean_shard(g, m) / dist.get_world_size(), m, lr)
    local_gradient = lambda w, g, m, lr: _update_and_gather(w, _mine(g), m, lr)
    uphill = lambda w, g, m, lr: _update_and_gather(w, _mean_shard(g, m), m, -lr)
    no_all_gather = lambda w, g, m, lr: _mine(w).sub_(lr * m.mul_(0.9).add_(_mean_shard(g, m)))
    old_momentum_undamped = lambda w, g, m, lr: all_gather(w, _mine(w) - lr * m.add_(_mean_shard(g, m)))
    damps_twice = lambda w, g, m, lr: _update_and_gather(w, _mean_shard(g, m), m.mul_(0.9), lr)

    def all_reduce_then_cut(weights, gradient, momentum, lr):
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)
        _update_and_gather(weights, _mine(gradient), momentum, lr)

    def forgets_momentum(weights, gradient, momentum, lr):
        mine = _mine(weights)
        mine.sub_(lr * (0.9 * momentum + _mean_shard(gradient, momentum)))
        all_gather(weights, mine.clone())

    def everybody_updates_shard_0(weights, gradient, momentum, lr):
        momentum.mul_(0.9).add_(_mean_shard(gradient, momentum))
        first = weights.chunk(dist.get_world_size())[0]
        all_gather(weights, (first - lr * momentum).clone())

    def rebinds_the_weights(weights, gradient, momentum, lr):
        momentum.mul_(0.9).add_(_mean_shard(gradient, momentum))
        updated = torch.empty_like(weights)
        all_gather(updated, _mine(weights) - lr * momentum)
        weights = updated

    def shards_in_reverse(weights, gradient, momentum, lr):
        n, mean = dist.get_world_size(), torch.empty_like(momentum)
        reduce_scatter(mean, torch.cat(gradient.chunk(n)[::-1]) / n)
        _update_and_gather(weights, mean, momentum, lr)

    def gathers_momentum_too(weights, gradient, momentum, lr):
        _update_and_gather(weights, _mean_shard(gradient, momentum), momentum, lr)
        all_gather(torch.empty_like(weights), momentum)

    def moves_by_the_old_momentum(weights, gradient, momentum, lr):
        mine = _mine(weights) - lr * momentum
        momentum.mul_(0.9).add_(_mean_shard(gradient, momentum))
        all_gather(weights, mine)

    def gathers_all_gradients(weights, gradient, momentum, lr):
        full = gradient.new_empty(dist.get_world_size() * len(gradient))
        all_gather(full, gradient)
        _update_and_gather(weights, _mine(full.view(-1, len(gradient)).mean(0)), momentum, lr)

    def learning_rate_in_the_momentum(weights, gradient, momentum, lr):
        momentum.mul_(0.9).add_(lr * _mean_shard(gradient, momentum))
        all_gather(weights, _mine(weights) - momentum)

    def plain_ddp_with_all_of_the_momentum(weights, gradient, momentum, lr):
        """Sends as many bytes as stage 2, and shards nothing."""
        full = _FULL.setdefault(dist.get_rank(), torch.zeros_like(weights))
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)
        full.mul_(0.9).add_(gradient)
        weights.sub_(lr * full)
        momentum.copy_(_mine(full))

    def its_shard_of_momentum_kept_elsewhere(weights, gradient, momentum, lr):
        _FULL["mine"] = 0.9 * _FULL.get("mine", 0) + _mean_shard(gradient, momentum)
        all_gather(weights, _mine(weights) - lr * momentum.copy_(_FULL["mine"]))

    def pickles_its_weights(weights, gradient, momentum, lr):
        momentum.mul_(0.9).add_(_mean_shard(gradient, momentum))
        dist.all_gather_object(parts := [None] * dist.get_world_size(), _mine(weights) - lr * momentum)
        weights.copy_(torch.cat(parts))

    def all_reduce_that_sums_the_momentum_too(weights, gradient, momentum, lr):
        """Each rank adds its shard of the momentum: no byte too many, and every rank has the full mean."""
        full = gradient / dist.get_world_size()
        _mine(full).add_(0.9 * momentum)
        dist.all_reduce(full)
        momentum.copy_(_mine(full))
        weights.sub_(lr * full)

    def single_precision_on_the_wire(weights, gradient, momentum, lr):
        mean, full = torch.empty(len(momentum)), torch.empty(len(weights))
        reduce_scatter(mean, gradient.float() / dist.get_world_size())
        momentum.mul_(0.9).add_(mean)
        all_gather(full, (_mine(weights) - lr * momentum).float())
        weights.copy_(full)

    def right(weights, gradient, momentum, lr):
        """Second solution, as the paper tells it: reduce each part to its owner, who broadcasts what came of it."""
        n, rank = dist.get_world_size(), dist.get_rank()
        parts = [part.clone() for part in gradient.chunk(n)]
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        momentum.copy_(0.9 * momentum + parts[rank] / n)
        for owner, part in enumerate(weights.chunk(n)):
            message = part - lr * momentum if owner == rank else part.clone()
            dist.broadcast(message, owner)
            part.copy_(message)

    def right_2(weights, gradient, momentum, lr):
        """Third solution: every rank sends each other the part that is its, and adds what arrives."""
        n, rank = dist.get_world_size(), dist.get_rank()
        mine = [torch.empty_like(momentum) for _ in range(n)]
        dist.all_to_all(mine, [part.contiguous() for part in gradient.chunk(n)])
        momentum *= 0.9
        momentum += torch.stack(mine).mean(0)
        parts = [torch.empty_like(momentum) for _ in range(n)]
        dist.all_gather(parts, weights.view(n, -1)[rank] - lr * momentum)
        weights.copy_(torch.cat(parts))


def _step3(
    layers,
    x,
    gather,
    release,
    forward,
    backward,
    scatter,
    *,
    keep_forward=False,
    keep_backward=False,
    in_order=True,
    output_for_input=False,
):
    inputs, held = [], {}
    for k in range(layers):
        held[k] = gather(k)
        before, x = x, forward(k, held[k], x)
        inputs.append(x if output_for_input else before)
        if not keep_forward:
            release(k)
    gradient, shards = [1.0] * len(x), []
    for k in reversed(range(layers)):
        if not keep_forward:
            held[k] = gather(k)
        gradient, of_weights = backward(k, held[k], inputs[k], gradient)
        if not keep_backward:
            release(k)
        shards.append(scatter(k, of_weights))
    return shards[::-1] if in_order else shards


class zero3_step:
    keeps_all_between_forward_and_backward = lambda *task: _step3(*task, keep_forward=True)
    never_releases_after_backward = lambda *task: _step3(*task, keep_backward=True)
    shards_in_the_order_of_backward = lambda *task: _step3(*task, in_order=False)
    output_instead_of_input = lambda *task: _step3(*task, output_for_input=True)

    def uses_released_weights(layers, x, gather, release, forward, backward, scatter):
        inputs, held = [], {}
        for k in range(layers):
            held[k] = gather(k)
            inputs.append(x)
            x = forward(k, held[k], x)
            release(k)
        gradient, shards = [1.0] * len(x), {}
        for k in reversed(range(layers)):
            gradient, of_weights = backward(k, held[k], inputs[k], gradient)
            shards[k] = scatter(k, of_weights)
        return [shards[k] for k in range(layers)]

    def keeps_whole_gradients(layers, x, gather, release, forward, backward, scatter):
        whole = {}

        def note(k, gradient):
            whole[k] = gradient
            return gradient

        _step3(layers, x, gather, release, forward, backward, note)
        return [whole[k] for k in range(layers)]

    def gathers_for_every_use_thrice(layers, x, gather, release, forward, backward, scatter):
        def forward_again(k, weights, x):
            release(k)
            return forward(k, gather(k), x)

        return _step3(layers, x, gather, release, forward_again, backward, scatter)

    def passes_the_gradient_of_the_weights_on(layers, x, gather, release, forward, backward, scatter):
        def turned(*task):
            of_weights = backward(*task)[1]
            return of_weights, of_weights

        return _step3(layers, x, gather, release, forward, turned, scatter)

    scatters_under_the_next_number = asked(
        _step3, scatter=lambda layers, scatter: lambda k, g: scatter((k + 1) % layers, g)
    )
    runs_on_a_copy = asked(_step3, gather=lambda gather: lambda k: list(gather(k)))

    #: As with a copy of the weights, which needs no second gather.
    goes_back_with_weights_that_it_kept = asked(
        _step3,
        backward=lambda backward: (
            lambda k, w, x, dy: ([a * b for a, b in zip(w, dy, strict=True)], backward(k, w, x, dy)[1])
        ),
    )

    def returns_parts_of_gradients_that_it_kept(layers, x, gather, release, forward, backward, scatter):
        full = {}

        def noted(*task):
            back, full[task[0]] = backward(*task)
            return back, full[task[0]]

        shards = _step3(layers, x, gather, release, forward, noted, scatter)
        return [full[k][: len(shard)] for k, shard in enumerate(shards)]

    def scatters_when_all_is_done(layers, x, gather, release, forward, backward, scatter):
        """Stage 3 without stage 2."""
        full = {}
        _step3(layers, x, gather, release, forward, backward, lambda k, g: full.setdefault(k, g)[:1])
        return [scatter(k, full[k]) for k in range(layers)]

    def writes_the_copy_that_it_kept(layers, x, gather, release, forward, backward, scatter):
        kept = {}

        def gathered(k):
            weights = gather(k)
            if k in kept:
                weights[:] = kept[k]
            kept[k] = list(weights)
            return weights

        return _step3(layers, x, gathered, release, forward, backward, scatter)

    def polls_for_the_layer(layers, x, gather, release, forward, backward, scatter):
        def gathered(k):
            weights = gather(k)
            while True:
                forward(k, weights, x)

        return _step3(layers, x, gathered, release, forward, backward, scatter)

    def never_ends(layers, x, gather, release, forward, backward, scatter):
        k = 0
        while k < layers:
            x = list(x)
        return []

    takes_the_pair_the_other_way = asked(_step3, backward=lambda backward: lambda *task: backward(*task)[::-1])

    def divides_by_the_ranks_as_well(layers, x, gather, release, forward, backward, scatter):
        ranks = {4: 4, 3: 2, 6: 3}[layers]  # as if it knew them
        return _step3(
            layers, x, gather, release, forward, backward, lambda k, g: scatter(k, [value / ranks for value in g])
        )

    returns_the_gradients_again = told(_step3, lambda shards: [[value * 2 for value in row] for row in shards])

    def right(layers, x, gather, release, forward, backward, scatter):
        """Second solution: each layer runs, calls the rest, and finishes on the way back; the next is gathered ahead."""
        shards = [None] * layers

        def run(k, x, weights):
            following = gather(k + 1) if k + 1 < layers else None
            y = forward(k, weights, x)
            release(k)
            dy = run(k + 1, y, following) if k + 1 < layers else [1.0] * len(y)
            dx, of_weights = backward(k, gather(k), x, dy)
            shards[k] = scatter(k, of_weights)
            release(k)
            return dx

        run(0, x, gather(0))
        return shards

    def right_2(layers, x, gather, release, forward, backward, scatter):
        """Third solution: numpy, a stack of inputs, the last layer kept for its backward, and a tuple of arrays."""
        inputs, weights = [np.array(x)], None
        for k in range(layers):
            weights = gather(k)
            inputs.append(np.array(forward(k, weights, inputs[-1])))
            if k < layers - 1:
                release(k)
        dy, shards = np.ones_like(inputs.pop()), ()
        while inputs:
            k = len(inputs) - 1
            weights = weights if k == layers - 1 else gather(k)
            dy, of_weights = backward(k, weights, inputs.pop(), dy)
            release(k)
            shards = (np.array(scatter(k, np.array(of_weights))), *shards)
        return shards

    def right_3(layers, x, gather, release, forward, backward, scatter):
        """Fourth solution: tensors all the way, also for the numbers of the layers."""
        inputs = [torch.tensor(x)]
        for k in torch.arange(layers):
            inputs.append(torch.tensor(forward(k, gather(k), inputs[-1])))
            release(k)
        dy, shards = torch.ones_like(inputs[0]), []
        for k in torch.arange(layers).flip(0):
            dy, of_weights = backward(k, gather(k), inputs[k], dy)
            release(k)
            shards.insert(0, torch.tensor(scatter(k, torch.tensor(of_weights))))
        return torch.stack(shards)


_MUON = {
    "homes": lambda k, n: k % n,
    "update": lambda m, g: m.mul_(0.9).add_(g),
    "moves": lambda factor, matrix: factor(matrix),
    "send": lambda m: m,
    "turn": 0,
}


def _muon(weights, gradients, momenta, lr, factor, **changes):
    """A home for each matrix; what else a defect does is a function or a number."""
    how = _MUON | changes
    for k, (weight, gradient, momentum) in enumerate(zip(weights, gradients, momenta, strict=True)):
        out, home = how["send"](how["update"](momentum, gradient)), how["homes"](k, dist.get_world_size())
        rows, mine = _rows_at(home, out), torch.empty_like(out)
        back = rows and list(how["moves"](factor, torch.cat(rows)).to(out.dtype).chunk(len(rows)))
        dist.scatter(mine, back and back[how["turn"] :] + back[: how["turn"]], home)
        weight.sub_(lr * mine)


def _rows_at(home, rows):
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size())] if dist.get_rank() == home else None
    dist.gather(rows, found, home)
    return found


def _other_muon(**how):
    return lambda *job: _muon(*job, **how)


def _everywhere(rows):
    everything = rows.new_empty(dist.get_world_size() * rows.numel())
    all_gather(everything, rows.flatten())
    return everything.view(-1, rows.shape[1])


def _own_polar(matrix):
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def _for_each(move):
    """A matrix after the other, all ranks together: a weight moves by its rows of what `move` returns."""

    def answer(weights, gradients, momenta, lr, factor):
        for k, (weight, gradient, momentum) in enumerate(zip(weights, gradients, momenta, strict=True)):
            weight.sub_(lr * move(momentum.mul_(0.9).add_(gradient), factor, k % dist.get_world_size()))

    return answer


class lean_muon:
    without_the_idea_gathers_all = _for_each(lambda m, factor, home: _mine(factor(_everywhere(m))))
    each_part_alone = _for_each(lambda m, factor, home: factor(m))

    @_for_each
    def broadcasts_the_whole_factor(momentum, factor, home):
        rows, n = _rows_at(home, momentum), dist.get_world_size()
        whole = factor(torch.cat(rows)) if rows else momentum.new_empty(n * len(momentum), momentum.shape[1])
        dist.broadcast(whole, home)
        return _mine(whole)

    def weights_travel_too(weights, *rest):
        for k, weight in enumerate(weights):
            _rows_at(k % dist.get_world_size(), weight)
        _muon(weights, *rest)

    one_home_for_all = _other_muon(homes=lambda k, n: 0)
    momentum_without_a_factor = _other_muon(moves=lambda factor, matrix: matrix)
    own_factor_uncounted = _other_muon(moves=lambda factor, matrix: _own_polar(matrix))
    computes_every_factor_twice = _other_muon(moves=lambda factor, matrix: (factor(matrix) + factor(matrix)) / 2)
    uphill = _other_muon(moves=lambda factor, matrix: -factor(matrix))
    no_learning_rate = lambda w, g, m, lr, factor: _muon(w, g, m, 1, factor)
    rows_of_the_next_rank = _other_muon(turn=1)
    momentum_not_kept = _other_muon(update=lambda m, g: 0.9 * m + g)
    momentum_of_the_gradient_alone = _other_muon(update=lambda m, g: m.copy_(g))
    old_momentum_in_full = _other_muon(update=lambda m, g: m.add_(g))
    single_precision_on_its_way = _other_muon(send=lambda m: m.float())
    rebinds_the_weights = lambda weights, *rest: _muon([weight.clone() for weight in weights], *rest)

    def right(weights, gradients, momenta, lr, factor):
        """Second solution: two all-to-alls, each of one flat tensor, homes dealt out the largest first."""
        n, rank = dist.get_world_size(), dist.get_rank()
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, gradients)
        order = sorted(range(len(momenta)), key=lambda k: -momenta[k].numel())
        dealt = [order[r::n] for r in range(n)]
        sizes = [sum(momenta[k].numel() for k in home) for home in dealt]
        rows = torch.cat([momenta[k].flatten() for home in dealt for k in home])
        whole = rows.new_empty(n * sizes[rank])
        dist.all_to_all_single(whole, rows, [sizes[rank]] * n, sizes)
        pieces = whole.view(n, -1).split([momenta[k].numel() for k in dealt[rank]], 1)
        mine = [momenta[k].shape[1] for k in dealt[rank]]
        found = [factor(p.reshape(-1, width)).reshape(n, -1) for p, width in zip(pieces, mine, strict=True)]
        dist.all_to_all_single(rows, torch.cat(found, 1).flatten(), sizes, [sizes[rank]] * n)
        order = [k for home in dealt for k in home]
        for k, part in zip(order, rows.split([momenta[k].numel() for k in order]), strict=True):
            weights[k] -= lr * part.view_as(weights[k])

    @_for_each
    def right_2(momentum, factor, home):
        """Third solution: two all-to-alls for each matrix, in which all ranks but the home expect nothing."""
        n, size = dist.get_world_size(), momentum.numel()
        there, to_home = [size * (dist.get_rank() == home)] * n, [size * (r == home) for r in range(n)]
        whole, rows = momentum.new_empty(sum(there)), torch.empty_like(momentum).flatten()
        dist.all_to_all_single(whole, momentum.flatten(), there, to_home)
        whole = factor(whole.view(-1, momentum.shape[1])).flatten() if any(there) else whole
        dist.all_to_all_single(rows, whole, to_home, there)
        return rows.view_as(momentum)

    @_for_each
    def right_3(momentum, factor, home):
        """Fourth solution: sends and receives, the last rank the first home, and wide matrices turned over."""
        rank, n = dist.get_rank(), dist.get_world_size()
        home, mine = n - 1 - home, torch.empty_like(momentum)
        if rank != home:
            dist.send(momentum, home)
            dist.recv(mine, home)
            return mine
        rows = [momentum if r == rank else torch.empty_like(momentum) for r in range(n)]
        for r in set(range(n)) - {home}:
            dist.recv(rows[r], r)
        found = factor(torch.cat(rows).T).T.contiguous().chunk(n)
        for r in set(range(n)) - {home}:
            dist.send(found[r], r)
        return found[home]

    def right_4(weights, gradients, momenta, lr, factor):
        """Fifth solution: by shape. A stack for each shape, padded with zeros, dealt out evenly, and one batch a rank."""
        n = dist.get_world_size()
        for shape in sorted({tuple(weight.shape) for weight in weights}):
            group = [k for k, weight in enumerate(weights) if tuple(weight.shape) == shape]
            each = -(-len(group) // n)
            stack = weights[0].new_zeros(n * each, *shape)
            for place, k in enumerate(group):
                stack[place] = momenta[k].mul_(0.9).add_(gradients[k])
            whole = torch.empty_like(stack)
            dist.all_to_all_single(whole, stack)
            whole = whole.view(n, each, *shape).transpose(0, 1).reshape(each, n * shape[0], shape[1])
            dist.all_to_all_single(stack, factor(whole).view(each, n, *shape).transpose(0, 1).reshape_as(stack))
            for place, k in enumerate(group):
                weights[k].sub_(lr * stack[place])

    #: Sixth solution: the last matrices at the first ranks, as many on each.
    right_5 = _other_muon(homes=lambda k, n: (8 - k) // 2 % n)


def _tradeoffs(
    params,
    ranks,
    sequences,
    activations,
    budget,
    *,
    each=(2, 2, 12),
    first=(3, 2, 1),
    shard=lambda p, n: -(-p // n),
    count=lambda own, room, size: -(-own // (room // size)),
    units=lambda k, m: (2, 2, m + 1, 3 * m)[k],
    unit=lambda p, n: 2 * p * (n - 1) / n,
    fits=lambda room, size: room >= size,
    choose=lambda sent, held: min(sent, key=sent.get, default=None),
):
    held = [
        sum(b * (shard(params, ranks) if k >= f else params) for b, f in zip(each, first, strict=True))
        for k in range(4)
    ]
    counts = [
        count(sequences // ranks, budget - h, activations) if fits(budget - h, activations) else None for h in held
    ]
    sent = [None if m is None else units(k, m) * unit(params, ranks) for k, m in enumerate(counts)]
    best = choose({k: bytes_ for k, bytes_ in enumerate(sent) if bytes_ is not None}, held)
    return {"held": held, "micro_batches": counts, "sent": sent, "best": best}


def _other(**how):
    return lambda *job: _tradeoffs(*job, **how)


class zero_tradeoffs:
    without_the_idea_lowest_that_fits = _other(choose=lambda sent, held: min(sent, default=None))
    highest_that_fits = _other(choose=lambda sent, held: max(sent, default=None))
    highest_of_a_tie = _other(choose=lambda sent, held: min(sent, key=lambda k: (sent[k], -k), default=None))
    stage_3_where_nothing_fits = _other(choose=lambda sent, held: min(sent, key=sent.get, default=3))
    least_memory = _other(choose=lambda sent, held: min(sent, key=lambda k: held[k], default=None))
    every_stage_adds_traffic = _other(units=lambda k, m: (2, 3, 3, 4)[k])
    accumulation_is_free = _other(units=lambda k, m: (2, 2, 2, 3)[k])
    ddp_sends_in_every_micro_batch = _other(units=lambda k, m: (2 * m, 2, m + 1, 3 * m)[k])
    stage_1_reduces_every_micro_batch = _other(units=lambda k, m: (2, m + 1, m + 1, 3 * m)[k])
    full_gradients_reduced_every_micro_batch = _other(units=lambda k, m: (2 * m, m + 1, m + 1, 3 * m)[k])
    everything_in_every_micro_batch = _other(units=lambda k, m: (2 * m, 2 * m, 2 * m, 3 * m)[k])
    stage_2_gathers_every_micro_batch = _other(units=lambda k, m: (2, 2, 2 * m, 3 * m)[k])
    stage_2_reduces_once = _other(units=lambda k, m: (2, 2, 2, 3 * m)[k])
    stage_2_all_reduces_gradients = _other(units=lambda k, m: (2, 2, 2 * m + 1, 3 * m)[k])
    stage_3_has_two_transfers = _other(units=lambda k, m: (2, 2, m + 1, 2 * m)[k])
    stage_3_reduces_once = _other(units=lambda k, m: (2, 2, m + 1, 2 * m + 1)[k])
    stage_3_gathers_once = _other(units=lambda k, m: (2, 2, m + 1, m + 2)[k])
    stage_3_gathers_after_the_step = _other(units=lambda k, m: (2, 2, m + 1, 3 * m + 1)[k])
    all_reduce_then_gather = _other(units=lambda k, m: (2, 3, m + 2, 3 * m)[k])
    four_byte_gradients_sent = _other(units=lambda k, m: (4, 3, 2 * m + 1, 4 * m)[k])
    four_byte_elements = _other(unit=lambda p, n: 4 * p * (n - 1) / n)
    sends_to_itself = _other(unit=lambda p, n: 2 * p)
    gradients_in_fp32 = _other(each=(2, 4, 12))
    no_master_weights = _other(each=(2, 2, 8))
    stage_2_without_optimizer = _other(each=(2, 2, 0))
    fractions_of_a_parameter = _other(shard=lambda p, n: p / n)
    ddp_reduces_every_micro_batch = _other(units=lambda k, m: (m + 1, 2, m + 1, 3 * m)[k])
    stage_3_all_reduces_gradients = _other(units=lambda k, m: (2, 2, m + 1, 4 * m)[k])
    padding_sent_too = _other(unit=lambda p, n: 2 * -(-p // n) * (n - 1))
    equal_micro_batches = _other(
        count=lambda own, room, size: next(m for m in range(-(-own // (room // size)), own + 1) if own % m == 0)
    )

    def never_ends(params, ranks, sequences, activations, budget):
        left = sequences // ranks
        while left:
            left -= min(left, max(0, (budget - 16 * params) // activations))
        return _tradeoffs(params, ranks, sequences, activations, budget)

    activations_held_too = told(
        _tradeoffs, lambda found, activations: found | {"held": [held + activations for held in found["held"]]}
    )
    held_by_all_ranks = told(
        _tradeoffs, lambda found, ranks: found | {"held": [held * ranks for held in found["held"]]}
    )
    ranks_forgotten = asked(_tradeoffs, sequences=lambda ranks, sequences: ranks * sequences)
    states_forgotten = lambda p, n, s, a, budget: _tradeoffs(
        p, n, s, a, budget, count=lambda own, room, size: -(-own // (budget // size))
    )
    rounded_down = _other(count=lambda own, room, size: max(1, own // (room // size)))
    parts_of_a_sequence = _other(count=lambda own, room, size: -(-own * size // room))
    one_sequence_at_a_time = _other(count=lambda own, room, size: own)
    all_at_once = _other(count=lambda own, room, size: 1)
    size_for_number = _other(count=lambda own, room, size: room // size)
    a_full_room_is_too_little = _other(fits=lambda room, size: room > size)
    activations_need_not_fit = _other(
        fits=lambda room, size: room >= 0, count=lambda own, room, size: -(-own // max(1, room // size))
    )

    def right(params, ranks, sequences, activations, budget):
        """Second solution: walk through the step, a micro-batch after the other, and add up what leaves a rank."""
        piece = 2 * params / ranks * (ranks - 1)  # a reduce-scatter or an all-gather, on a ring
        held, counts, sent, best = [], [], [], None
        for stage in range(4):
            parts = [(2, stage == 3), (2, stage >= 2), (12, stage >= 1)]
            held.append(sum(size * ((params + ranks - 1) // ranks if cut else params) for size, cut in parts))
            left, total, steps = sequences // ranks, 0, 0
            size = int((budget - held[-1]) / activations) if budget > held[-1] else 0
            while size and left:
                left -= min(size, left)
                steps += 1
                total += 2 * piece * (stage == 3) + piece * (stage >= 2 or not left)
            counts.append(steps or None)
            sent.append(total + piece * (stage < 3) if steps else None)
        for stage in (3, 2, 1, 0):
            if sent[stage] is not None and (best is None or sent[stage] <= sent[best]):
                best = stage
        return {"held": held, "micro_batches": counts, "sent": sent, "best": best}

    def right_2(params, ranks, sequences, activations, budget):
        """Third solution: numpy, with NaN for what does not fit."""
        own = math.ceil(params / ranks)
        held = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]) @ np.array([2, 2, 12]) * (params - own) + 16 * own
        fit = np.maximum(0, (budget - held) // activations)
        with np.errstate(divide="ignore", invalid="ignore"):
            m = np.where(fit > 0, np.ceil(sequences / ranks / fit), np.nan)
        sent = np.array([0, 0, 1, 3]) * m + np.array([2, 2, 1, 0])
        best = None if np.isnan(m).all() else np.int64(np.nanargmin(sent))
        return {"best": best, "sent": sent * 2 * params * (1 - 1 / ranks), "held": held, "micro_batches": m}

    def right_3(params, ranks, sequences, activations, budget):
        """Fourth solution: exact fractions, tuples, and the micro-batches found by trying."""
        from fractions import Fraction

        own = (params - 1) // ranks + 1
        held = tuple(16 * params - saved * (params - own) for saved in (0, 12, 14, 16))
        counts = tuple(
            next((m for m in range(1, mine + 1) if h + -(-mine // m) * activations <= budget), None)
            for h in held
            for mine in [sequences // ranks]
        )
        once = Fraction(2 * params * (ranks - 1), ranks)
        sent = tuple(
            None if m is None else once * ((m if k > 1 else 1) * (2 if k == 3 else 1) + (m if k == 3 else 1))
            for k, m in enumerate(counts)
        )
        order = sorted((s, k) for k, s in enumerate(sent) if s is not None)
        return {"held": held, "micro_batches": counts, "sent": sent, "best": order[0][1] if order else None}

    def right_4(params, ranks, sequences, activations, budget):
        """Fifth solution: a tensor for each number, and NaN for what there is not."""
        found = _tradeoffs(params, ranks, sequences, activations, budget)
        for key in ("micro_batches", "sent"):
            found[key] = [torch.tensor(math.nan if v is None else v, dtype=torch.float64) for v in found[key]]
        return found | {"best": torch.tensor(math.nan if found["best"] is None else found["best"])}


#: What the sentence about a mistake must say.
def _moments(shapes, ranks, budget, step, diverges, rows=lambda r, n: -(-r // n), least=4096, whole=True, scale=4, two=2,
             sizes=None, temporary=True, order=("fp32", "8bit", "4bit")):  # fmt: skip
    shards = sizes(shapes, ranks) if sizes else [rows(r, ranks) * c for r, c in shapes]

    def bytes_of(n, bits, block):
        if block and n >= least and not (whole and n % block):
            return n * bits / 8 + scale * math.ceil(n / block)
        return 4 * n

    kinds = {"fp32": (32, 0), "8bit": (8, 256), "4bit": (4, 128)}
    held = {name: two * sum(bytes_of(n, *kind) for n in shards) for name, kind in kinds.items()}
    need = {name: held[name] + (step * max(shards) if temporary and name != "fp32" else 0) for name in held}
    return {"held": held, "best": next((n for n in order if n not in diverges and need[n] <= budget), None)}


class moments_recipe:
    # Right arithmetic for bytes a parameter, and no thought of tensors and their shards.
    without_the_idea_one_flat_array = lambda *case: _moments(
        *case, sizes=lambda shapes, n: [-(-sum(r * c for r, c in shapes) // n)], least=0, whole=False
    )
    short_last_blocks = lambda *case: _moments(*case, whole=False)
    small_ones_too = lambda *case: _moments(*case, least=0)
    every_shard = lambda *case: _moments(*case, least=0, whole=False)
    no_scales_at_all = lambda *case: _moments(*case, scale=0)
    scales_in_16_bits = lambda *case: _moments(*case, scale=2)
    one_moment = lambda *case: _moments(*case, two=1)
    nothing_sharded = lambda *case: _moments(*case, rows=lambda r, n: r)
    compiled_in_any_case = lambda *case: _moments(*case, temporary=False)
    fewest_bits_first = lambda *case: _moments(*case, order=("4bit", "8bit", "fp32"))
    what_diverges_too = lambda shapes, ranks, budget, step, diverges: _moments(shapes, ranks, budget, step, set())
    never_none = lambda *case: told(_moments, lambda found: {**found, "best": found["best"] or "fp32"})(*case)
    names_bits = lambda *case: told(_moments, lambda found: {**found, "best": 8})(*case)

    def right(shapes, ranks, budget, step, diverges):
        """Second solution: the calculator's own count, without tables."""
        sizes = [-(-rows // ranks) * columns for rows, columns in shapes]
        held, need = {"fp32": 8 * sum(sizes)}, {}
        for name in ("8bit", "4bit"):
            known = dataclasses.replace(find_optimizer(f"adamw-{name}"), table=0)
            held[name] = sum(known.bytes_of_tensors(sizes).values())
            need[name] = held[name] + step * max(sizes)
        need["fp32"] = held["fp32"]
        fits = [name for name in ("4bit", "8bit", "fp32") if need[name] <= budget and name not in diverges]
        return held, (fits or [None])[-1]

    right_2 = lambda *case: told(
        _moments, lambda found: {k: v if k == "best" else {n: float(b) for n, b in v.items()} for k, v in found.items()}
    )(*case)


SENTENCES = {
    "without_the_idea_one_flat_array": "one flat array",
    "short_last_blocks": "no block here",
    "small_ones_too": "4,096",
    "every_shard": "Every shard is quantized",
    "no_scales_at_all": "has a scale",
    "scales_in_16_bits": "not 2",
    "one_moment": "has two",
    "nothing_sharded": "nothing were sharded",
    "compiled_in_any_case": "Without a compiler",
    "fewest_bits_first": "keeps more bits",
    "what_diverges_too": "diverges on this model",
    "never_none": "does not fit",
    "names_bits": "or None",
    "without_the_idea_gathers_all": "most of the work is waste",
    "broadcasts_the_whole_factor": "nobody else a whole factor",
    "weights_travel_too": "more need not travel",
    "each_part_alone": "the factor of a part is not the part of the factor",
    "one_home_for_all": "deal the homes out",
    "momentum_without_a_factor": "not its factor",
    "own_factor_uncounted": "Call `factor` for each whole matrix",
    "no_learning_rate": "no learning rate",
    "rows_of_the_next_rank": "another rank's",
    "single_precision_on_its_way": "single precision only",
    "momentum_not_kept": "`momenta` is not this rank's rows",
    "momentum_of_the_gradient_alone": "The first step is right and the second is not",
    "computes_every_factor_twice": "most of the work is waste",
    "never_ends": "It never ends",
    "of_the_last_rank": "That is the last rank",
    "of_all_ranks": "what all ranks hold together",
    "one_too_many": "add no 1",
    "bits": "not bits",
    "parameters_alone": "Those are parameters",
    "fp32_gradients_in_the_optimizer": "without an fp32 copy",
    "damps_twice": "what `momentum` has by then",
    "no_all_gather": "of the new weights is missing",
    "goes_back_with_weights_that_it_kept": "the next `dy` is the gradient of the input",
    "returns_parts_of_gradients_that_it_kept": "not what `scatter` gave",
    "stage_2_all_reduces_gradients": "half of an all-reduce is enough",
    "moves_by_the_old_momentum": "update the momentum first",
    "learning_rate_in_the_momentum": "has the learning rate in it",
    "plain_ddp_with_all_of_the_momentum": "is data parallelism and not stage 2",
    "its_shard_of_momentum_kept_elsewhere": "a momentum that is kept elsewhere",
    "pickles_its_weights": "or pickled",
    "old_momentum_undamped": "counts in full",
    "gathers_all_gradients": "whole gradients",
    "all_reduce_that_sums_the_momentum_too": "which stage 2 must not hold",
    "scatters_when_all_is_done": "full gradients are there at one moment",
    "writes_the_copy_that_it_kept": "has kept a copy",
    "single_precision_on_the_wire": "single precision only",
    "takes_the_pair_the_other_way": "returns it first",
    "divides_by_the_ranks_as_well": "takes the mean itself",
    "ddp_reduces_every_micro_batch": "DDP keeps a full gradient",
    "stage_3_all_reduces_gradients": "no all-reduce",
    "padding_sent_too": "asked without",
    "equal_micro_batches": "need not be equal",
    "activations_held_too": "without activations",
    "held_by_all_ranks": "what all ranks hold together",
    "without_the_idea_lowest_that_fits": "not the lowest that fits is asked",
    "ddp_sends_in_every_micro_batch": "DDP keeps a full gradient",
    "stage_1_reduces_every_micro_batch": "Stage 1 keeps a full gradient",
    "stage_2_gathers_every_micro_batch": "Stage 2 gathers its updated weights once",
    "stage_2_reduces_once": "Stage 2 has no room for a full gradient",
    "stage_3_has_two_transfers": "Stage 3 has three transfers",
    "stage_3_gathers_once": "Stage 3 gathers in every micro-batch",
    "four_byte_gradients_sent": "Gradients are sent in 16 bits",
    "four_byte_elements": "2 bytes here, not 4",
    "gradients_in_fp32": "16 bits",
    "ranks_forgotten": "those of all ranks",
    "states_forgotten": "The states take their part",
    "shards_in_reverse": "rank r must update shard r",
    "polls_for_the_layer": "has no end",
    "accumulation_is_free": "Accumulation is not free",
    "all_reduce_then_gather": "no third transfer",
    "every_stage_adds_traffic": "No stage but 3 sends more than DDP",
}

DEFECTS, SECOND_SOLUTIONS = listed(state_bytes, zero2_step, zero3_step, lean_muon, moments_recipe, zero_tradeoffs)
