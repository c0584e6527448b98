"""What import-linter cannot hold: a toy never leans on its oracle, and no modules import each other."""

import ast
from pathlib import Path

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


# Import cycles, those of lazy imports and of TYPE_CHECKING included: a module must be readable before those above it.


def imports(package: Path) -> dict[str, set[str]]:
    """Return every module below a package with the modules of the package that it imports anywhere in its text."""
    files = {}
    for path in package.rglob("*.py"):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for module, path in files.items():
        names = set()
        home = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {item.name for item in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                # What is no module of its own comes from the one that it is imported from.
                names |= {
                    f"{source}.{item.name}" if f"{source}.{item.name}" in files else source for item in node.names
                }
        found[module] = {name for name in names if name in files and name != module}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, each sorted."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for module in graph[todo.pop()] - seen:
                seen.add(module)
                todo.append(module)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return sorted(map(list, groups))


def test_no_modules_import_each_other():
    graph = imports(LABLIB)
    assert len(graph) > 100
    assert cycles(graph) == []


def test_every_kind_of_cycle_is_seen(tmp_path):
    package = tmp_path / "house"
    (package / "room" / "corner").mkdir(parents=True)
    texts = {
        "__init__": "",
        "plain": "from house import lazy",
        "lazy": "def late():\n    import house.plain",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.room.corner.deep import X",
        "alone": "import house.plain\nimport os",
        "room/__init__": "",
        "room/corner/__init__": "from .deep import X",
        "room/corner/deep": "from ...typed import Y",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    assert cycles(imports(package)) == [["house.lazy", "house.plain"], ["house.room.corner.deep", "house.typed"]]
