"""Makes certificates for a server and keys for nodes.

Make each node's key on that node: a private key should never travel. Where the sites share an
authority already, let it sign the server's certificate instead.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Certificates:
    """The files that TLS needs."""

    authority: Path  # what nodes trust
    server: Path  # what the server shows
    key: Path  # what the server keeps


def make_certificates(folder: Path, hosts: Sequence[str] = LOCAL, days: int = 7) -> Certificates:
    """Make an authority and a server's certificate signed by it; the authority's key is not kept.

    Args:
        folder: where the three files go.
        hosts: the names and addresses by which nodes reach the server.
        days: how long the certificates are valid. A federation on one machine is short-lived.
    """
    files = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = _key()
    server_key = _key()
    ca_name = _name("fedbasin local authority")
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = _certificate(ca_name, ca_name, ca_key.public_key(), constraints, days).sign(
        ca_key, hashes.SHA384()
    )
    places = [_place(host) for host in hosts]
    end = x509.BasicConstraints(ca=False, path_length=None)
    server = (
        _certificate(_name(hosts[0]), ca_name, server_key.public_key(), end, days)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    files.authority.write_bytes(ca.public_bytes(pem))
    files.server.write_bytes(server.public_bytes(pem))
    _write_secret(files.key, server_key, serialization.PrivateFormat.PKCS8)
    return files


def make_node_key(path: Path) -> Path:
    """Make the private and the public key of one node; return the path of the public one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _key()
    _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
    public = path.with_name(path.name + ".pub")
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + b"\n"
    )
    return public


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_secret(path: Path, key: ec.EllipticCurvePrivateKey, form: Any) -> None:
    """Write a private key to a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _place(host: str) -> x509.GeneralName:
    """Return a name or an address as a certificate states it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: Any,
    constraints: x509.BasicConstraints,
    days: int,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(constraints, critical=True)
    )
