"""What an all-reduce in 16 bits loses: the error of a sum over ranks, measured and derived.

A ring adds one rank after the other, and a 16-bit ring rounds after every addition. With fp32 sums the only rounding
is the last one, of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.ring import summation_orders


@dataclass(frozen=True)
class SumError:
    """The error of one sum over ranks, relative: `rms(result - exact) / rms(exact)`.

    Attributes:
        ranks: n.
        reduced: Summed in the low precision.
        full: Summed in fp32 and rounded once at the end.
        expected_reduced: What `expected_error` says for it.
        expected_full: And for the other.
    """

    ranks: int
    reduced: float
    full: float
    expected_reduced: float
    expected_full: float


def ring_sum(values: list[Tensor], *, full: bool = False) -> Tensor:
    """Return the sum of one tensor from each rank as a ring computes it: chunk by chunk, one rank after the other.

    Args:
        values: From every rank, 1-D, all of one dtype; that dtype holds the running sum.
        full: Whether the running sum is fp32, rounded at the end.
    """
    orders = summation_orders(len(values))
    chunks = []
    for chunk, order in enumerate(orders):
        parts = [values[rank].tensor_split(len(orders))[chunk] for rank in order]
        total = parts[0].float() if full else parts[0]
        for part in parts[1:]:
            total = total + part
        chunks.append(total.to(parts[0].dtype))
    return torch.cat(chunks)


def rounding_noise(dtype: torch.dtype) -> float:
    """Return the relative root mean square error of rounding one number.

    The error is even over a gap g, so its mean square is g²/12. A gap is `eps` times the power of two below the number,
    and where the logarithm of numbers is even over a binade, `E[(2^e/x)²] = 3 / (8 ln 2)`:

        noise = eps * sqrt(1/12) * sqrt(3 / (8 ln 2))

    Args:
        dtype: A float dtype.
    """
    return torch.finfo(dtype).eps * math.sqrt(3 / (8 * math.log(2)) / 12)


def expected_error(ranks: int, dtype: torch.dtype, *, full: bool = False, same_sign: bool = False) -> float:
    """Return the relative error that a ring's sum should have.

    Each of n - 1 additions rounds a running sum. Of k numbers with random signs it has the size sqrt(k), so the squares
    of the errors add up to `noise² * (2 + 3 + ... + n)`, against a result of size sqrt(n). Where all numbers have one
    sign, as with a mean far from zero, the running sum has the size k and the result n:

        random signs   noise * sqrt((n + 1)/2 - 1/n)
        one sign       noise * sqrt((2² + 3² + ... + n²) / n²)      ~ noise * sqrt(n/3)
        fp32 sums      noise

    Args:
        ranks: n.
        dtype: Of the running sum.
        full: Whether the sum is fp32, rounded at the end.
        same_sign: Whether all numbers have one sign.
    """
    if ranks == 1:
        return 0.0  # nothing is added, and so nothing is rounded
    sizes = [k * k if same_sign else k for k in range(2, ranks + 1)]
    growth = 1.0 if full else math.sqrt(sum(sizes) / (ranks * ranks if same_sign else ranks))
    return rounding_noise(dtype) * growth


def rank_values(
    ranks: int, *, size: int, dtype: torch.dtype, seed: int = 0, mean: float = 0.0
) -> list[Tensor]:
    """Return a tensor of random numbers for every rank; a rank has the same whatever the number of ranks.

    Args:
        ranks: n.
        size: Values in each.
        dtype: Of the values.
        seed: Of the draw.
        mean: Of the values, whose deviation is 1.
    """
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        made.append((torch.randn(size, generator=generator) + mean).to(dtype))
    return made


def allreduce_error(
    world_sizes: tuple[int, ...] = (2, 4, 8, 16, 64),
    dtype: torch.dtype = torch.bfloat16,
    *,
    size: int = 1 << 14,
    seed: int = 0,
    mean: float = 0.0,
) -> list[SumError]:
    """Return the error of an all-reduce for several numbers of ranks, summed as a ring sums.

    Args:
        world_sizes: Numbers of ranks, each at least 2.
        dtype: The low precision.
        size: Values that are summed.
        seed: Of the values.
        mean: Of the values, whose deviation is 1; from about 4 on they have one sign.

    Raises:
        ValueError: If a number of ranks is below 2.
    """
    if min(world_sizes) < 2:
        raise ValueError(f"world_sizes={world_sizes}: a sum over ranks needs at least 2 of them")
    errors = []
    for ranks in world_sizes:
        values = rank_values(ranks, size=size, dtype=dtype, seed=seed, mean=mean)
        exact = torch.stack(values).double().sum(0)
        found = [relative_error(ring_sum(values, full=full), exact) for full in (False, True)]
        expected = [expected_error(ranks, dtype, full=f, same_sign=mean >= 4) for f in (False, True)]
        errors.append(SumError(ranks, *found, *expected))
    return errors


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return `rms(x - exact) / rms(exact)`."""
    return ((x.double() - exact).square().mean() / exact.double().square().mean()).sqrt().item()


def gloo_error(
    dtype: torch.dtype = torch.bfloat16, *, size: int = 1 << 14, seed: int = 0, mean: float = 0.0
) -> SumError:
    """Return the error of a real all-reduce between the ranks of this job; call it through `run_ranks`.

    The ranks sum the same numbers as `allreduce_error` with the same seed, once in the low precision and once in fp32.
    The backend chooses the order of the additions, so its error is near the ring's and not equal to it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = rank_values(ranks, size=size, dtype=dtype, seed=seed, mean=mean)
    exact = torch.stack(values).double().sum(0)
    reduced, full = values[rank].clone(), values[rank].float()
    dist.all_reduce(reduced)
    dist.all_reduce(full)
    found = (relative_error(reduced, exact), relative_error(full.to(dtype), exact))
    expected = (expected_error(ranks, dtype, full=f, same_sign=mean >= 4) for f in (False, True))
    return SumError(ranks, *found, *expected)
