r"""The schedules: naive, GPipe, 1F1B, interleaved 1F1B, the Zero Bubble schedules, and DualPipe-V. Read `one_f_one_b` first.

Four stages, four micro-batches, stage 1 (counted from 0):

    naive        F0 B0 F1 B1 F2 B2 F3 B3      one micro-batch in the pipeline at a time
    GPipe        F0 F1 F2 F3 B0 B1 B2 B3      all forwards, then all backwards
    1F1B         F0 F1 F2 B0 F3 B1 B2 B3      a backward as soon as there is one

GPipe and 1F1B idle equally long, `(p - 1)(t_F + t_B)`; 1F1B holds `min(m, p - i)` micro-batches where GPipe holds m.
Interleaving gives every rank v thinner stages, so filling the pipeline takes 1/v of the time.

Zero Bubble: no stage waits for the gradients of the weights. So a stage sends the gradient of its input first (I; the
paper writes B) and fills the time in which it would wait with the weight halves (W) that it put off. Two stages, three
micro-batches:

    1F1B     rank 0: F0 F1 B0 F2 B1 B2              rank 1: F0 B0 F1 B1 F2 B2
    ZB-H1    rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2     rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2

ZB-H1 starts as many forwards as 1F1B. ZB-H2 starts twice as many and holds `2p - 1` micro-batches instead of p, so that
no stage idles between its first action and its last if F, I and W take equally long.

On a V every rank holds one stage on the way down and one on the way up, so a micro-batch comes back to the rank that
started it, and the loss is on rank 0. Two ranks, four stages:

    stage   0     3        rank 0
             \   /
              1-2          rank 1

GPipe: Huang et al. 2019 (arXiv 1811.06965), Figure 2c. 1F1B (PipeDream-Flush, arXiv 2006.09503) and interleaved:
Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, Figure 4. Zero Bubble and ZB-V: Qi et al. 2023 (arXiv 2401.10241),
sections 2 and 6, Figures 2 and 3. DualPipe-V: the DualPipe of DeepSeek-V3 (arXiv 2412.19437), cut in half;
github.com/deepseek-ai/DualPipe. Both on a V give the orders of PyTorch's classes of the same names.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

from lablib.calc.errors import one_of
from lablib.calc.schedules.actions import Action, Overlap, Schedule, Step

#: To list and simulate so many takes some four seconds and 200 MB. 64 ranks with 2 stages each and 1,024 micro-batches,
#: backward in halves, are 393,216.
MOST_ACTIONS = 500_000


def naive(p: int, m: int) -> Schedule:
    """Return the schedule that finishes one micro-batch before it starts the next: one rank in p works.

    Idle over ideal time: `p - 1`. Chapter: book/04_pipeline_parallelism.md.
    """
    check_size(p=p, m=m)
    ranks = [[Action(kind, i, k) for k in range(m) for kind in "FB"] for i in range(p)]
    return Schedule(ranks, m, range(p), "naive")


def gpipe(p: int, m: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards in the same order.

    Idle over ideal time `(p - 1)/m`; every stage holds m micro-batches (Huang et al. 2019, section 2.3).
    """
    check_size(p=p, m=m)
    ranks = [[*each("F", i, m), *each("B", i, m)] for i in range(p)]
    return Schedule(ranks, m, range(p), "gpipe")


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return 1F1B: stage i runs `p - 1 - i` forwards, then a forward and a backward in turn.

    Idle over ideal time `(p - 1)/m`; stage i holds `min(m, p - i)` micro-batches (Narayanan et al. 2021, Figure 4).
    """
    check_size(p=p, m=m)
    ranks = [list(alternate(each("F", i, m), each("B", i, m), warmup=min(m, p - 1 - i))) for i in range(p)]
    return Schedule(ranks, m, range(p), "1f1b")


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return interleaved 1F1B: every rank holds v stages, p apart, and works through them p micro-batches at a time.

    Idle over ideal time `(p - 1)/(v m)`; rank 0 holds at most `p (1 + (p - 1)/(p v))` stages' worth
    (Narayanan et al. 2021, section 2.2.2; Korthikanti et al. 2022, section 4.2.3). With v = 1 it is 1F1B.
    """
    check_size(p=p, m=m, v=v)
    if v == 1:
        return Schedule(one_f_one_b(p, m).ranks, m, range(p), "interleaved")
    if m % p:
        near = [n for n in (m // p * p, (m // p + 1) * p) if n]
        raise ValueError(
            f"interleaved with v={v} runs micro-batches p={p} at a time, which does not divide m={m}; "
            f"use m={' or '.join(map(str, near))}"
        )

    def actions(kind: str, rank: int, chunks: Callable[[int], int]) -> Iterator[Action]:
        for k in range(m * v):
            rounds, place = divmod(k, p * v)
            yield Action(kind, chunks(place // p) * p + rank, rounds * p + place % p)

    ranks = []
    for i in range(p):
        forwards = actions("F", i, lambda chunk: chunk)
        backwards = actions("B", i, lambda chunk: v - 1 - chunk)
        # p (v - 1) forwards until the last chunk begins; then 2 more for each rank between this one and the last.
        warmup = min(m * v, 2 * (p - 1 - i) + p * (v - 1))
        ranks.append(list(alternate(forwards, backwards, warmup)))
    return Schedule(ranks, m, [stage % p for stage in range(p * v)], "interleaved")


def each(kind: str, stage: int, m: int, first: int = 0) -> Iterator[Action]:
    """Yield one action of this kind for each micro-batch in order, from `first` to m - 1."""
    return (Action(kind, stage, k) for k in range(first, m))


def alternate(forwards: Iterator[Action], backwards: Iterator[Action], warmup: int) -> Iterator[Action]:
    """Yield `warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    for _ in range(warmup):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def check_size(kinds: int = 2, fewest: int = 1, stages: int = 1, **numbers: int) -> None:
    """Raise a ValueError unless p, m and v are integers of 1 or more, and their actions are not too many to list.

    Args:
        kinds: Actions of a micro-batch on a stage: 2, or 3 with a backward in halves.
        fewest: Micro-batches that are listed at least, whatever m.
        stages: Stages of a rank where v does not say it.
    """
    given = ", ".join(f"{name}={n!r}" for name, n in numbers.items())
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers.values()):
        raise ValueError(f"{given}: each must be a whole number, 1 or more")
    p, m, v = numbers["p"], numbers["m"], numbers.get("v", stages)
    actions = kinds * p * v * max(m, fewest)
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{given} make {actions:,} actions, and a schedule has at most {MOST_ACTIONS:,}: "
            f"make {max(numbers, key=numbers.get)} smaller"
        )


def zb_h1(p: int, m: int) -> Schedule:
    """Return ZB-H1: rank i runs `p - 1 - i` forwards first and its weight halves i micro-batches late.

    Idle `(p - 1)(t_F + t_I - t_W)`, all of it within the first stage's span, where m >= p and W is the shortest,
    as it is in a Transformer; at most p micro-batches held (Table 2 of the paper).
    """
    return _split(p, m, 1, "zb-h1")


def zb_h2(p: int, m: int) -> Schedule:
    """Return ZB-H2: rank i runs `2 (p - 1 - i)` forwards first and its weight halves 2i micro-batches late.

    Idle within the first stage's span `(p - 1)(t_F + t_I - 2 t_W)`, or none where that is negative, if W is the shortest;
    at most `2p - 1` micro-batches held (Table 2 of the paper). Over the full step ranks still start, and end, one after
    another. The next step may fill that time only where no optimizer step makes the ranks wait for each other (section 4).
    """
    return _split(p, m, 2, "zb-h2")


def _split(p: int, m: int, depth: int, name: str) -> Schedule:
    check_size(3, p=p, m=m)
    ranks = []
    for i in range(p):
        late = depth * i  # micro-batches from an input half to the weight half that follows it
        steps: list[Step] = []
        for action in alternate(each("F", i, m), each("I", i, m), warmup=min(m, depth * (p - 1 - i))):
            steps.append(action)
            if action.kind == "I" and action.microbatch >= late:
                steps.append(Action("W", i, action.microbatch - late))
        ranks.append([*steps, *each("W", i, m, first=max(0, m - late))])
    return Schedule(ranks, m, range(p), name)


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
        m: Micro-batches; from `2p - 1` on the pipeline is full.
    """
    full = 2 * p - 1 if isinstance(p, int) else 1
    check_size(3, fewest=full, stages=2, p=p, m=m)
    return _schedule([_zb_v_rank(i, p, max(m, full)) for i in range(p)], p, m, "zb-v")


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

    Idle time `(p - 1)(t_F&B + t_B - 3 t_W)` of chunk times, if F, I and W are equal; steps are numbered as in DeepSeek's code.
    """
    check_size(3, stages=2, p=p, m=m)
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


_MAKE: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}


def schedule_names() -> list[str]:
    """Return the names that `schedule` knows, simplest first."""
    return list(_MAKE)


def schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return a schedule by its name. Chapter: book/04_pipeline_parallelism.md."""
    known = one_of("schedule", str(name).lower().replace("_", "-"), _MAKE)
    if known == "interleaved":
        return interleaved(p, m, v)
    made = _MAKE[known](p, m)
    fixed = made.virtual_stages
    if v not in (1, fixed):
        raise ValueError(
            f"{known} has {fixed} stage{'s' * (fixed > 1)} on every rank, not v={v}; use v={fixed}, or interleaved"
        )
    return made
