"""Run the toy transformer under a strategy of activation recomputation: what it keeps, costs and moves, measured.

`measure_step` runs a step and counts; `predicted_cost` says beforehand what it will count, in the same words.
`find_largest_batch` runs batches until one does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lablib.calc.recompute import RecomputeCost, largest, recompute_cost
from lablib.launch.live_bytes import LiveBytes
from lablib.launch.recompute_apply import AppliedStrategy, apply_strategy
from lablib.toys.transformer import Transformer

__all__ = [
    "AppliedStrategy",
    "MeasuredStep",
    "apply_strategy",
    "find_largest_batch",
    "measure_step",
    "predicted_cost",
]


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a model under a strategy.

    Attributes:
        strategy: Its name.
        saved_bytes: Alive when forward ends, as `RecomputeCost.saved_bytes`.
        peak_bytes: The most that forward and its repetitions kept, as `RecomputeCost.peak_bytes`.
        live_peak_bytes: The most that was alive at once, with temporaries and all gradients; no formula here
            predicts it.
        host_bytes: Copied to the host in forward.
        forward_flops: Of the forward pass, by FlopCounterMode.
        extra_flops: Of what ran again in backward.
        flops: Of the whole step. A fused attention kernel forgets the scores and computes them again inside its own
            backward: one product of forward's two more than twice the forward pass, whatever the strategy.
        seconds: Times of steps, empty if none was timed.
        loss: What it was.
    """

    strategy: str
    saved_bytes: int
    peak_bytes: int
    live_peak_bytes: int
    host_bytes: int
    forward_flops: int
    extra_flops: int
    flops: int
    seconds: tuple[float, ...]
    loss: float


def measure_step(
    model: Transformer,
    strategy: str,
    *,
    batch: int,
    seq: int,
    implementation: str = "torch",
    early_stop: bool = True,
    flops: bool = True,
    repeats: int = 0,
    seed: int = 0,
) -> MeasuredStep:
    """Run steps (forward and backward, no optimizer) under a strategy: one counts bytes, one FLOPs, some are timed.

    Args:
        model: Left as it was, without gradients.
        strategy: As in `apply_strategy`.
        batch: Sequences.
        seq: Tokens in a sequence.
        implementation: As in `apply_strategy`.
        early_stop: As in `apply_strategy`.
        flops: Whether to count FLOPs; 0 if not.
        repeats: How many steps to time, after one that is not.
        seed: Of tokens and dropout, the same for every step.

    Raises:
        ValueError: As `apply_strategy`.
    """
    device = model.embed.weight.device

    def forward() -> Tensor:
        torch.manual_seed(seed)
        return model.loss(torch.randint(model.config.vocab, (batch, seq + 1), device=device))

    with apply_strategy(model, strategy, implementation=implementation, early_stop=early_stop) as applied:
        model.zero_grad(set_to_none=True)
        applied.tracker = tracker = LiveBytes()
        with tracker:
            loss = forward()
            tracker.end_forward()
            saved = tracker.kept
            loss.backward()
        applied.tracker = None
        held = loss.nbytes  # the caller's, not autograd's
        host_bytes = applied.host_bytes
        counted = _count_flops(applied, forward) if flops else (0, 0, 0)
        seconds = []
        for _ in range(repeats + 1 if repeats else 0):
            model.zero_grad(set_to_none=True)
            seconds.append(_timed(forward, device))
        model.zero_grad(set_to_none=True)
    return MeasuredStep(
        strategy=strategy,
        saved_bytes=saved - held,
        peak_bytes=tracker.kept_peak - held,
        live_peak_bytes=tracker.peak,
        host_bytes=host_bytes,
        forward_flops=counted[0],
        extra_flops=counted[1],
        flops=counted[2],
        seconds=tuple(seconds[1:]),
        loss=loss.item(),
    )


def _count_flops(applied: AppliedStrategy, forward: Callable[[], Tensor]) -> tuple[int, int, int]:
    """Return the FLOPs of a step's forward pass, of what runs again, and of all."""
    # PyTorch has no formula for its CPU kernel of fused attention.
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        cpu: lambda query, key, value, *_, **__: _attention_flops(query, key, products=2),
        backward: lambda gradient, query, key, *_, **__: _attention_flops(query, key, products=5),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss = forward()
        first = counter.get_total_flops()
        applied.tracker = tracker = _ReplayFlops(counter)
        loss.backward()
    applied.tracker = None
    return first, tracker.flops, counter.get_total_flops()


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], products: int) -> int:
    batch, heads, seq, width = query
    return products * 2 * batch * heads * seq * key[2] * width


class _ReplayFlops:
    """Stands in for LiveBytes where FLOPs are counted: adds up those of parts that run again."""

    in_backward = True

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.flops = counter, 0

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Count what runs in the block."""
        before = self.counter.get_total_flops()
        try:
            yield
        finally:
            self.flops += self.counter.get_total_flops() - before

    def forget(self, tensor: Tensor) -> None:
        """Nothing: FLOPs have no place."""


def _timed(forward: Callable[[], Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    forward().backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def predicted_cost(
    model: Transformer,
    strategy: str,
    *,
    batch: int,
    seq: int,
    implementation: str = "torch",
    early_stop: bool = True,
    bandwidth: float | None = None,
) -> RecomputeCost:
    """Return what `measure_step` will count: `recompute_cost` with kernels="toy" and the model's own settings.

    Args:
        model: Gives config, dtype, dropout and attention.
        strategy: As in `apply_strategy`.
        batch: Sequences.
        seq: Tokens in a sequence.
        implementation: As in `apply_strategy`; the toy and PyTorch's reentrant way never stop early.
        early_stop: As in `apply_strategy`.
        bandwidth: Bytes per second to the host, per direction.
    """
    return recompute_cost(
        model.config,
        strategy,
        batch=batch,
        seq=seq,
        kernels="toy",
        bytes_per_value=model.embed.weight.element_size(),
        attention="fused" if model.blocks[0].attention.fused else "plain",
        dropout=model.dropout.p,
        early_stop=early_stop,
        reentrant=implementation != "torch",
        bandwidth=bandwidth,
    )


def find_largest_batch(
    budget_bytes: int, model: Transformer, strategy: str, *, seq: int, fixed_bytes: int = 0, **how: Any
) -> int:
    """Return the largest batch whose measured peak fits a budget, by running batches: doubling, then halving.

    Args:
        budget_bytes: What there is.
        model: What to run.
        strategy: As in `apply_strategy`.
        seq: Tokens in a sequence.
        fixed_bytes: What is there whatever the batch.
        **how: More for `measure_step`.
    """

    def fits(batch: int) -> bool:
        step = measure_step(model, strategy, batch=batch, seq=seq, flops=False, **how)
        return fixed_bytes + step.peak_bytes <= budget_bytes

    return largest(fits)
