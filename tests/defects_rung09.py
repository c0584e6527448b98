"""Planted defects of rung 09: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from fractions import Fraction

import numpy as np
import torch

from lablib.toys.recompute import checkpoint as course_checkpoint
from tests.planted import listed


def _block(
    batch,
    seq,
    hidden,
    heads,
    kv_heads,
    ffn,
    gated,
    dropout,
    fused,
    *,
    mask=1,
    norms=2,
    inner=(2, 3),
    statistics=4,
    group=True,
    after_dropout=2,
    softmax=2,
):
    n, pairs = batch * seq, heads * batch * seq * seq
    keys = hidden // heads * (kv_heads if group else heads)
    kept = 2 * n * (norms * hidden + 3 * hidden + 2 * keys + hidden + inner[gated] * ffn)
    kept += 2 * mask * n * hidden * dropout
    if fused:
        return kept + statistics * n * heads
    return kept + pairs * (softmax + (mask + after_dropout) * dropout)


class block_bytes:
    masks_of_two_bytes = lambda *case: _block(*case, mask=2)
    masks_forgotten = lambda *case: _block(*case, mask=0)

    def input_of_the_output_projection_forgotten(batch, seq, hidden, *rest):
        return _block(batch, seq, hidden, *rest) - 2 * batch * seq * hidden

    every_query_its_own_keys = lambda *case: _block(*case, group=False)
    fused_keeps_scores = lambda *case: _block(*case[:8], False)

    def right(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused):
        """Second solution: a table of tensors, (values, bytes a value), summed."""
        n, kv = batch * seq, hidden * kv_heads // heads
        table = [
            ("input of norm 1", n * hidden, 2),
            ("output of norm 1", n * hidden, 2),
            ("q", n * hidden, 2),
            ("k", n * kv, 2),
            ("v", n * kv, 2),
            ("attention output", n * hidden, 2),
            ("input of norm 2", n * hidden, 2),
            ("output of norm 2", n * hidden, 2),
            ("input of the activation", n * ffn, 2),
            ("input of the down projection", n * ffn, 2),
        ]
        if gated:
            table.append(("up", n * ffn, 2))
        if dropout:
            table += [("mask of attention", n * hidden, 1), ("mask of the MLP", n * hidden, 1)]
        if fused:
            table.append(("statistics", n * heads, 4))
        else:
            table.append(("softmax", batch * heads * seq**2, 2))
            if dropout:
                table += [("mask", batch * heads * seq**2, 1), ("dropped weights", batch * heads * seq**2, 2)]
        return sum(values * size for _, values, size in table)

    def right_2(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused):
        """In units of s b h, as the paper writes it, with exact fractions."""
        h, a, f = Fraction(hidden), heads, Fraction(ffn)
        sbh = 4 + 2 + 2 + 4 * Fraction(kv_heads, a) + 2 + 2 + (6 if gated else 4) * f / h + (2 if dropout else 0)
        scores = Fraction(4 * a) / h if fused else (5 if dropout else 2) * a * seq / h
        return int(batch * seq * h * (sbh + scores))

    def right_3(*case):
        """A dot product of numpy: numbers of values and their bytes."""
        b, s, h, a, kv, f, gated, dropout, fused = case
        n, pairs = b * s, a * b * s * s
        values = np.array(
            [5 * n * h, 2 * n * h * kv // a, n * h, (2 + gated) * n * f, 2 * n * h, n * a, pairs, pairs, pairs]
        )
        two = 2 * (not fused)
        return values @ np.array([2, 2, 2, 2, dropout, 4 * fused, two, two * dropout // 2, two * dropout])

    heads_for_statistics_forgotten = lambda *case: _block(*case) - 4 * case[0] * case[1] * (case[3] - 1) * case[8]
    counts_values_not_bytes = lambda *case: _block(*case) / 2
    shared_input_kept_three_times = lambda *case: _block(*case) + 4 * case[0] * case[1] * case[2]


def _function(*, random=True, fork=True, graph=False, keep="input", times=1, seed="given", train=True):
    """Build a checkpoint with one idea changed."""

    class Slip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, block):
            ctx.block, ctx.random = block, torch.get_rng_state()
            ctx.x = x.detach()
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
            for _ in range(times):
                x = ctx.x.detach().requires_grad_()
                with torch.enable_grad():
                    if random:
                        torch.set_rng_state(ctx.random)
                    ctx.block.train(train)
                    y = ctx.block(x)
                    ctx.block.train()
                y.backward(torch.ones_like(gradient) if seed == "ones" else gradient)
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


class _Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        ctx.block(x).backward(gradient)
        return x.grad, None


class _OneGradient(_Off):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return x.grad


class checkpoint:
    def right_2(block, x):
        """Keeps the random state on the block, and passes the output on through a view."""
        block.before = torch.get_rng_state()
        return CheckpointFunction.apply(x, block).view_as(x)

    gradients_off_in_backward = lambda block, x: _Off.apply(x, block)

    one_gradient_for_two_arguments = lambda block, x: _OneGradient.apply(x, block)

    def of_pytorch(block, x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)

    def of_the_course(block, x):
        return course_checkpoint(block, x)

    def in_a_list(block, x):
        return [block(x)]

    def draws_are_undone(block, x):
        with torch.random.fork_rng(devices=[]):
            return _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())

    new_random_numbers = _function(random=False)

    random_state_left_behind = _function(fork=False)

    graph_kept_in_forward = _function(graph=True)

    replays_from_the_output = _function(keep="output")

    ones_for_the_gradient = _function(seed="ones")

    replays_twice = _function(times=2)

    dropout_off_in_the_replay = _function(train=False)

    weights_get_nothing = lambda block, x: _WithoutWeights.apply(x, block)

    def replay_not_detached(block, x):
        """Starts the replay from the saved input itself, so that its backward goes on into the block before."""
        return _Attached.apply(x, block)

    def no_grad_alone(block, x):
        """Forgets what is inside, and has nothing that computes it again."""
        with torch.no_grad():
            return block(x)

    def right(block, x):
        """Second solution: weights are arguments of the Function too, and nothing arrives as a side effect."""
        return _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())


class segment_peak:
    end_of_forward_only = lambda layers, boundary, block, k: -(-layers // k) * boundary
    one_block_at_a_time = lambda layers, boundary, block, k: (-(-layers // k) - 1) * boundary + block
    input_counted_twice = lambda layers, boundary, block, k: -(-layers // k) * boundary + k * block
    one_input_a_layer = lambda layers, boundary, block, k: (layers - 1) * boundary + k * block

    def the_last_segment_only(layers, boundary, block, k):
        """Takes the end of the model for the worst moment, where the last segment may be short."""
        last = layers % k or k
        return (-(-layers // k) - 1) * boundary + last * block

    full_length_last_segment = lambda layers, boundary, block, k: (-(-layers // k) - 1) * boundary + k * block

    def inner_inputs_counted_out(layers, boundary, block, k):
        """Takes the inputs inside a segment for kept already, as the first one is."""
        return max(
            (i + 1) * boundary + min(k, layers - f) * (block - boundary) for i, f in enumerate(range(0, layers, k))
        )

    def waits_for_zero(layers, boundary, block, k):
        """Takes segments away until nothing is left, and never is at nothing."""
        left, kept = layers, 0
        while left != 0:
            kept, left = kept + boundary, left - k
        return kept - boundary + k * block

    all_inputs_of_fractions = lambda layers, boundary, block, k: (layers / k - 1) * boundary + k * block

    def right_2(layers, boundary, block, k):
        """A block keeps no less than its input, so the last whole segment is the worst."""
        return float((layers // k - 1) * boundary + k * block)

    def right_3(layers, boundary, block, k):
        """All moments at once."""
        first = np.arange(0, layers, k)
        return np.max(first // k * boundary + np.minimum(k, layers - first) * block)

    earlier_inputs_forgotten = lambda layers, boundary, block, k: min(k, layers) * block

    def right(layers, boundary, block, k):
        """Second solution: a walk with a list of what is kept."""
        kept = [boundary for first in range(layers) if first % k == 0]
        first, most = (layers - 1) // k * k, sum(kept)
        end = layers
        while first >= 0:
            most = max(most, sum(kept) - kept[-1] + sum(block for _ in range(first, end)))
            kept.pop()
            first, end = first - k, first
        return most


def _choose(job, *, options=("none", "selective", "first"), peak=None, key=None, limit=None):
    stored = job.layers * (job.block - job.core)
    found = []
    if "none" in options:
        found.append(("none", job.layers * job.block, 0))
    if "selective" in options:
        found.append(("selective", stored + max(0, job.core - job.behind), job.layers * job.core_flops))
    if "first" in options:
        for n in range(1, job.layers + 1):
            moments = n * job.boundary + (job.layers - n) * job.block, (n - 1) * job.boundary + job.block
            found.append((f"first:{n}", max(moments), n * job.block_flops))
    if "full" in options:
        found.append(found.pop() if "first" in options else _full(job))
    if peak:
        found = [(name, peak(job, name, size), extra) for name, size, extra in found]
    fits = [choice for choice in found if choice[1] <= (job.budget if limit is None else limit)]
    if not fits:
        return None
    best = min(fits, key=key or (lambda choice: choice[2]))
    return dict(zip(("strategy", "peak", "extra"), best, strict=True))


def _pays_for_all(job, found):
    if found and found["strategy"].startswith("first"):
        found["extra"] = job.layers * job.block_flops
    return found


def _full(job):
    return f"first:{job.layers}", (job.layers - 1) * job.boundary + job.block, job.layers * job.block_flops


class choose:
    always_full = lambda job: _choose(job, options=("full",))
    never_selective = lambda job: _choose(job, options=("none", "first"))
    selective_before_everything = lambda job: _choose(job, options=("none", "selective")) or _choose(job)

    def forgets_the_replay(job):
        """Compares with the budget what is kept when forward ends."""

        def forward(job, name, size):
            if name == "none":
                return size
            if name == "selective":
                return job.layers * (job.block - job.core)
            n = int(name[6:])
            return n * job.boundary + (job.layers - n) * job.block

        return _choose(job, peak=forward)

    def inputs_are_free(job):
        """Takes recomputed blocks to keep nothing at all."""

        def free(job, name, size):
            return size if name in ("none", "selective") else max(job.block, (job.layers - int(name[6:])) * job.block)

        return _choose(job, peak=free)

    def all_kept_blocks_stay(job):
        """Adds the replay to the end of forward, as if the blocks behind it were still there."""

        def late(job, name, size):
            if not name.startswith("first"):
                return size
            n = int(name[6:])
            return n * job.boundary + (job.layers - n) * job.block + job.block - job.boundary

        return _choose(job, peak=late)

    def behind_forgotten(job):
        def whole(job, name, size):
            return job.layers * (job.block - job.core) + job.core if name == "selective" else size

        return _choose(job, peak=whole)

    all_blocks_pay = lambda job: _pays_for_all(job, _choose(job))

    def right_2(job):
        """Solve for n, and let selective compete: the last block is never worth a replay."""
        if job.layers * job.block <= job.budget:
            return {"strategy": "none", "peak": float(job.layers * job.block), "extra": 0.0}
        n = -((job.budget - job.layers * job.block) // (job.block - job.boundary))
        found = []
        if n < job.layers:
            found.append((n * job.block_flops, f"first:{n}", n * job.boundary + (job.layers - n) * job.block))
        peak = job.layers * (job.block - job.core) + max(0, job.core - job.behind)
        if peak <= job.budget:
            found.append((job.layers * job.core_flops, "selective", np.int64(peak)))
        if not found:
            return None
        extra, strategy, peak = min(found)
        return {"extra": extra, "peak": peak, "strategy": strategy}

    ignores_the_budget = lambda job: _choose(job, limit=float("inf"))

    def backward_counts_too(job):
        """Counts the replay as forward and backward: three times its FLOPs."""
        found = _choose(job)
        return found and found | {"extra": 3 * found["extra"]}

    def right(job):
        """Go through the choices from the cheapest to the most expensive, and stop at the first that fits."""
        choices = [(0, "none"), (job.layers * job.core_flops, "selective")]
        choices += [(n * job.block_flops, n) for n in range(1, job.layers + 1)]
        for extra, what in sorted(choices, key=lambda choice: choice[0]):
            if what == "none":
                kept = [job.layers * job.block]
            elif what == "selective":
                slim = job.block - job.core
                kept = [job.layers * slim, (job.layers - 1) * slim + job.block - job.behind]
            else:
                inputs = what * job.boundary
                kept = [inputs + (job.layers - what) * job.block, inputs - job.boundary + job.block]
            if max(kept) <= job.budget:
                name = what if isinstance(what, str) else f"first:{what}"
                return {"strategy": name, "peak": max(kept), "extra": extra}
        return None


DEFECTS, SECOND_SOLUTIONS = listed(block_bytes, checkpoint, segment_peak, choose)
