"""Keys of the remote tier that come by the place where the sidecar runs, and run out.

A web identity token and a role (AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN), a container's endpoint
(AWS_CONTAINER_CREDENTIALS_FULL_URI) or the machine's: whatever the `minio` client's provider knows.
Here they are renewed at half of their life, kept while the giver is away, and told about in our own
errors (the provider's carry the token). The object store's client asks before each request.
"""

from __future__ import annotations

import os
import re
import threading

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider

from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_sidecar.transfer.s3_errors import NoIdentity, Place, StoreError, from_exception

ENV_STS_ENDPOINT = "AWS_ENDPOINT_URL_STS"
ENV_TOKEN_FILE = "AWS_WEB_IDENTITY_TOKEN_FILE"
RETRY_SECONDS = 30.0  # between two tries to renew keys that still live
PAUSE_SECONDS = 2.0  # between two tries where there are none
LEAST_SECONDS = 5.0  # keys with less left are as good as none
_STATUS = re.compile(r"HTTP status code (\d+)")
_DOING = "ask for keys"


class Ambient(Provider):
    """Gives the `minio` client keys that live. Blocks where they must be asked for."""

    def __init__(
        self, place: Place, pool: urllib3.PoolManager, region: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`pool`: what the giver is asked through; it knows whom to trust and how long to wait."""
        self._place = place
        self._pool = pool
        self._region = region
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: Credentials | None = None
        self._expires = float("-inf")
        self._renew_at = float("-inf")
        self._refused: tuple[StoreError, float] | None = None
        """Why there were none the last time, and until when nobody asks again."""

    def retrieve(self) -> Credentials:
        """Keys that live. Raises StoreError."""
        with self._lock:
            now = self._clock.time()
            if self._keys is None or now >= self._renew_at:
                self._renew(now)
            assert self._keys is not None
            return self._keys

    def lasts(self, seconds: int) -> int:
        """So long is a URL good that is signed now for `seconds`. Raises StoreError."""
        self.retrieve()
        return max(1, int(min(seconds, self._expires - self._clock.time() - 1)))

    def _renew(self, now: float) -> None:
        lives = self._keys is not None and self._expires - now > LEAST_SECONDS
        if self._refused is not None and now < self._refused[1] and not lives:
            raise self._refused[0]
        try:
            keys = self._ask()
        except StoreError as error:
            self._refused = (error, now + PAUSE_SECONDS)
            if not lives:
                self._keys = None
                raise
            self._renew_at = now + RETRY_SECONDS
            return
        self._keys, self._refused = keys, None
        self._expires = _epoch(keys)
        self._renew_at = now + (self._expires - now) / 2

    def _ask(self) -> Credentials:
        # One for each time: it would give the keys that it has until they are almost over.
        provider = IamAwsProvider(
            custom_endpoint=self._sts(), http_client=self._pool, region=self._region
        )
        try:
            return provider.retrieve()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise from_exception(self._place, error, _DOING) from None
        except Exception as error:  # noqa: BLE001 - of an answer: no XML, no JSON, a field missing
            raise NoIdentity(self._place, _DOING, _words(error)) from None

    @staticmethod
    def _sts() -> str | None:
        return os.environ.get(ENV_STS_ENDPOINT) if os.environ.get(ENV_TOKEN_FILE) else None


def _epoch(keys: Credentials) -> float:
    if keys.expiration is None:
        return float("inf")
    return float(keys.expiration.timestamp())


def _words(error: Exception) -> str:
    """Without the request, whose address carries the pod's token."""
    status = _STATUS.search(str(error))
    if status:
        return f"whoever gives them answered {status[1]}"
    if isinstance(error.__cause__, OSError):
        cause = error.__cause__
        return f"{cause.filename}: {cause.strerror}"
    return f"the answer is none that gives keys ({type(error).__name__})"
