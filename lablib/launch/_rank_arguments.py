"""What `run_ranks` is given: checked before anything starts, and completed with what this machine has."""

from __future__ import annotations

import math
import os
import sys

import torch

#: More than this on one machine is a slip of the pen.
MAX_RANKS = 64

_RESERVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_said: set[str] = set()


def check(fn: object, world_size: object, timeout: float, threads: int, env: dict[str, str] | None) -> None:
    """Refuse what cannot work, with a ValueError.

    Args:
        fn: Must be callable.
        world_size: Number of ranks, 1 to 64.
        timeout: Seconds, above 0.
        threads: At least 1.
        env: Strings by name.
    """
    if sys.platform == "win32":
        raise ValueError("ranks need Linux or macOS; on Windows, use WSL or the devcontainer")
    if not callable(fn):
        raise ValueError(f"fn={fn!r} is not a function; pass the function itself, run_ranks(work, 4)")
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size={world_size!r} makes no sense on one machine; use 1 to {MAX_RANKS}")
    if type(threads) is not int or threads < 1:
        raise ValueError(f"threads={threads!r}; every rank needs at least 1")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}; give a positive number of seconds")
    for name, value in (env or {}).items():
        if name in _RESERVED:
            raise ValueError(f"env sets {name}, which run_ranks sets for each rank")
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env has {name!r}: {value!r}; environment variables are strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env has {name!r}: {value!r}; a name has no '=', and neither part a NUL byte")
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "the working folder of this process is gone, and the ranks would start in it"
        raise ValueError(f"{text}; use os.chdir to go to one that is there") from None


def check_device(device: str, world_size: int, env: dict[str, str] | None) -> None:
    """Refuse a device that the ranks cannot have, and say once per process which one they take where GPUs are.

    Args:
        device: "cpu" or "cuda".
        world_size: Number of ranks.
        env: What the ranks' environment sets on top of this process's.

    Raises:
        ValueError: If it is neither, or there are fewer GPUs than ranks.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device={device!r}; use "cpu", or "cuda" for a GPU a rank')
    gpus = visible_gpus(env)
    if device == "cuda" and gpus < world_size:
        raise ValueError(
            f'device="cuda" needs a GPU for each rank: world_size={world_size}, GPUs here: {gpus}; '
            f'use device="cpu"' + (f" or world_size={gpus}" if gpus else "")
        )
    if gpus and device not in _said:
        _said.add(device)
        print(
            "ranks on GPUs: each has one of its own, with NCCL"
            if device == "cuda"
            else f'ranks on the CPU, with gloo: they see none of the {gpus} GPU(s), which device="cuda" takes'
        )


def visible_gpus(env: dict[str, str] | None) -> int:
    """Return how many GPUs the ranks of `device="cuda"` will see.

    Args:
        env: What the ranks' environment sets on top of this process's.
    """
    here = torch.cuda.device_count()
    visible = (env or {}).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return here
    return min(here, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def environment() -> dict[str, str]:
    """Return this process's environment with gloo kept on the loopback interface.

    Left alone, gloo looks up this machine's host name, which fails on many laptops and behind many VPNs.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ}
