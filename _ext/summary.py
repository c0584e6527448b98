"""The end of a rung: its takeaways again, each with its section, then what proves the rung and the rung after it.

Gathered from the chapter's own boxes, so nothing is said twice in the sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

_CHAPTER = r"book/\d\d_"


class Summary(SphinxTransform):
    """Add the section "Takeaways" to a chapter."""

    # After the cells' expressions have become text, and before words with dots become links (source_pages).
    default_priority = 880

    def apply(self) -> None:
        """Gather the boxes called Takeaway; a page without any is left as it is."""
        boxes = [box for box in self.document.findall(nodes.admonition) if box[0].astext() == "Takeaway"]
        if not boxes or not re.match(_CHAPTER, self.env.docname):
            return
        taken = nodes.bullet_list("", *map(_taken, boxes))
        ways = nodes.paragraph("", "", *self._ways())
        summary = nodes.section("", nodes.title("", "Takeaways"), taken, ways, ids=["takeaways"], classes=["summary"])
        self.document[0].append(summary)

    def _ways(self) -> Iterator[nodes.Node]:
        done = next(node for node in self.document.findall(nodes.section) if node[0].astext() == "Done when")
        yield nodes.Text("The check of this rung is in ")
        yield _link(done)
        later = [page for page in sorted(self.env.found_docs) if re.match(_CHAPTER, page) and page > self.env.docname]
        if later:
            title = self.env.external_site_map[later[0]].title
            yield nodes.Text(". The next rung is ")
            name = nodes.inline("", title)
            yield pending_xref(
                "", name, refdomain="std", reftype="doc", reftarget=f"/{later[0]}", refexplicit=True, refwarn=True
            )
        yield nodes.Text(".")


def _taken(box: nodes.admonition) -> nodes.list_item:
    """Return what a box says, and below it the section that it stands in."""
    said = [part.deepcopy() for part in box.children[1:]]
    for node in (node for part in said for node in part.findall(nodes.Element)):
        node["ids"], node["names"] = [], []  # they are the box's own
    section = box.parent
    while section.parent.parent is not box.document:
        section = section.parent
    return nodes.list_item("", *said, nodes.paragraph("", "", _link(section), classes=["taken-from"]))


def _link(section: nodes.section) -> nodes.reference:
    return nodes.reference("", "", nodes.Text(section[0].astext()), refid=section["ids"][0], internal=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.add_transform(Summary)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
