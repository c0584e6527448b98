"""The calculators that can be installed, called for real: Accelerate's estimator and DeepSpeed's.

    accelerate_usage(case)        # on a meta model: no memory, no download
    deepspeed_estimate(case)      # needs the optional extra

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from lablib.calc.memory_cases import Case
from lablib.calc.peer_deepspeed import estimator_arguments
from lablib.launch.memory_oracle_models import build


def installed_version(package: str) -> str | None:
    """Return the version of a package without its build tag, or None where it is not installed.

    Args:
        package: As the registry names it.
    """
    if importlib.util.find_spec(package) is None:
        return None
    return importlib.metadata.version(package).partition("+")[0]


def meta_model(case: Case) -> nn.Module:
    """Return the case's model in fp32 on the meta device, its tied tables one tensor.

    Accelerate's own way to a meta model, without its buffers, would untie them; and its command builds `AutoModel`,
    which has no head. The estimator gets the model that is trained.

    Args:
        case: A case with kernels "toy" or "hf", on one device.

    Raises:
        ValueError: If the kernels are the papers', which need tensor-parallel ranks.
    """
    if case.kernels == "paper":
        raise ValueError("kernels='paper' cannot be built on the meta device; use 'toy' or 'hf'")
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        return build(replace(case, recipe="fp32", recompute="none", pp=1)).model


def accelerate_usage(case: Case) -> dict[str, int]:
    """Return the bytes of each moment that `accelerate estimate-memory` looks at; it prints the largest.

    Args:
        case: A case that the estimator covers.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size, _ = calculate_maximum_sizes(meta_model(case))
    return estimate_training_usage(size, "float32" if case.recipe == "fp32" else "bfloat16")


def deepspeed_estimate(case: Case) -> dict[str, int]:
    """Return what DeepSpeed's ZeRO-3 estimator is asked and says: its arguments and "gpu", bytes of a device.

    The model is counted here. DeepSpeed would count it by the addresses of its parameters, which are all 0 on the
    meta device.

    Args:
        case: A case that the estimator covers.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
    """
    model = meta_model(case)
    asked = estimator_arguments(case) | {
        "params": sum(p.numel() for p in model.parameters()),
        "largest_layer": max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()),
    }
    with _on_cpu():
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        _, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params=asked["params"],
            largest_layer_params=asked["largest_layer"],
            num_gpus_per_node=asked["gpus_per_node"],
            num_nodes=asked["nodes"],
            cpu_offload=False,
            cpu_offload_params=False,
            zero_init=True,
        )
    return asked | {"gpu": int(gpu)}


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Tell DeepSpeed not to look for a GPU's compiler."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before
