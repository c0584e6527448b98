"""One pipeline stage of a run, derived once: its layers, tensors, parameters, and micro-batches in flight.

The parameters of a rank come in units: the embedding, each block, the head. A unit is what FSDP gathers at a time.
Units of one kind are equal: "embedding", "block", "block with experts" and "head". In a unit each parameter is trained,
frozen (LoRA) or quantized (QLoRA), and belongs to a routed expert or not. Read `Stage` first.

The functions above it give the shapes of tensors as FSDP2 and the optimizer meet them. A tensor of 10 x 3 on 4 ranks:
each keeps ceil(10 / 4) = 3 rows, and the last one has 1. ZeRO's one flat array would give ceil(30 / 4) = 8 numbers to
each. Sums over a model differ by a row a tensor at most, and states are exact only if it is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from types import MappingProxyType

from lablib.calc.memory.config import RunConfig
from lablib.calc.models import Tensor, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.parallel import Shape, padded
from lablib.calc.schedules import in_flight, layers_of_stage


def tensor_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of a rank's tensors, one entry for each copy, before data parallelism shards them.

    Some of Hugging Face's classes keep q, k and v in one tensor, or gate and up; GPT-2's have inputs first. Experts are
    the rows of two tensors of three dims, whose first is the number of experts.
    """
    shapes: list[Shape] = []
    implementation, model = run.implementation, run.model
    for tensor in tensors:
        outputs, inputs = tensor.local_shape(run.tp, run.etp)
        copies, of = tensor.local_copies(run.ep), tensor.component
        if of == "attention" and tensor.split == "outputs" and model.family in implementation.joined_qkv:
            if copies == 2:
                continue  # k and v, which come with q
            outputs += 2 * model.kv_width // run.tp
        elif of == "mlp" and tensor.split == "outputs" and model.family in implementation.joined_gate:
            outputs, copies = outputs * copies, 1
        elif tensor.is_expert and model.family in implementation.joined_experts:
            shapes.append((model.num_experts, outputs * copies // model.num_experts, inputs))
            continue
        shape = (outputs, inputs) if tensor.inputs > 1 else (outputs,)
        turned = of in ("attention", "mlp") and model.family in implementation.inputs_first
        shapes += [shape[::-1] if turned else shape] * copies
    return shapes


def adapter_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of the adapters of these tensors: A is (r, inputs), B is (outputs, r)."""
    if run.tuning == "full":
        return []
    shapes: list[Shape] = []
    for tensor in tensors:
        if tensor.is_adapted and run.lora_targets in ("all", tensor.component):
            outputs, inputs = tensor.local_shape(run.tp, run.etp)
            shapes += [(run.lora_rank, inputs), (outputs, run.lora_rank)] * tensor.local_copies(run.ep)
    return shapes


def unit_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes of trained and of frozen tensors."""
    full = tensor_shapes(run, tensors)
    return (full, []) if run.tuning == "full" else (adapter_shapes(run, tensors), full)


def joined_shapes(run: RunConfig, tensors: Iterable[Tensor]) -> set[Shape]:
    """Return the shapes of a block's matrices where those that read the same input are one: q, k and v; gate and up."""
    rows: Counter[tuple[str, int, int]] = Counter()
    for number, tensor in enumerate(tensors):
        if tensor.inputs == 1 or tensor.component == "router":
            continue
        outputs, inputs = tensor.local_shape(run.tp, run.etp)
        own = 0 if tensor.split == "outputs" else number  # a latent's matrices stay apart
        copies = tensor.copies // (run.model.num_experts if tensor.is_expert else 1)
        rows[tensor.component, inputs, own] += outputs * copies
    return {(outputs, inputs) for (_, inputs, _), outputs in rows.items()}


def shard_params(shapes: Iterable[Shape], ranks: int) -> int:
    """Return the parameters that rank 0 keeps: `Σ ceil(rows / ranks) · row`."""
    return padded(list(shapes), ranks) // ranks


def in_order(run: RunConfig, tensors: Iterable[Tensor]) -> list[Shape]:
    """Return the shapes of trained tensors in the order in which a model registers them, which is the optimizer's.

    Ours and GPT-2's blocks begin with a norm; in Hugging Face's Llama both norms come behind the MLP. A bias follows
    its matrix.
    """
    tensors = list(tensors)
    norms = unit_shapes(run, [t for t in tensors if "norm" in t.component])[0]
    attention = _with_biases(unit_shapes(run, [t for t in tensors if t.component == "attention"])[0])
    others = [t for t in tensors if "norm" not in t.component and t.component != "attention"]
    if run.model.family in run.implementation.router_last:
        others.sort(key=lambda tensor: tensor.component == "router")
    rest = _with_biases(unit_shapes(run, others)[0])
    if run.model.family in run.implementation.norms_last:
        return attention + rest + norms
    half = len(norms) // 2
    return norms[:half] + attention + norms[half:] + rest


def _with_biases(shapes: list[Shape]) -> list[Shape]:
    biases = [shape for shape in shapes if len(shape) == 1]
    ordered: list[Shape] = []
    for shape in shapes:
        if len(shape) > 1:
            ordered.append(shape)
            mine = next((bias for bias in biases if bias[0] in shape), None)
            if mine:
                biases.remove(mine)
                ordered.append(mine)
    return ordered + biases


Params = Mapping[
    tuple[str, bool], int
]  # ("trained", "frozen" or "quantized"; of an expert) -> parameters; 0 if missing


@dataclass(frozen=True)
class Stage:
    """One stage of a run, from 0."""

    run: RunConfig
    number: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.number == self.run.pp - 1

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """Its layers, chunk by chunk."""
        run = self.run
        return tuple(
            layers_of_stage(run.model.num_layers, run.pp, run.virtual_stages, run.layers_per_stage, self.number)
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its layers."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches that each chunk holds at the stage's peak."""
        run = self.run
        return tuple(
            in_flight(
                run.schedule,
                self.number,
                run.pp,
                virtual_stages=run.virtual_stages,
                num_microbatches=run.num_microbatches,
            )
        )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The kind of each block."""
        experts = self.run.model.has_experts
        return tuple("block with experts" if experts(layer) else "block" for layer in self.layers)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The kind of each unit: embedding on the first stage, blocks, head on the last."""
        return ("embedding",) * self.is_first + self.blocks + ("head",) * self.is_last

    @cached_property
    def count(self) -> Mapping[str, int]:
        """Number of units of each kind."""
        return MappingProxyType(Counter(self.units))

    @cached_property
    def tensors(self) -> Mapping[str, tuple[Tensor, ...]]:
        """The tensors of a unit of each kind.

        With tied embeddings and several stages the last stage holds a copy of the token table, as Megatron-LM does.
        """
        config = self.run.model
        one_of_each = dict(zip(self.blocks, self.layers, strict=True))
        found = {kind: tuple(layer_tensors(config, layer)) for kind, layer in one_of_each.items()}
        if self.is_first:
            # Hugging Face's plan splits the head's vocabulary, and not the embedding's.
            unsplit = self.run.implementation.eager
            table = embedding_tensors(config)
            found["embedding"] = tuple(replace(t, split="") if unsplit else t for t in table)
        if self.is_last:
            copy = embedding_tensors(config)[:1] if config.tied and self.run.pp > 1 else []
            found["head"] = (*head_tensors(config), *copy)
        return MappingProxyType({kind: found[kind] for kind in self.count})

    @cached_property
    def params(self) -> Mapping[str, Params]:
        """The parameters of a unit of each kind on this rank."""
        return MappingProxyType({kind: _params(self.run, tensors) for kind, tensors in self.tensors.items()})

    @cached_property
    def total_params(self) -> Params:
        """The parameters of all units together on this rank."""
        total: Counter[tuple[str, bool]] = Counter()
        for kind, params in self.params.items():
            for key, number in params.items():
                total[key] += self.count[kind] * number
        return MappingProxyType(total)

    @cached_property
    def trained_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the trained tensors, in the order in which the optimizer has them."""
        shapes = {kind: in_order(self.run, tensors) for kind, tensors in self.tensors.items()}
        return tuple(shape for kind in self.units for shape in shapes[kind])

    @cached_property
    def trained_sizes(self) -> tuple[int, ...]:
        """Numbers of elements of the trained tensors, in that order."""
        sizes = {kind: [prod(shape) for shape in in_order(self.run, each)] for kind, each in self.tensors.items()}
        return tuple(chain.from_iterable(sizes[kind] for kind in self.units))

    def sizes(self, kind: str, expert: bool) -> tuple[int, ...]:
        """Return the numbers of elements of tensors, one by one.

        Args:
            kind: "trained" or "quantized".
            expert: Whether of routed experts.
        """
        found: list[int] = []
        for unit, tensors in self.tensors.items():
            chosen = [tensor for tensor in tensors if tensor.is_expert == expert]
            if kind == "quantized":
                chosen = [tensor for tensor in chosen if tensor.is_adapted]
                shapes = tensor_shapes(self.run, chosen) if self.run.tuning == "qlora" else []
            else:
                shapes = unit_shapes(self.run, chosen)[0]
            found += [prod(shape) for shape in shapes] * self.count[unit]
        return tuple(found)


def _params(run: RunConfig, tensors: tuple[Tensor, ...]) -> Params:
    params: Counter[tuple[str, bool]] = Counter()
    for tensor in tensors:
        number = tensor.local_params(run.tp, run.ep, run.etp)
        if run.tuning == "full":
            params["trained", tensor.is_expert] += number
            continue
        kind = "quantized" if run.tuning == "qlora" and tensor.is_adapted else "frozen"
        params[kind, tensor.is_expert] += number
        if tensor.is_adapted and run.lora_targets in ("all", tensor.component):
            params["trained", tensor.is_expert] += tensor.adapter_params(run.lora_rank, run.tp, run.ep, run.etp)
    return MappingProxyType(params)
