"""The training explorer: memory of one training run on one device at its peak, and the size at which it stops fitting.

The peak is that of `memory_timeline`, and the verdict is `lablib.calc.memory.verdict`. The sizes at which a run stops
fitting are the largest whose verdict is "fits"; the tests ask the calculator at that size and at the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lablib.calc.hardware import accelerator
from lablib.calc.layouts.fit import last_within
from lablib.calc.memory import ROLES, Verdict, find_term, run_config, sum_by_role, verdict
from lablib.calc.memory.timeline import MemoryInstant, memory_peak
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params
from lablib.calc.precision import OPTIMIZERS, RECIPES
from lablib.calc.units import GB, format_count
from lablib.live.explorer import Answer, Control, Explorer, device_options, model_options, number_options, table
from lablib.live.svg import Bar, areas, bars, legend, picture

#: From small to large. Models whose first blocks differ from the others are left out: see the top of this module.
MODELS = (
    "gpt2",
    "llama-3.2-1b",
    "gpt2-xl",
    "llama-3.2-3b",
    "mistral-7b-v0.1",
    "qwen2.5-7b",
    "llama-3-8b",
    "gemma-2-9b",
    "llama-2-13b",
    "mixtral-8x7b",
    "llama-3-70b",
    "gpt3-175b",
    "llama-3.1-405b",
)
MICRO_BATCHES = tuple(2**k for k in range(7))
SEQS = tuple(512 * 2**k for k in range(9))
RECOMPUTE = {"none": "none", "selective": "selective: the attention core", "full": "full: all but each block's input"}


def explore(model: str, recipe: str, optimizer: str, micro_batch: int, seq: int, recompute: str, device: str) -> Answer:
    """Return what a training run on one device needs, by term, and where it stops fitting."""
    config, gpu = preset(model), accelerator(device)
    settings = {"recipe": recipe, "optimizer": optimizer, "recompute": recompute}

    def peak(blocks: int = config.num_layers, micro_batch: int = micro_batch, seq: int = seq) -> MemoryInstant:
        shape = replace(config, num_layers=blocks)
        return memory_peak(run_config(shape, micro_batch=micro_batch, seq=seq, **settings)).instant

    fullest = peak()
    found = verdict(fullest.total, gpu)
    budget = gpu.usable_bytes - found.reserve
    blocks = last_within(lambda n: peak(blocks=n).total, budget)
    ends = {
        "blocks": blocks,
        "micro_batch": last_within(lambda n: peak(micro_batch=n).total, budget),
        "seq": last_within(lambda n: _peak_or_wall(peak, n, config), budget),
    }
    params = shape_params(config, blocks)
    # A device that holds very many blocks would squeeze the model into a corner: the caption says how many.
    span = max(config.num_layers + 1, round(1.25 * max(config.num_layers, min(blocks, 4 * config.num_layers))))
    return Answer(
        picture=_picture(config, fullest, peak(blocks=span), span, found, blocks),
        caption=_caption(config, found, blocks, params),
        table=_table(config, fullest, ends, params),
        call=_call(model, settings, micro_batch, seq, device),
        numbers=dict(fullest.terms)
        | {"total": fullest.total, "headroom": found.room}
        | {f"largest_{name}": size for name, size in ends.items()},
    )


def limits(model: str, **others: object) -> dict[str, tuple[int, str]]:
    """Return the tokens that a model with learned positions can take."""
    config = preset(model)
    return (
        {"seq": (config.max_positions, f"the most that {model} has positions for")} if config.learned_positions else {}
    )


def _peak_or_wall(peak: Callable[..., MemoryInstant], seq: int, config: ModelConfig) -> float:
    """Bytes at the peak; learned positions are a wall."""
    return math.inf if config.learned_positions and seq > config.max_positions else peak(seq=seq).total


def by_role(instant: MemoryInstant) -> dict[str, float]:
    """Return the GB of an instant by role."""
    return {role: size / GB for role, size in sum_by_role(dict(instant.terms)).items()}


def shape_params(config: ModelConfig, blocks: int) -> int:
    """Return the parameters of a model of the same shape with another number of blocks."""
    one, two = (count_params(replace(config, num_layers=n)).total for n in (1, 2))
    return one + (blocks - 1) * (two - one)


def _picture(
    config: ModelConfig, fullest: MemoryInstant, large: MemoryInstant, span: int, found: Verdict, blocks: int
) -> str:
    """Draw the peak by role, and below it how it grows from this model to one of `span` blocks."""
    present, needs, gpu = config.num_layers, f"{fullest.total / GB:,.1f} GB", found.device
    roles, at_span = by_role(fullest), by_role(large)
    limit = gpu.usable_bytes / GB
    limit_text = f"{gpu.name}: {limit:.1f} GB"
    title = f"{config.name}, {present} blocks, at the peak"
    head, below = bars(
        [Bar(label="", parts=roles, text=needs)], top=0, title=title, labels=0, limit=limit, limit_text=limit_text
    )
    names, below = legend(ROLES, top=below + 10)
    edges = {}
    for role in ROLES:
        step = (at_span[role] - roles[role]) / (span - present)
        edges[role] = (max(0.0, roles[role] - present * step), at_span[role])
    marks = [(present, f"{config.name}: {present}")]
    if 0 < blocks < span:
        marks.append((blocks, f"fits up to {blocks}"))
    rest, end = areas(
        edges,
        top=below + 20,
        title="GB at the peak, with fewer or more such blocks",
        at=(0, span),
        xlabel="blocks",
        limit=limit,
        limit_text=limit_text,
        marks=marks,
    )
    alt = (
        f"A stacked bar of {needs} against a line at {limit_text}: "
        + ", ".join(f"{role} {size:,.1f} GB" for role, size in roles.items())
        + f". Below it stacked areas of the same terms over 0 to {span} blocks; {blocks} of them fit."
    )
    return picture(head + names + rest, end, alt)


def _caption(config: ModelConfig, found: Verdict, blocks: int, params: int) -> str:
    left, has = found.room / GB, found.device.usable_bytes / GB
    room = f"{left:,.1f} GB to spare" if left >= 0 else f"{-left:,.1f} GB too many"
    needs = (
        f"{config.name} needs {found.peak / GB:,.1f} GB at its peak, and one {found.device.name} has {has:.1f}: "
        f"{found.word}, {room}."
    )
    if not blocks:
        return f"{needs} With these settings not even one block of this shape fits."
    return (
        f"{needs} With these settings this shape stops fitting after {blocks:,} blocks, "
        f"at {format_count(params)} parameters; {found.reserve / GB:.1f} GB are kept free."
    )


def _table(config: ModelConfig, fullest: MemoryInstant, ends: dict[str, int], params: int) -> str:
    terms = {
        name.replace("_", " ").replace(".", ": "): (find_term(name).role, f"{size / GB:,.2f} GB")
        for name, size in fullest.terms
    }
    terms["in all"] = ("", f"{fullest.total / GB:,.2f} GB")
    positions = ", all its positions" if config.learned_positions and ends["seq"] == config.max_positions else ""
    fits = {
        "blocks of this shape": f"{ends['blocks']:,} ({format_count(params)} parameters)",
        "sequences in a micro-batch": f"{ends['micro_batch']:,}",
        "tokens in a sequence": f"{ends['seq']:,}{positions}",
    }
    present = {name: words for name, words in fits.items() if words[0] != "0"}
    return table(
        {
            f"What one device holds at the peak, {fullest.name}": terms,
            "The most that fits, all else as it is": {name: ("", present.get(name, "nothing fits")) for name in fits},
        }
    )


def _call(model: str, settings: dict[str, str], micro_batch: int, seq: int, device: str) -> str:
    lines = "".join(f'    {name}="{value}",\n' for name, value in settings.items())
    return (
        "from lablib.calc.memory import verdict\n"
        "from lablib.calc.memory.timeline import memory_timeline\n\n"
        f'step = memory_timeline(\n    "{model}",\n{lines}    micro_batch={micro_batch},\n    seq={seq},\n)\n'
        f'print(step.peak.terms, step.peak_bytes, verdict(step.peak_bytes, "{device}").room)\n'
    )


EXPLORER = Explorer(
    name="training",
    title="One training run on one device",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="llama-3-8b"),
        Control(name="recipe", label="recipe", options=tuple((name, name) for name in RECIPES), first="mixed-bf16"),
        Control(name="optimizer", label="optimizer", options=tuple((name, name) for name in OPTIMIZERS), first="adamw"),
        Control(
            name="micro_batch",
            label="sequences in a micro-batch",
            options=number_options(MICRO_BATCHES),
            first=1,
            slider=True,
        ),
        Control(name="seq", label="tokens in a sequence", options=number_options(SEQS), first=8192, slider=True),
        Control(name="recompute", label="recomputation", options=tuple(RECOMPUTE.items()), first="none"),
        Control(name="device", label="GPU", options=device_options(), first="h100"),
    ),
    compute=explore,
    limits=limits,
)
