"""A layout as arguments of Megatron-LM's pretrain_gpt.py.

Its defaults are those of GPT-3: two-matrix GELU, LayerNorm, biases, learned positions, tied output, and as many key
heads as query heads. A Llama needs an argument for each of these, or it is another, smaller model without an error.
`--sequence-parallel` and `--use-distributed-optimizer` are off by default too, and decide whether it fits.

Data and tokenizer are left to you. Names are those of megatron/training/arguments.py (core 0.12 and later).
"""

from __future__ import annotations

from lablib.calc.export_job import ExportJob, torchrun
from lablib.calc.models import ModelConfig
from lablib.calc.plan_layout import chunk_layers

SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(job: ExportJob) -> list[str]:
    """Return the arguments, one string each: "--name" or "--name value".

    Raises:
        ValueError: If Megatron-LM cannot run the layout: GPipe, ZeRO 2 or 3 with a pipeline, or a family that it
            has no switches for.
    """
    layout = job.layout
    if layout.schedule == "gpipe":
        raise ValueError("schedule='gpipe' does not exist in Megatron-LM; use '1f1b' or 'interleaved'")
    if layout.zero > 1 and layout.pp > 1:
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp}: Megatron-LM shards the optimizer (zero=1) beside a pipeline, and "
            "gradients and weights only with its FSDP, without one"
        )
    if job.model.family in ("gemma2", "gemma3"):
        raise ValueError(
            f"family {job.model.family!r}: pretrain_gpt.py has no switches for its four norms a layer"
        )
    return [*_model(job.model, job.seq), *_degrees(job), *_memory(job)]


def megatron_script(job: ExportJob) -> str:
    """Return a shell command: torchrun, the script, and one argument a line.

    Raises:
        ValueError: As `megatron_arguments`.
    """
    arguments = " \\\n    ".join(megatron_arguments(job))
    return torchrun(job, "pretrain_gpt.py \\\n    " + arguments) + ' \\\n    "$@"  # data and tokenizer\n'


def _model(model: ModelConfig, seq: int) -> list[str]:
    found = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.num_heads}",
        f"--seq-length {seq}",
        f"--max-position-embeddings {max(seq, model.max_positions)}",
    ]
    if model.num_kv_heads != model.num_heads:
        found += ["--group-query-attention", f"--num-query-groups {model.num_kv_heads}"]
    if model.head_dim * model.num_heads != model.hidden and not model.is_mla:
        found.append(f"--kv-channels {model.head_dim}")
    if not model.learned_positions:
        found.append("--position-embedding-type rope")
    if model.gated_mlp:
        found.append("--swiglu")
    if model.norm == "rmsnorm":
        found.append("--normalization RMSNorm")
    if not (model.mlp_bias or model.attn_out_bias):
        found.append("--disable-bias-linear")
        if model.qkv_bias:
            found.append("--add-qkv-bias")
    if model.qk_norm:
        found.append("--qk-layernorm")
    if not model.tied:
        found.append("--untie-embeddings-and-output-weights")
    if model.family != "gpt2":
        found += ["--attention-dropout 0", "--hidden-dropout 0"]
    return found + _experts(model) + _latent(model)


def _experts(model: ModelConfig) -> list[str]:
    if not model.is_moe:
        return []
    found = [
        f"--num-experts {model.num_experts}",
        f"--moe-router-topk {model.experts_per_token}",
        f"--moe-ffn-hidden-size {model.expert_ffn}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if model.num_shared_experts:
        found.append(f"--moe-shared-expert-intermediate-size {model.num_shared_experts * model.expert_ffn}")
    if model.num_dense_layers:
        sparse = model.num_layers - model.num_dense_layers
        found.append(f'--moe-layer-freq "([0]*{model.num_dense_layers}+[1]*{sparse})"')
    return found


def _latent(model: ModelConfig) -> list[str]:
    if not model.is_mla:
        return []
    query = [f"--q-lora-rank {model.q_lora_rank}"] if model.q_lora_rank else []
    return [
        "--multi-latent-attention",
        *query,
        f"--kv-lora-rank {model.kv_lora_rank}",
        f"--qk-head-dim {model.qk_nope_head_dim}",
        f"--qk-pos-emb-head-dim {model.qk_rope_head_dim}",
        f"--v-head-dim {model.v_head_dim}",
    ]


def _degrees(job: ExportJob) -> list[str]:
    layout = job.layout
    found = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        f"--{job.dtype}",
    ]
    if layout.ep > 1:
        found.append(f"--expert-model-parallel-size {layout.ep}")
    if layout.tp > 1 and job.sequence_parallel:
        found.append("--sequence-parallel")
    if layout.virtual_stages > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual_stages}")
    first, middle, last = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
    if (first, last) == (middle - 1, middle - 1):
        found += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    elif first != middle or last != middle:
        found += [
            f"--decoder-first-pipeline-num-layers {first}",
            f"--decoder-last-pipeline-num-layers {last}",
        ]
    return found


def _memory(job: ExportJob) -> list[str]:
    layout, found = job.layout, []
    if layout.zero:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero > 1:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {SHARDING[layout.zero]}"]
    if layout.recompute == "selective":
        found.append("--recompute-activations")
    if layout.recompute == "full":
        found += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return found
