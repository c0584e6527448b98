"""Worked exercises of rung 03, tensor parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


def enter_columns(x, group):
    """f: x itself; backward sums its gradient over the ranks."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            total = (
                grad.clone()
            )  # the path around the layer may still need grad
            dist.all_reduce(total, group=group)
            return total

    return Enter.apply(x)


def leave_rows(part, group):
    """g: the sum of the parts; backward hands its gradient to each part."""

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part):
            total = part.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(part)


def split_mlp(x, up, up_bias, down, down_bias, group):
    """Columns of the first matrix, rows of the second; the last bias last."""
    width = len(up) // group.size()
    mine = slice(group.rank() * width, (group.rank() + 1) * width)
    inner = torch.relu(
        F.linear(enter_columns(x, group), up[mine], up_bias[mine])
    )
    return leave_rows(F.linear(inner, down[:, mine]), group) + down_bias


def split_qkv(num_heads, num_kv_heads, head_dim, tp):
    """Whole query heads in order, the key heads they read, and who sums."""
    if num_heads % tp:
        raise ValueError(f"tp={tp} does not divide num_heads={num_heads}")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(
            f"tp={tp} and num_kv_heads={num_kv_heads} do not come out even"
        )
    queries = num_heads // tp
    keys = max(1, num_kv_heads // tp)
    copies = max(1, tp // num_kv_heads)
    ranks = []
    for rank in range(tp):
        q, k = rank * queries, rank * num_kv_heads // tp
        first = rank // copies * copies  # neighbours hold the same key head
        ranks.append(
            (
                range(q * head_dim, (q + queries) * head_dim),
                range(k * head_dim, (k + keys) * head_dim),
                range(first, first + copies),
            )
        )
    return ranks


def write_plan(model):
    """Columns, then rows, in each half; what every rank holds is placed."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    # A half takes its input once: q, k and v, or w1 and w3, share it.
    once = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )
    # A norm of heads sees this rank's heads: (batch, tokens, heads, width).
    of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    half = {
        **dict.fromkeys(("attn", "mlp"), once),
        **dict.fromkeys(("attn.wq", "attn.wk", "attn.wv"), columns),
        **dict.fromkeys(("attn.q_norm", "attn.k_norm"), of_heads),
        **dict.fromkeys(("mlp.w1", "mlp.w3"), columns),
        **dict.fromkeys(("attn.wo", "mlp.w2"), rows),
    }
    return {
        "tok": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(use_local_output=False),
        **{f"layers.*.{name}": style for name, style in half.items()},
    }


def find_fault(job, group):
    """The first module that gets right values and hands on wrong ones."""
    whole, mine = (
        watch(job, model) for model in (job.whole(), job.split(group))
    )
    off = []
    for (place, truth), (_, here) in zip(whole, mine, strict=True):
        if truth.shape != here.shape:  # this rank's part of the last dim
            truth = truth.chunk(group.size(), dim=-1)[group.rank()]
        if (here - truth).norm() > 1e-3 * truth.norm():
            off.append(place)
    of_all = [None] * group.size()
    dist.all_gather_object(of_all, off, group=group)
    for place, _ in whole:
        ranks = [r for r, theirs in enumerate(of_all) if place in theirs]
        if ranks:
            return *place, ranks
    return None


def watch(job, model):
    """Outputs in the order of forward, then gradients of inputs."""
    seen = []

    def hook(name):
        def forward(module, inputs, y):
            seen.append(((name, "forward"), y.detach()))

        def backward(module, into, out):
            seen.append(((name, "backward"), into[0]))

        return forward, backward

    for name, module in model.named_modules():
        if not list(module.children()):
            forward, backward = hook(name)
            module.register_forward_hook(forward)
            module.register_full_backward_hook(backward)
    job.loss(model).backward()
    return seen
