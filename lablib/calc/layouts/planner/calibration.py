"""The three fitted constants of the planner, the published runs they come from, and how far off they are.

    EFFICIENCY      fitted on all rows of `MEASURED_RUNS`: what the planner uses
    judge_runs()    every row predicted by constants that never saw its paper: what to believe

The constants minimize the sum over rows of (log of predicted over published)². A row says what its paper prints; what
it leaves out is None, and the best choice counts. Only the ZeRO-3 rows of Narayanan et al. have much communication to
hide: without that paper `overlap` goes to its bound of 1, and those rows come out slow.

- Narayanan et al. 2021 (arXiv 2104.04473), tables 1 and 2: A100 80 GB, DGX nodes with 8 HDR cards; activations are
  recomputed in full, and the printed rate counts that. Sequences of 2,048 tokens, vocabulary 51,200.
  The ZeRO-3 rows are DeepSpeed's of that time.
- Korthikanti et al. 2022 (arXiv 2205.05198): the same machines; iteration times with full recomputation, and with
  sequence parallelism and selective recomputation. The rate here is model FLOPs over time, as their MFU.
- Llama 3 (arXiv 2407.21783), table 4: H100, 16 million tokens a step, no recomputation at 8,192 tokens.
  Gradients are counted with 2 bytes, although the paper reduces them in fp32: with 4 our count of its memory is above
  the GPU's, since the first stage keeps 68 to 75 GB of activations. With 4 the errors of these rows are 2 to 4 points
  smaller, and the worst error of all rows, each predicted without its own paper, is 26 percent in place of 24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from lablib.calc.flops import step_flops
from lablib.calc.layouts.planner.layout import Layout, check_layout, cluster
from lablib.calc.layouts.planner.memory import layout_memory
from lablib.calc.layouts.planner.time import Efficiency, Job, Workload, step_time
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params
from lablib.calc.precision import recipe

NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473)"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198)"
LLAMA3 = "Llama 3 (arXiv 2407.21783)"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published row.

    Attributes:
        tflops: Published TFLOP/s per device.
        counts: What that rate counts: "hardware" (recomputation too) or "model".
        zero: ZeRO stage, or None if it is not plain which one: Llama 3 shards optimizer and gradients, and how often
            it scatters gradients is not printed.
        recompute: Recomputation, or None if not printed.
        micro_batch: Sequences of a micro-batch, or None if not printed.
        virtual_stages: Chunks in a stage, or None if not printed.
        sequence_parallel: Whether tp splits norms too.
        attention: "plain" or "fused".
        nic: Bytes per second of one device out of its node, or None for the usual network card.
        rails: Whether a group uses all its network cards in a node together; see `Cluster`.
    """

    name: str
    paper: str
    table: str
    model: ModelConfig
    gpu: str
    gpus: int
    tp: int
    cp: int = 1
    pp: int
    seq: int
    global_batch: int
    tflops: float
    counts: str
    zero: int | None
    recompute: str | None
    micro_batch: int | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool = False
    attention: str = "plain"
    recipe: str = "megatron-fp16"
    nic: float | None = None
    rails: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel replicas: the devices that the other three leave."""
        return self.gpus // (self.tp * self.cp * self.pp)


def megatron_gpt(layers: int, hidden: int, heads: int, *, seq: int = 2048, vocab: int = 51200) -> ModelConfig:
    """Return a GPT of the Megatron papers: MLP of width 4h, learned positions, tied output."""
    return ModelConfig(
        name=f"gpt-{layers}x{hidden}",
        family="gpt2",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_positions=seq,
        learned_positions=True,
        tied=True,
        norm="layernorm",
        gated_mlp=False,
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
    )


def narayanan(
    layers: int, hidden: int, heads: int, tp: int, pp: int, gpus: int, batch: int, tflops: float, **more: object
) -> Run:
    """Return a row in the shape of Narayanan et al.: fp16, plain attention, full recomputation, no sequence parallelism."""
    model = megatron_gpt(layers, hidden, heads)
    fields = {
        "name": f"{count_params(model).total / 1e9:.1f}B on {gpus}",
        "paper": NARAYANAN,
        "table": "table 1",
        "counts": "hardware",
        "zero": 0,
        "recompute": "full",
    }
    sizes = {"tp": tp, "pp": pp, "gpus": gpus, "seq": 2048, "global_batch": batch, "tflops": tflops}
    return Run(model=model, gpu="a100", **sizes, **fields | more)


_TABLE_2 = (
    (96, 12288, 96, 1, 1, 384, 1536, 144, {"zero": 3, "micro_batch": 4}),
    (96, 12288, 96, 1, 1, 1536, 1536, 44, {"zero": 3, "micro_batch": 1}),
    (105, 20480, 128, 1, 1, 640, 2560, 138, {"zero": 3, "micro_batch": 4}),
    (105, 20480, 128, 1, 1, 2240, 2240, 48, {"zero": 3, "micro_batch": 1}),
    (96, 12288, 96, 8, 12, 384, 1536, 153, {"micro_batch": 1}),
    (96, 12288, 96, 8, 12, 1536, 1536, 141, {"micro_batch": 1}),
    (105, 20480, 128, 8, 35, 560, 2240, 171, {"micro_batch": 1}),
    (105, 20480, 128, 8, 35, 2240, 2240, 159, {"micro_batch": 1}),
)


def _korthikanti() -> list[Run]:
    rows = []
    # layers, hidden, heads, pp, devices, batch, micro-batch, chunks, seconds with full recomputation, and as presented
    for layers, hidden, heads, pp, gpus, batch, micro, chunks, full, present in (
        (48, 6144, 64, 1, 8, 4, 4, 1, 1.42, 1.10),
        (96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75),
    ):
        model = megatron_gpt(layers, hidden, heads)
        flops = 72 * batch * layers * 2048 * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (12 * hidden * layers))
        for recompute, time, sequence_parallel in (("full", full, False), ("selective", present, True)):
            rows.append(
                Run(
                    name=f"{count_params(model).total / 1e9:.0f}B on {gpus}, {recompute}",
                    paper=KORTHIKANTI,
                    table="iteration times",
                    model=model,
                    gpu="a100",
                    gpus=gpus,
                    tp=8,
                    pp=pp,
                    seq=2048,
                    global_batch=batch,
                    tflops=flops / time / gpus / 1e12,
                    counts="model",
                    zero=0,
                    recompute=recompute,
                    micro_batch=micro,
                    virtual_stages=chunks,
                    sequence_parallel=sequence_parallel,
                )
            )
    return rows


def _llama3(gpus: int, cp: int, seq: int, batch: int, tflops: float, recompute: str | None) -> Run:
    return Run(
        name=f"405B on {gpus}, {seq // 1024}K",
        paper=LLAMA3,
        table="table 4",
        model=preset("llama-3.1-405b"),
        gpu="h100",
        gpus=gpus,
        tp=8,
        cp=cp,
        pp=16,
        seq=seq,
        global_batch=batch,
        tflops=tflops,
        counts="model",
        zero=None,
        recompute=recompute,
        sequence_parallel=True,
        attention="fused",
        recipe="mixed-bf16",
    )


#: Every row, in the order of the papers.
MEASURED_RUNS: tuple[Run, ...] = (
    narayanan(24, 2304, 24, 1, 1, 32, 512, 137),
    narayanan(36, 4096, 32, 4, 1, 128, 512, 142),
    narayanan(48, 8192, 64, 8, 2, 512, 1536, 138),
    narayanan(60, 10240, 80, 8, 4, 1024, 1792, 140),
    narayanan(96, 16384, 128, 8, 16, 1920, 2160, 155),
    narayanan(105, 20480, 128, 8, 35, 2520, 2520, 163),
    *(
        narayanan(*row[:-1], table="table 2", name=f"{'ZeRO-3' if 'zero' in row[-1] else 'PTD'} {row[5]}", **row[-1])
        for row in _TABLE_2
    ),
    *_korthikanti(),
    _llama3(8192, 1, 8192, 2048, 430, "none"),
    _llama3(16384, 1, 8192, 2048, 400, "none"),
    _llama3(16384, 16, 131072, 128, 380, None),
)

#: Rows that nothing is fitted to. FSDP (arXiv 2304.11277), section 5.4: GPT-175B on up to 512 A100 with 2 Tb/s a node,
#: at 1 and 2 sequences a device, "more than" these rates, recomputation counted. PyTorch's FSDP over NCCL uses all cards
#: of a node at once. The DeepSpeed of Narayanan's ZeRO-3 rows, two years older, got the rate of one.
UNFITTED: tuple[Run, ...] = tuple(
    replace(
        narayanan(96, 12288, 96, 1, 1, 512, 512 * micro, tflops, zero=3, micro_batch=micro, nic=31.25e9, rails=True),
        name=f"GPT-175B, batch {micro}",
        paper="FSDP (arXiv 2304.11277)",
        table="section 5.4",
    )
    for micro, tflops in ((1, 173), (2, 186))
)


#: The result of `fit(MEASURED_RUNS)`; a test fits again.
EFFICIENCY = Efficiency(matmul=0.8139, bandwidth=0.7455, overlap=0.4117)

START = (0.8, 0.8, 0.2)
STEPS = (0.1, 1e-4)
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Prediction:
    """A published row beside what the planner makes of it.

    Attributes:
        layout: The layout, with what the paper leaves out chosen.
        tflops: Predicted TFLOP/s per device, counted as the paper counts.
        seconds: Predicted seconds of a step, by part.
        memory: Bytes of a rank by term.
    """

    run: Run
    layout: Layout
    tflops: float
    seconds: dict[str, float]
    memory: dict[str, int]
    efficiency: Efficiency

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.tflops / self.run.tflops - 1


def workload_of_run(run: Run) -> Workload:
    """Return what a row trains and where."""
    return Workload(
        run.model,
        cluster(run.gpu, run.gpus, nic=run.nic, rails=run.rails),
        run.seq,
        run.global_batch,
        recipe(run.recipe),
        run.attention,
        run.sequence_parallel,
    )


def choices(run: Run) -> list[tuple[Layout, Job, float]]:
    """Return the layouts that a row may mean, each as work and with the FLOPs that its paper would count for a device.

    Memory is not checked: the layout of a paper did fit.
    """
    load, found = workload_of_run(run), []
    for micro, chunks, again, zero in product(
        MICRO_BATCHES if run.micro_batch is None else (run.micro_batch,),
        range(1, (run.model.num_layers + 2) // run.pp + 1) if run.virtual_stages is None else (run.virtual_stages,),
        ("none", "selective", "full") if run.recompute is None else (run.recompute,),
        (1, 2, 3) if run.zero is None else (run.zero,),
    ):
        layout = Layout(
            tp=run.tp, cp=run.cp, dp=run.dp, pp=run.pp, zero=zero, micro_batch=micro, recompute=again,
            virtual_stages=chunks, schedule="interleaved" if chunks > 1 else "1f1b",
        )  # fmt: skip
        try:
            check_layout(
                layout, run.model, gpus=run.gpus, seq=run.seq, global_batch=run.global_batch,
                sequence_parallel=run.sequence_parallel,
            )  # fmt: skip
        except ValueError:
            continue
        flops = counted_flops(run, again) / run.gpus
        found.append((layout, load.job(layout), flops))
    return found


def counted_flops(run: Run, recompute: str) -> float:
    """Return the FLOPs of a step as a row's paper counts them.

    Fused attention skips the masked half of the scores, and the half is what is counted for it.
    """
    causal = run.attention == "fused"
    how = {"recompute": recompute, "causal": causal, "early_stop": False}  # Megatron's replays run to the end
    flops = step_flops(run.model, batch=run.global_batch, seq=run.seq, **how)
    return flops.hardware if run.counts == "hardware" else flops.model


def predict_run(run: Run, rates: Efficiency = EFFICIENCY) -> Prediction:
    """Return the row as the planner predicts it."""
    options = choices(run)
    if not options:
        raise ValueError(
            f"no layout: tp={run.tp}, cp={run.cp}, pp={run.pp} and dp={run.dp} do not go into gpus={run.gpus}, "
            f"num_layers={run.model.num_layers} and global_batch={run.global_batch}"
        )
    speed, i = _best(options, rates)
    layout, job, _ = options[i]
    memory = layout_memory(workload_of_run(run), layout)
    return Prediction(run, layout, speed / 1e12, step_time(job, rates), memory, rates)


def _best(options: list[tuple[Layout, Job, float]], rates: Efficiency) -> tuple[float, int]:
    """FLOP/s of the fastest choice, and its number."""
    return max((flops / sum(step_time(job, rates).values()), i) for i, (_, job, flops) in enumerate(options))


def fit(runs: Sequence[Run] = MEASURED_RUNS) -> Efficiency:
    """Return the constants that suit these rows best, by a pattern search: a step along each axis while it helps."""
    if not runs:
        raise ValueError("runs is empty: at least one row is needed to fit three constants")
    options = [(run.tflops * 1e12, choices(run)) for run in runs]

    def loss(point: tuple[float, ...]) -> float:
        rates = Efficiency(*point)
        return sum(math.log(_best(choice, rates)[0] / published) ** 2 for published, choice in options)

    point, (step, smallest) = START, STEPS
    best = loss(point)
    while step > smallest:
        before = best
        for axis in range(3):
            for move in (step, -step):
                other = tuple(x + move * (i == axis) for i, x in enumerate(point))
                # Shares lie between 0 and 1; the first two divide.
                if min(other[:2]) > 0 and min(other) >= 0 and max(other) <= 1 and loss(other) < best:
                    best, point = loss(other), other
        if best == before:
            step /= 2
    return Efficiency(*point)


def judge_runs(runs: Sequence[Run] = MEASURED_RUNS) -> list[Prediction]:
    """Return every row predicted by constants fitted on the rows of the other papers."""
    papers = list(dict.fromkeys(run.paper for run in runs))
    if len(papers) < 2:
        raise ValueError(f"all rows are of {papers}: at least two papers are needed to leave one out")
    rates = {paper: fit([run for run in runs if run.paper != paper]) for paper in papers}
    return [predict_run(run, rates[run.paper]) for run in runs]
