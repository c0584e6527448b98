"""Build the book as `jupyter-book build` does, several pages at a time: build_site.py JOBS OPTIONS-OF-THAT-COMMAND.

Sphinx reads and writes pages in parallel, and Jupyter Book can hand the number on, but its command has no option for it.
"""

import contextlib
import functools
import sys

from jupyter_book import sphinx
from jupyter_book.cli.main import main
from kernel_sockets import talk_through_files


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
            stack.enter_context(talk_through_files())
        main(["build", *options])


if __name__ == "__main__":
    build(int(sys.argv[1]), sys.argv[2:])
