"""`rung plan`: JSON equal to the Python API, a table that fits 80 columns, errors in one sentence, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from lablib.calc.layouts.planner import plan
from lablib.cli.main import app

RUN = ["plan", "llama-3-8b", "--gpus", "16", "--seq", "8192", "--global-batch", "64"]


def rung(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_json_is_the_plan() -> None:
    code, out, err = rung(*RUN, "--top", "3", "--json")
    assert (code, err) == (0, "")
    read, result = json.loads(out), plan("llama-3-8b", gpus=16, seq=8192, global_batch=64)
    assert [row["dp"] for row in read["layouts"]] == [c.layout.dp for c in result.distinct(3)]
    for row, candidate in zip(read["layouts"], result.distinct(3), strict=True):
        assert row["step_seconds"] == candidate.step == pytest.approx(sum(row["seconds"].values()))
        assert row["memory_bytes"] == sum(row["memory"].values()) <= read["capacity_bytes"]
        assert row["tokens_per_second"] == pytest.approx(64 * 8192 / candidate.step)
        assert row["mfu"] == result.mfu(candidate)
        assert row["tp"] * row["cp"] * row["pp"] * row["dp"] == 16
        assert row["num_microbatches"] * row["micro_batch"] * row["dp"] == 64
    assert read["why"][0].startswith(str(result.best.layout))


def test_constraints_hold() -> None:
    _, out, _ = rung(*RUN, "--tp", "4", "--zero", "1", "--recompute", "full", "--json")
    rows = json.loads(out)["layouts"]
    assert {(row["tp"], row["zero"], row["recompute"]) for row in rows} == {(4, 1, "full")}
    _, out, _ = rung(*RUN, "--no-sequence-parallel", "--attention", "plain", "--nic", "100gbe", "--json")
    other = plan(
        "llama-3-8b", gpus=16, seq=8192, global_batch=64, sequence_parallel=False, attention="plain", nic="100gbe"
    )
    assert json.loads(out)["layouts"][0]["step_seconds"] == other.best.step
    _, out, _ = rung(*RUN, "--nic", "12.5 GB/s", "--json")
    assert json.loads(out)["layouts"][0]["step_seconds"] == pytest.approx(
        plan("llama-3-8b", gpus=16, seq=8192, global_batch=64, nic=12.5e9).best.step
    )


def test_table_and_reasons_fit_80_columns() -> None:
    code, out, err = rung(*RUN, "--top", "7", "--why")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "times are predicted" in out
    assert "Runner-up" in out
    best = plan("llama-3-8b", gpus=16, seq=8192, global_batch=64).best
    assert f"{best.step:.3f}" in out


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_export_prints_the_winner(framework: str) -> None:
    code, out, _ = rung(*RUN, "--tp", "2", "--pp", "2", "--zero", "1", "--export", framework)
    assert code == 0
    if framework == "torchtitan":
        assert tomllib.loads(out)["parallelism"]["pipeline_parallel_degree"] == 2
    else:
        assert "--pipeline-model-parallel-size 2" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "3"], "tp=3 does not divide gpus=16"),
        (["--gpu", "h9"], "unknown accelerator 'h9'"),
        (["--json", "--export", "megatron"], "give one"),
        (["--nic", "fast"], "unknown link 'fast'"),
        (["--recompute", "some"], "unknown recompute 'some'"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], message: str) -> None:
    code, out, err = rung(*RUN, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("rung: ")
    assert len(err.strip().splitlines()) == 1


def test_planning_loads_no_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from lablib.cli.main import app\n"
        f"result = CliRunner().invoke(app, {[*RUN, '--tp', '2', '--pp', '1']!r})\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
