"""The memory of a layout, term by term: the sums of `training_memory`, arranged for many layouts at a time.

They order and prune. No instant of a step looks like a sum, so a plan names no layout by it: `peak` judges.

Where the layers divide evenly this is `training_memory` with `gradient_as_bucket_view` and one unit of prefetch; a
test holds the two together. It also takes the uneven first and last chunk of `chunk_layers`.
"""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.time import Workload, cached_by
from lablib.calc.memory import find_implementation
from lablib.calc.memory.activations import embedding_activations, head_activations, layer_activations
from lablib.calc.parallel import shard_size
from lablib.calc.schedules import in_flight
from lablib.calc.units import MiB

TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "gradient_copy",
    "activations",
    "gathered_weights",
    "communication_buckets",
    "recomputed_layer",
)
BUCKET = 25 * MiB
PREFETCH = 1
#: What is not on the GPU.
ON_CPU = {
    "none": (),
    "optimizer": ("optimizer", "gradient_copy"),
    "gradients": ("gradients", "optimizer", "gradient_copy"),
}
ON_CPU["parameters"] = ("weights", *ON_CPU["gradients"])


def layout_memory(load: Workload, layout: Layout) -> dict[str, int]:
    """Return the bytes of a rank by term, on the pipeline stage that needs most.

    Args:
        layout: A layout that `check_layout` accepts.
    """
    states, kept = state_memory(load, layout, layout.zero), activation_memory(load, layout, layout.recompute)
    worst = max(range(len(states)), key=lambda i: sum(states[i].values()) + kept[i])
    everything, stored = (block_activations(load, layout, mode) for mode in ("none", layout.recompute))
    again = [a - b for a, b in zip(everything, stored, strict=True)]
    return states[worst] | {"activations": kept[worst], "recomputed_layer": max(0, *again)}


def sampled_stages(pp: int) -> list[int]:
    """Return the stages of which one needs most: the first two and the last, since those between need ever less."""
    return sorted({0, min(1, pp - 1), pp - 1})


@cached_by("tp", "ep", "etp", "dp", "cp", "pp", "virtual_stages", "shard")
def state_memory(load: Workload, layout: Layout, zero: int) -> list[dict[str, int]]:
    """Return the bytes of states and of buffers for weights and gradients, for each of `sampled_stages`."""
    return [_states(load, layout, stage, zero) for stage in sampled_stages(layout.pp)]


def _states(load: Workload, layout: Layout, stage: int, zero: int) -> dict[str, int]:
    dtypes, training = load.recipe, load.training
    terms = dict.fromkeys(TERMS, 0)
    ranks = layout.shards
    sharded_weights = zero == 3 or (zero == 2 and dtypes.casts_when_gathered)
    here, trained = load.stage_params(layout, stage), load.stage_params(layout, stage, trained=True)
    for params, updated, copies in zip(here, trained, (ranks, layout.expert_shards), strict=True):
        stored = shard_size(params, copies) if sharded_weights else params
        own = shard_size(updated, copies)
        # Of frozen weights the least: NF4 codes are half a byte.
        terms["weights"] += stored // 2 if training.tuning == "qlora" else stored * dtypes.weights
        terms["gradients"] += (own if zero >= 2 else updated) * (dtypes.gradients + dtypes.accumulation)
        held = own if zero else updated
        terms["optimizer"] += held * dtypes.master
        terms["gradient_copy"] += held * dtypes.gradient_copy
        terms["optimizer"] += sum(training.optimizer.moment_bytes(held, dtypes.moment).values())
    terms |= dict.fromkeys(ON_CPU[training.offload], 0)
    # One rank alone gathers and sends nothing, but for a copy in another dtype.
    shared, experts = ranks > 1, layout.expert_shards > 1
    casts = dtypes.casts_when_gathered
    if sharded_weights or casts:
        units = _largest_units(load, layout, stage)
        gathered = [u[0] * (shared or casts) + u[1] * (experts or casts) for u in units]
        everything = sum(here) if zero == 2 and casts else sum(sorted(gathered)[-1 - PREFETCH :])
        terms["gathered_weights"] = everything * dtypes.gathered if training.tuning != "qlora" else 0
    if sharded_weights:
        terms["communication_buckets"] = max(u[0] * shared + u[1] * experts for u in units) * dtypes.reduced()
    elif zero:
        sent = (here[0] * shared + here[1] * experts) * dtypes.reduced()
        terms["communication_buckets"] = min(2 * BUCKET, sent)
    return terms


def _largest_units(load: Workload, layout: Layout, stage: int) -> list[tuple[int, int]]:
    """Parameters of what is gathered at a time: embedding, head, and as many blocks as can be there at once."""
    parts = load.params(layout)
    dense, sparse = load.stages(layout)[stage]
    units = [parts["first"]] * min(dense, 1 + PREFETCH) + [parts["last"]] * min(sparse, 1 + PREFETCH)
    if stage == 0:
        units.append(parts["embedding"])
    if stage == layout.pp - 1:
        copy = parts["copy"] if layout.pp > 1 else (0, 0)
        units.append((parts["head"][0] + copy[0], parts["head"][1] + copy[1]))
    return units or [(0, 0)]


def activation_memory(load: Workload, layout: Layout, recompute: str, implementation: str = "paper") -> list[int]:
    """Return the bytes kept from forward to backward for each of `sampled_stages`."""
    m = layout.num_microbatches(load.global_batch)
    if layout.schedule != "gpipe":
        m = min(m, 2 * layout.pp)  # more are never in flight
    return _activations(load, layout, m, recompute, implementation)


@cached_by("tp", "cp", "micro_batch", "pp", "virtual_stages", "schedule")
def _activations(load: Workload, layout: Layout, m: int, recompute: str, implementation: str) -> list[int]:
    dense, sparse = block_activations(load, layout, recompute, implementation)
    embedding, head = _end_activations(load, layout, implementation)
    return [
        plain * dense + experts * sparse + first * embedding + last * head
        for plain, experts, first, last in _held(load, layout, m)
    ]


@cached_by("pp", "virtual_stages", "schedule")
def _held(load: Workload, layout: Layout, m: int) -> list[tuple[int, int, int, int]]:
    """Held by each sampled stage: layers times micro-batches, without and with experts, and of the two ends."""
    found = []
    for stage in sampled_stages(layout.pp):
        counts = in_flight(layout.schedule, stage, layout.pp, virtual_stages=layout.virtual_stages, num_microbatches=m)
        chunks = load.chunks(layout)[stage]
        plain, experts = (sum(n * chunk[i] for n, chunk in zip(counts, chunks, strict=True)) for i in (0, 1))
        first = counts[0] if stage == 0 else 0
        found.append((plain, experts, first, counts[-1] if stage == layout.pp - 1 else 0))
    return found


@cached_by("tp", "cp", "micro_batch")
def block_activations(load: Workload, layout: Layout, recompute: str, implementation: str = "paper") -> tuple[int, int]:
    """Return what the first layer keeps of a micro-batch, and the last, which has experts if any has."""
    one = _one_sequence(layout, implementation)
    if one is not None:
        first, last = block_activations(load, one, recompute, implementation)
        return layout.micro_batch * first, layout.micro_batch * last
    how = _sizes(load, layout, implementation) | {"attention": load.attention, "recompute": recompute}
    kinds = (0, load.model.num_layers - 1) if load.model.is_moe else (0,)
    sizes = [sum(layer_activations(load.model, layer=layer, **how).values()) for layer in kinds]
    return sizes[0], sizes[-1]


@cached_by("tp", "cp", "micro_batch")
def _end_activations(load: Workload, layout: Layout, implementation: str) -> tuple[int, int]:
    one = _one_sequence(layout, implementation)
    if one is not None:
        embedding, head = _end_activations(load, one, implementation)
        return layout.micro_batch * embedding, layout.micro_batch * head
    sizes = _sizes(load, layout, implementation)
    embedding, head = embedding_activations(load.model, **sizes), head_activations(load.model, **sizes)
    return sum(embedding.values()), sum(head.values())


def _one_sequence(layout: Layout, implementation: str) -> Layout | None:
    """Return the layout with micro-batches of one sequence, if what is kept is proportional to them: papers count so."""
    proportional = not find_implementation(implementation).eager
    return replace(layout, micro_batch=1) if proportional and layout.micro_batch > 1 else None


def _sizes(load: Workload, layout: Layout, implementation: str) -> dict[str, object]:
    return {
        "batch": layout.micro_batch,
        "seq": load.seq,
        "tp": layout.tp,
        "cp": layout.cp,
        "cp_way": load.cp_way,
        "sequence_parallel": load.sequence_parallel and layout.tp > 1,
        "bytes_per_value": load.recipe.activation,
        "implementation": implementation,
    }
