"""Costs add up as they are billed, and the expected step is the planner's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lablib.calc.cost_sheet import LABS, cheaper, expect, expectations, parse_machine, sheet
from lablib.calc.hardware import accelerator
from lablib.calc.links import link
from lablib.cli.cost import sheet_table
from lablib.cli.main import app

A10, H100 = parse_machine("2xa10@0.75"), parse_machine("2 x h100 @ 3")


def test_a_machine_is_written_as_number_kind_and_price():
    assert (A10.gpus, A10.card, A10.price) == (2, accelerator("a10"), 0.75)
    assert A10.name == "2 x A10"
    for text in ("a10@1", "0xa10@1", "2xa10", "2xa10@", "2xa10@-1"):
        with pytest.raises(ValueError, match=r"2xa10@0\.75"):
            parse_machine(text)
    with pytest.raises(ValueError, match="unknown accelerator"):
        parse_machine("2xa11@1")


@pytest.mark.parametrize(
    ("minutes", "billing", "cost"),
    [(0, "hour", 0), (60, "hour", 1.5), (61, "hour", 3.0), (30, "minute", 0.75), (0.5, "minute", 0.025),
     (0.5, "second", 0.0125), (20 + 20 + 20, "hour", 1.5), (0.1 + 0.2, "second", 0.0075)],
)  # fmt: skip
def test_time_is_rounded_up_as_it_is_billed(minutes, billing, cost):
    # 2 GPUs at 0.75 are 1.50 an hour. 0.1 + 0.2 minutes are 18 seconds, not 19.
    assert A10.cost(minutes, billing) == pytest.approx(cost)


def test_a_session_is_its_labs_and_its_setup():
    whole = sheet(A10)
    assert [row.lab for row in whole.rows] == [budget.lab for budget in LABS]
    assert whole.minutes == 10 + sum(budget.minutes for budget in LABS)
    assert whole.cost == pytest.approx(A10.cost(whole.minutes))
    few = sheet(A10, ["6", "11"], measured={"06": 1.5}, setup=0, billing="second")
    assert [(row.lab, row.minutes, row.measured) for row in few.rows] == [
        ("06", 1.5, True),
        ("11", 30, False),
    ]
    assert few.cost == pytest.approx(31.5 / 60 * 1.5)
    one, two = ({row.lab: row.what for row in sheet(m).rows} for m in (parse_machine("1xa10@1"), A10))
    assert {lab for lab in one if one[lab] != two[lab]} == {"11"}
    assert one["11"].endswith("; scaling wants two GPUs")
    assert two["11"].endswith(", scaling")


def test_the_sheet_bills_the_labs_with_a_cell_that_uses_cuda_and_no_others():
    labs = Path(__file__).parents[1] / "labs"
    uses = set()
    for path in labs.glob("[0-9][0-9]_*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        if any(
            "gpu" in cell["metadata"].get("tags", []) or "cuda" in "".join(cell["source"]) for cell in code
        ):
            uses.add(path.name[:2])
    assert uses == {budget.lab for budget in LABS}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="lab 03 measures nothing on a GPU"):
        sheet(A10, ["3"])
    with pytest.raises(ValueError, match="use one of second, minute, hour"):
        sheet(A10, billing="day")
    with pytest.raises(ValueError, match="must not be negative or infinite"):
        parse_machine("2xa10@1").cost(float("inf"))
    with pytest.raises(ValueError, match="must not be negative"):
        sheet(A10, setup=-1)
    with pytest.raises(ValueError, match="nothing fits"):
        expect(parse_machine("2xa10@1"), model="llama-3-8b", seq=2048, batch=1)


def test_pcie_and_nvlink_are_told_apart():
    slow, fast = expectations([A10, H100], model="llama-3.2-1b", seq=2048, batch=1)
    assert slow.bandwidth == link("pcie4-x16").bandwidth
    assert fast.bandwidth == link("nvlink4").bandwidth
    assert slow.efficiency < fast.efficiency
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)
    # Communication is what the link makes of it: at a tenth of the bandwidth scaling gets worse, compute stays.
    choked = expect(A10, model="llama-3.2-1b", seq=2048, batch=1, intra=slow.bandwidth / 10)
    assert choked.efficiency < slow.efficiency
    assert choked.parts["matmul"] == slow.parts["matmul"]
    assert choked.one == pytest.approx(slow.one)
    assert slow.tokens_per_second == pytest.approx(2 * 2048 / slow.seconds)
    assert slow.cost_of(3600 * slow.tokens_per_second) == pytest.approx(1.5)
    winner, times = cheaper(slow, fast)
    assert winner is min((slow, fast), key=lambda one: one.cost_of(1.0))
    assert times >= 1


def test_one_gpu_is_its_own_baseline():
    alone = expect(parse_machine("1xa10@1"), batch=2)
    assert alone.efficiency == pytest.approx(1)
    assert alone.parts["dp"] == 0


def test_the_command_prints_both_machines_and_uses_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path))
    job = {
        "lab": "06_fsdp",
        "status": "done",
        "device": {"gpus": ["NVIDIA A10"] * 2},
        "attempts": [{"seconds": 90}],
    }
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "job.json").write_text(json.dumps(job))
    out = CliRunner().invoke(app, ["cost", "2xa10@0.75", "2xh100@3", "--lab", "6", "--tokens", "1B"]).output
    assert max(map(len, out.splitlines())) <= 80
    assert "06       1.5     0.04" in out
    assert "06       4.0*    0.40" in out
    assert "2 x H100 SXM" in out
    rows = json.loads(CliRunner().invoke(app, ["cost", "2xa10@0.75", "--json"]).output)
    assert rows[0]["cost"] == pytest.approx(sheet(A10, measured={"06": 1.5}).cost)
    assert CliRunner().invoke(app, ["cost", "2xa10"]).exit_code == 2


@pytest.mark.parametrize("machine", ["1xh100@3", "8xa10g@1.2"])
def test_the_table_adds_up_to_its_last_line(machine):
    found = sheet(parse_machine(machine), billing="second")
    lines = sheet_table(found).splitlines()
    assert max(map(len, lines)) <= 80
    *parts, whole = [line.split() for line in lines if line[:2].isdigit() or line[:5] in ("setup", "all  ")]
    assert sum(float(words[1].rstrip("*")) for words in parts) == pytest.approx(float(whole[1]))
    assert sum(float(words[2]) for words in parts) == pytest.approx(float(whole[2]), abs=0.005 * len(parts))


def test_the_cost_sheet_loads_no_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path))
    probe = (
        "import sys\nfrom lablib.cli.main import app\n"
        "try:\n    app(['cost', '2xa10@1'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0
