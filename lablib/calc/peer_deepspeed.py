"""DeepSpeed's estimators and the 18 bytes of Transformers' documentation: states, with fp32 gradients beside the rest.

DeepSpeed, ZeRO-3: 18 ψ/N, and 4 bytes for each parameter of the largest layer, which is gathered.
Transformers: weights 4 in fp32, 6 in mixed precision; AdamW 8, SGD with momentum 4; gradients 4. Times ψ.

Sources: DeepSpeed, runtime/zero/stage3.py, `estimate_zero3_model_states_mem_needs`; Hugging Face Transformers,
documentation, "Model training anatomy" (docs/source/en/model_memory_anatomy.md).

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.deepspeed_memory import zero3_estimate
from lablib.calc.memory_cases import Case
from lablib.calc.models import ModelConfig
from lablib.calc.peer import MIXED, Peer, first_reason, only_full_tuning, parameters

DEEPSPEED = "DeepSpeed, estimate_zero3_model_states_mem_needs"
DOCUMENTATION = "Hugging Face Transformers, documentation, model_memory_anatomy"
DEEPSPEED_LINK = ("https://deepspeed.readthedocs.io/en/latest/memory.html", "deepspeedmemory")
DOCUMENTATION_LINK = ("https://huggingface.co/docs/transformers/model_memory_anatomy", "transformersmemory")
GPUS_PER_NODE = 8


def largest_layer(model: ModelConfig) -> int:
    """Return the parameters of the module with the most of its own: the token table, or a matrix of an MLP.

    Args:
        model: A dense model.
    """
    matrix = model.hidden * model.ffn + (max(model.hidden, model.ffn) if model.mlp_bias else 0)
    return max(model.vocab * model.hidden, matrix)


def estimator_arguments(case: Case) -> dict[str, int]:
    """Return what the estimator is called with.

    Args:
        case: A sharded case.
    """
    gpus = min(case.dp, GPUS_PER_NODE)
    sizes = {"params": parameters(case), "largest_layer": largest_layer(case.model)}
    return sizes | {"gpus_per_node": gpus, "nodes": case.dp // gpus}


def _covers_zero3(case: Case) -> str:
    return first_reason(
        (not case.shards, "it estimates ZeRO-2 and ZeRO-3 only"),
        only_full_tuning(case),
        (case.recipe != "fsdp2-mixed", "it counts mixed precision only"),
        (case.optimizer != "adamw", "it has Adam only"),
        (case.tp > 1, "it knows no tensor parallelism"),
    )


def _zero3(case: Case) -> dict[str, float]:
    arguments = estimator_arguments(case)
    whole = zero3_estimate(**arguments, offload="none").gpu
    gathered = 4 * arguments["largest_layer"]
    shards = whole - gathered
    eighteen = {"weights": 2, "fp32 copy": 4, "gradients": 4, "moments": 8}
    return {term: shards * size / 18 for term, size in eighteen.items()} | {"gathered layer": gathered}


def _covers_documentation(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        (case.recipe not in (*MIXED, "fp32"), "it has fp32 and mixed precision only"),
        (case.optimizer not in _MOMENTS, "it has AdamW and SGD with momentum only"),
        (not case.whole or case.tp * case.pp > 1, "it describes one device"),
    )


_MOMENTS = {"adamw": 8, "sgd-momentum": 4}


def documented_bytes(mixed: bool, optimizer: str = "adamw") -> dict[str, int]:
    """Return bytes a parameter by term as Transformers' documentation lists them.

    Args:
        mixed: Mixed precision; otherwise fp32.
        optimizer: "adamw" or "sgd-momentum".
    """
    return {
        "weights": 2 if mixed else 4,
        "fp32 copy": 4 if mixed else 0,
        "gradients": 4,
        "moments": _MOMENTS[optimizer],
    }


def _documentation(case: Case) -> dict[str, float]:
    sizes = documented_bytes(case.recipe in MIXED, case.optimizer)
    return {term: size * parameters(case) for term, size in sizes.items()}


PEERS = (
    Peer(
        "Transformers' docs",
        "states",
        DOCUMENTATION,
        _covers_documentation,
        _documentation,
        *DOCUMENTATION_LINK,
    ),
    Peer("DeepSpeed", "states", DEEPSPEED, _covers_zero3, _zero3, *DEEPSPEED_LINK),
)
