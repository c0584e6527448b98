"""What lab 11 predicts for its run on GPUs: lablib's numbers for the GPU found, and the learner's, beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lablib.calc.formats import find_format
from lablib.calc.gpu_names import known_accelerator
from lablib.calc.memory import training_memory
from lablib.calc.plan import plan
from lablib.launch.experiments import Predictions
from lablib.launch.train_config import train_model


@dataclass(frozen=True)
class Yours:
    """The learner's predictions; None where there is none. The names are those of lab 11's parameters.

    Attributes:
        predicted_step_ms: Of a step of all GPUs with one micro-batch on each.
        predicted_speedup_strong: Of all GPUs over one, the same batch.
        predicted_speedup_weak: Of all GPUs over one, the same batch on each.
        predicted_peak_gb: Most memory of a GPU in the step of `predicted_step_ms`, in GB.

    Raises:
        ValueError: If a prediction is no number above 0.
    """

    predicted_step_ms: float | None = None
    predicted_speedup_strong: float | None = None
    predicted_speedup_weak: float | None = None
    predicted_peak_gb: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.named().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a number above 0, or None for no prediction")

    def named(self) -> dict[str, float]:
        """Return those that there are."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def of(self, kind: str, gpus: int) -> dict[str, float]:
        """Return what they say about one run, as `ScalingReport.add` takes it.

        Args:
            kind: "one", "strong" or "weak".
            gpus: GPUs of the machine.
        """
        said: dict[str, float | None] = {}
        if kind == ("strong" if gpus > 1 else "one"):  # one micro-batch on each GPU
            said["step"] = self.predicted_step_ms and self.predicted_step_ms / 1e3
            said["memory_bytes"] = self.predicted_peak_gb and 1e9 * self.predicted_peak_gb
        if kind != "one":
            said["speedup"] = getattr(self, f"predicted_speedup_{kind}")
        return {name: value for name, value in said.items() if value is not None}


def predicted_run(model: str, ranks: int, batch: int, micro_batch: int, seq: int) -> dict[str, float] | None:
    """Return what the planner and the memory calculator say of a fully sharded run on this machine's GPUs.

    The planner knows nothing of a host that launches kernels too slowly: it is fitted to large models.

    Args:
        model: See `lablib.launch.train_config.train_model`.
        ranks: GPUs of the run.
        batch: Sequences of a step, on all of them.
        micro_batch: Sequences on a GPU at a time.
        seq: Tokens of a sequence.

    Returns:
        Seconds of a step and bytes of a rank, or None for a GPU that lablib has no figures for, or does not expect
        to hold the run.
    """
    card, shape = known_accelerator(torch.cuda.get_device_name(0)), train_model(model)
    if card is None:
        return None
    found = plan(
        shape, gpu=card, gpus=ranks, seq=seq, global_batch=batch, gpus_per_node=max(8, ranks), dp=ranks, tp=1, cp=1,
        pp=1, zero=3, micro_batch=micro_batch, recompute="none",
    )  # fmt: skip
    if not found.candidates:
        return None
    held = training_memory(
        shape, recipe="fsdp2-mixed", attention="fused", dp=ranks, zero=3, micro_batch=micro_batch, seq=seq
    )
    return {"step": found.best.step, "memory_bytes": held.total}


#: Parameter of the lab: what it is of, in the words of the lab, the key of a row, and its unit.
_ASKED = {
    "predicted_step_ms": ("step of all GPUs", "ms"),
    "predicted_speedup_strong": ("speedup on GPUs, strong", ""),
    "predicted_speedup_weak": ("speedup on GPUs, weak", ""),
    "predicted_peak_gb": ("peak memory of a GPU", "GB"),
}


def lock(predictions: Predictions, yours: Yours) -> None:
    """Store the learner's predictions before the run."""
    for name, value in yours.named().items():
        predictions.predict(_ASKED[name][0], value, _ASKED[name][1])


def compare_with(
    predictions: Predictions, yours: Yours, table: Sequence[Mapping[str, Any]], gpus: int
) -> None:
    """Put what was measured beside what the learner predicted, and what lablib says beside both.

    Args:
        predictions: Of the lab, after `lock`.
        yours: What was locked.
        table: Rows of the scaling report; a run that failed has none.
        gpus: GPUs of the machine.
    """
    by_kind = {row["scaling"]: row for row in table}
    found = {}
    if each := by_kind.get("strong" if gpus > 1 else "one"):
        found["predicted_step_ms"] = (1e3 * each["seconds"]["median"], each["predicted"], 1e3)
        found["predicted_peak_gb"] = (each["memory_bytes"] / 1e9, each["predicted_memory"], 1e-9)
    for kind in ("strong", "weak"):
        if row := by_kind.get(kind):
            found[f"predicted_speedup_{kind}"] = (row["speedup"], row["predicted_speedup"], 1)
    for name, (measured, told, scale) in found.items():
        what, unit = _ASKED[name]
        if name in yours.named():
            predictions.compare(what, measured)
        said = "has no figures for this GPU" if told is None else f"says {scale * told:.4g} {unit}".rstrip()
        print(f"{what}: measured {measured:.4g} {unit}".rstrip() + f", lablib {said}")


def loss_verdict(table: Sequence[Mapping[str, Any]], first_loss: float) -> str | None:
    """Return in one sentence whether one GPU and all of them learned the same; None where there is one alone.

    Both take the same samples and add the same numbers in another order, in bf16. Neighbouring numbers of bf16 are
    that far apart at the size of the loss, and no closer agreement can be asked of them.

    Args:
        table: Rows of the scaling report.
        first_loss: The loss of a first step, about the largest.
    """
    apart = next((row["loss_apart"] for row in table if row.get("loss_apart") is not None), None)
    if apart is None:
        return None
    gap = find_format("bf16").ulp(first_loss)
    told = f"one GPU and all of them, the same samples: losses differ by {apart:.1g} at most"
    if apart <= gap:
        return f"{told}; bf16 has steps of {gap:g} there, so they learned the same"
    return f"{told}, more than the {gap:g} between two numbers of bf16: look for the cause before you read the speed"
