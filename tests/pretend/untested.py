"""Which cells and lines only a GPU can run, and which of them a record has shown to run: labs/GPU_UNTESTED.md.

    python -m tests.pretend.untested        writes the list anew

Read from the source: every statement that asks CUDA for more than a number of devices, and
every statement under an `if` that asks for it.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from lablib.launch.records import recorded_on_gpus
from tests.pretend import ROOT

LIST = ROOT / "labs" / "GPU_UNTESTED.md"
#: Questions that a machine without GPUs answers as well.
_ANSWERED = {"is_available", "device_count", "version"}

HEAD = """# What has never run on CUDA

{state}
The list is made from the source by `python -m tests.pretend.untested`, and a test holds it to the source.
What decides about devices, backends, meshes, forks and messages is tested on machines that pretend to have 0, 1, 2 and 8 GPUs; `python -m tests.pretend` runs whole labs there.
What needs a kernel or NCCL is below.

## Cells

| lab | cell | records |
|---|---|---|
{cells}

## Lines

Statements of `lablib`, `labs/scripts` and `tools` that run only where there is a GPU.
"""


def gpu_cells() -> Iterator[tuple[str, str, list[str]]]:
    """Yield lab, cell and the names of the records it makes, for every cell with the tag "gpu"."""
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and "gpu" in cell["metadata"].get("tags", []):
                yield path.stem, cell["id"], re.findall(rf'"({path.stem[:2]}_\w+)"', source)


def gpu_lines(path: Path) -> dict[str, list[str]]:
    """Return the statements of a file that only run on a GPU, by the function they stand in.

    Args:
        path: A Python file.
    """
    source = path.read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}

    def visit(node: ast.AST, scope: str, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                visit(child, f"{scope}.{child.name}".strip("."), inside)
            elif isinstance(child, ast.If) and _asks_whether_cuda(child.test):
                for statement in child.body:
                    visit(ast.Module([statement], []), scope, True)
                visit(ast.Module(child.orelse, []), scope, inside)
            elif isinstance(child, ast.stmt) and not hasattr(child, "body"):
                if (inside or _uses_cuda(child)) and not isinstance(child, ast.Raise):
                    line = " ".join(ast.get_source_segment(source, child).split())
                    found.setdefault(scope or "module", []).append(line)
            else:
                if isinstance(child, ast.With | ast.For | ast.While | ast.If) and _head_uses_cuda(child):
                    line = ast.get_source_segment(source, child).splitlines()[0]
                    found.setdefault(scope or "module", []).append(line)
                visit(child, scope, inside)

    visit(ast.parse(source), "", False)
    return found


def _asks_whether_cuda(test: ast.expr) -> bool:
    """Whether a condition is true on a GPU only: `device.type == "cuda"`, `torch.cuda.is_available()`."""
    text = ast.unparse(test)
    return bool(
        re.search(r"== 'cuda'|!= 'cpu'|'nccl' in|cuda\.is_available\(\)|^cuda$|^gpus?$|^pinned$", text)
    ) and not text.startswith("not ")


def _uses_cuda(node: ast.AST) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "torch.cuda" and part.attr not in _ANSWERED:
            return True
        if isinstance(part, ast.Call) and ast.unparse(part.func).endswith(".cuda"):
            return True
        if isinstance(part, ast.keyword) and part.arg == "device" and "'cuda" in ast.unparse(part.value):
            return True
    return False


def _head_uses_cuda(node: ast.stmt) -> bool:
    parts = [getattr(node, name, None) for name in ("test", "iter")] + [
        item.context_expr for item in getattr(node, "items", [])
    ]
    return any(_uses_cuda(part) for part in parts if part is not None)


def text() -> str:
    """Return the list as Markdown."""
    records = recorded_on_gpus()
    state = (
        f"Records made on GPUs: {', '.join(records)}; what they did not run is listed here all the same."
        if records
        else "No line of this course has run on CUDA yet: there is no record made on a GPU."
    )
    rows = []
    for lab, cell, names in gpu_cells():
        made = [record for record in records if record.rpartition("-")[0] in names]
        rows.append(f"| {lab} | `{cell}` | {', '.join(made) or 'none yet'} |")
    parts = [HEAD.format(state=state, cells="\n".join(rows))]
    files = [
        *(ROOT / "lablib").rglob("*.py"),
        *(ROOT / "labs" / "scripts").glob("*.py"),
        *(ROOT / "tools").glob("*.py"),
    ]
    for path in sorted(files):
        if lines := gpu_lines(path):
            parts.append(f"\n### `{path.relative_to(ROOT)}`\n")
            for scope, statements in lines.items():
                parts.append(f"\n`{scope}`:\n\n```text\n" + "\n".join(statements) + "\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    LIST.write_text(text(), encoding="utf-8")
