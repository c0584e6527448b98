"""What goes wrong with recomputation, and what its two ways do differently: small runs that return what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.toys.recompute import checkpoint as toy_checkpoint

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

    Args:
        implementation: "torch", "torch-reentrant" or "toy".
        preserve_rng_state: Whether to put the random state back.

    Raises:
        ValueError: If the implementation is unknown.
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


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        error: First line of the error's message, "" if there was none.
        replays: How often the function ran again.
        gradient_error: How far gradients are from those without recomputation; None after an error.
    """

    error: str
    replays: int
    gradient_error: float | None


def changed_function(implementation: str = "torch", *, shape_changes: bool = True) -> Outcome:
    """Run a function that does something else the second time, and say what came of it.

    PyTorch's way without reentrance compares shapes, dtypes and devices of what the replay keeps with what forward
    kept, and raises CheckpointError. What keeps its shape slips through, and reentrant ways compare nothing:
    gradients are wrong without a word.

    Args:
        implementation: "torch", "torch-reentrant" or "toy".
        shape_changes: Whether the second run keeps a tensor of another shape, or just another value.

    Raises:
        ValueError: If the implementation is unknown.
    """
    layer, x = _layer()
    runs = 0

    def fickle(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 1:
            return layer(x)
        return layer(torch.cat((x, x)))[:ROWS] if shape_changes else layer(2 * x)

    layer(x).sum().backward()
    right, x.grad = x.grad, None
    try:
        _way(implementation)(fickle, x).sum().backward()
    except CheckpointError as error:
        return Outcome(str(error).splitlines()[0], runs - 1, None)
    return Outcome("", runs - 1, (x.grad - right).abs().max().item())


def split_backward(implementation: str = "torch") -> Outcome:
    """Ask for the gradient of the input first and for those of the weights later, as zero-bubble schedules do.

    A reentrant way cannot: weights are no inputs of its function. The other one runs the function again for each of
    the two passes, unless they are told that they belong together, so recomputation is paid twice.

    Args:
        implementation: "torch", "torch-reentrant" or "toy".

    Raises:
        ValueError: If the implementation is unknown.
    """
    layer, x = _layer()
    runs = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return layer(x)

    weights = list(layer.parameters())
    right = torch.autograd.grad(layer(x).sum(), [x, *weights])
    loss = _way(implementation)(counted, x).sum()
    try:
        (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
        rest = torch.autograd.grad(loss, weights)
    except RuntimeError as error:
        return Outcome(str(error).splitlines()[0], runs - 1, None)
    errors = [(a - b).abs().max().item() for a, b in zip(right, (first, *rest), strict=True)]
    return Outcome("", runs - 1, max(errors))


def frozen_input(implementation: str = "torch") -> Outcome:
    """Recompute a layer whose input needs no gradient, as behind a frozen embedding.

    PyTorch's reentrant way returns an output without a graph, with a warning, and the layer never learns.

    Args:
        implementation: "torch", "torch-reentrant" or "toy".

    Raises:
        ValueError: If the implementation is unknown.
    """
    layer, x = _layer()
    x = x.detach()
    runs = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return layer(x)

    weights = list(layer.parameters())
    right = torch.autograd.grad(layer(x).sum(), weights)
    output = _way(implementation)(counted, x)
    if not output.requires_grad:
        return Outcome("the output has no graph: its parameters get no gradient", runs - 1, None)
    output.sum().backward()
    errors = [(w.grad - g).abs().max().item() for w, g in zip(weights, right, strict=True)]
    return Outcome("", runs - 1, max(errors))


def compiled(order: str) -> tuple[float, list[str]]:
    """Compile and recompute one layer in either order; return the gradients' error and what the compiler saw.

    `compile(checkpoint(layer))` puts the recomputed part into the graph as one marked operator, and the compiler's
    partitioner decides what to keep. `checkpoint(compile(layer))` shows the compiler a plain layer, which runs twice.

    Args:
        order: "compile outside" or "checkpoint outside".

    Returns:
        The largest difference to gradients without either, and the names of the operators in the graph.

    Raises:
        ValueError: If the order is another one.
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
