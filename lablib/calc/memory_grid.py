"""The grid: which cases the memory calculator is judged on, and what cannot be combined.

    for case in grid():
        print(case.name)

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from lablib.calc.memory_cases import FACTORS, Case, case_model, has_model
from lablib.calc.pairwise import Rule, choose

_SIXTEEN_BITS_BY_HAND = ("fp32", "pure-bf16", "mixed-bf16")
_REPLICAS = ("ddp", "zero1")


def _divides(family: str, size: str, tensor: str) -> bool:
    if not has_model(family, size):
        return True
    model, tp = case_model(family, size), int(tensor[0])
    return not any(number % tp for number in (model.num_heads, model.num_kv_heads, model.ffn))


def _fits(family: str, size: str, seq: int) -> bool:
    if size == "tiny":
        return seq <= 1000  # on real tensors
    return not has_model(family, size) or seq <= case_model(family, size).max_positions


def _has_own_head(family: str, size: str) -> bool:
    return family != "gpt2" and not (has_model(family, size) and case_model(family, size).tied)


RULES: tuple[Rule, ...] = (
    Rule(("family", "size"), has_model, "no model of this family in this size"),
    Rule(("family", "size", "tensor"), _divides, "tp does not divide heads or MLP"),
    Rule(
        ("family", "size", "seq"), _fits, "longer than the model's positions, or than a test on real tensors"
    ),
    Rule(
        ("kernels", "family"),
        lambda kernels, family: (
            family
            in {"toy": ("gpt2", "llama", "qwen2"), "paper": FACTORS["family"]}.get(
                kernels, ("gpt2", "llama", "qwen2", "mistral")
            )
        ),
        "experts are counted as the papers do; the toy has three families",
    ),
    Rule(
        ("kernels", "tensor"),
        lambda kernels, tensor: kernels == "paper" or "+sp" not in tensor,
        "the plan that Hugging Face ships for PyTorch has no sequence parallelism",
    ),
    *(
        Rule(
            ("kernels", "tensor", *factors),
            lambda kernels, tensor, *values, allowed=allowed: (
                kernels == "paper" or tensor == "1" or allowed(*values)
            ),
            why,
        )
        for factors, allowed, why in (
            (
                ("family", "size"),
                _has_own_head,
                "the plan splits the head, and not the table that is tied to it",
            ),
            (("sharding",), lambda sharding: sharding == "none", "PyTorch's split is judged alone"),
            (("pp",), lambda pp: pp == 1, "PyTorch's split is judged alone"),
            (("accumulate",), lambda accumulate: accumulate == 1, "PyTorch's split is judged alone"),
            (("recipe",), lambda recipe: recipe in ("fp32", "pure-bf16"), "DTensor has no autocast"),
            (("tuning",), lambda tuning: tuning == "full", "adapters are not in the plan"),
            (
                ("optimizer", "step"),
                lambda optimizer, step: optimizer == "adamw" or step != "fused",
                "PyTorch's fused SGD takes no DTensors",
            ),
        )
    ),
    Rule(
        ("kernels", "recompute"),
        lambda kernels, recompute: kernels != "hf" or recompute != "selective",
        "Hugging Face's classes recompute whole blocks",
    ),
    Rule(
        ("kernels", "pp"),
        lambda kernels, pp: kernels != "hf" or pp == 1,
        "Hugging Face's classes are one stage",
    ),
    Rule(
        ("kernels", "recipe"),
        lambda kernels, recipe: kernels != "paper" or recipe in (*_SIXTEEN_BITS_BY_HAND, "fsdp2-mixed"),
        "no paper counts autocast",
    ),
    Rule(
        ("recipe", "sharding"),
        lambda recipe, sharding: (recipe == "fsdp2-mixed") <= sharding.startswith("fsdp2"),
        "fsdp2-mixed belongs to FSDP2",
    ),
    Rule(
        ("recipe", "sharding"),
        lambda recipe, sharding: (
            not sharding.startswith("fsdp2") or recipe not in ("mixed-bf16", "autocast-bf16")
        ),
        "FSDP2 has a policy of its own for mixed precision",
    ),
    Rule(
        ("sharding", "dp"),
        lambda sharding, dp: (sharding == "none") == (dp == 1),
        "one rank, or a reason for more",
    ),
    Rule(
        ("sharding", "size"),
        lambda sharding, size: sharding not in _REPLICAS or size == "tiny",
        "DDP's reducer is C++ and takes real tensors",
    ),
    Rule(
        ("sharding", "pp"),
        lambda sharding, pp: sharding == "none" or pp == 1,
        "pipelines are judged without data parallelism",
    ),
    Rule(
        ("sharding", "kernels"),
        lambda sharding, kernels: sharding not in _REPLICAS or kernels != "paper",
        "DDP is judged with real kernels",
    ),
    Rule(("tensor", "pp"), lambda tensor, pp: tensor == "1" or pp == 1, "stages are judged whole"),
    Rule(("size", "pp"), lambda size, pp: size != "70b" or pp == 1, "only sharded"),
    Rule(
        ("size", "sharding", "dp"),
        lambda size, sharding, dp: size != "70b" or (sharding.startswith("fsdp2") and dp >= 8),
        "70b needs many ranks",
    ),
    Rule(
        ("optimizer", "step", "sharding"),
        lambda optimizer, step, sharding: (
            optimizer == "adamw" or step != "fused" or not sharding.startswith("fsdp2")
        ),
        "PyTorch's fused SGD takes no sharded tensors",
    ),
    Rule(
        ("tuning", "kernels", "family"),
        lambda tuning, kernels, family: tuning == "full" or (kernels == "hf" and family != "gpt2"),
        "adapters go beside Hugging Face's linear layers",
    ),
    Rule(
        ("tuning", "recipe"),
        lambda tuning, recipe: tuning == "full" or recipe in ("fp32", "autocast-bf16", "fsdp2-mixed"),
        "our adapters are fp32",
    ),
    Rule(
        ("pp", "recipe"),
        lambda pp, recipe: pp == 1 or recipe in _SIXTEEN_BITS_BY_HAND,
        "stages are judged without autocast",
    ),
    Rule(
        ("accumulate", "pp"),
        lambda accumulate, pp: accumulate == 1 or pp == 1,
        "a pipeline has micro-batches of its own",
    ),
    Rule(
        ("accumulate", "kernels"),
        lambda accumulate, kernels: accumulate == 1 or kernels != "paper",
        "no paper says what gradients that add up need",
    ),
    Rule(
        ("accumulate", "size"),
        lambda accumulate, size: accumulate == 1 or size in ("tiny", "small"),
        "steps of a large model take minutes, and three of them three times as many",
    ),
    Rule(
        ("accumulate", "attention", "seq"),
        lambda accumulate, attention, seq: accumulate == 1 or attention == "fused" or seq == 64,
        "three times the scores of a thousand tokens take long, and show nothing that 64 do not",
    ),
)

#: Cases that everybody asks for, whatever the chooser would take.
LANDMARKS: tuple[Case, ...] = (
    Case(
        kernels="hf",
        family="llama",
        size="8b",
        seq=2048,
        recipe="fsdp2-mixed",
        sharding="fsdp2",
        dp=8,
        step="foreach",
    ),
    Case(
        kernels="hf",
        family="llama",
        size="70b",
        seq=2048,
        recipe="fsdp2-mixed",
        sharding="fsdp2",
        dp=64,
        step="foreach",
        recompute="full",
    ),
    Case(kernels="hf", family="gpt2", size="small", seq=1000, step="foreach"),
    Case(kernels="hf", family="llama", size="small", seq=2048, recipe="autocast-bf16", step="foreach"),
    Case(
        kernels="hf",
        family="qwen2",
        size="8b",
        seq=2048,
        recipe="pure-bf16",
        step="fused",
        recompute="full",
    ),
    Case(
        kernels="hf",
        family="mistral",
        size="8b",
        seq=2048,
        recipe="fsdp2-mixed",
        sharding="fsdp2-keep",
        dp=64,
        step="foreach",
    ),
    Case(family="llama", size="small", seq=1000, recipe="mixed-bf16", step="foreach"),
)

#: Cases whose step is kept moment by moment, to be drawn.
DRAWN: tuple[Case, ...] = (LANDMARKS[0], LANDMARKS[2])

#: What else people train every day; they come after the chosen ones.
EVERYDAY: tuple[Case, ...] = (
    Case(kernels="hf", seq=1000, step="foreach"),
    Case(kernels="hf", family="qwen2", size="small", seq=1000, recompute="full", step="foreach"),
    Case(kernels="hf", family="mistral", size="small", seq=1000, recipe="mixed-bf16"),
    Case(
        kernels="hf",
        size="small",
        seq=2048,
        micro_batch=3,
        recipe="pure-bf16",
        step="foreach",
        attention="plain",
    ),
    Case(
        kernels="hf",
        size="8b",
        seq=2048,
        micro_batch=3,
        recipe="fsdp2-mixed",
        step="fused",
        recompute="full",
        sharding="fsdp2",
        dp=64,
    ),
    Case(family="gpt2", size="small", seq=1000, recompute="selective", attention="plain"),
    Case(seq=1000, sharding="fsdp2", dp=2),
)


@cache
def grid() -> tuple[Case, ...]:
    """Return the cases: the landmarks, what shows every other allowed pair of values, and everyday ones."""
    rows = choose(FACTORS, RULES, [asdict(case) for case in LANDMARKS], cheap_first=("size",))
    return (*(Case(**row) for row in rows), *EVERYDAY)
