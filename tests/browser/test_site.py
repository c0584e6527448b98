"""The built site in a browser: whole at 1280 and 390 pixels, in light and dark, with formulas and folds that work."""

import functools
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.built_site import CHAPTERS, LABS, MATHJAX_IS_LOCAL, PAGES, SITE, parsed

pytestmark = pytest.mark.site

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
#: sphinx-thebe writes its script twice into each page; the second declaration is refused and nothing is lost.
KNOWN_ERRORS = ("Identifier 'THEBE_JS_URL' has already been declared",)


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
        self.errors, self.foreign = [], []
        self.page = context.new_page()
        self.page.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
        self.page.on("pageerror", lambda error: self._note(error.message))
        self.page.on("console", lambda entry: self._note(entry.text) if entry.type == "error" else None)
        self.page.on("response", lambda r: self._note(f"{r.status} {r.url}") if r.status >= 400 else None)
        self.page.on("request", lambda r: None if r.url.startswith((address, "data:")) else self.foreign.append(r.url))
        self.page.goto(f"{address}{page}.html{query}", wait_until="load")
        if MATHJAX_IS_LOCAL:
            self.page.evaluate("window.MathJax && MathJax.startup && MathJax.startup.promise")

    def _note(self, text):
        if not any(known in text for known in KNOWN_ERRORS):
            self.errors.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.page.close()


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
  const found = new Set(), watch = new MutationObserver(seen => seen.forEach(change => found.add(
    `${change.target.tagName} ${change.target.textContent.trim().slice(0, 40)}`)));
  watch.observe(document.querySelector("article.bd-article"), { subtree: true, attributeFilter: ["class"] });
  const end = Date.now() + 90_000;
  do {
    found.clear();
    for (let frame = 0; frame < 10; frame++) await new Promise(requestAnimationFrame);
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


def test_the_search_finds_a_chapter(context, address):
    with Visit(context, address, "search") as visit:
        visit.page.goto(f"{address}search.html?q=gradients", wait_until="load")
        visit.page.locator("#search-results li a").first.wait_for(timeout=90_000)
