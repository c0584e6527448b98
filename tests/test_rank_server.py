"""The server of the ranks starts early in a notebook, and nowhere else; it ends with the notebook."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

#: Imports `lablib.launch` as a command does, and then as a kernel does; says which server there is each time.
PROBE = """
import importlib, sys, types
from multiprocessing import forkserver

def server():
    return forkserver._forkserver._forkserver_pid

import lablib.launch
assert server() is None, "a plain import started a server"

shell = None
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
importlib.reload(lablib.launch)
assert server() is None, "IPython without a kernel started a server"

shell = types.SimpleNamespace(kernel=object(), custom_exceptions=(ValueError,), user_ns={"In": ["", "import"]})
importlib.reload(lablib.launch)
first = server()
assert first is not None, "a kernel did not start it"
importlib.reload(lablib.launch)
assert server() == first, "a second one was started"
assert "torch" not in sys.modules, "starting it loaded torch here"
print(first)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_starts_in_a_kernel_only_and_ends_with_it():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    # `run` returned when nobody held its output any more; the server may still be giving back its memory.
    state, end, pause = Path(f"/proc/{run.stdout.strip()}/stat"), time.monotonic() + 30, threading.Event()
    while state.exists() and state.read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < end, "the server outlived its notebook"
        pause.wait(0.05)


RANKS = """
import tempfile
from lablib.launch.ranks.run import run_ranks
print(run_ranks(tempfile.gettempdir, 2))
"""


def test_a_long_tmpdir_does_not_make_sockets_too_long(tmp_path):
    folder = tmp_path / ("f" * 200)
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", RANKS],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{[str(folder)] * 2}\n"  # all but the sockets is where it shall be
    assert not [*folder.glob("pymp-*"), *folder.glob("ranks-*")]
