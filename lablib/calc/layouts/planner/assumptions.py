"""What a plan does not model, as sentences about this model, this cluster and this layout.

A reader who follows a plan should meet its limits beside it. Only what concerns the run is said; what would make
another plan of it (FP8, a zero-bubble schedule) is refused by name where it is asked for, by `refuse_unmodelled`.
"""

from __future__ import annotations

from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.time import Workload
from lablib.calc.models import ModelConfig
from lablib.calc.schedules import SCHEDULES, chunk_layers, schedule_names


def not_modelled(load: Workload, layout: Layout) -> list[str]:
    """Return what is taken for granted about a layout, one sentence each."""
    found = [
        *expert_limits(
            load.model, ep=layout.ep, out_of=_out_of(layout), tp=layout.expert_split, imbalance=load.uneven(layout)
        ),
        *_replicas(layout),
        *_overlap(layout),
        *_pipeline(load, layout),
    ]
    if layout.cp > 1:
        found.append(f"cp={layout.cp}: {_CP_WAYS[load.cp_way]}; every rank attends to as many pairs.")
    card = load.cluster.gpu
    found += [f"{clause}." for clause in model_limits(load.model, load.seq)]
    if load.recipe.activation == 4:
        found.append("Products of fp32 are timed at the rate without TF32, and fused attention as a share of that.")
    found += missing_units(load)
    if "fp8" in card.flops and load.recipe.activation == 2:
        found.append(
            f"Products run in {'bf16' if 'bf16' in card.flops else 'fp16'}: FP8, which {card.name} has, is not modelled."
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
    "ring": "keys and values travel behind attention; merging partial results takes no time",
    "ulysses": "queries, keys, values and outputs are exchanged, and nothing hides it",
}


def _out_of(layout: Layout) -> str:
    """The ranks that ep is taken from."""
    if layout.etp is None:
        return f"cp x dp={layout.cp * layout.dp}" if layout.cp > 1 else f"dp={layout.dp}"
    return f"tp={layout.tp} x cp={layout.cp} x dp={layout.dp}"


def expert_limits(model: ModelConfig, *, ep: int, out_of: str, tp: int, imbalance: float = 1.0) -> list[str]:
    """Return what is taken for granted about the experts of a model; nothing where it has none.

    Args:
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
    text = (
        f"Every one of a token's {model.experts_per_token} copies is sent to its expert and back, and no computation "
    )
    text += "hides it"
    if model.router is not None and model.router.groups > 1:
        groups = f"{model.router.group_topk} of {model.router.groups} groups"
        text += f"; {model.name} limits a token to {groups}, which sends less"
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


def refuse_unmodelled(*, recipe: object, schedule: object) -> None:
    """Raise a ValueError for what is known elsewhere in lablib and not to the planner.

    Args:
        recipe: What was asked for, by any name.
        schedule: The same.
    """
    if "fp8" in str(recipe).lower() or "fp4" in str(recipe).lower():
        raise ValueError(
            f"recipe {recipe!r}: the planner models no FP8 or FP4; plan with mixed-bf16, and see chapter 08"
        )
    if schedule in schedule_names() and schedule not in SCHEDULES:
        why = " nor its second copy of the weights" if "dualpipe" in str(schedule) else ""
        raise ValueError(
            f"schedule={schedule!r}: the planner models {', '.join(SCHEDULES)}, and not the bubble of this one{why}; "
            f"`rung schedule {schedule}` draws it"
        )
