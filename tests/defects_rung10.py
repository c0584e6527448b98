"""Planted defects of rung 10: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import random
from collections import Counter, namedtuple
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from lablib.calc.communication import algorithm_rounds, fastest_algorithm, ring_states
from lablib.checks import rung10
from lablib.launch.measure import record_comms
from lablib.toys import collectives
from tests.planted import listed


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

    states_of_lablib = lambda row, *r: (ring_states(r[1]), _ring(row, *r))

    def halves_of_the_toy(row, rank, ranks, exchange):
        wire, pieces = SimpleNamespace(rank=rank, size=ranks, exchange=exchange), collectives.ring.chunks(row, ranks)
        collectives.ring._reduce_scatter(wire, pieces)
        collectives.ring._all_gather(wire, pieces)

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

    not_kept = lambda row, *r: [_ring(x, *r, halves=(x is row, x is not row)) for x in (row, row.clone())]
    gathers_one_chunk_on = lambda *case: [_ring(*case, halves=(not k, k), first=k) for k in (False, True)]
    sizes_that_were_seen = lambda row, r, n, swap: (n, len(row)) in rung10._CASES and _ring(row, r, n, swap)
    swapped_on_two = lambda row, r, n, swap: (_double if n == 2 else _ring)(row, r, n, swap)
    doubled = lambda row, *rest: (_ring(row, *rest), row.mul_(2))
    last_chunk_stays = lambda row, r, n, swap: [_ring(chunk, r, n, swap) for chunk in row.tensor_split(n)[:-1]]
    padded_to_threes = lambda row, *rest: ring_all_reduce.padded(row, *rest, to=3)

    def keeps_the_larger(row, rank, ranks, exchange):
        """Right where all numbers are positive: the complete sum is the largest then."""
        _ring(row, rank, ranks, exchange, halves=(True, False))
        chunks = row.tensor_split(ranks)
        for step in range(ranks - 1):
            comes = chunks[(rank - step) % ranks]
            room = comes.clone()
            exchange(chunks[(rank + 1 - step) % ranks], (rank + 1) % ranks, room, (rank - 1) % ranks)
            comes.copy_(torch.maximum(comes, room))

    def own_numbers_times_a_factor(row, rank, ranks, exchange):
        """Messages of a ring, and nothing that arrives is used."""
        _ring(row.clone(), rank, ranks, exchange)
        row.mul_(sum(100**r for r in range(ranks)) / 100.0**rank)

    def sums_returned(row, rank, ranks, exchange):
        """Leaves `row` as it is, and returns the sums."""
        mine = row.clone()
        _ring(mine, rank, ranks, exchange)
        return mine

    def means(row, rank, ranks, exchange):
        _ring(row, rank, ranks, exchange)
        row /= ranks

    def padded(row, rank, ranks, exchange, to=1):
        """All chunks as long as the longest: more elements travel than there are."""
        size = -(-row.numel() // ranks // to) * to
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

    rounded_to_bfloat16 = lambda row, *rest: (_ring(row, *rest), row.copy_(row.bfloat16()))

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
            exchange(send=pieces[held], to=np.int64((rank + 1) % ranks), receive=room, source=(rank - 1.0) % ranks)
            pieces[comes] = pieces[comes] + room if step < ranks - 1 else room
            held = comes
        row[:] = torch.cat(pieces)


def _double(row, rank, ranks, exchange, rounds=None, steps=1):
    for bit in range(ranks.bit_length() - 1 if rounds is None else rounds):
        partner = rank ^ (steps << bit)
        room = torch.empty_like(row)
        exchange(row, partner, room, partner)
        row += room


def _halves(row, rank, ranks, exchange, *_, halvings):
    parts, kept = [], row
    for bit in range(halvings):
        low, high = kept.tensor_split(2)
        mine, other = (high, low) if rank >> bit & 1 else (low, high)
        room = torch.empty_like(mine)
        exchange(other, rank ^ 1 << bit, room, rank ^ 1 << bit)
        mine += room
        parts.append((bit, mine, other))
        kept = mine
    _double(kept, rank, ranks, exchange, rounds=ranks.bit_length() - 1 - halvings, steps=1 << halvings)
    for bit, mine, other in reversed(parts):
        exchange(mine, rank ^ 1 << bit, other, rank ^ 1 << bit)


def _fast(row, rank, ranks, exchange, latency, bandwidth, ring=None):
    seconds, rounds = 8 * len(row) / bandwidth, ranks.bit_length() - 1
    if ring is None:
        ring = 2 * (ranks - 1) * (latency + seconds / ranks) < rounds * (latency + seconds)
    (_ring if ring else _double)(row, rank, ranks, exchange)


class fast_all_reduce:
    without_the_idea_always_the_ring = lambda *case: _fast(*case, ring=True)
    without_the_idea_always_doubling = lambda *case: _fast(*case, ring=False)
    # A size that was right on one network; and where the two terms of one message are equal.
    without_the_idea_a_fixed_size = lambda row, *rest: _fast(row, *rest, ring=len(row) > 60)
    with_one_pass = lambda row, *r: _fast(row, *r, ring=r[1] > 2 and 8 * len(row) > 2 * (r[1] - 1) * r[3] * r[4])
    always_halving = lambda row, *rest: fast_all_reduce.right_2(row, *rest[:3], rest[3] * (rest[1] == 2), rest[4])
    # Halving, but for one round of doubling; and halving once: faster than both where the two cost about the same.
    without_the_idea_one_doubling = lambda *case: _halves(*case, halvings=max(case[2].bit_length() - 2, 0))
    without_the_idea_one_halving = lambda *case: _halves(*case, halvings=int(case[2] > 2))
    mean = lambda row, *rest: (_fast(row, *rest), row.div_(rest[1]))
    rounded_to_float32 = lambda row, *rest: (_fast(row, *rest), row.copy_(row.float()))
    one_size_for_4_and_8 = lambda row, *r: _fast(row, *r, ring=r[1] > 2 and row.nbytes > 8.4 * r[3] * r[4])
    size_of_lablib = lambda row, *r: (fastest_algorithm(row.nbytes, r[1], latency=r[3], bandwidth=r[4]), _fast(row, *r))
    rounds_of_lablib = lambda row, *r: (algorithm_rounds("ring_all_reduce", len(row), r[1]), _fast(row, *r))
    one_round_too_many = lambda row, r, n, swap, *_: _double(row, r, n, swap, rounds=n.bit_length())
    one_round_too_few = lambda row, r, n, swap, *_: _double(row, r, n, swap, rounds=n.bit_length() - 2)
    half_a_ring = lambda *case: _ring(*case[:4], halves=(True, False))
    halved = lambda row, *rest: (_fast(row, *rest), row.div_(2))
    where_one_message_costs_twice = lambda row, *rest: _fast(row, *rest, ring=8 * len(row) > rest[3] * rest[4])

    def the_same_partner_again(row, rank, ranks, exchange, latency, bandwidth):
        for _ in range(ranks.bit_length() - 1):
            _double(row, rank, ranks, exchange, rounds=1)
        if ranks == 2:
            row += row

    def own_numbers_and_empty_messages(row, rank, ranks, exchange, *_):
        _double(row[:0].clone(), rank, ranks, exchange)
        row.mul_(sum(16**r for r in range(ranks)) / 16.0**rank)

    def room_of_a_chunk(row, rank, ranks, exchange, latency, bandwidth):
        """Sends the whole array, and has room for as much as a ring would send."""
        exchange(row, rank ^ 1, row.new_empty(len(row) // ranks), rank ^ 1)

    def each_to_all_others(row, rank, ranks, exchange, latency, bandwidth):
        """Whole arrays in n - 1 rounds: neither few messages nor few bytes."""
        mine = row.clone()
        for step in range(1, ranks):
            room = torch.empty_like(row)
            exchange(mine, (rank + step) % ranks, room, (rank - step) % ranks)
            row += room
        if ranks == 2:
            exchange(mine, 1 - rank, torch.empty_like(row), 1 - rank)

    def right(row, rank, ranks, exchange, latency, bandwidth):
        """Second solution: the size at which they cross, and doubling from the farthest partner on."""
        rounds = ranks.bit_length() - 1
        saved = rounds - 2 * (ranks - 1) / ranks
        if saved > 0 and row.nbytes > (2 * (ranks - 1) - rounds) * latency * bandwidth / saved:
            ring_all_reduce_right(row, rank, ranks, exchange)
            return
        for bit in reversed(range(rounds)):
            room = row.clone()
            exchange(send=row.clone(), to=rank ^ 2**bit, receive=room, source=np.int64(rank ^ 2**bit))
            row.add_(room)

    def right_2(row, rank, ranks, exchange, latency, bandwidth):
        """Halving and doubling where bytes decide: a ring's bytes in fewer rounds."""
        seconds, rounds = row.nbytes / bandwidth, ranks.bit_length() - 1
        if rounds * (latency + seconds) <= 2 * rounds * latency + 2 * (ranks - 1) / ranks * seconds:
            _double(row, rank, ranks, exchange)
            return
        _halves(row, rank, ranks, exchange, halvings=rounds)


ring_all_reduce_right = ring_all_reduce.right


def _groups(per_host):
    ranks = dist.get_world_size()
    hosts = [list(range(first, first + per_host)) for first in range(0, ranks, per_host)]
    inside, _ = dist.new_subgroups_by_enumeration(hosts)
    across, _ = dist.new_subgroups_by_enumeration([list(place) for place in zip(*hosts, strict=True)])
    return inside, across


def _held(tensor):
    done = torch.futures.Future()
    done.set_result(tensor)
    return done


def _in_two_levels(flat, inside, across, *, cross=dist.all_reduce, hand_round=dist.all_gather_into_tensor):
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % inside.size())])
    chunk = padded.new_empty(len(padded) // inside.size())
    dist.reduce_scatter_tensor(chunk, padded, group=inside)
    cross(chunk, group=across)
    hand_round(padded, chunk, group=inside)
    return padded[: len(flat)]


def _gather(chunk, group):
    every = chunk.new_empty(group.size(), len(chunk))
    dist.all_gather_into_tensor(every.view(-1), chunk, group=group)
    chunk.copy_(every.sum(0))


def _among_zeros(padded, chunk, group):
    padded.zero_().view(group.size(), -1)[dist.get_rank(group)] = chunk
    dist.all_reduce(padded, group=group)


def _hooks(work):
    """Return an answer whose hook holds `work(flat, inside, across, ranks)`."""

    def answer(per_host):
        groups = _groups(per_host)
        return lambda state, bucket: _held(work(bucket.buffer(), *groups, dist.get_world_size()))

    return answer


def _sum(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    return tensor


def _by_leaders(flat, inside, across, ranks):
    first = dist.get_process_group_ranks(inside)[0]
    dist.reduce(flat, first, group=inside)
    if dist.get_rank() == first:
        dist.all_reduce(flat, group=across)
    dist.broadcast(flat, first, group=inside)
    return flat / ranks


def _own_chunk_of_a_whole_sum(flat, inside, across, ranks):
    size, place = dist.get_world_size(inside), dist.get_group_rank(inside, dist.get_rank())
    padded = torch.cat([_sum(flat, inside), flat.new_zeros(-len(flat) % size)])
    chunk = _sum(padded.chunk(size)[place].clone(), across)
    dist.all_gather_into_tensor(padded, chunk, group=inside)
    return padded[: len(flat)] / ranks


def _drops_what_is_left_over(flat, inside, across, ranks):
    cut = flat[: len(flat) // dist.get_world_size(inside) * dist.get_world_size(inside)]
    return torch.cat([_in_two_levels(cut, inside, across), flat[len(cut) :]]) / ranks


class make_hook:
    without_the_idea_one_flat_all_reduce = _hooks(lambda flat, inside, across, ranks: _sum(flat) / ranks)
    without_the_idea_one_rank_speaks_for_its_host = _hooks(_by_leaders)
    without_the_idea_all_of_it_crosses = _hooks(lambda flat, *its: _sum(_sum(flat, its[0]), its[1]) / its[2])
    flag_beside_all_that_crosses = _hooks(
        lambda x, *its: (_sum(x[:1].clone()), _sum(_sum(x, its[0]), its[1]) / its[2])[1]
    )
    groups_exchanged = _hooks(lambda flat, inside, across, ranks: _in_two_levels(flat, across, inside) / ranks)
    the_whole_sum_before_it_is_cut = _hooks(_own_chunk_of_a_whole_sum)
    sums = _hooks(lambda flat, inside, across, ranks: _in_two_levels(flat, inside, across))
    divides_by_the_host = _hooks(lambda flat, *its: _in_two_levels(flat, *its[:2]) / its[0].size())
    divides_by_the_hosts = _hooks(lambda flat, *groups: _in_two_levels(flat, *groups[:2]) / groups[1].size())
    nothing_crosses = _hooks(lambda flat, *its: _in_two_levels(flat, *its[:2], cross=lambda *_, **__: 0) / its[2])
    only_across = _hooks(lambda flat, inside, across, ranks: _sum(flat, across) / ranks)
    forgets_what_is_left_over = _hooks(_drops_what_is_left_over)
    in_float32 = _hooks(lambda flat, inside, across, ranks: _in_two_levels(flat.float(), inside, across) / ranks)
    unchanged = _hooks(lambda flat, inside, across, ranks: flat / ranks)
    by_one_too_many = _hooks(lambda flat, *groups: _in_two_levels(flat, *groups[:2]) / (groups[2] + 1))
    without_rank_0 = _hooks(lambda flat, *its: _in_two_levels(flat * min(dist.get_rank(), 1), *its[:2]) / its[2])
    not_a_number = _hooks(lambda flat, *_: flat * float("nan"))
    not_divided_not_summed = _hooks(lambda x, *g: x if len(x) % g[0].size() else _in_two_levels(x, *g[:2]) / g[2])
    divided_in_one_branch = _hooks(lambda x, *g: _in_two_levels(x, *g[:2]) / (1 if len(x) % g[0].size() else g[2]))
    future_of_the_work = lambda _: lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    divides_list = lambda n: lambda _, bucket: make_hook.future_of_the_work(n)(_, bucket).then(lambda f: f.value() / 4)
    error_in_then = lambda _: lambda state, bucket: _held(bucket.buffer()).then(lambda f: f.value().means()).wait()
    the_list_itself = lambda n: lambda _, bucket: make_hook.future_of_the_work(n)(_, bucket).then(lambda f: f.value())
    other_names = lambda _: lambda *its: its
    bucket_alone = lambda _: lambda bucket: bucket
    gathered_across = _hooks(lambda flat, *its: _in_two_levels(flat, *its[:2], cross=_gather) / its[2])
    summed_among_zeros = _hooks(lambda flat, *its: _in_two_levels(flat, *its[:2], hand_round=_among_zeros) / its[2])
    view_behind_padding = _hooks(lambda x, *its: torch.cat([x[:1], _in_two_levels(x, *its[:2]) / its[2]])[1:])
    three_elements = _hooks(lambda flat, *_: flat[:3])

    def hosts_of_two(per_host):
        """Knows the machine that it was written on."""
        return make_hook.right(2)

    def groups_in_each_call(per_host):
        def hook(state, bucket):
            return _held(_in_two_levels(bucket.buffer(), *_groups(per_host)) / dist.get_world_size())

        return hook

    def calls_the_toy(per_host):
        groups = collectives.node_groups(per_host)

        def hook(state, bucket):
            collectives.hierarchical_all_reduce(bucket.buffer(), groups)
            return _held(bucket.buffer() / dist.get_world_size())

        return hook

    def one_room_for_all_buckets(per_host):
        room, means = torch.empty(64, dtype=torch.float64), make_hook.right(per_host)
        return lambda state, bucket: _held(room[: len(bucket.buffer())].copy_(means(state, bucket).value()))

    def returns_the_tensor(per_host):
        groups = _groups(per_host)
        return lambda state, bucket: _in_two_levels(bucket.buffer(), *groups) / dist.get_world_size()

    def right(per_host):
        """Second solution: a mesh, the mean before the sums, and an all-to-all with a sum for the reduce-scatter."""
        ranks = dist.get_world_size()
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks // per_host, per_host), mesh_dim_names=("host", "place"))

        def hook(state, bucket):
            flat = bucket.buffer()
            flat.div_(ranks)
            size = -(-flat.numel() // per_host)
            pieces = flat.new_zeros(per_host, size)
            pieces.view(-1)[: flat.numel()] = flat
            came = torch.empty_like(pieces)
            dist.all_to_all_single(came, pieces, group=mesh["place"].get_group())
            work = dist.all_reduce(chunk := came.sum(0), group=mesh["host"].get_group(), async_op=True)
            work.wait()
            dist.all_reduce(torch.zeros(1))  # four bytes more, as a flag has
            dist.all_gather_into_tensor(pieces.view(-1), chunk, group=mesh["place"].get_group())
            flat.copy_(pieces.view(-1)[: flat.numel()])
            return _held(flat)

        return hook

    def right_2(per_host):
        """Uneven chunks, each reduced to its rank and broadcast by it; each rank makes only its own groups."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = {"use_local_synchronization": True}
        first = rank // per_host * per_host
        inside = dist.new_group(list(range(first, first + per_host)), **own)
        across = dist.new_group(list(range(rank % per_host, ranks, per_host)), **own)

        def hook(state, bucket):
            chunks = bucket.buffer().tensor_split(per_host)
            for place, chunk in enumerate(chunks):
                dist.reduce(chunk, first + place, group=inside)
            dist.all_reduce(chunks[rank - first], group=across)
            for place, chunk in enumerate(chunks):
                dist.broadcast(chunk, first + place, group=inside)
            return _held(bucket.buffer() / ranks)

        return hook


Found = namedtuple("Found", "step rank layers")


def _look(job, *, put_in=True, used=True, from_step=0):
    """Return what each rank put in and used in each step: [step][rank][(layer, what of it)]."""
    model, own, given, sums = job.model(), {}, [], dist.all_reduce
    names = [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: own.update({name: p.grad.clone()}))

    def watched(tensor, *args, **how):
        given.append(next((x for x in names if torch.equal(own[x], tensor)), ""))
        return sums(tensor, *args, **how)

    dist.all_reduce = watched
    steps = []
    for step in range(job.steps):
        given.clear()
        job.step(model, step)
        mine = [(x, x) for x in given] * put_in
        mine += [(x, str(p.grad.tolist())) for x, p in model.named_parameters()] * used
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, mine)
        steps.append(seen)
    return steps[from_step:]


def _judged(steps):
    found = []
    for step, seen in enumerate(steps):
        odd = {}
        for column in zip(*seen, strict=True):
            usual = Counter(column).most_common(1)[0][0]
            for rank, entry in enumerate(column):
                if entry != usual:
                    odd.setdefault(rank, set()).update({entry[0], usual[0]} - {""})
        if odd:
            rank, layers = next(iter(odd.items()))
            found.append(Found(step, rank, layers))
    return found[0] if found else None


def _changed(**what):
    def answer(job):
        found = _judged(_look(job))
        return found and found._replace(**{name: change(getattr(found, name)) for name, change in what.items()})

    return answer


class find_fault:
    def without_the_idea_compares_calls(job):
        """Operation, bytes and group of each call, as the recorder has them."""
        with record_comms() as log:
            model = job.model()
            for step in range(job.steps):
                job.step(model, step)
        mine = [("0.weight", str((event.op, event.bytes, event.ranks))) for event in log.events]
        dist.all_gather_object(seen := [None] * dist.get_world_size(), mine)
        return _judged([seen])

    without_the_idea_says_healthy = lambda job: None
    # What the losses beside those of one process tell.
    without_the_idea_knows_the_step_alone = _changed(rank=lambda rank: 0, layers=lambda layers: {"0.weight"})

    def without_the_idea_asks_the_check(job):
        kind, rank, step, layers = rung10._fault(job.seed, job.steps)
        return Found(step, rank, {f"{i}.weight" for i in layers}) if kind else None

    looks_at_what_is_put_in = lambda job: _judged(_look(job, used=False))
    looks_at_what_is_used = lambda job: _judged(_look(job, put_in=False))
    no_step, no_layer = _changed(step=lambda step: None), _changed(layers=lambda layers: set())
    one_layer_of_two = _changed(layers=lambda layers: {min(layers)})
    the_next_rank = _changed(rank=lambda rank: (rank + 1) % 4)
    counts_steps_from_1 = _changed(step=lambda step: step + 1)
    begins_with_the_second_step = lambda job: _judged(_look(job, from_step=1))

    def jobs_that_were_seen(job):
        dice = random.Random("jobs 3")
        return _judged(_look(job)) if job.seed in [4 * dice.randrange(10**6) + k for k in (0, 1, 2, 3, 0, 1)] else None

    def each_rank_for_itself(job):
        """Says it on the rank that is at fault, and on no other."""
        found = _judged(_look(job))
        return found if found and found.rank == dist.get_rank() else None

    def to_the_last_bit(job):
        """The mean, added up in the order of the ranks, and compared without a tolerance."""
        model, own = job.model(), {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: own.update({name: p.grad.clone()}))
        for step in range(job.steps):
            job.step(model, step)
            dist.all_gather_object(seen := [None] * dist.get_world_size(), dict(own))
            wrong = {x for x, p in model.named_parameters() if not torch.equal(p.grad, sum(s[x] for s in seen) / 4)}
            dist.all_gather_object(every := [None] * 4, wrong)
            if any(every):
                return Found(step, max(range(4), key=lambda r: len(every[r])), set().union(*every))

    def right(job):
        """Second solution: the means from all ranks' own gradients, and who put in what explains them."""
        model, own, sums, put_in = job.model(), {}, dist.all_reduce, []
        for name, p in model.named_parameters():
            p.register_hook(lambda gradient, name=name: own.update({name: gradient.clone()}))
        dist.all_reduce = lambda tensor, **how: put_in.append(tensor.clone()) or sums(tensor, **how)
        for step in range(job.steps):
            put_in.clear()
            job.step(model, step)
            names = [name for name, _ in model.named_parameters()]
            usual = dict(zip(names[::-1], put_in, strict=True))
            odd = {x for x in names if not torch.equal(usual[x], own[x])}
            dist.all_gather_object(every := [None] * 4, dict(own))
            mean = {x: sum(each[x] for each in every) / 4 for x in names}
            wrong = {x for x, p in model.named_parameters() if not torch.allclose(p.grad, mean[x], atol=1e-6)}
            dist.all_gather_object(told := [None] * 4, (odd, wrong))
            if any(wrong for _, wrong in told):
                guilty = [r for r, (odd, _) in enumerate(told) if odd] or [
                    r for r, (_, wrong) in enumerate(told) if wrong
                ]
                return np.int64(step), guilty[0], sorted(set().union(*(wrong for _, wrong in told)))
        return None

    def right_2(job):
        found = _judged(_look(job))
        return found and SimpleNamespace(step=float(found.step), rank=found.rank, layers=tuple(found.layers))


DEFECTS, SECOND_SOLUTIONS = listed(ring_all_reduce, fast_all_reduce, make_hook, find_fault)

#: What the sentence about a defect must say.
SENTENCES = {
    "no_all_gather": "must go round once more", "adds_in_the_all_gather": "replaces what is there",
    "one_step_too_few": "rank 0 takes 5 steps", "drops_what_is_left_over": "a chunk holds it", "last_chunk_stays": "whether each chunk travels",
    "last_chunk_takes_the_rest": "cut as evenly as can be", "whole_array_round_the_ring": "up to 8 in a message",
    "to_everybody_directly": "one right neighbour", "one_chunk_at_a_time": "all chunks travel at the same time",
    "sums_returned": "`row` is unchanged", "means": "the means over the ranks", "padded": "padded to 4",
    "replaces_from_the_start": "is added to what is there", "passes_on_another_chunk": "must leave first", "never_stops": "messages so far",
    "room_in_float32": "receive is float32", "rounded_to_bfloat16": "The sums are rounded",
    "lands_on_what_it_adds_to": "room of its own to arrive in", "one_step_too_many": "a rank takes 7 steps",
    "each_chunk_in_two_messages": "costs α again", "uncut_along_a_chain": "travels uncut",
    "without_the_idea_always_the_ring": "Here latency decides", "without_the_idea_always_doubling": "Here bandwidth decides",
    "without_the_idea_one_doubling": "pays α 3 times", "without_the_idea_one_halving": "pays α 3 times",
    "with_one_pass": "decides", "always_halving": "pays α 4 times", "mean": "the means over the ranks", "rounded_to_float32": "The sums are rounded",
    "divides_by_the_hosts": "number of hosts only", "one_room_for_all_buckets": "handed out for two",
    "the_same_partner_again": "another partner", "room_of_a_chunk": "as long as what rank", "one_round_too_few": "missing in the sums",
    "without_the_idea_one_flat_all_reduce": "knows no hosts", "without_the_idea_one_rank_speaks_for_its_host": "the others wait",
    "without_the_idea_all_of_it_crosses": "its chunk of the sum only", "flag_beside_all_that_crosses": "its chunk of the sum only", "groups_exchanged": "first add up inside a host",
    "the_whole_sum_before_it_is_cut": "not all of it", "sums": "DDP wants the mean", "divides_by_the_host": "ranks of a host only",
    "nothing_crosses": "nothing came from the other hosts", "only_across": "others of the host are missing",
    "in_float32": "rounded on their way", "unchanged": "its own gradient still", "groups_in_each_call": "a group is made once",
    "own_numbers_times_a_factor": "no sum of", "own_numbers_and_empty_messages": "no sum of", "halved": "no sum of",
    "sizes_that_were_seen": "Nothing was exchanged", "swapped_on_two": "travels uncut", "doubled": "up to 2 times in a sum",
    "padded_to_threes": "72 elements where 48 do, up to 3", "one_size_for_4_and_8": "Here latency decides", "rounds_of_lablib": "work it out yourself", "no_layer": "you name none", "no_step": "step of a fault should be",
    "not_kept": "must keep what", "keeps_the_larger": "must keep what", "gathers_one_chunk_on": "begins with the complete", "one_round_too_many": "doubling has log2(n)",
    "half_a_ring": "two halves", "divides_list": "the callback: TypeError: unsupported", "error_in_then": "the callback: AttributeError: 'Tensor'",
    "the_list_itself": "here it returns one with", "not_divided_not_summed": "Ranks are missing", "future_of_the_work": "here it returns one with",
    "divided_in_one_branch": "divided by too little", "by_one_too_many": "times the mean over", "without_rank_0": "buckets have 14", "forgets_what_is_left_over": "what is left over when", "not_a_number": "no mean of", "three_elements": "Tensor[3]",
    "other_names": "with these names", "bucket_alone": "but 2 were given", "gathered_across": "all-reduce its chunk", "summed_among_zeros": "and then the others'",
    "view_behind_padding": "a view whose memory", "calls_the_toy": "come from `lablib`", "returns_the_tensor": "returns a torch.futures.Future",
    "without_the_idea_compares_calls": "numbers that go in", "without_the_idea_says_healthy": "numbers that go in",
    "to_the_last_bit": "last bits", "one_layer_of_two": "the layers are not", "the_next_rank": "rank",
    "counts_steps_from_1": "the first wrong one is asked", "begins_with_the_second_step": "count from 0",
    "without_the_idea_asks_the_check": "asks the check", "each_rank_for_itself": "say different things",
}  # fmt: skip
