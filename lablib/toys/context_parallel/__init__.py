"""Context parallelism: a sequence cut over ranks, three ways for its attention, and all that changes around it.

    softmax     attention in pieces, merged by log-sum-exps
    split       who holds which tokens, which keys a query may see
    ring        keys and values travel from rank to rank
    gathered    one all-gather of keys and values (Llama 3)
    ulysses     an all-to-all swaps tokens for heads
    model       the transformer: positions, labels, mask, mean and gradients
    failures    what happens if one of these is forgotten

Read `softmax` first, then `ring`, beside chapter 12.
"""

from lablib.calc.parallel import ORDERS
from lablib.toys.context_parallel.failures import forgetful
from lablib.toys.context_parallel.gathered import gathered_attention
from lablib.toys.context_parallel.model import IGNORED, WAYS, ContextParallelTransformer, average_gradients, next_tokens
from lablib.toys.context_parallel.ring import ring_attention
from lablib.toys.context_parallel.softmax import Partial, attend, attend_backward, merge
from lablib.toys.context_parallel.split import chunks_of, needed_blocks, shard, token_positions, unshard, visible
from lablib.toys.context_parallel.ulysses import swap, ulysses_attention

__all__ = [
    "IGNORED",
    "ORDERS",
    "WAYS",
    "ContextParallelTransformer",
    "Partial",
    "attend",
    "attend_backward",
    "average_gradients",
    "chunks_of",
    "forgetful",
    "gathered_attention",
    "merge",
    "needed_blocks",
    "next_tokens",
    "ring_attention",
    "shard",
    "swap",
    "token_positions",
    "ulysses_attention",
    "unshard",
    "visible",
]
