"""Guesses and questions: enough in each chapter, one right choice each, and no answer that is typed."""

import ast
import re
from unittest.mock import patch

import pytest

from lablib.view.questions import guess, question
from tests.built_site import CHAPTERS, parsed
from tests.test_typed import ROOT, _cells, _typed_strings, typed_in

#: Chapters that have their guesses and questions; it grows.
ASKING = [
    page
    for page in CHAPTERS
    if page[5:7] in ("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13")
]
every_chapter = pytest.mark.parametrize("page", ASKING)
HALF = {"a half": "That is $1/2$.", "a third": "No."}


def calls(source):
    """Return the calls of `guess` and of `question` in code: the function, and its arguments by name."""
    found = []
    for node in ast.walk(ast.parse(re.sub(r"(?m)^:\w+:.*$|^[%!].*$", "", source))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("guess", "question"):
            given = dict(zip(("name", "asked", "answer", "choices"), node.args, strict=False))
            found.append((node.func.id, given | {keyword.arg: keyword.value for keyword in node.keywords}))
    return found


def asked_on(page):
    """Return the calls on a page."""
    return [call for cell in _cells(ROOT / f"{page}.md") for call in calls(cell)]


def typed_results(call):
    """Return what is typed and not computed in the answers of a guess or a question."""
    dicts = [call[name] for name in ("choices", "mistakes") if name in call]
    keys = [call["answer"], *(key for each in dicts for key in each.keys)]
    sentences = [*keys, *(value for each in dicts for value in each.values), call.get("why")]
    typed = [key.value for key in keys if isinstance(key, ast.Constant) and re.fullmatch(r"[\d.,]+", str(key.value))]
    return typed + [result for part in sentences for text in _typed_strings(part) for result in typed_in(text.value)]


@every_chapter
def test_a_chapter_has_four_guesses_and_five_questions_whose_answers_are_computed(page):
    kinds, asked = zip(*asked_on(page), strict=True)
    assert kinds.count("guess") >= 4
    assert kinds.count("question") == 5
    names = [call["name"].value for call in asked]
    assert len(set(names)) == len(names)
    assert [result for call in asked for result in typed_results(call)] == []


@pytest.mark.parametrize(
    "source",
    [
        "guess(answer=16)",
        "guess(answer=n, mistakes={12: 'No.'})",
        "guess(answer=n, why='It is 16 GB.')",
        "question('n', 'What?', a, {'8': 'No.'})",
        "question('n', 'What?', a, {'half': f'{n} and 4 GB.'})",
    ],
)
def test_a_typed_answer_is_found(source):
    [(_, call)] = calls(source)
    assert typed_results(call)


@pytest.mark.site
@every_chapter
def test_every_question_stands_on_its_page_before_what_answers_it(page):
    forms = parsed(page).select("form.asked")
    assert len(forms) == len(asked_on(page))
    for form in forms:
        after = form.find_parent(class_="cell").find_next_siblings(limit=int(form["data-covers"]) or 1)
        if form["data-covers"] != "0":
            html = "".join(map(str, after))
            assert any(part in html for part in ("<figure", "<table", "<ol", "<ul", 'class="math')), form["data-name"]
            assert not any(block.select("form, h2, h3") for block in after), form["data-name"]
    places = {form["data-answer"] for form in forms if "question" in form["class"]}
    assert len(places) >= 3, "the place of the right choice changes"


def shown(function, *args, **kwargs):
    """Return the Markdown that a call shows."""
    with patch("lablib.view.questions.display") as display:
        function(*args, **kwargs)
    return display.call_args.args[0].data


@pytest.mark.parametrize(
    ("said", "ask", "args", "kwargs"),
    [
        ("judges a mistake right", guess, [16.0], {"why": "So.", "mistakes": {15: "no master copy."}}),
        ("cannot tell the mistakes at", guess, [16.0], {"why": "So.", "mistakes": {4.0: "one.", 4.1: "other."}}),
        ("has no reason", guess, [16.0], {}),
        ("a reader types", guess, [16.0], {"why": "So.", "unit": "percent"}),
        ("has no choice 'a fifth'", guess, ["a fifth"], {"choices": HALF}),
        ("has too few choices", question, ["a half", HALF], {}),
        ("has a choice without its reason", question, ["a half", HALF | {"a fourth": ""}], {}),
    ],
)
def test_what_cannot_be_judged_is_refused(said, ask, args, kwargs):
    with pytest.raises(ValueError, match=said):
        ask("one", "How much?", *args, **kwargs)


def test_an_edited_question_is_another():
    numbers = [("How many?", 16.0, "So."), ("How many of them?", 16.0, "So."), ("How many?", 18.0, "So.")]
    made = [shown(guess, "one", asked, answer, why=why) for asked, answer, why in numbers]
    made += [shown(guess, "one", "How many?", answer, choices=HALF) for answer in HALF]
    names = [re.search(r'data-name="([^"]+)"', each)[1] for each in made]
    assert len(set(names)) == 5
    assert names[0] in shown(guess, "one", "How many?", 16.0, why="Because.")


@pytest.mark.parametrize(("answer", "written"), [(12345.6, "12,300"), (12345, "12,345"), (0.125, "0.125")])
def test_a_number_is_shown_as_readers_write_it(answer, written):
    assert f'data-shown="{written}"' in shown(guess, "one", "How many?", answer, why="So.")
