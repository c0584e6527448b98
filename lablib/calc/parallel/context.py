"""Context parallelism in numbers: what each way sends and holds, and which degrees it allows.

All cp ranks hold s/c tokens of the same sequences; only attention needs the others' keys and values. By hand, c = 2 and
one sequence of 4 tokens with one head of width 3: a rank has 2 keys and 2 values of 3 numbers, 12 in all, and sends
them once. In general a rank sends for one attention, in values, with q = a d and k = a_kv d:

| way | forward | backward | at most |
|---|---|---|---|
| ring | 2bsk (c-1)/c, in c-1 messages | twice that: keys and values again, and their gradients | tokens |
| gathered | 2bsk (c-1)/c, an all-gather | the same, a reduce-scatter; again an all-gather with `regather` | tokens |
| ulysses | (2q + 2k) bs/c (c-1)/c, four all-to-alls | the same | heads |

The gradient of a rank's own keys never travels: the others' parts come home in c - 1 messages, as in a ring
reduce-scatter. (PyTorch and ring-flash-attention let it travel with them, c times.) Under tensor parallelism a rank has
1/tp of the heads: give those.

Who works when under a causal mask is in `causal`.

Sources: Liu et al. 2023 (arXiv 2310.01889), section 3; Jacobs et al. 2023 (arXiv 2309.14509), section 3; Grattafiori et
al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.communication import check_link, ring_all_gather_bytes
from lablib.calc.errors import check_flag, check_whole, must_divide, one_of
from lablib.calc.parallel.causal import ORDERS

#: Ways to bring queries and keys together.
WAYS = ("ring", "gathered", "ulysses")


@dataclass(frozen=True)
class AttentionTraffic:
    """What one rank sends for one attention.

    Attributes:
        forward: Bytes.
        backward: Bytes.
        forward_calls: How often it calls "send", "all_gather", "reduce_scatter" or "all_to_all". Keys and values are
            one tensor in a ring and in a gather; queries, keys, values and outputs are four in Ulysses.
        backward_calls: The same for backward.
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
        way: One of `WAYS`.
        seq: Tokens of the whole sequence, s.
        heads: Query heads of a rank before cp cuts them: a/tp.
        kv_heads: Key heads, likewise.
        value: Bytes of a number on the wire.
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

    Args:
        heads: Query heads of a rank before cp cuts them: a/tp.
        kv_heads: Key heads, likewise.
        value: Bytes of a number.
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
        kv_heads: Key heads of the model.
        order: One of `ORDERS`; Ulysses' ranks see every token, so it is not used there.
        replicate_kv: Ulysses only: also more ranks than key heads, each key head on several.
        most: Largest degree to look at.
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

    Args:
        way: "gathered" or "ring": with whom Ulysses is compared.
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

    Args:
        flops: F, FLOP/s that a rank reaches in attention.
        bandwidth: W, bytes per second that a rank sends, per direction.
        value: w, bytes of a number on the wire.
    """
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("value", value)):
        check_whole(name, size, 1)
    must_divide("kv_heads", kv_heads, "heads", heads)
    check_flag("causal", causal)
    check_link(2, flops=flops, bandwidth=bandwidth)
    return (2 if causal else 1) * value / 2 * flops / bandwidth * kv_heads / heads
