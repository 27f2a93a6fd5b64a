"""One bucket of an S3 store, as the command reads it. The only module of the command with `minio`.

Bytes of shards do not pass here: they are pulled from presigned URLs by the protocol's pull client.
Used where no sidecar runs (`pull --bucket`, `checkpoints --bucket`), and to make the bucket of the
embedded store. It never writes to a run.
"""

from __future__ import annotations

import io
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from urllib.parse import urlsplit

import minio
import urllib3
from minio.error import MinioException, S3Error

from backstay_cli.credentials import HINT
from backstay_cli.errors import CommandError, NoAnswer, NotFound, UsageError
from backstay_protocol.pull import Endpoint
from backstay_protocol.topology import DEFAULT_REGION

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0
_TRIES = 5
_PROBE_KEY = ".backstay-ready"
_SIGNED = timedelta(hours=12)
_CREDENTIAL_CODES = frozenset(
    {
        *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
        *("InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"),
    }
)


@dataclass(frozen=True, kw_only=True)
class BucketAddress:
    """Where a bucket is, and who asks."""

    endpoint: str
    """`http(s)://host[:port]`."""
    bucket: str
    region: str = DEFAULT_REGION
    keys: tuple[str, str]
    """Access and secret key."""
    session_token: str = ""
    keys_hint: str = HINT
    """What to do when they are refused."""
    authority: str = ""
    """PEM of the authority behind the endpoint's certificate; empty: the system's."""


class Bucket:
    """Reads a bucket. All methods block and raise CommandError."""

    def __init__(self, address: BucketAddress) -> None:
        """Opens no connection yet."""
        self.address = address
        parts = urlsplit(address.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UsageError(
                f"--endpoint: got {address.endpoint!r}; expected http(s)://host[:port]"
            )
        patience = urllib3.Retry(
            total=_TRIES,
            connect=0,  # an address where nobody listens is told at once
            read=0,
            redirect=0,
            status_forcelist=(500, 502, 503, 504),  # "try again", in S3's words
            backoff_factor=0.2,
            raise_on_status=False,
        )
        self._trust = _trust(address.authority)
        pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS),
            retries=patience,
            ssl_context=self._trust,
        )
        self._client = minio.Minio(
            endpoint=parts.netloc,
            access_key=address.keys[0],
            secret_key=address.keys[1],
            session_token=address.session_token or None,
            secure=parts.scheme == "https",
            region=address.region,
            http_client=pool,
        )

    def __str__(self) -> str:
        return f"bucket {self.address.bucket} at {self.address.endpoint}"

    def create(self) -> None:
        """Make the bucket; no error if it exists."""
        with self._told("create the bucket"):
            if not self._client.bucket_exists(bucket_name=self.address.bucket):
                self._client.make_bucket(bucket_name=self.address.bucket)

    def prove(self) -> None:
        """Write, read and remove a small object outside any run: the store is whole."""
        with self._told("write and read"):
            self._client.put_object(
                bucket_name=self.address.bucket,
                object_name=_PROBE_KEY,
                data=io.BytesIO(b"ready"),
                length=5,
            )
            self.get(_PROBE_KEY)
            self._client.remove_object(bucket_name=self.address.bucket, object_name=_PROBE_KEY)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """Every (key, size) below a prefix."""
        with self._told(f"list {prefix}"):
            found = self._client.list_objects(
                bucket_name=self.address.bucket, prefix=prefix, recursive=True
            )
            return [(str(item.object_name), item.size or 0) for item in found]

    def reach(self, prefix: str) -> None:
        """Ask for the first names below a prefix: the bucket is there and may be listed."""
        with self._told(f"list {prefix}"):
            found = self._client.list_objects(bucket_name=self.address.bucket, prefix=prefix)
            next(iter(found), None)

    def get(self, key: str) -> bytes | None:
        """A small object; None: it is not there."""
        try:
            with self._told(f"read {key}"):
                response = self._client.get_object(bucket_name=self.address.bucket, object_name=key)
                try:
                    return bytes(response.read())
                finally:
                    response.close()
                    response.release_conn()
        except _NoSuchKey:
            return None

    def source(self, key: str) -> Endpoint:
        """Where an object's ranges can be read without credentials, for some hours."""
        with self._told(f"sign {key}"):
            url = self._client.presigned_get_object(
                bucket_name=self.address.bucket, object_name=key, expires=_SIGNED
            )
        return Endpoint(url, tls=self._trust)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            self._refused(error, doing)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise NoAnswer(
                f"{self}: can't {doing}: {reason}", "is the address right, and the store up?"
            ) from error
        except (MinioException, ValueError) as error:
            raise CommandError(f"{self}: can't {doing}: {error}") from error

    def _refused(self, error: S3Error, doing: str) -> NoReturn:
        code = error.code or ""
        if code == "NoSuchKey":
            raise _NoSuchKey(str(error)) from error
        if code == "NoSuchBucket":
            raise NotFound(f"{self}: there is no such bucket") from error
        if code in _CREDENTIAL_CODES:
            raise UsageError(
                f"{self}: the credentials were refused ({code}: {error.message})",
                self.address.keys_hint,
            ) from error
        raise NoAnswer(f"{self}: can't {doing}: {code} {error.message}") from error


def _trust(authority: str) -> ssl.SSLContext | None:
    """The system's authorities and this one; None: the system's."""
    if not authority:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"the store's authority is no certificate in PEM: {error}",
            "check ca.crt of the Secret that remote.caSecret names, or the file of --ca-file",
        ) from error
    return context


class _NoSuchKey(Exception):
    """The object is not there."""
