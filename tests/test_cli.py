"""The `rung` command: tables that fit 80 columns, JSON equal to the Python API, errors in one sentence."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from lablib.calc import units
from lablib.calc.hardware import accelerator
from lablib.calc.layouts import counting_for
from lablib.calc.layouts.fit import cheapest_change, fewest_gpus, largest_micro_batch, longest_sequence, setup, size
from lablib.calc.layouts.planner import plan
from lablib.calc.memory import SETTINGS, training_memory, verdict
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import preset, preset_names
from lablib.calc.params import count_params
from lablib.cli import doctor
from lablib.cli.fit import SHOWN, command, fit
from lablib.cli.main import app
from lablib.cli.memory import memory, memory_table

RUN = ["memory", "llama-3-8b", "--dp", "8", "--zero", "3", "--seq", "8192", "--recompute", "selective"]
FIT = ["fit", "llama-3-70b", "--gpu", "h100", "--gpus", "16"]
FITS = ["fit", "llama-3-8b", "--gpu", "h100", "--gpus", "8", "--zero", "3", "--seq", "8192"]
PLAN = ["plan", "llama-3-8b", "--gpus", "16", "--seq", "8192", "--global-batch", "64"]


def rung(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_memory_prints_every_term_and_the_verdict() -> None:
    code, out, err = rung(*RUN, "--gpu", "h100")
    assert (code, err) == (0, "")
    breakdown = training_memory("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective")
    for name, held in breakdown.terms.items():
        label = name.removeprefix("activations.").replace("_", " ")
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {label} ")]
        assert f"{held / 1e9:,.2f}" in line
    assert f"{breakdown.total / 1e9:.2f}   100.0%" in out
    found = verdict(memory_timeline("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective").peak_bytes, "h100")
    assert f"At its peak, loss, a rank needs {found.peak / 1e9:.2f} GB. {found}" in " ".join(out.split())
    assert found.word == "fits"


def test_memory_says_when_it_assumes_the_longest_sequence() -> None:
    _, out, _ = rung("memory", "llama-3.2-1b")
    assert "131,072 tokens, the model's longest, because --seq was not given" in out
    assert "--seq was not given" not in rung("memory", "llama-3.2-1b", "--seq", "131072")[1]


def test_memory_says_by_how_much_it_does_not_fit() -> None:
    code, out, _ = rung("memory", "llama-3-8b", "--seq", "8192", "--gpu", "h100")
    over = -verdict(memory_timeline("llama-3-8b", seq=8192).peak_bytes, "h100").room
    assert code == 0
    assert f"does not fit, {over / 1e9:.1f} GB too much." in out


@pytest.mark.parametrize(
    "args",
    [
        *(RUN, [*RUN, "--gpu", "mi300x", "--unit", "B"], ["models"], ["doctor"], ["--help"]),
        *(FIT, [*FIT, "--all"], FITS, ["fit", "--help"], ["fit", "gpt2", "--gpu", "t4", "--implementation", "hf"]),
    ],
)
def test_output_is_plain_and_fits_80_columns(args: list[str]) -> None:
    code, out, _ = rung(*args)
    assert code == 0 or args == ["doctor"]  # which says by its code what it found
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80


def test_the_largest_breakdown_fits_80_columns() -> None:
    largest = training_memory("deepseek-v3", micro_batch=1000, attention="plain", dp=2, tuning="qlora")
    table = memory_table(largest, unit="B")
    assert max(map(len, table.splitlines())) <= 80


def test_units_are_named_and_change_the_numbers() -> None:
    gib = rung(*RUN, "--unit", "GiB")[1]
    total = training_memory("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective").total
    assert "GiB" in gib
    assert f"{total / 2**30:,.2f}" in gib


def test_json_has_the_fields_of_the_python_api() -> None:
    code, out, _ = rung(*RUN, "--json", "--gpu", "h100")
    breakdown = training_memory("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective")
    data = json.loads(out)
    assert code == 0
    assert {name: data[name] for name in breakdown.as_dict()} == breakdown.as_dict()
    found = verdict(memory_timeline("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective").peak_bytes, "h100")
    assert {name: data[name] for name in found.as_dict()} == found.as_dict()
    assert (data["fits"], data["verdict"]) == (True, "fits")
    assert "fits" not in json.loads(rung(*RUN, "--json")[1])


def test_every_setting_is_an_option_with_the_same_default() -> None:
    cli = inspect.signature(memory).parameters
    for name, setting in SETTINGS.items():
        if name != "bucket_bytes":  # written with a unit on the command line
            assert cli[name].default == setting.default, name
    given = rung("memory", "gpt2", "--bucket-bytes", "25 MiB", "--json")
    assert rung("memory", "gpt2", "--json") == given


def test_options_reach_the_calculator() -> None:
    args = (
        "memory llama-3.1-405b --seq 8192 --tp 8 --sequence-parallel --pp 4 --dp 2 --zero 1 --stage 0 "
        "--layers-per-stage 30,32,32,32 --num-microbatches 8 --recipe mixed-bf16-fp32-grads --json"
    )
    expected = training_memory(
        "llama-3.1-405b",
        seq=8192,
        tp=8,
        sequence_parallel=True,
        pp=4,
        dp=2,
        zero=1,
        stage=0,
        layers_per_stage=(30, 32, 32, 32),
        num_microbatches=8,
        recipe="mixed-bf16-fp32-grads",
    )
    assert json.loads(rung(*args.split())[1]) == expected.as_dict()


def test_memory_takes_a_config_json(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_embd": 768, "n_head": 12}
    config |= {"vocab_size": 50257, "n_positions": 1024}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for named in (path, tmp_path):
        data = json.loads(rung("memory", str(named), "--json")[1])
        assert data["total"] == training_memory("gpt2").total


def test_models_lists_every_preset_with_its_count() -> None:
    out = rung("models")[1].splitlines()
    assert [line.split()[0] for line in out[1:]] == preset_names()
    (line,) = [line for line in out if line.startswith("llama-3-8b ")]
    assert "8,030,261,248" in line
    rows = {row["name"]: row for row in json.loads(rung("models", "--json")[1])}
    assert rows["mixtral-8x7b"]["total"] == 46_702_792_704
    assert rows["mixtral-8x7b"]["active"] == 12_879_925_248
    assert rows["llama-3-8b"]["num_kv_heads"] == 8
    assert list(rows) == preset_names()
    assert count_params.__module__ == "lablib.calc.params"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["memory", "lama-3-8b"], "unknown model 'lama-3-8b'; did you mean llama-3-8b"),
        (["memory", "gpt2", "--tp", "5"], "tp=5 does not divide num_heads=12"),
        (["memory", "gpt2", "--dp", "-1"], "dp=-1 must be a whole number of at least 1"),
        (["memory", "gpt2", "--gpu", "h900"], "unknown accelerator 'h900'"),
        (["memory", "gpt2", "--unit", "gb"], "unknown unit 'gb'"),
        (["memory", "gpt2", "--layers-per-stage", "a,b"], "must be whole numbers with commas"),
        (["memory", "gpt2", "--bucket-bytes", "25"], "'25' has no unit of bytes"),
        (["memory", "no/such/config.json"], "no/such/config.json"),
        (["memory", "gpt2", "--zero", "three"], "--zero"),
        (["memory", "gpt2", "--stages", "3"], "--stages"),
        ([*PLAN, "--recipe", "fp8", "--export", "megatron"], "files are written for products in 16 bits"),
        (["memory", "gpt2", "--batch-size", "3"], "No such option: --batch-size; did you mean --micro-batch?"),
        (["plan", "gpt2", "--batch-size", "3"], "did you mean --micro-batch or --global-batch?"),
        (["memory", "gpt2", "--seq", "8kb"], "'8kb' is not a number of tokens"),
        (["memory", "meta-llama/Llama-3-8B"], "did you mean llama-3-8b? Nothing is fetched from a Hub"),
        (["plan", "Qwen/Qwen2.5-72B-Instruct", "--gpus", "8", "--global-batch", "8"], "did you mean qwen2.5-72b?"),
        ([*PLAN, "--global-batch-tokens", "4M"], "give the batch of a step once"),
        (PLAN[:-2], "give the batch of a step once"),
        ([*PLAN[:-2], "--global-batch-tokens", "2k"], "is less than half a sequence of 8,192 tokens"),
        ([*PLAN[:-2], "--global-batch-tokens", "3.2M"], "is not a whole number of tokens, as M is 1,048,576"),
        ([*PLAN, "--nic", "efa"], "nic: 'efa' has several rates"),
        (["fit", "llama-3-8b", "--gpu", "h1000"], "unknown accelerator 'h1000'"),
        (["fit", "llama3-8b", "--gpu", "h100"], "did you mean llama-3-8b"),
        (["fit", "llama-3-8b"], "Missing option '--gpu'"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--gpus", "12"], "use 8 or 16"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--reserve", "3"], "has no unit of bytes"),
        (
            ["plan", "gpt2", "--gpus", "2", "--gpu", "tpu-v4", "--global-batch", "2"],
            "give intra, a rate like '40 GB/s'",
        ),
        (["plan", "gpt2", "--gpus", "2", "--global-batch", "2", "--virtual-stages", "99"], "use fewer virtual_stages"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--tp", "3"], "tp=3 does not divide num_heads=32"),
        (["fit", "no/config.json", "--gpu", "h100"], "cannot read no"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--nic", "fast"], "unknown link 'fast'"),
        (["fit", "llama-3-8b", "--gpu", "h100", "--step", "slow"], "unknown step 'slow'"),
        (["fit", "mixtral-8x7b", "--gpu", "h100", "--gpus", "4", "--ep", "8"], "ep=8 does not divide dp=4"),
        (["memory", "gpt2", "--step", "slow"], "unknown step 'slow'"),
        (["memory", "gpt2", "--at", ""], "unknown instant ''"),
        (["memory", "gpt2", "--at", "all", "--explain"], "--explain is about one instant"),
        (["memory", "gpt2", "--at", "peak", "--gpu", "h1000"], "unknown accelerator 'h1000'"),
        ([*PLAN, "--tp", "3"], "tp=3 does not divide gpus=16"),
        ([*PLAN, "--gpu", "h9"], "unknown accelerator 'h9'"),
        ([*PLAN, "--json", "--export", "megatron"], "give one"),
        ([*PLAN, "--nic", "fast"], "unknown link 'fast'"),
        ([*PLAN, "--recipe", "fp4"], "the planner has rates of fp8 and mxfp8"),
        ([*PLAN, "--recipe", "mxfp8"], "no measured run says how fast H100 SXM is in it"),
        ([*PLAN, "--schedule", "dualpipe-v"], "nor its second copy of the weights"),
        ([*PLAN, "--schedule", "zb-h1"], "the planner models 1f1b, gpipe, interleaved"),
        ([*PLAN, "--export", "fairscale"], "unknown framework 'fairscale'"),
        ([*PLAN, "--recompute", "some"], "unknown recompute 'some'"),
        ([*PLAN, "--intra", "1e-300 GB/s"], "intra: '1e-300 GB/s' is out of bounds"),
        ([*PLAN, "--intra", "1e-10 GB/s"], "is less than 1 B/s, and no link is so slow"),
        (["memory", "llama-3-8b", "--seq", "999999999999"], "use at most 1,073,741,824"),
        (["memory", "llama-3-8b", "--at", "x"], "forward of block 13, and 54 others"),
        (["memory", "llama-3-8b", "--gpu", "h100", "--reserve", "1e308 PB"], "is out of bounds"),
        (["memory", "/dev/zero"], "/dev/zero is too large to be read: it has more than 64 MiB"),
        (["memory", "x" * 5000 + "/config.json"], "File name too long"),
        (["schedule", "1f1b", "--microbatches", "9" * 20], "a schedule has at most 500,000: make m smaller"),
        (["schedule", "zb-v", "--stages", "1000000000"], "a schedule has at most 500,000: make p smaller"),
        (["schedule", "interleaved", "--backward", "1e308", "--json"], "backward=1e+308 is out of bounds"),
        (["memory"], "model"),
        (["train"], "train"),
        (["labs", "run", "99"], "99"),
    ],
)
def test_errors_are_one_sentence_and_exit_2(args: list[str], message: str) -> None:
    code, out, err = rung(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("rung: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_lengths_and_batches_are_given_as_teams_say_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = ["--tp", "2", "--pp", "1", "--zero", "1", "--json"]
    # 4M is 2048 x 2048, 512 sequences of 8,192; of 4,000,000 tokens 488.3 is nearest to 488.
    for tokens, sequences in (("4M", "512"), ("4000000", "488"), ("4100000", "500")):
        given = [*PLAN[:4], "--seq", "8k", "--global-batch-tokens", tokens, *pinned]
        code, out, _ = rung(*given)
        assert (code, out) == rung(*PLAN[:-1], sequences, *pinned)[:2]
        assert abs(json.loads(out)["global_batch_tokens"] - units.parse_tokens(tokens)) <= 8192 / 2
    for words in (["memory", "gpt2"], ["fit", "gpt2", "--gpu", "h100"]):
        assert rung(*words, "--seq", "1k") == rung(*words, "--seq", "1024")
    # A folder with the name of a model on a Hub is read: only what is not there is looked for among the presets.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama" / "Llama-3-8B").mkdir(parents=True)
    assert "No such file" in rung("memory", "meta-llama/Llama-3-8B")[2]


def test_a_grid_that_nobody_reads_is_left_out() -> None:
    for given in (("--microbatches", "20000"), ("--stages", "500", "--microbatches", "1")):
        code, out, _ = rung("schedule", "1f1b", *given)
        assert code == 0
        assert "(the grid is too long to read and left out; --csv and --json have the actions)" in out
        assert "makespan" in out


def test_an_absurd_rank_of_adapters_changes_nothing_where_none_are_trained() -> None:
    command = ["fit", "llama-3-8b", "--gpu", "h100", "--seq", "1024", "--json"]
    code, out, err = rung(*command, "--lora-rank", "1000000000")
    assert (code, err) == (rung(*command)[0], "")
    assert "1000000000" not in out  # and no adapters of that rank are proposed
    assert "is above the 4,096" in rung(*command, "--lora-rank", "1000000000", "--tuning", "lora")[2]


def test_rung_alone_prints_its_help() -> None:
    code, out, _ = rung()
    assert code == 2
    for name in ("memory", "models", "doctor", "labs"):
        assert f"\n  {name} " in out


def test_calculator_commands_load_neither_torch_nor_numpy() -> None:
    probe = f"""
import sys
from lablib.cli.main import app
for args in ({RUN}, ["models"], ["memory", "--help"], {FITS}, {[*PLAN, "--tp", "2", "--pp", "1"]}):
    try:
        app(args)
    except SystemExit as end:
        assert not end.code, end.code
heavy = {{"torch", "numpy", "matplotlib", "papermill", "transformers", "pydantic"}} & set(sys.modules)
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout  # piped output has no colours
    assert run.stdout.startswith("llama-3-8b, mixed-bf16, 8,192 tokens a sequence, 8 ranks\n")


def test_the_installed_command_works_in_a_pipe() -> None:
    command = Path(sys.executable).with_name("rung")
    run = subprocess.run([command, "memory", "gpt2", "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["total"] == training_memory("gpt2").total


# rung doctor


def test_doctor_looks_at_everything_and_reports_each_with_a_verdict() -> None:
    code, out, _ = rung("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    names = [
        "Python",
        "machine",
        "host name",
        "disk",
        "torch",
        "gloo",
        "GPUs",
        "NCCL",
        "packages",
        "calculators",
        "CPU labs",
    ]
    assert list(findings) == [*names, "GPU labs"]
    assert {finding["verdict"] for finding in findings.values()} <= {"ok", "limited", "missing"}
    assert all(finding["detail"] for finding in findings.values())
    broken = [finding for finding in findings.values() if finding["verdict"] == "missing"]
    assert all(finding["fix"] for finding in broken)
    assert code == (1 if broken else 0)
    # The tests themselves need these.
    assert findings["torch"]["verdict"] == findings["gloo"]["verdict"] == "ok"


@pytest.mark.parametrize(("version", "verdict"), [((3, 10, 9), "missing"), ((3, 11, 0), "ok"), ((3, 14, 0), "missing")])
def test_doctor_judges_python(version: tuple[int, ...], verdict: str) -> None:
    assert doctor.check_python(version).verdict == verdict


def test_doctor_judges_machine_and_disk(tmp_path: Path) -> None:
    assert doctor.check_machine("Windows").verdict == "missing"
    assert "WSL" in doctor.check_machine("Windows").fix
    assert doctor.check_disk(tmp_path, free=10**9).verdict == "limited"
    assert doctor.check_disk(tmp_path, free=10**12) == doctor.Finding("disk", "ok", "1000 GB free")


def test_doctor_says_what_a_host_name_without_an_address_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise doctor.socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr(doctor.socket, "getaddrinfo", unknown)
    finding = doctor.check_host_name()
    assert finding.verdict == "limited"
    assert "nowhere.invalid has no address" in finding.detail
    assert "--local-addr 127.0.0.1" in finding.fix
    monkeypatch.setattr(doctor.socket, "getaddrinfo", lambda *_: [])
    assert doctor.check_host_name() == doctor.Finding("host name", "ok", "nowhere.invalid")


def test_doctor_without_torch_says_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["torch"].verdict == "missing"
    assert findings["packages"].verdict == "limited"
    assert findings["calculators"].verdict == "ok"
    assert findings["CPU labs"] == doctor.Finding("CPU labs", "missing", "will not run", "fix torch")
    assert "gloo" not in findings
    monkeypatch.setattr(doctor, "examine", lambda: list(findings.values()))
    with pytest.raises(typer.Exit) as end:
        doctor.doctor()
    assert end.value.exit_code == 1
    assert rung("doctor")[0] == 1


@pytest.mark.parametrize(
    ("count", "detail"), [(1, "1: NVIDIA L4 22 GiB; scaling wants two"), (2, "2: NVIDIA L4 22 GiB, ")]
)
def test_doctor_says_that_one_gpu_runs_the_gpu_labs(count: int, detail: str, monkeypatch) -> None:
    import torch

    properties = SimpleNamespace(name="NVIDIA L4", total_memory=22 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    finding = doctor.check_gpus()
    assert (finding.verdict, finding.detail.startswith(detail)) == ("ok", True)


@pytest.mark.parametrize(("gpus", "nccl", "verdict"), [("ok", "ok", "ok"), ("limited", "ok", "limited")])
def test_doctor_says_whether_gpu_labs_run(gpus: str, nccl: str, verdict: str) -> None:
    found = [doctor.Finding("GPUs", gpus, "2"), doctor.Finding("NCCL", nccl, "2.28")]
    assert {finding.name: finding.verdict for finding in doctor.verdicts(found)}["GPU labs"] == verdict


@pytest.mark.parametrize("command", [["memory", "gpt2"], ["fit", "gpt2", "--gpu", "t4"]])
def test_an_old_option_works_and_says_its_new_name(command: list[str]) -> None:
    (code, old, warned), (_, new, _) = (
        rung(*command, "--seq", "64", option, "hf") for option in ("--kernels", "--implementation")
    )
    assert (code, old) == (0, new)
    assert "--kernels is now called --implementation" in warned


# `rung fit`: the answers of `lablib.calc.layouts.fit`, in text of 80 columns and in JSON


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
    code, out, err = rung(*FIT, "--all")
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
    out, changes = rung(*FIT)[1], cheapest_change("llama-3-70b", gpu="h100", gpus=16)
    flat = " ".join(out.split())
    kinds = [change.kind for change in changes]
    for kind in set(kinds):
        assert flat.count(f" {kind}: ") == min(kinds.count(kind), SHOWN.get(kind, 1))
    assert str(changes[0]) in flat
    shown = sum(min(kinds.count(kind), SHOWN.get(kind, 1)) for kind in set(kinds))
    assert ("--all prints the other changes" in flat) == (shown < len(changes))
    assert (len(out.splitlines()) < len(rung(*FIT, "--all")[1].splitlines())) == (shown < len(changes))
    assert "--all" not in rung(*FITS)[1] + rung(*FIT, "--all")[1]


def test_json_has_the_numbers_of_the_python_api() -> None:
    data = json.loads(rung(*FIT, "--json")[1])
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
        (FIT, "llama-3-70b"),
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
        "--layers-per-stage 15,17 --at peak"
    )


def test_every_option_is_a_setting_and_only_what_is_given_is_fixed() -> None:
    cli = inspect.signature(fit).parameters
    assert SETTINGS.keys() - cli.keys() == {"bucket_bytes", "torch"}
    assert all(cli[name].default is None for name in SETTINGS.keys() & cli.keys())
    data = json.loads(rung(*FIT, "--tp", "8", "--json")[1])
    assert data["fewest_gpus"][0]["layout"]["tp"] == 8


def test_every_answer_names_the_links_that_it_assumed() -> None:
    for given, nic in (([], "InfiniBand NDR, 400 Gb/s, 50 GB/s a GPU out of it (assumed)"),
                       (["--nic", "100gbe"], "Ethernet, 100 Gb/s, 12.5 GB/s a GPU out of it (given)")):  # fmt: skip
        for answer in (PLAN, FIT):
            out = " ".join(rung(*answer, *given)[1].split())
            assert f"Links: NVLink 4 (H100, H200), 450 GB/s inside a node of 8 (assumed); {nic}" in out
            links = json.loads(rung(*answer, *given, "--json")[1])["links"]
            assert links["nic"]["from"] == ("given" if given else "assumed")
            assert links["intra"]["bytes_per_second"] == 450e9
    assert "assumed link of A10: PCIe 4 x16" in rung("cost", "2xa10@1")[1]
    assert json.loads(rung("cost", "2xa10@1", "--json")[1])[0]["links"]["intra"]["bytes_per_second"] == 31.5e9


def test_a_job_that_leaves_its_node_asks_for_a_network_card_that_nobody_named() -> None:
    code, _, err = rung(*PLAN, "--gpu", "l40s")
    assert code == 2
    assert "give nic, a rate like '40 GB/s' or one of ib-edr" in err
    assert rung(*PLAN, "--gpu", "l40s", "--nic", "200gbe")[0] == 0
    code, out, _ = rung("fit", "llama-3-8b", "--gpu", "l40s", "--gpus", "16", "--seq", "1024")
    assert code == 0  # memory needs no network
    assert "No times: gpus=16 leave a node of gpus_per_node=8" in out
    assert "times of a step are predicted" not in out


def test_rails_and_shared_cards_are_flags() -> None:
    def seconds(*more: str) -> float:
        fixed = ("--tp", "1", "--pp", "1", "--zero", "3", "--json")
        return json.loads(rung(*PLAN, *fixed, *more)[1])["layouts"][0]["step_seconds"]

    assert seconds() == seconds("--rails") < seconds("--no-rails")
    assert seconds() < seconds("--nics-per-node", "1")


def test_a_rack_is_one_node_and_its_trays_are_hosts() -> None:
    job = ["plan", "llama-3-8b", "--gpu", "gb200", "--gpus", "144", "--global-batch", "288", "--seq", "4096"]
    assert json.loads(rung(*job, "--json")[1])["gpus_per_node"] == 72
    assert "--nnodes=36 --nproc-per-node=4 " in rung(*job, "--export", "torchtitan")[1]


def test_a_moment_is_compared_with_the_card_at_its_peak() -> None:
    run = ["memory", "llama-3-8b", "--seq", "512", "--gpu", "a100-80gb-pcie"]
    timeline = memory_timeline("llama-3-8b", seq=512)
    for at in ("peak", "states", "all"):
        out = rung(*run, "--at", at)[1]
        assert "A100 PCIe 80 GB has 78.64 GiB (84.4 GB) for a run: does not fit, " in " ".join(out.split())
        assert max(map(len, out.splitlines())) <= 96
        data = json.loads(rung(*run, "--at", at, "--json")[1])
        assert (data["fits"], data["headroom"]) == (
            False,
            accelerator("a100-80gb-pcie").usable_bytes - timeline.peak_bytes,
        )
    assert "fits, " in rung("memory", "gpt2", "--gpu", "t4", "--explain")[1]
    assert "for a run" not in rung("memory", "gpt2", "--explain")[1]


def test_memory_judges_by_the_peak_with_and_without_an_instant() -> None:
    """The terms of this run sum up to less than the card has; what it holds at once does not fit."""
    run = ["memory", "qwen2-0.5b", "--recipe", "pure-bf16", "--micro-batch", "8", "--seq", "1024"]
    run += ["--implementation", "hf", "--gpu", "rtx-4090"]
    words = {json.loads(rung(*run, *more, "--json")[1])["verdict"] for more in ([], ["--at", "peak"], ["--at", "all"])}
    assert words == {"does not fit"}
    fit = json.loads(rung("fit", *run[1:], "--json")[1])
    assert (fit["verdict"], fit["fits"]) == ("does not fit", False)
    tight = ["memory", "gpt2-xl", "--recipe", "pure-bf16", "--seq", "128", "--gpu", "a10"]
    peak = memory_timeline("gpt2-xl", recipe="pure-bf16", seq=128).peak_bytes
    left = accelerator("a10").usable_bytes - peak
    for reserve, word in ((left - 1, "fits"), (left + 1, "tight")):
        data = json.loads(rung(*tight, "--reserve", f"{reserve} B", "--json")[1])
        assert (data["verdict"], data["fits"], data["headroom"]) == (word, True, left)
        assert ("It is tight: " in rung("fit", *tight[1:], "--reserve", f"{reserve} B")[1]) == (word == "tight")


TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 16}


def test_a_folder_hides_no_preset_unless_it_holds_a_config(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert rung("memory", "gpt2", "--json")[1] == json.dumps(training_memory("gpt2").as_dict(), indent=1) + "\n"
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY))
    assert json.loads(rung("memory", "gpt2", "--json")[1])["seq"] == 16
    assert command(setup(tmp_path / "gpt2", gpu="t4"), "-x.json") == "rung memory ./-x.json --seq 16 --at peak"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "  ", "\ud800"])
def test_a_name_that_cannot_be_printed_is_left_out(name, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"_name_or_path": name}))
    code, out, _ = rung("memory", str(path))
    assert code == 0
    assert out.startswith("gpt2, mixed-bf16, 16 tokens")
    path.write_text(json.dumps(TINY | {"n_embd": 10**30}))
    assert "and at most 1,099,511,627,776" in rung("memory", str(path))[2]


# `rung plan`: JSON equal to the Python API, and a table that fits 80 columns


def test_json_is_the_plan() -> None:
    code, out, err = rung(*PLAN, "--top", "3", "--json")
    assert (code, err) == (0, "")
    read, result = json.loads(out), plan("llama-3-8b", gpus=16, seq=8192, global_batch=64)
    assert [row["dp"] for row in read["layouts"]] == [c.layout.dp for c in result.listed(3)]
    for row, candidate in zip(read["layouts"], result.listed(3), strict=True):
        low, high = result.like(candidate).interval(candidate.step) or (None, None)
        assert row["step_interval"] == (low and [low, high])
        assert row["ties"] == result.ties(candidate)
        assert row["step_seconds"] == candidate.step == pytest.approx(sum(row["seconds"].values()))
        assert row["memory_bytes"] == sum(row["memory"].values()) <= read["capacity_bytes"]
        assert row["tokens_per_second"] == pytest.approx(64 * 8192 / candidate.step)
        assert row["mfu"] == result.mfu(candidate)
        assert row["tp"] * row["cp"] * row["pp"] * row["dp"] == 16
        assert row["num_microbatches"] * row["micro_batch"] * row["dp"] == 64
    assert read["why"][0].startswith(str(result.best.layout))


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "more"),
    [
        ("llama-3-8b", "rtx-4090", 64, ["--implementation", "megatron"]),  # chunks of stages that are not equal
        ("olmo-2-7b", "gb200", 72, ["--implementation", "hf", "--recipe", "mixed-fp16"]),
        ("gpt-oss-20b", "mi300x", 8, ["--reserve", "0"]),
        ("deepseek-v2-lite", "a100-80gb-pcie", 16, ["--nic", "100gbe"]),
    ],
)
def test_the_layout_of_a_plan_has_one_verdict(model: str, gpu: str, gpus: int, more: list[str]) -> None:
    job = [model, "--gpu", gpu, "--seq", "1024"]
    nic = more if "--nic" in more else ["--nic", "50 GB/s", *more]
    found = json.loads(rung("plan", *job, "--gpus", str(gpus), "--global-batch", str(gpus), *nic, "--json")[1])
    best, settings = found["layouts"][0], ["--prefetch", "1", "--gradient-as-bucket-view"]
    for name in SETTINGS.keys() & best.keys():
        value = best[name]
        if value is None:  # a setting that a layout leaves out
            continue
        settings += [
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if isinstance(value, list) else str(value),
        ]
    settings += ["--recipe", found["recipe"], "--implementation", found["implementation"]]
    split = best["tp"] > 1 and found["implementation"] != "hf"
    settings += ["--sequence-parallel"] * split + (["--reserve", "0"] if "--reserve" in more else [])
    said = (best["memory_bytes"], best["fits"], best["verdict"], best["headroom"])
    for name, *how in (["memory"], ["memory", "--at", "peak"], ["fit", "--nic", "50 GB/s"]):
        code, out, err = rung(name, *job, *settings, *how, "--json")
        assert code == 0, err
        judged = json.loads(out)
        assert tuple(judged[key] for key in ("peak_bytes", "fits", "verdict", "headroom")) == said, (name, how)


def test_constraints_hold() -> None:
    _, out, _ = rung(*PLAN, "--tp", "4", "--zero", "1", "--recompute", "full", "--json")
    rows = json.loads(out)["layouts"]
    assert {(row["tp"], row["zero"], row["recompute"]) for row in rows} == {(4, 1, "full")}
    _, out, _ = rung(*PLAN, "--no-sequence-parallel", "--attention", "plain", "--nic", "100gbe", "--json")
    other = plan(
        "llama-3-8b", gpus=16, seq=8192, global_batch=64, sequence_parallel=False, attention="plain", nic="100gbe"
    )
    assert json.loads(out)["layouts"][0]["step_seconds"] == other.best.step
    _, out, _ = rung(*PLAN, "--nic", "12.5 GB/s", "--json")
    assert json.loads(out)["layouts"][0]["step_seconds"] == pytest.approx(
        plan("llama-3-8b", gpus=16, seq=8192, global_batch=64, nic=12.5e9).best.step
    )


def test_table_and_reasons_fit_80_columns() -> None:
    code, out, err = rung(*PLAN, "--top", "7", "--why")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "Times are predicted" in out
    assert "Runner-up" in out
    result = plan("llama-3-8b", gpus=16, seq=8192, global_batch=64)
    first, *others = result.listed(7)
    rows = [line for line in out.splitlines() if re.match(r" +\d+\.\d{3}[~ ]", line)]
    assert [row[:9] for row in rows] == [
        f"{first.step:8.3f} ",
        *(f"{one.step:8.3f}{'~' if result.ties(one) else ' '}" for one in others),
    ]


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_export_prints_the_winner(framework: str) -> None:
    how = (*PLAN, "--tp", "2", "--pp", "2", "--zero", "1", "--export", framework)
    if framework == "torchtitan":
        code, out, err = rung(*how)
        assert (code, out) == (2, "")
        assert "implementation='torchtitan' with tp=2 is not known" in err, "nobody has counted it, so nothing is said"
        how += ("--implementation", "paper")
    code, out, err = rung(*how)
    assert code == 0
    times, counted = err.splitlines()[:2]
    assert out.startswith(f"# {times}.\n# llama-3-8b: tp=2 cp=1 pp=2")
    assert counted.startswith(f"counted as {'paper' if framework == 'torchtitan' else 'megatron'}: tp=2 cp=1 pp=2")
    said = {"torchtitan": "pipeline_parallel_degree=2,", "megatron": "--pipeline-model-parallel-size 2 "}
    assert said[framework] in out


@pytest.mark.parametrize(
    ("framework", "recipe"),
    [
        ("torchtitan", "fsdp2-mixed-fp32-reduce"),
        ("megatron", "mixed-bf16-fp32-grads"),
        ("deepspeed", "mixed-bf16"),
        ("accelerate", "fsdp2-mixed"),
    ],
)
def test_a_plan_for_a_framework_counts_what_it_trains_in(framework: str, recipe: str) -> None:
    code, out, _ = rung(*PLAN, "--export", framework)
    assert code == 0
    how = counting_for(framework, "llama-3-8b", seq=8192, global_batch=64)
    best = plan("llama-3-8b", gpus=16, seq=8192, global_batch=64, counting=how).best.layout
    head = out.splitlines()[3 if framework == "deepspeed" else 1]
    assert f", {recipe}." in head
    assert str(best) in head


def test_a_layout_that_a_framework_cannot_run_is_not_planned_for_it() -> None:
    code, out, err = rung(*PLAN, "--cp", "2", "--implementation", "paper", "--export", "deepspeed")
    assert (code, out) == (2, "")
    assert "Ulysses" in err
    code, out, err = rung(*PLAN, "--pp", "2", "--implementation", "paper", "--export", "accelerate")
    assert (code, out) == (2, "")
    assert "Accelerate has no such parallelism" in err


def test_an_export_says_its_time_beside_the_plans_and_refuses_another_plan() -> None:
    """torchtitan's tensor parallelism is counted by nobody, and 405B on 16,384 GPUs needs it."""
    large = ["plan", "llama-3.1-405b", "--gpus", "16384", "--seq", "8192", "--global-batch", "2048"]
    for job, framework, refused in ((large, "torchtitan", True), (PLAN, "megatron", False)):
        first = json.loads(rung(*job, "--json")[1])["layouts"][0]["step_seconds"]
        code, out, err = rung(*job, "--export", framework)
        own, ratio, beside = map(float, re.findall(r"[\d.]+(?= s a step| times the| s of the plan)", err)[:3])
        assert (ratio, beside) == pytest.approx((own / first, first), abs=0.01)
        assert (code == 2, not out, ratio > 1.2) == (refused,) * 3
        assert ("with tp=2 is not known" in err) is refused


def test_a_plan_says_what_is_unproven_what_it_keeps_free_and_what_its_network_is_worth() -> None:
    out = rung(*PLAN)[1]
    text, best = " ".join(out.split()), json.loads(rung(*PLAN, "--json")[1])["layouts"][0]
    assert f"unproven ({', '.join(best['unproven'])})" in text
    assert f"{best['memory_bytes'] / 1e9:.1f}?" in out
    given = json.loads(rung(*PLAN, "--reserve", "2.5 GiB", "--json")[1])["layouts"][0]
    assert best["spared_bytes"] > given["spared_bytes"] == 0
    names = ("tp", "cp", "pp", "zero", "micro_batch", "recompute", "virtual_stages")
    layout = [f"--{name.replace('_', '-')}={best[name]}" for name in names]
    half = json.loads(rung(*PLAN, *layout, "--nic", "25 GB/s", "--json")[1])["layouts"][0]["step_seconds"]
    assert f"with half of its 50 GB/s a GPU the first layout takes {half:.3f} s" in text
    assert "The network is assumed" not in rung(*PLAN, "--nic", "50 GB/s")[1]
    few = rung("plan", "llama-3.2-3b", "--gpus", "4", "--gpu", "rtx-4090", "--seq", "2048", "--global-batch", "64")[1]
    assert "15.75 GB/s inside a node of 4 (assumed)" in " ".join(few.split())


MOE_PLAN = ["plan", "qwen3-30b-a3b", "--gpus", "64", "--seq", "4096", "--global-batch", "256"]


def test_a_plan_of_experts_names_both_counts_and_what_it_takes_for_granted() -> None:
    params = count_params(preset("qwen3-30b-a3b"))
    code, out, _ = rung(*MOE_PLAN, "--ep", "8")
    assert code == 0
    assert f"{params.total / 1e9:.3g} B parameters, {params.active / 1e9:.3g} B active" in out
    text = " ".join(out.split())
    assert "Tokens are spread evenly over 128 experts" in text
    assert "ep=8 is taken out of " in text
    assert "A token is sent once to each node with one of its experts" in text
    found = json.loads(rung(*MOE_PLAN, "--ep", "8", "--json")[1])
    assert (found["parameters"], found["active_parameters"]) == (params.total, params.active)
    assert all(" ".join(line.split()) in text for line in found["not_modelled"])


def test_a_fit_of_experts_says_the_same() -> None:
    call = ["fit", "qwen3-30b-a3b", "--gpu", "h100", "--dp", "8", "--ep", "8", "--zero", "2", "--seq", "4096"]
    code, out, _ = rung(*call)
    params = count_params(preset("qwen3-30b-a3b"))
    assert code == 0
    assert f"{params.active / 1e9:.3g} B active" in out
    assert "ep=8 is taken out of dp=8" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(rung(*call, "--json")[1])
    assert found["active_parameters"] == params.active
    assert len(found["not_modelled"]) == 3
    assert json.loads(rung(*FITS, "--json")[1])["not_modelled"] == []


def test_what_does_not_concern_a_layout_is_not_said_of_it() -> None:
    small = ["plan", "gpt2", "--gpus", "1", "--gpu", "a100", "--seq", "1024", "--global-batch", "8"]
    assert json.loads(rung(*small, "--json")[1])["not_modelled"] == []
    assert "Not modelled" not in rung(*small)[1]
    said = " ".join(json.loads(rung(*PLAN, "--tp", "2", "--pp", "2", "--json")[1])["not_modelled"])
    assert "asynchronous tensor parallelism" in said
    assert "DualPipe, which keeps two copies of the weights" in said
    assert "expert" not in said
