"""A pipeline schedule as data: for every rank, the actions it runs, in order.

Two stages and two micro-batches, one line a rank. Stage 1 is the last, so it turns round at once:

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

An action is written as PyTorch writes it: stage, kind, micro-batch. `2F0` is the forward of micro-batch 0 on stage 2.
`2B0` is its full backward. `2I0` is the half that computes the gradient of the stage's input, which the stage
before it waits for; `2W0` is the half that computes the gradients of the weights, which no stage waits for.
The Zero Bubble paper (Qi et al. 2023, arXiv 2401.10241) writes B for what is I here.

The order is all that a schedule says. When an action starts, and so who idles, follows from the times:
`lablib.calc.schedules.simulation`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

#: What a kind means. B does the work of I and W in one go.
KINDS = {"F": "forward", "B": "full backward", "I": "backward, input half", "W": "backward, weight half"}

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One piece of work of one rank; `str` gives PyTorch's notation, as in `2F0`.

    Attributes:
        kind: F, B, I or W, a key of `KINDS`.
        stage: Number of the stage, from 0; the loss is on the last.
        microbatch: Number of the micro-batch, from 0.
    """

    kind: str
    stage: int
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself: what a step runs, whether it is one action or two."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward of different micro-batches, run as one step, each hiding the other's communication.

    DualPipe's invention (DeepSeek-V3, arXiv 2412.19437, section 3.2.1); PyTorch writes `(0F4;7B2)OVERLAP_F_B`.
    """

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two actions, the forward first."""
        return tuple(self)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap


def parse_action(text: str) -> Step:
    """Read one action in PyTorch's notation.

    Args:
        text: For example "2F0", or "(0F4;7B2)OVERLAP_F_B".
    """
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(kind, int(stage), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        forward, backward = map(parse_action, match.groups())
        if forward.parts[0].kind == "F" and backward.parts[0].kind in "BI":
            return Overlap(forward, backward)
    raise ValueError(
        f"{text!r} is not an action; write stage, kind, micro-batch: 2F0 is the forward of micro-batch 0 on stage 2; "
        f"kinds: {', '.join(f'{kind} ({meaning})' for kind, meaning in KINDS.items())}"
    )


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order, and where every stage lives.

    Attributes:
        ranks: Steps of each rank; a step is an `Action` or an `Overlap`.
        num_microbatches: Micro-batches of one training step, `m`.
        name: What the schedule is called; two schedules are equal whatever their names.
    """

    ranks: tuple[tuple[Step, ...], ...]
    num_microbatches: int
    placement: tuple[int, ...]
    name: str = field(default="schedule", compare=False)

    def __post_init__(self) -> None:
        # Lists are welcome; tuples are kept, so that a schedule cannot change under a simulation.
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        object.__setattr__(self, "placement", tuple(self.placement))
        if not self.ranks or not self.placement or self.num_microbatches < 1:
            raise ValueError(
                f"a schedule needs ranks, stages and micro-batches; it has {len(self.ranks)} ranks, "
                f"{len(self.placement)} stages and num_microbatches={self.num_microbatches}"
            )
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.ranks):
                raise ValueError(f"stage {stage} lives on rank {rank}; the ranks are 0 to {len(self.ranks) - 1}")

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline, `p`."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages of the model, `p v`."""
        return len(self.placement)

    @cached_property
    def virtual_stages(self) -> int:
        """Stages on the rank that holds most, `v`."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that live on a rank, in order of depth."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        stages: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.placement):
            stages.setdefault(rank, []).append(stage)
        return {rank: tuple(mine) for rank, mine in stages.items()}

    def actions(self, rank: int) -> list[Action]:
        """Return a rank's actions one by one: an `Overlap` gives its forward, then its backward."""
        return [action for step in self.ranks[rank] for action in step.parts]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, steps))}" for rank, steps in enumerate(self.ranks))


def parse_schedule(rows: str | Sequence[str | Iterable[str]], name: str = "schedule") -> Schedule:
    """Read a schedule that somebody wrote down: one row a rank, actions in PyTorch's notation.

    Where each stage lives and how many micro-batches there are follows from the actions.
    `lablib.calc.schedules.validate` then says whether it can run.

    Args:
        rows: One row a rank, each a string with spaces ("0F0 0B0") or a list of actions; or one text, a line a rank.
    """
    lines = [line for line in rows.splitlines() if line.strip()] if isinstance(rows, str) else rows
    cells = [re.sub(r"^\s*rank \d+:", "", row).split() if isinstance(row, str) else row for row in lines]
    return from_steps([[parse_action(str(cell)) for cell in row] for row in cells], name)


def from_steps(ranks: Sequence[Sequence[Step]], name: str = "schedule") -> Schedule:
    """Return the schedule of these steps: the placement and the micro-batches follow from them."""
    home: dict[int, int] = {}
    last = -1
    for rank, steps in enumerate(ranks):
        for action in (action for step in steps for action in step.parts):
            last = max(last, action.microbatch)
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} runs on rank {home[action.stage]} and on rank {rank} ({action})"
                )
    if not home:
        raise ValueError("the schedule has no action")
    if last >= (count := sum(len(step.parts) for steps in ranks for step in steps)):
        raise ValueError(
            f"a schedule with a micro-batch {last} has {last + 1} of them, but {count} action{'s' * (count > 1)}: count from 0, without gaps"
        )
    if len(home) <= max(home):
        missing = next(stage for stage in range(max(home)) if stage not in home)
        raise ValueError(f"no rank runs stage {missing}, but the schedule has a stage {max(home)}")
    return Schedule(ranks, last + 1, [home[stage] for stage in range(len(home))], name)
