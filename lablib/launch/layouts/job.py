"""What a composed miniature gave: every rank beside one process, and what it sent beside what was predicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lablib.calc.layouts import AxisTraffic, Mesh, Miniature, predicted_traffic
from lablib.launch.measure import CommLog
from lablib.toys.transformer import Transformer

#: AdamW turns an error of a gradient into lr/eps times as much of a weight: here the same, in place of 1e5 times.
ADAMW = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}


def model_and_tokens(job: Miniature, seed: int = 0) -> tuple[Transformer, list[Tensor]]:
    """Return the whole model and the windows of every step, tokens_BT, the same on every rank."""
    torch.manual_seed(seed)
    model = Transformer(job.config).to(getattr(torch, job.dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a slip in them is seen
            parameter.add_(torch.randn_like(parameter) * 0.1)
    shape = (job.batch, job.seq + 1)
    return model, [torch.randint(0, job.config.vocab, shape) for _ in range(job.steps)]


def mean_loss(logits_BSV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the mean loss in the dtype of the logits, so that a run in float64 stays in it."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BT[:, 1:].flatten())


@dataclass(frozen=True)
class RankRun:
    """What one rank has after its steps.

    Attributes:
        rank: Its number.
        coordinates: Where it is on the mesh.
        losses: Mean loss of the whole batch, a step each; empty where the rank has no last stage.
        gradients: Of the first step, whole, by name in the model: what this rank's stage has.
        weights: After the last step, likewise.
        traffic: What it sent in the last step, by axis.
        other: Calls of the last step in groups that are no axis of the mesh; empty.
    """

    rank: int
    coordinates: dict[str, int]
    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    traffic: dict[str, AxisTraffic]
    other: dict[str, int]


@dataclass(frozen=True)
class Distance:
    """How far a version is from one process: the largest absolute differences over all ranks.

    Attributes:
        loss: Of the losses of all steps.
        gradients: Of the gradients of the first step.
        weights: Of the weights after the last step.
    """

    loss: float
    gradients: float
    weights: float


@dataclass(frozen=True)
class Composition:
    """A miniature that has run.

    Attributes:
        job: The miniature.
        alone: One process with the whole batch.
        ranks: By version, every rank.
    """

    job: Miniature
    alone: RankRun
    ranks: dict[str, list[RankRun]]

    def worst(self, version: str) -> Distance:
        """Return how far a version is from one process.

        Raises:
            RuntimeError: If a parameter or the loss is on no rank.
        """
        runs = self.ranks[version]
        for what in ("gradients", "weights"):
            names = {name for run in runs for name in getattr(run, what)}
            missing = set(getattr(self.alone, what)) - names
            if missing:
                raise RuntimeError(f"{what} of {', '.join(sorted(missing))} are on no rank")
        with_loss = [run.losses for run in runs if run.losses]
        if not with_loss:
            raise RuntimeError("no rank has a loss")
        loss = max(abs(a - b) for losses in with_loss for a, b in zip(losses, self.alone.losses, strict=True))
        return Distance(loss, self._far(runs, "gradients"), self._far(runs, "weights"))

    def _far(self, runs: Sequence[RankRun], what: str) -> float:
        whole = getattr(self.alone, what)
        return max(
            (value.double() - whole[name].double()).abs().max().item()
            for run in runs
            for name, value in getattr(run, what).items()
        )

    def predicted(self, version: str, rank: int) -> dict[str, AxisTraffic]:
        """Return the prediction for a rank; see `lablib.calc.layouts.predicted_traffic`."""
        return predicted_traffic(self.job, rank, version)

    def as_predicted(self, version: str) -> bool:
        """Return whether every rank sent what was predicted, calls and bytes, and nothing beside its axes."""
        return all(run.traffic == self.predicted(version, run.rank) and not run.other for run in self.ranks[version])

    def rows(self, rank: int = 0) -> list[tuple[str, str, AxisTraffic, AxisTraffic]]:
        """Return (version, axis, predicted, measured) for every axis, as one rank sees it."""
        return [
            (version, axis, predicted, runs[rank].traffic[axis])
            for version, runs in self.ranks.items()
            for axis, predicted in self.predicted(version, rank).items()
        ]

    def report(self, rank: int = 0) -> str:
        """Return a table: distances from one process, and predicted and measured traffic of one rank."""
        lines = []
        for version in self.ranks:
            far = self.worst(version)
            lines.append(
                f"{version:<6} against one process: loss {far.loss:.1e}, gradients {far.gradients:.1e}, "
                f"weights {far.weights:.1e}"
            )
        for version, axis, predicted, measured in self.rows(rank):
            same = "as predicted" if predicted == measured else f"predicted {predicted}"
            lines.append(f"{version:<6} rank {rank}  {axis}  {measured}; {same}")
        return "\n".join(lines)


def by_axis(log: CommLog, mesh: Mesh, rank: int) -> tuple[dict[str, AxisTraffic], dict[str, int]]:
    """Return what was sent along every axis of more than one rank, and the calls in groups that are no axis.

    Receives are left out: they send nothing. A message in a group of one rank is none.
    """
    names = {tuple(mesh.group(rank, axis)): axis for axis in mesh.order if mesh.size(axis) > 1}
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    sent: Counter[str] = Counter()
    for event in log.events:
        if event.op == "recv" or event.group_size == 1:
            continue
        axis = names.get(event.ranks, "")
        calls[axis][event.op] += 1
        sent[axis] += event.sent
    found = {axis: AxisTraffic(dict(calls[axis]), float(sent[axis])) for axis in names.values()}
    return found, dict(calls[""])
