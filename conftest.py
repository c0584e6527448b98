"""For the tests and the labs alike: a run leaves no file in labs/."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def pytest_configure(config):
    """Keep what labs write under test apart from a learner's own results."""
    os.environ.setdefault("LABLIB_EXPERIMENTS", str(ROOT / "_build" / "experiments"))
    if not hasattr(config, "workerinput"):
        config.stash[_BEFORE] = _files_of_labs()


def pytest_collection_modifyitems(config, items):
    """Without a built site, let one test say so instead of a hundred."""
    if (ROOT / "_build" / "html" / "index.html").exists():
        return
    lost = [i for i in items if i.get_closest_marker("site") and i.name != "test_the_site_is_built"]
    if lost:
        items[:] = [item for item in items if item not in lost]
        config.hook.pytest_deselected(items=lost)


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


def _files_of_labs():
    return {p for p in (ROOT / "labs").rglob("*") if p.is_file() and "__pycache__" not in p.parts}


_BEFORE, _LEFT = pytest.StashKey[set](), pytest.StashKey[list]()
