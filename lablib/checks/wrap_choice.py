"""The check of `choose_wrapping`: which wrapping rule to take, by formula and then measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lablib.calc.fsdp import fsdp_traffic
from lablib.calc.fsdp_gathered import peak_unsharded_bytes
from lablib.calc.models import ModelConfig
from lablib.calc.torch_versions import PINNED, release
from lablib.checks.report import Wrong, check, close, some
from lablib.launch.fsdp import shard
from lablib.launch.fsdp_memory import forecast
from lablib.launch.ranks import run_ranks
from lablib.launch.recorder import record_comms
from lablib.launch.wrapping import calc_units
from lablib.toys.transformer import Transformer, tiny_config

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


def _truth(rules: Mapping[str, list[int]], budget: int, version: str) -> dict[str, Any]:
    peak = {
        rule: peak_unsharded_bytes(units, _RANKS, param_bytes=1, torch=version)
        for rule, units in rules.items()
    }
    messages = {rule: fsdp_traffic(units, _RANKS).calls.total() for rule, units in rules.items()}
    fits = [rule for rule in rules if peak[rule] <= budget]
    return {"peak": peak, "messages": messages, "best": min(fits, key=messages.__getitem__, default=None)}


@check
def choose_wrapping(answer: Callable[..., dict[str, Any]], seed: int = 606) -> str:
    """Judge `choose_wrapping(rules, budget)` on random models, then shard three real ones as it says and measure.

    What FSDP2 holds in forward depends on the version of PyTorch. The count of the installed one is right, and so is
    that of the version which the chapter writes down.
    """
    here = release(torch.__version__)
    version = _counted_as(answer, here)
    try:
        cases, picks = _judge_choices(answer, seed, version)
    except Wrong as wrong:
        if version == here:
            raise
        raise Wrong(
            f"{wrong} This is counted as torch {version} does; what {here} does passes, too."
        ) from None
    return f"{cases} models by formula, of torch {version}. Measured with {here}: {_measured(picks)}."


def _counted_as(answer: Callable[..., dict[str, Any]], here: str) -> str:
    """Return the installed version if the answer counts its bytes on a model that tells versions apart."""
    rules = {"three": [30, 10, 6, 12]}
    booked, own = (_truth(rules, 0, version)["peak"]["three"] for version in (PINNED, here))
    if booked == own:
        return here
    got = answer({name: list(units) for name, units in rules.items()}, booked)
    peak = got.get("peak") if isinstance(got, dict) else None
    said = peak.get("three") if isinstance(peak, dict) else None
    return here if said is not None and close(said, own, rel=0) else PINNED


def _judge_choices(
    answer: Callable[..., dict[str, Any]], seed: int, version: str
) -> tuple[int, dict[str, tuple[str, int]]]:
    """Judge by the count of one version; return how many models by formula, and the rule and budget of real ones."""
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
        peaks = sorted(_truth(rules, 0, version)["peak"].values())
        cases.append((rules, max(1, dice.choice(peaks) + dice.choice((-1, 0, 1)))))
    for rules, budget in cases:
        _judge_choice(
            answer({name: list(units) for name, units in rules.items()}, budget), rules, budget, version
        )
    picks = {}
    # All three rules fit in the first budget, two in the second, one in the third.
    for name, fitting in zip(_MODELS, (2, 1, 0), strict=True):
        rules = _rules(_config(name))
        budget = sorted(_truth(rules, 0, version)["peak"].values())[fitting]
        got = answer(dict(rules), budget)
        _judge_choice(got, rules, budget, version)
        picks[name] = (got["best"], budget)
    return len(cases), picks


def _judge_choice(got: object, rules: Mapping[str, list[int]], budget: int, version: str) -> None:
    if not isinstance(got, dict) or set(got) != {"peak", "messages", "best"}:
        raise Wrong("Return a dictionary with the keys peak, messages and best.")
    right = _truth(rules, budget, version)
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
    case = f"rule {rule!r}, root {root:,}, units {some(rest)}"
    if key == "messages":
        if got in (1 + 2 * len(rest), 1 + len(rest)):
            raise Wrong(f"Count both: all-gathers and reduce-scatters ({case}).")
        if got == 3 * (1 + len(rest)):
            raise Wrong(f"The root is gathered once, since it is not freed after forward ({case}).")
        raise Wrong(f"A step has {right:,} messages, not {got:,.0f} ({case}).")
    if rest and got in (sum(units), 2 * sum(units)):
        raise Wrong(f"Not all units are whole at a time: one is, beside the buffers of gathers ({case}).")
    walked = root + max((2 * unit + before for before, unit in pairwise([0, *rest])), default=0)
    if rest and got == walked:
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
        truth = _truth(_rules(config), budget, torch.__version__)
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
