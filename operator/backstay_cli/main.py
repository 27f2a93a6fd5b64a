"""The `backstay` command: wiring only."""

from __future__ import annotations

import typer

from backstay_cli.commands import agent, local, look, pull
from backstay_cli.errors import EXIT_CODES_HELP

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
for function, text in (
    (look.status, look.STATUS_HELP),
    (look.checkpoints, look.CHECKPOINTS_HELP),
    (pull.pull, pull.PULL_HELP),
    (pull.verify, pull.VERIFY_HELP),
    (agent.agent, agent.HELP),
):
    app.command(help=text, epilog=EXIT_CODES_HELP)(function)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
