"""A small certificate authority for one cluster, made by the `openssl` command.

    DIR/ca.pem DIR/ca.key          keep the key offline, or with the coordinator's operator
    OUT/NAME/{ca,cert,key}.pem     what one machine or one person needs; `--tls OUT/NAME`

A certificate's organizational unit is its role and its common name the name, so the coordinator knows a
caller by its certificate alone (`access.Credentials.of_certificate`). The one of the coordinator has the
names and addresses it is called by, and no role: it opens nothing.
"""

from __future__ import annotations

import ipaddress
import secrets
import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from everstep.errors import UserError
from everstep.server.access import Role, write_private

SERVER = "coordinator"
CA_DAYS, DAYS = 3650, 365
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_NEW_KEY = ("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
_CONFIG = """[req]
distinguished_name=empty
prompt=no
x509_extensions=authority
[empty]
[authority]
basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign,cRLSign
subjectKeyIdentifier=hash
"""
_LEAF = """basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage={use}
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
"""


def make_authority(folder: Path, *, days: int = CA_DAYS) -> None:
    if (folder / "ca.key").exists():
        raise UserError(f"{folder} has a CA already; issue certificates with it, or give another folder.")
    key = _openssl(*_NEW_KEY)
    with tempfile.TemporaryDirectory() as scratch:
        held = Path(scratch) / "key"
        write_private(held, key)
        certificate = _openssl(*_request(held, "/O=everstep/CN=everstep CA"), "-x509", "-days", str(days))
    write_private(folder / "ca.key", key)
    _write(folder / "ca.pem", certificate)


def issue(
    authority: Path, out: Path, *, role: Role | None, name: str, hosts: Sequence[str], days: int = DAYS
) -> None:
    """Into the folder `out`. `role` None: the coordinator's."""
    for file in ("ca.pem", "ca.key"):
        if not (authority / file).is_file():
            raise UserError(f"{authority / file} not found; make a CA with everstep ca init, or give --dir.")
    use = "clientAuth" if role is not None else "serverAuth,clientAuth"
    unit = f"/OU={role}" if role is not None else ""
    key = _openssl(*_NEW_KEY)
    with tempfile.TemporaryDirectory() as scratch:
        held, request, extensions = (Path(scratch) / file for file in ("key", "request", "extensions"))
        write_private(held, key)
        names = "".join(f"subjectAltName={','.join(map(_alternative, hosts))}\n" for _ in hosts[:1])
        extensions.write_text(_LEAF.format(use=use) + names)
        request.write_text(_openssl(*_request(held, f"/O=everstep{unit}/CN={name}")))
        sign = ("x509", "-req", "-in", str(request), "-extfile", str(extensions), "-days", str(days))
        by = ("-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca.key"))
        certificate = _openssl(*sign, *by, "-set_serial", f"0x{secrets.token_hex(16)}", "-sha256")
    out.mkdir(parents=True, exist_ok=True)
    write_private(out / "key.pem", key)
    _write(out / "cert.pem", certificate)
    _write(out / "ca.pem", (authority / "ca.pem").read_text())


def _request(key: Path, subject: str) -> list[str]:
    config = key.with_name("config")
    config.write_text(_CONFIG)
    return ["req", "-new", "-config", str(config), "-key", str(key), "-subj", subject]


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not host or any(not (c.isalnum() or c in ".-*_") for c in host):
            raise UserError(f"--host {host!r} is neither a name nor an address.") from None
        return f"DNS:{host}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def _openssl(*words: str) -> str:
    """What it prints; keys and certificates come on stdout."""
    try:
        done = subprocess.run(["openssl", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("the openssl command is not installed; install it to make certificates.") from None
    if done.returncode:
        raise UserError(f"openssl {words[0]} failed: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout


# ------------------------------------------------------------------ TLS contexts


def client_context(place: Path | None) -> ssl.SSLContext:
    """`place`: a CA certificate, or a folder that `issue` wrote; None: the system's authorities."""
    try:
        if place is None or not place.is_dir():
            return ssl.create_default_context(cafile=None if place is None else str(place))
        context = ssl.create_default_context(cafile=str(place / "ca.pem"))
        if (place / "cert.pem").exists():
            context.load_cert_chain(place / "cert.pem", place / "key.pem")
            _refuse_expired(place / "cert.pem")
        return context
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"--tls {place} cannot be used: {getattr(error, 'strerror', None) or error}."
        ) from None


def _refuse_expired(path: Path) -> None:
    """The coordinator would hang up without a word: TLS 1.3 looks at it after the handshake."""
    pem = path.read_text()
    if _BEGIN in pem and (until := expires_at(pem)) < datetime.now(UTC):
        raise UserError(
            f"the certificate {path} expired on {until:%Y-%m-%d}; make another with everstep ca issue."
        )


def expires_at(pem: str) -> datetime:
    """When the first certificate of the file ends. Python has no function for that, and nodes no openssl."""
    first = pem[pem.index(_BEGIN) : pem.index(_END) + len(_END)]
    [(_, certificate)] = _der(ssl.PEM_cert_to_DER_cert(first))
    fields = [value for tag, value in _der(_der(certificate)[0][1]) if tag != 0xA0]  # without the version
    _, (tag, text) = _der(fields[3])  # after serial number, algorithm and issuer: from when, until when
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC)


def _der(data: bytes) -> list[tuple[int, bytes]]:
    """The values that follow each other, with their tags."""
    found = []
    while data:
        tag, length, begin = data[0], data[1], 2
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(data[2:begin], "big")
        found.append((tag, data[begin : begin + length]))
        data = data[begin + length :]
    return found


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """A caller that shows a certificate of `client_ca` is known by it; one without needs a token."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(cafile=client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (cert, key, client_ca) if file)
        raise UserError(f"the TLS files {files} cannot be used: {error}.") from None
    return context
