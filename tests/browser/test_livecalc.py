"""The live pages in a browser: every control moved by keyboard, numbers equal to Python's, nothing before a touch."""

import contextlib
import itertools
import json
import re
from html import unescape

import pytest
from bs4 import BeautifulSoup

from lablib.live.explorer import PARTS, find_explorer
from tests.browser.test_site import DESK, PHONE, Visit
from tests.browser.test_site import address as address
from tests.browser.test_site import browser as browser
from tests.browser.test_site import context as context
from tests.built_site import MATHJAX_CDN, MATHJAX_IS_LOCAL, SITE, parsed
from tests.test_models import LLAMA_3_8B

pytestmark = pytest.mark.site

#: Page to the explorers on it. The first state is the one of the page.
PAGES = {
    "book/04_pipeline_parallelism": "pipeline",
    "book/05_zero": "zero",
    "book/07_3d_parallelism": "mesh",
    "book/choosing_parallelism": "planner",
    "book/memory_calculator": "training",
    "index": "cluster",
}
#: Copied there by the build when npm had it; the browser asks its CDN otherwise.
PYODIDE_IS_LOCAL = (SITE / "_static" / "livecalc" / "pyodide.mjs").exists()
#: Fetched when Python starts, and not before.
LAZY = ("livecalc_worker", "/livecalc/", "pyodide")
EACH = pytest.mark.parametrize("page", PAGES)


def box_of(page):
    return parsed(page).select_one(f".livecalc[data-name={PAGES[page]}]")


def first_state(explorer, page):
    """Return the state that the page came with, read from its HTML."""
    state = {}
    for control in explorer.controls:
        field = box_of(page).select_one(f"[name={control.name}]")
        if field.name == "select":
            state[control.name] = field.select_one("option[selected]")["value"]
        elif field.name == "textarea":
            state[control.name] = field.text
        else:
            state[control.name] = json.loads(field["data-options"])[int(field["value"])][0]
    return explorer.state(state)


class Live(Visit):
    """A page with an explorer, and every address that was asked for, by the page and by its worker."""

    def __init__(self, context, address, page, query=""):
        self.asked = []
        self.host = address
        self._listen = lambda request: self.asked.append(request.url)
        self._context = context
        context.on("request", self._listen)
        self.explorer = find_explorer(box_of(page)["data-module"])
        self.first = first_state(self.explorer, page)
        super().__init__(context, address, page, query=query)
        self.root = self.page.locator(f".livecalc[data-name={PAGES[page]}]")
        self.root.locator("form").wait_for(state="visible")
        for fold in self.root.locator(".livecalc-more summary").all():
            fold.click()

    def __exit__(self, *_):
        self._context.remove_listener("request", self._listen)
        super().__exit__()

    @property
    def choice(self):
        """Name of a control with a list."""
        return [
            control.name for control in self.explorer.controls if not (control.slider or control.free or control.fold)
        ][-1]

    @property
    def lazy(self):
        """What was fetched for Python."""
        return [url for url in self.asked if any(part in url for part in LAZY)]

    @property
    def abroad(self):
        """What another host was asked for; the formulas of a build without npm are another matter."""
        known = (self.host, "data:", "blob:", *(() if MATHJAX_IS_LOCAL else MATHJAX_CDN))
        return [url for url in self.asked if not url.startswith(known)]

    def field(self, name):
        return self.root.locator(f"[name={name}]")

    def answers(self):
        return int(self.root.get_attribute("data-answers") or 0)

    def press(self, name, key):
        """Press a key on a control and wait for the answer; say how long the reader waited, in milliseconds."""
        before = self.answers()
        self.field(name).press(key)
        self.rank(name)
        self.wait(before)
        return float(self.root.get_attribute("data-milliseconds") or 0)

    def rank(self, *names):
        """Press the button that an answer waits for, if it waits for one and a control is not quick."""
        slow = [control for control in self.explorer.controls if control.name in names and not control.quick]
        if self.explorer.button and slow:
            assert f'press "{self.explorer.button}"' in self.root.locator(".livecalc-note").inner_text()
            assert "stale" in self.root.evaluate("root => Object.keys(root.dataset)")
            self.root.get_by_role("button", name=self.explorer.button).press("Enter")

    def reset(self):
        """Press the button that goes back to the first state."""
        before = self.answers()
        self.root.get_by_role("button", name="Reset").press("Enter")
        self.wait(before)
        self.holds(self.first)

    def wait(self, before):
        # Starting Python takes seconds; on a machine that does other work, many.
        self.page.wait_for_function(
            "([root, before]) => Number(root.dataset.answers) > before && !root.hasAttribute('aria-busy')",
            arg=[self.root.element_handle(), before],
            timeout=90_000,
        )

    def state(self):
        """Return the state that the controls show."""
        places = self.root.evaluate(
            "root => Object.fromEntries([...root.querySelectorAll('[name]')].map(f => [f.name, f.value]))"
        )
        shown = {}
        for control in self.explorer.controls:
            place = places[control.name]
            shown[control.name] = control.options[int(place)][0] if control.slider else place
        return self.explorer.state(shown)

    def holds(self, state):
        """Hold everything that the page shows, and the numbers before rounding, to Python's."""
        answer = self.explorer.answer(state)
        assert json.loads(self.root.get_attribute("data-numbers")) == answer["numbers"], state
        self.shows(answer, state)

    def shows(self, answer, state):
        # The browser writes HTML in its own way: let it read Python's and write it too.
        pairs = self.root.evaluate(
            "(root, answer) => Object.entries(answer).map(([part, html]) => {"
            " const [node, more] = root.querySelectorAll(`[data-part=${part}]`);"
            " const other = node.cloneNode(false); other.innerHTML = html;"
            " return [part, more === undefined, node.innerHTML, other.innerHTML]; })",
            {part: answer[part] for part in PARTS},
        )
        assert [part for part, *_ in pairs] == list(PARTS)
        for part, alone, seen, meant in pairs:
            assert alone, (state, part)
            assert seen == meant, (state, part)


@pytest.fixture
def python():
    if not PYODIDE_IS_LOCAL:
        pytest.skip("Pyodide comes from its CDN in this build: npm was not at hand")


@pytest.mark.drawn
@EACH
def test_an_explorer_stands_there_before_the_first_touch(context, address, page):
    """Loading a page takes most of the time, so it is loaded once for all that is looked at."""
    with Live(context, address, page) as live:
        nothing_is_fetched_before_the_first_touch(live)
        for theme in ("light", "dark"):
            it_fits_a_telephone_and_a_desk(live, theme)
        assert live.lazy == []


@pytest.mark.drawn
@EACH
def test_an_explorer_answers_as_python_does(context, address, page, python):
    """Starting Python takes most of the time, so it is started once for all that is asked."""
    with Live(context, address, page) as live:
        every_control_moved_by_keyboard_shows_pythons_numbers(live)
        the_call_is_shown_on_request_and_follows_the_state(live)
        if page == "book/memory_calculator":
            what_a_control_cannot_take_is_clipped_and_said(live)
        what_has_no_answer_leaves_the_last_one_in_grey(live)
        if page == "index":
            a_question_is_answered_when_it_is_asked(live)
            a_pasted_config_is_counted(live)
            what_is_copied_is_what_is_shown(live)
        if page == "book/04_pipeline_parallelism":
            a_wrong_step_is_marked(live)
        if page == "book/07_3d_parallelism":
            a_cell_of_the_picture_sets_its_control(live)
        if page == "book/choosing_parallelism":
            a_file_is_saved_as_python_writes_it(live)
        query = the_address_holds_the_state(live)
        state = live.state()
        assert live.abroad == []
        assert live.errors == [] or not MATHJAX_IS_LOCAL
    with Live(context, address, page, f"?{query}&{live.explorer.name}.{live.choice}=abacus") as live:
        a_link_shows_its_state(live, state)


def nothing_is_fetched_before_the_first_touch(live):
    live.root.scroll_into_view_if_needed()
    for control in live.explorer.controls:
        live.field(control.name).focus()
        live.field(control.name).press("Tab")
    live.root.hover()
    for cell in live.root.locator("[data-set]").all()[:2]:
        cell.hover()
    live.page.wait_for_load_state("networkidle")
    assert live.lazy == []
    assert live.abroad == []
    live.shows(live.explorer.answer(live.first), live.first)


def every_control_moved_by_keyboard_shows_pythons_numbers(live):
    waited = []
    # Where answers take seconds every third of them is moved.
    for control in live.explorer.controls[:: 3 if live.explorer.button else 1]:
        if control.free:
            continue
        values = [value for value, _ in control.options]
        first = values.index(live.first[control.name])
        # A step down, and up again beyond the first: tests/test_explorers.py computes every state.
        # A list goes down with Arrow Up.
        fewer, more = ("ArrowLeft", "ArrowRight") if control.slider else ("ArrowUp", "ArrowDown")
        # Where answers take seconds it is one step.
        down, up = min(first, 1), min(len(values) - 1 - first, 0 if live.explorer.button and first else 1)
        places = [first - step for step in range(1, down + 1)] + [
            first - down + step for step in range(1, down + up + 1)
        ]
        for key, place in zip([fewer] * down + [more] * (down + up), places, strict=True):
            waited.append(live.press(control.name, key))
            asked = live.first | {control.name: values[place]}
            live.holds(asked)
            assert live.state() == live.explorer.clip(asked)[0]
        if live.page.url.partition("?")[2]:
            live.reset()
        assert live.state() == live.first
    print(f"first answer {waited[0]:.0f} ms, later {sorted(waited[1:])[len(waited) // 2]:.0f} ms (median)")


def the_call_is_shown_on_request_and_follows_the_state(live):
    call = live.root.locator("[data-part=call]")
    assert not call.is_visible()
    live.root.locator(".livecalc-call summary").press("Enter")
    assert call.is_visible()
    live.press(live.explorer.controls[0].name, "ArrowDown")
    assert call.is_visible()
    assert call.inner_text() == unescape(live.explorer.answer(live.state())["call"])
    assert str(live.state()[live.explorer.controls[0].name]) in call.inner_text()
    live.reset()


def what_a_control_cannot_take_is_clipped_and_said(live):
    clipped = live.root.locator("[data-part=clipped]")
    assert not clipped.is_visible()
    for model, most in (("gpt2", 1024), ("gpt3-175b", 2048)):
        before = live.answers()
        live.field("model").select_option(model)
        live.wait(before)
        assert clipped.inner_text() == f"tokens in a sequence: {most:,}, the most that {model} has positions for."
        assert live.state()["seq"] == most
        live.holds(live.first | {"model": model})
        assert "seq" not in live.page.url.partition("#")[0]
    # What was asked for comes back with a model that can take it.
    before = live.answers()
    live.field("model").select_option("llama-3-70b")
    live.wait(before)
    assert live.state() == live.first | {"model": "llama-3-70b"}
    assert not clipped.is_visible()
    live.reset()


def what_has_no_answer_leaves_the_last_one_in_grey(live):
    select = live.field(live.choice)
    select.evaluate("field => field.append(new Option('abacus', 'abacus'))")
    before = live.answers()
    select.select_option("abacus")
    live.rank(live.choice)
    live.wait(before)
    assert f"unknown {live.choice} 'abacus'" in live.root.locator(".livecalc-note").inner_text()
    live.shows(live.explorer.answer(live.first), live.first)
    for part in ("figure", "[data-part=table]"):
        assert live.root.locator(part).evaluate("node => getComputedStyle(node).filter") == "grayscale(1)"
    select.evaluate("field => field.lastChild.remove()")
    live.reset()
    assert live.root.locator("figure").evaluate("node => getComputedStyle(node).filter") == "none"


def a_question_is_answered_when_it_is_asked(live):
    button = live.root.locator("[data-part=question]")
    assert not button.is_visible()
    before = live.answers()
    live.field("recompute").select_option("none")
    live.wait(before)
    assert button.inner_text() == "What would make it fit?"
    button.press("Enter")
    live.page.wait_for_function("root => root.dataset.replies", arg=live.root.element_handle(), timeout=90_000)
    rows = [row.inner_text() for row in live.root.locator("[data-part=reply] td").all()]
    meant = BeautifulSoup(live.explorer.reply(**live.state()), "html.parser").select("td")
    assert rows == [cell.text for cell in meant] != []
    live.reset()
    # Another answer takes its place.
    assert live.root.locator("[data-part=reply]").inner_text() == ""


def a_pasted_config_is_counted(live):
    before = live.answers()
    live.field("config").fill(json.dumps(LLAMA_3_8B))
    live.wait(before)
    live.holds(live.first | {"config": json.dumps(LLAMA_3_8B)})
    assert "cluster.config=" in live.page.url
    before = live.answers()
    live.field("config").fill("{")
    live.wait(before)
    assert "the pasted config.json is not JSON" in live.root.locator(".livecalc-note").inner_text()
    # An address that no program would pass on whole is not made.
    address, before = live.page.url, live.answers()
    live.field("config").fill(json.dumps(LLAMA_3_8B | {"more": "x" * 6000}))
    live.wait(before)
    assert live.page.url == address
    assert "too long" in live.root.locator(".livecalc-unknown").inner_text()
    live.reset()


def a_wrong_step_is_marked(live):
    for own in ("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1", "0F0 0B0 0F1 0B1\n1F0 1B0 1B1 1F1"):
        before = live.answers()
        live.field("own").fill(own)
        live.wait(before)
        live.holds(live.first | {"own": own})
    assert "1B1 needs 1F1" in live.root.locator("figcaption").inner_text()
    assert live.root.locator("svg rect[fill=none]").count() == 1
    live.reset()


def a_cell_of_the_picture_sets_its_control(live):
    def then(act, rank):
        before = live.answers()
        act()
        live.wait(before)
        live.holds(live.first | {"rank": rank})

    def cell(rank):
        return live.root.locator(f"[data-set='rank={rank}']")

    def kept():
        return re.findall(r"mesh\.rank=(\d+)", live.page.url)

    # The pointer shows a rank while it is there, and comes back to the one before.
    then(cell(0).hover, 0)
    then(cell(12).hover, 12)
    then(live.root.locator("figcaption").hover, live.first["rank"])
    assert kept() == []
    # A click keeps it, and the keyboard goes on from there, wherever the pointer rests.
    then(cell(9).hover, 9)
    cell(9).click()
    assert kept() == ["9"]
    for key, rank in (("ArrowRight", 10), ("ArrowDown", 18), ("ArrowLeft", 17), ("ArrowUp", 9), ("ArrowUp", 1)):
        then(lambda key=key: live.page.keyboard.press(key), rank)
        assert live.page.evaluate("document.activeElement.dataset.set") == f"rank={rank}"
        assert cell(rank).evaluate("node => node.matches(':focus-visible')")
        assert kept() == [str(rank)]
    live.page.keyboard.press("ArrowUp")  # there is none above
    assert cell(1).get_attribute("aria-checked") == "true"
    assert live.root.get_by_role("radio", name="rank 17; node 2; ").count() == 1
    live.root.locator("figcaption").hover()
    live.page.wait_for_timeout(100)
    assert live.state() == live.first | {"rank": 1}
    live.reset()


def a_file_is_saved_as_python_writes_it(live):
    live.press("which", "ArrowRight")
    links = live.root.locator("[data-part=files] a")
    meant = live.explorer.compute(**live.state()).files
    assert links.count() == len(meant) > 0
    for link in links.all():
        with live.page.expect_download() as saving:
            link.press("Enter")
        name = saving.value.suggested_filename
        assert link.inner_text() == f"Save {name}"
        assert saving.value.path().read_text(encoding="utf-8") == meant.pop(name)
    live.reset()


def what_is_copied_is_what_is_shown(live):
    live.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name, words in (("address", live.page.url), ("command", live.root.locator("[data-part=command]").inner_text())):
        live.root.locator(f"[data-copy={name}]").click()
        live.page.wait_for_function("words => navigator.clipboard.readText().then(text => text === words)", arg=words)


def the_address_holds_the_state(live):
    """Move two controls and return what the page's address says of them."""
    one, other = live.explorer.controls[0], live.explorer.controls[2]
    for control in (one, other):
        live.press(control.name, "ArrowUp" if control.first != control.options[0][0] else "ArrowDown")
    state, query = live.state(), live.page.url.partition("?")[2]
    assert all(f"{live.explorer.name}.{control.name}={state[control.name]}" in query for control in (one, other))
    assert query.count("=") == 2
    assert query.endswith(f"#livecalc-{live.explorer.name}")
    return query.partition("#")[0]


def a_link_shows_its_state(live, state):
    # Who follows a link to a state asks for it: it is computed, and the window shows the explorer.
    assert live.state() == state != live.first
    live.wait(0)
    live.holds(state)
    live.page.wait_for_function(_IN_VIEW, arg=live.root.element_handle(), timeout=90_000)
    # The link also asks for an abacus, and its address is as it was shared.
    assert f"asks for {live.choice}=abacus, which is not one of " in live.root.locator(".livecalc-unknown").inner_text()
    assert f"{live.choice}=abacus" in live.page.url
    live.reset()
    assert not live.root.locator(".livecalc-unknown").is_visible()
    assert "abacus" not in live.page.url
    assert f"{live.explorer.name}.{live.explorer.controls[0].name}" not in live.page.url


def it_fits_a_telephone_and_a_desk(live, theme):
    # The sidebar slides when the width changes: what counts is where the explorer comes to rest.
    live.page.add_style_tag(content="* { transition: none !important }")
    # What the page's own button does; test_site.test_the_theme_can_be_switched presses it.
    live.page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    for size in (PHONE, DESK):
        live.page.set_viewport_size(size)
        live.page.wait_for_function(_WITHIN, arg=[live.root.element_handle(), size["width"]], timeout=90_000)
        assert live.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        boxes = [live.field(control.name).bounding_box() for control in live.explorer.controls]
        for place in boxes:
            assert place["x"] >= 0
            assert place["x"] + place["width"] <= size["width"]
            # WCAG 2.2, 2.5.8: a target of 24 by 24 at least.
            assert min(place["width"], place["height"]) >= 24
        for one, other in itertools.pairwise(boxes):
            apart = one["y"] + one["height"] <= other["y"] or one["x"] + one["width"] <= other["x"]
            assert apart
    for part in ("svg text", "figcaption", "label", "select", "td", "summary", "button"):
        seen = live.root.locator(part).first.evaluate(_CONTRAST)
        assert part != "figcaption" or (seen["ground"] > 0.5) == (theme == "light")
        # WCAG 2.1, 1.4.3: text needs 4.5:1.
        assert seen["contrast"] >= 4.5, part


_WITHIN = """([root, width]) => {
  const box = root.getBoundingClientRect();
  return box.left >= 0 && box.right <= width;
}"""
_IN_VIEW = """root => {
  const box = root.getBoundingClientRect();
  return box.top > -50 && box.top < innerHeight / 2;
}"""
_CONTRAST = """node => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const own = getComputedStyle(node), ink = node.namespaceURI.endsWith("svg") ? own.fill : own.color;
  let ground = node, behind = [0, 0, 0, 0];
  while (ground && behind[3] === 0) {
    const color = parse(getComputedStyle(ground).backgroundColor);
    behind = color.length === 3 ? [...color, 1] : color;
    ground = ground.parentElement;
  }
  const [low, high] = [light(parse(ink)), light(behind)].sort((a, b) => a - b);
  return { contrast: (high + 0.05) / (low + 0.05), ground: light(behind) };
}"""


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("model=GPT2", "model=GPT2, which is not one of gpt2, "),
        ("seq=-1", "seq=-1, which is not one of 512, 1024, "),
        ("micro_batch=NaN", "micro_batch=NaN, which is not one of 1, 2, "),
        ("modle=gpt2", "modle, which is not one of model, recipe, "),
        ("__proto__=1", "__proto__, which is not one of model, "),
        ("model=<img src=x onerror=alert(1)>", "model=<img src=x onerror=alert(1)>, which is not one of gpt2, "),
    ],
)
def test_what_the_address_asks_for_and_nobody_knows_is_named(context, address, query, said):
    with Live(context, address, "book/memory_calculator", f"?training.{query}") as live:
        note = live.root.locator(".livecalc-unknown")
        assert f"The address asks for {said}" in note.inner_text()
        shown = ", ".join(f"{name}={value}" for name, value in live.first.items())
        assert note.inner_text().endswith(f"Shown: {shown}.")
        assert note.locator("img").count() == 0
        # The page came with this answer: nothing is fetched for it.
        live.shows(live.explorer.answer(live.first), live.first)
        assert live.lazy == []
        assert live.errors == [] or not MATHJAX_IS_LOCAL


@pytest.mark.drawn
@EACH
def test_without_javascript_the_first_state_stands_there(browser, address, page):
    with browser.new_context(java_script_enabled=False) as plain, contextlib.closing(plain.new_page()) as sheet:
        sheet.goto(f"{address}{page}.html", wait_until="load")
        root = sheet.locator(f".livecalc[data-name={PAGES[page]}]")
        assert not root.locator("form").is_visible()
        assert root.locator("svg").is_visible()
        assert root.locator("table").first.is_visible()
        assert "JavaScript" in root.locator(".livecalc-note").inner_text()
        explorer = find_explorer(box_of(page)["data-module"])
        caption = explorer.answer(first_state(explorer, page))["caption"]
        assert root.locator("figcaption").inner_text() == unescape(caption)


def test_a_failed_start_is_said_and_the_next_touch_tries_again(browser, address, python):
    with browser.new_context() as offline:
        away = [503]  # the route stays until the context ends: to take it back may wait for ever on a loaded machine
        offline.route("**/lablib.zip*", lambda route: route.fulfill(status=away[0]) if away else route.continue_())
        with Live(offline, address, "book/05_zero") as live:
            live.field("stage").press("ArrowUp")
            live.root.get_by_text("Python did not start").wait_for(timeout=90_000)
            live.shows(live.explorer.answer(live.first), live.first)
            away.clear()
            live.press("stage", "ArrowUp")
            live.holds(live.state())


#: Pages with a mechanism that moves.
MOVING = (
    "book/02_data_parallelism",
    "book/04_pipeline_parallelism",
    "book/06_fsdp",
    "book/12_context_parallelism",
    "book/13_expert_parallelism",
)


def _places(figure):
    """Return where each piece is, or that it is not there."""
    return figure.evaluate(
        "root => [...root.querySelectorAll('[data-at]')].map(n => n.style.opacity === '0' ? '' : n.style.transform)"
    )


@pytest.mark.drawn
@pytest.mark.parametrize("page", MOVING)
def test_a_mechanism_is_stepped_through_by_keys_and_plays(context, address, page):
    with Visit(context, address, page) as visit:
        figure = visit.page.locator("step-through").first
        for opens in visit.page.locator("summary", has_text="Show without guessing").all():
            opens.click()
        slider, words = figure.get_by_role("slider"), figure.locator(".steps-words")
        sentences = [item.text_content() for item in figure.locator(".steps-all li").all()]
        first = int(slider.input_value())
        assert words.inner_text() == sentences[first]
        slider.press("Home")
        assert words.inner_text() == sentences[0]
        assert slider.get_attribute("aria-valuetext") == f"step 1 of {len(sentences)}"
        start = _places(figure)
        slider.press("ArrowRight")
        assert words.inner_text() == sentences[1]
        assert _places(figure) != start
        figure.get_by_role("button", name="step back").press("Enter")
        assert words.inner_text() == sentences[0]
        assert _places(figure) == start
        # From the last step it plays from the start, until it is stopped or through.
        slider.press("End")
        assert words.inner_text() == sentences[-1]
        figure.get_by_role("button", name="play").press("Enter")
        assert words.inner_text() == sentences[0]
        visit.page.wait_for_function("words => words.dataset.step.startsWith('2 ')", arg=words.element_handle())
        figure.get_by_role("button", name="pause").press("Enter")
        assert figure.get_by_role("button", name="play").is_visible()
        assert words.get_attribute("aria-live") == "polite"
        assert visit.errors == [] or not MATHJAX_IS_LOCAL


def test_who_asks_for_less_motion_steps_by_hand_and_without_a_script_all_steps_are_words(browser, address):
    with browser.new_context(reduced_motion="reduce") as calm, Visit(calm, address, MOVING[0]) as visit:
        figure = visit.page.locator("step-through").first
        figure.get_by_role("slider").press("Home")
        figure.get_by_role("button", name="play").press("Enter")
        assert figure.get_by_role("button", name="play").is_visible()
        assert figure.locator(".steps-words").get_attribute("data-step").startswith("2 ")
        assert figure.locator("[data-at]").first.evaluate("n => getComputedStyle(n).transitionDuration") == "0s"
    with browser.new_context(java_script_enabled=False) as plain, contextlib.closing(plain.new_page()) as sheet:
        sheet.goto(f"{address}{MOVING[0]}.html", wait_until="load")
        figure = sheet.locator("step-through").first
        assert not figure.locator(".steps-controls").is_visible()
        figure.locator("summary").click()
        assert figure.locator("li").last.is_visible()
