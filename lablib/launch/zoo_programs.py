"""The failure zoo: eight small training programs, each with one planted fault and a healthy twin.

Diagnose them from their symptoms (`lablib.launch.zoo`) before you read this file.
In each program the lines under `if fault` are the fault, and nothing else differs between the twins.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lablib.launch.devices import rank_mesh
from lablib.launch.rank_log import RankLog
from lablib.launch.zoo_job import Job, Setting, watched


def mismatched_collectives(setting: Setting, log: RankLog, fault: bool) -> None:
    """One rank shares a running mean before the gradients, the others after them."""
    job = Job(setting, log)
    optimizer, mean = job.optimizer(), torch.zeros(3)
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            loss, gradient = job.backward(number)
            if fault and job.culprit:
                dist.broadcast(mean, src=0)
                dist.all_reduce(gradient)
            else:
                dist.all_reduce(gradient)
                dist.broadcast(mean, src=0)
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def skipped_batch(setting: Setting, log: RankLog, fault: bool) -> None:
    """One rank leaves out a batch that it does not like, and the collective with it."""
    job = Job(setting, log)
    optimizer = job.optimizer()
    with watched(log):
        for i, number in enumerate(job.mine(job.ranks * setting.steps)):
            if fault and job.culprit and i == setting.steps // 2:
                continue
            loss, gradient = job.backward(number)
            dist.all_reduce(gradient)
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def uneven_data(setting: Setting, log: RankLog, fault: bool) -> None:
    """The number of batches is no multiple of the ranks, and the rest is not dropped."""
    job = Job(setting, log)
    optimizer = job.optimizer()
    batches = job.ranks * setting.steps + 1
    if not fault:
        batches -= batches % job.ranks
    with watched(log):
        for number in job.mine(batches):
            loss, gradient = job.backward(number)
            dist.all_reduce(gradient)
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def forgotten_zero_grad(setting: Setting, log: RankLog, fault: bool) -> None:
    """The gradients of all steps so far add up."""
    job = Job(setting, log)
    optimizer = job.optimizer()
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            if not fault:
                optimizer.zero_grad()
            loss, gradient = job.backward(number)
            dist.all_reduce(gradient)
            job.update(optimizer, loss, gradient / job.ranks)


def unsharded_parameter(setting: Setting, log: RankLog, fault: bool) -> None:
    """FSDP2 is told to leave the largest weight alone; it stays whole, and its gradient is averaged by nobody."""
    from torch.distributed.fsdp import fully_shard  # here: the other programs start sooner without it

    job = Job(setting, log, sharded=True)
    largest = max(job.model.parameters(), key=torch.Tensor.numel)
    fully_shard(job.model, mesh=rank_mesh(), ignored_params={largest} if fault else None)
    optimizer = job.optimizer()
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            loss = job.loss(number)
            loss.backward()
            job.step(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    kept = [p.to_local() if hasattr(p, "to_local") else p for p in job.model.parameters()]
    log.write("state", bytes=sum(p.nbytes for p in kept))


def wrong_dtype(setting: Setting, log: RankLog, fault: bool) -> None:
    """The gradients are reduced in bfloat16, which keeps 8 of their 24 significant bits."""
    job = Job(setting, log)
    optimizer = job.optimizer()
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            loss, gradient = job.backward(number)
            if fault:
                gradient = gradient.bfloat16()
            dist.all_reduce(gradient)
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def slow_rank(setting: Setting, log: RankLog, fault: bool) -> None:
    """The batches of one rank are padded to three times their length."""
    job = Job(setting, log)
    optimizer = job.optimizer()
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            loss, gradient = job.backward(number, padding=8 if fault and job.culprit else 0)
            dist.all_reduce(gradient)
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def communicating_accumulation(setting: Setting, log: RankLog, fault: bool) -> None:
    """DDP reduces after the backward pass of every micro-batch, not of the last one only."""
    job = Job(setting, log)
    job.forward = ddp = DistributedDataParallel(job.model)
    optimizer = job.optimizer()
    count = setting.micro_batches
    mine = job.mine(job.ranks * count * setting.steps)
    with watched(log):
        for step in range(setting.steps):
            batches = mine[step * count : (step + 1) * count]
            losses = []
            for i, number in enumerate(batches):
                with nullcontext() if fault or i == count - 1 else ddp.no_sync():
                    loss = job.loss(number)
                    (loss / count).backward()
                losses.append(loss.item())
            job.step(*losses)
            optimizer.step()
            optimizer.zero_grad()
