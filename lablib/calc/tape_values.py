"""What stands on a tape: values, operators, and what is seen while they are played.

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

from dataclasses import dataclass, field

NEW, SHARED, NONE = "new", "shared", "none"  # how an operator hands a gradient to an input


@dataclass(eq=False)
class Value:
    """A tensor on the tape. Views have a value of their own and the storage of another.

    Attributes:
        name: What it is.
        bytes: Of its values; its gradient has as many.
        storage: The value that owns the memory: itself, unless it is a view.
        needs_grad: Whether backward asks for its gradient.
    """

    name: str
    bytes: int
    needs_grad: bool = True
    storage: Value = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.storage = self if self.storage is None else self.storage.storage


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: What it is called.
        inputs: What it reads.
        outputs: What it makes.
        keeps: What its derivative needs.
        gradients: For each input NEW (a tensor of its own), SHARED (the received gradient's storage) or NONE.
        temporary: Bytes it needs for itself in forward, beside its outputs.
        backward_temporary: The same in backward, beside the gradients it makes.
        weight_gradient: Bytes of the gradients of its own parameters.
        low_gradient: Bytes of those in another dtype, in which they are made before they are cast.
        recomputed: Whether it runs again in backward, with its neighbours that do.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...]
    gradients: tuple[str, ...]
    temporary: int
    backward_temporary: int
    weight_gradient: int
    recomputed: bool
    low_gradient: int = 0


@dataclass(frozen=True)
class Event:
    """What is alive while an operator runs.

    Attributes:
        direction: "forward", "replay" or "backward".
        operator: Its name.
        kept: Bytes that backward will need.
        passing: Bytes of forward that nobody keeps, temporaries of operators included.
        gradients: Bytes of gradients of activations.
        temporary: Bytes of temporaries of a backward operator.
        weights: Bytes of gradients of parameters made so far.
        new: The part of `weights` that this very operator makes.
    """

    direction: str
    operator: str
    kept: int
    passing: int
    gradients: int
    temporary: int
    weights: int
    new: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.kept + self.passing + self.gradients + self.temporary + self.weights


@dataclass(frozen=True)
class Item:
    """A tensor that is alive during an event.

    Attributes:
        group: "kept", "replayed" (kept, and made by a replay), "passing", "gradient" or "temporary".
        kind: For what is kept: under which term it counts.
        name: What it is.
        bytes: Its size.
    """

    group: str
    kind: str
    name: str
    bytes: int
