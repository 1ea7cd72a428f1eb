"""One key and one self-signed certificate for a cluster. distributed checks the chain, not the host name."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

VALID = timedelta(days=366)
"""Longer than any queue and walltime together."""

CERTIFICATE, KEY = "tls-cert.pem", "tls-key.pem"


def make(folder: Path) -> None:
    """Write key and certificate into ``folder``, both 0600 and both new. Takes about 10 ms."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpujobs")])
    now = datetime.now(UTC)
    subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = dict.fromkeys(
        (
            "crl_sign",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of nodes differ
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gpujobs")]), critical=False)
        .add_extension(subject_key, critical=False)
        # Python 3.13 checks strictly and wants this one too.
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key),
            critical=False,
        )
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_new(folder / KEY, private)
    write_new(folder / CERTIFICATE, builder.sign(key, hashes.SHA256()).public_bytes(pem))


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, readable by its owner alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
