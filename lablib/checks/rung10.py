"""The checks of rung 10: a ring from exchanges, the algorithm for a size, and the axes for a cluster.

The ranks of the ring are threads that run one at a time, each to its next exchange, so a check always plays the same
way and sees at once when everybody waits. Rank r holds 100^r times 1, 2, 3 and so on: the digits of a sum say whose
numbers are in it, and how often.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, KeysView, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lablib.calc.communication import chunk_sizes, collective_time, crossover, traffic
from lablib.checks.judging import Wrong, by_name, check, close, pair, recognize, refuse
from lablib.launch.ranks import Endless, Turns

__all__ = ["choose_algorithm", "place", "ring_all_reduce"]


def _near(answer: object, truth: float) -> bool:
    """Say whether a number of bytes is right; the whole bytes beside it are: rounded, or the first beyond it."""
    if close(answer, truth):
        return True
    number = float(answer)  # type: ignore[arg-type]
    return number.is_integer() and abs(number - truth) <= (truth > 0)


# --- a ring from exchanges ----------------------------------------------------------------------------------

#: Ranks and elements: even, odd, fewer elements than ranks, two ranks, and one.
_CASES = ((4, 8), (3, 10), (5, 7), (6, 31), (4, 3), (2, 9), (1, 5))

_BASE = 100


class _Message(NamedTuple):
    source: int
    target: int
    elements: int
    summed: bool  # whether numbers of two ranks or more were added up in it


class World(Turns):
    """Ranks whose only tool is an exchange: send to one rank while receiving from another."""

    def __init__(self, ranks: int):
        super().__init__(ranks)
        self.messages: list[_Message] = []
        self.mail: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(collections.deque)
        self.waits: dict[int, int] = {}  # a rank, and whose message it needs

    def able(self) -> list[int]:
        """Return who waits for no message, or whose message has come."""
        left = [rank for rank in range(self.ranks) if rank not in self.done]
        return [r for r in left if r not in self.waits or self.mail[self.waits[r], r]]

    def run(self, act: Callable[[int, Callable[..., None]], Any]) -> None:
        """Run `act(rank, exchange)` on every rank to its end; raise what a rank raised first."""
        try:
            ended = self.play(lambda rank: act(rank, functools.partial(self._exchange, rank)))
        except Endless as endless:
            raise Wrong(str(endless)) from None
        if not ended:
            raise Wrong("The ranks wait for each other for ever: in every step each rank sends to its right neighbour "
                        "and receives from its left one, and all take as many steps.")  # fmt: skip
        if any(self.mail.values()):
            raise Wrong("A message was sent that nobody received: all ranks must take the same number of steps.")

    def _exchange(self, rank: int, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        for name, array in (("send", send), ("receive", receive)):
            if not isinstance(array, Tensor):
                raise Wrong(f"exchange takes tensors, and {name} is of type {type(array).__name__}.")
            if array.dtype != torch.float64:
                raise Wrong(f"`row` holds float64, and {name} is {str(array.dtype).removeprefix('torch.')}: what is sent and "
                            "the room for what comes have the type of `row`, as empty_like makes them.")  # fmt: skip
        to, source = operator.index(to), operator.index(source)
        for name, other in (("to", to), ("source", source)):
            if other not in range(self.ranks) or other == rank:
                raise Wrong(f"Rank {rank} of {self.ranks} calls exchange with {name}={other}: neighbours are counted "
                            "round the ring, so after the last rank comes rank 0.")  # fmt: skip
        if len(self.messages) > 100 * self.ranks**2:
            raise Wrong(f"The ranks exchange and exchange: a loop in your answer never ends, and 2(n-1) = "
                        f"{2 * (self.ranks - 1)} steps are enough for {self.ranks} ranks.")  # fmt: skip
        # Of one rank's numbers, none of which reaches the base, all digits but one are zero.
        summed = any(sum(digit > 0 for digit in _digits(value, self.ranks)) > 1 for value in send.flatten().tolist())
        self.messages.append(_Message(rank, to, send.numel(), summed))
        self.mail[rank, to].append(send.detach().clone().flatten())
        self.waits[rank] = source
        self.pause(rank)
        del self.waits[rank]
        arrived = self.mail[source, rank].popleft()
        if arrived.numel() != receive.numel():
            raise Wrong(f"Rank {rank} makes room for {receive.numel()} elements and {arrived.numel()} arrive: in a step "
                        "the chunk that comes has another number than the one that goes.")  # fmt: skip
        receive.copy_(arrived.view(receive.shape))


@check(
    idea="Cut the array into as many chunks as there are ranks, and let each chunk collect one rank's numbers in every "
    "step.",
    section="Ring, tree and recursive doubling: four ranks by hand",
    line="In step k rank r sends chunk r - k and adds what arrives to chunk r - k - 1, both modulo n; in the second half "
    "the chunks are complete, so what arrives replaces.",
)
def ring_all_reduce(answer: Callable[..., Any]) -> str:
    """Judge `ring_all_reduce(row, rank, ranks, exchange)` by its sums, its steps, its messages and its bytes."""
    for ranks, numel in _CASES:
        world = World(ranks)
        units = torch.arange(1, numel + 1, dtype=torch.float64)
        rows = [float(_BASE) ** rank * units for rank in range(ranks)]
        world.run(lambda rank, exchange, n=ranks, rows=rows: answer(rows[rank], rank, n, exchange))
        _judge_sums(rows, world.messages, ranks, numel)
        _judge_traffic(world.messages, ranks, numel)
    return (f"{len(_CASES)} rings of 1 to 6 ranks, odd sizes too: 2(n-1) steps, 2(n-1)/n · S bytes from every rank, and "
            "no chunk longer than it must be.")  # fmt: skip


def _judge_sums(rows: list[Tensor], messages: list[_Message], ranks: int, numel: int) -> None:
    case = f"{ranks} ranks, {numel} elements"
    units = torch.arange(1, numel + 1, dtype=torch.float64)
    shares = [(row / units).tolist() for row in rows]
    whole = sum(_BASE**rank for rank in range(ranks))

    def hold(value: Callable[[int], float], rel: float = 1e-6) -> bool:
        """Say whether rank r holds `value(r)` times 1, 2, 3, ..."""
        return all(close(share, value(rank), rel=rel) for rank, row in enumerate(shares) for share in row)

    if hold(lambda rank: whole, 1e-14):
        return
    how = "Messages went round, and `row` is unchanged on every rank" if messages else "Nothing was exchanged"
    strange = [
        (rank, element, value) for rank, row in enumerate(shares) for element, value in enumerate(row)
        if not math.isfinite(value) or value < 0 or abs(value - round(value)) > 1e-6 or value >= _BASE * whole
    ]  # fmt: skip
    refuse(
        case,
        ("The sums are rounded: `row` holds float64, and is to be added up in it", hold(lambda rank: whole, 1e-5)),
        (f"{how}: add what arrives to `row` itself; a returned tensor is not looked at", hold(lambda rank: _BASE**rank)),
        ("These are the means over the ranks; the sums are asked", hold(lambda rank: whole / ranks)),
        (lambda: "Element {1} of rank {0} is {2:g}, which is no sum of the ranks' numbers for it: another chunk was added, or "
         "room that no message filled, or something was divided".format(*strange[0][:2], strange[0][2] * (strange[0][1] + 1)),
         strange),
    )  # fmt: skip
    # counts[rank][element][r]: how often rank r's number is in it.
    counts = [[_digits(value, ranks) for value in row] for row in shares]
    complete = {element for row in counts for element, each in enumerate(row) if set(each) == {1}}
    missing = sorted(set(range(numel)) - complete)
    refuse(
        case,
        ("Some numbers are added twice: what is to be added needs room of its own to arrive in, and in the all-gather the "
         "chunk that arrives is complete and replaces what is there", any(max(each) > 1 for row in counts for each in row)),
        ("Every chunk is complete on some rank and not on all: after the reduce-scatter the complete chunks must go round once "
         "more, n - 1 steps", not missing),
    )  # fmt: skip
    element, steps = missing[0], sum(m.source == 0 for m in messages)
    single = all(sum(each) == 1 for row in counts for each in row)
    found = [rank for rank, there in enumerate(counts[0][element]) if there]
    refuse(
        case,
        (f"Element {element} is never sent: the chunks must hold all elements, whatever is left over too",
         all(sum(row[element]) == row[element][rank] == 1 for rank, row in enumerate(counts))),
        (f"No rank has the sum of element {element}: rank 0 takes {steps} steps, and 2(n-1) = {2 * (ranks - 1)} are needed, "
         "n - 1 to add up and n - 1 to pass on", steps < 2 * (ranks - 1)),
        ("No sum of two numbers was ever sent: in the first n - 1 steps what arrives is added to what is there, and the next "
         "step passes it on", single and not any(m.summed for m in messages)),
        ("Sums were made, and then overwritten: after the reduce-scatter of a ring one chunk is complete on each rank, and "
         "just that one must leave first in the all-gather", single),
        (f"No rank has the sum of element {element}; on rank 0 it holds the numbers of ranks {found}. What a rank passes on in "
         "the next step is the chunk that has just arrived, with its own numbers added", True),
    )  # fmt: skip


def _digits(value: float, ranks: int) -> list[int]:
    number = round(value) if math.isfinite(value) else 0
    return [number // _BASE**rank % _BASE for rank in range(ranks)]


def _judge_traffic(messages: list[_Message], ranks: int, numel: int) -> None:
    sent = [[m for m in messages if m.source == rank] for rank in range(ranks)]
    sizes, lengths = chunk_sizes(numel, ranks), [m.elements for m in messages]
    right = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    most, longest, enough = sum(lengths), max(lengths, default=0), 2 * (ranks - 1)
    steps = max(map(len, sent))
    refuse(
        f"{ranks} ranks, {numel} elements",
        ("The sums are right, but a rank sends to several others: on a ring it has one right neighbour",
         any(len({m.target for m in mine}) > 1 for mine in sent)),
        (f"The sums are right, but a rank takes {steps} steps and sends more than it must: 2(n-1) = {enough} steps are enough",
         steps > enough and most > right and longest <= max(sizes)),
        (f"The sums are right, but every chunk is padded to {max(sizes)} elements, so {most} travel where {right} do: let some "
         "chunks be one element shorter, as tensor_split does", most > right and set(lengths) == {max(sizes)} != set(sizes)),
        (f"The sums are right, but the ranks send {most} elements where {right} do: only a chunk leaves in a step, never the "
         "whole array", most > right),
        (f"The sums are right, but rank 0 takes {len(sent[0])} steps and 2(n-1) = {enough} do: "
         + ("one message carries a chunk, and a second one costs α again" if all(lengths) else "all chunks travel at the same time"),
         any(len(mine) != enough for mine in sent)),
        ("The sums are right, but the array travels uncut from rank to rank, while the others wait: cut it into chunks that "
         "travel at the same time", longest == numel > max(sizes)),
        (f"A chunk of {longest} elements travels where {max(sizes)} do: in every step all ranks wait for the longest chunk, so "
         "cut as evenly as can be", ranks > 1 and longest > max(sizes)),
    )  # fmt: skip


# --- ring or tree -------------------------------------------------------------------------------------------

_KEYS = ("ring", "tree", "crossover", "best")

_ALGORITHM = {"ring": "ring_all_reduce", "tree": "tree_all_reduce"}


@check(
    idea="Each algorithm is a straight line in the size, rounds times α plus passes times S/W, and two lines cross once.",
    section="Rounds and passes: the cost of every all-reduce",
    line="The crossover is the latency that the ring adds over the seconds that it saves on each byte, and 0 where it "
    "adds none.",
)
def choose_algorithm(answer: Callable[..., Mapping[str, Any]], seed: int = 10) -> str:
    """Judge `choose_algorithm(size, ranks, bandwidth, latency)` by hand first, then on random links and sizes."""
    dice = random.Random(seed)
    # By hand no two mistakes give the same number: a round costs 7, and all of the array 8.
    cases = [(800, 4, 100.0, 7.0), (800, 2, 100.0, 7.0), (80, 4, 100.0, 7.0), (2**20, 100, 25e9, 5e-6)]
    for _ in range(40):
        ranks = dice.choice((2, 3, 5, 8, 31, 100, 1024))
        link = {"bandwidth": 10 ** dice.uniform(7, 11), "latency": 10 ** dice.uniform(-6, -3)}
        # Around the crossover, where a mistake changes the choice.
        near = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link) or 2**20
        cases.append((int(near * 10 ** dice.uniform(-2, 2)) + 1, ranks, *link.values()))
    for case in cases:
        _judge_choice(by_name(answer(*case), *_KEYS), *case)
    return f"{len(cases)} links and sizes: both times, where they cross, and which to take."


def _judge_choice(got: Mapping[str, Any], size: int, ranks: int, bandwidth: float, latency: float) -> None:
    link = {"bandwidth": bandwidth, "latency": latency}
    case = f"{size:,} bytes, {ranks} ranks, {bandwidth:.4g} bytes/s, α = {latency:.4g} s"
    truth = {name: collective_time(full, size, ranks, **link) for name, full in _ALGORITHM.items()}
    if close(got["ring"], truth["tree"]) and close(got["tree"], truth["ring"]) and not close(*truth.values()):
        raise Wrong(f"`ring` has the time of the tree, and `tree` that of the ring ({case}).")
    longest = collective_time("ring_all_reduce", ranks * math.ceil(size / ranks), ranks, **link)  # in whole bytes
    for name, right in truth.items():
        if not close(got[name], right) and not (name == "ring" and close(got[name], longest)):
            _explain_time(name, float(got[name]), right, size, ranks, bandwidth, latency, case)
    cross = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link)
    refuse(case, ("`crossover` is a number of bytes, 0 where the ring is always faster, and here it is None",
                  got["crossover"] is None))  # fmt: skip
    if not _near(got["crossover"], cross):
        _explain_crossover(float(got["crossover"]), cross, ranks, bandwidth, latency, case)
    best = min(truth, key=lambda name: float(got[name]))
    if not isinstance(got["best"], str) or got["best"] not in truth:
        raise Wrong(f"`best` is the word 'ring' or 'tree', and here it is {got['best']!r}.")
    slower = got["best"] != best and not close(truth["ring"], truth["tree"])
    refuse(case, (f"The {best} takes less time here, so `best` is {best!r}", slower))


def _explain_crossover(got: float, cross: float, ranks: int, bandwidth: float, latency: float, case: str) -> NoReturn:
    first = f"On {ranks} ranks the ring takes no more rounds than the tree and sends less: it wins from the first byte"
    refuse(case, (f"{first}, so the crossover is 0", cross == 0))
    slips = [
        ("This is where the ring's own latencies equal its own bytes, which says nothing about the tree", ranks * latency * bandwidth),
        ("The sign is turned round: what the ring adds in latency is positive, and what it saves in bytes too", -cross),
        ("These are seconds a byte; the crossover is a size, so W belongs above the line", cross / bandwidth),
        ("This is in KiB; the size is asked in bytes", cross / 1024),
        ("This is in MiB; the size is asked in bytes", cross / 2**20),
    ]  # fmt: skip
    recognize(got, case, [(f"{sentence}. The times cross at {cross:,.1f} bytes", value) for sentence, value in slips])
    raise Wrong(f"The times cross where the latencies that the ring adds equal the bytes that it saves, at {cross:,.1f} "
                f"bytes and not at {got:,.1f} ({case}).")  # fmt: skip


def _explain_time(
    name: str, got: float, right: float, size: int, ranks: int, bandwidth: float, latency: float, case: str
) -> NoReturn:
    levels = math.ceil(math.log2(ranks))
    rounds = 2 * (ranks - 1) if name == "ring" else 2 * levels
    passes = 2 * (ranks - 1) / ranks if name == "ring" else 2 * levels
    real, lower = 2 * math.log2(ranks), 2 * math.floor(math.log2(ranks))
    each, cut = "Each round waits for the one before it, so their latencies add up", "A tree does not cut the array"
    slips = [  # with the rounds and the passes that are counted
        ("The latencies are missing: every round waits for one, and its bytes come on top", 0, passes),
        ("The bytes are missing: every round takes its latency and then its bytes over W", rounds, 0),
        ("An all-reduce has two halves, and this is one of them", rounds / 2, passes / 2),
        (each, 2, passes),
        (each, 1, passes),
        ("W counts bytes a second, so the size stays in bytes, not in bits", rounds, 8 * passes),
        ("W counts bytes a second, so it needs no division by 8", rounds, passes / 8),
    ]
    slips += {
        "ring": [
            ("In a step a rank sends one chunk of S/n bytes, not the whole array", rounds, rounds),
            ("A rank has one chunk in n already: it sends 2(n-1)/n of the array, not twice all of it", rounds, 2),
            ("A chunk that starts on one rank needs n - 1 steps to reach the last one, not n", 2 * ranks, 2),
        ],
        "tree": [
            (f"{cut}: every round carries all S bytes", rounds, 2 * (ranks - 1) / ranks),
            ("A tree may pass chunks on as they come, as NCCL's do; here every round carries all S bytes", rounds, 2),
            ("Rounds are whole: on 5 ranks a tree has 3 levels", real, real),
            ("Rounds are rounded up: on 5 ranks a tree has 3 levels", lower, lower),
        ],
    }[name]
    times = [(sentence, count * latency + share * size / bandwidth) for sentence, count, share in slips
             if (count, share) != (rounds, passes)]  # fmt: skip
    times += [
        (f"These are {unit}; seconds are asked", of * right)
        for unit, of in (("milliseconds", 1e3), ("microseconds", 1e6))
    ]
    recognize(got, case, [(f"{sentence}. This is about the {name}", value) for sentence, value in times])
    raise Wrong(f"The {name} takes {rounds} rounds of α and sends {passes:.3f} times the array, {right:.6g} s, and here it "
                f"takes {got:.6g} s ({case}).")  # fmt: skip


# --- which axis goes inside the host ------------------------------------------------------------------------

Axes = Mapping[str, tuple[int, str, float]]

#: An order of axes, and the case that it is for.
Placed = tuple[tuple[str, ...], Axes, int]

#: What a rank of an all-reduce sends of its payload.
_Share = Callable[[int], float]


def _ring_share(size: int) -> float:
    return 2 * (size - 1) / size


def _by_host(
    order: Sequence[str],
    axes: Axes,
    per_host: int,
    *,
    share: _Share = _ring_share,
    back: bool = True,
    crossing_only: bool = True,
    dealt: bool = False,
    ends: bool = True,
    each_rank: bool = False,
) -> list[float]:
    """Return the bytes that leave each host in a step.

    Args:
        share: Of the payload, what a rank of an all-reduce sends.
        back: Whether stages send gradients back as well.
        crossing_only: Whether only what leaves a host counts.
        dealt: Whether ranks go to the hosts in turns, and not in blocks.
        ends: Whether the first and the last stage have one neighbour only.
        each_rank: Whether the bytes of each rank are returned, and not those of each host.
    """
    sizes = [axes[name][0] for name in order]
    ranks = math.prod(sizes)
    hosts = ranks // per_host
    out = [0.0] * (ranks if each_rank else hosts)

    def host(rank: int) -> int:
        return rank % hosts if dealt else rank // per_host

    for i, name in enumerate(order):
        stride = math.prod(sizes[:i])
        size, kind, payload = axes[name]
        for rank in range(ranks):
            place = rank // stride % size
            right, left = (rank + ((place + step) % size - place) * stride for step in (1, -1))
            sends = [(right, share(size) * payload)] if kind == "all_reduce" else []
            if kind == "stages":
                forth, comes_back = not ends or place < size - 1, back and (not ends or place > 0)
                sends = [(right, payload)] * forth + [(left, payload)] * comes_back
            for target, count in sends:
                if host(target) != host(rank) or not crossing_only:
                    out[rank if each_rank else host(rank)] += count
    return out


@check(
    idea="The order of the axes decides which messages cross from host to host, so count them for every order.",
    section="The axis that goes inside a host",
    line="For every rank, find its neighbours on each axis by that axis's stride, and add what it sends if the neighbour's "
    "number divided by the ranks of a host is another one.",
)
def place(answer: Callable[..., tuple[Sequence[str], float]], seed: int = 101) -> str:
    """Judge `place(axes, ranks_per_host)` on a few hosts by hand, then on random axes and hosts."""
    dice = random.Random(seed)
    cases: list[tuple[Axes, int]] = [
        ({"dp": (5, "all_reduce", 80e6), "tp": (3, "all_reduce", 500e6)}, 3),
        ({"tp": (2, "all_reduce", 20e6), "dp": (2, "all_reduce", 80e6)}, 2),
        ({"tp": (2, "all_reduce", 64e6), "pp": (2, "stages", 4e6)}, 2),
        ({"pp": (4, "stages", 70e6), "dp": (2, "all_reduce", 100e6)}, 4),
        ({"pp": (3, "stages", 10e6), "tp": (2, "all_reduce", 64e6)}, 2),
        ({"dp": (4, "all_reduce", 24e6), "pp": (2, "stages", 90e6)}, 4),
        # Orders that turn the given one round and round miss the best of this one.
        ({"tp": (2, "all_reduce", 10e6), "pp": (3, "stages", 60e6), "dp": (2, "all_reduce", 100e6)}, 4),
    ]
    while len(cases) < 30:
        axes = {
            name: (dice.choice((2, 2, 3, 4)), kind, float(dice.randint(1, 400) * 10**6))
            for name, kind in (("tp", "all_reduce"), ("pp", "stages"), ("dp", "all_reduce"))
            if name == "dp" or dice.random() < 0.8
        }
        ranks = math.prod(size for size, _, _ in axes.values())
        hosts = [g for g in (2, 3, 4, 6, 8) if ranks % g == 0 and g < ranks]
        if len(axes) > 1 and hosts:
            cases.append((axes, dice.choice(hosts)))
    passed: list[Placed] = []
    for axes, per_host in cases:
        told = [f"{name} {size} ({kind} {payload / 1e6:.0f} MB)" for name, (size, kind, payload) in axes.items()]
        case = f"{', '.join(told)}, {per_host} ranks a host"
        passed.append(_judge_place(answer(dict(axes), per_host), axes, per_host, case, passed))
    return f"{len(cases)} clusters: the order that sends least out of a host, and how much that is."


def _judge_place(got: Any, axes: Axes, per_host: int, case: str, passed: Sequence[Placed]) -> Placed:
    otherwise = "Return a pair: the names of all axes, innermost first, and the bytes that leave the busiest host."
    names, count = pair(got, otherwise)
    refuse(
        "",
        ("The order of the axes comes first, and then the bytes that leave the busiest host",
         hasattr(names, "__float__") and getattr(names, "ndim", 0) == 0),
        ("A set has no order: return the names of the axes in a tuple or a list, innermost first",
         isinstance(names, Set) and not isinstance(names, KeysView)),
    )  # fmt: skip
    order = tuple(map(str, names)) if hasattr(names, "__iter__") and not isinstance(names, str) else ()
    if sorted(order) != sorted(axes):
        raise Wrong(otherwise)
    every = {names: max(_by_host(names, axes, per_host)) for names in itertools.permutations(axes)}
    best = min(every, key=every.get)
    mine, least, turned = every[order], every[best], every[order[::-1]]
    if not close(mine, least):
        one_way = max(_by_host(order, axes, per_host, back=False))
        refuse(
            case,
            ("Stages send activations on and gradients back", close(count, one_way) and not close(mine, one_way)),
            ("These bytes belong to the order read from its end: the innermost axis, whose groups are neighbouring ranks, "
             "comes first", _near(count, turned) and close(turned, least)),
            (f"With {' inside '.join(order)} {mine / 1e6:.0f} MB leave a host, with {' inside '.join(best)} {least / 1e6:.0f} "
             "MB: count the bytes of every order", True),
        )  # fmt: skip
    if not _near(count, mine):
        _explain_bytes(float(count), (order, axes, per_host), passed, case)
    return order, axes, per_host


def _slips(order: tuple[str, ...], axes: Axes, per_host: int) -> dict[str, float]:
    """Return what each mistake makes of the bytes."""
    hosts = _by_host(order, axes, per_host)
    ranks = math.prod(size for size, _, _ in axes.values())
    units = ("MB", 1e6), ("MiB", 2**20), ("GB", 1e9)

    def busiest(**otherwise: Any) -> float:
        return max(_by_host(order, axes, per_host, **otherwise))

    return {
        "messages that stay inside a host do not leave it": busiest(crossing_only=False),
        "stages send activations forward and gradients back": busiest(back=False),
        "this is what all hosts send together: each has a link of its own": sum(hosts),
        "this is the mean over the hosts: the busiest one is what all wait for": sum(hosts) / len(hosts),
        "this is the host that sends least": min(hosts),
        "rank r is on host r // ranks_per_host: neighbouring ranks share a host": busiest(dealt=True),
        "a rank of an all-reduce sends 2(n-1)/n of its payload, not all of it once": busiest(share=lambda size: 1),
        "a rank of an all-reduce sends 2(n-1)/n of its payload, not all of it twice": busiest(share=lambda size: 2),
        "in a step of the ring a chunk of payload / n leaves, not all": busiest(share=lambda size: 2 * (size - 1)),
        "an all-reduce has two halves, 2(n-1)/n of the payload in all": busiest(share=lambda size: (size - 1) / size),
        "n is the size of the axis, not the number of all ranks": busiest(share=lambda _: _ring_share(ranks)),
        "the first and the last stage have one neighbour only: a pipeline is no ring": busiest(ends=False),
        "this is what one rank sends: the ranks of a host share its link": busiest(each_rank=True),
        "what arrives at a host is counted as well, and only what leaves is asked": 2 * max(hosts),
        **{f"the bytes are asked, and these are {unit}": max(hosts) / of for unit, of in units},
    }


def _explain_bytes(got: float, case: Placed, passed: Sequence[Placed], text: str) -> None:
    if not math.isfinite(got):
        raise Wrong(f"The order is right, but the bytes should be a number, and are {got} ({text}).")
    found = [sentence for sentence, value in _slips(*case).items() if close(got, value)]
    # A mistake that would have shown in an earlier case is not made; of those left several may give the same number.
    for earlier in passed if len(found) > 1 else ():
        right, slips = max(_by_host(*earlier)), _slips(*earlier)
        found = [sentence for sentence in found if close(slips[sentence], right)]
    if found:
        raise Wrong(f"The order is right, but {', or '.join(found)} ({text}).")
    raise Wrong(f"The order is right, but {max(_by_host(*case)) / 1e6:.1f} MB leave the busiest host and not "
                f"{got / 1e6:.1f}, by no mistake that the check knows ({text}).")  # fmt: skip
