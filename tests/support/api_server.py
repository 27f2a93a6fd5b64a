"""A real API server over a real etcd, alone on loopback: no controllers, no nodes.

For what the API server itself decides: schemas, CEL, defaults, pruning, rights. Processes die with
the caller; nothing is kept.
"""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 60.0
TOKEN = "admin-of-a-test"
Tree = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    code: int
    tree: Tree


class ApiServer:
    """Calls to a running one, as cluster administrator or as somebody who is impersonated."""

    def __init__(self, client: httpx.Client, authority: Path) -> None:
        """`client`: with address and token; `authority`: who signed its certificate."""
        self._client = client
        self.authority = authority

    def call(
        self,
        method: str,
        path: str,
        body: Tree | None = None,
        accept: str = "application/json",
        **query: str,
    ) -> Answer:
        """One call; what is refused is an answer too."""
        headers = {"Content-Type": "application/json", "Accept": accept}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        reply = self._client.request(method, path, json=body, params=query, headers=headers)
        try:
            return Answer(reply.status_code, reply.json())
        except ValueError:
            return Answer(reply.status_code, {"message": reply.text})

    def must(self, method: str, path: str, body: Tree | None = None, **query: str) -> Tree:
        """One call that has to work."""
        answer = self.call(method, path, body, **query)
        assert answer.code < 300, answer.tree
        return answer.tree

    @property
    def address(self) -> str:
        """`https://127.0.0.1:<port>`."""
        return str(self._client.base_url)

    def kubeconfig(self, file: Path, token: str = TOKEN) -> Path:
        """Write one for clients of other kinds; by default as administrator."""
        cluster = {"server": self.address, "certificate-authority": str(self.authority)}
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        file.write_text(json.dumps(tree))
        return file

    def until(
        self, true: Callable[[], bool], what: str, words: Callable[[], str] = lambda: ""
    ) -> None:
        """Wait, bounded; `words`: what to tell besides when the time is over."""
        deadline = time.monotonic() + START_SECONDS
        while not true():
            in_time = time.monotonic() < deadline
            assert in_time, f"not within {START_SECONDS:g} s: {what}\n{words()}"
            time.sleep(0.1)


@contextmanager
def running(programs: Path, folder: Path) -> Iterator[ApiServer]:
    """Start etcd and kube-apiserver from `programs`; state in `folder`."""
    client_port, peer_port, port = _free_ports(3)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        _start(stack, folder, _etcd(programs, folder, client_port, peer_port))
        _start(stack, folder, _server(programs, folder, client_port, port))
        authority = folder / "certificates" / "apiserver.crt"
        _wait_for(authority)
        client = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            verify=ssl.create_default_context(cafile=str(authority)),
            timeout=30,
        )
        stack.enter_context(client)
        _wait(client, folder)
        yield ApiServer(client, authority)


def _etcd(programs: Path, folder: Path, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(programs / "etcd"),
        f"--data-dir={folder / 'etcd-data'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _server(programs: Path, folder: Path, etcd_port: int, port: int) -> list[str]:
    tokens, key = folder / "tokens.csv", folder / "service-account.key"
    tokens.write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)],
        check=True,
        capture_output=True,
    )
    return [
        str(programs / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        "--service-cluster-ip-range=10.96.0.0/24",
        "--authorization-mode=RBAC",
        f"--token-auth-file={tokens}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
    ]


def _start(stack: ExitStack, folder: Path, command: list[str]) -> None:
    name = Path(command[0]).name
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists() or not file.with_suffix(".key").exists():
        assert time.monotonic() < deadline, f"the API server made no certificate {file}"
        time.sleep(0.05)


def _wait(client: httpx.Client, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    last = ""
    while time.monotonic() < deadline:
        try:
            reply = client.get("/readyz")
            last = reply.text
            if reply.status_code == 200:
                return
        except httpx.TransportError as error:
            last = str(error)
        time.sleep(0.1)
    log = (folder / "kube-apiserver.log").read_text(errors="replace")[-2000:]
    raise AssertionError(f"the API server is not ready: {last}\n{log}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]
