"""The memory of a training step from instant to instant, and where each of its bytes comes from.

`memory_timeline` returns the instants of a step; `.peak` is the fullest, and `memory_peak` finds it faster. `explain_memory` gives each term of one instant
its formula and source.

    timeline    the instants and their table
    step        the walk through a step
    gradients   who frees which gradient when
    explain     formula and source of each term

Read `timeline` for the table of instants, then `step`. Chapters 01 and 09.
"""

from lablib.calc.memory.timeline.explain import explain_instant
from lablib.calc.memory.timeline.step import MemoryInstant, Step
from lablib.calc.memory.timeline.timeline import STEPS, MemoryTimeline, memory_peak, memory_timeline

__all__ = ["STEPS", "MemoryInstant", "MemoryTimeline", "Step", "explain_instant", "memory_peak", "memory_timeline"]
