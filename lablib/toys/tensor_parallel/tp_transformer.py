"""The transformer split over the ranks of one process group: attention by heads, MLP by inner values.

    model = parallelize(Transformer(config), group)   # or sequence_parallel="keep" or "shard"
    model.loss(tokens).backward()                     # the same tokens on every rank
    optimizer.step()                                  # an ordinary one, over the local parameters
    model.gather(name, model.state_dict()[name])      # as if nothing had been split

A block: norm -> columns (q, k, v or up, gate) -> heads or inner values of this rank -> row (out or down).
Between columns and row the ranks have nothing to say to each other.
Per block f and g cost 2 all-reduces forward and 2 backward, 8·B·S·H·(t-1)/t numbers sent by each rank.
Sequence parallelism also splits norms and stream; "keep" sends as much, "shard" 10·B·S·H·(t-1)/t.

Papers: Shoeybi et al. 2019 (1909.08053), figure 3; Korthikanti et al. 2022 (2205.05198).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.toys.tensor_parallel.functions import sum_gradient
from lablib.toys.tensor_parallel.layers import (
    VARIANTS,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    columns,
    even_split,
    head_split,
    local,
    vocab_parallel_cross_entropy,
)
from lablib.toys.transformer import MLP, Attention, Block, Transformer, rotary, rotate


@dataclass(frozen=True)
class Plan:
    """How a model is split; the same for every part of every block.

    Attributes:
        group: The tensor parallel ranks.
        sequence_parallel: False, "keep" or "shard".
        replicas: The ranks with the same KV heads, when there are more ranks than KV heads.
    """

    config: ModelConfig
    group: dist.ProcessGroup
    sequence_parallel: bool | str = False
    replicas: dist.ProcessGroup | None = None


class ParallelAttention(Attention):
    """Attention over this rank's heads: heads never mix before the output projection."""

    def __init__(self, full: Attention, plan: Plan) -> None:
        nn.Module.__init__(self)  # Attention's own would make the full projections
        config, group, variant = plan.config, plan.group, plan.sequence_parallel
        t, width = group.size(), config.head_dim
        self.head_dim, self.fused, self.dropout = width, full.fused, copy.deepcopy(full.dropout)
        self.queries_per_key = (config.num_heads // t) // max(1, config.num_kv_heads // t)
        q_split = head_split(config.num_heads, width, t)
        kv_split = head_split(config.num_kv_heads, width, t)
        self.q = ColumnParallelLinear(full.q, q_split, group, variant)
        self.k = ColumnParallelLinear(full.k, kv_split, group, variant, plan.replicas)
        self.v = ColumnParallelLinear(full.v, kv_split, group, variant, plan.replicas)
        self.out = RowParallelLinear(full.out, q_split, group, variant)

    def forward(self, x_BSH: Tensor, rope_2SD: Tensor | None, *more: Tensor | None) -> Tensor:
        """Return what attention adds to the stream (to this rank's part of it with sequence parallelism)."""
        q_BNSD, k_BKSD, v_BKSD = map(self.heads, columns(x_BSH, self.q, self.k, self.v))
        if rope_2SD is not None:
            q_BNSD, k_BKSD = rotate(q_BNSD, rope_2SD), rotate(k_BKSD, rope_2SD)
        return self.out(self.core(q_BNSD, k_BKSD, v_BKSD, *more).transpose(1, 2).flatten(2))


class ParallelMLP(nn.Module):
    """The MLP over this rank's inner values: GELU and SwiGLU act on each value alone."""

    def __init__(self, full: MLP, plan: Plan) -> None:
        super().__init__()
        group, variant = plan.group, plan.sequence_parallel
        split = even_split(plan.config.ffn, group.size())
        self.up = ColumnParallelLinear(full.up, split, group, variant)
        gate = full.gate
        self.gate = gate and ColumnParallelLinear(gate, split, group, variant)
        self.down = RowParallelLinear(full.down, split, group, variant)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return what the MLP adds to the stream (to this rank's part of it with sequence parallelism)."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BSH), approximate="tanh"))
        up_BSf, gate_BSf = columns(x_BSH, self.up, self.gate)
        return self.down(F.silu(gate_BSf) * up_BSf)


class ParallelBlock(Block):
    """One layer with both halves split; the norms see what the stream holds: all tokens, or this rank's."""

    def __init__(self, full: Block, plan: Plan) -> None:
        nn.Module.__init__(self)
        # In the order of Block, since optimizers number the parameters by it.
        self.norm1 = copy.deepcopy(full.norm1)
        self.attention = ParallelAttention(full.attention, plan)
        self.norm2 = copy.deepcopy(full.norm2)
        self.mlp = ParallelMLP(full.mlp, plan)
        self.dropout = copy.deepcopy(full.dropout)
        if plan.sequence_parallel:
            for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
                sum_gradient(parameter, plan.group)  # they see this rank's tokens only


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise if the model cannot be split so."""
    heads, kv, ffn, vocab = config.num_heads, config.num_kv_heads, config.ffn, config.vocab
    possible = [t for t in range(1, min(heads, ffn, vocab) + 1) if heads % t == 0 and not (kv % t and t % kv)]
    if tp in possible:
        return
    choices = " or ".join(filter(None, (", ".join(map(str, possible[:-1])), str(possible[-1]))))
    if heads % tp:
        reason = f"tp={tp} does not divide num_heads={heads}"
    elif kv % tp and tp % kv:
        reason = f"tp={tp} neither divides num_kv_heads={kv} nor is a multiple of it"
    else:
        reason = f"tp={tp} leaves a rank nothing of ffn={ffn} or vocab={vocab}"
    raise ValueError(f"{reason}; use {choices}")


class ParallelTransformer(nn.Module):
    """The transformer, split. Parameters have the names of the full model's; see `parallelize`."""

    def __init__(self, model: Transformer, group: dist.ProcessGroup, variant: bool | str) -> None:
        super().__init__()
        config, t = model.config, group.size()
        self.config, self.group, self.variant = config, group, variant
        vocab = even_split(config.vocab, t)
        self.first = vocab.bounds[group.rank()][0]
        embed = local(model.embed.weight, 0, vocab, group)
        self.embed = VocabParallelEmbedding(embed, self.first, group, bool(variant))
        self.embed.splits = {"weight": (0, vocab)}
        self.positions = copy.deepcopy(model.positions)
        plan = Plan(config, group, variant, _kv_replicas(config, group))
        self.blocks = nn.ModuleList(ParallelBlock(full, plan) for full in model.blocks)
        self.norm = copy.deepcopy(model.norm)
        self.head = ColumnParallelLinear(model.head, vocab, group, variant)
        if config.tied:
            self.head.weight = self.embed.weight
        if variant:  # these see only this rank's tokens
            for module in (self.norm, self.positions) if self.positions else (self.norm,):
                for parameter in module.parameters():
                    sum_gradient(parameter, group)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return this rank's columns of the logits, logits_BSv."""
        seq, t, rank = tokens_BS.shape[1], self.group.size(), self.group.rank()
        if tokens_BS.numel() and not 0 <= int(tokens_BS.min()) <= int(tokens_BS.max()) < self.config.vocab:
            raise ValueError(f"token ids must lie in 0 ... {self.config.vocab - 1} (vocab={self.config.vocab})")
        if self.positions is not None and seq > self.config.max_positions:
            raise ValueError(f"sequence of {seq} tokens, but max_positions={self.config.max_positions}")
        if self.variant:
            # Tokens after the last one reach no earlier position (the mask is causal), and no loss asks for them.
            tokens_BS = F.pad(tokens_BS, (0, -seq % t))
        padded = tokens_BS.shape[1]
        x_BSH = self.embed(tokens_BS)
        rope_2SD = None
        if self.positions is None:
            rope_2SD = rotary(padded, self.config.head_dim, device=x_BSH.device, dtype=x_BSH.dtype)
        else:
            start, stop = (padded * rank // t, padded * (rank + 1) // t) if self.variant else (0, padded)
            index_S = torch.arange(start, stop, device=x_BSH.device).clamp(max=self.config.max_positions - 1)
            x_BSH = x_BSH + self.positions(index_S)
        for block in self.blocks:
            x_BSH = block(x_BSH, rope_2SD)
        return self.head(self.norm(x_BSH))[:, :seq]

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of next-token prediction, the same on every rank.

        Args:
            tokens_BT: Windows of S + 1 tokens, the same on every rank.
        """
        logits_BSv = self(tokens_BT[:, :-1])
        return vocab_parallel_cross_entropy(logits_BSv, tokens_BT[:, 1:], self.first, self.group).mean()

    def gather(self, name: str, piece: Tensor) -> Tensor:
        """Return a full parameter, or its gradient, from the pieces of all ranks. Every rank must call it."""
        owner, _, leaf = name.rpartition(".")
        dim, split = getattr(self.get_submodule(owner), "splits", {}).get(leaf, (0, None))
        if split is None:
            return piece.detach().clone()
        shape = list(piece.shape)
        shape[dim] = split.bounds[-1][1]
        full = piece.new_empty(shape)
        for rank in range(self.group.size()):  # one at a time: slices may differ in size
            part = split.cut(full, dim, rank).contiguous()
            if rank == self.group.rank():
                part.copy_(piece.detach())
            dist.broadcast(part, group=self.group, group_src=rank)
            split.cut(full, dim, rank).copy_(part)
        return full


def parallelize(
    model: Transformer, group: dist.ProcessGroup, *, sequence_parallel: bool | str = False
) -> ParallelTransformer:
    """Return the model split over the ranks of a group, with copies of its weights.

    Args:
        model: The full model, with the same weights on every rank. It stays as it is.
        group: The tensor parallel ranks; `dist.group.WORLD` for all.
        sequence_parallel: False, "keep" (keeps the gathered input for backward) or "shard" (keeps this rank's
            part and gathers once more).
    """
    if not any(sequence_parallel is v or sequence_parallel == v != 0 for v in VARIANTS):
        raise ValueError(f"sequence_parallel={sequence_parallel!r} must be False, 'keep' or 'shard'")
    check_tp(model.config, group.size())
    if model.dropout.p:
        raise ValueError(f"dropout={model.dropout.p} is not supported with tensor parallelism; use 0")
    return ParallelTransformer(model, group, sequence_parallel)


def _kv_replicas(config: ModelConfig, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold this rank's KV head, None if nobody else does."""
    each = group.size() // config.num_kv_heads
    if each < 2:
        return None
    start = group.rank() // each * each
    ranks = dist.get_process_group_ranks(group)[start : start + each]
    # Only its members make it, so that tensor parallel groups beside this one need not take part.
    return dist.new_group(ranks, use_local_synchronization=True)
