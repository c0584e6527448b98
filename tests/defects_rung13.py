"""Planted defects of rung 13: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools
import math
from collections import Counter, defaultdict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch

from lablib.calc.layouts import Mesh
from tests.planted import asked, listed, told

Route = namedtuple("Route", "weights chosen")
Bytes = namedtuple("Bytes", "inside across once")


@dataclass
class Place:
    """Where an expert lives, by attributes."""

    holds: object
    sends_to: object
    expert: object
    other: object


def _top(scores, by, k, weigh=None):
    chosen = by.topk(k, dim=-1).indices
    weights = (scores if weigh is None else weigh).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def _chosen(logits, bias, k):
    """Return the scores and the experts with the largest helped scores."""
    scores = logits.softmax(-1)
    return scores, (scores + bias).topk(k, dim=-1).indices


class route:
    bias_forgotten = lambda logits, bias, k: _top(logits.softmax(-1), logits, k)
    bias_in_the_weights = lambda logits, bias, k: _top(logits.softmax(-1) + bias, logits.softmax(-1) + bias, k)
    bias_on_the_logits = lambda logits, bias, k: _top(logits.softmax(-1), logits + bias, k)
    bias_as_a_factor = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) * (1 + bias), k)
    bias_turned_round = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) - bias, k)

    def scores_not_divided(logits, bias, k):
        scores, chosen = _chosen(logits, bias, k)
        return scores.gather(-1, chosen), chosen

    def divided_by_all_scores_with_the_bias(logits, bias, k):
        helped = (logits.softmax(-1) + bias).topk(k, dim=-1)
        return helped.values, helped.indices

    def softmax_of_what_was_chosen(logits, bias, k):
        helped = (logits.softmax(-1) + bias).topk(k, dim=-1)
        return helped.values.softmax(-1), helped.indices

    a_second_softmax = told(scores_not_divided, lambda found: (found[0].softmax(-1), found[1]))
    divided_by_k = told(scores_not_divided, lambda found, k: (found[0] / k, found[1]))
    all_alike = told(scores_not_divided, lambda found, k: (torch.full_like(found[0], 1 / k), found[1]))

    over_the_tokens = lambda logits, bias, k: _top(logits.softmax(0), logits.softmax(0) + bias, k)

    def one_of_the_two_is_sorted(logits, bias, k):
        weights, chosen = _top(logits.softmax(-1), logits.softmax(-1) + bias, k)
        return weights, chosen.sort(-1).values

    experts_first = lambda logits, bias, k: _top(logits.softmax(-1), logits.softmax(-1) + bias, k)[::-1]

    sigmoids = lambda logits, bias, k: _top(logits.sigmoid(), logits.sigmoid() + bias, k)
    smallest = lambda logits, bias, k: _top(logits.softmax(-1), -(logits.softmax(-1) + bias), k)

    def right(logits, bias, k):
        """Arrays, the chosen by their numbers, and the weights as a softmax of the chosen logits alone."""
        x, b = logits.double().numpy(), bias.numpy()
        scores = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        chosen = np.sort(np.argsort(scores + b)[:, -k:])
        picked = np.exp(np.take_along_axis(x, chosen, -1))
        return picked / picked.sum(-1, keepdims=True), chosen

    def right_2(logits, bias, k):
        """Lists and a loop."""
        weights, chosen = [], []
        for row in logits.tolist():
            powers = [math.exp(value - max(row)) for value in row]
            scores = [power / sum(powers) for power in powers]
            best = sorted(range(len(row)), key=lambda e: scores[e] + float(bias[e]))[-k:]
            chosen.append(best)
            weights.append([scores[e] / sum(scores[i] for i in best) for e in best])
        return weights, chosen

    def right_3(logits, bias, k):
        """A mask over all experts, whose rows are read off; lists of tensors."""
        order = (torch.softmax(logits, 1) + bias[None]).argsort(descending=True)[:, :k].flip(-1)
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, True)
        full = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        return [full.gather(1, order), order.to(torch.int32)]

    def right_4(logits, bias, k):
        """The largest one after the other, changing what was given; a named tuple."""
        scores = logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
        left, chosen = scores + bias, []
        for _ in range(k):
            chosen.append(left.argmax(-1, keepdim=True))
            left = left.scatter(1, chosen[-1], -torch.inf)
        chosen = torch.cat(chosen, -1)
        weights = scores.gather(1, chosen)
        return Route(weights / weights.sum(-1, keepdim=True), chosen)


def _count(chosen, home, targets=lambda ranks: ranks):
    ranks = len(chosen)
    counts = [[0] * ranks for _ in range(ranks)]
    for source, tokens in enumerate(chosen):
        for experts in tokens:
            for target in targets([home[expert] for expert in experts]):
                counts[source][target] += 1
    return counts


class send_counts:
    exchanged = lambda chosen, home: [list(column) for column in zip(*_count(chosen, home), strict=True)]
    a_token_once_a_rank = lambda chosen, home: _count(chosen, home, targets=set)
    first_choice_only = lambda chosen, home: _count(chosen, home, targets=lambda ranks: ranks[:1])

    def experts_in_blocks(chosen, home):
        each = max(1, len(home) // len(chosen))
        return _count(chosen, [min(e // each, len(chosen) - 1) for e in range(len(home))])

    experts_in_turns = lambda chosen, home: _count(chosen, [e % len(chosen) for e in range(len(home))])

    nothing_for_itself = lambda chosen, home: np.array(n := _count(chosen, home)) - np.diag(np.diag(n))

    def right_generators(chosen, home):
        """Each row is a generator over what the outer one holds when it yields."""
        for tokens in chosen:
            counts = Counter(home[expert] for experts in tokens for expert in experts)
            yield (counts[rank] for rank in range(len(chosen)))

    def one_list_for_all_rows(chosen, home):
        counts = [[0] * len(chosen)] * len(chosen)
        for source, tokens in enumerate(chosen):
            for experts in tokens:
                for expert in experts:
                    counts[source][home[expert]] += 1
        return counts

    def by_expert(chosen, home):
        return [[sum(e in experts for experts in tokens) for e in range(len(home))] for tokens in chosen]

    def by_pairs_of_ranks(chosen, home):
        return Counter((a, home[e]) for a, tokens in enumerate(chosen) for experts in tokens for e in experts)

    def idle_ranks_left_out(chosen, home):
        return [row for row, tokens in zip(_count(chosen, home), chosen, strict=True) if tokens]

    def tokens_evenly_spread(chosen, home):
        """What an all-to-all of equal pieces would send."""
        ranks = len(chosen)
        return [[sum(map(len, tokens)) // ranks for _ in range(ranks)] for tokens in chosen]

    def right(chosen, home):
        """Counters, and a tensor in the end."""
        rows = [Counter(home[e] for experts in tokens for e in experts) for tokens in chosen]
        return torch.tensor([[row[target] for target in range(len(chosen))] for row in rows])

    def right_2(chosen, home):
        """Bins of an array."""
        n, where = len(chosen), np.array(home)
        return np.stack([np.bincount(where[np.array(t, dtype=int).ravel()], minlength=n) for t in chosen])

    def right_3(chosen, home):
        """A dictionary of dictionaries, in which zeros are missing, built by recursion."""

        def of(source, flat):
            if not flat:
                return {}
            counts = of(source, flat[1:])
            return counts | {home[flat[0]]: counts.get(home[flat[0]], 0) + 1}

        return {rank: of(rank, list(itertools.chain(*tokens))) for rank, tokens in enumerate(chosen)}

    def right_4(chosen, home):
        """Counters in a dictionary, in which a rank without tokens is missing."""
        counts = defaultdict(Counter)
        for rank, tokens in enumerate(chosen):
            for expert in itertools.chain(*tokens):
                counts[rank][home[expert]] += 1
        return counts


def _keep(chosen, experts, capacity, order=None):
    k = len(chosen[0])
    order = order or [(token, choice) for choice in range(k) for token in range(len(chosen))]
    taken, kept = Counter(), [[False] * k for _ in chosen]
    for token, choice in order:
        expert = chosen[token][choice]
        kept[token][choice] = taken[expert] < capacity
        taken[expert] += 1
    return kept


def _places(chosen, experts, factor):
    return math.ceil(factor * len(chosen) * len(chosen[0]) / experts)


class kept_tokens:
    def rounded_down(chosen, experts, factor):
        return _keep(chosen, experts, int(factor * len(chosen) * len(chosen[0]) / experts))

    one_more_than_whole = lambda chosen, experts, factor: _keep(
        chosen, experts, 1 + int(factor * len(chosen) * len(chosen[0]) / experts)
    )

    def tokens_and_not_choices(chosen, experts, factor):
        return _keep(chosen, experts, math.ceil(factor * len(chosen) / experts))

    def rounded_before_k(chosen, experts, factor):
        return _keep(chosen, experts, len(chosen[0]) * math.ceil(factor * len(chosen) / experts))

    def factor_after_rounding(chosen, experts, factor):
        return _keep(chosen, experts, factor * _places(chosen, experts, 1))

    def places_for_each_choice(chosen, experts, factor):
        capacity = _places(chosen, experts, factor)
        kept = [_keep([[expert] for expert in column], experts, capacity) for column in zip(*chosen, strict=True)]
        return [[one for (one,) in row] for row in zip(*kept, strict=True)]

    def last_tokens_first(chosen, experts, factor):
        return _keep(chosen[::-1], experts, _places(chosen, experts, factor))[::-1]

    def experts_in_use(chosen, experts, factor):
        return _keep(chosen, experts, _places(chosen, len(set(itertools.chain(*chosen))), factor))

    factor_forgotten = lambda chosen, experts, factor: _keep(chosen, experts, _places(chosen, experts, 1))
    one_pool_for_all = lambda chosen, experts, factor: _keep(chosen, experts, _places(chosen, 1, factor))

    def token_by_token(chosen, experts, factor):
        k = len(chosen[0])
        order = [(token, choice) for token in range(len(chosen)) for choice in range(k)]
        return _keep(chosen, experts, _places(chosen, experts, factor), order)

    def last_come_first_served(chosen, experts, factor):
        order = [(token, choice) for choice in range(len(chosen[0])) for token in range(len(chosen))]
        return _keep(chosen, experts, _places(chosen, experts, factor), order[::-1])

    one_too_many = lambda chosen, experts, factor: _keep(chosen, experts, 1 + _places(chosen, experts, factor))

    def whole_tokens(chosen, experts, factor):
        kept = _keep(chosen, experts, _places(chosen, experts, factor))
        return [[all(row)] * len(row) for row in kept]

    dropless = lambda chosen, experts, factor: [[True] * len(row) for row in chosen]

    def says_who_is_dropped(chosen, experts, factor):
        return [[not kept for kept in row] for row in _keep(chosen, experts, _places(chosen, experts, factor))]

    def right(chosen, experts, factor):
        """One-hot and a running sum, as real layers do."""
        table = torch.tensor(chosen).T.flatten()
        hot = torch.nn.functional.one_hot(table, experts)
        place = (hot.cumsum(0) * hot).sum(-1)
        kept = place <= _places(chosen, experts, factor)
        return kept.view(len(chosen[0]), -1).T

    def right_2(chosen, experts, factor):
        """By expert: who wants it, in order, and the first of them; ones and zeros."""
        kept = np.zeros((len(chosen), len(chosen[0])), dtype=int)
        for expert in range(experts):
            wants = [(c, t) for t, row in enumerate(chosen) for c, e in enumerate(row) if e == expert]
            for choice, token in sorted(wants)[: _places(chosen, experts, factor)]:
                kept[token, choice] = 1
        return kept

    def right_3(chosen, experts, factor):
        """Places are taken from a stock; exact fractions."""
        capacity = -(-Fraction(factor) * len(chosen) * len(chosen[0]) // experts)
        stock = [capacity] * experts
        columns = []
        for column in zip(*chosen, strict=True):
            columns.append([])
            for expert in column:
                columns[-1].append(stock[expert] > 0)
                stock[expert] -= 1
        return tuple(zip(*columns, strict=True))

    def right_4(chosen, experts, factor):
        """Rows that are made when they are asked for."""
        return ((kept for kept in row) for row in _keep(chosen, experts, _places(chosen, experts, factor)))

    def right_5(chosen, experts, factor):
        """By the number of the token."""
        return dict(enumerate(_keep(chosen, experts, _places(chosen, experts, factor))))


def _bytes(tokens, size, experts, k, ep, per_node, *, ways=4, **changed):
    nodes = ep // per_node
    missed = math.comb(experts - experts // nodes, k) / math.comb(experts, k)
    copies = {
        "inside": k * (per_node - 1) / ep,
        "across": k * (ep - per_node) / ep,
        "once": (nodes - 1) * (1 - missed),
    } | changed
    return {key: ways * tokens * size * each for key, each in copies.items()}


class expert_bytes:
    forward_only = lambda *case: _bytes(*case, ways=2)
    dispatch_forward_only = lambda *case: _bytes(*case, ways=1)
    combine_has_no_backward = lambda *case: _bytes(*case, ways=3)
    six_ways = lambda *case: _bytes(*case, ways=6)
    back_by_copies = told(_bytes, lambda right: right | {"once": (right["once"] + right["across"]) / 2})
    in_megabytes = lambda *case: _bytes(*case, ways=4e-6)
    in_mebibytes = lambda *case: _bytes(*case, ways=4 / 2**20)
    both_ways_of_the_wire = lambda *case: _bytes(*case, ways=8)
    to_itself_as_well = asked(_bytes, inside=lambda k, ep, per_node: k * per_node / ep)
    all_that_leaves_the_rank = asked(_bytes, across=lambda k, ep: k * (ep - 1) / ep)
    all_over_the_network = asked(_bytes, across=lambda k: k)
    one_copy_of_a_token = asked(
        _bytes, inside=lambda ep, per_node: (per_node - 1) / ep, across=lambda ep, per_node: (ep - per_node) / ep
    )
    one_copy_in_all = asked(_bytes, once=lambda ep, per_node: (ep - per_node) / ep)
    k_copies_for_a_node = told(_bytes, lambda right, k: right | {"once": right["once"] * k})

    def all_experts_on_a_node(tokens, size, experts, k, ep, per_node):
        nodes = ep // per_node
        chance = math.comb(experts // nodes, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=(nodes - 1) * chance)

    def drawn_with_replacement(tokens, size, experts, k, ep, per_node):
        nodes = ep // per_node
        return _bytes(tokens, size, experts, k, ep, per_node, once=(nodes - 1) * (1 - (1 - 1 / nodes) ** k))

    every_node = asked(_bytes, once=lambda ep, per_node: ep // per_node - 1)

    def own_node_too(tokens, size, experts, k, ep, per_node):
        n = ep // per_node
        missed = math.comb(experts - experts // n, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=n * (1 - missed))

    def a_copy_for_each_rank(tokens, size, experts, k, ep, per_node):
        missed = math.comb(experts - experts // ep, k) / math.comb(experts, k)
        return _bytes(tokens, size, experts, k, ep, per_node, once=(ep - per_node) * (1 - missed))

    nothing_saved = asked(_bytes, once=lambda k, ep, per_node: k * (ep - per_node) / ep)

    def right(tokens, size, experts, k, ep, per_node):
        """Rank by rank; the chance of a miss as a product; whole bytes."""
        ways, inside, across = 4 * tokens * size, Fraction(0), Fraction(0)
        for rank in range(1, ep):
            if rank < per_node:
                inside += Fraction(k, ep)
            else:
                across += Fraction(k, ep)
        elsewhere = experts - experts * per_node // ep
        missed = math.prod((Fraction(elsewhere - i, experts - i) for i in range(k)), start=Fraction(1))
        nodes_met = (ep // per_node - 1) * (1 - missed)
        return {"once": round(ways * nodes_met), "inside": ways * inside, "across": float(ways * across), "nodes": ep}

    def right_2(tokens, size, experts, k, ep, per_node):
        """The chance by logarithms of factorials, in numpy."""
        nodes = np.int64(ep // per_node)
        rest = experts - experts // int(nodes)
        lost = 0.0
        if rest >= k:
            logs = [math.lgamma(rest + 1), -math.lgamma(rest - k + 1)]
            logs += [-math.lgamma(experts + 1), math.lgamma(experts - k + 1)]
            lost = math.exp(math.fsum(logs))
        if nodes == 1:
            lost = 1.0
        sent = np.float64(4) * tokens * size
        there = sent * k * (1 - 1 / nodes)
        return {"inside": sent * k * (1 - 1 / ep) - there, "across": there, "once": sent * (nodes - 1) * (1 - lost)}

    def right_3(tokens, size, experts, k, ep, per_node):
        """A named tuple; a node is met by one expert, or by two, and so on."""
        nodes, here = ep // per_node, experts // (ep // per_node)
        sets = sum(math.comb(here, i) * math.comb(experts - here, k - i) for i in range(1, k + 1))
        copies = _bytes(tokens, size, experts, k, ep, per_node, once=(nodes - 1) * sets / math.comb(experts, k))
        return Bytes(**copies)


def _group(rank, grid, *axes):
    return Mesh(tuple(grid.values()), tuple(grid)).group(rank, *axes)


def _averaged(rank, attention, grid, *axes):
    return _group(rank, grid, *axes), attention["dp"] * attention["cp"]


def _placed(rank, attention, folded, experts, chosen, **changed):
    each, group = experts // folded["ep"], _group(rank, folded, "ep")
    mine = group.index(rank) * each
    return {
        "holds": list(range(mine, mine + each)),
        "sends_to": [group[e // each] for e in chosen],
        "expert": _averaged(rank, attention, folded, "edp"),
        "other": _averaged(rank, attention, attention, "dp", "cp"),
    } | changed


class place_experts:
    # An expert's gradient, too large by what ep is over the tp that it was taken out of.
    mean_over_the_copies = told(
        _placed, lambda right: right | {"expert": (right["expert"][0], len(right["expert"][0]))}
    )
    without_the_idea_all_gradients_alike = told(_placed, lambda right: right | {"expert": right["other"]})

    def out_of_dp_alone(rank, attention, folded, experts, chosen):
        """The layout of before folding: tp and cp cut experts as they cut attention."""
        grid, ep = {}, math.gcd(folded["ep"], attention["dp"])
        for axis, size in attention.items():
            grid |= {"ep": ep, "edp": size // ep} if axis == "dp" else {axis: size}
        copies = _averaged(rank, attention, grid, "edp", "cp")
        return _placed(rank, attention, grid, experts, chosen, expert=copies)

    last_axis_fastest = asked(
        _placed,
        attention=lambda attention: dict(reversed(attention.items())),
        folded=lambda folded: dict(reversed(folded.items())),
    )

    def one_order_for_all_meshes(rank, attention, folded, experts, chosen):
        """The order of the text; experts and ranks in no order."""
        attention = {axis: attention[axis] for axis in ("tp", "cp", "dp", "pp")}
        folded = {axis: folded[axis] for axis in ("etp", "ep", "edp", "pp")}
        found = _placed(rank, attention, folded, experts, chosen)
        return {k: set(v) if k == "holds" else v for k, v in found.items()}

    def first_replica(rank, attention, folded, experts, chosen):
        """Tokens travel to the experts of the first replica."""
        home = min(_group(rank, folded, "edp"))
        sends_to = _placed(home, attention, folded, experts, chosen)["sends_to"]
        return _placed(rank, attention, folded, experts, chosen, sends_to=sends_to)

    def right_grid(rank, attention, folded, experts, chosen):
        """The ranks of a sum as a part of the grid of all, not flattened."""
        found = _placed(rank, attention, folded, experts, chosen)
        ranks, divisor = found["other"]
        return found | {"other": (torch.tensor(ranks).view(attention["cp"], -1), divisor)}

    def neighbours_in_every_mesh(rank, attention, folded, experts, chosen):
        first, each = rank // folded["ep"] * folded["ep"], experts // folded["ep"]
        sends_to = [first + expert // each for expert in chosen]
        return _placed(rank, attention, folded, experts, chosen, sends_to=sends_to)

    experts_over_ep = asked(_placed, expert=lambda rank, attention, folded: _averaged(rank, attention, folded, "ep"))
    split_experts_over_etp = asked(
        _placed, expert=lambda rank, attention, folded: _averaged(rank, attention, folded, "etp", "edp")
    )
    cp_forgotten = asked(_placed, other=lambda rank, attention: (_group(rank, attention, "dp"), attention["dp"]))
    cp_forgotten_in_the_divisor = told(
        _placed, lambda right, attention: right | {"other": (right["other"][0], attention["dp"])}
    )
    all_ranks_average = asked(
        _placed, other=lambda rank, attention: _averaged(rank, attention, attention, "tp", "cp", "dp")
    )
    all_stages_average = asked(
        _placed, other=lambda rank, attention: _averaged(rank, attention, attention, "pp", "cp", "dp")
    )
    others_over_edp = told(_placed, lambda right: right | {"other": right["expert"]})
    summed_only = told(_placed, lambda right: right | {name: (right[name][0], 1) for name in ("expert", "other")})

    def dealt_in_turns(rank, attention, folded, experts, chosen):
        group = _group(rank, folded, "ep")
        ep = len(group)
        held = list(range(group.index(rank), experts, ep))
        return _placed(rank, attention, folded, experts, chosen, holds=held, sends_to=[group[e % ep] for e in chosen])

    everything_everywhere = asked(_placed, holds=lambda experts: list(range(experts)))

    def rank_modulo_ep(rank, attention, folded, experts, chosen):
        each, mine = experts // folded["ep"], rank % folded["ep"]
        held = list(range(mine * each, mine * each + each))
        return _placed(rank, attention, folded, experts, chosen, holds=held)

    def positions_and_not_ranks(rank, attention, folded, experts, chosen):
        each = experts // folded["ep"]
        return _placed(rank, attention, folded, experts, chosen, sends_to=[e // each for e in chosen])

    in_the_order_of_ranks = told(_placed, lambda right: right | {"sends_to": sorted(right["sends_to"])})

    # Takes ep for an axis of its own, beside all of dp.
    ep_beside_dp = asked(
        _placed,
        attention=lambda attention, folded: attention | {"dp": attention["dp"] * folded["ep"]},
        folded=lambda folded: folded | {"edp": folded["edp"] * folded["ep"]},
    )

    def mean_over_tp_too(rank, attention, folded, experts, chosen):
        right = _placed(rank, attention, folded, experts, chosen)
        mean = attention["dp"] * attention["cp"] * attention["tp"]
        return right | {name: (right[name][0], mean) for name in ("expert", "other")}

    def split_over_dp(rank, attention, folded, experts, chosen):
        """Takes all of dp for ep."""
        group = _group(rank, attention, "dp")
        place = group.index(rank) * experts // len(group)
        held = list(range(place, (group.index(rank) + 1) * experts // len(group)))
        return _placed(rank, attention, folded, experts, chosen, holds=held)

    def right(rank, attention, folded, experts, chosen):
        """All ranks' coordinates, compared with those of this one; tuples and sets."""

        def alike(grid, *free):
            every = itertools.product(*(range(n) for n in reversed(grid.values())))
            at = [dict(zip(reversed(grid), place, strict=True)) for place in every]
            return {r: c for r, c in enumerate(at) if all(c[a] == at[rank][a] for a in grid if a not in free)}

        each = experts // folded["ep"]
        home = {c["ep"] * each + i: r for r, c in alike(folded, "ep").items() for i in range(each)}
        mean = attention["dp"] * attention["cp"]
        return {
            "holds": {expert for expert, r in home.items() if r == rank},
            "sends_to": tuple(home[expert] for expert in chosen),
            "expert": [set(alike(folded, "edp")), mean],
            "other": [set(alike(attention, "dp", "cp")), mean],
        }

    def right_2(rank, attention, folded, experts, chosen):
        """An array of ranks for each grid, whose axes are cut out."""

        def cut(grid, *free):
            names = list(grid)[::-1]
            ranks = np.arange(math.prod(grid.values())).reshape([grid[a] for a in names])
            (where,) = np.argwhere(ranks == rank)
            return ranks[tuple(slice(None) if a in free else i for a, i in zip(names, where, strict=True))].ravel()

        parts, sharers = np.array_split(np.arange(experts), folded["ep"]), cut(folded, "ep")
        others = cut(attention, "dp", "cp")
        divisor = np.float64(len(others))
        return {
            "holds": parts[sharers.tolist().index(rank)],
            "sends_to": sharers[np.searchsorted([part[-1] for part in parts], chosen)],
            "expert": (cut(folded, "edp"), divisor),
            "other": (others, divisor),
        }

    def right_3(rank, attention, folded, experts, chosen):
        """Objects with attributes."""
        found = Place(**_placed(rank, attention, folded, experts, chosen))
        found.expert = SimpleNamespace(ranks=found.expert[0], divisor=found.expert[1])
        return found


#: What an answer must be told, by defect.
SENTENCES = {
    "one_list_for_all_rows": "one list",
    "divided_by_k": "divided by k",
    "factor_after_rounding": "after rounding",
    "places_for_each_choice": "places of their own",
    "last_tokens_first": "who comes first",
    "experts_in_use": "E is the number of all",
    "one_copy_in_all": "one copy a token in all",
    "k_copies_for_a_node": "once, not k times",
    "all_experts_on_a_node": "any of them is enough",
    "last_axis_fastest": "in another order here",
    "one_order_for_all_meshes": "in another order here",
    "first_replica": "this rank's own ep group",
    "out_of_dp_alone": "out of dp alone",
    "split_experts_over_etp": "leaves etp out",
    "neighbours_in_every_mesh": "to be neighbours",
    "bias_forgotten": "whatever the bias",
    "bias_in_the_weights": "The bias is in the weights: it chooses",
    "bias_on_the_logits": "added to the logits",
    "bias_as_a_factor": "multiplies scores",
    "by_pairs_of_ranks": "rows of",
    "one_more_than_whole": "leaves a whole number",
    "six_ways": "six",
    "back_by_copies": "one vector from each node too",
    "bias_turned_round": "taken away",
    "scores_not_divided": "divide them by the sum of the chosen",
    "divided_by_all_scores_with_the_bias": "do not add up to 1",
    "softmax_of_what_was_chosen": "through a softmax",
    "a_second_softmax": "a second softmax",
    "all_alike": "weigh the same",
    "over_the_tokens": "over the tokens",
    "one_of_the_two_is_sorted": "one of the two is sorted",
    "experts_first": "The weights come first",
    "smallest": "smallest",
    "sigmoids": "The scores are sigmoids here",
    "exchanged": "Rows and columns are exchanged",
    "a_token_once_a_rank": "each choice is a copy",
    "first_choice_only": "Only the first choice",
    "experts_in_blocks": "live in blocks",
    "experts_in_turns": "in turns",
    "nothing_for_itself": "a piece for the rank itself",
    "by_expert": "counts by expert",
    "idle_ranks_left_out": "as many ranks as lists",
    "rounded_down": "rounded down",
    "tokens_and_not_choices": "tokens and not choices",
    "rounded_before_k": "rounded before it is multiplied by k",
    "factor_forgotten": "factor is missing",
    "one_pool_for_all": "Nothing is dropped",
    "token_by_token": "first choices of all tokens go first",
    "last_come_first_served": "who comes first",
    "one_too_many": "one too many",
    "whole_tokens": "only the choice of the full expert",
    "dropless": "Nothing is dropped",
    "says_who_is_dropped": "stand for kept",
    "forward_only": "here it is two",
    "dispatch_forward_only": "here it is one",
    "combine_has_no_backward": "here it is three",
    "in_megabytes": "not MB",
    "in_mebibytes": "not MiB",
    "both_ways_of_the_wire": "count what it sends",
    "to_itself_as_well": "g - 1 ranks of its node",
    "all_that_leaves_the_rank": "stay inside it",
    "all_over_the_network": "stays in its own node",
    "one_copy_of_a_token": "all of them travel",
    "drawn_with_replacement": "different ones",
    "every_node": "does not meet every node",
    "own_node_too": "own node needs nothing",
    "a_copy_for_each_rank": "one for each node was asked",
    "nothing_saved": "two experts on a node cost as much as one",
    "mean_over_the_copies": "times what it should be",
    "without_the_idea_all_gradients_alike": "mixes gradients of different experts",
    "experts_over_ep": "The ep group holds different experts",
    "cp_forgotten": "over cp as well",
    "cp_forgotten_in_the_divisor": "have tokens of their own",
    "all_ranks_average": "leaves tp out",
    "all_stages_average": "stays inside a stage",
    "others_over_edp": "Only experts have their copies there",
    "summed_only": "is not divided",
    "dealt_in_turns": "dealt out in turns",
    "everything_everywhere": "not all of them",
    "rank_modulo_ep": "not rank % ep",
    "positions_and_not_ranks": "positions on the ep axis",
    "in_the_order_of_ranks": "in another order",
    "ep_beside_dp": "no factor beside dp",
    "mean_over_tp_too": "tp and pp ranks work on the same tokens",
    "split_over_dp": "experts / ep",
}
DEFECTS, SECOND_SOLUTIONS = listed(route, send_counts, kept_tokens, expert_bytes, place_experts)
