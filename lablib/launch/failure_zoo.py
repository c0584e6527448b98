"""The failure zoo: small training programs, each with one planted fault and a healthy twin, run on two ranks.

    symptoms = run("B")                 # the fault of program B; run("B", healthy=True) is its twin
    print(symptoms)                     # losses, norms, traffic, where ranks stand
    symptoms.calls[1]                   # [("all_reduce", 712), ...]: the collectives of rank 1
    watch_flips([Flip("sum", bit=30)])  # what losses, norms and digests see of one flipped bit

Read the programs first: the lines under `if faulty` are the faults, in `flipped_bit` those of `pass_by`. Below them is
what all programs share, a small model, its data, its log, and a watch for hangs.

Every rank writes a log (`lablib.launch.records.logs`): each collective before it waits for it, each step, its end.
From the logs of all ranks a hang can be proven without a clock: a rank waits for ever when another one has called
another collective in the same place, or has returned without calling it. The watch looks for that, and ends the rank.
"""

from __future__ import annotations

import linecache
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import hypot, inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lablib.launch.measure import (
    Call,
    CommEvent,
    CommLog,
    dump_flight_record,
    flight_recorder_settings,
    read_flight_records,
    record_comms,
)
from lablib.launch.ranks import RankError, rank_mesh, run_ranks
from lablib.launch.records import RankLog, digest, read_logs
from lablib.toys.gradient_layout import set_grad

_LOOK_S = 0.01  # between two looks of the watch; nothing depends on it
_PEER_S = 5.0  # for the other ranks to prove the hang, too, before this one ends
_ENDED = ("returned", "hang")

#: Where a bit can flip: in one rank's weights before a step, in its inputs, in its own gradient, in the sum of all
#: gradients that it has received; or in the sum while it is made, and then every rank receives it so.
PLACES = ("weights", "input", "gradient", "received sum", "sum")


@dataclass(frozen=True)
class Flip:
    """One bit of one 32-bit number that turns over in mid-run."""

    where: str = "weights"  # one of PLACES
    bit: int = 12  # 0 to 22 of the mantissa, lowest first, 23 to 30 of the exponent, 31 the sign
    step: int = 2  # counted from 0
    number: int = 0  # which one; from the end if negative, and of weights and gradients -1 is the last bias


@dataclass(frozen=True)
class Setting:
    """The settings of one run of a program."""

    steps: int = 5  # optimizer steps of a healthy run, at least 4
    micro_batches: int = 1  # gradients added up before each of them
    width: int = 8  # of the model, even
    culprit: int = 1  # the rank that misbehaves, where one does
    seed: int = 0  # of weights and data
    flip: Flip = Flip()  # in program K


# --- the programs ---------------------------------------------------------------------------------------------------


def train_copies(setting: Setting, log: RankLog, program: str, fault: bool) -> None:
    """Data parallelism by hand, in which most faults are planted: each rank has a copy and reduces its gradients."""
    faulty = program if fault else ""
    job = Job(setting, log)
    optimizer, mean = job.optimizer(), torch.zeros(3)
    batches = job.ranks * setting.steps
    if faulty == "uneven data":
        batches += 1  # no multiple of the ranks, and the rest is not dropped
    mine = job.mine(batches)
    if faulty == "data seen again":  # started again from a checkpoint, the loader begins at the first batch
        mine = (mine[: setting.steps // 2] + mine)[: setting.steps]
    turns = {1: setting.culprit, setting.steps - 1: (setting.culprit + 1) % job.ranks}  # step to rank
    with watched(log):
        for step, number in enumerate(mine):
            if faulty == "skipped batch" and job.culprit and step == setting.steps // 2:
                continue  # and leaves out the collective with it
            late = faulty == "slow rank" and job.culprit
            if faulty == "straggler that comes and goes":
                late = turns.get(step) == job.rank  # all have as much to do in the end
            loss, gradient = job.backward(number, padding=8 if late else 0)
            if faulty == "wrong-dtype reduction":
                gradient = gradient.bfloat16()  # which keeps 8 of 24 significant bits
            if faulty == "mismatched collectives" and job.culprit:
                dist.broadcast(mean, src=0)  # the others share the running mean after the gradients
                dist.all_reduce(gradient)
            else:
                dist.all_reduce(gradient)
                if program == "mismatched collectives":
                    dist.broadcast(mean, src=0)
            job.update(optimizer, loss, gradient / job.ranks)
            if faulty != "forgotten zero_grad":
                optimizer.zero_grad()


def unsharded_parameter(setting: Setting, log: RankLog, program: str, fault: bool) -> None:
    """FSDP2 is told to leave the largest weight alone; it stays unsharded, and its gradient is averaged by nobody."""
    from torch.distributed.fsdp import fully_shard  # here: the other programs start sooner without it

    job = Job(setting, log, "sharded")
    largest = max(job.model.parameters(), key=torch.Tensor.numel)
    fully_shard(job.model, mesh=rank_mesh(), ignored_params={largest} if fault else None)
    optimizer = job.optimizer()
    with watched(log):
        for number in job.mine(job.ranks * setting.steps):
            loss = job.loss(number)
            loss.backward()
            job.step(optimizer, loss.item())
            optimizer.zero_grad()
    kept = [p.to_local() if hasattr(p, "to_local") else p for p in job.model.parameters()]
    log.write("state", bytes=sum(p.nbytes for p in kept))


def communicating_accumulation(setting: Setting, log: RankLog, program: str, fault: bool) -> None:
    """DDP reduces after the backward pass of every micro-batch, not of the last one only."""
    job = Job(setting, log)
    job.forward = ddp = DistributedDataParallel(job.model)
    optimizer = job.optimizer()
    count = setting.micro_batches
    mine = job.mine(job.ranks * count * setting.steps)
    with watched(log):
        for step in range(setting.steps):
            batches = mine[step * count : (step + 1) * count]
            losses = []
            for i, number in enumerate(batches):
                with nullcontext() if fault or i == count - 1 else ddp.no_sync():
                    loss = job.loss(number)
                    (loss / count).backward()
                losses.append(loss.item())
            job.step(optimizer, *losses)
            optimizer.zero_grad()


def equal_seeds(setting: Setting, log: RankLog, program: str, fault: bool) -> None:
    """Two ranks hold the halves of one model, as tensor parallelism cuts it, and draw them from one seed."""
    rank = dist.get_rank()
    job = Job(setting, log, "tensor parallel", half_model(setting, draw=0 if fault else rank))

    def together(x: torch.Tensor) -> torch.Tensor:
        part = job.model(x)
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return part + (whole - part.detach())  # the value of the sum; each part's gradient is the sum's

    job.forward = together
    optimizer = job.optimizer()
    with watched(log):
        for number in range(setting.steps):
            loss = job.loss(number)
            loss.backward()
            job.step(optimizer, loss.item())
            optimizer.zero_grad()


def flipped_bit(setting: Setting, log: RankLog, program: str, fault: bool) -> None:
    """A bit turns over once, by default in the weights of one rank, and nothing crashes."""
    job = Job(setting, log)
    optimizer, flip = job.optimizer(), setting.flip

    def pass_by(where: str, numbers: Tensor) -> Tensor:
        hit = fault and where == flip.where and step == flip.step and (job.culprit or where == "sum")
        return flip_bit(numbers, flip.number, flip.bit) if hit else numbers

    job.forward = lambda x: job.model(pass_by("input", x))
    with watched(log):
        for step, number in enumerate(job.mine(job.ranks * setting.steps)):  # noqa: B007  # `pass_by` reads it
            weights = parameters_to_vector(job.model.parameters()).detach()
            vector_to_parameters(pass_by("weights", weights), job.model.parameters())
            loss, gradient = job.backward(number)
            gradient = pass_by("gradient", gradient)
            dist.all_reduce(gradient)
            # A wrong sum reaches all ranks, be it from a rank of the ring or from a switch that adds.
            gradient = pass_by("sum", pass_by("received sum", gradient))
            job.update(optimizer, loss, gradient / job.ranks)
            optimizer.zero_grad()


def flip_bit(numbers: Tensor, number: int, bit: int) -> Tensor:
    """Return a copy of 32-bit floats in which one bit of one of them is the other way round; bit 31 is the sign."""
    bits = numbers.detach().clone().view(torch.int32)
    bits.view(-1)[number] ^= 1 << bit if bit < 31 else -(1 << 31)
    return bits.view(torch.float32)


RANKS = 2
_TIMEOUT_S = 60.0  # never waited for: the watch in each rank proves a hang long before

#: Fault by letter.
FAULTS = {
    "A": "forgotten zero_grad",
    "B": "skipped batch",
    "C": "wrong-dtype reduction",
    "D": "mismatched collectives",
    "E": "slow rank",
    "F": "accumulation that communicates",
    "G": "uneven data",
    "H": "unsharded parameter",
    "I": "equal seeds",
    "J": "data seen again",
    "K": "silent data corruption",
    "L": "straggler that comes and goes",
}
#: All others are of `train_copies`.
_PROGRAMS = {"F": communicating_accumulation, "H": unsharded_parameter, "I": equal_seeds, "K": flipped_bit}
_HANGS = frozenset("BDG")
HEALTHY = "healthy"


# --- their symptoms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Symptoms:
    """The symptoms of a job, from its logs. Lists of lists are by rank."""

    parameters: int  # of the model, 4 bytes each
    # "copies": each rank has the model. "sharded": FSDP2 shards it. "tensor parallel": each rank has half of each matrix,
    # and all ranks of the group work on the same batches.
    layout: str
    micro_batches: int  # gradients added up before each optimizer step
    # mean loss ("losses") and gradient norm ("norms") of each step, from one process that trains on the same batches
    expected: dict[str, list[float]]
    # numbers of the batches in the order of their use. They are dealt round: with two ranks, rank 0 gets 0, 2, 4 ...
    # and rank 1 gets 1, 3, 5 ...; the ranks of a tensor-parallel group get all of them.
    batches: list[list[int]]
    losses: list[list[float]]  # mean loss of each step
    norms: list[list[float]]  # norm of the gradients that the rank's optimizer got, each step
    flops: list[list[int]]  # work of each step until the gradients are there, counted
    digests: list[list[str]]  # checksum of the weights, or of the rank's part of them, after each step
    # operation and bytes of every collective of the training loop. The last one of a rank that hangs is the one that
    # it waits in.
    calls: list[list[tuple[str, int]]]
    weight_norms: list[float]  # norm of the weights that the rank drew, before any were sharded
    state_bytes: list[int | None]  # bytes of parameters that the rank keeps between steps; None where it was not logged
    ended: list[str]  # "returned", or the line of the program on which the rank hangs

    @property
    def hangs(self) -> bool:
        """Whether a rank waits for ever."""
        return any(each != "returned" for each in self.ended)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.layout == "sharded"

    @property
    def job_losses(self) -> list[float]:
        """Loss of each step of all ranks: their mean, which is what one process has."""
        return [fmean(step) for step in zip(*self.losses, strict=False)]

    @property
    def job_norms(self) -> list[float]:
        """Gradient norm of each step of all ranks: of shards the root of the sum of squares, of copies the largest."""
        steps = zip(*self.norms, strict=False)
        return [max(step) if self.layout == "copies" else hypot(*step) for step in steps]

    @property
    def job_flops(self) -> list[int]:
        """Work of each step of all ranks: that of the rank with most of it, for which the others wait."""
        return [max(step) for step in zip(*self.flops, strict=False)]

    def __str__(self) -> str:
        """Return what fits on a screen."""
        kind = {"copies": "a copy on each rank", "sharded": "sharded by FSDP2"}.get(self.layout, self.layout)
        lines = [f"{self.parameters} parameters of 4 bytes, {kind}; {self.micro_batches} micro-batches a step"]
        rows = [("expected", self.expected["losses"], self.expected["norms"])]
        rows += [("all ranks", self.job_losses, self.job_norms)]
        rows += [(f"rank {r}", self.losses[r], self.norms[r]) for r in range(len(self.ended))]
        lines += [f"  loss           {who:9}  {_row(losses)}" for who, losses, _ in rows]
        lines += [f"  gradient norm  {who:9}  {_row(norms)}" for who, _, norms in rows]
        for r, ended in enumerate(self.ended):
            calls = self.calls[r]
            first = ", ".join(f"{op} {size} B" for op, size in calls[:2])
            kept = f"; keeps {self.state_bytes[r]} B" if self.state_bytes[r] is not None else ""
            lines.append(f"  rank {r}: batches {self.batches[r]}")
            lines.append(f"          FLOPs of each step {self.flops[r]}")
            lines.append(f"          first weights' norm {self.weight_norms[r]:.6f}{kept}")
            lines.append(f"          weights after each step {' '.join(each[:8] for each in self.digests[r])}")
            lines.append(f"          {len(calls)} collectives: {first}{' ...' if len(calls) > 2 else ''}")
            if ended != "returned":
                waits = f"{calls[-1][0]} {calls[-1][1]} B" if calls else "no collective"
                lines.append(f"          waits for ever in {waits}: {ended}")
        return "\n".join(lines)


def run(program: str, *, healthy: bool = False, setting: Setting | None = None) -> Symptoms:
    """Run one program on two ranks and return its symptoms; a hang is ended as soon as it is proven."""
    return run_programs([(program, healthy, setting or Setting())])[0]


def run_programs(cases: Sequence[tuple[str, bool, Setting]]) -> list[Symptoms]:
    """Run many programs, those that cannot hang in one start of the ranks."""
    for program, _, setting in cases:
        _check(program, setting)
    hanging = [program in _HANGS and not healthy for program, healthy, _ in cases]
    with tempfile.TemporaryDirectory(prefix="zoo-") as top:
        folders = [Path(top, str(i)) for i in range(len(cases))]
        together = [(*case, str(f)) for case, f, h in zip(cases, folders, hanging, strict=True) if not h]
        if together:
            run_ranks(_play, RANKS, together, timeout=_TIMEOUT_S)
        for case, folder, hangs in zip(cases, folders, hanging, strict=True):
            if hangs:
                _run_until_it_hangs([(*case, str(folder))], folder)
        return [_symptoms(folder, case[2]) for folder, case in zip(folders, cases, strict=True)]


def recorded_hang(program: str, setting: Setting | None = None) -> dict[int, list[Call]]:
    """Run a program that hangs, and return what PyTorch's flight recorder kept of it."""
    setting = setting or Setting()
    _check(program, setting)
    if program not in _HANGS:
        raise ValueError(f"program {program} does not hang; {', '.join(sorted(_HANGS))} do")
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        case = (program, False, setting, folder)
        _run_until_it_hangs([case], Path(folder), flight_recorder_settings(folder))
        return read_flight_records(folder)


@dataclass(frozen=True)
class FlipSeen:
    """What each instrument sees of a flipped bit, beside the same run without it, to which all else is equal."""

    flip: Flip
    losses: list[float]  # of each step, the mean over ranks
    undisturbed: list[float]  # the same without the flip
    loss_moves: float  # the largest move of a step's loss, of the undisturbed one; inf if there is none any more
    norm_moves: float  # the same of the gradient norm
    ranks_differ: int | None  # the first step after which the digests of two ranks differ
    twin_differs: int | None  # the first step after which a digest is another one than without the flip


def watch_flips(flips: Sequence[Flip], setting: Setting | None = None) -> list[FlipSeen]:
    """Run program K once for each flip and once without, and return what the instruments see."""
    setting = setting or Setting()
    twin, *runs = run_programs([("K", True, setting), *(("K", False, replace(setting, flip=flip)) for flip in flips)])
    return [_compare(flip, run, twin) for flip, run in zip(flips, runs, strict=True)]


def _compare(flip: Flip, seen: Symptoms, twin: Symptoms) -> FlipSeen:
    def moves(values: list[float], right: list[float]) -> float:
        return max(abs(a / b - 1) if isfinite(a) else inf for a, b in zip(values, right, strict=True))

    def first(differ: Iterator[bool]) -> int | None:
        return next((step for step, differs in enumerate(differ) if differs), None)

    by_step, right = list(zip(*seen.digests, strict=True)), list(zip(*twin.digests, strict=True))
    return FlipSeen(
        flip=flip,
        losses=seen.job_losses,
        undisturbed=twin.job_losses,
        loss_moves=moves(seen.job_losses, twin.job_losses),
        norm_moves=moves(seen.job_norms, twin.job_norms),
        ranks_differ=first(len(set(step)) > 1 for step in by_step),
        twin_differs=first(a != b for a, b in zip(by_step, right, strict=True)),
    )


def _run_until_it_hangs(
    work: list[tuple[str, bool, Setting, str]], folder: Path, env: dict[str, str] | None = None
) -> None:
    try:
        run_ranks(_play, RANKS, work, timeout=_TIMEOUT_S, env=env)
    except RankError:
        # A rank that hangs is ended by its watch, and has said so in its log. Anything else is an error.
        if not any(line["event"] == "hang" for lines in read_logs(folder).values() for line in lines):
            raise


def _play(work: list[tuple[str, bool, Setting, str]]) -> None:
    for program, healthy, setting, folder in work:
        log = RankLog(folder)
        _PROGRAMS.get(program, train_copies)(setting, log, FAULTS[program], not healthy)
        log.close()


def _check(program: str, setting: Setting) -> None:
    if program not in FAULTS:
        raise ValueError(f"there is no program {program!r}; use {', '.join(FAULTS)}")
    if setting.steps < 4 or setting.micro_batches < 1 or setting.width < 2 or setting.width % 2:
        raise ValueError(
            f"steps={setting.steps} must be at least 4, micro_batches={setting.micro_batches} at least 1, and "
            f"width={setting.width} even"
        )
    if setting.culprit not in range(RANKS):
        raise ValueError(f"culprit={setting.culprit} must be a rank, 0 to {RANKS - 1}")
    _check_flip(setting)
    if (program == "F") != (setting.micro_batches > 1):
        raise ValueError(
            f"program {program} with micro_batches={setting.micro_batches}: F accumulates and needs at least 2, the "
            "others take one micro-batch a step"
        )


def _check_flip(setting: Setting) -> None:
    flip = setting.flip
    if flip.where not in PLACES:
        raise ValueError(f"a bit flips in one of {', '.join(map(repr, PLACES))}, and not in {flip.where!r}")
    if flip.bit not in range(32) or flip.step not in range(setting.steps):
        raise ValueError(
            f"flip of bit={flip.bit} in step={flip.step}: bits are 0 to 31, and steps 0 to {setting.steps - 1}"
        )
    count = 4 * setting.width if flip.where == "input" else sum(p.numel() for p in build(setting).parameters())
    if flip.number not in range(-count, count):
        raise ValueError(f"flip of number={flip.number}: there are {count} in {flip.where!r} at width={setting.width}")


def _symptoms(folder: Path, setting: Setting) -> Symptoms:
    logs = [lines for _, lines in sorted(read_logs(folder).items())]

    def column(name: str) -> list[list[Any]]:
        return [[line[name] for line in lines if name in line] for lines in logs]

    def floats(name: str) -> list[list[float]]:  # a log has infinity as text
        return [[float(value) for value in values] for values in column(name)]

    job = _first(logs[0], "job")
    return Symptoms(
        parameters=job["parameters"],
        layout=job["layout"],
        micro_batches=setting.micro_batches,
        expected=reference(setting, RANKS, job["layout"]),
        batches=column("number"),
        losses=floats("loss"),
        norms=floats("norm"),
        flops=column("flops"),
        digests=column("digest"),
        calls=[get_calls(lines) for lines in logs],
        weight_norms=[_first(lines, "job")["weight_norm"] for lines in logs],
        state_bytes=[_first(lines, "state").get("bytes") for lines in logs],
        ended=[_first(lines, "hang").get("line", "returned") for lines in logs],
    )


def _first(lines: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next((line for line in lines if line["event"] == event), {})


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


# --- what all programs share ----------------------------------------------------------------------------------------


class Job:
    """One rank's part of a training job, and its log."""

    def __init__(self, setting: Setting, log: RankLog, layout: str = "copies", model: nn.Module | None = None) -> None:
        self.setting, self.log = setting, log
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.culprit = self.rank == setting.culprit
        self.model = model or build(setting)
        self.forward: Callable[[Tensor], Tensor] = self.model  # or what wraps it
        self._parameters, self._rows = sum(p.numel() for p in self.model.parameters()), 0
        self.model.register_forward_pre_hook(self._count)
        drawn = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        parameters = self._parameters * (self.ranks if layout == "tensor parallel" else 1)
        log.write("job", parameters=parameters, layout=layout, weight_norm=torch.linalg.vector_norm(drawn).item())

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; after the model is wrapped."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def mine(self, batches: int) -> list[int]:
        """Return the numbers of the batches that this rank gets out of so many: every `ranks`-th."""
        return list(range(self.rank, batches, self.ranks))

    def loss(self, number: int, padding: int = 0) -> Tensor:
        """Return the mean loss of a batch."""
        self.log.write("batch", number=number)
        x, y = batch(self.setting, number)
        rows = len(x)
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
        return (self.forward(x)[:rows] - y).square().mean()

    def backward(self, number: int, padding: int = 0) -> tuple[float, Tensor]:
        """Return the loss of a batch, and this rank's gradients of all parameters so far in one vector."""
        loss = self.loss(number, padding)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def update(self, optimizer: torch.optim.Optimizer, loss: float, flat: Tensor) -> None:
        """Log the step and take it, with a vector in the place of the gradients; they stay until they are zeroed."""
        self.set_grad(flat)
        self.step(optimizer, loss)

    def set_grad(self, flat: Tensor) -> None:
        """Put a vector back into the gradients."""
        start = 0
        for p in self.model.parameters():
            set_grad(p, flat[start : start + p.numel()])
            start += p.numel()

    def step(self, optimizer: torch.optim.Optimizer, *losses: float) -> None:
        """Take a step and log it: mean loss, norm of the gradients, work done, and a checksum of the new weights.

        Work is counted, 6 FLOPs for each weight and row in forward and backward: a clock would also count the time
        that this rank waits for others. The checksum is of the weights' bits.
        """
        local = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in local])).item()
        flops = 6 * self._parameters * self._rows
        optimizer.step()
        weights = digest(_local(p) for p in self.model.parameters())
        self.log.write("step", loss=sum(losses) / len(losses), norm=norm, flops=flops, digest=weights)
        self._rows = 0

    def _count(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows += len(inputs[0])


def build(setting: Setting) -> nn.Module:
    """Return the model; the same weights for the same seed."""
    torch.manual_seed(setting.seed)
    width = setting.width
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, 2))


def half_model(setting: Setting, draw: int) -> nn.Module:
    """Return a rank's half of a model that is cut in two, as tensor parallelism cuts it: the halves' outputs add up.

    Args:
        draw: Which of the seed's weights; the halves of one model have different ones.
    """
    torch.manual_seed(2 * setting.seed + draw)
    width = setting.width
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2, bias=False))


class _Halves(nn.Module):
    """The model that two halves make together."""

    def __init__(self, setting: Setting, ranks: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(half_model(setting, draw) for draw in range(ranks))

    def forward(self, x: Tensor) -> Tensor:
        return sum(half(x) for half in self.halves)


def batch(setting: Setting, number: int) -> tuple[Tensor, Tensor]:
    """Return inputs (4, width) and targets (4, 2) of a batch."""
    generator = torch.Generator().manual_seed(1000 * setting.seed + number)
    x = torch.randn(4, setting.width, generator=generator)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], dim=1)


def reference(setting: Setting, ranks: int, layout: str = "copies") -> dict[str, list[float]]:
    """Return mean loss and gradient norm of each step of the job as it should be, from one process."""
    group = layout == "tensor parallel"  # whose ranks work on one batch together
    model = _Halves(setting, ranks) if group else build(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    share = 1 if group else ranks * setting.micro_batches
    for step in range(setting.steps):
        total = 0.0
        for number in range(step * share, (step + 1) * share):
            x, y = batch(setting, number)
            loss = (model(x) - y).square().mean() / share
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


class _LoggedEvents(list):
    """The events of a CommLog, each written to the rank's log before the rank waits for it."""

    def __init__(self, log: RankLog) -> None:
        super().__init__()
        self._log = log

    def append(self, event: CommEvent) -> None:
        super().append(event)
        self._log.write("collective", op=event.op, bytes=event.bytes)


@contextmanager
def watched(log: RankLog) -> Iterator[None]:
    """Log what the rank communicates inside the block, and end the process if it hangs."""
    over = threading.Event()
    main = threading.get_ident()
    watch = threading.Thread(target=_watch, args=(log, over, main), daemon=True)
    watch.start()
    with record_comms(CommLog(events=_LoggedEvents(log))):
        yield
    log.write("returned")
    over.set()
    watch.join()
    _dump(log)


def _watch(log: RankLog, over: threading.Event, main: int) -> None:
    while not over.wait(_LOOK_S):
        logs = read_logs(log.path.parent)
        own = logs.pop(dist.get_rank(), [])
        if any(_stuck(own, other) for other in logs.values()):
            log.write("hang", line=_line(main))
            _dump(log)
            _wait_for_the_others(log.path.parent, over)
            os._exit(3)  # the main thread waits in C++, and nothing else ends it


def _dump(log: RankLog) -> None:
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        dump_flight_record(log.path.parent)


def _stuck(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Say whether a rank with the first log waits for ever for one with the second."""
    mine, theirs = get_calls(own), get_calls(other)
    if any(a != b for a, b in zip(mine, theirs, strict=False)):
        return True
    return len(mine) > len(theirs) and any(line["event"] == "returned" for line in other)


def get_calls(lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return operation and bytes of every collective in a log."""
    return [(line["op"], line["bytes"]) for line in lines if line["event"] == "collective"]


def _wait_for_the_others(folder: Path, over: threading.Event) -> None:
    for _ in range(int(_PEER_S / _LOOK_S)):
        if all(any(line["event"] in _ENDED for line in lines) for lines in read_logs(folder).values()):
            return
        over.wait(_LOOK_S)


def _line(thread: int) -> str:
    """Return the text of the innermost line of the program that a thread stands on."""
    frame = sys._current_frames().get(thread)
    while frame and not frame.f_code.co_filename.endswith("failure_zoo.py"):
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame else ""


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
