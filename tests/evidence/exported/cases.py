"""The exported files that are proven: a framework, a model, a layout, and how it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lablib.calc.layouts.export import ExportJob, export_job
from lablib.calc.layouts.planner import WORKED_EXAMPLES, Layout


@dataclass(frozen=True)
class Case:
    framework: str
    model: str
    layout: Layout
    job: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.framework}: {self.model}, {self.layout}"

    def exported(self) -> ExportJob:
        return export_job(self.model, self.layout, **{"seq": 4096, "global_batch": 64} | self.job)


def _published(framework: str, model: str) -> Case:
    layout, job = WORKED_EXAMPLES[model]
    # Beside a pipeline Megatron-LM shards the optimizer alone, and one layout is exported to all.
    return Case(framework, model, replace(layout, zero=1), job)


WHOLE = {"sequence_parallel": False}  # the stream between products is whole on every rank

CASES = (
    _published("torchtitan", "llama-3.1-405b"),
    _published("torchtitan", "deepseek-v3"),
    Case("torchtitan", "llama-3-8b", Layout(dp=8, zero=3, micro_batch=2, recompute="selective")),
    Case("torchtitan", "llama-3.2-1b", Layout(dp=8)),
    Case("torchtitan", "llama-3-70b", Layout(tp=8, cp=2, pp=4, dp=2, zero=2, recompute="full")),
    Case("torchtitan", "qwen3-30b-a3b", Layout(dp=8, ep=8, zero=3, recompute="full")),
    _published("megatron", "llama-3.1-405b"),
    _published("megatron", "deepseek-v3"),
    Case("megatron", "llama-3-8b", Layout(dp=8, zero=3, recompute="selective")),
    Case("megatron", "llama-3.2-1b", Layout(dp=8, zero=2)),
    Case("megatron", "llama-2-13b", Layout(tp=2, pp=2, dp=2, cp=2)),
    Case("megatron", "mixtral-8x7b", Layout(tp=2, dp=8, ep=4, zero=1)),
    Case("megatron", "mistral-7b-v0.1", Layout(tp=2, dp=4, zero=1), {"seq": 8192}),
    Case("megatron", "qwen2-7b", Layout(tp=2, dp=4, zero=1, recompute="full")),
    Case("megatron", "qwen3-0.6b", Layout(dp=8), {"attention": "plain"}),
    Case("megatron", "qwen3-30b-a3b", Layout(pp=4, dp=8, ep=8, zero=1)),
    Case("megatron", "gpt3-175b", Layout(tp=8, pp=8, dp=2), {"seq": 2048, "recipe": "megatron-fp16"}),
    Case("deepspeed", "llama-3-8b", Layout(dp=8, zero=3, micro_batch=2, recompute="full")),
    Case("deepspeed", "llama-2-7b", Layout(tp=2, dp=4, zero=1), WHOLE),
    Case("deepspeed", "qwen3-30b-a3b", Layout(dp=8, ep=8, zero=2)),
    Case("deepspeed", "gpt2-xl", Layout(dp=4), {"seq": 1024, "recipe": "mixed-fp16"}),
    Case("accelerate", "llama-3-8b", Layout(dp=16), {"recipe": "autocast-bf16"}),
    Case("accelerate", "llama-3-8b", Layout(dp=16, zero=3, recompute="full")),
    Case("accelerate", "llama-3-8b", Layout(dp=16, zero=3, shard=8)),
    Case("accelerate", "llama-3-8b", Layout(dp=4, tp=2, cp=2, zero=2, micro_batch=2), WHOLE),
)
