"""One small transformer on two hosts in four layouts: which axis crosses the link decides the step's time.

Four ranks, two of them on each host. Every layout trains the same model on the same batch with our own toys, so the
losses agree; only what crosses the link differs. Runs inside a job, `lablib.launch.network_study`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.calc.network_placement import LAYOUTS, layout_bytes
from lablib.calc.schedules import schedule
from lablib.launch.network_clock import Sample, timed
from lablib.toys.collectives import NodeGroups
from lablib.toys.ddp import BucketedDDP, OverlappedDDP
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.tensor_parallel import parallelize
from lablib.toys.transformer import Transformer

LEARNING_RATE = 0.1
BUCKET_BYTES = 2**18


class Layout:
    """A model in one of the layouts, and its training step.

    Args:
        name: One of `lablib.calc.network_placement.LAYOUTS`.
        config: The model.
        tokens_BT: The whole batch: windows of S + 1 tokens, the same on every rank. 4 must divide B.
        groups: The ranks of this host, and those with this rank's place on all hosts.
        micro_batches: Of the pipeline.

    Raises:
        ValueError: If the layout is unknown, or the batch cannot be divided.
    """

    def __init__(
        self, name: str, config: ModelConfig, tokens_BT: Tensor, groups: NodeGroups, *, micro_batches: int = 2
    ) -> None:
        if name not in LAYOUTS:
            raise ValueError(f"layout={name!r} is unknown; use one of {'; '.join(LAYOUTS)}")
        if len(tokens_BT) % 4 or len(tokens_BT) // 2 % micro_batches:
            raise ValueError(f"a batch of {len(tokens_BT)} windows cannot be divided over 4 ranks")
        seq = tokens_BT.shape[1] - 1
        self.name, self.bytes_across = name, layout_bytes(name, config, batch=len(tokens_BT), seq=seq)
        torch.manual_seed(0)
        model = Transformer(config)
        build: dict[str, Callable[[], Callable[[], Tensor]]] = {
            "dp over all": lambda: self._data(model, tokens_BT, dist.group.WORLD),
            "tp inside, dp across": lambda: self._data(
                parallelize(model, groups.inside), tokens_BT, groups.across
            ),
            "tp across, dp inside": lambda: self._data(
                parallelize(model, groups.across), tokens_BT, groups.inside
            ),
            "pp across, dp inside": lambda: self._pipeline(model, tokens_BT, groups, micro_batches),
        }
        self._step = build[name]()

    def __call__(self) -> dict[str, Any]:
        """Take a training step: forward, backward, gradients averaged, SGD; return this rank's loss before it."""
        loss = self._step()
        return {"loss": None if loss is None else float(loss.detach())}

    def _data(self, module: nn.Module, tokens_BT: Tensor, replicas: dist.ProcessGroup) -> Callable:
        """Return the step of a module on each data parallel rank, itself split over other ranks or whole."""
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

    def _pipeline(
        self, model: Transformer, tokens_BT: Tensor, groups: NodeGroups, micro_batches: int
    ) -> Callable:
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
    """Time the training step of a layout on all ranks.

    Args:
        layout: Which.
        rate: What the link is throttled to; only noted.
        turns: How many samples.
        warm: Steps before the first that counts.
    """
    conditions = {
        "part": "placement",
        "rate": rate,
        "layout": layout.name,
        "bytes_across": layout.bytes_across,
    }
    return timed(layout, turns=turns, warm=warm, **conditions)
