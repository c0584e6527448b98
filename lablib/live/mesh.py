"""The mesh explorer: ranks in their nodes, and of one of them its groups, samples, tokens, layers, heads and experts.

A cell of the picture chooses its rank, so a reader walks over the mesh with the mouse or the arrow keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from lablib.calc.errors import plural
from lablib.calc.layouts import Holding, Mesh, holdings, mesh
from lablib.calc.models import ModelConfig, preset
from lablib.live import cluster
from lablib.live.explorer import Answer, Control, Explorer, Value, model_options, number_options, table
from lablib.live.svg import COLORS, WIDTH, choice, choices, legend, picture, rect, text

MODELS = ("gpt2", "llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")
POWERS = cluster.POWERS[:7]
STAGES_INSIDE = "tp-cp-ep-pp-dp"
#: The fastest axis first; experts have ep where it stands, etp and edp in place of tp and dp.
ORDERS = {
    "tp-cp-ep-dp-pp": "tp-cp-dp-pp: Megatron-LM, torchtitan",
    STAGES_INSIDE: "tp-cp-pp-dp: Llama 3, Megatron-LM with --use-tp-pp-dp-mapping",
    "pp-dp-ep-cp-tp": "pp-dp-cp-tp: tp slowest, no framework's default",
}
DEAL = {"contiguous": "neighbours: Megatron-LM", "interleaved": "every dp-th: DistributedSampler"}
CUT = {"zigzag": "zigzag: a chunk from each end", "contiguous": "contiguous"}
#: What the other members of a group have.
GROUPS = {
    "tp": "other parts of its layers",
    "cp": "other tokens of its samples",
    "dp": "other samples",
    "pp": "other layers",
    "dp x cp": "its gradients are summed over, but for experts",
    "etp": "other parts of its experts",
    "ep": "other experts",
    "edp": "the same experts, whose gradients are summed over",
}
COLUMNS, PAD, APART, LINE, BATCH = 8, 3.0, 6.0, 14.0, 56.0


def explore(rank: int, **state: Value) -> Answer:
    """Return what a rank holds, and where it stands among the others."""
    model, ranks, held, words, settings = _layout(**state)
    mine = held[rank]
    sizes = {name: sum(map(len, getattr(mine, name))) for name in ("samples", "tokens")}
    sizes |= {name: len(getattr(mine, name)) for name in ("layers", "heads", "experts")}
    return Answer(
        picture=_picture(model, ranks, held, words, rank, state["seq"]),
        caption=_caption(ranks, mine, rank),
        table=_table(ranks, mine, rank, state),
        call=_call(model, ranks, rank, settings),
        numbers=sizes | {f"{name} ranks": len(group) for name, group in mine.groups.items()},
    )


def limits(**state: Value) -> dict[str, tuple[int, str]]:
    """Return the degrees that a model and its GPUs leave, as in the cluster explorer, and the last rank."""
    return cluster.limits(config="", **state) | {"rank": (state["gpus"] - 1, f"the last of {state['gpus']}")}


@lru_cache(maxsize=4)
def _layout(
    model: str, gpus: int, tp: int, cp: int, pp: int, ep: int, order: str, gpus_per_node: int, **settings: Value
) -> tuple[ModelConfig, Mesh, list[Holding], list[str], dict[str, Value]]:
    """Return the model, the mesh, what its ranks hold, also in words, and the settings of `holdings`.

    The chosen rank changes none of it, so it is kept while a reader walks from rank to rank.
    """
    config, dp = preset(model), gpus // (tp * cp * pp)
    ranks = mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=order, gpus_per_node=gpus_per_node)
    if config.is_moe:
        settings |= {"ep": ep, "etp": cluster.expert_split(tp, ep)}
    held, words = holdings(config, ranks, **settings), []
    for rank, mine in enumerate(held):
        at = [f"{axis} {place}" for axis, place in ranks.coordinates(rank).items() if ranks.size(axis) > 1]
        words.append("; ".join([f"rank {rank}", f"node {ranks.node(rank)}", *at, *_holds(mine).values()]))
    return config, ranks, held, words, settings


def spans(parts: Iterable[range]) -> str:
    """Write numbers: neighbours as "0 to 3", and of many pieces the first three and the last."""
    runs: list[list[int]] = []
    for part in parts:
        for first, last in [(part[0], part[-1])] if part.step == 1 else [(number, number) for number in part]:
            if runs and runs[-1][1] == first - 1:
                runs[-1][1] = last
            else:
                runs.append([first, last])
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in runs]
    words[3:-1] = words[3:-1] if len(words) <= 8 else ["..."]
    return (" and " if len(words) == 2 else ", ").join(words)


def _listed(numbers: Iterable[int]) -> str:
    return spans(range(number, number + 1) for number in numbers)


def _holds(mine: Holding) -> dict[str, str]:
    """Return what a rank has by the axis that decides it, in words."""

    def some(what: str, *parts: range) -> str:
        return f"{what}{'s' * (sum(map(len, parts)) > 1)} {spans(parts)}"

    ends = " and the embedding" * mine.embedding + " and the output head" * mine.head
    found = {"dp": some("sample", *mine.samples), "cp": f"of each {some('token', *mine.tokens)}"}
    found |= {"pp": some("layer", mine.layers) + ends, "tp": some("query head", mine.heads)}
    return found | ({"ep": _part(mine) + some("expert", mine.experts)} if mine.experts else {})


def _part(mine: Holding) -> str:
    """Return which part a rank has of each of its experts, where they are split."""
    split = len(mine.groups.get("etp", [0]))
    return f"1/{split} of each of " if split > 1 else ""


def _picture(model: ModelConfig, ranks: Mesh, held: list[Holding], words: list[str], rank: int, seq: int) -> str:
    """Draw the ranks in their nodes, and below them what the chosen one holds."""
    size, nodes = ranks.gpus_per_node, f"{plural(ranks.nodes, 'node')} of {ranks.gpus_per_node}"
    across, lines = min(size, COLUMNS), -(-min(size, ranks.ranks) // COLUMNS)
    side = COLUMNS // across
    node_wide = (WIDTH - APART * (side - 1)) / side
    axes = [axis for axis in ranks.order if axis != "ep" and ranks.size(axis) > 1]
    experts = ["ep", "edp"] if len(held[0].groups.get("ep", [])) > 1 else []
    wide, tall = (node_wide - 2 * PAD) / across, 18 + LINE * (-(-len(axes) // 2) + bool(experts))
    high = 18 + lines * tall + 2 * PAD + APART
    shapes, cells = [text(0, 12, f"{plural(ranks.ranks, 'rank')} in {nodes}", bold=True)], []
    for node in range(ranks.nodes):
        x, y = node % side * (node_wide + APART), 22 + node // side * high
        shapes.append(text(x, y + 12, f"node {node}"))
        shapes.append(rect(x + 1, y + 17, node_wide - 2, lines * tall + 2 * PAD, "", outline=1.2))
        for place in range(min(size, ranks.ranks - node * size)):
            at = x + PAD + place % across * wide, y + 17 + PAD + place // across * tall
            cells.append(_cell(ranks, held, words, axes, experts, node * size + place, rank, (*at, wide, tall)))
    below = 22 + -(-ranks.nodes // side) * high
    names, below = legend(["tp", "cp", "dp", "pp", *(["ep", "edp"] if model.is_moe else [])], top=below)
    rest, end = _strips(model, ranks, held[rank], seq, below + 16)
    holds = ", ".join(_holds(held[rank]).values())
    alt = f"{plural(ranks.ranks, 'rank')} in {nodes}, and below them as bars what rank {rank} holds: {holds}."
    return picture([*shapes, choices("The chosen rank", cells), *names, *rest], end + 4, alt, role="group")


def _cell(
    ranks: Mesh, held: list[Holding], words: list[str], axes: list[str], experts: list[str], rank: int, chosen: int,
    box: tuple[float, float, float, float],
) -> str:  # fmt: skip
    """Draw a rank: its number and coordinates, and which groups of the chosen rank it is in, of experts in the last line."""
    (x, y, wide, tall), groups, at = box, held[chosen].groups, ranks.coordinates(rank)
    last = y + tall - 1 - LINE * bool(experts)
    shapes = [rect(x + 1, y + 1, wide - 2, tall - 2, "", outline=3 if rank == chosen else 0.5)]
    for axis in [name for name in (*axes, *experts) if rank in groups[name] and rank != chosen]:
        top, end = (last, y + tall - 1) if axis in experts else (y + 1, last)
        shapes.append(rect(x + 1, top, wide - 2, end - top, axis, pale=True))
        shapes.append(text(x + wide - 4, top + (10 if axis in experts else 13), axis, anchor="end"))
    lines = [" ".join(f"{axis[0]}{at[axis]}" for axis in axes[first : first + 2]) for first in range(0, len(axes), 2)]
    lines += [f"e{held[rank].groups['ep'].index(rank)}"] if experts else []
    shapes.append(text(x + 4, y + 14, str(rank), bold=True))
    shapes += [text(x + 4, y + 14 + LINE * number, line) for number, line in enumerate(lines, 1)]
    return choice(f"rank={rank}", words[rank], shapes, chosen=rank == chosen)


def _strips(model: ModelConfig, ranks: Mesh, mine: Holding, seq: int, top: float) -> tuple[list[str], float]:
    """Draw a rank's part of the batch, samples across and tokens down, and of layers, heads and experts."""
    batch, cut = ranks.size("dp") * sum(map(len, mine.samples)), ranks.size("cp") > 1
    left, y = 64.0, top + 38
    wide, long = (WIDTH - left - 2) / batch, WIDTH - left - 78
    shapes = [text(0, top + 12, "What it holds", bold=True), text(left - 6, y + 12, "batch", anchor="end")]
    shapes.append(text(left, top + 30, f"{plural(batch, 'sample')} across, {seq:,} tokens down"))
    shapes.append(rect(left, y, wide * batch, BATCH, "", outline=0.8))
    for x in (left + wide * sample for part in mine.samples for sample in part):
        shapes.append(rect(x, y, wide, BATCH, "dp", pale=cut))
        for part in mine.tokens if cut else []:
            shapes.append(rect(x, y + BATCH * part.start / seq, wide, BATCH * len(part) / seq, "cp"))
    rows = {"layers": ("pp", model.num_layers), "heads": ("tp", model.num_heads), "experts": ("ep", model.num_experts)}
    y += BATCH + 8
    for name, (axis, whole) in ((name, row) for name, row in rows.items() if row[1]):
        part = getattr(mine, name)
        shapes.append(rect(left + long * part.start / whole, y, long * len(part) / whole, 14, axis))
        shapes += [text(left - 6, y + 12, name, anchor="end"), rect(left, y, long, 14, "", outline=0.8)]
        shapes.append(text(left + long + 6, y + 12, f"{len(part)} of {whole}"))
        y += 20
    return shapes, y


def _caption(ranks: Mesh, mine: Holding, rank: int) -> str:
    where = ", ".join(f"{axis} {at}" for axis, at in ranks.coordinates(rank).items() if axis != "ep")
    leaving = [name for name, group in mine.groups.items() if len(ranks.nodes_of(group)) > 1]
    leave = f"Its groups {', '.join(leaving)} leave the node." if leaving else "None of its groups leaves the node."
    return f"Rank {rank} ({where}; node {ranks.node(rank)}) holds {', '.join(_holds(mine).values())}. {leave}"


def _table(ranks: Mesh, mine: Holding, rank: int, state: dict[str, Value]) -> str:
    tp, cp, dp, pp = map(ranks.size, ("tp", "cp", "dp", "pp"))
    groups, readers = {}, _listed(ranks.group(rank, "tp", "cp", "pp"))
    for name, group in ((name, mine.groups[name]) for name in GROUPS if len(mine.groups.get(name, [])) > 1):
        if name in ("etp", "ep", "edp") and not mine.experts:
            continue  # its stage has dense layers only
        nodes = ranks.nodes_of(group)
        where = f"{_listed(group)}; node{'s' * (len(nodes) > 1)} {_listed(nodes)}"
        groups[f"{name}: {GROUPS[name]}"] = (name if name in COLORS else "", where)
    edp = len(mine.groups["edp"]) if "edp" in mine.groups else cp * dp
    if state["order"] == STAGES_INSIDE and pp > 1 and edp != dp:
        groups["Megatron Core 0.19.2"] = "", f"refuses this: in this order edp={edp} must be dp={dp}"
    samples = {f"micro-batch {number}": ("dp", spans([part])) for number, part in enumerate(mine.samples)}
    samples[f"read by {plural(tp * cp * pp, 'rank')}"] = "", readers
    product = f"{dp} x {state['micro_batch']} x {state['rounds']}"
    samples["in a step"] = "", f"dp x samples x micro-batches = {product} = {dp * sum(map(len, mine.samples)):,}"
    holds = {f"by its {axis}": (axis, words) for axis, words in _holds(mine).items()}
    groups = groups or {"each": ("", "it alone")}
    return table({f"What rank {rank} holds": holds, "Its samples": samples, "The ranks of its groups": groups})


def _call(model: ModelConfig, ranks: Mesh, rank: int, settings: dict[str, Value]) -> str:
    sizes = ", ".join(f"{axis}={ranks.size(axis)}" for axis in ("tp", "cp", "dp", "pp"))
    given = "".join(f", {name}={value!r}" for name, value in settings.items()).replace("'", '"')
    return (
        "from lablib.calc.layouts import holdings, mesh\n\n"
        f'ranks = mesh({sizes}, order="{"-".join(ranks.order)}", gpus_per_node={ranks.gpus_per_node})\n'
        f'mine = holdings("{model.name}", ranks{given})[{rank}]\n'
        "print(mine)\nprint({name: ranks.nodes_of(group) for name, group in mine.groups.items()})\n"
    )


def _sizes(name: str, label: str, options: Iterable[int], first: int, *, fold: bool = False) -> Control:
    return Control(name=name, label=label, options=number_options(options), first=first, slider=True, fold=fold)


EXPLORER = Explorer(
    name="mesh",
    title="Which rank holds what",
    controls=(
        Control(name="model", label="model", options=model_options(MODELS), first="mixtral-8x7b"),
        _sizes("gpus", "GPUs", POWERS[1:], 32),
        _sizes("tp", "tensor parallel (tp)", POWERS[:5], 2),
        _sizes("cp", "context parallel (cp)", POWERS[:5], 2),
        _sizes("pp", "pipeline stages (pp)", POWERS[:5], 2),
        _sizes("ep", "expert parallel (ep)", POWERS, 8),
        Control(name="order", label="axes, fastest first", options=tuple(ORDERS.items()), first="tp-cp-ep-dp-pp"),
        _sizes("gpus_per_node", "GPUs in a node", POWERS[1:5], 8),
        _sizes("rank", "rank", range(64), 5),
        _sizes("micro_batch", "samples in a micro-batch", POWERS[:3], 1, fold=True),
        _sizes("rounds", "micro-batches in a step", POWERS[:4], 2, fold=True),
        _sizes("seq", "tokens of a sample", [2**k for k in range(10, 18)], 8192, fold=True),
        Control(name="sampler", label="samples of a rank", options=tuple(DEAL.items()), first="contiguous", fold=True),
        Control(name="tokens", label="tokens of a rank", options=tuple(CUT.items()), first="zigzag", fold=True),
    ),
    compute=explore,
    limits=limits,
)
