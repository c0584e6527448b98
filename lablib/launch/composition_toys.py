"""A miniature built from the toys: stages of a tensor-parallel model, with DDP or ZeRO around them.

    groups      dist.new_group of every group that `job.mesh` names
    tp          tensor_parallel.parallelize(model, groups["tp"])
    pp          split_stages(model, pp), run by a PipelineExecutor over groups["pp"]
    dp          BucketedDDP, ZeRO1 (with stages) or ZeRO3 (without) over groups["dp"]

The toys put one inside the other from tp outwards. The layers are split before they are dealt to stages, because the
tensor-parallel toy takes a whole model; PyTorch's order, stages first, never makes what a rank will drop.

ZeRO-3 would gather a stage for every micro-batch, forward and backward. ZeRO-1 sends once a step; it is what Llama 3
and DeepSeek-V3 put beside their stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.miniature import Miniature
from lablib.launch.composition import ADAMW, mean_loss
from lablib.toys.collective_names import all_gather
from lablib.toys.ddp import BucketedDDP
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.tensor_parallel import ParallelTransformer, parallelize
from lablib.toys.transformer import Transformer
from lablib.toys.vocab_parallel import vocab_parallel_cross_entropy
from lablib.toys.zero import ZeRO1, ZeRO3


class LossModule(nn.Module):
    """A model whose forward returns the loss: what wraps it then needs to know nothing of tokens.

    Args:
        model: The model, whole or split.
        loss: Of its output and the windows.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of the windows."""
        return self.loss(self.model(tokens_BT[:, :-1]), tokens_BT)


class _Pipelined:
    """What `ZeRO1.backward` calls backward on: a step of the pipeline, whose many backwards it must see."""

    def __init__(self, pipeline: PipelineExecutor, microbatches: list[Tensor]) -> None:
        self.pipeline, self.microbatches = pipeline, microbatches
        self.loss: Tensor | None = None

    def backward(self) -> None:
        self.loss = self.pipeline.step(self.microbatches)


class ToyJob:
    """One rank's share of a miniature.

    Args:
        job: The miniature.
        model: The whole model, the same on every rank.
    """

    def __init__(self, job: Miniature, model: Transformer) -> None:
        self.job = job
        self.groups = make_groups(job)
        names = {id(p): name for name, p in model.named_parameters()}
        self.split: ParallelTransformer | None = None
        if job.tp > 1:
            model = self.split = parallelize(model, self.groups["tp"])
            model.dropout = nn.Identity()  # what a stage takes from a whole model
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
        """Run forward and backward and average gradients over dp.

        Returns:
            The mean loss of the replica where the last stage is, else None.
        """
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
        """Return whole gradients of what this rank's stage has, by name; every rank must call it."""
        if not self.zero:
            return self._whole({name: p.grad for name, p in self.names.items()})
        for flat in self.zero.trained:  # stage 1 sends them in its step only
            if flat.grad is None:
                flat.reduce()
                flat.finish()
        pieces = {}
        places = {id(p): name for name, p in self.names.items()}
        for flat in self.zero.trained:
            whole = torch.empty(flat.width * flat.world_size, dtype=flat.grad.dtype)
            all_gather(whole, flat.grad, group=flat.group)
            parts = zip(flat.params, flat.split(whole), strict=True)
            pieces |= {places[id(p)]: part.clone() for p, part in parts}
        return self._whole({name: pieces[name] for name in self.names})

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights of what this rank's stage has, by name; every rank must call it."""
        if not isinstance(self.zero, ZeRO3):
            return self._whole({name: p.detach() for name, p in self.names.items()})
        state = self.zero.full_state_dict()
        return self._whole({name: state[f"model.{name}"] for name in self.names})

    def _whole(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.split is None:
            return {name: piece.clone() for name, piece in pieces.items()}
        return {name: self.split.gather(name, piece) for name, piece in pieces.items()}

    def _loss(self, logits: Tensor, tokens_BT: Tensor) -> Tensor:
        if self.split is None:
            return mean_loss(logits, tokens_BT)
        return vocab_parallel_cross_entropy(
            logits, tokens_BT[:, 1:], self.split.first, self.groups["tp"]
        ).mean()


def make_groups(job: Miniature) -> dict[str, dist.ProcessGroup]:
    """Return this rank's process group along each of tp, dp and pp, as `job.mesh` names them."""
    rank = dist.get_rank()
    return {
        # Only its members make a group, so that nobody waits for those beside it.
        axis: dist.new_group(job.mesh.group(rank, axis), use_local_synchronization=True)
        for axis in ("tp", "dp", "pp")
    }
