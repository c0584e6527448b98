"""Worked exercises of rung 04, pipeline parallelism."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def one_f_one_b_schedule(p, m):
    """Warm up, alternate, and run the backwards that are left."""
    rows = []
    for i in range(p):
        warmup = min(m, p - 1 - i)
        row = [f"{i}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            row += [f"{i}F{k}", f"{i}B{k - warmup}"]
        row += [f"{i}B{k}" for k in range(m - warmup, m)]
        rows.append(" ".join(row))
    return rows


def beat_1f1b(p, m):
    """ZB-H1: on rank i weight halves i micro-batches late."""
    rows = []
    for i, row in enumerate(one_f_one_b_schedule(p, m)):
        steps, late = [], 0
        for action in row.split():
            steps.append(action.replace("B", "I"))
            if "B" in action and int(action.split("B")[1]) >= i:
                steps.append(f"{i}W{late}")
                late += 1
        steps += [f"{i}W{k}" for k in range(late, m)]
        rows.append(" ".join(steps))
    return rows


class Part(nn.Module):
    """Some layers, with the words in front and the head behind."""

    def __init__(self, model, layers, first, last):
        super().__init__()
        self.words = model.words if first else None
        self.places = model.places if first else None
        self.layers = nn.ModuleList(model.layers[k] for k in layers)
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x):
        """The stream for the next stage, or logits."""
        if self.words is not None:
            x = self.words(x) + self.places[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def train_in_stages(model, times, tokens, targets, m, loss):
    """The best of all cuts, PyTorch's 1F1B, and both halves of a tie."""
    rank, p = dist.get_rank(), dist.get_world_size()
    work = [times["words"], *times["layers"], times["head"]]

    def longest(cut):
        ends = itertools.pairwise((0, *cut, len(work)))
        return max(sum(work[a:b]) for a, b in ends)

    cuts = itertools.combinations(range(1, len(work)), p - 1)
    cut = (0, *min(cuts, key=longest), len(work))
    first, end = max(cut[rank] - 1, 0), cut[rank + 1] - 1
    layers = range(first, min(end, len(model.layers)))
    part = Part(model, layers, rank == 0, rank == p - 1)
    stage = PipelineStage(part, rank, p, torch.device("cpu"))
    pipeline = Schedule1F1B(stage, n_microbatches=m, loss_fn=loss)
    inputs, losses = [tokens] if rank == 0 else [], []
    pipeline.step(*inputs, target=targets, losses=losses)
    ends = dist.new_group([0, p - 1])  # every rank must call it
    if model.head.weight is model.words.weight and rank in (0, p - 1):
        dist.all_reduce(model.words.weight.grad, group=ends)
    return torch.stack(losses).mean() if losses else None


def find_wrong_action(pipeline):
    """What each action reads, what each stage adds, and which came first."""
    rank, p = dist.get_rank(), dist.get_world_size()
    stage, m = pipeline.stage, len(pipeline.microbatches)
    seen = {"F": [], "B": []}
    stage.register_forward_pre_hook(
        lambda _, given: seen["F"].append(given[0].detach().clone())
    )
    stage.register_full_backward_pre_hook(
        lambda _, grads: seen["B"].append(grads[0].clone())
    )
    pipeline.step()
    summed = torch.cat([w.grad.flatten() for w in stage.parameters()])
    reads, adds = pipeline.alone()

    def differs(mine, right):
        return (mine - right).abs().max() > 1e-3 * right.abs().max()

    wrong = []
    for k in range(m):
        if differs(seen["F"][k], reads[f"{rank}F{k}"]):
            wrong.append((0, rank, f"{rank}F{k}"))  # the lowest stage
        if differs(seen["B"][k], reads[f"{rank}B{k}"]):
            kind = "F" if rank == p - 1 else "B"  # the loss is forward
            wrong.append((1, -rank, f"{rank}{kind}{k}"))  # the highest
    parts = [adds[f"{rank}B{k}"] for k in range(m)]
    if differs(summed, sum(parts)):
        lacks = sum(parts) - summed
        k = min(range(m), key=lambda k: (lacks - parts[k]).norm())
        wrong.append((2, rank, f"{rank}B{k}"))
    everybody = [None] * p
    dist.all_gather_object(everybody, wrong)
    return min(itertools.chain(*everybody), default=(None,))[-1]


def explain_1f1b(before, after):
    """Work follows m, waits the way through, memory the order."""
    schedule = before["schedule"]
    if len(after["busy"]) > len(before["busy"]):
        changed = "more ranks"
    elif after["busy"][0] > before["busy"][0]:
        changed = "more micro-batches"
    elif after["idle"][0] == before["idle"][0]:
        changed, schedule = "1f1b for gpipe", "1f1b"
    elif after["messages"] == before["messages"]:
        changed, schedule = "backward in halves", "zb-h1"
    elif after["held"][0] > before["held"][0]:
        changed, schedule = "more stages a rank", "interleaved"
    else:
        changed = "smaller micro-batches"
    busy, idle = 2 * after["busy"][0], after["idle"][0]
    grows = 2 if schedule == "gpipe" else 1
    return {
        "changed": changed,
        "schedule": schedule,
        "idle_over_total": idle / (busy + idle),
        "held": [grows * held for held in after["held"]],
    }
