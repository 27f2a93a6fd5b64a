"""Reading manifests: everything that is wrong with each, without any cluster.

The same reading as operator and local runner use, and what the operator would refuse afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay_cli.errors import NotFound, UsageError
from backstay_cli.manifest_file import STANDARD_INPUT, Document, read_documents
from backstay_cli.validating.findings import PROBLEM, Finding, ok, problem, unknown
from backstay_operator.api import Allowances, InvalidJob, TrainingJob, read_allowances, read_job
from backstay_operator.api.names import KIND, REASON_NOT_ALLOWED
from backstay_operator.decide.admission import refusal


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a cluster's operator allows, and gives its sidecars."""

    allow: Allowances
    sidecar_memory: str = "512Mi"
    known: bool = False
    """It was read from the cluster; else the chart's defaults stand in."""
    namespace: str = "default"
    """Where a job goes whose manifest names none."""


@dataclass(frozen=True)
class Checked:
    """One TrainingJob of a file."""

    document: Document
    tree: Any
    job: TrainingJob | None
    """None: it can't be read."""

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.document.source}:{self.document.line}"


def default_policy(namespace: str = "default") -> Policy:
    """The chart's defaults."""
    return Policy(allow=read_allowances({}), namespace=namespace)


def read_files(
    paths: Sequence[Path], policy: Policy | None, findings: list[Finding]
) -> list[Checked]:
    """Every TrainingJob of every file. `policy`: of the cluster that shall carry them out; None:
    there is none, and what only a cluster refuses is told as unknown.
    """
    found = []
    for path in paths:
        try:
            documents = read_documents(path)
            jobs = list(_jobs(documents, policy, findings))
        except NotFound as error:
            findings.append(_unreadable(path, error, missing=True))
        except UsageError as error:
            findings.append(_unreadable(path, error))
        else:
            found += jobs
            if not jobs:
                findings.append(problem(str(path), "no TrainingJob is in it"))
    return found


def _unreadable(path: Path, error: NotFound | UsageError, *, missing: bool = False) -> Finding:
    source = STANDARD_INPUT if str(path) == "-" else str(path)
    text = error.message.removeprefix(f"{source}:").strip()
    return Finding(verdict=PROBLEM, where=source, text=text, missing_file=missing)


def _jobs(
    documents: list[Document], policy: Policy | None, findings: list[Finding]
) -> Iterator[Checked]:
    for document in documents:
        if document.node is None:
            continue
        tree = document.tree()
        kind = tree.get("kind") if isinstance(tree, dict) else None
        if kind != KIND and len(documents) > 1 and kind:
            where = f"{document.source}:{document.line}"
            findings.append(ok(where, f"a {kind}: no concern of Backstay, passed over"))
            continue
        if policy is not None:
            tree = _placed(tree, policy.namespace)
        checked = Checked(document, tree, _read(tree, policy))
        findings += list(_findings(checked, policy))
        yield checked


def _placed(tree: Any, namespace: str) -> Any:
    """As kubectl does with what names no namespace."""
    metadata = tree.get("metadata") if isinstance(tree, dict) else None
    if not isinstance(metadata, dict) or metadata.get("namespace"):
        return tree
    return {**tree, "metadata": {**metadata, "namespace": namespace}}


def _read(tree: Any, policy: Policy | None) -> TrainingJob | None:
    try:
        return read_job(tree, policy.allow) if policy else read_job(tree)
    except InvalidJob:
        return None


def _findings(checked: Checked, policy: Policy | None) -> Iterator[Finding]:
    wrong = list(_mistakes(checked, policy))
    yield from wrong
    if not wrong and checked.job is not None:
        ranks = f"{checked.job.world_size} ranks in {checked.job.spec.replicas} pods"
        yield ok(checked.where, f"TrainingJob {checked.job.run} can be read: {ranks}")
    if policy is None:
        yield from _only_in_a_cluster(checked)


def _mistakes(checked: Checked, policy: Policy | None) -> Iterator[Finding]:
    try:
        job = read_job(checked.tree, policy.allow) if policy else read_job(checked.tree)
    except InvalidJob as error:
        for one in error.problems:
            where = f"{checked.document.source}:{checked.document.line_of(one)}"
            guessed = one.reason == REASON_NOT_ALLOWED and policy is not None and not policy.known
            yield (unknown if guessed else problem)(where, str(one))
        return
    against = refusal(job, (policy or default_policy()).sidecar_memory)
    for line in against.message.splitlines() if against else ():
        yield problem(checked.where, line)


def _only_in_a_cluster(checked: Checked) -> Iterator[Finding]:
    """What a local run can do without, for those who mean to apply it."""
    told = set()
    try:
        read_job(checked.tree)
    except InvalidJob as error:
        told = {one.path for one in error.problems}
    try:
        read_job(checked.tree, read_allowances({}))
    except InvalidJob as error:
        for one in error.problems:
            if one.path not in told:
                where = f"{checked.document.source}:{checked.document.line_of(one)}"
                yield unknown(where, f"in a cluster: {one}")
