"""A training run on N GPUs of one type, and how many bytes a rank of it needs.

    have = setup("llama-3-70b", gpu="h100", gpus=16, seq=8192)
    have.memory, have.budget, have.fits

Which number is compared with a GPU's memory depends on whose implementation is counted:

- kernels="paper": the total of `training_memory`, every term at its full size;
- kernels="toy" and "hf": the peak of `memory_timeline`, which walks through the step.

The budget is the GPU's nominal capacity less a reserve for the CUDA context, NCCL and fragmentation, the planner's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from os import PathLike

from lablib.calc.choices import check_whole, one_of
from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.links import link_rate
from lablib.calc.memory_stage import Stage
from lablib.calc.memory_timeline import STEPS, memory_timeline
from lablib.calc.models import ModelConfig
from lablib.calc.plan import RESERVE
from lablib.calc.rank_memory import stage_memory
from lablib.calc.run_config import RunConfig, run_config
from lablib.calc.units import GB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run, the card that it is to fit on, and what is kept free there.

    Attributes:
        run: The checked settings; their dp, cp, tp and pp multiply to the GPUs.
        card: The accelerator.
        gpus_per_node: GPUs that the scale-up link connects.
        reserve: Bytes of a card that nothing may use.
        step: How the optimizer runs, for `memory_timeline`.
        nic: Link, or bytes per second, of one GPU out of its node; None means what the planner assumes.
        intra: The same inside a node; None means the card's own.
        given: Names of the settings that were given, and so are not free where a layout is looked for.
    """

    run: RunConfig
    card: Accelerator
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
        """Bytes of a card that the run may use."""
        return self.card.memory_bytes - self.reserve

    @property
    def memory(self) -> int:
        """Bytes that a rank needs, on the pipeline stage that needs most."""
        return max(_forward(self.run, self.step, stage) for stage in range(self.run.pp))

    @property
    def fits(self) -> bool:
        """Whether they are within the budget; the first stage that is not ends the question."""
        return all(_forward(self.run, self.step, stage) <= self.budget for stage in range(self.run.pp))

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

    def having(self, **changes: object) -> Setup:
        """Return the setup with other arguments of `training_memory`, or another `step`."""
        step = changes.pop("step", self.step)
        return replace(self, run=replace(self.run, **changes), step=step)


Model = ModelConfig | str | PathLike | Setup


def setup(
    model: ModelConfig | str | PathLike,
    *,
    gpu: str | Accelerator,
    gpus: int | None = None,
    gpus_per_node: int = 8,
    reserve: int = RESERVE,
    step: str = "foreach",
    nic: str | float | None = None,
    intra: str | float | None = None,
    **settings: object,
) -> Setup:
    """Return a run on so many cards, checked.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        gpu: The accelerator, or its name.
        gpus: GPUs in all; None means what dp, tp, cp and pp multiply to. dp is what the other three leave.
        gpus_per_node: GPUs that the scale-up link connects.
        reserve: Bytes of a card that are kept free.
        step: How the optimizer runs, where a timeline is walked through: "foreach", "for-loop" or "fused".
        nic: Link, or its rate ("40 GB/s", or bytes per second), of one GPU out of its node; it ranks changes and decides about no memory.
        intra: The same inside a node.
        **settings: Arguments of `training_memory`, all but `stage`.

    Raises:
        ValueError: As `training_memory`; if the factors do not multiply to the GPUs; if the GPUs are not whole nodes or
            a part of one; or if the reserve is as large as the card.
    """
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    for name, value in (("gpus", 1 if gpus is None else gpus), ("gpus_per_node", gpus_per_node)):
        check_whole(name, value, 1)
    if not isinstance(reserve, int) or isinstance(reserve, bool) or not 0 <= reserve < card.memory_bytes:
        raise ValueError(
            f"reserve={reserve!r} bytes must be at least 0 and less than the {card.memory_bytes} of {card.name}"
        )
    for name, value in (("nic", nic), ("intra", intra)):
        if value is not None:
            link_rate(name, value)
    one_of("step", step, STEPS)
    given = frozenset(settings)
    free = gpus is not None and "dp" not in given
    later = {"ep": 1} if free else {}  # it must divide dp times cp, which is not known yet
    run = run_config(model, **settings | later)
    if free:
        width = run.tp * run.cp * run.pp
        if gpus % width:
            raise ValueError(
                f"tp={run.tp} x cp={run.cp} x pp={run.pp} = {width} ranks of one replica do not divide gpus={gpus}"
            )
        run = run_config(model, **settings | {"dp": gpus // width})
    if gpus is not None and run.ranks != gpus:
        raise ValueError(
            f"dp={run.dp} x tp={run.tp} x cp={run.cp} x pp={run.pp} = {run.ranks} ranks, but gpus={gpus}"
        )
    found = Setup(
        run=run, card=card, gpus_per_node=gpus_per_node, reserve=reserve, step=step, nic=nic, intra=intra, given=given
    )  # fmt: skip
    if found.gpus > gpus_per_node and found.gpus % gpus_per_node:
        whole = found.gpus // gpus_per_node * gpus_per_node
        raise ValueError(
            f"gpus={found.gpus} are not whole nodes of gpus_per_node={gpus_per_node}; "
            f"use {whole} or {whole + gpus_per_node}"
        )
    _forward(run, step, 0)  # what the forward question refuses is refused here
    return found


def as_setup(model: Model, settings: dict[str, object]) -> Setup:
    """Return the Setup that was given, or make one."""
    if not isinstance(model, Setup):
        return setup(model, **settings)
    if settings:
        raise ValueError(f"a Setup has all settings: leave out {', '.join(settings)}")
    return model


def counted(have: Setup) -> str:
    """Return in words which number of the calculator is compared with the GPU's memory."""
    if not have.run.kernels.eager:
        return "the total of training_memory: every term at its full size"
    return f"the peak of memory_timeline, {have.step} optimizer step"


def size(n: float) -> str:
    """Return bytes as text in GB, 1e9 bytes, or in MB below half of one."""
    return format_bytes(n, "GB" if n >= GB / 2 or n == 0 else "MB")


MEANING = "unproven: no configuration of the memory table has it, so nothing that PyTorch counted stands beside the formula."


def unproven(run: RunConfig) -> tuple[str, ...]:
    """Return the settings of a run that no configuration of the memory table has; `rung fit` marks them."""
    named = {
        run.optimizer.name: run.optimizer.quantized,
        "qlora": run.tuning == "qlora",
        "offload": run.offload != "none",
        "flat ZeRO": run.zero > 0 and run.sharding == "flat" and run.dp * run.cp > 1,
        "cp": run.cp > 1,
        "ep": run.ep > 1,
        "interleaved": run.schedule == "interleaved",
    }
    return tuple(name for name, so in named.items() if so)


@lru_cache(maxsize=2**14)
def _forward(run: RunConfig, step: str, stage: int) -> int:
    if not run.kernels.eager:
        return stage_memory(Stage(run, stage)).total
    return memory_timeline(run, step=step, stage=stage).peak_bytes
