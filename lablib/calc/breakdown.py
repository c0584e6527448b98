"""What `training_memory` returns: bytes by term, in three groups that sum to the total.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.memory_terms import ROLES, TERMS, find_term

Terms = tuple[tuple[str, int], ...]
WEIGHT_TERMS, GRADIENT_TERMS = (
    tuple(name for name, term in TERMS.items() if term.role == role and term.proof == "exact")
    for role in ("weights", "gradients")
)


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of device memory on one rank at the peak of a training step.

    Attributes:
        model: Name of the model.
        recipe: Name of the recipe.
        stage: Pipeline stage that it describes, from 0.
        ranks: Ranks of the whole run.
        seq: Tokens in a sequence.
        state_terms: What lives from step to step: weights, gradients, optimizer.
        activation_terms: What forward keeps for backward, by kind, for all micro-batches in flight.
        buffer_terms: What exists for a moment: gathered weights, buckets, one recomputed layer. Estimates.
        host_terms: What offload moved to the CPU; not in the total.
    """

    model: str
    recipe: str
    stage: int
    ranks: int
    seq: int
    state_terms: Terms
    activation_terms: Terms
    buffer_terms: Terms
    host_terms: Terms

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by term; they sum to `total`."""
        return dict(self.state_terms + self.activation_terms + self.buffer_terms)

    @property
    def total(self) -> int:
        """All bytes on the device: states, activations and buffers."""
        return self.states + self.activations + self.buffers

    @property
    def states(self) -> int:
        """Bytes of the model states: weights, gradients, optimizer."""
        return sum(dict(self.state_terms).values())

    @property
    def optimizer(self) -> int:
        """Bytes of the states that the optimizer owns: master copy, its own gradient copy and moments."""
        return self.by_role()["optimizer"]

    @property
    def activations(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(dict(self.activation_terms).values())

    @property
    def buffers(self) -> int:
        """Bytes of short-lived buffers; an estimate."""
        return sum(dict(self.buffer_terms).values())

    @property
    def host(self) -> int:
        """Bytes that offload holds in CPU memory, for this rank."""
        return sum(dict(self.host_terms).values())

    def by_role(self) -> dict[str, int]:
        """Return the bytes of weights, gradients, optimizer, activations and buffers; they sum to the total."""
        found = dict.fromkeys(ROLES, 0)
        for name, size in self.terms.items():
            found[find_term(name).role] += size
        return found

    def headroom(self, device: Accelerator | str | int) -> int:
        """Return the bytes that stay free on a device; negative if it does not fit.

        The CUDA context (about half a GiB), NCCL's own buffers and fragmentation are not counted: keep some GiB.

        Args:
            device: An accelerator, its name, or a capacity in bytes.

        Raises:
            ValueError: If the name is unknown.
        """
        if isinstance(device, int):
            return device - self.total
        return (accelerator(device) if isinstance(device, str) else device).memory_bytes - self.total

    def fits(self, device: Accelerator | str | int) -> bool:
        """Return whether the total is at most the device's nominal capacity.

        Args:
            device: An accelerator, its name, or a capacity in bytes.

        Raises:
            ValueError: If the name is unknown.
        """
        return self.headroom(device) >= 0

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain dictionaries and numbers, as `rung memory --json` prints it."""
        numbers = ("model", "recipe", "stage", "ranks", "seq")
        numbers += ("total", "states", "optimizer", "activations", "buffers", "host")
        groups = ("state_terms", "activation_terms", "buffer_terms", "host_terms")
        return (
            {name: getattr(self, name) for name in numbers}
            | {"terms": self.terms}
            | {name: dict(getattr(self, name)) for name in groups}
        )
