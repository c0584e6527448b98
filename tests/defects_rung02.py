"""Planted defects of rung 02: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import copy
import itertools
import random
import types
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lablib.checks import rung02
from tests.planted import listed, told


def _batches(sampler, data, micro_batch, accumulate):
    batches = list(DataLoader(data, micro_batch, sampler=sampler, collate_fn=list))
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


def _tokens(group):
    return sum(len(tokens) for batch in group for tokens in batch)


def _over_ranks(number):
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    return total.item()


def _train(
    model,
    data,
    epochs,
    micro_batch,
    accumulate,
    lr,
    *,
    wrap=DistributedDataParallel,
    sampler=DistributedSampler,
    tell=True,
    groups=_batches,
    quiet=True,
    weigh=lambda group, batch: dist.get_world_size() / _over_ranks(_tokens(group)),
    clear=True,
    after=lambda model: None,
):
    """The right loop; each of its ideas can be replaced."""
    wrapped = wrap(model)
    dealt, optimizer = sampler(data), torch.optim.SGD(wrapped.parameters(), lr=lr)
    for epoch in range(epochs):
        if tell:
            dealt.set_epoch(epoch)
        for group in groups(dealt, data, micro_batch, accumulate):
            weights = [weigh(group, batch) for batch in group]
            for i, (batch, weight) in enumerate(zip(group, weights, strict=True)):
                with wrapped.no_sync() if quiet and i < max(len(group), quiet) - 1 else nullcontext():
                    (wrapped(batch).sum() * weight).backward()
            after(wrapped)
            optimizer.step()
            if clear:
                optimizer.zero_grad()


def _trained(**others):
    return lambda *case: _train(*case, **others)


def _all_gathered(message):
    dist.all_gather(of_ranks := [message.clone() for _ in range(dist.get_world_size())], message)
    return of_ranks


def _pickled(message):
    dist.all_gather_object(of_ranks := [None] * dist.get_world_size(), message)
    return of_ranks


def _to_each(message):
    of_ranks = [message.clone() for _ in range(dist.get_world_size())]
    others = [rank for rank in range(len(of_ranks)) if rank != dist.get_rank()]
    works = [dist.isend(message.clone(), rank) for rank in others] + [dist.irecv(of_ranks[r], r) for r in others]
    for work in works:
        work.wait()
    return of_ranks


def _averaged_by_hand(model, flat=True, gather=None):
    grads = [p.grad for p in model.parameters()]
    whole = [torch.cat([g.flatten() for g in grads])] if flat else grads
    for message in whole:
        if gather:
            message.copy_(sum(of_ranks := gather(message)) / len(of_ranks))
        else:
            dist.all_reduce(message.div_(dist.get_world_size()))
    if flat:
        torch.nn.utils.vector_to_parameters(whole[0], grads)


def _from_rank_0(model):
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model


class train_ddp:
    # The loop of one process, which forgets that it has siblings: it is right, n times.
    without_the_idea_of_shares = _trained(
        wrap=_from_rank_0,
        quiet=False,
        sampler=lambda data: DistributedSampler(data, 1, 0),
        weigh=lambda group, _: 1 / _tokens(group),
    )
    # Shares, counts and groups are right, and nobody averages.
    without_the_idea_of_averaging = _trained(wrap=_from_rank_0, quiet=False)

    def without_the_idea_forward_beside_the_wrapper(model, *case):
        """DDP prepares in its own forward; around it, backward sends nothing."""

        class Beside(DistributedDataParallel):
            def forward(self, batch):
                return self.module(batch)

        _train(model, *case, wrap=Beside)

    every_micro_batch_leaves = _trained(quiet=False)
    leaves_out_a_short_group = lambda *case: _train(*case, quiet=case[4])
    steps_on_rank_0_alone = _trained(after=lambda model: dist.get_rank() and model.zero_grad())
    averages_what_ddp_has_averaged = _trained(after=_averaged_by_hand)

    def leaves_forward_out_of_no_sync(model, data, epochs, micro_batch, accumulate, lr):
        class Late(DistributedDataParallel):
            def no_sync(self):
                return nullcontext()

        _train(model, data, epochs, micro_batch, accumulate, lr, wrap=Late)

    one_message_for_each_parameter = _trained(
        wrap=_from_rank_0, quiet=False, after=lambda model: _averaged_by_hand(model, flat=False)
    )
    replicas_start_apart = _trained(wrap=lambda model: model, quiet=False, after=_averaged_by_hand)
    same_examples = _trained(sampler=lambda data: DistributedSampler(data, dist.get_world_size(), 0))
    no_set_epoch = _trained(tell=False)
    never_shuffles = _trained(sampler=lambda data: DistributedSampler(data, shuffle=False))
    drops_the_tail = _trained(sampler=lambda data: DistributedSampler(data, drop_last=True))
    drops_the_last_micro_batch = _trained(groups=lambda sampler, data, m, k: [
        (b := [*DataLoader(data, m, sampler=sampler, collate_fn=list, drop_last=True)])[i : i + k]
        for i in range(0, len(sampler) // m, k)])  # fmt: skip
    drops_the_last_group = _trained(groups=lambda *case: [g for g in _batches(*case) if len(g) == case[3]])
    steps_after_each = _trained(groups=lambda sampler, data, m, _: _batches(sampler, data, m, 1))
    one_large_batch = _trained(groups=lambda sampler, data, m, k: _batches(sampler, data, m * k, 1))

    mean_of_means = _trained(weigh=lambda group, batch: 1 / _tokens([batch]) / len(group))
    means_add_up = _trained(weigh=lambda group, batch: 1 / _tokens([batch]))
    own_tokens_only = _trained(weigh=lambda group, batch: 1 / _tokens(group))
    own_tokens_in_broadcasts = _trained(wrap=_from_rank_0, quiet=False, weigh=lambda group, batch: 1 / _tokens(group),
        after=lambda model: _averaged_by_hand(model, gather=lambda mine: [
            dist.broadcast(each := mine.clone(), r) or each for r in range(dist.get_world_size())]))  # fmt: skip
    forgets_what_ddp_divides_by = _trained(weigh=lambda group, batch: 1 / _over_ranks(_tokens(group)))
    multiplies_twice = _trained(weigh=lambda group, batch: dist.get_world_size() ** 2 / _over_ranks(_tokens(group)))
    sums = _trained(weigh=lambda group, batch: 1.0)
    counts_micro_batches = _trained(weigh=lambda group, batch: dist.get_world_size() / _over_ranks(len(group)))
    each_place_by_itself = _trained(
        weigh=lambda group, batch: dist.get_world_size() / _over_ranks(_tokens([batch])) / len(group)
    )
    counts_accumulate_for_ranks = lambda *case: _train(*case, weigh=lambda g, _: case[4] / _over_ranks(_tokens(g)))
    groups_as_large_as_the_ranks = lambda *case: _train(*case[:4], dist.get_world_size(), case[5])
    reorders_its_own_share = _trained(groups=lambda s, data, *k: _batches(
        (own := [*DistributedSampler(data, shuffle=False)])[s.epoch :] + own[: s.epoch], data, *k))  # fmt: skip
    swaps_shares = _trained(groups=lambda s, data, *k: _batches(
        DistributedSampler(data, n := s.num_replicas, (s.rank + s.epoch) % n, False), data, *k))  # fmt: skip
    deals_twice_at_most = _trained(sampler=lambda data: type("Twice", (DistributedSampler,), {
        "set_epoch": lambda self, epoch: DistributedSampler.set_epoch(self, min(epoch, 1))})(data))  # fmt: skip
    never_clears = _trained(clear=False)
    lr_of_a_table = lambda *case: _train(*case[:-1], 0.5)
    one_epoch_too_many = lambda model, data, epochs, *case: _train(model, data, epochs + 1, *case)
    clears_before_the_step = _trained(after=lambda model: model.zero_grad())
    carries_a_group_on = lambda model, data, epochs, *case: _train(model, data, 1, *case, groups=lambda s, d, m, k: [
        (b := [b for e in range(epochs) if not s.set_epoch(e) for b in DataLoader(d, m, sampler=s, collate_fn=list)])[i : i + k]
        for i in range(0, epochs * -(-len(s) // m), k)])  # fmt: skip
    two_epochs_always = lambda model, data, _, *case: _train(model, data, 2, *case)

    def adam(model, *case):
        """Another optimizer than the one that is asked."""
        theirs, torch.optim.SGD = torch.optim.SGD, torch.optim.Adam
        try:
            _train(model, *case)
        finally:
            torch.optim.SGD = theirs

    def never_steps(model, data, epochs, micro_batch, accumulate, lr):
        _train(model, data, epochs, micro_batch, accumulate, 0.0)

    def rank_0_trains_for_all(model, *case):
        if dist.get_rank() == 0:
            _train(model, *case, wrap=lambda model: model, sampler=lambda data: DistributedSampler(data, 1, 0),
                   quiet=False, weigh=lambda group, batch: 1 / _tokens(group))  # fmt: skip
        _from_rank_0(model)

    def averages_weights_once_an_epoch(model, data, epochs, *case):
        """No gradient leaves a rank, though as many bytes do."""
        for epoch in range(epochs):
            _train(model, data, 1, *case, wrap=_from_rank_0, quiet=False, tell=False,
                   sampler=lambda data, seed=epoch: DistributedSampler(data, seed=seed))  # fmt: skip
            for p in model.parameters():
                dist.all_reduce(p.data.div_(dist.get_world_size()))

    def trains_a_copy(model, *case):
        _train(copied := copy.deepcopy(model), *case)
        model.load_state_dict(copied.state_dict())

    def pads_into_one_tensor(model, data, *case):
        padded = list(torch.nn.utils.rnn.pad_sequence(data, batch_first=True))
        _train(model, padded, *case)

    def right(model, data, epochs, micro_batch, accumulate, lr):
        """Second solution: a share cut by hand, without padding, and the mean count of a rank."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        ddp = DistributedDataParallel(model)
        for epoch in range(epochs):
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()[rank::ranks]
            micro = [[data[i] for i in order[k : k + micro_batch]] for k in range(0, len(order), micro_batch)]
            while micro:
                group, micro = micro[:accumulate], micro[accumulate:]
                mean_count = _over_ranks(_tokens(group)) / ranks
                with ddp.no_sync():
                    for batch in group[:-1]:
                        ddp(batch).sum().div(mean_count).backward()
                ddp(group[-1]).sum().div(mean_count).backward()
                with torch.no_grad():
                    for p in ddp.parameters():
                        p -= lr * p.grad
                        p.grad = None

    # Gradients summed, or all-gathered, by hand in one flat message, from rank 0's weights: what DDP does, without overlap.
    right_2 = _trained(wrap=_from_rank_0, quiet=False, after=_averaged_by_hand)
    right_4 = _trained(
        wrap=_from_rank_0, quiet=False, after=lambda model: _averaged_by_hand(model, gather=_all_gathered)
    )
    # A short share is filled up with its own last sequence; rank 0's weights go to all in a pickle.
    right_5 = _trained(
        wrap=lambda model: DistributedDataParallel(_from_rank_0_in_a_pickle(model)),
        sampler=lambda data: _FilledUp(data),
    )
    # Rank 0 gathers what the ranks' gradients are, and steps for all.
    right_6 = lambda *case: _gathered(*case)
    # One gradient from each rank to each other one, by isend and irecv; and in a pickle.
    right_7 = _trained(wrap=_from_rank_0, quiet=False, after=lambda model: _averaged_by_hand(model, gather=_to_each))
    right_8 = _trained(wrap=_from_rank_0, quiet=False, after=lambda model: _averaged_by_hand(model, gather=_pickled))
    # Counts the losses of a forward pass that no backward follows, and looks at a loss before it begins.
    right_9 = lambda *case: (
        print(case[0](case[1][:1]).mean().item())
        or _train(
            *case,
            weigh=lambda group, batch: (
                dist.get_world_size() / _over_ranks(sum(case[0](each).numel() for each in group))
            ),
        )
    )

    def right_10(model, data, epochs, micro_batch, accumulate, lr):
        """Gradients of a function of the weights."""
        sampler, weights = DistributedSampler(data), dict(_from_rank_0(model).named_parameters())
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for group in _batches(sampler, data, micro_batch, accumulate):
                own = {name: p.detach() for name, p in weights.items()}
                grads = [
                    torch.func.grad(lambda w, b=b: torch.func.functional_call(model, w, (b,)).sum())(own) for b in group
                ]
                flat = sum(torch.cat([grad[name].flatten() for name in own]) for grad in grads)
                dist.all_reduce(flat)
                step = flat.split([p.numel() for p in own.values()])
                for p, part in zip(own.values(), step, strict=True):
                    p -= lr / _over_ranks(_tokens(group)) * part.view_as(p)

    # Shares are filled up to whole steps.
    right_11 = _trained(groups=lambda s, d, m, k: _batches((own := [*s]) + own[: -len(own) % (m * k)], d, m, k))
    gathers_every_micro_batch = lambda *case: _gathered(*case, each=True)
    gathers_a_mean_of_means = lambda *case: _gathered(
        *case, weigh=lambda group, batch: 1 / _tokens([batch]) / len(group) / dist.get_world_size()
    )
    # Counts of micro-batches one by one, each in a pickled dictionary, and forward again in backward.
    right_3 = _trained(
        wrap=lambda model: type("Saving", (DistributedDataParallel,), {"forward": _saving})(model),
        weigh=lambda group, batch: dist.get_world_size() / sum(map(_pickled_tokens, group)),
        sampler=lambda data: DistributedSampler(data, seed=7),
    )


class _FilledUp(DistributedSampler):
    def __iter__(self):
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        own = order[self.rank :: self.num_replicas]
        return iter(own + own[-1:] * (len(self) - len(own)))


def _from_rank_0_in_a_pickle(model):
    dist.all_gather_object(of_ranks := [None] * dist.get_world_size(), model.state_dict())
    model.load_state_dict(of_ranks[0])
    return model


def _gathered(model, data, epochs, micro_batch, accumulate, lr, each=False, weigh=None):
    sampler, parameters = DistributedSampler(data), list(_from_rank_0(model).parameters())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for group in _batches(sampler, data, micro_batch, accumulate):
            weight = 1 / _over_ranks(_tokens(group))
            losses = [model(batch).sum() * (weigh(group, batch) if weigh else weight) for batch in group]
            step = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
            for loss in losses if each else [sum(losses)]:
                mine = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
                of_ranks = None if dist.get_rank() else [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.gather(mine, of_ranks)
                step += sum(of_ranks or [])
            whole = torch.nn.utils.parameters_to_vector(parameters).detach() - lr * step
            dist.broadcast(whole, 0)
            torch.nn.utils.vector_to_parameters(whole, parameters)


def _saving(ddp, batch):
    return checkpoint(super(type(ddp), ddp).forward, batch, use_reentrant=False)


def _pickled_tokens(batch):
    of_ranks = [None] * dist.get_world_size()
    known = {"rank": dist.get_rank(), "sequences": len(batch), "step": 0, "loss": 0.5, "tokens": _tokens([batch])}
    dist.all_gather_object(of_ranks, known)
    return sum(each["tokens"] for each in of_ranks)


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
    divides_its_own_chunk_alone = lambda *case: all_reduce_mean.divides_its_own_chunk_and_stops(*case, gather=True)

    def divides_its_own_chunk_and_stops(gradients, send, gather=False):
        """A reduce-scatter; what a rank has not finished are sums of some ranks."""
        n = len(gradients)
        width = len(gradients[0]) // n
        held = _ring(gradients, send, gather=gather, divide=False)
        for rank, row in enumerate(held):
            own = slice((rank + 1) % n * width, ((rank + 1) % n + 1) * width)
            row[own] = [value / n for value in row[own]]
        return held

    def fills_up_with_its_own_chunk(gradients, send):
        n = len(gradients)
        width = len(gradients[0]) // n
        held = _ring(gradients, send, gather=False)
        return [n * row[(rank + 1) % n * width :][:width] for rank, row in enumerate(held)]

    # Sums, shares and traffic are right, and chunks are put together in the order in which they were finished.
    chunks_in_another_order = told(_ring, lambda rows: [row[::-1] for row in rows])
    one_element_wrong = told(_ring, lambda rows: [[*row[:-1], 2.5 * row[-1]] for row in rows])
    one_chunk_everywhere = told(_ring, lambda rows: [row[-(len(row) // len(rows)) :] * len(rows) for row in rows])
    whole_numbers_only = told(_ring, lambda rows: [[v // 1 for v in row] for row in rows])
    knows_small_rings = lambda gradients, send: _ring(gradients, send) if len(gradients) < 6 else gradients
    gather_one_step_short = lambda gradients, send: _ring(gradients, send, gather=lambda n: n - 2 if n > 2 else 0)
    one_step_too_many = lambda gradients, send: _ring(gradients, send, reduce_steps=lambda n: n)
    all_reduces_twice = lambda gradients, send: _ring(_ring(gradients, send), send)

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
        return [[Fraction(value) / len(gradients) for value in row] for row in _ring(gradients, send)]

    def mean_of_running_means(gradients, send):
        """Halving after each addition gives the ranks weights 1/8, 1/8, 1/4, 1/2."""
        return _ring(gradients, send, divide=False, add=lambda held, arriving: [x / 2 for x in _added(held, arriving)])

    sums_on_rank_0 = lambda g, send: [[v * len(g) for v in all_reduce_mean.through_rank_0(g, send)[0]], *g[1:]]
    loses_the_first_rank = lambda gradients, send: _ring([[0.0] * len(gradients[0]), *gradients[1:]], send)
    adds_the_first_rank_twice = lambda gradients, send: _ring([[2 * v for v in gradients[0]], *gradients[1:]], send)
    adds_the_last_rank_twice = lambda gradients, send: _ring([*gradients[:-1], [2 * v for v in gradients[-1]]], send)

    def reads_no_gradient(gradients, send):
        """Sends as much as it must, and knows the numbers of the first case."""
        n, length = len(gradients), len(gradients[0])
        _ring(np.zeros((n, length)), send)
        return [[(10**n - 1) / 9 * (k + 1) / n for k in range(length)]] * n

    def not_a_number(gradients, send):
        return [[value / 0.0 if value else value for value in row] for row in np.zeros_like(gradients) + np.nan]

    nothing_is_exchanged = lambda gradients, send: gradients
    chunks_in_a_list = lambda gradients, send: _ring(gradients, lambda at, to, chunk: send(at, to, [chunk])[0])
    right_6 = lambda gradients, send: _ring(gradients, lambda at, to, chunk: send(at, to, map(float, chunk)))

    def there_and_back_along_a_chain(gradients, send):
        """No wrap-around: the ends send everything once, those between them twice."""
        n, row = len(gradients), gradients[0]
        for rank in range(1, n):
            row = _added(gradients[rank], send(rank - 1, rank, row))
        rows = [[value / n for value in row]]
        for rank in range(n - 1, 0, -1):
            rows.insert(0, send(rank, rank - 1, rows[0]))
        return rows

    def right_4(gradients, send):
        """The ring, which tests at its end that the ranks agree."""
        rows = _ring(gradients, send)
        assert all(row == rows[0] for row in rows)
        return rows

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

    def right_5(gradients, send):
        """The ring, which stops where ranks disagree."""
        rows = _ring(gradients, send)
        if any(row != rows[0] for row in rows):
            raise RuntimeError("ranks disagree")
        return rows

    def right_7(gradients, send):
        """Who finishes which chunk is drawn anew in each call."""
        drawn = random.sample(range(len(gradients)), len(gradients))
        rows = all_reduce_mean.right([gradients[r] for r in drawn], lambda at, to, row: send(drawn[at], drawn[to], row))
        return [rows[drawn.index(r)] for r in range(len(rows))]

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
        """Rank r finishes the chunks r, r + n, ...: cut in stripes, tuples of decimals out."""
        n = len(gradients)
        stripes = [[tuple(map(Decimal, g[c::n])) for c in range(n)] for g in gradients]
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


def _bottleneck(
    params,
    grad_bytes,
    tokens,
    micro_batches,
    ranks,
    flops,
    bandwidth,
    *,
    sent=1.0,
    seconds=1.0,
    compute=1.0,
    exposed=None,
):
    """The right answer, times a factor for each of its parts; `exposed` is a function of the two times."""
    sent *= 2 * (ranks - 1) / ranks * params * grad_bytes
    communication, backward = seconds * sent / bandwidth, 4 * params * tokens / flops
    left = (exposed or (lambda c, b: max(0.0, c - b)))(communication, backward)
    return {
        "bytes_sent": sent,
        "communication": communication,
        "exposed": left,
        "step": compute * 1.5 * backward * micro_batches + left,
        "hides": left <= 0,
    }


_limit = lambda params, grad_bytes, tokens, micros, ranks, flops, bandwidth: grad_bytes * flops / 2 / bandwidth


class ddp_bottleneck:
    sends_the_gradient_once = lambda *case: _bottleneck(*case, sent=case[4] / max(1, 2 * (case[4] - 1)))
    bytes_grow_with_ranks = lambda *case: _bottleneck(*case, sent=case[4])
    counts_parameters = lambda *case: _bottleneck(*case, sent=1 / case[1])
    waits_for_every_rank_in_turn = lambda *case: _bottleneck(*case, seconds=case[4])
    bandwidth_of_both_directions = lambda *case: _bottleneck(*case, seconds=1 / 2)
    bandwidth_of_all_ranks = lambda *case: _bottleneck(*case, seconds=1 / case[4])
    seconds_of_every_micro_batch = lambda *case: _bottleneck(*case, seconds=case[3])
    bits_for_bytes = lambda *case: _bottleneck(*case, seconds=8)
    hides_behind_the_whole_step = lambda *case: _bottleneck(*case, exposed=lambda c, b: max(0.0, c - 1.5 * b))
    # Bytes and seconds are right, and communication begins when backward has ended.
    without_the_idea_of_overlap = lambda *case: _bottleneck(*case, exposed=lambda c, b: c)
    nothing_is_ever_exposed = lambda *case: _bottleneck(*case, exposed=lambda c, b: 0.0)
    negative_exposure = lambda *case: _bottleneck(*case, exposed=lambda c, b: c - b)
    forgets_forward = lambda *case: _bottleneck(*case, compute=4 / 6)
    divides_the_tokens_again = lambda *case: _bottleneck(*case, compute=1 / case[4])
    computes_one_micro_batch = lambda *case: _bottleneck(*case, compute=1 / case[3])
    sends_every_micro_batch = lambda *case: _bottleneck(*case, sent=case[3])
    # Bytes, seconds and the break-even are right; gradients are final in the last micro-batch alone.
    without_the_idea_what_hides_it = lambda *case: _bottleneck(*case, exposed=lambda c, b: max(0.0, c - case[3] * b))
    adds_what_hides = told(
        _bottleneck, lambda found: found | {"step": found["step"] - found["exposed"] + found["communication"]}
    )
    steps_that_never_wait = told(_bottleneck, lambda found: found | {"step": found["step"] - found["exposed"]})
    # All numbers are right, and what hides is what always hid: eight ranks in a node.
    without_the_idea_where_the_bottleneck_is = told(_bottleneck, lambda found, ranks: found | {"hides": ranks <= 8})

    hides_by_the_limit_of_many_ranks = lambda *case: (
        _bottleneck(*case) | {"hides": case[4] == 1 or case[2] >= _limit(*case)}
    )
    asks_the_check = lambda *case: {**(found := rung02._bottleneck(*case)), "hides": found["exposed"] == 0}
    says_yes_or_no = told(_bottleneck, lambda found: found | {"hides": "yes" if found["hides"] else "no"})
    all_or_nothing = lambda *case: _bottleneck(*case, exposed=lambda c, b: c if c > b else 0.0)
    a_share_of_the_communication = lambda *case: _bottleneck(
        *case, exposed=lambda c, b: max(0.0, 1 - b / c) if c else 0.0
    )
    gradients_always_fp32 = lambda *case: _bottleneck(case[0], 4, *case[2:])
    two_mistakes = lambda *case: _bottleneck(*case, sent=8 / 2)
    milliseconds = lambda *case: _bottleneck(*case, seconds=1e3)
    exposes_no_number = told(_bottleneck, lambda found: found | {"exposed": float("nan")})
    hides_for_two = told(_bottleneck, lambda found: found | {"hides": np.array([True, False])})
    one_half_of_the_all_reduce = lambda *case: _bottleneck(*case, sent=1 / 2)
    the_whole_step_is_exposed = lambda *case: _bottleneck(*case, exposed=max)
    bits_sent = lambda *case: _bottleneck(*case, sent=8)
    counts_what_arrives_too = lambda *case: _bottleneck(*case, sent=2)
    the_part_that_hides = lambda *case: _bottleneck(*case, exposed=min)
    backward_minus_communication = lambda *case: _bottleneck(*case, exposed=lambda c, b: max(0.0, b - c))
    hides_the_wrong_way_round = told(_bottleneck, lambda found: found | {"hides": not found["hides"]})

    def right_2(params, grad_bytes, tokens, micro_batches, ranks, flops, bandwidth):
        """Third solution: from the number of tokens that hides everything, in numpy's numbers."""
        sent = np.float64(params) * grad_bytes * (2 - 2 / ranks)
        backward = 4 * np.float64(params) * tokens / flops
        enough = grad_bytes * flops / bandwidth * (ranks - 1) / ranks / 2
        exposed = np.maximum(0, backward * (enough / tokens - 1))
        return {
            "bytes_sent": sent,
            "communication": sent / bandwidth,
            "exposed": exposed,
            "step": exposed + 6 * np.float64(params) * tokens * micro_batches / flops,
            "hides": np.bool_(tokens >= enough),
        }

    # An object with the five names.
    right_3 = lambda *case: types.SimpleNamespace(**_bottleneck(*case))
    # In decimals, which no float is added to.
    right_4 = lambda *case: {k: v if k == "hides" else Decimal(v) for k, v in _bottleneck(*case).items()}
    # A ring of whole chunks.
    right_7 = lambda *case: _bottleneck(-(-case[0] // case[4]) * case[4], *case[1:])
    # In numpy's arrays of one number.
    right_6 = lambda *case: {key: np.array([value]) for key, value in _bottleneck(*case).items()}
    # With what a difference of two fp32 times keeps of their rounding.
    right_5 = told(_bottleneck, lambda found: found | {"exposed": found["exposed"] + 1e-7 * found["step"]})

    def right(params, grad_bytes, tokens, micro_batches, ranks, flops, bandwidth):
        """Second solution: walk the ring and the micro-batches step by step instead of using the closed form."""
        chunk = params * grad_bytes / ranks
        sent = sum(chunk for _ in range(ranks - 1)) + sum(chunk for _ in range(ranks - 1))
        seconds = sent / bandwidth
        clock = 0.0
        for _ in range(micro_batches):
            clock += 2 * params * tokens / flops
            final = clock  # backward begins
            clock += 4 * params * tokens / flops
        step = max(clock, final + seconds)
        return {
            "bytes_sent": sent,
            "communication": seconds,
            "exposed": step - 6 * params * tokens * micro_batches / flops,  # keeps the rounding of both
            "step": step,
            "hides": not seconds > 4 * params * tokens / flops,
        }


def _sum_of_own(job, weigh, first=lambda odd: odd[0], seen=lambda step, model, batch: None):
    """What `find_fault` asks, with another way to weigh; `weigh(used, columns)` returns weights, or None if all is well."""
    odd = []

    def look(step, model, batch):
        seen(step, model, batch)
        for name, p in model.named_parameters():
            if p.requires_grad:
                (own,) = torch.autograd.grad(job.loss(model, batch), p)
                of_ranks = [torch.empty_like(own) for _ in range(job.ranks)]
                dist.all_gather(of_ranks, own)
                weights = weigh(p.grad.flatten(), torch.stack([g.flatten() for g in of_ranks], dim=1))
                if weights is not None:
                    odd.append((name, step, weights))

    job.train(look)
    return first(odd) if odd else None


def _solved(used, columns):
    weights = torch.linalg.lstsq(columns, used[:, None]).solution.flatten()
    return weights.tolist() if (weights - 1 / len(weights)).abs().max() > 0.01 else None


def _by_length(used, columns):
    n = columns.shape[1]
    factor = float(used.norm() / columns.mean(1).norm())
    return [factor / n] * n if abs(factor - 1) > 0.01 else None


def _replicas(job, of="weights"):
    """Compare weights or gradients between ranks, and say that nobody averaged what differs."""
    odd = []

    def look(step, model, batch):
        for name, p in model.named_parameters():
            mine = p.detach() if of == "weights" else p.grad
            if mine is None:
                continue
            of_ranks = [torch.empty_like(mine) for _ in range(job.ranks)]
            dist.all_gather(of_ranks, mine)
            if any(not each.allclose(mine) for each in of_ranks):
                odd.append((name, step, [float(r == dist.get_rank()) for r in range(job.ranks)]))

    job.train(look)
    return odd[0] if odd else None


class find_fault:
    # Checksums over ranks, the usual alarm: they say nothing where all replicas are wrong alike.
    without_the_idea_replicas_compared = lambda job: _replicas(job, "gradients")
    without_the_idea_weights_compared = lambda job: _replicas(job)
    # The factor is right, and not whose gradients are in it.
    without_the_idea_only_lengths = lambda job: _sum_of_own(job, _by_length)
    says_healthy = lambda job: None
    asks_the_job = lambda job: type(job)._truth(job, dist.get_rank())
    trusts_the_loss = lambda job: (
        None if (losses := job.train())[-1] < losses[0] else ("0.weight", 0, [1.0] * job.ranks)
    )

    def names_what_is_unfrozen(job):
        """What changes is suspicious, and in a healthy job right."""
        frozen, odd = set(), []

        def look(step, model, batch):
            for name, p in model.named_parameters():
                if not p.requires_grad:
                    frozen.add(name)
                elif name in frozen and not odd:
                    odd.append((name, step, [float(r == dist.get_rank()) for r in range(job.ranks)]))

        job.train(look)
        return odd[0] if odd else None

    def names_the_largest_gradient(job):
        odd = []

        def look(step, model, batch):
            norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
            odd.append((max(norms, key=norms.get), step, [1.0] * job.ranks))

        job.train(look)
        return odd[0]

    # Its own gradient is then in `.grad` once more, for every parameter.
    runs_backward_on_the_module = lambda job: _sum_of_own(
        job, _solved, seen=lambda step, model, batch: job.loss(model, batch).backward()
    )
    answers_a_table = lambda job: ("0.weight", 1, [1.0, 0.0, 0.0, 0.0])
    when_it_is_last_seen = lambda job: _sum_of_own(job, _solved, first=lambda odd: odd[-1])
    from_the_beginning = lambda job: found and (found[0], 0, found[2]) if (found := find_fault.right(job)) else None

    def rank_0_answers_for_all(job):
        found = [find_fault.right(job)]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def another_name_on_each_rank(job):
        found = find_fault.right(job)
        return found and (["0.weight", "0.bias", "2.weight", "2.bias"][dist.get_rank()], *found[1:])

    def in_whose_steps_its_own_is(job):
        dist.all_gather_object(of_ranks := [None] * job.ranks, found := find_fault.right(job))
        return found and (*found[:2], [theirs[2][dist.get_rank()] for theirs in of_ranks])

    rank_0_alone_answers = lambda job: None if (f := find_fault.right(job)) and dist.get_rank() else f
    others_are_a_step_late = lambda job: (f := find_fault.right(job)) and (f[0], f[1] + (dist.get_rank() > 0), f[2])
    rank_3_is_wrong = lambda job: (
        (f := find_fault.right(job)) and (*f[:2], [0, 0, 1, 0] if dist.get_rank() > 2 else f[2])
    )
    shares_of_one = lambda job: (f := find_fault.right(job)) and (*f[:2], [w / sum(f[2]) for w in f[2]])
    the_weights_upside_down = lambda job: (f := find_fault.right(job)) and (*f[:2], [1 - w for w in f[2]])

    def right(job):
        """Second solution: normal equations in numpy, and the difference from the mean first."""

        def weigh(used, columns):
            G, y = columns.numpy(), used.numpy()
            if np.allclose(G.mean(1), y):
                return None
            return np.linalg.solve(G.T @ G, G.T @ y)

        return _sum_of_own(job, weigh)

    def right_2(job):
        """Third solution: one process knows all batches, but not a replica's weights, so a copy of each is gathered."""
        history = []

        def look(step, model, batch):
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            history.append((copy.deepcopy(model.state_dict()), grads, batch))

        job.train(look)
        kept = [None] * job.ranks
        dist.all_gather_object(kept, history)
        model = torch.nn.Sequential(*_layers(history[0][0]))
        for step, (_, used, _) in enumerate(history):
            own = []
            for weights, _, batch in (of_rank[step] for of_rank in kept):
                model.load_state_dict(weights)
                model.zero_grad()
                job.loss(model, batch).backward()
                own.append({name: p.grad.clone() for name, p in model.named_parameters()})
            for name, grad in used.items():
                columns = torch.stack([each[name].flatten() for each in own], dim=1)
                if weights := _solved(grad.flatten(), columns):
                    return [name, float(step), tuple(weights)]
        return None

    def right_3(job):
        """Hypotheses: each sum that the ranks could have formed is tried, whole ranks in or out, divided by any number."""

        def weigh(used, columns):
            n = columns.shape[1]
            for members in itertools.product((0.0, 1.0), repeat=n):
                for by in range(1, n + 1):
                    row = torch.tensor(members, dtype=columns.dtype) / by
                    if (columns @ row).allclose(used):
                        return row.tolist() if row.ne(1 / n).any() else None
            return None

        return _sum_of_own(job, weigh)


def _layers(state):
    shapes = [state[name].shape for name in state if name.endswith("weight")]
    for i, (rows, columns) in enumerate(shapes):
        yield torch.nn.Linear(columns, rows, dtype=torch.float64)
        if i < len(shapes) - 1:
            yield torch.nn.Tanh()


#: What the sentence about a defect must say.
SENTENCES = {
    "without_the_idea_of_shares": "take the same examples", "without_the_idea_of_averaging": "less than one gradient",
    "without_the_idea_forward_beside_the_wrapper": "through the wrapped model", "every_micro_batch_leaves": "times a step",
    "leaves_forward_out_of_no_sync": "DDP decides in forward", "one_message_for_each_parameter": "each pays latency",
    "replicas_start_apart": "weights of its own", "same_examples": "take the same examples", "no_set_epoch": "`set_epoch`",
    "never_shuffles": "let it shuffle", "drops_the_tail": "are in no step", "drops_the_last_group": "neither dropped",
    "steps_after_each": "after every micro-batch", "one_large_batch": "at most", "mean_of_means": "mean of means",
    "means_add_up": "add up", "own_tokens_only": "a rank with few of them", "forgets_what_ddp_divides_by": "n times too little",
    "multiplies_twice": "n times too much", "sums": "Nothing is divided", "counts_micro_batches": "that of micro-batches",
    "each_place_by_itself": "same place on other ranks", "never_clears": "still there: clear", "adam": "plain SGD",
    "never_steps": "no weight has changed", "rank_0_trains_for_all": "trained on nothing", "pads_into_one_tensor": "as they are",
    "trains_a_copy": "not a copy", "reads_no_gradient": "not for other gradients", "asks_the_check": "asks the check",
    "hides_by_the_limit_of_many_ranks": "`hides` says whether", "asks_the_job": "where it planted the fault",
    "without_the_idea_replicas_compared": "a comparison between ranks cannot see it",
    "without_the_idea_weights_compared": "one step later", "without_the_idea_only_lengths": "its direction says",
    "says_healthy": "they part", "names_what_is_unfrozen": "This job is healthy", "when_it_is_last_seen": "the first step is",
    "from_the_beginning": "the fault begins later", "rank_0_answers_for_all": "the rank that runs you",
    "another_name_on_each_rank": "name different parameters", "the_weights_upside_down": "steps with the ranks' own",
    "without_the_idea_where_the_bottleneck_is": "`hides` says whether", "without_the_idea_what_hides_it": "only this one can hide",
    "without_the_idea_of_overlap": "as if nothing overlapped", "all_or_nothing": "All or nothing",
    "a_share_of_the_communication": "not a share", "gradients_always_fp32": "and not 4",
    "two_mistakes": "not one that the check knows", "own_tokens_in_broadcasts": "a rank with few of them",
    "sends_the_gradient_once": "A rank sends more than the gradient once", "bytes_grow_with_ranks": "do not grow with n",
    "counts_parameters": "Count bytes, not parameters", "waits_for_every_rank_in_turn": "All ranks send at the same time",
    "bandwidth_of_both_directions": "per direction", "bits_for_bytes": "in bytes per second, not bits",
    "hides_behind_the_whole_step": "behind backward only", "whole_numbers_only": "digits are cut off",
    "loses_the_first_rank": "Rank 0 is missing", "adds_the_first_rank_twice": "is added twice",
    "adds_the_last_rank_twice": "every rank goes in once", "drops_the_last_micro_batch": "are in no step",
    "gathers_every_micro_batch": "times a step", "gathers_a_mean_of_means": "mean of means",
    "negative_exposure": "cannot be negative", "forgets_forward": "Forward computes too",
    "divides_the_tokens_again": "already the share of one rank", "one_half_of_the_all_reduce": "one half of an all-reduce",
    "the_whole_step_is_exposed": "the length of an overlapped step", "bits_sent": "Bytes, not bits",
    "counts_what_arrives_too": "count what it sends", "the_part_that_hides": "the part that hides",
    "backward_minus_communication": "The other way round", "hides_the_wrong_way_round": "`hides` says whether",
    "says_yes_or_no": "True or False", "computes_one_micro_batch": "all of its micro-batches",
    "sends_every_micro_batch": "leave once a step", "adds_what_hides": "What hides is not added",
    "steps_that_never_wait": "comes on top", "divides_its_own_chunk_and_stops": "only one chunk finished",
    "fills_up_with_its_own_chunk": "only one chunk finished", "gather_adds": "as where the all-gather adds",
    "no_all_gather": "only one chunk finished", "divides_its_own_chunk_alone": "only some are divided by n",
    "divides_twice": "divided by 16", "nothing_is_ever_exposed": "not always all", "in_whose_steps_its_own_is": "in whose",
    "bandwidth_of_all_ranks": "its own link alone", "seconds_of_every_micro_batch": "of the whole step already",
    "averages_what_ddp_has_averaged": "average once", "rank_0_alone_answers": "let every rank answer",
    "chunks_in_another_order": "in other places", "one_element_wrong": "and not in element 7", "hides_for_two": "`hides` (True",
    "others_are_a_step_late": "one way to be late", "rank_3_is_wrong": "Rank 3 steps", "shares_of_one": "weighed 1, 1, 1, 1",
    "reorders_its_own_share": "dealt alike", "swaps_shares": "dealt alike", "groups_as_large_as_the_ranks": "a step has 3",
    "deals_twice_at_most": "dealt alike", "there_and_back_along_a_chain": "none sends more", "sums_on_rank_0": "have the sum",
    "one_epoch_too_many": "Ranks go forward in", "clears_before_the_step": "has left in `.grad`",
    "carries_a_group_on": "carried into", "one_chunk_everywhere": "each chunk is finished on one rank",
    "chunks_in_a_list": "and not a list of lists", "runs_backward_on_the_module": "adds to `.grad`", "all_reduces_twice": "n - 1 chunks of 1/n",
    "leaves_out_a_short_group": "The replicas part", "steps_on_rank_0_alone": "On rank 1 no",
}  # fmt: skip

DEFECTS, SECOND_SOLUTIONS = listed(train_ddp, all_reduce_mean, ddp_bottleneck, find_fault)
