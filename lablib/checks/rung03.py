"""The checks of rung 03: column- and row-parallel products, heads on ranks, cross-entropy over split logits.

All but the check of heads run the answer on two and on three real ranks, and look at what autograd and the wire saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lablib.checks.report import Wrong, check
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks

__all__ = ["column_parallel", "cross_entropy", "row_parallel", "split_qkv"]

DEGREES = (2, 3)


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-9, rtol=1e-9)


def _on_ranks(work: Callable[..., Any], tp: int, *args: Any) -> list[Any]:
    """Run on ranks; an untouched stub is no error of a rank."""
    results = run_ranks(_attempt, tp, work, args, timeout=30)
    if any(result is None for result in results):
        raise NotImplementedError
    return results


def _attempt(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return work(*args)
    except NotImplementedError:
        return None


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]


# --- one product, split -------------------------------------------------------------------------------------


def _linear_on_a_rank(answer: Callable, seed: int, split_input: bool) -> dict[str, Any]:
    """Run forward and backward and note results, gradients and collectives."""
    group = dist.group.WORLD
    x, weight, bias, grad = _problem(seed, group.size())
    if split_input:
        x = x.chunk(group.size(), dim=-1)[group.rank()].clone()
    x, weight, bias = (tensor.requires_grad_() for tensor in (x, weight, bias))
    with record_comms() as forward:
        y = answer(x, weight, bias, group)
    if not isinstance(y, Tensor) or not y.requires_grad:
        return {"y": None}
    wanted = grad if y.shape == grad.shape else grad.chunk(group.size(), dim=-1)[group.rank()]
    if y.shape != wanted.shape:
        return {"y": y.detach()}
    with record_comms() as backward:
        y.backward(wanted)
    calls = (dict(forward.calls), dict(backward.calls))
    gradients = {"x": x.grad, "weight": weight.grad, "bias": bias.grad}
    return {"y": y.detach(), "calls": calls, **gradients}


def _problem(seed: int, tp: int) -> list[Tensor]:
    inputs, outputs = 4 * tp, 6 * tp
    return _draw(seed, (3, 5, inputs), (outputs, inputs), (outputs,), (3, 5, outputs))


def _truth(seed: int, tp: int) -> dict[str, Tensor]:
    x, weight, bias, grad = _problem(seed, tp)
    x, weight, bias = (tensor.requires_grad_() for tensor in (x, weight, bias))
    y = F.linear(x, weight, bias)
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, "bias": bias.grad, "b": bias.detach()}


def _slice(full: Tensor, dim: int, rank: int, tp: int) -> Tensor:
    return full.chunk(tp, dim=dim)[rank]


@check
def column_parallel(answer: Callable[..., Tensor]) -> str:
    """Judge `column_parallel(x, weight, bias, group)`: forward, three gradients and the collectives."""
    for tp in DEGREES:
        truth, results = _truth(tp, tp), _on_ranks(_linear_on_a_rank, tp, answer, tp, False)
        for rank, got in enumerate(results):  # forward of all ranks before any backward
            y = got["y"]
            mine = _slice(truth["y"], -1, rank, tp)
            if y is None:
                raise Wrong("The result has no gradient: return a tensor that autograd can follow.")
            if _same(y, truth["y"]):
                raise Wrong("Every rank returns all outputs: leave them where they are, the rows want a part.")
            if y.shape == truth["y"].shape:
                raise Wrong("Each rank returns a part of a sum: that splits the input. Split the output.")
            if y.shape != mine.shape:
                raise Wrong(f"Rank {rank} returns shape {tuple(y.shape)}; it owns {tuple(mine.shape)}.")
            if not _same(y, mine):
                raise Wrong(_wrong_columns(y, mine, _slice(truth["b"], 0, rank, tp)))
        for rank, got in enumerate(results):
            if not _same(got["x"], truth["x"]):
                scale = _same(got["x"], tp * truth["x"])
                raise Wrong(
                    f"The gradient of x is {tp} times too long: it was summed twice."
                    if scale
                    else "Forward is right, but the gradient of x is this rank's part only: x went to all ranks, so "
                    "its gradient is a sum over them."
                )
            _judge_local(got, truth, "weight", 0, rank, tp)
            _judge_local(got, truth, "bias", 0, rank, tp)
            if got["calls"] != ({}, {"all_reduce": 1}):
                raise Wrong("Right, but not for the price: nothing in forward and one all-reduce in backward will do.")
    return "Nothing forward, one all-reduce backward."


def _wrong_columns(y: Tensor, mine: Tensor, bias: Tensor) -> str:
    difference = y - mine
    if torch.allclose(difference, difference[:1, :1].expand_as(difference)):
        return "The product is right and the bias is not: each rank adds its own part of the bias, whole."
    return (
        "These are not this rank's outputs of the whole product: x enters as it is, and rank r owns the r-th block of "
        "neighbouring outputs."
    )


def _judge_local(got: dict, truth: dict, name: str, dim: int, rank: int, tp: int) -> None:
    """The rank's slice has the full gradient of the slice, and the rest has none."""
    grad = torch.zeros_like(truth[name]) if got[name] is None else got[name]
    mine = _slice(grad, dim, rank, tp)
    rest = grad.abs().sum() - mine.abs().sum()
    if not _same(mine, _slice(truth[name], dim, rank, tp)) or rest > 1e-9:
        raise Wrong(f"The gradient of the {name} is wrong: it should be that of this rank's slice, and no other.")


@check
def row_parallel(answer: Callable[..., Tensor]) -> str:
    """Judge `row_parallel(x_part, weight, bias, group)`: forward, three gradients and the collectives."""
    for tp in DEGREES:
        truth = _truth(tp, tp)
        for rank, got in enumerate(_on_ranks(_linear_on_a_rank, tp, answer, tp, True)):
            y, full, bias = got["y"], truth["y"], truth["b"]
            if y is None:
                raise Wrong("The result has no gradient: return a tensor that autograd can follow.")
            if y.shape != full.shape:
                raise Wrong(f"Rank {rank} returns shape {tuple(y.shape)}; every rank has all outputs here.")
            if _same(y, full + (tp - 1) * bias):
                raise Wrong(f"The bias counts {tp} times: it belongs to the sum, not to each part.")
            if _same(y * tp, full) or _same((y - bias) * tp, full - bias):
                raise Wrong("The parts are averaged; they are parts of one sum.")
            if _same(y, full - bias):
                raise Wrong("The bias is missing.")
            if not got["calls"][0]:
                raise Wrong("Each rank returns its own part: the parts must be summed over the ranks.")
            if not _same(y, full):
                raise Wrong("The sum is wrong: rank r multiplies its inputs by the r-th block of inputs of the weight.")
            part = _slice(truth["x"], -1, rank, tp)
            if _same(got["x"], tp * part):
                raise Wrong(
                    f"Forward is right, but the gradient of x is {tp} times too long: backward of the sum sums again, "
                    f"though every rank already has the whole gradient."
                )
            if not _same(got["x"], part):
                raise Wrong("The gradient of x is wrong: backward of a sum hands the gradient to each part as it is.")
            _judge_local(got, truth, "weight", 1, rank, tp)
            if not _same(got["bias"], truth["bias"]):
                raise Wrong(
                    "The ranks do not find the same gradient of the bias: it is replicated, and its copies would drift."
                )
            if got["calls"] != ({"all_reduce": 1}, {}):
                raise Wrong("Right, but not for the price: one all-reduce in forward and nothing in backward.")
    return "One all-reduce forward, nothing backward."


# --- heads --------------------------------------------------------------------------------------------------


@check
def split_qkv(answer: Callable[[int, int, int, int], Sequence[tuple]], seed: int = 3) -> str:
    """Judge `split_qkv(num_heads, num_kv_heads, head_dim, tp)` by computing attention from each rank's rows."""
    dice = random.Random(seed)
    cases = [(4, 4, 8, 2), (8, 2, 4, 2), (8, 2, 4, 4), (64, 8, 2, 16), (25, 25, 2, 5), (6, 6, 4, 6), (8, 1, 4, 4)]
    while len(cases) < 30:
        kv, group, width = dice.randint(1, 6), dice.randint(1, 6), dice.choice((2, 4))
        heads = kv * group
        usable = [t for t in range(1, heads + 1) if heads % t == 0 and (kv % t == 0 or t % kv == 0)]
        cases.append((heads, kv, width, dice.choice(usable)))
    for case in cases:
        try:
            ranks = answer(*case)
        except ValueError:
            raise Wrong(f"{_words(case)} is possible{_beyond(case)}, and you refuse it.") from None
        _judge_heads([(list(q), list(kv)) for q, kv in ranks], *case)
    for case in ((25, 25, 64, 2), (28, 4, 128, 8), (6, 6, 4, 4)):
        try:
            answer(*case)
        except ValueError:
            continue
        raise Wrong(f"{_words(case)} would cut through a head: raise a ValueError.")
    return f"{len(cases)} layouts computed rank by rank: no head needed another rank."


def _words(case: tuple[int, ...]) -> str:
    return f"num_heads={case[0]}, num_kv_heads={case[1]}, head_dim={case[2]}, tp={case[3]}"


def _beyond(case: tuple[int, ...]) -> str:
    return " (ranks may hold copies of a key head)" if case[3] > case[1] else ""


def _judge_heads(ranks: list[tuple[list[int], list[int]]], heads: int, kv: int, width: int, tp: int) -> None:
    where = _words((heads, kv, width, tp))
    if len(ranks) != tp:
        raise Wrong(f"{where}: return one pair of ranges for each of the {tp} ranks.")
    held = []
    for rank, rows in enumerate(ranks):
        cut = [[row // width for row in part[::width]] for part in rows]
        for name, part, found, most in zip(("query", "key"), rows, cut, (heads, kv), strict=True):
            if part != [head * width + i for head in found for i in range(width)]:
                raise Wrong(f"{where}: rank {rank} gets a piece of a {name} head. Cut at multiples of head_dim.")
            if any(not 0 <= head < most for head in found):
                raise Wrong(f"{where}: rank {rank} gets {name} heads that do not exist.")
        held.append(cut)
    if len({len(queries) for queries, _ in held}) > 1:
        raise Wrong(f"{where}: the ranks get unequal numbers of query heads, and all wait for the largest.")
    if sorted(head for queries, _ in held for head in queries) != list(range(heads)):
        raise Wrong(f"{where}: each query head should be on exactly one rank.")
    for rank, (queries, keys) in enumerate(held):
        needed = {head // (heads // kv) for head in queries}
        if needed - set(keys):
            raise Wrong(f"{where}: rank {rank} lacks the key head of one of its queries and would have to ask for it.")
        least = max(1, kv // tp)
        if len(keys) > least:
            raise Wrong(f"{where}: rank {rank} holds {len(keys)} key heads; with neighbouring queries {least} will do.")
    dice = torch.Generator().manual_seed(heads)
    shapes = ((5, 6), (heads * width, 6), (kv * width, 6), (kv * width, 6))
    x, wq, wk, wv = (torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes)
    full = _attend(x, wq, wk, wv, width)
    order = [head for queries, _ in held for head in queries]
    parts = torch.cat([_attend(x, wq[q], wk[k], wv[k], width) for q, k in ranks])
    if not torch.allclose(parts, full[order], atol=1e-9):
        raise Wrong(f"{where}: a rank's queries meet the wrong key heads: keep groups together and in order.")


def _attend(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, width: int) -> Tensor:
    q, k, v = ((x @ w.T).unflatten(-1, (-1, width)).transpose(0, 1) for w in (wq, wk, wv))
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / width**0.5, dim=-1) @ v


# --- cross-entropy ------------------------------------------------------------------------------------------

_TOKENS, _VOCAB = 7, 41


def _scores(tp: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, weight = _draw(tp, (_TOKENS, _VOCAB), (_TOKENS,))
    logits[1] += 2000  # without the shared maximum this overflows
    logits[2, : _VOCAB // tp] -= 2000  # and here a rank's own maximum is of no use to the others
    return logits, torch.arange(_TOKENS) * 6 % _VOCAB, weight


def _loss_on_a_rank(answer: Callable) -> dict[str, Any]:
    group = dist.group.WORLD
    tp, rank = group.size(), group.rank()
    logits, targets, weight = _scores(tp)
    first, stop = (_VOCAB * r // tp for r in (rank, rank + 1))
    mine = logits[:, first:stop].clone().requires_grad_()
    with record_comms() as log:
        loss = answer(mine, targets, first, group)
        if not isinstance(loss, Tensor) or loss.shape != (_TOKENS,) or not loss.requires_grad:
            return {"loss": None}
        loss.backward(weight)
    return {"loss": loss.detach(), "grad": mine.grad, "most": max((e.bytes for e in log.events), default=0)}


@check
def cross_entropy(answer: Callable[..., Tensor]) -> str:
    """Judge `cross_entropy(logits, targets, first, group)`: losses, gradients, and what crossed the wire."""
    for tp in DEGREES:
        logits, targets, weight = _scores(tp)
        logits.requires_grad_()
        truth = F.cross_entropy(logits, targets, reduction="none")
        truth.backward(weight)
        results = _on_ranks(_loss_on_a_rank, tp, answer)
        if any(got["loss"] is None for got in results):
            raise Wrong("Return one loss per token, with a gradient.")
        if any(got["most"] > 4 * _TOKENS * 8 for got in results):
            raise Wrong("The logits themselves cross the wire: reduce a few numbers per token, and nobody holds all.")
        if any(not got["loss"].isfinite().all() for got in results):
            raise Wrong("A loss is infinite: subtract the maximum over all ranks before the exponential.")
        if any(not _same(got["loss"], results[0]["loss"]) for got in results):
            raise Wrong("The ranks have different losses for one token: each piece is a reduction over all ranks.")
        if not _same(results[0]["loss"], truth.detach()):
            low = (results[0]["loss"] <= truth + 1e-9).all()
            raise Wrong(
                "The loss is too low: the sum of exponentials has only a part of the vocabulary in it."
                if low
                else "The loss is wrong: the sum needs one maximum for all ranks, and the target's logit comes from "
                "the one rank that owns it."
            )
        for rank, got in enumerate(results):
            mine = logits.grad[:, _VOCAB * rank // tp : _VOCAB * (rank + 1) // tp]
            if not _same(got["grad"], mine):
                raise Wrong(
                    "The losses are right and the gradients are not: every rank has the whole gradient of the loss, so "
                    "backward of each sum hands it on as it is, to softmax minus one at the target."
                )
    return "Three numbers per token, and no rank held the full logits."
