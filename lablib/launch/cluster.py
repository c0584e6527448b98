"""A cluster on one machine: hosts with a network of a chosen bandwidth between them, and torchrun on each.

    with Cluster(hosts=2, rate="500 Mb/s") as cluster:
        cluster.run_ranks(work, ranks_per_host=2)      # 4 ranks; rank 0 and 1 on host 0
        cluster.throttle("100 Mb/s")
        cluster.torchrun("train.py", "--steps", "10")  # a script, as on real machines

Each host is a Linux network namespace with one card, eth0, and a cable to one switch. The cable has the bandwidth in
each direction (tc tbf: a bucket of tokens, which lets a short burst through after a pause); packets are delayed
where the kernel has netem. Processors and memory are those of the one machine, shared by all hosts.

Needs Linux, and root or unprivileged user namespaces. `why_not()` says in one sentence what is missing.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lablib.calc.units import parse_bandwidth
from lablib.launch._cluster_jobs import ClusterError, first_failure, run_jobs
from lablib.launch._cluster_network import (
    CARD,
    MAX_HOSTS,
    Network,
    Refused,
    address,
    burst,
    shape_script,
    shell_from_inside,
)

__all__ = ["Cluster", "ClusterError", "Refused", "burst", "throttle", "why_not"]

_PORT = 29400  # free on every host: nobody else is there


class Cluster:
    """Hosts on one machine, joined by links of a chosen bandwidth. Use it in a `with` statement.

    Args:
        hosts: How many, 2 to 64.
        rate: Bandwidth of each host's link per direction, as "500 Mb/s" or in bytes per second; None is whatever
            the machine can do. Headers count too: of each 1,514 bytes TCP has 1,448 for data.
        delay: Seconds that every packet takes longer; needs netem in the kernel.
        user: True makes the hosts without root's rights, False with them; None tries what is there.

    Raises:
        ValueError: If a number makes no sense.
        Refused: If the system does not allow it; one sentence says why.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        rate: str | float | None = None,
        delay: float | None = None,
        user: bool | None = None,
    ) -> None:
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts={hosts} must be from 2 to {MAX_HOSTS}")
        self.hosts, self.rate, self.delay = hosts, _bytes_per_second(rate), _seconds(delay)
        self.network = _network(hosts, user)
        # Also without `with`, and when the interpreter ends.
        self._closing = weakref.finalize(self, self.network.close)
        try:
            self.throttle(rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the cluster down: every process on it ends, and no namespace and no cable is left."""
        self._closing()

    def throttle(self, rate: str | float | None) -> None:
        """Give all links another bandwidth, now.

        Args:
            rate: As for `Cluster`.

        Raises:
            ValueError: If the rate makes no sense.
            Refused: If the kernel has no queue of the kind that is needed.
        """
        self.rate = _bytes_per_second(rate)
        if script := shape_script(self.hosts, self.rate, self.delay):
            try:
                self.network.shell(script)
            except Refused as refused:
                if self.delay and "qdisc kind is unknown" in str(refused):
                    raise Refused("this kernel has no netem, which delays packets; leave delay out") from None
                raise

    def run(self, host: int, *command: str, timeout: float = 60) -> str:
        """Run a command on a host and return what it printed.

        Args:
            host: Its number, from 0.
            *command: The words of the command.
            timeout: Seconds until it is killed.

        Raises:
            ClusterError: If it fails or takes too long.
        """
        return self.run_all([(host, command)], timeout=timeout)[0]

    def torchrun(
        self,
        *script: str,
        ranks_per_host: int = 1,
        timeout: float = 120,
        threads: int = 1,
        env: dict[str, str] | None = None,
    ) -> list[str]:
        """Run a script on all hosts, as on real machines: one torchrun a host, which meet by c10d rendezvous.

        Host k has the ranks k·g to (k+1)·g - 1 for g ranks a host.

        Args:
            *script: The script and its arguments, or "--module", a module and its arguments.
            ranks_per_host: g.
            timeout: Seconds until all is killed.
            threads: CPU threads of each rank.
            env: Environment variables for the ranks.

        Returns:
            What each host printed.

        Raises:
            ValueError: If a number makes no sense.
            ClusterError: If a host fails; it shows the end of what that host printed. All others are ended.
        """
        from lablib.launch.elastic import agent_command  # here: hosts alone need the standard library

        if ranks_per_host < 1 or threads < 1:
            raise ValueError(f"ranks_per_host={ranks_per_host} and threads={threads} must be at least 1")
        cards = {f"{library}_SOCKET_IFNAME": CARD for library in ("GLOO", "NCCL", "TP")}
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **cards,
            "LABLIB_HOSTS": str(self.hosts),
            "CUDA_VISIBLE_DEVICES": "",  # the hosts share this machine's cores and have no GPU
            **(env or {}),
        }
        jobs = []
        for host in range(self.hosts):
            words = [*agent_command(), f"--nnodes={self.hosts}", f"--nproc-per-node={ranks_per_host}"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{_PORT}", "--rdzv-id=cluster"]
            # Host 0 keeps the store. Left to itself, torchrun looks its own name up, which no host here has.
            words += [f"--rdzv-conf=is_host={int(host == 0)}", f"--local-addr={address(host)}"]
            jobs.append((host, [*words, *script]))
        return self.run_all(jobs, env=environment, timeout=timeout)

    def run_ranks(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 1,
        timeout: float = 120,
        threads: int = 1,
    ) -> list[Any]:
        """Call `fn(*args)` on every rank of a process group over all hosts; return the results in rank order.

        Args:
            fn: Any function, also one of a notebook cell.
            *args: Arguments, copied to every rank.
            ranks_per_host: Ranks on each host.
            timeout: Seconds until all is killed.
            threads: CPU threads of each rank.

        Raises:
            ValueError: If a number makes no sense, or an argument cannot be copied.
            ClusterError: If a rank fails; it shows the traceback of the first one. All others are ended.
        """
        import cloudpickle  # here: hosts alone need no torch, and start in a moment

        from lablib.launch._rank_pickle import pickle_call

        with tempfile.TemporaryDirectory(prefix="cluster-") as name:
            folder = Path(name)
            (folder / "call").write_bytes(pickle_call(fn, args))
            # torchrun has loaded torch already: ranks that it forks off itself start seconds earlier than new ones.
            job = (
                "--run-path",
                "--start-method=fork",
                str(Path(__file__).with_name("_cluster_rank.py")),
                name,
            )
            try:
                self.torchrun(*job, ranks_per_host=ranks_per_host, timeout=timeout, threads=threads)
            except ClusterError as error:
                rank, why = first_failure(folder, error.output, ranks_per_host)
                if rank is None:
                    raise
                host = rank // ranks_per_host
                raise ClusterError(f"rank {rank} failed first\n\n{why}", host, error.output) from None
            ranks = range(self.hosts * ranks_per_host)
            return [cloudpickle.loads((folder / f"{rank}.result").read_bytes()) for rank in ranks]

    def run_all(
        self,
        jobs: Sequence[tuple[int, Sequence[str]]],
        *,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> list[str]:
        """Run commands on hosts at the same time and return what each printed.

        Args:
            jobs: A host and the words of its command, for each.
            env: Environment variables for all of them.
            timeout: Seconds until all are killed.

        Raises:
            ClusterError: If one fails or takes too long; all others are ended.
        """
        if not self._closing.alive:
            raise ValueError("this cluster is closed; make a new one")
        return run_jobs(self.network, jobs, env or {}, timeout)


def throttle(rate: str | float | None) -> None:
    """Give all links another bandwidth, from inside a function that runs on the cluster. Call it on one rank.

    Put a barrier before and after it, so that no message is on its way meanwhile.

    Args:
        rate: As for `Cluster`.

    Raises:
        RuntimeError: If this process does not run on a cluster.
        Refused: If the system does not allow it.
    """
    if "LABLIB_HOSTS" not in os.environ:
        raise RuntimeError("throttle works on a host of a Cluster; from outside call cluster.throttle")
    shell_from_inside(shape_script(int(os.environ["LABLIB_HOSTS"]), _bytes_per_second(rate), None))


@functools.cache
def why_not() -> str | None:
    """Return why there can be no cluster on this machine, in one sentence; None if there can."""
    try:
        Cluster(hosts=2, rate=1e8).close()
    except Refused as refused:
        return str(refused)
    return None


def _network(hosts: int, user: bool | None) -> Network:
    root = os.geteuid() == 0
    try:
        return Network(hosts, user=not root if user is None else user)
    except Refused:
        if user is None and root:  # root of a container may lack the right, and still make a user namespace
            return Network(hosts, user=True)
        raise


def _bytes_per_second(rate: str | float | None) -> float | None:
    if rate is None:
        return None
    value = parse_bandwidth(rate)
    if not 1e4 <= value <= 1e12:
        raise ValueError(f"rate={rate!r} is {value:g} bytes per second; use 10 kB/s to 1 TB/s")
    return value


def _seconds(delay: float | None) -> float | None:
    if delay is not None and not 0 < delay <= 10:
        raise ValueError(f"delay={delay} must be above 0 and at most 10 seconds")
    return delay
