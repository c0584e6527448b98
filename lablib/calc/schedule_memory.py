"""What a rank holds while a schedule runs: the activations of every micro-batch that is on its way.

A forward stores activations; the full backward frees them. A backward in two halves frees a part after the input half
(I) and the rest after the weight half (W), which needs the inputs of the matrix products and the gradients of their
outputs. Only the order of a rank's own actions matters, not their times.
"""

from __future__ import annotations

from collections.abc import Sequence

from lablib.calc.schedule_actions import Schedule


def peak_activations(
    schedule: Schedule, *, stage_size: Sequence[float] | None = None, after_input: float = 1
) -> tuple[float, ...]:
    """Return the most that each rank holds at once.

    With `after_input` = M_W / M_B, times M_B, it is the last column of Table 2 of the Zero Bubble paper (2401.10241):
    `(p - i) M_B + i M_W` on rank i of ZB-H1.

    Args:
        schedule: What runs.
        stage_size: What one micro-batch stores on each stage, in bytes or any unit; by default a rank's whole share
            of the model counts 1, so a stage of a rank that holds v counts 1/v.
        after_input: Part of it that stays between the input half and the weight half, from 0 to 1.

    Raises:
        ValueError: If there are not as many sizes as stages, or `after_input` is not between 0 and 1.
    """
    if stage_size is not None and len(stage_size) != schedule.num_stages:
        raise ValueError(
            f"stage_size has {len(stage_size)} entries for num_stages={schedule.num_stages}; give one for each"
        )
    if not 0 <= after_input <= 1:
        raise ValueError(f"after_input={after_input} is a part of what F stored: from 0 to 1")
    stays = {"F": 1, "B": -1, "I": after_input - 1, "W": -after_input}
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = 0.0
        for kind, stage, _ in schedule.actions(rank):
            held += stays[kind] * (1 if stage_size is None else stage_size[stage])
            peak = max(peak, held)
        # Dividing once, at the end, keeps counts exact.
        peaks.append(peak / max(1, len(schedule.stages_of(rank))) if stage_size is None else peak)
    return tuple(peaks)
