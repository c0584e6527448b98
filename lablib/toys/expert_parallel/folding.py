"""Experts folded over the ranks of attention: tp = 2 in attention, ep = 4 and no tp in the experts, on 4 ranks.

    rank                 0    1    2    3
    attention            tp 0 1    tp 0 1        two halves of the heads; two replicas, dp = 2
    experts              0,1  2,3  4,5  6,7      ep = 4, made of tp x dp: edp = 1

If ep is taken out of dp alone, ep = 2 is the most that these ranks have, and tp splits every expert into slices of half
its width. Folding gives the layer of experts groups of its own, over all ranks of a pipeline stage.

Tensor parallel ranks have the same tokens, which would reach every expert twice. With sequence parallelism each of them
holds its part of the stream between attention and the next, S/tp tokens, and these are what it dispatches.

The gradients follow. A rank's experts have seen the tokens of all tp x dp ranks, that is of dp losses: the sum over edp
is divided by dp, as ever. What else is in the layer, router and shared expert, has seen S/tp tokens of its replica's
loss: it is summed over tp, as norms are under sequence parallelism, and then averaged over dp.

Shapes: B sequences of S tokens, s = S/tp of them on this rank, H hidden width.

Paper: Liu et al. 2025 (MoE Parallel Folding, 2504.14960), section 3. The groups are those of
`lablib.calc.parallel.expert_groups`.
"""

from __future__ import annotations

import torch.distributed as dist

from lablib.toys.expert_parallel.gradients import routed_parameters
from lablib.toys.expert_parallel.layer import MoE
from lablib.toys.expert_parallel.model import MoETransformer, dense_twin
from lablib.toys.tensor_parallel import ParallelTransformer, parallelize, sum_gradient
from lablib.toys.transformer import Transformer


def fold(
    whole: MoETransformer, tp_group: dist.ProcessGroup, ep_group: dist.ProcessGroup, **options: object
) -> ParallelTransformer:
    """Return the model with attention split over tp and experts over ep, with copies of its weights.

    Args:
        whole: In one process, with the same weights on every rank.
        tp_group: The ranks that split attention, which get the same tokens.
        ep_group: The ranks that share the experts, all tp ranks of a replica among them.
        **options: Of every `MoE`: capacity_factor, products, hops.
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
