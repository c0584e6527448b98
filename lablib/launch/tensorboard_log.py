"""A run in TensorBoard: a callback that writes the scalars of every step. Needs tensorboard, an extra.

    Trainer(config, callbacks=[TensorBoard()])
    tensorboard --logdir runs/

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lablib.launch.trainer import Callback, Trainer

#: What is drawn; the other metrics of a step are in metrics-rank*.jsonl.
SCALARS = ("loss", "grad_norm", "lr", "seconds", "tokens_per_second", "mfu", "memory_bytes")


class TensorBoard(Callback):
    """Writes rank 0's scalars.

    Args:
        folder: Of the event files; by default "tensorboard" in the run's folder.

    Raises:
        ModuleNotFoundError: If tensorboard is not installed, before the run starts; one sentence says how to get it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "TensorBoard is an extra: pip install 'lablib[tensorboard]', or pip install tensorboard"
            ) from error
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the file; steps of an earlier attempt after this one's first are hidden by `purge_step`."""
        if trainer.rank == 0:
            folder = self._folder or trainer.folder / "tensorboard"
            self._writer = self._make(str(folder), purge_step=trainer.step + 1)

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Write the step."""
        if self._writer is not None:
            for name in SCALARS:
                if metrics[name] is not None:
                    self._writer.add_scalar(name, metrics[name], metrics["step"])

    def on_end(self, trainer: Trainer) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
