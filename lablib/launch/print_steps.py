"""One line a step on the terminal, from rank 0."""

from __future__ import annotations

from typing import Any

import torch

from lablib.calc.gpu_names import no_figures
from lablib.launch.trainer import Callback, Trainer


class PrintSteps(Callback):
    """Print loss, gradient norm, throughput, MFU and memory.

    Args:
        every: Print every so many steps, and the last one.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.every = every

    def on_start(self, trainer: Trainer) -> None:
        """Say what is trained."""
        if trainer.rank == 0:
            print(trainer.report, flush=True)
            print(
                f"{trainer.accumulation} micro-batches of {trainer.micro_batch} sequences a rank and step, "
                f"from step {trainer.step + 1} to {trainer.config.steps}",
                flush=True,
            )
            if trainer.device.type == "cuda" and trainer.peak is None:
                print(no_figures(torch.cuda.get_device_name(trainer.device)), flush=True)

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Print the step."""
        due = metrics["step"] % self.every == 0 or metrics["step"] == trainer.config.steps
        if trainer.rank == 0 and due:
            print(line(metrics), flush=True)

    def on_end(self, trainer: Trainer) -> None:
        """Say how the run ended."""
        if trainer.rank == 0:
            why = f": {trainer.stop_reason}" if trainer.stop_reason else ""
            print(f"{trainer.outcome} after step {trainer.step}{why}", flush=True)


def line(metrics: dict[str, Any]) -> str:
    """Return a step's metrics as one line.

    Args:
        metrics: As `Trainer.train_step` returns them.
    """
    parts = [
        f"step {metrics['step']:>5}",
        f"loss {metrics['loss']:.4f}",
        f"norm {metrics['grad_norm']:.2f}",
        f"lr {metrics['lr']:.2e}",
        f"{metrics['seconds']:.3f} s",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{metrics['memory_bytes'] / 2**30:.2f} GiB",
    ]
    if metrics["mfu"] is not None:
        parts.insert(-1, f"MFU {metrics['mfu']:.1%}")
    return "  ".join(parts)
