"""Published layouts read as worked examples: every number of the paper, and what follows from it.

    print(*read_layout("llama-3.1-405b").lines, sep=" ")

A `Fact` is printed in the paper; a `Derived` line is arithmetic on facts by this library. Where a paper leaves a
choice open, the reading says which one is ours.

Sources: Llama 3 (arXiv 2407.21783), section 3.3.2 and table 4; DeepSeek-V3 (arXiv 2412.19437), section 3.2 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.errors import one_of
from lablib.calc.layouts.meshes import Mesh, mesh
from lablib.calc.layouts.planner import (
    LLAMA3,
    WORKED_EXAMPLES,
    Layout,
    Workload,
    check_layout,
    cluster,
    layers_per_stage,
    layout_memory,
)
from lablib.calc.models import ModelConfig, preset

DEEPSEEK = "DeepSeek-V3 (arXiv 2412.19437)"


@dataclass(frozen=True)
class Fact:
    """One statement of a paper.

    Attributes:
        name: What it says something about.
        value: The number or the words, as printed.
    """

    name: str
    value: float | int | str
    where: str


@dataclass(frozen=True)
class Reading:
    """A published layout.

    Attributes:
        layout: The layout; what the paper leaves open is ours.
        mesh: Its ranks, in the paper's order where that is printed.
        ours: Fields of the layout that it does not print.
    """

    name: str
    paper: str
    model: ModelConfig
    layout: Layout
    mesh: Mesh
    seq: int
    global_batch: int
    facts: tuple[Fact, ...]
    ours: tuple[str, ...]
    gpu: str

    def fact(self, name: str) -> float | int | str:
        """Return a printed value."""
        one_of("fact", name, [fact.name for fact in self.facts])
        return next(fact.value for fact in self.facts if fact.name == name)

    @property
    def groups(self) -> dict[str, tuple[int, int, bool]]:
        """Axes of more than one rank: number of groups, ranks of each, and whether they leave a node."""
        sizes = {axis: self.mesh.size(axis) for axis in self.mesh.order}
        return {
            axis: (self.mesh.ranks // size, size, self.mesh.crosses(axis)) for axis, size in sizes.items() if size > 1
        }

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.layout.num_microbatches(self.global_batch)

    @property
    def layers(self) -> list[int]:
        """Layers of each stage."""
        return layers_per_stage(self.model.num_layers, self.layout.pp, self.layout.virtual_stages)

    @property
    def bubble(self) -> float:
        """Idle over ideal time, (p-1)/(v m), where stages take equal time."""
        return (self.layout.pp - 1) / (self.layout.virtual_stages * self.micro_batches)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a rank by term, on the stage that needs most, as this library counts."""
        load = Workload(self.model, cluster(self.gpu, self.mesh.ranks), self.seq, self.global_batch)
        return layout_memory(load, self.layout)

    @property
    def lines(self) -> list[str]:
        """The reading as sentences: what is printed, what follows, and what is ours."""
        printed = [f"{fact.name}: {_text(fact.value)} ({fact.where})" for fact in self.facts]
        follows = [
            f"{axis}: {count:,} groups of {size}, {'across nodes' if crosses else 'inside a node'}"
            for axis, (count, size, crosses) in self.groups.items()
        ]
        follows.append(
            f"layers of a stage: {self.layers[0]} first, {self.layers[len(self.layers) // 2]} in the middle, "
            f"{self.layers[-1]} last"
        )
        follows.append(
            f"{self.micro_batches} micro-batches for {self.layout.pp} stages of {self.layout.virtual_stages} chunks: "
            f"bubble {self.bubble:.1%} of the ideal time"
        )
        held = sum(self.memory.values()) / 1e9
        follows.append(
            f"memory of a rank: {held:.1f} GB, most of it {max(self.memory, key=self.memory.get).replace('_', ' ')}"
        )
        return [*printed, *follows, f"not printed, ours: {', '.join(self.ours)}"]


def reading_names() -> list[str]:
    """Return the models whose published layouts can be read."""
    return list(_READINGS)


def read_layout(name: str) -> Reading:
    """Return a published layout as a worked example."""
    one_of("reading", name, _READINGS)
    paper, gpu, order, facts, ours = _READINGS[name]
    layout, job = WORKED_EXAMPLES[name]
    model = preset(name)
    gpus = layout.gpus
    seq, batch = job["seq"], job["global_batch"]
    check_layout(layout, model, gpus=gpus, seq=seq, global_batch=batch)
    grid = mesh(
        tp=layout.tp, cp=layout.cp, ep=layout.ep, dp=layout.dp // layout.ep, pp=layout.pp,
        order=order, gpus_per_node=job["gpus_per_node"], gpus=gpus,
    )  # fmt: skip
    return Reading(name, paper, model, layout, grid, seq, batch, facts, ours, gpu)


def deepseek_rate() -> dict[str, float]:
    """Return DeepSeek-V3's rate from its own totals: 6 · active parameters · tokens over GPU hours.

    Returns:
        "flops" of pre-training, "tflops" a GPU, and "share" of the dense bf16 peak of an H800.
    """
    reading = read_layout("deepseek-v3")
    flops = 6 * reading.fact("active parameters") * reading.fact("tokens")
    rate = flops / (reading.fact("GPU hours of pre-training") * 3600)
    from lablib.calc.hardware import accelerator

    return {"flops": flops, "tflops": rate / 1e12, "share": rate / accelerator("h800").peak("bf16")}


def _text(value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if value < 1e9 else f"{value:.4g}"


_LLAMA_FACTS = (
    Fact("GPUs", 16384, "table 4"),
    Fact("tp", 8, "table 4"),
    Fact("cp", 1, "table 4"),
    Fact("pp", 16, "table 4"),
    Fact("dp", 128, "table 4"),
    Fact("tokens of a sequence", 8192, "table 4"),
    Fact("sequences of a replica", 16, "table 4"),
    Fact("tokens of a step", 16_777_216, "table 4"),
    Fact("TFLOP/s of a GPU", 400, "table 4"),
    Fact("order, fastest first", "tp, cp, pp, dp", "section 3.3.2"),
    Fact("layers", 126, "table 3"),
)
_DEEPSEEK_FACTS = (
    Fact("GPUs", 2048, "section 3.1"),
    Fact("pp", 16, "section 3.2"),
    Fact("ep", 64, "section 3.2"),
    Fact("nodes of an expert group", 8, "section 3.2"),
    Fact("data parallelism", "ZeRO-1", "section 3.2"),
    Fact("tensor parallelism", "none", "section 3.2"),
    Fact("total parameters", 671e9, "abstract"),
    Fact("active parameters", 37e9, "abstract"),
    Fact("tokens", 14.8e12, "abstract"),
    Fact("GPU hours of pre-training", 2_664_000, "table 1"),
)
_READINGS = {
    "llama-3.1-405b": (LLAMA3, "h100", "tp-cp-ep-pp-dp", _LLAMA_FACTS, ("zero", "virtual_stages")),
    "deepseek-v3": (
        DEEPSEEK,
        "h800",
        "tp-cp-ep-dp-pp",
        _DEEPSEEK_FACTS,
        ("schedule (theirs is DualPipe)", "recompute", "global_batch", "order of the ranks"),
    ),
}
