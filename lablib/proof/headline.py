"""How wrong is the memory calculator: the committed table in one sentence, with the worst case named.

    rows = read_table()["rows"]
    found = headline(rows)
    print(found.peak.judged.name, found.peak.number.error)

The worst case is chosen here and nowhere else, and no page types it. Whoever makes a number worse than `NOTICEABLE`
has to say why in `CAUSES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from lablib.proof.cases import FACTORS, Case
from lablib.proof.grid import Pair, pairs_of
from lablib.proof.verdict import Comparison, compare

#: The committed table, written by `rung memory-table --write`, the drawn one, by `--held-out --write`, and other
#: calculators on the cases of the first, by `rung memory-peers --write`.
TABLE = Path(__file__).resolve().parents[2] / "book" / "data" / "memory_table.json"
HELD_OUT = TABLE.with_name("memory_held_out.json")
#: Of each earlier draw the worst peak, as it was predicted before the calculator was corrected because of it.
EARLIER = TABLE.with_name("memory_earlier_draws.json")
OTHERS = TABLE.with_name("other_calculators.json")

#: A number that is further off than this, as a share, has its cause written down.
NOTICEABLE = 0.001

#: Name of a row and what was compared -> why prediction and measurement differ.
CAUSES: dict[tuple[str, str], str] = {
    ("tiny-qwen3-moe, hf, 1 x 64, fsdp2-mixed-fp32-reduce, foreach, fsdp2, dp 8", "peak"): (
        "This is bookkeeping of a tiny model: AdamW's counter of steps, 4 bytes for each tensor, and the loss."
    ),
    ("tiny-llama, hf, 1 x 1000, fp32, foreach", "saved: embedding"): (
        "Autograd's hooks see the rotary tables where they are saved first, in attention; the calculator counts "
        "them with the embedding. The sum is right."
    ),
}


@dataclass(frozen=True)
class Judged:
    """A row of the table: what was predicted, and what PyTorch counted."""

    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the configuration."""
        return self.row["name"]

    @property
    def case(self) -> Case:
        """The configuration."""
        return Case(**self.row["case"])

    @property
    def peak_at(self) -> str:
        """The moment that was measured to hold most; "" where no peak can be measured."""
        return self.row["measured"].get("peak_at", "")

    @cached_property
    def numbers(self) -> dict[str, Comparison]:
        """Every comparison by what it compares: "states: weights", "saved", "saved: norms", "peak", ..."""
        return {c.what: c for c in compare(self.row["predicted"], self.row["measured"])}

    @property
    def states(self) -> int:
        """Measured bytes of the model states."""
        return sum(c.measured for c in self.of("states"))

    @property
    def states_exact(self) -> bool:
        """Whether every term of the states is exact to the byte."""
        return all(c.predicted == c.measured for c in self.of("states"))

    @property
    def saved(self) -> Comparison:
        """All that forward keeps for backward."""
        return self.numbers["saved"]

    @property
    def peak(self) -> Comparison | None:
        """The fullest instant of the step; None where no kernel exists that could show it."""
        return self.numbers.get("peak")

    def of(self, kind: str) -> list[Comparison]:
        """Return the terms of one kind: those whose name begins with "states: ", "saved: " or "peak: "."""
        return [c for what, c in self.numbers.items() if what.startswith(f"{kind}: ")]


@dataclass(frozen=True)
class Worst:
    """The comparison that is furthest off, and the configuration that it belongs to."""

    judged: Judged
    number: Comparison

    @property
    def off(self) -> float:
        """How far it is off, as a share, without its sign."""
        return abs(self.number.error)

    @property
    def cause(self) -> str:
        """Why, in a sentence; "" where the number is not noticeably off."""
        return CAUSES.get((self.judged.name, self.number.what), "")


@dataclass(frozen=True)
class Headline:
    """The table in a sentence.

    Attributes:
        configurations: All rows.
        states_exact: Rows whose states are exact to the byte, each term.
        peaks: Rows whose peak can be measured.
        saved: The worst sum of saved activations.
        saved_term: The worst group of modules among them, as a share of all that is saved; None where none was told.
        peak: The worst peak.
        peak_term: The worst term of a peak, as a share of the whole peak; None where none was measured.
        typical_peak: The median error of the peaks, as a share, without sign.
    """

    configurations: int
    states_exact: int
    peaks: int
    saved: Worst
    saved_term: Worst | None
    peak: Worst
    peak_term: Worst | None
    typical_peak: float


@dataclass(frozen=True)
class StepMoment:
    """A moment of a training step, as both sides saw it.

    Attributes:
        name: "forward of block 3", "backward of the loss", ...
        phase: "states", "forward", "loss", "backward" or "step".
        kinds: Predicted bytes by kind of memory.
        measured: Bytes, in all.
    """

    name: str
    phase: str
    kinds: Mapping[str, int]
    measured: int

    @property
    def predicted(self) -> int:
        """Bytes, in all."""
        return sum(self.kinds.values())


def read_table(path: Path = TABLE) -> Any:
    """Return a committed file: the table has "versions", "bounds" and "rows"."""
    return json.loads(path.read_text(encoding="utf-8"))


def headline(rows: Iterable[Mapping[str, Any]]) -> Headline:
    """Return how wrong the calculator is."""
    judged = [Judged(row) for row in rows]
    peaks = [one for one in judged if one.peak]
    saved = _worst((one, one.saved) for one in judged)
    peak = _worst((one, one.peak) for one in peaks)
    if saved is None or peak is None:
        raise ValueError("a headline needs rows, and one with a peak among them: make the table anew")
    return Headline(
        configurations=len(judged),
        states_exact=sum(one.states_exact for one in judged),
        peaks=len(peaks),
        saved=saved,
        saved_term=_worst((one, number) for one in judged for number in one.of("saved")),
        peak=peak,
        peak_term=_worst((one, number) for one in judged for number in one.of("peak")),
        typical_peak=median(abs(one.peak.error) for one in peaks),
    )


def noticeable(rows: Iterable[Mapping[str, Any]], least: float = NOTICEABLE) -> list[Worst]:
    """Return every sum that is off by more than a little, the worst first: of states, of what is saved, of the peak.

    The parts of a sum can be off against each other; `Headline.saved_term` and `Headline.peak_term` are their worst.
    """
    judged = [Judged(row) for row in rows]
    found = [Worst(one, number) for one in judged for number in (*one.of("states"), one.saved, one.peak) if number]
    return sorted((one for one in found if one.off > least), key=lambda one: -one.off)


def step_moments(row: Mapping[str, Any]) -> list[StepMoment]:
    """Return the moments of a row whose step was kept, in the order of time.

    A tracker cannot tell the reduction of the last gradients from the backward pass before it, so a moment that it does
    not name is folded into the one before: the fuller of the two was what it saw.
    """
    if "moment_terms" not in row["predicted"]:
        raise ValueError(f"the moments of {row['name']} are not in the table: add it to DRAWN of lablib.proof.grid")
    measured = row["measured"]["moments"]
    found: list[StepMoment] = []
    for name, kinds in row["predicted"]["moment_terms"].items():
        if name in measured:
            word = "loss" if "loss" in name else name.split()[0]
            found.append(StepMoment(name, {"optimizer": "step"}.get(word, word), kinds, measured[name]))
        elif found and sum(kinds.values()) > found[-1].predicted:
            found[-1] = replace(found[-1], kinds=kinds)
    return found


def pairs_shown(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return how many pairs of values of two factors occur together in some configuration."""
    shown: set[Pair] = set()
    for row in rows:
        shown |= pairs_of({factor: row["case"][factor] for factor in FACTORS})
    return len(shown)


def _worst(found: Iterable[tuple[Judged, Comparison]]) -> Worst | None:
    return max((Worst(one, number) for one, number in found), key=lambda worst: worst.off, default=None)
