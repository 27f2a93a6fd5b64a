"""A manifest (a tree as YAML or the API server gives it) to a TrainingJob, or all its problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backstay_operator.api.allow import Allowances
from backstay_operator.api.job import (
    CLEAN_RUNNING,
    CLEANUP_POLICIES,
    LAUNCHERS,
    TORCHRUN,
    FailurePolicy,
    JobSpec,
    RemoteSpec,
    TrainingJob,
)
from backstay_operator.api.names import API_VERSION, KIND
from backstay_operator.api.read_checkpoint import MOST_STEPS, RUN_NAME, read_checkpoint
from backstay_operator.api.section import InvalidJob, Problem, Section
from backstay_operator.api.template import read_template
from backstay_protocol.topology import ManualChoice, RestoreOptions

_NAME = r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?"  # 50: pod names and hostnames are made of it
_QUEUE = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_MOST_REPLICAS = 10_000
_MOST_PROCESSES = 1_024
_DAY = 86_400
_YEAR = 31_536_000
_WITHOUT_ALLOWANCES = Allowances()
_IGNORED_METADATA = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "ownerReferences",
    "finalizers",
    "selfLink",
    "generateName",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


def read_job(tree: object, allow: Allowances = _WITHOUT_ALLOWANCES) -> TrainingJob:
    """Read a manifest. Raises InvalidJob with one line for every problem.

    `allow`: what jobs may ask for here; the default is that of a local run.
    """
    problems: list[Problem] = []
    top = Section(tree, "", problems)
    if not isinstance(tree, dict):
        raise InvalidJob([Problem("manifest", problems[0].text)])
    _read_kind(top)
    name, namespace = _read_metadata(top)
    spec = _read_spec(top, name, namespace, allow)
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
    namespace = metadata.text("namespace", RUN_NAME, label.format(63), "default", "default")
    for field in ("labels", "annotations", *_IGNORED_METADATA):
        metadata.raw(field)
    metadata.refuse_unknown()
    return name, namespace


def _read_spec(top: Section, name: str, namespace: str, allow: Allowances) -> JobSpec:
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
    template = read_template(spec, launcher, allow)
    checkpoint = read_checkpoint(spec, name, namespace, replicas, allow)
    _check_identity(spec, template, checkpoint.remote)
    job = JobSpec(
        replicas=replicas,
        processes_per_replica=processes,
        launcher=launcher,
        pod_template=template,
        checkpoint=checkpoint,
        suspend=spec.boolean("suspend", False),
        queue_name=spec.text("queueName", _QUEUE, "the name of a LocalQueue", "my-queue", "", 63),
        failure_policy=_read_failure_policy(spec),
    )
    job = _read_times(spec, _read_restore(spec, job, f"{namespace}/{checkpoint.run_name}"))
    spec.refuse_unknown()
    return job


def _check_identity(spec: Section, template: dict[str, Any], remote: RemoteSpec | None) -> None:
    pod = template["spec"]
    if remote is None or not remote.workload_identity:
        return
    if isinstance(pod, dict) and not (pod.get("serviceAccountName") or pod.get("serviceAccount")):
        spec.problem(
            "podTemplate.spec.serviceAccountName",
            "missing; remote.workloadIdentity needs the account that has the rights; write "
            "`serviceAccountName: my-account`",
        )


def _read_failure_policy(spec: Section) -> FailurePolicy:
    section = spec.section("failurePolicy")
    if section is None:
        return FailurePolicy()
    deaths = section.integer("earlyDeaths", 1, 1_000, FailurePolicy().early_deaths, 6)
    section.refuse_unknown()
    return FailurePolicy(early_deaths=deaths)


def _read_times(spec: Section, job: JobSpec) -> JobSpec:
    ttl = spec.integer("ttlSecondsAfterFinished", 0, _YEAR, -1, 86_400)
    return replace(
        job,
        hang_seconds=spec.seconds("hangSeconds", 0, 0, 600),
        drain_hold_seconds=spec.integer("drainHoldSeconds", 0, _DAY, job.drain_hold_seconds, 300),
        node_lost_seconds=spec.integer("nodeLostSeconds", 0, _DAY, job.node_lost_seconds, 60),
        final_save_seconds=spec.integer("finalSaveSeconds", 0, _DAY, job.final_save_seconds, 300),
        cleanup_pod_policy=spec.choice("cleanupPodPolicy", CLEANUP_POLICIES, CLEAN_RUNNING),
        ttl_seconds_after_finished=None if ttl < 0 else ttl,
    )


def _read_restore(spec: Section, job: JobSpec, own: str) -> JobSpec:
    """`own`: the job's own run."""
    section = spec.section("restore")
    if section is None:
        return job
    defaults = RestoreOptions()
    step = section.integer("step", 0, MOST_STEPS, -1, 1000)
    attempt = section.integer("attempt", 1, 10**18 - 1, 0, 1)
    if section.has("attempt") and not section.has("step"):
        section.problem("attempt", "names no checkpoint alone; write `step: ...` beside it")
    other, fresh = _read_other_run(section), section.boolean("fresh", False)
    if fresh and (section.has("step") or section.has("from")):
        section.problem("fresh", "got fresh and a checkpoint to begin from; remove one of the two")
        fresh = False
    if other and job.checkpoint.remote is None:
        section.problem(
            "from",
            f"run {other} is read from the remote tier, and this job has none; add "
            "`spec.checkpoint.remote` with the bucket and prefix of that run, or remove `from`",
        )
    if other == own:
        section.problem("from", f"names this job's own run {own}; write `step: ...` without it")
    options = RestoreOptions(
        barrier_seconds=section.seconds("barrierSeconds", 1, defaults.barrier_seconds, 600),
        remote_wait_seconds=section.seconds(
            "remoteWaitSeconds", 0, defaults.remote_wait_seconds, 120
        ),
        max_restarts=section.integer("maxRestarts", 0, 1_000_000, defaults.max_restarts, 100),
        quarantine_after=section.integer("quarantineAfter", 1, 1_000, 3, 3),
        choice=_choice(step, attempt, other, fresh),
    )
    section.refuse_unknown()
    return replace(job, restore=options)


def _choice(step: int, attempt: int, run: str, fresh: bool) -> ManualChoice | None:
    """What a person chose, with a token that differs for each different choice."""
    named = f"{run}/{step}-{attempt}" if run else f"{step}-{attempt}"
    token = "fresh" if fresh else named
    return ManualChoice.asked(token, step=step, attempt=attempt, run=run, fresh=fresh)


def _read_other_run(restore: Section) -> str:
    """`<namespace>/<run name>`; empty: none."""
    section = restore.section("from")
    if section is None:
        return ""
    name = "a name: lower-case letters, digits and '-', at most 63 characters"
    namespace = section.text("namespace", RUN_NAME, name, "research", None, 63)
    run_name = section.text("runName", RUN_NAME, name, "gpt", None, 63)
    section.refuse_unknown()
    return f"{namespace}/{run_name}"
