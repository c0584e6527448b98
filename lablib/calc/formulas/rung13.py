"""Formulas of rung 13: experts in parameters, room, balance, bytes and groups.

The examples give the job's model experts: eight of the width of its MLP in every layer, two for a token.
"""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.formulas.formula import Formula, Job
from lablib.calc.hardware import link
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import (
    dispatch_bytes,
    dispatch_ratio,
    expert_capacity,
    expert_gradient_factor,
    expert_groups,
    expert_hiding_tokens,
    imbalance,
    random_dropped_share,
    routed_bytes,
)
from lablib.calc.params import count_params
from lablib.calc.units import MB

E, K = 8, 2
LOADS = (8, 4, 3, 1)  # of the hand example in `lablib.calc.parallel.expert_load`


def _mixture(job: Job) -> ModelConfig:
    return replace(job.config, family="mixtral", num_experts=E, experts_per_token=K, expert_ffn=job.config.ffn)


def _rates(job: Job) -> dict[str, float]:
    return {"flops": 0.4 * job.gpu.peak(), "bandwidth": link("ib-ndr").bandwidth}


def _active(job: Job) -> str:
    count = count_params(_mixture(job))
    return f"{count.active / 1e9:.1f}B of {count.total / 1e9:.1f}B"


def _across(job: Job) -> str:
    sizes = {"num_experts": 64, "experts_per_token": 8, "ep": 64, "node_limit": 4}
    sent = routed_bytes(job.seq, job.config.hidden, way="node", **sizes).across
    return f"{sent / MB:,.0f} MB a layer for 8 of 64 experts on 8 nodes, 4 of them for a token"


def _copies(job: Job) -> str:
    ranks = job.ranks // job.tp
    return f"{len(expert_groups(tp=job.tp, dp=ranks, ep=E)['edp'][0])} with t = {job.tp}, d = {ranks}, e = {E}"


FORMULAS = (
    Formula(
        name="Parameters that a token visits",
        tex=r"\psi - L_x\,(E - k)\,\psi_x",
        symbols="psi: all parameters; L_x: layers with experts; E: experts in each; k: of a token; psi_x: of one expert",
        label="eq-13-active",
        code="lablib.calc.params.count_params",
        example=_active,
    ),
    Formula(
        name="Tokens that hide the experts' gradients",
        tex=r"\frac{E}{k\,e} \cdot \frac{g}{2} \cdot \frac{r-1}{r} \cdot \frac{F}{W}",
        symbols="g: bytes of a gradient; e: ep ranks; r: copies of an expert, edp; F: FLOP/s; W: bytes per second",
        label="eq-13-hide",
        code="lablib.calc.parallel.experts.expert_hiding_tokens",
        example=lambda job: f"{expert_hiding_tokens(E, K, edp=job.ranks, **_rates(job)):,.0f} on a rank, with e = 1",
    ),
    Formula(
        name="Capacity of an expert",
        tex=r"C = \left\lceil \varphi\,\frac{T k}{E} \right\rceil",
        symbols="phi: capacity factor; T: tokens that are routed together",
        label="eq-13-capacity",
        code="lablib.calc.parallel.expert_load.expert_capacity",
        example=lambda job: f"{expert_capacity(job.seq * job.micro_batch, E, K, 1.25):,} copies with a factor of 1.25",
    ),
    Formula(
        name="Share that a random router drops",
        tex=r"\frac{E}{T k} \sum_{n > C} (n - C)\,\beta_n",
        symbols="beta_n: chance that n of T tokens choose an expert, binomial with q = k/E; C: its capacity",
        label="eq-13-dropped",
        code="lablib.calc.parallel.expert_load.random_dropped_share",
        example=lambda job: f"{random_dropped_share(job.seq * job.micro_batch, E, K, 1.0):.2%} with a factor of 1",
    ),
    Formula(
        name="Balance loss",
        tex=r"E \sum_{i=1}^{E} f_i P_i",
        symbols="f_i: share of the choices that fell on expert i; P_i: its mean score",
        label="eq-13-balance",
        code="lablib.toys.expert_parallel.balance.load_balancing_loss",
        example=lambda job: (
            f"{E * (1 / E) * E * (1 / E):.0f} if the choice is even, {E} if all want one of {E} experts"
        ),
    ),
    Formula(
        name="Values that a rank sends to experts, a layer",
        tex=r"4\,T k h\,\frac{e-1}{e}",
        symbols="T: tokens of a rank; k: experts of a token (two in the example); e: ep ranks (8); forward and backward",
        label="eq-13-sent",
        code="lablib.calc.parallel.experts.dispatch_bytes",
        example=lambda job: f"{dispatch_bytes(job.seq * job.micro_batch, K, job.config.hidden, 8) / MB:,.0f} MB",
    ),
    Formula(
        name="Values across nodes, once to each",
        tex=r"4\,T h\,(m-1)\,\pi",
        symbols="m: nodes of an ep group; M: nodes that a token may visit; pi: chance that one of them has an expert of it",
        label="eq-13-once",
        code="lablib.calc.parallel.experts.routed_bytes",
        example=_across,
    ),
    Formula(
        name="Dispatch and combine over the experts' products",
        tex=r"\frac{2\,u\,F\,(e-1)}{9\,f\,W\,e}",
        symbols="u: bytes of a value on the wire; f: inner width of an expert with a gate; F: FLOP/s; W: bytes per second",
        label="eq-13-ratio",
        code="lablib.calc.parallel.experts.dispatch_ratio",
        example=lambda job: f"{dispatch_ratio(job.config.ffn, 8, **_rates(job)):.2f} over one NIC with e = 8",
    ),
    Formula(
        name="Busiest rank over the mean",
        tex=r"\max_j n_j \Big/ \left( \frac{1}{e} \sum_j n_j \right)",
        symbols="n_j: copies that rank j computes",
        label="eq-13-wait",
        code="lablib.calc.parallel.expert_load.imbalance",
        example=lambda job: f"{imbalance(LOADS, 2):.1f} where four experts on two ranks get 8, 4, 3 and 1 copies",
    ),
    Formula(
        name="Copies of an expert",
        tex=r"r = \frac{t\,c\,d}{e\,e_t}",
        symbols="t, c, d: degrees of tp, cp, dp; e: of ep; e_t: ranks that split an expert",
        label="eq-13-edp",
        code="lablib.calc.parallel.experts.expert_groups",
        example=_copies,
    ),
    Formula(
        name="Factor on the mean over edp",
        tex=r"\frac{r}{d\,c} = \frac{t}{e\,e_t}",
        symbols="with experts out of dp alone, where e_t = t, it is 1/e",
        label="eq-13-factor",
        code="lablib.calc.parallel.experts.expert_gradient_factor",
        example=lambda job: f"{expert_gradient_factor(tp=job.tp, dp=8, ep=8, etp=job.tp):g} with e = 8 out of d = 8",
    ),
)
