"""The checks of rung 06: what a step sends, units by size, a checkpoint, and which wrapping rule to take.

Chapter: book/06_fsdp.md
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lablib.calc.fsdp import fsdp_traffic
from lablib.calc.fsdp_gathered import peak_unsharded_bytes
from lablib.calc.models import ModelConfig
from lablib.checks.checkpoint_disk import write_checkpoint
from lablib.checks.report import Wrong, check, close
from lablib.checks.wrap_rules import units_by_size
from lablib.launch.fsdp import shard
from lablib.launch.fsdp_memory import forecast
from lablib.launch.ranks import run_ranks
from lablib.launch.recorder import record_comms
from lablib.launch.wrapping import calc_units
from lablib.toys.transformer import Transformer, tiny_config

#: What the lab and the tests use from here; two checks have their own modules.
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
    case = (f"root={root:,}, units={_some(units)}, reshard={reshard}, micro_batches={micro_batches}, "
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


def _some(units: list[int]) -> str:
    return f"{units}" if len(units) < 4 else f"[{len(units)} of them]"


# --- which rule to take: the Done-when of the rung ---------------------------------------------------------

_RULES = ("none", "block", "linear")
_RANKS, _WINDOW = 2, (2, 17)
#: Models whose answer is measured.
_MODELS = {
    "a small Llama": {"num_layers": 1, "hidden": 32, "ffn": 128},
    "a model of three blocks": {"num_layers": 3, "hidden": 32, "ffn": 88},
    "a huge MLP": {"num_layers": 1, "hidden": 32, "ffn": 1024},
}


def _config(name: str) -> ModelConfig:
    return tiny_config("llama", **_MODELS[name])


def _rules(config: ModelConfig) -> dict[str, list[int]]:
    """Return the bytes of every unit under every rule, root first; all are even, so nothing is padded."""
    with torch.device("meta"):
        model = Transformer(config)
    return {rule: [4 * unit.params for unit in calc_units(model, rule)] for rule in _RULES}


def _truth(rules: Mapping[str, list[int]], budget: int) -> dict[str, Any]:
    peak = {rule: peak_unsharded_bytes(units, _RANKS, param_bytes=1) for rule, units in rules.items()}
    messages = {rule: fsdp_traffic(units, _RANKS).calls.total() for rule, units in rules.items()}
    fits = [rule for rule in rules if peak[rule] <= budget]
    return {"peak": peak, "messages": messages, "best": min(fits, key=messages.__getitem__, default=None)}


@check
def choose_wrapping(answer: Callable[..., dict[str, Any]], seed: int = 606) -> str:
    """Judge `choose_wrapping(rules, budget)` on random models, then shard three real ones as it says and measure."""
    dice = random.Random(seed)
    cases: list[tuple[dict[str, list[int]], int]] = [
        ({"one": [32], "three": [4, 10, 6, 12]}, b) for b in (70, 40, 10)
    ]
    for _ in range(30):
        layers, root, block = dice.randint(1, 24), 2 * dice.randint(1, 5000), 12 * dice.randint(1, 5000)
        split = [block // 6, block // 6, block // 3, block // 3]
        rules = {
            "none": [root + layers * block],
            "block": [root] + layers * [block],
            "linear": [root] + layers * split,
        }
        peaks = sorted(_truth(rules, 0)["peak"].values())
        cases.append((rules, max(1, dice.choice(peaks) + dice.choice((-1, 0, 1)))))
    for rules, budget in cases:
        _judge_choice(answer({name: list(units) for name, units in rules.items()}, budget), rules, budget)
    picks = {}
    # All three rules fit in the first budget, two in the second, one in the third.
    for name, fitting in zip(_MODELS, (2, 1, 0), strict=True):
        rules = _rules(_config(name))
        budget = sorted(_truth(rules, 0)["peak"].values())[fitting]
        got = answer(dict(rules), budget)
        _judge_choice(got, rules, budget)
        picks[name] = (got["best"], budget)
    return f"{len(cases)} models by formula. Measured: {_measured(picks)}."


def _judge_choice(got: object, rules: Mapping[str, list[int]], budget: int) -> None:
    if not isinstance(got, dict) or set(got) != {"peak", "messages", "best"}:
        raise Wrong("Return a dictionary with the keys peak, messages and best.")
    right = _truth(rules, budget)
    for key in ("peak", "messages"):
        if not isinstance(got[key], dict) or set(got[key]) != set(rules):
            raise Wrong(f"`{key}` is a dictionary with a number for each rule: {', '.join(rules)}.")
        for rule, truth in right[key].items():
            if not close(got[key][rule], truth, rel=0):
                _explain_choice(key, float(got[key][rule]), truth, rule, rules[rule])
    best = right["best"]
    if got["best"] is not None and not isinstance(got["best"], str):
        raise Wrong(f"`best` is the name of a rule, or None, and not {got['best']!r}.")
    if got["best"] == best:
        return
    case = f"budget {budget:,}, peaks {right['peak']}, messages {right['messages']}"
    if best is None:
        raise Wrong(f"Nothing fits; then `best` is None ({case}).")
    if got["best"] not in rules or right["peak"][got["best"]] > budget:
        raise Wrong(f"Rule {got['best']!r} does not fit in the budget ({case}).")
    raise Wrong(f"Rule {got['best']!r} fits, and {best!r} fits too with fewer messages ({case}).")


def _explain_choice(key: str, got: float, right: int, rule: str, units: list[int]) -> None:
    root, rest = units[0], units[1:]
    case = f"rule {rule!r}, root {root:,}, units {_some(rest)}"
    if key == "messages":
        if got in (1 + 2 * len(rest), 1 + len(rest)):
            raise Wrong(f"Count both: all-gathers and reduce-scatters ({case}).")
        if got == 3 * (1 + len(rest)):
            raise Wrong(f"The root is gathered once, since it is not freed after forward ({case}).")
        raise Wrong(f"A step has {right:,} messages, not {got:,.0f} ({case}).")
    if rest and got in (sum(units), 2 * sum(units)):
        raise Wrong(
            f"Not all units are whole at a time: one is, while the one before leaves its buffer ({case})."
        )
    if rest and got == root + max(2 * unit + before for before, unit in zip([0, *rest], rest, strict=False)):
        raise Wrong(
            f"The root is there throughout, and its buffer too while the first unit is copied ({case})."
        )
    if rest and got == right - root:
        raise Wrong(f"The root stays gathered while the units run ({case}).")
    if got in (root + max(rest, default=0), root):
        raise Wrong(f"A gathered unit exists twice while it is copied out of the gather's buffer ({case}).")
    if rest and got == root + 2 * max(rest):
        raise Wrong("The buffer of the unit before is still there while a unit is copied; the first unit comes after "
                    f"the root ({case}).")  # fmt: skip
    raise Wrong(f"At most {right:,} bytes are gathered at a time, not {got:,.0f}: for each unit add up what is there "
                f"while it is copied, and take the largest sum ({case}).")  # fmt: skip


def _measured(picks: Mapping[str, tuple[str, int]]) -> str:
    """Shard every model as picked: messages on real ranks, memory by PyTorch's tracker."""
    sent = run_ranks(_run_picks, _RANKS, {name: rule for name, (rule, _) in picks.items()})[0]
    told = []
    for name, (rule, budget) in picks.items():
        config = _config(name)
        seen = forecast(
            partial(Transformer, config),
            world_size=_RANKS,
            batch=_WINDOW[0],
            seq=_WINDOW[1] - 1,
            optimizer=partial(torch.optim.SGD, lr=0.1),  # has no part in what is gathered, and is soon played
            wrap=rule,
        )
        truth = _truth(_rules(config), budget)
        if seen.most_gathered > budget or seen.most_gathered != truth["peak"][rule]:
            raise AssertionError(
                f"{name}, {rule}: the tracker saw {seen.most_gathered:,} bytes, budget {budget:,}"
            )
        if sent[name] != truth["messages"][rule]:
            raise AssertionError(
                f"{name}, {rule}: {sent[name]} messages were sent, not {truth['messages'][rule]}"
            )
        told.append(f"{name}, {rule}: {seen.most_gathered:,} of {budget:,} bytes, {sent[name]} messages")
    return "; ".join(told)


def _run_picks(picks: Mapping[str, str]) -> dict[str, int]:
    sent = {}
    for name, rule in picks.items():
        torch.manual_seed(0)
        model, _ = shard(Transformer(_config(name)), wrap=rule)
        tokens = torch.randint(0, 256, _WINDOW, generator=torch.Generator().manual_seed(0))
        with record_comms() as log:
            model.loss(tokens).backward()
        sent[name] = log.calls.total()
    return sent
