"""One link measured, inside a job of `study`: messages of many sizes, our all-reduces, and steps of data parallelism.

`timed` times something on every rank, and reads from the network interface how many bytes really left the host.

The model is a stack of linear layers in `lablib.toys.data_parallel.ddp`; PyTorch's DistributedDataParallel would
load its compiler on every rank, which takes longer than this study. A variant replaces only the reduction of a full
bucket: PyTorch calls that a communication hook.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.units import parse_bandwidth
from lablib.launch.communication.cluster import CARD, burst, throttle
from lablib.launch.measure import linear_stack
from lablib.toys import collectives
from lablib.toys.collectives import NodeGroups, Wire, hierarchical_all_reduce
from lablib.toys.data_parallel import OverlappedDDP

Sample = dict[str, Any]
#: What the study compares: few rounds, few bytes, or as few bytes as possible over the slow link.
ALGORITHMS = (
    "ring_all_reduce",
    "tree_all_reduce",
    "recursive_doubling_all_reduce",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
)


def set_rate(rate: str | None) -> None:
    """Throttle all links, from inside. Call it on every rank; nothing may be on its way."""
    dist.barrier()
    if dist.get_rank() == 0:
        throttle(rate)
    dist.barrier()


def card_bytes() -> int:
    """Return the bytes that this host's network interface has sent since it was made, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == CARD:
            return int(numbers.split()[8])  # after the eight columns of what came in
    return 0  # no cluster: nothing leaves


def timed(
    work: Callable[[], Any], *, turns: int, warm: int = 1, lead: int = 0, repeats: int = 1, **conditions: Any
) -> list[Sample]:
    """Return one sample for each turn, the median of `repeats` runs in a row; all ranks start each turn together."""
    samples = []
    for turn in range(-warm, turns):
        dist.barrier()
        for _ in range(lead):
            work()
        sent, ticks = card_bytes(), [time.perf_counter()]
        for _ in range(repeats):
            said = work()
            ticks.append(time.perf_counter())
        dist.barrier()  # before the counter is read again: the other rank of this host uses it too
        counted = (card_bytes() - sent) / repeats
        if turn >= 0:
            seconds = median(end - start for start, end in itertools.pairwise(ticks))
            sample = {**conditions, "turn": turn, "seconds": seconds, "card_bytes": round(counted)}
            samples.append(sample | (said if isinstance(said, dict) else {}))
    return samples


def slowest(by_rank: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return of every sample the slowest rank's, with the bytes of the host that sent the most."""
    merged = []
    for same in zip(*by_rank, strict=True):
        worst = max(same, key=lambda sample: sample["seconds"])
        merged.append({**worst, "card_bytes": max(sample["card_bytes"] for sample in same)})
        if losses := [sample["loss"] for sample in same if sample.get("loss") is not None]:
            merged[-1]["loss"] = sum(losses) / len(losses)  # of the full batch: every rank has as much of it
    return merged


def exchanges(rate: str | None, sizes: Sequence[int], *, turns: int, other_host: int) -> list[Sample]:
    """Time one round of messages: each rank that takes part sends one and receives one at the same time.

    "inside" are ranks 0 and 1, "across" rank 0 and the first rank of the other host, and "ring" all ranks, each
    sending to its right neighbour. What the link itself does is seen best by two ranks alone; what a round costs
    when all ranks take part, and share the machine's processors, only by all of them.
    """
    samples, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    rings = {"inside": [0, 1], "across": [0, other_host], "ring": list(range(ranks))}
    for where, ring in rings.items():
        for size in sizes:
            here, there, wire = torch.ones(size // 4), torch.empty(size // 4), Wire()
            place = ring.index(rank) if rank in ring else None

            def exchange(here=here, there=there, wire=wire, ring=ring, place=place) -> None:
                if place is not None:
                    to, source = ring[(place + 1) % len(ring)], ring[place - 1]
                    wire.exchange(send=here, to=to, receive=there, source=source)

            conditions = {"part": "link", "where": where, "rate": rate, "bytes": size}
            runs = {"lead": leading(rate, size), "repeats": in_a_row(size)}
            samples += timed(exchange, turns=turns, warm=0, **runs, **conditions)
    return samples


def all_reduces(rate: str | None, sizes: Sequence[int], groups: collectives.NodeGroups, *, turns: int) -> list[Sample]:
    """Time every algorithm of `ALGORITHMS` over all ranks; they take turns within each round."""
    samples = []
    for size in sizes:
        x = torch.zeros(size // 4)
        for turn in range(turns):
            for name in ALGORITHMS:
                call = getattr(collectives, name)
                more = (groups,) if name == "hierarchical_all_reduce" else ()
                conditions = {"part": "all-reduce", "rate": rate, "algorithm": name, "bytes": size}
                [sample] = timed(
                    lambda call=call, more=more, x=x: call(x, *more),
                    turns=1,
                    warm=0,
                    lead=leading(rate, size),
                    repeats=in_a_row(size, 4),
                    **conditions,
                )
                samples.append({**sample, "turn": turn})
    return samples


def in_a_row(size: int, most: int = 20) -> int:
    """Return how often a message of this size is sent in one sample: about 256 KiB in all."""
    return max(1, min(most, 2**18 // max(1, size)))


def leading(rate: str | None, size: int) -> int:
    """Return how many messages of this size use up what a link lets through at once; small ones never do."""
    saved = 2 * burst(parse_bandwidth(rate)) if rate else 0  # the interfaces at both ends save as much
    return min(4, -(-saved // size)) if size >= 2**14 else 1


#: Starts to add a bucket, already divided by the number of ranks, up over all ranks.
Hook = Callable[[Tensor], torch.futures.Future]


def plain_hook(bucket: Tensor) -> torch.futures.Future:
    """Add a bucket up by gloo's all-reduce, a ring."""
    return dist.all_reduce(bucket, async_op=True).get_future()


def bf16_hook(bucket: Tensor) -> torch.futures.Future:
    """Send a bucket in bf16: half the bytes, 8 bits of precision, and the sum is rounded at every addition."""
    half = bucket.to(torch.bfloat16)
    return dist.all_reduce(half, async_op=True).get_future().then(lambda _: bucket.copy_(half))


def hierarchical_hook(groups: NodeGroups) -> Hook:
    """Return a hook that adds a bucket up by `hierarchical_all_reduce`.

    The work is done on a thread of its own, in the order of the buckets, while backward goes on.
    """
    worker = ThreadPoolExecutor(1)

    def hook(bucket: Tensor) -> torch.futures.Future:
        done = torch.futures.Future()

        def reduce() -> None:
            try:
                hierarchical_all_reduce(bucket, groups)
                done.set_result(bucket)
            except Exception as error:  # `sync` waits for this; without it for ever
                done.set_exception(error)

        worker.submit(reduce)
        return done

    return hook


class HookedDDP(OverlappedDDP):
    """The overlapped DDP of rung 2 with another way to add a bucket up; every parameter must be used."""

    def __init__(self, module: torch.nn.Module, hook: Hook, **options: Any) -> None:
        super().__init__(module, **options)
        self.hook = hook

    def _put(self, p: torch.nn.Parameter) -> None:
        torch.mul(p.grad, 1 / self.world_size, out=self.views[p])
        p.grad = self.views[p]
        self.missing[self.home[p]].remove(p)
        while (index := len(self.futures)) < len(self.buckets) and not self.missing[index]:
            self.futures.append(self.hook(self.flats[index]))  # as there, in order; only this line is new


class Step:
    """A training step of one variant: forward and backward, as often as it accumulates, and the mean gradient."""

    def __init__(
        self,
        variant: str,
        *,
        width: int,
        layers: int,
        tokens: int,
        bucket_bytes: int,
        micro_batches: int,
        groups: NodeGroups,
    ) -> None:
        self.variant, self.hosts = variant, dist.get_world_size(groups.across)
        self.micro_batches = micro_batches if variant == "accumulate" else 1
        self.x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.model, self.buckets = linear_stack(width, layers), []
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters())
        if variant != "compute":
            hooks: dict[str, Hook] = {"bf16": bf16_hook, "hierarchical": hierarchical_hook(groups)}
            limit = self.gradient_bytes if variant == "one bucket" else bucket_bytes
            options = {"first_bytes": limit, "bucket_bytes": limit}
            self.model = HookedDDP(self.model, hooks.get(variant, plain_hook), **options)
            self.buckets = [flat.nbytes // (1 + (variant == "bf16")) for flat in self.model.flats]

    def __call__(self) -> dict[str, float]:
        """Take the step; return how long forward and backward took."""
        self.model.zero_grad(set_to_none=False)
        forward = backward = 0.0
        for k in range(self.micro_batches):
            last = k == self.micro_batches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                start = time.perf_counter()
                loss = self.model(self.x).square().mean()
                between = time.perf_counter()
                loss.backward()
                forward += between - start
                backward += time.perf_counter() - between
        if self.buckets:
            self.model.sync()
        return {"forward": forward, "backward": backward}

    def facts(self) -> dict[str, Any]:
        """Return what a sample says of its step; `bytes_across` by the formula, out of one host."""
        ranks = dist.get_world_size()
        # Of a ring over all ranks one rank's bytes leave each host; of a hierarchical one each host's share.
        across = ring_all_reduce_bytes(sum(self.buckets), self.hosts if self.variant == "hierarchical" else ranks)
        return {
            "part": "ddp",
            "variant": self.variant,
            "micro_batches": self.micro_batches,
            "ranks": ranks,
            "gradient_bytes": self.gradient_bytes,
            "buckets": list(self.buckets),
            "bytes_across": across,
        }


def ddp_samples(step: Step, rate: str | None, *, turns: int, warm: int = 1) -> list[Sample]:
    """Time a step on all ranks."""
    return timed(step, turns=turns, warm=warm, rate=rate, **step.facts())


def alone_samples(step: Step, *, turns: int) -> list[Sample]:
    """Time a step without communication on rank 0 while all others wait."""
    rank = dist.get_rank()
    samples = timed(lambda: step() if rank == 0 else None, turns=turns, rate=None, **step.facts())
    return [{**sample, "variant": "alone"} for sample in samples]
