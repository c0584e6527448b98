"""The built site in a browser: whole at 1280 and 390 pixels, in light and dark, with formulas and folds that work."""

import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.built_site import CHAPTERS, LABS, MATHJAX_IS_LOCAL, PAGES, SITE, ids, parsed

pytestmark = pytest.mark.site

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
#: sphinx-thebe writes its script twice into each page; the second declaration is refused and nothing is lost.
KNOWN_ERRORS = ("Identifier 'THEBE_JS_URL' has already been declared",)


# What waits in a page has an end: Playwright gives `evaluate` none, and a test that hangs says nothing.
_MATHJAX_IS_DONE = """Promise.race([
  window.MathJax && MathJax.startup && MathJax.startup.promise, new Promise(go => setTimeout(go, 90_000)),
])"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox cannot start as root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=[*sandbox, "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def context(browser):
    """One reader: what all pages share is loaded once."""
    with browser.new_context(viewport=DESK) as context:
        yield context


class Visit:
    """One page, with what went wrong while it loaded.

    Args:
        context: Playwright's browser context.
        address: Where the site is served.
        page: The page, without its suffix.
        theme: "light" or "dark", as the reader chose it before.
        query: What follows the page in its address.
    """

    def __init__(self, context, address, page, theme="light", query=""):
        self.errors, self.foreign, self.asked, self.address = [], [], [], address
        self.page = context.new_page()
        self.page.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
        self.page.on("pageerror", lambda error: self._note(error.message))
        self.page.on("console", lambda entry: self._note(entry.text) if entry.type == "error" else None)
        self.page.on("response", lambda r: self._note(f"{r.status} {r.url}") if r.status >= 400 else None)
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.on("request", lambda r: None if r.url.startswith((address, "data:")) else self.foreign.append(r.url))
        self.page.goto(f"{address}{page}.html{query}", wait_until="load")
        if MATHJAX_IS_LOCAL:
            self.page.evaluate(_MATHJAX_IS_DONE)

    def _note(self, text):
        if not any(known in text for known in KNOWN_ERRORS):
            self.errors.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.page.close()


@pytest.mark.drawn
@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_well(context, address, page):
    """To load a page takes long, and to lay it out anew: it is loaded once, and each width comes once, for all."""
    with Visit(context, address, page) as visit:
        if MATHJAX_IS_LOCAL:
            formulas_are_drawn(visit)
            assert visit.foreign == []
            assert visit.errors == []
        if page in CHAPTERS:
            visit.page.evaluate(_SHOW_GUESSED)
            a_solution_is_folded_until_it_is_asked_for(visit)
            the_code_of_a_figure_is_folded_until_it_is_asked_for(visit)
        if page in LABS:
            what_was_measured_is_folded_until_it_is_asked_for(visit)
        visit.page.evaluate(_UNFOLD)
        for size in (DESK, PHONE):
            visit.page.set_viewport_size(size)
            it_is_whole(visit, size["width"])
            if page in CHAPTERS:
                figures_stand_on_the_page(visit, size["width"], "light", "dark")
            what_scrolls_says_so(visit, size["width"])
        if page in LABS:
            visit.page.set_viewport_size(DESK)
            a_lab_leads_back_to_its_chapter(visit, page)


def test_formulas_were_looked_at():
    assert any(parsed(page).select(".math") for page in PAGES)
    if not MATHJAX_IS_LOCAL:
        pytest.skip("MathJax comes from its CDN in this build: npm was not at hand")


_TITLE_WITHIN = """width => {
  const box = document.querySelector("article h1").getBoundingClientRect();
  return box.left >= 0 && box.right <= width;
}"""


def it_is_whole(visit, width):
    # What is too wide must scroll in its own box: the page itself never scrolls sideways.
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, f"{width} pixels"
    # The sidebar slides when the width changes; what counts is where the title comes to rest.
    visit.page.wait_for_function(_TITLE_WITHIN, arg=width, timeout=90_000)


#: What is wider than its box and shows no cue; what is cut off for good; what sticks out of the column.
_CUT = """() => {
  const article = document.querySelector("article.bd-article"), edge = article.getBoundingClientRect().right + 1;
  const found = [], name = node => `${node.tagName}.${node.className} ${node.textContent.trim().slice(0, 40)}`;
  const unseen = "mjx-assistive-mml, .visually-hidden, svg, wbr, br";
  const scrolls = node => /auto|scroll/.test(getComputedStyle(node).overflowX);
  const inside = node => {
    for (node = node.parentElement; node && node !== article; node = node.parentElement) if (scrolls(node)) return true;
    return false;
  };
  for (const node of article.querySelectorAll("*")) {
    if (node.closest(unseen) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), more = node.scrollWidth - node.clientWidth - node.scrollLeft > 1;
    if (node.clientWidth && more && style.overflowX !== "visible") {
      const after = getComputedStyle(node, "::after").content;
      const said = after.includes("scrolls") && style.maskImage.includes("gradient") && node.tabIndex === 0;
      if (!scrolls(node)) found.push(`cut off: ${name(node)}`);
      else if (!said || !node.matches(".more-right")) found.push(`no cue: ${name(node)}`);
    }
    if (node.getBoundingClientRect().right > edge && !inside(node)) found.push(`sticks out: ${name(node)}`);
  }
  return found;
}"""
# Boxes are looked at when the page has been laid out, and formulas broken anew for another width.
_SETTLED = f"""async () => {{
  const cut = {_CUT};
  for (const end = Date.now() + 90_000; cut().length && Date.now() < end;) await new Promise(go => setTimeout(go, 100));
  return cut();
}}"""
_UNFOLD = """() => {
  document.querySelectorAll("article details").forEach(fold => { fold.open = true });
  document.querySelectorAll("article .toggle-hidden").forEach(fold => fold.classList.remove("toggle-hidden"));
}"""

#: What is folded until a guess.
_SHOW_GUESSED = 'document.querySelectorAll("details.covered").forEach(fold => { fold.open = true })'

# A cue may change what is measured, be taken away for it and put back, for ever: ten frames in which nothing changes end it.
_FLICKERS = """async () => {
  const later = milliseconds => new Promise(go => setTimeout(go, milliseconds));
  const found = new Set(), watch = new MutationObserver(seen => seen.forEach(change => found.add(
    `${change.target.tagName} ${change.target.textContent.trim().slice(0, 40)}`)));
  watch.observe(document.querySelector("article.bd-article"), { subtree: true, attributeFilter: ["class"] });
  const end = Date.now() + 90_000;
  do {
    found.clear();
    for (let frame = 0; frame < 10; frame++) await Promise.race([new Promise(requestAnimationFrame), later(1000)]);
  } while (found.size && Date.now() < end);
  watch.disconnect();
  return [...found];
}"""


def what_scrolls_says_so(visit, width):
    assert visit.page.evaluate(_SETTLED) == [], f"{width} pixels"
    assert visit.page.evaluate(_FLICKERS) == [], f"{width} pixels"


def formulas_are_drawn(visit):
    formulas = visit.page.locator("article .math")
    assert visit.page.locator("article .math mjx-container").count() >= formulas.count()
    assert visit.page.locator("mjx-merror").count() == 0


_CONTRAST = """figure => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let ground = figure, behind = [0, 0, 0, 0];
  while (ground && behind[3] === 0) {
    const color = parse(getComputedStyle(ground).backgroundColor);
    behind = color.length === 3 ? [...color, 1] : color;
    if (behind[3] === 0) ground = ground.parentElement;
  }
  const ratio = color => {
    const [low, high] = [light(parse(color)), light(behind)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  return {
    width: figure.getBoundingClientRect().width,
    box: ground ? ground.className : "",
    page: light(behind),
    text: ratio(getComputedStyle(figure.querySelector("svg")).color),
    caption: ratio(getComputedStyle(figure.querySelector("figcaption")).color),
  };
}"""


def figures_stand_on_the_page(visit, width, *themes):
    figures = visit.page.locator("figure.house-figure")
    for theme in themes:
        # What the page's own button does; test_the_theme_can_be_switched presses it.
        visit.page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        for seen in figures.evaluate_all(f"figures => figures.map({_CONTRAST})"):
            assert "text_html" not in seen["box"], "the theme put a box behind a figure"
            assert (seen["page"] > 0.5) == (theme == "light")
            # WCAG 2.1, 1.4.3: text needs 4.5:1.
            assert seen["text"] >= 4.5
            assert seen["caption"] >= 4.5
            assert seen["width"] <= width


def a_solution_is_folded_until_it_is_asked_for(visit):
    box = visit.page.locator(".admonition.dropdown").first
    answer = box.locator("> *:not(.admonition-title)").first
    assert not answer.is_visible()
    box.locator(".admonition-title").click()
    answer.wait_for(state="visible", timeout=90_000)


def the_code_of_a_figure_is_folded_until_it_is_asked_for(visit):
    fold = visit.page.locator(".code-fold").first
    assert not fold.locator("pre").is_visible()
    fold.locator("summary").click()
    fold.locator("pre").wait_for(state="visible", timeout=90_000)


def what_was_measured_is_folded_until_it_is_asked_for(visit):
    fold = visit.page.locator("details.measured").first
    output = fold.locator(".output").first
    assert not output.is_visible()
    # On paper nothing can be unfolded.
    for event, shown in (("beforeprint", True), ("afterprint", False)):
        visit.page.evaluate("event => window.dispatchEvent(new Event(event))", event)
        assert visit.page.locator("details.measured").evaluate_all("folds => folds.map(f => f.open)") == [shown] * (
            visit.page.locator("details.measured").count()
        )
    fold.locator("> summary").press("Enter")
    output.wait_for(state="visible", timeout=5000)


def a_lab_leads_back_to_its_chapter(visit, page):
    chapter = page.replace("labs/", "book/")
    visit.page.locator(f"article a[href$='{chapter}.html']").first.click()
    # The chapter's own test loads it to the end.
    visit.page.wait_for_url(f"**/{chapter}.html*", wait_until="commit")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_the_one_the_reader_chose(context, address, theme):
    with Visit(context, address, CHAPTERS[0], theme) as visit:
        assert visit.page.locator("html").get_attribute("data-theme") == theme
        figures_stand_on_the_page(visit, DESK["width"], theme)


def test_the_theme_can_be_switched(context, address):
    with Visit(context, address, PAGES[0]) as visit:
        button = visit.page.locator("button.theme-switch-button:visible").first
        seen = set()
        for _ in range(3):
            seen.add(visit.page.locator("html").get_attribute("data-theme"))
            button.click()
        assert seen == {"light", "dark"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_formula_is_two_clicks_behind_a_figure(context, address, theme):
    with Visit(context, address, "book/05_zero", theme) as visit:
        visit.page.evaluate(_SHOW_GUESSED)
        figure = visit.page.locator("div.cell:has(#figure-2)")
        figure.locator(".code-fold > summary").click()
        figure.locator(".code-fold a[href*='code/lablib/calc/']").first.click()
        visit.page.wait_for_url("**/code/lablib/calc/**", wait_until="load")
        assert visit.page.locator("html").get_attribute("data-theme") == theme
        assert visit.page.locator(".line:has(:target)").is_visible()
        for size in (DESK, PHONE):
            visit.page.set_viewport_size(size)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert visit.errors == []


#: What a reader asks, and where the book answers it. No rule of the search knows these questions.
QUESTIONS = {
    "traffic of ZeRO-3": "book/05_zero.html#traffic-bytes-sent-in-each-stage",
    "bubble of 1F1B": "book/04_pipeline_parallelism.html#f1b-gpipe-s-bubble-with-less-memory",
    "memory under selective recomputation": "book/09_activation_checkpointing.html#selective-recomputation-the-attention-core",
    "crossover of ring and tree": "book/10_communication.html#the-crossover-of-ring-and-tree",
    "what is HSDP": "book/glossary.html#term-HSDP",
    "bytes per parameter of AdamW": "book/01_why_distributed.html#model-states-16-bytes-a-parameter",
    "bus bandwidth": "book/glossary.html#term-busbw",
    "zigzag": "book/glossary.html#term-zigzag-order",
    "capacity factor": "book/glossary.html#term-capacity-factor",
    "resume on fewer GPUs": "book/06_fsdp.html#resume-on-fewer-gpus-or-on-more-an-index-of-rows",
}
#: Made by the build when npm had Pagefind; the search is Sphinx's otherwise.
FINDS_SECTIONS = (SITE / "_static" / "found" / "pagefind.js").exists()


def asked(visit, question):
    """Type a question into the open search; return the links that it shows, without where the site is."""
    visit.page.locator("#pst-search-dialog input").fill(question)
    visit.page.locator(f'.found[data-query="{question}"]').wait_for(state="attached", timeout=90_000)
    links = visit.page.locator(".found li a")
    return [link.removeprefix(visit.address) for link in links.evaluate_all("all => all.map(link => link.href)")]


def test_the_search_finds_sections_and_terms(context, address):
    if not FINDS_SECTIONS:
        pytest.skip("Pagefind did not run in this build: npm was not at hand")
    with Visit(context, address, "book/12_context_parallelism") as visit:
        # Nothing of it is fetched before it is opened, nor what Sphinx's own search reads.
        assert not [url for url in visit.asked if "/found/" in url or "searchindex" in url]
        visit.page.keyboard.press("Control+k")
        found = {question: asked(visit, question) for question in QUESTIONS}
        assert {question: links[0] for question, links in found.items()} == QUESTIONS
        for page, _, anchor in (link.partition(".html") for links in found.values() for link in links):
            assert not anchor or anchor[1:] in ids(page)
        assert asked(visit, "xyzzyx") == []
        # A chapter comes before its lab, which is there too.
        pages = [link.partition("#")[0] for link in asked(visit, "no_sync")]
        assert pages.index("book/02_data_parallelism.html") < pages.index("labs/02_data_parallelism.html")
        # Arrows go down the list and up again.
        links = visit.page.locator(".found li a")
        for key, place in (("ArrowDown", 0), ("ArrowDown", 1), ("ArrowUp", 0)):
            visit.page.keyboard.press(key)
            assert links.nth(place).evaluate("link => link === document.activeElement")
        visit.page.set_viewport_size(PHONE)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        # Enter without a pause after the last letter.
        visit.page.locator("#pst-search-dialog input").fill("crossover of ring and tree")
        visit.page.locator("#pst-search-dialog input").press("Enter")
        visit.page.wait_for_url(f"**/{QUESTIONS['crossover of ring and tree']}", wait_until="load")
        visit.page.wait_for_function("document.querySelector(':target').getBoundingClientRect().top < innerHeight / 2")
        assert visit.errors == []


def test_without_an_index_the_search_finds_pages(browser, address):
    with browser.new_context(viewport=DESK) as context:
        context.route("**/found/**", lambda route: route.abort())
        with Visit(context, address, "index") as visit:
            visit.page.keyboard.press("Control+k")
            visit.page.locator("#pst-search-dialog input").fill("gradients")
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_url("**/search.html?q=gradients", wait_until="load")
            visit.page.locator("#search-results li a").first.wait_for(timeout=90_000)


def _card(visit):
    return visit.page.locator("#card")


def test_a_card_shows_what_a_link_leads_to(context, address):
    with Visit(context, address, "book/05_zero") as visit:
        links = {
            "a[href*='glossary.html#term-reduce-scatter']": "one shard of the reduction",
            "a[href*='references.html#']": "Rajbhandari",
            "a.reference[href='#equation-eq-05-hide']": "",  # the number that the link itself has
        }
        for link, said in links.items():
            place = visit.page.locator(f"article {link}:visible").first
            place.hover()
            _card(visit).wait_for(state="visible")
            assert (said or place.inner_text()) in _card(visit).inner_text()
            assert place.get_attribute("aria-describedby") == "card"
            # It stays while the pointer is on it.
            _card(visit).hover()
            visit.page.wait_for_timeout(500)
            assert _card(visit).is_visible()
            visit.page.keyboard.press("Escape")
            assert not _card(visit).is_visible()
            assert place.get_attribute("aria-describedby") is None
            visit.page.mouse.move(0, 0)
        if MATHJAX_IS_LOCAL:
            assert _card(visit).locator("mjx-container").count() == 1
        # A keyboard opens it too, and on a telephone it stays on the screen.
        visit.page.set_viewport_size(PHONE)
        visit.page.locator("article a[href*='glossary.html#term-']").first.focus()
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.press("Shift+Tab")
        visit.page.mouse.move(1, PHONE["height"] / 2)  # as when the page scrolls under a pointer that rests
        _card(visit).wait_for(state="visible")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert visit.page.evaluate("new Set([...document.querySelectorAll('[id]')].map(n => n.id)).size") == (
            visit.page.locator("[id]").count()
        )
        assert visit.errors == []


def test_a_finger_follows_a_link_and_a_page_that_cannot_be_fetched_has_no_card(browser, address):
    with (
        browser.new_context(viewport=PHONE, has_touch=True) as context,
        Visit(context, address, "book/05_zero") as visit,
    ):
        # Once, and not until `unroute`: on a loaded machine that waited for ever once.
        context.route("**/glossary.html", lambda route: route.abort(), times=1)
        link = visit.page.locator("article a[href*='glossary.html#term-reduce-scatter']").first
        with visit.page.expect_request("**/glossary.html"):
            link.hover()
        visit.page.wait_for_timeout(500)
        assert not _card(visit).is_visible()
        link.tap()
        visit.page.wait_for_url("**/glossary.html#term-reduce-scatter", wait_until="commit")
