"""Ring attention: queries stay, keys and values travel from rank to rank, and each rank merges what it has seen.

    step           0      1      2      3         keys and values that a rank has, cp = 4
    rank 0         0      3      2      1
    rank 1         1      0      3      2         in step i, rank r holds those of rank r - i
    rank 2         2      1      0      3
    rank 3         3      2      1      0

A block of which a causal or document mask leaves nothing is not computed, but its keys travel on, since a later rank
may need them. The next keys are on their way while a rank computes.

Backward sends keys and values round once more. The gradients of a block's keys are a sum over all ranks; the sum
follows the block: each rank adds its term and passes it on, and the last one passes it home. The term of a block's own
rank never leaves, so there are cp - 1 messages of gradients too. (PyTorch's ring starts the sum at home, and needs cp.)

Messages sent by a rank: cp - 1 forward and 2 (cp - 1) backward, each of 2·B·K·s·D values, s = S / cp.

Paper: Liu et al. 2023, Ring Attention (2310.01889), section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.toys.context_parallel.softmax import Partial, attend, attend_backward, merge, nothing_seen, wide
from lablib.toys.context_parallel.split import (
    check_parts,
    needed_blocks,
    num_chunks,
    size_and_rank,
    token_positions,
    visible,
)


def ring_attention(
    q_BNsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    *,
    order: str = "zigzag",
    causal: bool = True,
    documents: Tensor | None = None,
) -> Tensor:
    """Return attention of this rank's queries over the keys of all ranks, out_BNsD. Every rank must call it.

    Args:
        q_BNsD: Queries of this rank's tokens, those of `token_positions`, already rotated.
        group: The context parallel ranks. Any number, since heads are not split.
        causal: Whether a query sees only tokens at or before its position.
        documents: The number of the document of every token of the *full* sequence, (S,) or (B, S), the same on every
            rank; a query sees only its own document.
    """
    check_parts(q_BNsD, k_BKsD, v_BKsD, group, order, documents)
    return _Ring.apply(q_BNsD, k_BKsD, v_BKsD, _Masks(q_BNsD.shape[2], group, order, causal, documents))


class _Masks:
    """Who may see what between the tokens of this rank and those of another."""

    def __init__(
        self, tokens: int, group: dist.ProcessGroup, order: str, causal: bool, documents: Tensor | None
    ) -> None:
        self.cp, self.rank = size_and_rank(group)
        self.seq, self.group, self.order = tokens * self.cp, group, order
        self.causal, self.documents = causal, documents

    def blocks(self, source: int, device: torch.device) -> list[tuple[slice, slice, Tensor]]:
        """Return what to compute with another rank's keys: (queries, keys, mask) of every block that is needed."""
        mine, theirs = (token_positions(self.seq, self.cp, r, self.order, device) for r in (self.rank, source))
        mask = visible(mine, theirs, self.causal, self.documents)
        needed = needed_blocks(mask, num_chunks(self.order, self.cp))
        return [(rows, cols, mask[..., rows, cols]) for rows, cols in needed]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q_BNsD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, masks: _Masks) -> Tensor:
        cp, rank = masks.cp, masks.rank
        seen = nothing_seen(q_BNsD)
        kv = torch.stack((k_BKsD, v_BKsD))  # one message
        for step in range(cp):
            coming = RingExchange(kv, masks.group) if step < cp - 1 else None
            k, v = kv
            for rows, cols, mask in masks.blocks((rank - step) % cp, kv.device):
                piece = attend(q_BNsD[:, :, rows], k[:, :, cols], v[:, :, cols], mask)
                both = merge(Partial(seen.out_BNsD[:, :, rows], seen.lse_BNs[:, :, rows]), piece)
                seen.out_BNsD[:, :, rows], seen.lse_BNs[:, :, rows] = both
            if coming:
                kv = coming.wait()
        ctx.masks = masks
        ctx.save_for_backward(q_BNsD, k_BKsD, v_BKsD, *seen)
        return seen.out_BNsD.to(q_BNsD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BNsD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BNsD, k_BKsD, v_BKsD, out_BNsD, lse_BNs = ctx.saved_tensors
        masks = ctx.masks
        cp, rank = masks.cp, masks.rank
        grad_q = torch.zeros_like(q_BNsD, dtype=wide(q_BNsD))
        kv = torch.stack((k_BKsD, v_BKsD))
        own = sums = None
        for step in range(cp):
            coming = RingExchange(kv, masks.group) if step < cp - 1 else None
            grad_kv = torch.zeros_like(kv, dtype=grad_q.dtype)
            k, v = kv
            for rows, cols, mask in masks.blocks((rank - step) % cp, kv.device):
                whole = Partial(out_BNsD[:, :, rows], lse_BNs[:, :, rows])
                grads = attend_backward(
                    q_BNsD[:, :, rows], k[:, :, cols], v[:, :, cols], mask, whole, grad_BNsD[:, :, rows]
                )
                grad_q[:, :, rows] += grads[0]
                grad_kv[:, :, :, cols] += torch.stack(grads[1:])
            if step == 0:
                own = grad_kv
            else:
                # What arrives is the sum, so far, for the block just used. After the last step it goes home, since
                # that block is the next rank's.
                sums = RingExchange(grad_kv if sums is None else grad_kv + sums.wait(), masks.group)
            if coming:
                kv = coming.wait()
        grad_k, grad_v = (own if sums is None else own + sums.wait()).to(k_BKsD.dtype)
        return grad_q.to(q_BNsD.dtype), grad_k, grad_v, None


class RingExchange:
    """A tensor on its way to the next rank, while the rank before sends one of the same shape.

    Both run beside what is computed until `wait`.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        cp, rank = size_and_rank(group)
        self.sent, self.received = tensor, torch.empty_like(tensor)  # `sent` must live until it has left
        # Started together: if all ranks sent first, none would receive.
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, group_peer=(rank + 1) % cp),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - 1) % cp),
            ]
        )

    def wait(self) -> Tensor:
        """Return what the rank before has sent, once both messages are through."""
        for work in self.works:
            work.wait()
        return self.received
