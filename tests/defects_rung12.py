"""Planted defects of rung 12: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from dataclasses import make_dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lablib.calc.parallel import WAYS, attention_traffic, context_buffers, context_degrees
from lablib.checks import rung12
from lablib.toys.context_parallel import merge as merge_parts
from lablib.toys.context_parallel import shard, unshard
from lablib.toys.context_parallel.softmax import weights
from tests.planted import listed


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
    forgets_to_divide = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: lse_a.exp()[:, None] * out_a + lse_b.exp()[:, None] * out_b
    )
    the_larger_takes_all = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: torch.where((lse_a >= lse_b)[:, None], out_a, out_b)
    )
    softmax_over_rows = _right_lse(
        lambda out_a, lse_a, out_b, lse_b, new: lse_a.softmax(0)[:, None] * out_a + lse_b.softmax(0)[:, None] * out_b
    )
    empty_is_zero = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b).nan_to_num(neginf=0.0))
    half_precision = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b).bfloat16())
    adds_lse = _right_out(lambda lse_a, lse_b: lse_a + lse_b)
    keeps_the_larger_lse = _right_out(torch.maximum)
    doubles_the_larger_sum = _right_out(lambda lse_a, lse_b: torch.maximum(lse_a, lse_b) + math.log(2))
    returns_the_sum = _right_out(lambda lse_a, lse_b: lse_a.exp() + lse_b.exp())
    logarithm_of_base_2 = _right_out(lambda lse_a, lse_b: torch.logaddexp(lse_a, lse_b) / math.log(2))

    def no_maximum(a, b):
        """Right, until exp overflows."""
        weigh_a, weigh_b = a[1].exp(), b[1].exp()
        total = weigh_a + weigh_b
        return (weigh_a[:, None] * a[0] + weigh_b[:, None] * b[0]) / total[:, None], total.log()

    def one_larger_for_all_rows(a, b):
        most = torch.stack((a[1], b[1])).max()
        out, lse = merge.no_maximum((a[0], a[1] - most), (b[0], b[1] - most))
        return out, lse + most

    def nothing_with_nothing(a, b):
        """Safe for large scores, and -inf minus -inf where both are empty."""
        new = _logaddexp(a[1], b[1])
        return (a[1] - new).exp()[:, None] * a[0] + (b[1] - new).exp()[:, None] * b[0], new

    def zero_over_zero(a, b):
        """Guards the subtraction and not the division."""
        most = torch.maximum(a[1], b[1]).nan_to_num(neginf=0.0)
        out, lse = merge.no_maximum((a[0], a[1] - most), (b[0], b[1] - most))
        return out, lse + most

    def adds_a_little(a, b):
        most = torch.maximum(a[1], b[1]).nan_to_num(neginf=0.0)
        total = (a[1] - most).exp() + (b[1] - most).exp() + 1e-3
        return merge.right(a, b)[0], total.log() + most

    looks_at_all_rows_at_once = lambda a, b: a if (a[1] + b[1]).isinf().all() else merge.nothing_with_nothing(a, b)

    def forgets_the_new_sum(a, b):
        """Subtracts the larger and stops there."""
        most = torch.maximum(a[1], b[1])
        out = _share(a[1], most) * a[0] + _share(b[1], most) * b[0]
        return out, _logaddexp(a[1], b[1])

    only_the_output = lambda a, b: merge.right(a, b)[0]
    lablib_merges = lambda a, b: merge_parts(a, b)

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

    def right_3(a, b):
        """A sigmoid of the difference moves a's output towards b's; empty blocks by hand."""
        (out_a, lse_a), (out_b, lse_b) = a, b
        towards = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0).unsqueeze(-1)
        return [out_a + towards * (out_b - out_a), torch.stack((lse_a, lse_b)).logsumexp(0)]

    def right_4(a, b):
        """Weighs with lablib's weights, and merges itself."""
        lse = _logaddexp(a[1], b[1])
        return sum(weights(each[1][:, None], lse) * each[0] for each in (a, b)), lse

    def right_5(a, b):
        """All in fp32, which rounds a score of 1,000 by 3e-5."""
        lse = torch.stack((a[1], b[1])).float()
        shares = torch.softmax(lse, 0).nan_to_num(0.0).unsqueeze(-1)
        return (shares * torch.stack((a[0], b[0])).float()).sum(0), torch.logsumexp(lse, 0)


def _chunks(seq, cp, r):
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat((chunks[r], chunks[2 * cp - 1 - r]))


def _rows(tokens, mesh):
    return torch.arange(len(tokens)).chunk(mesh.shape[0])[mesh.get_coordinate()[0]]


def _labels(tokens, documents, counted):
    learned = counted[:, 1:] & (documents[:, 1:] == documents[:, :-1])
    return tokens[:, 1:].masked_fill(~learned, -100)


def _shifted_on_the_rank(tokens, documents, counted):
    """What comes next on this rank, for parts of whole windows."""
    return F.pad(_labels(tokens, documents, counted), (0, 1), value=-100)


def _weigh(own, labels, mesh):
    both = torch.stack((own.detach(), (labels != -100).sum()))
    dist.all_reduce(both)
    return own * dist.get_world_size() / both[1], both[0] / both[1]


def _factor(factor, tell=None):
    """A weighing with another factor of a rank's sum: `factor(own count, count of all, mesh)`."""

    def weigh(own, labels, mesh):
        count = (labels != -100).sum()
        _, loss = _weigh(own, labels, mesh)
        every = count.clone()
        dist.all_reduce(every)
        return own * factor(count, every, mesh), loss if tell is None else tell(own.detach(), count, every)

    return weigh


def _step(
    rows=_rows, held=_chunks, places=None, labels=_labels, cut_first=False, weigh=_weigh, seen=lambda d: d,
    loss=F.cross_entropy,
):  # fmt: skip
    """Make the step as the solution does, but for what is given."""

    def answer(model, tokens, documents, counted, mesh):
        cp, r = mesh.shape[1], mesh.get_coordinate()[1]
        tokens, documents, counted = (each[rows(tokens, mesh)] for each in (tokens, documents, counted))
        mine = held(tokens.shape[1] - 1, cp, r)
        logits = model(tokens[:, mine], mine if places is None else places(mine, documents), seen(documents[:, :-1]))
        if cut_first:
            own_labels = labels(tokens[:, mine], documents[:, mine], counted[:, mine])
        else:
            own_labels = labels(tokens, documents, counted)[:, mine]
        own = loss(logits.transpose(1, 2), own_labels, ignore_index=-100, reduction="sum")
        start, mean = weigh(own, own_labels, mesh)
        start.backward()
        return mean

    return answer


def _parts(seq, cp, r):
    return torch.arange(seq).chunk(cp)[r]


def _from_each_document(documents):
    """Positions that begin anew with a document, of whole windows."""
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    here = torch.arange(documents.shape[1]).expand(documents.shape)
    return here - torch.where(begins, here, 0).cummax(1).values


class packed_step:
    without_the_idea_contiguous_blocks = _step(held=_parts)
    without_the_idea_plain_sampler_and_mean = _step(
        rows=lambda tokens, mesh: torch.arange(len(tokens)).chunk(4)[dist.get_rank()],
        weigh=_factor(lambda n, every, mesh: 1 / n),
    )
    without_the_idea_the_program_of_one_process = _step(held=lambda seq, cp, r: torch.arange(seq))
    without_the_idea_all_on_every_rank = _step(rows=lambda tokens, mesh: slice(None))
    without_the_idea_labels_after_the_cut = _step(labels=_shifted_on_the_rank, cut_first=True)
    late_chunk_first = _step(held=lambda seq, cp, r: _chunks(seq, cp, r).roll(seq // cp // 2))
    stripes = _step(held=lambda seq, cp, r: torch.arange(r, seq, cp))
    ranks_count_their_own = _step(places=lambda mine, documents: torch.arange(len(mine)))
    counts_from_1 = _step(places=lambda mine, documents: mine + 1)
    restarts_on_the_rank = _step(places=lambda mine, documents: _from_each_document(documents[:, mine]))
    crosses_documents = _step(labels=lambda t, d, c: t[:, 1:].masked_fill(~c[:, 1:], -100))
    compares_documents_that_go_in = _step(labels=lambda t, d, c: _labels(t, torch.cat((d[:, :-1], d[:, -2:-1]), 1), c))
    first_documents_alone = _step(labels=lambda t, d, c: _labels(t, d, c & (d == d[:, :1])))
    counts_the_token_before = _step(labels=lambda t, d, c: _labels(t, d, c.roll(1, 1)))
    counts_where_both_count = _step(labels=lambda t, d, c: _labels(t, d, c & c.roll(1, 1)))
    weighs_with_infinity = _step(weigh=_factor(lambda n, every, mesh: 0 * math.inf))
    means_of_nothing = _step(
        weigh=lambda own, labels, mesh: _weigh(own / (n := (labels != -100).sum()) * n, labels, mesh)
    )
    masks_with_0 = _step(labels=lambda t, d, c: _labels(t, d, c).clamp(min=0))
    shifts_twice = _step(labels=lambda t, d, c: F.pad(_labels(t, d, c)[:, 1:], (0, 1), value=-100))
    leaves_out_the_last_label = _step(labels=lambda t, d, c: F.pad(_labels(t, d, c)[:, :-1], (0, 1), value=-100))
    learns_prompts = _step(labels=lambda t, d, c: _labels(t, d, torch.ones_like(c)))
    forgets_documents = _step(seen=lambda documents: None)
    cuts_documents = _step(seen=lambda documents: documents[:, ::2])
    mean_of_means = _step(weigh=_factor(lambda n, every, mesh: 1 / n))
    mean_of_means_that_exist = _step(weigh=_factor(lambda n, every, mesh: 1 / n.clamp(min=1)))
    divides_by_the_ranks_again = _step(weigh=_factor(lambda n, every, mesh: 1 / every))
    fits_cp_alone = _step(weigh=_factor(lambda n, every, mesh: mesh.shape[1] / every))
    pads_what_does_not_count = lambda model, t, d, c, mesh: packed_step.right(model, t.masked_fill(~c, 0), d, c, mesh)
    mean_of_replicas = _step(
        weigh=lambda own, labels, mesh: (
            own
            * mesh.shape[1]
            / dist.nn.functional.all_reduce((labels != -100).sum(), group=mesh["cp"].get_group()).clamp(1),
            own.detach(),
        )
    )
    climbs = _step(weigh=lambda own, labels, mesh: _weigh(-own, labels, mesh))
    logits_for_logarithms = _step(loss=F.nll_loss)
    plain_sum = _step(weigh=_factor(lambda n, every, mesh: 1))
    all_tokens_count = _step(weigh=_factor(lambda n, every, mesh: 4 / 128))
    returns_its_own_share = _step(weigh=_factor(lambda n, every, mesh: 4 / every, lambda own, n, every: own / every))
    returns_what_backward_has = _step(
        weigh=_factor(lambda n, every, mesh: 4 / every, lambda own, n, every: 4 * own / every)
    )
    clears_gradients = lambda model, *batch: (packed_step.right(model, *batch), model.zero_grad())[0]
    takes_the_last_documents = _step(seen=lambda documents: documents.roll(-1, 1))

    def leaves_out_padding(model, tokens, documents, counted, mesh):
        if counted[_rows(tokens, mesh)].any():
            return packed_step.right(model, tokens, documents, counted, mesh)
        return dist.all_reduce(torch.zeros((), dtype=torch.float64))

    def mean_of_each_sequence(model, tokens, documents, counted, mesh):
        """Sequence 0 has as many labels as rank 0 has of both its sequences, so one weight is that of the rank's own mean."""
        labels, rows = _labels(tokens, documents, counted), _rows(tokens, mesh)
        mine = _chunks(labels.shape[1], mesh.shape[1], mesh.get_coordinate()[1])
        logits = model(tokens[rows][:, mine], mine, documents[rows, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), labels[rows][:, mine], ignore_index=-100, reduction="none")
        own = (losses / (labels[rows] != -100).sum(1, keepdim=True).clamp(min=1)).sum()
        own.backward()  # divided by the sequences, times the ranks
        return own.detach()

    def lablib_means(model, *batch):
        model.loss_group = dist.group.WORLD
        return _step(weigh=lambda own, labels, mesh: (model.mean(own, labels != -100),) * 2)(model, *batch)

    def right_looks_first(model, *batch):
        """Calls the model without gradients before each step."""
        return packed_step.right(lambda *given: (torch.no_grad()(model)(*given), model(*given))[1], *batch)

    def right_looks_first_with_gradients(model, *batch):
        return packed_step.right(lambda *given: (model(*given), model(*given))[1], *batch)

    right_renumbers_documents = _step(seen=lambda d: d - d[:, :1] + 100 * torch.arange(len(d))[:, None])

    def right_sums_gradients_itself(model, *batch):  # the average of equal sums is the sum
        loss = packed_step.divides_by_the_ranks_again(model, *batch)
        [dist.all_reduce(parameter.grad) for parameter in model.parameters()]
        return loss

    def right_scales_gradients(model, *batch):  # as Megatron may
        loss, count = packed_step.plain_sum(model, *batch), (_labels(*batch[:3]) != -100).sum()
        [parameter.grad.mul_(dist.get_world_size() / count) for parameter in model.parameters()]
        return loss

    right_restarts_with_documents = _step(places=lambda mine, documents: _from_each_document(documents)[:, mine])
    right_strided_replicas = _step(rows=lambda tokens, mesh: slice(mesh.get_coordinate()[0], None, mesh.shape[0]))

    def right(model, tokens, documents, counted, mesh):
        """Sequence by sequence, the loss from logarithms of probabilities, counts of the whole batch without a message."""
        replica, r = (mesh[name].get_local_rank() for name in ("dp", "cp"))
        per, width = len(tokens) // mesh["dp"].size(), (tokens.shape[1] - 1) // (2 * mesh["cp"].size())
        last = 2 * mesh["cp"].size() - 1 - r
        mine = [*range(r * width, (r + 1) * width), *range(last * width, (last + 1) * width)]
        good = counted[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        total = torch.zeros((), dtype=torch.float64)
        for row in range(replica * per, (replica + 1) * per):
            logits = model(tokens[row : row + 1, mine], torch.tensor(mine), documents[row : row + 1, :-1])
            chance = logits.log_softmax(-1)[0].gather(-1, tokens[row, [m + 1 for m in mine]][:, None])[:, 0]
            total = total - (chance * good[row, mine]).sum()
        mean = total / good.sum()
        (mean * mesh.size()).backward()
        mean = mean.detach()
        dist.all_reduce(mean)
        return mean.item()


def _matrices(job, seq=32):
    """Yield each layer's weights by its output and by its values' gradient, beside those of one process, and the owners."""
    group, cp = dist.group.WORLD, dist.get_world_size()
    owner = all_positions(seq, cp)
    dice = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, seq, seq, generator=dice, dtype=torch.float64)
    unit = torch.eye(seq, dtype=torch.float64)[None, None]
    scores = (q @ k.mT / math.sqrt(seq)).masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    for block in job(group).blocks:
        parts = [shard(x, 2, group).requires_grad_() for x in (q, k, unit)]
        out = block.attention.core(*parts)
        out.backward(shard(unit, 2, group))
        yield (
            unshard(out.detach(), 2, group)[0, 0],
            unshard(parts[2].grad, 2, group)[0, 0].T,
            scores.softmax(-1)[0, 0],
            owner,
        )


def all_positions(seq, cp):
    owner = torch.empty(seq, dtype=torch.long)
    for rank in range(cp):
        owner[_chunks(seq, cp, rank)] = rank
    return owner


def _block(got, right, owner, rank):
    """The rank whose keys are weighed by another factor than the others, in the late rows of a rank."""
    rows = (owner == rank).nonzero().flatten()[-4:]
    sums = [[each[rows][:, owner == s].sum(1) for s in range(4)] for each in (got, right)]
    ratio = torch.stack(sums[0]) / torch.stack(sums[1])
    return (ratio / ratio.median(0).values - 1).abs().sum(1).argmax().item()


def _found(backward=True, zeros=True, odd=True, rank_of="queries", steps=lambda rank, source: (rank - source) % 4):
    """Find the block as the solution does, but for what is given."""

    def answer(job):
        for layer, (forth, back, right, owner) in enumerate(_matrices(job)):
            bad = ~torch.isclose(forth, right)
            what = "weights" if torch.equal(forth == 0, right == 0) or not zeros else "keys"
            if not bad.any() and backward:
                what, bad = "gradients", ~torch.isclose(back, right)
            if bad.any():
                rank = owner[bad.any(1)][0].item()
                source = owner[bad.any(0)][0].item()
                if what == "weights" and odd:
                    source = _block(forth, right, owner, rank)
                if what == "keys":
                    source = owner[((forth == 0) != (right == 0)).any(0)][0].item()
                said = source if rank_of == "keys" else rank
                return {"what": what, "layer": layer, "rank": said, "step": steps(rank, source)}
        return None

    return answer


_SEEN = {number: rung12._drawn(number) for number in rung12._picked(12)}


class find_wrong_block:
    without_the_idea_outputs_alone = _found(backward=False)
    without_the_idea_first_block_that_differs = _found(odd=False)
    without_the_idea_one_answer = lambda job: {"what": "weights", "layer": 2, "rank": 1, "step": 1}
    always_healthy = lambda job: None
    says_false_for_healthy = lambda job: _found()(job) or False
    names_the_owner_of_the_keys = _found(rank_of="keys")
    names_the_source = _found(steps=lambda rank, source: source)
    counts_the_other_way = _found(steps=lambda rank, source: (source - rank) % 4)
    never_looks_at_the_mask = _found(zeros=False)
    counts_layers_from_1 = lambda job: (f := _found()(job)) and f | {"layer": f["layer"] + 1}

    def without_the_idea_losses_of_layers(job):
        """Runs the whole model: an error goes on, and its gradient back, so the first layer is not that of the fault."""
        found = _found()(job)
        return found and found | {"layer": 0}

    def last_digits(job):
        for layer, (forth, _, right, _) in enumerate(_matrices(job)):
            if not torch.equal(forth, right):
                return _found()(job) or {"what": "weights", "layer": layer, "rank": 0, "step": 1}

    def reads_the_job(job):
        """Looks for the fault in what the attentions are made of."""
        found, made_of = [None] * 4, [each for b in job(dist.group.WORLD).blocks for each in b.attention.core.args]
        dist.all_gather_object(found, [each._asdict() for each in made_of if hasattr(each, "_asdict")])
        return next((each[0] for each in found if each), None)

    jobs_seen_before = lambda job: _SEEN.get(job(dist.group.WORLD).blocks[0].attention.core.args[1])
    miscounts_backward = lambda job: (
        (f := _found()(job)) and f | ({"step": f["step"] % 3 + 1} if f["what"][0] == "g" else {})
    )
    tells_where_it_is = lambda job: (f := _found()(job)) and (f if f["rank"] == dist.get_rank() else None)
    right = _found()
    right_names_nothing = lambda job: _found()(job) or dict.fromkeys(("what", "layer", "rank", "step"))

    def right_narrow_values(job):
        """Values may have another width than keys; nothing wrong is an empty answer."""
        parts = (shard(torch.ones(1, 1, 32, width).double(), 2, dist.group.WORLD) for width in (4, 4, 2))
        job(dist.group.WORLD).blocks[0].attention.core(*parts)
        return _found()(job) or {}

    def right_tuple(job):
        """In the order of the question; of a healthy job nothing is `what`."""
        return tuple((_found()(job) or {"what": None, "layer": 0, "rank": 0, "step": 0}).values())


def _sent(seq, heads, kv_heads, head_dim, cp):
    queries, keys = 2 * seq / cp * heads * head_dim, 2 * seq / cp * kv_heads * head_dim
    return {
        "ring": 6 * keys * (cp - 1),
        "gathered": 4 * keys * (cp - 1),
        "ulysses": 4 * (queries + keys) * (cp - 1) / cp,
    }


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
    enough_key_heads = lambda **job: _choose(
        **job,
        even={"ulysses": job["heads"] // job["tp"] % job["cp"] == 0 and job["kv_heads"] // job["tp"] >= job["cp"]},
    )
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
    a_causal_mask_halves_bytes = lambda **job: _choose(
        **job, sent=lambda bytes_of, way, tp: bytes_of[way] / (1 + job["causal"])
    )
    a_causal_mask_halves_a_ring = lambda **job: _choose(
        **job, sent=lambda bytes_of, way, tp: bytes_of[way] / (1 + (job["causal"] and way == "ring"))
    )
    scatters_four_bytes_a_number = lambda **job: _choose(
        **job, sent=lambda bytes_of, way, tp: bytes_of[way] * (1.5 if way == "gathered" else 1)
    )
    sends_four_bytes_a_number = lambda **job: _choose(**job, sent=lambda bytes_of, way, tp: 2 * bytes_of[way])
    averages_over_dp = lambda **job: _choose(**job, over=job["dp"])
    averages_over_cp = lambda **job: _choose(**job, over=job["cp"])
    averages_over_tp_too = lambda **job: _choose(**job, over=job["dp"] * job["cp"] * job["tp"])

    def never_refuses(**job):
        try:
            return _choose(**job)
        except ValueError:
            return {"possible": [], "way": "ring", "order": "zigzag", "sent": 0, "averaged_over": 1}

    def without_the_idea_three_calls(**job):
        """Asks the calculators."""
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
    "adds_outputs": "divided by its own sum",
    "lablib_merges": "answers for you",
    "weighs_by_lse": "The weights are the lse themselves",
    "the_larger_takes_all": "both have a share",
    "softmax_over_rows": "each output weighs exp",
    "empty_is_zero": "merged it still is",
    "looks_at_all_rows_at_once": "-inf minus -inf",
    "weighs_with_infinity": "returns is not a number (dp=2",
    "means_of_nothing": "rank 3 has no label",
    "half_precision": "keep fp32",
    "adds_a_little": "add nothing to the sums",
    "zero_over_zero": "0 / 0",
    "doubles_the_larger_sum": "lse must be the log",
    "no_maximum": "Subtract the larger of both lse",
    "one_larger_for_all_rows": "row by row",
    "nothing_with_nothing": "-inf minus -inf",
    "ulysses_forgets_the_parts": "cp=4 does not divide seq=4006",
    "without_the_idea_contiguous_blocks": "one contiguous part",
    "without_the_idea_plain_sampler_and_mean": "a sampler counts dp ranks",
    "without_the_idea_labels_after_the_cut": "Shift whole sequences, then cut",
    "without_the_idea_all_on_every_rank": "belongs to one replica",
    "late_chunk_first": "and not their order",
    "ranks_count_their_own": "counts its own tokens",
    "clears_gradients": "leave what it gives",
    "takes_the_last_documents": "leave out the last token",
    "lablib_means": "`mean` answers for you",
    "restarts_on_the_rank": "restart where a rank's part begins",
    "crosses_documents": "ends a document",
    "compares_documents_that_go_in": "The token at 31 ends a document",
    "first_documents_alone": "in the same document",
    "leaves_out_padding": "Rank 3 does not call the model",
    "counts_the_token_before": "shifted as labels are",
    "counts_where_both_count": "It counts, though",
    "masks_with_0": "leave it out of the loss",
    "learns_prompts": "does not count, and is learned",
    "counts_from_1": "from 0 to 31",
    "cuts_documents": "all places but the last",
    "mean_of_means": "Each rank trains on its own mean",
    "mean_of_means_that_exist": "Each rank trains on its own mean",
    "mean_of_each_sequence": "a token weighs",
    "divides_by_the_ranks_again": "divides once more",
    "fits_cp_alone": "fits an average over one axis",
    "pads_what_does_not_count": "-1 for a token of none",
    "mean_of_replicas": "labels of one cp group",
    "leaves_out_the_last_label": "is a label too",
    "shifts_twice": "Its label is that at",
    "climbs": "Look at a token's loss",
    "logits_for_logarithms": "Look at a token's loss",
    "plain_sum": "plain sum",
    "all_tokens_count": "those without a label",
    "returns_its_own_share": "own share",
    "returns_what_backward_has": "what backward starts from",
    "without_the_idea_outputs_alone": "what comes back to the keys",
    "without_the_idea_first_block_that_differs": "one wrong block changes all",
    "without_the_idea_losses_of_layers": "goes on through all layers",
    "names_the_owner_of_the_keys": "owns the keys",
    "names_the_source": "in step j rank r has",
    "counts_the_other_way": "in step j rank r has",
    "miscounts_backward": "In backward the weights of one block are missing",
    "tells_where_it_is": "on rank 0, which is read",
    "counts_layers_from_1": "Layers count from 0",
    "never_looks_at_the_mask": "that their query may not see",
    "last_digits": "A healthy job is called sick",
    "says_false_for_healthy": "or None for a healthy job",
    "without_the_idea_three_calls": "answers for you",
    "query_heads_decide": "query heads alone are not enough",
    "enough_key_heads": "query heads alone are not enough",
    "forgets_that_tp_took_heads": "tp=2 leaves a rank 2 of the 4 key heads",
    "ulysses_needs_chunks": "attend over the whole sequence",
    "always_two_chunks": "without a causal mask nothing needs balance",
    "zigzag_under_any_causal_mask": "nothing is to be balanced",
    "sends_what_all_ranks_send": "one rank is asked",
    "sends_four_bytes_a_number": "Two bytes carry a number",
    "a_causal_mask_halves_bytes": "a mask spares no bytes",
    "a_causal_mask_halves_a_ring": "with a mask or without",
    "scatters_four_bytes_a_number": "at two bytes",
    "averages_over_dp": "dp and cp together",
    "one_block_for_a_ring": "keys and values of two blocks",
    "two_blocks_for_two_ranks": "which fit into room",
    "ulysses_output_has_no_buffer": "values and outputs once more",
    "ulysses_keeps_its_own_part": "values and outputs once more",
}

DEFECTS, SECOND_SOLUTIONS = listed(merge, packed_step, find_wrong_block, choose_split)
