"""A learner's answer out of a notebook: the function by its name, with what it needs of the other cells and no more.

The cells are parsed, not run: a notebook that stops half-way, or that trains for minutes, gives its functions all the
same. What a function uses, imports, helpers and constants of any cell, comes along, as deep as it goes.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import ast
import json
import re
import symtable
from collections.abc import Iterable
from pathlib import Path


def answer_source(notebook: str | Path, name: str) -> str | None:
    """Return a program that defines a function as the learner's notebook does, or None if it does not.

    Args:
        notebook: Path of the notebook.
        name: The function's name. Of several definitions the last one counts, as it would in the notebook.

    Raises:
        ValueError: If the file is no notebook.
    """
    try:
        cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{notebook} is no notebook: {type(error).__name__}: {error}") from None
    statements = [statement for source in sources for statement in _statements(source)]
    homes: dict[str, int] = {}
    for place, statement in enumerate(statements):
        for defined in _defines(statement):
            homes[defined] = place
    if not isinstance(
        statements[homes[name]] if name in homes else None, ast.FunctionDef | ast.AsyncFunctionDef
    ):
        return None
    wanted, places = [name], set()
    while wanted:
        place = homes.get(wanted.pop())
        if place is not None and place not in places:
            places.add(place)
            wanted += _uses(statements[place])
    return "\n\n".join(ast.unparse(statements[place]) for place in sorted(places)) + "\n"


def is_untouched(source: str, name: str) -> bool:
    """Say whether a function is still the stub that raises NotImplementedError.

    Args:
        source: From `answer_source`.
        name: The function's name.
    """
    functions = [s for s in ast.parse(source).body if isinstance(s, ast.FunctionDef) and s.name == name]
    body = [s for s in functions[-1].body if not isinstance(getattr(s, "value", None), ast.Constant)]
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0])


def _statements(source: str) -> list[ast.stmt]:
    """Return the statements of a cell; lines for the shell and IPython's own do not count, nor does a broken cell."""
    plain = re.sub(r"(?m)^\s*[%!?].*$|\?$", "", source)
    try:
        return ast.parse(plain).body
    except SyntaxError:
        return []


def _defines(statement: ast.stmt) -> Iterable[str]:
    """Yield the names that a statement of a cell defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        for item in statement.names:
            yield item.asname or item.name.split(".")[0]
    elif isinstance(statement, ast.ImportFrom):
        for item in statement.names:
            yield item.asname or item.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


def _uses(statement: ast.stmt) -> set[str]:
    """Return the notebook's names that a statement reads: a function's own parameters and locals are none of them."""
    return set(_reads(symtable.symtable(ast.unparse(statement), "cell", "exec"), outermost=True))


def _reads(scope: symtable.SymbolTable, outermost: bool = False) -> Iterable[str]:
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (outermost or symbol.is_global()):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _reads(inner)
