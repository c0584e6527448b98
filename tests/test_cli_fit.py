"""`rung fit`: the answers of `memory_fit`, in text of 80 columns and in JSON; errors in one sentence; no torch."""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lablib.calc.layouts.fit import cheapest_change, fewest_gpus, largest_micro_batch, longest_sequence, setup, size
from lablib.calc.memory import SETTINGS, training_memory
from lablib.calc.memory.timeline import memory_timeline
from lablib.cli.fit import SHOWN, command, fit
from lablib.cli.main import app

RUN = ["fit", "llama-3-70b", "--gpu", "h100", "--gpus", "16"]
FITS = ["fit", "llama-3-8b", "--gpu", "h100", "--gpus", "8", "--zero", "3", "--seq", "8192"]


def rung(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_a_run_that_fits_says_with_what_room() -> None:
    code, out, err = rung(*FITS)
    assert (code, err) == (0, "")
    have = setup("llama-3-8b", gpu="h100", gpus=8, zero=3, seq=8192)
    assert f"It fits: a GPU needs {size(have.memory)}, {size(have.budget - have.memory)} are left." in out
    for answer in (largest_micro_batch(have), longest_sequence(have), fewest_gpus(have)):
        assert f"{answer.value:,} " in out
        assert f"{answer.beyond:,} would need {size(answer.memory_beyond)}" in out
    assert "What makes it fit" not in out
    assert "--seq was not given" not in out


def test_a_run_that_does_not_fit_says_what_makes_it_fit() -> None:
    code, out, err = rung(*RUN, "--all")
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    have = setup("llama-3-70b", gpu="h100", gpus=16)
    changes = cheapest_change(have)
    times = f"{have.memory / have.budget:.3g} times its budget"
    assert f"It does not fit: a GPU needs {size(have.memory)}, {times}. {len(changes)} changes make it fit" in flat
    assert "8,192 tokens a sequence (the model's longest: --seq was not given)" in flat
    for change in changes:
        assert f"{change.kind}: {change}, " in flat
        assert " ".join(change.trade.split()) in flat
    assert f"With the first of these, {size(changes[0].budget - changes[0].memory)} are left." in out
    assert f"Largest micro-batch: {largest_micro_batch(changes[0].at).value}" in out
    assert f"Fewest GPUs: {fewest_gpus(have).value}" in out


def test_the_short_answer_has_the_first_of_each_kind() -> None:
    out, changes = rung(*RUN)[1], cheapest_change("llama-3-70b", gpu="h100", gpus=16)
    flat = " ".join(out.split())
    kinds = [change.kind for change in changes]
    for kind in set(kinds):
        assert flat.count(f" {kind}: ") == min(kinds.count(kind), SHOWN.get(kind, 1))
    assert str(changes[0]) in flat
    assert "--all prints the other changes" in flat
    assert len(out.splitlines()) < len(rung(*RUN, "--all")[1].splitlines())
    assert "--all" not in rung(*FITS)[1] + rung(*RUN, "--all")[1]


@pytest.mark.parametrize(
    "args", [RUN, [*RUN, "--all"], FITS, ["fit", "--help"], ["fit", "gpt2", "--gpu", "t4", "--implementation", "hf"]]
)
def test_output_is_plain_and_fits_80_columns(args) -> None:
    code, out, _ = rung(*args)
    assert code == 0
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_the_numbers_of_the_python_api() -> None:
    data = json.loads(rung(*RUN, "--json")[1])
    have = setup("llama-3-70b", gpu="h100", gpus=16)
    assert (data["memory"], data["budget"], data["left"]) == (have.memory, have.budget, have.budget - have.memory)
    assert data["fits"] is False
    changes = cheapest_change(have)
    assert [row["settings"] for row in data["changes"]] == [change.settings for change in changes]
    assert [row["memory"] for row in data["changes"]] == [change.memory for change in changes]
    assert [row["step_seconds"] for row in data["changes"]] == [change.seconds for change in changes]
    best = changes[0].at
    for name, answer in (
        ("largest_micro_batch", largest_micro_batch(best)),
        ("longest_sequence", longest_sequence(best)),
    ):
        assert (data[name]["value"], data[name]["memory_beyond"]) == (answer.value, answer.memory_beyond)
    given, full = data["fewest_gpus"]
    assert given["value"] == fewest_gpus(have).value
    assert full["layout"]["recompute"] == "full"
    assert full["value"] <= given["value"]
    assert json.loads(rung(*FITS, "--json")[1])["changes"] == []
    assert len(json.loads(rung(*FITS, "--recompute", "none", "--json")[1])["fewest_gpus"]) == 1


def test_the_command_it_prints_shows_the_same_bytes() -> None:
    for args, model in (
        (RUN, "llama-3-70b"),
        (FITS, "llama-3-8b"),
        (["fit", "gpt2", "--gpu", "t4", "--implementation", "toy", "--recipe", "fp32"], "gpt2"),
    ):
        out = rung(*args)[1]
        printed = out[out.index("Term by term:") + len("Term by term:") :].replace("\\\n", " ")
        words = shlex.split(printed)
        assert words[:3] == ["rung", "memory", model]
        data = json.loads(rung(*words[1:], "--json")[1])
        answer = json.loads(rung(*args, "--json")[1])
        needed = answer["memory"] if answer["fits"] else answer["changes"][0]["memory"]
        assert data["total"] == needed


def test_the_command_says_all_that_is_not_the_default() -> None:
    have = setup(
        "llama-3-8b", gpu="h100", tp=4, sequence_parallel=True, pp=2, layers_per_stage=[15, 17], recipe="pure-bf16"
    )
    assert command(have, "a folder/config.json") == (
        "rung memory 'a folder/config.json' --recipe pure-bf16 --seq 8192 --tp 4 --sequence-parallel --pp 2 "
        "--layers-per-stage 15,17"
    )


def test_every_option_is_a_setting_and_only_what_is_given_is_fixed() -> None:
    cli = inspect.signature(fit).parameters
    assert SETTINGS.keys() - cli.keys() == {"layers_per_stage", "bucket_bytes", "torch"}
    assert all(cli[name].default is None for name in SETTINGS.keys() & cli.keys())
    data = json.loads(rung(*RUN, "--tp", "8", "--json")[1])
    assert data["fewest_gpus"][0]["layout"]["tp"] == 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fit", "llama-3-8b", "--gpu", "h1000"], "unknown accelerator 'h1000'"),
        (["fit", "llama3-8b", "--gpu", "h100"], "did you mean llama-3-8b"),
        (["fit", "llama-3-8b"], "Missing option '--gpu'"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--gpus", "12"], "use 8 or 16"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--reserve", "3"], "has no unit of bytes"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--tp", "3"], "tp=3 does not divide num_heads=32"),
        (["fit", "no/config.json", "--gpu", "h100"], "cannot read no"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--nic", "fast"], "unknown link 'fast'"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--step", "slow"], "unknown step 'slow'"),
        (["fit", "mixtral-8x7b", "--gpu", "h100", "--gpus", "4", "--ep", "8"], "ep=8 does not divide dp * cp=4"),
        (["memory", "gpt2", "--step", "slow"], "unknown step 'slow'"),
        (["memory", "gpt2", "--at", ""], "unknown instant ''"),
        (["memory", "gpt2", "--at", "all", "--explain"], "--explain is about one instant"),
        (["memory", "gpt2", "--at", "peak", "--gpu", "h1000"], "unknown accelerator 'h1000'"),
        (["memory-table", "--committed", "--only", "no such case"], "no case has 'no such case' in its name"),
        (["memory-table", "--committed", "--few"], "leave --few out"),
        (["memory-table", "--predict", "--only", "gpt2"], "--predict makes the whole table"),
    ],
)
def test_errors_are_one_sentence(args, message) -> None:
    code, out, err = rung(*args)
    assert (code, out) == (2, "")
    assert err.startswith("rung: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_moment_is_compared_with_the_card_at_its_peak() -> None:
    run = ["memory", "llama-3-8b", "--seq", "512", "--gpu", "a100-80gb-pcie"]
    timeline = memory_timeline("llama-3-8b", seq=512)
    for at in ("peak", "states", "all"):
        out = rung(*run, "--at", at)[1]
        assert "At the peak:\nA100 PCIe 80 GB holds 80 GiB (85.9 GB): does not fit, " in out
        assert max(map(len, out.splitlines())) <= 96
        data = json.loads(rung(*run, "--at", at, "--json")[1])
        assert (data["fits"], data["headroom"]) == (False, 80 * 2**30 - timeline.peak_bytes)
    assert "fits, " in rung("memory", "gpt2", "--gpu", "t4", "--explain")[1]
    assert "holds" not in rung("memory", "gpt2", "--explain")[1]


TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 16}


def test_a_folder_hides_no_preset_unless_it_holds_a_config(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert rung("memory", "gpt2", "--json")[1] == json.dumps(training_memory("gpt2").as_dict(), indent=1) + "\n"
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY))
    assert json.loads(rung("memory", "gpt2", "--json")[1])["seq"] == 16
    assert command(setup(tmp_path / "gpt2", gpu="t4"), "-x.json") == "rung memory ./-x.json --seq 16"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "  ", "\ud800"])
def test_a_name_that_cannot_be_printed_is_left_out(name, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"_name_or_path": name}))
    code, out, _ = rung("memory", str(path))
    assert code == 0
    assert out.startswith("gpt2, mixed-bf16, 16 tokens")
    path.write_text(json.dumps(TINY | {"n_embd": 10**30}))
    assert "and at most 1,099,511,627,776" in rung("memory", str(path))[2]


def test_it_never_loads_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom lablib.cli.main import app\n"
        f"result = CliRunner().invoke(app, {FITS!r})\n"
        "assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
