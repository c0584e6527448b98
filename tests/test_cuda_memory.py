"""A step weighed on a GPU: the same code on a CPU, against the calculator, and over an allocator that is simulated."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from lablib.calc.layouts.planner import RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.units import GiB
from lablib.cli.main import app
from lablib.launch.measure import LiveBytes
from lablib.launch.records import experiments
from lablib.launch.records import samples as gpu_records
from lablib.proof import gpu_measure as cuda_memory
from lablib.proof.cases import Case
from lablib.proof.gpu_measure import Counters, CudaCounters, measure_on_gpu, measured_samples, replayed
from lablib.proof.gpu_rows import (
    NOT_RECORDED,
    gpu_cases,
    gpu_proven,
    gpu_rows,
    gpu_section,
    gpu_summary,
    gpu_text,
    on_one_gpu,
    predicted_peak,
)
from lablib.proof.oracles import build_model
from lablib.proof.oracles.measurement import nothing_packed
from tests.caching_allocator import Simulated, snapshot

logging.getLogger("transformers").setLevel(logging.ERROR)
SMALL = Case(recipe="mixed-bf16", recompute="full", optimizer="sgd-momentum")
CASES = (
    SMALL,
    Case(family="gpt2", micro_batch=3, attention="plain", step="foreach"),
    Case(recipe="autocast-bf16", recompute="selective", step="fused", accumulate=3),
    Case(implementation="hf", recipe="pure-bf16", recompute="full"),
    Case(implementation="hf", tuning="lora"),
)


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
    found = measure_on_gpu(case, Counters())
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


def test_everything_of_a_step_is_made_on_the_device_that_it_is_given() -> None:
    # On the meta device an operator refuses a tensor of the CPU, as it does on a GPU.
    device = torch.device("meta")
    for case in (
        CASES[1],
        replace(CASES[2], recipe="fp32", step="foreach"),
        Case(implementation="hf", recompute="full", attention="plain"),
    ):
        with nothing_packed(), device:
            job = cuda_memory._Job(case, device)
        with nothing_packed():
            job.loss(job.model, job.batch).backward()
        job.optimizer.step()
        states = [value for state in job.optimizer.state.values() for value in state.values() if value.ndim]
        tensors = [*job.model.parameters(), *job.model.buffers(), job.batch, *states]
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_snapshot_of_the_step_has_the_peak_of_the_counters() -> None:
    case = CASES[1]
    found, plain = measure_on_gpu(case, OnSimulated()), measure_on_gpu(case, Counters())
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
    assert replayed(snapshot(device), counted)["disagrees"] == ""
    wrong = replayed(snapshot(device), counted | {"requested": counted["requested"] + 512})
    assert wrong["disagrees"] == "replayed: requested 5,700, counted 6,212"
    lost = snapshot(device)
    lost["segments"][1]["blocks"][0] |= {"state": "inactive"}
    assert "cannot be replayed: event 3 (alloc of 700 bytes" in replayed(lost, counted)["disagrees"]


def test_what_does_not_fit_or_run_costs_nothing_else(monkeypatch, tmp_path) -> None:
    class Full(Counters):
        def record(self):
            raise torch.OutOfMemoryError("CUDA out of memory")

    class Old(Counters):
        def record(self):
            raise RuntimeError("no kernel image\nmore")

    kinds, said = iter((Full, Old, Counters)), []
    samples = measured_samples([SMALL, SMALL, SMALL], lambda: next(kinds)(), said.append)
    assert [sample.get("failed") for sample in samples] == ["out of memory", "no kernel image", None]
    assert [line.partition(": ")[2].partition(",")[0] for line in said] == [
        "out of memory",
        "no kernel image",
        "measured",
    ]
    # The runner keeps each sample: the same command goes on where it stopped.
    monkeypatch.setenv("LABLIB_LAB_FOLDER", str(tmp_path))
    first = measured_samples([SMALL], Counters, said.append)
    again = measured_samples([SMALL], lambda: pytest.fail("measured twice"), said.append)
    assert again == first


def test_a_case_of_several_ranks_and_a_machine_without_gpus_are_refused() -> None:
    for case in (Case(sharding="fsdp2", dp=2), Case(implementation="paper"), Case(pp=2)):
        with pytest.raises(ValueError, match="a GPU is measured alone"):
            measure_on_gpu(case, Counters())
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="no GPU here"):
        measure_on_gpu(SMALL)
    with pytest.raises(ValueError, match="no GPU here"):
        CudaCounters("cuda")
    result = CliRunner().invoke(app, ["memory-table", "--gpu"])
    assert (result.exit_code, result.output) == (2, "rung: no GPU here, and this measures the memory of one\n")
    result = CliRunner().invoke(app, ["memory-table", "--gpu", "--few"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)


def test_the_cases_fit_and_show_what_people_train() -> None:
    cases = gpu_cases(80 * GiB)
    sizes = [predicted_peak(case) for case in cases]
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


def sample(case: Case, off: float = 0.0, **more) -> dict:
    peak = round(predicted_peak(case) / (1 + off))
    sizes = {"requested": peak + 100, "allocated": peak + 2_000_100, "reserved": peak + 5_000_100}
    return {
        "name": case.name,
        "case": asdict(case),
        "peak": sizes,
        "workspaces": 100,
        "outside": 4 * 10**8,
        "snapshot": {"disagrees": ""},
    } | more


@pytest.fixture
def house(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "repository_root", lambda: tmp_path)
    monkeypatch.setattr(gpu_records, "repository_root", lambda: tmp_path)
    return tmp_path


def test_the_page_says_that_nothing_is_recorded_or_what_the_record_says(house, capsys) -> None:
    assert gpu_section(experiments.recorded("01_memory-1gpu")) == NOT_RECORDED
    assert gpu_proven(None) == "No recorded run has measured any of these yet."
    failed = {"name": CASES[1].name, "case": asdict(CASES[1]), "failed": "out of memory"}
    samples = [sample(SMALL, 0.25), sample(CASES[2]), sample(CASES[3], -0.0001), failed]
    experiments.save_record("01_memory-1gpu", samples, "rung labs run 01 --record")
    record = experiments.recorded("01_memory-1gpu")
    text = gpu_section(record)
    assert f"3 configurations were measured on {record.where} on {record.date[:10]}." in text
    assert f"off by 25.00%, in {SMALL.name}; the median is 0.010%" in text
    assert "1 could not be measured" in text
    assert "measured the first two, NCCL's buffers apart, in 3 configurations" in gpu_proven(record)
    assert "finds the peak of the counters to the byte" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(samples)
    assert {len(row) for row in rows} == {8}
    assert [row[3] for row in rows[2:]] == ["1.2500", "1.0000", "0.9999", ""]
    assert [row[4:] for row in rows[2:3]] == [["2.0 MB", "3.0 MB", "0.0 MB", "400.0 MB |"]]
    # A snapshot that contradicts its counters is said before anything else can be believed.
    wrong = [sample(SMALL, snapshot={"disagrees": "replayed: allocated 1, counted 2"})]
    assert "In 1 the snapshot contradicts the counters" in gpu_summary(gpu_rows(wrong), "x", "y")
    assert "replayed: allocated 1, counted 2" in gpu_text(gpu_rows(wrong))
    with pytest.raises(ValueError, match="every configuration failed"):
        gpu_summary(gpu_rows([failed]), "x", "y")
    # The lab replays it, and the status page lists it.
    found = gpu_records.gpu_samples("01_memory", lambda: pytest.fail("measured without a GPU"))
    assert found.samples == record.samples
    assert gpu_records.coverage(["01_memory"])[0]["1 GPU"].startswith(record.date[:10])


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
