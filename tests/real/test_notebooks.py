"""The examples of notebooks, on this machine: kernels, a Jupyter server, and dask-labextension are real."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ruamel.yaml import YAML

from ..conftest import need_library, unavailable
from ..support.cli import ROOT, Cli
from ..support.processes import patience, run, until
from .test_examples import local  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

CPU = ["--set", "gpus=0", "--set", "workers.count=1"]
NOTEBOOK = ROOT / "examples" / "notebook"


def test_the_notebook_connects_and_scales(local: Cli) -> None:
    """A kernel executes it: other than a script, it has an event loop that runs."""
    need_library("ipykernel")
    need_library("nbclient")
    done = local("submit", str(ROOT / "examples" / "notebook" / "profile.yaml"), "--wait", *CPU)
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    text = (NOTEBOOK / "cluster.ipynb").read_text()
    assert "notebook-7f3a" in text
    path = local.write("cluster.ipynb", text.replace("notebook-7f3a", cluster))
    execute = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(path)]
    done = run(execute, env=local.env, cwd=local.work, timeout=180)
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in cells[1]["outputs"]]
    assert cluster in "".join(shown), "the widget"
    (mean,) = (output["data"]["text/plain"] for output in cells[3]["outputs"])
    assert round(float(re.findall(r"[\d.]+", "".join(mean))[-1]), 2) == 0.5
    status = local.status(cluster)
    assert status["state"] == "RUNNING"  # the notebook has gone
    assert len(status["jobs"]) == 2


LABEXTENSION = """
import asyncio
from dask_labextension.manager import DaskClusterManager

async def main():
    async with DaskClusterManager() as manager:
        model = await manager.start_cluster()

        async def workers(n):
            while manager.get_cluster(model["id"])["workers"] != n:
                await asyncio.sleep(0.2)
            print(n, end=" ")

        await workers(1)
        assert manager.adapt_cluster(model["id"], 2, 2)["adapt"] == {"minimum": 2, "maximum": 2}
        await workers(2)
        await manager.scale_cluster(model["id"], 1)
        await workers(1)
        assert manager.get_cluster(model["id"])["dashboard_link"]
        await manager.close_cluster(model["id"])
        print(len(manager.list_clusters()))

if __name__ == "__main__":
    asyncio.run(main())
"""
"""Start, scale, adapt and close a cluster with the buttons' functions of dask-labextension."""


def test_the_button_of_dask_labextension_starts_a_cluster_that_scales(local: Cli) -> None:
    need_library("dask_labextension")
    config = local.home / ".config" / "dask"
    text = (NOTEBOOK / "labextension.yaml").read_text()
    assert "gpus_per_job: 1" in text
    (config / "labextension.yaml").write_text(text.replace("gpus_per_job: 1", "gpus_per_job: 0"))
    done = local.python_run(LABEXTENSION)
    assert (done.returncode, done.stdout) == (0, "1 2 1 0\n"), done.stderr


KERNEL = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(1)
    print(client.submit(sum, [1, 2]).result(), "of", len(client.nthreads()), "worker")
"""


class JupyterServer:
    """The REST API of a Jupyter server, below an address without scheme; ``token`` is `token=…`."""

    def __init__(self, host: str, token: str) -> None:
        self.host, self.token = host, token

    def request(self, path: str, **body: object) -> Any:
        """Send a POST request; return the answer."""
        url = f"http://{self.host}/{path}?{self.token}"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
        request.add_header("Authorization", self.token.replace("=", " "))
        with urllib.request.urlopen(request, timeout=patience(30)) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    async def execute(self, code: str) -> str:
        """Start a kernel, run the code, and return its output."""
        from tornado.websocket import websocket_connect

        kernel = self.request("api/kernels")["id"]
        url = f"ws://{self.host}/api/kernels/{kernel}/channels?{self.token}"
        socket = await websocket_connect(url)
        header = {"msg_id": "1", "msg_type": "execute_request", "session": "1", "username": ""}
        content = {"code": code, "silent": False, "store_history": False, "stop_on_error": True}
        message = {
            "channel": "shell", "header": header | {"version": "5.3"}, "parent_header": {},
            "metadata": {}, "content": content, "buffers": [],
        }  # fmt: skip
        await socket.write_message(json.dumps(message))
        output = ""
        while (text := await socket.read_message()) is not None:
            answer = json.loads(text)
            kind, content = answer["msg_type"], answer["content"]
            output += content.get("text", "") + "\n".join(content.get("traceback", []))
            if kind == "execute_reply":
                break
        socket.close()
        return output


def allow_root(local: Cli) -> None:
    """The tests may run as root."""
    settings = local.home / ".jupyter"
    settings.mkdir()
    text = json.dumps({"ServerApp": {"allow_root": True}})
    (settings / "jupyter_server_config.json").write_text(text)


def test_a_kernel_of_jupyter_in_the_head_connects_without_arguments(local: Cli) -> None:
    """A kernel of the server that `run` starts connects to the cluster without arguments."""
    need_library("jupyterlab")
    need_library("ipykernel")
    allow_root(local)
    bin_folder = Path(local.command).parent
    done = local(
        "submit",
        str(ROOT / "examples" / "notebook" / "jupyter.yaml"),
        *CPU,
        PATH=f"{bin_folder}:{local.env['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    addresses: list[str] = []

    def address() -> bool:
        text = local("logs", cluster).stdout
        addresses[:] = re.findall(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", text)
        return bool(addresses)

    until(address, 60, "the address in the log", every=1)
    address_parts = urlsplit(addresses[0])
    server = JupyterServer(address_parts.netloc, address_parts.query)
    limit = patience(60)
    output = asyncio.run(asyncio.wait_for(server.execute(KERNEL), limit))
    assert output == "3 of 1 worker\n"
    server.request("api/shutdown")  # File, Shut Down
    until(lambda: local.status(cluster)["state"] != "RUNNING", 60, every=1)
    assert local.status(cluster)["state"] == "DONE"


# -- Open OnDemand -----------------------------------------------------------------------------------
ONDEMAND = ROOT / "examples" / "ondemand"

RENDER = """
require "erb"; require "json"; require "ostruct"
values = JSON.parse(ARGV[0])
scope = OpenStruct.new(values.merge("context" => OpenStruct.new(values)))
print ERB.new(STDIN.read, trim_mode: "-").result(scope.instance_eval { binding })
"""
"""As the dashboard of OnDemand renders: fields of the form in `context`, of the connection as names."""

JOB = """
find_port () { python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
create_passwd () ( set +o pipefail; tr -cd 'a-zA-Z0-9' < /dev/urandom | head -c "$1" )
export host port
host=127.0.0.1
source before.sh
echo "$port $password" > connection
exec ./script.sh
"""
"""The batch script of OnDemand's template `basic`, shortened."""

SIDEBAR = """
import asyncio, dask.config
from dask_labextension.manager import make_cluster
dask.config.set({"labextension.factory.kwargs.gpus_per_job": 0})  # no GPUs here
cluster, _ = await make_cluster({})
while not cluster.scheduler_info["workers"]:
    await asyncio.sleep(0.2)
print(type(cluster).__name__, len(cluster.scheduler_info["workers"]))
await cluster.close()
"""


def rendered(name: str, **values: object) -> str:
    """Return a file of the app as OnDemand renders it."""
    ruby = shutil.which("ruby")
    if ruby is None:
        unavailable("ruby", "it is not installed")
    done = subprocess.run(
        [str(ruby), "-e", RENDER, json.dumps(values)],
        input=(ONDEMAND / name).read_text(), text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_form_of_ondemand_declares_what_its_script_uses() -> None:
    yaml = YAML(typ="safe")
    form = yaml.load((ONDEMAND / "form.yml").read_text())
    own = [name for name in form["form"] if not name.startswith("bc_")]
    assert sorted(own) == sorted(form["attributes"])
    assert yaml.load((ONDEMAND / "manifest.yml").read_text())["role"] == "batch_connect"
    assert yaml.load(rendered("submit.yml.erb"))["batch_connect"] == {"template": "basic"}
    view = rendered("view.html.erb", host="node7", port=4321, password="secret")
    assert 'action="/node/node7/4321/login"' in view and 'value="secret"' in view
    used = set(re.findall(r"context\.(\w+)", (ONDEMAND / "template" / "script.sh.erb").read_text()))
    assert used <= set(form["form"])


@pytest.mark.parametrize("value", ["$(touch x)", "a'b", "a b; touch x", '"', "`touch x`"])
def test_fields_of_the_form_are_data(value: str, tmp_path: Path) -> None:
    fields = {"environment": value, "site": value, "gpu_walltime": value, "bc_account": value}
    script = rendered("template/script.sh.erb", gpus="1", **fields)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    (line,) = [line for line in script.splitlines() if "FACTORY__KWARGS" in line]
    name = line.removeprefix("export ").partition("=")[0]
    code = f'{line}\nprintf %s "${name}"'
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(found.stdout) == {"site": value, "walltime": value, "account": value}
    assert not list(tmp_path.iterdir())


def test_a_job_of_ondemand_serves_jupyterlab_and_starts_a_cluster(local: Cli) -> None:
    """The job serves JupyterLab; the button of dask-labextension, in a kernel, starts a cluster."""
    for library in ("jupyterlab", "ipykernel", "dask_labextension"):
        need_library(library)
    allow_root(local)
    (local.home / "jobs" / "bin").mkdir(parents=True)
    folder = local.home / "jobs"
    path = f"{Path(local.command).parent}:{local.env['PATH']}"
    (folder / "bin" / "activate").write_text(f"export PATH={shlex.quote(path)}\n")
    fields = {"environment": str(folder), "site": "local", "gpu_walltime": "1h", "bc_account": ""}
    for name in ("before.sh", "script.sh"):
        script = folder / name
        script.write_text(rendered(f"template/{name}.erb", gpus="1", **fields))
        script.chmod(0o700)
    # Dask warns where another test has the usual port of a dashboard.
    env = {**local.env, "PATH": path, "PYTHONWARNINGS": "ignore:Port"}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(["bash", "-c", JOB], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        until(lambda: "is running at" in (folder / "log").read_text(), 60, every=1)
        port, password = (folder / "connection").read_text().split()
        assert password not in (folder / "log").read_text()
        base = f"127.0.0.1:{port}/node/127.0.0.1/{port}"
        login = urllib.request.Request(
            f"http://{base}/login?next=/node/127.0.0.1/{port}/api/status",
            data=f"password={password}".encode(),
            headers={"Origin": "https://portal.example.org"},
        )
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"kernels" in opener.open(login, timeout=patience(30)).read()
        server = JupyterServer(base, f"token={password}")
        output = asyncio.run(asyncio.wait_for(server.execute(SIDEBAR), patience(90)))
        assert output == "GPUJobQueueCluster 1\n"
        server.request("api/shutdown")
        assert job.wait(patience(60)) == 0
    finally:
        job.kill()
        job.wait()
