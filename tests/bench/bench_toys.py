"""How fast the toys are beside PyTorch's own implementations: reported and not bounded, since toys are plain.

Both live in the same ranks and take turns in an order drawn anew each round, the same on every rank, so that a slow
moment of the machine meets both. A round takes as long as its slowest rank.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable

from lablib.launch.ranks import run_ranks
from tests.bench.harness import Result, median

LAUNCHES = 3  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS, WARMUP = 7, 3  # PyTorch's DDP builds its final buckets in the second step
RANKS = (2, 4)
MIB = 2**20


def ring_all_reduce(size: int) -> dict[str, Callable[[], object]]:
    """All-reduce of an array of so many bytes."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_reduce

    x = torch.zeros(size // 4)
    return {"toy": lambda: ring_all_reduce(x), "gloo": lambda: dist.all_reduce(x)}


def ring_halves(half: str) -> dict[str, Callable[[], object]]:
    """Reduce-scatter or all-gather of 64 MiB."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_gather, ring_reduce_scatter
    from lablib.toys.torch_names import all_gather, reduce_scatter

    whole = torch.zeros(64 * MIB // 4)
    chunk = torch.zeros(whole.numel() // dist.get_world_size())
    if half == "reduce_scatter":
        return {"toy": lambda: ring_reduce_scatter(chunk, whole), "gloo": lambda: reduce_scatter(chunk, whole)}
    return {"toy": lambda: ring_all_gather(whole, chunk), "gloo": lambda: all_gather(whole, chunk)}


def _gpt():
    import torch

    from lablib.toys.transformer import Transformer, tiny_config

    torch.manual_seed(0)
    config = tiny_config("gpt2", num_layers=11, hidden=384, num_heads=6, max_positions=64)
    return Transformer(config), torch.randint(0, 256, (1, 65))  # few tokens: communication weighs much


def data_parallel() -> dict[str, Callable[[], object]]:
    """A training step of a 20M GPT under DDP."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from lablib.toys.data_parallel import OverlappedDDP
    from lablib.toys.transformer import loss

    module, tokens_BT = _gpt()
    toy, theirs = OverlappedDDP(copy.deepcopy(module)), DistributedDataParallel(module)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss(model(tokens_BT[:, :-1]), tokens_BT).backward()
        if model is toy:
            toy.sync()
        optimizer.step()
        optimizer.zero_grad()

    steps = {"toy": toy, "DistributedDataParallel": theirs}
    sgd = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in steps.items()}
    return {name: lambda name=name: step(steps[name], sgd[name]) for name in steps}


def zero3() -> dict[str, Callable[[], object]]:
    """A training step of a 20M GPT under ZeRO-3; both gather the same units, and free all of them after forward."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from lablib.toys.transformer import loss
    from lablib.toys.zero import ZeRO3

    module, tokens_BT = _gpt()
    toy = ZeRO3(copy.deepcopy(module), lambda shards: torch.optim.AdamW(shards, lr=1e-3))
    for unit in (*module.blocks, module):
        fully_shard(unit, reshard_after_forward=True)  # by default the root stays gathered
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        toy.backward(loss(toy(tokens_BT[:, :-1]), tokens_BT))
        toy.step()

    def theirs() -> None:
        loss(module(tokens_BT[:, :-1]), tokens_BT).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"toy": step, "fully_shard": theirs}


def tensor_parallel() -> dict[str, Callable[[], object]]:
    """Forward and backward of a Llama block; the toy all-reduces 4 times, DTensor 7: q, k and v each for themselves."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from lablib.toys.tensor_parallel import ParallelBlock, Plan
    from lablib.toys.transformer import Block, rotary, tiny_config

    torch.manual_seed(0)
    config = tiny_config("llama", hidden=256, num_heads=8, ffn=704)  # 8 divides it, as DTensor wants
    block = Block(config, 0.0, "fused")
    names = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    toy = ParallelBlock(copy.deepcopy(block), Plan(config, dist.group.WORLD))
    theirs = parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    x_BSH = torch.randn(2, 128, config.hidden, requires_grad=True)
    rope_2SD = rotary(128, config.head_dim, device=x_BSH.device, dtype=x_BSH.dtype)
    blocks = {"toy": toy, "DTensor": theirs}
    return {name: lambda each=each: each(x_BSH, rope_2SD).sum().backward() for name, each in blocks.items()}


def pipeline() -> dict[str, Callable[[], object]]:
    """Forward and backward of 8 micro-batches by 1F1B, a stage on each rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from lablib.calc.schedules import schedule
    from lablib.toys import transformer
    from lablib.toys.pipeline import PipelineExecutor, split_stages

    torch.manual_seed(0)
    p, rank = dist.get_world_size(), dist.get_rank()
    # Untied, since PyTorch's pipelining knows no tied weights.
    config = transformer.tiny_config("gpt2", num_layers=8, hidden=256, max_positions=64, tied=False)
    stages = split_stages(transformer.Transformer(config), p)
    tokens_BT = torch.randint(0, config.vocab, (16, 65))
    theirs = Schedule1F1B(
        PipelineStage(copy.deepcopy(stages[rank]), rank, p, torch.device("cpu")), 8, loss_fn=transformer.loss
    )
    toy, inputs = PipelineExecutor(stages, schedule("1f1b", p, 8)), [tokens_BT[:, :-1]] if rank == 0 else []
    return {"toy": lambda: toy.step(tokens_BT.chunk(8)), "Schedule1F1B": lambda: theirs.step(*inputs, target=tokens_BT)}


#: What is compared: name, what makes the two, its arguments.
RACES: tuple[tuple[str, Callable[..., dict[str, Callable[[], object]]], tuple], ...] = (
    ("ring all_reduce, 64 MiB", ring_all_reduce, (64 * MIB,)),
    ("ring all_reduce, 1 KiB", ring_all_reduce, (1024,)),
    ("ring reduce_scatter, 64 MiB", ring_halves, ("reduce_scatter",)),
    ("ring all_gather, 64 MiB", ring_halves, ("all_gather",)),
    ("DDP step, 20M GPT", data_parallel, ()),
    ("ZeRO-3 step, 20M GPT", zero3, ()),
    ("TP Llama block, forward and backward", tensor_parallel, ()),
    ("1F1B step, 8 layers, 8 micro-batches", pipeline, ()),
)


def timed(seed: int, make: Callable[..., dict[str, Callable[[], object]]], *arguments: object) -> dict:
    """Time both on this rank, in seconds."""
    import torch.distributed as dist

    variants = make(*arguments)
    order, names = random.Random(seed), list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return for every round the time of the slowest rank."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for title, make, arguments in RACES:
        for ranks in RANKS:
            samples: dict[str, list[float]] = {}
            for launch in range(LAUNCHES):
                seed = 100 * ranks + launch
                for name, times in slowest(
                    run_ranks(timed, ranks, seed, make, *arguments, timeout=600, threads=1)
                ).items():
                    samples.setdefault(name, []).extend(times)
            theirs = next(name for name in samples if name != "toy")
            ours, reference = (1e3 * median(samples[name]) for name in ("toy", theirs))
            rows.append(Result(f"{title}, {ranks} ranks", ours, reference, "ms", theirs, at_most=None, samples=samples))
            print(f"{rows[-1].name}: {rows[-1].ratio:.2f} of {theirs}", flush=True)
    return rows
