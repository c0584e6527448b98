"""How wrong the planner was on measured runs like a given one.

    like_this(load, layout).sentence      # "median 7%, worst 24% on 31 measured runs (A100, FSDP, 7B to 30B)"

`measured.json` has a row for each of them, made by `tests/evidence/planner` with `LIKE_THIS` as its columns. Its ratios,
predicted over measured seconds, are by constants that never saw the row's source. The runs that count are of the same
generation of GPUs and the same way to shard, of nearly its size and length; where there are fewer than `ENOUGH`, length
is given up first, then size. Nothing like them was measured of mixtures of experts, of fp32, or of other GPUs.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.time import Workload
from lablib.calc.params import count_params
from lablib.calc.units import format_count

MEASURED = Path(__file__).with_name("measured.json")
LIKE_THIS = ("source", "card", "sharded", "billions", "seq", "gpus", "ratio")

#: GPUs that rows were measured on, by generation.
CARDS = {"a100": "A100", "h100": "H100 and H200", "b200": "B200"}
ENOUGH = 5
SIZE = 3  # times smaller or larger
LENGTH = 2  # times shorter or longer


@dataclass(frozen=True)
class Likeness:
    """Measured runs like one, and how wrong predictions of them were.

    Attributes:
        ratios: Predicted over measured seconds of a step.
        what: What the runs have in common, and their range of sizes.
    """

    ratios: tuple[float, ...]
    what: str

    @property
    def median(self) -> float | None:
        """Median error; None without runs."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios) if self.ratios else None

    @property
    def worst(self) -> float | None:
        """Largest error; None without runs."""
        return max((abs(ratio - 1) for ratio in self.ratios), default=None)

    @property
    def sentence(self) -> str:
        """The errors in words."""
        if not self.ratios:
            return f"no measured run is like this ({self.what})"
        many = f"{len(self.ratios)} measured run{'s' if len(self.ratios) > 1 else ''}"
        return f"median {self.median:.0%}, worst {self.worst:.0%} on {many} ({self.what})"

    def as_dict(self) -> dict[str, object]:
        """Return it as plain numbers: median and worst error as shares, and how many runs."""
        return {"median": self.median, "worst": self.worst, "runs": len(self.ratios), "like": self.what}


@cache
def _rows() -> tuple[dict, ...]:
    text = MEASURED.read_text()
    return tuple(dict(zip(LIKE_THIS, row, strict=True)) for row in json.loads(text))


def like_this(load: Workload, layout: Layout) -> Likeness:
    """Return the measured runs like a layout of a job."""
    kin = load.cluster.gpu.generation
    sharded = layout.zero >= 2
    way = "FSDP" if sharded else "replicas or ZeRO-1"
    if load.model.is_moe:
        return Likeness((), f"{load.cluster.gpu.name}, mixture of experts")
    if load.recipe.activation == 4:
        return Likeness((), f"{load.cluster.gpu.name}, fp32")
    if kin is None:
        return Likeness((), load.cluster.gpu.name)
    billions = count_params(load.model).total / 1e9
    alike = [row for row in _rows() if row["card"] == kin and row["sharded"] == sharded]
    sized = [row for row in alike if billions / SIZE <= row["billions"] <= billions * SIZE]
    close = [row for row in sized if load.seq / LENGTH <= row["seq"] <= load.seq * LENGTH]
    found = next((rows for rows in (close, sized) if len(rows) >= ENOUGH), close or sized or alike)
    if not found:
        return Likeness((), f"{CARDS[kin]}, {way}")
    sizes, lengths = sorted(row["billions"] for row in found), sorted(row["seq"] for row in found)
    what = [CARDS[kin], way, _range(*(format_count(n * 1e9) for n in (sizes[0], sizes[-1])))]
    if found is not close:
        what.append(f"{_range(f'{lengths[0]:,}', f'{lengths[-1]:,}')} tokens")
    if found is alike and alike is not sized:
        what.append("none of this size")
    return Likeness(tuple(row["ratio"] for row in found), ", ".join(what))


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
