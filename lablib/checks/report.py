"""The verdict of a check: passed, not attempted, or which idea is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


class Wrong(Exception):
    """Raised by a check: one sentence about the idea that is wrong."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        status: "passed", "not attempted" or "wrong".
    """

    name: str
    status: Literal["passed", "not attempted", "wrong"]
    message: str

    def __str__(self) -> str:
        """Return the line that the notebook prints."""
        return f"{self.name}: {self.status}" + (f". {self.message}" if self.message else ".")


def check(judge: Callable[..., str | None]) -> Callable[..., Verdict]:
    """Turn a judging function into a check that never stops the notebook.

    The judge calls the learner's answer and raises `Wrong` with a sentence about the idea.
    It may return a sentence to print when the answer is right.
    A `NotImplementedError` from the answer means that the stub is untouched.
    Any other exception of the answer is reported as wrong, with its type and text.
    """

    @functools.wraps(judge)
    def run(*answers: object) -> Verdict:
        try:
            message = judge(*answers) or ""
            verdict = Verdict(judge.__name__, "passed", message)
        except NotImplementedError:
            verdict = Verdict(judge.__name__, "not attempted", "Replace the raise line with your answer.")
        except Wrong as wrong:
            verdict = Verdict(judge.__name__, "wrong", str(wrong))
        except Exception as error:
            message = f"Your answer stopped with {type(error).__name__}: {error}"
            verdict = Verdict(judge.__name__, "wrong", message)
        print(verdict)
        return verdict

    run.is_check = True
    return run


def close(answer: object, truth: float, *, rel: float = 1e-6) -> bool:
    """Say whether a learner's number equals the truth to a relative tolerance."""
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise Wrong(f"The answer should be a number, and is {answer!r}.") from None
    return abs(number - truth) <= rel * max(abs(truth), 1e-12)


def some(numbers: list[int]) -> str:
    """Return a few numbers as they are, and many as how many they are."""
    return f"{numbers}" if len(numbers) < 4 else f"[{len(numbers)} of them]"
