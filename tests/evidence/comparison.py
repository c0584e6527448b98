"""Every case of the memory table through every other calculator that covers it, beside what PyTorch measured.

    table = compare()
    save_comparison(table)
    drifted(table, read_table(OTHERS))   # [] unless something moved

Measurements are read from the memory table, so this file is made anew after that one. Two calculators can be installed
and are called for real: Accelerate's estimator, always, and DeepSpeed's, where it is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lablib.launch.records import write_json
from tests.evidence.cases import Case
from tests.evidence.headline import OTHERS, read_table
from tests.evidence.oracles import build_model
from tests.evidence.other_calculators import (
    CALCULATORS,
    OWN,
    QUANTITIES,
    Calculator,
    deepspeed_arguments,
    find_calculator,
)

Row = dict[str, Any]

#: Ratios that are this close to 1 are equally good.
CLOSE = 0.005


def installed_version(package: str) -> str | None:
    """Return the version of a package without its build tag, or None where it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.metadata.version(package).partition("+")[0]


def meta_model(case: Case) -> nn.Module:
    """Return the case's model in fp32 on the meta device, its tied tables one tensor.

    Accelerate's own way to a meta model, without its buffers, would untie them; and its command builds `AutoModel`,
    which has no head. The estimator gets the model that is trained.
    """
    if case.implementation == "paper":
        raise ValueError("implementation='paper' cannot be built on the meta device; use 'toy' or 'hf'")
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        return build_model(replace(case, recipe="fp32", recompute="none", pp=1)).model


def accelerate_estimate(case: Case) -> int:
    """Return what `accelerate estimate-memory` prints: the largest of the bytes that it looks at."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(meta_model(case))
    return max(estimate_training_usage(size, "float32" if case.recipe == "fp32" else "bfloat16").values())


def deepspeed_estimate(case: Case) -> dict[str, int]:
    """Return what DeepSpeed's ZeRO-3 estimator is asked, and its answer as "gpu", bytes of a device.

    The model is counted here: DeepSpeed would count it by the addresses of its parameters, which are all 0 on the meta
    device.
    """
    model = meta_model(case)
    asked = deepspeed_arguments(case) | {
        "params": sum(p.numel() for p in model.parameters()),
        "largest_layer": max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()),
    }
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"  # else it looks for a GPU's compiler
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        _, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params=asked["params"],
            largest_layer_params=asked["largest_layer"],
            num_gpus_per_node=asked["gpus_per_node"],
            num_nodes=asked["nodes"],
            cpu_offload=False,
            cpu_offload_params=False,
            zero_init=True,
        )
    finally:
        os.environ.pop("DS_ACCELERATOR")
        if before is not None:
            os.environ["DS_ACCELERATOR"] = before
    return asked | {"gpu": int(gpu)}


def deepspeed_record(table: Row, kept: Row | None) -> Row:
    """Return DeepSpeed's own answer to every case that it covers, with its version; without DeepSpeed, the record kept."""
    deepspeed = find_calculator("DeepSpeed", "states")
    cases = {row["name"]: Case(**row["case"]) for row in table["rows"]}
    cases = {name: case for name, case in cases.items() if not deepspeed.refuses(case)}
    version = installed_version("deepspeed")
    if version is not None:
        return {"version": version, "cases": {name: deepspeed_estimate(case) for name, case in cases.items()}}
    if kept is None or list(kept["cases"]) != list(cases):
        raise ValueError(
            "DeepSpeed is not installed, and its record is not of these cases: "
            "pip install -c constraints.txt -e '.[deepspeed]' and run this again"
        )
    return kept


def held_bytes(numbers: Row, quantity: str) -> int:
    if quantity == "states":
        return sum(numbers["states"].values())
    return numbers[{"activations": "saved", "total": "peak"}[quantity]]


def comparison_rows(table: Row, calculators: Sequence[Calculator] = CALCULATORS) -> list[Row]:
    """Return a row for every calculator and every case that it covers.

    Accelerate answers by its own code, this course by the memory table, the others by formula.
    """
    found = []
    for one in calculators:
        for row in table["rows"]:
            case = Case(**row["case"])
            if one.refuses(case):
                continue
            if one.name == "Accelerate":
                predicted = accelerate_estimate(case)
            else:
                own = one.name == OWN
                predicted = held_bytes(row["predicted"], one.quantity) if own else one.predict(case)
            measured = held_bytes(row["measured"], one.quantity)
            found.append(
                {
                    "case": row["name"],
                    "calculator": one.name,
                    "quantity": one.quantity,
                    "predicted": predicted,
                    "measured": measured,
                    "ratio": round(predicted / measured, 4),
                }
            )
    return found


def _badness(row: Row) -> tuple[float, float]:
    """Sort by how far the ratio is from 1; among those that are equally far off, to a tenth of a percent, by size."""
    off = abs(math.log(row["predicted"] / row["measured"]))
    return (off, 0) if off < CLOSE else (round(off, 3), row["measured"])


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return how far off each calculator is, what its worst case is, and this course on the same cases.

    Ratios are predicted over measured. The worst is the one farthest from 1 in either direction, on a log scale.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["calculator"], row["quantity"]), []).append(row)
    ours = {
        (row["case"], row["quantity"]): row["predicted"] / row["measured"] for row in rows if row["calculator"] == OWN
    }
    found = []
    for (name, quantity), group in groups.items():
        ratios = [row["predicted"] / row["measured"] for row in group]
        worst = max(group, key=_badness)
        same = [ours[row["case"], quantity] for row in group]
        one = find_calculator(name, quantity)
        found.append(
            {
                "calculator": name,
                "quantity": quantity,
                "citation": one.source.citation,
                "url": one.source.url,
                "key": one.source.key,
                "cases": len(group),
                "median": round(statistics.median(ratios), 4),
                "low": round(min(ratios), 4),
                "high": round(max(ratios), 4),
                "worst": round(worst["predicted"] / worst["measured"], 4),
                "worst_case": worst["case"],
                "ours": {
                    "median": round(statistics.median(same), 4),
                    "worst": round(max(same, key=lambda ratio: abs(math.log(ratio))), 4),
                },
            }
        )
    # By quantity, and in each the nearest first.
    return sorted(found, key=lambda row: (QUANTITIES.index(row["quantity"]), abs(math.log(row["worst"]))))


def left_out(table: Row) -> list[Row]:
    """Return how many cases each calculator does not cover, by reason."""
    found = []
    for one in CALCULATORS:
        reasons = Counter(one.refuses(Case(**row["case"])) for row in table["rows"])
        reasons.pop("", None)
        found += [
            {"calculator": one.name, "quantity": one.quantity, "reason": reason, "cases": count}
            for reason, count in sorted(reasons.items())
        ]
    return found


def compare(table: Row | None = None, deepspeed: Row | None = None) -> Row:
    table = table or read_table()
    rows = comparison_rows(table)
    return {
        "versions": {p: installed_version(p) for p in ("accelerate", "torch", "transformers")},
        "deepspeed": deepspeed_record(table, deepspeed),
        "summary": summary(rows),
        "left_out": left_out(table),
        "rows": rows,
    }


def save_comparison(table: Row, path: Path = OTHERS) -> Path:
    return write_json(path, table)


def drifted(table: Row, committed: Row) -> list[str]:
    """Return a sentence for everything that is no longer what the committed file says.

    Accelerate's numbers may move with its version; the rest must be the same anywhere.
    """
    found = []
    same_version = table["versions"]["accelerate"] == committed["versions"]["accelerate"]
    for part, keys in (
        ("rows", ("calculator", "quantity", "case")),
        ("summary", ("calculator", "quantity")),
        ("left_out", ("calculator", "quantity", "reason")),
    ):
        new, old = ({tuple(r[key] for key in keys): r for r in side[part]} for side in (table, committed))
        for key in dict.fromkeys((*old, *new)):
            if (key[0] != "Accelerate" or same_version) and new.get(key) != old.get(key):
                found.append(f"{', '.join(key)}: was {old.get(key)} and is {new.get(key)}")
    asked = table["deepspeed"]["cases"]
    for name, record in committed["deepspeed"]["cases"].items():
        if asked.get(name) != record:
            found.append(f"DeepSpeed, {name}: was {record} and is {asked.get(name)}")
    return found


def comparison_text(table: Row) -> str:
    lines = [f"{'predicted / measured':40}{'cases':>6}{'median':>9}{'low':>9}{'high':>9}"]
    for quantity in QUANTITIES:
        lines.append(f"\n{quantity}")
        for row in (row for row in table["summary"] if row["quantity"] == quantity):
            numbers = f"{row['median']:>9.3f}{row['low']:>9.3f}{row['high']:>9.3f}"
            lines.append(f"  {row['calculator']:38}{row['cases']:>6}{numbers}")
    lines.append("\nsources")
    for row in {row["calculator"]: row for row in table["summary"]}.values():
        lines.append(f"  {row['calculator']}: {row['citation']}" + (f", {row['url']}" if row["url"] else ""))
    return "\n".join(lines)
