"""`plan`: every layout of a model on a cluster, what does not fit and why, and the rest by predicted step time.

    result = plan("llama-3.1-405b", gpus=16384, gpu="h100", seq=8192, global_batch=2048)
    result.best.layout              # tp=8 cp=... pp=16 ...

The degrees are all divisors: tp of the heads and of a node, pp of the layers, cp of the sequence, dp of the batch, ep of
the experts. Micro-batches go to `MAX_MICRO_BATCH` sequences, and virtual stages to one layer a chunk. What the caller
fixes is taken as it is, tp beyond a node too. GPipe runs only where it is fixed: it takes the time of 1F1B and never
less memory. More recomputation is never faster, so of layouts that differ in it alone only the first that fits is timed.

How wrong a prediction was on measured runs like this one `Plan.like` says; layouts closer than that are a tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from os import PathLike

from lablib.calc.errors import check_whole, one_of
from lablib.calc.flops import step_flops
from lablib.calc.hardware import Accelerator
from lablib.calc.layouts.planner.assumptions import refuse_unmodelled
from lablib.calc.layouts.planner.layout import FIELDS, Cluster, Layout, check_layout, check_split, chunk_layers, cluster
from lablib.calc.layouts.planner.likeness import Likeness, like_this
from lablib.calc.layouts.planner.memory import activation_memory, state_memory
from lablib.calc.layouts.planner.rates import FITTED, FRAMEWORKS, Fitted, Framework
from lablib.calc.layouts.planner.time import Workload, step_time
from lablib.calc.memory import ATTENTION, RECOMPUTE, RESERVE, check_reserve, resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.precision import Recipe, recipe
from lablib.calc.schedules import SCHEDULES

MAX_MICRO_BATCH = 16


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predicted step.

    Attributes:
        seconds: Predicted seconds of a step by part; see `step_time`.
        memory: Bytes of a rank by term, on the stage that needs most.
    """

    layout: Layout
    seconds: dict[str, float]
    memory: dict[str, int]

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.seconds.values())

    @property
    def total_memory(self) -> int:
        """Bytes of a rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Dropped:
    """A shape of which no layout fits, by the one of its layouts that needs least memory.

    Attributes:
        memory: Bytes of a rank by term.
        excess: Bytes above what a device has for it.
    """

    layout: Layout
    memory: dict[str, int]
    term: str
    excess: int


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        load: What is trained, and where.
        capacity: Bytes of a device that a layout may use: `usable_bytes` less the reserve.
        candidates: Layouts that fit, fastest first; of those that differ in recomputation alone, the fastest.
        dropped: Shapes of which nothing fits, nearest to fitting first.
        valid: Layouts that divide what they must, fitting or not.
        dropped_by: How many of them do not fit, by the largest term of their memory.
    """

    load: Workload
    capacity: int
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    valid: int
    dropped_by: dict[str, int]

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.load.cluster

    @property
    def best(self) -> Candidate:
        """The fastest layout.

        Raises:
            ValueError: If nothing fits; it names the layout that comes nearest.
        """
        if not self.candidates:
            raise ValueError(nothing_fits(self))
        return self.candidates[0]

    def distinct(self, top: int | None = None) -> list[Candidate]:
        """Return the fastest layout of every (tp, cp, pp, dp), fastest first.

        Args:
            top: How many; None means all.
        """
        found: dict[tuple[int, int, int, int], Candidate] = {}
        for candidate in self.candidates:
            if len(found) == top:
                break
            found.setdefault(candidate.layout.shape, candidate)
        return list(found.values())[:top]

    def at(self, fitted: Fitted) -> Plan:
        """Return the same layouts timed with other constants; what fits does not depend on them."""
        fitting = [(candidate.layout, candidate.memory) for candidate in self.candidates]
        return replace(self, candidates=_timed(self.load, fitting, fitted))

    def like(self, candidate: Candidate) -> Likeness:
        """Return the measured runs like a candidate, and how wrong their predictions were."""
        return like_this(self.load, candidate.layout)

    def tflops(self, candidate: Candidate, *, hardware: bool = False) -> float:
        """Return TFLOP/s per device; of fused attention the unmasked half of the scores counts."""
        load = self.load
        flops = step_flops(
            load.model,
            batch=load.global_batch,
            seq=load.seq,
            recompute=candidate.layout.recompute,
            causal=load.attention == "fused",
            early_stop=False,  # as the step's time counts replays
        )
        return (flops.hardware if hardware else flops.model) / candidate.step / self.cluster.gpus / 1e12

    def mfu(self, candidate: Candidate) -> float:
        """Return model FLOPs utilization, recomputation left out."""
        card = self.cluster.gpu
        return self.tflops(candidate) * 1e12 / card.peak("bf16" if "bf16" in card.flops else "fp16")


def plan(
    model: ModelConfig | str | PathLike,
    *,
    gpus: int,
    gpu: str | Accelerator = "h100",
    seq: int | None = None,
    global_batch: int,
    gpus_per_node: int | None = None,
    nic: str | float | None = None,
    intra: str | float | None = None,
    rails: bool = True,
    nics_per_node: int | None = None,
    recipe_: str | Recipe = "mixed-bf16",
    attention: str = "fused",
    sequence_parallel: bool = True,
    reserve: int = RESERVE,
    framework: Framework = FRAMEWORKS["paper"],
    fitted: Fitted = FITTED,
    **fixed: int | str,
) -> Plan:
    """Return every layout that fits, by predicted step time.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        seq: Tokens in a sequence; None means the model's longest.
        global_batch: Sequences in a step, over all replicas.
        gpus_per_node: Devices that the scale-up link connects; None means the accelerator's own.
        nic: Link, or bytes per second, of a network card; None means that of the vendor's reference system.
        intra: The same inside a node; None means the accelerator's own.
        rails: Whether a group uses the cards of all its ranks in a node together.
        nics_per_node: Network cards that the devices of a node share; None means one for each.
        recipe_: Dtypes of the states, with AdamW.
        attention: "fused" or "plain".
        sequence_parallel: Whether tp splits norms and residuals too.
        framework: Which kernels run, and what hides behind what.
        reserve: Bytes of a device that a layout should leave; see `lablib.calc.memory.room`.
        **fixed: Fields of `Layout` that are given: tp=8, recompute="none".
    """
    refuse_unmodelled(recipe=recipe_, schedule=fixed.get("schedule"))
    config = resolve_model(model)
    machine = cluster(
        gpu, gpus, gpus_per_node=gpus_per_node, nic=nic, intra=intra, rails=rails, nics_per_node=nics_per_node
    )
    dtypes = recipe(recipe_)
    if dtypes.casts:
        raise ValueError(f"recipe {dtypes.name!r} keeps casts of its weights, which the planner does not count")
    one_of("attention", attention, ATTENTION)
    length = config.max_positions if seq is None else seq
    _check_numbers(fixed, seq=length, global_batch=global_batch)
    check_reserve(reserve, machine.gpu)
    load = Workload(config, machine, length, global_batch, dtypes, attention, sequence_parallel, framework)
    capacity = machine.gpu.usable_bytes - reserve
    found = search(load, fixed, capacity)
    if not found.valid:
        raise ValueError(_no_layout(load, fixed))
    return _ranked(load, capacity, found, fitted)


def _check_numbers(fixed: dict[str, object], **numbers: int) -> None:
    for name in fixed:
        one_of("constraint", name, FIELDS)
    for name, known in (("recompute", RECOMPUTE), ("schedule", SCHEDULES)):
        if name in fixed:
            one_of(name, fixed[name], known)
    integers = numbers | {name: value for name, value in fixed.items() if name not in ("recompute", "schedule")}
    for name, value in integers.items():
        check_whole(name, value, 0 if name == "zero" else 1)
    if fixed.get("zero", 0) > 3:
        raise ValueError(f"zero={fixed['zero']} does not exist: use 1, 2 or 3, or 0 for replicas")


@dataclass
class Found:
    """The result of a search, before it is timed.

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


def search(load: Workload, fixed: dict[str, object], capacity: float) -> Found:
    """Return every layout that fits, and why the others do not."""
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


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def _search_shape(load: Workload, fixed: dict[str, object], capacity: float, shape: Layout, found: Found) -> None:
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
                layout = replace(cut, zero=zero, recompute=recompute)
                found.least[cut.shape] = total, layout, _terms(states, held, again)
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


def _ranked(load: Workload, capacity: int, found: Found, fitted: Fitted) -> Plan:
    candidates = _timed(load, found.fitting, fitted)
    dropped = [
        Dropped(layout, memory, max(memory, key=memory.get), total - capacity)
        for total, layout, memory in found.least.values()
    ]
    dropped.sort(key=lambda one: one.excess)
    return Plan(load, capacity, candidates, tuple(dropped), found.valid, dict(found.dropped.most_common()))


def _timed(load: Workload, fitting: Iterable[tuple[Layout, dict[str, int]]], fitted: Fitted) -> tuple[Candidate, ...]:
    rates = load.rates(fitted)
    found = [Candidate(layout, step_time(load.job(layout), rates), memory) for layout, memory in fitting]
    # Among equal times the least memory is the better one.
    return tuple(sorted(found, key=lambda candidate: (candidate.step, candidate.total_memory)))


def nothing_fits(result: Plan) -> str:
    """Return a sentence on why nothing fits, with the layout that comes nearest and its largest term."""
    near = result.dropped[0]
    return (
        f"nothing fits: of {result.valid:,} layouts the smallest, {near.layout}, is {near.excess / 1e9:.1f} GB over "
        f"the {result.capacity / 1e9:.1f} GB that one {result.cluster.gpu.name} has for it; its largest term is "
        f"{near.term}, {near.memory[near.term] / 1e9:.1f} GB"
    )


def _no_layout(load: Workload, fixed: dict[str, object]) -> str:
    """Say what does not divide, in the words of `check_layout` where the fixed degrees decide it."""
    gpus = load.cluster.gpus
    given = {name: fixed[name] for name in ("tp", "cp", "pp", "dp") if name in fixed}
    product = 1
    for value in given.values():
        product *= value
    factors = " x ".join(f"{name}={value}" for name, value in given.items())
    if given and (gpus % product or (len(given) == 4 and product != gpus)):
        return f"{factors}{f' = {product}' if len(given) > 1 else ''} does not divide gpus={gpus}"
    rest = gpus // product
    free = [name for name in ("dp", "pp", "cp", "tp") if name not in given]
    sizes = given | dict.fromkeys(free, 1) | ({free[0]: rest} if free else {})
    trial = Layout(**{name: value for name, value in fixed.items() if name in FIELDS} | sizes)
    try:
        check_layout(
            trial, load.model, gpus=gpus, seq=load.seq, global_batch=load.global_batch,
            sequence_parallel=load.sequence_parallel,
        )  # fmt: skip
    except ValueError as error:
        return f"no layout is valid; for one: {error}"
    return f"no layout of gpus={gpus} is valid with {fixed}"
