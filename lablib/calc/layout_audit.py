"""The tables of layouts that guides print, each row judged and mended, and the formula behind their stages.

13 billion parameters at tp=2 hold 104 GB of states on a rank, and no 80 GB card does that; sharded over the two by four
ranks that the row has, they fit. tp=8, pp=4 and cp=8 are 256 ranks for one replica, and the row has 128.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.layout_choice import Choice, choose
from lablib.calc.models import ModelConfig, preset
from lablib.calc.plan_advice import EXAMPLES, Example, check_example, state_bytes
from lablib.calc.plan_runs import gpt


def pipeline_formula(
    params: float, tp: int, gpu: str | Accelerator = "a100", *, bytes_per_param: int = 16
) -> float:
    """Return `bytes · ψ / (memory · tp)`, the stages that guides compute; they put in 2 bytes, the weights.

    70 billion parameters with tp=8 on 80 GiB: 0.20 with the weights, so one stage; 1.63 with the states, so two at the
    least, before any activation.

    Args:
        params: ψ.
        tp: Tensor-parallel ranks.
        gpu: Accelerator.
        bytes_per_param: 2 for the weights alone, 16 for the states.

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
    """A row of the tables that guides print, judged and mended.

    Attributes:
        example: The row as printed.
        holds: Whether it can be as it stands, without ZeRO.
        states: Bytes of states of a rank as printed, without ZeRO; 0 if the factors do not multiply.
        verdict: A sentence that says why, or what mends it.
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

    Args:
        gpu: Accelerator.
        tokens: Tokens of a step, about: rounded to whole sequences, and at least one for every GPU.
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
