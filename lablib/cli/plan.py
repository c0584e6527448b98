"""`rung plan`: layouts of a model on a cluster, by predicted step time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lablib.calc.errors import json_text

if TYPE_CHECKING:
    from lablib.calc.layouts.planner import Candidate, Plan
    from lablib.calc.models import ModelConfig

FRAMEWORKS = "torchtitan, megatron, deepspeed or accelerate"


def plan(
    model: Annotated[str, typer.Argument(help="Name (see `rung models`) or path of a config.json.")],
    gpus: Annotated[int, typer.Option(help="GPUs in all.")],
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences in a step, over all replicas; or give the next.")
    ] = None,
    global_batch_tokens: Annotated[
        str | None, typer.Option(help="Tokens in a step, like 4M (4 x 1,048,576): the nearest number of sequences.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="Accelerator, for example h100.")] = "h100",
    seq: Annotated[
        str | None, typer.Option(help="Tokens in a sequence, like 8k (8,192); default: the model's longest.")
    ] = None,
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
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-8bit, adamw-4bit, adamw-fp8, adamw-bf16, sgd, ...; see `recipes`.")
    ] = "adamw",
    offload: Annotated[
        str, typer.Option(help="On the CPU: none, optimizer, gradients or parameters, as in `rung memory`.")
    ] = "none",
    tuning: Annotated[str, typer.Option(help="full, lora or qlora, as in `rung memory`.")] = "full",
    reserve: Annotated[
        str | None,
        typer.Option(help="Memory to leave free on each GPU; default: 2.5 GiB, more where a peak is unproven."),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Fix tensor-parallel ranks.")] = None,
    cp: Annotated[int | None, typer.Option(help="Fix context-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Fix expert-parallel ranks.")] = None,
    shard: Annotated[
        int | None, typer.Option(help="Fix ranks that share one copy of what ZeRO shards (HSDP); 0: all.")
    ] = None,
    etp: Annotated[
        int | None, typer.Option(help="Fix ranks that split one expert, ep folded over tp, cp and dp.")
    ] = None,
    imbalance: Annotated[float, typer.Option(help="Tokens of the busiest rank's experts over the mean.")] = 1.0,
    cp_way: Annotated[
        str | None,
        typer.Option(help="How cp attends: ring, gathered (Llama 3) or ulysses; default: ring, or --export's."),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Fix ranks of a pipeline.")] = None,
    dp: Annotated[int | None, typer.Option(help="Fix replicas.")] = None,
    zero: Annotated[int | None, typer.Option(help="Fix the ZeRO stage.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Fix sequences of a micro-batch.")] = None,
    recompute: Annotated[str | None, typer.Option(help="Fix recomputation: none, selective or full.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Fix the schedule: 1f1b, gpipe or interleaved.")] = None,
    virtual_stages: Annotated[int | None, typer.Option(help="Fix the stages on each rank of a pipeline.")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, as 15T: adds days, GPU hours, goodput.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Dollars per GPU and hour: adds what --tokens cost.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="What all ranks write together, '20 GB/s'; default: 7 GB/s for each 256 GPUs.")
    ] = None,
    restart: Annotated[float, typer.Option(help="Minutes to find a failure, reading the checkpoint left out.")] = 10,
    spares: Annotated[float, typer.Option(help="Nodes held back, as a share.")] = 0.05,
    replica_groups: Annotated[
        int | None, typer.Option(help="Make the bill by so many groups of replicas that fail one at a time.")
    ] = None,
    repair: Annotated[float, typer.Option(help="Hours until a broken node is back, if no spare is left.")] = 24,
    top: Annotated[int, typer.Option(help="Layouts to list, each with another (tp, cp, pp, dp).")] = 5,
    why: Annotated[
        bool, typer.Option("--why", help="Say where the time of the first goes, and what others take.")
    ] = False,
    export: Annotated[str | None, typer.Option(help=f"Print the first choice for {FRAMEWORKS}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the layouts that fit, by time; first, of a tie for the shortest step, the simplest that measured runs are like."""
    layout = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp, "zero": zero, "micro_batch": micro_batch}
    layout |= {"recompute": recompute, "schedule": schedule, "virtual_stages": virtual_stages, "etp": etp}
    layout["shard"] = shard

    from lablib.calc.layouts.planner import Counting, nothing_fits, plan_reasons
    from lablib.calc.layouts.planner import plan as find
    from lablib.calc.memory import resolve_model
    from lablib.calc.units import parse_bytes, parse_tokens
    from lablib.cli.memory import named_model

    if top < 1:
        raise ValueError(f"--top={top} must be at least 1")
    if as_json and export:
        raise ValueError("--json and --export print two different things; give one")
    if tokens is None and (price is not None or storage is not None or replica_groups is not None):
        raise ValueError("--price, --storage and --replica-groups belong to a bill: give --tokens too")
    if tokens and export:
        raise ValueError("--tokens and --export print two different things; give one")
    config = resolve_model(named_model(model))
    length = config.max_positions if seq is None else parse_tokens(seq)
    job = {
        "gpus": gpus, "gpu": gpu, "seq": length, "gpus_per_node": gpus_per_node, "nic": nic,
        "global_batch": _sequences(global_batch, global_batch_tokens, length),
        "nics_per_node": nics_per_node, "intra": intra, "rails": rails, "attention": attention, "cp_way": cp_way,
        "sequence_parallel": sequence_parallel, "imbalance": imbalance,
        "reserve": None if reserve is None else parse_bytes(reserve),
        "optimizer": optimizer, "offload": offload, "tuning": tuning,
        **{name: value for name, value in layout.items() if value is not None}, **({"shard": None} if shard == 0 else {}),
    }  # fmt: skip
    if export:
        from lablib.calc.layouts import export_plan

        done = export_plan(config, export, implementation=implementation, recipe=recipe, **job)
        typer.echo("\n".join(done.said), err=True)
        typer.echo(done.text, nl=False)
        return
    result = find(config, recipe_=recipe, counting=Counting(implementation=implementation or "paper"), **job)
    if not result.candidates:
        raise ValueError(nothing_fits(result, model))
    bill = None
    if tokens:
        from lablib.calc.runs import plan_bill
        from lablib.calc.units import parse_bandwidth, parse_count

        rate = None if storage is None else parse_bandwidth(storage)
        bill = plan_bill(
            result,
            tokens=parse_count(tokens),
            price=price,
            storage=rate,
            restart=60 * restart,
            spares=spares,
            replica_groups=replica_groups,
            repair=3600 * repair,
        )
    if as_json:
        found = plan_dict(result, top=top, why=plan_reasons(result))
        typer.echo(json_text(found | {"bill": bill and bill.as_dict()}))
    else:
        typer.echo(plan_table(result, top=top, why=plan_reasons(result) if why else []))
        if bill:
            typer.echo("\n" + bill.text)


def _sequences(sequences: int | None, tokens: str | None, seq: int) -> int:
    """Return the sequences of a step, given in sequences or in tokens."""
    from lablib.calc.units import parse_tokens

    if (sequences is None) == (tokens is None):
        raise ValueError(
            "give the batch of a step once: --global-batch in sequences, or --global-batch-tokens, like 4M"
        )
    if tokens is None:
        return sequences
    found = parse_tokens(tokens)
    if 2 * found < seq:
        raise ValueError(f"--global-batch-tokens={tokens} is less than half a sequence of {seq:,} tokens")
    return (2 * found + seq) // (2 * max(seq, 1))


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
        "global_batch_tokens": result.load.global_batch * result.load.seq,
        "recipe": result.load.recipe.name,
        "training": result.load.training.as_dict(),
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
        "unproven": list(candidate.peak.unproven),
        "spared_bytes": candidate.peak.spare,
        "peak_at": candidate.peak.at,
        "stage": candidate.peak.stage,
        **{name: said[name] for name in ("fits", "verdict", "headroom")},
    }


def plan_table(result: Plan, *, top: int, why: Sequence[str] = ()) -> str:
    """Return the first layouts as aligned text, why the first is first, and how wrong its time may be."""
    from lablib.calc.errors import plural
    from lablib.calc.flops import ALL_PAIRS
    from lablib.calc.layouts.planner import not_modelled, why_first
    from lablib.calc.memory import MEANING, UNPROVEN_SHARE

    load, machine = result.load, result.cluster
    first, usable = result.best, machine.gpu.usable_bytes
    how = f", {load.training}" if load.training.as_dict() else ""
    mark = "; a peak with ? is unproven" if first.peak.unproven else ""
    mark += f", and leaves {UNPROVEN_SHARE:.1%} of itself free too" if first.peak.spare else ""
    lines = [
        *textwrap.wrap(
            f"{load.model.name} on {machine.gpus:,} {machine.gpu.name}: {plural(load.global_batch, 'sequence')} of "
            f"{plural(load.seq, 'token')} a step ({load.global_batch * load.seq:,})",
            80,
        ),
        *parameters_line(load.model),
        *textwrap.wrap(
            f"Times are predicted. GB: the memory calculator's peak, implementation {result.counting.implementation}, dtypes "
            f"{load.dtypes}{how}; all of these fit into {result.capacity / 1e9:.1f} GB, the {usable / 1e9:.1f} that "
            f"CUDA gives less {(usable - result.capacity) / 1e9:.1f} kept free{mark}",
            80,
        ),
        *(
            line
            for reason in result.left_out
            for line in textwrap.wrap(f"Not listed: {reason}", 80, break_long_words=False)
        ),
        *(line for what in result.counting.not_counted for line in textwrap.wrap(f"Not counted: {what}", 80)),
        *textwrap.wrap(machine.links_text(), 80, break_on_hyphens=False),
        "",
        f"{'s/step':>8}{'MFU':>6}{'TFLOP/s':>8}{'GB':>6}{'tp':>4}{'cp':>4}{'ep':>4}{'pp':>4}{'dp':>6}"
        f"{'zero':>5}{'mb':>4} {'recompute':<9} schedule",
    ]
    for number, candidate in enumerate(result.listed(top)):
        layout = candidate.layout
        tie = "~" if number and result.ties(candidate) else " "
        folded = f" etp={layout.etp}" if layout.etp is not None else ""
        chunks = f"v={layout.virtual_stages}" if layout.virtual_stages > 1 else layout.schedule
        lines.append(
            f"{candidate.step:>8.3f}{tie}{result.mfu(candidate):>5.0%}{result.tflops(candidate):>8.0f}"
            f"{candidate.total_memory / 1e9:>6.1f}{'?' if candidate.peak.unproven else ' '}{layout.tp:>3}{layout.cp:>4}{layout.ep:>4}{layout.pp:>4}"
            f" {layout.dp:>5}{layout.zero:>5}{layout.micro_batch:>4} {layout.recompute:<9} "
            + (chunks if layout.pp > 1 else "-")
            + folded
            + (f" shard={layout.shard}" if layout.shard else "")
        )
    half = f"MFU and TFLOP/s: {ALL_PAIRS} count; with those that a causal mask leaves, the first has"
    lines += ["", *textwrap.wrap(why_first(result), 80)]
    lines += [*textwrap.wrap(f"{half} {result.mfu(first, causal=True):.0%} MFU.", 80)]
    lines += [*textwrap.wrap(f"First layout: {result.like(first).between(first.step)}", 80)]
    if first.peak.unproven:
        names = ", ".join(first.peak.unproven)
        lines += textwrap.wrap(f"GB, first layout: {MEANING.replace('unproven', f'unproven ({names})', 1)}", 80)
    if machine.nodes > 1 and "nic" not in machine.given:
        half, quarter = (f"{result.with_network(first, share):.3f} s" for share in (0.5, 0.25))
        lines += textwrap.wrap(
            f"The network is assumed: with half of its {machine.inter / 1e9:g} GB/s a GPU the first layout takes {half} a "
            f"step, with a quarter {quarter}; --nic sets what you get.",
            80,
        )
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
