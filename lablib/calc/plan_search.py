"""Every layout that a cluster allows, and what becomes of each: it fits, or a term of its memory is too large.

The degrees are all divisors: tp of the heads and of a node, pp of the layers, cp of the sequence, dp of the batch,
ep of the experts. Micro-batches go to `MAX_MICRO_BATCH` sequences, and virtual stages to one layer a chunk.
What the caller fixes is taken as it is, tp beyond a node too. GPipe runs only where it is fixed: it takes the time of
1F1B and never less memory.

More recomputation is never faster, so of layouts that differ in it alone only the first that fits is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from lablib.calc.plan_job import Workload
from lablib.calc.plan_layout import Layout, check_split, chunk_layers
from lablib.calc.plan_memory import activation_memory, state_memory
from lablib.calc.run_config import RECOMPUTE

MAX_MICRO_BATCH = 16


@dataclass
class Found:
    """What a search found.

    Attributes:
        fitting: Layouts to time, each with its memory by term.
        least: For every (tp, cp, pp, dp) of which no layout fits, the one that needs least: its bytes, itself, by term.
        valid: Layouts that divide what they must.
        dropped: How many of them do not fit, by the largest term of their memory.
    """

    fitting: list[tuple[Layout, dict[str, int]]] = field(default_factory=list)
    least: dict[tuple[int, int, int, int], tuple[int, Layout, dict[str, int]]] = field(default_factory=dict)
    valid: int = 0
    dropped: Counter = field(default_factory=Counter)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def search(load: Workload, fixed: dict[str, object], capacity: float) -> Found:
    """Return every layout that fits, and why the others do not.

    Args:
        load: What is trained, and where.
        fixed: Fields of `Layout` that are given.
        capacity: Bytes of a device that a layout may use.
    """
    found = Found()
    for tp, cp, pp, dp, ep in shapes(load, fixed):
        shape = Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)
        _search_shape(load, fixed, capacity, shape, found)
    timed = {layout.shape for layout, _ in found.fitting}
    found.least = {key: value for key, value in found.least.items() if key not in timed}
    return found


def shapes(load: Workload, fixed: dict[str, object]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield every (tp, cp, pp, dp, ep) that multiplies to the devices and divides what it must."""
    model, machine = load.model, load.cluster
    for tp in _options(fixed, "tp", divisors(machine.gpus)):
        if machine.gpus % tp or (tp > machine.gpus_per_node and "tp" not in fixed):
            continue
        for cp in _options(fixed, "cp", divisors(machine.gpus // tp)):
            if machine.gpus % (tp * cp) or not _splits(load, tp, cp):
                continue
            for pp in _options(fixed, "pp", divisors(machine.gpus // (tp * cp))):
                if machine.gpus % (tp * cp * pp):
                    continue
                dp = machine.gpus // (tp * cp * pp)
                if load.global_batch % dp or pp > model.num_layers + 2 or fixed.get("dp", dp) != dp:
                    continue
                experts = [n for n in divisors(dp) if model.num_experts % n == 0] if model.is_moe else [1]
                yield from ((tp, cp, pp, dp, ep) for ep in _options(fixed, "ep", experts) if ep in experts)


def _search_shape(
    load: Workload, fixed: dict[str, object], capacity: float, shape: Layout, found: Found
) -> None:
    """Add what a shape allows."""
    replica = load.global_batch // shape.dp
    zeros = list(_options(fixed, "zero", (0,) if shape.dp * shape.cp == 1 else (0, 1, 2, 3)))
    for micro_batch in _options(fixed, "micro_batch", divisors(replica)):
        if replica % micro_batch or (micro_batch > MAX_MICRO_BATCH and "micro_batch" not in fixed):
            continue
        for schedule, chunks in _schedules(load, shape.pp, replica // micro_batch, fixed):
            cut = Layout(
                tp=shape.tp, cp=shape.cp, ep=shape.ep, dp=shape.dp, pp=shape.pp,
                micro_batch=micro_batch, schedule=schedule, virtual_stages=chunks,
            )  # fmt: skip
            states = [(zero, state_memory(load, cut, zero)) for zero in zeros]
            kept = [
                (recompute, activation_memory(load, cut, recompute))
                for recompute in _options(fixed, "recompute", RECOMPUTE)
            ]
            for zero, stages in states:
                _first_that_fits(cut, zero, stages, kept, capacity, found)


def _first_that_fits(
    cut: Layout,
    zero: int,
    stages: list[dict[str, int]],
    kept: list[tuple[str, tuple[list[int], int]]],
    capacity: float,
    found: Found,
) -> None:
    """Add the first recomputation that fits, and count the others; of a dropped layout only the least is kept."""
    timed = False
    sums = [sum(stage.values()) for stage in stages]
    for recompute, (activations, again) in kept:
        found.valid += 1
        total, worst = max((a + b, -i) for i, (a, b) in enumerate(zip(sums, activations, strict=True)))
        total, states, held = total + again, stages[-worst], activations[-worst]
        if total > capacity:
            name = max(states, key=states.get)
            found.dropped["activations" if held > states[name] else name] += 1
            least = found.least.get(cut.shape)  # of shapes that fit somewhere it is forgotten at the end
            if least is None or total < least[0]:
                found.least[cut.shape] = (
                    total,
                    replace(cut, zero=zero, recompute=recompute),
                    _terms(states, held, again),
                )
        elif not timed:
            timed = True
            layout = replace(cut, zero=zero, recompute=recompute)
            found.fitting.append((layout, _terms(states, held, again)))


def _terms(states: dict[str, int], activations: int, again: int) -> dict[str, int]:
    return states | {"activations": activations, "recomputed_layer": again}


def _schedules(load: Workload, pp: int, m: int, fixed: dict[str, object]) -> Iterator[tuple[str, int]]:
    layers = load.model.num_layers
    most = (layers + 2) // pp if pp > 1 and m % pp == 0 else 1
    for chunks in _options(fixed, "virtual_stages", range(1, most + 1)):
        if chunks > most or chunk_layers(layers, pp, chunks) is None:
            continue
        for name in _options(fixed, "schedule", ("interleaved" if chunks > 1 else "1f1b",)):
            if (name == "interleaved") == (chunks > 1):
                yield name, chunks


def _options(fixed: dict[str, object], name: str, found: Iterable) -> Iterable:
    return (fixed[name],) if name in fixed else found


def _splits(load: Workload, tp: int, cp: int) -> bool:
    try:
        check_split(load.model, tp=tp, cp=cp, seq=load.seq, sequence_parallel=load.sequence_parallel)
    except ValueError:
        return False
    return True
