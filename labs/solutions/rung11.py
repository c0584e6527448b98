"""Worked exercises of rung 11, a real FSDP run."""

from __future__ import annotations

from statistics import fmean


def keep_training(task, folder):
    """All that a step depends on is saved, each time to a new folder, and the newest whole one is loaded."""
    import os

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from lablib.launch.ranks import rank_mesh
    from torch.distributed.checkpoint.state_dict import (
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = task.model()
    for part in (*model, model):
        fully_shard(part, mesh=rank_mesh())
    optimizer = torch.optim.AdamW(model.parameters())

    def state(step):
        weights, moments = get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": moments}
        mine = {f"random {rank} of {ranks}": torch.get_rng_state()}
        return {**whole, **mine, "step": step}

    done = [
        step
        for step in range(task.steps + 1)
        if os.path.exists(f"{folder}/{step}/.metadata")
    ]
    step = max(done, default=0)
    if step:
        saved, path = state(step), f"{folder}/{step}"
        stored = dcp.FileSystemReader(path).read_metadata()
        for key in [key for key in saved if key.startswith("random")]:
            if key not in stored.state_dict_metadata:
                del saved[key]  # other ranks wrote it: a new state will do
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        for key in saved:
            if key.startswith("random"):
                torch.set_rng_state(saved[key])
    order = [n for epoch in range(task.steps) for n in task.order(epoch)]
    while step < task.steps:
        batch = order[step * task.batch : (step + 1) * task.batch]
        step += 1
        optimizer.param_groups[0]["lr"] = task.rate(step)
        loss = task.loss(model, batch[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % task.save_every == 0:
            dcp.save(state(step), checkpoint_id=f"{folder}/{step}")
        task.log(step, loss)


def diagnose(run):
    """A twin of one process takes the same steps; the first thing that differs is where it shows."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    twin = run.model()
    optimizer = torch.optim.AdamW(twin.parameters())
    order = [n for epoch in range(run.steps) for n in run.order(epoch)]

    def off(mine, right):
        """Compare this rank's shards with its rows of the whole tensors."""
        pairs = zip(mine, right, strict=True)
        shards = ((a.to_local(), b.chunk(ranks)[rank]) for a, b in pairs)
        return any((a - b).abs().max() > 1e-9 for a, b in shards)

    found = []
    for step, part in run.parts():
        if part == "read":
            batch = order[(step - 1) * run.batch : step * run.batch]
            wrong = list(run.samples) != batch[rank::ranks]
        elif part == "forward":
            losses = [run.loss(twin, batch[r::ranks]) for r in range(ranks)]
            wrong = abs(run.value - losses[rank].item()) > 1e-9
        elif part in ("backward", "clip"):
            if part == "backward":
                (sum(losses) / ranks).backward()
            else:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), run.clip)
            mine = [p.grad for p in run.weights.values()]
            wrong = off(mine, [p.grad for p in twin.parameters()])
        elif part == "rate":
            rate = optimizer.param_groups[0]["lr"] = run.rate(step)
            wrong = run.optimizer.param_groups[0]["lr"] != rate
        else:
            optimizer.step()
            optimizer.zero_grad()
            wrong = off(run.weights.values(), twin.parameters())
        found.append((step, part, wrong))
    seen = [None] * ranks
    dist.all_gather_object(seen, found)
    for moment in zip(*seen, strict=True):
        where = [r for r, (_, _, wrong) in enumerate(moment) if wrong]
        if where:
            return moment[0][0], moment[0][1], where
    return None


def audit_mfu(report):
    """The MFU as it should be, and as each mistake makes it; the nearest one is what was done."""
    weights = 6 * report["parameters"]
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    tokens = report["positions"] - report["padding"]

    def mfu(flops, tokens=tokens, peak=report["dense_peak"]):
        return flops * tokens / (report["seconds"] * report["gpus"] * peak)

    right = mfu(weights + scores)
    claims = {
        "honest": right,
        "attention left out": mfu(weights),
        "attention twice": mfu(weights + 2 * scores),
        "sparse peak": mfu(weights + scores, peak=report["sparse_peak"]),
    }
    if report["padding"]:
        claims["padding counted"] = mfu(
            weights + scores, tokens=report["positions"]
        )
    if report["recompute"] == "full":
        claims["recomputation counted"] = 4 / 3 * right
    return right, min(
        claims, key=lambda name: abs(claims[name] - report["mfu"])
    )


def observe_scaling(alone, ranks, scaling):
    """Speedup from the slowest rank's time; the loss split so that its parts add up."""
    n = len(ranks)
    step = max(rank["seconds"] for rank in ranks)
    share = 1 if scaling == "weak" else 1 / n
    ideal = share * alone["seconds"]
    transfer = min(rank["communication"] for rank in ranks)
    waited = [
        rank["communication"] - transfer + step - rank["seconds"]
        for rank in ranks
    ]
    lost = {"communication": transfer, "imbalance": fmean(waited)}
    for part in ("data", "compute"):
        lost[part] = fmean(rank[part] for rank in ranks) - share * alone[part]
    return {
        "speedup": n * ideal / step,
        "efficiency": ideal / step,
        "lost": lost,
        "limit": max(lost, key=lost.get),
    }
