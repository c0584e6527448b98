"""Formulas of rung 06, FSDP: collectives, bytes and time of a step, and what is unsharded at a time."""

from lablib.calc.communication import hybrid_shard_bytes, ring_all_gather_time
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.parallel import fsdp_traffic, peak_held_bytes, peak_unsharded_bytes
from lablib.calc.params import layer_params

GB = 1e9


def _units(job: Job) -> list[int]:
    """Return the parameters of the root and of every block, all of the model's: one unit each."""
    blocks = [sum(layer_params(job.config, layer).values()) for layer in range(job.config.num_layers)]
    return [job.params - sum(blocks), *blocks]


def _collectives(job: Job) -> str:
    calls = fsdp_traffic(_units(job), job.ranks).calls
    return f"{calls['all_gather']} all-gathers and {calls['reduce_scatter']} reduce-scatters, per block"


def _forward(job: Job) -> str:
    return f"{peak_unsharded_bytes(_units(job), job.ranks, param_bytes=2) / GB:.1f} GB per block, in bf16"


def _backward(job: Job) -> str:
    held = peak_held_bytes(_units(job), job.ranks, param_bytes=2, reduce_bytes=4)
    return f"{held / GB:.1f} GB at most per block, in bf16 with fp32 reduction"


def _root(job: Job) -> str:
    return f"{3 * 2 * _units(job)[0] / GB:.1f} GB for the copy of a root with embedding and head"


def _gather(job: Job) -> str:
    seconds = ring_all_gather_time(2 * _units(job)[1], job.ranks, bandwidth=link("ib-ndr").bandwidth, latency=5e-6)
    return f"{1e3 * seconds:.1f} ms for a block in bf16 over NDR InfiniBand, 5 µs a message"


def _hybrid(job: Job) -> str:
    return f"{hybrid_shard_bytes(2 * job.params, job.ranks, shard=8) / GB:.2f} GB in nodes of 8"


FORMULAS = (
    Formula(
        name="Collectives of a step, units freed after forward",
        tex=r"\text{all-gathers: } 1 + 2U,\; \text{reduce-scatters: } 1 + U",
        symbols="U: units beside the root",
        label="eq-06-collectives",
        code="lablib.calc.parallel.fsdp_traffic",
        example=_collectives,
    ),
    Formula(
        name="Values gathered in a step",
        tex=r"\psi_0 + 2\sum_{i\ge1}\psi_i",
        symbols="psi_i: parameters of unit i; psi_0: of the root",
        label="eq-06-gathered",
        code="lablib.calc.parallel.fsdp_traffic",
        example=lambda job: (
            f"{fsdp_traffic(_units(job), job.ranks, param_bytes=1).bytes['all_gather'] / 1e9:.1f}B values"
        ),
    ),
    Formula(
        name="Gathered at most, in forward",
        tex=r"w_0 + \max_{i\ge1}\,(2w_i + w_{i-1})",
        symbols="w_i: bytes of unit i when gathered; w_0: of the root",
        label="eq-06-forward",
        code="lablib.calc.parallel.peak_unsharded_bytes",
        example=_forward,
    ),
    Formula(
        name="Unsharded at most when a unit's backward ends",
        tex=r"w_0 + g_0 + \max_{i\ge1}\,(2w_i + w_{i-1} + \rho w_{i+1})",
        symbols="w_i: bytes of unit i when gathered; g_0: bytes of the root's gradients so far; rho: bytes of a reduced value "
        "over those of a gathered one",
        label="eq-06-backward",
        code="lablib.calc.parallel.peak_held_bytes",
        example=_backward,
    ),
    Formula(
        name="Unsharded at most while gradients are copied",
        tex=r"w_0 + g_0 + \max_{i\ge1}\,\bigl((1+\rho)w_i + w_{i-1}\bigr)",
        symbols="w_i: bytes of unit i when gathered, alone for the root at the end; g_0: bytes of the root's gradients so far; "
        "rho: bytes of a reduced value over those of a gathered one",
        label="eq-06-copy",
        code="lablib.calc.parallel.peak_held_bytes",
        example=_root,
    ),
    Formula(
        name="Time of an all-gather in a ring",
        tex=r"(N-1)\,\alpha + \frac{N-1}{N}\,\frac{S}{W}",
        symbols="N: ranks; alpha: latency of a message; S: bytes gathered; W: bandwidth of a rank's link per direction",
        label="eq-06-gather-time",
        code="lablib.calc.communication.ring_all_gather_time",
        example=_gather,
    ),
    Formula(
        name="Bytes that a rank sends out of its node, as the FSDP paper counts",
        tex=r"\text{full: } 3M\,\frac{N-1}{N},\; \text{hybrid: } 2M\,\frac{N-G}{NG}",
        symbols="M: bytes of the weights; N: ranks; G: ranks of a node, which share the model",
        label="eq-06-hybrid",
        code="lablib.calc.communication.hybrid_shard_bytes",
        example=_hybrid,
    ),
)
