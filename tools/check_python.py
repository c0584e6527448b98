"""Say in one sentence why this Python cannot make the course's environment, before anything is created."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031 (an old Python must be able to read this file)
    sys.exit("The course needs Python 3.11, 3.12 or 3.13 and found " + version + ": PYTHON=python3.12 chooses another")
try:
    import ensurepip  # noqa: F401
except ImportError:
    sys.exit(
        "This Python cannot make virtual environments because ensurepip is missing: "
        "sudo apt-get install python3-venv (Debian, Ubuntu), or choose another with PYTHON=python3.12"
    )
