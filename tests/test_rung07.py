"""What rung 07's exercises ask is what the library counts, and its worked layouts do what their comments say."""

import importlib.util
from pathlib import Path

import pytest

from lablib.calc.layouts import CASES, Miniature, mesh, predicted_traffic, score
from lablib.checks import rung07
from lablib.toys.transformer import tiny_config

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def solutions():
    spec = importlib.util.spec_from_file_location("solutions_rung07", ROOT / "labs/solutions/rung07.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("tp", "pp", "dp", "m"), [(2, 3, 2, 2), (4, 3, 1, 3), (1, 3, 3, 1)])
def test_group_traffic_is_what_the_toys_send_from_a_middle_stage(solutions, tp, pp, dp, m):
    config = tiny_config("llama", num_layers=6, hidden=32, num_heads=4, num_kv_heads=4, ffn=96, tied=False)
    job = Miniature(config=config, tp=tp, pp=pp, dp=dp, micro_batches=m, batch=dp * m * 2, sharded=dp > 1)
    rank = job.mesh.rank(pp=1)
    told = predicted_traffic(job, rank)
    # What the stage's ranks hold together stands for 1/pp of the model; norms are whole on every tp rank.
    held = 0.0 if dp == 1 else told["dp"].sent / (2 * (dp - 1) / dp)
    ours = solutions.group_traffic(6, job.stream_bytes, held * tp * pp, tp, pp, dp, m)
    for axis in told:
        assert ours[axis] == pytest.approx(told[axis].sent)
    assert ours["tp"] == (told["tp"].sent if tp > 1 else 0)


def test_the_sketch_of_the_solution_is_the_mesh(solutions):
    sizes = {"tp": 3, "dp": 2, "pp": 4}
    found = mesh(**sizes, gpus_per_node=6)
    got = solutions.sketch(sizes, 6)
    assert got["groups"] == {axis: found.groups(axis) for axis in sizes}
    assert got["crossing"] == [axis for axis in sizes if found.crosses(axis)]


def test_the_worked_layouts_run_and_their_comments_are_true(solutions):
    judged = {name: score(solutions.plan_cluster(name), name) for name in CASES}
    assert all(one.runs and one.to_published < 1.1 for one in judged.values())
    states = {
        name: sum(one.memory[term] for term in ("weights", "gradients", "optimizer")) / 1e9
        for name, one in judged.items()
    }
    whole = score(solutions.plan_cluster("gpt-76b") | {"zero": 0}, "gpt-76b").memory
    assert round(sum(whole[term] for term in ("weights", "gradients", "optimizer")) / 1e9) == 49
    assert round(states["gpt-76b"]) == 11
    runs = {name: CASES[name].run for name in CASES}
    for name, micro_batches in (("gpt-175b", 64), ("llama-405b", 16)):
        assert judged[name].layout.num_microbatches(runs[name].global_batch) == micro_batches


@pytest.mark.parametrize("answer", [None, 5, "tp=8"])
def test_an_answer_that_is_no_layout_is_told_what_to_return(answer):
    verdict = rung07.plan_cluster(lambda case: answer)
    assert verdict.status == "wrong"
    assert "return a dictionary of fields" in verdict.message


def test_a_layout_is_an_answer_too():
    assert rung07.plan_cluster(lambda case: CASES[case].published).status == "passed"


@pytest.mark.parametrize("at", [None, "a"])
def test_a_coordinate_that_is_no_number_is_told_so(at):
    verdict = rung07.coordinates(lambda rank, sizes: dict.fromkeys(sizes, at))
    assert (verdict.status, verdict.message[:31]) == ("wrong", "A coordinate is a whole number ")
