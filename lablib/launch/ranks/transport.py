"""The way between a notebook and its ranks: `run_ranks`' arguments are checked, calls and results are pickled."""

from __future__ import annotations

import importlib
import io
import math
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: More than this on one machine is a slip of the pen.
MAX_RANKS = 64

_RESERVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_said: set[str] = set()


def check(fn: object, world_size: object, timeout: float, threads: int, env: dict[str, str] | None) -> None:
    """Refuse what cannot work, with a ValueError."""
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
    """Refuse a device that the ranks cannot have, and say once per process which one they take where GPUs are."""
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
    """Return how many GPUs the ranks of `device="cuda"` will see."""
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


_PACKAGE = str(Path(__file__).parents[2])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, and modules that are more than modules, such as torch.ops."""

    def reducer_override(self, obj: Any) -> Any:
        special = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if special and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class _ResultPickler(_Pickler):
    """The same for results: every tensor becomes a copy on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if hasattr(obj, "to_local") and hasattr(obj, "full_tensor"):
                raise TypeError("a DTensor lives on all ranks; return x.full_tensor() or x.to_local()")
            if obj.device.type != "cpu":
                copy = obj.detach().cpu().requires_grad_(obj.requires_grad)
                if isinstance(obj, torch.nn.Parameter):
                    copy = torch.nn.Parameter(copy, obj.requires_grad)
                return copy.__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments for the ranks."""
    buffer = io.BytesIO()
    with _by_value(fn, *args):
        try:
            _Pickler(buffer).dump((fn, args))
        except Exception as error:
            raise ValueError(
                f"{getattr(fn, '__name__', fn)!r} or its arguments cannot be copied to the ranks ({error}); "
                "locks, generators and process groups must be made inside the function"
            ) from None
    return buffer.getvalue()


def pickle_result(result: Any) -> bytes:
    """Pickle a return value for the notebook."""
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except Exception as error:
        raise TypeError(
            f"the returned {type(result).__name__} cannot be sent to the notebook ({error}); "
            "return tensors, numbers, strings, or lists and dictionaries of them"
        ) from None
    return buffer.getvalue()


def is_installed(file: str) -> bool:
    """Say whether a source file belongs to Python or an installed package."""
    return file.startswith(_INSTALLED)


@contextmanager
def _by_value(*objects: object) -> Iterator[None]:
    """Send functions of scripts and test modules by value, as cloudpickle does for those of cells.

    A rank may not be able to import such a module, and need not: the function that this process holds is
    the one that runs. Installed packages and lablib are imported by the rank.
    """
    modules = {}
    for item in objects:
        module = sys.modules.get(getattr(item, "__module__", None) or "")
        source = getattr(module, "__file__", None)
        if source and module.__name__ != "__main__" and not source.startswith((_PACKAGE, *_INSTALLED)):
            modules[module.__name__] = module
    for module in modules.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules.values():
            cloudpickle.unregister_pickle_by_value(module)


#: What `init_process_group` takes for ranks on each kind of device. Objects and CPU tensors travel by gloo on both.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def hide_gpus(environ: MutableMapping[str, str]) -> None:
    """Let a process see no GPU. To be called before it has asked CUDA for anything.

    PyTorch takes the accelerator that it sees where nobody names a device: `fully_shard` without a mesh would move
    the model there, and leave the batches on the CPU.
    """
    environ["CUDA_VISIBLE_DEVICES"] = ""


def rank_device() -> torch.device:
    """Return the device of this rank: its GPU where the process group has NCCL, and otherwise the CPU."""
    if not dist.is_initialized():
        raise ValueError("no process group: call this inside run_ranks, or under torchrun after init_process_group")
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks on the device of this one: one axis, or so many ranks along each."""
    kind = rank_device().type
    return init_device_mesh(kind, shape or (dist.get_world_size(),), mesh_dim_names=names)
