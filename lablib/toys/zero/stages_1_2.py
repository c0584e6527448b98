"""ZeRO stages 1 and 2: every rank keeps all weights, and updates only its shard of them.

DDP's all-reduce is a reduce-scatter and an all-gather. Put the optimizer between the two:

    reduce-scatter of gradients  ->  each rank updates its shard  ->  all-gather of weights

Stage 1 has the full gradient on every rank until its step. In stage 2 a bucket of gradients leaves as soon as backward
has filled it, and what comes back is this rank's piece.

Paper: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), sections 5.1, 5.2 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.toys.data_parallel import broadcast_tensors, check_replica
from lablib.toys.zero.flat_shards import FlatShards, group_flat


class ZeRO1(nn.Module):
    """Stage 1, shard the optimizer: gradients add up on every rank, and are reduce-scattered once a step.

    To accumulate, call `backward` several times before `step`, each time with its part of the mean loss.
    A parameter that no rank used has a zero gradient, where one process leaves it None.

    Args:
        module: Any module with dense gradients, the same on every rank; convert and freeze it first, then wrap. Rank
            0's weights and buffers go to all; later the buffers (running statistics) are each rank's own.
        optimizer: Makes an optimizer from a list of flat shards. It must treat every value alike: SGD, Adam and
            AdamW do; LAMB, Adafactor and Muon look at whole tensors and don't. So one weight decay is everyone's: a
            shard does not know which of its values are a norm's.
        group: The process group of the replicas; None is all ranks.
        master: Dtype of the optimizer's copy of its shard: torch.float32 for a module in bf16. None for no copy.
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
        self._wrap(module, group, master)
        # Frozen parameters are never updated: nothing of them to shard.
        self._shard(group_flat([p for p in module.parameters() if p.requires_grad], group, master), optimizer)

    def _wrap(self, module: nn.Module, group: dist.ProcessGroup | None, master: torch.dtype | None) -> None:
        """Take a module over, with rank 0's weights."""
        super().__init__()
        check_replica(module, group)
        if not (trained := _trained(module)):
            raise ValueError("every parameter is frozen; ZeRO needs at least one with requires_grad=True")
        for p in trained if master else ():
            if torch.promote_types(p.dtype, master) != master:
                raise ValueError(f"master={master} cannot hold {p.dtype} weights; use torch.float32 or None")
        self.module, self.group, self.master = module, group, master
        with torch.no_grad():
            broadcast_tensors([*module.parameters(), *module.buffers()], group)

    def _shard(self, flats: list[FlatShards], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Make the optimizer of the shards, and listen to the gradients."""
        self.flats = flats
        self.trained = [flat for flat in self.flats if flat.trained]
        self.flat_of = {p: flat for flat in self.trained for p in flat.params}
        for p in self.flat_of:
            p.register_post_accumulate_grad_hook(self._on_gradient)
        self.optimizer = optimizer([flat.sharded_param for flat in self.trained])
        if {p for g in self.optimizer.param_groups for p in g["params"]} != {f.sharded_param for f in self.trained}:
            raise ValueError("the optimizer must have all flat shards; give it the whole list")
        self.optimizer.zero_grad = self.zero_grad  # the gradients are here, not where it would look for them
        self.optimizer.register_step_pre_hook(self._before_step)
        self._in_backward, self._any_backward = False, False
        self._in_flight: list[FlatShards] = []

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module."""
        if _trained(self.module) != self.flat_of.keys() or not all(flat.owns_params for flat in self.flats):
            raise RuntimeError("the module was changed after wrapping; convert or freeze it first, then wrap")
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Refuse: whoever asks wants gradients, to clip or to zero them, and the parameters have none."""
        raise RuntimeError(
            "the gradients of a ZeRO model are in flat shards: clip with model.step(max_norm=...), forget with "
            "model.zero_grad(), read weights with model.full_state_dict(), count with model.module.parameters()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what backward has added since the last step; every rank must call it."""
        self._wait_for_reduce_scatters()
        for flat in self.trained:
            flat.zero_grad()
        self._any_backward = False

    def backward(self, loss: Tensor) -> None:
        """Run backward; every rank must call it equally often.

        Args:
            loss: The mean over this rank's samples. The gradient becomes the mean over the ranks.
        """
        self._in_backward = self._any_backward = True
        try:
            loss.backward()
            with torch.no_grad():
                for p in self.flat_of:
                    if p.grad is not None:  # made without autograd, as a zero-bubble pipeline's W does
                        self._accumulate_grad(p)
        finally:
            self._in_backward = False

    @torch.no_grad()
    def _on_gradient(self, p: nn.Parameter) -> None:
        if not self._in_backward:
            raise RuntimeError("call model.backward(loss), not loss.backward()")
        if p.grad is not None:  # None: backward came by, and had nothing for it
            self._accumulate_grad(p)

    def _accumulate_grad(self, p: nn.Parameter) -> None:
        self.flat_of[p].accumulate_grad(p)

    def _reduce_scatter(self, flats: Iterable[FlatShards]) -> None:
        """Send gradients; never more than one message in flight, so that few are in memory."""
        for flat in flats:
            flat.reduce_scatter_grads()
            self._in_flight.append(flat)
            while len(self._in_flight) > 1:
                self._in_flight.pop(0).wait_for_reduce_scatter()

    def _wait_for_reduce_scatters(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).wait_for_reduce_scatter()

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Update this rank's shard and let every rank have the weights; gradients are zero after it.

        Args:
            max_norm: Scale the gradient down to this global norm, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before clipping, if `max_norm` is given.
        """
        if self._any_backward:
            self._reduce_scatter(self.trained)
        norm = self._update_shards(max_norm)
        self._gather_weights()
        return norm

    def _update_shards(self, max_norm: float | None) -> Tensor | None:
        """Let the optimizer step on this rank's shards; return the norm of the gradient, if it is clipped."""
        self._wait_for_reduce_scatters()
        norm = None if max_norm is None else self._clip(max_norm)
        for flat in self.trained:
            flat.sharded_param.grad = (
                None if flat.sharded_grad is None else flat.sharded_grad.to(flat.sharded_param.dtype)
            )
            flat.refresh_master()
        self.optimizer.step()
        self.zero_grad()
        for flat in self.trained:
            if flat.master_dtype is not None:
                flat.shard.copy_(flat.sharded_param)
        return norm

    def _gather_weights(self) -> None:
        """Bring the updated shards to all ranks."""
        for flat in self.trained:
            flat.start_all_gather()
        for flat in self.trained:
            flat.wait_for_unshard()

    def _before_step(self, *_: object) -> None:
        if self._any_backward and all(flat.sharded_param.grad is None for flat in self.trained):
            raise RuntimeError("call model.step(), not optimizer.step(), which has no gradients to use")

    def _clip(self, max_norm: float) -> Tensor:
        """Every value is on one rank only, so squares add up over the ranks: |g|² = Σ_r |g_r|²."""
        norms = [torch.linalg.vector_norm(flat.sharded_grad) for flat in self.trained if flat.sharded_grad is not None]
        zero = torch.zeros((), dtype=torch.float64, device=self.trained[0].shard.device)
        square = sum((norm.double() ** 2 for norm in norms), start=zero)
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        for flat in self.trained:
            if flat.sharded_grad is not None:
                flat.sharded_grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1).to(flat.sharded_grad.dtype))
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the unsharded module, with its own names, on every rank."""
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


class ZeRO2(ZeRO1):
    """Stage 2, shard gradients too: reduce-scatter each bucket from within backward, and keep only this rank's piece.

    Accumulating costs a reduce-scatter for every backward, where stage 1 needs one for every step.

    Args:
        bucket_bytes: A bucket is sent when it holds at least so many bytes of gradients.
    """

    stage = 2

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        master: torch.dtype | None = None,
        bucket_bytes: int = 25 * 2**20,
    ):
        self._wrap(module, group, master)
        buckets, filling = [], []
        for p in reversed([p for p in module.parameters() if p.requires_grad]):  # backward's order
            filling.append(p)
            if sum(q.nbytes for q in filling) >= bucket_bytes:
                buckets += group_flat(filling, group, master)
                filling = []
        self._shard(buckets + group_flat(filling, group, master), optimizer)
        self._sent = 0  # buckets that have left in this backward

    def _accumulate_grad(self, p: nn.Parameter) -> None:
        if self.flat_of[p] in self.trained[: self._sent]:
            raise RuntimeError(
                "a weight got a second gradient after its bucket had left; use checkpoint(..., use_reentrant=False)"
            )
        super()._accumulate_grad(p)
        # Strictly in order, so that ranks agree on it whatever their backward used.
        while self._sent < len(self.trained) and self.trained[self._sent].grads_ready:
            self._send_next()

    def _send_next(self) -> None:
        self._reduce_scatter([self.trained[self._sent]])
        self._sent += 1

    def backward(self, loss: Tensor) -> None:
        """Run backward, and send the buckets that it has not filled."""
        super().backward(loss)
        with torch.no_grad():
            while self._sent < len(self.trained):
                self._send_next()
            self._wait_for_reduce_scatters()
        self._sent = 0

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """As in stage 1, but the gradients have left already."""
        norm = self._update_shards(max_norm)
        self._gather_weights()
        return norm


def _trained(module: nn.Module) -> set[nn.Parameter]:
    return {p for p in module.parameters() if p.requires_grad and p.numel()}
