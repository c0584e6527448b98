"""What nvidia-smi prints is read right, and every finding has a verdict and, where it is bad, a remedy."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lablib.calc.runs import LAB_BUDGETS
from lablib.cli import doctor
from lablib.cli import nvidia_smi as smi
from lablib.cli.main import app
from lablib.launch.ranks import run_ranks
from lablib.launch.records import machine as machine_probe

#: In the form of the drivers since R535: an underlined head, tabs, network cards, affinities, a legend.
MATRIX_8 = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
#: Two cards on PCIe, no network card, an older driver: fewer columns, spaces for tabs.
MATRIX_2 = """        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      PHB     0-29    0
GPU1    PHB      X      0-29    0
"""
#: A pair with a bridge in a machine of four.
MATRIX_4 = """	GPU0	GPU1	GPU2	GPU3	CPU Affinity
GPU0	 X 	NV4	NODE	SYS	0-15
GPU1	NV4	 X 	NODE	SYS	0-15
GPU2	NODE	NODE	 X 	NV12	0-15
GPU3	SYS	SYS	NV12	 X 	16-31
"""
CSV = (
    "GPU-aa, 550.54.15, 4, 16, 61, 150.00, 150.00, 1455, 0, 0x0000000000000004\n"
    "GPU-bb, 550.54.15, 4, 8, 88, 150.00, 150.00, 1005, 2, 0x0000000000000060\n"
    "GPU-cc, 550.54.15, [N/A], [N/A], N/A, [N/A], [N/A], [N/A], [N/A], [N/A]\n"
)
HEAD = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
"""


def test_the_worst_link_of_a_matrix():
    assert smi.worst_link(MATRIX_8) == "NV18"
    assert smi.link_text("NV18") == "NVLink, 18 links"
    assert smi.worst_link(MATRIX_2) == "PHB"
    assert smi.worst_link("\t\x1b[4mGPU0\tCPU Affinity\x1b[0m\nGPU0\t X \t0-63\n") is None
    assert smi.worst_link(MATRIX_4) == "SYS"
    assert smi.worst_link(MATRIX_4.replace("SYS", "NV12").replace("NODE", "NV12")) == "NV4"
    for text in (
        "",
        "No devices were found\n",
        MATRIX_2.replace("GPU1    PHB", "GPU2x   PHB"),
        MATRIX_2.replace("PHB", "???"),
    ):
        with pytest.raises(ValueError, match="topo -m"):
            smi.worst_link(text)


def test_the_query_knows_what_a_gpu_does_not_have():
    rows = doctor.query(lambda *_: CSV)
    assert [row.get("pcie.link.width.current") for row in rows.values()] == ["16", "8", None]
    assert rows["GPU-cc"] == {"uuid": "GPU-cc", "driver_version": "550.54.15"}
    assert doctor.pcie_rate(rows["GPU-aa"]) == smi.pcie_bandwidth(4, 16)
    assert doctor.pcie_rate(rows["GPU-cc"]) is None
    with pytest.raises(ValueError, match="3 values for"):
        smi.parse_query("0, x, y\n")
    assert doctor.query(lambda *_: "") == {}
    assert doctor.query(lambda *_: "one, two\n") == {}  # of a driver that prints otherwise


def test_the_head_says_which_cuda_the_driver_runs():
    assert smi.driver_cuda(HEAD) == (12, 4)
    assert smi.driver_cuda("NVIDIA-SMI has failed") is None


def test_pcie_rates_are_those_of_the_table():
    from lablib.calc.hardware import link

    for generation in (3, 4, 5):
        # The table has them rounded to a part of a GB/s.
        assert smi.pcie_bandwidth(generation, 16) == pytest.approx(link(f"pcie{generation}-x16").bandwidth, rel=2e-3)
    assert smi.pcie_bandwidth(1, 4) == 1e9
    with pytest.raises(ValueError, match="generation 9"):
        smi.pcie_bandwidth(9, 16)


@pytest.mark.parametrize(
    ("finding", "verdict", "text"),
    [
        (doctor.judge_driver("550", (12, 4), "12.4"), "ok", "up to 12.4"),
        (doctor.judge_driver("550", (12, 4), "12.8"), "limited", "newer driver"),
        (doctor.judge_driver("550", (12, 4), "13.0"), "missing", "torch for CUDA 12"),
        (doctor.judge_driver("580", (13, 0), "12.8"), "ok", "wants 12.8"),
        (doctor.judge_driver(None, None, "12.8"), "limited", "does not say"),
        (doctor.judge_driver("550", (12, 4), None), "missing", "CPU"),
        (doctor.judge_arch([(9, 0)], ["sm_80", "sm_90a"]), "ok", "9.0"),
        (doctor.judge_arch([(8, 9)], ["sm_80"]), "ok", "8.9"),
        (doctor.judge_arch([(7, 5)], ["sm_80", "sm_90"]), "missing", "7.5"),
        (doctor.judge_arch([(10, 0)], ["sm_90", "compute_90"]), "ok", "10.0"),
        (doctor.judge_arch([(10, 0)], ["sm_90"]), "missing", "10.0"),
        (doctor.judge_nccl((2, 27, 5), 2), "ok", "2.27.5"),
        (doctor.judge_nccl(None, 2), "missing", "not in this torch"),
        (doctor.judge_nccl(None, 1), "limited", "not in this torch"),
        (doctor.judge_topology("NV18", True), "ok", "NVLink, 18 links"),
        (doctor.judge_topology("PHB", True), "limited", "accumulate"),
        (doctor.judge_topology("PHB", False), "limited", "NCCL_P2P_DISABLE"),
        (doctor.judge_topology("SYS", True), "limited", "one socket"),
        (doctor.judge_topology(None, True), "limited", "no matrix"),
        (doctor.judge_host([(26e9, 25e9)], [31.5e9]), "ok", "31.5"),
        (doctor.judge_host([(26e9, 25e9), (6e9, 6e9)], [31.5e9] * 2),
         "limited", "GPU 1: 6.0"),
        (doctor.judge_all_reduce({(0, 1): 20e9, (0, 1, 2, 3): 19e9}, 31.5e9), "ok", "19.0 GB/s between GPU 0 to 3"),
        (doctor.judge_all_reduce({(0, 1): 9e9, (1, 2): 20e9}, 31.5e9), "limited", "9.0 GB/s between GPU 0 and 1"),
        (doctor.judge_all_reduce({(0, 1): 9e9}, None), "ok", "all-reduce works"),
        (doctor.judge_xids(None), "limited", "cannot be read"),
        (doctor.judge_xids("usb 1-1: new device\n"), "ok", "none"),
        (doctor.judge_xids("[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault\n"), "ok", "none of the hardware"),
        (doctor.judge_xids("NVRM: Xid (PCI:0000:3b:00): 13, x\n" + 2 * "NVRM: Xid (PCI:0000:af:00): 79, GPU\n"),
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


def test_a_gpu_under_load_is_judged_by_clocks_heat_and_rate():
    power, hot, virtual = smi.parse_query(CSV)
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
    monkeypatch.setattr(doctor, "examine_gpu", lambda folder: [doctor.Finding("GPU", "limited", "x " * 60, "y " * 60)])
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

    from lablib.launch import precision, ranks, records

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
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "can_device_access_peer": lambda a, b: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)

    def printed(*arguments):
        return HEAD if not arguments else MATRIX_2 if arguments[0] == "topo" else CSV

    monkeypatch.setattr(machine_probe, "nvidia_smi", printed)
    monkeypatch.setattr(records, "nvidia_smi", printed)
    monkeypatch.setattr(records, "host_rates", lambda i: (12e9 + i, 12e9 + i))
    monkeypatch.setattr(records, "while_busy", lambda gpu, look: (100e12, look()))
    monkeypatch.setattr(records, "kernel_log", lambda: None)
    monkeypatch.setattr(records, "compile_seconds", lambda: 3.0)
    monkeypatch.setattr(ranks, "run_ranks", lambda *job, **how: [{(0, 1): 8e9}, {(0, 1): 7e9}])
    monkeypatch.setattr(precision, "missing_for_float8", lambda: "float8 needs 8.9")
    found = {finding.name: finding for finding in doctor.examine_gpu(tmp_path, disk_bytes=2**20)}
    assert list(found) == [
        "driver", "kernels", "NCCL", "Xid errors", "topology", "NCCL links", "host to GPU",
        "GPU 0 load", "GPU 1 load", "torch.compile", "lab 01", "lab 06", "lab 08", "lab 09", "lab 11",
        "disk speed", "shared memory", "limits",
    ]  # fmt: skip
    assert "7.0 GB/s between GPU 0 and 1, the slowest; the link has 16" in found["NCCL links"].detail
    assert found["lab 08"].detail == "leaves FP8 out: float8 needs 8.9"
    assert {found[f"lab {lab}"].detail for lab in ("01", "06", "09", "11")} == {"runs"}
    assert found["driver"].verdict == found["kernels"].verdict == "ok"
    assert found["NCCL"].verdict == "missing"
    # GPU 0 is the second line of nvidia-smi: eight lanes, too hot, with memory errors.
    assert "its PCIe link has 15.8" in found["host to GPU"].detail
    assert found["host to GPU"].verdict == "ok"
    assert found["GPU 0 load"].fix == "return this machine"
    assert found["GPU 1 load"].verdict == "ok"


FINE = {"capabilities": [(9, 0)] * 2, "memory": 80 * 2**30, "compiles": True, "talks": True, "no_float8": None}


@pytest.mark.parametrize(
    ("changes", "lab", "verdict", "text"),
    [
        ({}, "08", "ok", "runs"),
        ({"talks": False}, "06", "missing", "CUDA_VISIBLE_DEVICES=0"),
        ({"talks": False}, "11", "missing", "cannot reduce together"),
        ({"talks": False}, "09", "ok", "runs"),
        ({"compiles": False}, "11", "limited", "did not compile"),
        ({"compiles": False}, "08", "limited", "FP8 did not compile"),
        ({"no_float8": "no torchao"}, "08", "limited", "no torchao"),
        ({"no_float8": "no torchao", "compiles": False}, "08", "limited", "no torchao"),
        # The calculator says what the lab takes: less than an L4 has, and more than a GPU of 12 GiB.
        ({"memory": 22 * 2**30}, "08", "ok", "runs"),
        ({"memory": 12 * 2**30}, "08", "limited", "FP8 takes about 18 GB, more than the GPU's 12"),
        ({"capabilities": [(7, 5)], "talks": None}, "09", "limited", "no matrix units for bf16"),
        ({"capabilities": [(9, 0)], "talks": None}, "11", "limited", "scaling wants two GPUs"),
        ({"capabilities": [(9, 0)], "talks": None}, "06", "ok", "runs"),
    ],
)
def test_each_lab_is_judged_before_it_is_paid_for(changes, lab, verdict, text):
    found = {f.name: f for f in doctor.judge_labs(doctor.Found(**(FINE | changes)))}
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

    finding = doctor.tried("NCCL links", broken)
    assert (finding.verdict, finding.detail) == ("missing", "failed: CUDA error: peer access is not supported")


def test_what_compiling_lacks_is_named_by_its_package(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    from lablib.launch import records

    monkeypatch.setattr(machine_probe.sysconfig, "get_path", lambda name: str(tmp_path))
    version = ".".join(map(str, sys.version_info[:2]))
    assert machine_probe.lacks_for_compile() == ["gcc", f"python{version}-dev"]
    for name in ("Python.h", "clang"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert machine_probe.lacks_for_compile() == []

    def broken():
        raise RuntimeError("InductorError: no")

    monkeypatch.setattr(records, "compile_seconds", broken)
    assert doctor.compiling().detail == "fails: InductorError: no"
    (tmp_path / "Python.h").unlink()
    assert doctor.compiling().fix == f"apt-get install -y python{version}-dev"


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
