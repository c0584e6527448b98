"""The shoot-out: every case of the memory table through every peer that covers it, beside what PyTorch measured.

    table = peer_table()
    save_peers(table)
    drifted(table, read_table(OTHERS))   # [] unless something moved

Measurements are read from the memory table, so this file is made anew after that one.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lablib.calc.memory_cases import Case
from lablib.calc.memory_headline import OTHERS, read_table
from lablib.calc.peer import Peer
from lablib.calc.peer_own import NAME as OWN
from lablib.calc.peer_reasons import why
from lablib.calc.peer_truth import CLOSE, main_cause, measured_bytes
from lablib.calc.peers import PEERS, QUANTITIES, find_peer
from lablib.launch.experiments import write_json
from lablib.launch.peers import accelerate_usage, deepspeed_estimate, installed_version

Row = dict[str, Any]


def save_peers(table: dict[str, Any], path: Path = OTHERS) -> Path:
    """Write the shoot-out.

    Args:
        table: From `peer_table`.
        path: Target.
    """
    return write_json(path, table)


def predicted_bytes(peer: Peer, case: Case, row: Row) -> int:
    """Return what a peer says: Accelerate by its own code, this course by the memory table, the rest by formula.

    Args:
        peer: The peer.
        case: A case that it covers.
        row: The case's row in the memory table.
    """
    if peer.name == "Accelerate":
        return max(accelerate_usage(case).values())
    if peer.name == OWN:
        return measured_bytes(row["predicted"], peer.quantity)
    return peer.predict(case)


def peer_rows(table: dict[str, Any], peers: Iterable[Peer] = PEERS) -> list[Row]:
    """Return a row for every peer and every case that it covers.

    Args:
        table: The memory table.
        peers: Which ones.
    """
    found = []
    for peer in peers:
        for row in table["rows"]:
            case, measured = Case(**row["case"]), row["measured"]
            if peer.covers(case):
                continue
            predicted, held = predicted_bytes(peer, case, row), measured_bytes(measured, peer.quantity)
            found.append(
                {
                    "case": row["name"],
                    "peer": peer.name,
                    "quantity": peer.quantity,
                    "predicted": predicted,
                    "measured": held,
                    "ratio": round(predicted / held, 4),
                    # This course's numbers are judged term by term in the memory table.
                    "cause": "" if peer.name == OWN else main_cause(peer, case, measured),
                }
            )
    return found


def _badness(row: Row) -> tuple[float, float]:
    """Sort by how far the ratio is from 1; among those that are equally far off, to a tenth of a percent, by size."""
    off = abs(math.log(row["predicted"] / row["measured"]))
    return (off, 0) if off < CLOSE else (round(off, 3), row["measured"])


def summary(rows: Sequence[Row], table: dict[str, Any]) -> list[Row]:
    """Return how far off each peer is, what its worst case is and why, and this course on the same cases.

    Ratios are predicted over measured. The worst is the one farthest from 1 in either direction, on a log scale.

    Args:
        rows: From `peer_rows`.
        table: The memory table.
    """
    of = {row["name"]: row for row in table["rows"]}
    ours = {
        (row["case"], row["quantity"]): row["predicted"] / row["measured"]
        for row in rows
        if row["peer"] == OWN
    }
    found = []
    for name, quantity in dict.fromkeys((row["peer"], row["quantity"]) for row in rows):
        own = [row for row in rows if (row["peer"], row["quantity"]) == (name, quantity)]
        ratios = [row["predicted"] / row["measured"] for row in own]
        worst = max(own, key=_badness)
        same = [ours[row["case"], quantity] for row in own]
        case, peer = Case(**of[worst["case"]]["case"]), find_peer(name, quantity)
        found.append(
            {
                "peer": name,
                "quantity": quantity,
                "citation": peer.citation,
                "url": peer.url,
                "key": peer.key,
                "cases": len(own),
                "median": round(statistics.median(ratios), 4),
                "low": round(min(ratios), 4),
                "high": round(max(ratios), 4),
                "worst": round(worst["predicted"] / worst["measured"], 4),
                "worst_case": worst["case"],
                "why": why(peer, case, of[worst["case"]]["measured"], worst["predicted"]),
                "ours": {
                    "median": round(statistics.median(same), 4),
                    "worst": round(max(same, key=lambda ratio: abs(math.log(ratio))), 4),
                },
            }
        )
    # By quantity, and in each the nearest first.
    return sorted(found, key=lambda row: (QUANTITIES.index(row["quantity"]), abs(math.log(row["worst"]))))


def left_out(table: dict[str, Any], peers: Iterable[Peer] = PEERS) -> list[Row]:
    """Return how many cases each peer does not cover, by reason.

    Args:
        table: The memory table.
        peers: Which ones.
    """
    found = []
    for peer in peers:
        reasons = Counter(peer.covers(Case(**row["case"])) for row in table["rows"])
        reasons.pop("", None)
        found += [
            {"peer": peer.name, "quantity": peer.quantity, "reason": reason, "cases": count}
            for reason, count in sorted(reasons.items())
        ]
    return found


def deepspeed_record(table: dict[str, Any], kept: dict[str, Any] | None) -> dict[str, Any]:
    """Return what DeepSpeed's own function says of every case that it covers, with its version.

    Where DeepSpeed is not installed, this is the record that is there, if it is of the same cases.

    Args:
        table: The memory table.
        kept: A record made before, or None.

    Raises:
        ValueError: If DeepSpeed is needed and is not installed.
    """
    peer = find_peer("DeepSpeed", "states")
    names = [row["name"] for row in table["rows"] if not peer.covers(Case(**row["case"]))]
    version = installed_version("deepspeed")
    if version is None:
        if kept is None or list(kept["cases"]) != names:
            raise ValueError(
                "DeepSpeed is not installed, and its record is not of these cases: "
                "pip install -c constraints.txt -e '.[deepspeed]' and run this again"
            )
        return kept
    cases = {row["name"]: Case(**row["case"]) for row in table["rows"]}
    return {"version": version, "cases": {name: deepspeed_estimate(cases[name]) for name in names}}


def peer_table(
    table: dict[str, Any] | None = None, deepspeed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the whole shoot-out.

    Args:
        table: The memory table; None for the committed one.
        deepspeed: DeepSpeed's record, for where it is not installed.

    Raises:
        ValueError: If a sentence about a peer is stale, or DeepSpeed is needed.
    """
    table = table or read_table()
    rows = peer_rows(table)
    versions = {package: installed_version(package) for package in ("accelerate", "torch", "transformers")}
    return {
        "versions": versions,
        "deepspeed": deepspeed_record(table, deepspeed),
        "summary": summary(rows, table),
        "left_out": left_out(table),
        "rows": rows,
    }


def drifted(table: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """Return a sentence for everything that is no longer what the committed file says.

    Accelerate's numbers may move with its version; the rest must be the same anywhere.

    Args:
        table: Just made.
        committed: From `read_table(OTHERS)`.
    """
    found = []
    same_version = table["versions"]["accelerate"] == committed["versions"]["accelerate"]
    for part, keys in (
        ("rows", ("peer", "quantity", "case")),
        ("summary", ("peer", "quantity")),
        ("left_out", ("peer", "quantity", "reason")),
    ):
        new, old = ({tuple(r[key] for key in keys): r for r in side[part]} for side in (table, committed))
        for key in dict.fromkeys((*old, *new)):
            if key[0] == "Accelerate" and not same_version:
                continue
            if new.get(key) != old.get(key):
                found.append(f"{', '.join(key)}: was {old.get(key)} and is {new.get(key)}")
    asked = table["deepspeed"]["cases"]
    for name, record in committed["deepspeed"]["cases"].items():
        if asked.get(name) != record:
            found.append(f"DeepSpeed, {name}: was {record} and is {asked.get(name)}")
    return found


def text(table: dict[str, Any]) -> str:
    """Return the summary as aligned text.

    Args:
        table: From `peer_table` or `read_table(OTHERS)`.
    """
    lines = [f"{'predicted / measured':40}{'cases':>6}{'median':>9}{'low':>9}{'high':>9}"]
    for quantity in QUANTITIES:
        lines.append(f"\n{quantity}")
        for row in (row for row in table["summary"] if row["quantity"] == quantity):
            numbers = f"{row['median']:>9.3f}{row['low']:>9.3f}{row['high']:>9.3f}"
            lines += [f"  {row['peer']:38}{row['cases']:>6}{numbers}", f"      {row['why']}"]
    lines.append("\nsources")
    for row in {row["peer"]: row for row in table["summary"]}.values():
        lines.append(f"  {row['peer']}: {row['citation']}" + (f", {row['url']}" if row["url"] else ""))
    return "\n".join(lines)
