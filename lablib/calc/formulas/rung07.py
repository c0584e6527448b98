"""Formulas of rung 07: the mesh, what each axis sends, and the time of a step."""

from __future__ import annotations

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.layouts import axis_bytes, enough_microbatches, exchange_cost, mesh
from lablib.calc.layouts.planner import Layout, Workload, cluster, step_time
from lablib.calc.units import GB, MB


def _layout(job: Job, cp: int = 1) -> Layout:
    dp = job.ranks // (job.tp * job.pp * cp)
    return Layout(
        tp=job.tp,
        cp=cp,
        pp=job.pp,
        dp=dp,
        micro_batch=job.micro_batch,
        schedule="interleaved",
        virtual_stages=job.chunks,
    )


def _sent(job: Job, axis: str, cp: int = 1) -> str:
    layout = _layout(job, cp)
    batch = layout.dp * job.micro_batch * job.microbatches
    return f"{axis_bytes(job.config, layout, seq=job.seq, global_batch=batch)[axis] / GB:,.2f} GB"


def _coordinate(job: Job) -> str:
    dp = job.ranks // (job.tp * job.pp)
    at = mesh(tp=job.tp, dp=dp, pp=job.pp).coordinates(job.ranks - 1)
    return f"rank {job.ranks - 1} is tp {at['tp']}, dp {at['dp']}, pp {at['pp']}"


def _step(job: Job) -> str:
    layout = _layout(job)
    batch = layout.dp * job.micro_batch * job.microbatches
    load = Workload(job.config, cluster(job.gpu, job.ranks), job.seq, batch)
    return f"{sum(step_time(load.job(layout), load.rates()).values()):.2f} s for {batch} sequences"


def _exchange(job: Job) -> str:
    one = exchange_cost(
        "diloco", job.config, replicas=4, tokens_per_step=1, step_seconds=1, bandwidth=1e9, inner_steps=500
    )
    return f"{one.message / one.inner_steps / MB:,.0f} MB a step for four sites, H = 500, fp32"


FORMULAS = (
    Formula(
        name="Coordinate of a rank",
        tex=r"c_k = \left\lfloor \frac{\text{rank}}{n_1 \cdots n_{k-1}} \right\rfloor \bmod n_k",
        symbols="n: sizes of the axes, fastest first; c: coordinates",
        label="eq-07-coordinates",
        code="lablib.calc.layouts.meshes.mesh",
        example=_coordinate,
    ),
    Formula(
        name="Values sent over tp",
        tex=r"8\,\frac{bsh}{c}\cdot\frac{t-1}{t}\cdot\frac{L}{p}\cdot m",
        symbols="b, s, h, L, m; t, c, p: degrees of tp, cp, pp; a middle stage, a step",
        label="eq-07-tp-sent",
        code="lablib.calc.layouts.axes.axis_bytes",
        example=lambda job: _sent(job, "tp"),
    ),
    Formula(
        name="Values sent over cp",
        tex=r"4\,\frac{bsk}{t}\cdot\frac{c-1}{c}\cdot\frac{L}{p}\cdot m",
        symbols="k: width of all key heads; keys and values gathered; c = 2 in the example",
        label="eq-07-cp-sent",
        code="lablib.calc.layouts.axes.axis_bytes",
        example=lambda job: _sent(job, "cp", cp=2),
    ),
    Formula(
        name="Values sent over pp",
        tex=r"2\,\frac{bsh}{c\,t}\cdot m\,v",
        symbols="v: stages on a rank; a middle stage, a step",
        label="eq-07-pp-sent",
        code="lablib.calc.layouts.axes.axis_bytes",
        example=lambda job: _sent(job, "pp"),
    ),
    Formula(
        name="Values sent over dp",
        tex=r"2\,\frac{\psi}{t\,p}\cdot\frac{dc-1}{dc}",
        symbols="psi: parameters; d: replicas; ZeRO stage 0 or 1",
        label="eq-07-dp-sent",
        code="lablib.calc.layouts.axes.axis_bytes",
        example=lambda job: _sent(job, "dp"),
    ),
    Formula(
        name="Time of a step",
        tex=r"m\,T_{\max} + \frac{1}{v} \sum_{\text{others}} T + T_{\text{rest}}",
        symbols="T: one micro-batch on one pipeline rank; others: all ranks but the slowest; rest: exposed dp, optimizer, waiting",
        label="eq-07-step",
        code="lablib.calc.layouts.planner.time.step_time",
        example=_step,
    ),
    Formula(
        name="Micro-batches for a bubble of x",
        tex=r"m \ge \frac{p-1}{x\,v}",
        symbols="x: bubble over ideal time; p: pipeline ranks; v: stages on each; interleaved, m is a multiple of p",
        label="eq-07-enough",
        code="lablib.calc.layouts.rules.enough_microbatches",
        example=lambda job: f"{enough_microbatches(job.pp, most=0.1, v=job.chunks)} micro-batches for a tenth",
    ),
    Formula(
        name="Bytes a step, Local SGD",
        tex=r"\frac{2\,\frac{k-1}{k}\, w\,\psi}{H}",
        symbols="k: replicas; w: bytes of a value on the wire; H: steps between exchanges",
        label="eq-07-local-sent",
        code="lablib.calc.layouts.local_sgd.exchange_cost",
        example=_exchange,
        page="local_sgd",
    ),
)
