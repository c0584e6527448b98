"""Where pages find what is not theirs: MathJax, the licences of others, and the repository that the buttons name."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

#: Where npm was not at hand.
_CDN = "https://cdn.jsdelivr.net/npm"


def _version(srcdir: Path, package: str) -> str:
    """Return the version that a script of tools/ fetches, which is written there and nowhere else."""
    return re.search(r"(?m)^version=(\S+)$", (srcdir / f"tools/{package}.sh").read_text(encoding="utf-8"))[1]


def fetched(srcdir: Path, package: str) -> Path | None:
    """Return the folder that tools/PACKAGE.sh filled, or None if npm was not at hand."""
    folder = srcdir / ".cache" / f"{package}-{_version(srcdir, package)}"
    return folder if folder.is_dir() else None


def repository() -> tuple[str | None, str]:
    """Return the public address of the repository and its branch; None where the build knows no address.

    GitHub Actions names the repository, so a fork's pages point at the fork.
    """
    server, project = os.environ.get("GITHUB_SERVER_URL", "https://github.com"), os.environ.get("GITHUB_REPOSITORY")
    return (f"{server}/{project}" if project else None), os.environ.get("GITHUB_REF_NAME", "main")


def _configure(app: Sphinx, config: Config) -> None:
    version = _version(Path(app.srcdir), "mathjax")
    folder, font = f"{_CDN}/mathjax@{version}", f"{_CDN}/@mathjax/mathjax-tex-font@{version}"
    if fetched(Path(app.srcdir), "mathjax"):
        folder, font = "mathjax", "[mathjax]/mathjax-tex-font"
    config.mathjax_path = f"{folder}/tex-chtml-nofont.js"
    config.mathjax3_config["loader"] = {"load": ["a11y/assistive-mml"], "paths": {"mathjax-tex": font}}
    address, branch = repository()
    if address:
        config.html_theme_options |= {
            "repository_url": address,
            "repository_branch": branch,
            "use_repository_button": True,
            "use_issues_button": True,
        }


def _copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    source = fetched(Path(app.srcdir), "mathjax")
    if source and exception is None and app.builder.format == "html":
        # Only now: a script in _static before the build would be loaded by every page.
        shutil.copytree(source, Path(app.outdir) / "_static" / "mathjax", dirs_exist_ok=True)


def _copy_licences(app: Sphinx, exception: Exception | None) -> None:
    """Publish THIRD_PARTY.md, and the licence of every package named there whose text _static/licences does not have."""
    if exception is None and app.builder.format == "html":
        listed, target = Path(app.srcdir, "THIRD_PARTY.md"), Path(app.outdir, "_static", "licences")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(listed, target)
        for name in set(re.findall(r"`licences/([\w.-]+)\.txt`", listed.read_text(encoding="utf-8"))):
            if not Path(app.srcdir, "_static", "licences", f"{name}.txt").exists():
                files = importlib.metadata.files(name) or []
                texts = [
                    f for f in files if re.fullmatch(r"(\w+_)?(LICEN[CS]E|COPYING)(\.\w+)?", f.name.replace("-", "_"))
                ]
                (target / f"{name}.txt").write_text("\n\n".join(f.read_text() for f in texts), encoding="utf-8")


def _write_missing(app: Sphinx, exception: Exception | None) -> None:
    """Write the page that a host shows for an address that is not there; it is shown at any depth."""
    if exception is None and app.builder.format == "html":
        # A project's pages on GitHub lie below its name.
        home = f"/{os.environ.get('GITHUB_REPOSITORY', '').partition('/')[2]}/".replace("//", "/")
        (Path(app.outdir) / "404.html").write_text(
            f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>No such page: {app.config.html_title}</title></head>
<body style="max-width: 40rem; margin: 3rem auto; padding: 0 1rem; font-family: sans-serif">
<h1>There is no page at this address</h1>
<p>It may have been renamed: <a href="{home}index.html">the table of contents</a> has all pages, and
<a href="{home}search.html">the search</a> finds words in them.</p></body></html>
""",
            encoding="utf-8",
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.connect("config-inited", _configure, priority=400)
    app.connect("build-finished", _copy_mathjax)
    app.connect("build-finished", _copy_licences)
    app.connect("build-finished", _write_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
