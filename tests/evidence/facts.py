"""What the pages say of frameworks, looked up again in the frameworks' own files.

Each line of book/data/framework_facts.jsonl is a fact:

    page, says      a page of book/ without its ending, and words of one of its lines that make the claim
    project         the name on the package index, such as "megatron-core", or a repository, such as "NVIDIA/nccl"
    version         the release whose files were read; of a repository a tag or a commit
    file            a path in its wheel, or in its source archive where it has no wheel, or in the repository
    has, lacks      texts that the file must and must not have; any run of white space counts as one space
    date            when it was last read by a person
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT / "book" / "data" / "framework_facts.jsonl"
#: Packages as the index has them; `make clean` leaves them.
CACHE = ROOT / ".cache" / "frameworks"
#: Wheels for one Python on one platform: they are read, and not run.
WHEELS = (
    "--only-binary=:all:",
    "--python-version=3.12",
    *(f"--platform={name}" for name in ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")),
)
#: Held by the torch that runs the tests, and by `make matrix` under others: no wheel of it is fetched.
TORCH = "torch"
#: A project with a "/" in its name is not on the package index: its files are read one by one.
REPOSITORIES = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Fact:
    """A line of the table; the module says what its fields are."""

    page: str
    says: str
    project: str
    version: str
    file: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]
    date: str

    @property
    def release(self) -> str:
        """Project and version, "torchtitan 0.3.0"."""
        return f"{self.project} {self.version}"


def read_facts(path: Path = FACTS) -> list[Fact]:
    """Read a table of facts; a ValueError names the line that is none."""
    facts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            fact = Fact(**{**row, "has": tuple(row["has"]), "lacks": tuple(row["lacks"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if isinstance(row["has"], str) or isinstance(row["lacks"], str) or not any(fact.has + fact.lacks):
            raise ValueError(f"{path}, line {number}: 'has' and 'lacks' are lists, and one of them has a text")
        facts.append(fact)
    return facts


def installed(project: str) -> str | None:
    """Return the version that this environment has, without its local part; None where there is none."""
    try:
        return distribution(project).version.partition("+")[0]
    except PackageNotFoundError:
        return None


def cached(project: str, version: str) -> Path | None:
    """Return the wheel or source archive of a release that an earlier look-up left."""
    name = re.sub(r"[-_.]+", "[-_.]", project)
    found = (path for path in sorted(CACHE.glob("*")) if re.match(rf"{name}-{re.escape(version)}[-.]", path.name))
    return next(found, None)


def unpacked(project: str, version: str) -> Path:
    """Return a folder from which a process can import a cached release that is not installed here.

    Raises:
        LookupError: No look-up has brought its wheel.
    """
    wheel = cached(project, version)
    if wheel is None:
        raise LookupError(f"{project} {version} is not in {CACHE}: python -m tests.evidence facts fetches it")
    folder = CACHE / "unpacked" / wheel.stem
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made)
            folder.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another worker was faster
                Path(made).rename(folder)
                Path(made).mkdir()
    return folder


def newest_of(project: str) -> str:
    """Return the newest release that the package index has, whatever Python it wants."""
    said = _pip("index", "versions", project, "--ignore-requires-python")
    found = re.search(r"\(([^)]+)\)", said)
    if not found:
        raise OSError(f"pip names no version of {project}: {said[:200]!r}")
    return found[1]


def fetch(project: str, version: str, file: str) -> None:
    """Bring a release into the cache, or of a repository one file; nothing of it is installed.

    Raises:
        OSError: The index or the repository is out of reach, or has no such release or file.
    """
    if "/" in project:
        _fetch_file(f"{project}/{version}/{file}")
        return
    if cached(project, version):
        return
    where = ("download", "-q", "--no-deps", "-d", str(CACHE), f"{project}=={version}")
    try:
        _pip(*where, *WHEELS)
    except OSError:
        _pip(*where, "--no-binary=:all:", "--no-build-isolation")


def _fetch_file(path: str) -> None:
    kept = CACHE / path
    if kept.exists():
        return
    with urllib.request.urlopen(f"{REPOSITORIES}/{path}", timeout=20) as answer:
        text = answer.read()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(text)


def _pip(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise OSError(f"pip {' '.join(arguments[:2])} {arguments[-1]}: {(errors or ['no answer'])[-1]}")
    return done.stdout


@cache
def text_of(project: str, version: str, file: str) -> str | None:
    """Return a file of a release with single spaces; None where the release has no such file.

    Raises:
        LookupError: The release, or the repository's file, is neither installed at this version nor in the cache.
    """
    if "/" in project:
        kept = CACHE / project / version / file
        if not kept.exists():
            raise LookupError(f"{project} {version}: {file}")
        found = kept.read_text(encoding="utf-8")
    elif installed(project) == version:
        path = distribution(project).locate_file(file)
        found = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None
    elif archive := cached(project, version):
        found = _member(archive, file)
    else:
        raise LookupError(f"{project} {version}")
    return None if found is None else " ".join(found.split())


def _member(archive: Path, file: str) -> str | None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file).decode("utf-8") if file in wheel.namelist() else None
    with tarfile.open(archive) as source:
        names = [name for name in source.getnames() if name.partition("/")[2] == file]
        return source.extractfile(names[0]).read().decode("utf-8") if names else None


def broken(fact: Fact, version: str | None = None) -> str | None:
    """Say what of a fact is not so in a release, its own without a version; None where all of it holds."""
    text = text_of(fact.project, version or fact.version, fact.file)
    if text is None:
        return "no such file"
    for wanted in fact.has:
        if " ".join(wanted.split()) not in text:
            return f"lacks {wanted!r}"
    for unwanted in fact.lacks:
        if " ".join(unwanted.split()) in text:
            return f"has {unwanted!r}"
    return None


def unsaid(facts: Iterable[Fact]) -> Iterator[str]:
    """Name the facts that no single line of their page says."""
    for fact in facts:
        lines = (ROOT / "book" / f"{fact.page}.md").read_text(encoding="utf-8").splitlines()
        count = sum(fact.says in line for line in lines)
        if count != 1:
            yield f"{fact.page}: {count} lines say {fact.says!r}"


def look_up(facts: list[Fact], versions: dict[str, str] | None = None) -> Iterator[str]:
    """Fetch what is neither installed nor cached; name every fact that does not hold, and each release out of reach.

    Args:
        facts: Lines of a table.
        versions: Project -> another release than the one that was read.
    """
    unread: dict[str, str] = {}
    for fact in facts:
        version = (versions or {}).get(fact.project, fact.version)
        release = f"{fact.project} {version}"
        if installed(fact.project) != version:
            if fact.project == TORCH or release in unread:
                continue
            try:
                fetch(fact.project, version, fact.file)
            except OSError as error:
                unread[release] = str(error)
                continue
        if said := broken(fact, version):
            yield f"{fact.page}: {fact.says!r}\n    {release}, {fact.file}: {said}"
    yield from (f"{release}: not looked up: {error}" for release, error in unread.items())
