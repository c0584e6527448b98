"""Batch size and learning rate: noise scale, what a larger batch costs and buys, the schedule. See book/batch_size.md.

The noise scale is B_noise = tr(Σ) / |G|² in examples, from squared gradient norms at two batch sizes; each estimate is
right on average and their ratio is not, so means over many steps come first. Batch B takes S_min (1 + B_noise / B) steps
and E_min (1 + B / B_noise) examples to a given loss. In the three rules `lr` suits `batch`, both in examples.

Papers: McCandlish et al. 2018 (1812.06162), section 2 and appendix A.1; Goyal et al. 2017 (1706.02677), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import cos, inf, pi, sqrt
from statistics import fmean


@dataclass(frozen=True)
class NoiseScale:
    """Signal and noise estimated from a series of squared gradient norms.

    Attributes:
        signal: |G|², the squared norm of the true gradient; noise can make the estimate negative.
        noise: tr(Σ), the variance of one example's gradient, summed over the parameters.
        spread: Standard error of the noise scale in examples, by leaving out one step at a time.
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


def noise_scale(small: Sequence[float], big: Sequence[float], *, batch_small: int, batch_big: int) -> NoiseScale:
    """Return the noise scale from squared gradient norms at two batch sizes, averaged before they are divided.

    Args:
        small: |G_b|² of each step; where several small batches make a big one, their mean.
        batch_small: b in examples, as they were averaged.

    Returns:
        Signal, noise, and the standard error of their ratio (0 with a single step).
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


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")


def steps_needed(batch: float, *, noise_scale: float, steps_min: float = 1.0) -> float:
    """Return the optimizer steps to a given loss, S = S_min (1 + B_noise / B)."""
    _positive(batch=batch, noise_scale=noise_scale, steps_min=steps_min)
    return steps_min * (1 + noise_scale / batch)


def examples_needed(batch: float, *, noise_scale: float, examples_min: float = 1.0) -> float:
    """Return the examples to a given loss, E = E_min (1 + B / B_noise)."""
    _positive(batch=batch, noise_scale=noise_scale, examples_min=examples_min)
    return examples_min * (1 + batch / noise_scale)


def step_gain(batch: float, *, noise_scale: float) -> float:
    """Return what one step gains, over a step without noise: 1 / (1 + B_noise / B)."""
    return 1 / steps_needed(batch, noise_scale=noise_scale)


def linear_rule(lr: float, batch: float, new_batch: float) -> float:
    """Return the learning rate times k when the batch grows k times."""
    _positive(lr=lr, batch=batch, new_batch=new_batch)
    return lr * new_batch / batch


def sqrt_rule(lr: float, batch: float, new_batch: float) -> float:
    """Return the learning rate times √k when the batch grows k times."""
    _positive(lr=lr, batch=batch, new_batch=new_batch)
    return lr * sqrt(new_batch / batch)


def noise_rule(lr: float, batch: float, new_batch: float, *, noise_scale: float) -> float:
    """Return the learning rate lr_max / (1 + B_noise / B), with lr_max such that `lr` suits `batch`."""
    _positive(lr=lr)
    return lr * step_gain(new_batch, noise_scale=noise_scale) / step_gain(batch, noise_scale=noise_scale)


def cosine_lr(step: int, *, peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Return the learning rate of a step.

    Warm-up: `peak * step / warmup`. After it `floor + (peak - floor) * (1 + cos(pi * t)) / 2`, where t goes from 0 at
    the end of the warm-up to 1 at the last step (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    Args:
        steps: Steps of the schedule; later ones stay at the floor.
        warmup: Steps of the warm-up; 0 begins at the peak.
    """
    if step < 1 or steps < 1:
        raise ValueError(f"step={step} and steps={steps} must be at least 1")
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup={warmup} must be from 0 to steps - 1 = {steps - 1}")
    if not 0 <= floor <= peak:
        raise ValueError(f"floor={floor} must be from 0 to peak={peak}")
    if step < warmup:
        return peak * step / warmup
    done = min(1.0, (step - max(warmup, 1)) / max(1, steps - max(warmup, 1)))
    return floor + (peak - floor) * (1 + cos(pi * done)) / 2


_ROUNDS = 4


def shuffled_place(place: int, count: int, *, seed: int = 0) -> int:
    """Return the sample at a place of the endless shuffled order of `count` samples.

    Args:
        place: From 0 on, over all epochs; each epoch has an order of its own.
    """
    if count < 1 or place < 0:
        raise ValueError(f"count={count} must be at least 1 and place={place} at least 0")
    epoch, number = divmod(place, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    key = f"{seed} {epoch}".encode()
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for turn in range(_ROUNDS):
            mixed = blake2b(b"%d %d" % (turn, right), key=key[:64], digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & ((1 << half) - 1))
        number = left << half | right
        if number < count:
            return number
