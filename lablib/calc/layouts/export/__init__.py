"""A layout as the files of four frameworks: torchtitan, Megatron-LM, Accelerate and DeepSpeed.

    job = export_job("llama-3.1-405b", layout, gpus_per_node=8, seq=8192, global_batch=2048)
    print(export_layout(job, "megatron"))

    job           what is exported, and how it was counted
    torchtitan    a Python configuration
    megatron      arguments of pretrain_gpt.py
    accelerate    YAML
    deepspeed     JSON

What a framework cannot run is refused, and so is what would be another model, or would need other memory than was
counted, without an error. Every file says which version's own parser has read one like it; a test reads it again where
that version is installed, and holds the recorded files to what is written today where it is not.

Read `job` first, then `megatron`.
"""

from __future__ import annotations

from lablib.calc.errors import one_of
from lablib.calc.layouts.export.accelerate import ACCELERATE
from lablib.calc.layouts.export.deepspeed import DEEPSPEED
from lablib.calc.layouts.export.job import Exporter, ExportJob, export_job
from lablib.calc.layouts.export.megatron import MEGATRON
from lablib.calc.layouts.export.torchtitan import TORCHTITAN

__all__ = [
    "ACCELERATE",
    "DEEPSPEED",
    "EXPORTERS",
    "MEGATRON",
    "TORCHTITAN",
    "ExportJob",
    "Exporter",
    "export_job",
    "export_layout",
]

EXPORTERS: dict[str, Exporter] = {
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}


def export_layout(job: ExportJob, framework: str) -> str:
    """Return the layout as text that the framework reads.

    Args:
        framework: One of `EXPORTERS`.
    """
    return EXPORTERS[one_of("framework", framework, EXPORTERS)].text(job)
