"""Make a cluster's folder and write its files from this side of the batch scheduler.

The files in it are documented in `gpujobs.injob`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..errors import GpujobsError, InputError
from ..injob import archive
from ..injob.folder import (
    AFTER,
    RESERVE,
    RESERVE_BYTES,
    TRANSPORT,
    DamagedError,
    Ended,
    EndKind,
    Folder,
    modified_at,
    open_file,
)
from ..injob.names import ARCHIVE, CERTIFICATE, KEY
from ..injob.transport import Choice
from ..text import clean
from .files import folder_problem, logger, private_folder, write_atomically, write_new

# -- the certificate of a cluster ------------------------------------------------------------------
# distributed verifies the chain and not the host name, so the same pair serves the dask
# scheduler, all workers and all clients.


VALIDITY = timedelta(days=366)
"""Longer than the longest wait in a queue and walltime together."""


_UNUSED = (
    "crl_sign",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


def make_certificate(folder: Path) -> None:
    """Write a new key and its certificate into ``folder``, both with mode 0600. Takes 10 ms."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpujobs")])
    now = datetime.now(UTC)
    subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key)
    unused = dict.fromkeys(_UNUSED, False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, **unused)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of nodes differ
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gpujobs")]), critical=False)
        .add_extension(subject_key, critical=False)
        .add_extension(authority_key, critical=False)  # required by the checks of Python 3.13
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    write_new(folder / KEY, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    write_new(folder / CERTIFICATE, builder.sign(key, hashes.SHA256()).public_bytes(pem))


# -- the folder ------------------------------------------------------------------------------------
SPEC = "spec.json"
TAIL_BYTES = 65536
OWNER_TIMEOUT = 60.0
"""Seconds without a new lease after which the owner of a cluster is gone."""


# -- make ------------------------------------------------------------------------------------------
def make(folder: Path, *, encrypted: bool, logs: Path | None = None) -> None:
    """Make the folder of a new cluster, mode 0700, with its certificate and `injob`.

    ``logs``: a folder elsewhere; the logs are then in a folder of the cluster's name inside it.
    """
    private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        for name in ("jobs", "scripts"):
            (folder / name).mkdir(mode=0o700)
        _make_logs(folder, logs)
        write_new(folder / ARCHIVE, archive.build())
        write_new(folder / RESERVE, os.urandom(RESERVE_BYTES))  # no file system compresses it away
        if encrypted:
            make_certificate(folder)
    except FileExistsError:
        raise InputError(f"{folder} exists already") from None
    except OSError as error:
        remove(folder)
        message = f"{folder} cannot be used: {error.strerror}"
        raise GpujobsError(message, hint="nothing was submitted") from None


def _make_logs(folder: Path, logs: Path | None) -> None:
    if logs is None:
        (folder / "logs").mkdir(mode=0o700)
        return
    elsewhere = logs.absolute() / folder.name
    elsewhere.mkdir(mode=0o700, parents=True)
    (folder / "logs").symlink_to(elsewhere)


def remove(folder: Path) -> None:
    """Remove the folder of a cluster whose submission failed."""
    shutil.rmtree(folder, ignore_errors=True)


# -- write -----------------------------------------------------------------------------------------
def end(folder: Path, kind: EndKind, exit_code: int, reason: str) -> None:
    """Write `ended`, unless it exists already. Every job that finds it exits."""
    if problem := folder_problem(folder):
        logger.warning("%s; its jobs are not asked to exit", problem)
        return
    try:
        Folder(str(folder)).try_to_end(Ended(kind, exit_code, reason))
    except OSError:  # the folder is gone
        return


def write_transport(folder: Path, transport: Choice) -> None:
    """Write the protocol that this side has chosen."""
    write_atomically(folder / TRANSPORT, json.dumps(transport.json()))


def renew_lease(folder: Path) -> None:
    """Write the owner's sign of life."""
    write_atomically(folder / "lease", f"{time.time()}\n")


def write_after(folder: Path, cluster: str, other: Path, *, any_end: bool) -> None:
    """Write that this cluster starts after the end of ``cluster``, whose folder is ``other``."""
    value = {"cluster": cluster, "folder": str(other), "any_end": any_end}
    write_atomically(folder / AFTER, json.dumps(value))


def ask_to_leave(folder: Path, number: int) -> None:
    """Ask the workers of a running job to transfer their data and exit."""
    write_atomically(folder / f"leave-{number}", "")


def write_job_ids(folder: Path, suffix: str, targets: Iterable[str]) -> None:
    """Write ids with which the head cancels waiting jobs into ``job-ids`` with this suffix."""
    write_atomically(folder / f"job-ids{suffix}", "".join(f"{target}\n" for target in targets))


# -- read ------------------------------------------------------------------------------------------
def has_owner(folder: Path) -> bool:
    """Return whether the process that owns the cluster lives."""
    return silence(folder) < OWNER_TIMEOUT


def silence(folder: Path) -> float:
    """Return how many seconds ago the process that owns the cluster last wrote its lease.

    Both times are those of the file server, since this host may be another login node. Infinity if
    there is no lease.
    """
    try:
        return _now_at(folder) - modified_at(folder / "lease")
    except OSError:
        return float("inf")


def _now_at(folder: Path) -> float:
    """Return the time of the file server, or that of this host if nothing can be written there."""
    now = folder / f"now-{secrets.token_hex(4)}"
    try:
        now.touch(mode=0o600)
        written = modified_at(now)
        now.unlink()
    except OSError:
        return time.time()
    return written


def tail(folder: Path, log: str, lines: int = 10) -> list[str]:
    """Return the last lines of a log of a cluster, without control characters.

    At most 64 KiB are read, and nothing of a folder that others can change.
    """
    path = folder / "logs" / log
    if folder_problem(folder):
        return []
    try:
        with open_file(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except (OSError, DamagedError):
        return []
    return [clean(line) for line in text.splitlines()[-lines:]]
