"""A driver's name leads to the row of the table that it is, or to none: an MFU against the wrong peak is worse than none."""

from types import SimpleNamespace

import pytest
import torch

from lablib.calc.hardware import ACCELERATORS, known_accelerator
from lablib.launch.training import PrintSteps
from lablib.launch.training import metrics as train_metrics


@pytest.mark.parametrize(
    ("driver", "key"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_drivers_names(driver, key):
    assert known_accelerator(driver) is ACCELERATORS[key]


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA GeForce RTX 3060",
        "NVIDIA GeForce RTX 4090 D",
        "Quadro RTX 6000",
        "NVIDIA L40",
        "NVIDIA GH200 144G HBM3e",
        "GRID A10-8Q",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    ],
)
def test_what_has_another_peak_is_not_taken_for_a_row(driver):
    assert known_accelerator(driver) is None


@pytest.mark.parametrize(("driver", "said"), [("NVIDIA GeForce RTX 3060", True), ("NVIDIA A10G", False)])
def test_a_run_on_an_unknown_gpu_says_that_it_has_no_mfu(driver, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: driver)
    device = torch.device("cuda", 0)
    peak = train_metrics.peak_flops(device, "bf16")
    assert (peak is None) == said
    config = SimpleNamespace(steps=3)
    trainer = SimpleNamespace(
        rank=0, report="-", accumulation=1, micro_batch=1, step=0, config=config, device=device, peak=peak
    )
    PrintSteps().on_start(trainer)
    assert (f"no peak for {driver}, so no MFU is given" in capsys.readouterr().out) == said
