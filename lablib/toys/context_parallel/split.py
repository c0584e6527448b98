"""Who holds which tokens of a sequence, and which keys a query may see.

A sequence of 8 tokens on 2 ranks, in the three orders:

    order         rank 0     rank 1
    contiguous    0 1 2 3    4 5 6 7
    zigzag        0 1 6 7    2 3 4 5    2·cp chunks, one from each end
    striped       0 2 4 6    1 3 5 7    token i on rank i mod cp

Whatever the order, a token keeps its position: masks, rotary angles and learned positions ask for `token_positions`.

    S  tokens of the full sequence    s  tokens of one rank, S / cp    B  sequences

Papers: Striped Attention (2311.09431), section 3; Llama 3 (2407.21783), section 3.3.2, for the chunks from both ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.errors import one_of
from lablib.calc.parallel import ORDERS
from lablib.toys import torch_names as collective_names


def num_chunks(order: str, cp: int) -> int:
    """Return into how many chunks a rank cuts its tokens, to skip those that a mask hides: 2 of a zigzag, else 1."""
    return 2 if one_of("order", order, ORDERS) == "zigzag" and cp > 1 else 1


def check_split(seq: int, cp: int, order: str) -> None:
    """Raise a ValueError unless every rank gets equally many tokens in whole chunks."""
    parts = cp * num_chunks(order, cp)
    if seq % parts:
        what = f"2·cp={parts} chunks (cp={cp})" if parts != cp else f"cp={cp} parts"
        raise ValueError(
            f"order={order!r} cuts a sequence into {what}, which do not divide seq={seq}; pad it to "
            f"{seq + -seq % parts}"
        )


def size_and_rank(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return cp, the ranks of a group, and this rank's number among them."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; call only on the group's ranks")
    return dist.get_world_size(group), rank


def token_positions(seq: int, cp: int, rank: int, order: str = "zigzag", device: torch.device | None = None) -> Tensor:
    """Return the positions in the full sequence of the tokens that a rank holds, in the order in which it holds them.

    Args:
        seq: S, of the full sequence: a multiple of cp, and of 2·cp for a zigzag.
        rank: In the context parallel group, 0 to cp - 1.
        order: "contiguous", "zigzag" or "striped".

    Returns:
        Integers of shape (s,).
    """
    check_split(seq, cp, order)
    if not 0 <= rank < cp:
        raise ValueError(f"rank={rank} is not one of cp={cp} ranks; use 0 to {cp - 1}")
    position_S = torch.arange(seq, device=device)
    if order == "zigzag" and cp > 1:
        chunks = position_S.chunk(2 * cp)
        return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))
    return position_S[rank::cp] if order == "striped" else position_S.chunk(cp)[rank]


def all_positions(seq: int, cp: int, order: str, device: torch.device | None = None) -> Tensor:
    """Return the positions of all tokens, shape (S,), as they lie when the parts are put together in rank order."""
    return torch.cat([token_positions(seq, cp, rank, order, device) for rank in range(cp)])


def shard(x: Tensor, dim: int, group: dist.ProcessGroup, order: str = "zigzag") -> Tensor:
    """Return this rank's tokens of a tensor that every rank has in full. Nothing is sent.

    Args:
        dim: Of the sequence.
    """
    return x.index_select(dim, token_positions(x.shape[dim], *size_and_rank(group), order, x.device))


@torch.no_grad()
def unshard(x: Tensor, dim: int, group: dist.ProcessGroup, order: str = "zigzag") -> Tensor:
    """Return the full tensor, in the order of its tokens, from every rank's part; apart from autograd.

    Args:
        dim: Of the sequence; it has the same size on every rank.
    """
    cp, _ = size_and_rank(group)
    seq = x.shape[dim] * cp
    check_split(seq, cp, order)
    part = x.movedim(dim, 0).contiguous()
    parts = part.new_empty(seq, *part.shape[1:])
    collective_names.all_gather(parts, part, group=group)
    # argsort of the positions: where in `parts` the token of each position lies.
    return parts[all_positions(seq, cp, order, x.device).argsort()].movedim(0, dim)


def visible(query_s: Tensor, key_S: Tensor, causal: bool = True, documents_BS: Tensor | None = None) -> Tensor:
    """Return which keys each query may see: those not after it, in the same document.

    Args:
        query_s: Positions of the queries in the full sequence.
        key_S: Positions of the keys.
        documents_BS: The number of the document of every token of the full sequence, (S,) or (B, S).

    Returns:
        A mask of shape (1 or B, 1, queries, keys), True where a query may look.
    """
    mask = query_s[:, None] >= key_S if causal else query_s.new_ones(len(query_s), len(key_S), dtype=torch.bool)
    mask = mask[None]
    if documents_BS is not None:
        documents_BS = torch.atleast_2d(documents_BS)
        mask = mask & (documents_BS[:, query_s, None] == documents_BS[:, None, key_S])
    return mask[:, None]


def needed_blocks(mask: Tensor, chunks: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks (queries, keys) of two ranks' parts in which a query sees a key; the others are skipped.

    Of a zigzag both parts are two chunks, so there are four blocks; under a causal mask, two of them are needed if
    the parts are of different ranks, and three if of the same.

    Args:
        mask: From `visible`, of queries and keys that are equally many.
        chunks: From `num_chunks`.
    """
    size = mask.shape[-1] // chunks
    slices = [slice(i * size, (i + 1) * size) for i in range(chunks)]
    for queries in slices:
        for keys in slices:
            if mask[..., queries, keys].any():
                yield queries, keys


def check_parts(
    q_BNsD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, group: dist.ProcessGroup, order: str, documents: Tensor | None
) -> None:
    """Raise a ValueError for parts that make no sequence, before anything is sent."""
    cp, _ = size_and_rank(group)
    shapes = f"q has shape {tuple(q_BNsD.shape)}, k {tuple(k_BKsD.shape)}, v {tuple(v_BKsD.shape)}"
    if q_BNsD.dim() != 4 or k_BKsD.dim() != 4 or k_BKsD.shape != v_BKsD.shape:
        raise ValueError(f"{shapes}: they must be (B, N, s, D), (B, K, s, D) and (B, K, s, D)")
    (batch, heads, tokens, width), kv_heads = q_BNsD.shape, k_BKsD.shape[1]
    if k_BKsD.shape != (batch, kv_heads, tokens, width):
        raise ValueError(f"{shapes}: all need the same sequences, tokens and head width")
    if not len({q_BNsD.dtype, k_BKsD.dtype, v_BKsD.dtype}) == 1:
        raise ValueError(f"q, k and v must have one dtype, not {q_BNsD.dtype}, {k_BKsD.dtype} and {v_BKsD.dtype}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} does not divide num_heads={heads}: each serves equally many queries")
    seq = tokens * cp
    check_split(seq, cp, order)
    if documents is not None and tuple(documents.shape) not in {(seq,), (1, seq), (batch, seq)}:
        raise ValueError(
            f"documents has shape {tuple(documents.shape)}, but {tokens} tokens on each of cp={cp} ranks are "
            f"a sequence of {seq}: pass the documents of the full sequence, ({seq},) or ({batch}, {seq})"
        )
