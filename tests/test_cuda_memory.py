"""A step weighed on a GPU: the same code on a CPU, against the calculator, and over an allocator that is simulated."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from lablib.calc.memory import RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.runs import load_snapshot, replay_snapshot
from lablib.calc.runs.cuda_snapshot import BEFORE, NO_FRAMES, Block
from lablib.calc.units import GiB
from lablib.cli.main import app
from lablib.launch.gpu_step import (
    GPU_HEADS,
    TOY_STEPS,
    Counters,
    CudaCounters,
    StepMemory,
    gpu_rows,
    gpu_text,
    measure_step_memory,
    measure_steps,
    predicted_peak,
    replay_peak,
    steps_that_fit,
    toy_job,
)
from lablib.launch.measure import LiveBytes
from lablib.launch.records import experiments
from lablib.view.style import table
from tests.caching_allocator import MIB, OutOfMemory, Simulated, snapshot
from tests.evidence.__main__ import app as evidence
from tests.evidence.cases import Case
from tests.evidence.gpu import gpu_cases, gpu_job, on_one_gpu, settings, weighed_cases
from tests.evidence.oracles import build_model
from tests.evidence.oracles.measurement import nothing_packed

logging.getLogger("transformers").setLevel(logging.ERROR)
SMALL = Case(recipe="mixed-bf16", recompute="full", optimizer="sgd-momentum")
CASES = (
    SMALL,
    Case(family="gpt2", micro_batch=3, attention="plain", step="foreach"),
    Case(recipe="autocast-bf16", recompute="selective", step="fused", accumulate=3),
    Case(implementation="hf", recipe="pure-bf16", recompute="full"),
    Case(implementation="hf", tuning="lora"),
)


def measured(case: Case, counters: Counters) -> StepMemory:
    return measure_step_memory(lambda: gpu_job(case), counters)


class _Allocating(LiveBytes):
    """Counts tensors, and asks a simulated allocator for the memory of each."""

    def __init__(self, device: Simulated) -> None:
        super().__init__()
        self.device, self.addresses = device, {}

    def _add(self, storage, own=True):
        key, new = id(storage), id(storage) not in self._known
        super()._add(storage, own)
        if own and new and storage.nbytes():
            self.addresses[key] = self.device.malloc(storage.nbytes())

    def _drop(self, key, size):
        super()._drop(key, size)
        if key in self.addresses:
            self.device.free(self.addresses.pop(key))


class OnSimulated(Counters):
    """Stands for a GPU: an allocator that rounds and caches, a workspace, and a snapshot."""

    def __enter__(self):
        self.simulated = Simulated()
        self._live = _Allocating(self.simulated).__enter__()
        self.workspace = self.simulated.malloc(2**20)
        return self

    def now(self):
        return self.simulated.now["requested"]

    def most(self):
        return {name: self.simulated.most[name] for name in ("requested", "allocated", "reserved")}

    def reset(self):
        self.simulated.reset()

    def outside(self):
        return 7

    def release_workspaces(self):
        before = self.now()
        self.simulated.free(self.workspace)
        return before - self.now()

    def record(self):
        self.simulated.frames = [{"filename": "/me/train.py", "line": 1, "name": "step"}]
        self.simulated.record()

    def snapshot(self):
        return snapshot(self.simulated)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_step_holds_what_the_calculator_says(case: Case) -> None:
    found = measured(case, Counters())
    # LiveBytes is a dispatch mode, under which autograd adds gradients out of place.
    said = memory_timeline(step=case.step, out_of_place=True, **case.settings())
    assert found.snapshot is None
    assert (found.workspaces, found.outside) == (0, 0)
    states = {name: size for name, size in dict(said.instant("states").terms).items() if size}
    assert sum(found.states.values()) == said.instant("states").total == sum(states.values())
    # What else is there are the tokens, of 8 bytes, and a step number of 4 for each tensor where the kernel is fused.
    tokens = case.micro_batch * (case.seq + (case.implementation == "toy")) * 8
    counters = 4 * len(list(build_model(case).model.parameters())) if case.step == "fused" else 0
    assert found.before == sum(found.states.values()) + found.buffers + tokens + counters
    assert found.peak["requested"] == max(found.moments.values())
    assert abs(found.peak["requested"] / said.peak_bytes - 1) < 1e-3
    assert max(found.moments, key=found.moments.__getitem__) == said.peak.name
    for moment in said.instants:
        if moment.phase in ("backward", "optimizer") and moment.name in found.moments:
            assert abs(found.moments[moment.name] / moment.total - 1) < 0.01, moment.name
    assert set(found.moments) <= {moment.name for moment in said.instants}
    assert len(found.moments) >= len(said.instants) - 1  # LoRA's embedding has no backward


TINY_TOY = {"model": "gpt2", "seq": 16, "implementation": "toy", "dropout": 0.0}


@pytest.mark.parametrize(
    "how",
    [{name: value for name, value in how.items() if name not in TINY_TOY} for how in list(TOY_STEPS.values())[:3]],
    ids=str,
)
def test_the_labs_own_steps_hold_what_the_calculator_says(how: dict, monkeypatch) -> None:
    """The models of lab 01, cut to what a CPU runs at once; the largest is in fp32, and only its names change."""
    small = Case(family="gpt2").model
    monkeypatch.setattr("lablib.launch.gpu_step.preset", lambda name: small)
    found = measure_step_memory(lambda: toy_job(TINY_TOY | how), Counters())
    said = memory_timeline(out_of_place=True, **TINY_TOY | how | {"model": small})
    assert sum(found.states.values()) == said.instant("states").total
    # Besides: rotary tables or counters of a step, and the loss with its gradient.
    assert said.peak_bytes <= found.peak["requested"] <= said.peak_bytes + 1000
    assert max(found.moments, key=found.moments.__getitem__) == said.peak.name


def test_everything_of_a_step_is_made_on_the_device_that_it_is_given() -> None:
    # On the meta device an operator refuses a tensor of the CPU, as it does on a GPU.
    device = torch.device("meta")
    for case in (
        CASES[1],
        replace(CASES[2], recipe="fp32", step="foreach"),
        Case(implementation="hf", recompute="full", attention="plain"),
    ):
        with nothing_packed(), device:
            job = gpu_job(case)
        with nothing_packed():
            job.loss().backward()
        job.optimizer.step()
        states = [value for state in job.optimizer.state.values() for value in state.values() if value.ndim]
        tensors = [*job.model.parameters(), *job.model.buffers(), *states]
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_snapshot_of_the_step_has_the_peak_of_the_counters() -> None:
    case = CASES[1]
    found, plain = measured(case, OnSimulated()), measured(case, Counters())
    assert found.snapshot["disagrees"] == ""
    for name in ("requested", "reserved"):
        assert found.snapshot[name] == found.peak[name]
    assert (found.workspaces, found.outside) == (2**20, 7)
    assert found.peak["requested"] - found.workspaces == plain.peak["requested"]
    assert {name: size - found.workspaces for name, size in found.moments.items()} == plain.moments
    assert found.peak["requested"] < found.peak["allocated"] < found.peak["reserved"]
    assert sum(found.snapshot["sites"].values()) <= found.peak["requested"]
    assert "me/train.py:1 step" in found.snapshot["sites"]
    # One allocation that the counters did not see, and one that the trace does not have.
    device = Simulated()
    device.record()
    device.malloc(5000)
    device.malloc(700)
    counted = {name: device.most[name] for name in ("requested", "allocated", "reserved")}
    assert replay_peak(snapshot(device), counted)["disagrees"] == ""
    wrong = replay_peak(snapshot(device), counted | {"requested": counted["requested"] + 512})
    assert wrong["disagrees"] == "replayed: requested 5,700, counted 6,212"
    lost = snapshot(device)
    lost["segments"][1]["blocks"][0] |= {"state": "inactive"}
    assert "cannot be replayed: event 3 (alloc of 700 bytes" in replay_peak(lost, counted)["disagrees"]


def test_what_does_not_fit_or_run_costs_nothing_else(monkeypatch, tmp_path) -> None:
    class Full(Counters):
        def record(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

    class Old(Counters):
        def record(self):
            raise RuntimeError("no kernel image\nmore")

    def steps(*names):
        return {name: (settings(SMALL), lambda: gpu_job(SMALL)) for name in names}

    kinds, said = iter((Full, Old, Counters)), []
    samples = measure_steps(steps("a", "b", "c"), lambda: next(kinds)(), said.append)
    assert [sample.get("failed") for sample in samples] == ["out of memory", "no kernel image", None]
    assert [line.partition(",")[0] for line in said] == ["a: out of memory", "b: no kernel image", "c: weighed"]
    # The runner keeps each sample: the same command goes on where it stopped.
    monkeypatch.setenv("LABLIB_LAB_FOLDER", str(tmp_path))
    how = next(iter(TOY_STEPS.values()))
    first = measure_steps({"d": (how, lambda: gpu_job(SMALL))}, Counters, said.append)
    again = measure_steps({"d": (how, None)}, lambda: pytest.fail("measured twice"), said.append)
    assert again == first


def test_a_case_of_several_ranks_and_a_machine_without_gpus_are_refused() -> None:
    for case in (Case(sharding="fsdp2", dp=2), Case(implementation="paper"), Case(pp=2)):
        with pytest.raises(ValueError, match="a GPU is measured alone"):
            measured(case, Counters())
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="no GPU here"):
        measure_step_memory(lambda: gpu_job(SMALL))
    with pytest.raises(ValueError, match="no GPU here"):
        weighed_cases([SMALL])
    with pytest.raises(ValueError, match="no GPU here"):
        CudaCounters("cuda")
    result = CliRunner().invoke(evidence, ["memory-table", "--gpu"])
    assert (result.exit_code, result.output) == (2, "rung: no GPU here, and this measures the memory of one\n")
    result = CliRunner().invoke(evidence, ["memory-table", "--gpu", "--few"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)


def test_the_cases_fit_and_show_what_people_train() -> None:
    cases = gpu_cases(80 * GiB)
    sizes = [predicted_peak(settings(case)) for case in cases]
    assert sizes == sorted(sizes)
    assert max(sizes) + RESERVE <= 80 * GiB
    assert all(on_one_gpu(case) for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    shown = {(case.model.name, case.implementation) for case in cases}
    assert {(m, k) for m in ("gpt2", "llama-3.2-1b", "qwen2.5-0.5b") for k in ("hf", "toy")} <= shown
    for factor, values in {
        "recipe": {"fp32", "pure-bf16", "autocast-bf16", "mixed-bf16"},
        "recompute": {"none", "full"},
        "attention": {"fused", "plain"},
        "step": {"foreach", "fused"},
    }.items():
        assert {getattr(case, factor) for case in cases if case.size == "small"} >= values
    few = gpu_cases(8 * 10**9)
    assert 0 < len(few) < len(cases)
    assert set(few) <= set(cases)
    assert gpu_cases(RESERVE) == []
    # The lab's own, the smallest first.
    assert len(steps_that_fit(TOY_STEPS, 80 * GiB)) == len(TOY_STEPS)
    few = list(steps_that_fit(TOY_STEPS, 8 * 10**9))
    assert 0 < len(few) < len(TOY_STEPS)
    assert few == sorted(few, key=lambda name: predicted_peak(TOY_STEPS[name]))


FIRST, *OTHERS = TOY_STEPS


def sample(name: str, off: float = 0.0, **more) -> dict:
    peak = round(predicted_peak(TOY_STEPS[name]) / (1 + off))
    sizes = {"requested": peak + 100, "allocated": peak + 2_000_100, "reserved": peak + 5_000_100}
    found = {"peak": sizes, "workspaces": 100, "outside": 4 * 10**8, "snapshot": {"disagrees": ""}}
    return {"name": name, "settings": TOY_STEPS[name]} | found | more


@pytest.fixture
def house(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "repository_root", lambda: tmp_path)
    return tmp_path


def page_section():
    """The function of the page that says what a record says."""
    page = (Path(__file__).resolve().parents[1] / "book" / "memory_calculator.md").read_text(encoding="utf-8")
    names = {"gpu_rows": gpu_rows, "GPU_HEADS": GPU_HEADS, "table": table}
    (code,) = re.findall(r"^def gpu_section\(.*?(?=^\S|\Z)", page, re.M | re.S)
    exec(code, names)
    return names["gpu_section"]


def test_the_page_says_that_nothing_is_recorded_or_what_the_record_says(house, capsys) -> None:
    gpu_section = page_section()
    assert "No run on a GPU has been recorded yet" in gpu_section(experiments.recorded("01_memory-1gpu"))
    failed = {"name": OTHERS[0], "settings": TOY_STEPS[OTHERS[0]], "failed": "out of memory"}
    samples = [sample(FIRST, 0.25), sample(OTHERS[1]), sample(OTHERS[2], -0.0001), failed]
    experiments.save_record("01_memory-1gpu", samples, "rung labs run 01 --record")
    record = experiments.recorded("01_memory-1gpu")
    text = gpu_section(record)
    assert f"3 configurations were weighed on {record.where} on {record.date[:10]}." in text
    assert f"off by 25.00%, in {FIRST}; the median is 0.010%" in text
    assert "1 could not be weighed" in text
    assert "finds the peak of the counters to the byte" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(samples)
    assert {len(row) for row in rows} == {8}
    assert [row[3] for row in rows[2:]] == ["1.2500", "1.0000", "0.9999", ""]
    assert [row[4:] for row in rows[2:3]] == [["2.0 MB", "3.0 MB", "0.0 MB", "400.0 MB |"]]
    # A snapshot that contradicts its counters is said before anything else can be believed.
    wrong = sample(FIRST, snapshot={"disagrees": "replayed: allocated 1, counted 2"})
    experiments.save_record("01_memory-2gpu", [wrong], "rung labs run 01 --record")
    assert "In 1 the snapshot contradicts the counters" in gpu_section(experiments.recorded("01_memory-2gpu"))
    assert "replayed: allocated 1, counted 2" in gpu_text(gpu_rows([wrong]))
    # The lab replays it, and the status page lists it.
    found = experiments.gpu_samples("01_memory", lambda: pytest.fail("measured without a GPU"), gpus=1)
    assert found.samples == record.samples
    assert experiments.coverage(["01_memory"])[0]["1 GPU"].startswith(record.date[:10])


def test_cuda_is_asked_by_the_names_that_it_has(monkeypatch) -> None:
    asked, freed = [], []
    stats = {"requested_bytes.all.current": 9}
    stats |= {f"{name}_bytes.all.peak": size for size, name in enumerate(("requested", "allocated", "reserved"))}
    backends = iter(["native", "cudaMallocAsync"])
    of_memory = {
        "get_allocator_backend": lambda: next(backends),
        "_record_memory_history": lambda **how: asked.append(how),
        "_snapshot": lambda: {"segments": []},
    }
    for name, value in of_memory.items():
        monkeypatch.setattr(torch.cuda.memory, name, value)
    fakes = {
        "is_available": lambda: True,
        "memory_stats": lambda device: stats,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (30, 100),
        "memory_reserved": lambda device: 50,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }
    for name, value in fakes.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: freed.append(1), raising=False)
    with CudaCounters("cuda:1") as counters:
        assert counters.device == torch.device("cuda:1")
        assert counters.now() == 9
        assert counters.most() == {"requested": 0, "allocated": 1, "reserved": 2}
        assert counters.outside() == 20
        assert counters.release_workspaces() == 0
        counters.reset()
        counters.record()
        assert counters.snapshot() == {"segments": []}
    assert [how["enabled"] for how in asked] == ["all", None, None]
    assert len(freed) == 2  # before the measurement, and behind it
    with pytest.raises(ValueError, match="the allocator is 'cudaMallocAsync'"):
        CudaCounters("cuda")


# Memory snapshots: a simulated allocator knows the truth, and PyTorch's own viewer reads the same files


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


@pytest.mark.parametrize("found", [{"weights": 1}, 3.5])
def test_what_is_no_snapshot_is_said(tmp_path, found) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"other.pickle cannot be read as a snapshot: [^\n]+make one with"):
        load_snapshot(path)


@pytest.mark.parametrize(
    "found",
    [
        {"segments": [], "device_traces": 7},
        {"segments": [{}]},
        {"segments": [{"address": 0, "total_size": 512, "blocks": None}]},
        {"segments": [], "device_traces": [[7]]},
        {"segments": [], "device_traces": [[{"size": 1}]]},
    ],
)
def test_a_snapshot_of_another_form_is_said(found) -> None:
    with pytest.raises(ValueError, match="this is not a memory snapshot"):
        replay_snapshot(found)


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
