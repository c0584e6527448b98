"""The expert parallel toy against one process, against Hugging Face's routers, against FSDP2, and against what it sends.

Comparisons run in float64 on weights of size 1: sums over tokens in another order differ by about 1e-15, and no norm in
fp32 is in the way (the models have LayerNorm). The limit is 1e-12. A slip in the idea (a gradient summed where it is
averaged, a token at the wrong expert) changes a value by a good part of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.models import Router
from lablib.calc.parallel import expert_groups
from lablib.launch.ranks import run_ranks
from lablib.toys.expert_parallel import MoE, average_gradients, node_hops, own_group, rank_hop, tiny_mixture

LIMIT = 1e-12
HIDDEN, FFN = 16, 12


@cache
def on_ranks(fn: Callable, ranks: int, *args):
    """One start of the ranks for all tests that read its results; see `run_ranks`."""
    return run_ranks(fn, ranks, *args, timeout=120)


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def mixture(experts: int = 8, k: int = 2, rules: Router | None = None, **overrides):
    return tiny_mixture(
        hidden=HIDDEN, expert_ffn=FFN, num_heads=4, num_experts=experts, experts_per_token=k, router=rules, **overrides
    )


@torch.no_grad()
def drawn(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model in float64 whose weights are of a size that no slip could hide behind."""
    torch.manual_seed(seed)
    model = model.double()
    for parameter in model.parameters():
        parameter.normal_(std=0.4)
    for name, buffer in model.named_buffers():
        if name.endswith("bias_E"):
            buffer.normal_(std=0.2)
    return model


DEEPSEEK = Router(score="sigmoid", bias=True, scale=2.5)
QWEN = Router(normalized=False)
NODES = Router(score="sigmoid", bias=True, groups=2, group_topk=1)

#: Name: experts, experts a token, router, tokens of each of four ranks, options.
CASES = {
    "Mixtral": (8, 2, None, (5, 5, 5, 5), {}),
    "Qwen3, unequal tokens": (8, 2, QWEN, (7, 1, 4, 6), {}),
    "DeepSeek-V3, a shared expert": (8, 4, DEEPSEEK, (5, 3, 5, 5), {"num_shared_experts": 1}),
    "two nodes, of which a token visits one": (8, 2, NODES, (5, 5, 5, 5), {}),
    "k = 1": (8, 1, QWEN, (6, 6, 6, 6), {}),
    "k = E": (4, 4, None, (3, 3, 3, 3), {}),
    "an expert a rank": (4, 2, None, (4, 4, 4, 4), {}),
    "a rank without tokens": (8, 2, None, (0, 5, 0, 2), {}),
    "no tokens at all": (8, 2, None, (0, 0, 0, 0), {}),
    "all to one expert": (8, 1, QWEN, (5, 5, 5, 5), {"favourites": (3,)}),
    "all to one rank": (8, 2, None, (5, 5, 5, 5), {"favourites": (0, 1)}),
    "capacity": (8, 2, None, (9, 8, 12, 10), {"capacity_factor": 1.0}),
    "capacity, a popular expert": (8, 2, None, (6, 6, 6, 6), {"capacity_factor": 0.75, "favourites": (3,)}),
    "capacity, no tokens": (8, 2, None, (0, 6, 6, 6), {"capacity_factor": 0.75}),
}


def tokens_for(case: str, rank: int, experts: int) -> Tensor:
    """The tokens of a rank; favourites are the experts that all of them would like best."""
    tokens, options = CASES[case][3][rank], CASES[case][4]
    x_TH = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))
    for expert in options.get("favourites", ()):
        x_TH[:, expert] = 5.0  # the router of such a case is the identity
    return x_TH


def layer(case: str) -> MoE:
    experts, k, rules, _, options = CASES[case]
    options = dict(options)
    favourites = options.pop("favourites", ())
    factor = options.pop("capacity_factor", None)
    whole = drawn(MoE(mixture(experts, k, rules, **options), capacity_factor=factor), seed=3)
    if favourites:
        with torch.no_grad():
            whole.router.weight.copy_(torch.eye(experts, HIDDEN))
    return whole


def summed(y_TH: Tensor) -> Tensor:
    """A loss in which every value counts differently."""
    return (y_TH * torch.arange(y_TH.numel(), dtype=y_TH.dtype).cos().view_as(y_TH)).sum()


def one_process(whole: MoE, case: str, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of the tokens of every rank; the parameters' gradients are those of the mean loss."""
    outputs, inputs = [], []
    for rank in range(ranks):
        x = tokens_for(case, rank, 0).requires_grad_()
        y = whole(x)
        summed(y).div(ranks).backward()
        outputs.append(y.detach())
        inputs.append(x.grad * ranks)
    return outputs, inputs


def compare(case: str, ep: int, way: str) -> dict[str, float]:
    """How far this rank is from one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = {axis: own_group(expert_groups(dp=ranks, ep=ep)[axis]) for axis in ("dp", "ep", "edp")}
    whole = layer(case)
    experts, k, rules, _, options = CASES[case]
    extra = {"num_shared_experts": options["num_shared_experts"]} if "num_shared_experts" in options else {}
    hops = None
    if way == "rank":
        hops = rank_hop(experts, groups["ep"])
    elif way == "node":
        nodes = expert_groups(dp=ranks, ep=2)
        hops = node_hops(experts, own_group(nodes["edp"]), own_group(nodes["ep"]))
    part = MoE(
        mixture(experts, k, rules, **extra), groups["ep"], capacity_factor=options.get("capacity_factor"), hops=hops
    ).double()
    part.load_whole(whole.state_dict())
    outputs, inputs = one_process(whole, case, ranks)
    x = tokens_for(case, rank, experts).requires_grad_()
    y = part(x)
    summed(y).backward()
    average_gradients(part, groups["dp"], groups["edp"])
    found = {"y": far(y, outputs[rank]), "x.grad": far(x.grad, inputs[rank])}
    whole_grads = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        truth = whole_grads[name].grad
        found[name] = far(parameter.grad, part.experts.mine(truth) if name.startswith("experts.") else truth)
    found["size"] = max((p.grad.abs().max().item() for p in whole.parameters()), default=0.0)
    return found


def compare_all(ep: int) -> dict[tuple[str, str], dict[str, float]]:
    ways = ["expert", "rank"] + ["node"] * (ep == 4)
    return {(case, way): compare(case, ep, way) for case in CASES for way in ways if CASES[case][0] % ep == 0}


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_equal_to_one_process(ranks, ep):
    for found in on_ranks(compare_all, ranks, ep):
        for case, differences in found.items():
            size = differences.pop("size")
            assert size > 0.1 or case[0] == "no tokens at all", (case, size)
            assert not {n: d for n, d in differences.items() if not d < LIMIT}, (case, differences)
