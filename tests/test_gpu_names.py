"""A driver's name leads to the row of the table that it is, or to none: an MFU against the wrong peak is worse than none."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lablib.calc.hardware import ACCELERATORS, known_accelerator, least_share
from lablib.calc.memory import verdict
from lablib.calc.precision.formats import support
from lablib.launch.training import PrintSteps
from lablib.launch.training import metrics as train_metrics

DRIVERS = {
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-32GB",
    "a10": "NVIDIA A10",
    "a10g": "NVIDIA A10G",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "rtx-a6000": "NVIDIA RTX A6000",
    "rtx-6000-ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx-3090": "NVIDIA GeForce RTX 3090",
    "rtx-4090": "NVIDIA GeForce RTX 4090",
    "rtx-5090": "NVIDIA GeForce RTX 5090",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-40gb-pcie": "NVIDIA A100-PCIE-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "a100-80gb-pcie": "NVIDIA A100 80GB PCIe",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "gh200": "NVIDIA GH200 480GB",
    "h800": "NVIDIA H800",
    "h200": "NVIDIA H200",
    "h20": "NVIDIA H20",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "b300": "NVIDIA B300 SXM6 AC",
    "gb300": "NVIDIA GB300",
    "mi300x": "AMD Instinct MI300X",
    "mi325x": "AMD Instinct MI325X",
    "mi350x": "AMD Instinct MI350X",
    "mi355x": "AMD Instinct MI355X",
}


def test_every_row_has_a_drivers_name_and_what_the_calculators_ask_of_it():
    assert set(DRIVERS) == {key for key, card in ACCELERATORS.items() if card.driver}
    for key, card in ACCELERATORS.items():
        assert bool(card.capability) != bool(card.formats), key
        assert card.capability or card.driver is None or not card.generation, key
        assert support(key).formats, key
        # Generations are those that runs were measured on: a GPU is of one by its compute capability.
        if card.generation:
            assert (
                card.capability[0]
                == ACCELERATORS[card.generation if card.generation != "a100" else "a100-80gb"].capability[0]
            )
        assert card.name.isascii()
        assert not set(card.name) & set(",()"), "names stand in sentences"


@pytest.mark.parametrize(("key", "driver"), DRIVERS.items())
def test_the_drivers_names(key, driver):
    assert known_accelerator(driver) is ACCELERATORS[key]
    # One pattern alone takes it, so that the order of the table decides nothing.
    text = driver.upper().replace("-", " ")
    assert [key for key, card in ACCELERATORS.items() if card.driver and re.search(card.driver, text)] == [key]


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS.values() if "GeForce" in driver])
@pytest.mark.parametrize("variant", ["Ti", "SUPER", "D", "D V2", "Laptop GPU"])
def test_a_geforce_whose_name_goes_on_is_another_one(driver, variant):
    assert known_accelerator(f"{driver} {variant}") is not known_accelerator(driver)


def test_a_total_that_nobody_has_read_is_not_the_printed_one():
    seen = ACCELERATORS["b300"]
    unseen = replace(seen, cuda_bytes=None)
    assert unseen.usable_bytes == int(seen.memory_bytes * least_share()) - seen.context_bytes < seen.usable_bytes
    assert all(
        card.cuda_bytes / card.memory_bytes >= least_share() for card in ACCELERATORS.values() if card.cuda_bytes
    )
    assert "if CUDA has 91% of the printed 270" in str(verdict(1, unseen))
    assert "CUDA has" not in str(verdict(1, seen))
    tpu = ACCELERATORS["tpu-v4"]
    assert tpu.usable_bytes == tpu.memory_bytes


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA GeForce RTX 3060",
        "NVIDIA GeForce RTX 4090 D",
        "Quadro RTX 6000",
        "NVIDIA L40",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H20-3e",
        "AMD Instinct MI350P",
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
