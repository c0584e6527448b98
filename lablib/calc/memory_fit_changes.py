"""The cheapest changes that make a run fit: settings tried alone and together, in the order of the predicted step.

Every change keeps the GPUs and the sequences of a step. Five kinds, the first one preferred:

- "same training": the same updates, computed on another GPU, later or again: zero, recompute, micro_batch, tp, cp, pp,
  fused attention, gradients in DDP's buckets, the fused optimizer; up to three together, or four where three are not enough;
- "CPU memory": states offloaded, if the node has the memory for them, which nothing here knows;
- "other numbers": moments in 8 bits, or no master copy;
- "other training": 8,192 tokens a sequence where the model's longest was only assumed, LoRA, QLoRA, the longest that fits;
- "other hardware": the smallest card of the table on which the run fits as it is.

The middle three come alone if that is enough, else with up to three changes of the first kind (two for a timeline).

The cost of a change is the predicted time of a step (`memory_fit_cost`). Combinations are asked in its order, so the
first that fits is the cheapest. Steps within 5 percent are a tie, which the planner cannot tell apart: there the
combination with fewer changes wins, and one that only adds to it is left out. Of the first kind those that take more than
twice the fastest are left out, and any other kind that is not faster than the first.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import gcd

from lablib.calc.hardware import ACCELERATORS
from lablib.calc.memory_fit import longest_sequence
from lablib.calc.memory_fit_cost import least_states, predicted_seconds
from lablib.calc.memory_fit_proof import unproven
from lablib.calc.memory_fit_setup import Setup
from lablib.calc.memory_fit_trade import trades
from lablib.calc.plan_search import divisors
from lablib.calc.run_config import OFFLOADS, RECOMPUTE

SHORT = 8192  # tokens of a sequence, where none were asked for and the model was made for more
SAME, CPU, NUMBERS = "same training", "CPU memory", "other numbers"
OTHER, HARDWARE = "other training", "other hardware"
TIE, SLOW = 1.05, 2.0  # of the fastest step: what is as fast, and what is too slow to be told
MOST = 4  # answers of the first kind
CONTEXT, MOST_STAGES, MOST_DIVISORS = (2, 4, 8), 16, 12


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that make a run fit.

    Attributes:
        kind: "same training", "CPU memory", "other numbers", "other training" or "other hardware".
        settings: What to set, by name.
        memory: Bytes that a GPU needs then.
        budget: Bytes that it may use.
        seconds: Predicted seconds of a step; None where the planner knows no link of the card.
        slower: That over the predicted step as given, could it run, less 1; None as above.
        at: The setup with the change.
        traded: What it saves and what it pays, in sentences with computed numbers.
    """

    kind: str
    settings: dict[str, object]
    memory: int
    budget: int
    seconds: float | None
    slower: float | None
    at: Setup = field(repr=False)
    traded: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many changes these are; sequence parallelism comes with tp."""
        return len(self.settings.keys() - {"sequence_parallel"})

    @property
    def unproven(self) -> tuple[str, ...]:
        """What of the changed setup no oracle has counted."""
        return unproven(self.at.run)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def cheapest_change(have: Setup) -> list[Change]:
    """Return changes that make a run fit, kind by kind and the cheapest first; nothing if it fits as it is.

    Args:
        have: The setup.
    """
    if have.fits:
        return []
    found = _same(have)
    fastest = min((one.seconds or 0 for one in found), default=float("inf"))
    for kind, ways in _ways(have).items():
        changes = [change for way in ways if (change := _with_way(have, kind, way))]
        changes = _ordered(changes)[:1] if kind == CPU else changes
        found += [one for one in changes if TIE * (one.seconds or 0) < fastest]
    return [*found, *_shorter(have), *_larger_card(have)]


Names = frozenset[str]


def _same(have: Setup) -> list[Change]:
    """The answers of the first kind: up to `MOST`, none of them another one with more changes."""
    for sizes in ((1, 2, 3), (4,)):
        found: dict[Names, Change] = {}
        for seconds, names, settings, candidate in _combinations(have, sizes):
            slowest = max((one.seconds or 0 for one in found.values()), default=0)
            if len(found) >= MOST and (seconds or 0) > TIE * slowest:
                break
            if any(known <= names for known in found) or not candidate.fits:
                continue
            for known in [known for known in found if names < known]:
                if (seconds or 0) <= TIE * (found[known].seconds or 0):
                    del found[known]
            found[names] = _change(SAME, settings, have, candidate, seconds)
        if found:
            ordered = _ordered(list(found.values()))
            limit = SLOW * (ordered[0].seconds or 0)
            return [one for one in ordered if (one.seconds or 0) <= limit][:MOST]
    return []


def _ordered(changes: list[Change]) -> list[Change]:
    """Sort by time; of those that tie with the fastest left, the one with the fewest changes comes first."""
    left, found = list(changes), []
    while left:
        fastest = min(one.seconds or 0 for one in left)
        tied = [one for one in left if (one.seconds or 0) <= TIE * fastest]
        found.append(min(tied, key=lambda one: (one.count, one.seconds or 0)))
        left.remove(found[-1])
    return found


def _ways(have: Setup) -> dict[str, list[dict[str, object]]]:
    """What may be done otherwise where the same training does not fit, by kind."""
    run = have.run
    eight_bit = len(run.optimizer.moments) == 2 and not run.optimizer.quantized
    return {
        CPU: []
        if have.card.host is None
        else [{"offload": kind} for kind in OFFLOADS[OFFLOADS.index(run.offload) + 1 :]],
        NUMBERS: [{"optimizer": "adamw-8bit"}] * eight_bit
        + [{"recipe": "pure-bf16"}] * bool(run.recipe.master or run.recipe.weights == 4),
        OTHER: [{"seq": SHORT}] * ("seq" not in have.given and run.seq > SHORT)
        + [{"tuning": "lora"}, {"tuning": "qlora"}] * (run.tuning == "full"),
    }


def _with_way(have: Setup, kind: str, way: dict[str, object]) -> Change | None:
    """The cheapest change that has this way in it: alone if that fits, else with one more change, or two, or three."""
    other = _having(have, way)
    if other is None:
        return None
    if other.fits:
        return _change(kind, way, have, other, predicted_seconds(other))
    for count in (1, 2, 3) if not have.run.kernels.eager else (1, 2):
        for seconds, _, settings, candidate in _combinations(other, (count,)):
            if candidate.fits:
                return _change(kind, way | settings, have, candidate, seconds)
    return None


def _shorter(have: Setup) -> Iterator[Change]:
    found = longest_sequence(have)
    if found.at is not None:
        yield _change(OTHER, {"seq": found.value}, have, found.at, predicted_seconds(found.at))


def _larger_card(have: Setup) -> Iterator[Change]:
    """The smallest card of the table that has bf16 if this one has, a link, and the memory."""
    cards = sorted(ACCELERATORS.items(), key=lambda item: (item[1].memory_bytes, item[0]))
    for name, card in cards:
        other = replace(have, card=card)
        alike = {"bf16"} & set(have.card.flops) <= set(card.flops) and (card.scale_up or card.host)
        if alike and other.fits:
            yield _change(HARDWARE, {"gpu": name}, have, other, predicted_seconds(other))
            return


def _combinations(
    have: Setup, sizes: tuple[int, ...]
) -> list[tuple[float | None, Names, dict[str, object], Setup]]:
    """Return (seconds, names, settings, setup) of all that can be and may fit, in the order of their predicted time."""
    values = knobs(have)
    found = []
    for count in sizes:
        for names in combinations(values, count):
            for chosen in product(*(values[name] for name in names)):
                settings = {key: value for part in chosen for key, value in part.items()}
                other = _having(have, settings)
                if other is not None and least_states(other) <= have.budget:
                    found.append((predicted_seconds(other), frozenset(names), settings, other))
    # Without predicted times the fewest changes come first; the sort keeps the order of what is equal.
    return sorted(found, key=lambda one: (one[0] or 0, len(one[1])))


def knobs(have: Setup) -> dict[str, list[dict[str, object]]]:
    """Return what can be set otherwise without another training: for each name its settings, mildest first.

    Args:
        have: The setup.
    """
    run = have.run
    layers, most = run.model.num_layers, gcd(have.gpus_per_node, run.model.num_kv_heads)  # tp divides both
    one_process = run.kernels.eager  # the other two count no tensor or context parallelism
    widths = [] if one_process else [n for n in divisors(most) if n > run.tp]
    stages = [n for n in range(run.pp + 1, MOST_STAGES + 1) if layers % n == 0]
    values: dict[str, list[dict[str, object]]] = {
        "gradient_as_bucket_view": [{"gradient_as_bucket_view": True}],
        "step": [{"step": "fused"}] if one_process and have.step != "fused" else [],
        "attention": [{"attention": "fused"}] if run.attention == "plain" else [],
        "zero": [{"zero": stage} for stage in (1, 2, 3) if stage > run.zero],
        "recompute": [{"recompute": kind} for kind in RECOMPUTE[RECOMPUTE.index(run.recompute) + 1 :]],
        "micro_batch": [{"micro_batch": n} for n in _fewer(run.micro_batch)],
        "tp": [{"tp": n, "sequence_parallel": run.seq % (n * run.cp) == 0} for n in widths],
        "cp": [] if one_process else [{"cp": n} for n in CONTEXT if n > run.cp],
        "pp": [{"pp": n} for n in stages] if run.layers_per_stage is None else [],
    }
    if run.gradient_as_bucket_view or run.zero:
        values["gradient_as_bucket_view"] = []
    return {name: options for name, options in values.items() if options}


def _fewer(micro_batch: int) -> list[int]:
    """Divisors below a micro-batch, the largest first; of many those that are about half of the one before."""
    found, left = [], divisors(micro_batch)[-2::-1]
    if len(left) <= MOST_DIVISORS:
        return left
    for n in left:
        if 2 * n <= (found[-1] if found else micro_batch):
            found.append(n)
    return found


def _having(have: Setup, settings: dict[str, object]) -> Setup | None:
    """The setup with other settings, the same GPUs and the same sequences a step; None if that cannot be."""
    run = have.run
    tp, cp, pp, micro_batch = (
        settings.get(name, getattr(run, name)) for name in ("tp", "cp", "pp", "micro_batch")
    )
    dp, left = divmod(have.gpus, tp * cp * pp)
    if left or dp == 0 or have.sequences % (dp * micro_batch):
        return None
    count = have.sequences // (dp * micro_batch)
    if dp * cp == 1 and "zero" in settings:
        return None  # one replica shards nothing
    accumulation = {} if count == have.micro_batches and pp == run.pp else {"num_microbatches": count}
    try:
        return have.having(**settings, dp=dp, **accumulation)
    except ValueError:
        return None  # something does not divide


def _change(
    kind: str, settings: dict[str, object], have: Setup, other: Setup, seconds: float | None
) -> Change:
    before = predicted_seconds(have)
    return Change(
        kind=kind,
        settings=settings,
        memory=other.memory,
        budget=other.budget,
        seconds=seconds,
        slower=None if seconds is None or before is None else seconds / before - 1,
        at=other,
        traded=trades(have, other),
    )
