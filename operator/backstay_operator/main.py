"""Start-up: settings, logs, ports, the Lease; then kopf until the end.

What `python -m backstay_operator` runs. Exit codes: 0 told to stop, 2 what a person must mend
before it can start, 3 the Lease was lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from backstay_operator.api.names import ANNOTATION_SCHEMA, CRD_NAME, SCHEMA_NUMBER
from backstay_operator.apply.applier import Applier, Surroundings
from backstay_operator.cluster import CRD, NAMESPACE, TRAINING_JOB, Cluster
from backstay_operator.config import DEFAULT_PATH, ENV_CONFIG, OperatorConfig, read_config
from backstay_operator.errors import ClusterError, ConfigError, Refused
from backstay_operator.handlers import watch
from backstay_operator.handlers.queue import WorkQueue
from backstay_operator.handlers.reconcile import Reconciler, Tools
from backstay_operator.handlers.workers import Workers
from backstay_operator.health import HttpThread, health_routes, metrics_routes
from backstay_operator.kube import KubeCluster, load_credentials
from backstay_operator.leaders import HttpLeaders
from backstay_operator.lease import LeaseKeeper, LeaseName
from backstay_operator.logs import configure
from backstay_operator.metrics import Metrics
from backstay_operator.observe.reader import Reader
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import BackstayError

ENV_NAME = "POD_NAME"
ENV_NAMESPACE = "POD_NAMESPACE"
ENV_KUBECONFIG = "KUBECONFIG"
DEFAULT_NAMESPACE = "backstay-system"
EXIT_SETTINGS = 2
_NAMED_JOBS = 20

log = logging.getLogger("backstay.main")


@dataclass(frozen=True, kw_only=True)
class Self:
    """Which operator this is."""

    name: str
    namespace: str


def main() -> None:
    """Run until told to stop, then exit the process."""
    try:
        config = _load(os.environ.get(ENV_CONFIG) or DEFAULT_PATH)
        configure(config.log_level, as_json=config.log_json)
    except (BackstayError, ValueError) as error:  # in which form logs are wanted is not known yet
        print(f"backstay operator: {error}", file=sys.stderr)
        raise SystemExit(EXIT_SETTINGS) from error
    try:
        load_credentials(os.environ.get(ENV_KUBECONFIG, ""))
        _run(config, _self(os.environ))
    except (BackstayError, ValueError, OSError) as error:
        log.critical("%s", error)
        raise SystemExit(EXIT_SETTINGS) from error


def _load(path: str) -> OperatorConfig:
    try:
        with open(path, encoding="utf-8") as file:
            return read_config(yaml.safe_load(file))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; set {ENV_CONFIG} to the operator's settings file"
        ) from error


def _self(environment: Mapping[str, str]) -> Self:
    return Self(
        name=environment.get(ENV_NAME) or socket.gethostname(),
        namespace=environment.get(ENV_NAMESPACE) or DEFAULT_NAMESPACE,
    )


def _run(config: OperatorConfig, me: Self) -> None:
    metrics = Metrics()
    state = _State()
    servers = [
        HttpThread(config.health_port, health_routes(state.trouble)),
        HttpThread(config.metrics_port, metrics_routes(metrics.registry)),
    ]
    for server in servers:
        server.start()
    keeper = None
    if config.lease.enabled:
        name = LeaseName(
            namespace=config.lease.namespace or me.namespace,
            name=config.lease.name,
            holder=f"{me.name}_{os.getpid()}",
        )
        keeper = LeaseKeeper(lambda: KubeCluster(SYSTEM_CLOCK), name, SYSTEM_CLOCK)
        keeper.take()
    metrics.leads.set(1)
    try:
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        _operate(loop, config, me, metrics, state)
    finally:
        if keeper is not None:
            keeper.give_up()
        for server in servers:
            server.stop()


class _State:
    """What `/healthz` looks at: nothing is wrong before there are workers."""

    workers: Workers | None = None

    def trouble(self) -> str:
        return self.workers.trouble() if self.workers is not None else ""


def _operate(
    loop: asyncio.AbstractEventLoop,
    config: OperatorConfig,
    me: Self,
    metrics: Metrics,
    state: _State,
) -> None:
    cluster, leaders = KubeCluster(SYSTEM_CLOCK), HttpLeaders()
    try:
        cluster_name = loop.run_until_complete(_prepare(cluster, config))
        around = Surroundings(
            cluster_name=cluster_name,
            operator_namespace=me.namespace,
            instance=me.name,
            sidecar=config.sidecar,
            key_secret=f"{config.lease.name}-key",
        )
        tools = Tools(
            cluster=cluster,
            reader=Reader(cluster, leaders, config.cluster, SYSTEM_CLOCK),
            applier=Applier(cluster, leaders, around, SYSTEM_CLOCK),
            leaders=leaders,
            allow=config.allow,
            sidecar=config.sidecar,
            metrics=metrics,
            clock=SYSTEM_CLOCK,
        )
        reconciler, queue = Reconciler(tools), WorkQueue(SYSTEM_CLOCK)
        workers = Workers(queue, reconciler, cluster, config.namespaces, metrics, SYSTEM_CLOCK)
        state.workers = workers
        hints = watch.Hints(queue, reconciler, workers)
        log.info("operator of cluster %s starts", cluster_name)
        if config.namespaces:
            log.warning(loop.run_until_complete(_left_alone(cluster, config.namespaces)))
        watch.run(watch.registry_of(hints, workers), config.namespaces, loop)
        log.info("stopped")
    finally:
        state.workers = None
        if not loop.is_closed():
            loop.run_until_complete(leaders.close())
            loop.close()
        cluster.close()


async def _prepare(cluster: Cluster, config: OperatorConfig) -> str:
    """Check the CRD; the cluster's name. Raises ConfigError or ClusterError."""
    await _check_crd(cluster)
    if config.cluster_name:
        return config.cluster_name
    try:
        found = await cluster.get(NAMESPACE, "", "kube-system")
    except ClusterError as error:
        raise ConfigError(f"clusterName must be set: {error}") from error
    if found is None:
        raise ConfigError("clusterName must be set: there is no namespace kube-system to name it")
    return str(found["metadata"]["uid"])


async def _left_alone(cluster: Cluster, namespaces: Sequence[str]) -> str:
    """For the log: jobs elsewhere go on, and nobody replaces their pods."""
    text = f"jobs outside of the namespaces {', '.join(namespaces)} are left alone"
    try:
        found = await cluster.find(TRAINING_JOB)
    except ClusterError:  # the rights of such an operator end at its namespaces
        return f"{text}; whether there are any it may not see"
    names = [f"{t['metadata']['namespace']}/{t['metadata']['name']}" for t in found]
    elsewhere = sorted(name for name in names if name.split("/")[0] not in namespaces)
    more = f" and {len(elsewhere) - _NAMED_JOBS} more" if len(elsewhere) > _NAMED_JOBS else ""
    return f"{text}: {', '.join(elsewhere[:_NAMED_JOBS]) or 'there are none'}{more}"


async def _check_crd(cluster: Cluster) -> None:
    """An older definition would drop what this operator persists."""
    try:
        found = await cluster.get(CRD, "", CRD_NAME)
    except Refused as error:
        log.warning("the CRD's schema number could not be checked: %s", error)
        return
    if found is None:
        raise ConfigError(f"there is no CRD {CRD_NAME}; install it: helm install with crds.install")
    number = (found["metadata"].get("annotations") or {}).get(ANNOTATION_SCHEMA, "0")
    if not number.isdigit() or int(number) < SCHEMA_NUMBER:
        raise ConfigError(
            f"the CRD {CRD_NAME} has schema {number}, this operator needs {SCHEMA_NUMBER} or "
            "newer; upgrade it: helm upgrade with crds.install=true"
        )
