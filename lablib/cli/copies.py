"""Copy the labs to work/, where a learner's answers are safe from `git pull`.

A lab that the learner changed is never written to. When the course has a newer version of it, that
version lands beside it as NAME.new.ipynb, and a line says so.
A link to a chapter opens the built page, which `rung lab` serves beside the notebooks; JupyterLab would show its source.
START.md, on which JupyterLab opens, names the labs in order.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

MANIFEST = ".copied.json"
FIRST_PAGE = "START.md"
#: What a newcomer must know before the first cell.
WELCOME = """\
# Start here

Open lab 01 with a click, and do the labs in this order; 12 to 14 wait until the others are done.
Read the chapter before its lab; the pages are there once `make book` has built them.

{labs}

**A cell** runs with Shift+Enter; run them from the top. After a restart of the kernel begin at the top again.

**A prediction** is a number that you type in place of `None`, before you run the cells below it. `None` is no guess, and the lab runs on.

**An exercise** is a function that raises `NotImplementedError`. Write its body and run the cell: the check below it says whether you are right, and `hint()` helps, for example `rung01.bytes_per_parameter.hint()`.

**To stop** a cell, press the square button: its ranks end with it. To end everything, choose File > Shut Down, or press Ctrl+C twice where you typed `make lab` or `rung lab`. Your answers stay in this folder, `work/`, which `git pull` never touches.
"""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_pages(notebook: bytes) -> bytes:
    """Return a notebook whose links to sources of the book are links to its pages, below Jupyter's /static/."""
    return re.sub(rb"\(\.\./book/([\w]+)\.md(#[\w-]+)?\)", rb"(/static/book/\1.html\2)", notebook)


def _contents(labs: Path) -> dict[str, bytes]:
    """Return what belongs into work/ by name: the page to start from, and the labs with their links."""
    notebooks = {path.name: _with_pages(path.read_bytes()) for path in sorted(labs.glob("[0-9][0-9]_*.ipynb"))}
    rows = ["| lab | chapter |", "|---|---|"]
    for name, content in notebooks.items():
        title = re.search(rb'"# ([^"\\]+)', content)
        rows.append(f"| [{title[1].decode() if title else name}]({name}) | [page](/static/book/{name[:-6]}.html) |")
    page = WELCOME.format(labs="\n".join(rows)).encode()
    return {FIRST_PAGE: page, **notebooks} if notebooks else {}


def _read(manifest: Path) -> dict[str, str]:
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or torn
        return {}
    return found if isinstance(found, dict) else {}


def copy_labs(labs: Path, work: Path) -> list[str]:
    """Bring work/ up to date with the labs and return one line for each thing done.

    Args:
        labs: The folder of the shipped labs.
        work: The learner's folder; made when missing.
    """
    work.mkdir(parents=True, exist_ok=True)
    manifest = work / MANIFEST
    copied = _read(manifest)
    lines = []
    for name, content in _contents(labs).items():
        mine, new = work / name, _digest(content)
        if not mine.exists():
            mine.write_bytes(content)
            lines.append(f"copied   {name}")
        elif new in (copied.get(name), _digest(mine.read_bytes())):
            lines.append(f"kept     {name}")
        elif _digest(mine.read_bytes()) == copied.get(name):
            mine.write_bytes(content)
            lines.append(f"updated  {name} (you had not changed it)")
        else:
            beside = mine.with_suffix(f".new{mine.suffix}")
            if beside.exists() and _digest(beside.read_bytes()) != copied.get(beside.name):  # the learner went on in it
                beside = mine.with_suffix(f".new-{new[:6]}{mine.suffix}")
            beside.write_bytes(content)
            copied[beside.name] = new
            lines.append(f"kept     {name} (yours); the course's newer version is {beside.name}")
        copied[name] = new
    manifest.write_text(json.dumps(copied, indent=1) + "\n", encoding="utf-8")
    return lines
