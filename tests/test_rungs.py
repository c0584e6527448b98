"""What the exercises of the rungs ask is what the library counts, and what their checks say to odd answers."""

import random

import pytest
import torch

from lablib.calc.communication import traffic
from lablib.calc.layouts import CASES, mesh
from lablib.calc.memory.activations import recompute_cost
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import ModelConfig, preset
from lablib.calc.precision import recipe
from lablib.checks import rung01, rung05, rung07, rung08
from lablib.checks.judging import Wrong
from lablib.checks.rung09 import best_choice, extra_flops, job_of, jobs, moments
from lablib.checks.rung10 import World
from tests import defects_rung01, defects_rung05, defects_rung10
from tests.scripts import load

# Rung 01: its checks agree with lablib's tables


def test_an_unexpected_error_of_an_answer_keeps_its_own_text():
    verdict = rung01.run_memory(lambda shape, optimizer, seq, batch, recompute, loss: seq + "tokens")
    assert (verdict.status, "stopped in line " in verdict.message) == ("wrong", True)
    assert "with TypeError: " in verdict.message


def test_a_check_says_its_seed_and_what_it_drew(capsys):
    rung01.run_memory(defects_rung01.run_memory.right, 7)
    printed = capsys.readouterr().out
    assert "drawing cases with seed 7" in printed
    assert printed.count("layers, hidden") == 9


@pytest.mark.parametrize("optimizer", rung01.RUN_OPTIMIZERS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_by_hand_is_the_timeline_of_the_calculator(optimizer, recompute):
    config = ModelConfig(num_layers=6, hidden=512, num_heads=16, num_kv_heads=4, head_dim=64, ffn=1408, vocab=32000)
    shape = {"layers": 6, "hidden": 512, "heads": 16, "kv_heads": 4, "head_dim": 64, "ffn": 1408, "vocab": 32000}
    truth = rung01.true_run(shape | {"tied": False}, optimizer, 1024, 4, recompute, "megatron")
    name, fused = optimizer.removesuffix("-fused"), optimizer.endswith("-fused")
    step = "fused" if fused else "foreach"
    line = memory_timeline(config, optimizer=name, seq=1024, micro_batch=4, recompute=recompute, step=step)
    # A 16-bit gradient and the gradients of one layer's activations come and go beside them.
    assert truth["loss"] == pytest.approx(line.instant("backward of the loss").total, rel=0.02)
    last = line.instant("optimizer step")
    assert truth["step"] == last.total - (last.term("gradients") if truth["step"] != last.total else 0)


@pytest.mark.parametrize(("loss", "implementation"), [("eager", "hf"), ("megatron", "megatron")])
def test_a_logit_at_the_loss_is_the_timeline_s(loss, implementation):
    config = preset("llama-3.2-1b")
    held = memory_timeline(config, implementation=implementation, seq=4096).instant("backward of the loss")
    assert (
        held.term("activations.logits") + held.term("logits_gradients") == rung01.RUN_LOSSES[loss] * 4096 * config.vocab
    )


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "master"),
    [
        ("fp32", "fp32", ("fp32",), False),
        ("mixed-bf16", "bf16", ("bf16",), True),
        ("mixed-bf16-fp32-grads", "bf16", ("fp32",), True),
        ("mixed-bf16-fp32-accum", "bf16", ("bf16", "fp32"), True),
        ("pure-bf16-fp32-moments", "bf16", ("bf16",), False),
    ],
)
@pytest.mark.parametrize("optimizer", rung01.MOMENT_BYTES)
def test_the_exercise_counts_as_the_recipes_do(name, weights, gradients, master, optimizer):
    counted = defects_rung01.bytes_per_parameter.right(weights, gradients, master, optimizer)
    assert counted == recipe(name).bytes_per_param(optimizer)


# Rung 05: what its check says of a first step


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        (lambda mean, lr: mean, "no learning rate"),
        (lambda mean, lr: 0.1 * lr * mean, "damped by 0.1"),
        (lambda mean, lr: 1.9 * lr * mean, "Nesterov"),
        (lambda mean, lr: lr * mean.roll(2), "rank r must update shard r"),
        (lambda mean, lr: lr * mean.abs(), "the check does not know"),
    ],
)
def test_the_first_step_of_zero_2_is_explained(moved, said):
    gradients, start = rung05._gradients(2, 4, 1), torch.arange(4, dtype=torch.float64) / 4
    mean = gradients[0].mean(0)
    with pytest.raises(Wrong, match=said):
        rung05._explain_step(start - moved(mean, 0.125), start, start - 0.125 * mean, gradients, 0.125)


@pytest.mark.parametrize("seed", [0, 1, 3, 7])  # each draws a job in which stages 2 and 3 send the same
def test_the_last_bits_of_an_answer_decide_no_tie(seed):
    planted = defects_rung05.zero_tradeoffs
    for right in (planted.right, planted.right_2, planted.right_3):
        assert rung05.zero_tradeoffs(right, seed).status == "passed"
    assert rung05.zero_tradeoffs(planted.without_the_idea_lowest_that_fits, seed).status == "wrong"


# Rung 07: its worked layouts do what their comments say


@pytest.fixture(scope="module")
def solutions():
    return load("labs/solutions/rung07.py")


def test_the_sketch_of_the_solution_is_the_mesh(solutions):
    sizes = {"tp": 3, "dp": 2, "pp": 4}
    found = mesh(**sizes, gpus_per_node=6)
    got = solutions.sketch(sizes, 6)
    assert got["groups"] == {axis: found.groups(axis) for axis in sizes}
    assert got["crossing"] == [axis for axis in sizes if found.crosses(axis)]


@pytest.mark.parametrize("answer", [None, 5, "tp=8"])
def test_an_answer_that_is_no_layout_is_told_what_to_return(answer):
    verdict = rung07.plan_cluster(lambda job: answer)
    assert verdict.status == "wrong"
    assert "return a dictionary of fields" in verdict.message


def test_what_was_published_is_an_answer_but_not_for_every_cluster():
    verdict = rung07.plan_cluster(lambda job: CASES["llama-405b"].published)
    assert "llama-405b: 1.19 times the planner's" in verdict.message


# Rung 08: the sentence names the idea that is wrong, and odd answers stop nothing


@pytest.mark.parametrize("answer", [None, "none", 7, (), {"overflow": True}, [1, 2, 3]], ids=repr)
@pytest.mark.parametrize("name", ["what_breaks", "block_recipe"])
def test_an_odd_answer_is_wrong_and_stops_nothing(name, answer):
    assert getattr(rung08, name)(lambda *args: answer).status == "wrong"


def test_every_situation_is_there_for_both_formats():
    # "Done when" asks for the difference between the two: each failure must occur in each, and be absent in each.
    import random

    from lablib.checks.rung08 import _situations, _truth

    cases = _situations(random.Random(88), 250)
    for name in ("fp16", "bf16"):
        found = [_truth(case) for case in cases if case[0] == name]
        assert len(found) > 80
        for failure in ("overflow", "underflow", "stall"):
            assert 5 < sum(failure in truth for truth in found) < len(found) - 5, (name, failure)
        assert any(not truth for truth in found)


# Rung 09: the situations of its last exercise are those of the calculator, and have a right answer each

KEPT = [("gpt3-175b", 2048, "plain"), ("llama-3-8b", 4096, "fused"), ("llama-2-7b", 1024, "plain")]


@pytest.mark.parametrize(("model", "seq", "attention"), KEPT)
def test_what_a_job_keeps_is_what_the_calculator_says_without_embedding(model, seq, attention):
    job = job_of(model, seq, attention, batch=2)
    names = ["none", "selective", "first:1", f"first:{job.layers // 2}", f"first:{job.layers - 1}"]
    for name in [*names, "every:1", "every:2", "every:5", f"every:{job.layers}"]:
        cost = recompute_cost(preset(model), name, batch=2, seq=seq, attention=attention)
        assert moments(job, name)[0] == cost.saved_bytes - cost.embedding
        assert max(moments(job, name)) == cost.peak_bytes - cost.embedding
        assert extra_flops(job, name) == cost.extra_flops


def test_every_kind_of_answer_is_asked_for_and_every_moment_decides():
    seed = random.randrange(10**6)
    print("seed", seed)
    found = [(job, best_choice(job)) for job in jobs(random.Random(seed))]
    kinds = {choice["strategy"].split(":")[0] if choice else None for _, choice in found}
    assert kinds == {"none", "selective", "first", "every", None}
    chosen = [(job, choice["strategy"], *moments(job, choice["strategy"])) for job, choice in found if choice]
    for kind in ("selective", "every"):
        decided = [replay > forward for _, name, forward, replay in chosen if name.startswith(kind)]
        assert {True, False} == set(decided), kind
    assert any(job.behind > job.core for job, name, *_ in chosen if name == "selective")
    assert {"every:1", "every:2"} <= {name for _, name, *_ in chosen}


# Rung 10: what its checks' sentences say, and the ranks that take turns


@pytest.mark.parametrize(("ranks", "numel"), [(2, 9), (5, 7), (6, 31), (4, 3)])
def test_the_world_counts_what_the_formula_says(ranks, numel):
    world = World(ranks)
    rows = [torch.arange(numel, dtype=torch.float64) + rank for rank in range(ranks)]
    world.run(
        lambda rank, exchange: defects_rung10.SECOND_SOLUTIONS["ring_all_reduce"][0](rows[rank], rank, ranks, exchange)
    )
    sent = sum(message.elements for message in world.messages)
    expected = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    assert sent == expected == 2 * (ranks - 1) * numel
    assert all(
        torch.equal(row, sum(torch.arange(numel, dtype=torch.float64) + r for r in range(ranks))) for row in rows
    )


def _pair(rank, exchange, **changes):
    box = torch.zeros(2, dtype=torch.float64)
    words = {"send": torch.ones_like(box), "to": 1 - rank, "receive": box, "source": 1 - rank} | changes
    exchange(**words)
    return box


MISUSE = {
    "wait for each other for ever": lambda rank, exchange: _pair(rank, exchange) if rank else None,
    "comes rank 0": lambda rank, exchange: _pair(rank, exchange, to=rank + 1),
    "another chunk than the one": lambda rank, exchange: _pair(
        rank, exchange, receive=torch.zeros(3, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("words", MISUSE)
def test_a_misused_exchange_is_named(words):
    with pytest.raises(Wrong, match=words):
        World(2).run(MISUSE[words])


def test_ranks_that_take_different_numbers_of_steps_are_told_so():
    def act(rank, exchange):
        for _ in range(2 if rank == 0 else 1):
            _pair(rank, exchange)

    with pytest.raises(Wrong, match="wait for each other"):
        World(2).run(act)


def test_an_error_of_a_rank_reaches_the_learner():
    def act(rank, exchange):
        _pair(rank, exchange)
        if rank == 1:
            raise KeyError("chunk")

    with pytest.raises(KeyError, match="chunk"):
        World(2).run(act)
