"""What a learner reads when a cell is interrupted or run before the cells above it: a sentence, in a real kernel."""

import json
import os
import re
import sys
from contextlib import contextmanager

import pytest
from jupyter_client.manager import start_new_kernel

from lablib.launch.runs.elastic import descendants
from tests.scripts import ROOT

LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
SENTENCE = r"Line \d+: name '\w+' is not defined\..* run the cells above first \(.*\)\."
ANSWER_S = 120


class Kernel:
    """A kernel as `make lab` starts it; None for `config` is one of another environment."""

    def __init__(self, folder, config):
        profile = folder / "ipython" / "profile_default"
        profile.mkdir(parents=True)
        if config:
            (profile / "ipython_config.py").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
        usual = {**os.environ, "IPYTHONDIR": str(profile.parent), "PYTHONPATH": str(ROOT)}
        self.manager, self.client = start_new_kernel(env=usual, cwd=str(folder))

    def run(self, code, interrupt_at=None):
        """Return what the cell printed and what it shows of its error, and interrupt it when it has printed so much."""
        request = self.client.execute(code)
        printed, error = "", None
        while True:
            message = self.client.get_iopub_msg(timeout=ANSWER_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                error = "\n".join(content["traceback"])
            elif content.get("execution_state") == "idle":
                return printed, error

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextmanager
def started(folder, config=ROOT / "tools" / "ipython_config.py"):
    kernel = Kernel(folder, config)
    try:
        yield kernel
    finally:
        kernel.end()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with started(tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.idle = descendants(kernel.manager.provisioner.pid)
        yield kernel


@pytest.mark.drawn
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_cell_run_before_the_cells_above_it_says_so(kernel, path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    exercises = [source for cell in cells if "NotImplementedError" in (source := "".join(cell["source"]))]
    assert len(exercises) > 2
    for source in exercises:
        kernel.run("%reset -f")
        printed, error = kernel.run(source)
        # It may bring its own imports, and then has its verdict.
        assert "not attempted" in printed if error is None else re.fullmatch(SENTENCE, error), source


def test_a_slip_within_a_function_keeps_its_traceback(kernel):
    kernel.run("%reset -f")
    _, error = kernel.run("def outer():\n    return inner()\n\ndef inner():\n    return nothing\n\nouter()")
    assert "Traceback" in error
    assert "inner()" in error
    assert kernel.run("import sys\nprint(sys.last_type.__name__)") == ("NameError\n", None), "%debug looks there"
    _, error = kernel.run("len(nothing)\n")
    assert error.startswith("Line 1: name 'nothing' is not defined")
    _, error = kernel.run("1 / 0")
    assert "Traceback" in error


def test_an_interrupted_import_says_what_to_do(kernel, tmp_path):
    (tmp_path / "halfway.py").write_text("import signal\nprint('begun', flush=True)\nsignal.pause()\n")
    kernel.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    _, error = kernel.run("x = 1\nimport halfway", interrupt_at="begun")
    assert error.splitlines()[0] == "Interrupted in line 2: import halfway"
    assert "restart the kernel" in error
    assert len(error.splitlines()) == 2
    assert kernel.run("print(x)") == ("1\n", None)


RANKS = """\
import os
import signal
from lablib.launch.ranks import run_ranks

def stay():
    print("pid", os.getpid())
    signal.pause()

run_ranks(stay, 2, live=True, timeout=600)
"""


def interrupted(kernel):
    printed, error = kernel.run(RANKS, interrupt_at="[rank 0] pid")
    assert error == "Interrupted in line 9: run_ranks(stay, 2, live=True, timeout=600)\nIts ranks have ended."
    for pid in re.findall(r"pid (\d+)", printed):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert kernel.run("len([1])") == ("", None)


def test_an_interrupt_while_ranks_run_is_one_sentence_and_no_rank_is_left(kernel):
    interrupted(kernel)


def test_so_it_is_in_a_kernel_of_another_environment(tmp_path):
    with started(tmp_path, None) as other:
        interrupted(other)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_of_ranks_waits_for_the_first_cell(kernel):
    """An open notebook that nobody runs would hold a process with torch in it."""
    assert not kernel.idle
    printed, _ = kernel.run("from multiprocessing import forkserver\nprint(forkserver._forkserver._forkserver_pid)")
    assert int(printed) in descendants(kernel.manager.provisioner.pid)


def test_another_handler_of_the_learner_is_kept(kernel):
    from lablib.launch import load_ipython_extension

    class Shell:
        custom_exceptions = (ZeroDivisionError,)

    load_ipython_extension(Shell())  # would need `set_custom_exc`
