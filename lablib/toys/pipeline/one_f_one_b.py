"""1F1B in one function, to be read from top to bottom: warm-up, steady state, cool-down.

A rank has one stage. It runs as many forwards as ranks come after it, then one forward and one backward in turn,
then the backwards that are left. Two ranks, four micro-batches:

    rank 0    F0 F1    B0 F2 B1 F3 B2    B3
    rank 1       F0 B0 F1 B1 F2 B2 F3 B3

`lablib.toys.pipeline.executor` runs any schedule, several stages a rank and tied weights, and refuses more that is wrong;
a test holds both equal. With NCCL let the whole group meet in a collective first: `batch_isend_irecv` asks for that.

Paper: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.toys import transformer
from lablib.toys.pipeline.stages import Stage


def step_1f1b(
    stage: Stage,  # of this rank: rank 0 has the embedding, the last rank has the head
    microbatches: Sequence[Tensor],  # windows tokens_BT, the same on every rank, of one length T = S + 1
    group: dist.ProcessGroup | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = transformer.loss,  # (logits_BSV, tokens_BT) -> mean loss
) -> Tensor | None:
    """Add the gradients of the batch's mean loss to `.grad`; return the loss on the last rank, None on the others."""
    rank, num_stages, num_microbatches = dist.get_rank(group), dist.get_world_size(group), len(microbatches)
    previous = rank - 1 if rank > 0 else None
    following = rank + 1 if rank < num_stages - 1 else None
    if rank < 0:
        raise ValueError("this rank is not in the group of the pipeline")
    if (
        not microbatches
        or len({tokens_BT.shape[1] for tokens_BT in microbatches}) > 1
        or not all(map(len, microbatches))
    ):
        raise ValueError("a batch is one micro-batch or more, none of them empty, all of one length")
    if stage.config.tied and num_stages > 1:
        raise ValueError("the first and the last stage share a weight; use PipelineExecutor, which sums its gradients")
    windows = sum(len(tokens_BT) for tokens_BT in microbatches)
    in_flight: deque[tuple[Tensor, Tensor]] = deque()  # (x, y) from forward to backward: at most num_stages - rank
    losses: list[Tensor] = []

    def forward(k: int, received_BSH: Tensor | None) -> Tensor:
        tokens_BT = microbatches[k]
        # What came from another rank is a leaf: backward leaves the gradient that this rank sends back in x.grad.
        x = tokens_BT[:, :-1] if received_BSH is None else received_BSH.requires_grad_()  # (B, S) or (B, S, H)
        y = stage(x)  # (B, S, H); logits (B, S, V) on the last rank
        if following is None:
            # Weighted by its windows: micro-batches may differ in size, and gradients add up to those of the mean.
            y = loss(y, tokens_BT) * (len(tokens_BT) / windows)
            losses.append(y.detach())
        in_flight.append((x, y))
        return y.detach()

    def backward(received_BSH: Tensor | None) -> Tensor | None:
        x, y = in_flight.popleft()  # first in, first out: gradients come back in the order of the forwards
        y.backward(received_BSH)  # on the last rank y is the loss, whose gradient is 1
        return x.grad  # (B, S, H); None on rank 0, whose tokens have no gradient

    def exchange(peer: int | None, *, send: Tensor | None = None, receive: int | None = None) -> Tensor | None:
        """Send a tensor to a rank and receive what it sends of a micro-batch, at the same time."""
        if peer is None:  # before the first stage and after the last there is nobody
            return None
        operations, buffer = [], None
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send.contiguous(), group=group, group_peer=peer))
        if receive is not None:
            batch, length = microbatches[receive].shape
            like = next(stage.parameters())  # messages have the dtype of the weights, so a stage needs some
            buffer = torch.empty(batch, length - 1, stage.config.hidden, dtype=like.dtype, device=like.device)
            operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
        # Posted together: if one rank sends its activations while its neighbour sends it a gradient, and each waits
        # for its send to end before it receives, both wait for ever.
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return buffer

    num_warmup = min(num_stages - 1 - rank, num_microbatches)
    num_steady = num_microbatches - num_warmup

    for k in range(num_warmup):  # warm-up: forwards alone
        x_BSH = exchange(previous, receive=k)
        exchange(following, send=forward(k, x_BSH))

    if num_steady:
        x_BSH = exchange(previous, receive=num_warmup)
    for k in range(num_steady):  # steady state: the forward of one micro-batch, the backward of an older one
        y_BSH = forward(num_warmup + k, x_BSH)
        grad_BSH = backward(exchange(following, send=y_BSH, receive=k))
        is_last = k == num_steady - 1
        x_BSH = exchange(previous, send=grad_BSH, receive=None if is_last else num_warmup + k + 1)

    for k in range(num_steady, num_microbatches):  # cool-down: backwards alone
        exchange(previous, send=backward(exchange(following, receive=k)))

    return torch.stack(losses).sum() if losses else None
