"""Which degrees of parallelism may be together: the one rule, which the calculator, the planner and the checks ask.

| degree | divides |
|---|---|
| tp | query heads, key heads, the widths of MLP and experts |
| cp | the sequence: 2 cp chunks for a ring or a gather, one of each end of it for every rank; cp parts for Ulysses |
| cp by Ulysses | the key heads that tp leaves, since each is sent to one rank alone |
| tp with sequence parallelism | the tokens of a cp rank |
| ep | the experts; and with the ranks that split one expert, etp, all ranks of a stage: `ep etp | tp cp dp` |
| shard (hybrid sharding) | all ranks that hold the same weights, dp cp; whole groups of cp, and of ep etp, lie in it |
| pp | what `calc.schedules` runs; interleaved, the micro-batches too |

Without etp an expert is split over tp, so `ep | cp dp`: ranks of ep are taken from cp and dp together, which is how
Megatron-LM folds them (megatron.core.parallel_state: groups of experts are those of a grid tp-ep-dp without cp).
"""

from __future__ import annotations

import math

from lablib.calc.errors import check_whole, must_divide
from lablib.calc.models import ModelConfig


def check_degrees(
    model: ModelConfig,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    seq: int,
    sequence_parallel: bool = False,
    cp_way: str = "ring",
    imbalance: float = 1.0,
) -> None:
    """Raise a ValueError that names both factors unless a model can be split so.

    Args:
        seq: Tokens of a sequence, before cp divides it.
        imbalance: Tokens of the fullest expert-parallel rank over the mean.
    """
    check_sequence(model, tp=tp, cp=cp, seq=seq, sequence_parallel=sequence_parallel, cp_way=cp_way)
    if model.learned_positions and seq > model.max_positions:
        raise ValueError(
            f"seq={seq} is more than the {model.max_positions} learned positions of {model.name}; "
            f"use at most {model.max_positions}"
        )
    check_experts(model, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
    check_imbalance(model, imbalance, ep)


def check_sequence(
    model: ModelConfig, *, tp: int, cp: int, seq: int, sequence_parallel: bool, cp_way: str = "ring"
) -> None:
    """Raise a ValueError unless tp divides heads and widths, and cp and tp the sequence; arguments as `check_degrees`."""
    widths = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "ffn": model.ffn}
    if model.is_moe:
        widths["expert_ffn"] = model.expert_ffn
    for name, size in widths.items():
        must_divide("tp", tp, name, size)
    if cp > 1 and cp_way == "ulysses":
        must_divide("cp", cp, "seq", seq)
        if model.is_mla:
            raise ValueError(f"cp_way='ulysses': {model.name} has latents and no key heads to send; use 'ring'")
        must_divide("cp", cp, "num_kv_heads / tp" if tp > 1 else "num_kv_heads", model.num_kv_heads // tp)
    elif cp > 1:
        if seq % 2:
            raise ValueError(f"seq={seq} is odd, and cp={cp} ranks take two equal chunks each; use an even length")
        must_divide("cp", cp, "seq / 2", seq // 2)
    if sequence_parallel and tp > 1:
        must_divide("tp", tp, "seq / cp" if cp > 1 else "seq", seq // cp)


def sequence_step(*, tp: int, cp: int, sequence_parallel: bool, cp_way: str = "ring") -> int:
    """Return the tokens whose multiples `check_sequence` takes."""
    chunks = 2 if cp > 1 and cp_way != "ulysses" else 1
    return cp * math.lcm(chunks, tp if sequence_parallel else 1)


def check_experts(model: ModelConfig, *, tp: int, cp: int, dp: int, ep: int, etp: int | None) -> None:
    """Raise a ValueError unless ep divides the experts, and the ranks of a stage are whole groups of ep times etp."""
    for name, value, only in (("ep", ep, 1), ("etp", etp, None)):
        if not model.is_moe and value != only:
            raise ValueError(f"{name}={value} needs a model with experts and {model.name} has none; leave it out")
    if not model.is_moe:
        return
    must_divide("ep", ep, "num_experts", model.num_experts)
    if etp is None:
        must_divide("ep", ep, "cp x dp" if cp > 1 else "dp", cp * dp)
        return
    must_divide("etp", etp, "expert_ffn", model.expert_ffn)
    must_divide("ep x etp", ep * etp, "tp x cp x dp", tp * cp * dp)


def check_shard(shard: int | None, *, zero: int, tp: int, cp: int, dp: int, ep: int, etp: int | None) -> None:
    """Raise a ValueError unless so many ranks can share one copy of the sharded states; None means all of dp times cp.

    They are neighbours: ranks of cp and of ep are among them, as in a mesh of torchtitan's and Accelerate's, where
    replicas are outside (torchtitan/distributed/parallel_dims.py: dp_replicate, then dp_shard with cp, and ep out of both).
    """
    if shard is None:
        return
    check_whole("shard", shard, 2)
    if not zero:
        raise ValueError(f"shard={shard} needs sharded states; use zero=1, 2 or 3")
    ranks = "cp x dp" if cp > 1 else "dp"
    must_divide("shard", shard, ranks, cp * dp)
    if shard == cp * dp:
        raise ValueError(f"shard={shard} are all ranks of {ranks}, and nothing is replicated; leave it out")
    must_divide("cp", cp, "shard", shard)
    must_divide("ep" if etp is None else "ep x etp", ep * (etp or tp), "shard" if tp == 1 else "tp x shard", tp * shard)


def check_imbalance(model: ModelConfig, imbalance: float, ep: int) -> None:
    """Raise a ValueError unless the fullest expert-parallel rank can have so many times the mean of the tokens."""
    most = largest_imbalance(model, ep)
    number = isinstance(imbalance, int | float) and not isinstance(imbalance, bool)
    if not number or not 1 <= imbalance <= most:
        raise ValueError(
            f"imbalance={imbalance!r} must be from 1 to {most:g}: with ep={ep} the fullest rank gets at most so many times "
            "the average of the tokens"
        )


def largest_imbalance(model: ModelConfig, ep: int) -> float:
    """Return `min(ep, E/k)`: one of ep ranks gets all copies at most, and of a token one copy for each of its experts."""
    return min(ep, model.num_experts / model.experts_per_token) if model.is_moe else 1.0


def check_schedule(schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int | None) -> None:
    """Raise a ValueError unless chunks are interleaved, and interleaved ones have stages and whole rounds."""
    if schedule != "interleaved":
        if virtual_stages > 1:
            raise ValueError(
                f"virtual_stages={virtual_stages} contradicts schedule={schedule!r}; use schedule='interleaved'"
            )
        return
    if pp == 1 or virtual_stages == 1:
        raise ValueError(
            f"schedule='interleaved' needs pp and virtual_stages of at least 2; they are pp={pp} and "
            f"virtual_stages={virtual_stages}"
        )
    if num_microbatches is not None and num_microbatches % pp:
        raise ValueError(
            f"num_microbatches={num_microbatches} is not a multiple of pp={pp}, which schedule='interleaved' needs; use "
            f"{-(-num_microbatches // pp) * pp}"
        )
