"""Replica groups: what all groups learn is what one process learns, whoever dies, and nothing stays behind."""

import gc
import os
import signal
import sys
import threading
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.launch.records import digest
from lablib.launch.runs import Blow, Groups, Torchft, Toy, common_steps, equal_weights, stall, storm, why_not_torchft
from lablib.toys.replica_groups import Job, Lighthouse, Quorum, State, heal

# Sums of 12 gradients in another order, over 60 steps of SGD whose momentum multiplies an error by 10 at most: an fp32
# rounding of 6e-8 of a gradient of order 1 gives some 60 * 10 * lr * 6e-8 = 2e-6, and five times that is allowed.
TOLERANCE = 1e-5
STEPS = 60
HEARTBEAT = 0.6  # seconds: what a test waits for a death


def alone(job):
    """Return the losses of one process that takes the same steps."""
    state, losses = State(job), []
    for step in range(job.steps):
        gradient, loss = state.backward(job.numbers(step))
        losses.append(loss / job.batch)
        state.commit(gradient / job.batch)
    return losses, digest(state.weights)


def losses(logs, steps):
    """Return the loss of each step, from the groups that committed it."""
    found = {line["step"]: line["loss"] for lines in logs.values() for line in lines if line["event"] == "committed"}
    return [found[step] for step in range(1, steps + 1)]


def run_to_the_end(groups):
    with groups:
        groups.wait(lambda: not any(groups.alive(g) for g in range(groups.count)), "all steps are taken")
    return groups.logs()


def taken(logs, group, since=0):
    return [line for line in logs[group] if line["event"] == "committed" and line["step"] > since]


# --- the lighthouse, without a process --------------------------------------------------------------------------------


class Members:
    """A lighthouse on a store in this process, and members that do what a test says."""

    def __init__(self, timeout=1.0, **kwargs):
        self.store = dist.HashStore()
        self.house, self.now = Lighthouse(self.store, timeout, **kwargs), 0.0

    def come(self):
        number = self.store.add("members", 1)
        self.beat(number)
        return number

    def beat(self, *members):
        for member in members:
            self.store.add(f"beats/{member}", 1)

    def ask(self, member, step, holds=0, quorum=0):
        self.store.set(f"ask/{member}", f"{step} {quorum} {holds}")

    def look(self, seconds=0.0):
        self.now += seconds
        return self.house.look(self.now)

    def answer(self, member):
        text = self.store.get(f"answer/{member}").split() if self.store.check([f"answer/{member}"]) else None
        if text:
            self.store.delete_key(f"answer/{member}")
        if not text:
            return None
        number, rank, *states = map(int, text)
        assert not any(states[1::2]), "nobody here says in which quorum a step was taken"
        return [number, rank, *states[::2]]


def test_a_quorum_waits_for_all_who_live_and_for_nobody_else():
    job = Members()
    a, b = job.come(), job.come()
    job.ask(a, 0)
    assert not job.look()
    assert job.answer(a) is None
    job.ask(b, 0)
    assert job.look()
    assert job.answer(a) == [1, 0, 0, 0]
    assert job.answer(b) == [1, 1, 0, 0]
    job.ask(a, 1, 1)
    job.beat(a)
    assert not job.look(0.9), "b was heard 0.9 s ago"
    job.beat(a)
    assert job.look(0.2), "and now 1.1 s ago"
    assert job.answer(a) == [2, 0, 1]


def test_a_number_stays_with_its_members_and_changes_when_one_has_left():
    job = Members()
    a, b = job.come(), job.come()
    for step, holds, number in ((0, 0, 1), (1, 1, 1), (2, 1, 1)):
        for member in (a, b):
            job.ask(member, step, holds)
        assert job.look()
        assert job.answer(a) == [number, 0, step, step]
        assert job.answer(b) == [number, 1, step, step]
    job.ask(a, 3, 1)  # has committed
    job.ask(b, 2, 0)  # has seen an error
    assert job.look()
    assert job.answer(a) == [2, 0, 3, 2]
    assert job.answer(b) == [2, 1, 3, 2]


def test_who_was_paused_comes_back_as_it_was_heard_again():
    job = Members()
    a, b = job.come(), job.come()
    job.look()
    job.ask(a, 5, 1)
    job.beat(a)
    assert job.look(1.5)
    assert job.answer(a)[1:] == [0, 5]
    job.beat(a, b)
    job.ask(a, 6, 1)
    assert not job.look(0.1), "b lives again, and does not ask"
    job.ask(b, 5, 0)
    assert job.look()
    assert job.answer(b)[2:] == [6, 5]


def test_fewest_and_first():
    job = Members(fewest=2, first=3)
    a, b = job.come(), job.come()
    job.ask(a, 0)
    job.ask(b, 0)
    assert not job.look()
    c = job.come()
    job.ask(c, 0)
    assert job.look()
    for member in (a, b):
        job.ask(member, 1, 1)
    job.beat(a, b)
    assert job.look(1.1), "two are enough for a later one"
    job.ask(a, 2, 2)
    job.beat(a)
    assert not job.look(1.1), "one is not"


@pytest.mark.parametrize("wrong", [{"heartbeat_timeout": 0}, {"fewest": 0}, {"first": 0}])
def test_a_lighthouse_refuses(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Lighthouse(dist.HashStore(), **{"heartbeat_timeout": 1.0} | wrong)


# --- data and healing -------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once_however_it_is_dealt():
    job = Job(samples=30, batch=12)
    places = [n for step in range(5) for n in job.numbers(step)]
    assert sorted(places[:30]) == sorted(places[30:]) == list(range(30))
    assert places[:30] != places[30:]
    for groups in (1, 2, 3, 5):
        dealt = [n for rank in range(groups) for n in job.numbers(3)[rank::groups]]
        assert sorted(dealt) == sorted(job.numbers(3))


def _healing(steps):
    job = Job()
    state = State(job)
    state.step, state.quorum = steps[dist.get_rank()], 1
    with torch.no_grad():
        for tensor in (*state.weights, *state.momenta):
            tensor.add_(dist.get_rank())
    with record_comms() as log:
        got = heal(state, Quorum(2, tuple((step, 1) for step in steps), dist.get_rank()))
    sent = [event.bytes for event in log.events if event.op == "send"]
    return got, state.step, digest([*state.weights, *state.momenta]), sent


@pytest.mark.parametrize(("steps", "source"), [((7, 3), 0), ((0, 9, 9), 1), ((4, 5, 1), 1), ((2, 2), None)])
def test_healing_sends_the_whole_state_to_those_who_are_behind(steps, source):
    found = run_ranks(_healing, len(steps), steps)
    states = 8 * sum(p.numel() for p in State(Job()).weights)  # weights and momenta, 4 bytes each
    behind = [rank for rank, step in enumerate(steps) if step < max(steps)]
    for rank, (got, step, _, sent) in enumerate(found):
        assert got == (states if rank in behind else 0)
        assert sent == ([states] * len(behind) if rank == source and behind else [])
        assert step == max(steps)
    if behind:
        assert all(found[rank][2] == found[source][2] for rank in behind)


def test_the_same_step_of_another_quorum_is_another_state():
    assert Quorum(9, ((7, 3), (7, 3)), 0).behind == []
    assert Quorum(9, ((7, 3), (7, 5), (6, 5)), 0).behind == [0, 2]


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_groups_learn_what_one_process_learns(count):
    job = Job(steps=20)
    logs = run_to_the_end(Groups(Toy(job, pace=0), count=count, heartbeat_timeout=5))
    expected, weights = alone(job)
    torch.testing.assert_close(torch.tensor(losses(logs, 20)), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)
    shared, unequal = equal_weights(logs)
    assert (shared, unequal) == (20 if count > 1 else 0, 0)
    if count == 1:
        assert taken(logs, 0)[-1]["digest"] == weights


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("count", "phase"),
    [(2, "asks"), (2, "quorum"), (2, "computed"), (2, "reduced"), (2, "committed"), (3, "computed"), (3, "reduced")],
)
def test_a_group_may_die_at_any_point_of_a_step(count, phase):
    """One seeded kill with a deadline; the job learns the same, and the one that came back has the weights of the others."""
    die = {1: (phase, 7)}
    # It ends when the newcomer has taken steps, however long a busy machine takes to start one.
    kind = Toy(Job(steps=10**6), pace=0.02, patience=3)
    with Groups(kind, count=count, heartbeat_timeout=HEARTBEAT, die=die, deadline=60) as groups:
        groups.wait(lambda: not groups.alive(1), "the victim dies")
        groups.wait(lambda: any(line["groups"] == count - 1 for line in groups.log(0, "committed")), "they go on")
        groups.start(1)
        groups.wait(lambda: groups.together() > 20, "all take steps together")
        logs = groups.logs()
    steps = max(line["step"] for line in taken(logs, 0))
    tolerance = TOLERANCE * max(1, steps / STEPS)
    torch.testing.assert_close(
        torch.tensor(losses(logs, steps)), torch.tensor(alone(Job(steps=steps))[0]), rtol=tolerance, atol=tolerance
    )
    shared, unequal = equal_weights(logs)
    assert shared > 20
    assert unequal == 0
    assert [line["event"] for line in logs[1] if line["event"] == "healed"] == ["healed"]


@dataclass(frozen=True)
class DiesBeforeTheMeeting(Toy):
    """Group 1 has its answer and is killed before it meets the others, once: they wait for it in a start that fails."""

    marker: str = ""

    def group(self, number, address, log):
        if number == 1 and not os.path.exists(self.marker):
            open(self.marker, "x").close()
            dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        super().group(number, address, log)


@pytest.mark.parametrize("count", [2, 3])
def test_who_waited_in_a_start_that_failed_still_meets_a_newcomer(count, tmp_path):
    kind = DiesBeforeTheMeeting(Job(steps=10**6), patience=1.0, marker=str(tmp_path / "died"))
    with Groups(kind, count=count, heartbeat_timeout=HEARTBEAT) as groups:
        groups.wait(lambda: not groups.alive(1), "it dies")
        groups.start(1)
        groups.wait(lambda: groups.together() > 5, "all take steps together")
        logs = groups.logs()
    assert equal_weights(logs)[1] == 0
    assert any(line["event"] == "void" for line in logs[0]), "the others saw a start that failed"


def test_one_kill_from_outside_is_survived_by_the_toy():
    (one,) = storm(Toy(Job(steps=10**6)), kills=1, seed=3, heartbeat_timeout=HEARTBEAT, deadline=60)
    assert one.unequal == 0
    assert one.common > 5
    assert one.stall > 0


def test_who_is_paused_for_longer_than_the_timeout_is_left_out_and_heals():
    with Groups(Toy(Job(steps=10**6), patience=1.0), heartbeat_timeout=0.5, deadline=60) as groups:
        groups.wait(lambda: groups.together() > 3)
        groups.pause(1, 2.5)  # longer than timeout and patience together
        groups.wait(lambda: any(line["groups"] == 1 for line in groups.log(0, "committed")), "it is left out")
        groups.wait(lambda: groups.log(1, "healed"), "it heals")
        seen = Blow(1, groups.log(1, "healed")[0]["time"], 0)
        groups.wait(lambda: groups.together(seen) > 3, "it takes steps again")
        logs = groups.logs()
    assert equal_weights(logs)[1] == 0
    assert len([line for line in logs[1] if line["event"] == "started"]) == 1


def _children():
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("how", ["end", "error", "interrupt"])
def test_nothing_stays(how):
    run_ranks(_nothing, 1)  # the server that all are forked from stays
    before = _children()
    error = {"end": None, "error": ZeroDivisionError, "interrupt": KeyboardInterrupt}[how]
    groups = Groups(Toy(Job(steps=10**6)), heartbeat_timeout=HEARTBEAT)
    try:
        with groups:
            groups.wait(lambda: groups.together() > 2)
            folder, port = groups.folder, int(groups.address)
            assert len(_children() - before) == 3
            if how == "interrupt":
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                groups.wait(lambda: False, "an interrupt")
            elif error:
                raise error
    except error or ():  # noqa: B030 (a class or none)
        pass
    assert _children() <= before
    assert not folder.exists()
    assert not [c for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == port]
    assert groups.log(0, "committed"), "the log can still be read"


def _nothing():
    gc.collect()


def test_a_group_that_fails_by_itself_is_shown_with_its_last_lines():
    with pytest.raises(RuntimeError, match=r"(?s)group 0 has failed.*ZeroDivisionError"):
        _wait_for(Groups(Toy(Job(samples=0)), count=1))


def _wait_for(groups):
    with groups:
        groups.wait(lambda: groups.together() > 2, "all there")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=0"),
        ({"die": {0: ("dies", 1)}}, "phase='dies'"),
    ],
)
def test_groups_refuse(wrong, message):
    with pytest.raises(ValueError, match=message):
        Groups(**wrong)


def test_a_group_that_lives_is_not_started_twice():
    with Groups(Toy(Job(steps=10**6))) as groups, pytest.raises(ValueError, match="group 0 lives"):
        groups.start(0)


def test_a_stall_is_the_gap_around_a_kill():
    lines = [{"event": "committed", "time": t} for t in (1.0, 1.1, 1.2, 3.4, 3.5, 3.6, 9.0)]
    assert stall(lines, Blow(1, 1.25, 3)) == pytest.approx(2.2)
    assert len(common_steps({}, 2)) == 0


# --- torchft ----------------------------------------------------------------------------------------------------------


def test_where_torchft_cannot_be_installed_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for system, machine in (("darwin", "arm64"), ("linux", "aarch64")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert "wheels for Linux on x86-64 only" in why_not_torchft()
        with pytest.raises(ValueError, match="the recorded run stands in"):
            Torchft()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert ".[torchft]" in why_not_torchft()


needs_torchft = pytest.mark.skipif(why_not_torchft() is not None, reason="torchft is not installed")


@needs_torchft
def test_one_kill_from_outside_is_survived_by_torchft():
    (one,) = storm(Torchft(Job(steps=10**6)), kills=1, seed=4, heartbeat_timeout=HEARTBEAT, deadline=90)
    assert one.unequal == 0
    assert one.common > 5


@needs_torchft
def test_torchft_sends_weights_and_moments_to_the_one_that_comes_back():
    with Groups(Torchft(Job(steps=10**6)), heartbeat_timeout=HEARTBEAT, deadline=90) as groups:
        groups.wait(lambda: groups.together() > 5)
        blow = groups.kill(1)
        groups.start(1)
        groups.wait(lambda: groups.together(blow) > 3)
        healed = groups.log(1, "healed")[-1]
        sizes = [line["groups"] for line in groups.log(0, "committed")]
    weights = sum(p.numel() for p in State(Job()).weights)
    steps = 4 * len(State(Job()).weights)  # AdamW keeps its count for each tensor, in fp32
    assert healed["bytes"] == 12 * weights + steps
    assert {1, 2} <= set(sizes), "the survivor went on with half of the batch"
