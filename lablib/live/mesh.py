"""The mesh explorer: ranks in their nodes, and of one of them its groups, samples, tokens, layers, heads and experts.

A cell of the picture chooses its rank, so a reader walks over the mesh with the mouse or the arrow keys.
"""

from __future__ import annotations

from collections.abc import Iterable

from lablib.calc.errors import plural
from lablib.calc.layouts import DEFAULT_ORDER, Holding, Mesh, holdings, mesh
from lablib.calc.models import ModelConfig, preset
from lablib.live import cluster
from lablib.live.explorer import Answer, Control, Explorer, Value, model_options, number_options, table
from lablib.live.svg import COLORS, WIDTH, choice, choices, legend, picture, rect, text

MODELS = ("gpt2", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
POWERS = cluster.POWERS[:7]
STAGES_INSIDE = "tp-cp-ep-pp-dp"
#: The fastest axis first; experts have ep where it stands, etp and edp in place of tp and dp.
ORDERS = {
    DEFAULT_ORDER: "tp, cp, dp, pp: Megatron-LM, torchtitan",
    STAGES_INSIDE: "tp, cp, pp, dp: Llama 3, Megatron-LM with --use-tp-pp-dp-mapping",
    "pp-dp-ep-cp-tp": "pp, dp, cp, tp: tp slowest, in no framework",
}
DEAL = {"contiguous": "neighbours: Megatron-LM", "interleaved": "every dp-th: DistributedSampler"}
CUT = {"zigzag": "zigzag: a chunk from each end", "contiguous": "contiguous"}
#: What the other members of a group have.
GROUPS = {
    "tp": "other parts of its layers",
    "cp": "other tokens of its samples",
    "dp": "other samples",
    "pp": "other layers",
    "dp x cp": "its gradients are summed over",
    "etp": "other parts of its experts",
    "ep": "other experts",
    "edp": "the same experts",
}
COLUMNS, PAD, APART, LINE, BATCH = 8, 3.0, 6.0, 14.0, 56.0


def explore(**state: Value) -> Answer:
    """Return what a rank holds, and where it stands among the others."""
    model, ranks, settings = _layout(state)
    held = holdings(model, ranks, **settings)
    mine = held[state["rank"]]
    numbers = {f"{name} ranks": len(group) for name, group in mine.groups.items()}
    numbers |= {f"{name} nodes": len(ranks.nodes_of(group)) for name, group in mine.groups.items()}
    numbers |= {name: sum(map(len, getattr(mine, name))) for name in ("samples", "tokens")}
    numbers |= {name: len(getattr(mine, name)) for name in ("layers", "heads", "experts")}
    return Answer(
        picture=_picture(model, ranks, held, state),
        caption=_caption(model, ranks, mine, state),
        table=_table(ranks, mine, state),
        call=_call(state, ranks, settings),
        numbers=numbers | {"first sample": mine.samples[0][0], "embedding": mine.embedding, "head": mine.head},
    )


def limits(**state: Value) -> dict[str, tuple[int, str]]:
    """Return the degrees that a model and its GPUs leave, as in the cluster explorer, and the last rank."""
    return cluster.limits(config="", **state) | {"rank": (state["gpus"] - 1, f"the last of {state['gpus']}")}


def _layout(state: dict[str, Value]) -> tuple[ModelConfig, Mesh, dict[str, Value]]:
    """Return the model, the mesh, and the settings of `holdings` for a state of the controls."""
    model, (tp, cp, pp) = preset(state["model"]), (state[axis] for axis in ("tp", "cp", "pp"))
    dp, node = state["gpus"] // (tp * cp * pp), state["gpus_per_node"]
    settings = {name: state[name] for name in ("seq", "micro_batch", "rounds", "sampler", "tokens")}
    if model.is_moe:
        settings |= {"ep": state["ep"], "etp": cluster.expert_split(tp, state["ep"])}
    return model, mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=state["order"], gpus_per_node=node), settings


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
    """Return what a rank has of a batch and of a model, in words."""
    ends = [name for name, has in (("embedding", mine.embedding), ("output head", mine.head)) if has]
    found = {"samples": spans(mine.samples), "tokens of each": spans(mine.tokens), "layers": spans([mine.layers])}
    found |= {"query heads": spans([mine.heads])} | ({"experts": spans([mine.experts])} if mine.experts else {})
    return found | ({"beside layers": " and ".join(ends)} if ends else {})


def _picture(model: ModelConfig, ranks: Mesh, held: list[Holding], state: dict[str, Value]) -> str:
    """Draw the ranks in their nodes, and below them what the chosen one holds."""
    size, nodes = ranks.gpus_per_node, f"{plural(ranks.nodes, 'node')} of {ranks.gpus_per_node}"
    across, lines = min(size, COLUMNS), -(-min(size, ranks.ranks) // COLUMNS)
    side = COLUMNS // across
    node_wide = (WIDTH - APART * (side - 1)) / side
    axes = [axis for axis in ranks.order if axis != "ep" and ranks.size(axis) > 1]
    folded = len(held[0].groups.get("ep", [])) > 1
    wide, tall = (node_wide - 2 * PAD) / across, 18 + LINE * (-(-len(axes) // 2) + folded)
    high = 18 + lines * tall + 2 * PAD + APART
    shapes, cells = [text(0, 12, f"{plural(ranks.ranks, 'rank')} in {nodes}", bold=True)], []
    for node in range(ranks.nodes):
        x, y = node % side * (node_wide + APART), 22 + node // side * high
        shapes.append(text(x, y + 12, f"node {node}"))
        shapes.append(rect(x + 1, y + 17, node_wide - 2, lines * tall + 2 * PAD, "", outline=1.2))
        for place in range(min(size, ranks.ranks - node * size)):
            at = x + PAD + place % across * wide, y + 17 + PAD + place // across * tall
            cells.append(_cell(ranks, held, axes, node * size + place, state["rank"], (*at, wide, tall)))
    below = 22 + -(-ranks.nodes // side) * high
    names, below = legend(["tp", "cp", "dp", "pp", *(["ep", "edp"] if model.is_moe else [])], top=below)
    rest, end = _strips(model, ranks, held[state["rank"]], state, below + 16)
    alt = f"{plural(ranks.ranks, 'rank')} in {nodes}, and as bars what rank {state['rank']} holds: " + "; ".join(
        f"{name} {words}" for name, words in _holds(held[state["rank"]]).items()
    )
    return picture([*shapes, choices("rank", cells), *names, *rest], end + 4, alt, role="group")


def _cell(
    ranks: Mesh, held: list[Holding], axes: list[str], rank: int, chosen: int, box: tuple[float, float, float, float]
) -> str:
    """Draw a rank: its number, its coordinates, and its groups that the chosen rank is in."""
    (x, y, wide, tall), groups = box, held[chosen].groups
    where = ranks.coordinates(rank) | {"ep": held[rank].groups.get("ep", [rank]).index(rank)}
    folded = len(groups.get("ep", [])) > 1
    shapes = [rect(x + 1, y + 1, wide - 2, tall - 2, "", outline=3 if rank == chosen else 0.5)]
    lines = [f"{axis[0]}{where[axis]}" for axis in axes]
    lines = [" ".join(lines[first : first + 2]) for first in range(0, len(lines), 2)]
    for mark in [
        name for name in (*axes, *(("ep", "edp") if folded else ())) if rank in groups[name] and rank != chosen
    ]:
        # Groups of experts have the last line, with the rank's place among them.
        top, end = (
            (y + tall - LINE - 1, y + tall - 1) if mark in ("ep", "edp") else (y + 1, y + tall - 1 - LINE * folded)
        )
        shapes.append(rect(x + 1, top, wide - 2, end - top, mark, pale=True))
        shapes.append(text(x + wide - 4, top + (10 if mark in ("ep", "edp") else 13), mark, anchor="end"))
    shapes.append(text(x + 4, y + 14, str(rank), bold=True))
    for number, line in enumerate([*lines, *([f"e{where['ep']}"] if folded else [])], 1):
        shapes.append(text(x + 4, y + 14 + LINE * number, line))
    words = [f"{axis} {where[axis]}" for axis in [*axes, *(["ep"] if folded else [])]]
    words = [f"rank {rank}", f"node {ranks.node(rank)}", *words]
    words += [f"{name} {found}" for name, found in _holds(held[rank]).items()]
    return choice(f"rank={rank}", "; ".join(words), shapes, chosen=rank == chosen)


def _strips(
    model: ModelConfig, ranks: Mesh, mine: Holding, state: dict[str, Value], top: float
) -> tuple[list[str], float]:
    """Draw a rank's part of the batch, samples across and tokens down, and of layers, heads and experts."""
    batch, cut = ranks.size("dp") * state["micro_batch"] * state["rounds"], ranks.size("cp") > 1
    left, y = 64.0, top + 38
    wide, long = (WIDTH - left - 2) / batch, WIDTH - left - 78
    shapes = [
        text(0, top + 12, f"What rank {state['rank']} holds", bold=True),
        text(left - 6, y + 12, "batch", anchor="end"),
    ]
    shapes.append(text(left, top + 30, f"{plural(batch, 'sample')} across, {state['seq']:,} tokens down"))
    shapes.append(rect(left, y, wide * batch, BATCH, "", outline=0.8))
    for x in (left + wide * sample for part in mine.samples for sample in part):
        shapes.append(rect(x, y, wide, BATCH, "dp", pale=cut))
        for part in mine.tokens if cut else []:
            down, tall = (BATCH * tokens / state["seq"] for tokens in (part.start, len(part)))
            shapes.append(rect(x, y + down, wide, tall, "cp"))
    rows = {"layers": ("pp", model.num_layers), "heads": ("tp", model.num_heads)}
    y += BATCH + 8
    for name, (axis, whole) in (rows | ({"experts": ("ep", model.num_experts)} if model.is_moe else {})).items():
        part = getattr(mine, name)
        shapes.append(rect(left + long * part.start / whole, y, long * len(part) / whole, 14, axis))
        shapes += [text(left - 6, y + 12, name, anchor="end"), rect(left, y, long, 14, "", outline=0.8)]
        shapes.append(text(left + long + 6, y + 12, f"{len(part)} of {whole}"))
        y += 20
    return shapes, y


def _caption(model: ModelConfig, ranks: Mesh, mine: Holding, state: dict[str, Value]) -> str:
    where = ", ".join(f"{axis} {at}" for axis, at in ranks.coordinates(state["rank"]).items() if axis != "ep")
    holds = ", ".join(f"{name} {words}" for name, words in _holds(mine).items())
    leaving = [name for name, group in mine.groups.items() if len(ranks.nodes_of(group)) > 1]
    leave = f"Its groups {', '.join(leaving)} leave the node." if leaving else "None of its groups leaves the node."
    return f"Rank {state['rank']}, {where}, in node {ranks.node(state['rank'])}, holds of {model.name} and a batch: {holds}. {leave}"


def _table(ranks: Mesh, mine: Holding, state: dict[str, Value]) -> str:
    tp, cp, dp, pp = map(ranks.size, ("tp", "cp", "dp", "pp"))
    groups, together = {}, ranks.group(state["rank"], "tp", "cp", "pp")
    for name, group in ((name, mine.groups[name]) for name in GROUPS if len(mine.groups.get(name, [])) > 1):
        nodes = ranks.nodes_of(group)
        where = f"in node {nodes[0]}" if len(nodes) == 1 else f"over nodes {_listed(nodes)}"
        groups[f"{name}: {GROUPS[name]}"] = (name if name in COLORS else "", f"{_listed(group)} {where}")
    edp = len(mine.groups["edp"]) if "edp" in mine.groups else cp * dp
    if state["order"] == STAGES_INSIDE and pp > 1 and edp != dp:
        groups["Megatron Core 0.19.2"] = "", f"refuses this: with stages inside, edp={edp} must be dp={dp}"
    data = {f"micro-batch {number}": ("dp", f"samples {spans([part])}") for number, part in enumerate(mine.samples)}
    data["of each"] = "cp", f"tokens {spans(mine.tokens)}"
    data["the same samples"] = "", f"are read by {plural(tp * cp * pp, 'rank')}: {_listed(together)}"
    product = f"{dp} x {state['micro_batch']} x {state['rounds']}"
    data["a step"] = "", f"has dp x samples x micro-batches = {product} = {sum(map(len, mine.samples)) * dp:,} samples"
    roles = {"layers": "pp", "query heads": "tp", "experts": "ep", "beside layers": ""}
    model = {name: (roles[name], words) for name, words in _holds(mine).items() if name in roles}
    return table({f"Groups of rank {state['rank']}": groups, "Its data": data, "Its part of the model": model})


def _call(state: dict[str, Value], ranks: Mesh, settings: dict[str, Value]) -> str:
    sizes = ", ".join(f"{axis}={ranks.size(axis)}" for axis in ("tp", "cp", "dp", "pp"))
    given = "".join(f", {name}={value!r}" for name, value in settings.items()).replace("'", '"')
    return (
        "from lablib.calc.layouts import holdings, mesh\n\n"
        f'ranks = mesh({sizes}, order="{state["order"]}", gpus_per_node={ranks.gpus_per_node})\n'
        f'mine = holdings("{state["model"]}", ranks{given})[{state["rank"]}]\n'
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
        Control(name="order", label="axes, fastest first", options=tuple(ORDERS.items()), first=DEFAULT_ORDER),
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
