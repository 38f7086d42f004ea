"""A certificate authority of one's own, certificates for server and nodes, and the keys by which nodes are known."""

# pyright: reportMissingImports=false

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from ..core.errors import BadInput

_YEARS = timedelta(days=825)  # the most that some systems accept of a server's certificate


class Authority:
    """Signs certificates. Its key stays with whoever runs the federation; everyone else has ca.crt alone."""

    def __init__(self, folder: Path):
        """The one in this folder, or a new one."""
        self.certificate_file = folder / "ca.crt"
        if self.certificate_file.exists():
            try:
                self.key: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
                self.certificate = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
            except (OSError, ValueError):
                raise BadInput(f"{folder} holds a damaged certificate authority; remove it for a new one") from None
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.key = _new_key()
        self.certificate = self._signed("fedlens authority", self.key, authority=True)
        _write_key(folder / "ca.key", self.key)
        self.certificate_file.write_bytes(_pem(self.certificate))

    def issue(self, certificate: Path, key: Path, hosts: Sequence[str]) -> None:
        """A certificate for a server that is reached under these names or addresses."""
        own = _new_key()
        signed = self._signed(hosts[0], own, hosts=hosts)
        _write_key(key, own)
        certificate.write_bytes(_pem(signed))

    def _signed(
        self, name: str, key: ec.EllipticCurvePrivateKey, *, hosts: Sequence[str] = (), authority: bool = False
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
        issuer = subject if authority else self.certificate.subject
        now = datetime.now(UTC)
        signing = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "encipher_only", "decipher_only"), False
        )
        usage |= {"digital_signature": True, "key_agreement": not authority}
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))  # clocks differ
            .not_valid_after(now + _YEARS)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=authority, crl_sign=authority, **usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signing), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA384())


def node_key(private: Path, public: Path) -> ec.EllipticCurvePublicKey:
    """The pair by which a node is known: an elliptic curve key in OpenSSH's format, as Flower wants it."""
    return _pair(_new_key(), private, public)


def coordinator_key(private: Path, public: Path) -> ed25519.Ed25519PublicKey:
    """The pair by which nodes know their server's questions."""
    return _pair(ed25519.Ed25519PrivateKey.generate(), private, public)


def _pair(key: Any, private: Path, public: Path) -> Any:
    ssh = serialization.PrivateFormat.OpenSSH
    _write_secret(private, key.private_bytes(serialization.Encoding.PEM, ssh, serialization.NoEncryption()))
    kind = serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, kind) + b"\n")
    return key.public_key()


def executor_secret(path: Path) -> None:
    """What a SuperNode asks of the process that takes its tasks: nobody else on the machine may answer for it."""
    if not path.exists():
        _write_secret(path, secrets.token_hex(32).encode())


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.PKCS8
    _write_secret(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _write_secret(path: Path, data: bytes) -> None:
    """Never readable by others, not even for a moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
