"""A rendezvous left over by an earlier job: found before it harms.

Ranks find each other at a port (torchrun's --rdzv-endpoint, MASTER_PORT). What an earlier job left there looks like
a rank. A new job then waits for ranks that are gone, or joins a job that is over.

    python -m lablib.launch.runs.rendezvous HOST:PORT        # exit code 1 and a sentence where something answers
"""

from __future__ import annotations

import socket
import sys

_CONNECT_S = 1.0


def check_port(endpoint: str) -> None:
    """See to it that nobody listens where a new job wants to meet; on its first machine, before torchrun."""
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"endpoint={endpoint!r} must be host:port, such as 10.0.0.1:29500")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return
    raise ValueError(
        f"something answers at {endpoint} before this job has started, perhaps an agent of a job that you believe dead: "
        f"find it with `ss -ltnp 'sport = :{port}'` and end it, or choose another port"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lablib.launch.runs.rendezvous HOST:PORT")
    try:
        check_port(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
