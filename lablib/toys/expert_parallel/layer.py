"""A layer of experts in place of an MLP: route, permute, dispatch, multiply, combine, unpermute.

    moe = MoE(config)                     all experts in one process
    moe = MoE(config, ep_group)           this rank's part of the experts; each rank brings its own tokens
    y_BSH = moe(x_BSH)                    what the layer adds to the stream
    moe.routing                           what the router did with the last batch, for the losses of `router`

The router is on every rank and decides about this rank's tokens. Their experts may be anywhere, so all ranks of the
group call the layer equally often, in forward and in backward, a rank without tokens too.

Shapes: B sequences of S tokens, T = B S tokens of this rank, H hidden width, E experts, k experts of a token, R rows.

Papers: Shazeer et al. 2017 (1701.06538); Lepikhin et al. 2020 (GShard, 2006.16668); DeepSeek-AI 2024 (2412.19437),
section 2.1.2, for shared experts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.calc.parallel import expert_capacity
from lablib.toys.expert_parallel.dispatcher import combine, dispatch, permute, unpermute, within_capacity
from lablib.toys.expert_parallel.experts import Experts
from lablib.toys.expert_parallel.router import TopKRouter
from lablib.toys.transformer import MLP


@dataclass(frozen=True)
class Routing:
    """What a router did with the tokens of this rank.

    Attributes:
        kept_Tk: Choices that found room; None if nothing is ever dropped.
    """

    logits_TE: Tensor
    scores_TE: Tensor
    weights_Tk: Tensor
    chosen_Tk: Tensor
    kept_Tk: Tensor | None

    @property
    def dropped(self) -> int:
        """Choices that found no room."""
        return 0 if self.kept_Tk is None else int((~self.kept_Tk).sum())


class MoE(nn.Module):
    """A mixture of experts, and the shared expert that every token visits, if the model has one.

    Args:
        config: hidden, num_experts, experts_per_token, expert_ffn, num_shared_experts and router are used.
        group: The ep ranks, among which the experts are divided; None keeps them all here.
        capacity_factor: φ: an expert takes ⌈φ T k / E⌉ of the choices of each rank, the first ones. None drops nothing.
            Every rank counts its own T tokens alone, as GShard's groups do, so that nobody has to ask.
        products: "loop" or "grouped"; see `experts`.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: dist.ProcessGroup | None = None,
        *,
        capacity_factor: float | None = None,
        products: str = "loop",
    ) -> None:
        super().__init__()
        check_mixture(config)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={capacity_factor} must be a number above 0; None drops nothing")
        self.group, self.capacity_factor = group, capacity_factor
        self.router = TopKRouter(config.hidden, config.num_experts, config.experts_per_token, config.router)
        self.experts = Experts(config.num_experts, config.hidden, config.expert_ffn, group, products=products)
        shared = config.num_shared_experts * config.expert_ffn
        self.shared = MLP(dataclasses.replace(config, ffn=shared)) if shared else None
        self.routing: Routing | None = None

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return what the experts add to the stream; zeros for a token that no expert had room for."""
        x_TH = x_BSH.flatten(0, -2)
        self.experts.check(x_TH.dtype)
        logits_TE = self.router.logits(x_TH)
        scores_TE = self.router.scores(logits_TE)
        weights_Tk, chosen_Tk = self.router.choose(scores_TE)
        kept_Tk = self.room(chosen_Tk)
        self.routing = Routing(logits_TE, scores_TE, weights_Tk, chosen_Tk, kept_Tk)
        rows_RH, counts_E, order_R = permute(x_TH, chosen_Tk, logits_TE.shape[-1], kept_Tk)
        y_BSH = unpermute(self.visit(rows_RH, counts_E), order_R, weights_Tk).view_as(x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH)

    def visit(self, rows_RH: Tensor, counts_E: Tensor) -> Tensor:
        """Return what the experts make of rows in the order of the experts, wherever they are."""
        if self.group is None:
            return self.experts(rows_RH, counts_E)
        arrived_RH, handle = dispatch(rows_RH, counts_E, self.group)
        return combine(self.experts(arrived_RH, handle.counts_e), handle)

    def room(self, chosen_Tk: Tensor) -> Tensor | None:
        """Return which choices find room; None if all do."""
        if self.capacity_factor is None or not len(chosen_Tk):
            return None
        tokens, k = chosen_Tk.shape
        experts = len(self.router.weight)
        return within_capacity(chosen_Tk, experts, expert_capacity(tokens, experts, k, self.capacity_factor))

    @torch.no_grad()
    def load_whole(self, state: dict[str, Tensor]) -> None:
        """Copy this rank's part out of the state dict of the layer in one process."""
        mine = {n: self.experts.mine(v) if n.startswith("experts.") else v for n, v in state.items()}
        self.load_state_dict(mine)

    def __getstate__(self) -> dict:
        # A copy of the layer is one of its weights; what autograd remembers of the last batch cannot be copied.
        return self.__dict__ | {"routing": None}


def check_mixture(config: ModelConfig) -> None:
    """Raise a ValueError that names what these layers do not have."""
    if not config.is_moe:
        raise ValueError(f"{config.name} has no experts: set num_experts, experts_per_token and expert_ffn")
    if not config.gated_mlp or config.mlp_bias:
        raise ValueError(
            f"gated_mlp={config.gated_mlp}, mlp_bias={config.mlp_bias}: experts here are SwiGLU without biases; "
            "use gated_mlp=True, mlp_bias=False"
        )
    if config.router_bias:
        raise ValueError("router_bias=True: the router here is one matrix; use router_bias=False")
