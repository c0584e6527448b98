"""One formula of the course, and the job that its example is computed for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params


@dataclass(frozen=True)
class Job:
    """What the examples of the formula sheet are computed for."""

    config: ModelConfig
    gpu: Accelerator
    ranks: int = 64  # data-parallel where the formula is of data parallelism
    tp: int = 8
    pp: int = 4
    chunks: int = 2  # stages on a rank, v
    microbatches: int = 16  # in one step, m
    micro_batch: int = 1  # sequences, b
    seq: int = 8192
    tokens: float = 15e12  # of the training run, D

    @property
    def params(self) -> int:
        """Return the number of parameters, psi."""
        return count_params(self.config).total

    @property
    def global_batch(self) -> int:
        """Return the sequences of one step, B."""
        return self.ranks * self.micro_batch * self.microbatches


def job(model: str = "llama-3-8b", gpu: str = "h100") -> Job:
    """Return the job of the formula sheet for a model and a GPU, by their names."""
    return Job(preset(model), accelerator(gpu))


@dataclass(frozen=True)
class Formula:
    """One formula: what it gives, how it is written, where it is derived, which function computes it.

    Attributes:
        tex: The right-hand side, or an equation, on one line.
        symbols: What its letters mean, "K: bytes of optimizer state of a parameter; N: ranks".
        label: The label of the displayed equation in the chapter.
        code: The function of lablib, with its full dotted name.
        example: What it gives for a job, with the unit.
        page: The page of the book with the derivation; empty for the rung's chapter.
    """

    name: str
    tex: str
    symbols: str
    label: str
    code: str
    example: Callable[[Job], str]
    page: str = ""
