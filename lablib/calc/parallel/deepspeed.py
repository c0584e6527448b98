"""DeepSpeed: its configuration file with a reason for every key, its memory estimators, and offload. Chapter 05.

    for setting in deepspeed_settings(preset("gpt2-xl"), ranks=8, stage=3):
        print(setting.key, setting.value, setting.why)
    json.dump(as_deepspeed_json(deepspeed_settings(...)), file)    # what `deepspeed --deepspeed_config` reads

Sizes in the file count elements. Three of them follow the hidden size h by the rule that Accelerate applies to "auto",
since DeepSpeed's own defaults suit models of billions of parameters. The estimators count gradients in fp32, that of stage
2 in 16 bits too, without activations, and what they print as "GB" are GiB. `offload` is "none", "optimizer" or "parameters".

ZeRO-Offload sends 2 bytes of gradient down per parameter and step over each rank's own link, and 2 bytes of weight up.
ZeRO-Infinity asks what bandwidth W is enough: with `ait` FLOPs per byte moved, a device of peak P reaches
ait W / (ait W + P) without overlap.

Sources: DeepSpeed 0.19, runtime/zero/config.py, offload_config.py, stage3.py and stage_1_and_2.py, docs/config-json, and
the documentation's page "Memory Requirements"; Accelerate, accelerator.py. Offload: Ren et al. 2021, ZeRO-Offload
(arXiv 2101.06840); Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857), the part on bandwidth requirements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lablib.calc.errors import one_of
from lablib.calc.models import ModelConfig, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.parallel.zero import shard_size

OFFLOADS = ("none", "optimizer", "parameters")
DEVICES = ("cpu", "nvme")
PRECISIONS = ("bf16", "fp16", "fp32")
#: What the file needs and the course says nothing about; change them in the file.
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 3e-4, 0.1, 100


@dataclass(frozen=True)
class Setting:
    """One entry of the configuration.

    Attributes:
        key: Its path, joined by dots: "zero_optimization.stage".
    """

    key: str
    value: Any
    why: str


def deepspeed_settings(
    model: ModelConfig,
    *,
    ranks: int,
    stage: int,
    micro_batch: int = 1,
    accumulation: int = 1,
    precision: str = "bf16",
    offload: str = "none",
    device: str = "cpu",
    clip: float = 1.0,
    steps: int = 1000,
) -> list[Setting]:
    """Return the entries of a DeepSpeed configuration in the order of the file.

    Args:
        offload: "none", "optimizer" (stages 1 to 3), or "parameters" (stage 3: weights and optimizer).
        clip: Largest global gradient norm; 0 for no clipping.
    """
    _counts(ranks=ranks, micro_batch=micro_batch, accumulation=accumulation, steps=steps)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} does not exist: ZeRO has stages 1, 2 and 3, and 0 replicates")
    one_of("offload", offload, OFFLOADS)
    one_of("device", device, DEVICES)
    one_of("precision", precision, PRECISIONS)
    if offload == "parameters" and stage != 3:
        raise ValueError(f"offload='parameters' needs stage=3, not stage={stage}: below it every rank uses all weights")
    if offload == "optimizer" and stage == 0:
        raise ValueError("offload='optimizer' needs stage=1, 2 or 3, not stage=0")
    if offload != "none" and device == "nvme" and stage != 3:
        raise ValueError(f"device='nvme' needs stage=3, not stage={stage}; use device='cpu'")
    return [
        *_batch(ranks, micro_batch, accumulation),
        *_precision(precision),
        *_optimizer(clip, steps),
        *_zero(model, stage),
        *_offload(offload, device),
    ]


def _batch(ranks: int, micro_batch: int, accumulation: int) -> list[Setting]:
    product = f"{micro_batch} x {accumulation} x {ranks}"
    return [
        Setting(
            "train_batch_size",
            micro_batch * accumulation * ranks,
            f"Sequences in one optimizer step. It must be the product {product} of the next two and the ranks, or "
            "DeepSpeed stops.",
        ),
        Setting(
            "train_micro_batch_size_per_gpu",
            micro_batch,
            "Sequences in one forward pass of one rank; activations grow with it.",
        ),
        Setting(
            "gradient_accumulation_steps",
            accumulation,
            "Micro-batches in a step. The engine divides the loss by it: do not divide again.",
        ),
    ]


def _precision(precision: str) -> list[Setting]:
    why = {
        "bf16": "16-bit weights and gradients with the range of fp32; an fp32 master copy lives in the sharded optimizer.",
        "fp16": "16-bit weights and gradients; their small range needs loss scaling.",
    }
    if precision == "fp32":
        return []
    found = [Setting(f"{precision}.enabled", True, why[precision])]
    if precision == "fp16":
        found.append(
            Setting("fp16.loss_scale", 0, "0 lets the loss scale grow and shrink by itself; a number fixes it.")
        )
    return found


def _optimizer(clip: float, steps: int) -> list[Setting]:
    params, schedule = "optimizer.params.", "scheduler.params."
    return [
        Setting("gradient_clipping", clip, "Largest norm of the whole gradient; 0 switches it off. It needs one number "
                "from every rank, and is why no weight can be updated before backward has ended."),
        Setting("optimizer.type", "AdamW", "DeepSpeed builds it: fused on a GPU, vectorized for the CPU when offloaded."),
        Setting(params + "lr", LEARNING_RATE, "Highest learning rate."),
        Setting(params + "betas", [0.9, 0.95], "Decay of the two moments; the second is lower than AdamW's default, as "
                "usual for language models."),
        Setting(params + "weight_decay", WEIGHT_DECAY, "AdamW's, on all parameters, since they are one group."),
        Setting("scheduler.type", "WarmupDecayLR", "Warmup with the logarithm of the step, or linear if `warmup_type` is "
                "so, then linear decay to zero."),
        Setting(schedule + "warmup_max_lr", LEARNING_RATE, "Where warmup ends; it does not read the optimizer's lr."),
        Setting(schedule + "warmup_num_steps", WARMUP, "Optimizer steps of warmup."),
        Setting(schedule + "total_num_steps", steps, "Optimizer steps, not micro-batches; the rate is zero after them."),
    ]  # fmt: skip


def _zero(model: ModelConfig, stage: int) -> list[Setting]:
    h, z = model.hidden, "zero_optimization."
    shards = {
        0: "nothing: plain data parallelism",
        1: "the optimizer state",
        2: "optimizer state and gradients",
        3: "optimizer state, gradients and weights",
    }
    found = [Setting(z + "stage", stage, f"Shards {shards[stage]}.")]
    if stage == 0:
        return found
    found += [
        Setting(z + "contiguous_gradients", True, "Copies gradients into one buffer as they are made, so that they do not "
                "leave holes among activations that are being freed."),
        Setting(z + "overlap_comm", True, "Reduces a bucket while backward goes on"
                + (", at the price of a second bucket." if stage < 3 else ".")),
        Setting(z + "reduce_bucket_size", h * h, f"Elements, not bytes, in one reduction: h² with h = {h}."),
    ]  # fmt: skip
    if stage < 3:
        return [
            *found,
            Setting(z + "reduce_scatter", True, "Averages a gradient for its owner instead of for everybody."),
            Setting(z + "use_multi_rank_bucket_allreduce", False, "Its default, true, all-reduces each bucket after all: "
                    "fewer messages, and 3ψ(N-1)/N sent where 2ψ(N-1)/N would do."),
            Setting(z + "allgather_partitions", True, "No code of DeepSpeed 0.19 reads it: updated weights come by all-gather."),
            Setting(z + "allgather_bucket_size", h * h, "Elements in one such all-gather."),
        ]  # fmt: skip
    threshold = 10 * h
    kept = persistent_params(model, threshold)
    return [
        *found,
        Setting(z + "stage3_prefetch_bucket_size", int(0.9 * h * h), "Elements that may be gathered ahead of their use: 0.9 h²."),
        Setting(z + "stage3_param_persistence_threshold", threshold,
                f"Tensors of at most so many elements stay gathered, 10 h: here {kept:,} parameters. Small messages "
                "cost latency and save little."),
        Setting(z + "stage3_max_live_parameters", 10**9, "Nothing is gathered ahead of its use beyond so many parameters."),
        Setting(z + "stage3_max_reuse_distance", 10**9, "Not released if needed again within so many parameters. Between "
                "forward and backward of the first layer all others are used twice, so with 1e9, the default, a model of "
                "less than half as many is not released at all there; lower it when memory is short."),
        Setting(z + "stage3_gather_16bit_weights_on_model_save", True, "Lets `save_16bit_model` gather whole tensors; "
                "otherwise it saves nothing."),
    ]  # fmt: skip


def _offload(offload: str, device: str) -> list[Setting]:
    if offload == "none":
        return []
    found = []
    held = {"offload_optimizer": "master weights and moments; AdamW runs on the CPU", "offload_param": "weights"}
    for part in ["offload_optimizer"] + ["offload_param"] * (offload == "parameters"):
        path = f"zero_optimization.{part}."
        found.append(Setting(path + "device", device, f"Where these live: {held[part]}."))
        if device == "nvme":
            found.append(
                Setting(path + "nvme_path", "/local_nvme", "A folder on a drive of this node, not on a network.")
            )
        found.append(
            Setting(path + "pin_memory", True, "Page-locked host memory: full speed of the host link, and no swapping.")
        )
    return found


def as_deepspeed_json(found: list[Setting]) -> dict[str, Any]:
    """Return the entries as the nested dictionary that `json.dump` writes and `deepspeed.initialize` takes."""
    tree: dict[str, Any] = {}
    for setting in found:
        *path, name = setting.key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = setting.value
    return tree


def persistent_params(model: ModelConfig, threshold: int) -> int:
    """Return how many parameters stage 3 keeps gathered: those of tensors with at most so many elements.

    Args:
        threshold: `stage3_param_persistence_threshold`, in elements.
    """
    layers = [tensor for layer in range(model.num_layers) for tensor in layer_tensors(model, layer)]
    tensors = [*embedding_tensors(model), *layers, *head_tensors(model)]
    return sum(t.outputs * t.inputs * t.copies for t in tensors if t.outputs * t.inputs <= threshold)


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

    Without offload the device holds 2P + 18P/N by the code, where 18 = 2 + 4 (gradients, twice) + 12: since pull request
    5099 of deepspeedai/DeepSpeed (2024). The documentation still prints the older 4P + 16P/N.
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
    """Return `estimate_zero3_model_states_mem_needs`: 4 bytes per parameter of the largest layer, plus shards of 2 + 16.

    Args:
        largest_layer: Parameters of the largest layer: its weights and gradients, gathered in 16 bits.
        zero_init: Whether the model is sharded while it is built (`deepspeed.zero.Init`); otherwise every rank first
            builds the full model in fp32, in CPU memory.
    """
    one_of("offload", offload, ("none", "optimizer", "parameters"))
    _counts(params=params, largest_layer=largest_layer, gpus_per_node=gpus_per_node, nodes=nodes)
    on_gpu = {"none": 18, "optimizer": 2, "parameters": 0}[offload]
    gpu = 4 * largest_layer + int(on_gpu * params / (gpus_per_node * nodes))
    full = 4 * gpus_per_node
    if offload == "none":
        return Estimate(int((largest_layer if zero_init else params) * full * buffer), gpu)
    on_cpu = {"optimizer": 16, "parameters": 18}[offload] / nodes
    return Estimate(int(params * (on_cpu if zero_init else max(full, on_cpu)) * buffer), gpu)


def _counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


# Offload: model states in CPU memory or on NVMe, and what the slow link then allows

#: Bytes of CPU memory that AdamW touches per parameter: master, m and v read and written, a gradient read, a weight
#: written, the last two in 16 bits.
CPU_ADAM_BYTES = 2 * 12 + 2 + 2


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")


@dataclass(frozen=True)
class OffloadStep:
    """Where the time of a step with ZeRO-Offload goes, in seconds.

    Attributes:
        compute: Forward and backward on the device.
        down: Gradients on their way to the CPU.
        exposed_down: The part of it that backward does not hide.
        update: AdamW on the CPU, limited by CPU memory.
        up: New weights on their way to the device.
        step: The sum without the hidden part.
    """

    compute: float
    down: float
    exposed_down: float
    update: float
    up: float
    step: float

    @property
    def efficiency(self) -> float:
        """The device's share of the step: compute over step."""
        return self.compute / self.step


def offload_step(
    params: int,
    *,
    tokens: int,
    flops: float,
    host_bandwidth: float,
    cpu_bandwidth: float,
    ranks: int = 1,
    micro_batches: int = 1,
) -> OffloadStep:
    """Return the time of a ZeRO-Offload step; collectives between devices, and all latencies, are left out.

    6 FLOPs per parameter and token, two thirds of them backward, which hides gradients on their way down. Micro-batches
    each send their gradients, which add up on the CPU. The update starts when the last gradient is there.

    Args:
        host_bandwidth: Bytes per second between a device and the CPU, per direction.
        cpu_bandwidth: Bytes per second of CPU memory that one rank gets.
    """
    _positive(
        params=params,
        tokens=tokens,
        flops=flops,
        host_bandwidth=host_bandwidth,
        cpu_bandwidth=cpu_bandwidth,
        ranks=ranks,
        micro_batches=micro_batches,
    )
    own = shard_size(params, ranks)
    backward = 4 * params * tokens / flops
    compute = micro_batches * 1.5 * backward
    down = micro_batches * 2 * own / host_bandwidth
    exposed = max(0.0, down - micro_batches * backward)
    update, up = CPU_ADAM_BYTES * own / cpu_bandwidth, 2 * own / host_bandwidth
    return OffloadStep(compute, down, exposed, update, up, compute + exposed + update + up)


def offload_efficiency(intensity: float, bandwidth: float, flops: float) -> float:
    """Return compute time over compute plus transfer time, ait W / (ait W + P), as in ZeRO-Infinity.

    Args:
        bandwidth: Bytes per second that one device gets.
        flops: FLOP/s that it reaches when nothing is in the way.
    """
    _positive(intensity=intensity, bandwidth=bandwidth, flops=flops)
    return intensity * bandwidth / (intensity * bandwidth + flops)
