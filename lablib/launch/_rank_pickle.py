"""What crosses between the notebook and its ranks: a function and its arguments one way, a result back."""

from __future__ import annotations

import importlib
import io
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import torch

_PACKAGE = str(Path(__file__).parents[1])
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
    """Pickle a function and its arguments for the ranks.

    Raises:
        ValueError: If something in them belongs to this process alone.
    """
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
    """Pickle a return value for the notebook.

    Raises:
        TypeError: If it cannot leave the process.
    """
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
