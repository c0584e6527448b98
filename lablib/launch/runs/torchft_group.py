"""A replica group of torchft, with the events of the toy: `Groups(Torchft())`. Chapter 14.

torchft is needed nowhere else, and has wheels for Linux on x86-64 alone; `why_not_torchft` says in one sentence what
is missing. Written against torchft 0.2.0: this is the one file that knows it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lablib.launch.records import digest
from lablib.toys.replica_groups import Job, State


def why_not_torchft() -> str | None:
    """Return a sentence on why torchft cannot run here, or None if it can."""
    if importlib.util.find_spec("torchft"):
        return None
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} on {platform.machine()}"
        return f"torchft 0.2.0 has wheels for Linux on x86-64 only, and this is {here}: the recorded run stands in"
    return (
        "torchft is not installed: the recorded run stands in; in the course's folder, "
        ".venv/bin/pip install -c constraints.txt -e '.[torchft]' adds it"
    )


@dataclass(frozen=True)
class Torchft:
    """What runs in a group: torchft's Manager and its Optimizer, around AdamW.

    As its users have it, each group takes a batch of its own, `job.batch` samples, and the gradient is the mean over the
    groups that are there: the batch of a step follows the quorum.

    Args:
        ddp: Use torchft's DistributedDataParallel. In 0.2.0 its hook asserts that an all-reduce gave a result, so that
            on gloo a group whose peer dies in the all-reduce dies with it; nightly 2026.10.26 goes on.
    """

    job: Job = field(default_factory=Job)
    shards: int = 2  # into which the data is dealt, a fixed number, as torchft's own sampler has it
    pace: float = 0.01  # seconds that a step takes at least
    timeout: float = 20.0  # seconds, of everything that torchft waits for
    join_timeout: float = 0.2  # seconds that a majority which has asked waits for the others who live
    ddp: bool = False

    name = "torchft"

    def __post_init__(self) -> None:
        if why := why_not_torchft():
            raise ValueError(why)

    def lighthouse(self, report: Callable[[str], None], heartbeat_timeout: float, first: int) -> None:
        """Be torchft's lighthouse until the process ends; it begins with whoever is there, and not with the first few."""
        os.environ.setdefault("RUST_LOG", "error")  # it writes several lines for each quorum
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=round(1000 * self.join_timeout),
            heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
        )
        # It announces this machine's host name, which may resolve to nothing.
        report(re.sub(r"//.*:(\d+)$", r"//127.0.0.1:\1", server.address()))
        threading.Event().wait()

    def group(self, number: int, address: str, log: Callable[..., None]) -> None:
        """Be a group until it has taken all steps."""
        os.environ.setdefault("RUST_LOG", "error")
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

        logging.disable(logging.CRITICAL)
        state = State(self.job)
        model, wait = state.model, timedelta(seconds=self.timeout)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def load(saved: dict[str, Any]) -> None:
            model.load_state_dict(saved["model"])
            adamw.load_state_dict(saved["optimizer"])
            log("healed", step=manager.current_step(), bytes=_tensor_bytes(saved))

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=self.timeout / 2)),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
            min_replica_size=1,
            timeout=wait,
            quorum_timeout=3 * wait,
            connect_timeout=wait,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=address,
            replica_id=f"group{number}",
            hostname="127.0.0.1",
        )
        forward, optimizer = DistributedDataParallel(manager, model) if self.ddp else model, Optimizer(manager, adamw)
        while (step := manager.current_step()) < self.job.steps:
            log("asks", step=step)
            optimizer.zero_grad()  # starts the quorum, behind the forward pass
            x, y = self.job.data(self.job.numbers(self.shards * step + number))
            loss = (forward(x) - y).square().mean()
            time.sleep(self.pace)
            log("computed")
            loss.backward()
            if not self.ddp:
                _average(manager, state.weights)
            optimizer.step()  # takes the step if the manager commits it
            done = manager.current_step()
            if done == step:
                log("void", step=step)
                continue
            groups = manager.num_participants()
            log(
                "committed",
                step=done,
                groups=groups,
                loss=loss.item(),
                batches=manager.batches_committed(),
                digest=digest(state.weights),
            )
        manager.shutdown(wait=False)


def _average(manager: Any, weights: list[torch.Tensor]) -> None:
    """Replace the gradients by their mean over the groups; after an error by anything, and the step is not committed."""
    flat = torch.cat([p.grad.flatten() for p in weights])
    manager.allreduce(flat).wait()
    for p, piece in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.grad.copy_(piece.view_as(p))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(_tensor_bytes(part) for part in parts)
