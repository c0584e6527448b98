"""Read the exported files with every parser that is installed here, and write what they read into the record."""

from __future__ import annotations

import json
from pathlib import Path

from lablib.calc.layouts.export import EXPORTERS, export_layout
from tests.evidence.exported.cases import CASES
from tests.evidence.exported.readers import installed, read

RECORD = Path(__file__).with_name("proven.json")


def main() -> None:
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    found = {}
    for case in CASES:
        have = installed(case.framework)
        if have is None:
            if case.name in old:
                found[case.name] = old[case.name]
            continue
        if have != EXPORTERS[case.framework].proven:
            raise SystemExit(f"{have} is installed, and the files name {EXPORTERS[case.framework].proven}")
        text = export_layout(case.exported(), case.framework)
        found[case.name] = {
            "with": have,
            "text": text.splitlines(),
            "read": read(case.framework, text, case.exported()),
        }
        print(f"read: {case.name}")
    entries = ",\n".join(json.dumps(name) + ": " + _entry(one) for name, one in found.items())
    RECORD.write_text("{\n" + entries + "\n}\n", encoding="utf-8")


def _entry(one: dict) -> str:
    """One case: the file line by line, and what was read of it on one line."""
    text = ",\n".join("  " + json.dumps(line) for line in one["text"])
    return f'{{"with": {json.dumps(one["with"])}, "text": [\n{text}\n ],\n "read": {json.dumps(one["read"])}}}'


if __name__ == "__main__":
    main()
