"""Private names of PyTorch: all are in one module, which says what to do when one is gone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from lablib.launch import torch_private
from lablib.launch.torch_private import NAMES, MissingPrivateNameError, must_have

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lablib", "labs", "tests", "tools", "book", "_ext")
HOME = "lablib/launch/torch_private.py"
#: Private names elsewhere, by file and name, each with the reason why it stays there.
REVIEWED = {
    (
        "lablib/launch/recompute/measured_steps.py",
        "torch.ops.aten._scaled_dot_*",
    ): "operators keep their names: files hold them",
    (
        "tests/evidence/oracles/context.py",
        "torch.ops.aten._scaled_dot_*",
    ): "the CPU's kernels, by their operators' names",
    ("lablib/launch/measure/recorder.py", "torch._C"): "the function itself says what is missing",
    ("lablib/launch/*.py", "torch._dynamo"): "loaded ahead to save time; the first optimizer loads it anyway",
    ("lablib/launch/runs/real_run.py", "torch._inductor"): "a word of the compiler's messages; nothing is looked up",
    ("labs/02_data_parallelism.ipynb", "torch._dynamo"): "loaded ahead to save time",
    ("tests/test_accelerate_script.py", "torch._dynamo"): "loaded ahead to save time",
    ("tests/test_zero.py", "torch.optim._muon"): "the oracle of the test",
    ("tests/standing_ranks.py", "torch.distributed.tensor.*"): "plans that name groups of the answer before",
    ("tests/test_arrows.py", "torch.distributed.*"): "packages that toys must not import",
    ("tests/test_fp8.py", "torch._scaled_mm"): "the oracle of the test",
    ("tests/test_cuda_memory.py", "torch.cuda._memory_viz"): "the oracle of the test",
    ("tests/test_cuda_memory.py", "torch._C"): "a stand-in for the function is put there",
    ("tests/test_overlap.py", "torch.distributed._compute_bucket_assignment_by_size"): "the oracle of the test",
    ("tests/test_recompute.py", "torch.distributed.pipelining._backward"): "the oracle of the test",
    ("tests/test_context_parallel.py", "torch.ops.aten._scaled_dot_*"): "the kernel that the oracle's ring is given",
    ("tests/test_recorder.py", "torch.distributed._functional_collectives"): "learners' code uses it",
    ("tests/standing_ranks.py", "torch.distributed.distributed_c10d._world"): "ends the groups that an answer made",
}


def sources() -> Iterator[tuple[str, str]]:
    """Every file with code, and its code: cells of notebooks and of chapters, too."""
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            yield name, path.read_text(encoding="utf-8")
        elif path.suffix == ".ipynb" and ".ipynb_checkpoints" not in name:
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            yield name, "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            cells = re.findall(r"^```{code-cell}[^\n]*\n(?::[^\n]*\n)*(.*?)^```", text, re.M | re.S)
            yield name, "\n".join(cells)


def private(dotted: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in dotted.split(".")[1:])


def private_names(code: str) -> set[str]:
    """Private names of torch in a program: imported, reached through a module's name, or written as a module's name."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.M))
    bound, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found.add(alias.name)
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found.add(node.module if private(node.module) else f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.add(node.value)
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            found.add(".".join([bound[inner.id], *reversed(parts)]))
    found = {name for name in found if private(name)}
    # Of `a._b` and `a._b.c` one is enough.
    return {name for name in found if not any(name.startswith(f"{other}.") for other in found)}


def reason(file: str, name: str) -> str | None:
    return next((why for (path, what), why in REVIEWED.items() if fnmatch(file, path) and fnmatch(name, what)), None)


def test_private_names_are_in_one_module_or_have_a_reason() -> None:
    elsewhere = {
        (file, name)
        for file, code in sources()
        if file not in (HOME, "tests/torch_schedules.py", "tests/test_torch_private.py")
        for name in private_names(code)
    }
    unreviewed = sorted(found for found in elsewhere if not reason(*found))
    assert unreviewed == [], f"put them into {HOME}, or say here why not"
    unused = [key for key in REVIEWED if not any(fnmatch(f, key[0]) and fnmatch(n, key[1]) for f, n in elsewhere)]
    assert unused == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._a.b import C", {"torch._a.b"}),
        ("from torch.a import _b", {"torch.a._b"}),
        ("import torch.a._b as c\nc.d()", {"torch.a._b"}),
        ("import torch\ntorch.cuda.memory._snapshot()\ntorch.__version__", {"torch.cuda.memory._snapshot"}),
        ("import torch.distributed as dist\ndist._x.y", {"torch.distributed._x"}),
        ("from torch.a import b\nb._c()", {"torch.a.b._c"}),
        ("preload(['torch._dynamo'])", {"torch._dynamo"}),
        ("'''Of torch._dynamo.'''\nself._x = other._y", set()),
        ("%pip install x\nfrom torch.nn import Linear", set()),
    ],
)
def test_what_counts_as_private(code: str, names: set[str]) -> None:
    assert private_names(code) >= names
    assert {name for name in private_names(code) if not any(name.startswith(n) for n in names)} == set()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "clear_cublas_workspaces"])
def test_the_installed_pytorch_has_every_name(name: str) -> None:
    assert getattr(torch_private, name) is not None  # most are called, but some are modules or settings


def test_a_name_that_is_gone_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "moved", ("torch.cuda.memory", "_moved"))
    monkeypatch.setitem(NAMES, "gone", ("torch._gone.away", "Gone"))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for name, where in (("moved", r"torch\.cuda\.memory\._moved"), ("gone", r"torch\._gone\.away\.Gone")):
        with pytest.raises(
            MissingPrivateNameError,
            match=rf"torch 2\.99\.0 has no {where}: .* in torch 2\.11 to 2\.15; .*'torch==2\.13\.\*'",
        ):
            getattr(torch_private, name)
    with pytest.raises(ImportError, match=r"torch 2\.99\.0 has no torch\._gone"):
        from lablib.launch.torch_private import gone  # noqa: F401
    with pytest.raises(MissingPrivateNameError, match=r"has no torch\.nn\.modules\.linear\.Linear\._inside: it is"):
        must_have(torch.nn.Linear(1, 1), "weight", "_inside")
    assert not hasattr(torch_private, "anything_else")
