"""The check of head counts: which rows of the query, key and value weights each rank holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lablib.checks.report import Wrong, check


@check
def split_qkv(answer: Callable[[int, int, int, int], Sequence[tuple]], seed: int = 3) -> str:
    """Judge `split_qkv(num_heads, num_kv_heads, head_dim, tp)` by computing attention from each rank's rows."""
    dice = random.Random(seed)
    cases = [
        (4, 4, 8, 2),
        (8, 2, 4, 2),
        (8, 2, 4, 4),
        (64, 8, 2, 16),
        (25, 25, 2, 5),
        (6, 6, 4, 6),
        (8, 1, 4, 4),
    ]
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
                raise Wrong(
                    f"{where}: rank {rank} gets a piece of a {name} head. Cut at multiples of head_dim."
                )
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
            raise Wrong(
                f"{where}: rank {rank} lacks the key head of one of its queries and would have to ask for it."
            )
        least = max(1, kv // tp)
        if len(keys) > least:
            raise Wrong(
                f"{where}: rank {rank} holds {len(keys)} key heads; with neighbouring queries {least} will do."
            )
    dice = torch.Generator().manual_seed(heads)
    shapes = ((5, 6), (heads * width, 6), (kv * width, 6), (kv * width, 6))
    x, wq, wk, wv = (torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes)
    whole = _attend(x, wq, wk, wv, width)
    order = [head for queries, _ in held for head in queries]
    parts = torch.cat([_attend(x, wq[q], wk[k], wv[k], width) for q, k in ranks])
    if not torch.allclose(parts, whole[order], atol=1e-9):
        raise Wrong(f"{where}: a rank's queries meet the wrong key heads: keep groups together and in order.")


def _attend(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, width: int) -> Tensor:
    q, k, v = ((x @ w.T).unflatten(-1, (-1, width)).transpose(0, 1) for w in (wq, wk, wv))
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) / width**0.5, dim=-1) @ v
