"""The certificate of a cluster: made at submission, or by the head of a job folder.

distributed verifies the chain and not the host name, so the same pair serves the dask scheduler,
all workers and all clients.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from .children import run_command
from .names import CERTIFICATE, KEY

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

VALIDITY = timedelta(days=366)
"""Longer than the longest wait in a queue and walltime together."""
EARLIER = timedelta(hours=1)
"""Clocks of nodes differ."""
_UNUSED = (
    "crl_sign", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "encipher_only", "decipher_only",
)  # fmt: skip


def make_certificate(folder: Path) -> None:
    """Write a new key and its certificate into ``folder``, both with mode 0600.

    Raises FileExistsError, another OSError, or LookupError if this host has no software for it.
    """
    with tempfile.TemporaryDirectory(prefix="tls-", dir=folder) as temporary:
        try:
            _make_with_cryptography(Path(temporary))
        except ImportError:
            _make_with_openssl(Path(temporary))
        for name in (KEY, CERTIFICATE):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(folder / name, flags, 0o600), "wb") as file:
                file.write((Path(temporary) / name).read_bytes())


def _make_with_cryptography(folder: Path) -> None:
    """Write both files; takes 10 ms."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / KEY).write_bytes(private)
    (folder / CERTIFICATE).write_bytes(_self_signed(key).public_bytes(pem))


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return the certificate of ``key``, which authority and processes have alike."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpujobs")])
    now = datetime.now(timezone.utc)
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
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gpujobs")]), critical=False)
        .add_extension(subject_key, critical=False)
        .add_extension(authority_key, critical=False)  # required by the checks of Python 3.13
    )
    return builder.sign(key, hashes.SHA256())


_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = gpujobs
[ca]
default_ca = own
[own]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, digitalSignature, keyCertSign
subjectAltName = DNS:gpujobs
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
"""
_REQUEST = (
    "openssl", "req", "-config", "config", "-new", "-newkey", "ec",
    "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", KEY, "-out", "request",
)  # fmt: skip
_SIGN = (  # `openssl req -x509` cannot sign for a time before now
    "openssl", "ca", "-config", "config", "-selfsign", "-batch", "-notext", "-keyfile", KEY,
    "-in", "request", "-out", CERTIFICATE,
)  # fmt: skip
_TIMEOUT = 30.0


def _make_with_openssl(folder: Path) -> None:
    """Do the same for a Python without cryptography."""
    (folder / "config").write_text(_CONFIG, encoding="utf-8")
    (folder / "index").touch()
    serial = int.from_bytes(os.urandom(8), "big") | 1 << 62
    (folder / "serial").write_text(f"{serial:X}\n", encoding="utf-8")
    now = datetime.now(timezone.utc)
    begin, end = (f"{time:%Y%m%d%H%M%SZ}" for time in (now - EARLIER, now + VALIDITY))
    for argv in ([*_REQUEST], [*_SIGN, "-startdate", begin, "-enddate", end]):
        problem = run_command(argv, _TIMEOUT, folder)
    if not (folder / CERTIFICATE).exists():
        why = f": {problem}" if problem else ""
        message = f"{sys.executable} has no package cryptography, and openssl does not work{why}"
        raise LookupError(f"the certificate of the cluster cannot be made in this job: {message}")
