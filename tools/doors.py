"""The contract of import-linter that packages are entered by their front doors.

A package inside a room, such as `lablib.calc.memory`, exports in its `__init__` what others need. A module outside of
it imports from the package, or from a package inside it, and from none of its modules.
"""

from __future__ import annotations

from importlinter import Contract, ContractCheck, output


class DoorContract(Contract):
    """Every import of a module that lies in a package of a room comes from inside that package."""

    def check(self, graph, verbose):
        """Return the imports that pass by a front door."""
        around = []
        for module in sorted(graph.modules):
            package = module.rpartition(".")[0]
            inside_a_room = package.count(".") >= 2  # lablib.room.package
            if inside_a_room and not graph.find_children(module):
                importers = graph.find_modules_that_directly_import(module)
                around += [
                    (importer, module)
                    for importer in sorted(importers)
                    if importer != package and not importer.startswith(f"{package}.")
                ]
        return ContractCheck(kept=not around, metadata={"around": around})

    def render_broken_contract(self, check):
        """Print one line for every such import."""
        for importer, module in check.metadata["around"]:
            output.print_error(
                f"{importer} imports {module}: import from {module.rpartition('.')[0]}, which exports it"
            )
        output.new_line()
