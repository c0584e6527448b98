"""The pipeline toy against torch.distributed.pipelining, and what the clock says against what the simulator says.

The step of 1F1B: both executors live in the same ranks, on copies of the same stages, and take turns in an order drawn
anew each round, the same on every rank. The time of a step is that of the slowest rank, forward and backward of all
micro-batches, without an optimizer.

Real compute needs a core for each rank. So two ranks run real compute against the simulator, which is fed with that
step's own mean forward and backward times and the time of a message; four ranks run compute that is emulated: every
action lasts as long as it is told to.
"""

from __future__ import annotations

import copy
import random
import time
from collections import defaultdict

from lablib.calc.schedules import schedule, simulate
from lablib.launch.ranks import run_ranks
from tests.bench.harness import Result, median

LAUNCHES = 3  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS = 8
WARMUP = 2  # PyTorch asks for the shapes in its first step
MICROBATCHES = 8
BATCH, SEQ, HIDDEN, LAYERS = 2, 64, 256, 8
#: Seconds that an action lasts where compute is emulated.
EMULATED = {"F": 0.1, "B": 0.2, "I": 0.1, "W": 0.1}
OURS, THEIRS = "PipelineExecutor", "torch Schedule1F1B"


def stages_and_tokens(num_stages: int):
    """Return the stages of one GPT-2-like model, untied since PyTorch's pipelining knows no tied weights, and a batch."""
    import torch

    from lablib.toys.pipeline import split_stages
    from lablib.toys.transformer import Transformer, tiny_config

    torch.manual_seed(0)
    config = tiny_config("gpt2", num_layers=LAYERS, hidden=HIDDEN, max_positions=SEQ, tied=False)
    tokens_BT = torch.randint(0, config.vocab, (MICROBATCHES * BATCH, SEQ + 1))
    return split_stages(Transformer(config), num_stages), tokens_BT


def steps(seed: int) -> dict[str, list[float]]:
    """Time the 1F1B step of both on this rank, in seconds; at 2 ranks also measured over simulated makespan."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from lablib.toys import transformer
    from lablib.toys.pipeline import PipelineExecutor

    rank, p = dist.get_rank(), dist.get_world_size()
    stages, tokens_BT = stages_and_tokens(p)
    theirs = copy.deepcopy(stages[rank])
    executor = PipelineExecutor(stages, schedule("1f1b", p, MICROBATCHES))
    stage = PipelineStage(theirs, rank, p, torch.device("cpu"))
    torch_schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=transformer.loss)
    inputs = [tokens_BT[:, :-1]] if rank == 0 else []

    def run_theirs() -> None:
        torch_schedule.step(*inputs, target=tokens_BT)

    variants = {OURS: lambda: executor.step(tokens_BT.chunk(MICROBATCHES)), THEIRS: run_theirs}
    order, names = random.Random(seed), list(variants)
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(names)
        for name in names:
            for module in (stages[rank], theirs):
                module.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            seconds = time.perf_counter() - start
            if turn >= WARMUP:
                samples[name].append(seconds)
            if turn >= WARMUP and name == OURS and p == 2:
                samples["ratio"].append(over_simulated(executor.timeline(), message_time()))
    return samples


def over_simulated(timeline, communication: float) -> float:
    """Return the measured makespan over that of the simulator, fed with the mean time of every stage's actions."""
    plan, seconds = timeline.schedule, defaultdict(list)
    for event in timeline.events:
        seconds[event.action.kind, event.action.stage].append(event.end - event.start)
    forward, backward = (
        [sum(seconds[kind, stage]) / len(seconds[kind, stage]) for stage in range(plan.num_stages)]
        for kind in "FB"
    )
    told = simulate(plan, forward=forward, backward=backward, communication=communication)
    return timeline.makespan / told.makespan


def message_time() -> float:
    """Return the time of one message of activations between ranks 0 and 1: half a round trip, median of ten."""
    import torch
    import torch.distributed as dist

    x_BSH, rank = torch.zeros(BATCH, SEQ, HIDDEN), dist.get_rank()
    halves = []
    for _ in range(10):
        start = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(x_BSH, 1 - rank)
            else:
                dist.recv(x_BSH, 1 - rank)
        halves.append((time.perf_counter() - start) / 2)
    both = [None, None]
    dist.all_gather_object(both, median(halves))
    return max(both)


def emulated(name: str, v: int) -> float:
    """Run a schedule with emulated compute and return the makespan, in seconds."""
    import torch.distributed as dist

    from lablib.launch.pipeline_runs import WatchedExecutor

    p = dist.get_world_size()
    plan = schedule(name, p, MICROBATCHES, v)
    stages, tokens_BT = stages_and_tokens(plan.num_stages)
    executor = WatchedExecutor(stages, plan)
    # The executor gives each of v stages 1/v of it; here every action lasts as long as EMULATED says.
    executor.seconds = {kind: v * seconds for kind, seconds in EMULATED.items()}
    executor.step(
        tokens_BT[:, :5].chunk(MICROBATCHES)
    )  # four tokens a window: the core is left to the others
    return executor.timeline().makespan


def simulated(name: str, p: int, v: int) -> float:
    """Return the makespan that the simulator gives for the emulated times, messages taking none."""
    plan = schedule(name, p, MICROBATCHES, v)
    times = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
    return simulate(plan, **{key: [EMULATED[kind]] * plan.num_stages for key, kind in times.items()}).makespan


def results() -> list[Result]:
    """Measure the step at 2 and 4 ranks, and the makespan against the simulator."""
    rows = []
    for ranks in (2, 4):
        samples: dict[str, list[float]] = defaultdict(list)
        for launch in range(LAUNCHES):
            by_rank = run_ranks(steps, ranks, 100 * ranks + launch, timeout=600, threads=1)
            for name in by_rank[0]:
                samples[name] += [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
            ours, theirs = (median(samples[name]) for name in (OURS, THEIRS))
            print(
                f"1F1B step, {ranks} ranks, after launch {launch + 1} of {LAUNCHES}: {ours / theirs:.3f}",
                flush=True,
            )
        title = f"1F1B step, {LAYERS} layers, {MICROBATCHES} micro-batches, {ranks} ranks"
        both = {name: samples[name] for name in (OURS, THEIRS)}
        rows.append(Result(title, 1e3 * ours, 1e3 * theirs, "ms", THEIRS, samples=both))
        if ratios := samples["ratio"]:
            off = 100 * abs(median(ratios) - 1)
            title = f"1F1B makespan off the simulator, {ranks} ranks, real compute"
            rows.append(Result(title, off, 15, "%", samples={"measured over simulated": ratios}))
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        told = simulated(name, 4, v)
        ratios = [run_ranks(emulated, 4, name, v, timeout=120)[0] / told for _ in range(LAUNCHES)]
        title = f"{name} makespan off the simulator, 4 ranks, EMULATED compute"
        off = 100 * abs(median(ratios) - 1)
        rows.append(Result(title, off, 15, "%", samples={"measured over simulated": ratios}))
    return rows
