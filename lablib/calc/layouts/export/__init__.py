"""A layout as the files of four frameworks: torchtitan, Megatron-LM, Accelerate and DeepSpeed.

    done = export_plan("llama-3.1-405b", "megatron", gpus=16384, seq=8192, global_batch=2048)
    print(done.text)  # what `rung plan --export megatron` writes; done.said is what it says
    job = export_job("llama-3.1-405b", layout, gpus_per_node=8, seq=8192, global_batch=2048)
    print(export_layout(job, "megatron"))  # a layout of yours, which nobody has counted

    job           what is exported, and how it was counted
    frameworks    the four, by name, what a plan for one of them counts, and its winner as a file
    torchtitan    a Python configuration
    megatron      arguments of pretrain_gpt.py
    accelerate    YAML
    deepspeed     JSON

What a framework cannot run is refused, and so is what would be another model, or would need other memory than was
counted, without an error. Every file says which version's own parser has read one like it; a test reads it again where
that version is installed, and holds the recorded files to what is written today where it is not.

Read `job` first, then `megatron`.
"""

from lablib.calc.layouts.export.frameworks import COUNTED, EXPORTERS, SLOWER, counting_for, export_layout, export_plan
from lablib.calc.layouts.export.job import ExportJob, export_job

__all__ = ["COUNTED", "EXPORTERS", "SLOWER", "ExportJob", "counting_for", "export_job", "export_layout", "export_plan"]
