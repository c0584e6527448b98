"""Planted defects of rung 05: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import torch
import torch.distributed as dist

from lablib.toys.torch_names import all_gather, reduce_scatter
from tests.planted import listed


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

    def fractions_of_a_parameter(params, ranks, stage):
        return _bytes(params, ranks, stage, shard=lambda p, n: p / n)

    def right(params, ranks, stage):
        """Second solution: pad first, then cut."""
        padded = params + -params % ranks
        whole = {"weights": 2, "gradients": 2, "optimizer": 12}
        shards = {"optimizer": stage > 0, "gradients": stage > 1, "weights": stage > 2}
        return {name: size * (padded // ranks if shards[name] else params) for name, size in whole.items()}


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


class zero2_step:
    def summed_not_averaged(weights, gradient, momentum, lr):
        mean = torch.empty_like(momentum)
        reduce_scatter(mean, gradient)
        _update_and_gather(weights, mean, momentum, lr)

    def averaged_twice(weights, gradient, momentum, lr):
        _update_and_gather(weights, _mean_shard(gradient, momentum) / dist.get_world_size(), momentum, lr)

    def no_all_gather(weights, gradient, momentum, lr):
        momentum.mul_(0.9).add_(_mean_shard(gradient, momentum))
        _mine(weights).sub_(lr * momentum)

    def local_gradient(weights, gradient, momentum, lr):
        _update_and_gather(weights, _mine(gradient), momentum, lr)

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

    def gathers_momentum_too(weights, gradient, momentum, lr):
        _update_and_gather(weights, _mean_shard(gradient, momentum), momentum, lr)
        all_gather(torch.empty_like(weights), momentum)

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


def _tradeoffs(params, ranks, micro_batches, budget, held=None, times=None, part=None, choose=None):
    own = -(-params // ranks)
    m = micro_batches
    held = held or [16 * params, 4 * params + 12 * own, 2 * params + 14 * own, 16 * own]
    times = times or [2, 2, m + 1, 3 * m]
    sent = [2 * params * factor * ((ranks - 1) / ranks if part is None else part) for factor in times]
    fits = [stage for stage in range(4) if held[stage] <= budget]
    best = choose(fits, sent, held) if choose else min(fits, key=lambda stage: sent[stage], default=None)
    return {"held": held, "sent": sent, "best": best}


class zero_tradeoffs:
    def every_stage_adds_traffic(params, ranks, micro_batches, budget):
        return _tradeoffs(params, ranks, micro_batches, budget, times=[2, 3, 3, 4])

    def stage_3_sends_as_ddp(params, ranks, micro_batches, budget):
        m = micro_batches
        return _tradeoffs(params, ranks, m, budget, times=[2, 2, m + 1, 2 * m])

    def accumulation_is_free(params, ranks, micro_batches, budget):
        return _tradeoffs(params, ranks, micro_batches, budget, times=[2, 2, 2, 3])

    def sends_to_itself(params, ranks, micro_batches, budget):
        return _tradeoffs(params, ranks, micro_batches, budget, part=1)

    def always_the_highest_stage(params, ranks, micro_batches, budget):
        return _tradeoffs(params, ranks, micro_batches, budget, choose=lambda fits, sent, held: max(fits, default=None))

    def stage_3_whatever_the_budget(params, ranks, micro_batches, budget):
        return _tradeoffs(
            params,
            ranks,
            micro_batches,
            budget,
            choose=lambda fits, sent, held: min(fits, key=lambda s: sent[s], default=3),
        )

    def stage_2_without_optimizer(params, ranks, micro_batches, budget):
        """Counts weights and gradients of stage 2 and leaves out what the optimizer holds."""
        own = -(-params // ranks)
        return _tradeoffs(
            params,
            ranks,
            micro_batches,
            budget,
            held=[16 * params, 4 * params + 12 * own, 2 * params + 2 * own, 16 * own],
        )

    def ignores_the_budget(params, ranks, micro_batches, budget):
        return _tradeoffs(params, ranks, micro_batches, budget, choose=lambda fits, sent, held: 0)

    def right(params, ranks, micro_batches, budget):
        """Second solution: walk through the step and add up what leaves a rank."""
        piece = 2 * params / ranks * (ranks - 1)  # a reduce-scatter or an all-gather, on a ring
        held, sent = [], []
        for stage in range(4):
            parts = [(2, stage == 3), (2, stage >= 2), (12, stage >= 1)]
            held.append(sum(size * ((params + ranks - 1) // ranks if cut else params) for size, cut in parts))
            total = 0
            for micro_batch in range(micro_batches):
                total += 2 * piece * (stage == 3)
                last = micro_batch == micro_batches - 1
                total += piece * (stage >= 2 or last)
            sent.append(total + piece * (stage < 3))
        best = None
        for stage in (3, 2, 1, 0):
            if held[stage] <= budget and (best is None or sent[stage] <= sent[best]):
                best = stage
        return {"held": held, "sent": sent, "best": best}


DEFECTS, SECOND_SOLUTIONS = listed(state_bytes, zero2_step, zero3_step, zero_tradeoffs)
