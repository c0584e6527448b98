"""Planted defects of rung 04: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from collections import deque, namedtuple
from fractions import Fraction
from itertools import count, repeat
from types import SimpleNamespace

import numpy as np

from lablib.calc.schedules import interleaved, one_f_one_b, schedule, simulate, to_csv, zb_h1
from tests.planted import listed, told
from tests.scripts import load

_solution = load("labs/solutions/rung04.py")


_Bubbles = namedtuple("_Bubbles", "over_ideal over_total")


def _both(shares):
    """Return an answer from both shares of the idle time: `shares(p, m, v)`."""
    return lambda p, m, v: dict(zip(("over_ideal", "over_total"), shares(p, m, v), strict=True))


class bubbles:
    names_exchanged = _both(lambda p, m, v: ((p - 1) / (v * m + p - 1), (p - 1) / (v * m)))
    one_bubble_for_both = _both(lambda p, m, v: ((p - 1) / (v * m), (p - 1) / (v * m)))
    p_boundaries = _both(lambda p, m, v: (p / (v * m), p / (v * m + p)))
    forgets_interleaving = _both(lambda p, m, v: ((p - 1) / m, (p - 1) / (m + p - 1)))
    more_stages_more_bubble = _both(lambda p, m, v: (v * (p - 1) / m, v * (p - 1) / (m + v * (p - 1))))
    utilisation_for_bubble = _both(lambda p, m, v: ((p - 1) / (v * m), v * m / (v * m + p - 1)))
    naive_bubble = _both(lambda p, m, v: (p - 1, (p - 1) / p))
    divides_the_share_by_v = _both(lambda p, m, v: ((p - 1) / (v * m), (p - 1) / (m + p - 1) / v))
    in_percent = _both(lambda p, m, v: (100 * (p - 1) / (v * m), 100 * (p - 1) / (v * m + p - 1)))
    idle_over_all_slots_of_all_ranks = _both(lambda p, m, v: ((p - 1) / (v * m * p), (p - 1) / (p * (v * m + p - 1))))
    counts_all_stages_as_ranks = _both(lambda p, m, v: ((p * v - 1) / (v * m), (p * v - 1) / (v * m + p * v - 1)))
    fills_and_drains_twice = _both(lambda p, m, v: (2 * (p - 1) / (v * m), 2 * (p - 1) / (v * m + 2 * (p - 1))))
    idle_of_all_ranks = _both(lambda p, m, v: (p * (p - 1) / (v * m), p * (p - 1) / (v * m + p - 1)))
    to_two_digits = _both(lambda p, m, v: (round((p - 1) / (v * m), 2), round((p - 1) / (v * m + p - 1), 2)))

    def right(p, m, v):
        """Add up a step of unit times on one rank."""
        work = 3 * m
        makespan = work + 3 * (p - 1) / v
        return {"over_ideal": makespan / work - 1, "over_total": 1 - work / makespan}

    def right_2(p, m, v):
        """Run it on paper."""
        step = simulate(interleaved(p, m, v))
        return {"over_ideal": Fraction(step.bubble_over_ideal), "over_total": np.float64(step.bubble_over_total)}

    def right_3(p, m, v):
        """One bubble from the other: shares of the same idle time."""
        over_total = (p - 1) / (v * m + p - 1)
        return {"over_total": over_total, "over_ideal": over_total / (1 - over_total), "note": "no other key matters"}

    def right_4(p, m, v):
        """A named tuple; the way down by recursion."""
        down = lambda i: down(i - 1) + 1 / v if i else 0
        return _Bubbles(down(p - 1) / m, down(p - 1) / (m + down(p - 1)))


def _held(name, p, m, v):
    if name == "interleaved":
        return [min(m * v, 2 * (p - 1 - i) + p * (v - 1) + 1) / v for i in range(p)]
    return {"naive": [1] * p, "gpipe": [m] * p, "1f1b": [min(m, p - i) for i in range(p)]}[name]


def _but(other, held):
    """Return an answer that is right but for one schedule, for which it is `held(p, m, v)`."""
    return lambda name, p, m, v: held(p, m, v) if name == other else _held(name, p, m, v)


class in_flight:
    p_on_every_rank = _but("1f1b", lambda p, m, v: [min(m, p)] * p)
    last_rank_holds_most = _but("1f1b", lambda p, m, v: [min(m, i + 1) for i in range(p)])
    more_than_there_are = _but("1f1b", lambda p, m, v: [p - i for i in range(p)])
    warmup_without_the_one_at_work = _but("1f1b", lambda p, m, v: [min(m, p - 1 - i) for i in range(p)])
    interleaved_like_plain = _but("interleaved", lambda p, m, v: [min(m, p - i) for i in range(p)])
    counts_stages_as_whole = lambda name, p, m, v: [count * v for count in _held(name, p, m, v)]
    gpipe_holds_what_1f1b_holds = _but("gpipe", lambda p, m, v: _held("1f1b", p, m, v))
    naive_on_rank_0_alone = _but("naive", lambda p, m, v: [1] + [0] * (p - 1))
    naive_holds_all = _but("naive", lambda p, m, v: _held("gpipe", p, m, v))
    first_rank_of_interleaved_less_one_each = _but(
        "interleaved", lambda p, m, v: [p * (1 + (p - 1) / (p * v)) - i for i in range(p)]
    )
    one_warm_up_forward_for_each_hop = _but(
        "interleaved", lambda p, m, v: [min(m * v, p - 1 - i + p * (v - 1) + 1) / v for i in range(p)]
    )
    yields_without_end = lambda name, p, m, v: count()
    in_whole_micro_batches = lambda name, p, m, v: [round(held) for held in _held(name, p, m, v)]

    def right(name, p, m, v):
        """How many forwards a rank runs before its first backward; then one out, one in."""
        before = {
            "naive": lambda i: 1,
            "gpipe": lambda i: m,
            "1f1b": lambda i: p - 1 - i + 1,
            "interleaved": lambda i: (v - 1) * p + 2 * (p - 1 - i) + 1,
        }[name]
        held = []
        for i in range(p):
            count = 0
            for _ in range(m * v):
                if count < before(i):
                    count += 1
            held.append(count / v)
        return held

    def right_2(name, p, m, v):
        """Count along the schedule."""
        most = []
        for actions in schedule(name, p, m, v).ranks:
            changes = np.cumsum([1 if action.kind == "F" else -1 for action in actions])
            most.append(max(changes) / v)
        return np.array(most)

    def right_3(name, p, m, v):
        """From the last rank up, a generator of fractions."""
        step = {"1f1b": 1, "interleaved": Fraction(2, v)}.get(name, 0)
        last = {"gpipe": m, "interleaved": Fraction(p * (v - 1) + 1, v)}.get(name, 1)
        return (float(min(m, last + step * (p - 1 - i))) for i in range(p))

    # A dictionary of ranks, the last rank first.
    right_4 = lambda name, p, m, v: {i: _held(name, p, m, v)[i] for i in reversed(range(p))}


def _rows(p, m, warmups):
    rows = []
    for i in range(p):
        warmup = min(m, warmups(i))
        row = [f"{i}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            row += [f"{i}F{k}", f"{i}B{k - warmup}"]
        rows.append(" ".join(row + [f"{i}B{k}" for k in range(m - warmup, m)]))
    return rows


def _plain(p, m):
    return _rows(p, m, lambda i: p - 1 - i)


def _halved(row, first, second):
    """Return a row with two actions of these kinds in place of each backward."""
    return " ".join(f"{a.replace('B', first)} {a.replace('B', second)}" if "B" in a else a for a in row.split())


class one_f_one_b_schedule:
    all_forwards_first = lambda p, m: _rows(p, m, lambda i: m)
    one_forward_too_many = lambda p, m: _rows(p, m, lambda i: p - i)
    no_warmup = lambda p, m: _rows(p, m, lambda i: 0)
    warmup_turned_round = lambda p, m: _rows(p, m, lambda i: i)

    def warms_up_beyond_the_step(p, m):
        """Right for m >= p; with fewer the warm-up runs past them, and the backwards at the end begin below 0."""
        rows = []
        for i in range(p):
            warmup = p - 1 - i
            row = [f"{i}F{k}" for k in range(warmup)]
            for k in range(warmup, m):
                row += [f"{i}F{k}", f"{i}B{k - warmup}"]
            rows.append(row + [f"{i}B{k}" for k in range(m - warmup, m)])
        return rows

    loses_the_last_backwards = told(_plain, lambda rows: [row.rsplit(" ", 1)[0] for row in rows])
    backward_before_forward = told(
        _plain, lambda rows, p, m: [*rows[:-1], " ".join(f"{p - 1}B{k} {p - 1}F{k}" for k in range(m))]
    )

    def newest_backward_first(p, m):
        """A stack where a queue belongs: the last stage keeps the order and the others turn it round."""
        rows = []
        for i, row in enumerate(_plain(p, m)):
            steps, held = [], []
            for action in row.split():
                if "F" in action:
                    held.append(int(action.split("F")[1]))
                    steps.append(action)
                else:
                    steps.append(f"{i}B{held.pop()}")
            rows.append(" ".join(steps))
        return rows

    splits_the_backward = told(_plain, lambda rows: [_halved(row, "I", "W") for row in rows])
    one_step_for_forward_and_backward = told(
        _plain, lambda rows, p: [f"({p - 1}F1;{p - 1}B0)OVERLAP_F_B {row}" for row in rows]
    )
    rows_without_end = lambda p, m: repeat("0F0 0B0")
    a_row_without_end = lambda p, m: [repeat("0F0")] * p
    micro_batches_from_one = told(
        _plain, lambda rows: [" ".join(f"{a[:2]}{int(a[2:]) + 1}" for a in row.split()) for row in rows]
    )
    ranks_without_order = told(_plain, lambda rows: set(rows))
    counts_for_rows = lambda p, m: [2 * m] * p
    one_stage_for_all = lambda p, m: [" ".join(f"0{kind}{k}" for k in range(m) for kind in "FB")] * p

    def never_ends(p, m):
        row, forwards = [], 0
        while len(row) < 2 * m:
            if forwards < m:
                row.append(f"0F{forwards}")
                forwards += 1
        return [row] * p

    def right(p, m):
        """Hold at most min(m, p - i); at the limit go backward, below it forward."""
        rows = []
        for i in range(p):
            limit, forwards, backwards, row = min(m, p - i), 0, 0, []
            while backwards < m:
                if forwards < m and forwards - backwards < limit:
                    row.append(f"{i}F{forwards}")
                    forwards += 1
                else:
                    row.append(f"{i}B{backwards}")
                    backwards += 1
            rows.append(" ".join(row))
        return rows

    # PyTorch's CSV, from the calculator.
    right_2 = lambda p, m: to_csv(one_f_one_b(p, m))

    def right_3(p, m):
        """Backwards before forwards where both can run, micro-batches from the last to the first, one text."""
        lines = []
        for i in range(p):
            warmup = min(m, p - i)
            row = [f"{i}F{m - 1 - k}" for k in range(warmup)]
            for k in range(m):
                row.append(f"{i}B{m - 1 - k}")
                row += [f"{i}F{m - 1 - k - warmup}"] * (k + warmup < m)
            lines.append(f"rank {i}: " + ", ".join(row))
        return "\n".join(lines)

    def right_4(p, m):
        """A chart: ranks in a dictionary, tuples of cells with idle slots."""
        return {i: (None,) * i + tuple(row.split()) for i, row in enumerate(_plain(p, m))}

    def right_5(p, m):
        """Search: whoever can go backward does; tuples of stage, kind and micro-batch, yielded."""
        done, rows = [[0, 0] for _ in range(p)], [[] for _ in range(p)]
        while any(backwards < m for _, backwards in done):
            for i in reversed(range(p)):
                forwards, backwards = done[i]
                if backwards < forwards and (i == p - 1 or done[i + 1][1] > backwards):
                    rows[i].append((i, "B", backwards))
                    done[i][1] += 1
                elif forwards < m and forwards - backwards < p - i and (i == 0 or done[i - 1][0] > forwards):
                    rows[i].append((i, "F", forwards))
                    done[i][0] += 1
        return (iter(row) for row in rows)

    def right_6(p, m):
        """A text with the numbers of the ranks in front, and bars between the actions."""
        return "\n".join(f"Rank {i}: " + row.replace(" ", " | ") for i, row in enumerate(_plain(p, m)))


def _halves(p, m, warmups, late):
    rows = []
    for i, row in enumerate(_rows(p, m, warmups)):
        steps, done = [], 0
        for action in row.split():
            steps.append(action.replace("B", "I"))
            if "B" in action and int(action.split("B")[1]) >= late(i):
                steps.append(f"{i}W{done}")
                done += 1
        rows.append(" ".join(steps + [f"{i}W{k}" for k in range(done, m)]))
    return rows


def _greedy(p, m, order):
    """Fill unit slots: each rank runs the first of the kinds in `order` that it can."""
    ends, rows, count = {}, [[] for _ in range(p)], [dict.fromkeys("FIW", 0) for _ in range(p)]
    slot = 0
    while any(c["W"] < m for c in count):
        started = []
        for i, c in enumerate(count):
            gradient = i == p - 1 or ends.get(("I", i + 1, c["I"]), slot + 1) <= slot
            value = i == 0 or ends.get(("F", i - 1, c["F"]), slot + 1) <= slot
            can = {
                "F": c["F"] < m and c["F"] - c["I"] < p - i and c["F"] - c["W"] < p and value,
                "I": c["I"] < c["F"] and gradient,
                "W": c["W"] < c["I"],
            }
            if kind := next((kind for kind in order if can[kind]), None):
                started.append((kind, i, c[kind]))
                rows[i].append(f"{i}{kind}{c[kind]}")
                c[kind] += 1
        slot += 1
        ends |= dict.fromkeys(started, slot)
    return [" ".join(row) for row in rows]


class beat_1f1b:
    plain_1f1b = lambda p, m: _plain(p, m)
    twice_the_warmup = lambda p, m: _halves(p, m, lambda i: 2 * (p - 1 - i), lambda i: 2 * i)
    all_weights_at_the_end = lambda p, m: _halves(p, m, lambda i: p - 1 - i, lambda i: m)
    weights_before_inputs = told(_plain, lambda rows: [_halved(row, "W", "I") for row in rows])
    never_does_the_weights = told(_plain, lambda rows: [row.replace("B", "I") for row in rows])

    # As PyTorch's CSV, the halves of each backward beside each other.
    right = told(_plain, lambda rows: [_halved(row, "I", "W").replace(" ", ",") for row in rows])

    # Slot by slot: a gradient first, then a forward, and weights while nothing else can run.
    right_2 = lambda p, m: _greedy(p, m, "IFW")

    def right_3(p, m):
        """Split the last backward alone on each rank but the first: the way up is then no longer than with all split."""
        rows = []
        for i, row in enumerate(_plain(p, m)):
            cells = row.split()
            cells[-1:] = [f"{i}I{m - 1}", f"{i}W{m - 1}"]
            rows.append(cells)
        return rows


class match_zb_h1:
    plain_1f1b = lambda p, m: beat_1f1b.plain_1f1b(p, m)
    weights_at_once = lambda p, m: beat_1f1b.right(p, m)
    twice_the_warmup = lambda p, m: beat_1f1b.twice_the_warmup(p, m)
    all_weights_at_the_end = lambda p, m: beat_1f1b.all_weights_at_the_end(p, m)
    late_on_the_early_ranks = lambda p, m: _halves(p, m, lambda i: p - 1 - i, lambda i: p - 1 - i)
    forwards_last = lambda p, m: _greedy(p, m, "IWF")
    gradients_before_forwards = lambda p, m: _greedy(p, m, "IFW")
    # Slot by slot: a forward if the rank may hold one more, else a gradient, else weights.
    right = lambda p, m: _greedy(p, m, "FIW")
    # From the calculator, as lists of its actions.
    right_2 = lambda p, m: [list(rank) for rank in zb_h1(p, m).ranks]

    def right_3(p, m):
        """A queue of weight halves on each rank, in which never more than i wait."""
        text = ""
        for i, plain in enumerate(_plain(p, m)):
            row, waiting = [], deque()
            for action in plain.split():
                row.append(action.replace("B", "I"))
                if "B" in action:
                    waiting.append(action.replace("B", "W"))
                if len(waiting) > i:
                    row.append(waiting.popleft())
            text += f"rank {i}: " + ", ".join([*row, *waiting]) + "\n"
        return text


def _explained(**changes):
    """Return an answer in which these entries are other ones, each made of the right answer and of what was asked."""

    def answer(before, after):
        got = dict(_solution.explain_1f1b(before, after))
        return got | {key: change(got, before, after) for key, change in changes.items()}

    return answer


def _takes_for(name, sign):
    """Return an answer that takes whatever shows a sign for the one change: `sign(before, after)`."""
    return _explained(changed=lambda got, b, a: name if sign(b, a) else got["changed"])


def _idle_share(a):
    return a["idle"][0] / (a["busy"][0] + a["idle"][0])


class explain_1f1b:
    without_the_idea_shorter_waits_are_smaller_micro_batches = _takes_for(
        "smaller micro-batches", lambda b, a: a["idle"][0] < b["idle"][0]
    )
    less_held_is_another_order = _takes_for("1f1b for gpipe", lambda b, a: a["held"][0] < b["held"][0])
    more_held_is_more_stages = _takes_for(
        "more stages a rank", lambda b, a: a["held"][-1] > b["held"][-1] and a["busy"] == b["busy"]
    )
    the_order_stays = _explained(schedule=lambda got, b, a: b["schedule"])
    halves_are_still_1f1b = _explained(schedule=lambda got, b, a: got["schedule"].replace("zb-h1", "1f1b"))
    same_share_of_idle_time = _explained(idle_over_total=lambda got, b, a: _idle_share(a))
    over_the_ideal_time = _explained(idle_over_total=lambda got, b, a: a["idle"][0] / (2 * a["busy"][0]))
    half_the_share = _explained(idle_over_total=lambda got, b, a: _idle_share(a) / 2)
    holds_twice_as_much = _explained(held=lambda got, b, a: [2 * held for held in a["held"]])
    holds_what_it_held = _explained(held=lambda got, b, a: a["held"])
    in_percent = _explained(idle_over_total=lambda got, b, a: 100 * got["idle_over_total"])
    to_two_digits = _explained(idle_over_total=lambda got, b, a: round(got["idle_over_total"], 2))
    all_hold_what_the_fullest_holds = _explained(held=lambda got, b, a: [max(got["held"])] * len(got["held"]))
    holds_without_end = _explained(held=lambda got, b, a: count())
    any_name_with_the_word = _explained(
        schedule=lambda got, b, a: got["schedule"].replace("interleaved", "not interleaved")
    )
    in_his_own_words = _explained(changed=lambda got, b, a: "the schedule")

    def right(before, after):
        """Ratios of what is seen, and a table of them."""
        ranks = len(after["idle"]) / len(before["idle"])
        work = sum(after["busy"]) / sum(before["busy"])
        waits = after["idle"][-1] / before["idle"][-1]
        sent = after["messages"] / before["messages"]
        changed = {(2, 1): "more ranks", (1, 2): "more micro-batches"}.get((round(ranks), round(work)))
        if changed is None and waits > 0.99:
            changed = "1f1b for gpipe"
        if changed is None and sent == 1:
            changed = "backward in halves"
        if changed is None:
            changed = "smaller micro-batches" if sent == 2 else "more stages a rank"
        new = {"1f1b for gpipe": "1f1b", "more stages a rank": "interleaved", "backward in halves": "zb-h1"}
        name = new.get(changed, before["schedule"])
        total = 2 * sum(after["busy"]) + sum(after["idle"])
        held = np.array(after["held"]) * (1 + (name == "gpipe"))
        return {
            "changed": changed,
            "schedule": name,
            "idle_over_total": np.float64(sum(after["idle"]) / total),
            "held": held,
        }

    def right_2(before, after):
        """From what is held first, as tuples; the share as what is not work."""
        first, last = (after["held"][i] / before["held"][i] for i in (0, -1))
        if len(after["held"]) != len(before["held"]):
            changed = "more ranks"
        elif after["busy"][-1] != before["busy"][-1]:
            changed = "more micro-batches"
        elif after["messages"] == 2 * before["messages"]:
            changed = "smaller micro-batches"
        elif first > 1:
            changed = "more stages a rank"
        elif last > 1:
            changed = "backward in halves"
        else:
            changed = "1f1b for gpipe"
        name = {"1f1b for gpipe": "1F1B", "more stages a rank": "interleaved", "backward in halves": "ZB-H1"}
        name = name.get(changed, before["schedule"])
        work = after["busy"][0]
        share = 1 - 2 * work / (2 * work + after["idle"][0])
        held = tuple(h + h * (name == "gpipe") for h in after["held"])
        return {"changed": changed, "schedule": name, "idle_over_total": share, "held": held}

    def right_3(before, after):
        """An object, names written in other ways, and a dictionary of ranks."""
        got = _solution.explain_1f1b(before, after)
        named = {"interleaved": "Interleaved 1F1B", "zb-h1": "ZB_H1", "1f1b": "1F1B", "gpipe": "GPipe"}
        return SimpleNamespace(
            changed=got["changed"].capitalize(),
            schedule=named[got["schedule"]],
            idle_over_total=got["idle_over_total"],
            held={f"rank {i}": held for i, held in reversed(list(enumerate(got["held"])))},
        )


DEFECTS, SECOND_SOLUTIONS = listed(bubbles, in_flight, one_f_one_b_schedule, beat_1f1b, match_zb_h1, explain_1f1b)
#: What the verdict on a defect must say: that it names the mistake, not only that there is one.
SENTENCES = {
    "in_percent": "percent",
    "divides_the_share_by_v": "not its share",
    "naive_on_rank_0_alone": "comes to every rank",
    "forgets_interleaving": "Interleaving is left out",
    "utilisation_for_bubble": "utilization",
    "first_rank_of_interleaved_less_one_each": "Rank 0 is right",
    "counts_stages_as_whole": "Those are stages",
    "newest_backward_first": "a queue and not a stack",
    "never_ends": "It never ends",
    "warms_up_beyond_the_step": "min(m, p - 1 - i)",
    "weights_at_once": "every W is done at once",
    "counts_all_stages_as_ranks": "however many stages come after it",
    "fills_and_drains_twice": "Counted twice",
    "idle_of_all_ranks": "idle time of all ranks",
    "to_two_digits": "but for rounding",
    "in_whole_micro_batches": "but for rounding",
    "yields_without_end": "never ends",
    "rows_without_end": "never ends",
    "one_step_for_forward_and_backward": "one action at a time",
    "all_hold_what_the_fullest_holds": "GB now and would have",
    "holds_without_end": "never ends",
    "micro_batches_from_one": "counted from 0",
    "any_name_with_the_word": "the schedule is interleaved",
}
