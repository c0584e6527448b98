"""Formulas of rung 03: what a tensor-parallel rank sends and keeps, and the share of communication."""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.memory.activations import paper_activations
from lablib.calc.models import preset
from lablib.calc.parallel import layer_elements, layer_times, split_heads
from lablib.calc.units import GB, MB


def _sent(job: Job, variant: bool | str = False) -> str:
    sizes = {"batch": job.micro_batch, "seq": job.seq, "hidden": job.config.hidden, "tp": job.tp}
    return f"{2 * layer_elements(**sizes, sequence_parallel=variant) / MB:,.0f} MB in 16 bits"


def _kept(job: Job, variant: bool | str = False) -> str:
    h, a = job.config.hidden, job.config.num_heads
    gpt = replace(preset("gpt3-175b"), hidden=h, num_heads=a, num_kv_heads=a, head_dim=h // a, ffn=4 * h)
    sizes = {"batch": job.micro_batch, "seq": job.seq, "tp": job.tp}
    kept = paper_activations(gpt, **sizes, sequence_parallel=variant, attention="plain")
    return f"{kept / GB:,.2f} GB, for a GPT of this width"


def _share(job: Job) -> str:
    domain = link(job.gpu.scale_up)
    sizes = {"batch": job.micro_batch, "seq": job.seq, "tp": job.tp}
    times = layer_times(job.config, **sizes, flops=0.4 * job.gpu.peak(), bandwidth=domain.bandwidth)
    return f"{times.communication / times.compute:.2f} on {domain.name}, if a rank reaches 40% of its peak"


def _copies(job: Job) -> str:
    heads = job.config.num_heads
    tp = job.tp if heads % (2 * job.tp) else 2 * job.tp  # twice, because most models have 8 key heads
    rank = split_heads(heads, job.config.num_kv_heads, tp)[0]
    return f"{rank.copies} at t = {tp}, with {len(rank.queries)} query heads on a rank"


FORMULAS = (
    Formula(
        name="Column-parallel: split outputs, side by side",
        tex=r"xA = [xA_0, \dots, xA_{t-1}]",
        symbols="A_r: (in, out/t), some columns of A; t: ranks",
        label="eq-03-column",
        code="lablib.toys.tensor_parallel.layers.columns",
        example=lambda job: f"up of a layer: {job.config.ffn // job.tp:,} of {job.config.ffn:,} outputs on a rank",
    ),
    Formula(
        name="Row-parallel: split inputs, summed",
        tex=r"xA = \sum_r x_r A_r",
        symbols="A_r: (in/t, out), some rows of A; x_r: the same columns of x",
        label="eq-03-row",
        code="lablib.toys.tensor_parallel.layers.RowParallelLinear",
        example=lambda job: f"down of a layer: {job.config.ffn // job.tp:,} of {job.config.ffn:,} inputs on a rank",
    ),
    Formula(
        name="Ranks that hold a key head",
        tex=r"\max\left(1, \frac{t}{a_{kv}}\right)",
        symbols="t divides a, the query heads, and divides a_kv, the key heads, or is a multiple of it",
        label="eq-03-copies",
        code="lablib.calc.parallel.tensor.split_heads",
        example=_copies,
    ),
    Formula(
        name="Loss of a token from split logits",
        tex=r"\log \sum_{j=1}^{V} e^{z_j - m} - (z_y - m)",
        symbols="z: logits; m: their maximum over all ranks; y: the target; V: vocabulary",
        label="eq-03-loss",
        code="lablib.toys.tensor_parallel.layers.vocab_parallel_cross_entropy",
        example=lambda job: (
            f"{3 * 4 * job.micro_batch * job.seq / 1e3:,.0f} kB of messages for three fp32 numbers a token"
        ),
    ),
    Formula(
        name="Values a rank sends, layer and micro-batch",
        tex=r"8\,bsh\,\frac{t-1}{t}",
        symbols="b, s, h; with sequence parallelism too, if the gathered input is kept",
        label="eq-03-sent",
        code="lablib.calc.parallel.tensor.layer_elements",
        example=_sent,
    ),
    Formula(
        name="The same, keeping only the shard",
        tex=r"10\,bsh\,\frac{t-1}{t}",
        symbols="sequence parallelism that gathers the input of each half again in backward",
        label="eq-03-sent-shard",
        code="lablib.calc.parallel.tensor.layer_elements",
        example=lambda job: _sent(job, "shard"),
    ),
    Formula(
        name="Bytes a GPT layer keeps, no sequence parallelism",
        tex=r"sbh\left(10 + \frac{24}{t} + \frac{5as}{ht}\right)",
        symbols="a: heads; 16 bits, dropout, scores kept",
        label="eq-03-kept",
        code="lablib.calc.memory.activations.block.paper_activations",
        example=_kept,
    ),
    Formula(
        name="Bytes a GPT layer keeps, shard kept",
        tex=r"\frac{sbh}{t}\left(34 + \frac{5as}{h}\right)",
        symbols="with the scores recomputed the second term goes",
        label="eq-03-kept-shard",
        code="lablib.calc.memory.activations.block.paper_activations",
        example=lambda job: _kept(job, "shard"),
    ),
    Formula(
        name="Communication over computation, GPT layer",
        tex=r"\frac{c\,F\,(t-1)}{9\,h\,W}",
        symbols="c: bytes of a value; F: FLOP/s of a rank; W: bytes per second, per direction; the example is this model's layer",
        label="eq-03-ratio",
        code="lablib.calc.parallel.tensor.layer_times",
        example=_share,
    ),
)
