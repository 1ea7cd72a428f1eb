"""A stand-in for distributed-ucxx, which needs 200 MB of libraries: TCP under the name ``ucxx``.

Like the original it listens on all interfaces, whatever the host of its address, and moves large blocks in no time: those
of an exchange are not sent at all. Outside of dask's processes they wait for a timer if nothing polls, as in UCXX 0.52
(measured on four H200).
``FAKE_UCXX=slow`` delays each of their messages, ``FAKE_UCXX=hangs`` never sends one, ``FAKE_UCXX=fails`` raises an error;
with ``FAKE_UCXX=after 3`` the first one waits until three processes of the job's workers have initialised UCX.
"""

import asyncio
import errno
import os
import sys
from pathlib import Path

import dask.config
from distributed.comm.tcp import TCP, TCPBackend, TCPConnector, TCPListener

from .ucxx import INITIALISED, init_once


class config:
    """What dask-cuda needs of the module of this name."""

    @staticmethod
    def setup_config():
        dask.config.update_defaults({"distributed-ucxx": {}})


class UCXX(TCP):
    async def write(self, msg, **options):
        if isinstance(msg, dict) and "blocks" in msg:  # of an exchange
            polls = "try-ucxx" not in sys.argv or os.environ.get("UCXPY_PROGRESS_MODE") == "polling"
            timer = 0 if polls else 1
            how, _, number = os.environ.get("FAKE_UCXX", "").partition(" ")
            if how == "fails":
                raise OSError("no route between GPUs")
            while how == "after" and _initialised() < int(number):
                await asyncio.sleep(0.1)
            delay = {"slow": 6, "hangs": 3600}.get(how, timer)
            await asyncio.sleep(delay)
            msg = {**msg, "blocks": []}
        return await super().write(msg, **options)


def _initialised():
    log = Path(os.environ["GPUJOBS_FOLDER"], "logs", "job-0.log")
    return log.read_text().count(INITIALISED)


class UCXXConnector(TCPConnector):
    prefix = "ucxx://"
    comm_class = UCXX


class UCXXBusyError(Exception):
    """The error of ucxx if a port is in use."""


class UCXXListener(TCPListener):
    prefix = "ucxx://"
    comm_class = UCXX

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._input_port = self.port  # the original has the wanted port under this name

    async def start(self):
        init_once()
        wanted, self.ip = self.ip, "0.0.0.0"
        self.port = self._input_port
        try:
            await super().start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise UCXXBusyError("Device is busy") from None
        self.bound_address = (wanted, self.bound_address[1])


class UCXXBackend(TCPBackend):
    _connector_class = UCXXConnector
    _listener_class = UCXXListener
