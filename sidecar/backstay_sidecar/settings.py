"""What one sidecar process is told at start, read once by `main` from arguments and environment.

Frozen afterwards. Reads no clock and opens no socket.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from backstay_protocol.errors import ProtocolError
from backstay_protocol.loglines import FORMATS
from backstay_protocol.names import (
    ENV_EXIT_WITH_PARENT,
    ENV_LOG_FORMAT,
    ENV_NODE,
    ENV_POD,
    ENV_POD_IP,
    ENV_REPLICA,
    ENV_S3_ACCESS_KEY,
    ENV_S3_AMBIENT,
    ENV_S3_CA_FILE,
    ENV_S3_SECRET_KEY,
    ENV_S3_SESSION_TOKEN,
    ENV_TOKEN,
    ENV_TOPOLOGY,
    ENV_VOLUME,
    PORT_API,
    PORT_HEALTH,
)
from backstay_protocol.topology import PodIdentity, Topology, read_pod, read_topology
from backstay_sidecar.errors import SettingsError

DEFAULT_GRACE_SECONDS = 120.0
SHORTEST_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class S3Credentials:
    """Keys of the remote tier."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"S3Credentials(access_key={self.access_key!r}, ...)"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that is fixed for the life of the process."""

    topology: Topology
    pod: PodIdentity
    volume: str
    """Where the memory volume is mounted; the trainer sees it under the same path."""
    tokens: tuple[str, ...]
    """Bearer tokens taken on the API port (two while rotating); the first is sent to peers."""
    listen_host: str
    api_port: int
    health_port: int
    credentials: S3Credentials | None = None
    ambient: bool = False
    """No keys: the place that the sidecar runs in gives them (tiers.identity)."""
    s3_ca_file: str = ""
    """Certificates that the store may be signed by, beside the public authorities'; empty: none."""
    exit_with_parent: bool = False
    """Stop when the process that started this one is gone."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """The pod's termination grace period; `/prestop` answers 20 s before it is over."""
    pod_ip: str = ""
    """Told to peers instead of the topology's name, which DNS may know late, or of an older pod."""
    node: str = ""
    """Where the pod runs."""
    flush: bool = False
    """There is no trainer any more: bring out what its pod left, then end."""

    def __post_init__(self) -> None:
        if not 0 <= self.pod.replica < self.topology.replicas:
            raise SettingsError(
                f"replica {self.pod.replica}; the topology has replicas 0 to "
                f"{self.topology.replicas - 1}"
            )
        if not os.path.isabs(self.volume):
            raise SettingsError(f"the memory volume {self.volume!r} must be an absolute path")
        keys = self.credentials is not None or self.ambient
        if self.topology.tiers.remote is not None and not keys:
            raise SettingsError(
                f"the topology has a remote tier: set {ENV_S3_ACCESS_KEY} and {ENV_S3_SECRET_KEY}, "
                f"or {ENV_S3_AMBIENT}=1 where the machine or the pod's account gives keys"
            )
        for token in self.tokens:
            if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
                raise SettingsError(
                    f"{ENV_TOKEN}: expected {SHORTEST_TOKEN} or more printable ASCII characters; "
                    "make one with: openssl rand -hex 32"
                )

    @property
    def replica(self) -> int:
        """Index of this pod's replica."""
        return self.pod.replica

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log may show."""
        keys = self.credentials
        return (*self.tokens, *((keys.secret_key, keys.session_token) if keys else ()))

    @property
    def is_leader(self) -> bool:
        """The sidecar of replica 0 leads."""
        return self.pod.replica == 0

    @property
    def address(self) -> str:
        """`host:port` under which peers reach this sidecar."""
        if not self.pod_ip:
            return self.topology.address_of(self.pod.replica)
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.api_port}"


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m backstay_sidecar` and of `backstay agent`."""
    it = argparse.ArgumentParser(
        prog="backstay agent",
        description="The Backstay sidecar of one replica.",
        epilog=f"The job's token comes from the environment ({ENV_TOKEN}), never from an argument.",
    )
    it.add_argument("--topology", metavar="FILE", help=f"the job's topology [{ENV_TOPOLOGY}]")
    it.add_argument("--pod", metavar="FILE", help=f"this pod's identity [{ENV_POD}]")
    it.add_argument(
        "--replica", type=int, help=f"instead of --pod, for a bare topology [{ENV_REPLICA}]"
    )
    it.add_argument("--volume", metavar="DIR", help=f"the memory volume [{ENV_VOLUME}]")
    it.add_argument(
        "--listen", metavar="HOST", help="address to listen on (default: the host of the own peer)"
    )
    it.add_argument(
        "--flush",
        action="store_true",
        help="no trainer runs any more: bring out what is on the disk, then end",
    )
    it.add_argument("--grace-seconds", type=float, default=DEFAULT_GRACE_SECONDS)
    return it


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Arguments win over the environment. Raises SettingsError in words for people."""
    given = parser().parse_args(arguments)
    form = environment.get(ENV_LOG_FORMAT, "")
    if form and form not in FORMATS:
        raise SettingsError(f"{ENV_LOG_FORMAT} is {form!r}; expected {' or '.join(FORMATS)}")
    topology_path = given.topology or environment.get(ENV_TOPOLOGY, "")
    volume = given.volume or environment.get(ENV_VOLUME, "")
    if not topology_path:
        raise SettingsError(f"no topology: give --topology FILE or set {ENV_TOPOLOGY}")
    if not volume:
        raise SettingsError(f"no memory volume: give --volume DIR or set {ENV_VOLUME}")
    try:
        topology = read_topology(topology_path)
        pod = _pod(given, environment)
        address = topology.address_of(pod.replica)
    except (OSError, ProtocolError) as error:
        raise SettingsError(str(error)) from error
    except StopIteration as error:
        raise SettingsError(f"{topology_path} has no peer {pod.replica}") from error
    host, port = _host_and_port(address)
    return Settings(
        topology=topology,
        pod=pod,
        volume=os.path.abspath(volume),
        tokens=_tokens(environment),
        listen_host=given.listen or host,
        api_port=port,
        health_port=port + PORT_HEALTH - PORT_API,
        credentials=_credentials(environment),
        ambient=environment.get(ENV_S3_AMBIENT) == "1",
        s3_ca_file=environment.get(ENV_S3_CA_FILE, ""),
        exit_with_parent=environment.get(ENV_EXIT_WITH_PARENT) == "1",
        grace_seconds=given.grace_seconds,
        pod_ip=environment.get(ENV_POD_IP, ""),
        node=environment.get(ENV_NODE, ""),
        flush=given.flush,
    )


def _pod(given: argparse.Namespace, environment: Mapping[str, str]) -> PodIdentity:
    path = given.pod or ("" if given.replica is not None else environment.get(ENV_POD, ""))
    if path and given.replica is not None:
        raise SettingsError("give --pod or --replica, not both")
    if path:
        return read_pod(path)
    text = environment.get(ENV_REPLICA, "") if given.replica is None else str(given.replica)
    if not text.isdigit():
        raise SettingsError(
            f"which replica is this? Give --pod FILE or --replica N, or set {ENV_POD} or "
            f"{ENV_REPLICA} (it is {text!r})"
        )
    return PodIdentity(replica=int(text))


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        raise SettingsError(f"peer address {address!r}; expected host:port")
    return host, port or PORT_API


def _tokens(environment: Mapping[str, str]) -> tuple[str, ...]:
    tokens = tuple(part.strip() for part in environment.get(ENV_TOKEN, "").split(",") if part)
    if not tokens:
        raise SettingsError(
            f"{ENV_TOKEN} is not set: the API port is never open without the job's token; "
            "make one with: openssl rand -hex 32"
        )
    return tokens


def _credentials(environment: Mapping[str, str]) -> S3Credentials | None:
    access, secret = environment.get(ENV_S3_ACCESS_KEY), environment.get(ENV_S3_SECRET_KEY)
    if not access or not secret:
        return None
    return S3Credentials(
        access_key=access,
        secret_key=secret,
        session_token=environment.get(ENV_S3_SESSION_TOKEN, ""),
    )
