"""Two scaling reports side by side: what got faster, whether by more than the spread, and what else was not the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lablib.launch.scaling_records import records
from lablib.launch.scaling_report import rows


def compare_reports(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """Return one row per run that both reports have: times, their ratio, and whether their quartiles overlap.

    Raises:
        ValueError: If they have no run in common.
    """
    first, second = ({row["run"]: row for row in rows(folder)} for folder in (a, b))
    both = [name for name in first if name in second]
    if not both:
        raise ValueError(f"no run in common: {', '.join(first)} and {', '.join(second)}")
    table = []
    for name in both:
        one, two = first[name]["seconds"], second[name]["seconds"]
        table.append(
            {
                "run": name,
                "a": one["median"],
                "b": two["median"],
                "ratio": two["median"] / one["median"],
                "apart": one["high"] < two["low"] or two["high"] < one["low"],
                "efficiency_a": first[name].get("efficiency"),
                "efficiency_b": second[name].get("efficiency"),
            }
        )
    return table


def differences(a: str | Path, b: str | Path) -> list[str]:
    """Return what two reports do not have in common: settings, versions, machines, commits; one line each."""
    lines = []
    first, second = records(a)[0], records(b)[0]
    for part in ("machine", "facts"):
        one, two = _flat(first[part]), _flat(second[part])
        for key in sorted(set(one) | set(two)):
            if one.get(key) != two.get(key) and key not in ("config.folder", "sharding"):
                lines.append(f"{key}: {one.get(key)} and {two.get(key)}")
    if first["commit"] != second["commit"]:
        lines.append(f"commit: {first['commit'][:10]} and {second['commit'][:10]}")
    return lines


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
