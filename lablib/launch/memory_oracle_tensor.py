"""Tensor parallelism as PyTorch has it, for the oracles of the memory calculator: `parallelize_module` and DTensor.

The plan is the one that Hugging Face ships with Llama, Qwen2 and Mistral: q, k, v, gate and up column-wise, output and
down row-wise, the head column-wise with its logits gathered. Embedding and norms stay whole on every rank. The
course's transformer gets the same plan under its own names.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COLUMNS = {
    "toy": (
        "blocks.*.attention.q",
        "blocks.*.attention.k",
        "blocks.*.attention.v",
        "blocks.*.mlp.gate",
        "blocks.*.mlp.up",
    ),
    "hf": tuple(
        f"model.layers.*.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    ),
}
ROWS = {
    "toy": ("blocks.*.attention.out", "blocks.*.mlp.down"),
    "hf": ("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
}
HEAD = {"toy": "head", "hf": "lm_head"}


def split_model(model: nn.Module, mesh: DeviceMesh, kernels: str) -> None:
    """Split a model over the ranks of a mesh, in place.

    Call it outside of FakeTensorMode: it reads the mesh, which is a real tensor.

    Args:
        model: Of `lablib.launch.memory_oracle_models`, its parameters real or fake.
        mesh: Of one dim.
        kernels: "toy" or "hf".

    Raises:
        ValueError: If the head is the embedding's table, which this plan splits in one place and not in the other.
    """
    embedding = model.get_input_embeddings() if kernels == "hf" else model.embed
    if model.get_submodule(HEAD[kernels]).weight is embedding.weight:
        raise ValueError("the plan splits the head and not the embedding, and here both are one table")
    plan = {name: ColwiseParallel() for name in COLUMNS[kernels]}
    plan |= {name: RowwiseParallel() for name in ROWS[kernels]}
    plan[HEAD[kernels]] = ColwiseParallel(output_layouts=Replicate())
    # Values do not matter here: without a source each rank cuts its own part.
    parallelize_module(model, mesh, plan, src_data_rank=None)


def optimizer_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters as two groups, split ones first: PyTorch's foreach and fused steps take no mixture.

    Args:
        model: After `split_model`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    split = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    return [{"params": split}, {"params": whole}]
