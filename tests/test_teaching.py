"""The part on teaching: notes name what is there, schedules have what the labs have, and learners see no note."""

import gzip
import re
import shlex

import pytest
from typer.testing import CliRunner

from lablib.checks.answers import GOALS, exercises
from lablib.cli.main import app
from tests.browser.test_site import Visit
from tests.browser.test_site import address as address
from tests.browser.test_site import browser as browser
from tests.built_site import CHAPTERS, ROOT, SITE, parsed

NOTES = ROOT / "book" / "notes"
OWN = {goal.rung: goal.checks for goal in GOALS}


@pytest.mark.parametrize("rung", OWN)
def test_a_note_names_checks_and_sections_that_are_there(rung):
    text = (NOTES / f"{rung}.md").read_text(encoding="utf-8")
    (chapter,) = (ROOT / "book").glob(f"{rung}_*.md")
    page = chapter.read_text(encoding="utf-8")
    headings = set(re.findall(r"(?m)^#{2,4} (.+)$", page))
    for part in ("Afterwards people can", "Questions people really ask", "Where people get stuck"):
        assert f"**{part}**" in text
    answers = text.split("**Questions people really ask**")[1].split("**Where people get stuck**")[0]
    questions = re.findall(
        r"(?m)^- .*\?\W*\(\[[\w.-]+/[\w.-]+#\d+\]\(https://github\.com/\S+/\d+\)(?:, 20\d\d)?\)", answers
    )
    assert len(questions) >= 2
    assert len(re.findall(r"(?m)^- ", answers)) == len(questions), "each question has its address"
    quoted = [name for line in answers.splitlines() for name in re.findall(r'"([^"]+)"[.;]?$', line)]
    assert len(quoted) >= len(questions)
    assert [name for name in quoted if name not in headings] == []
    named = set(re.findall(r"`(\w+)`", text)) & {name for rung in OWN for name in exercises(rung)}
    assert named <= set(exercises(rung))
    (proof,) = re.findall(r"\*\*Shows that it was understood:\*\* `(\w+)`", text)
    assert proof in exercises(rung)
    dropped = text.split("**When late, drop**")[1].split("never drop")[0]
    assert not set(re.findall(r"`(\w+)`", dropped)) & set(OWN[rung])
    assert len(text.split()) <= 350
    assert f"```{{include}} notes/{rung}.md" in page
    assert f"```{{include}} notes/{rung}.md" in (ROOT / "book" / "teaching_notes.md").read_text(encoding="utf-8")


@pytest.mark.site
def test_all_exercises_are_listed_with_minutes():
    page = parsed("book/teaching")
    rows = [[cell.get_text() for cell in row.select("td")] for row in page.select("#all-exercises tbody tr")]
    assert {(row[0], row[1]) for row in rows} == {(rung, name) for rung in OWN for name in exercises(rung)}
    assert all(row[2] in ("", "work", "fault") and 3 < int(row[3]) <= 60 and row[4] in "123" for row in rows)
    assert {(row[0], row[1]) for row in rows if row[5]} == {(rung, name) for rung in OWN for name in OWN[rung]}


@pytest.mark.site
def test_a_note_is_seen_where_the_switch_is_on_and_nowhere_else(browser, address):
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        visit = Visit(context, address, CHAPTERS[4])
        note = visit.page.locator(".admonition.instructor")
        assert note.count() == 1
        assert not note.is_visible()
        visit.page.goto(f"{address}book/teaching.html")
        visit.page.get_by_label("Show what is for instructors").check()
        visit.page.goto(f"{address}{CHAPTERS[4]}.html")
        assert note.is_visible()
        visit.page.goto(f"{address}book/teaching_notes.html")
        assert visit.page.locator(".admonition.instructor:visible").count() == len(OWN)
        visit.page.get_by_label("Show what is for instructors").uncheck()
        assert visit.page.locator(".admonition.instructor:visible").count() == 0


@pytest.mark.site
def test_no_search_finds_a_note():
    found = list((SITE / "_static" / "found").rglob("*.pf_fragment"))
    if not found:
        pytest.skip("no Pagefind here")
    assert not [path.name for path in found if b"Shows that it was understood" in gzip.decompress(path.read_bytes())]


def test_the_requests_of_the_page_are_taken(tmp_path):
    text = (ROOT / "book" / "teaching_room.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?m)^rung (labs ask .+)$", text)
    assert len(lines) == 2
    for line in lines:
        result = CliRunner().invoke(app, [str(tmp_path) if word == "ROOM" else word for word in shlex.split(line)])
        assert result.exit_code == 0, result.output
