"""A layout as arguments of Megatron-LM's pretrain_gpt.py (names of megatron/training/arguments.py).

Its defaults are those of GPT-3: two-matrix GELU, LayerNorm, biases, learned positions, tied output, as many key heads as
query heads, rotary base 10,000 and an epsilon of 1e-5, a softmax over the chosen experts and no balance loss. Another
model needs an argument for each of these; without one another model is trained, and nothing says so. What there is no
argument for is refused. `--sequence-parallel` and `--use-distributed-optimizer` are off by default too. Data, tokenizer
and learning rate are left to the reader.

bf16 keeps its gradients in an fp32 buffer and fp16 copies them to fp32 in the optimizer: 18 and 20 bytes a parameter.
"""

from __future__ import annotations

from lablib.calc.layouts.export.job import Exporter, ExportJob, counted, torchrun
from lablib.calc.models import ModelConfig, Rotary, Router
from lablib.calc.schedules import chunk_layers

PROVEN = "megatron-core 0.19.2"

RECIPES = {
    "mixed-bf16-fp32-grads": ["--bf16", "--accumulate-allreduce-grads-in-fp32"],
    "megatron-fp16": ["--fp16"],
    "fp32": [],
}

SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}

#: Families whose every part has a switch.
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3")

#: What `--use-rope-scaling` has built in (RotaryEmbedding._apply_scaling), and latent attention's YaRN by default.
LLAMA3 = {"original": 8192, "low": 1.0, "high": 4.0}
YARN = {"original": 4096, "low": 1.0, "high": 32.0}


def megatron_arguments(job: ExportJob) -> list[str]:
    """Return Megatron-LM's arguments, one string each: "--name" or "--name value".

    Raises:
        ValueError: If Megatron-LM cannot run the layout: GPipe, ZeRO 2 or 3 with a pipeline; or has no switch for a part
            of the model.
    """
    layout = job.layout
    if layout.schedule == "gpipe":
        raise ValueError("schedule='gpipe' does not exist in Megatron-LM; use '1f1b' or 'interleaved'")
    if layout.zero > 1 and layout.pp > 1:
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp}: Megatron-LM shards the optimizer (zero=1) beside a pipeline; its FSDP, "
            "which shards gradients and weights too, is exported without one; use zero=1"
        )
    if job.model.family in ("gemma2", "gemma3"):
        raise ValueError(f"family {job.model.family!r}: pretrain_gpt.py has no switches for its four norms a layer")
    if job.model.family not in FAMILIES:
        raise ValueError(
            f"family {job.model.family!r}: not held to Megatron-LM's switches; known are {', '.join(FAMILIES)}"
        )
    if job.model.is_moe and job.layout.tp > 1 and not job.sequence_parallel:
        raise ValueError(
            f"sequence_parallel=False with tp={layout.tp} and experts: Megatron-LM refuses to train it; use "
            "sequence_parallel=True"
        )
    return [*_model_arguments(job.model, job.seq), *_degree_arguments(job), *_memory_arguments(job)]


def megatron_script(job: ExportJob) -> str:
    """Return a shell script: torchrun, pretrain_gpt.py, and one argument a line."""
    arguments = " \\\n    ".join(megatron_arguments(job))
    return "\n".join(
        [
            f"# {counted(job, job.dtypes('Megatron-LM', RECIPES))}.",
            f"# Read by the parser of {PROVEN}. Add data, tokenizer and learning rate.",
            "# Megatron-LM pads the vocabulary to a multiple of 128 x tp, which is not counted.",
            *_environment(job),
            torchrun(job, "pretrain_gpt.py \\\n    " + arguments) + ' \\\n    "$@"',
            "",
        ]
    )


def _environment(job: ExportJob) -> list[str]:
    """What Megatron-LM asserts on GPUs before Blackwell: one queue for tp and cp, more than one for its FSDP."""
    layout = job.layout
    if layout.tp * layout.cp == 1 or layout.zero > 1:
        return []
    return ["export CUDA_DEVICE_MAX_CONNECTIONS=1  # up to Hopper"]


def _model_arguments(model: ModelConfig, seq: int) -> list[str]:
    if not model.norm_eps:
        raise ValueError(f"the epsilon of {model.name}'s norms is not known here; give its config.json as the model")
    found = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.num_heads}",
        f"--seq-length {seq}",
        f"--max-position-embeddings {max(seq, model.max_positions)}",
        f"--norm-epsilon {model.norm_eps:g}",
    ]
    if model.num_kv_heads != model.num_heads:
        found += ["--group-query-attention", f"--num-query-groups {model.num_kv_heads}"]
    if model.head_dim * model.num_heads != model.hidden and not model.is_mla:
        found.append(f"--kv-channels {model.head_dim}")
    if not model.learned_positions:
        found += _rotary_arguments(model)
    found += _window_arguments(model)
    if model.gated_mlp:
        found.append("--swiglu")
    if model.norm == "rmsnorm":
        found.append("--normalization RMSNorm")
    if not (model.mlp_bias or model.attn_out_bias):
        found.append("--disable-bias-linear")
        if model.qkv_bias:
            found.append("--add-qkv-bias")
    elif not (model.mlp_bias and model.attn_out_bias and model.qkv_bias):
        raise ValueError(
            f"biases of {model.name} on qkv={model.qkv_bias}, attention output={model.attn_out_bias}, "
            f"mlp={model.mlp_bias}: Megatron-LM has them on all, on none, or on qkv alone"
        )
    if model.qk_norm or model.is_mla:  # latent attention has norms on its latents
        found.append("--qk-layernorm")
    if not model.tied:
        found.append("--untie-embeddings-and-output-weights")
    if model.family != "gpt2":
        found += ["--attention-dropout 0", "--hidden-dropout 0"]
    return found + _expert_arguments(model) + _latent_arguments(model)


def _rotary_arguments(model: ModelConfig) -> list[str]:
    rotary = model.rotary
    if rotary is None:
        raise ValueError(f"the rotary base of {model.name} is not known here; give its config.json as the model")
    if rotary.base != int(rotary.base):
        raise ValueError(f"rotary base {rotary.base} of {model.name}: Megatron-LM takes whole numbers")
    found = ["--position-embedding-type rope", f"--rotary-base {int(rotary.base)}"]
    if rotary.share != 1:
        found.append(f"--rotary-percent {rotary.share:g}")
    if rotary.scaling == "llama3" and _has(rotary, LLAMA3):
        return [*found, "--use-rope-scaling", f"--rope-scaling-factor {rotary.factor:g}"]
    if rotary.scaling == "yarn" and model.is_mla and _has(rotary, YARN):
        scale, scale_all = rotary.mscale
        return [
            *found,
            "--rope-type yarn",
            f"--rotary-scaling-factor {rotary.factor:g}",
            f"--mscale {scale:g}",
            f"--mscale-all-dim {scale_all:g}",
        ]
    if rotary.scaling != "none":
        raise ValueError(
            f"rotary scaling {rotary.scaling!r} of {model.name} (original={rotary.original}, low={rotary.low:g}, "
            f"high={rotary.high:g}): pretrain_gpt.py has arguments for Llama 3's and for latent attention's YaRN alone"
        )
    return [*found, "--rope-type rope", "--no-rope-fusion"] if model.is_mla else found


def _window_arguments(model: ModelConfig) -> list[str]:
    """Keys to the left and to the right that a query sees beside its own, and the layers where it is so."""
    layers = model.window_layers
    if not model.num_window_layers:
        return []
    found = [f"--window-size {model.window - 1},0"]
    if set(range(model.num_layers)) - set(layers):
        pattern = ",".join(str(int(layer in layers)) for layer in range(model.num_layers))
        found.append(f'--window-attn-skip-freq "[{pattern}]"')
    return found


def _has(rotary: Rotary, built_in: dict[str, float]) -> bool:
    return all(getattr(rotary, name) == value for name, value in built_in.items())


def _expert_arguments(model: ModelConfig) -> list[str]:
    if not model.is_moe:
        return []
    if model.router is None:
        raise ValueError(f"the router of {model.name} is not known here; give its config.json as the model")
    found = [
        f"--num-experts {model.num_experts}",
        f"--moe-router-topk {model.experts_per_token}",
        *_router_arguments(model.name, model.router),
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


def _router_arguments(name: str, router: Router) -> list[str]:
    """A softmax over the chosen experts is one over all of them made to sum to one; before the choice it is not."""
    if router.score == "sigmoid" and not router.normalized:
        raise ValueError(f"router of {name}: Megatron-LM makes the weights of a sigmoid router sum to one")
    if router.coefficient is None:
        raise ValueError(
            f"the coefficient of {name}'s balance loss is not known here; give its config.json as the model"
        )
    found = [f"--moe-router-score-function {router.score}", "--moe-router-dtype fp32"]
    if router.score == "softmax" and not router.normalized:
        found.append("--moe-router-pre-softmax")
    if router.groups > 1:
        found += [f"--moe-router-num-groups {router.groups}", f"--moe-router-group-topk {router.group_topk}"]
    if router.scale != 1:
        found.append(f"--moe-router-topk-scaling-factor {router.scale:g}")
    if router.bias:
        found.append("--moe-router-enable-expert-bias")
    return [
        *found,
        f"--moe-router-load-balancing-type {router.balance}",
        f"--moe-aux-loss-coeff {router.coefficient:g}",
    ]


def _latent_arguments(model: ModelConfig) -> list[str]:
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


def _degree_arguments(job: ExportJob) -> list[str]:
    layout = job.layout
    found = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        *RECIPES[job.dtypes("Megatron-LM", RECIPES)],
    ]
    if job.model.is_moe:
        found += [f"--expert-model-parallel-size {layout.ep}", f"--expert-tensor-parallel-size {layout.expert_split}"]
    if layout.tp > 1 and job.sequence_parallel:
        found.append("--sequence-parallel")
    if layout.virtual_stages > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual_stages}")
    first, middle, last = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
    if (first, last) == (middle - 1, middle - 1):
        found += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    elif first != middle or last != middle:
        found += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
    return found


def _memory_arguments(job: ExportJob) -> list[str]:
    layout, found = job.layout, []
    if job.attention == "plain":
        found.append("--attention-backend unfused")
    if layout.zero:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero > 1:
        found += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {SHARDING[layout.zero]}",
            "--ckpt-format fsdp_dtensor",
        ]
    if layout.recompute == "selective":
        found.append("--recompute-activations")
    if layout.recompute == "full":
        found += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return found


MEGATRON = Exporter(megatron_script, next(iter(RECIPES)), PROVEN, "megatron.sh")
