"""What a layout holds at its fullest: the peak of the memory calculator, for the implementation that a plan counts.

`Counting` says whose job it is: operators, dtypes, how FSDP shards, what the framework refuses. `counted_run` is a layout
as the settings of the memory calculator, and `layout_peak` its peak. The sums of `memory` are for ordering; what a plan
names, lists or exports has had its peak computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lablib.calc.layouts.planner.layout import FIELDS, Layout
from lablib.calc.layouts.planner.memory import block_activations
from lablib.calc.layouts.planner.time import Workload, cached_by
from lablib.calc.memory import UNPROVEN_SHARE, RunConfig, sum_by_role, unproven
from lablib.calc.memory.timeline import MemoryInstant, Step, memory_peak
from lablib.calc.schedules import layers_per_stage


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Whose job is counted.

    Attributes:
        implementation: Whose operators; a name of `lablib.calc.memory`.
        recipe: Dtypes, unless the plan is given others.
        replicas: Dtypes of a job that shards nothing, where they are others.
        sharding: "flat", or "fsdp2", which has no ZeRO-1: it is counted as ZeRO-2.
        step: How the optimizer runs: "foreach", "for-loop" or "fused".
        cp_way: How its cp ranks bring queries and keys together: "ring", "gathered" or "ulysses".
        accepts: Raises a ValueError for what the framework does not run; None accepts everything.
        framework: Its name; empty if the plan is for none.
        not_counted: Sentences on what its job holds beside what is counted.
        spares: Whether a layout whose peak nobody judged leaves `UNPROVEN_SHARE` of it free beside the reserve.
    """

    implementation: str = "paper"
    recipe: str = "mixed-bf16"
    replicas: str = ""
    sharding: str = "flat"
    step: str = "foreach"
    cp_way: str = "ring"
    accepts: Callable[[Layout], object] | None = None
    framework: str = ""
    not_counted: tuple[str, ...] = ()
    spares: bool = True

    @property
    def zeros(self) -> tuple[int, ...]:
        """ZeRO stages that differ from each other."""
        return (0, 2, 3) if self.sharding == "fsdp2" else (0, 1, 2, 3)


def counted_run(load: Workload, layout: Layout, counting: Counting) -> RunConfig:
    """Return a layout as settings of the memory calculator.

    Raises:
        ValueError: If the calculator does not know the implementation with such a layout; it names what it lacks.
    """
    how: dict[str, object] = {"zero": layout.zero, "gradient_as_bucket_view": True}
    recipe = load.recipe
    alone = layout.dp * layout.cp == 1
    if layout.zero == 0 and counting.replicas:
        how, recipe = {"zero": 0}, counting.replicas
    elif counting.sharding == "fsdp2" and (layout.zero or alone):
        how = {"sharding": "fsdp2", "zero": 3 if layout.zero == 3 else 2}
    elif counting.sharding == "fsdp2":
        raise ValueError(f"zero=0 with dp={layout.dp}: replicas under FSDP2's policy are not counted; use zero=2 or 3")
    return RunConfig(
        model=load.model,
        recipe=recipe,
        micro_batch=layout.micro_batch,
        seq=load.seq,
        dp=layout.dp,
        tp=layout.tp,
        sequence_parallel=load.sequence_parallel and layout.tp > 1,
        pp=layout.pp,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        num_microbatches=layout.num_microbatches(load.global_batch),
        layers_per_stage=layers_per_stage(load.model.num_layers, layout.pp, layout.virtual_stages),
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        shard=layout.shard,
        cp_way=load.cp_way,
        imbalance=load.uneven(layout),
        recompute=layout.recompute,
        attention=load.attention,
        implementation=counting.implementation,
        **load.training.settings(),
        **how,
    )


@dataclass(frozen=True)
class Peak:
    """The fullest instant of a layout.

    Attributes:
        stage: Pipeline stage that holds it.
        at: Name of the instant, and the operator that runs then.
        terms: Bytes by the terms of the memory calculator.
        unproven: What of the layout has no judged peak.
        spare: Bytes that it leaves free for that, beside the reserve.
    """

    stage: int
    at: str
    terms: dict[str, int]
    unproven: tuple[str, ...] = ()
    spare: int = 0

    @property
    def total(self) -> int:
        """Bytes of a rank."""
        return sum(self.terms.values())

    @property
    def needs(self) -> int:
        """Bytes that a rank must have: the peak, and what is spared."""
        return self.total + self.spare

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer, activations and buffers."""
        return sum_by_role(self.terms)


def layout_peak(load: Workload, layout: Layout, counting: Counting | None = None) -> Peak:
    """Return the peak of a layout; a workload remembers those that were asked for.

    Raises:
        ValueError: As `counted_run`.
    """
    return _peak(load, layout, counting or Counting(recipe=load.recipe.name))


@cached_by(*FIELDS)
def _peak(load: Workload, layout: Layout, counting: Counting) -> Peak:
    return peak_and_step(load, layout, counting)[0]


def peak_and_step(load: Workload, layout: Layout, counting: Counting) -> tuple[Peak, Step]:
    """Return the peak of a layout, and the step on the stage that has it, of which nothing is remembered."""
    run = counted_run(load, layout, counting)
    instant, step = memory_peak(run, step=counting.step)
    names = unproven(run)
    spare = round(UNPROVEN_SHARE * instant.total) if names and counting.spares else 0
    return Peak(step.stage.number, _when(instant), dict(instant.terms), names, spare), step


def refusal(load: Workload, layout: Layout, counting: Counting) -> str:
    """Return why a layout is not counted, or an empty text: the framework does not run it, or nobody knows its memory.

    Both depend on which degrees are above one, and not on how far, so one layout answers for all like it.
    """
    try:
        counted_run(load, layout, counting)
        block_activations(load, layout, layout.recompute, counting.implementation)
        if counting.accepts:
            counting.accepts(layout)
    except ValueError as error:
        return str(error)
    return ""


def _when(instant: MemoryInstant) -> str:
    return f"{instant.name}, {instant.at}" if instant.at else instant.name
