"""The leader of a job that runs, wherever it does: in a cluster, at an address, on this machine.

Used by commands that ask the leader for something (`flush`, `restore`, `explain-restore`,
`support-bundle`). What a bucket or a disk tells without a leader is the catalog's (`where`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backstay_cli.client import SidecarClient
from backstay_cli.cluster import ClusterJob
from backstay_cli.errors import NoAnswer
from backstay_cli.find import LocalJob, choose_job
from backstay_cli.where import Where
from backstay_protocol.names import PORT_API

SILENT_SECONDS = 10.0
"""A sidecar that the leader has not heard for so long is told to people as silent."""


@contextmanager
def leader_of(where: Where) -> Iterator[SidecarClient]:
    """Ask it within the block. Raises NotFound (no such job), NoAnswer (it does not run)."""
    if where.in_cluster:
        with where.cluster_job() as job:
            yield cluster_leader(job)
    elif where.address:
        yield SidecarClient(where.address, where.given_token())
    else:
        yield local_leader(choose_job(where.job, where.state_dir, running=True))


def cluster_leader(job: ClusterJob) -> SidecarClient:
    """Of a TrainingJob. Raises NoAnswer (the leader's pod does not run), CommandError."""
    if not job.runs:
        raise NoAnswer(
            f"{job.namespace}/{job.name}: the pod of replica 0, which leads, does not run",
            "backstay status says what the job waits for",
        )
    return SidecarClient(job.address(), job.token())


def local_leader(job: LocalJob) -> SidecarClient:
    """Of a local job that runs."""
    return SidecarClient(f"{job.status.hosts[0]}:{PORT_API}", job.folder.token())
