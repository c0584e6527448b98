"""AdamW whose two moments lie in 8 or 4 bits: blocks of a flat tensor, one scale for each, and a table of values.

    scale = max |block|        code = place of the nearest table value to x / scale        x ~ table[code] * scale

Every step reads the moments back into fp32, updates them and the weight there, and quantizes them again: the weight
never sees a rounded update, only moments that were rounded one step before.

| states | values of a block | table for momentum (with signs) | table for variance | bytes a parameter |
|---|---|---|---|---|
| 8bit | 256 | dynamic, 256 values | dynamic, all positive | 2 (1 + 4/256) |
| 4bit | 128 | dynamic, 16 values | linear, 1/16 to 1: no zero | 2 (1/2 + 4/128) |
| fp8 | 256 | the numbers of E4M3, scaled to 448 | the same | 2 (1 + 4/256) |
| bf16 | no scale | the numbers of bf16 | the same | 4 |

A tensor of fewer than 4,096 values, or with a last block that is not full, stays in its dtype, as in torchao. A rank of
FSDP2 quantizes its own shard, so that blocks begin where shards begin.

Papers: Dettmers et al. 2021, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), sections 2 and 3; Li et al.
2023, Memory Efficient Optimizers with 4-bit States (arXiv 2309.01507). Held to torchao 0.18 and bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lablib.calc.errors import one_of
from lablib.calc.precision import LEAST_QUANTIZED
from lablib.toys.precision.fp8 import E4M3

FORMATS = {"8bit": 256, "4bit": 128, "fp8": 256, "bf16": 0}  # values that share a scale


@cache
def dynamic_table(bits: int, *, signed: bool) -> Tensor:
    """Return the values of dynamic quantization, sorted, from nearly -1 or from 0 to 1.

    Decades from 10^-(n-1) to 1, each with twice as many values as the one below it, at the middles of equal parts: what
    is near the largest of its block is precise, and what is a millionth of it is not zero yet. 8 bits have 7 decades,
    4 bits 3. Dettmers 2015, 8-Bit Approximations for Parallelism in Deep Learning (arXiv 1511.04561).
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: there are tables of 4 and of 8 bits")
    decades, values = bits - 1 if bits == 8 else 3, [0.0, 1.0]
    for k in range(decades):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**k + 1)
        middles = (10 ** (k + 1 - decades) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-value for value in middles] * signed
    return torch.tensor(values).sort().values


@cache
def tables(states: str) -> tuple[Tensor, Tensor] | None:
    """Return the tables of momentum and of variance; None where the values are those of E4M3."""
    if states == "4bit":
        return dynamic_table(4, signed=True), torch.linspace(0, 1, 17)[1:]
    return (dynamic_table(8, signed=True), dynamic_table(8, signed=False)) if states == "8bit" else None


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return for each number the place of the nearest value of a sorted table; halfway goes up."""
    below = (torch.searchsorted(table, x, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=len(table) - 1)
    up = x - table[below] >= (table[above] - table[below]) * 0.5
    return torch.where(up, above, below)


@dataclass
class State:
    """One moment of one tensor, in blocks of its flat values.

    Attributes:
        codes: Places in the table, uint8, one a value; 4 bits are packed in pairs where it counts, in `nbytes`.
            Without a table the values themselves, in E4M3.
        scale: One for each block, fp32.
        table: None for E4M3.
    """

    codes: Tensor
    scale: Tensor
    table: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes with scales and table, two codes of 4 bits in one."""
        table, packed = (0, 1) if self.table is None else (self.table.nbytes, 2 if len(self.table) == 16 else 1)
        return self.codes.nbytes // packed + self.scale.nbytes + table

    def read(self) -> Tensor:
        """Return the moment in fp32."""
        values = self.codes.float() if self.table is None else self.table[self.codes.int()]
        return (values.view(len(self.scale), -1) * self.scale[:, None]).view(self.codes.shape)

    def write(self, x: Tensor) -> None:
        """Quantize a moment, each block by its largest magnitude."""
        blocks = x.view(len(self.scale), -1)
        self.scale = blocks.abs().amax(1).clamp(min=1e-12)
        if self.table is None:
            self.scale = self.scale / torch.finfo(E4M3).max
            self.codes = (blocks / self.scale[:, None]).to(E4M3).view(x.shape)
        else:
            self.codes = nearest(blocks / self.scale[:, None], self.table).to(torch.uint8).view(x.shape)


def quantized_zeros(x: Tensor, table: Tensor | None, block: int) -> State | None:
    """Return a moment of zeros for a tensor, in blocks; None if it has no blocks."""
    if not block or x.numel() < LEAST_QUANTIZED or x.numel() % block:
        return None
    codes = torch.zeros(x.shape, dtype=E4M3 if table is None else torch.uint8)
    return State(codes, torch.zeros(x.numel() // block), table)


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with moments in `states`: a key of `FORMATS`. It is a toy: it saves and copies no states.

    Args:
        params: On a CPU; under FSDP2 the local shards.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        states: str = "8bit",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.states = one_of("states", states, FORMATS)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def state_dict(self) -> dict:
        """Refuse: torch's would share codes and scales, and lose the dtype of bf16 moments."""
        raise RuntimeError("LowBitAdamW saves no states; torchao's AdamW8bit does")

    def __deepcopy__(self, memo: dict) -> LowBitAdamW:
        return self.state_dict()  # type: ignore[return-value]

    def _start(self, parameter: Tensor) -> None:
        pair, block = tables(self.states) or (None, None), FORMATS[self.states]
        for name, table in zip(("momentum", "variance"), pair, strict=True):
            found = quantized_zeros(parameter, table, block)
            plain = torch.zeros_like(parameter, dtype=None if block else torch.bfloat16)
            self.state[parameter][name] = plain if found is None else found
        self.state[parameter]["step"] = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._start(parameter)
                self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        gradient, weight = parameter.grad.float(), parameter.float()
        m, v = (s.read() if isinstance(s, State) else s.float() for s in (state["momentum"], state["variance"]))
        m, v = m.lerp(gradient, 1 - beta1), v.lerp(gradient.square(), 1 - beta2)
        for name, moment in (("momentum", m), ("variance", v)):
            if isinstance(state[name], State):
                state[name].write(moment)
            else:
                state[name].copy_(moment)
        # In fp32, as a kernel has them.
        step, lr = (torch.as_tensor(x, dtype=torch.float32) for x in (state["step"], group["lr"]))
        weight = weight - lr * group["weight_decay"] * weight
        denominator = v.sqrt() / (1 - beta2**step).sqrt() + group["eps"]
        parameter.copy_(weight - lr * (m / (1 - beta1**step)) / denominator)

    def state_bytes(self) -> int:
        """Return the bytes of all moments, with scales and tables."""
        found = (state[name] for state in self.state.values() for name in ("momentum", "variance"))
        return sum(moment.nbytes for moment in found)
