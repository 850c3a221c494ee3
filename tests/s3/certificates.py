"""A private certificate authority, and a certificate of it for 127.0.0.1, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tls:
    """What the two ends need."""

    ca: Path
    """The authority's certificate, as `ca_bundle` names it."""
    server: ssl.SSLContext


def make_tls(home: Path) -> Tls:
    """Keys and certificates in a directory; valid for a day."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=home, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "1",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    openssl(*new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (home / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(
        "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "server.pem", "-days", "1", "-extfile", "extensions",
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "server.pem", home / "server.key")
    return Tls(home / "ca.pem", context)
