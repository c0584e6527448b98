"""What `rung doctor --gpu` says about each lab before it is paid for: whether it runs here, and what will fail for what reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.cli.doctor import LIMITED, MISSING, OK, Finding

#: The model and the batch of lab 08's cell for a GPU; tests/test_doctor_gpu.py holds them to the lab.
FLOAT8_MODEL = {"num_layers": 4, "hidden": 4096, "max_positions": 2048}
FLOAT8_BATCH = {"micro_batch": 8, "seq": 2048}


@dataclass(frozen=True)
class Found:
    """What the labs depend on.

    Attributes:
        capabilities: Compute capability of every GPU.
        memory: Bytes of the smallest one.
        compiles: Whether `torch.compile` works.
        talks: Whether an all-reduce over all GPUs works; None with one GPU.
        no_float8: Why float8 does not train here, or None.
    """

    capabilities: Sequence[tuple[int, int]]
    memory: int
    compiles: bool
    talks: bool | None
    no_float8: str | None


def judge_compile(lacks: Sequence[str], seconds: float | None, error: str = "") -> Finding:
    """Judge `torch.compile`, which calls a C compiler and needs Python's header.

    Args:
        lacks: From `lablib.launch.machine_probe.lacks_for_compile`.
        seconds: What compiling a function took, or None if it failed.
        error: How it failed.
    """
    if seconds is not None:
        return Finding("torch.compile", OK, f"compiles a function, in {seconds:.1f} s")
    if lacks:
        what = {"gcc": "a C compiler"}
        detail = f"fails: {' and '.join(what.get(name, 'Python.h') for name in lacks)} is missing"
        return Finding("torch.compile", LIMITED, detail, f"apt-get install -y {' '.join(lacks)}")
    return Finding("torch.compile", LIMITED, f"fails: {error}", "choose an image of kind devel")


def judge_labs(found: Found) -> list[Finding]:
    """Return what will become of each lab that has something to measure on a GPU.

    Args:
        found: What they depend on.
    """
    from lablib.calc.cost_sheet import LABS

    return [_lab(budget.lab, found) for budget in LABS]


def _lab(lab: str, found: Found) -> Finding:
    name, gpus = f"lab {lab}", len(found.capabilities)
    if lab in ("06", "11") and found.talks is False:
        mend = "CUDA_VISIBLE_DEVICES=0 before the command leaves one GPU, with which it runs"
        return Finding(name, MISSING, f"fails: the {gpus} GPUs cannot reduce together", mend)
    if lab == "08":
        return _lab_08(name, found)
    if lab in ("09", "11") and min(found.capabilities) < (8, 0):
        detail = "runs, and its times say little: before capability 8.0 a GPU has no matrix units for bf16"
        return Finding(name, LIMITED, detail, "rent an A10, an L4 or something newer")
    if lab == "11" and not found.compiles:
        return Finding(name, LIMITED, "runs, and records that its compiled cases did not compile")
    if lab == "11" and gpus == 1:
        return Finding(name, LIMITED, "measures memory, MFU and recomputation; scaling wants two GPUs")
    return Finding(name, OK, "runs")


def _lab_08(name: str, found: Found) -> Finding:
    from lablib.calc.memory import training_memory
    from lablib.toys.transformer import tiny_config

    if found.no_float8:
        return Finding(name, LIMITED, f"leaves FP8 out: {found.no_float8}")
    if not found.compiles:
        return Finding(name, LIMITED, "runs, and records that FP8 did not compile", "see torch.compile")
    model = tiny_config("llama", **FLOAT8_MODEL)
    need = training_memory(model, recipe="pure-bf16", attention="fused", **FLOAT8_BATCH).total
    if need > found.memory:
        detail = f"runs, and records that FP8 takes about {need / 1e9:.0f} GB, more than the GPU's {found.memory / 1e9:.0f}"
        return Finding(name, LIMITED, detail, "rent a GPU with more memory")
    return Finding(name, OK, "runs")
