"""The checks of rung 12: merging two parts of a softmax, what a rank holds, one loss, what is sent, and how to split.

Parts of attention are made from drawn scores, so what their merge must be is known from the scores of both together.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lablib.calc.parallel import WAYS, attention_traffic, context_buffers, context_degrees
from lablib.checks.judging import (
    Wrong,
    by_name,
    check,
    chosen,
    close,
    close_bytes,
    numbers,
    pair,
    recognize,
    refuse,
    whole,
)

__all__ = ["choose_split", "global_loss", "held_positions", "merge", "sent_bytes"]


# --- two parts of a softmax ---------------------------------------------------------------------------------

Part = tuple[Tensor, Tensor]


def _attend(scores: Tensor, values: Tensor) -> Part:
    """Return what a block gives to each row, and the log of its sum of exponentials: nothing where all is masked."""
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return weights @ values, lse


def _parts() -> list[tuple[str, Part, Part, Part]]:
    """Return cases: what is special in them, two parts, and what both together give."""
    # By hand: sums 2 and 6, outputs 5 and 1. No two mistakes give the same number.
    hand = [torch.tensor([[number]], dtype=torch.float64) for number in (math.log(2), math.log(6), 5.0, 1.0)]
    both = _attend(torch.cat(hand[:2], dim=1), torch.cat(hand[2:]))
    cases = [("one row by hand", _attend(hand[0], hand[2]), _attend(hand[1], hand[3]), both)]
    dice = torch.Generator().manual_seed(12)
    kinds = ("two blocks of random scores", "scores of about 1,000", "rows that see nothing in a block",
             "blocks in which no row sees anything")  # fmt: skip
    for kind in kinds:
        scores = 3 * torch.randn(5, 7, generator=dice, dtype=torch.float64)
        values = torch.randn(7, 4, generator=dice, dtype=torch.float64)
        if kind == kinds[1]:
            scores[::2] += 1000
            scores[1, :3] -= 2000
            scores[3, 3:] -= 2000
        if kind == kinds[2]:
            scores[0, :3] = scores[1, 3:] = scores[4, 3:] = -math.inf
        if kind == kinds[3]:
            scores[:] = -math.inf
        first, second = _attend(scores[:, :3], values[:3]), _attend(scores[:, 3:], values[3:])
        cases.append((kind, first, second, _attend(scores, values)))
    return cases


@check(
    idea="Each part is a mean that was divided by its own sum of exponentials, and exp(lse) is that sum.",
    section="Softmax of one row whose keys lie on two ranks",
    line="The new lse is the larger of both plus log(exp(a - larger) + exp(b - larger)), and an output weighs "
    "exp(its lse - new lse); where both are -inf nothing is subtracted.",
)
def merge(answer: Callable[[Part, Part], Part]) -> str:
    """Judge `merge(a, b)` of two pairs (out, lse) by attention over both blocks at once."""
    cases = _parts()
    for kind, a, b, truth in cases:
        given = [tuple(each.clone() for each in part) for part in (a, b)]
        try:
            got = answer(*given)
        except (OverflowError, ZeroDivisionError, ValueError) as error:
            if kind == cases[0][0]:
                raise
            raise Wrong(_not_a_number(kind, type(error).__name__)) from None
        _judge_merge(got, a, b, truth, kind)
    return f"{len(cases)} pairs of blocks, scores of about 1,000 and rows that see nothing among them."


def _judge_merge(got: Any, a: Part, b: Part, truth: Part, kind: str) -> None:
    otherwise = "Return a pair, like the two that you were given: the output, and the log of the sum of exponentials."
    parts = zip(pair(got, otherwise, "out", "lse"), ("The output", "lse"), strict=True)
    out, lse = (_tensor(each, name) for each, name in parts)
    if (out.numel(), lse.numel()) != (truth[0].numel(), truth[1].numel()):
        raise Wrong(f"For rows of width {truth[0].shape[1]} return an output of shape {tuple(truth[0].shape)}, and one "
                    f"lse a row; yours have the shapes {tuple(out.shape)} and {tuple(lse.shape)}.")  # fmt: skip
    if out.shape == truth[1].shape and lse.shape == truth[0].shape != truth[1].shape:
        raise Wrong("The output comes first, then lse.")
    out, lse = out.reshape(truth[0].shape), lse.reshape(truth[1].shape)
    if out.isnan().any() or lse.isnan().any() or (lse == math.inf).any() or out.isinf().any():
        raise Wrong(_not_a_number(kind))
    (out_a, lse_a), (out_b, lse_b) = a, b
    larger = torch.maximum(lse_a, lse_b)
    near = _within(truth[1])
    if not near(lse, truth[1]):
        if "no row" in kind:
            raise Wrong(f"Both lse are -inf, the log of a sum of nothing; merged it still is, and yours is {_shown(lse)} "
                        f"({kind}).")  # fmt: skip
        _refuse_half(lse, truth[1], "lse")
        slips = [
            ("These are the sums of exponentials; lse is the logarithm of their sum", lse_a.exp() + lse_b.exp()),
            ("The two lse are added, which multiplies the sums: exp(lse) is what adds up", lse_a + lse_b),
            ("The larger lse is kept, so the keys of the other block are lost", larger),
            ("The two lse are averaged: the sums of exponentials add up", (lse_a + lse_b) / 2),
            ("This logarithm is of base 2; the scores are exponents of e", truth[1] / math.log(2)),
            ("The sums are averaged: they are two parts of one sum", truth[1] - math.log(2)),
            ("The largest lse of all rows is subtracted, and exp() of a far smaller one is 0: each row has its own",
             _with_one_maximum(lse_a, lse_b)),
        ]  # fmt: skip
        recognize(lse, kind, slips, near)
        raise Wrong(f"lse must be the log of exp(lse of a) + exp(lse of b): {_shown(truth[1])}, and yours is "
                    f"{_shown(lse)} ({kind}).")  # fmt: skip
    if near(out, truth[0]):
        return
    _refuse_half(out, truth[0], "The output")
    weigh_a, weigh_b = ((each - truth[1]).exp().nan_to_num(0.0).unsqueeze(-1) for each in (lse_a, lse_b))
    total = (lse_a.exp() + lse_b.exp()).unsqueeze(-1)
    score_a, score_b = lse_a.unsqueeze(-1), lse_b.unsqueeze(-1)
    slips = [
        ("The outputs are averaged; a block with large scores must count for more", (out_a + out_b) / 2),
        ("The outputs are added. Each is divided by its own sum: weigh it by its share of both sums", out_a + out_b),
        ("The weights are exchanged: a's output weighs exp(lse of a) over both", weigh_b * out_a + weigh_a * out_b),
        ("The weights are the lse themselves; a block's weight is exp(lse), its sum of exponentials",
         (score_a * out_a + score_b * out_b) / (score_a + score_b)),
        ("The outputs are weighed and not divided by the new sum", total * truth[0]),
        ("The block with the larger sum takes all; both blocks have a share", torch.where(score_a >= score_b, out_a, out_b)),
        ("The larger output is kept; both blocks have a share", torch.maximum(out_a, out_b)),
        ("The division by the new sum is missing", truth[0] * (truth[1] - larger).exp().unsqueeze(-1)),
    ]  # fmt: skip
    recognize(out, kind, [(f"lse is right. {sentence}", slip) for sentence, slip in slips], near)
    raise Wrong(f"lse is right, and the output is not: each output weighs exp(its lse - new lse) ({kind}).")


def _with_one_maximum(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    largest = torch.maximum(lse_a, lse_b).max()
    return largest + ((lse_a - largest).exp() + (lse_b - largest).exp()).log()


def _not_a_number(kind: str, error: str = "") -> str:
    what = f"the result {f'stops with {error}' if error else 'is not a number'}"
    if "1,000" in kind:
        return (f"With {kind} {what}: exp(1,000) is more than a float can hold, and exp(-1,000) is zero. Subtract the larger "
                "of both lse before the exponential.")  # fmt: skip
    if "nothing" in kind:
        return f"With {kind} {what}: there lse is -inf and its weight is zero, so the result must be the other part."
    if "no row" in kind:
        return (f"With {kind} {what}: both lse are -inf, and -inf minus -inf is undefined. Nothing merged with nothing is "
                "output 0 and lse -inf.")  # fmt: skip
    return f"{what.capitalize()} ({kind})."


def _within(lse: Tensor) -> Callable[[Tensor, Tensor], bool]:
    """Return what takes numbers in single precision for right; a mistake is larger by far.

    fp32 rounds an lse by 2**-24 of itself. Three such roundings meet in a weight, and outputs are at most 5.
    """
    slack = 1e-5 + 2**-20 * float(lse.nan_to_num(0.0, neginf=0.0).abs().max())
    return lambda got, truth: torch.allclose(got, truth, atol=slack, rtol=1e-5)


def _refuse_half(got: Tensor, truth: Tensor, name: str) -> None:
    """Raise `Wrong` for a right number in half precision: the first case has numbers of about one."""
    if torch.allclose(got, truth, atol=1e-2, rtol=0):
        raise Wrong(f"{name} is right to two or three digits: as many parts are merged as there are ranks, so keep fp32 or "
                    "wider.")  # fmt: skip


def _shown(lse: Tensor) -> str:
    return ", ".join(f"{each:.3g}" for each in lse.tolist()[:3]) + (", ..." if len(lse) > 3 else "")


def _tensor(value: Any, what: str) -> Tensor:
    """Return numbers as a tensor, whatever holds them: tensors, arrays, lists of either."""

    def plain(each: Any) -> Any:
        if hasattr(each, "tolist"):
            return each.tolist()
        return [plain(inner) for inner in each] if isinstance(each, list | tuple) else each

    try:
        return torch.tensor(plain(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{what} should be a tensor, an array or a list of numbers.") from None


# --- which tokens a rank holds ------------------------------------------------------------------------------


def _pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return how many scores of a block lie under a causal mask."""
    return sum(key <= query for query in queries for key in keys)


@check(
    idea="Under a causal mask a late token has many keys and an early one few, so each rank needs both kinds.",
    section="Causal balance: contiguous, zigzag, striped",
    line="Cut the sequence into 2 cp chunks of seq / (2 cp) positions; rank r has chunk r and chunk 2 cp - 1 - r.",
)
def held_positions(answer: Callable[[int, int, int], Sequence[int]]) -> str:
    """Judge `held_positions(seq, cp, rank)` by the scores that each rank computes, in all and in every step of a ring."""
    cases = [(8, 2), (16, 4), (12, 3), (24, 4), (6, 1), (20, 5), (32, 8)]
    for seq, cp in cases:
        try:
            ranks = [_listed(answer(seq, cp, rank), cp, rank) for rank in range(cp)]
        except ValueError:
            raise Wrong(
                f"seq={seq} and cp={cp} are possible, and you refuse them: 2 cp = {2 * cp} divides {seq}."
            ) from None
        _judge_positions(ranks, seq, cp)
    for seq, cp in ((10, 2), (12, 4), (9, 3), (4, 4)):
        try:
            answer(seq, cp, 0)
        except ValueError:
            continue
        except (NotImplementedError, Wrong):
            raise
        except Exception as error:
            raise Wrong(f"seq={seq} has no {2 * cp} equal chunks for cp={cp}, and you stop with {type(error).__name__}: ask "
                        "whether they come out even, and raise a ValueError that says so.") from None  # fmt: skip
        raise Wrong(f"seq={seq} cannot be cut into {2 * cp} equal chunks for cp={cp}: raise a ValueError, or the ranks "
                    "wait for the longest chunk, or tokens are lost.")  # fmt: skip
    return f"{len(cases)} sequences: as many scores on every rank, in all and in every step of the ring."


def _listed(positions: Any, cp: int, rank: int) -> list[int]:
    held = numbers(positions, "What a rank holds")
    if held and all(hasattr(each, "__len__") for each in held):
        raise Wrong(f"Rank {rank} of {cp} returns {len(held)} pieces: put their positions into one list.")
    if held and all(isinstance(each, bool) for each in held):
        raise Wrong("These are truth values: return the positions themselves.")
    return [whole(each, "A position") for each in held]


def _judge_positions(ranks: list[list[int]], seq: int, cp: int) -> None:
    case, width = f"seq={seq}, cp={cp}", seq // (2 * cp)
    right = [[*range(r * width, (r + 1) * width), *range(seq - (r + 1) * width, seq - r * width)] for r in range(cp)]
    parts = [list(range(r * seq // cp, (r + 1) * seq // cp)) for r in range(cp)]
    given = [sorted(held) for held in ranks]
    if given == right:
        return
    every, count = [position for held in ranks for position in held], Counter()
    count.update(every)
    work = [sum(position + 1 for position in held) for held in ranks]
    refuse(
        case,
        ("These are the numbers of the chunks; return the positions in them",
         width > 1 and given == [[r, 2 * cp - 1 - r] for r in range(cp)]),
        (lambda: f"A rank holds position {max(every, key=abs)}, and they go from 0 to {seq - 1}",
         any(not 0 <= position < seq for position in every)),
        (lambda: f"Position {min(p for p in every if count[p] > 1)} is held twice: each token has one rank, and it would "
         "count twice in the loss", len(every) != len(count)),
        (lambda: f"Nobody holds position {min(set(range(seq)) - set(every))}: all {seq} must be dealt out",
         len(every) < seq),
        (f"Each rank has one contiguous part, so the last one computes {work[-1]} scores under the mask and the first "
         f"{work[0]}: all wait for the last", given == parts),
        (f"The ranks hold unequal numbers of tokens: {list(map(len, ranks))}", len(set(map(len, ranks))) > 1),
        (f"The ranks compute {work} scores under the causal mask: an early chunk belongs to a late one, so that all come "
         "out equal", len(set(work)) > 1),
    )  # fmt: skip
    for step in range(cp):
        scores = [_pairs(ranks[r], ranks[(r - step) % cp]) for r in range(cp)]
        told = f"In all the ranks compute equally many scores, but in step {step} of the ring {scores}, and in every step all"
        refuse(case, (f"{told} wait for the slowest: give each rank two whole chunks", len(set(scores)) > 1))
    refuse(
        case,
        (f"Equally many scores everywhere, but rank 0 holds {len(ranks[0])} tokens in more than two pieces: give each rank "
         "two whole chunks, so that most blocks are free of the mask or empty",
         any(len({position // width for position in held}) > 2 for held in ranks)),
        ("The pairs of chunks are right, and on other ranks than asked: rank 0 has the first chunk and the last, rank 1 "
         "their neighbours", True),
    )  # fmt: skip


# --- one loss for all ranks ---------------------------------------------------------------------------------


@check(
    idea="The loss of one process is a mean over tokens, and ranks have unequally many, so a mean over ranks is another.",
    section="Positions, labels, mean, documents, gradients: what changes outside of attention",
    line="Divide the sum of all sums by the sum of all counts; averaging divides by the ranks, so the factor is ranks over "
    "the sum of all counts.",
)
def global_loss(answer: Callable[[Sequence[float], Sequence[int]], tuple[float, float]], seed: int = 12) -> str:
    """Judge `global_loss(sums, counts)`: the mean over all tokens, and what a rank's sum is multiplied by."""
    dice = random.Random(seed)
    # By hand no two mistakes give the same number.
    cases: list[tuple[list[float], list[int]]] = [([6.0, 8.0], [3, 2]), ([5.0, 0.0, 9.0], [4, 0, 3]), ([3.0], [2])]
    for _ in range(20):
        counts = [dice.choice((0, dice.randint(1, 9), dice.randint(1, 4096))) for _ in range(dice.randint(2, 9))]
        counts[0] = counts[0] or 5
        cases.append(([count * dice.uniform(0.5, 11) for count in counts], counts))
    for sums, counts in cases:
        try:
            got = answer(list(sums), list(counts))
        except ZeroDivisionError:
            raise Wrong(f"A rank whose tokens are all padding has count 0, and you divide by it: only the sum of all "
                        f"counts is divided by ({_of(sums, counts)}).") from None  # fmt: skip
        _judge_loss(got, sums, counts)
    return f"{len(cases)} cases with unequal counts: the loss and the gradient of one process."


def _of(sums: list[float], counts: list[int]) -> str:
    return f"sums {[round(each, 2) for each in sums]}, counts {counts}" if len(sums) < 5 else f"{len(sums)} ranks"


def _judge_loss(got: Any, sums: list[float], counts: list[int]) -> None:
    otherwise = "Return a pair: the loss of all tokens, and the factor of a rank's own sum."
    loss, factor = pair(got, otherwise, "loss", "factor")
    case, n, total = _of(sums, counts), len(sums), sum(counts)
    truth, right = sum(sums) / total, n / total
    means = [each / count for each, count in zip(sums, counts, strict=True) if count]
    if not close(loss, truth):
        slips = [
            ("This is the mean of the ranks' means, where tokens of few count for more", sum(means) / len(means)),
            ("This is a mean of means in which a rank without tokens counts as loss 0", sum(means) / n),
            ("This is the sum over all ranks; divide it by the tokens of all ranks", sum(sums)),
            ("The sum is divided by the number of ranks; it is a mean over tokens", sum(sums) / n),
            ("The means of the ranks are added up: the loss would grow with cp", sum(means)),
            ("The loss is divided by the ranks as well: the sum over all ranks over all tokens is the mean", truth / n),
            ("This is the loss of rank 0 alone", sums[0] / counts[0]),
        ]  # fmt: skip
        recognize(loss, case, slips)
        refuse("", ("The loss comes first, then the factor", close(loss, right) and close(factor, truth)))
        raise Wrong(f"The loss is {truth:.6g}, the sum over all ranks by the tokens of all ranks, and not {float(loss):.6g} "
                    f"({case}).")  # fmt: skip
    if isinstance(factor, list | tuple) or getattr(factor, "ndim", 0):
        raise Wrong("The loss is right. One factor is asked: it is the same on every rank.")
    if close(factor, right):
        return
    slips = [
        (
            f"With this factor a *sum* over the ranks would be right; averaging divides by the {n} ranks once more",
            1 / total,
        ),
        ("With this factor each rank trains on its own mean", 1 / counts[0]),
        ("Backward of the plain sums gives a gradient that grows with the tokens", 1.0),
        ("This divides by the ranks a second time: the average does that already", 1 / n),
        (
            "Divided by both: averaging divides by the ranks already, so their number belongs above the line",
            1 / (n * total),
        ),
        ("Ranks without a label take part in the average too", len(means) / total),
        ("This is upside down", total / n),
        ("The tokens of all ranks are not divided by", float(n)),
    ]
    recognize(factor, case, [(f"The loss is right. {sentence}", slip) for sentence, slip in slips])
    raise Wrong(f"The loss is right, and the factor is {right:.6g}: after the average over {n} ranks each sum must have been "
                f"divided by {total} ({case}).")  # fmt: skip


# --- what each way sends ------------------------------------------------------------------------------------

#: The first case: no two mistakes of `_slips` give the same number for a way, which a test holds.
FIRST = (60, 70, 10, 12, 5)


def _sizes(case: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("seq", "heads", "kv_heads", "head_dim", "cp"), case, strict=True)) | {"batch": 1}


def _slips(way: str, seq: int, heads: int, kv_heads: int, head_dim: int, cp: int) -> list[tuple[str, float]]:
    """What to say of a mistake, and what it makes of the right number of bytes."""
    n, group = cp, heads / kv_heads
    narrow = "Keys and values have kv_heads heads; only queries and outputs have all of them"
    general = [
        (f"A rank's own part never travels: of {n} parts {n - 1} leave, or pass by", n / (n - 1)),
        ("Twice too many: two bytes carry a number, and what arrives was sent by another rank", 2.0),
        ("This is divided by cp once too often", 1 / n),
        ("Return bytes, not MB", 1e-6), ("Return bytes, not GB", 1e-9),
        ("A rank sends parts of s/c tokens, not the keys of the whole sequence to each", n * n / (n - 1)),
    ]  # fmt: skip
    around = [(narrow, group), ("This is what all ranks send together; one rank is asked", float(n))]
    own = {
        "ring": [*around,
            ("This is half: keys and values both travel, and two bytes carry each number", 1 / 2),
            ("This is forward alone: in backward keys and values go round again, and their gradients come home", 1 / 3),
            ("Backward needs more than one round: the keys and values again, since nobody kept them, and the gradients of "
             "both", 2 / 3),
            ("The gradients of a rank's own keys come in c - 1 messages, not c", (3 * n - 2) / (3 * (n - 1))),
            ("PyTorch sends the gradients c times, in fp32; here it is c - 1 times, in two bytes", (4 * n - 2) / (3 * (n - 1))),
            ("This is a third too much, as a fourth round or gradients in fp32 would be. There are three rounds, keys and values "
             "forward, the same again backward, and the gradients of both, all in two bytes a number", 4 / 3),
            ("A block goes on c - 1 times, until every rank has seen it", 1 / (n - 1)),
        ],
        "gathered": [*around,
            ("This is half: keys and values both travel, in forward and as gradients in backward, and two bytes carry each "
             "number", 1 / 2),
            ("This is half as much again, as a second gather, an all-reduce or gradients in fp32 would be: what was gathered is "
             "kept, and backward reduce-scatters the gradients once, in two bytes a number", 3 / 2),
            ("A reduce-scatter of the gradients of keys and values sends as much as the all-gather did", 3 / 4),
        ],
        "ulysses": [
            ("This is half: four tensors in forward and four in backward, and two bytes carry each number", 1 / 2),
            ("Keys and values have kv_heads heads, and queries and outputs all of them: two tensors of each width travel",
             (1 + 2 * group) / (2 + 2 * group)),
            (narrow, 2 * group / (1 + group)),
            ("Queries, keys and values travel, and the output travels back", (group + 2) / (2 * group + 2)),
            ("Keys and values are counted; queries and outputs travel as well", 1 / (group + 1)),
            ("Queries and outputs are counted; keys and values travel as well", group / (group + 1)),
            ("A rank has s/c tokens before the exchange, and sends of them all heads but its own", float(n)),
        ],
    }[way]  # fmt: skip
    return [(sentence, change) for sentence, change in own + general if abs(change - 1) > 1e-3]


@check(
    idea="Count tensors of s/c tokens: how wide each is, how often one leaves the rank, and in which direction of training.",
    section="Ring, all-gather, Ulysses: bytes, messages, memory, limits",
    line="In units of seq/cp tokens times cp - 1: a ring sends 6 key widths, a gather 4, Ulysses 4 query and 4 key widths "
    "over cp.",
)
def sent_bytes(answer: Callable[..., Mapping[str, float]], seed: int = 12) -> str:
    """Judge `sent_bytes(seq, heads, kv_heads, head_dim, cp)` for the three ways, forward and backward together."""
    dice = random.Random(seed)
    cases = [FIRST, (8, 2, 2, 3, 2), (8192, 32, 8, 128, 8), (64, 4, 4, 8, 1)]
    for _ in range(16):
        kv = dice.choice((2, 4, 6, 8, 12))
        cp = dice.choice([c for c in (2, 3, 4, 6, 8) if kv % c == 0])
        cases.append((cp * dice.randint(1, 4000), kv * dice.randint(1, 8), kv, dice.choice((64, 96, 128)), cp))
    for case in cases:
        _judge_sent(answer(*case), case)
    return f"{len(cases)} attentions: what a rank sends in a ring, a gather and Ulysses."


def _judge_sent(got: Any, case: tuple[int, ...]) -> None:
    got = by_name(got, *WAYS)
    shown = "seq={}, heads={}, kv_heads={}, head_dim={}, cp={}".format(*case)
    for way in WAYS:
        truth = attention_traffic(way, **_sizes(case)).total
        if not close_bytes(got[way], truth):
            told = f"{way}, {shown}"
            refuse(told, ("One rank has all tokens and sends nothing", case[-1] == 1))
            recognize(got[way], told, [(sentence, truth * change) for sentence, change in _slips(way, *case)])
            raise Wrong(f"With {way} a rank sends {truth:,.0f} bytes and not {float(got[way]):,.0f}, which no usual mistake "
                        f"gives ({shown}).")  # fmt: skip


# --- how to split -------------------------------------------------------------------------------------------

_KEYS = ("possible", "way", "order", "sent", "averaged_over")

Job = dict[str, int | bool]

#: What the buffers of a way hold.
_HELD = {
    "ring": "keys and values of two blocks, or of one if cp is 2",
    "gathered": "keys and values of the other ranks",
    "ulysses": "queries, keys, values and outputs once more",
}


def _jobs(dice: random.Random) -> list[Job]:
    """Return jobs: some of known models, and drawn ones in which each way is the best for some."""
    mib = 2**20
    big, small = {"head_dim": 128, "causal": True, "dp": 4}, {"head_dim": 128, "causal": True, "dp": 2}
    jobs: list[Job] = [
        # Groups of five: at cp 4 a gather sends less than Ulysses, at cp 8 more. cp, dp and the group differ for mistakes.
        small | {"seq": 2**17, "heads": 40, "kv_heads": 8, "tp": 1, "cp": 4, "dp": 3, "room": 2**40},
        small | {"seq": 2**17, "heads": 40, "kv_heads": 8, "tp": 1, "cp": 8, "dp": 3, "room": 2**40},
        # tp has taken the key heads.
        big | {"seq": 2**17, "heads": 128, "kv_heads": 8, "tp": 8, "cp": 16, "room": 2**40},
        big | {"seq": 2**20, "heads": 128, "kv_heads": 8, "tp": 8, "cp": 16, "room": 100 * mib},
        # cp = 6 divides 8 heads in no way; a mask that is not causal.
        small | {"seq": 6 * 2**12, "heads": 32, "kv_heads": 8, "tp": 1, "cp": 6, "room": 2**40, "causal": False},
        # The sequence has cp equal parts and not 2 cp; and none at all.
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 16, "tp": 2, "cp": 4, "room": 2**40},
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 4, "tp": 2, "cp": 4, "room": 2**40},
        small | {"seq": 4 * 1001, "heads": 16, "kv_heads": 4, "tp": 2, "cp": 4, "room": 2**40, "causal": False},
        small | {"seq": 4 * 1001 + 2, "heads": 16, "kv_heads": 16, "tp": 2, "cp": 4, "room": 2**40, "causal": False},
    ]
    # Room for all but one byte of what each way needs, 4, 6 and 8 blocks of keys: a block less would fit.
    edge = small | {"seq": 2**17, "heads": 24, "kv_heads": 8, "tp": 1, "cp": 4}
    jobs += [edge | {"room": int(context_buffers(way, **_on_a_rank(edge))) - 1} for way in WAYS]
    jobs.append(edge | {"cp": 2, "room": int(context_buffers("ring", **_on_a_rank(edge | {"cp": 2})))})  # one block
    while len(jobs) < 44:
        cp, tp = dice.choice((2, 3, 4, 8, 16)), dice.choice((1, 2, 4))
        kv = tp * dice.choice((1, 2, 3, 4, 8, 16))
        job: Job = {"seq": cp * dice.choice((2, 2, 2, 1)) * dice.randint(64, 9999), "heads": kv * dice.randint(1, 8)}
        job |= {"kv_heads": kv, "head_dim": dice.choice((64, 128)), "tp": tp, "cp": cp, "dp": dice.randint(1, 8)}
        job["causal"] = dice.random() < 0.7
        needed = [context_buffers("gathered", **_on_a_rank(job)), context_buffers("ring", **_on_a_rank(job))]
        job["room"] = int(dice.choice((2**40, max(needed) - 1, min(needed), 3 * max(needed))))
        jobs.append(job)
    return jobs


def _on_a_rank(job: Job) -> dict[str, int]:
    """Return the sizes of one attention on a rank; for buffers and traffic copies of key heads do not come up."""
    sizes = {name: job[name] for name in ("seq", "head_dim", "cp")}
    return sizes | {"heads": job["heads"] // job["tp"], "kv_heads": job["kv_heads"] // job["tp"], "batch": 1}


def _allowed(job: Job, way: str) -> bool:
    order = "zigzag" if job["causal"] else "contiguous"
    model = {name: job[name] for name in ("seq", "heads", "kv_heads", "tp")}
    return job["cp"] in context_degrees(way, **model, order=order, most=job["cp"])


def _fits(job: Job, way: str) -> bool:
    return context_buffers(way, **_on_a_rank(job)) <= job["room"]


@check(
    idea="First what can run: whole heads for Ulysses, equal chunks for the others, buffers that fit. Then what sends least.",
    section="Ring, all-gather, Ulysses: bytes, messages, memory, limits",
    line="Drop Ulysses unless cp divides kv_heads // tp, the others unless 2 cp (cp without a causal mask) divides seq, and "
    "all whose buffers are larger than room; take the least sent of the rest.",
)
def choose_split(answer: Callable[..., Mapping[str, Any]], seed: int = 12) -> str:
    """Judge `choose_split(seq, heads, kv_heads, head_dim, tp, cp, dp, causal, room)` for jobs of every kind."""
    jobs = _jobs(random.Random(seed))
    taken = dict.fromkeys(WAYS, 0)
    for job in jobs:
        possible = [way for way in WAYS if _allowed(job, way) and _fits(job, way)]
        try:
            got = answer(**job)
        except ValueError as error:
            if not possible:
                continue
            raise Wrong(f"You stop with a ValueError, {str(error)[:60]!r}, and {_why_possible(job, possible[0])} "
                        f"({_job(job)}).") from None  # fmt: skip
        if not possible:
            named = got.get("possible") if isinstance(got, Mapping) else None
            why = [_why_not(job, way) for way in WAYS if named is not None and way in _possible(named)]
            raise Wrong(f"Nothing can run here, so raise a ValueError{': ' + why[0] if why else ''} ({_job(job)}).")
        taken[_judge_split(got, job, possible)] += 1
    counts = ", ".join(f"{way} {number}" for way, number in taken.items())
    return f"{len(jobs)} jobs: {counts}, and {len(jobs) - sum(taken.values())} that nothing can run."


def _job(job: Job) -> str:
    names = ("seq", "heads", "kv_heads", "tp", "cp", "causal")
    return ", ".join(f"{name}={job[name]}" for name in names) + f", room={job['room']:,}"


def _judge_split(got: Any, job: Job, possible: list[str]) -> str:
    got = by_name(got, *_KEYS)
    named = _possible(got["possible"])
    for way in WAYS:
        if (way in named) != (way in possible):
            why = _why_possible(job, way) if way in possible else _why_not(job, way)
            raise Wrong(f"{way} is {'missing' if way in possible else 'named as possible'}: {why} ({_job(job)}).")
    sizes = _on_a_rank(job)
    sent = {way: attention_traffic(way, **sizes).total for way in possible}
    way = got["way"].lower() if isinstance(got["way"], str) else got["way"]
    if way not in possible:
        raise Wrong(f"`way` is one of `possible`, here {', '.join(possible)}, and you say {way!r} ({_job(job)}).")
    if not close(sent[way], min(sent.values())):
        best = min(sent, key=sent.get)
        raise Wrong(f"A rank sends {sent[way] / 1e6:.2f} MB with {way} and {sent[best] / 1e6:.2f} MB with {best}, which can "
                    f"run as well ({_job(job)}).")  # fmt: skip
    _judge_order(got["order"], way, job)
    if not close_bytes(got["sent"], sent[way]):
        _explain_sent(float(got["sent"]), way, sent[way], job)
    ranks, dp, cp, tp = whole(got["averaged_over"], "`averaged_over`"), job["dp"], job["cp"], job["tp"]
    if ranks != dp * cp:
        refuse(
            f"dp={dp}, cp={cp}, tp={tp}",
            ("cp ranks hold the same weights and see other tokens, so their gradients are averaged too, dp and cp together",
             ranks == dp),
            ("Replicas are averaged as well: dp and cp together", ranks == cp),
            ("tp ranks hold other weights, and there is nothing to average between them", ranks == dp * cp * tp),
            ("A gradient is averaged over all ranks with the same weights and other tokens, dp times cp", True),
        )  # fmt: skip
    return way


def _possible(given: Any) -> set[str]:
    return chosen(given, WAYS, f"`possible` names ways: of {', '.join(WAYS)} those that can run.")


def _why_not(job: Job, way: str) -> str:
    """Say what stops a way that cannot run."""
    keys, cp, seq = job["kv_heads"] // job["tp"], job["cp"], job["seq"]
    if _allowed(job, way):
        needed = context_buffers(way, **_on_a_rank(job))
        return f"the buffers of {way}, {_HELD[way]}, take {needed:,.0f} bytes, more than room"
    if way != "ulysses":
        parts = f"{2 * cp} equal chunks for zigzag" if job["causal"] else f"{cp} equal parts"
        return f"seq={seq} has no {parts}"
    if seq % cp:
        return f"cp={cp} does not divide seq={seq}"
    if job["kv_heads"] % cp == 0:
        return f"tp={job['tp']} leaves a rank {keys} of the {job['kv_heads']} key heads, which cp={cp} does not divide"
    return f"cp={cp} does not divide the number of key heads of a rank, {keys}, and query heads alone are not enough"


def _why_possible(job: Job, way: str) -> str:
    """Say why a way can run that an answer leaves out."""
    cp, seq = job["cp"], job["seq"]
    if seq % (2 * cp) and way == "ulysses":
        return f"ulysses can run: its ranks attend over the whole sequence, so {cp} equal parts will do"
    if seq % (2 * cp):
        return f"{way} can run: without a causal mask nothing needs balance, so {cp} equal parts will do"
    needed = context_buffers(way, **_on_a_rank(job))
    return f"{way} can run: its degree is allowed, and its buffers take {needed:,.0f} bytes, which fit into room"


def _judge_order(order: Any, way: str, job: Job) -> None:
    right = {"zigzag" if job["causal"] and way != "ulysses" else "contiguous"}
    if way == "ulysses" and job["seq"] % (2 * job["cp"]) == 0:
        right = {"zigzag", "contiguous"}  # every rank attends over all of it, in either order
    if isinstance(order, str) and order.lower() in right:
        return
    if order not in ("zigzag", "contiguous"):
        raise Wrong(f"`order` is 'zigzag' or 'contiguous', and here it is {order!r}.")
    refuse(
        _job(job),
        (f"With contiguous parts under a causal mask the last rank computes most, and all wait for it: {way} needs zigzag",
         right == {"zigzag"}),
        ("In Ulysses every rank attends over the whole sequence for some heads, so nothing is to be balanced; and the "
         f"sequence has no {2 * job['cp']} equal chunks, so the order is contiguous", way == "ulysses"),
        ("Without a causal mask each query sees every key, so contiguous parts are equal already", True),
    )  # fmt: skip


def _explain_sent(got: float, way: str, truth: float, job: Job) -> NoReturn:
    tp, sizes = job["tp"], _on_a_rank(job)
    case = tuple(sizes[name] for name in ("seq", "heads", "kv_heads", "head_dim", "cp"))
    all_heads = f"These are the bytes of all heads: tp={tp} has left a rank one part in {tp} of them"
    refuse(_job(job), (all_heads, tp > 1 and close(got, truth * tp)))
    recognize(got, f"{way}, {_job(job)}", [(sentence, truth * change) for sentence, change in _slips(way, *case)])
    raise Wrong(f"With {way} a rank sends {truth:,.0f} bytes in forward and backward, not {got:,.0f} ({_job(job)}).")
