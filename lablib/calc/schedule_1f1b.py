"""The synchronous schedules that everybody starts from: naive, GPipe, 1F1B, interleaved 1F1B.

Four stages, four micro-batches, stage 1 (counted from 0):

    naive        F0 B0 F1 B1 F2 B2 F3 B3      one micro-batch in the pipeline at a time
    GPipe        F0 F1 F2 F3 B0 B1 B2 B3      all forwards, then all backwards
    1F1B         F0 F1 F2 B0 F3 B1 B2 B3      a backward as soon as there is one

GPipe and 1F1B idle equally long, `(p - 1)(t_F + t_B)`; 1F1B holds `min(m, p - i)` micro-batches where GPipe holds m.
Interleaving gives every rank v thinner stages, so filling the pipeline takes 1/v of the time.

GPipe: Huang et al. 2019 (arXiv 1811.06965), Figure 2c. The others: Narayanan et al. 2021 (arXiv 2104.04473),
section 2.2, Figure 4; their 1F1B is PipeDream-Flush (arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lablib.calc.schedule_actions import Action, Schedule


def naive(p: int, m: int) -> Schedule:
    """Return the schedule that finishes one micro-batch before it starts the next: one rank in p works.

    Idle over ideal time: `p - 1`. Chapter: book/04_pipeline_parallelism.md.

    Raises:
        ValueError: If p or m is less than 1.
    """
    at_least_one(p=p, m=m)
    ranks = [[Action(kind, i, k) for k in range(m) for kind in "FB"] for i in range(p)]
    return Schedule(ranks, m, range(p), "naive")


def gpipe(p: int, m: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards in the same order.

    Idle over ideal time `(p - 1)/m`; every stage holds m micro-batches (Huang et al. 2019, section 2.3).

    Raises:
        ValueError: If p or m is less than 1.
    """
    at_least_one(p=p, m=m)
    ranks = [[*each("F", i, m), *each("B", i, m)] for i in range(p)]
    return Schedule(ranks, m, range(p), "gpipe")


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return 1F1B: stage i runs `p - 1 - i` forwards, then a forward and a backward in turn.

    Idle over ideal time `(p - 1)/m`; stage i holds `min(m, p - i)` micro-batches (Narayanan et al. 2021, Figure 4).

    Raises:
        ValueError: If p or m is less than 1.
    """
    at_least_one(p=p, m=m)
    ranks = [list(alternate(each("F", i, m), each("B", i, m), warmup=min(m, p - 1 - i))) for i in range(p)]
    return Schedule(ranks, m, range(p), "1f1b")


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return interleaved 1F1B: every rank holds v stages, p apart, and works through them p micro-batches at a time.

    Idle over ideal time `(p - 1)/(v m)`; rank 0 holds `p (1 + (p - 1)/(p v))` stages' worth of activations
    (Narayanan et al. 2021, section 2.2.2; Korthikanti et al. 2022, section 4.2.3). With v = 1 it is 1F1B.

    Raises:
        ValueError: If p, m or v is less than 1, or p does not divide m.
    """
    at_least_one(p=p, m=m, v=v)
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


def at_least_one(**numbers: int) -> None:
    """Raise a ValueError that names every number, unless all are whole and 1 or more."""
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers.values()):
        given = ", ".join(f"{name}={n!r}" for name, n in numbers.items())
        raise ValueError(f"{given}: each must be a whole number, 1 or more")
