"""A notebook that runs headless: Voila executes it, and serves its live output as a page."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .processes import free_ports, patience, until

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """Write a notebook with these cells of Python code."""
    code = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "source": text,
        }
        for number, text in enumerate(cells)
    ]
    document = {
        "cells": code,
        "metadata": {"kernelspec": KERNEL},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(document))


@contextlib.contextmanager
def serve(path: Path, env: Mapping[str, str], theme: str) -> Iterator[str]:
    """Serve a notebook, which runs when the page is opened; yield the address of the page.

    At the end its kernel is asked to exit.
    """
    port = free_ports(1)[0]
    options = ["--no-browser", f"--port={port}", f"--theme={theme}", "--show_tracebacks=True"]
    log = path.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "voila", *options, str(path)],
            env=dict(env),
            cwd=path.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: _listens(port), patience(30), f"Voila: {log}")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        try:
            process.wait(patience(30))
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
