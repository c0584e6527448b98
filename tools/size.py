"""How large the house is: modules and lines, the fullest folder, cycles. Before and after a change, one script.

`python tools/size.py`; of another checkout: `python tools/size.py ../other`.
"""

import graphlib
import sys
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
SKIPPED = {".venv", ".cache", "_build", "work", "__pycache__"}
PARTS = {
    "lablib": lambda path: path[0] == "lablib",
    "evidence": lambda path: path[:2] == ("tests", "evidence"),
    "tests": lambda path: path[0] == "tests" and path[1] != "evidence",
    "all": lambda _: True,
}


def sources() -> dict[tuple[str, ...], int]:
    """Return the lines of each Python file, by the parts of its path."""
    files = (path for path in ROOT.rglob("*.py") if not SKIPPED & set(path.relative_to(ROOT).parts))
    return {path.relative_to(ROOT).parts: len(path.read_text(encoding="utf-8").splitlines()) for path in files}


def fullest(paths: list[tuple[str, ...]]) -> tuple[str, int]:
    """Return the folder with most entries, modules and folders beside its `__init__`."""
    entries: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth in range(1, len(path)):
            if path[depth] != "__init__.py":
                entries.setdefault(path[:depth], set()).add(path[depth])
    folder = max(entries, key=lambda name: (len(entries[name]), name))
    return "/".join(folder), len(entries[folder])


def cycle() -> list[str]:
    """Return a cycle of imports in `lablib`, or nothing."""
    import grimp

    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph("lablib", cache_dir=None)
    try:
        graphlib.TopologicalSorter(
            {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        ).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


if __name__ == "__main__":
    found = sources()
    for part, belongs in PARTS.items():
        lines = [count for path, count in found.items() if belongs(path)]
        print(f"{part:9} {len(lines):4} modules {sum(lines):8,} lines")
    print("fullest folder of lablib: {}, {} entries".format(*fullest([path for path in found if path[0] == "lablib"])))
    print(f"cycle of imports: {' -> '.join(cycle()) or 'none'}")
