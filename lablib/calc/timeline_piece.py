"""A tape as `lablib.calc.timeline_walk` uses it: what it keeps, and its fullest event in each direction, by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from lablib.calc.tape import Event, Item, Tape
from lablib.calc.tape_ends import LOSS_TERMS
from lablib.calc.tape_setting import BlockSetting

FORWARD, BACKWARD = "forward", "backward"
MOST = 512  # pieces that are kept, of about 20 KB each
Terms = Mapping[str, int]  # name of a term -> bytes


class Fullest(NamedTuple):
    """The event of a piece that holds most.

    Attributes:
        operator: What runs then.
        terms: Bytes by term.
        weights: Bytes of gradients of parameters that were made before.
    """

    operator: str
    terms: Terms
    weights: int


@lru_cache(maxsize=MOST)
def piece(which: str, setting: BlockSetting, **how: bool) -> Piece:
    """Return the tape of a "block", of the "head" or of the "embedding", and its events.

    The stages of a pipeline run the same blocks; so do runs that differ in ranks or in ZeRO. A tape is written and
    played once for all of them.

    Args:
        which: What it is of.
        setting: How it runs.
        **how: As in `Piece`.
    """
    return Piece(getattr(setting.kernels, f"{which}_tape")(setting), **how)


class Piece:
    """A tape and its events: what it keeps, and what each of its operators holds.

    Args:
        tape: The tape.
        **how: `out_of_place`, `accumulating` and `retains_grad_output` of `lablib.calc.tape.Player`.
    """

    def __init__(self, tape: Tape, **how: bool) -> None:
        self.tape, self.how = tape, how
        self.retains = how.get("retains_grad_output", False)
        self.received = tape.operators[-1].outputs[0].bytes if self.retains else 0
        self.events: tuple[Event, ...] = tuple(tape.play(**how))
        kept: Counter[str] = Counter()
        for kind, _, size in tape.kept():
            kept[_kept_term(kind)] += size
        self.kept: Terms = MappingProxyType(kept)
        self.kept_names = frozenset(name for _, name, _ in tape.kept())
        casts = {v for op in tape.operators for v in op.outputs if tape.kinds.get(v) == "weight_casts"}
        cached = [value for value in casts & tape.held if value.name not in self.kept_names]
        self.cached = sum(value.bytes for value in cached)  # in autocast's cache alone
        self.weights = 0 if how.get("accumulating") else self.events[-1].weights
        self._found: dict[int, Fullest] = {}
        self._fullest: dict[str, int | None] = {}

    def fullest(self, direction: str, only: Callable[[str], bool] | None = None) -> Fullest:
        """Return the fullest event of a direction.

        Args:
            direction: "forward" or "backward", which includes recomputation.
            only: Which operators count; None: all.
        """
        if only is None and direction not in self._fullest:
            self._fullest[direction] = self._index(direction, None)
        i = self._fullest[direction] if only is None else self._index(direction, only)
        if i is None:
            return Fullest("", MappingProxyType({}), 0)
        if i not in self._found:
            terms: Counter[str] = Counter()
            for item in self.tape.alive(i, **self.how):
                retained = self.retains and item.name == "received gradient"
                terms["received_gradient" if retained else _term(item, direction)] += item.bytes
            event = self.events[i]
            terms["new_gradients"] = event.new
            again = " again" if event.direction == "replay" else ""
            self._found[i] = Fullest(
                f"{event.operator}{again}", MappingProxyType(terms), event.weights - event.new
            )
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
        return {term: self.tape.operators[-1].outputs[0].bytes}

    @property
    def end(self) -> Terms:
        """What is alive when its backward has ended: the gradient of its input, and what a runtime holds."""
        own = sum(value.bytes for value in self.tape.inputs if value.needs_grad)
        return {"activation_gradients": own, "received_gradient": self.received}


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
