"""`backstay validate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from backstay_cli.cluster import Kubectl
from backstay_cli.errors import EXIT_NOT_FOUND, EXIT_OK, EXIT_USAGE
from backstay_cli.output import Format, OutputOption, print_json, told_errors
from backstay_cli.validating import PROBLEM, UNKNOWN, Checked, Finding, check_bucket, read_files
from backstay_cli.validating.server import (
    check_definition,
    check_server,
    cluster_policy,
)
from backstay_cli.where import ContextOption, KubeconfigOption, NamespaceOption

HELP = """Say everything that is wrong with a manifest, a line each.

    The same reading as the operator's and the local runner's, and what the operator refuses
    afterwards (memory that can't hold the slots, fields that this version can't carry out). A
    file may have several documents; `-` is standard input.

    With --server also what only the cluster can say, by kubectl and with your rights: a server-side
    dry run (schema and rules of the definition, changes that a running job can't take), the
    operator's allow-lists, namespace, Pod Security, service account, Secrets. Nothing is written.

    Each line is ok, problem, or unknown (it could not be checked). Exit code 2: there is a
    problem; 3: there is no such file; 5: the cluster can't be reached.

    \b
    Examples:
      backstay validate job.yaml
      backstay validate --server -n team job.yaml
      backstay validate --server --check-bucket job.yaml -o json
      helm template my-chart | backstay validate -
    """


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What `-o json` prints."""

    problems: int
    unknown: int
    findings: tuple[Finding, ...]


def validate(
    files: Annotated[list[Path], typer.Argument(help="Manifests (YAML); -: standard input.")],
    server: Annotated[bool, typer.Option("--server", help="Ask the cluster, too.")] = False,
    bucket: Annotated[
        bool, typer.Option("--check-bucket", help="Try to list the bucket from here.")
    ] = False,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="Of the bucket's store, as seen from here.")
    ] = "",
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    kubeconfig: KubeconfigOption = "",
    output: OutputOption = Format.TEXT,
) -> None:
    """Validate manifests."""
    with told_errors():
        kubectl = Kubectl(namespace=namespace, context=context, kubeconfig=kubeconfig)
        findings: list[Finding] = []
        policy = None
        if server:
            findings += check_definition(kubectl)
            policy = cluster_policy(kubectl, findings)
        for checked in read_files(files, policy, findings):
            there = _target(kubectl, checked) if server else None
            if there is not None:
                findings += check_server(there, checked)
            if bucket:
                findings += check_bucket(checked, there, endpoint)
        _tell(findings, output)
    raise typer.Exit(_exit_code(findings))


def _target(kubectl: Kubectl, checked: Checked) -> Kubectl:
    """For the namespace that the job goes to."""
    metadata = checked.tree.get("metadata") if isinstance(checked.tree, dict) else None
    own = metadata.get("namespace") if isinstance(metadata, dict) else ""
    return replace(kubectl, namespace=str(own or kubectl.namespace))


def _tell(findings: list[Finding], output: Format) -> None:
    problems = sum(finding.verdict == PROBLEM for finding in findings)
    unknown = sum(finding.verdict == UNKNOWN for finding in findings)
    if output is Format.JSON:
        print_json(_Result(problems=problems, unknown=unknown, findings=tuple(findings)))
        return
    for finding in findings:
        typer.echo(f"{finding.verdict:<8} {finding.where}: {finding.text}")


def _exit_code(findings: list[Finding]) -> int:
    problems = [finding for finding in findings if finding.verdict == PROBLEM]
    if not problems:
        return EXIT_OK
    return EXIT_NOT_FOUND if all(found.missing_file for found in problems) else EXIT_USAGE
