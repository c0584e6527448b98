"""Two collectives on one flat tensor, under the name that this PyTorch has for them.

    here             torch 2.13 and later     before
    all_gather       all_gather_single        all_gather_into_tensor
    reduce_scatter   reduce_scatter_single    reduce_scatter_tensor

Later versions warn at the old names, earlier ones do not know the new. The arguments are the same.

Source: pull requests 186123 to 186125 of PyTorch.
"""

from __future__ import annotations

import torch.distributed as dist

#: (output, input, group=None, async_op=False): `output` is the inputs of all ranks, one after the other.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

#: (output, input, op=SUM, group=None, async_op=False): `output` is this rank's part of the sum of the inputs.
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
