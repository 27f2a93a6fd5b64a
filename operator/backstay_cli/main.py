"""The `backstay` command: wiring only."""

from __future__ import annotations

import os

import typer

from backstay_cli.commands import (
    agent,
    explain,
    flush,
    local,
    look,
    pull,
    restore,
    support,
    validate,
)
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
_NO_BUCKET = ("bucket", "endpoint", "run", "prefix", "region", "ca_file")
for name, function, text in (
    ("status", located(look.status, *_NO_BUCKET), look.STATUS_HELP),
    ("checkpoints", located(look.checkpoints), look.CHECKPOINTS_HELP),
    ("pull", located(pull.pull), pull.PULL_HELP),
    ("verify", located(pull.verify), pull.VERIFY_HELP),
    ("flush", located(flush.flush_command, *_NO_BUCKET), flush.FLUSH_HELP),
    ("validate", validate.validate, validate.HELP),
    ("support-bundle", located(support.support_bundle), support.HELP),
    ("restore", located(restore.restore), restore.HELP),
    ("explain-restore", located(explain.explain_restore), explain.HELP),
    ("agent", agent.agent, agent.HELP),
):
    app.command(name, help=text, epilog=EXIT_CODES_HELP)(function)


def main() -> None:
    """Entry point of the console script."""
    app()


def kubectl_main() -> None:
    """Entry point of `kubectl backstay`: the same commands, for jobs in the context's cluster."""
    os.environ.setdefault(ENV_CLUSTER, "1")
    app()


if __name__ == "__main__":
    main()
