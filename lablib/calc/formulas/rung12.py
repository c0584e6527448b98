"""Formulas of rung 12: merging partial softmaxes, what each way sends, when a ring hides, who is busy, what is kept."""

from __future__ import annotations

from math import log

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.memory import training_memory
from lablib.calc.parallel import attention_traffic, busy_share, causal_imbalance, ring_hiding_tokens, ulysses_crossover
from lablib.calc.units import GB, MB

_CP = 8
_LONG = 131_072


def _sent(job: Job, way: str) -> str:
    config = job.config
    sizes = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    traffic = attention_traffic(way, batch=job.micro_batch, seq=_LONG, cp=_CP, **sizes)
    return f"{traffic.total / MB:,.0f} MB a layer for {_LONG:,} tokens, c = {_CP}"


def _hides(job: Job) -> str:
    network = link(job.gpu.nic)
    heads = {"heads": job.config.num_heads, "kv_heads": job.config.num_kv_heads}
    tokens = ring_hiding_tokens(**heads, flops=0.4 * job.gpu.peak(), bandwidth=network.bandwidth)
    return f"{tokens:,.0f} tokens on a rank over {network.name}, if attention reaches 40% of the peak"


def _kept(job: Job) -> str:
    kept = training_memory(job.config, seq=_LONG, tp=job.tp, cp=_CP, sequence_parallel=True, recompute="full")
    return f"{kept.activations / GB:,.1f} GB with the logits, t = {job.tp}, c = {_CP}, {_LONG:,} tokens"


FORMULAS = (
    Formula(
        name="Log-sum-exp of two blocks of keys",
        tex=r"\ell = \log\left(e^{\ell_1} + e^{\ell_2}\right)",
        symbols="l_i: log of the sum of exponentials of a block's scores; the larger one is subtracted first",
        label="eq-12-lse",
        code="lablib.toys.context_parallel.softmax.merge",
        example=lambda job: f"sums of 4 and 12 are {log(4):.2f} and {log(12):.2f}, together {log(16):.2f}",
    ),
    Formula(
        name="Output of two blocks of keys",
        tex=r"o = e^{\ell_1 - \ell}\,o_1 + e^{\ell_2 - \ell}\,o_2",
        symbols="o_i: output of attention over a block's keys alone",
        label="eq-12-merge",
        code="lablib.toys.context_parallel.softmax.merge",
        example=lambda job: f"5 of a sum of 4 and 3 of a sum of 12 are {5 * 4 / 16 + 3 * 12 / 16:g}",
    ),
    Formula(
        name="Values sent by a ring",
        tex=r"6\,bsk\,\frac{c-1}{c}",
        symbols="k: width of a rank's key heads; c: degree of cp; one layer and micro-batch, forward and backward",
        label="eq-12-ring",
        code="lablib.calc.parallel.context.attention_traffic",
        example=lambda job: _sent(job, "ring"),
    ),
    Formula(
        name="Values sent where keys are gathered",
        tex=r"4\,bsk\,\frac{c-1}{c}",
        symbols="gathered in forward and kept, gradients scattered in backward",
        label="eq-12-gathered",
        code="lablib.calc.parallel.context.attention_traffic",
        example=lambda job: _sent(job, "gathered"),
    ),
    Formula(
        name="Values sent by Ulysses",
        tex=r"4\,bs\,\frac{q + k}{c}\cdot\frac{c-1}{c}",
        symbols="q: width of a rank's query heads; four all-to-alls forward, four backward; c at most the key heads",
        label="eq-12-ulysses",
        code="lablib.calc.parallel.context.attention_traffic",
        example=lambda job: _sent(job, "ulysses"),
    ),
    Formula(
        name="Tokens on a rank that hide a ring",
        tex=r"\frac{s}{c} \ge w\,\frac{F}{W}\cdot\frac{a_{kv}}{a}",
        symbols="w: bytes of a value; F: FLOP/s of a rank; W: bytes per second; causal mask; half without one",
        label="eq-12-hides",
        code="lablib.calc.parallel.context.ring_hiding_tokens",
        example=_hides,
    ),
    Formula(
        name="Degree from which Ulysses sends less",
        tex=r"c > \frac{a}{a_{kv}} + 1",
        symbols="against gathered keys; two thirds of it against a ring; valid up to a_kv ranks",
        label="eq-12-crossover",
        code="lablib.calc.parallel.context.ulysses_crossover",
        example=lambda job: (
            f"{ulysses_crossover(job.config.num_heads, job.config.num_kv_heads):g}, "
            f"with {job.config.num_kv_heads} key heads"
        ),
    ),
    Formula(
        name="Work of the last rank over the mean",
        tex=r"\frac{c - \frac{1}{2}}{c/2} = 2 - \frac{1}{c}",
        symbols="a contiguous part for each rank, causal mask",
        label="eq-12-causal",
        code="lablib.calc.parallel.causal.causal_imbalance",
        example=lambda job: f"{causal_imbalance(_CP):.3f} with c = {_CP}",
    ),
    Formula(
        name="Busy share of a ring, contiguous parts",
        tex=r"\frac{c}{2c - 1}",
        symbols="computing time of all ranks over c times the time of the ring; causal mask",
        label="eq-12-busy",
        code="lablib.calc.parallel.causal.busy_share",
        example=lambda job: f"{busy_share(_CP, 'contiguous'):.1%} with c = {_CP}",
    ),
    Formula(
        name="Busy share of a ring, stripes",
        tex=r"\frac{s + 1}{s + c}",
        symbols="every c-th token on a rank; 1 for two chunks from both ends",
        label="eq-12-striped",
        code="lablib.calc.parallel.causal.busy_share",
        example=lambda job: f"{busy_share(_CP, 'striped', seq=job.seq):.2%} with c = {_CP} and {job.seq:,} tokens",
    ),
    Formula(
        name="Bytes of block inputs under full recomputation",
        tex=r"\frac{2\,bsh\,L}{t\,c}",
        symbols="16 bits; t: ranks of tensor and sequence parallelism; a full pipeline does not divide them",
        label="eq-12-kept",
        code="lablib.calc.memory.formulas.training_memory",
        example=_kept,
    ),
)
