"""Training across data centres: what synchronous data parallelism sends, and what local steps save.

Local SGD (Stich 2018, arXiv 1805.09767) averages the weights of k replicas after H steps of their own; DiLoCo (Douillard
et al. 2023, arXiv 2311.08105) takes an outer step of Nesterov momentum along their averaged change. A message has g bytes
of a gradient or w of a change for each of ψ parameters:

    DDP              2 (k-1)/k · g ψ       bytes sent by a replica, in every step
    local, DiLoCo    2 (k-1)/k · w ψ       once in H steps, so 1/H of it a step

The count is exact; whether a run with large H reaches the same loss is another matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lablib.calc.communication import ring_all_reduce_bytes, ring_all_reduce_time
from lablib.calc.errors import check_whole, one_of
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params

METHODS = ("ddp", "local-sgd", "diloco")
#: Bytes of one number on the wire: a bf16 gradient; weights and their changes in fp32, as the optimizer keeps them.
WIRE_BYTES = {"ddp": 2, "local-sgd": 4, "diloco": 4}
#: Values that a replica keeps beside those of the inner optimizer: DiLoCo has the weights as they were at the last
#: exchange, and the outer momentum.
EXTRA_VALUES = {"ddp": 0, "local-sgd": 0, "diloco": 2}


@dataclass(frozen=True)
class Exchange:
    """The traffic of one replica over the link between data centres, and its cost.

    Attributes:
        inner_steps: H, steps between exchanges; 1 for DDP.
        message: Bytes of one exchange sent by one replica.
        tokens: Tokens of all replicas between two exchanges.
        compute: Seconds of computing between two exchanges.
        extra_memory: Bytes that all ranks of a replica together keep for the method.
    """

    method: str
    inner_steps: int
    message: float
    tokens: int
    compute: float
    communicate: float
    extra_memory: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a replica sends, over the tokens that all replicas read."""
        return self.message / self.tokens

    @property
    def share(self) -> float:
        """Part of the time that goes into communication, if nothing overlaps."""
        return self.communicate / (self.compute + self.communicate)


def exchange_cost(
    method: str,
    model: ModelConfig | str,
    *,
    replicas: int,
    tokens_per_step: int,
    step_seconds: float,
    bandwidth: float,
    inner_steps: int = 1,
    latency: float = 0.0,
    wire_bytes: float | None = None,
) -> Exchange:
    """Return what a method sends between data centres, with one replica of any inner layout in each.

    Args:
        tokens_per_step: Tokens that one replica reads in one step.
        step_seconds: Seconds that a replica computes for one step.
        bandwidth: Bytes per second that a data centre sends, per direction.
        latency: Seconds of a message; some 0.05 between continents.
    """
    one_of("method", method, METHODS)
    for name, value in (("replicas", replicas), ("tokens_per_step", tokens_per_step), ("inner_steps", inner_steps)):
        check_whole(name, value, 1)
    if method == "ddp" and inner_steps > 1:
        raise ValueError(f"inner_steps={inner_steps}: DDP exchanges gradients in every step; use local-sgd or diloco")
    if not step_seconds > 0:
        raise ValueError(f"step_seconds={step_seconds} must be above 0")
    width = WIRE_BYTES[method] if wire_bytes is None else wire_bytes
    if not width > 0:
        raise ValueError(f"wire_bytes={wire_bytes} must be above 0")
    params = count_params(resolve_model(model)).total
    size = params * width
    return Exchange(
        method=method,
        inner_steps=inner_steps,
        message=ring_all_reduce_bytes(size, replicas),
        tokens=inner_steps * replicas * tokens_per_step,
        compute=inner_steps * step_seconds,
        communicate=ring_all_reduce_time(size, replicas, bandwidth=bandwidth, latency=latency),
        extra_memory=EXTRA_VALUES[method] * 4 * params,
    )


def needed_inner_steps(
    model: ModelConfig | str,
    *,
    replicas: int,
    step_seconds: float,
    bandwidth: float,
    most_share: float = 0.1,
    method: str = "diloco",
) -> int:
    """Return the least H with which communication takes at most a given part of the time, nothing overlapped.

    C / (H·t + C) <= s for an exchange of C seconds and steps of t: H >= C (1 - s) / (s t).

    Args:
        step_seconds: t, seconds that a replica computes for one step.
        bandwidth: Bytes per second that a data centre sends, per direction.
    """
    if not 0 < most_share < 1:
        raise ValueError(f"most_share={most_share} must be between 0 and 1")
    one = exchange_cost(
        method, model, replicas=replicas, tokens_per_step=1, step_seconds=step_seconds, bandwidth=bandwidth
    )
    exact = one.communicate * (1 - most_share) / (most_share * step_seconds)
    return max(1, math.ceil(exact))
