"""TLS between commands, coordinator and agents, each known by a certificate; `authority` makes them."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from everstep.errors import UserError


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
    """The coordinator would hang up without a word: TLS 1.3 looks at it after the handshake. A node without
    cryptography hears that much.
    """
    try:
        from cryptography import x509
    except ImportError:
        return
    try:
        until = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError:  # of a form that OpenSSL has just read
        return
    if until < datetime.now(UTC):
        raise UserError(
            f"the certificate {path} expired on {until:%Y-%m-%d}; make another with everstep ca issue."
        )


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
