"""Where the magnitudes of gradients lie, power of two by power of two, and which of them fp16 would lose."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lablib.calc.formats import FORMATS


@dataclass(frozen=True)
class Histogram:
    """Where the magnitudes of a tensor lie.

    Attributes:
        exponents: How many values have `floor(log2 |x|)` equal to the key.
        zeros: How many are zero.
        odd: How many are infinite or NaN.
    """

    exponents: Counter[int]
    zeros: int
    odd: int = 0

    @property
    def count(self) -> int:
        """All values."""
        return self.exponents.total() + self.zeros + self.odd

    @property
    def zero_share(self) -> float:
        """Share of the values that are zero."""
        return self.zeros / self.count

    def below(self, exponent: int) -> int:
        """Return how many values are smaller than `2^exponent`, zeros not counted."""
        return sum(count for power, count in self.exponents.items() if power < exponent)


def histogram(x: Tensor) -> Histogram:
    """Return the histogram of a tensor's magnitudes, one bin for each power of two.

    Args:
        x: Any float tensor; it is read in fp64, where the subnormals of all others are normal.
    """
    full = x.detach().double().flatten()
    finite = full[full.isfinite()]
    exponents = torch.frexp(finite[finite != 0]).exponent - 1
    powers, counts = exponents.unique(return_counts=True)
    return Histogram(
        Counter(dict(zip(powers.tolist(), counts.tolist(), strict=True))),
        int((finite == 0).sum()),
        full.numel() - finite.numel(),
    )


def gradient_histograms(model: nn.Module) -> dict[str, Histogram]:
    """Return a histogram of every gradient that a model has, by the name of its parameter."""
    return {name: histogram(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def lost_to_fp16(gradients: dict[str, Histogram]) -> dict[str, float]:
    """Return, for fp32 gradients, which share of each tensor rounds to zero in fp16.

    It is a forecast: an fp16 backward also rounds what lies between the loss and the gradient, and a tensor behind
    one that became zero is zero too.

    Args:
        gradients: Histograms of fp32 gradients.
    """
    # Half of the smallest subnormal, 2^-25, rounds to zero: a tie, and zero is the even neighbour.
    half = math.frexp(FORMATS["fp16"].min_subnormal)[1] - 2
    return {name: (h.below(half) + h.zeros) / h.count for name, h in gradients.items()}
