"""The calculators load fast and need the standard library only."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import lablib.calc

BUDGET_SECONDS = 0.15
MODULES = [f"lablib.calc.{module.name}" for module in pkgutil.iter_modules(lablib.calc.__path__)]

# The finder of an editable install may load standard modules, never others: only what the import adds counts.
# Processor time: other work on the machine must not fail a test, and an import waits for nothing but the disk.
PROBE = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
import {module}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def _import(module: str) -> tuple[float, list[str]]:
    output = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=True
    )
    seconds, loaded = json.loads(output.stdout)
    return seconds, loaded


def test_memory_imports_within_its_budget() -> None:
    best = min(_import("lablib.calc.memory")[0] for _ in range(5))
    assert best <= BUDGET_SECONDS


@pytest.mark.parametrize("module", MODULES)
def test_a_calculator_loads_the_standard_library_only(module: str) -> None:
    loaded = _import(module)[1]
    assert module in loaded
    roots = {name.partition(".")[0] for name in loaded}
    assert roots - {"lablib"} <= set(sys.stdlib_module_names)
    assert all(name.startswith("lablib.calc") for name in loaded if name.startswith("lablib."))
