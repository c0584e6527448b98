"""Which versions of PyTorch the course supports, how they differ, and when each was last tried.

    torch_facts("2.15.0+cu132").fsdp2_frees_buffer_before_copy      # True; the pinned 2.13 says False
    last_runs(read_runs())                                          # a row for each combination of `make matrix`

A calculator whose answer depends on a difference takes `torch="2.13"` as a setting, the version of constraints.txt by
default. What compares with the installed PyTorch passes `torch.__version__`.
Pages: book/versions.md, book/status.md.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Minor releases, oldest first, and the one in constraints.txt.
SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
PINNED = "2.13"


@dataclass(frozen=True)
class Difference:
    """Something that PyTorch does in one way up to a release, and in another from there on.

    Attributes:
        name: A field of `TorchFacts`.
        what: Where it shows, in a few words.
        since: First release with the new way.
        before: What older releases do: the value of the fact, and a sentence.
        after: The same of `since` and later.
        source: Where it can be read: a pull request, or a file of PyTorch.
    """

    name: str
    what: str
    since: str
    before: tuple[Any, str]
    after: tuple[Any, str]
    source: str

    def of(self, version: str) -> tuple[Any, str]:
        """Return the fact and its sentence for a release.

        Args:
            version: A member of `SUPPORTED`.
        """
        return self.after if SUPPORTED.index(version) >= SUPPORTED.index(self.since) else self.before


#: The page draws its table from these; a calculator, a lab or a test reads each.
DIFFERENCES = (
    Difference(
        "fsdp2_frees_buffer_before_copy",
        "FSDP2, forward: when the all-gather buffer of the unit before is freed",
        "2.15",
        (False, "after the next unit is copied out of its own buffer"),
        (True, "before that copy, so that fewer bytes are gathered at a time"),
        "https://github.com/pytorch/pytorch/pull/196460",
    ),
    Difference(
        "fsdp2_reduces_as_stored",
        "FSDP2: the dtype in which gradients are reduced, and accumulate unreduced, without `reduce_dtype`",
        "2.15",
        (False, "`param_dtype`, which is bf16 in mixed precision"),
        (True, "the parameter's `grad_dtype`, or else the dtype of its shard: fp32. A run's results change"),
        "https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/fsdp/_fully_shard/_fsdp_api.py",
    ),
    Difference(
        "fsdp2_refuses_half_tied",
        "FSDP2: tied weights of which one is in a unit and the other is not",
        "2.12",
        (False, "go on without a word"),
        (True, "stop at the first forward"),
        "https://github.com/pytorch/pytorch/pull/176225",
    ),
    Difference(
        "collectives_called_single",
        "Names of the collectives on one flat tensor",
        "2.13",
        (False, "`all_gather_into_tensor`, `reduce_scatter_tensor`"),
        (True, "`all_gather_single`, `reduce_scatter_single`; the older names warn until 2.14"),
        "https://github.com/pytorch/pytorch/pull/186123",
    ),
    Difference(
        "e5m2fnuz_eps_is_right",
        "`torch.finfo(torch.float8_e5m2fnuz).eps`, the gap after 1",
        "2.15",
        (False, "0.125, although the format has two bits of mantissa"),
        (True, "0.25"),
        "https://github.com/pytorch/pytorch/blob/v2.15.0/c10/util/Float8_e5m2fnuz.h",
    ),
    Difference(
        "pipeline_csv_has_waits",
        "What a prepared pipeline schedule holds when PyTorch writes it as CSV",
        "2.15",
        (False, "sends, receives, gathers and reductions"),
        (True, "the waits for sends and reductions, too: `0WAIT_SEND_F0`, `0WAIT_REDUCE_GRAD`"),
        "https://github.com/pytorch/pytorch/blob/v2.15.0/torch/distributed/pipelining/schedules.py",
    ),
    Difference(
        "pipelining_greets_its_own_rank",
        "Pipeline schedules with neighbouring stages on one rank, such as ZBV and DualPipeV, before their first step",
        "2.12",
        (True, "a rank sends to itself, which gloo refuses; `lablib` leaves that out"),
        (False, "stages of a rank talk directly"),
        "https://github.com/pytorch/pytorch/blob/v2.12.1/torch/distributed/pipelining/schedules.py",
    ),
    Difference(
        "tracker_skips_dtensor_shapes",
        "PyTorch's memory trackers, where a DTensor asks for shapes with fake tensors",
        "2.13",
        (False, "count them as memory"),
        (True, "leave them out"),
        "https://github.com/pytorch/pytorch/pull/183970",
    ),
    Difference(
        "gloo_has_all_to_all",
        "`torch.distributed.all_to_all`, with lists of tensors, on gloo",
        "2.12",
        (False, "refused; `all_to_all_single` works, and the exercises put it in place"),
        (True, "works"),
        "https://github.com/pytorch/pytorch/pull/165435",
    ),
    Difference(
        "cpu_scales_by_row",
        "`torch._scaled_mm` on a CPU, which multiplies FP8 matrices",
        "2.12",
        (False, "takes one scale for each matrix"),
        (True, "takes a scale for each row, too"),
        "https://github.com/pytorch/pytorch/pull/170670",
    ),
    Difference(
        "takes_any_setuptools",
        "Which setuptools the wheel of torch accepts",
        "2.13",
        (False, "below 82, so the pin of constraints.txt must go: `make matrix` leaves it out"),
        (True, "any that constraints.txt pins"),
        "https://github.com/pytorch/pytorch/pull/187262",
    ),
)

#: Methods of FSDP2's `FSDPModule` that the oldest release lacks, and the release that brought each.
DIALS_SINCE = {
    "set_symm_mem_for_comm": "2.12",
    "reset_iter_state": "2.13",
    "set_reduce_scatter_unused_params": "2.13",
    "set_reduce_scatter_max_input_buffers": "2.13",
    "set_separate_reduce_scatter_group": "2.13",
    "set_keep_unsharded_storage": "2.15",
    "set_manual_backward_finalization": "2.15",
}


@dataclass(frozen=True)
class TorchFacts:
    """The facts of one release of PyTorch, by the names of `DIFFERENCES`, which say what each is about.

    Attributes:
        version: The release, a member of `SUPPORTED`.
    """

    version: str
    fsdp2_frees_buffer_before_copy: bool
    fsdp2_reduces_as_stored: bool
    fsdp2_refuses_half_tied: bool
    collectives_called_single: bool
    e5m2fnuz_eps_is_right: bool
    pipeline_csv_has_waits: bool
    pipelining_greets_its_own_rank: bool
    tracker_skips_dtensor_shapes: bool
    gloo_has_all_to_all: bool
    cpu_scales_by_row: bool
    takes_any_setuptools: bool


def release(version: str) -> str:
    """Return the supported release that a version string belongs to; a later one counts as the last that is known.

    Args:
        version: Such as "2.13", "2.15.0+cu132", "2.11.0a0+git1234" or `torch.__version__`.
    """
    numbers = re.match(r"(\d+)\.(\d+)(?![^.+a-z])", str(version))
    if not numbers:
        raise ValueError(f"torch={version!r} is no version of PyTorch; write it like {PINNED!r}")
    asked = (int(numbers[1]), int(numbers[2]))
    known = {tuple(map(int, name.split("."))): name for name in SUPPORTED}
    if asked < min(known):
        raise ValueError(f"torch={version!r} is older than {SUPPORTED[0]}, the first that the course supports")
    return known[max(number for number in known if number <= asked)]


def torch_facts(version: str = PINNED) -> TorchFacts:
    """Return what a version of PyTorch does, where versions differ."""
    name = release(version)
    return TorchFacts(name, **{difference.name: difference.of(name)[0] for difference in DIFFERENCES})


PYTHONS = ("3.11", "3.12", "3.13")
#: Every Python with the version of constraints.txt, and every other PyTorch with one Python; the ends with two.
COMBINATIONS = (
    "3.11/2.13.0",
    "3.12/2.13.0",
    "3.13/2.13.0",
    "3.11/2.11.0",
    "3.12/2.12.1",
    "3.13/2.14.0",
    "3.11/2.15.0",
    "3.13/2.15.0",
)
PARTS = ("unit", "labs")
#: Written by `tools/matrix.py` alone: combination -> part -> what was run.
RUNS = Path(__file__).resolve().parents[2] / "book" / "data" / "matrix.json"


@dataclass(frozen=True)
class Combination:
    """A Python and a PyTorch.

    Attributes:
        python: Minor version, "3.13".
        torch: Exact version, "2.14.0".
    """

    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}/{self.torch}"

    @property
    def folder(self) -> str:
        """The name of its environment."""
        return f"{self.python}-{self.torch}"


def combination(text: str) -> Combination:
    """Read a combination.

    Args:
        text: "3.13/2.14.0".
    """
    found = re.fullmatch(r"(\d+\.\d+)/(\d+\.\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"{text!r} is no combination of Python and PyTorch; write it like 3.13/2.14.0")
    if found[1] not in PYTHONS or found[2] not in SUPPORTED:
        raise ValueError(
            f"{text!r} is not supported: use Python {PYTHONS[0]} to {PYTHONS[-1]} and torch {SUPPORTED[0]} to "
            f"{SUPPORTED[-1]}"
        )
    return Combination(found[1], f"{found[2]}.{found[3]}")


def read_runs(path: Path = RUNS) -> dict[str, dict[str, Any]]:
    """Return the runs by combination; none where nothing was run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def last_runs(runs: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each combination: what was run last, when, of which commit, and how it went."""
    rows = []
    for name in dict.fromkeys([*COMBINATIONS, *runs]):
        python, torch = name.split("/")
        row = {"Python": python, "torch": torch}
        for part, title in zip(PARTS, ("tests", "labs"), strict=True):
            row[title] = _said(runs.get(name, {}).get(part))
        rows.append(row)
    return rows


def _said(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not yet run"
    how = f"{run['failed']} FAILED, {run['passed']:,} passed" if run["failed"] else f"{run['passed']:,} passed"
    how += f", {run['skipped']} skipped" if run["skipped"] else ""
    changed = " with changes" if run["changed"] else ""
    return f"{run['date'][:10]}: {how} (Python {run['python']}, torch {run['torch']}, {run['commit'][:7]}{changed})"
