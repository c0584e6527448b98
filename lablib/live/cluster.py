"""The cluster explorer: one run on many GPUs. Does it fit, when is it fullest, how long is a step, what does it cost?

Memory and time are those of `plan` with every degree given, so `rung plan` prints the same; what would make it fit are the
changes of `rung fit`. dp is what tp, pp and cp leave of the GPUs.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

from lablib.calc.errors import parse_json
from lablib.calc.hardware import accelerator
from lablib.calc.layouts.fit import cheapest_change, setup
from lablib.calc.layouts.planner import (
    FIELDS,
    PART_NAMES,
    Candidate,
    Layout,
    Peak,
    Plan,
    check_layout,
    peak_and_step,
    plan,
    step_time,
)
from lablib.calc.memory import RECOMPUTE, RESERVE, ROLES, UNPROVEN_SHARE, Verdict, find_term, sum_by_role
from lablib.calc.memory.timeline import MemoryInstant, Step
from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.params import count_params
from lablib.calc.precision import OPTIMIZERS, RECIPES
from lablib.calc.units import GB, format_count
from lablib.live.explorer import Answer, Control, Explorer, Value, device_options, model_options, number_options, table
from lablib.live.svg import Bar, areas, bars, legend, picture

MODELS = (
    "gpt2",
    "llama-3.2-1b",
    "qwen2.5-7b",
    "llama-3-8b",
    "gemma-2-9b",
    "llama-2-13b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "llama-3-70b",
    "gpt3-175b",
    "llama-3.1-405b",
    "deepseek-v3",
)
POWERS = tuple(2**k for k in range(15))
#: Cents for a GPU and hour.
PRICES = (50, 75, 100, 125, 150, 200, 250, 300, 400, 500, 600, 800, 1000)
ZERO = {0: "0: replicas", 1: "1: optimizer", 2: "2: and gradients", 3: "3: and weights (FSDP)"}
DEGREES = ("tp", "pp", "cp", "ep")
#: Blocks of which the picture has the instants.
DRAWN = 12


def read_model(model: str, config: str) -> ModelConfig:
    """Return a preset, or the model of a pasted config.json.

    Raises:
        ValueError: If the text is no JSON, or no model that is counted.
    """
    if not config.strip():
        return preset(model)
    try:
        fields = parse_json(config)
    except ValueError as error:
        raise ValueError(f"the pasted config.json is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("the pasted config.json must be an object, from { to }")
    return from_hf(fields, name="config.json")


def job(
    model: str, config: str, device: str, gpus: int, tp: int, pp: int, cp: int, ep: int, micro_batch: int, rounds: int,
    seq: int, **others: object,
) -> tuple[ModelConfig, dict[str, object]]:  # fmt: skip
    """Return the model, and the settings of `plan` for a state of the controls."""
    found = read_model(model, config)
    dp = max(1, gpus // (tp * pp * cp))
    settings: dict[str, object] = {"gpus": gpus, "gpu": device, "seq": seq, "global_batch": dp * micro_batch * rounds}
    settings |= {"recipe_": others["recipe"], "optimizer": others["optimizer"], "tp": tp, "pp": pp, "cp": cp}
    if found.is_moe:
        settings |= {"ep": ep, "etp": expert_split(tp, ep)}
    settings |= node_settings(device, gpus)
    if others["zero"] == 3:
        settings["shard"] = None  # one copy over all ranks: a plan would also try one for each node
    chosen = {"zero": others["zero"], "micro_batch": micro_batch, "recompute": others["recompute"]}
    return found, settings | chosen | {"schedule": "1f1b", "virtual_stages": 1}


def node_settings(device: str, gpus: int) -> dict[str, int]:
    """Return how many GPUs a node has, where whole nodes do not make this number: of 72 in a rack, 64 share a power of two."""
    node = accelerator(device).gpus_per_node
    return {"gpus_per_node": 2 ** (node.bit_length() - 1)} if gpus > node and gpus % node else {}


def explore(**state: Value) -> Answer:
    """Return the peak over a step, and what a step takes and costs."""
    model, settings = job(**state)
    result = plan(model, **settings)
    layout = Layout(
        dp=state["gpus"] // (state["tp"] * state["pp"] * state["cp"]),
        **{name: settings[name] for name in FIELDS if name in settings},
    )
    peak, step = peak_and_step(result.load, layout, result.counting)
    one = Candidate(layout, step_time(result.load.step_work(layout), result.candidates.rates), peak)
    found = Verdict(peak.total, result.cluster.gpu, RESERVE + peak.spare)
    fits = peak.needs <= result.capacity
    low, high = result.like(one).interval(one.step) or (one.step, one.step)
    hour, tokens = state["price"] * state["gpus"] / 100, result.load.global_batch * state["seq"]
    costs = [seconds / 3600 * hour * 1e9 / tokens for seconds in (low, one.step, high)]
    return Answer(
        picture=_picture(model, step, peak, found),
        caption=_caption(result, one, found, costs, (low, high), hour),
        table=_table(result, one, found, costs, (low, high), hour),
        call=_call(state, settings),
        command=_command(state, settings, fits=fits),
        question="" if fits else "What would make it fit?",
        numbers=dict(peak.terms)
        | {"total": peak.total, "headroom": found.room, "dp": layout.dp, "step_us": round(one.step * 1e6)}
        | {"low_us": round(low * 1e6), "high_us": round(high * 1e6), "cents": round(100 * costs[1])},
    )


def expert_split(tp: int, ep: int) -> int:
    """Return etp: whole experts on the ranks of expert parallelism, as folding has them; without it tp splits each."""
    return 1 if ep > 1 else tp


def limits(**state: Value) -> dict[str, tuple[int, str]]:
    """Return for degrees and lengths the most that the others leave, tp first, then pp, cp and ep."""
    model = read_model(state["model"], state["config"])
    found: dict[str, tuple[int, str]] = {}
    if model.learned_positions:
        found["seq"] = model.max_positions, f"the most that {model.name} has positions for"
    seq = min(state["seq"], found.get("seq", (state["seq"], ""))[0])
    chosen = dict.fromkeys(DEGREES, 1)
    for name in DEGREES:
        for most in reversed([value for value in POWERS if value <= state[name]]):
            why = _refused(model, state["gpus"], seq, chosen | {name: most})
            if not why:
                break
            found[name] = most // 2, why
        chosen[name] = most
    if chosen["tp"] * chosen["pp"] == state["gpus"]:
        found["zero"] = 0, "there is one rank to hold the states"
    return found


def _refused(model: ModelConfig, gpus: int, seq: int, degrees: dict[str, int]) -> str:
    """Return why a model cannot be split so, or an empty text."""
    tp, pp, cp, ep = (degrees[name] for name in DEGREES)
    if tp * pp * cp > gpus:
        return f"what {gpus:,} GPUs leave it"
    if pp > model.num_layers:
        return f"{model.name} has {model.num_layers} layers"
    dp = gpus // (tp * pp * cp)
    try:
        layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, etp=expert_split(tp, ep) if model.is_moe else None)
        check_layout(layout, model, gpus=gpus, seq=seq, global_batch=dp, sequence_parallel=True, cp_way="ring")
    except ValueError as error:
        return str(error)
    return ""


def reply(**state: Value) -> str:
    """Return the cheapest changes that make a run fit, as `rung fit` finds them."""
    state, _ = EXPLORER.clip(state)
    model, settings = job(**state)
    dp = settings["gpus"] // (state["tp"] * state["pp"] * state["cp"])
    spec = setup(
        model,
        gpu=state["device"],
        gpus=settings["gpus"],
        gpus_per_node=settings.get("gpus_per_node"),
        seq=state["seq"],
        micro_batch=state["micro_batch"],
        num_microbatches=state["rounds"],
        sequence_parallel=state["tp"] > 1,
        gradient_as_bucket_view=True,
        dp=dp,
        reserve=_reserve(state["device"]),
        **{name: state[name] for name in ("tp", "pp", "cp", "zero", "recipe", "optimizer", "recompute")},
        **{name: settings[name] for name in ("ep", "etp") if name in settings},
    )
    rows = {
        str(change): ("", f"{change.memory / GB:.1f} GB, {seconds_text(change.seconds)} a step ({change.kind})")
        for change in cheapest_change(spec)
    }
    return table({"It fits with": rows or {"none of the changes that rung fit knows": ("", "more or larger GPUs")}})


def _reserve(device: str) -> int:
    """Return what `rung fit` must keep free to judge as a plan does: a peak that nobody judged leaves a share of itself too."""
    capacity = accelerator(device).usable_bytes - RESERVE
    return RESERVE + math.ceil(capacity * UNPROVEN_SHARE / (1 + UNPROVEN_SHARE))


def _picture(model: ModelConfig, step: Step, peak: Peak, found: Verdict) -> str:
    """Draw the peak beside the GPU, and below it the instants of the step."""
    gpu = found.device
    limit, limit_text = gpu.usable_bytes / GB, f"{gpu.name}: {gpu.usable_bytes / GB:.1f} GB"
    roles = {role: size / GB for role, size in peak.memory.items()}
    needs = f"{peak.total / GB:,.1f} GB"
    head, below = bars(
        [Bar(label="", parts=roles, text="")],
        top=0,
        title=f"One GPU at the peak of a step: {needs}",
        labels=0,
        limit=limit,
        limit_text=limit_text,
    )
    names, below = legend(ROLES, top=below + 10)
    instants = drawn_instants(step, peak)
    sums = [sum_by_role(dict(instant.terms)) for instant in instants]
    place, fullest = max(enumerate(instants), key=lambda pair: (pair[1].total, -pair[0]))
    at = [0]
    for before, after in pairwise(instants):
        blocks = {before.block, after.block}
        at.append(at[-1] + (abs(after.block - before.block) if None not in blocks and len(blocks) > 1 else 1))
    stage = f" on stage {peak.stage} of {step.stage.run.pp}" if step.stage.run.pp > 1 else ""
    rest, end = areas(
        {role: [one[role] / GB for one in sums] for role in ROLES},
        at=at,
        top=below + 20,
        title=f"GB over one step{stage}",
        xlabel="",
        limit=limit,
        limit_text=limit_text,
        marks=[(at[place], f"peak: {fullest.name}")],
        xticks=_phases(instants, at),
    )
    alt = (
        f"A stacked bar of {needs} against a line at {limit_text}: "
        + ", ".join(f"{role} {size:,.1f} GB" for role, size in roles.items())
        + f". Below it the same terms over one step of {model.name}{stage}; the peak is at {fullest.name}."
    )
    return picture(head + names + rest, end, alt)


def drawn_instants(step: Step, peak: Peak) -> list[MemoryInstant]:
    """Return the instants of a step: of many blocks a few, those of the peak among them. Between two of them all is straight."""
    blocks = len(step.blocks)
    near = {round(k * (blocks - 1) / DRAWN) for k in range(DRAWN + 1)} if blocks > DRAWN else set(range(blocks))
    named = re.search(r"block (\d+)", peak.at)
    near |= {int(named[1])} if named else set()
    return [instant for instant in step.instants(near) if instant.phase != "states"]


def _phases(instants: list[MemoryInstant], at: list[int]) -> list[tuple[float, str]]:
    """Return where the long phases of a step have their middle, with their names."""
    found = []
    for phase in ("forward", "backward", "optimizer"):
        places = [x for x, instant in zip(at, instants, strict=True) if instant.phase == phase]
        if places and len(places) > 1:
            found.append(((places[0] + places[-1]) / 2, phase))
    return found


def _caption(
    result: Plan, one: Candidate, found: Verdict, costs: list[float], ends: tuple[float, float], hour: float
) -> str:
    layout, machine = one.layout, result.cluster
    left = abs(found.room) / GB
    room = f"{left:,.1f} GB {'to spare' if found.room >= 0 else 'too much'}"
    return (
        f"{result.load.model.name} on {machine.gpus:,} {machine.gpu.name} as {_degrees(layout)}: {found.word}, {room}. "
        f"A GPU is fullest, {found.peak / GB:,.1f} GB, at {one.peak.at}. A step of "
        f"{format_count(result.load.global_batch * result.load.seq)} tokens {'takes' if found.room >= 0 else 'would take'} "
        f"{seconds_text(one.step)}{between_text(ends, seconds_text)}, "
        f"and 1B tokens ${costs[1]:,.0f}{between_text((costs[0], costs[2]), '${:,.0f}'.format)} at ${hour:,.2f} an hour."
    )


def seconds_text(value: float) -> str:
    """Return seconds with three digits."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _degrees(layout: Layout) -> str:
    degrees = {"dp": layout.dp} | {name: getattr(layout, name) for name in DEGREES if getattr(layout, name) > 1}
    return " ".join(f"{name}={value}" for name, value in degrees.items())


def between_text(ends: tuple[float, float], words: object) -> str:
    """Return an interval in brackets; nothing where no run on such a GPU was measured."""
    low, high = ends
    return f" ({words(low)} to {words(high)})" if low < high else ""


def _table(
    result: Plan, one: Candidate, found: Verdict, costs: list[float], ends: tuple[float, float], hour: float
) -> str:
    load, layout = result.load, one.layout
    terms = {
        name.replace("_", " ").replace(".", ": "): (find_term(name).role, f"{size / GB:,.2f} GB")
        for name, size in one.peak.terms.items()
    }
    terms["in all"] = ("", f"{one.total_memory / GB:,.2f} GB")
    terms["kept free"] = ("", f"{found.reserve / GB:,.2f} GB")
    seconds = {
        PART_NAMES[name]: ("", seconds_text(value)) for name, value in one.seconds.items() if value > 0.002 * one.step
    }
    seconds["in all, predicted"] = ("", seconds_text(one.step))
    known = "interval, right for nine in ten measured runs"
    if ends[0] < ends[1]:
        seconds[known] = ("", f"{seconds_text(ends[0])} to {seconds_text(ends[1])}")
    else:
        seconds["interval"] = ("", "none: no run on such GPUs was measured")
    took = result.like(one).took
    seconds["runs like it"] = ("", f"took {took[0]:.2f} to {took[1]:.2f} times that" if took else "none was measured")
    tokens = load.global_batch * load.seq
    money = {
        f"{result.cluster.gpus:,} GPUs": ("", f"${hour:,.2f} an hour"),
        "1B tokens": ("", f"${costs[1]:,.2f}"),
        "tokens a second": ("", f"{tokens / one.step:,.0f}"),
        "tokens of a step": ("", f"{load.global_batch:,} x {load.seq:,} = {format_count(tokens)}"),
        "MFU, all pairs of attention counted": ("", f"{result.mfu(one):.0%}"),
    }
    degrees = {
        "dp = GPUs / (tp x pp x cp)": ("", f"{layout.dp:,}"),
        "parameters": ("", format_count(count_params(load.model).total)),
    }
    if layout.ep > 1:
        degrees["experts of a rank"] = (
            "",
            f"{load.model.num_experts // layout.ep} of {load.model.num_experts}, whole (etp=1)",
        )
    return table(
        {
            "The run": degrees,
            f"What one GPU holds at the peak, {one.peak.at}": terms,
            "Where a step's time goes": seconds,
            "What it costs, failures and checkpoints left out": money,
        }
    )


def _call(state: dict[str, Value], settings: dict[str, object]) -> str:
    model = "config.json" if state["config"].strip() else state["model"]
    lines = "".join(f"    {name}={value!r},\n".replace("'", '"') for name, value in settings.items())
    return (
        "from lablib.calc.layouts.planner import plan\n\n"
        f'result = plan(\n    "{model}",\n{lines})\n'
        "one = result.best if result.candidates else result.dropped[0]\n"
        "print(one.peak.at, one.peak.terms, one.peak.total)\n"
        "if result.candidates:\n    print(one.step, result.like(one).interval(one.step))\n"
    )


def _command(state: dict[str, Value], settings: dict[str, object], *, fits: bool) -> str:
    """Return the command that prints the same: `rung plan`, or `rung fit` with what to change."""
    model = "config.json" if state["config"].strip() else state["model"]
    names = {name.rstrip("_"): value for name, value in settings.items()}
    if not fits:
        for name in ("global_batch", "schedule", "virtual_stages", "shard"):
            names.pop(name, None)
        names |= {"num_microbatches": state["rounds"], "gradient_as_bucket_view": True}
        names["reserve"] = f"{_reserve(state['device'])}B"
        names["sequence_parallel"] = state["tp"] > 1
    words = ["rung", "plan" if fits else "fit", model]
    if "shard" in names:
        names["shard"] = 0
    for name, value in names.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", str(value)]
    if fits:
        words += ["--tokens", "1B", "--price", f"{state['price'] / 100:g}"]
    return " ".join(words)


EXPLORER = Explorer(
    name="cluster",
    title="One training run on many GPUs",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="llama-3-70b"),
        Control(name="device", label="GPU", options=device_options(clustered=True), first="h100"),
        Control(name="gpus", label="GPUs", options=number_options(POWERS), first=64, slider=True),
        Control(name="zero", label="ZeRO stage", options=tuple(ZERO.items()), first=3),
        Control(name="tp", label="tensor parallel (tp)", options=number_options(POWERS[:5]), first=1, slider=True),
        Control(name="pp", label="pipeline stages (pp)", options=number_options(POWERS[:5]), first=1, slider=True),
        Control(name="cp", label="context parallel (cp)", options=number_options(POWERS[:6]), first=1, slider=True),
        Control(name="ep", label="expert parallel (ep)", options=number_options(POWERS[:8]), first=1, slider=True),
        Control(
            name="recompute",
            label="recomputation",
            options=tuple((name, name) for name in RECOMPUTE),
            first="full",
        ),
        Control(
            name="seq", label="tokens a sequence", options=number_options(2**k for k in range(9, 18)), first=8192,
            slider=True,
        ),
        Control(
            name="micro_batch", label="sequences in a micro-batch", options=number_options(POWERS[:6]), first=1,
            slider=True, fold=True,
        ),
        Control(
            name="rounds", label="micro-batches in a step", options=number_options(POWERS[:9]), first=8, slider=True,
            fold=True,
        ),
        Control(
            name="recipe", label="recipe", first="mixed-bf16", fold=True,
            options=tuple((name, name) for name, recipe in RECIPES.items() if not recipe.casts and recipe.activation == 2),
        ),
        Control(
            name="optimizer", label="optimizer", options=tuple((name, name) for name in OPTIMIZERS), first="adamw",
            fold=True,
        ),
        Control(
            name="price", label="dollars for a GPU and hour", first=200, slider=True, fold=True,
            options=tuple((cents, f"${cents / 100:.2f}") for cents in PRICES),
        ),
        Control(name="config", label="or paste a config.json", options=(("", ""),), first="", free=True, fold=True),
    ),
    compute=explore,
    limits=limits,
    reply=reply,
)  # fmt: skip
