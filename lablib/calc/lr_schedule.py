"""The learning rate of every step: a linear warm-up, then half a cosine down to a floor.

    step 0 to warmup          a straight line from 0 to the peak
    step warmup to steps      from the peak to the floor, slowly at both ends
    later                     the floor

Chapter: book/11_practical_fsdp.md.
"""

from __future__ import annotations

import math


def cosine_lr(step: int, *, peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Return the learning rate of a step.

    Warm-up: `peak * step / warmup`. After it `floor + (peak - floor) * (1 + cos(pi * t)) / 2`, where t goes from 0 at
    the end of the warm-up to 1 at the last step (Loshchilov and Hutter, arXiv 1608.03983, without restarts).

    Args:
        step: Number of the step that is taken, from 1.
        peak: Highest rate, reached by step `warmup`.
        steps: Steps of the whole schedule; later ones stay at the floor.
        warmup: Steps of the warm-up; 0 begins at the peak.
        floor: Rate of the last step.

    Raises:
        ValueError: If the numbers contradict each other.

    Chapter: book/11_practical_fsdp.md.
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
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
