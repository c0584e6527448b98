"""What every case of `composition_order` starts from: a small model, its tokens, and what one process makes of them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lablib.launch.composition import mean_loss
from lablib.launch.composition_torch import shard_blocks, tp_plan
from lablib.launch.recorder import record_comms
from lablib.toys.transformer import Transformer, tiny_config

RATE = 0.1  # of plain SGD


class Bench:
    """The model and the tokens that every case starts from, and what is right for them."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        config = tiny_config("gpt2", num_layers=2, hidden=16, vocab=32, max_positions=16, tied=False)
        self.base = Transformer(config)
        self.all_tokens = tokens = torch.randint(0, config.vocab, (4, 9))
        self.tokens = tokens.chunk(2)[self.mesh["dp"].get_local_rank()]
        alone = self.model()
        optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
        loss = mean_loss(alone(tokens[:, :-1]), tokens)
        loss.backward()
        self.before = loss.item()
        self.norm = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
        optimizer.step()
        with torch.no_grad():
            self.after = mean_loss(alone(tokens[:, :-1]), tokens).item()
        self.blocks = sum(p.numel() for p in alone.blocks.parameters())

    def model(self) -> Transformer:
        """Return a fresh copy of the model."""
        return copy.deepcopy(self.base)

    def loss(self, model: nn.Module, *, replicas: bool = True) -> Tensor:
        """Return the loss of this replica's tokens; of all of them where there are no replicas."""
        tokens = self.tokens if replicas else self.all_tokens
        return mean_loss(model(tokens[:, :-1]), tokens)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        replicas: bool = True,
    ) -> tuple[float, dict[str, int]]:
        """Take one step; return the loss of all tokens after it, and the calls of forward and backward."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
        with record_comms() as log:
            self.loss(model, replicas=replicas).backward()
        optimizer.step()
        with torch.no_grad():
            loss = self.loss(model, replicas=replicas).detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size(), dict(log.calls)

    def local(self, model: nn.Module) -> int:
        """Return the parameters of the blocks that this rank holds."""
        held = (p for name, p in model.named_parameters() if "blocks." in name)
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in held)

    def tp(self, model: nn.Module) -> nn.Module:
        """Split the layers."""
        return parallelize_module(model, self.mesh["tp"], tp_plan(self.base))

    def fsdp(self, model: Transformer) -> Transformer:
        """Shard the blocks, then the rest."""
        shard_blocks(model, self.mesh["dp"])
        return model

    def ddp(self, model: nn.Module) -> DistributedDataParallel:
        """Make replicas."""
        return DistributedDataParallel(model, process_group=self.mesh["dp"].get_group())
