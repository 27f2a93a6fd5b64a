"""`backstay agent`: the sidecar, beside any launcher, without an operator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from backstay_cli.errors import NotFound, UsageError
from backstay_cli.output import told_errors
from backstay_protocol.errors import ProtocolError
from backstay_protocol.names import ENV_TOKEN
from backstay_protocol.topology import read_topology

HELP = """Run the sidecar of one replica beside any launcher.

    The same program that runs in every pod; it takes this command's place. Start the trainer with
    BACKSTAY_VOLUME set to the same folder (in /dev/shm). The job's token comes from the
    environment: BACKSTAY_TOKEN (openssl rand -hex 32), the same for all.

    \b
    Examples:
      export BACKSTAY_TOKEN=$(openssl rand -hex 32)
      backstay agent --topology topology.json --replica 0 --volume /dev/shm/job &
      BACKSTAY_VOLUME=/dev/shm/job torchrun --nproc-per-node 2 train.py
    """


def agent(
    topology: Annotated[Path, typer.Option(help="The job's topology (JSON).")],
    replica: Annotated[int, typer.Option(min=0, help="Index of this replica.")],
    volume: Annotated[Path, typer.Option(help="The memory volume; made if missing.")],
    listen: Annotated[str, typer.Option(help="Address to listen on [own peer's host].")] = "",
) -> None:
    """Become the sidecar."""
    with told_errors():
        _check(topology, replica)
        volume.mkdir(parents=True, exist_ok=True)
        arguments = ["--topology", str(topology), "--replica", str(replica)]
        arguments += ["--volume", str(volume.absolute())]
        if listen:
            arguments += ["--listen", listen]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "backstay_sidecar", *arguments])


def _check(path: Path, replica: int) -> None:
    try:
        topology = read_topology(str(path))
    except FileNotFoundError as error:
        raise NotFound(f"--topology: there is no file {path}") from error
    except (OSError, ProtocolError) as error:
        raise UsageError(f"--topology: {path}: {error}") from error
    if replica >= topology.replicas:
        raise UsageError(
            f"--replica: got {replica}; {path} has replicas 0 to {topology.replicas - 1}"
        )
    if not os.environ.get(ENV_TOKEN):
        raise UsageError(f"{ENV_TOKEN} is not set", "make one: openssl rand -hex 32")
