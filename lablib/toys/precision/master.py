"""Training in 16 bits: a loss scaler, a master copy, and rounding by chance.

fp16 has too little range: `LossScaler` multiplies the loss by S, and divides the gradients by S in fp32. bf16 has too
little precision for small updates: either the sum lives in fp32 (`MasterWeights`), or it is rounded by chance, and right
on average (`stochastic_round_bf16`).

Papers: Micikevicius et al. 2017 (arXiv 1710.03740); Gupta et al. 2015 (arXiv 1502.02551), stochastic rounding.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class LossScaler:
    """Dynamic loss scaling, as torch.amp.GradScaler does it: shrink after an overflow, grow after enough good steps.

    Args:
        growth: What S is multiplied by after `interval` good steps in a row, more than 1.
        backoff: What it is multiplied by after a step with an infinite or NaN gradient, between 0 and 1.
        interval: Good steps in a row before S grows.
    """

    def __init__(
        self, scale: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        if not (scale > 0 and interval >= 1 and growth > 1 > backoff > 0):
            settings = f"scale={scale} > 0, interval={interval} >= 1, growth={growth} > 1 > backoff={backoff} > 0"
            raise ValueError(f"a loss scaler needs {settings}")
        self.value, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good_steps = 0
        self.overflows: dict[torch.optim.Optimizer, bool] = {}  # of those whose gradients are unscaled now

    def scale(self, loss: Tensor) -> Tensor:
        """Return `S * loss`: call backward on it."""
        return loss * self.value

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by S, in place, and return whether one is infinite or NaN. Clip after it."""
        if optimizer in self.overflows:
            raise RuntimeError("gradients are unscaled already: unscale once in a step, before clipping")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("fp16 gradients would underflow again: keep master weights in fp32")
        # A list: every gradient must be unscaled, also those that come after a bad one.
        finite = [gradient.mul_(1 / self.value).isfinite().all() for gradient in gradients]
        self.overflows[optimizer] = not all(finite)
        return self.overflows[optimizer]

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step if all gradients are finite, unscaled before if need be; return whether it did."""
        if not (self.overflows[optimizer] if optimizer in self.overflows else self.unscale(optimizer)):
            optimizer.step()
        return not self.overflows[optimizer]

    def update(self) -> None:
        """Choose the next S; call it once, at the end of every step, after all optimizers."""
        overflow = any(self.overflows.values())
        self.good_steps = 0 if overflow else self.good_steps + 1
        factor = self.backoff if overflow else 1.0
        if self.good_steps == self.interval:
            factor, self.good_steps = self.growth, 0
        scaled = torch.tensor(self.value * factor).item()  # an fp32 number, as what it multiplies
        self.value = scaled if scaled < float("inf") else self.value
        self.overflows = {}


class MasterWeights:
    """An fp32 copy of the weights, which the optimizer updates; the model computes in 16 bits with a rounded copy.

    Args:
        model: An fp32 model; it becomes the master copy.
        dtype: Of the working copy, `self.model`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.master, self.model = model, copy.deepcopy(model).to(dtype)

    def take_gradients(self) -> None:
        """Move the gradients from the working copy to the master copy, in fp32."""
        for master, working in zip(self.master.parameters(), self.model.parameters(), strict=True):
            master.grad = None if working.grad is None else working.grad.float()
            working.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the master copy into the working copy: call it after every step of the optimizer."""
        for master, working in zip(self.master.parameters(), self.model.parameters(), strict=True):
            working.copy_(master)


def stochastic_round_bf16(x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Return fp32 numbers in bf16, each rounded up or down by chance, so that the mean is the number itself.

    bf16 is the upper half of the bits of fp32. A number that lies a share q of the way from one bf16 value to the
    next has q * 2^16 in its lower half. Adding a random 16-bit number carries into the upper half with chance q.

        P(up) = (x - below) / (above - below)        E[round(x)] = x
    """
    if x.dtype != torch.float32:
        raise ValueError(f"stochastic_round_bf16 takes float32, not {x.dtype}: it reads the bits")
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = (x.detach().contiguous().view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


class RoundedWeights(MasterWeights):
    """bf16 weights without a master copy: the optimizer computes in fp32, and only the rounded result survives.

    The fp32 values live from `take_gradients` to `give_weights`. A real implementation makes them for one tensor at
    a time, so they cost no memory; here they are kept to be short.

    Args:
        model: An fp32 model: place for the fp32 values, for the optimizer to update.
        stochastic: Round by chance; else to nearest, which loses every update below half a gap.
    """

    def __init__(self, model: nn.Module, *, stochastic: bool, generator: torch.Generator | None = None) -> None:
        super().__init__(model, torch.bfloat16)
        self.stochastic, self.generator = stochastic, generator

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients, and forget what the fp32 values had beyond bf16."""
        super().take_gradients()
        for full, working in zip(self.master.parameters(), self.model.parameters(), strict=True):
            full.copy_(working)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the updated values into the bf16 weights."""
        if not self.stochastic:
            return super().give_weights()
        for full, working in zip(self.master.parameters(), self.model.parameters(), strict=True):
            working.copy_(stochastic_round_bf16(full, generator=self.generator))
