"""Memory snapshots of a GPU: a simulated allocator knows the truth, and PyTorch's own viewer reads the same files."""

from __future__ import annotations

import json
import os
import pickle
import random

import pytest
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from lablib.calc.cuda_snapshot import devices, replay
from lablib.calc.cuda_snapshot_blocks import BEFORE, NO_FRAMES, Block
from lablib.calc.cuda_snapshot_file import checked, load_snapshot
from lablib.cli.main import app
from tests.caching_allocator import KINDS, MIB, OutOfMemory, Simulated, snapshot

TOTALS = KINDS[:4]


def frame(filename: str, line: int, name: str) -> dict:
    return {"filename": filename, "line": line, "name": name}


def play(seed: int, *, before: int = 30, events: int = 70, **how) -> tuple[Simulated, list[tuple[int, dict]]]:
    """Return an allocator after a random program, recorded from its middle on, and some instants of it."""
    draw, device, instants = random.Random(seed), Simulated(**how), []
    sizes = [
        lambda: draw.randrange(1, 3000),
        lambda: draw.randrange(1, 2 * MIB),
        lambda: draw.randrange(1, 30 * MIB),
    ]

    def act() -> None:
        held, waiting = device.live()
        chance = draw.random()
        if chance < 0.55 or not held:
            device.frames = [frame(f"/home/me/m{draw.randrange(3)}.py", draw.randrange(5), "forward")]
            device.malloc(draw.choice(sizes)())
        elif chance < 0.9:
            device.free(draw.choice(held), wait=draw.random() < 0.2)
        elif chance < 0.98 and waiting:
            device.complete(draw.choice(waiting))
        elif chance > 0.985:
            device.empty_cache()

    for _ in range(before):
        act()
    device.record()
    for _ in range(events):
        act()
        if draw.random() < 0.1 and how.get("max_entries") is None:
            instants.append((len(device.trace), dict(device.now)))
    return device, instants


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("before", [0, 30])
def test_a_replay_finds_what_the_allocator_counted(before: int, expandable: bool) -> None:
    # 697633: a block from before the trace, whose neighbour is freed since, is as large as it was made.
    for seed in [697633, *(random.randrange(10**6) for _ in range(4))]:
        print(f"seed {seed}")
        device, instants = play(seed, before=before, expandable=expandable)
        history = replay(checked(snapshot(device)))
        assert (history.missing, history.disagree) == (0, 0)
        # Only what was made before the trace can have a remainder that nothing tells of.
        slack = dict.fromkeys(TOTALS, 0) | dict.fromkeys(("allocated", "active"), history.unsure)
        assert before or not history.unsure
        for kind in TOTALS:
            assert 0 <= device.most[kind] - max(getattr(history, kind)) <= slack[kind]
        for instant, truth in [*instants, (len(device.trace), device.now)]:
            held = history.at(instant)
            for kind in TOTALS:
                assert 0 <= truth[kind] - getattr(held, kind) <= slack[kind]
            assert abs(held.split_free - truth["inactive_split"]) <= history.unsure
            assert min(held.rounding, held.not_split, held.waiting, held.cached, held.split_free) >= 0
            assert sum(held.by_site().values()) == sum(held.by_module().values()) == held.requested
        assert {kind: getattr(history.end(), kind) for kind in TOTALS} == {k: device.now[k] for k in TOTALS}
        assert history.peak().allocated == max(history.allocated)
        assert [block.address for block in history.end().blocks] == sorted(
            device.live()[0] + device.live()[1]
        )


def test_a_remainder_that_nothing_tells_of_is_said() -> None:
    for neighbour_lives in (True, False):
        device = Simulated()
        first, neighbour = device.malloc(6 * MIB), device.malloc(6 * MIB)
        device.free(first)
        first = device.malloc(int(5.5 * MIB))  # of the first 6 MiB; half a MiB is left, and stays its own
        if not neighbour_lives:
            device.free(neighbour)
        device.record()
        device.free(first)
        history = replay(checked(snapshot(device)))
        assert device.most["allocated"] == (12 if neighbour_lives else 6) * MIB
        # A neighbour shows where the block ends. Without one it might as well have been split there.
        assert history.unsure == (0 if neighbour_lives else MIB)
        assert device.most["allocated"] - max(history.allocated) == (0 if neighbour_lives else MIB // 2)


def test_the_parts_of_a_small_example_are_those_by_hand() -> None:
    device = Simulated()
    device.record()
    device.malloc(600)  # 1,024 bytes of a segment of 2 MiB
    device.malloc(3 * MIB)  # of a segment of 20 MiB
    device.malloc(19 * MIB + MIB // 2)  # a segment of 20 MiB to itself: the half MiB that is left is no block
    large = device.malloc(2 * MIB)
    device.free(large, wait=True)
    held = replay(checked(snapshot(device))).end()
    assert held.requested == 600 + int(24.5 * MIB)
    assert held.rounding == 424
    assert held.not_split == MIB // 2
    assert held.active == 1024 + 25 * MIB
    assert (held.allocated, held.waiting) == (1024 + 23 * MIB, 2 * MIB)
    assert held.reserved == 42 * MIB
    assert held.split_free == (2 * MIB - 1024) + 15 * MIB
    assert held.cached == 0


def test_pytorchs_own_viewer_reads_the_same_snapshot() -> None:
    device, _ = play(7)
    found = snapshot(device)
    held = replay(checked(found)).end()
    assert f"{len(device.trace)} entries" in _memory_viz.trace(found)
    total = f"total_reserved: {_memory_viz.Bytes(held.reserved)}\n"
    assert total in _memory_viz.segsum(found)
    assert "snapshot.pickle" in _memory_viz.trace_plot(found)
    # One line of its flame graph for each block: stream, state, stack, bytes asked for.
    flames = _memory_viz.memory(found, format_flamegraph=str).splitlines()
    sites: dict[str, int] = {}
    for line in flames:
        stack, _, size = line.rpartition(" ")
        if not stack.endswith("<gaps>") and ";inactive" not in stack:
            site = stack.rpartition(";")[2]
            sites[site] = sites.get(site, 0) + int(size)
    ours: dict[str, int] = {}
    for block in held.blocks:
        top = _memory_viz._frame_fmt(block.frames[0]) if block.frames else "<non-python>"
        ours[top] = ours.get(top, 0) + block.requested
    assert ours == sites


def test_a_cut_trace_says_so_and_is_right_behind_the_cut() -> None:
    whole, _ = play(3, events=90)
    cut, _ = play(3, events=90, max_entries=25)
    full, part = replay(checked(snapshot(whole))), replay(checked(snapshot(cut)))
    assert full.missing == 0 < part.missing
    assert len(part.events) == 25
    for kind in TOTALS:
        assert getattr(part, kind) == getattr(full, kind)[-26:]


def test_what_was_there_before_has_no_line_and_a_later_recording_misses_nothing() -> None:
    device, _ = play(1, before=40, events=0)
    there = device.now["requested"]
    device.frames = [frame("train.py", 3, "step")]
    device.malloc(5000)
    held = replay(checked(snapshot(device))).peak()
    assert held.by_site() == {BEFORE: there, "train.py:3 step": 5000}


def test_two_gpus_are_told_apart() -> None:
    first, second = play(11)[0], play(12, base=0x100000)[0]
    found = checked(snapshot(first, second))
    assert devices(found) == [0, 1]
    with pytest.raises(ValueError, match="has devices 0, 1: say which one, device=0"):
        replay(found)
    with pytest.raises(ValueError, match="nothing of device 2"):
        replay(found, 2)
    for number, device in enumerate((first, second)):
        assert max(replay(found, number).allocated) == device.most["allocated"]


def test_out_of_memory_is_an_instant() -> None:
    device = Simulated(capacity=50 * MIB)
    device.record()
    kept = device.malloc(30 * MIB)
    device.free(device.malloc(8 * MIB))
    with pytest.raises(OutOfMemory):
        device.malloc(40 * MIB)
    device.free(kept)
    history = replay(checked(snapshot(device)))
    (instant,) = history.out_of_memory()
    assert history.at(instant).allocated == 30 * MIB
    assert history.events[instant - 1]["size"] == 40 * MIB
    assert history.events[instant - 1]["device_free"] == 20 * MIB  # the cached segment was given back first


def test_segments_alone_are_an_end_without_a_history() -> None:
    device, _ = play(5)
    found = checked(snapshot(device)["segments"])
    history = replay(found)
    assert history.events == []
    assert history.peak() == history.end()
    assert history.end().allocated == device.now["allocated"]
    empty = replay(checked({"segments": [], "device_traces": [[]]}))
    assert (empty.peak().reserved, empty.missing) == (0, 0)


def test_other_settings_of_the_allocator_are_noticed() -> None:
    device, _ = play(8, rounding=4096)
    history = replay(checked(snapshot(device)))
    assert history.disagree > 0
    assert max(history.requested) == device.most["requested"]  # this one needs no rule


@pytest.mark.parametrize("action", ["alloc", "free_requested", "free_completed"])
def test_a_trace_without_some_events_is_refused_or_right(action: str) -> None:
    device, _ = play(21, before=0)
    found = snapshot(device)
    found["device_traces"][0] = [event for event in found["device_traces"][0] if event["action"] != action]
    if action == "free_completed":  # then a request is taken for the end, unless the block still waits
        device = Simulated()
        device.record()
        for size in (700, 3 * MIB):
            device.free(device.malloc(size))
        found = snapshot(device)
        found["device_traces"][0] = [e for e in found["device_traces"][0] if e["action"] != action]
        assert max(replay(checked(found)).requested) == 3 * MIB
        return
    with pytest.raises(ValueError, match=r"contradicts the others.*without skip_actions"):
        replay(checked(found))


def test_phases_share_out_the_peak() -> None:
    device = Simulated()
    device.record()
    kept = device.malloc(1000)
    marks = [("forward", device.clock + 1)]
    device.free(device.malloc(5000))
    marks.append(("backward", device.clock + 1))
    device.malloc(2000)
    device.free(kept)
    history = replay(checked(snapshot(device)))
    assert history.by_phase(marks) == {"before": 1000, "forward": 6000, "backward": 3000}
    with pytest.raises(ValueError, match="in the order of time"):
        history.by_phase(marks[::-1])
    for event in history.events:
        del event["time_us"]
    with pytest.raises(ValueError, match="no time_us"):
        history.by_phase(marks)


def test_a_block_belongs_to_the_line_outside_of_pytorch() -> None:
    torch_frame = frame("/x/site-packages/torch/nn/functional.py", 2, "linear")
    inner = frame("/x/site-packages/transformers/models/llama/modeling_llama.py", 9, "forward")
    outer = frame("C:\\me\\model.py", 4, "forward")
    block = Block(
        0, 512, 1, (frame("??", 0, "at::empty"), torch_frame, inner, torch_frame, outer), recorded=True
    )
    assert block.site == "llama/modeling_llama.py:9 forward"
    assert block.module == "me/model.py:4 > llama/modeling_llama.py:9"
    assert Block(0, 512, 1, (torch_frame,), recorded=True).site == NO_FRAMES
    assert Block(0, 512, 1, recorded=True).site == NO_FRAMES
    assert Block(0, 512, 1).module == BEFORE


class _Code:
    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_file_with_code_in_it_is_refused_and_runs_nothing(tmp_path) -> None:
    code = _Code()
    _Code.target = tmp_path / "ran"
    path = tmp_path / "stranger.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [code]}))
    with pytest.raises(
        ValueError, match=r"cannot be read as a snapshot: it asks for .*system, and a snapshot needs no code"
    ):
        load_snapshot(path)
    assert not _Code.target.exists()
    pickle.loads(path.read_bytes())  # the proof that it would have
    assert _Code.target.exists()


BLOCK = {"size": 512, "state": "inactive"}
SEGMENT = {"address": 0, "total_size": 512, "blocks": [BLOCK]}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"weights": 1}, "it has no list of segments"),
        (3.5, "it has no list of segments"),
        ({"segments": [], "device_traces": {}}, "device_traces are not lists"),
        ({"segments": [{}]}, "segment 0 of .* has no number 'address'"),
        ({"segments": [SEGMENT | {"blocks": None}]}, "segment 0 of .* has no list of blocks"),
        ({"segments": [SEGMENT | {"total_size": 513}]}, "has 513 bytes, and its blocks have 512"),
        ({"segments": [SEGMENT | {"blocks": [BLOCK | {"state": "lost"}]}]}, "has state 'lost'"),
        ({"segments": [], "device_traces": [[7]]}, "event 0 of device 0 in .* has no action"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1}]]}, "has no number 'size'"),
        ({"segments": [], "device_traces": [[{"action": "oom"}]]}, "has no number 'size'"),
        (
            {"segments": [], "device_traces": [[{"action": "x", "frames": [1]}]]},
            "has frames that are no stack",
        ),
    ],
)
def test_what_is_no_snapshot_is_said(tmp_path, found, message) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=message):
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


def test_the_command_prints_peak_lines_and_gaps(dumped) -> None:
    code, text = rung(dumped, "--unit", "MiB")
    assert code == 0
    words = " ".join(text.split())
    for sentence in (
        "GPU 0, peak: after event 4 of 8",
        "requested by the program 38.000 MiB",
        "allocated = 38.000 MiB",
        "fragmentation + 12.000 MiB",
        "reserved = 50.000 MiB",
        "30.000 MiB 78.9% job/train.py:12 step",
        "8.000 MiB 21.1% job/model.py:7 forward",
        "out of memory at event 8: 40.000 MiB asked for; CUDA had 20.000 MiB free. --at oom shows that instant",
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
    device = Simulated()
    device.malloc(900)
    (tmp_path / "quiet.pickle").write_bytes(pickle.dumps(snapshot(device)))
    code, text = rung(tmp_path / "quiet.pickle")
    assert code == 0
    assert "the snapshot has no events" in text
    assert "no out-of-memory event" in rung(tmp_path / "quiet.pickle", "--at", "oom")[1]
    cut = play(3, events=90, max_entries=25)[0]
    (tmp_path / "cut.pickle").write_bytes(pickle.dumps(snapshot(cut)))
    assert "their events are lost" in rung(tmp_path / "cut.pickle")[1]
    assert "the trace is full" in rung(dumped, "--max-entries", "8")[1]
    assert "the trace is full" not in rung(dumped, "--max-entries", "9")[1]
    full = Simulated(max_entries=1000)  # nothing that lives to the end was made behind the cut, or before it
    full.record()
    for _ in range(600):
        full.free(full.malloc(900))
    (tmp_path / "full.pickle").write_bytes(pickle.dumps(snapshot(full)))
    assert "it has exactly 1,000 events" in rung(tmp_path / "full.pickle")[1]
    old = Simulated()
    block = old.malloc(3 * MIB)
    old.record()
    old.free(block)
    (tmp_path / "old.pickle").write_bytes(pickle.dumps(snapshot(old)))
    assert "older than the trace may have 0.001 GB more" in rung(tmp_path / "old.pickle")[1]
    other = play(8, rounding=4096)[0]
    (tmp_path / "other.pickle").write_bytes(pickle.dumps(snapshot(other)))
    assert "is an estimate" in rung(tmp_path / "other.pickle")[1]
