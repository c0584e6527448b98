"""The transformer on a cut sequence: attention is one of three ways, and five things around it change too.

    model = ContextParallelTransformer(config, cp_group, way="ring")     # on every rank of the group
    model.load_state_dict(whole.state_dict())                            # the names are those of Transformer
    loss = model.loss(tokens_BT)                                         # the full windows, the same on every cp rank
    loss.backward()
    average_gradients(model, cp_group)                                   # DDP and FSDP2 do it themselves

1. Positions: a rank's tokens are not 0 ... s - 1, but `token_positions`.
2. Labels: shifted by one in the full sequence, *before* it is cut; the label of a part's last token is elsewhere.
3. Mask: documents in a packed sequence go on across the cuts.
4. Mean: over all tokens of all ranks that have a label, not of the means of ranks, which may have more or fewer.
5. Gradients: every rank has all weights and saw other tokens, so they are averaged over cp as they are over dp.

Embedding, norms, projections, MLP and head work on each token alone, and stay as they are.

    B  sequences    S  tokens of a full sequence    s  tokens of this rank    T  S + 1    H  hidden width
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.calc.errors import one_of
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import ORDERS
from lablib.toys.context_parallel.gathered import gathered_attention
from lablib.toys.context_parallel.ring import ring_attention
from lablib.toys.context_parallel.softmax import wide
from lablib.toys.context_parallel.split import check_split, shard, size_and_rank, token_positions
from lablib.toys.context_parallel.ulysses import check_heads, ulysses_attention
from lablib.toys.transformer import Transformer, rotary

WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}

IGNORED = -100  # the label of a token that is asked for nothing: PyTorch's default


class ContextParallelTransformer(Transformer):
    """The course's transformer, on this rank's tokens of every sequence.

    Args:
        config: As for `Transformer`. Every rank must have the same weights.
        group: The ranks that share a sequence.
        way: "ring", "gathered" or "ulysses".
        order: "contiguous", "zigzag" or "striped".
        loss_group: The ranks whose tokens make one mean: those of cp and dp together. None: `group`.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: dist.ProcessGroup,
        way: str = "ring",
        order: str = "zigzag",
        *,
        loss_group: dist.ProcessGroup | None = None,
    ) -> None:
        one_of("way", way, WAYS)
        one_of("order", order, ORDERS)
        cp, rank = size_and_rank(group)
        if way == "ulysses":
            check_heads(config.num_heads, config.num_kv_heads, cp)
        super().__init__(config)
        self.group, self.cp, self.rank = group, cp, rank
        self.way, self.order = way, order
        self.loss_group = group if loss_group is None else loss_group
        for block in self.blocks:
            block.attention.core = self.core  # the part of attention where tokens meet; all else stays

    def core(self, q_BNsD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, documents_BS: Tensor | None) -> Tensor:
        """Mix the values of all ranks' tokens.

        The documents come with the call. Kept on the model they would be those of the last forward when a block runs
        again in backward, whichever micro-batch that is for.
        """
        options = {"order": self.order, "documents": documents_BS}
        # Under autocast rotated q and k come in fp32, v does not; sums of pieces stay wide.
        with torch.autocast(v_BKsD.device.type, enabled=False):
            return WAYS[self.way](q_BNsD.to(v_BKsD.dtype), k_BKsD.to(v_BKsD.dtype), v_BKsD, self.group, **options)

    def forward(self, tokens_Bs: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Return the scores of every next token of this rank, logits_BsV.

        Args:
            tokens_Bs: This rank's tokens: `shard(tokens_BS, 1, group, order)`.
            documents_BS: The number of the document of every token of the full sequences, (S,) or (B, S).
        """
        seq = tokens_Bs.shape[1] * self.cp
        check_split(seq, self.cp, self.order)
        if self.positions is not None and seq > self.config.max_positions:
            raise ValueError(
                f"cp={self.cp} ranks with {tokens_Bs.shape[1]} tokens have a sequence of {seq}, but "
                f"max_positions={self.config.max_positions}"
            )
        position_s = self.token_positions(seq, tokens_Bs.device)
        x_BsH, rope_2sD = self.embed(tokens_Bs), None
        if self.positions is None:
            rope_2sD = rotary(seq, self.config.head_dim, device=x_BsH.device, dtype=x_BsH.dtype)[:, position_s]
        else:
            x_BsH = x_BsH + self.positions(position_s)
        for block in self.blocks:
            x_BsH = block(x_BsH, rope_2sD, documents_BS)
        return self.head(self.norm(x_BsH))

    def loss(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, labels_BS: Tensor | None = None) -> Tensor:
        """Return the mean loss over all tokens with a label, of all ranks of `loss_group`; the same on each of them.

        Its backward leaves gradients whose *average* over `loss_group` is the gradient, as DDP and FSDP expect. Without
        any label it is not a number, as in `cross_entropy`.

        Args:
            tokens_BT: Full windows of S + 1 tokens, the same on every rank of `group`.
            documents_BT: The number of the document of every token, (T,) or (B, T). A token sees its own document
                only, and is not asked for the first token of the next one. Positions go on from one to the next.
            labels_BS: What to predict in place of the next tokens; `IGNORED` asks for nothing.
        """
        check_batch(tokens_BT, documents_BT, labels_BS)
        labels_BS = next_tokens(tokens_BT, documents_BT) if labels_BS is None else labels_BS
        tokens_Bs, labels_Bs = self.cut(tokens_BT[:, :-1], labels_BS)
        logits_BsV = self(tokens_Bs, None if documents_BT is None else documents_BT[..., :-1])
        logits_BVs = logits_BsV.to(wide(logits_BsV)).transpose(1, 2)
        losses_Bs = F.cross_entropy(logits_BVs, labels_Bs, ignore_index=IGNORED, reduction="none")
        return self.mean(losses_Bs, labels_Bs != IGNORED)

    def token_positions(self, seq: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the full sequence."""
        return token_positions(seq, self.cp, self.rank, self.order, device)

    def cut(self, tokens_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and their labels, which were shifted before."""
        return shard(tokens_BS, 1, self.group, self.order), shard(labels_BS, 1, self.group, self.order)

    def mean(self, losses_Bs: Tensor, counts_Bs: Tensor) -> Tensor:
        """Return the mean of the losses that count, over all tokens of all ranks."""
        return _MeanOverRanks.apply(losses_Bs.sum(), counts_Bs.sum(), self.loss_group)


def check_batch(tokens_BT: Tensor, documents_BT: Tensor | None, labels_BS: Tensor | None) -> None:
    """Raise a ValueError unless documents and labels belong to the tokens."""
    if tokens_BT.dim() != 2:
        raise ValueError(
            f"tokens have shape {tuple(tokens_BT.shape)}; they must be (B, T), windows of T = S + 1 tokens"
        )
    batch, window = tokens_BT.shape
    if documents_BT is not None and tuple(documents_BT.shape) not in {(window,), (1, window), (batch, window)}:
        raise ValueError(
            f"documents has shape {tuple(documents_BT.shape)}, but tokens {(batch, window)}: pass the document of "
            f"every token of the windows, ({window},) or ({batch}, {window})"
        )
    if labels_BS is not None and labels_BS.shape != (batch, window - 1):
        raise ValueError(
            f"labels have shape {tuple(labels_BS.shape)}, but tokens {(batch, window)}: pass one label for each of the "
            f"first {window - 1} tokens, {(batch, window - 1)}, already shifted"
        )


def next_tokens(tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """Return the label of each of the first S tokens: the next one, or `IGNORED` if that begins another document."""
    labels_BS = tokens_BT[:, 1:]
    if documents_BT is None:
        return labels_BS
    return labels_BS.masked_fill(documents_BT[..., 1:] != documents_BT[..., :-1], IGNORED)


class _MeanOverRanks(torch.autograd.Function):
    """Sum over count, both of all n ranks; backward gives n / count, since gradients are averaged over n later."""

    @staticmethod
    def forward(ctx: FunctionCtx, total: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
        both = torch.stack((total.double(), count.double()))  # one message, and exact counts
        dist.all_reduce(both, group=group)
        ctx.scale, ctx.dtype = dist.get_world_size(group) / both[1], total.dtype
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad * ctx.scale).to(ctx.dtype), None, None


@torch.no_grad()
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over the ranks of a group: all that hold these weights, cp and dp together.

    Args:
        group: `loss_group` of the model.
    """
    ranks, _ = size_and_rank(group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks
            dist.all_reduce(parameter.grad, group=group)


# --- one thing forgotten ----------------------------------------------------------------------------------------


class _Positions(ContextParallelTransformer):
    def token_positions(self, seq: int, device: torch.device) -> Tensor:
        return torch.arange(seq // self.cp, device=device)


class _Labels(ContextParallelTransformer):
    def cut(self, tokens_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        tokens_Bs = shard(tokens_BS, 1, self.group, self.order)
        end_B1 = torch.full_like(tokens_Bs[:, :1], IGNORED)
        return tokens_Bs, torch.cat((tokens_Bs[:, 1:], end_B1), dim=1)


class _Documents(ContextParallelTransformer):
    def forward(self, tokens_Bs: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        return super().forward(tokens_Bs, None)


class _Mean(ContextParallelTransformer):
    def mean(self, losses_Bs: Tensor, counts_Bs: Tensor) -> Tensor:
        return losses_Bs.sum() / counts_Bs.sum()


_FORGETFUL = {"positions": _Positions, "labels": _Labels, "documents": _Documents, "mean": _Mean}


def forgetful(what: str) -> type[ContextParallelTransformer]:
    """Return a transformer that forgets one thing: all of them run, and all are wrong.

    The fifth thing to forget, gradients, is no matter of the model: `average_gradients(model, dp_group)` lets the ranks
    of a sequence, equal at first, drift apart.

    Args:
        what: "positions": every rank calls its tokens 0 ... s - 1. "labels": shifted after the cut, so that a part's
            last token has none. "documents": the mask is causal and no more. "mean": every rank takes its own, so that
            a token counts more on a rank that has fewer.
    """
    return _FORGETFUL[one_of("thing to forget", what, _FORGETFUL)]
