"""The runner refuses what a lab does not have, and records only when told to."""

import nbformat
import pytest
from typer.testing import CliRunner

from lablib.cli.labs import app
from lablib.launch import experiments, labs


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with one small lab."""
    cells = [
        nbformat.v4.new_markdown_cell("# A lab", id="a"),
        nbformat.v4.new_code_cell("steps = 2", id="b", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "import os\nassert steps > 0\nprint(steps, os.environ['LABLIB_RECORD'])", id="c"
        ),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (tmp_path / "labs").mkdir()
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "labs" / "07_small.ipynb"
    )
    for module in (experiments, labs):
        monkeypatch.setattr(module, "repository_root", lambda: tmp_path)
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    return tmp_path


def test_a_lab_is_found_by_number_or_stem(house):
    assert labs.find_lab("7") == labs.find_lab("07") == labs.find_lab("07_small")
    with pytest.raises(ValueError, match="there are: 07_small"):
        labs.find_lab("8")


def test_an_unknown_parameter_is_refused_before_anything_runs(house):
    with pytest.raises(ValueError, match="no parameter step; it has: steps"):
        labs.run_lab("7", {"step": 3})
    assert not (house / "mine").exists()


def test_parameters_and_the_record_switch_reach_the_kernel(house):
    executed = nbformat.read(labs.run_lab("7", {"steps": 5}, record=True), 4)
    assert executed.cells[-1].outputs[0].text == "5 1\n"


def test_the_command_says_what_failed_in_one_sentence(house):
    result = CliRunner().invoke(app, ["run", "7", "-p", "steps=0"])
    assert result.exit_code == 1
    assert "AssertionError" in result.output
    assert CliRunner().invoke(app, ["run", "7", "-p", "steps"]).exit_code == 2
    assert "steps=2" in CliRunner().invoke(app, ["list"]).output
