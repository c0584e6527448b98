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
from lablib.toys.gradient_layout import set_grad

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


# --- whose gradients are averaged over which ranks ------------------------------------------------------------------


def routed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the routed experts, which differ between the ranks of an ep group.

    In the order of the model, so that ranks which send them one by one send the same one.
    """
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


def average_gradients(model: nn.Module, dp_group: dist.ProcessGroup, edp_group: dist.ProcessGroup) -> None:
    """Make every gradient that of the mean of the dp ranks' losses, whose tokens are as many on each.

    With dp = 4 and ep = 2, two ranks share the experts of a layer, and each expert lives twice, edp = dp/ep = 2:

        rank                     0     1     2     3
        experts                0..3  4..7  0..3  4..7
        ep groups               0 1         2 3              tokens go between these
        edp groups              0 2         1 3              these hold the same experts
        dp group                0 1 2 3                      these hold the same of everything else

    Routed experts are summed over edp, all others over dp; both are divided by dp. An expert has seen the tokens of all
    ranks of its ep group, and the all-to-all brought back the gradients of all their losses. So its rank holds a sum
    over ep ranks already, and the mean over edp alone would be ep times too large. Each kind goes in one message.

    Sources: NVIDIA/Megatron-LM pull request 5956; torchtitan pull request 1324 for the meshes.

    Args:
        dp_group: The ranks that hold the same attention, ep included.
        edp_group: The ranks that hold the same experts.
    """
    routed = set(routed_parameters(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    for group, parameters in (
        (edp_group, [p for p in trained if p in routed]),
        (dp_group, [p for p in trained if p not in routed]),
    ):
        if not parameters:
            continue
        # Every rank sends, whether it has seen a token or not: a message that one rank leaves out hangs the others.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        message = torch.cat([grad.flatten() for grad in grads]) / dp_group.size()
        dist.all_reduce(message, group=group)
        for p, part in zip(parameters, message.split([p.numel() for p in parameters]), strict=True):
            set_grad(p, part)  # in its own dtype too: cat of bf16 and fp32 is fp32


def own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Return the process group of this rank among groups of ranks that name each rank once; all ranks must call it.

    Args:
        groups: As from `lablib.calc.parallel.expert_groups`.
    """
    named = [rank for ranks in groups for rank in ranks]
    if sorted(named) != list(range(dist.get_world_size())):
        raise ValueError(f"the groups {groups} must name each of the {dist.get_world_size()} ranks once")
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes all, in the same order
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
