"""A small certificate authority for one cluster, by `cryptography` (extra `encrypt`).

    DIR/ca.pem DIR/ca.key          keep the key offline, or with the coordinator's operator
    OUT/NAME/{ca,cert,key}.pem     what one machine or one person needs; `--tls OUT/NAME`

A certificate's organizational unit is its role and its common name the name, so the coordinator knows a
caller by its certificate alone (`access.Credentials.of_certificate`). The one of the coordinator has the
names and addresses it is called by, and no role: it opens nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID as Use
from cryptography.x509.oid import NameOID

from everstep.errors import UserError
from everstep.server.access import Role, write_private

_CLOCKS_DIFFER = timedelta(minutes=5)


def make_authority(folder: Path, *, days: int) -> None:
    if (folder / "ca.key").exists():
        raise UserError(f"{folder} has a CA already; issue certificates with it, or give another folder.")
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("everstep CA")
    certificate = _certificate(name, name, key, days, is_ca=True)
    write_private(folder / "ca.key", _private(key))
    _write(folder / "ca.pem", _signed(certificate, key))


def issue(
    authority: Path, out: Path, *, role: Role | None, name: str, hosts: Sequence[str], days: int
) -> None:
    """Into the folder `out`. `role` None: the coordinator's."""
    for file in ("ca.pem", "ca.key"):
        if not (authority / file).is_file():
            raise UserError(f"{authority / file} not found; make a CA with everstep ca init, or give --dir.")
    try:
        above = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
        signer = load_pem_private_key((authority / "ca.key").read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"the CA in {authority} cannot be used: {error}.") from None
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise UserError(f"{authority / 'ca.key'} is not a key of everstep ca init; make a CA with it.")
    key = ec.generate_private_key(ec.SECP256R1())
    made = _certificate(_name(name, role), above.subject, key, days, is_ca=False)
    uses = [Use.CLIENT_AUTH] if role is not None else [Use.SERVER_AUTH, Use.CLIENT_AUTH]
    made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    made = made.add_extension(by, critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        made = made.add_extension(names, critical=False)
    out.mkdir(parents=True, exist_ok=True)
    write_private(out / "key.pem", _private(key))
    _write(out / "cert.pem", _signed(made, signer))
    _write(out / "ca.pem", (authority / "ca.pem").read_text())


def _name(name: str, role: Role | None = None) -> x509.Name:
    unit = [] if role is None else [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, str(role))]
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "everstep")
    return x509.Name([organization, *unit, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, is_ca: bool
) -> x509.CertificateBuilder:
    """A CA signs certificates, the others handshakes."""
    now, public = datetime.now(UTC), key.public_key()
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    none = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **none)
    made = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    made = made.not_valid_before(now - _CLOCKS_DIFFER).not_valid_after(now + timedelta(days=days))
    made = made.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    made = made.add_extension(usage, critical=True)
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _signed(made: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> str:
    return made.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()


def _private(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not (host.isascii() and host and all(c.isalnum() or c in ".-*_" for c in host)):
            raise UserError(f"--host {host!r} is neither a name nor an address.") from None
        return x509.DNSName(host)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
