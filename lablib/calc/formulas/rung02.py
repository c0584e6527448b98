"""Formulas of rung 02: what data parallelism sends, how long that takes, and when backward hides it."""

from __future__ import annotations

from lablib.calc.communication import hiding_tokens, ring_all_reduce_bytes, ring_all_reduce_time
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.parallel import DDPStep, ddp_step_time, token_factor
from lablib.calc.units import GB

GRADIENT, LATENCY, REACHED = 2, 5e-6, 0.4  # bytes of a gradient; seconds; of the peak
NIC = link("ib-ndr").bandwidth
PIECES = 100
_LINK = (
    "S: bytes of all gradients; n: ranks; alpha: seconds of latency; W: bytes per second out of a rank, per direction"
)
_RATIO = "g: bytes of one gradient; F: FLOP/s that a rank reaches; W: bytes per second out of a rank, per direction; n: ranks"


def _break_even(job: Job) -> float:
    return hiding_tokens(job.ranks, flops=REACHED * job.gpu.peak(), bandwidth=NIC, bytes_per_gradient=GRADIENT)


def _step(job: Job, buckets: int) -> DDPStep:
    forward = 2 * job.params * job.micro_batch * job.seq / (REACHED * job.gpu.peak())
    return ddp_step_time(
        compute_forward=forward,
        compute_backward=2 * forward,
        gradient_bytes=GRADIENT * job.params,
        ranks=job.ranks,
        bandwidth=NIC,
        buckets=buckets,
    )


def _ring_seconds(job: Job) -> float:
    return ring_all_reduce_time(GRADIENT * job.params, job.ranks, bandwidth=NIC, latency=LATENCY)


FORMULAS = (
    Formula(
        name="Factor on a rank's sum of token losses",
        tex=r"\frac{n}{\sum_r T_r}",
        symbols="n: ranks; T_r: tokens of rank r in the step",
        label="eq-02-tokens",
        code="lablib.calc.parallel.token_factor",
        example=lambda job: (
            f"1/{1 / token_factor([job.seq, job.seq // 2]):,.0f} where two ranks hold {job.seq} and {job.seq // 2}"
        ),
    ),
    Formula(
        name="Bytes that a rank sends in a step",
        tex=r"2\,\frac{n-1}{n}\,S",
        symbols="S: bytes of all gradients; n: ranks",
        label="eq-02-ring-bytes",
        code="lablib.calc.communication.ring_all_reduce_bytes",
        example=lambda job: f"{ring_all_reduce_bytes(GRADIENT * job.params, job.ranks) / GB:.1f} GB in 16 bits",
    ),
    Formula(
        name="Seconds of a ring all-reduce",
        tex=r"2(n-1)\,\alpha + 2\,\frac{n-1}{n}\,\frac{S}{W}",
        symbols=_LINK,
        label="eq-02-ring-time",
        code="lablib.calc.communication.ring_all_reduce_time",
        example=lambda job: f"{_ring_seconds(job):.2f} s at {NIC / GB:.0f} GB/s and {LATENCY * 1e6:.0f} µs",
    ),
    Formula(
        name="Communication over backward",
        tex=r"\frac{g\,F}{2\,bs\,W}\,\frac{n-1}{n}",
        symbols=f"{_RATIO}; bs: tokens of a rank in a step",
        label="eq-02-ratio",
        code="lablib.calc.communication.hiding_tokens",
        example=lambda job: (
            f"{_break_even(job) / (job.micro_batch * job.seq):.2f} with {job.micro_batch * job.seq:,} tokens, "
            f"{job.params / 1e9:.0f}B as any other size"
        ),
    ),
    Formula(
        name="Break-even tokens of a rank",
        tex=r"\frac{g\,F}{2\,W}\,\frac{n-1}{n}",
        symbols=_RATIO,
        label="eq-02-break-even",
        code="lablib.calc.communication.hiding_tokens",
        example=lambda job: f"{_break_even(job):,.0f} tokens at {REACHED:.0%} of the peak and {NIC / GB:.0f} GB/s",
    ),
    Formula(
        name="Exposed time with k equal buckets",
        tex=r"\max\!\Big(\frac{T_{\text{comm}}}{k},\; T_{\text{comm}} - \frac{k-1}{k}\,T_{\text{backward}}\Big)",
        symbols="T_comm: seconds of the all-reduce; T_backward: seconds of backward; k: buckets",
        label="eq-02-exposed",
        code="lablib.calc.parallel.ddp_step_time",
        example=lambda job: f"{_step(job, PIECES).exposed * 1e3:.1f} ms with {PIECES} buckets",
    ),
    Formula(
        name="Exposed time, ideal",
        tex=r"\max\big(0,\; T_{\text{comm}} - T_{\text{backward}}\big)",
        symbols="T_comm: seconds of the all-reduce; T_backward: seconds of backward",
        label="eq-02-ideal",
        code="lablib.calc.parallel.ddp_step_time",
        example=lambda job: f"{_step(job, 1).ideal_exposed * 1e3:.1f} ms",
    ),
)
