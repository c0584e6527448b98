"""Gradients, unsharded weights and temporaries of a training step: data parallelism and the optimizer, term by term.

Gradients are made block by block in backward. What happens then:

    one rank         they stay until the optimizer has used them
    DDP              they stay, and its buckets are a second copy unless they live in there
    ZeRO 1, 2        buckets travel; stage 2 keeps a shard of each block's gradients
    ZeRO 3, FSDP2    a block's gradients are copied into the buffer of a reduce-scatter, whose output is the shard,
                     or is cast to it where the policy reduces in another dtype than that of the shards.
                     FSDP2 keeps that buffer until the next block's turn, and the root's gradients until the end.

The optimizer (`optimizer_terms`), in PyTorch's three implementations of AdamW: "foreach" takes the square root of all
variances at once, a temporary as large as one moment; "for-loop" does so for one tensor, in two steps; "fused" needs
nothing. With an fp32 master copy of the weights all three need fp32 gradients, which replace those in 16 bits.

Source: torch/optim/adamw.py and adam.py; torch/distributed/fsdp/_fully_shard; torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from lablib.calc.memory.formulas import all_reduces, fullest_part, weights_are_sharded
from lablib.calc.memory.stage import Stage, in_order, shard_params, unit_shapes
from lablib.calc.parallel import Unit, gathered_timeline, padded, shard_size

FP32 = 4
Terms = Mapping[str, int]  # name of a term -> bytes


@dataclass(frozen=True)
class GradientState:
    """Gradients of parameters during backward, in bytes.

    Attributes:
        accumulated: Those that are where the optimizer will find them.
        root_unsharded: Of FSDP2's root: whole until the end of backward.
        reduce_buffer: Of FSDP2's last reduce-scatter, which is there until the next one.
        all_reduced: Shards in the dtype of the reduction that replicas have summed, which FSDP2 holds until backward ends.
    """

    accumulated: int = 0
    root_unsharded: int = 0
    reduce_buffer: int = 0
    all_reduced: int = 0


def make_reduction(stage: Stage, states: Terms, buffers: Terms, accumulates: bool) -> Reduction:
    """Return how this run's gradients come and go.

    Args:
        states: What a rank has of states on its device, by term.
        buffers: Buffers of a rank by term, as `rank_buffers` counts them.
        accumulates: Whether gradients of an earlier micro-batch are there.
    """
    if stage.run.implementation.accumulates_in_kernel and stage.run.tuning == "full":
        return MegatronReduction(stage, states, buffers, accumulates)
    return (Fsdp2Reduction if stage.run.sharding == "fsdp2" else Reduction)(stage, states, buffers, accumulates)


class Reduction:
    """Gradients of replicas, or of ZeRO over flat arrays. Its methods answer, and change nothing.

    Attributes:
        gradient_bytes: Bytes of a gradient as backward leaves it.
        accumulates_in_place: Whether gradients are there before backward, so that new ones are added and go.
        persistent_terms: What is there at all times, by term.
        table_bytes: Bytes of the gradient of the token table.
    """

    def __init__(self, stage: Stage, states: Terms, buffers: Terms, accumulates: bool) -> None:
        self.run = run = stage.run
        self.ranks = run.replicas(False)
        self.gradient_bytes = run.recipe.gradients
        self.on_host = run.offload in ("gradients", "parameters")
        self.shards_gradients = (run.zero >= 2 and self.ranks > 1) or self.on_host
        self.accumulates_in_place = accumulates and not self.shards_gradients
        self.all_gradients = states.get("gradients", 0)
        self.buckets = buffers.get("communication_buckets", 0)
        self.unsharded = {name: buffers.get(name, 0) for name in ("gathered_weights", "dequantized_weights")}
        self.table_bytes = -(-run.model.vocab // run.tp) * run.model.hidden * self.gradient_bytes
        self.persistent_terms: dict[str, int] = {}
        if buffers.get("rotary_tables"):
            self.persistent_terms["rotary_tables"] = buffers["rotary_tables"]
        if all_reduces(run) and not self.on_host:
            # DDP makes its buckets once, and they stay.
            self.persistent_terms["gradient_buckets"] = self.buckets
            self.buckets = 0
            if run.gradient_as_bucket_view and self.ranks > 1:
                self.accumulates_in_place = True
        if self.accumulates_in_place or (accumulates and not self.on_host):
            self.persistent_terms["gradients"] = self.all_gradients
        #: Whether all gradients are there before backward, which adds to them.
        self.gradients_exist = bool(self.persistent_terms.get("gradients")) or self.on_host

    def unsharded_weights(self, unit: str, phase: str, event: str = "compute") -> Terms:
        """Return weights that are unsharded for a while."""
        return self.unsharded

    def backward_terms(self, unit: str | None, state: GradientState, now: int) -> Terms:
        """Return gradients of parameters during the backward of a unit.

        Args:
            now: Bytes that the unit has made so far.
        """
        if self.shards_gradients:
            return {
                "unsharded_gradients": now,
                "communication_buckets": self._in_buckets,
                "gradients": state.accumulated,
            }
        if self.run.zero and self.ranks > 1:
            return {"gradients": now + state.accumulated, "communication_buckets": self._in_buckets}
        return {"gradients": now + state.accumulated}

    @property
    def _in_buckets(self) -> int:
        return 0 if weights_are_sharded(self.run) else self.buckets

    def after_unit(self, unit: str | None, state: GradientState, size: int) -> GradientState:
        """Return what has been made when a unit's backward has ended, which made gradients of `size` bytes."""
        if self.gradients_exist:
            return state
        return replace(
            state, accumulated=state.accumulated + (shard_size(size, self.ranks) if self.shards_gradients else size)
        )

    def reduction_terms(self, unit: str, state: GradientState, size: int) -> Terms:
        """Return what the reduction of a unit ("" for the ends) holds when its backward has ended."""
        if unit or self.ranks == 1:
            return {}
        return {"gradients": state.accumulated, "communication_buckets": self._in_buckets}

    def cast_terms(self, unit: str, state: GradientState) -> Terms:
        """Return what the cast of a unit's reduced gradients holds; nothing where they are not cast."""
        return {}


class MegatronReduction(Reduction):
    """Gradients of Megatron-LM: one buffer in the dtype of the accumulation, there from the first step on.

    Matrices add to it themselves. Embeddings and norms make a gradient in the dtype of the weights, which a hook adds to
    it and drops. Ranks reduce the buffer in place, so there are no buckets beside it.

    Source: megatron/core/distributed, param_and_grad_buffer.py and distributed_data_parallel.py.
    """

    def __init__(self, stage: Stage, states: Terms, buffers: Terms, accumulates: bool) -> None:
        super().__init__(stage, states, buffers, accumulates)
        dummies = buffers.get("dummy_weight_gradients", 0)
        self.persistent_terms = {"gradients": self.all_gradients, "dummy_weight_gradients": dummies}
        self.gradient_bytes = self.run.recipe.weights
        self.table_bytes = -(-self.run.model.vocab // self.run.tp) * self.run.model.hidden * self.gradient_bytes
        self.accumulates_in_place, self.shards_gradients = not self.on_host, False
        self.gradients_exist = True


class Fsdp2Reduction(Reduction):
    """Gradients and unsharded weights of `fully_shard`, with one unit for each block; the root has the ends."""

    def __init__(self, stage: Stage, states: Terms, buffers: Terms, accumulates: bool) -> None:
        super().__init__(stage, states, buffers, accumulates)
        run = self.run
        self.gradient_bytes = run.recipe.gathered
        self.shards_gradients, self.accumulates_in_place = True, False
        self.table_bytes = -(-run.model.vocab // run.tp) * run.model.hidden * self.gradient_bytes
        self.units = {unit.name: unit for unit in _fsdp2_units(stage)}
        self.held: dict[tuple[str, str, str], Terms] = {}
        for instant in gathered_timeline(
            list(self.units.values()),
            self.ranks,
            reshard=run.zero == 3,
            prefetch=run.prefetch or None,
            param_bytes=run.recipe.gathered,
            torch=run.torch,
        ):
            held = {"gathered_weights": instant.params, "all_gather_buffers": instant.buffers}
            self.held[instant.phase, instant.unit, instant.event] = held

    def unsharded_weights(self, unit: str, phase: str, event: str = "compute") -> Terms:
        """Return unsharded weights and the buffers of all-gathers; see the base class."""
        if phase == "end":
            return {"gathered_weights": self._unit_bytes("")}
        if phase in ("head", "loss"):
            # Hugging Face's loss is inside of the root's forward, too.
            inside = phase == "head" or self.run.implementation.loss_in_root
            phase, event = "forward", "compute" if inside else "release"
        elif not unit and phase == "forward":
            event = "copy"
        held = self.held.get((phase, unit, event), {})
        if unit and phase == "forward" and event == "copy":
            arriving = self._unit_bytes(unit)
            return {
                **held,
                "arriving_weights": arriving,
                "gathered_weights": held.get("gathered_weights", 0) - arriving,
            }
        return held

    def _unit_bytes(self, unit: str) -> int:
        u = self.units[unit]
        return padded(u.shapes + u.frozen, self.ranks) * self.run.recipe.gathered

    def backward_terms(self, unit: str | None, state: GradientState, now: int) -> Terms:
        """Return sharded and unsharded gradients and the buffer of the last reduce-scatter; see the base class."""
        return {
            "gradients": state.accumulated,
            "unsharded_gradients": now if unit else 0,
            "root_gradients": state.root_unsharded + (0 if unit else now),
            "reduce_scatter_buffers": state.reduce_buffer,
            "reduced_shards": state.all_reduced,
        }

    def after_unit(self, unit: str | None, state: GradientState, size: int) -> GradientState:
        """Return what has been made when a unit's backward has ended; the root's gradients wait."""
        if unit is None:
            return replace(state, root_unsharded=state.root_unsharded + size)
        added = bool(self.persistent_terms.get("gradients"))
        new = 0 if added else self._shard(unit)
        # What replicas summed is the gradient itself, unless it is cast or added to an earlier micro-batch's.
        held = self._buffer(unit) // self.ranks if self.run.shard and (self._casts or added) else 0
        return GradientState(
            state.accumulated + new, state.root_unsharded, self._buffer(unit), state.all_reduced + held
        )

    def reduction_terms(self, unit: str, state: GradientState, size: int) -> Terms:
        """Return what the reduce-scatter of a unit holds: its gradients and the buffer that they are copied into."""
        return self._behind(unit, state, "unsharded_gradients", size if unit else state.root_unsharded)

    def cast_terms(self, unit: str, state: GradientState) -> Terms:
        """Return what the cast of a reduced shard holds: the buffer, the shard, and the shard in the dtype of the weights."""
        if not self._casts:
            return {}
        return self._behind(unit, state, "reduced_shards", self._buffer(unit) // self.ranks + self._shard(unit))

    @property
    def _casts(self) -> bool:
        """Whether a reduced shard is cast to the dtype of the weights, and is not the gradient itself."""
        return self.run.reduced_bytes != self.run.recipe.gradients

    def _behind(self, unit: str, state: GradientState, name: str, size: int) -> Terms:
        terms = {
            **(self.held.get(("backward", unit, "release"), {}) if unit else {}),
            "gradients": state.accumulated,
            "root_gradients": state.root_unsharded if unit else 0,
            "reduce_scatter_buffers": self._buffer(unit),
            "reduced_shards": state.all_reduced,
        }
        terms[name] = terms.get(name, 0) + size
        return {term: size for term, size in terms.items() if size}

    def _buffer(self, unit: str) -> int:
        return padded(self.units[unit].shapes, self.ranks) * self.run.reduced_bytes

    def _shard(self, unit: str) -> int:
        return padded(self.units[unit].shapes, self.ranks) // self.ranks * self.run.recipe.gradients


def _fsdp2_units(stage: Stage) -> list[Unit]:
    """The root, which has the ends and no name, and "block 0", "block 1", ..."""
    ends = [tensor for kind in ("embedding", "head") for tensor in stage.tensors.get(kind, ())]
    trained, frozen = unit_shapes(stage.run, ends)
    units = [Unit(name="", shapes=tuple(trained), frozen=tuple(frozen))]
    shapes = {kind: unit_shapes(stage.run, stage.tensors[kind]) for kind in set(stage.blocks)}
    for number, kind in enumerate(stage.blocks):
        trained, frozen = shapes[kind]
        units.append(Unit(name=f"block {number}", shapes=tuple(trained), frozen=tuple(frozen)))
    return units


def optimizer_terms(stage: Stage, states: Terms, step: str, reduction: Reduction) -> dict[str, int]:
    """Return gradients and temporaries during the optimizer's step."""
    run, recipe = stage.run, stage.run.recipe
    gradients = 0 if reduction.on_host else reduction.all_gradients
    terms = {"gradients": gradients}
    if run.offload != "none":
        return terms
    terms["gradient_copy"] = states.get("gradient_copy", 0)
    if run.sharding == "fsdp2":
        sizes = [shard_params([shape], reduction.ranks) for shape in stage.trained_shapes]
        params = sum(sizes)
    else:
        params = sum(stage.total_params["trained", expert] for expert in (False, True))
        params = shard_size(params, 1 if all_reduces(run) else reduction.ranks)
        sizes = stage.trained_sizes
        if step == "for-loop":
            sizes = [min(size, params) for size in sizes]
    groups = optimizer_groups(stage)
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
        before_step = {**terms, **_converting(sizes, recipe.gradients, terms["gradients"])}
        before_step["optimizer_temporaries"] = 0
        return max(terms, before_step, key=lambda found: sum(found.values()))
    return terms


def optimizer_groups(stage: Stage) -> list[list[int]]:
    """Return the sizes of the tensors that one call of the optimizer updates together; nothing where that is all.

    `ZeroRedundancyOptimizer` updates the rank's own part. PyTorch's tensor parallelism leaves split and unsplit
    tensors, which foreach and fused kernels take in separate groups only; with FSDP2 all of them are split.
    """
    run = stage.run
    if run.sharding == "per-tensor":
        return [fullest_part(stage)]
    if run.tp == 1 or not run.implementation.eager or run.sharding == "fsdp2":
        return []
    groups = []
    for split in (True, False):
        found = {k: in_order(run, [t for t in ts if bool(t.split) == split]) for k, ts in stage.tensors.items()}
        groups.append([prod(shape) for kind in stage.units for shape in found[kind]])
    return groups


def _converting(sizes: Sequence[int], low: int, rest: int) -> dict[str, int]:
    """Gradients at the fullest instant of their conversion to fp32: one tensor at a time, in the model's order."""
    made, left = 0, sum(sizes)
    found: list[tuple[int, int]] = []
    for size in sizes:
        made += FP32 * size
        found.append((made, low * left))
        left -= size
    made, waiting = max(found, key=sum, default=(0, 0))
    return {"master_gradients": made, "gradients": rest + waiting}
