"""Formulas of rung 10, communication: ring, tree, nodes, switches that add, and the slowest of n."""

from __future__ import annotations

from lablib.calc.communication import (
    bus_bandwidth,
    chance_of_any,
    collective_time,
    crossover,
    expected_slowest,
    hierarchical_traffic,
    in_switch_all_reduce_bytes,
    ring_all_reduce_time,
)
from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.units import GB

_LINK = {"bandwidth": link("ib-ndr").bandwidth, "latency": 5e-6}  # one 400 Gb/s card a rank
_GPUS = 8  # of a node


def _gradients(job: Job) -> float:
    """Bytes of all gradients in 16 bits."""
    return 2.0 * job.params


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _tree(job: Job) -> str:
    return f"{_ms(collective_time('tree_all_reduce', _gradients(job), job.ranks, **_LINK))} for the gradients"


def _crossover(job: Job) -> str:
    return f"{crossover('tree_all_reduce', 'ring_all_reduce', job.ranks, **_LINK) / 1e6:.1f} MB on {job.ranks} ranks"


def _leaving(job: Job) -> str:
    traffic = hierarchical_traffic(job.params, job.ranks, ranks_per_node=_GPUS, itemsize=2)[1]
    return f"{_GPUS * traffic.bytes / GB:.1f} GB of gradients, with {_GPUS} ranks a node"


def _tokens(job: Job) -> str:
    size = 2.0 * job.seq * job.config.hidden
    return f"{_ms(collective_time('pairwise_all_to_all', size, job.ranks, **_LINK))} for {job.seq:,} tokens a rank"


def _busbw(job: Job) -> str:
    return f"{bus_bandwidth('all_reduce', 1e9, _GPUS, 3.6e-3) / GB:.0f} GB/s where 1 GB takes 3.6 ms on {_GPUS} GPUs"


FORMULAS = (
    Formula(
        name="Ring all-reduce",
        tex=r"2(n-1)\,\alpha + 2\,\frac{n-1}{n}\,\frac{S}{W}",
        symbols="n; S: bytes on each rank; alpha: seconds a message; W: bytes per second and per direction",
        label="eq-10-ring",
        code="lablib.calc.communication.costs.ring_all_reduce_time",
        example=lambda job: f"{_ms(ring_all_reduce_time(_gradients(job), job.ranks, **_LINK))} for the gradients",
    ),
    Formula(
        name="Tree all-reduce",
        tex=r"2\,\lceil\log_2 n\rceil \left(\alpha + \frac{S}{W}\right)",
        symbols="n; S; alpha; W",
        label="eq-10-tree",
        code="lablib.calc.communication.times.collective_time",
        example=_tree,
    ),
    Formula(
        name="The ring beats the tree from",
        tex=r"\frac{\big(2(n-1) - 2\lceil\log_2 n\rceil\big)\,\alpha\,W}{2\lceil\log_2 n\rceil - 2\frac{n-1}{n}}",
        symbols="n; alpha; W",
        label="eq-10-crossover",
        code="lablib.calc.communication.times.crossover",
        example=_crossover,
    ),
    Formula(
        name="Bytes out of a node",
        tex=r"2\,\frac{m-1}{m}\,S",
        symbols="m: nodes; S; by a hierarchical all-reduce",
        label="eq-10-leaving",
        code="lablib.calc.communication.algorithms.hierarchical_traffic",
        example=_leaving,
    ),
    Formula(
        name="All-to-all",
        tex=r"(n-1)\,\alpha + \frac{n-1}{n}\,\frac{S}{W}",
        symbols="n; S: bytes on each rank; alpha; W",
        label="eq-10-all-to-all",
        code="lablib.calc.communication.times.collective_time",
        example=_tokens,
    ),
    Formula(
        name="busbw of an all-reduce",
        tex=r"2\,\frac{n-1}{n}\,\frac{S}{t}",
        symbols="n; S; t: measured seconds",
        label="eq-10-busbw",
        code="lablib.calc.communication.costs.bus_bandwidth",
        example=_busbw,
    ),
    Formula(
        name="Bytes of a rank if the switch adds",
        tex=r"\left(1 + \frac1n\right) S",
        symbols="n; S",
        label="eq-10-switch",
        code="lablib.calc.communication.costs.in_switch_all_reduce_bytes",
        example=lambda job: f"{in_switch_all_reduce_bytes(_gradients(job), _GPUS) / GB:.1f} GB on {_GPUS} GPUs",
    ),
    Formula(
        name="Chance that one of n is late",
        tex=r"1 - (1 - p)^n",
        symbols="n; p: chance of a given rank",
        label="eq-10-chance",
        code="lablib.calc.communication.costs.chance_of_any",
        example=lambda job: f"{chance_of_any(job.ranks, 1e-3):.1%} for p = 0.001",
    ),
    Formula(
        name="Mean of the slowest of n",
        tex=r"T + j\left(1 + \frac12 + \dots + \frac1n\right)",
        symbols="T: seconds of a step; j: mean of a rank's own exponential delay; n",
        label="eq-10-slowest",
        code="lablib.calc.communication.costs.expected_slowest",
        example=lambda job: f"{expected_slowest(job.ranks, base=1, jitter=0.01):.3f} s for T = 1 s and j = 10 ms",
    ),
)
