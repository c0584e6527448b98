"""Planted defects of rung 12: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from dataclasses import make_dataclass

import numpy as np
import torch

from lablib.calc.parallel import WAYS, attention_traffic, context_buffers, context_degrees
from tests.planted import listed, told


def _logaddexp(lse_a, lse_b):
    return torch.logaddexp(lse_a, lse_b)


def _share(lse, new):
    return (lse - new).exp().nan_to_num(0.0).unsqueeze(-1)


def _right_lse(weigh):
    """A merge whose lse is right, and whose output is made by `weigh(out_a, lse_a, out_b, lse_b, new)`."""

    def answer(a, b):
        new = _logaddexp(a[1], b[1])
        return weigh(*a, *b, new), new

    return answer


def _right_out(combine):
    """A merge whose output is right, and whose lse is made by `combine(lse_a, lse_b)`."""

    def answer(a, b):
        new = _logaddexp(a[1], b[1])
        return _share(a[1], new) * a[0] + _share(b[1], new) * b[0], combine(a[1], b[1])

    return answer


class merge:
    right_by_name = lambda a, b: dict(zip(("out", "lse"), merge.right(a, b), strict=True))
    averages_outputs = _right_lse(lambda out_a, lse_a, out_b, lse_b, new: (out_a + out_b) / 2)
    adds_outputs = _right_lse(lambda out_a, lse_a, out_b, lse_b, new: out_a + out_b)
    weighs_by_lse = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: (
            (lse_a[:, None] * out_a + lse_b[:, None] * out_b) / (lse_a + lse_b)[:, None]
        )
    )
    exchanges_weights = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: _share(lse_b, new) * out_a + _share(lse_a, new) * out_b
    )
    forgets_to_divide = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: lse_a.exp()[:, None] * out_a + lse_b.exp()[:, None] * out_b
    )
    the_larger_takes_all = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: torch.where((lse_a >= lse_b)[:, None], out_a, out_b)
    )
    larger_output = _right_lse(lambda out_a, lse_a, out_b, lse_b, new: torch.maximum(out_a, out_b))
    empty_is_zero = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b).nan_to_num(neginf=0.0))
    half_precision = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b).bfloat16())
    adds_lse = _right_out(lambda lse_a, lse_b: lse_a + lse_b)
    keeps_the_larger_lse = _right_out(torch.maximum)
    averages_lse = _right_out(lambda lse_a, lse_b: (lse_a + lse_b) / 2)
    returns_the_sum = _right_out(lambda lse_a, lse_b: lse_a.exp() + lse_b.exp())
    logarithm_of_base_2 = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b) / math.log(2))

    def no_maximum(a, b):
        """Right, until exp overflows."""
        weigh_a, weigh_b = a[1].exp(), b[1].exp()
        total = weigh_a + weigh_b
        return (weigh_a[:, None] * a[0] + weigh_b[:, None] * b[0]) / total[:, None], total.log()

    def one_maximum_for_all_rows(a, b):
        largest = torch.maximum(a[1], b[1]).max()
        weigh_a, weigh_b = (a[1] - largest).exp(), (b[1] - largest).exp()
        total = weigh_a + weigh_b
        out = (weigh_a[:, None] * a[0] + weigh_b[:, None] * b[0]) / total[:, None]
        return out.nan_to_num(0.0), largest + total.log()

    def nothing_with_nothing(a, b):
        """Safe for large scores, and -inf minus -inf where both are empty."""
        new = _logaddexp(a[1], b[1])
        return (a[1] - new).exp()[:, None] * a[0] + (b[1] - new).exp()[:, None] * b[0], new

    def minus_the_other(a, b):
        """The weight as exp of a difference of both: infinite where one is empty."""
        ratio = (b[1] - a[1]).exp()
        return (a[0] + ratio[:, None] * b[0]) / (1 + ratio)[:, None], a[1] + (1 + ratio).log()

    def forgets_the_new_sum(a, b):
        """Subtracts the larger and stops there."""
        most = torch.maximum(a[1], b[1])
        out = _share(a[1], most) * a[0] + _share(b[1], most) * b[0]
        return out, _logaddexp(a[1], b[1])

    only_the_output = lambda a, b: merge.right(a, b)[0]

    def right(a, b):
        """In plain Python, row by row, with the larger subtracted."""
        rows, new = [], []
        for out_a, lse_a, out_b, lse_b in zip(*map(torch.Tensor.tolist, (*a, *b)), strict=True):
            most = max(lse_a, lse_b)
            if most == -math.inf:
                rows.append([0.0] * len(out_a))
                new.append(most)
                continue
            weigh_a, weigh_b = math.exp(lse_a - most), math.exp(lse_b - most)
            total = weigh_a + weigh_b
            rows.append([(weigh_a * x + weigh_b * y) / total for x, y in zip(out_a, out_b, strict=True)])
            new.append(most + math.log(total))
        return rows, new

    def right_2(a, b):
        """In numpy, single precision, one lse a row as a column."""
        (out_a, lse_a), (out_b, lse_b) = (tuple(np.asarray(each) for each in part) for part in (a, b))
        lse = np.logaddexp(lse_a, lse_b)
        base = np.where(np.isinf(lse), 0, lse)
        out = sum(np.exp(each - base)[:, None] * part for part, each in ((out_a, lse_a), (out_b, lse_b)))
        return out.astype(np.float32), lse[:, None].astype(np.float32)

    def right_3(a, b):
        """A sigmoid of the difference moves a's output towards b's; empty blocks by hand."""
        (out_a, lse_a), (out_b, lse_b) = a, b
        towards = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0).unsqueeze(-1)
        return [out_a + towards * (out_b - out_a), torch.stack((lse_a, lse_b)).logsumexp(0)]

    def right_4(a, b):
        """Numerators and denominators, as online softmax has them, over a common maximum."""
        most = torch.maximum(a[1], b[1]).clamp_min(-1e300)
        weights = torch.stack([(part[1] - most).exp() for part in (a, b)])
        total = weights.sum(0)
        out = torch.einsum("pr,prd->rd", weights, torch.stack((a[0], b[0])))
        return out / total.clamp_min(1e-300)[:, None], torch.where(total > 0, most + total.log(), -math.inf)

    def right_5(a, b):
        """All in fp32, which rounds a score of 1,000 by 3e-5."""
        lse = torch.stack((a[1], b[1])).float()
        shares = torch.softmax(lse, 0).nan_to_num(0.0).unsqueeze(-1)
        return (shares * torch.stack((a[0], b[0])).float()).sum(0), torch.logsumexp(lse, 0)


def _refused(seq, cp):
    if seq % (2 * cp):
        raise ValueError("chunks do not come out even")


def _chunks(seq, cp, *chosen):
    width = seq // (2 * cp)
    return [chunk * width + i for chunk in chosen for i in range(width)]


def _held(positions):
    """Return an answer that refuses what it must, and elsewhere gives other positions."""

    def answer(seq, cp, rank):
        _refused(seq, cp)
        return positions(seq, cp, rank)

    return answer


class held_positions:
    contiguous = _held(lambda seq, cp, rank: list(range(rank * seq // cp, (rank + 1) * seq // cp)))
    striped = _held(lambda seq, cp, rank: list(range(rank, seq, cp)))
    every_cp_th_chunk = _held(lambda seq, cp, rank: _chunks(seq, cp, rank, rank + cp))
    counts_chunks_from_one = _held(lambda seq, cp, rank: _chunks(seq, cp, rank, 2 * cp - rank))

    # Chunk cp - 1 - r of the first half, so some chunks are held twice.
    mirrored_within_the_ranks = _held(lambda seq, cp, rank: _chunks(seq, cp, rank, cp - 1 - rank))
    numbers_of_chunks = _held(lambda seq, cp, rank: [rank, 2 * cp - 1 - rank])
    two_neighbours = _held(lambda seq, cp, rank: _chunks(seq, cp, 2 * rank, 2 * rank + 1))

    # Stripes there and back: balanced in all, and not in every step.
    mirrored_tokens = _held(lambda seq, cp, rank: [p for p in range(seq) if p % (2 * cp) in (rank, 2 * cp - 1 - rank)])
    from_the_last_rank = _held(lambda seq, cp, rank: _chunks(seq, cp, cp - 1 - rank, cp + rank))

    # The rest is dropped.
    never_refuses = lambda seq, cp, rank: _chunks(seq, cp, rank, 2 * cp - 1 - rank)

    def wants_cp_alone(seq, cp, rank):
        if seq % cp:
            raise ValueError("cp does not divide the sequence")
        return _chunks(seq, cp, rank, 2 * cp - 1 - rank)

    def torch_refuses_it(seq, cp, rank):
        """Right where it can be, and elsewhere it stops in PyTorch's words."""
        chunks = torch.arange(seq).view(2 * cp, -1)
        return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank])).tolist()

    two_pieces = _held(lambda seq, cp, rank: (_chunks(seq, cp, rank), _chunks(seq, cp, 2 * cp - 1 - rank)))

    def right(seq, cp, rank):
        """From both ends."""
        width, rest = divmod(seq, 2 * cp)
        if rest:
            raise ValueError(rest)
        first = rank * width
        return {*range(first, first + width), *range(seq - first - width, seq - first)}

    def right_2(seq, cp, rank):
        """An array folded in the middle; the late chunk is first."""
        if seq % (2 * cp) != 0:
            raise ValueError(f"seq={seq}, cp={cp}")
        chunks = np.arange(seq).reshape(2 * cp, -1)
        return np.concatenate((chunks[::-1][rank], chunks[rank]))

    def right_3(seq, cp, rank):
        """Tensors, and every position asked for its chunk."""
        if seq % cp or seq // cp % 2:
            raise ValueError("two equal chunks a rank")
        chunk = torch.arange(seq) * 2 * cp // seq
        return torch.nonzero((chunk == rank) | (chunk == 2 * cp - 1 - rank)).flatten()


class global_loss:
    def mean_of_means(sums, counts):
        means = [each / max(1, count) for each, count in zip(sums, counts, strict=True)]
        return sum(means) / len(means), len(sums) / sum(counts)

    def mean_of_means_that_exist(sums, counts):
        means = [each / count for each, count in zip(sums, counts, strict=True) if count]
        return sum(means) / len(means), len(sums) / sum(counts)

    def divides_by_zero(sums, counts):
        means = [each / count for each, count in zip(sums, counts, strict=True)]
        tokens = sum(counts)
        return sum(mean * count for mean, count in zip(means, counts, strict=True)) / tokens, len(sums) / tokens

    divides_by_ranks = lambda sums, counts: (sum(sums) / len(sums), len(sums) / sum(counts))
    sums_up = lambda sums, counts: (sum(sums), len(sums) / sum(counts))
    # Forgets that the all-reduce averages.
    factor_for_a_sum = lambda sums, counts: (sum(sums) / sum(counts), 1 / sum(counts))
    factor_of_its_own_mean = lambda sums, counts: (sum(sums) / sum(counts), 1 / counts[0])
    factor_of_the_ranks = lambda sums, counts: (sum(sums) / sum(counts), 1 / len(sums))
    factor_divided_twice = lambda sums, counts: (sum(sums) / sum(counts), 1 / sum(counts) / len(sums))
    no_factor = lambda sums, counts: (sum(sums) / sum(counts), 1.0)
    factor_upside_down = lambda sums, counts: (sum(sums) / sum(counts), sum(counts) / len(sums))

    def a_factor_a_rank(sums, counts):
        """What a rank's own mean would have to be multiplied by."""
        return sum(sums) / sum(counts), [len(sums) * count / sum(counts) for count in counts]

    def right(sums, counts):
        """Arrays."""
        sums, counts = np.asarray(sums), np.asarray(counts)
        return np.array([sums.sum() / counts.sum(), 1 / counts.mean()])

    def right_2(sums, counts):
        """A loop, and tensors."""
        loss = tokens = torch.tensor(0.0, dtype=torch.float64)
        for each, count in zip(sums, counts, strict=True):
            loss, tokens = loss + each, tokens + count
        return loss / tokens, len(sums) / tokens

    def right_3(sums, counts):
        """Means weighed by their tokens, where there are any."""
        tokens = float(sum(counts))
        weighed = (each / count * (count / tokens) for each, count in zip(sums, counts, strict=True) if count)
        return [math.fsum(weighed), 1 / (tokens / len(counts))]

    right_by_name = lambda sums, counts: {"factor": len(sums) / sum(counts), "loss": sum(sums) / sum(counts)}

    def right_4(sums, counts):
        """A class of its own for the two numbers."""
        tokens = sum(counts)
        return make_dataclass("Result", ["loss", "factor"])(sum(sums) / tokens, len(sums) / tokens)


def _sent(seq, heads, kv_heads, head_dim, cp, ring=6, gathered=4, ulysses=4, others=None):
    queries, keys = 2 * seq / cp * heads * head_dim, 2 * seq / cp * kv_heads * head_dim
    others = cp - 1 if others is None else others
    return {
        "ring": ring * keys * others,
        "gathered": gathered * keys * others,
        "ulysses": ulysses * (queries + keys) * others / cp,
    }


class sent_bytes:
    # Backward of the ring without the keys and values.
    no_second_round = lambda *case: _sent(*case, ring=4)
    forward_alone = lambda *case: _sent(*case, ring=2, gathered=2, ulysses=2)
    gathered_as_a_ring = lambda *case: _sent(*case, gathered=6)
    gradients_in_fp32 = lambda *case: _sent(*case, ring=8, gathered=6)
    own_part_travels = lambda *case: _sent(*case, others=case[-1])
    # c messages for the gradients, as in PyTorch, where they are fp32.
    gradients_go_all_the_way_round = lambda *case: _sent(*case, ring=4 + 2 * case[-1] / max(1, case[-1] - 1))
    gradients_as_pytorch_sends_them = lambda *case: _sent(*case, ring=4 + 4 * case[-1] / max(1, case[-1] - 1))
    all_heads_have_keys = lambda seq, heads, kv_heads, head_dim, cp: _sent(seq, heads, heads, head_dim, cp)

    def ulysses_forgets_the_output(seq, heads, kv_heads, head_dim, cp):
        queries, keys = 2 * seq / cp * heads * head_dim, 2 * seq / cp * kv_heads * head_dim
        ulysses = 2 * (queries + 2 * keys) * (cp - 1) / cp
        return _sent(seq, heads, kv_heads, head_dim, cp) | {"ulysses": ulysses}

    # All tokens to everybody, and not a part in c.
    ulysses_gathers = lambda *case: _sent(*case, ulysses=4 * case[-1])
    keys_alone = lambda *case: _sent(*case, ring=3, gathered=2)
    both_directions = lambda *case: {way: 2 * each for way, each in _sent(*case).items()}
    counts_values = told(_sent, lambda sent: {way: each / 2 for way, each in sent.items()})
    of_all_ranks = told(_sent, lambda sent, cp: {way: each * cp for way, each in sent.items()})

    def right(seq, heads, kv_heads, head_dim, cp):
        """Every message listed, in whole numbers."""
        block = 2 * seq // cp * kv_heads * head_dim
        ring = sum(2 * block for step in range(cp - 1) for what in ("forward", "again", "gradients home"))
        gathered = sum(2 * block for other in range(1, cp) for what in ("all-gather", "reduce-scatter"))
        tensors = [heads, kv_heads, kv_heads, heads] * 2
        exchanged = sum(2 * seq // cp * number * head_dim * (cp - 1) / cp for number in tensors)
        return {"ulysses": exchanged, "ring": ring, "gathered": gathered}

    def right_2(seq, heads, kv_heads, head_dim, cp):
        """From collectives of full arrays; the ring is one and a half gathers."""
        share = (cp - 1) / cp
        both = np.float64(2 * 2 * seq * kv_heads * head_dim)
        exchange = share * 2 * (seq / cp) * head_dim * np.array([2 * heads, 2 * kv_heads]).sum()
        return {"ring": 3 * share * both, "gathered": 2 * share * both, "ulysses": 2 * exchange}

    def right_3(seq, heads, kv_heads, head_dim, cp):
        """From the calculator, rounded to whole bytes."""
        sizes = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "cp": cp, "batch": 1}
        return {way: round(attention_traffic(way, **sizes).total) for way in WAYS}


def _choose(
    seq, heads, kv_heads, head_dim, tp, cp, dp, causal, room, *, even=None, need=None, order=None, sent=None, over=None,
    best=min,
):  # fmt: skip
    """Choose as the solution does, but for what is given."""
    heads, kv_heads = heads // tp, kv_heads // tp
    sizes = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "cp": cp}
    chunks = seq % ((2 if causal else 1) * cp) == 0
    whole = {"ring": chunks, "gathered": chunks, "ulysses": seq % cp == 0 and kv_heads % cp == 0} | (even or {})
    block = 4 * seq / cp * kv_heads * head_dim
    needed = {"ring": min(2, cp - 1) * block, "gathered": (cp - 1) * block}
    queries = 4 * seq / cp * heads * head_dim  # and outputs
    needed["ulysses"] = block + queries
    needed |= {way: bytes_of(block, queries, cp) for way, bytes_of in (need or {}).items()}
    possible = [way for way in WAYS if whole[way] and needed[way] <= room]
    if not possible:
        raise ValueError("nothing runs")
    bytes_of = _sent(**sizes)
    way = best(possible, key=bytes_of.get)
    return {
        "possible": possible,
        "way": way,
        "order": order or ("zigzag" if causal and way != "ulysses" else "contiguous"),
        "sent": bytes_of[way] if sent is None else sent(bytes_of, way, tp),
        "averaged_over": over or dp * cp,
    }


def _even(whole):
    """Return an answer with another idea of which ways come out even: `whole(seq, kv_heads, tp, cp)`."""
    return lambda **job: _choose(**job, even=whole(*(job[name] for name in ("seq", "kv_heads", "tp", "cp"))))


def _needing(**ways):
    """Return an answer with other buffers: each a function of keys, queries and cp."""
    return lambda **job: _choose(**job, need=ways)


class choose_split:
    query_heads_decide = lambda **job: _choose(**job, even={"ulysses": job["heads"] // job["tp"] % job["cp"] == 0})
    forgets_that_tp_took_heads = _even(lambda seq, keys, tp, cp: {"ulysses": seq % cp == keys % cp == 0})
    ulysses_needs_chunks = _even(lambda seq, keys, tp, cp: {"ulysses": seq % (2 * cp) == keys // tp % cp == 0})
    always_two_chunks = _even(lambda seq, keys, tp, cp: dict.fromkeys(("ring", "gathered"), seq % (2 * cp) == 0))
    ulysses_forgets_the_parts = _even(lambda seq, keys, tp, cp: {"ulysses": keys // tp % cp == 0})
    any_parts_without_a_mask = lambda **job: _choose(**job, even={} if job["causal"] else dict.fromkeys(WAYS, True))
    never_two_chunks = lambda **job: _choose(**job, even={"ring": True, "gathered": True})
    forgets_the_room = lambda **job: _choose(**job | {"room": 2**60})
    one_block_for_a_ring = _needing(ring=lambda keys, queries, cp: keys)
    two_blocks_for_two_ranks = _needing(ring=lambda keys, queries, cp: 2 * keys)
    ulysses_output_has_no_buffer = _needing(ulysses=lambda keys, queries, cp: keys + queries / 2)
    ulysses_keeps_its_own_part = _needing(ulysses=lambda keys, queries, cp: (keys + queries) * (cp - 1) / cp)
    always_zigzag = lambda **job: _choose(**job, order="zigzag")
    never_zigzag = lambda **job: _choose(**job, order="contiguous")
    zigzag_under_any_causal_mask = lambda **job: _choose(**job, order="zigzag" if job["causal"] else "contiguous")
    always_a_ring = lambda **job: _choose(**job, best=lambda possible, key: possible[0])

    def without_the_idea_ulysses_where_it_runs(**job):
        return _choose(**job, best=lambda possible, key: "ulysses" if "ulysses" in possible else min(possible, key=key))

    sends_all_heads = lambda **job: _choose(**job, sent=lambda bytes_of, way, tp: bytes_of[way] * tp)
    sends_what_all_ranks_send = lambda **job: _choose(**job, sent=lambda bytes_of, way, tp: bytes_of[way] * job["cp"])
    sends_forward_alone = lambda **job: _choose(
        **job, sent=lambda bytes_of, way, tp: bytes_of[way] / (3 if way == "ring" else 2)
    )
    averages_over_dp = lambda **job: _choose(**job, over=job["dp"])
    averages_over_cp = lambda **job: _choose(**job, over=job["cp"])
    averages_over_tp_too = lambda **job: _choose(**job, over=job["dp"] * job["cp"] * job["tp"])

    def never_refuses(**job):
        try:
            return _choose(**job)
        except ValueError:
            return {"possible": [], "way": "ring", "order": "zigzag", "sent": 0, "averaged_over": 1}

    def right(**job):
        """By the calculators."""
        model = {name: job[name] for name in ("seq", "heads", "kv_heads", "tp")}
        sizes = {name: job[name] for name in ("seq", "head_dim", "cp")} | {"batch": 1}
        sizes |= {name: job[name] // job["tp"] for name in ("heads", "kv_heads")}
        order = "zigzag" if job["causal"] else "contiguous"
        total = {}
        for way in WAYS:
            allowed = job["cp"] in context_degrees(way, **model, order=order, most=job["cp"])
            if allowed and context_buffers(way, **sizes) <= job["room"]:
                total[way] = attention_traffic(way, **sizes).total
        if not total:
            raise ValueError("no way")
        way = sorted(total.items(), key=lambda item: item[1])[0][0]
        final = "contiguous" if way == "ulysses" else order
        return {"possible": set(total), "way": way, "order": final, "sent": total[way],
                "averaged_over": np.int64(job["cp"] * job["dp"])}  # fmt: skip

    def right_2(seq, heads, kv_heads, head_dim, tp, cp, dp, causal, room):
        """Rules in a row; a dictionary of truth values."""
        keys, queries = (4 * (seq / cp) * number / tp * head_dim for number in (kv_heads, heads))
        can = {"ulysses": (kv_heads // tp) % cp == 0 and seq % cp == 0 and keys + queries <= room}
        chunked = seq % cp == 0 and seq // cp % 2 == 0 if causal else seq % cp == 0
        can["gathered"] = chunked and keys * (cp - 1) <= room
        can["ring"] = chunked and keys * min(cp - 1, 2) <= room
        price = {"gathered": 2 * keys * (cp - 1), "ring": 3 * keys * (cp - 1)}
        price["ulysses"] = 2 * (keys + queries) * (cp - 1) / cp
        for way in sorted(price, key=lambda each: price[each]):
            if can[way]:
                break
        else:
            raise ValueError(f"cp={cp}")
        order = "zigzag" if causal and way in ("ring", "gathered") else "contiguous"
        return {"possible": can, "way": way, "order": order, "sent": int(price[way]), "averaged_over": float(dp * cp)}

    right_3 = lambda **job: _choose(**job)

    def right_by_name(**job):
        found = _choose(**job)
        return make_dataclass("Split", found)(**found)

    def right_zigzag_for_ulysses(**job):
        """As the toy has it: each rank attends over the whole sequence, whatever its order is."""
        found = _choose(**job)
        chunks = job["causal"] and job["seq"] % (2 * job["cp"]) == 0
        return found | ({"order": "zigzag"} if chunks and found["way"] == "ulysses" else {})


#: Mistakes that each have a sentence of their own.
SENTENCES = {
    "torch_refuses_it": "raise a ValueError that says so",
    "adds_outputs": "divided by its own sum",
    "weighs_by_lse": "The weights are the lse themselves",
    "larger_output": "The larger output is kept",
    "the_larger_takes_all": "takes all",
    "empty_is_zero": "merged it still is",
    "half_precision": "keep fp32",
    "no_maximum": "Subtract the larger of both lse",
    "nothing_with_nothing": "-inf minus -inf",
    "contiguous": "the last one computes",
    "mirrored_tokens": "two whole chunks",
    "mean_of_means": "the mean of the ranks' means",
    "divides_by_zero": "all padding",
    "factor_for_a_sum": "averaging divides by the 2 ranks once more",
    "no_second_round": "the keys and values again",
    "own_part_travels": "A rank's own part never travels",
    "gradients_go_all_the_way_round": "c - 1 messages",
    "gradients_as_pytorch_sends_them": "PyTorch sends the gradients c times",
    "ulysses_forgets_the_parts": "cp=4 does not divide seq=4006",
    "gathered_as_a_ring": "a second gather",
    "gradients_in_fp32": "gradients in fp32 would be",
    "both_directions": "was sent by another rank",
    "all_heads_have_keys": "kv_heads heads",
    "ulysses_forgets_the_output": "the output travels back",
    "query_heads_decide": "query heads alone are not enough",
    "forgets_that_tp_took_heads": "tp=2 leaves a rank 2 of the 4 key heads",
    "ulysses_needs_chunks": "attend over the whole sequence",
    "always_two_chunks": "without a causal mask nothing needs balance",
    "zigzag_under_any_causal_mask": "nothing is to be balanced",
    "sends_what_all_ranks_send": "one rank is asked",
    "averages_over_dp": "dp and cp together",
    "one_maximum_for_all_rows": "each row has its own",
    "one_block_for_a_ring": "keys and values of two blocks",
    "two_blocks_for_two_ranks": "which fit into room",
    "ulysses_output_has_no_buffer": "values and outputs once more",
    "ulysses_keeps_its_own_part": "values and outputs once more",
}

DEFECTS, SECOND_SOLUTIONS = listed(merge, held_positions, global_loss, sent_bytes, choose_split)
