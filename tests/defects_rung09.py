"""Planted defects of rung 09: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import copy
import random
import weakref
from collections import Counter
from functools import partial, reduce
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lablib.toys.recompute as course
from lablib.checks.rung09 import best_choice, extra_flops, jobs, moments
from tests.planted import listed


def _function(*, random=True, fork=True, graph=False, keep="input", times=1, seed="given", train=True, also=""):
    """Build a checkpoint with one idea changed."""

    class Slip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, block):
            ctx.block, ctx.random = block, torch.get_rng_state()
            ctx.x, ctx.copies = x.detach(), also == "copy" and copy.deepcopy(block)
            if also == "seed":
                torch.manual_seed(7)
                ctx.random = torch.get_rng_state()
            y = block(x)
            if graph:
                with torch.enable_grad():
                    block.runs -= 1
                    torch.set_rng_state(ctx.random)
                    ctx.input = x.detach().requires_grad_()
                    ctx.y = block(ctx.input)
            if keep == "output":
                ctx.x = y.detach()
            return y

        @staticmethod
        def backward(ctx, gradient):
            after = torch.get_rng_state()
            if graph:
                ctx.y.backward(gradient)
                return ctx.input.grad, None
            if also == "clear":
                ctx.block.zero_grad()
            for _ in range(times):
                x = ctx.x.detach().requires_grad_(also != "frozen")
                with torch.enable_grad():
                    if random:
                        torch.set_rng_state(ctx.random)
                    ctx.block.train(train)
                    y = ctx.block(x)
                    ctx.block.train()
                (y * gradient).sum().backward() if seed == "sum" else y.backward(
                    torch.ones_like(y) if seed == "ones" else gradient
                )
            if fork:
                torch.set_rng_state(after)
            return x.grad, None

    return lambda block, x: Slip.apply(x, block)


class _WithoutWeights(torch.autograd.Function):
    """Asks for the gradient of the input alone."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return *torch.autograd.grad(y, [x], gradient), None


class _Explicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, random, x, *weights):
        ctx.block, ctx.random = block, random
        ctx.save_for_backward(x, *weights)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        before = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.block(x)
        torch.set_rng_state(before)
        return None, None, *torch.autograd.grad(y, [x, *weights], gradient)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            ctx.block(x).backward(gradient)
        return None, None


class CheckpointFunction(torch.autograd.Function):
    """A learner's own, by the most natural of names, with setup_context and a generator state of its own."""

    @staticmethod
    def forward(x, block):
        with torch.no_grad():
            return block(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.block = inputs

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().clone().requires_grad_(True)
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.block.before)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        torch.autograd.backward([y], [gradient])
        return x.grad, None


class _Off(_WithoutWeights):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        ctx.block(x).backward(gradient)
        return x.grad, None


class _Twice(_Off):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        (found,) = torch.autograd.grad(y, x, gradient)
        y.backward(gradient)
        return found, None


class _CopyNeedsNone(_Off):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach()
        with torch.enable_grad():
            y = ctx.block(x)
        return torch.autograd.grad(y, [x, *ctx.block.parameters()], gradient)[0], None


class _OneGradient(_Off):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return x.grad


class _Inherited(torch.utils.checkpoint.CheckpointFunction):
    pass


class _Borrowed(torch.autograd.Function):
    forward, backward = _Inherited.forward, _Inherited.backward


class _Delegated(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x, block: course.Recompute.forward(ctx, None, block, True, x))
    backward = staticmethod(lambda ctx, gradient: (course.Recompute.backward(ctx, gradient)[3], None))


class _Same(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: gradient)


class _Copied(_Off):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            copy.deepcopy(ctx.block)(x).backward(gradient)
        return x.grad, None


class checkpoint:
    def right_2(block, x):
        """Keeps the random state on the block, and passes the output on through a view."""
        block.before = torch.get_rng_state()
        return CheckpointFunction.apply(x, block).view_as(x)

    gradients_off_in_backward = lambda block, x: _Off.apply(x, block)
    two_passes_through_the_replay = lambda block, x: _Twice.apply(x, block)
    the_replays_input_needs_no_gradient = lambda block, x: _CopyNeedsNone.apply(x, block)
    one_gradient_for_two_arguments = lambda block, x: _OneGradient.apply(x, block)
    of_pytorch = lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    of_the_course = lambda block, x: course.checkpoint(block, x)
    inherited_from_pytorch = lambda block, x: _Inherited.apply(block, True, x)
    borrowed_from_pytorch = lambda block, x: _Borrowed.apply(block, True, x)
    calls_that_of_the_course = lambda block, x: _Delegated.apply(x, block)
    around_that_of_pytorch = lambda block, x: _Same.apply(torch_checkpoint(block, x, use_reentrant=False))
    another_shape = lambda block, x: _Off.apply(x, block)[:, 1:]
    copies_of_weights = _function(also="copy")
    copy_of_the_input_needs_no_gradient = _function(also="frozen")
    replays_a_copy = lambda block, x: _Copied.apply(x, block)
    in_a_list = lambda block, x: [block(x)]

    def draws_are_undone(block, x):
        with torch.random.fork_rng(devices=[]):
            return _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())

    seeds_forward_and_replay = _function(also="seed")
    new_random_numbers = _function(random=False)
    random_state_left_behind = _function(fork=False)
    graph_kept_in_forward = _function(graph=True)
    replays_from_the_output = _function(keep="output")
    sums_without_a_graph = _function(seed="sum")
    ones_for_the_gradient = _function(seed="ones")
    replays_twice = _function(times=2)
    gradients_of_before_lost = _function(also="clear")
    dropout_off_in_the_replay = _function(train=False)
    weights_get_nothing = lambda block, x: _WithoutWeights.apply(x, block)
    # Starts the replay from the saved input itself, so that its backward goes on into the block before.
    replay_not_detached = lambda block, x: _Attached.apply(x, block)

    no_grad_alone = lambda block, x: torch.no_grad()(block)(x)
    # Second solution: weights are arguments of the Function too, and nothing arrives as a side effect.
    right = lambda block, x: _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())


# Printed beforehand.
_LIMITS = {98304, 153345, 156075, 179730, 208517, 228145, 242503, 245118, 257801, 267793, 269426, 345600, 370176}
PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))
_OTHERS = "tanh", "_softmax", "native_dropout", "native_layer_norm", "_to_copy"
_SAVED = [getattr(torch.ops.aten, name).default for name in _OTHERS]


def _saving(order, *, products=PRODUCTS, also=(), group=1, inputs=True, fork=True, **how):
    """Build an answer that saves products in this order of (number, inner width, bytes), as long as they fit."""

    def run(model, x, save, seen):
        def contexts(block):
            asked = Counter()  # in a replay too, in some releases

            def policy(ctx, operator, *args, **_):
                if operator not in products:
                    return CheckpointPolicy.MUST_SAVE if operator in also else CheckpointPolicy.PREFER_RECOMPUTE
                left, right = args[-2:]
                name = block, asked[ctx.is_recompute]
                asked[ctx.is_recompute] += 1
                seen[name] = len(seen), right.shape[-2], left.nbytes // left.shape[-1] * right.shape[-1]
                return CheckpointPolicy.MUST_SAVE if name in save else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        for first in range(0, len(model), group):
            blocks = model[first : first + group]
            x = torch_checkpoint(blocks, x, use_reentrant=False, context_fn=partial(contexts, first), **how)
        return x

    def answer(model, x, limit):
        seen, save = {}, set()
        with torch.random.fork_rng(devices=[], enabled=fork):
            run(model, x, save, seen)
        room = limit - inputs * (-(-len(model) // group) - 1) * x.nbytes
        for name, (*_, size) in sorted(seen.items(), key=lambda each: order(*each[1])):
            if size <= room:
                save.add(name)
                room -= size
        return run(model, x, save, {})

    return answer


def _by_price(number, inner, size):
    return -inner, -size


class keep_within:
    a_list_of_known_limits = lambda model, x, limit: _saving(_by_price)(model, x, limit if limit in _LIMITS else 0)
    a_trial_stays_alive = lambda *args, kept=[]: (_saving(_by_price)(*args), kept.append(args[0](args[1])))[0]
    without_checkpoints = lambda model, x, limit: model(x)
    nothing_is_saved = lambda model, x, limit: _saving(_by_price)(model, x, 0)
    everything_is_saved = lambda model, x, limit: _saving(_by_price)(model, x, 1 << 40)
    a_block_left_out = lambda model, x, limit: _saving(_by_price)(model[:-1], x, limit)
    inputs_of_blocks_detached = lambda model, x, limit: reduce(
        lambda x, block: torch_checkpoint(block, x.detach().requires_grad_(), use_reentrant=False), model, x
    )
    one_checkpoint_around_all = _saving(_by_price, group=5)
    two_blocks_in_a_checkpoint = _saving(_by_price, group=2)
    other_masks = _saving(_by_price, preserve_rng_state=False)
    random_numbers_of_the_trial_gone = _saving(_by_price, fork=False)
    inputs_of_blocks_forgotten = _saving(_by_price, inputs=False)
    input_of_the_model_counted = lambda model, x, limit: _saving(_by_price)(model, x, limit - x.nbytes)
    # All within the limit, and no product.
    norms_saved_alone = lambda model, x, limit: _saving(
        _by_price, products=(), also=[torch.ops.aten.native_layer_norm.default] * (limit > 200_000)
    )(model, x, limit)
    saved_by_all_checkpoints = lambda model, x, limit: _saving(_by_price, also=_SAVED)(model, x, 1 << 40)
    activations_saved_too = _saving(_by_price, also=[torch.ops.aten.tanh.default])
    without_the_idea_first_come = _saving(lambda number, inner, size: number)
    without_the_idea_last_come = _saving(lambda number, inner, size: -number)
    without_the_idea_the_largest = _saving(lambda number, inner, size: -size)
    without_the_idea_the_smallest = _saving(lambda number, inner, size: size)
    flops_a_byte_squared = _saving(lambda number, inner, size: -inner / size)
    without_the_idea_most_flops = _saving(lambda number, inner, size: -inner * size)
    products_with_bias_alone = _saving(_by_price, products=PRODUCTS[1:2])
    right = _saving(_by_price)
    right_2 = _saving(lambda number, inner, size: (-inner, -number))


def _found(*ideas, where=None, model=lambda job: job.model(), note_of=lambda y: y.detach().clone()):
    """Build an answer of some instruments: "values", "buffers", "memory"."""

    def answer(job):
        plain, mine = job.model(False), model(job)
        calls = []

        def note(name, part, args, y):
            calls.append((name, [a.detach().clone() for a in args], note_of(y), weakref.ref(y)))

        for i, block in enumerate(mine):
            for name, part in block.named_children():
                part.register_forward_hook(partial(note, (i, name)))
        losses = job.forward(mine)
        first, found = len(calls), []
        held = [name for name, *_, y in calls if y() is not None]
        for loss in losses:
            loss.backward()
        again = [
            name for name, args, y, _ in calls[first:]
            for other, before, seen, _ in calls[:first]
            if name == other and all(map(torch.equal, args, before)) and not torch.equal(y, seen)
        ]  # fmt: skip
        sum(job.forward(plain)).backward()
        pairs = zip(mine, plain, strict=True)
        twice = [(i, "gate") for i, (a, b) in enumerate(pairs) if not torch.equal(a.gate.load, b.gate.load)]
        for idea, names in (("memory", held), ("values", again), ("buffers", twice)):
            found += names if idea in ideas else []
        return (where or (lambda job, found: found[0]))(job, found) if found else None

    return answer


_ALL = "values", "buffers", "memory"
_WEIGHTS = {-4245, -2223, 3420, 2407, 334, -260, 1078}  # printed beforehand


def _gradients(job, averaged):
    """Return the last block whose gradients are not those without checkpoints."""
    models = job.model(False), job.model()
    for model in models:
        sum(job.forward(model)).backward()
        for parameter in model.parameters() if averaged else ():
            dist.all_reduce(parameter.grad)
    pairs = [zip(*(block.parameters() for block in blocks), strict=True) for blocks in zip(*models, strict=True)]
    return [i for i, each in enumerate(pairs) if any(not torch.equal(a.grad, b.grad) for a, b in each)]


class faulty_part:
    a_list_of_jobs = lambda job: _found(*_ALL)(job) if int(1e4 * job.model()[0].up.weight[0, 0]) in _WEIGHTS else None
    all_is_well = lambda job: None
    without_the_idea_looks_inside = lambda job: [part._does.__closure__ for part in job.model()[0].children()] and None
    every_job_is_ill = lambda job: (0, "drop")
    the_first_rank_is_ill = lambda job: None if dist.get_rank() else (_found(*_ALL)(job) or (0, "drop"))
    without_the_idea_gradients_over_all_ranks = lambda job: ((b := _gradients(job, True)) and (b[-1], "drop")) or None
    without_the_idea_the_last_block_with_other_gradients = lambda job: (
        ((b := _gradients(job, False)) and (b[-1], "drop")) or None
    )
    without_the_idea_values_alone = _found("values", "memory")
    without_the_idea_memory_alone = _found("memory")
    hooks_hold_outputs = _found(*_ALL, note_of=lambda y: y)
    memory_forgotten = _found("values", "buffers")
    first_block_with_other_gradients = _found(*_ALL, where=lambda job, found: (0, found[0][1]))
    the_part_behind = _found(*_ALL, where=lambda job, found: (found[0][0], "down"))
    without_the_idea_one_micro_batch = lambda job: _found(*_ALL)(
        SimpleNamespace(model=job.model, forward=lambda model: job.forward(model)[1:])
    )
    counts_from_one = _found(*_ALL, where=lambda job, found: (found[0][0] + 1, found[0][1]))
    right = _found(*_ALL)
    right_2 = _found(*_ALL, where=lambda job, found: {"block": float(found[0][0]), "part": found[0][1].upper()})


def _moments(job, kind, n):
    """Return the end of forward and the largest replay, from a walk over the blocks."""
    kept = {"none": job.block, "selective": job.block - job.core}.get(kind)
    if kept is not None:
        whole = job.layers * kept
        return whole + job.head, whole - job.behind + job.core if kind == "selective" else 0
    if kind == "first":
        return n * job.boundary + (job.layers - n) * job.block + job.head, (n - 1) * job.boundary + job.block
    starts = range(0, job.layers, n)
    replays = [i * job.boundary + min(n, job.layers - first) * job.block for i, first in enumerate(starts)]
    return len(starts) * job.boundary + job.head, max(replays)


def _choose(job, *, leave=(), peak=None, key=None, budget=None):
    """Choose with one idea changed."""
    menu = [("none", 0), ("selective", 0)]
    menu += [("first", n) for n in range(1, job.layers)] + [("every", k) for k in range(1, job.layers + 1)]
    flops = {"none": lambda n: 0, "selective": lambda n: job.layers * job.core_flops}
    flops |= {"first": lambda n: n * job.block_flops, "every": lambda n: job.layers * job.block_flops}
    found = []
    for kind, n in menu:
        name = f"{kind}:{n}" if n else kind
        size = peak(kind, n, *_moments(job, kind, n)) if peak else max(_moments(job, kind, n))
        if kind not in leave and name not in leave:
            found.append((name, size, flops[kind](n)))
    fits = [choice for choice in found if choice[1] <= (job.budget if budget is None else budget)]
    if not fits:
        return None
    best = min(fits, key=key or (lambda choice: (choice[2], choice[1])))
    return dict(zip(("strategy", "peak", "extra"), best, strict=True))


def _peak(of):
    """Return an answer with another peak: `of(job, kind, n, forward, replay)`."""
    return lambda job: _choose(job, peak=lambda *moments: of(job, *moments))


def _first(of):
    """Return an answer with another peak where the first blocks run again: `of(job, forward)`."""
    return _peak(lambda job, kind, n, forward, replay: of(job, forward) if kind == "first" else max(forward, replay))


def _one_first(job, room, frees):
    """Choose with one number of first blocks: by the formula, with this room, and so many bytes that each frees."""
    n = -((room - job.layers * job.block) // frees)
    return _choose(job, leave=[f"first:{m}" for m in range(1, job.layers) if m != n])


def _pays(of):
    """Return an answer that chooses right and says other FLOPs: `of(those of all blocks, what it chooses)`."""
    return lambda job: (found := _choose(job)) and found | {"extra": of(job.layers * job.block_flops, found)}


class choose:
    a_list_of_known_situations = partial({job: best_choice(job) for job in jobs(random.Random(99))}.get)
    always_full = lambda job: _choose(job, leave=("none", "selective", "first"))
    never_selective = lambda job: _choose(job, leave=("selective",))
    divisors_alone = lambda job: _choose(job, leave=[f"every:{k}" for k in range(1, job.layers + 1) if job.layers % k])
    last_segment_is_whole = _peak(
        lambda job, kind, n, *most: max(*most, kind == "every" and (job.layers - 1) // n * job.boundary + n * job.block)
    )
    all_but_two = lambda job: _choose(job, leave=[f"first:{job.layers - 1}"])
    first_without_the_head = lambda job: _one_first(job, job.budget, job.block - job.boundary)
    first_frees_whole_blocks = lambda job: _one_first(job, job.budget - job.head, job.block)
    full_alone = lambda job: _choose(job, leave=("selective", *(f"every:{k}" for k in range(2, job.layers + 1))))
    forward_reported = lambda job: (best := best_choice(job)) and best | {"peak": moments(job, best["strategy"])[0]}
    nothing_between_cores_and_all = lambda job: _choose(
        job, leave=("first", *(f"every:{k}" for k in range(2, job.layers + 1)))
    )
    never_segments = lambda job: _choose(job, leave=[f"every:{k}" for k in range(2, job.layers + 1)])
    selective_before_everything = lambda job: _choose(job, leave=("first", "every")) or _choose(job)
    ignores_the_budget = lambda job: _choose(job, budget=float("inf"))
    below_the_budget = lambda job: _choose(job, budget=job.budget - 1)
    segments_of_the_square_root = lambda job: _choose(
        job, leave=[f"every:{k}" for k in range(1, job.layers + 1) if k != round(job.layers**0.5)]
    )
    adds_the_moments = _peak(lambda job, kind, n, forward, replay: forward + replay)
    least_bytes = lambda job: _choose(job, key=lambda choice: choice[1])
    any_length_of_segment = lambda job: _choose(job, key=lambda choice: choice[2])
    without_the_idea_the_checks_own_list = lambda job: best_choice(job)
    asks_the_check_for_flops = lambda job: (c := _choose(job)) and c | {"extra": extra_flops(job, c["strategy"])}
    without_the_idea_end_of_forward = _peak(lambda job, kind, n, forward, replay: forward)
    without_the_idea_the_replay_alone = _peak(
        lambda job, kind, n, forward, replay: forward if kind == "none" else replay
    )

    # End of forward for blocks, and for cores what the replay adds, even where that is less than nothing.
    without_the_idea_a_replay_of_cores_alone = _peak(
        lambda job, kind, n, forward, replay: forward + (job.core - job.behind) * (kind == "selective")
    )

    # Adds one replay to the end of forward, as if the head were still there.
    without_the_idea_full_is_stored_and_one_block = _peak(
        lambda job, kind, n, forward, replay: max(forward, replay + job.head) if replay else forward
    )

    def inputs_are_free(job):
        """Takes recomputed blocks to keep nothing at all."""

        def free(kind, n, forward, replay):
            if kind == "first":
                return max((job.layers - n) * job.block + job.head, job.block)
            return max(job.head, n * job.block) if kind == "every" else max(forward, replay)

        return _choose(job, peak=free)

    # Adds the replay to the end of forward, as if the blocks behind it were still there, with the head and without.
    all_kept_blocks_stay = _first(lambda job, forward: forward + job.block - job.boundary)
    last_blocks_instead_of_the_first = _first(
        lambda job, forward: forward + max(0, job.block - job.boundary - job.head)
    )
    behind_forgotten = _peak(
        lambda job, kind, n, forward, replay: max(forward, replay + job.behind * (kind == "selective"))
    )
    head_forgotten = _peak(lambda job, kind, n, forward, replay: max(forward - job.head, replay))

    segments_before_forgotten = _peak(
        lambda job, kind, n, forward, replay: max(
            forward, min(n, job.layers) * job.block if kind == "every" else replay
        )
    )

    one_block_of_a_segment = _peak(
        lambda job, kind, n, forward, replay: max(
            forward, (-(-job.layers // n) - 1) * job.boundary + job.block if kind == "every" else replay
        )
    )
    all_blocks_pay = _pays(lambda all_blocks, found: all_blocks if found["strategy"][0] == "f" else found["extra"])
    backward_counts_too = _pays(lambda all_blocks, found: 3 * found["extra"])
    step_flops = _pays(lambda all_blocks, found: found["extra"] + 3 * all_blocks)

    def right(job):
        """Go through the choices from the cheapest to the most expensive, and stop at the first that fits."""
        choices = [(0, "none", 0), (job.layers * job.core_flops, "selective", 0)]
        choices += [(n * job.block_flops, "first", n) for n in range(1, job.layers)]
        most = job.layers * job.block_flops
        segments = sorted((max(_moments(job, "every", k)), k) for k in range(1, job.layers + 1))
        for extra, what, n in [*sorted(choices), (most, "every", segments[0][1])]:
            peak = max(_moments(job, what, n))
            if peak <= job.budget:
                return {"strategy": f"{what}:{n}" if n else what, "peak": peak, "extra": extra}
        return None

    def right_2(job):
        """Solve for n, let selective compete, and try segments last; floats, numpy and an object."""
        if job.layers * job.block + job.head <= job.budget:
            return SimpleNamespace(strategy="None", peak=float(job.layers * job.block + job.head), extra=0.0)
        n = -((job.budget - job.head - job.layers * job.block) // (job.block - job.boundary))
        found = []
        if n < job.layers:
            peak = n * job.boundary + (job.layers - n) * job.block + job.head
            found.append((n * job.block_flops, peak, f"First: {n}"))
        stored = job.layers * (job.block - job.core)
        found.append((job.layers * job.core_flops, stored + max(job.head, job.core - job.behind), "selective"))
        k = min(range(1, job.layers + 1), key=lambda k: max(_moments(job, "every", k)))
        name = "full" if k == 1 else f"every:{k}"
        found.append((job.layers * job.block_flops, np.int64(max(_moments(job, "every", k))), name))
        found = [choice for choice in found if choice[1] <= job.budget]
        return MappingProxyType(dict(zip(("extra", "peak", "strategy"), min(found), strict=True))) if found else None


DEFECTS, SECOND_SOLUTIONS = listed(checkpoint, keep_within, choose, faulty_part)

SENTENCES = {
    "gradients_of_before_lost": "backward adds to `.grad`",
    "two_passes_through_the_replay": "Backward went twice through one graph",
    "the_replays_input_needs_no_gradient": "a detached copy needs no gradient",
    "without_checkpoints": "no product runs again. Put a checkpoint around each block",
    "saved_by_all_checkpoints": "with a policy that does not save all",
    "nothing_is_saved": "FLOPs of the products run again, where",
    "norms_saved_alone": "FLOPs of the products run again, where",
    "everything_is_saved": "and so does each output that you save",
    "one_checkpoint_around_all": "give each block one of its own",
    "two_blocks_in_a_checkpoint": "give each block one of its own",
    "a_trial_stays_alive": "and so does each output that you save",
    "another_shape": "Return a tensor like the input",
    "copies_of_weights": "bytes of what it made are alive",
    "copy_of_the_input_needs_no_gradient": "what backward returned for it was None",
    "divisors_alone": "Segments cost the same FLOPs whatever their length",
    "last_segment_is_whole": "The last segment may be shorter",
    "first_without_the_head": "what is left for blocks, without the head",
    "first_frees_whole_blocks": "keeps its input, so it frees less",
    "all_but_two": "All but the last may run again",
    "other_masks": "forward's random numbers and autocast",
    "a_block_left_out": "Return what the model returns; if a trial run",
    "inputs_of_blocks_detached": "mind the graph back to `x`",
    "nothing_between_cores_and_all": "the last resort: take what costs less",
    "inputs_of_blocks_forgotten": "the inputs of blocks count too",
    "input_of_the_model_counted": "would do, and",
    "activations_saved_too": "and so does each output that you save",
    "without_the_idea_first_come": "of two outputs of as many bytes keep",
    "without_the_idea_last_come": "of two outputs of as many bytes keep",
    "without_the_idea_the_largest": "of two outputs of as many bytes keep",
    "without_the_idea_the_smallest": "of two outputs of as many bytes keep",
    "without_the_idea_most_flops": "of two outputs of as many bytes keep",
    "sums_without_a_graph": "all that you do with its output before backward",
    "hooks_hold_outputs": "held by your own hooks",
    "every_job_is_ill": "Both ranks accuse themselves",
    "the_first_rank_is_ill": "is accused",
    "without_the_idea_values_alone": "compare buffers",
    "memory_forgotten": "weigh what is alive when forward has ended",
    "first_block_with_other_gradients": "a wrong gradient goes on into all blocks before it",
    "the_part_behind": "follow the block part by part",
    "without_the_idea_one_micro_batch": "that the second micro-batch has changed",
    "calls_that_of_the_course": "the course's own checkpoint",
    "counts_from_one": "not block 3.",
    "full_alone": "Selective recomputation is a choice",
    "forward_reported": "A replay brings bytes back",
    "step_flops": "backward runs once in any case",
    "last_blocks_instead_of_the_first": "the blocks behind it are gone already",
    "segments_before_forgotten": "the inputs of those before it are still kept",
    "segments_of_the_square_root": "Segments cost the same FLOPs whatever their length",
    "adds_the_moments": "of the end of forward and the replays the larger",
    "seeds_forward_and_replay": "save that state, and seed nothing",
    "without_the_idea_the_checks_own_list": "This asks the check",
    "without_the_idea_looks_inside": "This asks the check",
    "asks_the_check_for_flops": "This asks the check",
    "inherited_from_pytorch": "PyTorch's own checkpoint",
    "borrowed_from_pytorch": "PyTorch's own checkpoint",
    "around_that_of_pytorch": "own operators are in the graph",
    "replays_a_copy": "itself and no copy",
    "random_numbers_of_the_trial_gone": "if a trial run drew random numbers",
    "without_the_idea_end_of_forward": "A replay brings bytes back",
    "without_the_idea_the_replay_alone": "A replay brings bytes back",
    "without_the_idea_a_replay_of_cores_alone": "A replay brings bytes back",
    "without_the_idea_full_is_stored_and_one_block": "The head's bytes are gone when the first replay starts",
    "inputs_are_free": "The blocks that run again keep their inputs",
    "all_kept_blocks_stay": "the blocks behind it are gone already",
    "behind_forgotten": "`behind` bytes of its block are gone",
    "head_forgotten": "The head's bytes are there when forward ends",
    "one_block_of_a_segment": "The replay brings back all blocks of a segment",
    "never_segments": "Segments cost the same FLOPs whatever their length",
    "never_selective": "Selective recomputation is a choice",
    "always_full": "not what keeps least",
    "all_blocks_pay": "Only blocks that are replayed cost FLOPs",
    "backward_counts_too": "backward runs once in any case",
    "below_the_budget": "A peak that equals the budget fits",
    "ignores_the_budget": "The peak has to fit the budget",
    "least_bytes": "not what keeps least",
    "any_length_of_segment": "the one of the least peak is asked for",
}
