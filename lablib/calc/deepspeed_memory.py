"""DeepSpeed's memory estimators, which it prints for a model and a number of devices.

They count 18 bytes per parameter where ZeRO's paper counts 16: gradients once in 16 bits and once in fp32.
What they print as "GB" are GiB. Activations are not in them.

Sources: DeepSpeed, runtime/zero/stage_1_and_2.py and stage3.py; the documentation's page "Memory Requirements".

Chapter: book/05_zero.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.choices import one_of


@dataclass(frozen=True)
class Estimate:
    """What DeepSpeed's estimators print, in bytes; their "GB" are GiB.

    Attributes:
        cpu: Per node, with the buffer factor.
        gpu: Per device: states, without activations.
    """

    cpu: int
    gpu: int


def zero2_estimate(
    params: int,
    *,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload: bool = True,
    variant: str = "code",
    buffer: float = 1.5,
) -> Estimate:
    """Return `estimate_zero2_model_states_mem_needs`.

    Without offload the device holds 2P + 18P/N by the code since June 2024, where 18 = 2 + 4 (gradients, twice) + 12;
    the documentation still prints the older 4P + 16P/N.

    Args:
        params: Parameters, P.
        gpus_per_node: Devices of a node.
        nodes: Nodes.
        offload: Whether the optimizer is on the CPU.
        variant: "code" or "doc".
        buffer: Safety factor on CPU memory.

    Raises:
        ValueError: If the variant is unknown or a count is below 1.
    """
    one_of("variant", variant, ("code", "doc"))
    _counts(params=params, gpus_per_node=gpus_per_node, nodes=nodes)
    total = gpus_per_node * nodes
    if offload:
        copies = total if variant == "code" else gpus_per_node
        return Estimate(int(params * max(4 * copies, 16) * buffer), 2 * params)
    own, shared = (2, 18) if variant == "code" else (4, 16)
    return Estimate(int(params * 4 * gpus_per_node * buffer), own * params + int(shared * params / total))


def zero3_estimate(
    params: int,
    largest_layer: int,
    *,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload: str = "parameters",
    zero_init: bool = True,
    buffer: float = 1.5,
) -> Estimate:
    """Return `estimate_zero3_model_states_mem_needs`: 4 bytes per parameter of the largest layer, plus the shards.

    Args:
        params: Parameters, P.
        largest_layer: Parameters of the largest layer: its weights and gradients, gathered in 16 bits.
        gpus_per_node: Devices of a node.
        nodes: Nodes.
        offload: "none", "optimizer" or "parameters".
        zero_init: Whether the model is sharded while it is built (`deepspeed.zero.Init`); otherwise every rank first
            builds it whole in fp32, in CPU memory.
        buffer: Safety factor on CPU memory.

    Raises:
        ValueError: If the offload is unknown or a count is below 1.
    """
    one_of("offload", offload, ("none", "optimizer", "parameters"))
    _counts(params=params, largest_layer=largest_layer, gpus_per_node=gpus_per_node, nodes=nodes)
    on_gpu = {"none": 18, "optimizer": 2, "parameters": 0}[offload]
    gpu = 4 * largest_layer + int(on_gpu * params / (gpus_per_node * nodes))
    whole = 4 * gpus_per_node
    if offload == "none":
        return Estimate(int((largest_layer if zero_init else params) * whole * buffer), gpu)
    on_cpu = {"optimizer": 16, "parameters": 18}[offload] / nodes
    return Estimate(int(params * (on_cpu if zero_init else max(whole, on_cpu)) * buffer), gpu)


def _counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
