"""Memory snapshots of a GPU: a simulated allocator knows the truth, and PyTorch's own viewer reads the same files."""

from __future__ import annotations

import json
import os
import pickle
import random

import pytest
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from lablib.calc.runs import load_snapshot, replay_snapshot
from lablib.calc.runs.cuda_snapshot import BEFORE, NO_FRAMES, Block
from lablib.cli.main import app
from tests.caching_allocator import MIB, OutOfMemory, Simulated, snapshot


def frame(filename: str, line: int, name: str) -> dict:
    return {"filename": filename, "line": line, "name": name}


def play(seed: int, *, before: int = 30, events: int = 70, **how) -> tuple[Simulated, list[tuple]]:
    """Return an allocator after a random program, recorded from its middle on, and what it held on the way."""
    draw, device, instants, lines = random.Random(seed), Simulated(**how), [], {}
    for step in range(before + events):
        if step == before:
            device.record()
            lines = dict.fromkeys(device.live(), BEFORE)
        if draw.random() < 0.6 or not device.live():
            line = draw.randrange(5)
            device.frames = [frame("/home/me/m.py", line, "forward")]
            lines[device.malloc(draw.choice((700, 5000, 5120, MIB, 3 * MIB)))] = f"me/m.py:{line} forward"
        else:
            device.free(draw.choice(device.live()))
        held: dict[str, int] = {}
        for address in device.live():
            held[lines.get(address)] = held.get(lines.get(address), 0) + device.blocks[address]["requested_size"]
        instants.append((len(device.trace), dict(device.now), held))
    return device, instants[before:]


@pytest.mark.parametrize("before", [0, 30])
def test_a_replay_finds_what_the_allocator_counted(before: int) -> None:
    for seed in (random.randrange(10**6) for _ in range(5)):
        print(f"seed {seed}")
        device, instants = play(seed, before=before)
        history = replay_snapshot(snapshot(device))
        assert history.missing == 0
        assert max(history.requested) == device.most["requested"]
        assert max(history.reserved) == device.most["reserved"]
        for number, truth, lines in instants:
            held = history.at(number)
            assert (held.requested, held.reserved) == (truth["requested"], truth["reserved"])
            assert held.rounded == truth["allocated"]
            assert held.by_line() == lines
            assert sum(held.by_module().values()) == held.requested
        assert history.peak().requested == max(history.requested)
        assert history.end().requested == device.now["requested"]


def test_pytorchs_own_viewer_reads_the_same_snapshot() -> None:
    device, _ = play(7)
    found = snapshot(device)
    held = replay_snapshot(found).end()
    assert f"total_reserved: {_memory_viz.Bytes(held.reserved)}\n" in _memory_viz.segsum(found)
    # One line of its flame graph for each block: stream, state, stack, bytes asked for.
    theirs = 0
    for line in _memory_viz.memory(found, format_flamegraph=str).splitlines():
        stack, _, size = line.rpartition(" ")
        if not stack.endswith("<gaps>") and ";inactive" not in stack:
            theirs += int(size)
    assert theirs == held.requested


def test_a_cut_trace_says_so_and_is_right_behind_the_cut() -> None:
    device, _ = play(3, events=90)
    full, part = replay_snapshot(snapshot(device)), replay_snapshot(snapshot(device, max_entries=25))
    assert full.missing == 0 < part.missing
    assert part.requested == full.requested[-26:]
    assert part.reserved == full.reserved[-26:]


def test_two_gpus_are_told_apart() -> None:
    first, second = play(11)[0], play(12, base=0x100000)[0]
    found = snapshot(first, second)
    with pytest.raises(ValueError, match="has devices 0, 1: say which one, device=0"):
        replay_snapshot(found)
    with pytest.raises(ValueError, match="nothing of device 2"):
        replay_snapshot(found, 2)
    for number, device in enumerate((first, second)):
        assert max(replay_snapshot(found, number).requested) == device.most["requested"]


def test_segments_alone_are_an_end_without_a_history() -> None:
    device, _ = play(5)
    history = replay_snapshot(snapshot(device)["segments"])
    assert history.peak() == history.end()
    assert history.end().requested == device.now["requested"]
    assert replay_snapshot({"segments": [], "device_traces": [[]]}).peak().reserved == 0


@pytest.mark.parametrize("action", ["alloc", "free_completed"])
def test_a_trace_without_some_events_is_refused(action: str) -> None:
    device = Simulated()
    device.record()
    device.free(device.malloc(700))
    device.malloc(700)
    found = snapshot(device)
    found["device_traces"][0] = [event for event in found["device_traces"][0] if event["action"] != action]
    with pytest.raises(ValueError, match=r"event \d .*contradicts the others"):
        replay_snapshot(found)


def test_a_block_belongs_to_the_line_outside_of_pytorch() -> None:
    torch_frame = frame("/x/site-packages/torch/nn/functional.py", 2, "linear")
    inner = frame("/x/site-packages/transformers/models/llama/modeling_llama.py", 9, "forward")
    outer = frame("C:\\me\\model.py", 4, "forward")
    block = Block(1, (frame("??", 0, "at::empty"), torch_frame, inner, torch_frame, outer))
    assert block.line == "llama/modeling_llama.py:9 forward"
    assert block.module == "me/model.py:4 > llama/modeling_llama.py:9"
    assert Block(1, (torch_frame,)).line == NO_FRAMES
    assert Block(1, recorded=True).line == NO_FRAMES
    assert Block(1).module == BEFORE


class _Code:
    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_file_with_code_in_it_is_refused_and_runs_nothing(tmp_path) -> None:
    code = _Code()
    _Code.target = tmp_path / "ran"
    path = tmp_path / "stranger.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [code]}))
    with pytest.raises(ValueError, match=r"it asks for .*system, and a snapshot needs no code"):
        load_snapshot(path)
    assert not _Code.target.exists()
    pickle.loads(path.read_bytes())  # the proof that it would have
    assert _Code.target.exists()


BLOCK = {"size": 512, "state": "inactive"}
SEGMENT = {"address": 0, "total_size": 512, "blocks": [BLOCK]}


@pytest.mark.parametrize(
    "found",
    [
        {"weights": 1},
        3.5,
        {"segments": [], "device_traces": 7},
        {"segments": [{}]},
        {"segments": [SEGMENT | {"blocks": None}]},
        {"segments": [SEGMENT | {"blocks": [BLOCK | {"state": "lost"}]}]},
        {"segments": [], "device_traces": [[7]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1}]]},
        {"segments": [], "device_traces": [[{"action": "oom"}]]},
        {"segments": [], "device_traces": [[{"action": "x", "frames": [1]}]]},
    ],
)
def test_what_is_no_snapshot_is_said(tmp_path, found) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"other.pickle cannot be read as a snapshot: [^\n]+make one with"):
        load_snapshot(path)


def test_a_file_that_is_cut_off_is_said_wherever_it_ends(tmp_path) -> None:
    whole = pickle.dumps(snapshot(play(2, events=10)[0]))
    path = tmp_path / "half.pickle"
    for length in range(0, len(whole), 211):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"half.pickle cannot be read as a snapshot: [^\n]+$"):
            load_snapshot(path)


@pytest.fixture
def dumped(tmp_path):
    device = Simulated(capacity=50 * MIB)
    device.record()
    device.frames = [frame("/job/train.py", 12, "step")]
    device.malloc(30 * MIB)
    device.frames = [frame("/job/model.py", 7, "forward"), frame("/job/train.py", 12, "step")]
    device.free(device.malloc(8 * MIB))
    with pytest.raises(OutOfMemory):
        device.malloc(40 * MIB)
    path = tmp_path / "oom.pickle"
    path.write_bytes(pickle.dumps(snapshot(device)))
    return path


def rung(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["memory-snapshot", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_prints_the_peak_and_its_lines(dumped) -> None:
    code, text = rung(dumped, "--unit", "MiB")
    assert code == 0
    words = " ".join(text.split())
    for sentence in (
        "GPU 0, peak: after event 4 of 8",
        "requested by the program 38.000 MiB",
        "reserved = 38.000 MiB",
        "30.000 MiB 78.9% job/train.py:12 step",
        "8.000 MiB 21.1% job/model.py:7 forward",
        "out of memory at event 8: 40.000 MiB asked for. --at oom shows that instant",
    ):
        assert sentence in words
    code, text = rung(dumped, "--at", "oom", "--top", "1", "--by", "module")
    assert code == 0
    assert "100.0%  job/train.py:12 step" in text
    code, text = rung(dumped, "--json", "--at", "end")
    assert json.loads(text)["groups"] == {"job/train.py:12 step": 30 * MIB}


def test_the_command_refuses_in_one_sentence(dumped, tmp_path) -> None:
    for arguments, message in (
        (("--at", "start"), "unknown at 'start'"),
        (("--by", "tensor"), "unknown by 'tensor'"),
        (("--unit", "pounds"), "unknown unit 'pounds'"),
        (("--device", "3"), "nothing of device 3"),
    ):
        code, text = rung(dumped, *arguments)
        assert code == 2
        assert message in text
        assert text.count("\n") == 1
    assert rung(tmp_path / "none.pickle")[0] == 2


def test_the_command_says_what_the_snapshot_cannot_tell(tmp_path) -> None:
    path = tmp_path / "some.pickle"
    device = Simulated()
    device.malloc(900)
    path.write_bytes(pickle.dumps(snapshot(device)))
    code, text = rung(path)
    assert code == 0
    assert "the snapshot has no events" in text
    assert "no out-of-memory event" in rung(path, "--at", "oom")[1]
    path.write_bytes(pickle.dumps(snapshot(play(3, events=90)[0], max_entries=25)))
    assert "their events are lost" in rung(path)[1]
    device.record()
    for _ in range(600):
        device.free(device.malloc(900))
    path.write_bytes(pickle.dumps(snapshot(device, max_entries=1000)))
    assert "it has exactly 1,000 events" in rung(path)[1]
