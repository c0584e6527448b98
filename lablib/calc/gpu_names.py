"""The names that drivers give to GPUs, and the row of `hardware` that each of them is.

    known_accelerator("NVIDIA H100 80GB HBM3")  # the row "h100"
    known_accelerator("NVIDIA GeForce RTX 3060")  # None: the course has no figures for it

A name is only taken for a row that it certainly is: a slice of a GPU, a laptop's or a cut-down variant has another
peak, and an MFU against the wrong peak is worse than none.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import re

from lablib.calc.hardware import ACCELERATORS, Accelerator

#: A part of a GPU (MIG, or a vGPU such as "A10-8Q"), a laptop's, and variants that are sold under the name of another.
_OTHER = re.compile(
    r"\b(MIG|LAPTOP|MOBILE|MAX Q|[459]090 D|\d+[QCAB]|GH200 144G|[AH]\d+X?M)\b|^QUADRO|H200 NVL"
)

#: The first pattern that is found decides. Names are in capitals, with spaces for dashes and underscores.
_ROWS = (
    (r"\bGH200\b", "gh200"),
    (r"\bGB200\b", "gb200"),
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"\bH800\b", "h800"),
    (r"\bH100 NVL\b", "h100-nvl"),
    (r"\bH100\b.*\b(PCIE|HBM2E)\b", "h100-pcie"),
    (r"\bH100\b.*\b(80GB HBM3|SXM5)\b", "h100"),
    (r"\bA100\b(?=.*\bPCIE\b)(?=.*\b80GB\b)", "a100-80gb-pcie"),
    (r"\bA100\b(?=.*\bPCIE\b)(?=.*\b40GB\b)", "a100-40gb-pcie"),
    (r"\bA100\b.*\b80GB\b", "a100-80gb"),
    (r"\bA100\b.*\b40GB\b", "a100-40gb"),
    (r"\bA10G\b", "a10g"),
    (r"\bA10\b", "a10"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bRTX A6000\b", "rtx-a6000"),
    (r"\bRTX 6000 ADA\b", "rtx-6000-ada"),
    (r"\bRTX 5090\b", "rtx-5090"),
    (r"\bRTX 4090\b", "rtx-4090"),
    (r"\bV100\b(?!.*PCIE)", "v100"),
    (r"\bT4\b", "t4"),
    (r"\bMI300X\b", "mi300x"),
)


def known_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator that the driver calls by this name, such as "NVIDIA H100 80GB HBM3".

    Args:
        name: From `torch.cuda.get_device_name`, or as `nvidia-smi` prints it.

    Returns:
        None where the course has no figures for it.
    """
    text = re.sub(r"[-_ ]+", " ", name.upper()).strip()
    if _OTHER.search(text):
        return None
    return next((ACCELERATORS[key] for pattern, key in _ROWS if re.search(pattern, text)), None)


def no_figures(name: str) -> str:
    """Return the sentence for a GPU that is not in the table.

    Args:
        name: As the driver has it.
    """
    return f"the course has no peak for {name}, so no MFU is given; peak_flops=... takes the datasheet's dense rate"
