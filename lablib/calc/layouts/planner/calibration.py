"""Runs that papers published, each as the planner's own job, what it predicts for them, and how wrong it was on others.

    predict_run(MEASURED_RUNS[0]).error       # predicted over published speed, less 1
    like_this(load, layout).sentence          # "measured runs like it took 0.86 to 0.91 times what was predicted, ..."

A row says what its paper prints or what is assumed below; what is left out is None, and the fastest choice counts. `tests/evidence/planner` has
many more rows, fits the constants to them, judges them and writes `measured.json`, which has `LIKE_THIS` as columns. Its
ratios are predicted over measured seconds, by constants that never saw the row's source.

- Narayanan et al. 2021 (arXiv 2104.04473), tables 1 and 2: A100 80 GB, DGX nodes with 8 HDR cards; activations are
  recomputed in full, and the printed rate counts that. Sequences of 2,048 tokens, vocabulary 51,200. The ZeRO-3 rows are
  DeepSpeed's of that time, whose rings that leave a node got the rate of one card; Megatron-LM's gradients wait for the
  last backward (`--overlap-grad-reduce` came in 2023).
- Korthikanti et al. 2022 (arXiv 2205.05198), table 5: the same machines; iteration times with full recomputation, and
  with sequence parallelism and selective recomputation. The rate here is model FLOPs over time, as their MFU.
- Llama 3 (arXiv 2407.21783), table 4: H100, 16 million tokens a step, no recomputation at 8,192 tokens. Section 3.3.2
  shards optimizer states and gradients and keeps the weights gathered after forward, which is ZeRO-2 here.
  Assumed: micro-batches of one sequence, split norms, fused attention as fast as was measured on H100, and gradients of
  2 bytes, although the paper accumulates and reduces them in fp32.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import product

from lablib.calc.errors import plural
from lablib.calc.flops import step_flops
from lablib.calc.layouts.planner.layout import CUTS, Layout, check_layout, cluster
from lablib.calc.layouts.planner.peak import Counting
from lablib.calc.layouts.planner.rates import FITTED, FRAMEWORKS, Fitted, Framework
from lablib.calc.layouts.planner.time import StepWork, Workload, step_time
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params
from lablib.calc.precision import recipe
from lablib.calc.units import format_count

NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473)"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198)"
LLAMA3 = "Llama 3 (arXiv 2407.21783)"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published row; what the paper does not print is None.

    Attributes:
        tflops: Published TFLOP/s per device.
        counts: What that rate counts: "hardware" (recomputation too) or "model".
        nic: Bytes per second of one device out of its node, or None for the usual network card.
        rails: Whether a group uses all its network cards in a node together; see `Cluster`.
        etp: Ranks that split one expert; None: tp.
        dispatch: How tokens reach their experts: "all" sends every copy of a token on its own, "node" once to each node, as
            DeepEP and HybridEP do.
        ep_hides: Whether the all-to-all of one micro-batch runs behind the computing of another.
        precision: Of the products: "fp8" (one scale a tensor or a block of 128), "mxfp8", or "" for the recipe's.
        graphs: What CUDA graphs replay: "step" the whole of it, "layer" layers or parts of them, or "" nothing.
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
    framework: Framework = FRAMEWORKS["paper"]
    recipe: str = "megatron-fp16"
    gpus_per_node: int = 8
    nic: float | None = None
    rails: bool = True
    ep: int = 1
    etp: int | None = None
    dispatch: str = "all"
    ep_hides: bool = False
    precision: str = ""
    graphs: str = ""

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
        "framework": Framework(dp_hides=False),
    }
    sizes = {"tp": tp, "pp": pp, "gpus": gpus, "seq": 2048, "global_batch": batch, "tflops": tflops}
    return Run(model=model, gpu="a100", **sizes, **fields | more)


# rails=False is measured behaviour: the nodes had 8 cards, and what DeepSpeed's rows show is the rate of one.
_TABLE_2 = (
    (96, 12288, 96, 1, 1, 384, 1536, 144, {"zero": 3, "micro_batch": 4, "rails": False, "framework": Framework()}),
    (96, 12288, 96, 1, 1, 1536, 1536, 44, {"zero": 3, "micro_batch": 1, "rails": False, "framework": Framework()}),
    (105, 20480, 128, 1, 1, 640, 2560, 138, {"zero": 3, "micro_batch": 4, "rails": False, "framework": Framework()}),
    (105, 20480, 128, 1, 1, 2240, 2240, 48, {"zero": 3, "micro_batch": 1, "rails": False, "framework": Framework()}),
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
        (105, 20480, 128, 35, 280, 280, 1, 3, 49.05, 37.83),
        (128, 25600, 160, 64, 512, 512, 1, 1, 94.42, 71.49),
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
                    framework=Framework(dp_hides=False),
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
        zero=2,
        recompute=recompute,
        micro_batch=1,
        sequence_parallel=True,
        attention="fused",
        # Not stated: the faster of the two that were measured on H100.
        framework=Framework(attention="transformer-engine"),
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


MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Prediction:
    """A published row beside what the planner makes of it.

    Attributes:
        tflops: Predicted TFLOP/s per device, counted as the paper counts.
    """

    run: Run
    layout: Layout
    tflops: float
    seconds: dict[str, float]

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.tflops / self.run.tflops - 1


def workload_of_run(run: Run) -> Workload:
    """Return what a row trains and where.

    Llama 3's rows with cp gather keys and values; Megatron-LM's default, and with it the others', is a ring.
    """
    return Workload(
        run.model,
        cluster(run.gpu, run.gpus, gpus_per_node=run.gpus_per_node, nic=run.nic, rails=run.rails),
        run.seq,
        run.global_batch,
        recipe(run.recipe),
        run.attention,
        run.sequence_parallel,
        replace(run.framework, ep_hides=run.ep_hides, dispatch=run.dispatch, graphs=run.graphs),
        cp_way="gathered" if run.paper == LLAMA3 else "ring",
        precision=run.precision,
    )


def run_choices(run: Run) -> list[tuple[Layout, StepWork, float]]:
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
            tp=run.tp, cp=run.cp, ep=run.ep, dp=run.dp, pp=run.pp, zero=zero, micro_batch=micro, recompute=again,
            virtual_stages=chunks, schedule="interleaved" if chunks > 1 else "1f1b", etp=run.etp,
        )  # fmt: skip
        try:
            check_layout(
                layout, run.model, gpus=run.gpus, seq=run.seq, global_batch=run.global_batch,
                sequence_parallel=run.sequence_parallel,
            )  # fmt: skip
        except ValueError:
            continue
        flops = counted_flops(run, again) / run.gpus
        found.append((layout, load.step_work(layout), flops))
    return found


def counted_flops(run: Run, recompute: str) -> float:
    """Return the FLOPs of a step as a row's paper counts them.

    For fused attention, which skips the masked half of the scores, half of them count. Llama 3 does not say which it counts;
    at 131,072 tokens all of them would be 1.4 times as many FLOPs.
    """
    causal = run.attention == "fused"
    how = {"recompute": recompute, "causal": causal, "early_stop": False}  # Megatron's replays run to the end
    flops = step_flops(run.model, batch=run.global_batch, seq=run.seq, **how)
    return flops.hardware if run.counts == "hardware" else flops.model


def predict_run(run: Run, fitted: Fitted = FITTED) -> Prediction:
    """Return the row as the planner predicts it."""
    options = run_choices(run)
    if not options:
        raise ValueError(
            f"no layout: tp={run.tp}, cp={run.cp}, pp={run.pp} and dp={run.dp} do not go into gpus={run.gpus}, "
            f"num_layers={run.model.num_layers} and global_batch={run.global_batch}"
        )
    load = workload_of_run(run)
    rates = load.rates(fitted)
    timed = [(flops / sum(step_time(job, rates).values()), i) for i, (_, job, flops) in enumerate(options)]
    speed, i = max(timed)
    layout, job, _ = options[i]
    return Prediction(run, layout, speed / 1e12, step_time(job, rates))


#: Layouts as their papers print them, by preset, with devices per node, sequence and batch: worked examples. Llama 3:
#: table 4, second row; its chunks are ours. DeepSeek-V3 (arXiv 2412.19437), section 3.2: 2,048 GPUs, 16 stages, experts
#: over 8 nodes, ZeRO-1 and no tensor parallelism; schedule (theirs is DualPipe), recomputation and batch are ours.
WORKED_EXAMPLES = {
    "llama-3.1-405b": (
        Layout(tp=8, pp=16, dp=128, zero=2, schedule="interleaved", virtual_stages=8),
        {"gpus_per_node": 8, "seq": 8192, "global_batch": 2048},
    ),
    "deepseek-v3": (
        Layout(ep=64, pp=16, dp=128, zero=1, recompute="full"),
        {"gpus_per_node": 8, "seq": 4096, "global_batch": 15360},
    ),
}


def counting_of_run(run: Run, zero: int | None = None) -> Counting:
    """Return whose memory a published row's job has: Megatron-LM's, or with ZeRO 2 and 3 that of the papers' kernels."""
    implementation = "paper" if ((run.zero if zero is None else zero) or 0) > 1 else "megatron"
    return Counting(implementation=implementation, recipe=run.recipe, step="fused")


# How wrong predictions of measured runs were

MEASURED = resources.files(__package__) / "measured.json"  # also where the package is a zip file
LIKE_THIS = (
    "source", "card", "precision", "experts", "tp", "cp", "pp", "ep", "cp_way", "gathers", "billions", "seq", "gpus",
    "ratio",
)  # fmt: skip

#: GPUs that rows were measured on, by generation.
CARDS = {"a100": "A100", "h100": "H100, H200 and H800", "b200": "B200 and GB200"}
MIN_ROWS = 5
#: Times fewer or more GPUs, parameters and tokens that a run like another may have: the first that finds `MIN_ROWS`.
REACHES = (2, 4, 8)
MOST_ROWS = 40  # as in the fit of the constants: one source has half of all rows
#: Share by which a layout must be predicted to be faster to be ahead. Comparing two measured layouts of one job, of other
#: axes, the planner is wrong by less for half of all pairs: most of an error is one factor, and cancels.
APART = 0.09
EDGE = 20  # of so many runs one at each end is left out, so that nine in ten are inside


@dataclass(frozen=True)
class Likeness:
    """Measured runs like one, and how wrong predictions of them were, by constants that had not seen their source.

    Attributes:
        ratios: Predicted over measured seconds of a step.
        what: What the runs have in common, and their ranges; without runs, what is missing.
        kind: What `unseen` is the error of, in words.
        unseen: The error that nine in ten runs on these GPUs stayed below, in the same dtype, dense or of experts as this one
            is, no source counting for more than `MOST_ROWS`; on all GPUs if none was measured on these.
        known: Whether any run on these GPUs was measured.
    """

    ratios: tuple[float, ...]
    what: str
    kind: str
    unseen: float
    known: bool

    @property
    def median(self) -> float | None:
        """Median error; None without runs."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios) if self.ratios else None

    @property
    def worst(self) -> float | None:
        """Largest error; None without runs."""
        return max((abs(ratio - 1) for ratio in self.ratios), default=None)

    @property
    def took(self) -> tuple[float, float] | None:
        """Least and most that the runs took, over what was predicted, of many the middle nine in ten; None without runs."""
        cut = len(self.ratios) // EDGE
        inner = sorted(1 / ratio for ratio in self.ratios)[cut : len(self.ratios) - cut]
        return (inner[0], inner[-1]) if inner else None

    def interval(self, step: float) -> tuple[float, float] | None:
        """Return from how many to how many seconds a step may take that is predicted to take `step`; None on other GPUs.

        It has what is within `unseen`, and what the runs like it took. These alone are too near each other: they are of a few
        teams, and whether those of one were faster than predicted says little of another's.
        """
        if not self.known:
            return None
        ends = (1 / (1 + self.unseen), 1 / (1 - self.unseen), *(self.took or ()))
        return step * min(ends), step * max(ends)

    def between(self, step: float) -> str:
        """Return the interval of a step in words, and what it comes from."""
        if not self.known:
            return self.sentence
        low, high = self.interval(step)
        return (
            f"{low:.3g} to {high:.3g} s. Of {self.kind} nine in ten are predicted within {self.unseen:.0%}, by constants that had "
            f"not seen their source; {self.sentence}"
        )

    @property
    def sentence(self) -> str:
        """The errors in words."""
        if not self.ratios:
            return f"no measured run is like this: {self.what}"
        times = _range(*(f"{end:.2f}" for end in self.took))
        runs = plural(len(self.ratios), "measured run")
        took = f"{runs} like it took {times} times what constants that had not seen them predict"
        return f"{took}, median error {self.median:.0%} ({self.what})"

    def as_dict(self) -> dict[str, object]:
        """Return it as plain numbers: errors as shares, what the runs took over what was predicted, and how many."""
        errors = {"median": self.median, "worst": self.worst, "took": self.took}
        return {**errors, "runs": len(self.ratios), "like": self.what}


@cache
def measured_rows() -> tuple[dict, ...]:
    """Return every measured run by the names of `LIKE_THIS`."""
    text = MEASURED.read_text()
    return tuple(dict(zip(LIKE_THIS, row, strict=True)) for row in json.loads(text))


def like_this(load: Workload, layout: Layout, rows: Iterable[dict] | None = None) -> Likeness:
    """Return the measured runs like a layout of a job: nearest in GPUs, parameters and tokens, and alike in all else.

    Alike are the generation of GPUs, the dtype of products (16 bits are one), whether there are experts, which of tp, cp,
    pp and ep are above 1, how cp attends, and whether weights are gathered for every use (ZeRO-3). A run with a smaller cp
    is not like one with a larger: a ring merges once for each of its ranks.

    Args:
        rows: Measured runs, as `measured_rows` has them; None means all.
    """
    gpu, axes, sparse = load.cluster.gpu, layout.axes, load.model.is_moe
    card = CARDS.get(gpu.generation, gpu.name)
    precision = load.precision or ("fp32" if load.recipe.activation == 4 else "bf16")
    named = ", ".join(axes) or "data parallelism alone"
    if "cp" in axes:
        named = named.replace("cp", f"cp ({load.cp_way})")
    way = "ZeRO-3" if layout.zero == 3 else "at most ZeRO-2"
    rows = list(measured_rows() if rows is None else rows)
    alike = [row for row in rows if row["experts"] == sparse]
    same = [row for row in alike if row["precision"] == precision]
    on_card = [row for row in same or alike if row["card"] == gpu.generation]
    known = (
        f"{'expert' if sparse else 'dense'} {precision if same else 'measured'} runs on {card}",
        _error_within(on_card or same or alike),
        bool(on_card),
    )
    for suits, missing in (
        (lambda row: row["experts"] == sparse, "is of a mixture of experts"),
        (lambda row: row["precision"] == precision, f"{'of experts ' * sparse}is in {precision}"),
        (lambda row: row["card"] == gpu.generation, f"{'of experts ' * sparse}in {precision} is on {card}"),
        (lambda row: _axes(row) == axes, f"on {card} has {named} and no other axis"),
        (
            lambda row: "cp" not in axes or (row["cp_way"] == load.cp_way and row["cp"] >= layout.cp),
            f"on {card} has {named}, cp of {layout.cp} or more",
        ),
        (lambda row: row["gathers"] == (layout.zero == 3), f"on {card} has {named}, {way}"),
    ):
        rows = [row for row in rows if suits(row)]
        if not rows:
            return Likeness((), f"none {missing}", *known)
    mine = {"gpus": load.cluster.gpus, "billions": count_params(load.model).total / 1e9, "seq": load.seq}
    near = [[row for row in rows if _within(row, mine, reach)] for reach in REACHES]
    found = next((some for some in near if len(some) >= MIN_ROWS), near[-1])
    if not found:
        far = f"none on {card} with {named}, {way}, is within {REACHES[-1]} times its GPUs, size and length"
        return Likeness((), far, *known)
    what = [
        card,
        named,
        way,
        _extent(found, "gpus", lambda n: f"{n:,}") + " GPU" + "s" * (max(row["gpus"] for row in found) > 1),
        _extent(found, "billions", lambda n: format_count(n * 1e9)),
        _extent(found, "seq", lambda n: f"{n:,}") + " tokens",
    ]
    return Likeness(tuple(row["ratio"] for row in found), ", ".join(what), *known)


def _axes(row: dict) -> tuple[str, ...]:
    return tuple(name for name in CUTS if row[name] > 1)


def _within(row: dict, mine: dict[str, float], reach: float) -> bool:
    return all(value / reach <= row[name] <= value * reach for name, value in mine.items())


def _error_within(rows: list[dict]) -> float:
    """The error that nine in ten rows are within, where no source counts for more than `MOST_ROWS`."""
    count = Counter(row["source"] for row in rows)
    weighed = sorted((abs(row["ratio"] - 1), min(1.0, MOST_ROWS / count[row["source"]])) for row in rows)
    most = 0.9 * sum(weight for _, weight in weighed) * (1 - 1e-9)
    below = 0.0
    for error, weight in weighed:
        below += weight
        if below >= most:
            return error
    raise ValueError("no measured run")


def _extent(rows: list[dict], name: str, text: Callable[[float], str]) -> str:
    values = [row[name] for row in rows]
    return _range(text(min(values)), text(max(values)))


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
