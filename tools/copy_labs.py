"""Copy the labs to work/, where a learner's answers are safe from `git pull`.

A lab that the learner changed is never written to. When the course has a newer version of it, that
version lands beside it as NAME.new.ipynb, and a line says so.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

MANIFEST = ".copied.json"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
        mine, new = work / shipped.name, _digest(shipped)
        if not mine.exists():
            shutil.copyfile(shipped, mine)
            lines.append(f"copied   {shipped.name}")
        elif copied.get(shipped.name) == new:
            lines.append(f"kept     {shipped.name}")
        elif _digest(mine) == copied.get(shipped.name):
            shutil.copyfile(shipped, mine)
            lines.append(f"updated  {shipped.name} (you had not changed it)")
        else:
            beside = mine.with_suffix(".new.ipynb")
            shutil.copyfile(shipped, beside)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
