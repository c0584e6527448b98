"""The study of rung 10: one job on 4 ranks and 2 hosts measures a link, collectives, DDP and layouts.

    study = network_study()          # on this machine, about 12 s; where it has no cluster, the record is replayed
    for row in scaling_rows(study.samples): ...

Starting ranks on a cluster takes longer than measuring on it. So there is one launch: every rank builds all `Parts`,
and rank 0 changes the links' bandwidth between them. `lablib.calc.runs.network_study` makes rows of the samples,
predicted beside measured.

`Layout` trains one small transformer in four layouts with the course's toys, on the same batch: the losses agree, and
only what crosses the link differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.calc.runs import STUDY_LAYOUTS, STUDY_VARIANTS, StudySettings, layout_bytes, link_bandwidth
from lablib.calc.schedules import schedule
from lablib.launch.communication.cluster import Cluster, why_not
from lablib.launch.communication.link import (
    Sample,
    Step,
    all_reduces,
    alone_samples,
    ddp_samples,
    exchanges,
    set_rate,
    slowest,
    timed,
)
from lablib.launch.records import RECORD_SWITCH, Record, run_or_replay
from lablib.toys.collectives import NodeGroups, node_groups
from lablib.toys.data_parallel import BucketedDDP, OverlappedDDP
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.tensor_parallel import parallelize
from lablib.toys.transformer import Transformer, tiny_config

NAME = "10_network_study"
HOSTS = 2
RANKS_PER_HOST = 2
PARTS = ("link", "all-reduce", "ddp", "placement")
LEARNING_RATE = 0.1
BUCKET_BYTES = 2**18


@dataclass(frozen=True)
class Study:
    """The samples of a study, and where they come from."""

    samples: list[Sample]  # raw, as `lablib.calc.runs.network_study` describes them
    # where they were replayed from or written to; None if they were measured just now and not kept
    record: Record | None
    refused: str | None  # why this machine has no cluster, in one sentence; None if it has


def network_study(settings: StudySettings | None = None) -> Study:
    """Measure on this machine; where it has no cluster, say why and replay the record."""
    if os.environ.get(RECORD_SWITCH) == "1":
        record = run_or_replay(NAME, lambda: measure(settings))
        return Study(record.samples, record, None)
    refused = why_not()
    if refused is None:
        return Study(measure(settings), None, None)
    print(f"No cluster on this machine: {refused}.")
    record = run_or_replay(NAME, lambda: measure(settings))
    return Study(record.samples, record, refused)


def measure(settings: StudySettings | None = None, parts: Sequence[str] = PARTS) -> list[Sample]:
    """Return the samples of one job on the cluster."""
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"parts={unknown} are unknown; use {', '.join(PARTS)}")
    with Cluster(hosts=HOSTS) as cluster:
        job = (study_job, settings or StudySettings(), tuple(parts))
        return slowest(cluster.run_ranks(*job, ranks_per_host=RANKS_PER_HOST))


def study_job(settings: StudySettings, parts: Sequence[str]) -> list[Sample]:
    """Measure all parts on this rank, from the widest link to the narrowest."""
    todo = Parts(settings, parts)
    samples = todo.at_rate(None)
    rates = {*settings.ddp_rates, settings.link_rate, settings.savings_rate, settings.placement_rate}
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
            config = tiny_config("llama", hidden=settings.hidden, num_layers=settings.blocks)
            windows = torch.randint(
                config.vocab, (settings.batch, settings.seq + 1), generator=torch.Generator().manual_seed(0)
            )
            for name in STUDY_LAYOUTS:
                self.layouts[name] = Layout(name, config, windows, self.groups)

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
            samples += exchanges(rate, s.link_sizes, turns=s.turns, other_host=RANKS_PER_HOST)
        if "all-reduce" in self.parts and rate == s.link_rate:
            samples += all_reduces(rate, s.reduce_sizes, self.groups, turns=s.turns)
        if "ddp" in self.parts:
            if rate is None:
                samples += alone_samples(self.steps["compute"], turns=s.turns)
                samples += ddp_samples(self.steps["compute"], rate, turns=s.turns)
            for variant in STUDY_VARIANTS:
                base = variant == "buckets" and (rate is None or rate in s.ddp_rates)
                if base or rate == s.savings_rate:
                    samples += ddp_samples(self.steps[variant], rate, turns=s.turns, warm=int(base))
        if "placement" in self.parts and rate in (None, s.placement_rate):
            for layout in self.layouts.values():
                # Without a throttled link every layout has warmed up already.
                samples += placement_samples(layout, rate, turns=s.turns, warm=int(rate is None))
        return samples


class Layout:
    """A model in one of the layouts, and its training step."""

    def __init__(
        self, name: str, config: ModelConfig, tokens_BT: Tensor, groups: NodeGroups, *, micro_batches: int = 2
    ) -> None:
        if name not in STUDY_LAYOUTS:
            raise ValueError(f"layout={name!r} is unknown; use one of {'; '.join(STUDY_LAYOUTS)}")
        if len(tokens_BT) % 4 or len(tokens_BT) // 2 % micro_batches:
            raise ValueError(f"a batch of {len(tokens_BT)} windows cannot be divided over 4 ranks")
        seq = tokens_BT.shape[1] - 1
        self.name, self.bytes_across = name, layout_bytes(name, config, batch=len(tokens_BT), seq=seq)
        torch.manual_seed(0)
        model = Transformer(config)
        build: dict[str, Callable[[], Callable[[], Tensor]]] = {
            "dp over all": lambda: self._data(model, tokens_BT, dist.group.WORLD),
            "tp inside, dp across": lambda: self._data(parallelize(model, groups.inside), tokens_BT, groups.across),
            "tp across, dp inside": lambda: self._data(parallelize(model, groups.across), tokens_BT, groups.inside),
            "pp across, dp inside": lambda: self._pipeline(model, tokens_BT, groups, micro_batches),
        }
        self._step = build[name]()

    def __call__(self) -> dict[str, Any]:
        """Take a training step: forward, backward, gradients averaged, SGD; return this rank's loss before it."""
        loss = self._step()
        return {"loss": None if loss is None else float(loss.detach())}

    def _data(self, module: nn.Module, tokens_BT: Tensor, replicas: dist.ProcessGroup) -> Callable:
        """Return the step of a module on each data parallel rank, itself split over other ranks or not."""
        model = OverlappedDDP(module, replicas, first_bytes=BUCKET_BYTES, bucket_bytes=BUCKET_BYTES)
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

    def _pipeline(self, model: Transformer, tokens_BT: Tensor, groups: NodeGroups, micro_batches: int) -> Callable:
        """Return the step of one pipeline a place in the host: its stages are on different hosts."""
        stages = split_stages(model, groups.across.size())
        order = schedule("1f1b", p=groups.across.size(), m=micro_batches)
        pipeline = PipelineExecutor(stages, order, groups.across)
        mine = tokens_BT.chunk(groups.inside.size())[dist.get_rank(groups.inside)]
        replica = BucketedDDP(nn.ModuleList(pipeline.stages.values()), groups.inside)

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
    """Take a step of SGD, p - η·grad; torch.optim would load PyTorch's compiler on every rank first."""
    for p in parameters:
        p.sub_(p.grad, alpha=LEARNING_RATE)


def placement_samples(layout: Layout, rate: str | None, *, turns: int, warm: int = 1) -> list[Sample]:
    """Time the training step of a layout on all ranks."""
    conditions = {"part": "placement", "rate": rate, "layout": layout.name, "bytes_across": layout.bytes_across}
    return timed(layout, turns=turns, warm=warm, **conditions)
