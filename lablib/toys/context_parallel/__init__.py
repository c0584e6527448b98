"""Context parallelism: a sequence cut over ranks, three ways for its attention, and all that changes around it.

    split      who holds which tokens, which keys a query may see
    softmax    attention in pieces, merged by log-sum-exps
    ring       keys and values travel

Read `softmax` and `ring` first, beside chapter 12.
"""

from lablib.toys.context_parallel.ring import ring_attention
from lablib.toys.context_parallel.softmax import Partial, attend, attend_backward, merge
from lablib.toys.context_parallel.split import (
    ORDERS,
    chunks_of,
    needed_blocks,
    shard,
    token_positions,
    unshard,
    visible,
)

__all__ = [
    "ORDERS",
    "Partial",
    "attend",
    "attend_backward",
    "chunks_of",
    "merge",
    "needed_blocks",
    "ring_attention",
    "shard",
    "token_positions",
    "unshard",
    "visible",
]
