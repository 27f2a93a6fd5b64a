"""The `backstay` command: wiring only."""

from __future__ import annotations

import os

import typer

from backstay_cli.commands import agent, local, look, pull
from backstay_cli.errors import EXIT_CODES_HELP
from backstay_cli.where import ENV_CLUSTER, located

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES_HELP,
    help="""Keep PyTorch training alive through failures; look at, pull and verify checkpoints.

    \b
    Examples:
      backstay local run job.yaml
      backstay checkpoints
      backstay pull --step latest --out ./checkpoint
    """,
)
app.add_typer(local.app, name="local")
_NO_BUCKET = ("bucket", "endpoint", "run", "prefix", "region")
for function, text in (
    (located(look.status, *_NO_BUCKET), look.STATUS_HELP),
    (located(look.checkpoints), look.CHECKPOINTS_HELP),
    (located(pull.pull), pull.PULL_HELP),
    (located(pull.verify), pull.VERIFY_HELP),
    (agent.agent, agent.HELP),
):
    app.command(help=text, epilog=EXIT_CODES_HELP)(function)


def main() -> None:
    """Entry point of the console script."""
    app()


def kubectl_main() -> None:
    """Entry point of `kubectl backstay`: the same commands, for jobs in the context's cluster."""
    os.environ.setdefault(ENV_CLUSTER, "1")
    app()


if __name__ == "__main__":
    main()
