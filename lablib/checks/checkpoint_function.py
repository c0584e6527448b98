"""The check of a hand-written checkpoint: what it keeps, how often it runs, which gradients and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lablib.checks.report import Wrong, check
from lablib.launch.live_bytes import LiveBytes

ROWS, WIDTH = 96, 64


class _Block(nn.Module):
    """Two layers and a wide middle; counts its runs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        self.runs += 1
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


def _step(run: Callable, dropout: float) -> dict:
    """Two blocks, a loss that weighs every output differently, one backward pass."""
    torch.manual_seed(0)
    blocks = [_Block(dropout), _Block(dropout)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weigh = torch.randn(ROWS, WIDTH)
    inside = sum(8 * ROWS * WIDTH * 4 for _ in blocks)  # the wide middle, once a block
    torch.manual_seed(1)
    with LiveBytes() as live:
        y = x
        for block in blocks:
            y = run(block, y)
        live.end_forward()
        kept = live.kept
        forward_runs = [block.runs for block in blocks]
        _backward((weigh * y).sum())
    return {
        "value": y.detach(),
        "node": y.grad_fn,
        "kept": kept,
        "inside": inside,
        "runs": (forward_runs, [block.runs for block in blocks]),
        "input": x.grad,
        "weights": [p.grad for block in blocks for p in block.parameters()],
        "next": torch.rand(3),
    }


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise Wrong(
            "The output has no graph, so backward ends here. Run the block inside of the Function's forward, which "
            "hides it from autograd and leaves one node, and call `YourFunction.apply(...)` on the input."
        )
    try:
        loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise Wrong(
            "The replay's backward went on past the block, through the graph that made its input. Start the replay from "
            "a detached copy of the input that needs a gradient, and stop there."
        ) from None


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@check
def checkpoint(answer: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Judge `checkpoint(block, x)` beside the same blocks without it, first without and then with dropout."""
    for dropout in (0.0, 0.5):
        got, right = _step(answer, dropout), _step(lambda block, x: block(x), dropout)
        _judge(got, right, dropout)
    return "Same outputs, gradients and random numbers, and nothing kept but the inputs."


def _judge(got: dict, right: dict, dropout: float) -> None:
    if not _same(got["value"], right["value"]):
        raise Wrong("Forward should return what the block returns.")
    first, in_all = got["runs"]
    if first != [1, 1]:
        raise Wrong(f"Forward should run each block once, and runs it {first[0]} times.")
    if got["kept"] > right["kept"] - 0.75 * right["inside"]:
        raise Wrong(
            "After forward the values inside of the block are still alive. Run the block under no_grad, and keep "
            "its input alone: neither its output nor its graph."
        )
    if not isinstance(got["node"], torch.autograd.function.BackwardCFunction):
        raise Wrong(
            "The output does not come out of an autograd.Function; call `YourFunction.apply(...)` on the input."
        )
    if type(got["node"]).__name__ == "CheckpointFunctionBackward":
        raise Wrong("This is PyTorch's own checkpoint; write yours.")
    if in_all != [2, 2]:
        raise Wrong(f"Backward should run each block once more, and runs it {in_all[0] - 1} times more.")
    if got["input"] is None:
        raise Wrong("The input gets no gradient: backward has to return one for every argument of forward.")
    if any(gradient is None for gradient in got["weights"]):
        raise Wrong(
            "The block's weights get no gradient. They are no arguments of the Function: run backward through the "
            "replayed graph, so that it reaches them."
        )
    if not (_same(got["input"], right["input"]) and all(map(_same, got["weights"], right["weights"]))):
        if dropout:
            raise Wrong(
                "With dropout the gradients belong to another mask than the loss. The replay has to draw forward's "
                "random numbers, in forward's mode: save the random state before forward and put it back."
            )
        raise Wrong(
            "Gradients differ from those without checkpoint. The replay starts from the same input, and its backward "
            "from the gradient that comes in; nothing is added twice."
        )
    if not torch.equal(got["next"], right["next"]):
        raise Wrong(
            "After backward the random numbers are others than without checkpoint: what was drawn for the replay has "
            "to be undone."
        )
