"""What the exporters share: a job (model, layout, batch, cluster) and the line that starts it.

    job = export_job("llama-3.1-405b", layout, gpus_per_node=8, seq=8192, global_batch=2048)
    print(torchrun(job, "pretrain_gpt.py"))

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from lablib.calc.models import ModelConfig
from lablib.calc.plan_layout import Layout, check_layout
from lablib.calc.run_config import resolve_model


@dataclass(frozen=True)
class ExportJob:
    """A layout that was checked, and what it trains.

    Attributes:
        model: The model.
        layout: The layout.
        seq: Tokens in a sequence.
        global_batch: Sequences in a step.
        gpus_per_node: Devices of a node.
        sequence_parallel: Whether tp splits norms and residuals too.
        dtype: "bf16" or "fp16".
    """

    model: ModelConfig
    layout: Layout
    seq: int
    global_batch: int
    gpus_per_node: int = 8
    sequence_parallel: bool = True
    dtype: str = "bf16"

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.layout.gpus // self.gpus_per_node)

    @property
    def per_node(self) -> int:
        """Processes to start on a node."""
        return min(self.gpus_per_node, self.layout.gpus)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.layout.num_microbatches(self.global_batch)


def export_job(
    model: ModelConfig | str | PathLike,
    layout: Layout,
    *,
    seq: int,
    global_batch: int,
    gpus_per_node: int = 8,
    sequence_parallel: bool = True,
    dtype: str = "bf16",
) -> ExportJob:
    """Return a job whose factors were checked.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        layout: The layout.
        seq: Tokens in a sequence.
        global_batch: Sequences in a step.
        gpus_per_node: Devices of a node.
        sequence_parallel: Whether tp splits norms and residuals too.
        dtype: "bf16" or "fp16".

    Raises:
        ValueError: If the layout cannot be, the nodes are not whole, or the dtype is another.
    """
    config = resolve_model(model)
    check_layout(
        layout,
        config,
        gpus=layout.gpus,
        seq=seq,
        global_batch=global_batch,
        sequence_parallel=sequence_parallel,
    )
    if gpus_per_node < 1 or (layout.gpus > gpus_per_node and layout.gpus % gpus_per_node):
        raise ValueError(f"{layout.gpus} ranks are not whole nodes of gpus_per_node={gpus_per_node}")
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype={dtype!r} must be 'bf16' or 'fp16'")
    return ExportJob(config, layout, seq, global_batch, gpus_per_node, sequence_parallel, dtype)


def torchrun(job: ExportJob, script: str) -> str:
    """Return the line that starts a job on every node; it reads MASTER_ADDR and JOB_ID from the shell."""
    if job.nodes == 1:
        return f"torchrun --standalone --nproc-per-node={job.per_node} {script}"
    return (
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.per_node} --rdzv-backend=c10d "
        f'--rdzv-endpoint="$MASTER_ADDR:29500" --rdzv-id="$JOB_ID" {script}'
    )
