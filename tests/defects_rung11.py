"""Planted defects of rung 11: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import copy
import enum
import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import fully_shard

from lablib.calc.runs import scaling, scaling_loss
from lablib.checks import rung11
from lablib.launch.fsdp import latest_checkpoint
from lablib.launch.ranks import rank_mesh
from tests.planted import asked, listed, told


def _built(task, blocks=True):
    model = task.model()
    for part in (*(model if blocks else ()), model):
        fully_shard(part, mesh=rank_mesh())
    return model, torch.optim.AdamW(model.parameters())


def _samples(task):
    return [sample for epoch in range(task.steps) for sample in task.order(epoch)]


def _whole_saves(folder):
    return [path.parent for path in Path(folder).glob("*/.metadata")]


def _kept(
    task,
    folder,
    *,
    found=_whole_saves,
    where=lambda folder, step: f"{folder}/{step}",
    moments=True,
    random=lambda rank: f"random{rank}",
    place=lambda task, step, begun, ranks: (step - 1) * task.batch,
    order=_samples,
    rate=lambda task, step, begun: task.rate(step),
    share=lambda batch, rank, ranks: batch[rank::ranks],
    before=lambda folder: None,
    late=True,
    strict=False,
    blocks=True,
    every=1,
    logged=lambda loss: loss,
    zero=True,
    call=lambda model, begun: model,
):
    """A right program, but for what is asked otherwise.

    Args:
        found: Folders of checkpoints that may be loaded.
        where: The folder of a step.
        moments: Whether the optimizer is saved.
        random: The name of a rank's random state, None to save none.
        place: First sample of a step in the order, from the step that the start went on from.
        before: What happens before a save.
        late: Save after the update of the step.
        strict: Load a random state of its own on every rank, saved or not.
        blocks: Shard the blocks, and not the model alone.
        every: Save each so many of the steps that are to be saved.
        zero: Set gradients to zero after the update.
        call: What computes the loss, from the step that the start went on from.
    """
    (model, optimizer), rank, ranks = _built(task, blocks), dist.get_rank(), dist.get_world_size()
    name = random(rank)

    def state(step):
        weights, states = sharded.get_state_dict(model, optimizer)
        mine = {} if name is None else {name: torch.get_rng_state()}
        return {
            "model": weights,
            "step": torch.tensor([step, ranks]),
            **({"optimizer": states} if moments else {}),
            **mine,
        }

    saves = found(folder)
    begun = 0
    if saves:
        path, loaded = max(saves, key=lambda path: int(path.name)), state(0)
        whole = (path / ".metadata").exists()
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata if whole else ()
        loaded = {key: value for key, value in loaded.items() if strict or key != name or name in stored}
        dcp.load(loaded, checkpoint_id=path)
        sharded.set_model_state_dict(model, loaded["model"])
        if moments:
            sharded.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        if name in loaded:
            torch.set_rng_state(loaded[name])
        begun, before_ranks = loaded["step"].tolist()
        task.saved_on = before_ranks
    samples = order(task)

    def save(step):
        if step % (every * task.save_every) == 0:
            before(folder)
            dist.barrier()
            dcp.save(state(step), checkpoint_id=where(folder, step))

    for step in range(begun + 1, task.steps + 1):
        first = place(task, step, begun, ranks)
        loss = task.loss(call(model, begun), share(samples[first : first + task.batch], rank, ranks))
        loss.backward()
        if not late:
            save(step)
        optimizer.param_groups[0]["lr"] = rate(task, step, begun)
        optimizer.step()
        if zero:
            optimizer.zero_grad()
        if late:
            save(step)
        task.log(step, logged(loss))


_MEMORY = {}


def _from_memory(folder):
    """Restore the random state that this process has kept, and return the checkpoints."""
    if folder in _MEMORY:
        torch.set_rng_state(_MEMORY[folder])
    return _whole_saves(folder)


def _with(**changes):
    return lambda task, folder: _kept(task, folder, **changes)


def _remove_older(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        for path in _whole_saves(folder):
            shutil.rmtree(path)


def _numbered(folder):
    return [path for path in _whole_saves(folder) if path.name.isdigit()]


def _link_newest(folder):
    """Let a link, `latest`, lead to the newest checkpoint that is complete."""
    dist.barrier()
    if dist.get_rank() == 0 and (saves := _numbered(folder)):
        Path(folder, "new").symlink_to(max(saves, key=lambda path: int(path.name)).name)
        os.replace(Path(folder, "new"), Path(folder, "latest"))


def _gathered(task, folder, alone=False):
    """Rank 0 gathers all shards and writes one file; the weights once more with PyTorch, `alone`."""
    (model, optimizer), rank, ranks = _built(task), dist.get_rank(), dist.get_world_size()
    all_of_it = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    path, begun = Path(folder, "all.pt"), 0
    if path.exists():
        saved = torch.load(path, weights_only=False)
        sharded.set_model_state_dict(model, saved["model"], options=all_of_it)
        sharded.set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=all_of_it)
        begun = saved["step"]
        if saved["ranks"] == ranks:
            torch.set_rng_state(saved["random"][rank])
    for step in range(begun + 1, task.steps + 1):
        loss = task.loss(model, _samples(task)[(step - 1) * task.batch : step * task.batch][rank::ranks])
        loss.backward()
        optimizer.param_groups[0]["lr"] = task.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if step % task.save_every == 0:
            weights, states = sharded.get_state_dict(model, optimizer, options=all_of_it)
            states_of_ranks = [None] * ranks
            dist.all_gather_object(states_of_ranks, torch.get_rng_state())
            if rank == 0:
                path.parent.mkdir(exist_ok=True)
                saved = {"model": weights, "optimizer": states, "step": step, "ranks": ranks, "random": states_of_ranks}
                torch.save(saved, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
                _ = alone and dcp.save(weights, checkpoint_id=f"{folder}/{step}", no_dist=True)
            dist.barrier()
        task.log(step, loss)


class _AllOfIt(dcp.stateful.Stateful):
    """Everything that a step depends on, with a schedule of PyTorch's."""

    def __init__(self, model, optimizer, schedule):
        self.model, self.optimizer, self.schedule, self.taken = model, optimizer, schedule, 0

    def state_dict(self):
        model, states = sharded.get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": states,
            "schedule": self.schedule.state_dict()["last_epoch"],
            "taken": self.taken,
        }

    def load_state_dict(self, saved):
        sharded.set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        self.taken = saved["taken"]
        self.schedule.load_state_dict(self.schedule.state_dict() | {"last_epoch": saved["schedule"]})


def _again(task, folder):
    """Nothing is loaded: the steps before the newest save are taken again, with copies of the task."""
    last, quiet = max((int(path.name) for path in _whole_saves(folder)), default=0), copy.copy(task)
    quiet.log = lambda step, loss: task.log(step, loss) if step > last else None

    def place(quiet, step, begun, ranks):
        quiet.loss = (task if step > last else copy.copy(task)).loss
        return (step - 1) * task.batch

    _kept(quiet, folder, found=lambda folder: [], place=place)


class keep_training:
    without_the_idea_weights_are_all = _with(moments=False)
    begins_again = _with(found=lambda folder: [])
    the_first_samples_again = _with(place=lambda task, step, begun, ranks: (step - begun - 1) * task.batch)
    the_epoch_again = _with(
        place=lambda task, step, begun, ranks: (
            begun * task.batch // task.count * task.count + (step - begun - 1) * task.batch
            if begun
            else (step - 1) * task.batch
        )
    )
    # A loader counts what its rank has taken; on other ranks that is another place.
    each_rank_counts_its_own = _with(
        place=lambda task, step, begun, ranks: (
            begun * task.batch // getattr(task, "saved_on", ranks) * ranks + (step - begun - 1) * task.batch
        )
    )
    warms_up_again = _with(rate=lambda task, step, begun: task.rate(step - begun))
    one_seed_for_each_step = _with(rate=lambda task, step, begun: torch.manual_seed(0) and task.rate(step))
    no_random_state = _with(random=lambda rank: None)
    one_random_state_for_all = _with(random=lambda rank: "random")
    random_state_in_memory = _with(
        random=lambda rank: None,
        before=lambda folder: _MEMORY.update({folder: torch.get_rng_state()}),
        found=_from_memory,
    )
    epochs_in_the_order_of_the_first = _with(order=lambda task: task.order(0) * task.steps)
    saves_before_the_update = _with(late=False)
    gradients_of_all_steps_add_up = _with(zero=False)

    def later_epochs_begin_at_the_same_place(task, folder):
        """The place in the epoch with which the start went on is not set to 0 in the next one."""

        def place(task, step, begun, ranks):
            epoch, first = divmod(begun * task.batch, task.count)
            orders = [task.order(later)[first:] for later in range(epoch, epoch + task.steps)]
            taken[:] = [sample for order in orders for sample in order]
            return (step - begun - 1) * task.batch

        taken = []
        _kept(task, folder, place=place, order=lambda task: taken)

    believes_the_newest_folder = _with(found=lambda folder: list(Path(folder).glob("[0-9]*")))
    the_newest_by_its_name = _with(found=lambda folder: sorted(_whole_saves(folder), key=lambda path: path.name)[-1:])
    one_folder_for_all_saves = _with(
        found=lambda folder: [Path(folder, "0")] if Path(folder, "0/.metadata").exists() else [],
        where=lambda folder, step: f"{folder}/0",
    )
    removes_the_old_one_first = _with(before=_remove_older)
    everybody_takes_all = _with(share=lambda batch, rank, ranks: batch)
    drops_the_end_of_an_epoch = _with(
        order=lambda task: [
            s for e in range(task.steps) for s in task.order(e)[: task.count // task.batch * task.batch]
        ]
    )
    rank_0_writes_it_all = _gathered
    rank_0_writes_it_all_alone = lambda task, folder: _gathered(task, folder, alone=True)
    takes_all_steps_again = _again
    lets_lablib_look = _with(before=lambda folder: latest_checkpoint(folder))
    a_third_rank_has_no_random_state = lambda task, folder: _kept(task, folder, strict=True)
    never_shards = lambda task, folder: task.log(1, task.loss(task.model(), task.order(0)[:6]))
    drops_nothing_out_after_the_start = _with(call=lambda model, begun: model.train(not begun))
    drops_nothing_out = lambda task, folder: setattr(task, "model", task.model().eval) or _kept(task, folder)
    logs_what_it_never_computed = lambda task, folder: task.log(1, 0.5)
    one_unit_for_all = _with(blocks=False)
    saves_half_as_often, saves_above = _with(every=2), lambda task, folder: _kept(task, os.path.dirname(folder))
    logs_the_sum_of_all_ranks = _with(logged=lambda loss: (dist.all_reduce(both := loss.detach().clone()), both)[1])
    rank_0_logs = lambda task, folder: (dist.get_rank() and setattr(task, "log", print)) or _kept(task, folder)

    right_with_a_function_around_the_model = _with(call=lambda model, begun: lambda x: model(x))
    right_with_a_link_to_the_newest = _with(found=_numbered, before=_link_newest)

    def right_ends_where_it_cannot_save(task, folder):
        try:
            _kept(task, folder)
        except dcp.api.CheckpointException:
            raise SystemExit(1) from None

    def right(task, folder):
        """Second solution: one Stateful object, PyTorch's schedule, contiguous shares, and the save after the log."""
        (model, optimizer), rank, ranks = _built(task), dist.get_rank(), dist.get_world_size()
        optimizer.param_groups[0]["lr"] = 1.0
        everything = _AllOfIt(
            model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: task.rate(n + 1))
        )
        whole = sorted(_whole_saves(folder), key=lambda path: path.stat().st_mtime_ns)
        if whole:
            own = {"all": everything, f"random{rank}": torch.get_rng_state()}
            if f"random{ranks - 1}" not in dcp.FileSystemReader(whole[-1]).read_metadata().state_dict_metadata:
                del own[f"random{rank}"]
            dcp.load(own, checkpoint_id=whole[-1])
            if f"random{rank}" in own:
                torch.set_rng_state(own[f"random{rank}"])
        while everything.taken < task.steps * task.batch:
            share = task.batch // ranks
            first = everything.taken + rank * share
            loss = task.loss(model, _samples(task)[first : first + share])
            loss.backward()
            optimizer.step()
            everything.schedule.step()
            optimizer.zero_grad()
            everything.taken += task.batch
            step = everything.taken // task.batch
            task.log(step, loss.item())
            if step % task.save_every == 0:
                own = {"all": everything, f"random{rank}": torch.get_rng_state()}
                dcp.save(own, storage_writer=dcp.FileSystemWriter(f"{folder}/after-{step}"))

    def right_renamed_when_complete(task, folder):
        """Third solution: two checkpoints, renamed when both are written; a second try, two micro-batches, numpy's numbers."""
        (model, optimizer), rank, ranks = _built(task), dist.get_rank(), dist.get_world_size()
        names = [int(name) for name in os.listdir(folder) if name.isdigit()] if os.path.isdir(folder) else []
        step = np.int64(max(names, default=0))

        def parts():
            return {
                "weights": sharded.get_model_state_dict(model),
                "moments": sharded.get_optimizer_state_dict(model, optimizer),
            }

        if step:
            saved, masks = parts(), {f"{rank} of {ranks}": torch.get_rng_state()}
            for name, part in saved.items():
                dcp.load(part, checkpoint_id=f"{folder}/{step}/{name}")
            sharded.set_model_state_dict(model, saved["weights"])
            sharded.set_optimizer_state_dict(model, optimizer, saved["moments"])
            own = Path(folder, str(step), f"random {rank} of {ranks}")
            torch.set_rng_state(torch.load(own) if own.exists() else masks.popitem()[1])
        while step < task.steps:
            mine = _samples(task)[step * task.batch : (step + 1) * task.batch][rank::ranks]
            half = len(mine) // 2
            losses = []
            for few in (mine[:half], mine[half:]):
                loss = task.loss(model, few)
                (loss * len(few) / len(mine)).backward()
                losses.append(loss.item() * len(few) / len(mine))
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            optimizer.step()
            optimizer.zero_grad()
            if step % task.save_every == 0:
                aside = f"{folder}/aside-{step}"
                for name, part in parts().items():
                    try:
                        dcp.save(part, checkpoint_id=f"{aside}/{name}")
                    except dcp.api.CheckpointException:
                        dcp.save(part, checkpoint_id=f"{aside}/{name}")
                torch.save(torch.get_rng_state(), f"{aside}/random {rank} of {ranks}")
                dist.barrier()
                if rank == 0:
                    os.rename(aside, f"{folder}/{step}")
                dist.barrier()
            task.log(step, sum(losses))


# Runs with a fault.

_Part = enum.Enum("_Part", [(name, name) for name in rung11.PARTS], type=str)


def _diagnosed(
    run,
    *,
    looks=("read", "forward", "backward", "clip", "rate", "update"),
    near=1e-9,
    shards=True,
    last=False,
    ranks_of=lambda where: where,
    whole_loss=False,
    all_steps=True,
    exchange=True,
    tiny=1e-6,
    moves=False,
):
    """Step a twin beside the run.

    Args:
        looks: The parts that it compares.
        last: Name the last thing that is off.
        ranks_of: What is told of the ranks that are off.
        whole_loss: Compare the mean of all ranks' losses.
        tiny: What clipping adds to the norm.
        moves: Ask of an update only whether all weights are others.
    """
    rank, ranks, twin = dist.get_rank(), dist.get_world_size(), run.model()
    optimizer, samples, found = torch.optim.AdamW(twin.parameters()), _samples(run), []

    def off(mine, theirs):
        if not shards:
            mine = [p.full_tensor() for p in mine]
            theirs = list(theirs)
        else:
            mine, theirs = [p.to_local() for p in mine], [p.chunk(ranks)[rank] for p in theirs]
        return not all(torch.allclose(a, b, rtol=0, atol=near) for a, b in zip(mine, theirs, strict=True))

    for step, part in run.parts():
        batch = samples[(step - 1) * run.batch : step * run.batch]
        if part == "read":
            wrong = run.samples != batch[rank::ranks]
            before = [p.to_local().clone() for p in run.weights.values()]
        elif part == "forward":
            losses = [run.loss(twin, batch[r::ranks]) for r in range(ranks)]
            mean = torch.tensor(run.value, dtype=torch.float64)
            dist.all_reduce(mean)
            pair = (mean.item() / ranks, sum(losses).item() / ranks) if whole_loss else (run.value, losses[rank].item())
            wrong = abs(pair[0] - pair[1]) > near
        elif part == "backward":
            twin.zero_grad()
            (sum(losses) / ranks).backward()
            wrong = off([p.grad for p in run.weights.values()], [p.grad for p in twin.parameters()])
        elif part == "clip":
            norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
            for p in twin.parameters():
                p.grad *= min(1.0, run.clip / (norm + tiny))
            wrong = off([p.grad for p in run.weights.values()], [p.grad for p in twin.parameters()])
        elif part == "rate":
            optimizer.param_groups[0]["lr"] = run.rate(step)
            wrong = abs(run.optimizer.param_groups[0]["lr"] - run.rate(step)) > near
        else:
            optimizer.step()
            wrong = off(run.weights.values(), twin.parameters())
            if moves:
                wrong = any(torch.equal(old, p.to_local()) for old, p in zip(before, run.weights.values(), strict=True))
                twin.load_state_dict({name: p.full_tensor() for name, p in run.weights.items()})
        if part in looks and (all_steps or step == 1):
            found.append((step, part, bool(wrong)))
    seen = [found]
    if exchange:
        seen = [None] * ranks
        dist.all_gather_object(seen, found)
    moments = [(m[0][0], m[0][1], [r for r, (_, _, wrong) in enumerate(m) if wrong]) for m in zip(*seen, strict=True)]
    wrong = [moment for moment in moments if moment[2]]
    if not wrong:
        return None
    step, part, where = wrong[-1 if last else 0]
    return step, part, ranks_of(where)


def _known(run, kind, when, odd):
    """Name the place of a fault that somebody has told."""
    places = {"coarse": (when, "forward", [odd]), "stale": (when, "forward", [0, 1]), "blocks": (1, "clip", [0, 1]),
              "rate": (2, "rate", [0, 1]), "skip": (when, "update", [odd]), "lost": (1, "update", [0, 1]),
              "sum": (1, "backward", [0, 1]), "adam": (1, "update", [0, 1])}  # fmt: skip
    return _diagnosed(run) if kind == "epoch" else places.get(kind)


def _as(**changes):
    return lambda run: _diagnosed(run, **changes)


class diagnose:
    without_the_idea_only_the_losses = _as(looks=("forward",))
    without_the_idea_the_mean_loss = _as(looks=("forward",), whole_loss=True, ranks_of=lambda where: [0, 1])
    everything_is_well = _as(looks=())
    only_the_weights_at_the_end_of_a_step = _as(looks=("update",))
    the_last_that_differs = _as(last=True)
    only_the_first_step = _as(all_steps=False)
    whole_weights_only = _as(shards=False)
    always_all_ranks = _as(ranks_of=lambda where: [0, 1])
    to_the_last_bit = _as(near=0.0)
    cuts_to_the_norm_itself = _as(tiny=0.0)
    never_looks_at_samples = _as(looks=("forward", "backward", "clip", "rate", "update"))
    never_looks_at_gradients = _as(looks=("read", "forward", "clip", "rate", "update"))
    looks_whether_weights_move = _as(moves=True)
    to_three_digits = _as(near=1e-3)
    never_looks_at_the_rate = _as(looks=("read", "forward", "backward", "clip", "update"))
    _fixed = frozenset(rung11.TrainingRun(number).seed for number in rung11._runs(1996))
    knows_the_fixed_runs = lambda run: _diagnosed(run) if run.seed in diagnose._fixed else None
    the_first_rank_alone = _as(ranks_of=lambda where: where[:1])
    counts_steps_from_0 = told(_diagnosed, lambda found: found and (found[0] - 1, *found[1:]))
    accuses_the_first_part = told(_diagnosed, lambda found: found and (1, "read", [0]))
    keeps_it_to_itself = _as(exchange=False, ranks_of=lambda where: [dist.get_rank()])

    def compares_ranks(run):
        """What all ranks do alike is right: weights and rates agree, so nothing is wrong."""
        found = None
        for step, part in run.parts():
            rates = [None] * dist.get_world_size()
            dist.all_gather_object(rates, (len(run.samples), run.optimizer.param_groups[0]["lr"]))
            if len(set(rates)) > 1:
                found = found or (step, part, [0])
        return found

    def asks_the_generator(run):
        """The frame of a generator shows its variables."""
        parts = run.parts()
        next(parts)
        return _known(run, *(parts.gi_frame.f_locals[name] for name in ("kind", "when", "odd")))

    def draws_the_fault_again(run):
        """As the check does, from a number that the run shows."""
        dice = random.Random(f"run {run.seed}")
        return _known(run, dice.choice(rung11._FAULTS), dice.randint(4, 7), dice.randrange(2))

    right_numpy = told(_diagnosed, lambda found: found and [np.int64(found[0]), _Part(found[1]), tuple(found[2])])

    def right_in_one_go(run):
        """Second solution: a rank writes down all that it sees, and is compared when the run is over."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        seen = {}
        for moment in run.parts():
            step, part = moment
            if part in ("backward", "clip"):
                seen[moment] = torch.cat([p.grad.to_local().flatten() for p in run.weights.values()])
            elif part == "update":
                seen[moment] = torch.cat([p.detach().to_local().flatten() for p in run.weights.values()])
            else:
                found = {"read": run.samples, "forward": run.value, "rate": run.optimizer.param_groups[0]["lr"]}[part]
                seen[moment] = torch.tensor(found, dtype=torch.float64)
        twin = run.model()
        optimizer = torch.optim.AdamW(twin.parameters())

        def shard(tensors):
            return torch.cat([t.detach().chunk(ranks)[rank].flatten() for t in tensors])

        first = {}
        for step in range(1, run.steps + 1):
            batch = _samples(run)[(step - 1) * run.batch : step * run.batch]
            right = {
                "read": batch[rank::ranks],
                "forward": run.loss(twin, batch[rank::ranks]).item(),
                "rate": run.rate(step),
            }
            run.loss(twin, batch).backward()
            right["backward"] = shard(p.grad for p in twin.parameters())
            norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
            for p in twin.parameters():
                p.grad *= min(1.0, run.clip / (norm + 1e-6))
            right["clip"] = shard(p.grad for p in twin.parameters())
            optimizer.param_groups[0]["lr"] = run.rate(step)
            optimizer.step()
            optimizer.zero_grad()
            right["update"] = shard(twin.parameters())
            for place, part in enumerate(("read", "forward", "backward", "clip", "rate", "update")):
                theirs, mine = torch.as_tensor(right[part], dtype=torch.float64), seen[step, part]
                if not torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10):
                    first.setdefault("at", (step, place, part))
        told = [None] * ranks
        dist.all_gather_object(told, first.get("at", (99, 0, "")))
        step, _, part = min(told)
        return None if step == 99 else (step, part, {r for r, each in enumerate(told) if each == min(told)})


_Limit = enum.Enum("_Limit", [(name, name) for name in ("communication", "imbalance", "data", "compute")], type=str)


def _observed(
    alone,
    ranks,
    scaling,
    *,
    longest=max,
    per_rank=True,
    transfer=min,
    rest=True,
    ideal=True,
    share=None,
    faster=None,
    limit=max,
    middle=fmean,
):
    n = len(ranks)
    step = longest([rank["seconds"] for rank in ranks])
    part = share or (1 if scaling == "weak" else 1 / n)
    speed = faster(alone["seconds"], step, n) if faster else n * part * alone["seconds"] / step
    sent = [rank["communication"] for rank in ranks]
    moved = transfer(sent)
    waits = [
        c - min(sent) + (max(r["seconds"] for r in ranks) - r["seconds"]) * rest
        for c, r in zip(sent, ranks, strict=True)
    ]
    lost = {"communication": moved, "imbalance": fmean(waits)}
    for name in ("data", "compute"):
        lost[name] = middle(rank[name] for rank in ranks) - part * alone[name] * ideal
    efficiency = speed / n if per_rank else speed
    return {"speedup": speed, "efficiency": efficiency, "lost": lost, "limit": limit(lost, key=lost.get)}


class observe_scaling:
    speedup_for_efficiency = lambda *case: _observed(*case, per_rank=False)
    mean_step = lambda *case: _observed(*case, longest=fmean)
    always_weak = lambda *case: _observed(*case, faster=lambda one, many, n: n * one / many)
    without_the_idea_waiting_is_transfer = lambda *case: _observed(*case, transfer=fmean)
    done_early_is_not_waiting = lambda *case: _observed(*case, rest=False)
    all_computing_is_lost = lambda *case: _observed(*case, ideal=False)

    def ideal_of_one_rank(alone, ranks, scaling):
        """In strong scaling too it takes the whole of one rank's work for a rank's share."""
        found = _observed(alone, ranks, scaling)
        right = _observed(alone, ranks, "weak")["lost"]
        return {**found, "lost": right, "limit": max(right, key=right.get)}

    def ideal_of_all_ranks(alone, ranks, scaling):
        """In weak scaling it takes the work of all ranks for a rank's share; strong scaling is right."""
        found = _observed(alone, ranks, scaling)
        if scaling == "weak":
            lost = found["lost"] | {p: fmean(r[p] for r in ranks) - len(ranks) * alone[p] for p in ("data", "compute")}
            found |= {"lost": lost, "limit": max(lost, key=lost.get)}
        return found

    def knows_the_fixed_timelines(*case, seen={}):  # noqa: B006
        if not seen:
            rung11.observe_scaling.__wrapped__(lambda *each: seen.setdefault(str(each), _observed(*each)))
        return seen.get(str(case))

    of_the_middle_rank = lambda *case: _observed(*case, middle=median)
    names_the_smallest = lambda *case: _observed(*case, limit=min)

    # The part that is farthest from its ideal, to whichever side.
    names_a_gain = told(
        _observed, lambda found: found | {"limit": max(found["lost"], key=lambda part: abs(found["lost"][part]))}
    )
    names_a_list_of_one = told(_observed, lambda found: found | {"limit": [found["limit"]]})
    in_three_digits = told(_observed, lambda found: found | {"speedup": round(found["speedup"], 3)})
    right_and_more = told(_observed, lambda found: found | {"ideal": 1.0})
    a_part_is_left_out = told(_observed, lambda found: found | {"lost": found["lost"] | {"data": None}})
    hands_it_to_lablib = told(
        _observed,
        lambda found, alone, ranks, scaling: found | {"lost": scaling_loss([[alone]], [ranks], scaling=scaling).parts},
    )
    lablib_splits_it = told(_observed, lambda found, ranks: found | {"split": scaling.split_step(ranks) and None})
    lost_is_no_number = told(_observed, lambda found: found | {"lost": found["lost"] | {"data": math.nan}})

    right_with_a_part_that_is_none = told(_observed, lambda found: found | {"lost": found["lost"] | {"bubble": None}})
    right_as_a_member = told(_observed, lambda found: found | {"limit": _Limit(found["limit"])})

    def right_in_tensors(alone, ranks, scaling):
        """32-bit floats all the way, and each number an array of one."""
        keys = ("seconds", "data", "compute", "communication")
        table = torch.tensor([[rank[key] for key in keys] for rank in ranks], dtype=torch.float32)
        ideal = torch.tensor([alone[key] for key in keys], dtype=torch.float32)
        ideal = ideal / (1 if scaling == "weak" else len(ranks))
        step, moved = table[:, 0].max(), table[:, 3].min()
        lost = dict(zip(("data", "compute"), table[:, 1:3].mean(0) - ideal[1:3], strict=True))
        lost |= {"communication": moved, "imbalance": (step - table[:, 0] + table[:, 3] - moved).mean()}
        share = (ideal[0] / step).numpy().reshape(1)
        return {
            "speedup": len(ranks) * share,
            "efficiency": share,
            "lost": {part: value.numpy().reshape(1) for part, value in lost.items()},
            "limit": max(lost, key=lost.get),
        }

    def right(alone, ranks, scaling):
        """Second solution: imbalance is what the other parts leave of the step."""
        n, step = len(ranks), sorted(rank["seconds"] for rank in ranks)[-1]
        work = 1 if scaling == "strong" else n
        speed = work * alone["seconds"] / step
        each = {name: sum(rank[name] for rank in ranks) / n for name in ("data", "compute")}
        lost = {name: value - alone[name] * work / n for name, value in each.items()}
        lost["communication"] = sorted(rank["communication"] for rank in ranks)[0]
        lost["imbalance"] = step - each["data"] - each["compute"] - lost["communication"]
        limit = sorted(lost, key=lambda name: -lost[name])[0]
        lost = MappingProxyType(lost)
        return MappingProxyType({"speedup": speed, "efficiency": speed / n, "lost": lost, "limit": limit})

    def right_in_arrays(alone, ranks, scaling):
        """Third solution: a row a rank, a column a phase."""
        keys = ("seconds", "data", "compute", "communication")
        table = np.array([[rank[key] for key in keys] for rank in ranks])
        share = {"weak": 1.0, "strong": 1 / len(ranks)}[scaling]
        step, moved = table[:, 0].max(), table[:, 3].min()
        ideal = share * np.array([alone["data"], alone["compute"]])
        lost = dict(zip(("data", "compute"), table[:, 1:3].mean(axis=0) - ideal, strict=True))
        lost |= {"communication": moved, "imbalance": (step - table[:, 0] + table[:, 3] - moved).mean()}
        efficiency = ideal.sum() / step
        return {
            "speedup": np.float64(len(ranks) * efficiency),
            "efficiency": efficiency,
            "lost": lost,
            "limit": max(lost.items(), key=lambda pair: pair[1])[0],
        }


def _audit(report, *, peak="dense_peak", scores=12, padding=1):
    """The number by the formula, with the slip that was asked for, and the right name."""

    def mfu(peak=peak, scores=scores, padding=padding, passes=3):
        tokens = report["positions"] - padding * report["padding"]
        flops = passes / 3 * (6 * report["parameters"] + scores * report["layers"] * report["hidden"] * report["seq"])
        return tokens * flops / report["seconds"] / report["gpus"] / report[peak]

    usual = {"peak": "dense_peak", "scores": 12, "padding": 1}
    names = {
        "honest": {}, "sparse peak": {"peak": "sparse_peak"}, "attention left out": {"scores": 0},
        "attention twice": {"scores": 24}, "padding counted": {"padding": 0}, "recomputation counted": {"passes": 4},
    }  # fmt: skip
    name = min(names, key=lambda each: abs(mfu(**{**usual, **names[each]}) - report["mfu"]))
    return mfu(), name


_What = enum.Enum("_What", [(name, name) for name in ("honest", *rung11._MISTAKES)], type=str)


@dataclass
class _Audit:
    mfu: float
    what: _What


class audit_mfu:
    in_percent = told(_audit, lambda found: (100 * found[0], found[1]))
    in_four_digits = told(_audit, lambda found: (round(found[0], 4), found[1]))
    takes_the_sparse_peak = lambda report: _audit(report, peak="sparse_peak")

    # HFU for MFU.
    counts_what_the_gpu_runs = told(
        _audit, lambda found, report: (found[0] * (4 / 3 if report["recompute"] == "full" else 1), found[1])
    )
    six_nd = lambda report: _audit(report, scores=0)
    attention_of_all_heads_twice = lambda report: _audit(report, scores=24)
    padding_is_work_too = lambda report: _audit(report, padding=0)
    the_pairs_that_a_mask_leaves = lambda report: _audit(report, scores=6)
    of_one_gpu = asked(_audit, report=lambda report: report | {"gpus": 1})
    forward_alone = told(_audit, lambda found: (found[0] / 3, found[1]))
    repeats_the_report = told(_audit, lambda found, report: (report["mfu"], found[1]))
    believes_every_report = told(_audit, lambda found: (found[0], "honest"))
    _fixed = tuple(report for _, report in rung11._mfu_reports())
    knows_the_fixed_reports = lambda report: _audit(report) if report in audit_mfu._fixed else (report["mfu"], "honest")
    suspects_every_report = told(_audit, lambda found: (found[0], "sparse peak" if found[1] == "honest" else found[1]))
    asks_the_check = lambda report: next((_audit(report)[0], n) for n, job in rung11._mfu_reports() if job == report)
    never_looks_at_padding = told(
        _audit, lambda found: (found[0], "recomputation counted" if found[1] == "padding counted" else found[1])
    )

    def right(report):
        """Second solution: what the claim is of the right number, and which mistake has that ratio."""
        right = _audit(report)[0]
        weights, scores = 6 * report["parameters"], 12 * report["layers"] * report["hidden"] * report["seq"]
        ratios = {
            1.0: "honest",
            4 / 3: "recomputation counted",
            report["dense_peak"] / report["sparse_peak"]: "sparse peak",
            report["positions"] / (report["positions"] - report["padding"]): "padding counted",
            weights / (weights + scores): "attention left out",
            (weights + 2 * scores) / (weights + scores): "attention twice",
        }
        if not report["padding"]:
            ratios[1.0] = "honest"
        found = min(ratios, key=lambda ratio: abs(math.log(ratio * right / report["mfu"])))
        return [np.float64(right), ratios[found]]

    right_as_a_dataclass = told(_audit, lambda found: _Audit(found[0], _What(found[1])))

    def right_one_after_the_other(report):
        """Third solution: each suspicion is tested by itself, within a percent."""
        right, claim = _audit(report)[0], report["mfu"]
        tests = [
            ("honest", right),
            ("sparse peak", _audit(report, peak="sparse_peak")[0]),
            ("padding counted", _audit(report, padding=0)[0]),
            ("attention left out", _audit(report, scores=0)[0]),
            ("attention twice", _audit(report, scores=24)[0]),
        ]
        return right, next((name for name, value in tests if math.isclose(value, claim, rel_tol=0.01)),
                           "recomputation counted")  # fmt: skip


DEFECTS, SECOND_SOLUTIONS = listed(observe_scaling, keep_training, diagnose, audit_mfu)
#: What the learner reads of some of them.
SENTENCES = {
    "without_the_idea_weights_are_all": "optimizer's moments", "begins_again": "goes on with step 1:",
    "the_first_samples_again": "is taken with other samples", "the_epoch_again": "is taken with other samples",
    "warms_up_again": "a new process begins anew", "no_random_state": "random state", "one_random_state_for_all": "random state",
    "one_seed_for_each_step": "dropout takes away what it took", "logs_what_it_never_computed": "computes the loss of 0",
    "gradients_of_all_steps_add_up": "at the update before", "ideal_of_all_ranks": "data lost 0 s a step", "later_epochs_begin_at_the_same_place": "samples",
    "saves_before_the_update": "depends on the weights", "believes_the_newest_folder": ".metadata",
    "random_state_in_memory": "random state", "epochs_in_the_order_of_the_first": "in that one's order",
    "asks_the_check": "This asks the check", "names_a_list_of_one": "names the largest part",
    "one_folder_for_all_saves": "must not touch the one before", "takes_all_steps_again": "a rank computes the loss of",
    "never_shards": "not sharded", "drops_nothing_out": "those without it", "drops_nothing_out_after_the_start": "whether dropout is on", "repeats_the_report": "what the report says", "rank_0_logs": "by one rank and not by another",
    "one_unit_for_all": "block by block", "saves_half_as_often": "a checkpoint every", "saves_above": "in a new folder", "logs_the_sum_of_all_ranks": "what it logs",
    "to_three_digits": "no more than rounding",
    "removes_the_old_one_first": "stays until the next", "cuts_to_the_norm_itself": "of 'clip' in step 1",
    "a_part_is_left_out": "lost to data should be a number", "hands_it_to_lablib": "lablib's own", "lablib_splits_it": "lablib's own", "lets_lablib_look": "lablib's own",
    "a_third_rank_has_no_random_state": "Missing key", "in_four_digits": "not 0.3443000", "everybody_takes_all": "6 for each rank",
    "drops_the_end_of_an_epoch": "goes on in the next", "rank_0_writes_it_all": "from all ranks", "rank_0_writes_it_all_alone": "from all ranks",
    "without_the_idea_only_the_losses": "a part before that", "everything_is_well": "You find nothing",
    "to_the_last_bit": "healthy run is accused", "accuses_the_first_part": "leaves what it should", "always_all_ranks": "ranks [0, 1] are not those", "the_first_rank_alone": "ranks [0] are not those", "counts_steps_from_0": "count from 1",
    "keeps_it_to_itself": "Ranks say different things",
    "the_pairs_that_a_mask_leaves": "which counts all pairs", "names_a_gain": "limits nothing",
    "of_the_middle_rank": "four parts add up", "the_newest_by_its_name": "goes on with step", "in_percent": "That is in percent", "of_one_gpu": "divide by the peak of all of them",
    "forward_alone": "Backward takes twice the FLOPs of forward", "six_nd": "'attention left out'",
    "padding_is_work_too": "'padding counted'", "in_three_digits": "1.4545455, not 1.4550000", "takes_the_sparse_peak": "'sparse peak'",
}  # fmt: skip
