"""One bucket of an S3 store, as the sidecar uses it: small objects, conditional create, uploads.

The `minio` client signs URLs, lists, and begins and completes uploads; object bytes travel over
plain HTTP to the presigned URLs. Every failure is a StoreError that names endpoint and bucket.
All methods block and may be called from several threads. It retries nothing: callers know how long
a thing is worth waiting for. Only the remote tier and the leader's book of attempts use it.
"""

from __future__ import annotations

import http.client
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import minio
import urllib3
from minio.credentials.providers import Provider, StaticProvider
from minio.datatypes import Part
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from backstay_protocol.authorities import Authorities
from backstay_protocol.pull import Endpoint
from backstay_protocol.topology import DEFAULT_REGION
from backstay_sidecar.tiers.identity import Ambient
from backstay_sidecar.transfer.s3_errors import (
    NoConditionalWrites,
    Place,
    StoreError,
    StoreFailing,
    StoreTlsFailed,
    UploadGone,
    from_answer,
    from_exception,
)
from backstay_sidecar.transfer.upload import Stored

T = TypeVar("T")

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
CONNECTIONS = 16
SIGNED_SECONDS = 3600
CONFLICT_TRIES = 5
_CODE = re.compile(rb"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]*)</Message>")


@dataclass(frozen=True)
class UnfinishedUpload:
    """A multipart upload that nobody completed."""

    key: str
    upload_id: str
    initiated: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class RemoteStore:
    """One bucket."""

    def __init__(
        self,
        *,
        endpoint: str,
        bucket: str,
        access_key: str = "",
        secret_key: str = "",
        session_token: str = "",
        region: str = DEFAULT_REGION,
        authorities: Authorities | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        """`endpoint`: `http(s)://host[:port]`. Opens no connection yet. Without keys they come by
        the place that the process runs in. `authorities`: None: the public ones.
        """
        self.place = Place(endpoint, bucket)
        parts = urlsplit(endpoint)
        self._authorities = authorities
        self._tls = authorities.context if authorities is not None else None
        self._pool = urllib3.PoolManager(
            maxsize=CONNECTIONS,
            timeout=urllib3.Timeout(connect=connect_seconds, read=read_seconds),
            retries=False,
            ssl_context=self._tls,
        )
        self._ambient = None if access_key else Ambient(self.place, self._pool, region)
        keys: Provider = self._ambient or StaticProvider(
            access_key, secret_key, session_token or None
        )
        self._client = minio.Minio(
            endpoint=parts.netloc,
            credentials=keys,
            secure=parts.scheme == "https",
            region=region,
            http_client=self._pool,
        )

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    # --- small objects ----------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Create the object; False if the key exists. Raises StoreError.

        When the answer is lost the object may have been created: repeating then gives False, and
        `get` tells whose it is.
        """
        for _ in range(CONFLICT_TRIES):
            answer = self._request("PUT", key, data, {"If-None-Match": "*"})
            if answer.status == 200:
                return True
            if answer.status == 412:
                return False
            if answer.status != 409:  # 409: two at the same moment, S3 asks to try again
                break
        if answer.status == 501:
            raise NoConditionalWrites(self.place, f"create {key}", _said(answer.body)[1])
        raise self._error(answer, f"create {key}")

    def get(self, key: str) -> bytes | None:
        """The whole object, or None. Raises StoreError (a missing bucket is one)."""
        answer = self._request("GET", key)
        if answer.status == 200:
            return answer.body
        if answer.status == 404 and _said(answer.body)[0] in ("NoSuchKey", ""):
            return None
        raise self._error(answer, f"read {key}")

    def delete(self, key: str) -> None:
        """Remove the object; no error if it is not there. Raises StoreError."""
        answer = self._request("DELETE", key)
        gone = answer.status == 404 and _said(answer.body)[0] in ("NoSuchKey", "")
        if answer.status not in (200, 204) and not gone:
            raise self._error(answer, f"delete {key}")

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """Every (key, size) below the prefix, in order of the keys. Raises StoreError."""
        return list(self._listing(prefix))

    def _listing(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._told(f"list {prefix}"):
            for item in self._client.list_objects(
                bucket_name=self.place.bucket, prefix=prefix, recursive=True
            ):
                yield str(item.object_name), item.size or 0

    def look(self, key: str) -> Stored | None:
        """Size and ETag of the object; None: there is none. Raises StoreError."""
        answer = self._request("HEAD", key)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise self._error(answer, f"look at {key}")
        found = {name.lower(): value for name, value in answer.headers.items()}
        return Stored(int(found.get("content-length", 0)), found.get("etag", "").strip('"'))

    # --- URLs -------------------------------------------------------------------------------------

    def presign_get(self, key: str, seconds: int) -> str:
        """A URL that reads the object without credentials, for so long or as long as the keys live.

        Raises StoreError where keys that run out can't be renewed; with others it asks nobody.
        """
        return self._sign("GET", key, seconds)

    def address(self, key: str) -> str:
        """Where the object is, for who may read it by himself."""
        return f"{self.place.endpoint}/{self.place.bucket}/{key}"

    def read_endpoint(self, key: str, seconds: int) -> tuple[Endpoint, int]:
        """The same for this process's own puller, and for how many seconds it is good."""
        lasts = self._lasts(seconds)
        return Endpoint(self._sign("GET", key, lasts), tls=self._tls), lasts

    def _lasts(self, seconds: int) -> int:
        return seconds if self._ambient is None else self._ambient.lasts(seconds)

    def _sign(
        self, method: str, key: str, seconds: int, query: Mapping[str, str] | None = None
    ) -> str:
        self._refresh()
        return str(
            self._client.get_presigned_url(
                method=method,
                bucket_name=self.place.bucket,
                object_name=key,
                expires=timedelta(seconds=self._lasts(seconds)),
                extra_query_params=dict(query or {}),
            )
        )

    # --- the start-up probe -----------------------------------------------------------------------

    def probe(self, prefix: str = "") -> None:
        """Prove that the bucket can be listed, written once and only once, read and cleaned.

        Raises the StoreError that names what is wrong: NoConditionalWrites for a store that lets
        the same key be created twice.
        """
        next(self._listing(prefix), None)  # by a GET: its errors come with their code
        key = f"{prefix.rstrip('/')}/probe-{uuid.uuid4().hex}".lstrip("/")
        if not self.create(key, b"first"):
            raise NoConditionalWrites(self.place, f"create {key}", "a new key was said to exist")
        try:
            if self.create(key, b"second"):
                raise NoConditionalWrites(self.place, f"create {key} twice")
            if self.get(key) != b"first":
                raise NoConditionalWrites(self.place, f"create {key} twice", "it was overwritten")
        finally:
            self.delete(key)

    # --- multipart uploads (transfer.upload.PartStore) --------------------------------------------

    def begin_upload(self, key: str) -> str:
        """A new upload's id. Raises StoreError."""
        return self._ask(
            f"begin to write {key}",
            lambda: str(self._client._create_multipart_upload(self.place.bucket, key, {})),
        )

    def unfinished_uploads(self, prefix: str) -> tuple[UnfinishedUpload, ...]:
        """Uploads below the prefix that nobody completed, newest first. Raises StoreError."""
        found: tuple[UnfinishedUpload, ...] = ()
        key_marker = id_marker = None
        while True:
            page = self._upload_page(prefix, key_marker, id_marker)
            for item in page.uploads:
                since = _seconds(item.initiated_time)
                found += (UnfinishedUpload(item.object_name, item.upload_id, since),)
            if not page.is_truncated:
                return tuple(sorted(found, key=lambda upload: -upload.initiated))
            key_marker, id_marker = page.next_key_marker, page.next_upload_id_marker

    def _upload_page(self, prefix: str, key_marker: str | None, id_marker: str | None) -> Any:
        return self._ask(
            f"list the uploads of {prefix}",
            lambda: self._client._list_multipart_uploads(
                self.place.bucket,
                prefix=prefix,
                key_marker=key_marker,
                upload_id_marker=id_marker,
            ),
        )

    def find_uploads(self, key: str) -> tuple[str, ...]:
        """Ids of the key's unfinished uploads, newest first. Raises StoreError."""
        return tuple(u.upload_id for u in self.unfinished_uploads(key) if u.key == key)

    def list_parts(self, key: str, upload_id: str) -> dict[int, Stored]:
        """Part number -> part. Raises StoreError."""
        found: dict[int, Stored] = {}
        marker: str | None = None
        while True:
            page = self._part_page(key, upload_id, marker)
            for part in page.parts:
                found[part.part_number] = Stored(part.size or 0, part.etag.strip('"'))
            if not page.is_truncated:
                return found
            marker = str(page.next_part_number_marker)

    def _part_page(self, key: str, upload_id: str, marker: str | None) -> Any:
        return self._ask(
            f"list the parts of {key}",
            lambda: self._client._list_parts(
                self.place.bucket, key, upload_id, part_number_marker=marker
            ),
        )

    def sign_put(self, key: str) -> Endpoint:
        """Where a whole object is PUT."""
        return Endpoint(self._sign("PUT", key, SIGNED_SECONDS), tls=self._tls)

    def sign_part(self, key: str, upload_id: str, number: int) -> Endpoint:
        """Where one part is PUT."""
        query = {"uploadId": upload_id, "partNumber": str(number)}
        return Endpoint(self._sign("PUT", key, SIGNED_SECONDS, query), tls=self._tls)

    def put_answer(self, doing: str, response: http.client.HTTPResponse) -> str:
        """The ETag out of the answer to a PUT. Raises StoreError, OSError."""
        body = response.read()
        if response.status != 200:
            raise self._error(_Answer(response.status, dict(response.headers), body), doing)
        return response.headers.get("ETag", "").strip('"')

    def complete_upload(self, key: str, upload_id: str, parts: Mapping[int, str]) -> None:
        """Make the object of its parts (number -> ETag). Raises StoreError."""
        self._ask(
            f"complete {key}",
            lambda: self._client._complete_multipart_upload(
                self.place.bucket, key, upload_id, [Part(n, etag) for n, etag in parts.items()]
            ),
        )

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Throw an unfinished upload away. No error if it is gone. Raises StoreError."""
        try:
            self._ask(
                f"abort an upload of {key}",
                lambda: self._client._abort_multipart_upload(self.place.bucket, key, upload_id),
            )
        except UploadGone:
            return

    # --- asking -----------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        key: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        url = self._sign(method, key, SIGNED_SECONDS)
        sent = dict(headers or {})
        if body is not None:
            sent["Content-Length"] = str(len(body))
        try:
            response = self._pool.request(method, url, body=body, headers=sent, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._lost(error, f"{method} {key}") from error
        return _Answer(response.status, dict(response.headers), response.data)

    def _error(self, answer: _Answer, doing: str) -> StoreError:
        code, message = _said(answer.body)
        return from_answer(self.place, answer.status, code, message, doing)

    def _ask(self, doing: str, call: Callable[[], T]) -> T:
        with self._told(doing):
            return call()

    def _lost(self, error: BaseException, doing: str) -> StoreError:
        """The error for a request without an answer."""
        found = from_exception(self.place, error, doing)
        trouble = self._authorities.trouble if self._authorities is not None else ""
        if not trouble or not isinstance(found, StoreTlsFailed):
            return found
        return StoreTlsFailed(self.place, doing, f"{found.said}; {trouble}")

    def _refresh(self) -> None:
        if self._authorities is not None:
            self._authorities.refresh()

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn what the `minio` client raises into our errors."""
        self._refresh()
        try:
            yield
        except S3Error as error:
            status = error.response.status if error.response is not None else 0
            raise from_answer(
                self.place, status, error.code or "", error.message or "", doing
            ) from error
        except ServerError as error:
            raise from_answer(self.place, error.status_code, "", str(error), doing) from error
        except InvalidResponseError as error:  # its status is nowhere public
            raise from_answer(self.place, error._code, "", "", doing) from error
        except (MinioException, ValueError) as error:
            raise StoreFailing(self.place, doing, str(error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._lost(error, doing) from error


def _said(body: bytes) -> tuple[str, str]:
    """Code and message of an S3 error body."""
    code, message = _CODE.search(body), _MESSAGE.search(body)
    return (
        code[1].decode(errors="replace") if code else "",
        message[1].decode(errors="replace") if message else "",
    )


def _seconds(time: datetime | None) -> float:
    return time.timestamp() if time is not None else 0.0
