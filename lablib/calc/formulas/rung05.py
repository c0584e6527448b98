"""Formulas of rung 05: what a rank holds and sends in each ZeRO stage, what hides the traffic, and offload."""

from __future__ import annotations

from lablib.calc.communication import hiding_tokens
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.memory import training_memory
from lablib.calc.parallel import offload_efficiency, zero_choices, zero_sent_bytes, zero_state_bytes
from lablib.calc.units import GB

_PSI = "psi: parameters; N: data-parallel ranks"


def _held(job: Job, stage: int, recipe: str = "mixed-bf16") -> str:
    return f"{zero_state_bytes(job.params, job.ranks, stage, recipe) / GB:,.1f} GB"


def _sent(job: Job, stage: int) -> str:
    sent = zero_sent_bytes(job.params, job.ranks, stage, job.microbatches)
    return f"{sent / GB:,.1f} GB in 16 bits, {job.microbatches} micro-batches"


def _hidden(job: Job) -> str:
    flops = 0.4 * job.gpu.peak()
    tokens = hiding_tokens(job.ranks, flops=flops, bandwidth=50e9)
    return f"{tokens:,.0f} tokens at {flops / 1e12:.0f} TFLOP/s and 50 GB/s"


def _micro_batches(job: Job) -> str:
    kept = training_memory(job.config, seq=job.seq, recompute="full").activations
    choice = zero_choices(job.params, job.ranks, job.global_batch, kept, job.gpu.usable_bytes)[3]
    return f"{choice.micro_batches} in stage 3, with full recomputation"


FORMULAS = (
    Formula(
        name="Bytes of states, stage 1",
        tex=r"\psi\left(4 + \frac{12}{N}\right)",
        symbols=_PSI,
        label="eq-05-states",
        code="lablib.calc.parallel.zero_state_bytes",
        example=lambda job: _held(job, 1),
    ),
    Formula(
        name="Bytes of states, stage 2",
        tex=r"\psi\left(2 + \frac{14}{N}\right)",
        symbols=_PSI,
        label="eq-05-states",
        code="lablib.calc.parallel.zero_state_bytes",
        example=lambda job: _held(job, 2),
    ),
    Formula(
        name="Bytes of states, stage 3",
        tex=r"\frac{16\,\psi}{N}",
        symbols=_PSI,
        label="eq-05-states",
        code="lablib.calc.parallel.zero_state_bytes",
        example=lambda job: _held(job, 3),
    ),
    Formula(
        name="Bytes of states, stage 1 with fp32 gradients (Megatron)",
        tex=r"\psi\left(6 + \frac{12}{N}\right)",
        symbols=_PSI,
        label="eq-05-fp32-gradients",
        code="lablib.calc.parallel.zero_state_bytes",
        example=lambda job: _held(job, 1, "mixed-bf16-fp32-grads"),
    ),
    Formula(
        name="Values sent in a step, DDP and stage 1",
        tex=r"2\,\psi\,\frac{N-1}{N}",
        symbols=_PSI,
        label="eq-05-sent",
        code="lablib.calc.parallel.zero_sent_bytes",
        example=lambda job: _sent(job, 1),
    ),
    Formula(
        name="Values sent in a step, stage 2",
        tex=r"(m + 1)\,\psi\,\frac{N-1}{N}",
        symbols=f"{_PSI}; m: micro-batches in a step",
        label="eq-05-sent",
        code="lablib.calc.parallel.zero_sent_bytes",
        example=lambda job: _sent(job, 2),
    ),
    Formula(
        name="Values sent in a step, stage 3",
        tex=r"3m\,\psi\,\frac{N-1}{N}",
        symbols=f"{_PSI}; m: micro-batches in a step",
        label="eq-05-sent",
        code="lablib.calc.parallel.zero_sent_bytes",
        example=lambda job: _sent(job, 3),
    ),
    Formula(
        name="Tokens of a rank that hide the traffic",
        tex=r"\frac{F}{W}\cdot\frac{N-1}{N}",
        symbols="F: FLOP/s that a rank reaches; W: bytes per second out of it, per direction; N: data-parallel ranks",
        label="eq-05-hide",
        code="lablib.calc.communication.hiding_tokens",
        example=_hidden,
    ),
    Formula(
        name="Efficiency of offload, without overlap",
        tex=r"\frac{\text{ait}\, W}{\text{ait}\, W + F}",
        symbols="ait: FLOPs per byte moved; W: bytes per second; F: FLOP/s of the device",
        label="eq-05-efficiency",
        code="lablib.calc.parallel.offload_efficiency",
        example=lambda job: (
            f"{offload_efficiency(job.seq * job.micro_batch, 25e9, 0.4 * job.gpu.peak()):.0%} "
            f"with weights over 25 GB/s, {job.params / 1e9:.0f}B"
        ),
    ),
    Formula(
        name="Micro-batches of a step in a stage",
        tex=r"m = \left\lceil \frac{B/N}{\lfloor R / A_1 \rfloor} \right\rceil",
        symbols="B: sequences of all N ranks in a step; R: bytes of a device beside the states; A_1: bytes of activations of one "
        "sequence",
        label="eq-05-micro-batches",
        code="lablib.calc.parallel.zero_choices",
        example=_micro_batches,
    ),
)
