"""JupyterLab as `make lab` opens it: on a page that says where to start, with names of labs that can be read."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

from lablib.cli.copies import FIRST_PAGE, copy_labs
from tests.browser.test_site import BROWSERS, DESK
from tests.processes import ended, free_port
from tests.scripts import ROOT

LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
START_S = 180
#: A folder of its own for everything that JupyterLab and IPython would read from or write to a home.
HOMES = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTER_RUNTIME_DIR",
    "IPYTHONDIR",
)


@pytest.fixture
def address(tmp_path):
    """Start JupyterLab on copied labs, with the options of `rung lab` and the settings of tools/."""
    (tmp_path / "root").mkdir()
    copy_labs(ROOT / "labs", tmp_path / "root" / "work")
    (tmp_path / "settings").mkdir()
    shutil.copy(ROOT / "tools" / "jupyterlab.json", tmp_path / "settings" / "overrides.json")
    opened = f"--LabApp.default_url=/lab/tree/work/{FIRST_PAGE}"
    port, homes = free_port(), {name: str(tmp_path / name) for name in HOMES}
    options = [opened, "--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=t"]
    options += [f"--ServerApp.root_dir={tmp_path / 'root'}", f"--LabApp.app_settings_dir={tmp_path / 'settings'}"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with (
        open(tmp_path / "log", "w") as log,
        ended(subprocess.Popen(command, env={**os.environ, **homes}, stdout=log, stderr=subprocess.STDOUT)) as server,
    ):
        until, pause = time.monotonic() + START_S, threading.Event()
        while time.monotonic() < until and server.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api").close()
                break
            pause.wait(0.2)
        yield f"http://127.0.0.1:{port}/?token=t"


def test_it_opens_on_the_page_that_names_the_labs(address):
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*sandbox, "--disable-dev-shm-usage"])
        page = browser.new_page(viewport=DESK)
        page.set_default_timeout(START_S * 1000)
        page.goto(address)
        assert page.locator(".jp-RenderedMarkdown h1").inner_text().startswith("Start here")  # rendered, not source
        names = page.locator(".jp-DirListing-itemText", has_text=re.compile(r"^\d\d_"))
        names.nth(len(LABS) - 1).wait_for()
        # What is cut is at most the suffix of the longest.
        cut = names.evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth + 50).map(e => e.innerText)")
        assert cut == []
        page.locator(".jp-RenderedMarkdown a", has_text="Lab 01").click()
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        browser.close()
