"""The training scripts as they are started: Slurm and torchrun over two nodes, accelerate launch, SkyPilot's file.

Slurm itself is played: a stand-in scontrol prints host names, and a stand-in srun starts the command once a node. The
rest is real: two torchrun agents meet, each starts its rank, and the ranks train together.

fp32 with eps = 1e-2: losses of two ranks and of the plain loop agree to 2e-5, as test_trainer derives.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

from lablib.calc.layouts.fit import setup
from lablib.calc.params import count_params
from lablib.launch.fsdp import latest_checkpoint, read_info
from lablib.launch.runs import plain_loop
from lablib.launch.runs.start import check_alone
from lablib.launch.training import TrainConfig, config_from_args, read_metrics, train_model, train_parser
from tests.processes import end, ended, free_port

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "labs" / "scripts"
SMALL = shlex.split("--model tiny --steps 3 --global-batch 4 --seq 16 --precision fp32 --eps 1e-2 --device cpu")
TOLERANCE = 2e-5

SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$RECORD"
[ "$1 $2" = "show hostnames" ] || exit 2
printf 'localhost\\nnode-2\\n'
"""

SRUN = """#!/bin/bash
echo "srun $SRUN_CPUS_PER_TASK $*" >> "$RECORD"
while [[ "$1" == --* ]]; do shift; done
# Both nodes are this machine, whose name need not have an address, as the name of a node has.
set -- "${@:1:3}" --local-addr=127.0.0.1 "${@:4}"
SLURM_NODEID=0 SLURM_STEP_ID=0 "$@" & first=$!
SLURM_NODEID=1 SLURM_STEP_ID=0 "$@" & second=$!
wait $first && wait $second
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    usual["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # Loading the libraries makes no garbage; to look for it is a sixth of the time.
    (folder / "sitecustomize.py").write_text("import gc; gc.set_threshold(100_000)")
    usual["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {name: v for name, v in os.environ.items() if not name.startswith(("SLURM_", "RANK", "ACCELERATE_"))}
    return {**ours, **usual, **more}


def expected(folder: Path) -> list[float]:
    parser = train_parser("A test.")
    args = parser.parse_args([*SMALL, "--folder", str(folder)])
    return [step["loss"] for step in plain_loop(config_from_args(args))]


@pytest.mark.drawn
def test_slurm_starts_one_torchrun_a_node_and_they_train_together(tmp_path: Path) -> None:
    for name, content in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_SUBMIT_HOST": "login-node",
        "SLURM_CPUS_PER_TASK": "2",
    }
    env = environment(tmp_path, MASTER_PORT=str(free_port()), RECORD=str(tmp_path / "record"), **slurm)
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    run = tmp_path / "run"
    command = ["bash", str(SCRIPTS / "train_fsdp.sbatch"), "--folder", str(run), *SMALL]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ended(subprocess.Popen(command, env=env, cwd=tmp_path, **pipes)) as job:
        said, errors = job.communicate(timeout=120)
    assert job.returncode == 0, said + errors
    asked, started = (tmp_path / "record").read_text().splitlines()
    assert asked == "scontrol show hostnames node-[1-2]"
    assert started.startswith("srun 2 --kill-on-bad-exit=1 ")
    assert f"--rdzv-endpoint=localhost:{env['MASTER_PORT']} " in started
    assert "--nnodes=2 --nproc-per-node=1 " in started
    assert "--rdzv-id=4711 " in started
    assert "login-node" not in started
    assert f"2 nodes x 1 ranks, meeting at localhost:{env['MASTER_PORT']}" in said
    for rank in (0, 1):
        metrics = read_metrics(run, rank)
        assert [m["world_size"] for m in metrics] == [2, 2, 2]
        assert [m["loss"] for m in metrics] == pytest.approx(expected(run), abs=TOLERANCE)


def directives(file: Path) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", file.read_text(), re.MULTILINE)
    return dict(lines)


def test_the_sbatch_file_asks_for_what_it_needs() -> None:
    asked = directives(SCRIPTS / "train_fsdp.sbatch")
    assert asked["ntasks-per-node"] == "1"
    assert {"nodes", "gpus-per-node", "cpus-per-task", "time", "requeue"} <= asked.keys()
    subprocess.run(["bash", "-n", str(SCRIPTS / "train_fsdp.sbatch")], check=True)
    # To the batch script alone, and long enough before the end for torchrun's patience and a requeue after it.
    signal_name, lead = asked["signal"].split("@")
    assert signal_name == "B:USR1"
    text = (SCRIPTS / "train_fsdp.sbatch").read_text()
    (patience,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=.*:-(\d+)\}$", text, re.MULTILINE)
    assert 30 < int(patience) <= int(lead) - 15


# One node. Like Slurm's own, this srun kills its task at once when it gets a SIGTERM; scancel goes round it.
SRUN_1 = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
# The number is there before the task says its first word, or scancel would find none.
bash -c 'echo $$ > "$RECORD.task"; exec "$@"' task "$@" & task=$!
trap 'kill -KILL $task; echo "srun killed its task" >> "$RECORD"; exit 137' TERM
wait $task
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$RECORD"
kill -TERM "$(cat "$RECORD.task")"
"""


def time_is_up(folder: Path, *options: str, **more: str) -> tuple[int, list[str]]:
    """Start the sbatch file on one node, tell it that its time is up, and return its code and what it asked of Slurm."""
    scontrol = SCONTROL.replace("|| exit 2", "|| exit 0")
    for name, content in (("scontrol", scontrol), ("srun", SRUN_1), ("scancel", SCANCEL)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "4711"}
    record = folder / "record"
    env = environment(folder, MASTER_PORT=str(free_port()), RECORD=str(record), **slurm)
    env |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{folder}{os.pathsep}{env['PATH']}", **more}
    command = ["bash", str(SCRIPTS / "train_fsdp.sbatch"), "--folder", str(folder / "run"), *options]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    patience = threading.Timer(90, end, [job])  # with srun and its task, which hold the pipe
    patience.start()
    try:
        told = []
        for line in job.stdout:
            told.append(line)
            if line.startswith("step "):
                job.send_signal(signal.SIGUSR1)
                break
        out = "".join(told) + job.communicate()[0]
    finally:
        patience.cancel()
        end(job)
        job.wait()
        job.stdout.close()
    asked = record.read_text().splitlines()
    assert asked[:2] == ["scontrol show hostnames node-1", "scancel --signal=TERM 4711"], out
    return job.returncode, asked[2:]


@pytest.mark.drawn
def test_a_job_whose_time_is_up_saves_and_is_queued_again(tmp_path: Path) -> None:
    code, asked = time_is_up(tmp_path, *SMALL, "--steps", "100000", "--save-every", "50000")
    # As torchrun ends when it is told to stop.
    assert (code, asked) == (1, ["scontrol requeue 4711"])
    run = tmp_path / "run"
    assert read_info(latest_checkpoint(run / "checkpoints"))["step"] == read_metrics(run)[-1]["step"] < 50000


@pytest.mark.parametrize(
    ("code", "restarts", "options", "asked"),
    [(1, "9", ["--save-every", "5"], ["scontrol requeue 4711"]), (0, "0", ["--save-every", "5"], []), (1, "0", [], [])],
)
def test_a_job_that_never_gets_on_or_is_done_is_not_queued_again(
    tmp_path: Path, code: int, restarts: str, options: list[str], asked: list[str]
) -> None:
    """A torchrun that is played: it takes a step and ends with a code when it is told to stop."""
    played = f"""#!/bin/bash
[ "$2" = torch.distributed.run ] || exit 0
trap 'exit {code}' TERM
echo "step 1"
while true; do sleep 0.05; done
"""
    (tmp_path / "python").write_text(played)
    (tmp_path / "python").chmod(0o755)
    more = {"PYTHON": str(tmp_path / "python"), "SLURM_RESTART_COUNT": restarts}
    assert time_is_up(tmp_path, *options, **more) == (code, asked)


def launcher_arguments(words: list[str]) -> tuple[object, list[str]]:
    """What torchrun makes of a command line: its own options, and the script's."""
    args = torchrun_parser().parse_args(words)
    return args, [args.training_script, *args.training_script_args]


def test_skypilots_file_starts_what_it_says(tmp_path: Path) -> None:
    """Its `run` under bash, with SkyPilot's variables and a `python` that prints what it is asked to run."""
    file = SCRIPTS / "train_fsdp.sky.yaml"
    task = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert set(task) == {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
    assert all(isinstance(value, str) for value in task["envs"].values())  # SkyPilot refuses numbers
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    sky = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_NODE_RANK": "1",
        "PATH": os.environ["PATH"],
    }
    command = ["bash", "-euo", "pipefail", "-c", task["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=sky | task["envs"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("-m\ntorch.distributed.run\n")
    args, (script, *options) = launcher_arguments(done.stdout.split()[2:])
    assert (args.nnodes, args.nproc_per_node) == ("2", "4")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
    assert (ROOT / script).is_file()
    parsed = runpy.run_path(str(ROOT / script))["arguments"](options)
    assert (parsed.config.model, parsed.config.steps, parsed.save_every) == ("gpt2-124m", 200, 50)
    assert parsed.config.split_batch(8) == (2, 4)
    # SkyPilot's own image has a Python that the course refuses; this one has what tools/setup_gpu.sh looks for.
    assert os.access(ROOT / task["setup"], os.X_OK)
    assert re.fullmatch(r"docker:pytorch/pytorch:2\.1[1-5]\.\d+-cuda.*-devel", task["resources"]["image_id"])


def test_skypilots_file_rents_gpus_and_a_disk_that_are_large_enough() -> None:
    """The command at its head and the file's own settings, on the machines that it names: the calculator is asked."""
    text = (SCRIPTS / "train_fsdp.sky.yaml").read_text(encoding="utf-8")
    task = yaml.safe_load(text)
    typed = dict(re.findall(r"--env (\w+)=(\S+)", text))
    machines = re.findall(r"([\w-]+):(\d+)", re.search(r"(?m)^ +accelerators: .*$", text)[0])
    assert typed
    assert machines

    def fits(env: dict[str, str], gpu: str, gpus: int) -> bool:
        run = setup(
            train_model(env["MODEL"]), gpu=gpu.lower(), gpus=gpus, seq=int(env["SEQ"]), attention="fused", sharding="fsdp2",
            micro_batch=int(env["MICRO_BATCH"]), recipe="fsdp2-mixed-fp32-reduce", implementation="toy", zero=3, step="fused",
        )  # fmt: skip
        # From one micro-batch to the next a rank keeps whole gradients, in fp32: the file does not say --reduce-every.
        return run.memory + 4 * count_params(run.run.model).total <= run.budget

    def checkpoints(model: str) -> float:
        """GB of those that are kept and the next one: weights and AdamW's two moments in fp32."""
        return (TrainConfig(folder="").keep + 1) * 12 * count_params(train_model(model)).total / 1e9

    for env in (task["envs"], task["envs"] | typed):
        assert all(fits(env, gpu, int(gpus)) for gpu, gpus in machines), env["MODEL"]
        assert checkpoints(env["MODEL"]) <= task["resources"]["disk_size"], env["MODEL"]
    large = task["envs"] | {"MODEL": "qwen2-7b"}
    assert (fits(large, "h100", 4), fits(large, "h100", 2), fits(large, "a10", 2)) == (True, False, False)
    for model, words in (("llama-3.2-1b", "of a 1B model"), ("qwen2-7b", "of a 7B model, which wants H100:4,")):
        assert f"{words} 3 x {checkpoints(model) / 3:.0f}" in text


def test_accelerate_launch_hands_it_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `accelerate launch` but the agent at its end, which is torchrun's: the Slurm test starts that one."""
    script = [str(SCRIPTS / "train_fsdp.py"), "--folder", "unused", *SMALL]
    words = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    seen: dict[str, object] = {}

    def run(args: object) -> None:
        seen.update(vars(args), env=dict(os.environ))

    monkeypatch.setattr(torch.distributed.run, "run", run)
    launch_command(launch_command_parser().parse_args([*words, "--dynamo_backend", "no", *script]))
    assert (seen["nproc_per_node"], seen["nnodes"]) == ("2", "1:1")
    assert [seen["training_script"], *seen["training_script_args"]] == script
    given = {name: value for name, value in seen["env"].items() if name.startswith("ACCELERATE_")}
    assert given
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="one process without ranks"):
        check_alone()  # for these variables; with a RANK from torchrun nobody asks
    assert runpy.run_path(script[0])["arguments"](script[1:]).config.global_batch == 4


# The scripts in this process


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    def load(name: str, *words: str) -> dict:
        monkeypatch.setattr(sys, "argv", [name, *words])
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(variable, raising=False)
        return runpy.run_path(str(SCRIPTS / name))

    return load


def test_one_process_trains_saves_and_resumes(script: Callable, tmp_path: Path, capfd) -> None:
    words = ["--folder", str(tmp_path), *SMALL, "--save-every", "2"]
    assert script("train_fsdp.py", *words)["main"]() == 0
    out = capfd.readouterr().out
    assert "finished after step 3" in out
    assert [m["loss"] for m in read_metrics(tmp_path)] == pytest.approx(expected(tmp_path), abs=TOLERANCE)
    assert script("train_fsdp.py", *words)["main"]() == 0
    assert "resumed after step 3" in capfd.readouterr().out
    assert script("train_fsdp.py", *words, "--lr", "1")["main"]() == 1
    error = capfd.readouterr().err
    assert error.startswith("train_fsdp.py: checkpoint ")
    assert error.rstrip().endswith("is of another run: lr was 0.001 and is 1.0")


def test_the_fine_tuning_demo(script: Callable, tmp_path: Path, capfd) -> None:
    words = shlex.split("--demo --steps 2 --global-batch 4 --seq 12 --precision fp32 --lora-rank 2 --device cpu")
    assert script("finetune_fsdp.py", "--folder", str(tmp_path), *words)["main"]() == 0
    assert f"the model is in {tmp_path}/merged" in capfd.readouterr().out
    assert {p.name for p in (tmp_path / "adapters").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    words = [*words[1:-4], "--device", "cpu", "--pretrained", str(tmp_path / "merged"), "--examples", str(data)]
    again = tmp_path / "again"
    assert script("finetune_fsdp.py", "--folder", str(again), *words, "--bytes")["main"]() == 0
    assert {p.name for p in (again / "merged").iterdir()} == {"config.json", "model.safetensors"}


def test_the_plain_loop_and_the_race(script: Callable, tmp_path: Path, capfd) -> None:
    words = ["--folder", str(tmp_path), *SMALL]
    script("single_gpu_loop.py", *words)["main"]()
    assert capfd.readouterr().out.count("tokens/s") == 3
    script("single_gpu_loop.py", *words, "--race", "2", "--turn", "1")["main"]()
    assert "trainer / plain: " in capfd.readouterr().out
    assert (tmp_path / "race.json").exists()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("train_fsdp.py", "--seq 5000", "seq=5000 is longer than the 512 positions of tiny"),
        ("finetune_fsdp.py", "", "give --pretrained and --examples, or --demo"),
        ("single_gpu_loop.py", "--global-batch 3 --micro-batch 2", "micro_batch=2 does not divide the 3"),
    ],
)
def test_bad_options(script: Callable, capfd, name: str, options: str, says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        script(name)["arguments"](["--folder", "unused", *options.split()])
    assert ended.value.code == 2
    assert says in capfd.readouterr().err


def test_a_busy_port_stops_the_sbatch_file_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'localhost\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as old_agent:
        port = str(old_agent.getsockname()[1])
        slurm = {"SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "4711"}
        env = environment(tmp_path, MASTER_PORT=port, SLURM_SUBMIT_DIR=str(ROOT), **slurm)
        env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
        command = ["bash", str(SCRIPTS / "train_fsdp.sbatch"), "--folder", str(tmp_path / "run")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"something answers at localhost:{port} before this job has started" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_fresh_run_refuses_a_folder_with_checkpoints_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000004" / "training.json").write_text("{}")
    script = runpy.run_path(str(SCRIPTS / "train_fsdp.py"))
    args = script["arguments"](["--folder", str(tmp_path), *SMALL, "--save-every", "2", "--fresh"])
    with pytest.raises(ValueError, match="has checkpoints of an earlier run; give another folder"):
        script["train"](args)


def test_an_end_is_logged_after_the_last_save(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPTS / "train_fsdp.py"))
    args = script["arguments"](["--folder", str(tmp_path), *SMALL, "--save-every", "2"])
    names = [type(callback).__name__ for callback in script["callbacks"](args)]
    assert names.index("SaveEvery") < names.index("LogEvents")
