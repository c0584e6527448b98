"""`rung lab` and `rung serve`: the labs in JupyterLab, the book in a browser; `rung submit` and `rung class`: a class's answers."""

from __future__ import annotations

import csv
import functools
import os
import re
import shutil
import sys
import tempfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lablib import __version__, course_folder
from lablib.calc.errors import one_of, plural
from lablib.cli.copies import FIRST_PAGE, copy_labs

if TYPE_CHECKING:
    from lablib.checks.answers import Board, Class


def site() -> Path:
    """Return where `make book` builds the site, and where a bundle has it."""
    return course_folder() / "_build" / "html"


def lab(
    args: Annotated[list[str] | None, typer.Argument(help="For JupyterLab, for example --no-browser.")] = None,
) -> None:
    """Copy the labs to work/, where your files are never overwritten, and open JupyterLab there."""
    root = course_folder()
    lines = copy_labs(root / "labs", root / "work")
    if not lines:
        raise ValueError(f"there are no labs in {root / 'labs'}")
    typer.echo(f"Labs in {root / 'work'}:")
    for line in lines:
        typer.echo(f"  {line}")
    if not site().exists():
        typer.echo("Their links to chapters open once the book is built: make book.")
    set_up_jupyter()
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    command += [f"--LabApp.default_url=/lab/tree/work/{FIRST_PAGE}", f'--ServerApp.extra_static_paths=["{site()}"]']
    command += ["--allow-root"] * (os.geteuid() == 0) + (args or [])
    os.execve(sys.executable, command, os.environ | writable_home())


def set_up_jupyter() -> None:
    """Give this environment the course's settings of JupyterLab, and what each of its kernels loads."""
    for source, target in (
        ("jupyterlab.json", "share/jupyter/lab/settings/overrides.json"),
        ("ipython_config.py", "etc/ipython/ipython_config.py"),
    ):
        (Path(sys.prefix) / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(course_folder() / "tools" / source, Path(sys.prefix) / target)


def writable_home() -> dict[str, str]:
    """Return variables that move what Jupyter, IPython and matplotlib write out of a home that cannot be written to."""
    home = Path(os.path.expanduser("~"))
    if home.is_dir() and os.access(home, os.W_OK):
        return {}
    folder = Path(tempfile.gettempdir()) / f"rung-home-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid() or folder.lstat().st_mode & 0o77:  # its files would be somebody else's
        folder = Path(tempfile.mkdtemp(prefix="rung-home-"))
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
    return {name: str(folder / name.lower()) for name in (*names, "XDG_CACHE_HOME") if name not in os.environ}


def serve(
    port: Annotated[int | None, typer.Option(help="Default: the first free one from 8000.", min=1, max=65535)] = None,
) -> None:
    """Serve the built book on this machine; explorers and search need a server."""
    server = open_server(site(), port)
    typer.echo(f"The book is at http://127.0.0.1:{server.server_port}/ (stop with Ctrl-C)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo()
    finally:
        server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Stay quiet: a reader has no use for the request log."""


def open_server(folder: Path, port: int | None) -> ThreadingHTTPServer:
    """Return a server bound to 127.0.0.1, on the port asked for or the first free one from 8000."""
    if not (folder / "index.html").exists():
        raise ValueError(f"there is no book at {folder} yet: run make book first")
    handler = functools.partial(_Handler, directory=str(folder))
    for candidate in [port] if port is not None else range(8000, 8100):
        try:
            return ThreadingHTTPServer(("127.0.0.1", candidate), handler)
        except OSError as error:
            reason = error.strerror
    asked = f"port {port}" if port is not None else "any port from 8000 to 8099"
    mend = "leave the port out to take a free one" if port is not None else "name another with --port"
    raise ValueError(f"cannot serve on {asked} ({reason}): {mend}")


def submit(
    rungs: Annotated[list[str], typer.Argument(help="Rungs, for example 01 06.")],
    name: Annotated[str, typer.Option(help="Your name, as the table of the class shall show it.")],
    work: Annotated[
        Path | None, typer.Option(help="Folder of your labs; default: work/, here or in the course.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder of the file.")] = Path(),
) -> None:
    """Run your labs again in a clean process, judge every answer, and write one file to hand in."""
    from lablib.calc.errors import shown
    from lablib.checks.answers import SOLVED
    from lablib.checks.answers import submit as hand_in
    from lablib.launch.records import write_json

    os.environ.update(writable_home())
    to.mkdir(parents=True, exist_ok=True)
    if work is None:  # on a hub, each person has a work/ of their own
        work = Path("work") if Path("work").is_dir() else course_folder() / "work"
    content = hand_in(work, [rung.zfill(2) for rung in rungs], name)
    for rung, found in content["labs"].items():
        solved = sum(each["status"] in SOLVED for each in found["verdicts"])
        guessed = sum(each["value"] is not None for each in found["predictions"].values())
        typer.echo(
            f"{rung}: {solved} of {plural(len(found['verdicts']), 'exercise')} solved, {guessed} of "
            f"{plural(len(found['predictions']), 'prediction')} made"
        )
        for each in found["verdicts"]:
            if each["status"] == "wrong":
                typer.echo(f"    {each['name']}: {each['message']}")
        if found["ran"]:
            typer.echo(f"    from top to bottom, {found['ran']}")
    stem = re.sub(r"[^\w-]+", "-", content["who"]).strip("-").lower()[:60] or "nameless"
    path = write_json(
        to / f"{stem}-{re.sub(r'[^0-9T]', '', content['date'][:19])}-{content['sha256'][:6]}.json", content
    )
    typer.echo(f"hand in {shown(str(path))[1:-1]}")


def class_(
    folder: Annotated[Path, typer.Argument(help="Folder with the files that were handed in.")],
    challenge: Annotated[
        Path | None, typer.Option(help='Jobs to plan, JSON: {"room": {"model": "llama-3-70b", "gpus": 64, ...}}.')
    ] = None,
    exercise: Annotated[list[str] | None, typer.Option(help="Count these alone; repeatable. Default: all.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Judge every file here once more.")] = False,
) -> None:
    """Put the submissions of a class side by side: class.html to look at, class.csv for a gradebook."""
    from lablib.checks.answers import board, read_class, read_jobs

    jobs = read_jobs(challenge) if challenge else {}  # a bad job is said before anything is judged
    found = read_class(folder, everything_again=again)
    known = {name for _, name in found.columns()}
    found.counted = {one_of("exercise", name, known) for name in exercise or ()}
    boards = [board(found, name, settings) for name, settings in jobs.items()]
    with (folder / "class.csv").open("w", encoding="utf-8", errors="replace", newline="") as file:
        csv.writer(file).writerows(found.rows())
    (folder / "class.html").write_text(class_page(found, boards), encoding="utf-8", errors="replace")
    for name, why in found.unread.items():
        typer.echo(f"not read: {name}: {why}")
    for who in sorted(who for who, files in found.files.items() if files > 1):
        typer.echo(f"{found.files[who]} files by {who}: lab by lab the newest counts")
    for version in sorted(found.versions - {__version__}):
        typer.echo(f"written by lablib {version}, and this is {__version__}: --again judges here")
    for who in sorted(found.again):
        typer.echo(f"changed by hand after it was written, and judged again: {who}")
    typer.echo(f"{plural(len(found.labs), 'name')}, {plural(len(found.columns()), 'exercise')}")
    typer.echo(f"{folder / 'class.html'}\n{folder / 'class.csv'}")


#: How a verdict looks in a cell.
_MARKS = {"passed": "✓", "passed on CPU ranks": "✓ CPU", "wrong": "✗", "not attempted": "–", "no lab": "–", "": ""}


def class_page(found: Class, boards: list[Board]) -> str:
    """Return the page of a class."""
    import matplotlib.pyplot as plt

    from lablib.view import runs as view
    from lablib.view.style import themed_svg

    columns = found.columns()
    people = sorted(found.labs)
    who_stands_where = [
        [who, f"{found.points(who)} of {len(columns)}", *(_MARKS[found.status(who, *column)] for column in columns)]
        for who in people
    ]
    ideas = [
        [f"{people} of {len(found.labs)}", f"{rung} {name}", text] for rung, name, text, people in found.wrong_ideas()
    ]
    tables = [("Who stands where", ["name", "solved", *(f"{rung} {name}" for rung, name in columns)], who_stands_where)]
    if ideas:
        tables.append(("Wrong ideas", ["people", "exercise", "what the check says"], ideas))
    broken = [[who, rung, one["ran"]] for who in people for rung, one in found.labs[who].items() if one["ran"]]
    if broken:
        tables.append(("Notebooks that do not run from top to bottom", ["name", "rung", "what happened"], broken))
    for each in boards:
        rows = [_board_row(row) for row in each.rows]
        head = ["name", "", "s a step, predicted", "over the planner's first", "layout, or why there is none"]
        tables.append((f"Plans for {each.job}", head, rows))
    figures = []
    for rung in found.rungs:
        guesses = {name: ratios for name, ratios in found.guesses(rung).items() if ratios}
        if guesses:
            fig = view.guesses(guesses)
            alt = f"A row for each prediction of lab {rung}, a dot for each guess over what was measured."
            figures.append((themed_svg(fig, alt), f"Predictions of lab {rung}. At 1 the guess was right."))
            plt.close(fig)
    notes = [f"An error of predicted steps on runs like {each.job}: {each.error}." for each in boards]
    notes += [f"Judged again, since their file was changed by hand: {', '.join(sorted(found.again))}."] * bool(
        found.again
    )
    sentence = f"{plural(len(people), 'name')}; a prediction of 0 or of another sign than its measurement is not drawn."
    return view.page("The class", sentences=[sentence], tables=tables, figures=figures, notes=notes)


def _board_row(row: tuple[str, str, float | None, float | None, str]) -> list[str]:
    who, layout, step, ratio, verdict = row
    return [who, "", "", "", verdict] if step is None else [who, verdict, f"{step:.2f}", f"{ratio:.2f}", layout]
