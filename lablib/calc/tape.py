"""A tape: the operators of a piece of a model in the order in which they run, and the bytes that are alive at each.

PyTorch records such a tape in forward and walks it from the end in backward. Here it is written by hand, one line an
operator, and played without a single tensor:

    tape = Tape()
    x = tape.input("x", 8 * 4)                                   # 8 values of 4 bytes
    y = tape.op("square", [x], 8 * 4, keeps=[x])                 # a new tensor; backward needs x
    for event in tape.play():                                    # ... and then backward
        print(event.direction, event.operator, event.total)

Rules, those of PyTorch's autograd engine:

- A tensor lives until the last operator that reads it, or until backward is done with what was kept of it.
- In backward an operator holds the gradient it received, what it kept, what it makes, and its own temporaries, all at
  once; then the gradient it received and what it kept go.
- A tensor that two operators read gets two gradients. The second is added to the first, in place if nobody else has
  it, or into a new tensor.
- A segment that is recomputed keeps its inputs alone. When backward reaches the first of its operators that asks for
  something it kept, its forward runs again, and stops when the last operator that keeps anything has it: before that
  operator runs, if these are inputs of it.

Chapter: book/09_activation_checkpointing.md. Source: torch/csrc/autograd, engine.cpp and input_buffer.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lablib.calc.tape_player import Player
from lablib.calc.tape_values import NEW, NONE, SHARED, Event, Item, Operator, Value

__all__ = ["NEW", "NONE", "SHARED", "Event", "Item", "Operator", "Tape", "Value"]


class Tape:
    """Operators of a piece of a model."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.inputs: list[Value] = []
        self.given: list[Value] = []
        self.kinds: dict[Value, str] = {}
        self.held: set[Value] = set()
        self.recomputing = False

    def input(self, name: str, size: int, *, needs_grad: bool = True, given: bool = False) -> Value:
        """Return a tensor that comes from outside.

        Args:
            name: What it is.
            size: Bytes.
            needs_grad: Whether its gradient is asked for.
            given: Whether it is counted elsewhere, such as a table that all blocks share.
        """
        value = Value(name, size, needs_grad)
        (self.given if given else self.inputs).append(value)
        return value

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        size: int,
        *,
        keeps: Iterable[Value] = (),
        keeps_output: bool = False,
        extra: int = 0,
        gradient: str | Sequence[str] = NEW,
        view: bool = False,
        temporary: int = 0,
        backward_temporary: int = 0,
        weight_gradient: int = 0,
        low_gradient: int = 0,
        kind: str = "",
        label: str = "",
    ) -> Value:
        """Add an operator with one output; return it.

        Args:
            name: Of the operator.
            inputs: What it reads.
            size: Bytes of the output.
            keeps: Inputs that its derivative needs.
            keeps_output: Whether it needs its output.
            extra: Bytes of a second output that is kept, such as statistics.
            gradient: NEW, SHARED or NONE, one for all inputs or one each.
            view: Whether the output is a view of the first input.
            temporary: Bytes for itself in forward.
            backward_temporary: Bytes for itself in backward.
            weight_gradient: Bytes of gradients of its own parameters.
            low_gradient: Bytes of these in another dtype, in which they are made before they are cast.
            kind: Under which term what it keeps counts.
            label: Name of the output.
        """
        how = (gradient,) * len(inputs) if isinstance(gradient, str) else tuple(gradient)
        asked = any(value.needs_grad for value in inputs) or weight_gradient > 0
        output = Value(label or f"output of {name}", size, asked, inputs[0] if view else None)
        kept = [value for value in keeps if asked]
        outputs = [output]
        if extra and asked:
            statistics = Value(f"statistics of {name}", extra, False)
            outputs.append(statistics)
            kept.append(statistics)
        if keeps_output and asked:
            kept.append(output)
        for value in kept:
            self.kinds.setdefault(value.storage, kind)
        self.operators.append(
            Operator(
                name=name,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                keeps=tuple(kept),
                gradients=tuple(h if v.needs_grad else NONE for h, v in zip(how, inputs, strict=True)),
                temporary=temporary,
                backward_temporary=backward_temporary if asked else 0,
                weight_gradient=weight_gradient,
                recomputed=self.recomputing,
                low_gradient=low_gradient,
            )
        )
        return output

    def split(self, name: str, value: Value, parts: Sequence[int]) -> list[Value]:
        """Add an operator that cuts a tensor into views; backward puts their gradients together in a new tensor.

        Args:
            name: Of the operator.
            value: What is cut.
            parts: Bytes of each part.
        """
        outputs = tuple(
            Value(f"{value.name}, part {i}", size, value.needs_grad, value) for i, size in enumerate(parts)
        )
        gradient = NEW if value.needs_grad else NONE
        self.operators.append(Operator(name, (value,), outputs, (), (gradient,), 0, 0, 0, self.recomputing))
        return list(outputs)

    def use(self, value: Value) -> None:
        """Keep a value of forward alive up to here, as a variable of the program does.

        Args:
            value: What the variable holds.
        """
        self.operators.append(Operator("use", (value,), (), (), (NONE,), 0, 0, 0, self.recomputing))

    def alive(
        self, index: int, *, out_of_place: bool = False, accumulating: bool = False, holds: bool = False
    ) -> list[Item]:
        """Return the tensors that are alive during one event of `play`, gradients of parameters left out.

        Args:
            index: Number of the event.
            out_of_place: As in `play`.
            accumulating: As in `play`.
            holds: As in `play`.
        """
        player = Player(self, out_of_place, accumulating, watch=index, holds=holds)
        player.forward()
        player.backward()
        return player.seen

    def hold(self, *values: Value) -> None:
        """Keep values alive until the forward of the whole tape ends, as a variable of the caller does."""
        self.held.update(value.storage for value in values)

    def kept(self) -> list[tuple[str, str, int]]:
        """Return what backward will need when forward has ended, as (kind, name, bytes), each storage once.

        The output is left out: it belongs to whoever reads it.
        """
        player = Player(self)
        player.forward()
        return [
            (self.kinds.get(storage, ""), storage.name, storage.bytes)
            for storage in player.alive
            if player.keeps[storage]
        ]

    def play(
        self, *, out_of_place: bool = False, accumulating: bool = False, holds: bool = False
    ) -> list[Event]:
        """Return an event for every operator of forward, and then of replays and backward.

        Args:
            out_of_place: Add second gradients into new tensors always, as PyTorch does under a dispatch mode.
            accumulating: Gradients of parameters are there already, so that new ones are added to them and go.
            holds: Whether somebody holds the gradient that came from behind, as the runtime of a pipeline does.
        """
        player = Player(self, out_of_place, accumulating, holds=holds)
        player.forward()
        player.backward()
        return player.events
