"""Worked exercises of rung 02, data parallelism."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def all_reduce_mean(gradients, send):
    """Reduce-scatter round the ring, all-gather round the ring, divide by n."""
    n = len(gradients)
    width = len(gradients[0]) // n
    held = [
        [list(g[c * width : (c + 1) * width]) for c in range(n)]
        for g in gradients
    ]
    for step in range(n - 1):  # what arrives is added
        for rank in range(n):
            chunk, right = (rank - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            held[right][chunk] = [
                a + b
                for a, b in zip(held[right][chunk], arriving, strict=True)
            ]
    for step in range(n - 1):  # what arrives replaces
        for rank in range(n):
            chunk, right = (rank + 1 - step) % n, (rank + 1) % n
            held[right][chunk] = send(rank, right, held[rank][chunk])
    return [
        [value / n for chunk in chunks for value in chunk] for chunks in held
    ]


def train_ddp(model, data, epochs, micro_batch, accumulate, lr):
    """DDP, a sampler, one count of tokens and one exchange a step."""
    model = DistributedDataParallel(model)  # rank 0's weights go to all
    sampler = DistributedSampler(data)
    loader = DataLoader(data, micro_batch, sampler=sampler, collate_fn=list)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]  # the last is short
            total = torch.tensor(
                sum(len(t) for batch in group for t in batch)
            )
            dist.all_reduce(total)
            weight = dist.get_world_size() / total.item()  # DDP divides by n
            for i, batch in enumerate(group):
                last = i == len(group) - 1
                with nullcontext() if last else model.no_sync():
                    (model(batch).sum() * weight).backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp_bottleneck(
    params, grad_bytes, tokens, micro_batches, ranks, flops, bandwidth
):
    """Ring all-reduce against the backward pass of the last micro-batch."""
    sent = 2 * (ranks - 1) / ranks * params * grad_bytes
    communication = sent / bandwidth
    backward = 4 * params * tokens / flops  # of one micro-batch
    exposed = max(0.0, communication - backward)
    return {
        "bytes_sent": sent,
        "communication": communication,
        "exposed": exposed,
        "step": 1.5 * backward * micro_batches + exposed,
        "hides": communication <= backward,
    }


def find_fault(job):
    """Write what a rank steps with as a sum of what the ranks computed."""
    odd = []

    def look(step, model, batch):
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            (own,) = torch.autograd.grad(job.loss(model, batch), p)
            of_ranks = [torch.empty_like(own) for _ in range(job.ranks)]
            dist.all_gather(of_ranks, own)
            columns = torch.stack([g.flatten() for g in of_ranks], dim=1)
            used = p.grad.reshape(-1, 1)
            weights = torch.linalg.lstsq(columns, used).solution.flatten()
            if (weights - 1 / job.ranks).abs().max() > 0.01:
                odd.append((name, step, weights.tolist()))

    job.train(look)
    return odd[0] if odd else None
