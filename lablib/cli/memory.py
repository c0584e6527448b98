"""`rung memory`: bytes per rank by term, and whether they fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lablib.calc.breakdown import MemoryBreakdown
    from lablib.calc.hardware import Accelerator


def memory(
    model: Annotated[str, typer.Argument(help="Name (see `rung models`) or path of a config.json.")],
    recipe: Annotated[
        str, typer.Option(help="Dtypes: mixed-bf16, fp32, fsdp2-mixed, pure-bf16, ...")
    ] = "mixed-bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-8bit, sgd or sgd-momentum.")] = "adamw",
    tuning: Annotated[str, typer.Option(help="full, lora or qlora.")] = "full",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    lora_targets: Annotated[str, typer.Option(help="Matrices with an adapter: all or attention.")] = "all",
    micro_batch: Annotated[int, typer.Option(help="Sequences in one forward pass of a replica.")] = 1,
    seq: Annotated[
        int | None, typer.Option(help="Tokens in a sequence; default: the model's longest.")
    ] = None,
    dp: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.")] = 0,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Split norms and residuals over tp too.")] = False,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    schedule: Annotated[str, typer.Option(help="1f1b, gpipe or interleaved.")] = "1f1b",
    virtual_stages: Annotated[int, typer.Option(help="Chunks in a stage, when interleaved.")] = 1,
    num_microbatches: Annotated[int | None, typer.Option(help="Micro-batches in a step.")] = None,
    layers_per_stage: Annotated[str | None, typer.Option(help="Uneven stages, for example 7,8,8,7.")] = None,
    stage: Annotated[int | None, typer.Option(help="Pipeline stage, from 0; default: the largest.")] = None,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks, within dp times cp.")] = 1,
    recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    attention: Annotated[str, typer.Option(help="fused, or plain, which stores the scores.")] = "fused",
    kernels: Annotated[
        str, typer.Option(help="Whose kernels: paper, toy (ours) or hf (Hugging Face's eager classes).")
    ] = "paper",
    dropout: Annotated[float | None, typer.Option(help="Dropout probability; default: as published.")] = None,
    offload: Annotated[
        str, typer.Option(help="On the CPU: none, optimizer, gradients or parameters.")
    ] = "none",
    gradient_as_bucket_view: Annotated[bool, typer.Option(help="DDP's option: no second copy.")] = False,
    bucket_bytes: Annotated[str, typer.Option(help="Bucket of ZeRO stages 1 and 2.")] = "25 MiB",
    prefetch: Annotated[int, typer.Option(help="Units that ZeRO-3 gathers ahead.")] = 0,
    sharding: Annotated[
        str, typer.Option(help="flat, fsdp2 with --zero 3 or 2, or whole with --zero 1.")
    ] = "flat",
    torch: Annotated[str, typer.Option(help="PyTorch whose FSDP2 it is: 2.11 to 2.15.")] = "2.13",
    step: Annotated[
        str, typer.Option(help="With --at or --explain: foreach, for-loop or fused optimizer.")
    ] = "foreach",
    at: Annotated[
        str | None,
        typer.Option(help='A moment of the step: peak, "backward of block 3", ...; all lists them.'),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print formula, numbers and source of each term, at the peak.")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="Accelerator to fit on, for example h100.")] = None,
    unit: Annotated[str, typer.Option(help="Unit of the table: GB, GiB, MB, MiB or B.")] = "GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the bytes that one rank needs for a training step, by term, and whether they fit."""
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "gpu", "unit", "as_json", "step", "at", "explain")
    }

    from lablib.calc.choices import one_of, plural
    from lablib.calc.hardware import accelerator
    from lablib.calc.memory import training_memory
    from lablib.calc.memory_timeline import STEPS
    from lablib.calc.units import parse_bytes

    if layers_per_stage is not None:
        settings["layers_per_stage"] = _numbers(layers_per_stage)
    settings["bucket_bytes"] = parse_bytes(bucket_bytes)
    named, device = named_model(model), None if gpu is None else accelerator(gpu)
    if at is not None or explain:
        from lablib.cli.memory_moment import print_moment

        if explain and at == "all":
            raise ValueError("--explain is about one moment: leave --at all out, or name a moment")
        how = settings | {"step": step}
        at = "peak" if at is None else at
        print_moment(named, how, at=at, explain=explain, device=device, unit=unit, as_json=as_json)
        return
    one_of("step", step, STEPS)
    breakdown = training_memory(named, **settings)
    if as_json:
        typer.echo(json.dumps(breakdown.as_dict() | verdict(breakdown.total, device), indent=1))
    else:
        typer.echo(memory_table(breakdown, device=device, unit=unit, pp=pp))
        if seq is None:
            typer.echo(
                f"\n{plural(breakdown.seq, 'token')}, the model's longest, because --seq was not given:"
                " add --seq with the length that you train at."
            )


def memory_table(
    breakdown: MemoryBreakdown, *, device: Accelerator | None = None, unit: str = "GB", pp: int = 1
) -> str:
    """Return the breakdown as aligned text.

    Args:
        breakdown: What `training_memory` returned.
        device: Accelerator to compare with.
        unit: A unit of bytes.
        pp: Pipeline stages, for the heading; stages count from 0.

    Raises:
        ValueError: If the unit is unknown.
    """
    from lablib.calc.choices import one_of, plural
    from lablib.calc.units import BYTE_UNITS

    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    digits = 0 if size == 1 else 2

    def row(name: str, value: int) -> str:
        share = f"{value / breakdown.total:>9.1%}" if breakdown.total else ""
        return f"{name:<32}{value / size:>20,.{digits}f}{share}"

    ranks = plural(breakdown.ranks, "rank")
    place = f"stage {breakdown.stage} of {pp}, a rank" if pp > 1 else "on one rank"
    lines = [
        f"{breakdown.model}, {breakdown.recipe}, {plural(breakdown.seq, 'token')} a sequence, {ranks}",
        "",
    ]
    lines.append(f"{place:<32}{unit:>20}{'share':>9}")
    for name, terms in (
        ("states", breakdown.state_terms),
        ("activations", breakdown.activation_terms),
        ("buffers (estimates)", breakdown.buffer_terms),
    ):
        if terms:
            lines.append(row(name, sum(value for _, value in terms)))
            lines += [
                row("  " + term.removeprefix("activations.").replace("_", " "), value)
                for term, value in terms
            ]
    lines.append(row("total", breakdown.total))
    if breakdown.host_terms:
        lines += ["", f"{'on the CPU, offloaded':<32}{breakdown.host / size:>20,.{digits}f}"]
    if device:
        lines += ["", sentence(breakdown.total, device)]
    return "\n".join(lines)


def sentence(total: int, device: Accelerator) -> str:
    """Return whether so many bytes fit on a card, and with what room."""
    room = device.memory_bytes - total
    holds = f"{device.name} holds {device.memory_gib:g} GiB ({device.memory_gb:.1f} GB): "
    if room < 0:
        return holds + f"does not fit, {-room / 1e9:.1f} GB too much."
    return (
        holds + f"fits, {room / 1e9:.1f} GB left\nfor the CUDA context, NCCL, workspaces and fragmentation."
    )


def verdict(total: int, device: Accelerator | None) -> dict[str, object]:
    """Return the same as fields of JSON; none without a card."""
    if device is None:
        return {}
    room = device.memory_bytes - total
    return {"gpu": device.name, "gpu_bytes": device.memory_bytes, "fits": room >= 0, "headroom": room}


def named_model(model: str) -> str | Path:
    """Return a path if there is such a file or folder, else the name; a folder without a config.json hides no preset."""
    from lablib.calc.models import preset_names

    here = Path(model)
    if model in preset_names() and not here.is_file() and not (here / "config.json").exists():
        return model
    return here if os.path.exists(model) else model


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--layers-per-stage={text!r} must be whole numbers with commas, like 7,8,8,7"
        ) from None
