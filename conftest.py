"""For the tests and the labs alike: a known state, labs first, executed labs kept, no file left in labs/."""

import copy
import gc
import itertools
import os
import random
import re
import signal
import tempfile
from pathlib import Path

import nbformat
import pytest

from tests.scripts import load

ROOT = Path(__file__).parent


def pytest_configure(config):
    """Begin in a known state, in every worker of xdist too; keep what labs write apart from a learner's results."""
    known_state()
    os.environ.setdefault("LABLIB_EXPERIMENTS", str(ROOT / "_build" / "experiments"))
    os.environ.setdefault("LABLIB_DRAW", str(random.SystemRandom().randrange(10**6)))  # one for all workers
    if hasattr(config, "workerinput"):
        # Workers start kernels beside each other: those of the labs, and those of tests.
        config.add_cleanup(load("tools/kernel_sockets.py").talk_through_files().cleanup)
    else:
        config.stash[_BEFORE] = _files_of_labs()


def known_state():
    """Undo what a run would inherit from whoever started it: for the tests and for every process that they start."""
    # `make test &`, nohup and many CI runners start a process that ignores Ctrl-C, and whatever it starts does, too.
    # SIGHUP stays as it is: under nohup the run shall outlive its terminal.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGCHLD, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ |= {"COLUMNS": "80", "LINES": "24", "TERM": "dumb", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    # The folder that Python would take, also for tools that look at TMPDIR alone and do not ask whether it is there.
    os.environ["TMPDIR"] = tempfile.gettempdir()
    home = os.environ.get("HOME", "")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        os.environ["HOME"] = str(ROOT / ".cache" / "home")
        os.makedirs(os.environ["HOME"], exist_ok=True)


def pytest_collection_modifyitems(config, items):
    """Begin with the files that take long, and leave out the pages of a site that is not built."""
    # Both workers then end together: the last files that xdist hands out are the quick ones.
    items.sort(key=lambda item: _weight(item.path), reverse=True)
    drawn = {item.nodeid: item for item in items if item.get_closest_marker("drawn")}
    for nodeid in share_of_cases(drawn, int(os.environ.get("LABLIB_SHARE", 1)), os.environ["LABLIB_DRAW"]):
        del drawn[nodeid]
    if drawn:
        items[:] = [item for item in items if item.nodeid not in drawn]
        config.hook.pytest_deselected(items=list(drawn.values()))
    if (ROOT / "_build" / "html" / "index.html").exists():
        return
    # Without a built site, let one test say so instead of a hundred.
    lost = [i for i in items if i.get_closest_marker("site") and i.name != "test_the_site_is_built"]
    if lost:
        items[:] = [item for item in items if item not in lost]
        config.hook.pytest_deselected(items=lost)


def share_of_cases(names, share, draw):
    """Return one in `share` of each test's cases, at least one of them; a test without cases in one of so many runs."""
    taken = []
    for test, group in itertools.groupby(sorted(names), lambda name: name.partition("[")[0]):
        dice, cases = random.Random(draw + test), list(group)
        if len(cases) > 1 or not dice.randrange(share):
            taken += dice.sample(cases, -(-len(cases) // share))
    return taken


def pytest_collection_finish():
    """Let the garbage collector pass over what every test shares: with all modules loaded a pass took half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep a lab whose cells all passed under nbval, with their outputs, in the folder $EXECUTED_LABS."""
    report = yield
    folder = os.environ.get("EXECUTED_LABS")
    if folder and report.passed and call.when == "call" and hasattr(item, "test_outputs"):
        lab = item.parent
        passed = lab.stash.setdefault(_PASSED, {})
        passed[item.cell_num] = item.test_outputs
        keep_executed(lab.nb, passed, Path(folder) / lab.path.name)
    return report


def keep_executed(notebook, passed, path):
    """Write a notebook with the outputs of its run, once every code cell has passed.

    Args:
        notebook: The notebook as shipped.
        passed: Outputs of the code cells that passed, by number among the code cells.
        path: The file to write.
    """
    executed = copy.deepcopy(notebook)
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    if sorted(passed) != list(range(len(cells))):
        return
    for number, cell in enumerate(cells):
        cell.execution_count = number + 1
        # A semicolon asks for no echo of the last value. A kernel that keeps no history, as nbval's, cannot see it.
        quiet = cell.source.rstrip().endswith(";")
        shown = [output for output in passed[number] if not (quiet and output["output_type"] == "execute_result")]
        cell.outputs = [nbformat.from_dict(output) for output in shown]
    executed.metadata["mystnb"] = {"execution_mode": "off"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(executed, path)


def pytest_sessionfinish(session):
    """Fail the run, by name, for every file that it left in labs/."""
    before = session.config.stash.get(_BEFORE, None)
    if before is None:
        return
    left = sorted(str(path.relative_to(ROOT)) for path in _files_of_labs() - before)
    if left:
        session.config.stash[_LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Say which files were left."""
    for path in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"ERROR the run left a file in labs/: {path}", red=True)


def _weight(path):
    """Labs weigh most, then files that start processes, each by how often."""
    if path not in _WEIGHTS:
        text = path.read_text(encoding="utf-8")
        starts = len(re.findall(r"run_ranks\(|torchrun\(|subprocess\.|visit", text))
        starts += 100 * text.count("with standing_ranks")  # for each exercise
        _WEIGHTS[path] = (path.suffix == ".ipynb", starts)
    return _WEIGHTS[path]


def _files_of_labs():
    return {p for p in (ROOT / "labs").rglob("*") if p.is_file() and "__pycache__" not in p.parts}


#: Of a job or a terminal around the run: it would change who is a rank, what runs, and how it is printed.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "GLOO_", "TORCHELASTIC_"),
    *("SLURM_", "SKYPILOT_", "ACCELERATE_", "FSDP_"),
    *("LC_", "LANGUAGE", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH"),
)
_BEFORE, _LEFT = pytest.StashKey[set](), pytest.StashKey[list]()
_PASSED = pytest.StashKey[dict]()
_WEIGHTS = {}
