"""Planted defects of rung 04: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from tests.planted import listed


class bubbles:
    def names_exchanged(p, m, v):
        return {"over_ideal": (p - 1) / (v * m + p - 1), "over_total": (p - 1) / (v * m)}

    one_bubble_for_both = lambda p, m, v: {"over_ideal": (p - 1) / (v * m), "over_total": (p - 1) / (v * m)}
    p_boundaries = lambda p, m, v: {"over_ideal": p / (v * m), "over_total": p / (v * m + p)}
    forgets_interleaving = lambda p, m, v: {"over_ideal": (p - 1) / m, "over_total": (p - 1) / (m + p - 1)}

    def more_stages_more_bubble(p, m, v):
        return {"over_ideal": v * (p - 1) / m, "over_total": v * (p - 1) / (m + v * (p - 1))}

    def utilisation_for_bubble(p, m, v):
        return {"over_ideal": (p - 1) / (v * m), "over_total": v * m / (v * m + p - 1)}

    naive_bubble = lambda p, m, v: {"over_ideal": p - 1, "over_total": (p - 1) / p}

    def right(p, m, v):
        """Second solution: add up a step of unit times on one rank."""
        work = 3 * m
        makespan = work + 3 * (p - 1) / v
        return {"over_ideal": makespan / work - 1, "over_total": 1 - work / makespan}


def _held(name, p, m, v):
    if name == "interleaved":
        return [min(m * v, 2 * (p - 1 - i) + p * (v - 1) + 1) / v for i in range(p)]
    return {"naive": [1] * p, "gpipe": [m] * p, "1f1b": [min(m, p - i) for i in range(p)]}[name]


class in_flight:
    p_on_every_rank = lambda name, p, m, v: [min(m, p)] * p if name == "1f1b" else _held(name, p, m, v)

    def last_rank_holds_most(name, p, m, v):
        return [min(m, i + 1) for i in range(p)] if name == "1f1b" else _held(name, p, m, v)

    def more_than_there_are(name, p, m, v):
        return [p - i for i in range(p)] if name == "1f1b" else _held(name, p, m, v)

    def warmup_without_the_one_at_work(name, p, m, v):
        return [min(m, p - 1 - i) for i in range(p)] if name == "1f1b" else _held(name, p, m, v)

    def interleaved_like_plain(name, p, m, v):
        return [min(m, p - i) for i in range(p)] if name == "interleaved" else _held(name, p, m, v)

    counts_stages_as_whole = lambda name, p, m, v: [count * v for count in _held(name, p, m, v)]
    gpipe_holds_what_1f1b_holds = lambda name, p, m, v: _held("1f1b" if name == "gpipe" else name, p, m, v)
    naive_holds_all = lambda name, p, m, v: _held("gpipe" if name == "naive" else name, p, m, v)

    def right(name, p, m, v):
        """Second solution: how many forwards a rank runs before its first backward; then one out, one in."""
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


def _rows(p, m, warmups):
    rows = []
    for i in range(p):
        warmup = min(m, warmups(i))
        row = [f"{i}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            row += [f"{i}F{k}", f"{i}B{k - warmup}"]
        rows.append(" ".join(row + [f"{i}B{k}" for k in range(m - warmup, m)]))
    return rows


class one_f_one_b_schedule:
    all_forwards_first = lambda p, m: _rows(p, m, lambda i: m)
    one_forward_too_many = lambda p, m: _rows(p, m, lambda i: p - i)
    no_warmup = lambda p, m: _rows(p, m, lambda i: 0)
    warmup_turned_round = lambda p, m: _rows(p, m, lambda i: i)

    def loses_the_last_backwards(p, m):
        return [row.rsplit(" ", 1)[0] for row in _rows(p, m, lambda i: p - 1 - i)]

    def backward_before_forward(p, m):
        rows = _rows(p, m, lambda i: p - 1 - i)
        return [*rows[:-1], " ".join(f"{p - 1}B{k} {p - 1}F{k}" for k in range(m))]

    def newest_backward_first(p, m):
        """A stack where a queue belongs: the last stage keeps the order and the others turn it round."""
        rows = []
        for i, row in enumerate(_rows(p, m, lambda i: p - 1 - i)):
            steps, held = [], []
            for action in row.split():
                if "F" in action:
                    held.append(int(action.split("F")[1]))
                    steps.append(action)
                else:
                    steps.append(f"{i}B{held.pop()}")
            rows.append(" ".join(steps))
        return rows

    def splits_the_backward(p, m):
        rows = _rows(p, m, lambda i: p - 1 - i)
        return [
            " ".join(f"{a.replace('B', 'I')} {a.replace('B', 'W')}" if "B" in a else a for a in row.split())
            for row in rows
        ]

    counts_for_rows = lambda p, m: [2 * m] * p

    def right(p, m):
        """Second solution: hold at most min(m, p - i); at the limit go backward, below it forward."""
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


def _explained(p, m, **changes):
    held = [min(m, p - i) for i in range(p)]
    return {
        "schedule": _rows(p, m, lambda i: p - 1 - i),
        "bubble_over_ideal": (p - 1) / m,
        "bubble_over_total": (p - 1) / (m + p - 1),
        "in_flight": held,
        "bubble_saved": 0.0,
        "in_flight_saved": [m - count for count in held],
    } | changes


class explain_1f1b:
    says_1f1b_has_half_the_bubble = lambda p, m: _explained(p, m, bubble_saved=(p - 1) / m / 2)

    def says_1f1b_has_no_bubble(p, m):
        return _explained(p, m, bubble_over_ideal=0.0, bubble_over_total=0.0, bubble_saved=(p - 1) / m)

    def takes_one_bubble_for_the_other(p, m):
        return _explained(p, m, bubble_over_ideal=(p - 1) / (m + p - 1), bubble_over_total=(p - 1) / m)

    saves_the_same_on_every_rank = lambda p, m: _explained(p, m, in_flight_saved=[m - min(m, p)] * p)
    holds_p_everywhere = lambda p, m: _explained(p, m, in_flight=[min(m, p)] * p)

    def explains_with_gpipe(p, m):
        return _explained(p, m, schedule=one_f_one_b_schedule.all_forwards_first(p, m))

    def explains_what_cannot_run(p, m):
        return _explained(p, m, schedule=one_f_one_b_schedule.newest_backward_first(p, m))

    def right(p, m):
        """Second solution: read every number off the schedule itself."""
        rows = one_f_one_b_schedule.right(p, m)
        held = []
        for row in rows:
            now, most = 0, 0
            for action in row.split():
                now += 1 if "F" in action else -1
                most = max(most, now)
            held.append(most)
        slots, work = 3 * (m + p - 1), 3 * m
        return {
            "schedule": rows,
            "bubble_over_ideal": slots / work - 1,
            "bubble_over_total": 1 - work / slots,
            "in_flight": held,
            "bubble_saved": 0,
            "in_flight_saved": [m - count for count in held],
        }


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


class beat_1f1b:
    plain_1f1b = lambda p, m: _rows(p, m, lambda i: p - 1 - i)
    twice_the_warmup = lambda p, m: _halves(p, m, lambda i: 2 * (p - 1 - i), lambda i: 2 * i)
    all_weights_at_the_end = lambda p, m: _halves(p, m, lambda i: p - 1 - i, lambda i: m)

    def weights_before_inputs(p, m):
        rows = beat_1f1b.plain_1f1b(p, m)
        return [
            " ".join(f"{a.replace('B', 'W')} {a.replace('B', 'I')}" if "B" in a else a for a in row.split())
            for row in rows
        ]

    never_does_the_weights = lambda p, m: [row.replace("B", "I") for row in beat_1f1b.plain_1f1b(p, m)]

    def right(p, m):
        """Second solution: fill unit slots greedily: a gradient first, then a forward, and weights while nothing else can run."""
        ends, rows, count = {}, [[] for _ in range(p)], [dict.fromkeys("FIW", 0) for _ in range(p)]
        slot = 0
        while any(c["W"] < m for c in count):
            started = []
            for i, c in enumerate(count):
                gradient = i == p - 1 or ends.get(("I", i + 1, c["I"]), slot + 1) <= slot
                value = i == 0 or ends.get(("F", i - 1, c["F"]), slot + 1) <= slot
                if c["I"] < c["F"] and gradient:
                    kind = "I"
                elif c["F"] < m and c["F"] - c["I"] < p - i and c["F"] - c["W"] < p and value:
                    kind = "F"
                elif c["W"] < c["I"]:
                    kind = "W"
                else:
                    continue
                started.append((kind, i, c[kind]))
                rows[i].append(f"{i}{kind}{c[kind]}")
                c[kind] += 1
            slot += 1
            ends |= dict.fromkeys(started, slot)
        return [" ".join(row) for row in rows]


DEFECTS, SECOND_SOLUTIONS = listed(bubbles, in_flight, one_f_one_b_schedule, explain_1f1b, beat_1f1b)
