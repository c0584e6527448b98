"""Serve the built book on this machine: the port asked for, or the first free one from 8000."""

import functools
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Stay quiet: a reader has no use for the request log."""


def open_server(site: Path, port: int | None) -> ThreadingHTTPServer:
    """Return a server bound to 127.0.0.1.

    Args:
        site: The folder to serve.
        port: The port to use, or None for the first free one from 8000.

    Raises:
        SystemExit: With one sentence that says the mend.
    """
    if not (site / "index.html").exists():
        raise SystemExit(f"There is no book at {site} yet: run make book first.")
    handler = functools.partial(_Handler, directory=str(site))
    for candidate in [port] if port is not None else range(8000, 8100):
        try:
            return ThreadingHTTPServer(("127.0.0.1", candidate), handler)
        except OSError as error:
            reason = error.strerror
    asked = f"port {port}" if port is not None else "any port from 8000 to 8099"
    mend = "leave PORT out to take a free one" if port is not None else "name another with PORT="
    raise SystemExit(f"Cannot serve on {asked} ({reason}): {mend}.")


def main() -> None:
    """Serve until interrupted."""
    port = sys.argv[2] if len(sys.argv) > 2 else None
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise SystemExit(f"PORT={port} is no port: give a number from 1 to 65535.")
    server = open_server(Path(sys.argv[1]), int(port) if port else None)
    print(f"The book is at http://127.0.0.1:{server.server_port}/ (stop with Ctrl-C)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
