"""What a case of the memory grid is made of: the model by its name of kernels, its loss, its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.memory_cases import Case
from lablib.calc.models import ModelConfig
from lablib.launch.lora import add_lora
from lablib.launch.memory_oracle_tensor import optimizer_groups
from lablib.launch.memory_oracle_zero import shard_optimizer
from lablib.launch.paper_kernels import PaperTransformer
from lablib.launch.recompute_apply import apply_strategy
from lablib.toys.precision import MasterWeights
from lablib.toys.transformer import Transformer

LORA_RANK = 16
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
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


def build(case: Case, tp_group: dist.ProcessGroup | None = None, *, working: bool = False) -> Subject:
    """Build what a case names, with random weights; under FakeTensorMode it costs no memory.

    Args:
        case: The case.
        tp_group: The tensor-parallel ranks; kernels="paper" needs it, with one rank too.
        working: Build the 16-bit copy that a recipe with master weights computes with.
    """
    low = working or case.recipe == "pure-bf16"
    # Made in its dtype: fake parameters cannot be cast afterwards.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if low else before)
    try:
        make = {"toy": _toy, "hf": _hugging_face, "paper": partial(_paper, group=tp_group)}[case.kernels]
        model = make(case)
    finally:
        torch.set_default_dtype(before)
    if case.tuning == "lora":
        add_lora(model, rank=LORA_RANK)
    hugging_face = case.kernels == "hf"
    length = case.seq if hugging_face else case.seq + 1
    forward = _hugging_face_loss if hugging_face else _stage if case.pp > 1 else _loss
    return Subject(model, lambda: torch.zeros(case.micro_batch, length, dtype=torch.int64), forward)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the case's optimizer in the case's implementation, over what is trained."""
    how = {"foreach": case.step == "foreach", "fused": case.step == "fused"}
    if case.sharding == "zero1":
        return shard_optimizer(OPTIMIZERS[case.optimizer], model, **how)
    if case.splits_eagerly:
        return OPTIMIZERS[case.optimizer](optimizer_groups(model), **how)
    return OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad], **how)


def _loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    # Through forward, which is where DDP and FSDP hook in.
    whole = getattr(model, "module", model)
    if isinstance(whole, PaperTransformer):
        return whole.loss(tokens_BT)
    from lablib.toys.transformer import loss

    return loss(model(tokens_BT[:, :-1]), tokens_BT)


def _stage(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return model(tokens_BT[:, :-1])


def _hugging_face_loss(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    return model(input_ids=tokens_BS, labels=tokens_BS).loss


def _own_layers(case: Case) -> int:
    return case.model.num_layers // case.pp


def _toy(case: Case) -> Transformer:
    config = replace(case.settings()["model"], num_layers=_own_layers(case))
    model = Transformer(config, attention=case.attention)
    if case.pp > 1:  # the first stage ends with the stream
        model.norm, model.head = nn.Identity(), nn.Identity()
    if case.recompute != "none":
        apply_strategy(model, case.recompute)
    return model


def _paper(case: Case, group: dist.ProcessGroup | None) -> PaperTransformer:
    if group is None:
        raise ValueError("kernels='paper' needs a tensor-parallel group, even of one rank")
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


def _hugging_face(case: Case) -> nn.Module:
    # Loading transformers takes seconds, which other kernels should not pay.
    import transformers

    name = {"gpt2": "GPT2", "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[case.family]
    config = getattr(transformers, f"{name}Config")(**hugging_face_fields(case.model))
    config._attn_implementation = {"fused": "sdpa", "plain": "eager"}[case.attention]
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    model.train()
    if case.recompute == "full":
        # Its name changes with transformers 6.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": False})
    return model


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
        **({"sliding_window": None} if config.family == "mistral" else {}),
    }
