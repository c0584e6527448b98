"""The walk behind `lablib.calc.memory_timeline`: one training step of one pipeline stage, moment by moment.

A block's tape is played once and used for all blocks like it: forward adds what it keeps, backward takes it away.
What data parallelism holds beside it comes from `step_buffers`.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lablib.calc.breakdown import MemoryBreakdown
from lablib.calc.rank_memory import stage_memory, stage_tensors
from lablib.calc.run_activations import fixed_activations, gradients_meet
from lablib.calc.run_config import RunConfig
from lablib.calc.stages import in_flight, layers_of_stage
from lablib.calc.step_buffers import Reduction, make_reduction, optimizer_terms
from lablib.calc.tape_blocks import BlockSetting
from lablib.calc.tape_ends import LOSS_OPERATORS
from lablib.calc.timeline_piece import BACKWARD, FORWARD, Piece, Terms
from lablib.calc.timeline_setting import block_setting
from lablib.calc.timeline_shared import shared_piece


class Walk:
    """One step of one stage.

    Args:
        run: The run.
        stage: Pipeline stage, from 0.
        step: How the optimizer runs.
        out_of_place: Whether second gradients are added into new tensors.
        later: Whether an earlier micro-batch has left its gradients, and is no longer in flight.
    """

    def __init__(
        self, run: RunConfig, stage: int, step: str, out_of_place: bool, later: bool = False
    ) -> None:
        self.run, self.stage, self.step, self.out_of_place = run, stage, step, out_of_place
        self.chunks = layers_of_stage(
            run.model.num_layers, run.pp, run.virtual_stages, run.layers_per_stage, stage
        )
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        self.tensors = stage_tensors(run, stage, self.chunks)
        self.memory: MemoryBreakdown = stage_memory(run, stage)
        self.counts = in_flight(
            run.schedule,
            stage,
            run.pp,
            virtual_stages=run.virtual_stages,
            num_microbatches=run.num_microbatches,
        )
        if later and gradients_meet(run, stage) == "fewer":
            self.counts = [max(count - 1, 0) for count in self.counts]
        self.reduction: Reduction = make_reduction(run, stage, self.tensors, self.memory, later)
        self.first, self.last = stage == 0, stage == run.pp - 1
        #: The last layers of chunks behind which another stage comes: it sends them their gradient.
        self.receives = {c[-1] for c in self.chunks if c and c[-1] + 1 < run.model.num_layers}
        self._pieces: dict[object, Piece] = {}

    # Pieces.

    def setting(self, layer: int = 0) -> BlockSetting:
        """Return how a layer runs."""
        first = self.first and layer == self.layers[0] if self.layers else False
        return block_setting(self.run, layer, self.reduction.gradient_bytes, behind_embedding=first)

    def piece(self, which: str, layer: int = 0) -> Piece:
        """Return the tape of a block, of the head or of the embedding, and its events."""
        c = self.run.model
        key = which
        if which == "block":
            key = (which, c.has_experts(layer), layer == self.layers[0], layer in self.receives)
        if key not in self._pieces:
            holds = which == "block" and layer in self.receives
            how = (self.out_of_place, self.reduction.accumulates_in_place, holds)
            self._pieces[key] = shared_piece(which, self.setting(layer), *how)
        return self._pieces[key]

    # Moments.

    def moments(self) -> Iterator[tuple[str, str, int | None, Terms, str]]:
        """Yield (name, phase, block, terms, operator) in the order of time."""
        base = self.reduction.lasting.copy()
        base.update(self.memory_states())
        at_rest = base.copy()
        if not self.run.gradient_as_bucket_view:
            del at_rest["gradients"]
        yield "states", "states", None, +at_rest, ""
        kept = self.waiting()
        kept.update(fixed_activations(self.run, self.first))
        base["activations.tokens"] = max(self.batch(), kept.pop("activations.tokens", 0))
        ends = self.stage_ends(1)
        output = Counter(stage_outputs=ends.pop("stage_outputs", 0))
        kept.update(ends)
        if self.run.kernels == "paper":  # its tape knows no casts: they are there from forward to backward
            kept["weight_casts"] = dict(self.memory.buffer_terms).get("weight_casts", 0)
        mask = self.attention_mask()
        again = mask if self.run.recompute == "full" else Counter()  # an argument that checkpoints hold
        r = self.reduction
        blocks = [self.piece("block", layer) for layer in self.layers]

        def sum_of(*parts: Terms) -> Terms:
            total = dict(base)  # plain dictionaries: half of a walk's time would be Counter's
            for part in parts:
                for term, size in part.items():
                    total[term] = total.get(term, 0) + size
            return Counter({term: size for term, size in total.items() if size > 0})

        cached: Terms = Counter()

        def fullest(name: str, phase: str, block: int | None, *found: tuple[Terms, str]) -> tuple:
            terms, at = max(found, key=lambda pair: sum(pair[0].values()))
            return name, phase, block, terms, at

        if self.first:
            embedding = self.piece("embedding")
            at, terms, _ = embedding.fullest(FORWARD)
            yield "forward of the embedding", FORWARD, None, sum_of(kept, terms, r.gathered("", FORWARD)), at
            kept.update(embedding.kept)
        for number, block in enumerate(blocks):
            at, terms, _ = block.fullest(FORWARD)
            unit = f"block {number}"
            stream = Counter(forward_values=block.tape.inputs[0].bytes)
            outer = Counter(forward_values=self.variables(number))
            copy = r.gathered(unit, FORWARD, "copy")
            yield fullest(
                f"forward of {unit}",
                FORWARD,
                number,
                (sum_of(kept, outer, terms, mask, cached, r.gathered(unit, FORWARD)), at),
                (sum_of(kept, outer, stream, mask, cached, copy), "all-gather"),
            )
            kept.update(block.kept)
            cached["weight_casts"] += block.cached
        kept.update(output)  # a tensor of the last operator's until here
        if self.last:
            head = self.piece("head")
            found = []
            for inside in (True, False):
                # The head is inside of FSDP2's root, which still has the last block's buffers; our loss is not.
                at, terms, _ = head.fullest(FORWARD, lambda op, i=inside: (op in LOSS_OPERATORS) == i)
                gathered = r.gathered("", "loss" if inside else "head")
                found.append((sum_of(kept, again, terms, cached, gathered), at))
            yield fullest("loss", "loss", None, *found)
            found = []
            for inside in (True, False):
                # The loss goes backward before the root of FSDP2 hears of it, unless it is inside of the root.
                at, terms, weights = head.fullest(BACKWARD, lambda op, i=inside: (op in LOSS_OPERATORS) == i)
                gathered = r.gathered("", "loss" if inside and self.run.kernels != "hf" else BACKWARD)
                found.append((sum_of(kept, again, terms, gathered, r.gradients(None, weights)), at))
            yield fullest("backward of the loss", BACKWARD, None, *found)
            # The gradient of a tied table waits for the embedding's, and no parameter has it until then.
            table = self.tied_table()
            r.made(None, max(0, head.weights - table))
            kept["tied_gradient"] += table
        for number in reversed(range(len(blocks))):
            block, unit = blocks[number], f"block {number}"
            kept.subtract(block.kept)
            kept["received_gradient"] = self.received(number)
            at, terms, weights = block.fullest(BACKWARD)
            begin = (
                kept,
                block.kept,
                block.begin,
                again,
                r.gathered(unit, BACKWARD, "copy"),
                r.gradients(unit, 0),
            )
            yield fullest(
                f"backward of {unit}",
                BACKWARD,
                number,
                (sum_of(kept, terms, again, r.gathered(unit, BACKWARD), r.gradients(unit, weights)), at),
                (sum_of(kept, block.end, r.reduced(unit, block.weights)), "reduce-scatter"),
                (sum_of(*begin), "all-gather"),
            )
            r.made(unit, block.weights)
        if self.first:
            kept.subtract(embedding.kept)
            if not self.run.model.learned_positions:  # rotary tables go with the first block
                kept.subtract(fixed_activations(self.run) | {"activations.tokens": 0})
            if len(self.chunks[0]) == 1:  # the gradient from the next stage is still there
                kept["received_gradient"] = blocks[0].received
            at, terms, weights = embedding.fullest(BACKWARD)
            table = self.tied_table() if self.last else 0
            if table and at == "embedding":  # this one, and their sum where it is a third
                terms = terms + Counter(tied_gradient=(2 if self.out_of_place else 1) * table)
                terms["new_gradients"] -= table
                if self.out_of_place:  # by then what the embedding received is gone
                    del terms["activation_gradients"]
            parts = (kept, terms, r.gathered("", "end"), r.gradients(None, weights))
            yield "backward of the embedding", BACKWARD, None, sum_of(*parts), at
            r.made(None, embedding.weights)
        reduced = r.reduced("", 0)
        if reduced:
            yield "gradient reduction", "reduction", None, sum_of(reduced), "reduce-scatter"
        yield "optimizer step", "optimizer", None, self.optimizer(base), self.step

    def variables(self, number: int) -> int:
        """Bytes of embeddings that variables of Hugging Face's model hold while block `number` goes forward."""
        if self.run.kernels != "hf" or not self.first:
            return 0
        first = self.piece("block", self.layers[0])
        x = first.tape.inputs[0]
        if self.run.model.learned_positions:
            return x.bytes + x.bytes // self.run.micro_batch  # of tokens, and of positions
        return x.bytes if number and x.name not in first.kept_names else 0

    def batch(self) -> int:
        """Bytes of the token ids of a step, which are there from its begin to its end."""
        micro_batches = self.run.num_microbatches if self.run.pp > 1 else 1
        return (micro_batches or 0) * fixed_activations(self.run, self.first).get("activations.tokens", 0)

    def received(self, number: int) -> int:
        """Bytes of the gradient that a pipeline's runtime holds in block `number`, if its own tape has it not."""
        layer = self.layers[number]
        last = next(chunk[-1] for chunk in self.chunks if layer in chunk)
        return self.piece("block", last).received if layer != last and last in self.receives else 0

    def tied_table(self) -> int:
        """Bytes of a gradient of the table that the embedding and the head of this stage share, if it is trained."""
        run = self.run
        there = run.model.tied and self.first and self.last and run.tuning == "full"
        return self.reduction.table_bytes if there else 0

    def attention_mask(self) -> Terms:
        """The causal mask of Hugging Face's plain attention, one for each sequence, in the dtype of the stream."""
        run = self.run
        if run.kernels != "hf" or run.attention == "fused":
            return Counter()
        s = self.setting()
        return Counter(attention_mask=run.micro_batch * run.seq * run.seq * s.value)

    def stage_ends(self, count: int) -> Terms:
        """What a stage of a pipeline holds of so many micro-batches: its output, and its input if no block keeps it."""
        terms: Terms = Counter()
        if self.layers:
            piece = self.piece("block", self.layers[0])
        else:  # the embedding alone, or the head
            piece = self.piece("embedding" if self.first else "head")
        of = piece.tape.operators[-1].outputs if self.first and not self.layers else piece.tape.inputs
        if not self.last:
            terms["stage_outputs"] = count * of[0].bytes
        if not self.first and of[0].name not in piece.kept_names:
            terms["stage_inputs"] = count * of[0].bytes
        return terms

    def saved(self) -> Terms:
        """What is kept when forward ends, for all micro-batches in flight."""
        total = self.waiting()
        total.update(fixed_activations(self.run, self.first))
        for layer in self.layers:
            total.update(self.piece("block", layer).kept)
        for there, which in ((self.first, "embedding"), (self.last, "head")):
            if there:
                total.update(self.piece(which).kept)
        total.update(self.stage_ends(1))
        if self.run.recompute == "full":
            total.update(self.attention_mask())  # an argument of every block, which a checkpoint holds
        return total

    def memory_states(self) -> Terms:
        """States without gradients, which come and go; with several micro-batches they stay."""
        states = Counter(dict(self.memory.state_terms))
        for name in ("gradients", "gradient_copy"):
            states.pop(name, None)
        return states

    def waiting(self) -> Terms:
        """What the other micro-batches in flight keep."""
        total: Terms = Counter()
        for chunk, count in zip(self.chunks, self.counts, strict=True):
            for layer in chunk:
                for term, size in self.piece("block", layer).kept.items():
                    total[term] += max(count - 1, 0) * size
        for there, which, count in (
            (self.first, "embedding", self.counts[0]),
            (self.last, "head", self.counts[-1]),
        ):
            if there:
                for term, size in self.piece(which).kept.items():
                    total[term] += max(count - 1, 0) * size
        others = max(sum(self.counts) - 1, 0)
        for term, size in fixed_activations(self.run, self.first).items():
            total[term] += others * size
        total.update(self.stage_ends(others))
        return total

    def optimizer(self, base: Terms) -> Terms:
        """What the optimizer's step holds at its fullest."""
        terms = base.copy()
        del terms["gradients"]  # it has its own count of them
        terms.update(optimizer_terms(self.run, self.tensors, self.memory, self.step, self.reduction))
        return +terms
