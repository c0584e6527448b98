"""Fail on all ranks if one fails, and say in a sentence what a long error of a distributed job means.

    agree(work, "saving failed")    # on every rank; raises on all of them if `work` raises on any
    with one_sentence():            # in a script: the sentence to standard error, exit code 1
        main()

A library tells what it saw: a connection closed, a timeout. The cause is often on another rank, or outside. `_KNOWN`
goes from causes to consequences, so the first match is the one to look at. All of it works without ranks, too.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

_own_group: tuple[Any, dist.ProcessGroup] | None = None


def own_rank() -> int:
    """Return the number of this rank; 0 without ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_ranks() -> int:
    """Return the number of ranks; 1 without any."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_group() -> dist.ProcessGroup | None:
    """Return a gloo group of its own: messages of a save in the background must not mix with those of training."""
    global _own_group
    if not dist.is_initialized():
        return None
    if _own_group is None or _own_group[0] is not dist.group.WORLD:
        _own_group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _own_group[1]


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=own_group())
    return box[0]


def agree(work: Callable[[], Any], failure: str) -> None:
    """Do something on every rank; if it fails on any, raise on all of them.

    Without it the others would wait for ever for the rank that failed.

    Raises:
        ValueError: On the ranks where `work` raised one, and everywhere if the first rank that failed did.
        RuntimeError: For any other failure.
    """
    error: BaseException | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    known = isinstance(error, _Unwritten)
    text = str(error) if known else f"rank {own_rank()}: {type(error).__name__}: {error}" if error else ""
    texts = [text] * count_ranks()
    if dist.is_initialized():
        dist.all_gather_object(texts, text, group=own_group())
    if isinstance(error, ValueError):
        raise error
    if text := next(filter(None, texts), None):
        if found := re.match(r"rank \d+: ValueError: ", text):
            raise ValueError(text[found.end() :])
        raise RuntimeError(f"{failure}. {text}") from error


class _Unwritten(RuntimeError):
    """A failed save; the text names the rank."""


def readable(error: BaseException) -> BaseException:
    """Return one line for what DCP tells with the tracebacks of all ranks, and what is known about it."""
    # Late: it takes half a second, and every rank imports this package.
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return error
    failures = (f"rank {rank}: {_meaning(e)}{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
    return _Unwritten("; ".join(failures))


_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Errno 28|Errno 122|Disk quota exceeded",
        "The disk is full: free some room or keep fewer checkpoints. The checkpoints that were complete before are "
        "untouched, and the run resumes from the newest of them.",
    ),
    (
        r"Errno 27\b|File too large",
        "A file is larger than this process may write: raise the limit (ulimit -f). The checkpoints that were complete "
        "before are untouched.",
    ),
    (
        # This is what PyTorch's writer of tensors says of a full disk; the system's error is lost on the way.
        r"inline_container\.cc:\d+\] ?\.? unexpected pos",
        "A file of the checkpoint could not be written to its end: the disk is full, or a quota is reached. The "
        "checkpoints that were complete before are untouched, and the run resumes from the newest of them.",
    ),
    (r"No module named '(transformers|safetensors|peft)\b", "The package {0} is not installed here: pip install {0}."),
    (
        r"(checkpoint \S+ is damaged: [^;\n]+)",
        "{0}: use `lablib.launch.training.resume`, which takes the newest undamaged one.",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "The rendezvous port is taken, perhaps by a job that you believe dead: end that job, or give another port "
        "in --rdzv-endpoint.",
    ),
    (
        r"RendezvousClosedError|rendezvous '?(\S*?)'? is closed",
        "The rendezvous is closed: a job with the same --rdzv-id has ended on it. Start with another --rdzv-id, or "
        "end the old agent that still holds the port.",
    ),
    (
        r"RendezvousTimeoutError|RendezvousConnectionError|waiting for clients|wait for clients|"
        r"connection to the C10d store has failed",
        "Not all machines met in time: check that each one was started with the same --rdzv-endpoint, --rdzv-id and "
        "--nnodes, and that the first one can be reached on that port.",
    ),
    (
        r"connectFullMesh failed[^\n]*Connection refused|socketPollConnect[^\n]*Connection refused",
        "A rank looked for another one at an address where nobody is any more: the rendezvous is stale. After a restart "
        "by torchrun, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; otherwise give the job a new --rdzv-id and port.",
    ),
    (
        r"Detected mismatch between collectives",
        "Two ranks called different collectives in the same place: compare what each of them ran, named in the "
        "message, and look for a branch that depends on the rank.",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError",
        "A GPU's memory is full: take smaller micro-batches, recompute activations, or shard over more ranks.",
    ),
    (
        r"SignalException: Process \d+ got signal: (\d+)",
        "torchrun was told to stop by signal {0}, and handed it on to its ranks: a run with StopOnSignal has saved its "
        "last step, and goes on from there when it is started again.",
    ),
    (
        r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|ended by SIGKILL",
        "A rank was killed with signal 9, which nothing can catch: by somebody, or by the system for want of memory "
        "(dmesg says so). The others end after it.",
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ ?ms",
        "A collective was not joined by all ranks in time: find the rank that is not in it, with the flight recorder "
        "or TORCH_DISTRIBUTED_DEBUG=DETAIL.",
    ),
    (
        r"Connection closed by peer|Connection reset by peer",
        "Another rank ended first and closed its connection: the cause is in that rank's log.",
    ),
)


def explain(text: str) -> str | None:
    """Return one sentence, or two, for what is known, and None for the rest."""
    for pattern, sentence in _KNOWN:
        if found := re.search(pattern, text):
            return sentence.format(*found.groups())
    return None


def own_line(error: BaseException) -> str:
    """Return the line of an error that says what happened, without the frames before it and the advice after it."""
    text = getattr(error, "traceback", "")
    lines = [line for line in (text or str(error)).splitlines() if line.strip()] or [type(error).__name__]
    # In a traceback an exception's own line begins at the margin with its name.
    named = [line for line in lines if text and re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    return (named[-1] if named else lines[0]).strip()


@contextmanager
def one_sentence() -> Iterator[None]:
    """Print what a known error means and leave with code 1; other errors go their way with their traceback.

    `ValueError` is what lablib raises for bad input, `RuntimeError` for what a run cannot survive; where it is lablib's
    own, its message is the sentence.
    The process leaves at once: destructors of a process group can wait for ranks that are gone.
    """
    try:
        yield
    except Exception as error:
        sentence = explain(f"{type(error).__name__}: {error}")
        if sentence is None and (isinstance(error, ValueError) or _is_our_own(error)):
            sentence = str(error)
        if sentence is None:
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
        rank = os.environ.get("RANK")
        print(f"{f'rank {rank}: ' if rank else ''}{sentence}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def _is_our_own(error: Exception) -> bool:
    """Say whether lablib raised a RuntimeError itself, and no library under it."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return type(error) is RuntimeError and Path(__file__).parents[1] in Path(innermost.filename).parents


def _meaning(error: BaseException) -> str:
    meaning = explain(f"{error}")
    return f"{meaning} " if meaning else ""
