"""The `rung` command. A subcommand's module is imported when it is called, and what it needs when it runs.

So a calculator never loads torch, and `rung memory` waits for no other command.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

#: The modules of the subcommands, in the order of the help.
COMMANDS = {
    "memory": "memory",
    "memory-snapshot": "memory",
    "fit": "fit",
    "plan": "plan",
    "doctor": "doctor",
    "schedule": "schedule",
    "cost": "labs",
    "report": "report",
    "compare": "report",
    "graduate": "report",
    "models": "main",
    "labs": "labs",
    "lab": "room",
    "serve": "room",
    "submit": "room",
    "class": "room",
}
#: What other programs call our options.
ALSO_CALLED = {
    "--batch-size": ("--micro-batch", "--global-batch", "--batch"),
    "--seq-length": ("--seq",),
    "--sequence-length": ("--seq",),
}


def model_table(*, as_json: bool = False) -> str:
    """Return the models as text: one line each, or JSON with every field of ModelConfig and the counts."""
    from dataclasses import asdict

    from lablib.calc.errors import json_text
    from lablib.calc.models import preset, preset_names
    from lablib.calc.params import count_params
    from lablib.calc.units import format_count

    rows = [(preset(name), count_params(preset(name))) for name in preset_names()]
    if as_json:
        return json_text([asdict(config) | {"total": count.total, "active": count.active} for config, count in rows])
    lines = [f"{'model':<22}{'parameters':>17}  {'':>6}{'active':>8}{'layers':>8}{'hidden':>8}{'seq':>9}"]
    for config, count in rows:
        active = format_count(count.active) if config.is_moe else ""
        lines.append(
            f"{config.name:<22}{count.total:>17,}  {format_count(count.total):>6}{active:>8}"
            f"{config.num_layers:>8}{config.hidden:>8}{config.max_positions:>9,}"
        )
    return "\n".join(lines)


#: The class of every usage error, in the click that this version of Typer uses.
UsageError = typer.BadParameter.__base__


class OneSentence(TyperGroup):
    """A command group whose errors are one sentence on stderr and exit code 2."""

    def main(self, *args: object, **kwargs: object) -> NoReturn:
        """Run the command as click does, but report bad input without usage text or traceback."""
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except UsageError as error:
            message = error.format_message()
            if message.startswith("Usage:"):  # `rung` alone: the message is the help
                typer.echo(message)
                raise SystemExit(2) from None
            asked = getattr(error, "option_name", None)
            here = {name for one in error.ctx.command.params for name in one.opts} if error.ctx else set()
            if meant := [name for name in ALSO_CALLED.get(asked, ()) if name in here]:
                message = f"No such option: {asked}; did you mean {' or '.join(meant)}?"
        except (typer.Abort, KeyboardInterrupt):
            message = "interrupted"
        except ValueError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            if not error.name or error.name.startswith("lablib"):
                raise
            package = error.name.partition(".")[0]
            message = f"the package {package} is not installed here: pip install {package}"
        except OSError as error:  # a full or a read-only disk: the system's text names the file
            message = str(error)
        else:
            raise SystemExit(code if isinstance(code, int) else 0)
        typer.echo(f"rung: {message}", err=True)
        raise SystemExit(2)


QUIET = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
#: What a text on the command line is taken for, as messages call it.
KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Plain:
    """Makes a value of an option's text. Typer's own way loads pydantic, a quarter of what `rung memory` takes."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value, or raise a usage error that names the option; Typer calls it."""
        try:
            return value if value is None else self.kind(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not {KINDS[self.kind]}", ctx=ctx, param=param) from None


class ReadsPlainly:
    """A command whose plain options are read by `Plain`; a Typer that has no such place reads them as it does."""

    def get_params(self, ctx: Any) -> list:
        """Return arguments and options, `--help` too."""
        params = super().get_params(ctx)
        for one in params:
            kind = getattr(getattr(one, "type_descriptor", None), "annotation", None)
            if kind in KINDS and one.nargs == 1 and not one.multiple and getattr(one, "min", None) is None:
                one._runtime_param = Plain(kind)
        return params


class Command(ReadsPlainly, TyperCommand):
    """A subcommand."""


class Rung(ReadsPlainly, OneSentence):
    """The group of `COMMANDS`, each of which is made when it is asked for."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        """Return a subcommand by name, or None."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            module = import_module(f"lablib.cli.{COMMANDS[cmd_name]}")
            made = module.app if cmd_name == "labs" else typer.Typer(**QUIET)
            if cmd_name != "labs":
                # `class` is a word of Python's; JupyterLab's options are for JupyterLab.
                function = getattr(module, {"class": "class_"}.get(cmd_name, cmd_name.replace("-", "_")))
                passed_on = {"ignore_unknown_options": cmd_name == "lab"}
                made.command(cmd_name, cls=Command, context_settings=passed_on)(function)
            self.commands[cmd_name] = typer.main.get_command(made)
        return self.commands.get(cmd_name)


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models that the calculators know."""
    typer.echo(model_table(as_json=as_json))


app = typer.Typer(
    cls=Rung,
    help="Distributed Training, Rung by Rung: calculators, machine check, labs.",
    no_args_is_help=True,
    **QUIET,
)
app.callback()(lambda: None)
