"""Name what autograd keeps of the toy transformer, tensor by tensor, in the words of `lablib.calc.saved_tensors`.

    for kept in named_saved_tensors(model, tokens):
        print(kept.block, kept.name, kept.shape, kept.bytes)

Autograd's hooks get a tensor and no name. The module and the operator that keep it give one: what `norm1` keeps first
is its input, what `softmax` keeps is its output. In other models a tensor is named by module and operator alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lablib.calc.saved_tensors import SavedTensor
from lablib.launch.measure import CurrentOperator

# What the n-th tensor is that an operator keeps in a module, parameters left out.
_RMSNORM = {
    "pow": ("input of {norm}",),
    "rsqrt": ("inverse root of {norm}",),
    "mul": ("inverse root of {norm}", "input of {norm}", "normed value of {norm}"),
}
_LAYERNORM = {"layer_norm": ("input of {norm}", "mean of {norm}", "inverse deviation of {norm}")}
_BLOCK = {
    ("attention.q", "linear"): ("output of norm 1",),
    ("attention", "mul"): ("rotary tables",) * 4,
    ("attention", "matmul"): ("k", "q", "v", "weights after dropout"),
    ("attention", "softmax"): ("softmax output",),
    ("attention.dropout", "dropout"): ("dropout mask of the weights",),
    ("attention", "scaled_dot_product_attention"): ("k", "q", "v", "softmax statistics", "attention output"),
    ("attention.out", "linear"): ("attention output",),
    ("dropout", "dropout"): ("dropout mask of attention", "dropout mask of the MLP"),
    ("mlp.up", "linear"): ("output of norm 2",),
    ("mlp.gate", "linear"): ("output of norm 2",),
    ("mlp", "gelu"): ("input of GELU",),
    ("mlp", "silu"): ("output of gate",),
    ("mlp", "mul"): ("output of up", "output of SiLU"),
    ("mlp.down", "linear"): ("output of GELU",),
}
_GATED = {("mlp.down", "linear"): ("SiLU(gate) × up",)}
_OUTSIDE = {
    ("embed", "embedding"): ("tokens",),
    ("positions", "embedding"): ("positions",),
    ("dropout", "dropout"): ("dropout mask of the embedding",),
    ("head", "linear"): ("output of the final norm",),
    ("", "cross_entropy"): ("log-probabilities", "log-probabilities", "targets", "sum of weights"),
}


@dataclass(frozen=True)
class KeptTensor:
    """One storage that autograd keeps, counted where it was kept first.

    Attributes:
        block: Number of the block, None outside.
        name: What it is; "module: operator" where no name is known.
        module: The innermost module that kept it, by its path in the model; "" for the model itself or none.
        operator: The function that kept it: "linear", "softmax", ...
        shape: Of the tensor as it was kept, which may be a view.
        dtype: Of its values.
        bytes: Of its storage.
        copies: How often operators kept it, in any view.
    """

    block: int | None
    name: str
    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    copies: int


def named_saved_tensors(model: nn.Module, run: Tensor | Callable[[], object]) -> list[KeptTensor]:
    """Return every storage that one forward pass leaves behind for backward, in the order of keeping.

    Parameters and buffers exist anyway and are left out; a view counts as its storage.

    Args:
        model: Whose modules give names; `lablib.toys.transformer.Transformer` gives all of them.
        run: Windows of tokens for `model.loss`, or a function that runs forward.
    """
    paths = {module: path for path, module in model.named_modules()}
    existing = {
        StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())
    }
    running: list[nn.Module] = []
    order: Counter[tuple[str, str]] = Counter()
    found: dict[StorageWeakRef, dict] = {}
    copies: Counter[StorageWeakRef] = Counter()
    operator = CurrentOperator()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference in existing or not storage.nbytes():
            return tensor
        module = paths.get(running[-1], "") if running else ""
        index = order[module, operator.name]
        order[module, operator.name] += 1
        copies[reference] += 1
        if reference not in found:
            block, name = _name(model, module, operator.name, index)
            found[reference] = {
                "block": block,
                "name": name,
                "module": module,
                "operator": operator.name,
                "shape": tuple(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": storage.nbytes(),
            }
        return tensor

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(lambda module, _: running.append(module)).remove)
        leave = register_module_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
        stack.callback(leave.remove)
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(operator)
        # The result holds what was kept: without it, storages could go and their names come again.
        result = run() if callable(run) else model.loss(run)
    kept = [KeptTensor(**entry, copies=copies[reference]) for reference, entry in found.items()]
    del result
    return kept


def _name(model: nn.Module, module: str, operator: str, index: int) -> tuple[int | None, str]:
    inside = re.fullmatch(r"blocks\.(\d+)\.?(.*)", module)
    block, path = (int(inside[1]), inside[2]) if inside else (None, module)
    norm = {"norm1": "norm 1", "norm2": "norm 2", "norm": "the final norm"}.get(path)
    if norm:
        names = (_RMSNORM | _LAYERNORM).get(operator, ())
    elif block is None:
        names = _OUTSIDE.get((path, operator), ())
    else:
        gated = getattr(getattr(model, "config", None), "gated_mlp", False)
        names = (_BLOCK | (_GATED if gated else {})).get((path, operator), ())
    if index < len(names):
        return block, names[index].format(norm=norm)
    return block, f"{module or '(outside)'}: {operator}"


def bytes_by_name(kept: Iterable[KeptTensor | SavedTensor], block: int | None = None) -> dict[str, int]:
    """Return the bytes of tensors by name, measured or computed, so that the two can be compared.

    Args:
        kept: What `named_saved_tensors` or `lablib.calc.saved_tensors.block_tensors` returned.
        block: Only what this block kept, without the rotary tables, which all blocks share; None: everything.
    """
    total: Counter[str] = Counter()
    for tensor in kept:
        mine = not isinstance(tensor, KeptTensor) or block is None or tensor.block == block
        if mine and not (block is not None and tensor.name == "rotary tables"):
            total[tensor.name] += tensor.bytes
    return dict(total)
