"""The check of the failure zoo: name every fault from its symptoms, and leave the healthy twins alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lablib.checks.report import Wrong, check
from lablib.launch.zoo import FAULTS, HEALTHY, Symptoms, run_all
from lablib.launch.zoo_job import Setting

#: What tells a fault from the others.
_LOOK = {
    "forgotten zero_grad": "the gradient norm of the first step is as expected, and later ones hold all before them",
    "skipped batch": "a rank ends one collective early, and a number is missing among its batches",
    "wrong-dtype reduction": "the reduced vector has fewer bytes than 4 for each parameter",
    "mismatched collectives": "the ranks wait in two different operations, as the same entry of their calls",
    "slow rank": "one rank does several times the FLOPs of the other; all else is as expected",
    "accumulation that communicates": "there are more all-reduces than steps, and the losses are as expected",
    "uneven data": "a rank ends one collective early, and no number is missing among its batches",
    "unsharded parameter": "each rank keeps far more than its half of the bytes",
    HEALTHY: "nothing differs from what is expected but rounding",
}


def cases() -> list[tuple[str, bool, Setting]]:
    """Return every program and every twin, each with a seed, a size and a culprit of its own."""
    found = []
    for i, (program, healthy) in enumerate((p, h) for p in FAULTS for h in (False, True)):
        micro = 2 + i % 2 if program == "F" else 1
        culprit = (i // 2) % 2
        found.append((program, healthy, Setting(4 + i % 3, micro, 6 + 2 * (i % 4), culprit, seed=i)))
    return found


@functools.cache
def _seen() -> list[tuple[str, Symptoms]]:
    work = cases()
    truths = [HEALTHY if healthy else FAULTS[program] for program, healthy, _ in work]
    return list(zip(truths, run_all(work), strict=True))


@check
def diagnose(answer: Callable[[Symptoms], str]) -> str:
    """Judge `diagnose(symptoms)`: a name out of `zoo.FAULTS`, or "healthy", for each of sixteen runs."""
    names = {*FAULTS.values(), HEALTHY}
    for truth, symptoms in _seen():
        said = answer(symptoms)
        if said not in names:
            raise Wrong(
                f"The answer should be one of the names in zoo.FAULTS, or {HEALTHY!r}, and is {said!r}."
            )
        if said != truth and truth == HEALTHY:
            raise Wrong(
                f"A healthy job is called {said!r}: a symptom must be one that the healthy twin does not show."
            )
        if said != truth:
            raise Wrong(f"A job with the fault {truth!r} is called {said!r}. Look again: {_LOOK[truth]}.")
    return f"{len(_seen())} jobs on two ranks, half of them healthy, each named from its symptoms."
