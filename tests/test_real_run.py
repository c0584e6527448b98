"""Lab 11 on a machine with GPUs, with the one function that starts ranks there replaced: what is decided, kept and said."""

import json
import math
import re
from pathlib import Path

import nbformat
import pytest
import torch

from lablib.calc.runs import Trace
from lablib.calc.runs.trace import Event
from lablib.checks import rung11
from lablib.launch.lab_runs import without_rehearsals
from lablib.launch.ranks import RankError, RankTimeout, run_ranks
from lablib.launch.records import FOLDER_SWITCH
from lablib.launch.runs import LearnerPredictions, RealRun, gpu_report, real_run, report_rows, scaling_records
from lablib.launch.runs.real_run import NO_MEMORY, predicted_run
from lablib.launch.training import METRIC_KEYS
from tests.scripts import ROOT, load

LAB = ROOT / "labs" / "11_practical_fsdp.ipynb"


class Machine:
    """A machine with GPUs that train at a given rate: it writes the files that the trainer would, and starts nothing.

    Attributes:
        started: What was asked for, in order.
        fails: Called with the configuration of a run; an exception to raise, or None.
    """

    def __init__(self, gpus):
        self.gpus, self.started, self.fails = gpus, [], lambda config: None

    def __call__(self, work, ranks, *args):
        config = args[0]
        assert ranks in (1, self.gpus)
        self.started.append((work.__name__, ranks, config))
        if error := self.fails(config):
            raise error
        if work.__name__ == "_train":
            return [self._train(config, ranks)] * ranks
        if work.__name__ == "_traced":
            return [self._trace(rank, Path(args[1])) for rank in range(ranks)]
        turns = [
            {"loop": loop, "round": 0, "seconds": [0.1], "tokens_per_second": 100.0} for loop in ("plain", "trainer")
        ]
        return [turns]

    def _train(self, config, ranks):
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        micro, count = config.split_batch(ranks)
        seconds = 0.01 * count * micro + (0.02 if ranks > 1 else 0)
        tokens = config.global_batch * config.seq
        for rank in range(ranks):
            lines = []
            for step in range(1, config.steps + 1):
                line = dict.fromkeys(METRIC_KEYS, 0) | {
                    "step": step, "rank": rank, "world_size": ranks, "seconds": seconds, "targets": tokens,
                    "tokens_per_second": tokens / seconds, "loss": 10.0 - 0.01 * step + 1e-4 * ranks,
                    "mfu": 0.4, "hfu": 0.4, "memory_bytes": micro * 10**9,
                }  # fmt: skip
                lines.append(json.dumps(line))
            Path(config.folder, f"metrics-rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
        here = {"gpus": ["NVIDIA H100 80GB HBM3"] * self.gpus, "cpu": "Xeon", "cpus": 8, "torch": "2.13.0"}
        facts = {"config": config.as_dict(), "machine": here, "device": "cuda:0", "params": 124_000_000}
        Path(config.folder, "run.json").write_text(json.dumps(facts))

    def _trace(self, rank, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{rank}.json").write_text("{}")
        events = (
            Event(rank, "annotation", "step", 0.0, 1.0, "main"),
            Event(rank, "compute", "gemm", 0.0, 0.75, "7"),
            Event(rank, "communication", "nccl", 0.75, 1.0, "20"),
        )
        return Trace(rank, 0, events)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this a machine with so many H100, and keep what it writes out of the way."""
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    monkeypatch.delenv(FOLDER_SWITCH, raising=False)
    monkeypatch.delenv("LABLIB_RECORD", raising=False)

    def make(gpus):
        made = Machine(gpus)
        monkeypatch.setattr(real_run, "on_gpus", made)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
        details = type("Properties", (), {"name": "NVIDIA H100 80GB HBM3", "total_memory": 80 * 2**30, "major": 9,
                                          "minor": 0, "multi_processor_count": 132})  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: details)
        return made

    return make


def run_lab(**parameters):
    """Run what the runner runs of lab 11 on a paid machine, cell by cell, in this process; return its names."""
    notebook = without_rehearsals(nbformat.read(LAB, as_version=4))
    names = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), names)
        if "parameters" in cell.metadata.get("tags", []):
            assert parameters.keys() <= names.keys()
            names |= parameters
    return names


def test_without_the_rehearsals_the_setup_and_the_gpu_section_are_left():
    notebook = nbformat.read(LAB, as_version=4)
    left = without_rehearsals(nbformat.read(LAB, as_version=4)).cells
    heads = [cell.source.splitlines()[0] for cell in left if cell.source.startswith("#")]
    assert heads == ["# Lab 11: a real FSDP run", "## 7. On GPUs", "## Summary"]
    tagged = [c.id for c in notebook.cells if {"gpu", "parameters"} & set(c.metadata.get("tags", []))]
    assert set(tagged) <= {cell.id for cell in left}
    assert not any("kill_and_resume(" in cell.source for cell in left)
    plain = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    assert len(without_rehearsals(plain).cells) == 1


@pytest.mark.parametrize("gpus", [2, 8])
def test_the_report_comes_first_with_both_predictions_and_what_a_page_points_to_stays(machine, gpus, capsys, tmp_path):
    made = machine(gpus)
    names = run_lab(predicted_step_ms=90, predicted_speedup_weak=1.5, predicted_peak_gb=8.0, gpu_steps=3)
    started = [(work, ranks, config.global_batch) for work, ranks, config in made.started]
    batch = 8 * gpus
    assert started[:4] == [
        ("_train", 1, batch), ("_train", gpus, batch), ("_train", gpus, gpus * batch), ("_traced", gpus, batch),
    ]  # fmt: skip
    assert not any(config.compile for _, _, config in made.started[:6])
    assert started[-1][:2] == ("compare_loops", 1)
    # Of the three experiments one is the report's first run; the others change one thing each.
    twice, whole = made.started[4][2], made.started[5][2]
    assert (twice.micro_batch, twice.reshard) == (16, True)
    assert (whole.micro_batch, whole.reshard) == (8, False)

    folder = gpu_report()
    assert folder == names["real"].report.folder
    assert folder.parent == tmp_path / "mine"
    one, weak, strong = report_rows(folder)
    assert (one["predicted"], strong["predicted_memory"]) == (
        pytest.approx(predicted_run("gpt2-124m", 1, batch, 8, 1024)["step"]),
        pytest.approx(predicted_run("gpt2-124m", gpus, batch, 8, 1024)["memory_bytes"]),
    )
    assert weak["predicted_speedup"] > 1
    assert (one["yours"], weak["yours"]) == ({}, {"speedup": 1.5})
    assert strong["yours"] == {"step": 0.09, "memory_bytes": 8e9}
    page = (folder / "report.html").read_text()
    for head in ("predicted ms", "your ms", "your speedup", "predicted GB", "your GB"):
        assert f"<th>{head}</th>" in page
    assert strong["loss_apart"] == pytest.approx(1e-4 * (gpus - 1))

    assert sorted(p.name for p in (folder / "traces").iterdir()) == [f"rank{r}.json" for r in range(gpus)]
    for kind in ("one-1", f"strong-{gpus}", f"weak-{gpus}"):
        assert (folder / "metrics" / kind / "metrics-rank0.jsonl").exists()
    assert (folder / "metrics" / f"strong-{gpus}" / f"metrics-rank{gpus - 1}.jsonl").exists()

    out = " ".join(capsys.readouterr().out.split())
    assert f"{gpus} GPUs here: section 7 measures scaling" in out
    compared = re.search(r"step of all GPUs \(ms\) yours 90 \(10 % too low\) \| lablib [^|]+ \| measured 100 ", out)
    assert out.index("step of all GPUs (ms) you predict 90") < compared.start()
    assert re.search(r"step of all GPUs: measured 100 ms, lablib says [\d.]+ ms", out)
    assert "so they learned the same" in out
    assert "GPU 0: compute 75%, communication 25%" in out
    assert "observe_scaling: not attempted" in out


def test_with_one_gpu_it_says_what_cannot_be_measured_and_measures_the_rest(machine, capsys):
    made = machine(1)
    run_lab(gpu_steps=3, predicted_step_ms=80, predicted_speedup_weak=1.0)
    assert [(work, ranks) for work, ranks, _ in made.started[:3]] == [("_train", 1), ("_traced", 1), ("_train", 1)]
    assert all(config.reshard for _, _, config in made.started)
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("one GPU here")
    assert "no scaling" in out.partition("step of all GPUs")[0]
    assert re.search(r"step of all GPUs \(ms\) yours 80 \(exact\) \| lablib [^|]+ \| measured 80 ", out)
    assert "no losses to compare" in out
    assert gpu_report() is None


def test_without_a_gpu_nothing_is_started(machine, capsys):
    made = machine(0)
    run_lab()
    assert made.started == []
    out = capsys.readouterr().out
    assert "11_scaling: not yet recorded on a GPU" in out
    assert "11_fsdp: not yet recorded on a GPU" in out


def _failing(traceback):
    return RankError("rank 0 failed first", 0, traceback)


COMPILER = """Traceback (most recent call last):
  File "torch/_inductor/compile_fx.py", line 1, in f
torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC.

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace."""


def test_what_cannot_compile_is_recorded_as_that_and_the_rest_goes_on(machine, capsys):
    made = machine(2)
    made.fails = lambda config: _failing(COMPILER) if config.compile else None
    names = run_lab(gpu_steps=3, gpu_micro_batches=[8, 16])
    (failed,) = [sample for sample in names["found"].samples if "failed" in sample]
    assert failed["compile"] is True
    assert failed["failed"].startswith("did not compile: torch._inductor.exc.InductorError")
    # One attempt is enough to know it: recomputation, the larger micro-batch and the race run without.
    assert sum(config.compile for _, _, config in made.started) == 1
    assert [s.get("recompute") for s in names["found"].samples] == ["none"] * 3 + ["selective", "full", "none", None]
    assert "compiled: did not compile: " in capsys.readouterr().out
    assert gpu_report() is not None


def test_memory_that_ends_and_a_hang_cost_only_their_own_case(machine, capsys):
    made = machine(2)
    hang = RankTimeout("no result after 480 s from rank 1 of 2. Where they stand:\n  ...", {1: "x"})

    def fails(config):
        if config.micro_batch == 32:
            return _failing("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB")
        return hang if config.recompute == "selective" else None

    made.fails = fails
    names = run_lab(gpu_steps=3)
    found = {(s["micro_batch"], s["recompute"], s["compile"]): s for s in names["found"].samples if "race" not in s}
    assert found[32, "none", True]["failed"] == NO_MEMORY
    assert (64, "none", True) not in found  # what is larger fits no better
    assert found[8, "selective", True]["failed"] == "no result after 480 s from rank 1 of 2. Where they stand:"
    assert "turns" in names["found"].samples[-1]
    assert "recompute selective, compiled: no result after 480 s" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["one", "strong"])
def test_a_run_of_the_report_that_fails_leaves_the_others(machine, capsys, kind):
    made = machine(2)
    made.fails = lambda config: (
        _failing("Traceback:\nValueError: something else") if len(made.started) == 1 + (kind == "strong") else None
    )
    # All the rest is measured, and the lab says at its end that it is not whole: the same command tries again.
    with pytest.raises(AssertionError, match=rf"lacks runs: \['{kind} on .*ValueError: something else"):
        run_lab(gpu_steps=3)
    out = capsys.readouterr().out
    assert ("take a smaller gpu_model" in out) == (kind == "one")
    assert ("no losses to compare" in out) == (kind == "strong")
    assert made.started[-1][0] == "compare_loops"


def test_the_same_command_tries_again_what_failed_but_not_what_did_not_fit(machine, monkeypatch, tmp_path, capsys):
    made = machine(2)
    monkeypatch.setenv(FOLDER_SWITCH, str(tmp_path / "job"))
    out_of_memory = _failing("torch.OutOfMemoryError: CUDA out of memory.")
    errors = {16: out_of_memory, 2: _failing("RuntimeError: NCCL error")}
    made.fails = lambda config: errors.get(config.micro_batch)
    real = RealRun(2, steps=3, micro_batches=(2, 16))
    assert ["failed" in sample for sample in real.scaling()] == [True] * 3
    assert real._throughput(real._case(micro_batch=16))["failed"] == NO_MEMORY
    made.fails = lambda config: None
    again = RealRun(2, steps=3, micro_batches=(2, 16))
    assert ["failed" in sample for sample in again.scaling()] == [False] * 3
    assert again._throughput(again._case(micro_batch=16))["failed"] == NO_MEMORY


def test_an_interrupted_lab_goes_on_in_its_report_and_repeats_nothing(machine, monkeypatch, tmp_path, capsys):
    made = machine(2)
    monkeypatch.setenv(FOLDER_SWITCH, str(tmp_path / "job"))
    made.fails = lambda config: KeyboardInterrupt() if len(made.started) == 3 else None
    with pytest.raises(KeyboardInterrupt):
        RealRun(2, steps=3).scaling()
    made.fails = lambda config: None
    again = RealRun(2, steps=3)
    again.scaling()
    assert [ranks for _, ranks, _ in made.started] == [1, 2, 2, 2]
    assert len(scaling_records(again.report.folder)) == 3
    assert [p.name for p in (tmp_path / "mine").iterdir()] == [again.report.folder.name]
    # Another run on the same day has a folder of its own.
    monkeypatch.setenv(FOLDER_SWITCH, str(tmp_path / "other"))
    assert RealRun(2, steps=3).report.folder != again.report.folder


def test_observe_scaling_takes_the_report_where_there_is_one(machine, monkeypatch, capsys):
    solutions = load("labs/solutions/rung11.py")
    machine(8)
    RealRun(8, steps=3).scaling()
    capsys.readouterr()
    started = []
    monkeypatch.setattr("lablib.launch.ranks.run.run_ranks", lambda *args, **_: started.append(args))
    verdict = rung11.observe_scaling(solutions.observe_scaling)
    assert verdict.status == "passed", verdict
    assert "a job on 8 x NVIDIA H100 80GB HBM3: speedup 6.40" in verdict.message  # 64 sequences: 640 ms and 100 ms
    assert not started


def test_the_functions_of_the_ranks_run_as_they_are(monkeypatch, tmp_path, capsys):
    """On CPU ranks and a small model: what the fake machine replaces above."""
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    monkeypatch.setattr(real_run, "on_gpus", lambda work, ranks, *args: run_ranks(work, ranks, *args))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "no GPU that anybody knows")
    real = RealRun(2, model="tiny", steps=2, micro_batches=(1,), seq=16)
    samples = real.scaling()
    assert [len(sample["loss"]) for sample in samples] == [2, 2, 2]
    one, _, strong = report_rows(real.report.folder)
    assert one["predicted"] is strong["predicted"] is None
    assert strong["loss_apart"] < 0.03  # half the gap of bf16 at a loss of 4 to 8: one step's rounding is far below
    assert math.isfinite(strong["speedup"])
    parts = real.trace()["parts"]
    assert set(parts) == {"0", "1"}
    assert (real.report.folder / "traces" / "rank1.json").stat().st_size > 1000
    assert gpu_report() is None  # CPU ranks, and a toy


def test_predictions_that_are_none_are_refused_and_none_is_no_prediction():
    assert LearnerPredictions().named() == {}
    for value in (0, -1, math.nan, math.inf, "12", True):
        with pytest.raises(ValueError, match=r"predicted_step_ms=.* must be a number above 0"):
            LearnerPredictions(predicted_step_ms=value)
    yours = LearnerPredictions(predicted_step_ms=50, predicted_speedup_strong=1.5)
    assert yours.of("one", 2) == {}
    assert yours.of("one", 1) == {"step": 0.05}
    assert yours.of("strong", 2) == {"step": 0.05, "speedup": 1.5}
    assert yours.of("weak", 2) == {}
