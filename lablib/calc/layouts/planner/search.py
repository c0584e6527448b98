"""`plan`: every layout of a model on a cluster, what does not fit and why, and the rest by predicted step time.

    result = plan("llama-3.1-405b", gpus=16384, gpu="h100", seq=8192, global_batch=2048)
    result.best.layout              # tp=8 cp=2 pp=16 ...
    result.fastest.layout           # tp=4 cp=4 pp=16 ...

All divisors are tried: tp of the heads, up to a node, pp of the layers, cp of the sequence, dp of the batch, ep of the
experts, split over tp or whole over all ranks of a stage. What the caller fixes is taken as it is, tp beyond a node too.
A copy of what ZeRO-3 shards is on all ranks, or on those of a node with replicas outside, so that gathers stay inside
(FSDP, arXiv 2304.11277, section 3.2). Fewer ranks of a node hold more and send more out of it; those of some nodes
gather over the network as all do, and hold more: they are taken where they are fixed. GPipe runs only where it is fixed:
it takes the time of 1F1B and never less memory. More recomputation is never faster, so of layouts that differ in it alone
only the first that fits counts.

Sums drop what cannot fit; the rest is walked through from the fastest on, and fits if its peak leaves the reserve, and
more where nobody judged such a peak.

A layout is ahead of another only by more than the error of such comparisons. What no layout is ahead of is a tie, and the
first choice is the simplest of it. `calibration` has the errors.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice
from math import gcd
from operator import add
from os import PathLike

from lablib.calc.errors import check_whole, either, one_of
from lablib.calc.flops import step_flops
from lablib.calc.hardware import ACCELERATORS, Accelerator
from lablib.calc.layouts.planner.calibration import APART, Likeness, like_this
from lablib.calc.layouts.planner.layout import FIELDS, Cluster, Layout, Training, check_layout, cluster
from lablib.calc.layouts.planner.memory import activation_memory, sampled_stages, state_memory
from lablib.calc.layouts.planner.peak import Counting, Peak, layout_peak, refusal
from lablib.calc.layouts.planner.rates import FITTED, FRAMEWORKS, Fitted, Framework, Rates
from lablib.calc.layouts.planner.time import Workload, host_seconds, product_peak, step_time
from lablib.calc.memory import ATTENTION, RECOMPUTE, RESERVE, ROLES, check_reserve, find_implementation, resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import WAYS, check_degrees, check_experts, check_imbalance, check_shard
from lablib.calc.precision import Optimizer, Recipe, recipe
from lablib.calc.schedules import SCHEDULES, chunk_layers, in_flight, schedule_names

MAX_MICRO_BATCH = 16
PRECISIONS = ("fp8", "mxfp8")  # of products, beside the dtypes of states that a recipe names
NEAREST = 8  # shapes that do not fit of which the peak is computed

Sharding = tuple[int, int | None]  # ZeRO's stage, and the ranks of a copy, None for all

#: What helps where nothing fits, by the largest term.
ENLARGE = dict.fromkeys(ROLES, "use more or larger GPUs") | {"activations": "use larger GPUs, or shorter sequences"}
#: Options that keep fewer states on a GPU, the mildest first; `rung fit` says what each costs.
SMALLER = {"optimizer": "adamw-8bit", "offload": "optimizer", "tuning": "lora"}


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predicted step.

    Attributes:
        seconds: Predicted seconds of a step by part; see `step_time`.
    """

    layout: Layout
    seconds: dict[str, float]
    peak: Peak

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer, activations and buffers of a rank at its peak."""
        return self.peak.memory

    @property
    def total_memory(self) -> int:
        """Bytes of a rank at its peak."""
        return self.peak.total


@dataclass(frozen=True)
class Partition:
    """A layout that could fit, by its sums, with one or more recompute modes.

    Attributes:
        layout: With the first of them.
        recompute_modes: The fastest first.
        least: Bytes that it holds at least with the first.
    """

    layout: Layout
    recompute_modes: tuple[str, ...]
    least: int

    def at(self, number: int) -> Layout:
        """Return the layout with one of its modes."""
        return replace(self.layout, recompute=self.recompute_modes[number]) if number else self.layout


class Candidates(Sequence[Candidate]):
    """Layouts that fit, fastest first; of those that differ in recomputation alone, the fastest.

    A search may find a hundred thousand layouts whose sums could fit, and somebody asks for five. So a walk goes over shapes,
    by seconds that no layout of a shape is below. Where it comes to one, its layouts are found, and go back by seconds that
    they are not below; where it comes to a layout, it is timed and goes back; where it comes to a timed one, its peak is
    computed, and if this leaves too little the layout goes back with more recomputation.
    """

    def __init__(self, load: Workload, counting: Counting, capacity: float, search: Search, fitted: Fitted) -> None:
        self.load, self.counting, self.capacity, self.search = load, counting, capacity, search
        self.rates = load.rates(fitted)
        self._first = [
            (search.least_step(shape, self.rates), True, -1, shape, 0, 0) for shape in range(len(search.shapes))
        ]
        heapify(self._first)
        self._opened: dict[int, list[tuple[float, bool, int, int, int, int]]] = {}  # of shapes that a walk came to
        self._steps: dict[tuple[int, int, int], float] = {}  # by shape, its layout and recomputation
        self._peaks: dict[Layout, Peak] = {}  # of layouts that a walk came to
        self._known: list[Candidate] = []
        self._rest = self.walk()

    def walk(
        self,
        where: Callable[[Layout], bool] | None = None,
        limit: Callable[[], float] | None = None,
        among: Callable[[Layout], bool] | None = None,
    ) -> Iterator[Candidate]:
        """Yield the layouts that fit, fastest first.

        Args:
            where: Which of them; peaks of others are not computed. It is asked anew each time.
            limit: Seconds of a step beyond which no layout is looked at; asked anew too.
            among: Which of them, by degrees alone: shapes of which it says no are not looked into. Asked anew too.
        """
        heap = list(self._first)
        while heap and (limit is None or heap[0][0] <= limit()):
            _, guess, least, shape, number, mode = heappop(heap)
            if among is not None and not among(self.search.shapes[shape]):
                continue
            if least < 0:
                for entry in self._open(shape):
                    heappush(heap, entry)
                continue
            partition = self.search.partitions(shape)[number]
            layout = partition.at(mode)
            if guess:
                key = shape, number, mode
                if key not in self._steps:
                    self._steps[key] = sum(step_time(self.load.step_work(layout), self.rates).values())
                heappush(heap, (self._steps[key], False, least, *key))
                continue
            if where is None or where(layout):
                peak = self._peaks[layout] = layout_peak(self.load, layout, self.counting)
                if peak.needs <= self.capacity:
                    yield Candidate(layout, step_time(self.load.step_work(layout), self.rates), peak)
                    continue
            for again in range(mode + 1, len(partition.recompute_modes)):
                if where is None or where(partition.at(again)):
                    heappush(heap, (self._least(partition.at(again)), True, least, shape, number, again))
                    break

    def _open(self, shape: int) -> list[tuple[float, bool, int, int, int, int]]:
        """The layouts of a shape as entries of a heap: seconds, whether these are a bound, and what the layout holds."""
        if shape not in self._opened:
            self._opened[shape] = [
                (self._least(partition.layout), True, partition.least, shape, number, 0)
                for number, partition in enumerate(self.search.partitions(shape))
            ]
        return self._opened[shape]

    def too_large(self) -> list[Layout]:
        """Return the layouts whose peak was computed and leaves too little."""
        return [layout for layout, peak in self._peaks.items() if peak.needs > self.capacity]

    def _least(self, layout: Layout) -> float:
        return self.load.least_step(layout, self.rates)

    def __iter__(self) -> Iterator[Candidate]:
        number = 0
        while self._has(number):
            yield self._known[number]
            number += 1

    def _has(self, number: int) -> bool:
        self._known += islice(self._rest, max(0, number + 1 - len(self._known)))
        return number < len(self._known)

    def __bool__(self) -> bool:
        return self._has(0)

    def __len__(self) -> int:
        self._known += self._rest
        return len(self._known)

    def __getitem__(self, number: int | slice) -> Candidate | list[Candidate]:
        """Return one or several, as of a list; only as many peaks are computed as that takes."""
        if isinstance(number, slice):
            few = number.stop is not None and number.stop >= 0 and (number.start or 0) >= 0
            return list(islice(self, number.stop if few else None))[number]
        return self._known[number] if number >= 0 and self._has(number) else list(self)[number]


@dataclass(frozen=True)
class Dropped:
    """A shape of which no layout fits, by the one of its layouts that keeps least.

    Attributes:
        excess: Bytes above what a device has for it, what is spared included.
    """

    layout: Layout
    peak: Peak
    excess: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer, activations and buffers at the peak."""
        return self.peak.memory

    @property
    def term(self) -> str:
        """The largest of them."""
        return max(self.memory, key=self.memory.get)


@dataclass(frozen=True)
class Lead:
    """A layout that others are compared with.

    Attributes:
        judged: Whether measured runs are like it.
        unseen: The error of runs on such GPUs.
    """

    candidate: Candidate
    judged: bool
    unseen: float

    def beyond(self, judged: bool) -> float:
        """Return the seconds of a predicted step that is behind it, of a layout that runs are like or not."""
        return self.candidate.step * (1 + (self.unseen if judged and not self.judged else APART))

    @property
    def preference(self) -> tuple[bool, int, int, int]:
        """What is smaller for the layout to take among equals: one that was judged, of small cp and few axes, with most room."""
        return not self.judged, *_simplicity(self.candidate.layout), self.candidate.total_memory


def _simplicity(layout: Layout) -> tuple[int, int]:
    """Few axes, and a small cp before these: how fast a ring is, few runs say, and none of many ranks."""
    return layout.cp, len(layout.axes)


def _kind(layout: Layout) -> tuple[tuple[str, ...], int]:
    """What tells layouts apart that are not equals: the axes that they use, and cp's ranks."""
    return layout.axes, layout.cp


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        capacity: Bytes of a device that a layout may use: `usable_bytes` less the reserve.
        candidates: Layouts that fit, fastest first; of those that differ in recomputation alone, the fastest.
        fixed: Fields of a layout that were given.
    """

    load: Workload
    counting: Counting
    capacity: int
    candidates: Candidates
    fixed: dict[str, object] = field(default_factory=dict)

    @cached_property
    def found(self) -> SearchResult:
        """What is left if every shape is looked into, before anything is timed: for a large job this takes seconds."""
        return self.candidates.search.all()

    @property
    def valid(self) -> int:
        """Layouts that divide what they must and are counted, fitting or not."""
        return self.found.valid

    @property
    def dropped_by(self) -> dict[str, int]:
        """How many cannot fit by what they hold at least, by the largest part of that."""
        return dict(self.found.dropped.most_common())

    @cached_property
    def left_out(self) -> list[str]:
        """Why layouts that divide what they must are not counted; one reason stands for all that differ in digits alone."""
        return _alike(self.candidates.search.reasons())

    @cached_property
    def dropped(self) -> tuple[Dropped, ...]:
        """Some layouts that do not fit, nearest to fitting first: of shapes of which none can, and all if none does."""
        least = sorted(self.found.least.values(), key=lambda pair: pair[0])
        layouts = [layout for _, layout in least[:NEAREST]] + ([] if self.candidates else self.candidates.too_large())
        peaks = [(layout, layout_peak(self.load, layout, self.counting)) for layout in layouts]
        shapes = [Dropped(layout, peak, peak.needs - self.capacity) for layout, peak in peaks]
        return tuple(sorted((one for one in shapes if one.excess > 0), key=lambda one: one.excess))

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.load.cluster

    @property
    def fastest(self) -> Candidate:
        """The layout with the least predicted step.

        Raises:
            ValueError: If nothing fits; it names the layout that comes nearest.
        """
        if not self.candidates:
            raise ValueError(nothing_fits(self))
        return self.candidates[0]

    @cached_property
    def leads(self) -> tuple[Lead, ...]:
        """The fastest layout of every set of axes and cp that may be the first choice, fastest first, and how far it is ahead."""
        found: dict[tuple[tuple[str, ...], int], Lead] = {}
        limits = [math.inf]
        for candidate in self.candidates.walk(
            limit=lambda: limits[-1], among=lambda layout: _kind(layout) not in found
        ):
            like = self.like(candidate)
            lead = found[_kind(candidate.layout)] = Lead(candidate, bool(like.ratios), like.unseen)
            limits.append(min(limits[-1], lead.beyond(True)))
        return tuple(found.values())

    @cached_property
    def tie(self) -> tuple[Candidate, ...]:
        """The fastest layout of every set of axes and cp that none is ahead of, in the order of `Lead.preference`."""
        tied = (lead for lead in self.leads if self.ties(lead.candidate))
        return tuple(lead.candidate for lead in sorted(tied, key=lambda lead: lead.preference))

    def ahead_of(self, candidate: Candidate) -> Candidate | None:
        """Return the fastest layout that is ahead of a candidate, or None if the candidate ties.

        A layout is ahead of another that is predicted to be slower by more than `APART`; one that no measured run is like, of
        one that has such runs, by more than the error of runs on such GPUs.
        """
        judged = bool(self.like(candidate).ratios)
        return next((lead.candidate for lead in self.leads if candidate.step > lead.beyond(judged)), None)

    def ties(self, candidate: Candidate) -> bool:
        """Return whether no layout is ahead of a candidate."""
        return self.ahead_of(candidate) is None

    @cached_property
    def best(self) -> Candidate:
        """The first choice: of the tie what was judged, of the least cp, the simplest of this, and then the one with most room.

        Raises:
            ValueError: If nothing fits; it names the layout that comes nearest.
        """
        if not self.tie:
            raise ValueError(nothing_fits(self))
        return self.tie[0]

    def listed(self, top: int) -> list[Candidate]:
        """Return the first choice, then the fastest layouts of other (tp, cp, pp, dp)."""
        others = [one for one in self.distinct(top) if one.layout.shape != self.best.layout.shape]
        return [self.best, *others][:top]

    def distinct(self, top: int | None = None) -> list[Candidate]:
        """Return the fastest layout of every (tp, cp, pp, dp), fastest first."""
        found: dict[tuple[int, int, int, int], Candidate] = {}
        for candidate in self.candidates.walk(among=lambda layout: layout.shape not in found):
            if len(found) == top:
                break
            found[candidate.layout.shape] = candidate
        return list(found.values())

    def with_network(self, candidate: Candidate, share: float) -> float:
        """Return the predicted seconds of a step with a share of the network's rate; inside a node nothing changes."""
        nic = replace(self.cluster.nic, bandwidth=share * self.cluster.nic.bandwidth)
        load = replace(self.load, cluster=replace(self.cluster, nic=nic), cache={})
        return sum(step_time(load.step_work(candidate.layout), self.candidates.rates).values())

    def like(self, candidate: Candidate) -> Likeness:
        """Return the measured runs like a candidate, and how wrong their predictions were."""
        return like_this(self.load, candidate.layout)

    def tflops(self, candidate: Candidate, *, hardware: bool = False, causal: bool = False) -> float:
        """Return TFLOP/s per device, all pairs of attention counted; with `causal` those that a causal mask leaves."""
        load = self.load
        flops = step_flops(
            load.model,
            batch=load.global_batch,
            seq=load.seq,
            recompute=candidate.layout.recompute,
            causal=causal,
            early_stop=False,  # as the step's time counts replays
        )
        return (flops.hardware if hardware else flops.model) / candidate.step / self.cluster.gpus / 1e12

    def mfu(self, candidate: Candidate, *, causal: bool = False) -> float:
        """Return model FLOPs utilization as `lablib.calc.flops.mfu`; with `causal` only what a causal mask leaves counts."""
        return self.tflops(candidate, causal=causal) * 1e12 / self.load.peak


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
    recipe_: str | Recipe | None = None,
    attention: str = "fused",
    sequence_parallel: bool = True,
    reserve: int | None = None,
    counting: Counting | None = None,
    framework: Framework | None = None,
    fitted: Fitted = FITTED,
    imbalance: float = 1.0,
    cp_way: str | None = None,
    optimizer: str | Optimizer = "adamw",
    offload: str = "none",
    tuning: str = "full",
    **fixed: int | str,
) -> Plan:
    """Return every layout that fits, by predicted step time.

    Args:
        global_batch: Sequences in a step, over all replicas.
        gpus_per_node: Devices that the scale-up link connects; None means the accelerator's own.
        nic: Link, or bytes per second, of a network card; None means that of the vendor's reference system.
        intra: The same inside a node; None means the accelerator's own.
        rails: Whether a group uses the cards of all its ranks in a node together.
        nics_per_node: Network cards that the devices of a node share; None means one for each.
        recipe_: Dtypes of the states; None means those of `counting`. "fp8" and "mxfp8" are the states of mixed-bf16 with
            the layers' products in FP8 or MXFP8, where measured runs say how fast these are.
        reserve: Bytes of a device that a layout should leave; None means `RESERVE`, and beside it a share of a peak that
            nobody judged; see `lablib.calc.memory.room`.
        counting: Whose job is counted; None means the papers' kernels.
        framework: Which kernels run, and what hides behind what; None means those of the implementation counted.
        imbalance: Tokens of the busiest rank's experts over the mean: 1 is even, 1.5 is half as many again.
        cp_way: How cp ranks bring queries and keys together: "ring", "gathered" (Llama 3) or "ulysses"; None means as in
            `counting`.
        optimizer: Whose moments are kept; it, offload and tuning are settings of `rung memory`.
        **fixed: Fields of `Layout` that are given: tp=8, recompute="none".
    """
    _refuse_unmodelled(recipe_, fixed.get("schedule"))
    counting = counting or Counting()
    if reserve is not None:
        counting = replace(counting, spares=False)
    reserve = RESERVE if reserve is None else reserve
    config = resolve_model(model)
    machine = cluster(
        gpu, gpus, gpus_per_node=gpus_per_node, nic=nic, intra=intra, rails=rails, nics_per_node=nics_per_node
    )
    precision = recipe_ if recipe_ in PRECISIONS else ""
    if precision:
        _check_precision(machine.gpu, precision, fitted)
    dtypes = recipe("mixed-bf16" if precision else counting.recipe if recipe_ is None else recipe_)
    if dtypes.casts:
        raise ValueError(f"recipe {dtypes.name!r} keeps casts of its weights, which the planner does not count")
    # Hugging Face's plan and our transformer leave the stream whole.
    sequence_parallel = sequence_parallel and find_implementation(counting.implementation).splits_stream
    one_of("attention", attention, ATTENTION)
    length = config.max_positions if seq is None else seq
    _check_numbers(fixed, seq=length, global_batch=global_batch)
    check_reserve(reserve, machine.gpu)
    product_peak(machine.gpu, dtypes.activation)  # a GPU without a figure for these dtypes is refused here
    how = FRAMEWORKS[counting.implementation] if framework is None else framework
    check_imbalance(config, imbalance, fixed.get("ep", config.num_experts or 1))
    way = one_of("cp_way", cp_way or counting.cp_way, WAYS)
    training = Training(optimizer=optimizer, offload=offload, tuning=tuning)
    if counting.framework and training != Training():
        raise ValueError(
            f"{training}: the file for {counting.framework} trains all weights with AdamW on the GPU; plan without it"
        )
    load = Workload(
        config, machine, length, global_batch, dtypes, attention, sequence_parallel, how, imbalance, way, training,
        precision,
    )  # fmt: skip
    host_seconds(load, Layout(dp=gpus))  # a GPU without a link to its CPU is refused here
    capacity = machine.gpu.usable_bytes - reserve
    search = Search(load, fixed, capacity, counting)
    if not search.any_valid():
        raise ValueError(_not_counted(load, search, counting) if search.reasons() else _no_layout(load, fixed))
    return Plan(load, counting, capacity, Candidates(load, counting, capacity, search, fitted), fixed)


def _refuse_unmodelled(recipe: object, schedule: object) -> None:
    """Raise a ValueError for what is known elsewhere in lablib and not to the planner."""
    if recipe not in PRECISIONS and any(name in str(recipe).lower() for name in ("fp8", "fp4")):
        raise ValueError(f"recipe {recipe!r}: the planner has rates of {' and '.join(PRECISIONS)}; see chapter 08")
    if schedule in schedule_names() and schedule not in SCHEDULES:
        why = " nor its second copy of the weights" if "dualpipe" in str(schedule) else ""
        raise ValueError(
            f"schedule={schedule!r}: the planner models {', '.join(SCHEDULES)}, and not the bubble of this one{why}; "
            f"`rung schedule {schedule}` draws it"
        )


def _check_precision(gpu: Accelerator, precision: str, fitted: Fitted) -> None:
    if (gpu.generation, precision) not in fitted.fp8 or "fp8" not in gpu.flops:
        known = ", ".join(f"{name} on {card}" for card, name in fitted.fp8)
        raise ValueError(
            f"recipe {precision!r}: no measured run says how fast {gpu.name} is in it; known are {known}. Plan with mixed-bf16"
        )


def _not_counted(load: Workload, search: Search, counting: Counting) -> str:
    """Say why no layout is counted: what refuses data parallelism alone, which is the model, or else what is found first."""
    alone = [refusal(load, Layout(dp=load.cluster.gpus, zero=zero), counting) for zero in counting.zeros]
    often = Counter(alone).most_common(1)[0][0]
    found = search.reasons()
    return "none of the layouts can be counted: " + "; ".join(
        [often] if all(alone) and often in found else _alike(found)[:3]
    )


def _alike(reasons: Iterable[str]) -> list[str]:
    """Return reasons, each once; one stands for all that differ in digits alone."""
    found: dict[str, str] = {}
    for reason in reasons:
        found.setdefault(re.sub(r"\d+", "", reason), reason)
    return list(found.values())


def _check_numbers(fixed: dict[str, object], **numbers: int) -> None:
    for name in fixed:
        one_of("constraint", name, FIELDS)
    for name, known in (("recompute", RECOMPUTE), ("schedule", SCHEDULES)):
        if name in fixed:
            one_of(name, fixed[name], known)
    integers = numbers | {name: value for name, value in fixed.items() if name not in ("recompute", "schedule")}
    for name, value in integers.items():
        if name in ("etp", "shard") and value is None:
            continue
        check_whole(name, value, 0 if name == "zero" else 1)
    if fixed.get("zero", 0) > 3:
        raise ValueError(f"zero={fixed['zero']} does not exist: use 1, 2 or 3, or 0 for replicas")


@dataclass
class SearchResult:
    """The result of a search, before it is timed.

    Attributes:
        partitions: Layouts that could fit by what they hold at least, by the number of their shape.
        least: For every (tp, cp, pp, dp) of which none could, the layout that holds least, and its bytes.
        valid: Layouts that divide what they must.
        dropped: How many of them cannot fit, by the largest part of what they hold at least.
    """

    partitions: dict[int, list[Partition]] = field(default_factory=dict)
    least: dict[tuple[int, int, int, int], tuple[int, Layout]] = field(default_factory=dict)
    valid: int = 0
    dropped: Counter = field(default_factory=Counter)


def shapes(load: Workload, fixed: dict[str, object]) -> Iterator[Layout]:
    """Yield every (tp, cp, pp, dp, ep, etp) that multiplies to the devices and divides what it must."""
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
                if load.global_batch % dp or pp > model.num_layers or fixed.get("dp", dp) != dp:
                    continue
                yield from _with_experts(Layout(tp=tp, cp=cp, pp=pp, dp=dp), model, fixed)


def _with_experts(layout: Layout, model: ModelConfig, fixed: dict[str, object]) -> Iterator[Layout]:
    """Yield a layout with its experts in every place: each split over tp, or whole."""
    if not model.is_moe:
        if fixed.get("ep", 1) == 1 and fixed.get("etp") is None:
            yield layout
        return
    folds = (None, 1) if layout.tp > 1 else (None,)
    for etp in _options(fixed, "etp", folds):
        ranks = layout.cp * layout.dp if etp is None else layout.tp * layout.cp * layout.dp // etp
        ways = [n for n in divisors(ranks) if model.num_experts % n == 0]
        for ep in _options(fixed, "ep", ways):
            folded = replace(layout, ep=ep, etp=etp)
            if ep in ways and _folds(folded, model):
                yield folded


def _folds(layout: Layout, model: ModelConfig) -> bool:
    try:
        check_experts(model, tp=layout.tp, cp=layout.cp, dp=layout.dp, ep=layout.ep, etp=layout.etp)
    except ValueError:
        return False
    return True


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


class Search:
    """Every layout that could fit, and why the others do not, of one shape after another as they are asked for."""

    def __init__(self, load: Workload, fixed: dict[str, object], capacity: float, counting: Counting) -> None:
        self.load, self.fixed, self.capacity, self.counting = load, fixed, capacity, counting
        self.shapes = list(shapes(load, fixed))
        self.modes = list(_options(fixed, "recompute", RECOMPUTE))
        self._found = SearchResult()
        self._known: dict[tuple, dict[tuple[Sharding, str], str]] = {}  # refusals of layouts that are alike

    def partitions(self, shape: int) -> list[Partition]:
        """Return the layouts of a shape, by its number, that could fit."""
        if shape not in self._found.partitions:
            self._found.partitions[shape] = []
            self._add(shape)
        return self._found.partitions[shape]

    def all(self) -> SearchResult:
        """Return what is found in every shape."""
        could = {self.shapes[shape].shape for shape in range(len(self.shapes)) if self.partitions(shape)}
        self._found.least = {key: value for key, value in self._found.least.items() if key not in could}
        return self._found

    def any_valid(self) -> bool:
        """Return whether some layout divides what it must and is counted."""
        return any(self.partitions(shape) or self._found.valid for shape in range(len(self.shapes)))

    def least_step(self, shape: int, rates: Rates) -> float:
        """Return seconds that no layout of a shape is below: a sequence takes least in the largest micro-batch.

        And the bubble is least with the smallest, and with as many chunks in a stage as there can be.
        """
        layout = self.shapes[shape]
        sizes = list(self._micro_batches(layout))
        if not sizes:
            return 0.0
        m = self.load.global_batch // layout.dp // sizes[0]
        chunks = _most_chunks(self.load, layout.pp, m) * sizes[-1] // sizes[0]
        least = replace(layout, micro_batch=sizes[-1], recompute=self.modes[0], virtual_stages=chunks)
        return self.load.least_step(least, rates)

    def reasons(self) -> list[str]:
        """Return why layouts are not counted; it depends on which degrees are above one, and not on micro-batches."""
        found: dict[str, None] = {}
        seen = set()
        for shape in self.shapes:
            kind = tuple(n > 1 for n in shape.shape), shape.ep > 1, shape.etp, _inside(self.load, shape)
            m = self.load.global_batch // shape.dp
            for micro_batch in self._micro_batches(shape):
                # The first is 1F1B and the next is interleaved; of how many chunks is the same.
                for schedule, chunks in islice(_schedules(self.load, shape.pp, m // micro_batch, self.fixed), 2):
                    if (kind, schedule) not in seen:
                        seen.add((kind, schedule))
                        layout = replace(shape, micro_batch=micro_batch, schedule=schedule, virtual_stages=chunks)
                        refused = self._refusals(layout, self._stages(shape))
                        found |= dict.fromkeys(filter(None, refused.values()))
        return list(found)

    def _micro_batches(self, shape: Layout) -> Iterator[int]:
        replica = self.load.global_batch // shape.dp
        for micro_batch in _options(self.fixed, "micro_batch", divisors(replica)):
            if replica % micro_batch == 0 and (micro_batch <= MAX_MICRO_BATCH or "micro_batch" in self.fixed):
                yield micro_batch

    def _stages(self, shape: Layout) -> list[Sharding]:
        """ZeRO stages, and over how many ranks each shards."""
        zeros = _options(self.fixed, "zero", (0,) if shape.dp * shape.cp == 1 else self.counting.zeros)
        return [(zero, shard) for zero in zeros for shard in _shards(self.load, shape, zero, self.fixed)]

    def _add(self, number: int) -> None:
        """Add what a shape allows."""
        load, shape = self.load, self.shapes[number]
        stages, replica = self._stages(shape), load.global_batch // shape.dp
        for micro_batch in self._micro_batches(shape):
            for schedule, chunks in _schedules(load, shape.pp, replica // micro_batch, self.fixed):
                layout = replace(shape, micro_batch=micro_batch, schedule=schedule, virtual_stages=chunks)
                refused = self._refusals(layout, stages)
                counted = [mode for mode in self.modes if not all(refused[stage, mode] for stage in stages)]
                kept = {mode: activation_memory(load, layout, mode, self.counting.implementation) for mode in counted}
                for stage in stages:
                    here = [mode for mode in counted if not refused[stage, mode]]
                    if here:
                        self._add_stage(number, replace(layout, zero=stage[0], shard=stage[1]), here, kept)

    def _refusals(self, layout: Layout, stages: list[Sharding]) -> dict[tuple[Sharding, str], str]:
        """Return why a layout is not counted, by sharding and recomputation."""
        like = tuple(n > 1 for n in layout.shape), layout.ep > 1, layout.etp, layout.schedule, *stages
        if like not in self._known:
            self._known[like] = {
                (stage, mode): refusal(
                    self.load, replace(layout, zero=stage[0], shard=stage[1], recompute=mode), self.counting
                )
                for stage in stages
                for mode in self.modes
            }
        return self._known[like]

    def _add_stage(self, number: int, layout: Layout, modes: list[str], kept: dict[str, list[int]]) -> None:
        """Add the recomputation modes that could fit, and count the others; of a dropped shape only the least is kept.

        A rank holds weights, optimizer and activations at one instant: when its last forward has ended; with ZeRO-2 under
        FSDP2 the gathered weights too. All gradients are there if a backward of each of its v chunks came before: of m v
        forwards those in flight have had none, and the first (v - 1) p backwards are of the later chunks.
        """
        found, v, m = self._found, layout.virtual_stages, layout.num_microbatches(self.load.global_batch)
        always = ["weights", "optimizer"] + ["gathered_weights"] * (layout.zero == 2)
        stages, terms = state_memory(self.load, layout, layout.zero), []
        for stage in sampled_stages(layout.pp):
            waiting = sum(in_flight(layout.schedule, stage, layout.pp, virtual_stages=v, num_microbatches=m))
            terms.append(always + ["gradients"] * (m * v - waiting > (v - 1) * layout.pp))
        sums = [sum(stage[term] for term in names) for stage, names in zip(stages, terms, strict=True)]
        could: list[tuple[str, int]] = []
        for mode in modes:
            found.valid += 1
            totals = list(map(add, sums, kept[mode]))
            least = max(totals)
            if least <= self.capacity:
                could.append((mode, least))
                continue
            worst = totals.index(least)
            states = stages[worst]
            name = max(terms[worst], key=states.get)
            found.dropped["activations" if kept[mode][worst] > states[name] else name] += 1
            known = found.least.get(layout.shape)  # of shapes that could fit somewhere it is forgotten at the end
            if known is None or least < known[0]:
                found.least[layout.shape] = least, replace(layout, recompute=mode)
        if could:
            (first, least), modes = could[0], tuple(mode for mode, _ in could)
            found.partitions[number].append(Partition(replace(layout, recompute=first), modes, least))


def _shards(load: Workload, shape: Layout, zero: int, fixed: dict[str, object]) -> Iterator[int | None]:
    """Yield over how many ranks a copy of the states can be sharded: all, and with ZeRO-3 those of a node."""
    machine, ranks = load.cluster, shape.dp * shape.cp
    inside = _inside(load, shape)
    hybrid = zero == 3 and machine.nodes > 1 and 1 < inside < ranks and machine.gpus_per_node % shape.tp == 0
    for shard in _options(fixed, "shard", (None, inside) if hybrid else (None,)):
        try:
            check_shard(shard, zero=zero, tp=shape.tp, cp=shape.cp, dp=shape.dp, ep=shape.ep, etp=shape.etp)
        except ValueError:
            continue
        yield shard


def _inside(load: Workload, shape: Layout) -> int:
    """Return how many of the ranks that share states are in one node."""
    return gcd(load.cluster.gpus_per_node // shape.tp, shape.dp * shape.cp)


def _schedules(load: Workload, pp: int, m: int, fixed: dict[str, object]) -> Iterator[tuple[str, int]]:
    layers, most = load.model.num_layers, _most_chunks(load, pp, m)
    for chunks in _options(fixed, "virtual_stages", range(1, most + 1)):
        if chunks > most or chunk_layers(layers, pp, chunks) is None:
            continue
        for name in _options(fixed, "schedule", ("interleaved" if chunks > 1 else "1f1b",)):
            if (name == "interleaved") == (chunks > 1):
                yield name, chunks


def _most_chunks(load: Workload, pp: int, m: int) -> int:
    return (load.model.num_layers + 2) // pp if pp > 1 and m % pp == 0 else 1


def _options(fixed: dict[str, object], name: str, found: Iterable) -> Iterable:
    return (fixed[name],) if name in fixed else found


def _splits(load: Workload, tp: int, cp: int) -> bool:
    try:
        check_degrees(
            load.model, tp=tp, cp=cp, seq=load.seq, sequence_parallel=load.sequence_parallel, cp_way=load.cp_way
        )
    except ValueError:
        return False
    return True


def _would_fit(result: Plan) -> list[str]:
    """Return the options of `SMALLER` with which some layout of the same search fits."""
    found, chosen = [], result.load.training
    for name, value in SMALLER.items():
        if name in chosen.as_dict() or (name == "offload" and result.cluster.gpu.host is None):
            continue
        load = replace(result.load, training=replace(chosen, **{name: value}), cache={})
        search = Search(load, result.fixed, result.capacity, result.counting)
        if Candidates(load, result.counting, result.capacity, search, FITTED):
            found.append(f"--{name} {value}")
    return found


def nothing_fits(result: Plan, model: str | None = None) -> str:
    """Return a sentence on why nothing fits: the layout that comes nearest, its largest term, and what would fit.

    Args:
        model: How a command names the model; None means its name.
    """
    near, load = result.dropped[0], result.load
    spare = f", of which an unproven peak leaves {near.peak.spare / 1e9:,.1f} free" if near.peak.spare else ""
    card = next((name for name, one in ACCELERATORS.items() if one is load.cluster.gpu), None)
    options = _would_fit(result) if card and not result.counting.framework else []
    command = (
        f"rung fit {shlex.quote(model or load.model.name)} --gpus {load.cluster.gpus} --gpu {card} --seq {load.seq}"
    )
    smaller = f", or {either(options)}, with which a layout fits; `{command}` says what each costs" if options else ""
    return (
        f"nothing fits: of {result.valid:,} layouts the smallest, {near.layout}, needs "
        f"{near.peak.total / 1e9:,.1f} GB at its peak and one {result.cluster.gpu.name} has "
        f"{result.capacity / 1e9:.1f} GB for it{spare}, counted as "
        f"{result.counting.implementation}; its largest term is "
        f"{near.term}, {near.memory[near.term] / 1e9:,.1f} GB; {ENLARGE[near.term]}{smaller}"
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
        verb = "does not divide" if gpus % product else "is not"
        return f"{factors}{f' = {product}' if len(given) > 1 else ''} {verb} gpus={gpus}"
    rest = gpus // product
    free = [name for name in ("dp", "pp", "cp", "tp") if name not in given]
    sizes = given | dict.fromkeys(free, 1) | ({free[0]: rest} if free else {})
    trial = Layout(**{name: value for name, value in fixed.items() if name in FIELDS} | sizes)
    try:
        check_layout(
            trial, load.model, gpus=gpus, seq=load.seq, global_batch=load.global_batch,
            sequence_parallel=load.sequence_parallel, cp_way=load.cp_way,
        )  # fmt: skip
    except ValueError as error:
        return f"no layout is valid; for one: {error}"
    return f"no layout of gpus={gpus} is valid with {fixed}"
