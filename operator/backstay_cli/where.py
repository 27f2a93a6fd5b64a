"""Where a command shall look: a TrainingJob in a cluster, a sidecar that is named, a bucket, or a
local job (found by itself).

For a stopped local job with an embedded store the store is started for as long as the command
reads, under the same shim as in a run, so that nothing of it stays.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from backstay_cli.buckets import RunBucket, cluster_bucket, local_bucket, own_keys, run_bucket
from backstay_cli.catalog import (
    BucketCatalog,
    Catalog,
    ChainedCatalog,
    CorruptCopy,
    DiskCatalog,
    ShardSource,
    SidecarCatalog,
)
from backstay_cli.cluster import ClusterJob, Kubectl
from backstay_cli.errors import CommandError, NoAnswer, NotFound, UsageError
from backstay_cli.find import LocalJob, choose_job
from backstay_cli.local import machine
from backstay_cli.local.store import EmbeddedStore
from backstay_cli.output import told_errors
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import Unreachable
from backstay_protocol.messages import CheckpointStatus
from backstay_protocol.names import ENV_S3_CA_FILE, ENV_TOKEN, PORT_API
from backstay_protocol.topology import DEFAULT_REGION

T = TypeVar("T")

ENV_CLUSTER = "BACKSTAY_CLUSTER"
"""Set: look into a cluster although no option says so (`kubectl backstay` sets it)."""

AddressOption = Annotated[
    str, typer.Option("--address", help="host[:port] of any sidecar of a running job.")
]
TokenOption = Annotated[
    str, typer.Option("--token", envvar=ENV_TOKEN, help="The job's token.", show_default=False)
]
JobOption = Annotated[
    str, typer.Option("--job", help="A local job: NAME or NAMESPACE/NAME; in a cluster: NAME.")
]
NamespaceOption = Annotated[
    str, typer.Option("-n", "--namespace", help="A TrainingJob in a cluster: its namespace.")
]
ContextOption = Annotated[str, typer.Option("--context", help="kubectl's context.")]
KubeconfigOption = Annotated[
    str, typer.Option("--kubeconfig", help="kubectl's file; default: KUBECONFIG, ~/.kube/config.")
]
StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", help="A local job, by its state folder.")
]
BucketOption = Annotated[str, typer.Option("--bucket", help="Read a bucket; no job need run.")]
EndpointOption = Annotated[
    str,
    typer.Option(
        "--endpoint",
        help="Of the bucket's store: http(s)://host[:port]; with -n: as seen from here.",
    ),
]
RunOption = Annotated[str, typer.Option("--run", help="NAMESPACE/RUN NAME in the bucket.")]
PrefixOption = Annotated[str, typer.Option("--prefix", help="The job's prefix in the bucket.")]
RegionOption = Annotated[str, typer.Option("--region", help="The bucket's region.")]
CaFileOption = Annotated[
    str,
    typer.Option(
        "--ca-file",
        envvar=ENV_S3_CA_FILE,
        help="Authority of the bucket's store (PEM), trusted beside the public ones.",
        show_default=False,
    ),
]

WHERE_HELP = (
    "Where to look: -n NAMESPACE (or --context, --kubeconfig) for a TrainingJob in a cluster, by "
    "kubectl; --address of a sidecar (token in BACKSTAY_TOKEN); or --bucket with --endpoint "
    "and --run (keys in BACKSTAY_S3_ACCESS_KEY and BACKSTAY_S3_SECRET_KEY, or AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY); else a local job: the one that runs, --job or --state-dir."
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """The options that say where to look."""

    address: AddressOption = ""
    token: TokenOption = ""
    job: JobOption = ""
    namespace: NamespaceOption = ""
    context: ContextOption = ""
    kubeconfig: KubeconfigOption = ""
    state_dir: StateDirOption = None
    bucket: BucketOption = ""
    endpoint: EndpointOption = ""
    run: RunOption = ""
    prefix: PrefixOption = ""
    region: RegionOption = DEFAULT_REGION
    ca_file: CaFileOption = ""

    def __post_init__(self) -> None:
        places = {
            "--address": self.address,
            "--bucket": self.bucket,
            "-n, --context or --kubeconfig": self.namespace or self.context or self.kubeconfig,
            "--state-dir": self.state_dir,
        }
        named = [option for option, value in places.items() if value]
        if self.job and (self.address or self.bucket or self.state_dir):
            named.append("--job")
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} exclude each other", WHERE_HELP)
        if self.bucket and not (self.endpoint and self.run):
            raise UsageError("--bucket needs --endpoint and --run", WHERE_HELP)
        if self.run and self.run.count("/") != 1:
            raise UsageError(f"--run: got {self.run!r}; expected NAMESPACE/RUN NAME")

    @property
    def in_cluster(self) -> bool:
        """Whether a TrainingJob in a cluster is meant."""
        if self.namespace or self.context or self.kubeconfig:
            return True
        return bool(os.environ.get(ENV_CLUSTER)) and not (
            self.address or self.bucket or self.state_dir
        )

    def cluster_job(self) -> ClusterJob:
        """The TrainingJob that is meant. Raises CommandError."""
        kubectl = Kubectl(
            namespace=self.namespace, context=self.context, kubeconfig=self.kubeconfig
        )
        return ClusterJob(kubectl, self.job)

    def given_token(self) -> str:
        """Of the sidecar that is named. Raises UsageError if there is none."""
        if not self.token:
            raise UsageError("no token for the sidecar", f"set {ENV_TOKEN} to the job's token")
        return self.token


def located(command: Callable[..., None], *leave_out: str) -> Callable[..., None]:
    """Give a command the options of Where, but for those left out; it takes them as `where`."""
    hints = inspect.get_annotations(Where, eval_str=True)
    named = [field for field in fields(Where) if field.name not in leave_out]
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in named
    ]
    own = inspect.signature(command, eval_str=True)
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
        if parameter.name != "where"
    ]

    @functools.wraps(command)
    def with_where(**given: Any) -> None:
        with told_errors():
            where = Where(**{field.name: given.pop(field.name) for field in named})
            command(where=where, **given)

    parameters = [*others, *options]
    with_where.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_where.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_where


def with_catalog(
    where: Where, work: Callable[[Catalog, threading.Event], T], *, reads: bool = True
) -> T:
    """Open what is meant, do `work` beside the loop, close it again; the event says "stop".

    `reads` False: `work` only lists.
    """
    return asyncio.run(_with_catalog(where, work, reads))


async def _with_catalog(
    where: Where, work: Callable[[Catalog, threading.Event], T], reads: bool
) -> T:
    cancel = threading.Event()
    async with _opened(where, reads) as catalog:
        working = asyncio.get_running_loop().run_in_executor(None, work, catalog, cancel)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:  # Ctrl-C: let the threads end before anything is closed
            cancel.set()
            await asyncio.wait([working])
            working.exception()
            raise


@asynccontextmanager
async def _opened(where: Where, reads: bool) -> AsyncIterator[Catalog]:
    if where.in_cluster:
        with where.cluster_job() as found:
            yield cluster_catalog(found, where.endpoint, reads=reads)
    elif where.address:
        yield SidecarCatalog(where.address, where.given_token())
    elif where.bucket:
        yield named_bucket(where).catalog()
    else:
        job = choose_job(where.job, where.state_dir, running=None)
        opened = _running(job) if job.running else _stopped(job)
        async with opened as catalog:
            yield catalog


def cluster_catalog(job: ClusterJob, endpoint: str = "", *, reads: bool = True) -> Catalog:
    """Through the job's sidecars while it runs, then from its bucket. Raises NotFound.

    `endpoint`: the bucket's store as it is reached from here, if not by the job's own words.
    `reads`: bytes are wanted too, not only the list.
    """
    if not job.runs:
        return cluster_bucket(job, endpoint).catalog()
    sidecars = SidecarCatalog(job.address(), job.token(), job.reach)
    if not reads:
        return sidecars
    job.forward_all()
    try:
        return ChainedCatalog([sidecars, InReach(cluster_bucket(job, endpoint).catalog())])
    except CommandError:  # it has none, or the person may not read its keys
        return sidecars


class InReach:
    """A bucket that may be out of reach from here: then it has no sources, and one line says so."""

    def __init__(self, catalog: BucketCatalog) -> None:
        """Asked only where sidecars were asked before."""
        self._catalog = catalog
        self._lock = threading.Lock()
        self._lost = False
        self.where = catalog.where
        self.committed_only = catalog.committed_only
        self.checkpoints = catalog.checkpoints

    def sources(
        self, checkpoint: CheckpointStatus, rank: int
    ) -> Iterator[ShardSource | CorruptCopy]:
        """The bucket's; none once it could not be reached."""
        if self._lost:
            return
        try:
            yield from self._catalog.sources(checkpoint, rank)
        except (Unreachable, NoAnswer) as error:
            with self._lock:
                told, self._lost = self._lost, True
            if not told:
                typer.echo(f"copies in the bucket are left out: {error}", err=True)


@asynccontextmanager
async def _running(job: LocalJob) -> AsyncIterator[Catalog]:
    address = f"{job.status.hosts[0]}:{PORT_API}"
    catalogs: list[Catalog] = [SidecarCatalog(address, job.folder.token())]
    endpoint = job.status.store_endpoint or job.status.endpoint
    if endpoint:
        catalogs.append(local_bucket(job, endpoint).catalog())
    yield ChainedCatalog(catalogs)


@asynccontextmanager
async def _stopped(job: LocalJob) -> AsyncIterator[Catalog]:
    async with store_of(job) as endpoint:
        if endpoint:
            yield local_bucket(job, endpoint).catalog()
        else:
            yield DiskCatalog(disks_of(job), job.status.run)


def disks_of(job: LocalJob) -> list[Path]:
    """Of a local job's nodes."""
    return sorted((job.folder.root / "nodes").glob("*/disk"))


@asynccontextmanager
async def store_of(job: LocalJob) -> AsyncIterator[str]:
    """Endpoint of a local job's remote tier; empty: it has none. An embedded store of a stopped
    job runs for as long as the block does.
    """
    status = job.status
    endpoint = (status.store_endpoint if job.running else "") or status.endpoint
    if endpoint or job.running or not status.embedded:
        yield endpoint
        return
    with job.folder.locked():
        store = EmbeddedStore(
            folder=job.folder.store,
            log=job.folder.logs / "store.log",
            host=machine.store_host(status.uid),
            keys=job.folder.store_keys(),
            on_exit=lambda: None,
        )
        store.start()
        try:
            await store.ready(status.bucket, status.region, SYSTEM_CLOCK)
            yield store.endpoint
        finally:
            await store.stop()


@asynccontextmanager
async def opened_bucket(where: Where) -> AsyncIterator[RunBucket]:
    """The remote tier of what is meant, without any sidecar. Raises CommandError."""
    if where.bucket:
        yield named_bucket(where)
    elif where.in_cluster:
        with where.cluster_job() as found:
            yield cluster_bucket(found, where.endpoint)
    elif where.address:
        raise UsageError("a sidecar does not tell where its bucket is", WHERE_HELP)
    else:
        job = choose_job(where.job, where.state_dir, running=None)
        async with store_of(job) as endpoint:
            if not endpoint:
                raise NotFound(f"{job.name} has no remote tier to read from")
            yield local_bucket(job, endpoint)


def named_bucket(where: Where) -> RunBucket:
    """By --bucket, --endpoint and --run."""
    return run_bucket(
        where.endpoint,
        where.bucket,
        where.run,
        keys=own_keys(where.ca_file),
        prefix=where.prefix,
        region=where.region,
    )
