"""The Makefile's helpers: answers survive, a busy port is explained, a failing stage fails, a lab's run is its own."""

import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import nbformat
import pytest
from typer.testing import CliRunner

from lablib.cli import room
from lablib.cli.copies import copy_labs
from lablib.cli.main import app
from tests.planted import share_of
from tests.scripts import ROOT, load


@pytest.fixture
def folders(tmp_path):
    labs, work = tmp_path / "labs", tmp_path / "work"
    labs.mkdir()
    for name in ("01_a.ipynb", "02_b.ipynb", "_template.ipynb"):
        (labs / name).write_text("first")
    return labs, work


def test_labs_are_copied_and_the_template_is_not(folders):
    lines = copy_labs(*folders)
    assert lines == ["copied   START.md", "copied   01_a.ipynb", "copied   02_b.ipynb"]
    assert {p.name for p in folders[1].glob("*.ipynb")} == {"01_a.ipynb", "02_b.ipynb"}


def test_jupyterlab_opens_on_a_page_that_names_the_labs_in_order(folders):
    labs, work = folders
    (labs / "02_b.ipynb").write_text('"# Lab 02: the second\\n",')
    copy_labs(labs, work)
    page = (work / "START.md").read_text()
    first, second = page.index("(01_a.ipynb)"), page.index("[Lab 02: the second](02_b.ipynb)")
    assert first < second
    assert "(/static/book/02_b.html)" in page
    (work / "START.md").write_text("my notes")
    (labs / "02_b.ipynb").write_text("renamed")
    copy_labs(labs, work)
    assert (work / "START.md").read_text() == "my notes"


def test_a_learners_file_is_never_overwritten(folders):
    labs, work = folders
    copy_labs(labs, work)
    (work / "01_a.ipynb").write_text("my answers")
    (labs / "01_a.ipynb").write_text("second")
    (labs / "02_b.ipynb").write_text("second")
    lines = copy_labs(labs, work)
    assert (work / "01_a.ipynb").read_text() == "my answers"
    assert (work / "01_a.new.ipynb").read_text() == "second"
    assert (work / "02_b.ipynb").read_text() == "second"
    assert "01_a.new.ipynb" in lines[1]
    assert "updated" in lines[2]
    assert [line.split()[0] for line in copy_labs(labs, work)] == ["kept", "kept", "kept"]


def test_answers_beside_a_newer_version_are_kept_too(folders):
    labs, work = folders
    copy_labs(labs, work)
    (work / "01_a.ipynb").write_text("my answers")
    (labs / "01_a.ipynb").write_text("second")
    copy_labs(labs, work)
    (work / "01_a.new.ipynb").write_text("my answers, gone on with")
    (labs / "01_a.ipynb").write_text("third")
    copy_labs(labs, work)
    assert (work / "01_a.new.ipynb").read_text() == "my answers, gone on with"
    assert "third" in [path.read_text() for path in work.glob("01_a.new-*.ipynb")]
    (work / ".copied.json").write_text("torn")
    assert [line.split()[0] for line in copy_labs(labs, work)] == ["kept"] * 3
    assert (work / "01_a.ipynb").read_text() == "my answers"


def test_a_copied_lab_links_to_the_built_chapter(folders):
    labs, work = folders
    (labs / "01_a.ipynb").write_text("[chapter](../book/01_a.md) and [part](../book/01_a.md#a-part), ![x](../b.png)")
    copy_labs(labs, work)
    pages = "[chapter](/static/book/01_a.html) and [part](/static/book/01_a.html#a-part), ![x](../b.png)"
    assert (work / "01_a.ipynb").read_text() == pages


@pytest.fixture
def site(tmp_path):
    (tmp_path / "index.html").write_text("<p>book</p>")
    return tmp_path


def test_serving_takes_the_next_free_port(site):
    with room.open_server(site, None) as first, room.open_server(site, None) as second:
        assert first.server_port != second.server_port


def test_a_busy_port_is_said_in_one_sentence(site):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot serve on port {port} .*leave the port out"):
            room.open_server(site, port)


def test_serving_without_a_book_says_the_mend(tmp_path):
    with pytest.raises(ValueError, match="run make book first"):
        room.open_server(tmp_path, None)


def test_jupyterlab_starts_on_the_page_with_what_every_kernel_loads(tmp_path, monkeypatch):
    for name in ("labs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.setattr(room, "course_folder", lambda: tmp_path)
    monkeypatch.setattr(room.sys, "prefix", str(tmp_path / "env"))
    started = []
    monkeypatch.setattr(room.os, "execve", lambda *words: started.append(words))
    result = CliRunner().invoke(app, ["lab", "--no-browser", "--port", "7"])
    assert result.exit_code == 0, result.output
    ((_, command, _),) = started
    assert f"--ServerApp.root_dir={tmp_path}" in command
    assert "--LabApp.default_url=/lab/tree/work/START.md" in command
    assert command[-3:] == ["--no-browser", "--port", "7"]
    assert (tmp_path / "work" / "START.md").exists()
    assert "lablib.launch" in (tmp_path / "env" / "etc" / "ipython" / "ipython_config.py").read_text()


def test_a_home_that_cannot_be_written_to_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert room.writable_home() == {}
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))  # for root, any folder that is there can be written to
    monkeypatch.setenv("MPLCONFIGDIR", "mine")
    moved = room.writable_home()
    assert {"JUPYTER_RUNTIME_DIR", "IPYTHONDIR"} <= set(moved)
    assert "MPLCONFIGDIR" not in moved


NPM = """#!/bin/sh
mkdir -p package/a11y package/chtml/woff2
case "$*" in
  "pack --silent mathjax@4.1.3")
    touch package/LICENSE package/tex-chtml-nofont.js package/tex-svg.js package/a11y/assistive-mml.js ;;
  "pack --silent @mathjax/mathjax-tex-font@4.1.3")
    touch package/package.json package/chtml.js package/svg.js package/chtml/woff2/a.woff2 ;;
  *) exit 1 ;;
esac
tar -czf packed-4.1.3.tgz package
"""


def test_a_package_of_npm_is_fetched_once_and_without_npm_the_build_goes_on(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "bin").mkdir()
    npm, kept = tmp_path / "bin" / "npm", tmp_path / ".cache" / "mathjax-4.1.3"
    for name in ("bash", "cp", "dirname", "gzip", "mkdir", "mktemp", "mv", "rm", "sh", "tar", "timeout", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))

    def fetch(content=None):
        if content:
            npm.write_text(content)
            npm.chmod(0o755)
        env = os.environ | {"PATH": str(tmp_path / "bin")}
        run = subprocess.run([tmp_path / "tools" / "mathjax.sh"], env=env, capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout, sorted(str(f.relative_to(kept)) for f in kept.rglob("*") if f.is_file())

    from_cdn = "so pages load MathJax from its CDN.\n"
    assert fetch() == (f"Formulas: npm is not installed, {from_cdn}", [])
    assert fetch("#!/bin/sh\nexit 1\n") == (f"Formulas: npm cannot fetch mathjax@4.1.3, {from_cdn}", [])
    font = ["chtml.js", "chtml/woff2/a.woff2", "package.json"]
    files = ["LICENSE", "a11y/assistive-mml.js", *(f"mathjax-tex-font/{name}" for name in font), "tex-chtml-nofont.js"]
    assert fetch(NPM) == ("", files)
    assert fetch("#!/bin/sh\nexit 1\n") == ("", files)  # nobody is asked again


def _stages(make, *, since=None, budget="100", **variables):
    import time

    command = [sys.executable, ROOT / "tools/stages.py", "--name", "make test", "--budget", budget]
    command += ["--since", str(time.time() if since is None else since), "one", "two"]
    kept = {name: value for name, value in os.environ.items() if name != "LABLIB_BUDGETS"}
    return subprocess.run(command, env=kept | {"MAKE": make} | variables, capture_output=True, text=True)


def test_stages_that_pass_are_listed_with_their_time():
    import time

    begun = time.time()
    run = _stages("true", since=begun)
    most = (time.time() - begun) / 60 + 0.05  # rounded to a tenth
    assert run.returncode == 0
    assert re.search(r"^two +\d+ s  passed(, cores \d+% busy)?$", run.stdout, re.M)
    (minutes,) = re.findall(r"make test: (\d+\.\d) of at most 2 minutes on 2 cores", run.stdout)
    assert float(minutes) <= most


def test_a_stage_that_fails_fails_the_run_and_the_next_one_still_runs():
    run = _stages("false")
    assert run.returncode == 1
    assert "failed: one, two" in run.stdout


@pytest.mark.parametrize(("switch", "status"), [({}, 0), ({"LABLIB_BUDGETS": "2"}, 1), ({"LABLIB_BUDGETS": "0"}, 0)])
def test_a_clock_is_reported_and_fails_only_where_the_switch_says_so(switch, status):
    import time

    late = _stages("true", since=time.time() - 201, **switch)
    assert "OVER THE BUDGET" in late.stdout
    assert late.returncode == status
    assert _stages("true", since=time.time() - 150, **switch).returncode == 0  # less than twice the budget


def test_ci_sets_the_switch_of_the_budgets():
    assert re.search(r"^export LABLIB_BUDGETS=5$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M)


def test_every_command_of_the_readme_and_the_workflows_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / ".github/workflows").glob("*.yml")]
    named = {name for p in pages for name in re.findall(r"\bmake ([a-z-]+)", p.read_text(encoding="utf-8"))}
    assert {"book", "test", "lab", "serve", "bench", "linkcheck", "clean", "help"} <= targets
    assert named - targets == set()


@pytest.fixture
def lab():
    cells = [
        nbformat.v4.new_markdown_cell("# A lab", id="a"),
        nbformat.v4.new_code_cell("print(1)", id="b"),
        nbformat.v4.new_code_cell("2", id="c"),
    ]
    return nbformat.v4.new_notebook(cells=cells)


#: As nbval collects them.
_OUTPUTS = {
    0: [{"output_type": "stream", "name": "stdout", "text": "1\n"}],
    1: [{"output_type": "execute_result", "data": {"text/plain": "2"}, "metadata": {}, "execution_count": 1}],
}


def test_a_lab_that_passed_is_kept_with_its_outputs(lab, tmp_path):
    path = tmp_path / "new" / "01_a.ipynb"
    load("conftest.py").keep_executed(lab, _OUTPUTS, path)
    kept = nbformat.read(path, 4)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in lab.cells]
    assert [cell.outputs for cell in kept.cells[1:]] == list(_OUTPUTS.values())
    assert kept.metadata.mystnb.execution_mode == "off"
    assert lab.cells[1].outputs == []


def test_a_lab_with_a_cell_that_did_not_pass_is_not_kept(lab, tmp_path):
    load("conftest.py").keep_executed(lab, {0: _OUTPUTS[0]}, tmp_path / "01_a.ipynb")
    assert list(tmp_path.iterdir()) == []


def test_the_site_shows_the_kept_run_of_this_very_lab(lab, tmp_path, monkeypatch):
    load("conftest.py").keep_executed(lab, _OUTPUTS, tmp_path / "01_a.ipynb")
    monkeypatch.setenv("EXECUTED_LABS", str(tmp_path))
    reading, shipped = load("_ext/reading.py"), nbformat.writes(lab)
    source = [shipped]
    reading._show_executed(None, "labs/01_a", source)
    assert json.loads(source[0])["cells"][1]["outputs"][0]["text"] == ["1\n"]
    for other in ("labs/02_b", "book/01_a"):  # not run by nbval: executed by the build
        source = [shipped]
        reading._show_executed(None, other, source)
        assert source == [shipped]
    lab.cells[2].source = "3"
    with pytest.raises(reading.ExtensionError, match=r"is not the run of labs/01_a\.ipynb as it is now"):
        reading._show_executed(None, "labs/01_a", [nbformat.writes(lab)])


def test_a_build_runs_one_lab_at_a_time(monkeypatch):
    from sphinx.util.parallel import make_chunks

    pages = [
        str(path.relative_to(ROOT).with_suffix(""))
        for part in ("book", "labs")
        for path in (ROOT / part).glob("[!_]*.*")
        if path.suffix in (".md", ".ipynb")
    ]
    labs = sorted(page for page in pages if page.startswith("labs/"))
    app, reading = SimpleNamespace(parallel=2), load("_ext/reading.py")
    monkeypatch.delenv("EXECUTED_LABS", raising=False)
    dealt = sorted(pages)
    reading._deal(app, None, dealt)
    assert sorted(dealt) == sorted(pages)
    first, *others = make_chunks(dealt, 2)
    assert first[: len(labs)] == labs
    assert not {lab for chunk in others for lab in chunk} & set(labs)
    # Labs that nbval ran are pages as others.
    monkeypatch.setenv("EXECUTED_LABS", "somewhere")
    reading._deal(app, None, dealt)
    assert dealt[: len(labs)] != labs


@pytest.mark.parametrize("jobs", [1, 4])
def test_pages_are_read_together_and_no_two_kernels_share_an_address(jobs, monkeypatch):
    import jupyter_book.sphinx
    from jupyter_client import AsyncKernelManager, KernelManager

    monkeypatch.syspath_prepend(ROOT / "tools")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's packages, while they are loaded
        tool, seen = load("tools/build_site.py"), []
    monkeypatch.setattr(KernelManager, "__init__", inspect.unwrap(KernelManager.__init__))
    monkeypatch.setattr(jupyter_book.sphinx, "build_sphinx", lambda *_, jobs: seen.append(jobs))

    def command(words):
        jupyter_book.sphinx.build_sphinx(*words)
        seen.extend(AsyncKernelManager() for _ in range(2))

    monkeypatch.setattr(tool, "main", command)
    tool.build(jobs, [".", "-W"])
    number, *kernels = seen
    assert number == jobs
    assert [kernel.transport for kernel in kernels] == (["tcp"] * 2 if jobs == 1 else ["ipc"] * 2)
    assert len({kernel.ip for kernel in kernels}) == (1 if jobs == 1 else 2)
    # The address of a socket has 104 characters at most; a kernel adds "-1" to "-5" to it.
    assert all(len(kernel.ip) <= 100 for kernel in kernels)


def test_a_run_takes_a_share_of_what_is_drawn_and_all_runs_together_take_all(monkeypatch):
    take = load("conftest.py").share_of_cases
    names = [*(f"a.py::many[{i}]" for i in range(10)), "a.py::alone", "a.py::two[x]", "a.py::two[y]"]
    assert sorted(take(names, 1, "0")) == sorted(names)
    runs = [take(names, 4, str(draw)) for draw in range(200)]
    assert {tuple(sum(test in name for name in run) for test in ("many", "two")) for run in runs} == {(3, 1)}
    assert {sum("alone" in name for name in run) for run in runs} == {0, 1}
    assert {name for run in runs for name in run} == set(names)

    answers = [lambda: None for _ in range(9)]
    answers[4].__name__ = "without_the_idea_at_all"
    monkeypatch.setenv("LABLIB_SHARE", "1")
    assert set(share_of(answers)) == set(answers)
    monkeypatch.setenv("LABLIB_SHARE", "4")
    some = [share_of(answers) for _ in range(100)]  # one of eight in none of them: 8 * 0.5**100
    assert {(len(one), one[0]) for one in some} == {(5, answers[4])}
    assert {answer for one in some for answer in one} == set(answers)
