"""Collectives that PyTorch's versions name differently, or lack.

    here             torch 2.13 and later     before
    all_gather       all_gather_single        all_gather_into_tensor
    reduce_scatter   reduce_scatter_single    reduce_scatter_tensor

Versions 2.13 and 2.14 warn at the old names, earlier ones do not know the new. The arguments are the same.
Lists of tensors are exchanged on gloo from torch 2.12 on; before, here, as one tensor.

Source: pull requests 186123 to 186125 and 165435 of PyTorch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.torch_versions import torch_facts

#: (output, input, group=None, async_op=False): `output` is the inputs of all ranks, one after the other.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

#: (output, input, op=SUM, group=None, async_op=False): `output` is this rank's part of the sum of the inputs.
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def _as_one_tensor(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
    arrived = outputs[0].new_empty(sum(sizes[0]))
    dist.all_to_all_single(arrived, torch.cat([x.reshape(-1) for x in inputs]), *sizes, group=group)
    for output, part in zip(outputs, arrived.split(sizes[0]), strict=True):
        output.copy_(part.view_as(output))


#: (outputs, inputs, group=None): `inputs[r]` goes to rank r, and `outputs[r]` comes from it.
all_to_all = dist.all_to_all if torch_facts(torch.__version__).gloo_has_all_to_all else _as_one_tensor
