"""kopf's part: watches of jobs, of our pods and of nodes, each event a hint and nothing more.

Nothing is decided here and nothing is written: no finalizers, no patches, no events of kopf's. The
settings say where kopf would otherwise wait too long or write something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import kopf

from backstay_operator.api.names import GROUP, LABEL_JOB, PLURAL, VERSION
from backstay_operator.cluster import Tree
from backstay_operator.handlers.queue import WorkQueue
from backstay_operator.handlers.reconcile import Reconciler
from backstay_operator.handlers.workers import Workers
from backstay_operator.observe.nodes import node_state

COALESCE_SECONDS = 0.5
"""A thousand pods of one job change at once: one look."""

log = logging.getLogger("backstay.watch")


def kopf_settings() -> kopf.OperatorSettings:
    """Time-outs that notice a dead connection, and no writes."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = 600
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.watching.label_selectors["", "v1", "pods"] = LABEL_JOB
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.finalizer = f"{GROUP}/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    return settings


class Hints:
    """Events of the watches, made into keys."""

    def __init__(self, queue: WorkQueue, reconciler: Reconciler, workers: Workers) -> None:
        """Nothing was seen yet."""
        self._queue = queue
        self._reconciler = reconciler
        self._workers = workers
        self._nodes: dict[str, tuple[object, ...]] = {}

    def job(self, kind: str | None, tree: Tree) -> None:
        """A TrainingJob came, changed or went."""
        metadata = tree["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if kind == "DELETED":
            self._workers.watchdog.gone(key)
        else:
            self._workers.watchdog.saw(key, metadata.get("resourceVersion", ""))
        self._queue.add(key)

    def pod(self, tree: Tree) -> None:
        """A pod of ours came, changed or went."""
        metadata = tree["metadata"]
        name = (metadata.get("labels") or {}).get(LABEL_JOB)
        if name:
            key = (metadata["namespace"], name)
            self._reconciler.heard(key, tree)
            self._queue.add(key, COALESCE_SECONDS)

    def node(self, kind: str | None, tree: Tree) -> None:
        """A node changed: of interest only where it matters to decisions."""
        state = node_state(tree)
        told = (kind == "DELETED", state.ready, state.since, state.taints)
        if self._nodes.get(state.name) == told:
            return
        self._nodes[state.name] = told
        for key, names in self._reconciler.nodes.items():
            if state.name in names:
                self._queue.add(key, COALESCE_SECONDS)


def registry_of(hints: Hints, workers: Workers) -> kopf.OperatorRegistry:
    """Everything that kopf is told."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        """The pod's service account, else a kubeconfig."""
        account = kopf.login_with_service_account(**kwargs)
        return account if account is not None else kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry)
    async def startup(**_: Any) -> None:
        """Begin to work."""
        workers.start()

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        """Stop in order."""
        await workers.stop()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job(event: Any, **_: Any) -> None:
        """A hint."""
        hints.job(event["type"], event["object"])

    @kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT}, registry=registry)
    async def pod(event: Any, **_: Any) -> None:
        """A hint."""
        hints.pod(event["object"])

    @kopf.on.event("", "v1", "nodes", registry=registry)
    async def node(event: Any, **_: Any) -> None:
        """A hint."""
        hints.node(event["type"], event["object"])

    return registry


def run(
    registry: kopf.OperatorRegistry, namespaces: Sequence[str], loop: asyncio.AbstractEventLoop
) -> None:
    """Watch until told to stop. Blocks; has the event loop to itself."""
    settings = kopf_settings()
    settings.scanning.disabled = bool(namespaces)
    kopf.run(
        loop=loop,
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=not namespaces,
        namespaces=tuple(namespaces),
    )
