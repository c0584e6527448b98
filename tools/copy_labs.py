"""Copy the labs to work/, where a learner's answers are safe from `git pull`.

A lab that the learner changed is never written to. When the course has a newer version of it, that
version lands beside it as NAME.new.ipynb, and a line says so.
A link to a chapter opens the built page, which `make lab` serves beside the notebooks; JupyterLab would show its source.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

MANIFEST = ".copied.json"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_pages(notebook: bytes) -> bytes:
    """Return a notebook whose links to sources of the book are links to its pages, below Jupyter's /static/."""
    return re.sub(rb"\(\.\./book/([\w]+)\.md(#[\w-]+)?\)", rb"(/static/book/\1.html\2)", notebook)


def copy_labs(labs: Path, work: Path) -> list[str]:
    """Bring work/ up to date with the labs and return one line for each thing done.

    Args:
        labs: The folder of the shipped labs.
        work: The learner's folder; made when missing.
    """
    work.mkdir(exist_ok=True)
    manifest = work / MANIFEST
    copied = json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else {}
    lines = []
    for shipped in sorted(labs.glob("[0-9][0-9]_*.ipynb")):
        mine, content = work / shipped.name, _with_pages(shipped.read_bytes())
        new = _digest(content)
        if not mine.exists():
            mine.write_bytes(content)
            lines.append(f"copied   {shipped.name}")
        elif copied.get(shipped.name) == new:
            lines.append(f"kept     {shipped.name}")
        elif _digest(mine.read_bytes()) == copied.get(shipped.name):
            mine.write_bytes(content)
            lines.append(f"updated  {shipped.name} (you had not changed it)")
        else:
            beside = mine.with_suffix(".new.ipynb")
            beside.write_bytes(content)
            lines.append(f"kept     {shipped.name} (yours); the course's newer version is {beside.name}")
        copied[shipped.name] = new
    manifest.write_text(json.dumps(copied, indent=1) + "\n", encoding="utf-8")
    return lines


def main() -> int:
    """Copy the labs of this repository and say what was done."""
    root = Path(__file__).resolve().parents[1]
    lines = copy_labs(root / "labs", root / "work")
    if not lines:
        print("There are no labs to copy in labs/.")
        return 1
    print(f"Labs in {root / 'work'}:")
    for line in lines:
        print(f"  {line}")
    if not (root / "_build" / "html").exists():
        print("Their links to chapters open once the book is built: make book.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
