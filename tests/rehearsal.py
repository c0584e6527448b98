"""A workshop rehearsed on one machine: `python -m tests.rehearsal` after `make bundle`; some minutes, and no part of `make test`.

Learners' copies are made of the bundle and installed without a network. Each does three labs with right, wrong and missing
answers, all hand in at once, while the runs that they asked for go through the queue on two pretended GPUs. Then the class
is tabulated, every verdict is compared with what was planted, and what the queue handed back is replayed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.pretend import ROOT, environment

LABS = ("01", "03", "05")
KINDS = ("right", "wrong", "missing")
#: One idea that is wrong in the worked exercises of a lab: the exercise, what stands there, what is put in its place.
SLIPS = {
    "01": ("bytes_per_parameter", "4 if master else 0", "0"),
    "03": (
        "split_mlp",
        "total = part.clone()\n            dist.all_reduce(total, group=group)",
        "total = part.clone()",
    ),
    "05": ("zero_tradeoffs", "4 * params + 12 * own", "4 * params + 8 * own"),
}
STUB = re.compile(r'def (\w+)\([^)]*\):\n(?:    """(?:[^"]|"[^"])*"""\n)?    raise NotImplementedError\n')
ASKED = "02"  # of the queue: it measures, records, and needs no kernel of a GPU
#: A network with nothing in it but this machine, where one can be made.
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def fill(notebook: Path, kind: str) -> None:
    """Write answers of a kind into a copied lab, and a guess in place of every None that a prediction has."""
    rung = notebook.name[:2]
    worked = (ROOT / "labs" / "solutions" / f"rung{rung}.py").read_text(encoding="utf-8")
    if kind == "wrong":
        _, here, there = SLIPS[rung]
        assert here in worked, (rung, here)
        worked = worked.replace(here, there)
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"] if kind != "missing" else ():
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and STUB.search(source):
            source = f"{worked}\n\n{STUB.sub('', source)}"
        cell["source"] = re.sub(r"(\.predict\([^\n]*), None,", r"\1, 10,", source)
    notebook.write_text(json.dumps(content), encoding="utf-8")


def expected(rung: str, kind: str, name: str) -> str | None:
    """Return the status that an answer must have; None where a slip may or may not reach it."""
    if kind == "wrong":
        return "wrong" if name == SLIPS[rung][0] else None
    return {"right": "passed", "missing": "not attempted"}[kind]


def rehearse(bundle: Path, folder: Path, learners: int) -> dict[str, object]:
    """Run the whole of it below a folder; return what there is to say."""
    begun = time.monotonic()
    alone = ALONE if subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0 else []
    names = [f"learner {number}" for number in range(1, learners + 1)]
    copies = {name: folder / f"copy of {name}" for name in names}
    for name, copy in copies.items():
        shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("wheels"))
        (copy / "wheels").symlink_to(bundle / "wheels")
        installed = subprocess.run([*alone, sys.executable, "install.py"], cwd=copy, capture_output=True, text=True)
        print(f"{name}: {installed.stdout.strip().splitlines()[-1]}", flush=True)
        assert installed.returncode == 0, installed.stderr
    kinds = {(name, rung): KINDS[(i + j) % 3] for i, name in enumerate(names) for j, rung in enumerate(LABS)}
    for name, copy in copies.items():
        run(
            copy,
            "-c",
            "from pathlib import Path; from lablib.cli.copies import copy_labs; copy_labs(Path('labs'), Path('work'))",
        )
        for rung in LABS:
            (notebook,) = (copy / "work").glob(f"{rung}_*.ipynb")
            fill(notebook, kinds[name, rung])
    room, handed_in = folder / "room", folder / "handed in"
    handed_in.mkdir()
    room.mkdir()
    rung_here = str(Path(sys.executable).with_name("rung"))
    for name, copy in copies.items():
        run(copy, "-m", "lablib.checks.answers", check=False)  # nothing to say without words: it must not hang either
        subprocess.run([copy / ".venv/bin/rung", "labs", "ask", ASKED, "--room", room, "--name", name], check=True)
    installed_s = time.monotonic() - begun
    queue = subprocess.Popen(
        [rung_here, "labs", "share", str(room), "--gpus", "0,1", "--minutes", "20", "--until-empty"],
        env=environment(2, folder / "pretended.log", folder / "gpu machine"),
    )
    submitting = []
    try:
        for name, copy in copies.items():
            line = [*alone, copy / ".venv/bin/rung", "submit", *LABS, "--name", name, "--to", handed_in]
            log = (folder / f"{name}.log").open("w")
            submitting.append(subprocess.Popen(line, cwd=copy, stdout=log, stderr=log))
        codes = [process.wait(1800) for process in submitting]
        code = queue.wait(1800)
    finally:
        for process in [*submitting, queue]:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    assert codes == [0] * learners, [(folder / f"{name}.log").read_text()[-500:] for name in names]
    assert code == 0, "the queue"
    tabulated = subprocess.run([rung_here, "class", handed_in], capture_output=True, text=True, check=True)
    print(tabulated.stdout, flush=True)
    counted = compare(handed_in, kinds)
    replayed = sum(replays(room, name, copy) for name, copy in copies.items())
    return {
        "learners": learners,
        "labs": list(LABS),
        "cpus": os.cpu_count(),
        "network": "none" if alone else "there",
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "install_minutes": round(installed_s / 60, 1),
        **counted,
        "runs_replayed": replayed,
    }


def compare(handed_in: Path, kinds: dict[tuple[str, str], str]) -> dict[str, int]:
    """Return how many answers of each kind there were, and how many were judged otherwise than planted."""
    counted = dict.fromkeys(("right", "right_refused", "wrong", "wrong_passed", "missing", "missing_judged"), 0)
    bad = {"right": "right_refused", "wrong": "wrong_passed", "missing": "missing_judged"}
    for path in handed_in.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        for rung, lab in content["labs"].items():
            kind = kinds[content["who"], rung]
            for each in lab["verdicts"]:
                if (status := expected(rung, kind, each["name"])) is None:
                    continue
                counted[kind] += 1
                if each["status"] != status:
                    counted[bad[kind]] += 1
                    print(
                        f"{content['who']}, {rung} {each['name']}, {kind}: {each['status']}. {each['message']}",
                        flush=True,
                    )
    return counted


def replays(room: Path, name: str, copy: Path) -> bool:
    """Unpack what the queue handed back in the learner's copy, and say whether its record is the one that is replayed."""
    with tarfile.open(room / "answers" / f"{name.replace(' ', '-')}.tar.gz") as archive:
        archive.extractall(copy, filter="data")
    said = run(
        copy, "-c", "from lablib.launch.records import recorded; print(recorded('02_ddp_step_time').command)"
    ).stdout
    return "--record --pack" in said


def run(copy: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run a copy's own Python in its folder."""
    return subprocess.run(
        [copy / ".venv/bin/python", *words], cwd=copy, capture_output=True, text=True, check=check, timeout=120
    )


def main() -> None:
    """Rehearse, print what was found, and write it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bundle", type=Path, default=max((ROOT / "_build" / "bundle").glob("rung-by-rung-*[0-9]"), default=None)
    )
    parser.add_argument("--learners", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write book/data/rehearsal.json")
    given = parser.parse_args()
    if given.bundle is None:
        raise SystemExit("there is no bundle: make bundle")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        found = rehearse(given.bundle.resolve(), Path(folder), given.learners)
    print(json.dumps(found, indent=1))
    if given.write:
        (ROOT / "book" / "data" / "rehearsal.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
