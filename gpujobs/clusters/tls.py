"""One key and one self-signed certificate per cluster.

distributed verifies the chain and not the host name, so the same pair serves the dask scheduler,
all workers and all clients.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..injob.names import CERTIFICATE, KEY
from .files import write_new

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


def make(folder: Path) -> None:
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
