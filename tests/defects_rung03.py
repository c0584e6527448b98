"""Planted defects of rung 03: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lablib.toys.tensor_parallel import copy_to_tp, reduce_from_tp
from tests.planted import listed


def _mine(size, group):
    width = size // group.size()
    return slice(group.rank() * width, (group.rank() + 1) * width)


class column_parallel:
    def forgets_f(x, weight, bias, group):
        mine = _mine(len(weight), group)
        return F.linear(x, weight[mine], bias[mine])

    def f_twice(x, weight, bias, group):
        mine = _mine(len(weight), group)
        return F.linear(copy_to_tp(copy_to_tp(x, group), group), weight[mine], bias[mine])

    def g_in_place_of_f(x, weight, bias, group):
        """The input is the same on all ranks; summed it is t times too long."""
        mine = _mine(len(weight), group)
        return F.linear(reduce_from_tp(x, group), weight[mine], bias[mine])

    def splits_the_input(x, weight, bias, group):
        mine = _mine(x.shape[-1], group)
        return F.linear(x[..., mine], weight[:, mine], bias)

    def shares_the_bias(x, weight, bias, group):
        mine = _mine(len(weight), group)
        return F.linear(copy_to_tp(x, group), weight[mine], bias[mine] / group.size())

    splits_nothing = lambda x, weight, bias, group: F.linear(x, weight, bias)

    def right(x, weight, bias, group):
        """Second solution: no f, a hook sums the gradient of a view of x."""

        def summed(grad):
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad

        entering = x.view_as(x)
        entering.register_hook(summed)
        return F.linear(entering, weight.chunk(group.size())[group.rank()], bias.chunk(group.size())[group.rank()])


class row_parallel:
    def bias_in_every_part(x_part, weight, bias, group):
        return reduce_from_tp(F.linear(x_part, weight[:, _mine(weight.shape[1], group)], bias), group)

    def forgets_g(x_part, weight, bias, group):
        return F.linear(x_part, weight[:, _mine(weight.shape[1], group)], bias)

    def backward_sums_again(x_part, weight, bias, group):
        part = F.linear(x_part, weight[:, _mine(weight.shape[1], group)])
        return copy_to_tp(reduce_from_tp(part, group), group) + bias

    def averages(x_part, weight, bias, group):
        part = F.linear(x_part, weight[:, _mine(weight.shape[1], group)])
        return reduce_from_tp(part, group) / group.size() + bias

    def bias_on_rank_0(x_part, weight, bias, group):
        """The sum is right, and only one rank's bias has a gradient."""
        share = bias if group.rank() == 0 else torch.zeros_like(bias)
        return reduce_from_tp(F.linear(x_part, weight[:, _mine(weight.shape[1], group)], share), group)

    def loses_the_bias(x_part, weight, bias, group):
        return reduce_from_tp(F.linear(x_part, weight[:, _mine(weight.shape[1], group)]), group) + 0 * bias

    def the_first_rows_for_all(x_part, weight, bias, group):
        return reduce_from_tp(F.linear(x_part, weight[:, : x_part.shape[-1]]), group) + bias

    def right(x_part, weight, bias, group):
        """Second solution: the other ranks' parts are a constant for autograd."""
        part = x_part @ weight.chunk(group.size(), dim=1)[group.rank()].T
        total = part.detach().clone()
        dist.all_reduce(total, group=group)
        return part + (total - part.detach()) + bias


def _rows(heads, width):
    return range(heads.start * width, heads.stop * width)


def _refuse(num_heads, num_kv_heads, tp):
    if num_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
        raise ValueError("no")


class split_qkv:
    def equal_widths(num_heads, num_kv_heads, head_dim, tp):
        """Cuts both projections into tp equal parts, through a key head if there are not enough."""
        _refuse(num_heads, num_kv_heads, tp)
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        return [(range(q * r // tp, q * (r + 1) // tp), range(kv * r // tp, kv * (r + 1) // tp)) for r in range(tp)]

    def every_key_head_everywhere(num_heads, num_kv_heads, head_dim, tp):
        _refuse(num_heads, num_kv_heads, tp)
        each = num_heads // tp * head_dim
        return [(range(r * each, (r + 1) * each), range(num_kv_heads * head_dim)) for r in range(tp)]

    def copies_in_the_wrong_order(num_heads, num_kv_heads, head_dim, tp):
        """Beyond the key heads rank r takes key head r modulo their number."""
        _refuse(num_heads, num_kv_heads, tp)
        each, keys = num_heads // tp, max(1, num_kv_heads // tp)
        ranks = []
        for r in range(tp):
            first = r * keys if tp <= num_kv_heads else r % num_kv_heads
            ranks.append(
                (_rows(range(r * each, (r + 1) * each), head_dim), _rows(range(first, first + keys), head_dim))
            )
        return ranks

    def never_refuses(num_heads, num_kv_heads, head_dim, tp):
        queries, keys = max(1, num_heads // tp), max(1, num_kv_heads // tp)
        return [
            (
                _rows(range(r * queries, (r + 1) * queries), head_dim),
                _rows(range(r * num_kv_heads // tp, r * num_kv_heads // tp + keys), head_dim),
            )
            for r in range(tp)
        ]

    def refuses_copies(num_heads, num_kv_heads, head_dim, tp):
        if num_kv_heads % tp:
            raise ValueError("no")
        return split_qkv.never_refuses(num_heads, num_kv_heads, head_dim, tp)

    def forgets_the_head_width(num_heads, num_kv_heads, head_dim, tp):
        _refuse(num_heads, num_kv_heads, tp)
        return split_qkv.never_refuses(num_heads, num_kv_heads, 1, tp)

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
            ranks.insert(0, tuple([h * head_dim + i for h in heads for i in range(head_dim)] for heads in (mine, keys)))
        return ranks


def _pieces(logits, targets, first, highest):
    shifted = logits - highest.unsqueeze(-1)
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    column = (targets - first).where(mine, 0)
    return shifted, shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * mine


def _highest(logits, group):
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


class cross_entropy:
    def own_words_only(logits, targets, first, group):
        """The ordinary softmax of each rank's part; the target's owner tells the others."""
        inner, target = _pieces(logits, targets, first, logits.detach().amax(-1))
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        return reduce_from_tp((inner.exp().sum(-1).log() - target) * mine, group)

    def no_maximum(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, torch.zeros_like(logits[:, 0]))
        return reduce_from_tp(shifted.exp().sum(-1), group).log() - reduce_from_tp(target, group)

    def a_maximum_for_each_rank(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, logits.detach().amax(-1))
        return reduce_from_tp(shifted.exp().sum(-1), group).log() - reduce_from_tp(target, group)

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

    def keeps_the_target_to_itself(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, _highest(logits, group))
        return reduce_from_tp(shifted.exp().sum(-1), group).log() - target

    def backward_sums_the_losses(logits, targets, first, group):
        shifted, target = _pieces(logits, targets, first, _highest(logits, group))
        total = copy_to_tp(reduce_from_tp(shifted.exp().sum(-1), group), group)
        return total.log() - copy_to_tp(reduce_from_tp(target, group), group)

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


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, softmax, loss):
        ctx.save_for_backward(softmax)
        return loss

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad.unsqueeze(-1), None, None


DEFECTS, SECOND_SOLUTIONS = listed(column_parallel, row_parallel, split_qkv, cross_entropy)
