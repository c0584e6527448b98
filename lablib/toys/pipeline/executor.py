"""Pipeline parallelism: one executor that runs any schedule of `lablib.calc.schedules` on real ranks.

    stages = split_stages(model, num_stages=2)
    pipeline = PipelineExecutor(stages, schedule("1f1b", p=2, m=8), group)
    loss = pipeline.step(tokens_BT.chunk(8))    # on the rank of the last stage; None elsewhere
    optimizer.step()                            # of pipeline.parameters(), this rank's

The schedule is data, and the executor knows none by name: a rank goes through its list, waits for the message that
an action needs (`Mailbox`), computes (`lablib.toys.pipeline.stages`), and lets the result leave.

Papers: GPipe (1811.06965), 1F1B and interleaving (2104.04473), Zero Bubble (2401.10241).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.schedules import Action, Event, Schedule, Timeline, validate
from lablib.toys import transformer
from lablib.toys.pipeline.stages import DeferWeights, Stage


class _Held(NamedTuple):
    """Tensors of a micro-batch that a stage keeps from its forward to the end of its backward."""

    x: Tensor
    y: Tensor | None  # the loss on the last stage; None after the input half, which frees the graph
    deferred: DeferWeights | None


class PipelineExecutor:
    """Run the stages of this rank by a schedule.

    A step sends one message per boundary between ranks, micro-batch and direction, and one more each way if the first
    and the last stage share a weight (tied embeddings): each rank has a copy of it, and both get the same gradient,
    the sum of the two. The last stage's rank takes over the first one's value when the executor is made.

    Args:
        stages: All stages of the model, in order of depth; those that the schedule puts on this rank are kept.
        schedule: What every rank does, in order. Of two overlapped actions the forward runs first.
        group: The process group of the pipeline, on a backend where a send and a receive between two ranks pass each
            other, as gloo's do and NCCL's do not; None is all ranks.
        loss: Returns the mean loss of a micro-batch from the last stage's output and the windows tokens_BT.

    Attributes:
        events: The last step: every action of this rank with its start and end, in `time.perf_counter()` seconds.
        peak_in_flight: Most micro-batches held at once in the last step, from F until B or W; one of v stages on a
            rank counts 1/v, as in `lablib.calc.schedules.peak_activations`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = transformer.loss,
    ) -> None:
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group; build only on the group's ranks")
        if schedule.num_ranks != ranks or schedule.num_stages != len(stages):
            raise ValueError(
                f"{schedule.name} is for {schedule.num_ranks} ranks and {schedule.num_stages} stages; "
                f"the group has {ranks} ranks, and there are {len(stages)} stages"
            )
        validate(schedule)
        self.schedule, self.group, self.loss = schedule, group, loss
        self.hidden, self.dtype = stages[0].config.hidden, next(stages[0].parameters()).dtype
        self.stages = {number: stages[number] for number in schedule.stages_of(self.rank)}
        self.actions = schedule.actions(self.rank)
        self.in_halves = {(a.stage, a.microbatch) for a in self.actions if a.kind == "W"}
        self.events: list[Event] = []
        self.peak_in_flight = 0.0
        self.tied = self._find_tied(stages[0], stages[-1])

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages, a tied one once."""
        return list(nn.ModuleList(self.stages.values()).parameters())

    def step(self, microbatches: Sequence[Tensor]) -> Tensor | None:
        """Run forward and backward of all micro-batches, and add the gradients of the batch's mean loss to `.grad`.

        Args:
            microbatches: Windows tokens_BT, one tensor a micro-batch, the same on every rank; B may differ, T may not.

        Returns:
            The mean loss over all windows on the rank of the last stage, None on the others.
        """
        if len(microbatches) != (m := self.schedule.num_microbatches):
            raise ValueError(f"{len(microbatches)} micro-batches for a schedule of num_microbatches={m}")
        if len(lengths := {tokens_BT.shape[1] for tokens_BT in microbatches}) > 1:
            raise ValueError(f"micro-batches of T={sorted(lengths)}: a mean of windows is no mean of tokens; use one T")
        if empty := [k for k, tokens_BT in enumerate(microbatches) if not len(tokens_BT)]:
            raise ValueError(f"micro-batch {empty[0]} has no windows; use fewer micro-batches, or more windows")
        if not torch.is_grad_enabled():
            raise RuntimeError("a step runs backward too; call it outside of torch.no_grad()")
        if self.in_halves and torch.is_autocast_enabled(microbatches[0].device.type):
            raise RuntimeError(
                f"{self.schedule.name} keeps products of one dtype for later, and autocast mixes two; "
                "convert the model to bf16, or use a schedule without W, such as 1f1b"
            )
        self.microbatches, self.windows = microbatches, sum(map(len, microbatches))
        self.held: dict[tuple[int, int], _Held] = {}
        self.losses: list[Tensor] = []
        self.events, peak = [], 0
        with self._summing_tied():
            mail = Mailbox(self.schedule, self.group, self._empty)
            for action in self.actions:
                message = mail.receive(action)
                start = time.perf_counter()
                result = self._run(action, message)
                self.events.append(Event(self.rank, action, start, time.perf_counter()))
                mail.send(action, result)
                peak = max(peak, len(self.held))
            mail.close()
        self.peak_in_flight = peak / max(1, len(self.stages))
        return torch.stack(self.losses).sum() if self.losses else None

    def timeline(self) -> Timeline:
        """Return the last step of all ranks in seconds from its first start; every rank must call it.

        The ranks must share a clock, as those on one machine do.
        """
        ranks: list[list[Event]] = [[]] * self.schedule.num_ranks
        dist.all_gather_object(ranks, self.events, group=self.group)
        zero = min(event.start for events in ranks for event in events)
        moved = [tuple(e._replace(start=e.start - zero, end=e.end - zero) for e in events) for events in ranks]
        return Timeline(self.schedule, tuple(moved), ())

    def _run(self, action: Action, message: Tensor | None) -> Tensor | None:
        """Compute one action and return what the neighbouring stage waits for."""
        kind, stage, k = action
        if kind == "F":
            return self._forward(stage, k, message)
        x, y, deferred = self.held.pop((stage, k))
        if kind == "W":
            deferred.run()
            return None
        if y.requires_grad:  # not if all of the first stage is frozen
            with deferred or contextlib.nullcontext():  # recomputation runs linear layers again
                y.backward(message)  # on the last stage y is the loss, which needs no message
        if (stage, k) in self.in_halves:
            self.held[stage, k] = _Held(x, None, deferred)
        return x.grad

    def _forward(self, stage: int, k: int, message: Tensor | None) -> Tensor:
        tokens_BT = self.microbatches[k]
        x = tokens_BT[:, :-1] if stage == 0 else message.requires_grad_()
        deferred = DeferWeights() if (stage, k) in self.in_halves else None
        with deferred or contextlib.nullcontext():
            y = self.stages[stage](x)
        if stage == self.schedule.num_stages - 1:
            # Weighted by its share of the windows: then the losses add up to the mean of the batch, as gradients do.
            y = self.loss(y, tokens_BT) * (len(tokens_BT) / self.windows)
            self.losses.append(y.detach())
        self.held[stage, k] = _Held(x, y, deferred)
        return y.detach()

    def _empty(self, k: int) -> Tensor:
        """Return a tensor for what a stage reads of micro-batch k, x_BSH, or for its gradient."""
        tokens_BT = self.microbatches[k]
        batch, seq = len(tokens_BT), tokens_BT.shape[1] - 1
        return torch.empty(batch, seq, self.hidden, dtype=self.dtype, device=tokens_BT.device)

    def _find_tied(self, first: Stage, last: Stage) -> nn.Parameter | None:
        """Return the weight of which this rank and another one have a copy, made equal; None if there is none."""
        shared = [p for p in last.parameters() if any(p is q for q in first.parameters())]
        ends = self.schedule.placement[0], self.schedule.placement[-1]
        if not shared or ends[0] == ends[1] or self.rank not in ends:
            return None
        self.other_end = ends[1] if self.rank == ends[0] else ends[0]
        if self.rank == ends[0]:
            dist.send(shared[0].detach().contiguous(), group=self.group, group_dst=self.other_end)
        else:
            message = torch.empty_like(shared[0].detach(), memory_format=torch.contiguous_format)
            dist.recv(message, group=self.group, group_src=self.other_end)
            shared[0].detach().copy_(message)
        return shared[0]

    @contextlib.contextmanager
    def _summing_tied(self) -> Iterator[None]:
        """Give both copies of a tied weight the sum of what the step adds to their gradients."""
        if self.tied is None or not self.tied.requires_grad:
            yield
            return
        before, self.tied.grad = self.tied.grad, None  # a sum of earlier steps must not be summed again
        yield
        mine = self.tied.grad
        theirs = torch.empty_like(mine, memory_format=torch.contiguous_format)
        work = dist.isend(message := mine.contiguous(), group=self.group, group_dst=self.other_end)
        dist.recv(theirs, group=self.group, group_src=self.other_end)
        work.wait()
        del message  # it must live until it has left
        mine += theirs  # in place, so that it lies as the weight does
        self.tied.grad = mine if before is None else before.add_(mine)


# --- messages between stages ----------------------------------------------------------------------------------------


class _Sent(NamedTuple):
    peer: int
    reader: Action
    work: dist.Work
    tensor: Tensor


class Mailbox:
    """The messages that one rank sends and receives in one step of a schedule: activations on, gradients back.

    Three habits keep the ranks from waiting for each other for ever, or longer than they must:

        - a send never blocks: it runs beside the computation, and its tensor is kept until it has arrived;
        - a receive is posted one ahead: while the rank waits or works, the next message can already come in;
        - a message has a tag of its own, so that messages need not arrive in the order in which they were sent.

    A message is named by the action that reads it: `1F0` is what the forward of micro-batch 0 on stage 1 waits for, and
    `0B0` the gradient that the backward on stage 0 waits for, in one piece or in halves.

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
