"""A training run on N GPUs of one type: how many bytes a rank of it needs, and how long a step takes.

    spec = setup("llama-3-70b", gpu="h100", gpus=16, seq=8192)
    spec.memory, spec.budget, spec.verdict.word

What is compared with a GPU is the peak of `memory_timeline`; the budget is what CUDA gives out less its context and a
reserve. A run above the budget counts as one that does not fit, though it may be tight.

The step is the planner's, with the kernels of the implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from os import PathLike

from lablib.calc.errors import check_whole, one_of
from lablib.calc.hardware import Accelerator, accelerator, link_rate
from lablib.calc.layouts.planner import (
    FIELDS,
    FRAMEWORKS,
    Layout,
    Likeness,
    Training,
    Workload,
    check_nodes,
    cluster,
    like_this,
    step_time,
)
from lablib.calc.memory import (
    GRADIENT_TERMS,
    RESERVE,
    WEIGHT_TERMS,
    RunConfig,
    Stage,
    Verdict,
    check_reserve,
    current_names,
    run_config,
    stage_memory,
    weights_are_sharded,
)
from lablib.calc.memory.timeline import STEPS, memory_peak
from lablib.calc.models import ModelConfig, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.parallel import state_terms
from lablib.calc.schedules import layers_per_stage
from lablib.calc.units import GB, format_bytes


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run, the GPU that it should fit on, and the bytes to keep free there.

    Attributes:
        run: The checked settings; their dp, cp, tp and pp multiply to the GPUs.
        reserve: Bytes of a GPU that the run should leave.
        step: How the optimizer runs, for `memory_timeline`.
        nic: Link, or bytes per second, of one GPU out of its node; None means what the planner assumes.
        intra: The same inside a node; None means the GPU's own.
        given: Names of the settings that were given, and so are not free where a layout is looked for.
    """

    run: RunConfig
    gpu: Accelerator
    gpus_per_node: int = 8
    reserve: int = RESERVE
    step: str = "foreach"
    nic: str | float | None = None
    intra: str | float | None = None
    given: frozenset[str] = frozenset()

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.run.ranks

    @property
    def budget(self) -> int:
        """Bytes of a GPU that the run may use."""
        return self.gpu.usable_bytes - self.reserve

    @property
    def memory(self) -> int:
        """Bytes that a rank needs at its peak, on the pipeline stage that needs most."""
        return _peak(self.run, self.step)

    @property
    def verdict(self) -> Verdict:
        """Those bytes beside the GPU."""
        return Verdict(self.memory, self.gpu, self.reserve)

    @property
    def within_budget(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.memory <= self.budget

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step: as given, else 1, or 4 for each pipeline stage, as the planner's framework asks."""
        return self.run.num_microbatches or (1 if self.run.pp == 1 else 4 * self.run.pp)

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all replicas; what a change keeps."""
        return self.run.dp * self.run.micro_batch * self.micro_batches

    def settings(self) -> dict[str, object]:
        """Return the arguments of `training_memory` that this run stands for, the model among them."""
        return {field.name: getattr(self.run, field.name) for field in fields(self.run)}

    def replace(self, **changes: object) -> RunSpec:
        """Return the setup with other arguments of `training_memory`, or another `step`.

        The layers of each stage were given for these stages; others get as many each.
        """
        step = changes.pop("step", self.step)
        if any(
            changes.get(name, getattr(self.run, name)) != getattr(self.run, name) for name in ("pp", "virtual_stages")
        ):
            changes.setdefault("layers_per_stage", None)
        return replace(self, run=replace(self.run, **changes), step=step)

    def links(self) -> tuple[str, dict[str, object]]:
        """Return the links that its times assume, as a sentence and by name; or why there are no times, and nothing."""
        try:
            load, layout = _planned(self)
            load.step_work(layout)  # a GPU without a figure for these dtypes has no times either
        except ValueError as error:
            return f"No times: {error}", {}
        return load.cluster.links_text(), load.cluster.links()

    def likeness(self) -> Likeness:
        """Return the measured runs like this one, and how wrong their predicted times were."""
        return like_this(*_planned(self))

    @property
    def counted(self) -> str:
        """In words, which number of the calculator is compared with the GPU's memory."""
        return f"the peak of memory_timeline, {self.step} optimizer step"


Model = ModelConfig | str | PathLike | RunSpec


def setup(
    model: ModelConfig | str | PathLike,
    *,
    gpu: str | Accelerator,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    reserve: int = RESERVE,
    step: str = "foreach",
    nic: str | float | None = None,
    intra: str | float | None = None,
    **settings: object,
) -> RunSpec:
    """Return a checked run on so many GPUs.

    Args:
        gpus: GPUs in all; None means what dp, tp, cp and pp multiply to. dp is what the other three leave.
        step: How the optimizer runs, where a timeline is walked through: "foreach", "for-loop" or "fused".
        nic: Link, or its rate ("40 GB/s", or bytes per second), of one GPU out of its node; it ranks changes and decides about no memory.
        **settings: Arguments of `training_memory`, all but `stage`.

    Raises:
        ValueError: As `training_memory`; if the factors do not multiply to the GPUs; if the GPUs are not whole nodes or
            a part of one; or if the reserve is as large as the GPU's memory.
    """
    settings = current_names(settings)
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    node = card.gpus_per_node if gpus_per_node is None else gpus_per_node
    for name, value in (("gpus", 1 if gpus is None else gpus), ("gpus_per_node", node)):
        check_whole(name, value, 1)
    check_reserve(reserve, card)
    for name, value in (("nic", nic), ("intra", intra)):
        if value is not None:
            link_rate(name, value)
    one_of("step", step, STEPS)
    given = frozenset(settings)
    free = gpus is not None and "dp" not in given
    # Where experts are and copies of states must divide dp times cp, which is not known yet.
    later = {"ep": 1, "etp": None, "imbalance": 1.0, "shard": None} if free else {}
    run = run_config(model, **settings | later)
    if free:
        width = run.tp * run.cp * run.pp
        if gpus % width:
            raise ValueError(
                f"tp={run.tp} x cp={run.cp} x pp={run.pp} = {width} ranks of one replica do not divide gpus={gpus}"
            )
        run = run_config(model, **settings | {"dp": gpus // width})
    if gpus is not None and run.ranks != gpus:
        raise ValueError(f"dp={run.dp} x tp={run.tp} x cp={run.cp} x pp={run.pp} = {run.ranks} ranks, but gpus={gpus}")
    found = RunSpec(
        run=run, gpu=card, gpus_per_node=node, reserve=reserve, step=step, nic=nic, intra=intra, given=given
    )  # fmt: skip
    check_nodes(found.gpus, node)
    _peak(run, step)  # what the forward question refuses is refused here
    return found


def as_spec(model: Model, settings: dict[str, object]) -> RunSpec:
    """Return the RunSpec that was given, or make one."""
    if not isinstance(model, RunSpec):
        return setup(model, **settings)
    if settings:
        raise ValueError(f"a RunSpec has all settings: leave out {', '.join(settings)}")
    return model


def size(n: float) -> str:
    """Return bytes as text in GB, 1e9 bytes, or in MB below half of one."""
    return format_bytes(n, "GB" if n >= GB / 2 or n == 0 else "MB")


@lru_cache(maxsize=2**14)
def _peak(run: RunConfig, step: str) -> int:
    return memory_peak(run, step=step).instant.total


def rank_params(run: RunConfig) -> tuple[float, float]:
    """Return (all, trained) parameters of a rank, the mean over pipeline stages."""
    every, adapters = _model_params(run.model, (run.tp, run.ep, run.etp), run.lora_rank, run.lora_targets)
    return every / run.pp, (every if run.tuning == "full" else adapters) / run.pp


@lru_cache(maxsize=256)
def _model_params(
    model: ModelConfig, split: tuple[int, int, int | None], lora_rank: int, lora_targets: str
) -> tuple[int, int]:
    """(All parameters, those of adapters) of a rank that has all layers, split over tp, ep and etp."""
    dense = model.num_dense_layers if model.is_moe else model.num_layers
    parts = [(embedding_tensors(model) + head_tensors(model), 1)]
    for first, layers in ((0, dense), (dense, model.num_layers - dense)):  # two kinds of block at most
        parts += [(layer_tensors(model, first), layers)] if layers else []
    every = sum(times * tensor.local_params(*split) for part, times in parts for tensor in part)
    adapters = sum(
        times * tensor.adapter_params(lora_rank, *split)
        for part, times in parts
        for tensor in part
        if tensor.is_adapted and lora_targets in ("all", tensor.component)
    )
    return every, adapters


def _planned(spec: RunSpec) -> tuple[Workload, Layout]:
    """The run as the planner has it."""
    run = spec.run
    if run.layers_per_stage is not None:
        given, own = list(run.layers_per_stage), layers_per_stage(run.model.num_layers, run.pp, run.virtual_stages)
        if given != own:
            raise ValueError(f"layers_per_stage={given}: the planner times its own cut alone, {own}")
    return _workload(spec), Layout(**{name: getattr(run, name) for name in FIELDS})


def step_seconds(spec: RunSpec) -> float:
    """Return the predicted seconds of a step of `spec.sequences` sequences."""
    load, layout = _planned(spec)
    return sum(step_time(load.step_work(layout), load.rates()).values())


def predicted_seconds(spec: RunSpec) -> float | None:
    """Return `step_seconds`, or None where the planner has no answer."""
    try:
        return step_seconds(spec)
    except ValueError:
        return None  # no link of this GPU in the table, or stages that the planner does not know


def state_bytes(run: RunConfig, params: int, ranks: int, zero: int) -> int:
    """Return the bytes of states on the GPU for so many parameters, gradients left out: they come and go."""
    if run.offload == "parameters":
        return 0
    if run.tuning != "full":  # the frozen weights: NF4 codes are half a byte, and nothing is less
        share = params // (ranks if zero and weights_are_sharded(run) else 1)
        return share * run.recipe.weights if run.tuning == "lora" else share // 2
    terms = state_terms(params, ranks, zero, run.recipe, run.optimizer)
    weights = params // (ranks if zero and weights_are_sharded(run) else 1) * run.recipe.weights
    others = sum(terms.values()) - sum(terms.get(name, 0) for name in (*WEIGHT_TERMS, *GRADIENT_TERMS, "gradient_copy"))
    return weights + (others if run.offload == "none" else 0)


def least_states(spec: RunSpec) -> int:
    """Return bytes that some rank surely needs, which costs less to ask than the peak.

    Its states, if the stages were equal and gradients were gone; or the first stage's, with what forward keeps, which
    is all there when forward ends.
    """
    run = spec.run
    least = state_bytes(run, int(rank_params(run)[0]), run.replicas(False), run.zero)
    if least > spec.budget:
        return least
    return max(least, _first_stage(run))


@lru_cache(maxsize=4096)
def _first_stage(run: RunConfig) -> int:
    memory = stage_memory(Stage(run, 0))
    gradients = sum(memory.terms.get(name, 0) for name in (*GRADIENT_TERMS, "gradient_copy"))
    return memory.states - gradients + memory.activations


_WORKLOADS: dict[tuple, Workload] = {}


def _workload(spec: RunSpec) -> Workload:
    """Return a Workload that remembers what layouts share; only the last few are kept."""
    run = spec.run
    # One GPU sends nothing: any rate will do where the table has no link.
    alone = spec.gpus == 1 and (spec.gpu.scale_up or spec.gpu.host) is None
    intra = 1.0 if alone and spec.intra is None else spec.intra
    machine = cluster(spec.gpu, spec.gpus, gpus_per_node=spec.gpus_per_node, nic=spec.nic, intra=intra)
    how = (
        run.seq, spec.sequences, run.recipe, run.attention, run.sequence_parallel, FRAMEWORKS[run.implementation],
        run.imbalance, run.cp_way, Training(**{one.name: getattr(run, one.name) for one in fields(Training)}),
    )  # fmt: skip
    key = run.model, machine.gpu.name, machine.gpus, machine.gpus_per_node, machine.scale_up, machine.nic, *how
    if key not in _WORKLOADS:
        if len(_WORKLOADS) >= 8:
            _WORKLOADS.clear()
        _WORKLOADS[key] = Workload(run.model, machine, *how)
    return _WORKLOADS[key]
