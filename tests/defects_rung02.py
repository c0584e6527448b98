"""Planted defects of rung 02: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from tests.planted import listed


def _ring(gradients, send, reduce_steps=None, gather=True, divide=True, add_in_gather=False, first=1):
    n = len(gradients)
    width = len(gradients[0]) // n
    held = [[list(g[c * width : (c + 1) * width]) for c in range(n)] for g in gradients]
    for step in range(n - 1 if reduce_steps is None else reduce_steps(n)):
        for rank in range(n):
            chunk, right = (rank - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            held[right][chunk] = [a + b for a, b in zip(held[right][chunk], arriving, strict=True)]
    for step in range((n - 1) * gather if isinstance(gather, bool) else gather(n)):
        for rank in range(n):
            chunk, right = (rank + first - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            old = held[right][chunk]
            held[right][chunk] = [a + b for a, b in zip(old, arriving, strict=True)] if add_in_gather else arriving
    scale = n if divide else 1
    return [[value / scale for chunk in chunks for value in chunk] for chunks in held]


class all_reduce_mean:
    summed_not_averaged = lambda gradients, send: _ring(gradients, send, divide=False)
    no_all_gather = lambda gradients, send: _ring(gradients, send, gather=False)
    gather_adds = lambda gradients, send: _ring(gradients, send, add_in_gather=True)
    one_step_short = lambda gradients, send: _ring(gradients, send, reduce_steps=lambda n: n - 2)

    def gather_one_step_short(gradients, send):
        return _ring(gradients, send, gather=lambda n: n - 2 if n > 2 else 0)

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

    def mean_of_running_means(gradients, send):
        """Halving after each addition gives the ranks weights 1/8, 1/8, 1/4, 1/2."""
        n = len(gradients)
        width = len(gradients[0]) // n
        held = [[list(g[c * width : (c + 1) * width]) for c in range(n)] for g in gradients]
        for step in range(n - 1):
            for rank in range(n):
                chunk, right = (rank - step) % n, (rank + 1) % n
                arriving = send(rank, right, held[rank][chunk])
                held[right][chunk] = [(a + b) / 2 for a, b in zip(held[right][chunk], arriving, strict=True)]
        for step in range(n - 1):
            for rank in range(n):
                chunk, right = (rank + 1 - step) % n, (rank + 1) % n
                held[right][chunk] = send(rank, right, held[rank][chunk])
        return [[value for chunk in chunks for value in chunk] for chunks in held]

    def loses_the_last_rank(gradients, send):
        silent = [*gradients[:-1], [0.0] * len(gradients[-1])]
        return _ring(silent, send)

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
                    arrived = send(other, owner, cut[other][owner])
                    total = [x + y for x, y in zip(total, arrived, strict=True)]
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

    one_per_gradient = lambda sizes, first, cap: [[index] for index in reversed(range(len(sizes)))]

    def sizes_for_indices(sizes, first, cap):
        return [[sizes[i] for i in bucket] for bucket in _fill(reversed(range(len(sizes))), sizes, first, cap)]

    last_bucket_first = lambda sizes, first, cap: _fill(reversed(range(len(sizes))), sizes, first, cap)[::-1]
    one_for_all = lambda sizes, first, cap: [list(reversed(range(len(sizes))))]

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
    def sends_the_gradient_once(*case):
        return _bottleneck(*case, sent=case[3] / max(1, 2 * (case[3] - 1)))

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


DEFECTS, SECOND_SOLUTIONS = listed(all_reduce_mean, make_buckets, ddp_bottleneck, diagnose)
