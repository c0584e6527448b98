"""Traces: hand-made ones whose split is known, and real ones of DDP and FSDP2 with what must be in them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lablib.calc.runs import Trace, annotated_window, merge_intervals, merge_traces, parse_trace, split_time
from lablib.calc.runs.trace import Event
from lablib.launch.measure import record_trace, step_traces
from lablib.launch.measure.step_time import traced_step
from lablib.launch.ranks import run_ranks

LAYERS = 3


def chrome(*events: tuple, rank: int | None = 0, base: int = 0) -> dict:
    """Return a trace as the profiler writes it, from (category, name, microseconds of start, of length, thread)."""
    whole = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}
        for cat, name, ts, dur, tid in events
    ]
    noise = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "ts": 1, "pid": 1, "tid": 1, "id": 1},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": -50, "dur": 1e6, "pid": "Spans", "tid": 0},
    ]
    told = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": noise + whole, **told}


BY_HAND = chrome(
    ("user_annotation", "step", 1000, 100, 1),
    ("cpu_op", "aten::linear", 1000, 30, 1),
    ("cpu_op", "aten::addmm", 1005, 20, 1),  # inside the one before: counts once
    ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1030, 60, 1),  # contains the hook's wait
    ("cpu_op", "MmBackward0", 1030, 60, 1),
    ("cpu_op", "aten::mm", 1040, 20, 1),
    ("cpu_op", "c10d::allreduce_", 1060, 10, 1),
    ("user_annotation", "gloo:all_reduce", 1050, 40, 7),
    ("user_annotation", "gloo:all_reduce", 1055, 20, 8),  # two threads of gloo at once: counts once
)


def test_the_parts_of_a_step_by_hand() -> None:
    """Computing 0-30 and 40-60, on the wire 50-90, the step 0-100: 40 + 30 + 10 + 20 us."""
    trace = parse_trace(BY_HAND)
    kinds = {event.name: event.kind for event in trace.events}
    assert kinds == {
        "step": "annotation",
        "aten::linear": "compute",
        "aten::addmm": "compute",
        "aten::mm": "compute",
        "c10d::allreduce_": "launch",
        "gloo:all_reduce": "communication",
    }
    events = merge_traces([trace])
    part = split_time(events, annotated_window(events, "step"))[0]
    measured = (part.compute, part.communication, part.both, part.idle)
    assert measured == pytest.approx((40e-6, 30e-6, 10e-6, 20e-6))
    assert part.window == pytest.approx(100e-6)
    # Without a window: from the first computation to the end of the last message.
    assert split_time(events)[0].idle == pytest.approx(10e-6)


def test_on_a_gpu_kernels_count_and_operators_do_not() -> None:
    """The processor hands over in 10 us what the GPU does in 80; NCCL's kernel runs beside a product."""
    trace = parse_trace(
        chrome(
            ("cpu_op", "aten::mm", 0, 10, 1),
            ("user_annotation", "nccl:all_reduce", 12, 5, 1),
            ("kernel", "ampere_sgemm_128x64", 20, 40, 7),
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 60, 20),
            ("gpu_memcpy", "Memcpy HtoD", 100, 5, 7),
        )
    )
    part = split_time(merge_traces([trace]))[0]
    assert (part.compute, part.communication, part.both, part.idle) == pytest.approx((25e-6, 40e-6, 20e-6, 0))


def test_ranks_are_put_on_one_clock() -> None:
    """The second trace counts from a millisecond later; what it calls 0 is 1000 us of the first."""
    first = parse_trace(chrome(("cpu_op", "aten::mm", 500, 10, 1), rank=0, base=10**18))
    second = parse_trace(chrome(("cpu_op", "aten::mm", 0, 10, 1), rank=1, base=10**18 + 10**6))
    one, other = merge_traces([second, first])
    assert (one.rank, one.start) == (0, 0)
    assert (other.rank, other.start) == (1, pytest.approx(500e-6))
    both = split_time([one, other])
    assert [part.idle for part in both.values()] == pytest.approx([500e-6, 500e-6])


def test_clocks_of_two_machines_meet_at_an_annotation() -> None:
    """A clock that is three hours off matters no more."""
    traces = [
        parse_trace(
            chrome(
                ("user_annotation", "step", start, 50, 1),
                ("cpu_op", "aten::mm", start + late, 10, 1),
                rank=rank,
                base=base,
            )
        )
        for rank, start, late, base in ((0, 100, 5, 10**18), (1, 900, 7, 10**18 + 3 * 3600 * 10**9))
    ]
    starts = {e.rank: e.start for e in merge_traces(traces, align="step") if e.kind == "compute"}
    assert starts == pytest.approx({0: 5e-6, 1: 7e-6})
    with pytest.raises(ValueError, match="rank 0 has no annotation 'epoch'"):
        merge_traces(traces, align="epoch")


def test_any_events_split_into_the_whole_window() -> None:
    """Against counting the microseconds one by one."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    check_random_events(seed)


def check_random_events(seed: int) -> None:
    """Draw events and a window, and count."""
    draw = random.Random(seed)
    events = []
    for rank in range(3):
        for _ in range(draw.randrange(1, 30)):
            start, kind = draw.randrange(200), draw.choice(["compute", "communication", "launch"])
            events.append(Event(rank, kind, "x", start, start + draw.randrange(40), str(draw.randrange(3))))
    events.append(Event(0, "compute", "x", 0, 1, "0"))
    low, high = sorted(draw.sample(range(240), 2))
    busy: dict[tuple[int, str], set[int]] = {}
    for event in events:
        busy.setdefault((event.rank, event.kind), set()).update(range(int(event.start), int(event.end)))
    for rank, part in split_time(events, (low, high)).items():
        compute, wire = (busy.get((rank, kind), set()) for kind in ("compute", "communication"))
        whole = set(range(low, high))
        expected = (compute - wire, wire - compute, compute & wire, whole - compute - wire)
        assert (part.compute, part.communication, part.both, part.idle) == tuple(len(e & whole) for e in expected)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    """Each with the mend."""
    for call, words in (
        (lambda: parse_trace({"events": []}), "export_chrome_trace"),
        (lambda: parse_trace(chrome(rank=None)), "rank="),
        (lambda: merge_traces([Trace(0, 0, ()), Trace(0, 0, ())]), "a rank has two traces"),
        (lambda: merge_traces([Trace(0, 0, ())]), "no events"),
        (lambda: split_time([]), "neither computation nor communication"),
        (lambda: split_time(merge_traces([parse_trace(BY_HAND)]), (3.0, 3.0)), "window="),
        (lambda: annotated_window([], "epoch"), "'epoch'"),
        (lambda: step_traces("fsdp1"), "wrapper='fsdp1'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert merge_intervals([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(BY_HAND), encoding="utf-8")
    assert parse_trace(file, rank=5).rank == 5


def both_wrappers(folder: str) -> dict[str, Trace]:
    """Return this rank's traces of DDP, FSDP2, and of a step that only waits for a message."""
    x = torch.ones(2**16)
    return {
        "ddp": traced_step("ddp", 128, LAYERS, 64, 2**10, folder),
        "fsdp2": traced_step("fsdp2", 128, LAYERS, 64, 2**10, None),
        "message": record_trace(lambda: dist.all_reduce(x), name="message", warm=0),
    }


def test_real_steps_hold_what_the_wrappers_do(tmp_path: Path) -> None:
    """DDP: a bucket for each layer. FSDP2: every layer gathered twice, and its gradients scattered."""
    by_rank = run_ranks(both_wrappers, 2, str(tmp_path))
    for name in ("ddp", "fsdp2", "message"):
        events = merge_traces([traces[name] for traces in by_rank])
        assert [trace[name].rank for trace in by_rank] == [0, 1]
        annotation = "message" if name == "message" else "step"
        window = annotated_window(events, annotation)
        parts = split_time(events, window)
        for rank in range(2):
            mine = [e for e in events if e.rank == rank and e.kind == "communication"]
            names = sorted(e.name for e in mine)
            if name == "ddp":
                assert names == ["gloo:all_reduce"] * LAYERS
            elif name == "message":
                assert names == ["gloo:all_reduce"]
            else:
                gathers = sum(e == "gloo:all_gather" for e in names)
                assert gathers == 2 * LAYERS  # in forward and in backward
                assert len(names) - gathers == LAYERS  # gloo scatters by an all-reduce, and the trace says so
            # A message begins in the step. gloo's thread wakes the step before it notes the message's own end.
            assert all(window[0] <= e.start <= min(e.end, window[1]) for e in mine)
            assert 0 < parts[rank].communication + parts[rank].both <= parts[rank].window
            assert parts[rank].window == pytest.approx(window[1] - window[0])
        # One clock: the collective that begins last on a rank cannot end on the other before it has begun here.
        spans = [
            [(e.start, e.end) for e in events if e.rank == rank and e.kind == "communication"] for rank in range(2)
        ]
        for here, there in (spans, spans[::-1]):
            assert max(end for _, end in there) > max(start for start, _ in here)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]
    again = [parse_trace(path) for path in sorted(tmp_path.iterdir())]
    assert [trace.events for trace in again] == [traces["ddp"].events for traces in by_rank]
