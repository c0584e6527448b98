"""A button on each chapter that shows it as slides, which are made by _static/slides.mjs when it is pressed."""

from __future__ import annotations

from reading import chapter_prefix
from sphinx.application import Sphinx


def _offer(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    # Jupyter Book links every style sheet of _static from every page; this one is loaded with the script.
    context["css_files"] = [sheet for sheet in context["css_files"] if "slides.css" not in str(sheet.filename)]
    if not chapter_prefix(page):
        return
    script = f"import('{context['pathto']('_static/slides.mjs', 1)}')"
    button = {"type": "javascript", "icon": "fas fa-chalkboard", "label": "slides-button", "tooltip": "Show as slides"}
    button |= {"javascript": f"{script}.then(slides => slides.present())", "classes": "pst-js-only"}
    context["header_buttons"].append(button)
    # An address with a number of a slide opens on it.
    asked = "new URLSearchParams(location.search).get('slide')"
    app.add_js_file(None, body=f"if ({asked}) {script}.then(slides => slides.present(Number({asked}) || 1))")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    # After the theme has made its own buttons.
    app.connect("html-page-context", _offer, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
