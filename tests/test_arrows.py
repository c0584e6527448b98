"""What import-linter cannot hold: calc is the standard library alone, and a toy never leans on its oracle."""

import ast
import sys
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


def _modules(room):
    return sorted((LABLIB / room).rglob("*.py"))


def mentioned(source):
    """Return every dotted name that a module imports or reaches through what it imports."""
    tree = ast.parse(source)
    alias, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names.add(item.name)
                alias[item.asname or item.name.split(".")[0]] = (
                    item.name if item.asname else item.name.split(".")[0]
                )
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
    return sorted(
        name for name in mentioned(source) if any(name == o or name.startswith(f"{o}.") for o in ORACLES)
    )


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


@pytest.mark.parametrize("path", _modules("toys"), ids=lambda path: path.stem)
def test_a_toy_is_not_built_from_its_oracle(path):
    assert oracles_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", _modules("calc"), ids=lambda path: path.stem)
def test_calc_is_the_standard_library_alone(path):
    foreign = {
        name
        for name in mentioned(path.read_text(encoding="utf-8"))
        if name.split(".")[0] not in sys.stdlib_module_names and not f"{name}.".startswith("lablib.calc.")
    }
    # `lablib` itself is empty but for its version; every other room may need torch.
    assert foreign <= {"lablib", "lablib.__version__"}


@pytest.mark.parametrize("path", sorted(LABLIB.rglob("*.py")), ids=lambda path: str(path.relative_to(LABLIB)))
def test_a_module_is_short_enough_to_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
