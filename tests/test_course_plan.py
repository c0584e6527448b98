"""The hours, the one line for a rented machine and its minutes are the same wherever they are printed."""

import json
import re
from pathlib import Path

import pytest

from lablib.calc.runs import LAB_BUDGETS, RUN_GPU_LABS, STUDY_MINUTES, hours_text, rented_minutes, study_minutes
from lablib.calc.runs.rental import BUDGET_MINUTES, GPU_LABS, SETUP_MINUTES
from lablib.checks.answers import A_GUESS, A_PROBLEM, A_TRY, CODE, READ, STUDY, WRITE, chapter_minutes, read_lab
from lablib.launch.records import experiments

#: At home, in the folder of the course: the results land where labs and reports look for them.
BRING_HOME = (
    "scp USER@HOST:distributed-training/distributed-experiments/NAME-results.tar.gz .\ntar xzf NAME-results.tar.gz"
)

ROOT = Path(__file__).resolve().parents[1]
#: One page has the lines for a rented machine; a lab has its own, and the others lead there.
RENTED = "book/rented_hour.md"
LEAD_THERE = ["README.md", "book/11_practical_fsdp.md", "book/how_to_use.md", "book/graduation.md"]


def _text(page):
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_line_runs_what_the_cost_sheet_bills_and_its_budget_is_enough():
    assert set(GPU_LABS) == {budget.lab for budget in LAB_BUDGETS}
    assert GPU_LABS[0] == "11", "the scaling report comes before anything that a budget may cut off"
    assert rented_minutes() == SETUP_MINUTES + sum(budget.minutes for budget in LAB_BUDGETS)
    assert sum(budget.minutes for budget in LAB_BUDGETS) <= BUDGET_MINUTES < 60
    assert "--record" not in RUN_GPU_LABS  # for maintainers: it writes into labs/recorded


@pytest.mark.parametrize("page", [RENTED, "labs/11_practical_fsdp.ipynb"])
def test_the_one_line_is_printed_as_it_is(page):
    printed = re.findall(r"rung labs run \d[^`\n\\]*", _text(page))
    paid = [line for line in printed if "--gpus cpu" not in line]  # the rehearsal at home
    assert paid
    assert all(line.startswith(RUN_GPU_LABS) for line in paid), printed


@pytest.mark.parametrize("page", LEAD_THERE)
def test_renting_is_told_once_and_the_others_lead_there(page):
    text = _text(page)
    assert "(book/rented_hour.md" in text or "(rented_hour.md" in text
    assert "rung labs run 11" not in text
    assert "source .venv/bin/activate" not in text


def test_the_way_home_is_printed_as_it_is():
    assert BRING_HOME in _text(RENTED)


def test_the_readme_has_the_minutes_that_rung_cost_computes():
    said = re.findall(r"(\d+) minutes, setting up included", _text("README.md"))
    assert [int(minutes) for minutes in said] == [rented_minutes()]


def test_who_has_to_size_a_job_finds_the_plan_and_its_bill():
    text = _text("book/how_to_use.md").split("**You have to size a job.**")[1].split("**You rent")[0]
    assert "`rung plan " in text
    assert "(size_a_reservation.md)" in text


def test_the_hours_of_the_tables_are_those_of_the_plan():
    rows = re.findall(r"(?m)^\| (\d\d) [^|]*\| (\d+) min \| (\d+) min \| ([^|]*) \|$", _text("book/how_to_use.md"))
    assert {rung: (int(a), int(b)) for rung, a, b, _ in rows} == STUDY_MINUTES
    assert all(hours_text(study_minutes(rung)) == total for rung, _, _, total in rows)
    readme = re.findall(r"(?m)^\| \[(\d\d) [^|]*\|[^|]*\| (\d+) min \| (\d+) min \|", _text("README.md"))
    assert {rung: (int(a), int(b)) for rung, a, b in readme} == STUDY_MINUTES
    home = re.findall(r"(?m)^\| \[(\d\d) [^|]*\|[^|]*\| (\d+) min \| \[(\d+) min\]", _text("index.md"))
    assert {rung: (int(a), int(b)) for rung, a, b in home} == STUDY_MINUTES


@pytest.mark.parametrize("rung", STUDY_MINUTES)
def test_the_minutes_of_a_rung_follow_from_the_rule(rung):
    """To the five that they are rounded to, and five more, so that a sentence changes no table."""
    counted = chapter_minutes(rung), read_lab(rung).minutes
    assert all(abs(said - found) <= 7.5 for said, found in zip(STUDY_MINUTES[rung], counted, strict=True)), counted


@pytest.mark.parametrize("rung", STUDY_MINUTES)
def test_a_lab_says_the_minutes_of_the_table(rung):
    (lab,) = (ROOT / "labs").glob(f"{rung}_*.ipynb")
    said = re.findall(r"\*\*Your time:\*\* about (\d+) minutes", lab.read_text(encoding="utf-8"))
    assert [int(minutes) for minutes in said] == [STUDY_MINUTES[rung][1]]


def test_the_rule_is_printed_as_it_counts():
    rule = _text("book/how_to_use.md").split("The minutes follow from a rule")[1].split("\n\nIt gives")[0]
    said = [int(number) for number in re.findall(r"\d+", rule)]
    assert said == [STUDY, A_GUESS, A_PROBLEM, READ, CODE, A_GUESS, A_TRY, WRITE]


def test_minutes_are_said_in_hours():
    assert [hours_text(m) for m in (0, 55, 60, 100, 120)] == ["0 min", "55 min", "1 h", "1 h 40 min", "2 h"]


def test_nothing_is_said_to_have_run_on_cuda_before_a_record_says_so(monkeypatch, tmp_path):
    said = "No line of the GPU path has run on CUDA yet" in _text("README.md").split("## On rented GPUs")[1]
    assert said == (not experiments.recorded_on_gpus())
    assert ("has not run on CUDA yet" in _text("README.md").split("## ")[0]) == said
    recorded = tmp_path / "labs" / "recorded"
    recorded.mkdir(parents=True)
    monkeypatch.setattr(experiments, "repository_root", lambda: tmp_path)
    record = {"samples": [], "command": "", "commit": "", "date": "", "lablib": ""}
    machine = {"cpu": "", "cpus": 2, "torch": ""}
    for name, gpus, found in (("10_cpu", [], []), ("11_fsdp-2gpu", ["H100", "H100"], ["11_fsdp-2gpu"])):
        content = record | {"name": name, "machine": machine | {"gpus": gpus}}
        (recorded / f"{name}.json").write_text(json.dumps(content))
        assert experiments.recorded_on_gpus() == found
