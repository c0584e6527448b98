"""Print the built book as one PDF, by Chromium: print_book.py SITE PDF [PAGE ...], without pages all but the labs.

The articles of the pages become one document, so that links from page to page and the outline hold. Chromium prints it
as house.css has it for paper. A lab is to be run, and a page of source to be followed: neither is printed.
"""

import contextlib
import functools
import os
import posixpath
import re
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Attributes that name an id, and the piece of a style that does.
_NAMED = re.compile(r'(\s(?:id|for|aria-labelledby|aria-describedby|headers)="|url\(#)([^")]+)')
_LINK = re.compile(r'(\s(?:xlink:)?href=")([^"]*)(")')
_WAIT = 600_000  # milliseconds: formulas of a whole book, on a machine that does other work


def contents(site: Path) -> list[str]:
    """Return the pages of the table of contents that are printed, in its order, without suffix."""
    sidebar = re.search(r'(?s)<nav class="bd-links.*?</nav>', (site / "index.html").read_text(encoding="utf-8"))[0]
    linked = re.findall(r'class="reference internal" href="([^"#]+)\.html"', sidebar)
    return ["index", *(page for page in linked if not page.startswith("labs/"))]


def article(html: str, page: str, printed: list[str]) -> str:
    """Return the article of a page, with ids and links that hold in one document with the others.

    Args:
        html: The page.
        page: Its name, without suffix.
        printed: The pages of the document.
    """
    name = {known: known.replace("/", "-") for known in printed}
    text = re.search(r'(?s)<article class="bd-article">(.*?)</article>', html)[1]
    text = re.sub(r'(?s)<script.*?</script>|<a class="headerlink".*?</a>', "", text)
    text = _NAMED.sub(lambda found: found[1] + " ".join(f"{name[page]}--{each}" for each in found[2].split()), text)

    def link(found: re.Match) -> str:
        file, _, anchor = found[2].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), file))[: -len(".html")] if file else page
        if re.match(r"[a-z]+:", file):
            return found[0]
        if target not in name:  # not on paper
            return ""
        return f"{found[1]}#{name[target]}{'--' * bool(anchor)}{anchor}{found[3]}"

    folder = "../" * page.count("/")
    text = re.sub(rf'(\ssrc="){re.escape(folder)}(?=_)', r"\1../", _LINK.sub(link, text))
    return f'<article class="bd-article" id="{name[page]}">{text}</article>'


def document(site: Path, pages: list[str]) -> str:
    """Return the pages as one page of the folder book/: the head of a chapter, and the articles."""
    html = {page: (site / f"{page}.html").read_text(encoding="utf-8") for page in pages}
    # The one with most scripts: a page without formulas loads no MathJax.
    head = max((re.search(r"(?s)<head>.*?</head>", text)[0] for text in html.values()), key=lambda head: "tex-" in head)
    head = re.sub(r'((?:href|src)=")(?:\.\./)*(?=_static)', r"\1../", head)
    articles = "\n".join(article(text, page, pages) for page, text in html.items())
    start = f'<!DOCTYPE html><html lang="en" data-theme="light">{head}<body><div class="bd-content">'
    return f'{start}<div class="bd-article-container">{articles}</div></div></body></html>'


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Stay quiet."""


def print_chapters(chromium: object, site: Path, pdf: Path, pages: list[str]) -> None:
    """Print pages of a built site as one PDF, with an outline and tags.

    Args:
        chromium: Playwright's browser.
        site: The site's folder.
        pdf: The file to write.
        pages: Names of pages, without suffix.
    """
    html = document(site, pages)
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.closing(chromium.new_page(viewport={"width": 660, "height": 1000})) as page:  # as wide as paper
            page.set_default_timeout(_WAIT)
            address = f"http://127.0.0.1:{server.server_port}/book/print.html"
            page.route(address, lambda route: route.fulfill(body=html, content_type="text/html; charset=utf-8"))
            page.goto(address, wait_until="load")
            page.evaluate("window.MathJax?.startup?.promise.then(() => null)")
            page.pdf(path=pdf, format="A4", print_background=True, outline=True, tagged=True)
        server.shutdown()


def main() -> None:
    """Print, and say where the PDF is."""
    site, pdf, pages = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    if not (site / "index.html").exists():
        raise SystemExit(f"There is no book at {site} yet: run make book first.")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"No browser here: none of {', '.join(BROWSERS)} is installed.")
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox cannot start as root
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=[*sandbox, "--disable-dev-shm-usage"])
        print_chapters(chromium, site, pdf, pages or contents(site))
    print(f"The book is at {pdf}: {pdf.stat().st_size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
