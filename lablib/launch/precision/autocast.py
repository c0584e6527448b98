"""The casts of autocast, operator by operator, and where 16 bits save memory and where not.

Autocast stands between the model and the operators. Each operator is on one of four lists: run it in the low precision
(matmuls), run it in fp32 (logarithms, powers, norms on a GPU), make its inputs agree on the widest dtype (bilinear,
index_put), or leave it alone. `trace_autocast` looks below autocast, where a cast is an operator, `_to_copy`.

`precision_memory` counts states and activations of three recipes in PyTorch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lablib.calc.models import ModelConfig
from lablib.launch.measure import measure_states, saved_activations
from lablib.launch.torch_private import TorchDispatchMode, tree_leaves
from lablib.toys.precision import MasterWeights
from lablib.toys.transformer import Transformer

SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


@dataclass(frozen=True, order=True)
class OpCast:
    """One operator with one combination of dtypes."""

    op: str  # name without its overload: "mm", "native_layer_norm", "_to_copy", ...
    inputs: tuple[str, ...]  # dtypes of its floating-point tensors, in the order of the arguments
    outputs: tuple[str, ...]  # dtypes of its floating-point results

    def __str__(self) -> str:
        return f"{self.op}: {' '.join(self.inputs) or '-'} -> {' '.join(self.outputs) or '-'}"


@dataclass
class AutocastTrace:
    """Operators of a run, forward and backward."""

    # how often each operator ran with each dtypes, until the function returned
    forward: Counter[OpCast] = field(default_factory=Counter)
    backward: Counter[OpCast] = field(default_factory=Counter)  # the same while backward ran
    cast_bytes: int = 0  # bytes that casts from fp32 to the low precision wrote in forward

    def by_op(self, phase: str = "forward") -> dict[str, dict[str, int]]:
        """Return counts by operator and then by "inputs -> outputs": the rows of a table."""
        table: dict[str, dict[str, int]] = {}
        for cast, count in sorted(getattr(self, phase).items()):
            table.setdefault(cast.op, {})[str(cast).partition(": ")[2]] = count
        return table

    def dtypes(self, op: str) -> set[str]:
        """Return the dtypes in which an operator computed in forward: those of its inputs."""
        return {name for cast in self.forward if cast.op == op for name in cast.inputs}

    def casts(self, phase: str = "forward") -> int:
        """Return how many casts between floating-point dtypes ran."""
        found = getattr(self, phase)
        return sum(n for cast, n in found.items() if cast.op == "_to_copy" and cast.inputs != cast.outputs)


class _Tracer(TorchDispatchMode):
    def __init__(self, trace: AutocastTrace) -> None:
        super().__init__()
        self.trace, self.counts = trace, trace.forward

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = _floats((args, kwargs)), _floats(result)
        if inputs or outputs:
            self.counts[OpCast(name, tuple(map(_name, inputs)), tuple(map(_name, outputs)))] += 1
        narrowing = name == "_to_copy" and inputs and outputs and outputs[0].itemsize < inputs[0].itemsize
        if narrowing and self.counts is self.trace.forward:
            self.trace.cast_bytes += outputs[0].nbytes
        return result


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _name(tensor: Tensor) -> str:
    return SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def trace_autocast(
    fn: Callable[..., Tensor],
    *args: Any,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str = "cpu",
    backward: bool = True,
) -> AutocastTrace:
    """Run a function under autocast, and backward outside of it, and return what every operator read and wrote.

    Args:
        dtype: The low precision; None to run without autocast.
        device: Kind of device whose lists apply: "cpu" or "cuda".
    """
    trace = AutocastTrace()
    with _Tracer(trace) as tracer:
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            result = fn(*args)
        if backward:
            tracer.counts = trace.backward
            result.float().sum().backward()
    return trace


def gpu_policy() -> dict[str, str]:
    """Return what autocast does on a GPU with every operator on its lists: "lower", "fp32" or "promote".

    Read from the header that PyTorch ships, `ATen/autocast_mode.h`, whose lists the backends of GPUs share. Operators
    that it does not name run in whatever dtype they get. The CPU has lists of its own, seen only by a trace.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        raise FileNotFoundError(f"{header} is missing: this PyTorch was installed without headers; use the wheel")
    return dict(_read_policy(header.read_text(encoding="utf-8")))


def differs_on_gpu(trace: AutocastTrace) -> dict[str, tuple[set[str], str]]:
    """Return, by operator of a trace, its dtypes on the CPU and "lower" or "fp32", where a GPU's lists ask for that."""
    policy, found = gpu_policy(), {}
    for op in {cast.op for cast in trace.forward}:
        # Below autocast an operator may have the name of its kernel: _softmax, nll_loss_forward.
        name = next((n for n in (op, op.strip("_"), op.removesuffix("_forward")) if n in policy), None)
        rule, dtypes = policy.get(name or ""), trace.dtypes(op)
        if (rule == "fp32" and dtypes - {"fp32", "fp64"}) or (rule == "lower" and "fp32" in dtypes):
            found[op] = (dtypes, rule)
    return found


def _read_policy(text: str) -> Iterator[tuple[str, str]]:
    macros = {
        "AT_FORALL_LOWER_PRECISION_FP": "lower",
        "AT_FORALL_FP32": "fp32",
        "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32",
        "AT_FORALL_PROMOTE": "promote",
    }
    for macro, policy in macros.items():
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", text)
        for name in re.findall(r"_\(\s*(\w+)", body[1] if body else ""):
            yield name, policy


MEASURED_RECIPES = ("fp32", "mixed-bf16", "autocast-bf16")


@dataclass(frozen=True)
class PrecisionMemory:
    """Bytes of one recipe."""

    recipe: str  # a name in `lablib.calc.precision.recipes`
    params: int  # parameters of the model
    states: int  # weights, gradients, master weights and moments, measured
    activations: int  # what autograd kept, measured; with the casts of weights under autocast

    @property
    def states_per_param(self) -> float:
        """Bytes of states for each parameter."""
        return self.states / self.params


def precision_memory(config: ModelConfig, *, batch: int = 4, seq: int = 64) -> dict[str, PrecisionMemory]:
    """Train one step in fp32, in bf16 with master weights, and under autocast; count what each holds."""
    return {recipe: _measure(config, recipe, batch, seq) for recipe in MEASURED_RECIPES}


def _measure(config: ModelConfig, recipe: str, batch: int, seq: int) -> PrecisionMemory:
    generator = torch.Generator().manual_seed(0)
    windows_BT = torch.randint(config.vocab, (batch, seq + 1), generator=generator)
    model, weights = Transformer(config), None
    if recipe == "mixed-bf16":
        weights = MasterWeights(model, torch.bfloat16)
    working = weights.model if weights else model
    optimizer = torch.optim.AdamW(model.parameters())
    with saved_activations(working) as saved, torch.autocast("cpu", torch.bfloat16, recipe == "autocast-bf16"):
        loss = working.loss(windows_BT)
    loss.backward()
    # fp32 gradients of the master copy live only during the step, one tensor at a time if need be.
    states = measure_states(working, optimizer)
    if weights:
        weights.take_gradients()
    optimizer.step()
    states = measure_states(working, optimizer) | {"gradients": states["gradients"]}
    params = sum(p.numel() for p in working.parameters())
    return PrecisionMemory(recipe, params, sum(states.values()), saved.total)
