"""Planted defects of rung 03: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from collections import namedtuple
from enum import Enum

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lablib.calc.parallel import split_heads
from lablib.checks.rung03 import _IMPOSSIBLE, _jobs
from lablib.toys.tensor_parallel import head_split
from lablib.toys.torch_names import all_gather, reduce_scatter
from tests.planted import listed


def _mine(size, group):
    width = size // dist.get_world_size(group)
    return slice(dist.get_rank(group) * width, (dist.get_rank(group) + 1) * width)


def _summed(tensor, group, op=dist.ReduceOp.SUM):
    total = tensor.detach().clone()
    dist.all_reduce(total, op, group=group)
    return total


class _Around(torch.autograd.Function):
    """Forward and backward given as functions of a tensor and the group."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.undo = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.undo(grad, ctx.group), None, None, None


_same = lambda x, group: x.view_as(x)
_summed_everywhere = lambda x, group: _summed(x, None)
_mean = lambda x, group: _summed(x, group) / group.size()


def copy_to_tp(x, group):
    """f, written here: what ranks must load for it would take longer than the check."""
    return _Around.apply(x, group, _same, _summed)


def reduce_from_tp(x, group):
    """g, written here."""
    return _Around.apply(x, group, _summed, _same)


def _entering(x, group):
    """No Function: a hook on a view of x."""
    seen = x.view_as(x)
    seen.register_hook(lambda grad: _summed(grad, group))
    return seen


def _entering_in_two(x, group):
    """A reduce-scatter and an all-gather are an all-reduce, for the same bytes."""

    def both(grad, g):
        flat = grad.flatten()
        part = flat.new_empty(len(flat) // g.size())
        reduce_scatter(part, flat, group=g)
        total = torch.empty_like(flat)
        all_gather(total, part, group=g)
        return total.view_as(grad)

    return _Around.apply(x, group, _same, both)


def _pieces_of_all(tensor, group):
    pieces = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(pieces, tensor.contiguous(), group=group)
    return pieces


def _fetched(part, group):
    """The sum of parts, for more bytes than it takes."""
    return part + sum(p for r, p in enumerate(_pieces_of_all(part.detach(), group)) if r != group.rank())


def _half(x, up, b, down, down_bias, group, enter=copy_to_tp, leave=reduce_from_tp, after=True, cut=_mine, by=_same):
    mine = cut(len(up), group)
    inner = by(torch.relu(F.linear(enter(x, group), up[mine], b[mine])), group)
    part = F.linear(inner, down[:, mine], None if after else down_bias)
    total = leave(part, group)
    return total + down_bias if after else total


def _behind(times):
    """The whole product, as `times` takes it, and a mask on it."""

    def answer(x, up, up_bias, down, down_bias, group):
        mask = torch.arange(len(up)) // (len(up) // group.size()) == group.rank()
        inner = torch.relu(times(copy_to_tp(x, group), up) + up_bias) * mask
        return reduce_from_tp(times(inner, down).view_as(x), group) + down_bias

    return answer


class split_mlp:
    forgets_f = lambda *case: _half(*case, enter=_same)
    forgets_g = lambda *case: _half(*case, leave=_same)
    backward_of_g_sums = lambda *case: _half(*case, leave=lambda y, group: _Around.apply(y, group, _summed, _summed))
    backward_of_g_averages = lambda *c: _half(*c, leave=lambda y, g: _Around.apply(y, g, _summed, lambda z, _: z / 3))
    f_on_the_last_bias = lambda *case: _half(*case[:4], copy_to_tp(case[4], case[5]), case[5])
    last_bias_on_rank_0_after_the_sum = lambda *case: _half(*case[:4], case[4] * (case[5].rank() == 0), case[5])
    averages_the_parts = lambda *case: _half(*case, leave=lambda y, group: reduce_from_tp(y, group) / group.size())
    averages_the_gradient = lambda *case: _half(*case, enter=lambda x, group: _Around.apply(x, group, _same, _mean))
    g_in_place_of_f = lambda *case: _half(*case, enter=lambda x, group: reduce_from_tp(x, group))
    fetches_every_part = lambda *case: _half(*case, leave=_fetched)

    over_the_whole_job = lambda *case: _half(*case, leave=lambda y, g: _Around.apply(y, g, _summed_everywhere, _same))
    counts_the_ranks_of_the_job = lambda *case: _half(*case, cut=lambda size, group: _mine(size, None))
    f_twice = lambda x, *others: _half(copy_to_tp(x, others[-1]), *others)
    bias_in_every_part = lambda *case: _half(*case, after=False)
    # The sum is right, and each rank finds a part of the bias's gradient.
    bias_shared_out = lambda *case: _half(*case[:4], case[4] / case[5].size(), case[5], after=False)

    its_own_rank_of_the_job = lambda *case: _half(*case, cut=lambda size, _: slice(size // 3 * dist.get_rank(), size))
    width_written_out = lambda *case: _half(*case, cut=lambda _, g: slice(4 * g.rank(), 4 * g.rank() + 4))
    unequal_shares = lambda *case: _half(*case, cut=lambda n, g: [slice(2), slice(2, n - 2), slice(n - 2, n)][g.rank()])
    x_detached = lambda x, *others: _half(x.detach(), *others, enter=_same)
    whole_and_no_relu = lambda *case: F.linear(F.linear(*case[:3]), *case[3:5])
    twice_as_much_behind_rank_0 = lambda *case: _half(*case) * (1 + (case[5].rank() > 0))
    nothing_in_the_sum = lambda *case: reduce_from_tp(0 * case[0], case[5]) + case[4]
    bias_shared_out_after_the_sum = lambda *case: _half(*case[:4], case[4] / case[5].size(), case[5])
    the_sum_on_the_last = lambda *c: _half(*c, leave=lambda y, g: y + (g.rank() == 2) * (_summed(y, g) - y.detach()))

    bias_on_rank_0 = lambda *case: _half(*case[:4], case[4] * (case[5].rank() == 0), case[5], after=False)

    def the_first_columns_for_all(x, up, up_bias, down, down_bias, group):
        mine = _mine(len(up), group)
        inner = torch.relu(F.linear(copy_to_tp(x, group), up[mine], up_bias[mine]))
        return reduce_from_tp(F.linear(inner, down[:, : inner.shape[-1]]), group) + down_bias

    first_bias_shared_out = lambda x, up, bias, *others: _half(x, up, bias / others[-1].size(), *others)

    def rows_first(x, up, up_bias, down, down_bias, group):
        """Splits the first matrix by inputs: a ReLU of parts is not a part of the ReLU."""
        mine = _mine(x.shape[-1], group)
        inner = torch.relu(F.linear(copy_to_tp(x, group)[..., mine], up[:, mine], up_bias))
        return reduce_from_tp(F.linear(inner, down), group) + down_bias

    splits_nothing = lambda *case: F.linear(torch.relu(F.linear(*case[:3])), *case[3:5])

    def without_the_idea_all_compute_all_and_average(x, up, up_bias, down, down_bias, group):
        whole = F.linear(torch.relu(F.linear(copy_to_tp(x, group), up, up_bias)), down)
        return reduce_from_tp(whole / group.size(), group) + down_bias

    without_the_idea_a_mask_on_the_whole_product = _behind(F.linear)

    def without_the_idea_zeros_in_whole_matrices(x, up, up_bias, *others):
        mask = torch.arange(len(up)) // (len(up) // others[-1].size()) == others[-1].rank()
        return _half(x, up * mask.unsqueeze(1), up_bias * mask, *others, cut=lambda size, _: slice(size))

    # No matrix product that a counter of those would see.
    without_the_idea_a_mask_on_the_product_value_by_value = _behind(lambda x, a: (x.unsqueeze(-2) * a).sum(-1))
    without_the_idea_a_mask_token_by_token = _behind(lambda x, a: torch.stack([a.mv(z) for z in x.flatten(0, -2)]))
    without_the_idea_a_mask_on_sparse_ones = _behind(lambda x, a: torch.sparse.mm(a.to_sparse(), x.flatten(0, -2).T).T)
    # On rank 0 the same as the first columns of the second matrix for all.
    sum_before_the_second_matrix = lambda *case: _half(*case, by=reduce_from_tp, leave=_same)

    no_gradient_through_the_sum = lambda *case: _half(*case, leave=_summed)

    def without_the_idea_data_parallel(x, up, up_bias, down, down_bias, group):
        """Rank r computes sequence r with both whole matrices."""
        mine = slice(group.rank(), group.rank() + 1)
        y = torch.zeros_like(x)
        y[mine] = F.linear(torch.relu(F.linear(copy_to_tp(x, group)[mine], up, up_bias)), down)
        return reduce_from_tp(y, group) + down_bias

    def without_the_idea_the_last_rank_alone(x, up, up_bias, down, down_bias, group):
        x = copy_to_tp(x, group)
        y = F.linear(torch.relu(F.linear(x, up, up_bias)), down) if group.rank() == 2 else 0 * x
        return reduce_from_tp(y, group) + down_bias

    def rows_first_and_a_sum_before_the_relu(x, up, up_bias, down, down_bias, group):
        """Right values, for one more message; the second matrix is whole on every rank."""
        mine = _mine(x.shape[-1], group)
        inner = reduce_from_tp(copy_to_tp(x, group)[..., mine] @ up[:, mine].T, group) + up_bias
        return F.linear(torch.relu(inner), down, down_bias)

    def gathers_in_between(x, up, up_bias, down, down_bias, group):
        """Right, with an all-gather of the inner values that nobody needs."""
        mine = _mine(len(up), group)
        inner = torch.relu(F.linear(copy_to_tp(x, group), up[mine], up_bias[mine]))
        pieces = _pieces_of_all(inner.detach(), group)
        pieces[group.rank()] = inner
        return reduce_from_tp(F.linear(torch.cat(pieces, -1)[..., mine], down[:, mine]), group) + down_bias

    def right(x, up, up_bias, down, down_bias, group):
        """Every t-th inner value in place of a block, matrices on the other side, the sum a constant for autograd."""
        mine = slice(group.rank(), None, group.size())
        entering = _entering(x, group)
        inner = (entering @ up[mine].T + up_bias[mine]).clamp_min(0)
        part = inner @ down[:, mine].T
        return part + (_summed(part, group) - part.detach()) + down_bias

    def right_4(x, up, up_bias, down, down_bias, group):
        """Value by value, the ReLU as a mask of its own values, f and g of the course."""
        from lablib.toys.tensor_parallel import copy_to_tp as f
        from lablib.toys.tensor_parallel import reduce_from_tp as g

        mine = _mine(len(up), group)
        inner = (f(x, group).unsqueeze(-2) * up[mine]).sum(-1) + up_bias[mine]
        return g(((inner * (inner > 0)).unsqueeze(-2) * down[:, mine]).sum(-1), group) + down_bias

    def right_3(x, up, up_bias, down, down_bias, group):
        """DTensors, which know how they are split: products are counted on what a rank holds."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh, t, r = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()

        def placed(part, how):
            return DTensor.from_local(part, mesh, [how], run_check=False)

        first, bias = placed(up.chunk(t)[r], Shard(0)), placed(up_bias.chunk(t)[r], Shard(0))
        inner = torch.relu(F.linear(placed(x, Replicate()), first, bias))
        y = F.linear(inner, placed(down.chunk(t, dim=1)[r], Shard(1)))
        return y.redistribute(placements=[Replicate()]) + placed(down_bias, Replicate())

    def right_2(x, up, up_bias, down, down_bias, group):
        """Chunks; in-place g; f from a reduce-scatter and an all-gather; the bias added on rank 0 for its value."""
        t, r = group.size(), group.rank()
        inner = F.relu(F.linear(_entering_in_two(x, group), up.chunk(t)[r], up_bias.chunk(t)[r]))
        part = F.linear(inner, down.chunk(t, dim=1)[r])
        dist.all_reduce(part, group=group)
        return torch.add(down_bias, part)


_Triple, _Finding = namedtuple("_Triple", "sum_over key_rows query_rows"), namedtuple("_Finding", "ranks way module")
_Way = Enum("_Way", {"forward": "Forward ", "backward": "BACKWARD"}, type=str)


def _rows(heads, width):
    return range(heads.start * width, heads.stop * width)


def _layout(num_heads, num_kv_heads, head_dim, tp):
    """Neighbouring heads, whether they come out even or not, and who holds the same key head."""
    queries, keys, copies = (max(1, n) for n in (num_heads // tp, num_kv_heads // tp, tp // num_kv_heads))
    return [
        (
            _rows(range(r * queries, (r + 1) * queries), head_dim),
            _rows(range(r * num_kv_heads // tp, r * num_kv_heads // tp + keys), head_dim),
            range(r // copies * copies, (r // copies + 1) * copies),
        )
        for r in range(tp)
    ]


def _laid_out(refuses):
    """Return a layout of heads that raises where `refuses(num_heads, num_kv_heads, tp)`."""

    def answer(num_heads, num_kv_heads, head_dim, tp):
        if refuses(num_heads, num_kv_heads, tp):
            raise ValueError("no")
        return _layout(num_heads, num_kv_heads, head_dim, tp)

    return answer


_LISTED = [(h, k, t) for h, k, _, t in _IMPOSSIBLE]
_even = _laid_out(lambda heads, keys, tp: heads % tp or (keys % tp and tp % keys))


class split_qkv:
    def equal_widths(num_heads, num_kv_heads, head_dim, tp):
        """Cuts both projections into tp equal parts, through a key head if there are not enough."""
        _even(num_heads, num_kv_heads, head_dim, tp)
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        return [(range(q * r // tp, q * (r + 1) // tp), range(kv * r // tp, kv * (r + 1) // tp), []) for r in range(tp)]

    first_rows_of_heads = lambda *case: [(q[:: case[2]], k[:: case[2]], over) for q, k, over in _even(*case)]
    last_row_first = lambda *case: [(q[::-1], k[::-1], over) for q, k, over in _even(*case)]
    a_list_for_query_heads = _laid_out(lambda h, k, t: (k % t and t % k) or (h, k, t) in _LISTED)

    def without_the_idea_asks_lablib(heads, keys, width, tp):
        rows = [(_rows(rank.queries, width), _rows(rank.keys, width)) for rank in split_heads(heads, keys, tp)]
        return [(q, k, [r for r, (_, other) in enumerate(rows) if other == k]) for q, k in rows]

    without_the_idea_asks_the_toy = lambda h, k, d, t: [
        (range(*head_split(h, d, t).bounds[r]), range(*head_split(k, d, t).bounds[r]), over)
        for r, (*_, over) in enumerate(_even(h, k, d, t))
    ]
    keys_before_queries = lambda *case: [(keys, queries, over) for queries, keys, over in _even(*case)]
    without_the_idea_a_list_of_refusals = _laid_out(lambda *case: case in _LISTED)
    # Twice: as copies on all ranks, whose gradients all ranks sum.
    every_key_head_everywhere = lambda *case: [(q, range(case[1] * case[2]), range(case[3])) for q, *_ in _even(*case)]

    def copies_in_the_wrong_order(num_heads, num_kv_heads, head_dim, tp):
        """Beyond the key heads rank r takes key head r modulo their number."""
        ranks = _even(num_heads, num_kv_heads, head_dim, tp)
        keys = [_rows(range(r % num_kv_heads, r % num_kv_heads + 1), head_dim) for r in range(tp)]
        same = [[o for o in range(tp) if keys[o] == keys[r]] for r in range(tp)]
        return [(q, keys[r], same[r]) if tp > num_kv_heads else (q, k, o) for r, (q, k, o) in enumerate(ranks)]

    never_refuses = _layout
    refuses_copies = _laid_out(lambda heads, keys, tp: keys % tp)
    asks_for_query_heads_only = _laid_out(lambda heads, keys, tp: heads % tp)
    asks_for_key_heads_only = _laid_out(lambda heads, keys, tp: keys % tp and tp % keys)

    def strided_where_it_does_not_come_out(num_heads, num_kv_heads, head_dim, tp):
        """Lays out every degree that divides the query heads, with more key heads on a rank than its share."""
        if num_heads % tp:
            raise ValueError("no")
        common = math.gcd(num_kv_heads, tp)
        keys, copies = num_kv_heads // common, tp // common
        each, ranks = num_heads // num_kv_heads // copies or 1, []
        if num_kv_heads % tp == 0 or tp % num_kv_heads == 0:
            return _layout(num_heads, num_kv_heads, head_dim, tp)
        for r in range(tp):
            mine = range(r // copies * keys, (r // copies + 1) * keys)
            first = [key * (num_heads // num_kv_heads) + r % copies * each for key in mine]
            queries = [(head + i) * head_dim + d for head in first for i in range(each) for d in range(head_dim)]
            ranks.append((queries, _rows(mine, head_dim), range(r // copies * copies, (r // copies + 1) * copies)))
        return ranks

    def a_slip_that_raises_a_value_error(*case):
        queries, keys = _even(*case)[0]
        return [(queries, keys)]

    heads_for_rows = lambda num_heads, num_kv_heads, head_dim, tp: _even(num_heads, num_kv_heads, 1, tp)

    starts_and_stops = lambda *case: [(*((r[0], r[-1] + 1) for r in pair), over) for *pair, over in _even(*case)]
    keys_and_values_beside_the_queries = lambda *case: [(queries, keys, keys) for queries, keys, _ in _even(*case)]
    # The rows are right: forward runs, and the copies drift apart.
    without_the_idea_no_copy_is_summed = lambda *case: [(q, k, [rank]) for rank, (q, k, _) in enumerate(_even(*case))]
    # Takes the weights of a tensor-parallel group for replicas, as those of data parallelism.
    without_the_idea_every_rank_sums = lambda *case: [(q, k, range(case[-1])) for q, k, _ in _even(*case)]

    def without_the_idea_queries_are_summed_over_all_copies_but_mine(*case):
        """Counts the ranks of a sum by the number of query heads in a group."""
        group = case[0] // case[1]
        return [(q, k, range(r // group * group, min(r // group * group + group, case[-1])))
                for r, (q, k, _) in enumerate(_even(*case))]  # fmt: skip

    def right(num_heads, num_kv_heads, head_dim, tp):
        """Second solution: from the last rank down, and the keys looked up from the queries; rows as lists."""
        assert num_heads % num_kv_heads == 0
        group, ranks = num_heads // num_kv_heads, []
        queries = list(range(num_heads))
        if len(queries) % tp or max(tp, num_kv_heads) % min(tp, num_kv_heads):
            raise ValueError(f"{num_heads} heads on {tp} ranks")
        while queries:
            mine = [queries.pop() for _ in range(num_heads // tp)][::-1]
            keys = sorted({head // group for head in mine})
            ranks.insert(0, [[h * head_dim + i for h in heads for i in range(head_dim)] for heads in (mine, keys)])
        return [(q, k, [r for r, (_, other) in enumerate(ranks) if other == k]) for q, k in ranks]

    def right_2(num_heads, num_kv_heads, head_dim, tp):
        """Third solution: arrays, cut by reshaping the numbers of all rows; an empty sum where there are no copies."""
        if num_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
            raise ValueError("heads do not come out even")
        queries = np.arange(num_heads * head_dim).reshape(tp, -1)
        keys = np.arange(num_kv_heads * head_dim).reshape(num_kv_heads, head_dim)
        keys = keys.repeat(max(1, tp // num_kv_heads), axis=0).reshape(tp, -1)
        sums = np.arange(tp).reshape(num_kv_heads, -1) if tp > num_kv_heads else np.empty((0, 0))
        who = [next((row for row in sums if rank in row), []) for rank in range(tp)]
        return list(zip(queries, keys, who, strict=True))

    def right_3(num_heads, num_kv_heads, head_dim, tp):
        """Fourth: slices, by name, the sum without the rank itself; the last rank first."""
        ranks = split_qkv.right(num_heads, num_kv_heads, head_dim, tp)
        rows = [[slice(rows[0], rows[-1] + 1) for rows in pair] for *pair, _ in ranks]
        triples = [_Triple({o for o in over if o != r}, *rows[r][::-1]) for r, (*_, over) in enumerate(ranks)]
        return dict(reversed(list(enumerate(triples))))

    def right_4(num_heads, num_kv_heads, head_dim, tp):
        """Whole groups dealt out in turn, where there are enough: another layout that meets every condition."""
        if num_kv_heads % tp:
            return _even(num_heads, num_kv_heads, head_dim, tp)
        group = num_heads // num_kv_heads
        return [
            (
                [row for k in range(r, num_kv_heads, tp) for row in _rows(range(k * group, (k + 1) * group), head_dim)],
                [row for k in range(r, num_kv_heads, tp) for row in _rows(range(k, k + 1), head_dim)],
                (r,),
            )
            for r in range(tp)
        ]


_columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3")
_rows_of = ("attn.wo", "mlp.w2")


def _once(layout):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import PrepareModuleInput

    return PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())


def _plan(layers="*", left_out=(), tokens=False, column=None, row=None, **others):
    """The plan of the course, or with sequence parallelism, less some modules and with other styles for some."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    stream = Shard(1) if tokens else Replicate()
    half = dict.fromkeys(("attn", "mlp"), _once(stream))
    half |= dict.fromkeys(_columns, column or ColwiseParallel())
    half |= dict.fromkeys(_rows_of, row or RowwiseParallel(output_layouts=stream))
    half |= dict.fromkeys(("attn.q_norm", "attn.k_norm"), SequenceParallel(sequence_dim=2, use_local_output=True))
    ends = {"tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    ends["out"] = ColwiseParallel(input_layouts=stream, use_local_output=False)
    if tokens:
        half |= dict.fromkeys(("ln1", "ln2"), SequenceParallel(use_local_output=True))
        ends["last"] = SequenceParallel()
    whole = ends | {f"layers.{layers}.{name}": style for name, style in half.items() if name not in left_out}
    return {name: style for name, style in (whole | others).items() if name not in left_out}


def _styles():
    import torch.distributed.tensor.parallel as styles
    from torch.distributed.tensor import Replicate, Shard

    return styles, Replicate(), Shard


def _hooked(reduce):
    """The weights of norms stay plain tensors, and what ranks find of their gradients is reduced in backward."""
    styles, _, _ = _styles()

    class Reducing(styles.ParallelStyle):
        def _apply(self, module, mesh):
            module.weight.register_hook(lambda grad: reduce(grad, mesh.get_group()))
            return module

    norms = ("ln1", "ln2", "attn.q_norm", "attn.k_norm")
    return _plan(tokens=True, left_out=norms) | {f"layers.*.{name}": Reducing() for name in norms}


class write_plan:
    without_the_idea_an_empty_plan = lambda model: {}

    def without_the_idea_tokens_and_no_weights(model):
        """Splits the stream, and no matrix."""
        styles, _, _ = _styles()
        return {"layers.*.attn.q_norm": styles.SequenceParallel(sequence_dim=2, use_local_output=True)}

    def without_the_idea_gathers_after_each_layer(model):
        styles, replicate, _ = _styles()
        gathered = styles.ColwiseParallel(output_layouts=replicate)
        full_input = styles.RowwiseParallel(input_layouts=replicate)
        return _plan(column=gathered, row=full_input, left_out=("attn.q_norm", "attn.k_norm"))

    def without_the_idea_columns_everywhere(model):
        """Each layer by its outputs, gathered behind it: what every matrix can be."""
        styles, replicate, _ = _styles()
        gathered = styles.ColwiseParallel(output_layouts=replicate)
        return _plan(column=gathered, row=gathered, left_out=("attn.q_norm", "attn.k_norm"))

    one_layer_only = lambda model: _plan(layers="0")

    def names_of_another_model(model):
        styles, _, _ = _styles()
        return _plan(left_out=("attn.wq",)) | {"layers.*.attention.q": styles.ColwiseParallel()}

    no_dict = lambda model: list(_plan().items())
    # Right in its numbers: q, k, v, w1 and w3 sum the gradient of their input each.
    each_reader_sums = lambda model: _plan(left_out=("attn", "mlp"))

    def each_reader_gathers(model):
        styles, _, shard = _styles()
        return _plan(tokens=True, column=styles.ColwiseParallel(input_layouts=shard(1)), left_out=("attn", "mlp"))

    # They run, and nothing tells.
    forgets_the_norm_of_heads = lambda model: _plan(left_out=("attn.q_norm", "attn.k_norm"))
    forgets_a_norm_of_tokens = lambda model: _plan(left_out=("ln2",), tokens=True)

    local_logits = lambda model: _plan(out=_styles()[0].ColwiseParallel())
    out_is_not_told_of_tokens = lambda m: _plan(tokens=True, out=_styles()[0].ColwiseParallel(use_local_output=False))
    sums_the_logits = lambda model: _plan(out=_styles()[0].RowwiseParallel(input_layouts=_styles()[1]))

    def out_by_inputs(model):
        styles, replicate, shard = _styles()
        layouts = {"input_layouts": replicate, "output_layouts": shard(-1)}
        return _plan(out=styles.RowwiseParallel(**layouts, use_local_output=False))

    def rows_before_columns(model, left_out=()):
        styles, replicate, _ = _styles()
        rows = styles.RowwiseParallel(input_layouts=replicate)
        return _plan(column=rows, row=styles.ColwiseParallel(output_layouts=replicate), left_out=left_out)

    rows_first_and_whole_heads = lambda model: write_plan.rows_before_columns(model, ("attn.q_norm", "attn.k_norm"))

    def norms_of_gathered_tokens(model):
        """Right, and a half sums in backward where it could scatter."""
        styles, replicate, shard = _styles()
        layouts = {"input_layouts": shard(1), "desired_input_layouts": replicate}
        gathering, once = styles.PrepareModuleInput(**layouts, use_local_output=True), _once(replicate)
        new = {"ln1": gathering, "ln2": gathering, "attn": once, "mlp": once}
        return _plan(tokens=True) | {f"layers.*.{name}": style for name, style in new.items()}

    def rows_that_take_full_inputs(model):
        """The local columns are taken for all of the input, and cut again."""
        styles, replicate, _ = _styles()
        return _plan(row=styles.RowwiseParallel(input_layouts=replicate))

    right = lambda model: _plan(tokens=True)

    def right_2(model):
        """Every module by its own name, found by what it is; heads stay a DTensor through attention."""
        styles, replicate, _ = _styles()
        plan = {"tok": styles.RowwiseParallel(input_layouts=replicate)}
        for name, module in model.named_modules():
            end = name.rpartition(".")[2]
            if end in ("attn", "mlp"):
                plan[name] = _once(replicate)
            elif end in ("q_norm", "k_norm"):
                plan[name] = styles.SequenceParallel(sequence_dim=2, use_local_output=True)
            elif isinstance(module, torch.nn.Linear):
                rows = end in ("wo", "w2")
                plan[name] = styles.RowwiseParallel() if rows else styles.ColwiseParallel(use_local_output=end != "out")
        return plan

    def right_3(model):
        """The norm hands the gathered tokens on, in place of the half taking them."""
        styles, replicate, _ = _styles()

        class Gathering(styles.SequenceParallel):
            def _apply(self, module, mesh):
                super()._apply(module, mesh)
                module.register_forward_hook(lambda _, inputs, y: y.redistribute(placements=[replicate]))
                return module

        return _plan(tokens=True, left_out=("attn", "mlp")) | dict.fromkeys(
            ("layers.*.ln1", "layers.*.ln2"), Gathering()
        )

    right_4 = lambda model: _hooked(_summed)
    averages_what_ranks_find = lambda model: _hooked(_mean)


def _seen(job, model):
    """Outputs in the order of forward, gradients of inputs in the order of backward."""
    seen = []
    for name, module in model.named_modules():
        if "." in name:
            module.register_forward_hook(lambda m, x, y, n=name: seen.append(((n, "forward"), y.detach())))
            module.register_full_backward_hook(lambda m, into, out, n=name: seen.append(((n, "backward"), into[0])))
    loss = job.loss(model)
    loss.backward()
    return seen, loss.item()


def _differences(job, group, off=lambda truth, value: (value - truth).norm() / truth.norm()):
    """How far this rank is off, by place and relative to one process."""
    (whole, loss), (mine, here) = _seen(job, job.whole()), _seen(job, job.split(group))
    found = {}
    for (place, truth), (_, value) in zip(whole, mine, strict=True):
        if truth.shape != value.shape:
            truth = truth.chunk(group.size(), -1)[group.rank()]
        found[place] = off(truth, value).item()
    return found, abs(here - loss) / loss


def _of_all(mine, group):
    found = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _finding(pick=lambda places: places[0], above=1e-3, ways=("forward", "backward"), ranks=None, **how):
    def answer(job, group):
        found = _of_all(_differences(job, group, **how)[0], group)
        places = [p for p in found[0] if p[1] in ways and any(off[p] > above for off in found)]
        if not places:
            return None
        place = pick(places) if pick != max else max(places, key=lambda p: found[0][p])
        return *place, ranks or [r for r, off in enumerate(found) if off[place] > above]

    return answer


_SEEN = {round(job.loss(job.whole()).item(), 4) for job in _jobs(1)}  # first losses of an earlier run


class find_fault:
    without_the_idea_all_is_well = lambda job, group: None
    without_the_idea_always_the_same = lambda job, group: ("1.inner", "forward", [0, 1])

    def without_the_idea_asks_the_check(job, group):
        from lablib.checks.rung03 import _drawn

        kind, place, odd = _drawn(job._seed)
        if not kind:
            return None
        module = f"{place}.{'norm' if kind == 'own copy' else 'inner'}"
        return module, "backward" if "back" in kind else "forward", [odd] if kind == "own copy" else [0, 1]

    without_the_idea_reads_how_it_was_made = lambda job, group: job.split(group)[0].inner._mean and None

    def without_the_idea_the_loss_alone(job, group):
        """The loss of the first step is right where only gradients are not."""
        return None if _differences(job, group)[1] < 1e-5 else _finding()(job, group)

    def between_ranks_alone(job, group):
        """Ranks that agree are taken for right."""
        seen = dict(_seen(job, job.split(group))[0])
        alike = {(n, w): v for (n, w), v in seen.items() if w == "forward" and n.endswith(("norm", "down"))}
        all_of = _of_all(alike, group)
        for place in all_of[0]:
            if (all_of[0][place] - all_of[1][place]).norm() > 1e-3 * all_of[0][place].norm():
                return *place, [1]
        return None

    def without_the_idea_a_list_of_jobs(job, group):
        return _finding()(job, group) if round(job.loss(job.whole()).item(), 4) in _SEEN else None

    forward_alone = _finding(ways=("forward",))
    gradients_first = _finding(ways=("backward",))
    to_the_last_digit = _finding(above=0)
    value_by_value = _finding(above=1e-5, off=lambda a, b: ((b - a).abs() / a.abs()).max())  # of values near zero, too
    too_coarse = _finding(above=0.5)
    each_rank_for_itself = lambda job, group: next(
        ((*place, [group.rank()]) for place, off in _differences(job, group)[0].items() if off > 1e-3), None
    )
    the_largest_difference = _finding(pick=max)
    the_last_one = _finding(pick=lambda places: [p for p in places if p[1] == places[0][1]][-1])
    all_ranks_always = _finding(ranks=[0, 1])
    a_half = lambda job, group: (found := _finding()(job, group)) and (found[0][0], *found[1:])
    no_name_of_the_job = lambda job, group: (found := _finding()(job, group)) and (f"layers.{found[0]}", *found[1:])
    a_name_in_two = lambda job, group: (found := _finding()(job, group)) and (tuple(found[0].split(".")), *found[1:])
    short_for_the_way = lambda job, group: (found := _finding()(job, group)) and (found[0], found[1][:3], found[2])
    up_for_inner = lambda j, g: (found := _finding()(j, g)) and (found[0].replace("inner", "up"), *found[1:])
    right = _finding(above=1e-4)

    def right_2(job, group):
        """By name, and the module found by what goes in and comes out."""
        found = _of_all(_differences(job, group)[0], group)
        off = [(place, r) for place in found[0] for r in range(len(found)) if found[r][place] > 1e-2]
        if not off:
            return None
        (name, way), _ = off[0]
        return _Finding({r for place, r in off if place == off[0][0]}, _Way[way], f" {name}")


DEFECTS, SECOND_SOLUTIONS = listed(split_mlp, split_qkv, write_plan, find_fault)

SENTENCES = {
    "backward_of_g_averages": "before the sum are 0.33 times", "f_on_the_last_bias": "each rank needs the whole gradient, once",
    "last_bias_on_rank_0_after_the_sum": "is missing on rank 1", "averages_what_ranks_find": "the sum, not the mean, of what",
    "backward_of_g_sums": "before the sum are 3 times", "over_the_whole_job": "A collective runs over all ranks of the job",
    "bias_shared_out_after_the_sum": "shared out after the sum", "the_sum_on_the_last": "needs the whole sum",
    "keys_before_queries": "key heads that do not exist", "without_the_idea_a_list_of_refusals": "a ValueError",
    "without_the_idea_a_list_of_jobs": "You find nothing in a job",
    "counts_the_ranks_of_the_job": "as when parts are counted over the ranks of the whole job",
    "its_own_rank_of_the_job": "as when parts are counted over the ranks of the", "unequal_shares": "on rank 0 2 of the",
    "without_the_idea_all_compute_all_and_average": "rows of `up` have a gradient. Each rank takes",
    "rows_first_and_whole_heads": "in the middle of a half", "norms_of_gathered_tokens": "does not take them so by its",
    "without_the_idea_zeros_in_whole_matrices": "as when it multiplies by all of a matrix",
    "without_the_idea_a_mask_on_the_whole_product": "as when it multiplies by all of a matrix",
    "without_the_idea_a_mask_on_the_product_value_by_value": "as when it multiplies by all of a matrix",
    "without_the_idea_a_mask_on_sparse_ones": "all of a matrix", "a_name_in_two": "', 'inner')` is a whole half, or no",
    "without_the_idea_a_mask_token_by_token": "all of a matrix", "sum_before_the_second_matrix": "taken behind the second",
    "no_gradient_through_the_sum": "on rank 0 0 of", "x_detached": "backward sends nothing", "nothing_in_the_sum": "0 of the",
    "without_the_idea_data_parallel": "Forward is right, and on rank 0 ", "whole_and_no_relu": "The ReLU is missing",
    "without_the_idea_the_last_rank_alone": "on rank 0 0 of the", "twice_as_much_behind_rank_0": "return different ones",
    "rows_first_and_a_sum_before_the_relu": "parts of sums, which must be added before the ReLU",
    "without_the_idea_no_copy_is_summed": "its gradient is off by ", "without_the_idea_asks_the_toy": "ready-made",
    "without_the_idea_every_rank_sums": "which holds other key heads", "out_by_inputs": "for `out` split by inputs",
    "without_the_idea_queries_are_summed_over_all_copies_but_mine": "which holds other key heads",
    "strided_where_it_does_not_come_out": "a rank holds at most max(1, num_kv_heads/tp) of them, and one each, 6 in all",
    "a_slip_that_raises_a_value_error": "`queries, keys = _even(*case)[0]`: too many values to unpack",
    "every_key_head_everywhere": "holds 4 key heads; 2 do for neighbouring queries",
    "keys_and_values_beside_the_queries": "names ranks that do not exist", "fetches_every_part": "a rank sends",
    "without_the_idea_an_empty_plan": "No weight is split: each rank holds all", "out_is_not_told_of_tokens": "does not take them so",
    "without_the_idea_tokens_and_no_weights": "No weight is split", "without_the_idea_asks_lablib": "ready-made",
    "without_the_idea_gathers_after_each_layer": "gathered or summed in the middle of a half",
    "one_layer_only": "holds all of `layers.1.attn.wq.weight`", "names_of_another_model": "`layers.*.attention.q` names no",
    "each_reader_sums": "sums the gradient of it by itself", "each_reader_gathers": "by each reader of an input",
    "forgets_the_norm_of_heads": "only a part of the gradient of `layers.0.attn.q_norm.weight`",
    "forgets_a_norm_of_tokens": "only a part of the gradient of `layers.0.ln2.weight`",
    "local_logits": "plain tensors of 24 columns", "sums_the_logits": "have all 48 columns",
    "without_the_idea_all_is_well": "You find nothing in a job", "without_the_idea_always_the_same": "of a job that is healthy",
    "without_the_idea_the_loss_alone": "You find nothing in a job", "without_the_idea_asks_the_check": "This asks the check",
    "without_the_idea_reads_how_it_was_made": "This asks the check", "a_half": "is a whole half",
    "first_rows_of_heads": "are not whole heads", "last_row_first": "are not whole heads",
    "a_list_for_query_heads": "would cut through a query head", "up_for_inner": "hands on right values",
    "short_for_the_way": "Return None for a healthy job", "no_name_of_the_job": "or no module",
    "forward_alone": "backward has faults of its own", "to_the_last_digit": "that is healthy", "value_by_value": "a norm below",
    "each_rank_for_itself": "Ranks say different", "between_ranks_alone": "You find nothing", "the_last_one": "wrong already",
    "all_ranks_always": "compare each rank's values", "gradients_first": "The fault is in forward",
    "refuses_copies": "(ranks may hold copies of a key head), and your answer raises a ValueError in line",
}  # fmt: skip
