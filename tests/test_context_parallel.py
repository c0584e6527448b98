"""The context parallel toy against one process, against PyTorch's own ring, and against what it was predicted to send.

Comparisons run in float64, within TOLERANCE = 1e-12: numbers here are at most about 100, sums have some hundred terms,
and every term may be off by 1e-16 of itself, so sums in another order differ by about 1e-14. Only RMSNorm works in fp32
by design; a difference of 1e-16 now and then tips one of its values to its neighbour, 6e-8 away relatively, so models
with it get 1e-5. A slip in the idea (a mask, a position, a gradient of a block) changes results by 1e-3 and more.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lablib.calc.parallel import attention_traffic, context_degrees, ring_work
from lablib.launch.measure import record_comms
from lablib.launch.ranks import rank_mesh
from lablib.toys.context_parallel import (
    IGNORED,
    ORDERS,
    WAYS,
    ContextParallelTransformer,
    attend,
    average_gradients,
    forgetful,
    merge,
    needed_blocks,
    num_chunks,
    ring_attention,
    shard,
    token_positions,
    ulysses_attention,
    unshard,
    visible,
)
from lablib.toys.context_parallel.softmax import nothing_seen
from lablib.toys.context_parallel.ulysses import check_heads
from lablib.toys.tensor_parallel import ParallelBlock, Plan
from lablib.toys.transformer import Transformer, tiny_config
from tests.processes import far, on_ranks

TOLERANCE = 1e-12
FP32_NORM = 1e-5
WRONG = 1e-3


def draw_documents(batch: int, seq: int) -> torch.Tensor:
    """Documents of unequal lengths, other ones in each sequence; a number comes back later, which is its own case."""
    return torch.stack([torch.randint(0, 3, (seq // 3,)).repeat_interleave(4)[:seq] for _ in range(batch)])


def packed(batch: int, seq: int) -> torch.Tensor:
    """Documents one after the other, cut at drawn places."""
    cuts = torch.rand(batch, seq) < 0.25
    return cuts.cumsum(1)


# --- one process --------------------------------------------------------------------------------------------


def test_orders_by_hand():
    held = {order: [token_positions(8, 2, rank, order).tolist() for rank in range(2)] for order in ORDERS}
    assert held == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }


@pytest.mark.parametrize("order", ORDERS)
def test_every_token_is_on_one_rank(order):
    for cp in (1, 2, 3, 4, 8):
        for each in (1, 2, 5):
            seq = cp * each * num_chunks(order, cp)
            held = torch.cat([token_positions(seq, cp, rank, order) for rank in range(cp)])
            assert sorted(held.tolist()) == list(range(seq))


def test_pieces_merge_to_the_whole_in_any_order(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 4, 5, 6).double(), torch.randn(2, 2, 9, 6).double(), torch.randn(2, 2, 9, 6).double()
    q = q * 300  # scores of hundreds: exp alone would overflow
    mask = torch.rand(2, 1, 5, 9) < 0.7
    mask[..., 0] = True
    mask[:, :, 0, :5] = False  # the first query sees nothing of the first piece
    mask[:, :, 0, 5] = True
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    pieces = [attend(q, k[:, :, i:j], v[:, :, i:j], mask[..., i:j]) for i, j in ((0, 2), (2, 5), (5, 8), (8, 9))]
    for order in itertools.permutations(pieces):
        found = nothing_seen(q)
        for piece in order:
            found = merge(found, piece)
        assert far(found.out_BNsD, whole) < TOLERANCE
        assert far(found.lse_BNs, attend(q, k, v, mask).lse_BNs) < TOLERANCE
    (a, b), (c, d) = pieces[:2], pieces[2:]
    assert far(merge(merge(a, b), merge(c, d)).out_BNsD, whole) < TOLERANCE
    empty = merge(nothing_seen(q), nothing_seen(q))
    assert far(empty.out_BNsD, torch.zeros_like(q)) == 0
    assert (empty.lse_BNs == -math.inf).all()
    assert merge(tuple(a), tuple(b)).lse_BNs.equal(merge(a, b).lse_BNs)


def test_autograd_through_a_query_that_sees_nothing():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    attend(q, q, q, mask).out_BNsD.sum().backward()
    assert q.grad.isfinite().all()


class Group:
    """Stands for a process group where nothing may be sent: whatever asks for more fails."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.fixture
def as_rank_0(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)


@pytest.mark.parametrize("order", ORDERS)
def test_the_work_of_each_step_is_what_was_predicted(order):
    for cp, seq in ((1, 6), (2, 12), (4, 24), (3, 18)):
        held = [token_positions(seq, cp, rank, order) for rank in range(cp)]
        pairs = [[int(visible(held[rank], held[(rank - step) % cp]).sum()) for rank in range(cp)] for step in range(cp)]
        assert pairs == ring_work(cp, order, seq)
        for rank, source in itertools.product(range(cp), repeat=2):
            mask = visible(held[rank], held[source])
            blocks = len(list(needed_blocks(mask, num_chunks(order, cp))))
            if order == "zigzag" and cp > 1:
                assert blocks == (3 if rank == source else 2)
            else:
                assert blocks == (order == "striped" or source <= rank)


def test_a_block_of_other_documents_is_skipped():
    first, second = torch.arange(4), torch.arange(4, 8)
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert not list(needed_blocks(visible(second, first, True, documents), 1))
    assert not list(needed_blocks(visible(second, first, False, documents), 2))
    assert len(list(needed_blocks(visible(second, first, True, documents.clone().fill_(0)), 1))) == 1


# --- attention on ranks -------------------------------------------------------------------------------------


def groups() -> dict[int, dist.ProcessGroup]:
    """Context parallel groups of 1, 2, 3 and 4 ranks among the same four; every rank must call it."""
    made = {1: rank_mesh(4, 1, names=("dp", "cp"))["cp"].get_group(), 4: dist.group.WORLD}
    made[2] = rank_mesh(2, 2, names=("dp", "cp"))["cp"].get_group()
    made[3] = dist.new_group([0, 1, 2])
    return {cp: group for cp, group in made.items() if dist.get_rank(group) >= 0}


def inputs(batch: int, heads: int, kv_heads: int, seq: int, dtype=torch.float64):
    """Queries, keys, values and a gradient of the output."""
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, n, seq, 6, dtype=torch.float64).to(dtype) for n in sizes]


def attention_cases():
    """(way, cp, order, causal, kind of documents, kv heads, tokens a chunk)."""
    for way, order in itertools.product(WAYS, ORDERS):
        yield way, 4, order, True, "packed", 2, 3
        yield way, 2, order, False, "any", 1, 3  # fewer key heads than ranks
        yield way, 1, order, True, None, 2, 7
        yield way, 2, order, True, None, 4, 1
    for way in WAYS:
        yield way, 4, "zigzag", False, None, 1, 1
        yield way, 4, "contiguous", True, "any", 4, 5
        yield way, 2, "striped", False, "packed", 2, 5
    for way, order in itertools.product(("ring", "gathered"), ORDERS):
        yield way, 3, order, True, "packed", 2, 5


def compare_attention(seed: int) -> dict[tuple, float]:
    """How far output and gradients of each case are from one process."""
    of_size, found = groups(), {}
    for case in attention_cases():
        way, cp, order, causal, kind, kv_heads, each = case
        torch.manual_seed(seed)
        seq = cp * each * num_chunks(order, cp)
        documents = {None: None, "packed": packed(2, seq), "any": draw_documents(2, seq + 3)[:, :seq]}[kind]
        *full, grad = inputs(2, 4, kv_heads, seq)
        if cp not in of_size:
            continue
        group = of_size[cp]
        mask = torch.ones(seq, seq, dtype=torch.bool)
        mask = mask.tril() if causal else mask
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        full = [x.requires_grad_() for x in full]
        whole = F.scaled_dot_product_attention(*full, attn_mask=mask, enable_gqa=True)
        wholes = (whole, *torch.autograd.grad(whole, full, grad))
        parts = [shard(x.detach(), 2, group, order).requires_grad_() for x in full]
        out = WAYS[way](*parts, group, order=order, causal=causal, documents=documents)
        ours = (out, *torch.autograd.grad(out, parts, shard(grad, 2, group, order)))
        found[case] = max(far(mine, shard(theirs, 2, group, order)) for mine, theirs in zip(ours, wholes, strict=True))
        if each == 3:
            found[(*case, "unshard")] = far(unshard(out, 2, group, order), whole)
    return found


def test_attention_and_its_gradients_are_those_of_one_process(seed):
    for found in on_ranks(compare_attention, 4, seed):
        assert len(found) > 40
        assert {case: distance for case, distance in found.items() if not distance < TOLERANCE} == {}


def odd_uses(seed: int) -> dict[str, object]:
    """What users do with it: some inputs without gradients, none at all, the group twice, bf16, what is sent."""
    group, found = dist.group.WORLD, {}
    for order in ORDERS:
        with patch("lablib.toys.context_parallel.ring.attend", wraps=attend) as counted:
            ring_attention(*(shard(x, 2, group, order) for x in inputs(1, 4, 2, 16)[:3]), group, order=order)
        found["blocks", order] = counted.call_count
    cp, sizes = group.size(), {"batch": 2, "seq": 16, "heads": 4, "kv_heads": 2, "head_dim": 6}
    for way, attention in WAYS.items():
        torch.manual_seed(seed)
        *full, grad = inputs(2, 4, 2, 16)
        q, k, v, grad = (shard(x, 2, group) for x in (*full, grad))
        parts = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*parts, group)
        truth = torch.autograd.grad(out, parts, grad, retain_graph=True)
        again = torch.autograd.grad(out, parts, grad)
        same = [far(a, b) for a, b in zip(truth, again, strict=True)]
        for asked in itertools.product((False, True), repeat=3):
            parts = [x.clone().requires_grad_(want) for x, want in zip((q, k, v), asked, strict=True)]
            part = attention(*parts, group)
            same.append(far(part, out))
            if any(asked):
                part.backward(grad)
            same += [
                far(x.grad, g) if want else float(x.grad is not None)
                for x, want, g in zip(parts, asked, truth, strict=True)
            ]
        with torch.no_grad():
            same.append(far(attention(q, k, v, group), out))
        # Twice in one graph, the second on the output of the first: messages of both go over the same group.
        x = [shard(t, 2, group).requires_grad_() for t in full]
        inner = attention(*x, group)
        outer = attention(inner, *x[1:], group, order="zigzag")
        y = [t.clone().requires_grad_() for t in full]
        causal = {"is_causal": True, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(F.scaled_dot_product_attention(*y, **causal), *y[1:], **causal)
        grads = torch.autograd.grad(outer, x, grad)
        wholes = torch.autograd.grad(expected, y, unshard(grad, 2, group))
        same += [far(unshard(a, 2, group), b) for a, b in zip(grads, wholes, strict=True)]
        found[way] = max(same)
        for dtype in (torch.float64, torch.bfloat16):
            parts = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            with record_comms() as forward:
                low = attention(*parts, group)
            with record_comms() as backward:
                grads = torch.autograd.grad(low, parts, grad.to(dtype))
            assert low.dtype == grads[0].dtype == grads[1].dtype == dtype
            # Gradients of keys and values are summed over ranks in fp32, or wider; Ulysses sums none.
            wide = max(4, dtype.itemsize)
            predicted = attention_traffic(way, **sizes, cp=cp, value=dtype.itemsize, gradient_value=wide)
            logs = (forward, backward)
            calls = [{op: n for op, n in log.calls.items() if op != "recv"} for log in logs]
            sent = [log.ring_bytes_sent() for log in logs]
            messages = sum(sum(log.messages.values()) for log in logs)
            found[way, dtype] = (sent, calls, messages) == (
                [predicted.forward, predicted.backward],
                [predicted.forward_calls, predicted.backward_calls],
                predicted.messages,
            )
            found[way, dtype, "far"] = max(far(low, out), *(far(a, b) for a, b in zip(grads, truth, strict=True)))
    return found


def test_any_use_gives_the_same(seed):
    for found in on_ranks(odd_uses, 4, seed):
        for way in WAYS:
            assert found[way] < TOLERANCE
            # bf16 has 8 bits, so inputs of about 3 are off by 2^-8, and gradients are sums of some tens of products.
            assert 1e-4 < found[way, torch.bfloat16, "far"] < 0.2


def test_blocks_that_a_mask_hides_are_not_computed(seed):
    for rank, found in enumerate(on_ranks(odd_uses, 4, seed)):
        # Own block whole, or three quarters of it; then what lies before, or two quarters of each of three; or all.
        assert [found["blocks", order] for order in ORDERS] == [1 + rank, 3 + 3 * 2, 4]


def test_it_sends_what_was_predicted(seed):
    for found in on_ranks(odd_uses, 4, seed):
        assert all(found[way, dtype] for way in WAYS for dtype in (torch.float64, torch.bfloat16))


# --- PyTorch's own ring -------------------------------------------------------------------------------------


def beside_pytorch(seed: int) -> dict[tuple, float]:
    """How far PyTorch's ring is from ours; theirs works in fp64 when it is told not to go through fp32."""
    from lablib.launch import torch_private as theirs

    of_size, found = groups(), {}
    for cp, (order, causal), rotation in itertools.product(
        (2, 4), (("contiguous", True), ("contiguous", False), ("zigzag", True)), ("allgather", "alltoall")
    ):
        group = of_size[cp]
        theirs.ring_attention_options.enable_load_balance = order == "zigzag"
        theirs.ring_attention_options.convert_to_f32 = False
        theirs.set_rotate_method(rotation)
        torch.manual_seed(seed)
        *parts, grad = (shard(x, 2, group, order) for x in inputs(2, 4, 4, 8 * cp))
        out, lse = theirs.ring_attention(
            group, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, *parts, is_causal=causal
        )
        out_grads = theirs.ring_attention_backward(
            group,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad,
            "grad_out",
            *parts,
            out,
            lse,
            is_causal=causal,
            dropout_p=0.0,
        )
        parts = [x.requires_grad_() for x in parts]
        ours = ring_attention(*parts, group, order=order, causal=causal)
        grads = torch.autograd.grad(ours, parts, grad)
        found[cp, order, causal, rotation] = max(
            far(a, b) for a, b in zip((ours, *grads), (out, *out_grads), strict=True)
        )
        places = theirs.HeadTailLoadBalancer(8 * cp, cp, "cpu")._generate_indices().flatten()
        found[cp, "places"] = far(places, torch.cat([token_positions(8 * cp, cp, r, "zigzag") for r in range(cp)]))
    return found


def test_the_ring_is_pytorchs_ring(seed):
    for found in on_ranks(beside_pytorch, 4, seed):
        assert len(found) == 2 * (6 + 1)
        assert {case: distance for case, distance in found.items() if not distance < TOLERANCE} == {}


# --- the whole model ----------------------------------------------------------------------------------------


def draw_model(seed: int, family: str, kv_heads: int, norm: str = "") -> Transformer:
    """A model with every weight random, norms and biases too, so large that tokens do look at each other."""
    fields = {"num_layers": 2, "hidden": 24, "num_heads": 4, "ffn": 36, "vocab": 61} | ({"norm": norm} if norm else {})
    config = tiny_config(family, num_kv_heads=kv_heads, **fields)
    torch.manual_seed(seed)
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


#: LayerNorm in a Llama, so that rotary positions are tried in fp64 throughout.
MODELS = (("gpt2", 4), ("llama", 2, "layernorm"), ("llama", 1))


def draw_batch(seed: int, batch: int, seq: int):
    """Windows, documents, and labels of which many ask for nothing: a third in one half, more in the other."""
    torch.manual_seed(seed)
    tokens, documents = torch.randint(0, 61, (batch, seq + 1)), packed(batch, seq + 1)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(batch, seq) < torch.linspace(0.1, 0.9, seq)] = IGNORED
    labels[:, seq // 4 : seq // 2] = IGNORED  # all that a rank has, if the order is contiguous
    return tokens, documents, labels


def alone(model: Transformer, tokens, documents=None, labels=None) -> tuple[torch.Tensor, dict]:
    """Loss and gradients of one process, with PyTorch's attention and a mask for documents."""
    if labels is None:
        labels = tokens[:, 1:].clone()
        if documents is not None:  # nobody is asked for the first token of the next document
            labels[documents[:, 1:] != documents[:, :-1]] = IGNORED
    if documents is not None:
        seq = tokens.shape[1] - 1
        inside = documents[:, :-1]
        mask = (inside[:, :, None] == inside[:, None, :])[:, None] & torch.ones(seq, seq, dtype=torch.bool).tril()
        for block in model.blocks:
            block.attention.core = lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            )
    model.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    for block in model.blocks:
        block.attention.__dict__.pop("core", None)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def batches(seed: int) -> dict[str, tuple]:
    """Tokens, documents and labels, each with or without."""
    tokens, documents, labels = draw_batch(seed, 2, 24)
    return {
        "plain": (tokens, None, None),
        "documents": (tokens, documents, None),
        "labels": (tokens, None, labels),
        "both": (tokens, documents, labels),
    }


def model_cases():
    """(model, batch, way, order, dp): every way with every order, and the rest in turn."""
    batch_names = itertools.cycle(("plain", "documents", "labels", "both"))
    for number, (way, order) in enumerate(itertools.product(WAYS, ORDERS)):
        yield number % 3, next(batch_names), way, order, 1 + number % 2


def whole_model(seed: int) -> dict[tuple, float]:
    """How far loss and gradients are from one process: cp=4, and dp=2 x cp=2 with the rows cut over dp."""
    mesh = rank_mesh(2, 2, names=("dp", "cp"))
    world, row = dist.group.WORLD, mesh.get_local_rank("dp")
    wholes = [draw_model(seed, *arguments) for arguments in MODELS]
    found = {}
    for case in model_cases():
        number, name, way, order, dp = case
        batch = batches(seed)[name]
        loss, grads = alone(wholes[number], *batch)
        model = cut_model(wholes[number], mesh["cp"].get_group() if dp == 2 else world, way, order)
        mine = model.loss(*batch if dp == 1 else rows(batch, row))
        mine.backward()
        average_gradients(model, world)
        found[case] = max(far(mine, loss), *(far(p.grad, grads[n]) for n, p in model.named_parameters()))
    model = cut_model(wholes[1], world).float()
    with torch.autocast("cpu", torch.bfloat16):
        mine = model.loss(*batch)
    mine.backward()
    found["autocast"] = far(mine, alone(wholes[1], *batch)[0])
    return found


def cut_model(whole: Transformer, group, way="ring", order="zigzag", make=ContextParallelTransformer):
    """The same weights on this rank's tokens; the mean is over all ranks."""
    model = make(whole.config, group, way, order, loss_group=dist.group.WORLD).double()
    model.load_state_dict(whole.state_dict())
    return model


def rows(batch: tuple, row: int) -> list:
    """One row of everything in a batch."""
    return [None if x is None else x[row : row + 1] for x in batch]


def models(seed: int) -> tuple[dict, dict, dict]:
    """All that is tried with models, in one start."""
    return whole_model(seed), forget(seed), composed(seed)


def test_the_model_is_that_of_one_process(seed):
    for found, _, _ in on_ranks(models, 4, seed):
        # 8 bits of weights of about 1 and of what is made of them; a loss of about 4.
        assert found["autocast"] < 0.1
        assert len(found) == 9 + 1
        limits = [TOLERANCE, TOLERANCE, FP32_NORM]
        assert {case: found[case] for case in model_cases() if not found[case] < limits[case[0]]} == {}


# --- what is forgotten --------------------------------------------------------------------------------------

#: What is forgotten, the batch that shows it, and one that does not.
FORGOTTEN = {
    "positions": ("plain", None),
    "labels": ("plain", None),
    "documents": ("documents", "plain"),
    "mean": ("labels", "plain"),
}


def forget(seed: int) -> dict[str, float]:
    """How far the mean loss and the averaged gradients are from one process, relative to the largest gradient."""
    mesh = rank_mesh(2, 2, names=("dp", "cp"))
    world, row = dist.group.WORLD, mesh.get_local_rank("dp")
    dp, cp = (mesh[axis].get_group() for axis in ("dp", "cp"))
    whole = draw_model(seed, *MODELS[1])
    found = {}

    def distances(make, name: str, averaged_over) -> tuple[float, float]:
        batch = batches(seed)[name]
        loss, grads = alone(whole, *batch)
        model = cut_model(whole, cp, "ring", "zigzag", make)
        mine = model.loss(*rows(batch, row))
        mine.backward()
        average_gradients(model, averaged_over)
        mine = mine.detach() / dist.get_world_size()
        dist.all_reduce(mine)
        largest = max(grad.abs().max().item() for grad in grads.values())
        return far(mine, loss), max(far(p.grad, grads[n]) for n, p in model.named_parameters()) / largest

    for what, (shows, hides) in FORGOTTEN.items():
        found[what] = distances(forgetful(what), shows, world)
        if hides:
            found[f"{what}, unseen"] = distances(forgetful(what), hides, world)
    found["gradients"] = distances(ContextParallelTransformer, "both", dp)
    found["nothing, unseen"] = distances(ContextParallelTransformer, "both", world)
    return found


def test_each_thing_forgotten_shows(seed):
    for _, found, _ in on_ranks(models, 4, seed):
        assert len(found) == 8
        for what, (loss, gradient) in found.items():
            if what.endswith("unseen"):
                assert max(loss, gradient) < TOLERANCE, what
            else:
                # Not a number is wrong, too: a rank without labels has the mean 0 / 0.
                assert not gradient <= WRONG, what
                # One number can be right by chance to a few digits, but not to eight; the last slip leaves it right.
                assert (not loss <= 1e-8) == (what != "gradients"), what


# --- with FSDP2 and tensor parallelism ----------------------------------------------------------------------


def composed(seed: int) -> dict[str, float]:
    """How far each composition is from one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = rank_mesh(2, 2, names=("outer", "inner"))
    outer, inner = (mesh[axis].get_group() for axis in ("outer", "inner"))
    row, found = mesh.get_local_rank("outer"), {}
    whole = draw_model(seed, *MODELS[1])
    batch = batches(seed)["both"]
    loss, grads = alone(whole, *batch)

    def note(name: str, mine: torch.Tensor, ours: dict[str, torch.Tensor]) -> None:
        found[name] = max([far(mine, loss), *(far(grad, grads[n]) for n, grad in ours.items())])

    # Two micro-batches before one backward: each replay must read the documents of its own.
    other = (batch[0], batch[1].flip(-1), *batch[2:])
    model = cut_model(whole, inner)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    mine = model.loss(*rows(batch, row)) + model.loss(*rows(other, row))
    mine.backward()
    average_gradients(model, dist.group.WORLD)
    other_loss, other_grads = alone(whole, *other)
    found["activation checkpointing"] = max(
        far(mine, loss + other_loss), *(far(p.grad, grads[n] + other_grads[n]) for n, p in model.named_parameters())
    )

    for way in WAYS:
        # dp=2 x cp=2, weights sharded over all four: FSDP2 averages over them, as the loss expects.
        model = cut_model(whole, inner, way)
        for block in model.blocks:
            fully_shard(block, mesh=rank_mesh(4))
        fully_shard(model, mesh=rank_mesh(4))
        mine = model.loss(*rows(batch, row))
        mine.backward()
        note(f"FSDP2, {way}", mine, {n: p.grad.full_tensor() for n, p in model.named_parameters()})

        # cp=2 x tp=2: the course's blocks, whose attention gets the model's core, and PyTorch's.
        model = cut_model(whole, outer, way)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = ParallelBlock(block, Plan(whole.config, inner))
            model.blocks[number].attention.core = model.core
        model.loss_group = outer
        mine = model.loss(*batch)
        mine.backward()
        average_gradients(model, outer)
        note(f"toy tp, {way}", mine, {})
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            dim, split = getattr(model.get_submodule(owner), "splits", {}).get(leaf, (0, None))
            truth = grads[name] if split is None else split.cut(grads[name], dim, inner.rank())
            found[f"toy tp, {way}"] = max(found[f"toy tp, {way}"], far(parameter.grad, truth))

        model = cut_model(whole, outer, way)
        model.loss_group = outer
        columns = [f"attention.{name}" for name in "qkv"] + ["mlp.up", "mlp.gate"]
        plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
            ["attention.out", "mlp.down"], RowwiseParallel()
        )
        for block in model.blocks:
            parallelize_module(block, mesh["inner"], plan)
        mine = model.loss(*batch)
        mine.backward()
        ours = {}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local /= outer.size()
            dist.all_reduce(local, group=outer)
            ours[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        note(f"DTensor tp, {way}", mine, ours)
    return found


def test_it_goes_with_fsdp2_and_tensor_parallelism(seed):
    for _, _, found in on_ranks(models, 4, seed):
        assert len(found) == 10
        assert {name: distance for name, distance in found.items() if not distance < TOLERANCE} == {}


# --- what cannot be cut -------------------------------------------------------------------------------------


def parts(batch=1, heads=4, kv_heads=2, tokens=4, width=6):
    return [torch.zeros(batch, n, tokens, width) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"tokens": 3}, {}, r"order='zigzag' .* 2·cp=8 chunks \(cp=4\), which do not divide seq=12; .* 16"),
        ({"kv_heads": 3}, {}, r"num_kv_heads=3 does not divide num_heads=4"),
        ({}, {"order": "spiral"}, r"unknown order 'spiral'.*contiguous, zigzag, striped"),
        (
            {},
            {"documents": torch.zeros(4)},
            r"documents has shape \(4,\), but 4 tokens .* cp=4 .* \(16,\) or \(1, 16\)",
        ),
        ({}, {"documents": torch.zeros(2, 16)}, r"documents has shape \(2, 16\)"),
    ],
)
def test_sizes_that_do_not_fit_are_named_before_anything_is_sent(way, sizes, options, message, as_rank_0):
    with pytest.raises(ValueError, match=message):
        WAYS[way](*parts(**sizes), Group(4), **options)


def test_parts_that_do_not_belong_together_are_named(as_rank_0, monkeypatch):
    q, k, v = parts()
    for wrong, message in (
        ((q, k, v[:, :, :2]), r"q has shape \(1, 4, 4, 6\), k \(1, 2, 4, 6\), v \(1, 2, 2, 6\)"),
        ((q, k[:, :, :2], v[:, :, :2]), r"all need the same sequences, tokens and head width"),
        ((q[0], k, v), r"must be \(B, N, s, D\)"),
        ((q, k.double(), v), r"one dtype, not torch.float32, torch.float64 and torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_attention(*wrong, Group(2))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: -1)
    for call in (
        lambda: ring_attention(q, k, v, Group(2)),
        lambda: shard(q, 2, Group(2)),
        lambda: unshard(q, 2, Group(2)),
        lambda: ContextParallelTransformer(tiny_config("gpt2"), Group(2)),
        lambda: average_gradients(torch.nn.Linear(1, 1), Group(2)),
    ):
        with pytest.raises(ValueError, match=r"is not in the group; call only on the group's ranks"):
            call()


def test_ulysses_allows_the_degrees_that_were_predicted(as_rank_0):
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (12, 6), (6, 2)):
        sizes = {"seq": math.lcm(*range(1, 13)), "heads": heads, "kv_heads": kv_heads, "most": 12}
        allowed = context_degrees("ulysses", **sizes, replicate_kv=True)
        for cp in allowed:
            check_heads(heads, kv_heads, cp)
        for cp in set(range(1, 13)) - set(allowed):
            with pytest.raises(ValueError, match=rf"cp={cp} .*num_(kv_)?heads=({heads}|{kv_heads})[: ].* use 1, "):
                ulysses_attention(*parts(heads=heads, kv_heads=kv_heads, tokens=2), Group(cp))


def test_the_model_refuses_what_it_cannot_cut(as_rank_0):
    config = tiny_config("gpt2", num_layers=1, hidden=12, num_heads=4, max_positions=16)
    with pytest.raises(ValueError, match=r"cp=3 does not divide num_heads=4"):
        ContextParallelTransformer(config, Group(3), "ulysses")
    with pytest.raises(ValueError, match=r"unknown way 'spiral'"):
        ContextParallelTransformer(config, Group(3), "spiral")
    with pytest.raises(ValueError, match=r"unknown order 'spiral'"):
        ContextParallelTransformer(config, Group(3), order="spiral")
    model = ContextParallelTransformer(config, Group(4))
    long = torch.zeros(2, 25, dtype=torch.long)
    tokens = long[:, :9]
    for wrong, message in (
        ((long[:, :13],), r"2·cp=8 chunks \(cp=4\), which do not divide seq=12; pad it to 16"),
        ((long,), r"cp=4 ranks with 6 tokens .* 24, but max_positions=16"),
        ((tokens[0],), r"tokens have shape \(9,\); they must be \(B, T\)"),
        ((tokens, tokens[:, :8]), r"documents has shape \(2, 8\), but tokens \(2, 9\): .* \(9,\) or \(2, 9\)"),
        ((tokens, None, tokens), r"labels have shape \(2, 9\), but tokens \(2, 9\): .* first 8 tokens, \(2, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.loss(*wrong)
    with pytest.raises(ValueError, match=r"rank=4 is not one of cp=4 ranks; use 0 to 3"):
        token_positions(8, 4, 4)
    with pytest.raises(ValueError, match=r"unknown thing to forget 'all'"):
        forgetful("all")
