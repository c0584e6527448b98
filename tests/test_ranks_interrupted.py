"""Ranks under interrupts at any moment, under a server that is stuck or gone, and without their notebook."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from lablib.launch.rank_server import server_pid, uninterrupted
from lablib.launch.ranks import RankError, RankTimeout, run_ranks
from lablib.launch.ranks import run as ranks
from tests.bench.bench_ranks import interrupted_at_random, kernel

PAUSE = threading.Event()  # nobody sets it


@pytest.fixture(autouse=True)
def interruptible():
    """Interrupts raise, whatever the tests were started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_put_off_whichever_thread_it_reaches():
    stop, held = threading.Event(), []

    def block():
        with uninterrupted():
            # For the process, as from a terminal, and where Python's own thread is not the one that gets it.
            os.kill(os.getpid(), signal.SIGINT)
            signal.pthread_kill(other.ident, signal.SIGINT)
            for _ in range(20):
                PAUSE.wait(0.01)
            held.append(True)

    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert held
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        stop.set()
        other.join()


def test_ignored_interrupts_stay_ignored_and_other_threads_need_nothing():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    seen = []

    def elsewhere():
        with uninterrupted() as interrupts, interrupts.let_through():
            seen.append("ran")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == ["ran"]


@pytest.fixture
def stopped_server():
    """A server that answers no more: it is stopped, as by a debugger or a machine that swaps."""
    run_ranks(os.getpid, 1)
    pid = server_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        if server_pid() == pid:
            os.kill(pid, signal.SIGKILL)


def test_a_start_that_gets_no_answer_ends_with_the_timeout(stopped_server, monkeypatch):
    monkeypatch.setattr(ranks, "_START_S", 0.3)
    with pytest.raises(RankTimeout, match=r"no start of all ranks after 0.5 s: the server .* was ended") as caught:
        run_ranks(os.getpid, 2, timeout=0.5)
    assert caught.value.waiting_at == {0: "not started", 1: "not started"}
    assert run_ranks(lambda: 7, 2) == [7, 7]
    assert server_pid() != stopped_server


def test_an_interrupt_ends_a_start_that_gets_no_answer(stopped_server):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(os.getpid, 2)
    timer.join()
    assert run_ranks(lambda: 7, 1) == [7]


def test_a_killed_server_is_said_in_a_sentence():
    def work():
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(RankError, match="the server that ranks are forked from was ended"):
        run_ranks(work, 1)
    with suppress(RankError):  # a server that is just ending refuses: "call again"
        run_ranks(lambda: 7, 1)
    assert run_ranks(lambda: 7, 1) == [7]


def test_a_folder_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"the working folder of this process is gone.*os.chdir"):
        run_ranks(os.getpid, 1)


def test_a_kernel_that_is_interrupted_at_random_moments_leaves_no_process():
    with kernel() as it:
        assert interrupted_at_random(it, 12, seed=1, patience=60) == 0
