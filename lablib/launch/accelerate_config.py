"""Accelerate's FSDP2 keys: what each one does, and what it is called in `fully_shard`.

The same keys stand, with short comments, in `labs/scripts/accelerate_fsdp2.yaml`.

Chapter: book/06_fsdp.md. Source: Accelerate 1.15, `FullyShardedDataParallelPlugin` and `fsdp2_prepare_model`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One key of the configuration file.

    Attributes:
        value: What the course's file says.
        meaning: What it does.
        torch: The same in PyTorch's own terms, or "" where there is none.
    """

    value: str | int | bool
    meaning: str
    torch: str = ""


#: The block `fsdp_config`.
FSDP2_KEYS = {
    "fsdp_version": Key(
        2, "FSDP2; without this key you get FSDP1.", "fully_shard, not FullyShardedDataParallel"
    ),
    "fsdp_auto_wrap_policy": Key(
        "TRANSFORMER_BASED_WRAP",
        "How units are chosen: TRANSFORMER_BASED_WRAP by class name, SIZE_BASED_WRAP by fsdp_min_num_params, or "
        "NO_WRAP. Since 1.15 the embedding, and the final norm with the head, become units of their own besides.",
        "one fully_shard call for each unit",
    ),
    "fsdp_transformer_layer_cls_to_wrap": Key(
        "Qwen2DecoderLayer",
        "Class names of the blocks, separated by commas. A name that the model does not have is an error.",
        "fully_shard(layer) for every layer of the class",
    ),
    "fsdp_reshard_after_forward": Key(
        True,
        "true frees a unit after its forward (ZeRO-3), false keeps it until its backward (ZeRO-2). Only booleans: "
        "FSDP1's FULL_SHARD and SHARD_GRAD_OP are refused, and a number cannot be said.",
        "fully_shard(reshard_after_forward=True)",
    ),
    "fsdp_state_dict_type": Key(
        "SHARDED_STATE_DICT",
        "What save_state writes: SHARDED_STATE_DICT is one DCP folder, written by all ranks; FULL_STATE_DICT is one "
        "file, gathered on rank 0.",
        "torch.distributed.checkpoint.save",
    ),
    "fsdp_offload_params": Key(
        False,
        "true keeps shards, gradients and optimizer states in CPU memory; the optimizer then runs on the CPU.",
        "fully_shard(offload_policy=CPUOffloadPolicy())",
    ),
    "fsdp_activation_checkpointing": Key(
        False,
        "true recomputes each wrapped block in backward. Not together with the model's own gradient checkpointing.",
        "checkpoint(block) before fully_shard(block)",
    ),
    "fsdp_cpu_ram_efficient_loading": Key(
        False,
        "true: only rank 0 loads a pretrained checkpoint, and the others get their shards from it. Without effect "
        "for a model built from its config.",
        "meta device, then set_model_state_dict with broadcast_from_rank0",
    ),
}

#: Beside the block.
LAUNCH_KEYS = {
    "compute_environment": Key("LOCAL_MACHINE", "Your own machines, not SageMaker."),
    "distributed_type": Key("FSDP", "Turns the block fsdp_config on."),
    "num_machines": Key(1, "Machines; with several, each starts its own launch.", "torchrun --nnodes"),
    "machine_rank": Key(0, "Which machine this is.", "torchrun --node-rank"),
    "num_processes": Key(
        2, "Ranks on all machines together.", "torchrun --nproc-per-node, times the machines"
    ),
    "mixed_precision": Key(
        "bf16",
        "Casts for the gather, the computation and, unlike this course's default, for the reduction too. Trained "
        "parameters that are not fp32 are made fp32 first.",
        "MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)",
    ),
}
