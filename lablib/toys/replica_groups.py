"""Replica groups: data parallelism that goes on when a replica dies, and takes it back when it returns. Chapter 14.

    Lighthouse   beside the job: who lives by its heartbeat, and who takes part in the next step
    Member       one group's side of it: beat, ask for a quorum, meet the others
    heal         who is behind gets the state of one that is not
    train        quorum, heal, backward, all-reduce, commit

Read `train` first. A group is one process here, with a copy of the model. In HSDP it is a whole FSDP job: its rank r
holds shard r, meets rank r of the other groups, and all ranks of a group commit a step or none does.

Everything is said over one `TCPStore`: `members` counts who ever came, `beats/7` the heartbeats of member 7, `ask/7` is
its wish to take a step, `answer/7` the quorum that it is in. Nobody compares two clocks: the lighthouse notes when it
last saw a count of heartbeats grow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Job:
    """What all groups train together, a small regression. `batch` samples a step, however many groups there are."""

    steps: int = 40
    batch: int = 12
    samples: int = 120  # of an epoch
    width: int = 16
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 0

    def numbers(self, step: int) -> list[int]:
        """Return the numbers of the samples of a step: they follow from the step alone, and not from who takes it."""
        return [self._sample(place) for place in range(step * self.batch, (step + 1) * self.batch)]

    def _sample(self, place: int) -> int:
        epoch, place = divmod(place, self.samples)
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + 1000 * epoch))
        return int(order[place])

    def data(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs (len(numbers), width) and targets (len(numbers), 2)."""
        drawn = torch.randn(self.samples, self.width, generator=torch.Generator().manual_seed(self.seed + 1))
        x = drawn[numbers]
        return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], dim=1)


class State:
    """What a group that comes back does not have: weights, momentum, the step, and the quorum that took it.

    The step alone is not enough: after an error a step may be taken again by other groups, whose sum has other bits.
    """

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.job, self.step, self.quorum = job, 0, 0
        self.model = nn.Sequential(nn.Linear(job.width, 4 * job.width), nn.Tanh(), nn.Linear(4 * job.width, 2))
        self.weights = list(self.model.parameters())
        self.momenta = [torch.zeros_like(p) for p in self.weights]

    def flat(self) -> Tensor:
        """Return weights and momenta in one vector, 8 bytes a parameter: what healing sends."""
        return torch.cat([t.detach().flatten() for t in (*self.weights, *self.momenta)])

    @torch.no_grad()
    def load(self, flat: Tensor, step: int, quorum: int) -> None:
        """Become the state that another group has sent."""
        tensors = (*self.weights, *self.momenta)
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
        self.step, self.quorum = step, quorum

    def backward(self, numbers: list[int]) -> tuple[Tensor, float]:
        """Return gradient and loss of some samples, as sums over them: sums add up over groups of any size, means do not."""
        x, y = self.job.data(numbers)
        loss = (self.model(x) - y).square().mean(dim=1).sum()
        gradients = torch.autograd.grad(loss, self.weights)
        return torch.cat([g.flatten() for g in gradients]), loss.item()

    @torch.no_grad()
    def commit(self, gradient: Tensor, quorum: int = 0) -> None:
        """Take the step, in the quorum of this number: momentum, weights, count."""
        for p, m, piece in zip(
            self.weights, self.momenta, gradient.split([p.numel() for p in self.weights]), strict=True
        ):
            m.mul_(self.job.momentum).add_(piece.view_as(m))
            p.sub_(self.job.lr * m)
        self.step, self.quorum = self.step + 1, quorum


# --- who takes part ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quorum:
    """The groups of one step. They keep their process group as long as the number stays.

    Attributes:
        states: By rank the last step that each has committed, and the number of the quorum in which it did.
        rank: Of the group that reads this.
    """

    number: int
    states: tuple[tuple[int, int], ...]
    rank: int

    @property
    def behind(self) -> list[int]:
        """Ranks that have another state than the newest."""
        return [rank for rank, state in enumerate(self.states) if state != max(self.states)]


class Lighthouse:
    """Says who takes the next step: all who live, as soon as all of them ask.

    A member whose heart beats and that does not ask keeps all others waiting. If all die, the first one that comes
    begins at step 0 again: only a checkpoint would help.

    Args:
        store: The store that the members talk over.
        heartbeat_timeout: Seconds without a heartbeat after which a member counts as dead.
        fewest: Members without which nobody takes a step.
        first: Members without which nobody takes the first one.
    """

    def __init__(self, store: dist.Store, heartbeat_timeout: float, fewest: int = 1, first: int = 1) -> None:
        if not heartbeat_timeout > 0 or fewest < 1 or first < 1:
            raise ValueError(
                f"heartbeat_timeout={heartbeat_timeout} s must be above 0, fewest={fewest} and first={first} at least 1"
            )
        self.store, self.timeout, self.fewest, self.first = store, heartbeat_timeout, fewest, first
        self.heard: dict[int, tuple[int, float]] = {}  # by member: heartbeats, and when their number last grew
        self.number, self.members = 0, ()

    def look(self, now: float) -> bool:
        """Look once, and answer all who ask if all who live do; `now` in seconds of any clock that never goes back."""
        for member in range(1, self.store.add("members", 0) + 1):
            beats = self.store.add(f"beats/{member}", 0)
            if beats > self.heard.get(member, (0, now))[0]:
                self.heard[member] = beats, now
        living = [member for member, (_, when) in self.heard.items() if now - when <= self.timeout]
        fewest = self.fewest if self.number else max(self.first, self.fewest)
        if len(living) < fewest or not all(self.store.check([f"ask/{member}"]) for member in living):
            return False
        asked = [tuple(map(int, self.store.get(f"ask/{member}").split())) for member in living]
        # A new number where the members are others, and where one has left the group after an error.
        if living != list(self.members) or any(holds != self.number for _, _, holds in asked):
            self.number, self.members = self.number + 1, tuple(living)
        states = " ".join(f"{step} {quorum}" for step, quorum, _ in asked)
        for rank, member in enumerate(living):
            self.store.delete_key(f"ask/{member}")
            self.store.set(f"answer/{member}", f"{self.number} {rank} {states}")
        return True

    def run(self, over: threading.Event, look_every: float = 0.005) -> None:
        """Look again and again, until the event is set."""
        while not over.wait(look_every):
            self.look(time.monotonic())


class Member:
    """One group, from its start to its death; who starts again is another member.

    Args:
        connect: Makes a connection to the store: the heartbeat needs its own, since a wait blocks a connection.
        beat_every: Seconds between two heartbeats.
        patience: Seconds after which a collective gives up on a peer that neither answers nor hangs up.
    """

    def __init__(self, connect: Callable[[], dist.Store], beat_every: float = 0.1, patience: float = 5.0) -> None:
        self.store, self.patience, self.holds = connect(), patience, 0
        self.number = self.store.add("members", 1)
        self.gone = threading.Event()
        threading.Thread(target=self._beat, args=(connect(), beat_every), daemon=True).start()

    def _beat(self, store: dist.Store, every: float) -> None:
        while True:
            store.add(f"beats/{self.number}", 1)
            if self.gone.wait(every):
                return

    def ask(self, step: int, quorum: int) -> Quorum:
        """Wait for the next quorum, and meet its members in a process group unless this one is still good.

        Args:
            step: The last one that this group has committed; `quorum`, in which.
        """
        self.store.set(f"ask/{self.number}", f"{step} {quorum} {self.holds}")
        number, rank, *flat = map(int, self.store.get(f"answer/{self.number}").split())
        self.store.delete_key(f"answer/{self.number}")
        states = tuple(zip(flat[::2], flat[1::2], strict=True))
        if number != self.holds:
            self.leave()
            meeting = dist.PrefixStore(f"quorum/{number}", self.store)
            wait = timedelta(seconds=self.patience)
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=len(states), timeout=wait)
            self.holds = number
        return Quorum(number, states, rank)

    def leave(self) -> None:
        """End this process group; its connections close, and whoever waits in it sees that."""
        self.holds = 0
        if not dist.is_initialized():
            # PyTorch counts groups in the keys under which they meet, a group that nobody joined too, and begins anew
            # when one ends: without this one, who has seen a failed start would never meet who has not.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


# --- a step -----------------------------------------------------------------------------------------------------------


def heal(state: State, quorum: Quorum) -> int:
    """Bring those who are behind to the newest state, from the first that has it; return the bytes that this group got."""
    newest = max(quorum.states)
    source = quorum.states.index(newest)
    if quorum.rank == source:
        for rank in quorum.behind:
            dist.send(state.flat(), rank)
    elif quorum.rank in quorum.behind:
        flat = torch.empty_like(state.flat())
        dist.recv(flat, source)
        state.load(flat, *newest)
        return flat.nbytes
    return 0


def train(member: Member, job: Job, watch: Callable[..., Any] = lambda event, **values: None) -> State:
    """Train until `job.steps` steps are committed, with whoever is there.

    A step counts if its all-reduce ended without an error. Where a peer dies some groups may have the result and some
    an error: the ones have committed, and the others are behind, and heal in the next quorum. After the last step there
    is none: who had an error in it takes it alone, in sums of another order.

    Args:
        watch: Called with "asks", "quorum", "healed", "computed", "reduced", "committed" and "void", and what is
            known then.
    """
    state = State(job)
    while state.step < job.steps:
        watch("asks", step=state.step)
        try:
            quorum = member.ask(state.step, state.quorum)
            groups = len(quorum.states)
            watch("quorum", number=quorum.number, groups=groups)
            if got := heal(state, quorum):
                watch("healed", step=state.step, bytes=got)
            mine = job.numbers(state.step)[quorum.rank :: groups]
            gradient, loss = state.backward(mine)
            watch("computed", samples=mine)
            summed = torch.cat([gradient, torch.tensor([loss])]) / job.batch
            dist.all_reduce(summed)
            watch("reduced")
        except RuntimeError as error:  # a peer is gone, so nobody can trust what came: nobody steps, all meet anew
            watch("void", step=state.step, why=str(error))
            member.leave()
            continue
        state.commit(summed[:-1], quorum.number)
        seen = {"number": quorum.number, "groups": groups, "samples": mine, "loss": summed[-1].item()}
        watch("committed", step=state.step, state=state, **seen)
    member.leave()
    member.gone.set()
    return state
