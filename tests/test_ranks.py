"""Ranks start, answer, fail, hang and end as a notebook needs it."""

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading

import nbformat
import pytest
import torch
import torch.distributed as dist

from lablib.launch.ranks import RankError, RankTimeout, check_device, run_ranks
from lablib.launch.ranks import run as ranks
from lablib.launch.ranks.transport import visible_gpus
from tests.processes import ended


def rank_sum(x):
    t = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size(), t.item() + x


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_results_come_in_rank_order(world_size):
    total = world_size * (world_size - 1) / 2
    assert run_ranks(rank_sum, world_size, 0.5) == [(r, world_size, total + 0.5) for r in range(world_size)]


def test_printed_lines_are_whole_and_in_rank_order(capfd):
    def work():
        for _ in range(3):
            print("a", end="")
            dist.barrier()
            print("b")
        print("no newline", end="")

    run_ranks(work, 3)
    lines = [f"[rank {r}] {text}" for r in range(3) for text in ("ab", "ab", "ab", "no newline")]
    assert capfd.readouterr() == ("\n".join(lines) + "\n", "")


def test_live_lines_come_while_the_rank_runs(tmp_path):
    # The rank ends only when its own line has reached the notebook's stdout.
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    class Watcher:
        def write(self, text):
            if "[rank 0] started" in text:
                os.close(os.open(fifo, os.O_WRONLY))

        def flush(self):
            pass

    def work(path):
        print("started")
        return path.read_text()

    before, sys.stdout = sys.stdout, Watcher()
    try:
        assert run_ranks(work, 1, fifo, live=True) == [""]
    finally:
        sys.stdout = before


def test_standard_error_and_library_noise_stay_out_of_a_good_run(capfd):
    def work():
        print("warning", file=sys.stderr)
        os.write(2, b"C++ warns\n")
        dist.new_group([0, 1])  # gloo greets on standard output

    run_ranks(work, 2)
    assert capfd.readouterr() == ("", "")


def test_what_subprocesses_and_c_print_is_shown(capfd):
    def work():
        print("first")
        os.system("echo a command")
        ctypes.CDLL(None).puts(b"C")  # kept in C's memory until the rank flushes it

    run_ranks(work, 2)
    printed = "".join(f"[rank {rank}] {text}\n" for rank in range(2) for text in ("first", "a command", "C"))
    assert capfd.readouterr() == (printed, "")


def test_a_function_may_close_or_replace_its_streams():
    def work(how):
        if how == "closed":
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = None
        return how

    for how in ("none", "closed"):
        assert run_ranks(work, 2, how) == [how] * 2


def test_the_rank_that_failed_first_is_named_every_time():
    def work(bad):
        if dist.get_rank() == bad:
            print("on stderr", file=sys.stderr)
            raise KeyError("lost")
        dist.barrier()

    for turn in range(4):
        with pytest.raises(RankError) as caught:
            run_ranks(work, 4, turn % 4)
        assert caught.value.rank == turn % 4
        assert caught.value.traceback.endswith("KeyError: 'lost'")
        assert 'raise KeyError("lost")' in caught.value.traceback
        assert "rank_process.py" not in caught.value.traceback
        assert "on stderr" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: signal.raise_signal(signal.SIGSEGV), "SIGSEGV"),
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: sys.exit(0), "SystemExit: 0"),
    ],
    ids=["killed", "segfault", "os._exit", "sys.exit"],
)
def test_a_rank_that_ends_is_reported_with_its_signal_or_code(end, text):
    def work():
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    with pytest.raises(RankError, match=text) as caught:
        run_ranks(work, 3)
    assert caught.value.rank == 1


def timed_out(work, world_size, places):
    """Return what is said of ranks that hang; where a busy machine did not let them get there, they get more time."""
    for timeout in (2, 10, 50):
        with pytest.raises(RankTimeout, match=f"no result after {timeout} s from rank") as caught:
            run_ranks(work, world_size, timeout=timeout)
        standing = caught.value.waiting_at
        if standing.keys() == places.keys() and all(re.search(p, standing[r]) for r, p in places.items()):
            break
    return caught.value


def test_a_hung_rank_is_reported_with_where_each_stands():
    def work():
        rank = dist.get_rank()
        if rank == 1:
            return
        if rank == 2:
            while True:  # holds the GIL
                pass
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    places = {
        0: r"test_ranks\.py.*dist\.barrier\(\)  \(inside barrier\)",
        2: r"in work: (pass|while True)",
        3: "gives no answer",
    }
    error = timed_out(work, 4, places)
    assert error.ranks == [0, 2, 3]
    for rank, place in places.items():
        assert re.search(place, error.waiting_at[rank])
    assert "s from ranks 0, 2 and 3 of 4" in str(error)
    assert "rank 1: has returned" in str(error)


def test_one_rank_that_never_comes_is_not_a_failure_of_the_others():
    def work():
        if dist.get_rank() == 0:
            signal.pause()
        dist.barrier()

    places = {0: r"signal\.pause\(\)", 1: r"dist\.barrier\(\)"}
    error = timed_out(work, 2, places)
    for rank, place in places.items():
        assert re.search(place, error.waiting_at[rank])


def test_works_after_the_notebook_ran_backward():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    torch.set_num_threads(2)  # wakes the OpenMP pool that a fork would inherit as a corpse
    model(torch.ones(256, 256)).sum().backward()

    def work():
        copy = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
        copy(torch.ones(256, 256)).sum().backward()
        return sum(p.grad.numel() for p in copy.parameters())

    assert run_ranks(work, 2, threads=2) == [256 * 257] * 2


def test_tensors_come_back_as_copies():
    def work(x):
        x += dist.get_rank()
        return {"x": x, "model": torch.nn.Linear(2, 2), "grad": x.clone().requires_grad_().exp()}

    x = torch.zeros(3)
    first, second = run_ranks(work, 2, x)
    assert x.tolist() == [0, 0, 0]
    assert first["x"].tolist() == [0, 0, 0]
    assert second["x"].tolist() == [1, 1, 1]
    assert not second["x"].is_shared()
    assert isinstance(second["model"].weight, torch.nn.Parameter)
    assert second["grad"].shape == (3,)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: (i for i in range(3)), "returned generator cannot be sent"),
        (lambda: threading.Lock(), "return tensors, numbers"),
        (
            lambda: __import__("torch.distributed.tensor").distributed.tensor.distribute_tensor(
                torch.ones(2), dist.init_device_mesh("cpu", (dist.get_world_size(),))
            ),
            "full_tensor",
        ),
    ],
    ids=["generator", "lock", "DTensor"],
)
def test_what_cannot_be_returned_is_said(value, text):
    with pytest.raises(RankError, match=text):
        run_ranks(value, 2)


def test_threads_and_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("SET_AFTER_THE_SERVER_STARTED", "yes")

    def work():
        names = ("SET_AFTER_THE_SERVER_STARTED", "MINE", "RANK", "LOCAL_WORLD_SIZE")
        return torch.get_num_threads(), [os.environ.get(name) for name in names]

    answers = run_ranks(work, 2, threads=2, env={"MINE": "7"})
    assert answers == [(2, ["yes", "7", "0", "2"]), (2, ["yes", "7", "1", "2"])]
    monkeypatch.delenv("SET_AFTER_THE_SERVER_STARTED")
    assert run_ranks(work, 1) == [(1, [None, None, "0", "1"])]


def test_an_edited_module_is_the_one_that_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def work():
        import edited

        return edited.answer()

    for answer in (41, 4242):
        (tmp_path / "edited.py").write_text(f"def answer():\n    return {answer}\n")
        assert run_ranks(work, 1) == [answer]


def test_the_server_has_not_loaded_lablib():
    def work():
        import lablib.launch.ranks.rank_process as own

        return sorted(name for name in sys.modules if name.startswith("lablib")), own.inside_rank

    names, inside = run_ranks(work, 1)[0]
    others = {name for name in names if not name.startswith("lablib.launch.ranks")}
    assert others <= {"lablib", "lablib.launch", "lablib.launch.rank_server"}, "what a rank needs to start, and no more"
    assert inside


def test_a_function_may_use_torch_ops():
    # cloudpickle alone stumbles over this module, which is an object of its own class.
    def work():
        return torch.ops.aten.add(torch.ones(1), 1).item()

    assert run_ranks(work, 1) == [2.0]


def test_a_result_that_only_the_rank_can_load_is_said(tmp_path):
    (tmp_path / "only_there.py").write_text("class Thing:\n    pass\n")

    def work():
        sys.path.insert(0, str(tmp_path))
        import only_there

        return only_there.Thing()

    with pytest.raises(RankError, match="rank 0 returned, but its result cannot be loaded here"):
        run_ranks(work, 2)


def test_what_a_rank_started_ends_with_it(tmp_path):
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def work():
        held = os.open(fifo, os.O_WRONLY)
        return subprocess.Popen(["sleep", "600"], pass_fds=[held]).pid > 0

    assert run_ranks(work, 2) == [True, True]
    assert all_gone(reader)
    os.close(reader)


def test_data_loader_workers_run_in_ranks():
    def work():
        loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1)
        return [batch.tolist() for batch in loader]

    assert run_ranks(work, 2) == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_ranks_inside_ranks_are_refused():
    with pytest.raises(RankError, match="run_ranks was called inside a rank"):
        run_ranks(lambda: run_ranks(rank_sum, 2, 0), 1)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((rank_sum, 0), {}, "world_size=0 .* use 1 to 64"),
        ((rank_sum, 65), {}, "world_size=65"),
        (("rank_sum", 2), {}, "is not a function"),
        ((rank_sum, 2), {"timeout": 0}, "timeout=0"),
        ((rank_sum, 2), {"threads": 0}, "threads=0"),
        ((rank_sum, 2), {"device": "mps"}, "device='mps'"),
        ((rank_sum, 2), {"env": {"RANK": "0"}}, "env sets RANK"),
        ((rank_sum, 2), {"env": {"A": 1}}, "environment variables are strings"),
        ((rank_sum, 2), {"env": {"A\0B": "1"}}, "NUL byte"),
        ((rank_sum, 2, threading.Lock()), {}, "cannot be copied to the ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, options, text, monkeypatch):
    monkeypatch.setattr(ranks, "_start", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=text):
        run_ranks(*arguments, **options)


@pytest.mark.parametrize(
    ("gpus", "fix"), [(2, 'use device="cpu" or world_size=2'), (1, "or world_size=1"), (0, 'use device="cpu"$')]
)
def test_more_ranks_than_gpus_are_refused(gpus, fix, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"world_size=4, GPUs here: {gpus}.*{fix}"):
        check_device("cuda", 4, None)


@pytest.mark.parametrize(("visible", "gpus"), [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2)])
def test_the_environment_can_hide_gpus(visible, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert visible_gpus(visible if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == gpus


SCRIPT = """
import ctypes, os, signal, subprocess, sys
import torch.distributed as dist
from lablib.launch.ranks.run import run_ranks

def work(path, hold):
    held = os.open(path, os.O_WRONLY)
    holds = hold and dist.get_rank() == 1
    if not holds:
        subprocess.Popen(["sleep", "600"], pass_fds=[held])
    print("ready", flush=True)
    if holds:
        ctypes.PyDLL(None).sleep(600)  # in C, with the GIL held: no thread of Python can run
    signal.pause()

# What a shell starts in the background ignores SIGINT, and so would these tests started there.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    run_ranks(work, 2, sys.argv[1], False, live=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
run_ranks(work, 2, sys.argv[1], sys.platform == "linux", live=True, timeout=600)
"""


def all_gone(reader):
    """Wait until nobody holds the pipe any more."""
    while select.select([reader], [], [], 30)[0]:
        if not os.read(reader, 1):
            return True
    return False


def test_no_process_outlives_an_interrupt_or_the_notebook(tmp_path):
    # Both ranks, and a child of each, hold a pipe open: its end is the end of the last of them.
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    (tmp_path / "script.py").write_text(SCRIPT)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "script.py", str(fifo)]
    ready = ["[rank 0] ready\n", "[rank 1] ready\n"]
    with ended(subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)) as script:
        assert sorted(script.stdout.readline() for _ in range(2)) == ready
        os.killpg(script.pid, signal.SIGINT)  # to the whole group, as Jupyter and Ctrl-C do it
        assert script.stdout.readline() == "interrupted\n"
        assert all_gone(reader)
        print("again", file=script.stdin, flush=True)
        assert sorted(script.stdout.readline() for _ in range(2)) == ready
        threading.Event().wait(0.2)  # from the print to the sleep
        script.kill()
        assert all_gone(reader)  # also on Linux the one that holds the GIL; elsewhere a thread looks for the notebook
    os.close(reader)


CELLS = [
    "import torch, torch.distributed as dist\n"
    "from lablib.launch.ranks.run import RankError, RankTimeout, run_ranks\n"
    "torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()",
    "def work(x):\n"
    "    t = torch.full((1,), float(dist.get_rank()))\n"
    "    dist.all_reduce(t)\n"
    "    print('sum', t.item())\n"
    "    return t.item() + x\n"
    "run_ranks(work, 2, 10)",
    "def wrong():\n"
    "    if dist.get_rank() == 1:\n"
    "        raise KeyError('lost')  # the text of the cell\n"
    "    dist.barrier()\n"
    "try:\n"
    "    run_ranks(wrong, 2)\n"
    "except RankError as error:\n"
    "    assert error.rank == 1\n"
    "    assert 'Cell In[' in error.traceback and '# the text of the cell' in error.traceback, error\n"
    "    print(error.traceback.splitlines()[-1])",
    "def hang():\n"
    "    dist.barrier() if dist.get_rank() else __import__('signal').pause()\n"
    "for timeout in (1.5, 20):  # more where a busy machine did not let it get there\n"
    "    try:\n"
    "        run_ranks(hang, 2, timeout=timeout)\n"
    "    except RankTimeout as error:\n"
    "        said = error\n"
    "    if 'dist.barrier()' in said.waiting_at.get(1, ''):\n"
    "        break\n"
    "assert 'Cell In[' in said.waiting_at[1] and 'dist.barrier()' in said.waiting_at[1], said\n"
    "print(said.ranks)",
]


#: What each cell prints and returns.
PRINTED = [[], ["[rank 0] sum 1.0\n[rank 1] sum 1.0\n", "[11.0, 11.0]"], ["KeyError: 'lost'\n"], ["[0, 1]\n"]]


def test_a_notebook_shows_what_its_ranks_print_return_and_raise(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ended(subprocess.Popen(command, cwd=tmp_path, **pipes)) as run:
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 0, said
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    shown = [[o.get("text") or o["data"]["text/plain"] for o in cell.outputs] for cell in cells]
    assert shown == PRINTED
