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
- A tensor that two operators read gets two gradients. The second is added to the first in place if nobody else has the
  first, neither the tensor nor its memory; else into a new tensor. A gradient that arrives as a view is never written
  to: the view's base holds its memory too. Of a linear layer with a batch and a sequence both gradients are views, the
  input's reshaped and the weight's transposed. A sum is no view, so a third gradient is added in place.
- Under a dispatch mode, as PyTorch's trackers are, every sum is a new tensor, and so is what a derivative would write
  into.
- A segment that is recomputed keeps its inputs alone. When backward reaches the first of its operators that asks for
  something it kept, its forward runs again, and stops when the last operator that keeps anything has it: before that
  operator runs, if these are inputs of it.

Source: torch/csrc/autograd, engine.cpp and input_buffer.cpp (`can_accumulate_inplace`); FunctionsManual.cpp for what
derivatives do to tensor subclasses, as which a dispatch mode counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

NEW, VIEW, SHARED, NONE = "new", "view", "shared", "none"  # how an operator hands a gradient to an input


@dataclass(eq=False)
class Value:
    """A tensor on the tape. Views have a value of their own and the storage of another.

    Attributes:
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
        keeps: What its derivative needs.
        gradients: For each input NEW (a tensor of its own), VIEW (of a tensor of its own), SHARED (the received gradient
            itself) or NONE.
        recomputed: Whether it runs again in backward, with its neighbours that do.
        temporary: Bytes it needs for itself in forward, beside its outputs.
        backward_temporary: The same in backward, beside the gradients it makes.
        traced_temporary: What it needs in backward besides, under a dispatch mode alone.
        weight_gradient: Bytes of the gradients of its own parameters.
        low_gradient: Bytes of those in another dtype, in which they are made before they are cast.
        overwrites: Whether backward writes its gradient over what it kept.
        becomes_gradient: Whether it stands for a parameter, whose gradient is what it receives and no new tensor.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    keeps: tuple[Value, ...]
    gradients: tuple[str, ...]
    recomputed: bool
    temporary: int = 0
    backward_temporary: int = 0
    traced_temporary: int = 0
    weight_gradient: int = 0
    low_gradient: int = 0
    overwrites: bool = False
    becomes_gradient: bool = False


@dataclass(frozen=True)
class Event:
    """The bytes that are alive while an operator runs.

    Attributes:
        direction: "forward", "replay" or "backward".
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
    """

    group: str
    kind: str
    name: str
    bytes: int


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
        kind: str = "",
        label: str = "",
        **needs: int,
    ) -> Value:
        """Add an operator with one output; return it.

        Args:
            extra: Bytes of a second output that is kept, such as statistics.
            gradient: NEW, VIEW, SHARED or NONE, one for all inputs or one each.
            view: Whether the output is a view of the first input.
            kind: Under which term what it keeps counts.
            **needs: As in `Operator`: temporary, backward_temporary, traced_temporary, weight_gradient, low_gradient,
                overwrites, becomes_gradient.
        """
        how = (gradient,) * len(inputs) if isinstance(gradient, str) else tuple(gradient)
        asked = any(value.needs_grad for value in inputs) or needs.get("weight_gradient", 0) > 0
        if not asked:
            needs.pop("backward_temporary", None)
            needs.pop("traced_temporary", None)
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
                recomputed=self.recomputing,
                **needs,
            )
        )
        return output

    def split(self, name: str, value: Value, parts: Sequence[int]) -> list[Value]:
        """Add an operator that cuts a tensor into views; backward puts their gradients together in a new tensor."""
        outputs = tuple(Value(f"{value.name}, part {i}", size, value.needs_grad, value) for i, size in enumerate(parts))
        gradient = NEW if value.needs_grad else NONE
        self.operators.append(Operator(name, (value,), outputs, (), (gradient,), self.recomputing))
        return list(outputs)

    def use(self, value: Value) -> None:
        """Keep a value of forward alive up to here, as a variable of the program does."""
        self.operators.append(Operator("use", (value,), (), (), (NONE,), self.recomputing))

    def alive(self, index: int, **how: bool) -> list[Item]:
        """Return the tensors that are alive during one event of `play`, gradients of parameters left out.

        Args:
            **how: As in `play`.
        """
        player = Player(self, watch=index, **how)
        player.forward()
        player.backward()
        return player.seen

    def hold(self, *values: Value) -> None:
        """Keep values alive until the forward of the tape ends, as a variable of the caller does."""
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

    def play(self, **how: bool) -> list[Event]:
        """Return an event for every operator of forward, and then of recomputation and backward.

        Args:
            **how: `out_of_place`, `accumulating` and `retains_grad_output` of `Player`.
        """
        player = Player(self, **how)
        player.forward()
        player.backward()
        return player.events


class Player:
    """One run of a tape.

    Args:
        out_of_place: Write into no tensor that is there, as PyTorch's backward does under a dispatch mode.
    """

    def __init__(
        self,
        tape: Tape,
        *,
        out_of_place: bool = False,
        accumulating: bool = False,
        retains_grad_output: bool = False,
        watch: int = -1,
    ) -> None:
        self.tape, self.out_of_place, self.accumulating = tape, out_of_place, accumulating
        self.retains_grad_output = retains_grad_output
        self.given = {value.storage for value in tape.given}
        self.alive: dict[Value, bool] = {}  # storages of forward, in the order of making
        self.keeps: Counter[Value] = Counter()  # how often backward still needs a storage
        self.replaying = False
        self.replayed: set[Value] = set()  # storages that a replay made
        self.kept_bytes = self.passing_bytes = 0
        self.gradient_of: dict[Value, Value] = {}  # the storage of the gradient that waits for a value
        self.owners: Counter[Value] = Counter()  # how many values wait with the same gradient storage
        self.viewed: set[Value] = set()  # values whose gradient waits as a view
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
        self, operators: Sequence[Operator], direction: str, outlives: Value | None, end: int | None = None
    ) -> None:
        """Run operators forward, up to number `end`; a recomputed one keeps the inputs of its segment, or all now."""
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
                self._let_go(op, i, last_use, outlives, replay)
                continue
            self.note(direction, op.name, passing=op.temporary)
            self._let_go(op, i, last_use, outlives, replay)
        for storage in list(self.alive):
            if storage is not outlives:
                self.drop(storage)

    def _let_go(self, op: Operator, i: int, last_use: dict[Value, int], outlives: Value | None, replay: bool) -> None:
        """Drop what no operator behind number i reads."""
        for storage in {value.storage for value in (*op.inputs, *op.outputs)}:
            waits = storage is outlives or (storage in self.tape.held and not replay)
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
        if self.retains_grad_output:
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
        viewed = bool(self.viewed.intersection(op.outputs))
        self.viewed.difference_update(op.outputs)
        if op.overwrites:
            self._release_kept(op)
        if op.becomes_gradient and received:
            self.give(received.pop())
            self.weight_bytes += 0 if self.accumulating else op.weight_gradient
        if received:
            passed = []
            for value, how in zip(op.inputs, op.gradients, strict=True):
                if how != NONE:
                    gradient = received[0] if how == SHARED else Value(f"gradient of {value.name}", value.bytes)
                    self.count(gradient)
                    passed.append((value, gradient, viewed if how == SHARED else how == VIEW))
            new = 0 if op.low_gradient else op.weight_gradient
            self.weight_bytes += new
            own = op.backward_temporary + (op.traced_temporary if self.out_of_place else 0)
            self.note("backward", op.name, temporary=own + op.low_gradient, new=new)
        if not op.overwrites:
            self._release_kept(op)
        if received:
            for gradient in received:
                self.give(gradient)
            if op.low_gradient:
                self.weight_bytes += op.weight_gradient
                name = f"cast of the gradient of {op.name}"
                self.note("backward", name, temporary=op.low_gradient, new=op.weight_gradient)
            if self.accumulating:
                self.weight_bytes -= op.weight_gradient
            for value, gradient, view in passed:
                self.own(value, gradient, counted=True, view=view)

    def _release_kept(self, op: Operator) -> None:
        for value in op.keeps:
            self.release(value.storage)

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

    def own(self, value: Value, gradient: Value, *, counted: bool = False, view: bool = False) -> None:
        """Hand a gradient to a value, which adds it to what it has."""
        if not counted:
            self.count(gradient)
        if value not in self.gradient_of:
            self.gradient_of[value] = gradient
            if view:
                self.viewed.add(value)
            return
        old = self.gradient_of[value]
        if self.owners[old] == 1 and value not in self.viewed and not self.out_of_place:
            self.give(gradient)
            return
        self.viewed.discard(value)  # the sum is a tensor of its own
        total = self.gradient_of[value] = Value(f"gradient of {value.name}", value.bytes)
        self.count(total)
        self.note("backward", f"sum of gradients of {value.name}")
        self.give(old)
        self.give(gradient)

    def note(self, direction: str, operator: str, *, passing: int = 0, temporary: int = 0, new: int = 0) -> None:
        """Write down what is alive."""
        if len(self.events) == self.watch:
            self.seen = [Item(self._group(s), self.tape.kinds.get(s, ""), s.name, s.bytes) for s in self.alive]
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
