"""Planted defects of rung 10: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from tests.planted import asked, listed, told


def _ring(row, rank, ranks, exchange, *, halves=(True, True), first=0, cut=None, add_again=False, short=0):
    chunks = (cut or (lambda r, n: list(r.tensor_split(n))))(row, ranks)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1 - short if halves[0] else 0):
        coming = chunks[(rank - step - 1 + first) % ranks]
        landing = coming.new_empty(coming.shape)
        exchange(chunks[(rank - step + first) % ranks], right, landing, left)
        coming += landing
    for step in range(ranks - 1 if halves[1] else 0):
        coming = chunks[(rank - step + first) % ranks]
        landing = coming.new_empty(coming.shape)
        exchange(chunks[(rank + 1 - step + first) % ranks], right, landing, left)
        if add_again:
            coming += landing
        else:
            coming.copy_(landing)


class ring_all_reduce:
    no_all_gather = lambda row, rank, ranks, exchange: _ring(row, rank, ranks, exchange, halves=(True, False))

    def adds_in_the_all_gather(row, rank, ranks, exchange):
        _ring(row, rank, ranks, exchange, add_again=True)

    one_step_too_few = lambda row, rank, ranks, exchange: _ring(row, rank, ranks, exchange, short=1)

    def drops_what_is_left_over(row, rank, ranks, exchange):
        size = row.numel() // ranks
        _ring(row, rank, ranks, exchange, cut=lambda r, n: [r[i * size : (i + 1) * size] for i in range(n)])

    def last_chunk_takes_the_rest(row, rank, ranks, exchange):
        def cut(r, n):
            size = r.numel() // n
            return [*(r[i * size : (i + 1) * size] for i in range(n - 1)), r[(n - 1) * size :]]

        _ring(row, rank, ranks, exchange, cut=cut)

    def whole_array_round_the_ring(row, rank, ranks, exchange):
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        passing = row.clone()
        for _ in range(ranks - 1):
            landing = row.new_empty(row.shape)
            exchange(passing, right, landing, left)
            row += landing
            passing = landing

    def to_everybody_directly(row, rank, ranks, exchange):
        """Bytes and sums of a ring, and no ring: each chunk goes straight to its owner."""
        chunks = row.tensor_split(ranks)
        mine = chunks[rank].clone()
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            landing = mine.new_empty(mine.shape)
            exchange(chunks[to], to, landing, source)
            mine += landing
        chunks[rank].copy_(mine)
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            exchange(mine, to, chunks[source], source)

    def one_chunk_at_a_time(row, rank, ranks, exchange):
        """Each chunk makes its own journey; meanwhile the others send nothing."""
        chunks = row.tensor_split(ranks)
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        nothing = row[:0]
        for chunk in range(ranks):
            for step in range(2 * (ranks - 1)):
                sends, gets = (chunk + step) % ranks == rank, (chunk + step + 1) % ranks == rank
                landing = row.new_empty(chunks[chunk].shape if gets else 0)
                exchange(chunks[chunk] if sends else nothing, right, landing, left)
                if gets and step < ranks - 1:
                    chunks[chunk].add_(landing)
                elif gets:
                    chunks[chunk].copy_(landing)

    def each_chunk_in_two_messages(row, rank, ranks, exchange):
        for half in row.tensor_split(2):
            _ring(half, rank, ranks, exchange)

    def uncut_along_a_chain(row, rank, ranks, exchange):
        """Steps and bytes of a ring, all in all: the sums grow along the ranks, and come round again."""
        for step in range(2 * (ranks - 1)):
            sends, gets = rank == step % ranks, rank == (step + 1) % ranks
            landing = torch.empty_like(row if gets else row[:0])
            exchange(row if sends else row[:0], (rank + 1) % ranks, landing, (rank - 1) % ranks)
            if gets:
                row.copy_(row + landing if step < ranks - 1 else landing)

    def right(row, rank, ranks, exchange):
        """Second solution: the ring the other way round, recursive, on a flat row with its own borders."""
        borders = [chunk * row.numel() // ranks for chunk in range(ranks + 1)]

        def chunk(number):
            number %= ranks
            return row[borders[number] : borders[number + 1]]

        def travel(step):
            if step == 2 * (ranks - 1):
                return
            goes, comes = chunk(rank + step), chunk(rank + step + 1)
            room = comes.clone()
            exchange(goes.clone(), (rank - 1) % ranks, room, (rank + 1) % ranks)
            comes.copy_(comes + room if step < ranks - 1 else room)
            travel(step + 1)

        travel(0)

    def sums_returned(row, rank, ranks, exchange):
        """Leaves `row` as it is, and returns the sums."""
        mine = row.clone()
        _ring(mine, rank, ranks, exchange)
        return mine

    def means(row, rank, ranks, exchange):
        _ring(row, rank, ranks, exchange)
        row /= ranks

    def padded(row, rank, ranks, exchange):
        """All chunks as long as the longest: more elements travel than there are."""
        size = -(-row.numel() // ranks)
        long = row.new_zeros(size * ranks)
        long[: row.numel()] = row
        _ring(long, rank, ranks, exchange)
        row.copy_(long[: row.numel()])

    def replaces_from_the_start(row, rank, ranks, exchange):
        chunks = row.tensor_split(ranks)
        for step in range(2 * (ranks - 1)):
            goes, comes = chunks[(rank - step) % ranks].clone(), chunks[(rank - step - 1) % ranks]
            exchange(goes, (rank + 1) % ranks, comes, (rank - 1) % ranks)

    def passes_on_another_chunk(row, rank, ranks, exchange):
        """Begins the all-gather with the chunk of its own number, which is complete on its left neighbour."""
        _ring(row, rank, ranks, exchange, halves=(True, False))
        chunks = row.tensor_split(ranks)
        for step in range(ranks - 1):
            goes, comes = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
            exchange(goes, (rank + 1) % ranks, comes, (rank - 1) % ranks)

    def never_stops(row, rank, ranks, exchange):
        while ranks > 1:
            _ring(row, rank, ranks, exchange)

    def room_in_float32(row, rank, ranks, exchange):
        """`torch.empty` without a type; on real processes the bytes would not fit."""
        chunks = row.tensor_split(ranks)
        for step in range(2 * (ranks - 1)):
            comes = chunks[(rank - step - 1) % ranks]
            room = torch.empty(len(comes))
            exchange(chunks[(rank - step) % ranks], (rank + 1) % ranks, room, (rank - 1) % ranks)
            comes.copy_(comes + room if step < ranks - 1 else room)

    def adds_up_in_float32(row, rank, ranks, exchange):
        _ring(row, rank, ranks, exchange)
        row.copy_(row.float())

    def lands_on_what_it_adds_to(row, rank, ranks, exchange):
        chunks = row.tensor_split(ranks)
        for step in range(2 * (ranks - 1)):
            comes = chunks[(rank - step - 1) % ranks]
            exchange(chunks[(rank - step) % ranks], (rank + 1) % ranks, comes, (rank - 1) % ranks)
            comes.mul_(1 + (step < ranks - 1))

    def one_step_too_many(row, rank, ranks, exchange):
        _ring(row, rank, ranks, exchange)
        chunks = row.tensor_split(ranks)
        if ranks > 1:
            exchange(chunks[rank].clone(), (rank + 1) % ranks, chunks[rank - 1], (rank - 1) % ranks)

    def right_3(row, rank, ranks, exchange):
        """Every n-th element makes a chunk, and the ring visits the even ranks first."""
        ring = [*range(0, ranks, 2), *range(1, ranks, 2)]
        place, chunks = ring.index(rank), [row[first::ranks] for first in range(ranks)]
        for step in range(2 * (ranks - 1)):
            comes = chunks[(place - step - 1) % ranks]
            room = torch.empty(len(comes), dtype=row.dtype)
            exchange(chunks[(place - step) % ranks], ring[(place + 1) % ranks], room, ring[place - 1])
            comes.copy_(comes + room if step < ranks - 1 else room)

    def right_2(row, rank, ranks, exchange):
        """Copies in place of views, one loop over both halves, and numpy's numbers."""
        pieces = [piece.clone() for piece in row.tensor_split(ranks)]
        held = np.int64(rank)
        for step in range(2 * (ranks - 1)):
            comes = (held - 1) % ranks
            room = torch.empty_like(pieces[comes])
            exchange(send=pieces[held], to=np.int64((rank + 1) % ranks), receive=room, source=(rank - 1) % ranks)
            pieces[comes] = pieces[comes] + room if step < ranks - 1 else room
            held = comes
        row[:] = torch.cat(pieces)


def _choose(size, ranks, bandwidth, latency, ring=None, tree=None, best=None, cross=None):
    levels = math.ceil(math.log2(ranks))
    ring = ring or (2 * (ranks - 1), 2 * (ranks - 1) / ranks)
    tree = tree or (2 * levels, 2 * levels)
    times = {
        name: rounds * latency + passes * size / bandwidth
        for name, (rounds, passes) in {"ring": ring, "tree": tree}.items()
    }
    if cross is None:
        cross = max(0.0, (ring[0] - tree[0]) * latency / ((tree[1] - ring[1]) / bandwidth))
    return {**times, "crossover": cross, "best": best or min(times, key=times.get)}


class choose_algorithm:
    no_latency = asked(_choose, ring=lambda ranks: (0, 2 * (ranks - 1) / ranks))
    latency_once = asked(_choose, ring=lambda ranks: (2, 2 * (ranks - 1) / ranks))
    reduce_scatter_only = asked(_choose, ring=lambda ranks: (ranks - 1, (ranks - 1) / ranks))
    without_the_idea_always_the_ring = asked(_choose, best="ring")

    # Takes the size where the ring's own two terms are equal for the crossover.
    where_latency_equals_bytes = asked(_choose, cross=lambda ranks, latency, bandwidth: ranks * latency * bandwidth)
    in_bits = asked(_choose, size=lambda size: 8 * size)
    n_steps_in_each_half = asked(_choose, ring=lambda ranks: (2 * ranks, 2))
    pipelined_tree = asked(_choose, tree=lambda ranks: (2 * math.ceil(math.log2(ranks)), 2))
    levels_rounded_down = asked(_choose, tree=lambda ranks: [2 * max(1, math.floor(math.log2(ranks)))] * 2)
    crossover_in_seconds_a_byte = told(
        _choose, lambda right, bandwidth: right | {"crossover": right["crossover"] / bandwidth}
    )

    def larger_term_alone(size, ranks, bandwidth, latency):
        passes, levels = 2 * (ranks - 1) / ranks, math.ceil(math.log2(ranks))
        ring = max(2 * (ranks - 1) * latency, passes * size / bandwidth)
        return _choose(size, ranks, bandwidth, latency) | {
            "ring": ring,
            "tree": 2 * levels * max(latency, size / bandwidth),
        }

    def crossover_below_zero(size, ranks, bandwidth, latency):
        """Where the ring always wins, the two lines cross left of zero."""
        levels, passes = math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks
        cross = (2 * (ranks - 1) - 2 * levels) * latency * bandwidth / (2 * levels - passes)
        return _choose(size, ranks, bandwidth, latency, cross=cross if cross > 0 else -float(ranks))

    def waits_for_the_times_to_meet(size, ranks, bandwidth, latency):
        bound = 0
        while _choose(size, ranks, bandwidth, latency)["ring"] > 0:
            bound += 1
        return bound

    names_exchanged = told(_choose, lambda right: right | {"ring": right["tree"], "tree": right["ring"]})
    no_crossover = told(_choose, lambda right: right | {"crossover": right["crossover"] or None})
    best_in_a_list = asked(_choose, best=["ring"])

    def right_3(size, ranks, bandwidth, latency):
        """An object, chunks of whole bytes, and the first whole byte from which the ring is faster."""
        right, chunks = (_choose(s, ranks, bandwidth, latency) for s in (size, -(-size // ranks) * ranks))
        ring, tree, cross = chunks["ring"], right["tree"], right["crossover"] and math.floor(right["crossover"]) + 1
        return SimpleNamespace(ring=ring, tree=tree, crossover=cross, best="ring" if ring < tree else "tree")

    def right_2(size, ranks, bandwidth, latency):
        """Exact fractions, in numpy's numbers; the crossover is a whole number of bytes."""
        alpha, beta, levels = Fraction(latency), 1 / Fraction(bandwidth), (ranks - 1).bit_length()
        times = {
            "ring": 2 * (ranks - 1) * (alpha + Fraction(size, ranks) * beta),
            "tree": 2 * levels * (alpha + size * beta),
        }
        cross = alpha * (2 * (ranks - 1) - 2 * levels) / (beta * (2 * levels - Fraction(2 * (ranks - 1), ranks)))
        seconds = {name: np.float64(float(time)) for name, time in times.items()}
        return {
            **seconds,
            "crossover": np.int64(max(0, round(cross))),
            "best": min(times, key=times.get),
            "gain": float(times["tree"] / times["ring"]),
        }

    def right(size, ranks, bandwidth, latency):
        """Second solution: step by step, and the crossing by halving an interval."""

        def ring(s):
            return sum(latency + s / ranks / bandwidth for _ in range(2 * (ranks - 1)))

        def tree(s):
            have, rounds = 1, 0
            while have < ranks:
                have, rounds = 2 * have, rounds + 1
            return 2 * rounds * (latency + s / bandwidth)

        low, high = 0.0, 2.0**60
        if ring(1e-9) <= tree(1e-9):
            high = 0.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if ring(middle) > tree(middle) else (low, middle)
        choice = "tree" if tree(size) < ring(size) else "ring"
        return {"best": choice, "crossover": high, "ring": ring(size), "tree": tree(size)}


def _leaving(order, axes, per_host, *, host=None, back=True, factor=None, crossing=True, busiest=max):
    host = host or (lambda rank: rank // per_host)
    ranks = math.prod(axes[name][0] for name in order)
    out, stride = [0.0] * (ranks // per_host), 1
    for name in order:
        size, kind, payload = axes[name]
        for rank in range(ranks):
            at = rank // stride % size
            edges = [1] if kind == "all_reduce" else [s for s in ((1, -1) if back else (1,)) if 0 <= at + s < size]
            share = 1 if kind == "stages" else factor(size) if factor else 2 * (size - 1) / size
            for step in edges:
                target = rank + ((at + step) % size - at) * stride
                if host(target) != host(rank) or not crossing:
                    out[host(rank) % len(out)] += share * payload
        stride *= size
    return busiest(out)


def _best(axes, per_host, choose=None, count=None):
    orders = list(itertools.permutations(axes))
    order = choose(orders) if choose else min(orders, key=lambda names: _leaving(names, axes, per_host))
    return order, (count or _leaving)(order, axes, per_host)


def _counting(**how):
    """Return an answer with the right order, and its bytes counted otherwise."""
    return lambda *case: _best(*case, count=lambda order, axes, per_host: _leaving(order, axes, per_host, **how))


@dataclass
class Placement:
    order: Iterator[str]
    leaving: torch.Tensor


class place:
    tensor_parallel_always_inside = asked(
        _best, choose=lambda axes: lambda _: tuple(sorted(axes, key=("tp", "pp", "dp").index))
    )
    largest_payload_inside = asked(_best, choose=lambda axes: lambda _: tuple(sorted(axes, key=lambda a: -axes[a][2])))
    largest_payload_outside = asked(_best, choose=lambda axes: lambda _: tuple(sorted(axes, key=lambda a: axes[a][2])))
    counts_what_stays_inside = _counting(crossing=False)

    def turns_the_order_round(axes, ranks_per_host):
        """Tries each axis innermost, and leaves the others in the order that they have."""
        turned = [tuple(axes)[k:] + tuple(axes)[:k] for k in range(len(axes))]
        return _best(
            axes, ranks_per_host, choose=lambda _: min(turned, key=lambda o: _leaving(o, axes, ranks_per_host))
        )

    def stages_send_one_way(axes, ranks_per_host):
        orders = list(itertools.permutations(axes))
        order = min(orders, key=lambda names: _leaving(names, axes, ranks_per_host, back=False))
        return order, _leaving(order, axes, ranks_per_host, back=False)

    payload_once = _counting(factor=lambda size: 1)
    all_hosts_together = _counting(busiest=sum)

    def ranks_dealt_out_like_cards(axes, ranks_per_host):
        """Takes rank r to be on host r mod hosts."""
        ranks = math.prod(size for size, _, _ in axes.values())
        hosts = ranks // ranks_per_host
        return _best(axes, ranks_per_host, count=lambda o, a, g: _leaving(o, a, g, host=lambda rank: rank % hosts))

    mean_over_the_hosts = _counting(busiest=fmean)
    payload_twice = _counting(factor=lambda size: 2)
    payload_in_each_step = _counting(factor=lambda size: 2 * (size - 1))
    outermost_first = told(_best, lambda found: (found[0][::-1], found[1]))
    bytes_before_the_order = told(_best, lambda found: found[::-1])
    counts_what_arrives = told(_best, lambda found: (found[0], 2 * found[1]))

    def n_of_all_ranks(axes, ranks_per_host):
        ranks = math.prod(size for size, _, _ in axes.values())
        return _best(
            axes, ranks_per_host, count=lambda o, a, g: _leaving(o, a, g, factor=lambda _: 2 * (ranks - 1) / ranks)
        )

    def stages_in_a_ring(axes, ranks_per_host):
        """The last stage sends to the first, and the first to the last."""

        def leaving(order, axes, per_host):
            out, stride = {}, 1
            ranks = math.prod(axes[name][0] for name in order)
            for name in order:
                size, kind, payload = axes[name]
                links = [(1, payload), (-1, payload)] if kind == "stages" else [(1, payload * 2 * (size - 1) / size)]
                for rank, (step, count) in itertools.product(range(ranks), links):
                    at = rank // stride % size
                    there = (rank + ((at + step) % size - at) * stride) // per_host
                    out[rank // per_host] = out.get(rank // per_host, 0) + count * (there != rank // per_host)
                stride *= size
            return max(out.values())

        return _best(axes, ranks_per_host, count=leaving)

    what_one_rank_sends = lambda *case: _best(*case, count=lambda o, a, g: _leaving(o, a, g) / g)
    names_in_a_set = told(_best, lambda found: (set(found[0]), found[1]))

    def right_3(axes, ranks_per_host):
        """A dataclass, with the names one after the other."""
        order, count = _best(axes, ranks_per_host)
        return Placement(iter(order), torch.tensor(count, dtype=torch.float64))

    def right_2(axes, ranks_per_host):
        """As arrays: the hosts of both ends of every link, in a list of two."""
        found = []
        for order in itertools.permutations(axes):
            sizes = [axes[name][0] for name in order]
            rank = np.arange(math.prod(sizes)).reshape(sizes[::-1])
            out = np.zeros(rank.size // ranks_per_host)
            for axis, name in zip(range(len(order) - 1, -1, -1), order, strict=True):
                size, kind, payload = axes[name]
                ahead = np.roll(rank, -1, axis)
                if kind == "all_reduce":
                    links = [(rank, ahead, payload * 2 * (size - 1) / size)]
                else:
                    cut = [slice(None)] * len(sizes)
                    cut[axis] = slice(0, size - 1)
                    one, other = rank[tuple(cut)], ahead[tuple(cut)]
                    links = [(one, other, payload), (other, one, payload)]
                for source, target, count in links:
                    crosses = source // ranks_per_host != target // ranks_per_host
                    np.add.at(out, source[crosses] // ranks_per_host, count)
            found.append((out.max(), list(order)))
        count, order = min(found)
        return [np.array(order), np.int64(round(count))]

    def right(axes, ranks_per_host):
        """Second solution: build each axis's groups by coordinates, then walk along their links."""
        results = {}
        for order in itertools.permutations(axes):
            sizes = [axes[name][0] for name in reversed(order)]
            coordinates = list(itertools.product(*map(range, sizes)))
            number = {c: rank for rank, c in enumerate(coordinates)}
            leaves = {}
            for position, name in enumerate(reversed(order)):
                size, kind, payload = axes[name]
                for rest in {(*c[:position], 0, *c[position + 1 :]) for c in coordinates}:
                    group = [number[(*rest[:position], i, *rest[position + 1 :])] for i in range(size)]
                    links = [(a, b, payload) for a, b in itertools.pairwise(group)]
                    links += [(b, a, payload) for a, b, _ in links]
                    if kind == "all_reduce":
                        share = 2 * payload - 2 * payload / size
                        links = [(a, b, share) for a, b in zip(group, group[1:] + group[:1], strict=True)]
                    for a, b, count in links:
                        hosts = a // ranks_per_host, b // ranks_per_host
                        leaves[hosts[0]] = leaves.get(hosts[0], 0) + count * (hosts[0] != hosts[1])
            results[order] = max(leaves.values())
        order = min(sorted(results), key=results.get)
        return list(order), results[order]


DEFECTS, SECOND_SOLUTIONS = listed(ring_all_reduce, choose_algorithm, place)

#: What the sentence about a defect must say.
SENTENCES = {
    "no_all_gather": "must go round once more", "adds_in_the_all_gather": "replaces what is there",
    "one_step_too_few": "rank 0 takes 5 steps", "drops_what_is_left_over": "whatever is left over",
    "last_chunk_takes_the_rest": "cut as evenly as can be", "whole_array_round_the_ring": "never the whole array",
    "to_everybody_directly": "one right neighbour", "one_chunk_at_a_time": "all chunks travel at the same time",
    "no_latency": "The latencies are missing", "latency_once": "their latencies add up",
    "reduce_scatter_only": "two halves", "without_the_idea_always_the_ring": "The tree takes less time",
    "where_latency_equals_bytes": "says nothing about the tree",
    "tensor_parallel_always_inside": "count the bytes of every order",
    "largest_payload_inside": "count the bytes of every order",
    "largest_payload_outside": "count the bytes of every order", "counts_what_stays_inside": "stay inside a host",
    "stages_send_one_way": "activations forward and gradients back", "payload_once": "not all of it once",
    "all_hosts_together": "each has a link of its own", "ranks_dealt_out_like_cards": "neighbouring ranks share a host",
    "sums_returned": "`row` is unchanged", "means": "the means over the ranks", "padded": "padded to 4",
    "replaces_from_the_start": "is added to what is there", "passes_on_another_chunk": "must leave first", "never_stops": "a loop in your answer never ends",
    "in_bits": "not in bits", "n_steps_in_each_half": "n - 1 steps to reach the last one",
    "pipelined_tree": "as NCCL's do", "levels_rounded_down": "rounded up", "crossover_in_seconds_a_byte": "W belongs above the line",
    "crossover_below_zero": "the crossover is 0", "waits_for_the_times_to_meet": "It never ends",
    "mean_over_the_hosts": "the mean over the hosts", "payload_twice": "not all of it twice", "payload_in_each_step": "in a step of the ring a chunk",
    "room_in_float32": "receive is float32", "adds_up_in_float32": "The sums are rounded",
    "lands_on_what_it_adds_to": "room of its own to arrive in", "one_step_too_many": "a rank takes 7 steps",
    "names_exchanged": "`ring` has the time of the tree", "no_crossover": "0 where the ring is always faster",
    "best_in_a_list": "the word 'ring' or 'tree'", "counts_what_arrives": "only what leaves is asked",
    "n_of_all_ranks": "not the number of all ranks", "stages_in_a_ring": "but the first and the last stage have one",
    "what_one_rank_sends": "but this is what one rank sends", "names_in_a_set": "A set has no order",
    "each_chunk_in_two_messages": "costs α again", "uncut_along_a_chain": "uncut from rank to rank",
    "larger_term_alone": "takes its latency and then", "turns_the_order_round": "count the bytes of every order",
    "outermost_first": "comes first", "bytes_before_the_order": "The order of the axes comes first",
}  # fmt: skip
