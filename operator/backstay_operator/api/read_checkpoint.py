"""`spec.checkpoint` of a manifest: the run and its tiers, or what is wrong. For `read.py`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from backstay_operator.api.allow import DEFAULT_LOCAL_PATH, Allowances, not_allowed
from backstay_operator.api.job import (
    DEFAULT_TOPOLOGY_KEY,
    EPHEMERAL,
    HOST_PATH,
    PVC,
    VOLUME_NONE,
    VOLUMES,
    CheckpointSpec,
    LocalSpec,
    MemorySpec,
    NeighborSpec,
    RemoteSpec,
)
from backstay_operator.api.section import Section
from backstay_protocol.names import DEFAULT_SLOTS
from backstay_protocol.topology import DEFAULT_REGION, Retention, Schedule

RUN_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
MOST_STEPS = 10**12 - 1
_OBJECT_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_PREFIX = r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]*(/[A-Za-z0-9_=-][A-Za-z0-9_.=-]*)*/?"
_REGION = r"[a-z0-9-]{1,40}"
_FOLDER = r"(/[^/\0.][^/\0]*|/\.[^/\0.][^/\0]*)+"
_SIZE = r"[0-9]+(\.[0-9]+)?(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_MOST_ENDPOINT = 512


def read_checkpoint(
    spec: Section, name: str, namespace: str, replicas: int, allow: Allowances
) -> CheckpointSpec:
    """`spec.checkpoint`; stand-ins where something is wrong."""
    section = spec.required_section(
        "checkpoint", "`checkpoint: {memory: {everySteps: 100, sizeLimit: 2Gi}}`"
    )
    run_name = section.text(
        "runName",
        RUN_NAME,
        "lower-case letters, digits and '-', at most 63 characters",
        "my-run",
        name,
        63,
    )
    memory = _read_memory(section)
    local = _read_local(section, memory, allow)
    neighbor = _read_neighbor(section, memory, local, replicas)
    remote = _read_remote(section, memory, namespace, allow)
    section.refuse_unknown()
    return CheckpointSpec(
        run_name=run_name, memory=memory, local=local, neighbor=neighbor, remote=remote
    )


def _read_schedule(section: Section) -> Schedule:
    steps = section.integer("everySteps", 1, MOST_STEPS, 0, 100)
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
    every = section.integer("keepEvery", 1, MOST_STEPS, 0, 1000)
    return Retention(keep_last=last, keep_every=every)


def _read_local(checkpoint: Section, memory: MemorySpec, allow: Allowances) -> LocalSpec | None:
    section = checkpoint.section("local")
    if section is None:
        return None
    volume = section.choice("volume", VOLUMES, HOST_PATH)
    schedule = _read_schedule(section)
    _check_schedule(section, schedule, memory.schedule)
    retention = _read_retention(section)
    path = section.text(
        "path", _FOLDER, "an absolute folder", DEFAULT_LOCAL_PATH, DEFAULT_LOCAL_PATH, 1024
    )
    size = section.text("size", _SIZE, "a size", "100Gi", "", 32)
    storage_class = section.text(
        "storageClassName", _OBJECT_NAME, "a StorageClass", "local-path", ""
    )
    _check_volume(section, volume)
    if volume == HOST_PATH and section.good("path"):
        not_allowed(section, "path", allow.refuses_local_path(path))
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
    topology_key = section.text(
        "topologyKey",
        _LABEL_KEY,
        "the key of a node label",
        DEFAULT_TOPOLOGY_KEY,
        DEFAULT_TOPOLOGY_KEY,
        317,
    )
    copies = section.integer("copies", 1, 1, 1, 1)
    section.refuse_unknown()
    if local is None:
        checkpoint.problem(
            "neighbor", "needs disks to copy to; expected local beside it; write `local: {}`"
        )
    if replicas < 2:
        checkpoint.problem(
            "neighbor", "needs another replica; expected 2 or more replicas; remove neighbor"
        )
    return NeighborSpec(schedule=schedule, topology_key=topology_key, copies=copies)


def _read_remote(
    checkpoint: Section, memory: MemorySpec, namespace: str, allow: Allowances
) -> RemoteSpec | None:
    section = checkpoint.section("remote")
    if section is None:
        return None
    embedded = section.boolean("embedded", False)
    endpoint = _read_endpoint(section, embedded)
    if embedded and allow.cluster:
        section.problem(
            "embedded",
            "is for `backstay local run` only; remove it and give endpoint, bucket and "
            "credentialsSecret",
        )
    bucket = section.text(
        "bucket",
        _BUCKET,
        "a bucket's name: 3 to 63 lower-case letters, digits, '.' and '-'",
        "checkpoints",
        "checkpoints" if embedded else None,
    )
    prefix = section.text(
        "prefix", _PREFIX, "folders without a leading '/' or '.'", "team/project", "", 512
    )
    region = section.text("region", _REGION, "a region's name", DEFAULT_REGION, "us-east-1")
    schedule = _read_schedule(section)
    _check_schedule(section, schedule, memory.schedule)
    retention = _read_retention(section)
    secret = section.text(
        "credentialsSecret", _OBJECT_NAME, "the name of a Secret", "my-bucket-credentials", ""
    )
    identity = section.boolean("workloadIdentity", False)
    ca_secret = section.text("caSecret", _OBJECT_NAME, "the name of a Secret", "my-bucket-ca", "")
    _check_credentials(section, secret, identity, embedded, allow)
    for field in ("caSecret", "workloadIdentity"):
        if embedded and section.raw(field):
            section.problem(field, "has no meaning with embedded; remove it")
    if not embedded and section.good("endpoint", "secure", "bucket"):
        not_allowed(section, *allow.refuses_remote(namespace, endpoint, bucket))
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
        workload_identity=identity,
        ca_secret=ca_secret,
    )


def _check_credentials(
    section: Section, secret: str, identity: bool, embedded: bool, allow: Allowances
) -> None:
    if secret and identity:
        section.problem(
            "workloadIdentity", "got both workloadIdentity and credentialsSecret; remove one"
        )
    elif allow.cluster and not (secret or identity or embedded):
        section.problem(
            "credentialsSecret",
            "missing; expected a Secret with accessKey and secretKey; write `credentialsSecret: "
            "my-bucket-credentials`, or `workloadIdentity: true`",
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
    fits = parts.scheme in ("http", "https") and bool(parts.hostname) and not extra
    return fits and len(text) <= _MOST_ENDPOINT and not any(c.isspace() for c in text)
