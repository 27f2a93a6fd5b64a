"""The leader: the sidecar of replica 0 begins attempts and speaks for the job.

Routes call it. It holds nothing that it can't get back from the other sidecars and the remote tier:
after kill -9 the members join and report again. Rounds are driven by `round_driver`, what is told to
the sidecars is decided by `duties`, the remote tier is read and written by `remote_book`.
"""

from __future__ import annotations

from backstay_protocol.clock import Clock
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    CheckpointList,
    FlushReply,
    JobView,
    JoinReply,
    JoinRequest,
    Policy,
    ProgressReply,
    ProgressRequest,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.topology import PodIdentity, Topology

from backstay_sidecar.restore.ports import Emit, MemberDoor, Peers, RemoteStore


class Leader:
    """One, beside the member of replica 0. `start` needs a running loop; `close` ends every task."""

    def __init__(
        self,
        *,
        topology: Topology,
        pod: PodIdentity,
        own: MemberDoor,
        peers: Peers,
        remote: RemoteStore | None,
        clock: Clock,
        emit: Emit,
    ) -> None:
        """`own`: the member of this very sidecar."""
        self._topology = topology

    def start(self) -> None:
        """Begin to drive rounds and duties."""

    async def close(self) -> None:
        """End every task."""

    async def join(self, request: JoinRequest) -> JoinReply:
        """POST /v1/leader/join."""
        raise NotImplementedError

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """POST /v1/leader/verdict."""
        raise NotImplementedError

    async def progress(self, request: ProgressRequest) -> ProgressReply:
        """POST /v1/leader/progress."""
        raise NotImplementedError

    def job(self) -> JobView:
        """GET /v1/job."""
        raise NotImplementedError

    def checkpoints(self) -> CheckpointList:
        """GET /v1/checkpoints: all that is known of any tier, newest first."""
        raise NotImplementedError

    def find(self, name: str) -> CheckpointId:
        """`<step>-<attempt>`, a bare step or `latest` (both: on the lineage). Raises ValueError."""
        raise NotImplementedError

    def set_policy(self, policy: Policy) -> Policy:
        """PUT /v1/policy; returns what will be in force, from which step on."""
        raise NotImplementedError

    def flush(self) -> FlushReply:
        """POST /v1/flush: one common save; repeated, it tells how far it got."""
        raise NotImplementedError

    def request(self, words: str) -> None:
        """ "save", "flush", "pin <id>", "unpin <id>", "persist <id>", "delete <id>". ValueError."""
        raise NotImplementedError
