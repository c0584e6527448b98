"""The parts of a case of the memory grid: the model by its implementation, its loss, its optimizer.

Tensor parallelism is PyTorch's, `parallelize_module` and DTensor. The plan is the one that Hugging Face ships with
Llama, Qwen2 and Mistral: q, k, v, gate and up column-wise, output and down row-wise, the head column-wise with its
logits gathered. Embedding and norms stay unsplit on every rank. The course's transformer gets the same plan under its
own names.

ZeRO stage 1 is PyTorch's too: ZeroRedundancyOptimizer behind DDP. It divides the optimizer by whole parameters, so ranks
hold different numbers of bytes. The calculator answers for the fullest, and `fullest_rank` asks PyTorch which one that
is. `states_of_every_rank` counts all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lablib.calc.models import ModelConfig
from lablib.launch.precision.libraries import bitsandbytes_adamw, torchao_adamw
from lablib.launch.recompute import apply_strategy
from lablib.launch.torch_private import FakeStore, must_have
from lablib.launch.training import add_lora
from lablib.toys.context_parallel import ContextParallelTransformer
from lablib.toys.precision import LowBitAdamW, MasterWeights
from lablib.toys.transformer import Transformer
from tests.evidence.cases import Case
from tests.evidence.oracles.context import local_batch, local_loss, split_attention
from tests.evidence.oracles.paper import PaperTransformer

LORA_RANK = 16

Constructor = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
#: They have one implementation each. What they hold in their step is that of a CPU's eager kernels.
LOW_BIT: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw-8bit": partial(torchao_adamw, states="8bit"),
    "adamw-fp8": partial(torchao_adamw, states="fp8"),
    "adamw-4bit": partial(torchao_adamw, states="4bit"),
    "adamw-8bit-bnb": bitsandbytes_adamw,
    "adamw-bf16": partial(LowBitAdamW, states="bf16"),
}


@dataclass(frozen=True)
class Subject:
    """A model and how to train it.

    Attributes:
        model: In the dtype in which it computes, unless FSDP2 or autocast casts.
        tokens: Makes the batch.
        loss: Gets the model and the batch, and returns what backward starts from; for a stage its output.
    """

    model: nn.Module
    tokens: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]


class Master(MasterWeights):
    """A master copy whose working copy is there already: a process group in a model cannot be copied."""

    def __init__(self, master: nn.Module, working: nn.Module) -> None:
        self.master, self.model = master, working


def build_model(case: Case, group: dist.ProcessGroup | None = None, *, working: bool = False) -> Subject:
    """Build what a case names, with random weights; under FakeTensorMode it costs no memory.

    Args:
        group: The tensor-parallel ranks; implementation="paper" needs it, with one rank too. With cp the ranks that
            share a sequence.
        working: Build the 16-bit copy that a recipe with master weights computes with.
    """
    low = working or case.recipe == "pure-bf16"
    # Made in its dtype: fake parameters cannot be cast afterwards.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if low else before)
    try:
        make = {"toy": partial(_toy, group=group), "hf": _hugging_face, "paper": partial(_paper, group=group)}[
            case.implementation
        ]
        model = make(case)
    finally:
        torch.set_default_dtype(before)
    if case.tuning == "lora":
        add_lora(model, rank=LORA_RANK)
    if case.cp > 1 and case.implementation == "hf":
        split_attention(model, group, case.cp_way)
        return Subject(model, partial(local_batch, case.micro_batch, case.seq // case.cp), local_loss)
    hugging_face = case.implementation == "hf"
    length = case.seq if hugging_face else case.seq + 1
    forward = _hugging_face_loss if hugging_face else _stage if case.pp > 1 else _loss
    return Subject(model, lambda: torch.zeros(case.micro_batch, length, dtype=torch.int64), forward)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the case's optimizer in the case's implementation, over what is trained."""
    how = {"foreach": case.step == "foreach", "fused": case.step == "fused"}
    if case.optimizer in LOW_BIT:
        return LOW_BIT[case.optimizer]([p for p in model.parameters() if p.requires_grad])
    if case.sharding == "zero1":
        return shard_optimizer(OPTIMIZERS[case.optimizer], model, **how)
    if case.splits_eagerly:
        return OPTIMIZERS[case.optimizer](optimizer_groups(model), **how)
    return OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad], **how)


# --- the three implementations ------------------------------------------------------------------------------


def _loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    # Through forward, which is where DDP and FSDP hook in.
    inner = getattr(model, "module", model)
    if isinstance(inner, PaperTransformer | ContextParallelTransformer):
        return inner.loss(tokens_BT)
    from lablib.toys.transformer import loss

    return loss(model(tokens_BT[:, :-1]), tokens_BT)


def _stage(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return model(tokens_BT[:, :-1])


def _hugging_face_loss(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    return model(input_ids=tokens_BS, labels=tokens_BS).loss


def _own_layers(case: Case) -> int:
    return case.model.num_layers // case.pp


def _toy(case: Case, group: dist.ProcessGroup | None) -> Transformer:
    config = replace(case.settings()["model"], num_layers=_own_layers(case))
    if case.cp > 1:
        model = ContextParallelTransformer(config, group, case.cp_way)
    else:
        model = Transformer(config, attention=case.attention)
    if case.pp > 1:  # the first stage ends with the stream
        model.norm, model.head = nn.Identity(), nn.Identity()
    if case.recompute != "none":
        apply_strategy(model, case.recompute)
    return model


def _paper(case: Case, group: dist.ProcessGroup | None) -> PaperTransformer:
    if group is None:
        raise ValueError("implementation='paper' needs a tensor-parallel group, even of one rank")
    return PaperTransformer(
        case.model,
        group,
        sequence_parallel=case.sequence_parallel,
        attention=case.attention,
        recompute=case.recompute,
        dropout=case.family == "gpt2",  # as published
        blocks=_own_layers(case),
        ends=("embedding",) if case.pp > 1 else ("embedding", "head"),
    )


#: How transformers begins the names of a family's classes.
CLASSES = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "mistral": "Mistral",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "starcoder2": "Starcoder2",
    "gemma": "Gemma",
    "olmo2": "Olmo2",
    "gpt-neox": "GPTNeoX",
    "mixtral": "Mixtral",
    "qwen3-moe": "Qwen3Moe",
}


def _hugging_face(case: Case) -> nn.Module:
    # Loading transformers takes seconds, which other implementations should not pay.
    import transformers

    name = CLASSES[case.model.family]
    config = getattr(transformers, f"{name}Config")(**hugging_face_fields(case.model))
    config._attn_implementation = {"fused": "sdpa", "plain": "eager"}[case.attention]
    if case.model.is_moe:
        config._experts_implementation = {"grouped": "grouped_mm", "loop": "eager"}[case.experts]
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    model.train()
    if case.experts == "loop":
        balance_routing(model, case)
    if case.recompute == "full":
        # Its name changes with transformers 6.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": False})
    return model


def balance_routing(model: nn.Module, case: Case) -> None:
    """Give every expert as many tokens, whatever the router says: pair number i of token and expert goes to expert i mod E.

    The weights stay those of the router. Written over its answer, so that no tensor is added.
    """
    shape = case.micro_batch * case.seq, case.model.experts_per_token
    spread = torch.arange(shape[0] * shape[1]).remainder(case.model.num_experts).view(shape)

    def answer(router: nn.Module, inputs: tuple, output: tuple) -> None:
        output[2].data.copy_(spread)  # a change that autograd does not ask about: values do not matter here

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(answer)


def hugging_face_fields(config: ModelConfig) -> dict[str, Any]:
    """Return a model's sizes as fields of transformers' configuration, without dropout and without a cache."""
    plain = {
        "use_cache": False,
        "loss_type": "ForCausalLM",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": config.tied,
    }
    if config.family == "gpt2":
        return plain | {
            "n_layer": config.num_layers,
            "n_embd": config.hidden,
            "n_head": config.num_heads,
            "n_inner": config.ffn,
            "vocab_size": config.vocab,
            "n_positions": config.max_positions,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
    return plain | {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        **_own_fields(config),
    }


def _own_fields(config: ModelConfig) -> dict[str, Any]:
    """Return what one family has and the others have not."""
    turned = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": config.turned_dim / config.head_dim}
    window = {"sliding_window": config.window or None}
    return {
        "mistral": window,
        "starcoder2": window,
        "phi3": window | {"rope_parameters": turned, "pad_token_id": 0},
        "mixtral": window | {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token},
        "qwen3-moe": {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_ffn,
            "norm_topk_prob": config.router is None or config.router.normalized,
            "mlp_only_layers": list(range(config.num_dense_layers)),
        },
        "gpt-neox": {"rope_parameters": turned, "use_parallel_residual": config.parallel_block},
    }.get(config.family, {})


# --- tensor parallelism -------------------------------------------------------------------------------------

COLUMNS = {
    "toy": (
        "blocks.*.attention.q",
        "blocks.*.attention.k",
        "blocks.*.attention.v",
        "blocks.*.mlp.gate",
        "blocks.*.mlp.up",
    ),
    "hf": tuple(
        f"model.layers.*.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    ),
}

ROWS = {
    "toy": ("blocks.*.attention.out", "blocks.*.mlp.down"),
    "hf": ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
}

HEAD = {"toy": "head", "hf": "lm_head"}


def split_model(model: nn.Module, mesh: DeviceMesh, implementation: str) -> None:
    """Split a model over the ranks of a mesh, in place.

    Call it outside of FakeTensorMode: it reads the mesh, which is a real tensor.
    """
    embedding = model.get_input_embeddings() if implementation == "hf" else model.embed
    if model.get_submodule(HEAD[implementation]).weight is embedding.weight:
        raise ValueError("the plan splits the head and not the embedding, and here both are one table")
    plan = {name: ColwiseParallel() for name in COLUMNS[implementation]}
    plan |= {name: RowwiseParallel() for name in ROWS[implementation]}
    plan[HEAD[implementation]] = ColwiseParallel(output_layouts=Replicate())
    # Values do not matter here: without a source each rank cuts its own part.
    parallelize_module(model, mesh, plan, src_data_rank=None)


def optimizer_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters as two groups, split ones first: PyTorch's foreach and fused steps take no mixture."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    split = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    replicated = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    return [{"params": split}, {"params": replicated}]


# --- ZeRO stage 1 -------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def shard_optimizer(constructor: Constructor, model: nn.Module, **settings: object) -> ZeroRedundancyOptimizer:
    """Return an optimizer whose states are divided over all ranks of the process group."""
    with warnings.catch_warnings():
        # Its module compiles a few functions with torch.jit.script, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ZeroRedundancyOptimizer(trained, optimizer_class=constructor, **settings)


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of many in a fake process group, which answers every collective at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fullest_rank(model: nn.Module, world_size: int) -> int:
    """Return the rank to which PyTorch gives most parameters, the first if several have as many.

    Call it in a process without a process group.
    """
    with pretended(0, world_size):
        optimizer = shard_optimizer(torch.optim.SGD, model, lr=0.0)
        must_have(optimizer, "_partition_parameters")
        parts = optimizer._partition_parameters()
    sizes = [sum(p.numel() for group in groups for p in group["params"]) for groups in parts]
    return sizes.index(max(sizes))


def states_of_every_rank(constructor: Constructor, model: nn.Module, world_size: int) -> list[int]:
    """Return the bytes of optimizer states that each rank holds behind a first step, counters of one value left out.

    Call it in a process without a process group.
    """
    found = []
    for rank in range(world_size):
        with pretended(rank, world_size):
            optimizer = shard_optimizer(constructor, model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        found.append(
            sum(
                value.nbytes
                for parameter, state in optimizer.optim.state.items()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            )
        )
    return found
