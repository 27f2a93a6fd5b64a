"""`backstay local`: a job's pods as processes of this machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from backstay_cli.errors import EXIT_CODES_HELP, NotFound
from backstay_cli.find import LocalJob, choose_job, local_jobs
from backstay_cli.local.account import Account, json_lines, lasting
from backstay_cli.local.control import FailOrder, send_order
from backstay_cli.local.machine import folder_bytes
from backstay_cli.local.state import StateFolder, control_socket, default_state_dir, memory_root
from backstay_cli.manifest_file import load_job
from backstay_cli.output import Format, OutputOption, print_json, print_table, told_errors
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.clock import SYSTEM_CLOCK

app = typer.Typer(
    no_args_is_help=True,
    help="Run a TrainingJob on this machine: processes and folders instead of pods and volumes.",
)


class Failure(StrEnum):
    """What `local fail` can break."""

    TRAINER = "trainer"
    MEMORY = "memory"
    NODE = "node"
    ALL = "all"


StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The job's state folder [default: ${BACKSTAY_HOME:-~/.backstay}/local/NAMESPACE/NAME]",
    ),
]
JobOption = Annotated[
    str, typer.Option("--job", help="NAME or NAMESPACE/NAME; not needed while one job runs.")
]


@app.command(
    epilog=EXIT_CODES_HELP,
    help="""Run a job until it has succeeded or failed.

    Replicas become process groups with a folder as node (memory in /dev/shm, disk in the state
    folder) and a loopback address each. `workingDir` is relative to the manifest's folder. Run it
    again and it goes on from the last checkpoint. Ctrl-C takes one last common save and ends
    everything; twice ends it at once.

    \b
    Examples:
      backstay local run job.yaml
      backstay local run job.yaml --logs
      backstay local run job.yaml -o json > events.jsonl
    """,
)
def run(
    manifest: Annotated[Path, typer.Argument(help="A TrainingJob (YAML).")],
    state_dir: StateDirOption = None,
    output: OutputOption = Format.TEXT,
    logs: Annotated[bool, typer.Option("--logs", help="Show all containers' output.")] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget what earlier runs left here: status, disks, the embedded store's data.",
        ),
    ] = False,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="For the last common save after Ctrl-C.")
    ] = 15.0,
) -> None:
    """Run a job."""
    from backstay_cli.local.runner import LocalRunner, RunOptions  # takes long to import

    with told_errors():
        job = load_job(manifest)
        state = StateFolder(state_dir or default_state_dir(job.namespace, job.name))
        account = Account()
        emit = lasting(json_lines(sys.stdout) if output is Format.JSON else account)
        options = RunOptions(grace_seconds=grace_seconds, follow_logs=logs)
        with state.locked():
            if fresh:
                state.forget()
            runner = LocalRunner(job, manifest, state, options, emit, SYSTEM_CLOCK)
            try:
                code = asyncio.run(runner.run())
            finally:
                account.close()
        raise typer.Exit(code)


@app.command(
    epilog=EXIT_CODES_HELP,
    help="""Break a running job on purpose, from another terminal.

    \b
    trainer  kills one rank's process (SIGKILL)
    memory   what a reboot does: all containers of a replica die, its memory volume is empty
    node     destroys a node with memory and disk; its pod comes back on a new one
    all      destroys every node

    \b
    Examples:
      backstay local fail trainer
      backstay local fail node --replica 1
    """,
)
def fail(
    failure: Annotated[Failure, typer.Argument(help="What to break.")],
    replica: Annotated[
        int, typer.Option(min=-1, help="Whose (-1: the last replica; `all` ignores it).")
    ] = -1,
    local_rank: Annotated[int, typer.Option(min=0, help="Which rank's, for `trainer`.")] = 0,
    job: JobOption = "",
    state_dir: StateDirOption = None,
) -> None:
    """Break a running job."""
    with told_errors():
        found = choose_job(job, state_dir, running=True)
        order = FailOrder(failure=failure.value, replica=replica, local_rank=local_rank)
        typer.echo(send_order(control_socket(found.status.uid), order))


@app.command(
    "list",
    epilog=EXIT_CODES_HELP,
    help="""List this machine's local jobs.

    \b
    Examples:
      backstay local list
      backstay local list -o json
    """,
)
def list_jobs(output: OutputOption = Format.TEXT) -> None:
    """List local jobs."""
    with told_errors():
        rows = [_row(job) for job in local_jobs()]
        if output is Format.JSON:
            print_json(rows)
            return
        print_table(
            "local jobs",
            ("JOB", "STATE", "REPLICAS", "DISK", "MEMORY", "STATE DIR"),
            [
                (
                    f"{row.namespace}/{row.job}",
                    row.state,
                    str(row.replicas),
                    format_bytes(row.disk_bytes),
                    format_bytes(row.memory_bytes),
                    row.state_dir,
                )
                for row in rows
            ],
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    namespace: str
    job: str
    state: str
    replicas: int
    disk_bytes: int
    memory_bytes: int
    state_dir: str


def _row(job: LocalJob) -> _Row:
    return _Row(
        namespace=job.status.namespace,
        job=job.status.job,
        state="running" if job.running else job.status.record.outcome or "stopped",
        replicas=job.status.replicas,
        disk_bytes=folder_bytes(job.folder.root),
        memory_bytes=folder_bytes(memory_root(job.status.uid)),
        state_dir=str(job.folder.root),
    )


@app.command(
    epilog=EXIT_CODES_HELP,
    help="""Remove what a local job that does not run has left: disks, store, logs, memory.

    \b
    Examples:
      backstay local clean --job my-job
    """,
)
def clean(
    job: JobOption = "",
    state_dir: StateDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Remove what a job left."""
    with told_errors():
        found = choose_job(job, state_dir, running=False)
        root = found.folder.root
        if not yes:
            typer.confirm(f"Remove {root} with all checkpoints in it?", abort=True)
        with found.folder.locked():
            found.folder.forget()
        shutil.rmtree(root, ignore_errors=True)
        if root.exists():
            raise NotFound(f"{root} could not be removed")
        typer.echo(f"removed {root}")
