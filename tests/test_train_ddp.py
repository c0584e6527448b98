"""The program that torchrun starts: same curve on any number of ranks, and through every kind of end.

The curves are compared in float64, where rounding is 1e-16. Adam's step may amplify a difference by up to
lr/eps = 1e5 in a step, but only in a weight whose gradient is near zero; on the loss, a mean over 128 tokens,
that leaves less than 1e-9. One sample more or less moves the loss by more than 1e-3.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lablib.launch.rank_server import ensure_server, no_main_module
from lablib.launch.runs import elastic
from tests.processes import ended, free_port
from tests.scripts import load, run_forked

SCRIPT = Path(__file__).parents[1] / "labs" / "scripts" / "train_ddp.py"
TOLERANCE = 1e-9
#: 8 samples a step, 5 steps an epoch.
SMALL = {
    "--global-batch": 8,
    "--seq": 16,
    "--layers": 1,
    "--hidden": 16,
    "--max-tokens": 700,
    "--dtype": "float64",
    "--checkpoint-every": 3,
}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
PATIENCE = 90  # seconds for a run of two
PAUSE = threading.Event()  # nobody sets it


def arguments(options: Sequence[object]) -> list[str]:
    return [str(word) for word in (SCRIPT, *itertools.chain(*SMALL.items()), *options)]


_started: list[BaseProcess] = []


@pytest.fixture(autouse=True)
def _what_a_test_starts_ends_with_it() -> Iterator[None]:
    yield
    while _started:
        _started[-1].kill()
        _started.pop().join()


def workers(folder: Path, ranks: int, *options: object) -> list[BaseProcess]:
    """Start the ranks that torchrun would start, with a handle on each; what rank r prints is in the file `said-r`."""
    context = multiprocessing.get_context("forkserver")
    ensure_server(context)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **ON_CPU,
    }
    jobs = []
    for rank in range(ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
        words = (arguments(options), variables, folder / f"said-{rank}")
        jobs.append(context.Process(target=run_forked, args=words))
        with no_main_module():
            jobs[-1].start()
        _started.append(jobs[-1])
    return jobs


def finish(*jobs: BaseProcess) -> list[int]:
    for job in jobs:
        job.join(PATIENCE)
    return [job.exitcode for job in jobs]


def steps_logged(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[float]:
    lines = steps_logged(path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def has_logged(path: Path, count: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= count


def wait_for_steps(job: BaseProcess, path: Path, count: int) -> None:
    """Return when the job has logged `count` steps; fail if it ends or takes for ever."""
    for _ in range(50 * PATIENCE):
        if has_logged(path, count):
            return
        job.join(0.02)
        if job.exitcode is not None:
            break
    pytest.fail(f"no {count} steps in {path}:\n{path.with_name('said-0').read_text()}")


def alone(folder: Path, steps: int) -> list[float]:
    """Return the curve of one process."""
    log = folder / "log"
    (job,) = workers(folder, 1, "--steps", steps, "--losses", log)
    assert finish(job) == [0], (folder / "said-0").read_text()
    return losses(log)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of one process, long enough to outlast most runs that are stopped."""
    folder = tmp_path_factory.mktemp("train")
    curve = alone(folder, 400)
    assert {line["epoch"] for line in steps_logged(folder / "log")} == set(range(80))
    assert len(curve) == 400
    assert curve[-1] < curve[0] - 0.1
    return curve


def test_the_toy_walks_the_curve_of_one_until_sigterm_to_one_rank(tmp_path: Path, undisturbed) -> None:
    """All ranks stop after the same step, checkpoint and exit 0."""
    log, checkpoint = tmp_path / "log", tmp_path / "run.pt"
    jobs = workers(tmp_path, 2, "--toy", "--steps", 10**6, "--losses", log, "--checkpoint", checkpoint)
    wait_for_steps(jobs[0], log, 20)
    jobs[1].terminate()
    assert finish(*jobs) == [0, 0]
    walks_the_curve(losses(log), undisturbed)
    assert torch.load(checkpoint, weights_only=True)["step"] == len(losses(log))


def test_ddp_walks_the_curve_of_one_until_sigterm_to_torchrun(tmp_path: Path, undisturbed) -> None:
    """torchrun passes the signal on, waits for the ranks, and reports the signal as its own end.

    PyTorch's DDP with accumulation: two ranks with two micro-batches each take the steps of one.
    """
    log, checkpoint = tmp_path / "log", tmp_path / "run.pt"
    options = ("--accumulate", 2, "--steps", 10**6, "--losses", log, "--checkpoint", checkpoint)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **ON_CPU}
    with (tmp_path / "said-0").open("wb") as said:
        command = [sys.executable, *launcher, *arguments(options)]
        process = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
    with ended(process) as job:
        for _ in range(50 * PATIENCE):
            if has_logged(log, 20) or job.poll() is not None:
                break
            PAUSE.wait(0.02)
        job.send_signal(signal.SIGTERM)
        job.wait(PATIENCE)
    walks_the_curve(losses(log), undisturbed)
    assert torch.load(checkpoint, weights_only=True)["step"] == len(losses(log))


def walks_the_curve(curve: list[float], undisturbed: list[float]) -> None:
    steps = min(len(curve), len(undisturbed))
    assert steps >= 20
    assert curve[:steps] == pytest.approx(undisturbed[:steps], abs=TOLERANCE)


def test_killed_and_resumed_on_other_ranks(tmp_path: Path, tmp_path_factory, undisturbed: list[float]) -> None:
    """Rank 0 is killed, somewhere between two checkpoints. The run goes on with one rank, in mid-epoch."""
    log, checkpoint = tmp_path / "log", tmp_path / "run.pt"
    options = ["--losses", log, "--checkpoint", checkpoint]
    jobs = workers(tmp_path, 2, "--steps", 10**6, *options)
    wait_for_steps(jobs[0], log, 4)
    jobs[0].kill()
    jobs[0].join()
    assert jobs[0].exitcode == -signal.SIGKILL
    # The other rank notices. Now and then it waits in the exit of its process then, where torchrun would end it.
    jobs[1].join(PATIENCE / 3)
    assert jobs[1].exitcode not in (0, -signal.SIGKILL)
    assert "Error" in (tmp_path / "said-1").read_text()
    saved = torch.load(checkpoint, weights_only=True)["step"]
    assert saved % 3 == 0
    assert 3 <= saved <= len(losses(log))
    log.write_text(log.read_text() + '{"step": 99, "lo')  # killed while it wrote a line
    steps = saved + 7
    assert finish(*workers(tmp_path, 1, "--steps", steps, *options, "--resume")) == [0]
    # On a busy machine the ranks may go on far beyond the curve before they are killed.
    curve = undisturbed if steps <= len(undisturbed) else alone(tmp_path_factory.mktemp("longer"), steps)
    assert losses(log) == pytest.approx(curve[:steps], abs=TOLERANCE)


def test_errors_are_told_and_destroy_the_process_group(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.pt"
    torch.save({"settings": dict.fromkeys(load(SCRIPT).SAME_RUN, "another")}, checkpoint)
    for number, (options, says) in enumerate(
        (
            (("--text", tmp_path / "nowhere.txt"), "nowhere.txt"),
            (("--checkpoint", checkpoint, "--resume"), "the checkpoint is of another run: global_batch, seq"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert finish(*workers(folder, 1, "--steps", 1, *options)) == [1]
        output = (folder / "said-0").read_text()
        assert says in output
        assert "the process group was not destroyed" not in output


# In this process


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(SCRIPT)


def samples_by_step(script, ranks: int, accumulate: int, first: int, steps: int) -> list[set[int]]:
    """The union over ranks of what each step reads, from 43 samples and a global batch of 8."""
    union: list[set[int]] = [set() for _ in range(steps)]
    for rank in range(ranks):
        sampler = DistributedSampler(range(43), num_replicas=ranks, rank=rank, seed=3, drop_last=True)
        loader = DataLoader(range(43), 8 // (ranks * accumulate), sampler=sampler, drop_last=True)
        schedule = script.schedule(loader, sampler, first, 43 // 8, accumulate)
        for seen, (_, micro_batches) in zip(union, schedule, strict=False):
            assert len(micro_batches) == accumulate
            seen |= {int(index) for batch in micro_batches for index in batch}
    return union


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 1), (8, 1), (1, 4), (2, 2)])
def test_the_ranks_together_read_the_same_samples(script, ranks: int, accumulate: int) -> None:
    alone = samples_by_step(script, 1, 1, 0, 12)
    assert all(len(step) == 8 for step in alone)
    assert len(set.union(*alone[:5])) == 40  # an epoch has 5 steps and repeats nothing
    assert alone[0] != alone[5]  # and the next one has another order
    assert samples_by_step(script, ranks, accumulate, 0, 12) == alone
    assert samples_by_step(script, ranks, accumulate, 7, 5) == alone[7:]  # resumed in the middle of an epoch


def test_a_failed_save_leaves_the_old_checkpoint(script, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.pt"
    script.save_atomically(path, partial(torch.save, {"step": 1}))

    def disk_full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(script.os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        script.save_atomically(path, partial(torch.save, {"step": 2}))
    assert torch.load(path, weights_only=True) == {"step": 1}


@pytest.mark.parametrize(
    ("options", "ranks", "says"),
    [
        ("", None, "start it with torchrun"),
        ("--global-batch 8", 3, "ranks=3 x accumulate=1 does not divide --global-batch 8"),
        ("--global-batch 8 --accumulate 3", 2, "ranks=2 x accumulate=3 does not divide"),
        ("--steps 0", 1, "--steps 0 must be at least 1"),
        ("--resume", 1, "--resume needs --checkpoint"),
    ],
)
def test_bad_options(script, monkeypatch, capsys, options: str, ranks: int | None, says: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", *options.split()])
    monkeypatch.delenv("RANK", raising=False)
    if ranks:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as ended:
        script.arguments()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_the_first_program_sums_by_hand_and_means_by_ddp():
    """Rank r has the example r + 1, and the gradient of a rank is its example."""
    job = elastic.torchrun(SCRIPT.with_name("first_ddp.py"), ranks=3)
    assert job.returncode == 0, job.log
    # Torch may have something to say of a machine, such as that triton is missing.
    # Two ranks may share a line: without a buffer a line and its end are two writes.
    said = re.findall(r"rank \d of 3: sum \d+, mean \d+", job.log)
    assert sorted(said) == [f"rank {rank} of 3: sum 6, mean 2" for rank in range(3)]
