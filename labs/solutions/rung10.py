"""The worked exercises of rung 10."""

import torch
import torch.distributed as dist


def ring_all_reduce(row, rank, ranks, exchange):
    """Reduce-scatter, then all-gather, one chunk in every step."""
    chunks = row.tensor_split(ranks)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        mine = chunks[(rank - step) % ranks]
        coming = chunks[(rank - step - 1) % ranks]
        landing = coming.new_empty(coming.shape)
        exchange(mine, right, landing, left)
        coming += landing
    for step in range(ranks - 1):
        mine = chunks[(rank + 1 - step) % ranks]
        coming = chunks[(rank - step) % ranks]
        exchange(mine, right, coming, left)


def fast_all_reduce(row, rank, ranks, exchange, latency, bandwidth):
    """Doubling where latency decides, a ring where bandwidth does."""
    seconds = row.nbytes / bandwidth
    rounds = ranks.bit_length() - 1
    doubling = rounds * (latency + seconds)
    if 2 * (ranks - 1) * (latency + seconds / ranks) < doubling:
        return ring_all_reduce(row, rank, ranks, exchange)
    for bit in range(rounds):
        partner = rank ^ (1 << bit)
        landing = row.new_empty(row.shape)
        exchange(row, partner, landing, partner)
        row += landing


def make_hook(ranks_per_host):
    """Add up inside a host, send chunks across, and hand the sums round."""
    ranks = dist.get_world_size()
    inside, _ = dist.new_subgroups_by_enumeration(
        [
            list(range(first, first + ranks_per_host))
            for first in range(0, ranks, ranks_per_host)
        ]
    )
    across, _ = dist.new_subgroups_by_enumeration(
        [
            list(range(at, ranks, ranks_per_host))
            for at in range(ranks_per_host)
        ]
    )

    def hook(state, bucket):
        flat = bucket.buffer()
        padding = flat.new_zeros(-len(flat) % ranks_per_host)
        padded = torch.cat([flat, padding])
        chunk = padded.new_empty(len(padded) // ranks_per_host)
        dist.reduce_scatter_tensor(chunk, padded, group=inside)
        dist.all_reduce(chunk, group=across)
        dist.all_gather_into_tensor(padded, chunk, group=inside)
        done = torch.futures.Future()
        done.set_result(padded[: len(flat)] / ranks)
        return done

    return hook


def find_fault(job):
    """Compare over the ranks what goes into each sum, and what is used."""
    model, own, given = job.model(), {}, []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: own.update({name: p.grad.clone()})
        )
    sums = dist.all_reduce

    def watched(tensor, *args, **how):
        same = [x for x, g in own.items() if torch.equal(g, tensor)]
        given.append(same[0] if same else "")
        return sums(tensor, *args, **how)

    dist.all_reduce = watched
    for step in range(job.steps):
        given.clear()
        job.step(model, step)
        used = [(x, p.grad.tolist()) for x, p in model.named_parameters()]
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, [*((x, x) for x in given), *used])
        odd, layers = set(), set()
        for column in zip(*seen, strict=True):
            usual = max(column, key=column.count)
            for rank, entry in enumerate(column):
                if entry != usual:
                    odd.add(rank)
                    layers |= {entry[0], usual[0]}
        if odd:
            layers.discard("")
            return {"step": step, "rank": odd.pop(), "layers": layers}
