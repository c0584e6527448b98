"""A tape as `lablib.calc.timeline_walk` uses it: what it keeps, and its fullest event in each direction, by term.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lablib.calc.tape import Event, Item, Tape
from lablib.calc.tape_ends import LOSS_TERMS

FORWARD, BACKWARD = "forward", "backward"
Terms = Counter  # name of a term -> bytes


class Piece:
    """A tape and its events: what it keeps, and what each of its operators holds.

    Args:
        tape: The tape.
        out_of_place: Whether second gradients are added into new tensors.
        accumulating: Whether gradients of parameters are there already.
        holds: Whether a pipeline's runtime holds the gradient that its output received.
    """

    def __init__(self, tape: Tape, out_of_place: bool, accumulating: bool, holds: bool = False) -> None:
        self.tape = tape
        self.how = {"out_of_place": out_of_place, "accumulating": accumulating, "holds": holds}
        self.received = tape.operators[-1].outputs[0].bytes if holds else 0
        self.events: list[Event] = tape.play(**self.how)
        self.kept: Terms = Counter()
        self.kept_names: set[str] = set()
        for kind, name, size in tape.kept():
            self.kept[_kept_term(kind)] += size
            self.kept_names.add(name)
        casts = {v for op in tape.operators for v in op.outputs if tape.kinds.get(v) == "weight_casts"}
        cached = [value for value in casts & tape.held if value.name not in self.kept_names]
        self.cached = sum(value.bytes for value in cached)  # in autocast's cache alone
        self.weights = 0 if accumulating else self.events[-1].weights
        self._found: dict[int, tuple[str, Terms, int]] = {}
        self._fullest: dict[str, int | None] = {}

    def fullest(self, direction: str, only: Callable[[str], bool] | None = None) -> tuple[str, Terms, int]:
        """Return the fullest event of a direction: its operator, its terms, and gradients of parameters made before.

        Args:
            direction: "forward" or "backward", which includes replays.
            only: Which operators count; None: all.
        """
        if only is None and direction not in self._fullest:
            self._fullest[direction] = self._index(direction, None)
        i = self._fullest[direction] if only is None else self._index(direction, only)
        if i is None:
            return "", Counter(), 0
        if i not in self._found:
            terms: Terms = Counter()
            holds = self.how["holds"]
            for item in self.tape.alive(i, **self.how):
                held = holds and item.name == "received gradient"
                terms["received_gradient" if held else _term(item, direction)] += item.bytes
            event = self.events[i]
            terms["new_gradients"] = event.new
            again = " again" if event.direction == "replay" else ""
            self._found[i] = (f"{event.operator}{again}", terms, event.weights - event.new)
        return self._found[i]

    def _index(self, direction: str, only: Callable[[str], bool] | None) -> int | None:
        there = [
            i
            for i, event in enumerate(self.events)
            if (event.direction == FORWARD) == (direction == FORWARD)
            and (only is None or only(event.operator))
        ]
        return max(there, key=lambda i: self.events[i].total, default=None)

    @property
    def begin(self) -> Terms:
        """What is alive beside what it keeps when its backward begins: the gradient of its output."""
        term = "received_gradient" if self.received else "activation_gradients"
        return Counter({term: self.tape.operators[-1].outputs[0].bytes})

    @property
    def end(self) -> Terms:
        """What is alive when its backward has ended: the gradient of its input, and what a runtime holds."""
        own = sum(value.bytes for value in self.tape.inputs if value.needs_grad)
        return Counter(activation_gradients=own, received_gradient=self.received)


def _kept_term(kind: str) -> str:
    return kind if kind == "weight_casts" else f"activations.{kind or 'input'}"


def _term(item: Item, direction: str) -> str:
    if item.group == "kept":
        return _kept_term(item.kind)
    if direction == BACKWARD and item.group in ("replayed", "passing") and item.name.startswith("stream "):
        return "recomputed_stream"
    if item.group == "replayed" and item.kind != "weight_casts":
        return f"recomputed.{item.kind or 'input'}"
    if item.kind == "weight_casts":
        return "weight_casts"
    if item.name in LOSS_TERMS:
        return LOSS_TERMS[item.name]
    if item.group == "passing":
        return "recomputed_values" if direction == BACKWARD else "forward_values"
    if item.group == "gradient":
        of = item.name.removeprefix("gradient of ")
        if of.startswith("output of A of "):  # of the r values between the two matrices of an adapter
            return "adapter_gradients"
        return "logits_gradients" if of in (*LOSS_TERMS, "log-probabilities") else "activation_gradients"
    return "operator_temporaries"
