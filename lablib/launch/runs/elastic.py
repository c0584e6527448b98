"""Run a script under torchrun, and prove that a run that loses a rank to kill -9 learns the same as one that does not.

    job = torchrun("labs/scripts/train_resilient.py", folder, json.dumps(settings), ranks=2, max_restarts=1)
    job.returncode, job.restarts, job.log

    hit = kill_and_resume(folder, settings, save_every=4, kill=(1, 6))
    hit.losses == train_undisturbed(other_folder, settings)       # on the same number of ranks bit for bit

On Linux the ranks of a CPU job are forks of the agent, which has loaded PyTorch (`--run-path --start-method=fork`). By
default torchrun starts new interpreters, and each of them loads PyTorch again, after a restart too. Ranks on GPUs are
always new interpreters: the agent asks whether there is CUDA (`LaunchConfig`, since torch 2.9), and CUDA refuses to
start in a fork of a process that has asked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lablib.launch.ranks import check_device, environment, explain, hide_gpus, place, run_ranks
from lablib.launch.records import repository_root
from lablib.launch.training import TrainConfig, read_metrics

_POLL_S = 0.02
# macOS has libraries that a fork must not use.
_FORKED = ("--run-path", "--start-method=fork", str(Path(__file__).with_name("forked_rank.py")))
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # By default the ranks meet in the agent's own store, which outlives them. After a restart they find the
    # addresses of the ranks before, and may try to reach those: github.com/pytorch/pytorch/issues/135712.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
#: The trainer, with FSDP2 and checkpoints, and what the first optimizer of a process loads.
_PRELOAD = ("lablib.launch.training.callbacks", "torch._dynamo")


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    returncode: int  # torchrun's: 0 if every rank ended with 0, and 1 for everything else
    log: str  # what the agent and all ranks printed
    seconds: float  # from the start to the end

    @property
    def restarts(self) -> int:
        """How often the agent started the ranks again: once for each failure that it reports, but not the last."""
        return max(0, len(re.findall(r"failed \(exitcode: ", self.log)) - (self.returncode != 0))

    @property
    def meaning(self) -> str | None:
        """The cause in one sentence, where the log tells."""
        return None if self.returncode == 0 else explain(self.log)


def torchrun(
    script: str | Path,
    *args: str,
    ranks: int = 2,
    max_restarts: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 120,
    meanwhile: Callable[[subprocess.Popen[bytes]], bool] | None = None,
    preload: Sequence[str] = (),
    device: str = "cpu",
) -> Job:
    """Run a script on several ranks of this machine and return when it has ended; nothing is left behind.

    A job that fails is returned, too; one that has not ended in time raises a TimeoutError with its last lines.

    Args:
        meanwhile: Called again and again with the agent's process while it runs, until it returns True.
        preload: Modules that the agent imports, so that its forks have them already.
        device: "cpu": the ranks see no GPU. "cuda": each rank has a GPU of its own.
    """
    if not Path(script).is_file():
        raise ValueError(f"script={str(script)!r} is not a file")
    if ranks < 1 or max_restarts < 0 or timeout <= 0:
        raise ValueError(
            f"ranks={ranks} must be at least 1, max_restarts={max_restarts} not negative, timeout={timeout} positive"
        )
    check_device(device, ranks, env)
    fork = device == "cpu" and sys.platform == "linux"
    command = [*agent_command(preload if fork else ()), "--standalone", "--nproc-per-node", str(ranks)]
    # Left alone, the agent tells its ranks to meet at this machine's host name, and waits for one that resolves to
    # nothing until its timeout. All ranks are here.
    command += ["--local-addr", "127.0.0.1"]
    # The agent looks at its ranks every so many seconds; a short job would wait for that at its end.
    command += ["--monitor-interval", "0.1", "--max-restarts", str(max_restarts)]
    command += [*(_FORKED if fork else ()), str(script), *args]
    variables = {**_DEFAULTS, **environment(), **(env or {})}
    if device == "cpu":
        hide_gpus(variables)
    with place(), tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables
        )
        try:
            while agent.poll() is None and time.monotonic() - begun < timeout:
                if meanwhile is not None and meanwhile(agent):
                    meanwhile = None
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(_POLL_S)
            ended = agent.returncode is not None
        finally:
            if agent.poll() is None:
                _end(agent, descendants(agent.pid))
        output.seek(0)
        log = output.read().decode(errors="replace")
    if not ended:
        tail = "\n".join(log.splitlines()[-10:])
        raise TimeoutError(f"{script} on {ranks} ranks has not ended after {timeout:g} s. Last lines:\n{tail}")
    return Job(agent.returncode, log, time.monotonic() - begun)


def agent_command(preload: Sequence[str] = ()) -> list[str]:
    """Return the words that start torchrun's agent, without its options: it loads PyTorch faster than `torchrun` does."""
    modules = ", ".join(["torch.distributed.run", *preload])
    # Loading makes no garbage; to look for it is a sixth of the time.
    load = f"import gc; gc.disable(); import {modules}; gc.enable(); torch.distributed.run.main()"
    return [sys.executable, "-c", load]


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and theirs."""
    with suppress(psutil.NoSuchProcess):
        return {process.pid for process in psutil.Process(pid).children(recursive=True)}
    return set()


def _end(agent: subprocess.Popen[bytes], others: set[int]) -> None:
    for pid in [agent.pid, *others]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


@dataclass(frozen=True)
class ResumedRun:
    """A run that was killed and went on."""

    losses: list[float]  # of each step, as it counted in the end
    # (attempt, step) of every step that was taken, those that the kill made void included
    attempts: list[tuple[int, int]]
    job: Job  # torchrun's return code, log and time

    @property
    def repeated(self) -> list[int]:
        """Steps that were taken twice: those between the checkpoint and the kill."""
        taken = [step for _, step in self.attempts]
        return sorted({step for step in taken if taken.count(step) > 1})


def kill_and_resume(
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    ranks: int = 2,
    save_every: int = 4,
    kill: tuple[int, int] = (1, 6),
) -> ResumedRun:
    """Train under torchrun, kill one (rank, after a step) with SIGKILL once, and let torchrun start the job again."""
    config = TrainConfig(folder=folder, **settings)
    config.split_batch(ranks)
    if not (0 <= kill[0] < ranks and 0 < kill[1] < config.steps):
        raise ValueError(
            f"kill={kill} must name one of {ranks} ranks and a step before the last, which is {config.steps}"
        )
    script = repository_root() / "labs" / "scripts" / "train_resilient.py"
    options = ["--save-every", str(save_every), "--kill", f"{kill[0]}:{kill[1]}"]
    job = torchrun(
        script, str(folder), json.dumps(dict(settings)), *options, ranks=ranks, max_restarts=1, preload=_PRELOAD
    )
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}. {job.meaning or ''}\n{job.log[-4000:]}")
    lines = read_metrics(folder, every_attempt=True)
    return ResumedRun(
        losses=[step["loss"] for step in read_metrics(folder)],
        attempts=[(line["attempt"], line["step"]) for line in lines],
        job=job,
    )


def train_undisturbed(folder: str | Path, settings: Mapping[str, Any], *, ranks: int = 2) -> list[float]:
    """Return the losses of the same run without checkpoints and without a kill."""
    run_ranks(_train, ranks, TrainConfig(folder=folder, **settings))
    return [step["loss"] for step in read_metrics(folder)]


def _train(config: TrainConfig) -> None:
    from lablib.launch.training import Trainer

    Trainer(config).run()
