"""Traffic of each kind of parallelism: bytes sent by one rank in one optimizer step, on rings, before any of it is overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.communication import data_parallel_bytes, ring_all_gather_bytes
from lablib.calc.models import ModelConfig
from lablib.calc.parallel.tensor import layer_collectives, layer_elements
from lablib.calc.params import count_params


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in one optimizer step.

    Attributes:
        messages: Collectives, or sends for a pipeline; each is one message, whatever its size.
        collective: What they are, as text.
    """

    bytes_sent: float
    messages: int
    collective: str


def data_traffic(config: ModelConfig, ranks: int, *, stage: int = 0, bytes_per_value: int = 2) -> Traffic:
    """Return what data parallelism sends: all gradients once a step, and with stage 3 the weights twice.

    Stages 0 to 2: `2 ψ (n-1)/n` values. Stage 3 (FSDP full shard): `3 ψ (n-1)/n`, with one micro-batch a step.
    ZeRO (arXiv 1910.02054), section 7.
    """
    sent = data_parallel_bytes(count_params(config).total * bytes_per_value, ranks, stage=stage)
    if stage == 3:
        text = "all-gather twice and reduce-scatter once, per layer"
        return Traffic(sent, 3 * config.num_layers, text)
    return Traffic(sent, 1, "one all-reduce of the gradients, in buckets")


def tensor_traffic(
    config: ModelConfig,
    ranks: int,
    *,
    tokens: int,
    micro_batches: int = 1,
    bytes_per_value: int = 2,
    sequence_parallel: bool | str = False,
) -> Traffic:
    """Return what tensor parallelism sends: `8 b s h (t-1)/t` values a layer, or `10 b s h (t-1)/t` with "shard".

    `sequence_parallel` is False, "keep" or "shard", see `lablib.calc.parallel.tensor`. Narayanan et al. (arXiv 2104.04473),
    section 3.2; Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
    """
    elements = layer_elements(batch=1, seq=tokens, hidden=config.hidden, tp=ranks, sequence_parallel=sequence_parallel)
    calls = sum(sum(part.values()) for part in layer_collectives(sequence_parallel).values())
    kind = "gathers and scatters" if sequence_parallel else "all-reduces"
    sent = config.num_layers * elements * bytes_per_value
    return Traffic(sent, calls * config.num_layers * micro_batches, f"{calls} {kind} per layer and micro-batch")


def pipeline_traffic(
    config: ModelConfig, ranks: int, *, tokens: int, micro_batches: int = 1, bytes_per_value: int = 2
) -> Traffic:
    """Return what a middle pipeline stage sends: `2 b s h` values a micro-batch, `b s h` each way.

    Narayanan et al. (arXiv 2104.04473), section 3.2.
    """
    cut = 0 if ranks == 1 else 2
    sent = float(cut * tokens * config.hidden * bytes_per_value)
    return Traffic(sent, cut * micro_batches, "2 sends per micro-batch")


def context_traffic(
    config: ModelConfig, ranks: int, *, tokens: int, micro_batches: int = 1, bytes_per_value: int = 2
) -> Traffic:
    """Return what context parallelism sends: keys and values, `4 b s k (c-1)/c` values a layer, and all gradients once.

    Keys and values are all-gathered, as in Llama 3 (arXiv 2407.21783, section 3.3.2), and what came is kept for backward;
    a ring keeps a rank's own, and sends them again in backward.
    """
    keys_and_values = 2 * tokens * config.kv_width * bytes_per_value
    # An all-gather forward and a reduce-scatter backward send as many bytes as each other.
    per_layer = 2 * ring_all_gather_bytes(keys_and_values, ranks)
    gradients = data_traffic(config, ranks, bytes_per_value=bytes_per_value).bytes_sent
    messages = 2 * config.num_layers * micro_batches + 1
    return Traffic(config.num_layers * per_layer + gradients, messages, "2 per layer for K and V; gradients")


def expert_traffic(
    config: ModelConfig, ranks: int, *, tokens: int, micro_batches: int = 1, bytes_per_value: int = 2
) -> Traffic:
    """Return what expert parallelism sends: `4 T k h (e-1)/e` values a layer with experts, and the other gradients once.

    Every token goes to its experts and back, forward and backward, and tokens are spread evenly over the ranks.
    """
    if not config.is_moe or config.num_experts % ranks:
        raise ValueError(f"ranks={ranks} does not divide num_experts={config.num_experts} of {config.name}")
    layers = config.num_layers - config.num_dense_layers
    copies = tokens / ranks * config.experts_per_token * config.hidden * bytes_per_value
    moved = 4 * layers * ring_all_gather_bytes(copies, ranks)
    count = count_params(config)
    replicated = count.total - count.by_component["experts"]
    gradients = data_parallel_bytes(replicated * bytes_per_value, ranks)
    return Traffic(moved + gradients, 4 * layers * micro_batches + 1, "4 all-to-alls per layer; gradients")
