"""A JupyterHub for a workshop whose laptops fail: everybody's labs on one machine, in the browser.

As an ordinary user, in the folder of a student's copy, after its install.py. The proxy needs Node 20 or newer:

    .venv/bin/python -m pip install jupyterhub==6.1.1 jupyterhub-idle-culler==2.0.0
    npm install --prefix .proxy configurable-http-proxy@5.3.0
    export ROOM_FOLDER=~/room ROOM_PASSWORD='...' ROOM_ADDRESS=http://0.0.0.0:8000
    .venv/bin/jupyterhub -f tools/room/jupyterhub_config.py      # this file; Ctrl-C ends it, or  kill $(cat ~/room/hub.pid)
"""

import os
import signal
import sys
from pathlib import Path

from jupyterhub.utils import random_port

from lablib import course_folder
from lablib.cli.copies import FIRST_PAGE, copy_labs
from lablib.cli.room import set_up_jupyter, site

c, ROOT = get_config(), course_folder()  # noqa: F821, the first comes from JupyterHub
for name in ("ROOM_FOLDER", "ROOM_PASSWORD"):
    if not os.environ.get(name):
        sys.exit(f"{name} is not set: export {name}=... before you start the hub")
folder = Path(os.environ["ROOM_FOLDER"]).expanduser().resolve()
folder.mkdir(mode=0o700, parents=True, exist_ok=True)
for each in (people := folder / "people", turns := folder / "turns", book := folder / "book", tmp := folder / "tmp"):
    each.mkdir(exist_ok=True)
set_up_jupyter()
signal.signal(signal.SIGINT, signal.default_int_handler)  # where `&` has it ignored, services would end late

c.JupyterHub.bind_url = os.environ.get("ROOM_ADDRESS", "http://127.0.0.1:8000")
c.JupyterHub.hub_port, book_port = random_port(), random_port()  # free ones
c.JupyterHub.pid_file, c.ConfigurableHTTPProxy.pid_file = f"{folder}/hub.pid", f"{folder}/proxy.pid"
c.JupyterHub.db_url, c.JupyterHub.cookie_secret_file = f"sqlite:///{folder}/hub.sqlite", f"{folder}/cookie_secret"
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{random_port()}"
c.ConfigurableHTTPProxy.command = [str(ROOT / ".proxy/node_modules/.bin/configurable-http-proxy")]
# One password and any name: nobody is an administrator, because anybody could log in as one. Names are lower case here.
c.JupyterHub.authenticator_class, c.DummyAuthenticator.password = "dummy", os.environ["ROOM_PASSWORD"]
c.Authenticator.allow_all, c.Authenticator.username_pattern = True, r"[a-z0-9]+\Z"
# `simple` runs everybody as the user who runs the hub: each can read and delete what others have. It is for a closed
# room of people who trust each other. Otherwise take `localprocess` and the authenticator `pam` (not tried here): each
# runs as the Unix account of that name, the hub as root; homes are the accounts' then, and turns/ has mode 1777.
c.JupyterHub.spawner_class, c.SimpleLocalProcessSpawner.home_dir_template = "simple", f"{people}/{{username}}"
c.Spawner.notebook_dir, c.Spawner.default_url = f"{people}/{{username}}", f"/lab/tree/work/{FIRST_PAGE}"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.start_timeout = c.Spawner.http_timeout = 300  # a room starts at once, on few cores
c.Spawner.pre_spawn_hook = lambda spawner: copy_labs(ROOT / "labs", people / spawner.user.name / "work") and None
c.Spawner.environment = {
    "LABLIB_EXPERIMENTS": lambda spawner: str(people / spawner.user.name / "distributed-experiments"),
    "LABLIB_TURNS": str(turns), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TMPDIR": str(tmp),
    "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",  # `rung` in a terminal
}  # fmt: skip
# Links of the copied labs begin with /static/, and a person's server would answer below /user/NAME/static/. So
# /static/ goes to one server of the book for all, which asks for no password; the hub's own files are at /hub/static/.
(book / "static").unlink(missing_ok=True)
(book / "static").symlink_to(site())
serve = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(book), str(book_port)]
c.Proxy.extra_routes = {"/static/": f"http://127.0.0.1:{book_port}"}
cull = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]  # after an hour; files stay
c.JupyterHub.services = [{"name": "book", "command": serve}, {"name": "idle-culler", "command": cull}]
scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
c.JupyterHub.load_roles = [{"name": "idle-culler", "scopes": scopes, "services": ["idle-culler"]}]
