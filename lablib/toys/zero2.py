"""ZeRO stages 1 and 2: every rank keeps all weights, and updates only its shard of them.

DDP's all-reduce is a reduce-scatter and an all-gather. Put the optimizer between the two:

    reduce-scatter of gradients  ->  each rank updates its shard  ->  all-gather of weights

The traffic stays DDP's, 2ψ(N-1)/N, and no two ranks hold the same optimizer state (stage 1) or gradient (stage 2).

Chapter: book/05_zero.md. Paper: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), sections 5.1, 5.2 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.toys.collective_names import all_gather
from lablib.toys.flat_shards import FlatShards, group_flat


class ZeRO1(nn.Module):
    """Shard the optimizer: gradients add up on every rank, and are reduce-scattered once a step.

    To accumulate, call `backward` several times before `step`, each time with its part of the mean loss.
    A parameter that no rank used has a zero gradient, where one process leaves it None.

    Args:
        module: Any module with dense gradients, the same on every rank. Rank 0's weights and buffers go to all;
            later the buffers (running statistics) are each rank's own.
        optimizer: Makes an optimizer from a list of flat shards. It must treat every value alike: SGD, Adam and
            AdamW do; LAMB, Adafactor and Muon look at whole tensors and don't.
        group: The process group of the replicas; None is all ranks.
        master: Dtype of the optimizer's copy of its shard: torch.float32 for a module in bf16. None for no copy.

    Raises:
        ValueError: If this rank is not in the group, nothing is to be trained, or the module makes sparse gradients.
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        master: torch.dtype | None = None,
    ):
        super().__init__()
        if dist.get_rank(group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group; wrap only on the group's ranks")
        if sparse := [name for name, m in module.named_modules() if getattr(m, "sparse", False)]:
            raise ValueError(f"{', '.join(sparse)}: gradients would be sparse; build with sparse=False")
        if not any(p.requires_grad and p.numel() for p in module.parameters()):
            raise ValueError("every parameter is frozen; ZeRO needs at least one with requires_grad=True")
        self.module, self.group, self.master = module, group, master
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                message = tensor.contiguous()
                dist.broadcast(message, group=group, group_src=0)
                tensor.copy_(message)
            self.flats = self._make_flats()
        self.trained = [flat for flat in self.flats if flat.trained]
        self.home = {p: flat for flat in self.trained for p in flat.params}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self._on_gradient)
        self.optimizer = optimizer([flat.updated for flat in self.trained])
        self._in_backward, self._any_backward = False, False
        self._on_the_wire: list[FlatShards] = []

    def _make_flats(self) -> list[FlatShards]:
        # Frozen parameters are never updated: nothing of them to shard.
        return group_flat([p for p in self.module.parameters() if p.requires_grad], self.group, self.master)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run backward; every rank must call it equally often.

        Args:
            loss: The mean over this rank's samples. The gradient becomes the mean over the ranks.
        """
        self._in_backward = self._any_backward = True
        try:
            loss.backward()
            with torch.no_grad():
                self._after_backward()
        finally:
            self._in_backward = False

    @torch.no_grad()
    def _on_gradient(self, p: nn.Parameter) -> None:
        if not self._in_backward:
            raise RuntimeError("call model.backward(loss), not loss.backward()")
        self.home[p].put(p)
        self._after_gradient()

    def _after_gradient(self) -> None:
        pass

    def _after_backward(self) -> None:
        pass

    def _reduce(self, flats: Iterable[FlatShards]) -> None:
        """Send gradients; never more than one message in flight, so that few are in memory."""
        for flat in flats:
            flat.reduce()
            self._on_the_wire.append(flat)
            while len(self._on_the_wire) > 1:
                self._on_the_wire.pop(0).finish()

    def _finish(self) -> None:
        while self._on_the_wire:
            self._on_the_wire.pop(0).finish()

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Update this rank's shard and let every rank have the weights; gradients are zero after it.

        Args:
            max_norm: Scale the gradient down to this global norm, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before clipping, if `max_norm` is given.
        """
        self._reduce_rest()
        self._finish()
        norm = None if max_norm is None else self._clip(max_norm)
        for flat in self.trained:
            flat.updated.grad = None if flat.grad is None else flat.grad.to(flat.updated.dtype)
        self.optimizer.step()
        for flat in self.trained:
            flat.grad = flat.updated.grad = None
        self._any_backward = False
        self._publish()
        return norm

    def _reduce_rest(self) -> None:
        if self._any_backward:
            self._reduce(self.trained)

    def _clip(self, max_norm: float) -> Tensor:
        """Every value is on one rank only, so squares add up over the ranks: |g|² = Σ_r |g_r|²."""
        norms = [torch.linalg.vector_norm(flat.grad) for flat in self.trained if flat.grad is not None]
        zero = torch.zeros((), dtype=torch.float64, device=self.trained[0].shard.device)
        square = sum((norm.double() ** 2 for norm in norms), start=zero)
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        for flat in self.trained:
            if flat.grad is not None:
                flat.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1).to(flat.grad.dtype))
        return norm

    def _publish(self) -> None:
        """Bring the updated shards to all ranks."""
        for flat in self.trained:
            if flat.master is not None:
                flat.shard.copy_(flat.updated)
            flat.refill()
        for flat in self.trained:
            flat.wait()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the unsharded module, with its own names, on every rank."""
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state dict of the unsharded module, the same on every rank.

        Args:
            state: As from `full_state_dict`.
        """
        self.module.load_state_dict(state)
        self._take_shards()

    def _take_shards(self) -> None:
        for flat in self.flats:
            if flat.master is not None:
                flat.updated.copy_(flat.shard)

    @torch.no_grad()
    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by parameter name, gathered from all ranks; a tied one has its first name."""
        names = {p: name for name, p in self.module.named_parameters()}
        states: dict[str, dict[str, Tensor]] = {}
        for flat in self.trained:
            for key, value in self.optimizer.state.get(flat.updated, {}).items():
                whole = None
                if isinstance(value, Tensor) and value.shape == flat.updated.shape:
                    whole = value.new_empty(flat.world_size * flat.width)
                    all_gather(whole, value, group=self.group)
                parts = [value] * len(flat.params) if whole is None else flat.split(whole)
                for p, part in zip(flat.params, parts, strict=True):
                    states.setdefault(names[p], {})[key] = part.clone() if isinstance(part, Tensor) else part
        return states


class ZeRO2(ZeRO1):
    """Shard gradients too: reduce-scatter each bucket from within backward, and keep only this rank's piece.

    Accumulating costs a reduce-scatter for every backward, where stage 1 needs one for every step.

    Args:
        bucket_bytes: A bucket is sent when it holds at least so many bytes of gradients.
    """

    stage = 2

    def __init__(self, *args: object, bucket_bytes: int = 25 * 2**20, **options: object):
        self.__dict__["bucket_bytes"] = bucket_bytes  # needed before nn.Module is ready
        super().__init__(*args, **options)
        self._sent = 0

    def _make_flats(self) -> list[FlatShards]:
        flats, filling = [], []
        for p in reversed([p for p in self.module.parameters() if p.requires_grad]):  # backward's order
            filling.append(p)
            if sum(q.nbytes for q in filling) >= self.bucket_bytes:
                flats += group_flat(filling, self.group, self.master)
                filling = []
        return flats + group_flat(filling, self.group, self.master)

    def _after_gradient(self) -> None:
        # Strictly in order, so that ranks agree on it whatever their backward used.
        while self._sent < len(self.trained) and self.trained[self._sent].complete:
            self._send_next()

    def _send_next(self) -> None:
        self._reduce([self.trained[self._sent]])
        self._sent += 1

    def _after_backward(self) -> None:
        while self._sent < len(self.trained):
            self._send_next()
        self._finish()
        self._sent = 0

    def _reduce_rest(self) -> None:
        pass
