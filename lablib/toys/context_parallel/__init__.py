"""Context parallelism: a sequence cut over ranks, three ways for its attention, and all that changes around it.

    softmax         attention in pieces, merged by log-sum-exps
    split           who holds which tokens, which keys a query may see
    ring            keys and values travel from rank to rank
    gathered        one all-gather of keys and values (Llama 3)
    ulysses         an all-to-all swaps tokens for heads
    cp_transformer  positions, labels, mask, mean and gradients; what happens if one of these is forgotten

Read `softmax` first, then `ring`, beside chapter 12.
"""

from lablib.calc.parallel import ORDERS
from lablib.toys.context_parallel.cp_transformer import (
    IGNORED,
    WAYS,
    ContextParallelTransformer,
    average_gradients,
    forgetful,
    next_tokens,
)
from lablib.toys.context_parallel.gathered import gathered_attention
from lablib.toys.context_parallel.ring import ring_attention
from lablib.toys.context_parallel.softmax import attend, merge
from lablib.toys.context_parallel.split import needed_blocks, num_chunks, shard, token_positions, unshard, visible
from lablib.toys.context_parallel.ulysses import swap, ulysses_attention

__all__ = [
    "IGNORED",
    "ORDERS",
    "WAYS",
    "ContextParallelTransformer",
    "attend",
    "average_gradients",
    "forgetful",
    "gathered_attention",
    "merge",
    "needed_blocks",
    "next_tokens",
    "num_chunks",
    "ring_attention",
    "shard",
    "swap",
    "token_positions",
    "ulysses_attention",
    "unshard",
    "visible",
]
