"""The checks of rung 13: a route, bytes of a layer, a step on two grids, and a job with a fault."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.layouts import Mesh
from lablib.calc.parallel import routed_bytes
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    agreed,
    as_float,
    ask_ranks,
    by_name,
    check,
    close,
    close_bytes,
    numbers,
    on_ranks,
    pair,
    recognize,
    refuse,
    some,
    whole,
)
from lablib.toys.expert_parallel import MoE, combine, dispatch, loop_product, permute, tiny_mixture
from lablib.toys.tensor_parallel import gather_from_sp, scatter_to_sp

__all__ = ["FoldedJob", "MixtureJob", "expert_bytes", "find_fault", "folded_step", "route"]


def _in_own_lines(answer: object, *made: str) -> None:
    """Raise `Wrong` if an answer has called these functions or classes of lablib, which are the exercise."""
    for name in getattr(answer, "called", ()):
        if name.startswith("lablib.") and (used := set(made) & set(name.split("."))):
            raise Wrong(f"`{used.pop()}` of lablib answers here: write what it does in your own lines.")


# --- a route ------------------------------------------------------------------------------------------------

#: Scores of four tokens by hand. The bias moves the first, not if it is added to the logits; with these it moves the
#: second, and the third if its sign is wrong. The last one's experts are 2 and 3, which are no numbers counted from 1.
#: Their logits are these logarithms and 1 more, which no softmax sees and every sigmoid does.
_SCORES = ((0.4, 0.3, 0.2, 0.1), (0.42, 0.21, 0.19, 0.18), (0.4, 0.2, 0.22, 0.18), (0.1, 0.2, 0.3, 0.4))
_BIAS = (0.0, 0.0, 0.15, 0.0)


@check(
    idea="The router's softmax gives each expert a score; the bias says who is busy, and is nothing that the model learns.",
    section="The router: scores, top-k, and a gradient through the chosen weights",
    line="Take the k largest of score + bias, then divide the scores of the chosen, without bias, by their sum.",
)
def route(answer: Callable[[Tensor, Tensor, int], Any], seed: int = 13) -> str:
    """Judge `route(logits, bias, k)` by its experts and by their weights: four tokens by hand first."""
    dice = torch.Generator().manual_seed(seed)
    cases = [(1 + torch.tensor(_SCORES).log(), torch.tensor(_BIAS), 2)]
    for tokens, experts, k in ((3, 4, 1), (5, 4, 2), (7, 8, 3), (1, 6, 6), (16, 32, 4)):
        bias = 0.1 * torch.randn(experts, generator=dice)
        cases.append((2 * torch.randn(tokens, experts, generator=dice), bias, k))
    rows, mixed = (NEW.sample(range(4), 4) for _ in "TE")
    cases.append(((cases[0][0] + NEW.random())[rows][:, mixed], cases[0][1][mixed], 2))
    for logits, bias, k in cases:
        _judge_route(answer(logits.clone(), bias.clone(), k), logits, bias, k)
    _in_own_lines(answer, "MoE", "MoETransformer", "TopKRouter")
    return f"{len(cases)} routers: the bias chooses, and the scores weigh."


def _judge_route(got: Any, logits: Tensor, bias: Tensor, k: int) -> None:
    tokens, experts = logits.shape
    case = f"{tokens} tokens, {experts} experts, k = {k}"
    weights, chosen = _pair_of_rows(got, tokens, k, case)
    if not all(w.is_integer() for row in chosen for w in row) and all(e.is_integer() for row in weights for e in row):
        raise Wrong("The weights come first, then the experts: return weights, chosen.")
    chosen = [[whole(expert, "A chosen expert") for expert in row] for row in chosen]
    for token, row in enumerate(chosen):
        refuse(
            case,
            (f"Token {token} goes to {row}: experts are counted from 0 to {experts - 1}",
             not all(0 <= expert < experts for expert in row)),
            (f"Token {token} goes to one expert twice: k experts are {k} different ones", len(set(row)) < k),
        )  # fmt: skip
    scores, found = logits.softmax(-1), [set(row) for row in chosen]
    if found != (right := _best(scores + bias, k)):
        _explain_choice(found, right, logits, scores, bias, k, case)
    for token, (row, shares) in enumerate(zip(chosen, weights, strict=True)):
        truth = scores[token, row] / scores[token, row].sum()
        if not _alike(shares, truth):
            _explain_weights(shares, truth, row, token, logits, scores, bias, case)


def _pair_of_rows(got: Any, tokens: int, k: int, case: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return both halves of a route as lists of numbers."""
    otherwise = "Return a pair, weights and chosen, each with a row for each token."
    halves = []
    for name, half in zip(("weights", "chosen"), pair(got, otherwise, "weights", "chosen"), strict=True):
        rows = numbers(half, f"`{name}`")
        found = [numbers(row, f"A row of `{name}`") for row in rows]
        if len(found) != tokens or any(len(row) != k for row in found):
            raise Wrong(f"`{name}` has a row for each of {tokens} tokens, with {k} numbers in it ({case}).")
        halves.append([[as_float(value, f"What `{name}` holds") for value in row] for row in found])
    return halves[0], halves[1]


def _best(values: Tensor, k: int) -> list[set[int]]:
    return [set(row) for row in values.topk(k, dim=-1).indices.tolist()]


def _alike(a: Sequence[float], b: Tensor) -> bool:
    """A score in bf16 has two digits and a half; by hand the slips differ by more."""
    return torch.allclose(torch.tensor(a, dtype=torch.float64), b.double(), rtol=1e-2, atol=1e-3)


def _explain_choice(
    found: list[set[int]], right: list[set[int]], logits: Tensor, scores: Tensor, bias: Tensor, k: int, case: str
) -> NoReturn:
    slips = [
        ("These are the largest scores, whatever the bias: it is added before the choice", scores),
        ("This is the choice of logits + bias, or of too little bias: add the whole bias to the scores", logits + bias),
        ("These are the largest scores - bias: an expert with a positive bias is to get more tokens", scores - bias),
        ("These are the experts with the smallest numbers", -(scores + bias)),
        ("These are choices of a softmax over the tokens: it runs over a token's experts", logits.softmax(0) + bias),
        ("These are the largest biases, whatever the scores", bias.expand_as(scores)),
        ("These are the choices of sigmoids: scores are the softmax of the logits", logits.sigmoid() + bias),
    ]
    recognize(found, case, slips, lambda given, values: given == _best(values, k))
    token = next(i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b)
    raise Wrong(f"Token {token} goes to experts {sorted(right[token])}, whose score + bias is largest, and here to "
                f"{sorted(found[token])} ({case}).")  # fmt: skip


def _explain_weights(
    shares: list, truth: Tensor, row: list[int], token: int, logits: Tensor, scores: Tensor, bias: Tensor, case: str
) -> NoReturn:
    score, logit, helped = scores[token, row], logits[token, row], (scores + bias)[token, row]
    slips = [
        ("These are the scores as they are: divide them by the sum of the chosen ones, so that they add up to 1", score),
        ("The bias is in the weights: it chooses, and the scores weigh", helped / helped.sum()),
        ("The bias is in the weights, and they do not add up to 1: the scores of the chosen over their sum", helped),
        ("The bias is in the weights, through a softmax: the softmax of the logits alone is the score", helped.softmax(0)),
        ("The bias is in the logits of the weights: it only chooses", (logits + bias)[token, row].softmax(0)),
        ("A softmax of the scores is a second softmax: divide the chosen scores by their sum", score.softmax(0)),
        ("These are percent: they should add up to 1", 100 * truth),
        ("The scores are divided by k: divide them by the sum of the chosen ones", score / len(row)),
        ("All chosen experts weigh the same here: scores weigh them", torch.full_like(truth, 1 / len(row))),
        ("These are logits: the weights are their softmax over the chosen experts", logit),
        ("The scores are sigmoids here: they are the softmax of the logits", logit.sigmoid() / logit.sigmoid().sum()),
    ]  # fmt: skip
    recognize(shares, "", [(f"The experts are right. {sentence}", values) for sentence, values in slips], _alike)
    told, should = (", ".join(f"{value:.3f}" for value in each) for each in (shares, truth.tolist()))
    refuse(
        case,
        ("The weights are those of other experts: weight i belongs to chosen expert i, and here they have another order",
         _alike(sorted(shares), truth.sort().values)),
        (f"The experts are right. Token {token} weighs them {told}, and should weigh them {should}", True),
    )  # fmt: skip


# --- bytes of a layer ---------------------------------------------------------------------------------------

_KEYS = ("inside", "across", "once")

#: The first case: 11 nodes of 6 ranks. No two mistakes of `_slips` give the same number; few factors are 2, 3 or 4.
FIRST = (1000, 70, 198, 7, 66, 6)


def _true_bytes(tokens: int, size: int, experts: int, k: int, ep: int, per_node: int) -> dict[str, float]:
    layer = {"num_experts": experts, "experts_per_token": k, "ep": ep, "ranks_per_node": per_node, "value": 1}
    every = routed_bytes(tokens, size, **layer)
    once = routed_bytes(tokens, size, **layer, way="node").across
    return {"inside": every.inside, "across": every.across, "once": once}


@check(
    idea="A token goes to k experts and comes back, in forward and in backward: four ways, less what stays where it is.",
    section="All-to-all of tokens: bytes by degree, once per node",
    line="k (g-1)/e copies of a token go to the g - 1 others of its node, k (e-g)/e to other nodes; with one copy for a node it is "
    "(n-1) times the chance 1 - C(E - E/n, k)/C(E, k) that a node has any of its experts.",
)
def expert_bytes(answer: Callable[..., Mapping[str, float]], seed: int = 13) -> str:
    """Judge `expert_bytes(tokens, size, experts, k, ep, per_node)`: inside the node, over the network, and sent once."""
    cases = [
        FIRST,
        (4096, 14336, 256, 8, 64, 8),
        (4096, 8192, 8, 2, 8, 8),
        (512, 2048, 4, 1, 4, 2),
        (64, 128, 4, 4, 1, 1),
    ]
    for dice in [random.Random(seed)] * 13 + [NEW] * 2:
        nodes, per_node = dice.choice((1, 2, 3, 4, 8)), dice.choice((1, 2, 4, 8))
        experts = nodes * per_node * dice.choice((1, 2, 4))
        k = dice.randint(1, min(experts, 8))
        cases.append((dice.randint(50, 5000), 2 * dice.randint(8, 8192), experts, k, nodes * per_node, per_node))
    for case in cases:
        got, truth = by_name(answer(*case), *_KEYS), _true_bytes(*case)
        for key in _KEYS:
            if not close_bytes(got[key], truth[key]):
                _explain_bytes(key, float(got[key]), truth[key], case)
    _in_own_lines(answer, "chance_met", "dispatch_bytes", "routed_bytes")
    return f"{len(cases)} layers: what stays in the node, what leaves it, and what is left if a node is sent one copy."


def _slips(key: str, tokens: int, size: int, experts: int, k: int, ep: int, per_node: int) -> list[tuple[str, float]]:
    """What to say of a mistake, and the bytes that it gives."""
    nodes = ep // per_node
    ways = "A token goes out and comes back, in forward and in backward: four ways, and this is as much as"
    all_ways = 4 * tokens * size
    right = _true_bytes(tokens, size, experts, k, ep, per_node)[key]
    found = [
        (f"{ways} two", right / 2),
        (f"{ways} one", right / 4),
        (f"{ways} three", 3 * right / 4),
        (f"{ways} six, as if the layer ran again", 3 * right / 2),
        ("Twice too many: count what it sends, four ways, not what it receives; `size` is in bytes already", 2 * right),
        ("This is one token's part: a rank has `tokens` of them", right / tokens),
        *((f"Return bytes, not {unit}", right / of)
          for unit, of in (("MB", 1e6), ("GB", 1e9), ("MiB", 2**20), ("GiB", 2**30))),
        ("This is what all ranks send together: one rank's bytes are asked", right * ep),
    ]  # fmt: skip
    copy, other = all_ways * k, "Each of the k choices is a copy of the token, and all of them travel"
    if key == "inside":
        found += [
            ("A copy for one of the rank's own experts is not sent: g - 1 ranks of its node are left",
             copy * per_node / ep),
            ("This is all that leaves the rank: most of it may leave the node too", copy * (ep - 1) / ep),
            ("These are the copies that leave the node", copy * (ep - per_node) / ep),
            ("The token's experts are on all e ranks, and g - 1 of e are its neighbours",
             copy * (per_node - 1) / per_node),
            (other, all_ways * (per_node - 1) / ep),
            ("A token has copies for other nodes, and some for its own rank: they are not sent inside the node", copy),
        ]  # fmt: skip
    if key == "across":
        found += [
            ("Copies for other ranks of the same node stay inside it", copy * (ep - 1) / ep),
            ("One copy in n stays in its own node", copy),
            ("These are the copies that stay inside the node", copy * (per_node - 1) / ep),
            ("One part in n stays in its node; the others leave it", copy * per_node / ep),
            (other, all_ways * (ep - per_node) / ep),
        ]
    if key == "once":
        missed, far = (math.comb(experts - experts // n, k) / math.comb(experts, k) for n in (nodes, ep))
        rank = "This is one copy for each rank: one for each node was asked"
        found += [
            ("The k experts are different ones, not drawn one by one: of all sets of k out of E, C(E - E/n, k) miss a node",
             all_ways * (nodes - 1) * (1 - (1 - 1 / nodes) ** k)),
            ("With one copy for each node, two experts on a node cost as much as one", copy * (nodes - 1) / nodes),
            ("A token does not meet every node: none of its k experts may be there", all_ways * (nodes - 1)),
            ("The token's own node needs nothing from the network: n - 1 others can", all_ways * nodes * (1 - missed)),
            (rank, all_ways * (ep - per_node) * (1 - far)),
            (rank, all_ways * (ep - 1) * (1 - far)),
            ("This is the chance that a node is missed: its complement is asked", all_ways * (nodes - 1) * missed),
            ("Not every expert has a node of its own: count those met, by their chance", all_ways * min(k, nodes - 1)),
            ("The way back is one vector from each node too: it adds its experts' answers",
             (right + copy * (nodes - 1) / nodes) / 2),
            ("This is one copy a token in all, not one for each node", all_ways * (nodes - 1) / nodes),
            ("A node that is met gets the token once, not k times", copy * (nodes - 1) * (1 - missed)),
            ("This is the chance that all k experts are on a node: any of them is enough",
             all_ways * (nodes - 1) * math.comb(experts // nodes, k) / math.comb(experts, k)),
        ]  # fmt: skip
    return [(sentence, value) for sentence, value in found if not close(value, right)]


def _explain_bytes(key: str, got: float, right: float, case: tuple[int, ...]) -> NoReturn:
    tokens, size, experts, k, ep, per_node = case
    shown = f"`{key}` of {tokens} tokens of {size} bytes, experts={experts}, k={k}, ep={ep}, per_node={per_node}"
    if right == 0:
        where = "All ranks are in one node" if ep > 1 and key != "inside" else "The rank is alone there"
        raise Wrong(f"{where}, so nothing is sent, and here it is {got:,.0f} bytes ({shown}).")
    recognize(got, shown, _slips(key, *case), lambda given, slip: close(given, slip, rel=1e-5))
    raise Wrong(f"It is {right:,.0f} bytes, not {got:,.0f}, by no mistake that the check knows ({shown}).")


# --- one step on two grids ----------------------------------------------------------------------------------

#: Ranks along every axis of a grid, the fastest axis last, as `init_device_mesh` takes them.
Sizes = Mapping[str, int]

_HIDDEN, _TOKENS, _EXPERTS = 16, 12, 8
_CONFIG = tiny_mixture(
    hidden=_HIDDEN, num_experts=_EXPERTS, experts_per_token=2, expert_ffn=_HIDDEN, num_shared_experts=1
)


class _Dense(nn.Module):
    """Two matrices, split over tp under sequence parallelism: the stream is gathered, and the sum cut again."""

    def __init__(self, tp: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.tp = tp
        up_FH, down_FH = torch.randn(2, 2 * _HIDDEN, _HIDDEN) / _HIDDEN
        self.up, self.down = (nn.Parameter(self._mine(weight_FH)) for weight_FH in (up_FH, down_FH))

    def _mine(self, weight_FH: Tensor) -> Tensor:
        return weight_FH.chunk(self.tp.size())[self.tp.rank()].clone() if self.tp else weight_FH

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.tp is None:
            return torch.relu(x_TH @ self.up.T) @ self.down
        x_BSH = gather_from_sp(x_TH[None], self.tp)
        return scatter_to_sp(torch.relu(x_BSH @ self.up.T) @ self.down, self.tp)[0]


class Layer(nn.Module):
    """A layer: `norm`, `dense`, and `moe` with a router, experts and a shared expert."""

    def __init__(self, seed: int, tp: dist.ProcessGroup | None = None, ep: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if dist.is_initialized() and (tp is None or tp.size() * ep.size() == 1):
            raise Wrong("On ranks no layer is whole: hand over the groups of tp and ep, and sum what ranks have.")
        torch.manual_seed(seed)
        self.norm, self.dense, self.moe = nn.LayerNorm(_HIDDEN, bias=False), _Dense(tp), MoE(_CONFIG, ep)
        for parameter in (*self.moe.router.parameters(), *self.moe.experts.parameters()):
            parameter.data *= 10  # so that experts move the stream
        self.double()

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return the stream behind the layer."""
        x_TH = x_TH + self.dense(self.norm(x_TH))
        return x_TH + self.moe(x_TH)


class FoldedJob:
    """One step of a layer on the ranks of two grids.

    Args:
        seed: Of weights and tokens.
        dense: The grid of everything that is no expert: dp, cp and tp.
    """

    def __init__(self, seed: int, dense: Sizes) -> None:
        self.seed, self.dense, self.made = seed, dense, None

    def model(self, tp: dist.ProcessGroup, ep: dist.ProcessGroup) -> Layer:
        """Return this rank's part: its piece of `dense`, its experts, and the rest whole."""
        if self.made:
            raise Wrong("A rank has one part of the layer: call `job.model` once, and sum what the ranks have.")
        if tp.size() != self.dense["tp"]:
            raise Wrong(f"A tp group has {self.dense['tp']} ranks in this grid, and here {tp.size()}.")
        self.made = [dist.get_process_group_ranks(group) for group in (tp, ep)]
        return Layer(self.seed, tp, ep)

    def whole(self) -> Layer:
        """Return the layer of one process, where there is one."""
        return Layer(self.seed)

    def loss(self, model: Layer) -> Tensor:
        """Return this rank's part of the loss of its dp and cp position, whose tokens its tp ranks divide.

        Of the layer of one process it is the loss of the step, the mean over all dp and cp positions.
        """
        ranks = math.prod(self.dense.values())
        dice = torch.Generator().manual_seed(self.seed)
        x_RTH, y_RTH = torch.randn(2, ranks, _TOKENS, _HIDDEN, generator=dice, dtype=torch.float64)
        whole = model.dense.tp is None
        x_TH, y_TH = (z.flatten(0, 1) if whole else z[dist.get_rank()] for z in (x_RTH, y_RTH))
        return (model(x_TH) - y_TH).square().sum() / _TOKENS / (ranks if whole else self.dense["tp"])


def _folded(answer: Callable, jobs: Sequence[tuple[int, Sizes, Sizes]]) -> list[dict[str, Any]]:
    """Return, for each job, the gradients and the norm that the answer leaves on this rank, and the groups it made."""
    found = []
    for seed, dense, folded in jobs:
        job = FoldedJob(seed, dense)
        model, norm = pair(answer(job, dict(dense), dict(folded)), "Return the model and the norm.", "model", "norm")
        if not isinstance(model, Layer):
            raise Wrong("Return what `job.model` made, with its gradients, and then the norm: model, norm.")
        grads = {name: p.grad for name, p in model.named_parameters()}
        found.append({"groups": job.made, "grads": grads, "norm": as_float(norm, "The norm")})
    _in_own_lines(answer, "average_gradients")
    return found


@check(
    idea="A gradient is summed over all ranks that hold the weight, whatever that group is, and divided by the number of "
    "losses of which the step takes the mean: the same for all.",
    section="Gradients: edp for experts, dp x cp for the rest, one divisor for both",
    line="Experts: sum over edp. `dense`: over dp and cp. All others: over dp, cp and tp. Divide each by dp times cp; then sum "
    "squares over ep for experts, over tp for `dense`, and count the others once.",
    kind="work",
)
def folded_step(answer: Callable[..., Any], seed: int = 13) -> str:
    """Judge `folded_step(job, dense, folded)` on four ranks of drawn grids, beside one process."""
    dice = random.Random(seed)
    grids = [
        ({"tp": 2, "cp": 1, "dp": 2}, {"edp": 1, "ep": 4}),
        ({"dp": 2, "cp": 2, "tp": 1}, dice.choice(({"edp": 2, "ep": 2}, {"ep": 2, "edp": 2}))),
        (NEW.choice(({"cp": 1, "dp": 2, "tp": 2}, {"dp": 1, "cp": 2, "tp": 2})), {"ep": 2, "edp": 2}),
    ]
    jobs = [(each.randrange(10**6), *both) for each, both in zip((dice, dice, NEW), grids, strict=True)]
    for job, got in zip(jobs, zip(*on_ranks(_folded, 4, answer, jobs), strict=True), strict=True):
        _judge_folded(got, *job)
    return (
        f"{len(grids)} pairs of grids, with gradients and norm of one process. torchtitan 2416 summed a router's gradient that "
        "tp ranks had in parts, Megatron-LM 5956 divided experts' by ep, and 5916 counted their squares."
    )


def _grid(sizes: Sizes) -> Mesh:
    return Mesh(tuple(sizes.values())[::-1], tuple(sizes)[::-1])


def _kind(name: str) -> str:
    return next((kind for kind in ("dense", "experts") if kind in name.split(".")), "other")


def _judge_folded(got: Sequence[dict[str, Any]], number: int, dense: Sizes, folded: Sizes) -> None:
    job, grids = FoldedJob(number, dense), [_grid(dense), _grid(folded)]
    alone = job.whole()
    job.loss(alone).backward()
    case = " and ".join(", ".join(f"{axis} {size}" for axis, size in grid.items()) for grid in (dense, folded))
    for rank, one in enumerate(got):
        if one["groups"] is None:
            raise Wrong("Let `job.model(tp, ep)` make the model.")
        for axis, grid, sizes, found in zip(("tp", "ep"), grids, (dense, folded), one["groups"], strict=True):
            right = grid.group(rank, axis)
            if sorted(found) != right:
                raise Wrong(f"Rank {rank} has the {axis} group {right}, and here {some(found)}: {axis} is an axis of the grid "
                            f"{', '.join(sizes)}, whose last axis has neighbours ({case}).")  # fmt: skip
    for name, weight in alone.named_parameters():
        _judge_gradient(name, weight.grad, [one["grads"].get(name) for one in got], grids, case)
    _judge_norm(got, [p.grad for p in alone.parameters()], dense["dp"] * dense["cp"], case)


#: For each kind of weight the axes that cut it, over whom its copies are, and what makes them differ.
_HELD = {
    "experts": ("ep", "edp", "each has computed the tokens of its own ep group"),
    "dense": ("tp", "dp and cp", "each has seen other sequences or other parts of them"),
    "other": ("", "dp, cp and tp", "no axis of that grid cuts it, and each rank has used it for its own tokens"),
}


def _judge_gradient(name: str, whole: Tensor, found: list[Tensor | None], grids: list[Mesh], case: str) -> None:
    kind = _kind(name)
    axis, over, why = _HELD[kind]
    grid, (dp, cp) = grids[kind == "experts"], (grids[0].size(axis) for axis in ("dp", "cp"))
    at = [grid.coordinates(rank)[axis] if axis else 0 for rank in range(grid.ranks)]
    right = [whole.chunk(grid.size(axis) if axis else 1)[place] for place in at]
    if any(p is None or p.shape != t.shape or not p.isfinite().all() for p, t in zip(found, right, strict=True)):
        raise Wrong(f"`{name}` has no finite gradient of its shape: leave it in `.grad` of the parameter ({case}).")
    if all(map(_near, found, right)):
        return
    times = [
        (each * truth).sum().item() / truth.square().sum().item() for each, truth in zip(found, right, strict=True)
    ]
    factor = times[0] if all(map(_near, found, [times[0] * truth for truth in right])) else None
    apart = next(
        ((a, b) for b in range(len(at)) for a in range(b) if at[a] == at[b] and not _near(found[a], found[b])), None
    )
    copies = grid.ranks // (grid.size(axis) if axis else 1)
    refuse(
        case,
        (lambda: f"The gradient of `{name}` is {factor:g} times that of one process. Its copies together have seen all tokens "
         f"of dp · cp = {dp * cp} losses, so their sum is divided by that, however many copies there are",
         factor is not None and close(factor * copies, dp * cp)),
        (lambda: f"The gradient of `{name}` is {factor:g} times that of one process, which is what its copies have after one backward, "
         f"added and divided by dp · cp = {dp * cp}: the step's loss is the mean of so many", factor is not None),
        (lambda: f"Ranks {apart[0]} and {apart[1]} hold the same `{name}`, and have other gradients of it: they part with the "
         f"first step. Its copies are over {over}: {why}", apart),
        (f"All copies of `{name}` have one gradient, and it is not that of one process: sum what its copies have, which are "
         f"over {over}, and nothing of other weights or of other parts of it", True),
    )  # fmt: skip


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def _judge_norm(got: Sequence[dict[str, Any]], grads: list[Tensor], losses: int, case: str) -> None:
    def length(parts: Iterable[Tensor]) -> float:
        return math.sqrt(sum(part.square().sum().item() for part in parts))

    said, right = [one["norm"] for one in got], length(grads)
    if all(close(each, right, rel=1e-5) for each in said):
        return
    own = [length(one["grads"].values()) for one in got]
    refuse(
        f"{case}: {said[0]:.6g} for {right:.6g}",
        ("Gradients are right, and the norm is no finite number", not all(map(math.isfinite, said))),
        ("Gradients are right, and the norm is that of a rank's own part: it holds some experts and a piece of `dense`, and "
         "the norm is that of the whole model", all(map(close, said, own))),
        ("Gradients are right, and ranks have other norms: each would clip by its own, and copies part",
         not all(close(each, said[0], rel=1e-6) for each in said)),
        ("Gradients are right, and this is the square of their norm: take the root", close(said[0], right**2)),
        (f"Gradients are right, and the norm is that of their sums: divide by the {losses} losses first",
         close(said[0], losses * right)),
        ("Gradients are right, and the norm counts copies: the squares of a weight that several ranks hold count once",
         close(said[0], math.hypot(*own))),
        ("Gradients are right, and the norm is not: squares of all experts and of all pieces of `dense` are added, those of a "
         "weight once, then the root is taken once", True),
    )  # fmt: skip


# --- a job with a fault -------------------------------------------------------------------------------------

RANKS, LAYERS, _K = 4, 3, 2
_FAULTS = ("", "experts", "visit", "combine", "router", "shared")


def _fault(number: int) -> tuple[str, int, int]:
    """Return the part of a job that has a fault, "" for none, its layer, and the rank that is alone with it."""
    dice = random.Random(number)
    return _FAULTS[number % len(_FAULTS)], dice.randrange(LAYERS), dice.randrange(RANKS)


class Router(nn.Module):
    """Score every expert, choose by score and bias, count the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN) / 4)
        self.register_buffer("bias", torch.zeros(_EXPERTS))
        self.load = None

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights_Tk and chosen_Tk."""
        scores_TE = (x_TH @ self.weight.T).softmax(-1)
        chosen_Tk = (scores_TE + self.bias).topk(_K).indices
        self.load = chosen_Tk.flatten().bincount(minlength=_EXPERTS).double()
        weights_Tk = scores_TE.gather(-1, chosen_Tk)
        return weights_Tk / weights_Tk.sum(-1, keepdim=True), chosen_Tk


class Experts(nn.Module):
    """Those of this rank, or all: a matrix each."""

    def __init__(self, mine: slice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, _HIDDEN)[mine] / 4)

    def forward(self, rows_RH: Tensor, counts_e: Tensor) -> Tensor:
        """Return what each row's expert makes of it."""
        return torch.tanh(loop_product(rows_RH, self.weight, counts_e))


class Visit(nn.Module):
    """Bring each token to its experts and their answers back."""

    def __init__(self, group: dist.ProcessGroup | None, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.group, self.places = group, places

    def forward(self, x_TH: Tensor, chosen_Tk: Tensor, experts: Experts) -> Tensor:
        """Return the answers of each token's experts, (T, k, H), in the order of `chosen_Tk`."""
        rows_RH, counts_E, order_R = permute(x_TH, chosen_Tk, _EXPERTS)
        if self.group is None:
            rows_RH = experts(rows_RH, counts_E)
        else:
            rows_RH, handle = dispatch(rows_RH, counts_E, self.group)
            rows_RH = combine(experts(rows_RH, handle.counts_e), handle)
        return rows_RH[self.places(order_R)].unflatten(0, chosen_Tk.shape)


class Combine(nn.Module):
    """Weigh the answers of a token's experts and add them."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, answers_TkH: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return what the experts add to the stream."""
        return (answers_TkH * self.weigh(weights_Tk)[..., None]).sum(1)


class MixtureLayer(nn.Module):
    """A layer of one process, or this rank's part of it."""

    def __init__(self, group: dist.ProcessGroup | None, fault: str) -> None:
        super().__init__()
        each = _EXPERTS // (group.size() if group else 1)
        first = each * (group.rank() if group else 0)
        if fault == "experts":
            first = (first + each) % _EXPERTS
        self.router, self.experts = Router(), Experts(slice(first, first + each))
        self.visit = Visit(group, (lambda order: order) if fault == "visit" else Tensor.argsort)
        self.combine = Combine((lambda w: (w + w.detach()) / 2) if fault == "combine" else Tensor.clone)
        self.shared = nn.Linear(_HIDDEN, _HIDDEN)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return the stream behind the layer."""
        weights_Tk, chosen_Tk = self.router(x_TH)
        return x_TH + self.combine(self.visit(x_TH, chosen_Tk, self.experts), weights_Tk) + self.shared(x_TH)


class MixtureJob(Sealed):
    """A job on four ranks: each has its own tokens, a quarter of the experts, and copies of everything else."""

    def __init__(self, number: int) -> None:
        self._number = number

    def alone(self) -> nn.Sequential:
        """Return the model of one process."""
        return self._model(None)

    def split(self) -> nn.Sequential:
        """Return this rank's part of the model."""
        return self._model(dist.group.WORLD)

    def _model(self, group: dist.ProcessGroup | None) -> nn.Sequential:
        torch.manual_seed(self._number)
        part, layer, rank = _fault(self._number)
        here = group is not None and (part in ("router", "shared") or group.rank() == rank)
        return nn.Sequential(
            *(MixtureLayer(group, part if here and i == layer else "") for i in range(LAYERS))
        ).double()

    def loss(self, model: nn.Sequential) -> Tensor:
        """Return the mean over this rank's tokens; of the model of one process, over the tokens of all ranks in order."""
        dice = torch.Generator().manual_seed(self._number)
        x_RTH, y_RTH = torch.randn(2, RANKS, _TOKENS, _HIDDEN, generator=dice, dtype=torch.float64)
        mine = slice(None) if model[0].visit.group is None else slice(dist.get_rank(), dist.get_rank() + 1)
        return (model(x_RTH[mine].flatten(0, 1)) - y_RTH[mine].flatten(0, 1)).square().mean()

    @torch.no_grad()
    def update(self, model: nn.Sequential, rate: float = 0.1) -> None:
        """After backward: make gradients those of the step's loss, the mean over ranks, take a step, move the biases."""
        part, odd, _ = _fault(self._number)
        for i, layer in enumerate(model):
            group = layer.visit.group
            for name, child in layer.named_children():
                for parameter in child.parameters():
                    if group and name != "experts" and (name, i) != ("shared", odd if part == "shared" else None):
                        dist.all_reduce(parameter.grad)
                    parameter -= rate * parameter.grad / (group.size() if group else 1)
            if group and (part, odd) != ("router", i):
                dist.all_reduce(layer.router.load)
            layer.router.bias += rate * (1 - layer.router.load / layer.router.load.mean())
        model.zero_grad()


@check(
    idea="A rank computes other ranks' tokens, so what is wrong on one rank shows on others; and a step has values, "
    "gradients, and what it leaves behind.",
    section="Gradients: edp for experts, dp x cp for the rest, one divisor for both",
    line="Compare outputs of parts with this rank's tokens of one process, in the order of forward; where `visit` is off first, "
    "compare the experts' weights with one process; then gradients of outputs in the order of backward; then parameters and "
    "buffers after `update`.",
    kind="fault",
)
def find_fault(answer: Callable[[MixtureJob], Any], seed: int = 13) -> str:
    """Judge `find_fault(job)`: None, or (part, "forward", "backward" or "update", ranks), for jobs on four ranks."""
    dice = random.Random(seed)
    drawn = [len(_FAULTS) * dice.randrange(1000) + kind for kind in range(len(_FAULTS))]
    drawn.append(len(_FAULTS) * NEW.randrange(10**6) + NEW.randrange(1, len(_FAULTS)))
    dice.shuffle(drawn)
    found = ask_ranks(answer, RANKS, drawn, make=MixtureJob)
    for number, by_rank in zip(drawn, found, strict=True):
        _judge_fault(agreed([_read_fault(each) for each in by_rank]), *_fault(number))
    return (
        f"{len(drawn)} jobs: a rank that had loaded other experts than its own, as DeepSpeed 6589 reports; answers put to the "
        "wrong tokens, as in torchtitan 3604; weights whose gradient was wrong under right outputs, as in transformers 48689; a "
        "bias moved by a rank's own counts; a shared expert taken for one of ep's, as Megatron-Bridge 6009 took shared LoRA weights."
    )


def _read_fault(given: Any) -> tuple[str, str, list[int]] | None:
    if given is None:
        return None
    told = 'Return None, or (part, such as "1.router" of layer 1, "forward", "backward" or "update", list of ranks), counted from 0.'
    parts = by_name(list(given) if isinstance(given, tuple) else given, "part", "moment", "ranks", otherwise=told)
    words = [isinstance(word, str) and "".join([word]).strip().lower() for word in (parts["part"], parts["moment"])]
    part, moment = ".".join(str(words[0]).split(".")[:2]), words[1]
    ranks = {whole(rank, "A rank") for rank in numbers(parts["ranks"], "ranks") if str(rank) not in ("True", "False")}
    known = {f"{layer}.{name}" for layer in range(LAYERS) for name in _FAULTS[1:]}
    if part not in known or moment not in _PASSED_OVER or not set() < ranks <= {*range(RANKS)}:
        raise Wrong(told)
    return part, moment, sorted(ranks)


_MOMENT = {"experts": "forward", "visit": "forward", "combine": "backward", "router": "update", "shared": "update"}
_PASSED_OVER = {
    "forward": "You find nothing in a job whose outputs are not those of one process",
    "backward": "You find nothing in a job whose outputs are all right: compare gradients too, before they are averaged",
    "update": "You find nothing in a job whose outputs and gradients are all right: compare parameters and buffers after "
    "`job.update`",
}


def _judge_fault(said: tuple[str, str, list[int]] | None, part: str, layer: int, rank: int) -> None:
    moment, ranks = _MOMENT.get(part, ""), list(range(RANKS)) if _MOMENT.get(part) == "update" else [rank]
    if said is None or not part:
        refuse("", ("A job in which nothing is wrong is accused", said), (_PASSED_OVER.get(moment, ""), part))
        return
    name, when, where = said
    refuse(
        "",
        (f"The fault shows in {moment} first, and you say {when}: what goes before it is right, and what follows may be wrong by it",
         when != moment),
        (f"You name `{name}`, and what it got was wrong already, or what it made was right: follow {moment} to the first part "
         "that makes wrong of right", name.partition(".")[0] != str(layer)),
        (f"You name `{name}`, and its own weights and steps are right: the answers come from experts that live elsewhere, "
         "which may be other experts than they should be", part == "experts" and name != f"{layer}.experts"),
        (f"You name `{name}`, and it did with what it got what it does in one process", name != f"{layer}.{part}"),
        (f"`{name}` it is, but not on ranks {some(where)}: a rank whose tokens come back wrong need not be the one that is ill, "
         "since other ranks compute them", part == "experts" and where != ranks),
        (f"`{name}` it is, and {where} is not the list of its ranks, counted from 0: let them exchange what each finds", where != ranks),
    )  # fmt: skip
