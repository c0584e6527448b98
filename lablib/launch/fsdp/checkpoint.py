"""Distributed checkpoints: each rank writes its own shards, and any number of ranks reads them.

    saving = save_checkpoint("checkpoints", model, optimizer, step, data={"sample": 640}, wait=False)
    ...                                             # training goes on while files are written
    saving.result()                                 # Path("checkpoints/step-00000020")

    progress = load_checkpoint(latest_checkpoint("checkpoints"), model, optimizer)

PyTorch's DCP (`torch.distributed.checkpoint`) stores every tensor under its name in the model, unsharded, in pieces.
A rank that loads reads the pieces that overlap with its shard, so the number of ranks may change in between.

    checkpoints/
        step-00000020/          complete: it got its name when everything was on disk
            training.json       step, data position, tied names, and size and checksum of every file
            .metadata           which tensor lies where (DCP)
            __0_0.distcp, ...   the shards of each rank (DCP)
        .writing-00000030-ab12/ a save that is under way, or one that died

A rename within a file system happens or does not happen. So a crash in the middle of a save leaves a folder that
`latest_checkpoint` never looks at, and the next save removes it.

`export_safetensors` writes the model of a checkpoint as one file, for programs that know nothing of ranks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lablib.calc.errors import read_json
from lablib.launch.fsdp.wrapping import tied_parameters
from lablib.launch.ranks import agree, count_ranks, from_rank_0, own_group, own_rank, readable
from lablib.launch.records import write_json

INFO = "training.json"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = ".writing-"
_CHUNK = 1 << 24  # bytes of a file read at a time


@dataclass(frozen=True)
class Progress:
    """The rest of a checkpoint, besides the model and the optimizer."""

    step: int  # optimizer steps taken
    data: dict[str, Any]  # what the training loop gave to `save`, such as its position in the data
    ranks: int  # ranks that saved it
    # "restored" to the state of each rank, its GPU's included, or "reseeded": with another number of ranks, or on a
    # GPU from a checkpoint of a CPU, there is no state to continue from, so each rank starts a new stream made from
    # the saved one and its own number
    rng: str


class Saving:
    """A checkpoint on its way to disk."""

    def __init__(self, path: Path, future: Future):
        self._path, self._future = path, future
        self._asked = False

    def done(self) -> bool:
        """Tell whether this rank has nothing left to write."""
        return self._future.done()

    def result(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and return its path; every rank must call.

        Raises a RuntimeError if a rank could not write. Older checkpoints are as they were.
        """
        if not self._asked:
            self._asked = True
            agree(lambda: self._future.result(), f"saving {self._path.name} failed")
        self._future.result()
        return self._path

    def finish(self) -> None:
        """Wait like `result`, unless it has been called."""
        if not self._asked:
            self.result()


#: The save that is under way. A second one waits for it: two at a time would mix their messages.
_pending: Saving | None = None


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    data: dict[str, Any] | None = None,
    keep: int | None = 2,
    wait: bool = True,
) -> Saving:
    """Save model, optimizer, step, random state and data position as `folder/step-00000010`.

    Every rank must call it. Until everything is on disk the checkpoint has another name, so `latest` never returns
    a half one.

    Args:
        folder: On a file system that all ranks see.
        data: Anything that JSON can write; the position in the data, so that no sample comes twice.
        keep: Newest checkpoints to keep; None keeps all.
        wait: False returns once the state is copied, and writes in the background. Call `result()` before the
            process ends.

    Returns:
        A handle; `result()` is the path.

    Raises:
        ValueError: If the step is saved already, or a number is out of range.
        RuntimeError: If a rank could not write.
    """
    global _pending
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step={step} must not be negative, and keep={keep} must be None or at least 1")
    folder, previous, _pending = Path(folder), _pending, None
    if previous is not None:
        previous.finish()
    token = from_rank_0(secrets.token_hex(4))
    aside = folder / f".writing-{step:08d}-{token}"
    agree(lambda: begin(folder, step, token) if own_rank() == 0 else None, f"saving step {step} failed")
    state = {"model": _without_ties(model, get_model_state_dict(model)), "rng": _random_state(own_rank())}
    info = {"step": step, "data": data or {}, "ranks": count_ranks(), "tied": tied_parameters(model)}
    # PyTorch makes the state of an optimizer that has none by a step with gradients of zero, and counts it: Adam's
    # bias correction would be of one step more than were taken.
    info["optimizer_stepped"] = bool(optimizer.state)
    with _no_gradients(optimizer):
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    if not info["optimizer_stepped"]:
        optimizer.state.clear()
    writing: Future = Future()
    if wait or not dist.is_initialized():
        try:
            with alone_is_fine():
                dcp.save(state, checkpoint_id=aside, process_group=own_group(), no_dist=not dist.is_initialized())
            writing.set_result(publish(aside, info, keep) if own_rank() == 0 else None)
        except BaseException as error:
            writing.set_exception(readable(error))
    else:
        copied = dcp.async_save(state, checkpoint_id=aside, process_group=own_group())

        def finish() -> None:
            try:
                copied.result()
                # DCP's rank 0 ends after all others have written.
                writing.set_result(publish(aside, info, keep) if own_rank() == 0 else None)
            except BaseException as error:
                writing.set_exception(readable(error))

        threading.Thread(target=finish, name=f"checkpoint-{step}").start()
    saving = Saving(checkpoint_path(folder, step), writing)
    if wait:
        saving.result()
    else:
        _pending = saving
    return saving


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Load a checkpoint into a model on any number of ranks, in place.

    Every rank must call it.

    Args:
        model: Sharded in any way, or a plain module; the same architecture as the saved one.
        optimizer: To continue training; None loads the model only.

    Returns:
        The rest of what was saved. The random state of this rank is set, too.

    Raises:
        ValueError: If the checkpoint is missing, damaged, or of another model; nothing is changed then.
        RuntimeError: If reading fails after all files were verified, as when one is deleted meanwhile; the
            model is then loaded in part.
    """
    info = verify_checkpoint(path)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = _without_ties(model, get_model_state_dict(model))
    _check_same_model(path, weights, stored)
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        stepped = bool(optimizer.state)
        with _no_gradients(optimizer):
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    rng = _random_state(own_rank())
    # Every rank finds its own state, or none does: all of them then begin with rank 0's.
    restored = info["ranks"] == count_ranks() and all(f"rng.{name}" in stored for name in rng)
    state["rng"] = rng if restored else {"rank0": torch.get_rng_state()}
    try:
        with alone_is_fine():
            dcp.load(state, checkpoint_id=path, process_group=own_group(), no_dist=not dist.is_initialized())
    except CheckpointException as error:  # a BaseException, which nobody expects of a file
        if optimizer is not None and not stepped:
            optimizer.state.clear()
        text = f"reading {path} failed on the way, and the model is loaded in part: load another checkpoint"
        raise RuntimeError(f"{text}. {readable(error)}") from None
    for first, *others in tied_parameters(model):
        state["model"] |= dict.fromkeys(others, state["model"][first])
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        if not info.get("optimizer_stepped", True):
            optimizer.state.clear()
    if restored:
        _set_random_state(own_rank(), state["rng"])
    else:  # of the CPU and of every GPU
        torch.manual_seed(zlib.crc32(state["rng"]["rank0"].numpy().tobytes()) + own_rank())
    return Progress(info["step"], info["data"], info["ranks"], "restored" if restored else "reseeded")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None where there is none."""
    found = complete_checkpoints(Path(folder))
    return found[-1] if found else None


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step will be."""
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int, token: str) -> Path:
    """Return the folder to write to; leftovers of saves that died are removed."""
    if (target := checkpoint_path(folder, step)).exists():
        raise ValueError(f"{target} is there already: delete it, or save to another folder")
    for dead in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(dead)
    aside = folder / f"{_ASIDE}{step:08d}-{token}"
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, info: dict[str, Any], keep: int | None) -> Path:
    """Give a finished checkpoint its name, and remove all but the newest."""
    files = sorted(aside.iterdir())
    sizes = {path.name: path.stat().st_size for path in files}
    write_json(aside / INFO, {**info, "files": sizes, "crc32": {path.name: _crc32(path) for path in files}})
    _sync(aside)
    target = checkpoint_path(aside.parent, info["step"])
    aside.rename(target)
    _sync(aside.parent)
    for old in complete_checkpoints(aside.parent)[: -keep if keep else 0]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint under a good name.
        dying = old.rename(old.with_name(f"{_ASIDE}old-{old.name}"))
        shutil.rmtree(dying)
    return target


def read_info(path: str | Path) -> dict[str, Any]:
    """Return what training.json says, once every file is seen to have its full size."""
    if path is None:
        raise ValueError("there is no checkpoint to read: `latest` returns None for a folder without one")
    path = Path(path)
    if not (path / INFO).is_file():
        newest = latest_checkpoint(path) if path.is_dir() else None
        use = f"; did you mean {newest}?" if newest else ""
        raise ValueError(f"{path} is no complete checkpoint: it has no {INFO}{use}")
    try:
        info = read_json(path / INFO)
        files = info["files"].items()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged(path, f"{INFO} cannot be read") from None
    for name, size in files:
        file = path / name
        if not file.exists():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes and was written with {size}")
    return info


def _damaged(path: str | Path, text: str) -> ValueError:
    return ValueError(f"checkpoint {path} is damaged: {text}; use an older one")


def check_content(path: str | Path, info: dict[str, Any], part: slice = slice(None)) -> None:
    """Read files of a checkpoint and compare their checksums; checkpoints of older versions have none."""
    for name, written in sorted(info.get("crc32", {}).items())[part]:
        try:
            same = _crc32(Path(path) / name) == written
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read ({error.strerror})") from None
        if not same:
            raise _damaged(path, f"the content of {name} is not what was written")


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return what training.json says, once all files are seen to be what was written; every rank must call."""
    info: dict[str, Any] = {}

    def look() -> None:
        info.update(read_info(path))
        check_content(path, info, slice(own_rank(), None, count_ranks()))

    agree(look, f"reading {path} failed")
    return info


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """Keep DCP from warning that there are no ranks, where one process is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / INFO).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync(folder: Path) -> None:
    """Force the entries of a folder to disk: a rename that is only in memory is lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _no_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put gradients aside: where there are some, PyTorch makes no state for an optimizer that has taken no step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _random_state(rank: int) -> dict[str, torch.Tensor]:
    """Return the state of a rank's generators: the CPU's, and that of its GPU, from which dropout there draws."""
    state = {f"rank{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # this process computes on its current device
        state[f"rank{rank}-cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(rank: int, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state[f"rank{rank}"])
    if torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state[f"rank{rank}-cuda"])


def _without_ties(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Drop the second and further names of tied parameters: one tensor is stored once."""
    again = {name for _, *others in tied_parameters(model) for name in others}
    return {name: value for name, value in weights.items() if name not in again}


def _check_same_model(path: str | Path, weights: dict[str, Any], stored: dict[str, Any]) -> None:
    saved = {name.removeprefix("model."): m for name, m in stored.items() if name.startswith("model.")}
    missing = sorted(weights.keys() - saved.keys())
    unknown = sorted(saved.keys() - weights.keys())
    shapes = [
        f"{name} is {tuple(saved[name].size)} there and {tuple(weights[name].shape)} here"
        for name in sorted(weights.keys() & saved.keys())
        if tuple(saved[name].size) != tuple(weights[name].shape)
    ]
    problems = [
        f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("it lacks", missing), ("the model has no", unknown), ("", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"checkpoint {path} is of another model: {'; '.join(p.strip() for p in problems)}")


def export_safetensors(checkpoint: str | Path, file: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of a checkpoint as one safetensors file, cast to `dtype` if given; in one process, without ranks.

    Names are those of the module that was saved: a Hugging Face model's file is one that `from_pretrained` reads.
    Of tied parameters the first name is written, as Hugging Face does; `safetensors.torch.load_model` restores
    the others. The full model must fit into memory.
    """
    info = read_info(checkpoint)
    check_content(checkpoint, info)
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    saved = {name: entry for name, entry in stored.items() if name.startswith("model.")}
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    with alone_is_fine():
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    tensors = {
        name.removeprefix("model."): t.to(dtype) if dtype and t.is_floating_point() else t for name, t in state.items()
    }
    return write_safetensors_file(tensors, file, step=str(info["step"]), tied=json.dumps(info["tied"]))


def write_safetensors_file(tensors: Mapping[str, Tensor], file: str | Path, **metadata: str) -> Path:
    """Write tensors to a file; an older file is replaced when the new one is complete."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("writing weights needs the package safetensors: pip install safetensors") from error
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.writing")
    try:
        save_file(dict(tensors), aside, metadata={"format": "pt", **metadata})
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    return file
