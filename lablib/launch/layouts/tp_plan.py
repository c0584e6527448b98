"""Tensor parallelism as PyTorch has it: the plan of a Llama, with sequence parallelism and the loss on split logits.

    mesh = rank_mesh(8, names=("tp",))
    model = split_by_plan(Transformer(config), mesh)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()                 # inside as well

Chapter 03 has it beside the toy, `lablib.toys.tensor_parallel`, which computes the same.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# fmt: off
# The page shows `ends_plan`: no line is wider than its column.


def block_plan() -> dict[str, ParallelStyle]:
    """Return the plan of a block: a gather before each half."""
    tokens, full = Shard(1), Replicate()
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=tokens)
    return {
        "norm1": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(  # the stream, and the angles
            input_layouts=(tokens, None),
            desired_input_layouts=(full, None),
        ),
        "attention.q": columns,
        "attention.k": columns,
        "attention.v": columns,
        "attention.out": rows,
        "norm2": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(
            input_layouts=tokens,
            desired_input_layouts=full,
        ),
        "mlp.up": columns,
        "mlp.gate": columns,
        "mlp.down": rows,
    }


def ends_plan() -> dict[str, ParallelStyle]:
    """Return the plan of what stands around the blocks."""
    return {
        "embed": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=Shard(1),
        ),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            use_local_output=False,
        ),
    }


# fmt: on


def split_by_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split a Llama of `lablib.toys.transformer` in place, and return it; its logits are a DTensor.

    Args:
        model: With the same weights on every rank.
        mesh: Of one axis, whose size divides the tokens of a sequence.

    Raises:
        ValueError: If the key heads do not divide; the plan cuts them, and copies none.
    """
    if model.config.num_kv_heads % mesh.size():
        raise ValueError(
            f"tp={mesh.size()} does not divide num_kv_heads={model.config.num_kv_heads}, and a plan copies no head"
        )
    parallelize_module(model, mesh, ends_plan())
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan())
    return model
