"""Formulas of rung 11, a real run, and of its page on batch sizes."""

from __future__ import annotations

from lablib.calc.communication import efficiency, speedup
from lablib.calc.flops import mfu, step_flops
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.runs import LLAMA3_FAILURES, lost_share, sqrt_rule, steps_needed, young_interval

_SAVE_S = 30.0  # that training stands still for a checkpoint


def _mfu(job: Job) -> str:
    flops = step_flops(job.config, batch=job.global_batch, seq=job.seq)
    peak = job.gpu.peak("bf16")
    # A step that takes two and a half times as long as the GPUs would need at their peak.
    seconds = 2.5 * flops.model / (job.ranks * peak)
    return f"{mfu(flops, seconds=seconds, devices=job.ranks, peak=peak):.0%} for a step of {seconds:.1f} s"


def _interval(job: Job) -> float:
    return young_interval(_SAVE_S, LLAMA3_FAILURES.mtbf_on(job.ranks))


def _lost(job: Job) -> str:
    share = lost_share(_interval(job), cost=_SAVE_S, mtbf=LLAMA3_FAILURES.mtbf_on(job.ranks))
    return f"{share:.2%} at Young's interval, with GPUs that fail as Llama 3's did"


def _steps(job: Job) -> str:
    return f"{steps_needed(job.global_batch, noise_scale=512):.2f} times the least steps, with a noise scale of 512"


def _rate(job: Job) -> str:
    return f"{sqrt_rule(3e-4, job.micro_batch * job.microbatches, job.global_batch):.1e} for 3.0e-04 on one rank"


FORMULAS = (
    Formula(
        name="Speedup, weak scaling",
        tex=r"S_{\text{weak}} = \frac{N\,T_1}{T_N}",
        symbols="T_N: seconds of a step on N ranks, each with the batch of one",
        label="eq-11-speedup",
        code="lablib.calc.communication.speedup",
        example=lambda job: f"{speedup(2.0, 2.2, job.ranks, scaling='weak'):.1f} where a step of 2.0 s takes 2.2 s",
    ),
    Formula(
        name="Efficiency",
        tex=r"E = \frac{S}{N}",
        symbols="S: speedup, weak or strong; N: ranks",
        label="eq-11-efficiency",
        code="lablib.calc.communication.efficiency",
        example=lambda job: f"{efficiency(2.0, 2.2, job.ranks, scaling='weak'):.0%} where a step of 2.0 s takes 2.2 s",
    ),
    Formula(
        name="Lost time per second of work",
        tex=r"\frac{\delta}{\tau} + \frac{\tau}{2M}",
        symbols="tau: seconds between checkpoints; delta: seconds that one takes; M: mean seconds between failures",
        label="eq-11-lost-share",
        code="lablib.calc.runs.lost_share",
        example=_lost,
    ),
    Formula(
        name="Young's interval between checkpoints",
        tex=r"\tau = \sqrt{2\,\delta M}",
        symbols="delta: seconds that a checkpoint takes; M: mean seconds between failures of the job",
        label="eq-11-young",
        code="lablib.calc.runs.young_interval",
        example=lambda job: f"{_interval(job) / 3600:.1f} hours, for {_SAVE_S:g} s and GPUs that fail as Llama 3's did",
    ),
    Formula(
        name="MFU",
        tex=r"\text{MFU} = \frac{B s\,(6\psi + 12 L h s)}{T_N\,N\,F}",
        symbols="B: sequences of a step; psi: parameters in matrix products; F: dense peak FLOP/s of a GPU; T_N: seconds",
        label="eq-11-mfu",
        code="lablib.calc.flops.mfu",
        example=_mfu,
    ),
    Formula(
        name="Noise scale",
        tex=r"B_{\text{noise}} = \frac{\operatorname{tr}\Sigma}{\lVert G \rVert^2}",
        symbols="G: true gradient; Sigma: covariance of one example's gradient",
        label="eq-11-noise-scale",
        code="lablib.calc.runs.noise_scale",
        example=lambda job: f"measured, not computed: no job of {job.ranks} ranks has it before its first steps",
        page="batch_size",
    ),
    Formula(
        name="Steps and examples to a given loss",
        tex=r"S = S_{\min}\Bigl(1 + \frac{B_{\text{noise}}}{B}\Bigr)",
        symbols="B: global batch, examples; S: optimizer steps",
        label="eq-11-steps-and-examples",
        code="lablib.calc.runs.steps_needed",
        example=_steps,
        page="batch_size",
    ),
    Formula(
        name="Learning rate of a larger batch, Adam",
        tex=r"\eta' = \eta \sqrt{B'/B}",
        symbols="eta: rate that suits the batch B",
        label="eq-11-sqrt-rule",
        code="lablib.calc.runs.sqrt_rule",
        example=_rate,
        page="batch_size",
    ),
)
