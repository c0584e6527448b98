"""Formulas of rung 08: what rounding loses, loss scales, scales of FP8 and FP4, and the time that they gain."""

from __future__ import annotations

from lablib.calc.formulas.formula import Formula
from lablib.calc.precision import (
    FORMATS,
    gap_at,
    gather_bytes,
    largest_scale,
    least_update,
    mx_scale,
    peak_ratio,
    quantized_bytes,
    ring_sum_error,
    scale_window,
    step_speedup,
)
from lablib.calc.units import GB

BF16 = FORMATS["bf16"]


def _window(_: object) -> str:
    low, high = scale_window(3e-9, 0.2)
    return f"more than {low:.1f}, at most {high:,.0f}, for gradients from 3e-9 to 0.2"


FORMULAS = (
    Formula(
        name="Gap between neighbours at x",
        tex=r"\text{ulp}(x) = 2^{\lfloor \log_2 \lvert x \rvert \rfloor - M}",
        symbols="M: mantissa bits",
        label="eq-08-ulp",
        code="lablib.calc.precision.formats.gap_at",
        example=lambda job: f"{gap_at(BF16, 300):g} in bf16 at 300",
    ),
    Formula(
        name="Window of the loss scale in fp16",
        tex=r"\frac{2^{-25}}{\min \lvert g \rvert} < S \le \frac{65504}{\max \lvert g \rvert}",
        symbols="S: loss scale; g: gradients in fp32",
        label="eq-08-window",
        code="lablib.calc.precision.formats.scale_window",
        example=_window,
    ),
    Formula(
        name="Update that a 16-bit weight feels",
        tex=r"\lvert \Delta w \rvert \ge \tfrac12\,\text{ulp}(w)",
        symbols="w: a weight without a master copy",
        label="eq-08-stall",
        code="lablib.calc.precision.formats.least_update",
        example=lambda job: f"{least_update(BF16, 1.0):.2g} for a bf16 weight of 1",
    ),
    Formula(
        name="Error of a sum over n ranks on a ring",
        tex=r"u\,\sqrt{\frac{2 + 3 + \dots + n}{n}} \approx u\,\sqrt{\frac{n}{2}}",
        symbols="n: ranks; u: error of one rounding, 0.21 epsilon",
        label="eq-08-sum",
        code="lablib.calc.precision.fp8.ring_sum_error",
        example=lambda job: f"{ring_sum_error(job.ranks, BF16.epsilon):.2%} in bf16 over {job.ranks} ranks",
    ),
    Formula(
        name="Scale of a tensor, row or block in E4M3",
        tex=r"\text{scale} = \frac{\max \lvert x \rvert}{448}",
        symbols="x: the values that share the scale",
        label="eq-08-scale",
        code="lablib.calc.precision.fp8.largest_scale",
        example=lambda job: f"{largest_scale(300.0):.4f} where the largest is 300",
    ),
    Formula(
        name="Speedup of a step whose matmuls get faster",
        tex=r"\frac{1}{1 - f + f/s}",
        symbols="f: their share of the step; s: how many times faster they get",
        label="eq-08-speedup",
        code="lablib.calc.precision.fp8.step_speedup",
        example=lambda job: f"{step_speedup(0.7, peak_ratio('h100', 'fp8', 'bf16')):.2f} times for f = 0.7 on an H100",
    ),
    Formula(
        name="A rank's bytes of a gather in float8",
        tex=r"(2\psi - \psi_8)\,\frac{n-1}{n}",
        symbols="psi: parameters; psi_8: those of the layers' matrices; n: ranks",
        label="eq-08-gather",
        code="lablib.calc.precision.fp8.gather_bytes",
        example=lambda job: f"{gather_bytes(job.config, job.ranks, float8=True) / GB:.1f} GB",
    ),
    Formula(
        name="Scale of 32 values in MXFP8",
        tex=r"2^{\lceil \log_2 (\max \lvert x \rvert / 448) \rceil}",
        symbols="x: the values of the block",
        label="eq-08-mx",
        code="lablib.calc.precision.fp8.mx_scale",
        example=lambda job: f"{mx_scale(300.0):g} where the largest is 300",
    ),
    Formula(
        name="Bits of a value in NVFP4",
        tex=r"4 + \frac{8}{16}",
        symbols="4: E2M1; 8: an E4M3 scale for 16 values; 32 more for a whole tensor",
        label="eq-08-nvfp4",
        code="lablib.calc.precision.fp8.quantized_bytes",
        example=lambda job: (
            f"{quantized_bytes(job.config.hidden, job.config.hidden, 'nvfp4') * 8 / job.config.hidden**2:.3f} bits in a "
            f"matrix of {job.config.hidden} by {job.config.hidden}"
        ),
    ),
)
