"""The course's transformer with experts in place of MLPs, in one process or over the ranks of an ep group.

    config = tiny_mixture()                        8 experts, 2 a token
    model = MoETransformer(config, ep_group)       every rank brings its own sequences
    loss = model.loss(tokens_BT) + 0.01 * model.balance_loss(dp_group)
    loss.backward()
    average_gradients(model, dp_group, edp_group)

Attention, norms, embedding and head are on every rank, as in data parallelism. Parameters have the names of the model in
one process, and this rank's part of the experts is a slice of theirs.

Shapes: B sequences, S tokens in each, T = S + 1, H hidden width, V vocabulary, E experts.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.models import ModelConfig
from lablib.toys.expert_parallel.experts import INIT_STD, Experts, routed_parameters
from lablib.toys.expert_parallel.layer import MoE, Routing, check_mixture
from lablib.toys.expert_parallel.router import count_choices, load_balancing_loss, update_bias, z_loss
from lablib.toys.tensor_parallel import ParallelTransformer, parallelize, sum_gradient
from lablib.toys.transformer import Transformer, tiny_config


class MoETransformer(Transformer):
    """A transformer whose layers from `num_dense_layers` on have experts.

    Args:
        config: Of the llama family, with experts; see `tiny_mixture`.
        group: The ep ranks; None is one process.
        attention: "fused" or "plain", as in `Transformer`.
        **options: Of every `MoE`: capacity_factor, products.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: dist.ProcessGroup | None = None,
        *,
        attention: str = "fused",
        **options: object,
    ) -> None:
        check_mixture(config)
        super().__init__(dense_twin(config), attention=attention)
        self.config = config
        for layer, block in enumerate(self.blocks):
            if config.has_experts(layer):
                block.mlp = MoE(config, group, **options)
        if not self.mixtures:
            dense, layers = config.num_dense_layers, config.num_layers
            raise ValueError(f"num_dense_layers={dense} leaves none of num_layers={layers} to have experts")
        self.init_experts()

    @torch.no_grad()
    def init_experts(self) -> None:
        """Draw less for what adds to the stream, as `Transformer.init_weights` does, and shared experts like MLPs."""
        shrink = math.sqrt(2 * self.config.num_layers)
        for moe in self.mixtures:
            moe.experts.down /= shrink
            if moe.shared is not None:
                for linear in (moe.shared.up, moe.shared.gate, moe.shared.down):
                    nn.init.normal_(linear.weight, std=INIT_STD)
                moe.shared.down.weight /= shrink

    @property
    def mixtures(self) -> list[MoE]:
        """The layers of experts, the first one first."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoE)]

    @property
    def routings(self) -> list[Routing]:
        """What the routers did with the last batch, layer by layer.

        Read it before backward: a block that runs again there writes it anew, for whichever batch that is.
        """
        seen = [moe.routing for moe in self.mixtures]
        if None in seen:
            raise ValueError("no router has seen a batch yet; run the model first")
        return seen

    def balance_loss(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the mean of `load_balancing_loss` over the layers, for the last batch.

        Args:
            group: Ranks over which choices are counted, normally those of dp; None is this rank's batch alone.
        """
        losses = [load_balancing_loss(seen.scores_TE, seen.chosen_Tk, group) for seen in self._routed()]
        return torch.stack(losses).mean()

    def z_loss(self) -> Tensor:
        """Return the mean of `z_loss` over the layers, for the last batch."""
        return torch.stack([z_loss(seen.logits_TE) for seen in self._routed()]).mean()

    def _routed(self) -> list[Routing]:
        """Return the routings for a loss on them, whose gradient must not be lost in silence."""
        trained = self.training and torch.is_grad_enabled()
        for moe, seen in zip(self.mixtures, self.routings, strict=True):
            if trained and moe.router.weight.requires_grad and not seen.logits_TE.requires_grad:
                raise RuntimeError(
                    "no gradient leads from this loss to the routers: their forward ran without, as in a reentrant "
                    "checkpoint; use checkpoint(..., use_reentrant=False), or torch.no_grad() around the loss too"
                )
        return self.routings

    def counts(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return how many tokens of the last batch chose each expert, a line for each layer, counts_LE."""
        counts_LE = torch.stack([count_choices(seen.chosen_Tk, self.config.num_experts) for seen in self.routings])
        if group is not None:
            dist.all_reduce(counts_LE, group=group)
        return counts_LE

    def update_biases(self, counts_LE: Tensor, speed: float) -> None:
        """Move the bias of every layer's router; see `update_bias`."""
        for moe, counts_E in zip(self.mixtures, counts_LE, strict=True):
            update_bias(moe.router, counts_E, speed)

    def load_whole(self, state: dict[str, Tensor]) -> None:
        """Copy this rank's part out of the state dict of the model in one process."""
        mine = dict(state)
        for name, module in self.named_modules():
            for leaf, _ in module.named_parameters() if isinstance(module, Experts) else ():
                mine[f"{name}.{leaf}"] = module.mine(state[f"{name}.{leaf}"])
        self.load_state_dict(mine)


def dense_twin(config: ModelConfig) -> ModelConfig:
    """Return the same model without experts."""
    none = dict.fromkeys(
        ("num_experts", "experts_per_token", "expert_ffn", "num_shared_experts", "num_dense_layers"), 0
    )
    return dataclasses.replace(config, **none, router=None)


def tiny_mixture(**overrides: object) -> ModelConfig:
    """Return a small config for a laptop: the tiny Llama with 2 layers of width 64, 8 experts of which a token visits 2.

    Args:
        **overrides: Fields of ModelConfig to change.
    """
    fields = {"num_layers": 2, "hidden": 64, "num_experts": 8, "experts_per_token": 2, "expert_ffn": 64}
    return tiny_config("llama", **(fields | {"name": "tiny-mixture"} | overrides))


def fold(
    whole: MoETransformer, tp_group: dist.ProcessGroup, ep_group: dist.ProcessGroup, **options: object
) -> ParallelTransformer:
    """Return the model with attention split over tp and experts over ep, with copies of its weights.

    tp = 2 in attention, ep = 4 and no tp in the experts, on 4 ranks:

        rank                 0    1    2    3
        attention            tp 0 1    tp 0 1        two halves of the heads; two replicas, dp = 2
        experts              0,1  2,3  4,5  6,7      ep = 4, made of tp x dp: edp = 1

    Tensor parallel ranks have the same tokens, which would reach every expert twice. Under sequence parallelism each
    of them holds S/tp tokens of the stream, and these are what it dispatches. So router and shared expert see S/tp
    tokens of their replica's loss: their gradients are summed over tp, as those of norms are, and then averaged over
    dp. Experts have seen the tokens of all tp x dp ranks, that is of dp losses: their sum over edp is divided by dp.

    Liu et al. 2025 (MoE Parallel Folding, 2504.14960), section 3.

    Args:
        whole: In one process, with the same weights on every rank.
        tp_group: The ranks that split attention, which get the same tokens.
        ep_group: The ranks that share the experts, all tp ranks of a replica among them.
        **options: Of every `MoE`: capacity_factor, products.
    """
    config, state = whole.config, whole.state_dict()
    names = [f"blocks.{layer}.mlp." for layer in range(config.num_layers) if config.has_experts(layer)]
    dtype = whole.embed.weight.dtype
    outside = Transformer(dense_twin(config)).to(dtype)
    outside.load_state_dict({n: v for n, v in state.items() if not n.startswith(tuple(names))}, strict=False)
    split = parallelize(outside, tp_group, sequence_parallel="keep")
    for name in names:
        moe = MoE(config, ep_group, **options).to(dtype)
        moe.load_whole({n.removeprefix(name): v for n, v in state.items() if n.startswith(name)})
        split.get_submodule(name.removesuffix(".mlp.")).mlp = moe
        routed = set(routed_parameters(moe))
        for parameter in moe.parameters():
            if parameter not in routed:
                sum_gradient(parameter, tp_group)
    return split
