"""torchtitan's own Llama 3 as an oracle: what it keeps for backward, and the peak of a step, as PyTorch's tracker counts.

It needs the package torchtitan, version 0.3.0, which nothing else here does; so the measured rows are a file,
`book/data/torchtitan_rows.json`, that this writes:

    python -m tests.evidence.oracles.torchtitan book/data/torchtitan_rows.json

Two things of a GPU are stood for on a CPU. A norm is one operator there, and keeps its input, the weight and an fp32
number a token (PyTorch's derivatives.yaml, `_fused_rms_norm`). Attention is FlexAttention there, compiled; here it is
PyTorch's fused one, which keeps the same: q, k, v, its output and an fp32 number a row.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn import functional

from lablib.launch.torch_private import MemTracker


@dataclass(frozen=True, kw_only=True)
class TitanCase:
    """One configuration of torchtitan's Llama 3 in bf16, on one device."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 160
    vocab: int = 300
    batch: int = 2
    seq: int = 32
    full: bool = False
    step: str = "foreach"


SIZES = (
    {},
    {"layers": 3, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 352, "vocab": 2000, "batch": 1, "seq": 256},
    {"layers": 4, "kv_heads": 4, "ffn": 512, "vocab": 500, "seq": 512},
    {"layers": 6, "ffn": 512, "vocab": 200, "batch": 1, "seq": 1024},
)
CASES = [
    TitanCase(**size, full=full, step=step) for size in SIZES for full in (False, True) for step in ("foreach", "fused")
]


@torch.library.custom_op("lablib::rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * root).to(x.dtype) * weight, root


@torch.library.custom_op("lablib::rms_norm_backward", mutates_args=())
def _norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, root: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(x), torch.zeros_like(weight)  # bytes are counted, and no values


def _backward(ctx: object, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return *_norm_backward(gradient, *ctx.saved_tensors), None


_norm.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1])
)


def build(case: TitanCase) -> torch.nn.Module:
    """Return the model in bf16, with full activation checkpointing if the case has it."""
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    functional.rms_norm = lambda x, shape, weight=None, eps=None: _norm(x, weight, eps or 1e-6)[0]
    init = {"weight": torch.nn.init.ones_}
    layers = llama3._build_llama3_layers(
        n_layers=case.layers, dim=case.hidden, n_heads=case.heads, n_kv_heads=case.kv_heads, hidden_dim=case.ffn,
        attn_backend="flex", rope=llama3.ComplexRoPE.Config(dim=case.hidden // case.heads, max_seq_len=case.seq),
    )  # fmt: skip
    config = llama3.Llama3Model.Config(
        dim=case.hidden, vocab_size=case.vocab, layers=layers,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=case.vocab, embedding_dim=case.hidden, param_init=init
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=case.hidden, param_init=init),
        lm_head=llama3.Linear.Config(in_features=case.hidden, out_features=case.vocab, param_init=init),
    )  # fmt: skip
    model = config.build()
    tables = [block.attention.rope for block in model.layers.values()]
    for parameter in model.parameters():  # and not the tables, which stay complex numbers of fp32
        parameter.data = parameter.data.to(torch.bfloat16)
    for block, table in zip(model.layers.values(), tables, strict=True):
        table.cache = table._precompute_cache()
        block.attention.inner_attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    if case.full:
        FullAC(FullAC.Config()).apply(model)
    return model


def saved_bytes(case: TitanCase) -> int:
    """Return the bytes that autograd keeps of a forward and its loss, each storage once, parameters and tables left out."""
    model = build(case)
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, *_batch(case))
    del loss
    return sum(tensor.untyped_storage().nbytes() for key, tensor in seen.items() if key not in own)


def peak_bytes(case: TitanCase) -> int:
    """Return the peak of a steady step; with the loss and its gradient, and AdamW's counter of 4 bytes for each tensor."""
    model = build(case)
    how = {case.step: True}
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        batch = _batch(case)  # which a training loop holds through its step
        _loss(model, *batch).backward()
        optimizer.step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return next(size for name, size in peak.items() if "Total" in str(name))


def _batch(case: TitanCase) -> list[torch.Tensor]:
    return [torch.randint(0, case.vocab, (case.batch, case.seq)) for _ in ("tokens", "targets")]


def _loss(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(model(tokens), targets)


def measured() -> dict[str, object]:
    """Return every case as it is measured here, with the versions."""
    rows = [
        asdict(case) | {"peak": peak_bytes(case), "saved": None if case.full else saved_bytes(case)} for case in CASES
    ]
    return {"versions": {"torch": torch.__version__, "torchtitan": version("torchtitan")}, "rows": rows}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measured(), indent=1) + "\n")
