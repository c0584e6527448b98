"""Mechanisms that move: each turns the steps that a calculator made into pieces, and says every step in a sentence.

ring_all_reduce   chunks that go round and are added       chapter 02
schedules         a pipeline, and what its ranks hold      chapter 04
gather_release    a unit's shards, gathered and freed      chapter 06
ring_attention    keys that go round under a causal mask   chapter 12
dispatch_combine  copies of tokens at their experts        chapter 13
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lablib.calc.communication import ring_states
from lablib.calc.parallel import ORDERS, TimedUnit, data_parallel_step, ring_work, token_owners
from lablib.calc.schedules import Timeline
from lablib.live.pipeline import KINDS, LEFT, ROW
from lablib.live.steps import Piece, Place, stepped
from lablib.live.svg import WIDTH, legend, rect, text

#: One colour for each thing of which several are told apart.
HUES = ("weights", "gradients", "optimizer", "activations", "forward", "backward")
LETTERS = "ABCDEFGH"


def cell(words: str, role: str, wide: float, tall: float, *, pale: bool = True) -> str:
    """Return a box with words in it, at the origin."""
    return rect(0, 0, wide, tall, role, pale=pale) + text(wide / 2, tall / 2 + 4, words, anchor="middle")


def shown(count: int, steps: Sequence[int], x: float, y: float) -> list[Place]:
    """Return the places of what stands still, and is there in some steps only."""
    return [(x, y) if step in steps else None for step in range(count)]


def ring_all_reduce(ranks: int = 4) -> str:
    """Return the ring: a column for each rank, a row for each chunk, the digits of a number say whose it sums."""
    states = ring_states(ranks)
    half, count = ranks - 1, len(states)
    column, tall = WIDTH / ranks, 26.0
    wide = column - 16
    still, pieces, sentences = [], [], []

    def spot(rank: int, chunk: int) -> tuple[float, float]:
        return rank * column + 8, 24 + chunk * (tall + 5)

    for rank in range(ranks):
        still.append(text(rank * column + column / 2, 14, f"rank {rank}", anchor="middle", bold=True))
        for chunk in range(ranks):
            values = ["".join("1" if other in state[rank][chunk] else "0" for other in reversed(range(ranks))).lstrip("0")
                      for state in states]  # fmt: skip
            for value in dict.fromkeys(values):
                role = "optimizer" if "0" not in value and len(value) == ranks else "gradients"
                steps = [step for step, one in enumerate(values) if one == value]
                pieces.append(Piece(shape=cell(value, role, wide, tall), at=shown(count, steps, *spot(rank, chunk))))
    for step in range(1, count):
        reducing = step <= half
        moves = [
            (
                rank,
                next(
                    c
                    for c in range(ranks)
                    if states[step][(rank + 1) % ranks][c] != states[step - 1][(rank + 1) % ranks][c]
                ),
            )
            for rank in range(ranks)
        ]
        for rank, chunk in moves:
            at: list[Place] = [None] * count
            at[step - 1], at[step] = spot(rank, chunk), spot((rank + 1) % ranks, chunk)
            pieces.append(Piece(shape=rect(0, 0, wide, tall, "", outline=2.5), at=at))
        rank, chunk = moves[0]
        value = "".join("1" if r in states[step][1 % ranks][chunk] else "0" for r in reversed(range(ranks))).lstrip("0")
        name, does = ("Reduce-scatter", "adds it") if reducing else ("All-gather", "keeps it as it is")
        sentences.append(
            f"{name}, step {step if reducing else step - half}: every rank sends one chunk to the right. Rank {rank} sends "
            f"chunk {chunk}, and rank {(rank + 1) % ranks} {does}: {value}. So far each rank has sent {step} of its "
            f"{2 * half} chunks."
        )
    start = f"Rank r holds 10 to the r, so a digit 1 says who is in a sum. The outlined chunks leave next; rank {ranks - 1} sends to rank 0."
    end = 24 + ranks * (tall + 5)
    alt = f"A ring all-reduce of {ranks} ranks: a column of {ranks} chunks for each, in {count - 1} steps."
    return stepped(still, pieces, [start, *sentences], height=end, alt=alt, first=half)


def schedules(timelines: Mapping[str, Timeline]) -> str:
    """Return schedules over time under one play head, and beside each rank what it holds then."""
    right = WIDTH - 96.0
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = (right - LEFT) / longest
    most = max(held for timeline in timelines.values() for held in timeline.peak_in_flight)
    times = sorted({0.0, *(e for t in timelines.values() for event in t.events for e in (event.start, event.end))})
    still, pieces, y, ends = [], [], 0.0, []
    for name, timeline in timelines.items():
        still += [text(0, y + 12, name, bold=True), text(right + 8, y + 12, "holds", bold=True)]
        for rank, events in enumerate(timeline.ranks):
            top = y + 20 + rank * (ROW + 3)
            still += [text(LEFT - 6, top + 13, f"rank {rank}", anchor="end")]
            still.append(rect(LEFT, top, timeline.makespan * scale, ROW, "idle", pale=True))
            for event in events:
                part = event.action.parts[0]
                x, wide = LEFT + event.start * scale, (event.end - event.start) * scale
                still.append(rect(x, top, wide - 0.6, ROW, KINDS[part.kind]))
                if wide >= 12:
                    still.append(text(x + wide / 2, top + 13, str(part.microbatch), anchor="middle", white=True))
            held = [_at(timeline.held[rank], when) for when in times]
            at = [(right + 8, top, 60 * value / most, 1) if value else None for value in held]
            pieces.append(Piece(shape=rect(0, 0, 1, ROW, "activations"), at=at))
            for value in dict.fromkeys(held):
                steps = [step for step, one in enumerate(held) if one == value]
                pieces.append(
                    Piece(
                        shape=text(0, 0, f"{value:g}"),
                        at=shown(len(times), steps, right + 12 + 60 * value / most, top + 13),
                    )
                )
        ends.append(y + 20)
        y += 28 + len(timeline.ranks) * (ROW + 3)
        head = rect(0, 0, 2, y - ends[-1] - 8, "", outline=2.5)
        pieces.append(Piece(shape=head, at=[(LEFT + when * scale, ends[-1] - 3) for when in times]))
    kinds = {part.kind for t in timelines.values() for event in t.events for part in event.action.parts}
    names, y = legend([words for kind, words in KINDS.items() if kind in kinds] + ["activations", "idle"], top=y)
    sentences = [_schedule_words(timelines, when) for when in times]
    alt = "; ".join(
        f"{name}: {len(t.ranks)} ranks, {t.schedule.num_microbatches} micro-batches, at most {max(t.peak_in_flight):g} held"
        for name, t in timelines.items()
    )
    fullest = max(range(len(times)), key=lambda n: sum(_at(h, times[n]) for t in timelines.values() for h in t.held))
    return stepped(still + names, pieces, sentences, height=y + 4, alt=f"Schedules over time. {alt}.", first=fullest)


def _at(points: Sequence[tuple[float, float]], when: float) -> float:
    return next((value for time, value in reversed(points) if time <= when), 0.0)


def _schedule_words(timelines: Mapping[str, Timeline], when: float) -> str:
    found = []
    for name, timeline in timelines.items():
        working = sum(event.start <= when < event.end for event in timeline.events)
        held = ", ".join(f"{_at(rank, when):g}" for rank in timeline.held)
        found.append(f"{name}: {working} of {len(timeline.ranks)} ranks work, and they hold {held}")
    return f"Time {when:g}. {'. '.join(found)}."


def gather_release(ranks: int = 4) -> str:
    """Return two units whose shards lie on all ranks: each is gathered, run and freed, and its gradients scattered."""
    units = {"A": 0, "B": 1}
    timed = [TimedUnit(name="", bytes=0, gather=0, scatter=0, forward=0, backward=0)]
    timed += [TimedUnit(name=name, bytes=ranks, gather=1, scatter=1, forward=1, backward=2) for name in units]
    bars = [bar for bar in data_parallel_step(timed, ranks=ranks, overlap=False).bars if bar.unit]
    bars.sort(key=lambda bar: bar.start)
    count, column = len(bars) + 1, WIDTH / ranks
    wide, tall = (column - 16) / ranks, 24.0
    still, pieces, sentences = [], [], ["Each rank holds its shard of A and its shard of B, and no whole weights."]

    def spot(rank: int, part: int, row: int) -> tuple[float, float]:
        return rank * column + 8 + part * wide, 22 + row * (tall + 6)

    there: dict[str, list[int]] = {name: [] for name in units}
    full: dict[str, list[int]] = {name: [] for name in units}
    shards: dict[str, list[int]] = {name: [] for name in units}
    words = {
        "gather": "All-gather of {0}: each rank sends its shard to the others, and all hold {0} whole.",
        "forward": "Forward of {0}; then its other {1} parts are freed.",
        "backward": "Backward of {0} makes whole gradients on every rank; the other {1} parts of its weights are freed.",
        "scatter": "Reduce-scatter of {0}'s gradients: each rank keeps the mean of its own part.",
    }
    for step, bar in enumerate(bars, start=1):
        again = bar.kind == "gather" and bool(there[bar.unit])
        sentences.append(words[bar.kind].format(bar.unit, ranks - 1) + " The second time it is for backward." * again)
        if bar.kind == "gather":
            after = next(n for n in range(step, len(bars)) if bars[n].unit == bar.unit and bars[n].lane == "device") + 1
            there[bar.unit] += range(step, after + 1)
        if bar.kind == "backward":
            full[bar.unit] += [step]
        if bar.kind == "scatter":
            full[bar.unit] += list(range(max(full[bar.unit]) + 1, step))
            shards[bar.unit] += range(step, count)
    for rank in range(ranks):
        still.append(text(rank * column + column / 2, 14, f"rank {rank}", anchor="middle", bold=True))
        for name, row in units.items():
            for part in range(ranks):
                x, y = spot(rank, part, row)
                still.append(rect(x, y, wide - 2, tall, "idle", pale=True))
                own = part == rank
                steps = range(count) if own else there[name]
                at: list[Place] = shown(count, list(steps), x, y)
                if not own:  # it comes from the rank that holds it
                    for step in there[name]:
                        at[step - 1] = at[step - 1] or spot(part, part, row)
                pieces.append(Piece(shape=cell(f"{name.lower()}{part + 1}", "weights", wide - 2, tall), at=at))
                gradient = full[name] + (shards[name] if own else [])
                below = y + 2 * (tall + 6) + 6
                still.append(rect(x, below, wide - 2, tall, "idle", pale=True))
                pieces.append(
                    Piece(
                        shape=cell(f"{name.lower()}{part + 1}", "gradients", wide - 2, tall),
                        at=shown(count, gradient, x, below),
                    )
                )
    names, end = legend(["weights", "gradients"], top=22 + 4 * (tall + 6) + 12)
    alt = f"{ranks} ranks with rows for the weights of A and B and for their gradients; a part is filled where it is held."
    first = next(n for n, bar in enumerate(bars, start=1) if bar.kind == "gather")
    return stepped(still + names, pieces, sentences, height=end + 4, alt=alt, first=first)


def ring_attention(cp: int = 4, orders: Sequence[str] = ORDERS) -> str:
    """Return the causal mask in blocks: who computes which in each step of the ring, and how long each rank works."""
    parts, gap = 2 * cp, 14.0
    side = (WIDTH - gap * (len(orders) - 1)) / len(orders)
    unit = side / parts
    # Blocks are long: on the diagonal half of the scores are computed.
    work = {
        order: [[pairs / 1024**2 for pairs in row] for row in ring_work(cp, order, parts * 1024)] for order in orders
    }
    times = {order: [max(row) for row in steps] for order, steps in work.items()}
    scale = (side - 14) / max(map(sum, times.values()))
    still, pieces, base = [], [], 32 + parts * unit
    for panel, order in enumerate(orders):
        left, owner = panel * (side + gap), token_owners(cp, order, parts)
        still += [text(left, 12, order, bold=True), text(left, base + 8, "time of each rank")]
        for query in range(parts):
            for key in range(query + 1):
                x, y, rank = left + key * unit, 20 + query * unit, owner[query]
                still.append(rect(x, y, unit - 1, unit - 1, "idle", pale=True))
                digit = text(unit / 2, unit / 2 + 4, str(rank), anchor="middle", white=True)
                done = range((rank - owner[key]) % cp + 1, cp + 1)
                shape = rect(0, 0, unit - 1, unit - 1, HUES[rank]) + digit
                pieces.append(Piece(shape=shape, at=shown(cp + 1, done, x, y)))
        for rank in range(cp):
            y, start = base + 16 + rank * 20, 0.0
            still.append(text(left + 8, y + 12, str(rank), anchor="end"))
            for step, length in enumerate(times[order]):
                bar = rect(0, 0, length * scale - 0.6, 15, "idle", pale=True)
                bar += rect(0, 0, max(work[order][step][rank] * scale - 0.6, 0), 15, HUES[rank])
                pieces.append(Piece(shape=bar, at=shown(cp + 1, range(step + 1, cp + 1), left + 14 + start * scale, y)))
                start += length
    sentences = [
        "A row is a query, a column a key, a number the rank that has the query. Each rank begins with its own keys."
    ]
    for step in range(cp):
        whose = "its own keys" if step == 0 else f"the keys of rank r - {step}"
        busy = {order: sum(value > 0.99 * max(work[order][step]) for value in work[order][step]) for order in orders}
        said = ", ".join(f"in {order} order {count} of {cp}" for order, count in busy.items())
        sentences.append(f"Step {step}: rank r has {whose}. To the end of the step work {said}.")
    shares = [f"{sum(map(sum, work[order])) / cp / sum(times[order]):.0%} ({order})" for order in orders]
    sentences[-1] += f" Of the whole time a rank works {', '.join(shares)}."
    alt = f"Lower triangles of blocks for {', '.join(orders)} order, numbered by the rank that computes them, and bars of its time."
    return stepped(still, pieces, sentences, height=base + 20 + cp * 20, alt=alt, first=cp)


def dispatch_combine(chosen: Sequence[Sequence[int]], *, ranks: int, experts: int) -> str:
    """Return tokens on their ranks, whose copies travel to the ranks of their experts and come back.

    Args:
        chosen: The experts of every token, in order; the first tokens are those of rank 0.
    """
    each, held = len(chosen) // ranks, experts // ranks
    column, k = WIDTH / ranks, len(chosen[0])
    wide, tall = (column - 20) / (k * each), 24.0
    copies = [[token for token, picks in enumerate(chosen) if expert in picks] for expert in range(experts)]
    arrived = [sum(len(copies[e]) for e in range(r * held, (r + 1) * held)) for r in range(ranks)]
    crossing = sum(expert // held != token // each for token, picks in enumerate(chosen) for expert in picks)
    still, pieces, count = [], [], 6
    narrow = min(wide, (column - 26) / max(arrived))
    for rank in range(ranks):
        left = rank * column + 10
        names = " and ".join(LETTERS[rank * held : (rank + 1) * held])
        still.append(text(left, 14, f"rank {rank}, experts {names}", bold=True))
        for y, words in ((34, "tokens"), (108, "at its experts"), (178, "back at home")):
            still.append(text(left, y - 4, words))
        for i in range(each):
            token = rank * each + i
            x = left + k * i * wide
            box = rect(0, 0, k * wide - 2, tall, "idle", pale=True) + text(
                k * wide / 2, 16, str(token), anchor="middle"
            )
            still.append(f'<g transform="translate({x:.1f} 34)">{box}</g>')
            summed = rect(0, 0, k * wide - 2, tall, "idle", pale=True) + text(
                k * wide / 2, 16, f"y{token}", anchor="middle"
            )
            pieces.append(Piece(shape=summed, at=shown(count, [5], x, 178)))
    for expert in range(experts):
        rank = expert // held
        before = sum(len(copies[e]) for e in range(rank * held, expert))
        for place, token in enumerate(copies[expert]):
            home = token // each
            i, j = token % each, list(chosen[token]).index(expert)
            start = home * column + 10 + (k * i + j) * wide
            there = rank * column + 10 + (before + place) * narrow + 6 * (expert % held)
            raw = cell(str(token), HUES[expert], min(wide, narrow) - 2, tall)
            done = rect(0, 0, min(wide, narrow) - 2, tall, HUES[expert]) + text(
                (min(wide, narrow) - 2) / 2, 16, str(token), anchor="middle", white=True
            )
            pieces.append(Piece(shape=raw, at=[None, (start, 62), (there, 108), None, None, None]))
            pieces.append(Piece(shape=done, at=[None, None, None, (there, 108), (start, 178), None]))
    roles = [(LETTERS[e], HUES[e]) for e in range(experts)]
    for place, (name, role) in enumerate(roles):
        still.append(rect(10 + place * 70, 214, 9, 9, role))
        still.append(text(23 + place * 70, 223, f"expert {name}"))
    sentences = [
        f"{len(chosen)} tokens, {each} on each of {ranks} ranks.",
        f"Route: each token makes {k} copies, coloured by the expert that its scores chose.",
        f"Dispatch: an all-to-all takes each copy to the rank of its expert, sorted by expert; {crossing} of {len(chosen) * k} change ranks.",
        "Compute: each expert runs over what it got: "
        + ", ".join(f"rank {rank} computes {number} copies" for rank, number in enumerate(arrived))
        + f", {max(arrived) * ranks / sum(arrived):.2f} times the mean on the busiest.",
        "Combine: a second all-to-all takes the results home, the same number the other way.",
        "Each token's rank adds its results with their weights.",
    ]
    alt = f"{ranks} ranks with their tokens, the copies at their experts, and the sums at home."
    return stepped(still, pieces, sentences, height=230, alt=alt, first=3)
