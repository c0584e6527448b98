"""Costs add up as they are billed, and the expected step is the planner's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lablib.calc.hardware import accelerator, link
from lablib.calc.runs import LAB_BUDGETS, expect_step, lab_budgets, parse_machine
from lablib.cli.main import app

A10, H100 = parse_machine("2xa10@0.75"), parse_machine("2 x h100 @ 3")


def test_a_machine_is_written_as_number_kind_and_price():
    assert (A10.gpus, A10.gpu, A10.price, A10.name) == (2, accelerator("a10"), 0.75, "2 x A10")
    for text in ("a10@1", "0xa10@1", "2xa10", "2xa10@", "2xa10@-1"):
        with pytest.raises(ValueError, match=r"2xa10@0\.75"):
            parse_machine(text)
    with pytest.raises(ValueError, match="unknown accelerator"):
        parse_machine("2xa11@1")


@pytest.mark.parametrize(
    ("minutes", "billing", "cost"),
    [(0, "hour", 0), (60, "hour", 1.5), (61, "hour", 3.0), (30, "minute", 0.75), (0.5, "minute", 0.025),
     (0.5, "second", 0.0125), (0.1 + 0.2, "second", 0.0075)],
)  # fmt: skip
def test_time_is_rounded_up_as_it_is_billed(minutes, billing, cost):
    # 2 GPUs at 0.75 are 1.50 an hour. 0.1 + 0.2 minutes are 18 seconds, not 19.
    assert A10.cost(minutes, billing) == pytest.approx(cost)


def test_the_sheet_bills_the_labs_with_a_cell_that_uses_cuda_and_no_others():
    labs = Path(__file__).parents[1] / "labs"
    uses = set()
    for path in labs.glob("[0-9][0-9]_*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        if any("gpu" in cell["metadata"].get("tags", []) or "cuda" in "".join(cell["source"]) for cell in code):
            uses.add(path.name[:2])
    assert uses == {budget.lab for budget in LAB_BUDGETS}


def test_what_makes_no_sense_is_refused():
    assert [budget.lab for budget in lab_budgets(["6", "11", "06"])] == ["06", "11"]
    with pytest.raises(ValueError, match="lab 03 measures nothing on a GPU"):
        lab_budgets(["3"])
    with pytest.raises(ValueError, match="use one of second, minute, hour"):
        A10.cost(1, "day")
    for minutes in (float("inf"), -1):
        with pytest.raises(ValueError, match="must not be negative or infinite"):
            A10.cost(minutes)
    with pytest.raises(ValueError, match="nothing fits"):
        expect_step(parse_machine("2xa10@1"), model="llama-3-8b", seq=2048, batch=1)


def test_pcie_and_nvlink_are_told_apart():
    slow, fast = (expect_step(machine, model="llama-3.2-1b", seq=2048, batch=1) for machine in (A10, H100))
    assert slow.bandwidth == link("pcie4-x16").bandwidth
    assert fast.bandwidth == link("nvlink4").bandwidth
    assert slow.efficiency < fast.efficiency
    assert slow.tokens_per_second == pytest.approx(2 * 2048 / slow.seconds)
    assert slow.cost_of(3600 * slow.tokens_per_second) == pytest.approx(1.5)
    assert expect_step(parse_machine("1xa10@1"), batch=2).efficiency == pytest.approx(1)


def test_the_command_adds_up():
    out = CliRunner().invoke(app, ["cost", "2xa10@0.75", "1xh100@3", "--billing", "second"]).output
    assert max(map(len, out.splitlines())) <= 80
    assert "scaling wants two GPUs" in out
    first = out.split("\n\n")[0].splitlines()
    *parts, total = [line.split() for line in first if line[:2].isdigit() or line[:5] in ("setup", "all  ")]
    assert len(parts) == len(LAB_BUDGETS) + 1
    assert sum(float(words[1]) for words in parts) == pytest.approx(float(total[1]))
    assert sum(float(words[2]) for words in parts) == pytest.approx(float(total[2]), abs=0.005 * len(parts))
    (row,) = json.loads(CliRunner().invoke(app, ["cost", "2xa10@0.75", "--lab", "6", "--json"]).output)
    assert (row["minutes"], row["cost"]) == (14, pytest.approx(A10.cost(14)))
    assert CliRunner().invoke(app, ["cost", "2xa10"]).exit_code == 2


def test_the_longest_names_fit_and_one_node_is_said():
    machines = ["8xgb200@9", "8xa100-80gb-pcie@1", "16xh100@3"]
    out = CliRunner().invoke(app, ["cost", *machines, "--seq", "1k", "--batch", "1"]).output
    assert max(map(len, out.splitlines())) <= 80
    assert "1 sequence of 1,024 tokens" in out
    assert out.count("taken as one node") == 1
    assert "taken as one node, with no network between its GPUs: 16 x H100 SXM" in out


def test_many_gpus_do_not_run_columns_together():
    out = CliRunner().invoke(app, ["cost", "16384xh100@2.5"]).output
    (row,) = [line for line in out.splitlines() if line.startswith("16384 x H100 SXM  ")]
    assert len(row.removeprefix("16384 x H100 SXM").split()) == 7
    assert len(row) <= 80


def test_the_cost_sheet_loads_no_torch():
    probe = (
        "import sys\nfrom lablib.cli.main import app\n"
        "try:\n    app(['cost', '2xa10@1'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0
