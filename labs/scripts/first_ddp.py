"""A first DDP program: `torchrun --standalone --nproc-per-node 2 labs/scripts/first_ddp.py`.

Rank r has one example, r + 1, for a model with one weight. The gradient of a rank is its example; DDP averages.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
dist.init_process_group("nccl" if gpu else "gloo")  # joins the rest
rank, ranks = dist.get_rank(), dist.get_world_size()

x = torch.full((1, 1), rank + 1.0, device=device)  # this rank's example
total = x.clone()
dist.all_reduce(total)  # by hand: the sum over ranks, in place
model = torch.nn.Linear(1, 1, bias=False, device=device)
model = DistributedDataParallel(model)  # all start as rank 0
model(x).sum().backward()  # and all get the mean gradient
mean = model.module.weight.grad.item()
print(f"rank {rank} of {ranks}: sum {total.item():g}, mean {mean:g}")
dist.destroy_process_group()
