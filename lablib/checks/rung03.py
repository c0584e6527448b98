"""The checks of rung 03: f and g, half a layer, tokens gathered and scattered, heads, cross-entropy of split logits.

All but the check of heads run the answer on real ranks, in fp32, and look at what autograd and the wire saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lablib.calc.communication import ring_all_gather_bytes
from lablib.checks.judging import Wrong, by_name, check, numbers, on_ranks, own_line, recognize, refuse, some, whole
from lablib.launch.measure import record_comms
from lablib.launch.torch_private import TorchDispatchMode

__all__ = ["cross_entropy", "enter_columns", "gather_tokens", "leave_rows", "scatter_tokens", "split_mlp", "split_qkv"]


def _same(a: Tensor | None, b: Tensor) -> bool:
    """fp32 sums of a hundred terms of size one are good to 1e-5; a slip changes them by tenths."""
    return a is not None and a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=1e-4, rtol=1e-4)


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) for shape in shapes]


def _of_all(seed: int, ranks: int, shape: tuple[int, ...]) -> list[Tensor]:
    return [_draw(seed + rank, shape)[0] for rank in range(ranks)]


def _pay(results: Sequence[dict], forward: float, backward: float) -> None:
    """Judge bytes and not calls: a reduce-scatter and an all-gather are as good as an all-reduce."""
    for way, (allowed, what) in enumerate(((forward, "in forward"), (backward, "in backward"))):
        most = max(got["sent"][way] for got in results)
        told = f"Right, but not for the price: a rank sends {most:,.0f} bytes {what}, and {allowed:,.0f} will do"
        refuse("", (told, most > allowed * 1.001))


# --- one function around a product --------------------------------------------------------------------------

_B, _S, _H = 2, 6, 4


def _in_group(work: Callable, *args: Any) -> Any:
    """Work in one of two groups, as beside another replica: who counts or reduces over the whole job is found out."""
    half = dist.get_world_size() // 2
    with record_comms() as log:
        found = work(dist.new_subgroups(half)[0], *args)
    everywhere = any(event.group_size > half and event.op not in ("send", "recv") for event in log.events)
    refuse(
        "",
        (
            "A collective runs over all ranks of the job, also those of other replicas: give it `group=group`",
            everywhere,
        ),
    )
    return found


def _through(group: Any, answer: Callable, shapes: tuple, same_input: bool, same_grad: bool, around: bool) -> dict:
    """Send a tensor through the answer, forward and backward; with `around` the input also passes beside it."""
    rank, (into, out) = group.rank(), shapes
    leaf = _draw(10 if same_input else 20 + rank, into)[0].requires_grad_()
    grad = _draw(30 if same_grad else 40 + rank, out)[0]
    x = leaf * 1.0  # not a leaf, as in a model
    found = _forward_and_backward(lambda: _your_own(answer(x, group)), grad, lambda y: y + x if around else y)
    return found | {"grad": leaf.grad, "in_place": not torch.equal(x, leaf)}


def _forward_and_backward(run: Callable[[], Any], grad: Tensor, total: Callable = lambda y: y) -> dict[str, Any]:
    """Return what a function gives, and how much and how often it sends; None for a result without a gradient."""
    with record_comms() as forward:
        y = run()
    if not isinstance(y, Tensor) or not y.requires_grad:
        return {"y": None}
    if y.shape != grad.shape:
        return {"y": y.detach()}
    value = y.detach().clone()
    end = total(y)
    with record_comms() as backward:
        end.backward(grad.to(y.dtype))
    sent, calls = zip(*((log.ring_bytes_sent(), len(log.events)) for log in (forward, backward)), strict=True)
    return {"y": value, "sent": sent, "calls": calls}


def _your_own(y: Any) -> Any:
    made_by = getattr(getattr(y, "grad_fn", None), "_forward_cls", None)
    if made_by is not None and made_by.__module__.startswith("lablib."):
        raise Wrong("This is the course's own function; write yours.")
    return y


def _passed_through(results: list[dict], shape: tuple[int, ...]) -> None:
    for rank, got in enumerate(results):
        if got["y"] is None:
            raise Wrong("The result has no gradient: return a tensor that autograd can follow.")
        if got["y"].shape != shape:
            raise Wrong(f"Rank {rank} returns shape {tuple(got['y'].shape)}; it should be {shape}.")


@check(
    idea="x is handed to every rank, and the derivative of handing one x to t ranks is the sum of t gradients.",
    section="f and g: a sum in backward, a sum in forward",
    line="Forward returns x as it is; backward returns a copy of the gradient, all-reduced over the group.",
)
def enter_columns(answer: Callable[..., Tensor]) -> str:
    """Judge `enter_columns(x, group)`, Megatron's f: nothing in forward, a sum in backward."""
    shape, tp = (_B, _S, _H), 3
    results = on_ranks(_in_group, 2 * tp, _through, answer, (shape, shape), True, False, True)[tp:]
    _passed_through(results, shape)
    x, total = _draw(10, shape)[0], sum(grads := _of_all(40, tp, shape))
    for rank, got in enumerate(results):
        entered = got["grad"] - grads[rank]  # what comes back through the answer, where x also passes beside it
        refuse(
            "",
            (f"Forward returns {tp} x: every rank has all of x, so do not sum it", _same(got["y"], tp * x)),
            ("Forward changes x: each rank's columns need x as it is", not _same(got["y"], x)),
            ("Forward is right, but backward sends nothing: the gradient of x is this rank's part only, and x went to all "
             "ranks, so its gradient is a sum over them", not got["calls"][1]),
            ("The gradient of the path around the layer is summed too: backward should copy what it is given before it "
             "all-reduces, and act on a new tensor, not on x itself", _same(got["grad"], 2 * total)),
            ("The gradient of x is the mean over the ranks: they are parts, so sum", _same(entered, total / tp)),
            ("The gradient of x is summed twice: one sum over the ranks, and no factor",
             any(_same(entered, k * total) for k in (tp, tp * tp)) or got["sent"][1] > 3.8 * _one_way(shape, tp)),
            ("The gradient of x is wrong: it is the sum over all ranks, on each of them", not _same(entered, total)),
        )  # fmt: skip
    _pay(results, 0, 2 * _one_way(shape, tp))
    return "Nothing forward, one sum backward."


def _one_way(shape: tuple[int, ...], tp: int) -> float:
    return ring_all_gather_bytes(4 * torch.Size(shape).numel(), tp)


@check(
    idea="The result is a sum of t parts, and the derivative of a sum hands its gradient to every part unchanged.",
    section="f and g: a sum in backward, a sum in forward",
    line="Forward returns the all-reduced sum; backward returns the gradient as it comes, since all ranks have it.",
)
def leave_rows(answer: Callable[..., Tensor]) -> str:
    """Judge `leave_rows(part, group)`, Megatron's g: a sum in forward, nothing in backward."""
    shape, tp = (_B, _S, _H), 3
    results = on_ranks(_in_group, 2 * tp, _through, answer, (shape, shape), False, True, False)[tp:]
    _passed_through(results, shape)
    total, grad = sum(_of_all(20, tp, shape)), _draw(30, shape)[0]
    for rank, got in enumerate(results):
        refuse(
            "",
            ("Forward sends nothing: each rank has a part of the sum, and the parts must be added", not got["calls"][0]),
            ("The parts are averaged; they are parts of one sum", _same(got["y"], total / tp)),
            (f"Rank {rank} does not return the sum of all parts, which every rank needs", not _same(got["y"], total)),
            (f"Forward is right, but the gradient of a part is {tp} times too long: backward sums again, though every rank "
             "already has the whole gradient", _same(got["grad"], tp * grad)),
            (f"The gradient of a part is divided by {tp}: its weight in the sum is one", _same(got["grad"], grad / tp)),
            ("The gradient of a part is wrong: backward of a sum hands it on", not _same(got["grad"], grad)),
        )  # fmt: skip
    _pay(results, 2 * _one_way(shape, tp), 0)
    told = " You sum in place: right here, and wrong without an error behind an operator that saved its output, as tanh does."
    return "One sum forward, nothing backward." + told * any(got["in_place"] for got in results)


# --- half a layer -------------------------------------------------------------------------------------------

_INPUTS = ("x", "up", "up_bias", "down", "down_bias")


def _mlp_problem(tp: int) -> list[Tensor]:
    inner = 4 * tp
    shapes = ((3, 5, 6), (inner, 6), (inner,), (6, inner), (6,), (3, 5, 6))
    x, up, up_bias, down, down_bias, grad = _draw(tp, *shapes)
    leaves = (x, up, up_bias, down, down_bias + 2.0)  # a bias that no part of the sum resembles
    return [*(leaf.requires_grad_() for leaf in leaves), grad]


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products; of a DTensor's those on its local tensors, and not what it plans with."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kinds = {kind.__name__ for kind in types}
        if "DTensor" in kinds:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "FakeTensor" not in kinds and (count := flop_registry.get(func.overloadpacket)):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        elif func.overloadpacket is torch.ops.aten.mul:  # a matrix product may be written value by value
            self.flops += 2 * result.numel()
        return result


def _mlp_on_a_rank(group: dist.ProcessGroup, answer: Callable) -> dict[str, Any]:
    *leaves, grad = _mlp_problem(group.size())
    x, *weights = leaves
    products = _Products()

    def run() -> Any:
        with products:
            return answer(x * 1.0, *weights, group)

    found = _forward_and_backward(run, grad)
    for name, leaf in zip(_INPUTS, leaves, strict=True):
        found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found | {"flops": products.flops}


@check(
    idea="Split the first matrix by outputs and the second by inputs at the same places: nothing is sent in between.",
    section="Columns, then rows: one sum for two matrices",
    line="Take rows of `up` and of its bias and the same columns of `down`; f before, g after, then add the last bias.",
)
def split_mlp(answer: Callable[..., Tensor]) -> str:
    """Judge `split_mlp(x, up, up_bias, down, down_bias, group)`: forward, five gradients and the bytes."""
    tp = 3
    *leaves, grad = _mlp_problem(tp)
    whole_y = F.linear(torch.relu(F.linear(*leaves[:3])), *leaves[3:])
    whole_y.backward(grad)
    truth = dict(zip(_INPUTS, (leaf.grad for leaf in leaves), strict=True))
    values = [leaf.detach() for leaf in leaves]
    results = on_ranks(_in_group, 2 * tp, _mlp_on_a_rank, answer)[tp:]
    _passed_through(results, tuple(grad.shape))
    for rank, got in enumerate(results):
        _judge_mlp_forward(got["y"], bool(got["calls"][0]), whole_y.detach(), values, rank, tp)
    _judge_mlp_parts(results, values, tp)
    _judge_mlp_backward(results, truth, tp)
    _pay(results, *[2 * _one_way(tuple(grad.shape), tp)] * 2)
    return "One sum forward, one backward, and nothing between the two matrices."


def _judge_mlp_forward(y: Tensor, sends: bool, full: Tensor, values: list[Tensor], rank: int, tp: int) -> None:
    bias = values[-1]
    if _same(y, full):
        refuse("", ("Each rank computes the whole product: take this rank's part of both matrices", not sends))
        return
    refuse(
        "",
        (f"The last bias counts {tp} times: it belongs to the sum, not to each part", _same(y, full + (tp - 1) * bias)),
        ("The parts are averaged; they are parts of one sum",
         _same(y * tp, full) or _same((y - bias) * tp, full - bias)),
        ("The last bias is missing", _same(y, full - bias)),
        ("Each rank returns its own part: the parts must be summed over the ranks", not sends),
    )  # fmt: skip
    recognize(y, "", _mlp_slips(values, tp), _same)
    raise Wrong(
        f"Rank {rank} returns another result than one process: each inner value must be complete before the ReLU, and "
        "meet its own column of the second weight."
    )


def _mlp_slips(values: list[Tensor], tp: int) -> list[tuple[str, Tensor]]:
    """What known slips return."""
    x, up, up_bias, down, down_bias = values
    first = down.chunk(tp, dim=1)[0]
    parts = list(zip(up.chunk(tp), up_bias.chunk(tp), down.chunk(tp, dim=1), strict=True))
    by_inputs = list(zip(x.chunk(tp, dim=-1), up.chunk(tp, dim=1), strict=True))
    return [
        ("Every rank uses the first columns of the second weight: rank r's inner values meet its own columns",
         sum(torch.relu(F.linear(x, a, b)) @ first.T for a, b, _ in parts) + down_bias),
        ("The first bias is shared out: each inner value is complete on its rank and takes its own bias, undivided",
         sum(torch.relu(F.linear(x, a, b / tp)) @ c.T for a, b, c in parts) + down_bias),
        ("The first bias is missing", sum(torch.relu(x @ a.T) @ c.T for a, _, c in parts) + down_bias),
        ("The first matrix is split by inputs, so the ReLU acts on parts of a sum: split its outputs",
         sum(F.linear(torch.relu(F.linear(z, a, up_bias)), down) for z, a in by_inputs) + down_bias),
        ("The ReLU is missing", F.linear(F.linear(x, up, up_bias), down, down_bias)),
        *[(
            "The part is counted over the ranks of the whole job: `group.rank()` and `group.size()` count those of the group",
            torch.relu(F.linear(x, up[lost:], up_bias[lost:])) @ down[:, lost:].T + down_bias,
        ) for lost in (len(up), len(up) // 2)],
    ]  # fmt: skip


def _judge_mlp_parts(results: list[dict], values: list[Tensor], tp: int) -> None:
    """Ask that a rank computes with its own part of both matrices, as its gradients and its FLOPs tell."""
    x, up = values[0], values[1]
    held = [(got["up"] != 0).any(1) for got in results]  # some token passes the ReLU in each of these rows
    most, own = max(got["flops"] for got in results), 2 * (x.numel() // x.shape[-1]) * 2 * up.numel() // tp
    refuse("", (
        "The first matrix is split by its inputs, so its products are parts of sums, which must be added before the ReLU: a "
        "message that splitting by outputs saves",
        all(bool((got["up"] != 0).any(0).sum() * tp == up.shape[1]) for got in results),
    ))  # fmt: skip
    for rank, rows in enumerate(held):
        refuse(
            "",
            (f"Forward is right, and no gradient gets through the sum to `up` on rank {rank}", not rows.any()),
            (f"Right, and no tensor parallelism: on rank {rank} {int(rows.sum())} of the {len(up)} rows of `up` have a "
             f"gradient. Each rank takes {len(up) // tp} of them, for all tokens", rows.sum() * tp != len(up)),
        )  # fmt: skip
    refuse(
        "",
        ("Two ranks use the same rows of `up`: every inner value belongs to one rank", not torch.stack(held).any(0).all()),
        (f"Right, and no tensor parallelism: a rank computes {most:,} FLOPs, and its part of both matrices takes {own:,}. "
         "Take the part before the product, not after it", most > 1.5 * own),  # a mask is no second product
    )  # fmt: skip


def _judge_mlp_backward(results: list[dict], truth: dict[str, Tensor], tp: int) -> None:
    again = _same(sum(got["up"] for got in results), tp * truth["up"])
    for rank, got in enumerate(results):
        right = _same(got["x"], truth["x"])
        refuse(
            "",
            ("Forward is right, but the gradient of x is this rank's part only: x went to all ranks, so its gradient is a "
             "sum over them", not got["calls"][1] and not right),
            (f"Forward is right, but the gradients before the sum are {tp} times too long: backward of g sums again, though "
             "every rank already has the whole gradient", again),
            (f"The gradient of x is {tp} times too long: f sums it twice", _same(got["x"], tp * truth["x"])),
            ("The gradient of x is wrong: f hands x to all ranks, and its backward sums what they return", not right),
            (f"Each rank finds 1/{tp} of the gradient of the last bias: add the bias undivided, after the sum",
             _same(got["down_bias"], truth["down_bias"] / tp)),
            (f"Rank {rank} does not find the gradient of the last bias: the bias is replicated, and copies that get "
             "different gradients drift apart", not _same(got["down_bias"], truth["down_bias"])),
        )  # fmt: skip
    for name in ("up", "up_bias", "down"):
        wrong = not _same(sum(got[name] for got in results), truth[name])
        refuse("", (f"The gradient of `{name}` is wrong: each rank finds that of its own part, and no other", wrong))


# --- sequence parallelism -----------------------------------------------------------------------------------


@check(
    idea="Each rank needs all tokens, and every rank's columns then have something to say about each token.",
    section="Sequence parallelism: an all-gather in, a reduce-scatter out",
    line="Forward concatenates the ranks' tokens along dim 1; backward sums over ranks and keeps this rank's tokens.",
)
def gather_tokens(answer: Callable[..., Tensor]) -> str:
    """Judge `gather_tokens(part, group)`: an all-gather in forward, a reduce-scatter in backward."""
    tp, part, full = 3, (_B, _S // 3, _H), (_B, _S, _H)
    results = on_ranks(_in_group, 2 * tp, _through, answer, (part, full), False, False, False)[tp:]
    _passed_through(results, full)
    parts, grads = _of_all(20, tp, part), _of_all(40, tp, full)
    whole_y, total = torch.cat(parts, dim=1), sum(grads)
    for rank, got in enumerate(results):
        summed, own = (each.chunk(tp, dim=1)[rank] for each in (total, grads[rank]))
        refuse(
            "",
            ("Tokens of different sequences are mixed: a collective stacks along dim 0, tokens are dim 1",
             _same(got["y"], torch.cat(parts).view(full))),
            ("These are not all ranks' tokens in order, of each sequence the first on rank 0",
             not _same(got["y"], whole_y)),
            ("Forward is right, but backward cuts without a sum: every rank's columns used this rank's tokens, so their "
             "gradient is a sum over the ranks", _same(got["grad"], own)),
            (f"The gradients are averaged over the {tp} ranks: they are parts of one sum", _same(got["grad"], summed / tp)),
            ("The gradient is wrong: sum over all ranks, and keep this rank's tokens", not _same(got["grad"], summed)),
        )  # fmt: skip
    _pay(results, _one_way(full, tp), _one_way(full, tp))
    return "All-gather forward, reduce-scatter backward."


@check(
    idea="Every rank has a part of the sum for all tokens, and afterwards needs the whole sum for its own tokens.",
    section="Sequence parallelism: an all-gather in, a reduce-scatter out",
    line="Forward sums over ranks and keeps this rank's tokens of dim 1; backward concatenates the ranks' gradients.",
)
def scatter_tokens(answer: Callable[..., Tensor]) -> str:
    """Judge `scatter_tokens(partial, group)`: a reduce-scatter in forward, an all-gather in backward."""
    tp, part, full = 3, (_B, _S // 3, _H), (_B, _S, _H)
    results = on_ranks(_in_group, 2 * tp, _through, answer, (full, part), False, False, False)[tp:]
    _passed_through(results, part)
    partial, grads = _of_all(20, tp, full), _of_all(40, tp, part)
    total, whole_grad = sum(partial), torch.cat(grads, dim=1)
    for rank, got in enumerate(results):
        mine, own = (each.chunk(tp, dim=1)[rank] for each in (total, partial[rank]))
        own_only = torch.cat([grads[r] if r == rank else torch.zeros(part) for r in range(tp)], dim=1)
        refuse(
            "",
            ("Forward cuts without a sum: each rank has a part of every token's sum", _same(got["y"], own)),
            ("The parts are averaged; they are parts of one sum", _same(got["y"], mine / tp)),
            ("Whole sequences are dealt out: a collective cuts along dim 0, tokens are dim 1",
             _same(got["y"], total.flatten(0, 1).chunk(tp)[rank].view(part))),
            ("These are not this rank's tokens, of each sequence the first on rank 0", not _same(got["y"], mine)),
            ("Forward is right, but backward fills the other ranks' tokens with zeros: this rank's part went into the sums of "
             "all tokens, and the gradients of those are on the other ranks", _same(got["grad"], own_only)),
            (f"The gradient is {tp} times too long: nothing is to be summed in backward", _same(got["grad"], tp * whole_grad)),
            ("The gradient is wrong: put those of all ranks together, in order", not _same(got["grad"], whole_grad)),
        )  # fmt: skip
    _pay(results, _one_way(full, tp), _one_way(full, tp))
    return "Reduce-scatter forward, all-gather backward."


# --- heads --------------------------------------------------------------------------------------------------

#: What must be refused: one of the two conditions fails, or both.
_IMPOSSIBLE = ((25, 25, 64, 2), (28, 4, 128, 8), (6, 6, 4, 4), (12, 4, 2, 6), (12, 6, 4, 4), (40, 8, 2, 20))
_PARTS = ("query_rows", "key_rows", "sum_over")


@check(
    idea="A head computes its own softmax from its own rows, so heads may go to different ranks and rows of one may not; "
    "a key head that is copied has a gradient from the queries of each copy.",
    section="Grouped queries: more ranks than key heads",
    line="Rank r takes num_heads/tp neighbouring query heads and the key heads that these read; both must come out even. "
    "Ranks that hold the same key head sum its gradient.",
)
def split_qkv(answer: Callable[[int, int, int, int], Sequence[tuple]], seed: int = 3) -> str:
    """Judge `split_qkv(num_heads, num_kv_heads, head_dim, tp)` by each rank's attention and gradients."""
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
        except ValueError as error:
            said = f": {str(error)[:100].rstrip('.')}" if str(error) else ""
            where = _words(case) + " is possible" + " (ranks may hold copies of a key head)" * (case[3] > case[1])
            raise Wrong(f"{where}, and your answer raises a ValueError{own_line(error)}{said}.") from None
        _judge_heads(_rows_of_ranks(ranks, case), *case)
    for case in _IMPOSSIBLE:
        try:
            answer(*case)
        except ValueError:
            continue
        except Exception as error:
            kind = type(error).__name__
            raise Wrong(f"{_words(case)} stops with {kind}: look before you cut, and raise a ValueError.") from None
        heads, kv, _, tp = case
        if heads % tp:
            raise Wrong(f"{_words(case)} would cut through a query head: raise a ValueError.")
        each = f"one each, {tp} in all, is no multiple of {kv}" if tp > kv else f"{kv}/{tp} each is no whole number"
        raise Wrong(
            f"{_words(case)}: the query heads come out even and the key heads do not, since a rank holds at most "
            f"max(1, num_kv_heads/tp) of them, and {each}. Raise a ValueError."
        )
    return (
        f"{len(cases)} layouts computed rank by rank, forward and backward: no message between the projections and the "
        "end of attention, and one sum for each key head that is copied."
    )


def _words(case: tuple[int, ...]) -> str:
    return f"num_heads={case[0]}, num_kv_heads={case[1]}, head_dim={case[2]}, tp={case[3]}"


def _rows_of_ranks(ranks: Any, case: tuple[int, ...]) -> list[tuple[list[int], list[int], set[int]]]:
    """Return query rows, key rows and the ranks of the sum, of every rank, whatever holds them."""
    heads, kv, width, tp = case
    where, found = _words(case), []
    for rank, parts in enumerate(ranks.values() if isinstance(ranks, dict) else numbers(ranks)):
        parts = list(parts) if hasattr(parts, "__iter__") and not isinstance(parts, Mapping) else parts
        otherwise = f"{where}: rank {rank} needs {', '.join(_PARTS[:2])} and {_PARTS[2]}, in this order."
        named = by_name(parts, *_PARTS, otherwise=otherwise)
        rows = [_rows(named[name], most * width) for name, most in zip(_PARTS, (heads, kv), strict=False)]
        others = {whole(other, "A rank") for other in numbers(named["sum_over"], f"sum_over of rank {rank}")}
        if not others <= set(range(tp)):
            raise Wrong(f"{where}: sum_over of rank {rank} names ranks that do not exist, [{some(sorted(others))}].")
        found.append((*rows, others | {rank}))
    if len(found) != tp:
        raise Wrong(f"{where}: return one triple for each of the {tp} ranks.")
    ends = [part for *rows, _ in found for part in rows]
    if all(len(part) == 2 and part[1] - part[0] >= width and part[1] % width == 0 for part in ends):
        raise Wrong(f"{where}: these look like (start, stop). Return the rows themselves, as range(start, stop).")
    if width > 1 and [len(queries) for queries, *_ in found] == [heads // tp] * tp:
        raise Wrong(f"{where}: these are numbers of heads. Return rows: head i has head_dim of them, from i*head_dim.")
    return found


def _rows(part: Any, size: int) -> list[int]:
    if isinstance(part, slice):
        return list(range(*part.indices(size)))
    return [whole(row, "A row") for row in numbers(part, "The rows of a rank")]


def _judge_heads(ranks: list[tuple[list[int], list[int], set[int]]], heads: int, kv: int, width: int, tp: int) -> None:
    where = _words((heads, kv, width, tp))
    held = []
    for rank, (*rows, _) in enumerate(ranks):
        cut = [[row // width for row in part[::width]] for part in rows]
        for name, part, found, most in zip(("query", "key"), rows, cut, (heads, kv), strict=True):
            refuse(
                "",
                (f"{where}: rank {rank} gets a piece of a {name} head. Cut at multiples of head_dim",
                 part != [head * width + i for head in found for i in range(width)]),
                (f"{where}: rank {rank} gets {name} heads that do not exist", any(not 0 <= head < most for head in found)),
            )  # fmt: skip
        held.append(cut)
    refuse(
        "",
        (f"{where}: the ranks get unequal numbers of query heads, and all wait for the largest",
         len({len(queries) for queries, _ in held}) > 1),
        (f"{where}: each query head should be on exactly one rank",
         sorted(head for queries, _ in held for head in queries) != list(range(heads))),
    )  # fmt: skip
    least = max(1, kv // tp)
    for rank, (queries, keys) in enumerate(held):
        needed = {head // (heads // kv) for head in queries}
        refuse(
            "",
            (f"{where}: rank {rank} lacks the key head of one of its queries, and must ask", needed - set(keys)),
            (f"{where}: rank {rank} holds {len(keys)} key heads; {least} do for neighbouring queries",
             len(keys) > least),
        )  # fmt: skip
    _judge_gradients(ranks, held, width, where)


def _judge_gradients(ranks: list[tuple], held: list[list[list[int]]], width: int, where: str) -> None:
    """Compute attention forward and backward on each rank from its own rows, and sum key gradients as the answer says."""
    heads, kv = (len({head for cut in held for head in cut[which]}) for which in (0, 1))
    shapes = ((5, 6), (heads * width, 6), (kv * width, 6), (kv * width, 6), (heads, 5, width))
    x, *full, grad = (part.double() for part in _draw(heads, *shapes))
    for weight in full:
        weight.requires_grad_()
    y = _attend(x, *full, width)
    y.backward(grad)
    found = []
    for (queries, keys, _), (own, _) in zip(ranks, held, strict=True):
        parts = [w.detach()[rows].requires_grad_() for w, rows in zip(full, (queries, keys, keys), strict=True)]
        out = _attend(x, *parts, width)
        if not torch.allclose(out, y[own], atol=1e-9):
            raise Wrong(f"{where}: a rank's queries meet the wrong key heads: keep groups together and in order.")
        out.backward(grad[own])
        found.append(parts[1].grad)
    for rank, (_, keys, others) in enumerate(ranks):
        copies = {r for r, (_, theirs) in enumerate(held) if theirs == held[rank][1]}
        if others - copies:
            raise Wrong(
                f"{where}: rank {rank} sums the gradient of its key rows with rank {min(others - copies)}, which holds "
                "other key heads. The sum is over the copies of one head, and a head without a copy needs none."
            )
        total, true = sum(found[r] for r in others), full[1].grad[keys]
        if not torch.allclose(total, true, atol=1e-9):
            off = float((total - true).norm() / true.norm())
            raise Wrong(
                f"{where}: rank {rank} holds a copy of a key head, and its gradient is off by {off:.0%}: it comes from "
                f"the queries of ranks {', '.join(map(str, sorted(copies)))}, and copies that are not summed drift apart."
            )


def _attend(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, width: int) -> Tensor:
    q, k, v = ((x @ w.T).unflatten(-1, (-1, width)).transpose(0, 1) for w in (wq, wk, wv))
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / width**0.5, dim=-1) @ v


# --- cross-entropy ------------------------------------------------------------------------------------------

_TOKENS, _VOCAB = 7, 401
_NUMBERS = 12  #: 8-byte numbers that a rank may handle a token: three, one by one from each of tp ranks, and some more


def _scores(tp: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, weight = _draw(tp, (_TOKENS, _VOCAB), (_TOKENS,))
    logits[1] += 150  # without a maximum fp32 overflows, whose largest number is about e^88
    logits[2, : _VOCAB // tp] -= 150  # and here a rank's own maximum is of no use to the others
    return logits, torch.arange(_TOKENS) * 57 % _VOCAB, weight


def _loss_on_a_rank(group: dist.ProcessGroup, answer: Callable) -> dict[str, Any]:
    tp, rank = group.size(), group.rank()
    logits, targets, weight = _scores(tp)
    first, stop = (_VOCAB * r // tp for r in (rank, rank + 1))
    mine = logits[:, first:stop].clone().requires_grad_()
    with record_comms() as log:
        loss = answer(mine * 1.0, targets, first, group)
        if not isinstance(loss, Tensor) or loss.shape != (_TOKENS,) or not loss.requires_grad:
            return {"loss": None}
        _your_own(loss)
        loss.backward(weight.to(loss.dtype))
    return {"loss": loss.detach(), "grad": mine.grad, "bytes": sum(e.bytes for e in log.events)}


@check(
    idea="The loss needs a maximum, a sum of exponentials and one logit, and each is a reduction over all ranks' columns.",
    section="Vocabulary: split embedding, split head, split loss",
    line="All-reduce the detached maximum, then the sum of exp(z - m), then the target's z - m, zero on all but its owner.",
)
def cross_entropy(answer: Callable[..., Tensor]) -> str:
    """Judge `cross_entropy(logits, targets, first, group)`: losses, gradients, and what crossed the wire."""
    tp = 3
    logits, targets, weight = _scores(tp)
    logits.requires_grad_()
    truth = F.cross_entropy(logits, targets, reduction="none")
    truth.backward(weight)
    results = on_ranks(_in_group, 2 * tp, _loss_on_a_rank, answer)[tp:]
    if any(got["loss"] is None for got in results):
        raise Wrong("Return one loss per token, with a gradient.")
    most, losses = max(got["bytes"] for got in results), [got["loss"] for got in results]
    cuts, wrong = [_VOCAB * r // tp for r in range(1, tp)], not _same(losses[0], truth.detach())
    refuse(
        "",
        (f"The logits themselves cross the wire: the collectives of a rank carry {most / _TOKENS:,.0f} bytes a token, and a "
         f"row of logits has {4 * _VOCAB:,}. Reduce a few numbers per token, and nobody holds all",
         most > _NUMBERS * tp * _TOKENS * 8),
        ("A loss is infinite: subtract the maximum over all ranks before the exponential",
         any(not loss.isfinite().all() for loss in losses)),
        ("The ranks have different losses for one token: each piece is a reduction over all ranks",
         any(not _same(loss, losses[0]) for loss in losses)),
        ("The target's logit is not shifted: subtract the maximum from it too, as in every exponent",
         _same(losses[0], truth - logits.amax(-1))),
        ("The ranks' logs are added: add exponentials over the ranks, and take the log of their sum",
         _same(losses[0] - truth, sum(z.logsumexp(-1) for z in logits.tensor_split(cuts, 1)) - logits.logsumexp(-1))),
        ("The loss is too low: the sum of exponentials has only a part of the vocabulary in it",
         wrong and (losses[0] <= truth + 1e-3).all()),
        ("The loss is wrong: take one maximum for all ranks, and the target's logit from the rank that owns it", wrong),
    )  # fmt: skip
    parts = (each.tensor_split(cuts, 1) for each in (logits.detach(), logits.grad))
    for rank, (got, z, mine) in enumerate(zip(results, *parts, strict=True)):
        if (grad := got["grad"]) is None:
            raise Wrong(f"The losses are right, and on rank {rank} no gradient reaches the logits.")
        if _same(grad, mine):
            continue
        off = (grad - mine).abs() > 1e-3
        refuse(
            "",
            ("The losses are right, and a gradient flows into the maximum: it is a constant that cancels, so detach it",
             (off.sum(1) <= 1).all() and (off.float().argmax(1) == z.argmax(1))[off.any(1)].all()),
            (f"The losses are right and the gradients {tp} times too long: every rank has the whole gradient of the loss, so "
             "backward of each sum hands it on as it is", _same(grad, tp * mine)),
            ("The losses are right and the gradients are not: on every rank they are softmax minus one at the target, times "
             "the gradient of the loss", True),
        )  # fmt: skip
    return f"{most / _TOKENS:.0f} bytes a token crossed the wire, of {4 * _VOCAB:,} that its logits have."
