"""The tables of layouts that guides print, each row judged and corrected, and the formula behind their stages.

Guides ask whether the weights fit. What must fit are the training states, 16 bytes a parameter with AdamW in mixed
precision: 13 billion parameters at tp=2 hold 104 GB on a rank, and no 80 GB GPU does that; with the optimizer sharded
over the row's dp=4 they are 45.5 GB. tp=8, pp=4 and cp=8 are 256 ranks for one replica, and the row has 128.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.layout_choice import Choice, choose
from lablib.calc.models import ModelConfig, preset
from lablib.calc.plan_runs import gpt
from lablib.calc.zero import zero_state_bytes

ROOM = 0.2  # of a GPU, for activations and buffers


def state_bytes(params: float, *, tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0) -> int:
    """Return the bytes of training states on a rank, 16 a parameter over tp and pp, and over dp as ZeRO shards."""
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
    """Return whether a printed row can be as it stands, without ZeRO, and a sentence that says why or corrects it."""
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


def pipeline_formula(
    params: float, tp: int, gpu: str | Accelerator = "a100", *, bytes_per_param: int = 16
) -> float:
    """Return `bytes · ψ / (memory · tp)`, the stages that guides compute; they put in 2 bytes, the weights.

    70 billion parameters with tp=8 on 80 GiB: 0.20 with the weights, so one stage; 1.63 with the states, so two at the
    least, before any activation.

    Raises:
        ValueError: If a number is below 1.
    """
    for name, value in (("params", params), ("tp", tp), ("bytes_per_param", bytes_per_param)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    return bytes_per_param * params / (card.memory_bytes * tp)


@dataclass(frozen=True)
class AuditedRow:
    """A row of the tables that guides print, judged and corrected.

    Attributes:
        example: The row as printed.
        holds: Whether it can be as it stands, without ZeRO.
        states: Bytes of states of a rank as printed, without ZeRO; 0 if the factors do not multiply.
        verdict: A sentence that says why, or what corrects it.
        choice: What the framework recommends for this model and number of GPUs; None if nothing fits.
        nothing: Why nothing fits, or "".
    """

    example: Example
    holds: bool
    states: int
    verdict: str
    choice: Choice | None
    nothing: str


#: A model of each size that the tables name; there is no published one of 30B among the presets.
MODELS: dict[str, ModelConfig] = {
    "7B": preset("llama-2-7b"),
    "13B": preset("llama-2-13b"),
    "30B": gpt(48, 7168, 56),
    "70B": preset("llama-2-70b"),
    "175B": preset("gpt3-175b"),
    "405B": preset("llama-3.1-405b"),
    "70B, 1M tokens": preset("llama-3.1-70b"),
}


def audited_rows(gpu: str | Accelerator = "a100", *, tokens: int = 2**22) -> list[AuditedRow]:
    """Return the usual table of layouts, each row judged, with what the framework says in its place.

    Sequences are 2,048 tokens, 8,192 for 405B and 1,048,576 in the last row.
    """
    return [_audit(example, gpu, tokens) for example in EXAMPLES]


def _audit(example: Example, gpu: str | Accelerator, tokens: int) -> AuditedRow:
    holds, verdict = check_example(example, gpu=gpu)
    width = example.tp * example.pp * example.cp
    states = state_bytes(example.params, tp=example.tp, pp=example.pp) if example.gpus % width == 0 else 0
    long = "1M" in example.name
    seq = 2**20 if long else 8192 if example.name == "405B" else 2048
    batch = max(tokens // seq, example.gpus)
    try:
        choice = choose(MODELS[example.name], gpus=example.gpus, gpu=gpu, seq=seq, global_batch=batch)
    except ValueError as error:
        return AuditedRow(example, holds, states, verdict, None, str(error))
    return AuditedRow(example, holds, states, verdict, choice, "")
