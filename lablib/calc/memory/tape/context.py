"""Attention under context parallelism on a tape: what PyTorch's ring or an exchange keeps, and what it holds while it runs.

`torch.distributed.tensor.experimental.context_parallel` replaces fused attention by a loop over the ranks' keys. Its
autograd keeps what fused attention keeps, of this rank's tokens: q, k, v, the output and an fp32 number a row. Two ways
to bring the keys of the others (`set_rotate_method`):

    ring        "alltoall": one message of keys and values at a time, to the next rank
    gathered    "allgather", PyTorch's default: all messages at once, which stay until the loop ends

Tokens lie in zigzag order, so that with keys of a later rank only the second half of the queries has work. Then the
output so far is cut, and put together again, in the order of heads: for the projection behind it, which reads tokens one
after the other, it is copied. That is so on all ranks but the last, which meets no keys of later ranks.

Counted is the first rank, which meets such keys only. `ring_temporaries` lists the instants of its two loops that can be
the fullest; each is a sum of tensors that Python's variables hold then.

Ulysses exchanges heads for tokens before fused attention, and back behind it. What fused attention keeps has the sizes
that it had, of fewer heads and more tokens; the output is kept a second time, as this rank's tokens.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py, `_templated_ring_attention`,
`_templated_ring_attention_backward` and `_SDPAMerger`.
"""

from __future__ import annotations

from lablib.calc.memory.tape.operators import Eager
from lablib.calc.memory.tape.setting import FP32
from lablib.calc.memory.tape.tape import Value


def context_attention(e: Eager, q: Value, k: Value, v: Value, rows: int, *, cp: int, way: str) -> Value:
    """Return attention of this rank's queries over the keys of all ranks, and its copy.

    Args:
        rows: Of scores: tokens of this rank times query heads.
        way: "ring", "gathered" or "ulysses".
    """
    if way == "ulysses":
        q, k, v = (exchanged(e, x, name) for name, x in (("q", q), ("k", k), ("v", v)))
        mixed = e.fused_attention(q, k, v, rows, e.numbers(q), kind="attention")
        return e.copy(exchanged(e, mixed, "the output"), label="attention output")
    forward, backward = ring_temporaries(e.numbers(q), e.numbers(k), rows, e.item[q], cp, way)
    mixed = e.make(
        f"{'ring' if way == 'ring' else 'gathered'} attention",
        [q, k, v],
        e.numbers(q),
        e.item[q],
        keeps=[q, k, v],
        keeps_output=True,
        extra=rows * FP32,
        temporary=forward,
        backward_temporary=backward,
        kind="attention",
        label="output of the ring",
    )
    return e.copy(mixed, label="attention output")


def exchanged(e: Eager, x: Value, name: str) -> Value:
    """Return as many numbers of other ranks' tokens or heads: what is sent and what arrives are there beside it."""
    how = {"temporary": 2 * x.bytes, "backward_temporary": 2 * x.bytes, "label": f"exchanged {name}"}
    return e.make(f"exchange of {name}", [x], e.numbers(x), e.item[x], **how)


def ring_temporaries(queries: int, keys: int, rows: int, value: int, cp: int, way: str) -> tuple[int, int]:
    """Return the bytes that the first rank's forward and backward hold beside what they keep and return.

    Args:
        queries: Numbers of q; its output and its gradient have as many.
        keys: Numbers of k, or of v, of this rank.
        value: Bytes of a number.
    """
    ring = way == "ring"
    full, part = FP32 * queries, value * queries  # an output in fp32, and as the kernel made it
    message, gradients, statistics = 2 * value * keys, 2 * FP32 * keys, FP32 * rows
    low = value < FP32  # else a block's output in fp32 is the kernel's own
    forward = [
        # Merging: the output so far, joined anew, and twice a half of it; the messages at work and under way.
        3 * full + low * part // 2 + 2 * statistics + (min(2, cp - 1) if ring else cp) * message,
        # Sending the first time: copies of keys and values one behind the other, the message made of them, what arrives.
        (3 if ring else cp + 2) * message,
    ]
    if cp > 2:  # the second time: the output so far, and the block's
        forward.append(full + low * part + statistics + (4 if ring else cp + 2) * message)
    if cp > 3:  # and later: the block's was half of the queries
        forward.append(full + part // 2 + 3 * statistics // 2 + (4 if ring else cp + 1) * message)
    # Sums of the gradients of q, and of keys and values, which arrive, are added to and leave; the last kernel's for half of q.
    sums = full + part // 2 + statistics // 2 + 3 * gradients + (min(3, cp) if ring else cp + 1) * message
    backward = [
        sums + part + 2 * message,  # the kernel runs, and what it made before is still there
        sums + full + message,  # the gradient of q is joined anew
    ]
    if cp > 2 and not ring:  # a message is made that nobody reads: all have been gathered
        backward.append(full + part + 3 * gradients + (cp + 4) * message)
    return max(forward) - part - statistics, max(backward) - part - message


def own_ring(e: Eager, q: Value, k: Value, v: Value, heads: int, tokens: int, *, cp: int) -> Value:
    """Return attention in the ring of `lablib.toys.context_parallel`: keeps q, k, v, its output and log-sum-exps in fp32.

    Its blocks are products written out, so that scores of half of a rank's tokens with half of another's are there
    several times, in fp32.

    Args:
        heads: Sequences times query heads.
        tokens: Of a sequence on this rank.
    """
    low, numbers, rows = e.item[q] < FP32, e.numbers(q), heads * tokens
    forward, backward = own_temporaries(numbers, e.numbers(k), rows, heads, tokens, e.item[q], cp)
    return e.make(
        "ring attention",
        [q, k, v],
        numbers,
        e.item[q],
        keeps=[q, k, v],
        keeps_output=not low,  # else it is cast from the one that is kept
        extra=(numbers * low + rows) * FP32,
        temporary=forward,
        backward_temporary=backward,
        kind="attention",
        label="attention output",
    )


def own_temporaries(
    queries: int, keys: int, rows: int, heads: int, tokens: int, value: int, cp: int
) -> tuple[int, int]:
    """Return the bytes that forward and backward of this course's ring hold beside what they keep and return.

    Source: `lablib.toys.context_parallel.ring` and `softmax`.
    """
    full, statistics, message = FP32 * queries, FP32 * rows, 2 * value * keys
    scores = FP32 * heads * (tokens // 2) ** 2  # of a block
    mask = tokens**2
    low = value < FP32
    forward = [
        # A block at work, with the output so far, what the last block was merged from, and their log-sum-exps.
        2 * full + 5 * statistics // 2 + 3 * scores,  # weights are made of scores
        3 * full + 5 * statistics // 2 + 2 * scores,  # they meet the values, copied for every query head
        7 * full // 2 + 7 * statistics // 2,  # the block is merged
    ]
    if cp > 2:  # the next message leaves
        forward.append(2 * full + 2 * statistics + message)
    arriving = 2 * message + mask
    kept = full + statistics + (value * queries if low else 0)
    # In flight: gradients of own keys, sums that leave and arrive, those of this block, and pieces, in fp32.
    flight = (24 if cp == 2 else 40) * keys + (1 if cp < 4 else 2) * message + mask
    casts = full if low else 0  # of half of q and of half of the gradient
    backward = [
        7 * full // 2 + casts + flight + statistics // 2 + 3 * scores,
        3 * full // 2 + casts + flight - FP32 * keys + statistics // 2 + 4 * scores,
        3 * full // 2 + (44 if cp == 2 else 52) * keys + min(cp - 2, 2) * message + mask,
    ]
    return max(forward) + arriving - kept, max(backward) - value * (queries + 2 * keys)
