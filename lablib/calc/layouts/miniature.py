"""A job small enough for eight ranks on a laptop, and what each axis of its mesh will send.

    job = Miniature(config=tiny, dp=2, tp=2, pp=2, micro_batches=4)
    predicted_traffic(job, rank=0, version="toys")["tp"].sent      # bytes that rank 0 sends to its tp group in a step

The toys and PyTorch do the same arithmetic with other messages: PyTorch's tensor parallelism reduces the gradients that
come back through q, k, v (and gate, up) one by one, and gathers the logits. `lablib.launch.layouts.composition` runs a
miniature and counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes
from lablib.calc.errors import check_whole, must_divide, one_of
from lablib.calc.layouts.meshes import DEFAULT_ORDER, Mesh, mesh
from lablib.calc.models import ModelConfig, Tensor, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.parallel import Unit, fsdp_traffic, layer_collectives
from lablib.calc.schedules import schedule, stage_layers

VERSIONS = ("toys", "torch")
VALUE_BYTES = {"float32": 4, "float64": 8}
SCHEDULES = ("1f1b", "gpipe")
#: DDP's first bucket: gradients below it travel in one message, and a miniature's do.
ONE_BUCKET = 2**20


@dataclass(frozen=True, kw_only=True)
class Miniature:
    """A small job: model, degrees of parallelism, batch.

    Attributes:
        config: The model; GPT-2 or Llama shape, not tied when there are stages.
        sharded: Whether the replicas share their states: ZeRO-3 and FSDP2; with stages ZeRO-1 and FSDP2 that keeps
            what it gathered until the last backward. False: DDP.
        micro_batches: Forward passes of a replica in a step; more than 1 only with stages.
        batch: Sequences in a step, over all replicas.
        schedule: "1f1b" or "gpipe".
        dtype: "float32" or "float64".
        order: Axes of the mesh, fastest first.
        gpus_per_node: Ranks of a pretended node, for `mesh.crosses`.
    """

    config: ModelConfig
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sharded: bool = False
    micro_batches: int = 1
    batch: int = 8
    seq: int = 16
    steps: int = 3
    schedule: str = "1f1b"
    dtype: str = "float32"
    order: str = DEFAULT_ORDER
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("dtype", self.dtype, VALUE_BYTES)
        config = self.config
        mesh(tp=self.tp, dp=self.dp, pp=self.pp, order=self.order, gpus_per_node=self.gpus_per_node)
        for name in ("batch", "steps", "seq", "micro_batches"):
            check_whole(name, getattr(self, name), 1)
        for of in ("num_heads", "num_kv_heads", "ffn", "vocab"):
            must_divide("tp", self.tp, of, getattr(config, of))
        must_divide("pp", self.pp, "num_layers", config.num_layers)
        must_divide("dp x micro_batches", self.dp * self.micro_batches, "batch", self.batch)
        if self.pp == 1 and self.micro_batches > 1:
            raise ValueError(f"micro_batches={self.micro_batches} needs pp of at least 2; without stages use 1")
        if config.tied and self.pp * self.tp > 1:
            raise ValueError(
                f"{config.name} is tied, and here pp={self.pp} and tp={self.tp} need a head of its own: tied=False"
            )

    @property
    def ranks(self) -> int:
        """Ranks, `dp · tp · pp`."""
        return self.dp * self.tp * self.pp

    @property
    def mesh(self) -> Mesh:
        """Which rank is where."""
        return mesh(tp=self.tp, dp=self.dp, pp=self.pp, order=self.order, gpus_per_node=self.gpus_per_node)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, fastest first."""
        return tuple(axis for axis in self.mesh.order if self.mesh.size(axis) > 1)

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward pass."""
        return self.batch // (self.dp * self.micro_batches)

    @property
    def stream_bytes(self) -> int:
        """Bytes of X, the stream of one micro-batch: b·s·h values."""
        return self.micro_batch * self.seq * self.config.hidden * VALUE_BYTES[self.dtype]

    def layers(self, stage: int) -> range:
        """Return the blocks of a stage."""
        return stage_layers(self.config.num_layers, self.pp)[stage][0]

    def schedule_made(self) -> object:
        """Return the pipeline's schedule, a `lablib.calc.schedules.Schedule`."""
        return schedule(self.schedule, self.pp, self.micro_batches)


@dataclass(frozen=True)
class AxisTraffic:
    """Messages of one rank to its group along one axis in one step.

    Attributes:
        calls: Collectives, or sends, by operation.
        sent: Bytes that the rank sends if rings carry the collectives.
    """

    calls: dict[str, int]
    sent: float

    @property
    def messages(self) -> int:
        """Calls of all operations together."""
        return sum(self.calls.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {op}" for op, count in sorted(self.calls.items())) or "nothing"
        return f"{counts}: {self.sent:,.0f} bytes"


def predicted_traffic(job: Miniature, rank: int, version: str = "toys") -> dict[str, AxisTraffic]:
    """Return what a rank sends along every axis of more than one rank, in one optimizer step."""
    one_of("version", version, VERSIONS)
    stage = job.mesh.coordinates(rank)["pp"]
    of = {"tp": _tensor, "pp": _pipeline, "dp": _data}
    return {axis: of[axis](job, stage, version) for axis in job.axes}


def _tensor(job: Miniature, stage: int, version: str) -> AxisTraffic:
    layers, m, t = len(job.layers(stage)), job.micro_batches, job.tp
    first, last = stage == 0, stage == job.pp - 1
    halves = layer_collectives()
    forward, backward = (halves[part]["all_reduce"] for part in ("forward", "backward"))
    if version == "torch":
        # One for each column-parallel matrix that reads the stream: q, k, v, and up (and gate).
        backward = 3 + (2 if job.config.gated_mlp else 1)
    streams = m * (layers * (forward + backward) + first + last)
    calls = {"all_reduce": streams}
    sent = streams * ring_all_reduce_bytes(job.stream_bytes, t)
    numbers = job.micro_batch * job.seq * VALUE_BYTES[job.dtype]
    if last and version == "toys":
        # The loss from split logits: the maximum, then two sums in one message.
        calls["all_reduce"] += 2 * m
        sent += m * ring_all_reduce_bytes(3 * numbers, t)
    elif last:
        calls["all_gather"] = m
        sent += m * ring_all_gather_bytes(numbers * job.config.vocab, t)
    return AxisTraffic(calls, sent)


def _pipeline(job: Miniature, stage: int, version: str) -> AxisTraffic:
    sends = job.micro_batches * ((stage > 0) + (stage < job.pp - 1))
    return AxisTraffic({"send": sends}, float(sends * job.stream_bytes))


def _data(job: Miniature, stage: int, version: str) -> AxisTraffic:
    value = VALUE_BYTES[job.dtype]
    units = local_units(job, stage)
    held = sum(unit.params for unit in units)
    if not job.sharded:
        if held * value > ONE_BUCKET:
            raise ValueError(
                f"a rank of stage {stage} holds {held * value:,} bytes of gradients, more than the first bucket of "
                f"{ONE_BUCKET:,}: take a smaller model, whose gradients travel in one message"
            )
        return AxisTraffic({"all_reduce": 1}, ring_all_reduce_bytes(held * value, job.dp))
    if version == "torch":
        # With stages nothing is freed before the last backward: one gather and one scatter a step.
        found = fsdp_traffic(units, job.dp, reshard=job.pp == 1, param_bytes=value, reduce_bytes=value)
        return AxisTraffic(dict(found.calls), found.ring_bytes_sent())
    # The toy lays parameters end to end and pads the end only.
    sizes = [unit.params for unit in units] if job.pp == 1 else [held]
    gathers = 2 if job.pp == 1 else 1
    sent = sum(ring_all_gather_bytes(-(-size // job.dp) * job.dp * value, job.dp) for size in sizes)
    return AxisTraffic({"all_gather": gathers * len(sizes), "reduce_scatter": len(sizes)}, (gathers + 1) * sent)


def local_units(job: Miniature, stage: int) -> list[Unit]:
    """Return what one rank of a stage holds, as FSDP2's units: the root (ends of the model) first, then each block."""
    ends: list[Tensor] = []
    if stage == 0:
        ends += embedding_tensors(job.config)
    if stage == job.pp - 1:
        ends += head_tensors(job.config)
    units = [Unit(name="", shapes=_shapes(ends, job.tp))]
    for layer in job.layers(stage):
        units.append(Unit(name=f"blocks.{layer}", shapes=_shapes(layer_tensors(job.config, layer), job.tp)))
    return units


def _shapes(tensors: list[Tensor], tp: int) -> tuple[tuple[int, int], ...]:
    return tuple(tensor.shape(tp) for tensor in tensors for _ in range(tensor.copies))
