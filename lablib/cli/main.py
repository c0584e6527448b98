"""The `rung` command. Each subcommand imports what it needs when it runs, so a calculator never loads torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from lablib.calc.errors import json_text
from lablib.calc.models import preset, preset_names
from lablib.calc.params import count_params
from lablib.calc.units import format_count
from lablib.cli import labs
from lablib.cli.doctor import doctor
from lablib.cli.fit import fit
from lablib.cli.labs import cost
from lablib.cli.memory import memory, memory_snapshot
from lablib.cli.plan import plan
from lablib.cli.report import compare, graduate, report
from lablib.cli.schedule import schedule


def model_table(*, as_json: bool = False) -> str:
    """Return the models as text: one line each, or JSON with every field of ModelConfig and the counts."""
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


app = typer.Typer(
    cls=OneSentence,
    help="Distributed Training, Rung by Rung: calculators, machine check, labs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(memory)
app.command()(memory_snapshot)
app.command()(fit)
app.command()(plan)
app.command()(doctor)
app.command()(schedule)
app.command()(cost)
app.command()(report)
app.command()(compare)
app.command()(graduate)
app.add_typer(labs.app, name="labs")


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models that the calculators know."""
    typer.echo(model_table(as_json=as_json))
