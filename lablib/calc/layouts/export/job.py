"""What is exported: a model, a layout and a batch whose factors were checked, and how it was counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike

from lablib.calc.errors import either, one_of
from lablib.calc.layouts.planner import Layout, check_layout
from lablib.calc.memory import ATTENTION, resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.precision import recipe as find_recipe


@dataclass(frozen=True)
class ExportJob:
    """A layout that was checked, and what it trains.

    Attributes:
        recipe: Dtypes that were counted; None means those that the framework trains in by itself.
    """

    model: ModelConfig
    layout: Layout
    seq: int
    global_batch: int
    gpus_per_node: int = 8
    sequence_parallel: bool = True
    recipe: str | None = None
    attention: str = "fused"

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.layout.gpus // self.gpus_per_node)

    @property
    def per_node(self) -> int:
        """Processes to start on a node."""
        return min(self.gpus_per_node, self.layout.gpus)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.layout.num_microbatches(self.global_batch)

    def dtypes(self, framework: str, known: Iterable[str]) -> str:
        """Return the recipe, or the framework's own, which is the first of those that it knows.

        Raises:
            ValueError: If the framework cannot train in it.
        """
        names = list(known)
        name = self.recipe or names[0]
        if name not in names:
            raise ValueError(f"recipe {name!r}: {framework} trains in {either(names)}")
        return name

    def require_fused(self, framework: str) -> None:
        """Refuse plain attention where a framework's file has no word for it."""
        if self.attention != "fused":
            raise ValueError(f"attention={self.attention!r}: {framework} runs fused attention; plan with 'fused'")


def export_job(
    model: ModelConfig | str | PathLike,
    layout: Layout,
    *,
    seq: int,
    global_batch: int,
    gpus_per_node: int = 8,
    sequence_parallel: bool = True,
    recipe: str | None = None,
    attention: str = "fused",
) -> ExportJob:
    """Return a job whose factors were checked.

    Args:
        recipe: Name of the dtypes that were counted; None means those that the framework trains in by itself.
    """
    config = resolve_model(model)
    check_layout(
        layout, config, gpus=layout.gpus, seq=seq, global_batch=global_batch, sequence_parallel=sequence_parallel
    )
    if gpus_per_node < 1 or (layout.gpus > gpus_per_node and layout.gpus % gpus_per_node):
        raise ValueError(f"{layout.gpus} ranks are not whole nodes of gpus_per_node={gpus_per_node}")
    if recipe is not None:
        find_recipe(recipe)
    one_of("attention", attention, ATTENTION)
    return ExportJob(config, layout, seq, global_batch, gpus_per_node, sequence_parallel, recipe, attention)


def torchrun(job: ExportJob, script: str) -> str:
    """Return the line that starts a job on every node; it reads MASTER_ADDR and JOB_ID from the shell."""
    if job.nodes == 1:
        return f"torchrun --standalone --nproc-per-node={job.per_node} {script}"
    return (
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.per_node} --rdzv-backend=c10d "
        f'--rdzv-endpoint="$MASTER_ADDR:29500" --rdzv-id="$JOB_ID" {script}'
    )


def counted(job: ExportJob, recipe: str) -> str:
    """Return in one line what was counted, for a file's head."""
    layout = job.layout
    return (
        f"{job.model.name}: {layout}, {layout.micro_batch} x {job.accumulation} x dp={layout.dp} = "
        f"{job.global_batch} sequences of {job.seq} tokens a step, {recipe}"
    )


@dataclass(frozen=True)
class Exporter:
    """One framework.

    Attributes:
        recipe: The dtypes that it trains in by itself.
        proven: The package and version whose parser has read what is written here.
        file: Name of the file, where its text is saved.
    """

    text: Callable[[ExportJob], str]
    recipe: str
    proven: str
    file: str
