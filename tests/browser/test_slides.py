"""Each chapter as slides: whole on 1280 x 720, legible, moved by keys and buttons; and a chapter on paper, by its text."""

import re
import unicodedata
import zlib

import pytest

from tests.browser.test_site import Visit
from tests.browser.test_site import address as address
from tests.browser.test_site import browser as browser
from tests.built_site import CHAPTERS, MATHJAX_IS_LOCAL, SITE, parsed
from tests.scripts import load

pytestmark = pytest.mark.site

SCREEN = {"width": 1280, "height": 720}
EXPLORED = next(page for page in CHAPTERS if "05_" in page)  # its explorer has a choice
#: What is cut off, scrolls or stands in the room of the buttons; what is small for a reader in the last row.
_POOR = """() => {
  const article = document.querySelector("article.bd-article"), found = [];
  const LARGE = ":is(figure, tr, pre, .math, .slides-lines).on, .on > .highlight > pre";
  const unseen = node => node.matches("mjx-assistive-mml, .visually-hidden, svg *") || !node.checkVisibility();
  const rule = { acceptNode: node => unseen(node) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT };
  const walk = document.createTreeWalker(article, NodeFilter.SHOW_ELEMENT, rule);
  for (let node; (node = walk.nextNode()); ) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node), size = parseFloat(style.fontSize);
    const name = `${node.tagName}.${node.className}`;
    if (box.left < 0 || box.right > 1280 || box.top < 0 || box.bottom > 661) found.push(`sticks out: ${name}`);
    const more = node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 1;
    if (node.clientWidth && more && /auto|scroll|hidden/.test(style.overflow)) found.push(`scrolls: ${name}`);
    // A large figure, table, listing or formula may make its slide smaller, and an explorer has many words.
    const least = node.closest("table, pre, .livecalc") ? 17 : article.querySelector(LARGE) ? 22 : 28;
    if (node.matches("p, li, td, pre, figcaption, label") && size < least) found.push(`${size} px: ${name}`);
  }
  return found;
}"""
#: Every slide from the first, in each step of its figure: what is poor, by its number.
#: And which figures, takeaways and explorers were on none.
_WALK = f"""() => {{
  const poor = {_POOR}, found = {{}}, what = "article :is(figure:not(.livecalc-figure), .tip, .livecalc)";
  const [, slides] = document.querySelector(".slides-bar > span").textContent.split(" / ").map(Number);
  const lost = new Set(document.querySelectorAll(what));
  for (let number = 1; number <= slides; number++) {{
    const moving = [...document.querySelectorAll("step-through")].find(node => node.checkVisibility());
    const steps = moving ? moving.sentences.length : 1;
    for (let step = 0; step < steps; step++) {{
      moving?.go(step - moving.step);
      if (poor().length) found[number] = poor().slice(0, 3);
    }}
    for (const node of lost) if (node.checkVisibility()) lost.delete(node);
    document.dispatchEvent(new KeyboardEvent("keydown", {{ key: "ArrowRight", bubbles: true }}));
  }}
  return [slides, found, [...lost].map(node => node.textContent.slice(0, 60))];
}}"""


@pytest.fixture(scope="module")
def context(browser):
    with browser.new_context(viewport=SCREEN) as context:
        yield context


class Show(Visit):
    """A page as slides, from the one that its address names."""

    def __init__(self, context, address, page, theme="light", slide=1):
        super().__init__(context, address, page, theme, query=f"?slide={slide}")
        self.page.wait_for_selector(".slides-bar > span:not(:empty)", timeout=90_000)

    @property
    def at(self):
        """The slide's number, and how many there are."""
        return tuple(int(n) for n in self.page.locator(".slides-bar > span").inner_text().split(" / "))

    def press(self, key):
        self.page.keyboard.press(key)
        return self.at[0]


@pytest.mark.drawn
@pytest.mark.parametrize("page", CHAPTERS)
def test_nothing_sticks_out_of_a_slide(context, address, page):
    with Show(context, address, page) as show:
        slides, poor, lost = show.page.evaluate(_WALK)
        assert slides > 20
        assert poor == {}
        assert lost == []
        assert show.at == (slides, slides)
        assert show.errors == [] or not MATHJAX_IS_LOCAL


def test_slides_are_moved_by_keys_and_buttons_and_left(context, address):
    with Visit(context, address, EXPLORED) as visit:
        text = "document.querySelector('article').innerText.replace(/\\s/g, '')"  # formulas may break anew
        before = visit.page.evaluate(text)
        assert not [r for r in visit.page.evaluate("performance.getEntries().map(e => e.name)") if "slides." in r]
        visit.page.locator(".btn-slides-button").click()
        visit.page.wait_for_selector(".slides-bar > span:not(:empty)", timeout=90_000)
        show = visit
        show.__class__ = Show
        slides = show.at[1]
        for key, number in {"ArrowRight": 2, " ": 3, "PageDown": 4, "ArrowLeft": 3, "PageUp": 2, "End": slides}.items():
            assert show.press(key) == number, key
            assert f"slide={number}" in show.page.url
        assert show.press("ArrowRight") == slides
        assert show.press("Home") == 1
        show.page.get_by_role("button", name="Next").click()
        assert show.press("Shift+Tab") == show.at[0] == 2
        said = show.page.locator(".slides-bar [role=status]").inner_text()
        assert said == f"{show.page.locator('article :is(h1, h2, h3):visible').inner_text()}, 2 / {slides}"
        # Nothing behind the slide can be reached.
        assert show.page.evaluate(
            "[...document.querySelectorAll('a, button')].filter(e => e.checkVisibility() && "
            "!e.closest('article, .slides-bar')).length"
        ) == 0  # fmt: skip
        show.press("n")
        assert show.page.locator(".slides-notes").is_visible()
        show.page.keyboard.press("Escape")
        assert "slide" not in show.page.url
        assert show.page.evaluate("document.activeElement.className").count("slides-button")
        assert show.page.evaluate(text) == before


def test_the_notes_have_what_a_slide_leaves_out(context, address):
    with Show(context, address, CHAPTERS[0]) as show:
        text = show.page.evaluate(
            "[...document.querySelectorAll('article p > .slides-rest')].map(e => e.textContent.trim())"
        )
        noted = []
        show.press("n")
        for _ in range(show.at[1]):
            noted.append(show.page.locator(".slides-notes").text_content())
            assert show.page.locator(".slides-notes [id]").count() == 0
            show.press("ArrowRight")
        assert len(text) > 20
        assert [t for t in text if t not in "".join(noted)] == []


def test_an_explorer_answers_on_a_slide(context, address):
    with Show(context, address, EXPLORED) as show:
        live = show.page.locator(".livecalc").first
        number = next(n for n in range(2, show.at[1] + 1) if show.press("ArrowRight") == n and live.is_visible())
        show.page.locator(".livecalc select").first.press("ArrowDown")
        assert show.at[0] == number
        show.page.wait_for_function("document.querySelector('.livecalc').dataset.answers > 0", timeout=90_000)
        assert show.page.evaluate(_POOR) == []


def test_a_page_on_paper_is_light_and_open_and_has_no_buttons(context, address):
    with Visit(context, address, EXPLORED, theme="dark") as visit:
        visit.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        visit.page.emulate_media(media="print")
        assert visit.page.locator("html").get_attribute("data-theme") == "light"
        assert visit.page.locator(".livecalc [data-part=call]").first.is_visible()
        for unwanted in ("button", "form", ".bd-sidebar-primary", ".headerlink", ".code-fold", ".livecalc-controls"):
            shown = visit.page.locator(unwanted).evaluate_all("all => all.filter(e => e.checkVisibility()).length")
            assert shown == 0, unwanted
        visit.page.emulate_media(media="screen")
        visit.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert visit.page.locator("html").get_attribute("data-theme") == "dark"
        assert not visit.page.locator(".livecalc [data-part=call]").first.is_visible()


def test_a_chapter_is_printed(tmp_path, browser):
    page = CHAPTERS[4]
    print_book, pdf = load("tools/print_book.py"), tmp_path / "chapter.pdf"
    print_book.print_chapters(browser, SITE, pdf, ["index", page])
    text, letters = pdf_text(pdf), re.compile(r"[^a-z0-9]", re.I)
    for part in parsed(page).select("article :is(h1, h2, h3), .dropdown.admonition > p:not(.admonition-title)"):
        # A formula is drawn; what stands before the first one is text.
        words = part.find(string=True).strip().partition("\\(")[0]
        assert letters.sub("", words) in letters.sub("", text), words
    assert "Show code" not in text
    pages = pdf.read_bytes().count(b"/Type /Page\n")
    assert letters.sub("", text).count("DistributedTrainingRungbyRung") >= pages > 10
    assert f"{pages} / {pages}" in " ".join(text.split())


def pdf_text(path):
    """Return the text of a PDF as Chromium writes it: glyphs by font, and what each stands for."""
    data = path.read_bytes()
    objects = dict(re.findall(rb"(?ms)^(\d+) 0 obj\s(.*?)\sendobj", data))
    fonts, text = {}, ""

    def stream(key):
        return zlib.decompress(re.search(rb"(?s)stream\r?\n(.*)\r?\nendstream", objects[key])[1])

    for font, content in objects.items():
        if meant := re.search(rb"/ToUnicode (\d+) 0 R", content):
            fonts[font] = known = {}
            for entry in re.findall(rb"(?m)^<.*>$", stream(meant[1])):
                first, *last, letter = (int(code, 16) for code in re.findall(rb"<(\w+)>", entry))
                for code in range(first, (last or [first])[0] + 1):
                    known[code] = chr(letter + code - first) if letter < 0x10000 else "?"
    for content in objects.values():
        if page := re.search(rb"/Type /Page\b(?s:.*)/Contents (\d+) 0 R", content):
            for font, glyphs in re.findall(rb"/F(\d+) |<(\w+)> Tj", stream(page[1])):
                known = fonts[font] if font else known
                text += "".join(known[int(glyphs[i : i + 4], 16)] for i in range(0, len(glyphs), 4))
    return unicodedata.normalize("NFKC", text)  # without ligatures
