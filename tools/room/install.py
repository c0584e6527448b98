"""Install the course beside this file: python3 install.py. From wheels/ where they are, without a network."""

import json
import os
import platform
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
AGAIN = "RUNG_INSTALL_AGAIN"


def main():
    """Make .venv, fill it, and say whether this machine is ready; an old Python must be able to read this."""
    try:
        with open(os.path.join(HERE, "room.json")) as file:
            wanted = json.load(file)["python"]
    except (OSError, ValueError, KeyError, TypeError):
        sys.exit("Not ready: room.json beside this file is missing or damaged: unpack the archive again")
    if os.name == "nt":
        sys.exit(
            "On Windows the labs run in WSL: type  wsl --install  in PowerShell, restart, and run this line there."
        )
    here = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if here != wanted:
        other = shutil.which("python" + wanted)
        if other is None or os.environ.get(AGAIN):
            sys.exit("The room's Python is " + wanted + " and this is " + here + ": install Python " + wanted)
        os.environ[AGAIN] = "1"
        os.execv(other, [other, os.path.abspath(__file__)])
    system = {"Linux": "linux", "Darwin": "macos"}.get(platform.system(), platform.system().lower())
    target = system + "-" + platform.machine()
    listed = os.path.join(HERE, "requirements-" + target + ".txt")
    if not os.path.exists(listed):
        sys.exit("There are no packages for " + target + " here: ask for a place on the room's hub")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        sys.exit("This Python makes no environments: sudo apt-get install python" + wanted + "-venv (Debian, Ubuntu)")
    venv = os.path.join(HERE, ".venv")
    python = os.path.join(venv, "bin", "python")
    if not os.path.exists(python) and subprocess.call([sys.executable, "-m", "venv", venv]) != 0:
        sys.exit("Not ready: no environment could be made in " + HERE + ": can you write there?")
    wheels = os.path.join(HERE, "wheels", target)
    offline = ["--no-index", "--find-links", wheels] if os.path.isdir(wheels) else []
    print("Installing " + ("from wheels/" if offline else "from the registry") + ": some minutes ...", flush=True)
    # Nobody's own settings of pip, and no cache: homes may be read-only.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    plain["PIP_CONFIG_FILE"] = os.devnull
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    try:
        subprocess.check_call(pip + offline + ["--require-hashes", "-r", listed], env=plain)
        subprocess.check_call(pip + ["--no-index", "--no-build-isolation", "-e", HERE], env=plain)  # noqa: RUF005 (old)
    except subprocess.CalledProcessError:
        mend = "" if offline else "; ask for the folder wheels/" + target + " and put it beside this file"
        sys.exit(
            "Not ready: pip could not install the packages, and says why above; try again without the folder .venv"
            + mend
        )
    sys.exit(subprocess.call([os.path.join(venv, "bin", "rung"), "doctor", "--workshop"]))


if __name__ == "__main__":
    main()
