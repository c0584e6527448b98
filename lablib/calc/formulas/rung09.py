"""Formulas of rung 09: what a block keeps, what recomputation leaves and costs, and when offload hides."""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.memory.activations import (
    chen_cost,
    first_blocks,
    hiding_width,
    ideal_segment,
    paper_activations,
    recompute_cost,
    sqrt_segment,
)
from lablib.calc.models import preset
from lablib.calc.units import GB


def _block(job: Job, **how: object) -> str:
    h, a = job.config.hidden, job.config.num_heads
    gpt = replace(preset("gpt3-175b"), hidden=h, num_heads=a, num_kv_heads=a, head_dim=h // a, ffn=4 * h)
    sizes = {"batch": job.micro_batch, "seq": job.seq, "tp": 1, "attention": "plain"}
    kept = paper_activations(gpt, **(sizes | how))
    return f"{kept / GB:,.2f} GB, for a GPT of this width"


def _cost(job: Job, strategy: str):
    return recompute_cost(job.config, strategy, batch=job.micro_batch, seq=job.seq, attention="fused")


def _first(job: Job) -> str:
    block, boundary = (_cost(job, strategy).units[0].stored for strategy in ("none", "full"))
    layers = job.config.num_layers
    return f"{first_blocks(layers, boundary, block, layers * block // 2)} of {layers} blocks, for half of their bytes"


def _segment(job: Job) -> str:
    block, boundary = (_cost(job, strategy).units[0].stored for strategy in ("none", "full"))
    return f"{ideal_segment(job.config.num_layers, boundary, block):.1f} blocks"


def _peak(job: Job) -> str:
    full, none = _cost(job, "full"), _cost(job, "none")
    return f"{(full.blocks_bytes + full.transient_bytes) / GB:.1f} GB, where all blocks keep {none.blocks_bytes / GB:.0f} GB"


def _chen(job: Job) -> str:
    layers = job.config.num_layers
    return f"{chen_cost(layers, sqrt_segment(layers))} of {layers} tensors"


FORMULAS = (
    Formula(
        name="Bytes that a GPT block keeps",
        tex=r"34sbh + 5as^2b",
        symbols="s: tokens of a sequence; b: sequences; h: width; a: heads; 16 bits, dropout, scores kept",
        label="eq-09-block",
        code="lablib.calc.memory.activations.block.paper_activations",
        example=_block,
    ),
    Formula(
        name="The same, selective recomputation",
        tex=r"34sbh",
        symbols="s, b, h; the attention core runs again",
        label="eq-09-selective",
        code="lablib.calc.memory.activations.block.paper_activations",
        example=lambda job: _block(job, recompute="selective"),
    ),
    Formula(
        name="The same, on each of t ranks",
        tex=r"\frac{34sbh}{t}",
        symbols="t: ranks of tensor parallelism, with sequence parallelism",
        label="eq-09-selective-ranks",
        code="lablib.calc.memory.activations.block.paper_activations",
        example=lambda job: _block(job, recompute="selective", tp=job.tp, sequence_parallel="shard"),
    ),
    Formula(
        name="Peak of full recomputation",
        tex=r"L\,x + (A - x)",
        symbols="L: blocks; x: bytes of a block's input, 2sbh; A: bytes that a block keeps, x included",
        label="eq-09-peak",
        code="lablib.calc.memory.activations.recompute.recompute_cost",
        example=_peak,
    ),
    Formula(
        name="FLOPs of full recomputation, over the step's",
        tex=r"\frac{F_\text{blocks}}{3\,(F_\text{blocks} + F_\text{head})}",
        symbols="F_blocks, F_head: forward FLOPs of all blocks and of the head",
        label="eq-09-flops",
        code="lablib.calc.memory.activations.recompute.recompute_cost",
        example=lambda job: f"{_cost(job, 'full').overhead:.1%}",
    ),
    Formula(
        name="Chain of equal tensors, best segment",
        tex=r"\frac{L}{k} + k = 2\sqrt{L}",
        symbols="k: tensors in a segment, the root of L",
        label="eq-09-chen",
        code="lablib.calc.memory.activations.recompute.chen_cost",
        example=_chen,
    ),
    Formula(
        name="Blocks in a segment, least peak",
        tex=r"k = \sqrt{\frac{L\,x}{A}}",
        symbols="L, x, A as above",
        label="eq-09-segment",
        code="lablib.calc.memory.activations.recompute.ideal_segment",
        example=_segment,
    ),
    Formula(
        name="Width that hides offload of all activations",
        tex=r"h \ge \frac{34}{24}\,\frac{F}{W}",
        symbols="F: FLOP/s that the device reaches; W: bytes per second to the host, per direction",
        label="eq-09-offload",
        code="lablib.calc.memory.activations.recompute.hiding_width",
        example=lambda job: (
            f"{hiding_width(0.4 * job.gpu.peak(), link('pcie5-x16').bandwidth):,.0f} on PCIe 5, at 40% of the peak"
        ),
    ),
    Formula(
        name="Blocks to recompute, to fit",
        tex=r"n = \left\lceil \frac{L A - M}{A - x} \right\rceil",
        symbols="M: bytes there for the blocks; the first n run again",
        label="eq-09-first",
        code="lablib.calc.memory.activations.recompute.first_blocks",
        example=_first,
    ),
)
