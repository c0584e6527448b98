"""The ZeRO explorer: one step of DDP, ZeRO's stages and FSDP over time, and what a rank holds and sends in each.

Times and messages are `data_parallel_step`'s, states are `state_terms` at the 16 bytes of mixed precision with AdamW.
Gradients and weights travel in 2 bytes over rings; activations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.layouts.planner import cluster
from lablib.calc.memory import verdict
from lablib.calc.models import preset
from lablib.calc.parallel import DataParallelStep, data_parallel_step, max_params, state_terms, timed_units
from lablib.calc.params import count_params
from lablib.calc.units import GB, format_count
from lablib.live.cluster import node_settings
from lablib.live.explorer import (
    Answer,
    Control,
    Explorer,
    Value,
    device_options,
    grid,
    model_options,
    number_options,
    table,
)
from lablib.live.steps import Piece, stepped
from lablib.live.svg import WIDTH, areas, legend, rect, text

STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3", 4: "FSDP2"}
MODELS = (
    "gpt2",
    "gpt2-xl",
    "llama-3.2-3b",
    "qwen2.5-7b",
    "llama-3-8b",
    "llama-2-13b",
    "llama-3-70b",
    "gpt3-175b",
    "llama-3.1-405b",
)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: More units than any model has blocks: each block is one, as FSDP2 is used.
EACH = 1000
UNITS = ((1, "1"), (2, "2"), (4, "4"), (8, "8"), (16, "16"), (32, "32"), (EACH, "a block each"))
OVERLAP = {1: "beside computation", 0: "after it"}
#: Units times micro-batches, of which the picture can still be read.
MOST = 128
#: No job is larger than this: where so many ranks do not help, no number does.
MAX_RANKS = 2**24
LEFT, RIGHT = 46.0, WIDTH - 14.0
COLOR = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "gather": "weights"}


def min_ranks(params: int, stage: int, capacity: int) -> int | None:
    """Return the smallest number of ranks on which the states of a model fit, or None if none is enough."""

    def fits(ranks: int) -> bool:
        return sum(state_terms(params, ranks, stage).values()) <= capacity

    if not fits(MAX_RANKS):
        return None
    # More ranks never hold more each, so halve the interval.
    too_few, enough = 0, MAX_RANKS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stage's step, and what a rank holds in it.

    Attributes:
        held: Terms of the states, in bytes.
        sent: Bytes that a rank sends.
    """

    step: DataParallelStep
    held: dict[str, int]
    sent: float

    @cached_property
    def holds(self) -> list[tuple[float, dict[str, float]]]:
        """(seconds, GB from then on) of weights, with what is unsharded, gradients and optimizer states."""
        rest = sum(size for name, size in self.held.items() if name not in ("weights", "gradients"))
        now = {"weights": self.held["weights"] / GB, "gradients": 0.0, "optimizer": rest / GB}
        changes = [(when, "weights", self.held["weights"] + size) for when, size in self.step.memory]
        changes += [(when, "gradients", size) for when, size in self.step.gradients]
        found = {0.0: now}
        for when, role, size in sorted(changes):
            now = now | {role: size / GB}
            found[when] = now
        return list(found.items())

    def at(self, seconds: float) -> dict[str, float]:
        """Return what is held from a time on."""
        return next(held for when, held in reversed(self.holds) if when <= seconds)

    @property
    def peak(self) -> float:
        """The most GB that a rank holds."""
        return max(sum(held.values()) for _, held in self.holds)


def run(model: str, ranks: int, stage: int, overlap: int, tokens: int, micro_batches: int, device: str, units: int,
        reached: int, latency: int) -> Run:  # fmt: skip
    """Return the step of a stage; FSDP2 is stage 3 that keeps its root gathered until backward is through."""
    config, gpu = preset(model), accelerator(device)
    zero, params = min(stage, 3), count_params(config).total
    link = cluster(device, gpus=ranks, **node_settings(device, ranks)).bandwidth(ranks)
    timed = timed_units(
        config, units=min(units, config.num_layers), tokens=tokens, ranks=ranks, flops=reached / 100 * gpu.peak("bf16"), bandwidth=link,
        latency=latency / 1e6,
    )  # fmt: skip
    held = state_terms(params, ranks, zero)
    step = data_parallel_step(
        timed, stage=zero, ranks=ranks, micro_batches=micro_batches, overlap=bool(overlap), root_reshard=stage == 3,
        optimizer=update_seconds(held, gpu),
    )  # fmt: skip
    sizes = {unit.name: unit.bytes for unit in timed}
    times = {"gather": 1, "scatter": 1, "all-reduce": 2}
    carried = sum(times[bar.kind] * sizes[bar.unit] for bar in step.bars if bar.lane == "link")
    return Run(step=step, held=held, sent=carried * (ranks - 1) / ranks)


def update_seconds(held: dict[str, int], gpu: Accelerator) -> float:
    """Return the optimizer's seconds at the GPU's memory bandwidth.

    Of each parameter it reads and writes 12 bytes of master weight and moments, reads 2 of gradient, writes 2 of weight.
    """
    states = sum(size for name, size in held.items() if name not in ("weights", "gradients"))
    return (2 + 4 / 12) * states / gpu.memory_bandwidth


def explore(**state: Value) -> Answer:
    """Return one step over time in the chosen stage, and beside it the other stages."""
    runs = {stage: run(**state | {"stage": stage}) for stage in STAGES}
    params, gpu = count_params(preset(state["model"])).total, accelerator(state["device"])
    zero = min(state["stage"], 3)
    ends = {
        "ranks": min_ranks(params, zero, gpu.usable_bytes),
        "params": max_params(gpu.usable_bytes, state["ranks"], zero),
    }
    chosen = runs[state["stage"]]
    # Whether a job fits is asked of it as it is run, and not as it is drawn.
    blocks = chosen if state["units"] == EACH else run(**state | {"units": EACH})
    numbers = {name: size for name, size in chosen.held.items() if size}
    for stage, each in runs.items():
        numbers |= {f"held_{stage}": sum(each.held.values()), f"sent_{stage}": round(each.sent)}
        numbers |= {f"peak_{stage}": round(1e9 * each.peak), f"step_us_{stage}": round(1e6 * each.step.seconds)}
        numbers[f"exposed_us_{stage}"] = round(1e6 * each.step.exposed)
    return Answer(
        picture=_picture(chosen, state, gpu),
        caption=_caption(chosen, blocks, runs[0], state, gpu),
        table=_table(runs, state["stage"], ends),
        call=_call(state),
        numbers=numbers
        | {
            "peak_blocks": round(1e9 * blocks.peak),
            "least_ranks": ends["ranks"] or 0,
            "largest_params": ends["params"],
        },
    )


def limits(model: str, micro_batches: int, **others: Value) -> dict[str, tuple[int, str]]:
    """Return the most units that a model has layers for, and a picture has room for."""
    layers, room = preset(model).num_layers, MOST // micro_batches
    if room < layers:
        return {"units": (room, f"the most that can be drawn with {micro_batches} micro-batches")}
    if others["units"] < EACH:
        return {"units": (layers, f"{model} has {layers} layers")}
    return {}


def _size(value: float) -> str:
    """Write GB with three digits or so: a shard on a thousand ranks is small."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f} GB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _picture(chosen: Run, state: dict[str, Value], gpu: Accelerator) -> str:
    """Draw the two lanes and what is held below them, with a band over the step that is told."""
    step, scale = chosen.step, (RIGHT - LEFT) / chosen.step.seconds
    shapes = [text(0, 12, f"{STAGES[state['stage']]}: one step of a rank", bold=True)]
    for row, lane in enumerate(("device", "link")):
        y = 22.0 + 26 * row
        shapes.append(text(LEFT - 6, y + 13, lane, anchor="end"))
        shapes.append(rect(LEFT, y, RIGHT - LEFT, 20, "idle", pale=True))
        for bar in step.bars:
            if bar.lane == lane and bar.end > bar.start:
                wide = max((bar.end - bar.start) * scale - 0.4, 0.4)
                shapes.append(rect(LEFT + bar.start * scale, y, wide, 20, COLOR.get(bar.kind, "gradients")))
    # What changes at a moment changes at once: each value stands twice, at both ends of its time.
    held = [values for _, values in chosen.holds for _ in (0, 1)]
    at = [*[when for when, _ in chosen.holds for _ in (0, 1)][1:], step.seconds]
    unit, factor = ("s", 1) if step.seconds >= 1 else ("ms", 1000)
    area, end = areas(
        {role: [values[role] for values in held] for role in ("optimizer", "weights", "gradients")},
        at=[factor * when for when in at],
        top=84,
        title="It holds, GB",
        xlabel=f"time, {unit}",
        limit=gpu.usable_bytes / GB,
        limit_text=f"{gpu.name}: {gpu.usable_bytes / GB:.1f} GB",
        marks=[],
        far=True,
    )
    spans = _spans(chosen)
    names, below = legend(["forward", "backward", "optimizer", "weights", "gradients", "idle"], top=end + 8)
    band = rect(0, 0, 1, end - 50, "", outline=2.5)
    cursor = Piece(shape=band, at=[(LEFT + start * scale, 18, (stop - start) * scale, 1) for start, stop, _ in spans])
    first = max(range(len(spans)), key=lambda n: sum(chosen.at(spans[n][0]).values()))
    alt = (
        f"Two lanes over time, device and link, for {STAGES[state['stage']]}; the step takes {_time(step.seconds)}, and the "
        f"device waits for {_time(step.exposed)} of it. Below, what a rank holds: at most {_size(chosen.peak)}."
    )
    return stepped(
        shapes + area + names, [cursor], [words for *_, words in spans], height=below + 4, alt=alt, first=first
    )


def _spans(chosen: Run) -> list[tuple[float, float, str]]:
    """Return what the device does and waits for: from when, until when, and in words."""
    step, found, now = chosen.step, [], 0.0
    for bar in [bar for bar in step.bars if bar.lane == "device"]:
        if bar.start > now:
            found.append((now, bar.start, "waits"))
        what = "updates its weights" if bar.kind == "optimizer" else f"runs the {bar.kind} of {bar.unit}"
        found.append((bar.start, bar.end, what))
        now = bar.end
    if step.seconds > now:
        found.append((now, step.seconds, "waits"))
    return [(start, end, _words(chosen, start, end, what)) for start, end, what in found if end > start]


def _words(chosen: Run, start: float, end: float, what: str) -> str:
    verbs = {"gather": "gathers", "scatter": "reduce-scatters", "all-reduce": "all-reduces"}
    moves = [
        f"{verbs[bar.kind]} {bar.unit}"
        for bar in chosen.step.bars
        if bar.lane == "link" and bar.start < end and start < bar.end and bar.end > bar.start
    ]
    carried = (
        "carries nothing" if not moves else " and ".join(moves) if len(moves) < 3 else f"{moves[0]}, ..., {moves[-1]}"
    )
    held = chosen.at(start)
    return (
        f"The device {what}, the link {carried}. Held: {_size(held['weights'])} of weights, {_size(held['gradients'])} of "
        f"gradients, {_size(held['optimizer'])} of optimizer states."
    )


def _caption(chosen: Run, blocks: Run, ddp: Run, state: dict[str, Value], gpu: Accelerator) -> str:
    step, on = chosen.step, f"{state['ranks']:,} ranks" if state["ranks"] > 1 else "1 rank"
    fits = verdict(round(1e9 * blocks.peak), gpu, reserve=0).word  # what a run leaves free is asked of its whole peak
    each = "" if blocks.peak == chosen.peak else f" in these units, {_size(blocks.peak)} with a block each,"
    times = chosen.sent / ddp.sent if ddp.sent else 1.0
    against = (
        ""
        if not state["stage"]
        else ", as much as DDP"
        if abs(times - 1) < 1e-9
        else f", {times:.3g} times what DDP does"
    )
    return (
        f"{state['model']} on {on}, {STAGES[state['stage']]}: a step takes {_time(step.seconds)}, of which the device waits "
        f"{_time(step.exposed)}. A rank holds at most {_size(chosen.peak)}{each} and sends {_size(chosen.sent / GB)}{against}. "
        f"It {fits} on one {gpu.name}, {'' if fits == 'fits' else 'even '}before activations and temporaries of the optimizer."
    )


def _table(runs: dict[int, Run], stage: int, ends: dict[str, int | None]) -> str:
    roles = {"weights": "weights", "gradients": "gradients"}
    held = runs[stage].held
    holds = {
        name.replace("_", " "): (roles.get(name, "optimizer"), _size(size / GB)) for name, size in held.items() if size
    }
    needs = f"{ends['ranks']:,}" if ends["ranks"] else "no number is enough"
    columns = {
        STAGES[each]: (_size(one.peak), _size(one.sent / GB), _time(one.step.seconds), _time(one.step.exposed))
        for each, one in runs.items()
    }
    return grid(("", "holds at most", "sends", "step", "of it waits"), columns) + table(
        {
            f"States of a rank, {STAGES[stage]}": holds | {"in all": ("", _size(sum(held.values()) / GB))},
            "Where they fit, states alone": {
                "least ranks for this model": ("", needs),
                "largest model on these ranks": ("", f"{format_count(ends['params'])} parameters"),
            },
        }
    )


def _call(state: dict[str, Value]) -> str:
    units = min(state["units"], preset(state["model"]).num_layers)
    settings = ", ".join(f"{name}={value!r}" for name, value in (state | {"units": units}).items())
    return (
        "from lablib.live.zero import run\n\n"
        f"found = run({settings})\n"
        "print(found.held, sum(found.held.values()), found.sent, found.step.seconds, found.step.exposed, found.peak)\n"
    )


EXPLORER = Explorer(
    name="zero",
    title="Data parallelism and ZeRO over one step",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="llama-3-8b"),
        Control(name="ranks", label="ranks", options=number_options(RANKS), first=64, slider=True),
        Control(name="stage", label="stage", options=tuple(STAGES.items()), first=3),
        Control(name="overlap", label="messages run", options=tuple(OVERLAP.items()), first=1),
        Control(name="tokens", label="tokens of a rank", options=number_options(TOKENS), first=1024, slider=True),
        Control(
            name="micro_batches", label="micro-batches", options=number_options((1, 2, 4, 8)), first=1, slider=True
        ),
        Control(name="device", label="GPU", options=device_options(clustered=True), first="h100"),
        Control(name="units", label="units beside the root", options=UNITS, first=EACH, slider=True, fold=True),
        Control(
            name="reached",
            label="of the GPU's peak, reached",
            options=tuple((n, f"{n} %") for n in (20, 30, 40, 50, 60, 70)),
            first=40,
            slider=True,
            fold=True,
        ),
        Control(
            name="latency",
            label="latency of a message",
            options=tuple((n, f"{n} µs") for n in (0, 2, 5, 10, 20)),
            first=5,
            slider=True,
            fold=True,
        ),
    ),
    compute=explore,
    limits=limits,
)
