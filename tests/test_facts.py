"""What the pages say of frameworks, held to the frameworks' own files.

Installed releases are read as they are, others where `make frameworks` brought them.
"""

import json
import re
from dataclasses import asdict, replace
from itertools import groupby

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from lablib.cli.main import app as rung
from tests.evidence import facts as evidence
from tests.evidence.__main__ import app
from tests.evidence.facts import ROOT, broken, installed, read_facts, unsaid

TABLE = sorted(read_facts(), key=lambda fact: fact.release)
RELEASES = {release: list(rows) for release, rows in groupby(TABLE, lambda fact: fact.release)}
HERE = next(fact for fact in TABLE if fact.has and installed(fact.project) == fact.version)


@pytest.mark.parametrize("release", RELEASES)
def test_what_pages_say_of_a_release_stands_in_its_files(release):
    try:
        said = {f"{fact.page}: {fact.says}": broken(fact) for fact in RELEASES[release]}
    except LookupError as error:
        pytest.skip(f"{error} is not here: make frameworks fetches it")
    assert {claim: why for claim, why in said.items() if why} == {}


def test_each_fact_is_said_on_one_line_of_its_page():
    assert list(unsaid(TABLE)) == []


@pytest.mark.parametrize("wrong", ["in the release", "on the page", "both", "neither"])
def test_the_command_finds_facts_that_are_broken(wrong, tmp_path):
    rows = [asdict(HERE), asdict(HERE)]
    if wrong in ("in the release", "both"):
        rows[0]["has"] = ["a default that no file ever had"]
    if wrong in ("on the page", "both"):
        rows[1]["says"] = "a sentence that no page ever had"
    table = tmp_path / "facts.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["facts", "--rows", str(table)])
    assert done.exit_code == (wrong != "neither")
    assert ("lacks 'a default that no file ever had'" in done.output) == (wrong in ("in the release", "both"))
    assert ("0 lines say 'a sentence that no page ever had'" in done.output) == (wrong in ("on the page", "both"))


def test_text_that_a_file_must_not_have_is_found():
    assert broken(HERE) is None
    assert broken(replace(HERE, has=(), lacks=HERE.has[:1])).startswith("has ")


@pytest.mark.parametrize("project", ["owner/repository", "no-such-release-of-the-index"])
def test_a_release_out_of_reach_is_said_and_is_no_proof(project, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "CACHE", tmp_path)
    monkeypatch.setattr(evidence, "REPOSITORIES", "http://127.0.0.1:9")  # the port of "discard": nobody listens

    def offline(*_):
        raise OSError("no network")

    monkeypatch.setattr(evidence, "_pip", offline)
    far = replace(HERE, project=project, version="9.9")
    (said,) = evidence.look_up([far])
    assert said.startswith(f"{project} 9.9: not looked up: ")
    with pytest.raises(LookupError, match=project):
        broken(far)


def test_a_file_of_a_repository_is_fetched_once_and_read(tmp_path, monkeypatch):
    there, cache = tmp_path / "there", tmp_path / "cache"
    (there / "owner/repository/v1").mkdir(parents=True)
    (there / "owner/repository/v1/a.cc").write_text("int  answer =\n 42;")
    monkeypatch.setattr(evidence, "CACHE", cache)
    monkeypatch.setattr(evidence, "REPOSITORIES", there.as_uri())
    row = replace(HERE, project="owner/repository", version="v1", file="a.cc", has=("answer = 42",), lacks=())
    assert list(evidence.look_up([row])) == []
    (there / "owner/repository/v1/a.cc").unlink()
    assert list(evidence.look_up([row])) == []


def _own_options():
    """Return the options of this project's commands."""
    found, groups = set(), [get_command(rung), get_command(app)]
    while groups:
        group = groups.pop()
        context = Context(group)
        for command in (group.get_command(context, name) for name in group.list_commands(context)):
            found |= {name for parameter in command.params for name in parameter.opts}
            groups += [command] if hasattr(command, "list_commands") else []
    return found


#: Slurm's, which is no package.
NOT_LOOKED_UP = {"--requeue", "--signal"}


def test_a_flag_in_the_prose_has_a_row():
    """A flag that a page names in its text is this project's, or a row says in which file it was read."""
    known = NOT_LOOKED_UP | _own_options()
    unread = {page.stem: sorted(_unread_flags(page) - known) for page in (ROOT / "book").glob("*.md")}
    assert {page: flags for page, flags in unread.items() if flags} == {}


def _unread_flags(page):
    prose = re.sub(r"(?ms)^(`{3,}|~{3,}).*?^\1", "", page.read_text(encoding="utf-8"))
    rows = [fact for fact in TABLE if fact.page == page.stem]
    read = " ".join(text for fact in rows for text in (fact.says, *fact.has, *fact.lacks))
    flags = {
        flag
        for line in prose.splitlines()
        if not any(fact.says in line for fact in rows)
        for flag in re.findall(r"`(--[a-z][a-z0-9-]+)[^`]*`", line)
    }
    return {flag for flag in flags if flag not in read and flag[2:].replace("-", "_") not in read}
