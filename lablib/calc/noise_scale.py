"""The gradient noise scale: how many examples a gradient must average before more of them stop helping.

The gradient of one example is the true gradient G plus noise with covariance Σ. The mean over B examples has

    E |G_B|² = |G|² + tr(Σ) / B.

Two batch sizes give two equations, and both unknowns:

    |G|² = (B |G_B|² - b |G_b|²) / (B - b),      tr(Σ) = (|G_b|² - |G_B|²) / (1/b - 1/B),

and the noise scale is their ratio, B_noise = tr(Σ) / |G|², in examples. Each of the two estimates is right on
average; their ratio is not, so take means over many steps first and divide last.

Data parallelism measures both for nothing: |G_b|² on each rank before the all-reduce, |G_B|² after it.

Paper: McCandlish et al. 2018 (1812.06162), section 2.2 for the noise scale, appendix A.1 for this estimator.
Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean


@dataclass(frozen=True)
class NoiseScale:
    """What a series of squared gradient norms says about signal and noise.

    Attributes:
        signal: |G|², the squared norm of the true gradient; noise can make the estimate negative.
        noise: tr(Σ), the variance of one example's gradient, summed over the parameters.
        spread: Standard error of the noise scale in examples, by leaving out one step at a time.
        steps: Pairs of norms that went in.
    """

    signal: float
    noise: float
    spread: float
    steps: int

    @property
    def examples(self) -> float:
        """B_noise = tr(Σ) / |G|² in examples; infinite where no signal was found above the noise."""
        return self.noise / self.signal if self.signal > 0 else inf

    def __str__(self) -> str:
        """Return one line: the noise scale with its standard error."""
        if self.examples == inf:
            return f"noise scale: no signal above the noise in {self.steps} steps; measure more of them"
        return f"noise scale {self.examples:.3g} ± {self.spread:.2g} examples, from {self.steps} steps"


def _solve(small: float, big: float, batch_small: int, batch_big: int) -> tuple[float, float]:
    signal = (batch_big * big - batch_small * small) / (batch_big - batch_small)
    noise = (small - big) / (1 / batch_small - 1 / batch_big)
    return signal, noise


def noise_scale(
    small: Sequence[float], big: Sequence[float], *, batch_small: int, batch_big: int
) -> NoiseScale:
    """Return the noise scale from squared gradient norms at two batch sizes, averaged before they are divided.

    Args:
        small: |G_b|² of each step; where several small batches make a big one, their mean.
        big: |G_B|² of the same steps.
        batch_small: b in examples, as they were averaged.
        batch_big: B in examples.

    Returns:
        Signal, noise, and the standard error of their ratio (0 with a single step).

    Raises:
        ValueError: If the batches do not differ, or the two series have not the same number of steps.
    """
    if not 1 <= batch_small < batch_big:
        raise ValueError(
            f"batch_small={batch_small} must be at least 1 and less than batch_big={batch_big}: one batch size is "
            f"one equation for two unknowns"
        )
    if not small or len(small) != len(big):
        raise ValueError(f"{len(small)} small and {len(big)} big norms; each step has one of both")
    signal, noise = _solve(fmean(small), fmean(big), batch_small, batch_big)
    return NoiseScale(signal, noise, _spread(small, big, batch_small, batch_big), len(small))


def _spread(small: Sequence[float], big: Sequence[float], batch_small: int, batch_big: int) -> float:
    """Jackknife: the ratio with each step left out in turn; infinite if one of them has no signal."""
    n = len(small)
    if n < 2:
        return 0.0
    total_small, total_big = sum(small), sum(big)
    ratios = []
    for s, b in zip(small, big, strict=True):
        left = _solve((total_small - s) / (n - 1), (total_big - b) / (n - 1), batch_small, batch_big)
        if left[0] <= 0:
            return inf
        ratios.append(left[1] / left[0])
    middle = fmean(ratios)
    return sqrt((n - 1) / n * sum((ratio - middle) ** 2 for ratio in ratios))
