"""The calculators load fast and need the standard library only."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import lablib.calc

BUDGET_SECONDS = 0.15
MODULES = [module.name for module in pkgutil.walk_packages(lablib.calc.__path__, "lablib.calc.")]

# The finder of an editable install may load standard modules, never others: only what the import adds counts.
# Processor time: other work on the machine must not fail a test, and an import waits for nothing but the disk.
PROBE = """
import importlib, json, sys, time
before = set(sys.modules)
start = time.process_time()
for module in sys.argv[1:]:
    importlib.import_module(module)
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def _import(*modules: str) -> tuple[float, list[str]]:
    output = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, check=True)
    seconds, loaded = json.loads(output.stdout)
    return seconds, loaded


def test_memory_imports_within_its_budget() -> None:
    best = min(_import("lablib.calc.memory.formulas")[0] for _ in range(5))
    assert best <= BUDGET_SECONDS


def test_calculators_load_the_standard_library_only() -> None:
    loaded = _import(*MODULES)[1]
    assert set(MODULES) <= set(loaded)
    # A listing that does not descend into packages would miss most of them.
    assert len(MODULES) + 1 == len([*Path(lablib.calc.__file__).parent.rglob("*.py")])
    roots = {name.partition(".")[0] for name in loaded}
    assert roots - {"lablib"} <= set(sys.stdlib_module_names)
    assert all(name.startswith("lablib.calc") for name in loaded if name.startswith("lablib."))
