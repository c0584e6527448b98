"""What a page says of frameworks stands folded at its end, with the release and the file in which it was read.

Rows come from book/data/framework_facts.jsonl; `python -m tests.evidence facts` looks them up again.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

from sphinx.application import Sphinx

FACTS = Path(__file__).resolve().parents[1] / "book" / "data" / "framework_facts.jsonl"
#: A role with its text, and what Markdown would read in words that are cut out of a line.
ROLE = re.compile(r"\{\w+\}`+[^`]*`*")
MARKED = re.compile(r"([\\`*_{}\[\]()#|$<>])")


def plain(words: str) -> str:
    """Return a piece of a page's source as text that Markdown leaves alone."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", ROLE.sub("…", words))
    words = re.sub(r"[`*]", "", words).strip("| ").replace(" | ", ", ")
    return MARKED.sub(r"\\\1", words)


def short(version: str) -> str:
    """Return a release as a reader calls it: of a commit the first nine digits."""
    return version[:9] if re.fullmatch(r"[0-9a-f]{40}", version) else version


def folded(rows: list[dict]) -> str:
    """Return the rows of a page as a folded list in Markdown, a paragraph for each release."""
    rows = sorted(rows, key=lambda row: (row["project"], row["version"], row["date"]))
    lines = [
        "",
        "",
        "````{admonition} What this page says of frameworks, and where that was read",
        ":class: dropdown",
        "",
    ]
    for (project, version, date), group in groupby(rows, lambda row: (row["project"], row["version"], row["date"])):
        lines += [f"**{project} {short(version)}**, read on {date}:", ""]
        lines += [f"- “{plain(row['says'])}”: `{row['file']}`" for row in group]
        lines.append("")
    return "\n".join([*lines, "`python -m tests.evidence facts` looks all of it up again.", "````", ""])


def _append(app: Sphinx, docname: str, source: list[str]) -> None:
    folder, _, page = docname.partition("/")
    if folder != "book" or page not in app.framework_facts:
        return
    app.env.note_dependency(str(FACTS))
    source[0] = source[0].rstrip("\n") + folded(app.framework_facts[page])


def setup(app: Sphinx) -> dict:
    """Read the table once."""
    app.framework_facts = {}
    for line in FACTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        app.framework_facts.setdefault(row["page"], []).append(row)
    app.connect("source-read", _append)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
