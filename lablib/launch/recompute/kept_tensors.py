"""Tensors that autograd keeps of the toy transformer, by name; and how recomputation goes wrong, in small runs.

    for kept in named_saved_tensors(model, tokens):
        print(kept.block, kept.name, kept.shape, kept.bytes)

Names are those of `lablib.calc.memory.activations.saved_tensors`. Autograd's hooks get a tensor and no name. The module
and the operator that keep it give one: what `norm1` keeps first is its input, what `softmax` keeps is its output. In
other models a tensor is named by module and operator alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.calc.memory.activations import SavedTensor
from lablib.launch.measure import CurrentOperator
from lablib.toys.recompute import checkpoint as toy_checkpoint

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
    """One storage that autograd keeps, counted where it was kept first."""

    block: int | None  # number of the block, None outside
    name: str  # what it is; "module: operator" where no name is known
    module: str  # the innermost module that kept it, by its path in the model; "" for the model itself or none
    operator: str  # the function that kept it: "linear", "softmax", ...
    shape: tuple[int, ...]  # of the tensor as it was kept, which may be a view
    dtype: torch.dtype  # of its values
    bytes: int  # of its storage
    copies: int  # how often operators kept it, in any view


def named_saved_tensors(model: nn.Module, run: Tensor | Callable[[], object]) -> list[KeptTensor]:
    """Return every storage that one forward pass leaves behind for backward, in the order of keeping.

    `run` is windows of tokens for `model.loss`, or a function that runs forward. Parameters and buffers exist anyway
    and are left out; a view counts as its storage.
    """
    paths = {module: path for path, module in model.named_modules()}
    existing = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
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
    """Return the bytes of tensors by name, measured or computed, so that the two can be compared."""
    total: Counter[str] = Counter()
    for tensor in kept:
        mine = not isinstance(tensor, KeptTensor) or block is None or tensor.block == block
        if mine and not (block is not None and tensor.name == "rotary tables"):
            total[tensor.name] += tensor.bytes
    return dict(total)


WAYS: dict[str, Callable] = {
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch-reentrant": partial(torch_checkpoint, use_reentrant=True),
    "toy": toy_checkpoint,
}
ROWS, WIDTH = 5, 7


def _way(name: str) -> Callable:
    if name not in WAYS:
        raise ValueError(f"implementation={name!r} must be one of {', '.join(map(repr, WAYS))}")
    return WAYS[name]


def _layer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
    return layer, torch.randn(ROWS, WIDTH, requires_grad=True)


def dropout_error(implementation: str = "torch", *, preserve_rng_state: bool = True) -> float:
    """Return how far the gradient of a layer with dropout is from the one without recomputation.

    0 when the replay draws the numbers of forward again; far off when it draws new ones, as then backward belongs to
    another mask than the loss. No error is raised: shapes and dtypes are the same.
    """
    layer, x = _layer()

    def dropped(x: Tensor) -> Tensor:
        return layer(F.dropout(x, 0.5))

    gradients = []
    for run in (dropped, partial(_way(implementation), dropped, preserve_rng_state=preserve_rng_state)):
        torch.manual_seed(1)
        x.grad = None
        run(x).pow(2).sum().backward()
        gradients.append(x.grad)
    return (gradients[0] - gradients[1]).abs().max().item()


class _Counted:
    """A layer that counts its runs; after the first one another function may take its place."""

    def __init__(self, layer: nn.Module, later: Callable[[Tensor], Tensor] | None = None) -> None:
        self.layer, self.later, self.runs = layer, later or layer, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.layer(x) if self.runs == 1 else self.later(x)


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    error: str  # first line of the error's message, "" if there was none
    replays: int  # how often the function ran again
    gradient_error: float | None  # how far gradients are from those without recomputation; None after an error


def changed_function(implementation: str = "torch", change: str = "shape") -> Outcome:
    """Run a function that does something else the second time, and say what came of it.

    PyTorch's way without reentrance sees fewer tensors in the replay, and other shapes, dtypes and devices
    than forward's, and raises CheckpointError. Reentrant ways compare the output's shape alone. What slips through may
    have wrong gradients, without a word.

    Args:
        change: "shape" of what is inside, "fewer" tensors inside, "value", or shape of the "output".
    """
    layer, x = _layer()
    changed = {
        "shape": lambda x: layer(torch.cat((x, x)))[:ROWS],
        "fewer": lambda x: layer[0](x)[:, :WIDTH],
        "value": lambda x: layer(2 * x),
        "output": lambda x: layer(x)[1:],
    }[change]
    fickle = _Counted(layer, changed)
    layer(x).sum().backward()
    right, x.grad = x.grad, None
    try:
        _way(implementation)(fickle, x).sum().backward()
    except RuntimeError as error:  # CheckpointError is one
        return Outcome(str(error).splitlines()[0], fickle.runs - 1, None)
    return Outcome("", fickle.runs - 1, (x.grad - right).abs().max().item())


def split_backward(implementation: str = "torch") -> Outcome:
    """Ask for the gradient of the input first and for those of the weights later, as zero-bubble schedules do.

    A reentrant way cannot: weights are no inputs of its function. The other one runs the function again for each of
    the two passes, unless they are told that they belong together, so recomputation is paid twice.
    """
    layer, x = _layer()
    counted = _Counted(layer)
    weights = list(layer.parameters())
    right = torch.autograd.grad(layer(x).sum(), [x, *weights])
    loss = _way(implementation)(counted, x).sum()
    try:
        (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
        rest = torch.autograd.grad(loss, weights)
    except RuntimeError as error:
        return Outcome(str(error).splitlines()[0], counted.runs - 1, None)
    errors = [(a - b).abs().max().item() for a, b in zip(right, (first, *rest), strict=True)]
    return Outcome("", counted.runs - 1, max(errors))


def frozen_input(implementation: str = "torch") -> Outcome:
    """Recompute a layer whose input needs no gradient, as behind a frozen embedding."""
    layer, x = _layer()
    counted, x = _Counted(layer), x.detach()
    weights = list(layer.parameters())
    right = torch.autograd.grad(layer(x).sum(), weights)
    output = _way(implementation)(counted, x)
    if not output.requires_grad:
        return Outcome("the output has no graph: its parameters get no gradient", counted.runs - 1, None)
    output.sum().backward()
    errors = [(w.grad - g).abs().max().item() for w, g in zip(weights, right, strict=True)]
    return Outcome("", counted.runs - 1, max(errors))


def compiled(order: str) -> tuple[float, list[str]]:
    """Compile and recompute one layer in either order; return the gradients' error and the graph's operators.

    `compile(checkpoint(layer))` puts the recomputed part into the graph as one marked operator, and the compiler's
    partitioner decides what to keep. `checkpoint(compile(layer))` shows the compiler a plain layer, which runs twice.
    """
    layer, x = _layer()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def recomputed(x: Tensor) -> Tensor:
        return torch_checkpoint(layer, x, use_reentrant=False)

    if order == "compile outside":
        run = torch.compile(recomputed, backend=backend)
    elif order == "checkpoint outside":
        run = partial(torch_checkpoint, torch.compile(layer, backend=backend), use_reentrant=False)
    else:
        raise ValueError(f"order={order!r} must be 'compile outside' or 'checkpoint outside'")
    (right,) = torch.autograd.grad(layer(x).pow(2).sum(), [x])
    (gradient,) = torch.autograd.grad(run(x).pow(2).sum(), [x])
    return (gradient - right).abs().max().item(), seen
