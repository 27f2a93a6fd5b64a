from __future__ import annotations

import http.client
import socket
import ssl

import pytest
import urllib3.exceptions as u
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.errors import Unreachable
from backstay_sidecar.transfer import s3_errors as e
from backstay_sidecar.transfer.upload import MAX_PARTS, MIN_PART_BYTES, part_size

PLACE = e.Place("https://s3.example:9000", "checkpoints")

ANSWERS = [
    (403, "InvalidAccessKeyId", "", e.UnknownAccessKey),
    (403, "SignatureDoesNotMatch", "", e.WrongSecretKey),
    (400, "ExpiredToken", "", e.ExpiredCredentials),
    (403, "AccessDenied", "Request has expired", e.ExpiredCredentials),
    (403, "AccessDenied", "Access Denied.", e.AccessDenied),
    (403, "RequestTimeTooSkewed", "", e.ClockSkewed),
    (404, "NoSuchBucket", "", e.MissingBucket),
    (404, "NoSuchUpload", "", e.UploadGone),
    (507, "", "", e.StoreFull),
    (400, "XMinioStorageFull", "", e.StoreFull),
    (500, "InternalError", "", e.StoreFailing),
    (503, "SlowDown", "", e.StoreFailing),
    (429, "", "", e.StoreFailing),
    (502, "", "Bad Gateway", e.StoreFailing),
    (418, "Teapot", "", e.StoreRefused),
    (403, "", "", e.StoreRefused),
]


@pytest.mark.parametrize(("status", "code", "message", "kind"), ANSWERS)
def test_each_answer_has_its_own_class_and_names_the_place(
    status: int, code: str, message: str, kind: type[e.StoreError]
) -> None:
    error = e.from_answer(PLACE, status, code, message, "write a/b")
    assert type(error) is kind
    for word in ("https://s3.example:9000", "'checkpoints'", "write a/b", code or str(status)):
        assert word in str(error)


def under(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


SILENCES = [
    (ConnectionRefusedError(111, "Connection refused"), e.StoreConnectionRefused),
    (socket.gaierror(-2, "Name or service not known"), e.StoreNameUnknown),
    (TimeoutError("timed out"), e.StoreSilent),
    (ConnectionResetError(104, "reset"), e.StoreConnectionBroken),
    (http.client.RemoteDisconnected("closed"), e.StoreConnectionBroken),
    (http.client.IncompleteRead(b""), e.StoreConnectionBroken),
    (ssl.SSLError(1, "bad certificate"), e.StoreTlsFailed),
    (OSError(113, "No route to host"), e.StoreUnreachable),
    (
        u.ProtocolError("aborted", ConnectionResetError(104, "r")),
        e.StoreConnectionBroken,
    ),
    (
        under(u.NewConnectionError(None, "no"), ConnectionRefusedError(111, "no")),  # type: ignore[arg-type]
        e.StoreConnectionRefused,
    ),
    (under(u.ConnectTimeoutError("no"), TimeoutError()), e.StoreSilent),
    (under(u.SSLError("no"), ssl.SSLError(1, "no")), e.StoreTlsFailed),
]


@pytest.mark.parametrize(("cause", "kind"), SILENCES)
def test_each_way_to_get_no_answer_has_its_own_class(
    cause: Exception, kind: type[e.StoreError]
) -> None:
    error = e.from_exception(PLACE, cause, "read a")
    assert type(error) is kind
    assert "read a" in str(error)


def all_kinds(kind: type[e.StoreError]) -> list[type[e.StoreError]]:
    return [kind, *(k for below in kind.__subclasses__() for k in all_kinds(below))]


def test_every_error_is_unreachable_says_what_and_what_to_do() -> None:
    kinds = [k for k in all_kinds(e.StoreError) if k is not e.StoreError]
    assert len({k.what for k in kinds}) == len(kinds)
    for kind in kinds:
        assert issubclass(kind, Unreachable)
        assert kind.hint
        assert kind.passes == (issubclass(kind, e.StoreUnreachable) and kind is not e.UploadGone)


@given(st.integers(1, 1 << 42), st.sampled_from([4096, 64 << 10, 8 << 20, 100 << 20]))
def test_parts_are_whole_chunks_within_the_limits_of_the_store(size: int, chunk: int) -> None:
    part = part_size(size, chunk, 16 << 20)
    assert part % chunk == 0
    assert part >= MIN_PART_BYTES
    assert -(-size // part) <= MAX_PARTS


@pytest.mark.parametrize(
    ("code", "key", "variable"),
    [
        ("InvalidAccessKeyId", "accessKey", "BACKSTAY_S3_ACCESS_KEY"),
        ("SignatureDoesNotMatch", "secretKey", "BACKSTAY_S3_SECRET_KEY"),
        ("ExpiredToken", "sessionToken", "BACKSTAY_S3_SESSION_TOKEN"),
    ],
)
def test_refused_keys_are_named_as_the_secret_and_as_the_environment_call_them(
    code: str, key: str, variable: str
) -> None:
    told = str(e.from_answer(e.Place("http://s3", "models"), 403, code, "", "list"))
    assert f"in a cluster {'renew' if key == 'sessionToken' else 'check'} {key}" in told
    assert "remote.credentialsSecret" in told
    assert variable in told
