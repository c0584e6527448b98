"""Logs that survive a kill, a screen that says who is silent, stragglers found before the collective, hangs read."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lablib.launch import debug_detail, flight_recorder
from lablib.launch.flight_recorder import compare
from lablib.launch.json_lines import JsonLines, read_json_lines
from lablib.launch.live_view import curve, screen
from lablib.launch.rank_log import RankLog, read_logs
from lablib.launch.ranks import run_ranks
from lablib.launch.run_status import status
from lablib.launch.straggler_watch import StragglerWatch, find_straggler, probe
from lablib.launch.tensorboard_log import SCALARS, TensorBoard


def test_a_log_is_read_back(tmp_path):
    log = RankLog(tmp_path, rank=3, clock=iter([1.5, 2.5]).__next__)
    log.write("step", loss=torch.tensor(2.0), bad=float("nan"))
    log.write("end", outcome="finished")
    log.close()
    assert read_logs(tmp_path) == {
        3: [
            {"time": 1.5, "event": "step", "loss": 2.0, "bad": "nan"},
            {"time": 2.5, "event": "end", "outcome": "finished"},
        ]
    }


def test_every_cut_of_a_log_is_readable_and_goes_on(tmp_path):
    log = RankLog(tmp_path, rank=0)
    for step in range(3):
        log.write("step", step=step)
    log.close()
    whole = log.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        log.path.write_bytes(whole[:cut])
        again = RankLog(tmp_path, rank=0)  # the restarted rank
        again.write("step", step=99)
        again.close()
        steps = [line["step"] for line in read_json_lines(log.path)]
        kept = sum(end <= cut for end in ends) + (cut + 1 in ends)  # a line that lacks only its end is whole
        assert steps == [*range(kept), 99]


# --- how a run stands --------------------------------------------------------------------------------------


def metrics(rank: int, step: int, **values: object) -> dict:
    base = {
        "step": step,
        "rank": rank,
        "world_size": 2,
        "loss": 5 - 0.1 * step,
        "seconds": 0.5,
        "report_seconds": 0.05,
        "between_seconds": 0.1,
        "tokens_per_second": 1234.5,
        "mfu": None,
        "memory_bytes": 3 * 2**30,
        "attempt": 1,
        "time": 100.0 + step,
    }
    return base | values


def write_run(folder: Path, ranks: dict[int, list[dict]], steps: int = 20) -> None:
    (folder / "run.json").write_text(json.dumps({"config": {"steps": steps}}))
    for rank, lines in ranks.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"metrics-rank{rank}.jsonl").write_text(text)


def test_the_status_of_a_run(tmp_path):
    ranks = {r: [metrics(r, step) for step in range(1, 11 - r)] for r in range(2)}
    stale = [
        metrics(2, step, world_size=3, time=50.0) for step in range(1, 4)
    ]  # of an attempt with three ranks
    write_run(tmp_path, ranks | {2: stale})
    run = status(tmp_path, now=112.0)
    assert [each.rank for each in run.ranks] == [0, 1]
    assert (run.step, run.steps) == (9, 20)
    assert run.remaining == pytest.approx(11 * 0.6)
    assert run.ranks[0].waiting == pytest.approx(0.1)
    assert [each.silent for each in run.ranks] == [False, False]
    assert [each.silent for each in status(tmp_path, now=114.5).ranks] == [False, True]


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match="no rank has taken a step"):
        status(tmp_path, now=0.0)


@pytest.mark.parametrize("name", ["r", "run-" * 50], ids=["short", "long"])
def test_the_screen_fits_and_names_the_silent(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    console = pytest.importorskip("rich.console", reason="rich, which typer brings, is missing")
    write_run(
        folder,
        {
            0: [metrics(0, step, mfu=0.42) for step in range(1, 10)],
            1: [metrics(1, step) for step in range(1, 6)],
        },
    )
    out = console.Console(width=80, record=True, file=io.StringIO())
    out.print(screen(status(folder, now=110.5)))
    text = out.export_text()
    assert (
        len(text.splitlines()) == 7
    )  # nothing is broken into two: title, head, two ranks, three lines below
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.splitlines()[0].rstrip().endswith(f"{name[-20:]}: step 5 of 20")
    for part in ("42.0%", "3.00", "1,23", "no checkpoint yet", "silent: rank 1;"):
        assert part in text


def test_many_ranks_fit_on_the_screen_and_the_slow_one_is_there(tmp_path):
    console = pytest.importorskip("rich.console", reason="rich, which typer brings, is missing")
    write_run(
        tmp_path,
        {r: [metrics(r, s, world_size=64, seconds=0.5 + (r == 50)) for s in range(1, 9)] for r in range(64)},
    )
    out = console.Console(width=80, record=True, file=io.StringIO())
    out.print(screen(status(tmp_path, now=108.5)))
    lines = out.export_text().splitlines()
    assert len(lines) <= 24
    assert any(line.split()[:1] == ["50"] for line in lines)
    assert "and 48 more ranks, not slower than these" in lines


def test_without_rich_one_sentence(tmp_path, monkeypatch):
    write_run(tmp_path, {0: [metrics(0, 1)]})
    run = status(tmp_path, now=101.0)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ModuleNotFoundError, match="which typer brings"):
        screen(run)


def test_a_curve():
    assert curve([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert curve([2.0] * 7, 3) == "▁▁▁"
    assert len(curve(list(range(1000)), 40)) == 40


# --- TensorBoard -------------------------------------------------------------------------------------------


MADE: list[Writer] = []


class Writer:
    """Stands in for SummaryWriter, which needs the extra."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        MADE.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_the_scalars_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    MADE.clear()
    for rank in range(2):
        trainer = types.SimpleNamespace(rank=rank, step=7, folder=tmp_path)
        board = TensorBoard()
        board.on_start(trainer)
        board.on_step(trainer, metrics(rank, 8, grad_norm=1.0, lr=1e-3))
        board.on_end(trainer)
    (writer,) = MADE
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.purge_step == 8
    assert [name for name, _, _ in writer.scalars] == [name for name in SCALARS if name != "mfu"]
    assert {step for _, _, step in writer.scalars} == {8}
    assert writer.closed


def test_without_tensorboard_one_sentence_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="TensorBoard is an extra: pip install"):
        TensorBoard()


# --- stragglers --------------------------------------------------------------------------------------------


class Worker:
    """A rank whose clock counts its own work, as processor time does."""

    def __init__(self, speed: float) -> None:
        self.worked, self.speed = 0.0, speed

    def step(self) -> float:
        """Work, then meet the others; return how long the step took, which is as long as the slowest works."""
        self.worked += self.speed
        wall = torch.tensor(self.speed)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        return wall.item()


def watched_steps(slow: int | None) -> tuple[list[float], list[tuple[int, int, float]]]:
    rank = dist.get_rank()
    worker = Worker(3.0 if rank == slow else 1.0)
    watch = StragglerWatch(every=4, clock=lambda: worker.worked)
    trainer = types.SimpleNamespace(step=0, device=torch.device("cpu"))
    watch.on_start(trainer)
    walls = []
    for trainer.step in range(1, 10):
        walls.append(worker.step())
        watch.on_step(trainer, {})
    return walls, [(step, found.rank, found.waiting) for step, found in watch.findings]


def test_the_slow_rank_is_found_before_the_collective_where_step_times_say_nothing():
    results = run_ranks(lambda: [watched_steps(slow) for slow in (1, None)], 3)
    for (walls, findings), (_, calm) in results:
        assert walls == [3.0] * 9  # after the collective, all ranks have taken equally long
        assert findings == [(4, 1, pytest.approx(2 / 3)), (8, 1, pytest.approx(2 / 3))]
        assert calm == []


def test_one_slow_step_is_no_straggler():
    steady = [1.0] * 9
    assert find_straggler([steady, [*steady[:4], 50.0, *steady[5:]]]) is None
    found = find_straggler([[1.1] * 5, [1.0] * 5, [2.0] * 5, [0.9] * 5])
    assert (found.rank, found.busy, found.others) == (2, 2.0, 1.0)
    assert str(found) == "rank 2 works 2 s where the others work 1 s: they wait 50% of the time"


@pytest.mark.parametrize(("times", "factor"), [([[1.0]], 2), ([[1.0], []], 2), ([[1.0], [1.0]], 1)])
def test_bad_times(times, factor):
    with pytest.raises(ValueError, match="must be at least 2, each with a time"):
        find_straggler(times, factor)


def test_a_probe_takes_time(monkeypatch):
    monkeypatch.setattr("lablib.launch.straggler_watch._SIDE", 8)
    times = probe(torch.device("cpu"), repeats=3)
    assert len(times) == 3
    assert min(times) > 0


# --- hangs -------------------------------------------------------------------------------------------------


def test_debug_detail_names_both_collectives():
    zero, one = debug_detail.messages(debug_detail.mismatched)
    for text in (zero, one):
        assert "Detected mismatch between collectives on ranks" in text
        assert "OpType=ALLREDUCE, TensorShape=[4]" in text
        assert "OpType=BROADCAST, TensorShape=[3]" in text


def test_debug_detail_has_nothing_to_say_where_all_is_well():
    assert debug_detail.messages(lambda group: dist.all_reduce(torch.ones(2), group=group)) == ["", ""]


def entry(number: int, op: str = "all_reduce", size: int = 4, group: str = "0", **values: object) -> dict:
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
        "frames": [
            {"filename": "/site-packages/torch/distributed/x.py", "line": 1, "name": "all_reduce"},
            {"filename": "/home/me/train.py", "line": 12, "name": "step"},
        ],
        **values,
    }


def write_dumps(folder: Path, *ranks: list[dict]) -> None:
    for rank, entries in enumerate(ranks):
        path = folder / f"{flight_recorder.PREFIX}{rank}"
        path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (
            ([entry(1), entry(2)], [entry(1), entry(2)]),
            "All ranks recorded the same calls.",
        ),
        (
            ([entry(1), entry(2), entry(3)], [entry(1), entry(2)], [entry(1), entry(2), entry(3)]),
            "rank 1 never came to call 3, where rank 0 waits in all_reduce of [4] Float (train.py, line 12, in step)",
        ),
        (
            ([entry(1), entry(2)], [entry(1), entry(2, size=5)]),
            "call 2 is not the same on all ranks: rank 0: all_reduce of [4] Float (train.py, line 12, in step); "
            "rank 1: all_reduce of [5] Float (train.py, line 12, in step)",
        ),
        (  # the ring of rank 0 has lost its first calls
            ([entry(5), entry(6)], [entry(number) for number in range(1, 7)]),
            "All ranks recorded the same calls.",
        ),
        (  # groups count for themselves, and a rank outside a group is not missed there
            ([entry(1), entry(1, group="tp")], [entry(1)]),
            "All ranks recorded the same calls.",
        ),
        (  # point-to-point calls have numbers of their own
            ([entry(1), entry(9, op="send", is_p2p=True)], [entry(1)]),
            "All ranks recorded the same calls.",
        ),
    ],
)
def test_reading_dumps(tmp_path, ranks, told):
    write_dumps(tmp_path, *ranks)
    assert compare(flight_recorder.read(tmp_path)) == told


def test_a_dump_cannot_run_code(tmp_path):
    path = tmp_path / f"{flight_recorder.PREFIX}0"
    path.write_bytes(pickle.dumps({"entries": [Path("/tmp")]}))
    with pytest.raises(ValueError, match="it wants to load pathlib"):
        flight_recorder.read(tmp_path)
    path.write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match="is no dump of the flight recorder"):
        flight_recorder.read(tmp_path)


def test_no_dump_and_no_ring(tmp_path):
    with pytest.raises(ValueError, match=r"was the job started with flight_recorder\.settings"):
        flight_recorder.read(tmp_path)
    with pytest.raises(ValueError, match="entries=0 must be at least 1"):
        flight_recorder.settings(tmp_path, entries=0)


def test_a_line_that_does_not_fit_on_the_disk_costs_only_itself(tmp_path, monkeypatch):
    log, write = JsonLines(tmp_path / "a" / "x.jsonl"), os.write
    log.write({"step": 1})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, content: write(file, content[:5]))
        with pytest.raises(OSError, match="No space left on device"):
            log.write({"step": 2})
    log.write({"step": 3})
    log.close()
    assert [line["step"] for line in read_json_lines(log.path)] == [1, 3]
