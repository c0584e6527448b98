"""The time of a training step: the work of a micro-batch at full rates, what overlaps, and the bubble.

One rank has three kinds of work for a micro-batch, each limited by another part of the machine (`layer_work`):

- **matmul**: FLOPs over the rate that large matrix products reach on the device;
- **memory**: bytes of everything between the products (norms, activations, dropout, softmax) over the memory's rate;
- **network**: bytes that a rank sends over the bandwidth of the link that its group uses.

A `Workload` puts them together stage by stage, and `step_time` makes seconds of them:

    stage      T = matmul / e_matmul + (memory + tp + cp + ep + pp) / e_bandwidth
    pipeline   m T_max + (sum of the other stages' T) / v            (v chunks a stage: the bubble shrinks)
    step       pipeline + exposed data parallelism + optimizer

Collectives of tp, cp and ep, and the sends of pp, wait for their result and nothing hides them. Data parallelism hides:
stages 0 and 1 send gradients once a step, behind the last micro-batch's backward, and gather weights behind the first
forward; stage 2 scatters gradients after every micro-batch, behind its backward; stage 3 gathers weights for forward and
again for backward, and scatters gradients, behind each micro-batch. What is longer than the work that hides it is
exposed. What is hidden is not free either: the kernels that send take multiprocessors and memory bandwidth from those
that compute, so hidden seconds cost `e_overlap` of themselves. The three e, the same for every layout, model and device,
are the only fitted numbers (`calibration`).

Bytes of a kernel are its reads and writes: a norm 2 accesses a value; dropout and residual 3; an activation function its
inputs and output. Unfused attention writes, normalizes, drops and reads its scores: 6 accesses and a mask for every pair
of tokens. Fused attention keeps them on chip and skips the masked half. Backward reads the incoming gradient as well: 3
accesses for every 2 of forward. Every micro-batch also reads the weights, once forward and once backward, and adds to
their gradients, a read and a write: with few tokens a micro-batch this is what limits it. Backward multiplies twice what
forward does; fused attention computes the scores again there, 5 products for 2 (Dao 2023, arXiv 2307.08691).

Left out: latency, stragglers, oversubscribed switches, experts that get more tokens than others. Every copy of a token
counts on its way to an expert; DeepSeek-V3 sends a token once to a node, and to at most four (arXiv 2412.19437),
so a layout like its own is predicted far too slow here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lablib.calc.communication import ring_all_gather_bytes
from lablib.calc.layouts.planner.layout import Cluster, Layout, layers_per_stage
from lablib.calc.models import ModelConfig, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.params import attention_matrices
from lablib.calc.precision import Recipe, recipe

PARTS = ("matmul", "memory", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer")


BACKWARD_BYTES = 1.5  # three accesses for two


FUSED_BACKWARD = 2.5  # five products for two


@dataclass(frozen=True)
class Work:
    """Seconds of work at full rates: matrix products, memory traffic, and three kinds of collectives.

    Attributes:
        memory: Kernels that are limited by memory.
    """

    matmul: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul,
            self.memory + other.memory,
            self.tp + other.tp,
            self.cp + other.cp,
            self.ep + other.ep,
        )

    def times(self, n: float) -> Work:
        """Return n times as much."""
        return Work(self.matmul * n, self.memory * n, self.tp * n, self.cp * n, self.ep * n)


@dataclass(frozen=True)
class Passes:
    """Forward and backward of something; backward holds what is recomputed.

    Attributes:
        forward: Work of the forward pass.
        backward: Work of the backward pass, recomputation included.
    """

    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The micro-batch of one rank, and how its values are held.

    Attributes:
        size: Sequences of a replica.
        value: Bytes of an activation and of a weight.
        gradient: Bytes of a weight's gradient where it is added up.
        attention: "fused" or "plain".
        sequence_parallel: Whether tp splits what lies between the matrices.
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

    @property
    def tokens(self) -> float:
        """Tokens of one context-parallel rank."""
        return self.size * self.seq / self.cp


def layer_work(
    model: ModelConfig, cluster: Cluster, batch: MicroBatch, *, layer: int, ep: int = 1, recompute: str = "none"
) -> Passes:
    """Return the work of one layer on one rank for one micro-batch.

    Args:
        layer: Which layer, from 0; it matters where some have experts.
        recompute: "none", "selective" or "full".
    """
    experts = model.has_experts(layer)
    tokens, seq, tp, cp, value, gradient = batch.tokens, batch.seq, batch.tp, batch.cp, batch.value, batch.gradient
    rate, hbm = cluster.gpu.peak(_dtype(cluster)) * cluster.achievable, cluster.gpu.memory_bandwidth
    dense = 2 * tokens * (attention_matrices(model) + _mlp_weights(model, experts)) / tp
    scores = 2 * tokens * seq * model.num_heads * (model.head_dim + model.value_dim) / tp
    fused = batch.attention == "fused"
    if fused:
        scores /= 2
    flat, square = _layer_bytes(model, batch, experts)
    pairs = 0.0 if fused else square * tokens * seq * model.num_heads / tp
    weights = _local_weights(model, experts, tp, ep)
    kernels = (flat * tokens + pairs) / hbm
    forward = Work(
        matmul=(dense + scores) / rate,
        memory=kernels + value * weights / hbm,
        tp=4 * tokens * model.hidden * value * (tp - 1) / tp / cluster.bandwidth(tp),
        cp=_key_bytes(model, batch) * (cp - 1) / cp / cluster.bandwidth(cp, tp),
        ep=_all_to_all_bytes(model, batch, ep) / cluster.bandwidth(ep, tp * cp) if experts else 0.0,
    )
    backward = Work(
        matmul=(2 * dense + (FUSED_BACKWARD if fused else 2) * scores) / rate,
        memory=BACKWARD_BYTES * kernels + (value + 2 * gradient) * weights / hbm,
        tp=forward.tp,
        cp=forward.cp,
        ep=forward.ep,
    )
    if recompute == "full":
        backward = backward + forward
    elif recompute == "selective":
        backward = backward + Work(matmul=scores / rate, memory=pairs / hbm)
    return Passes(forward, backward)


def head_work(model: ModelConfig, cluster: Cluster, batch: MicroBatch) -> Passes:
    """Return the work of the output head and the loss: one product, and the logits read and written in fp32."""
    tokens, tp, value, gradient = batch.tokens, batch.tp, batch.value, batch.gradient
    vocab = -(-model.vocab // tp)
    rate, hbm = cluster.gpu.peak(_dtype(cluster)) * cluster.achievable, cluster.gpu.memory_bandwidth
    product, loss, weights = (2 * tokens * model.hidden * vocab / rate, 3 * 4 * tokens * vocab, model.hidden * vocab)
    # One gather of the stream forward, one scatter of its gradient backward.
    sent = value * tokens * model.hidden * (tp - 1) / tp / cluster.bandwidth(tp)
    return Passes(
        Work(matmul=product, memory=(loss + value * weights) / hbm, tp=sent),
        Work(matmul=2 * product, memory=(BACKWARD_BYTES * loss + (value + 2 * gradient) * weights) / hbm, tp=sent),
    )


def _dtype(cluster: Cluster) -> str:
    return "bf16" if "bf16" in cluster.gpu.flops else "fp16"


def _mlp_weights(model: ModelConfig, experts: bool) -> int:
    """Weights that a token is multiplied with after attention."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return matrices * model.ffn
    visited = model.experts_per_token + model.num_shared_experts
    return matrices * visited * model.expert_ffn + model.hidden * model.num_experts


def _local_weights(model: ModelConfig, experts: bool, tp: int, ep: int) -> float:
    """Weights of a layer's matrices on a rank."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return (attention_matrices(model) + matrices * model.ffn) / tp
    held = model.num_experts / ep + model.num_shared_experts
    return (attention_matrices(model) + matrices * held * model.expert_ffn) / tp


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


def _key_bytes(model: ModelConfig, batch: MicroBatch) -> float:
    """Bytes of keys and values of full sequences on one tensor-parallel rank."""
    width = model.kv_lora_rank + model.qk_rope_head_dim if model.is_mla else 2 * model.kv_width / batch.tp
    return batch.size * batch.seq * width * batch.value


def _all_to_all_bytes(model: ModelConfig, batch: MicroBatch, ep: int) -> float:
    """Bytes that a rank sends to experts and back in forward."""
    return 2 * batch.tokens / batch.tp * model.experts_per_token * model.hidden * batch.value * (ep - 1) / ep


@dataclass(frozen=True)
class Efficiency:
    """How close a run comes to the full rates.

    Attributes:
        matmul: Share of the rate of large matrix products.
        bandwidth: Share of a bandwidth, the memory's or a link's.
        overlap: Seconds that a second of hidden communication still costs.
    """

    matmul: float
    bandwidth: float
    overlap: float


@dataclass(frozen=True)
class Stage:
    """The work of one pipeline stage for one micro-batch, and how many stages are alike.

    Attributes:
        work: Forward and backward of all its layers, and of the head on the last one.
    """

    work: Passes
    count: int = 1


@dataclass(frozen=True)
class Job:
    """A step as work at full rates: all that `step_time` needs.

    Attributes:
        stages: The kinds of pipeline stages.
        micro_batches: Micro-batches of a replica, m.
        chunks: Chunks of layers in a stage, v.
        send: Seconds of one micro-batch's sends of a stage, both ways, at the link's full rate.
        scatter: Seconds of a reduce-scatter of a stage's gradients at full rate.
        gather: Seconds of an all-gather of a stage's weights at full rate.
        optimizer: Seconds of the optimizer's memory traffic at full rate.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    chunks: int
    send: float
    scatter: float
    gather: float
    zero: int
    optimizer: float


def total_seconds(work: Work, rates: Efficiency) -> float:
    """Return how long work takes if nothing overlaps."""
    bytes_moved = work.memory + work.tp + work.cp + work.ep
    return work.matmul / rates.matmul + bytes_moved / rates.bandwidth


def step_time(job: Job, rates: Efficiency) -> dict[str, float]:
    """Return the seconds of a step by part; they sum to the step."""
    send = job.send / rates.bandwidth
    longest, others, slowest = -1.0, 0.0, job.stages[0]
    for stage in job.stages:
        each = total_seconds(stage.work.forward, rates) + total_seconds(stage.work.backward, rates) + send
        others += stage.count * each
        if each > longest:
            longest, slowest = each, stage
    m, forward, backward = job.micro_batches, slowest.work.forward, slowest.work.backward
    exposed, again = _exposed(job, total_seconds(forward, rates), total_seconds(backward, rates), rates)
    return {
        "matmul": m * (forward.matmul + backward.matmul) / rates.matmul,
        "memory": m * (forward.memory + backward.memory) / rates.bandwidth,
        "tp": m * (forward.tp + backward.tp) / rates.bandwidth,
        "cp": m * (forward.cp + backward.cp) / rates.bandwidth,
        "ep": m * (forward.ep + backward.ep) / rates.bandwidth,
        "pp": m * send,
        "dp": exposed + m * again,
        "bubble": (others - longest) / job.chunks,
        "optimizer": job.optimizer / rates.bandwidth,
    }


def _exposed(job: Job, forward: float, backward: float, rates: Efficiency) -> tuple[float, float]:
    """Seconds that data parallelism adds: once a step, and in every micro-batch."""
    scatter, gather = job.scatter / rates.bandwidth, job.gather / rates.bandwidth

    def added(sending: float, computing: float) -> float:
        return max(0.0, sending - computing) + rates.overlap * min(sending, computing)

    if job.zero == 3:
        return 0.0, added(gather, forward) + added(gather + scatter, backward)
    if job.zero == 2:
        return added(gather, forward), added(scatter, backward)
    return added(gather, forward) + added(scatter, backward), 0.0


@dataclass
class Workload:
    """A model, a cluster and a batch; pieces that layouts share are computed once.

    Attributes:
        attention: "fused" or "plain".
        sequence_parallel: Whether tp splits norms and residuals too.
    """

    model: ModelConfig
    cluster: Cluster
    seq: int
    global_batch: int
    recipe: Recipe = field(default_factory=lambda: recipe("mixed-bf16"))
    attention: str = "fused"
    sequence_parallel: bool = True
    _cache: dict = field(default_factory=dict, repr=False)

    @property
    def dropout(self) -> bool:
        """Whether the model trains with dropout: GPT-2 and GPT-3 shapes do, as `activations` assumes."""
        return self.model.family == "gpt2"

    def passes(self, layout: Layout) -> tuple[Passes, Passes, Passes]:
        """Return the work of one dense layer, one layer with experts, and the head."""
        key = "work", layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute
        if key not in self._cache:
            model = self.model
            batch = MicroBatch(
                size=layout.micro_batch,
                seq=self.seq,
                tp=layout.tp,
                cp=layout.cp,
                value=self.recipe.activation,
                gradient=self.recipe.accumulation or self.recipe.gradients,
                attention=self.attention,
                sequence_parallel=self.sequence_parallel,
                dropout=self.dropout,
            )
            first, last = (
                layer_work(model, self.cluster, batch, layer=i, ep=layout.ep, recompute=layout.recompute)
                for i in (0, model.num_layers - 1)
            )
            self._cache[key] = first, last, head_work(model, self.cluster, batch)
        return self._cache[key]

    def params(self, tp: int, ep: int) -> dict[str, tuple[int, int]]:
        """Return (shared, expert) parameters of a rank: of a first layer, a last layer, embedding, and head."""
        key = "params", tp, ep
        if key not in self._cache:
            model = self.model
            units = {
                "first": layer_tensors(model, 0),
                "last": layer_tensors(model, model.num_layers - 1),
                "embedding": embedding_tensors(model),
                "head": head_tensors(model),
                "copy": embedding_tensors(model)[:1] if model.tied else [],
            }
            self._cache[key] = {
                name: tuple(
                    sum(t.local_params(tp, ep) for t in tensors if t.is_expert == expert) for expert in (False, True)
                )
                for name, tensors in units.items()
            }
        return self._cache[key]

    def stages(self, pp: int, virtual_stages: int) -> list[tuple[int, int]]:
        """Return (dense layers, layers with experts) of every stage; dense ones are the first of the model."""
        key = "stages", pp, virtual_stages
        if key not in self._cache:
            sizes = layers_per_stage(self.model.num_layers, pp, virtual_stages)
            left = self.model.num_dense_layers if self.model.is_moe else self.model.num_layers
            split = []
            # With several chunks the first ones of every stage come first; a model's few dense layers are in them.
            for size in sizes:
                share = size // virtual_stages if virtual_stages > 1 and self.model.is_moe else size
                dense = min(left, share)
                left -= dense
                split.append((dense, size - dense))
            self._cache[key] = split
        return self._cache[key]

    def stage_params(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Return (shared, expert) parameters of a rank of a stage."""
        units = self.params(layout.tp, layout.ep)
        dense, sparse = self.stages(layout.pp, layout.virtual_stages)[stage]
        parts = [(dense, "first"), (sparse, "last"), (stage == 0, "embedding")]
        if stage == layout.pp - 1:
            parts += [(1, "head"), (layout.pp > 1, "copy")]
        shared, expert = (sum(n * units[name][i] for n, name in parts) for i in (0, 1))
        return shared, expert

    def job(self, layout: Layout) -> Job:
        """Return the step of a layout as work at full rates.

        Args:
            layout: A layout that `check_layout` accepts.
        """
        stages = self._stage_work(layout)
        scatter, gather, optimizer = self._data_parallel(layout)
        tokens = layout.micro_batch * self.seq / layout.cp
        split = layout.tp  # each rank sends its part of the stream; Narayanan et al., section 4.1
        cut = 0 if layout.pp == 1 else 2 * layout.virtual_stages
        link = self.cluster.hop(layout.pp, layout.tp * layout.cp * layout.dp)
        return Job(
            stages=stages,
            micro_batches=layout.num_microbatches(self.global_batch),
            chunks=layout.virtual_stages,
            send=cut * tokens * self.model.hidden * self.recipe.activation / split / link,
            scatter=scatter,
            gather=gather,
            zero=layout.zero,
            optimizer=optimizer,
        )

    def _kinds(self, pp: int, virtual_stages: int) -> tuple[tuple[tuple[int, int, bool], int], ...]:
        """Stages by (dense layers, layers with experts, whether it is the last), and how many are alike."""
        key = "kinds", pp, virtual_stages
        if key not in self._cache:
            cuts = self.stages(pp, virtual_stages)
            found = Counter((*cut, stage == pp - 1) for stage, cut in enumerate(cuts))
            self._cache[key] = tuple(found.items())
        return self._cache[key]

    def _stage_work(self, layout: Layout) -> tuple[Stage, ...]:
        kinds = self._kinds(layout.pp, layout.virtual_stages)
        key = "stage work", layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute, kinds
        if key not in self._cache:
            first, last, head = self.passes(layout)
            found = []
            for (dense, sparse, is_last), count in kinds:
                forward, backward = first.forward.times(dense), first.backward.times(dense)
                if sparse:
                    forward = forward + last.forward.times(sparse)
                    backward = backward + last.backward.times(sparse)
                if is_last:
                    forward, backward = forward + head.forward, backward + head.backward
                found.append(Stage(Passes(forward, backward), count))
            self._cache[key] = tuple(found)
        return self._cache[key]

    def _data_parallel(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds at full rate of scattering gradients, gathering weights, and the optimizer, of the largest stage."""
        key = ("data", layout.tp, layout.cp, layout.ep, layout.dp, layout.pp, layout.virtual_stages, layout.zero)
        if key in self._cache:
            return self._cache[key]
        sends = [self.stage_params(layout, stage) for stage in {0, layout.pp // 2, layout.pp - 1}]
        shared, expert = max(sends, key=sum)
        ranks, link = layout.dp * layout.cp, self.cluster.bandwidth(layout.dp * layout.cp, layout.tp)
        outer = ranks // layout.ep
        outer_link = self.cluster.bandwidth(outer, layout.tp * layout.ep)
        values = ring_all_gather_bytes(shared, ranks) / link + ring_all_gather_bytes(expert, outer) / outer_link
        own = (shared / ranks + expert / outer) if layout.zero else shared + expert
        # Gradient, master copy and two moments are read, all but the gradient written, and the weight.
        traffic = own * (self.recipe.gradients + 2 * (self.recipe.master + 8) + self.recipe.weights)
        gathered = self.recipe.gathered if layout.zero else self.recipe.gradients
        found = (values * self.recipe.reduced, values * gathered, traffic / self.cluster.gpu.memory_bandwidth)
        # Replicas reduce and gather the same gradients in one all-reduce: both halves wait for backward.
        self._cache[key] = (found[0] + found[1], 0.0, found[2]) if layout.zero == 0 else found
        return self._cache[key]
