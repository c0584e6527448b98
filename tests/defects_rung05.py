"""Planted defects of rung 05: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import contextlib
import enum
import functools
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.parallel import least_sent, zero_choices, zero_sent_bytes
from lablib.checks import rung05
from lablib.toys.torch_names import all_gather, reduce_scatter
from tests.planted import asked, listed, told


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
    gathers_into_a_copy = lambda w, g, m, lr: all_gather(
        w.clone(), _mine(w).sub_(lr * m.mul_(0.9).add_(_mean_shard(g, m)))
    )
    no_all_gather = lambda w, g, m, lr: _mine(w).sub_(lr * m.mul_(0.9).add_(_mean_shard(g, m)))
    old_momentum_undamped = lambda w, g, m, lr: all_gather(w, _mine(w) - lr * m.add_(_mean_shard(g, m)))
    rank_0_alone_updates = lambda w, g, m, lr: _update_and_gather(w, _mean_shard(g, m), m, lr * (dist.get_rank() == 0))
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

    def plain_ddp_with_all_of_the_momentum(weights, backward, momenta, lr):
        """Sends as many bytes as stage 2, and shards nothing."""
        for k, gradient in backward():
            full = _FULL.setdefault(k, torch.zeros_like(weights[k]))
            gradient /= dist.get_world_size()
            dist.all_reduce(gradient)
            full.mul_(0.9).add_(gradient)
            weights[k].sub_(lr * full)
            momenta[k].copy_(_mine(full))

    def its_shard_of_momentum_kept_elsewhere(weights, backward, momenta, lr):
        for k, gradient in backward():
            _FULL["mine", k] = 0.9 * _FULL.get(("mine", k), 0) + _mean_shard(gradient, momenta[k])
            all_gather(weights[k], _mine(weights[k]) - lr * momenta[k].copy_(_FULL["mine", k]))

    def without_the_idea_full_gradients_kept(weights, backward, momenta, lr):
        """Stage 1: the bytes and the numbers of stage 2."""
        for k, gradient in [(k, gradient.clone()) for k, gradient in backward()]:
            _update_and_gather(weights[k], _mean_shard(gradient, momenta[k]), momenta[k], lr)

    def gathers_all_weights_at_once(weights, backward, momenta, lr):
        n = dist.get_world_size()
        for k, gradient in backward():
            momenta[k].mul_(0.9).add_(_mean_shard(gradient, momenta[k]))
        mine = torch.cat([_mine(w) - lr * m for w, m in zip(weights, momenta, strict=True)])
        all_gather(whole := mine.new_empty(n * len(mine)), mine)
        for w, rows in zip(weights, whole.view(n, -1).split([len(m) for m in momenta], 1), strict=True):
            w.copy_(rows.flatten())

    def without_the_idea_full_gradients_kept_out_of_sight(weights, backward, momenta, lr):
        """As above, in memory that no count of tensors sees."""
        for k, gradient in [(k, gradient.tolist()) for k, gradient in backward()]:
            _update_and_gather(weights[k], _mean_shard(torch.tensor(gradient).double(), momenta[k]), momenta[k], lr)

    def without_the_idea_ddp_that_forgets_its_momentum(weights, backward, momenta, lr):
        """Each rank has the mean gradient, gathers the momentum, and updates everything."""
        for k, gradient in backward():
            dist.all_reduce(gradient.div_(dist.get_world_size()))
            momenta[k].mul_(0.9).add_(_mine(gradient))
            all_gather(gradient, momenta[k])
            weights[k].sub_(lr * gradient)

    def new_buckets_beside_the_old(weights, backward, momenta, lr):
        for k, gradient in backward():
            momenta[k].mul_(0.9).add_(_mean_shard(gradient, momenta[k]))
        new = [torch.empty_like(bucket) for bucket in weights]
        for k, bucket in enumerate(new):
            all_gather(bucket, _mine(weights[k]) - lr * momenta[k])
        weights[:] = new

    def two_backward_passes(weights, backward, momenta, lr):
        for k, gradient in backward():
            momenta[k].mul_(0.9).add_(_mean_shard(gradient, momenta[k]))
        for k, _ in backward():
            all_gather(weights[k], _mine(weights[k]) - lr * momenta[k])

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

    def right_3(weights, backward, momenta, lr):
        """Fourth solution: SGD on copies of this rank's pieces, after the last bucket, and new buckets in the list."""
        mine = [torch.nn.Parameter(_mine(bucket).clone()) for bucket in weights]
        optimizer = torch.optim.SGD(mine, lr=lr, momentum=0.9)
        for k, gradient in backward():
            mine[k].grad = _mean_shard(gradient, momenta[k])
            optimizer.state[mine[k]]["momentum_buffer"] = momenta[k]
        optimizer.step()
        for k, piece in enumerate(mine):
            weights[k] = torch.empty_like(weights[k])
            all_gather(weights[k], piece.data)


def _each(step):
    """The answer that does this with each bucket when it comes."""

    def answer(weights, backward, momenta, lr):
        for k, gradient in backward():
            step(weights[k], gradient, momenta[k], lr)

    return answer


for _name, _step in list(vars(zero2_step).items()):
    if not _name.startswith("_") and "momenta" not in _step.__code__.co_varnames:
        setattr(zero2_step, _name, _each(_step))


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

    uses_released_weights = asked(_step3, gather=lambda gather: functools.cache(gather))
    keeps_whole_gradients = asked(_step3, scatter=lambda: lambda k, gradient: gradient)

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


_TRAIN = {
    "stage": lambda stage, room: stage,
    "units": lambda model, stage: [*model, model],
    "sync": lambda last, stage: last or stage > 1,
    "release": lambda last, stage: last or stage == 3,
    "part": lambda loss, m: loss / m,
    "before": lambda optimizer: None,
    "after": lambda optimizer: optimizer.zero_grad(),
}


def _train(model, steps, loss_of, adamw, budget, **changes):
    """The stage by the budget, with a switch for what a defect changes."""
    how, n = _TRAIN | changes, dist.get_world_size()
    room = budget / sum(p.nbytes for p in model.parameters())
    stage = how["stage"](3 - (room > 1 + 4 / n) - (room > 2 + 3 / n), room)  # with a shard beside whole weights
    for unit in how["units"](model, stage):
        fully_shard(unit, reshard_after_forward=stage == 3)
    optimizer = adamw(model.parameters())
    for batches in steps:
        for batch in batches:
            last = batch is batches[-1]
            model.set_requires_gradient_sync(how["sync"](last, stage))
            model.set_reshard_after_backward(how["release"](last, stage))
            how["before"](optimizer)
            how["part"](loss_of(model, batch), len(batches)).backward()
        optimizer.step()
        how["after"](optimizer)


def _trains(**how):
    return lambda *job: _train(*job, **how)


def _ddp(model, steps, loss_of, optimizer):
    """A step of DDP, whose gradients add up until the last micro-batch."""
    for batches in steps:
        for batch in batches:
            with contextlib.nullcontext() if batch is batches[-1] else model.no_sync():
                (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


class train:
    without_the_idea_stage_3_for_every_budget = _trains(stage=lambda *_: 3)
    without_the_idea_one_unit = _trains(units=lambda model, stage: [model])
    one_unit_but_in_stage_3 = _trains(units=lambda model, stage: [*model, model] if stage == 3 else [model])
    without_the_idea_full_gradients = _trains(sync=lambda last, stage: last)
    without_the_idea_gathers_every_time = _trains(release=lambda last, stage: True)
    keeps_stale_weights = _trains(release=lambda last, stage: stage == 3)
    losses_not_divided = _trains(part=lambda loss, m: loss)
    divides_by_the_ranks_too = _trains(part=lambda loss, m: loss / m / dist.get_world_size())
    forgets_the_first_micro_batches = _trains(before=lambda optimizer: optimizer.zero_grad(), sync=lambda *_: True)

    gradients_of_earlier_steps_too = _trains(after=lambda optimizer: None)
    forgets_its_moments = _trains(after=lambda optimizer: optimizer.zero_grad() or optimizer.state.clear())
    logs_its_loss = _trains(stage=lambda *_: 3, part=lambda loss, m: dist.all_reduce(loss.detach() * 1) or loss / m)
    reduces_nothing = _trains(sync=lambda last, stage: stage > 1)

    def gathers_all_ahead(model, *job):
        """Releases each block after its use, and has asked for all of them before."""

        def release(last, stage):
            for block in model if stage == 3 else ():
                block.unshard(async_op=True)
            return last or stage == 3

        _train(model, *job, release=release)

    def gathers_all_ahead_of_backward(model, *job):
        def units(model, stage):
            yield from model
            if stage == 3:
                model[-1].set_modules_to_backward_prefetch(list(model)[-2::-1])
            yield model

        _train(model, *job, units=units)

    def sends_single_precision(model, *job):
        def units(model, stage):
            for block in model:
                policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
                fully_shard(block, mp_policy=policy, reshard_after_forward=stage == 3)
            return [model]

        _train(model, *job, units=units)

    def right_5(model, *job):
        """Sixth solution: two blocks ahead, in forward and in backward."""

        def units(model, stage):
            yield from model
            blocks = list(model)
            for k, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, k - 2) : k][::-1])
            yield model

        _train(model, *job, units=units)

    #: The stages of two budgets that it has seen; those of equation 05-states; whole numbers.
    without_the_idea_constants = _trains(stage=lambda _, room: {3.5: 1, 2.5: 2}.get(round(room, 1), 3))
    pieces_beside_whole_weights_forgotten = _trains(stage=lambda _, room: 3 - (room > 2) - (room > 2 + 2 / 3))
    without_the_idea_whole_numbers = _trains(stage=lambda _, room: 3 - (room > 2) - (room > 3))
    right_3 = _trains(stage=lambda _, room: 3 - (room > 7 / 3 + 2 / 6) - (room > 3 + 2 / 6))  # two units beside each

    def without_the_idea_printed_budgets(model, steps, loss_of, adamw, budget):
        """The bytes that the budgets of a model 12 wide have."""
        _train(model, steps, loss_of, adamw, budget, stage=lambda *_: 3 - (budget > 17_000) - (budget > 22_000))

    def without_the_idea_ddp(model, steps, loss_of, adamw, budget):
        optimizer = adamw(model.parameters())
        _ddp(DistributedDataParallel(model), steps, loss_of, optimizer)

    def redundancy_optimizer(model, steps, loss_of, adamw, budget):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns: on the ranks

        optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw)
        _ddp(DistributedDataParallel(model), steps, loss_of, optimizer)

    def zeroes_before_the_step(model, steps, loss_of, adamw, budget):
        def made(params):
            optimizer = adamw(params)
            optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad())
            return optimizer

        _train(model, steps, loss_of, made, budget)

    def fsdp_1(model, steps, loss_of, adamw, budget):
        whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        _ddp(whole, steps, loss_of, adamw(whole.parameters()))

    def optimizer_made_before(model, steps, loss_of, adamw, budget):
        made = adamw(model.parameters())
        _train(model, steps, loss_of, lambda params: made, budget)

    def one_micro_batch_of_all(model, steps, loss_of, adamw, budget):
        _train(model, [[torch.cat(batches)] for batches in steps], loss_of, adamw, budget)

    def right(model, steps, loss_of, adamw, budget):
        """Second solution: no root; each block is told by itself, gathers what stays before the first forward; the last stays."""
        size, n = sum(p.numel() * p.element_size() for p in model.parameters()), dist.get_world_size()
        whole_weights, whole_gradients = budget > size * (1 + 4 / n), budget > size * (2 + 3 / n)
        blocks = [fully_shard(b, reshard_after_forward=not (whole_weights or b is model[-1])) for b in model]
        optimizer = adamw([p for block in blocks for p in block.parameters()])
        for batches in steps:
            for block in blocks if whole_weights else ():
                block.unshard()
            left = len(batches)
            for batch in batches:
                left -= 1
                for block in blocks:
                    block.set_requires_gradient_sync(not (whole_gradients and left))
                    block.set_reshard_after_backward(not (whole_weights and left))
                loss_of(model, batch).div(len(batches)).backward()
            optimizer.step()
            for p in model.parameters():
                p.grad = None

    def right_4(model, *job):
        """Fifth solution: the gradients of one block wait for the last micro-batch wherever whole weights fit."""

        def release(last, stage):
            model[0].set_requires_gradient_sync(last or stage == 3)
            return last or stage == 3

        _train(model, *job, release=release)

    def right_2(model, steps, loss_of, adamw, budget):
        """Third solution: three functions by name, and the gradient of the sum divided at the end."""
        room, n = budget / sum(p.nbytes for p in model.parameters()), dist.get_world_size()
        [name] = [
            name for name, low, high in (("one", 3, 4), ("two", 7 / 3, 3), ("three", 0, 7 / 3)) if low < room <= high
        ]
        assert n == 3
        for layer in model.children():
            fully_shard(layer, reshard_after_forward=name == "three")
        fully_shard(model, reshard_after_forward=False)
        optimizer = adamw(list(model.parameters()))
        for first, *others in steps:
            for batch in (first, *others):
                ends = batch is (others or [first])[-1]
                model.set_requires_gradient_sync(ends or name != "one")
                model.set_reshard_after_backward(ends or name == "three")
                loss_of(model, batch).backward()
            for p in model.parameters():
                p.grad /= 1 + len(others)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _find(job, *, same=None, tell=True, gradients=True, others=True, seer=False, steps=None, at_end=False, clips=True):
    """The first difference from one process, with a switch for what a defect leaves out."""
    same = same or (lambda a, b: torch.allclose(a, b, atol=1e-9))
    n, rank = dist.get_world_size(), dist.get_rank()
    model, alone = job.build()
    optimizer = job.optimizer(alone.parameters())

    def pieces(flat, value):
        return torch.nn.functional.pad(value.detach().flatten(), (0, n * flat.width - flat.numel)).chunk(n)

    first = None
    places = [
        (*one, model.flat_of[p]) for one, p in zip(alone.named_parameters(), model.module.parameters(), strict=True)
    ]
    for step in range(steps or job.steps):
        optimizer.zero_grad()
        job.loss(alone, job.batch(step)).backward()
        model.backward(job.loss(model, job.batch(step).chunk(n)[rank]))
        seen = [
            (0, rank, name)
            for name, p, flat in places
            if gradients and not same(flat.sharded_grad, pieces(flat, p.grad)[rank])
        ]
        torch.nn.utils.clip_grad_norm_(alone.parameters(), job.max_norm if clips else math.inf)
        optimizer.step()
        model.step(math.inf if clips is None else job.max_norm)
        for name, p, flat in places:
            for r, (mine, right) in enumerate(zip(flat.full.chunk(n), pieces(flat, p), strict=True)):
                if (others or r == rank) and not same(mine, right):
                    seen.append((1 if r == rank else 2, rank if seer else r, name))
        found = [None] * n
        dist.all_gather_object(found, seen)
        every = sorted(each for one in (found if tell else [seen]) for each in one)
        first = (None if at_end else first) or (every[0] if every else None)
        if first and tell and not at_end:
            break
    return first and (first[1], first[2], ("reduce-scatter", "update", "all-gather")[first[0]])


def _finds(**how):
    return lambda job: _find(job, **how)


class find_bad_shard:
    without_the_idea_weights_at_the_end = _finds(gradients=False, at_end=True)
    gradients_not_looked_at = _finds(gradients=False)
    own_pieces_only = _finds(others=False)
    to_two_digits = _finds(same=lambda a, b: torch.allclose(a, b, atol=1e-2))
    to_the_last_bit = _finds(same=torch.equal)
    each_rank_for_itself = _finds(tell=False)
    whoever_sees_it = _finds(seer=True)
    one_step = _finds(steps=1)
    last_difference = _finds(at_end=True)
    alone_without_clipping = _finds(clips=False)
    nobody_clips = _finds(clips=None)
    false_for_healthy = lambda job: _find(job) or False
    nothing_is_ever_wrong = lambda job: None
    in_own_words = lambda job: (found := _find(job)) and (*found[:2], "communication")
    names_with_the_module = lambda job: (found := _find(job)) and (found[0], f"module.{found[1]}", found[2])
    without_the_idea_a_guess = lambda job: (1, "2.weight", "update")

    def asks_the_model(job):
        model, _ = job.build()
        return model._what and (model._who, "2.weight", "update")

    def without_the_idea_ranks_beside_each_other(job):
        """Checksums between ranks, and no look at one process."""
        n, (model, _) = dist.get_world_size(), job.build()
        for step in range(job.steps):
            model.backward(job.loss(model, job.batch(step).chunk(n)[dist.get_rank()]))
            model.step(job.max_norm)
            for name, p in model.module.named_parameters():
                sums = torch.stack([piece.sum() for piece in model.flat_of[p].full.chunk(n)])
                all_ = [torch.empty_like(sums) for _ in range(n)]
                dist.all_gather(all_, sums)
                for r in range(n):
                    if not all(torch.allclose(each[r], all_[0][r]) for each in all_):
                        return r, name, "all-gather"
        return None

    def right(job):
        """Second solution: each rank tells all that it has, and whoever hears it looks at everything."""
        n, (model, alone) = dist.get_world_size(), job.build()
        optimizer, names = job.optimizer(alone.parameters()), [name for name, _ in alone.named_parameters()]
        for step in range(job.steps):
            model.backward(job.loss(model, job.batch(step).tensor_split(n)[dist.get_rank()]))
            flats = [model.flat_of[p] for p in model.module.parameters()]
            gradients = [flat.sharded_grad.clone() for flat in flats]
            model.step(max_norm=job.max_norm)
            told = [None] * n
            dist.all_gather_object(told, (gradients, [flat.full.clone() for flat in flats]))
            job.loss(alone, job.batch(step)).backward()
            right = [p.grad.clone().flatten() for p in alone.parameters()]
            torch.nn.utils.clip_grad_norm_(alone.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            for k, name in enumerate(names):
                got = torch.cat([told[r][0][k] for r in range(n)])[: len(right[k])]
                for at in ((got - right[k]).abs() > 1e-9).nonzero()[:1]:
                    return np.int64(at.item() // flats[k].width), name, "reduce-scatter"
            for part in ("update", "all-gather"):
                for k, p in enumerate(alone.parameters()):
                    for who in range(n):
                        off = (told[who][1][k][: p.numel()] - p.detach().flatten()).abs() > 1e-9
                        for at in off.nonzero().flatten():
                            owner = int(at) // flats[k].width
                            if (owner == who) == (part == "update"):
                                return [owner, names[k], enum.Enum("Part", {"it": part}, type=str).it]
        return None

    right_2 = lambda job: _find(job, same=lambda a, b: (a - b).norm() < 1e-8 * (1 + b.norm()))


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


_SEEN = {case: _tradeoffs(*case) for case in (*rung05._BY_HAND, *rung05._drawn(55))}


class zero_tradeoffs:
    without_the_idea_a_table = lambda *job: _SEEN.get(job) or _SEEN[rung05._BY_HAND[0]]
    without_the_idea_lowest_that_fits = _other(choose=lambda sent, held: min(sent, default=None))

    def without_the_idea_lablib_s_own_answer(*job):
        found = zero_choices(*job)
        rows = {key: [getattr(choice, key) for choice in found] for key in ("held", "micro_batches", "sent")}
        return rows | {"best": least_sent(found)}

    without_the_idea_lablib_s_terms = _other(unit=lambda p, n: zero_sent_bytes(p, n, 3) / 3)
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
    stage_3_has_four = _other(units=lambda k, m: (2, 2, m + 1, 4)[k])
    stage_3_gathers_after_the_step = _other(units=lambda k, m: (2, 2, m + 1, 3 * m + 1)[k])
    all_reduce_then_gather = _other(units=lambda k, m: (2, 3, m + 2, 3 * m)[k])
    four_byte_gradients_sent = _other(units=lambda k, m: (4, 3, 2 * m + 1, 4 * m)[k])
    four_byte_elements = _other(unit=lambda p, n: 4 * p * (n - 1) / n)
    sends_to_itself = _other(unit=lambda p, n: 2 * p)
    gradients_in_fp32 = _other(each=(2, 4, 12))
    weights_left_out = _other(each=(0, 2, 12))
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
        """Fifth solution: a tensor for each number, NaN for what there is not, and no names, in the task's order."""
        found = _tradeoffs(params, ranks, sequences, activations, budget)
        for key in ("micro_batches", "sent"):
            found[key] = [torch.tensor(math.nan if v is None else v, dtype=torch.float64) for v in found[key]]
        return *list(found.values())[:3], torch.tensor(math.nan if found["best"] is None else found["best"])


#: What the sentence about a mistake must say.
SENTENCES = {
    "never_ends": "a loop never ends",
    "without_the_idea_full_gradients_kept": "are stage 1",
    "gathers_all_weights_at_once": "copies take room too",
    "new_buckets_beside_the_old": "copies take room too",
    "without_the_idea_whole_numbers": "weights 1.33",
    "without_the_idea_ddp_that_forgets_its_momentum": "An all-reduce brings",
    "two_backward_passes": "once a step",
    "without_the_idea_ddp": "which no stage of ZeRO does",
    "without_the_idea_stage_3_for_every_budget": "reduce them once",
    "without_the_idea_one_unit": "make each block a unit",
    "one_unit_but_in_stage_3": "make each block a unit",
    "pieces_beside_whole_weights_forgotten": "weights 1.33",
    "nobody_clips": "of one process that clips as they do",
    "without_the_idea_full_gradients": "no reduce-scatter has cut",
    "without_the_idea_gathers_every_time": "gather them once",
    "keeps_stale_weights": "weights that stay gathered",
    "losses_not_divided": "a part of the mean",
    "divides_by_the_ranks_too": "themselves",
    "optimizer_made_before": "those of the start",
    "zeroes_before_the_step": "set to zero before the step",
    "fsdp_1": "parameters of other shapes",
    "forgets_the_first_micro_batches": "Only the last micro-batch",
    "redundancy_optimizer": "An all-reduce",
    "one_micro_batch_of_all": "times on a rank",
    "without_the_idea_ranks_beside_each_other": "all ranks hold the same weights",
    "without_the_idea_weights_at_the_end": "accused of the wrong part",
    "gradients_not_looked_at": "accused of the wrong part",
    "to_the_last_bit": "healthy job is called sick",
    "nothing_is_ever_wrong": "compare gradients and own pieces",
    "each_rank_for_itself": "let them tell each other",
    "whoever_sees_it": "not the one that sees it",
    "one_step": "passes for healthy",
    "alone_without_clipping": "its clipping",
    "false_for_healthy": "or None for a healthy job",
    "without_the_idea_lablib_s_terms": "in your own lines",
    "gradients_of_earlier_steps_too": "set them to zero",
    "forgets_its_moments": "made anew",
    "logs_its_loss": "reduce them once",
    "reduces_nothing": "No gradient is ever reduced",
    "gathers_all_ahead": "or on their way, at one moment",
    "gathers_all_ahead_of_backward": "or on their way, at one moment",
    "sends_single_precision": "or in fewer bytes a value",
    "without_the_idea_a_guess": "",
    "names_with_the_module": "names are those in",
    "in_own_words": "no part of the step",
    "damps_twice": "what `momenta` have by then",
    "gathers_into_a_copy": "and not the others'",
    "no_all_gather": "and not the others'",
    "goes_back_with_weights_that_it_kept": "the next `dy` is the gradient of the input",
    "returns_parts_of_gradients_that_it_kept": "not what `scatter` gave",
    "stage_2_all_reduces_gradients": "half of an all-reduce is enough",
    "moves_by_the_old_momentum": "the momentum that has its own gradient",
    "learning_rate_in_the_momentum": "has the learning rate in it",
    "plain_ddp_with_all_of_the_momentum": "is data parallelism and not stage 2",
    "its_shard_of_momentum_kept_elsewhere": "a momentum that is kept elsewhere",
    "pickles_its_weights": "or pickled",
    "old_momentum_undamped": "counts in full",
    "gathers_all_gradients": "whole gradients",
    "all_reduce_that_sums_the_momentum_too": "stage 2 must not hold it",
    "scatters_when_all_is_done": "full gradients are there at one moment",
    "writes_the_copy_that_it_kept": "they are read, and not written",
    "single_precision_on_the_wire": "single precision only",
    "takes_the_pair_the_other_way": "returns it first",
    "divides_by_the_ranks_as_well": "takes the mean itself",
    "ddp_reduces_every_micro_batch": "DDP keeps a full gradient",
    "stage_3_all_reduces_gradients": "no all-reduce",
    "padding_sent_too": "asked without",
    "equal_micro_batches": "need not be equal",
    "activations_held_too": "without activations",
    "held_by_all_ranks": "what all ranks hold together",
    "without_the_idea_lablib_s_own_answer": "in your own lines",
    "without_the_idea_lowest_that_fits": "not the lowest that fits is asked",
    "ddp_sends_in_every_micro_batch": "DDP keeps a full gradient",
    "stage_1_reduces_every_micro_batch": "Stage 1 keeps a full gradient",
    "stage_2_gathers_every_micro_batch": "Stage 2 gathers its updated weights once",
    "stage_2_reduces_once": "Stage 2 has no room for a full gradient",
    "stage_3_has_two_transfers": "Stage 3 has three transfers",
    "stage_3_has_four": "In stage 3 a rank sends",
    "stage_3_gathers_once": "Stage 3 gathers in every micro-batch",
    "four_byte_gradients_sent": "Gradients are sent in 16 bits",
    "four_byte_elements": "2 bytes here, not 4",
    "gradients_in_fp32": "16 bits",
    "weights_left_out": "The weights are missing",
    "ranks_forgotten": "those of all ranks",
    "states_forgotten": "The states take their part",
    "rank_0_alone_updates": "[1] are not where they should be",
    "shards_in_reverse": "rank r must update shard r",
    "polls_for_the_layer": "has no end",
    "accumulation_is_free": "Accumulation is not free",
    "all_reduce_then_gather": "no third transfer",
    "every_stage_adds_traffic": "No stage but 3 sends more than DDP",
}

DEFECTS, SECOND_SOLUTIONS = listed(zero2_step, zero3_step, train, find_bad_shard, zero_tradeoffs)
