"""Planted defects of rung 03: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

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


def _in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def copy_to_tp(x, group):
    """f, written here: what ranks must load for it would take longer than the check."""
    return _Around.apply(x, group, _same, _summed)


def reduce_from_tp(x, group):
    """g, written here."""
    return _Around.apply(x, group, _summed, _same)


class enter_columns:
    def the_functions_of_the_course(x, group):
        from lablib.toys.tensor_parallel import copy_to_tp as of_the_course

        return of_the_course(x, group)

    forgets_backward = lambda x, group: x.view_as(x)
    # The gradient of the sum x + layer(x) is one tensor, which both paths read.
    changes_what_it_is_given = lambda x, group: _Around.apply(x, group, _same, _in_place)
    sums_twice = lambda x, group: copy_to_tp(copy_to_tp(x, group), group)
    averages = lambda x, group: _Around.apply(x, group, _same, lambda grad, g: _summed(grad, g) / g.size())
    sums_forward_too = lambda x, group: _Around.apply(x, group, _summed, _summed)
    g_in_place_of_f = lambda x, group: reduce_from_tp(x, group)
    over_the_whole_job = lambda x, group: _Around.apply(x, group, _same, _summed_everywhere)

    # Right, for more bytes than a sum takes.
    gathers_all_gradients = lambda x, group: _Around.apply(x, group, _same, lambda z, g: sum(_pieces_of_all(z, g)))

    def a_hook_on_x_itself(x, group):
        """Sums the path around the layer too."""
        x.register_hook(lambda grad: _summed(grad, group))
        return x * 1

    def right(x, group):
        """No Function: a hook on a view of x."""
        entering = x.view_as(x)
        entering.register_hook(lambda grad: _summed(grad, group))
        return entering

    def right_2(x, group):
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


class leave_rows:
    forgets_the_sum = lambda part, group: part * 1.0
    backward_sums_again = lambda part, group: _Around.apply(part, group, _summed, _summed)
    averages = lambda part, group: reduce_from_tp(part, group) / group.size()
    divides_the_gradient = lambda part, group: _Around.apply(part, group, _summed, lambda grad, g: grad / g.size())

    def sum_on_rank_0(part, group):
        def forward(x, g):
            total = x.clone()
            dist.reduce(total, group_dst=0, group=g)
            return total if g.rank() == 0 else x.clone()

        return _Around.apply(part, group, forward, _same)

    def fetches_every_part(part, group):
        """Right, for more bytes than a sum takes."""
        others = [p for r, p in enumerate(_pieces_of_all(part.detach(), group)) if r != group.rank()]
        return part + sum(others)

    loses_autograd = lambda part, group: _summed(part, group)
    over_the_whole_job = lambda part, group: _Around.apply(part, group, _summed_everywhere, _same)
    # The other ranks' parts are a constant for autograd.
    right = lambda part, group: part + (_summed(part, group) - part.detach())

    def right_2(part, group):
        """In place: backward of the sum is nothing, so autograd need not know of it."""
        dist.all_reduce(part, group=group)
        return part


def _half(x, up, up_bias, down, down_bias, group, enter=copy_to_tp, leave=reduce_from_tp, after=True, cut=_mine):
    mine = cut(len(up), group)
    inner = torch.relu(F.linear(enter(x, group), up[mine], up_bias[mine]))
    part = F.linear(inner, down[:, mine], None if after else down_bias)
    total = leave(part, group)
    return total + down_bias if after else total


class split_mlp:
    forgets_f = lambda *case: _half(*case, enter=_same)
    forgets_g = lambda *case: _half(*case, leave=_same)
    backward_of_g_sums = lambda *case: _half(*case, leave=leave_rows.backward_sums_again)

    over_the_whole_job = lambda *case: _half(*case, leave=leave_rows.over_the_whole_job)
    counts_the_ranks_of_the_job = lambda *case: _half(*case, cut=lambda size, group: _mine(size, None))
    f_twice = lambda x, *others: _half(copy_to_tp(x, others[-1]), *others)
    bias_in_every_part = lambda *case: _half(*case, after=False)
    # The sum is right, and each rank finds a part of the bias's gradient.
    bias_shared_out = lambda *case: _half(*case[:4], case[4] / case[5].size(), case[5], after=False)

    its_own_rank_of_the_job = lambda *case: _half(
        *case, cut=lambda *_: slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    )

    def bias_on_rank_0(x, up, up_bias, down, down_bias, group):
        share = down_bias if group.rank() == 0 else torch.zeros_like(down_bias)
        return _half(x, up, up_bias, down, share, group, after=False)

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

    def without_the_idea_a_mask_on_the_whole_product(x, up, up_bias, down, down_bias, group):
        mask = torch.zeros(len(up))
        mask[_mine(len(up), group)] = 1
        inner = torch.relu(F.linear(copy_to_tp(x, group), up, up_bias)) * mask
        return reduce_from_tp(F.linear(inner, down), group) + down_bias

    def without_the_idea_a_mask_on_the_product_value_by_value(x, up, up_bias, down, down_bias, group):
        """No matrix product that a counter of those would see."""
        mask = torch.zeros(len(up))
        mask[_mine(len(up), group)] = 1
        inner = torch.relu((copy_to_tp(x, group).unsqueeze(-2) * up).sum(-1) + up_bias) * mask
        return reduce_from_tp((inner.unsqueeze(-2) * down).sum(-1), group) + down_bias

    no_gradient_through_the_sum = lambda *case: _half(*case, leave=_summed)

    def without_the_idea_data_parallel(x, up, up_bias, down, down_bias, group):
        """Rank r computes sequence r with both whole matrices."""
        mine = slice(group.rank(), group.rank() + 1)
        y = torch.zeros_like(x)
        y[mine] = F.linear(torch.relu(F.linear(copy_to_tp(x, group)[mine], up, up_bias)), down)
        return reduce_from_tp(y, group) + down_bias

    def without_the_idea_rank_0_alone(x, up, up_bias, down, down_bias, group):
        x = copy_to_tp(x, group)
        y = F.linear(torch.relu(F.linear(x, up, up_bias)), down) if group.rank() == 0 else 0 * x
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
        entering = enter_columns.right(x, group)
        inner = (entering @ up[mine].T + up_bias[mine]).clamp_min(0)
        return leave_rows.right(inner @ down[:, mine].T, group) + down_bias

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
        return y.redistribute(placements=[Replicate()]).to_local() + down_bias

    def right_2(x, up, up_bias, down, down_bias, group):
        """Chunks; in-place g; f from a reduce-scatter and an all-gather; the bias added on rank 0 for its value."""
        t, r = group.size(), group.rank()
        inner = F.relu(F.linear(enter_columns.right_2(x, group), up.chunk(t)[r], up_bias.chunk(t)[r]))
        part = F.linear(inner, down.chunk(t, dim=1)[r])
        dist.all_reduce(part, group=group)
        return torch.add(down_bias, part)


def _stack(part, group):
    return torch.cat(_pieces_of_all(part, group), dim=1)


def _cut_sum(full, group):
    """This rank's tokens of the sum, along dim 1."""
    stacked = torch.cat(full.chunk(group.size(), dim=1))
    part = stacked.new_empty(len(full), full.shape[1] // group.size(), *full.shape[2:])
    reduce_scatter(part, stacked, group=group)
    return part


def _own(full, group):
    return full.chunk(group.size(), dim=1)[group.rank()].clone()


def _zeros_around(part, group):
    pieces = [torch.zeros_like(part) for _ in range(group.size())]
    pieces[group.rank()] = part
    return torch.cat(pieces, dim=1)


class gather_tokens:
    cuts_without_a_sum = lambda part, group: _Around.apply(part, group, _stack, _own)
    averages = lambda part, group: _Around.apply(part, group, _stack, lambda grad, g: _cut_sum(grad, g) / g.size())
    over_the_whole_job = lambda part, group: _Around.apply(part, group, _stack, lambda z, g: _own(_summed(z, None), g))

    def stacks_along_dim_0(part, group):
        """What the collective returns, viewed in the right shape: sequences are mixed."""

        def forward(x, g):
            full = x.new_empty(len(x), g.size() * x.shape[1], *x.shape[2:])
            all_gather(full.view(-1, *x.shape[1:]), x, group=g)
            return full

        return _Around.apply(part, group, forward, _cut_sum)

    reversed_ranks = lambda *case: _Around.apply(*case, lambda x, g: torch.cat(_pieces_of_all(x, g)[::-1], 1), _cut_sum)
    # Right, with an all-reduce where a reduce-scatter will do.
    sums_all_and_cuts = lambda part, group: _Around.apply(part, group, _stack, lambda z, g: _own(_summed(z, g), g))

    def right(part, group):
        """Zeros of this rank's own, a constant from the others, and f around both."""
        full = _stack(part.detach(), group)

        def cut(grad):
            return _zeros_around(_cut_sum(grad, group), group)

        mine = part.repeat(1, group.size(), 1) * 1.0
        held = mine - mine.detach() + full
        held.register_hook(cut)
        return held

    def right_2(part, group):
        """Backward as an all-to-all of pieces, added here."""

        def undo(grad, g):
            outgoing = [piece.contiguous() for piece in grad.chunk(g.size(), dim=1)]
            incoming = [torch.empty_like(outgoing[0]) for _ in outgoing]
            sends = [dist.isend(p, group_dst=r, group=g) for r, p in enumerate(outgoing) if r != g.rank()]
            for r, into in enumerate(incoming):
                if r != g.rank():
                    dist.recv(into, group_src=r, group=g)
            for send in sends:
                send.wait()
            incoming[g.rank()] = outgoing[g.rank()]
            return sum(incoming)

        return _Around.apply(part, group, _stack, undo)


class scatter_tokens:
    cuts_without_a_sum = lambda partial, group: _Around.apply(partial, group, _own, _stack)
    averages = lambda partial, group: _Around.apply(partial, group, lambda x, g: _cut_sum(x, g) / g.size(), _stack)

    def whole_sequences(partial, group):
        """Cuts along dim 0, where the collective cuts."""

        def forward(x, g):
            flat = _summed(x, g).flatten(0, 1)
            return flat.chunk(g.size())[g.rank()].view(len(x), -1, x.shape[-1]).clone()

        return _Around.apply(partial, group, forward, _stack)

    zeros_in_backward = lambda partial, group: _Around.apply(partial, group, _cut_sum, _zeros_around)

    backward_sums = lambda partial, group: _Around.apply(partial, group, _cut_sum, lambda z, g: _stack(z, g) * g.size())
    # Right, at twice the bytes.
    an_all_reduce_cut = lambda partial, group: _Around.apply(
        partial, group, lambda x, g: _own(_summed(x, g), g), _stack
    )

    def right(partial, group):
        """A list of pieces, and a hook that puts all gradients together."""
        pieces = [piece.detach().contiguous() for piece in partial.chunk(group.size(), dim=1)]
        total = torch.empty_like(pieces[0])
        dist.reduce_scatter(total, pieces, group=group)
        entering = partial.view_as(partial)
        entering.register_hook(lambda grad: _stack(_own(grad, group), group))
        return _own(entering, group) + (total - _own(partial.detach(), group))

    def right_2(partial, group):
        """A reduce to each rank in turn; gathered in backward."""

        def forward(x, g):
            pieces = [piece.clone() for piece in x.chunk(g.size(), dim=1)]
            for rank, piece in enumerate(pieces):
                dist.reduce(piece, group_dst=rank, group=g)
            return pieces[g.rank()]

        return _Around.apply(partial, group, forward, _stack)


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


_even = _laid_out(lambda heads, keys, tp: heads % tp or (keys % tp and tp % keys))


class split_qkv:
    def equal_widths(num_heads, num_kv_heads, head_dim, tp):
        """Cuts both projections into tp equal parts, through a key head if there are not enough."""
        _even(num_heads, num_kv_heads, head_dim, tp)
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        return [(range(q * r // tp, q * (r + 1) // tp), range(kv * r // tp, kv * (r + 1) // tp), []) for r in range(tp)]

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
        """Fourth: slices, by name, the sum without the rank itself."""
        ranks = split_qkv.right(num_heads, num_kv_heads, head_dim, tp)
        rows = [[slice(rows[0], rows[-1] + 1) for rows in pair] for *pair, _ in ranks]
        return [
            {"sum_over": {o for o in over if o != r}, "key_rows": rows[r][1], "query_rows": rows[r][0]}
            for r, (*_, over) in enumerate(ranks)
        ]

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


def _pieces(logits, targets, first, highest):
    shifted = logits - highest.unsqueeze(-1)
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    column = (targets - first).where(mine, 0)
    return shifted, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * mine


def _highest(logits, group):
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


def split_loss(logits, targets, first, group, highest=_highest, leave=reduce_from_tp):
    shifted, target = _pieces(logits, targets, first, highest(logits, group))
    return leave(shifted.exp().sum(-1), group).log() - leave(target, group)


class cross_entropy:
    def the_loss_of_the_course(logits, targets, first, group):
        from lablib.toys.tensor_parallel import vocab_parallel_cross_entropy

        return vocab_parallel_cross_entropy(logits, targets, first, group)

    def own_words_only(logits, targets, first, group):
        """The ordinary softmax of each rank's part; the target's owner tells the others."""
        inner, target = _pieces(logits, targets, first, logits.detach().amax(-1))
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        return reduce_from_tp((inner.exp().sum(-1).log() - target) * mine, group)

    over_the_whole_job = lambda *case: split_loss(*case, leave=leave_rows.over_the_whole_job)
    adds_the_logs = lambda z, targets, first, group: reduce_from_tp(
        torch.logsumexp(z, -1) - _pieces(z, targets, first, 0 * z[:, 0])[1], group
    )
    shifts_the_sum_alone = lambda *case: split_loss(*case) - _highest(case[0], case[3])
    no_maximum = lambda *case: split_loss(*case, highest=lambda logits, group: torch.zeros_like(logits[:, 0]))
    a_maximum_for_each_rank = lambda *case: split_loss(*case, highest=lambda logits, group: logits.detach().amax(-1))

    def gathers_the_logits(logits, targets, first, group):
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(sizes, torch.tensor([logits.shape[-1]]), group=group)
        widest = max(int(size) for size in sizes)
        mine = F.pad(logits.detach().T, (0, 0, 0, widest - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=group)
        pieces = [part[: int(size)].T for part, size in zip(parts, sizes, strict=True)]
        pieces[group.rank()] = logits
        return F.cross_entropy(torch.cat(pieces, dim=-1), targets, reduction="none")

    def gathers_the_logits_two_columns_at_a_time(logits, targets, first, group):
        """The same bytes in small messages."""
        widest = torch.tensor([logits.shape[-1]])
        dist.all_reduce(widest, dist.ReduceOp.MAX, group=group)
        rows = F.pad(logits.detach(), (0, int(widest) - logits.shape[-1]), value=float("-inf")).T.contiguous()
        for two in rows.split(2):
            _pieces_of_all(two, group)
        return split_loss(logits, targets, first, group)

    def keeps_the_target_to_itself(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, _highest(logits, group))
        return reduce_from_tp(shifted.exp().sum(-1), group).log() - target

    def backward_sums_the_losses(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, _highest(logits, group))
        total = copy_to_tp(reduce_from_tp(shifted.exp().sum(-1), group), group)
        return total.log() - copy_to_tp(reduce_from_tp(target, group), group)

    def gradient_through_the_maximum(*case):
        def highest(logits, group):
            own = logits.amax(-1) * 1.0
            return own + (_summed(own, group, dist.ReduceOp.MAX) - own.detach())

        return split_loss(*case, highest=highest)

    def right(logits, targets, first, group):
        """Second solution: log-sum-exp of the ranks' log-sum-exps, and the gradient written by hand."""
        z = logits.detach()
        each = torch.empty(group.size(), len(targets), dtype=z.dtype)
        own = torch.logsumexp(z, dim=-1)
        each.zero_()[group.rank()] = own
        dist.all_reduce(each, group=group)
        total = torch.logsumexp(each, dim=0)
        one_hot = targets.unsqueeze(-1) == torch.arange(first, first + z.shape[-1])
        target = (z * one_hot).sum(-1)
        dist.all_reduce(target, group=group)
        softmax = (z - total.unsqueeze(-1)).exp() - one_hot.to(z.dtype)
        return _Gradient.apply(logits, softmax, total - target)

    def right_2(logits, targets, first, group):
        """Third solution: two sums in one in-place message, which autograd need not see."""
        shifted, target = _pieces(logits, targets, first, _highest(logits, group))
        both = torch.stack((shifted.exp().sum(-1), target))
        dist.all_reduce(both, group=group)
        return both[0].log() - both[1]


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, softmax, loss):
        ctx.save_for_backward(softmax)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad.unsqueeze(-1), None, None


DEFECTS, SECOND_SOLUTIONS = listed(
    enter_columns, leave_rows, split_mlp, gather_tokens, scatter_tokens, split_qkv, cross_entropy
)

SENTENCES = {
    "over_the_whole_job": "A collective runs over all ranks of the job",
    "counts_the_ranks_of_the_job": "The part is counted over the ranks of the whole job",
    "its_own_rank_of_the_job": "The part is counted over the ranks of the whole job",
    "shifts_the_sum_alone": "The target's logit is not shifted",
    "adds_the_logs": "The ranks' logs are added",
    "without_the_idea_all_compute_all_and_average": "12 of the 12 rows of `up` have a gradient. Each rank takes 4",
    "without_the_idea_a_mask_on_the_whole_product": "Take the part before the product, not after it",
    "without_the_idea_a_mask_on_the_product_value_by_value": "Take the part before the product, not after it",
    "no_gradient_through_the_sum": "no gradient gets through the sum",
    "the_functions_of_the_course": "the course's own function",
    "the_loss_of_the_course": "the course's own function",
    "without_the_idea_data_parallel": "Right, and no tensor parallelism: on rank 0",
    "without_the_idea_rank_0_alone": "on rank 0 12 of the 12 rows of `up` have a gradient",
    "rows_first_and_a_sum_before_the_relu": "parts of sums, which must be added before the ReLU",
    "gathers_the_logits_two_columns_at_a_time": "The logits themselves cross the wire",
    "without_the_idea_no_copy_is_summed": "its gradient is off by ",
    "without_the_idea_every_rank_sums": "which holds other key heads",
    "without_the_idea_queries_are_summed_over_all_copies_but_mine": "which holds other key heads",
    "strided_where_it_does_not_come_out": "a rank holds at most max(1, num_kv_heads/tp) of them, and one each, 6 in all",
    "a_slip_that_raises_a_value_error": "`queries, keys = _even(*case)[0]`: too many values to unpack",
    "every_key_head_everywhere": "holds 4 key heads; 2 do for neighbouring queries",
    "keys_and_values_beside_the_queries": "names ranks that do not exist",
    "refuses_copies": "(ranks may hold copies of a key head), and your answer raises a ValueError in line",
}
