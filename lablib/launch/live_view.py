"""A run on one screen, drawn anew every second: `python -m lablib.launch.live_view runs/a`.

It reads the files that the ranks write, so it can be started and stopped at any time, from any terminal that sees
them, and the run does not know of it. Needs rich, which comes with typer.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lablib.calc.units import GiB, format_time
from lablib.launch.run_status import RankStatus, RunStatus, status

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = ("rank", "step", "loss", "s/step", "report", "tokens/s", "MFU", "GiB", "attempt", "heard")
_ROWS = 16  # so that the whole fits on 24 lines of 80 characters
_WIDTH = 80


def screen(run: RunStatus, width: int = 60) -> RenderableType:
    """Return the screen of one moment.

    Args:
        run: How it stands.
        width: Characters of the loss curve.

    Raises:
        ModuleNotFoundError: If rich is not installed; one sentence says how to get it.

    Chapter: book/11_practical_fsdp.md.
    """
    rich_console, rich_table = _rich()
    # Above the table, not its title, which would be broken to the width of the table; a path matters at its end.
    step, folder = f"step {run.step} of {run.steps}", str(run.folder)
    room = _WIDTH - len(f"...: {step}")
    title = f"{folder if len(folder) <= room else '...' + folder[-room:]}: {step}"
    table = rich_table.Table(box=None, padding=(0, 1))
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    # Those that need a look come first; of many ranks that are well, a few stand for all.
    shown = sorted(run.ranks, key=lambda each: (not each.silent, -each.seconds))[:_ROWS]
    for each in sorted(shown, key=lambda each: each.rank):
        table.add_row(*_row(each), style="red" if each.silent else "")
    lines = []
    if len(shown) < len(run.ranks):
        lines.append(f"and {len(run.ranks) - len(shown)} more ranks, not slower than these")
    where = f"checkpoint {run.checkpoint}" if run.checkpoint else "no checkpoint yet"
    left = f"{format_time(run.remaining)} left" if run.remaining else "all steps taken"
    lines.append(f"loss {run.losses[0]:.3f} {curve(run.losses, width)} {run.losses[-1]:.3f}")
    lines.append(f"{where}; {left}")
    silent = [str(each.rank) for each in run.ranks if each.silent]
    if silent and run.remaining:
        lines.append(
            f"silent: rank {', '.join(silent)}; all ranks silent means a hang, some a rank that died"
        )
    return rich_console.Group(title, table, *lines)


def curve(values: Sequence[float], width: int) -> str:
    """Return a curve in one line of text, each character the mean of a part.

    Args:
        values: At least one.
        width: Most characters.
    """
    count = min(width, len(values))
    cuts = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def watch(folder: str | Path, every: float = 1.0) -> None:
    """Draw a run until all its steps are taken, or until Ctrl-C.

    Args:
        folder: Of the run.
        every: Seconds between two looks.

    Raises:
        ModuleNotFoundError: If rich is not installed.
        ValueError: If no rank has taken a step in the folder.
    """
    _rich()
    from rich.live import Live

    run = status(folder, time.time())
    whole_screen = sys.stdout.isatty()
    with Live(screen(run), auto_refresh=False, screen=whole_screen) as live:
        while run.remaining:
            time.sleep(every)
            run = status(folder, time.time())
            live.update(screen(run), refresh=True)
    if whole_screen:  # which is gone when the view ends
        _rich()[0].Console().print(screen(run))


def _row(each: RankStatus) -> list[str]:
    last = each.last
    return [
        str(each.rank),
        str(last["step"]),
        f"{last['loss']:.3f}",
        f"{each.seconds:.3f}",
        f"{each.waiting:.0%}",
        f"{last['tokens_per_second']:,.0f}",
        "-" if last["mfu"] is None else f"{last['mfu']:.1%}",
        f"{last['memory_bytes'] / GiB:.2f}",
        str(last["attempt"]),
        f"{each.age:.0f} s ago",
    ]


def _rich() -> tuple:
    try:
        from rich import console, table
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the live view needs rich, which typer brings; here it is missing: pip install rich"
        ) from error
    return console, table


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lablib.launch.live_view FOLDER")
    try:
        watch(sys.argv[1])
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
