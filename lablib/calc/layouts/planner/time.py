"""The time of a training step: the work of a micro-batch at full rates, what overlaps, and the bubble.

`layer_work` counts what a layer asks of one rank, a `Workload` adds it up stage by stage, and `step_time` makes seconds
of it by the constants of `rates`. Chapter 07 has the equations. Memory-bound kernels count their reads and writes: a norm
2 accesses a value, dropout with residual 3, unfused scores 6 and a mask; their backward 3 for every 2.

Left out: oversubscribed switches, memory so full that the allocator frees and asks again, and the time of a message
beside its bytes, which earns nothing on measured runs.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2, for the gather that hides in backward, so that sequence
parallelism counts 8bsh(t-1)/t a layer and not 10; Dao 2023 (arXiv 2307.08691) for fused attention's 5 products in backward
for 2; Megatron-Core's `MoEAlltoAllTokenDispatcher` for what experts send, and DeepSeek-V3 (arXiv 2412.19437), section
3.2.2, for dispatch that goes once to a node; chapter 12 for what a ring's merges read and write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from math import log2
from operator import attrgetter
from typing import NamedTuple

from lablib.calc.communication import ring_all_gather_bytes
from lablib.calc.flops import attended_pairs
from lablib.calc.hardware import LINKS, Accelerator
from lablib.calc.layouts.planner.layout import Cluster, Layout, Training
from lablib.calc.layouts.planner.rates import FITTED, FRAMEWORKS, Fitted, Framework, Rates, generation
from lablib.calc.models import ModelConfig, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.parallel import CPU_ADAM_BYTES, routed_bytes
from lablib.calc.params import attention_matrices
from lablib.calc.precision import Recipe, recipe
from lablib.calc.schedules import stage_layers

BACKWARD_BYTES = 1.5  # three accesses for two
FUSED_BACKWARD = 2.5  # five products for two
MERGE_BYTES = 10  # of a value that a ring adds: the part is read in 2 bytes, the sum read and written in 4
CAST_BYTES = (
    4  # a value is read in bf16 and written in FP8 twice, by rows and by columns; Blackwell needs one with one scale
)


class Work(NamedTuple):
    """What a pass asks of the machine, each part at its full rate.

    Attributes:
        matmul: Seconds of matrix products at the rate that large ones reach.
        fp8: Seconds of those that run in FP8, at FP8's rate.
        attention: Seconds of fused attention at the peak.
        memory: Seconds of kernels that are limited by memory.
        tp: Seconds of tensor-parallel collectives at the rate of the link; cp and ep likewise.
        products: Matrix products, counted: each has a start and an end in which the GPU is not full. Those of the experts
            that a rank holds count one by one: a grouped kernel works through them.
        layers: Forward passes of a layer that the host has to issue; a backward counts as two.
    """

    matmul: float = 0.0
    fp8: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    products: float = 0.0
    layers: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, n: float) -> Work:
        """Return n times as much."""
        return Work(*(n * mine for mine in self))


@dataclass(frozen=True)
class Passes:
    """Forward and backward of something; backward holds what is recomputed."""

    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The micro-batch of one rank, and how its values are held.

    Attributes:
        size: Sequences of a replica.
        value: Bytes of an activation and of a weight.
        gradient: Bytes of a weight's gradient where it is added up.
        stops_early: Whether recomputation stops behind the last tensor that backward needs.
        precision: Of a layer's products: "fp8", "mxfp8", or "" for that of the values.
        dispatch: How tokens reach their experts; see `Framework`.
    """

    size: int
    seq: int
    tp: int = 1
    cp: int = 1
    value: int = 2
    gradient: int = 2
    attention: str = "fused"
    sequence_parallel: bool = True
    dropout: bool = False
    stops_early: bool = False
    imbalance: float = 1.0
    cp_way: str = "ring"
    precision: str = ""
    dispatch: str = "all"

    @property
    def tokens(self) -> float:
        """Tokens of one context-parallel rank."""
        return self.size * self.seq / self.cp


def layer_work(
    model: ModelConfig, cluster: Cluster, batch: MicroBatch, *, layer: int, layout: Layout, recompute: str = "none"
) -> Passes:
    """Return the work of one layer on one rank for one micro-batch.

    Args:
        layer: Which layer, from 0; it matters where some have experts.
    """
    experts = model.has_experts(layer)
    tokens, seq, tp, value, gradient = batch.tokens, batch.seq, batch.tp, batch.value, batch.gradient
    peak, hbm = product_peak(cluster.gpu, value), cluster.gpu.memory_bandwidth
    rate = peak * cluster.achievable
    visited = _mlp_weights(model, experts) + (batch.imbalance - 1) * _routed_weights(model, experts)
    dense = 2 * tokens * (attention_matrices(model) + visited) / tp
    scores = 2 * tokens * seq * model.num_heads * (model.head_dim + model.value_dim) / tp
    flat, square = _layer_bytes(model, batch, experts)
    fused = batch.attention == "fused"
    if fused:
        # Masked scores are not computed, nor those outside of a window; of layers with and without one, the mean.
        needed = attended_pairs(model, seq, causal=True) / model.num_layers / seq**2
        kernel = Work(attention=scores * needed / peak)
    else:
        kernel = Work(matmul=scores / rate, memory=square * tokens * seq * model.num_heads / tp / hbm, products=2)
    weights = _local_weights(model, experts, layout)
    matrices = Work(
        memory=_operand_bytes(model, batch, experts) * tokens / hbm,
        products=_products(model, experts, model.num_experts // layout.ep if experts else 0),
        **_product_seconds(cluster, batch, dense),
    )
    between = Work(memory=flat * tokens / hbm)
    # Two all-reduces, as gathers and scatters; behind a router only shared experts take part in the second.
    halves = 4 if not experts or model.num_shared_experts else 2
    sent = Work(tp=halves * tokens * model.hidden * value * (tp - 1) / tp / cluster.bandwidth(tp))
    if experts:
        sent = sent + _expert_messages(model, cluster, batch, layout)
    context, context_back = _context_messages(model, cluster, batch)
    forward = matrices + between + kernel + sent + context + Work(memory=value * weights / hbm, layers=1)
    backward = (
        matrices.times(2)
        + between.times(BACKWARD_BYTES)
        + kernel.times(2)._replace(memory=BACKWARD_BYTES * kernel.memory, attention=FUSED_BACKWARD * kernel.attention)
        + sent
        + context_back
        + Work(memory=(value + 2 * gradient) * weights / hbm, layers=2)
    )
    if recompute == "full":
        backward = backward + forward
        if (
            batch.stops_early
        ):  # what comes behind the last tensor that backward needs is not run again: the MLP's last product
            last = Work(
                products=1,
                **_product_seconds(cluster, batch, 2 * tokens * model.hidden * _mlp_width(model, experts) / tp),
            )
            backward = backward + last.times(-1)
    elif recompute == "selective":
        backward = backward + kernel
    return Passes(forward, backward)


def head_work(model: ModelConfig, cluster: Cluster, batch: MicroBatch) -> Passes:
    """Return the work of the output head and the loss: one product, and the logits read and written in fp32."""
    tokens, tp, value, gradient = batch.tokens, batch.tp, batch.value, batch.gradient
    vocab = -(-model.vocab // tp)
    rate, hbm = product_peak(cluster.gpu, value) * cluster.achievable, cluster.gpu.memory_bandwidth
    product, loss, weights = (2 * tokens * model.hidden * vocab / rate, 3 * 4 * tokens * vocab, model.hidden * vocab)
    # One gather of the stream forward, one scatter of its gradient backward.
    sent = value * tokens * model.hidden * (tp - 1) / tp / cluster.bandwidth(tp)
    loss += value * tokens * (model.hidden + vocab)
    return Passes(
        Work(matmul=product, memory=(loss + value * weights) / hbm, tp=sent, products=1),
        Work(
            matmul=2 * product,
            memory=(BACKWARD_BYTES * loss + (value + 2 * gradient) * weights) / hbm,
            tp=sent,
            products=2,
        ),
    )


def _products(model: ModelConfig, experts: bool, held: int) -> int:
    """Matrix products of a layer's forward pass: q, k and v are one, gate and up too; two for each expert that is held."""
    mlp = 1 + 2 * bool(model.num_shared_experts) + 2 * held if experts else 2
    return 2 + (3 if model.is_mla else 0) + mlp


def _product_seconds(cluster: Cluster, batch: MicroBatch, flops: float) -> dict[str, float]:
    """Seconds of a layer's products by the fields of `Work`."""
    gpu, share = cluster.gpu, cluster.achievable
    if batch.precision:
        return {"fp8": flops / (gpu.peak("fp8") * share)}
    return {"matmul": flops / (product_peak(gpu, batch.value) * share)}


def product_peak(gpu: Accelerator, value: int) -> float:
    """Return the peak in FLOP/s at which a GPU multiplies values of 2 bytes, or of 4: fp32, and TF32 only if asked for.

    Raises:
        ValueError: If the table has no figure of the GPU for it.
    """
    if value == 4:
        return gpu.peak("fp32")
    return gpu.peak("bf16" if "bf16" in gpu.flops else "fp16")


def _mlp_weights(model: ModelConfig, experts: bool) -> int:
    """Weights that a token is multiplied with after attention."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return matrices * model.ffn
    visited = model.experts_per_token + model.num_shared_experts
    return matrices * visited * model.expert_ffn + model.hidden * model.num_experts


def _routed_weights(model: ModelConfig, experts: bool) -> int:
    """Those of them that stand in the experts of its choice."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    return matrices * model.experts_per_token * model.expert_ffn if experts else 0


def _local_weights(model: ModelConfig, experts: bool, layout: Layout) -> float:
    """Weights of a layer's matrices on a rank."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return (attention_matrices(model) + matrices * model.ffn) / layout.tp
    shared = attention_matrices(model) + matrices * model.num_shared_experts * model.expert_ffn
    routed = matrices * model.num_experts / layout.ep * model.expert_ffn
    return shared / layout.tp + routed / layout.expert_split


def _layer_bytes(model: ModelConfig, batch: MicroBatch, experts: bool) -> tuple[float, float]:
    """Bytes of forward's memory-bound kernels: a token of this rank, and a pair of tokens and head if not fused."""
    value, mask = batch.value, int(batch.dropout)
    stream = model.hidden * (model.norms_per_layer * 2 * value + 2 * (3 * value + mask))
    inner_width = model.ffn
    if experts:
        inner_width = (model.experts_per_token + model.num_shared_experts) * model.expert_ffn
        stream += 4 * value * model.experts_per_token * model.hidden  # permuted to the experts, and back
    inner = (3 if model.gated_mlp else 2) * value * inner_width
    if not model.learned_positions:
        inner += 2 * value * (model.q_width + model.kv_width)  # rotary positions
    pair = (6 if batch.dropout else 4) * value + mask
    return stream / (batch.tp if batch.sequence_parallel else 1) + inner / batch.tp, pair


def _mlp_width(model: ModelConfig, experts: bool) -> int:
    """Inner width of all MLPs that a token visits."""
    return model.ffn if not experts else (model.experts_per_token + model.num_shared_experts) * model.expert_ffn


def _operand_bytes(model: ModelConfig, batch: MicroBatch, experts: bool) -> float:
    """Bytes of a token that forward's products read and write; the parts that tp splits, and the stream that it does not.

    Every copy of a token that an expert gets is read and written.
    """
    width = _mlp_width(model, experts)
    copies = model.experts_per_token + model.num_shared_experts if experts else 1
    latents = model.q_lora_rank + model.kv_lora_rank
    split = model.q_width + 2 * model.kv_width + model.attn_width + (3 if model.gated_mlp else 2) * width
    operands = batch.value * ((2 + 2 * copies) * model.hidden + 2 * latents + split / batch.tp)
    if batch.precision:  # the inputs of the four are cast
        operands += CAST_BYTES * ((1 + copies) * model.hidden + (model.attn_width + width) / batch.tp)
    return operands


def _context_messages(model: ModelConfig, cluster: Cluster, batch: MicroBatch) -> tuple[Work, Work]:
    """What attention sends over cp, forward and backward; formulas and sources are in `lablib.calc.parallel.context`."""
    cp, tokens = batch.cp, batch.size * batch.seq * batch.value
    seconds = (cp - 1) / cp / cluster.bandwidth(cp, batch.tp)
    # Latent attention sends its latents, which no head divides.
    latents = model.kv_lora_rank + model.qk_rope_head_dim
    keys = tokens * (latents if model.is_mla else 2 * model.kv_width / batch.tp) * seconds
    if batch.cp_way == "gathered":
        return Work(cp=keys), Work(cp=keys)
    if batch.cp_way == "ring":
        # Outputs are merged forward; backward adds gradients of queries, and of keys and values as they go round.
        added = (cp - 1) * batch.tokens * MERGE_BYTES / batch.tp / cluster.gpu.memory_bandwidth
        back = model.q_width + 2 * model.kv_width
        return Work(cp=keys, memory=added * model.attn_width), Work(cp=2 * keys, memory=added * back)
    width = model.q_width + model.attn_width + 2 * model.kv_width
    sent = tokens * width / batch.tp / cp * (cp - 1) / cp
    exchanged = Work(cp=sent / cluster.exchange(cp, batch.tp))
    return exchanged, exchanged


def _expert_messages(model: ModelConfig, cluster: Cluster, batch: MicroBatch, layout: Layout) -> Work:
    """Tokens to the busiest rank's experts and back over ep; over etp, a gather of what came and a scatter of results."""
    ep, etp = layout.ep, layout.expert_split
    tokens = batch.imbalance * batch.tokens / batch.tp
    copies = tokens * model.experts_per_token * model.hidden * batch.value
    if batch.dispatch == "node":
        seconds = tokens * _once_per_node(model, cluster, ep, etp, batch.value)
    else:
        seconds = 2 * copies * (ep - 1) / ep / cluster.exchange(ep, etp)
    return Work(ep=seconds, tp=2 * copies * (etp - 1) / cluster.bandwidth(etp))


def _once_per_node(model: ModelConfig, cluster: Cluster, ep: int, etp: int, value: int) -> float:
    """Seconds of a token's way to its experts and back where it crosses once to each node: the slower of the two links."""
    near = cluster.neighbours(ep, etp)
    nodes, router = ep // near, model.router
    limit = nodes
    # A token may choose from some groups of experts; a node has one or several.
    if router is not None and router.groups > 1:
        limit = min(nodes, router.group_topk * max(1, nodes // router.groups))
    sent = routed_bytes(
        1, model.hidden, num_experts=model.num_experts, experts_per_token=model.experts_per_token, ep=ep,
        ranks_per_node=near, way="node", node_limit=limit, value=value,
    )  # fmt: skip
    across = sent.across / cluster.inter if nodes > 1 else 0.0
    return max(sent.inside / cluster.bandwidth(near, etp), across) / 2  # forward or backward


@dataclass(frozen=True)
class StageWork:
    """The work of one pipeline stage for one micro-batch, and how many stages are alike."""

    work: Passes
    count: int = 1


@dataclass(frozen=True)
class StepWork:
    """A step as work at full rates: all that `step_time` needs.

    Attributes:
        send: Seconds of one micro-batch's sends of a stage, both ways, at the link's full rate.
        scatter: Seconds of a reduce-scatter of a stage's gradients at full rate, and of what replicas of it send.
        gather: Seconds of an all-gather of a stage's weights at full rate.
        optimizer: Seconds of the optimizer's memory traffic at full rate.
        host: Seconds that states on the CPU take.
        doublings: How often one node was doubled to have the cluster's.
        dp_hides: What hides behind what; see `Framework`.
    """

    stages: tuple[StageWork, ...]
    micro_batches: int
    chunks: int = 1
    send: float = 0.0
    scatter: float = 0.0
    gather: float = 0.0
    zero: int = 0
    optimizer: float = 0.0
    host: float = 0.0
    doublings: float = 0.0
    dp_hides: bool = True
    tp_hides: bool = False
    pp_hides: bool = False
    cp_hides: bool = False
    ep_hides: bool = False
    host_waits: bool = True


def pass_seconds(
    work: Work,
    rates: Rates,
    *,
    tp_hides: bool = False,
    cp_hides: bool = False,
    ep_hides: bool = False,
    host_waits: bool = True,
) -> dict[str, float]:
    """Return the seconds of a forward or backward pass by part."""
    products = work.matmul / rates.matmul
    if work.fp8:
        products += work.fp8 / rates.fp8
    seconds = {
        "matmul": products,
        "attention": work.attention / rates.attention,
        "memory": work.memory / rates.memory,
        "tp": work.tp,
        "cp": work.cp,
        "ep": work.ep,
    }
    if tp_hides:
        seconds["tp"] = _added(seconds["tp"], seconds["matmul"], rates)
    if cp_hides:
        seconds["cp"] = _added(seconds["cp"], seconds["attention"], rates)
    if ep_hides:  # another micro-batch computes meanwhile
        seconds["ep"] = _added(seconds["ep"], products + seconds["attention"] + seconds["memory"], rates)
    seconds["latency"] = work.products * rates.product
    if host_waits:
        # The host issues kernels ahead of the GPU; where they are short the GPU waits for it.
        seconds["latency"] += max(0.0, work.layers * rates.layer - sum(seconds.values()))
    return seconds


def step_time(job: StepWork, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step by part; they sum to the step."""
    hides = {
        "tp_hides": job.tp_hides, "cp_hides": job.cp_hides, "ep_hides": job.ep_hides, "host_waits": job.host_waits
    }  # fmt: skip
    longest, others, slowest = -1.0, 0.0, None
    for stage in job.stages:
        forward, backward = (pass_seconds(work, rates, **hides) for work in (stage.work.forward, stage.work.backward))
        each = sum(forward.values()) + sum(backward.values())
        each += _added(job.send, each, rates) if job.pp_hides else job.send
        others += stage.count * each
        if each > longest:
            longest, slowest = each, (forward, backward)
    forward, backward = slowest
    # What the stage takes beside its passes; where nothing is sent, rounding may leave less than nothing.
    send = max(0.0, longest - sum(forward.values()) - sum(backward.values()))
    m = job.micro_batches
    exposed, again = _exposed(job, sum(forward.values()), sum(backward.values()), rates)
    seconds = {name: m * (forward[name] + backward[name]) for name in forward}
    return seconds | {
        "pp": m * send,
        "dp": exposed + m * again,
        "bubble": (others - longest) / job.chunks,
        "optimizer": job.optimizer / rates.memory + job.host,
        "step": job.doublings * rates.step,
    }


def _added(sending: float, computing: float, rates: Rates) -> float:
    """Seconds that sending adds to the computing that hides it."""
    return max(0.0, sending - computing) + rates.overlap * min(sending, computing)


def _exposed(job: StepWork, forward: float, backward: float, rates: Rates) -> tuple[float, float]:
    """Seconds that data parallelism adds: once a step, and in every micro-batch."""
    scatter, gather = job.scatter, job.gather
    if not job.dp_hides:
        return scatter + gather, 0.0
    if job.zero == 3:
        return 0.0, _added(gather, forward, rates) + _added(gather + scatter, backward, rates)
    if job.zero == 2:
        return _added(gather, forward, rates), _added(scatter, backward, rates)
    return _added(gather, forward, rates) + _added(scatter, backward, rates), 0.0


def cached_by(*names: str) -> Callable[[Callable], Callable]:
    """Let a workload remember what a function of it and of a layout returns, by fields of the layout.

    A search asks for ten thousand layouts, which share most of their pieces.

    Args:
        *names: Fields that the result depends on; it depends on further arguments too.
    """
    fields = attrgetter(*names)

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def remembered(load: Workload, layout: Layout, *args: object) -> object:
            key = (function, fields(layout), *args)
            if key not in load.cache:
                load.cache[key] = function(load, layout, *args)
            return load.cache[key]

        return remembered

    return decorate


@dataclass
class Workload:
    """A model, a cluster and a batch; pieces that layouts share are computed once.

    Attributes:
        imbalance: Tokens of the busiest rank's experts over the mean: 1 is even.
        precision: Of the layers' products: "fp8", "mxfp8", or "" for that of the recipe; the head stays in the recipe's.
        cache: What `cached_by` remembers.
    """

    model: ModelConfig
    cluster: Cluster
    seq: int
    global_batch: int
    recipe: Recipe = field(default_factory=lambda: recipe("mixed-bf16"))
    attention: str = "fused"
    sequence_parallel: bool = True
    framework: Framework = FRAMEWORKS["paper"]
    imbalance: float = 1.0
    cp_way: str = "ring"
    training: Training = field(default_factory=Training)
    precision: str = ""
    cache: dict = field(default_factory=dict, repr=False)

    @property
    def dropout(self) -> bool:
        """Whether the model trains with dropout: GPT-2 and GPT-3 shapes do, as `activations` assumes."""
        return self.model.family == "gpt2"

    @property
    def peak(self) -> float:
        """FLOP/s that MFU is a share of: FP8's where the layers' products run in FP8."""
        gpu = self.cluster.gpu
        return gpu.peak("fp8") if self.precision else product_peak(gpu, self.recipe.activation)

    @property
    def dtypes(self) -> str:
        """The recipe's name, and what the products run in if it is another."""
        return f"{self.recipe.name}, products in {self.precision.upper()}" if self.precision else self.recipe.name

    def rates(self, fitted: Fitted = FITTED) -> Rates:
        """Return the constants of this job."""
        return fitted.rates(generation(self.cluster.gpu), self.framework, self.precision)

    def uneven(self, layout: Layout) -> float:
        """Return the load of the busiest rank over the mean: one rank of ep gets at most all copies, each token once."""
        model = self.model
        return min(self.imbalance, layout.ep, model.num_experts / model.experts_per_token) if model.is_moe else 1.0

    def passes(self, layout: Layout) -> tuple[Passes, Passes, Passes]:
        """Return the work of one dense layer, one layer with experts, and the head; of a kind without layers the other's."""
        dense, sparse = self.layers
        first = self._dense_layer(layout) if dense else self._expert_layer(layout)
        last = self._expert_layer(layout) if sparse else first
        return first, last, self._head(layout)

    @cached_by("tp", "cp", "micro_batch", "recompute")
    def _dense_layer(self, layout: Layout) -> Passes:
        return self._layer(layout, 0)

    @cached_by("tp", "cp", "ep", "expert_split", "micro_batch", "recompute")
    def _expert_layer(self, layout: Layout) -> Passes:
        return self._layer(layout, self.model.num_layers - 1)

    def _layer(self, layout: Layout, layer: int) -> Passes:
        batch = self._micro_batch(layout)
        return layer_work(self.model, self.cluster, batch, layer=layer, layout=layout, recompute=layout.recompute)

    @cached_by("tp", "cp", "micro_batch")
    def _head(self, layout: Layout) -> Passes:
        return head_work(self.model, self.cluster, self._micro_batch(layout))

    def _micro_batch(self, layout: Layout) -> MicroBatch:
        return MicroBatch(
            size=layout.micro_batch,
            seq=self.seq,
            tp=layout.tp,
            cp=layout.cp,
            value=self.recipe.activation,
            gradient=self.recipe.accumulation or self.recipe.gradients,
            attention=self.attention,
            sequence_parallel=self.sequence_parallel,
            dropout=self.dropout,
            stops_early=self.framework.stops_early,
            imbalance=self.uneven(layout),
            cp_way=self.cp_way,
            precision=self.precision,
            dispatch=self.framework.dispatch,
        )

    @cached_by("tp", "ep", "etp")
    def params(self, layout: Layout, trained: bool = False) -> dict[str, tuple[int, int]]:
        """Return (shared, expert) parameters of a rank: of a first layer, a last layer, embedding, and head.

        Args:
            trained: Only those that are trained, which are not among the others where they are adapters.
        """
        model = self.model
        units = {
            "first": layer_tensors(model, 0),
            "last": layer_tensors(model, model.num_layers - 1),
            "embedding": embedding_tensors(model),
            "head": head_tensors(model),
            "copy": embedding_tensors(model)[:1] if model.tied else [],
        }
        split = layout.tp, layout.ep, layout.etp
        count = (lambda t: self.training.trained(t, layout)) if trained else (lambda t: t.local_params(*split))
        return {
            name: tuple(sum(count(t) for t in tensors if t.is_expert == expert) for expert in (False, True))
            for name, tensors in units.items()
        }

    @cached_by("pp", "virtual_stages")
    def chunks(self, layout: Layout) -> list[list[tuple[int, int]]]:
        """Return (dense layers, layers with experts) of every chunk of every stage; dense ones are the model's first."""
        model, dense = self.model, self.layers[0]
        stages = stage_layers(model.num_layers, layout.pp, layout.virtual_stages)
        return [
            [(len(range(c.start, min(c.stop, dense))), len(range(max(c.start, dense), c.stop))) for c in stage]
            for stage in stages
        ]

    @cached_by("pp", "virtual_stages")
    def stages(self, layout: Layout) -> list[tuple[int, int]]:
        """Return (dense layers, layers with experts) of every stage."""
        return [tuple(map(sum, zip(*chunks, strict=True))) for chunks in self.chunks(layout)]

    def stage_params(self, layout: Layout, stage: int, trained: bool = False) -> tuple[int, int]:
        """Return (shared, expert) parameters of a rank of a stage, or those that are trained."""
        units = self.params(layout, trained) if trained else self.params(layout)
        dense, sparse = self.stages(layout)[stage]
        parts = [(dense, "first"), (sparse, "last"), (stage == 0, "embedding")]
        if stage == layout.pp - 1:
            parts += [(1, "head"), (layout.pp > 1, "copy")]
        shared, expert = (sum(n * units[name][i] for n, name in parts) for i in (0, 1))
        return shared, expert

    def step_work(self, layout: Layout) -> StepWork:
        """Return the step of a layout as work at full rates.

        Args:
            layout: A layout that `check_layout` accepts.
        """
        stages = self._stage_work(layout, self._alike_stages(layout))
        scatter, gather, optimizer = self._data_parallel(layout)
        tokens = layout.micro_batch * self.seq / layout.cp
        m = layout.num_microbatches(self.global_batch)
        split = layout.tp  # each rank sends its part of the stream; Narayanan et al., section 4.1
        cut = 0 if layout.pp == 1 else 2 * layout.virtual_stages
        link = self.cluster.hop(layout.pp, layout.tp * layout.cp * layout.dp)
        return StepWork(
            stages=stages,
            micro_batches=m,
            chunks=layout.virtual_stages,
            send=cut * tokens * self.model.hidden * self.recipe.activation / split / link,
            scatter=scatter,
            gather=gather,
            zero=layout.zero,
            optimizer=optimizer if self.training.offload == "none" else 0.0,
            host=host_seconds(self, layout),
            doublings=log2(self.cluster.nodes),
            dp_hides=self.framework.dp_hides,
            tp_hides=self.framework.tp_hides,
            pp_hides=self.framework.pp_hides and layout.virtual_stages > 1,
            cp_hides=self.cp_way == "ring",
            ep_hides=self.framework.ep_hides and m > 1,
            host_waits=not self.framework.graphs,
        )

    def least_step(self, layout: Layout, rates: Rates) -> float:
        """Return seconds that no step of a layout is below, however its layers are staged and its states sharded.

        The slowest stage computes the mean of all stages or more, and the bubble is a pass of the others.
        """
        passes = layout.num_microbatches(self.global_batch) + (layout.pp - 1) / layout.virtual_stages
        return passes * self._least_pass(layout, rates) / layout.pp + log2(self.cluster.nodes) * rates.step

    @cached_by("tp", "cp", "ep", "expert_split", "micro_batch", "recompute")
    def _least_pass(self, layout: Layout, rates: Rates) -> float:
        """Seconds of a micro-batch in all layers and the head, and of what it sends the share that nothing hides."""
        how, part = self.framework, 1 - rates.overlap
        total = 0.0
        for layers, layer in zip((*self.layers, 1), self.passes(layout), strict=True):
            for work in (layer.forward, layer.backward) if layers else ():
                seconds = pass_seconds(work, rates, host_waits=False)
                hidden = (
                    how.tp_hides * seconds["tp"],
                    (self.cp_way == "ring") * seconds["cp"],
                    how.ep_hides * seconds["ep"],
                )
                total += layers * (sum(seconds.values()) - part * sum(hidden))
        return total

    @property
    def layers(self) -> tuple[int, int]:
        """Layers without and with experts."""
        layers, model = self.model.num_layers, self.model
        dense = model.num_dense_layers if model.is_moe else layers
        return dense, layers - dense

    @cached_by("pp", "virtual_stages")
    def _alike_stages(self, layout: Layout) -> tuple[tuple[tuple[int, int, bool], int], ...]:
        """Stages by (dense layers, layers with experts, whether it is the last), and how many are alike."""
        stages = self.stages(layout)
        return tuple(Counter((*layers, i == layout.pp - 1) for i, layers in enumerate(stages)).items())

    @cached_by("tp", "cp", "ep", "expert_split", "micro_batch", "recompute")
    def _stage_work(self, layout: Layout, alike: tuple) -> tuple[StageWork, ...]:
        first, last, head = self.passes(layout)
        found = []
        for (dense, sparse, is_last), count in alike:
            forward, backward = first.forward.times(dense), first.backward.times(dense)
            if sparse:
                forward = forward + last.forward.times(sparse)
                backward = backward + last.backward.times(sparse)
            if is_last:
                forward, backward = forward + head.forward, backward + head.backward
            found.append(StageWork(Passes(forward, backward), count))
        return tuple(found)

    def _largest_stage(self, layout: Layout) -> int:
        return max({0, layout.pp // 2, layout.pp - 1}, key=lambda stage: sum(self.stage_params(layout, stage)))

    @cached_by("tp", "cp", "ep", "etp", "dp", "pp", "virtual_stages", "zero", "shard")
    def _data_parallel(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds at full rate of scattering gradients, gathering weights, and the optimizer, of the largest stage."""
        stage = self._largest_stage(layout)
        ranks, link = layout.shards, self.cluster.bandwidth(layout.shards, layout.tp)
        outer = layout.expert_shards
        outer_link = self.cluster.bandwidth(outer, layout.expert_split * layout.ep)

        def seconds(shared: int, expert: int) -> float:
            return ring_all_gather_bytes(shared, ranks) / link + ring_all_gather_bytes(expert, outer) / outer_link

        shared, expert = trained = self.stage_params(layout, stage, trained=True)
        own = (shared / ranks + expert / outer) if layout.zero else shared + expert
        # Gradient, master copy and moments are read, all but the gradient written, and the weight.
        moments = sum(self.training.optimizer.moment_bytes(own, self.recipe.moment).values())
        traffic = own * (self.recipe.gradients + 2 * self.recipe.master + self.recipe.weights) + 2 * moments
        gathered = self.recipe.gathered if layout.zero else self.recipe.gradients
        values = seconds(*(self.stage_params(layout, stage) if layout.zero >= 2 else trained))
        scatter, gather = seconds(*trained) * self.recipe.reduced(), values * gathered
        replicas = layout.dp * layout.cp // ranks
        if replicas > 1:  # they all-reduce their shards, which is a reduce-scatter and a gather
            sent = 2 * ring_all_gather_bytes(shared / ranks + expert / outer, replicas) * self.recipe.reduced()
            scatter += sent / self.cluster.bandwidth(replicas, layout.tp * ranks)
        optimizer = traffic / self.cluster.gpu.memory_bandwidth
        # Replicas reduce and gather the same gradients in one all-reduce: both halves wait for backward.
        return (scatter + gather, 0.0, optimizer) if layout.zero == 0 else (scatter, gather, optimizer)


def host_bytes(load: Workload, layout: Layout) -> float:
    """Return the bytes that cross between a rank's GPU and the CPU in a step, both ways together, of the largest stage.

    Gradients go down and weights come up. Offloaded weights come up twice in every micro-batch, for forward and for
    backward; offloaded gradients go down in every micro-batch.
    """
    stage, m = load._largest_stage(layout), layout.num_microbatches(load.global_batch)
    own = _offloaded(load, layout)
    stored = _per_rank(layout, load.stage_params(layout, stage), sharded=layout.zero == 3)
    down, up = load.recipe.gradients * own, load.recipe.weights * own
    return {
        "none": 0.0,
        "optimizer": down + up,
        "gradients": m * down + up,
        "parameters": m * (down + 2 * load.recipe.weights * stored),
    }[load.training.offload]


def host_seconds(load: Workload, layout: Layout) -> float:
    """Return the seconds that offload adds to a step if nothing hides them: the link, and AdamW on the CPU.

    The CPU's memory is taken to serve one rank at the rate of its host link, which is about what a node's channels give
    each of its GPUs. ValueError if something is offloaded and the GPU has no host link in the table.
    """
    card, offload = load.cluster.gpu, load.training.offload
    if offload == "none":
        return 0.0
    if card.host is None:
        raise ValueError(f"offload={offload!r}: {card.name} has no link to the CPU in the table")
    return (host_bytes(load, layout) + CPU_ADAM_BYTES * _offloaded(load, layout)) / LINKS[card.host].bandwidth


def _offloaded(load: Workload, layout: Layout) -> float:
    """Parameters whose optimizer is on the CPU, of a rank of the largest stage."""
    trained = load.stage_params(layout, load._largest_stage(layout), trained=True)
    return _per_rank(layout, trained, sharded=layout.zero > 0)


def _per_rank(layout: Layout, params: tuple[int, int], *, sharded: bool) -> float:
    """What a rank has of a stage's shared and expert parameters."""
    shared, expert = params
    return shared / layout.shards + expert / layout.expert_shards if sharded else shared + expert
