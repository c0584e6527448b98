"""Cells in a kernel of their own, which nothing has run in before and which ends with the last of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat


def run_cells(
    sources: Sequence[str], folder: Path, *, variables: Mapping[str, str] | None = None, timeout: float = 600
) -> tuple[list[nbformat.NotebookNode], str]:
    """Run cells of code one after the other, also after one that fails.

    Args:
        folder: Where the kernel starts.
        variables: Of its environment, on top of this process's.
        timeout: Seconds for a cell.

    Returns:
        The cells with their outputs, and why the kernel stopped before the last one, or "".
    """
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    # The path of a socket has 104 characters at most: not every TMPDIR is short enough.
    short = "/tmp" if os.access("/tmp", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kernel-", dir=short) as sockets:
        client = NotebookClient(
            nbformat.v4.new_notebook(cells=cells), kernel_name="python3", timeout=timeout, allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip
        manager = client.create_kernel_manager()
        # Files, not ports: of the ports that are free now, two kernels that start at once may choose the same.
        manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        try:
            client.execute(env=os.environ | dict(variables or {}))
        except Exception as lost:  # a kernel that died, a cell that did not end
            return client.nb.cells, (str(lost).strip().splitlines() or [type(lost).__name__])[0][:300]
        finally:
            # nbclient takes SIGINT and SIGTERM for itself, and ends as if all cells had run.
            if getattr(client, "_async_cleanup_kernel_future", None) is not None:
                raise KeyboardInterrupt
        return client.nb.cells, ""
