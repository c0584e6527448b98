"""Buckets of gradients, and how much of their communication backward hides.

Backward makes gradients in reverse registration order. A bucket's all-reduce may start when its last
gradient is there and when the link has sent the bucket before it:

    start_k = max(ready_k, end_{k-1}),   end_k = start_k + T_allreduce(bucket k),   exposed = end_last - backward

Chapter: book/02_data_parallelism.md. Paper: Li et al. 2020, PyTorch Distributed (2006.15704), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.comm import ring_all_reduce_time


@dataclass(frozen=True)
class Transfer:
    """One bucket on its way. Times are in seconds from the start of backward.

    Attributes:
        bucket: Its number, in the order of sending.
        bytes: What it holds.
        ready: When its last gradient is there.
        start: When its all-reduce starts.
        end: When its all-reduce is done.
    """

    bucket: int
    bytes: int
    ready: float
    start: float
    end: float


def bucket_sizes(sizes: Sequence[int], *, first: int = 2**20, cap: int = 25 * 2**20) -> list[list[int]]:
    """Put gradients into buckets: from the last to the first, closing a bucket once it holds its limit.

    Args:
        sizes: Bytes of each gradient, in the order in which the parameters were registered.
        first: Limit of the first bucket in bytes; small, so that it leaves early.
        cap: Limit of every other bucket in bytes.

    Returns:
        The buckets in the order of sending, each a list of indices into `sizes`.

    Raises:
        ValueError: If a size is negative or a limit is not positive.
    """
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative, and the smallest is {min(sizes)}")
    if first <= 0 or cap <= 0:
        raise ValueError(f"first={first} and cap={cap} must be positive numbers of bytes")
    buckets: list[list[int]] = []
    held, limit = 0, 0
    for index in reversed(range(len(sizes))):
        if held >= limit:  # true at the start too: both are 0
            limit, held = (cap if buckets else first), 0
            buckets.append([])
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def backward_transfers(
    sizes: Sequence[int],
    buckets: Sequence[Sequence[int]],
    *,
    backward: float,
    ranks: int,
    bandwidth: float,
    latency: float = 0.0,
    overlap: bool = True,
) -> list[Transfer]:
    """Return when each bucket is ready, starts and ends, if a gradient takes backward time as its bytes.

    Args:
        sizes: Bytes of each gradient, in registration order.
        buckets: Indices into `sizes`, in the order of sending, as `bucket_sizes` returns them.
        backward: Seconds of the whole backward pass.
        ranks: Number of ranks.
        bandwidth: Bytes per second, per direction.
        latency: Seconds per message.
        overlap: Send during backward; otherwise the first bucket waits for the end of backward.

    Raises:
        ValueError: If the buckets do not hold every gradient exactly once, or a time is negative.
    """
    if sorted(index for bucket in buckets for index in bucket) != list(range(len(sizes))):
        raise ValueError(f"the buckets must hold each of the {len(sizes)} gradients exactly once")
    if backward < 0:
        raise ValueError(f"backward={backward} must not be negative")
    total = sum(sizes)
    ready_at, done = [0.0] * len(sizes), 0
    for index in reversed(range(len(sizes))):
        done += sizes[index]
        ready_at[index] = backward * done / total if total else backward
    transfers: list[Transfer] = []
    free = 0.0 if overlap else backward
    for number, bucket in enumerate(buckets):
        size = sum(sizes[index] for index in bucket)
        ready = max(ready_at[index] for index in bucket)
        start = max(ready, free)
        free = start + ring_all_reduce_time(size, ranks, bandwidth=bandwidth, latency=latency)
        transfers.append(Transfer(number, size, ready, start, free))
    return transfers


def exposed_time(transfers: Sequence[Transfer], *, backward: float) -> float:
    """Return the seconds of communication after backward has ended: what the step waits for.

    Args:
        transfers: As `backward_transfers` returns them.
        backward: Seconds of the whole backward pass.
    """
    return max([transfer.end for transfer in transfers], default=backward) - backward
