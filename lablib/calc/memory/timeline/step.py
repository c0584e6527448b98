"""One training step of one pipeline stage, instant by instant.

A block's tape is played once and used for all blocks like it (`Piece`): forward adds what it keeps, backward takes it
away. What data parallelism holds beside it comes from `gradients`. Read `Step.instants` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from lablib.calc.memory.formulas import fixed_activations, gradients_meet, rank_buffers, stage_states
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.tape import (
    INT64,
    LOSS_OPERATORS,
    LOSS_TERMS,
    BlockSetting,
    Event,
    Item,
    Tape,
    run_setting,
    write_tape,
)
from lablib.calc.memory.terms import listed
from lablib.calc.memory.timeline.gradients import GradientState, Terms, make_reduction, optimizer_terms

FORWARD, BACKWARD = "forward", "backward"
CAST = "cast of the reduced gradients"
CACHED_PIECES = 512  # pieces that are kept, of about 20 KB each


class FullestEvent(NamedTuple):
    """The event of a piece that holds most.

    Attributes:
        operator: What runs then.
        terms: Bytes by term.
        weights: Bytes of gradients of parameters that were made before.
    """

    operator: str
    terms: Terms
    weights: int


@lru_cache(maxsize=CACHED_PIECES)
def piece(which: str, setting: BlockSetting, **how: bool) -> Piece:
    """Return the tape of a "block", of the "head" or of the "embedding", and its events.

    The stages of a pipeline run the same blocks; so do runs that differ in ranks or in ZeRO. A tape is written and
    played once for all of them.
    """
    return Piece(write_tape(which, setting), **how)


class Piece:
    """A tape and its events: what it keeps, and what each of its operators holds."""

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
        self._found: dict[int, FullestEvent] = {}
        self._fullest: dict[str, int | None] = {}

    def fullest(self, direction: str, only: Callable[[str], bool] | None = None) -> FullestEvent:
        """Return the fullest event of a direction."""
        if only is None and direction not in self._fullest:
            self._fullest[direction] = self._index(direction, None)
        i = self._fullest[direction] if only is None else self._index(direction, only)
        if i is None:
            return FullestEvent("", MappingProxyType({}), 0)
        if i not in self._found:
            terms: Counter[str] = Counter()
            for item in self.tape.alive(i, **self.how):
                retained = self.retains and item.name == "received gradient"
                terms["received_gradient" if retained else _term(item, direction)] += item.bytes
            event = self.events[i]
            terms["new_gradients"] = event.new
            again = " again" if event.direction == "replay" else ""
            self._found[i] = FullestEvent(
                f"{event.operator}{again}", MappingProxyType(terms), event.weights - event.new
            )
        return self._found[i]

    def _index(self, direction: str, only: Callable[[str], bool] | None) -> int | None:
        there = [
            i
            for i, event in enumerate(self.events)
            if (event.direction == FORWARD) == (direction == FORWARD) and (only is None or only(event.operator))
        ]
        return max(there, key=lambda i: self.events[i].total, default=None)

    @property
    def begin(self) -> Terms:
        """Bytes alive beside what it keeps when its backward begins: the gradient of its output."""
        term = "received_gradient" if self.received else "activation_gradients"
        return {term: self.tape.operators[-1].outputs[0].bytes}

    @property
    def end(self) -> Terms:
        """Bytes alive when its backward has ended: the gradient of its input, and what a runtime holds."""
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


TOKENS = "activations.tokens"


@dataclass(frozen=True)
class MemoryInstant:
    """The bytes of a rank at one instant of a step, when that instant is at its fullest.

    Attributes:
        name: "states", "forward of block 3", "loss", "backward of block 3", "optimizer step", ...
        phase: "states", "forward", "loss", "backward", "reduction" or "optimizer".
        block: Number of the block in this stage, from 0; None outside of blocks.
        terms: Bytes by named term, as pairs; they sum to `total`.
        at: The operator that runs then, with its direction.
    """

    name: str
    phase: str
    block: int | None
    terms: tuple[tuple[str, int], ...]
    at: str = ""

    @property
    def total(self) -> int:
        """All bytes of the instant."""
        return sum(size for _, size in self.terms)

    def term(self, name: str) -> int:
        """Return the bytes of one term, 0 if the instant has none."""
        return dict(self.terms).get(name, 0)


def add_terms(terms: Terms, *others: Terms, times: int = 1) -> dict[str, int]:
    """Return terms with others added to them, or with times=-1 taken away."""
    total = dict(terms)
    for other in others:
        for term, size in other.items():
            total[term] = total.get(term, 0) + times * size
    return total


class Step:
    """One step of one stage. Nothing changes while it is asked: `instants` can be walked through again.

    Args:
        out_of_place: As in `memory_timeline`.
    """

    def __init__(self, stage: Stage, optimizer: str, out_of_place: bool, accumulates: bool = False) -> None:
        self.stage, self.run = stage, stage.run
        self.optimizer, self.out_of_place = optimizer, out_of_place
        self.on_device, self.buffers = stage_states(stage)[0], rank_buffers(stage)
        fewer = accumulates and gradients_meet(stage) == "fewer"
        self.in_flight = [max(count - fewer, 0) for count in stage.in_flight]
        self.reduction = make_reduction(stage, self.on_device, self.buffers, accumulates)
        #: The last layers of chunks behind which another stage comes: it sends them their gradient.
        self.receives = {c[-1] for c in stage.chunks if c and c[-1] + 1 < self.run.model.num_layers}
        self._pieces: dict[tuple, Piece] = {}
        self.blocks = [self.block(layer) for layer in stage.layers]
        self.ends = {
            name: self._piece(name, 0)
            for name, there in (("embedding", stage.is_first), ("head", stage.is_last))
            if there
        }

    def block(self, layer: int) -> Piece:
        """Return a block's tape and its events."""
        return self._piece("block", layer, layer in self.receives)

    def _piece(self, which: str, layer: int, retains: bool = False) -> Piece:
        first = self.stage.is_first and layer in self.stage.layers[:1]
        alike = which, self.run.model.has_experts(layer), first, retains
        if alike not in self._pieces:
            self._pieces[alike] = piece(
                which,
                run_setting(self.run, layer, gradient=self.reduction.gradient_bytes, behind_embedding=first),
                out_of_place=self.out_of_place,
                accumulating=self.reduction.accumulates_in_place,
                retains_grad_output=retains,
            )
        return self._pieces[alike]

    # The step, instant by instant.

    def peak(self) -> MemoryInstant:
        """Return the fullest instant, the first one if several are.

        Between blocks that are alike each instant differs from the one before by the same bytes: what a block keeps, the
        gradients that it makes. So of a run of them only the first few and the last few can be the fullest.
        """
        reach = (self.run.prefetch or 1) + 3  # weights gathered ahead, and the buffers that their neighbours still have
        last = len(self.blocks) - 1
        edges = {0, last} | {i for i in range(last) if self.blocks[i] is not self.blocks[i + 1]}
        near = {i + step for i in edges for step in range(-reach, reach + 1)}
        return max(self.instants(near), key=lambda instant: instant.total)

    def instants(self, near: Container[int] | None = None) -> Iterator[MemoryInstant]:
        """Yield the instants in the order of time.

        Args:
            near: Numbers of the blocks to describe; None means all.
        """
        yield self._at_rest()
        kept, cached = self._before(), 0
        if "embedding" in self.ends:
            yield self._embedding_forward(kept)
            kept = add_terms(kept, self.ends["embedding"].kept)
        for number, block in enumerate(self.blocks):
            if near is None or number in near:
                yield self._block_forward(number, kept, cached)
            kept, cached = add_terms(kept, block.kept), cached + block.cached
        kept = add_terms(kept, {"stage_outputs": self.stage_ends(1).get("stage_outputs", 0)})
        state = GradientState()
        if "head" in self.ends:
            yield self._loss(kept, cached)
            yield self._loss_backward(kept, state)
            # The gradient of a tied table waits for the embedding's, and no parameter has it until then.
            state = self.reduction.after_unit(None, state, max(0, self.ends["head"].weights - self.tied_table))
            kept = add_terms(kept, {"tied_gradient": self.tied_table})
        for number in reversed(range(len(self.blocks))):
            block = self.blocks[number]
            kept = add_terms(kept, block.kept, times=-1) | {"received_gradient": self.received(number)}
            if near is None or number in near:
                yield self._block_backward(number, kept, state)
            state = self.reduction.after_unit(f"block {number}", state, block.weights)
        if "embedding" in self.ends:
            yield self._embedding_backward(kept, state)
            state = self.reduction.after_unit(None, state, self.ends["embedding"].weights)
        reduced, cast = self.reduction.reduction_terms("", state, 0), self.reduction.cast_terms("", state)
        if reduced:
            found = (self._sum(reduced), "reduce-scatter"), (self._sum(cast), CAST)
            yield _fullest("gradient reduction", "reduction", None, *found)
        yield self._optimizer_step()

    def _at_rest(self) -> MemoryInstant:
        terms = add_terms(self.reduction.persistent_terms, self.states)
        if not (self.run.gradient_as_bucket_view or self.run.implementation.accumulates_in_kernel):
            terms.pop("gradients", None)
        return MemoryInstant("states", "states", None, listed(terms), "")

    def _embedding_forward(self, kept: Terms) -> MemoryInstant:
        at, terms, _ = self.ends["embedding"].fullest(FORWARD)
        total = self._sum(kept, terms, self.reduction.unsharded_weights("", FORWARD))
        return MemoryInstant("forward of the embedding", FORWARD, None, listed(total), at)

    def _block_forward(self, number: int, kept: Terms, cached: int) -> MemoryInstant:
        """Either an operator, or the copy out of an all-gather before them."""
        block, unit, unsharded = self.blocks[number], f"block {number}", self.reduction.unsharded_weights
        at, terms, _ = block.fullest(FORWARD)
        stream = {"forward_values": block.tape.inputs[0].bytes}
        variables = {"forward_values": self.variables(number)}
        rest = (self.attention_mask, {"weight_casts": cached})
        return _fullest(
            f"forward of {unit}",
            FORWARD,
            number,
            (self._sum(kept, variables, terms, *rest, unsharded(unit, FORWARD)), at),
            (self._sum(kept, variables, stream, *rest, unsharded(unit, FORWARD, "copy")), "all-gather"),
        )

    def _loss(self, kept: Terms, cached: int) -> MemoryInstant:
        found = []
        for inside in (True, False):
            # The head is inside of FSDP2's root, which still has the last block's buffers; our loss is not.
            at, terms, _ = self.ends["head"].fullest(FORWARD, lambda op, i=inside: (op in LOSS_OPERATORS) == i)
            unsharded = self.reduction.unsharded_weights("", "loss" if inside else "head")
            found.append((self._sum(kept, self.held_mask, terms, {"weight_casts": cached}, unsharded), at))
        return _fullest("loss", "loss", None, *found)

    def _loss_backward(self, kept: Terms, state: GradientState) -> MemoryInstant:
        found = []
        for inside in (True, False):
            # The loss goes backward before the root of FSDP2 hears of it, unless it is inside of the root.
            at, terms, weights = self.ends["head"].fullest(BACKWARD, lambda op, i=inside: (op in LOSS_OPERATORS) == i)
            phase = "loss" if inside and not self.run.implementation.loss_in_root else BACKWARD
            unsharded = self.reduction.unsharded_weights("", phase)
            gradients = self.reduction.backward_terms(None, state, weights)
            found.append((self._sum(kept, self.held_mask, terms, unsharded, gradients), at))
        return _fullest("backward of the loss", BACKWARD, None, *found)

    def _block_backward(self, number: int, kept: Terms, state: GradientState) -> MemoryInstant:
        """An operator, the reduce-scatter behind them, the cast of its output, or the copy out of an all-gather before them."""
        block, unit, reduction, mask = self.blocks[number], f"block {number}", self.reduction, self.held_mask
        at, terms, weights = block.fullest(BACKWARD)
        unsharded, copied = (reduction.unsharded_weights(unit, BACKWARD, e) for e in ("compute", "copy"))
        during, before = (reduction.backward_terms(unit, state, size) for size in (weights, 0))
        return _fullest(
            f"backward of {unit}",
            BACKWARD,
            number,
            (self._sum(kept, terms, mask, unsharded, during), at),
            (self._sum(kept, block.end, reduction.reduction_terms(unit, state, block.weights)), "reduce-scatter"),
            (self._sum(kept, block.end, reduction.cast_terms(unit, state)), CAST),
            (self._sum(kept, block.kept, block.begin, mask, copied, before), "all-gather"),
        )

    def _embedding_backward(self, kept: Terms, state: GradientState) -> MemoryInstant:
        embedding = self.ends["embedding"]
        kept = add_terms(kept, embedding.kept, times=-1)
        if not self.run.model.learned_positions:  # rotary tables go with the first block
            kept = add_terms(kept, fixed_activations(self.run) | {TOKENS: 0}, times=-1)
        if len(self.stage.chunks[0]) == 1:  # the gradient from the next stage is still there
            kept = kept | {"received_gradient": self.blocks[0].received}
        at, terms, weights = embedding.fullest(BACKWARD)
        table = self.tied_table
        if table and at == "embedding":  # this one, and their sum where it is a third
            terms = add_terms(
                terms, {"tied_gradient": (2 if self.sums_tables_anew else 1) * table, "new_gradients": -table}
            )
            if self.sums_tables_anew:  # by then what the embedding received is gone
                terms.pop("activation_gradients", None)
        unsharded = self.reduction.unsharded_weights("", "end")
        total = self._sum(kept, terms, unsharded, self.reduction.backward_terms(None, state, weights))
        return MemoryInstant("backward of the embedding", BACKWARD, None, listed(total), at)

    def _optimizer_step(self) -> MemoryInstant:
        base = {term: size for term, size in self.always.items() if term != "gradients"}
        terms = base | optimizer_terms(self.stage, self.on_device, self.optimizer, self.reduction)
        return MemoryInstant("optimizer step", "optimizer", None, listed(terms), self.optimizer)

    # What is there.

    def _sum(self, *parts: Terms) -> dict[str, int]:
        return {term: size for term, size in add_terms(self.always, *parts).items() if size > 0}

    @cached_property
    def states(self) -> Terms:
        """States without gradients, which come and go; with several micro-batches they stay."""
        come_and_go = ("gradients", "gradient_copy")
        return {name: size for name, size in self.on_device.items() if size and name not in come_and_go}

    @cached_property
    def always(self) -> Terms:
        """Bytes of every instant: states, what the reduction keeps, and the token ids of the step."""
        waiting = add_terms(self.waiting, self.fixed).get(TOKENS, 0)
        return add_terms(self.reduction.persistent_terms, self.states) | {TOKENS: max(self.batch, waiting)}

    def _before(self) -> dict[str, int]:
        """Bytes kept when the forward of the last micro-batch in flight begins."""
        kept = add_terms(self.waiting, self.fixed)
        kept.pop(TOKENS, None)
        kept = add_terms(kept, {term: size for term, size in self.stage_ends(1).items() if term != "stage_outputs"})
        if not self.run.implementation.eager:  # its tape knows no casts: they are there from forward to backward
            kept["weight_casts"] = self.buffers["weight_casts"]
        return kept

    @cached_property
    def fixed(self) -> Terms:
        """Bytes that a micro-batch keeps beside tapes: token ids, and position ids or rotary tables."""
        return fixed_activations(self.run, self.stage.is_first)

    @cached_property
    def waiting(self) -> Terms:
        """Bytes that the other micro-batches in flight keep."""
        total: dict[str, int] = {}
        blocks = iter(self.blocks)
        for chunk, count in zip(self.stage.chunks, self.in_flight, strict=True):
            for block in (next(blocks) for _ in chunk):
                total = add_terms(total, block.kept, times=max(count - 1, 0))
        for name, count in (("embedding", self.in_flight[0]), ("head", self.in_flight[-1])):
            if name in self.ends:
                total = add_terms(total, self.ends[name].kept, times=max(count - 1, 0))
        others = max(sum(self.in_flight) - 1, 0)
        return add_terms(add_terms(total, self.fixed, times=others), self.stage_ends(others))

    @cached_property
    def saved(self) -> Terms:
        """Bytes kept when forward ends, for all micro-batches in flight."""
        total = add_terms(self.waiting, self.fixed, *(block.kept for block in self.blocks))
        total = add_terms(total, *(end.kept for end in self.ends.values()), self.stage_ends(1))
        return add_terms(total, self.held_mask)

    def variables(self, number: int) -> int:
        """Bytes that variables of a model hold while block `number` goes forward: Hugging Face's embeddings, our labels."""
        run = self.run
        if run.cp > 1 and run.implementation.eager and not run.implementation.holds_variables:
            # Labels are cut before, and positions for the rotary tables; learned ones are kept.
            positions = 0 if run.model.learned_positions else run.seq // run.cp
            return (run.micro_batch * run.seq // run.cp + positions) * INT64
        if not self.run.implementation.holds_variables or not self.stage.is_first:
            return 0
        x = self.blocks[0].tape.inputs[0]
        if self.run.model.learned_positions:
            return x.bytes + x.bytes // self.run.micro_batch  # of tokens, and of positions
        return x.bytes if number and x.name not in self.blocks[0].kept_names else 0

    @property
    def batch(self) -> int:
        """Bytes of the token ids of a step, which are there from its begin to its end."""
        micro_batches = self.run.num_microbatches if self.run.pp > 1 else 1
        return (micro_batches or 0) * self.fixed.get(TOKENS, 0)

    def received(self, number: int) -> int:
        """Bytes of the gradient that a pipeline's runtime holds in block `number`, if its own tape has it not."""
        layer = self.stage.layers[number]
        last = next(chunk[-1] for chunk in self.stage.chunks if layer in chunk)
        return self.block(last).received if layer != last and last in self.receives else 0

    @property
    def tied_table(self) -> int:
        """Bytes of a gradient of the table that the embedding and the head of this stage share, if it is trained."""
        shared = self.run.model.tied and self.stage.is_first and self.stage.is_last
        return self.reduction.table_bytes if shared and self.run.tuning == "full" else 0

    @property
    def sums_tables_anew(self) -> bool:
        """Whether the two gradients of a tied table have a sum of its own.

        The head's waits. In eager PyTorch it is a transposed view, to which autograd does not add. Behind the backward of
        autocast's cast it is a tensor of its own, and so is what the matrix of a hand-written function returns.
        """
        casts = "weight_casts" in self.ends["head"].tape.kinds.values()
        return self.out_of_place or (self.run.implementation.eager and not casts)

    @cached_property
    def attention_mask(self) -> Terms:
        """Hugging Face's mask: of numbers for each sequence, or a window's of bools for all, which is the fused kernel's."""
        run = self.run
        if run.attention == "fused":
            windowed = run.implementation.masks_window(run.model, run.seq)
            return {"attention_mask": run.seq * run.seq} if windowed else {}
        if not run.implementation.shares_mask:
            return {}
        value = run_setting(run, 0).value
        return {"attention_mask": run.micro_batch * run.seq * run.seq * value}

    @property
    def held_mask(self) -> Terms:
        """The mask where checkpoints hold it, as an argument of every block."""
        return self.attention_mask if self.run.recompute == "full" else {}

    def stage_ends(self, count: int) -> Terms:
        """Return what a stage of a pipeline holds of so many micro-batches: its output, and its input if no block keeps it."""
        terms = {}
        # Without blocks it is the embedding alone, or the head.
        first = self.blocks[0] if self.blocks else next(iter(self.ends.values()))
        alone = self.stage.is_first and not self.blocks
        stream = (first.tape.operators[-1].outputs if alone else first.tape.inputs)[0]
        if not self.stage.is_last and self.run.implementation.keeps_stage_outputs:
            terms["stage_outputs"] = count * stream.bytes
        if not self.stage.is_first and stream.name not in first.kept_names:
            terms["stage_inputs"] = count * stream.bytes
        return terms


def _fullest(name: str, phase: str, block: int | None, *found: tuple[dict[str, int], str]) -> MemoryInstant:
    terms, at = max(found, key=lambda pair: sum(pair[0].values()))
    return MemoryInstant(name, phase, block, listed(terms), at)
