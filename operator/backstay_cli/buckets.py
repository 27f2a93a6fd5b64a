"""The bucket of a run: where it is and with whose keys, from the options, a TrainingJob, a folder.

Used by `where` (catalogs), `support-bundle`, `restore --dry-run` and `validate`. Opens no
connection; the S3 client is imported only when one of these is called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backstay_cli.catalog import BucketCatalog
from backstay_cli.cluster import ClusterJob, Kubectl
from backstay_cli.credentials import HINT, credentials
from backstay_cli.errors import NotFound, UsageError
from backstay_cli.find import LocalJob
from backstay_operator.manifests.wiring import ACCESS_KEY, CA_KEY, SECRET_KEY, SESSION_KEY
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.names import ENV_S3_CA_FILE
from backstay_protocol.topology import DEFAULT_REGION

if TYPE_CHECKING:  # the S3 client takes long to import
    from backstay_cli.bucket import Bucket


@dataclass(frozen=True, kw_only=True)
class RunBucket:
    """One run in one bucket."""

    bucket: Bucket
    run: str
    """`<namespace>/<run name>`."""
    prefix: str

    @property
    def layout(self) -> RemoteLayout:
        """Its keys."""
        return RemoteLayout(self.prefix, self.run)

    def catalog(self) -> BucketCatalog:
        """Its checkpoints."""
        return BucketCatalog(self.bucket, self.run, self.prefix)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """S3 keys, an authority's certificates, and what to do when they are refused."""

    access: str
    secret: str
    session: str = ""
    hint: str = HINT
    authority: str = ""
    """PEM, trusted beside the system's authorities; empty: those alone."""


def own_keys(ca_file: str = "") -> Keys:
    """The person's, from the environment. Raises UsageError if there are none.

    `ca_file`: of the store's authority, if not the one that the environment names.
    """
    access, secret, session = credentials()
    return Keys(access=access, secret=secret, session=session, authority=_own_authority(ca_file))


def _own_authority(ca_file: str) -> str:
    path = ca_file or os.environ.get(ENV_S3_CA_FILE, "")
    if not path:
        return ""
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the authority's certificate {path} can't be read: {error}",
            f"--ca-file or {ENV_S3_CA_FILE} names a file in PEM",
        ) from error


def run_bucket(
    endpoint: str,
    bucket: str,
    run: str,
    *,
    keys: Keys,
    prefix: str = "",
    region: str = DEFAULT_REGION,
) -> RunBucket:
    """Raises UsageError where the endpoint is none."""
    from backstay_cli.bucket import Bucket, BucketAddress  # the S3 client takes long to import

    address = BucketAddress(
        endpoint=endpoint,
        bucket=bucket,
        region=region,
        keys=(keys.access, keys.secret),
        session_token=keys.session,
        keys_hint=keys.hint,
        authority=keys.authority,
    )
    return RunBucket(bucket=Bucket(address), run=run, prefix=prefix)


def local_bucket(job: LocalJob, endpoint: str) -> RunBucket:
    """Of a local job; `endpoint`: of its store, embedded or not."""
    status = job.status
    keys = _embedded_keys(job) if status.embedded else own_keys()
    return run_bucket(
        endpoint, status.bucket, status.run, keys=keys, prefix=status.prefix, region=status.region
    )


def _embedded_keys(job: LocalJob) -> Keys:
    access, secret = job.folder.store_keys()
    return Keys(access=access, secret=secret)


def cluster_bucket(job: ClusterJob, endpoint: str = "") -> RunBucket:
    """A TrainingJob's remote tier, with the keys of its Secret. Raises CommandError.

    `endpoint`: the store as it is reached from here, if not by the job's own words.
    """
    remote = job.tree["spec"]["checkpoint"].get("remote")
    if not remote:
        raise NotFound(f"{job.namespace}/{job.name} has no remote tier to read from")
    keys = remote_keys(job.kubectl, remote)
    run = f"{job.namespace}/{job.run_name}"
    return remote_bucket(remote, run, keys, endpoint)


def remote_bucket(remote: Mapping[str, Any], run: str, keys: Keys, endpoint: str = "") -> RunBucket:
    """By the `remote` section of a manifest."""
    return run_bucket(
        endpoint or endpoint_of(remote),
        remote["bucket"],
        run,
        keys=keys,
        prefix=remote.get("prefix", ""),
        region=remote.get("region", DEFAULT_REGION),
    )


def endpoint_of(remote: Mapping[str, Any]) -> str:
    """With the scheme that `secure` says, where it has none of its own."""
    endpoint = str(remote["endpoint"])
    if "://" in endpoint:
        return endpoint
    return f"{'https' if remote.get('secure', True) else 'http'}://{endpoint}"


def remote_keys(kubectl: Kubectl, remote: Mapping[str, Any]) -> Keys:
    """Of the Secrets that a manifest names; without one, the person's. Raises CommandError."""
    name, authority = remote.get("credentialsSecret"), ""
    if remote.get("caSecret"):
        authority = kubectl.secret(remote["caSecret"]).get(CA_KEY, "")
    if not name:
        own = own_keys()
        return replace(own, authority=authority or own.authority)
    found = kubectl.secret(name)
    return Keys(
        access=found.get(ACCESS_KEY, ""),
        secret=found.get(SECRET_KEY, ""),
        session=found.get(SESSION_KEY, ""),
        hint=f"check {ACCESS_KEY} and {SECRET_KEY} of the Secret {name}, and remote.region",
        authority=authority,
    )
