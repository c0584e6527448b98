"""The messages of a pipeline: activations to the next stage, gradients back to the one before, by send and recv.

Three habits keep the ranks from waiting for each other for ever, or longer than they must:

    - a send never blocks: it runs beside the computation, and its tensor is kept until it has arrived;
    - a receive is posted one ahead: while the rank waits or works, the next message can already come in;
    - a message has a tag of its own, so that messages need not arrive in the order in which they were sent.

A message is named by the action that reads it: `1F0` is what the forward of micro-batch 0 on stage 1 waits for, and
`0B0` the gradient that the backward on stage 0 waits for, in one piece or in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lablib.calc.schedules import Action, Schedule


class _Sent(NamedTuple):
    peer: int
    reader: Action
    work: dist.Work
    tensor: Tensor


class Mailbox:
    """The messages that one rank sends and receives in one step of a schedule.

    Args:
        empty: Returns a tensor to receive into, of the shape that a stage reads, for a micro-batch's number.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, empty: Callable[[int], Tensor]) -> None:
        self.schedule, self.group, self.empty = schedule, group, empty
        self.rank, self.last = dist.get_rank(group), schedule.num_stages - 1
        # The turn of every action in its rank's list: from it a message tells how far its sender has come.
        turns = [enumerate(schedule.actions(rank)) for rank in range(schedule.num_ranks)]
        self.turn = {_neutral(action): i for rank in turns for i, action in rank if action.kind != "W"}
        self.coming = iter([a for a in schedule.actions(self.rank) if self._from(a) not in (None, self.rank)])
        self.posted: dict[Action, tuple[dist.Work, Tensor]] = {}
        self.sent: list[_Sent] = []
        self.here: dict[Action, Tensor] = {}  # from one stage of this rank to another
        self._post()

    def receive(self, action: Action) -> Tensor | None:
        """Wait for the message that an action needs and return it; None if it needs none."""
        peer = self._from(action)
        if peer is None or peer == self.rank:
            return self.here.pop(_neutral(action), None)
        self._post()
        work, tensor = self.posted.pop(_neutral(action))
        work.wait()
        # Before it wrote this, the sender had read all that it needed: those tensors of ours are free to go.
        reached = self.turn[_neighbour(action, -1)]
        for sent in [s for s in self.sent if s.peer == peer and self.turn[s.reader] <= reached]:
            sent.work.wait()
            self.sent.remove(sent)
        return tensor

    def send(self, action: Action, result: Tensor | None) -> None:
        """Let the result of an action leave for the stage that waits for it, if there is one."""
        reader = _neighbour(action, +1)
        if action.kind == "W" or not 0 <= reader.stage <= self.last:
            return
        peer = self.schedule.placement[reader.stage]
        if peer == self.rank:
            self.here[reader] = result
            return
        tensor = result.contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=self._tag(reader))
        self.sent.append(_Sent(peer, reader, work, tensor))

    def close(self) -> None:
        """Wait until all that was sent has arrived."""
        for sent in self.sent:
            sent.work.wait()
        self.sent.clear()

    def _from(self, action: Action) -> int | None:
        """Return the rank whose message an action needs, None if it needs none."""
        writer = _neighbour(action, -1)
        if action.kind == "W" or not 0 <= writer.stage <= self.last:
            return None
        return self.schedule.placement[writer.stage]

    def _post(self) -> None:
        if action := next(self.coming, None):
            tensor, reader = self.empty(action.microbatch), _neutral(action)
            work = dist.irecv(tensor, group=self.group, group_src=self._from(action), tag=self._tag(reader))
            self.posted[reader] = work, tensor

    def _tag(self, reader: Action) -> int:
        direction = int(reader.kind == "F")
        return (direction * (self.last + 1) + reader.stage) * self.schedule.num_microbatches + reader.microbatch


def _neutral(action: Action) -> Action:
    """Name the input half as the full backward: who sends the gradient need not know which it is."""
    return action if action.kind == "F" else action._replace(kind="B")


def _neighbour(action: Action, step: int) -> Action:
    """Return the same micro-batch's action on the next stage in the direction of travel, or on the one before."""
    stage = action.stage + (step if action.kind == "F" else -step)
    return _neutral(action)._replace(stage=stage)
