"""A miniature built from PyTorch's own: pipeline stages, DTensor, FSDP2 or DDP, on one DeviceMesh.

    mesh    init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    pp      split_stages, then PipelineStage and Schedule1F1B over mesh["pp"]
    tp      parallelize_module(stage, mesh["tp"], plan)
    dp      fully_shard(block, mesh=mesh["dp"]), or DistributedDataParallel

This is the order: stages, tp, (recompute, compile,) dp. Why, and what happens otherwise: `composition_order`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.miniature import Miniature
from lablib.launch.composition import ADAMW, mean_loss
from lablib.launch.composition_tensors import by_mesh, whole
from lablib.launch.torch_private import checkpoint_wrapper
from lablib.toys.stages import Stage, split_stages
from lablib.toys.transformer import Transformer

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
DIMS = ("pp", "dp", "tp")  # slowest first, as a DeviceMesh wants them


class TorchJob:
    """One rank's share of a miniature.

    Args:
        job: The miniature.
        model: The whole model, the same on every rank.
    """

    def __init__(self, job: Miniature, model: Transformer) -> None:
        self.job = job
        self.mesh = make_mesh(job)
        self.groups = {axis: self.mesh[axis].get_group() for axis in DIMS}
        stage = self.mesh["pp"].get_local_rank()
        held: nn.Module = split_stages(model, job.pp)[stage] if job.pp > 1 else model
        apply_in_order(held, self.mesh, tp=job.tp > 1, shard=job.sharded, reshard=job.pp == 1)
        self.held = self.wrapped = held
        if job.dp > 1 and not job.sharded:
            self.wrapped = DistributedDataParallel(held, process_group=self.groups["dp"])
        self.schedule = None
        if job.pp > 1:
            # Told what goes in and out, a stage need not run once to find it out.
            given, made = examples(job, stage)
            piece = PipelineStage(
                self.wrapped, stage, job.pp, torch.device("cpu"), given, made, group=self.groups["pp"]
            )
            kind = SCHEDULES[job.schedule]
            self.schedule = kind(piece, n_microbatches=job.micro_batches, loss_fn=mean_loss)
        self.is_first, self.is_last = stage == 0, stage == job.pp - 1
        # The fused kernel takes plain tensors or DTensors, not both.
        groups = [{"params": own} for own in by_mesh(held.parameters())]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)

    def backward(self, tokens_BT: Tensor) -> Tensor | None:
        """Run forward and backward and average gradients over dp.

        Returns:
            The mean loss of the replica where the last stage is, else None.
        """
        if self.schedule is None:
            loss = mean_loss(self.wrapped(tokens_BT[:, :-1]), tokens_BT)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        given = (tokens_BT[:, :-1].contiguous(),) if self.is_first else ()  # torch 2.11 compares strides
        target = {"target": tokens_BT, "losses": losses} if self.is_last else {}
        self.schedule.step(*given, **target)
        return torch.stack(losses).detach().mean() if losses else None

    def step(self) -> None:
        """Update the weights; gradients are gone after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return whole gradients of what this rank's stage has, by name; every rank must call it."""
        return {plain_name(name): whole(p.grad) for name, p in self.held.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights of what this rank's stage has, by name; every rank must call it."""
        return {plain_name(name): whole(p) for name, p in self.held.named_parameters()}


def make_mesh(job: Miniature) -> DeviceMesh:
    """Return the DeviceMesh of a miniature, with dims pp, dp and tp.

    Args:
        job: The miniature, its ranks in the order tp, dp, pp.
    """
    return init_device_mesh("cpu", (job.pp, job.dp, job.tp), mesh_dim_names=DIMS)


def examples(job: Miniature, stage: int) -> tuple[Tensor, Tensor]:
    """Return an input and an output of a stage, of the right shapes.

    Args:
        job: The miniature.
        stage: Its number, from 0.
    """
    dtype, size = getattr(torch, job.dtype), (job.micro_batch, job.seq)
    stream = torch.empty(*size, job.config.hidden, dtype=dtype, requires_grad=True)
    logits = torch.empty(*size, job.config.vocab, dtype=dtype, requires_grad=True)
    tokens = torch.empty(size, dtype=torch.int64)
    return stream if stage else tokens, logits if stage == job.pp - 1 else stream


def tp_plan(model: Transformer | Stage) -> dict[str, object]:
    """Return a plan for `parallelize_module`: columns into a half, a row out of it, the vocabulary at both ends.

    Args:
        model: The whole model, or a stage of it.
    """
    columns, rows = ColwiseParallel, RowwiseParallel
    gated = model.config.gated_mlp
    plan: dict[str, object] = {f"blocks.*.attention.{name}": columns() for name in ("q", "k", "v")}
    plan |= {f"blocks.*.mlp.{name}": columns() for name in (("up", "gate") if gated else ("up",))}
    plan |= {"blocks.*.attention.out": rows(), "blocks.*.mlp.down": rows()}
    if model.embed is not None:
        plan["embed"] = rows(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = columns(output_layouts=Replicate())
    return plan


def apply_in_order(
    model: Transformer | Stage,
    mesh: DeviceMesh,
    *,
    tp: bool = True,
    recompute: bool = False,
    compile_backend: str | None = None,
    shard: bool = True,
    reshard: bool = True,
) -> None:
    """Apply to a model, or to a stage of it, what is asked for, in the order that works.

    Each step needs what the one before leaves alone: tp finds modules by their names, which a wrapper for
    recomputation changes; the compiler takes a block as it will run; FSDP shards what is left, DTensors too.
    The optimizer comes after all of it.

    Args:
        model: The whole model, or a stage of it: stages are cut before.
        mesh: With dims dp and tp.
        tp: Split layers over tp.
        recompute: Recompute every block in backward.
        compile_backend: Compile every block with this backend of torch.compile; None compiles nothing.
        shard: Shard over dp.
        reshard: Whether a block is freed after forward.
    """
    if tp:
        parallelize_module(model, mesh["tp"], tp_plan(model))
    if recompute:
        wrap_blocks(model, checkpoint_wrapper)
    if compile_backend:
        for block in _blocks(model):
            block.compile(backend=compile_backend)
    if shard:
        shard_blocks(model, mesh["dp"], reshard=reshard)


def wrap_blocks(model: Transformer | Stage, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Put a wrapper around every block.

    Args:
        model: The whole model, or a stage of it.
        wrapper: Returns a module that stands for the one it gets.
    """
    for name, block in list(model.blocks.named_children()):
        wrapped = wrapper(block)
        if isinstance(model.blocks, nn.ModuleDict):
            model.blocks[name] = wrapped
        else:
            model.blocks[int(name)] = wrapped


def shard_blocks(model: Transformer | Stage, mesh: DeviceMesh, *, reshard: bool = True) -> None:
    """Shard every block with FSDP2, then what is left of the model.

    Args:
        model: The whole model, or a stage of it.
        mesh: The dp dim.
        reshard: Whether a block is freed after forward; with micro-batches it would be gathered for each.
    """
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def plain_name(name: str) -> str:
    """Return the name that a parameter has without wrappers."""
    for prefix in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(prefix, "")
    return name


def _blocks(model: Transformer | Stage) -> list[nn.Module]:
    blocks = model.blocks
    return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
