"""Listeners in the range of ports that a site opens between its nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpujobs.injob.network import first_free, port_range

from ..support.cli import ROOT
from ..support.processes import free_ports
from .support import SLURM, error_of, made_plan

LISTEN = """
import asyncio, json, sys
from distributed.comm import listen
from gpujobs.injob.network import limit, port_range
from tornado.httpserver import HTTPServer

async def main():
    limit(port_range(sys.argv[1]))
    limit(port_range(sys.argv[1]))  # a second preload
    listeners = [await listen(f"{name}://0.0.0.0:0", print) for name in ("tcp", "ws", "tcp")]
    found = [int(one.contact_address.rpartition(":")[2]) for one in listeners]
    local = await listen("tcp://127.0.0.1:0", print)
    local = int(local.contact_address.rpartition(":")[2])
    try:
        HTTPServer(print).listen(0)
    except OSError as error:
        print(json.dumps({"found": sorted(found), "local": local, "error": str(error)}))

asyncio.run(main())
"""


UCXX = """
import asyncio, json, sys
from distributed.comm import connect, listen
from gpujobs.injob.network import limit, port_range
from distributed.protocol.serialize import to_serialize

async def answer(comm):
    await comm.write({"got": await comm.read()})

async def main():
    limit(port_range(sys.argv[1]))
    limit(port_range(sys.argv[1]))
    found, problem = [], ""
    try:
        for _ in range(5):
            found.append(await listen("ucxx://127.0.0.1:0", answer))
    except OSError as error:
        problem = str(error)
    ports = [int(one.contact_address.rpartition(":")[2]) for one in found]
    comm = await connect(found[0].contact_address)
    await comm.write("x")
    got = (await comm.read())["got"]
    found[0].stop()
    await asyncio.sleep(0.1)
    again = await listen(f"ucxx://127.0.0.1:{ports[0]}", answer)  # a port that was asked for
    again = int(again.contact_address.rpartition(":")[2])
    print(json.dumps({"ports": ports, "error": problem, "got": got, "again": again}))

asyncio.run(main())
"""


def test_listeners_of_ucxx_have_ports_of_the_range() -> None:
    """The stand-in fails like ucxx if a port is in use, and listens on all interfaces."""
    ports = free_range(3)
    with socket.socket() as other:  # which another process has taken
        other.bind(("", ports[1]))
        other.listen()
        text = f"{ports[0]}-{ports[-1]}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "fakes" / "ucxx")}
        argv = [sys.executable, "-c", UCXX, text]
        done = subprocess.run(argv, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found["ports"]) == [ports[0], ports[2]]
    assert found["error"] == f"[Errno 98] no port is free of {text} (`network.ports` of the site)"
    assert found["got"] == "x"
    assert found["again"] == found["ports"][0]


def free_range(count: int) -> range:
    """Return ports in a row that nothing listens on."""
    for first in free_ports(50):
        ports = range(first, first + count)
        if first + count < 65536 and all(first_free(range(port, port + 1)) for port in ports):
            return ports
    raise AssertionError("no free ports in a row")


def test_all_listeners_have_ports_of_the_range() -> None:
    ports = free_range(3)
    text = f"{ports[0]}-{ports[-1]}"
    done = subprocess.run([sys.executable, "-c", LISTEN, text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["found"] == list(ports)
    assert found["local"] not in ports
    assert found["error"] == f"[Errno 98] no port is free of {text} (`network.ports` of the site)"


def test_a_range_without_a_free_port_is_an_error() -> None:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        port = own.getsockname()[1]
        with pytest.raises(OSError, match="no port is free"):
            first_free(range(port, port + 1), "127.0.0.1")
    assert port_range("8000-8002") == range(8000, 8003)


@pytest.mark.parametrize("text", ["8000", "8000-", "80-90", "9000-8000", "8000-70000"])
def test_a_range_that_is_none_is_refused(home: Path, text: str) -> None:
    (home / "s.yaml").write_text(f"{SLURM}network: {{ports: '{text}'}}\n")
    assert "`network.ports`" in error_of(home, {"gpus": 1})


def test_too_few_ports_for_the_workers_of_a_node_are_refused(home: Path) -> None:
    (home / "s.yaml").write_text(f"{SLURM}network: {{ports: 8000-8007}}\n")
    message = error_of(home, {"gpus": 4})
    assert "4 workers on a node and the dask scheduler need 9 ports" in message
    assert "s.yaml:" in message and "`network.ports` has 8" in message
    assert made_plan(home, {"gpus": 3}).groups[0].shape.workers == 3
