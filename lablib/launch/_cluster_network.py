"""Hosts as network namespaces: one process holds them all, and they vanish with it.

`unshare` starts the holder in namespaces of its own for networks, mounts and processes, and for an ordinary user
in a user namespace too, where it is root. The holder makes a bridge, the switch, and for each host one more network
namespace with a cable to the switch. Then it waits until its standard input closes.

Whatever ends it (`close`, an interrupt, this process being killed) ends the process number 1 of its namespace; the
kernel then kills every process in there, takes the cables down and forgets the names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

TOOLS = ("unshare", "nsenter", "ip", "tc")
CARD = "eth0"  # the network card of every host
MAX_HOSTS = 64
#: After a pause a link lets so many seconds' worth of bytes through at once, and at least so many bytes. With less
#: it does not reach its bandwidth on a busy machine; with more, messages of 1 MiB would pass too fast.
BURST_S, BURST_BYTES = 1e-3, 128 * 1024
_PIECE_S, _PIECE_LEAST, _PIECE_MOST = 0.5e-3, 4096, 65536  # what a link sends at a time, in seconds and bytes
_QUEUE = "200ms"  # what a link keeps waiting before it drops packets


def address(host: int) -> str:
    """Return a host's address. The text sorts as the numbers do: torchrun numbers the hosts in that order."""
    return f"10.88.0.{100 + host}"


def burst(rate: float) -> int:
    """Return the bytes that a link lets through at once after a pause.

    Args:
        rate: Its bandwidth in bytes per second.
    """
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


def shape_script(hosts: int, rate: float | None, delay: float | None) -> str:
    """Return the commands that give every cable a bandwidth in both directions, and a delay if there is one.

    Args:
        hosts: How many there are.
        rate: Bytes per second, per direction; None is as fast as the machine.
        delay: Seconds that each packet waits at the card that sends it, or None.
    """
    lines = []
    for host in range(hosts):
        for where, device, late in ((f"-n h{host}", CARD, delay), ("", f"port{host}", None)):
            root = f"tc {where} qdisc replace dev {device} root handle 1:"
            lines.append(f"tc {where} qdisc del dev {device} root 2>/dev/null || true")
            # Linux hands a card pieces of up to 64 KiB. On a slow link one takes milliseconds, and whatever waits
            # behind it is late; a real card sends single packets.
            piece = (
                _PIECE_MOST if rate is None else min(_PIECE_MOST, max(_PIECE_LEAST, round(rate * _PIECE_S)))
            )
            lines.append(f"ip {where} link set dev {device} gso_max_size {piece}")
            netem = f"netem delay {round(1e6 * late)}us limit 100000" if late else None
            if rate is not None:
                lines.append(f"{root} tbf rate {round(8 * rate)}bit burst {burst(rate)} latency {_QUEUE}")
                if netem:
                    lines.append(f"tc {where} qdisc add dev {device} parent 1:1 handle 10: {netem}")
            elif netem:
                lines.append(f"{root} {netem}")
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """Return this process's environment with a PATH that finds `tc`: Debian's users have no /usr/sbin on theirs."""
    path = os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": os.pathsep.join((path, "/usr/sbin", "/sbin"))}


class Refused(OSError):
    """The system does not allow what was asked for; the message is one sentence."""


class Network:
    """The namespaces and the process that holds them.

    Args:
        hosts: How many, 2 to 64.
        user: Make a user namespace too, which needs no rights; False needs root.

    Raises:
        Refused: If the system has no such namespaces, or does not let this user make them.
    """

    def __init__(self, hosts: int, *, user: bool) -> None:
        if not sys.platform.startswith("linux"):
            raise Refused(f"hosts are Linux network namespaces, and this is {sys.platform}")
        path = environment()["PATH"]
        if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
            raise Refused(
                f"{', '.join(missing)} is not installed; install the packages iproute2 and util-linux"
            )
        self.hosts, self.user = hosts, user
        own = ["--user", "--map-root-user"] if user else []
        command = ["unshare", *own, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
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
            raise Refused(f"this system does not let you make network namespaces ({reason[-1]})")

    def command(self, *words: str, host: int | None = None) -> list[str]:
        """Return the command line that runs a command on a host, or on the switch.

        Args:
            *words: The command.
            host: Its number; None is the switch.
        """
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
        """Run commands on the switch.

        Args:
            script: For `sh`, stopped at the first command that fails.

        Raises:
            Refused: If one fails; it quotes the last line of what was said.
        """
        done = subprocess.run(
            self.command("sh", "-ec", script),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment(),
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise Refused(f"the network cannot be set up so ({said[-1]})")

    def end_processes(self) -> None:
        """Kill every process on the hosts; the hosts stay."""
        # In its own process namespace, -1 is everybody in there but number 1, the holder.
        subprocess.run(
            self.command("sh", "-c", "kill -9 -1"),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=environment(),
            check=False,
        )

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


def shell_from_inside(script: str) -> None:
    """Run commands on the switch from a process on one of the hosts.

    Args:
        script: For `sh`, stopped at the first command that fails.

    Raises:
        Refused: If one fails.
    """
    done = subprocess.run(
        ["nsenter", "--target=1", "--net", "sh", "-ec", script],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise Refused(f"{shlex.quote(said[-1])} when changing the links from inside")
