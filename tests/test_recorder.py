"""The recorder agrees with counts by hand, and with CommDebugMode wherever both can see."""

import threading
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lablib.calc.torch_versions import torch_facts
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys import torch_names as collective_names

N = 3
X = 12 * 4  # bytes of the twelve float32 that every rank holds


def pieces(numbers=4):
    return [torch.ones(numbers) for _ in range(N)]


def all_to_all_of_lists():
    """The list form where gloo has it; the other where it must refuse."""
    if torch_facts(torch.__version__).gloo_has_all_to_all:
        dist.all_to_all(pieces(), pieces())
    else:
        dist.all_to_all_single(torch.ones(12), torch.ones(12))


def by_its_old_name(name, *args):
    """torch 2.13 warns at these names; other people's code will use them for long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(dist, name)(*args)


def at_root(values):
    return values if dist.get_rank() == 0 else None


# (call, operation, bytes of the whole array, bytes sent by ranks 0, 1, 2, messages sent by them)
COLLECTIVES = {
    "all_reduce": (lambda x: dist.all_reduce(x), "all_reduce", X, [64, 64, 64], [4, 4, 4]),
    "async": (lambda x: dist.all_reduce(x, async_op=True).wait(), "all_reduce", X, [64, 64, 64], [4, 4, 4]),
    "bf16": (lambda x: dist.all_reduce(x.bfloat16()), "all_reduce", X // 2, [32, 32, 32], [4, 4, 4]),
    "all_gather": (lambda x: dist.all_gather(pieces(12), x), "all_gather", 3 * X, [96] * 3, [2] * 3),
    "all_gather_single": (
        lambda x: collective_names.all_gather(torch.ones(36), x),
        "all_gather", 3 * X, [96] * 3, [2] * 3,
    ),
    "reduce_scatter": (
        lambda x: dist.reduce_scatter(torch.ones(4), pieces()),
        "reduce_scatter", X, [32] * 3, [2] * 3,
    ),
    "all_gather_into_tensor": (
        lambda x: by_its_old_name("all_gather_into_tensor", torch.ones(36), x),
        "all_gather", 3 * X, [96] * 3, [2] * 3,
    ),
    "reduce_scatter_single": (
        lambda x: collective_names.reduce_scatter(torch.ones(4), x),
        "reduce_scatter", X, [32] * 3, [2] * 3,
    ),
    "reduce_scatter_tensor": (
        lambda x: by_its_old_name("reduce_scatter_tensor", torch.ones(4), x),
        "reduce_scatter", X, [32] * 3, [2] * 3,
    ),
    "all_to_all": (lambda x: all_to_all_of_lists(), "all_to_all", X, [32] * 3, [2] * 3),
    "all_to_all_single": (lambda x: dist.all_to_all_single(torch.ones(12), x), "all_to_all", X, [32] * 3, [2] * 3),
    "uneven all_to_all_single": (  # rank r gives 6 numbers to rank 0 and 3 to each other
        lambda x: dist.all_to_all_single(
            torch.ones(18 if dist.get_rank() == 0 else 9), x, [6 if dist.get_rank() == 0 else 3] * 3, [6, 3, 3]
        ),
        "all_to_all", X, [24, 36, 36], [2] * 3,
    ),
    "broadcast": (lambda x: dist.broadcast(x, 1), "broadcast", X, [0, 48, 48], [0, 1, 1]),
    "reduce": (lambda x: dist.reduce(x, 1), "reduce", X, [48, 0, 48], [1, 0, 1]),
    "gather": (lambda x: dist.gather(x, at_root(pieces(12))), "gather", 3 * X, [0, 48, 48], [0, 1, 1]),
    "scatter": (lambda x: dist.scatter(x, at_root(pieces(12))), "scatter", 3 * X, [96, 0, 0], [2, 0, 0]),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    """Every collective above, each in a log of its own, in one start of three ranks."""

    def work(calls):
        logs = {}
        for name, call in calls.items():
            with record_comms() as log:
                call(torch.ones(12))
            logs[name] = (log.calls, log.bytes, log.ring_bytes_sent(), log.messages, log.events[0].group_size)
        return logs

    return run_ranks(work, N, {name: case[0] for name, case in COLLECTIVES.items()})


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_counted_as_by_hand(recorded, name):
    _, op, size, sent, messages = COLLECTIVES[name]
    for rank in range(N):
        assert recorded[rank][name] == ({op: 1}, {op: size}, sent[rank], Counter({op: messages[rank]}), N)


def test_a_barrier_is_no_traffic_and_a_closed_log_stays_closed():
    def work():
        with record_comms() as log:
            dist.barrier()
        dist.all_reduce(torch.ones(1))
        with record_comms(log):
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(4))
        times = [event.time for event in log.events]
        return log.calls, log.bytes, times == sorted(times) and times[0] > 0

    assert run_ranks(work, 2) == [({"all_reduce": 2}, {"all_reduce": 24}, True)] * 2


def test_send_and_recv_are_counted_as_by_hand():
    def work():
        rank, x, y = dist.get_rank(), torch.ones(5), torch.zeros(5)
        with record_comms() as log:
            dist.send(x, 1) if rank == 0 else dist.recv(y, 0)  # rank 0 to rank 1
            (dist.isend(x, 0) if rank == 1 else dist.irecv(y, 1)).wait()  # and back
            dist.send(x, 1) if rank == 0 else dist.recv(y)  # from any source
            both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
            for request in dist.batch_isend_irecv(both):
                request.wait()
        return log.calls, log.messages, log.bytes, log.ring_bytes_sent()

    first, second = run_ranks(work, 2)
    assert first == ({"send": 3, "recv": 2}, {"send": 3, "recv": 0}, {"send": 60, "recv": 40}, 60)
    assert second == ({"recv": 3, "send": 2}, {"send": 2, "recv": 0}, {"recv": 60, "send": 40}, 40)


def test_a_subgroup_counts_with_its_own_size():
    def work():
        group = dist.new_group([0, 2])
        with record_comms() as log:
            if dist.get_rank() != 1:
                dist.all_reduce(torch.ones(10), group=group)
        return [(event.group_size, event.sent) for event in log.events]

    assert run_ranks(work, 3) == [[(2, 40.0)], [], [(2, 40.0)]]


def test_another_thread_is_counted_when_it_opens_the_log_itself():
    def work():
        def send():
            dist.all_reduce(torch.ones(1))

        def send_recorded():
            with record_comms(log):
                dist.all_reduce(torch.ones(1))

        counts = []
        with record_comms() as log:
            for target in (send, send_recorded):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join()
                counts.append(log.calls["all_reduce"])
        return counts

    assert run_ranks(work, 2) == [[0, 1]] * 2


# --- the same work under CommDebugMode ------------------------------------------------------------------

#: CommDebugMode's names, by what they are here.
NAMES = {
    "all_reduce": ["all_reduce", "allreduce_", "all_reduce_coalesced", "allreduce_coalesced_"],
    "all_gather": ["all_gather_into_tensor", "all_gather_into_tensor_coalesced", "allgather_", "_allgather_base_"],
    "reduce_scatter": [
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_",
        "_reduce_scatter_base_",
    ],
    "all_to_all": ["all_to_all_single", "alltoall_", "alltoall_base_", "shard_dim_alltoall"],
    "broadcast": ["broadcast", "broadcast_"],
    "reduce": ["reduce_"],
    "gather": ["gather_"],
    "scatter": ["scatter_"],
}


def c10d():
    for call, *_ in COLLECTIVES.values():
        call(torch.ones(12))


def functional():
    from torch.distributed import _functional_collectives as funcol

    x, group = torch.ones(12), dist.group.WORLD
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.broadcast(x, 0, group),
        funcol.all_to_all_single(x, None, None, group),
        *funcol.all_reduce_coalesced([x, x], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group),
    ]
    leaf = x.clone().requires_grad_()
    # Backward: a reduce-scatter, which wants more of torch 2.11 than the one number that a sum's gradient repeats.
    funcol.all_gather_tensor_autograd(leaf, 0, group).square().sum().backward()
    return [r + 0 for r in results]


def dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.ones(6, 6), mesh, [Shard(1)])
    y = x.redistribute(mesh, [Shard(1)]) + x.redistribute(mesh, [Replicate()]).matmul(w)
    y.sum().full_tensor().backward()


def model():
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.BatchNorm1d(8))


def ddp():
    copy = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0001)

    def step():
        copy(torch.ones(4, 8)).sum().backward()

    yield step
    yield step  # the reducer rebuilds its buckets
    yield step
    with copy.no_sync():
        yield step


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    layers = model()
    for layer in layers[:3]:
        fully_shard(layer)
    fully_shard(layers)
    optimizer = torch.optim.AdamW(layers.parameters())
    yield lambda: layers(torch.ones(4, 8)).square().mean().backward()
    yield lambda: torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    yield lambda: optimizer.step()
    yield lambda: layers(torch.ones(4, 8)).square().mean().backward()


def one(call):
    def once():
        yield call

    return once


@pytest.mark.parametrize(
    "steps",
    [one(c10d), one(functional), one(dtensor), ddp, fsdp2],
    ids=["c10d", "functional", "dtensor", "ddp", "fsdp2"],
)
def test_counts_equal_those_of_comm_debug_mode(steps):
    def work():
        from torch.distributed.tensor.debug import CommDebugMode

        counts = []
        for step in steps():
            # One for each step: it follows modules too, and loses its way over several forward passes.
            with CommDebugMode() as theirs, record_comms() as ours:
                step()
            seen = {packet.__name__: count for packet, count in theirs.get_comm_counts().items()}
            counts.append((seen, ours.calls, ours.bytes))
        return counts

    of = {name: op for op, names in NAMES.items() for name in names}
    for counts in run_ranks(work, N):
        for theirs, ours, sizes in counts:
            expected = Counter()
            for name, count in theirs.items():
                expected[of[name]] += count
            assert ours == expected
            assert all(sizes[op] > 0 for op in ours)
        assert sum(sum(ours.values()) for _, ours, _ in counts) >= 5, "the job communicates"
