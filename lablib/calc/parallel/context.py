"""Context parallelism in numbers: what each way sends and holds, and which degrees it allows. Chapter 12.

A rank holds s/c tokens, and sends for one attention, in values, with q = a d and k = a_kv d:

| way | forward | backward | at most |
|---|---|---|---|
| ring | 2bsk (c-1)/c, in c-1 messages | twice that: keys and values again, and their gradients | tokens |
| gathered | 2bsk (c-1)/c, an all-gather | the same, a reduce-scatter; again an all-gather with `regather` | tokens |
| ulysses | (2q + 2k) bs/c (c-1)/c, four all-to-alls | the same | heads |

The gradient of a rank's own keys never travels, as in a ring reduce-scatter. (PyTorch and ring-flash-attention let it
travel, c times.) `heads` and `kv_heads` are those of a rank before cp cuts them, 1/tp of the model's; `value` is the bytes
of a number on the wire.

Sources: Liu et al. 2023 (arXiv 2310.01889), section 3; Jacobs et al. 2023 (arXiv 2309.14509), section 3; Grattafiori et
al. 2024 (arXiv 2407.21783), section 3.3.2; Brandon et al. 2023 (arXiv 2311.09431), section 3, for stripes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.communication import check_link, ring_all_gather_bytes
from lablib.calc.errors import check_flag, check_whole, must_divide, one_of

#: Ways to bring queries and keys together.
WAYS = ("ring", "gathered", "ulysses")

#: Which tokens a rank holds: the i-th part; the chunks i and 2c - 1 - i of 2c; every c-th token from i on.
ORDERS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class AttentionTraffic:
    """What one rank sends for one attention.

    Attributes:
        forward_calls: How often it calls "send", "all_gather", "reduce_scatter" or "all_to_all". Keys and values are
            one tensor in a ring and in a gather; queries, keys, values and outputs are four in Ulysses.
        messages: Messages of both: one a send, c - 1 a collective.
    """

    forward: float
    backward: float
    forward_calls: dict[str, int]
    backward_calls: dict[str, int]
    messages: int

    @property
    def total(self) -> float:
        """Bytes of forward and backward."""
        return self.forward + self.backward


def attention_traffic(
    way: str,
    *,
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cp: int,
    value: int = 2,
    gradient_value: int | None = None,
    regather: bool = False,
) -> AttentionTraffic:
    """Return the bytes and messages that a rank sends for one attention, forward and backward.

    Ulysses with more ranks than key heads sends each rank the one key head that its queries read.

    Args:
        seq: Tokens of the whole sequence, s.
        gradient_value: Bytes of a number of the gradients of keys and values on their way home; None: `value`.
        regather: "gathered" only: gather keys and values again in backward, and keep the rank's own alone.
    """
    q, k = _widths(way, batch, seq, heads, kv_heads, head_dim, cp)
    check_flag("regather", regather)
    gradient_value = value if gradient_value is None else gradient_value
    for name, size in (("value", value), ("gradient_value", gradient_value)):
        check_whole(name, size, 1)
    around = ring_all_gather_bytes(2 * batch * seq * k, cp)  # keys and values of all ranks, once past everybody
    rounds = cp - 1
    if way == "ulysses":
        exchanged = ring_all_gather_bytes(batch * seq * (2 * q + 2 * k) / cp, cp) * value
        calls = {"all_to_all": 4} if rounds else {}
        return AttentionTraffic(exchanged, exchanged, calls, dict(calls), 8 * rounds)
    forward, home = around * value, around * gradient_value
    if way == "ring":
        sends = {"send": rounds} if rounds else {}
        return AttentionTraffic(
            forward, forward + home, sends, {op: 2 * number for op, number in sends.items()}, 3 * rounds
        )
    again = {"all_gather": 1} if regather else {}
    calls = ({"all_gather": 1}, {**again, "reduce_scatter": 1}) if rounds else ({}, {})
    return AttentionTraffic(forward, regather * forward + home, *calls, (2 + regather) * rounds)


def context_buffers(
    way: str, *, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, cp: int, value: int = 2
) -> float:
    """Return the bytes that a rank holds during forward of one attention beyond its own queries, keys, values, outputs.

    A ring holds the block at work and the one that arrives, a gather all blocks of the others, and Ulysses all four
    tensors a second time, cut by heads.
    """
    q, k = _widths(way, batch, seq, heads, kv_heads, head_dim, cp)
    check_whole("value", value, 1)
    tokens = batch * seq / cp
    if way == "ulysses":
        return tokens * (2 * q + 2 * k) * value if cp > 1 else 0.0
    blocks = min(2, cp - 1) if way == "ring" else cp - 1
    return blocks * tokens * 2 * k * value


def _widths(way: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, cp: int) -> tuple[int, int]:
    """Return the widths of all query heads and of all key heads that are sent, after checking every size."""
    one_of("way", way, WAYS)
    sizes = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "cp": cp}
    for name, size in sizes.items():
        check_whole(name, size, 1)
    must_divide("kv_heads", kv_heads, "heads", heads)
    must_divide("cp", cp, "seq", seq)
    if way == "ulysses":
        must_divide("cp", cp, "heads", heads)
        if cp > kv_heads:
            must_divide("kv_heads", kv_heads, "cp", cp)
        else:
            must_divide("cp", cp, "kv_heads", kv_heads)
        kv_heads = max(kv_heads, cp)
    return heads * head_dim, kv_heads * head_dim


def context_degrees(
    way: str,
    *,
    seq: int,
    heads: int,
    kv_heads: int,
    tp: int = 1,
    order: str = "zigzag",
    replicate_kv: bool = False,
    most: int = 64,
) -> list[int]:
    """Return the degrees of cp that a way allows, ascending.

    A ring and a gather need equal parts of the sequence, zigzag equal chunks, two a rank. Ulysses needs equal parts of
    the sequence before and after attention, whatever the order, and whole heads in between.

    Args:
        heads: Query heads of the model; tp takes its part of them first.
        replicate_kv: Ulysses only: also more ranks than key heads, each key head on several.
    """
    one_of("way", way, WAYS)
    one_of("order", order, ORDERS)
    check_flag("replicate_kv", replicate_kv)
    sizes = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "tp": tp, "most": most}
    for name, size in sizes.items():
        check_whole(name, size, 1)
    must_divide("kv_heads", kv_heads, "heads", heads)
    must_divide("tp", tp, "kv_heads", kv_heads)
    queries, keys = heads // tp, kv_heads // tp
    if way != "ulysses":
        parts = 2 if order == "zigzag" else 1
        return [cp for cp in range(1, most + 1) if cp == 1 or seq % (parts * cp) == 0]
    whole = [cp for cp in range(1, most + 1) if seq % cp == 0 and queries % cp == 0]
    return [cp for cp in whole if keys % cp == 0 or (replicate_kv and cp % keys == 0)]


def ulysses_crossover(heads: int, kv_heads: int, way: str = "gathered") -> float:
    """Return the degree of cp above which Ulysses sends fewer bytes than a gather, `g + 1`, or a ring, `2 (g + 1) / 3`.

    g = heads / kv_heads. Ulysses' bytes fall with cp and those of the others do not, but it moves queries and outputs
    too, which are g times as wide as keys. Valid up to `kv_heads` ranks.
    """
    one_of("way", way, ("gathered", "ring"))
    for name, size in (("heads", heads), ("kv_heads", kv_heads)):
        check_whole(name, size, 1)
    must_divide("kv_heads", kv_heads, "heads", heads)
    both = heads / kv_heads + 1
    return both if way == "gathered" else 2 * both / 3


def ring_hiding_tokens(
    *, heads: int, kv_heads: int, flops: float, bandwidth: float, value: int = 2, causal: bool = True
) -> float:
    """Return the tokens on a rank, s/c, from which a ring's transfers hide behind its compute in forward.

    A step multiplies s/c queries with s/c keys, `4 b (s/c)² q` FLOPs, or half of them under a causal mask in zigzag
    order; meanwhile `2 b (s/c) k` values travel. So `s/c >= w/2 · F/W · a_kv/a`, twice that under a causal mask.
    Liu et al. 2023, section 3, with a_kv = a, two bytes and no mask: F/W.
    """
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("value", value)):
        check_whole(name, size, 1)
    must_divide("kv_heads", kv_heads, "heads", heads)
    check_flag("causal", causal)
    check_link(2, flops=flops, bandwidth=bandwidth)
    return (2 if causal else 1) * value / 2 * flops / bandwidth * kv_heads / heads


def ring_work(cp: int, order: str, seq: int) -> list[list[int]]:
    """Return the pairs of a query and a key that each rank computes in each step of a ring under a causal mask.

    In step j rank i has the keys of rank i - j. Entry [j][i] counts the pairs with the key not behind the query.

    Args:
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


def rank_tokens(cp: int, rank: int, order: str, seq: int) -> list[range]:
    """Return the tokens of a sequence that a rank holds, a range for each of its chunks; arguments as `rank_chunks`."""
    chunks = rank_chunks(cp, rank, order)
    parts = cp * len(chunks)
    must_divide("2 cp" if parts > cp else "cp", parts, "seq", seq)
    size = seq // parts
    return [range(chunk * size, (chunk + 1) * size) for chunk in chunks]


def token_owners(cp: int, order: str, seq: int) -> list[int]:
    """Return the rank that holds each token of a sequence.

    Args:
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
    """
    one_of("order", order, ORDERS)
    check_whole("cp", cp, 1)
    return [i + 0.5 if order == "contiguous" else cp / 2 for i in range(cp)]


def causal_imbalance(cp: int) -> float:
    """Return the work of the last cp rank over the mean where each has one contiguous part: `2 - 1/c`."""
    blocks = causal_blocks(cp)
    return blocks[-1] / (sum(blocks) / cp)
