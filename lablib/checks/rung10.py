"""The checks of rung 10: a ring from exchanges, the algorithm for a size, and the axes for a cluster."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lablib.calc.collective_times import collective_time, crossover
from lablib.calc.comm import ring_all_reduce_bytes
from lablib.checks.report import Wrong, check, close
from lablib.checks.ring_world import ring_all_reduce

#: What the lab and the tests use from here; the ring has a module of its own.
__all__ = ["choose_algorithm", "place", "ring_all_reduce"]

# --- ring or tree ------------------------------------------------------------------------------------------

_KEYS = ("ring", "tree", "crossover", "best")
_ALGORITHM = {"ring": "ring_all_reduce", "tree": "tree_all_reduce"}


@check
def choose_algorithm(answer: Callable[..., Mapping[str, Any]], seed: int = 10) -> str:
    """Judge `choose_algorithm(size, ranks, bandwidth, latency)` by hand first, then on random links and sizes."""
    dice = random.Random(seed)
    cases = [(8, 4, 1.0, 7.0), (8, 2, 1.0, 7.0), (1000, 4, 1.0, 7.0), (2**20, 100, 25e9, 5e-6)]
    for _ in range(40):
        ranks = dice.choice((2, 3, 5, 8, 31, 100, 1024))
        link = {"bandwidth": 10 ** dice.uniform(7, 11), "latency": 10 ** dice.uniform(-6, -3)}
        # Around the crossover, where a slip changes the choice.
        near = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link) or 2**20
        cases.append((int(near * 10 ** dice.uniform(-2, 2)) + 1, ranks, *link.values()))
    for case in cases:
        _judge_choice(answer(*case), *case)
    return f"{len(cases)} links and sizes: both times, where they cross, and which to take."


def _judge_choice(got: Mapping[str, Any], size: int, ranks: int, bandwidth: float, latency: float) -> None:
    if not isinstance(got, Mapping) or set(got) != set(_KEYS):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
    link = {"bandwidth": bandwidth, "latency": latency}
    case = f"{size:,} bytes, {ranks} ranks"
    truth = {name: collective_time(full, size, ranks, **link) for name, full in _ALGORITHM.items()}
    for name, right in truth.items():
        if not close(got[name], right):
            _explain_time(name, float(got[name]), size, ranks, bandwidth, latency, case)
    cross = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link)
    if not close(got["crossover"], cross):
        if cross == 0:
            raise Wrong(f"On {ranks} ranks the ring takes no more rounds than the tree and sends less: it wins from the "
                        f"first byte, so the crossover is 0 ({case}).")  # fmt: skip
        raise Wrong(f"The times cross where the latencies that the ring adds equal the bytes that it saves, at {cross:,.0f} "
                    f"bytes and not at {float(got['crossover']):,.0f} ({case}).")  # fmt: skip
    best = min(truth, key=truth.get)
    if got["best"] != best and not close(truth["ring"], truth["tree"]):
        raise Wrong(f"The {best} takes less time here, so `best` is {best!r} ({case}).")


def _explain_time(
    name: str, got: float, size: int, ranks: int, bandwidth: float, latency: float, case: str
) -> None:
    levels = math.ceil(math.log2(ranks))
    rounds = 2 * (ranks - 1) if name == "ring" else 2 * levels
    passes = 2 * (ranks - 1) / ranks if name == "ring" else 2 * levels
    slips = {
        (0, passes): "The latencies are missing: every round waits for one.",
        (rounds / 2, passes / 2): "An all-reduce has two halves, and this is one of them.",
        (2, passes): "Each round waits for the one before it, so their latencies add up.",
    }
    if name == "ring":
        slips |= {
            (rounds, rounds): "In a step a rank sends one chunk of S/n bytes, not the whole array.",
            (
                rounds,
                2,
            ): "A rank has one chunk in n already: it sends 2(n-1)/n of the array, not twice all of it.",
        }
    else:
        real = 2 * math.log2(ranks)
        slips |= {
            (
                rounds,
                2 * (ranks - 1) / ranks,
            ): "A tree does not cut the array: every round carries all S bytes.",
            (real, real): "Rounds are whole: on 5 ranks a tree has 3 levels.",
        }
    for (count, share), sentence in slips.items():
        if (count, share) != (rounds, passes) and close(got, count * latency + share * size / bandwidth):
            raise Wrong(f"{sentence} This is about the {name} ({case}).")
    raise Wrong(f"The {name} takes {rounds} rounds of α and sends {passes:.3f} times the array ({case}).")


# --- which axis goes inside the host -----------------------------------------------------------------------

Axes = Mapping[str, tuple[int, str, float]]


def _leaving(
    order: Sequence[str], axes: Axes, per_host: int, *, crossing_only: bool = True, all_hosts: bool = False
) -> float:
    """Return the bytes that leave the busiest host in a step; with `crossing_only` False all that are sent."""
    sizes = [axes[name][0] for name in order]
    strides = [math.prod(sizes[:i]) for i in range(len(sizes))]
    ranks = math.prod(sizes)
    out = [0.0] * (ranks // per_host)
    for name, size, stride in zip(order, sizes, strides, strict=True):
        _, kind, payload = axes[name]
        for rank in range(ranks):
            place = rank // stride % size
            right, left = (rank + ((place + step) % size - place) * stride for step in (1, -1))
            sends = [(right, ring_all_reduce_bytes(payload, size))] if kind == "all_reduce" else []
            if kind == "stages":
                sends = [(right, payload)] * (place < size - 1) + [(left, payload)] * (place > 0)
            for target, count in sends:
                if target // per_host != rank // per_host or not crossing_only:
                    out[rank // per_host] += count
    return sum(out) if all_hosts else max(out)


@check
def place(answer: Callable[..., tuple[Sequence[str], float]], seed: int = 101) -> str:
    """Judge `place(axes, ranks_per_host)` on a pair of hosts by hand, then on random axes and hosts."""
    dice = random.Random(seed)
    cases: list[tuple[Axes, int]] = [
        ({"dp": (2, "all_reduce", 80e6), "tp": (2, "all_reduce", 500e6)}, 2),
        ({"tp": (2, "all_reduce", 20e6), "dp": (2, "all_reduce", 80e6)}, 2),
        ({"tp": (2, "all_reduce", 64e6), "pp": (2, "stages", 4e6)}, 2),
        ({"pp": (4, "stages", 70e6), "dp": (2, "all_reduce", 100e6)}, 4),
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
    for axes, per_host in cases:
        _judge_place(answer(dict(axes), per_host), axes, per_host)
    return f"{len(cases)} clusters: the order that sends least out of a host, and how much that is."


def _judge_place(got: tuple[Sequence[str], float], axes: Axes, per_host: int) -> None:
    case = ", ".join(
        f"{name} {size} ({kind} {payload / 1e6:.0f} MB)" for name, (size, kind, payload) in axes.items()
    )
    case += f", {per_host} ranks a host"
    if not isinstance(got, tuple) or len(got) != 2 or sorted(got[0]) != sorted(axes):
        raise Wrong(
            "Return a pair: the names of all axes, innermost first, and the bytes that leave the busiest host."
        )
    order, count = list(got[0]), got[1]
    every = {names: _leaving(names, axes, per_host) for names in itertools.permutations(axes)}
    best = min(every, key=every.get)
    mine = every[tuple(order)]
    halved = {n: (s, k, p / 2 if k == "stages" else p) for n, (s, k, p) in axes.items()}
    if not close(mine, every[best]):
        one_way = _leaving(order, halved, per_host)
        if close(count, one_way) and not close(mine, one_way):
            raise Wrong(f"Stages send activations forward and gradients back: both ways count ({case}).")
        raise Wrong(f"With {' inside '.join(order)} {mine / 1e6:.0f} MB leave a host, with {' inside '.join(best)} "
                    f"{every[best] / 1e6:.0f} MB: count the bytes of every order ({case}).")  # fmt: skip
    if close(count, mine):
        return
    if close(count, _leaving(order, axes, per_host, crossing_only=False)):
        raise Wrong(f"The order is right, but messages that stay inside a host do not leave it ({case}).")
    if close(count, _leaving(order, halved, per_host)):
        raise Wrong(f"The order is right, but stages send activations forward and gradients back ({case}).")
    if close(count, _leaving(order, axes, per_host, all_hosts=True)):
        raise Wrong(
            f"The order is right, but this is what all hosts send together: each has a link of its own ({case})."
        )
    raise Wrong(f"The order is right, but {mine / 1e6:.1f} MB leave the busiest host and not {float(count) / 1e6:.1f}: on "
                f"a ring every rank sends 2(n-1)/n of its payload to the next, and rank r is on host r // {per_host} "
                f"({case}).")  # fmt: skip
