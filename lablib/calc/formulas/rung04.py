"""Formulas of rung 04: time, bubbles, memory and messages of a pipeline."""

from __future__ import annotations

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.schedules import interleaved, one_f_one_b, peak_activations, simulate, zb_h1
from lablib.calc.units import MB


def _forward(job: Job) -> float:
    """Return the seconds of a forward of one micro-batch on one rank, at 40 percent of the peak."""
    return 2 * job.params / (job.pp * job.tp) * job.micro_batch * job.seq / (0.4 * job.gpu.peak("bf16"))


def _layout(job: Job) -> str:
    return f"p = {job.pp}, m = {job.microbatches}"


def _step(job: Job) -> str:
    forward = _forward(job)
    step = simulate(one_f_one_b(job.pp, job.microbatches), forward=forward, backward=2 * forward)
    return f"{step.makespan:.2f} s for {_layout(job)}, t = {job.tp}, 40% of the peak"


def _bubble(job: Job, over: str) -> str:
    step = simulate(interleaved(job.pp, job.microbatches, job.chunks))
    return f"{getattr(step, over):.1%} for {_layout(job)}, v = {job.chunks}"


def _held(job: Job, chunks: int) -> str:
    made = interleaved(job.pp, job.microbatches, chunks)
    return ", ".join(f"{count:g}" for count in peak_activations(made)) + f" micro-batches on {job.pp} ranks"


def _wait(job: Job) -> str:
    forward = _forward(job)
    step = simulate(zb_h1(job.pp, job.microbatches), forward=forward, input=forward, weight=forward)
    return f"{step.idle[0] * 1e3:.0f} ms if the three take {forward * 1e3:.0f} ms each"


def _messages(job: Job) -> str:
    made = interleaved(job.pp, job.microbatches, job.chunks)
    return f"{2 * (made.num_stages - 1) * job.microbatches} for {_layout(job)}, v = {job.chunks}"


FORMULAS = (
    Formula(
        name="Time of a step, GPipe and 1F1B",
        tex=r"(m + p - 1)(t_F + t_B)",
        symbols="p: ranks of the pipeline; m: micro-batches of a step; t_F, t_B: forward and backward of one on a rank",
        label="eq-04-step-time",
        code="lablib.calc.schedules.simulation.simulate",
        example=_step,
    ),
    Formula(
        name="Bubble over ideal time",
        tex=r"\frac{p-1}{v\,m}",
        symbols="p, m; v: stages on a rank, 1 for GPipe and 1F1B",
        label="eq-04-bubble-ideal",
        code="lablib.calc.schedules.simulation.simulate",
        example=lambda job: _bubble(job, "bubble_over_ideal"),
    ),
    Formula(
        name="Bubble over total time",
        tex=r"\frac{p-1}{v\,m+p-1}",
        symbols="p, m; v: stages on a rank",
        label="eq-04-bubble-total",
        code="lablib.calc.schedules.simulation.simulate",
        example=lambda job: _bubble(job, "bubble_over_total"),
    ),
    Formula(
        name="Micro-batches of a step",
        tex=r"\frac{B}{n\,b}",
        symbols="B: sequences of a step; n: replicas; b: sequences of a micro-batch",
        label="eq-04-microbatches",
        code="lablib.calc.layouts.rules.enough_microbatches",
        example=lambda job: f"{job.global_batch // (job.ranks * job.micro_batch)} of {job.global_batch} sequences",
    ),
    Formula(
        name="Micro-batches held by rank i, 1F1B",
        tex=r"\min(m,\; p - i)",
        symbols="p, m; i: rank, from 0",
        label="eq-04-held",
        code="lablib.calc.schedules.simulation.peak_activations",
        example=lambda job: _held(job, 1),
    ),
    Formula(
        name="Micro-batches held by rank i, interleaved",
        tex=r"\frac{p(v-1) + 2(p-1-i) + 1}{v}",
        symbols="p; v: stages on a rank; i: rank, from 0; at most m",
        label="eq-04-held-interleaved",
        code="lablib.calc.schedules.simulation.peak_activations",
        example=lambda job: _held(job, job.chunks),
    ),
    Formula(
        name="Wait of a rank, ZB-H1",
        tex=r"(p-1)(t_F + t_I - t_W)",
        symbols="p; t_F, t_I, t_W: forward, input half and weight half of one micro-batch on a rank, W the shortest",
        label="eq-04-zb-h1",
        code="lablib.calc.schedules.generators.zb_h1",
        example=_wait,
    ),
    Formula(
        name="Messages of a step",
        tex=r"2\,(p\,v - 1)\,m",
        symbols="p, v, m; both directions, all ranks",
        label="eq-04-messages",
        code="lablib.calc.schedules.generators.interleaved",
        example=_messages,
    ),
    Formula(
        name="Values of a message",
        tex=r"b\,s\,h",
        symbols="b: sequences of a micro-batch; s: tokens of a sequence; h: hidden width",
        label="eq-04-message",
        code="lablib.calc.parallel.traffic.pipeline_traffic",
        example=lambda job: f"{2 * job.micro_batch * job.seq * job.config.hidden / MB:.0f} MB in 16 bits",
    ),
)
