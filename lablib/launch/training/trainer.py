"""The trainer: FSDP2, real text, and metrics for every step.

    with launched_ranks():
        trainer = Trainer(TrainConfig(folder="runs/a", model="10m"), callbacks=[PrintSteps()])
        trainer.resume()
        trainer.run()

Read `Trainer.train_step` first. A step is the same on any number of ranks that divides the global batch: the same
samples, the same mean over all of their targets, the same update, but for the order in which numbers are added.
Whatever else a run needs is a callback: checkpoints, signals, printing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lablib.launch.fsdp import (
    Progress,
    Saving,
    latest_checkpoint,
    load_checkpoint,
    make_mesh,
    no_sync,
    read_info,
    save_checkpoint,
    shard,
)
from lablib.launch.ranks import from_rank_0, own_group, rank_device
from lablib.launch.recompute import apply_strategy
from lablib.launch.records import JsonLines, this_machine, write_json
from lablib.launch.training.metrics import METRIC_KEYS, StepClock, memory, peak_flops
from lablib.launch.training.token_data import IGNORE_INDEX, Pretraining, SampleOrder, Task, compiled_loss
from lablib.launch.training.train_config import TrainConfig, differences


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters; matrices decay, biases and norms do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model has requires_grad: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class Callback:
    """Something that a run does besides training; every method may be left out.

    All ranks call the same methods in the same order, so a callback may communicate, except in `on_end` of a run
    that failed: then other ranks may not be there.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called once by `run`, before its first step; `resume()` is possible here."""

    def on_step(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Called after every step with its metrics, see `METRIC_KEYS`."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once when `run` ends, in every way; `trainer.outcome` says in which."""


class Trainer:
    """Trains one model on all ranks; every rank makes one with the same arguments.

    Args:
        task: Model and data; by default `Pretraining(config)`.

    Attributes:
        config, task, callbacks: As given.
        folder, checkpoints: Folders of the run and of its checkpoints.
        rank, world_size, device: Of this process.
        model, optimizer, report: The sharded model, AdamW, and what `shard` did.
        step, samples: Optimizer steps taken and samples trained on.
        flops, peak: FLOPs of a step and a device's peak per second, or None where they are not known.
        outcome: None before `run` ends, then "finished", "stopped" or "failed".
        stop_reason: Why the run was stopped, as the first rank that asked for it said.
    """

    def __init__(self, config: TrainConfig, callbacks: Sequence[Callback] = (), task: Task | None = None) -> None:
        self.config, self.callbacks = config, list(callbacks)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.micro_batch, self.accumulation = config.split_batch(ranks)
        mesh = make_mesh((config.replicas, ranks // config.replicas) if config.replicas > 1 else None)
        self.rank, self.world_size = dist.get_rank(), ranks
        self.device = rank_device()
        self.folder = Path(config.folder)
        self.checkpoints = self.folder / "checkpoints"
        self.task = task or Pretraining(config)
        if config.held_out >= len(self.task):
            raise ValueError(
                f"held_out={config.held_out} leaves nothing to train on: there are {len(self.task)} sequences"
            )
        self.order = SampleOrder(len(self.task) - config.held_out, config.seed)

        model = self.task.build()
        if config.recompute not in ("none", "full"):
            apply_strategy(model, config.recompute)
        self.model, self.report = shard(
            model,
            wrap=config.wrap,
            mesh=mesh,
            precision=config.precision,
            reshard_after_forward=config.reshard,
            prefetch=config.prefetch or None,
            compile_blocks=config.compile,
            recompute=config.recompute == "full",
        )
        self.task.fill(self.model, self.device)
        self.report = replace(self.report, notes=tuple(n for n in self.report.notes if "meta" not in n))
        self._loss = compiled_loss(config.compile)
        self.optimizer = make_optimizer(self.model, config)
        self.step, self.samples = 0, 0
        self.outcome: str | None = None
        self.stop_reason: str | None = None
        self._asked: str | None = None
        self._saved: int | None = None
        self._saving: Saving | None = None
        self.flops = self.task.flops(config.global_batch, config.recompute)
        self.peak = config.peak_flops or peak_flops(self.device, config.precision)
        self._ended = time.perf_counter()

    def run(self, until: int | None = None) -> None:
        """Train to the last step, or to step `until`, or until some rank asks to stop.

        The schedule of the learning rate stays that of all steps. Raises a RuntimeError if the loss or the
        gradient is not finite any more.
        """
        last = self.config.steps if until is None else min(until, self.config.steps)
        self.outcome = self.stop_reason = None
        self._metrics = JsonLines(self.folder / f"metrics-rank{self.rank}.jsonl")
        if self.rank == 0:
            write_json(self.folder / "run.json", _run_facts(self))
        try:
            self._call("on_start")
            self._ended = time.perf_counter()
            while self.step < last and self.stop_reason is None:
                metrics = self.train_step()
                self._metrics.write(metrics)
                self._call("on_step", metrics)
            self.finish_saving()
            self.outcome = "finished" if self.stop_reason is None else "stopped"
        finally:
            self._metrics.close()
            self.outcome = self.outcome or "failed"
            self._call("on_end")

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop together after the step under way; safe in a signal handler.

        From inside `on_step` it takes effect after the next step, which the ranks have agreed to take.
        """
        self._asked = self._asked or reason

    def save(self, *, wait: bool = True) -> Saving | None:
        """Save a checkpoint of this step; every rank must call. Return None if this step is saved already."""
        if self._saved == self.step:
            return None
        data = {"samples": self.samples, "settings": self._settings()}
        saving = save_checkpoint(
            self.checkpoints, self.model, self.optimizer, self.step, data=data, keep=self.config.keep, wait=wait
        )
        self._saved, self._saving = self.step, saving
        return saving

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written; `run` does it before it ends."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def resume(self, path: str | Path | None = None) -> Progress | None:
        """Continue from a checkpoint, by default the newest of this run, on any number of ranks; every rank must call.

        Returns None where there is none. Raises a ValueError if it is damaged, or of a run with other
        settings; nothing is changed then.
        """
        path = from_rank_0(path or latest_checkpoint(self.checkpoints))
        if path is None:
            return None
        data = read_info(path)["data"]
        if differ := differences(data.get("settings", {}), self._settings()):
            raise ValueError(f"checkpoint {path} is of another run: {differ}")
        progress = load_checkpoint(path, self.model, self.optimizer)
        self.step = self._saved = progress.step
        self.samples = data["samples"]
        return progress

    def train_step(self) -> dict[str, Any]:
        """Take one optimizer step on all ranks and return its metrics."""
        config, begun = self.config, time.perf_counter()
        clock = StepClock(self.device)
        batches, targets = self._read()
        clock.mark()
        # The loss is a sum, and FSDP takes the mean over the ranks: this makes it the mean of all ranks' targets.
        scale = self.world_size / targets
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (inputs_BS, targets_BS) in enumerate(batches, start=1):
            reduces = number == self.accumulation or config.reduce_every
            with nullcontext() if reduces else no_sync(self.model):
                loss = self._loss(self.task.logits(self.model, inputs_BS), targets_BS)
                (loss * scale).backward()
            total += loss.detach()
        clock.mark()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        # Still on the device: the host reads it below, together with the loss.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        lr = config.learning_rate(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.mark()
        asked = torch.full((), float(self._asked is not None), dtype=torch.float64, device=self.device)
        report = torch.stack((total, asked))
        dist.all_reduce(report)
        (summed, stop), count, norm = report.tolist(), int(targets), norm.item()
        clock.mark()
        self._check(summed / count, norm)
        self.step += 1
        self.samples += config.global_batch
        learned = {"loss": summed / count, "grad_norm": norm, "lr": lr, "targets": count}
        metrics = _step_metrics(self, clock.times(), learned, between=begun - self._ended)
        self._ended = time.perf_counter()
        if stop:
            self._agree_why()
        return metrics

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over all targets of the held-out sequences; every rank must call.

        Ranks take them in turn. All run the model equally often, since its gathers wait for every rank: a rank that
        has no sequence left runs one again and counts none of its targets.
        """
        held = range(len(self.task) - self.config.held_out, len(self.task))
        if not held:
            raise ValueError("there is nothing to validate on: give the run held_out sequences")
        summed = torch.zeros(2, dtype=torch.float64, device=self.device)  # the losses, and how many there are
        self.model.eval()
        for first in range(0, len(held), self.world_size * self.micro_batch):
            own = list(held[first : first + self.world_size * self.micro_batch][self.rank :: self.world_size])
            inputs_BS, targets_BS = (part.to(self.device) for part in self.task.read(own or [held[0]]))
            loss = self._loss(self.task.logits(self.model, inputs_BS), targets_BS)
            if own:
                summed += torch.stack((loss.double(), (targets_BS != IGNORE_INDEX).sum().double()))
        self.model.train()
        dist.all_reduce(summed)
        total, count = summed.tolist()
        return total / count

    def _settings(self) -> dict[str, Any]:
        return self.config.settings() | {"samples in the data": self.order.count}

    def _read(self) -> tuple[list[tuple[Tensor, Tensor]], Tensor | int]:
        """Return this rank's micro-batches on its device, and the number of targets on all ranks."""
        share = self.order.share(self.samples, self.config.global_batch, self.rank, self.world_size)
        batches, targets = [], 0
        for first in range(0, len(share), self.micro_batch):
            pair = self.task.read(share[first : first + self.micro_batch])
            targets += int((pair[1] != IGNORE_INDEX).sum())
            if self.device.type == "cuda":
                pair = tuple(part.pin_memory().to(self.device, non_blocking=True) for part in pair)
            batches.append(pair)
        if not self.task.uneven:
            return batches, targets * self.world_size
        counted = torch.tensor(float(targets), device=self.device)
        dist.all_reduce(counted)
        return batches, counted

    def _check(self, loss: float, norm: float) -> None:
        """Stop at a loss or gradient that is not finite; all ranks see the same, and no checkpoint gets it."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        newest = latest_checkpoint(self.checkpoints)
        where = f"newest checkpoint is {newest}: resume there" if newest else "run has none: start again"
        raise RuntimeError(
            f"step {self.step + 1}: the loss is {loss} and the gradient's norm {norm}; the weights are spoilt and not "
            f"saved. The {where} with a smaller learning rate"
        )

    def _agree_why(self) -> None:
        """Tell every rank the reason of the first one that has one."""
        self.finish_saving()  # it talks in the same group, in the background
        reasons: list[str | None] = [None] * self.world_size
        dist.all_gather_object(reasons, self._asked, group=own_group())
        self.stop_reason = next(f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason)
        self._asked = None

    def _call(self, method: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(self, *args)


def _step_metrics(
    trainer: Trainer, times: dict[str, float], learned: dict[str, float], *, between: float
) -> dict[str, Any]:
    """Return a step's metrics, with the keys of `METRIC_KEYS` in their order."""
    config, flops, peak = trainer.config, trainer.flops, trainer.peak
    tokens, rate = config.global_batch * config.seq, 1 / times["seconds"] / trainer.world_size
    metrics = {
        **times,
        **learned,
        **memory(trainer.device),
        "step": trainer.step,
        "samples": trainer.samples,
        "epoch": trainer.samples / trainer.order.count,
        "tokens": tokens,
        "between_seconds": between,
        "tokens_per_second": tokens / times["seconds"],
        "tokens_per_second_per_rank": tokens * rate,
        "tflops_per_rank": flops.model * rate / 1e12 if flops else None,
        "mfu": flops.model * rate / peak if flops and peak else None,
        "hfu": flops.hardware * rate / peak if flops and peak else None,
        "rank": trainer.rank,
        "world_size": trainer.world_size,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "time": time.time(),
    }
    return {key: metrics[key] for key in METRIC_KEYS}


def _run_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the content of run.json: settings, machine, model and sharding."""
    flops = trainer.flops
    return {
        "config": trainer.config.as_dict(),
        "world_size": trainer.world_size,
        "micro_batch": trainer.micro_batch,
        "accumulation": trainer.accumulation,
        "params": trainer.report.params,
        "params_per_rank": trainer.report.params_per_rank,
        "sharding": str(trainer.report),
        "model_flops": flops.model if flops else None,
        "hardware_flops": flops.hardware if flops else None,
        "peak_flops": trainer.peak,
        "device": str(trainer.device),
        "machine": this_machine(),
        "keys": METRIC_KEYS,
    }
