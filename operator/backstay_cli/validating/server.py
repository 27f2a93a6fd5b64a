"""What only the cluster can say about a manifest, asked by kubectl with the person's own rights.

Nothing is written: the manifest is applied as a server-side dry run. What the person may not read
is unknown, never wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from backstay_cli.cluster import OPERATOR_SELECTOR, Kubectl
from backstay_cli.errors import CommandError, NoAnswer, NotFound, UsageError
from backstay_cli.validating.files import Checked, Policy, default_policy
from backstay_cli.validating.findings import Finding, ok, problem, unknown
from backstay_operator.api import TrainingJob
from backstay_operator.api.job import HOST_PATH
from backstay_operator.api.names import ANNOTATION_SCHEMA, CRD_NAME, SCHEMA_NUMBER
from backstay_operator.config import read_config
from backstay_operator.errors import ConfigError
from backstay_operator.manifests.wiring import ACCESS_KEY, CA_KEY, SECRET_KEY

_ENFORCE = "pod-security.kubernetes.io/enforce"
_FORBIDS_HOST_PATH = ("baseline", "restricted")


def cluster_policy(kubectl: Kubectl, findings: list[Finding]) -> Policy:
    """What the operator of this cluster allows, from its settings; else the chart's defaults."""
    where = "operator"
    namespace = kubectl.namespace or context_namespace(kubectl)
    try:
        found = kubectl.get("configmap", "--all-namespaces", f"--selector={OPERATOR_SELECTOR}")
        texts = [item["data"]["operator.yaml"] for item in found["items"] if "data" in item]
        if not texts:
            raise NotFound("no operator's ConfigMap is there")
        config = read_config(yaml.safe_load(texts[0]))
    except (NoAnswer, UsageError):
        raise
    except (CommandError, ConfigError, KeyError, yaml.YAMLError) as error:
        words = _first_line(error)
        findings.append(
            unknown(where, f"its settings can't be read, the chart's defaults are taken: {words}")
        )
        return default_policy(namespace)
    findings.append(ok(where, "its settings are read: what they allow is what is checked"))
    return Policy(
        allow=config.allow,
        sidecar_memory=config.sidecar.memory,
        known=True,
        namespace=namespace,
    )


def check_definition(kubectl: Kubectl) -> Iterator[Finding]:
    """Whether TrainingJobs are known here, and of which schema. Once for all manifests."""
    where = f"definition {CRD_NAME}"
    try:
        found = kubectl.get("crd", CRD_NAME)
    except NotFound:
        yield problem(where, "it is not installed; install the chart: helm install backstay ...")
        return
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        yield unknown(where, f"can't be read: {_first_line(error)}")
        return
    number = (found["metadata"].get("annotations") or {}).get(ANNOTATION_SCHEMA, "")
    if not number.isdigit():
        yield problem(where, f"has no {ANNOTATION_SCHEMA} annotation; upgrade the chart")
    elif int(number) < SCHEMA_NUMBER:
        yield problem(
            where,
            f"has schema {number}, this command knows {SCHEMA_NUMBER}: fields may be missing; "
            "upgrade the chart with crds.install",
        )
    else:
        yield ok(where, f"is installed, schema {number}")


def check_server(kubectl: Kubectl, checked: Checked) -> Iterator[Finding]:
    """One manifest. `kubectl`: of the namespace that the job goes to. Raises NoAnswer."""
    metadata = checked.tree.get("metadata") if isinstance(checked.tree, dict) else None
    namespace = kubectl.namespace
    there: list[Finding] = []
    exists = _namespace(kubectl, there)
    yield from there
    if exists and isinstance(metadata, dict):
        yield from _dry_run(kubectl, checked)
    if checked.job is None:
        yield unknown(
            checked.where, "what it names in the cluster is looked up once it can be read"
        )
        return
    if not exists:
        yield unknown(f"namespace {namespace}", "what the job needs there can't be looked up")
        return
    for check in (_credentials, _authority, _pod_security, _service_account):
        yield from check(kubectl, checked.job)


def _namespace(kubectl: Kubectl, findings: list[Finding]) -> bool:
    """False: it does not exist."""
    name = kubectl.namespace
    where = f"namespace {name}"
    try:
        kubectl.get("namespace", name)
    except NotFound:
        findings.append(problem(where, f"does not exist: kubectl create namespace {name}"))
        return False
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        findings.append(unknown(where, f"can't be read: {_first_line(error)}"))
        return True
    findings.append(ok(where, "exists"))
    return True


def _dry_run(kubectl: Kubectl, checked: Checked) -> Iterator[Finding]:
    """As the API server answers: schema, CEL, changes that a running job can't take."""
    try:
        kubectl.run(
            "apply", "--dry-run=server", "-f", "-", "-o", "name", given=json.dumps(checked.tree)
        )
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        words = error.message
        if "forbidden" in words.lower() and "is invalid" not in words:
            yield unknown(checked.where, f"you may not apply it there: {_first_line(error)}")
            return
        for line in _refusals(words):
            yield problem(checked.where, f"the API server refuses it: {line}")
        return
    yield ok(checked.where, "the API server takes it (server-side dry run)")


def _refusals(words: str) -> list[str]:
    """One a line: `The TrainingJob "x" is invalid:` is followed by `* field: why`."""
    bullets = [line.strip()[2:] for line in words.splitlines() if line.strip().startswith("* ")]
    return bullets or [" ".join(words.split())]


def _credentials(kubectl: Kubectl, job: TrainingJob) -> Iterator[Finding]:
    remote = job.spec.checkpoint.remote
    if remote is not None and remote.credentials_secret:
        name = remote.credentials_secret
        make = (
            f"kubectl -n {kubectl.namespace} create secret generic {name} "
            f"--from-literal={ACCESS_KEY}=... --from-literal={SECRET_KEY}=..."
        )
        yield _secret(kubectl, name, (ACCESS_KEY, SECRET_KEY), make)


def _authority(kubectl: Kubectl, job: TrainingJob) -> Iterator[Finding]:
    remote = job.spec.checkpoint.remote
    if remote is not None and remote.ca_secret:
        name = remote.ca_secret
        make = (
            f"kubectl -n {kubectl.namespace} create secret generic {name} --from-file={CA_KEY}=FILE"
        )
        yield _secret(kubectl, name, (CA_KEY,), make)


def _secret(kubectl: Kubectl, name: str, keys: tuple[str, ...], make: str) -> Finding:
    where = f"Secret {name}"
    try:
        found = kubectl.secret(name)
    except NotFound:
        return problem(where, f"does not exist in {kubectl.namespace}: {make}")
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        return unknown(where, f"can't be read: {_first_line(error)}")
    missing = [key for key in keys if not found.get(key)]
    if missing:
        return problem(where, f"has no {' and no '.join(missing)}; expected {' and '.join(keys)}")
    return ok(where, f"has {' and '.join(keys)}")


def _pod_security(kubectl: Kubectl, job: TrainingJob) -> Iterator[Finding]:
    local = job.spec.checkpoint.local
    if local is None or local.volume != HOST_PATH:
        return
    where = f"namespace {kubectl.namespace}"
    try:
        labels = kubectl.get("namespace", kubectl.namespace)["metadata"].get("labels") or {}
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        yield unknown(where, f"whether its Pod Security allows hostPath: {_first_line(error)}")
        return
    level = labels.get(_ENFORCE, "")
    if level in _FORBIDS_HOST_PATH:
        yield problem(
            where,
            f"Pod Security {level!r} forbids the hostPath volume of checkpoint.local: use "
            f"`volume: pvc` or `ephemeral`, or kubectl label namespace {kubectl.namespace} "
            f"{_ENFORCE}=privileged --overwrite",
        )
    elif level:
        yield ok(where, f"Pod Security {level!r} allows hostPath")
    else:
        yield ok(
            where,
            "has no Pod Security label: hostPath is allowed, unless the API server's "
            "own default forbids it",
        )


def _service_account(kubectl: Kubectl, job: TrainingJob) -> Iterator[Finding]:
    name = str(job.spec.pod_template["spec"].get("serviceAccountName") or "default")
    where = f"service account {name}"
    try:
        kubectl.get("serviceaccount", name)
    except NotFound:
        yield problem(
            where,
            f"does not exist: kubectl -n {kubectl.namespace} create serviceaccount {name}",
        )
    except (NoAnswer, UsageError):
        raise
    except CommandError as error:
        yield unknown(where, f"can't be read: {_first_line(error)}")
    else:
        yield ok(where, "exists")


def context_namespace(kubectl: Kubectl) -> str:
    """That of the kubectl context, for a manifest that names none."""
    found: dict[str, Any] = json.loads(kubectl.run("config", "view", "--minify", "-o", "json"))
    contexts = found.get("contexts") or [{}]
    return str((contexts[0].get("context") or {}).get("namespace") or "default")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
