"""The checks of rung 06: what a step sends, units by size, a checkpoint, and which wrapping rule to take."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from lablib.calc.fsdp import fsdp_traffic
from lablib.checks.checkpoint_disk import write_checkpoint
from lablib.checks.report import Wrong, check, close, some
from lablib.checks.wrap_choice import choose_wrapping
from lablib.checks.wrap_rules import units_by_size

#: What the lab and the tests use from here; three checks have their own modules.
__all__ = ["choose_wrapping", "count_collectives", "units_by_size", "write_checkpoint"]

# --- messages and values of a step -------------------------------------------------------------------------

_KEYS = ("all_gathers", "reduce_scatters", "gathered", "reduced")


def _counted(
    root: int, units: list[int], reshard: bool, micro_batches: int, sync_every: bool
) -> dict[str, int]:
    traffic = fsdp_traffic(
        [root, *units],
        2,
        reshard=reshard,
        micro_batches=micro_batches,
        sync_every=sync_every,
        param_bytes=1,
        reduce_bytes=1,
    )
    calls, values = traffic.calls, traffic.bytes
    numbers = (calls["all_gather"], calls["reduce_scatter"], values["all_gather"], values["reduce_scatter"])
    return dict(zip(_KEYS, numbers, strict=True))


@check
def count_collectives(answer: Callable[..., dict[str, int]], seed: int = 66) -> str:
    """Judge `count_collectives(root, units, reshard, micro_batches, sync_every)` by hand, then on random models."""
    dice = random.Random(seed)
    cases = [(8, [], True, 1, True), (2, [4, 4], True, 1, True), (2, [4, 4], False, 1, True)]
    cases += [(2, [4, 4], True, 3, True), (2, [4, 4], True, 3, False)]
    for _ in range(40):
        # Even sizes: on two ranks nothing is padded.
        units = [2 * dice.randint(1, 10**6) for _ in range(dice.randint(0, 90))]
        flags = (dice.random() < 0.5, dice.randint(1, 8), dice.random() < 0.5)
        cases.append((2 * dice.randint(1, 10**6), units, *flags))
    for case in cases:
        got, right = answer(*case), _counted(*case)
        if not isinstance(got, dict) or set(got) != set(_KEYS):
            raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
        for name in _KEYS:
            if not close(got[name], right[name], rel=0):
                _explain_count(name, float(got[name]), *case)
    return f"{len(cases)} steps, message by message."


def _explain_count(
    name: str, got: float, root: int, units: list[int], reshard: bool, micro_batches: int, sync_every: bool
) -> None:
    case = (f"root={root:,}, units={some(units)}, reshard={reshard}, micro_batches={micro_batches}, "
            f"sync_every={sync_every}")  # fmt: skip
    truth = _counted(root, units, reshard, micro_batches, sync_every)[name]
    if name in ("gathered", "reduced") and got in (4 * truth, truth / 2):
        raise Wrong(
            f"Count the values in the whole arrays: not bytes, and not the part that a ring sends ({case})."
        )
    other = partial(_counted, root, units)
    if name in ("all_gathers", "gathered"):
        once = 1 if name == "all_gathers" else root
        last = micro_batches * (1 if name == "all_gathers" else (units or [0])[-1])
        right = _counted(root, units, reshard, micro_batches, sync_every)[name]
        if got == other(not reshard, micro_batches, sync_every)[name]:
            raise Wrong("A unit that was freed after forward is gathered again in backward, one that was kept is not "
                        f"({case}).")  # fmt: skip
        if got == right + micro_batches * once:
            raise Wrong(f"The root is not freed after forward: backward starts with it ({case}).")
        if reshard and units and got == right - last:
            raise Wrong("The last unit is needed first in backward, but FSDP frees it like the others: only the root "
                        f"is kept ({case}).")  # fmt: skip
        if micro_batches > 1 and got == other(reshard, 1, True)[name]:
            raise Wrong("Every micro-batch gathers again: weights are freed after each backward, whether or not "
                        f"gradients are reduced ({case}).")  # fmt: skip
        if got == right - micro_batches * once:
            raise Wrong(f"The root has weights too: it is gathered once in each micro-batch ({case}).")
        raise Wrong(f"`{name}` is {right:,}, not {got:,.0f}: write down which units are gathered in forward, and which "
                    f"again in backward, one message each ({case}).")  # fmt: skip
    right = _counted(root, units, reshard, micro_batches, sync_every)[name]
    if micro_batches > 1 and got == other(reshard, micro_batches, not sync_every)[name]:
        raise Wrong(
            f"Gradients are reduced after every backward, or, without sync_every, after the last one only ({case})."
        )
    if got == right - (root if name == "reduced" else 1) * (micro_batches if sync_every else 1):
        raise Wrong(f"The root has gradients too, and one reduce-scatter of its own ({case}).")
    if got == 2 * right:
        raise Wrong(f"Gradients exist in backward only: one reduce-scatter for each unit, not two ({case}).")
    raise Wrong(f"`{name}` is {right:,}, not {got:,.0f}: each unit and the root have one reduce-scatter a backward "
                f"that reduces ({case}).")  # fmt: skip
