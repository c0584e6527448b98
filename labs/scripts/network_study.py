"""The study of rung 10: one job on 4 ranks and 2 hosts measures a link, collectives, DDP and layouts.

    python labs/scripts/network_study.py '{"turns": 2}'     # `StudySettings`; the samples, as JSON

Starting ranks on a cluster takes time. So there is one launch: every rank builds all `Parts`, and rank 0 changes the
links' bandwidth between them. `lablib.calc.runs.network_study` makes rows of the samples, predicted beside measured.
`timed` reads from the network interface how many bytes left the host.

The model of the DDP part is a stack of linear layers in a DDP of `lablib.toys.data_parallel`. Some variants replace the
reduction of a full bucket: PyTorch calls that a communication hook. `Layout` trains one small transformer in four
layouts with the course's toys, on the same batch: the losses agree, and what crosses the link differs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.models import ModelConfig
from lablib.calc.runs import (
    STUDY_LAYOUTS,
    STUDY_VARIANTS,
    StudySettings,
    layout_bytes,
    link_bandwidth,
)
from lablib.calc.schedules import schedule
from lablib.calc.units import parse_bandwidth
from lablib.launch.measure import linear_stack
from lablib.launch.records import RECORD_SWITCH, run_or_replay
from lablib.toys import collectives
from lablib.toys.collectives import (
    NodeGroups,
    Wire,
    hierarchical_all_reduce,
    node_groups,
)
from lablib.toys.data_parallel import BucketedDDP, OverlappedDDP
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.tensor_parallel import parallelize
from lablib.toys.transformer import Transformer, tiny_config
from torch import Tensor, nn
from two_hosts import CARD, Cluster, burst, throttle, why_not

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
    """Give all links a bandwidth, from inside. Call it on every rank; nothing may be on its way."""
    dist.barrier()
    if dist.get_rank() == 0:
        throttle(rate)
    dist.barrier()


def card_bytes() -> int:
    """Return the bytes that this host's network interface says it has sent, headers and acknowledgements included."""
    for line in (
        Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    ):
        name, _, numbers = line.partition(":")
        if name.strip() == CARD:
            return int(
                numbers.split()[8]
            )  # after the eight columns of what came in
    return 0  # no such interface


def timed(
    work: Callable[[], Any],
    *,
    turns: int,
    warm: int = 1,
    lead: int = 0,
    repeats: int = 1,
    **conditions: Any,
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
            seconds = median(
                end - start for start, end in itertools.pairwise(ticks)
            )
            sample = {
                **conditions,
                "turn": turn,
                "seconds": seconds,
                "card_bytes": round(counted),
            }
            samples.append(sample | (said if isinstance(said, dict) else {}))
    return samples


def slowest(by_rank: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return of every sample the slowest rank's, with the bytes of the host that sent the most."""
    merged = []
    for same in zip(*by_rank, strict=True):
        worst = max(same, key=lambda sample: sample["seconds"])
        merged.append(
            {
                **worst,
                "card_bytes": max(sample["card_bytes"] for sample in same),
            }
        )
        if losses := [
            sample["loss"]
            for sample in same
            if sample.get("loss") is not None
        ]:
            merged[-1]["loss"] = sum(losses) / len(
                losses
            )  # of the full batch: every rank that has one has as much of it
    return merged


def exchanges(
    rate: str | None, sizes: Sequence[int], *, turns: int, other_host: int
) -> list[Sample]:
    """Time one round of messages: each rank that takes part sends one and receives one at the same time.

    "inside" are ranks 0 and 1, "across" rank 0 and the first rank of the other host, and "ring" all ranks, each
    sending to its right neighbour. What the link itself does is seen best by two ranks alone; what a round costs
    when all ranks take part, and share the machine's processors, only by all of them.
    """
    samples, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    rings = {
        "inside": [0, 1],
        "across": [0, other_host],
        "ring": list(range(ranks)),
    }
    for where, ring in rings.items():
        for size in sizes:
            here, there, wire = (
                torch.ones(size // 4),
                torch.empty(size // 4),
                Wire(),
            )
            place = ring.index(rank) if rank in ring else None

            def exchange(
                here=here, there=there, wire=wire, ring=ring, place=place
            ) -> None:
                if place is not None:
                    to, source = (
                        ring[(place + 1) % len(ring)],
                        ring[place - 1],
                    )
                    wire.exchange(
                        send=here, to=to, receive=there, source=source
                    )

            conditions = {
                "part": "link",
                "where": where,
                "rate": rate,
                "bytes": size,
            }
            runs = {"lead": leading(rate, size), "repeats": in_a_row(size)}
            samples += timed(
                exchange, turns=turns, warm=0, **runs, **conditions
            )
    return samples


def all_reduces(
    rate: str | None, sizes: Sequence[int], groups: NodeGroups, *, turns: int
) -> list[Sample]:
    """Time every algorithm of `ALGORITHMS` over all ranks; in each turn one after the other."""
    samples = []
    for size in sizes:
        x = torch.zeros(size // 4)
        for turn in range(turns):
            for name in ALGORITHMS:
                call = getattr(collectives, name)
                more = (groups,) if name == "hierarchical_all_reduce" else ()
                conditions = {
                    "part": "all-reduce",
                    "rate": rate,
                    "algorithm": name,
                    "bytes": size,
                }
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
    """Return how often a sample repeats a call of this size: up to 256 KiB in all and `most` times, but once at least."""
    return max(1, min(most, 2**18 // max(1, size)))


def leading(rate: str | None, size: int) -> int:
    """Return how many calls are to use up what a link lets through at once: at most four, and one of a small size."""
    saved = (
        2 * burst(parse_bandwidth(rate)) if rate else 0
    )  # the interfaces at both ends save as much
    return min(4, -(-saved // size)) if size >= 2**14 else 1


#: Starts to add a bucket, already divided by the number of ranks, up over all ranks.
Hook = Callable[[Tensor], torch.futures.Future]


def plain_hook(bucket: Tensor) -> torch.futures.Future:
    """Add a bucket up by gloo's all-reduce, a ring."""
    return dist.all_reduce(bucket, async_op=True).get_future()


def bf16_hook(bucket: Tensor) -> torch.futures.Future:
    """Send a bucket in bf16: half the bytes, 8 bits of precision, and the sum is rounded at every addition."""
    half = bucket.to(torch.bfloat16)
    return (
        dist.all_reduce(half, async_op=True)
        .get_future()
        .then(lambda _: bucket.copy_(half))
    )


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
            except (
                Exception
            ) as error:  # `sync` waits for this; without it for ever
                done.set_exception(error)

        worker.submit(reduce)
        return done

    return hook


class HookedDDP(OverlappedDDP):
    """The overlapped DDP of rung 2 with another way to add a bucket up; every parameter must be used."""

    def __init__(
        self, module: torch.nn.Module, hook: Hook, **options: Any
    ) -> None:
        super().__init__(module, **options)
        self.hook = hook

    def _mark_ready(self, p: torch.nn.Parameter) -> None:
        torch.mul(p.grad, 1 / self.world_size, out=self.views[p])
        p.grad = self.views[p]
        self.missing[self.bucket_index[p]].remove(p)
        while (index := len(self.futures)) < len(
            self.buckets
        ) and not self.missing[index]:
            self.futures.append(
                self.hook(self.flats[index])
            )  # as there, in order; there it is an all-reduce


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
        self.x = torch.randn(
            tokens,
            width,
            generator=torch.Generator().manual_seed(dist.get_rank()),
        )
        self.model, self.buckets = linear_stack(width, layers), []
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters())
        if variant != "compute":
            hooks: dict[str, Hook] = {
                "bf16": bf16_hook,
                "hierarchical": hierarchical_hook(groups),
            }
            limit = (
                self.gradient_bytes
                if variant == "one bucket"
                else bucket_bytes
            )
            options = {"first_bytes": limit, "bucket_bytes": limit}
            self.model = HookedDDP(
                self.model, hooks.get(variant, plain_hook), **options
            )
            self.buckets = [
                flat.nbytes // (1 + (variant == "bf16"))
                for flat in self.model.flats
            ]

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
        across = ring_all_reduce_bytes(
            sum(self.buckets),
            self.hosts if self.variant == "hierarchical" else ranks,
        )
        return {
            "part": "ddp",
            "variant": self.variant,
            "micro_batches": self.micro_batches,
            "ranks": ranks,
            "gradient_bytes": self.gradient_bytes,
            "buckets": list(self.buckets),
            "bytes_across": across,
        }


def ddp_samples(
    step: Step, rate: str | None, *, turns: int, warm: int = 1
) -> list[Sample]:
    """Time a step on all ranks."""
    return timed(step, turns=turns, warm=warm, rate=rate, **step.facts())


def alone_samples(step: Step, *, turns: int) -> list[Sample]:
    """Time a step without communication on rank 0 while all others wait."""
    rank = dist.get_rank()
    samples = timed(
        lambda: step() if rank == 0 else None,
        turns=turns,
        rate=None,
        **step.facts(),
    )
    return [{**sample, "variant": "alone"} for sample in samples]


NAME = "10_network_study"
HOSTS = 2
RANKS_PER_HOST = 2
PARTS = ("link", "all-reduce", "ddp", "placement")
LEARNING_RATE = 0.1
BUCKET_BYTES = 2**18


def study(settings: StudySettings) -> dict[str, Any]:
    """Return "samples", as `lablib.calc.runs.network_study` describes them, and "refused", why there is no cluster here.

    Where there is none the record is replayed; LABLIB_RECORD=1 makes the record.
    """
    refused = why_not()
    if refused is None and os.environ.get(RECORD_SWITCH) != "1":
        return {"samples": measure(settings), "refused": None}
    return {
        "samples": run_or_replay(NAME, lambda: measure(settings)).samples,
        "refused": refused,
    }


def measure(
    settings: StudySettings, parts: Sequence[str] = PARTS
) -> list[Sample]:
    """Return the samples of one job on the cluster."""
    with Cluster(HOSTS) as cluster:
        job = (study_job, settings, tuple(parts))
        return slowest(cluster.run_ranks(*job, ranks_per_host=RANKS_PER_HOST))


def study_job(settings: StudySettings, parts: Sequence[str]) -> list[Sample]:
    """Measure all parts on this rank, from the widest link to the narrowest."""
    todo = Parts(settings, parts)
    samples = todo.at_rate(None)
    rates = {
        *settings.ddp_rates,
        settings.link_rate,
        settings.savings_rate,
        settings.placement_rate,
    }
    for rate in sorted(rates, key=link_bandwidth, reverse=True):
        if todo.has(rate):
            set_rate(rate)
            samples += todo.at_rate(rate)
    return samples


class Parts:
    """The models and groups of a study on this rank."""

    def __init__(self, settings: StudySettings, parts: Sequence[str]) -> None:
        self.settings, self.parts = settings, parts
        self.groups = node_groups(RANKS_PER_HOST)
        self.steps: dict[str, Step] = {}
        self.layouts: dict[str, Layout] = {}
        if "ddp" in parts:
            for variant in ("compute", *STUDY_VARIANTS):
                self.steps[variant] = Step(
                    variant,
                    width=settings.width,
                    layers=settings.layers,
                    tokens=settings.tokens,
                    bucket_bytes=settings.bucket_bytes,
                    micro_batches=settings.micro_batches,
                    groups=self.groups,
                )
                self.steps[variant]()  # memory is touched for the first time
        if "placement" in parts:
            config = tiny_config(
                "llama", hidden=settings.hidden, num_layers=settings.blocks
            )
            windows = torch.randint(
                config.vocab,
                (settings.batch, settings.seq + 1),
                generator=torch.Generator().manual_seed(0),
            )
            for name in STUDY_LAYOUTS:
                self.layouts[name] = Layout(
                    name, config, windows, self.groups
                )

    def has(self, rate: str | None) -> bool:
        """Return whether anything is measured at this bandwidth."""
        s = self.settings
        wanted = {
            "link": rate == s.link_rate,
            "all-reduce": rate == s.link_rate,
            "ddp": rate in (None, s.savings_rate, *s.ddp_rates),
            "placement": rate in (None, s.placement_rate),
        }
        return any(wanted[part] for part in self.parts)

    def at_rate(self, rate: str | None) -> list[Sample]:
        """Return the samples of everything that is measured at this bandwidth."""
        s, samples = self.settings, []
        if "link" in self.parts and rate == s.link_rate:
            samples += exchanges(
                rate, s.link_sizes, turns=s.turns, other_host=RANKS_PER_HOST
            )
        if "all-reduce" in self.parts and rate == s.link_rate:
            samples += all_reduces(
                rate, s.reduce_sizes, self.groups, turns=s.turns
            )
        if "ddp" in self.parts:
            if rate is None:
                samples += alone_samples(self.steps["compute"], turns=s.turns)
                samples += ddp_samples(
                    self.steps["compute"], rate, turns=s.turns
                )
            for variant in STUDY_VARIANTS:
                base = variant == "buckets" and (
                    rate is None or rate in s.ddp_rates
                )
                if base or rate == s.savings_rate:
                    samples += ddp_samples(
                        self.steps[variant],
                        rate,
                        turns=s.turns,
                        warm=int(base),
                    )
        if "placement" in self.parts and rate in (None, s.placement_rate):
            for layout in self.layouts.values():
                # Without a throttled link every layout has warmed up already.
                samples += placement_samples(
                    layout, rate, turns=s.turns, warm=int(rate is None)
                )
        return samples


class Layout:
    """A model in one of the layouts, and its training step."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        tokens_BT: Tensor,
        groups: NodeGroups,
        *,
        micro_batches: int = 2,
    ) -> None:
        seq = tokens_BT.shape[1] - 1
        self.name, self.bytes_across = (
            name,
            layout_bytes(name, config, batch=len(tokens_BT), seq=seq),
        )
        torch.manual_seed(0)
        model = Transformer(config)
        build: dict[str, Callable[[], Callable[[], Tensor]]] = {
            "dp over all": lambda: self._data(
                model, tokens_BT, dist.group.WORLD
            ),
            "tp inside, dp across": lambda: self._data(
                parallelize(model, groups.inside), tokens_BT, groups.across
            ),
            "tp across, dp inside": lambda: self._data(
                parallelize(model, groups.across), tokens_BT, groups.inside
            ),
            "pp across, dp inside": lambda: self._pipeline(
                model, tokens_BT, groups, micro_batches
            ),
        }
        self._step = build[name]()

    def __call__(self) -> dict[str, Any]:
        """Take a training step: forward, backward, gradients averaged, SGD; return this rank's loss, if any."""
        loss = self._step()
        return {"loss": None if loss is None else float(loss.detach())}

    def _data(
        self,
        module: nn.Module,
        tokens_BT: Tensor,
        replicas: dist.ProcessGroup,
    ) -> Callable:
        """Return the step of a module on each data parallel rank, itself split over other ranks or not."""
        model = OverlappedDDP(
            module,
            replicas,
            first_bytes=BUCKET_BYTES,
            bucket_bytes=BUCKET_BYTES,
        )
        mine = tokens_BT.chunk(replicas.size())[dist.get_rank(replicas)]

        def step() -> Tensor:
            module.zero_grad(set_to_none=False)
            model.timeline.clear()
            loss = module.loss(mine)
            loss.backward()
            model.sync()
            descend(model.params)
            return loss

        return step

    def _pipeline(
        self,
        model: Transformer,
        tokens_BT: Tensor,
        groups: NodeGroups,
        micro_batches: int,
    ) -> Callable:
        """Return the step of one pipeline a place in the host: its stages are on different hosts."""
        stages = split_stages(model, groups.across.size())
        order = schedule("1f1b", p=groups.across.size(), m=micro_batches)
        pipeline = PipelineExecutor(stages, order, groups.across)
        mine = tokens_BT.chunk(groups.inside.size())[
            dist.get_rank(groups.inside)
        ]
        replica = BucketedDDP(
            nn.ModuleList(pipeline.stages.values()), groups.inside
        )

        def step() -> Tensor | None:
            replica.zero_grad(set_to_none=False)
            replica.timeline.clear()
            loss = pipeline.step(mine.chunk(micro_batches))
            replica.sync()
            descend(replica.params)
            return loss

        return step


@torch.no_grad()
def descend(parameters: Iterable[nn.Parameter]) -> None:
    """Take a step of SGD, p - η·grad."""
    for p in parameters:
        p.sub_(p.grad, alpha=LEARNING_RATE)


def placement_samples(
    layout: Layout, rate: str | None, *, turns: int, warm: int = 1
) -> list[Sample]:
    """Time the training step of a layout on all ranks."""
    conditions = {
        "part": "placement",
        "rate": rate,
        "layout": layout.name,
        "bytes_across": layout.bytes_across,
    }
    return timed(layout, turns=turns, warm=warm, **conditions)


if __name__ == "__main__":
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # which record is replayed; the JSON alone is the output
        found = study(StudySettings(**json.loads(sys.argv[1])))
    json.dump(found, sys.stdout)
