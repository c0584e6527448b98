"""Run the tests and the labs under other versions of Python and PyTorch, and write down how it went.

    make matrix                                      every combination whose Python is on this machine
    make matrix MATRIX="3.11/2.15.0 3.13/2.14.0"     these

Each combination has its environment in .cache/matrix, or in the folder $MATRIX_VENVS, and keeps it: torch of that
version, and all else from constraints.txt but the pins that this torch refuses. The runs go to book/data/matrix.json,
part by part, when the part has ended; the status page shows them.
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from lablib.calc.torch_versions import COMBINATIONS, PARTS, RUNS, Combination, combination, read_runs  # noqa: E402

CACHE = ROOT / ".cache" / "matrix"
#: What pytest gets for each part, as `make unit` and `make labs` give it.
ARGUMENTS = {"unit": ["-m", "not site", "tests"], "labs": ["--nbval", "--nbval-cell-timeout=300", "labs"]}
#: What `-n` gets, as in the Makefile.
WORKERS = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
# Run inside an environment: the pins that its torch refuses, by name.
REFUSED = """
import importlib.metadata, re, sys
from pip._vendor.packaging.requirements import Requirement
pins = dict(line.split("==") for line in open(sys.argv[1]).read().split() if "==" in line)
pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
for wanted in map(Requirement, importlib.metadata.requires("torch")):
    name = wanted.name.lower().replace("_", "-")
    if name in pins and not wanted.specifier.contains(pins[name]):
        print(name)
"""


def find_python(version: str) -> str | None:
    """Return an interpreter of a minor version that can make environments, or nothing.

    Args:
        version: "3.13".
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [sys.executable, shutil.which(f"python{version}")]
    places += [str(found) for found in sorted(pyenv.glob(f"{version}.*/bin/python3"))]
    ask = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        said = subprocess.run([place, "-c", ask], capture_output=True, text=True)
        if said.stdout.strip() == version:
            return place
    return None


def pins(without: set[str]) -> str:
    """Return constraints.txt without some packages.

    Args:
        without: Their names, in lower case with hyphens.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(x for x in lines if x.partition("==")[0].lower().replace("_", "-") not in without) + "\n"


def make_environment(which: Combination, folder: Path, python: str) -> Path:
    """Make the environment of a combination, or bring it up to date; return its interpreter.

    Args:
        which: The combination.
        folder: Of all environments.
        python: An interpreter of its version.
    """
    home = folder / which.folder
    inside = home / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(home)], check=True)
    index = subprocess.run(
        [python, str(ROOT / "tools" / "torch_index.py")], capture_output=True, text=True, check=True
    ).stdout.split()
    install = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index]
    subprocess.run([*install, f"torch=={which.torch}"], check=True)
    constraints = ROOT / "constraints.txt"
    said = subprocess.run([str(inside), "-c", REFUSED, str(constraints)], capture_output=True, text=True, check=True)
    kept = CACHE / f"{which.folder}.txt"
    kept.write_text(pins({"torch", *said.stdout.split()}), encoding="utf-8")
    subprocess.run([*install, f"torch=={which.torch}", "-c", str(kept), "-e", f"{ROOT}[all]"], check=True)
    return inside


def counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped.

    Args:
        report: pytest's, in JUnit's format.
    """
    suite = ET.parse(report).getroot().find("testsuite")
    total, failed, errors, skipped = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
    return {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def lost(report: Path) -> str | None:
    """Return the test that ended its worker and with it the run, or nothing.

    Args:
        report: pytest's, in JUnit's format.
    """
    said = re.search(r"worker '\w+' crashed while running '([^']+)'", html.unescape(report.read_text(encoding="utf-8")))
    return said[1] if said else None


def run_part(which: Combination, part: str, inside: Path, workers: int) -> dict[str, object]:
    """Run the tests or the labs; return what is written down.

    Args:
        which: The combination.
        part: "unit" or "labs".
        inside: Its interpreter.
        workers: Of pytest.
    """
    report, log = (CACHE / f"{which.folder}-{part}.{kind}" for kind in ("xml", "log"))
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "LABLIB_EXPERIMENTS": str(CACHE / f"{which.folder}-experiments"),
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("EXECUTED_LABS", None)
    command = [str(inside), "-m", "pytest", "-q", "-n", str(workers), *WORKERS, "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *ARGUMENTS[part]]
    begun = time.time()
    with log.open("w", encoding="utf-8") as out:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    # 0: all passed, 1: some failed. With any other the report, if there is one, is not of a whole run.
    if not report.exists() or ended.returncode not in (0, 1):
        raise SystemExit(f"{which} {part}: pytest ended with status {ended.returncode}; see {log}")
    if died := lost(report):
        raise SystemExit(f"{which} {part}: {died} ended its process, and not all was run; see {log}")
    ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, torch = subprocess.run([str(inside), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    found = counts(report)
    seconds = round(time.time() - begun)
    print(f"{which} {part}: {found} in {seconds} s; {log}", flush=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        # What is written down here, and files that nobody added, are no change of the code.
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!book/data/matrix.json")),
        "python": python,
        "torch": torch,
        "cpus": os.cpu_count(),
        "seconds": seconds,
        **found,
    }


def write_down(which: Combination, part: str, run: dict[str, object], path: Path = RUNS) -> None:
    """Put a run into the file, in place of an earlier one.

    Args:
        which: The combination.
        part: "unit" or "labs".
        run: From `run_part`.
        path: The file.
    """
    runs = read_runs(path)
    runs.setdefault(str(which), {})[part] = run
    new = path.with_suffix(".new")
    new.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main(words: list[str] | None = None) -> int:
    """Run the combinations named on the command line, or all; return the exit status.

    Args:
        words: The command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("combinations", nargs="*", help="Python/torch, such as 3.13/2.14.0")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--workers", type=int, default=2, help="of pytest")
    args = parser.parse_args(words)
    try:
        chosen = [combination(text) for text in args.combinations or COMBINATIONS]
    except ValueError as error:
        parser.error(str(error))
    folder = Path(os.environ.get("MATRIX_VENVS") or CACHE)
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = []
    for which in chosen:
        python = find_python(which.python)
        if python is None:
            print(f"{which}: no Python {which.python} with ensurepip is here", flush=True)
            failed += [str(which)] if args.combinations else []  # the default list takes what there is
            continue
        print(f"{which}: the environment is {folder / which.folder}", flush=True)
        inside = make_environment(which, folder, python)
        for part in args.part or PARTS:
            run = run_part(which, part, inside, args.workers)
            write_down(which, part, run)
            failed += [f"{which} {part}"] if run["failed"] else []
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
