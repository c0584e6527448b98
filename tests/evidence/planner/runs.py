"""Step times that others measured and published: where they come from, and each as a `Run` of the planner.

A row of `measured_runs.csv` holds what a prediction needs. What a source does not state is empty, and the fastest choice
counts, as for the rows of papers in `lablib.calc.layouts.planner.calibration`; `Source.inferred` says what was filled in.
Where the columns of a shape are empty, `model` is a preset of `lablib.calc.models`; `layers` alone changes its depth. The
columns in `EXTRA` say what `Run` says of the same names; a file of your own may lack them. `read_rows` reads vTrain's and
LLM Foundry's files as their repositories publish them, too.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lablib.calc.layouts.planner import MEASURED_RUNS, Framework, Run, counted_flops, narayanan
from lablib.calc.models import ModelConfig, preset

ROWS = Path(__file__).with_name("measured_runs.csv")
COLUMNS = ROWS.read_text().partition("\n")[0].split(",")
EXTRA = ("etp", "dispatch", "ep_hides", "precision", "graphs")
#: What a row of vTrain's ground_truth_single.csv and ground_truth_multi.csv needs; the second has "Parameters (billion)".
VTRAIN = {
    "# GPUs": "gpus", "global batch": "global_batch", "micro batch": "micro_batch", "sequence length": "seq",
    "# layers": "layers", "hidden size": "hidden", "attention heads": "heads",
    "tensor parallelism": "tp", "pipeline parallelism": "pp",
}  # fmt: skip
#: And one of the tables in LLM Foundry's scripts/train/benchmarking/README.md, or of what its collect_results.py saves.
FOUNDRY = ("Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GlobalBatchSize", "Throughput (T/s)", "Precision",
           "MP Mode", "Sharding Strategy", "Activation Checkpointing")  # fmt: skip
FORMATS = {
    "measured_runs.csv": {*COLUMNS} - {*EXTRA},
    "vTrain's ground truth": {*VTRAIN, "iteration time (ms)"},
    "LLM Foundry's benchmarks": {*FOUNDRY},
}
#: Layers, width and heads of MPT by size: mosaicml/llm-foundry v0.4.0, scripts/train/yamls/pretrain/mpt-*.yaml.
MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from.

    Attributes:
        what: What ran, on what.
        inferred: What the source does not state and these rows assume.
        pairs: Which pairs of attention its TFLOP/s or MFU count ("all", "causal", "none" or "not stated") and how that is
            known; empty where it prints neither. The rows hold seconds, so only a comparison of rates depends on it.
        fitted: Whether the constants are fitted to it; the others only judge.
    """

    name: str
    what: str
    where: str
    inferred: str = ""
    pairs: str = ""
    fitted: bool = True


_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md to 4ab94dfad (Apache-2.0)"

SOURCES = {
    source.name: source
    for source in (
        Source(
            name="vtrain-single",
            what="Megatron-DeepSpeed GPTs of width 1,024 and 2,048 on 2 to 8 A100, full recomputation",
            where="VIA-Research/vTrain, data/ground_truth_single.csv (MIT), a third of its rows",
            inferred="fp16, unfused attention with dropout; gradients sent after the last backward, as DeepSpeed's pipeline does",
        ),
        Source(
            name="vtrain-multi",
            what="Megatron-DeepSpeed GPTs of 3.6B on 64 and 39.1B on 512 A100, 100 Gb/s a GPU, full recomputation",
            where="VIA-Research/vTrain, data/ground_truth_multi.csv (MIT), two of its four sizes",
            inferred="as for vtrain-single",
        ),
        Source(
            name="llm-foundry",
            what="MPT of 125M to 30B under FSDP on 8 to 512 A100 and H100, 512 to 65,536 tokens",
            where="mosaicml/llm-foundry, scripts/train/benchmarking/README.md (Apache-2.0); its fp8 rows and those of 350M, 760M, 3B, 13B and 70B are left out",
            inferred="Triton's attention kernel (its sweep.py ran 1B and 7B on 128 H100 and more with FlashAttention), eager PyTorch whose recomputation stops early, 200 and 400 Gb/s a GPU",
            pairs="all: the formula in its README",
        ),
        Source(
            name="nvidia-dgxc",
            what="GPT-3, Llama 3.1 and Nemotron with NeMo (Megatron-Core) on 8 to 2,304 H100, 400 Gb/s a GPU, bf16",
            where="NVIDIA/dgxc-benchmarking, one README a model (Apache-2.0); fp8 and mixtures of experts are left out",
            inferred="recomputation and overlap of tensor parallelism, from the launcher's configuration files",
            pairs="all: the formula in llama3.1/README.md at 4eca801",
        ),
        Source(
            name="simumax-b200",
            what="Llama 3 of 70B and 405B cut to 12 and 4 layers with Megatron-LM on 8 B200, up to 131,072 tokens",
            where="MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md (Apache-2.0)",
            inferred="micro-batches of one sequence of 4,096 tokens where none is named",
            pairs="all: flops_per_token in simumax/core/config.py",
        ),
        Source(
            name="torchtitan",
            what="Llama 2 and 3 of 13B and 70B with torchtitan on 64 A100",
            where="pytorch/torchtitan, docs/performance.md (BSD-3-Clause); rows that recompute in part are left out",
            inferred="200 Gb/s a GPU, eager PyTorch",
            pairs="all: 70B at 331 tokens/s is 51.1 percent with all pairs, 47.7 with the unmasked half; 51.7 are printed",
        ),
        Source(
            name="megascale",
            what="GPT of 175B with Megatron-LM on 256 to 12,288 A100",
            where="MegaScale (arXiv 2402.15627), table 2, its rows of Megatron-LM (secondary)",
            inferred="micro-batches of one sequence, gradients sent after the last backward: Megatron-LM's default then",
            pairs="not stated",
        ),
        Source(
            name="megatron-bridge",
            what="Llama 3 and 3.1 of 8B, 70B and 405B with Megatron Bridge on 8 to 1,024 H100, B200 and GB200, FP8 and MXFP8",
            where=f"{_BRIDGE}; a row a release, 25.09 to 26.06, each by the last version of its table",
            inferred="what a table does not print is from scripts/performance at the tags v0.1.0rc3 to v0.5.0: CUDA graphs "
            "of 8B, which products hide collectives. GB200 as domains of 64 GPUs, 400 Gb/s a GPU out of them. FP8 has "
            "one scale a tensor. Not modelled: on GB200 FSDP keeps activations of 40 layers of 70B and of 95 of 405B in "
            "host memory, and 8B on H100 recomputes 5 of 32 layers from 25.11 on",
            pairs="causal: with the unmasked half the printed tokens/s give the printed TFLOP/s (median 0.0 percent, worst "
            "2.3 where 26.04.01 rounds its tokens), with all pairs 4 to 12 percent more",
        ),
        Source(
            name="megatron-bridge-moe",
            what="DeepSeek-V3, Qwen3 of 30B and 235B and GPT-OSS 120B with Megatron Bridge on 8 to 1,024 H100, B200 and "
            "GB200, FP8 and MXFP8, tokens balanced by force. Left out: token-dropping runs of 25.09, Nemotron 3 (Mamba), "
            "DeepSeek-V4, GPT-OSS of 26.06.01 (a known regression, says its note), Qwen3-30B on H100 of 26.02.01, whose "
            "printed layout is not the recipe's",
            where=f"{_BRIDGE}; a row a release, 25.09 to 26.08, each by the last version of its table",
            inferred="dispatcher, overlap of the all-to-all and CUDA graphs, from scripts/performance at the tags v0.1.0rc3 "
            "to v0.5.1 and src/megatron/bridge/perf_recipes at v0.6.0; DeepEP and HybridEP as once a node, all-to-all as "
            "every copy. DeepSeek-V3 on 256 B200 in 26.04.01 is taken to have run v0.5.0's recipe, which has its layout. "
            "Its prediction module counts as a 62nd layer, its second pass through the head (2 percent of the FLOPs) as "
            "nothing; the row of 25.11 on GB200, which leaves the module out, keeps the place. Recomputing MLA's "
            "up-projections, the MLPs of dense layers, norms or activations counts as none. From 26.06 on attention of Qwen3 and "
            "GPT-OSS is in FP8 too",
            pairs="causal: with the unmasked half Qwen3 and GPT-OSS within 1.4 percent, with all pairs 6 to 23 percent more",
        ),
        Source(
            name="deepseek-v3",
            what="DeepSeek-V3 by its authors on 2,048 H800, 180,000 GPU hours for a trillion tokens, FP8 in blocks of 128",
            where="DeepSeek-V3 (arXiv 2412.19437), sections 1, 3.2 (layout), 3.3 (FP8) and 4.2 (batch, sequence)",
            inferred="DualPipe as 1F1B that hides the all-to-all; copies go once to a node, to at most four, "
            "and are counted in 2 bytes both ways, where they come back in bf16; 15,360 "
            "sequences a step throughout; the prediction module as a 62nd layer; pauses, if any, are in the hours",
        ),
        Source(
            name="moe-folding",
            what="Mixtral 8x22B with Megatron-Core on 128 H100, bf16, tokens dropped beyond a capacity factor of 1; the other "
            "models of the table have no preset here",
            where="MoE Parallel Folding (arXiv 2504.14960), table 3 (secondary)",
            inferred="micro-batches of one sequence, no recomputation, 400 Gb/s a GPU, the fastest virtual stages; ZeRO-1 "
            "where FSDP is not named, an expert split as the rest where its split is not",
            pairs="not stated: seconds are of all pairs, which Megatron-LM counted then",
        ),
        Source(
            name="bloom",
            what="Megatron-DeepSpeed GPTs of 18B to 203B: BLOOM's search over layouts on 8 to 384 A100, 50 GB/s a node",
            where="bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md (Apache-2.0)",
            inferred="fp16 where no dtype is named; seconds are of one iteration",
            pairs="none: 8 FLOPs a parameter and token, bigscience-workshop/bigscience, math/README.md",
            fitted=False,
        ),
        Source(
            name="internlm",
            what="InternLM 7B on 8 to 1,024 A100, ZeRO-1 over all of them, 4 x 100 Gb/s a node",
            where="InternLM/InternLM, doc/en/train_performance.md (Apache-2.0)",
            inferred="the shape, FlashAttention-2",
            pairs="all: get_megatron_flops in internlm/utils/common.py",
            fitted=False,
        ),
        Source(
            name="kempnerforge",
            what="Llama shapes of 7B to 175B with PyTorch's FSDP2 and tensor parallelism on 1 to 360 H200, four a node",
            where="KempnerInstitute/KempnerForge, benchmarks/ (MIT)",
            inferred="FlashAttention-2; no sequence parallelism, although its code has it with tensor parallelism where there is no pipeline; no tuning was claimed",
            pairs="all: docs/metrics-and-profiling/mfu.md",
            fitted=False,
        ),
        Source(
            name="pytorch-fsdp-2024",
            what="Llama 2 of 7B and 70B with PyTorch's FSDP on 128 A100 and 96 H100, 50 and 100 Gb/s a GPU",
            where="pytorch.org, Maximizing training throughput using PyTorch FSDP (2024)",
            inferred="one shard over all GPUs; eager PyTorch",
            pairs="not stated: 7B at 3,700 tokens/s is 55 percent with all pairs, 51 with the unmasked half; 57 are printed",
            fitted=False,
        ),
    )
}


#: Rows that nothing is fitted to. FSDP (arXiv 2304.11277), section 5.4: GPT-175B on up to 512 A100 with 2 Tb/s a node,
#: at 1 and 2 sequences a device, "more than" these rates, recomputation counted. PyTorch's FSDP over NCCL uses all cards
#: of a node at once. The DeepSpeed of Narayanan's ZeRO-3 rows, two years older, got the rate of one.
UNFITTED: tuple[Run, ...] = tuple(
    replace(
        narayanan(
            96, 12288, 96, 1, 1, 512, 512 * micro, tflops, zero=3, micro_batch=micro, nic=31.25e9, framework=Framework()
        ),
        name=f"GPT-175B, batch {micro}",
        paper="FSDP (arXiv 2304.11277)",
        table="section 5.4",
    )
    for micro, tflops in ((1, 173), (2, 186))
)


def measured_runs(*, fitted: bool | None = None) -> list[Run]:
    """Return the rows of the file and those of the papers.

    Args:
        fitted: Only those that the constants are fitted to, or only the others; None means all.
    """
    runs = [*runs_of(ROWS), *MEASURED_RUNS, *UNFITTED]
    return [run for run in runs if fitted is None or is_fitted(run) == fitted]


def runs_of(path: Path | str) -> list[Run]:
    """Return the rows of a file in one of `FORMATS`."""
    return read_rows(path)[0]


def read_rows(path: Path | str) -> tuple[list[Run], int]:
    """Return the rows of a file in one of `FORMATS`, and how many of LLM Foundry's were left out because they are fp8.

    Raises:
        ValueError: If columns are missing or a row cannot be read; the file is named.
    """
    columns, rows = _table(Path(path))
    name = max(FORMATS, key=lambda known: len(FORMATS[known] & columns))
    if lacking := FORMATS[name] - columns:
        raise ValueError(f"{path}: the columns {', '.join(sorted(lacking))} of {name} are missing")
    runs, left_out = [], 0
    for number, row in enumerate(rows, start=1):
        try:
            if name == "measured_runs.csv":
                runs.append(_run(dict.fromkeys(EXTRA, "") | row))
            elif name == "vTrain's ground truth":
                runs.append(_run(_of_vtrain(row)))
            elif "fp8" in row["Precision"]:
                left_out += 1
            else:
                runs.append(_run(_of_foundry(row)))
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"{path}: row {number} cannot be read: {wrong}") from wrong
    return runs, left_out


def _table(path: Path) -> tuple[set[str], list[dict[str, str]]]:
    """Return the columns and rows of a CSV file, or of a Markdown page's tables, which have the same columns."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    marked = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    if not marked:
        reader = csv.DictReader(lines)
        return set(reader.fieldnames or ()), list(reader)
    head = marked[0]
    rows = [dict(zip(head, cells, strict=False)) for cells in marked if cells[0] not in (head[0], "---")]
    return set(head), rows


@cache
def _ours(source: str) -> dict[str, str]:
    """Return the first row of a source here: what its own file does not say is the same for all of its rows."""
    with ROWS.open(newline="") as file:
        return next(row for row in csv.DictReader(file) if row["source"] == source)


def _of_vtrain(row: dict[str, str]) -> dict[str, str]:
    shape = {ours: row[theirs] for theirs, ours in VTRAIN.items()}
    many = "Parameters (billion)" in row or int(row["# GPUs"]) > 8
    return _ours("vtrain-multi" if many else "vtrain-single") | shape | {
        "model": f"gpt-{shape['layers']}x{shape['hidden']}",
        "kv_heads": shape["heads"],
        "ffn": str(4 * int(shape["hidden"])),
        "seconds": str(float(row["iteration time (ms)"]) / 1e3),
    }  # fmt: skip


def _of_foundry(row: dict[str, str]) -> dict[str, str]:
    if row["Model"] not in MPT:
        raise ValueError(f"Model={row['Model']!r} is none of {', '.join(MPT)}")
    layers, hidden, heads = MPT[row["Model"]]
    gpus, batch, seq = (int(row[name]) for name in ("# GPUs", "GlobalBatchSize", "SeqLen (T)"))
    # Its engine ends a step with a smaller micro-batch where they do not divide it: the nearest size that does, counts.
    of_one = batch // gpus
    even = [size for size in range(1, of_one + 1) if of_one % size == 0]
    gpu, memory = row["GPU"].split("_")
    return _ours("llm-foundry") | {
        "model": f"mpt-{row['Model']}",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": 4 * hidden,
        "gpu": gpu if gpu == "h100" else f"{gpu}-{memory}",
        "nic_gb": "50" if gpu == "h100" else "25",
        "gpus": gpus,
        "zero": {"FULL_SHARD": "3", "SHARD_GRAD_OP": "2"}[row["Sharding Strategy"]],
        "micro_batch": min(even, key=lambda size: abs(size - int(row["MicroBatchSize"]))),
        "global_batch": batch,
        "seq": seq,
        "recompute": "full" if row["Activation Checkpointing"] == "True" else "none",
        "recipe": "pure-bf16" if row["MP Mode"] == "PURE" else "fsdp2-mixed-fp32-reduce",
        "seconds": batch * seq / float(row["Throughput (T/s)"]),
    }


def is_fitted(run: Run) -> bool:
    return SOURCES[run.paper].fitted if run.paper in SOURCES else run not in UNFITTED


def _run(row: dict[str, str]) -> Run:
    whole = {name: int(row[name]) for name in ("gpus", "gpus_per_node", "tp", "cp", "pp", "ep", "seq", "global_batch")}
    yes = {name: row[name] == "1" for name in ("stops_early", "dp_hides", "tp_hides", "pp_hides")}
    run = Run(
        name=f"{row['model']} on {row['gpus']}",
        paper=row["source"],
        table=SOURCES[row["source"]].where,
        model=_model(row),
        gpu=row["gpu"],
        **whole,
        tflops=1.0,
        counts="model",
        zero=int(row["zero"]),
        recompute=row["recompute"] or None,
        micro_batch=int(row["micro_batch"]),
        virtual_stages=int(row["v"]) if row["v"] else None,
        sequence_parallel=row["sp"] == "1",
        attention=row["attention"],
        framework=Framework(attention=row["kernel"] or "flash-2", kernels=row["kernels"], **yes),
        recipe=row["recipe"],
        nic=float(row["nic_gb"]) * 1e9 if row["nic_gb"] else None,
        etp=int(row["etp"]) if row["etp"] else None,
        dispatch=row["dispatch"] or "all",
        ep_hides=row["ep_hides"] == "1",
        precision=row["precision"],
        graphs=row["graphs"],
    )
    flops = counted_flops(run, run.recompute or "none")
    return replace(run, tflops=flops / float(row["seconds"]) / run.gpus / 1e12)


def _model(row: dict[str, str]) -> ModelConfig:
    if not row["hidden"]:
        known = preset(row["model"])
        return replace(known, num_layers=int(row["layers"])) if row["layers"] else known
    learned = row["positions"] == "learned"
    return ModelConfig(
        name=row["model"],
        # The planner drops out in GPT-2's family alone.
        family="gpt2" if row["source"].startswith("vtrain") else "llama",
        num_layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        num_heads=int(row["heads"]),
        num_kv_heads=int(row["kv_heads"]),
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        max_positions=int(row["seq"]),
        learned_positions=learned,
        tied=learned,
        norm=row["norm"],
        gated_mlp=row["gated"] == "1",
    )
