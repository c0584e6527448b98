"""Fine-tuning with LoRA under FSDP2.

Read `finetune` first, then `lora`. Chapter 11.
"""

from lablib.launch.finetuning.finetune import (
    FineTuning,
    addition_examples,
    copy_settings,
    export_merged,
    read_examples,
    tiny_qwen2,
)
from lablib.launch.finetuning.lora import add_lora, save_adapters

__all__ = [
    "FineTuning",
    "add_lora",
    "addition_examples",
    "copy_settings",
    "export_merged",
    "read_examples",
    "save_adapters",
    "tiny_qwen2",
]
