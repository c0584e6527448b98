"""Every decision that depends on GPUs, on machines that pretend to have none, 1, 2 or 8 of them."""

import json
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

def forked():
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.cuda.set_device(0)
            os.write(write, b"works")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()

before = forked() if torch.cuda.device_count() else ""
there = torch.cuda.is_available()
after = forked() if there else ""
made = ""
try:
    torch.ones(1, device="cuda")
except Exception as error:
    made = type(error).__name__
print(json.dumps([torch.cuda.device_count(), there, before, after, made]))
"""


@pytest.mark.parametrize(
    ("gpus", "variables", "seen", "fork_before"),
    [
        (0, {}, 0, ""),
        (2, {}, 2, "works"),
        (2, {"PRETEND_NVML": "0"}, 2, "Cannot re-initialize"),
        (8, {"CUDA_VISIBLE_DEVICES": "1,3"}, 2, "works"),
    ],
)
def test_the_pretended_machine_is_as_strict_as_cuda(gpus, variables, seen, fork_before, tmp_path):
    """A fork is bad after the first question, and nothing can be computed. Without this the tests below prove nothing."""
    count, there, before, after, made = run(ASKED, gpus, tmp_path, **variables)
    assert (count, there) == (seen, seen > 0)
    assert before.startswith(fork_before)
    assert bool(before) == bool(fork_before)
    assert after.startswith("Cannot re-initialize CUDA in forked subprocess") == (seen > 0)
    assert made in (("NoKernel",) if seen else ("AssertionError", "RuntimeError"))


RANKS = """
import json, torch
from torch import nn
from lablib.launch.ranks.transport import rank_device, rank_mesh
from lablib.launch.fsdp.sharding import shard
from lablib.launch.ranks.run import run_ranks
from lablib.toys.transformer import Transformer, tiny_config

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

if __name__ == "__main__":
    print(json.dumps([run_ranks(on_cpu, 2), asked_for_gpus()]))
"""


def test_ranks_are_on_the_cpu_unless_they_are_asked_onto_gpus(tmp_path):
    on_cpu, asked = run(RANKS, 2, tmp_path)
    assert on_cpu == [[0, False, "cpu", "cpu", "cpu"]] * 2
    # NCCL is where pretence ends; before it every rank has made its own GPU the current one, in a fork that may.
    assert "NoKernel: NCCL" in asked


ELASTIC = """
import json
from pathlib import Path
from lablib.launch.runs.elastic import torchrun

if __name__ == "__main__":
    folder = Path({folder!r})
    rank = folder / "rank.py"
    rank.write_text('''
import os, torch
from lablib.launch.records.machine import this_machine
number = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(number)
print(f"rank {{number}} sees {{len(this_machine()['gpus'])}}", flush=True)
''')
    jobs = {{}}
    for device in ("cpu", "cuda"):
        try:
            job = torchrun(rank, ranks=2, device=device)
            jobs[device] = sorted(line for line in job.log.splitlines() if line.startswith("rank ")) or job.log
        except ValueError as error:
            jobs[device] = str(error)
    print(json.dumps(jobs))
"""


@pytest.mark.parametrize("gpus", [2])
def test_no_rank_is_forked_off_an_agent_that_has_asked_for_cuda(gpus, tmp_path):
    """torchrun's agent asks whether there is CUDA before it starts its ranks."""
    jobs = run(ELASTIC.format(folder=str(tmp_path)), gpus, tmp_path)
    assert jobs["cpu"] == ["rank 0 sees 0", "rank 1 sees 0"]
    if gpus >= 2:
        assert jobs["cuda"] == [f"rank 0 sees {gpus}", f"rank 1 sees {gpus}"]
    else:
        assert f"world_size=2, GPUs here: {gpus}" in jobs["cuda"]


FIRST = """
import json
from lablib.launch.runs import torchrun

if __name__ == "__main__":
    print(json.dumps([torchrun("labs/scripts/first_ddp.py", ranks=2, device=where).log for where in ("cpu", "cuda")]))
"""


def test_the_first_program_takes_a_gpu_for_each_rank_where_there_is_one(tmp_path):
    on_cpu, on_gpus = run(FIRST, 2, tmp_path)
    assert on_cpu.count("sum 3, mean 1.5") == 2
    assert "these GPUs are pretended" in on_gpus, "nothing of it was asked of a GPU"


PROGRAMS = """
import json
from lablib.launch.ranks.run import run_ranks
from lablib.launch.recompute.measured_steps import fsdp_gathers
from lablib.launch.measure.step_time import step_traces
from lablib.checks import rung11
import sys
sys.path.insert(0, "labs")
from solutions.rung11 import diagnose

if __name__ == "__main__":
    gathers = run_ranks(fsdp_gathers, 2, "inside")[0]
    traces = step_traces("fsdp2", width=16, layers=2, tokens=4)
    print(json.dumps([gathers.all_gathers, gathers.gradient_error, len(traces), rung11.diagnose(diagnose).status]))
"""


@pytest.mark.parametrize("gpus", [2])
def test_what_shards_without_naming_a_device_shards_on_the_cpu(gpus, tmp_path):
    """Lab 09's gathers, the trace of FSDP2, and the jobs behind `rung11.diagnose` of the right answer."""
    assert run(PROGRAMS, gpus, tmp_path) == [[5, 4], 0, 2, "passed"]


def test_the_list_of_what_never_ran_on_cuda_is_that_of_the_source():
    """Written anew by `python -m tests.pretend.untested`."""
    assert untested.LIST.read_text(encoding="utf-8") == untested.text()


@pytest.mark.parametrize("gpus", [2])
def test_the_doctor_says_of_each_lab_what_will_become_of_it(gpus, tmp_path):
    """Nothing can be measured on a pretended GPU: each probe says so in a row of its own, and the rest goes on."""
    env = environment(gpus, tmp_path / "log", tmp_path / "experiments")
    done = subprocess.run(
        [sys.executable, "-c", "from lablib.cli.main import app; app()", "doctor", "--gpu", "--json"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert ("lab 11" in rows) == (gpus > 0)
    assert sum(name.startswith("GPU ") and name.endswith(" load") for name in rows) == gpus
    if gpus:
        # Between GPUs there is something to fail, with one there is not.
        assert rows["lab 06"]["verdict"] == ("missing" if gpus > 1 else "ok")
        assert "pretended" in rows["torch.compile"]["detail"]
