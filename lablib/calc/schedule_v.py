r"""Schedules on a V: every rank holds one stage on the way down and one on the way up, so the last is next to rank 0.

Two ranks, four stages: rank 0 holds stages 0 and 3, rank 1 holds stages 1 and 2.

    stage   0     3        rank 0
             \   /
              1-2          rank 1

A micro-batch comes back to the rank that started it, which so knows when to start the next one. The loss is on rank 0.

ZB-V: Qi et al. 2023 (arXiv 2401.10241), section 6. DualPipe-V: the DualPipe of DeepSeek-V3 (arXiv 2412.19437),
cut in half; github.com/deepseek-ai/DualPipe. Both give the orders of PyTorch's classes of the same names.
"""

from __future__ import annotations

from collections import Counter, deque

from lablib.calc.schedule_1f1b import at_least_one
from lablib.calc.schedule_actions import Action, Overlap, Schedule, Step


class _Rank:
    """The steps of one rank in the making: each call takes the next micro-batch of its stage."""

    def __init__(self, rank: int, p: int) -> None:
        self.down, self.up = rank, 2 * p - 1 - rank
        self.steps: list[Step] = []
        self.next: Counter[tuple[str, int]] = Counter()
        self.waiting: deque[Action] = deque()

    def take(self, kind: str, stage: int) -> Action:
        """Return the stage's next action of this kind; B and I count the same backwards."""
        count = (kind.replace("B", "I"), stage)
        self.next[count] += 1
        return Action(kind, stage, self.next[count] - 1)

    def run(self, kind: str, stage: int) -> None:
        """Add a forward, a full backward or an input half, whose weight half then waits."""
        action = self.take(kind, stage)
        self.steps.append(action)
        if kind == "I":
            self.waiting.append(Action("W", stage, action.microbatch))

    def overlap(self, forward: int, backward: int) -> None:
        """Add a forward of one stage and a backward of the other as one step."""
        self.steps.append(Overlap(self.take("F", forward), self.take("B", backward)))

    def weights(self) -> None:
        """Add the weight half that has waited longest, if one waits."""
        if self.waiting:
            self.steps.append(self.waiting.popleft())

    def weights_of(self, stage: int) -> None:
        """Add the weight half of this stage that has waited longest."""
        action = next(action for action in self.waiting if action.stage == stage)
        self.waiting.remove(action)
        self.steps.append(action)


def zb_v(p: int, m: int) -> Schedule:
    """Return ZB-V: no idle time within a stage's span when F, I and W take equally long, with the memory of 1F1B.

    Section 6 and Figure 6 of the paper; at most 2p chunks, p stages' worth, are held until their input half.

    Args:
        p: Ranks, two stages each.
        m: Micro-batches; from `2p - 1` on the pipeline is full.

    Raises:
        ValueError: If p or m is less than 1.
    """
    at_least_one(p=p, m=m)
    return _schedule([_zb_v_rank(i, p, max(m, 2 * p - 1)) for i in range(p)], p, m, "zb-v")


def _zb_v_rank(rank: int, p: int, m: int) -> list[Step]:
    r = _Rank(rank, p)

    def backward(stage: int) -> None:
        r.run("I", stage)
        r.weights_of(stage)

    for _ in range(2 * (p - rank) - 1):
        r.run("F", r.down)
    for _ in range(rank):
        r.run("F", r.up)
        r.run("F", r.down)
    for _ in range(p - rank):
        r.run("F", r.up)
        backward(r.up)
    # From here on every micro-batch that goes down meets one that comes up.
    while r.next["F", r.up] < m:
        if r.next["F", r.down] < m:
            r.run("F", r.down)
        backward(r.down)
        r.run("F", r.up)
        backward(r.up)
    for _ in range(rank):
        r.run("I", r.down)
        r.run("I", r.up)
    for _ in range(p - rank):
        r.run("I", r.down)
        r.weights_of(r.down)
    for stage in (r.up, r.down):
        for action in [action for action in r.waiting if action.stage == stage]:
            r.steps.append(action)
    return r.steps


def dualpipe_v(p: int, m: int) -> Schedule:
    """Return DualPipe-V: in the steady state every forward overlaps with a backward of the rank's other stage.

    Idle time `(p - 1)(t_F&B + t_B - 3 t_W)`, of chunk times; the steps are numbered as in DeepSeek's code.

    Raises:
        ValueError: If p or m is less than 1, or m less than 2p.
    """
    at_least_one(p=p, m=m)
    if m < 2 * p:
        raise ValueError(
            f"dualpipe-v on p={p} ranks has {2 * p} stages and needs as many micro-batches; m={m} is too few, "
            f"use m={2 * p} or more, or zb-v"
        )
    return _schedule([_dualpipe_v_rank(i, p, m) for i in range(p)], p, m, "dualpipe-v")


def _dualpipe_v_rank(rank: int, p: int, m: int) -> list[Step]:
    r = _Rank(rank, p)
    below = p - 1 - rank
    for _ in range(2 * below):  # 1: forwards down
        r.run("F", r.down)
    for _ in range(rank + 1):  # 2: forwards both ways
        r.run("F", r.down)
        r.run("F", r.up)
    for _ in range(below):  # 3: the first backwards, in halves
        r.run("I", r.up)
        r.weights()
        r.run("F", r.up)
    for k in range(m - 2 * p + rank + 1):  # 4: the steady state
        if k == 0 and rank == p - 1:  # the turning point has nothing to hide yet
            r.run("F", r.down)
            r.run("B", r.up)
        else:
            r.overlap(r.down, r.up)
        r.overlap(r.up, r.down)
    for _ in range(below):  # 5: no forwards down are left
        r.run("B", r.up)
        r.overlap(r.up, r.down)
    for k in range(2 * (rank + 1)):  # 6: backwards only, the second half of them in halves
        r.run("B" if k <= rank else "I", r.down if k % 2 else r.up)
    for _ in range(below):  # 7: weight halves fill the waits
        r.weights()
        r.run("I", r.down)
    for _ in range(rank + 1):  # 8: the weight halves that are left
        r.weights()
    return r.steps


def _schedule(ranks: list[list[Step]], p: int, m: int, name: str) -> Schedule:
    # A pipeline with fewer micro-batches than it needs to fill keeps the order of one that has enough.
    kept = [[step for step in steps if all(part.microbatch < m for part in step.parts)] for steps in ranks]
    return Schedule(kept, m, [*range(p), *reversed(range(p))], name)
