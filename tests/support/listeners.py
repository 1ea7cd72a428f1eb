"""Listening sockets of processes, with the interface that each is bound to (Linux)."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, DONE = 4, 20, 0x301, 3
TCP_LISTEN = 10


class Listener(NamedTuple):
    """A listening TCP socket; ``interface`` is "" if it is bound to none."""

    host: str
    port: int
    interface: str
    inode: int

    @property
    def loopback_only(self) -> bool:
        """Whether only processes of this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback or self.interface == "lo"


def listeners_of(pids: Iterable[int]) -> dict[int, list[Listener]]:
    """Return the listeners of processes, by process; a socket of several counts for the first."""
    every = {item.inode: item for item in all_listeners()}
    return {
        pid: [found for inode in _inodes(pid) if (found := every.pop(inode, None))]
        for pid in sorted(pids)
    }


def all_listeners() -> Iterator[Listener]:
    """Yield the listening TCP sockets of this machine, as the kernel lists them.

    /proc/net/tcp does not have the interface.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
            query = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 0, 1 << TCP_LISTEN)
            header = struct.pack("=IHHII", 16 + len(query), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0)
            netlink.send(header + query)
            yield from _answers(netlink, family)


def _answers(netlink: socket.socket, family: int) -> Iterator[Listener]:
    while True:
        data = netlink.recv(2**18)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind != SOCK_DIAG_BY_FAMILY:
                assert kind == DONE, kind
                return
            yield _listener(data[16:length], family)
            data = data[(length + 3) & ~3 :]


def _listener(message: bytes, family: int) -> Listener:
    (port,) = struct.unpack_from("!H", message, 4)
    size = 4 if family == socket.AF_INET else 16
    host = socket.inet_ntop(family, message[8 : 8 + size])
    (index,) = struct.unpack_from("=I", message, 40)
    (inode,) = struct.unpack_from("=I", message, 68)
    return Listener(host, port, socket.if_indextoname(index) if index else "", inode)


def _inodes(pid: int) -> Iterator[int]:
    for path in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            link = str(path.readlink())
            if link.startswith("socket:["):
                yield int(link[8:-1])


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has ended
        return []
