"""The `rung` command: tables that fit 80 columns, JSON equal to the Python API, errors in one sentence."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from lablib.calc.hardware import accelerator
from lablib.calc.memory import SETTINGS, training_memory
from lablib.calc.models import preset_names
from lablib.calc.params import count_params
from lablib.cli import doctor
from lablib.cli.main import app
from lablib.cli.memory import memory, memory_table

RUN = ["memory", "llama-3-8b", "--dp", "8", "--zero", "3", "--seq", "8192", "--recompute", "selective"]


def rung(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_memory_prints_every_term_and_the_verdict() -> None:
    code, out, err = rung(*RUN, "--gpu", "h100")
    assert (code, err) == (0, "")
    breakdown = training_memory("llama-3-8b", dp=8, zero=3, seq=8192, recompute="selective")
    for name, size in breakdown.terms.items():
        label = name.removeprefix("activations.").replace("_", " ")
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {label} ")]
        assert f"{size / 1e9:,.2f}" in line
    assert f"{breakdown.total / 1e9:.2f}   100.0%" in out
    assert "H100 SXM holds 80 GiB (85.9 GB): fits, 26.9 GB left" in out


def test_memory_says_when_it_assumes_the_longest_sequence() -> None:
    _, out, _ = rung("memory", "llama-3.2-1b")
    assert "131,072 tokens, the model's longest, because --seq was not given" in out
    assert "--seq was not given" not in rung("memory", "llama-3.2-1b", "--seq", "131072")[1]


def test_memory_says_by_how_much_it_does_not_fit() -> None:
    code, out, _ = rung("memory", "llama-3-8b", "--seq", "8192", "--gpu", "h100")
    over = -training_memory("llama-3-8b", seq=8192).headroom("h100")
    assert code == 0
    assert f"does not fit, {over / 1e9:.1f} GB too much." in out


@pytest.mark.parametrize("args", [RUN, [*RUN, "--gpu", "mi300x", "--unit", "B"], ["models"], ["doctor"], ["--help"]])
def test_output_is_plain_and_fits_80_columns(args: list[str]) -> None:
    out = rung(*args)[1]
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80


def test_the_largest_breakdown_fits_80_columns() -> None:
    largest = training_memory("deepseek-v3", micro_batch=1000, attention="plain", dp=2, tuning="qlora")
    table = memory_table(largest, device=accelerator("h100"), unit="B")
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
    assert data["fits"] is True
    assert data["headroom"] == breakdown.headroom("h100")
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


def test_rung_alone_prints_its_help() -> None:
    code, out, _ = rung()
    assert code == 2
    for command in ("memory", "models", "doctor", "labs"):
        assert f"\n  {command} " in out


def test_calculator_commands_load_neither_torch_nor_numpy() -> None:
    probe = """
import sys
from lablib.cli.main import app
for args in (sys.argv[1:], ["models"], ["memory", "--help"]):
    try:
        app(args)
    except SystemExit as end:
        assert not end.code, end.code
heavy = {"torch", "numpy", "matplotlib", "papermill", "transformers"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    run = subprocess.run([sys.executable, "-c", probe, *RUN], capture_output=True, text=True)
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
