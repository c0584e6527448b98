"""Try jupyterhub_config.py: five people run lab 05 at once; measure memory, and count whose ranks ran together.

As an ordinary user on Linux, with the hub's environment:  .venv/bin/python try_hub.py RESULT.json
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil
import requests
import websocket
from jupyter_client.session import Session
from jupyterhub.utils import random_port

USERS, LAB, PLACES = ["anna", "boris", "chen", "dora", "emil"], "05_zero.ipynb", max(1, os.cpu_count() // 4)
HUB = f"http://127.0.0.1:{random_port()}"


def look(hub, room):
    """Return [(whose, is a rank, PSS, RSS, process)], in MB; what a user starts has the environment of the server."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, AttributeError):  # it ended meanwhile, or is somebody else's
            line, environ, parent = " ".join(process.cmdline()), process.environ(), process.parent()
            person = environ["JUPYTERHUB_USER"] if environ.get("LABLIB_TURNS") == f"{room}/turns" else None
            if person or hub.pid in (process.pid, parent.pid):
                rank = "forkserver" in line and "forkserver" in str(parent.cmdline())  # its rank server is its parent
                part = "hub" if process.pid == hub.pid else "proxy" if line.startswith("node") else "services"
                memory = process.memory_full_info()
                found.append((person or part, rank, memory.pss / 1e6, memory.rss / 1e6, process))
    return found


def most(samples, whose, ranks=True):
    """Return the largest [PSS, RSS] of these people's processes, or of a part of the hub."""
    return [round(max(sum(r[n] for r in seen if r[0] in whose and r[1] <= ranks) for seen in samples)) for n in (2, 3)]


def start(user):
    """Log in by the form, start the server, and return a client with this user's token."""
    browser, client, me = requests.Session(), requests.Session(), f"{HUB}/hub/api/users/{user}"
    browser.get(f"{HUB}/hub/login")
    form = {"username": user, "password": "ladder", "_xsrf": browser.cookies["_xsrf"]}
    browser.post(f"{HUB}/hub/login", data=form, allow_redirects=False).raise_for_status()
    token = browser.post(f"{me}/tokens", headers={"X-XSRFToken": browser.cookies["_xsrf"]}, json={}).json()["token"]
    client.headers["Authorization"] = f"token {token}"
    client.post(f"{me}/server").raise_for_status()
    while not client.get(me).json()["servers"].get("", {}).get("ready"):
        time.sleep(0.2)
    return client


def run(user, client):
    """Run all cells of the user's copy of the lab; return the seconds, or what went wrong."""
    began, at, session = time.monotonic(), f"{HUB}/user/{user}/api", Session()
    cells = client.get(f"{at}/contents/work/{LAB}").json()["content"]["cells"]
    address = f"{at}/kernels/{client.post(f'{at}/kernels', json={'path': 'work'}).json()['id']}/channels"
    wire = websocket.create_connection(address.replace("http", "ws"), timeout=600, header=dict(client.headers))
    for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
        sent, said = session.msg("execute_request", {"code": "".join(cell["source"]), "allow_stdin": False}), {}
        wire.send(json.dumps({**sent, "channel": "shell"}, default=str))
        while said.get("channel") != "shell" or said["parent_header"].get("msg_id") != sent["msg_id"]:
            said = json.loads(wire.recv())
            if said["content"].get("execution_state") in ("restarting", "dead"):
                return f"the kernel died in code cell {number}"
        if said["content"]["status"] != "ok":
            return f"code cell {number}: {said['content'].get('ename')}: {said['content'].get('evalue')}"
    return round(time.monotonic() - began, 1)


os.environ |= {"ROOM_PASSWORD": "ladder", "ROOM_ADDRESS": HUB, "NO_PROXY": "127.0.0.1"}
command = [sys.executable, "-m", "jupyterhub", "-f", Path(__file__).with_name("jupyterhub_config.py")]
with tempfile.TemporaryDirectory(prefix="room-") as room, ThreadPoolExecutor() as pool:
    log, os.environ["ROOM_FOLDER"], samples = Path(room, "log"), room, []
    hub = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        while "is now running" not in log.read_text():
            if hub.poll() is not None or time.sleep(0.2):
                sys.exit(log.read_text())
        began, clients = time.monotonic(), dict(zip(USERS, pool.map(start, USERS), strict=True))
        up, idle = time.monotonic() - began, [look(hub, room)]
        labs = {user: pool.submit(run, user, clients[user]) for user in USERS}
        while not all(each.done() for each in labs.values()):
            time.sleep(0.2)
            samples.append(look(hub, room))
        places = [subprocess.call(["flock", "-n", place, "true"]) == 0 for place in Path(room, "turns").iterdir()]
    finally:
        hub.terminate()
        hub.wait(120)
        for process in (left := psutil.wait_procs([row[-1] for row in look(hub, room)], 10)[1]):
            process.kill()
result = {
    "versions": {n: version(n) for n in ("jupyterhub", "jupyterhub-idle-culler", "jupyterlab", "torch", "lablib")},
    "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "cpus": os.cpu_count(), "users": len(USERS), "lab": LAB,
    "memory": "[PSS, RSS] in MB, the largest of all samples; in a list for each user", "samples": len(samples),
    "before_kernel_mb": [most(idle, [user]) for user in USERS], "most_mb": [most(samples, [user]) for user in USERS],
    "most_without_ranks_mb": [most(samples, [u], False) for u in USERS], "users_together_mb": most(samples, USERS),
    **{f"{part}_mb": most(samples, [part]) for part in ("hub", "proxy", "services")}, "servers_up_s": round(up, 1),
    "labs_s": {user: each.result() for user, each in labs.items()}, "processes_left": len(left), "places_free": places,
    "jobs_at_once": max(len({row[0] for row in seen if row[1]}) for seen in samples), "jobs_allowed": PLACES,
}  # fmt: skip
Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
