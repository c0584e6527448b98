"""Ring reduce-scatter, all-gather and all-reduce from send and receive.

n ranks stand in a ring and the array is cut into n chunks, some of them empty if it is short. In every step each
rank sends one chunk to its right neighbour while it receives one from its left. Where n does not divide the array, the
bytes below are means over the ranks.

    reduce-scatter   the chunk that arrives is added to this rank's own, and the sum goes on: n - 1 steps
    all-gather       the chunk that arrives is kept, and goes on as it is: n - 1 steps
    all-reduce       one after the other

Paper: Patarasuk and Yuan 2009.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.communication import Traffic, chunk_sizes


def ring_reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Add the inputs of all ranks up and leave chunk r of the sum on rank r: (n-1)/n · S bytes sent.

    Args:
        output: This rank's chunk, `input.numel() / n` elements; where that is no whole number, it is rounded, up on
            the first ranks.
        input: The unsharded array; not changed, unless `output` lies in it.
    """
    wire, own = Wire(group), flat(output)
    pieces = chunks(flat(input).clone(), wire.size)  # where the sums grow
    same_size(output, pieces[wire.rank], "output", f"chunk {wire.rank} of input")
    _reduce_scatter(wire, pieces)
    own.copy_(pieces[wire.rank])
    return wire.traffic


def ring_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Put the inputs of all ranks one after the other on every rank: (n-1)/n · S bytes sent.

    Args:
        input: This rank's chunk of `output`, cut as in `ring_reduce_scatter`; may be the view of it.
    """
    wire = Wire(group)
    pieces = chunks(flat(output), wire.size)
    same_size(input, pieces[wire.rank], "input", f"chunk {wire.rank} of output")
    pieces[wire.rank].copy_(flat(input))
    _all_gather(wire, pieces)
    return wire.traffic


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks: 2(n-1)/n · S bytes sent, 2(n-1) steps."""
    wire = Wire(group)
    pieces = chunks(flat(tensor), wire.size)
    _reduce_scatter(wire, pieces)
    _all_gather(wire, pieces)
    return wire.traffic


def _reduce_scatter(wire: Wire, pieces: list[Tensor]) -> None:
    """In step k chunk r - 1 - k mod n leaves rank r, and r - 2 - k arrives and is added: the last one is chunk r."""
    n, r = wire.size, wire.rank
    theirs = torch.empty_like(pieces[0])  # chunk 0 is as long as any
    for step in range(n - 1):
        leaving, growing = pieces[(r - 1 - step) % n], pieces[(r - 2 - step) % n]
        arriving = theirs[: growing.numel()]
        wire.exchange(send=leaving, to=(r + 1) % n, receive=arriving, source=(r - 1) % n)
        growing += arriving


def _all_gather(wire: Wire, pieces: list[Tensor]) -> None:
    """In step k chunk r - k mod n leaves rank r, and r - 1 - k arrives where it belongs."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        leaving, arriving = pieces[(r - step) % n], pieces[(r - 1 - step) % n]
        wire.exchange(send=leaving, to=(r + 1) % n, receive=arriving, source=(r - 1) % n)


# --- send and receive, counted: what all collectives here are built from --------------------------------------------


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

        Both start together. One after the other they may be a deadlock when all ranks send first.
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
