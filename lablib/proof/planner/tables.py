"""Rows of two sources as they publish them, in the columns of `measured_runs.csv`: take the whole file and judge it.

    python -m lablib.proof.planner --rows ground_truth_multi.csv

vTrain's ground truth has a step's milliseconds and the degrees; LLM Foundry's table has tokens per second, and the sizes
of its models are in its configuration files (scripts/train/yamls/pretrain). What neither states is in `SOURCES.inferred`.
"""

from __future__ import annotations

import csv
from pathlib import Path

#: Width, heads and layers of LLM Foundry's models.
MPT = {"125m": (768, 12, 12), "1b": (2048, 16, 24), "7b": (4096, 32, 32), "30b": (7168, 56, 48)}

#: Every GPT here has learned positions, LayerNorm and an MLP of two matrices; one shard or stage unless a row says more.
GPT = {
    "positions": "learned", "norm": "layernorm", "gated": "0", "gpus_per_node": "8",
    "sp": "0", "cp": "1", "v": "1", "ep": "1", "tp_hides": "0", "pp_hides": "0",
}  # fmt: skip


def read_rows(path: Path | str) -> list[dict[str, str]]:
    """Return the rows of a file of vTrain, of LLM Foundry, or with the columns of `measured_runs.csv`.

    Rows in FP8 are left out: the planner does not model it.

    Raises:
        ValueError: If the columns are of none of them.
    """
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        rows, columns = list(reader), set(reader.fieldnames or ())
    if "iteration time (ms)" in columns:
        return [_vtrain(row) for row in rows]
    if "Throughput (T/s)" in columns:
        return [_llm_foundry(row) for row in rows if "fp8" not in row["Precision"]]
    if "seconds" in columns:
        return rows
    raise ValueError(f"{path}: its columns are neither vTrain's, nor LLM Foundry's, nor those of measured_runs.csv")


def _vtrain(row: dict[str, str]) -> dict[str, str]:
    hidden, layers = int(row["hidden size"]), row["# layers"]
    return GPT | {
        "source": "vtrain-multi" if "Parameters (billion)" in row else "vtrain-single",
        "model": f"gpt-{layers}x{hidden}",
        "layers": layers,
        "hidden": str(hidden),
        "heads": row["attention heads"],
        "kv_heads": row["attention heads"],
        "ffn": str(4 * hidden),
        "vocab": "51200",
        "gpu": "a100",
        "gpus": row["# GPUs"],
        "nic_gb": "12.5",
        "tp": row["tensor parallelism"],
        "pp": row["pipeline parallelism"],
        "zero": "0",
        "micro_batch": row["micro batch"],
        "global_batch": row["global batch"],
        "seq": row["sequence length"],
        "recompute": "full",
        "attention": "plain",
        "kernel": "",
        "recipe": "mixed-fp16",
        "kernels": "fused",
        "stops_early": "0",
        "dp_hides": "0",
        "seconds": f"{float(row['iteration time (ms)']) / 1e3:.6g}",
    }


def _llm_foundry(row: dict[str, str]) -> dict[str, str]:
    hidden, heads, layers = MPT[row["Model"]]
    seq, batch = int(row["SeqLen (T)"]), int(row["GlobalBatchSize"])
    hopper = row["GPU"].startswith("h100")
    return GPT | {
        "source": "llm-foundry",
        "model": f"mpt-{row['Model']}",
        "layers": str(layers),
        "hidden": str(hidden),
        "heads": str(heads),
        "kv_heads": str(heads),
        "ffn": str(4 * hidden),
        "vocab": "50368",
        "gpu": "h100" if hopper else row["GPU"].replace("_", "-"),
        "gpus": row["# GPUs"],
        "nic_gb": "50" if hopper else "25",
        "tp": "1",
        "pp": "1",
        "zero": "3" if row["Sharding Strategy"] == "FULL_SHARD" else "2",
        "micro_batch": row["MicroBatchSize"],
        "global_batch": str(batch),
        "seq": str(seq),
        "recompute": "full" if row["Activation Checkpointing"] == "True" else "none",
        "attention": "fused",
        "kernel": "triton",
        "recipe": "fsdp2-mixed-fp32-reduce" if row["MP Mode"] == "DEFAULT" else "pure-bf16",
        "kernels": "eager",
        "stops_early": "1",
        "dp_hides": "1",
        "seconds": f"{batch * seq / float(row['Throughput (T/s)']):.6g}",
    }
