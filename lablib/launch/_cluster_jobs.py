"""Commands on several hosts at once: what one of them prints when it fails, and the end of all others."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lablib.launch._cluster_network import Network, environment

_GRACE_S = 1.0  # after the first failure: time for the other hosts to say what they saw
_TAIL = 15  # lines of output shown with a failure
_DIED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")  # what torchrun logs


class ClusterError(RuntimeError):
    """A job on the cluster failed or took too long.

    Attributes:
        host: The host that failed first, or None if time ran out.
        output: What each host printed.
    """

    def __init__(self, message: str, host: int | None, output: list[str]) -> None:
        super().__init__(message)
        self.host, self.output = host, output


def run_jobs(
    network: Network, jobs: Sequence[tuple[int, Sequence[str]]], env: dict[str, str], timeout: float
) -> list[str]:
    """Run commands on hosts at the same time and return what each printed.

    Args:
        network: The hosts.
        jobs: A host and the words of its command, for each.
        env: Environment variables for all of them, on top of this process's own.
        timeout: Seconds until all are killed.

    Raises:
        ClusterError: If one fails or takes too long; all others are ended.
    """
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in jobs
        ]
        running: list[subprocess.Popen] = []
        try:
            for (host, words), file in zip(jobs, files, strict=True):
                running.append(
                    subprocess.Popen(
                        network.command(*words, host=host),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**environment(), **env},
                        start_new_session=True,
                    )
                )
            failed = _wait(running, time.monotonic() + timeout)
        finally:
            if any(process.poll() is None for process in running):
                network.end_processes()
            for process in running:
                process.wait()
        output = [_text(file) for file in files]
    if failed is None:
        return output
    if failed < 0:
        raise ClusterError(f"no end after {timeout:g} s; all processes were killed", None, output)
    host = jobs[failed][0]
    tail = "\n".join(output[failed].splitlines()[-_TAIL:])
    message = f"host {host} failed with status {running[failed].returncode}; it said last:\n{tail}"
    raise ClusterError(message, host, output)


def first_failure(folder: Path, output: Sequence[str], ranks_per_host: int) -> tuple[int | None, str]:
    """Return which rank failed first, and why; (None, "") where nothing tells.

    A rank that raised has written down why. One that died has not; its torchrun says how it ended, and nothing else
    kills a rank before the first failure, so it comes before what its peers say about lost connections. An abort can
    be the answer of a library to a lost peer.

    Args:
        folder: Of the files `RANK.error`.
        output: What each host printed.
        ranks_per_host: Ranks on each host.
    """
    from lablib.launch._rank_handle import ending  # here: hosts alone need no torch

    raised = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    died = [
        (int(code), host * ranks_per_host + int(local))
        for host, text in enumerate(output)
        for code, local in _DIED.findall(text)
        if int(code) != 1  # raised
    ]
    for code, rank in died:
        if code != -signal.SIGABRT or not raised:
            return rank, f"its process {ending(code)}"
    if raised:
        return int(raised[0].stem), raised[0].read_text()
    return None, ""


def _wait(running: list[subprocess.Popen], deadline: float) -> int | None:
    """Return the first job that failed, -1 if time ran out, None if all are well.

    After the first failure the others have a moment: the host whose rank died may be the second to notice.
    """
    left, failed = dict(enumerate(running)), None
    while left:
        for number, process in list(left.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                del left[number]
                if process.returncode and failed is None:
                    failed, deadline = number, min(deadline, time.monotonic() + _GRACE_S)
        if left and time.monotonic() > deadline:
            return -1 if failed is None else failed
    return failed


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()
