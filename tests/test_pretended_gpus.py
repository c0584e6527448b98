"""Every decision that depends on GPUs, on machines that pretend to have none, 1, 2 or 8 of them."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from tests.pretend import ROOT, environment, untested


def run(code, gpus, tmp_path, **variables):
    """Run lines of Python on a machine with so many pretended GPUs; return what they print last, as JSON."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    env = environment(gpus, tmp_path / "log", tmp_path / "experiments") | variables
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


ASKED = """
import json, os, torch

def forked(work):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        except Exception as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = json.load(file)
    os.wait()
    return said

def started():
    torch.cuda.set_device(0)
    return "works"

def machine(variables):
    os.environ.update(variables)
    before = forked(started) if torch.cuda.device_count() else ""
    there = torch.cuda.is_available()
    after = forked(started) if there else ""
    try:
        made = str(torch.ones(1, device="cuda"))
    except Exception as error:
        made = type(error).__name__
    return torch.cuda.device_count(), there, before, after, made

# Nobody has asked CUDA for anything here, so each fork is like a new process.
print(json.dumps([forked(lambda: machine(variables)) for variables in {machines}]))
"""
#: Variables of a machine, how many GPUs it sees, and what becomes of a fork before its first question.
MACHINES = [
    ({"PRETEND_GPUS": "0"}, 0, ""),
    ({"PRETEND_GPUS": "2"}, 2, "works"),
    ({"PRETEND_GPUS": "2", "PRETEND_NVML": "0"}, 2, "RuntimeError: Cannot re-initialize"),
    ({"PRETEND_GPUS": "8", "CUDA_VISIBLE_DEVICES": "1,3"}, 2, "works"),
]


def test_the_pretended_machine_is_as_strict_as_cuda(tmp_path):
    """A fork is bad after the first question, and nothing can be computed. Without this the tests below prove nothing."""
    answers = run(ASKED.replace("{machines}", repr([variables for variables, _, _ in MACHINES])), 8, tmp_path)
    for (count, there, before, after, made), (_, seen, fork_before) in zip(answers, MACHINES, strict=True):
        assert (count, there) == (seen, seen > 0)
        assert before.startswith(fork_before)
        assert bool(before) == bool(fork_before)
        assert after.startswith("RuntimeError: Cannot re-initialize CUDA in forked subprocess") == (seen > 0)
        assert made in (("NoKernel",) if seen else ("AssertionError", "RuntimeError"))


RANKS = """
import json, sys, torch
from torch import nn
from lablib.checks import rung11
from lablib.launch.fsdp.sharding import shard
from lablib.launch.measure.step_time import step_traces
from lablib.launch.ranks.run import run_ranks
from lablib.launch.ranks.transport import rank_device, rank_mesh
from lablib.launch.recompute.measured_steps import fsdp_gathers
from lablib.toys.transformer import Transformer, tiny_config
sys.path.insert(0, "labs")
from solutions.rung11 import diagnose

def on_cpu():
    model, _ = shard(Transformer(tiny_config("gpt2", num_layers=1, hidden=16, vocab=32)))
    model.loss(torch.zeros(2, 9, dtype=torch.long)).backward()
    from torch.distributed.fsdp import fully_shard
    nobody_said = fully_shard(nn.Linear(2, 2))  # without a mesh
    kinds = {str(p.device) for m in (model, nobody_said) for p in m.parameters()}
    return [torch.cuda.device_count(), torch.cuda.is_available(), str(rank_device()), rank_mesh().device_type, *kinds]

def on_gpu():
    return str(rank_device())

def asked_for_gpus():
    try:
        return run_ranks(on_gpu, 2, device="cuda")
    except Exception as error:
        return str(error)

def programs():
    gathers = run_ranks(fsdp_gathers, 2, "inside")[0]
    traces = step_traces("fsdp2", width=16, layers=2, tokens=4)
    return [gathers.all_gathers, gathers.gradient_error, len(traces), rung11.diagnose(diagnose).status]

if __name__ == "__main__":
    print(json.dumps([run_ranks(on_cpu, 2), asked_for_gpus(), programs()]))
"""


@pytest.mark.drawn
def test_ranks_are_on_the_cpu_unless_they_are_asked_onto_gpus(tmp_path):
    """Also in lab 09's gathers, the trace of FSDP2, and the runs behind `rung11.diagnose` of the right answer."""
    on_cpu, asked, programs = run(RANKS, 2, tmp_path)
    assert on_cpu == [[0, False, "cpu", "cpu", "cpu"]] * 2
    # NCCL is where pretence ends; before it every rank has made its own GPU the current one, in a fork that may.
    assert "NoKernel: NCCL" in asked
    assert programs == [[5, 4], 0, 2, "passed"]


ELASTIC = """
import json
from pathlib import Path
from lablib.launch.runs.elastic import torchrun

if __name__ == "__main__":
    folder = Path({folder!r})
    rank = folder / "rank.py"
    rank.write_text('''
import os, runpy, threading, torch
from pathlib import Path
from lablib.launch.records.machine import this_machine
number, folder = int(os.environ["LOCAL_RANK"]), Path({folder!r}, "gpus" if torch.cuda.is_available() else "cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(number)
print(f"rank {{number}} sees {{len(this_machine()['gpus'])}}", flush=True)
folder.mkdir(exist_ok=True)
(folder / str(number)).touch()
while len(list(folder.iterdir())) < 2:  # the first that fails ends the other
    threading.Event().wait(0.01)
runpy.run_path("labs/scripts/first_ddp.py", run_name="__main__")
''')
    print(json.dumps([torchrun(rank, ranks=2, device=device).log for device in ("cpu", "cuda")]))
"""


@pytest.mark.drawn
def test_the_first_program_takes_a_gpu_for_each_rank_and_none_is_forked_off_an_agent_that_has_asked(tmp_path):
    """torchrun's agent asks whether there is CUDA before it starts its ranks."""
    logs = run(ELASTIC.format(folder=str(tmp_path)), 2, tmp_path)
    sees = [sorted(re.findall(r"rank \d sees \d", log)) for log in logs]
    assert sees == [["rank 0 sees 0", "rank 1 sees 0"], ["rank 0 sees 2", "rank 1 sees 2"]], logs
    on_cpu, on_gpus = logs
    assert on_cpu.count("sum 3, mean 1.5") == 2
    assert "these GPUs are pretended" in on_gpus, "nothing of it was asked of a GPU"


def test_the_list_of_what_never_ran_on_cuda_is_that_of_the_source():
    """Written anew by `python -m tests.pretend.untested`."""
    assert untested.LIST.read_text(encoding="utf-8") == untested.text()


def test_the_doctor_says_of_each_lab_what_will_become_of_it(tmp_path):
    """Nothing can be measured on a pretended GPU: each probe says so in a row of its own, and the rest goes on."""
    env = environment(2, tmp_path / "log", tmp_path / "experiments")
    done = subprocess.run(
        [sys.executable, "-c", "from lablib.cli.main import app; app()", "doctor", "--gpu", "--json"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert "lab 11" in rows
    assert sum(name.startswith("GPU ") and name.endswith(" load") for name in rows) == 2
    assert rows["lab 06"]["verdict"] == "missing"
    assert "pretended" in rows["torch.compile"]["detail"]
