"""The planner explorer: model and cluster in, ranked layouts out, ties as ties, with files to start from.

It is `rung plan`, whose list, ties and reasons are shown; the files are what `--export` writes with the degrees of one layout.
A search takes seconds, so the page waits for a button, and what was searched is remembered.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape

from lablib.calc.layouts.export import EXPORTERS, export_plan
from lablib.calc.layouts.planner import APART, Candidate, Layout, Plan, nothing_fits, plan, plan_reasons, reason_against
from lablib.calc.memory import RECOMPUTE, ROLES
from lablib.calc.units import GB
from lablib.live.cluster import EXPLORER as CLUSTER
from lablib.live.cluster import POWERS, between_text, node_settings, read_model, seconds_text
from lablib.live.explorer import Answer, Control, Explorer, Value, number_options, table
from lablib.live.svg import WIDTH, Bar, bars, legend, line, picture, rect, text

LISTED = 5
#: MFU below which GPUs are for nothing, whatever comes first.
TOO_SMALL = 0.02
BEHIND = "Predicted slower by more"
#: What a reader's framework may not have.
AXES = {
    "all": ("all that there are", {}),
    "no-pp": ("no pipeline", {"pp": 1}),
    "dp": ("data parallel alone: ZeRO or FSDP", {"tp": 1, "cp": 1, "pp": 1}),
}
ANY = "what is fastest"


def job(
    device: str, gpus: int, seq: int, global_batch: int, recipe: str, optimizer: str, recompute: str, axes: str,
    **others: Value,
) -> dict[str, Value]:  # fmt: skip
    """Return the settings of `plan` for a state of the controls, none that it would take by itself."""
    settings = {"gpus": gpus, "gpu": device, "seq": seq, "global_batch": global_batch} | node_settings(device, gpus)
    settings |= {"recipe": recipe} if recipe != "mixed-bf16" else {}  # a file has its framework's
    settings |= {"optimizer": optimizer} if optimizer != "adamw" else {}
    settings |= {"recompute": recompute} if recompute != ANY else {}
    return settings | AXES[axes][1]


def search(model: str, config: str, **state: Value) -> Plan:
    """Return the plan of a state; the last ones are remembered."""
    return _search(model, config, tuple(job(**state).items()))


@lru_cache(maxsize=3)
def _search(model: str, config: str, settings: tuple[tuple[str, Value], ...]) -> Plan:
    given = dict(settings)
    return plan(read_model(model, config), recipe_=given.pop("recipe", None), **given)


def limits(**state: Value) -> dict[str, tuple[int, str]]:
    """Return the longest sequence, the most GPUs with which a layout is valid, and how many layouts are listed."""
    found: dict[str, tuple[int, str]] = {}
    model = read_model(state["model"], state["config"])
    if model.learned_positions:
        found["seq"] = model.max_positions, f"the most that {model.name} has positions for"
        state["seq"] = min(state["seq"], model.max_positions)
    for gpus in reversed([number for number in POWERS if number <= state["gpus"]]):
        try:
            result = search(**state | {"gpus": gpus})
        except ValueError as error:
            found["gpus"] = gpus // 2, str(error)
            continue
        if state["which"] > 1 and result.candidates:
            found["which"] = len(result.listed(LISTED)), "as many are listed"
        return found
    return {name: limit for name, limit in found.items() if name != "gpus"}  # then no number helps


def explore(**state: Value) -> Answer:
    """Return the layouts as `rung plan` ranks them, and files for one of them."""
    result = search(**state)
    model = "config.json" if state["config"].strip() else state["model"]
    if not result.candidates:
        return _nothing(result, model, state)
    listed = result.listed(LISTED)
    ties = [result.ties(one) for one in listed]
    chosen = listed[state["which"] - 1]
    exports, said = _exports(result, state, chosen.layout)
    numbers = {"listed": len(listed), "ties": sum(ties), "files": len(exports)}
    for place, one in enumerate(listed, 1):
        low, high = _ends(result, one)
        numbers |= {f"step_us_{place}": round(1e6 * one.step), f"bytes_{place}": one.total_memory}
        numbers |= {f"low_us_{place}": round(1e6 * low), f"high_us_{place}": round(1e6 * high)}
    return Answer(
        picture=_picture(result, listed, ties, state["which"]),
        caption=_caption(result, listed, ties),
        table=_table(result, listed, ties, state, {f"Files with the degrees of layout {state['which']}": said}),
        command=_command(model, state),
        call=_call(model, state, chosen.layout, next(iter(exports), "")),
        numbers=numbers,
        question="Why this order, and what does not fit?",
        files={EXPORTERS[name].file: text for name, text in exports.items()},
    )


def reply(**state: Value) -> str:
    """Return what `rung plan --why` says."""
    state, _ = EXPLORER.clip(state)
    return f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in plan_reasons(search(**state)))}</ul>"


def degrees(layout: Layout) -> dict[str, int]:
    """Return what a file keeps of a layout; the rest is what its framework's own memory allows."""
    names = ("tp", "cp", "pp", "ep", "etp") if layout.ep > 1 else ("tp", "cp", "pp")
    return {name: value for name in names if (value := getattr(layout, name)) is not None}


def _exports(
    result: Plan, state: dict[str, Value], layout: Layout
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The texts of the frameworks that can run such a layout, and for each framework what its file is, or why it has none."""
    texts, said = {}, {}
    model, settings = read_model(state["model"], state["config"]), job(**state) | degrees(layout)
    for name in EXPORTERS:
        try:
            done = export_plan(model, name, **settings)
        except ValueError as error:
            said[name] = "", f"no file: {error}"
        else:
            texts[name] = done.text
            cost = _price(result, done.candidate, state)
            words = f"{done.candidate.layout}, {seconds_text(done.candidate.step)} a step, ${cost:,.0f} for 1B tokens"
            said[name] = "", words
    return texts, said


def _nothing(result: Plan, model: str, state: dict[str, Value]) -> Answer:
    near, limit = result.dropped[0], result.capacity / GB
    needs = f"{near.peak.total / GB:,.1f} GB"
    row = Bar(label="", parts={role: size / GB for role, size in near.memory.items()}, text="")
    head, end = bars(
        [row],
        top=0,
        title=f"The layout that comes nearest: {needs}",
        labels=0,
        limit=limit,
        limit_text=f"{limit:.1f} GB",
    )
    names, end = legend(ROLES, top=end + 8)
    rows = {role: (role, f"{size / GB:,.2f} GB") for role, size in near.memory.items()}
    return Answer(
        picture=picture(head + names, end + 4, f"A bar of {needs}, beyond a line at {limit:.1f} GB."),
        caption=nothing_fits(result, model),
        table=table({str(near.layout): rows}),
        command=_command(model, state),
        call=_call(model, state, near.layout, ""),
        numbers={"listed": 0, "total": near.peak.total, "capacity": result.capacity},
    )


def _ends(result: Plan, one: Candidate) -> tuple[float, float]:
    """From and to how many seconds a step may take; where no run on such GPUs was measured there is no interval."""
    return result.like(one).interval(one.step) or (one.step, one.step)


def _picture(result: Plan, listed: list[Candidate], ties: list[bool], which: int) -> str:
    """Draw time and memory of each layout, the one of the files in bold: those that tie beside one line, others below it."""
    limit, memory, room = result.capacity / GB, 232.0, 108.0
    longest = max(_ends(result, one)[1] for one in listed)
    shapes, y, alt = [], 12.0, []
    for tied, title in ((True, f"A tie: predicted within {APART:.0%}"), (False, BEHIND)):
        rows = [(place, one) for place, (one, tie) in enumerate(zip(listed, ties, strict=True), 1) if tie == tied]
        if not rows:
            continue
        title = title if len(rows) > 1 or not tied else "First: all others are predicted slower by more"
        shapes += [text(0, y, title, bold=True), text(memory, y, f"GB of {limit:.1f}", bold=True)]
        top = y + 8
        for place, one in rows:
            low, high = _ends(result, one)
            head, _, rest = str(one.layout).partition(" mb=")
            bold = place == which
            shapes += [text(10, y + 20, f"{place}. {head}", bold=bold), text(10, y + 35, f"mb={rest}", bold=bold)]
            scale, base = 150 / longest, y + 42
            shapes.append(rect(12, base, one.step * scale, 12, "", outline=True))
            shapes += [
                line(12 + end * scale, base - 2, 12 + end * scale, base + 14, role="mark") for end in (low, high)
            ]
            shapes.append(line(12 + low * scale, base + 6, 12 + high * scale, base + 6, role="mark"))
            shapes.append(text(166, base + 11, seconds_text(one.step)))
            x = memory
            for role, size in one.memory.items():
                shapes.append(rect(x, base, size / GB / limit * room, 12, role))
                x += size / GB / limit * room
            shapes.append(line(memory + room, base - 4, memory + room, base + 16, role="mark", dashed=True))
            shapes.append(text(WIDTH, base + 11, f"{one.total_memory / GB:.1f} GB", anchor="end"))
            alt.append(f"{one.layout}: {seconds_text(one.step)}, {one.total_memory / GB:.1f} GB{', a tie' * tied}")
            y += 56
        if tied and len(rows) > 1:
            shapes.append(line(2, top, 2, y + 2, role="mark"))
        y += 22
    names, end = legend(ROLES, top=y - 8)
    words = f"Layouts, each with a bar of its seconds and one of its memory of {limit:.1f} GB. "
    return picture(shapes + names, end + 4, words + "; ".join(alt) + ".")


def _caption(result: Plan, listed: list[Candidate], ties: list[bool]) -> str:
    first, machine, others = listed[0], result.cluster, sum(ties) - 1
    words = (
        f"{result.load.model.name} on {machine.gpus:,} {machine.gpu.name}: {first.layout} comes first, "
        f"{seconds_text(first.step)} a step{between_text(_ends(result, first), seconds_text)}. "
    )
    if result.mfu(first) < TOO_SMALL:
        words += f"This job is too small for so many GPUs, which compute for less than {TOO_SMALL:.0%} of the step. "
    if others:
        words += (
            f"Of the {len(listed)} listed {'another ties' if others == 1 else f'{others} others tie'} with it: none is predicted ahead "
            f"of them by more than {APART:.0%}, the median error in comparing two layouts, so they count as equal. "
        )
    return words + (f"Second: {reason_against(first, listed[1])}" if listed[1:] else "It is the only one that fits.")


def _price(result: Plan, one: Candidate, state: dict[str, Value]) -> float:
    """Return the dollars of 1B tokens."""
    tokens = result.load.global_batch * result.load.seq
    return one.step / 3600 * state["gpus"] * state["price"] / 100 * 1e9 / tokens


def _table(
    result: Plan, listed: list[Candidate], ties: list[bool], state: dict[str, Value],
    files: dict[str, dict[str, tuple[str, str]]],
) -> str:  # fmt: skip
    groups: dict[str, dict[str, tuple[str, str]]] = {}
    for place, (one, tie) in enumerate(zip(listed, ties, strict=True), 1):
        words = f"{seconds_text(one.step)}{between_text(_ends(result, one), seconds_text)}, {result.mfu(one):.0%} MFU, "
        words += f"{one.total_memory / GB:.1f} GB{'?' * bool(one.peak.unproven)}, ${_price(result, one, state):,.0f} for 1B tokens"
        if took := result.like(one).took:
            words += f"; runs like it took {took[0]:.2f} to {took[1]:.2f} times what is predicted"
        groups.setdefault("A tie" if tie else "Behind", {})[f"{place}. {one.layout}"] = "", words
    notes = {
        "a tie": (
            "",
            "the first is one that measured runs are like, then the one with the least cp, the fewest axes, most room",
        ),
        "the interval": ("", result.like(listed[0]).between(listed[0].step)),
        "seconds of files": (
            "",
            "a file is counted with its framework's kernels and memory, the list with those of papers: compare files with files",
        ),
        "no file": ("", "a framework may run the layout for which this course cannot count its memory"),
        "? after GB": ("", "nobody judged such a peak, and it leaves a share of itself free too"),
        "MFU": ("", "all pairs of attention counted"),
    }
    notes |= {f"not listed, {number}": ("", reason) for number, reason in enumerate(result.left_out, 1)}
    return table(groups | files | {"How to read it": notes}, prose=True)


def _command(model: str, state: dict[str, Value]) -> str:
    words = [f"--{name.replace('_', '-')} {value}" for name, value in job(**state).items()]
    return " ".join(["rung plan", model, *words, "--tokens 1B --price", f"{state['price'] / 100:g}"])


def _call(model: str, state: dict[str, Value], layout: Layout, framework: str) -> str:
    settings = job(**state)
    lines = "".join(
        f"    {name}={value!r},\n".replace("'", '"') for name, value in settings.items() if name != "recipe"
    )
    recipe = f', recipe_="{settings["recipe"]}"' if "recipe" in settings else ""
    words = f'job = dict(\n{lines})\nresult = plan("{model}"{recipe}, **job)\n'
    words += (
        "for one in result.listed(5) if result.candidates else result.dropped:\n    print(one.layout, one.peak.total)\n"
    )
    if not framework:
        return f"from lablib.calc.layouts.planner import plan\n\n{words}"
    keep = degrees(layout) | {name: value for name, value in settings.items() if name == "recipe"}
    return (
        "from lablib.calc.layouts import export_plan\nfrom lablib.calc.layouts.planner import plan\n\n"
        f'{words}file = export_plan("{model}", "{framework}", **job | {keep!r})\nprint(file.text)\n'
    )


_SAME = {control.name: control for control in CLUSTER.controls}
EXPLORER = Explorer(
    name="planner",
    title="Layouts of a training run, ranked",
    controls=(
        _SAME["model"],
        _SAME["device"],
        _SAME["gpus"],
        _SAME["seq"],
        Control(
            name="global_batch", label="sequences a step", options=number_options(2**k for k in range(3, 15)), first=128,
            slider=True,
        ),
        Control(
            name="which", label="files for layout", options=number_options(range(1, LISTED + 1)), first=1, slider=True,
            quick=True,
        ),
        Control(
            name="axes", label="kinds of parallelism", options=tuple((name, words) for name, (words, _) in AXES.items()),
            first="all", fold=True,
        ),
        Control(
            name="recompute", label="recomputation", options=tuple((name, name) for name in (ANY, *RECOMPUTE)), first=ANY,
            fold=True,
        ),
        *(_SAME[name] for name in ("recipe", "optimizer", "price", "config")),
    ),
    compute=explore,
    limits=limits,
    reply=reply,
    button="Rank the layouts",
)  # fmt: skip
