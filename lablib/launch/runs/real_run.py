"""Lab 11 on GPUs: its measurements, most important first, so that a budget that ends early drops the least.

1. The scaling report: one GPU; all of them with the same batch (strong); all of them with n times the batch (weak).
2. The trace of a step.
3. Twice the micro-batch; no resharding. With one GPU alone, from the report, these three experiments answer most.
4. compile; recomputation; the micro-batch, doubled until memory ends.
5. The trainer against a plain loop.

`RealRun` keeps each measurement by itself. One that fails is a result with its reason, and the next one runs; the same
command tries it again, unless memory was too small. Before it, `lock_predictions` stores the learner's numbers;
`compare_with` puts measurement, lablib's prediction and theirs beside each other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lablib.calc.hardware import known_accelerator
from lablib.calc.layouts.planner import FRAMEWORKS, plan
from lablib.calc.memory import RESERVE
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.precision import find_format
from lablib.calc.runs import Trace, annotated_window, merge_traces, split_time
from lablib.launch.measure import record_trace
from lablib.launch.ranks import RankError, RankTimeout, own_line, run_ranks
from lablib.launch.records import Predictions, SampleCache, experiments_dir
from lablib.launch.runs.scaling_report import ScalingReport, keep_metrics
from lablib.launch.runs.start import compare_loops
from lablib.launch.training import TrainConfig, Trainer, read_metrics, train_model

REPORT = "lab11-gpus"
WARM_UP = 4
#: A measurement takes a minute or two. One that hangs must not eat the hour.
TIMEOUT_S = 480.0
NO_MEMORY = "does not fit: out of memory"
_KEYS = ("loss", "seconds", "tokens_per_second", "mfu", "hfu", "memory_bytes")
_COMPILER = ("torch._inductor", "torch._dynamo", "triton", "C compiler")
#: Parameter of the lab: what it is of, in the words of the lab, the key of a row, and its unit.
_ASKED = {
    "predicted_step_ms": ("step of all GPUs", "ms"),
    "predicted_speedup_strong": ("speedup on GPUs, strong", ""),
    "predicted_speedup_weak": ("speedup on GPUs, weak", ""),
    "predicted_peak_gb": ("peak memory of a GPU", "GB"),
}
Sample = dict[str, Any]


@dataclass(frozen=True)
class LearnerPredictions:
    """The learner's predictions; None for no prediction. The names are those of lab 11's parameters."""

    predicted_step_ms: float | None = None  # of a step of all GPUs with one micro-batch on each
    predicted_speedup_strong: float | None = None  # of all GPUs over one, the same batch
    predicted_speedup_weak: float | None = None  # of all GPUs over one, the same batch on each
    predicted_peak_gb: float | None = None  # most memory of a GPU in the step of `predicted_step_ms`, in GB

    def __post_init__(self) -> None:
        for name, value in self.named().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a number above 0, or None for no prediction")

    def named(self) -> dict[str, float]:
        """Return those that there are."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def of(self, kind: str, gpus: int) -> dict[str, float]:
        """Return what they say about one run, as `ScalingReport.add` takes it."""
        values: dict[str, float | None] = {}
        if kind == ("strong" if gpus > 1 else "one"):  # one micro-batch on each GPU
            values["step"] = self.predicted_step_ms and self.predicted_step_ms / 1e3
            values["memory_bytes"] = self.predicted_peak_gb and 1e9 * self.predicted_peak_gb
        if kind != "one":
            values["speedup"] = getattr(self, f"predicted_speedup_{kind}")
        return {name: value for name, value in values.items() if value is not None}


def predicted_run(model: str, ranks: int, batch: int, micro_batch: int, seq: int) -> dict[str, Any] | None:
    """Return what the planner and the memory calculator say of a fully sharded run on this machine's GPUs.

    Returns:
        Seconds of a step, how wrong such seconds were on measured runs like this one, bytes of a rank, and the links
        that the seconds assume; or None for a GPU that lablib has no figures for, or does not expect to hold the run.
    """
    gpu, shape = known_accelerator(torch.cuda.get_device_name(0)), train_model(model)
    if gpu is None:
        return None
    found = plan(
        shape, gpu=gpu, gpus=ranks, seq=seq, global_batch=batch, gpus_per_node=max(8, ranks), dp=ranks, tp=1, cp=1,
        pp=1, zero=3, micro_batch=micro_batch, recompute="none", framework=FRAMEWORKS["hf"],
        reserve=RESERVE,
    )  # fmt: skip
    if not found.candidates:
        return None
    held = memory_timeline(
        shape, recipe="fsdp2-mixed-fp32-reduce", attention="fused", implementation="toy", sharding="fsdp2", step="fused",
        dp=ranks, zero=3, micro_batch=micro_batch, seq=seq,
    )  # fmt: skip
    return {
        "step": found.best.step,
        "step_error": found.like(found.best).sentence,
        "memory_bytes": held.peak_bytes,
        "links": found.cluster.links_text(),
    }


def lock_predictions(predictions: Predictions, yours: LearnerPredictions) -> None:
    """Store the learner's predictions before the run."""
    for name, value in yours.named().items():
        predictions.predict(_ASKED[name][0], value, _ASKED[name][1])


def compare_with(
    predictions: Predictions, yours: LearnerPredictions, table: Sequence[Mapping[str, Any]], gpus: int
) -> None:
    """Put what was measured beside what the learner predicted, and what lablib says beside both."""
    by_kind = {row["scaling"]: row for row in table}
    found = {}
    if each := by_kind.get("strong" if gpus > 1 else "one"):
        found["predicted_step_ms"] = (1e3 * each["seconds"]["median"], each["predicted"], 1e3)
        found["predicted_peak_gb"] = (each["memory_bytes"] / 1e9, each["predicted_memory"], 1e-9)
    for kind in ("strong", "weak"):
        if row := by_kind.get(kind):
            found[f"predicted_speedup_{kind}"] = (row["speedup"], row["predicted_speedup"], 1)
    for name, (measured, predicted, scale) in found.items():
        what, unit = _ASKED[name]
        if name in yours.named():
            predictions.compare(what, measured, None if predicted is None else scale * predicted)
        verdict = (
            "has no figures for this GPU" if predicted is None else f"says {scale * predicted:.4g} {unit}".rstrip()
        )
        print(f"{what}: measured {measured:.4g} {unit}".rstrip() + f", lablib {verdict}")


def loss_verdict(table: Sequence[Mapping[str, Any]], first_loss: float) -> str | None:
    """Return in one sentence whether one GPU and all of them learned the same; None where there is one alone.

    Both take the same samples and add the same numbers in another order, in bf16. Neighbouring numbers of bf16 are
    that far apart at the size of the loss, and no closer agreement can be asked of them.
    """
    apart = next((row["loss_apart"] for row in table if row.get("loss_apart") is not None), None)
    if apart is None:
        return None
    gap = find_format("bf16").ulp(first_loss)
    sentence = f"one GPU and all of them, the same samples: losses differ by {apart:.1g} at most"
    if apart <= gap:
        return f"{sentence}; bf16 has steps of {gap:g} there, so they learned the same"
    return (
        f"{sentence}, more than the {gap:g} between two numbers of bf16: look for the cause before you read the speed"
    )


def on_gpus(work: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call a function on ranks that have a GPU each; all that lab 11 runs on GPUs is started here."""
    return run_ranks(work, ranks, *args, device="cuda", timeout=TIMEOUT_S)


class RealRun:
    """The measurements of one machine.

    Args:
        steps: Of each run, after `WARM_UP`.
        micro_batches: Sequences of a micro-batch: the first for all runs, the others until memory ends.
    """

    def __init__(
        self,
        gpus: int,
        *,
        model: str = "gpt2-124m",
        steps: int = 20,
        micro_batches: Sequence[int] = (8, 16, 32, 64),
        seq: int = 1024,
        yours: LearnerPredictions | None = None,
    ) -> None:
        self.gpus, self.model, self.steps, self.seq = gpus, model, steps, seq
        self.micro_batches, self.yours = tuple(micro_batches), yours or LearnerPredictions()
        self._kept = SampleCache("11_fsdp")
        self.report = ScalingReport(REPORT, self._folder())

    def _folder(self) -> Path:
        """The folder of the report: that of the first attempt where the runner goes on, a new one otherwise."""
        now = datetime.now(UTC)
        name = f"{now:%Y-%m-%d}-{REPORT}"
        if (experiments_dir() / name).exists():
            name += f"-{now:%H%M%S}"
        return experiments_dir() / self._kept.sample({"report": REPORT}, lambda: {"folder": name})["folder"]

    def scaling_runs(self) -> dict[str, tuple[int, int]]:
        """Return (ranks, sequences of a step) of each run of the scaling report; one GPU has no other to scale to."""
        n, batch = self.gpus, self.gpus * self.micro_batches[0]
        return {"one": (1, batch)} | ({"strong": (n, batch), "weak": (n, n * batch)} if n > 1 else {})

    def scaling(self) -> list[Sample]:
        """Train what the scaling report needs, with the predictions in it; eager, so that no compiler can spoil it."""
        return [self._scale(kind, *sizes) for kind, sizes in self.scaling_runs().items()]

    def _scale(self, kind: str, ranks: int, batch: int) -> Sample:
        case = {"scaling": kind, "ranks": ranks, "batch": batch, **self._case()}

        def measure() -> Sample:
            predicted = predicted_run(self.model, ranks, batch, self.micro_batches[0], self.seq)
            with tempfile.TemporaryDirectory(prefix="run-") as folder:
                on_gpus(_train, ranks, self._config(folder, batch, case))
                yours = self.yours.of(kind, self.gpus)
                self.report.add(folder, scaling=kind, warm_up=WARM_UP, predicted=predicted, yours=yours)
                return _measured(folder)

        return self._attempt(case, measure)

    def trace(self) -> Sample:
        """Keep the trace of a step of every rank beside the report, and return where its time went."""
        case = {"trace": self.model, "ranks": self.gpus, **self._case()}

        def measure() -> Sample:
            folder = self.report.folder / "traces"
            with tempfile.TemporaryDirectory(prefix="run-") as run:
                config = self._config(run, self.gpus * self.micro_batches[0], case)
                events = merge_traces(on_gpus(_traced, self.gpus, config, str(folder)))
            parts = split_time(events, annotated_window(events, "step"))
            return {
                "folder": f"{self.report.folder.name}/traces",
                "parts": {str(rank): asdict(part) for rank, part in parts.items()},
            }

        return self._attempt(case, measure)

    def cases(self) -> list[Sample]:
        """Measure what else there is to know on all GPUs, one change at a time, and last the race."""
        first, *larger = self.micro_batches
        samples = [self._throughput(self._case(micro_batch=2 * first))]
        if self.gpus > 1:  # one GPU gathers nothing
            samples.append(self._throughput(self._case(reshard=False)))
        samples.append(self._throughput(self._case(compile=True)))
        # What cannot be compiled once cannot be compiled: the rest is measured without.
        compiles = "failed" not in samples[-1]
        for how in ("selective", "full"):
            samples.append(self._throughput(self._case(compile=compiles, recompute=how)))
        for micro in larger:
            samples.append(self._throughput(self._case(compile=compiles, micro_batch=micro)))
            if samples[-1].get("failed") == NO_MEMORY:
                break
        return [*samples, self._race(compiles)]

    def _throughput(self, case: Sample) -> Sample:
        def measure() -> Sample:
            with tempfile.TemporaryDirectory(prefix="run-") as folder:
                on_gpus(_train, self.gpus, self._config(folder, self.gpus * case["micro_batch"], case))
                keep_metrics(folder, self.report.folder / "metrics" / _name(case))
                return _measured(folder)

        return self._attempt({"ranks": self.gpus, **case}, measure)

    def _race(self, compiles: bool) -> Sample:
        def measure() -> Sample:
            with tempfile.TemporaryDirectory(prefix="run-") as folder:
                case = self._case(compile=compiles)
                config = self._config(folder, 2 * case["micro_batch"], case)
                return {"turns": on_gpus(compare_loops, 1, config)[0]}

        return self._attempt({"race": self.model, "compile": compiles}, measure)

    def _case(self, **changed: Any) -> Sample:
        base = {"compile": False, "recompute": "none", "reshard": True, "micro_batch": self.micro_batches[0]}
        return base | changed

    def _config(self, folder: str, batch: int, case: Sample) -> TrainConfig:
        settings = {key: case[key] for key in self._case()}
        settings |= {"model": self.model, "seq": self.seq, "lr": 3e-4, "steps": WARM_UP + self.steps}
        return TrainConfig(folder=folder, global_batch=batch, **settings)

    def _attempt(self, case: Sample, measure: Callable[[], Sample]) -> Sample:
        """Return the kept sample of a case, or measure it; what fails on the ranks is a result, too."""
        compiled = case.get("compile", False)

        def attempt() -> Sample:
            try:
                return measure()
            except RankError as error:
                if reason(error, compiled) != NO_MEMORY:
                    raise
                return {"failed": NO_MEMORY}

        try:
            sample = self._kept.sample(case, attempt)
        # What this process makes of a run may fail as well: a trace without its window, a disk that is full.
        except (RankError, RankTimeout, ValueError, OSError) as error:
            sample = {**case, "failed": reason(error, compiled)}
        print(describe(sample), flush=True)
        return sample


def _train(config: TrainConfig) -> None:
    Trainer(config).run()


def _traced(config: TrainConfig, folder: str) -> Trace:
    return record_trace(Trainer(config).train_step, folder=folder)


def _measured(folder: str) -> Sample:
    steps = read_metrics(folder)[WARM_UP:]
    return {key: [step[key] for step in steps] for key in _KEYS}


def _name(case: Sample) -> str:
    return "-".join(f"{key}-{value}" for key, value in case.items())


def reason(error: Exception, compiled: bool = False) -> str:
    """Return in one line why ranks failed: no memory, no compiler, or their own error."""
    text = getattr(error, "traceback", "") or str(error)
    if "out of memory" in text.lower():
        return NO_MEMORY
    message = own_line(error)[:200]
    return f"did not compile: {message}" if compiled and any(word in text for word in _COMPILER) else message


def describe(sample: Sample) -> str:
    """Return a measurement of this module as one line."""
    if "race" in sample:
        name = "trainer and plain loop on one GPU"
    elif "trace" in sample:
        name = f"trace of a step on {sample['ranks']}"
    else:
        kind = sample.get("scaling")
        name = (f"{kind} on {sample['ranks']}, " if kind else "") + (
            f"micro-batch {sample['micro_batch']}, recompute {sample['recompute']}, "
            f"{'compiled' if sample['compile'] else 'eager'}{'' if sample['reshard'] else ', no resharding'}"
        )
    if "failed" in sample:
        return f"{name}: {sample['failed']}"
    if "turns" in sample:
        rates = {loop: median([t["tokens_per_second"] for t in sample["turns"] if t["loop"] == loop])
                 for loop in ("plain", "trainer")}  # fmt: skip
        return f"{name}: {rates['trainer']:,.0f} and {rates['plain']:,.0f} tokens/s"
    if "parts" in sample:
        return f"{name}: kept in {sample['folder']}"
    shares = [f"{key.upper()} {median(sample[key]):.1%}" for key in ("mfu", "hfu") if sample[key][0]]
    used = f"{max(sample['memory_bytes']) / 1e9:.1f} GB at most"
    return ", ".join(
        [f"{name}: {rate(sample):,.0f} tokens/s", f"{1e3 * median(sample['seconds']):.1f} ms a step", *shares, used]
    )


def rate(sample: Sample) -> float:
    """Return the median tokens per second of a measurement."""
    return median(sample["tokens_per_second"])


def what_can_be_measured(gpus: int) -> str:
    """Return one sentence on what lab 11 can find out here."""
    if gpus == 0:
        return "no GPU here: sections 1 to 6 run on CPU ranks, section 7 replays a record or says that there is none"
    if gpus == 1:
        return (
            "one GPU here: section 7 measures the time of a step, MFU, memory, recomputation and compile; no scaling, "
            "which takes a second GPU, and `rung graduate` asks for that"
        )
    return f"{gpus} GPUs here: section 7 measures scaling, and what else there is to know, on all of them"
