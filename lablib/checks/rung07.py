"""The checks of rung 07: coordinates, a sketch by its groups, what each group sends, and three clusters to plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from lablib.calc.challenge import CASES, Score, planner, score
from lablib.calc.comm import ring_all_reduce_bytes
from lablib.calc.plan_layout import Layout
from lablib.calc.plan_why import NAMES
from lablib.checks.mesh_groups import coordinates, sketch
from lablib.checks.report import Wrong, check, close

#: What the lab and the tests use from here; the checks of groups have their own module.
__all__ = ["coordinates", "group_traffic", "plan_cluster", "sketch"]

_AXES = ("tp", "pp", "dp")


# --- what each group sends ---------------------------------------------------------------------------------


@check
def group_traffic(answer: Callable[..., Mapping[str, float]], seed: int = 7) -> str:
    """Judge `group_traffic(layers, stream, gradients, tp, pp, dp, micro_batches)` for a middle stage."""
    dice = random.Random(seed)
    # No two slips give the same number in the first case, so that the sentence names the right one.
    cases = [(6, 1000, 12000, 4, 3, 8, 5), (4, 1024, 16000, 2, 2, 2, 4)]
    cases.append((80, 134217728, 140 * 10**9, 8, 4, 2, 64))
    for _ in range(20):
        tp, pp, dp = (dice.choice((1, 2, 3, 4, 8)) for _ in range(3))
        gradients = tp * pp * dice.randint(10**3, 10**9)
        cases.append(
            (pp * dice.randint(1, 12), dice.randint(1, 10**8), gradients, tp, pp, dp, dice.randint(1, 64))
        )
    for case in cases:
        _judge_traffic(answer(*case), *case)
    return f"{len(cases)} layouts, 70B on 64 GPUs among them."


def _judge_traffic(
    got: object, layers: int, stream: int, gradients: int, tp: int, pp: int, dp: int, micro_batches: int
) -> None:
    if not isinstance(got, Mapping) or set(got) != set(_AXES):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_AXES)}.")
    each = layers // pp * micro_batches  # passes of a micro-batch through a layer of this rank
    right = {
        "tp": 4 * each * ring_all_reduce_bytes(stream, tp),
        "pp": 2.0 * micro_batches * stream if pp > 1 else 0.0,
        "dp": ring_all_reduce_bytes(gradients / (tp * pp), dp),
    }
    case = f"tp={tp}, pp={pp}, dp={dp}, {layers} layers, {micro_batches} micro-batches"
    for axis in _AXES:
        if not close(got[axis], right[axis], rel=1e-9):
            explain = {"tp": _explain_tp, "pp": _explain_pp, "dp": _explain_dp}[axis]
            explain(float(got[axis]), right[axis], tp, pp, dp, micro_batches, case)


def _explain_tp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if tp == 1:
        raise Wrong(f"A tensor-parallel group of one rank sends nothing ({case}).")
    if close(got, 2 * right) or close(got, right / 2):
        raise Wrong(
            f"A layer has four all-reduces for each micro-batch, two in forward and two in backward ({case})."
        )
    if pp > 1 and close(got, right * pp):
        raise Wrong(f"A rank has the layers of its stage only, one part in {pp} of the model ({case}).")
    if m > 1 and close(got, right / m):
        raise Wrong(
            f"Every micro-batch passes every layer: tensor parallelism sends for each of the {m} ({case})."
        )
    if close(got, right * tp / (tp - 1)) or close(got, right * tp / (2 * (tp - 1))):
        raise Wrong(f"On a ring of t ranks each sends 2(t-1)/t times the message ({case}).")
    raise Wrong(f"A rank sends {right:,.0f} bytes to its tp group, not {got:,.0f} ({case}).")


def _explain_pp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if pp == 1:
        raise Wrong(f"With one stage there is no cut, and nothing to send ({case}).")
    if close(got, right / 2):
        raise Wrong(
            f"A middle stage sends twice for each micro-batch: activations on, and their gradient back ({case})."
        )
    if m > 1 and close(got, right / m):
        raise Wrong(f"Each of the {m} micro-batches crosses the cut on its own ({case}).")
    if close(got, right * (pp - 1)) or close(got, right * (pp - 1) / 2):
        raise Wrong(f"A stage sends over its own cuts only, whatever the number of stages ({case}).")
    raise Wrong(
        f"A rank of a middle stage sends {right:,.0f} bytes to its pp group, not {got:,.0f} ({case})."
    )


def _explain_dp(got: float, right: float, tp: int, pp: int, dp: int, m: int, case: str) -> None:
    if dp == 1:
        raise Wrong(f"One replica has nobody to average with ({case}).")
    for what, factor in (("tp and pp", tp * pp), ("tp", tp), ("pp", pp)):
        if factor > 1 and close(got, right * factor):
            raise Wrong(
                f"A rank has gradients of what it holds: {what} divide{'' if ' ' in what else 's'} them ({case})."
            )
    if m > 1 and close(got, right * m):
        raise Wrong(f"Gradients are added up over the {m} micro-batches and sent once a step ({case}).")
    if close(got, right * dp / (dp - 1)) or close(got, right * dp / (2 * (dp - 1))):
        raise Wrong(f"On a ring of d ranks each sends 2(d-1)/d times the message ({case}).")
    raise Wrong(f"A rank sends {right:,.0f} bytes to its dp group, not {got:,.0f} ({case}).")


# --- three clusters ----------------------------------------------------------------------------------------

#: How much slower than the published layout an answer may be: beyond it the planner can tell the two apart.
_SLOWER = 1.10


@check
def plan_cluster(answer: Callable[[str], Mapping[str, int | str]]) -> str:
    """Judge `plan_cluster(case)`: for each real cluster a layout that runs and is about as fast as the published one."""
    done = []
    for name in CASES:
        fields = answer(name)
        if not isinstance(fields, Mapping | Layout):
            raise Wrong(f"{name}: return a dictionary of fields such as tp, pp, dp and zero, not {fields!r}.")
        judged = score(fields, name)
        if not judged.runs:
            raise Wrong(f"{name}: {judged.sentences[0]}")
        if judged.to_published > _SLOWER:
            raise Wrong(
                f"{name}: {judged.to_published:.2f} times the published layout's time. {_slow(judged)}"
            )
        done.append(f"{name} {judged.points}")
    return f"Points of 100, the planner's best having 100: {', '.join(done)}."


def _slow(judged: Score) -> str:
    """The most specific sentence of a score, or the part of a step that loses most against the planner's best."""
    if len(judged.sentences) > 2:
        return judged.sentences[1]
    best = planner(judged.case.name).best.seconds
    part = max(judged.seconds, key=lambda name: judged.seconds[name] - best[name])
    return f"Look at {NAMES[part]}: {judged.seconds[part]:.2f} s, where the planner's best has {best[part]:.2f} s."
