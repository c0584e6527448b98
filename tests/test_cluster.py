"""Hosts as network namespaces: what runs on them, how fast their links are, and that nothing is left of them.

A host is real here: every test makes namespaces and sends through them. Where the system forbids it, the tests that
need hosts are skipped with the reason that readers get.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lablib.calc.communication import tcp_bandwidth
from tests.processes import ended
from tests.scripts import lab_script

ROOT = Path(__file__).parents[1]
two_hosts = lab_script("two_hosts")
REFUSED = two_hosts.why_not()
needs_hosts = pytest.mark.skipif(REFUSED is not None, reason=f"no cluster on this machine: {REFUSED}")
# One host listens, the other sends and prints how long the bytes took, as bench tools do.
TALK = """
import socket, sys, time
role, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "listen":
    with socket.create_server((address, 5000)) as server:
        connection, peer = server.accept()
        with connection:
            got = 0
            while got < count:
                got += len(connection.recv(1 << 16))
            connection.sendall(b"!")
    print(peer[0])
else:
    deadline, connection = time.monotonic() + 20, None
    while connection is None:  # until the other host listens
        try:
            connection = socket.create_connection((address, 5000), 5)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
    with connection:
        start = time.perf_counter()
        connection.sendall(bytes(count))
        connection.recv(1)
        print(time.perf_counter() - start)
"""


def network_of(pid: int | str) -> str | None:
    """Return the network namespace of a process, None if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def left_of(token: str, networks: set[str]) -> list[str]:
    """Return the processes that carry a token in their environment, or live in one of the networks."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            told = token.encode() in (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended since
            continue
        if state != "Z" and (told or network_of(folder.name) in networks):
            found.append(command)
    return found


def wait_until_gone(token: str, networks: set[str]) -> None:
    """Look until nothing is left: what was killed needs a moment to go."""
    deadline = time.monotonic() + 60
    while left := left_of(token, networks):
        assert time.monotonic() < deadline, left


def cables() -> set[str]:
    """Return the network cards of this machine."""
    return set(os.listdir("/sys/class/net"))


@needs_hosts
def test_two_hosts_talk_as_fast_as_their_link() -> None:
    """At 8 Mb/s 512 KiB take half a second at least. A busy machine can only add to that."""
    cards, count = cables(), 512 * 1024
    with two_hosts.Cluster(3, rate="1 Gb/s") as cluster:
        address, talk = two_hosts.address(0), [sys.executable, "-c", TALK]
        seconds = {}
        for rate in ("80 Mb/s", "8 Mb/s"):
            if rate == "80 Mb/s":
                cluster.throttle(rate)
            else:  # from one of the hosts, as a rank does it
                inside = f"from tests.scripts import lab_script; lab_script('two_hosts').throttle({rate!r})"
                cluster.run_all([(1, [sys.executable, "-c", inside])], env={"LABLIB_HOSTS": "3"})
            jobs = [(0, [*talk, "listen", address, str(count)]), (2, [*talk, "send", address, str(count)])]
            peer, said = cluster.run_all(jobs)
            assert peer.strip() == two_hosts.address(2)
            seconds[rate] = float(said)
        for rate, bytes_per_second in (("80 Mb/s", 1e7), ("8 Mb/s", 1e6)):
            # The cards at both ends let a burst through at once; more than that cannot be saved.
            least = (count - 2 * two_hosts.burst(bytes_per_second)) / tcp_bandwidth(bytes_per_second)
            assert seconds[rate] >= least
        cluster.throttle(None)
        assert "tbf" not in cluster.run(2, "tc", "qdisc", "show", "dev", "eth0")
        assert "gso_max_size 65536" in cluster.run(2, "ip", "-d", "link", "show", "eth0")
        assert cables() == cards  # the machine's own network has not changed
        networks = {cluster.run(host, "readlink", "/proc/self/ns/net").strip() for host in range(3)}
        assert len(networks) == 3
        assert network_of("self") not in networks
    wait_until_gone("no token", networks)


def job(rates: list[str]) -> dict:
    """What each rank does on the cluster: see where it is, and time an all-reduce at several bandwidths."""
    import time

    import torch
    import torch.distributed as dist
    from network_study import card_bytes

    from lablib.toys.collectives import hierarchical_all_reduce, node_groups
    from lablib.toys.collectives.ring import ring_all_reduce

    groups = node_groups(2)
    seconds, sent = {}, {}
    for rate in rates:
        dist.barrier()
        if dist.get_rank() == 0:
            two_hosts.throttle(rate)
        dist.barrier()
        for name, call in (("flat", ring_all_reduce), ("levels", lambda x: hierarchical_all_reduce(x, groups))):
            x = torch.full((2**17,), float(dist.get_rank()))
            dist.barrier()
            before, start = card_bytes(), time.perf_counter()
            call(x)
            seconds[rate, name] = time.perf_counter() - start
            dist.barrier()  # the other rank of this host uses the card too
            sent[rate, name] = card_bytes() - before
            assert (x == 6).all()
    local, world = os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]
    return {
        "rank": dist.get_rank(),
        "local": local,
        "world": world,
        "network": network_of("self"),
        "s": seconds,
        "sent": sent,
    }


@pytest.mark.drawn
@needs_hosts
def test_torchrun_on_two_hosts() -> None:
    """4 ranks on 2 hosts meet by c10d; ranks follow hosts; a rank throttles the links that all of them use."""
    rates = ["40 Mb/s", "10 Mb/s"]
    with two_hosts.Cluster(2) as cluster:
        ranks = cluster.run_ranks(job, rates, ranks_per_host=2, timeout=100)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert [rank["local"] for rank in ranks] == ["0", "1", "0", "1"]
    assert {rank["world"] for rank in ranks} == {"4"}
    networks = [rank["network"] for rank in ranks]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    size = 4 * 2**17

    def sent(rate: str, name: str) -> list[int]:
        """Bytes by host: of its two ranks the one that looked first, before either sent, has seen them all."""
        counts = [rank["sent"][rate, name] for rank in ranks]
        return [max(counts[:2]), max(counts[2:])]

    for rate, bytes_per_second in zip(rates, (5e6, 1.25e6), strict=True):
        # Flat, every link between hosts carries 2 · 3/4 of the array; in two levels the array once.
        for name, share in (("flat", 1.5), ("levels", 1.0)):
            slowest = max(rank["s"][rate, name] for rank in ranks)
            assert slowest >= (share * size - 2 * two_hosts.burst(bytes_per_second)) / tcp_bandwidth(bytes_per_second)
            # The cards count headers, acknowledgements and what is sent again: a few percent each.
            assert all(share * size <= count < 2 * share * size for count in sent(rate, name))
        assert max(sent(rate, "levels")) < min(sent(rate, "flat"))


@pytest.mark.drawn
@needs_hosts
def test_a_parted_network() -> None:
    """A cut that is mended in time costs time only; later the group is broken for good, and a new one is not."""
    cards = cables()
    with two_hosts.Cluster(2) as cluster:
        networks = {cluster.run(host, "readlink", "/proc/self/ns/net").strip() for host in range(2)}
        seen = two_hosts.watch_parting(cluster, host=1)
        assert len(seen) == 2  # the one behind the cut and the one in front of it
        for said in seen:
            assert said["mended in time"] == said["a new group"] == 2
            for broken in ("mended late", "not mended"):
                # Whoever comes last sees that its neighbour has given up.
                assert "Timed out waiting 3000ms" in said[broken] or "Connection closed by peer" in said[broken]
            assert isinstance(said["the same group"], str)
        wait_until_gone("no token", networks)  # no rank is left behind the cut
        assert "UP" in carrier(cluster, 1)
        cluster.part(0)
        assert ["DOWN" in carrier(cluster, host) for host in range(2)] == [True, False]
        cluster.mend(0)
        assert "DOWN" not in carrier(cluster, 0)
        with pytest.raises(ValueError, match=r"^host=2: this cluster has 0 to 1$"):
            cluster.part(2)
    wait_until_gone("no token", networks)
    assert cables() == cards


def carrier(cluster: two_hosts.Cluster, host: int) -> str:
    """Return the state of a host's card, as the kernel there sees it."""
    return cluster.run(host, "ip", "-br", "link", "show", "eth0").split()[1]


def test_a_cable_is_cut_from_a_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABLIB_HOSTS", raising=False)
    for name in ("part", "mend"):
        with pytest.raises(
            RuntimeError, match=f"{name} works on a host of a Cluster; from outside call cluster.{name}"
        ):
            getattr(two_hosts, name)(1)


@needs_hosts
def test_failure_names_the_host_and_ends_the_others() -> None:
    token = uuid.uuid4().hex
    with two_hosts.Cluster(2) as cluster:
        jobs = [(0, ["sleep", "1000"]), (1, ["sh", "-c", "echo no such luck; exit 3"])]
        with pytest.raises(two_hosts.ClusterError, match=r"host 1 failed with status 3.*\nno such luck") as caught:
            cluster.run_all(jobs, env={"TOKEN": token})
        assert caught.value.host == 1
        wait_until_gone(token, set())
        # A process that hides from its parent ends too, and the hosts go on working.
        hidden = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]
        with pytest.raises(two_hosts.ClusterError, match=r"no end after 0\.2 s"):
            cluster.run_all([(0, hidden)], env={"TOKEN": token}, timeout=0.2)
        wait_until_gone(token, set())
        assert cluster.run(0, "echo", "well").strip() == "well"
        with pytest.raises(two_hosts.ClusterError, match="host 0 failed"):
            cluster.run(0, "false")
        stays = ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & exit 0"]
        cluster.run_all([(1, stays)], env={"TOKEN": token})
    wait_until_gone(token, set())
    with pytest.raises(ValueError, match="closed"):
        cluster.run(0, "true")
    cluster.close()  # a second time does nothing


LIVE = """
import signal, sys
# What a shell starts in the background ignores SIGINT, and so would this, started there.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.scripts import lab_script
with lab_script("two_hosts").Cluster(2, rate="1 Gb/s") as cluster:
    for host in range(2):
        print(cluster.run(host, "readlink", "/proc/self/ns/net").strip(), flush=True)
    print("working", flush=True)
    cluster.run_all([(host, ["sh", "-c", "setsid sleep 1000 & sleep 1000"]) for host in range(2)], timeout=100)
"""


@pytest.mark.drawn
@needs_hosts
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_an_interrupt(end: signal.Signals) -> None:
    """Neither when the cluster can close in order, nor when its process is killed and can do nothing."""
    token, cards = uuid.uuid4().hex, cables()
    live = subprocess.Popen(
        [sys.executable, "-c", LIVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TOKEN": token},
    )
    with ended(live) as process:
        networks = {process.stdout.readline().strip() for _ in range(2)}
        assert process.stdout.readline() == "working\n"
        while len([line for line in left_of(token, networks) if line.startswith("sleep")]) < 4:
            assert process.poll() is None
        process.send_signal(end)
        _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert end != signal.SIGINT or "KeyboardInterrupt" in errors
    wait_until_gone(token, networks)
    assert cables() == cards
    assert not [name for name in _names() if name.startswith("h0")]


def _names() -> list[str]:
    return os.listdir("/run/netns") if os.path.isdir("/run/netns") else []


def test_one_sentence_where_there_can_be_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(two_hosts.sys, "platform", "darwin")
        with pytest.raises(two_hosts.Refused, match=r"^hosts are Linux network namespaces, and this is darwin$"):
            two_hosts.Cluster(2)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(two_hosts.Refused, match=r"unshare, nsenter.* is not installed"):
            two_hosts.Cluster(2)
    for tool in two_hosts.TOOLS:
        (tmp_path / tool).write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    two_hosts.why_not.cache_clear()
    sentence = two_hosts.why_not()
    two_hosts.why_not.cache_clear()
    assert sentence == (
        "this system does not let you make network namespaces (unshare failed: Operation not permitted)"
    )
