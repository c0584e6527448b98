"""A job, and what the letters of each rung's equations stand for in it: the examples are computed with these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb, isqrt

from lablib.calc.communication import ring_all_reduce_time
from lablib.calc.flops import forward_flops
from lablib.calc.hardware import Accelerator, accelerator, link
from lablib.calc.layouts.planner import Layout, Workload, cluster
from lablib.calc.memory import training_memory
from lablib.calc.memory.activations import layer_activations, recompute_cost
from lablib.calc.models import ModelConfig, preset
from lablib.calc.parallel import chance_met, zero_state_bytes
from lablib.calc.params import count_params, layer_params
from lablib.calc.precision import FORMATS, gap_at, linear_params, ring_sum_error
from lablib.calc.runs import LLAMA3_FAILURES, young_interval

NIC = link("ib-ndr").bandwidth  # one 400 Gb/s card a rank
LONG = 131_072  # tokens of a sequence for context parallelism
CP = 8
BF16 = FORMATS["bf16"]


@dataclass(frozen=True)
class Job:
    """What the examples of the formula sheet are computed for."""

    config: ModelConfig
    gpu: Accelerator
    ranks: int = 64  # data-parallel where the formula is of data parallelism
    tp: int = 8
    pp: int = 4
    chunks: int = 2  # stages on a rank, v
    microbatches: int = 16  # in one step, m
    micro_batch: int = 1  # sequences, b
    seq: int = 8192
    tokens: float = 15e12  # of the training run, D

    @property
    def params(self) -> int:
        """Return the number of parameters, psi."""
        return count_params(self.config).total

    @property
    def global_batch(self) -> int:
        """Return the sequences of one step, B."""
        return self.ranks * self.micro_batch * self.microbatches

    @property
    def reached(self) -> float:
        """Return the FLOP/s that a rank reaches, F: 40 percent of the peak."""
        return 0.4 * self.gpu.peak()


def job(model: str = "llama-3-8b", gpu: str = "h100") -> Job:
    """Return the job of the formula sheet for a model and a GPU, by their names."""
    return Job(preset(model), accelerator(gpu))


def symbol_values(rung: str, job: Job) -> dict[str, object]:
    r"""Return the value of every symbol, by its name in the equations: `T_{\\text{comm}}` is "T_comm", `B'` "B_prime"."""
    config = job.config
    shared = {
        "config": config, "gpt": _gpt(config), "h": config.hidden, "L": config.num_layers, "V": config.vocab,
        "a": config.num_heads, "a_kv": config.num_kv_heads, "q": config.q_width, "k": config.kv_width,
        "f": config.ffn, "s": job.seq, "b": job.micro_batch, "F": job.reached, "psi": job.params,
    }  # fmt: skip
    return shared | _OF_RUNG[rung](job)


def _gpt(config: ModelConfig) -> ModelConfig:
    """A GPT of this width."""
    h, a = config.hidden, config.num_heads
    return replace(preset("gpt3-175b"), hidden=h, num_heads=a, num_kv_heads=a, head_dim=h // a, ffn=4 * h)


def _why(job: Job) -> dict[str, object]:
    block = layer_activations(job.config, batch=job.micro_batch, seq=job.seq, implementation="paper")
    flops = 6 * job.params * job.tokens
    return {
        "N": job.params, "w": 2, "g": 2, "K": 12, "r": 4, "c": 6, "j": 12, "n": job.ranks, "phi": 0.01, "D": job.tokens,
        "C": flops, "capacity": job.gpu.memory_bytes, "peak": job.gpu.peak(), "MFU": 0.4, "M_block": sum(block.values()),
    }  # fmt: skip


def _data(job: Job) -> dict[str, object]:
    size, tokens = 2 * job.params, job.micro_batch * job.seq
    return {
        "n": job.ranks, "S": size, "alpha": 5e-6, "W": NIC, "g": 2, "buckets": 100,
        "two": 2, "T": [job.seq, job.seq // 2], "r": 1,
        "ell": [[], [None, *(2 + 1 / token for token in range(1, job.seq // 2 + 1))]], "T_forward": 2 * job.params * tokens / job.reached,
        "T_backward": 4 * job.params * tokens / job.reached,
        "T_comm": ring_all_reduce_time(size, job.ranks, bandwidth=NIC),
    }  # fmt: skip


def _tensor(job: Job) -> dict[str, object]:
    domain = link(job.gpu.scale_up)
    return {"t": job.tp, "c": 2, "W": domain.bandwidth, "domain": domain.name}


def _pipeline(job: Job) -> dict[str, object]:
    forward = 2 * job.params / (job.pp * job.tp) * job.micro_batch * job.seq / job.reached
    return {
        "p": job.pp, "m": job.microbatches, "v": job.chunks, "i": 1, "n": job.ranks, "B": job.global_batch,
        "t_F": forward, "t_B": 2 * forward, "t_I": 1.1 * forward, "t_W": 0.9 * forward,
    }  # fmt: skip


def _zero(job: Job) -> dict[str, object]:
    kept = training_memory(job.config, seq=job.seq, recompute="full").activations
    room = job.gpu.usable_bytes - zero_state_bytes(job.params, job.ranks, 3)
    return {
        "N": job.ranks, "m": job.microbatches, "W": 50e9,
        "B": job.global_batch, "A_1": kept, "R": room, "budget": job.gpu.usable_bytes,
    }  # fmt: skip


def _fsdp(job: Job) -> dict[str, object]:
    blocks = [sum(layer_params(job.config, layer).values()) for layer in range(job.config.num_layers)]
    units = [job.params - sum(blocks), *blocks]  # the root, and each block
    return {
        "N": job.ranks, "U": len(blocks), "units": units, "psi": units, "w": [2 * unit for unit in units], "blocks": [0, *(2 * block for block in blocks)],
        "w_0": 2 * units[0], "g_0": 2 * units[0], "rho": 2, "alpha": 5e-6, "S": 2 * units[1], "W": NIC,
        "M": 2 * job.params, "G": 8,
    }  # fmt: skip


def _axes(job: Job) -> dict[str, object]:
    cp = 2
    dp = job.ranks // (job.tp * job.pp * cp)
    layout = Layout(
        tp=job.tp, cp=cp, pp=job.pp, dp=dp, micro_batch=job.micro_batch, schedule="interleaved",
        virtual_stages=job.chunks,
    )  # fmt: skip
    m, p, v = job.microbatches, job.pp, job.chunks
    batch = dp * job.micro_batch * m
    return {
        "t": job.tp, "c": cp, "p": p, "d": dp, "m": m, "v": v, "layout": layout, "B": batch,
        "rank": job.ranks - 5, "n": [None, job.tp, cp, dp, p], "axis": 2,
        "x": (p - 1) / (v * m), "sites": 4, "w": 4,
        "load": Workload(job.config, cluster(job.gpu, job.ranks), job.seq, batch), "H": 500,
    }  # fmt: skip


def _precision(job: Job) -> dict[str, object]:
    return {
        "M": BF16.mantissa_bits, "x": 300.0, "block": [-897.0, 2.0], "g": [3e-9, -0.2], "w": 1.7, "n": job.ranks,
        "ulp": lambda x: gap_at(BF16, x), "u": ring_sum_error(2, BF16.epsilon), "share": 0.7, "gain": 2.0,
        "psi_8": linear_params(job.config),
    }  # fmt: skip


def _recomputed(job: Job) -> dict[str, object]:
    config, sizes = job.config, {"batch": job.micro_batch, "seq": job.seq}
    block, boundary = (
        recompute_cost(config, strategy, **sizes, attention="fused").units[0].stored for strategy in ("none", "full")
    )
    forward = forward_flops(config, **sizes)
    return {
        "t": job.tp, "x": boundary, "A": block, "F_head": forward["head"],
        "F_blocks": sum(forward.values()) - forward["head"], "M": config.num_layers * block // 2,
        "W": link("pcie5-x16").bandwidth, "square": isqrt(config.num_layers) ** 2, "root": isqrt(config.num_layers),
    }  # fmt: skip


def _communication(job: Job) -> dict[str, object]:
    size = 2 * job.params
    return {
        "n": job.ranks, "S": size, "alpha": 5e-6, "W": NIC, "m": job.ranks // 8, "G": 8, "t": 0.09, "p": 1e-3,
        "T": 1.5, "j": 0.01, "tokens": 2 * job.seq * job.config.hidden,
    }  # fmt: skip


def _real_run(job: Job) -> dict[str, object]:
    mtbf, delta = LLAMA3_FAILURES.mtbf_on(job.ranks), 30.0  # seconds that training stands still for a checkpoint
    flops = sum(forward_flops(job.config, batch=1, seq=job.seq).values()) * 3 * job.global_batch
    return {
        "N": job.ranks, "T_1": 2.0, "T_N": 2.2, "S": 2.0 * job.ranks / 2.2, "delta": delta, "M": mtbf,
        "tau": 0.9 * young_interval(delta, mtbf), "B": job.global_batch, "F": job.gpu.peak(),
        "psi": linear_params(job.config) + job.config.vocab * job.config.hidden, "seconds": 2.5 * flops / (job.ranks * job.gpu.peak()),
        "B_noise": 512, "S_min": 1.0, "eta": 3e-4, "B_1": job.micro_batch * job.microbatches, "B_prime": job.global_batch,
    }  # fmt: skip


def _context(job: Job) -> dict[str, object]:
    network = link(job.gpu.nic)
    return {"s": LONG, "c": CP, "w": 2, "t": job.tp, "W": network.bandwidth, "network": network.name}


def _experts(job: Job) -> dict[str, object]:
    # The job's model with eight experts of the width of its MLP in every layer, two for a token.
    config, experts, chosen, ep = job.config, 8, 2, 8
    mixture = replace(config, family="mixtral", num_experts=experts, experts_per_token=chosen, expert_ffn=config.ffn)
    tokens, dp = 64 * job.micro_batch, 8 * job.ranks // job.tp
    chance = chosen / experts
    binomial = [comb(tokens, n) * chance**n * (1 - chance) ** (tokens - n) for n in range(tokens + 1)]
    return {
        "mixture": mixture, "psi": count_params(mixture).total, "L_x": config.num_layers, "E": experts, "k": chosen,
        "psi_x": 3 * config.hidden * config.ffn, "e": ep, "g": 2, "r": job.ranks, "W": NIC, "varphi": 1.25, "u": 2,
        "T": job.seq * job.micro_batch, "few": tokens, "beta": binomial, "C": tokens * chosen // experts,
        "m": 8, "pi": 4 / 8 * chance_met(8, 32, 8), "n": [12, 4], "two": 2, "copies": dp // ep, "t": job.tp, "c": 1, "d": dp, "e_t": job.tp,
    }  # fmt: skip


def _machines(job: Job) -> dict[str, object]:
    mtbf, groups, away, delta = LLAMA3_FAILURES.mtbf_on(16_384), 128, 600.0, 13.0
    network = link(job.gpu.nic)
    return {
        "M_1": LLAMA3_FAILURES.gpu_mtbf, "N": job.ranks, "M": mtbf, "delta": delta, "tau": young_interval(delta, mtbf),
        "R": away, "S": 14 * job.params, "g": job.ranks, "W": network.bandwidth, "W_name": network.name, "n": groups,
        "a": away, "sigma": 30.0, "q": 1 / (1 + away / (groups * mtbf)),
    }  # fmt: skip


_OF_RUNG = {
    "01": _why, "02": _data, "03": _tensor, "04": _pipeline, "05": _zero, "06": _fsdp, "07": _axes,
    "08": _precision, "09": _recomputed, "10": _communication, "11": _real_run, "12": _context, "13": _experts,
    "14": _machines,
}  # fmt: skip
