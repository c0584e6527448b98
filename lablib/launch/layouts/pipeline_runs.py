"""Run a pipeline schedule on real ranks and look at it: the timeline of every rank, and the bytes that it holds.

    runs = run_ranks(watched_step, 4, schedule("1f1b", 4, 8), tiny_config("gpt2", tied=False))
    runs[0].timeline.makespan       # seconds
    runs[3].peak_bytes              # activations of the last rank at its worst instant

Four ranks on two cores cannot show what four accelerators do. With `seconds` every action lasts as long as it is told
to, most of it asleep, so that the cores are free: the messages, the order and the waiting are real, and the compute
time is emulated. Say so beside it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lablib.calc.memory.activations import embedding_activations, head_activations, layer_activations
from lablib.calc.models import ModelConfig
from lablib.calc.schedules import Action, Schedule, Timeline, parse_schedule, peak_activations, schedule
from lablib.launch.measure import record_comms
from lablib.toys import transformer
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.text import sample_windows, tokens
from lablib.toys.transformer import Transformer

FP32 = 4


class Run(NamedTuple):
    """The last step, as one rank saw it."""

    timeline: Timeline  # all ranks, in seconds from the first start
    peak_bytes: int  # most bytes of activations that this rank held between two actions; 0 if nobody counted
    peak_in_flight: float  # most micro-batches that it held
    messages: int  # what it sent; 0 if nobody counted
    loss: float | None  # on the rank of the last stage; None elsewhere
    gradients: dict[str, Tensor]  # of this rank's parameters, by their names in the model


class WatchedExecutor(PipelineExecutor):
    """An executor whose actions can last as long as they are told to, and that counts what autograd keeps.

    Attributes:
        seconds: Time that each kind of action lasts at least; on a rank with v stages each takes 1/v of it.
        counts: Whether to count bytes, which slows the step down.
        peak_bytes: Most bytes held after an action, since it was last set to 0.
    """

    seconds: Mapping[str, float] = {}
    counts = False
    peak_bytes = 0

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.kept: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self.weights = {p.untyped_storage().data_ptr() for p in self.parameters()}

    def _run(self, action: Action, message: Tensor | None) -> Tensor | None:
        end = time.perf_counter() + self.seconds.get(action.kind, 0) / len(self.stages)
        if self.counts:
            with saved_tensors_hooks(self._keep, lambda saved: getattr(saved, "tensor", saved)):
                result = super()._run(action, message)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes())
        else:
            result = super()._run(action, message)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    def held_bytes(self) -> int:
        """Return the bytes of activations that this rank holds now; a storage counts once."""
        held = [saved.tensor for saved in self.kept]
        # Between I and W a weight half holds the input of every linear layer and the gradient of its output.
        halves = [item.deferred.pending for item in self.held.values() if item.deferred]
        held += [tensor for pending in halves for pair in pending for tensor in pair[2:]]
        return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in held)}.values())

    def _keep(self, tensor: Tensor) -> _SavedTensor | Tensor:
        if tensor.untyped_storage().data_ptr() in self.weights:
            return tensor  # weights exist anyway
        saved = _SavedTensor(tensor)
        self.kept.add(saved)
        return saved


class _SavedTensor:
    """A tensor that autograd keeps; it dies with the graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def watched_step(
    schedule: Schedule,
    config: ModelConfig,
    *,
    layers: Sequence[int] | None = None,
    batch: int = 2,
    seq: int = 32,
    seconds: Mapping[str, float] | None = None,
    counts: bool = False,
    steps: int = 2,
) -> Run:
    """Run training steps of a schedule on this rank; call it through `run_ranks`.

    Args:
        seconds: Time that each kind of action lasts in the last step, for emulated compute.
        counts: Whether to count bytes and messages, which slows the step down.
        steps: Steps to run; the last one is watched, and those before it warm up.
    """
    torch.manual_seed(0)
    model = Transformer(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    pipeline = WatchedExecutor(split_stages(model, schedule.num_stages, layers), schedule)
    microbatches = microbatch_windows(schedule.num_microbatches, batch, seq)
    for _ in range(steps - 1):
        pipeline.step(microbatches)
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.seconds, pipeline.counts = seconds or {}, counts
    dist.barrier()  # the ranks made their models at different speeds
    with record_comms() if counts else contextlib.nullcontext() as log:
        loss = pipeline.step(microbatches)
    gradients = {names[p]: p.grad for p in pipeline.parameters() if p.grad is not None}
    sent = sum(count for op, count in log.messages.items() if "send" in op) if log else 0
    loss = None if loss is None else loss.item()
    return Run(pipeline.timeline(), pipeline.peak_bytes, pipeline.peak_in_flight, sent, loss, gradients)


def microbatch_windows(count: int, batch: int, seq: int, seed: int = 0) -> list[Tensor]:
    """Return micro-batches of English text, windows_BT, each in a storage of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [sample_windows(_text(), count=batch, seq=seq, generator=generator) for _ in range(count)]


@functools.cache
def _text() -> Tensor:
    """Return all tokens of the text; reading a megabyte of it takes longer than a step of the lab."""
    return tokens()


def measured_times(timeline: Timeline) -> dict[str, list[float]]:
    """Return the median time of every kind of action on every stage of a real step, as `simulate` takes it."""
    names = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    samples: dict[tuple[str, int], list[float]] = {}
    for event in timeline.events:
        for action in event.action.parts:
            samples.setdefault((action.kind, action.stage), []).append(event.end - event.start)
    kinds = {kind for kind, _ in samples}
    stages = range(timeline.schedule.num_stages)
    return {
        names[kind]: [statistics.median(samples.get((kind, stage), [0.0])) for stage in stages]
        for kind in names
        if kind in kinds
    }


def stage_bytes(config: ModelConfig, layers: Sequence[int], *, batch: int, seq: int) -> list[int]:
    """Return the bytes that each stage of the toy keeps for one micro-batch in fp32, from F until B."""
    sizes = {"batch": batch, "seq": seq, "implementation": "toy", "bytes_per_value": FP32}
    layer = sum(layer_activations(config, attention="fused", **sizes).values())
    stages = [count * layer for count in layers]
    embedding = embedding_activations(config, **sizes)
    stages[0] += sum(embedding.values())
    if not config.learned_positions:  # every stage makes the angles of rotary positions anew
        stages[1:] = [held + embedding["positions"] * (held > 0) for held in stages[1:]]
    stages[-1] += sum(head_activations(config, **sizes).values())
    return stages


def weight_half_bytes(config: ModelConfig, layers: Sequence[int], *, batch: int, seq: int) -> list[int]:
    """Return the bytes that each stage keeps for one micro-batch in fp32 between I and W.

    The input of every linear layer, once where q, k and v or gate and up read the same, and the gradient of its output.
    For GPT-2 that is 16 b s h values a layer, the 32 sbh bytes of Table 1 of the Zero Bubble paper (2401.10241).
    """
    h, ups = config.hidden, 2 if config.gated_mlp else 1
    inputs = 2 * h + config.q_width + config.ffn
    outputs = config.q_width + 2 * config.kv_width + 2 * h + ups * config.ffn
    stages = [count * (inputs + outputs) for count in layers]
    stages[-1] += h + config.vocab
    return [values * batch * seq * FP32 for values in stages]


def predicted_peaks(schedule: Schedule, config: ModelConfig, *, batch: int, seq: int) -> list[int]:
    """Return the bytes of activations that each rank of the toy holds at its worst instant, in fp32."""
    cuts = [stage * config.num_layers // schedule.num_stages for stage in range(schedule.num_stages + 1)]
    layers = [end - start for start, end in itertools.pairwise(cuts)]
    stored = stage_bytes(config, layers, batch=batch, seq=seq)
    between = weight_half_bytes(config, layers, batch=batch, seq=seq)
    peaks = []
    for rank in range(schedule.num_ranks):
        mine = schedule.stages_of(rank)
        part = sum(between[stage] for stage in mine) / sum(stored[stage] for stage in mine)
        peaks.append(round(peak_activations(schedule, stage_size=stored, after_input=min(1, part))[rank]))
    return peaks


#: What `get_schedule_class` knows by name, and the stages on a rank that this course runs it with.
TORCH_SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


class OwnStage(PipelineStage):
    """A stage that does not greet its own rank: torch 2.11 does when the next stage is there too, and gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class TorchRun(NamedTuple):
    """A step of PyTorch's, as one rank saw it."""

    order: Schedule
    gradients: dict[str, Tensor]  # of this rank's parameters, by their names in the model
    losses: list[float]  # of the micro-batches, on the rank of the last stage; empty elsewhere


def torch_pipeline(name: str, modules: list[nn.Module], m: int, loss):
    """Return PyTorch's schedule over the stages of this rank.

    Args:
        modules: All stages of the model, in order of depth.
        m: Micro-batches of a step.
        loss: Of the last stage's output and a micro-batch's target.
    """
    rank, p, n = dist.get_rank(), dist.get_world_size(), len(modules)
    cls, cpu = get_schedule_class(name), torch.device("cpu")
    mine = range(rank, n, p)  # p apart: a loop over the ranks
    if cls in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        mine = [rank, n - 1 - rank]  # a V: down the ranks and back up
    stages = [OwnStage(modules[s], s, n, cpu) for s in mine]
    if issubclass(cls, PipelineScheduleSingle):  # GPipe and 1F1B
        stages = stages[0]
    return cls(stages, n_microbatches=m, loss_fn=loss)


def torch_step(name: str, config: ModelConfig, m: int, *, batch: int = 2, seq: int = 32) -> TorchRun:
    """Run one step of a schedule of PyTorch's on this rank; call it through `run_ranks`.

    Model and micro-batches are those of `watched_step`, from the same seeds.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = transformer.Transformer(config)
    modules = split_stages(model, p * TORCH_SCHEDULES[name])
    pipeline = torch_pipeline(name, modules, m, transformer.loss)
    windows, losses = torch.cat(microbatch_windows(m, batch, seq)), []
    # The batch goes to the first stage, and the target to the last; PyTorch cuts both into micro-batches.
    inputs = [windows[:, :-1].contiguous()] if rank == 0 else []
    pipeline.step(*inputs, target=windows, losses=losses)
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    return TorchRun(_order(name, pipeline, p, m), gradients, [loss.item() for loss in losses])


def fsdp_gathers(config: ModelConfig, m: int, *, reshard: bool) -> tuple[int, int]:
    """Return how often a second step of 1F1B gathers the weights of this rank's stage, and reduces its gradients.

    Half of the ranks are replicas of the other half; each stage is one unit of FSDP2. Call it through `run_ranks`.

    Args:
        reshard: FSDP2's `reshard_after_forward`.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pp", "dp"))
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    torch.manual_seed(0)
    module = split_stages(transformer.Transformer(config), stages)[stage]
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    own = PipelineStage(module, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group())
    pipeline = Schedule1F1B(own, n_microbatches=m, loss_fn=transformer.loss)
    windows = torch.cat(microbatch_windows(m, 1, 8))
    inputs = [windows[:, :-1].contiguous()] if stage == 0 else []
    pipeline.step(*inputs, target=windows)  # the first step also finds out shapes
    with record_comms() as log:
        pipeline.step(*inputs, target=windows)
    return log.calls["all_gather"], log.calls["reduce_scatter"]


def _order(name: str, pipeline: object, p: int, m: int) -> Schedule:
    """Return the order that PyTorch ran: its own list, which classes with several stages a rank keep."""
    if isinstance(pipeline, PipelineScheduleSingle):  # loops in code; the list that 1F1B has is not what it runs
        return schedule(name.lower(), p, m)
    kept = [[str(step) for step in pipeline.pipeline_order[rank] if step is not None] for rank in range(p)]
    return parse_schedule([[step for step in row if "REDUCE" not in step] for row in kept], name)
