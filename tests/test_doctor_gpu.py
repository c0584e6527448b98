"""What nvidia-smi prints is read right, and every finding has a verdict and, where it is bad, a remedy."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lablib.calc.hardware import link
from lablib.calc.runs import LAB_BUDGETS
from lablib.cli import doctor_gpu as doctor
from lablib.cli.doctor_gpu import Finding
from lablib.cli.main import app
from lablib.launch import records
from lablib.launch.ranks import run_ranks
from lablib.launch.records import machine as machine_probe

CSV = (
    "GPU-aa, 550.54.15, 4, 16, 61, 150.00, 150.00, 1455, 0, 0x0000000000000004\n"
    "GPU-bb, 550.54.15, 4, 8, 88, 150.00, 150.00, 1005, 2, 0x0000000000000060\n"
    "GPU-cc, 550.54.15, [N/A], [N/A], N/A, [N/A], [N/A], [N/A], [N/A], [N/A]\n"
)


def test_the_query_knows_what_a_gpu_does_not_have(monkeypatch):
    rows = _queried(monkeypatch, CSV)
    assert [row.get("pcie.link.width.current") for row in rows.values()] == ["16", "8", None]
    assert rows["GPU-cc"] == {"uuid": "GPU-cc", "driver_version": "550.54.15"}
    assert doctor.pcie_rate(rows["GPU-aa"]) == link("pcie4-x16").bandwidth == 2 * doctor.pcie_rate(rows["GPU-bb"])
    assert doctor.pcie_rate(rows["GPU-cc"]) is None
    assert doctor.pcie_rate(rows["GPU-aa"] | {"pcie.link.gen.max": "9"}) is None
    assert _queried(monkeypatch, "") == {}
    assert _queried(monkeypatch, "one, two\n") == {}  # of a driver that prints otherwise


def _queried(monkeypatch, text):
    monkeypatch.setattr(records, "nvidia_smi", lambda *_: text)
    return doctor.query_gpus()


@pytest.mark.parametrize(
    ("finding", "verdict", "text"),
    [
        (doctor.judge_peer_access(True), "ok", "every other"),
        (doctor.judge_peer_access(False), "limited", "NCCL_P2P_DISABLE"),
        (doctor.judge_host([(26e9, 25e9)], [31.5e9]), "ok", "31.5"),
        (doctor.judge_host([(26e9, 25e9), (6e9, 6e9)], [31.5e9] * 2),
         "limited", "GPU 1: 6.0"),
        (doctor.judge_all_reduce({(0, 1): 20e9, (0, 1, 2, 3): 19e9}, 31.5e9), "ok", "19.0 GB/s between GPU 0 to 3"),
        (doctor.judge_all_reduce({(0, 1): 9e9, (1, 2): 20e9}, 31.5e9), "limited", "9.0 GB/s between GPU 0 and 1"),
        (doctor.judge_all_reduce({(0, 1): 9e9}, None), "ok", "all-reduce works"),
        (doctor.judge_kernel_log(None), "limited", "cannot be read"),
        (doctor.judge_kernel_log("usb 1-1: new device\n"), "ok", "none"),
        (doctor.judge_kernel_log("[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault\n"), "ok", "none of the hardware"),
        (doctor.judge_kernel_log("NVRM: Xid (PCI:0000:3b:00): 13, x\n" + 2 * "NVRM: Xid (PCI:0000:af:00): 79, GPU\n"),
         "missing", "Xid 79 on 0000:af:00, 2 times: the GPU has fallen off the bus"),
        (doctor.judge_disk(1e9), "ok", "60 GB"),
        (doctor.judge_disk(5e7), "limited", "background"),
        (doctor.judge_shared_memory(16 * 2**30), "ok", "16.00 GiB"),
        (doctor.judge_shared_memory(64 * 2**20), "limited", "--shm-size"),
        (doctor.judge_shared_memory(None), "limited", "NCCL_SHM_DISABLE"),
        (doctor.judge_files(1024), "limited", "ulimit -n 65536"),
        (doctor.judge_files(None), "ok", "unlimited open files"),
    ],
)  # fmt: skip
def test_findings(finding, verdict, text):
    assert finding.verdict == verdict
    assert text in f"{finding.detail} {finding.fix}"
    if verdict == "missing":
        assert finding.fix


def test_a_gpu_under_load_is_judged_by_clocks_heat_and_rate(monkeypatch):
    power, hot, virtual = _queried(monkeypatch, CSV).values()
    good = doctor.judge_load(0, power, 100e12, 125e12)
    assert (good.verdict, good.fix) == ("ok", "")
    assert good.detail == "100 TFLOP/s in bf16, 80% of the peak at 1455 MHz, 61 C"
    broken = doctor.judge_load(1, hot, 100e12, 125e12)
    assert (broken.verdict, broken.fix) == ("missing", "return this machine")
    cooked = doctor.judge_load(1, hot | {"ecc.errors.uncorrected.volatile.total": "0"}, 100e12, 125e12)
    assert (cooked.verdict, "slowed by hardware" in cooked.detail) == ("limited", True)
    # An A10 at its own 150 W is slow and healthy; one that somebody has capped is not what its name says.
    assert doctor.judge_load(0, power, 50e12, 125e12).verdict == "ok"
    capped = doctor.judge_load(0, power | {"power.limit": "100.00"}, 110e12, 125e12)
    assert (capped.verdict, "its limit is 100 of 150 W" in capped.detail) == ("limited", True)
    shared = doctor.judge_load(0, power | {"clocks_event_reasons.active": "0x0"}, 30e12, 125e12)
    assert (shared.verdict, shared.fix.startswith("look for another job")) == ("limited", True)
    assert "so no MFU is given" in doctor.judge_load(0, power, 50e12, None).detail
    assert doctor.judge_load(2, virtual, 30e12, None).verdict == "ok"
    assert doctor.judge_load(2, {}, 30e12, 125e12).verdict == "limited"


def test_without_a_gpu_one_sentence_says_so_and_the_rest_is_measured(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = doctor.examine_gpu(tmp_path, disk_bytes=2**20)
    assert [finding.name for finding in findings] == ["GPU", "disk speed", "shared memory", "limits"]
    assert findings[0].detail == doctor.NO_GPU
    assert list(tmp_path.iterdir()) == []


def test_the_command_measures_only_when_asked(monkeypatch):
    monkeypatch.setattr(doctor, "examine_gpu", lambda folder: [Finding("GPU", "limited", "x " * 60, "y " * 60)])
    out = CliRunner().invoke(app, ["doctor", "--gpu"]).output
    assert "GPU           limited  x x" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "GPU           limited  x x" not in CliRunner().invoke(app, ["doctor"]).output


def test_probes_measure_what_they_say(tmp_path):
    assert 0 < machine_probe.disk_rate(tmp_path, 2**21) < math.inf
    goes = []
    assert machine_probe.fastest(lambda: goes.append(1), 100, repeats=3) > 0
    assert len(goes) == 4


def test_every_gpu_is_looked_at_and_matched_by_its_uuid(tmp_path, monkeypatch):
    """A machine of two A10 that CUDA numbers the other way round than nvidia-smi does; only the copies are made up."""
    import torch

    from lablib.launch import precision, ranks

    properties = [
        SimpleNamespace(uuid="bb", name="NVIDIA A10", total_memory=24e9),
        SimpleNamespace(uuid="aa", name="NVIDIA A10", total_memory=24e9),
    ]
    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: properties[i],
        "get_device_name": lambda i: properties[i].name,
        "get_device_capability": lambda i: (8, 6),
        "can_device_access_peer": lambda a, b: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(records, "nvidia_smi", lambda *_: CSV)
    monkeypatch.setattr(records, "host_rates", lambda i: (12e9 + i, 12e9 + i))
    monkeypatch.setattr(records, "while_busy", lambda gpu, look: (100e12, look()))
    monkeypatch.setattr(records, "kernel_log", lambda: None)
    monkeypatch.setattr(records, "compile_seconds", lambda: 3.0)
    monkeypatch.setattr(ranks, "run_ranks", lambda *job, **how: [{(0, 1): 8e9}, {(0, 1): 7e9}])
    monkeypatch.setattr(precision, "missing_for_float8", lambda: "float8 needs 8.9")
    found = {finding.name: finding for finding in doctor.examine_gpu(tmp_path, disk_bytes=2**20)}
    assert list(found) == [
        "driver", "Xid errors", "peer access", "NCCL links", "host to GPU",
        "GPU 0 load", "GPU 1 load", "torch.compile", "lab 01", "lab 06", "lab 08", "lab 09", "lab 11",
        "disk speed", "shared memory", "limits",
    ]  # fmt: skip
    assert "7.0 GB/s between GPU 0 and 1, the slowest; the link has 16" in found["NCCL links"].detail
    assert found["lab 08"].detail == "leaves FP8 out: float8 needs 8.9"
    assert {found[f"lab {lab}"].detail for lab in ("01", "06", "09", "11")} == {"runs"}
    assert found["driver"].detail == "550.54.15; torch is built for CUDA 12.4"
    # GPU 0 is the second line of nvidia-smi: eight lanes, too hot, with memory errors.
    assert "its PCIe link has 15.8" in found["host to GPU"].detail
    assert found["host to GPU"].verdict == "ok"
    assert found["GPU 0 load"].fix == "return this machine"
    assert found["GPU 1 load"].verdict == "ok"


FINE = {"capabilities": [(9, 0)] * 2, "memory": 80 * 2**30, "compiles": True, "reduces": True, "no_float8": None}


@pytest.mark.parametrize(
    ("changes", "lab", "verdict", "text"),
    [
        ({}, "08", "ok", "runs"),
        ({"reduces": False}, "06", "missing", "CUDA_VISIBLE_DEVICES=0"),
        ({"reduces": False}, "11", "missing", "cannot reduce together"),
        ({"reduces": False}, "09", "ok", "runs"),
        ({"compiles": False}, "11", "limited", "did not compile"),
        ({"compiles": False}, "08", "limited", "FP8 did not compile"),
        ({"no_float8": "no torchao"}, "08", "limited", "no torchao"),
        ({"no_float8": "no torchao", "compiles": False}, "08", "limited", "no torchao"),
        # The calculator says what the lab takes: less than an L4 has, and more than a GPU of 12 GiB.
        ({"memory": 22 * 2**30}, "08", "ok", "runs"),
        ({"memory": 12 * 2**30}, "08", "limited", "FP8 takes about 18 GB, more than the GPU's 12"),
        ({"capabilities": [(7, 5)], "reduces": None}, "09", "limited", "no matrix units for bf16"),
        ({"capabilities": [(9, 0)], "reduces": None}, "11", "limited", "scaling wants two GPUs"),
        ({"capabilities": [(9, 0)], "reduces": None}, "06", "ok", "runs"),
    ],
)
def test_each_lab_is_judged_before_it_is_paid_for(changes, lab, verdict, text):
    found = {f.name: f for f in doctor.judge_labs(doctor.GPUMachine(**(FINE | changes)))}
    assert list(found) == [f"lab {budget.lab}" for budget in LAB_BUDGETS]
    finding = found[f"lab {lab}"]
    assert finding.verdict == verdict
    assert text in f"{finding.detail} {finding.fix}"


def test_lab_08_takes_the_model_that_the_doctor_weighs():
    notebook = json.loads((Path(__file__).parents[1] / "labs" / "08_mixed_precision.ipynb").read_text(encoding="utf-8"))
    lab = "".join("".join(cell["source"]) for cell in notebook["cells"])
    for name, value in doctor.FLOAT8_MODEL.items():
        assert f'"{name}": {value}' in lab
    size = doctor.FLOAT8_BATCH
    assert f"({size['micro_batch']}, {size['seq'] + 1}), device=" in lab


def test_a_measurement_that_fails_is_a_finding_and_not_the_end():
    def broken():
        raise RuntimeError("\nCUDA error: peer access is not supported\nmore")

    finding = doctor.attempt("NCCL links", broken)
    assert (finding.verdict, finding.detail) == ("missing", "failed: CUDA error: peer access is not supported")

    def too_new():
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    assert "torch is built for this GPU" in doctor.attempt("GPU 0 load", too_new).fix


def test_what_compiling_lacks_is_named_by_its_package(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine_probe.sysconfig, "get_path", lambda name: str(tmp_path))
    version = ".".join(map(str, sys.version_info[:2]))
    assert machine_probe.missing_for_compile() == ["gcc", f"python{version}-dev"]
    for name in ("Python.h", "clang"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert machine_probe.missing_for_compile() == []

    def broken():
        raise RuntimeError("InductorError: no")

    monkeypatch.setattr(records, "compile_seconds", broken)
    assert doctor.check_compile().detail == "fails: InductorError: no"
    (tmp_path / "Python.h").unlink()
    assert doctor.check_compile().fix == f"apt-get install -y python{version}-dev"


@pytest.mark.parametrize(("code", "log"), [(0, "line\n"), (1, None)])
def test_the_kernels_log_where_it_may_be_read(tmp_path, monkeypatch, code, log):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_probe.kernel_log() is None
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\necho line\nexit {code}\n")
    (tmp_path / "dmesg").chmod(0o755)
    assert machine_probe.kernel_log() == log


def test_an_all_reduce_is_as_fast_as_its_slowest_rank_and_says_nothing_to_json(monkeypatch, capsys):

    def played(work, count, *, device, timeout):
        print(f"{count} ranks on {device}")
        return [{(0, 1): 8e9, (0, 1, 2): 5e9}, {(0, 1): 7e9, (0, 1, 2): 6e9}]

    monkeypatch.setattr("lablib.launch.ranks.run_ranks", played)
    assert doctor.all_reduces(3) == {(0, 1): 7e9, (0, 1, 2): 5e9}
    assert capsys.readouterr() == ("", "3 ranks on cuda\n")


def test_every_pair_of_neighbours_reduces_and_then_all_together():
    rates = run_ranks(machine_probe.all_reduce_rates, 3, 2**16)
    assert [sorted(each) for each in rates] == [
        [(0, 1), (0, 1, 2), (0, 2)],
        [(0, 1), (0, 1, 2), (1, 2)],
        [(0, 1, 2), (0, 2), (1, 2)],
    ]
    assert all(0 < rate < math.inf for each in rates for rate in each.values())


def test_a_disk_that_cannot_be_written_is_a_finding_and_not_the_end(tmp_path):
    found = {f.name: f for f in doctor.examine_gpu(tmp_path / "nowhere", disk_bytes=2**20)}
    assert found["disk speed"].verdict == "limited"
    assert "nowhere cannot be written: No such file or directory" in found["disk speed"].detail
    assert "limits" in found
