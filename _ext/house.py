"""What the book decides when it is built: MathJax's place, whose repository the buttons name, who runs what."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging

_LOG = logging.getLogger(__name__)

#: Filled by tools/mathjax.sh where npm is at hand.
_MATHJAX = ".cache/mathjax-*"


def _local_mathjax(srcdir: Path) -> Path | None:
    return next(iter(sorted(srcdir.glob(_MATHJAX))), None)


def _configure(app: Sphinx, config: Config) -> None:
    if _local_mathjax(Path(app.srcdir)):
        config.mathjax_path = "mathjax/tex-chtml.js"
    # GitHub Actions names the repository, so a fork's pages point at the fork.
    repository = os.environ.get("GITHUB_REPOSITORY")
    if repository:
        config.html_theme_options |= {
            "repository_url": f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}",
            "repository_branch": os.environ.get("GITHUB_REF_NAME", "main"),
            "use_repository_button": True,
            "use_issues_button": True,
            "launch_buttons": {"binderhub_url": "https://mybinder.org", "notebook_interface": "jupyterlab"},
        }


def _copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    source = _local_mathjax(Path(app.srcdir))
    if source and exception is None and app.builder.format == "html":
        # Only now: a script in _static before the build would be loaded by every page.
        shutil.copytree(source, Path(app.outdir) / "_static" / "mathjax", dirs_exist_ok=True)


def _executed(docname: str) -> Path | None:
    """Return the lab as nbval has just run it, under `make test`; else None, and the build runs the lab."""
    folder, stem = os.environ.get("EXECUTED_LABS"), Path(docname).name
    path = Path(folder or "", f"{stem}.ipynb")
    return path if folder and docname == f"labs/{stem}" and path.exists() else None


def _code(notebook: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]]


def _show_executed(app: Sphinx, docname: str, source: list[str]) -> None:
    if path := _executed(docname):
        executed = path.read_text(encoding="utf-8")
        if _code(executed) != _code(source[0]):
            raise ExtensionError(f"{path} is not the run of {docname}.ipynb as it is now")
        source[0] = executed
        _LOG.info("%s: shown as nbval ran it", docname)


def _allow_parallel(app: Sphinx, config: Config) -> None:
    # It comes with sphinx_external_toc and says nothing about parallel reading, so Sphinx would do none. All that it
    # does is to number sections, when all pages are read.
    if "sphinx_multitoc_numbering" in app.extensions:
        app.extensions["sphinx_multitoc_numbering"].parallel_read_safe = True


def _deal(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Deal the pages round to the processes that read them, or one would run the cells of all chapters."""
    docnames[:] = [name for process in range(app.parallel) for name in docnames[process :: app.parallel]]


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build.

    Args:
        app: The Sphinx application.
    """
    app.connect("config-inited", _configure, priority=400)
    app.connect("config-inited", _allow_parallel)
    app.connect("env-before-read-docs", _deal)
    app.connect("source-read", _show_executed)
    app.connect("build-finished", _copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
