"""What a cluster's administrator allows jobs to ask for: the operator makes pods on their behalf.

The chart's `policy.allow` values become `Allowances`; reading a manifest checks each wish against
them and refuses with one line that says what to change and who can allow it. Pure.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from backstay_operator.api.names import REASON_NOT_ALLOWED
from backstay_operator.api.section import InvalidJob, Problem, Section

ANY_NAMESPACE = "*"
DEFAULT_LOCAL_PATH = "/var/lib/backstay"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class RemoteAllowance:
    """One object store that jobs may use."""

    endpoint: str
    """`http(s)://host[:port]`."""
    buckets: tuple[str, ...] = ()
    """Empty: every bucket of it."""


@dataclass(frozen=True, kw_only=True)
class Allowances:
    """What jobs may ask for. The defaults are those of a local run."""

    service_accounts: tuple[str, ...] = ("default",)
    """Names that a template may run under."""
    host_paths: tuple[str, ...] = ()
    """Folders of a node that volumes of a template may mount, with everything below them."""
    local_paths: tuple[str, ...] | None = None
    """Folders of a node that `checkpoint.local.path` may be; None: any.

    Exactly these: below one of them lie the runs of other namespaces.
    """
    privileged: bool = False
    """Whether templates may leave their box: host namespaces, privileged containers, ..."""
    remotes: Mapping[str, tuple[RemoteAllowance, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Namespace, or `*` for all, -> the stores of its jobs. Empty: any store."""
    cluster: bool = False
    """Whether what only a local run can do without (image, credentials) must be there."""

    def refuses_service_account(self, name: str) -> str:
        """Why a template may not run under `name`; empty if it may."""
        if name in self.service_accounts:
            return ""
        known = ", ".join(self.service_accounts) or "none"
        return (
            f"got {name}, which is not on the allow-list (allowed: {known}); remove it, or have "
            f"the cluster's administrator add it to {_value('serviceAccounts')}"
        )

    def refuses_host_path(self, path: str) -> str:
        """Why a template may not mount this folder of the node; empty if it may."""
        if _is_below(path, self.host_paths):
            return ""
        return (
            f"got {path}, which is not allowed in a job's template; use a persistentVolumeClaim or "
            f"an emptyDir, or have the cluster's administrator add it to {_value('hostPaths')}"
        )

    def refuses_local_path(self, path: str) -> str:
        """Why checkpoints may not be kept in this folder of the node; empty if they may."""
        if self.local_paths is None or path in self.local_paths:
            return ""
        known = ", ".join(self.local_paths) or "none"
        return (
            f"got {path}; expected one of: {known}; choose such a one, or have the cluster's "
            f"administrator add it to {_value('localPaths')}"
        )

    def refuses_privilege(self) -> str:
        """Why a template may not leave its box; empty if it may."""
        if self.privileged:
            return ""
        return (
            "would let the job out of its pod; remove it, or have the cluster's administrator set "
            f"{_value('privileged')}"
        )

    def refuses_remote(self, namespace: str, endpoint: str, bucket: str) -> tuple[str, str]:
        """Field (`endpoint` or `bucket`) and why not; both empty if this store may be used."""
        if not self.remotes:
            return "", ""
        known = (*self.remotes.get(namespace, ()), *self.remotes.get(ANY_NAMESPACE, ()))
        here = [one for one in known if _same_endpoint(one.endpoint, endpoint)]
        ask = f"or have the cluster's administrator add it to {_value('remotes')}"
        if not here:
            shown = ", ".join(dict.fromkeys(one.endpoint for one in known)) or "none"
            text = f"got {endpoint}; allowed for namespace {namespace}: {shown}; use such a one, "
            return "endpoint", text + ask
        if any(not one.buckets or bucket in one.buckets for one in here):
            return "", ""
        shown = ", ".join(dict.fromkeys(name for one in here for name in one.buckets))
        text = f"got {bucket}; allowed at {endpoint} for namespace {namespace}: {shown}; use one, "
        return "bucket", text + ask


def read_allowances(tree: object) -> Allowances:
    """The `allow` part of the operator's settings. Raises InvalidJob with one line a mistake."""
    problems: list[Problem] = []
    section = Section({} if tree is None else tree, "allow", problems)
    accounts = section.texts("serviceAccounts", r"[a-z0-9][-a-z0-9.]*", ("default",))
    host_paths = section.texts("hostPaths", r"/.*", ())
    local_paths = section.texts("localPaths", r"/.*", (DEFAULT_LOCAL_PATH,))
    privileged = section.boolean("privileged", False)
    remotes = _read_remotes(section)
    section.refuse_unknown()
    if problems:
        raise InvalidJob(problems)
    return Allowances(
        service_accounts=accounts,
        host_paths=host_paths,
        local_paths=tuple(path.rstrip("/") for path in local_paths),
        privileged=privileged,
        remotes=remotes,
        cluster=True,
    )


def _read_remotes(section: Section) -> Mapping[str, tuple[RemoteAllowance, ...]]:
    found: dict[str, tuple[RemoteAllowance, ...]] = {}
    by_namespace = section.section("remotes")
    for namespace in by_namespace.names() if by_namespace is not None else ():
        assert by_namespace is not None
        stores = []
        for store in by_namespace.sections(namespace):
            endpoint = store.text(
                "endpoint",
                r"https?://[^/\s]+/?",
                "http(s)://host[:port]",
                "https://minio.example.org:9000",
                None,
            )
            buckets = store.texts("buckets", r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", ())
            store.refuse_unknown()
            stores.append(RemoteAllowance(endpoint=endpoint.rstrip("/"), buckets=buckets))
        found[namespace] = tuple(stores)
    return MappingProxyType(found)


def not_allowed(section: Section, name: str, why: str) -> None:
    """Tell a refusal, if there is one."""
    if why:
        section.problem(name, why, REASON_NOT_ALLOWED)


def _value(name: str) -> str:
    return f"policy.allow.{name} of the Backstay chart"


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    if not path.startswith("/") or ".." in path.split("/"):
        return False
    path = posixpath.normpath(path).replace("//", "/")
    for folder in folders:
        root = posixpath.normpath(folder).replace("//", "/")
        if path == root or path.startswith(root.rstrip("/") + "/"):
            return True
    return False


def _same_endpoint(one: str, other: str) -> bool:
    return _address(one) == _address(other)


def _address(endpoint: str) -> tuple[str, str, int]:
    parts = urlsplit(endpoint)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").rstrip("."), port
