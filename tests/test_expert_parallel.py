"""The expert parallel toy against one process, against Hugging Face's routers, against FSDP2, and against what it sends.

Comparisons run in float64 on weights of size 1: sums over tokens in another order differ by about 1e-15, and no norm in
fp32 is in the way (the models have LayerNorm). The limit is 1e-12. A slip in the idea (a gradient summed where it is
averaged, a token at the wrong expert) changes a value by a good part of itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lablib.calc.models import Router
from lablib.calc.parallel import dispatch_bytes, expert_capacity, expert_gradient_factor, expert_groups, routed_bytes
from lablib.launch.measure import record_comms
from lablib.toys.expert_parallel import (
    BALANCING,
    Experts,
    Groups,
    MoE,
    MoETransformer,
    TopKRouter,
    average_gradients,
    count_choices,
    dispatch,
    fold,
    grouped_product,
    largest_share,
    load_balancing_loss,
    loop_product,
    moe_forward,
    own_group,
    permute,
    routed_parameters,
    tiny_mixture,
    train_mixture,
    unpermute,
    update_bias,
    within_capacity,
    z_loss,
)
from tests.processes import far, on_ranks

LIMIT = 1e-12
HIDDEN, FFN = 16, 8


@cache
def own_groups(tp: int, dp: int, ep: int) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank by axis, made once."""
    layout = expert_groups(tp=tp, dp=dp, ep=ep)
    return {axis: own_group(layout[axis]) for axis in ("tp", "dp", "ep", "edp")}


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


def compare(case: str, ep: int) -> dict[str, float]:
    """How far this rank is from one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = own_groups(1, ranks, ep)
    whole = layer(case)
    experts, k, rules, _, options = CASES[case]
    extra = {"num_shared_experts": options["num_shared_experts"]} if "num_shared_experts" in options else {}
    factor = options.get("capacity_factor")
    part = MoE(mixture(experts, k, rules, **extra), groups["ep"], capacity_factor=factor).double()
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


def compare_all(ep: int) -> dict[str, dict[str, float]]:
    return {case: compare(case, ep) for case in CASES}


@pytest.mark.drawn
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_equal_to_one_process(ranks, ep):
    for found in on_ranks(AT_ONCE[ranks], ranks):
        found = found[f"equal, ep={ep}"]
        for case, differences in found.items():
            size = differences.pop("size")
            assert size > 0.1 or case == "no tokens at all", (case, size)
            assert not {n: d for n, d in differences.items() if not d < LIMIT}, (case, differences)


#: What the plain function has: Mixtral's router, no capacity, no shared expert.
PLAIN = ("Mixtral", "k = E", "an expert a rank", "a rank without tokens", "no tokens at all", "all to one rank")


def compare_plain(case: str) -> dict[str, float]:
    """How far the plain function is from one process; its gradients are summed here, as `average_gradients` does."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    whole = layer(case)
    experts, k, rules, _, _ = CASES[case]
    assert rules is None
    outputs, inputs = one_process(whole, case, ranks)
    part = Experts(experts, HIDDEN, FFN, group)
    router = whole.router.weight.detach().clone().requires_grad_()
    weights = [part.mine(w.detach()).clone().requires_grad_() for w in whole.experts.parameters()]
    x = tokens_for(case, rank, experts).requires_grad_()
    y = moe_forward(x, router, *weights, k, group)
    summed(y).div(ranks).backward()
    dist.all_reduce(router.grad)
    found = {"y": far(y, outputs[rank]), "x.grad": far(x.grad * ranks, inputs[rank])}
    found["router"] = far(router.grad, whole.router.weight.grad)
    for weight, (name, truth) in zip(weights, whole.experts.named_parameters(), strict=True):
        found[name] = far(weight.grad, part.mine(truth.grad))
    return found


def test_the_plain_function_equals_one_process():
    for found in (all_of["plain"] for all_of in on_ranks(four, 4)):
        assert found.keys() == set(PLAIN)
        for case, differences in found.items():
            assert not {n: d for n, d in differences.items() if not d < LIMIT}, (case, differences)


# Other habits: dtypes, autocast, recomputation, frozen parts


def odd() -> dict[str, object]:
    """What a rank sees where a rank has no tokens, in other dtypes, and with parts that are not trained."""
    from torch.utils.checkpoint import checkpoint

    rank, world, alone = dist.get_rank(), own_groups(1, 4, 4), own_groups(4, 1, 1)["ep"]
    found: dict[str, object] = {}

    def both(dtype: torch.dtype, group: dist.ProcessGroup, **options) -> tuple[MoE, MoE]:
        config = mixture(8, 2, QWEN)
        one, part = MoE(config).to(dtype), MoE(config, group, **options).to(dtype)
        drawn(one.float(), 4)
        one.to(dtype)
        part.load_whole(one.state_dict())
        return one, part

    for dtype, auto in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        products = "grouped" if hasattr(F, "grouped_mm") and not auto and FFN % 8 == 0 else "loop"
        one, part = both(dtype, world["ep"], products=products)
        x = torch.randn(0 if rank == 1 else 6, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(dtype)
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=auto):
            y, expected = part(x), one(x.detach())
        y.sum().backward()  # a gradient that is one number repeated
        assert x.grad is not None
        assert y.dtype == expected.dtype
        found[f"{dtype}, autocast={auto}"] = far(y, expected) / torch.finfo(y.dtype).eps
    for which in ("experts", "router"):
        _, part = both(torch.float32, world["ep"])
        getattr(part, which).requires_grad_(False)
        part(torch.randn(3, HIDDEN)).sum().backward()
        average_gradients(part, world["dp"], world["edp"])
        found[f"frozen {which}"] = [name for name, p in part.named_parameters() if p.grad is not None]
    one, part = both(torch.float32, alone)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        found["a group of one"] = far(part(x), one(x))
    assert part.routing.weights_Tk.grad_fn is None

    seeded = []
    for group in (None, world["ep"]):
        torch.manual_seed(7)
        seeded.append(MoETransformer(model_config(num_shared_experts=1), group))
    whole, state = seeded[0].state_dict(), {n: v.clone() for n, v in seeded[1].state_dict().items()}
    seeded[1].load_whole(whole)
    found["seed"] = max(far(v, state[n]) for n, v in seeded[1].state_dict().items())

    _, part = both(torch.float32, world["ep"])
    grads = []
    for run in (part, lambda x: checkpoint(part, x, use_reentrant=False)):
        part.zero_grad()
        for _ in range(2):  # two micro-batches add up
            run(x).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in part.parameters()]))
    found["recomputed"] = far(*grads)
    return found


def test_other_habits():
    """The same products in the same dtype: weighted sums of two rows differ by some roundings."""
    for found in (all_of["odd"] for all_of in on_ranks(four, 4)):
        assert found.pop("frozen experts") == ["router.weight"]
        assert found.pop("frozen router") == ["experts.gate", "experts.up", "experts.down"]
        assert found.pop("a group of one") < 1e-5
        assert found.pop("recomputed") == 0
        assert found.pop("seed") == 0  # a seed gives the same model on any number of ranks
        assert len(found) == 4
        assert max(found.values()) < 100, found


# The router: the choices and weights of Hugging Face's classes


def theirs(name: str, module: str, **fields) -> torch.nn.Module:
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    sizes = {"num_experts_per_tok": 4, "num_local_experts": 8, "num_experts": 8, "hidden_size": HIDDEN}
    return getattr(models, name)(SimpleNamespace(**(sizes | fields)))


def rules_of(name: str) -> tuple[torch.nn.Module, Router]:
    if name == "Mixtral":
        return theirs("MixtralTopKRouter", "mixtral"), Router()
    if name.startswith("Qwen3"):
        normalized = name.endswith("normalized")
        return theirs("Qwen3MoeTopKRouter", "qwen3_moe", norm_topk_prob=normalized), Router(normalized=normalized)
    fields = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    rules = Router(score="sigmoid", bias=True, groups=4, group_topk=2, scale=2.5)
    return theirs("DeepseekV3TopkRouter", "deepseek_v3", **fields), rules


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3", "Qwen3 normalized", "DeepSeek-V3"])
def test_the_router_is_that_of_hugging_face(name):
    """In fp32, as theirs: the same operations, so the weights differ by a few units in the last place, 1e-6 at most."""
    other, rules = rules_of(name)
    ours = TopKRouter(HIDDEN, 8, 4, rules)
    torch.manual_seed(0)
    x_TH = torch.randn(50, HIDDEN)
    with torch.no_grad():
        ours.weight.normal_()
        other.weight.copy_(ours.weight)
        if rules.bias:
            ours.bias_E.normal_()
            other.e_score_correction_bias.copy_(ours.bias_E)
        weights_Tk, chosen_Tk = ours(x_TH)
        _, their_weights, their_choice = other(x_TH)
    # Theirs are in no order with DeepSeek-V3: compare expert by expert.
    spread = torch.zeros(50, 8).scatter(1, chosen_Tk, weights_Tk)
    assert far(spread, torch.zeros(50, 8).scatter(1, their_choice, their_weights.float())) < 1e-6


@pytest.mark.parametrize("auto", [False, True])
def test_a_router_multiplies_in_fp32(auto):
    """In bf16 some tokens have equal scores at the k-th place: a few percent, and one in a million in fp32."""
    torch.manual_seed(0)
    router, x_TH = TopKRouter(64, 256, 8), torch.randn(500, 64)
    if not auto:
        router, x_TH = router.bfloat16(), x_TH.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=auto):
        logits_TE, rounded_TE = router.logits(x_TH), F.linear(x_TH, router.weight)
    assert torch.equal(logits_TE, F.linear(x_TH.float(), router.weight.float()))
    ties = [(v[:, 7] == v[:, 8]).sum().item() for v in (logits_TE.topk(9).values, rounded_TE.topk(9).values)]
    assert ties[0] <= 1 < 10 < ties[1]


def test_a_bias_chooses_and_does_not_weigh():
    router = TopKRouter(HIDDEN, 8, 2, Router(score="sigmoid", normalized=False, bias=True)).double()
    x_TH = torch.randn(30, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    router.bias_E[5] = 10.0
    weights_Tk, chosen_Tk = router(x_TH)
    assert (chosen_Tk[:, 0] == 5).all()
    assert torch.equal(weights_Tk[:, 0], router.scores(router.logits(x_TH))[:, 5])
    assert "bias_E" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_a_token_keeps_to_its_nodes():
    """Against a plain search: of all pairs of nodes, the one whose two best experts each are worth most."""
    nodes, most, k, experts = 4, 2, 4, 16
    router = TopKRouter(HIDDEN, experts, k, Router(score="sigmoid", groups=nodes, group_topk=most)).double()
    with torch.no_grad():
        router.weight.normal_()
    x_TH = torch.randn(40, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores_TE = router.scores(router.logits(x_TH)).detach()
    free = TopKRouter(HIDDEN, experts, k, Router(score="sigmoid")).double()
    spread = [len(set((choice // 4).tolist())) for choice in free.choose(scores_TE)[1]]
    assert max(spread) > most
    for scores, chosen in zip(scores_TE, router.choose(scores_TE)[1], strict=True):
        worth = {n: sum(sorted(scores[4 * n : 4 * n + 4].tolist())[-k // most :]) for n in range(nodes)}
        best = max(itertools.combinations(range(nodes), most), key=lambda pair: sum(worth[n] for n in pair))
        allowed = [e for n in best for e in range(4 * n, 4 * n + 4)]
        assert set(chosen.tolist()) == set(sorted(allowed, key=lambda e: scores[e].item())[-k:])


# Balance


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_balance_loss_is_that_of_hugging_face(k):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits_TE = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
    scores_TE = logits_TE.softmax(dim=-1)
    chosen_Tk = scores_TE.topk(k).indices
    expected = mixtral.load_balancing_loss_func((logits_TE,), 8, k) / k
    assert load_balancing_loss(scores_TE, chosen_Tk).item() == pytest.approx(expected.item(), rel=1e-6)


def test_what_balance_is():
    even = torch.arange(8).view(4, 2)
    one = torch.zeros(4, 1, dtype=torch.int64)
    flat, sure = torch.full((4, 8), 0.125), F.one_hot(one[:, 0], 8).float()
    assert load_balancing_loss(flat, even).item() == pytest.approx(1)
    assert load_balancing_loss(sure, one).item() == pytest.approx(8)
    pairs = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0, 1]], dtype=torch.float64)
    below = load_balancing_loss(pairs, pairs.argmax(-1, keepdim=True)).item()
    assert below == pytest.approx(2 * (2 * 1.02 + 1.98) / 9, rel=1e-15)  # 0.893: 1 is no floor, and f is in fp64 too
    assert largest_share(count_choices(one, 8)) == 1
    logits = torch.randn(5, 8, dtype=torch.float64)
    assert z_loss(logits).item() == pytest.approx((logits.exp().sum(-1).log() ** 2).mean().item())


def test_the_bias_moves_towards_the_mean():
    router = TopKRouter(HIDDEN, 4, 1, Router(score="sigmoid", bias=True))
    update_bias(router, torch.tensor([6, 2, 4, 4]), speed=0.5)
    assert router.bias_E.tolist() == [-0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"Router\(bias=True\)"):
        update_bias(TopKRouter(HIDDEN, 4, 1), torch.tensor([6, 2, 4, 4]), speed=0.5)
    with pytest.raises(ValueError, match=r"bias_E = router\.bias_E\.float"):
        update_bias(router.bfloat16(), torch.tensor([6, 2, 4, 4]), speed=0.5)


# Sorting and products


def test_the_example_of_sorting():
    x_TH = torch.tensor([[1.0], [2.0], [3.0]])
    chosen_Tk = torch.tensor([[2, 0], [0, 1], [0, 2]])
    rows_RH, counts_E, order_R = permute(x_TH, chosen_Tk, 3)
    assert rows_RH.flatten().tolist() == [1, 2, 3, 2, 1, 3]
    assert counts_E.tolist() == [3, 1, 2]
    assert order_R.tolist() == [1, 2, 4, 3, 0, 5]
    weights_Tk = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    assert torch.equal(unpermute(rows_RH, order_R, weights_Tk), x_TH)


def queue_by_hand(chosen: list[list[int]], capacity: int) -> list[list[bool]]:
    """GShard's algorithm, choice by choice."""
    tokens, k = len(chosen), len(chosen[0])
    queue = [(j, t) for j in range(k) for t in range(tokens)]
    taken: dict[int, int] = {}
    kept = [[False] * k for _ in range(tokens)]
    for j, t in queue:
        taken[chosen[t][j]] = taken.get(chosen[t][j], 0) + 1
        kept[t][j] = taken[chosen[t][j]] <= capacity
    return kept


@pytest.mark.parametrize("k", [1, 2, 5])
def test_who_is_dropped(k):
    scores_TE = torch.rand(30, 5, generator=torch.Generator().manual_seed(k))
    chosen_Tk = scores_TE.topk(k).indices
    capacity = expert_capacity(30, 5, k, 0.9)
    kept_Tk = within_capacity(chosen_Tk, 5, capacity)
    assert kept_Tk.tolist() == queue_by_hand(chosen_Tk.tolist(), capacity)
    assert not kept_Tk.all()
    counts_E = permute(torch.zeros(30, 1), chosen_Tk, 5, kept_Tk)[1]
    assert max(counts_E.tolist()) == capacity


def test_a_dropped_token_has_the_residual_only():
    moe = drawn(MoE(mixture(4, 1, QWEN), capacity_factor=1.0), 0)
    with torch.no_grad():
        moe.router.weight.zero_()  # a tie: topk takes the same expert for all
    x_TH = torch.randn(8, HIDDEN, dtype=torch.float64)
    y_TH = moe(x_TH)
    assert moe.routing.dropped == 6
    assert torch.equal(y_TH[2:], torch.zeros_like(y_TH[2:]))
    assert y_TH[:2].abs().min() > 0


def by_hand(moe: MoE, x_TH: Tensor) -> Tensor:
    """Every token by itself, through each expert that it chose."""
    experts, lines = moe.experts, []
    for x_H, weights_k, chosen_k in zip(x_TH, *moe.router(x_TH), strict=True):
        y_H = torch.zeros_like(x_H)
        for weight, e in zip(weights_k, chosen_k.tolist(), strict=True):
            y_H = y_H + weight * (experts.down[e] @ (F.silu(experts.gate[e] @ x_H) * (experts.up[e] @ x_H)))
        lines.append(y_H)
    return torch.stack(lines)


@pytest.mark.parametrize("case", ["Mixtral", "DeepSeek-V3, a shared expert", "k = 1", "k = E", "all to one expert"])
def test_one_process_equals_a_loop_over_tokens(case):
    moe, x = layer(case), tokens_for(case, 0, 8)
    moe.shared = None
    found = []
    for way in (moe, lambda x: by_hand(moe, x)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = way(leaf)
        summed(y).backward()
        found.append([y.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())])
    assert max(far(a, b) for a, b in zip(*found, strict=True)) < LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 9), (0, 0, 0, 0)])
def test_grouped_products_are_the_loop(counts, dtype):
    """Exactly, on this CPU, where grouped_mm is a loop; elsewhere sums of 8 and 9 terms in another order are as good."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped_mm")
    torch.manual_seed(0)
    rows, weight = torch.randn(sum(counts), 8, dtype=dtype), torch.randn(4, 16, 8, dtype=dtype)
    found = []
    for product in (loop_product, grouped_product):
        a, b = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(a, b, torch.tensor(counts))
        y.sum().backward()  # one number repeated, which grouped_mm alone refuses
        found.append((y.detach(), a.grad, b.grad))
    limit = 64 * torch.finfo(dtype).eps
    assert max(far(a, b) for a, b in zip(*found, strict=True)) <= limit


# Gradients: what is right, and the mistakes that run


def scaled(mistake: str) -> dict[str, float]:
    """How far the gradients of the experts are from those of one process, and from twice as much."""
    ranks, rank = 4, dist.get_rank()
    groups = own_groups(1, 4, 2)
    whole = layer("Mixtral")
    part = MoE(mixture(), groups["ep"]).double()
    part.load_whole(whole.state_dict())
    one_process(whole, "Mixtral", ranks)
    summed(part(tokens_for("Mixtral", rank, 8))).backward()
    if mistake == "none":
        average_gradients(part, groups["dp"], groups["edp"])
    else:
        group = groups["dp"] if mistake == "experts over dp" else groups["edp"]
        for p in routed_parameters(part):
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()
    truth = {n: part.experts.mine(p.grad) for n, p in whole.experts.named_parameters()}
    ours = {n: p.grad for n, p in part.experts.named_parameters()}
    return {
        "far": max(far(ours[n], truth[n]) for n in truth),
        "far from double": max(far(ours[n], 2 * truth[n]) for n in truth),
        "size": min(truth[n].abs().max().item() for n in truth),
    }


def mistakes() -> dict[str, dict[str, float]]:
    return {name: scaled(name) for name in ("none", "mean over edp", "experts over dp")}


def test_what_experts_are_divided_by():
    for found in (all_of["mistakes"] for all_of in on_ranks(four, 4)):
        assert found["none"]["far"] < LIMIT
        assert found["none"]["size"] > 0.1
        # The mean over edp is ep = 2 times too large, in every value alike ...
        assert found["mean over edp"]["far from double"] < LIMIT
        assert expert_gradient_factor(dp=4, ep=2) == 1 / 2
        # ... and the mean over dp mixes experts that have nothing to do with each other, at the right scale.
        assert found["experts over dp"]["far"] > 0.1
        assert found["experts over dp"]["far from double"] > 0.1


# The model: training steps, folding, FSDP2


def model_config(**overrides):
    return mixture(num_kv_heads=2, ffn=24, norm="layernorm", vocab=40, **overrides)


def drawn_model(**options) -> MoETransformer:
    return drawn(MoETransformer(model_config(num_shared_experts=1, num_layers=2), **options), 5)


def windows(replicas: int) -> Tensor:
    return torch.randint(0, 40, (replicas, 2, 9), generator=torch.Generator().manual_seed(6))


def mean_loss(model, tokens_BT: Tensor) -> Tensor:
    """The loss in float64; `Transformer.loss` goes through fp32."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def truth(replicas: int, balance: bool) -> dict[str, Tensor]:
    whole = drawn_model()
    loss = mean_loss(whole, windows(replicas).flatten(0, 1))
    if balance:
        loss = loss + 0.1 * whole.balance_loss() + 0.01 * whole.z_loss()
    loss.backward()
    return {n: p.grad for n, p in whole.named_parameters()}


def differences(part, grads: dict[str, Tensor], whole: Callable[[str, Tensor], Tensor]) -> dict[str, float]:
    """How far each gradient is, this rank's part for experts and the whole one, by `whole(name, grad)`, for the rest."""
    owners = {f"{m}.{n}": e for m, e in part.named_modules() if isinstance(e, Experts) for n, _ in e.named_parameters()}
    found = {}
    for name, p in part.named_parameters():
        ours = p.grad if name in owners else whole(name, p.grad)
        found[name] = far(ours, owners[name].mine(grads[name]) if name in owners else grads[name])
    return found


def folded() -> dict[str, float]:
    """Attention tp=2 and dp=2, experts ep=4 with no tp in them."""
    groups = own_groups(2, 2, 4)
    part = fold(drawn_model(), groups["tp"], groups["ep"])
    part.loss(windows(2)[groups["dp"].rank()]).backward()
    average_gradients(part, groups["dp"], groups["edp"])
    return differences(part, truth(2, balance=False), part.gather)


def replicated(counted: bool) -> dict[str, float]:
    """dp=4 and ep=2, with both losses of the router; f is counted over dp, or by each rank for itself."""
    groups = own_groups(1, 4, 2)
    part = MoETransformer(model_config(num_shared_experts=1, num_layers=2), groups["ep"]).double()
    part.load_whole(drawn_model().state_dict())
    loss = mean_loss(part, windows(4)[dist.get_rank()])
    (loss + 0.1 * part.balance_loss(groups["dp"] if counted else None) + 0.01 * part.z_loss()).backward()
    average_gradients(part, groups["dp"], groups["edp"])
    return differences(part, truth(4, balance=True), lambda _, grad: grad)


def fsdp(factor: bool) -> dict[str, float]:
    """PyTorch's FSDP2: experts sharded over edp, the rest over dp, in the model that has the ep ranks' all-to-all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    part = MoETransformer(model_config(num_shared_experts=1, num_layers=2), mesh["ep"].get_group()).double()
    part.load_whole(drawn_model().state_dict())
    mine = {n: m.mine for n, m in part.named_modules() if isinstance(m, Experts)}
    for moe in part.mixtures:
        fully_shard(moe.experts, mesh=mesh["edp"])
        if factor:
            moe.experts.set_gradient_divide_factor(4.0)  # dp, and not the 2 ranks of the mesh
    fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    mean_loss(part, windows(4)[dist.get_rank()]).backward()
    grads, found = truth(4, balance=False), {}
    for name, p in part.named_parameters():
        owner = name.rpartition(".")[0]
        found[name] = far(p.grad.full_tensor(), mine[owner](grads[name]) if owner in mine else grads[name])
    return found


def models() -> dict[str, dict[str, float]]:
    return {
        "folded": folded(),
        "replicated": replicated(counted=True),
        "counted alone": replicated(counted=False),
        "fsdp": fsdp(factor=True),
        "fsdp, divided by edp": fsdp(factor=False),
    }


@pytest.mark.parametrize("way", ["folded", "replicated", "fsdp"])
def test_the_model_equals_one_process(way):
    for found in (all_of["models"] for all_of in on_ranks(four, 4)):
        assert len(found[way]) == 34
        assert not {n: d for n, d in found[way].items() if not d < LIMIT}


def test_what_models_get_wrong():
    sizes = {n: g.abs().max().item() for n, g in truth(4, balance=False).items()}
    for found in (all_of["models"] for all_of in on_ranks(four, 4)):
        # A loss over each rank's own tokens asks more of the router than one over the batch.
        assert found["counted alone"]["blocks.1.mlp.router.weight"] > 1e-4
        # FSDP divides by the ranks of its mesh, edp = 2, where dp = 4 is right: experts are twice too large.
        for name, distance in found["fsdp, divided by edp"].items():
            expected = sizes[name] if ".experts." in name else 0
            assert distance < LIMIT or 0.1 * expected < distance <= expected * (1 + 1e-9), name


def test_what_adds_to_the_stream_is_drawn_smaller():
    """As GPT-2 does. The mean of 2048 squares is right within sqrt(2 / 2048) = 3 percent, and this is three times that."""
    torch.manual_seed(0)
    model = MoETransformer(tiny_mixture(num_layers=2, hidden=64, expert_ffn=32, num_experts=1, experts_per_token=1))
    for moe in model.mixtures:
        assert moe.experts.down.square().mean().item() == pytest.approx(0.02**2 / 4, rel=0.1)
        assert moe.experts.up.square().mean().item() == pytest.approx(0.02**2, rel=0.1)


# What is sent


E, K, EP = 8, 2, 4  # experts, of a token, ranks: two nodes of two


def every_choice(limit: int | None) -> Tensor:
    """A token for every set of k experts, of all or of one node, so that a mean over choices is what one rank sends."""
    pools = [range(E)] if limit is None else [range(E // 2), range(E // 2, E)]
    sets = [chosen for pool in pools for chosen in itertools.combinations(pool, K)]
    return torch.stack([F.one_hot(torch.tensor(chosen), HIDDEN).sum(0) for chosen in sets]).double()


def sent() -> dict[int | None, dict[str, float]]:
    """Bytes that this rank sends, by limit of nodes, and calls."""
    ep = own_groups(1, EP, EP)["ep"]
    found = {}
    for limit in (None, 1):
        rules = Router(score="sigmoid", groups=2, group_topk=limit) if limit else None
        moe = MoE(mixture(E, K, rules), ep).double()
        with torch.no_grad():
            moe.router.weight.copy_(torch.eye(E, HIDDEN))
        with record_comms() as log:
            summed(moe(every_choice(limit).requires_grad_())).backward()
        assert set(log.calls) == {"all_to_all"}
        found[limit] = {"bytes": sum(e.sent for e in log.events), "calls": len(log.events)}
    return found


@pytest.mark.parametrize("limit", [None, 1])
def test_bytes_are_as_predicted(limit):
    """To the byte. Beside the values of the stream, counts are sent first."""
    value, tokens, whole_number = 8, len(every_choice(limit)), 8
    sizes = {"num_experts": E, "experts_per_token": K, "ep": EP, "ranks_per_node": 2, "node_limit": limit}
    predicted = routed_bytes(tokens, HIDDEN, **sizes, way="expert", value=value)
    for found in (all_of["sent"] for all_of in on_ranks(four, EP)):
        counts = whole_number * E * (EP - 1) / EP
        assert found[limit]["bytes"] == pytest.approx(predicted.total + counts, rel=1e-12)
        assert found[limit]["calls"] == 5  # counts; rows there and back; their gradients
    if limit is None:
        assert predicted.total == dispatch_bytes(tokens, K, HIDDEN, EP, value=value)


# Training: a router that collapses, and two cures


def trained() -> dict[str, list]:
    groups = Groups(*(own_groups(1, 4, 4)[axis] for axis in ("dp", "ep", "edp")))
    return {balancing: train_mixture(balancing, groups, steps=25) for balancing in BALANCING}


def test_a_router_collapses_and_is_cured():
    """Eight experts, two a token: an even share is 1/8, and 1/2 is as much as one expert can have."""
    runs = on_ranks(four, 4)[0]["trained"]
    assert runs == on_ranks(four, 4)[3]["trained"]  # what a step saw is the same on every rank
    last = {balancing: steps[-1] for balancing, steps in runs.items()}
    assert max(abs(last[balancing].loss - last["none"].loss) for balancing in BALANCING) < 0.1
    assert last["none"].loss < 0.7 * runs["none"][0].loss
    for steps in runs.values():
        assert all(sum(layer) == 32 * 32 * 2 for step in steps for layer in step.counts)

    def late(balancing: str, what: str) -> float:
        return sum(getattr(step, what) for step in runs[balancing][-5:]) / 5

    assert late("none", "share") > 0.45
    assert late("none", "starving") > 1
    for balancing in ("loss", "bias"):
        assert late(balancing, "share") < 0.33
        assert late(balancing, "starving") < 0.5


def test_one_process_trains_as_four():
    """In fp32; the first steps only, since a difference of one rounding sooner or later changes a choice."""
    alone, ours = train_mixture("bias", steps=3), on_ranks(four, 4)[0]["trained"]["bias"][:3]
    assert [a.loss for a in alone] == pytest.approx([o.loss for o in ours], abs=1e-4)
    assert alone[0].counts == ours[0].counts


# What is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TopKRouter(16, 4, 5), "k=5 experts of a token, but experts=4; use 1 to 4"),
        (lambda: TopKRouter(16, 8, 0), "k=0 must be"),
        (lambda: TopKRouter(16, 8, 2, Router(score="tanh")), "unknown score 'tanh'"),
        (lambda: TopKRouter(16, 8, 2, Router(groups=3, group_topk=1)), "nodes=3 does not divide experts=8"),
        (lambda: TopKRouter(16, 8, 3, Router(groups=4, group_topk=2)), "nodes of a token=2 does not divide k=3"),
        (lambda: TopKRouter(16, 8, 4, Router(groups=4, group_topk=1)), "let a token visit 2 or more"),
        (lambda: TopKRouter(16, 8, 4, Router(groups=4, group_topk=5)), "nodes of a token=5"),
        (lambda: Experts(8, 16, 0), "ffn=0 must be"),
        (lambda: Experts(8, 16, 4, products="fast"), "unknown products 'fast'"),
        (lambda: MoE(mixture(), capacity_factor=0), "capacity_factor=0 must be a number above 0"),
        (lambda: MoE(tiny_mixture(num_experts=0, experts_per_token=0, expert_ffn=0)), "has no experts"),
        (lambda: MoE(mixture(gated_mlp=False)), "use gated_mlp=True"),
        (lambda: MoE(mixture(router_bias=True)), "use router_bias=False"),
        (lambda: MoETransformer(mixture(num_dense_layers=9)), "num_dense_layers=9"),
        (lambda: permute(torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.int64), 4), r"\(4, 2\) choices do not fit 3"),
        (lambda: Experts(4, 16, 8)(torch.zeros(3, 16), torch.tensor([1, 1, 0, 0])), "do not fit 3 rows"),
        (lambda: grouped_product(torch.zeros(3, 6), torch.zeros(2, 8, 6), torch.tensor([1, 2])), "use inputs=8 or"),
        (lambda: MoETransformer(mixture(num_dense_layers=2)), "leaves none of num_layers=2"),
        (lambda: MoETransformer(mixture()).balance_loss(), "run the model first"),
        (lambda: train_mixture("prayer"), "unknown balancing 'prayer'"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_grouped_products_say_what_they_need(monkeypatch):
    moe = MoE(mixture(), products="grouped").double()
    with pytest.raises(ValueError, match=r"fp32, bf16 and fp16, not torch\.float64"):
        moe(torch.zeros(2, HIDDEN, dtype=torch.float64))
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    with pytest.raises(ValueError, match=r"has no torch\.nn\.functional\.grouped_mm; use products='loop'"):
        moe.float()(torch.zeros(2, HIDDEN))


def refused() -> list[str]:
    """Sizes that do not fit four ranks, before anything is sent."""
    said = []
    for make in (
        lambda: MoE(mixture(6), dist.group.WORLD),
        lambda: dispatch(torch.zeros(6, 2), torch.ones(6, dtype=torch.int64), dist.group.WORLD),
        lambda: own_group([[0, 1], [1, 2, 3]]),
        lambda: train_mixture("loss", Groups(*[dist.group.WORLD] * 3), batch=30),
    ):
        with record_comms() as log, pytest.raises(ValueError) as error:  # noqa: PT011
            make()
        assert not log.calls
        said.append(str(error.value))
    return said


def test_sizes_are_refused_before_anything_is_sent():
    for said in (all_of["refused"] for all_of in on_ranks(four, 4)):
        assert all("ep=4 does not divide experts=6; use 1, 2, 3 or 6" in message for message in said[:2])
        assert "must name each of the 4 ranks once" in said[2]
        assert "dp=4 does not divide batch=30" in said[3]


# One start of the ranks for all of it


def two() -> dict[str, object]:
    return {"equal, ep=2": compare_all(2)}


def four() -> dict[str, object]:
    return {
        "equal, ep=4": compare_all(4),
        "equal, ep=2": compare_all(2),
        "plain": {case: compare_plain(case) for case in PLAIN},
        "mistakes": mistakes(),
        "models": models(),
        "sent": sent(),
        "trained": trained(),
        "refused": refused(),
        "odd": odd(),
    }


AT_ONCE = {2: two, 4: four}
