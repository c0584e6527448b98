"""`rung plan`: layouts of a model on a cluster, by predicted step time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lablib.calc.errors import json_text
from lablib.cli.memory import Reserve

if TYPE_CHECKING:
    from lablib.calc.layouts.planner import Candidate, Plan
    from lablib.calc.models import ModelConfig

FRAMEWORKS = "torchtitan, megatron, deepspeed or accelerate"


def plan(
    model: Annotated[str, typer.Argument(help="Name (see `rung models`) or path of a config.json.")],
    gpus: Annotated[int, typer.Option(help="GPUs in all.")],
    global_batch: Annotated[int, typer.Option(help="Sequences in a step, over all replicas.")],
    gpu: Annotated[str, typer.Option(help="Accelerator, for example h100.")] = "h100",
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence; default: the model's longest.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs that the scale-up link connects; default: the accelerator's.")
    ] = None,
    nic: Annotated[
        str | None, typer.Option(help="A network card: ib-ndr, 400gbe, or '40 GB/s'; default: the vendor's.")
    ] = None,
    nics_per_node: Annotated[int | None, typer.Option(help="Network cards of a node; default: one a GPU.")] = None,
    intra: Annotated[str | None, typer.Option(help="One GPU's link inside its node: nvlink4, or '300 GB/s'.")] = None,
    rails: Annotated[bool, typer.Option(help="A group uses all its network cards in a node together.")] = True,
    recipe: Annotated[
        str | None, typer.Option(help="Dtypes, as in `rung memory`; default: mixed-bf16, or what --export trains in.")
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(help="Whose memory and kernels, as in `rung memory`; default: what --export runs, or paper."),
    ] = None,
    attention: Annotated[str, typer.Option(help="fused or plain.")] = "fused",
    sequence_parallel: Annotated[bool, typer.Option(help="Split norms and residuals over tp too.")] = True,
    reserve: Reserve = "2.5 GiB",
    tp: Annotated[int | None, typer.Option(help="Fix tensor-parallel ranks.")] = None,
    cp: Annotated[int | None, typer.Option(help="Fix context-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Fix expert-parallel ranks.")] = None,
    etp: Annotated[
        int | None, typer.Option(help="Fix ranks that split one expert, ep folded over tp, cp and dp.")
    ] = None,
    imbalance: Annotated[float, typer.Option(help="Tokens of the busiest rank's experts over the mean.")] = 1.0,
    cp_way: Annotated[
        str | None,
        typer.Option(help="How cp attends: ring, gathered (Llama 3) or ulysses; default: ring, or --export's."),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Fix pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(help="Fix replicas.")] = None,
    zero: Annotated[int | None, typer.Option(help="Fix the ZeRO stage.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Fix sequences of a micro-batch.")] = None,
    recompute: Annotated[str | None, typer.Option(help="Fix recomputation: none, selective or full.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Fix the schedule: 1f1b, gpipe or interleaved.")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Fix chunks of layers in a stage.")] = None,
    top: Annotated[int, typer.Option(help="Layouts to list, each with another (tp, cp, pp, dp).")] = 5,
    why: Annotated[
        bool, typer.Option("--why", help="Say where the time of the first goes, and what others take.")
    ] = False,
    export: Annotated[str | None, typer.Option(help=f"Print the first choice for {FRAMEWORKS}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the layouts that fit: the simplest of those that tie for the shortest predicted step, then by time."""
    layout = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp, "zero": zero, "micro_batch": micro_batch}
    layout |= {"recompute": recompute, "schedule": schedule, "virtual_stages": virtual_stages, "etp": etp}

    from lablib.calc.layouts import counting_for
    from lablib.calc.layouts.planner import Counting, missing_units, nothing_fits, plan_reasons
    from lablib.calc.layouts.planner import plan as find
    from lablib.calc.units import parse_bytes
    from lablib.cli.memory import named_model

    if top < 1:
        raise ValueError(f"--top={top} must be at least 1")
    if as_json and export:
        raise ValueError("--json and --export print two different things; give one")
    config = named_model(model)
    if export:
        counting = counting_for(
            export, config, seq=seq, global_batch=global_batch, gpus_per_node=gpus_per_node,
            implementation=implementation, recipe=recipe, attention=attention,
        )  # fmt: skip
    else:
        counting = Counting(implementation=implementation or "paper")
    result = find(
        config,
        gpus=gpus,
        gpu=gpu,
        seq=seq,
        global_batch=global_batch,
        gpus_per_node=gpus_per_node,
        nic=nic,
        intra=intra,
        rails=rails,
        nics_per_node=nics_per_node,
        recipe_=recipe,
        counting=counting,
        attention=attention,
        sequence_parallel=sequence_parallel,
        reserve=parse_bytes(reserve),
        imbalance=imbalance,
        cp_way=cp_way,
        **{name: value for name, value in layout.items() if value is not None},
    )
    if not result.candidates:
        raise ValueError(nothing_fits(result))
    if export:
        best = result.best
        typer.echo(
            f"counted as {counting.implementation}: {best.layout} peaks at {best.total_memory / 1e9:.1f} of "
            f"{result.capacity / 1e9:.1f} GB ({best.peak.at})",
            err=True,
        )
        for what in counting.not_counted:
            typer.echo(f"not counted: {what}", err=True)
        for what in missing_units(result.load):
            typer.echo(what, err=True)
        typer.echo(_export(result, export, recipe), nl=False)
    elif as_json:
        typer.echo(json_text(plan_dict(result, top=top, why=plan_reasons(result))))
    else:
        typer.echo(plan_table(result, top=top, why=plan_reasons(result) if why else []))


def plan_dict(result: Plan, *, top: int, why: list[str]) -> dict[str, object]:
    """Return the plan as plain dictionaries and numbers."""
    from lablib.calc.layouts.planner import not_modelled, why_first
    from lablib.calc.params import count_params

    machine, params = result.cluster, count_params(result.load.model)
    return {
        "model": result.load.model.name,
        "parameters": params.total,
        "active_parameters": params.active,
        "gpus": machine.gpus,
        "gpu": machine.gpu.name,
        "gpus_per_node": machine.gpus_per_node,
        "links": machine.links(),
        "seq": result.load.seq,
        "global_batch": result.load.global_batch,
        "recipe": result.load.recipe.name,
        "implementation": result.counting.implementation,
        "framework": result.counting.framework or None,
        "not_counted": list(result.counting.not_counted),
        "capacity_bytes": result.capacity,
        "valid": result.valid,
        "left_out": result.left_out,
        "dropped_by": result.dropped_by,
        "first": why_first(result),
        "layouts": [_candidate(result, candidate) for candidate in result.listed(top)],
        "dropped": [
            {"layout": one.layout.as_dict(), "term": one.term, "excess_bytes": one.excess, "memory": one.peak.terms}
            for one in result.dropped[:top]
        ],
        "not_modelled": not_modelled(result.load, result.best.layout),
        "why": why,
    }


def _candidate(result: Plan, candidate: Candidate) -> dict[str, object]:
    from lablib.calc.memory import Verdict
    from lablib.calc.schedules import layers_per_stage

    load, card = result.load, result.cluster.gpu
    said = Verdict(candidate.total_memory, card, card.usable_bytes - result.capacity).as_dict()
    return {
        **candidate.layout.as_dict(),
        "num_microbatches": candidate.layout.num_microbatches(load.global_batch),
        "layers_per_stage": layers_per_stage(
            load.model.num_layers, candidate.layout.pp, candidate.layout.virtual_stages
        ),
        "step_seconds": candidate.step,
        "seconds": candidate.seconds,
        "step_interval": result.like(candidate).interval(candidate.step),
        "step_error": result.like(candidate).as_dict(),
        "ties": result.ties(candidate),
        "mfu": result.mfu(candidate),
        "mfu_causal_pairs": result.mfu(candidate, causal=True),
        "tflops_per_gpu": result.tflops(candidate),
        "hardware_tflops_per_gpu": result.tflops(candidate, hardware=True),
        "tokens_per_second": load.global_batch * load.seq / candidate.step,
        "memory_bytes": candidate.total_memory,
        "memory": candidate.peak.terms,
        "peak_at": candidate.peak.at,
        "stage": candidate.peak.stage,
        **{name: said[name] for name in ("fits", "verdict", "headroom")},
    }


def plan_table(result: Plan, *, top: int, why: Sequence[str] = ()) -> str:
    """Return the first layouts as aligned text, why the first is first, and how wrong its time may be."""
    from lablib.calc.errors import plural
    from lablib.calc.flops import ALL_PAIRS
    from lablib.calc.layouts.planner import not_modelled, why_first

    load, machine = result.load, result.cluster
    dropped = sum(result.dropped_by.values())
    lines = [
        *textwrap.wrap(
            f"{load.model.name} on {machine.gpus:,} {machine.gpu.name}: {plural(load.global_batch, 'sequence')} of "
            f"{plural(load.seq, 'token')} a step",
            80,
        ),
        *parameters_line(load.model),
        f"{result.valid:,} valid layouts, {dropped:,} cannot fit; times are predicted",
        *textwrap.wrap(
            f"GB: the memory calculator's peak, implementation {result.counting.implementation}, dtypes "
            f"{load.recipe.name}; all of these fit",
            80,
        ),
        *(
            line
            for reason, count in result.left_out.items()
            for line in textwrap.wrap(f"Not listed: {count:,} layouts, {reason}", 80, break_long_words=False)
        ),
        *(line for what in result.counting.not_counted for line in textwrap.wrap(f"Not counted: {what}", 80)),
        *textwrap.wrap(machine.links_text(), 80, break_on_hyphens=False),
        "",
        f"{'s/step':>8}{'MFU':>6}{'TFLOP/s':>8}{'GB':>6}{'tp':>4}{'cp':>4}{'ep':>4}{'pp':>4}{'dp':>6}"
        f"{'zero':>5}{'mb':>4} {'recompute':<9} schedule",
    ]
    for number, candidate in enumerate(result.listed(top)):
        layout = candidate.layout
        tie = "~" if number and result.ranked and result.ties(candidate) else " "
        folded = f" etp={layout.etp}" if layout.etp is not None else ""
        chunks = f"v={layout.virtual_stages}" if layout.virtual_stages > 1 else layout.schedule
        lines.append(
            f"{candidate.step:>8.3f}{tie}{result.mfu(candidate):>5.0%}{result.tflops(candidate):>8.0f}"
            f"{candidate.total_memory / 1e9:>6.1f}{layout.tp:>4}{layout.cp:>4}{layout.ep:>4}{layout.pp:>4}"
            f" {layout.dp:>5}{layout.zero:>5}{layout.micro_batch:>4} {layout.recompute:<9} "
            + (chunks if layout.pp > 1 else "-")
            + folded
        )
    half = f"MFU and TFLOP/s: {ALL_PAIRS} count; with those that a causal mask leaves, the first has"
    lines += ["", *textwrap.wrap(why_first(result), 80)]
    lines += [*textwrap.wrap(f"{half} {result.mfu(result.best, causal=True):.0%} MFU.", 80)]
    lines += [*textwrap.wrap(f"First layout: {result.like(result.best).between(result.best.step)}", 80)]
    limits = not_modelled(load, result.best.layout)
    if limits:
        items = [textwrap.fill(line, 80, initial_indent="  - ", subsequent_indent="    ") for line in limits]
        lines += ["", "Not modelled (first layout):", *items]
    return "\n".join([*lines, *([""] if why else []), *(textwrap.fill(line, 80) for line in why)])


def parameters_line(model: ModelConfig) -> list[str]:
    """Return a line with total and active parameters of a model with experts, and none for another."""
    from lablib.calc.params import count_params

    if not model.is_moe:
        return []
    params = count_params(model)
    return [f"{params.total / 1e9:.3g} B parameters, {params.active / 1e9:.3g} B active"]


def _export(result: Plan, framework: str, recipe: str | None) -> str:
    """The first choice as the framework's file; the plan has taken only layouts that the framework can run."""
    from lablib.calc.layouts import export_job, export_layout

    load = result.load
    job = export_job(
        load.model,
        result.best.layout,
        seq=load.seq,
        global_batch=load.global_batch,
        gpus_per_node=min(result.cluster.gpus_per_node, result.cluster.gpu.gpus_per_host),
        sequence_parallel=load.sequence_parallel,
        recipe=recipe,
        attention=load.attention,
    )
    return export_layout(job, framework)
