"""The checks of rung 13: a route, counts for an all-to-all, a capacity, bytes of a layer, and experts on a mesh."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lablib.calc.layouts import Mesh
from lablib.calc.parallel import expert_capacity, routed_bytes
from lablib.checks.judging import (
    Row,
    Slip,
    Wrong,
    by_name,
    check,
    close,
    close_bytes,
    compare,
    numbers,
    pair,
    recognize,
    refuse,
    some,
    whole,
)

__all__ = ["expert_bytes", "kept_tokens", "place_experts", "route", "send_counts"]

#: For each rank, for each of its tokens, the experts that it goes to, the first choice first.
Chosen = Sequence[Sequence[Sequence[int]]]
#: For each token of a rank the experts that it goes to.
Choices = Sequence[Sequence[int]]


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
    for logits, bias, k in cases:
        _judge_route(answer(logits.clone(), bias.clone(), k), logits, bias, k)
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
        if any(isinstance(value, str | Mapping) or not hasattr(value, "__float__") for row in found for value in row):
            raise Wrong(f"`{name}` holds something that is no number ({case}).")
        halves.append([[float(value) for value in row] for row in found])
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
        ("The bias multiplies scores here, as if it were added to the logits: add it to the scores", logits + bias),
        ("The bias is taken away here: an expert with a positive bias is to get more tokens", scores - bias),
        ("These are the experts with the smallest numbers", -(scores + bias)),
        ("The softmax runs over the tokens here: it runs over the experts of each token", logits.softmax(0) + bias),
        ("The bias alone decides here", bias.expand_as(scores)),
        ("The scores are sigmoids here: they are the softmax of the logits", logits.sigmoid() + bias),
    ]
    recognize(found, case, slips, lambda given, values: given == _best(values, k))
    token = next(i for i, (a, b) in enumerate(zip(found, right, strict=True)) if a != b)
    raise Wrong(f"Token {token} goes to experts {sorted(right[token])}, whose score + bias is largest, and here to "
                f"{sorted(found[token])} ({case}).")  # fmt: skip


def _explain_weights(
    shares: list[float],
    truth: Tensor,
    row: list[int],
    token: int,
    logits: Tensor,
    scores: Tensor,
    bias: Tensor,
    case: str,
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
        ("The weights are those of other experts: weight i belongs to chosen expert i, and one of the two is sorted",
         _alike(sorted(shares), truth.sort().values)),
        (f"The experts are right. Token {token} weighs them {told}, and should weigh them {should}", True),
    )  # fmt: skip


# --- counts for an all-to-all -------------------------------------------------------------------------------

#: Two ranks of four tokens by hand, experts that are not in order; no two mistakes of `_counted` agree on it.
_BY_HAND = ([[[0, 1], [0, 2], [3, 1], [0, 3]], [[2, 3], [0, 2], [1, 0], [2, 1]]], [1, 0, 0, 1])


def _counted(chosen: Chosen, home: Sequence[int], *, once: bool = False, first: bool = False) -> list[list[int]]:
    """Return the copies that each rank sends to each.

    Args:
        once: Whether a token goes to a rank once, however many of its experts are there.
        first: Whether only the first choice is looked at.
    """
    counts = [[0] * len(chosen) for _ in chosen]
    for source, tokens in enumerate(chosen):
        for experts in tokens:
            targets = [home[expert] for expert in experts[: 1 if first else None]]
            for target in set(targets) if once else targets:
                counts[source][target] += 1
    return counts


@check(
    idea="Before tokens travel, each rank must know how many copies it sends to each other one, and how many come.",
    section="Route, dispatch, compute, combine: eight tokens by hand",
    line="For each choice of each token, add one to the row of the token's rank and the column of the expert's rank.",
)
def send_counts(answer: Callable[[Chosen, Sequence[int]], Any], seed: int = 13) -> str:
    """Judge `send_counts(chosen, home)`: two ranks by hand, then drawn ones, idle ranks among them."""
    dice = random.Random(seed)
    cases: list[tuple[Chosen, Sequence[int]]] = [_BY_HAND]
    cases.append(([[[0], [0], [0]], [], [[0]]], [1, 2]))  # all to one expert; no tokens, no experts
    cases.append(([[], [], []], [0, 1, 2]))  # nobody has a token
    for _ in range(10):
        ranks = dice.choice((1, 2, 3, 4, 8))
        experts = dice.choice((2, 4, 7, 16))
        k = dice.randint(1, min(experts, 4))
        home = [dice.randrange(ranks) for _ in range(experts)]
        tokens = [dice.choice((0, 1, 5, 12)) for _ in range(ranks)]
        cases.append(([[dice.sample(range(experts), k) for _ in range(n)] for n in tokens], home))
    compare(answer, cases, _counted, _SLIPS_OF_COUNTS, _told_counts, read=_rows_of_counts, unknown=_unlike_counts)
    return f"{len(cases)} all-to-alls, with ranks that send nothing and ranks that get nothing."


def _told_counts(chosen: Chosen, home: Sequence[int]) -> str:
    return f"{len(chosen)} ranks, " + (f"experts on ranks {list(home)}" if len(home) < 9 else f"{len(home)} experts")


def _rows_of_counts(got: Any, chosen: Chosen, home: Sequence[int]) -> list[list[int]]:
    """Return the answer as one row of whole numbers for each rank; rows may be dictionaries, which leave zeros out."""
    ranks, case = len(chosen), _told_counts(chosen, home)
    if isinstance(got, Mapping):  # pairs of ranks are no rows
        got = [got.get(rank, {}) for rank in range(ranks) if set(got) <= set(range(ranks))]
    got = numbers(got, "The counts")
    got = [[row.get(rank, 0) for rank in range(ranks)] if isinstance(row, Mapping) else row for row in got]
    rows = [numbers(row, "A row of counts") for row in got]
    if len(rows) == ranks != len(home) and rows and all(len(row) == len(home) for row in rows):
        raise Wrong(
            f"These are counts by expert: a rank sends to ranks, and `home` says where each expert lives ({case})."
        )
    if len(rows) != ranks or any(len(row) != ranks for row in rows):
        raise Wrong(f"Return {ranks} rows of {ranks} numbers: there are as many ranks as lists in `chosen`, and one that "
                    f"sends or gets nothing has zeros ({case}).")  # fmt: skip
    return [[whole(count, "A count") for count in row] for row in rows]


def _placed(place: Callable[[int, int, int], int]) -> Callable[[Chosen, Sequence[int]], list[list[int]]]:
    """The counts if expert e of n lived on rank place(e, n, ranks)."""
    return lambda chosen, home: _counted(chosen, [place(e, len(home), len(chosen)) for e in range(len(home))])


_SLIPS_OF_COUNTS: list[Slip] = [
    ("Rows and columns are exchanged: row r is what rank r sends, column r what it receives",
     lambda chosen, home: [list(column) for column in zip(*_counted(chosen, home), strict=True)]),
    ("Copies for a rank's own experts are missing: the all-to-all has a piece for the rank itself too",
     lambda chosen, home: [[n * (a != b) for b, n in enumerate(row)] for a, row in enumerate(_counted(chosen, home))]),
    ("A token is counted once for each rank here: each choice is a copy", functools.partial(_counted, once=True)),
    ("Only the first choice is counted: a token goes to all of its k experts", functools.partial(_counted, first=True)),
    ("All rows are one list here, as in [[0] * n] * n: make a new one for each rank",
     lambda chosen, home: [[sum(column) for column in zip(*_counted(chosen, home), strict=True)]] * len(chosen)),
    ("Experts are taken to live in blocks here: `home` says where each one is",
     _placed(lambda expert, experts, ranks: min(expert * ranks // experts, ranks - 1))),
    ("Experts are taken to be dealt out to the ranks in turns: `home` says where each one is",
     _placed(lambda expert, experts, ranks: expert % ranks)),
]  # fmt: skip


def _unlike_counts(row: Row) -> str:
    ranks = range(len(row.truth))
    a, b = next((a, b) for a in ranks for b in ranks if row.given[a][b] != row.truth[a][b])
    return (
        f"Rank {a} sends {row.truth[a][b]} copies to rank {b}, not {row.given[a][b]}: one for each choice of its tokens "
        f"that names an expert of rank {b}"
    )


# --- a capacity ---------------------------------------------------------------------------------------------


def _kept(
    chosen: Sequence[Sequence[int]], experts: int, capacity: int, *, by_token: bool = False, last: bool = False,
    apart: bool = False,
) -> list[list[bool]]:  # fmt: skip
    """Return which choices are kept.

    Args:
        by_token: Whether a token's choices follow each other, and not the first choices of all tokens.
        last: Whether the last tokens are kept, and not the first.
        apart: Whether first and second choices have places of their own.
    """
    k = len(chosen[0])
    order = [(token, choice) for choice in range(k) for token in range(len(chosen))]
    if by_token:
        order.sort()
    taken, kept = Counter(), [[False] * k for _ in chosen]
    for token, choice in reversed(order) if last else order:
        places = chosen[token][choice], choice if apart else 0
        kept[token][choice] = taken[places] < capacity
        taken[places] += 1
    return kept


@check(
    idea="An expert has as many places as its share of all choices, times the factor; who comes too late is dropped.",
    section="Capacity or dropless: what a full expert drops",
    line="Go through first choices in the order of tokens, then second ones, and keep a choice while its expert has a place.",
)
def kept_tokens(answer: Callable[[Sequence[Sequence[int]], int, float], Any], seed: int = 13) -> str:
    """Judge `kept_tokens(chosen, experts, factor)`: one expert that everybody wants first, then drawn choices."""
    dice = random.Random(seed)
    cases: list[tuple[list[list[int]], int, float]] = [
        ([[1, 2], [0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 2], [1, 0]], 3, 0.75),  # 4 places
        ([[0, 1], [1, 0], [0, 2], [0, 3], [1, 0], [2, 0], [0, 1]], 4, 1.0),  # 14 choices, 3.5 places: 4
        ([[0, 1], [0, 2], [1, 0], [0, 3], [0, 2]], 4, 1.0),  # 10 choices, 2.5 places: 3, and not twice two
        ([[0], [0], [0], [1], [0]], 2, 1.0),
        ([[3], [3], [3], [3], [3]], 4, 1.0),
        ([[0], [0], [1], [0]], 2, 1.0),  # 2 places, a whole number
    ]
    for _ in range(12):
        experts = dice.choice((2, 4, 8))
        k = dice.randint(1, min(3, experts))
        favoured = [1 + 3 * (expert < 2) for expert in range(experts)]
        tokens = dice.randint(3, 24)
        chosen = [sorted(range(experts), key=lambda e: -favoured[e] * dice.random())[:k] for _ in range(tokens)]
        cases.append((chosen, experts, dice.choice((0.5, 0.75, 1.0, 1.25, 1.5, 2.0, float(experts)))))
    compare(answer, cases, _rightly_kept, _SLIPS_OF_KEPT, _told_kept, read=_rows_of_kept, unknown=_unlike_kept)
    return f"{len(cases)} routings: who comes first has a place."


def _told_kept(chosen: Choices, experts: int, factor: float) -> str:
    return f"{len(chosen)} tokens, k = {len(chosen[0])}, {experts} experts, factor {factor:g}"


def _rows_of_kept(got: Any, chosen: Choices, experts: int, factor: float) -> list[list[bool]]:
    """Return the answer as one row of truth values for each token; the rows of one choice may be that choice."""
    tokens, k = len(chosen), len(chosen[0])
    if isinstance(got, Mapping):
        got = [got.get(token, ()) for token in range(tokens)]
    rows = numbers(got, "The answer")
    if k == 1 and all(not hasattr(row, "__iter__") for row in rows):
        rows = [[row] for row in rows]
    found = [[_truth_value(each) for each in numbers(row, "A row")] for row in rows]
    if len(found) != tokens or any(len(row) != k for row in found):
        raise Wrong(f"Return a row for each of {tokens} tokens, with True or False for each of its {k} choices "
                    f"({_told_kept(chosen, experts, factor)}).")  # fmt: skip
    return found


def _rightly_kept(chosen: Choices, experts: int, factor: float, *, more: int = 0, **order: bool) -> list[list[bool]]:
    return _kept(chosen, experts, more + expert_capacity(len(chosen), experts, len(chosen[0]), factor), **order)


def _with_places(places: Callable[..., int]) -> Callable[..., list[list[bool]]]:
    """What is kept if an expert had places(tokens, k, experts, factor) places."""
    return lambda chosen, experts, factor: _kept(chosen, experts, places(len(chosen), len(chosen[0]), experts, factor))


_SLIPS_OF_KEPT: list[Slip] = [
    ("True stands for dropped here: it should stand for kept",
     lambda *case: [[not kept for kept in row] for row in _rightly_kept(*case)]),
    ("A capacity is rounded down here: round it up", _with_places(lambda t, k, e, f: math.floor(f * t * k / e))),
    ("The capacity counts tokens and not choices here", _with_places(lambda t, k, e, f: math.ceil(f * t / e))),
    ("The factor is multiplied after rounding here: round once, at the end",
     _with_places(lambda t, k, e, f: math.ceil(f * math.ceil(t * k / e)))),
    ("The factor is missing in the capacity", _with_places(lambda t, k, e, f: math.ceil(t * k / e))),
    ("The capacity is rounded before it is multiplied by k here: round once, at the end",
     _with_places(lambda t, k, e, f: k * math.ceil(f * t / e))),
    ("All choices of a token come before the next token's here: first choices of all tokens go first",
     functools.partial(_rightly_kept, by_token=True)),
    ("The last ones are kept here: places go to who comes first", functools.partial(_rightly_kept, last=True)),
    ("The last tokens are kept here: places go to who comes first",
     lambda chosen, experts, factor: _rightly_kept(chosen[::-1], experts, factor)[::-1]),
    ("Only experts that somebody chose are counted here: E is the number of all",
     lambda chosen, experts, factor: _rightly_kept(chosen, len({e for row in chosen for e in row}), factor)),
    ("Second choices have places of their own here: an expert has so many for all choices together",
     functools.partial(_rightly_kept, apart=True)),
    ("Rounding up leaves a whole number as it is, and does not add one to it", _with_places(lambda t, k, e, f: 1 + int(f * t * k / e))),
    ("An expert takes one too many: it is full with as many as its capacity", functools.partial(_rightly_kept, more=1)),
    ("An expert refuses one too early: it takes as many as its capacity", functools.partial(_rightly_kept, more=-1)),
    ("A token loses all choices with one here: only the choice of the full expert is dropped",
     lambda *case: [[all(row)] * len(row) for row in _rightly_kept(*case)]),
    ("Nothing is dropped: an expert has as many places as its capacity",
     lambda chosen, experts, factor: [[True] * len(row) for row in chosen]),
]  # fmt: skip


def _unlike_kept(row: Row) -> str:
    chosen, experts, factor = row.case
    ways = [(choice, token) for choice in range(len(chosen[0])) for token in range(len(chosen))]
    choice, token = next((c, t) for c, t in ways if row.given[t][c] != row.truth[t][c])
    expert = chosen[token][choice]
    before = sum(chosen[t][c] == expert for c, t in ways[: ways.index((choice, token))])
    return (
        f"Choice {choice} of token {token} is expert {expert}, which {before} choices wanted before and which has "
        f"{expert_capacity(len(chosen), experts, len(chosen[0]), factor)} places: it is "
        f"{'kept' if row.truth[token][choice] else 'dropped'}"
    )


def _truth_value(each: Any) -> bool:
    """Return True or False for what may be numpy's, a tensor's or 1 and 0."""
    if whole(each, "Each choice") not in (0, 1):
        raise Wrong(f"Each choice is True or False, kept or dropped, and here one is {each}.")
    return bool(each)


# --- bytes of a layer ---------------------------------------------------------------------------------------

_KEYS = ("inside", "across", "once")

#: The first case: 6 nodes of 5 ranks. No two mistakes of `_slips` give the same number.
FIRST = (1000, 70, 60, 3, 30, 5)


def _true_bytes(tokens: int, size: int, experts: int, k: int, ep: int, per_node: int) -> dict[str, float]:
    layer = {"num_experts": experts, "experts_per_token": k, "ep": ep, "ranks_per_node": per_node, "value": 1}
    every = routed_bytes(tokens, size, **layer)
    once = routed_bytes(tokens, size, **layer, way="node").across
    return {"inside": every.inside, "across": every.across, "once": once}


@check(
    idea="A token goes to k experts and comes back, in forward and in backward: four ways, less what stays where it is.",
    section="All-to-all of tokens: bytes by degree, once per node",
    line="k (g-1)/e copies of a token go to the g ranks of its node, k (e-g)/e to the others; with one copy for a node it is "
    "(n-1) times the chance 1 - C(E - E/n, k)/C(E, k) that a node has any of its experts.",
)
def expert_bytes(answer: Callable[..., Mapping[str, float]], seed: int = 13) -> str:
    """Judge `expert_bytes(tokens, size, experts, k, ep, per_node)`: inside the node, over the network, and sent once."""
    dice = random.Random(seed)
    cases = [
        FIRST,
        (4096, 14336, 256, 8, 64, 8),
        (4096, 8192, 8, 2, 8, 8),
        (512, 2048, 4, 1, 4, 2),
        (64, 128, 4, 4, 1, 1),
    ]
    while len(cases) < 20:
        nodes, per_node = dice.choice((1, 2, 3, 4, 8)), dice.choice((1, 2, 4, 8))
        experts = nodes * per_node * dice.choice((1, 2, 4))
        k = dice.randint(1, min(experts, 8))
        cases.append((dice.randint(1, 5000), 2 * dice.randint(8, 8192), experts, k, nodes * per_node, per_node))
    for case in cases:
        got, truth = by_name(answer(*case), *_KEYS), _true_bytes(*case)
        for key in _KEYS:
            if not close_bytes(got[key], truth[key]):
                _explain_bytes(key, float(got[key]), truth[key], case)
    return f"{len(cases)} layers: what stays in the node, what leaves it, and what is left if a node is sent one copy."


def _slips(key: str, tokens: int, size: int, experts: int, k: int, ep: int, per_node: int) -> list[tuple[str, float]]:
    """What to say of a mistake, and the bytes that it gives."""
    nodes = ep // per_node
    ways = "A token goes out and comes back, in forward and in backward: four ways, and here it is"
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


# --- experts on a mesh --------------------------------------------------------------------------------------

#: Ranks along every axis of a grid, the fastest axis first.
Sizes = Mapping[str, int]

_PLACES = ("holds", "sends_to", "expert", "other")


class _Place:
    """What is right for one rank."""

    def __init__(self, rank: int, attention: Sizes, folded: Sizes, experts: int, chosen: Sequence[int]) -> None:
        self.attention, self.folded = (Mesh(tuple(grid.values()), tuple(grid)) for grid in (attention, folded))
        self.at = self.folded.coordinates(rank)["ep"]
        self.ep_group = self.folded.group(rank, "ep")
        each = experts // folded["ep"]
        self.holds = list(range(self.at * each, (self.at + 1) * each))
        self.sends_to = [self.ep_group[expert // each] for expert in chosen]
        self.places = {"holds": self.holds, "sends_to": self.sends_to}
        self.other = self.attention.group(rank, "dp", "cp")
        self.expert = self.folded.group(rank, "edp")
        #: Each rank's loss is a mean over its own tokens, and the loss of the step is the mean of those.
        self.divisor = attention["dp"] * attention["cp"]


@check(
    idea="A rank has a place on two grids, and an expert's gradient on one rank comes from the tokens of all ranks that sent "
    "it some.",
    section="Gradients: edp for experts, dp x cp for the rest, one divisor for both",
    line="Sum an expert's gradient over the edp ranks of the experts' grid, any other over the dp times cp ranks of "
    "attention's, and divide both by dp times cp.",
)
def place_experts(answer: Callable[..., Mapping[str, Any]], seed: int = 13) -> str:
    """Judge `place_experts(rank, attention, folded, experts, chosen)` on eight ranks first, then on drawn grids."""
    dice = random.Random(seed)
    grids = [({"tp": 1, "cp": 1, "dp": 8, "pp": 1}, {"etp": 1, "ep": 4, "edp": 2, "pp": 1})]
    grids += [
        _grids(*sizes) for sizes in ((2, 1, 4, 2, 2, 2), (1, 2, 4, 2, 1, 4), (2, 2, 2, 1, 1, 8), (1, 1, 4, 1, 1, 1))
    ]
    while len(grids) < 16:
        tp, cp, dp, pp = (dice.choice(sizes) for sizes in ((1, 2, 3), (1, 2), (1, 2, 3, 4, 6), (1, 2, 3)))
        etp = dice.choice((1, tp))
        ep = dice.choice([size for size in range(1, 13) if tp * cp * dp // etp % size == 0])
        drawn = _grids(tp, cp, dp, pp, etp, ep)
        if dice.random() < 0.5:  # pp stays where it is, first or last, so that both grids cover the same stages
            drawn = tuple({axis: grid[axis] for axis in (*dice.sample(list(grid)[:3], 3), "pp")} for grid in drawn)
        if dice.random() < 0.3:
            drawn = tuple({"pp": pp} | grid for grid in drawn)
        grids.append(drawn)
    for attention, folded in grids:
        experts = folded["ep"] * (2 if attention is grids[0][0] else dice.choice((1, 2, 4)))
        ranks = math.prod(attention.values())
        chosen = sorted(range(experts), key=lambda _: dice.random())[: min(experts, 4)]
        if attention is grids[0][0]:
            chosen = [5, 0, 3]  # on ranks 2, 0, 1 of a group; dealt out in turns it would be 1, 0, 3
        # The last ones first: on rank 0 a position of a group and its rank are often one number.
        for rank in sorted(dice.sample(range(ranks), min(ranks, 6)), reverse=True):
            got = answer(rank, dict(attention), dict(folded), experts, list(chosen))
            _judge_place(got, rank, attention, folded, experts, chosen)
    return f"{len(grids)} pairs of grids: where experts live, who gets which token, and which ranks average what."


def _grids(tp: int, cp: int, dp: int, pp: int, etp: int, ep: int) -> tuple[dict[str, int], dict[str, int]]:
    edp = tp * cp * dp // (etp * ep)
    return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}, {"etp": etp, "ep": ep, "edp": edp, "pp": pp}


def _judge_place(
    got: Any, rank: int, attention: Sizes, folded: Sizes, experts: int, chosen: Sequence[int]
) -> None:  # fmt: skip
    right = _Place(rank, attention, folded, experts, chosen)
    told = " and ".join("-".join(f"{axis}{size}" for axis, size in grid.items()) for grid in (attention, folded))
    case = f"rank {rank} of {told}, {experts} experts"
    got = by_name(got, *_PLACES)
    holds, sends_to = got["holds"], got["sends_to"]
    if isinstance(holds, slice):
        holds = range(*holds.indices(experts))
    if isinstance(sends_to, Mapping) and set(chosen) <= set(sends_to):
        sends_to = [sends_to[expert] for expert in chosen]
    found = {"holds": _whole_list(holds, "`holds`"), "sends_to": _whole_list(sends_to, "`sends_to`")}
    copies, alike = (_ranks_of(got[name]) for name in ("expert", "other"))
    mine, true = (found | {"holds": sorted(found["holds"])}, copies), (right.places, right.expert)
    usual = _grids(*(attention[axis] for axis in ("tp", "cp", "dp", "pp")), folded["etp"], folded["ep"])
    turned = tuple(dict(reversed(grid.items())) for grid in (attention, folded))
    others = [_Place(rank, *grids, experts, chosen) for grids in (usual, turned)]
    refuse(
        case,
        ("The axes are taken in another order here: each grid has them in its own, the fastest first, "
         f"{', '.join(attention)} and {', '.join(folded)}", any(mine == (o.places, o.expert) and (mine != true or alike == o.other != right.other) for o in others)),
        ("Here ep is taken out of dp alone, so that an expert is cut as attention is: the second grid has it over all ranks "
         "of a stage, those of tp and cp too", found == _out_of_dp(rank, attention, folded, experts, chosen) != right.places),
    )  # fmt: skip
    _judge_holds(found["holds"], right, rank, folded["ep"], experts, case)
    _judge_sends(found["sends_to"], right, rank, folded["ep"], experts, chosen, case)
    for name in ("other", "expert"):
        _judge_average(name, got[name], right, rank, case)


def _ranks_of(average: Any) -> list[int]:
    """Return the ranks of what may be a pair of ranks and a divisor."""
    with contextlib.suppress(Wrong):
        return sorted(_whole_list(pair(average, "", "ranks", "divisor")[0], "A sum"))
    return []


def _out_of_dp(
    rank: int, attention: Sizes, folded: Sizes, experts: int, chosen: Sequence[int]
) -> dict[str, list[int]] | None:
    """Return where experts live if dp is split into ep and copies, in the place that it has among attention's axes."""
    ep = folded["ep"]
    if attention["dp"] % ep:
        return None
    split = {}
    for axis, size in attention.items():
        split |= {"ep": ep, "edp": size // ep} if axis == "dp" else {axis: size}
    return _Place(rank, attention, split, experts, chosen).places


def _whole_list(values: Any, what: str) -> list[int]:
    values = values.reshape(-1) if hasattr(values, "reshape") else values  # a part of a grid of ranks
    return [whole(each, f"A number in {what}") for each in numbers(values, what)]


def _judge_holds(found: list[int], right: _Place, rank: int, ep: int, experts: int, case: str) -> None:
    each, mine = len(right.holds), right.at
    slips = [
        (f"A rank holds {each} of the experts, one part in ep={ep}, and not all of them", list(range(experts))),
        (f"Experts are dealt out in turns here: a rank holds {each} neighbouring ones", list(range(mine, experts, ep))),
        (f"Position on the ep axis is not rank % ep here: {_stride(right)}",
         [expert + rank % ep * each - mine * each for expert in right.holds]),
    ]  # fmt: skip
    if sorted(found) == right.holds:
        return
    recognize(sorted(found), case, slips)
    refuse(
        case,
        ("This looks like (start, stop): return the experts themselves, as range(start, stop)",
         found == [right.holds[0], right.holds[-1] + 1]),
        (f"A rank holds experts / ep = {each} experts, and not {len(found)}", len(found) != each),
        (f"It holds experts {right.holds}, since its position on the ep axis is {mine}: {_stride(right)}", True),
    )  # fmt: skip


def _stride(right: _Place) -> str:
    return f"neighbours on that axis are {right.folded.strides['ep']} ranks apart"


def _judge_sends(
    found: list[int], right: _Place, rank: int, ep: int, experts: int, chosen: Sequence[int], case: str
) -> None:
    if found == right.sends_to:
        return
    each, first = experts // ep, rank // ep * ep
    outside = [target for target in found if target not in right.ep_group]
    missed = [(expert, to) for expert, to, given in zip(chosen, right.sends_to, found, strict=False) if to != given]
    refuse(
        case,
        (f"`sends_to` has a rank for each of the {len(chosen)} chosen experts, in their order", len(found) != len(chosen)),
        ("`sends_to` has positions on the ep axis: position i is the i-th rank of this rank's own ep group, "
         f"{right.ep_group}", found == [expert // each for expert in chosen]),
        (f"`sends_to` takes the ranks of an ep group to be neighbours: {_stride(right)}",
         found == [first + expert // each for expert in chosen]),
        (f"`sends_to` takes experts to be dealt out in turns; rank 0 of a group has the first {each}",
         found == [right.ep_group[expert % ep] for expert in chosen]),
        (f"`sends_to` is in another order than the chosen experts {list(chosen)}", sorted(found) == sorted(right.sends_to)),
        (lambda: f"Tokens travel inside the rank's ep group {right.ep_group}, and rank {outside[0]} is not in it", outside),
        (lambda: "Expert {} lives on rank {} of this ep group".format(*missed[0]), True),
    )  # fmt: skip


def _judge_average(name: str, given: Any, right: _Place, rank: int, case: str) -> None:
    what = {"expert": "an expert's gradient", "other": "any other gradient"}[name]
    otherwise = f"`{name}` is a pair: the ranks over which {what} is summed, and what the sum is divided by."
    given, divisor = pair(given, otherwise, "ranks", "divisor")
    ranks, divisor = sorted(_whole_list(given, f"`{name}`")), whole(divisor, f"The divisor of `{name}`")
    truth = getattr(right, name)
    if ranks != truth:
        _explain_group(name, ranks, right, rank, case)
    if divisor == right.divisor:
        return
    sizes = {axis: right.attention.size(axis) for axis in right.attention.order}
    both = f"dp · cp = {right.divisor}"
    refuse(
        case,
        (f"Divided by {divisor}, the ranks of its group, an expert's gradient is {right.divisor / len(truth):g} times what it "
         f"should be: their copies together have seen the tokens of {both} losses, so divide by that",
         name == "expert" and divisor == len(truth)),
        (f"The cp ranks have tokens of their own: divide by {both}", divisor == sizes["dp"]),
        (f"The sum over the ranks is not divided here: the loss is a mean, so divide by {both}", divisor == 1),
        (f"tp and pp ranks work on the same tokens: of the losses {both} are averaged",
         divisor in (right.divisor * sizes["tp"], right.divisor * sizes["pp"], right.attention.ranks)),
        (f"The step's loss is the mean of {both} losses, so {what} is divided by that, and not by {divisor}", True),
    )  # fmt: skip


def _explain_group(name: str, found: list[int], right: _Place, rank: int, case: str) -> NoReturn:
    truth, expert = getattr(right, name), name == "expert"
    grid, told, split = (right.folded, "edp", "etp") if expert else (right.attention, "dp and cp", "tp")
    at = grid.coordinates(rank)

    def outside(axis: str) -> bool:
        return any(grid.coordinates(each)[axis] != at[axis] for each in found if 0 <= each < grid.ranks)

    refuse(
        case,
        (f"`{name}` names a rank twice, and its gradient would be counted twice", len(set(found)) < len(found)),
        (f"There are tp · cp · dp · pp = {grid.ranks} ranks, counted from 0: both grids cover the same ones, and ep is no "
         "factor beside dp", max(found, default=0) >= grid.ranks),
        (f"Rank {rank} is in its own groups, and missing from `{name}`", rank not in found),
        ("The cp ranks hold the same weights and see other tokens: `other` is over cp as well",
         not expert and found == right.attention.group(rank, "dp")),
        (f"This mixes gradients of different experts: only {truth} hold these", expert and found == right.other),
        (f"The ep group holds different experts, and their gradients have nothing in common: the copies of an expert are on "
         f"{truth}", expert and found == right.ep_group),
        (f"Only experts have their copies there: any other weight is alike on {truth}",
         not expert and found in (right.expert, right.ep_group)),
        (f"Ranks of other stages hold other layers: `{name}` stays inside a stage", lambda: outside("pp")),
        (f"Ranks at another position on {split} hold another part of each matrix: `{name}` leaves {split} out",
         lambda: outside(split)),
        (f"`{name}` is over {some(truth)}, the ranks that differ in {told} only, not over {some(found)}", True),
    )  # fmt: skip
