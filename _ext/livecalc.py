"""Live pages: {livecalc} runs an explorer of `lablib.live` in the reader's browser.

    ```{livecalc} lablib.live.training
    seq: 4096
    ```

names a module with an `EXPLORER`, and may set the first state, one control a line. What the page shows first is drawn
here, by the same function that the browser calls later: readers without JavaScript have the picture and its numbers.

Nothing is fetched before a reader touches a control. Then a worker starts Pyodide, with lablib.calc and lablib.live as a zip
file that this build makes. Pyodide's files come from the site where tools/pyodide.sh found them on npm, else from its CDN.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import shutil
import subprocess
import zipfile
from html import escape
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import lablib
from lablib.live.explorer import Control, Explorer, Value, find_explorer

ROOT = Path(__file__).resolve().parents[1]
#: What the browser needs of the npm package `pyodide`.
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
#: What says under which terms it may be passed on.
NOTICE = ("package.json", "README.md")
#: The same files where npm was not at hand.
CDN = "https://cdn.jsdelivr.net/npm/pyodide@{version}/"
#: Where the browser finds Pyodide and the zip file, below _static.
FOLDER = "livecalc"


def pyodide_version(root: Path = ROOT) -> str:
    """Return the version that tools/pyodide.sh fetches, which is written there and nowhere else."""
    return re.search(r"(?m)^version=(\S+)$", (root / "tools/pyodide.sh").read_text(encoding="utf-8"))[1]


def local_pyodide(root: Path = ROOT) -> Path | None:
    """Return the folder in which tools/pyodide.sh left Pyodide, or None if npm was not at hand."""
    folder = root / ".cache" / f"pyodide-{pyodide_version(root)}"
    return folder if all((folder / name).is_file() for name in CORE) else None


def live_sources() -> dict[str, bytes]:
    """Return the files of lablib.calc and lablib.live, which need the standard library only, by their place."""
    package = Path(lablib.__file__).parent
    rooms = (path for room in ("calc", "live") for path in sorted((package / room).rglob("*")))
    files = (package / "__init__.py", *(path for path in rooms if path.suffix in (".py", ".json")))
    return {f"lablib/{file.relative_to(package).as_posix()}": file.read_bytes() for file in files}


@functools.cache
def live_digest() -> str:
    """Return a short name for those files as they are now: a browser that kept an older zip file asks for this one."""
    digest = hashlib.sha256()
    for name, content in live_sources().items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]


def zip_live(path: Path) -> None:
    """Write a zip file that Python imports from; its bytes depend on the sources alone."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in live_sources().items():
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)


def compile_live(target: Path) -> None:
    """Let Pyodide compile the zip file that it will import from; without node every reader's browser does it."""
    if node := shutil.which("node"):
        command = (node, ROOT / "tools/pyodide_compile.mjs", target, target / "lablib.zip")
        subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)


class livecalc(nodes.General, nodes.Element):
    """Where an explorer stands in a page: its module and its first state."""


class LiveCalc(SphinxDirective):
    """The directive {livecalc}."""

    has_content: ClassVar[bool] = True
    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """Return the explorer as a node.

        Raises:
            ExtensionError: If there is no such explorer, control or value.
        """
        module = self.arguments[0]
        try:
            explorer = find_explorer(module)
            given = dict(_setting(line) for line in self.content if line.strip())
            first = explorer.state(given)
            explorer.answer(first)
        except (ImportError, ValueError) as error:
            raise ExtensionError(f"{self.env.docname}: livecalc {module}: {error}") from error
        self.env.note_dependency(inspect.getsourcefile(explorer.compute))
        return [livecalc(module=module, first=first)]


def _setting(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise ValueError(f"{line!r} is not a setting: write it like 'seq: 4096'")
    return name.strip(), value.strip()


def markup(explorer: Explorer, module: str, first: dict[str, Value]) -> str:
    """Return an explorer as HTML: its controls, hidden until a script can answer them, and its first answer.

    Args:
        explorer: The explorer.
        module: Its module.
        first: The state to begin with.
    """
    answer = explorer.answer(first)
    first = answer["state"]
    pyodide = f"{FOLDER}/" if local_pyodide() else CDN.format(version=pyodide_version())
    shown, folded = (
        "".join(
            _control(explorer, control, first[control.name]) for control in explorer.controls if control.fold == fold
        )
        for fold in (False, True)
    )
    more = (
        f'<details class="livecalc-more"><summary>More settings</summary><div>{folded}</div></details>\n'
        if folded
        else ""
    )
    ask = f'<button type="submit">{escape(explorer.button)}</button>' if explorer.button else ""
    return f"""
<div class="livecalc" id="livecalc-{explorer.name}" data-module="{module}" data-name="{explorer.name}"
 data-pyodide="{pyodide}" data-package="{FOLDER}/lablib.zip?v={live_digest()}">
<form class="livecalc-controls" aria-label="{escape(explorer.title, quote=True)}" autocomplete="off" hidden>
{shown}<div class="livecalc-buttons">{ask}<button type="reset">Reset</button>
<button type="button" data-copy="address">Copy the link</button></div>
{more}</form>
<p class="livecalc-note" role="status"><noscript>With JavaScript this picture follows your choices.
The call gives the same numbers in Python.</noscript></p>
<div class="livecalc-unknown" role="status"></div>
<p class="livecalc-clipped" data-part="clipped" role="status">{answer["clipped"]}</p>
<figure class="{"house-figure " if answer["picture"] else ""}livecalc-figure">
<figcaption data-part="caption" aria-live="polite">{answer["caption"]}</figcaption>
<div data-part="picture">{answer["picture"]}</div>
</figure>
<button type="button" class="livecalc-question" data-part="question" hidden>{answer["question"]}</button>
<div data-part="reply" aria-live="polite"></div>
<div class="livecalc-command"{"" if answer["command"] else " hidden"}><span>The same in a terminal:</span>
<pre><code data-part="command" class="livecalc-code">{answer["command"]}</code></pre>
<button type="button" data-copy="command" hidden>Copy</button></div>
<div data-part="table">{answer["table"]}</div>
<div data-part="files">{answer["files"]}</div>
<details class="livecalc-call"><summary>Show me the call</summary>
<pre><code data-part="call" class="livecalc-code">{answer["call"]}</code></pre>
<button type="button" data-copy="call" hidden>Copy</button></details>
</div>
"""


def _control(explorer: Explorer, control: Control, first: Value) -> str:
    key, quick = f"livecalc-{explorer.name}-{control.name}", " data-quick" * control.quick
    label = f'<label for="{key}">{escape(control.label)}</label>'
    if control.free:
        field = (
            f'<textarea id="{key}" name="{control.name}" rows="2" spellcheck="false">{escape(str(first))}</textarea>'
        )
        return f'<div class="livecalc-control">{label}{field}</div>\n'
    values = [value for value, _ in control.options]
    place = values.index(first)
    if control.slider:
        labels = escape(json.dumps([[str(value), label] for value, label in control.options]), quote=True)
        words = control.options[place][1]
        field = (
            f'<input type="range" id="{key}" name="{control.name}"{quick} min="0" max="{len(values) - 1}" value="{place}" '
            f'data-options="{labels}" aria-valuetext="{words}"><output for="{key}">{words}</output>'
        )
    else:
        options = "".join(
            f'<option value="{escape(str(value), quote=True)}"{" selected" if value == first else ""}>'
            f"{escape(label)}</option>"
            for value, label in control.options
        )
        field = f'<select id="{key}" name="{control.name}"{quick}>{options}</select>'
    return f'<div class="livecalc-control">{label}{field}</div>\n'


def _visit(self: object, node: livecalc) -> None:
    explorer = find_explorer(node["module"])
    self.body.append(markup(explorer, node["module"], node["first"]))
    raise nodes.SkipNode


def _skip(self: object, node: livecalc) -> None:
    raise nodes.SkipNode


def _load_script(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Load the scripts on pages that have an explorer, or a picture to step through, and on no other."""
    if doctree is not None and next(doctree.findall(livecalc), None) is not None:
        app.add_js_file("livecalc.mjs", type="module")
    if "<step-through>" in context.get("body", ""):
        app.add_js_file("steps.mjs", type="module")


def _copy(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    target = Path(app.outdir) / "_static" / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    zip_live(target / "lablib.zip")
    if source := local_pyodide():
        for name in (*CORE, *NOTICE):
            shutil.copy(source / name, target / name)
        compile_live(target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    others = dict.fromkeys(("latex", "text", "man", "texinfo"), (_skip, None))
    app.add_node(livecalc, html=(_visit, None), **others)
    app.add_directive("livecalc", LiveCalc)
    app.connect("html-page-context", _load_script)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
