"""The protocol's errors.

BackstayError
├── ProtocolError        the other side speaks another version or sent what can't be read
│   └── VersionMismatch
├── CorruptData          bytes on a disk, in memory or off the network are not what was promised
│   └── DigestMismatch
├── Unreachable          a peer or store did not answer; proves nothing about its data
├── Cancelled            a transfer was told to stop (shutdown, the word of a newer attempt)
└── Refused              the other side understood and said no (it carries the wire error)
"""

from __future__ import annotations


class BackstayError(Exception):
    """Anything that Backstay reports by itself."""


class ProtocolError(BackstayError):
    """The other side sent something that can't be read as the message that was expected."""


class VersionMismatch(ProtocolError):
    """The other side speaks a protocol version that this one can't work with."""


class CorruptData(BackstayError):
    """Stored or received bytes are not what their manifest promised."""


class DigestMismatch(CorruptData):
    """One chunk's digest differs from the manifest's."""


class Unreachable(BackstayError):
    """No (whole) answer: refused, reset, timed out. Proves nothing about the data behind it."""


class Cancelled(BackstayError):
    """The transfer was told to stop (shutdown, or the word of a newer attempt)."""


class Refused(BackstayError):
    """The other side answered with an error of the one wire shape."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        """Keep the parts: HTTP status, machine-readable code, sentence, what to do next."""
        super().__init__(f"{message} ({hint})" if hint else message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint
