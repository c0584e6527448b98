"""The options of a command that are the settings of a run: one for each field of `RunConfig`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from lablib.calc.run_config import SETTINGS
from lablib.calc.units import MiB, parse_bytes


def settings_as_options(
    command: Callable | None = None, *, optional: bool = False, leave_out: Iterable[str] = ()
) -> Any:
    """Give a command with `**settings` an option for each setting, behind its arguments.

    Args:
        command: The command.
        optional: Whether an option that was not given is None, and not the setting's default.
        leave_out: Settings that it does not have.
    """
    if command is None:
        return lambda function: settings_as_options(function, optional=optional, leave_out=leave_out)
    hints = typing.get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    made = [_option(name, optional) for name in SETTINGS if name not in leave_out]
    first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    parameters = [*first, *made, *own[len(first) :]]
    command.__signature__ = signature.replace(parameters=parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return command


def _option(name: str, optional: bool) -> inspect.Parameter:
    setting = SETTINGS[name]
    default = f"{setting.default // MiB} MiB" if name == "bucket_bytes" else setting.default
    kind = {"seq": int, "num_microbatches": int, "dropout": float, "layers_per_stage": str}.get(
        name, type(default)
    )
    if optional or default is None:
        kind, default = kind | None, None
    annotation = Annotated[kind, typer.Option(help=setting.metadata["help"])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def from_text(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings as the calculators take them: sizes and lists are text on the command line.

    Raises:
        ValueError: If such a text is not what it should be.
    """
    found = dict(settings)
    if "bucket_bytes" in found:
        found["bucket_bytes"] = parse_bytes(str(found["bucket_bytes"]))
    if found.get("layers_per_stage") is not None:
        text = str(found["layers_per_stage"])
        try:
            found["layers_per_stage"] = [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(
                f"--layers-per-stage={text!r} must be whole numbers with commas, like 7,8,8,7"
            ) from None
    return found
