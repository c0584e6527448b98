"""Worked exercises of rung 04, pipeline parallelism."""

from __future__ import annotations


def bubbles(p, m, v):
    """Each rank works m (F + B) and waits (p - 1)(F + B)/v."""
    idle, ideal = (p - 1) / v, m
    total = ideal + idle
    return {"over_ideal": idle / ideal, "over_total": idle / total}


def in_flight(name, p, m, v):
    """Warm-up forwards and one more, if there are as many."""
    if name == "naive":
        return [1] * p
    if name == "gpipe":
        return [m] * p
    if name == "1f1b":
        return [min(m, p - i) for i in range(p)]
    warmups = [2 * (p - 1 - i) + p * (v - 1) for i in range(p)]
    return [min(m * v, warmup + 1) / v for warmup in warmups]


def one_f_one_b_schedule(p, m):
    """Warm up, alternate, and run the backwards that are left."""
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
    """1F1B with I and W for B: the gradient leaves half-way."""
    rows = []
    for row in one_f_one_b_schedule(p, m):
        cells = []
        for action in row.split():
            cells.append(action.replace("B", "I"))
            if "B" in action:
                cells.append(action.replace("B", "W"))
        rows.append(" ".join(cells))
    return rows


def match_zb_h1(p, m):
    """ZB-H1: on rank i weight halves i micro-batches late."""
    rows = []
    for i, row in enumerate(one_f_one_b_schedule(p, m)):
        steps, late = [], 0
        for action in row.split():
            steps.append(action.replace("B", "I"))
            if "B" in action and int(action.split("B")[1]) >= i:
                steps.append(f"{i}W{late}")
                late += 1
        steps += [f"{i}W{k}" for k in range(late, m)]
        rows.append(" ".join(steps))
    return rows


def explain_1f1b(before, after):
    """Work follows m, waits the way through, memory the order."""
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
