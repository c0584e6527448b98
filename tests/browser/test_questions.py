"""Guesses and questions in a browser: judged, remembered, forgotten, marked on the ladder; by keyboard, without a script."""

import json

import pytest

from tests.browser.test_site import DESK, PHONE, Visit
from tests.browser.test_site import address as address
from tests.browser.test_site import browser as browser
from tests.built_site import ROOT, parsed
from tests.test_questions import every_chapter

FIRST = "book/01_why_distributed"
#: Sixteen GB, right within a tenth; twelve is a known mistake.
SIXTEEN = {"answer": "16", "low": "14.4", "high": "17.6", "shown": "16", "unit": "GB", "same": "0.02"}


@pytest.fixture
def context(browser):
    """A reader who has answered nothing yet."""
    with browser.new_context(viewport=DESK) as context:
        yield context


@pytest.fixture(scope="module")
def judge(browser):
    page = browser.new_page()
    page.add_script_tag(path=ROOT / "_static" / "questions.js")
    yield lambda text, known=SIXTEEN, mistakes=(12,): page.evaluate(
        "([text, known, mistakes]) => questions.judge(text, known, mistakes)", [text, known, list(mistakes)]
    )
    page.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16", "Right. You said 16 GB, it is 16 GB."),
        ("16 GB", "Right. You said 16 GB, it is 16 GB."),
        ("15,2", "Right. You said 15,2 GB, it is 16 GB: 5 percent too low."),
        ("12", "You said 12 GB, it is 16 GB: 25 percent too low."),
        ("1.6e3", "You said 1.6e3 GB, it is 16 GB: too high by a factor of 100."),
        ("0,5", "You said 0,5 GB, it is 16 GB: too low by a factor of 32."),
        ("0", "You said 0 GB, it is 16 GB."),
        ("-16", "You said -16 GB, it is 16 GB."),
        ("sixteen", "Type a number, in GB."),
        ("1.6.x", "Type a number, in GB."),
        ("", "Type a number, in GB."),
    ],
)
def test_a_number_is_judged_and_its_error_said(judge, text, said):
    judged = judge(text)
    assert judged["said"] == said
    assert judged.get("right") is (None if "Type" in said else said.startswith("Right"))
    assert judged.get("mistake", -1) == (0 if text == "12" else -1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1,234.5", 1234.5), ("1.234,5", 1234.5), ("1,234,567", 1234567), ("1 234", 1234), ("12'500", 12500),
     ("1,234", 1234), ("1.234", 1234), ("1.234", 1.234), ("0,125", 0.125), (".5", 0.5), ("~2e9", 2e9)],
)  # fmt: skip
def test_a_number_is_read_as_it_was_meant(judge, text, answer):
    known = {"answer": answer, "low": answer, "high": answer, "shown": str(answer), "unit": "", "same": 0.02}
    assert judge(text, known)["right"]
    assert not judge(text, known | dict.fromkeys(("answer", "low", "high"), 3 * answer))["right"]


def test_percent_is_typed_with_its_sign(judge):
    known = {"answer": "20", "low": "19", "high": "21", "shown": "20", "unit": "%", "same": "0.02"}
    assert judge("20.5%", known)["right"]
    assert judge("20 %", known)["right"]


def forms(page, kind):
    return parsed(page).select(f"form.asked.{kind}")


def answer(visit, form, right=True):
    """Answer by keyboard, rightly or with a known mistake, and return what is said."""
    here = visit.page.locator(f"form[data-name='{form['data-name']}']")
    if radios := form.select("[type=radio]"):
        letters = [radio["value"] for radio in radios if (radio["value"] == form["data-answer"]) is right]
        here.locator(f"[value={letters[0]}]").press("Space")
        here.locator("button").press("Enter")
    else:
        number = form["data-answer"] if right else form.select_one(".mistake")["data-value"]
        here.locator("[type=text]").fill(number)
        here.locator("[type=text]").press("Enter")
    assert visit.page.evaluate("document.activeElement.className") == "result"
    assert here.get_attribute("data-said") == ("right" if right else "wrong")
    return here.locator(".result").inner_text()


def stored(visit, rung):
    return json.loads(visit.page.evaluate(f"localStorage.getItem('rung-by-rung:{rung}')"))


@pytest.mark.drawn
@pytest.mark.site
@every_chapter
def test_every_answer_is_judged_and_every_mistake_has_its_sentence(context, address, page):
    with Visit(context, address, page) as visit:
        for form in [*forms(page, "guess"), *forms(page, "question")]:
            wrong = bool(form.select(".mistake, [type=radio]")) and form in forms(page, "guess")
            said = answer(visit, form, right=not wrong)
            for mistake in form.select(".mistake")[:1]:
                known = visit.page.locator(f"form[data-name='{form['data-name']}'] .mistake").first
                assert said.endswith(known.inner_text()), mistake
        assert visit.page.locator(".questions-end").inner_text().startswith("Passed: 5 of 5 right.")
        assert visit.page.locator("details.covered").count() == 0
        assert visit.errors == []


@pytest.mark.site
def test_a_guess_unfolds_its_figure_and_is_remembered_until_it_is_edited(context, address):
    form = next(form for form in forms(FIRST, "guess") if form.select(".mistake") and form.select("[type=text]"))
    covered = f".cell:has(form[data-name='{form['data-name']}']) + details.covered"
    with Visit(context, address, FIRST) as visit:
        assert not visit.page.locator(f"{covered} > .cell").is_visible()
        here = visit.page.locator(f"form[data-name='{form['data-name']}']")
        here.locator("[type=text]").fill('"')
        here.locator("[type=text]").press("Enter")
        assert here.locator(".result").inner_text().startswith("Type a number")
        said = answer(visit, form, right=False)
        assert visit.page.locator(covered).count() == 0
        visit.page.reload()
        assert here.locator(".result").inner_text() == said
        assert not here.locator("button").is_visible()
        # The same question with another text has another name.
        marks = stored(visit, "01")
        marks["answers"] = {f"other-{name}": value for name, value in marks["answers"].items()}
        visit.page.evaluate("marks => localStorage.setItem('rung-by-rung:01', JSON.stringify(marks))", marks)
        visit.page.reload()
        assert here.locator("button").is_visible()
        assert stored(visit, "01")["guessed"] == [0, len(forms(FIRST, "guess"))]


@pytest.mark.site
def test_who_does_not_guess_reads_on_and_links_lead_into_what_is_folded(context, address):
    with Visit(context, address, FIRST) as visit:
        folds = visit.page.locator("details.covered")
        figure = folds.locator("figure[id]").first
        anchor = figure.get_attribute("id")
        # On paper everything stands there, and afterwards it is folded again.
        count = folds.count()
        for event, shown in (("beforeprint", True), ("afterprint", False)):
            visit.page.evaluate("event => window.dispatchEvent(new Event(event))", event)
            assert folds.evaluate_all("folds => folds.map(fold => fold.open)") == [shown] * count
        visit.page.evaluate(f"location.hash = '{anchor}'")
        figure.wait_for(state="visible", timeout=90_000)
        folds.last.locator("> summary").press("Enter")
        folds.last.locator("> .cell").first.wait_for(state="visible")
        # To see the answer is to see the figure.
        fold = visit.page.locator("form.guess:not([data-said]) .answer:not([open])").first
        fold.locator("summary").press("Enter")
        assert folds.count() == count - 1
        assert visit.page.evaluate("localStorage.getItem('rung-by-rung:01')") is None
    with Visit(context, address, FIRST, query=f"#{anchor}") as visit:
        visit.page.locator(f"#{anchor}").wait_for(state="visible", timeout=90_000)


@pytest.mark.site
def test_the_ladder_shows_what_is_read_guessed_and_passed_until_it_is_forgotten(context, address):
    guesses, questions = forms(FIRST, "guess"), forms(FIRST, "question")
    with Visit(context, address, "index") as visit:
        assert visit.page.locator(".rung-mark:not(:empty)").count() == 0
    with Visit(context, address, FIRST) as visit:
        answer(visit, guesses[0])
        for form, right in zip(questions, (True, False, True, False, True), strict=True):
            answer(visit, form, right)
        end = visit.page.locator(".questions-end")
        assert end.inner_text().startswith("Not passed: 3 of 5 right.")
        end.locator("button").press("Enter")
        visit.page.wait_for_function("!document.querySelector('form.question[data-said]')")
        for form in questions:
            answer(visit, form, form is not questions[0])
        assert end.inner_text().startswith("Passed: 4 of 5 right.")
        visit.page.keyboard.press("End")
        visit.page.wait_for_function("JSON.parse(localStorage.getItem('rung-by-rung:01')).read")
    with Visit(context, address, "index") as visit:
        mark = visit.page.locator("#the-ladder tr", has=visit.page.locator("a[href*='01_why']")).locator(".rung-mark")
        assert mark.inner_text() == f"read · guessed 1 of {len(guesses)} · passed, 4 of 5 questions"
        visit.page.set_viewport_size(PHONE)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        visit.page.get_by_role("button", name="Forget my marks").press("Enter")
        assert visit.page.locator(".rung-mark:not(:empty)").count() == 0
        assert visit.page.evaluate("Object.keys(localStorage).filter(key => key.startsWith('rung-by'))") == []


@pytest.mark.site
def test_without_a_script_a_question_has_its_answer_in_a_fold(browser, address):
    with browser.new_context(viewport=DESK, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}{FIRST}.html", wait_until="load")
        form = page.locator("form.guess").first
        assert form.is_visible()
        assert not form.locator("button").is_visible()
        form.locator("summary").click()
        form.locator(".answer p").first.wait_for(state="visible")
        assert page.locator("figure.house-figure").first.is_visible()
