"""The calculators need the standard library only, and little of it."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import lablib.calc

MODULES = [module.name for module in pkgutil.walk_packages(lablib.calc.__path__, "lablib.calc.")]

# The finder of an editable install may load standard modules, never others: only what the import adds counts.
PROBE = """
import importlib, json, sys
before = set(sys.modules)
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _import(*modules: str) -> list[str]:
    output = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, check=True)
    return json.loads(output.stdout)


def test_a_calculator_loads_no_servers_and_no_parsers_of_programs() -> None:
    """What takes long to load in the standard library, and what no formula needs; `make bench` has the seconds."""
    heavy = {
        "asyncio",
        "http",
        "xml",
        "unittest",
        "multiprocessing",
        "concurrent",
        "socket",
        "ssl",
        "email",
        "argparse",
    }
    assert heavy.isdisjoint(_import("lablib.calc.memory.formulas"))


def test_calculators_load_the_standard_library_only() -> None:
    loaded = _import(*MODULES)
    assert set(MODULES) <= set(loaded)
    # A listing that does not descend into packages would miss most of them.
    assert len(MODULES) + 1 == len([*Path(lablib.calc.__file__).parent.rglob("*.py")])
    roots = {name.partition(".")[0] for name in loaded}
    assert roots - {"lablib"} <= set(sys.stdlib_module_names)
    assert all(name.startswith("lablib.calc") for name in loaded if name.startswith("lablib."))
