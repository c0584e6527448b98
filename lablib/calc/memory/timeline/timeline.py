"""Memory over one training step: what a rank holds at every instant, by named term, and the instant of the peak.

`training_memory` adds everything at its full size. This module walks through the step instead:

    states                     what lives from step to step, gradients not yet made
    forward of the embedding, of block k, of the head
    loss                       logits, their float32 copy, log-probabilities
    backward of the loss, the head, of block k, of the embedding
    gradient reduction         buckets of DDP and of ZeRO
    optimizer step             temporaries of the implementation

Each instant is described at its own fullest: the bytes of every term when the sum is largest. No constant is fitted;
a term is there because an operator makes a tensor, and it is gone when that operator is.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

from lablib.calc.errors import check_flag, check_stage, one_of
from lablib.calc.memory.config import RunConfig, run_config
from lablib.calc.memory.formulas import gradients_meet
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.terms import listed
from lablib.calc.memory.timeline.step import MemoryInstant, Step
from lablib.calc.models import ModelConfig

STEPS = ("foreach", "for-loop", "fused")


@dataclass(frozen=True)
class MemoryTimeline:
    """The instants of one training step on one rank, in the order of time.

    Attributes:
        stage: Pipeline stage that it describes, from 0.
        ranks: Ranks of the whole run.
        seq: Tokens in a sequence.
        instants: From "states" to "optimizer step".
        saved_terms: What forward keeps for backward when it has ended, for all micro-batches in flight.
    """

    model: str
    recipe: str
    stage: int
    ranks: int
    seq: int
    instants: tuple[MemoryInstant, ...]
    saved_terms: tuple[tuple[str, int], ...] = ()

    @property
    def saved(self) -> dict[str, int]:
        """Bytes that are kept when forward has ended, by term, autocast's copies of weights included."""
        return dict(self.saved_terms)

    @property
    def peak(self) -> MemoryInstant:
        """The instant that holds most; the first one if several do."""
        return max(self.instants, key=lambda instant: instant.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total

    def instant(self, name: str) -> MemoryInstant:
        """Return an instant by its name.

        Args:
            name: As in `MemoryInstant.name`; "peak" is the fullest one.

        Raises:
            ValueError: If the name is unknown.
        """
        if name == "peak":
            return self.peak
        names = [instant.name for instant in self.instants]
        return self.instants[names.index(one_of("instant", name, names))]

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain dictionaries and numbers."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "stage": self.stage,
            "ranks": self.ranks,
            "seq": self.seq,
            "peak": self.peak_bytes,
            "peak_at": self.peak.name,
            "moments": [
                {"name": m.name, "phase": m.phase, "block": m.block, "at": m.at, "total": m.total}
                | {"terms": dict(m.terms)}
                for m in self.instants
            ],
        }


def memory_timeline(
    model: RunConfig | ModelConfig | str | PathLike,
    *,
    step: str = "foreach",
    stage: int | None = None,
    out_of_place: bool = False,
    **settings: object,
) -> MemoryTimeline:
    """Return the instants of a steady training step: optimizer states exist, gradients were set to None after the last.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a RunConfig.
        step: How the optimizer runs: "foreach" (PyTorch's default on a GPU: all tensors at once, so its temporaries
            are as large as the parameters), "for-loop" (its default on a CPU: one tensor at a time) or "fused"
            (one kernel, no temporaries).
        stage: Pipeline stage to describe; None means the one with the highest peak.
        out_of_place: Whether backward writes into no tensor that is there, as under a dispatch mode: set it to compare
            with MemTracker, FakeTensorMode or `lablib.launch.measure.live_memory`. Without one, a second gradient is added to
            the first in place unless that is a view; see `lablib.calc.memory.tape.tape`.
        **settings: Fields of `lablib.calc.memory.RunConfig`; `rung memory --help` explains them.

    Raises:
        ValueError: As `training_memory`, and if `step` or the stage is unknown.
    """
    one_of("step", step, STEPS)
    check_flag("out_of_place", out_of_place)
    run = run_config(model, **settings)
    if stage is None:
        fullest = memory_peak(run, step=step, out_of_place=out_of_place).step
    else:
        check_stage(stage, run.pp)
        fullest = _peak(Stage(run, stage), step, out_of_place).step
    of = run.model.name, run.recipe.name, fullest.stage.number, run.ranks, run.seq
    return MemoryTimeline(*of, tuple(fullest.instants()), listed(fullest.saved))


class MemoryPeak(NamedTuple):
    """The fullest instant of a run.

    Attributes:
        step: The step that it is an instant of, on the stage that has the highest peak.
    """

    instant: MemoryInstant
    step: Step


def memory_peak(run: RunConfig, *, step: str = "foreach", out_of_place: bool = False) -> MemoryPeak:
    """Return the peak of `memory_timeline`, with its settings, which costs less than all instants of all stages."""
    found = [_peak(stage, step, out_of_place) for stage in distinct_stages(run)]
    return max(found, key=lambda peak: peak.instant.total)


def distinct_stages(run: RunConfig) -> list[Stage]:
    """Return stages of which one has the highest peak: the first, the last, and of those that are alike the earliest.

    Stages between the ends are alike if their chunks have layers of the same kinds and their gradients meet
    activations in the same way. Of those the earliest has most micro-batches in flight, and all else is equal.
    """
    found: dict[object, Stage] = {}
    for number in range(run.pp):
        stage = Stage(run, number)
        kinds = tuple(tuple(map(run.model.has_experts, chunk)) for chunk in stage.chunks)
        between = not (stage.is_first or stage.is_last)
        found.setdefault((kinds, gradients_meet(stage)) if between else number, stage)
    return list(found.values())


def _peak(stage: Stage, step: str, out_of_place: bool) -> MemoryPeak:
    # All forwards first: either the first backward is fullest, or one behind it.
    accumulates = {"never": (False,), "always": (True,), "fewer": (False, True)}[gradients_meet(stage)]
    steps = [Step(stage, step, out_of_place, earlier) for earlier in accumulates]
    return max((MemoryPeak(one.peak(), one) for one in steps), key=lambda peak: peak.instant.total)
