"""One block of the transformer, split over the ranks: attention by heads, MLP by inner values.

Both halves are columns, then work that each rank does alone, then a row.

Paper: Shoeybi et al. 2019 (1909.08053), figure 3.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.toys.tp_functions import sum_gradient
from lablib.toys.tp_layers import ColumnParallelLinear, RowParallelLinear, columns, even_split, head_split
from lablib.toys.transformer import MLP, Attention, Block, rotate


@dataclass(frozen=True)
class Plan:
    """How a model is split; the same for every part of every block.

    Attributes:
        config: Of the model.
        group: The tensor parallel ranks.
        sequence_parallel: False, "keep" or "shard".
        replicas: The ranks with the same KV heads, when there are more ranks than KV heads.
    """

    config: ModelConfig
    group: dist.ProcessGroup
    sequence_parallel: bool | str = False
    replicas: dist.ProcessGroup | None = None


class ParallelAttention(Attention):
    """Attention over this rank's heads: heads never mix before the output projection.

    Args:
        whole: The attention to split; its weights are copied.
        plan: How to split it.
    """

    def __init__(self, whole: Attention, plan: Plan) -> None:
        nn.Module.__init__(self)  # Attention's own would make whole projections
        config, group, variant = plan.config, plan.group, plan.sequence_parallel
        t, width = group.size(), config.head_dim
        self.head_dim, self.fused, self.dropout = width, whole.fused, copy.deepcopy(whole.dropout)
        self.queries_per_key = (config.num_heads // t) // max(1, config.num_kv_heads // t)
        q_split = head_split(config.num_heads, width, t)
        kv_split = head_split(config.num_kv_heads, width, t)
        self.q = ColumnParallelLinear(whole.q, q_split, group, variant)
        self.k = ColumnParallelLinear(whole.k, kv_split, group, variant, plan.replicas)
        self.v = ColumnParallelLinear(whole.v, kv_split, group, variant, plan.replicas)
        self.out = RowParallelLinear(whole.out, q_split, group, variant)

    def forward(self, x_BSH: Tensor, rope_2SD: Tensor | None) -> Tensor:
        """Return what attention adds to the stream (to this rank's part of it with sequence parallelism)."""
        q_BNSD, k_BKSD, v_BKSD = map(self.heads, columns(x_BSH, self.q, self.k, self.v))
        if rope_2SD is not None:
            q_BNSD, k_BKSD = rotate(q_BNSD, rope_2SD), rotate(k_BKSD, rope_2SD)
        return self.out(self.core(q_BNSD, k_BKSD, v_BKSD).transpose(1, 2).flatten(2))


class ParallelMLP(nn.Module):
    """The MLP over this rank's inner values: GELU and SwiGLU act on each value alone.

    Args:
        whole: The MLP to split; its weights are copied.
        plan: How to split it.
    """

    def __init__(self, whole: MLP, plan: Plan) -> None:
        super().__init__()
        group, variant = plan.group, plan.sequence_parallel
        split = even_split(plan.config.ffn, group.size())
        self.up = ColumnParallelLinear(whole.up, split, group, variant)
        gate = whole.gate
        self.gate = gate and ColumnParallelLinear(gate, split, group, variant)
        self.down = RowParallelLinear(whole.down, split, group, variant)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return what the MLP adds to the stream (to this rank's part of it with sequence parallelism)."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSH), approximate="tanh"))
        up_BSf, gate_BSf = columns(x_BSH, self.up, self.gate)
        return self.down(F.silu(gate_BSf) * up_BSf)


class ParallelBlock(Block):
    """One layer with both halves split; the norms see what the stream holds: all tokens, or this rank's.

    Args:
        whole: The block to split; its weights are copied.
        plan: How to split it.
    """

    def __init__(self, whole: Block, plan: Plan) -> None:
        nn.Module.__init__(self)
        # In the order of Block, since optimizers number the parameters by it.
        self.norm1 = copy.deepcopy(whole.norm1)
        self.attention = ParallelAttention(whole.attention, plan)
        self.norm2 = copy.deepcopy(whole.norm2)
        self.mlp = ParallelMLP(whole.mlp, plan)
        self.dropout = copy.deepcopy(whole.dropout)
        if plan.sequence_parallel:
            for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
                sum_gradient(parameter, plan.group)  # they see this rank's tokens only
