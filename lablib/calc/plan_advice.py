"""The tables of layouts that guides print, checked.

What must fit are the training states, 16 bytes a parameter with AdamW in mixed precision, not the weights; tp and pp
divide them, and ZeRO divides a part over dp besides. States of 13 billion parameters are 208 GB: at tp=2 each rank holds 104 GB, which no 80 GB card does. With the optimizer
sharded over dp=4 it holds 45.5 GB, and fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.zero import zero_state_bytes

ROOM = 0.2  # of a device, for activations and buffers


def state_bytes(params: float, *, tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0) -> int:
    """Return the bytes of training states on a rank, 16 a parameter over tp and pp, and over dp as ZeRO shards.

    Args:
        params: Parameters of the model.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Replicas.
        zero: ZeRO stage.

    Raises:
        ValueError: If a number is out of range.
    """
    for name, value in (("params", params), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return zero_state_bytes(-(-int(params) // (tp * pp)), dp, zero)


@dataclass(frozen=True)
class Example:
    """One row of the tables that guides print, and what is right about it.

    Attributes:
        name: Model size as printed.
        params: Parameters.
        gpus: Devices as printed.
        tp: As printed.
        pp: As printed.
        cp: As printed.
        dp: As printed, or None.
    """

    name: str
    params: float
    gpus: int
    tp: int
    pp: int
    cp: int = 1
    dp: int | None = None


#: Layouts as guides print them. The last three sizes and the long context are those of "modern" versions.
EXAMPLES = (
    Example("7B", 7e9, 8, 1, 1, dp=8),
    Example("13B", 13e9, 8, 2, 1, dp=4),
    Example("30B", 30e9, 16, 4, 2, dp=2),
    Example("70B", 70e9, 64, 8, 4, dp=2),
    Example("175B", 175e9, 512, 8, 16, dp=4),
    Example("175B", 175e9, 256, 8, 8, dp=4),
    Example("405B", 405e9, 16384, 8, 16, dp=128),
    Example("70B, 1M tokens", 70e9, 128, 8, 4, cp=8),
)


def check_example(example: Example, *, gpu: str | Accelerator = "h100") -> tuple[bool, str]:
    """Return whether a printed row can be as it stands, without ZeRO, and a sentence that says why or mends it.

    Args:
        example: The row.
        gpu: Accelerator.
    """
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    width = example.tp * example.pp * example.cp
    if example.gpus % width or (example.dp or example.gpus // width) * width != example.gpus:
        return False, (
            f"tp={example.tp} x pp={example.pp} x cp={example.cp} = {width} ranks for one replica, but there are "
            f"{example.gpus}: at least {width} GPUs, or cp={example.gpus // (example.tp * example.pp)}"
        )
    dp = example.gpus // width
    plain = state_bytes(example.params, tp=example.tp, pp=example.pp)
    share = f"{plain / 1e9:.1f} GB of states a rank without ZeRO"
    if plain <= (1 - ROOM) * card.memory_bytes:
        return True, f"{share}: fits on one {card.name}"
    for zero in (1, 2, 3):
        sharded = state_bytes(example.params, tp=example.tp, pp=example.pp, dp=dp * example.cp, zero=zero)
        if sharded <= (1 - ROOM) * card.memory_bytes:
            return (
                False,
                f"{share}: does not fit on one {card.name}; zero={zero} over dp={dp} makes it {sharded / 1e9:.1f} GB",
            )
    return False, f"{share}: does not fit on one {card.name}, with ZeRO neither"
