"""What a larger global batch costs and buys, and what to do with the learning rate.

To reach a given loss with batch B takes S optimizer steps and E = B S examples. With the noise scale B_noise,

    S = S_min (1 + B_noise / B),        E = E_min (1 + B / B_noise),        (S/S_min - 1)(E/E_min - 1) = 1,

so a small batch wastes steps, a large one wastes examples, and at B = B_noise both are twice their minimum: the
critical batch size. One step of the best length gains 1 / (1 + B_noise / B) of what it would gain without noise.

Three rules for the learning rate when the batch grows from B to k B:

    linear       k lr                          SGD far below B_noise   (Goyal et al. 2017)
    square root  √k lr                         keeps the size of the noise in a step; usual for Adam
    noise        lr_max / (1 + B_noise / B)    linear below B_noise, flat above it   (McCandlish et al. 2018)

Papers: McCandlish et al. 2018 (1812.06162), equations of section 2; Goyal et al. 2017 (1706.02677), section 2.
Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

from math import sqrt


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")


def steps_needed(batch: float, *, noise_scale: float, steps_min: float = 1.0) -> float:
    """Return the optimizer steps to a given loss, S = S_min (1 + B_noise / B).

    Args:
        batch: B, examples in a step.
        noise_scale: B_noise, in examples.
        steps_min: S_min, with an endless batch.

    Raises:
        ValueError: If a number is not positive.
    """
    _positive(batch=batch, noise_scale=noise_scale, steps_min=steps_min)
    return steps_min * (1 + noise_scale / batch)


def examples_needed(batch: float, *, noise_scale: float, examples_min: float = 1.0) -> float:
    """Return the examples to a given loss, E = E_min (1 + B / B_noise).

    Args:
        batch: B, examples in a step.
        noise_scale: B_noise, in examples.
        examples_min: E_min, with the smallest batch.

    Raises:
        ValueError: If a number is not positive.
    """
    _positive(batch=batch, noise_scale=noise_scale, examples_min=examples_min)
    return examples_min * (1 + batch / noise_scale)


def step_gain(batch: float, *, noise_scale: float) -> float:
    """Return what one step gains, over a step without noise: 1 / (1 + B_noise / B).

    Args:
        batch: B, examples in a step.
        noise_scale: B_noise, in examples.

    Raises:
        ValueError: If a number is not positive.
    """
    return 1 / steps_needed(batch, noise_scale=noise_scale)


def linear_rule(lr: float, batch: float, new_batch: float) -> float:
    """Return the learning rate times k when the batch grows k times.

    Args:
        lr: The rate that suits `batch`.
        batch: Examples in a step that `lr` was found with.
        new_batch: Examples in a step from now on.

    Raises:
        ValueError: If a number is not positive.
    """
    _positive(lr=lr, batch=batch, new_batch=new_batch)
    return lr * new_batch / batch


def sqrt_rule(lr: float, batch: float, new_batch: float) -> float:
    """Return the learning rate times √k when the batch grows k times.

    Args:
        lr: The rate that suits `batch`.
        batch: Examples in a step that `lr` was found with.
        new_batch: Examples in a step from now on.

    Raises:
        ValueError: If a number is not positive.
    """
    _positive(lr=lr, batch=batch, new_batch=new_batch)
    return lr * sqrt(new_batch / batch)


def noise_rule(lr: float, batch: float, new_batch: float, *, noise_scale: float) -> float:
    """Return the learning rate lr_max / (1 + B_noise / B), with lr_max such that `lr` suits `batch`.

    Far below the noise scale this is the linear rule; far above it the rate no longer grows.

    Args:
        lr: The rate that suits `batch`.
        batch: Examples in a step that `lr` was found with.
        new_batch: Examples in a step from now on.
        noise_scale: B_noise, in examples.

    Raises:
        ValueError: If a number is not positive.
    """
    _positive(lr=lr)
    return lr * step_gain(new_batch, noise_scale=noise_scale) / step_gain(batch, noise_scale=noise_scale)
