"""The checks of rung 11: a program that survives, runs with a fault, MFU, and scaling.

`keep_training` is killed and started again, on other numbers of ranks. `diagnose` is given runs with a fault that nobody
announced. `observe_scaling` is the Done-when of the rung: say what a run on several ranks gained, what it lost, and to
what. It begins with timelines whose answer is known; then comes the learner's report of a real model on GPUs or, where
there is none, a small job on CPU ranks.
"""

from __future__ import annotations

import copy
import functools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from lablib.calc.runs import ScalingLoss, scaling_loss
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    agreed,
    as_float,
    ask_ranks,
    by_name,
    check,
    close,
    numbers,
    on_ranks,
    pair,
    recognize,
    refuse,
    whole,
)
from lablib.launch.ranks import from_rank_0, rank_mesh, readable, run_ranks
from lablib.launch.runs import describe_machine, gpu_report, read_run, scaling_records
from lablib.launch.training import TrainConfig, Trainer

__all__ = ["Task", "TrainingRun", "audit_mfu", "diagnose", "keep_training", "observe_scaling"]


def _float(value: Any) -> float:
    """Return a number for a sentence; `float` alone refuses an array of one number."""
    return float(value.item() if hasattr(value, "item") else value)


def _name(value: Any) -> str:
    """Return a name as plain text, that of a member of a str Enum too."""
    return str.__str__(value) if isinstance(value, str) else str(value)


def _is_written(answer: Callable[..., Any], *case: Any) -> None:
    """Raise NotImplementedError for a stub before any rank is started; what else happens here says nothing."""
    try:
        answer(*case)
    except NotImplementedError:
        raise
    except Exception:
        pass


# --- a run that is killed -----------------------------------------------------------------------------------

LR, _FEATURES, _BLOCKS = 0.02, 16, 3
#: Of a loss in float64: sums in another order move it by 1e-14 in a dozen steps, every planted mistake by 1e-6 or more.
_SAME = 1e-9
_PATIENCE = 40.0  # seconds: it takes four where nothing else runs


class Killed(BaseException):
    """Ends a rank in the middle of a run, as signal 9 does: no `except Exception` holds it up."""


class _Residual(nn.Module):
    """One block: two layers, dropout between them, and the stream."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_FEATURES, 2 * _FEATURES), nn.Linear(2 * _FEATURES, _FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        kept = self.dropout(torch.tanh(self.up(x)))
        self.mask = (kept == 0).numpy().tobytes()
        return x + self.down(kept)


class Task:
    """What a run trains on and for how long, the same on every rank.

    Attributes:
        steps: Optimizer steps of the whole run.
        save_every: Steps between checkpoints.
        batch: Samples of a step, all ranks together.
        count: Samples of an epoch.
    """

    batch, whole, mask = 12, False, b""  # `whole` once the last loss was that of a model with too few units
    _built = nn.Module()  # the last model

    def __init__(self, seed: int, steps: int, save_every: int, count: int, dropout: float = 0.0) -> None:
        self.seed, self.steps, self.save_every, self.count, self.dropout = seed, steps, save_every, count, dropout
        self.losses: dict[int, float] = {}
        self.killed_after = 0  # this step, if any
        self.read: list[int] = []  # samples since the last step, of copies too
        self.masks: list[bytes] = []  # of the first block's dropout, by step

    def model(self) -> nn.Sequential:
        """Return the whole model in float64, on every rank with the same first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self._built = nn.Sequential(*(_Residual(self.dropout) for _ in range(_BLOCKS))).double()
        return self._built

    def order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch in the order in which they are to be taken."""
        return random.Random(f"{self.seed} {epoch}").sample(range(self.count), self.count)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1: a warm-up of four steps, then a decay."""
        return LR * min(step / 4, (4 / step) ** 0.5)

    def loss(self, model: nn.Module, samples: Sequence[int]) -> Tensor:
        """Return the mean loss of some samples."""
        self.read.append(len(samples))
        drawn = [torch.Generator().manual_seed(1000 * self.seed + int(sample)) for sample in samples]
        x = torch.stack([torch.randn(_FEATURES, generator=one, dtype=torch.float64) for one in drawn])
        loss = (model(x) - x.cumsum(-1).sin()).square().mean()
        parts = [*getattr(model, "modules", self._built.modules)()]  # a function may be around the model
        self.whole = sum(hasattr(part, "unshard") for part in parts) <= _BLOCKS
        self.mask = next((part.mask for part in parts if isinstance(part, _Residual)), b"")
        return loss

    def log(self, step: int, loss: Tensor | float) -> None:
        """Note the loss of this rank's samples in a step, counted from 1, once the step is taken."""
        self.losses[whole(step, "The step")] = float(loss)
        share, read = self.batch // dist.get_world_size(), sum(self.read)
        self.read.clear()
        again = b"\1" in self.mask and self.mask in self.masks
        self.masks.append(self.mask)
        refuse("", (f"A step has {self.batch} samples, {share} for each rank; before this `task.log` a rank computes the loss of "
                    f"{read}", read != share),
               ("The model of this loss is not sharded block by block and as a whole: call `fully_shard` on its blocks and on it",
                self.whole),
               (f"In step {step} dropout takes away what it took in an earlier step of this run: new masks each step", again))  # fmt: skip
        if step and step == self.killed_after:
            raise Killed


def _started(
    answer: Callable, task: Task, folder: str, killed_after: int = 0, told: str = "", losses: dict | None = None
) -> dict[int, float]:
    """Start the learner's program as a new process would, and return the losses that it logs until its end.

    Args:
        told: What happened before it was started.
        losses: Gets the losses of this rank's samples, by step.
    """
    task = copy.copy(task)
    task.losses, task.killed_after, task.read, task.masks = {} if losses is None else losses, killed_after, [], []
    torch.manual_seed(task.seed + dist.get_rank())
    try:
        answer(task, folder)
    except Killed:
        pass
    except CheckpointException as error:
        refuse(told, (f"A checkpoint stopped it. {readable(error)}".partition("; rank ")[0].rstrip("."), True))
    losses = torch.tensor([task.losses.get(step, -1.0) for step in range(1, task.steps + 1)], dtype=torch.float64)
    dist.all_reduce(alone := (losses == -1).long())
    refuse("", ("A step is logged by one rank and not by another: each logs the loss of its own samples",
                ((alone > 0) & (alone < dist.get_world_size())).any()),
               ("This hands the checkpoint to lablib's own functions: write and read it with torch.distributed.checkpoint",
                any(name.startswith("lablib.launch.fsdp.checkpoint.") for name in getattr(answer, "called", ()))))  # fmt: skip
    dist.all_reduce(losses)
    return {step: loss.item() / dist.get_world_size() for step, loss in enumerate(losses, 1) if step in task.losses}


def _fresh(top: str, of: str = "") -> str:
    """Return a new folder, the same on every rank, with what another one holds: a machine that is slow asks again."""
    folder = from_rank_0(tempfile.mkdtemp(dir=top))
    if of and Path(of).is_dir() and dist.get_rank() == 0:
        shutil.copytree(of, folder, symlinks=True, dirs_exist_ok=True)
    dist.barrier()
    return folder


def _before_the_accidents(answer: Callable, noisy: Task, plain: Task, kill: int, bad: int, top: str) -> dict:
    """On one rank of two: an undisturbed run; two that are killed; one in which rank 1's disk is full from save `bad` on."""
    top = _fresh(top)
    found: dict[str, Any] = {"top": top, "saved": 0, "calm": _started(answer, noisy, f"{top}/calm")}
    for name, task in (("plain", plain), ("noisy", noisy)):
        found[name] = _started(answer, task, f"{top}/{name}", kill)
    logged: dict[int, float] = {}
    until, write = plain.save_every * bad, FileSystemWriter.write_data

    def full(writer: FileSystemWriter, *args: Any) -> Any:
        found["saved"] += 1
        if len(logged) >= until - 1 and dist.get_rank() == 1:  # a step may be saved before it is logged
            raise OSError("No space left on device")
        return write(writer, *args)

    FileSystemWriter.write_data = full
    try:
        with suppress(Exception, SystemExit):  # what an answer makes of the one that PyTorch raises
            _started(answer, plain, f"{top}/full", until + 1, losses=logged)
    finally:
        FileSystemWriter.write_data = write
    return found


def _go_on(answer: Callable, top: str, told: str, **tasks: Task) -> list[dict[int, float]]:
    return [_started(answer, task, _fresh(top, f"{top}/{name}"), told=told) for name, task in tasks.items()]


def _alone(task: Task) -> tuple[dict[int, float], list[nn.Module]]:
    """Return the losses of a run without dropout in one process, and its models before each step."""
    model, order = task.model(), [sample for epoch in range(task.steps) for sample in task.order(epoch)]
    optimizer, losses, models = torch.optim.AdamW(model.parameters()), {}, []
    for step in range(1, task.steps + 1):
        models.append(copy.deepcopy(model))
        optimizer.param_groups[0]["lr"] = task.rate(step)
        optimizer.zero_grad()
        loss = task.loss(model, order[(step - 1) * task.batch : step * task.batch])
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses, models


def _off(losses: Mapping[int, float], right: Mapping[int, float]) -> int | None:
    """Return the first step whose loss is another one."""
    return next((step for step in losses if not abs(losses[step] - right[step]) < _SAME * right[step]), None)


@check(
    idea="A step depends on weights, moments, learning rate, place in the data and random state; a program that starts again "
    "has what it finds on disk, and a save may be cut short.",
    section="What a restart does: torchrun starts processes, your checkpoint restores them",
    line="Save each step to a folder of its own, and load the newest that has `.metadata`: the state dicts of model and "
    "optimizer, the step, from which place and rate follow, and under a name of its own the random state of each rank.",
    kind="work",
)
def keep_training(answer: Callable[[Task, str], Any]) -> str:
    """Judge `keep_training(task, folder)` by the losses of runs that are killed, and go on with other numbers of ranks."""
    seed, every, count = NEW.randrange(10**6), NEW.choice((3, 4)), NEW.choice((30, 40, 45))
    noisy, plain = (Task(seed, 5 * every, every, count, dropout) for dropout in (0.2, 0.0))
    kill, bad = 4 * every + NEW.randint(1, every - 1), 3
    with tempfile.TemporaryDirectory(prefix="keep-") as top:
        _is_written(answer, None, f"{top}/none")  # where it may write and remove
        both = on_ranks(_before_the_accidents, 2, answer, noisy, plain, kill, bad, top, patience=_PATIENCE)
        first, saved = both[0], min(rank["saved"] for rank in both)
        right, models = _alone(plain)
        _judge_undisturbed(first, plain, right)
        last = kill - kill % every
        told = f"killed after step {kill} with a checkpoint of step {last}"
        # New processes: what one kept in its memory is gone.
        more = functools.partial(_go_on, plain=plain, noisy=noisy)
        again, masked = on_ranks(more, 2, answer, first["top"], told, patience=_PATIENCE)[0]
        _judge_again(again, right, models, plain, last, told)
        off = _off(masked, first["calm"])
        refuse(told, ("With dropout the losses are others after the restart, and without it they are not: look whether dropout "
                      "is on, and at each rank's random state before that step, which a new process has anew", off))  # fmt: skip
        refuse("", (f"Write a checkpoint every {every} steps with torch.distributed.checkpoint, from all ranks, each in its own "
                    f"process: in {bad * every} steps of this program a rank wrote {saved} there", saved < bad))  # fmt: skip
        told = f"rank 1 of 2 could not write the save of step {bad * every}, and three went on"
        (cut,) = on_ranks(functools.partial(_go_on, full=plain), 3, answer, first["top"], told, patience=_PATIENCE)[0]
        _judge_again(cut, right, models, plain, (bad - 1) * every, told)
    return (
        f"Killed after step {kill} of {noisy.steps} it went on with the losses of the run that nobody disturbed, and after a "
        "save that one rank could not write it went on from the one before, on three ranks."
    )


def _judge_undisturbed(first: dict, task: Task, right: dict[int, float]) -> None:
    steps, before = list(first["calm"] if first["plain"] else ()), first["plain"]
    off = _off(before, right)
    crosses = task.count // task.batch + 1
    refuse(
        f"{task.steps} steps, {task.count} samples an epoch, {task.batch} a step",
        (f"A run that nobody disturbs, in a new folder, logs steps 1 to {task.steps}, each once; of these one of yours logs {steps}",
         steps != list(range(1, task.steps + 1))),
        ("With dropout the losses are those without it: train with the model as it is built",
         not off and all(abs(loss - before[step]) < _SAME for step, loss in first["calm"].items() if step in before)),
        (f"Before anything has happened the loss of step {off}, the mean over ranks, is not that of one process: look whether "
         "a batch that reaches the end of an epoch goes on in the next, in that one's order, and at the update before", off == crosses),
        (f"Before anything has happened the loss of step {off}, the mean over ranks, is not that of one process: look at which "
         "samples a rank takes and what it logs of them, past step 1 also at the update before, AdamW's at its step's rate", off),
    )  # fmt: skip


def _judge_again(
    losses: dict[int, float], right: dict[int, float], models: list[nn.Module], task: Task, last: int, told: str
) -> None:
    """Judge a run that went on from a checkpoint of step `last`."""
    cut = "could not write" in told  # the save after that one, and not only the run
    start, off = min(losses, default=0), _off(losses, right)
    # What other places in the data would give with the right weights: the first, and the first of the epoch.
    epoch = last * task.batch // task.count
    begins = [task.order(epoch)[: task.batch], task.order(0)[: task.batch]]
    other = [task.loss(models[last], samples).item() for samples in begins] if off == start == last + 1 else []
    refuse(
        told,
        ("Started again, the program took no step" + cut * ", and after a kill it did", not losses),
        ("Started again, the program begins with step 1, and after a kill it did not: a checkpoint stays until the next one is "
         "complete, and any number of ranks loads it", cut and start == 1),
        (f"Started again, the program goes on with step {start}, from a save that not every rank could write",
         cut and start == last + task.save_every + 1),
        (f"Started again, the program goes on with step {start}: with one every {task.save_every} steps {last} is the last whose "
         f"checkpoint is complete, and step {last + 1} comes next", start != last + 1),
        (f"Started again, the program logs {len(losses)} steps from step {start} on and not all to step {task.steps}",
         max(losses, default=0) != task.steps or len(losses) != task.steps - last),
        (f"Step {start} is taken with other samples: the place in the data is not where it was",
         any(abs(loss / losses[start] - 1) < _SAME for loss in other)),
        (f"The first loss after the restart, of step {start}, is not what it was, and after a kill it was: a save that is cut "
         "short must not touch the one before, and any number of ranks loads it", cut and off == start),
        (f"The first loss after the restart, of step {start}, is not what it was: it depends on the weights and on which "
         "samples come next", off == start),
        (f"The first loss after the restart is right, and that of step {off} is not: look at its samples, and at the "
         "update between them, at the optimizer's moments and the rate, which a new process begins anew", off == start + 1),
        (f"After the restart all is right before step {off}: look at its samples and at what is counted from the restart on", off),
    )  # fmt: skip


# --- a run with a fault -------------------------------------------------------------------------------------

PARTS = ("read", "forward", "backward", "clip", "rate", "update")
_FAULTS = ("", "epoch", "coarse", "stale", "sum", "blocks", "rate", "skip", "lost", "adam")


def _fault(seed: int) -> tuple[str, int, int, int]:
    """Return the kind of a run's fault, "" for none, and the step, the rank and the block that may have it."""
    dice = random.Random(f"run {seed}")
    return dice.choice(_FAULTS), dice.randint(4, 7), dice.randrange(2), dice.randrange(_BLOCKS)


class _Parts(Sealed):
    """What a generator gives, without its frame, which knows the fault."""

    def __init__(self, parts: Iterator[tuple[int, str]]) -> None:
        self._given = parts

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        return next(self._given)


class TrainingRun(Sealed, Task):
    """A run of FSDP2 on two ranks, part by part; one of its parts may not do what it should.

    Attributes:
        clip: What the norm of all gradients is cut to.
        weights: This rank's parameters, sharded, by name.
        optimizer: AdamW.
        samples: What this rank reads in the step.
        value: The mean loss of these.
    """

    clip = 0.05

    def __init__(self, number: int) -> None:
        dice = random.Random(number)
        super().__init__(dice.randrange(10**6), steps=8, save_every=8, count=dice.choice((30, 40, 54)))
        self._number, self.samples, self.value = number, [], 0.0

    def parts(self) -> Iterator[tuple[int, str]]:
        """Train, and give step and part after each part of each step; every rank has to take all of them."""
        return _Parts(self._parts())

    def _parts(self) -> Iterator[tuple[int, str]]:
        kind, when, odd, block = _fault(self._number)
        rank, ranks, model = dist.get_rank(), dist.get_world_size(), self.model()
        for part in (*model, model):
            fully_shard(part, mesh=rank_mesh())
        self.weights = dict(model.named_parameters())
        all_weights = list(self.weights.values())
        groups = [list(part.parameters()) for part in model] if kind == "blocks" else [all_weights]
        own = [p for name, p in self.weights.items() if not (kind == "lost" and name.startswith(f"{block}."))]
        self.optimizer = (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(own)
        order = [sample for epoch in range(self.steps) for sample in self.order(epoch * (kind != "epoch"))]
        for step in range(1, self.steps + 1):
            self.samples = order[(step - 1) * self.batch : step * self.batch][rank::ranks]
            yield step, "read"
            here = (step, rank) == (when, odd)
            loss = self.loss(_in_bfloat16(model) if kind == "coarse" and here else model, self.samples)
            self.value = loss.item()
            yield step, "forward"
            model[block].set_reshard_after_backward(not (kind == "stale" and step == when - 1))
            (loss * (ranks if kind == "sum" else 1)).backward()
            yield step, "backward"
            for group in groups:
                nn.utils.clip_grad_norm_(group, self.clip)
            yield step, "clip"
            self.optimizer.param_groups[0]["lr"] = self.rate(1 + ranks * (step - 1) if kind == "rate" else step)
            yield step, "rate"
            if not (kind == "skip" and here):
                self.optimizer.step()
            yield step, "update"
            for weight in all_weights:
                weight.grad = None


def _in_bfloat16(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x.bfloat16().double())


def _first_wrong(run: TrainingRun, seed: int) -> tuple[int, str, list[int]] | None:
    """Return where a run's fault shows first, and on which of two ranks."""
    kind, when, odd, _ = _fault(seed)
    if kind == "epoch":
        places = range(run.count, run.count + run.batch)
        again, right = run.order(0), run.order(1)
        off = next(place for place in places if again[place - run.count] != right[place - run.count])
        step = off // run.batch
        wrong = {p % 2 for p in range(off, (step + 1) * run.batch) if again[p - run.count] != right[p - run.count]}
        return step + 1, "read", sorted(wrong)
    found = {
        "coarse": (when, "forward", [odd]), "stale": (when, "forward", [0, 1]), "sum": (1, "backward", [0, 1]),
        "blocks": (1, "clip", [0, 1]), "rate": (2, "rate", [0, 1]), "skip": (when, "update", [odd]),
        "lost": (1, "update", [0, 1]), "adam": (1, "update", [0, 1]),
    }  # fmt: skip
    return found.get(kind)


def _runs(seed: int | None) -> list[int]:
    """Return the seeds of eleven runs: two healthy ones, and each fault."""
    dice, found = random.Random(seed), {}
    while len(found) < len(_FAULTS) + 1:
        number = dice.randrange(10**6)
        kind = _fault(number)[0]
        found.setdefault(f"{kind}{'' if kind or '' not in found else 'too'}", number)
    return dice.sample(list(found.values()), len(found))


@check(
    idea="One process that takes the same steps says what every part has to leave behind; the first part that leaves something "
    "else is where the fault shows, and what is computed from it is off as well.",
    section="Slow, wrong or hanging: what to compare, and with what",
    line="Step a twin of one process beside the run, part by part, compare samples, loss, shards of gradients before and after "
    "clipping, rate and shards of weights on this rank, exchange what is off, and name the first.",
    kind="fault",
)
def diagnose(answer: Callable[[TrainingRun], Any], seed: int = 1996) -> str:
    """Judge `diagnose(run)`: None, or (step, part, ranks), the same on each of two ranks, for thirteen runs."""
    _is_written(answer, None)
    runs = _runs(seed) + [new for new in _runs(None) if _fault(new)[0]][:2]  # no list of answers has the last two
    found = ask_ranks(answer, 2, runs, make=TrainingRun)
    where = [_first_wrong(TrainingRun(number), number) for number in runs]
    # The healthy ones first: who accuses them reads why. Then the earliest: who counts from 0 reads so.
    for truth, by_rank in sorted(zip(where, found, strict=True), key=lambda run: run[0][0] if run[0] else 0):
        _judge_diagnosis(agreed([*map(_read_diagnosis, by_rank)]), truth)
    return (
        f"{len(runs)} runs, two of them new. Of the others two are healthy, one took its second epoch in the order of the "
        "first, one rounded a rank's inputs, one went forward with weights of the step before, one summed gradients over "
        "ranks, one clipped blocks alone, one counted ranks as steps of the schedule, on one a rank left an update out, one's "
        "optimizer lacked a block, and one took Adam for AdamW."
    )


def _read_diagnosis(given: Any) -> tuple[int, str, list[int]] | None:
    if given is None:
        return None
    told = "Return None for a healthy run, or (step, part, list of ranks)."
    found = by_name(list(given) if isinstance(given, tuple) else given, "step", "part", "ranks", otherwise=told)
    if (part := _name(found["part"])) not in PARTS:
        raise Wrong(f"The part is one of {', '.join(PARTS)}, and not {part[:40]!r}.")
    ranks = sorted({whole(rank, "A rank") for rank in numbers(found["ranks"], "Ranks")})
    return whole(found["step"], "The step"), part, ranks


def _judge_diagnosis(said: tuple[int, str, list[int]] | None, truth: tuple[int, str, list[int]] | None) -> None:
    def place(found: tuple[int, str, list[int]]) -> tuple[int, int]:
        return found[0], PARTS.index(found[1])

    refuse(
        "",
        (f"A healthy run is accused, of {(said or PARTS)[1]!r} in step {(said or PARTS)[0]}: do what the task says of that part, and "
         "allow for rounding, 1e-13 at most. `clip_grad_norm_` divides by the norm plus 1e-6", truth is None and said),
        ("You find nothing in a run of which one process does something else: compare what every part leaves behind, on "
         "each rank, and allow for no more than rounding", truth and said is None),
    )  # fmt: skip
    if said and truth:
        refuse(
            "",
            (f"You name {said[1]!r} of step {said[0]}, and a part before that leaves something else than one process does: "
             "go back to the first", place(said) > place(truth)),
            (f"You name {said[1]!r} of step {said[0]}, and steps count from 1", said[0] < 1),
            (f"You name {said[1]!r} of step {said[0]}, which leaves what it should, on every rank", place(said) < place(truth)),
            (f"Step and part are right, {said[1]!r} of step {said[0]}, and ranks {said[2]} are not those on which it is off: each "
             "rank compares its own samples, loss and shards", said[2] != truth[2]),
        )  # fmt: skip


# --- an MFU that lies ---------------------------------------------------------------------------------------

NO_MISTAKE = "honest"

#: What a report did, for a claim that is not honest.
_MISTAKES = {
    "attention left out": "it counts 6N a token and leaves attention's two products with scores out",
    "attention twice": "it counts 24Lhs a token for attention in place of 12Lhs",
    "padding counted": "it counts positions that are padding",
    "recomputation counted": "it counts four passes, as the hardware runs them, where the model needs three",
    "sparse peak": "it divides by the peak with sparsity, which no dense model reaches",
}


def _claims(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the MFU of a job, and what each mistake makes of it."""
    weights = 6 * report["parameters"]
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    rate = 1 / (report["seconds"] * report["gpus"] * report["dense_peak"])
    tokens = report["positions"] - report["padding"]
    honest = tokens * (weights + scores) * rate
    claims = {
        NO_MISTAKE: honest,
        "attention left out": tokens * weights * rate,
        "attention twice": tokens * (weights + 2 * scores) * rate,
        "sparse peak": honest * report["dense_peak"] / report["sparse_peak"],
    }
    if report["recompute"] == "full":
        claims["recomputation counted"] = honest * 4 / 3
    if report["padding"]:
        claims["padding counted"] = report["positions"] * (weights + scores) * rate
    return claims


def _causal(report: Mapping[str, Any]) -> float:
    """Return the MFU that counts only those pairs of attention which a causal mask leaves."""
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    needed = 6 * report["parameters"] + scores
    return _claims(report)[NO_MISTAKE] * (needed - scores / 2) / needed


def _mfu_reports(seed: int | None = 2204) -> list[tuple[str, dict[str, Any]]]:
    """Return reports of jobs, each with what is the matter with its MFU; first one that can be done by hand."""
    dice = random.Random(seed)
    hand = {"parameters": 100, "layers": 1, "hidden": 3, "seq": 5, "positions": 10, "padding": 1, "seconds": 1.0,
            "gpus": 1, "dense_peak": 20_000.0, "sparse_peak": 40_000.0, "recompute": "full"}  # fmt: skip
    found = [(mistake, {**hand, "mfu": claim}) for mistake, claim in _claims(hand).items()]
    while len(found) < 60:
        layers, hidden = dice.choice([12, 24, 32, 80]), 128 * dice.randint(6, 64)
        seq, dense = 1024 * dice.choice([1, 2, 4, 8, 32]), dice.choice([125e12, 312e12, 989.4e12])
        job = {"parameters": 12 * layers * hidden**2 + 32_000 * hidden, "layers": layers, "hidden": hidden, "seq": seq}
        job |= {"positions": seq * dice.choice([8, 64, 512]), "gpus": dice.choice([1, 2, 8, 64]), "dense_peak": dense}
        job |= {"padding": dice.choice([0, 0, job["positions"] // 8]), "recompute": dice.choice(["none", "full"])}
        job |= {"sparse_peak": 2 * dense, "seconds": 1.0}
        job["seconds"] = _claims(job)[NO_MISTAKE] / dice.uniform(0.25, 0.45)
        claims = _claims(job)
        # Two mistakes of one job are to be a tenth apart: nobody has to guess.
        ordered = sorted(claims.values())
        mistake = (NO_MISTAKE, *_MISTAKES)[len(found) % (1 + len(_MISTAKES))]
        if mistake in claims and all(b > 1.1 * a for a, b in pairwise(ordered)):
            found.append((mistake, job | {"mfu": claims[mistake]}))
    return found


@check(
    idea="MFU counts what the model needs, for tokens that teach it, over what the GPUs could do with dense matrices.",
    section="MFU, and five ways to get it wrong",
    line="Compute the MFU as the report should have, then once more with each single mistake, and name the one whose "
    "result is nearest to what the report says.",
)
def audit_mfu(answer: Callable[[dict[str, Any]], Any], seed: int = 2204) -> str:
    """Judge `audit_mfu(report)`, which returns the right MFU and what is the matter with the one in the report."""
    reports = _mfu_reports(seed) + _mfu_reports(None)[-12:]  # no table has the last twelve
    for mistake, report in reports:
        got, said = pair(answer(dict(report)), "Return two things, the right MFU and the name of the mistake.")
        claims = _claims(report)
        case = ", ".join(f"{key}={x:g}" if isinstance(x, float) else f"{key}={x}" for key, x in report.items())
        mine = claims[NO_MISTAKE]
        if not close(got, mine):
            slips = [
                ("That is what the report says, and it has a mistake: return the right MFU", report["mfu"]),
                ("That is in percent; an MFU is a share, from 0 to 1", 100 * mine),
                ("Tokens are of all GPUs, so divide by the peak of all of them", report["gpus"] * mine),
                ("This counts the pairs of attention that a causal mask leaves; asked is the convention of this rung's "
                 "equation, 12Lhs, which counts all pairs", _causal(report)),
                ("Backward takes twice the FLOPs of forward: 6N and 12Lhs count all three", mine / 3),
                *((f"Your own MFU has the mistake {name!r}: {_MISTAKES[name]}", claims[name])
                  for name in _MISTAKES if name in claims),
            ]  # fmt: skip
            recognize(got, case, slips)
        refuse(
            case,
            (f"The MFU is tokens that are no padding, times 6N + 12Lhs, over the seconds times the dense peak of all GPUs: "
             f"{mine:.7f}, not {_float(got):.7f}", not close(got, mine)),
        )  # fmt: skip
        if (said := _name(said)) not in (NO_MISTAKE, *_MISTAKES):
            raise Wrong(f"The mistake is one of {', '.join(map(repr, (NO_MISTAKE, *_MISTAKES)))}, and not {said!r}.")
        if said != mistake:
            why = "This report is honest, and you say" if mistake == NO_MISTAKE else "You say"
            but = "" if mistake == NO_MISTAKE else f", but {_MISTAKES[mistake]}, which makes {claims[mistake]:.4f}"
            raise Wrong(f"{why} {said!r}{but} ({case}).")
    return f"{len(reports)} reports, honest ones among them."


# --- what limits a run --------------------------------------------------------------------------------------

_KEYS = ("speedup", "efficiency", "lost", "limit")
_PARTS = ("communication", "imbalance", "data", "compute")

_STEPS, _WARM_UP = 8, 3

#: Of a step: what 32-bit floats may be off.
_ROUNDING = 1e-6

Phases = dict[str, float]


@check(
    idea="Throughput over throughput is the speedup; what is missing to the ideal step splits into four parts that add up.",
    section="Speedup, efficiency and what was lost: two ranks by hand",
    line="Take the slowest rank's time as the step, the least communication of any rank as transfer, what ranks spend "
    "above it or idle at the end as imbalance, and data and computing against the ideal's share.",
)
def observe_scaling(answer: Callable[..., dict[str, Any]], seed: int = 1106) -> str:
    """Judge `observe_scaling(alone, ranks, scaling)` on timelines of known answer, then on a run that happened."""
    one, uneven = _rank(data=1, compute=7), _rank(data=1, compute=9, communication=1)
    cases = [
        (one, [_rank(data=1, compute=7, communication=2)] * 2, "weak"),
        (one, [_rank(data=0.5, compute=3.5, communication=1)] * 2, "strong"),
        (one, [_rank(data=1, compute=7, communication=3), uneven], "weak"),
        (one, [one, _rank(data=4, compute=7)], "weak"),
        # Data is read faster than alone: more is gained there than any other part loses.
        (_rank(data=4, compute=7), [_rank(data=1, compute=8, communication=2.5)] * 2, "weak"),
    ]
    for dice in [random.Random(seed)] * 30 + [NEW] * 4:  # no table has the last four
        scaling, n = dice.choice(("weak", "strong")), dice.randint(2, 6)
        share = 1.0 if scaling == "weak" else 1 / n
        alone = _rank(data=dice.uniform(0.1, 1), compute=dice.uniform(5, 9))
        ranks = []
        for _ in range(n):
            data, compute = share * alone["data"] * dice.uniform(1, 3), share * alone["compute"] * dice.uniform(1, 1.3)
            ranks.append(_rank(data=data, compute=compute, communication=dice.uniform(0.2, 3)))
        cases.append((alone, ranks, scaling))
    for alone, ranks, scaling in cases:
        _judge_scaling(answer(dict(alone), [dict(rank) for rank in ranks], scaling), alone, ranks, scaling)
    if any(name.startswith(f"{scaling_loss.__module__}.") for name in getattr(answer, "called", ())):
        raise Wrong("This hands the timelines to lablib's own functions: split a step by yourself, part by part.")
    report = gpu_report()
    alone, ranks, where = _reported(report) if report else (*_run_now(), "2 CPU ranks a moment ago")
    found = answer(dict(alone), [dict(rank) for rank in ranks], "strong")
    _judge_scaling(found, alone, ranks, "strong")
    more = ""
    if _float(found["speedup"]) > len(ranks):
        more = " More than one per rank: run it again on a quiet machine, to see whether that stays."
    return (
        f"{len(cases)} timelines, and a job on {where}: speedup {_float(found['speedup']):.2f}, efficiency "
        f"{_float(found['efficiency']):.0%}, limited by {_name(found['limit'])}.{more}"
    )


def _rank(*, data: float, compute: float, communication: float = 0.0) -> Phases:
    return {"seconds": data + compute + communication, "data": data, "compute": compute, "communication": communication}


def _judge_scaling(found: object, alone: Phases, ranks: Sequence[Phases], scaling: str) -> None:
    if not isinstance(found, Mapping) or not set(found) >= set(_KEYS):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
    lost, limit = found["lost"], _name(found["limit"])
    if not isinstance(lost, Mapping) or not {*lost} >= {*_PARTS} or any(lost[key] for key in {*lost} - {*_PARTS}):
        raise Wrong(f"`lost` is a dictionary of seconds with the keys {', '.join(_PARTS)}.")
    loss, n = scaling_loss([[alone]], [list(ranks)], scaling=scaling), len(ranks)
    told = f"{scaling}, one rank {alone['seconds']:.3g} s, {n} ranks {loss.seconds:.3g} s"
    faster = loss.efficiency * n
    if not close(found["speedup"], faster, rel=_ROUNDING):
        _explain_speedup(_float(found["speedup"]), faster, alone, ranks, scaling, told)
    if not close(found["efficiency"], faster / n, rel=_ROUNDING):
        slips = [
            ("That is the speedup; the efficiency is the speedup over the number of ranks", faster),
            ("That is in percent; an efficiency of 1 is perfect", 100 * faster / n),
        ]
        recognize(found["efficiency"], told, slips)
        raise Wrong(f"The efficiency is the speedup over the number of ranks, {faster / n:.7f} ({told}).")
    for part in _PARTS:
        # Parts are differences of seconds: rounding is measured against the step, not against the part.
        got = as_float(lost[part], f"What is lost to {part}")
        if not close(got - loss.parts[part] + loss.seconds, loss.seconds, rel=_ROUNDING):
            _explain_part(part, got, loss, ranks, told)
    largest = max(_PARTS, key=lost.__getitem__)
    if limit != largest and lost.get(limit) != lost[largest]:
        refuse(
            told,
            (f"{limit} took less than in the ideal step, and limits nothing", limit in _PARTS and lost[limit] < 0),
            (f"`limit` names the largest part, here {largest!r}, and not {limit!r}", True),
        )  # fmt: skip


def _explain_speedup(
    got: float, right: float, alone: Phases, ranks: Sequence[Phases], scaling: str, told: str
) -> NoReturn:
    seconds, n = [rank["seconds"] for rank in ranks], len(ranks)
    mean, step = fmean(seconds), max(seconds)
    slips = [
        ("Weak scaling does n times the work in a step, strong scaling the same work: throughput over throughput is n T_1/T_n "
         "for the one and T_1/T_n for the other", right / n if scaling == "weak" else right * n),
        ("A step ends when its slowest rank has ended: T_n is the longest of the ranks' times", right * step / mean),
        ("A speedup above one is faster: it is the other way round", 1 / right),
        ("That is a ratio of times; the speedup is one of throughputs", step / alone["seconds"]),
    ]  # fmt: skip
    recognize(got, told, slips)
    raise Wrong(f"The speedup is throughput over throughput of one rank: {right:.7f}, not {got:.7f} ({told}).")


def _explain_part(part: str, got: float, loss: ScalingLoss, ranks: Sequence[Phases], told: str) -> NoReturn:
    sent, right = [rank["communication"] for rank in ranks], loss.parts[part]
    own, mean = part in ("data", "compute"), fmean(rank.get(part, 0.0) for rank in ranks)

    def near(value: float) -> bool:
        return abs(got - value) <= _ROUNDING * loss.seconds

    refuse(
        told,
        ("What a rank sees as communication holds its wait for those that come later. The rank that comes last waits for "
         "nobody, so the transfer itself is the least that any rank spent",
         part == "communication" and (near(fmean(sent)) or near(max(sent)))),
        ("A rank that is done before the step ends waits too: add the time from its own end to the end of the slowest one",
         part == "imbalance" and near(fmean(sent) - min(sent))),
        ("Take the mean over the ranks of what they waited, so that the parts add up",
         part == "imbalance" and near(max(sent) - min(sent))),
        (f"Lost is what {part} took longer than in the ideal step, not all that it took",
         own and near(mean)),
        (f"In strong scaling a rank has the n-th part of the work, so its ideal {part} is the n-th part of what one rank "
         f"needs: {right:.3g} s are lost there, not {got:.3g}",
         own and loss.scaling == "strong" and near(mean - loss.ranks * (mean - right))),
        (f"{part} lost {right:.7g} s a step, not {got:.7g}: the four parts add up to the step minus its ideal, "
         f"{loss.seconds - loss.ideal:.3g} s", True),
    )  # fmt: skip


# --- a job that ran -----------------------------------------------------------------------------------------


def _reported(folder: Path) -> tuple[Phases, list[Phases], str]:
    """Return the mean step of one GPU and of each of the most with the same batch, and where that was."""
    one, *_, many = [record for record in scaling_records(folder) if record["scaling"] != "weak"]
    alone = _mean(one["samples"][0], None, one["warm_up"])
    share = alone["compute"] / many["ranks"]
    return alone, [_mean(lines, share, many["warm_up"]) for lines in many["samples"]], describe_machine(many)


@functools.cache
def _run_now() -> tuple[Phases, list[Phases]]:
    """Train on one CPU rank and on two, the same global batch; return the mean step of the one and of each of the two."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as top:
        for ranks in (1, 2):
            run_ranks(_train, ranks, str(Path(top, str(ranks))), 16)
        one, many = (read_run(Path(top, str(ranks))) for ranks in (1, 2))
    alone = _mean(one[0], None, _WARM_UP)
    return alone, [_mean(lines, alone["compute"] / 2, _WARM_UP) for lines in many]


def _train(folder: str, batch: int) -> None:
    settings = {"model": "tiny", "global_batch": batch, "seq": 64, "precision": "fp32"}
    Trainer(TrainConfig(folder=folder, steps=_STEPS, **settings)).run()


def _mean(lines: Sequence[Mapping[str, Any]], compute: float | None, warm_up: int) -> Phases:
    """Return the mean step of a rank; what it took longer than `compute` and its data is communication and waiting."""
    counted = lines[warm_up:]
    data = fmean(line["data_seconds"] for line in counted)
    rest = fmean(max(line["seconds"], line["data_seconds"]) for line in counted) - data
    sent = 0.0 if compute is None else max(0.0, rest - compute)
    return _rank(data=data, compute=rest - sent, communication=sent)
