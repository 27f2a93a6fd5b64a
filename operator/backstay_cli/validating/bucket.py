"""Whether a manifest's bucket can be reached from here, with its keys. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator

from backstay_cli.buckets import Keys, own_keys, remote_bucket, remote_keys
from backstay_cli.cluster import Kubectl
from backstay_cli.errors import CommandError, NoAnswer
from backstay_cli.validating.files import Checked
from backstay_cli.validating.findings import Finding, ok, problem, unknown


def check_bucket(checked: Checked, kubectl: Kubectl | None, endpoint: str) -> Iterator[Finding]:
    """`kubectl`: where the Secrets of the manifest are; None: the person's own keys are taken.
    `endpoint`: of the store as it is reached from here, if not by the manifest's own words.
    """
    if checked.job is None or checked.job.spec.checkpoint.remote is None:
        return
    remote = checked.tree["spec"]["checkpoint"]["remote"]
    if checked.job.spec.checkpoint.remote.embedded:
        yield ok("bucket", "the local runner brings its own store")
        return
    keys = _keys(remote, kubectl)
    if isinstance(keys, Finding):
        yield keys
        return
    found = remote_bucket(remote, checked.job.run, keys, endpoint)
    try:
        found.bucket.reach(found.layout.root)
    except NoAnswer as error:
        yield unknown(
            str(found.bucket),
            f"can't be reached from here (the cluster's nodes may reach it): {error.message}",
        )
    except CommandError as error:
        hint = f"; {error.hint}" if error.hint else ""
        yield problem(str(found.bucket), f"{error.message.removeprefix(f'{found.bucket}: ')}{hint}")
    else:
        yield ok(str(found.bucket), f"can be listed below {found.layout.root}")


def _keys(remote: dict[str, object], kubectl: Kubectl | None) -> Keys | Finding:
    try:
        return own_keys() if kubectl is None else remote_keys(kubectl, remote)
    except NoAnswer:
        raise
    except CommandError as error:
        return unknown("bucket", f"no keys to try it with: {error.message}")
