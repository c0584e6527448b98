"""Send and receive between the ranks of a group, counted: what the collectives are built from."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lablib.calc.communication import Traffic, chunk_sizes


class Wire:
    """The messages of one collective on one rank.

    Attributes:
        rank: This rank's number in the group.
        size: n, the ranks in the group.
        traffic: What this rank has sent so far, and in how many steps.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group; call only on the group's ranks")
        self.traffic = Traffic(0, 0, 0)

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        receive: Tensor | None = None,
        source: int | None = None,
    ) -> None:
        """Take one step: send one tensor, receive another, and wait for both. Either may be missing or empty.

        Both start together. One after the other they would be a deadlock when all ranks send first, and NCCL needs
        them in one call.
        """
        ops, messages, sent = [], 0, 0
        if receive is not None and receive.numel():
            ops.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        if send is not None and send.numel():
            ops.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
            messages, sent = 1, send.nbytes
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        self.traffic += Traffic(1, messages, sent)


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as one row of numbers that shares its memory, apart from autograd."""
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass t.contiguous()")
    return tensor.detach().view(-1)


def chunks(row: Tensor, parts: int) -> list[Tensor]:
    """Cut a row into views as equal as can be, the larger ones first; some are empty if it is short."""
    return list(row.split(chunk_sizes(row.numel(), parts)))


def same_size(tensor: Tensor, other: Tensor, name: str, what: str) -> None:
    """Refuse a tensor that does not fit into another one, by the names that the caller knows them by."""
    for fact in ("numel", "dtype", "device"):
        mine, theirs = (t.numel() if fact == "numel" else getattr(t, fact) for t in (tensor, other))
        if mine != theirs:
            raise ValueError(f"{name} has {fact} {mine}, but {what} has {theirs}")
