"""The guard around a learner's answer: it ends loops that do not end, and writes iterators out.

`check` puts it around every judge, so a new check need not think of it: what the judge calls, what it walks through and
what autograd calls for it are all inside.
"""

from __future__ import annotations

import dis
import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import lablib

#: Lines of Python that an answer may run for one case: a second of work, a hundred times what a search needs.
MOST_LINES = 1_000_000
#: Values that an answer may give one after the other.
MOST_VALUES = 100_000

#: Whose lines are not the learner's. A library's first use may import a million of them, as `torch.optim.SGD` does.
_LIBRARIES = (
    *("<frozen ", str(Path(lablib.__file__).parent)),
    *(sysconfig.get_paths()[where] for where in ("stdlib", "purelib", "platlib")),
)


class Wrong(Exception):
    """Raised by a check: one sentence about the idea that is wrong."""


class _Endless(BaseException):
    """Raised inside an answer that does not come to its end; no `except Exception` of the answer holds it up."""


class guarded:
    """Count the learner's lines inside, whoever calls them, and raise `Wrong` when they are too many.

    Args:
        case: What the answer was asked, for the sentence.
        lines: How many lines may run.
        called: Gets the names of the libraries' functions that the learner's lines call.
    """

    def __init__(self, *case: object, lines: int = MOST_LINES, called: dict[str, None] | None = None) -> None:
        self.case, self.lines, self.left, self.called = case, lines, lines, called

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self._count)

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        sys.settrace(self.before)
        if isinstance(error, _Endless):
            shown = ", ".join(map(_brief, self.case))
            told = f" for {shown}" if 0 < len(shown) < 100 else ""
            raise Wrong(
                f"It has not ended{told} after {self.lines:,} of its lines: a loop never ends, or tries far too much."
            ) from None

    def _count(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        if event == "call":
            if _of_libraries(frame.f_code.co_filename):
                if self.called is not None and frame.f_back and not _of_libraries(frame.f_back.f_code.co_filename):
                    name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
                    if re.fullmatch(r"lablib\.checks\.rung\d\d\._\w+", name):
                        raise Wrong(_ASKED)
                    self.called[name] = None
                return None
            if frame.f_code.co_filename == "<string>" and _made_by_libraries(frame.f_globals.get("__name__")):
                return None
            frame.f_trace_opcodes = _spins(frame.f_code)
        self.left -= event in ("line", "opcode")
        if self.left < 0:
            raise _Endless
        return self._count


class Answer:
    """A learner's function: each call has its own lines to run, and what it gives one by one is written out.

    It can be sent to ranks as the function itself can.

    Attributes:
        called: Its own name, and those of the libraries' functions that its lines have called, lablib's among them.
    """

    def __init__(self, function: Callable, lines: int = MOST_LINES) -> None:
        functools.update_wrapper(self, function)
        self.function, self.lines = function, lines
        own = getattr(function, "func", function)  # a library's function may be the answer itself, or in a partial
        self.called: dict[str, None] = {f"{own.__module__}.{getattr(own, '__qualname__', '')}": None}  # in order

    def __call__(self, *case: Any, **named: Any) -> Any:
        """Call the function; raise `Wrong` if it does not come to its end."""
        with guarded(*case, *named.values(), lines=self.lines, called=self.called):
            return _written_out(self.function(*case, **named))


def in_answer() -> bool:
    """Return whether the function that asks was called from lines that are no library's."""
    return not _of_libraries(sys._getframe(2).f_code.co_filename)


#: What hands out an object's private attributes.
_INSIDE = ("__dict__", "__getstate__", "__reduce__", "__reduce_ex__")
_ASKED = "This asks the check where it planted the fault, or what it keeps to itself: at work there is nobody to ask, so run it."


def refuse_peeking(answer: object, *hidden: str) -> None:
    """Raise `Wrong` if an answer has called functions of a check that know where a fault was planted.

    Args:
        hidden: Their names with their module, as in "lablib.checks.rung10.told"; private ones are refused in any case.
    """
    if set(hidden) & set(getattr(answer, "called", ())):
        raise Wrong(_ASKED)


class Sealed:
    """A job with a fault to find: its private attributes, which know the fault, cannot be read by an answer."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; raise `Wrong` if lines that are no library's ask for a private one."""
        private = name in _INSIDE or (name.startswith("_") and not name.startswith("__"))
        if private and in_answer():
            raise Wrong(_ASKED)
        return object.__getattribute__(self, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of a pickle, which is read in whoever's lines."""
        object.__getattribute__(self, "__dict__").update(state)


def own_line(error: BaseException) -> str:
    """Return where in the learner's code an exception was raised, for the end of a sentence; "" if nowhere."""
    return _line_of([(entry.filename, entry.lineno or 0) for entry in traceback.extract_tb(error.__traceback__)])


def line_in(printed: str) -> str:
    """Return the learner's line that a printed traceback, of a rank, ends with; "" if it has none."""
    found = [line.strip().split('", line ') for line in printed.splitlines() if line.strip().startswith('File "')]
    entries = [(parts[0][6:], parts[1].split(",")[0]) for parts in found if len(parts) == 2]
    return _line_of([(name, int(number)) for name, number in entries if number.isdigit()])


def _line_of(entries: list[tuple[str, int]]) -> str:
    own = [entry for entry in entries if not _of_libraries(entry[0])]
    if not own:
        return ""
    text = linecache.getline(*own[-1]).strip()
    return f" in line {own[-1][1]}" + (f", `{text[:80]}`" if text else "")


def _written_out(value: Any, depth: int = 3) -> Any:
    """Return what comes one by one as a list, inside of plain containers too."""
    if isinstance(value, Iterator):
        # What comes is written out before the next comes: a generator inside may use what its maker goes on with.
        values = [_written_out(each, depth - 1) if depth else each for each in islice(value, MOST_VALUES + 1)]
        if len(values) > MOST_VALUES:
            raise Wrong(f"After {MOST_VALUES:,} values more come: a loop never ends, or gives far more than was asked.")
        return values
    if depth == 0 or type(value) not in (list, tuple, dict) or len(value) > MOST_VALUES:
        return value
    if type(value) is dict:
        return {key: _written_out(each, depth - 1) for key, each in value.items()}
    return type(value)(_written_out(each, depth - 1) for each in value)


def _brief(value: object) -> str:
    try:
        return f"{value:g}" if isinstance(value, float) else repr(value)
    except Exception:  # a `repr` may fail like any other line of the learner's
        return "?" * 100


@functools.cache
def _of_libraries(filename: str) -> bool:
    return filename.startswith(_LIBRARIES)


@functools.cache
def _made_by_libraries(module: str | None) -> bool:
    """Say whether a function without a file, such as a dataclass's `__init__`, is of a library's class."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return str(module).startswith("namedtuple_") or (file is not None and _of_libraries(file))


@functools.lru_cache
def _spins(code: CodeType) -> bool:
    """Say whether a jump leads to itself, as `while True: pass` does on one line: Python 3.11 counts no line there."""
    return any(step.argval == step.offset and step.opname.startswith("JUMP") for step in dis.get_instructions(code))
