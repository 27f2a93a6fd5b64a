"""How the command prints: tables for people, JSON for programs, errors on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from backstay_cli.errors import (
    EXIT_CORRUPT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    CommandError,
)
from backstay_protocol import codec
from backstay_protocol.errors import (
    BackstayError,
    CorruptData,
    ProtocolError,
    Refused,
    Unreachable,
)


class Format(StrEnum):
    """What `-o` takes."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[
    Format, typer.Option("-o", "--output", help="text for people, json for programs.")
]


def print_json(value: Any) -> None:
    """One JSON document of a message or plain value."""
    sys.stdout.write(json.dumps(codec.to_plain(value), indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as it needs to be; a line where there are no rows."""
    console = Console(highlight=False)
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


@contextmanager
def told_errors() -> Iterator[None]:
    """End the command with its exit code and one message, never with a traceback of ours."""
    try:
        yield
    except BackstayError as error:
        sys.stderr.write(f"backstay: {error}\n")
        raise typer.Exit(exit_code_of(error)) from error
    except OSError as error:
        sys.stderr.write(f"backstay: {error}\n")
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        sys.stderr.write("backstay: interrupted\n")
        raise typer.Exit(EXIT_INTERRUPTED) from error


def exit_code_of(error: BackstayError) -> int:
    """The documented exit code for an error."""
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, CorruptData):
        return EXIT_CORRUPT
    if isinstance(error, Unreachable | ProtocolError):
        return EXIT_UNREACHABLE
    if isinstance(error, Refused) and error.status == 404:
        return EXIT_NOT_FOUND
    return EXIT_FAILED
