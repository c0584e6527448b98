"""The common part of the programs of the failure zoo: a small model, its data, its log, and a watch for hangs.

Every rank writes a log (`lablib.launch.records.logs`): each collective before it waits for it, each step, its end.
From the logs of all ranks a hang can be proven without a clock: a rank waits for ever when another one has called
another collective in the same place, or has returned without calling it. The watch looks for that, and ends the rank.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.launch.measure import CommEvent, CommLog, dump_flight_record, record_comms
from lablib.launch.records import RankLog, read_logs
from lablib.toys.gradient_layout import set_grad

_LOOK_S = 0.01  # between two looks of the watch; nothing depends on it
_PEER_S = 5.0  # for the other ranks to prove the hang, too, before this one ends
_ENDED = ("returned", "hang")


@dataclass(frozen=True)
class Setting:
    """The settings of one run of a program."""

    steps: int = 5  # optimizer steps of a healthy run, at least 4
    micro_batches: int = 1  # gradients added up before each of them
    width: int = 8  # of the model, even
    culprit: int = 1  # the rank that misbehaves, where one does
    seed: int = 0  # of weights and data


class Job:
    """One rank's part of a training job, and its log."""

    def __init__(self, setting: Setting, log: RankLog, layout: str = "copies", model: nn.Module | None = None) -> None:
        self.setting, self.log = setting, log
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.culprit = self.rank == setting.culprit
        self.model = model or build(setting)
        self.forward: Callable[[Tensor], Tensor] = self.model  # or what wraps it
        self._parameters, self._rows = sum(p.numel() for p in self.model.parameters()), 0
        self.model.register_forward_pre_hook(self._count)
        drawn = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        parameters = self._parameters * (self.ranks if layout == "tensor parallel" else 1)
        log.write("job", parameters=parameters, layout=layout, weight_norm=torch.linalg.vector_norm(drawn).item())

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; after the model is wrapped."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def mine(self, batches: int) -> list[int]:
        """Return the numbers of the batches that this rank gets out of so many: every `ranks`-th."""
        return list(range(self.rank, batches, self.ranks))

    def loss(self, number: int, padding: int = 0) -> Tensor:
        """Return the mean loss of a batch."""
        self.log.write("batch", number=number)
        x, y = batch(self.setting, number)
        rows = len(x)
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
        return (self.forward(x)[:rows] - y).square().mean()

    def backward(self, number: int, padding: int = 0) -> tuple[float, Tensor]:
        """Return the loss of a batch, and this rank's gradients of all parameters so far in one vector."""
        loss = self.loss(number, padding)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def update(self, optimizer: torch.optim.Optimizer, loss: float, flat: Tensor) -> None:
        """Log the step and take it, with a vector in the place of the gradients; they stay until they are zeroed."""
        self.set_grad(flat)
        self.step(loss)
        optimizer.step()

    def set_grad(self, flat: Tensor) -> None:
        """Put a vector back into the gradients."""
        start = 0
        for p in self.model.parameters():
            set_grad(p, flat[start : start + p.numel()])
            start += p.numel()

    def step(self, *losses: float) -> None:
        """Log a step: its mean loss, the norm of the gradients that the optimizer gets, and the work done for it.

        Work is counted, 6 FLOPs for each weight and row in forward and backward: a clock would also count the time
        that this rank waits for others.
        """
        local = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in local])).item()
        flops = 6 * self._parameters * self._rows
        self.log.write("step", loss=sum(losses) / len(losses), norm=norm, flops=flops)
        self._rows = 0

    def _count(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows += len(inputs[0])


def build(setting: Setting) -> nn.Module:
    """Return the model; the same weights for the same seed."""
    torch.manual_seed(setting.seed)
    width = setting.width
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, 2))


def half_model(setting: Setting, draw: int) -> nn.Module:
    """Return a rank's half of a model that is cut in two, as tensor parallelism cuts it: the halves' outputs add up.

    Args:
        draw: Which of the seed's weights; the halves of one model have different ones.
    """
    torch.manual_seed(2 * setting.seed + draw)
    width = setting.width
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2, bias=False))


class _Halves(nn.Module):
    """The model that two halves make together."""

    def __init__(self, setting: Setting, ranks: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(half_model(setting, draw) for draw in range(ranks))

    def forward(self, x: Tensor) -> Tensor:
        return sum(half(x) for half in self.halves)


def batch(setting: Setting, number: int) -> tuple[Tensor, Tensor]:
    """Return inputs (4, width) and targets (4, 2) of a batch."""
    generator = torch.Generator().manual_seed(1000 * setting.seed + number)
    x = torch.randn(4, setting.width, generator=generator)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], dim=1)


def reference(setting: Setting, ranks: int, layout: str = "copies") -> dict[str, list[float]]:
    """Return mean loss and gradient norm of each step of the job as it should be, from one process."""
    group = layout == "tensor parallel"  # whose ranks work on one batch together
    model = _Halves(setting, ranks) if group else build(setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    share = 1 if group else ranks * setting.micro_batches
    for step in range(setting.steps):
        total = 0.0
        for number in range(step * share, (step + 1) * share):
            x, y = batch(setting, number)
            loss = (model(x) - y).square().mean() / share
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


class _LoggedEvents(list):
    """The events of a CommLog, each written to the rank's log before the rank waits for it."""

    def __init__(self, log: RankLog) -> None:
        super().__init__()
        self._log = log

    def append(self, event: CommEvent) -> None:
        super().append(event)
        self._log.write("collective", op=event.op, bytes=event.bytes)


@contextmanager
def watched(log: RankLog) -> Iterator[None]:
    """Log what the rank communicates inside the block, and end the process if it hangs."""
    over = threading.Event()
    main = threading.get_ident()
    watch = threading.Thread(target=_watch, args=(log, over, main), daemon=True)
    watch.start()
    with record_comms(CommLog(events=_LoggedEvents(log))):
        yield
    log.write("returned")
    over.set()
    watch.join()
    _dump(log)


def _watch(log: RankLog, over: threading.Event, main: int) -> None:
    while not over.wait(_LOOK_S):
        logs = read_logs(log.path.parent)
        own = logs.pop(dist.get_rank(), [])
        if any(_stuck(own, other) for other in logs.values()):
            log.write("hang", line=_line(main))
            _dump(log)
            _wait_for_the_others(log.path.parent, over)
            os._exit(3)  # the main thread waits in C++, and nothing else ends it


def _dump(log: RankLog) -> None:
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        dump_flight_record(log.path.parent)


def _stuck(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Say whether a rank with the first log waits for ever for one with the second."""
    mine, theirs = get_calls(own), get_calls(other)
    if any(a != b for a, b in zip(mine, theirs, strict=False)):
        return True
    return len(mine) > len(theirs) and any(line["event"] == "returned" for line in other)


def get_calls(lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return operation and bytes of every collective in a log."""
    return [(line["op"], line["bytes"]) for line in lines if line["event"] == "collective"]


def _wait_for_the_others(folder: Path, over: threading.Event) -> None:
    for _ in range(int(_PEER_S / _LOOK_S)):
        if all(any(line["event"] in _ENDED for line in lines) for lines in read_logs(folder).values()):
            return
        over.wait(_LOOK_S)


def _line(thread: int) -> str:
    """Return the text of the innermost line of the program that a thread stands on."""
    frame = sys._current_frames().get(thread)
    while frame and not frame.f_code.co_filename.endswith("zoo.py"):
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame else ""


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
