"""Cases of the grid weighed on a GPU, by `lablib.launch.gpu_step`: which fit there, and how a case becomes a job."""

from __future__ import annotations

from collections.abc import Callable

from lablib.launch.gpu_step import Job, Settings, measure_steps, steps_that_fit
from tests.evidence.cases import Case
from tests.evidence.grid import grid, held_out
from tests.evidence.oracles import Master, build_model, make_optimizer

#: Of real size, as people train them on one GPU; the grid's and the drawn ones come besides.
NAMED = tuple(
    Case(implementation=implementation, family=family, size="small", seq=seq, **how)
    for family, seq in (("gpt2", 1000), ("llama", 2048), ("qwen2", 2048))
    for implementation in ("hf", "toy")
    for how in (
        {"recipe": "fp32", "step": "foreach"},
        {"recipe": "pure-bf16", "step": "fused", "recompute": "full"},
        {"recipe": "autocast-bf16", "step": "fused", "attention": "plain"},
        {"recipe": "mixed-bf16", "step": "foreach", "recompute": "full"},
    )
)


def on_one_gpu(case: Case) -> bool:
    """Return whether a case is a job of one GPU with classes that exist there."""
    return case.implementation != "paper" and case.sharding == "none" and case.dp == case.tp == case.pp == case.cp == 1


def gpu_cases(memory_bytes: int) -> list[Case]:
    cases = {case.name: case for case in (*NAMED, *grid(), *held_out()) if on_one_gpu(case)}
    return [
        cases[name] for name in steps_that_fit({name: settings(case) for name, case in cases.items()}, memory_bytes)
    ]


def settings(case: Case) -> Settings:
    return {"step": case.step, **case.settings()}


def gpu_job(case: Case) -> Job:
    """Build a case on torch's default device."""
    if not on_one_gpu(case):
        raise ValueError(
            f"{case.name}: a GPU is measured alone, with classes that exist: sharding='none', dp=tp=pp=cp=1 and "
            "implementation 'toy' or 'hf'"
        )
    subject = build_model(case)
    batch, model, master = subject.tokens(), subject.model, None
    if case.recipe == "mixed-bf16":
        master = Master(model, build_model(case, working=True).model)
        model = master.model
    optimizer = make_optimizer(case, subject.model)
    autocast = case.recipe == "autocast-bf16"
    return Job(model, optimizer, lambda: subject.loss(model, batch), case.micro_batches, autocast, master)


def weighed_cases(cases: list[Case], say: Callable[[str], None] = print) -> list[dict]:
    return measure_steps({case.name: (settings(case), lambda case=case: gpu_job(case)) for case in cases}, say=say)
