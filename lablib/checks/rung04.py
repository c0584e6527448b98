"""The checks of rung 04: two bubbles, micro-batches in flight, a 1F1B that runs, two that beat it, and what changed."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

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
from lablib.checks.judging import Wrong, by_name, check, close, numbers, recognize, refuse

UNIT = {"forward": 1, "input": 1, "weight": 1}


def _by_rank(got: object) -> object:
    """Return the values of a dictionary in the order of their ranks, whose keys are 2 or "rank 2"; else what it is."""
    if not isinstance(got, Mapping):
        return got
    return [got[rank] for rank in sorted(got, key=lambda rank: int(re.sub(r"\D", "", str(rank)) or -1))]


def _rounded(got: object, truth: float, digits: Sequence[int] = (2, 3)) -> bool:
    return close(got, truth, rel=2e-3) or any(close(got, round(truth, digit)) for digit in digits)


def _case(p: int, m: int, v: int = 1) -> str:
    return f"p={p}, m={m}" + (f", v={v}" if v > 1 else "")


# --- bubbles -----------------------------------------------------------------------------------------------

#: What somebody may have meant, for (p, m, v), and the sentence for it; told only if all answers say so.
BUBBLES = [
    (lambda p, m, v: ((p - 1) / (v * m + p - 1), (p - 1) / (v * m)),
     "The two names are exchanged: over ideal time is always the larger one"),
    (lambda p, m, v: (100 * (p - 1) / (v * m), 100 * (p - 1) / (v * m + p - 1)),
     "Those are percent: return shares, so that one is all of the time"),
    (lambda p, m, v: (0, 0), "There is a bubble: the last rank waits until p - 1 forwards have come to it"),
    (lambda p, m, v: ((p - 1) / (v * m),) * 2,
     "The two bubbles are the same number: the ideal time leaves the idle time out, the total time has it in"),
    (lambda p, m, v: ((p - 1) / (v * m + p - 1),) * 2,
     "The two bubbles are the same number: the ideal time leaves the idle time out, the total time has it in"),
    (lambda p, m, v: (p / (v * m), p / (v * m + p)),
     "A micro-batch passes p - 1 boundaries, not p: one stage alone has no bubble"),
    (lambda p, m, v: ((p - 1) / m, (p - 1) / (m + p - 1)),
     "Interleaving is left out: a stage of 1/v of the layers fills the pipeline in 1/v of the time"),
    (lambda p, m, v: ((p - 1) / (v * m), (p - 1) / (m + p - 1) / v),
     "Divide the idle time by v, not its share: the total time gets shorter with it"),
    (lambda p, m, v: (v * (p - 1) / m, v * (p - 1) / (m + v * (p - 1))),
     "More stages on a rank make the bubble smaller, not larger"),
    (lambda p, m, v: ((p * v - 1) / (v * m), (p * v - 1) / (v * m + p * v - 1)),
     "The first stage of the last rank is p - 1 stages behind the first, however many stages come after it"),
    (lambda p, m, v: (2 * (p - 1) / (v * m), 2 * (p - 1) / (v * m + 2 * (p - 1))),
     "Counted twice: filling takes p - 1 forwards and draining p - 1 backwards, together p - 1 times F + B"),
    (lambda p, m, v: (p * (p - 1) / (v * m), p * (p - 1) / (v * m + p - 1)),
     "That is the idle time of all ranks over the time of one"),
    (lambda p, m, v: (p - 1, (p - 1) / p),
     "That is the naive schedule, with one micro-batch in it at a time: m of them share one wait"),
    (lambda p, m, v: ((p - 1) / (v * m), v * m / (v * m + p - 1)),
     "The second is the utilization: the bubble is what is left of the total time"),
]  # fmt: skip


@check(
    idea="Count how long the last rank waits for its first input and after its last one, then divide by two times.",
    section="GPipe: the bubble, derived",
    line="Divide the same idle time, p - 1 slots of a stage, once by the work of a rank and once by work plus idle time.",
)
def bubbles(answer: Callable[[int, int, int], Mapping[str, float]], seed: int = 4) -> str:
    """Judge `bubbles(p, m, v)`: GPipe and 1F1B where v is 1, interleaved 1F1B where it is more."""
    answers, wrong = {}, []
    for (p, m, v), truth in _timed(seed):
        got = by_name(answer(p, m, v), "over_ideal", "over_total")
        answers[p, m, v] = got["over_ideal"], got["over_total"]
        right = [close(got["over_ideal"], truth.bubble_over_ideal), close(got["over_total"], truth.bubble_over_total)]
        if not all(right):
            wrong.append((p * m * v, (p, m, v), right, truth))
    if wrong:
        _, case, right, truth = min(wrong, key=lambda entry: entry[0])
        _say_bubbles(answers, case, [row[2] for row in wrong], truth)
    return "4 stages, 16 micro-batches: 18.8 % of the ideal time, 15.8 % of the total time."


@functools.lru_cache(maxsize=4)
def _timed(seed: int) -> list[tuple[tuple[int, int, int], Timeline]]:
    """Return cases with what the simulator shows, which no formula may miss, whatever the times of F and B."""
    dice = random.Random(seed)
    cases = [(4, 16, 1), (4, 8, 1), (4, 8, 2), (4, 32, 1), (5, 15, 3)]
    for _ in range(15):
        p, v = dice.randint(2, 8), dice.randint(1, 4)
        cases.append((p, p * dice.randint(1, 5), v))
    return [
        ((p, m, v), simulate(interleaved(p, m, v), forward=dice.uniform(0.5, 2), backward=dice.uniform(1, 4)))
        for p, m, v in cases
    ]


def _say_bubbles(answers: Mapping, case: tuple, right: Sequence, truth: Timeline) -> NoReturn:
    ideal, total = answers[case]
    rows = [(sentence, all(all(map(_same, got, meant(*each))) for each, got in answers.items()))
            for meant, sentence in BUBBLES]  # fmt: skip
    rounded = _rounded(ideal, truth.bubble_over_ideal) and _rounded(total, truth.bubble_over_total)
    refuse(
        _case(*case),
        *rows,
        ("Right but for rounding: return the numbers as they are", rounded),
        (
            "Over ideal time is right. The total time is the ideal time and the idle time together",
            all(r[0] for r in right),
        ),
        ("Over total time is right. Divide the same idle time by m (F + B) alone", all(r[1] for r in right)),
    )
    raise Wrong(
        f"I do not know this mistake. The smallest case that fails is {_case(*case)}: a rank works {truth.busy[0]:.4g} and "
        f"idles {truth.idle[0]:.4g}, and you have {float(ideal):.4g} and {float(total):.4g}."
    )


def _same(mine: object, meant: float) -> bool:
    return close(mine, meant) or (meant == 0 and close(float(mine) + 1, 1))  # type: ignore[arg-type]


# --- in flight ---------------------------------------------------------------------------------------------


def _interleaved(p: int, m: int, v: int, per_hop: int = 2, last: int = 1) -> list[float]:
    return [min(m * v, per_hop * (p - 1 - i) + p * (v - 1) + last) / v for i in range(p)]


#: The same for the micro-batches that ranks hold, by the name of the schedule.
HELD = {
    "naive": [
        (lambda p, m, v: [1] + [0] * (p - 1), "The micro-batch comes to every rank, which holds it until its own backward"),
        (lambda p, m, v: [m] * p, "The naive schedule finishes a micro-batch before it starts the next"),
        (lambda p, m, v: [p - i for i in range(p)], "The naive schedule finishes a micro-batch before it starts the next"),
    ],
    "gpipe": [
        (lambda p, m, v: [min(m, p - i) for i in range(p)],
         "That is 1F1B; GPipe runs every forward before the first backward, so every rank holds all m"),
        (lambda p, m, v: [min(m, p)] * p, "GPipe runs every forward before the first backward, so every rank holds all m"),
    ],
    "1f1b": [
        (lambda p, m, v: [min(m, p)] * p,
         "Only rank 0 holds min(m, p): every rank behind it gets its first backward two slots sooner, and holds one less"),
        (lambda p, m, v: [min(m, i + 1) for i in range(p)],
         "The ranks are turned round: rank 0 starts first and gets its first backward last, so it holds most"),
        (lambda p, m, v: [p - i for i in range(p)], "A rank cannot hold more micro-batches than the step has"),
        (lambda p, m, v: [min(m, p - 1 - i) for i in range(p)],
         "Those are the warm-up forwards; one more is at work when the first backward comes"),
        (lambda p, m, v: [m] * p, "That is GPipe; 1F1B starts a backward as soon as there is one"),
    ],
    "interleaved": [
        (lambda p, m, v: [min(m, p - i) for i in range(p)],
         "That is plain 1F1B. Interleaving runs more forwards before the first backward, and holds more"),
        (lambda p, m, v: [v * held for held in _interleaved(p, m, v)],
         "Those are stages; one of the v stages of a rank counts 1/v"),
        (lambda p, m, v: [p * (1 + (p - 1) / (p * v)) - i for i in range(p)],
         "Rank 0 is right. Behind it the warm-up is two stages shorter from rank to rank, and a stage counts 1/v"),
        (lambda p, m, v: [p * (1 + (p - 1) / (p * v))] * p,
         "Rank 0 is right, and it is the fullest: the warm-up gets two stages shorter from rank to rank"),
        (lambda p, m, v: _interleaved(p, m, v, last=0),
         "Those are the warm-up forwards; one more is at work when the first backward comes"),
        (lambda p, m, v: _interleaved(p, m, v, per_hop=1),
         "The warm-up has two forwards for every rank behind this one, one for the way down and one for the way back"),
        (lambda p, m, v: [(2 * (p - 1 - i) + p * (v - 1) + 1) / v for i in range(p)],
         "A rank cannot hold more micro-batches than the step has"),
    ],
}  # fmt: skip


@check(
    idea="A rank holds what has had its forward and not yet its backward; the count is highest before its first backward.",
    section="1F1B: GPipe's bubble with less memory",
    line="Count the forwards in front of the first backward, limit them to what the step has, and divide stages by v.",
)
def in_flight(answer: Callable[[str, int, int, int], Sequence[float]], seed: int = 4) -> str:
    """Judge `in_flight(name, p, m, v)`: the most micro-batches that each rank holds."""
    dice = random.Random(seed)
    cases = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved", 4, 8, 2), ("naive", 4, 8, 1)]
    for _ in range(20):
        p, v = dice.randint(2, 7), dice.randint(2, 4)
        cases += [("gpipe", p, dice.randint(1, 12), 1), ("1f1b", p, dice.randint(1, 12), 1)]
        cases.append(("interleaved", p, p * dice.randint(1, 4), v))
    answers, wrong = {}, []
    for name, p, m, v in cases:
        truth = _most_held(name, p, m, v)
        got = numbers(_by_rank(answer(name, p, m, v)), "What the ranks hold")
        if len(got) != p:
            raise Wrong(f"Return one number for each of the {p} ranks ({name}, {_case(p, m, v)}).")
        answers[name, p, m, v] = got
        if not all(map(_same, got, truth)):
            wrong.append((p * m * v, (name, p, m, v), truth))
    if wrong:
        _say_in_flight(answers, *min(wrong, key=lambda entry: entry[0])[1:])
    return f"{len(cases)} pipelines; with v stages on a rank, one of them counts 1/v."


@functools.cache
def _most_held(name: str, p: int, m: int, v: int) -> Sequence[float]:
    return peak_activations(schedule(name, p, m, v))


def _say_in_flight(answers: Mapping, case: tuple, truth: Sequence[float]) -> NoReturn:
    name, (got, shape) = case[0], (answers[case], case[1:])
    where = f"{name}, {_case(*shape)}"
    alike = {each[1:]: held for each, held in answers.items() if each[0] == name}
    rank = next(i for i in range(len(truth)) if not _same(got[i], truth[i]))
    rows = [(sentence, all(all(map(_same, held, meant(*each))) for each, held in alike.items()))
            for meant, sentence in HELD[name]]  # fmt: skip
    refuse(
        where,
        *rows,
        (f"A rank holds more micro-batches than the step has: rank {rank} {float(got[rank]):g}", float(got[rank]) > shape[1]),
        ("Right but for rounding: return the numbers as they are",
         all(_rounded(mine, held, digits=(0, 1, 2, 3)) for mine, held in zip(got, truth, strict=True))),
    )  # fmt: skip
    raise Wrong(
        f"I do not know this mistake. The smallest case that fails is {where}: rank {rank} holds {truth[rank]:.5g}, "
        f"and you have {float(got[rank]):.5g}."
    )


# --- 1F1B --------------------------------------------------------------------------------------------------

_IDLE = {"", ".", "-", "_", ":", "NONE"}


def _rows(answer: object, p: int) -> list[list[str]]:
    """Return the cells of an answer: a text, PyTorch's CSV, or rows of text or of actions; cells that idle are dropped."""
    if isinstance(answer, Timeline):
        answer = answer.schedule
    if isinstance(answer, Schedule):
        answer = answer.ranks
    if isinstance(answer, str):
        answer = [line for line in answer.splitlines() if line.strip()]
    answer = _by_rank(answer)
    if isinstance(answer, set | frozenset) or not hasattr(answer, "__iter__"):
        raise Wrong(f"Return a list with one row of actions for each of the {p} ranks; you return {str(answer)[:80]}.")
    rows = []
    for row in answer:
        if "OVERLAP" in str(row):
            raise Wrong("A rank runs one action at a time here: a forward and a backward as one step are DualPipe's.")
        if isinstance(row, str):
            row = re.split(r"[\s,;|>]+", re.sub(r"^\s*(rank\s*)?\d+\s*:", "", row.strip("[]() "), flags=re.IGNORECASE))
        elif isinstance(row, set | frozenset | bytes) or not hasattr(row, "__iter__"):
            raise Wrong(f'A row is text, such as "0F0 0F1 0B0 0B1", or a list of actions, and not {row!r}.')
        cells = ("".join(map(str, cell)) if type(cell) in (list, tuple) else str(cell) for cell in row)
        cells = (cell.strip("'\" ").upper() for cell in cells)
        rows.append([cell for cell in cells if cell not in _IDLE])
    if len(rows) != p:
        raise Wrong(f"Return one row of actions for each of the {p} ranks; you return {len(rows)}.")
    return rows


def _valid(answer: object, p: int, m: int) -> Schedule:
    """Return the learner's schedule, or say which idea keeps it from running."""
    rows = _rows(answer, p)
    told = [int(found[1]) for row in rows for cell in row if (found := re.search(r"[FBIW](-?\d+)$", cell))]
    beyond = m < p and any(number not in range(m) for number in told)
    few = f"A step of {m} micro-batches has fewer than the p - 1 - i = {p - 1} forwards that rank 0 would warm up with"
    refuse(_case(p, m), (f"{few}: it takes min(m, p - 1 - i), and no more follow", beyond))
    try:
        mine = parse_schedule(rows)
        if (mine.num_stages, mine.num_microbatches) != (p, m):
            raise Wrong(f"There are p={p} stages and m={m} micro-batches, counted from 0; yours has {mine.num_stages} and "
                        f"{mine.num_microbatches}.")  # fmt: skip
        elsewhere = f"Stage i belongs to rank i; in your rows stage 0 runs on rank {mine.placement[0]}"
        refuse(_case(p, m), (elsewhere, mine.placement != tuple(range(p))))
        validate(mine)
    except ScheduleError as error:
        reason = "; ".join(line.strip() for line in error.reason.splitlines())
        raise Wrong(f"It cannot run (p={p}, m={m}): {reason[:250]}.") from None
    except ValueError as error:
        raise Wrong(f"It cannot be read (p={p}, m={m}): {str(error).splitlines()[0][:250]}.") from None
    return mine


@check(
    idea="A rank warms up with as many forwards as there are ranks behind it, so that the last one never runs dry.",
    section="1F1B: GPipe's bubble with less memory",
    line="Take min(m, p - 1 - i) forwards, then a forward and a backward in turn, then the backwards that are left.",
)
def one_f_one_b_schedule(answer: Callable[[int, int], object]) -> str:
    """Judge `one_f_one_b_schedule(p, m)`: a valid schedule, no slower than 1F1B and no fuller."""
    cases = [(2, 3), (3, 5), (1, 3), (4, 4), (4, 8), (4, 2), (6, 13)]
    for p, m in cases:
        _judge_1f1b(answer(p, m), p, m)
    return f"{len(cases)} pipelines; p=4, m=8 takes 33, as GPipe does, and holds 4, 3, 2, 1."


def _judge_1f1b(answer: object, p: int, m: int) -> None:
    mine = _valid(answer, p, m)
    held, right = peak_activations(mine), peak_activations(one_f_one_b(p, m))
    fuller = next((i for i in range(p) if held[i] > right[i]), 0)
    took, needed = simulate(mine).makespan, simulate(one_f_one_b(p, m)).makespan
    refuse(
        _case(p, m),
        ("1F1B runs whole backwards, B; I and W are what zero bubble adds",
         any(action.kind in "IW" for rank in range(p) for action in mine.actions(rank))),
        (f"It runs, and it is GPipe: all forwards first, so every rank holds m={m}; start a backward as soon as there is one",
         m > p and all(count == m for count in held)),
        (f"It runs, but rank {fuller} holds {held[fuller]:g} micro-batches where 1F1B holds {right[fuller]:g}: warm up with "
         f"p - 1 - i = {p - 1 - fuller} forwards", held[fuller] > right[fuller]),
    )  # fmt: skip
    if took <= needed + 1e-9:
        return
    for rank in range(p):
        forwards, backwards = ([a.microbatch for a in mine.actions(rank) if a.kind == kind] for kind in "FB")
        told = f"rank {rank} goes backward in the order {', '.join(map(str, backwards[:4]))}, ..."
        refuse(_case(p, m), (
            f"It runs, but takes {took:g} where 1F1B takes {needed:g}: {told}; the oldest micro-batch has its gradient first, "
            "a queue and not a stack", forwards != backwards,
        ))  # fmt: skip
    raise Wrong(
        f"It runs, but takes {took:g} forward times where 1F1B takes {needed:g}: with fewer than p - 1 - i "
        f"forwards in front a rank waits for its gradient in every round ({_case(p, m)})."
    )


# --- better than 1F1B --------------------------------------------------------------------------------------


@check(
    idea="The rank before you waits only for the gradient of your input, which is half of your backward.",
    section="Zero bubble: the backward in two halves",
    line="Write I and then W where 1F1B has B.",
)
def beat_1f1b(answer: Callable[[int, int], object]) -> str:
    """Judge `beat_1f1b(p, m)`: shorter than 1F1B where F, I and W take 1 each, and at most p held on any rank."""
    score = ""
    for p, m in ((2, 4), (4, 2), (3, 6), (4, 8), (5, 10)):
        mine, rival = _within_memory(answer(p, m), p, m), simulate(one_f_one_b(p, m), **UNIT)
        if mine.makespan >= rival.makespan:
            raise Wrong(
                f"It takes {mine.makespan:g}, no less than the {rival.makespan:g} of 1F1B: let the rank before you "
                f"have its gradient first, and do your weights after it ({_case(p, m)})."
            )
        if (p, m) == (4, 8):
            score = f"p=4, m=8: {mine.makespan:g} against {rival.makespan:g} of 1F1B."
    return score


@check(
    idea="The late ranks hold least and wait longest at the end: keep some of their weight halves for that wait.",
    section="Zero bubble: the backward in two halves",
    line="On rank i let the W of a micro-batch follow the I of the one that comes i later, and append the W that are left.",
)
def match_zb_h1(answer: Callable[[int, int], object]) -> str:
    """Judge `match_zb_h1(p, m)`: no longer than ZB-H1 where F, I and W take 1 each, and at most p held on any rank."""
    score = ""
    for p, m in ((2, 4), (4, 2), (3, 6), (4, 8), (5, 10), (4, 16)):
        mine, best = _within_memory(answer(p, m), p, m), simulate(zb_h1(p, m), **UNIT)
        if mine.makespan > best.makespan + 1e-9:
            split = simulate(one_f_one_b(p, m), **UNIT).makespan - (p - 1)
            why = (
                "the gradients travel at the pace of I, and every W is done at once; the last ranks then wait at the end"
                if close(mine.makespan, split)
                else "some rank waits while it has weight halves to do, or does one while another rank waits for its I"
            )
            raise Wrong(f"It takes {mine.makespan:g} and ZB-H1 {best.makespan:g}: {why} ({_case(p, m)}).")
        if (p, m) == (4, 8):
            better = ", which is less" if mine.makespan < best.makespan else ""
            score = f"p=4, m=8: {mine.makespan:g}, where ZB-H1 takes {best.makespan:g}{better}."
    return score


def _within_memory(answer: object, p: int, m: int) -> Timeline:
    mine = simulate(_valid(answer, p, m), **UNIT)
    fullest = max(mine.peak_in_flight)
    if fullest > p:
        raise Wrong(
            f"It takes {mine.makespan:g}, but rank {mine.peak_in_flight.index(fullest)} holds {fullest:g} micro-batches "
            f"from F until W and 1F1B at most {p}: time was bought with memory ({_case(p, m)})."
        )
    return mine


# --- Done when ---------------------------------------------------------------------------------------------

#: What was changed, and what one sees of it.
CHANGES = {
    "1f1b for gpipe": "the ranks work and wait as long as before and hold less, so only the order of the same work changed",
    "more micro-batches": "the ranks work longer and wait as long as before: filling and draining the pipeline takes what it took",
    "smaller micro-batches": "the work is the same in more pieces: twice the messages, half the wait, and no rank holds more",
    "more stages a rank": "a micro-batch crosses more boundaries, the waits are shorter, and rank 0 holds more than before",
    "backward in halves": "the waits are shorter with the same work and the same messages, and it is the late ranks that hold more",
    "more ranks": "there are more ranks, each with fewer layers, and a longer way to the last one",
}


@check(
    idea="Ask of each number what it depends on: work on m, idle time on the way through the pipeline, memory on the order.",
    section="Choosing p, m and v",
    line="Compare the ranks, the work, the idle time, the messages and what rank 0 holds, in this order, and name the change.",
)
def explain_1f1b(answer: Callable[[Mapping, Mapping], Mapping[str, object]], seed: int = 11) -> str:
    """Judge `explain_1f1b(before, after)`: what one change did to a run, and what twice the micro-batches would do."""
    cases = _changed(seed)
    for change, before, after, name, more in cases:
        asked = "changed", "schedule", "idle_over_total", "held"
        got = by_name(answer(copy.deepcopy(before), copy.deepcopy(after)), *asked)
        seen = f"with {len(before['busy'])} ranks of {before['schedule']}"
        said = " ".join(str(got["changed"]).lower().replace("_", " ").split())
        if said not in CHANGES:
            raise Wrong(f"`changed` is one of {', '.join(map(repr, CHANGES))}, and not {got['changed']!r}.")
        if said != change:
            raise Wrong(f"{seen.capitalize()} you say {got['changed']!r}, but {CHANGES[change]}.")
        said = re.sub(r"[\W_]", "", str(got["schedule"]).lower())
        if said.replace("interleaved1f1b", "interleaved") != name.replace("-", ""):
            raise Wrong(f"After {change!r} {seen} the schedule is {name}, and you say {got['schedule']!r}.")
        _judge_more(got, after, name, more)
    return f"{len(cases)} changes explained, and what each run would do with twice the micro-batches."


@functools.lru_cache(maxsize=4)
def _changed(seed: int) -> list[tuple]:
    dice = random.Random(seed)
    names = ["gpipe", "1f1b", "interleaved"]
    only = {"1f1b for gpipe": "gpipe", "more stages a rank": "1f1b", "backward in halves": "1f1b"}
    return [_observed(change, only.get(change, name), dice) for change in CHANGES for name in names]


def _observed(change: str, name: str, dice: random.Random) -> tuple[str, dict, dict, str, Timeline]:
    """Return a change, what one sees of a run before and after it, its schedule, and the run with twice the micro-batches."""
    p = dice.randint(2, 6)
    m = 2 * p * dice.randint(1, 2)
    forward, size = dice.randint(4, 40) / 256, dice.randint(2, 16) / 4  # sums of such numbers are exact
    before = _run(name, p, m, forward, size)
    if change == "1f1b for gpipe":
        after = _run("1f1b", p, m, forward, size)
    elif change == "more micro-batches":
        after = _run(name, p, 2 * m, forward, size)
    elif change == "smaller micro-batches":
        after = _run(name, p, 2 * m, forward / 2, size / 2)
    elif change == "more stages a rank":
        after = _run("interleaved", p, m, forward, size)
    elif change == "backward in halves":
        after = _run("zb-h1", p, m, forward, size)
    else:
        after = _run(name, 2 * p, 2 * m, forward / 2, size / 2)
        before = _run(name, p, 2 * m, forward, size)
    return change, before[0] | {"schedule": name}, after[0], after[1], after[2]


def _run(name: str, p: int, m: int, forward: float, size: float) -> tuple[dict, str, Timeline]:
    """Return what one sees of a step, its schedule, and the step with twice the micro-batches of the same size."""
    v = 2 if name == "interleaved" else 1
    times = {"forward": forward, "input": 1.25 * forward, "weight": 0.75 * forward}
    once, twice = (simulate(schedule(name, p, count, v), **times) for count in (m, 2 * m))
    # Between I and W a part of a micro-batch stays, as chapter 04 counts it.
    held = [size * count for count in peak_activations(once.schedule, after_input=0.5)]
    seen = {"busy": list(once.busy), "idle": list(once.idle), "held": held, "messages": 2 * m * (p * v - 1)}
    return seen, name, twice


def _judge_more(got: Mapping[str, object], after: Mapping, name: str, more: Timeline) -> None:
    idle, held = got["idle_over_total"], numbers(_by_rank(got["held"]), "held")
    busy, waits, right = after["busy"][0], after["idle"][0], more.bubble_over_total
    if not close(idle, right):
        what = f"Idle time over total time with twice the micro-batches ({name})"
        slips = [
            ("that is percent; return a share, so that one is all of the time", 100 * right),
            ("it is smaller than before: the work doubles, and the wait stays", waits / (busy + waits)),
            ("you have it over the ideal time: the total time has the wait in it, too", waits / (2 * busy)),
            ("the wait does not grow with m: filling and draining the pipeline takes what it took",
             2 * waits / (busy + 2 * waits)),
        ]  # fmt: skip
        refuse("", (f"{what}: right but for rounding; return the number as it is", _rounded(idle, right)))
        recognize(idle, "", [(f"{what}: {why}", value) for why, value in slips])
        raise Wrong(
            f"{what}: a rank that works {busy:.4g} s and waits {waits:.4g} s works twice as long and waits as long."
        )
    grows = 2 if name == "gpipe" else 1
    if len(held) != len(after["held"]):
        raise Wrong(f"`held` has one number for each of the {len(after['held'])} ranks; yours has {len(held)}.")
    wrong = [(i, seen) for i, seen in enumerate(after["held"]) if not close(held[i], grows * seen)]
    if wrong:
        what, (rank, seen) = "What the ranks hold with twice the micro-batches of the same size", wrong[0]
        other = not all(close(mine, (3 - grows) * seen) for mine, seen in zip(held, after["held"], strict=True))
        refuse(
            "",
            (f"{what}: rank {rank} has {seen:g} GB now and would have {grows * seen:g}", other),
            (f"{what}: GPipe holds every micro-batch of the step, so twice as many", name == "gpipe"),
            (
                f"{what}: under {name} a rank goes backward as soon as it can, so what it holds does not depend on m",
                True,
            ),
        )
