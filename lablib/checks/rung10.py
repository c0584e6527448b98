"""The checks of rung 10: a ring from exchanges, one fast at every size, DDP's hook for several hosts, and a fault to find.

The ranks of the first two are threads that run one at a time, each to its next exchange, so a check sees at once when all
wait. Each rank's numbers are times another power of 100, or of 16: a sum's digits say whose are in it. The rest is on real ranks.
"""

from __future__ import annotations

import collections
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_pg_count
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.communication import chunk_sizes, collective_time, traffic
from lablib.checks.judging import NEW, Wrong, agreed, ask_ranks, by_name, check, chosen, close, on_ranks, refuse, whole
from lablib.launch.measure import CommEvent, record_comms
from lablib.launch.ranks import Endless, Turns

__all__ = ["Job", "fast_all_reduce", "find_fault", "make_hook", "ring_all_reduce", "told"]


# --- a ring from exchanges ----------------------------------------------------------------------------------

#: Ranks and elements: even, odd, fewer elements than ranks, two ranks, and one.
_CASES = ((4, 8), (3, 10), (5, 7), (6, 31), (4, 3), (2, 9), (1, 5))
_BASE = 100
#: Functions that say who sends what, or which algorithm is faster.
_LENT = {"algorithm_rounds", "ring_states", "fastest_algorithm", "crossover", "_reduce_scatter", "_all_gather"}


class _Message(NamedTuple):
    source: int
    target: int
    elements: int


class World(Turns):
    """Ranks whose only tool is an exchange: send to one rank while receiving from another."""

    def __init__(self, ranks: int, latency: float = 0.0, bandwidth: float = math.inf):
        super().__init__(ranks)
        self.latency, self.bandwidth, self.clock = latency, bandwidth, [0.0] * ranks
        self.messages: list[_Message] = []
        self.mail: dict[tuple[int, int], collections.deque] = collections.defaultdict(collections.deque)
        self.waits: dict[int, int] = {}  # a rank, and whose message it needs

    def able(self) -> list[int]:
        """Return who waits for no message, or whose message has come."""
        left = [rank for rank in range(self.ranks) if rank not in self.done]
        return [r for r in left if r not in self.waits or self.mail[self.waits[r], r]]

    def run(self, act: Callable[[int, Callable[..., None]], Any]) -> None:
        """Run `act(rank, exchange)` on every rank to its end; raise what a rank raised first."""
        try:
            ended = self.play(lambda rank: act(rank, functools.partial(self._exchange, rank)))
        except Endless as endless:
            raise Wrong(str(endless)) from None
        if not ended:
            raise Wrong("The ranks wait for each other for ever: what a rank receives in a step, another must send to it, "
                        "as in a ring, where each sends to its right neighbour and receives from its left one.")  # fmt: skip
        if any(self.mail.values()):
            raise Wrong("A message was sent that nobody received: a rank must receive what goes to it in a step.")

    def _exchange(self, rank: int, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        for name, array in (("send", send), ("receive", receive)):
            if not isinstance(array, Tensor):
                raise Wrong(f"exchange takes tensors, and {name} is of type {type(array).__name__}.")
            if array.dtype != torch.float64:
                raise Wrong(f"`row` holds float64, and {name} is {str(array.dtype).removeprefix('torch.')}: what is sent and "
                            "the room for what comes have the type of `row`, as empty_like makes them.")  # fmt: skip
        to, source = whole(to, "to"), whole(source, "source")
        for name, other in (("to", to), ("source", source)):
            if other not in range(self.ranks) or other == rank:
                raise Wrong(f"Rank {rank} of {self.ranks} calls exchange with {name}={str(other)[:9]}: " + (
                    "nobody sends to itself." if other == rank else "after a ring's last rank comes rank 0, and doubling has log2(n) rounds."))  # fmt: skip
        if len(self.messages) > 100 * self.ranks**2:
            raise Wrong(f"The ranks exchange and exchange: {len(self.messages):,} messages so far, and 2(n-1) = "
                        f"{2 * (self.ranks - 1)} steps are enough for {self.ranks} ranks.")  # fmt: skip
        self.messages.append(_Message(rank, to, send.numel()))
        done = self.clock[rank] + self.latency + 8 * send.numel() / self.bandwidth
        self.mail[rank, to].append((send.detach().clone().flatten(), done))
        self.waits[rank] = source
        self.pause(rank)
        del self.waits[rank]
        arrived, came = self.mail[source, rank].popleft()
        self.clock[rank] = max(done, came)
        if arrived.numel() != receive.numel():
            raise Wrong(f"Rank {rank} makes room for {receive.numel()} elements and {arrived.numel()} arrive: the room must be as long as "
                        f"what rank {source} sends then, which on a ring is another chunk than the one that goes.")  # fmt: skip
        receive.copy_(arrived.view(receive.shape))


@check(
    idea="Cut the array into as many chunks as there are ranks, and let each chunk collect one rank's numbers in every "
    "step.",
    section="Ring, tree and recursive doubling: four ranks by hand",
    line="In step k rank r sends chunk r - k and adds what arrives to chunk r - k - 1, both modulo n; in the second half "
    "the chunks are complete, so what arrives replaces.",
)
def ring_all_reduce(answer: Callable[..., Any]) -> str:
    """Judge `ring_all_reduce(row, rank, ranks, exchange)` by its sums, its steps, its messages and its bytes."""
    for ranks, numel in (*_CASES, (NEW.randint(3, 6), NEW.randint(32, 60))):
        world, (places, units, rows) = World(ranks), _drawn(ranks, numel, _BASE)
        world.run(lambda rank, exchange, n=ranks, rows=rows: answer(rows[rank], rank, n, exchange))
        _judge_sums(rows, units, world.messages, places)
        _judge_traffic(world.messages, ranks, numel)
    refuse("", _borrowed(answer))
    return (f"{len(_CASES) + 1} rings of 1 to 6 ranks, odd sizes too: 2(n-1) steps, 2(n-1)/n · S bytes from a rank on average, "
            "and no chunk longer than it must be.")  # fmt: skip


def _borrowed(answer: Callable[..., Any]) -> tuple[str, bool]:
    lent = {name.rpartition(".")[2] for name in getattr(answer, "called", ()) if name.startswith("lablib.")} & _LENT
    return f"The sums are right, and lablib's `{min(lent, default='')}` says how: work it out yourself", any(lent)


def _drawn(ranks: int, numel: int, base: int) -> tuple[list[int], Tensor, list[Tensor]]:
    """Return the power of the base on each rank, each element's unit, and the rows, their products."""
    places, units = NEW.sample(range(ranks), ranks), torch.tensor(NEW.choices(range(-99, 100, 2), k=numel)).double()
    return places, units, [float(base) ** place * units for place in places]


def _judge_sums(rows: list[Tensor], units: Tensor, messages: list[_Message], places: list[int]) -> None:
    ranks, numel = len(rows), len(units)
    case, shares = f"{ranks} ranks, {numel} elements", [(row / units).tolist() for row in rows]
    whole = sum(_BASE**rank for rank in range(ranks))

    def hold(value: Callable[[int], float], rel: float = 1e-6) -> bool:
        """Say whether rank r holds `value(r)` units in each element."""
        return all(close(share, value(rank), rel=rel) for rank, row in enumerate(shares) for share in row)

    if hold(lambda rank: whole, 1e-14):
        return
    how = "Messages went round, and `row` is unchanged on every rank" if messages else "Nothing was exchanged"
    strange = [
        (rank, element, value) for rank, row in enumerate(shares) for element, value in enumerate(row)
        if not math.isfinite(value) or value < 0 or abs(value - round(value)) > 1e-6 or value >= _BASE * whole
    ]  # fmt: skip
    refuse(
        case,
        ("The sums are rounded: `row` holds float64, and is to be added up in it", strange and hold(lambda rank: whole, 1e-2)),
        (f"{how}: add what arrives to `row` itself; a returned tensor is not looked at", hold(lambda rank: _BASE ** places[rank])),
        ("These are the means over the ranks; the sums are asked", hold(lambda rank: whole / ranks)),
        (lambda: "Element {1} of rank {0} is {2:g}, which is no sum of the ranks' numbers for it: see whether another chunk is added, or "
         "room that no message filled, and whether something is divided or rounded"
         .format(*strange[0][:2], rows[strange[0][0]][strange[0][1]]), strange),
    )  # fmt: skip
    # counts[rank][element][r]: how often rank r's number is in it.
    counts = [[[_digits(value, ranks)[place] for place in places] for value in row] for row in shares]
    complete = {element for row in counts for element, each in enumerate(row) if set(each) == {1}}
    missing, most = sorted(set(range(numel)) - complete), max(max(each) for row in counts for each in row)
    refuse(
        case,
        (f"A rank's number is up to {most} times in a sum: see whether what is to be added has room of its own to arrive in, and "
         "whether in the all-gather what arrives replaces what is there", most > 1),
        ("Every chunk is complete on some rank and not on all: after the reduce-scatter the complete chunks must go round once more, "
         "n - 1 steps, of which the first sends the rank's complete one, and `row` must keep what is complete and what arrives", not missing),
    )  # fmt: skip
    element, steps = missing[0], sum(m.source == 0 for m in messages)
    single = all(sum(each) == 1 for row in counts for each in row)
    found = [rank for rank, there in enumerate(counts[0][element]) if there]
    refuse(
        case,
        (f"Element {element} is still each rank's own: see whether a chunk holds it, and whether each chunk travels",
         all(sum(row[element]) == row[element][rank] == 1 for rank, row in enumerate(counts))),
        (f"No rank has the sum of element {element}: rank 0 takes {steps} steps, and 2(n-1) = {2 * (ranks - 1)} are needed, "
         "n - 1 to add up and n - 1 to pass on", steps < 2 * (ranks - 1)),
        ("In the end each element is one rank's number: in the first n - 1 steps what arrives is added to what is there, and passed "
         "on; then one chunk is complete on each rank, and just that one must leave first in the all-gather", single),
        (f"No rank has the sum of element {element}; on rank 0 it holds the numbers of ranks {found}. What a rank passes on in "
         "the next step is the chunk that has just arrived, with its own numbers added, and the all-gather begins with the complete one", True),
    )  # fmt: skip


def _digits(value: float, ranks: int, base: int = _BASE) -> list[int]:
    number = round(value) if math.isfinite(value) else 0
    return [number // base**rank % base for rank in range(ranks)]


def _judge_traffic(messages: list[_Message], ranks: int, numel: int) -> None:
    sent = [[m for m in messages if m.source == rank] for rank in range(ranks)]
    sizes, lengths = chunk_sizes(numel, ranks), [m.elements for m in messages]
    right = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    most, longest, enough, steps = sum(lengths), max(lengths, default=0), 2 * (ranks - 1), max(map(len, sent))
    refuse(
        f"{ranks} ranks, {numel} elements",
        ("The sums are right, but a rank sends to several others: on a ring it has one right neighbour",
         any(len({m.target for m in mine}) > 1 for mine in sent)),
        (f"The sums are right, but a rank takes {steps} steps and sends more than it must: 2(n-1) = {enough} steps are enough",
         steps > enough and most > right and longest <= max(sizes)),
        (f"The sums are right, but every chunk is padded to {max(sizes)} elements, so {most} travel where {right} do: let some "
         "chunks be one element shorter, as tensor_split does", most > right and set(lengths) == {max(sizes)} != set(sizes)),
        (f"The sums are right, but the ranks send {most} elements where {right} do, up to {longest} in a message: in a step one "
         "chunk leaves, and no more", most > right),
        ("The sums are right, but the array travels uncut: its chunks can travel at the same time", longest == numel > max(sizes)),
        (f"The sums are right, but rank 0 takes {len(sent[0])} steps and 2(n-1) = {enough} do: "
         + ("one message carries a chunk, and a second one costs α again" if all(lengths) else "all chunks travel at the same time"),
         any(len(mine) != enough for mine in sent)),
        (f"A chunk of {longest} elements travels where {max(sizes)} do: in every step all ranks wait for the longest chunk, so "
         "cut as evenly as can be", ranks > 1 and longest > max(sizes)),
    )  # fmt: skip


# --- fast at every size -------------------------------------------------------------------------------------


@check(
    idea="A ring sends few bytes in many messages, recursive doubling many bytes in few; α, W, n and S say which costs less.",
    section="Rounds and passes: the cost of every all-reduce",
    line="Compute both times, and where the ring's is larger swap the whole array with rank ^ 1, rank ^ 2, rank ^ 4 and so "
    "on, adding what comes.",
)
def fast_all_reduce(answer: Callable[..., Any], seed: int = 10) -> str:
    """Judge `fast_all_reduce(row, rank, ranks, exchange, latency, bandwidth)` by its sums and by the clock of its messages."""
    dice = random.Random(seed)
    for n, chance, far in ((4, dice, 12), (8, dice, 1.3), (2, NEW, 2), (8, dice, 12), (8, NEW, 1.04), (4, NEW, 1.04)):
        # The ring is faster from 8 α W on for 4 ranks, from 8.8 for 8, never for 2: far from that, and too near for one size.
        latency, elements, even = 10 ** chance.uniform(-6, -3), 5 * chance.randint(40, 80), 8.8 if n == 8 else 8
        for factor in (far, 1 / far):
            _judge_speed(answer, n, round(factor * even * elements), latency, 8 * elements / latency)
    refuse("", _borrowed(answer))
    return ("12 networks of 2, 4 and 8 ranks: few messages where latency decides, few bytes where bandwidth does, "
            "and between them the size at which the two cost the same.")  # fmt: skip


def _judge_speed(answer: Callable[..., Any], ranks: int, numel: int, latency: float, bandwidth: float) -> None:
    world, (places, units, rows) = World(ranks, latency, bandwidth), _drawn(ranks, numel, 16)
    world.run(lambda rank, exchange: answer(rows[rank], rank, ranks, exchange, latency, bandwidth))
    case = f"{ranks} ranks, {8 * numel} bytes, α = {latency:.2g} s, W = {bandwidth:.2g} bytes/s"
    shares, total = [value for row in rows for value in (row / units).tolist()], sum(16**rank for rank in range(ranks))
    if any(not torch.equal(row, total * units) for row in rows):
        counts = [_digits(value, ranks, 16) for value in shares]
        strange = [value for value in shares if value < 0 or value % 1 or value >= 16 * total]  # inf and NaN too
        refuse(
            case,
            ("`row` is unchanged: add what arrives to `row` itself, and return nothing",
             all(torch.equal(row, 16.0**place * units) for row, place in zip(rows, places, strict=True))),
            ("These are the means over the ranks; the sums are asked", all(close(value, total / ranks) for value in shares)),
            ("The sums are rounded: `row` holds float64",
             strange and all(close(value, total, rel=1e-2) or value == math.inf for value in shares)),
            ("An element is no sum of the ranks' numbers for it: see whether something is divided, rounded or never filled", strange),
            (f"A rank's number is up to {max(map(max, counts))} times in a sum: see whether what comes has room of its own, and each "
             "round another partner", any(max(each) > 1 for each in counts)),
            ("Some ranks' numbers are missing in the sums: k rounds of doubling bring those of 2^k, a ring all in its two halves", True),
        )  # fmt: skip
    longest, link = math.ceil(numel / ranks), {"bandwidth": bandwidth, "latency": latency}
    ring = collective_time("ring_all_reduce", 8 * longest * ranks, ranks, **link)  # of longest chunks
    doubling = collective_time("recursive_doubling_all_reduce", 8 * numel, ranks, **link)
    steps, rounds, took = 2 * (ranks - 1), ranks.bit_length() - 1, max(world.clock)
    slow, messages = took > 1.005 * min(ring, doubling), collections.Counter(m.source for m in world.messages)
    most, uncut = max(messages.values(), default=0), all(m.elements == numel for m in world.messages)
    refuse(
        f"{case}: {took:.3g} s, where {min(ring, doubling):.3g} s are enough",
        (f"Here latency decides: this pays α {most} times, where {rounds} would do", slow and most > rounds and doubling < ring),
        (f"Here bandwidth decides: each of {most} messages of a rank carries the whole array, where a ring sends {steps / ranks:g} "
         "times the array in all", slow and uncut and ring < doubling),
        ("The faster of ring and doubling takes less: who waits for whom, and how much does each message carry", slow),
    )  # fmt: skip


# --- DDP's hook for several hosts ---------------------------------------------------------------------------

_VIEW = ", a view whose memory DDP reads from the start: clone it"  # by as_strided
_LATE = " DDP waits for each hook's Future. All ranks must call each `new_group`, members or not, unless it has use_local_synchronization."
_RETURNS = "A hook returns a torch.futures.Future that holds the bucket's mean, as long as it, and here it returns {}."
_SIZES = (7, 12, 5, 9)  # of the parameters; in buckets of 33, 14 and 19: 2, 3 and 6 each leave some undivided


class _Weights(nn.Module):
    """A model whose gradient of each parameter's element k is k + 1 times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(size, dtype=torch.float64) for size in _SIZES)

    def forward(self, x: Tensor) -> Tensor:
        return sum((row * torch.arange(1, len(row) + 1) * x).sum() for row in self.rows)


class _Hooked(NamedTuple):
    """What a rank saw of a hook in three steps of DDP."""

    gradients: list[list[float]]  # of each step, the sum over ranks in each element's unit
    events: list[CommEvent]
    buckets: list[int]  # elements
    groups: list[int]  # before the first step, and after each
    borrowed: bool


def _hook_rank(answer: Callable[..., Any], per_host: int, places: list[int]) -> _Hooked:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hook, problem, events, buckets = answer(per_host), [], [], []
    try:
        DistributedDataParallel(_Weights()).register_comm_hook(None, hook)  # looks at names
    except Exception as no:
        raise Wrong(f"make_hook returns a hook(state, bucket), with these names; DDP refuses yours: {no!r}.") from None

    def watched(bucket: dist.GradBucket) -> Any:
        buckets.append(bucket.buffer().numel())
        with record_comms() as log:
            future = hook(None, bucket)
        events.extend(log.events)
        held = future if not hasattr(future, "then") else future.value() if future.done() else bucket.buffer()
        view = isinstance(held, Tensor) and held.storage_offset() > 0
        if held is future or not isinstance(held, Tensor) or held.numel() != buckets[-1] or view:
            what = f"{type(held).__name__}{list(getattr(held, 'shape', '')) or ''}{_VIEW * view}"
            problem.append(what if held is future else f"one with {what}")
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(_Weights(), bucket_cap_mb=1e-4)
    model.register_comm_hook(None, lambda _, bucket: watched(bucket))
    gradients, groups = [], [get_pg_count()]
    for step in range(3):
        model.zero_grad()
        model(torch.tensor(float(_BASE) ** places[(rank + step) % ranks], dtype=torch.float64)).backward()
        of_units = [row.grad / torch.arange(1, len(row) + 1) for row in model.module.rows]
        gradients.append((ranks * torch.cat(of_units)).tolist())
        groups.append(get_pg_count())
    if problem:
        raise Wrong(_RETURNS.format(problem[0]))
    borrowed = any("toys.collectives" in name for name in getattr(answer, "called", ()))
    return _Hooked(gradients, events, buckets, groups, borrowed)


@check(
    kind="work",
    idea="Numbers of one host can be added up before they leave it, and each rank of a host can carry a part of the sum.",
    section="The hierarchical all-reduce: through all NICs of a node",
    line="Pad the bucket, reduce-scatter it over the ranks of the host, all-reduce the chunk over the ranks with this place "
    "on all hosts, all-gather over the host, and divide by all ranks.",
)
def make_hook(answer: Callable[..., Any]) -> str:
    """Judge `make_hook(ranks_per_host)` in DDP on real ranks: its means, what crosses between hosts, and through whom."""
    for ranks, per_host in ((6, 3), (4, 2), (6, 2)):
        case, places = f"{ranks // per_host} hosts of {per_host} ranks", NEW.sample(range(ranks), ranks)
        try:
            results = on_ranks(_hook_rank, ranks, answer, per_host, places)
        except Wrong as wrong:
            said = f"{wrong}{_LATE * ('had not come back' in str(wrong))}"
            no_tensor = any(text in said for text in ("Unable to cast", "a proper Tensor", "isPyObject"))  # DDP's words
            raise Wrong(_RETURNS.format("one with no tensor for DDP") if no_tensor else said) from None
        _judge_means(results, places, per_host, case)
        _judge_crossing(results, ranks, per_host, case)
    return ("DDP on 4 and on 6 ranks: one mean, and what leaves a host is 2(m-1)/m of the gradients, an equal part from each of "
            "its ranks.")  # fmt: skip


def _judge_means(results: list[_Hooked], places: list[int], per_host: int, case: str) -> None:
    ranks, whole_sum = len(places), sum(_BASE**place for place in places)
    steps = [(rank, *step) for rank, result in enumerate(results) for step in enumerate(result.gradients)]
    values = [(rank, value) for rank, _, of_step in steps for value in of_step]
    own = [(rank, [(places.index(place) - step) % ranks for place, n in enumerate(_digits(value, ranks)) if n])
           for rank, step, of_step in steps for value in of_step]  # fmt: skip

    def hold(factor: float, rel: float = 1e-9) -> bool:
        return all(math.isfinite(value) and close(value, factor * whole_sum, rel=rel) for _, value in values)

    if hold(1):
        return
    summed = [max(_digits(value, ranks)) for (_, value), (r, found) in zip(values, own, strict=True) if found != [r]]
    hosts, most = ranks // per_host, max(summed, default=0)
    strange = [v for _, v in values if not math.isfinite(v) or v < 0 or abs(v - round(v)) > 1e-3]
    refuse(
        case,
        ("These are sums, and DDP wants the mean: a hook divides by the number of all ranks itself", hold(ranks)),
        (f"This is {hosts} times the mean, as of sums that are divided by the ranks of a host only", hold(hosts) and hosts > 1),
        (f"This is {per_host} times the mean, as of sums that are divided by the number of hosts only", hold(per_host)),
        (f"This is {values[0][1] / whole_sum:.3g} times the mean over all ranks", hold(values[0][1] / whole_sum)),
        ("The gradients are rounded on their way: the bucket's type is to be kept", strange and (hold(1, 2e-2) or hold(ranks, 2e-2))),
        ("Each rank has its own gradient still: the Future must hold the bucket's mean",
         all(found == [rank] for rank, found in own)),
        ("Only the ranks of a host are added up: nothing came from the other hosts",
         all({r // per_host for r in found} == {rank // per_host} for rank, found in own)),
        ("Only ranks with one place on their hosts are added up: the others of the host are missing",
         all({r % per_host for r in found} == {rank % per_host} for rank, found in own)),
        ("An element holds no mean of the ranks' numbers for it: see whether another chunk is there, or room that nobody filled, what it "
         "is divided by, and whether one tensor is handed out for two buckets, which DDP reads when backward has ended", strange),
        (f"A rank's gradient counts up to {most} times as much as in the mean: see whether it is added again, or divided by too little", most > 1),
        (f"Ranks are missing in some means, and buckets have {' or '.join(map(str, sorted(set(results[0].buckets))))} elements: all take "
         "part, with what is left over when a bucket is cut; bring each chunk to its place, and wait before you use a result", True),
    )  # fmt: skip


def _judge_crossing(results: list[_Hooked], ranks: int, per_host: int, case: str) -> None:
    hosts, events = ranks // per_host, [(rank, event) for rank, result in enumerate(results) for event in result.events]
    # A bucket may be padded to the next multiple of the number of ranks, and no further.
    padded = 8 * sum(math.ceil(size / ranks) * ranks for size in results[0].buckets)
    crosses, stays = [0.0] * ranks, [0.0] * ranks
    for rank, event in events:
        out = _out_of_the_host(event, rank, per_host)
        crosses[rank] += out
        stays[rank] += event.sent - out
    least, within = 2 * (hosts - 1) / hosts * padded, 2 * (per_host - 1) / per_host * padded
    of_host = [sum(crosses[first : first + per_host]) for first in range(0, ranks, per_host)]
    flat = any(e.op == "all_reduce" and e.group_size == ranks and e.bytes > 99 for _, e in events)  # more than a flag
    several = f"leave a host, where {least:.0f} do"
    refuse(
        case,
        ("The means are right, and come from `lablib`: make the groups and call the collectives of `torch.distributed` yourself",
         any(result.borrowed for result in results)),
        ("The means are right, but made of sends and receives: call collectives on groups, for which NCCL chooses the algorithm, "
         "and switches that add where there are any", {event.op for _, event in events} & {"send", "recv"}),
        ("The means are right, but the recorder saw nothing cross: finish inside the hook, in its own thread, before it returns",
         max(crosses) == 0),
        (f"The means are right, but one all-reduce over all ranks knows no hosts: {max(of_host):.0f} bytes {several}",
         flat and max(of_host) > 1.05 * least),
        (f"The means are right, but {max(of_host):.0f} bytes {several}: first add up inside a host, let each rank all-reduce its "
         "chunk of the sum only, and pad a bucket to a whole number for each rank at most", max(of_host) > 1.05 * least),
        (f"The means are right, but one rank of a host sends {max(crosses):.0f} bytes to others, where {least / per_host:.0f} from "
         "each would do: the others wait for its NIC", max(crosses) > 1.05 * least / per_host),
        (f"The means are right and few bytes cross, but inside a host a rank sends {max(stays):.0f} bytes where "
         f"{within:.0f} do: before crossing it needs its chunk of the sum, not all of it, and then the others'", max(stays) > 1.05 * within),
        (f"The hook makes {results[0].groups[-1] - results[0].groups[1]} groups more in two steps: a group is made once, in `make_hook`",
         any(result.groups[-1] > result.groups[1] for result in results)),
    )  # fmt: skip


def _out_of_the_host(event: CommEvent, rank: int, per_host: int) -> float:
    """Return the bytes that a rank sends to other hosts: rings in the order of ranks carry all but an all-to-all."""
    hosts = [other // per_host for other in event.ranks]
    place = event.ranks.index(rank)
    if event.op == "all_to_all":
        return event.sent * sum(host != hosts[place] for host in hosts) / max(1, len(hosts) - 1)
    return event.sent * (hosts[(place + 1) % len(hosts)] != hosts[place])


# --- a job with a fault -------------------------------------------------------------------------------------

_WIDTH, _LAYERS, _RANKS = 6, 5, 4


@dataclass(frozen=True)
class Job:
    """A training job of so many steps on four ranks, with a fault or without.

    In one process it trains on the batches of all four.
    """

    seed: int
    steps: int = 6

    def model(self) -> nn.Sequential:
        """Return the model as it is before the first step: layers of one shape."""
        generator = torch.Generator().manual_seed(self.seed)
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
        for p in model.parameters():
            nn.init.normal_(p, std=_WIDTH**-0.5, generator=generator)
        return model

    def step(self, model: nn.Module, step: int) -> float:
        """Take one step: forward, backward, the mean of the gradients by `dist.all_reduce`, update. Return the loss."""
        x, y = torch.randn(2, 4 * _RANKS, _WIDTH, generator=torch.Generator().manual_seed(100 * self.seed + step))
        if dist.is_initialized():
            x, y = (part.chunk(_RANKS)[dist.get_rank()] for part in (x, y))
        loss = (model(x) - y).square().mean()
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        if dist.is_initialized():
            self._average(list(model.parameters()), kept, step)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss.item()

    def _average(self, params: list[nn.Parameter], kept: list[Tensor], step: int) -> None:
        kind, rank, when, layers = _fault(self.seed, self.steps)
        here = (rank, when) == (dist.get_rank(), step)
        order, early = list(range(_LAYERS))[::-1], {}
        if here and kind == "order":
            a, b = map(order.index, layers)
            order[a], order[b] = order[b], order[a]
        if here and kind == "before wait":
            early = {i: params[i].grad.clone() for i in layers}
        if here and kind == "last step":
            for i in layers:
                params[i].grad = kept[i].clone()
        works = [dist.all_reduce(params[i].grad, async_op=True) for i in order]
        for work in works:
            work.wait()
        for i, p in enumerate(params):
            p.grad = early.get(i, p.grad) / _RANKS


def _fault(seed: int, steps: int) -> tuple[str, int, int, list[int]]:
    """Return what is wrong with a job, and the rank, the step and the layers."""
    dice = random.Random(f"rung 10, {seed}")
    kind = ("order", "last step", "before wait", "")[seed % 4]
    layers = dice.sample(range(_LAYERS), 2 if kind == "order" else 1)
    return kind, dice.randrange(_RANKS), dice.randrange(2, steps), sorted(layers)


def told(job: Job) -> tuple[int, str]:
    """Return in which step something was wrong with a job, and what; a healthy job's step means nothing."""
    kind, rank, step, layers = _fault(job.seed, job.steps)
    names = " and ".join(f"{i}.weight" for i in layers)
    return step, {
        "order": f"rank {rank} summed {names} in the other order than the others",
        "last step": f"rank {rank} put the gradient of the step before into the sum of {names}",
        "before wait": f"rank {rank} took {names} before its sum had come",
        "": "nothing",
    }[kind]


def _with_its_own(job: Job, sums: Callable = dist.all_reduce) -> Job:
    dist.all_reduce = sums  # an answer may have put another in its place
    return job


@check(
    kind="fault",
    idea="After a step all ranks hold the mean of what each of them computed; what goes into a sum and what comes out of it "
    "can both be seen.",
    section="What breaks in practice: hangs, wrong interfaces, slow links",
    line="Keep each layer's gradient in a hook, put a function of yours in the place of dist.all_reduce that says which of them "
    "it is given, and compare both that and the gradients after the step over all ranks.",
)
def find_fault(answer: Callable[[Job], Any], seed: int = 3) -> str:
    """Judge `find_fault(job)`, which runs on each of four ranks, on six jobs: step, rank and layers, or None."""
    kinds = zip([random.Random(f"jobs {seed}")] * 3 + [NEW] * 3, (0, 1, 2, 3, 0, 1), strict=True)
    jobs = [Job(4 * dice.randrange(10**6) + kind) for dice, kind in kinds]
    NEW.shuffle(jobs)
    found = ask_ranks(answer, _RANKS, jobs, f"{__name__}.told", make=_with_its_own)
    for number, (job, said) in enumerate(zip(jobs, found, strict=True), 1):
        _judge_finding(agreed([_said(one) for one in said]), job, f"job {number} of {len(jobs)}")
    return ("Six jobs. In two a rank summed two layers of one shape in the other order: operation, bytes and group of every call agree, "
            "so TORCH_DISTRIBUTED_DEBUG=DETAIL finds nothing, and numbers of two layers are added up. In two a buffer still held the step "
            "before, in one it was read before wait, and one was healthy.")  # fmt: skip


def _said(got: Any) -> tuple[int, int, set[str]] | None:
    if got is None or (isinstance(got, tuple) and not got):
        return None
    otherwise = "Return step, rank and the names of the layers whose mean is wrong, or None."
    found = by_name(got, "step", "rank", "layers", otherwise=otherwise)
    step, rank = (whole(found[name], f"The {name} of a fault") for name in ("step", "rank"))
    return step, rank, chosen(found["layers"], [f"{i}.weight" for i in range(_LAYERS)], otherwise)


def _judge_finding(said: tuple[int, int, set[str]] | None, job: Job, case: str) -> None:
    kind, rank, step, layers = _fault(job.seed, job.steps)
    names = {f"{i}.weight" for i in layers}
    refuse(
        case,
        ("This job is healthy: what differs by its last bits, as sums in another order do, is no fault", said is not None and not kind),
        ("This job is not healthy, though every rank calls the same operations with as many bytes on the same group: look at the "
         "numbers that go in and that come out", said is None and kind),
    )  # fmt: skip
    if said is None:
        return
    refuse(
        case,
        (f"Step {said[0]} is as it should be: steps count from 0, and sums in another order differ in their last bits", said[0] < step),
        (f"Something is wrong before step {str(said[0])[:9]}: steps count from 0, and the first wrong one is asked", said[0] > step),
        (f"The step is right, but the layers are not: you name {', '.join(sorted(said[2])) or 'none'}, and one has the right mean, or "
         "one is missing", said[2] != names),
        (f"Step and layers are right, but not rank {str(said[1])[:9]}: see what each rank puts into a sum, and what it takes from it",
         said[1] != rank),
    )  # fmt: skip
