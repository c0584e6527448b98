"""Formulas of rung 01: states, parameters, activations and peak of a run, its FLOPs and time, Amdahl's law."""

from __future__ import annotations

from lablib.calc.communication import amdahl_speedup
from lablib.calc.flops import chinchilla_params, training_flops, training_time
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.memory.activations import layer_activations
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import preset
from lablib.calc.parallel import max_params, zero_state_bytes
from lablib.calc.units import GB

_SIZES = "s, b: tokens of a sequence, sequences of a micro-batch; h: hidden size"


def _gpt_block(job: Job) -> str:
    gpt = preset("gpt3-175b")
    kept = layer_activations(gpt, batch=job.micro_batch, seq=2048, implementation="paper", attention="plain")
    return f"{sum(kept.values()) / GB:.2f} GB, for GPT-3's block at {2048:,} tokens"


def _llama_block(job: Job) -> str:
    sizes = {"batch": job.micro_batch, "seq": job.seq}
    kept = layer_activations(job.config, **sizes, implementation="paper", attention="fused")
    return f"{sum(kept.values()) / GB:.2f} GB, with the statistics of the fused kernel"


def _instant(job: Job, name: str) -> str:
    line = memory_timeline(job.config, micro_batch=job.micro_batch, seq=job.seq)
    return f"{line.instant(name).total / GB:,.1f} GB on one device"


def _years(job: Job) -> str:
    flops = training_flops(job.params, job.tokens)
    days = training_time(flops, devices=job.ranks, peak=job.gpu.peak(), utilization=0.4) / 86400
    return f"{days:,.0f} days on {job.ranks} GPUs at an MFU of {0.4:.0%}"


def _optimal(job: Job) -> str:
    return (
        f"{chinchilla_params(training_flops(job.params, job.tokens)) / 1e9:.0f}B parameters for the FLOPs of this job"
    )


FORMULAS = (
    Formula(
        name="Model states",
        tex=r"N \,(w + g + K)",
        symbols="N: parameters; w, g, K: bytes of a weight, a gradient and the optimizer's state of a parameter",
        label="eq-01-states",
        code="lablib.calc.parallel.zero.zero_state_bytes",
        example=lambda job: f"{zero_state_bytes(job.params, 1, 0) / GB:,.1f} GB with 2 + 2 + 12 bytes",
    ),
    Formula(
        name="Parameters of a Llama",
        tex=r"L\,(2hq + 2hk + 3hf + 2h) + h + 2Vh",
        symbols="L: blocks; h: hidden size; q, k: width of all query and all key heads; f: MLP width; V: vocabulary",
        label="eq-01-count",
        code="lablib.calc.params.count_params",
        example=lambda job: f"{job.params:,}",
    ),
    Formula(
        name="Activations of a GPT block",
        tex=r"sbh\left(34 + 5\,\frac{as}{h}\right)",
        symbols=_SIZES + "; a: heads; without the scores 34sbh",
        label="eq-01-gpt-block",
        code="lablib.calc.memory.activations.layer_activations",
        example=_gpt_block,
    ),
    Formula(
        name="Activations of a Llama block, fused attention",
        tex=r"sb\,(8h + 4q + 4k + 6f)",
        symbols=_SIZES + "; q, k: width of all query and all key heads; f: MLP width",
        label="eq-01-llama-block",
        code="lablib.calc.memory.activations.layer_activations",
        example=_llama_block,
    ),
    Formula(
        name="Memory at the loss",
        tex=r"N\,(w + K) + L\,M_\text{block} + 6sbV",
        symbols="as in the states and the block; L: blocks; V: vocabulary",
        label="eq-01-at-loss",
        code="lablib.calc.memory.timeline.memory_timeline",
        example=lambda job: _instant(job, "backward of the loss"),
    ),
    Formula(
        name="Memory in the optimizer's step",
        tex=r"N\,(w + 4 + K + r)",
        symbols="r: bytes of roots, 4 for AdamW with foreach, 0 with the fused kernel",
        label="eq-01-in-step",
        code="lablib.calc.memory.timeline.memory_timeline",
        example=lambda job: _instant(job, "optimizer step"),
    ),
    Formula(
        name="Largest model on one GPU",
        tex=r"\frac{\text{capacity}}{16}",
        symbols="capacity: bytes of the GPU; 16: bytes of states of a parameter",
        label="eq-01-largest",
        code="lablib.calc.parallel.zero.max_params",
        example=lambda job: f"{max_params(job.gpu.memory_bytes) / 1e9:.2f}B on {job.gpu.name}",
    ),
    Formula(
        name="States of a GPU when n GPUs divide j of the 16 bytes",
        tex=r"N\left(16 - j + \frac{j}{n}\right)",
        symbols="j: 0 for DDP, 12, 14, 16 for ZeRO-1, 2, 3; n: ranks",
        label="eq-01-divided",
        code="lablib.calc.parallel.zero.zero_state_bytes",
        example=lambda job: (
            f"{zero_state_bytes(job.params, job.ranks, 1) / GB:.1f} GB under ZeRO-1 on {job.ranks} GPUs"
        ),
    ),
    Formula(
        name="FLOPs of a training run",
        tex=r"6ND",
        symbols="N: parameters, the active ones with experts; D: tokens of the run",
        label="eq-01-training-flops",
        code="lablib.calc.flops.training_flops",
        example=lambda job: f"{training_flops(job.params, job.tokens):.2g} FLOPs",
        page="scaling_laws",
    ),
    Formula(
        name="Time of a training run",
        tex=r"\frac{C}{n \cdot \text{peak} \cdot \text{MFU}}",
        symbols="C: FLOPs of the run; n: GPUs; peak: dense FLOP/s of one",
        label="eq-01-time",
        code="lablib.calc.flops.training_time",
        example=_years,
        page="scaling_laws",
    ),
    Formula(
        name="FLOPs at 20 tokens a parameter",
        tex=r"120\,N^2",
        symbols="N: parameters; D = 20N tokens",
        label="eq-01-optimal",
        code="lablib.calc.flops.chinchilla_params",
        example=_optimal,
        page="scaling_laws",
    ),
    Formula(
        name="Amdahl's law",
        tex=r"\frac{1}{\phi + (1 - \phi)/n} \;\le\; \frac{1}{\phi}",
        symbols="phi: share of the work that is not divided; n: ranks",
        label="eq-01-amdahl",
        code="lablib.calc.communication.amdahl_speedup",
        example=lambda job: f"{amdahl_speedup(job.ranks, 0.01):.1f} on {job.ranks} ranks, if {0.01:.0%} is not divided",
        page="map_of_parallelism",
    ),
)
