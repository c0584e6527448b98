"""Where 16 bits save memory and where not: states and activations, counted in PyTorch beside the calculators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lablib.calc.autocast_memory import autocast_activations
from lablib.calc.memory import training_memory
from lablib.calc.models import ModelConfig
from lablib.launch.measure import measure_states, saved_activations
from lablib.toys.precision import MasterWeights
from lablib.toys.transformer import Transformer

RECIPES = ("fp32", "mixed-bf16", "autocast-bf16")


@dataclass(frozen=True)
class PrecisionMemory:
    """Bytes of one recipe.

    Attributes:
        recipe: A name in `lablib.calc.recipes`.
        params: Parameters of the model.
        states: Weights, gradients, master weights and moments, measured.
        predicted_states: The same from the calculator.
        activations: What autograd kept, measured; with the casts of weights under autocast.
        predicted_activations: The same from the calculator.
    """

    recipe: str
    params: int
    states: int
    predicted_states: int
    activations: int
    predicted_activations: int

    @property
    def states_per_param(self) -> float:
        """Bytes of states for each parameter."""
        return self.states / self.params


def precision_memory(config: ModelConfig, *, batch: int = 4, seq: int = 64) -> dict[str, PrecisionMemory]:
    """Train one step in fp32, in bf16 with master weights, and under autocast; count what each holds.

    Args:
        config: A model that the toy transformer can be built from.
        batch: Windows in the batch.
        seq: Tokens in a window.

    Returns:
        By recipe: "fp32", "mixed-bf16", "autocast-bf16".
    """
    return {recipe: _measure(config, recipe, batch, seq) for recipe in RECIPES}


def _measure(config: ModelConfig, recipe: str, batch: int, seq: int) -> PrecisionMemory:
    generator = torch.Generator().manual_seed(0)
    windows_BT = torch.randint(config.vocab, (batch, seq + 1), generator=generator)
    model, weights = Transformer(config), None
    if recipe == "mixed-bf16":
        weights = MasterWeights(model, torch.bfloat16)
    working = weights.model if weights else model
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        saved_activations(working) as saved,
        torch.autocast("cpu", torch.bfloat16, recipe == "autocast-bf16"),
    ):
        loss = working.loss(windows_BT)
    loss.backward()
    # fp32 gradients of the master copy live for the moment of the step, one tensor at a time if need be.
    states = measure_states(working, optimizer)
    if weights:
        weights.take_gradients()
    optimizer.step()
    states = measure_states(working, optimizer) | {"gradients": states["gradients"]}
    predicted = training_memory(config, recipe=recipe, micro_batch=batch, seq=seq, kernels="toy")
    expected = predicted.activations
    if recipe == "autocast-bf16":
        expected = sum(autocast_activations(config, batch=batch, seq=seq).values())
    return PrecisionMemory(
        recipe,
        sum(p.numel() for p in working.parameters()),
        sum(states.values()),
        predicted.states,
        saved.total,
        expected,
    )
