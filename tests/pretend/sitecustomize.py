"""A machine that pretends to have GPUs: with this folder on PYTHONPATH, $PRETEND_GPUS of them answer in every process.

`torch.cuda` tells their number, names and memory, as NVML does; `bin/nvidia-smi` prints the same.
What CUDA forbids is forbidden: a process forked after its parent asked CUDA for anything cannot use it.
What needs a kernel or NCCL raises `NoKernel`, and is noted in the file $PRETEND_LOG with the lines that asked for it.

PRETEND_NVML=0 takes NVML away, as on some rented machines: then even `device_count` touches CUDA.
`python -m tests.pretend` runs the labs on such machines.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from types import SimpleNamespace

NAME = "NVIDIA H100 80GB HBM3"
MEMORY = 84_942_979_072  # torch.cuda.get_device_properties(0).total_memory of one; nvidia-smi says 81559 MiB
CAPABILITY = (9, 0)


class NoKernel(RuntimeError):
    """Something that only a real GPU can do."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: these GPUs are pretended, and no kernel runs on them")
        if log := os.environ.get("PRETEND_LOG"):
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "stack": _stack()}) + "\n")


def _stack() -> list[str]:
    """The lines of the project that asked, the innermost first: "lablib/launch/training/trainer.py Trainer.run"."""
    lines = []
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_filename
        for part in ("/lablib/", "/labs/", "/tools/"):
            if part in name and "/site-packages/" not in name:
                lines.append(f"{part[1:]}{name.rpartition(part)[2]}:{number} {frame.f_code.co_qualname}")
        if "ipykernel_" in name:
            lines.append(f"a cell: {frame.f_code.co_qualname}")
    return lines


class _State:
    """Whether CUDA was asked for anything in this process, or before it was forked."""

    asked = False
    started = False
    bad_fork = False

    @classmethod
    def ask(cls) -> None:
        """Touch CUDA without starting it, as cudaGetDeviceCount does."""
        cls.asked = True

    @classmethod
    def start(cls) -> None:
        """Start CUDA in this process."""
        if cls.bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        cls.asked = cls.started = True


def _after_fork() -> None:
    _State.bad_fork = _State.bad_fork or _State.asked


def gpus() -> int:
    """How many GPUs this process sees."""
    there = int(os.environ.get("PRETEND_GPUS", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    chosen = 0
    for entry in visible.split(","):  # CUDA stops at the first that it does not know
        if not entry.strip().isdigit() or int(entry) >= there:
            break
        chosen += 1
    return chosen


def pretend(torch, setattr=setattr) -> None:
    """Let a loaded torch see `gpus()` GPUs.

    Args:
        torch: The module.
        setattr: Sets an attribute; a test passes one that takes it back.
    """
    cuda, current = torch.cuda, SimpleNamespace(device=0)

    def number(device=None) -> int:
        index = getattr(device, "index", device)
        if isinstance(index, str):
            index = torch.device(index).index
        index = current.device if index is None else index
        if not 0 <= index < gpus():
            raise (AssertionError("Invalid device id") if gpus() else RuntimeError("No CUDA GPUs are available"))
        return index

    def is_available() -> bool:
        if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
            _State.ask()
        return gpus() > 0

    def device_count() -> int:
        if os.environ.get("PRETEND_NVML") == "0":
            _State.ask()
        return gpus()

    def set_device(device) -> None:
        _State.start()
        current.device = number(device)

    def current_device() -> int:
        _State.start()
        return number()

    def get_device_properties(device=None):
        _State.start()
        return SimpleNamespace(
            name=NAME, total_memory=MEMORY, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
            uuid=f"00000000-0000-0000-0000-{number(device):012}", gcnArchName="", warp_size=32,
            L2_cache_size=52_428_800, is_integrated=0, is_multi_gpu_board=0,
        )  # fmt: skip

    def peers(a, b) -> bool:
        return number(a) != number(b)

    def started() -> None:
        _State.start()
        number()
        raise NoKernel("CUDA")

    def later():  # torch.compile wants a function of its own for each name
        return lambda *_args, **_more: None  # waits for the start of CUDA, or does nothing without it

    def rng_state(*_args, **_more):
        _State.start()
        return torch.zeros(16, dtype=torch.uint8)

    def refuse(what: str):
        def call(*_args, **_more):
            _State.start()
            raise NoKernel(f"torch.cuda.{what}")

        return call

    answers = {
        "is_available": is_available,
        "device_count": device_count,
        "set_device": set_device,
        "current_device": current_device,
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "get_device_capability": lambda device=None: CAPABILITY if get_device_properties(device) else None,
        "get_arch_list": lambda: ["sm_80", "sm_90", "sm_100"],
        "can_device_access_peer": peers,
        "mem_get_info": lambda device=None: (get_device_properties(device).total_memory - 2**29, MEMORY),
        "is_bf16_supported": lambda *_args, **_more: True,
        "_is_in_bad_fork": lambda: _State.bad_fork,
        "_lazy_init": started,
        "get_rng_state": rng_state,
        "set_rng_state": later(),
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: _State.started and not _State.bad_fork,
        "synchronize": lambda *_args: _State.start(),
        "empty_cache": later(),
        "manual_seed": later(),
        "manual_seed_all": later(),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    for name in ("memory_stats", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
                 "memory_reserved", "reset_peak_memory_stats", "current_stream"):  # fmt: skip
        setattr(cuda, name, refuse(name))
    for name in ("Event", "Stream"):  # classes: others name them in annotations
        setattr(cuda, name, type(name, (), {"__init__": refuse(name)}))
    setattr(cuda.memory, "get_allocator_backend", lambda: "native")
    for name in ("_record_memory_history", "_snapshot"):
        setattr(cuda.memory, name, refuse(f"memory.{name}"))
    setattr(cuda.nccl, "version", lambda: (2, 27, 7))
    setattr(torch.version, "cuda", "13.0")
    stream = _Stream()
    stream.device = torch.device("cuda", 0)
    setattr(torch.accelerator, "current_stream", lambda *_args: stream)
    # What PyTorch takes where nobody names a device, `fully_shard` without a mesh for instance.
    for module, name in ((torch._C, "_get_accelerator"), (torch.accelerator, "current_accelerator")):
        setattr(module, name, _accelerator(torch, getattr(module, name)))
    _no_nccl(torch.distributed, setattr)


class _Stream:
    """The current stream, which optimizers and torch.compile look at and put nothing on."""

    stream_id = device_index = 0

    def is_capturing(self) -> bool:
        return False


def _accelerator(torch, real):
    return lambda *args, **more: torch.device("cuda") if gpus() else real(*args, **more)


def _no_nccl(dist, setattr) -> None:
    real = dist.distributed_c10d.init_process_group

    def init_process_group(backend=None, *args, **more):
        if "nccl" in str(backend):
            _State.start()
            raise NoKernel("NCCL")
        return real(backend, *args, **more)

    setattr(dist, "is_nccl_available", lambda: True)
    for module in (dist, dist.distributed_c10d):
        setattr(module, "init_process_group", init_process_group)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as ever, and has it pretend once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                sys.meta_path.remove(self)
                load(module)
                pretend(module)

            spec.loader.exec_module = exec_module
        return spec


os.register_at_fork(after_in_child=_after_fork)
if os.environ.get("PRETEND_GPUS") and "torch" not in sys.modules:
    sys.meta_path.insert(0, _Finder())
