"""Kernels that are reached by sockets in a folder, for programs that start several in the same moment."""

import functools
import tempfile
import uuid

from jupyter_client import KernelManager


def talk_through_files() -> tempfile.TemporaryDirectory:
    """Let the kernels of this process be reached by sockets in a folder, and return the folder, for as long as it shall be.

    By default a kernel gets numbers of ports that were free a moment ago. Of several kernels that start in the same
    moment, two may get the same number, and one does not start.
    """
    # The path of a socket has 104 characters at most: not every TMPDIR and not every home is short enough.
    folder = tempfile.TemporaryDirectory(prefix="jupyter-", dir="/tmp")
    start = KernelManager.__init__

    @functools.wraps(start)
    def through_files(self: KernelManager, *args: object, **kwargs: object) -> None:
        start(self, *args, **{"transport": "ipc", "ip": f"{folder.name}/{uuid.uuid4().hex}", **kwargs})

    KernelManager.__init__ = through_files
    return folder
