"""`rung fit`: does a run fit on these GPUs, with what room; if not, the cheapest changes that make it fit."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from lablib.calc.errors import json_text
from lablib.cli.memory import Reserve, settings_as_options
from lablib.cli.plan import parameters_line

if TYPE_CHECKING:
    from lablib.calc.layouts.fit import Answer, Change, RunSpec
    from lablib.calc.memory import RunConfig

ASSUMED = "Add --seq with the length that you train at."
WIDTH = 80
#: Without --all: changes of a kind, 1 where nothing else is said.
SHOWN = {"same training": 2}


@settings_as_options(optional=True, leave_out=("bucket_bytes", "torch"))
def fit(
    model: Annotated[str, typer.Argument(help="Name (see `rung models`) or path of a config.json.")],
    *,
    gpu: Annotated[str, typer.Option(help="Accelerator, for example h100.")],
    gpus: Annotated[int | None, typer.Option(help="GPUs in all; default: dp x tp x cp x pp.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs that the scale-up link connects; default: the accelerator's.")
    ] = None,
    reserve: Reserve = "2.5 GiB",
    step: Annotated[str, typer.Option(help="Optimizer: foreach, for-loop or fused.")] = "foreach",
    nic: Annotated[str | None, typer.Option(help="One GPU's link out of its node, for times.")] = None,
    intra: Annotated[str | None, typer.Option(help="One GPU's link inside its node, for times.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every change.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: object,
) -> None:
    """Say whether a run fits, with what room, or which changes make it fit and what each one trades."""
    given = {name: value for name, value in settings.items() if value is not None}

    from lablib.calc.layouts.fit import cheapest_change, fewest_gpus, largest_micro_batch, longest_sequence, setup
    from lablib.calc.units import parse_bytes
    from lablib.cli.memory import from_text, named_model

    spec = setup(
        named_model(model),
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        reserve=parse_bytes(reserve),
        step=step,
        nic=nic,
        intra=intra,
        **from_text(given),
    )
    changes = cheapest_change(spec)
    best = spec if spec.within_budget else changes[0].at if changes else None
    answers = [] if best is None else [largest_micro_batch(best), longest_sequence(best)]
    fewest = [fewest_gpus(spec)]
    if "recompute" not in given:
        fewest.append(fewest_gpus(spec.replace(recompute="full")))
    if as_json:
        typer.echo(json_text(fit_dict(spec, changes, answers, fewest)))
    else:
        how = {"model": model, "assumed_seq": "seq" not in given, "show_all": show_all}
        typer.echo(fit_text(spec, changes, answers, fewest, **how))


def fit_dict(spec: RunSpec, changes: list[Change], answers: list[Answer], fewest: Answer) -> dict[str, object]:
    """Return the answers as plain dictionaries and numbers."""
    from lablib.calc.memory import unproven
    from lablib.calc.params import count_params

    run, params = spec.run, count_params(spec.run.model)
    return {
        "model": spec.run.model.name,
        **spec.verdict.as_dict(),
        "parameters": params.total,
        "active_parameters": params.active,
        "not_modelled": _limits(run),
        "gpus": spec.gpus,
        "seq": spec.run.seq,
        "seq_given": "seq" in spec.given,
        "budget": spec.budget,
        "counted": spec.counted,
        "links": spec.links()[1] if spec.gpus > 1 else {},
        "memory": spec.memory,
        "left": spec.budget - spec.memory,
        "unproven": list(unproven(spec.run)),
        "changes": [
            {
                "kind": one.kind,
                "settings": one.settings,
                "memory": one.memory,
                "budget": one.budget,
                "step_seconds": one.seconds,
                "step_error": None if one.seconds is None else one.at.likeness().as_dict(),
                "unproven": list(one.unproven),
                "traded": [one.trade],
            }
            for one in changes
        ],
        **{answer.question.replace(" ", "_").replace("-", "_"): _answer(answer) for answer in answers},
        "fewest_gpus": [_answer(one) | {"layout": _layout(one.at)} for one in fewest],
    }


def _limits(run: RunConfig) -> list[str]:
    from lablib.calc.layouts.planner import FRAMEWORKS, expert_limits

    ranks = f"dp x cp={run.dp * run.cp}" if run.cp > 1 else f"dp={run.dp}"
    if run.etp is not None:
        ranks = f"tp x cp x dp={run.tp * run.cp * run.dp}"
    split = run.tp if run.etp is None else run.etp
    framework = FRAMEWORKS[run.implementation]
    return expert_limits(run.model, framework, ep=run.ep, out_of=ranks, tp=split, imbalance=run.imbalance)


def _layout(at: RunSpec | None) -> dict[str, object] | None:
    names = ("tp", "sequence_parallel", "cp", "pp", "dp", "zero", "recompute")
    return {name: getattr(at.run, name) for name in names} if at else None


def _answer(answer: Answer) -> dict[str, object]:
    names = ("value", "unit", "memory", "budget", "beyond", "memory_beyond")
    return {name: getattr(answer, name) for name in names} | {"traded": [answer.trade] if answer.trade else []}


def fit_text(
    spec: RunSpec,
    changes: list[Change],
    answers: list[Answer],
    fewest: list[Answer],
    *,
    model: str,
    assumed_seq: bool,
    show_all: bool = False,
) -> str:
    """Return the answers as text that fits 80 columns."""
    from lablib.calc.errors import plural
    from lablib.calc.layouts.fit import size
    from lablib.calc.memory import MEANING, unproven

    run, card = spec.run, spec.gpu
    cards = f"{spec.gpus:,} {card.name}" if spec.gpus > 1 else f"one {card.name}"
    lines = [
        *_wrap(
            f"{run.model.name} on {cards}: {run.recipe.name}, {plural(run.seq, 'token')} a sequence"
            + (" (the model's longest: --seq was not given)" if assumed_seq else "")
            + f", micro-batch {run.micro_batch}, recompute {run.recompute}, "
            + " ".join(f"{name}={getattr(run, name)}" for name in ("dp", "tp", "cp", "pp", "zero"))
        ),
        *[ASSUMED] * assumed_seq,
        *parameters_line(run.model),
        *[line for limit in _limits(run) for line in _wrap(limit)],
        *_wrap(
            f"Budget of a GPU: {size(spec.budget)}, its {card.usable_bytes / 2**30:.2f} GiB less {size(spec.reserve)} "
            f"kept free. Compared with it: {spec.counted}."
        ),
        *(_wrap(spec.links()[0] + ".") if spec.gpus > 1 else []),
        "",
    ]
    if spec.within_budget:
        room = f"It fits: a GPU needs {size(spec.memory)}, {size(spec.budget - spec.memory)} are left."
        lines += _wrap(room + _mark(unproven(run)))
    else:
        word = "is tight" if spec.verdict.room >= 0 else "does not fit"
        lines += _wrap(
            f"It {word}: a GPU needs {size(spec.memory)}, {spec.memory / spec.budget:.3g} times its budget. "
            + (_follow(changes) if changes else "No change that was tried makes it fit on these GPUs.")
        )
        lines += _changes(changes, show_all)
        if changes:
            lines += ["", f"With the first of these, {size(changes[0].budget - changes[0].memory)} are left."]
    for answer in answers:
        lines += ["", *_wrap(_headline(answer)), *_item(answer.trade)]
    for one in fewest[:1] + [one for one in fewest[1:] if one.value != fewest[0].value]:
        mark = _mark(unproven(one.at.run)) if one.at else ""
        lines += ["", *_wrap(_headline(one) + mark), *_item(one.trade)]
    if any("(unproven:" in line for line in lines):
        lines += ["", *_wrap(MEANING[0].upper() + MEANING[1:])]
    best = spec if spec.within_budget else changes[0].at if changes else None
    if best is not None:
        words = textwrap.wrap(command(best, model), WIDTH - 4, break_on_hyphens=False, break_long_words=False)
        lines += ["", "Term by term:", *" \\\n  ".join(["  " + words[0], *words[1:]]).split("\n")]
    return "\n".join(lines)


def _follow(changes: list[Change]) -> str:
    text = "One change makes" if len(changes) == 1 else f"{len(changes)} changes make"
    timed = any(one.seconds is not None for one in changes)
    return f"{text} it fit" + (", the fastest of each kind first; times of a step are predicted." if timed else ".")


def _changes(changes: list[Change], show_all: bool) -> list[str]:
    lines, shown, hidden = [], Counter(), 0
    for one in changes:
        shown[one.kind] += 1
        if not show_all and shown[one.kind] > SHOWN.get(one.kind, 1):
            hidden += 1
            continue
        took = "" if one.seconds is None else f", {_seconds(one.seconds)} a step"
        lines += ["", *_wrap(f"{one.kind}: {one}{took}{_mark(one.unproven)}")]
        lines += _item(one.trade)
        lines += _item(f"error of that time: {one.at.likeness().sentence}") if took else []
    return lines + (["", "--all prints the other changes."] if hidden else [])


def _mark(names: tuple[str, ...]) -> str:
    return f" (unproven: {', '.join(names)})" if names else ""


def _headline(answer: Answer) -> str:
    from lablib.calc.layouts.fit import size

    name = answer.question[0].upper() + answer.question[1:]
    if not answer.value:
        return f"{name}: none fits."
    unit = answer.unit.removesuffix("s") if answer.value == 1 else answer.unit
    text = f"{name}: {answer.value:,} {unit}, {size(answer.memory)}"
    if answer.beyond is not None:
        text += f"; {answer.beyond:,} would need {size(answer.memory_beyond)}"
    return text + "."


def _seconds(value: float) -> str:
    from lablib.calc.units import format_time

    return format_time(value)


def _item(text: str) -> list[str]:
    return _wrap(text, "   - ", "     ")


def _wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def command(spec: RunSpec, model: str) -> str:
    """Return the `rung memory` that prints a setup term by term."""
    from lablib.calc.memory import SETTINGS

    words = ["rung", "memory", shlex.quote(f"./{model}" if model.startswith("-") else model)]
    for name, setting in SETTINGS.items():
        value = getattr(spec.run, name)
        value = getattr(value, "name", value)  # recipes and optimizers have names
        if value == setting.default:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag)
        else:
            words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    words += ["--at", "peak"] + (["--step", spec.step] if spec.step != "foreach" else [])
    return " ".join(words)
