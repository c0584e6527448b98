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


def explain_1f1b(p, m):
    """The bubble of GPipe, a fraction of its activations."""
    held = [min(m, p - i) for i in range(p)]
    return {
        "schedule": one_f_one_b_schedule(p, m),
        "bubble_over_ideal": (p - 1) / m,
        "bubble_over_total": (p - 1) / (m + p - 1),
        "in_flight": held,
        "bubble_saved": 0.0,
        "in_flight_saved": [m - count for count in held],
    }


def beat_1f1b(p, m):
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
