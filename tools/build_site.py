"""Build the book as `jupyter-book build` does, several pages at a time: build_site.py JOBS OPTIONS-OF-THAT-COMMAND.

Sphinx reads and writes pages in parallel, and Jupyter Book can hand the number on, but its command has no option for it.
"""

import contextlib
import functools
import sys
import tempfile
import uuid

from jupyter_book import sphinx
from jupyter_book.cli.main import main
from jupyter_client import KernelManager


def build(jobs: int, options: list[str]) -> None:
    """Run `jupyter-book build` and exit with its status.

    Args:
        jobs: Pages read at a time; 1 is what the command does by itself.
        options: What follows "build" on its command line.
    """
    # The command looks the function up when it runs.
    sphinx.build_sphinx = functools.partial(sphinx.build_sphinx, jobs=jobs)
    with contextlib.ExitStack() as stack:
        if jobs > 1:
            # The path of a socket has 104 characters at most: not every TMPDIR and not every home is short enough.
            folder = tempfile.TemporaryDirectory(prefix="jupyter-", dir="/tmp")
            _talk_through_files(stack.enter_context(folder))
        main(["build", *options])


def _talk_through_files(folder: str) -> None:
    """Let kernels be reached by sockets in a folder.

    By default a kernel gets numbers of ports that were free a moment ago. Of several kernels that start in the same
    moment, two may get the same number, and one does not start.

    Args:
        folder: Where the sockets shall be.
    """
    start = KernelManager.__init__

    def through_files(self: KernelManager, *args: object, **kwargs: object) -> None:
        start(self, *args, **{"transport": "ipc", "ip": f"{folder}/{uuid.uuid4().hex}", **kwargs})

    KernelManager.__init__ = through_files


if __name__ == "__main__":
    build(int(sys.argv[1]), sys.argv[2:])
