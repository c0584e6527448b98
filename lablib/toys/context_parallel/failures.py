"""Five ways to forget that the sequence is cut. All of them run, and all are wrong.

| forgotten | what then happens                                                                                  |
|-----------|----------------------------------------------------------------------------------------------------|
| positions | every rank calls its tokens 0 ... s - 1: tokens of different ranks get the same angle              |
| labels    | shifted after the cut: a part's last token has no label, and in other orders neighbours are wrong  |
| documents | the mask is causal and no more: tokens look into other documents                                   |
| mean      | every rank takes its own mean: a token counts more on a rank that has fewer; with none it is 0 / 0 |
| gradients | averaged over dp alone: the ranks of a sequence, equal at first, drift apart                       |

`forgetful("positions")` is a class like `ContextParallelTransformer`; the last one is no matter of the model:
`average_gradients(model, dp_group)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lablib.calc.errors import one_of
from lablib.toys.context_parallel.model import IGNORED, ContextParallelTransformer
from lablib.toys.context_parallel.split import shard


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
    """Return a transformer that forgets one thing.

    Args:
        what: "positions", "labels", "documents" or "mean".
    """
    return _FORGETFUL[one_of("thing to forget", what, _FORGETFUL)]
