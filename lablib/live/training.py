"""The training explorer: memory of one training run on one device, and the size at which it stops fitting.

The total is `training_memory` of the model as it is. Every block of one shape adds the same bytes, and so does every
sequence of a micro-batch and every token of a sequence. So two blocks say what n blocks need, and the sizes at which a
run stops fitting follow from a division; the tests hold them to `training_memory` at that size and at the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.memory import ROLES, MemoryBreakdown, find_term, training_memory
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params
from lablib.calc.precision import OPTIMIZERS, RECIPES
from lablib.calc.units import GB, format_count
from lablib.live.explorer import Answer, Control, Explorer, device_options, model_options, number_options, table
from lablib.live.svg import Bar, areas, bars, picture

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
DEVICES = ("a10", "rtx-4090", "l40s", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "mi300x")
MICRO_BATCHES = tuple(2**k for k in range(7))
SEQS = tuple(512 * 2**k for k in range(9))
RECOMPUTE = {"none": "none", "selective": "selective: the attention core", "full": "full: all but each block's input"}


def largest(bytes_at: Callable[[int], int], capacity: int) -> int:
    """Return the largest n of at least 0 at which bytes that grow by the same step for each n still fit."""
    first = bytes_at(1)
    return max(0, 1 + (capacity - first) // (bytes_at(2) - first))


def explore(model: str, recipe: str, optimizer: str, micro_batch: int, seq: int, recompute: str, device: str) -> Answer:
    """Return what a training run on one device needs, by term, and where it stops fitting."""
    config, gpu = preset(model), accelerator(device)
    settings = {"recipe": recipe, "optimizer": optimizer, "recompute": recompute}

    def run(blocks: int, micro_batch: int = micro_batch, seq: int = seq) -> MemoryBreakdown:
        shape = replace(config, num_layers=blocks)
        return training_memory(shape, micro_batch=micro_batch, seq=seq, **settings)

    def whole(micro_batch: int = micro_batch, seq: int = seq) -> int:
        one, two = (run(blocks, micro_batch, seq).total for blocks in (1, 2))
        return one + (config.num_layers - 1) * (two - one)

    memory = run(config.num_layers)
    capacity = gpu.memory_bytes
    blocks = largest(lambda n: run(n).total, capacity)
    batch = largest(lambda n: whole(micro_batch=n), capacity)
    tokens = largest(lambda n: whole(seq=n), capacity)
    if config.learned_positions:
        tokens = min(tokens, config.max_positions)
    ends = {"blocks": blocks, "micro_batch": batch, "seq": tokens}
    params = shape_params(config, blocks)
    return Answer(
        picture=_picture(config, memory, (run(1), run(2)), gpu, blocks),
        caption=_caption(config, memory, gpu, blocks, params),
        table=_table(config, memory, ends, params),
        call=_call(model, settings, micro_batch, seq, device),
        numbers=dict(memory.terms)
        | {"total": memory.total, "headroom": memory.headroom(gpu)}
        | {f"largest_{name}": size for name, size in ends.items()},
    )


def shape_params(config: ModelConfig, blocks: int) -> int:
    """Return the parameters of a model of the same shape with another number of blocks."""
    one, two = (count_params(replace(config, num_layers=n)).total for n in (1, 2))
    return one + (blocks - 1) * (two - one)


def _picture(
    config: ModelConfig,
    memory: MemoryBreakdown,
    small: tuple[MemoryBreakdown, MemoryBreakdown],
    gpu: Accelerator,
    blocks: int,
) -> str:
    present, needs = config.num_layers, f"{memory.total / GB:,.1f} GB"
    roles = {role: size / GB for role, size in memory.by_role().items()}
    limit, limit_text = gpu.memory_gb, f"{gpu.name}: {gpu.memory_gb:.1f} GB"
    title = f"{config.name}, {config.num_layers} blocks"
    head, below = bars(
        [Bar(label="", parts=roles, text=needs)], top=0, title=title, labels=0, limit=limit, limit_text=limit_text
    )
    # A device that holds very many blocks would squeeze the model into a corner: the caption says how many.
    span = 1.25 * max(present, min(blocks, 4 * present))
    one, two = (breakdown.by_role() for breakdown in small)
    edges = {}
    for role in ROLES:
        step = two[role] - one[role]
        edges[role] = ((one[role] - step) / GB, (one[role] + (span - 1) * step) / GB)
    marks = [(present, f"{config.name}: {present}")]
    if 0 < blocks < span:
        marks.append((blocks, f"fits up to {blocks}"))
    rest, end = areas(
        edges,
        top=below + 14,
        title="GB, with fewer or more such blocks",
        span=span,
        xlabel="blocks",
        limit=limit,
        limit_text=limit_text,
        marks=marks,
    )
    alt = (
        f"A stacked bar of {needs} against a line at {limit_text}: "
        + ", ".join(f"{role} {size:,.1f} GB" for role, size in roles.items())
        + f". Below it stacked areas of the same terms over 0 to {span:.0f} blocks; they cross the line after {blocks}."
    )
    return picture(head + rest, end, alt)


def _caption(config: ModelConfig, memory: MemoryBreakdown, gpu: Accelerator, blocks: int, params: int) -> str:
    left = memory.headroom(gpu)
    verdict = f"{left / GB:,.1f} GB to spare" if left >= 0 else f"{-left / GB:,.1f} GB too many"
    needs = f"{config.name} needs {memory.total / GB:,.1f} GB, and one {gpu.name} has {gpu.memory_gb:.1f}: {verdict}."
    if not blocks:
        return f"{needs} With these settings not even one block of this shape fits."
    return (
        f"{needs} With these settings this shape stops fitting after {blocks:,} blocks, "
        f"at {format_count(params)} parameters."
    )


def _table(config: ModelConfig, memory: MemoryBreakdown, ends: dict[str, int], params: int) -> str:
    terms = {
        name.replace("_", " ").replace(".", ": "): (find_term(name).role, f"{size / GB:,.2f} GB")
        for name, size in memory.terms.items()
    }
    terms["in all"] = ("", f"{memory.total / GB:,.2f} GB")
    positions = ", all its positions" if config.learned_positions and ends["seq"] == config.max_positions else ""
    fits = {
        "blocks of this shape": f"{ends['blocks']:,} ({format_count(params)} parameters)",
        "sequences in a micro-batch": f"{ends['micro_batch']:,}",
        "tokens in a sequence": f"{ends['seq']:,}{positions}",
    }
    nothing = {name: words for name, words in fits.items() if words[0] != "0"}
    return table(
        {
            "What one device holds": terms,
            "The most that fits, all else as it is": {name: ("", nothing.get(name, "nothing fits")) for name in fits},
        }
    )


def _call(model: str, settings: dict[str, str], micro_batch: int, seq: int, device: str) -> str:
    lines = "".join(f'    {name}="{value}",\n' for name, value in settings.items())
    return (
        "from lablib.calc.memory import training_memory\n\n"
        f'memory = training_memory(\n    "{model}",\n{lines}    micro_batch={micro_batch},\n    seq={seq},\n)\n'
        f'print(memory.terms, memory.total, memory.headroom("{device}"))\n'
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
        Control(name="device", label="GPU", options=device_options(DEVICES), first="h100"),
    ),
    compute=explore,
)
