"""The labs: found by number or stem, their parameters checked, and what makes a run of one the same run.

Papermill only warns about a parameter that a notebook does not have; a paid hour spent on a misspelt
parameter is lost, so unknown names and values of another kind are refused here before anything starts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lablib import __version__
from lablib.launch.experiments import repository_root
from lablib.launch.machine import machine, versions


def all_labs() -> list[Path]:
    """Return the paths of all labs, in order."""
    return sorted((repository_root() / "labs").glob("[0-9][0-9]_*.ipynb"))


def find_lab(name: str, *, mine: bool = False) -> Path:
    """Return the path of a lab given its number ("2", "02") or its stem.

    Args:
        name: Number or stem.
        mine: The learner's copy in work/, with the answers and predictions in it.

    Raises:
        ValueError: If there is no such lab, or no copy; the message lists those there are.
    """
    number = name.zfill(2) if name.isdigit() else None
    for path in all_labs():
        if path.stem == name or path.stem.split("_")[0] == number:
            copy = repository_root() / "work" / path.name
            if mine and not copy.exists():
                raise ValueError(f"{copy} is not there; `make lab` copies the labs, or leave out --mine")
            return copy if mine else path
    known = ", ".join(path.stem for path in all_labs())
    raise ValueError(f"no lab {name!r}; there are: {known}")


def lab_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of a lab and their defaults as text."""
    import papermill

    return {name: info["default"] for name, info in papermill.inspect_notebook(str(path)).items()}


def _kinds(path: Path) -> dict[str, str]:
    """Return the kind of each parameter that the cell names one for: `steps: float = None`."""
    import papermill

    inspected = papermill.inspect_notebook(str(path)).items()
    return {name: info["inferred_type_name"] for name, info in inspected}


def assign_parameters(labs: Sequence[Path], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of each lab.

    Args:
        labs: The chosen labs.
        given: Values by name, for every lab that has the name; "06.layers" is for lab 06 alone.

    Raises:
        ValueError: If no lab has a name, or a value is of another kind than the default; nothing has started.
    """
    defaults, kinds = [lab_parameters(path) for path in labs], [_kinds(path) for path in labs]
    assigned: list[dict[str, Any]] = [{} for _ in labs]
    for text, value in given.items():
        number, dot, name = text.rpartition(".")
        meant = [i for i, path in enumerate(labs) if not dot or find_lab(number).stem == path.stem]
        if not meant:
            raise ValueError(f"{text}: lab {number} is not among the chosen labs")
        having = [i for i in meant if name in defaults[i]]
        if not having:
            known = "; ".join(f"{labs[i].stem} has: {', '.join(defaults[i]) or 'none'}" for i in meant)
            raise ValueError(f"no parameter {name}; {known}")
        for i in having:
            _check_kind(labs[i].stem, name, value, defaults[i][name], kinds[i][name])
            assigned[i][name] = value
    return assigned


def _check_kind(stem: str, name: str, value: object, default: str, kind: str) -> None:
    try:
        usual = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return  # computed in the cell: anything may be right
    if usual is None and kind == "float":
        usual = 0.0
    # A whole number is a float, too; 2.5 steps are no steps.
    alike = isinstance(value, type(usual)) or (isinstance(value, int) and isinstance(usual, float))
    if isinstance(value, float) and not math.isfinite(value):
        alike = False
    if (
        usual is not None
        and value is not None
        and (not alike or isinstance(value, bool) != isinstance(usual, bool))
    ):
        kind = type(usual).__name__
        raise ValueError(f"{name}={value!r} is no {kind}; {stem} has {name}={default}")


def device(gpus: Sequence[int]) -> dict[str, Any]:
    """Return what a run runs on, as far as its results depend on it.

    Args:
        gpus: Numbers of the GPUs that it uses; none means the CPU.
    """
    here = machine()
    if gpus:
        return {"gpus": [here["gpus"][number] for number in gpus]}
    return {"cpu": here["cpu"], "cpus": here["cpus"]}


def lab_key(path: Path, parameters: Mapping[str, Any], on: Mapping[str, Any], *, record: bool) -> str:
    """Return the key of a run: the same lab, parameters, device and versions give the same one.

    Prose and outputs play no part; the code of the cells does.

    Args:
        path: The notebook.
        parameters: Values of its parameters.
        on: The device, from `device`.
        record: Whether the run writes records.
    """
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parts = [path.stem, code, dict(parameters), dict(on), versions(), __version__, record]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def source_digest() -> str:
    """Return a digest of the code that measures: lablib's calculators, toys and launchers."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in ("calc", "toys", "launch"):
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def parse_gpus(text: str, here: int) -> list[int]:
    """Return the numbers of the GPUs to use.

    Args:
        text: "all", a number of GPUs ("2"), "0" or "cpu" for none, or "0,3" for these two.
        here: How many there are.

    Raises:
        ValueError: If there are not so many; it says how many there are.
    """
    if text == "all":
        return list(range(here))
    if text == "cpu":
        return []
    if re.fullmatch(r"\d+(,\d+)*,?", text) is None:
        raise ValueError(f'gpus={text!r} is neither "all", a number, "cpu", nor a list such as 0,3')
    chosen = [int(part) for part in text.split(",") if part] if "," in text else list(range(int(text)))
    there_are = f"this machine has {here}" + ("; --gpus all takes what there is" if here != 1 else "")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"gpus={text} names a GPU twice")
    if any(number >= here for number in chosen):
        raise ValueError(f"gpus={text}, but {there_are}")
    return chosen
