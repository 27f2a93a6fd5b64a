"""The cluster over the Kubernetes client: plain dicts through `kubernetes.dynamic`.

Only start-up imports this. The client is synchronous and has neither default time-outs nor a rate
limit, so every call goes through one executor, one token bucket and one loop of retries here.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from kubernetes import client as k8s
from kubernetes import config as k8s_config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.resource import Resource

from backstay_operator.cluster import FIELD_MANAGER, Kind, Tree
from backstay_operator.errors import AlreadyThere, Conflict, Refused, Unreachable
from backstay_protocol.clock import Clock

THREADS = 16
TIMEOUT_SECONDS = (5.0, 30.0)  # connect, read
CALLS_PER_SECOND = 20.0
BURST = 40.0
PAGE = 500
TRIES = 5
_FIRST_WAIT_SECONDS = 0.5
_MOST_WAIT_SECONDS = 15.0
_MERGE = "application/merge-patch+json"
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _NoDiscovery:
    """Our kinds are fixed: nothing is asked, cached or written to disk."""

    version: dict[str, Any] = {}  # noqa: RUF012 - what the client reads from a discoverer

    def __init__(self, client: object, cache_file: object) -> None:
        """As the client calls it."""


def load_credentials(kubeconfig: str = "") -> None:
    """The pod's service account, else a kubeconfig. Raises Refused with what to do."""
    try:
        if kubeconfig:
            k8s_config.load_kube_config(config_file=kubeconfig)  # type: ignore[no-untyped-call]
            return
        try:
            k8s_config.load_incluster_config()  # type: ignore[no-untyped-call]
        except k8s_config.ConfigException:
            k8s_config.load_kube_config()  # type: ignore[no-untyped-call]
    except (k8s_config.ConfigException, OSError) as error:
        raise Refused(
            f"no way into a cluster: {error}; run it in a pod with a service account, or set "
            "KUBECONFIG"
        ) from error


class TokenBucket:
    """At most so many calls a second, with a burst."""

    def __init__(self, clock: Clock, rate: float = CALLS_PER_SECOND, burst: float = BURST) -> None:
        """Full."""
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = clock.monotonic()

    async def take(self) -> None:
        """Wait for one."""
        now = self._clock.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


class KubeCluster:
    """`cluster.Cluster`, for real. Call `load_credentials` before."""

    def __init__(self, clock: Clock) -> None:
        """Opens no connection yet."""
        configuration = k8s.Configuration.get_default_copy()
        configuration.connection_pool_maxsize = THREADS
        configuration.retries = 0
        self._api = k8s.ApiClient(configuration)
        self._dynamic = DynamicClient(self._api, discoverer=_NoDiscovery)  # type: ignore[no-untyped-call]
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
        self._bucket = TokenBucket(clock)

    def close(self) -> None:
        """Wait for calls under way, then end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- reads ------------------------------------------------------------------------------------

    async def find(self, kind: Kind, namespace: str = "", selector: str = "") -> list[Tree]:
        """See Cluster."""
        for _ in range(TRIES):
            found = await self._pages(kind, namespace, selector)
            if found is not None:
                return found
        raise Unreachable(f"LIST {kind.plural}: its pages expired {TRIES} times while being read")

    async def _pages(self, kind: Kind, namespace: str, selector: str) -> list[Tree] | None:
        """None: a page expired (410); begin again."""
        items: list[Tree] = []
        more = ""
        while True:
            query: dict[str, Any] = {"limit": PAGE}
            if selector:
                query["label_selector"] = selector
            if more:
                query["_continue"] = more
            path = _path(kind, namespace)
            try:
                page = await self._call("get", path, f"LIST {kind.plural}", **query)
            except _Gone:
                return None
            items += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return items

    async def get(self, kind: Kind, namespace: str, name: str) -> Tree | None:
        """See Cluster."""
        path = _path(kind, namespace, name)
        try:
            return await self._call("get", path, f"GET {kind.kind} {namespace}/{name}")
        except _NotFound:
            return None

    # --- writes -----------------------------------------------------------------------------------

    async def create(self, kind: Kind, body: Tree) -> Tree:
        """See Cluster."""
        namespace, name = _names(body)
        return await self._call(
            "post",
            _path(kind, namespace),
            f"create {kind.kind} {namespace}/{name}",
            body=body,
            field_manager=FIELD_MANAGER,
        )

    async def replace(self, kind: Kind, body: Tree) -> Tree:
        """See Cluster."""
        namespace, name = _names(body)
        what = f"replace {kind.kind} {namespace}/{name}"
        return await self._call("put", _path(kind, namespace, name), what, body=body)

    async def apply(self, kind: Kind, body: Tree, *, status: bool = False) -> Tree:
        """See Cluster."""
        namespace, name = _names(body)
        path = _path(kind, namespace, name) + ("/status" if status else "")
        return await self._call(
            "patch",
            path,
            f"apply {kind.kind} {namespace}/{name}",
            body=body,
            content_type="application/apply-patch+yaml",
            field_manager=FIELD_MANAGER,
            force_conflicts=True,
        )

    async def merge(self, kind: Kind, namespace: str, name: str, body: Tree) -> Tree | None:
        """See Cluster."""
        path = _path(kind, namespace, name)
        what = f"patch {kind.kind} {namespace}/{name}"
        try:
            return await self._call("patch", path, what, body=body, content_type=_MERGE)
        except _NotFound:
            return None

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> bool:
        """See Cluster."""
        options: Tree = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        what = f"delete {kind.kind} {namespace}/{name}"
        try:
            await self._call("delete", _path(kind, namespace, name), what, body=options)
        except (_NotFound, Conflict):  # gone, or another object has the name by now
            return False
        return True

    # --- one call ---------------------------------------------------------------------------------

    async def _call(self, method: str, path: str, what: str, **params: Any) -> Tree:
        loop, wait = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
        for left in reversed(range(TRIES)):
            await self._bucket.take()
            try:
                return await loop.run_in_executor(self._executor, self._once(method, path, params))
            except ApiException as error:
                if error.status not in _TRANSIENT or not left:
                    raise _as_ours(error, what) from error
                pause = _retry_after(error) or wait
            except (urllib3.exceptions.HTTPError, OSError) as error:
                if not left:
                    raise Unreachable(f"{what}: no answer from the API server: {error}") from error
                pause = wait
            await asyncio.sleep(min(pause, _MOST_WAIT_SECONDS) * random.uniform(0.7, 1.3))
            wait = min(wait * 2, _MOST_WAIT_SECONDS)
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, params: dict[str, Any]) -> Callable[[], Tree]:
        def call() -> Tree:
            answer = self._dynamic.request(
                method, path, serialize=False, _request_timeout=TIMEOUT_SECONDS, **params
            )
            tree: Tree = json.loads(answer.data)
            return tree

        return call


class _NotFound(Refused):
    """404."""


class _Gone(Refused):
    """410: a page expired."""


def _as_ours(error: ApiException, what: str) -> Exception:
    words = _words(error)
    text = f"{what}: {words}"
    if error.status == 404:
        return _NotFound(text)
    if error.status == 410:
        return _Gone(text)
    if error.status == 409:
        return AlreadyThere(text) if _reason(error) == "AlreadyExists" else Conflict(text)
    if error.status in _TRANSIENT:
        return Unreachable(text)
    return Refused(text)


def _body(error: ApiException) -> Tree:
    try:
        tree = json.loads(error.body or "{}")
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _reason(error: ApiException) -> str:
    return str(_body(error).get("reason", ""))


def _words(error: ApiException) -> str:
    return str(_body(error).get("message") or error.reason or f"status {error.status}")


def _retry_after(error: ApiException) -> float:
    text = str((error.headers or {}).get("Retry-After", ""))
    return float(text) if text.isdigit() else 0.0


def _names(body: Tree) -> tuple[str, str]:
    metadata = body["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _path(kind: Kind, namespace: str, name: str | None = None) -> str:
    group, _, version = kind.api_version.rpartition("/")
    resource = Resource(  # type: ignore[no-untyped-call]
        prefix="apis" if group else "api",
        group=group,
        api_version=version,
        kind=kind.kind,
        namespaced=kind.namespaced,
        name=kind.plural,
    )
    path: str = resource.path(  # type: ignore[no-untyped-call]
        name=name, namespace=namespace or None
    )
    return path
