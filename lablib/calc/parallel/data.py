"""What unequal shares of a batch weigh, buckets of gradients, and how much of their communication backward hides.

Backward makes gradients in reverse registration order. A bucket's all-reduce starts when its last gradient is there and
the link has sent the bucket before it. Times are seconds, `bandwidth` bytes per second and direction, `sizes` the bytes of
each gradient in registration order, `buckets` indices into them in the order of sending. Chapter 02.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.communication import check_link, ring_all_reduce_time
from lablib.calc.errors import check_whole, one_of

#: Ways to deal the samples of a batch to data-parallel ranks.
SAMPLERS = ("contiguous", "interleaved")


def token_factor(tokens: Sequence[int]) -> float:
    """Return what a rank multiplies the sum of its tokens' losses by, n / Σ_r T_r, if DDP takes the mean over ranks.

    Every token then weighs as much as in one process, however unequally the ranks hold them.
    """
    if not tokens or min(tokens) < 0 or not sum(tokens):
        raise ValueError(f"tokens={list(tokens)} must be a number for each rank, none negative and one above 0")
    return len(tokens) / sum(tokens)


def rank_samples(dp: int, rank: int, *, micro_batch: int, rounds: int, sampler: str) -> list[range]:
    """Return the samples of a global batch that a data-parallel rank reads, for each of its micro-batches.

    A round takes the next `dp * micro_batch` samples. "contiguous": each rank a run of them, as Megatron-LM does by default
    (0.19.2, megatron/training/datasets/data_samplers.py, MegatronPretrainingSampler). "interleaved": each rank every
    dp-th, as PyTorch's DistributedSampler does (2.13.0, torch/utils/data/distributed.py); so does Hugging Face's
    split_dataset_by_node, which torchtitan calls, with a stream of files whose number dp does not divide. Else it gives
    each rank files or a part of its own, and a batch has no common numbers.

    Args:
        rank: Its position in dp; ranks of tp, cp and pp at this position read the same.
    """
    one_of("sampler", sampler, SAMPLERS)
    for name, size in (("dp", dp), ("micro_batch", micro_batch), ("rounds", rounds)):
        check_whole(name, size, 1)
    check_whole("rank", rank, 0, dp - 1)
    taken = dp * micro_batch
    if sampler == "contiguous":
        firsts = range(rank * micro_batch, taken * rounds, taken)
        return [range(first, first + micro_batch) for first in firsts]
    return [range(first + rank, first + taken, dp) for first in range(0, taken * rounds, taken)]


@dataclass(frozen=True)
class Transfer:
    """One bucket on its way. Times are in seconds from the start of backward.

    Attributes:
        ready: When its last gradient is there.
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
        first: Limit of the first bucket in bytes; small, so that it leaves early.
        cap: Limit of every other bucket in bytes.

    Returns:
        The buckets in the order of sending, each a list of indices into `sizes`.
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
        overlap: Send during backward; otherwise the first bucket waits for the end of backward.
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
    """Return the seconds of communication after backward has ended: what the step waits for."""
    return max([transfer.end for transfer in transfers], default=backward) - backward


@dataclass(frozen=True)
class DDPStep:
    """Where the time of one DDP step goes; all in seconds.

    Attributes:
        communication: How long the link is busy with gradients.
        exposed: The part of it after backward, which the step waits for.
        ideal_exposed: The same if the gradient could leave in pieces of any size: max(0, communication - backward).
    """

    compute: float
    communication: float
    hidden: float
    exposed: float
    ideal_exposed: float
    step: float


def ddp_step_time(
    *,
    compute_forward: float,
    compute_backward: float,
    gradient_bytes: float,
    ranks: int,
    bandwidth: float,
    latency: float = 0.0,
    buckets: int | Sequence[float] = 1,
    overlap: bool = True,
    micro_batches: int = 1,
    optimizer: float = 0.0,
) -> DDPStep:
    """Return the step time of DDP: the buckets leave one after the other while backward still runs.

    With m equal buckets and no latency the exposed time is max(T_comm/m, T_comm - (m-1)/m · T_backward).

    Args:
        compute_forward: Seconds of one micro-batch; `compute_backward` likewise.
        buckets: How many of equal size, or the bytes of each in the order of sending.
        overlap: False sends nothing before the end of backward.
        micro_batches: Accumulated in each step; all but the last inside `no_sync`.
    """
    check_link(
        ranks,
        compute_forward=compute_forward,
        compute_backward=compute_backward,
        gradient_bytes=gradient_bytes,
        optimizer=optimizer,
    )
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be at least 1")
    if isinstance(buckets, int):
        if buckets < 1:
            raise ValueError(f"buckets={buckets} must be at least 1")
        buckets = [gradient_bytes / buckets] * buckets
    if abs(sum(buckets) - gradient_bytes) > 1e-9 * gradient_bytes:
        raise ValueError(f"the buckets hold {sum(buckets):g} bytes, but gradient_bytes={gradient_bytes:g}")
    # A list of buckets in the order of sending is a list of gradients, registered the other way round.
    transfers = backward_transfers(
        list(reversed(buckets)),
        [[index] for index in reversed(range(len(buckets)))],
        backward=compute_backward,
        ranks=ranks,
        bandwidth=bandwidth,
        latency=latency,
        overlap=overlap,
    )
    communication = sum(transfer.end - transfer.start for transfer in transfers)
    exposed = exposed_time(transfers, backward=compute_backward)
    compute = micro_batches * (compute_forward + compute_backward) + optimizer
    return DDPStep(
        compute=compute,
        communication=communication,
        hidden=communication - exposed,
        exposed=exposed,
        ideal_exposed=max(0.0, communication - compute_backward),
        step=compute + exposed,
    )
