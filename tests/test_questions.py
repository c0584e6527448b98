"""Guesses and questions: enough in each chapter, one right choice each, and no answer that is typed."""

import ast
import re
from unittest.mock import patch

import pytest

from lablib.view.questions import guess, question
from tests.built_site import CHAPTERS, SITE, parsed
from tests.test_typed import ROOT, _cells, _typed_strings, typed_in

#: Chapters that have their guesses and questions; it grows.
ASKING = [page for page in CHAPTERS if page[5:7] in ("01", "06", "08", "09")]
every_chapter = pytest.mark.parametrize("page", ASKING)
WHICH = {"choices": {"a half": "That is $1/2$.", "a third": "No."}}


def calls(page):
    """Return the calls of `guess` and of `question` in the cells of a page: the function, its arguments by name."""
    found = []
    for cell in _cells(ROOT / f"{page}.md"):
        for node in ast.walk(ast.parse(re.sub(r"(?m)^:\w+:.*$|^[%!].*$", "", cell))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("guess", "question"):
                given = dict(zip(("name", "asked", "answer", "choices"), node.args, strict=False))
                found.append((node.func.id, given | {keyword.arg: keyword.value for keyword in node.keywords}))
    return found


def typed_results(call):
    """Return what is typed and not computed in the answers of a guess or a question."""
    dicts = [call[name] for name in ("choices", "mistakes") if name in call]
    sentences = [call["why"]] if "why" in call else []
    sentences += [part for each in dicts for part in (*each.keys, *each.values)]
    found = [result for part in sentences for text in _typed_strings(part) for result in typed_in(text.value)]
    numbers = [key for each in dicts for key in each.keys] + [call["answer"]]
    typed = [n.value for n in numbers if isinstance(n, ast.Constant) and re.fullmatch(r"[\d.,]+", str(n.value))]
    return found + typed


@every_chapter
def test_a_chapter_has_four_guesses_and_five_questions_whose_answers_are_computed(page):
    asked = calls(page)
    kinds = [kind for kind, _ in asked]
    assert kinds.count("guess") >= 4
    assert kinds.count("question") == 5
    names = [call["name"].value for _, call in asked]
    assert len(set(names)) == len(names)
    assert [result for _, call in asked for result in typed_results(call)] == []


def test_a_typed_answer_is_found():
    def first(source):
        return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))

    for source in (
        "g(answer=16)", "g(answer=n, mistakes={12: 'No.'})", "g(answer=n, why='It is 16 GB.')",
        "g(answer=a, choices={'8': 'No.'})", "g(answer=a, choices={'half': f'{n} and 4 GB.'})",
    ):  # fmt: skip
        assert typed_results({keyword.arg: keyword.value for keyword in first(source).keywords}), source


@pytest.mark.site
@every_chapter
def test_a_question_has_one_right_choice_and_a_reason_for_each(page):
    forms = parsed(page).select("form.asked")
    assert len(forms) == len(calls(page))
    places = []
    for form in forms:
        letters = [radio["value"] for radio in form.select("[type=radio]")]
        whys = [p.strong.text for p in form.select(".answer > p") if p.strong] if letters else []
        assert whys == letters, form["data-name"]
        assert len(letters) == len(set(letters))
        assert len(form.select(".answer p")) >= 1
        if letters:
            assert letters.count(form["data-answer"]) == 1
            [right] = [p for p in form.select(".answer > p") if " is right. " in p.text]
            assert right.strong.text == form["data-answer"]
            places += [form["data-answer"]] if "question" in form["class"] else []
        else:
            low, high = float(form["data-low"]), float(form["data-high"])
            assert low <= float(form["data-answer"]) <= high
            assert not [m for m in form.select(".mistake") if low <= float(m["data-value"]) <= high]
        # Only what the question is about is folded, and it is there.
        if int(form["data-covers"]):
            after = form.find_parent(class_="cell").find_next_sibling()
            assert "cell" in after["class"], form["data-name"]
            assert after.select("figure, table, pre"), form["data-name"]
    assert len(set(places)) >= 3, "the place of the right choice changes"


def test_the_site_has_what_asks():
    assert all((ROOT / "_static" / f"questions.{kind}").exists() for kind in ("js", "css"))
    if (SITE / "index.html").exists():
        assert "questions.js" in (SITE / "index.html").read_text(encoding="utf-8")


def shown(function, *args, **kwargs):
    """Return the Markdown that a call shows."""
    with patch("lablib.view.questions.display") as display:
        function(*args, **kwargs)
    return display.call_args.args[0].data


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="judges a mistake right"):
        guess("one", "How many?", 16.0, why="So.", mistakes={15: "no master copy."})
    with pytest.raises(ValueError, match="cannot tell the mistakes at"):
        guess("one", "How many?", 16.0, why="So.", mistakes={4.0: "no gradients.", 4.1: "no moments."})
    with pytest.raises(ValueError, match="has no reason"):
        guess("one", "How many?", 16.0)
    with pytest.raises(ValueError, match="has no choice 'a fifth'"):
        guess("one", "How much?", "a fifth", **WHICH)
    with pytest.raises(ValueError, match="too few choices"):
        question("one", "How much?", "a half", WHICH["choices"])
    with pytest.raises(ValueError, match="a choice without its reason"):
        question("one", "How much?", "a half", WHICH["choices"] | {"a fourth": ""})


def test_an_edited_question_is_another():
    def name(asked, answer, **kwargs):
        return re.search(r'data-name="([^"]+)"', shown(guess, "one", asked, answer, **kwargs))[1]

    names = [
        name("How many?", 16.0, why="So."),
        name("How many of them?", 16.0, why="So."),
        name("How many?", 18.0, why="So."),
        name("How many?", "a half", **WHICH),
        name("How many?", "a third", **WHICH),
    ]
    assert len(set(names)) == 5
    assert name("How many?", 16.0, why="Because.") == names[0]


def test_numbers_are_shown_as_readers_write_them():
    assert 'data-shown="12,300"' in shown(guess, "one", "?", 12345.6, why="So.")
    assert 'data-shown="12,345"' in shown(guess, "one", "?", 12345, why="So.")
    assert 'data-shown="0.125"' in shown(guess, "one", "?", 0.125, why="So.")
