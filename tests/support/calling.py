"""The command called in the test's own process, as a person calls it."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from backstay_cli.main import app


def call(*arguments: str, input: str | None = None, **env: str) -> Result:
    """One call to its end; an exception of ours is the test's."""
    result = CliRunner().invoke(app, list(arguments), input=input, env={"COLUMNS": "120", **env})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
