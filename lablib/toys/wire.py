"""Send and receive between the ranks of a group, counted: what the collectives are built from.

`exchange` is one step: it sends to one rank while it receives from another. Posting the receive first lets the
other side's data land where it belongs; sending and receiving one after the other would be a deadlock when two
ranks do it in the same order.

Chapter: book/10_communication.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lablib.calc.collective_costs import Traffic, chunk_sizes


class Message(NamedTuple):
    """What is sent or received.

    Attributes:
        tensor: Contiguous.
        peer: The rank in the group that it comes from or goes to.
    """

    tensor: Tensor
    peer: int


class Wire:
    """The messages of one collective on one rank.

    Args:
        group: The process group; None is all ranks.

    Attributes:
        rank: This rank's number in the group.
        size: n, the ranks in the group.
        batched: Whether messages that start together go to the backend as one call, as NCCL needs it.

    Raises:
        ValueError: If this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group; call only on the group's ranks")
        self.batched = "nccl" in dist.get_backend(group)
        self._steps = self._messages = self._bytes = 0
        self._leaving: dict[int, list[tuple[dist.Work, Tensor]]] = {}  # by the address of what is sent

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far, and in how many steps."""
        return Traffic(self._steps, self._messages, self._bytes)

    def count_steps(self, steps: int) -> None:
        """Note that the algorithm goes through so many rounds."""
        self._steps += steps

    def start(self, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> list[dist.Work]:
        """Let messages leave and make ready for others, without waiting. Empty tensors are left out.

        Args:
            sends: Tensors to send; they must not change before `sent` or `finish`.
            receives: Tensors to receive into.

        Returns:
            What to wait for before a received tensor may be read: one piece of work for each that is not empty.
        """
        sends, receives = ([m for m in messages if m.tensor.numel()] for messages in (sends, receives))
        self._messages += len(sends)
        self._bytes += sum(message.tensor.nbytes for message in sends)
        start = self._start_batch if self.batched else self._start_each
        arriving, leaving = start(sends, receives)
        for work, message in zip(leaving, sends, strict=True):
            self._leaving.setdefault(message.tensor.data_ptr(), []).append((work, message.tensor))
        return arriving

    def _start_each(self, sends: list[Message], receives: list[Message]) -> tuple[list, list]:
        arriving = [dist.irecv(t, group=self.group, group_src=peer) for t, peer in receives]
        return arriving, [dist.isend(t, group=self.group, group_dst=peer) for t, peer in sends]

    def _start_batch(self, sends: list[Message], receives: list[Message]) -> tuple[list, list]:
        todo = [(dist.irecv, message) for message in receives] + [(dist.isend, message) for message in sends]
        ops = [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, (t, peer) in todo]
        works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) == len(ops):
            return works[: len(receives)], works[len(receives) :]
        return works * len(receives), works * len(sends)  # NCCL: one piece of work for all

    def sent(self, tensor: Tensor) -> None:
        """Wait until what was sent from the memory where a tensor begins has arrived, so that it may change."""
        for work, _ in self._leaving.pop(tensor.data_ptr(), ()):
            work.wait()

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        receive: Tensor | None = None,
        source: int | None = None,
    ) -> None:
        """Take one step: send one tensor, receive another, and wait for both. Either may be missing.

        Args:
            send: What to send, contiguous.
            to: The rank in the group that gets it.
            receive: What to receive into, contiguous.
            source: The rank in the group that it comes from.
        """
        sends = [] if send is None else [Message(send, to)]
        receives = [] if receive is None else [Message(receive, source)]
        for work in self.start(sends, receives):
            work.wait()
        self.finish()
        self._steps += 1

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for messages in self._leaving.values():
            for work, _ in messages:
                work.wait()
        self._leaving.clear()


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as one row of numbers that shares its memory, apart from autograd.

    Args:
        tensor: Any shape.

    Raises:
        ValueError: If it is not contiguous, so that a row would be a copy.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass t.contiguous()")
    return tensor.detach().view(-1)


def chunks(row: Tensor, parts: int) -> list[Tensor]:
    """Cut a row into views as equal as can be, the larger ones first; some are empty if it is short.

    Args:
        row: One dimension.
        parts: Number of chunks.
    """
    return list(row.split(chunk_sizes(row.numel(), parts)))


def same_size(tensor: Tensor, other: Tensor, name: str, what: str) -> None:
    """Refuse a tensor that another one does not fit into.

    Args:
        tensor: What the caller gave.
        other: What it must be like.
        name: How the caller knows it.
        what: What the other one is.

    Raises:
        ValueError: If they differ in elements, dtype or device.
    """
    for fact in ("numel", "dtype", "device"):
        mine, theirs = (t.numel() if fact == "numel" else getattr(t, fact) for t in (tensor, other))
        if mine != theirs:
            raise ValueError(f"{name} has {fact} {mine}, but {what} has {theirs}")
