"""Files of the repository that are in no package: tools, extensions of the book, solutions and scripts of the labs."""

import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load(path: str | Path) -> ModuleType:
    """Return a new module from a file, named from the root of the repository; it is not in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lab_script(name: str) -> ModuleType:
    """Import a script of the labs by its name, as one that lies beside it does."""
    folder = str(ROOT / "labs" / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def run_forked(words: list[str], variables: dict[str, str], output: Path) -> None:
    """Be `python WORDS` with these variables in a process that was forked off a server which has loaded torch."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= variables
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        if sys.modules["torch.distributed"].is_initialized():
            print("the process group was not destroyed")
