"""Plan the cluster: three real clusters, your layout, what the paper chose, and what the planner would.

    score(Layout(tp=8, pp=4, dp=32, recompute="full"), "gpt-76b").points

Three times are compared, all predicted by the same model: yours, that of the published layout, if there is one, and that of
the planner's first choice. So the ratio says how good a layout is, and says nothing about how good the prediction is; the page "How wrong is the
planner?" says that.

Every case of `CASES` is a row of a paper, one of `MEASURED_RUNS`: model, GPUs, batch, sequence, dtypes and attention are given.
All of the layout is yours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from lablib.calc.errors import one_of
from lablib.calc.layouts.planner import (
    FIELDS,
    MEASURED_RUNS,
    PART_NAMES,
    Candidate,
    Layout,
    Peak,
    Plan,
    Run,
    Workload,
    check_layout,
    counting_of_run,
    layout_peak,
    plan,
    predict_run,
    reason_against,
    step_time,
    workload_of_run,
)
from lablib.calc.memory import RESERVE

#: Idle over busy time that a sentence is worth.
LARGE_BUBBLE = 0.15
#: Part of a step that a sentence is worth.
LARGE_SHARE = 0.10
#: How cp attends, in the answer and in the plan; the three papers' layouts have none.
CP_WAY = "ring"


@dataclass(frozen=True)
class Case:
    """A real cluster and what was trained on it."""

    name: str
    run: Run
    text: str

    @property
    def published(self) -> Layout:
        """The layout of the row: what the paper prints or the row assumes, and what both leave out as the planner would choose it."""
        return predict_run(self.run).layout

    @property
    def capacity(self) -> int:
        """Bytes of a device that a layout may use: `usable_bytes` less the reserve, as in its plan."""
        return _load(self.run).cluster.gpu.usable_bytes - RESERVE


@dataclass(frozen=True)
class Score:
    """A layout judged.

    Attributes:
        layout: The layout, or None where the fields make none.
        verdict: "cannot be", "does not fit" or "runs".
        memory: Bytes of weights, gradients, optimizer, activations and buffers of a rank at its peak; empty if it
            cannot be.
        capacity: Bytes of a device that a layout may use.
        term: The largest of them if it does not fit, else "".
        seconds: Predicted seconds of a step by part; empty if it cannot be.
        to_published: Step time over that of the published layout; None unless both run.
        to_planner: Step time over that of the planner's first choice, which need not be the fastest; None unless it runs.
        sentences: What the numbers mean, the most important first.
        ties: Whether it runs and no layout of the plan is ahead of it; see `Plan.ties`.
    """

    case: Case
    layout: Layout | None
    verdict: str
    memory: dict[str, int]
    capacity: int
    term: str
    seconds: dict[str, float]
    to_published: float | None
    to_planner: float | None
    sentences: tuple[str, ...]
    ties: bool = False

    @property
    def runs(self) -> bool:
        """Whether the layout divides what it must and fits."""
        return self.verdict == "runs"

    @property
    def step(self) -> float:
        """Predicted seconds of a step; 0 if it cannot be."""
        return sum(self.seconds.values())

    @property
    def points(self) -> int:
        """100 for a layout as fast as the planner's first choice, 50 for one half as fast, 0 if it does not run."""
        return min(100, round(100 / self.to_planner)) if self.to_planner else 0

    def __str__(self) -> str:
        return "\n".join((f"{self.case.name}: {self.layout}, {self.verdict}", *self.sentences))


def score(layout: Layout | Mapping[str, int | str], case: str | Case) -> Score:
    """Judge a layout for a real cluster.

    Raises:
        ValueError: If the case is unknown. A layout that cannot be is no error: its score says so.
    """
    one = _case_of(case)
    run, load, capacity = one.run, _load(one.run), one.capacity
    empty = ({}, capacity, "", {}, None, None)
    try:
        given = layout if isinstance(layout, Layout) else _layout(layout)
        peak = case_peak(given, one)
    except ValueError as error:
        kept = layout if isinstance(layout, Layout) else None
        return Score(one, kept, "cannot be", *empty, (f"This cannot be: {error}.",))
    seconds = step_time(load.step_work(given), load.rates())
    memory, total = peak.memory, peak.total
    if total > capacity:
        term = max(memory, key=memory.get)
        text = _too_large(one, given, memory, total, capacity, term)
        return Score(one, given, "does not fit", memory, capacity, term, seconds, None, None, (text,))
    step = sum(seconds.values())
    try:
        published = sum(predict_run(run).seconds.values())
    except ValueError:  # the degrees of its row do not go into another number of GPUs
        published = None
    found, mine = plan_case(one), Candidate(given, seconds, peak)
    return Score(
        one, given, "runs", memory, capacity, "", seconds, published and step / published, step / found.best.step,
        _sentences(one, mine, published, found.best, capacity), found.ties(mine),
    )  # fmt: skip


def case_peak(layout: Layout, case: Case) -> Peak:
    """Return the peak of a layout for a cluster.

    Raises:
        ValueError: If there can be no such layout; it names what does not divide.
    """
    run = case.run
    check_layout(
        layout, run.model, gpus=run.gpus, seq=run.seq, global_batch=run.global_batch,
        sequence_parallel=run.sequence_parallel, cp_way=CP_WAY,
    )  # fmt: skip
    return layout_peak(_load(run), layout, counting_of_run(run, max(layout.zero, run.zero or 0)))


def plan_case(case: str | Case) -> Plan:
    """Return the planner's layouts for a case, with nothing but the job fixed."""
    return _planned(_case_of(case).run)


def _case_of(case: str | Case) -> Case:
    return case if isinstance(case, Case) else CASES[one_of("case", case, CASES)]


@cache
def _load(run: Run) -> Workload:
    return replace(workload_of_run(run), cp_way=CP_WAY)


@cache
def _planned(run: Run) -> Plan:
    return plan(
        run.model, gpus=run.gpus, gpu=run.gpu, seq=run.seq, global_batch=run.global_batch, nic=run.nic,
        rails=run.rails, recipe_=run.recipe, attention=run.attention, sequence_parallel=run.sequence_parallel,
        framework=run.framework, cp_way=CP_WAY, counting=counting_of_run(run),
        reserve=RESERVE,
    )  # fmt: skip


def _layout(fields: Mapping[str, int | str]) -> Layout:
    for name in fields:
        one_of("field", name, FIELDS)
    return Layout(**fields)


def _too_large(case: Case, layout: Layout, memory: dict[str, int], total: int, capacity: int, term: str) -> str:
    fixes = {
        "activations": "recompute them, split them with tp or cp, or take smaller micro-batches",
        "buffers": "gather and compute less at a time: split layers with tp or cp, or take smaller micro-batches",
        "optimizer": "shard them over dp with zero=1, or split the model further with tp or pp",
        "gradients": "shard them with zero=2, or split the model further with tp or pp",
        "weights": "split the model with tp or pp, or shard them with zero=3",
    }
    return (
        f"Its peak is {total / 1e9:.1f} GB where one {case.run.gpu} has {capacity / 1e9:.1f} GB for it; the largest "
        f"part is {term}, {memory[term] / 1e9:.1f} GB. Where still possible: {fixes[term]}."
    )


def _sentences(case: Case, mine: Candidate, published: float | None, best: Candidate, capacity: int) -> tuple[str, ...]:
    layout, seconds = mine.layout, mine.seconds
    theirs = f"{mine.step / published:.2f} times the published layout's {published:.2f} s and " if published else ""
    found = [
        f"{mine.step:.2f} s a step: {theirs}{mine.step / best.step:.2f} times that of the planner's first choice, "
        f"{best.step:.2f} s."
    ]
    machine = workload_of_run(case.run).cluster
    if layout.tp > machine.gpus_per_node and seconds["tp"] > LARGE_SHARE * mine.step:
        found.append(
            f"tp={layout.tp} leaves the node of {machine.gpus_per_node}: its collectives wait for a link of "
            f"{machine.bandwidth(layout.tp) / 1e9:.0f} GB/s in place of {machine.intra / 1e9:.0f} GB/s, in every layer."
        )
    m = layout.num_microbatches(case.run.global_batch)
    if seconds["bubble"] > LARGE_BUBBLE * (mine.step - seconds["bubble"]):
        chunks = "" if layout.virtual_stages == 1 else f" of {layout.virtual_stages} chunks"
        finer = m % layout.pp == 0 and (layout.virtual_stages + 1) * layout.pp <= case.run.model.num_layers + 2
        helps = ["fewer stages"] + ["smaller micro-batches"] * (layout.micro_batch > 1) + ["more chunks"] * finer
        found.append(
            f"{m} micro-batches for {layout.pp} stages{chunks} leave the pipeline idle for "
            f"{seconds['bubble'] / mine.step:.0%} of the step: {' or '.join(helps)}, if that fits."
        )
    if layout.zero == 3 and seconds["dp"] > LARGE_SHARE * mine.step:
        found.append(
            f"ZeRO-3 gathers the weights for every micro-batch: {seconds['dp'] / mine.step:.0%} of the step is "
            "communication that compute does not hide; larger micro-batches, or zero=1 with tp and pp."
        )
    again = {"full": "a whole forward", "selective": "attention"}.get(layout.recompute)
    if again and (held := mine.total_memory) < 0.6 * capacity:
        room = f"uses {held / 1e9:.0f} of {capacity / 1e9:.0f} GB: there may be room to recompute less."
        found.append(f"It recomputes {again} and {room}")
    if mine.step > best.step * 1.0001:
        slowest = max(seconds, key=lambda part: seconds[part] - best.seconds[part])
        found.append(f"What the planner gains most on is {PART_NAMES[slowest]}. {reason_against(best, mine)}")
    return tuple(found)


def _case(name: str, row: str, text: str) -> Case:
    return Case(name, next(run for run in MEASURED_RUNS if run.name == row), text)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case(
            "gpt-76b",
            "76.1B on 1024",
            "A GPT of 76 billion parameters on 128 DGX A100, 1,792 sequences of 2,048 tokens a step "
            "(Narayanan et al. 2021, table 1).",
        ),
        _case(
            "gpt-175b",
            "175B on 64, selective",
            "A GPT of 175 billion parameters on only 8 DGX A100, 64 sequences of 2,048 tokens a step "
            "(Korthikanti et al. 2022).",
        ),
        _case(
            "llama-405b",
            "405B on 16384, 8K",
            "Llama 3.1 405B on 2,048 nodes of 8 H100, 2,048 sequences of 8,192 tokens a step (Llama 3, table 4).",
        ),
    )
}
