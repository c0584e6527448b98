"""Worked exercises of rung 04, pipeline parallelism."""

from __future__ import annotations


def bubbles(p, m, v):
    """Each rank works m (F + B) and waits (p - 1)(F + B)/v."""
    idle, ideal = (p - 1) / v, m
    return {"over_ideal": idle / ideal, "over_total": idle / (ideal + idle)}


def in_flight(name, p, m, v):
    """What a rank holds: its warm-up forwards and one more, and never more than there are."""
    if name == "naive":
        return [1] * p
    if name == "gpipe":
        return [m] * p
    if name == "1f1b":
        return [min(m, p - i) for i in range(p)]
    return [min(m * v, 2 * (p - 1 - i) + p * (v - 1) + 1) / v for i in range(p)]


def one_f_one_b_schedule(p, m):
    """Warm up with p - 1 - i forwards, then one forward and one backward, then what is left."""
    rows = []
    for i in range(p):
        warmup = min(m, p - 1 - i)
        row = [f"{i}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            row += [f"{i}F{k}", f"{i}B{k - warmup}"]
        row += [f"{i}B{k}" for k in range(m - warmup, m)]
        rows.append(" ".join(row))
    return rows


def beat_1f1b(p, m):
    """The order of 1F1B, with I and W in place of B: the gradient leaves after half of the backward."""
    rows = []
    for row in one_f_one_b_schedule(p, m):
        halves = [f"{a.replace('B', 'I')} {a.replace('B', 'W')}" if "B" in a else a for a in row.split()]
        rows.append(" ".join(halves))
    return rows


def match_zb_h1(p, m):
    """ZB-H1: the order of 1F1B, the backward in halves, and rank i's weight halves i micro-batches late."""
    rows = []
    for i, row in enumerate(one_f_one_b_schedule(p, m)):
        steps, late = [], 0
        for action in row.split():
            steps.append(action.replace("B", "I"))
            if "B" in action and int(action.split("B")[1]) >= i:
                steps.append(f"{i}W{late}")
                late += 1
        rows.append(" ".join([*steps, *(f"{i}W{k}" for k in range(late, m))]))
    return rows


def explain_1f1b(before, after):
    """Work depends on m, idle time on the way through the pipeline, memory on the order."""
    schedule = before["schedule"]
    if len(after["busy"]) > len(before["busy"]):
        changed = "more ranks"
    elif after["busy"][0] > before["busy"][0]:
        changed = "more micro-batches"
    elif after["idle"][0] == before["idle"][0]:
        changed, schedule = "1f1b for gpipe", "1f1b"
    elif after["messages"] == before["messages"]:
        changed, schedule = "backward in halves", "zb-h1"
    elif after["held"][0] > before["held"][0]:
        changed, schedule = "more stages a rank", "interleaved"
    else:
        changed = "smaller micro-batches"
    busy, idle = 2 * after["busy"][0], after["idle"][0]
    grows = 2 if schedule == "gpipe" else 1
    return {
        "changed": changed,
        "schedule": schedule,
        "idle_over_total": idle / (busy + idle),
        "held": [grows * held for held in after["held"]],
    }
