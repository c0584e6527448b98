"""What import-linter cannot hold: a toy never leans on its oracle, and no modules import each other."""

import ast
import graphlib
import json
import re
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
LABLIB = ROOT / "lablib"

#: PyTorch's own implementations: what the toys are held to, so no toy may be built from them.
ORACLES = (
    "torch.nn.parallel",
    "torch.nn.DataParallel",
    "torch.nn.SyncBatchNorm",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._composable",
    "torch.distributed.pipelining",
    "torch.distributed.algorithms",
    "torch.distributed.optim",
)


def mentioned(source):
    """Return every dotted name that a module imports or reaches through what it imports."""
    tree = ast.parse(source)
    alias, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names.add(item.name)
                alias[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            for item in node.names:
                names.add(f"{module}.{item.name}")
                alias[item.asname or item.name] = f"{module}.{item.name}"
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in alias:
            names.add(".".join([alias[node.id], *reversed(parts)]))
    return names


def oracles_in(source):
    """Return the oracles that a module uses."""
    return sorted(name for name in mentioned(source) if any(name == o or name.startswith(f"{o}.") for o in ORACLES))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn.parallel",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from torch.nn import parallel",
        "from torch import nn\nmodel = nn.parallel.DistributedDataParallel(model)",
        "import torch\nwrap = torch.distributed.fsdp.fully_shard",
        "import torch.distributed as dist\nmesh = dist.tensor.DTensor",
        "def late():\n    from torch.distributed.pipelining import Schedule1F1B",
    ],
)
def test_every_way_to_an_oracle_is_seen(source):
    assert oracles_in(source)


def test_the_collectives_are_no_oracle():
    source = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    assert oracles_in(source + "dist.all_reduce(x)\nnn.Linear(2, 2)\ntorch.autograd.Function") == []


def test_no_toy_is_built_from_its_oracle():
    used = {path.name: oracles_in(path.read_text(encoding="utf-8")) for path in (LABLIB / "toys").rglob("*.py")}
    assert len(used) > 10
    assert not any(used.values()), {name: oracles for name, oracles in used.items() if oracles}


def imports(package):
    """Return every module of a package with the modules that it imports, in functions and for type checkers too."""
    graph = grimp.build_graph(package, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_modules_import_each_other():
    """A module must be readable before those above it."""
    graph = imports("lablib")
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


@pytest.mark.parametrize(
    "late",
    ["def late():\n    import house.b", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import X"],
)
def test_every_kind_of_cycle_is_seen(late, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house").mkdir()
    for name, text in {"__init__": "", "a": late, "b": "from house import a"}.items():
        (tmp_path / "house" / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports("house")).prepare()


def what_readers_run():
    """Return the code of every page, lab, solution and script, by its file."""
    cells = re.compile(r"^```{code-cell}[^\n]*\n(?::[^\n]*\n)*(.*?)^```", re.M | re.S)
    found = {path: "\n".join(cells.findall(path.read_text("utf-8"))) for path in (ROOT / "book").glob("*.md")}
    for path in (ROOT / "labs").glob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))["cells"]
        found[path] = "\n".join("".join(cell["source"]) for cell in notebook if cell["cell_type"] == "code")
    return found | {path: path.read_text("utf-8") for path in (ROOT / "labs").rglob("*.py")}


def test_no_reader_needs_the_tests():
    """What a page or a lab quotes of tests/evidence is a file in book/data."""
    code = what_readers_run()
    assert len(code) > 60
    needs = re.compile(r"^\s*(?:from|import) tests\b", re.M)
    assert [path.name for path, source in code.items() if needs.search(source)] == []
    assert needs.search("def late():\n    from tests.evidence import headline")
