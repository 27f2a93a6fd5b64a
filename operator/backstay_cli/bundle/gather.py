"""What goes into the bundle, by where the job is. Each part is tried; what fails is told."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from backstay_cli.bundle.archive import Bundle
from backstay_cli.bundle.from_cluster import gather_cluster
from backstay_cli.bundle.from_local import gather_local
from backstay_cli.bundle.from_sidecars import gather_sidecars
from backstay_cli.bundle.listing import list_bucket
from backstay_cli.client import SidecarClient
from backstay_cli.find import choose_job
from backstay_cli.where import Where, named_bucket
from backstay_protocol.names import PROTOCOL_VERSION


def about(where: Where) -> str:
    """What is meant, for people."""
    if where.in_cluster:
        return f"TrainingJob {where.namespace or '(namespace of the context)'}/{where.job}"
    if where.bucket:
        return f"run {where.run} in bucket {where.bucket}"
    return f"the sidecar at {where.address}" if where.address else "a local job"


async def gather(where: Where, bundle: Bundle) -> None:
    """Everything that can be reached. Raises CommandError where there is no such job."""
    bundle.json("versions.json", _versions(), "versions of the command")
    if where.in_cluster:
        await gather_cluster(where, bundle)
    elif where.bucket:
        found = named_bucket(where)
        bundle.masker.know(*found.bucket.address.keys, found.bucket.address.session_token)
        list_bucket(found, bundle)
    elif where.address:
        token = where.given_token()
        bundle.masker.know(token)
        leader = SidecarClient(where.address, token)
        gather_sidecars(leader, bundle, lambda view: view.address)
    else:
        await gather_local(choose_job(where.job, where.state_dir, running=None), bundle)


def own_version() -> str:
    """Of the command."""
    try:
        return version("backstay")
    except PackageNotFoundError:
        return "unknown"


def _versions() -> dict[str, str]:
    return {
        "command": own_version(),
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
