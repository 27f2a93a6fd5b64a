"""What an object store says or fails to say, in words for people: which store, what, what to do.

Unreachable (protocol)
├── StoreUnreachable        it may pass by itself: try again
│   ├── StoreConnectionRefused, StoreNameUnknown, StoreConnectionBroken, StoreTlsFailed
│   ├── StoreSilent         no answer within the time-out
│   ├── StoreTooSlow        it answers, but the bytes don't get through in time
│   ├── StoreFailing        5xx, "slow down"
│   └── UploadGone          the store has forgotten a multipart upload: begin again
└── StoreRefused            a person must mend it; trying again is harmless and notices when it is
    ├── UnknownAccessKey, WrongSecretKey, ExpiredCredentials, NoIdentity, ClockSkewed, AccessDenied
    ├── MissingBucket, NoConditionalWrites, StoreFull

All are `Unreachable`: none proves anything about the data in the store. `error.passes` tells the
two branches apart. Made by the object-store client only.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from dataclasses import dataclass

import urllib3.exceptions

from backstay_protocol.errors import Unreachable


@dataclass(frozen=True)
class Place:
    """Which store and which bucket."""

    endpoint: str
    bucket: str

    def __str__(self) -> str:
        return f"bucket {self.bucket!r} at {self.endpoint}"


class StoreError(Unreachable):
    """Base of both branches; carries the place and the store's own words."""

    what = "does not work"
    hint = ""
    passes = True

    def __init__(self, place: Place, doing: str = "", said: str = "") -> None:
        """`doing`: e.g. "write x/y"; `said`: the store's or the system's own words."""
        self.place = place
        self.said = said
        text = f"{place}: {self.what}"
        text += f" ({doing})" if doing else ""
        text += f": {said}" if said else ""
        text += f"; {self.hint}" if self.hint else ""
        super().__init__(text)


class StoreUnreachable(StoreError):
    """It may pass by itself."""

    what = "it can't be reached"
    hint = "it is tried again"


class StoreConnectionRefused(StoreUnreachable):
    """Nothing listens there."""

    what = "the connection was refused"
    hint = "is the store running, and is remote.endpoint right? It is tried again"


class StoreNameUnknown(StoreUnreachable):
    """DNS does not know the host."""

    what = "the host's name is not known"
    hint = "check remote.endpoint and the cluster's DNS; it is tried again"


class StoreConnectionBroken(StoreUnreachable):
    """Reset, or closed in the middle."""

    what = "the connection broke"


class StoreTlsFailed(StoreUnreachable):
    """No TLS there, or a certificate that is not trusted."""

    what = "TLS failed"
    hint = (
        "check the scheme of remote.endpoint; an authority that is not a public one is named by "
        "remote.caSecret (a Secret with ca.crt), outside a cluster by BACKSTAY_S3_CA_FILE; it is "
        "tried again"
    )


class StoreSilent(StoreUnreachable):
    """It hangs."""

    what = "no answer in time"
    hint = "the store hangs, or something between drops packets; it is tried again"


class StoreTooSlow(StoreUnreachable):
    """Bytes move, but too few."""

    what = "too slow"
    hint = "check the network; lower remote.concurrency if it is shared; it is tried again"


class StoreFailing(StoreUnreachable):
    """5xx or 429."""

    what = "the store fails"
    hint = "its own logs tell why; it is tried again"


class UploadGone(StoreUnreachable):
    """The multipart upload was aborted or completed by somebody else."""

    what = "the store no longer knows the upload"
    hint = "it is begun again"
    passes = False  # not by repeating the same request


class StoreRefused(StoreError):
    """The store answers and says no: a person must mend it."""

    what = "the request was refused"
    hint = "check the store's policy for these credentials"
    passes = False


class UnknownAccessKey(StoreRefused):
    """InvalidAccessKeyId."""

    what = "the access key is not known"
    hint = (
        "in a cluster check accessKey in the Secret that remote.credentialsSecret names, elsewhere "
        "BACKSTAY_S3_ACCESS_KEY of the sidecar's environment"
    )


class WrongSecretKey(StoreRefused):
    """SignatureDoesNotMatch."""

    what = "the secret key is wrong (the signature does not match)"
    hint = (
        "in a cluster check secretKey in the Secret that remote.credentialsSecret names, elsewhere "
        "BACKSTAY_S3_SECRET_KEY of the sidecar's environment; and remote.region"
    )


class ExpiredCredentials(StoreRefused):
    """ExpiredToken, or a presigned URL that has run out."""

    what = "the credentials or the presigned URL have expired"
    hint = (
        "in a cluster renew sessionToken and its keys in the Secret that remote.credentialsSecret "
        "names, elsewhere BACKSTAY_S3_SESSION_TOKEN and its keys in the sidecar's environment"
    )


class NoIdentity(StoreRefused):
    """The place that the sidecar runs in gives it no keys."""

    what = "no keys came by the pod's own identity"
    hint = (
        "remote.workloadIdentity needs a service account that the bucket's owner has given a role "
        "(docs/kubernetes.md); else name a Secret in remote.credentialsSecret. It is tried again"
    )


class ClockSkewed(StoreRefused):
    """RequestTimeTooSkewed."""

    what = "the clocks of store and sidecar differ too much"
    hint = "set the node's clock"


class AccessDenied(StoreRefused):
    """AccessDenied."""

    what = "access is denied"
    hint = "these credentials need list, read, write and delete on the bucket's prefix"


class MissingBucket(StoreRefused):
    """NoSuchBucket."""

    what = "there is no such bucket"
    hint = "create it, or correct remote.bucket"


class NoConditionalWrites(StoreRefused):
    """If-None-Match is not obeyed: two leaders could overwrite each other."""

    what = "the store has no conditional writes (If-None-Match was not obeyed)"
    hint = "use a store that has them: S3, MinIO, SeaweedFS 3.80 or newer"


class StoreFull(StoreRefused):
    """No room or no quota."""

    what = "the store is full"
    hint = "free some room or raise the quota; keep fewer checkpoints (retention.keepLast)"


_BY_CODE: dict[str, type[StoreError]] = {
    "InvalidAccessKeyId": UnknownAccessKey,
    "InvalidSecurity": UnknownAccessKey,
    "SignatureDoesNotMatch": WrongSecretKey,
    "ExpiredToken": ExpiredCredentials,
    "TokenRefreshRequired": ExpiredCredentials,
    "InvalidToken": ExpiredCredentials,
    "RequestTimeTooSkewed": ClockSkewed,
    "AccessDenied": AccessDenied,
    "AllAccessDisabled": AccessDenied,
    "NoSuchBucket": MissingBucket,
    "InvalidBucketName": MissingBucket,
    "NoSuchUpload": UploadGone,
    "QuotaExceeded": StoreFull,
    "XMinioStorageFull": StoreFull,
    "XMinioAdminBucketQuotaExceeded": StoreFull,
    "EntityTooLarge": StoreRefused,
    "RequestTimeout": StoreTooSlow,
}


def from_answer(place: Place, status: int, code: str, message: str, doing: str) -> StoreError:
    """The error for an answer that is none of those the caller understands."""
    said = ": ".join(filter(None, (code, message))) or f"HTTP {status}"
    if code == "AccessDenied" and "expired" in message.lower():
        return ExpiredCredentials(place, doing, said)
    kind = _BY_CODE.get(code)
    if kind is None:
        kind = _by_status(status)
    return kind(place, doing, said if code else f"HTTP {status} {message}".strip())


def _by_status(status: int) -> type[StoreError]:
    if status == 507:
        return StoreFull
    if status >= 500 or status in (408, 409, 429):
        return StoreFailing
    return StoreRefused


def from_exception(place: Place, error: BaseException, doing: str) -> StoreError:
    """The error for a request that got no answer (of urllib3, http.client, socket or ssl)."""
    cause = _root(error)
    said = "" if isinstance(cause, TimeoutError) else _words(cause)
    return _kind_of(cause)(place, doing, said)


def _kind_of(cause: BaseException) -> type[StoreError]:
    match cause:
        case socket.gaierror() | urllib3.exceptions.NameResolutionError():
            return StoreNameUnknown
        case ConnectionRefusedError():
            return StoreConnectionRefused
        case ssl.SSLError() | urllib3.exceptions.SSLError():
            return StoreTlsFailed
        case TimeoutError() | urllib3.exceptions.TimeoutError():
            return StoreSilent
        case ConnectionError() | http.client.HTTPException() | urllib3.exceptions.ProtocolError():
            return StoreConnectionBroken
    return StoreUnreachable


def _root(error: BaseException) -> BaseException:
    """The system's own exception below those of the HTTP libraries."""
    while True:
        below = error.__cause__ or getattr(error, "reason", None)
        if not isinstance(below, BaseException) and len(error.args) > 1:
            below = error.args[1]  # urllib3: ProtocolError("Connection aborted.", the cause)
        if not isinstance(below, BaseException) or isinstance(error, OSError):
            return error
        error = below


def _words(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__
