"""A cluster on one machine: hosts with a network of a chosen bandwidth between them, and torchrun on each.

    with Cluster(rate="500 Mb/s") as cluster:
        cluster.run_ranks(work, ranks_per_host=2)      # 4 ranks; rank 0 and 1 on host 0
        cluster.throttle("100 Mb/s")
        cluster.part(1)                                # and later cluster.mend(1)

Each host is a Linux network namespace with a network interface, eth0, and a cable to one switch. The cable has the
bandwidth in each direction (tc tbf: a bucket of tokens, which lets a short burst through after a pause). Processors and
memory are those of the one machine, shared by all hosts. Needs Linux, and root or unprivileged user namespaces;
`why_not()` says in one sentence what is missing.

Inside: `unshare` starts a holder process in namespaces of its own for networks, mounts and processes, and for an
ordinary user in a user namespace too, where it is root. The holder makes a bridge, the switch, and a network namespace
with a cable for each host; then it waits until its standard input closes. Whatever ends it ends process number 1 of its
namespace; the kernel then kills every process in there and takes the cables down.

torchrun starts this file itself on every rank; see `main`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lablib.calc.units import parse_bandwidth
from lablib.launch.runs import agent_command, reset_process

_GRACE_S = 1.0  # after the first failure: time for the other hosts to say what they saw
_TAIL = 15  # lines of output shown with a failure
TOOLS = ("unshare", "nsenter", "ip", "tc")
CARD = "eth0"  # the network interface of every host
#: After a pause a link lets so many seconds' worth of bytes through at once, and at least so many bytes. With less
#: it may not reach its bandwidth on a busy machine; with more, larger messages pass too fast.
BURST_S, BURST_BYTES = 1e-3, 128 * 1024
_PIECE_S, _PIECE_LEAST, _PIECE_MOST = (
    0.5e-3,
    4096,
    65536,
)  # what a link sends at a time, in seconds and bytes
_QUEUE = "200ms"  # what a link keeps waiting before it drops packets
_CUT_S = 0.3  # of a cable that is mended in time; nothing depends on it
_PORT = 29400  # free on every host: nobody else is there


class ClusterError(RuntimeError):
    """A job on the cluster failed or took too long.

    Attributes:
        host: The host that failed first, or None if time ran out.
        output: What each command printed.
    """

    def __init__(
        self, message: str, host: int | None, output: list[str]
    ) -> None:
        super().__init__(message)
        self.host, self.output = host, output


class Refused(OSError):
    """The system does not allow what was asked for; the message is one sentence."""


class Cluster:
    """Hosts on one machine, joined by links of a chosen bandwidth. Use it in a `with` statement.

    Args:
        rate: Bandwidth of each host's link per direction, as "500 Mb/s" or in bytes per second; None is whatever
            the machine can do. Headers count too: of each 1,514 bytes TCP has 1,448 for data.
    """

    def __init__(
        self, hosts: int = 2, *, rate: str | float | None = None
    ) -> None:
        self.hosts, self.rate = hosts, _bytes_per_second(rate)
        self.network = _network(hosts)
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
        """Give all links another bandwidth, now."""
        self.rate = _bytes_per_second(rate)
        self.network.shell(shape_script(self.hosts, self.rate))

    def part(self, host: int) -> None:
        """Cut a host's cable, now. TCP sends what is on its way again for a while, so a cable may be mended."""
        self.network.shell(cable_script(self.hosts, host, "down"))

    def mend(self, host: int) -> None:
        """Mend a host's cable, now."""
        self.network.shell(cable_script(self.hosts, host, "up"))

    def run(self, host: int, *command: str, timeout: float = 60) -> str:
        """Run a command on a host and return what it printed."""
        return self.run_all([(host, command)], timeout=timeout)[0]

    def _torchrun(
        self, *script: str, ranks_per_host: int, timeout: float
    ) -> None:
        """Run a script on all hosts, as on real machines: one torchrun a host, which meet by c10d rendezvous."""
        env = {
            "OMP_NUM_THREADS": "1",
            "LABLIB_HOSTS": str(self.hosts),
            "CUDA_VISIBLE_DEVICES": "",  # the hosts share this machine's cores and have no GPU
            # For what the function imports from beside this file.
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **{
                f"{library}_SOCKET_IFNAME": CARD
                for library in ("GLOO", "NCCL", "TP")
            },
        }
        jobs = []
        for host in range(self.hosts):
            words = [
                *agent_command(),
                f"--nnodes={self.hosts}",
                f"--nproc-per-node={ranks_per_host}",
            ]
            words += [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={address(0)}:{_PORT}",
                "--rdzv-id=cluster",
            ]
            # Host 0 keeps the store. Left to itself, torchrun goes by the machine's name, which all hosts here share.
            words += [
                f"--rdzv-conf=is_host={int(host == 0)}",
                f"--local-addr={address(host)}",
            ]
            jobs.append((host, [*words, *script]))
        self.run_all(jobs, env=env, timeout=timeout)

    def run_ranks(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 1,
        timeout: float = 120,
    ) -> list[Any]:
        """Call `fn(*args)` on every rank of a process group over all hosts; return the results in rank order.

        Host k has the ranks k·g to (k+1)·g - 1 for g ranks a host.

        Raises:
            ClusterError: If a rank fails, with the traceback of the first one that raised, if one did, or if time runs
                out. All others are ended.
        """
        import cloudpickle
        from lablib.launch.ranks import pickle_call

        with tempfile.TemporaryDirectory(prefix="cluster-") as name:
            folder = Path(name)
            (folder / "call").write_bytes(pickle_call(fn, args))
            # torchrun has loaded torch already: ranks that it forks off itself start sooner than new ones.
            job = ("--run-path", "--start-method=fork", __file__, name)
            try:
                self._torchrun(
                    *job, ranks_per_host=ranks_per_host, timeout=timeout
                )
            except ClusterError as error:
                raised = sorted(
                    folder.glob("*.error"),
                    key=lambda path: path.stat().st_mtime_ns,
                )
                if not raised:
                    raise
                rank = int(raised[0].stem)
                message = (
                    f"rank {rank} failed first\n\n{raised[0].read_text()}"
                )
                raise ClusterError(
                    message, rank // ranks_per_host, error.output
                ) from None
            ranks = range(self.hosts * ranks_per_host)
            return [
                cloudpickle.loads((folder / f"{rank}.result").read_bytes())
                for rank in ranks
            ]

    def run_all(
        self,
        jobs: Sequence[tuple[int, Sequence[str]]],
        *,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> list[str]:
        """Run commands on hosts at the same time and return what each printed."""
        if not self._closing.alive:
            raise ValueError("this cluster is closed; make a new one")
        with contextlib.ExitStack() as stack:
            text = {"encoding": "utf-8", "errors": "replace"}
            files = [
                stack.enter_context(tempfile.TemporaryFile("w+", **text))
                for _ in jobs
            ]
            running: list[subprocess.Popen] = []
            try:
                for (host, words), file in zip(jobs, files, strict=True):
                    command = self.network.command(*words, host=host)
                    pipes = {
                        "stdin": subprocess.DEVNULL,
                        "stdout": file,
                        "stderr": subprocess.STDOUT,
                    }
                    variables = {**environment(), **(env or {})}
                    running.append(
                        subprocess.Popen(
                            command,
                            **pipes,
                            env=variables,
                            start_new_session=True,
                        )
                    )
                failed = _wait(running, time.monotonic() + timeout)
            finally:
                if any(process.poll() is None for process in running):
                    self.network.end_processes()
                for process in running:
                    process.wait()
            output = [_text(file) for file in files]
        if failed is None:
            return output
        if failed < 0:
            raise ClusterError(
                f"no end after {timeout:g} s; all processes were killed",
                None,
                output,
            )
        host, tail = (
            jobs[failed][0],
            "\n".join(output[failed].splitlines()[-_TAIL:]),
        )
        message = f"host {host} failed with status {running[failed].returncode}; it said last:\n{tail}"
        raise ClusterError(message, host, output)


def throttle(rate: str | float | None) -> None:
    """Give all links another bandwidth, from inside a function that runs on the cluster. Call it on one rank.

    Put a barrier before and after it, so that no message is on its way meanwhile.
    """
    rate = _bytes_per_second(rate)
    _from_inside("throttle", lambda hosts: shape_script(hosts, rate))


def part(host: int) -> None:
    """Cut a host's cable, from inside a function that runs on the cluster. Call it on one rank of any host."""
    _from_inside("part", lambda hosts: cable_script(hosts, host, "down"))


def mend(host: int) -> None:
    """Mend a host's cable, from inside as `part`."""
    _from_inside("mend", lambda hosts: cable_script(hosts, host, "up"))


def _from_inside(name: str, script: Callable[[int], str]) -> None:
    if "LABLIB_HOSTS" not in os.environ:
        raise RuntimeError(
            f"{name} works on a host of a Cluster; from outside call cluster.{name}"
        )
    lines = script(int(os.environ["LABLIB_HOSTS"]))
    _shell("nsenter", "--target=1", "--net", "sh", "-ec", lines)


def watch_parting(
    cluster: Cluster,
    host: int = 1,
    *,
    ranks_per_host: int = 1,
    timeout: float = 3.0,
) -> list[dict[str, float | str]]:
    """Cut a host's cable in mid-run three times; return by rank what each all-reduce of ones came to.

    "mended in time": the cable is back before gloo gives up. "mended late": after that. "the same group": its next
    all-reduce, over the mended cable. "a new group": one made now. "not mended": the last cut. A number is the sum,
    a text the error. In the end all ranks fail, as those of a job do whose network is gone, and none is left.

    Args:
        timeout: Seconds after which gloo gives up, but in "mended in time".
    """
    with tempfile.TemporaryDirectory(prefix="parting-") as folder:
        try:
            cluster.run_ranks(
                _be_parted,
                folder,
                host,
                timeout,
                ranks_per_host=ranks_per_host,
            )
        except ClusterError:
            files = sorted(Path(folder).glob("*.json"))
            if len(files) < cluster.hosts * ranks_per_host:
                raise
            return [json.loads(file.read_text()) for file in files]
        finally:
            cluster.mend(host)
    raise AssertionError("ranks came through although the cable was cut")


def _be_parted(folder: str, host: int, timeout: float) -> None:
    """What each rank does for `watch_parting`; rank 0 cuts and mends."""
    import torch
    import torch.distributed as dist

    rank, seen = dist.get_rank(), {}

    def total(group: Any) -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        return ones.item()

    def joined(seconds: float) -> Any:
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        total(group)  # connects the ranks
        return group

    def meet(name: str) -> None:
        # By files, which no cut stops. Whoever still waits when the cable is mended could yet get its sum, and
        # torchrun ends all ranks of a host as soon as one has failed.
        Path(folder, f"{name} {rank}").touch()
        while (
            len(list(Path(folder).glob(f"{name} *"))) < dist.get_world_size()
        ):
            time.sleep(0.02)

    def say(name: str, work: Callable[[], float]) -> None:
        try:
            seen[name] = work()
        except RuntimeError as error:
            seen[name] = str(error)

    def cut(group: Any, back: bool = False) -> float:
        total(group)
        if rank == 0:
            part(host)
            if back:
                threading.Timer(_CUT_S, mend, (host,)).start()
        # Twice: for the first sum, what the others had sent before the cut may do.
        total(group)
        return total(group)

    long, first, last = joined(600), joined(timeout), joined(timeout)
    say("mended in time", lambda: cut(long, back=True))
    say("mended late", lambda: cut(first))
    meet("gave up")
    if rank == 0:
        mend(host)
    say("the same group", lambda: total(first))
    seen["a new group"] = total(joined(600))
    say("not mended", lambda: cut(last))
    Path(folder, f"{rank:03}.json").write_text(json.dumps(seen))
    meet("wrote")
    raise ConnectionError(seen["not mended"])


@functools.cache
def why_not() -> str | None:
    """Return why there can be no cluster on this machine, in one sentence; None if there can."""
    try:
        Cluster(hosts=2, rate=1e8).close()
    except Refused as refused:
        return str(refused)
    return None


def _wait(running: list[subprocess.Popen], deadline: float) -> int | None:
    """Return the first job that failed, -1 if time ran out, None if all are well.

    After the first failure the others have a second: the host whose rank died may be the second to notice.
    """
    left, failed = dict(enumerate(running)), None
    while left:
        for number, process in list(left.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                del left[number]
                if process.returncode and failed is None:
                    failed, deadline = (
                        number,
                        min(deadline, time.monotonic() + _GRACE_S),
                    )
        if left and time.monotonic() > deadline:
            return -1 if failed is None else failed
    return failed


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()


def address(host: int) -> str:
    """Return a host's address. The text sorts as the numbers do: torchrun numbers the hosts in that order."""
    return f"10.88.0.{100 + host}"


def burst(rate: float) -> int:
    """Return the bytes that a link lets through at once after a pause."""
    return round(max(BURST_BYTES, rate * BURST_S))


def build_script(hosts: int) -> str:
    """Return the commands that make the switch, the hosts and their cables."""
    # `ip netns` keeps names in /run/netns; on a file system of their own they are gone with the holder.
    lines = [
        "mount -t tmpfs tmpfs /run",
        "ip link set lo up",
        "ip link add switch type bridge",
        "ip link set switch up",
    ]
    for host in range(hosts):
        name = f"h{host}"
        lines += [
            f"ip netns add {name}",
            f"ip link add port{host} type veth peer name {CARD} netns {name}",
            f"ip link set port{host} master switch",
            f"ip link set port{host} up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {address(host)}/24 dev {CARD}",
            f"ip -n {name} link set {CARD} up",
        ]
    return "\n".join(lines)


def cable_script(hosts: int, host: int, state: str) -> str:
    """Return the command that brings a host's cable "down" or "up" again, at the switch."""
    if host not in range(hosts):
        raise ValueError(f"host={host}: this cluster has 0 to {hosts - 1}")
    return f"ip link set port{host} {state}"


def shape_script(hosts: int, rate: float | None) -> str:
    """Return the commands that give every cable a bandwidth, in bytes per second both ways."""
    # Linux hands an interface pieces of up to 64 KiB. On a slow link one takes milliseconds, and whatever waits
    # behind it is late; a real one sends single packets.
    piece = (
        _PIECE_MOST
        if rate is None
        else min(_PIECE_MOST, max(_PIECE_LEAST, round(rate * _PIECE_S)))
    )
    lines = []
    for host in range(hosts):
        for where, device in ((f"-n h{host}", CARD), ("", f"port{host}")):
            lines.append(
                f"tc {where} qdisc del dev {device} root 2>/dev/null || true"
            )
            lines.append(
                f"ip {where} link set dev {device} gso_max_size {piece}"
            )
            if rate is not None:
                shape = f"tbf rate {round(8 * rate)}bit burst {burst(rate)} latency {_QUEUE}"
                lines.append(
                    f"tc {where} qdisc replace dev {device} root handle 1: {shape}"
                )
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """Return this process's environment with a PATH that finds `tc`: Debian's users have no /usr/sbin on theirs."""
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PATH": os.pathsep.join((path, "/usr/sbin", "/sbin")),
    }


class Network:
    """The namespaces and the process that holds them."""

    def __init__(self, hosts: int, *, user: bool) -> None:
        if not sys.platform.startswith("linux"):
            raise Refused(
                f"hosts are Linux network namespaces, and this is {sys.platform}"
            )
        path = environment()["PATH"]
        if missing := [
            tool for tool in TOOLS if shutil.which(tool, path=path) is None
        ]:
            raise Refused(
                f"{', '.join(missing)} is not installed; install the packages iproute2 and util-linux"
            )
        self.hosts, self.user = hosts, user
        own = ["--user", "--map-root-user"] if user else []
        command = [
            "unshare",
            *own,
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        script = f"{build_script(hosts)}\necho ready\nexec cat >/dev/null"
        # A session of its own: an interrupt from the keyboard reaches this process, which then closes in order.
        self.holder = subprocess.Popen(
            [*command, "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment(),
        )
        try:
            ready = self.holder.stdout.readline()
        except BaseException:
            self.close()
            raise
        if ready != "ready\n":
            reason = self.close().strip().splitlines() or ["no reason given"]
            raise Refused(
                f"this system does not let you make network namespaces ({reason[-1]})"
            )

    def command(self, *words: str, host: int | None = None) -> list[str]:
        """Return the command line that runs a command on a host, or on the switch."""
        spaces = f"/proc/{self.holder.pid}/ns"
        enter = [
            "nsenter",
            f"--net={spaces}/net",
            f"--mount={spaces}/mnt",
            f"--pid={spaces}/pid_for_children",
        ]
        if self.user:
            enter += [f"--user={spaces}/user", "--preserve-credentials"]
        # Entering the mount namespace leads to its root; go back to where the caller is.
        place = ["env", f"--chdir={os.getcwd()}"]
        there = [] if host is None else ["ip", "netns", "exec", f"h{host}"]
        return [*enter, *place, *there, *words]

    def shell(self, script: str) -> None:
        """Run commands on the switch."""
        _shell(*self.command("sh", "-ec", script))

    def end_processes(self) -> None:
        """Kill every process on the hosts; the hosts stay."""
        # In its own process namespace, -1 is everybody in there but number 1, the holder.
        with contextlib.suppress(Refused):
            self.shell("kill -9 -1")

    def close(self) -> str:
        """End the holder, and with it all hosts and every process on them; return what it said last."""
        if self.holder.stdin.closed:
            return ""
        self.holder.stdin.close()
        try:
            self.holder.wait(5)
        except subprocess.TimeoutExpired:
            self.holder.kill()  # --kill-child takes process number 1 with it
            self.holder.wait()
        said = self.holder.stderr.read()
        self.holder.stdout.close()
        self.holder.stderr.close()
        return said


def _shell(*command: str) -> None:
    """Run a command; if it fails, `Refused` has the last line of what it said."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [
            f"status {done.returncode}"
        ]
        raise Refused(f"the network cannot be set up so ({said[-1]})")


def _network(hosts: int) -> Network:
    root = os.geteuid() == 0
    try:
        return Network(hosts, user=not root)
    except Refused:
        if root:  # of a container, which may lack the right, and still make a user namespace
            return Network(hosts, user=True)
        raise


def _bytes_per_second(rate: str | float | None) -> float | None:
    if rate is None:
        return None
    value = parse_bandwidth(rate)
    if not 1e4 <= value <= 1e12:
        raise ValueError(
            f"rate={rate!r} is {value:g} bytes per second; use 10 kB/s to 1 TB/s"
        )
    return value


def main(folder: Path) -> None:
    """Be one rank: join the process group, call the function and write `RANK.result`, or why it failed, `RANK.error`."""
    import cloudpickle
    import torch
    import torch.distributed as dist
    from lablib.launch.ranks import pickle_result

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    try:
        fn, args = cloudpickle.loads((folder / "call").read_bytes())
        result = pickle_result(fn(*args))
    except BaseException:
        (folder / f"{dist.get_rank()}.error").write_text(
            traceback.format_exc()
        )
        raise
    (folder / f"{dist.get_rank()}.result").write_bytes(result)
    # Nobody leaves before all are done: an early goodbye could break the others' connections.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    reset_process()
    main(Path(sys.argv[1]))
