"""Zero Bubble schedules ZB-H1 and ZB-H2: the backward in two halves, the weight half where there is time.

Nobody waits for the gradients of the weights. So a stage sends the gradient of its input first (I) and fills the
time in which it would wait with the weight halves (W) that it put off. Two stages, three micro-batches:

    1F1B     rank 0: F0 F1 B0 F2 B1 B2              rank 1: F0 B0 F1 B1 F2 B2
    ZB-H1    rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2     rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2

ZB-H1 starts as many forwards as 1F1B. ZB-H2 starts twice as many, so that no stage idles between its first action and
its last, and holds `2p - 1` micro-batches instead of p.

Qi et al. 2023 (arXiv 2401.10241), section 2, Figures 2 and 3. The paper writes B for I.
"""

from __future__ import annotations

from lablib.calc.schedule_1f1b import alternate, at_least_one, each
from lablib.calc.schedule_actions import Action, Schedule, Step


def zb_h1(p: int, m: int) -> Schedule:
    """Return ZB-H1: rank i runs `p - 1 - i` forwards first and its weight halves i micro-batches late.

    Idle `(p - 1)(t_F + t_I - t_W)`, all of it within the first stage's span, where W is the shortest of the three,
    as it is in a Transformer; at most p micro-batches held (Table 2 of the paper).

    Raises:
        ValueError: If p or m is less than 1.
    """
    return _split(p, m, 1, "zb-h1")


def zb_h2(p: int, m: int) -> Schedule:
    """Return ZB-H2: rank i runs `2 (p - 1 - i)` forwards first and its weight halves 2i micro-batches late.

    Idle within the first stage's span `(p - 1)(t_F + t_I - 2 t_W)`, or none where that is negative; at most `2p - 1`
    micro-batches held (Table 2 of the paper).
    Over the whole step ranks still idle: they start, and end, one after another. The next step may fill that time
    only where no optimizer step makes the ranks wait for each other (section 4 of the paper).

    Raises:
        ValueError: If p or m is less than 1.
    """
    return _split(p, m, 2, "zb-h2")


def _split(p: int, m: int, depth: int, name: str) -> Schedule:
    at_least_one(p=p, m=m)
    ranks = []
    for i in range(p):
        late = depth * i  # micro-batches from an input half to the weight half that follows it
        steps: list[Step] = []
        for action in alternate(each("F", i, m), each("I", i, m), warmup=min(m, depth * (p - 1 - i))):
            steps.append(action)
            if action.kind == "I" and action.microbatch >= late:
                steps.append(Action("W", i, action.microbatch - late))
        ranks.append([*steps, *each("W", i, m, first=max(0, m - late))])
    return Schedule(ranks, m, range(p), name)
