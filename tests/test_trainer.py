"""The trainer on 1, 2 and 4 ranks, against a plain loop in one process, and through a resume.

What must be equal bit for bit: two runs on the same number of ranks, and a run that was resumed.

Other numbers of ranks, micro-batches or the plain loop add up in another order. In fp32 the loss, a mean of 128 terms
of about 5.5, then differs by up to 5.5 * 2^-23 * log2(128) = 5e-6. The gradient differs by about 1e-6 of itself, and is
clipped to a norm of 1; AdamW with eps = 1e-2 moves a weight by at most lr / eps * (its gradient's error) = 0.1 * error,
so the loss by at most 0.1 * 1e-6 * norm a step. For norms below 20 that is 2e-6 a step: 2e-5 covers six steps.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lablib.calc.flops import hfu, mfu, step_flops
from lablib.launch.fsdp import full_state_dict
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.launch.runs import compare_loops, launched_ranks, plain_loop
from lablib.launch.runs.start import check_alone, choose_device
from lablib.launch.training import (
    METRIC_KEYS,
    Callback,
    PrintSteps,
    Profile,
    TrainConfig,
    Trainer,
    Validate,
    read_metrics,
    train_model,
)
from lablib.launch.training.token_data import token_loss

TOLERANCE = 2e-5
STEPS = 6


def config(folder: str, **more: Any) -> TrainConfig:
    usual = {"steps": STEPS, "global_batch": 8, "seq": 16, "warmup": 2, "eps": 1e-2, "precision": "fp32"}
    return TrainConfig(folder=folder, **usual | more)


def losses(trainer: Trainer) -> list[float]:
    return [m["loss"] for m in read_metrics(trainer.folder, trainer.rank)]


class Log(Callback):
    """Remembers its calls; rank `stops` asks to stop in step `at`."""

    def __init__(self, stops: int = -1, at: int = -1) -> None:
        self.calls, self.stops, self.at = [], stops, at

    def on_start(self, trainer: Trainer) -> None:
        self.calls.append(("start", trainer.step, trainer.outcome))

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.calls.append(("step", trainer.step, metrics["step"]))
        if (trainer.rank, trainer.step) == (self.stops, self.at):
            trainer.request_stop("the machine goes")

    def on_end(self, trainer: Trainer) -> None:
        self.calls.append(("end", trainer.step, trainer.outcome))


def uninterrupted(folder: str) -> dict[str, Any]:
    """All steps, saving by the way in the background."""
    ranks = dist.get_world_size()
    trainer = Trainer(config(f"{folder}/{ranks}"))
    trainer.run(until=3)
    saving = trainer.save(wait=False)
    assert trainer.save() is None  # this step is saved already
    trainer.run()
    result = {"losses": losses(trainer), "weights": full_state_dict(trainer.model), "path": saving.result()}
    return result


def resumed(folder: str) -> dict[str, Any]:
    """The steps after the checkpoint once more, in a new trainer."""
    ranks = dist.get_world_size()
    fresh = Trainer(config(f"{folder}/{ranks}", micro_batch=8 // ranks))
    progress = fresh.resume()
    assert (progress.step, fresh.step, fresh.samples) == (3, 3, 24)
    fresh.run()
    assert len(read_metrics(fresh.folder, fresh.rank, every_attempt=True)) == STEPS + 3
    return {"resumed": losses(fresh), "resumed weights": full_state_dict(fresh.model)}


def variants(folder: str) -> dict[str, Any]:
    """On two ranks: every way to compute the same step."""
    ways = {
        "selective": {"recompute": "selective", "micro_batch": 2, "prefetch": 2, "reshard": False},
        "matmuls": {"recompute": "matmuls", "wrap": "size:20000", "steps": 2},
        "full": {"recompute": "full", "micro_batch": 1, "reduce_every": True, "replicas": 2},
        "bf16": {"precision": "bf16", "steps": 1},
    }
    result: dict[str, Any] = {"losses": {}, "messages": {}}
    for name, way in ways.items():
        trainer = Trainer(config(f"{folder}/{name}", lr_steps=STEPS, **way))
        if name in ("selective", "full"):
            first = trainer.train_step()["loss"]
            with record_comms() as log:
                second = trainer.train_step()["loss"]
            result["messages"][name], result["losses"][name] = log.calls, [first, second]
        else:
            trainer.run()
            result["losses"][name] = losses(trainer)
    return result


def validated(folder: str) -> dict[str, Any]:
    """Five held-out sequences, which two ranks cannot share evenly, and a profile of step 3."""
    watch, ranks = Validate(2), dist.get_world_size()
    trainer = Trainer(config(f"{folder}/validated-{ranks}", held_out=5, micro_batch=2), [watch, Profile(2, 1)])
    before = trainer.validate()
    trainer.run(until=4)
    held = list(range(len(trainer.task) - 5, len(trainer.task)))
    inputs, targets = trainer.task.read(held)
    with torch.no_grad():  # all ranks run all five: what one process has
        whole = token_loss(trainer.task.logits(trainer.model, inputs), targets).item() / targets.numel()
    seen = trainer.order.take(0, 2 * len(trainer.task))
    return {"before": before, "held": watch.losses, "whole": whole, "seen": not set(seen) & set(held)}


def stopped(folder: str) -> dict[str, Any]:
    """On two ranks: callbacks, a stop that one rank asks for, refusals, numbers that are none."""
    log = Log(stops=1, at=2)
    trainer = Trainer(config(f"{folder}/stopped", peak_flops=1e9), [log, PrintSteps(2)])
    assert trainer.resume() is None
    trainer.run()
    result = {"calls": log.calls, "reason": trainer.stop_reason, "metrics": read_metrics(trainer.folder, trainer.rank)}
    path = trainer.save().result()
    log.calls = []
    trainer.run(until=4)  # and it goes on
    result["again"] = (log.calls, trainer.stop_reason)
    before = full_state_dict(trainer.model)
    trainer.config = replace(trainer.config, lr=5e-4, seed=1)
    with pytest.raises(ValueError, match=r"of another run: seed was 0 and is 1; lr was 0\.001 and is 0\.0005"):
        trainer.resume(path)
    assert all(torch.equal(before[name], value) for name, value in full_state_dict(trainer.model).items())
    with torch.no_grad():
        next(trainer.model.parameters()).to_local().fill_(torch.nan)
    log.calls = []
    with pytest.raises(RuntimeError, match=r"step 5: the loss is nan .* newest checkpoint is .*step-00000003"):
        trainer.run()
    result["failed"] = log.calls
    with pytest.raises(ValueError, match="2 ranks do not divide global_batch=9"):
        Trainer(config(f"{folder}/never", global_batch=9))
    with pytest.raises(ValueError, match="cannot read nowhere as UTF-8"):
        Trainer(config(f"{folder}/never", text="nowhere"))
    return result


def two(folder: str) -> dict[str, Any]:
    result = uninterrupted(folder) | resumed(folder)
    return result | {"variants": variants(folder), "stopped": stopped(folder), "validated": validated(folder)}


def four(folder: str, path: str) -> dict[str, Any]:
    """From the checkpoint of two ranks."""
    result = uninterrupted(folder)
    trainer = Trainer(config(f"{folder}/from-two"))
    result["from two"] = (trainer.resume(path).ranks, trainer.run(), losses(trainer))
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = str(tmp_path_factory.mktemp("runs"))
    with launched_ranks("cpu"):  # one rank that nobody launched
        one = uninterrupted(folder) | resumed(folder) | {"validated": validated(folder)}
        compiled = Trainer(config(f"{folder}/compiled", compile="aot_eager", recompute="full"))
        with warnings.catch_warnings():
            # Dynamo looks at the .grad of FSDP's gathered parameters, which are views.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            one["compiled"] = compiled.train_step()["loss"]
    second = run_ranks(two, 2, folder)
    return {1: [one], 2: second, 4: run_ranks(four, 4, folder, second[0]["path"]), "folder": folder}


@pytest.fixture(scope="module")
def plain(runs: dict) -> list[dict[str, float]]:
    return list(plain_loop(config(f"{runs['folder']}/plain")))


def test_any_number_of_ranks_walks_the_curve_of_a_plain_loop(runs: dict, plain: list[dict]) -> None:
    curve = [step["loss"] for step in plain]
    # What the tolerance must not cover: other samples, and half of the learning rate.
    for other in ({"seed": 1}, {"lr": 5e-4}):
        wrong = plain_loop(config(f"{runs['folder']}/plain", **other))
        apart = [abs(step["loss"] - loss) for step, loss in zip(wrong, curve, strict=True)]
        assert max(apart) > 10 * TOLERANCE, other
    for ranks in (1, 2, 4):
        for rank in runs[ranks]:
            assert rank["losses"] == runs[ranks][0]["losses"]  # every rank knows the mean over all
            assert rank["losses"] == pytest.approx(curve, abs=TOLERANCE)
    norms = [m["grad_norm"] for m in read_metrics(f"{runs['folder']}/4")]
    assert norms == pytest.approx([step["grad_norm"] for step in plain], rel=1e-4)
    assert max(norms) < 20


def test_resumed_is_bit_for_bit_uninterrupted(runs: dict) -> None:
    for ranks in (1, 2):
        for rank in runs[ranks]:
            assert rank["resumed"] == rank["losses"]
            assert rank["weights"].keys() == rank["resumed weights"].keys()
            assert all(torch.equal(w, rank["resumed weights"][name]) for name, w in rank["weights"].items())


def test_resumed_on_other_ranks(runs: dict) -> None:
    for rank in runs[4]:
        saved_by, _, curve = rank["from two"]
        assert saved_by == 2
        assert curve == pytest.approx(rank["losses"][3:], abs=TOLERANCE)


def test_every_way_to_compute_a_step_is_the_same_step(runs: dict) -> None:
    by_name = runs[2][0]["variants"]["losses"]
    wanted = runs[2][0]["losses"]
    for name in ("matmuls", "selective", "full"):
        assert by_name[name] == pytest.approx(wanted[:2], abs=TOLERANCE)
    assert runs[1][0]["compiled"] == pytest.approx(wanted[0], abs=TOLERANCE)
    # bf16 keeps 8 bits: the logits, below 1 at first, move by less than 2^-8 each, and the loss by less than twice that.
    assert 0 < abs(by_name["bf16"][0] - wanted[0]) < 2**-7


def test_gradients_are_reduced_once_a_step_or_after_every_micro_batch(runs: dict) -> None:
    """5 units; 2 micro-batches without communication but the last, or 4 with. HSDP adds an all-reduce to each."""
    once, often = (runs[2][0]["variants"]["messages"][name] for name in ("selective", "full"))
    assert once["reduce_scatter"] == 5
    assert often["all_reduce"] - 5 * 4 in (1, 2)  # the loss, and the norm of the gradient
    assert "reduce_scatter" not in often or often["reduce_scatter"] == 5 * 4


def test_callbacks_and_a_stop_that_one_rank_asks_for(runs: dict) -> None:
    """Asked for in on_step of step 2, it takes effect after step 3, on both ranks."""
    steps = [("step", n, n) for n in (1, 2, 3)]
    for rank in runs[2]:
        found = rank["stopped"]
        assert found["calls"] == [("start", 0, None), *steps, ("end", 3, "stopped")]
        assert found["reason"] == "rank 1: the machine goes"
        assert found["again"] == ([("start", 3, None), ("step", 4, 4), ("end", 4, "finished")], None)
        assert found["failed"] == [("start", 4, None), ("end", 4, "failed")]


def test_metrics_mean_what_they_say(runs: dict) -> None:
    flops = step_flops(train_model("tiny"), batch=8, seq=16)
    for number, rank in enumerate(runs[2]):
        for step, metrics in enumerate(rank["stopped"]["metrics"], start=1):
            assert list(metrics) == list(METRIC_KEYS)
            assert (metrics["step"], metrics["samples"], metrics["tokens"], metrics["targets"]) == (
                step,
                8 * step,
                128,
                128,
            )
            assert (metrics["rank"], metrics["world_size"], metrics["attempt"]) == (number, 2, 0)
            seconds = metrics["seconds"]
            parts = [metrics[f"{part}_seconds"] for part in ("data", "forward_backward", "update", "report")]
            assert min(parts) >= 0
            assert sum(parts) <= seconds
            assert metrics["tokens_per_second"] == pytest.approx(128 / seconds)
            assert metrics["mfu"] == pytest.approx(mfu(flops, seconds=seconds, devices=2, peak=1e9))
            assert metrics["hfu"] == pytest.approx(hfu(flops, seconds=seconds, devices=2, peak=1e9))
            assert metrics["memory_bytes"] > 10**7
            assert metrics["lr"] == config("x").learning_rate(step)
    facts = json.loads(Path(runs["folder"], "stopped", "run.json").read_text())
    assert (facts["world_size"], facts["params"], facts["keys"]) == (2, 221_760, METRIC_KEYS)
    assert facts["config"]["global_batch"] == 8


def test_held_out_sequences_are_measured_and_never_trained_on(runs: dict) -> None:
    (one,), two = runs[1], runs[2]
    for rank in (one, *two):
        found = rank["validated"]
        assert found["seen"]
        assert list(found["held"]) == [2, 4]
        assert found["held"][4] == pytest.approx(found["whole"], abs=TOLERANCE)
        assert found["held"] == pytest.approx(one["validated"]["held"], abs=TOLERANCE)
        assert found["held"][4] < found["before"]
    lines = Path(runs["folder"], "validated-2", "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [2 * 8 * 16, 4 * 8 * 16]
    with pytest.raises(ValueError, match="leaves nothing to train on"), launched_ranks("cpu"):
        Trainer(config(f"{runs['folder']}/none", held_out=10**9))


def test_every_rank_leaves_a_trace_of_the_steps_that_were_asked_for(runs: dict) -> None:
    for ranks in (1, 2):
        files = sorted(Path(runs["folder"], f"validated-{ranks}", "traces").iterdir())
        assert [file.name.partition(".")[0] for file in files] == [f"rank{rank}" for rank in range(ranks)]
        steps = [event for event in json.loads(files[0].read_text())["traceEvents"] if "Step#" in str(event["name"])]
        assert {event["name"] for event in steps} == {"ProfilerStep#2"}


# In this process


def test_the_race_takes_turns(tmp_path: Path) -> None:
    with launched_ranks("cpu"):
        samples = compare_loops(config(str(tmp_path)), rounds=2, steps=1, warmup=1)
        with pytest.raises(ValueError, match="rounds=0"):
            compare_loops(config(str(tmp_path)), rounds=0)
    assert [(s["round"], s["loop"]) for s in samples] == [(0, "plain"), (0, "trainer"), (1, "trainer"), (1, "plain")]
    assert all(s["tokens_per_second"] == pytest.approx(128 / s["seconds"][0]) for s in samples)


def test_processes_that_would_train_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    check_alone()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    check_alone()  # inside an allocation, but not started by srun
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(ValueError, match="srun started 4 tasks, and none knows its rank"):
        check_alone()
    monkeypatch.delenv("SLURM_STEP_ID")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ValueError, match="accelerate launch started one process without ranks"):
        check_alone()


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="4 ranks on this machine need 4 GPUs, and there are 2"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PyTorch sees no GPU here"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="device='tpu'"):
        choose_device("tpu")
