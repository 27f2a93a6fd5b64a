"""The sidecar's errors, and the one shape in which they leave it.

BackstayError (protocol)
├── SettingsError      the process can't start: what is wrong with its environment or files
├── ApiError           a request is refused: status, code, message, hint go onto the wire
├── TierFull, Cancelled                    tiers/base.py
└── ProtocolError, CorruptData, Unreachable, Refused     from the protocol, mapped by `as_api_error`

Used by every module here; knows no HTTP library.
"""

from __future__ import annotations

from backstay_protocol.errors import (
    BackstayError,
    CorruptData,
    ProtocolError,
    Refused,
    Unreachable,
    VersionMismatch,
)
from backstay_protocol.messages import ErrorBody, ErrorReply

INVALID_REQUEST = "InvalidRequest"
UNAUTHORIZED = "Unauthorized"
NOT_FOUND = "NotFound"
METHOD_NOT_ALLOWED = "MethodNotAllowed"
CONFLICT = "Conflict"
NOT_LEADER = "NotLeader"
BODY_TOO_LARGE = "BodyTooLarge"
REQUEST_TIMEOUT = "RequestTimeout"
RANGE_NOT_SATISFIABLE = "RangeNotSatisfiable"
VERSION_MISMATCH = "VersionMismatch"
HEADERS_TOO_LARGE = "HeadersTooLarge"
TOO_MANY_CONNECTIONS = "TooManyConnections"
UNREACHABLE = "Unreachable"
STOPPING = "Stopping"
CORRUPT_DATA = "CorruptData"
INTERNAL = "Internal"


class SettingsError(BackstayError):
    """The process can't start with what it was given."""


class ApiError(BackstayError):
    """A request is refused. The four parts go onto the wire."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        """`status`: HTTP; `code`: CamelCase constant; `message`: a sentence; `hint`: what to do."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint

    @property
    def reply(self) -> ErrorReply:
        """The body on the wire."""
        return ErrorReply(error=ErrorBody(code=self.code, message=self.message, hint=self.hint))


def as_api_error(error: Exception) -> ApiError:
    """What a caller is told of an error that no route has handled by itself."""
    match error:
        case ApiError():
            return error
        case Refused():
            return ApiError(error.status, error.code, error.message, error.hint)
        case VersionMismatch():
            return ApiError(426, VERSION_MISMATCH, str(error))
        case ProtocolError() | ValueError():
            return ApiError(400, INVALID_REQUEST, str(error), "see /openapi.json for the fields")
        case FileNotFoundError():
            return ApiError(404, NOT_FOUND, str(error))
        case Unreachable():
            return ApiError(503, UNREACHABLE, str(error), "try again")
        case CorruptData():
            return ApiError(502, CORRUPT_DATA, str(error))
    return ApiError(
        500,
        INTERNAL,
        f"{type(error).__name__}: {error}",
        "this is a fault in Backstay; the sidecar's log has the traceback",
    )
