"""Rung 06: the step's timeline, the choice of a wrapping, the page about FSDP1, and what its sentences say."""

import functools
import inspect
import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lablib.calc.models import preset
from lablib.calc.parallel import (
    TimedUnit,
    data_parallel_step,
    ddp_step_time,
    fsdp_step,
    peak_held_bytes,
    peak_unsharded_bytes,
    timed_units,
    zero_state_bytes,
    zero_traffic,
)
from lablib.calc.params import count_params
from lablib.calc.torch_versions import DIALS_SINCE, SUPPORTED, release
from lablib.checks import rung06
from lablib.checks.judging import Wrong
from lablib.checks.rung06 import World
from lablib.launch.ranks import run_ranks
from tests.scripts import ROOT, load

# --- the timeline of a step --------------------------------------------------------------------------------


def _unit(name, size=4, gather=4.0, run=3.0):
    return TimedUnit(name=name, bytes=size, gather=gather, scatter=gather, forward=run, backward=2 * run)


ROOT_UNIT = TimedUnit(name="", bytes=1, gather=0, scatter=0, forward=0, backward=0)


def test_two_units_by_hand():
    """Forward 4 + 3 + 4 + 3 without prefetch; 4 + max(3, 4) + 3 with it. Backward 4 + 6 + 4 + 4 + 6 + 4, or
    4 + 6 + 6 + 4, since the second gather and the first scatter run beside the 12 s of computing."""
    slow = fsdp_step([ROOT_UNIT, _unit("A"), _unit("B")], prefetch=False)
    fast = fsdp_step([ROOT_UNIT, _unit("A"), _unit("B")])
    assert (slow.seconds, slow.peak) == (14 + 28, 1 + 4)
    assert (fast.seconds, fast.peak) == (11 + 20, 1 + 4 + 4)
    assert slow.compute == fast.compute == 18
    assert fast.exposed == 31 - 18


def test_one_unit_hides_nothing():
    step = fsdp_step([_unit("", gather=8.0, run=6.0)])
    assert step.seconds == 8 + 6 + 12 + 8
    assert [bar.kind for bar in step.bars] == ["gather", "forward", "backward", "scatter"]


def _random_units():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    return [
        TimedUnit(
            name=f"{i}",
            bytes=dice.randint(1, 99),
            gather=dice.random(),
            scatter=dice.random(),
            forward=dice.random(),
            backward=dice.random(),
        )
        for i in range(dice.randint(1, 12))
    ]


@pytest.mark.parametrize("options", [{}, {"reshard": False}, {"root_reshard": True}, {"prefetch": False}])
def test_a_step_keeps_the_rules_of_link_and_device(options):
    for _ in range(20):
        units = _random_units()
        units[-1] = replace(units[-1], kept=len(units) % 2 == 0)
        step = fsdp_step(units, **options)
        for lane in ("link", "device"):
            bars = [bar for bar in step.bars if bar.lane == lane]
            assert all(a.end <= b.start for a, b in itertools.pairwise(bars)), "one thing at a time"
        assert step.memory[-1][1] == 0
        assert min(size for _, size in step.memory) >= 0
        # Nothing runs before it has arrived, and a gradient leaves after its unit's backward.
        for unit in units:
            mine = [bar for bar in step.bars if bar.unit == unit.name]
            gather = next(bar for bar in mine if bar.kind == "gather")
            forward, backward, scatter = (
                next(bar for bar in mine if bar.kind == kind) for kind in ("forward", "backward", "scatter")
            )
            assert gather.end <= forward.start <= backward.start
            assert backward.end <= scatter.start
        root_again, again = options.get("root_reshard", False), options.get("reshard", True)
        gathers = 1 + root_again + (1 + again) * (len(units) - 1) - (again and units[-1].kept)
        assert sum(bar.kind == "gather" for bar in step.bars) == gathers
        work = sum(unit.forward + unit.backward for unit in units)
        assert step.compute == pytest.approx(work)
        assert step.seconds >= step.compute


def test_prefetch_never_costs_time_and_holds_two_neighbours_at_most():
    for _ in range(20):
        units = _random_units()
        fast, slow = fsdp_step(units), fsdp_step(units, prefetch=False)
        assert fast.seconds <= slow.seconds + 1e-9
        root, *rest = [unit.bytes for unit in units]
        assert slow.peak == root + max(rest, default=0)
        assert fast.peak <= root + max((a + b for a, b in itertools.pairwise(rest)), default=max(rest, default=0))


def _timed(name="gpt2-xl", ranks=8, units=6, tokens=4096, latency=0.0):
    made = timed_units(
        preset(name), units=units, tokens=tokens, ranks=ranks, flops=1e14, bandwidth=2e10, latency=latency
    )
    return made, 2 * count_params(preset(name)).total


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("turns", [1, 3])
def test_a_stage_sends_and_holds_what_the_closed_forms_say(stage, overlap, turns):
    ranks = 8
    units, whole = _timed(ranks=ranks)
    assert sum(unit.bytes for unit in units) == whole
    step = data_parallel_step(units, stage=stage, ranks=ranks, micro_batches=turns, overlap=overlap, optimizer=0.01)
    size = {unit.name: unit.bytes for unit in units}
    times = {"gather": 1, "scatter": 1, "all-reduce": 2}
    sent = sum(times[bar.kind] * size[bar.unit] for bar in step.bars if bar.lane == "link") * (ranks - 1) / ranks
    assert sent == pytest.approx(sum(zero_traffic(whole // 2, ranks, stage, turns).values()))
    # At the end of the step stages 0 and 1 hold whole gradients, the others shards, each unit's rounded up.
    held = step.gradients[-1][1]
    assert 0 <= held - (whole if stage < 2 else whole / ranks) <= len(units)
    assert all(amount >= 0 for _, amount in (*step.gradients, *step.memory))
    assert (step.memory[-1][1] == 0) if stage == 3 else not step.memory
    for lane in ("link", "device"):
        bars = [bar for bar in step.bars if bar.lane == lane]
        assert all(a.end <= b.start for a, b in itertools.pairwise(bars)), "one thing at a time"
    update = next(bar for bar in step.bars if bar.kind == "optimizer")
    assert all(bar.end <= update.start for bar in step.bars if bar.kind in ("scatter", "all-reduce"))
    assert step.compute == pytest.approx(turns * sum(u.forward + u.backward for u in units) + 0.01)


def test_what_overlaps_takes_no_longer_and_ddp_is_the_buckets_of_chapter_02():
    for tokens in (256, 4096, 65536):
        units, whole = _timed(tokens=tokens)
        for stage in range(4):
            fast, slow = (data_parallel_step(units, stage=stage, overlap=how).seconds for how in (True, False))
            assert fast <= slow + 1e-9
        slow = data_parallel_step(units, stage=0, overlap=False)
        assert slow.exposed == pytest.approx(sum(u.gather + u.scatter for u in units))
        # Buckets of equal size, each made in time as its bytes: the same as one model of equal blocks without a root.
        equal = [
            replace(unit, bytes=whole // 6, gather=0.02, scatter=0.02, forward=0.03, backward=0.06)
            for unit in units[1:]
        ]
        nothing = TimedUnit(name="", bytes=0, gather=0, scatter=0, forward=0, backward=0)
        by_units = data_parallel_step([nothing, *equal], stage=0)
        by_buckets = ddp_step_time(
            compute_forward=0.18,
            compute_backward=0.36,
            gradient_bytes=whole,
            ranks=2,
            bandwidth=whole / 0.24,
            buckets=6,
        )
        assert by_units.exposed == pytest.approx(by_buckets.exposed)


def test_a_rank_holds_the_states_of_the_paper_before_the_update():
    """What the timeline adds to a rank's shards is what is unsharded for a while: at the end nothing of it is left."""
    ranks, params = 8, count_params(preset("gpt2-xl")).total
    for stage in range(4):
        units, whole = _timed(ranks=ranks)
        step = data_parallel_step(units, stage=stage, ranks=ranks)
        weights = whole if stage < 3 else whole / ranks
        optimizer = 6 * whole if stage == 0 else 6 * whole / ranks
        assert weights + optimizer + step.gradients[-1][1] == pytest.approx(
            zero_state_bytes(params, ranks, stage), abs=20 * len(units)
        )


@pytest.mark.parametrize(
    ("model", "units", "said"), [("gpt2", 13, "the 12 layers"), ("mixtral-8x7b", 4, "has experts")]
)
def test_units_that_cannot_be_timed_are_refused(model, units, said):
    with pytest.raises(ValueError, match=said):
        timed_units(preset(model), units=units, tokens=1, ranks=1, flops=1, bandwidth=1)


def test_a_step_needs_a_unit():
    with pytest.raises(ValueError, match="the root is always there"):
        fsdp_step([])


def test_the_formula_of_the_chapter_is_the_calculators():
    for _ in range(50):
        root, *rest = [2 * unit.bytes for unit in _random_units()]
        copies = [2 * b + a for a, b in zip([root, *rest], rest, strict=False)]
        assert peak_unsharded_bytes([root, *rest], 2, param_bytes=1) == root + max(copies, default=root)


def test_every_idea_of_the_chapter_decides_somewhere():
    made = dict(rung06.situations())
    best = {name: each.fastest() for name, each in made.items()}
    for name, (*_, fastest) in rung06._SITUATIONS.items():
        assert best[name] == (None if name == "nothing fits" else fastest or ("root", None, True)), name
    drawn = {each for name, each in best.items() if name.startswith("drawn")}
    assert len({blocks for _, blocks, _ in drawn}) >= 3
    assert {reshard for _, _, reshard in drawn} == {True, False}


def test_reasons_find_a_wrapping_that_is_fast_enough_whatever_is_drawn():
    """Who begins with the rule and follows what decides is not refused, and asks for fewer prices than are answered."""
    seed, solution = random.randrange(2**32), load("labs/solutions/rung06.py").choose_wrapping
    for name, made in rung06.situations(seed):
        assert (made.fastest() is None) == (made.by_reasons() is None), (seed, name)
        rung06._judge_choice(f"{seed}, {name}", made, rung06._asked(solution, made))
        assert made.tries < rung06._TRIES, (seed, name)


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_a_price_is_right_in_every_version(version):
    """Backward holds the most, and the version plays no part there."""
    for _, made in rung06.situations():
        for ends, blocks, reshard in made.candidates():
            units = made.wrapping(ends, blocks)
            inside = {name for unit in units for name in unit}
            sizes = [sum(made.parts[name] for name in unit) // 2 for unit in units]
            root = sum(size for name, size in made.parts.items() if name not in inside) // 2
            options = {"reshard": reshard, "param_bytes": 2, "reduce_bytes": 4, "torch": version}
            assert made.cost(units, reshard)[0] == peak_held_bytes([root, *sizes], 2, **options)


# --- a fault that nobody announced --------------------------------------------------------------------------


def test_a_healthy_job_is_one_process_and_a_fault_is_as_its_name_says():
    """Fresh weights are those of the shards; shards move; replicas agree."""
    jobs = [rung06.Job(3, fault, 1, (1, 2)) for fault in ("", "stale", "still", "still, summed", "apart")]
    healthy, *faulty = run_ranks(_three_steps, rung06.Job.ranks, jobs)[0]
    (alone,) = run_ranks(_three_steps, 1, jobs[:1])
    # fp32 sums in another order; a step of AdamW moves a weight by 1e-2 at most.
    assert all(abs(a - b) < 1e-4 for a, b in zip(healthy[0], alone[0][0], strict=True))
    assert healthy[1:] == (True, True, True)
    assert [found[1:] for found in faulty] == [
        (False, True, True), (True, False, True), (True, False, True), (True, True, False)
    ]  # fmt: skip
    assert all(abs(found[0][2] - healthy[0][2]) > 1e-3 for found in faulty)


def _three_steps(jobs):
    return [_steps_of(job) for job in jobs]


def _steps_of(job):
    """Return the losses, and of block 1 whether it is fresh, moves, and is the same on both replicas."""
    model, optimizer = job.start()
    block = model.blocks[1]
    start = _local(block)
    losses = [job.step(model, optimizer, number) for number in range(3)]
    computed = torch.cat([p.detach().flatten() for p in block.parameters()])
    gathered = not isinstance(next(block.parameters()), DTensor)
    if isinstance(block, FSDPModule):
        block.reshard()
        full = torch.cat([p.detach().full_tensor().flatten() for p in block.parameters()])
        replicas = [torch.empty_like(_local(block)) for _ in range(4)]
        dist.all_gather(replicas, _local(block))
        same = torch.equal(replicas[0], replicas[2])
        return losses, not gathered or torch.equal(computed, full), not torch.equal(start, _local(block)), same
    return losses, True, True, True


def _local(block):
    return torch.cat([(p.to_local() if isinstance(p, DTensor) else p).detach().flatten() for p in block.parameters()])


def test_every_draw_of_jobs_has_healthy_ones_and_every_effect():
    for seed in range(20):
        of = [
            functools.partial(object.__getattribute__, job) for job in rung06.jobs(seed)
        ]  # an answer cannot read these
        effects = [job("_fault").partition(",")[0] for job in of]
        assert effects.count("") == 2
        assert {*effects} == {"", *rung06._EFFECTS}
        assert any(job("_kept") and job("_block") not in job("_kept") for job in of), "a choice that is no fault"


# --- ranks that take turns on a disk ------------------------------------------------------------------------


def test_ranks_that_wait_for_nobody_are_told_so():
    def act(disk, rank, barrier):
        if rank == 0:
            barrier()

    with pytest.raises(Wrong, match="never reach"):
        World(2, (0, 1), {}).run(act)


def test_a_loop_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(World, "patience", 0.2)

    def act(disk, rank, barrier):
        while rank == 1:
            pass

    with pytest.raises(Wrong, match="Rank 1 runs and runs"):
        World(2, (0, 1), {}).run(act)


def test_the_disk_plays_every_order_the_same_way_twice():
    def act(disk, rank, barrier):
        disk.write(f"a/{rank}", rank)
        barrier()
        if rank == 0:
            disk.rename("a", "step-1")

    worlds = [World(3, order, {}) for order in ((0, 1, 2), (0, 1, 2), (2, 1, 0))]
    for world in worlds:
        world.run(act)
    first, again, other = [world.moments for world in worlds]
    assert first == again != other
    assert first[-1] == other[-1] == {"step-1/0": 0, "step-1/1": 1, "step-1/2": 2}
    assert len(first) == 1 + 3 * 2 + 1


def test_an_error_of_a_rank_reaches_the_learner():
    def act(disk, rank, barrier):
        barrier()
        if rank == 1:
            raise KeyError("model")
        barrier()

    with pytest.raises(KeyError, match="model"):
        World(2, (0, 1), {}).run(act)


def test_a_rank_that_leaves_is_no_endless_loop():
    def act(disk, rank, barrier):
        if rank == 1:
            raise SystemExit(3)
        barrier()

    with pytest.raises(SystemExit):
        World(2, (0, 1), {}).run(act)


# --- the chapter -------------------------------------------------------------------------------------------


def test_the_dials_of_the_page_are_those_of_fsdp2():
    text = (ROOT / "book" / "fsdp1_history.md").read_text(encoding="utf-8")
    table = text.split("## Every dial of FSDP2")[1].split("\n## ")[0]
    rows = {name: row for row in table.splitlines() for name in re.findall(r"`((?:re)?set_\w+)`", row.split(" | ")[0])}
    assert all(f'DIALS_SINCE["{name}"]' in rows[name] for name in DIALS_SINCE)
    here = SUPPORTED.index(release(torch.__version__))
    named = {name for name in rows if SUPPORTED.index(DIALS_SINCE.get(name, SUPPORTED[0])) <= here}
    dials = {name for name in vars(FSDPModule) if name.startswith(("set_", "reset_"))}
    assert named <= dials
    # What is left out needs a reason: hooks for other people's collectives, and what is deprecated or an event.
    assert dials - named <= {
        "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook", "set_post_optim_event",
        "set_reduce_scatter_divide_factor", "set_allocate_memory_from_process_group_for_comm",
    }  # fmt: skip
    arguments = inspect.signature(fully_shard).parameters
    assert {"shard_placement_fn", "ignored_params"} <= set(arguments) & set(re.findall(r"`(\w+)`", table))
