"""The examples of notebooks, on this machine: kernels, a Jupyter server, and dask-labextension are real."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ..conftest import need_library
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
    done = local("submit", "examples/notebook/profile.yaml", "--wait", *CPU)
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


def test_dask_labextension(local: Cli) -> None:
    need_library("dask_labextension")
    config = local.home / ".config" / "dask"
    config.mkdir(parents=True)
    text = (NOTEBOOK / "labextension.yaml").read_text()
    assert "gpus_per_job: 1" in text
    (config / "labextension.yaml").write_text(text.replace("gpus_per_job: 1", "gpus_per_job: 0"))
    done = local.python_run(LABEXTENSION)
    assert (done.returncode, done.stdout) == (0, "1 2 1 0\n"), done.stderr


KERNEL = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(1)
    print(client.submit(sum, [1, 2]).result(), "of", len(client.scheduler_info()["workers"]), "worker")
"""


class JupyterServer:
    """The REST API of a Jupyter server, at the address that it prints."""

    def __init__(self, address: str) -> None:
        self.host, self.token = urlsplit(address).netloc, urlsplit(address).query

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


def test_jupyter_in_the_head(local: Cli) -> None:
    """A kernel of the server that `run` starts connects to the cluster without arguments."""
    need_library("jupyterlab")
    need_library("ipykernel")
    settings = local.home / ".jupyter"
    settings.mkdir()
    root = {"ServerApp": {"allow_root": True}}  # the tests may run as root
    (settings / "jupyter_server_config.json").write_text(json.dumps(root))
    bin_folder = Path(local.command).parent
    done = local(
        "submit",
        "examples/notebook/jupyter.yaml",
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
    server = JupyterServer(addresses[0])
    limit = patience(60)
    output = asyncio.run(asyncio.wait_for(server.execute(KERNEL), limit))
    assert output == "3 of 1 worker\n"
    server.request("api/shutdown")  # File, Shut Down
    until(lambda: local.status(cluster)["state"] != "RUNNING", 60, every=1)
    assert local.status(cluster)["state"] == "DONE"
