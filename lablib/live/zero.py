"""The ZeRO explorer: memory and traffic of a rank in every stage, and the number of ranks that it takes to fit.

States are `state_terms`, at the 16 bytes of mixed precision with AdamW. Traffic is what one rank sends in a step,
by collective, with 2-byte weights and gradients.
"""

from __future__ import annotations

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.memory import verdict
from lablib.calc.models import preset
from lablib.calc.parallel import max_params, state_terms, zero_traffic
from lablib.calc.params import count_params
from lablib.calc.units import GB, format_count
from lablib.live.explorer import Answer, Control, Explorer, device_options, model_options, number_options, table
from lablib.live.svg import Bar, bars, legend, picture

STAGES = {0: "DDP", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
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
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
#: No job is larger than this: where so many ranks do not help, no number does.
MAX_RANKS = 2**24


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


def explore(model: str, ranks: int, stage: int, micro_batches: int, device: str) -> Answer:
    """Return what each rank holds and sends, in the chosen stage and beside it in the others."""
    params, gpu = count_params(preset(model)).total, accelerator(device)
    held = {each: state_terms(params, ranks, each) for each in STAGES}
    sent = {each: zero_traffic(params, ranks, each, micro_batches) for each in STAGES}
    ends = {"ranks": min_ranks(params, stage, gpu.usable_bytes), "params": max_params(gpu.usable_bytes, ranks, stage)}
    numbers = {name: size for name, size in held[stage].items() if size}
    for each in STAGES:
        numbers |= {f"held_{each}": sum(held[each].values()), f"sent_{each}": round(sum(sent[each].values()))}
    return Answer(
        picture=_picture(model, ranks, stage, micro_batches, held, sent, gpu),
        caption=_caption(model, ranks, stage, held, sent, gpu),
        table=_table(stage, held[stage], sent[stage], ends),
        call=_call(model, ranks, stage, micro_batches),
        numbers=numbers | {"least_ranks": ends["ranks"] or 0, "largest_params": ends["params"]},
    )


def _roles(terms: dict[str, int]) -> dict[str, float]:
    rest = sum(size for name, size in terms.items() if name not in ("weights", "gradients"))
    return {"weights": terms["weights"] / GB, "gradients": terms["gradients"] / GB, "optimizer": rest / GB}


def _carried(sent: dict[str, float]) -> dict[str, float]:
    found = {"gradients": 0.0, "weights": 0.0}
    for name, size in sent.items():
        found[name.split(" of ")[1]] += size / GB
    return found


def _size(value: float) -> str:
    """Write GB with three digits or so: a shard on a thousand ranks is small."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f} GB"


def _picture(
    model: str,
    ranks: int,
    stage: int,
    micro_batches: int,
    held: dict[int, dict[str, int]],
    sent: dict[int, dict[str, float]],
    gpu: Accelerator,
) -> str:
    def rows(parts_of: dict[int, dict[str, float]]) -> list[Bar]:
        return [
            Bar(label=STAGES[each], parts=parts, text=_size(sum(parts.values())), strong=each == stage)
            for each, parts in parts_of.items()
        ]

    memory, traffic = (
        rows({each: read(terms) for each, terms in found.items()}) for read, found in ((_roles, held), (_carried, sent))
    )
    on = f"{ranks:,} ranks" if ranks > 1 else "1 rank"
    of = f"{micro_batches} micro-batches" if micro_batches > 1 else "1 micro-batch"
    first, below = bars(
        memory,
        top=0,
        title=f"Each of {on} holds, {model}",
        limit=gpu.usable_bytes / GB,
        limit_text=f"{gpu.name}: {gpu.usable_bytes / GB:.1f} GB",
    )
    names, below = legend(memory[0].parts, top=below + 10)
    second, end = bars(traffic, top=below + 20, title=f"Each sends in a step of {of}")
    words = "; ".join(
        f"{bar.label} holds {bar.text}, sends {move.text}" for bar, move in zip(memory, traffic, strict=True)
    )
    alt = f"Two groups of four stacked bars for {model} on {on}: {words}. A line stands at {gpu.usable_bytes / GB:.1f} GB."
    return picture(first + names + second, end, alt)


def _caption(
    model: str,
    ranks: int,
    stage: int,
    held: dict[int, dict[str, int]],
    sent: dict[int, dict[str, float]],
    gpu: Accelerator,
) -> str:
    bytes_held, alone = sum(held[stage].values()), sum(held[0].values())
    moved, by_ddp = sum(sent[stage].values()), sum(sent[0].values())
    fits = verdict(bytes_held, gpu, reserve=0).word  # states alone: what a run leaves free is asked of its peak
    times = moved / by_ddp if by_ddp else 1.0
    against = "" if not stage else ", as much as DDP" if times == 1 else f", {times:.3g} times as much as DDP"
    less = f", {alone / bytes_held:.3g} times less than DDP" if stage and ranks > 1 else ""
    return (
        f"{model}, {STAGES[stage]}: a rank holds {_size(bytes_held / GB)} of states{less}, and sends "
        f"{_size(moved / GB)} in a step{against}. It {fits} on one {gpu.name}, before activations."
    )


def _table(stage: int, held: dict[str, int], sent: dict[str, float], ends: dict[str, int | None]) -> str:
    roles = {"weights": "weights", "gradients": "gradients"}
    holds = {
        name.replace("_", " "): (roles.get(name, "optimizer"), _size(size / GB)) for name, size in held.items() if size
    }
    sends = {name: (name.split(" of ")[1], _size(size / GB)) for name, size in sent.items()}
    needs = f"{ends['ranks']:,}" if ends["ranks"] else "no number is enough"
    return table(
        {
            f"One rank holds, {STAGES[stage]}": holds | {"in all": ("", _size(sum(held.values()) / GB))},
            "One rank sends in a step": sends | {"in all": ("", _size(sum(sent.values()) / GB))},
            "Where it fits, states alone": {
                "least ranks for this model": ("", needs),
                "largest model on these ranks": ("", f"{format_count(ends['params'])} parameters"),
            },
        }
    )


def _call(model: str, ranks: int, stage: int, micro_batches: int) -> str:
    return (
        "from lablib.calc.models import preset\n"
        "from lablib.calc.params import count_params\n"
        "from lablib.calc.parallel.zero import state_terms, zero_traffic\n\n"
        f'params = count_params(preset("{model}")).total\n'
        f"held = state_terms(params, ranks={ranks}, stage={stage})\n"
        f"sent = zero_traffic(params, ranks={ranks}, stage={stage}, micro_batches={micro_batches})\n"
        "print(held, sum(held.values()), sent, sum(sent.values()))\n"
    )


EXPLORER = Explorer(
    name="zero",
    title="ZeRO over data-parallel ranks",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="llama-3-8b"),
        Control(name="ranks", label="ranks", options=number_options(RANKS), first=8, slider=True),
        Control(name="stage", label="stage", options=tuple(STAGES.items()), first=1),
        Control(
            name="micro_batches",
            label="micro-batches in a step",
            options=number_options(MICRO_BATCHES),
            first=1,
            slider=True,
        ),
        Control(name="device", label="GPU", options=device_options(), first="h100"),
    ),
    compute=explore,
)
