"""Play a tape: run its operators forward and backward, and count what is alive at each; see `lablib.calc.tape`.

Chapter: book/09_activation_checkpointing.md. Source: torch/csrc/autograd, engine.cpp and input_buffer.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from lablib.calc.tape_values import NONE, SHARED, Event, Item, Operator, Value

if TYPE_CHECKING:
    from lablib.calc.tape import Tape


class Player:
    """One run of a tape.

    Args:
        tape: The tape.
        out_of_place: As in `Tape.play`.
        accumulating: As in `Tape.play`.
        watch: Number of the event whose tensors are listed in `seen`.
        holds: As in `Tape.play`.
    """

    def __init__(
        self,
        tape: Tape,
        out_of_place: bool = False,
        accumulating: bool = False,
        watch: int = -1,
        holds: bool = False,
    ) -> None:
        self.tape, self.out_of_place, self.accumulating = tape, out_of_place, accumulating
        self.holds = holds
        self.given = {value.storage for value in tape.given}
        self.alive: dict[Value, bool] = {}  # storages of forward, in the order of making
        self.keeps: Counter[Value] = Counter()  # how often backward still needs a storage
        self.replaying = False
        self.replayed: set[Value] = set()  # storages that a replay made
        self.kept_bytes = self.passing_bytes = 0
        self.gradient_of: dict[Value, Value] = {}  # the storage of the gradient that waits for a value
        self.owners: Counter[Value] = Counter()  # how many values wait with the same gradient storage
        self.gradient_bytes = self.weight_bytes = 0
        self.events: list[Event] = []
        self.watch, self.seen = watch, []

    # Storages of forward.

    def make(self, storage: Value) -> None:
        """Begin to count what an operator makes."""
        if storage not in self.alive and storage not in self.given:
            self.alive[storage] = True
            if self.replaying:
                self.replayed.add(storage)
            if self.keeps[storage]:
                self.kept_bytes += storage.bytes
            else:
                self.passing_bytes += storage.bytes

    def keep(self, storage: Value) -> None:
        """Count once more that backward needs a storage."""
        if storage in self.alive and not self.keeps[storage]:
            self.passing_bytes -= storage.bytes
            self.kept_bytes += storage.bytes
        self.keeps[storage] += 1

    def release(self, storage: Value) -> None:
        """Count once less that backward needs it; nobody else does any more then."""
        self.keeps[storage] -= 1
        if storage in self.alive and not self.keeps[storage]:
            self.kept_bytes -= storage.bytes
            del self.alive[storage]

    def drop(self, storage: Value) -> None:
        """Forget what nobody reads any more, unless it is kept."""
        if storage in self.alive and not self.keeps[storage]:
            self.passing_bytes -= storage.bytes
            del self.alive[storage]

    # Walks.

    def forward(self) -> None:
        """Run all operators."""
        for value in self.tape.inputs:
            self.make(value.storage)
        operators = self.tape.operators
        self._walk(operators, "forward", operators[-1].outputs[0].storage)

    def _walk(
        self, operators: Sequence[Operator], direction: str, stays: Value | None, end: int | None = None
    ) -> None:
        """Run operators forward, up to number `end`; a recomputed one keeps the inputs of its segment, or all now.

        Args:
            operators: Which.
            direction: "forward" or "replay".
            stays: A storage that outlives the walk.
            end: Of a replay: how many run, the last one if it keeps something that it makes.
        """
        replay = direction == "replay"
        last_use = {value.storage: i for i, op in enumerate(operators) for value in op.inputs}
        inside = {v.storage for op in operators if op.recomputed for v in op.outputs}
        for i, op in enumerate(operators[:end]):
            if i + 1 == end and not set(op.keeps) & set(op.outputs):
                # What it keeps is there before it runs, and with that the replay has all it came for.
                for value in op.keeps:
                    self.keep(value.storage)
                break
            for value in op.outputs:
                self.make(value.storage)
            outside = [value for value in op.inputs if value.storage not in inside]
            for value in outside if op.recomputed and not replay else op.keeps:
                self.keep(value.storage)
            if not op.outputs:  # a variable
                self._let_go(op, i, last_use, stays, replay)
                continue
            self.note(direction, op.name, passing=op.temporary)
            self._let_go(op, i, last_use, stays, replay)
        for storage in list(self.alive):
            if storage is not stays:
                self.drop(storage)

    def _let_go(
        self, op: Operator, i: int, last_use: dict[Value, int], stays: Value | None, replay: bool
    ) -> None:
        """Drop what no operator behind number i reads."""
        for storage in {value.storage for value in (*op.inputs, *op.outputs)}:
            waits = storage is stays or (storage in self.tape.held and not replay)
            if last_use.get(storage, i) <= i and not waits:
                self.drop(storage)

    def backward(self) -> None:
        """Run all operators backward, and forward again where they are recomputed."""
        operators = self.tape.operators
        # The output belongs to what comes next, and its gradient comes from there.
        last = operators[-1].outputs[0]
        self.drop(last.storage)
        received = Value("received gradient", last.bytes)
        self.own(last, received)
        if self.holds:
            self.count(received)
        start = len(operators)  # of the segment that backward is in, or was in last
        waiting: Sequence[Operator] = ()  # a segment whose replay nobody has asked for yet
        for i in reversed(range(len(operators))):
            if operators[i].recomputed and i < start:
                start = i
                while start and operators[start - 1].recomputed:
                    start -= 1
                waiting = operators[start : i + 1]
            if waiting and operators[i].keeps:
                self._replay(waiting)
                waiting = ()
            self._step_back(operators[i])
            if i == start:
                # What the segment held of its inputs goes when its backward has ended
                self._release_inputs(operators[i:])

    def _replay(self, segment: Sequence[Operator]) -> None:
        end = max((i for i, op in enumerate(segment) if op.keeps), default=-1)
        self.replaying = True
        self._walk(segment, "replay", None, end + 1)
        self.replaying = False

    def _release_inputs(self, operators: Sequence[Operator]) -> None:
        segment = list(takewhile(lambda op: op.recomputed, operators))
        inside = {value.storage for op in segment for value in op.outputs}
        for op in segment:
            for value in op.inputs:
                if value.storage not in inside:
                    self.release(value.storage)

    def _step_back(self, op: Operator) -> None:
        received = [self.gradient_of.pop(value) for value in op.outputs if value in self.gradient_of]
        if received:
            passed = []
            for value, how in zip(op.inputs, op.gradients, strict=True):
                if how != NONE:
                    gradient = (
                        received[0] if how == SHARED else Value(f"gradient of {value.name}", value.bytes)
                    )
                    self.count(gradient)
                    passed.append((value, gradient))
            new = 0 if op.low_gradient else op.weight_gradient
            self.weight_bytes += new
            self.note("backward", op.name, temporary=op.backward_temporary + op.low_gradient, new=new)
        for value in op.keeps:
            self.release(value.storage)
        if received:
            for gradient in received:
                self.give(gradient)
            if op.low_gradient:
                self.weight_bytes += op.weight_gradient
                name = f"cast of the gradient of {op.name}"
                self.note("backward", name, temporary=op.low_gradient, new=op.weight_gradient)
            if self.accumulating:
                self.weight_bytes -= op.weight_gradient
            for value, gradient in passed:
                self.own(value, gradient, counted=True)

    # Gradients.

    def count(self, gradient: Value) -> None:
        """Give a gradient one more owner."""
        if not self.owners[gradient]:
            self.gradient_bytes += gradient.bytes
        self.owners[gradient] += 1

    def give(self, gradient: Value) -> None:
        """Take one owner from a gradient, which goes with its last."""
        self.owners[gradient] -= 1
        if not self.owners[gradient]:
            self.gradient_bytes -= gradient.bytes

    def own(self, value: Value, gradient: Value, *, counted: bool = False) -> None:
        """Hand a gradient to a value, which adds it to what it has."""
        if not counted:
            self.count(gradient)
        old = self.gradient_of.setdefault(value, gradient)
        if old is gradient:
            return
        if self.owners[old] == 1 and not self.out_of_place:
            self.give(gradient)
            return
        total = self.gradient_of[value] = Value(f"gradient of {value.name}", value.bytes)
        self.count(total)
        self.note("backward", f"sum of gradients of {value.name}")
        self.give(old)
        self.give(gradient)

    def note(
        self, direction: str, operator: str, *, passing: int = 0, temporary: int = 0, new: int = 0
    ) -> None:
        """Write down what is alive."""
        if len(self.events) == self.watch:
            self.seen = [
                Item(self._group(s), self.tape.kinds.get(s, ""), s.name, s.bytes) for s in self.alive
            ]
            self.seen += [
                Item("gradient", "", gradient.name, gradient.bytes)
                for gradient, owners in self.owners.items()
                if owners
            ]
            if passing + temporary:
                self.seen.append(Item("temporary", "", operator, passing + temporary))
        self.events.append(
            Event(
                direction,
                operator,
                self.kept_bytes,
                self.passing_bytes + passing,
                self.gradient_bytes,
                temporary,
                self.weight_bytes,
                new,
            )
        )

    def _group(self, storage: Value) -> str:
        if not self.keeps[storage]:
            return "passing"
        return "replayed" if storage in self.replayed else "kept"
