"""From decisions to runnable pods: addresses, folders, secrets and configuration files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from backstay_cli.credentials import credentials
from backstay_cli.errors import UsageError
from backstay_cli.local.kubelet import PodPlan
from backstay_cli.local.machine import Nodes, free_ports
from backstay_cli.local.podspec import Folders, container_specs
from backstay_cli.local.state import LocalStatus, StateFolder
from backstay_operator.api import TrainingJob
from backstay_operator.decide import chosen
from backstay_operator.manifests import Addresses, Wiring, build_pod, build_topology
from backstay_operator.manifests.objects import TOKEN_KEY, owned_name
from backstay_operator.manifests.pods import CONFIG_VOLUME, LOCAL_VOLUME, MEMORY_VOLUME
from backstay_operator.manifests.wiring import (
    ACCESS_KEY,
    POD_FILE,
    SECRET_KEY,
    SESSION_KEY,
    TOPOLOGY_FILE,
    pod_name,
)
from backstay_operator.settings import SidecarSettings
from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.files import write_atomically
from backstay_protocol.loglines import TEXT
from backstay_protocol.names import ENV_S3_CA_FILE, PORT_API
from backstay_protocol.topology import PodIdentity, read_pod

_SECRET = "backstay"
_PRESTOP_MARGIN_SECONDS = 20  # a sidecar answers the hook so long before the pod's grace is over


class Wires:
    """One job's pods as this machine runs them."""

    def __init__(
        self,
        job: TrainingJob,
        status: LocalStatus,
        state: StateFolder,
        nodes: Nodes,
        store_endpoint: str,
        grace_seconds: float,
    ) -> None:
        """`store_endpoint`: of the embedded store; empty if there is none."""
        self._job = job
        self._status = status
        self._state = state
        self._nodes = nodes
        addresses = Addresses(
            hosts=status.hosts,
            rendezvous_port=free_ports("", 1)[0],  # torch's store binds every address
            rendezvous_id=status.uid,
        )
        self._wiring = Wiring(
            uid=status.uid,
            addresses=addresses,
            first_generation=status.record.first_generation,
            restore=chosen(job.spec.restore, status.record),
            remote_endpoint=store_endpoint,
            s3_ca_file=store_authority(job, os.environ),
            token_secret=_SECRET,
            sidecar=SidecarSettings(
                log_format=TEXT,
                grace_seconds=_PRESTOP_MARGIN_SECONDS + max(1, round(grace_seconds)),
            ),
            trainer_env={"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"},
        )
        self._secrets = self._read_secrets()

    @property
    def leader_address(self) -> str:
        """`host:port` of replica 0's sidecar."""
        return f"{self._status.hosts[0]}:{PORT_API}"

    def pod_name(self, replica: int, generation: int) -> str:
        """As in the API."""
        return pod_name(self._job.name, replica, generation)

    def new_pod(self, identity: PodIdentity, node: str) -> PodPlan:
        """A pod that is being created: its identity is written down."""
        identity = replace(identity, uid=str(uuid.uuid4()))
        folder = self._config_folder(identity.replica, identity.generation)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(str(folder / POD_FILE), codec.dumps(identity))
        return self._plan(identity, node)

    def old_pod(self, replica: int, generation: int, node: str) -> PodPlan | None:
        """A pod that an earlier runner created, with the identity it got then."""
        path = self._config_folder(replica, generation) / POD_FILE
        try:
            identity = read_pod(str(path))
        except (OSError, ProtocolError):
            return None
        return self._plan(identity, node)

    def _config_folder(self, replica: int, generation: int) -> Path:
        return self._state.pod(self.pod_name(replica, generation))

    def _plan(self, identity: PodIdentity, node: str) -> PodPlan:
        wiring = replace(self._wiring, local_root=str(self._nodes.disk(node)))
        config = self._config_folder(identity.replica, identity.generation)
        topology = build_topology(self._job, wiring)
        write_atomically(str(config / TOPOLOGY_FILE), codec.dumps(topology))
        pod = build_pod(self._job, identity, wiring)
        folders = Folders(
            volumes={
                MEMORY_VOLUME: str(self._nodes.memory(node)),
                LOCAL_VOLUME: str(self._nodes.disk(node)),
                CONFIG_VOLUME: str(config),
            },
            secrets=self._secrets,
            manifest_folder=str(Path(self._status.manifest).parent),
            logs=str(self._state.logs),
        )
        return PodPlan(
            name=pod["metadata"]["name"],
            identity=identity,
            node=node,
            host=self._status.hosts[identity.replica],
            manifest=pod,
            containers=tuple(container_specs(pod, folders)),
        )

    def _read_secrets(self) -> dict[tuple[str, str], str]:
        """The job's own Secret, and the remote tier's keys from the environment."""
        found = {(_SECRET, TOKEN_KEY): self._state.token()}
        remote = self._job.spec.checkpoint.remote
        if remote is None or remote.workload_identity:
            return found
        name = remote.credentials_secret or owned_name(self._job.name)
        if remote.embedded:
            access, secret, session = *self._state.store_keys(), ""
        else:
            access, secret, session = credentials()
        found[name, ACCESS_KEY] = access
        found[name, SECRET_KEY] = secret
        if session:
            found[name, SESSION_KEY] = session
        return found


def store_authority(job: TrainingJob, environment: Mapping[str, str]) -> str:
    """The authority that remote.caSecret stands for, here a file of this machine; empty: none.

    Raises UsageError where it is not named, or not there.
    """
    remote = job.spec.checkpoint.remote
    path = environment.get(ENV_S3_CA_FILE, "")
    if remote is not None and remote.ca_secret and not path:
        raise UsageError(
            f"spec.checkpoint.remote.caSecret: a local run has no Secret {remote.ca_secret}",
            f"set {ENV_S3_CA_FILE} to a file with the authority's certificate (PEM)",
        )
    if path and not os.path.isfile(path):
        raise UsageError(f"{ENV_S3_CA_FILE}: there is no file {path}")
    return os.path.abspath(path) if path else ""
