"""Closed forms for each kind of parallelism: memory, traffic and time, one module a kind.

    traffic      bytes that each axis sends in one training step
    data         unequal shares, buckets, what backward hides of them          chapter 02
    tensor       collectives, memory and times of a tensor-parallel layer      chapter 03
    context      traffic and memory of attention over context-parallel ranks   chapter 12
    causal       causal masks over ranks: who holds, computes, waits           chapter 12
    degrees      which degrees of all kinds may be together: one rule for every calculator
    experts      traffic of tokens, groups and gradients of experts         chapter 13
    expert_load  capacity, drops and imbalance of experts                   chapter 13
    zero         states and traffic of the ZeRO stages, and which to take      chapter 05
    fsdp         what FSDP sends and holds, and its step                       chapter 06
    fsdp_units   units of FSDP: how they are wrapped and what is unsharded     chapter 06
    offload      states on the host                                            chapter 05
    deepspeed    DeepSpeed's configuration and estimates                       chapter 05

Read `zero` first: its formulas are the shortest.
"""

from lablib.calc.parallel.causal import (
    ORDERS,
    busy_share,
    causal_blocks,
    causal_imbalance,
    rank_chunks,
    ring_work,
    token_owners,
)
from lablib.calc.parallel.context import (
    WAYS,
    AttentionTraffic,
    attention_traffic,
    context_buffers,
    context_degrees,
    ring_hiding_tokens,
    ulysses_crossover,
)
from lablib.calc.parallel.data import (
    DDPStep,
    backward_transfers,
    bucket_sizes,
    ddp_step_time,
    exposed_time,
    token_factor,
)
from lablib.calc.parallel.deepspeed import (
    as_deepspeed_json,
    deepspeed_settings,
    persistent_params,
    zero2_estimate,
    zero3_estimate,
)
from lablib.calc.parallel.degrees import (
    check_degrees,
    check_experts,
    check_imbalance,
    check_schedule,
    check_sequence,
    largest_imbalance,
    sequence_step,
)
from lablib.calc.parallel.expert_load import (
    dropped_share,
    expert_capacity,
    imbalance,
    random_dropped_share,
    random_loads,
    rank_loads,
)
from lablib.calc.parallel.experts import (
    DISPATCH_WAYS,
    DispatchBytes,
    chance_met,
    dispatch_bytes,
    dispatch_ratio,
    expert_gradient_factor,
    expert_groups,
    expert_hiding_tokens,
    held_params,
    routed_bytes,
)
from lablib.calc.parallel.fsdp import FSDPTraffic, TimedUnit, fsdp_step, fsdp_traffic
from lablib.calc.parallel.fsdp_units import (
    Shape,
    Unit,
    UnshardedState,
    check_reshard,
    gathered_timeline,
    padded,
    peak_held_bytes,
    peak_unsharded_bytes,
)
from lablib.calc.parallel.offload import (
    CPU_ADAM_BYTES,
    arithmetic_intensity,
    needed_bandwidth,
    offload_efficiency,
    offload_step,
    swap_seconds,
)
from lablib.calc.parallel.tensor import (
    VARIANTS,
    layer_collectives,
    layer_elements,
    layer_times,
    rank_params,
    split_heads,
    tp_degrees,
    variant,
)
from lablib.calc.parallel.traffic import pipeline_traffic
from lablib.calc.parallel.zero import (
    StageChoice,
    deal_whole,
    least_sent,
    max_params,
    shard_size,
    state_terms,
    zero_choices,
    zero_sent_bytes,
    zero_state_bytes,
    zero_traffic,
)

__all__ = [
    "CPU_ADAM_BYTES",
    "DISPATCH_WAYS",
    "ORDERS",
    "VARIANTS",
    "WAYS",
    "AttentionTraffic",
    "DDPStep",
    "DispatchBytes",
    "FSDPTraffic",
    "Shape",
    "StageChoice",
    "TimedUnit",
    "Unit",
    "UnshardedState",
    "arithmetic_intensity",
    "as_deepspeed_json",
    "attention_traffic",
    "backward_transfers",
    "bucket_sizes",
    "busy_share",
    "causal_blocks",
    "causal_imbalance",
    "chance_met",
    "check_degrees",
    "check_experts",
    "check_imbalance",
    "check_reshard",
    "check_schedule",
    "check_sequence",
    "context_buffers",
    "context_degrees",
    "ddp_step_time",
    "deal_whole",
    "deepspeed_settings",
    "dispatch_bytes",
    "dispatch_ratio",
    "dropped_share",
    "expert_capacity",
    "expert_gradient_factor",
    "expert_groups",
    "expert_hiding_tokens",
    "exposed_time",
    "fsdp_step",
    "fsdp_traffic",
    "gathered_timeline",
    "held_params",
    "imbalance",
    "largest_imbalance",
    "layer_collectives",
    "layer_elements",
    "layer_times",
    "least_sent",
    "max_params",
    "needed_bandwidth",
    "offload_efficiency",
    "offload_step",
    "padded",
    "peak_held_bytes",
    "peak_unsharded_bytes",
    "persistent_params",
    "pipeline_traffic",
    "random_dropped_share",
    "random_loads",
    "rank_chunks",
    "rank_loads",
    "rank_params",
    "ring_hiding_tokens",
    "ring_work",
    "routed_bytes",
    "sequence_step",
    "shard_size",
    "split_heads",
    "state_terms",
    "swap_seconds",
    "token_factor",
    "token_owners",
    "tp_degrees",
    "ulysses_crossover",
    "variant",
    "zero2_estimate",
    "zero3_estimate",
    "zero_choices",
    "zero_sent_bytes",
    "zero_state_bytes",
    "zero_traffic",
]
