"""How long the reader of a live page waits: for the first answer, Python's start included, and for every later one.

From the key that moves a control until the page shows the numbers, as the page itself times it. Each start is in a
browser that has kept nothing. Needs the built site with Pyodide from npm (make site), and a Chromium.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from http.server import ThreadingHTTPServer

from tests.bench.harness import Result, median
from tests.browser.test_livecalc import PAGES, PYODIDE_IS_LOCAL, Live
from tests.browser.test_site import BROWSERS, _Quiet
from tests.built_site import SITE

STARTS = 5
FIRST_LIMIT, LATER_LIMIT = 4000.0, 60.0  # milliseconds


def missing() -> str:
    """Return what keeps the pages from being timed here, or ""."""
    if PYODIDE_IS_LOCAL and chromium_path():
        return ""
    return f"pages: this needs a Chromium, and Pyodide in {SITE} (make site, where npm is at hand)"


def chromium_path() -> str | None:
    """Return the Chromium of this machine, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def results() -> list[Result]:
    """Time the live pages."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    first: dict[str, list[float]] = {page: [] for page in PAGES}
    later: dict[str, list[float]] = {page: [] for page in PAGES}
    serve = functools.partial(_Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for _ in range(STARTS):
            for page in PAGES:
                chromium = playwright.chromium.launch(executable_path=path, args=flags)
                with chromium.new_context() as context:
                    start, *others = waits(context, f"http://127.0.0.1:{server.server_port}/", page)
                chromium.close()
                first[page].append(start)
                later[page] += others
        server.shutdown()
    lines = (("first answer", first, FIRST_LIMIT), ("later answers", later, LATER_LIMIT))
    return [
        Result(f"{page}: {name}", median(samples[page]), limit, "ms", samples={"page": samples[page]})
        for page in PAGES
        for name, samples, limit in lines
    ]


def waits(context: object, address: str, page: str) -> list[float]:
    """Return the milliseconds of every answer while each control takes a step there and back.

    Args:
        context: Playwright's browser context, with nothing kept.
        address: Where the site is served.
        page: The page, without its suffix.
    """
    with Live(context, address, page) as live:
        found = []
        for control in live.explorer.controls:
            fewer, more = ("ArrowLeft", "ArrowRight") if control.slider else ("ArrowUp", "ArrowDown")
            keys = (more, fewer) if live.first[control.name] == control.options[0][0] else (fewer, more)
            found += [live.press(control.name, key) for key in keys]
        return found
