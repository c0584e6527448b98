"""Runs that are killed, stopped, moved to fewer ranks, or find a broken checkpoint, learn what a calm run learns.

On the same number of ranks everything must be equal bit for bit: the same sums in the same order.

On half the ranks a mean of two means becomes one mean, so sums are taken in another order. In fp32 a gradient then
carries an error of about 1e-7 of its terms, which are below 1. AdamW makes of an error e in a gradient at most
e · lr / eps in a weight, the loss moves by that times the sum of |gradient|, which is at most sqrt(N) times its norm:
`tolerance` adds that up over the steps. One sample too many or too few moves the loss by more than 1e-3.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lablib.launch.fsdp import complete_checkpoints, latest_checkpoint, read_info
from lablib.launch.ranks import RankError, explain, one_sentence, run_ranks
from lablib.launch.records import read_logs
from lablib.launch.runs import elastic, kill_and_resume, torchrun
from lablib.launch.runs.elastic import descendants
from lablib.launch.training import Callback, LogEvents, SaveEvery, StopOnSignal, TrainConfig, Trainer, exit_code, resume
from lablib.launch.training import callbacks as disk_room
from lablib.launch.training.callbacks import STOPPED, StragglerWatch, check_room, finished
from tests.processes import free_port
from tests.scripts import load

STEPS = 8
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "steps": STEPS,
    "global_batch": 4,
    "seq": 16,
    "precision": "fp32",
    "lr": 1e-3,
    "eps": 1e-2,
    "clip": 1e9,
    "keep": 3,
}


class Losses(Callback):
    """Keeps losses and gradient norms."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])
        self.norms.append(metrics["grad_norm"])


class SignalAt(Callback):
    """Sends this rank a signal after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        if (trainer.rank, trainer.step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


def trained(folder: str, *callbacks: Callback) -> tuple[Trainer, Losses, list[str]]:
    """Resume if there is something to resume, train to the end, and return what happened."""
    losses = Losses()
    trainer = Trainer(TrainConfig(folder=folder, **SETTINGS), [losses, *callbacks])
    told = resume(trainer)
    trainer.run()
    return trainer, losses, told


def cut_newest(folder: Path) -> None:
    """Take the last byte from a shard of the newest checkpoint."""
    if dist.get_rank() == 0:
        shard = sorted(latest_checkpoint(folder).glob("*.distcp"))[-1]
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()


def scenarios(top: str) -> dict[str, Any]:
    """Everything that needs two ranks, in one start of them."""
    seen: dict[str, Any] = {}
    ticks = itertools.count()
    watch = StragglerWatch(every=3, clock=lambda: 2.0 ** dist.get_rank() * next(ticks))
    calm, losses, told = trained(f"{top}/calm", SaveEvery(2), LogEvents(), watch)
    seen["stragglers"] = [(step, found.rank) for step, found in watch.findings]
    seen["calm"] = losses.losses
    seen["norms"], seen["params"] = losses.norms, calm.report.params
    seen["calm told"], seen["calm code"] = told, exit_code(calm)
    seen["saved"] = [path.name for path in complete_checkpoints(calm.checkpoints)]

    before = signal.getsignal(signal.SIGTERM)
    stopped, first, _ = trained(f"{top}/term", StopOnSignal(), SignalAt(rank=1, step=3), LogEvents())
    seen["stop"] = (stopped.step, stopped.outcome, stopped.stop_reason, exit_code(stopped))
    seen["stop saved"] = latest_checkpoint(stopped.checkpoints).name
    seen["handler back"] = signal.getsignal(signal.SIGTERM) == before
    seen["unfinished"] = finished(f"{top}/term", STEPS)
    went_on, second, told = trained(f"{top}/term", SaveEvery(100))
    seen["stopped and resumed"] = first.losses + second.losses
    seen["resume told"], seen["then finished"] = told, finished(f"{top}/term", STEPS)

    cut_newest(calm.checkpoints)
    _, again, told = trained(f"{top}/calm", SaveEvery(2))
    seen["after damage"], seen["damage told"] = again.losses, told
    seen["after damage saved"] = sorted(path.name for path in calm.checkpoints.iterdir())

    if dist.get_rank() == 0:
        for path in complete_checkpoints(went_on.checkpoints):
            next(path.glob("*.distcp")).unlink()
    dist.barrier()
    nothing = Trainer(TrainConfig(folder=f"{top}/term", **SETTINGS))
    seen["all damaged"] = (resume(nothing), nothing.step)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    top = tmp_path_factory.mktemp("runs")
    results = run_ranks(scenarios, 2, str(top), timeout=120)
    for result in results:
        result["top"] = top
    return results


def test_a_run_that_saves_is_a_calm_run(seen):
    for result in seen:
        assert result["calm code"] == 0
        assert result["calm told"] == ["there is no checkpoint to resume from: the run starts at step 0"]
        assert result["saved"] == ["step-00000004", "step-00000006", "step-00000008"]
        assert len(result["calm"]) == STEPS
        assert result["stragglers"] == [(3, 1), (6, 1)]  # the clock of rank 1 counts twice as fast


def test_sigterm_saves_and_stops_all_ranks_after_the_same_step(seen):
    for result in seen:
        # Rank 1 gets the signal when step 3 is over, so the ranks agree at the end of step 4.
        assert result["stop"] == (4, "stopped", "rank 1: SIGTERM", STOPPED)
        assert result["stop saved"] == "step-00000004"
        assert result["handler back"]
        assert (result["unfinished"], result["then finished"]) == (False, True)
    assert STOPPED == 143


def test_a_stopped_run_goes_on_as_if_nothing_had_been(seen):
    for result in seen:
        assert result["resume told"] == ["resumed after step 4, saved by 2 ranks"]
        assert result["stopped and resumed"] == result["calm"]


def test_a_truncated_checkpoint_is_one_sentence_and_the_one_before_it_is_used(seen):
    for result in seen:
        damaged, resumed = result["damage told"]
        assert damaged.startswith("checkpoint ")
        assert "step-00000008 is damaged: __1_0.distcp has" in damaged
        assert "older" not in damaged
        assert resumed == "resumed after step 6, saved by 2 ranks"
        assert result["after damage"] == result["calm"][6:]
        assert result["after damage saved"] == [
            "damaged-step-00000008",
            "step-00000004",
            "step-00000006",
            "step-00000008",
        ]


def test_nothing_whole_means_step_0_and_a_sentence_for_each(seen):
    for result in seen:
        told, step = result["all damaged"]
        assert step == 0
        assert [("is damaged" in text) for text in told] == [True] * (len(told) - 1) + [False]
        assert len(told) == 3


def test_half_the_ranks_learn_the_same(seen):
    top, calm = seen[0]["top"], seen[0]["calm"]
    folder = top / "half"
    shutil.copytree(top / "calm" / "checkpoints" / "step-00000004", folder / "checkpoints" / "step-00000004")
    (result,) = run_ranks(_resumed, 1, str(folder))
    told, losses = result
    assert told == ["resumed after step 4, saved by 2 ranks"]
    steps = STEPS - 4
    weights = steps * 1e-7 * SETTINGS["lr"] / SETTINGS["eps"]
    tolerance = weights * seen[0]["params"] ** 0.5 * max(seen[0]["norms"]) + 1e-6
    assert tolerance < 1e-3 / 3
    assert losses == pytest.approx(calm[4:], abs=tolerance, rel=0)


def _resumed(folder: str) -> tuple[list[str], list[float]]:
    _, losses, told = trained(folder)
    return told, losses.losses


@pytest.mark.drawn
def test_kill_minus_9_and_a_restart_by_torchrun_change_nothing(seen, tmp_path):
    survivor = kill_and_resume(tmp_path / "run", SETTINGS, save_every=4, kill=(1, 6))
    assert survivor.job.restarts == 1
    assert survivor.losses == seen[0]["calm"]
    assert survivor.repeated == [5, 6]
    assert survivor.attempts == [(0, s) for s in range(1, 7)] + [(1, s) for s in range(5, 9)]
    assert "resumed after step 4, saved by 2 ranks" in survivor.job.log
    events = read_logs(tmp_path / "run" / "events")
    assert [line["event"] for line in events[1]].count("end") == 1  # the killed attempt could not say goodbye


# --- a full disk -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 9 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk that is really full needs the right to mount a small one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _until_full(folder: str) -> tuple[list[str], str | None, int]:
    trainer = Trainer(TrainConfig(folder=folder, **SETTINGS | {"keep": 8}))
    said, whole = [], []
    try:
        while len(whole) < 8:
            trainer.train_step()
            trainer.save(wait=False)
            trainer.finish_saving()
            whole = [path.name for path in complete_checkpoints(trainer.checkpoints)]
    except RuntimeError as error:
        said.append(str(error))
    again = Trainer(TrainConfig(folder=folder, **SETTINGS))
    resume(again)
    return said, explain(said[0]) if said else None, again.step


def test_a_full_disk_is_one_sentence_and_the_checkpoints_before_it_load(small_disk):
    for said, meaning, step in run_ranks(_until_full, 2, str(small_disk)):
        (text,) = said
        assert text.startswith("saving step-0000000")
        assert "the disk is full" in meaning.lower()
        whole = complete_checkpoints(small_disk / "checkpoints")
        assert step == len(whole) > 0


def test_room_is_looked_for_before_a_checkpoint_is_written(tmp_path, monkeypatch):
    check_room(tmp_path)  # the first one is of unknown size
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    (folder / "training.json").write_text("{}")
    (folder / "__0_0.distcp").write_bytes(bytes(4998))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda path: usage._replace(free=5000))
    check_room(tmp_path)
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda path: usage._replace(free=4999))
    with pytest.raises(ValueError, match="step-00000003 is whole, and the run resumes from there"):
        check_room(tmp_path)


# --- a stale rendezvous, and other errors in one sentence ---------------------------------------------------


def test_the_real_error_of_a_taken_port_is_explained():
    # Which type it is, is PyTorch's affair.
    with socket.create_server(("127.0.0.1", 0)) as old_job, pytest.raises(Exception) as caught:  # noqa: PT011
        dist.TCPStore("127.0.0.1", old_job.getsockname()[1], 1, is_master=True)
    assert explain(str(caught.value)).startswith("The rendezvous port is taken")


def test_the_real_error_of_a_closed_rendezvous_is_explained():
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    options = {"store_type": "tcp", "is_host": "1", "read_timeout": "5"}
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 1, 1, **options)
    backend, store = create_backend(parameters)
    old = create_handler(store, backend, parameters)
    old.set_closed()
    new = create_handler(store, backend, parameters)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        new.next_rendezvous()
    assert explain(f"{type(caught.value).__name__}: {caught.value}").startswith("The rendezvous is closed")


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (
            "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection "
            "refused, remote=[127.0.0.1]:12697$1",
            "A rank looked for another one at an address where nobody is any more",
        ),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "A file of the checkpoint"),
        ("exitcode  : -9 (pid: 7)", "A rank was killed with signal 9"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=680", "A collective was not"),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:4711", "Another rank ended first"),
        ("Connection closed by peer ... OSError: [Errno 28] No space left on device", "The disk is full"),
    ],
)
def test_known_errors(text, begins):
    assert explain(text).startswith(begins)


def test_what_is_not_known_is_not_explained():
    assert explain("KeyError: 'x'") is None


def test_one_sentence_ends_a_script(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "_exit", sys.exit)
    ends = []
    for error in (OSError(28, "No space left on device"), ValueError("steps=0"), KeyError("x")):
        with pytest.raises(SystemExit) as left, one_sentence():
            raise error
        assert left.value.code == 1
        ends.append(capsys.readouterr().err.strip().splitlines())
    full_text, wrong_text, bug_text = ends
    assert len(full_text) == 1
    assert full_text[0].startswith("rank 1: The disk is full")
    assert wrong_text == ["rank 1: steps=0"]
    assert bug_text[0].startswith("Traceback")
    assert bug_text[-1] == "rank 1: KeyError: 'x'"


# --- torchrun ----------------------------------------------------------------------------------------------


def test_a_job_that_does_not_end_is_ended_with_all_its_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('never')\n")
    seen: set[int] = set()

    def look(agent: subprocess.Popen) -> bool:
        seen.add(agent.pid)
        return False

    with pytest.raises(TimeoutError, match=r"on 2 ranks has not ended after 0\.3 s"):
        torchrun(script, ranks=2, timeout=0.3, meanwhile=look)
    (agent,) = seen
    assert not descendants(agent)
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)


FACTS = """
import json, os, signal, sys
import beside

facts = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__file__,
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals if s.name.startswith("SIG")},
    "leads its session": os.getsid(0) == os.getpid(),
}
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "alone")
with open(f"{sys.argv[1]}/{attempt}-{os.environ.get('RANK', '0')}", "w") as file:
    json.dump(facts | {"preloaded": "colorsys" in sys.modules}, file)
if attempt == "0" and os.environ["RANK"] == "1":
    sys.exit(7)
"""


def test_a_rank_of_torchrun_is_like_a_process_of_its_own(tmp_path):
    """Whether it was forked or not; and an exit code of its own is an error, after which all start again."""
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    # torchrun handles these four, so that no rank inherits that they are ignored, as under nohup they are here.
    alone = (
        "import os, signal, sys\n"
        "for name in ('SIGTERM', 'SIGINT', 'SIGHUP', 'SIGQUIT'):\n"
        "    signal.signal(getattr(signal, name), signal.SIG_DFL)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", alone, str(script), str(tmp_path)]
    subprocess.run(command, check=True, start_new_session=True)
    job = torchrun(script, str(tmp_path), ranks=2, max_restarts=1, preload=["colorsys"])
    assert (job.returncode, job.restarts) == (0, 1)
    assert "exitcode: 7" in job.log
    facts = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*-[01]")}
    assert facts.keys() >= {"alone-0", "1-0", "1-1"}
    preloaded = {facts[name].pop("preloaded") for name in facts if name != "alone-0"}
    assert preloaded == {sys.platform == "linux"}
    assert not facts["alone-0"].pop("preloaded")
    for name, seen in facts.items():
        assert seen == facts["alone-0"], name


MEET = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(f"met at {os.environ['MASTER_ADDR']}")
dist.destroy_process_group()
"""


def test_ranks_meet_on_a_machine_that_nobody_knows_by_name(tmp_path, monkeypatch):
    """In a namespace where the host has a name without an address, torchrun's own choice of where to meet hangs."""
    unshare = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    nameless = [*unshare, "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*nameless, "true"], capture_output=True).returncode:
        pytest.skip("another host name needs unshare and the right to a namespace")
    (tmp_path / "meet.py").write_text(MEET)
    usual = elastic.agent_command
    monkeypatch.setattr(elastic, "agent_command", lambda preload: [*nameless, *usual(preload)])
    job = torchrun(tmp_path / "meet.py", ranks=2, timeout=60)
    assert job.returncode == 0, job.log
    assert job.log.count("met at 127.0.0.1") == 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: torchrun("nowhere.py"), "script='nowhere.py' is not a file"),
        (lambda: kill_and_resume("x", SETTINGS, kill=(2, 3)), r"kill=\(2, 3\) must name one of 2 ranks"),
        (lambda: kill_and_resume("x", SETTINGS, kill=(0, 8)), "a step before the last, which is 8"),
        (lambda: kill_and_resume("x", SETTINGS, ranks=3), "3 ranks do not divide global_batch=4"),
    ],
)
def test_bad_input_is_one_sentence(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_checkpoint_of_another_run_is_refused_on_all_ranks(seen):
    folder = str(seen[0]["top"] / "calm")
    with pytest.raises(RankError, match=r"is of another run: lr was 0\.001 and is 0\.1"):
        run_ranks(_other_settings, 2, folder)


def _other_settings(folder: str) -> None:
    resume(Trainer(TrainConfig(folder=folder, **SETTINGS | {"lr": 0.1})))


@pytest.mark.parametrize("content", ["[]", '{"step": 1, "fi'])
def test_a_checkpoint_whose_description_is_damaged_is_named(tmp_path, content):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "training.json").write_text(content)
    with pytest.raises(ValueError, match=r"step-00000001 is damaged: training\.json cannot be read"):
        read_info(folder)


def test_a_run_in_the_background_stays_deaf_to_ctrl_c_and_stops_on_sigterm():
    """A shell starts what ends in `&` with SIGINT ignored, so that Ctrl-C ends only what runs in front."""
    said = []
    trainer = SimpleNamespace(request_stop=said.append, outcome="failed")
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGHUP)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        watch = StopOnSignal()
        watch.on_start(trainer)
        for number in before:
            os.kill(os.getpid(), number)
        watch.on_end(trainer)
        assert said == ["SIGTERM"]
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _preflight(*options: str) -> tuple[int, str]:
    """Run the script on ranks that are there already."""
    script = load("labs/scripts/preflight.py")
    script.launched_ranks = lambda: nullcontext(torch.device("cpu"))
    sys.argv = ["preflight.py", *options]
    with redirect_stdout(io.StringIO()) as said:
        return script.main(), said.getvalue()


def test_the_preflight_names_what_is_below_what_you_expect():
    (code, said), (other, silent) = run_ranks(_preflight, 2, "--mb", "2", "--slow", "1000", "--expect", "1000")
    assert (code, other, silent) == (1, 0, "")
    assert re.search(r"2 MB over 2 ranks: each sends [\d.]+ GB/s; a product takes [\d.]+ ms", said)
    assert "that is below the 1000 GB/s that you expect" in said
    assert "wrong sum" not in said
    assert run_ranks(_preflight, 2, "--mb", "2", "--slow", "1000")[0][0] == 0
