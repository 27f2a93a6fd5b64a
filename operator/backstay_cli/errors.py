"""The command's errors and exit codes.

BackstayError
└── CommandError      what a person did or must do; carries the exit code
    ├── UsageError    2   wrong arguments or manifest
    ├── NotFound      3   no such job, checkpoint or folder
    ├── Corrupt       4   bytes are not what their manifest says
    └── NoAnswer      5   a sidecar or store can't be reached
"""

from __future__ import annotations

from backstay_protocol.errors import BackstayError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CORRUPT = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130

EXIT_CODES_HELP = (
    "Exit codes: 0 done, 1 failed, 2 wrong arguments or manifest, 3 not found, 4 corrupt data, "
    "5 unreachable, 130 interrupted."
)


class CommandError(BackstayError):
    """Told to the person in one or more lines; the command ends with `exit_code`."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        """`hint`: what to do next."""
        super().__init__(f"{message}\n  {hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(CommandError):
    """Wrong arguments, or a manifest that is none."""

    exit_code = EXIT_USAGE


class NotFound(CommandError):
    """What was named does not exist."""

    exit_code = EXIT_NOT_FOUND


class Corrupt(CommandError):
    """Bytes are not what their manifest says."""

    exit_code = EXIT_CORRUPT


class NoAnswer(CommandError):
    """A sidecar or store can't be reached."""

    exit_code = EXIT_UNREACHABLE
