"""Three failures of 16-bit training, reproduced: a small transformer on real text, each run beside its fp32 twin.

| function | what goes wrong | what cures it |
|---|---|---|
| `underflow` | fp16 has no numbers below 2^-24: gradients become zero | loss scaling |
| `overflow` | fp16 has none above 65504: scaled gradients become infinite | a scale that gives way, and skipped steps |
| `stall` | bf16 has 8 significant bits: weights do not feel small updates | a master copy, or stochastic rounding |

All variants of a failure start from the same weights and read the same batches, so that their curves differ by
precision alone. Each failure takes a second or two on one CPU core, and the same seed gives the same curves.
`Histogram` says where the magnitudes of gradients lie, power of two by power of two.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lablib.toys.precision import LossScaler, MasterWeights, RoundedWeights
from lablib.toys.text import batches, tokens
from lablib.toys.transformer import Transformer, tiny_config

BATCH, SEQ = 4, 32


@dataclass(frozen=True)
class Histogram:
    """Where the magnitudes of a tensor lie."""

    exponents: Counter[int]  # how many values have `floor(log2 |x|)` equal to the key
    zeros: int  # how many are zero
    odd: int = 0  # how many are infinite or NaN

    @property
    def count(self) -> int:
        """All values."""
        return self.exponents.total() + self.zeros + self.odd

    @property
    def zero_share(self) -> float:
        """Share of the values that are zero."""
        return self.zeros / self.count

    def below(self, exponent: int) -> int:
        """Return how many values are smaller than `2^exponent`, zeros not counted."""
        return sum(count for power, count in self.exponents.items() if power < exponent)


def histogram(x: Tensor) -> Histogram:
    """Return the histogram of a tensor's magnitudes, one bin for each power of two."""
    full = x.detach().double().flatten()
    finite = full[full.isfinite()]
    exponents = torch.frexp(finite[finite != 0]).exponent - 1
    powers, counts = exponents.unique(return_counts=True)
    return Histogram(
        Counter(dict(zip(powers.tolist(), counts.tolist(), strict=True))),
        int((finite == 0).sum()),
        full.numel() - finite.numel(),
    )


def gradient_histograms(model: nn.Module) -> dict[str, Histogram]:
    """Return a histogram of every gradient that a model has, by the name of its parameter."""
    return {name: histogram(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@dataclass
class Training:
    """One run."""

    losses: list[float] = field(default_factory=list)  # loss of every step, before its update
    # histograms of the first step's gradients as backward left them, in the dtype of the run
    gradients: dict[str, Histogram] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)  # loss scale of every step
    # steps whose gradients were infinite or NaN, and which changed nothing
    skipped: list[int] = field(default_factory=list)
    # share of each parameter's values that are bit for bit what they were at the start
    frozen: dict[str, float] = field(default_factory=dict)

    def mean_loss(self, last: int = 10) -> float:
        """Return the mean loss of the last steps."""
        return math.fsum(self.losses[-last:]) / len(self.losses[-last:])


def small_model(seed: int = 0) -> Transformer:
    """Return the model of this rung's runs: GPT-2's kind, 2 layers of width 32, bytes as tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(tiny_config("gpt2", num_layers=2, hidden=32, max_positions=SEQ))


@functools.cache
def _text() -> Tensor:
    return tokens()


def train_watched(
    weights: MasterWeights,
    *,
    steps: int,
    lr: float,
    scaler: LossScaler | None = None,
    check: bool = True,
    accumulate: int = 1,
    repeat: bool = False,
    seed: int = 1,
) -> Training:
    """Train a model whose gradients have the dtype of its working copy, and watch it.

    Args:
        check: Whether a step with an infinite or NaN gradient is skipped; without it the scale is fixed.
        accumulate: Micro-batches of a step, each of which backward divides by their number. One is computed, and its
            fp32 gradient taken this many times: the magnitudes that backward meets are those of the large batch.
        repeat: Whether every step reads the same batch, so that the loss falls without noise.
    """
    run, scaler = Training(), scaler or LossScaler(1.0, interval=steps + 1)
    start = [p.detach().clone() for p in weights.model.parameters()]
    optimizer = torch.optim.AdamW(weights.master.parameters(), lr=lr, weight_decay=0.0)
    stream = batches(_text(), batch=BATCH, seq=SEQ, seed=seed)
    windows = next(stream)
    for step in range(steps):
        loss = weights.model.loss(windows)
        run.losses.append(loss.item())
        run.scales.append(scaler.value)
        scaler.scale(loss / accumulate).backward()
        if step == 0:
            run.gradients = gradient_histograms(weights.model)
        weights.take_gradients()
        if scaler.unscale(optimizer) and check:
            run.skipped.append(step)
        for parameter in weights.master.parameters():
            parameter.grad.mul_(accumulate)
        if check:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
            scaler.overflows.clear()
        weights.give_weights()
        windows = windows if repeat else next(stream)
    named = zip(weights.model.named_parameters(), start, strict=True)
    run.frozen = {name: (now == before).double().mean().item() for (name, now), before in named}
    return run


def underflow(*, steps: int = 30, lr: float = 3e-3, accumulate: int = 2**13) -> dict[str, Training]:
    """Train with gradients that are too small for fp16: in fp32, in fp16, and in fp16 with loss scaling.

    A batch of a million tokens makes gradients small: the loss is a mean, so each of 8192 micro-batches of 128 tokens
    is divided by 8192. AdamW does not mind, as it divides by the gradient's own size; fp16 does.
    """
    settings = {"steps": steps, "lr": lr, "accumulate": accumulate}
    return {
        "fp32": train_watched(MasterWeights(small_model(), torch.float32), **settings),
        "fp16": train_watched(MasterWeights(small_model(), torch.float16), **settings),
        "fp16, loss scaling": train_watched(
            MasterWeights(small_model(), torch.float16), scaler=LossScaler(), **settings
        ),
    }


def overflow(*, steps: int = 30, lr: float = 3e-3, scale: float = 2.0**24, interval: int = 8) -> dict[str, Training]:
    """Train with a loss scale that is too large: in fp32, in fp16 with a fixed scale, and with a dynamic one."""
    settings = {"steps": steps, "lr": lr}
    return {
        "fp32": train_watched(MasterWeights(small_model(), torch.float32), **settings),
        "fp16, fixed scale": train_watched(
            MasterWeights(small_model(), torch.float16), scaler=LossScaler(scale), check=False, **settings
        ),
        "fp16, dynamic scale": train_watched(
            MasterWeights(small_model(), torch.float16), scaler=LossScaler(scale, interval=interval), **settings
        ),
    }


def stall(
    *, steps: int = 40, lr: float = 3e-5, warm_up: int = 80, trained: nn.Module | None = None
) -> dict[str, Training]:
    """Go on training at a small learning rate: in fp32, in bf16 alone, and in bf16 with two cures."""
    if trained is None:
        before = MasterWeights(small_model(), torch.float32)
        train_watched(before, steps=warm_up, lr=1e-2)
        trained = before.master
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Callable[[nn.Module], MasterWeights]] = {
        "fp32": lambda model: MasterWeights(model, torch.float32),
        "bf16": lambda model: RoundedWeights(model, stochastic=False),
        "bf16, stochastic rounding": lambda model: RoundedWeights(model, stochastic=True, generator=generator),
        "bf16, master weights": lambda model: MasterWeights(model, torch.bfloat16),
    }
    return {
        name: train_watched(make(copy.deepcopy(trained)), steps=steps, lr=lr, repeat=True, seed=2)
        for name, make in made.items()
    }
