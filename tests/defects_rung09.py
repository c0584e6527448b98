"""Planted defects of rung 09: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools
from fractions import Fraction
from functools import partial
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.checks.rung09 import best_choice
from lablib.toys.recompute import checkpoint as course_checkpoint
from tests.planted import listed


def _block(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused, *, mask=1, group=True):
    n, pairs = batch * seq, heads * batch * seq * seq
    keys = hidden // heads * (kv_heads if group else heads)
    kept = 2 * n * (6 * hidden + 2 * keys + (2 + gated) * ffn) + 2 * mask * n * hidden * dropout
    return kept + (4 * n * heads if fused else pairs * (2 + (mask + 2) * dropout))


class block_bytes:
    masks_of_two_bytes = lambda *case: _block(*case, mask=2)
    masks_forgotten = lambda *case: _block(*case, mask=0)

    every_query_its_own_keys = lambda *case: _block(*case, group=False)
    fused_keeps_scores = lambda *case: _block(*case[:8], False)

    def right(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused):
        """Second solution: a table of tensors, (values, bytes a value), summed."""
        n, kv = batch * seq, hidden * kv_heads // heads
        streams = (
            "input of norm 1",
            "output of norm 1",
            "q",
            "attention output",
            "input of norm 2",
            "output of norm 2",
        )
        table = [(name, n * hidden, 2) for name in streams]
        table += [("k", n * kv, 2), ("v", n * kv, 2), ("input of the activation", n * ffn, 2)]
        table.append(("input of the down projection", n * ffn, 2))
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

    def _less(**what):
        """Return the right answer less some of its tensors."""

        def answer(b, s, h, a, kv, f, gated, dropout, fused):
            n, pairs = b * s, a * b * s * s
            sizes = {"v": 2 * n * h * kv // a, "pairs": pairs * (not fused), "mask": pairs * fused * dropout}
            sizes |= {"stream": 2 * n * h, "out": 2 * n * h * fused, "inner": 2 * n * f * (not gated)}
            whole = _block(b, s, h, a, kv, f, gated, dropout, fused)
            return whole - sum(times * sizes[name] for name, times in what.items())

        return answer

    input_of_the_output_projection_forgotten = _less(stream=1)
    v_forgotten = _less(v=1)
    k_and_v_forgotten = _less(v=2)
    a_mask_inside_of_fused_attention = _less(mask=-1)
    scores_before_softmax_kept_too = _less(pairs=-2)
    output_of_fused_attention_twice = _less(out=-1)
    gelu_keeps_one_tensor = _less(inner=1)

    def the_paper_without_scores_where_fused(b, s, h, a, kv, f, gated, dropout, fused):
        return (34 if dropout else 32) * s * b * h + (0 if fused else (5 if dropout else 2) * a * s * s * b)

    the_formula_of_the_paper = lambda b, s, h, a, *_: 34 * s * b * h + 5 * a * s * s * b
    output_of_the_block_too = _less(stream=-1)

    def masks_of_two_bytes_and_v_forgotten(*case):
        """Two mistakes at once."""
        return block_bytes.masks_of_two_bytes(*case) + block_bytes.v_forgotten(*case) - _block(*case)

    def weights_counted(b, s, h, a, kv, f, gated, *flags):
        return _block(b, s, h, a, kv, f, gated, *flags) + 2 * (2 * h * h + 2 * h * h * kv // a + (2 + gated) * h * f)

    ffn_of_four_times_the_width = lambda *case: _block(*case[:5], 4 * case[2], *case[6:])
    statistics_for_key_heads = lambda *case: _block(*case) - 4 * case[0] * case[1] * (case[3] - case[4]) * case[8]
    heads_for_statistics_forgotten = lambda *case: _block(*case) - 4 * case[0] * case[1] * (case[3] - 1) * case[8]
    counts_values_not_bytes = lambda *case: _block(*case) / 2
    shared_input_kept_three_times = lambda *case: _block(*case) + 4 * case[0] * case[1] * case[2]


def _function(*, random=True, fork=True, graph=False, keep="input", times=1, seed="given", train=True, own_seed=False):
    """Build a checkpoint with one idea changed."""

    class Slip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, block):
            ctx.block, ctx.random = block, torch.get_rng_state()
            ctx.x = x.detach()
            if own_seed:
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
    of_pytorch = lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    of_the_course = lambda block, x: course_checkpoint(block, x)
    in_a_list = lambda block, x: [block(x)]

    def draws_are_undone(block, x):
        with torch.random.fork_rng(devices=[]):
            return _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())

    seeds_forward_and_replay = _function(own_seed=True)
    new_random_numbers = _function(random=False)
    random_state_left_behind = _function(fork=False)
    graph_kept_in_forward = _function(graph=True)
    replays_from_the_output = _function(keep="output")
    ones_for_the_gradient = _function(seed="ones")
    replays_twice = _function(times=2)
    dropout_off_in_the_replay = _function(train=False)
    weights_get_nothing = lambda block, x: _WithoutWeights.apply(x, block)
    # Starts the replay from the saved input itself, so that its backward goes on into the block before.
    replay_not_detached = lambda block, x: _Attached.apply(x, block)

    def no_grad_alone(block, x):
        """Forgets what is inside, and has nothing that computes it again."""
        with torch.no_grad():
            return block(x)

    # Second solution: weights are arguments of the Function too, and nothing arrives as a side effect.
    right = lambda block, x: _Explicit.apply(block, torch.get_rng_state(), x, *block.parameters())


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _policy(saved=PRODUCTS, *, also=(), each=True, apart=False, kept=lambda number: number % 2, **how):
    """Build an answer with one idea changed."""
    counted = {}

    def answer(block, x):
        def contexts():
            asked = {} if each else counted

            def policy(ctx, function, *args, **kwargs):
                key = ctx.is_recompute, apart and function
                asked[key] = asked.get(key, 0) + (function in saved)
                keep = (kept(asked[key]) and function in saved) or function in also
                return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts, **how)

    return answer


class every_second:
    no_checkpoint = lambda block, x: block(x)
    without_a_policy = lambda block, x: torch_checkpoint(block, x, use_reentrant=False)
    all_products_saved = lambda block, x: torch_checkpoint(
        block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, list(PRODUCTS))
    )
    one_count_for_all_blocks = _policy(each=False)
    products_with_bias_forgotten = _policy(PRODUCTS[:1])
    activations_saved_too = _policy(also=[torch.ops.aten.tanh.default])
    other_masks = _policy(preserve_rng_state=False)
    with_and_without_bias_counted_apart = _policy(apart=True)
    without_the_idea_three_of_five = _policy(kept=lambda number: number <= 3)
    right = _policy()

    def right_2(block, x):
        """Counts with an iterator for each of the two runs."""

        def contexts():
            turns = [itertools.cycle((CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)) for _ in range(2)]

            def policy(ctx, function, *_, **__):
                again = CheckpointPolicy.MUST_RECOMPUTE
                return next(turns[ctx.is_recompute]) if function in PRODUCTS else again

            return create_selective_checkpoint_contexts(policy)

        return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)


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


def _pays(of):
    """Return an answer that chooses right and says other FLOPs: `of(those of all blocks, what it chooses)`."""
    return lambda job: (found := _choose(job)) and found | {"extra": of(job.layers * job.block_flops, found)}


class choose:
    always_full = lambda job: _choose(job, leave=("none", "selective", "first"))
    never_selective = lambda job: _choose(job, leave=("selective",))
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

    def one_block_of_a_segment(job):
        def one(kind, n, forward, replay):
            segments = -(-job.layers // max(n, 1))
            return max(forward, (segments - 1) * job.boundary + job.block) if kind == "every" else max(forward, replay)

        return _choose(job, peak=one)

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
            return SimpleNamespace(strategy="none", peak=float(job.layers * job.block + job.head), extra=0.0)
        n = -((job.budget - job.head - job.layers * job.block) // (job.block - job.boundary))
        found = []
        if n < job.layers:
            peak = n * job.boundary + (job.layers - n) * job.block + job.head
            found.append((n * job.block_flops, peak, f"first: {n}"))
        stored = job.layers * (job.block - job.core)
        found.append((job.layers * job.core_flops, stored + max(job.head, job.core - job.behind), "selective"))
        k = min(range(1, job.layers + 1), key=lambda k: max(_moments(job, "every", k)))
        name = "full" if k == 1 else f"every:{k}"
        found.append((job.layers * job.block_flops, np.int64(max(_moments(job, "every", k))), name))
        found = [choice for choice in found if choice[1] <= job.budget]
        return MappingProxyType(dict(zip(("extra", "peak", "strategy"), min(found), strict=True))) if found else None


DEFECTS, SECOND_SOLUTIONS = listed(block_bytes, checkpoint, every_second, choose)

SENTENCES = {
    "no_checkpoint": "Nothing runs again",
    "without_a_policy": "save the outputs of the first, the third and the fifth",
    "all_products_saved": "No product runs again",
    "one_count_for_all_blocks": "begin to count anew in each block",
    "products_with_bias_forgotten": "with bias (aten.addmm)",
    "activations_saved_too": "More is kept",
    "other_masks": "leave preserve_rng_state on",
    "with_and_without_bias_counted_apart": "Not the second and the fourth product",
    "without_the_idea_three_of_five": "Not the second and the fourth product",
    "ffn_of_four_times_the_width": "and ffn = 4h; count this one",
    "statistics_for_key_heads": "statistics a token and query head",
    "step_flops": "backward runs once in any case",
    "last_blocks_instead_of_the_first": "the blocks behind it are gone already",
    "v_forgotten": "Both products of attention need their factors",
    "k_and_v_forgotten": "Both products of attention need their factors",
    "a_mask_inside_of_fused_attention": "draws its dropout inside of the kernel",
    "scores_before_softmax_kept_too": "its derivative needs its output, not qkᵀ",
    "output_of_fused_attention_twice": "Attention's output is the input of the output projection",
    "gelu_keeps_one_tensor": "the input of its activation and the input of the down projection",
    "weights_counted": "Weights are there anyway",
    "segments_before_forgotten": "the inputs of those before it are still kept",
    "the_formula_of_the_paper": "is a GPT block with dropout, plain attention and ffn = 4h",
    "the_paper_without_scores_where_fused": "is a GPT block with dropout, plain attention and ffn = 4h",
    "segments_of_the_square_root": "Segments cost the same FLOPs whatever their length",
    "adds_the_moments": "of the end of forward and the replays the larger",
    "output_of_the_block_too": "A sum needs neither of its terms",
    "masks_of_two_bytes": "A dropout mask has one byte a value",
    "masks_forgotten": "There are two dropout masks in the stream",
    "masks_of_two_bytes_and_v_forgotten": "There is another mistake beside it",
    "every_query_its_own_keys": "Keys and values have kv_heads heads",
    "fused_keeps_scores": "Fused attention keeps no scores",
    "shared_input_kept_three_times": "Matrices that read the same tensor keep it once",
    "counts_values_not_bytes": "Values have 16 bits",
    "seeds_forward_and_replay": "save that state, and seed nothing",
    "without_the_idea_the_checks_own_list": "These are the check's own numbers",
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
