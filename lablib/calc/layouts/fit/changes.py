"""The cheapest changes that make a run fit: settings tried alone and together, in the order of the predicted step.

Every change keeps the GPUs and the sequences of a step. Three kinds:

- "same training": the same updates, computed elsewhere, later or again; up to three settings together;
- "CPU memory": states offloaded, if the node has the memory for them, which nothing here knows;
- "other training": 8-bit moments, no master copy, LoRA, QLoRA, shorter sequences.

The last two come alone if that is enough, else with some of the first kind, and only if they are faster than it. Steps
within 5 percent are a tie: there the combination with fewer changes comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations, product
from math import gcd

from lablib.calc.errors import plural
from lablib.calc.layouts.fit.answers import CONTEXT, MOST_STAGES, longest_sequence
from lablib.calc.layouts.fit.settings import Model, RunSpec, as_spec, least_states, predicted_seconds, rank_params, size
from lablib.calc.layouts.planner import divisors
from lablib.calc.memory import OFFLOADS, RECOMPUTE, training_memory, unproven

SHORT = 8192  # tokens of a sequence, where none were asked for and the model was made for more
SAME, CPU, OTHER = "same training", "CPU memory", "other training"
TIE, SLOW = 1.05, 2.0  # times the fastest step: as fast, and too slow to be told
MAX_CHANGES = 4  # answers of the first kind
MAX_DIVISORS = 12


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that make a run fit.

    Attributes:
        kind: "same training", "CPU memory" or "other training".
        seconds: Predicted seconds of a step; None where the planner knows no link of the GPU.
        slower: That over the predicted step as given, could it run, less 1; None as above.
        trade: What it saves and what it pays, in one sentence with computed numbers.
    """

    kind: str
    settings: dict[str, object]
    seconds: float | None
    slower: float | None
    at: RunSpec = field(repr=False)
    trade: str

    @property
    def memory(self) -> int:
        """Bytes that a GPU needs then."""
        return self.at.memory

    @property
    def budget(self) -> int:
        """Bytes that it may use."""
        return self.at.budget

    @property
    def unproven(self) -> tuple[str, ...]:
        """Settings of the changed run that no measurement covers."""
        return unproven(self.at.run)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def cheapest_change(model: Model, **settings: object) -> list[Change]:
    """Return changes that make a run fit, kind by kind and the cheapest first; nothing if it fits as it is."""
    spec = as_spec(model, settings)
    if spec.within_budget:
        return []
    found = _same(spec)
    fastest = min((one.seconds or 0 for one in found), default=math.inf)
    for kind, ways in _ways(spec).items():
        changes = [change for way in ways if (change := _with_way(spec, kind, way))]
        if kind == CPU:
            changes = sorted(changes, key=lambda one: _rank(one.seconds, len(one.settings)))[:1]
        found += [one for one in changes if TIE * (one.seconds or 0) < fastest]
    longest = longest_sequence(spec)
    if longest.at is not None:
        found.append(_change(OTHER, {"seq": longest.value}, spec, longest.at))
    return found


def _rank(seconds: float | None, count: int) -> tuple[int, int, float]:
    """Sort by time in steps of 5 percent, then by the number of changes; without times by that alone."""
    return (round(math.log(seconds, TIE)), count, seconds) if seconds else (0, count, 0.0)


def _same(spec: RunSpec) -> list[Change]:
    """The first kind: up to `MAX_CHANGES` answers, none of them another one with more changes."""
    found: dict[frozenset[str], Change] = {}
    for names, settings, candidate in _combinations(spec, (1, 2, 3)):
        if not any(known <= names for known in found) and candidate.within_budget:
            found[names] = _change(SAME, settings, spec, candidate)
        if len(found) == MAX_CHANGES:
            break
    fastest = next((one.seconds or 0 for one in found.values()), 0)
    return [one for one in found.values() if (one.seconds or 0) <= SLOW * fastest]


def _ways(spec: RunSpec) -> dict[str, list[dict[str, object]]]:
    """Changes to try where the same training does not fit, by kind."""
    run = spec.run
    eight_bit = len(run.optimizer.moments) == 2 and not run.optimizer.quantized
    offloads = OFFLOADS[OFFLOADS.index(run.offload) + 1 :] if spec.gpu.host else ()
    return {
        CPU: [{"offload": kind} for kind in offloads],
        OTHER: [{"optimizer": "adamw-8bit"}] * eight_bit
        + [{"recipe": "pure-bf16"}] * bool(run.recipe.master or run.recipe.weights == 4)
        + [{"seq": SHORT}] * ("seq" not in spec.given and run.seq > SHORT)
        + [{"tuning": "lora"}, {"tuning": "qlora"}] * (run.tuning == "full"),
    }


def _with_way(spec: RunSpec, kind: str, way: dict[str, object]) -> Change | None:
    """The cheapest change that has this way in it: alone if that fits, else with one more change, or two, or three."""
    other = _having(spec, way)
    if other is None:
        return None
    if other.within_budget:
        return _change(kind, way, spec, other)
    for count in (1, 2, 3) if not spec.run.implementation.eager else (1, 2):
        for _, settings, candidate in _combinations(other, (count,)):
            if candidate.within_budget:
                return _change(kind, way | settings, spec, candidate)
    return None


def _combinations(spec: RunSpec, sizes: tuple[int, ...]) -> list[tuple[frozenset[str], dict[str, object], RunSpec]]:
    """Return (names, settings, setup) of all that can be and may fit, the cheapest first."""
    values = candidate_changes(spec)
    found = []
    for count in sizes:
        for names in combinations(values, count):
            for chosen in product(*(values[name] for name in names)):
                settings = {key: value for part in chosen for key, value in part.items()}
                other = _having(spec, settings)
                if other is not None and least_states(other) <= spec.budget:
                    found.append((_rank(predicted_seconds(other), count), frozenset(names), settings, other))
    return [one[1:] for one in sorted(found, key=lambda one: one[0])]


def candidate_changes(spec: RunSpec) -> dict[str, list[dict[str, object]]]:
    """Return what can be set otherwise without another training: for each name its settings, mildest first."""
    run = spec.run
    layers, most = run.model.num_layers, gcd(spec.gpus_per_node, run.model.num_kv_heads)  # tp divides both
    widths = [] if run.implementation.eager else [n for n in divisors(most) if n > run.tp]
    stages = [n for n in range(run.pp + 1, MOST_STAGES + 1) if layers % n == 0]
    values: dict[str, list[dict[str, object]]] = {
        "gradient_as_bucket_view": [{"gradient_as_bucket_view": True}],
        "step": [{"step": "fused"}] if spec.step != "fused" else [],
        "attention": [{"attention": "fused"}] if run.attention == "plain" else [],
        "zero": [{"zero": stage} for stage in (1, 2, 3) if stage > run.zero],
        "recompute": [{"recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(run.recompute) + 1 :]],
        "micro_batch": [{"micro_batch": n} for n in _fewer(run.micro_batch)],
        "tp": [{"tp": n, "sequence_parallel": run.seq % (n * run.cp) == 0} for n in widths],
        "cp": [{"cp": n} for n in CONTEXT if n > run.cp] if run.cp_way in run.implementation.context_ways else [],
        "pp": [{"pp": n} for n in stages] if run.layers_per_stage is None else [],
    }
    if run.gradient_as_bucket_view or run.zero:
        values["gradient_as_bucket_view"] = []
    return {name: options for name, options in values.items() if options}


def _fewer(micro_batch: int) -> list[int]:
    """Divisors below a micro-batch, the largest first; of many those that are about half of the one before."""
    found, left = [], divisors(micro_batch)[-2::-1]
    if len(left) <= MAX_DIVISORS:
        return left
    for n in left:
        if 2 * n <= (found[-1] if found else micro_batch):
            found.append(n)
    return found


def _having(spec: RunSpec, settings: dict[str, object]) -> RunSpec | None:
    """The setup with other settings, the same GPUs and the same sequences a step; None if that cannot be."""
    run = spec.run
    tp, cp, pp, micro_batch = (settings.get(name, getattr(run, name)) for name in ("tp", "cp", "pp", "micro_batch"))
    dp, left = divmod(spec.gpus, tp * cp * pp)
    if left or dp == 0 or spec.sequences % (dp * micro_batch):
        return None
    count = spec.sequences // (dp * micro_batch)
    if dp * cp == 1 and "zero" in settings:
        return None  # one replica shards nothing
    accumulation = {} if count == spec.micro_batches and pp == run.pp else {"num_microbatches": count}
    try:
        return spec.replace(**settings, dp=dp, **accumulation)
    except ValueError:
        return None  # something does not divide


def _change(kind: str, settings: dict[str, object], spec: RunSpec, other: RunSpec) -> Change:
    before, seconds = predicted_seconds(spec), predicted_seconds(other)
    return Change(
        kind=kind,
        settings=settings,
        seconds=seconds,
        slower=None if seconds is None or before is None else seconds / before - 1,
        at=other,
        trade=_trade(spec, other),
    )


def _trade(before: RunSpec, after: RunSpec) -> str:
    """Memory of a GPU before and after, by group of terms, and what is no longer the same training."""
    old, new = (training_memory(**spec.settings()) for spec in (before, after))
    groups = [
        f"{name} {size(getattr(old, name))} -> {size(getattr(new, name))}"
        for name in ("states", "activations")
        if size(getattr(old, name)) != size(getattr(new, name))
    ]
    text = f"a GPU needs {size(after.memory)} in place of {size(before.memory)}"
    text += f" ({', '.join(groups)})" if groups else ""
    run, was = after.run, before.run
    if run.offload != was.offload:
        text += f"; {size(new.host)} a GPU live in CPU memory"
    if run.tuning != was.tuning:
        every, trained = rank_params(run)
        text += f"; {run.tuning} trains {trained / every:.2%} of the parameters"
    if run.optimizer != was.optimizer:
        text += f"; {run.optimizer.name}: {run.optimizer.summary}"
    if run.recipe != was.recipe:
        text += f"; {run.recipe.name}: {run.recipe.summary}"
    if run.seq != was.seq:
        text += f"; sequences of {plural(run.seq, 'token')}, {1 - run.seq / was.seq:.0%} shorter"
    return text
