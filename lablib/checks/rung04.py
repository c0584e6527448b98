"""The checks of rung 04: two bubbles, micro-batches in flight, a 1F1B that runs, and a schedule that beats it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from lablib.calc.schedules import (
    Schedule,
    ScheduleError,
    Timeline,
    interleaved,
    one_f_one_b,
    parse_schedule,
    peak_activations,
    schedule,
    simulate,
    validate,
    zb_h1,
)
from lablib.checks.report import Wrong, check, close

Rows = Sequence[str]


# --- bubbles -----------------------------------------------------------------------------------------------


@check
def bubbles(answer: Callable[[int, int, int], Mapping[str, float]], seed: int = 4) -> str:
    """Judge `bubbles(p, m, v)`: GPipe and 1F1B where v is 1, interleaved 1F1B where it is more."""
    dice = random.Random(seed)
    cases = [(4, 16, 1), (4, 8, 1), (4, 8, 2), (4, 32, 1)]
    for _ in range(20):
        p, v = dice.randint(2, 8), dice.randint(1, 4)
        cases.append((p, p * dice.randint(1, 5), v))
    for p, m, v in cases:
        # What the formula must give is what the simulator shows, whatever the times of F and B.
        truth = simulate(interleaved(p, m, v), forward=dice.uniform(0.5, 2), backward=dice.uniform(1, 4))
        _judge_bubbles(answer(p, m, v), truth, p, m, v)
    return "4 stages, 16 micro-batches: 18.8 % of the ideal time, 15.8 % of the total time."


def _judge_bubbles(got: object, truth: Timeline, p: int, m: int, v: int) -> None:
    got = _named(got, "over_ideal", "over_total")
    ideal, total = truth.bubble_over_ideal, truth.bubble_over_total
    ours = got["over_ideal"], got["over_total"]
    if close(ours[0], ideal) and close(ours[1], total):
        return
    case = f"p={p}, m={m}, v={v}"
    if close(ours[0], total) and close(ours[1], ideal):
        raise Wrong(f"The two names are exchanged: over ideal time is always the larger one ({case}).")
    if p > 1 and float(ours[0]) == 0:
        raise Wrong(f"There is a bubble: the last rank waits until p - 1 forwards have come to it ({case}).")
    if close(ours[0], ours[1]):
        raise Wrong(
            f"The two bubbles are the same number: the ideal time leaves the idle time out, the total time has it in "
            f"({case})."
        )
    if close(ours[0], p / m / v):
        raise Wrong(f"A micro-batch passes p - 1 boundaries, not p: one stage alone has no bubble ({case}).")
    if v > 1 and close(ours[0], (p - 1) / m):
        raise Wrong(
            f"Interleaving is left out: a stage of 1/v of the layers fills the pipeline in 1/v of the time ({case})."
        )
    if v > 1 and close(ours[0], v * (p - 1) / m):
        raise Wrong(f"More stages on a rank make the bubble smaller, not larger ({case}).")
    if close(ours[0], ideal):
        raise Wrong(f"Over ideal time is right. The total time is the ideal time and the idle time together ({case}).")
    if close(ours[1], total):
        raise Wrong(f"Over total time is right. Divide the same idle time by m (F + B) alone ({case}).")
    raise Wrong(f"A rank works m (F + B) and idles (p - 1)(F + B)/v; neither number follows from that ({case}).")


# --- in flight ---------------------------------------------------------------------------------------------


@check
def in_flight(answer: Callable[[str, int, int, int], Sequence[float]], seed: int = 4) -> str:
    """Judge `in_flight(name, p, m, v)`: the most micro-batches that each rank holds."""
    dice = random.Random(seed)
    cases = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved", 4, 8, 2), ("naive", 4, 8, 1)]
    for _ in range(24):
        p, v = dice.randint(2, 7), dice.randint(2, 4)
        cases += [("gpipe", p, dice.randint(1, 12), 1), ("1f1b", p, dice.randint(1, 12), 1)]
        cases.append(("interleaved", p, p * dice.randint(1, 4), v))
    for name, p, m, v in cases:
        truth = peak_activations(schedule(name, p, m, v))
        _judge_in_flight(answer(name, p, m, v), truth, name, p, m, v)
    return f"{len(cases)} pipelines; with v stages on a rank, one of them counts 1/v."


def _judge_in_flight(got: object, truth: Sequence[float], name: str, p: int, m: int, v: int) -> None:
    case = f"{name}, p={p}, m={m}" + (f", v={v}" if v > 1 else "")
    if not isinstance(got, Sequence) or len(got) != p:
        raise Wrong(f"Return one number for each of the {p} ranks ({case}).")
    if all(close(mine, right) for mine, right in zip(got, truth, strict=True)):
        return
    if all(close(mine, right) for mine, right in zip(reversed(got), truth, strict=True)):
        raise Wrong(
            f"The ranks are turned round: rank 0 starts first and gets its first backward last, so it holds most "
            f"({case})."
        )
    if name == "interleaved" and all(close(mine, right * v) for mine, right in zip(got, truth, strict=True)):
        raise Wrong(f"Those are stages; one of the v={v} stages of a rank counts 1/v ({case}).")
    if max(map(float, got)) > m:
        raise Wrong(f"A rank holds more micro-batches than the step has, m={m} ({case}).")
    if name == "1f1b" and len(set(got)) == 1:
        raise Wrong(
            f"Only rank 0 holds min(m, p): every rank behind it gets its first backward two slots sooner, and holds "
            f"one less ({case})."
        )
    if name == "gpipe":
        raise Wrong(f"GPipe runs every forward before the first backward, so every rank holds all m ({case}).")
    if name == "naive":
        raise Wrong(f"The naive schedule finishes a micro-batch before it starts the next ({case}).")
    if name == "interleaved" and all(close(mine, min(m, p - i)) for i, mine in enumerate(got)):
        raise Wrong(
            f"That is plain 1F1B. Interleaving runs more forwards before the first backward, and holds more ({case})."
        )
    raise Wrong(f"A rank holds its warm-up forwards and one more: rank 0 holds {truth[0]:g}, not {got[0]} ({case}).")


# --- 1F1B --------------------------------------------------------------------------------------------------


@check
def one_f_one_b_schedule(answer: Callable[[int, int], Rows]) -> str:
    """Judge `one_f_one_b_schedule(p, m)`: a valid schedule, no slower than 1F1B and no fuller."""
    cases = [(4, 8), (4, 4), (2, 6), (3, 5), (1, 3), (4, 2), (6, 13)]
    for p, m in cases:
        _judge_1f1b(answer(p, m), p, m)
    return f"{len(cases)} pipelines; p=4, m=8 takes 33, as GPipe does, and holds 4, 3, 2, 1."


def _judge_1f1b(rows: Rows, p: int, m: int) -> Schedule:
    mine, case = _valid(rows, p, m), f"p={p}, m={m}"
    if any(action.kind in "IW" for rank in range(p) for action in mine.actions(rank)):
        raise Wrong(f"1F1B runs whole backwards, B; I and W are what zero bubble adds ({case}).")
    held, right = peak_activations(mine), peak_activations(one_f_one_b(p, m))
    if m > p and all(count == m for count in held):
        raise Wrong(
            f"It runs, and it is GPipe: all forwards first, so every rank holds m={m}; start a backward as soon as "
            f"there is one ({case})."
        )
    if fuller := [i for i in range(p) if held[i] > right[i]]:
        i = fuller[0]
        raise Wrong(
            f"It runs, but rank {i} holds {held[i]:g} micro-batches where 1F1B holds {right[i]:g}: warm up with "
            f"p - 1 - i = {p - 1 - i} forwards ({case})."
        )
    for rank in range(p):
        order = [action.microbatch for action in mine.actions(rank) if action.kind == "B"]
        if order != sorted(order):
            raise Wrong(
                f"It runs, but rank {rank} goes backward in the order {', '.join(map(str, order[:4]))}, ...: the oldest "
                f"micro-batch has its gradient first, a queue and not a stack ({case})."
            )
    took, needed = simulate(mine).makespan, simulate(one_f_one_b(p, m)).makespan
    if took > needed + 1e-9:
        raise Wrong(
            f"It runs, but takes {took:g} forward times where 1F1B takes {needed:g}: with fewer than p - 1 - i "
            f"forwards in front a rank waits for its gradient in every round ({case})."
        )
    return mine


def _valid(rows: object, p: int, m: int) -> Schedule:
    """Return the learner's schedule, or say which idea keeps it from running."""
    if isinstance(rows, str) or not isinstance(rows, Sequence) or len(rows) != p:
        raise Wrong(f"Return a list with one row of actions for each of the {p} ranks.")
    if odd := [row for row in rows if not isinstance(row, str | Sequence)]:
        raise Wrong(f'A row is text, such as "0F0 0F1 0B0 0B1", and not {odd[0]!r}.')
    try:
        mine = parse_schedule(list(rows))
        if (mine.num_stages, mine.num_microbatches) != (p, m) or mine.placement != tuple(range(p)):
            raise Wrong(
                f"Stage i belongs to rank i, and there are p={p} stages and m={m} micro-batches; yours has "
                f"{mine.num_stages} and {mine.num_microbatches}."
            )
        validate(mine)
    except ScheduleError as error:
        reason = "; ".join(line.strip() for line in error.reason.splitlines())
        raise Wrong(f"It cannot run (p={p}, m={m}): {reason[:250]}.") from None
    except ValueError as error:
        raise Wrong(f"It cannot be read (p={p}, m={m}): {str(error).splitlines()[0][:250]}.") from None
    return mine


# --- Done when ---------------------------------------------------------------------------------------------


@check
def explain_1f1b(answer: Callable[[int, int], Mapping[str, object]], seed: int = 11) -> str:
    """Judge `explain_1f1b(p, m)`: both bubbles, the counts in flight, a valid schedule, and what 1F1B saves."""
    dice = random.Random(seed)
    cases = [(4, 8), (4, 16), (8, 8), (4, 3)] + [(dice.randint(2, 9), dice.randint(1, 20)) for _ in range(12)]
    for p, m in cases:
        got = _named(
            answer(p, m),
            "schedule",
            "bubble_over_ideal",
            "bubble_over_total",
            "in_flight",
            "bubble_saved",
            "in_flight_saved",
        )
        mine = _judge_1f1b(got["schedule"], p, m)
        timeline, gpipe = simulate(mine), simulate(schedule("gpipe", p, m))
        # The numbers must be those of the learner's own schedule.
        ours = {"over_ideal": got["bubble_over_ideal"], "over_total": got["bubble_over_total"]}
        _judge_bubbles(ours, timeline, p, m, 1)
        _judge_in_flight(got["in_flight"], timeline.peak_in_flight, "1f1b", p, m, 1)
        saved = gpipe.bubble_over_ideal - timeline.bubble_over_ideal
        if abs(float(got["bubble_saved"]) - saved) > 1e-9:
            raise Wrong(
                f"1F1B saves none of GPipe's bubble: both wait (p - 1)(F + B), at the ends or in the middle "
                f"(p={p}, m={m})."
            )
        less = [a - b for a, b in zip(gpipe.peak_in_flight, timeline.peak_in_flight, strict=True)]
        if list(map(float, got["in_flight_saved"])) != less:
            raise Wrong(
                f"GPipe holds m={m} on every rank and 1F1B min(m, p - i), so it saves the difference, {less[0]:g} "
                f"on rank 0 and {less[-1]:g} on the last (p={p}, m={m})."
            )
    return f"{len(cases)} pipelines explained: 1F1B has GPipe's bubble and a fraction of its activations."


# --- better than 1F1B --------------------------------------------------------------------------------------


@check
def beat_1f1b(answer: Callable[[int, int], Rows]) -> str:
    """Judge `beat_1f1b(p, m)`: shorter than 1F1B where F, I and W take 1 each, and at most p held on any rank."""
    unit = {"forward": 1, "input": 1, "weight": 1}
    score = ""
    for p, m in ((2, 4), (3, 6), (4, 8), (5, 10), (4, 16)):
        mine = simulate(_valid(answer(p, m), p, m), **unit)
        rival, best = simulate(one_f_one_b(p, m), **unit), simulate(zb_h1(p, m), **unit)
        fullest = max(mine.peak_in_flight)
        if fullest > p:
            raise Wrong(
                f"It takes {mine.makespan:g} against {rival.makespan:g}, but a rank holds {fullest:g} micro-batches "
                f"from F until W and 1F1B at most {p}: time was bought with memory (p={p}, m={m})."
            )
        if mine.makespan >= rival.makespan:
            raise Wrong(
                f"It takes {mine.makespan:g}, no less than the {rival.makespan:g} of 1F1B: let the rank before you "
                f"have its gradient first, and do your weights while you would wait (p={p}, m={m})."
            )
        if (p, m) == (4, 8):
            score = f"p=4, m=8: {mine.makespan:g} against {rival.makespan:g} of 1F1B; ZB-H1 takes {best.makespan:g}."
    return score


def _named(got: object, *names: str) -> Mapping[str, object]:
    if not isinstance(got, Mapping) or set(names) - set(got):
        raise Wrong(f"Return a dictionary with the keys {', '.join(names)}.")
    return got
