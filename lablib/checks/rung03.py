"""The checks of rung 03: half a layer with f and g, heads, a plan for `parallelize_module`, a fault on ranks.

All but the check of heads run the answer on real ranks, in fp32, and look at what autograd and the wire saw.
`Reader` is the model that the plan is for, and `Job` one that may have a fault: both are for the lab.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.parallel import layer_elements
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    agreed,
    ask_ranks,
    by_name,
    check,
    numbers,
    on_ranks,
    own_line,
    recognize,
    refuse,
    some,
    whole,
)
from lablib.launch.measure import record_comms
from lablib.launch.ranks import rank_mesh
from lablib.launch.torch_private import TorchDispatchMode
from lablib.toys.tensor_parallel import ColumnParallelLinear, RowParallelLinear, even_split, reduce_from_tp

__all__ = ["Job", "Reader", "find_fault", "split_mlp", "split_qkv", "write_plan"]


def _same(a: Tensor | None, b: Tensor) -> bool:
    """fp32 sums of a hundred terms of size one are good to 1e-5; a slip changes them by tenths."""
    return a is not None and a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=1e-4, rtol=1e-4)


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) for shape in shapes]


def _pay(results: Sequence[dict], forward: float, backward: float) -> None:
    """Judge bytes and not calls: a reduce-scatter and an all-gather are as good as an all-reduce."""
    for way, (allowed, what) in enumerate(((forward, "in forward"), (backward, "in backward"))):
        most = max(got["sent"][way] for got in results)
        told = f"Right, but not for the price: a rank sends {most:,.0f} bytes {what}, and {allowed:,.0f} will do"
        refuse("", (told, most > allowed * 1.001))


# --- half a layer -------------------------------------------------------------------------------------------


def _in_group(work: Callable, *args: Any) -> Any:
    """Work in one of two groups, as beside another replica: who counts or reduces over the whole job is found out."""
    half = dist.get_world_size() // 2
    with record_comms() as log:
        found = work(dist.new_subgroups(half)[0], *args)
    everywhere = any(event.group_size > half and event.op not in ("send", "recv") for event in log.events)
    told = "A collective runs over all ranks of the job, also those of other replicas: give it `group=group`"
    refuse("", (told, everywhere))
    return found


def _forward_and_backward(run: Callable[[], Any], grad: Tensor) -> dict[str, Any]:
    """Return what a function gives, and how much and how often it sends; None for a result without a gradient."""
    with record_comms() as forward:
        y = run()
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
    if not isinstance(y, Tensor) or not y.requires_grad:
        return {"y": None}
    if y.shape != grad.shape:
        return {"y": y.detach()}
    value = y.detach().clone()
    with record_comms() as backward:
        y.backward(grad.to(y.dtype))
    sent, calls = zip(*((log.ring_bytes_sent(), len(log.events)) for log in (forward, backward)), strict=True)
    return {"y": value, "sent": sent, "calls": calls}


def _passed_through(results: list[dict], shape: tuple[int, ...]) -> None:
    for rank, got in enumerate(results):
        if got["y"] is None:
            raise Wrong("The result has no gradient: return a tensor that autograd can follow.")
        if got["y"].shape != shape:
            raise Wrong(f"Rank {rank} returns shape {tuple(got['y'].shape)}; it should be {shape}.")


_INPUTS = ("x", "up", "up_bias", "down", "down_bias")


def _mlp_problem(tp: int, width: int) -> list[Tensor]:
    inner = width * tp
    shapes = ((3, 5, 6), (inner, 6), (inner,), (6, inner), (6,), (3, 5, 6))
    x, up, up_bias, down, down_bias, grad = _draw(tp, *shapes)
    leaves = (x, up, up_bias, down, down_bias + 2.0)  # a bias that no part of the sum resembles
    return [*(leaf.requires_grad_() for leaf in leaves), grad]


class _Products(TorchDispatchMode):
    """Counts the FLOPs of products; of a DTensor's those on its local tensors, and not what it plans with."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kinds, name = {kind.__name__ for kind in types}, func.overloadpacket.__name__
        if "DTensor" in kinds:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "FakeTensor" not in kinds and (count := flop_registry.get(func.overloadpacket)):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        elif "FakeTensor" not in kinds and any(it in name for it in ("mul", "mm", "mv", "dot", "addr")):  # may make one
            sizes = [1, *(x.numel() for x in (*args[-2:], result) if isinstance(x, Tensor))]  # matrices': mk, kn, mn
            self.flops += 2 * (max(sizes) if "mul" in name else math.isqrt(math.prod(sizes)))
        return result


def _mlp_on_a_rank(group: dist.ProcessGroup, answer: Callable, width: int) -> dict[str, Any]:
    *leaves, grad = _mlp_problem(group.size(), width)
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
    tp, width = 3, NEW.choice((6, 8, 10))
    *leaves, grad = _mlp_problem(tp, width)
    whole_y = F.linear(torch.relu(F.linear(*leaves[:3])), *leaves[3:])
    whole_y.backward(grad)
    truth = dict(zip(_INPUTS, (leaf.grad for leaf in leaves), strict=True))
    values = [leaf.detach() for leaf in leaves]
    results = on_ranks(_in_group, 2 * tp, _mlp_on_a_rank, answer, width)[tp:]
    _passed_through(results, tuple(grad.shape))
    _judge_mlp_forward(results, whole_y.detach(), values, tp)
    _judge_mlp_parts(results, values, tp)
    _judge_mlp_backward(results, truth, tp)
    _pay(results, *[ring_all_reduce_bytes(4 * grad.numel(), tp)] * 2)
    return "One sum forward, one backward, and nothing between the two matrices."


def _judge_mlp_forward(results: list[dict], full: Tensor, values: list[Tensor], tp: int) -> None:
    alone = [rank for rank, got in enumerate(results) if not got["calls"][0]]
    off = [rank for rank, got in enumerate(results) if not _same(got["y"], full)]
    if not off:
        refuse("", ("A rank that sends nothing has computed the whole product: take its part of both matrices", alone))
        return
    bias, y, told = values[-1], results[off[0]]["y"], f"Rank {off[0]} returns another result than one process"
    at, differ = int((y - full).abs().argmax()), not all(_same(got["y"], y) for got in results)
    refuse("",
        (f"The last bias counts {tp} times: it belongs to the sum, not to each part", _same(y, full + (tp - 1) * bias)),
        ("The parts are averaged; they are parts of one sum", _same(y * tp, full) or _same((y - bias) * tp, full - bias)),
        (f"The last bias is missing on rank {off[0]}", _same(y, full - bias)),
        ("The last bias is shared out after the sum: it is added once there, whole", _same(y, full + (1 / tp - 1) * bias)),
    )  # fmt: skip
    recognize(y, "", [] if differ else _mlp_slips(values, tp), _same)
    refuse(
        "",
        (f"{told}, and sends nothing: the result is a sum over the ranks", off[0] in alone),
        (f"{told}, and ranks return different ones: each needs the whole sum, taken behind the second matrix", differ),
        (f"{told}: one value is {y.flatten()[at]:.4g} and should be {full.flatten()[at]:.4g}", True),
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
            f"{len(up[kept])} of the {len(up)} rows of `up` are in the sum, as when parts are counted over the ranks of the "
            "whole job: `group.rank()` and `group.size()` count those of the group",
            torch.relu(F.linear(x, up[kept], up_bias[kept])) @ down[:, kept].T + down_bias,
        ) for kept in (slice(0), slice(len(up) // 2), slice(len(up) // 2, None))],
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
        refuse("", (
            f"Forward is right, and on rank {rank} {int(rows.sum())} of the {len(up)} rows of `up` have a gradient. Each rank "
            f"takes {len(up) // tp} of them, for all tokens, where autograd sees them", rows.sum() * tp != len(up),
        ))  # fmt: skip
    refuse(
        "",
        ("Two ranks use the same rows of `up`: every inner value belongs to one rank", not torch.stack(held).any(0).all()),
        (f"Forward is right, and a rank computes {most:,} FLOPs where its part of both matrices takes {own:,}, as when it "
         "multiplies by all of a matrix", most > 1.5 * own),  # a mask is no second product
    )  # fmt: skip


def _judge_mlp_backward(results: list[dict], truth: dict[str, Tensor], tp: int) -> None:
    times = next((n for n in (tp, 1 / tp) if _same(sum(got["up"] for got in results), n * truth["up"])), 0)
    for rank, got in enumerate(results):
        right = _same(got["x"], truth["x"])
        refuse(
            "",
            ("Forward is right, but backward sends nothing, and the gradient of x is not that of one process: x went to all "
             "ranks, so its gradient is a sum over them", not got["calls"][1] and not right),
            (f"Forward is right, but the gradients before the sum are {times:.2g} times those of one process, as when backward "
             "of g sums again or averages, though every rank already has the whole gradient", times),
            (f"The gradient of x is {tp} times too long, as when f sums it twice", _same(got["x"], tp * truth["x"])),
            ("The gradient of x is wrong: f hands x to all ranks, and its backward sums what they return", not right),
            (f"Rank {rank} finds 1/{tp} of the gradient of the last bias: add the bias undivided, after the sum",
             _same(got["down_bias"], truth["down_bias"] / tp)),
            (f"The gradient that rank {rank} finds of the last bias is not that of one process: the bias is replicated, and "
             "each rank needs the whole gradient, once", not _same(got["down_bias"], truth["down_bias"])),
        )  # fmt: skip
    for name in ("up", "up_bias", "down"):
        wrong = not _same(sum(got[name] for got in results), truth[name])
        refuse("", (f"The gradient of `{name}` is wrong: each rank finds that of its own part, and no other", wrong))


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
        dice = dice if len(cases) < 24 else NEW
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
    drawn = [(kv * NEW.randint(1, 6), kv, 4, NEW.randint(2, 12)) for kv in NEW.choices(range(2, 9), k=200)]
    for case in (*_IMPOSSIBLE, *(c for c in drawn if c[0] % c[3] or (c[1] % c[3] and c[3] % c[1]))):
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
    ready = [name for name in getattr(answer, "called", ()) if name.endswith((".split_heads", ".head_split"))]
    refuse("", ("This layout is lablib's, ready-made: work out yourself who holds what", ready))
    return (
        f"{len(cases)} layouts computed rank by rank, forward and backward: no message between the projections and the "
        "end of attention, and one sum for each key head that is copied."
    )


def _words(case: tuple[int, ...]) -> str:
    return f"num_heads={case[0]}, num_kv_heads={case[1]}, head_dim={case[2]}, tp={case[3]}"


def _rows_of_ranks(ranks: Any, case: tuple[int, ...]) -> list[tuple[list[int], list[int], set[int]]]:
    """Return query rows, key rows and the ranks of the sum, of every rank, whatever holds them."""
    heads, kv, width, tp = case
    where, found, each = _words(case), [], (heads // tp, max(1, kv // tp))
    if isinstance(ranks, dict) and set(ranks) == set(range(tp)):
        ranks = [ranks[rank] for rank in range(tp)]
    for rank, parts in enumerate(ranks.values() if isinstance(ranks, dict) else numbers(ranks)):
        parts = list(parts) if hasattr(parts, "__iter__") and not isinstance(parts, Mapping | Sequence) else parts
        otherwise = f"{where}: rank {rank} needs {', '.join(_PARTS[:2])} and {_PARTS[2]}, in this order."
        named = by_name(parts, *_PARTS, otherwise=otherwise)
        rows = [_rows(named[name], most * width) for name, most in zip(_PARTS, (heads, kv), strict=False)]
        others = {whole(other, "A rank") for other in numbers(named["sum_over"], f"sum_over of rank {rank}")}
        if not others <= set(range(tp)):
            raise Wrong(f"{where}: sum_over of rank {rank} names ranks that do not exist, [{some(sorted(others))}].")
        found.append((*rows, others | {rank}))
    if len(found) != tp:
        raise Wrong(f"{where}: return one triple for each of the {tp} ranks.")
    ends = [(part, n) for *rows, _ in found for part, n in zip(rows, each, strict=True)]
    if all(len(part) == 2 and part[1] - part[0] == n * width for part, n in ends):
        raise Wrong(f"{where}: these look like (start, stop). Return the rows themselves, as range(start, stop).")
    if width > 1 and all((len(q), len(k)) == each and max(q) < heads and max(k) < kv for q, k, _ in found):
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
                (f"{where}: the {name} rows of rank {rank} are not whole heads, each in order and from a multiple of head_dim",
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


# --- a plan for another model -------------------------------------------------------------------------------

_VOCAB, _WIDTH, _HEADS, _KEYS, _INNER, _DEPTH = 48, 16, 4, 2, 24, 2


# fmt: off
# The lab prints these classes: no line is wider than 72 characters.


class Scale(nn.Module):
    """A norm over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square, times the weight."""
        square = x.pow(2).mean(-1, keepdim=True)
        return x * (square + 1e-6).rsqrt() * self.weight


class Attend(nn.Module):
    """Grouped queries; each head's query and key have a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.width = _WIDTH // _HEADS
        self.wq = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.wk = nn.Linear(_WIDTH, _KEYS * self.width, bias=False)
        self.wv = nn.Linear(_WIDTH, _KEYS * self.width, bias=False)
        self.q_norm, self.k_norm = Scale(self.width), Scale(self.width)
        self.wo = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what attention adds: (batch, tokens, width)."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width))
            for project in (self.wq, self.wk, self.wv)
        )
        # (batch, tokens, heads, width of a head)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.wo(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(_WIDTH, _INNER)
        self.w3 = nn.Linear(_WIDTH, _INNER)
        self.w2 = nn.Linear(_INNER, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn = Scale(_WIDTH), Attend()
        self.ln2, self.mlp = Scale(_WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after both halves."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Reader(nn.Module):
    """A small language model that no library has a plan for."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(_VOCAB, _WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(_DEPTH))
        self.last = Scale(_WIDTH)
        self.out = nn.Linear(_WIDTH, _VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of every next token."""
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.last(x))


# fmt: on

_IDS = (2, 8)  # so few tokens that to gather weights costs more than to sum the stream


def _by_plan(answer: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Split `Reader` by the answer's plan and run it beside one process; return what this rank saw."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    def full(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    torch.manual_seed(0)
    alone, ids, targets = Reader(), torch.randint(_VOCAB, _IDS), torch.randint(_VOCAB, _IDS).flatten()
    truth = alone(ids)
    F.cross_entropy(truth.flatten(0, 1), targets).backward()
    split, plan = copy.deepcopy(alone), _checked_plan(answer(copy.deepcopy(alone)), alone)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallelize_module(split, rank_mesh(dist.get_world_size()), plan)
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in split.named_parameters()}
        whole_ones = [n for n, p in alone.named_parameters() if p.dim() == 2 and local[n].numel() == p.numel()]
        found: dict[str, Any] = {"whole": whole_ones, "held": sum(p.numel() for p in local.values())}
        if whole_ones:
            return found
        with record_comms() as forward, loss_parallel():
            logits = split(ids)
        cut = isinstance(logits, DTensor) and not any(placed.is_replicate() for placed in logits.placements)
        found |= {"shape": tuple(logits.shape), "cut": cut}
        if not cut:
            return found
        with record_comms() as backward, loss_parallel():
            F.cross_entropy(logits.flatten(0, 1), targets).backward()
        found |= {
            "right": _same(full(logits.detach()), truth),
            "sent": [x.ring_bytes_sent() for x in (forward, backward)],
        }
        parts, wrong = [], []
        for name, p in split.named_parameters():
            grad = torch.zeros_like(local[name]) if p.grad is None else full(p.grad)
            total = grad.clone()
            dist.all_reduce(total)
            if not _same(grad, (own := alone.get_parameter(name).grad)):
                (parts if _same(total, own) else wrong).append(name)
    except Exception as error:  # NotImplementedError too, which would be taken for the stub's
        text = str(error).strip().splitlines() or [""]
        raise Wrong(f"By this plan the model stops with {type(error).__name__}: {text[0][:200].rstrip('.')}.") from None
    return found | {"parts": parts, "wrong": wrong}


def _checked_plan(plan: Any, model: nn.Module) -> dict:
    from torch.distributed.tensor.parallel import ParallelStyle

    if not isinstance(plan, dict) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise Wrong('Return a dict of styles by name, as {"layers.*.attn.wq": ColwiseParallel(), ...}.')
    paths = [name.split(".") for name, _ in model.named_modules()]
    for key in plan:
        parts = str(key).split(".")
        if not any(len(p) == len(parts) and all(map(fnmatch, p, parts)) for p in paths):
            raise Wrong(f"`{key}` names no module of this model. `parallelize_module` only warns, and splits nothing.")
    return plan


@check(
    idea="Columns before rows in each half, one gather or sum for all that read one input; and a weight that every rank "
    "holds, but that meets only some tokens or heads there, finds a part of its gradient.",
    section="parallelize_module: the plan in PyTorch",
    line="wq, wk, wv, w1, w3, out: ColwiseParallel; wo, w2, tok: RowwiseParallel; a PrepareModuleInput for attn and for mlp; "
    "SequenceParallel for q_norm and k_norm; out with use_local_output=False.",
    kind="work",
)
def write_plan(answer: Callable[[nn.Module], dict]) -> str:
    """Judge `write_plan(model)`, the plan of `Reader`, by running it on two ranks beside one process."""
    tp = 2
    results, numel = on_ranks(_by_plan, tp, answer), sum(p.numel() for p in Reader().parameters())
    stream = {"batch": _IDS[0], "seq": _IDS[1], "hidden": _WIDTH, "tp": tp}
    allowed = 4 * (_DEPTH + 0.5) * layer_elements(**stream) / 2 + ring_all_reduce_bytes(4 * 3 * _IDS[0] * _IDS[1], tp)
    norms = sum(p.numel() for name, p in Reader().named_parameters() if p.dim() == 1 and "bias" not in name)
    back = allowed + ring_all_reduce_bytes(4 * norms, tp)  # a plan may sum what norms find in backward already
    for rank, got in enumerate(results):
        _judge_plan(got, rank, numel)
    sent = [max(got["sent"][way] for got in results) for way in (0, 1)]
    refuse(
        "",
        (f"Right, but forward sends {sent[0]:,.0f} bytes and {allowed:,.0f} will do, as when something is gathered or summed in "
         "the middle of a half, by each reader of an input, or for `out` split by inputs", sent[0] > allowed * 1.001),
        (f"Right, but backward sends {sent[1]:,.0f} bytes and {back:,.0f} will do, as when each layer that reads an input sums "
         "the gradient of it by itself (let the half take its input once, as a DTensor), or tokens are split and a half, or "
         "`out`, does not take them so by its input_layouts", sent[1] > back * 1.001),
    )  # fmt: skip
    return (
        f"Logits and gradients of one process; a rank holds {results[0]['held']:,} of {numel:,} numbers, and sends "
        f"{sum(sent):,.0f} bytes a step."
    )


def _judge_plan(got: dict[str, Any], rank: int, numel: int) -> None:
    columns = got.get("shape", (_VOCAB,))[-1]
    refuse(
        "",
        (f"No weight is split: each rank holds all {numel:,} numbers of the model", got["held"] == numel),
        (lambda: f"Rank {rank} holds all of `{got['whole'][0]}`, and {got['held']:,} of {numel:,} numbers in all. Each matrix "
         "is to be split by its outputs or its inputs", got["whole"]),
        (f"The logits leave `out` as plain tensors of {columns} columns: the loss takes these for the whole vocabulary. Hand "
         "on a DTensor, with use_local_output=False", not got.get("cut", True) and columns != _VOCAB),
        (lambda: f"The logits of a rank, {got['shape']}, have all {columns} columns: leave the vocabulary split, as the "
         "loss needs three numbers a token of the others", not got.get("cut", True)),
        ("It runs, and the logits are not those of one process: look at what each style takes for granted about its input, "
         "and which values are complete on a rank", not got.get("right", True)),
        (lambda: f"Forward is right, and rank {rank} has only a part of the gradient of `{got['parts'][0]}`: every rank holds "
         "this weight and uses it for some heads or tokens, so its gradient is the sum, not the mean, of what the ranks find, "
         "and a plain tensor makes none by itself", got.get("parts")),
        (lambda: f"Forward is right, and the gradient of `{got['wrong'][0]}` is not that of one process", got.get("wrong")),
    )  # fmt: skip


# --- a fault that nobody announced --------------------------------------------------------------------------

_KINDS, _STEPS = ("", "own mean", "not summed back", "own copy"), ("norm", "up", "inner", "down")


class _Total(torch.autograd.Function):
    """A sum over the ranks whose users differ from rank to rank, so that its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, back: bool) -> Tensor:
        ctx.group = group if back else None
        return reduce_from_tp(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.group is None else reduce_from_tp(grad, ctx.group)), None, None


def _own_mean(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


class _Norm(Sealed, nn.Module):
    """A norm that is told how to take the mean square: over values that are split, it is a sum over the ranks."""

    def __init__(self, weight: Tensor, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self._mean = nn.Parameter(weight.detach().clone()), mean

    def forward(self, x: Tensor) -> Tensor:
        return x * (self._mean(x) + 1e-6).rsqrt() * self.weight


class _Half(nn.Module):
    def __init__(self, norm: nn.Module, up: nn.Module, inner: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.inner, self.down = norm, up, inner, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.inner(self.up(self.norm(x)))))


class Job(Sealed):
    """A model of four halves (norm, up, inner, down), in one process and on ranks, where it may have a fault.

    Args:
        seed: What the fault is, where it is, and whether there is one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def whole(self) -> nn.Module:
        """Return the model of one process."""
        torch.manual_seed(self._seed)
        halves = [
            _Half(Scale(_WIDTH), nn.Linear(_WIDTH, _INNER), Scale(_INNER), nn.Linear(_INNER, _WIDTH)) for _ in range(4)
        ]
        return nn.Sequential(*halves)

    def split(self, group: dist.ProcessGroup) -> nn.Module:
        """Return this rank's part of the model, with modules of the same names."""
        kind, place, odd = _drawn(self._seed)
        t, rank, halves = group.size(), group.rank(), []
        cut = even_split(_INNER, t)
        for i, full in enumerate(self.whole()):
            here = kind if i == place else ""
            norm, mine = _Norm(full.norm.weight, _own_mean), cut.cut(full.inner.weight, 0, rank)
            if here == "own copy" and rank == odd % t:
                norm.weight.data += 0.1 * torch.rand(_WIDTH)

            def mean(x: Tensor, back: bool = here != "not summed back") -> Tensor:
                return _Total.apply(_own_mean(x), group, back) / t

            inner = _Norm(mine, _own_mean if here == "own mean" else mean)
            up, down = ColumnParallelLinear(full.up, cut, group), RowParallelLinear(full.down, cut, group)
            halves.append(_Half(norm, up, inner, down))
        return nn.Sequential(*halves)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a model for this job's data, the same on every rank."""
        x, y = _draw(self._seed, (2, 5, _WIDTH), (2, 5, _WIDTH))
        return (model(x.requires_grad_()) - y).square().mean()


def _drawn(seed: int) -> tuple[str, int, int]:
    """Return the kind of a job's fault, the half that has it, and the rank of a copy of its own."""
    dice = random.Random(f"job {seed}")
    return dice.choice(_KINDS), dice.randrange(4), dice.randrange(2)


def _jobs(seed: int | None) -> list[Job]:
    """Return eight jobs: each kind in an early and in a late half, and on either rank; two are healthy."""
    dice, found = random.Random(seed), {}
    while len(found) < 2 * len(_KINDS):
        job = Job(dice.randrange(10**6))
        kind, place, odd = _drawn(job._seed)
        found.setdefault((kind, odd if kind == "own copy" else place > 1), job)
    return list(found.values())


def _all_ranks() -> tuple[dist.ProcessGroup]:
    return (dist.group.WORLD,)


@check(
    idea="A fault is where right inputs meet a wrong result, forward or backward: all that follows is off as well.",
    section="Running and wrong: three faults that train",
    line="Hook every module of both models, compare outputs in the order of forward and then gradients of inputs in the "
    "order of backward, exchange over the ranks what is off, and name the first.",
    kind="fault",
)
def find_fault(answer: Callable[[Job, dist.ProcessGroup], Any], seed: int = 1) -> str:
    """Judge `find_fault(job, group)`: None, or (module, "forward" or "backward", ranks), on two ranks for eleven jobs."""
    jobs, tp = _jobs(seed) + _jobs(None)[-3:], 2  # no list has the last, and one of them is at fault
    found = ask_ranks(answer, tp, jobs, more=_all_ranks)
    for job, by_rank in zip(jobs, found, strict=True):
        kind, place, odd = _drawn(job._seed)
        said = agreed([_said(each) for each in by_rank])
        _judge_job(said, kind, place, [odd] if kind == "own copy" else [0, 1])
    return (
        f"{len(jobs)} jobs. Some norms over split values took the mean of their own part (so would OLMo 2's norm of q: Hugging "
        "Face's plan and vLLM gather q before it); some summed the squares, and not the gradient of that sum, which each rank "
        "uses for other values; and some ranks had a copy of their own of a weight that all should share."
    )


def _said(given: Any) -> tuple[str, str, list[int]] | None:
    if given is None:
        return None
    told = 'Return None for a healthy job, or (name of the module, "forward" or "backward", list of ranks).'
    parts = by_name(given, "module", "way", "ranks", otherwise=told)
    ranks = sorted({whole(r, "A rank") for r in numbers(parts["ranks"], "ranks")})
    module, way = (
        str.__str__(x).strip() if isinstance(x, str) else str(x)[:40] for x in map(parts.get, ("module", "way"))
    )
    refuse("", (told.rstrip("."), way.lower() not in ("forward", "backward")))
    return module, way.lower(), ranks


def _judge_job(said: tuple[str, str, list[int]] | None, kind: str, place: int, ranks: list[int]) -> None:
    module = f"{place}.{'norm' if kind == 'own copy' else 'inner'}"
    way = "backward" if kind == "not summed back" else "forward"
    if said is None or not kind:
        refuse("",
            (lambda: f"You name `{said[0]}` of a job that is healthy: its differences from one process have a norm below 1e-5 of "
             "the values' norm, as sums in another order make, and a fault one above 1e-3", said is not None),
            ("You find nothing in a job whose outputs are all those of one process: backward has faults of its own, so compare "
             "gradients as well", kind and way == "backward"),
            (f"You find nothing in a job in which a module of rank {ranks[0]} returns other values than one process", kind),
        )  # fmt: skip
        return
    name, theirs, where = said
    order = [f"{half}.{step}" for half in range(4) for step in _STEPS][:: 1 if way == "forward" else -1]
    refuse("",
        (f"`{name}` is a whole half, or no module: name {', '.join(_STEPS)} with its half, as `2.up`", name not in order),
        (f"The fault is in {way}, and you say {theirs}: what is wrong in forward makes gradients wrong too, and not the other "
         "way round", theirs != way),
        (f"You name `{name}`, which hands on right values in {way}: go on behind it", name in order[: order.index(module)]),
        (f"You name `{name}`, and its inputs are wrong already: name the module that gets right values and hands on wrong "
         f"ones, the first in the order of {way}", name != module),
        (f"The module is the right one, and your ranks, [{some(where)}], are not those whose values are off there: compare "
         "each rank's values with its part of one process", where != ranks),
    )  # fmt: skip
