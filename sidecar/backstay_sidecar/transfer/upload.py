"""Uploads: memory views sent to presigned URLs, large shards in parallel parts.

The remote tier calls it. A shard of one part goes by one PUT. Of larger ones, what an earlier try
has uploaded stays: a part that the store lists with the size and MD5 of ours is not sent again, nor
is anything of an object that is there whole. (A store whose ETags are no MD5s gets all once more.)
Memory is bounded by one part per thread. It reads through the caller's `fill`, which verifies what
it reads, and makes nothing visible but by the completion at the very end.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from backstay_protocol.clock import Clock
from backstay_protocol.crew import Crew
from backstay_protocol.errors import Cancelled
from backstay_protocol.faults import fault
from backstay_protocol.pull import Connection, Endpoint
from backstay_sidecar.transfer.retry import Budget, RetryPolicy, with_retries
from backstay_sidecar.transfer.s3_errors import (
    Place,
    StoreError,
    StoreTooSlow,
    UploadGone,
    from_exception,
)

MIN_PART_BYTES = 5 << 20  # what S3 takes, but for the last part
PART_BYTES = 16 << 20
MAX_PARTS = 10_000
PART_SECONDS = 300.0  # a part that takes longer is given up
ANSWER_SECONDS = 30.0
_SLICE_BYTES = 256 << 10  # cancel and time are looked at between slices

Fill = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Stored:
    """A part or an object that the store has."""

    size: int
    etag: str
    """Mostly the MD5 of the bytes; of an object made of parts: of their MD5s, and their number."""


class PartStore(Protocol):
    """What an upload asks of the object store. Each raises a StoreError."""

    @property
    def place(self) -> Place:
        """For errors."""
        ...

    def begin_upload(self, key: str) -> str:
        """A new upload's id."""
        ...

    def find_uploads(self, key: str) -> tuple[str, ...]:
        """Ids of the key's unfinished uploads, newest first."""
        ...

    def list_parts(self, key: str, upload_id: str) -> dict[int, Stored]:
        """Part number -> part."""
        ...

    def sign_put(self, key: str) -> Endpoint:
        """Where a whole object is PUT."""
        ...

    def sign_part(self, key: str, upload_id: str, number: int) -> Endpoint:
        """Where one part is PUT."""
        ...

    def put_answer(self, doing: str, response: http.client.HTTPResponse) -> str:
        """The ETag out of the answer to a PUT."""
        ...

    def complete_upload(self, key: str, upload_id: str, parts: Mapping[int, str]) -> None:
        """Make the object of its parts (number -> ETag)."""
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Throw an unfinished upload away. No error if it is gone."""
        ...

    def look(self, key: str) -> Stored | None:
        """The object; None: there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class UploadSettings:
    """How parts travel."""

    concurrency: int = 4
    """Parts in flight; each takes one part's memory."""
    part_bytes: int = PART_BYTES
    """Raised where the shard needs it (10,000 parts at most), or its chunks are larger."""
    part_seconds: float = PART_SECONDS
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Within one upload; for longer troubles the caller comes again, and parts stay."""


def part_size(size: int, chunk_size: int, wanted: int) -> int:
    """Bytes of each part but the last: whole chunks, and as the store's limits ask."""
    least = max(MIN_PART_BYTES, wanted, -(-size // MAX_PARTS))
    return -(-least // chunk_size) * chunk_size


def upload(
    store: PartStore,
    key: str,
    size: int,
    chunk_size: int,
    fill: Fill,
    *,
    settings: UploadSettings,
    cancel: threading.Event,
    clock: Clock,
) -> None:
    """Upload `size` bytes as `key`. Raises StoreError, Cancelled, or what `fill` raised.

    `fill(offset, view)` is called at least once for each part, by several threads; parts begin and
    end at multiples of `chunk_size`.
    """
    budget = Budget(settings.retry, clock)
    part_bytes = part_size(size, chunk_size, settings.part_bytes)
    there = with_retries(budget, cancel, lambda: store.look(key))
    if there is not None and _same_object(there, size, part_bytes, fill, cancel):
        return
    if size <= part_bytes:
        _Whole(store, key, size, fill).run(settings, budget, cancel, clock)
        return
    found = with_retries(budget, cancel, lambda: store.find_uploads(key))
    if not found:
        found = (with_retries(budget, cancel, lambda: store.begin_upload(key)),)
    parts = with_retries(budget, cancel, lambda: store.list_parts(key, found[0]))
    job = _Upload(store, key, found[0], size, part_bytes, fill, parts)
    job.run(settings, budget, cancel, clock)
    with_retries(budget, cancel, job.complete)
    for other in found[1:]:
        with contextlib.suppress(StoreError):
            store.abort_upload(key, other)


def _same_object(
    there: Stored, size: int, part_bytes: int, fill: Fill, cancel: threading.Event
) -> bool:
    """Whether the object holds our bytes: one that died before the manifest had uploaded all."""
    if there.size != size:
        return False
    buffer = memoryview(mmap.mmap(-1, min(part_bytes, size)))
    etags = []
    for start in range(0, size, part_bytes):
        if cancel.is_set():
            raise Cancelled("told to stop")
        view = buffer[: min(part_bytes, size - start)]
        fill(start, view)
        etags.append(_md5(view))
    return there.etag == (etags[0] if size <= part_bytes else etag_of_parts(etags))


def etag_of_parts(etags: Sequence[str]) -> str:
    """The ETag that S3 gives an object of parts with these; nothing if they are no MD5s."""
    try:
        joined = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"


def _md5(view: memoryview) -> str:
    return hashlib.md5(view, usedforsecurity=False).hexdigest()


class _Whole:
    """A shard that goes by one PUT."""

    def __init__(self, store: PartStore, key: str, size: int, fill: Fill) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._fill = fill

    def run(
        self, settings: UploadSettings, budget: Budget, cancel: threading.Event, clock: Clock
    ) -> None:
        crew = Crew(f"upload of {self._key}")

        def work() -> None:
            view = memoryview(mmap.mmap(-1, self._size))
            self._fill(0, view)
            fault("remote.mid_upload")
            sender = _Sender(self._store, crew, settings.part_seconds, clock)
            with contextlib.closing(sender):
                with_retries(budget, crew.stopped, lambda: self._send(view, sender))

        crew.run(work, 1, cancel=cancel, clock=clock)

    def _send(self, view: memoryview, sender: _Sender) -> str:
        return sender.put(self._store.sign_put(self._key), view, f"write {self._key}")


class _Upload:
    """One upload: what its threads share."""

    def __init__(
        self,
        store: PartStore,
        key: str,
        upload_id: str,
        size: int,
        part_bytes: int,
        fill: Fill,
        there: Mapping[int, Stored],
    ) -> None:
        self._store = store
        self._key = key
        self._upload_id = upload_id
        self._size = size
        self._etags: dict[int, str] = {}
        self._part_bytes = part_bytes
        self._fill = fill
        self._there = there
        self._num_parts = -(-size // part_bytes)
        self._todo = deque(range(1, self._num_parts + 1))
        self._lock = threading.Lock()
        self._crew = Crew(f"upload of {key}")

    def run(
        self, settings: UploadSettings, budget: Budget, cancel: threading.Event, clock: Clock
    ) -> None:
        def work() -> None:
            buffer = memoryview(mmap.mmap(-1, min(self._part_bytes, self._size)))
            sender = _Sender(self._store, self._crew, settings.part_seconds, clock)
            with contextlib.closing(sender):
                while (number := self._next()) is not None:
                    self._move(number, buffer, sender, budget)

        self._crew.run(work, min(settings.concurrency, self._num_parts), cancel=cancel, clock=clock)

    def complete(self) -> None:
        """Make the object of its parts. Raises StoreError.

        It may have worked although the answer was lost: then the object of these parts is there.
        """
        etags = dict(sorted(self._etags.items()))
        try:
            self._store.complete_upload(self._key, self._upload_id, etags)
        except UploadGone:
            there = self._store.look(self._key)
            if there is None or there.etag != etag_of_parts(list(etags.values())):
                raise

    def _next(self) -> int | None:
        with self._lock:
            if self._crew.stopped.is_set() or not self._todo:
                return None
            return self._todo.popleft()

    def _move(self, number: int, buffer: memoryview, sender: _Sender, budget: Budget) -> None:
        start = (number - 1) * self._part_bytes
        view = buffer[: min(self._part_bytes, self._size - start)]
        self._fill(start, view)
        etag = self._same_as_there(number, view)
        if etag is None:
            etag = with_retries(
                budget, self._crew.stopped, lambda: self._send(number, view, sender)
            )
        with self._lock:
            self._etags[number] = etag
            middle = len(self._etags) == max(1, self._num_parts // 2)
        if middle:
            fault("remote.mid_upload")

    def _same_as_there(self, number: int, view: memoryview) -> str | None:
        """The ETag of an uploaded part if it is proven to hold these bytes."""
        stored = self._there.get(number)
        if stored is None or stored.size != len(view) or stored.etag != _md5(view):
            return None
        return stored.etag

    def _send(self, number: int, view: memoryview, sender: _Sender) -> str:
        endpoint = self._store.sign_part(self._key, self._upload_id, number)
        doing = f"write part {number} of {self._num_parts} of {self._key}"
        return sender.put(endpoint, view, doing)


class _Sender:
    """PUTs memory views over one kept connection. For one thread."""

    def __init__(self, store: PartStore, crew: Crew, part_seconds: float, clock: Clock) -> None:
        self._store = store
        self._crew = crew
        self._part_seconds = part_seconds
        self._clock = clock
        self._connection: Connection | None = None

    def put(self, endpoint: Endpoint, view: memoryview, doing: str) -> str:
        """Send one body; the ETag. Raises StoreError, Cancelled."""
        connection = self._connection or Connection(endpoint, ANSWER_SECONDS)
        self._connection = connection
        headers = {**endpoint.headers, "Content-Length": str(len(view))}
        try:
            with self._crew.interruptible(connection):
                response = connection.request(
                    "PUT", endpoint.target, headers, self._slices(view, doing)
                )
                etag = self._store.put_answer(doing, response)
                connection.finish()
                return etag
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if self._crew.stopped.is_set():
                raise Cancelled(f"{self._store.place}: told to stop ({doing})") from error
            raise from_exception(self._store.place, error, doing) from error
        except BaseException:
            self.close()
            raise

    def _slices(self, view: memoryview, doing: str) -> Iterator[memoryview]:
        begun = self._clock.monotonic()
        for start in range(0, len(view), _SLICE_BYTES):
            if self._crew.stopped.is_set():
                raise Cancelled(f"{self._store.place}: told to stop ({doing})")
            if self._clock.monotonic() - begun > self._part_seconds:
                said = f"{start} of {len(view)} bytes in {self._part_seconds:g} s"
                raise StoreTooSlow(self._store.place, doing, said)
            yield view[start : start + _SLICE_BYTES]

    def close(self) -> None:
        """Close the connection; the next part opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
