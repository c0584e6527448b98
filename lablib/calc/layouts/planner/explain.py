"""The planner's answer in sentences: why a layout is first (`why_first`, `plan_reasons`), what is taken for granted (`not_modelled`).

Only what concerns the run is said. Read `plan_reasons` first.
"""

from __future__ import annotations

from lablib.calc.errors import either
from lablib.calc.flops import ALL_PAIRS
from lablib.calc.layouts.planner.calibration import APART
from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.rates import Framework
from lablib.calc.layouts.planner.search import Candidate, Plan
from lablib.calc.layouts.planner.time import Workload
from lablib.calc.models import ModelConfig
from lablib.calc.schedules import chunk_layers

PART_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "latency": "launches and latency",
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-alls",
    "pp": "pipeline sends",
    "dp": "exposed data parallelism",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "step": "waiting for the slowest",
}
SMALL = 0.002  # of a step: differences below are not worth a word


def plan_reasons(result: Plan) -> list[str]:
    """Return the reasons as sentences: where the first choice's time goes, what others take, and what does not fit."""
    best = result.best
    shares = sorted(best.seconds.items(), key=lambda part: -part[1])
    lines = [
        f"{best.layout}: {best.step:.3f} s a step, MFU {result.mfu(best):.1%} ({ALL_PAIRS}), "
        f"peak {best.total_memory / 1e9:.1f} of {result.capacity / 1e9:.1f} GB, counted as "
        f"{result.counting.implementation}.",
        "Its time: "
        + ", ".join(f"{PART_NAMES[name]} {value / best.step:.1%}" for name, value in shares if value)
        + ".",
    ]
    terms = sorted(best.memory.items(), key=lambda term: -term[1])
    held = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in terms if size)
    lines.append(f"Its memory at the peak ({best.peak.at}): {held}.")
    for other in result.listed(2)[1:]:
        lines.append("Runner-up " + reason_against(best, other))
    degrees = ("tp", "pp", "cp", "ep") if result.load.model.is_moe else ("tp", "pp", "cp")
    without: dict[str, list[str]] = {}
    for field in (*degrees, "zero", "recompute", "micro_batch", "virtual_stages", "shard"):
        if other := _other(result, field):
            without.setdefault(reason_against(best, other), []).append(f"{field}={getattr(best.layout, field)}")
    lines += [f"Without {either(fields)}: {reason}" for reason, fields in without.items()]
    return lines + _dropped(result)


def why_first(result: Plan) -> str:
    """Return in words what a tie is in this plan, and why the first layout is first."""
    best, fastest = result.best, result.fastest
    text = (
        f"Layouts marked ~ tie with the first: none is ahead of them by more than {APART:.0%}, half of all errors in comparing "
        "layouts of one job; one that no run is like would have to be further ahead. Of a tie the first is one that runs are "
        "like, then of the least cp, with the fewest of tp, cp, pp and ep above 1, then with most room (GB)"
    )
    if fastest.layout == best.layout:
        return f"{text}; here it is the fastest, too."
    gain = f"{fastest.layout} is predicted to be {1 - fastest.step / best.step:.1%} faster"
    return f"{text}; {gain}, {'a tie' if result.ties(fastest) else 'but no run is like it'}."


def reason_against(best: Candidate, other: Candidate) -> str:
    """Return one sentence on what makes another layout slower or faster, part by part."""
    gaps = {name: other.seconds[name] - best.seconds[name] for name in best.seconds}
    worth = [(gap, name) for name, gap in gaps.items() if abs(gap) > SMALL * best.step]
    costs = [f"{PART_NAMES[name]} +{gap:.3f} s" for gap, name in sorted(worth, reverse=True) if gap > 0]
    saves = [f"{-gap:.3f} s of {PART_NAMES[name]}" for gap, name in sorted(worth) if gap < 0]
    more = other.step - best.step
    text = f"{other.layout} takes {abs(more):.3f} s {'more' if more >= 0 else 'less'} ({abs(more) / best.step:.1%})"
    if costs:
        text += ": " + ", ".join(costs)
    if saves:
        text += "; it saves " + ", ".join(saves)
    room = (other.total_memory - best.total_memory) / 1e9
    return text + f"; memory {room:+.1f} GB."


def _other(result: Plan, field: str) -> Candidate | None:
    """The fastest layout in which one field differs from the first choice's."""
    mine = getattr(result.best.layout, field)
    if mine is None:
        return None
    return next(result.candidates.walk(lambda layout: getattr(layout, field) != mine), None)


def _dropped(result: Plan) -> list[str]:
    lines = [f"Not counted: {reason}." for reason in result.left_out]
    total = sum(result.dropped_by.values())
    if not total:
        return [*lines, f"All {result.valid:,} valid layouts could fit."]
    terms = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in result.dropped_by.items())
    lines.append(f"{total:,} of {result.valid:,} valid layouts cannot fit; by their largest term: {terms}.")
    if result.dropped:
        near = result.dropped[0]
        lines.append(
            f"Nearest shape that never fits: {near.layout}, {near.excess / 1e9:.1f} GB too much, "
            f"most of it {near.term} ({near.memory[near.term] / 1e9:.1f} GB)."
        )
    return lines


def not_modelled(load: Workload, layout: Layout) -> list[str]:
    """Return what is taken for granted about a layout, one sentence each."""
    found = [
        *expert_limits(
            load.model,
            load.framework,
            ep=layout.ep,
            out_of=_out_of(layout),
            tp=layout.expert_split,
            imbalance=load.uneven(layout),
        ),
        *_replicas(layout),
        *_overlap(layout),
        *_pipeline(load, layout),
    ]
    if layout.cp > 1:
        found.append(f"cp={layout.cp}: {_CP_WAYS[load.cp_way]}; every rank attends to as many pairs.")
        if load.model.is_mla:
            found.append(
                "What cp sends are the latents of attention; Megatron-Core makes keys and values of them first."
            )
    found += [f"{clause}." for clause in model_limits(load.model, load.seq)]
    if load.recipe.activation == 4:
        found.append("Products of fp32 are timed at the rate without TF32, and fused attention as a share of that.")
    found += missing_units(load)
    if load.training.tuning != "full":
        found.append("Products are timed as if all weights were trained: frozen ones need no gradient, a third less.")
    if load.precision:
        found.append(
            f"Memory is counted as for {load.recipe.name}: {load.precision.upper()} copies of weights and inputs are not."
        )
    if load.cluster.nodes > 1:
        found.append(
            f"Between its {load.cluster.nodes:,} nodes the network is taken as free of congestion, with full bandwidth "
            "between any two."
        )
    return found


def missing_units(load: Workload) -> list[str]:
    """Return what a GPU lacks for the dtypes that are asked of it: nothing, or one sentence."""
    card, name = load.cluster.gpu, load.recipe.name
    if "bf16" in card.flops or "fp16" in name or load.recipe.activation == 4:
        return []
    return [f"{card.name} has no bf16 matrix units: {name} is timed as fp16 there; train with a recipe of fp16."]


def model_limits(model: ModelConfig, seq: int) -> list[str]:
    """Return what a model has and the planner's time does not know, one clause for each field; nothing for most."""
    found = []
    if model.window and seq > model.window:
        layers = f"{model.num_window_layers} of {model.num_layers} layers"
        found.append(
            f"window={model.window} in {layers}: timed and kept as by a kernel that takes windows; "
            "with a mask, as Hugging Face's classes do it, all pairs are computed and more is kept"
        )
    said = {
        "parallel_block": "attention and MLP are timed one after the other, and with tp as two all-reduces, not one",
        "qk_norm": "norms on q and k take no time",
        "attention_sinks": "sinks take no time",
    }
    found += [f"{field}: {what}" for field, what in said.items() if getattr(model, field)]
    if model.turned_dim not in (0, model.head_dim):
        found.append(f"rotary_dim={model.rotary_dim}: rotary positions are timed over whole heads")
    return found


#: What the planner takes for each way, and how the others differ.
_CP_WAYS = {
    "gathered": "keys and values of the whole sequence are gathered before attention, and nothing hides it",
    "ring": "keys and values travel behind attention, and partial results are merged in fp32",
    "ulysses": "queries, keys, values and outputs are exchanged, and nothing hides it",
}


def _out_of(layout: Layout) -> str:
    """The ranks that ep is taken from."""
    if layout.etp is None:
        return f"cp x dp={layout.cp * layout.dp}" if layout.cp > 1 else f"dp={layout.dp}"
    return f"tp={layout.tp} x cp={layout.cp} x dp={layout.dp}"


def expert_limits(
    model: ModelConfig, framework: Framework, *, ep: int, out_of: str, tp: int, imbalance: float = 1.0
) -> list[str]:
    """Return what is taken for granted about the experts of a model; nothing where it has none.

    Args:
        framework: How it sends tokens to their experts.
        out_of: The ranks that ep is taken from, as text: "dp=8".
        tp: Ranks that split one expert.
        imbalance: Tokens of the busiest rank's experts over the mean.
    """
    if not model.is_moe:
        return []
    if imbalance == 1:
        found = [
            f"Tokens are spread evenly over {model.num_experts} experts, and none is dropped: the busiest rank of a real "
            "router takes longer and needs more memory."
        ]
    else:
        found = [f"The busiest rank's experts get {imbalance:g} times the mean, in every layer, and all wait for it."]
    if ep == 1:
        return found
    split = f", and an expert is split over {tp} ranks" if tp > 1 else ""
    found.append(f"ep={ep} is taken out of {out_of}{split}; experts split over other numbers are not searched.")
    if framework.dispatch == "node":
        text = "A token is sent once to each node with one of its experts, and back"
        if model.router is not None and model.router.groups > 1:
            text += f"; it chooses from {model.router.group_topk} of {model.router.groups} groups"
    else:
        text = f"Every one of a token's {model.experts_per_token} copies is sent to its expert and back"
    text += "; another micro-batch's computing hides it" if framework.ep_hides else ", and no computation hides it"
    return [*found, text + "."]


def _replicas(layout: Layout) -> list[str]:
    if layout.zero or layout.dp * layout.cp == 1:
        return []
    return [
        "DDP with gradient_as_bucket_view=True: by default it keeps its gradients twice, as .grad and in its buckets."
    ]


def _overlap(layout: Layout) -> list[str]:
    if layout.tp == 1:
        return []
    return [f"tp={layout.tp}: no product hides its collectives (asynchronous tensor parallelism hides some)."]


def _pipeline(load: Workload, layout: Layout) -> list[str]:
    if layout.pp == 1:
        return []
    layers = load.model.num_layers
    found = [
        f"pp={layout.pp}: zero-bubble schedules and DualPipe, which keeps two copies of the weights, are not searched."
    ]
    first, middle, last = chunk_layers(layers, layout.pp, layout.virtual_stages)
    if (first, last) not in ((middle, middle), (middle - 1, middle - 1)):
        text = f"{layers} layers are {first} in the first stage, {middle} in each other and {last} in the last"
        most = (layers + 2) // layout.pp
        if not any(chunk_layers(layers, layout.pp, chunks) for chunks in range(2, most + 1)):
            text += "; they make no equal virtual stages, and unequal ones are not searched"
        found.append(text + ".")
    return found
