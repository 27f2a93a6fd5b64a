"""A manifest (a tree as YAML or the API server gives it) to a TrainingJob, or all its problems."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from backstay_operator.api.job import (
    EPHEMERAL,
    HOST_PATH,
    LAUNCHERS,
    PVC,
    TORCHRUN,
    VOLUME_NONE,
    VOLUMES,
    CheckpointSpec,
    JobSpec,
    LocalSpec,
    MemorySpec,
    NeighborSpec,
    RemoteSpec,
    TrainingJob,
)
from backstay_operator.api.names import API_VERSION, KIND
from backstay_operator.api.section import InvalidJob, Problem, Section
from backstay_operator.api.template import read_template
from backstay_protocol.names import DEFAULT_SLOTS
from backstay_protocol.topology import ManualChoice, RestoreOptions, Retention, Schedule

_LABEL = r"[a-z0-9]([-a-z0-9]{0,%d}[a-z0-9])?"
_NAME = _LABEL % 48  # 50: pod names and hostnames are made of it
_RUN_NAME = _LABEL % 61
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_PREFIX = r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*/?"
_REGION = r"[a-z0-9-]{1,40}"
_MOST_REPLICAS = 10_000
_MOST_PROCESSES = 1_024
_MOST_STEPS = 10**12 - 1
_IGNORED_METADATA = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "ownerReferences",
    "finalizers",
    "selfLink",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


def read_job(tree: object) -> TrainingJob:
    """Read a manifest. Raises InvalidJob with one line for every problem."""
    problems: list[Problem] = []
    top = Section(tree, "", problems)
    if not isinstance(tree, dict):
        raise InvalidJob([Problem("manifest", problems[0].text)])
    _read_kind(top)
    name, namespace = _read_metadata(top)
    spec = _read_spec(top, name)
    top.raw("status")
    top.refuse_unknown()
    if problems:
        raise InvalidJob(problems)
    return TrainingJob(name=name, namespace=namespace, spec=spec)


def _read_kind(top: Section) -> None:
    if top.raw("apiVersion") != API_VERSION:
        top.wrong("apiVersion", API_VERSION, f"`apiVersion: {API_VERSION}`")
    if top.raw("kind") != KIND:
        top.wrong("kind", KIND, f"`kind: {KIND}`")


def _read_metadata(top: Section) -> tuple[str, str]:
    metadata = top.required_section("metadata", "`metadata: {name: my-job}`")
    label = "lower-case letters, digits and '-', at most {} characters"
    name = metadata.text("name", _NAME, label.format(50), "my-job", None)
    namespace = metadata.text("namespace", _RUN_NAME, label.format(63), "default", "default")
    for field in ("labels", "annotations", *_IGNORED_METADATA):
        metadata.raw(field)
    metadata.refuse_unknown()
    return name, namespace


def _read_spec(top: Section, name: str) -> JobSpec:
    spec = top.required_section("spec", "`spec:` with replicas, podTemplate and checkpoint")
    replicas = spec.integer("replicas", 1, _MOST_REPLICAS, None, 2)
    processes = spec.integer("processesPerReplica", 1, _MOST_PROCESSES, 1, 1)
    launcher = spec.choice("launcher", LAUNCHERS, TORCHRUN)
    if launcher == "none" and processes != 1 and spec.good("launcher", "processesPerReplica"):
        spec.problem(
            "processesPerReplica",
            f"got {processes} with launcher none, which starts one process a pod; expected 1; "
            "write `launcher: torchrun`, or 1 here and more replicas",
        )
    template = read_template(spec, launcher)
    checkpoint = _read_checkpoint(spec, name, replicas)
    restore = _read_restore(spec)
    hang_seconds = spec.seconds("hangSeconds", 0, 0, 600)
    suspend = spec.boolean("suspend", False)
    spec.raw("queueName")
    spec.refuse_unknown()
    return JobSpec(
        replicas=replicas,
        processes_per_replica=processes,
        launcher=launcher,
        pod_template=template,
        checkpoint=checkpoint,
        restore=restore,
        hang_seconds=hang_seconds,
        suspend=suspend,
    )


def _read_checkpoint(spec: Section, name: str, replicas: int) -> CheckpointSpec:
    section = spec.required_section(
        "checkpoint", "`checkpoint: {memory: {everySteps: 100, sizeLimit: 2Gi}}`"
    )
    run_name = section.text(
        "runName",
        _RUN_NAME,
        "lower-case letters, digits and '-', at most 63 characters",
        "my-run",
        name,
    )
    memory = _read_memory(section)
    local = _read_local(section, memory)
    neighbor = _read_neighbor(section, memory, local, replicas)
    remote = _read_remote(section, memory)
    section.refuse_unknown()
    return CheckpointSpec(
        run_name=run_name, memory=memory, local=local, neighbor=neighbor, remote=remote
    )


def _read_schedule(section: Section) -> Schedule:
    steps = section.integer("everySteps", 1, _MOST_STEPS, 0, 100)
    seconds = section.seconds("everySeconds", 0.1, 0.0, 30)
    if section.has("everySteps") and section.has("everySeconds"):
        section.problem(
            "everySeconds", "got both everySteps and everySeconds; expected one; remove one"
        )
        return Schedule(every_steps=steps)
    return Schedule(every_steps=steps, every_seconds=seconds)


def _read_memory(checkpoint: Section) -> MemorySpec:
    section = checkpoint.required_section("memory", "`memory: {everySteps: 100, sizeLimit: 2Gi}`")
    schedule = _read_schedule(section)
    if not section.has("everySteps") and not section.has("everySeconds") and section.good(""):
        section.problem(
            "everySteps",
            "missing; expected how often the state is captured; write `everySteps: 100` or "
            "`everySeconds: 30`",
        )
    slots = section.integer("slots", 1, 8, DEFAULT_SLOTS, DEFAULT_SLOTS)
    size = section.quantity_bytes(
        "sizeLimit", "2Gi", f"room for slots ({slots}) x the state of one pod's ranks, plus 10 %"
    )
    section.refuse_unknown()
    return MemorySpec(schedule=schedule, slots=slots, size_limit_bytes=size)


def _check_schedule(section: Section, schedule: Schedule, memory: Schedule) -> None:
    """A tier gets only what was captured: a schedule that asks for more would be a lie."""
    if not section.good("everySteps", "everySeconds"):
        return
    steps, captured = schedule.every_steps, memory.every_steps
    if steps and captured and steps % captured:
        near = max(1, round(steps / captured)) * captured
        section.problem(
            "everySteps",
            f"got {steps}; expected a multiple of memory.everySteps ({captured}), for only what is "
            f"captured can be kept; write `everySteps: {near}`",
        )
    if steps and memory.every_seconds:
        section.problem(
            "everySteps",
            f"got {steps} while memory captures every {memory.every_seconds:g} s, at no fixed "
            "steps; expected everySeconds; write `everySeconds: ...` here or everySteps in memory",
        )
    if schedule.every_seconds and schedule.every_seconds < memory.every_seconds:
        section.problem(
            "everySeconds",
            f"got {schedule.every_seconds:g}; expected at least memory.everySeconds "
            f"({memory.every_seconds:g}), for only what is captured can be kept; write "
            f"`everySeconds: {memory.every_seconds:g}`",
        )


def _read_retention(section: Section, lowest: int = 1) -> Retention:
    last = section.integer("keepLast", lowest, 10_000, 2, 2)
    every = section.integer("keepEvery", 1, _MOST_STEPS, 0, 1000)
    return Retention(keep_last=last, keep_every=every)


def _read_local(checkpoint: Section, memory: MemorySpec) -> LocalSpec | None:
    section = checkpoint.section("local")
    if section is None:
        return None
    volume = section.choice("volume", VOLUMES, HOST_PATH)
    schedule = _read_schedule(section)
    _check_schedule(section, schedule, memory.schedule)
    retention = _read_retention(section)
    path = section.text(
        "path", r"/[^\0]*[^/\0]", "an absolute folder", "/var/lib/backstay", "/var/lib/backstay"
    )
    size = section.text("size", r"\d+(\.\d+)?([kMGTP]i?)?", "a size", "100Gi", "")
    storage_class = section.text("storageClassName", r"\S+", "a StorageClass", "local-path", "")
    _check_volume(section, volume)
    section.refuse_unknown()
    if volume == VOLUME_NONE:
        return None
    return LocalSpec(
        schedule=schedule,
        retention=retention,
        volume=volume,
        path=path,
        size=size,
        storage_class_name=storage_class,
    )


def _check_volume(section: Section, volume: str) -> None:
    claimed = volume in (PVC, EPHEMERAL)
    if claimed and not section.has("size"):
        section.problem("size", f"missing; a {volume} volume needs one; write `size: 100Gi`")
    for field in ("size", "storageClassName"):
        if section.has(field) and not claimed:
            section.problem(field, f"has no meaning with volume {volume}; remove it")
    if section.has("path") and volume != HOST_PATH:
        section.problem("path", f"has no meaning with volume {volume}; remove it")


def _read_neighbor(
    checkpoint: Section, memory: MemorySpec, local: LocalSpec | None, replicas: int
) -> NeighborSpec | None:
    section = checkpoint.section("neighbor")
    if section is None:
        return None
    schedule = _read_schedule(section)
    _check_schedule(section, schedule, memory.schedule)
    section.refuse_unknown()
    if local is None:
        checkpoint.problem(
            "neighbor", "needs disks to copy to; expected local beside it; write `local: {}`"
        )
    if replicas < 2:
        checkpoint.problem(
            "neighbor", "needs another replica; expected 2 or more replicas; remove neighbor"
        )
    return NeighborSpec(schedule=schedule)


def _read_remote(checkpoint: Section, memory: MemorySpec) -> RemoteSpec | None:
    section = checkpoint.section("remote")
    if section is None:
        return None
    embedded = section.boolean("embedded", False)
    endpoint = _read_endpoint(section, embedded)
    bucket = section.text(
        "bucket",
        _BUCKET,
        "a bucket's name: 3 to 63 lower-case letters, digits, '.' and '-'",
        "checkpoints",
        "checkpoints" if embedded else None,
    )
    prefix = section.text("prefix", _PREFIX, "folders without a leading '/'", "team/project", "")
    region = section.text("region", _REGION, "a region's name", "us-east-1", "us-east-1")
    schedule = _read_schedule(section)
    _check_schedule(section, schedule, memory.schedule)
    retention = _read_retention(section)
    secret = section.text(
        "credentialsSecret", _RUN_NAME, "the name of a Secret", "my-bucket-credentials", ""
    )
    section.refuse_unknown()
    return RemoteSpec(
        endpoint=endpoint,
        embedded=embedded,
        bucket=bucket,
        prefix=prefix,
        region=region,
        schedule=schedule,
        retention=retention,
        credentials_secret=secret,
    )


def _read_endpoint(section: Section, embedded: bool) -> str:
    endpoint: Any = section.raw("endpoint")
    secure = section.boolean("secure", True)
    write = "`endpoint: https://minio.example.org:9000`"
    if endpoint is None:
        if not embedded:
            section.problem(
                "endpoint", f"missing; write {write}, or `embedded: true` for a local run"
            )
        return ""
    if embedded:
        section.problem("endpoint", "got one although embedded is true; remove one of the two")
    text = endpoint if isinstance(endpoint, str) else ""
    if "://" not in text:
        text = f"{'https' if secure else 'http'}://{text}"
    elif section.has("secure") and secure != text.startswith("https://"):
        section.problem("secure", f"contradicts the endpoint {text}; remove secure")
    if not _is_endpoint(text):
        section.wrong("endpoint", "http(s)://host[:port] without a path", write)
    return text.rstrip("/")


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not extra


def _read_restore(spec: Section) -> RestoreOptions:
    section = spec.section("restore")
    if section is None:
        return RestoreOptions()
    defaults = RestoreOptions()
    options = {
        "barrier_seconds": section.seconds("barrierSeconds", 1, defaults.barrier_seconds, 600),
        "remote_wait_seconds": section.seconds(
            "remoteWaitSeconds", 0, defaults.remote_wait_seconds, 120
        ),
    }
    max_restarts = section.integer("maxRestarts", 0, 1_000_000, defaults.max_restarts, 100)
    quarantine = section.integer("quarantineAfter", 1, 1_000, defaults.quarantine_after, 3)
    step = section.integer("step", 0, _MOST_STEPS, -1, 1000)
    attempt = section.integer("attempt", 1, 10**18 - 1, 0, 1)
    if section.has("attempt") and not section.has("step"):
        section.problem("attempt", "names no checkpoint alone; write `step: ...` beside it")
    section.refuse_unknown()
    choice = None
    if step >= 0:
        choice = ManualChoice(token=f"{step}-{attempt}", step=step, attempt=attempt)
    return RestoreOptions(
        **options, max_restarts=max_restarts, quarantine_after=quarantine, choice=choice
    )
