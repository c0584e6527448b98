"""The decision framework against the planner, and the rules of thumb."""

from __future__ import annotations

import random

import pytest

from lablib.calc.communication import data_parallel_bytes
from lablib.calc.layouts import (
    FAMILIES,
    axis_bytes,
    choose,
    enough_microbatches,
    mesh,
    microbatch_rule,
    order_rule,
    tensor_rule,
)
from lablib.calc.layouts.guides import ORDERS, family
from lablib.calc.layouts.planner import Layout, cluster, plan
from lablib.calc.models import preset
from lablib.calc.parallel import dispatch_bytes
from lablib.calc.parallel.traffic import data_traffic, expert_traffic, tensor_traffic
from lablib.calc.params import count_params
from tests.processes import new_seed


def test_a_choice_is_simple_and_fast_for_random_jobs() -> None:
    """Whatever the job: the choice fits and ties, and no simpler family does that was judged as well."""
    dice = random.Random(new_seed())
    for _ in range(4):
        model = dice.choice(("gpt2-xl", "llama-3-8b", "llama-2-13b", "qwen2-7b"))
        gpus = dice.choice((8, 16, 32))
        gpu = dice.choice(("a100", "h100", "l40s"))
        job = {"gpus": gpus, "gpu": gpu, "seq": 1024, "global_batch": gpus * dice.randint(1, 4), "nic": "200gbe"}
        found = plan(model, **job)
        if not found.candidates:
            with pytest.raises(ValueError, match="nothing fits"):
                choose(model, **job)
            continue
        choice = choose(model, **job)
        assert choice.candidate.total_memory <= found.capacity
        assert choice.strategy == family(choice.layout)
        judged = [one for one in (choice.candidate, found.best) if found.like(one).ratios]
        assert found.ties(choice.candidate)
        assert len(judged) in (0, 2) or judged == [choice.candidate]
        assert FAMILIES.index(choice.strategy) <= FAMILIES.index(family(found.best.layout))
        simpler = FAMILIES[: FAMILIES.index(choice.strategy)]
        for name in simpler:
            first = next(found.candidates.walk(lambda layout, name=name: family(layout) == name), None)
            assert first is None or not found.ties(first) or not found.like(first).ratios
        assert [reason.family for reason in choice.reasons] == [*simpler, choice.strategy]
        for reason in choice.reasons:
            own = next(found.candidates.walk(lambda layout, of=reason.family: family(layout) == of), None)
            assert reason.fits == (own is not None)
            if reason.layout and not reason.fits:
                assert reason.memory > found.capacity


def test_reasons_speak() -> None:
    choice = choose("llama-3-70b", gpus=64, gpu="h100", seq=4096, global_batch=512)
    first, *_, last = map(str, choice.reasons)
    assert first.startswith("Replicas: tp=1 cp=1 pp=1 dp=64 zero=0")
    assert "the largest part is optimizer" in first
    assert str(choice.layout) in last
    tight = choose("llama-3-8b", gpus=8, gpu="h100", seq=8192, global_batch=4)
    assert "no such layout divides 4 sequences" in str(tight.reasons[0])
    slow = choose("llama-3.1-405b", gpus=16384, gpu="h100", seq=8192, global_batch=2048)
    assert any("is ahead, " in reason.text for reason in slow.reasons)
    assert slow.plan.like(slow.candidate).ratios, (
        "what runs are like, though a ring of more ranks is predicted to be faster"
    )
    with pytest.raises(ValueError, match="nothing fits"):
        choose("llama-3.1-405b", gpus=8, seq=8192, global_batch=8)


def test_four_microbatches_a_stage_bound_the_bubble_and_chunks_need_fewer() -> None:
    for p in (2, 3, 8, 16):
        for row in microbatch_rule(p):
            assert row.over_ideal == pytest.approx(row.formula)
            assert (row.over_ideal < 0.25) == (row.m > 4 * (p - 1))
            if row.obeys:
                assert row.over_ideal < 0.25
    plain, chunked = microbatch_rule(8, (4,))[0], microbatch_rule(8, (1,), v=4)[0]
    assert chunked.over_ideal == pytest.approx(plain.over_ideal)
    assert plain.obeys
    assert not chunked.obeys
    assert [enough_microbatches(p) for p in (1, 2, 8, 16)] == [1, 4, 28, 60]
    assert enough_microbatches(16, v=8) == 16
    assert enough_microbatches(11, most=0.1) == 100
    with pytest.raises(ValueError, match="most=0"):
        enough_microbatches(8, most=0)


def test_tp_leaves_the_node_and_costs_more_than_it_saves() -> None:
    inside = {row.tp: row for row in tensor_rule("llama-3-70b", cluster("h100", 64, nics_per_node=1))}
    assert [row.crosses for row in inside.values()] == [False] * 4 + [True] * 2
    totals = [inside[tp].total for tp in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    assert inside[16].total > 2 * inside[8].total
    # Where it fails: in a domain of 72, tp=16 pays; over PCIe, tp=8 is inside and waits half of its time.
    wide = {row.tp: row for row in tensor_rule("llama-3-70b", cluster("h100", 72, gpus_per_node=72), (8, 16))}
    assert wide[16].total < wide[8].total
    pcie = {row.tp: row for row in tensor_rule("llama-3-70b", cluster("l40s", 64, nic="100gbe"))}
    assert not pcie[8].crosses
    assert pcie[8].share > 0.4 > 2 * inside[8].share
    with pytest.raises(ValueError, match="no degree of"):
        tensor_rule("llama-3-70b", cluster("h100", 64), (3,))


def test_bytes_of_axes_are_those_of_the_other_chapters() -> None:
    layout = Layout(tp=4, dp=2)
    sent = axis_bytes("llama-2-7b", layout, seq=2048, global_batch=16)
    config = plan("llama-2-7b", gpus=8, seq=2048, global_batch=16).load.model
    tokens = 16 * 2048 // 2
    assert sent["tp"] == pytest.approx(tensor_traffic(config, 4, tokens=tokens).bytes_sent)
    assert sent["dp"] == pytest.approx(data_traffic(config, 2).bytes_sent / 4)
    assert sent["pp"] == sent["cp"] == 0


def test_bytes_of_four_axes_by_hand() -> None:
    """70B at t=4, c=2, p=4, d=2, two stages on a rank, one sequence of 8,192 tokens in each of 4 micro-batches."""
    layout = Layout(tp=4, cp=2, pp=4, dp=2, schedule="interleaved", virtual_stages=2)
    sent = axis_bytes("llama-3-70b", layout, seq=8192, global_batch=8)
    stream, passes = 8192 * 8192 * 2, 20 * 4  # layers of a stage times micro-batches
    assert sent["tp"] == 8 * stream / 2 * 3 / 4 * passes
    assert sent["cp"] == 4 * (8192 * 1024 * 2) / 4 / 2 * passes  # eight key heads of 128
    assert sent["pp"] == 2 * stream / (2 * 4) * 4 * 2
    config = plan("llama-3-70b", gpus=64, seq=8192, global_batch=64).load.model
    assert sent["dp"] == pytest.approx(2 * (2 * count_params(config).total / 16) * 3 / 4)
    with pytest.raises(ValueError, match="dispatch_bytes"):
        axis_bytes("llama-3-70b", Layout(dp=4, ep=2), seq=8192, global_batch=8)


def test_experts_send_each_token_there_and_back_in_both_directions() -> None:
    assert dispatch_bytes(4, 2, 3, 2) == 4 * (4 * 2 * 3) / 2 * 2  # half of the tokens' experts are elsewhere
    assert dispatch_bytes(4, 2, 3, 1) == 0
    mixtral = preset("mixtral-8x7b")
    whole = expert_traffic(mixtral, 8, tokens=8 * 4096)
    count = count_params(mixtral)
    replicated = data_parallel_bytes((count.total - count.by_component["experts"]) * 2, 8)
    assert whole.bytes_sent - replicated == pytest.approx(32 * dispatch_bytes(4096, 2, 4096, 8))


def test_tp_goes_first_and_between_pp_and_dp_the_bytes_decide() -> None:
    few = order_rule("llama-3-8b", cluster("h100", 16), Layout(tp=4, pp=2, dp=2), seq=4096, global_batch=64)
    assert {row.order for row in few} == set(ORDERS)
    by_order = {row.order: row for row in few}
    # Few tokens: dp sends more than pp, so dp inside the node is cheaper, before anything hides.
    assert by_order["tp-dp-pp"].total < by_order["tp-pp-dp"].total
    assert by_order["tp-dp-pp"].crosses == ("pp",)
    assert max(by_order, key=lambda order: by_order[order].total) in ("dp-pp-tp", "pp-dp-tp")
    many = {
        row.order: row
        for row in order_rule("llama-3-8b", cluster("h100", 16), Layout(tp=4, pp=2, dp=2), seq=4096, global_batch=512)
    }
    assert many["tp-pp-dp"].total < many["tp-dp-pp"].total
    for row in few:
        grid = mesh(tp=4, pp=2, dp=2, order=[*row.order.split("-"), "cp", "ep"], gpus_per_node=8)
        assert row.crosses == tuple(axis for axis in row.order.split("-") if grid.crossing(axis))
    with pytest.raises(ValueError, match="must name tp, pp and dp once each"):
        order_rule(
            "llama-3-8b", cluster("h100", 16), Layout(tp=4, pp=2, dp=2), seq=4096, global_batch=64, orders=("tp-pp",)
        )
    with pytest.raises(ValueError, match="gpus=16"):
        order_rule("llama-3-8b", cluster("h100", 16), Layout(tp=4), seq=4096, global_batch=64)
