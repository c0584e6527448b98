"""What data parallelism and the optimizer hold for a moment of a training step, by named term.

Gradients are made block by block in backward. What happens then:

    one rank         they stay until the optimizer has used them
    DDP              they stay, and its buckets are a second copy unless they live in there
    ZeRO 1, 2        buckets travel; stage 2 keeps a shard of each block's gradients
    ZeRO 3, FSDP2    a block's gradients are copied into the buffer of a reduce-scatter, whose output is the shard.
                     FSDP2 keeps that buffer until the next block's turn, and the root's gradients until the end.

The optimizer (`optimizer_terms`), in PyTorch's three implementations of AdamW: "foreach" takes the square root of all
variances at once, a temporary as large as one moment; "for-loop" does so for one tensor, in two steps; "fused" needs
nothing. With an fp32 master copy of the weights all three need fp32 gradients, which replace those in 16 bits.

Chapter: book/05_zero.md. Source: torch/optim/adamw.py and adam.py; torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from lablib.calc.breakdown import MemoryBreakdown
from lablib.calc.fsdp_gathered import gathered_timeline
from lablib.calc.fsdp_shards import fsdp_units, in_order, shard_params
from lablib.calc.fsdp_units import Unit, padded
from lablib.calc.optimizer_groups import optimizer_groups
from lablib.calc.rank_memory import all_reduces, unit_params, weights_are_sharded
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import Tensor
from lablib.calc.zero import shard

FP32 = 4


def split_ends(
    run: RunConfig, stage: int, tensors: list[list[Tensor]]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the tensors of the blocks, and those of embedding and head together.

    Args:
        run: The run.
        stage: Pipeline stage.
        tensors: Unit by unit, as `stage_tensors` returns them.
    """
    first, last = stage == 0, stage == run.pp - 1
    blocks = tensors[1 if first else 0 : len(tensors) - 1 if last else len(tensors)]
    ends = (tensors[0] if first else []) + (tensors[-1] if last else [])
    return blocks, ends


def make_reduction(
    run: RunConfig, stage: int, tensors: list[list[Tensor]], memory: MemoryBreakdown, several: bool
) -> Reduction:
    """Return how this run's gradients come and go.

    Args:
        run: The run.
        stage: Pipeline stage.
        tensors: Its tensors, unit by unit.
        memory: Its bytes, as `stage_memory` counts them.
        several: Whether a step has several micro-batches.
    """
    kind = Fsdp2Reduction if run.sharding == "fsdp2" else Reduction
    return kind(run, stage, tensors, memory, several)


class Reduction:
    """Gradients of replicas, or of ZeRO over flat arrays.

    Attributes:
        gradient_bytes: Bytes of a gradient as backward leaves it.
        accumulates_in_place: Whether gradients are there before backward, so that new ones are added and go.
        lasting: What is there at all times, by term.
        table_bytes: Bytes of the gradient of the token table.
    """

    def __init__(
        self, run: RunConfig, stage: int, tensors: list[list[Tensor]], memory: MemoryBreakdown, several: bool
    ) -> None:
        self.run, self.memory = run, memory
        self.blocks, self.ends = split_ends(run, stage, tensors)
        self.ranks = run.replicas(False)
        self.several = several
        self.gradient_bytes = run.recipe.gradients
        self.on_host = run.offload in ("gradients", "parameters")
        self.shards_gradients = (run.zero >= 2 and self.ranks > 1) or self.on_host
        self.accumulates_in_place = several and not self.shards_gradients
        self.all_gradients = dict(memory.state_terms).get("gradients", 0)
        buffers = dict(memory.buffer_terms)
        self.buckets = buffers.get("communication_buckets", 0)
        self.gathered_weights = buffers.get("gathered_weights", 0)
        self.dequantized = buffers.get("dequantized_weights", 0)
        self.table_bytes = -(-run.model.vocab // run.tp) * run.model.hidden * self.gradient_bytes
        self.so_far = 0
        self.lasting: Counter = Counter()
        if all_reduces(run) and not self.on_host:
            # DDP makes its buckets once, and they stay.
            self.lasting["gradient_buckets"] = self.buckets
            self.buckets = 0
            if run.gradient_as_bucket_view and self.ranks > 1:
                self.accumulates_in_place = True
        if self.accumulates_in_place or (several and not self.on_host):
            self.lasting["gradients"] = self.all_gradients

    def gathered(self, unit: str, phase: str, event: str = "compute") -> Counter:
        """Return weights that are whole for a moment.

        Args:
            unit: "" for embedding and head, or "block 3".
            phase: "forward", "head", "loss", "backward" or "end".
            event: "copy" or "compute".
        """
        return Counter(gathered_weights=self.gathered_weights, dequantized_weights=self.dequantized)

    def gradients(self, unit: str | None, now: int) -> Counter:
        """Return gradients of parameters during a piece's backward.

        Args:
            unit: The piece: None for an end, or "block 3".
            now: What the piece has made so far.
        """
        if self.shards_gradients:
            terms = Counter(unsharded_gradients=now, communication_buckets=self._in_buckets)
        elif self.run.zero and self.ranks > 1:
            terms = Counter(gradients=now, communication_buckets=self._in_buckets)
        else:
            terms = Counter(gradients=now)
        terms["gradients"] += self.so_far
        return terms

    @property
    def _in_buckets(self) -> int:
        return 0 if weights_are_sharded(self.run) else self.buckets

    def made(self, unit: str | None, size: int) -> None:
        """Say that a piece's backward has ended.

        Args:
            unit: The piece.
            size: Bytes of the gradients it made.
        """
        if self.lasting["gradients"] or self.on_host:
            return
        self.so_far += shard(size, self.ranks) if self.shards_gradients else size

    def reduced(self, unit: str, size: int) -> Counter:
        """Return what the reduction of a unit holds when its backward has ended.

        Args:
            unit: "" for embedding and head, or "block 3".
            size: Bytes of the gradients that it made.
        """
        if unit or self.ranks == 1:
            return Counter()
        return Counter(gradients=self.so_far, communication_buckets=self._in_buckets)


class Fsdp2Reduction(Reduction):
    """Gradients and gathered weights of `fully_shard`, with one unit for each block."""

    def __init__(self, *of: object) -> None:
        super().__init__(*of)  # type: ignore[arg-type]
        run = self.run
        self.gradient_bytes = run.recipe.gathered
        self.reduce_bytes = run.recipe.gradients
        self.shards_gradients, self.accumulates_in_place = True, False
        self.table_bytes = -(-run.model.vocab // run.tp) * run.model.hidden * self.gradient_bytes
        self.units: dict[str, Unit] = {u.name: u for u in fsdp_units(run, self.blocks, self.ends)}
        self.held: dict[tuple[str, str, str], Counter] = {}
        for moment in gathered_timeline(
            list(self.units.values()),
            self.ranks,
            reshard=run.zero == 3,
            prefetch=run.prefetch or None,
            param_bytes=run.recipe.gathered,
            torch=run.torch,
        ):
            self.held[moment.phase, moment.unit, moment.event] = Counter(
                gathered_weights=moment.params, all_gather_buffers=moment.buffers
            )
        self.root_gradients = self.buffer = 0

    def gathered(self, unit: str, phase: str, event: str = "compute") -> Counter:
        """Return gathered weights and the buffers of all-gathers; see the base class."""
        if phase == "end":
            return Counter(gathered_weights=self._whole(""))
        if phase in ("head", "loss"):
            inside = (
                phase == "head" or self.run.kernels == "hf"
            )  # whose loss is inside of the root's forward, too
            phase, event = "forward", "compute" if inside else "release"
        elif not unit and phase == "forward":
            event = "copy"
        found = self.held.get((phase, unit, event), Counter()).copy()
        if unit and phase == "forward" and event == "copy":
            found["arriving_weights"] = self._whole(unit)
            found["gathered_weights"] -= found["arriving_weights"]
        return found

    def _whole(self, unit: str) -> int:
        u = self.units[unit]
        return padded(u.shapes + u.frozen, self.ranks) * self.run.recipe.gathered

    def gradients(self, unit: str | None, now: int) -> Counter:
        """Return sharded and unsharded gradients and the buffer of the last reduce-scatter; see the base class."""
        return Counter(
            gradients=self.so_far,
            unsharded_gradients=now if unit else 0,
            root_gradients=self.root_gradients + (0 if unit else now),
            reduce_scatter_buffers=self.buffer,
        )

    def made(self, unit: str | None, size: int) -> None:
        """Say that a piece's backward has ended; the root's gradients wait."""
        if unit is None:
            self.root_gradients += size
            return
        self.buffer = self._buffer(unit)
        if not self.lasting["gradients"]:
            self.so_far += self._shard(unit)

    def reduced(self, unit: str, size: int) -> Counter:
        """Return what the reduce-scatter of a unit holds: its gradients and the buffer that they are copied into."""
        terms = self.held.get(("backward", unit, "release"), Counter()).copy() if unit else Counter()
        terms += Counter(
            gradients=self.so_far,
            unsharded_gradients=size if unit else self.root_gradients,
            root_gradients=self.root_gradients if unit else 0,
            reduce_scatter_buffers=self._buffer(unit),
        )
        return terms

    def _buffer(self, unit: str) -> int:
        return padded(self.units[unit].shapes, self.ranks) * self.reduce_bytes

    def _shard(self, unit: str) -> int:
        return self._buffer(unit) // self.ranks


def optimizer_terms(
    run: RunConfig, tensors: list[list[Tensor]], memory: MemoryBreakdown, step: str, reduction: Reduction
) -> Counter:
    """Return gradients and temporaries during the optimizer's step.

    Args:
        run: The run.
        tensors: The stage's tensors, unit by unit.
        memory: Its bytes.
        step: "foreach", "for-loop" or "fused".
        reduction: Of the run.
    """
    terms: Counter = Counter()
    gradients = 0 if reduction.on_host else reduction.all_gradients
    terms["gradients"] = gradients
    if run.offload != "none":
        return terms
    terms["gradient_copy"] = dict(memory.state_terms).get("gradient_copy", 0)
    shapes = [shape for unit in tensors for shape in in_order(run, unit)]
    if run.sharding == "fsdp2":
        sizes = [shard_params([shape], reduction.ranks) for shape in shapes]
        params = sum(sizes)
    else:
        params = sum(unit_params(run, unit)["trained", e] for unit in tensors for e in (False, True))
        ranks = 1 if all_reduces(run) else reduction.ranks
        params = shard(params, ranks)
        sizes = [min(prod(shape), params) for shape in shapes]
    groups = optimizer_groups(run, tensors)
    recipe = run.recipe
    in_fp32 = recipe.gradients == FP32 or recipe.accumulation or recipe.gradient_copy
    converts = bool(recipe.master) and not in_fp32
    if converts:
        terms["master_gradients"] = params * FP32
        terms["gradients"] = max(0, gradients - params * recipe.gradients)
    value = FP32 if recipe.master else recipe.moment
    rooted = "variance" in run.optimizer.moments and not run.optimizer.quantized
    if rooted and step == "foreach":
        terms["optimizer_temporaries"] = max(map(sum, groups), default=params) * value
    elif rooted and step == "for-loop":
        # The last tensor's denominator is still there when the next one's root is taken and divided.
        pairs = [pair for group in groups or [sizes] for pair in zip([0, *group], group, strict=False)]
        terms["optimizer_temporaries"] = max((last + 2 * size for last, size in pairs), default=0) * value
    if converts and sum(sizes) == params:
        moved = _converting(sizes, recipe.gradients, terms["gradients"])
        before_step = Counter({**terms, **moved, "optimizer_temporaries": 0})
        return max(terms, before_step, key=lambda found: sum(found.values()))
    return terms


def _converting(sizes: list[int], low: int, rest: int) -> dict[str, int]:
    """Gradients at the fullest moment of their conversion to fp32: one tensor at a time, in the model's order."""
    made, left = 0, sum(sizes)
    found: list[tuple[int, int]] = []
    for size in sizes:
        made += FP32 * size
        found.append((made, low * left))
        left -= size
    made, waiting = max(found, key=sum, default=(0, 0))
    return {"master_gradients": made, "gradients": rest + waiting}
