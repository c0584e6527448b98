"""Predictions locked before a run, comparisons after it, and records that say where they were made.

`predict` stores a guess before anything is measured; `compare` puts the measurement and lablib's number beside it,
and says by how much each misses. `summary` says what was guessed and passed.
`run_or_replay` measures and writes a record when the runner asks for one, and otherwise loads the record
that is committed under `labs/recorded/`. `gpu_samples` does so with results that need GPUs: measured where there are
some, replayed where there are none, and never made up. Such a record belongs to a number of GPUs, `NN_name-2gpu.json`.

`SampleCache` keeps samples one by one, so that a lab that was interrupted repeats nothing. Under `rung labs run` each
sample is a file in the folder of that run; in a notebook of your own nothing is kept: re-running a cell measures again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lablib import __version__, course_folder
from lablib.calc.errors import read_json, shown
from lablib.launch.records.machine import gpu_topology, machine_label, this_machine

#: Of numbers; two of them may be divided by each other.
SMALLEST, LARGEST = 1e-30, 1e30


class Kind(NamedTuple):
    """What a value is called, and whether one is it."""

    name: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TEXT = Kind("text", lambda value: isinstance(value, str))
WHOLE = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value <= LARGEST)
NUMBER = Kind("a number, 0 or more", lambda value: _is_number(value) and 0 <= value <= LARGEST)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and SMALLEST <= value <= LARGEST)
#: What a run wrote down, which may have diverged.
FLOAT = Kind("a number", lambda value: _is_number(value) and not LARGEST < abs(value) < math.inf)


def check_fields(found: object, shape: Any, path: Path) -> Any:
    """Return what was read from a file, or raise a ValueError that names the file and the first field that is wrong."""
    if problem := _wrong(found, shape, ""):
        raise ValueError(f"{path}: {problem}")
    return found


def _wrong(found: Any, shape: Any, name: str) -> str:
    what = name or "it"
    if isinstance(shape, Kind):
        return "" if shape.holds(found) else f"{what} is {shown(found)} and must be {shape.name}"
    kind, called = (list, "list") if isinstance(shape, list) else (dict, "dictionary")
    if not isinstance(found, kind):
        return f"{what} is {shown(found)} and must be a {called}"
    if kind is list:
        problems = (_wrong(each, shape[0], f"{name}[{number}]") for number, each in enumerate(found))
        return next(filter(None, problems), "")
    for key, inner in shape.items():
        field = key.removesuffix("?")
        inside = f"{name}.{field}" if name else field
        if field != key and found.get(field) is None:
            continue
        if field not in found:
            return f"{inside} is missing"
        if problem := _wrong(found[field], inner, inside):
            return problem
    return ""


#: The runner sets this variable; without it nothing is ever written to `labs/recorded/`.
RECORD_SWITCH = "LABLIB_RECORD"
#: The runner sets this variable to the folder of the lab that it runs.
FOLDER_SWITCH = "LABLIB_LAB_FOLDER"

#: Where the runner wants records to be written and read first, if not in `labs/recorded/`: each person of a room has a folder.
RECORDED_SWITCH = "LABLIB_RECORDED"

#: The last verdict on each exercise of this kernel, in the order of their first checks; `lablib.checks` writes it.
CHECKED: dict[str, str] = {}


def repository_root() -> Path:
    """Return the folder that holds pyproject.toml, wherever the notebook runs; see `lablib.course_folder`."""
    return course_folder()


def experiments_dir() -> Path:
    """Return the folder for a learner's own results; `LABLIB_EXPERIMENTS` moves it."""
    return Path(os.environ.get("LABLIB_EXPERIMENTS") or repository_root() / "distributed-experiments")


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write JSON so that a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's 0600 would keep a record from everyone but its author.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@dataclass
class _Prediction:
    value: float | None
    unit: str
    when: str
    expected: float | None = None
    measured: float | None = None

    def off_by(self, number: float | None) -> str:
        """Return by how much a number misses the measurement, "17 % too low" or "exact"; "-" where there is none."""
        if number is None or self.measured is None:
            return "-"
        counts = float(number).is_integer() and self.measured.is_integer()
        if math.isclose(number, self.measured, rel_tol=0 if counts else 1e-6):  # rounding of fp32
            return "exact"
        way = "high" if number > self.measured else "low"
        if not self.measured:
            return f"too {way}"
        percent = 100 * abs((number - self.measured) / self.measured)
        if percent < 10:
            size = f"{percent:.2g}" if percent >= 0.01 else "below 0.01"
        elif 99 < percent < 100:
            size = "over 99"  # 100 too low would be zero
        else:
            size = f"{percent:,.0f}" if percent < 10000 else "over 9,999"
        return f"{size} % too {way}"


class Predictions:
    """The predictions of one lab, locked from the first measurement on."""

    def __init__(self, lab: str) -> None:
        self.lab = lab
        self._entries: dict[str, _Prediction] = {}

    def predict(self, name: str, guess: float | None, unit: str) -> float | None:
        """Store a guess before the run; return the one that counts, the first one if `name` is already measured.

        Args:
            guess: None for no guess: `compare` then shows lablib's number and the measurement alone.
        """
        entry = self._entries.get(name)
        if entry is not None and entry.measured is not None:
            if entry.value != guess:
                held = "no guess" if entry.value is None else f"{_number(entry.value)} {entry.unit}".strip()
                print(f"{name}\n  locked at {held}: it is measured already.")
                print("  To guess again, restart the kernel and run from the top.")
            return entry.value
        self._entries[name] = _Prediction(None if guess is None else float(guess), unit, utc_now())
        self._save()
        print(_titled(name, self._entries[name]))
        print("  no guess" if guess is None else f"  you predict {_number(guess)}")
        return self._entries[name].value

    def compare(self, name: str, measured: float, expected: float | None = None) -> None:
        """Put a measurement beside the guess and lablib's own number, each with by how much it misses.

        Args:
            expected: lablib's number, which the cell of the guess does not show; None where lablib has none.
        """
        if name not in self._entries:
            known = ", ".join(self._entries) or "none yet"
            raise ValueError(f"no prediction named {name!r}; predict before you measure (predicted: {known})")
        entry = self._entries[name]
        entry.measured = float(measured)
        entry.expected = None if expected is None else float(expected)
        self._save()
        print(_titled(name, entry))
        values = {"yours": entry.value, "lablib": entry.expected}
        parts = [f"{who} {_number(x)}" + ("" if x is None else f" ({entry.off_by(x)})") for who, x in values.items()]
        line, *rest = *parts, f"measured {_number(entry.measured)}"
        for part in rest:
            # A page's column has some 72 characters, and what stands at the end is the point.
            if len(line) + len(part) > 67:
                print("  " + line)
                line = part
            else:
                line += " | " + part
        print("  " + line)

    def table(self) -> str:
        """Return every guess with by how much it misses, lablib's number and the measurement, under its name."""
        lines = [_row("yours", "yours off by", "lablib", "measured")]
        for name, entry in self._entries.items():
            if entry.value is not None:
                numbers = _number(entry.expected), _number(entry.measured)
                lines += [_titled(name, entry), _row(_number(entry.value), entry.off_by(entry.value), *numbers)]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return what was guessed and which exercises passed in this kernel; how to begin where nothing was."""
        guessed = [entry for entry in self._entries.values() if entry.value is not None]
        passed = [name for name, status in CHECKED.items() if status == "passed"]
        still_open = [name for name in CHECKED if name not in passed]
        if guessed or passed:
            exact = sum(entry.off_by(entry.value) == "exact" for entry in guessed)
            sentences = [f"Guessed: {len(guessed)} of {len(self._entries)} predictions, {exact} of them exact."]
            sentences += [f"Passed: {len(passed)} of {len(CHECKED)} exercises" + ", ".join(["", *passed]) + "."]
            sentences += [f"Open: {', '.join(still_open)}."] if still_open else []
        else:
            sentences = ["Nothing is guessed and nothing is solved yet: the lab has run, and waits for you."]
            sentences += [f'Begin with the prediction "{name}".' for name in list(self._entries)[:1]]
            sentences += ["Restart the kernel, type your number in place of None, and run cell by cell from the top."]
            sentences += [f"The first exercise is `{name}`." for name in still_open[:1]]
        lines = [line for sentence in sentences for line in textwrap.wrap(sentence, 72)]
        return "\n".join([*lines, "", self.table()] if guessed else lines)

    def _save(self) -> None:
        content = {"lab": self.lab, "predictions": {name: asdict(e) for name, e in self._entries.items()}}
        # A run of its own folder keeps its own, so that unpacking it at home replaces nobody else's.
        folder = Path(os.environ.get(FOLDER_SWITCH) or experiments_dir())
        write_json(folder / f"{self.lab}-predictions.json", content)


@dataclass(frozen=True)
class Record:
    """A measured result with everything needed to judge it."""

    name: str  # file stem under `labs/recorded/`
    samples: list[dict[str, Any]]  # every raw sample, in the order measured, as a list of dictionaries
    machine: dict[str, Any]  # hardware identity and versions, from `machine`
    command: str  # how it was started
    commit: str  # the commit it was measured at, with "+changes" when the tree was not clean
    date: str  # UTC, ISO 8601
    lablib: str = field(default=__version__)
    # what connects its GPUs, from `lablib.launch.records.gpu_topology`; empty without any
    topology: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The hardware in one line, with a word when ranks shared a GPU."""
        return machine_label(self.machine, self.samples)


_RECORD = dict.fromkeys(("name", "command", "commit", "date", "lablib"), TEXT) | {
    "samples": [{}],
    "machine": {"cpu": TEXT, "cpus": WHOLE, "gpus": [TEXT], "torch": TEXT},
    "topology?": {},
}


def read_record(path: Path) -> Record:
    """Return the record in a file, or raise a ValueError that names the file and what is wrong with it."""
    content = check_fields(read_json(path), _RECORD, path)
    if unknown := content.keys() - {each.name for each in fields(Record)}:
        raise ValueError(f"{path}: {shown(min(unknown))} is no field of a record")
    return Record(**content)


def recorded_files() -> list[Path]:
    """Return the files of all records by name: those that are committed, and those that a runner wrote in their place."""
    folders = [repository_root() / "labs" / "recorded", _recorded_dir()]
    found = {path.name: path for folder in folders for path in folder.glob("*.json")}
    return [found[name] for name in sorted(found)]


def _recorded_dir() -> Path:
    return Path(os.environ.get(RECORDED_SWITCH) or repository_root() / "labs" / "recorded")


def recorded(name: str) -> Record | None:
    """Load a record, or None where nobody has recorded one yet."""
    return next((read_record(path) for path in recorded_files() if path.stem == name), None)


def save_record(name: str, samples: list[dict[str, Any]], command: str, *, device: str = "cpu") -> Record:
    """Write a record under `labs/recorded/`, with this machine, the commit and the date."""
    here = this_machine() | ({} if device == "cuda" else {"gpus": [], "gpu_details": []})
    links = gpu_topology() if here["gpus"] else {}
    record = Record(name, samples, here, command, git_commit(), utc_now(), topology=links)
    path = write_json(_recorded_dir() / f"{name}.json", asdict(record))
    print(f"recorded {len(samples)} samples in {path.parent.parent.name}/{path.parent.name}/{path.name}")
    return record


def run_or_replay(name: str, measure: Callable[[], list[dict[str, Any]]]) -> Record:
    """Measure and write a record when the runner asks for one; replay the committed record otherwise."""
    if os.environ.get(RECORD_SWITCH) == "1":
        return save_record(name, measure(), os.environ.get("LABLIB_RECORD_COMMAND", shlex.join(sys.argv)))
    record = recorded(name)
    if record is None:
        raise FileNotFoundError(f"{name} is not yet recorded; `rung labs run` with --record makes it")
    print(f"replaying {name}, recorded {record.date[:10]}\n  on {record.where}, torch {record.machine['torch']}")
    return record


def utc_now() -> str:
    """Return the time now as UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _titled(name: str, entry: _Prediction) -> str:
    return name + (f" ({entry.unit})" if entry.unit else "")


def _row(yours: str, off: str, ours: str, seen: str) -> str:
    return f"{yours:>15}  {off:>21}  {ours:>15}  {seen:>15}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1e12:  # a column of the table has 15 places
        return f"{value:.6g}"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def git_commit() -> str:
    """Return the commit of this working tree, with "+changes" when it is not clean; "unknown" without git."""
    git = ["git", "-C", str(repository_root())]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        # A record is itself a change: what it writes does not make the tree it measured unclean.
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":!labs/recorded"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed else "")


# --- results that need GPUs -------------------------------------------------------------------------------------


def lab_folder() -> Path | None:
    """Return the folder of the run that this notebook belongs to, for samples and checkpoints; None outside one."""
    folder = os.environ.get(FOLDER_SWITCH)
    return Path(folder) if folder else None


class SampleCache:
    """The samples of one measurement."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = lab_folder()

    def sample(self, case: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the sample of a case, with what tells it from the others: the one that is kept, or a new one."""
        if self._folder is None:
            return {**case, **measure()}
        text = json.dumps(case, sort_keys=True)
        path = self._folder / "samples" / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        if path.exists():
            kept = read_json(path)
            print(f"kept from {kept['date']}: {text}")
            return kept["sample"]
        sample = {**case, **measure()}
        write_json(path, {"date": utc_now(), "sample": sample})
        return sample


#: The numbers of GPUs that a page asks about.
COUNTS = (1, 2, 4, 8)


def gpu_record_name(name: str, gpus: int) -> str:
    """Return the file stem of a record made on a number of GPUs."""
    return f"{name}-{gpus}gpu"


def recorded_counts(name: str) -> list[int]:
    """Return the numbers of GPUs for which there is a record, ascending."""
    pattern = re.compile(re.escape(name) + r"-(\d+)gpu")
    return sorted(int(found[1]) for path in recorded_files() if (found := pattern.fullmatch(path.stem)))


def recorded_on_gpus() -> list[str]:
    """Return the names of all records that were made on GPUs; none means that no line of the GPU path ever ran."""
    return [path.stem for path in recorded_files() if read_record(path).machine["gpus"]]


def gpu_samples(name: str, measure: Callable[[], list[dict[str, Any]]], *, gpus: int | None = None) -> Record | None:
    """Measure on this machine's GPUs, or replay a record, or say that there is none.

    On a machine with GPUs `measure` runs; under `rung labs run --record` its samples become the record for this
    number of GPUs. Without a GPU the record is replayed.

    Args:
        gpus: Whose record to replay where there is no GPU; None means the most that were recorded.

    Returns:
        The record, or None where nothing was measured or recorded.
    """
    import torch

    here = torch.cuda.device_count()
    if here:
        samples = measure()
        command = os.environ.get("LABLIB_RECORD_COMMAND", shlex.join(sys.argv))
        # Failures alone must not take the place of an earlier record.
        if os.environ.get(RECORD_SWITCH) == "1" and not all("failed" in sample for sample in samples):
            return save_record(gpu_record_name(name, here), samples, command, device="cuda")
        return Record(name, samples, this_machine(), command, git_commit(), utc_now(), topology=gpu_topology())
    counts = recorded_counts(name)
    wanted = gpus if gpus is not None else (counts[-1] if counts else None)
    if wanted not in counts:
        print(not_recorded(name, wanted, counts))
        return None
    record = recorded(gpu_record_name(name, wanted))
    print(f"replaying {record.name}, recorded {record.date[:10]}\n  on {record.where}, torch {record.machine['torch']}")
    return record


def not_recorded(name: str, gpus: int | None, counts: Sequence[int]) -> str:
    """Return the sentence for a number of GPUs that nobody recorded."""
    wanted = "a GPU" if gpus is None else _gpus(gpus)
    there_are = f"; there are records on {', '.join(_gpus(n) for n in counts)}" if counts else ""
    return f"{name}: not yet recorded on {wanted}{there_are}"


def coverage(names: Sequence[str], counts: Sequence[int] = COUNTS) -> list[dict[str, str]]:
    """Return one row per measurement: for each number of GPUs the date of its record, or "not yet recorded"."""
    rows = []
    for name in names:
        row = {"name": name}
        for gpus in counts:
            record = recorded(gpu_record_name(name, gpus))
            row[_gpus(gpus)] = f"{record.date[:10]}, {record.where}" if record else "not yet recorded"
        rows.append(row)
    return rows


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count != 1 else "")
