"""Several kinds of parallelism at once, on real ranks: the course's toys and PyTorch's own, each against one process.

    job = Miniature(config=tiny_config("gpt2", hidden=32, tied=False), dp=2, tp=2, pp=2, micro_batches=4)
    result = run_miniature(job)             # 8 ranks, both versions, and one process
    print(result.report())
    result.worst("torch").weights           # largest distance from one process, after all steps
    result.ranks["toys"][0].traffic["tp"]   # what rank 0 sent, beside result.predicted("toys", 0)["tp"]

Both versions stand on the same grid of ranks, `job.mesh`. The toys get its groups one by one; PyTorch makes a
`DeviceMesh` whose dims are the same axes, slowest first. What is built inside is in `composition_toys` and
`composition_torch`.

A rank sees its replica's part of the batch. One process sees all of it. Loss, gradients and weights must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lablib.calc.errors import one_of
from lablib.calc.layouts import VERSIONS, Miniature
from lablib.launch.layouts.job import ADAMW, Composition, RankRun, by_axis, mean_loss, model_and_tokens
from lablib.launch.layouts.variants import TorchJob, ToyJob
from lablib.launch.measure import CommLog, record_comms
from lablib.launch.ranks import run_ranks


def run_miniature(
    job: Miniature, versions: Sequence[str] = VERSIONS, *, seed: int = 0, timeout: float = 60
) -> Composition:
    """Train a miniature on its ranks, in every version, and in one process.

    Args:
        versions: "toys", "torch" or both.

    Raises:
        ValueError: If a version is unknown.
    """
    for version in versions:
        check_version(job, version)
    found = run_ranks(_train_all, job.ranks, job, tuple(versions), seed, timeout=timeout)
    by_version = {version: [ran[i] for ran in found] for i, version in enumerate(versions)}
    return Composition(job, train_alone(job, seed), by_version)


def check_version(job: Miniature, version: str) -> None:
    """Raise a ValueError if a version cannot run a job.

    Raises:
        ValueError: If there is no such version, or PyTorch has no such composition.
    """
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
    """Train the miniature in this process, with the whole batch."""
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
    """Train the miniature on this rank; call it through `run_ranks` with `job.ranks` ranks.

    Raises:
        ValueError: If the version is unknown, or there are more or fewer ranks than the job has.
    """
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
