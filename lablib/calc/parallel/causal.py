"""Causal masks cut among context-parallel ranks: who holds which tokens, computes how much, and waits for whom.

By hand: 4 tokens on 2 ranks. In contiguous order rank 0 has the tokens 0 and 1, which see 1 + 2 keys, and rank 1 has 2
and 3, which see 3 + 4. In a ring the first step takes 3 pairs on both ranks, on the diagonal; in the second rank 1 has 4
and rank 0 none. So the ring lasts for 7 pairs, and its ranks are busy for 10 of 14. Zigzag, 0 and 3 against 1 and 2:
both compute 3, then 2, and no rank waits.

    contiguous   c / (2c - 1)          zigzag   1          striped   (s + 1) / (s + c)          busy share of a ring

Sources: Brandon et al. 2023 (arXiv 2311.09431), section 3; Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from lablib.calc.errors import check_whole, must_divide, one_of

#: Which tokens a rank holds: the i-th part; the chunks i and 2c - 1 - i of 2c; every c-th token from i on.
ORDERS = ("contiguous", "zigzag", "striped")


def ring_work(cp: int, order: str, seq: int) -> list[list[int]]:
    """Return the pairs of a query and a key that each rank computes in each step of a ring under a causal mask.

    In step j rank i has the keys of rank i - j. Entry [j][i] counts the pairs with the key not behind the query.

    Args:
        order: One of `ORDERS`.
        seq: Tokens of the whole sequence; cp must divide it, 2 cp in zigzag order.
    """
    one_of("order", order, ORDERS)
    for name, size in (("cp", cp), ("seq", seq)):
        check_whole(name, size, 1)
    parts = 2 * cp if order == "zigzag" and cp > 1 else cp
    must_divide("2 cp" if parts > cp else "cp", parts, "seq", seq)
    size = seq // parts
    if order == "striped":
        # Between two stripes the n-th query sees n keys, or n - 1 if the keys' tokens come right behind the queries'.
        triangle = {True: size * (size + 1) // 2, False: size * (size - 1) // 2}
        return [[triangle[(rank - step) % cp <= rank] for rank in range(cp)] for step in range(cp)]

    def pairs(queries: int, keys: int) -> int:
        """Of two chunks, by their places in the sequence."""
        return size * size * (keys < queries) + size * (size + 1) // 2 * (keys == queries)

    chunks = [rank_chunks(cp, rank, order) for rank in range(cp)]
    return [
        [sum(pairs(q, k) for q in chunks[rank] for k in chunks[(rank - step) % cp]) for rank in range(cp)]
        for step in range(cp)
    ]


def rank_chunks(cp: int, rank: int, order: str) -> tuple[int, ...]:
    """Return the chunks of the sequence that a rank holds, by their places: one of cp, or two of 2 cp in zigzag order.

    One rank alone has the sequence as it is.

    Args:
        order: "contiguous" or "zigzag"; stripes are no chunks.
    """
    one_of("order", order, ("contiguous", "zigzag"))
    check_whole("cp", cp, 1)
    check_whole("rank", rank, 0, cp - 1)
    return (rank, 2 * cp - 1 - rank) if order == "zigzag" and cp > 1 else (rank,)


def token_owners(cp: int, order: str, seq: int) -> list[int]:
    """Return the rank that holds each token of a sequence.

    Args:
        order: One of `ORDERS`.
        seq: Tokens of the whole sequence; cp must divide it, 2 cp in zigzag order.
    """
    one_of("order", order, ORDERS)
    for name, size in (("cp", cp), ("seq", seq)):
        check_whole(name, size, 1)
    if order == "striped":
        must_divide("cp", cp, "seq", seq)
        return [token % cp for token in range(seq)]
    owners = {chunk: rank for rank in range(cp) for chunk in rank_chunks(cp, rank, order)}
    must_divide("2 cp" if len(owners) > cp else "cp", len(owners), "seq", seq)
    return [owners[token * len(owners) // seq] for token in range(seq)]


def busy_share(cp: int, order: str, *, seq: int | None = None) -> float:
    """Return the share of a ring's time in which its ranks compute, under a causal mask: all wait for the slowest.

    Contiguous: `c / (2c - 1)`, since only the last rank works in every step. Zigzag: 1. Striped: `(s + 1) / (s + c)`.

    Args:
        order: One of `ORDERS`.
        seq: Tokens of the whole sequence; None: so many that a block on the diagonal is exactly half.
    """
    if seq is None:
        one_of("order", order, ORDERS)
        check_whole("cp", cp, 1)
        return cp / (2 * cp - 1) if order == "contiguous" else 1.0
    work = ring_work(cp, order, seq)
    return sum(map(sum, work)) / cp / sum(map(max, work))


def causal_blocks(cp: int, order: str = "contiguous") -> list[float]:
    """Return the blocks of scores that each cp rank computes under a causal mask; a block on the diagonal is half.

    A block is the product of two parts of 1/cp of the sequence; sequences are long, so that all stripes are equal.

    Args:
        order: One of `ORDERS`.
    """
    one_of("order", order, ORDERS)
    check_whole("cp", cp, 1)
    return [i + 0.5 if order == "contiguous" else cp / 2 for i in range(cp)]


def causal_imbalance(cp: int) -> float:
    """Return the work of the last cp rank over the mean where each has one contiguous part: `2 - 1/c`."""
    blocks = causal_blocks(cp)
    return blocks[-1] / (sum(blocks) / cp)
