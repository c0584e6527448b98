"""PyTorch's own pipelines on the course's stages: `torch.distributed.pipelining` by the name of the schedule.

runs = run_ranks(torch_step, 4, "Interleaved1F1B", tiny_config("gpt2", num_layers=8, tied=False), 8)
runs[0].order           # PyTorch's order, as `lablib.calc.schedules.parse_schedule` reads it
runs[0].gradients       # of the weights on this rank, to be held to those of one process
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lablib.calc.models import ModelConfig
from lablib.calc.schedules import Schedule, parse_schedule, schedule
from lablib.launch.layouts.pipeline_runs import microbatch_windows
from lablib.launch.measure import record_comms
from lablib.toys import transformer
from lablib.toys.pipeline import split_stages

#: What `get_schedule_class` knows by name, and the stages on a rank that this course runs it with.
TORCH_SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


class OwnStage(PipelineStage):
    """A stage that does not greet its own rank: torch 2.11 does when the next stage is there too, and gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class TorchRun(NamedTuple):
    """A step of PyTorch's, as one rank saw it."""

    order: Schedule
    gradients: dict[str, Tensor]  # of this rank's parameters, by their names in the model
    losses: list[float]  # of the micro-batches, on the rank of the last stage; empty elsewhere


def torch_pipeline(name: str, modules: list[nn.Module], m: int, loss):
    """Return PyTorch's schedule over the stages of this rank.

    Args:
        modules: All stages of the model, in order of depth.
        m: Micro-batches of a step.
        loss: Of the last stage's output and a micro-batch's target.
    """
    rank, p, n = dist.get_rank(), dist.get_world_size(), len(modules)
    cls, cpu = get_schedule_class(name), torch.device("cpu")
    mine = range(rank, n, p)  # p apart: a loop over the ranks
    if cls in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        mine = [rank, n - 1 - rank]  # a V: down the ranks and back up
    stages = [OwnStage(modules[s], s, n, cpu) for s in mine]
    if issubclass(cls, PipelineScheduleSingle):  # GPipe and 1F1B
        stages = stages[0]
    return cls(stages, n_microbatches=m, loss_fn=loss)


def torch_step(name: str, config: ModelConfig, m: int, *, batch: int = 2, seq: int = 32) -> TorchRun:
    """Run one step of a schedule of PyTorch's on this rank; call it through `run_ranks`.

    Model and micro-batches are those of `watched_step`, from the same seeds.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = transformer.Transformer(config)
    modules = split_stages(model, p * TORCH_SCHEDULES[name])
    pipeline = torch_pipeline(name, modules, m, transformer.loss)
    windows, losses = torch.cat(microbatch_windows(m, batch, seq)), []
    # The batch goes to the first stage, and the target to the last; PyTorch cuts both into micro-batches.
    inputs = [windows[:, :-1].contiguous()] if rank == 0 else []
    pipeline.step(*inputs, target=windows, losses=losses)
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    return TorchRun(_order(name, pipeline, p, m), gradients, [loss.item() for loss in losses])


def fsdp_gathers(config: ModelConfig, m: int, *, reshard: bool) -> tuple[int, int]:
    """Return how often a second step of 1F1B gathers the weights of this rank's stage, and reduces its gradients.

    Half of the ranks are replicas of the other half; each stage is one unit of FSDP2. Call it through `run_ranks`.

    Args:
        reshard: FSDP2's `reshard_after_forward`.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    torch.manual_seed(0)
    module = split_stages(transformer.Transformer(config), stages)[stage]
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    own = PipelineStage(module, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group())
    pipeline = Schedule1F1B(own, n_microbatches=m, loss_fn=transformer.loss)
    windows = torch.cat(microbatch_windows(m, 1, 8))
    inputs = [windows[:, :-1].contiguous()] if stage == 0 else []
    pipeline.step(*inputs, target=windows)  # the first step also finds out shapes
    with record_comms() as log:
        pipeline.step(*inputs, target=windows)
    return log.calls["all_gather"], log.calls["reduce_scatter"]


def _order(name: str, pipeline: object, p: int, m: int) -> Schedule:
    """Return the order that PyTorch ran: its own list, which classes with several stages a rank keep."""
    if isinstance(pipeline, PipelineScheduleSingle):  # loops in code; the list that 1F1B has is not what it runs
        return schedule(name.lower(), p, m)
    kept = [[str(step) for step in pipeline.pipeline_order[rank] if step is not None] for rank in range(p)]
    return parse_schedule([[step for step in row if "REDUCE" not in step] for row in kept], name)
