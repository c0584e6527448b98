"""Logs that survive a kill, stragglers found before the collective, hangs read."""

from __future__ import annotations

import os
import pickle
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lablib.launch.measure import compare_flight_records, recorder
from lablib.launch.ranks import run_ranks
from lablib.launch.records import JsonLines, RankLog, read_json_lines, read_logs
from lablib.launch.training.callbacks import StragglerWatch, find_straggler


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


# --- hangs -------------------------------------------------------------------------------------------------


def test_debug_detail_names_both_collectives():
    zero, one = recorder.debug_messages(recorder.mismatched_collectives)
    for text in (zero, one):
        assert "Detected mismatch between collectives on ranks" in text
        assert "OpType=ALLREDUCE, TensorShape=[4]" in text
        assert "OpType=BROADCAST, TensorShape=[3]" in text


def test_debug_detail_has_nothing_to_say_where_all_is_well():
    assert recorder.debug_messages(lambda group: dist.all_reduce(torch.ones(2), group=group)) == ["", ""]


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
        path = folder / f"{recorder.PREFIX}{rank}"
        path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (([entry(1), entry(2)], [entry(1), entry(2)]), "All ranks recorded the same calls."),
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
    assert compare_flight_records(recorder.read_flight_records(tmp_path)) == told


def test_a_dump_cannot_run_code(tmp_path):
    path = tmp_path / f"{recorder.PREFIX}0"
    path.write_bytes(pickle.dumps({"entries": [Path("/tmp")]}))
    with pytest.raises(ValueError, match="it wants to load pathlib"):
        recorder.read_flight_records(tmp_path)
    path.write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match="is no dump of the flight recorder"):
        recorder.read_flight_records(tmp_path)


def test_no_dump_and_no_ring(tmp_path):
    with pytest.raises(ValueError, match=r"was the job started with flight_recorder_settings"):
        recorder.read_flight_records(tmp_path)


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
