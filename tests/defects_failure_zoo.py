"""Planted defects of the failure zoo's check: each diagnoses most jobs, and is wrong in one idea."""

# ruff: noqa: E731

import math
from itertools import pairwise

from tests.planted import listed

HEALTHY = "healthy"


def _hang(seen, *, by_calls=True, by_gap=True):
    same = all(a == b for a, b in zip(*seen.calls, strict=False))
    if by_calls and not same:
        return "mismatched collectives"
    gap = any(len({b - a for a, b in pairwise(n)}) > 1 for n in seen.batches)
    return "skipped batch" if gap and by_gap else "uneven data"


def _diagnose(
    seen,
    *,
    hang=_hang,
    most_state=0.6,
    steps=lambda seen: len(seen.losses[0]),
    reduces=lambda seen: [size for op, size in seen.calls[0] if op == "all_reduce"],
    dtype=True,
    work=1.5,
    norm=1e-2,
    first=1,
):
    if seen.hangs:
        return hang(seen)
    if seen.sharded:
        large = max(seen.state_bytes) > most_state * 4 * seen.parameters
        return "unsharded parameter" if large else HEALTHY
    if len(reduces(seen)) > steps(seen):
        return "accumulation that communicates"
    if dtype and min(reduces(seen)) < 4 * seen.parameters:
        return "wrong-dtype reduction"
    flops = [ranks[0] for ranks in seen.flops]
    if max(flops) > work * min(flops):
        return "slow rank"
    off = zip(seen.norms[0][first:], seen.expected["norms"][first:], strict=True)
    if any(abs(a - b) > norm * b for a, b in off):
        return "forgotten zero_grad"
    return HEALTHY


class diagnose:
    every_hang_is_a_mismatch = lambda seen: _diagnose(seen, hang=lambda seen: "mismatched collectives")
    never_looks_at_operations = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_calls=False))
    never_looks_at_batches = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_gap=False))

    def believes_in_one_copy_of_the_weights(seen):
        """Takes the bytes of the whole model for what a rank should keep."""
        return _diagnose(seen, most_state=1.0)

    expects_a_half_to_the_byte = lambda seen: _diagnose(seen, most_state=0.5 - 1e-9)

    def one_reduction_per_micro_batch(seen):
        return _diagnose(seen, steps=lambda seen: len(seen.losses[0]) * seen.micro_batches)

    never_looks_at_bytes = lambda seen: _diagnose(seen, dtype=False)

    def only_the_losses(seen):
        """Says wrong dtype whenever the losses move a little."""
        found = _diagnose(seen, dtype=False)
        means = [sum(ranks) / len(ranks) for ranks in zip(*seen.losses, strict=False)]
        moved = any(a != b for a, b in zip(means, seen.expected["losses"], strict=False))
        return "wrong-dtype reduction" if found == HEALTHY and moved else found

    nobody_is_slow = lambda seen: _diagnose(seen, work=math.inf)
    norms_to_the_bit = lambda seen: _diagnose(seen, norm=0.0)
    everything_is_well = lambda seen: HEALTHY


def by_scores(seen):
    """Second solution: a list of suspicions, the first true one wins."""
    calls = seen.calls
    rounds = min(map(len, calls))
    sizes = [[size for op, size in each if op == "all_reduce"] for each in calls]
    norms = seen.norms[0]
    pairs = list(zip(norms, seen.expected["norms"], strict=False))
    last = {r: numbers[-1] - numbers[0] for r, numbers in enumerate(seen.batches)}
    suspicions = [
        ("mismatched collectives", seen.hangs and calls[0][:rounds] != calls[1][:rounds]),
        ("skipped batch", seen.hangs and any(last[r] != 2 * (len(n) - 1) for r, n in enumerate(seen.batches))),
        ("uneven data", seen.hangs),
        ("unsharded parameter", seen.sharded and sum(seen.state_bytes) > 1.2 * 4 * seen.parameters),
        ("slow rank", max(map(sum, seen.flops)) > 1.5 * min(map(sum, seen.flops))),
        ("accumulation that communicates", not seen.sharded and len(sizes[0]) >= 2 * len(norms)),
        ("wrong-dtype reduction", not seen.sharded and sizes[0] and sizes[0][0] == 2 * seen.parameters),
        ("forgotten zero_grad", not seen.sharded and any(a > 1.02 * b or b > 1.02 * a for a, b in pairs)),
    ]
    return next((name for name, true in suspicions if true), HEALTHY)


DEFECTS = listed(diagnose)
SECOND_SOLUTIONS = {"diagnose": by_scores}
