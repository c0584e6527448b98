"""Answers are taken out of notebooks as they are there, judged one by one, and what is left is said."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from lablib.calc.runs import RUN_GPU_LABS
from lablib.checks import answers
from lablib.checks.answers import (
    GOALS,
    REQUIREMENTS,
    Requirement,
    answer_source,
    examine,
    graduation,
    is_untouched,
    still_missing,
)
from lablib.cli.main import app
from lablib.launch import runs
from lablib.launch.runs import describe_machine, gpu_report

ROOT = Path(__file__).resolve().parents[1]
STUB = "def train(*_):\n    raise NotImplementedError"


def _notebook(path, *sources):
    path.parent.mkdir(exist_ok=True)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def _run(source, name):
    names = {}
    exec(source, names)
    return names[name]


def test_an_answer_comes_with_what_it_needs_and_nothing_else(tmp_path):
    path = _notebook(
        tmp_path / "a.ipynb",
        "%matplotlib inline\nimport math\nfrom os import path as p, sep",
        "raise SystemExit('this cell must not run')",
        "base = 2",
        "def helper(x):\n    return math.sqrt(x) + base",
        "def answer(x):\n    raise NotImplementedError\n\ncheck(answer);",
        "def answer(x):  # the second try\n    return helper(x) * deep()",
        "class Deep:\n    value = base\n\ndef deep():\n    return Deep.value",
        "this is no Python",
        "trained = run_for_hours()",
    )
    source = answer_source(path, "answer")
    assert _run(source, "answer")(9) == 10
    assert "NotImplementedError" not in source
    assert "run_for_hours" not in source
    assert "SystemExit" not in source
    assert "from os" not in source
    assert answer_source(path, "nobody") is None
    assert answer_source(path, "base") is None
    with pytest.raises(ValueError, match="is no notebook"):
        answer_source(Path(__file__), "answer")


def test_what_python_allows_in_a_cell_is_an_answer(tmp_path):
    path = _notebook(
        tmp_path / "a.ipynb",
        "from math import *\ntry:\n    import json as j\nexcept ImportError:\n    j = None",
        "def answer(x):\n    return (sqrt(x)\n        % 2\n        != 1), j.dumps(x)",
        "%time answer(4)\n!ls",
        "x = " + "+".join(["1"] * 20_000),
    )
    assert _run(answer_source(path, "answer"), "answer")(9) == (False, "9")
    _notebook(
        tmp_path / "05_b.ipynb",
        "def zero3_step(a, a):\n    return 1",
        "zero2_step = lambda *_: 1",
        STUB,
        "train: object = 1",
    )
    told = {outcome.name: outcome for outcome in examine(tmp_path, rungs=["05"], every=True)}
    assert (told["zero3_step"].status, "duplicate argument" in told["zero3_step"].message) == ("wrong", True)
    assert "zero2_step is not, or not in the end, a `def` at the left edge" in told["zero2_step"].message
    assert told["train"].message == "In 05_b.ipynb the last `def train` at the left edge that parses is a stub."


def test_an_answer_is_run_where_its_notebook_is_and_not_from_a_copy_of_it(tmp_path):
    solution = (ROOT / "labs" / "solutions" / "rung05.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(solution)
    (tmp_path / "four.txt").write_text("4")
    (tmp_path / "queue.py").write_text("jobs = []")  # a kernel has the library's by then
    _notebook(
        tmp_path / "05_zero.ipynb",
        "import mine\nfrom pickle import dumps\nfrom threading import Timer\n\nasync def work():\n    return 4\n\nfour = await work()",
        "with open('four.txt') as file:\n    same = int(file.read()) == four",
        "def zero_tradeoffs(*job):\n    Timer(999, print).start()\n    return mine.zero_tradeoffs(*job) if same and dumps(work) else None",
    )
    _notebook(tmp_path / "05_zero-Copy1.ipynb", "def zero_tradeoffs(*_):\n    raise NotImplementedError")
    (five,) = examine(tmp_path, rungs=["5"])
    assert five.status == "passed", five.message


def test_what_a_later_line_changes_is_as_it_is_in_the_notebook(tmp_path):
    path = _notebook(
        tmp_path / "a.ipynb",
        "import os.path\nimport os, functools\ntable = {1: 1 / 0}\ncalls, size = 0, [1]\ntable, deep = {1: 2}, [[0]]",
        "table[2] = 3\nfor k in (4, 5):\n    table[k] = k\ndeep[0][0] = 7\nsize += [2]\nimport xml.dom\nimport xml.sax",
        "def answer(x):\n    raise NotImplementedError",
        "def answer(x):\n    global calls\n    calls += 1\n    display(x, clear=1)\n    return calls, table[x], deep, size, xml.dom.Node.TEXT_NODE",
        "answer = functools.cache(answer)\nanswer.__doc__ = 'sums'\nprint(1 / 0)",
    )
    source = answer_source(path, "answer")
    assert graduation.defined(path, "answer")(5) == (1, 5, [[7]], [1, 2], 3)
    assert "NotImplementedError" not in source


@pytest.mark.parametrize(
    "cells",
    [
        ["for size in (2, 4):\n    pass\nclass Row:\n    size = size\nsize = Row.size"],
        ["import contextlib\nwith contextlib.nullcontext(4) as size:\n    pass"],
        ["print(size := 4)"],
        ["first, *size = 1, 4\n(size,) = size"],
        ["size = 4", "size: int\nrows = [size for size in (1, 2)]"],
        ["size = 4\nfiles = !ls\nt = %timeit -o size\nprint?"],
        ["%%time\nsize = 4"],
        ["size = 4", "%%bash\nsize=1", "%%writefile part.py\nsize = 1"],
        ["%time size = 4"],
        ["base = 4\ndef read():\n    return base\nsize = read()\nbase = 1"],
        ["base = 4\nclass Row:\n    all = [base for _ in range(1)]\nsize = Row.all[0]\nbase = 1"],
        ["abs = 4\nsize = abs\ndel abs"],
        ["match [1, 4]:\n    case [_, *sizes]:\n        pass", "size = sizes[0]"],
    ],
)
def test_a_name_has_the_value_that_the_notebook_gives_it(tmp_path, cells):
    path = _notebook(tmp_path / "a.ipynb", *cells, "def answer(x):\n    return abs(-size * x)")
    assert _run(answer_source(path, "answer"), "answer")(5) == 20


def test_a_second_definition_may_call_the_first(tmp_path):
    path = _notebook(
        tmp_path / "a.ipynb",
        "def more(x):\n    return x\n\ndef answer(x):\n    return more(x)",
        "first = answer\n\ndef answer(x):\n    return 2 * first(x)",
        "def more(x):\n    return x + 1",
    )
    assert _run(answer_source(path, "answer"), "answer")(5) == 12


def test_a_parameter_or_a_local_does_not_bring_the_notebook_s_variable_of_that_name(tmp_path):
    path = _notebook(
        tmp_path / "a.ipynb",
        "ranks = read_metrics('a run that is gone')\nhalf = ranks[0]\nsteps, base = 1 / 0, 2",
        "def answer(ranks):\n    half = len(ranks) / 2\n    return half + sum(steps for steps in ranks)",
        "def other(x):\n    def inner(ranks):\n        return [ranks, base]\n    return inner(x)",
    )
    source = answer_source(path, "answer")
    assert _run(source, "answer")([1, 2, 3]) == 7.5
    assert "read_metrics" not in source
    # What an inner function reads of the notebook comes along.
    assert "base" in answer_source(path, "other").split("def other")[0]


def test_the_stubs_of_every_lab_are_seen_as_untouched():
    seen = 0
    for path in sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        stub = r'def (\w+)\([^)]*\):\n(?:    """(?:[^"]|"[^"])*"""\n)?    raise NotImplementedError'
        for name in re.findall(stub, text):
            assert is_untouched(answer_source(path, name), name), (path.stem, name)
            seen += 1
    assert seen >= 30
    assert not is_untouched("def f():\n    'doc'\n    return 1", "f")
    assert is_untouched("def f():\n    'doc'\n    raise NotImplementedError('yet')", "f")


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.rung)
def test_every_goal_is_that_of_its_chapter_and_its_lab(goal):
    chapters = list((ROOT / "book").glob(f"{goal.rung}_*.md"))
    if not chapters:
        pytest.skip(f"chapter {goal.rung} is not written yet")
    section = chapters[0].read_text(encoding="utf-8").split("## Done when")[1].split("\n## ")[0]
    words = " ".join(section.replace("*", "").split())
    assert goal.done_when.rstrip(".") in words
    (lab,) = (ROOT / "labs").glob(f"{goal.rung}_*.ipynb")
    for name in goal.checks:
        assert name in (ROOT / "lablib" / "checks" / f"rung{goal.rung}.py").read_text(encoding="utf-8")
        assert answer_source(lab, name), f"lab {goal.rung} has no stub {name}"


def test_each_answer_has_its_own_fate(tmp_path):
    work = tmp_path / "work"
    solution = (ROOT / "labs" / "solutions" / "rung05.py").read_text(encoding="utf-8")
    _notebook(
        work / "05_zero.ipynb", solution, "END = __import__('os')._exit(7)\n\ndef zero3_step(*_):\n    return END"
    )
    _notebook(work / "05_zero.new.ipynb", "def zero_tradeoffs():\n    return 1")
    _notebook(work / "03_tensor_parallelism.ipynb", "def split_qkv(*_):\n    while True:\n        pass")
    _notebook(work / "02_data_parallelism.ipynb", "def ddp_bottleneck(*_):\n    raise NotImplementedError")
    (work / "01_why.ipynb").write_text("torn")
    (five,) = examine(work, rungs=["5"])
    assert (five.status, five.name) == ("passed", "zero_tradeoffs")
    status, message = graduation._judged(work / "05_zero.ipynb", "05", "zero3_step", 60)
    assert (status, "ended with code 7" in message) == ("wrong", True)
    found = {o.rung: o for o in (*examine(work, rungs=["01", "02", "04"]), *examine(work, rungs=["03"], timeout=0.5))}
    assert {rung: outcome.status for rung, outcome in found.items()} == {
        "01": "wrong", "02": "not attempted", "03": "wrong", "04": "no lab",
    }  # fmt: skip
    assert "is no notebook" in found["01"].message
    assert "does it end?" in found["03"].message
    assert "make lab" in found["04"].message
    with pytest.raises(ValueError, match="there is no rung 15"):
        next(examine(work, rungs=["15"]))


def test_the_requirements_name_what_is_left(tmp_path):
    assert len(REQUIREMENTS) == 5
    both = Requirement("both", ("02", "03"))
    assert still_missing(both, ["02", "03"], None) == []
    assert still_missing(both, ["03"], None) == ["rung 02"]
    rented = REQUIREMENTS[-1]
    assert still_missing(rented, ["11"], None) == [f"a report of a real model on two GPUs or more: {RUN_GPU_LABS}"]
    assert still_missing(rented, ["11"], tmp_path) == []


def _record(folder, *, ranks=2, gpus=2, device="cuda:0", params=124_000_000, date="2026-11-01"):
    record = {
        "report": "x", "command": "rung labs run 11", "commit": "c", "warm_up": 0,
        "scaling": "strong", "ranks": ranks, "date": date, "samples": [[{"seconds": 1.0, "tokens_per_second": 1.0}]] * ranks,
        "machine": {"gpus": ["H100"] * gpus, "cpu": "Xeon", "cpus": 8},
        "facts": {"device": device, "params": params},
    }  # fmt: skip
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "runs" / f"strong-{ranks}.json").write_text(json.dumps(record))
    (folder / "runs" / "one-1.json").write_text(
        json.dumps(record | {"scaling": "one", "ranks": 1, "samples": record["samples"][:1]})
    )
    return record


@pytest.mark.parametrize(
    "what",
    [
        {"gpus": 0, "device": "cpu"},
        {"gpus": 1, "device": "cpu"},
        {"gpus": 1},  # two ranks on one GPU
        {"gpus": 2, "device": "cpu"},  # CPU ranks on a machine with two GPUs
        {"params": 200_000},  # the tiny model of section 1, on two GPUs
        {"ranks": 1},
    ],
)
def test_only_a_real_model_with_a_gpu_for_each_rank_is_a_run_on_gpus(tmp_path, what):
    _record(tmp_path / "x", **what)
    (tmp_path / "x" / "runs" / "torn-2.json").write_text("{")
    (tmp_path / "x" / "runs" / "list-2.json").write_text("[]")
    assert gpu_report(tmp_path) is None
    _record(tmp_path / "y", date="2026-11-02")
    assert gpu_report(tmp_path) == tmp_path / "y"
    _record(tmp_path / "a", ranks=8, gpus=8, date="2026-11-03")
    assert gpu_report(tmp_path) == tmp_path / "a"


def test_cpu_ranks_on_a_machine_with_gpus_are_labelled_as_that(tmp_path):
    assert describe_machine(_record(tmp_path, device="cpu")) == "Xeon, 8 CPUs"
    assert describe_machine(_record(tmp_path)) == "2 x H100"


@pytest.mark.parametrize("lost", ["one-1.json", "strong-2.json"])
def test_a_run_with_nothing_to_compare_it_with_is_no_report_of_scaling(tmp_path, lost):
    record = _record(tmp_path / "x")
    (tmp_path / "x" / "runs" / "weak-2.json").write_text(json.dumps(record | {"scaling": "weak"}))
    assert gpu_report(tmp_path) == tmp_path / "x"
    (tmp_path / "x" / "runs" / lost).unlink()
    assert gpu_report(tmp_path) is None


def test_rung_11_is_passed_on_cpu_ranks_until_a_report_says_more(tmp_path, monkeypatch):
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    right = graduation.Outcome("11", "observe_scaling", "passed", "Why.")
    monkeypatch.setattr(graduation, "_judged", lambda *_: (right.status, right.message))
    _notebook(tmp_path / "work" / "11_practical_fsdp.ipynb", "pass")
    (outcome,) = examine(tmp_path / "work", rungs=["11"])
    assert (outcome.status, RUN_GPU_LABS in outcome.message) == ("passed on CPU ranks", True)
    shown = CliRunner().invoke(app, ["graduate", "11", "--work", str(tmp_path / "work")])
    assert shown.exit_code == 1
    assert "observe_scaling: passed on CPU ranks" in shown.output
    assert "Not yet on GPUs" in shown.output
    assert "0 of 11 rungs are done." in shown.output
    # Another exercise of the rung has no run in its sentence.
    others = [o.status for o in examine(tmp_path / "work", rungs=["11"], every=True)]
    assert others.count("passed on CPU ranks") == 1
    _record(tmp_path / "mine" / "x")
    assert list(examine(tmp_path / "work", rungs=["11"])) == [right]


def test_the_command_says_what_is_left_and_when_nothing_is(tmp_path, monkeypatch):
    def examined(status, above=None):
        said = {goal.rung: above or status if goal.above else status for goal in GOALS}
        return lambda work, **_: iter(
            [graduation.Outcome(g.rung, n, said[g.rung], "Why.") for g in GOALS for n in g.checks]
        )

    monkeypatch.setattr(runs, "gpu_report", lambda: tmp_path)
    monkeypatch.setattr(answers, "examine", examined("passed"))
    good = CliRunner().invoke(app, ["graduate"])
    assert good.exit_code == 0, good.output
    assert "11 of 11 rungs are done, and 3 above the ladder." in good.output
    assert "You can leave this course." in good.output
    assert max(map(len, good.output.splitlines())) <= 80
    # What stands above the ladder holds nobody up.
    monkeypatch.setattr(answers, "examine", examined("passed", above="not attempted"))
    good = CliRunner().invoke(app, ["graduate"])
    assert good.exit_code == 0, good.output
    assert "11 of 11 rungs are done." in good.output
    monkeypatch.setattr(answers, "examine", examined("wrong"))
    bad = CliRunner().invoke(app, ["graduate"])
    assert bad.exit_code == 1
    assert "      Why." in bad.output
    assert "left  Explain DDP, FSDP and ZeRO" in bad.output
    content = json.loads(CliRunner().invoke(app, ["graduate", "--json"]).output)
    assert content["graduated"] is False
    assert content["passed"] == []


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(tmp_path, timeout):
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        next(examine(tmp_path, timeout=timeout))
