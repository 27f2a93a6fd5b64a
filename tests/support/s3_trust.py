"""HTTPS before a real S3 server, with an authority of its own, and a giver of keys that run out.

`TlsFront` ends TLS and passes the bytes on; `StsServer` answers AssumeRoleWithWebIdentity as AWS
and MinIO do, with the S3 server's real keys. Both live in threads and end with their `with`.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.s3 import S3Server

_COPY_BYTES = 256 << 10


@dataclass(frozen=True)
class Certificates:
    """An authority, and a server's certificate that it signed for 127.0.0.1."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """By the openssl program."""
    made = Certificates(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    new = ["req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    _openssl(
        folder,
        *(*new, "/CN=an authority for tests", "-x509", "-days", "2"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    _openssl(folder, *new, "/CN=127.0.0.1", "-keyout", "tls.key", "-out", "tls.csr")
    _openssl(
        folder,
        *("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "2"),
        *("-CAcreateserial", "-extfile", "san", "-out", "tls.crt"),
    )
    return made


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


class TlsFront:
    """`https://127.0.0.1:port` before a server that speaks plain HTTP."""

    def __init__(self, behind: tuple[str, int], certificates: Certificates) -> None:
        self._behind = behind
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> TlsFront:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(raw,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), raw:
            raw.settimeout(20)
            with (
                self._context.wrap_socket(raw, server_side=True) as outside,
                socket.create_connection(self._behind) as inside,
                self._known(outside, inside),
            ):
                outside.settimeout(None)
                back = threading.Thread(target=_copy, args=(inside, outside))
                back.start()
                _copy(outside, inside)
                back.join()

    @contextmanager
    def _known(self, *sockets: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.update(sockets)
        try:
            yield
        finally:
            with self._lock:
                self._open.difference_update(sockets)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_COPY_BYTES):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class StsServer:
    """Gives the S3 server's keys to whoever brings the token."""

    ROLE = "arn:aws:iam::1:role/checkpoints"
    TOKEN = "a-web-identity-token"

    def __init__(self, s3: S3Server, lives_seconds: float = 3600) -> None:
        self.asked = 0
        self.status = 0
        """Answer this instead."""
        self.lives_seconds = lives_seconds
        self._s3 = s3
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def env(self, folder: Path) -> dict[str, str]:
        """What EKS's webhook puts into a pod, and where the STS is."""
        token = folder / "web-identity-token"
        token.write_text(self.TOKEN)
        return {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_ROLE_ARN": self.ROLE,
            "AWS_ENDPOINT_URL_STS": self.endpoint,
        }

    def __enter__(self) -> StsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, query: dict[str, list[str]]) -> tuple[int, str]:
        self.asked += 1
        if self.status:
            return self.status, "<Error/>"
        wanted = ("AssumeRoleWithWebIdentity", self.TOKEN, self.ROLE)
        got = tuple(query.get(k, [""])[0] for k in ("Action", "WebIdentityToken", "RoleArn"))
        if got != wanted:
            return 403, "<Error/>"
        until = datetime.now(UTC) + timedelta(seconds=self.lives_seconds)
        return 200, _ANSWER.format(
            access=self._s3.access_key,
            secret=self._s3.secret_key,
            until=until.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        )


_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{access}</AccessKeyId>
<SecretAccessKey>{secret}</SecretAccessKey><SessionToken></SessionToken>
<Expiration>{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


def _handler(sts: StsServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, text = sts.answer(parse_qs(urlsplit(self.path).query) | parse_qs(body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
