"""One small run in two versions: `ToyJob` from the course's toys, `TorchJob` from PyTorch's own parts.

          ToyJob                                                    TorchJob, on one DeviceMesh (pp, dp, tp)
    tp    tensor_parallel.parallelize(model, groups["tp"])          parallelize_module(stage, mesh["tp"], plan)
    pp    split_stages, a PipelineExecutor over groups["pp"]        split_stages, PipelineStage, Schedule1F1B
    dp    BucketedDDP, ZeRO1 (with stages) or ZeRO3 (without)       fully_shard(block), or DistributedDataParallel

PyTorch's order is stages, tp, (recompute, compile,) dp; `orders` shows what happens otherwise. The toys split layers
before stages are dealt, because the tensor-parallel toy takes a full model; PyTorch never makes what a rank will drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.layouts import Miniature
from lablib.launch.torch_private import checkpoint_wrapper
from lablib.toys.data_parallel import BucketedDDP
from lablib.toys.pipeline import PipelineExecutor, Stage, split_stages
from lablib.toys.tensor_parallel import ParallelTransformer, parallelize, vocab_parallel_cross_entropy
from lablib.toys.torch_names import all_gather
from lablib.toys.transformer import Transformer
from lablib.toys.zero import ZeRO1, ZeRO3

#: AdamW turns an error of a gradient into at most lr/eps times as much of a weight: here once, in place of 1e5 times.
ADAMW = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}


def model_and_tokens(job: Miniature, seed: int = 0) -> tuple[Transformer, list[Tensor]]:
    """Return the full model and the windows of every step, tokens_BT, the same on every rank."""
    torch.manual_seed(seed)
    model = Transformer(job.config).to(getattr(torch, job.dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a slip in them is seen
            parameter.add_(torch.randn_like(parameter) * 0.1)
    shape = (job.batch, job.seq + 1)
    return model, [torch.randint(0, job.config.vocab, shape) for _ in range(job.steps)]


def mean_loss(logits_BSV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the mean loss in the dtype of the logits, so that a run in float64 stays in it."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BT[:, 1:].flatten())


class LossModule(nn.Module):
    """A model whose forward returns the loss: a wrapper then needs to know nothing of tokens."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of the windows."""
        return self.loss(self.model(tokens_BT[:, :-1]), tokens_BT)


class _Pipelined:
    """Stands in for the loss in `ZeRO1.backward`: a step of the pipeline, with its many backward passes."""

    def __init__(self, pipeline: PipelineExecutor, microbatches: list[Tensor]) -> None:
        self.pipeline, self.microbatches = pipeline, microbatches
        self.loss: Tensor | None = None

    def backward(self) -> None:
        self.loss = self.pipeline.step(self.microbatches)


class ToyJob:
    """One rank's share of a miniature."""

    def __init__(self, job: Miniature, model: Transformer) -> None:
        self.job = job
        self.groups = make_groups(job)
        names = {id(p): name for name, p in model.named_parameters()}
        self.split: ParallelTransformer | None = None
        if job.tp > 1:
            model = self.split = parallelize(model, self.groups["tp"])
            model.dropout = nn.Identity()  # a stage takes this from the full model
            names = {id(p): name for name, p in model.named_parameters()}
        self.pipeline: PipelineExecutor | None = None
        if job.pp > 1:
            stages = split_stages(model, job.pp)
            self.pipeline = PipelineExecutor(stages, job.schedule_made(), self.groups["pp"], loss=self._loss)
            held: nn.Module = nn.ModuleList(self.pipeline.stages.values())
        else:
            held = LossModule(model, self._loss)
        self.names = {names[id(p)]: p for p in held.parameters()}
        self.zero: ZeRO1 | None = None
        if job.sharded:
            kind = ZeRO1 if self.pipeline else ZeRO3
            self.zero = kind(held, lambda shards: torch.optim.AdamW(shards, **ADAMW), self.groups["dp"])
            self.model: nn.Module = self.zero
        else:
            self.ddp = BucketedDDP(held, self.groups["dp"])
            self.model = held
            self.optimizer = torch.optim.AdamW(held.parameters(), **ADAMW)

    def backward(self, tokens_BT: Tensor) -> Tensor | None:
        """Run forward and backward, average gradients over dp; return the mean loss where the last stage is."""
        microbatches = list(tokens_BT.chunk(self.job.micro_batches))
        if self.pipeline and self.zero:
            step = _Pipelined(self.pipeline, microbatches)
            self.zero.backward(step)
            return step.loss
        if self.pipeline:
            loss = self.pipeline.step(microbatches)
        else:
            loss = self.model(tokens_BT)
            if self.zero:
                self.zero.backward(loss)
                return loss.detach()
            loss.backward()
            loss = loss.detach()
        self.ddp.sync()
        return loss

    def step(self) -> None:
        """Update the weights; gradients are gone after it."""
        if self.zero:
            self.zero.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return the unsharded gradients of this rank's stage, by name; every rank must call it."""
        if not self.zero:
            return self._unsharded({name: p.grad for name, p in self.names.items()})
        for flat in self.zero.trained:  # stage 1 sends them in its step only
            if flat.sharded_grad is None:
                flat.reduce_scatter_grads()
                flat.wait_for_reduce_scatter()
        pieces = {}
        places = {id(p): name for name, p in self.names.items()}
        for flat in self.zero.trained:
            whole = torch.empty(flat.width * flat.world_size, dtype=flat.sharded_grad.dtype)
            all_gather(whole, flat.sharded_grad, group=flat.group)
            parts = zip(flat.params, flat.split(whole), strict=True)
            pieces |= {places[id(p)]: part.clone() for p, part in parts}
        return self._unsharded({name: pieces[name] for name in self.names})

    def weights(self) -> dict[str, Tensor]:
        """Return the unsharded weights of this rank's stage, by name; every rank must call it."""
        if not isinstance(self.zero, ZeRO3):
            return self._unsharded({name: p.detach() for name, p in self.names.items()})
        state = self.zero.full_state_dict()
        return self._unsharded({name: state[f"model.{name}"] for name in self.names})

    def _unsharded(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.split is None:
            return {name: piece.clone() for name, piece in pieces.items()}
        return {name: self.split.gather(name, piece) for name, piece in pieces.items()}

    def _loss(self, logits: Tensor, tokens_BT: Tensor) -> Tensor:
        if self.split is None:
            return mean_loss(logits, tokens_BT)
        return vocab_parallel_cross_entropy(logits, tokens_BT[:, 1:], self.split.first, self.groups["tp"]).mean()


def make_groups(job: Miniature) -> dict[str, dist.ProcessGroup]:
    """Return this rank's process group along each of tp, dp and pp, as `job.mesh` names them."""
    rank = dist.get_rank()
    return {
        # Only its members make a group, so that nobody waits for those beside it.
        axis: dist.new_group(job.mesh.group(rank, axis), use_local_synchronization=True)
        for axis in ("tp", "dp", "pp")
    }


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors by the mesh that they lie on; those that are no DTensors are together too."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients of a stage to a common norm of at most `max_norm`; return the norm before.

    torch's own refuses gradients on different meshes, as FSDP makes them of layers that tp split and of layers that
    it did not. The squares of each mesh's norm add up.
    """
    grads = group_by_mesh([p.grad for p in parameters if p.grad is not None])
    square = sum(float(to_full_tensor(nn.utils.get_total_norm(group))) ** 2 for group in grads)
    norm = square**0.5
    if norm > max_norm:
        for grad in [grad for group in grads for grad in group]:
            grad.mul_(max_norm / norm)
    return norm


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without its layout: gathered from all ranks that share it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
DIMS = ("pp", "dp", "tp")  # slowest first, as a DeviceMesh wants them


class TorchJob:
    """One rank's share of a miniature."""

    def __init__(self, job: Miniature, model: Transformer) -> None:
        self.job = job
        self.mesh = init_device_mesh("cpu", (job.pp, job.dp, job.tp), mesh_dim_names=DIMS)
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
        groups = [{"params": own} for own in group_by_mesh(held.parameters())]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)

    def backward(self, tokens_BT: Tensor) -> Tensor | None:
        """Run forward and backward, average gradients over dp; return the mean loss where the last stage is."""
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
        """Return the unsharded gradients of this rank's stage, by name; every rank must call it."""
        return {strip_wrappers(name): to_full_tensor(p.grad) for name, p in self.held.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return the unsharded weights of this rank's stage, by name; every rank must call it."""
        return {strip_wrappers(name): to_full_tensor(p) for name, p in self.held.named_parameters()}


def examples(job: Miniature, stage: int) -> tuple[Tensor, Tensor]:
    """Return an input and an output of a stage, of the right shapes."""
    dtype, size = getattr(torch, job.dtype), (job.micro_batch, job.seq)
    stream = torch.empty(*size, job.config.hidden, dtype=dtype, requires_grad=True)
    logits = torch.empty(*size, job.config.vocab, dtype=dtype, requires_grad=True)
    tokens = torch.empty(size, dtype=torch.int64)
    return stream if stage else tokens, logits if stage == job.pp - 1 else stream


def tp_plan(model: Transformer | Stage) -> dict[str, object]:
    """Return a plan for `parallelize_module`: columns into a half, a row out of it, the vocabulary at both ends."""
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
    """Put a wrapper around every block."""
    for name, block in list(model.blocks.named_children()):
        wrapped = wrapper(block)
        if isinstance(model.blocks, nn.ModuleDict):
            model.blocks[name] = wrapped
        else:
            model.blocks[int(name)] = wrapped


def shard_blocks(model: Transformer | Stage, mesh: DeviceMesh, *, reshard: bool = True) -> None:
    """Shard every block with FSDP2, then what is left of the model."""
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def strip_wrappers(name: str) -> str:
    """Return the name that a parameter has without wrappers."""
    for prefix in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(prefix, "")
    return name


def _blocks(model: Transformer | Stage) -> list[nn.Module]:
    blocks = model.blocks
    return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
