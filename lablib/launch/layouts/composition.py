"""Several kinds of parallelism at once, on real ranks: the course's toys and PyTorch's own, each against one process.

    job = Miniature(config=tiny_config("gpt2", hidden=32, tied=False), dp=2, tp=2, pp=2, micro_batches=4)
    result = run_miniature(job)             # 8 ranks, both versions, and one process
    print(result.report())
    result.worst("torch").weights           # largest distance from one process, after all steps
    result.ranks["toys"][0].traffic["tp"]   # what rank 0 sent, beside result.predicted("toys", 0)["tp"]

Both versions stand on the same grid of ranks, `job.mesh`, and are built in `variants`. A rank sees its replica's part
of the batch; one process sees all of it. Loss, gradients and weights must be equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.errors import one_of
from lablib.calc.layouts import VERSIONS, AxisTraffic, Mesh, Miniature, predicted_traffic
from lablib.launch.layouts.variants import ADAMW, TorchJob, ToyJob, mean_loss, model_and_tokens
from lablib.launch.measure import CommLog, record_comms
from lablib.launch.ranks import run_ranks


@dataclass(frozen=True)
class RankRun:
    """Losses, gradients, weights and traffic of one rank."""

    rank: int  # its number
    coordinates: dict[str, int]  # where it is on the mesh
    losses: list[float]  # mean loss of the full batch, a step each; empty where the rank has no last stage
    gradients: dict[str, Tensor]  # of the first step, unsharded, by name in the model: what this rank's stage has
    weights: dict[str, Tensor]  # after the last step, likewise
    traffic: dict[str, AxisTraffic]  # what it sent in the last step, by axis
    other: dict[str, int]  # calls of the last step in groups that are no axis of the mesh; empty


@dataclass(frozen=True)
class Distance:
    """How far a version is from one process: the largest absolute differences over all ranks."""

    loss: float  # of the losses of all steps
    gradients: float  # of the gradients of the first step
    weights: float  # of the weights after the last step


@dataclass(frozen=True)
class Composition:
    """A miniature that has run."""

    job: Miniature  # the miniature
    alone: RankRun  # one process with the full batch
    ranks: dict[str, list[RankRun]]  # by version, every rank

    def worst(self, version: str) -> Distance:
        """Return how far a version is from one process."""
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
        expected = getattr(self.alone, what)
        return max(
            (value.double() - expected[name].double()).abs().max().item()
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
    """Return what was sent along every axis of more than one rank, and the calls in groups that are no axis."""
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


def run_miniature(
    job: Miniature, versions: Sequence[str] = VERSIONS, *, seed: int = 0, timeout: float = 60
) -> Composition:
    """Train a miniature on its ranks, in every version, and in one process."""
    for version in versions:
        check_version(job, version)
    found = run_ranks(_train_all, job.ranks, job, tuple(versions), seed, timeout=timeout)
    by_version = {version: [ran[i] for ran in found] for i, version in enumerate(versions)}
    return Composition(job, train_alone(job, seed), by_version)


def check_version(job: Miniature, version: str) -> None:
    """Raise a ValueError if a version cannot run a job."""
    one_of("version", version, VERSIONS)
    if version == "torch" and job.tp > 1 and job.dp > 1 and not job.sharded:
        raise ValueError(
            f"tp={job.tp} with dp={job.dp} replicas: PyTorch's DistributedDataParallel takes no DTensors, which tp "
            "makes of the weights; use sharded=True, or the toys"
        )
    if version == "torch" and job.dp > 1 and not job.sharded and job.steps == 2:
        raise ValueError(
            f"steps={job.steps}: DistributedDataParallel tells its ranks about its buckets in the second step, the one "
            "that would be recorded; use 1, or at least 3"
        )
    if version == "torch" and job.schedule == "1f1b" and job.micro_batches < job.pp:
        raise ValueError(
            f"micro_batches={job.micro_batches} with pp={job.pp}: PyTorch's Schedule1F1B needs one for every stage; use "
            f'micro_batches={job.pp} or more, schedule="gpipe", or the toys'
        )
    order = [axis for axis in job.mesh.order if axis in ("tp", "dp", "pp")]
    if version == "torch" and order != ["tp", "dp", "pp"]:
        raise ValueError(f"order={job.order!r}: PyTorch's version has the order tp, dp, pp; only the toys take others")


def _train_all(job: Miniature, versions: tuple[str, ...], seed: int) -> list[RankRun]:
    return [train(job, version, seed) for version in versions]


def train_alone(job: Miniature, seed: int = 0) -> RankRun:
    """Train the miniature in this process, with the full batch."""
    model, steps = model_and_tokens(job, seed)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, gradients = [], {}
    for number, tokens_BT in enumerate(steps):
        loss = mean_loss(model(tokens_BT[:, :-1]), tokens_BT)
        loss.backward()
        losses.append(loss.item())
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return RankRun(0, {}, losses, gradients, weights, {}, {})


def train(job: Miniature, version: str, seed: int = 0) -> RankRun:
    """Train the miniature on this rank; call it through `run_ranks` with `job.ranks` ranks."""
    check_version(job, version)
    if dist.get_world_size() != job.ranks:
        raise ValueError(f"{dist.get_world_size()} ranks for a miniature of {job.ranks}")
    rank = dist.get_rank()
    model, steps = model_and_tokens(job, seed)
    at = job.mesh.coordinates(rank)
    ours = {"toys": ToyJob, "torch": TorchJob}[version](job, model)
    losses, gradients, log = [], {}, CommLog()
    for number, tokens_BT in enumerate(steps):
        mine = tokens_BT.chunk(job.dp)[at["dp"]]
        if number == job.steps - 1:
            with record_comms(log):
                loss = ours.backward(mine)
                if number:
                    ours.step()
        else:
            loss = ours.backward(mine)
        if loss is not None:
            dist.all_reduce(loss, group=ours.groups["dp"])
            losses.append(loss.item() / job.dp)
        if number == 0:
            gradients = ours.gradients()
        if number == 0 or number < job.steps - 1:
            ours.step()
    return RankRun(rank, at, losses, gradients, ours.weights(), *by_axis(log, job.mesh, rank))
