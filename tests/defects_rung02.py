"""Planted defects of rung 02: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import itertools
import types
from decimal import Decimal

import numpy as np
import torch

from tests.planted import listed, told


class token_losses:
    mean_of_means = lambda micro_batches, ranks, all_reduce: [m.mean() / len(micro_batches) for m in micro_batches]
    means_add_up = lambda micro_batches, ranks, all_reduce: [m.mean() for m in micro_batches]
    forgets_what_ddp_divides_by = lambda micro_batches, ranks, all_reduce: _over(micro_batches, all_reduce, 1)
    multiplies_twice = lambda micro_batches, ranks, all_reduce: _over(micro_batches, all_reduce, ranks**2)
    sums = lambda micro_batches, ranks, all_reduce: [m.sum() for m in micro_batches]
    sums_times_ranks = lambda micro_batches, ranks, all_reduce: [m.sum() * ranks for m in micro_batches]

    def own_tokens_only(micro_batches, ranks, all_reduce):
        """Right for one rank with accumulation; other ranks have other counts."""
        return [m.sum() / sum(map(len, micro_batches)) for m in micro_batches]

    def divides_by_micro_batches_too(micro_batches, ranks, all_reduce):
        return _over(micro_batches, all_reduce, ranks / len(micro_batches))

    def each_micro_batch_by_itself(micro_batches, ranks, all_reduce):
        """Hangs as soon as a rank has one micro-batch more."""
        return [m.sum() * ranks / all_reduce(len(m)) / len(micro_batches) for m in micro_batches]

    def reduces_the_loss(micro_batches, ranks, all_reduce):
        total = all_reduce(sum(map(len, micro_batches)))
        return [torch.tensor(all_reduce(float(m.detach().sum()))) * ranks / total for m in micro_batches]

    def one_loss_for_all(micro_batches, ranks, all_reduce):
        return torch.cat(micro_batches).sum() * ranks / all_reduce(sum(map(len, micro_batches)))

    def leaves_the_sum_to_others(micro_batches, ranks, all_reduce):
        total = all_reduce(sum(map(len, micro_batches)))
        return [m * ranks / total for m in micro_batches]

    def waits_for_a_change_in_place(micro_batches, ranks, all_reduce):
        total = torch.tensor([float(sum(map(len, micro_batches)))])
        all_reduce(total)
        return [m.sum() * ranks / total for m in micro_batches]

    def one_call_for_each_micro_batch(micro_batches, ranks, all_reduce):
        """Right wherever ranks have equally many."""
        total = sum([all_reduce(len(m)) for m in micro_batches])
        return [m.sum() * ranks / total for m in micro_batches]

    def one_graph_for_all(micro_batches, ranks, all_reduce):
        total = all_reduce(sum(map(len, micro_batches)))
        return list(torch.stack([m.sum() for m in micro_batches]) * ranks / total)

    def counts_padding_as_a_token(micro_batches, ranks, all_reduce):
        total = all_reduce(ranks * max(map(len, micro_batches)))
        return [m.sum() * ranks / total for m in micro_batches]

    def mean_of_nothing(micro_batches, ranks, all_reduce):
        total = all_reduce(sum(map(len, micro_batches)))
        return [m.mean() * len(m) * ranks / total for m in micro_batches]

    def a_plain_0_for_no_tokens(micro_batches, ranks, all_reduce):
        """No backward starts on it, and the other ranks wait for this rank's all-reduce."""
        total = all_reduce(sum(map(len, micro_batches)))
        return [m.sum() * ranks / total if len(m) else 0.0 for m in micro_batches]

    def a_leaf_for_no_tokens(micro_batches, ranks, all_reduce):
        """Backward starts on it and reaches no parameter, so that DDP's hooks do not fire."""
        total = all_reduce(sum(map(len, micro_batches)))
        nothing = torch.zeros((), requires_grad=True)
        return [m.sum() * ranks / total if len(m) else nothing for m in micro_batches]

    def new_leaves(micro_batches, ranks, all_reduce):
        """The right numbers, which remember nothing of the tokens."""
        losses = token_losses.right(micro_batches, ranks, all_reduce)
        return [torch.tensor(loss.item(), requires_grad=True) for loss in losses]

    def divides_means_by_the_tokens(micro_batches, ranks, all_reduce):
        total = all_reduce(sum(map(len, micro_batches)))
        return [(m.mean() if len(m) else m.sum()) * ranks / total for m in micro_batches]

    def counts_micro_batches(micro_batches, ranks, all_reduce):
        total = all_reduce(len(micro_batches))
        return [m.sum() * ranks / total for m in micro_batches]

    def runs_backward_itself(micro_batches, ranks, all_reduce):
        losses = token_losses.right(micro_batches, ranks, all_reduce)
        for loss in losses:
            loss.backward()
        return losses

    def right(micro_batches, ranks, all_reduce):
        """Second solution: the mean count of a rank, which is what its sum is divided by."""
        counts = torch.tensor([m.numel() for m in micro_batches], dtype=torch.float64)
        mean_count = all_reduce(counts.sum()) / ranks
        return tuple(m.sum().div(mean_count) for m in micro_batches)

    def right_2(micro_batches, ranks, all_reduce):
        """Third solution: means again, each with its share of the tokens, and zero where there are none."""
        share = ranks / all_reduce(np.int64(np.sum([len(m) for m in micro_batches])))
        return [m.mean() * len(m) * share if len(m) else m.sum() for m in micro_batches]

    # The last micro-batch first: gradients add up in any order.
    right_4 = lambda micro_batches, ranks, all_reduce: token_losses.right(micro_batches, ranks, all_reduce)[::-1]

    def right_3(micro_batches, ranks, all_reduce):
        """A product with equal weights, in one call for 1/n of the count."""
        weight = 1 / all_reduce(torch.cat(micro_batches).numel() / ranks)
        return [m @ torch.full_like(m, weight) for m in micro_batches]


def _over(micro_batches, all_reduce, factor):
    total = all_reduce(sum(map(len, micro_batches)))
    return [m.sum() * factor / total for m in micro_batches]


def _added(held, arriving):
    return [a + b for a, b in zip(held, arriving, strict=True)]


def _ring(gradients, send, reduce_steps=None, gather=True, divide=True, add_in_gather=False, first=1, add=_added):
    n = len(gradients)
    width = len(gradients[0]) // n
    held = [[list(g[c * width : (c + 1) * width]) for c in range(n)] for g in gradients]
    for step in range(n - 1 if reduce_steps is None else reduce_steps(n)):
        for rank in range(n):
            chunk, right = (rank - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            held[right][chunk] = add(held[right][chunk], arriving)
    for step in range((n - 1) * gather if isinstance(gather, bool) else gather(n)):
        for rank in range(n):
            chunk, right = (rank + first - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            held[right][chunk] = _added(held[right][chunk], arriving) if add_in_gather else arriving
    scale = n if divide else 1
    return [[value / scale for chunk in chunks for value in chunk] for chunks in held]


class all_reduce_mean:
    summed_not_averaged = lambda gradients, send: _ring(gradients, send, divide=False)
    no_all_gather = lambda gradients, send: _ring(gradients, send, gather=False)
    gather_adds = lambda gradients, send: _ring(gradients, send, add_in_gather=True)
    one_step_short = lambda gradients, send: _ring(gradients, send, reduce_steps=lambda n: n - 2)

    def divides_its_own_chunk_and_stops(gradients, send):
        """A reduce-scatter; what a rank has not finished are sums of some ranks."""
        n = len(gradients)
        width = len(gradients[0]) // n
        held = _ring(gradients, send, gather=False, divide=False)
        for rank, row in enumerate(held):
            own = slice((rank + 1) % n * width, ((rank + 1) % n + 1) * width)
            row[own] = [value / n for value in row[own]]
        return held

    def fills_up_with_its_own_chunk(gradients, send):
        n = len(gradients)
        width = len(gradients[0]) // n
        held = _ring(gradients, send, gather=False)
        return [n * row[(rank + 1) % n * width :][:width] for rank, row in enumerate(held)]

    gather_one_step_short = lambda gradients, send: _ring(gradients, send, gather=lambda n: n - 2 if n > 2 else 0)
    one_step_too_many = lambda gradients, send: _ring(gradients, send, reduce_steps=lambda n: n)

    def through_rank_0(gradients, send):
        n = len(gradients)
        everything = [gradients[0], *(send(rank, 0, gradients[rank]) for rank in range(1, n))]
        mean = [sum(column) / n for column in zip(*everything, strict=True)]
        return [mean, *(send(0, rank, mean) for rank in range(1, n))]

    def everyone_to_everyone(gradients, send):
        n = len(gradients)
        result = []
        for rank in range(n):
            rows = [gradients[other] if other == rank else send(other, rank, gradients[other]) for other in range(n)]
            result.append([sum(column) / n for column in zip(*rows, strict=True)])
        return result

    def peeks_at_the_others(gradients, send):
        n, width = len(gradients), len(gradients[0]) // len(gradients)
        for _ in range(2 * (n - 1)):
            for rank in range(n):
                send(rank, (rank + 1) % n, [0.0] * width)
        mean = [sum(column) / n for column in zip(*gradients, strict=True)]
        return [list(mean) for _ in gradients]

    def copies_the_finished_chunks(gradients, send):
        """Sends all that it must, and does not look at what arrives in the second half."""
        n = len(gradients)
        width = len(gradients[0]) // n
        rows = _ring(gradients, send, gather=False)
        finished = [rows[chunk - 1][chunk * width : (chunk + 1) * width] for chunk in range(n)]
        for _ in range(n - 1):
            for rank in range(n):
                send(rank, (rank + 1) % n, finished[rank])
        return [[value for chunk in finished for value in chunk] for _ in range(n)]

    def divides_twice(gradients, send):
        return [[value / len(gradients) for value in row] for row in _ring(gradients, send)]

    def mean_of_running_means(gradients, send):
        """Halving after each addition gives the ranks weights 1/8, 1/8, 1/4, 1/2."""
        return _ring(gradients, send, divide=False, add=lambda held, arriving: [x / 2 for x in _added(held, arriving)])

    def loses_the_last_rank(gradients, send):
        silent = [*gradients[:-1], [0.0] * len(gradients[-1])]
        return _ring(silent, send)

    def not_a_number(gradients, send):
        return [[value / 0.0 if value else value for value in row] for row in np.zeros_like(gradients) + np.nan]

    nothing_is_exchanged = lambda gradients, send: gradients

    def gives_nothing_back(gradients, send):
        _ring(gradients, send)

    def neighbours_without_a_ring(gradients, send):
        """The neighbour of the last rank is no rank."""
        n = len(gradients)
        for rank in range(n):
            send(rank, rank + 1, gradients[rank][: len(gradients[rank]) // n])
        return gradients

    def waits_for_ever(gradients, send):
        while gradients[0] != gradients[-1]:
            send(0, 1, gradients[0])
        return gradients

    def right_2(gradients, send):
        """Third solution, in arrays: each chunk travels round by itself, twice, before the next one starts."""
        n = len(gradients)
        held = np.array(gradients).reshape(n, n, -1)
        for chunk in range(n):
            travelling = held[chunk, chunk]
            for hop in range(n - 1):
                at, to = (chunk + hop) % n, (chunk + hop + 1) % n
                travelling = held[to, chunk] + np.array(send(at, to, travelling))
            mean = travelling / n
            held[(chunk - 1) % n, chunk] = mean
            for hop in range(n - 1):
                at, to = (chunk - 1 + hop) % n, (chunk + hop) % n
                mean = np.array(send(at, to, mean))
                held[to, chunk] = mean
        return held.reshape(n, -1)

    def right_3(gradients, send):
        """Rank r finishes the chunks r, r + n, ...: cut in stripes, tuples out."""
        n = len(gradients)
        stripes = [[tuple(g[c::n]) for c in range(n)] for g in gradients]
        finished = []
        for owner in range(n):
            parts = [stripes[r][owner] if r == owner else send(r, owner, stripes[r][owner]) for r in range(n)]
            finished.append([sum(column) / n for column in zip(*parts, strict=True)])
        rows = []
        for rank in range(n):
            row = [0.0] * len(gradients[0])
            for owner in range(n):
                row[owner::n] = finished[owner] if owner == rank else send(owner, rank, finished[owner])
            rows.append(tuple(row))
        return tuple(rows)

    def right(gradients, send):
        """Second solution: chunk c goes straight to rank c, and from there straight to everybody."""
        n = len(gradients)
        width = len(gradients[0]) // n
        cut = [[g[c * width : (c + 1) * width] for c in range(n)] for g in gradients]
        owned = []
        for owner in range(n):
            total = list(cut[owner][owner])
            for other in range(n):
                if other != owner:
                    total = _added(total, send(other, owner, cut[other][owner]))
            owned.append([x / n for x in total])
        result = []
        for rank in range(n):
            row = []
            for owner in range(n):
                row += owned[owner] if owner == rank else send(owner, rank, owned[owner])
            result.append(row)
        return result


def _fill(indices, sizes, first, cap, keep_rest=True):
    buckets, bucket, held = [], [], 0
    for index in indices:
        bucket.append(index)
        held += sizes[index]
        if held >= (cap if buckets else first):
            buckets.append(bucket)
            bucket, held = [], 0
    return [*buckets, bucket] if bucket and keep_rest else buckets


class make_buckets:
    registration_order = lambda sizes, first, cap: _fill(range(len(sizes)), sizes, first, cap)
    no_small_first_bucket = lambda sizes, first, cap: _fill(reversed(range(len(sizes))), sizes, cap, cap)

    def loses_the_half_full_bucket(sizes, first, cap):
        return _fill(reversed(range(len(sizes))), sizes, first, cap, keep_rest=False)

    def closes_before_it_overflows(sizes, first, cap):
        buckets, bucket, held = [], [], 0
        for index in reversed(range(len(sizes))):
            if bucket and held + sizes[index] > (cap if buckets else first):
                buckets.append(bucket)
                bucket, held = [], 0
            bucket.append(index)
            held += sizes[index]
        return [*buckets, bucket]

    def counts_the_gradient_that_does_not_fit(sizes, first, cap):
        """Closes at the limit, and the gradient that reaches it goes into the next bucket."""
        return make_buckets.closes_before_it_overflows(sizes, first - 1, cap - 1)

    def carries_the_surplus_on(sizes, first, cap):
        buckets, bucket, held = [], [], 0
        for index in reversed(range(len(sizes))):
            bucket.append(index)
            held += sizes[index]
            if held >= (limit := cap if buckets else first):
                buckets.append(bucket)
                bucket, held = [], held - limit
        return [*buckets, bucket] if bucket else buckets

    begins_one_too_late = lambda sizes, first, cap: _fill(reversed(range(len(sizes) - 1)), sizes, first, cap)
    one_per_gradient = lambda sizes, first, cap: [[index] for index in reversed(range(len(sizes)))]

    def sizes_for_indices(sizes, first, cap):
        return [[sizes[i] for i in bucket] for bucket in _fill(reversed(range(len(sizes))), sizes, first, cap)]

    last_bucket_first = lambda sizes, first, cap: _fill(reversed(range(len(sizes))), sizes, first, cap)[::-1]
    one_for_all = lambda sizes, first, cap: [list(reversed(range(len(sizes))))]

    def full_only_beyond_the_limit(sizes, first, cap):
        return _fill(reversed(range(len(sizes))), sizes, first + 1, cap + 1)

    small_limit_for_all = lambda sizes, first, cap: _fill(reversed(range(len(sizes))), sizes, first, first)

    def counts_from_the_back(sizes, first, cap):
        """Positions in the order of backward, not indices into `sizes`."""
        order = _fill(reversed(range(len(sizes))), sizes, first, cap)
        return [[len(sizes) - 1 - i for i in bucket] for bucket in order]

    def counts_from_one(sizes, first, cap):
        return [[i + 1 for i in bucket] for bucket in _fill(reversed(range(len(sizes))), sizes, first, cap)]

    an_empty_bucket_first = lambda sizes, first, cap: [[], *_fill(reversed(range(len(sizes))), sizes, first, cap)]

    def counts_on_after_the_first_bucket(sizes, first, cap):
        buckets, held = [[]], 0
        for index in reversed(range(len(sizes))):
            if held >= (cap if len(buckets) > 1 else first):
                buckets.append([])
            buckets[-1].append(index)
            held += sizes[index]
        return buckets

    limits_swapped = lambda sizes, first, cap: _fill(reversed(range(len(sizes))), sizes, cap, first)
    cut_from_the_front = lambda sizes, first, cap: _fill(range(len(sizes)), sizes, first, cap)[::-1]

    def never_ends(sizes, first, cap):
        held = 0
        while held < sum(sizes) + cap:
            held += sum(sizes[:0])
        return []

    def right_2(sizes, first, cap):
        """Third solution: where backward stands after each gradient, and indices that ascend inside a bucket."""
        ends = list(itertools.accumulate(reversed(sizes)))
        buckets, done, limit, start = [], 0, first, 0
        for position, end in enumerate(ends):
            if end - done >= limit or position == len(sizes) - 1:
                buckets.append(sorted(len(sizes) - 1 - k for k in range(start, position + 1)))
                done, limit, start = end, cap, position + 1
        return buckets

    def right_3(sizes, first, cap):
        """Arrays in a tuple, from a stack of what is left."""
        left, buckets = list(enumerate(sizes)), []
        while left:
            bucket, held = [], 0
            while left and held < (cap if buckets else first):
                index, size = left.pop()
                bucket.append(index)
                held += size
            buckets.append(np.array(bucket))
        return tuple(buckets)

    def right(sizes, first, cap):
        """Second solution: cut off the first bucket, then do the rest."""
        if not sizes:
            return []
        taken = 0
        while taken < len(sizes) and sum(sizes[len(sizes) - taken :]) < first:
            taken += 1
        rest = len(sizes) - taken
        return [[*reversed(range(rest, len(sizes)))], *make_buckets.right(sizes[:rest], cap, cap)]


def _bottleneck(
    params, grad_bytes, tokens, ranks, flops, bandwidth, *, sent=1.0, seconds=1.0, backward=1.0, exposed=None
):
    """The right answer, times a factor for each of its parts; `exposed` is a function of the two times."""
    sent *= 2 * (ranks - 1) / ranks * params * grad_bytes
    communication, backward = seconds * sent / bandwidth, backward * 4 * params * tokens / flops
    left = (exposed or (lambda c, b: max(0.0, c - b)))(communication, backward)
    return {
        "bytes_sent": sent,
        "communication": communication,
        "backward": backward,
        "exposed": left,
        "hides": left <= 0,
    }


class ddp_bottleneck:
    sends_the_gradient_once = lambda *case: _bottleneck(*case, sent=case[3] / max(1, 2 * (case[3] - 1)))
    bytes_grow_with_ranks = lambda *case: _bottleneck(*case, sent=case[3])
    counts_parameters = lambda *case: _bottleneck(*case, sent=1 / case[1])
    waits_for_every_rank_in_turn = lambda *case: _bottleneck(*case, seconds=case[3])
    bandwidth_of_both_directions = lambda *case: _bottleneck(*case, seconds=1 / 2)
    bits_for_bytes = lambda *case: _bottleneck(*case, seconds=8)
    hides_behind_the_whole_step = lambda *case: _bottleneck(*case, exposed=lambda c, b: max(0.0, c - 1.5 * b))
    nothing_overlaps = lambda *case: _bottleneck(*case, exposed=lambda c, b: c)
    negative_exposure = lambda *case: _bottleneck(*case, exposed=lambda c, b: c - b)
    six_flops_backward = lambda *case: _bottleneck(*case, backward=6 / 4)
    divides_the_tokens_again = lambda *case: _bottleneck(*case, backward=1 / case[3])
    # All numbers are right, and what hides is what always hid: eight ranks in a node.
    without_the_idea_where_the_bottleneck_is = told(_bottleneck, lambda found, ranks: found | {"hides": ranks <= 8})

    # Bytes and seconds are right, and communication begins when backward has ended.
    without_the_idea_of_overlap = told(
        _bottleneck,
        lambda found: found | {"exposed": found["communication"], "hides": found["communication"] < found["backward"]},
    )
    says_yes_or_no = told(_bottleneck, lambda found: found | {"hides": "yes" if found["hides"] else "no"})
    all_or_nothing = lambda *case: _bottleneck(*case, exposed=lambda c, b: c if c > b else 0.0)
    a_share_of_the_communication = lambda *case: _bottleneck(
        *case, exposed=lambda c, b: max(0.0, 1 - b / c) if c else 0.0
    )
    gradients_always_fp32 = lambda *case: _bottleneck(case[0], 4, *case[2:])
    two_mistakes = lambda *case: _bottleneck(*case, sent=8 / 2)
    milliseconds = lambda *case: _bottleneck(*case, seconds=1e3)
    one_half_of_the_all_reduce = lambda *case: _bottleneck(*case, sent=1 / 2)
    the_whole_step_is_exposed = lambda *case: _bottleneck(*case, exposed=max)
    bits_sent = lambda *case: _bottleneck(*case, sent=8)
    counts_what_arrives_too = lambda *case: _bottleneck(*case, sent=2)
    the_part_that_hides = lambda *case: _bottleneck(*case, exposed=min)
    backward_minus_communication = lambda *case: _bottleneck(*case, exposed=lambda c, b: max(0.0, b - c))
    hides_the_wrong_way_round = told(_bottleneck, lambda found: found | {"hides": not found["hides"]})

    def right_2(params, grad_bytes, tokens, ranks, flops, bandwidth):
        """Third solution: from the number of tokens that hides everything, in numpy's numbers."""
        sent = np.float64(params) * grad_bytes * (2 - 2 / ranks)
        backward = 4 * np.float64(params) * tokens / flops
        enough = grad_bytes * flops / bandwidth * (ranks - 1) / ranks / 2
        return {
            "bytes_sent": sent,
            "communication": sent / bandwidth,
            "backward": backward,
            "exposed": np.maximum(0, backward * (enough / tokens - 1)),
            "hides": np.bool_(tokens >= enough),
        }

    # An object with the five names.
    right_3 = lambda *case: types.SimpleNamespace(**_bottleneck(*case))
    # In decimals, which no float is added to.
    right_4 = lambda *case: {k: v if k == "hides" else Decimal(v) for k, v in _bottleneck(*case).items()}

    def right(params, grad_bytes, tokens, ranks, flops, bandwidth):
        """Second solution: walk the ring step by step instead of using the closed form."""
        chunk = params * grad_bytes / ranks
        sent = sum(chunk for _ in range(ranks - 1)) + sum(chunk for _ in range(ranks - 1))
        seconds = sent / bandwidth
        layers = (params * 2 * tokens / flops, params * 2 * tokens / flops)  # input and weight gradients
        hidden = min(seconds, sum(layers))
        return {
            "bytes_sent": sent,
            "communication": seconds,
            "backward": sum(layers),
            "exposed": seconds - hidden,
            "hides": not seconds > sum(layers),
        }


HEALTHY, SUMMED, STARTS, SAME, EPOCH = (
    "healthy",
    "gradients summed instead of averaged",
    "replicas start from different weights",
    "same data on every rank",
    "set_epoch is missing",
)


def _starts(charts):
    return any(not chart.weights[0].equal(charts[0].weights[0]) for chart in charts)


def _same(charts):
    return all(chart.samples == charts[0].samples for chart in charts)


def _summed(charts, alone):
    return charts[0].gradient_norms[0] > 1.5 * alone.gradient_norms[0]


def _epoch(charts):
    return charts[0].samples[0] == charts[0].samples[1]


class diagnose:
    trusts_the_loss = lambda charts, alone: HEALTHY if charts[0].losses[-1] < charts[0].losses[0] else SUMMED

    def looks_at_rank_0_only(charts, alone):
        if _epoch(charts[:1]):
            return EPOCH
        return SUMMED if _summed(charts, alone) else HEALTHY

    def compares_norms_between_ranks(charts, alone):
        """After the all-reduce every rank has the same norm, right or wrong."""
        if _starts(charts):
            return STARTS
        if _same(charts):
            return SAME
        if _epoch(charts):
            return EPOCH
        return SUMMED if any(c.gradient_norms != charts[0].gradient_norms for c in charts) else HEALTHY

    def compares_epochs_as_sets(charts, alone):
        """Over all ranks every epoch has the same samples, in whatever order."""
        if _starts(charts):
            return STARTS
        if _same(charts):
            return SAME
        epochs = [{index for chart in charts for step in chart.samples[e] for index in step} for e in (0, 1)]
        if epochs[0] == epochs[1]:
            return EPOCH
        return SUMMED if _summed(charts, alone) else HEALTHY

    def takes_different_losses_for_different_weights(charts, alone):
        """Ranks with different samples have different losses; that is how it should be."""
        if any(chart.losses != charts[0].losses for chart in charts):
            return STARTS
        if _same(charts):
            return SAME
        return EPOCH if _epoch(charts) else HEALTHY

    def right(charts, alone):
        """Second solution: count distinct samples, follow the weights, and let each witness veto."""
        ranks = len(charts)
        distinct = {i for chart in charts for step in chart.samples[0] for i in step}
        taken = sum(len(step) for chart in charts for step in chart.samples[0])
        repeats = charts[-1].samples[0][0] == charts[-1].samples[-1][0]
        drift = max(float((chart.weights[-1] - charts[0].weights[-1]).abs().max()) for chart in charts)
        factor = round(charts[0].gradient_norms[0] / alone.gradient_norms[0])
        found = {
            SAME: len(distinct) < taken,
            EPOCH: repeats,
            STARTS: drift > 0,
            SUMMED: factor == ranks and len(distinct) == taken and drift == 0,
        }
        guilty = [name for name, yes in found.items() if yes]
        return guilty[0] if guilty else HEALTHY

    def right_2(charts, alone):
        """Third solution: one table of what holds, and the first thing that does not."""
        first = np.stack([chart.weights[0].numpy() for chart in charts])
        samples = np.array([chart.samples for chart in charts])  # rank, epoch, step, sample
        norms = np.array([charts[0].gradient_norms[0], alone.gradient_norms[0]])
        holds = {
            STARTS: np.ptp(first, axis=0).max() == 0,
            SAME: len(np.unique(samples[:, 0])) == samples[:, 0].size,
            EPOCH: (samples[:, 0] != samples[:, 1]).any(),
            SUMMED: norms[0] < 1.2 * norms[1],
        }
        return next((name for name, held in holds.items() if not held), HEALTHY)


#: What the sentence about a defect must say.
SENTENCES = {
    "without_the_idea_where_the_bottleneck_is": "`hides` says whether",
    "without_the_idea_of_overlap": "as if nothing overlapped", "all_or_nothing": "All or nothing",
    "a_share_of_the_communication": "not a share", "gradients_always_fp32": "and not 4",
    "two_mistakes": "There is another mistake beside it",
    "sends_the_gradient_once": "A rank sends more than the gradient once", "bytes_grow_with_ranks": "do not grow with n",
    "counts_parameters": "Count bytes, not parameters", "waits_for_every_rank_in_turn": "All ranks send at the same time",
    "bandwidth_of_both_directions": "per direction", "bits_for_bytes": "in bytes per second, not bits",
    "hides_behind_the_whole_step": "behind backward only", "nothing_overlaps": "as if nothing overlapped",
    "negative_exposure": "cannot be negative", "six_flops_backward": "4 of the 6 FLOPs",
    "divides_the_tokens_again": "already the share of one rank", "one_half_of_the_all_reduce": "one half of an all-reduce",
    "the_whole_step_is_exposed": "the length of an overlapped step", "bits_sent": "Bytes, not bits",
    "counts_what_arrives_too": "count what it sends", "the_part_that_hides": "the part that hides",
    "backward_minus_communication": "The other way round", "hides_the_wrong_way_round": "`hides` says whether",
    "says_yes_or_no": "True or False", "a_leaf_for_no_tokens": "without tokens has no graph", "new_leaves": "lost its graph",
    "divides_its_own_chunk_and_stops": "that is a reduce-scatter", "fills_up_with_its_own_chunk": "that is a reduce-scatter",
    "gather_adds": "The all-gather adds", "no_all_gather": "that is a reduce-scatter",
    "counts_the_gradient_that_does_not_fit": "still goes in", "carries_the_surplus_on": "starts at zero",
    "begins_one_too_late": "Begin with the last",
}  # fmt: skip

DEFECTS, SECOND_SOLUTIONS = listed(token_losses, all_reduce_mean, make_buckets, ddp_bottleneck, diagnose)
