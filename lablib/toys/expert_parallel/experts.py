"""The experts of one rank: many small SwiGLU MLPs, each over its own rows.

    rows of expert 0 | rows of expert 1 | ...        times        weight 0, weight 1, ...

Groups have different sizes, and some are empty. A loop multiplies one after the other; a grouped product
(`torch.nn.functional.grouped_mm`) takes all groups in one call, with the row at which each of them ends. On a CPU it
takes fp32, bf16 and fp16; for GPUs its documentation names bf16.

Shapes: R rows in the order of the experts, H hidden width, F inner width, e experts of this rank, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.errors import check_whole, must_divide, one_of

PRODUCTS = ("loop", "grouped")
INIT_STD = 0.02
ALIGNMENT = 16  # bytes; grouped_mm wants every line of its matrices to begin at a multiple
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def loop_product(rows_RI: Tensor, weight_eOI: Tensor, counts_e: Tensor) -> Tensor:
    """Return the rows of each expert times its weight, rows_RO, one expert after the other."""
    groups = rows_RI.split(counts_e.tolist())
    return torch.cat([group_RI @ weight_OI.t() for group_RI, weight_OI in zip(groups, weight_eOI, strict=True)])


def grouped_product(rows_RI: Tensor, weight_eOI: Tensor, counts_e: Tensor) -> Tensor:
    """Return the same in one call; autocast does not reach it, and rows and weights keep their dtype."""
    check_grouped(rows_RI.dtype, inputs=rows_RI.shape[-1], outputs=weight_eOI.shape[1])
    ends_e = counts_e.cumsum(0).to(torch.int32)
    rows_RO = F.grouped_mm(rows_RI, weight_eOI.transpose(1, 2), offs=ends_e)
    if rows_RO.requires_grad:
        # Its backward refuses a gradient that is one number repeated (stride 0), such as that of a sum: write it out.
        rows_RO.register_hook(lambda grad_RO: grad_RO.clone(memory_format=torch.contiguous_format))
    return rows_RO


def check_grouped(dtype: torch.dtype, **widths: int) -> None:
    """Raise a ValueError unless `grouped_mm` is there and takes such matrices."""
    if not hasattr(F, "grouped_mm"):
        raise ValueError(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm; use products='loop'")
    if dtype not in DTYPES:
        raise ValueError(f"grouped_mm takes fp32, bf16 and fp16, not {dtype}; use products='loop'")
    for name, width in widths.items():
        if width * dtype.itemsize % ALIGNMENT:
            multiple = ALIGNMENT // dtype.itemsize
            raise ValueError(
                f"{name}={width} values of {dtype} are {width * dtype.itemsize} bytes, no multiple of the {ALIGNMENT} "
                f"that grouped_mm wants; use {name}={width + -width % multiple} or products='loop'"
            )


class Experts(nn.Module):
    """This rank's part of the experts of a layer, `down(silu(gate(x)) * up(x))` each.

    Every rank draws the weights of all experts and keeps its own, so that a seed gives the same model on any number of
    ranks. A real job cannot hold all of them and draws its own.

    Args:
        experts: E, of all ranks.
        hidden: H.
        ffn: F, of one expert.
        group: The ep ranks; rank i keeps the i-th part of the experts. None keeps all.
        products: "loop" or "grouped".
    """

    def __init__(
        self, experts: int, hidden: int, ffn: int, group: dist.ProcessGroup | None = None, *, products: str = "loop"
    ) -> None:
        super().__init__()
        for name, size in (("experts", experts), ("hidden", hidden), ("ffn", ffn)):
            check_whole(name, size, 1)
        one_of("products", products, PRODUCTS)
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        must_divide("ep", ranks, "experts", experts)
        self.products = products
        self.first, self.count = experts // ranks * rank, experts // ranks

        def draw(outputs: int, inputs: int) -> nn.Parameter:
            whole_EOI = torch.empty(experts, outputs, inputs).normal_(std=INIT_STD)
            return nn.Parameter(self.mine(whole_EOI).clone())

        self.gate, self.up, self.down = draw(ffn, hidden), draw(ffn, hidden), draw(hidden, ffn)

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's part of what all experts have, expert by expert."""
        return whole[self.first : self.first + self.count]

    def check(self, dtype: torch.dtype) -> None:
        """Raise a ValueError if the products cannot be made, before any rank has sent anything."""
        if self.products == "grouped":
            check_grouped(dtype, hidden=self.gate.shape[2], ffn=self.gate.shape[1])

    def forward(self, rows_RH: Tensor, counts_e: Tensor) -> Tensor:
        """Return what each row's expert makes of it, rows_RH in the same order.

        Args:
            counts_e: Rows of each expert; they add up to R.
        """
        if len(counts_e) != self.count or int(counts_e.sum()) != len(rows_RH):
            raise ValueError(f"counts {counts_e.tolist()} do not fit {len(rows_RH)} rows of {self.count} experts")
        product = loop_product if self.products == "loop" else grouped_product
        gate_RF, up_RF = product(rows_RH, self.gate, counts_e), product(rows_RH, self.up, counts_e)
        return product(F.silu(gate_RF) * up_RF, self.down, counts_e)
