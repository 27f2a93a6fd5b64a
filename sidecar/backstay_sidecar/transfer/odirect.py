"""Writes shards past the page cache, because the kubelet counts cached pages as used memory.

The disk tier appends to a `DirectWriter` in its one pass over a slot; the receiver of neighbour
copies writes chunks at their places with `DirectFile`. Where a file system refuses O_DIRECT
(tmpfs, some network file systems) the same calls write through the cache, push the pages out and
drop them behind themselves. Neither gives a file its final name: that is the caller's rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading

from backstay_protocol.files import open_shared

ALIGNMENT = 4096  # of offset, length and memory address; no disk asks for more
BOUNCE_BYTES = 4 << 20
_WRITE_OUT_BYTES = 8 << 20  # fallback: pages are pushed out once so many are dirty
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # flags of sync_file_range

_libc = ctypes.CDLL(None, use_errno=True)


class DirectFile:
    """A file of known size, written at any place in any order; safe for several threads."""

    def __init__(self, path: str, size: int, *, keep: bool = False) -> None:
        """Create `path` (or empty it; `keep` leaves what it holds) and reserve its bytes.

        Raises OSError: ENOSPC at once when the disk has no room for the whole file.
        """
        self.path = path
        self.size = size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC)
        self._descriptor, self._direct = _open(path, flags)
        self._lock = threading.Lock()
        self._dirty: list[tuple[int, int]] = []
        self._dirty_bytes = 0
        try:
            _reserve(self._descriptor, _round_up(size))
        except BaseException:
            self.abort()
            raise

    @property
    def direct(self) -> bool:
        """Whether writes really go past the page cache."""
        return self._direct

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write at `offset`, a multiple of 4096; so must be the length, but for the file's end."""
        view = memoryview(data).cast("B")
        end = offset + len(view)
        assert offset % ALIGNMENT == 0
        assert end % ALIGNMENT == 0 or end == self.size
        if not self._direct:
            self._write_through_cache(offset, view)
            return
        whole = len(view) if _aligned(view) else 0
        whole -= whole % ALIGNMENT
        try:
            _write_all(self._descriptor, offset, view[:whole])
            self._bounce(offset + whole, view[whole:])
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._give_up_direct()
            self._write_through_cache(offset, view)

    def finish(self) -> None:
        """Give the file its exact size, make it survive a power cut, close it. Raises OSError."""
        try:
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self._close()

    def abort(self) -> None:
        """Close without finishing. The file stays as it is; no error if it is closed already."""
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _bounce(self, offset: int, view: memoryview) -> None:
        """Write what lies unaligned in memory, or ends inside a block, through aligned memory."""
        if not view:
            return
        with mmap.mmap(-1, min(BOUNCE_BYTES, _round_up(len(view)))) as bounce:
            memory = memoryview(bounce)
            try:
                for start in range(0, len(view), len(memory)):
                    piece = view[start : start + len(memory)]
                    padded = _round_up(len(piece))
                    memory[: len(piece)] = piece
                    memory[len(piece) : padded] = bytes(padded - len(piece))
                    _write_all(self._descriptor, offset + start, memory[:padded])
            finally:
                memory.release()

    def _give_up_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _write_through_cache(self, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), _WRITE_OUT_BYTES):
            piece = view[start : start + _WRITE_OUT_BYTES]
            _write_all(self._descriptor, offset + start, piece)
            _sync_range(self._descriptor, offset + start, len(piece), _WRITE)
            self._drop_pages(offset + start, len(piece))

    def _drop_pages(self, offset: int, length: int) -> None:
        """Start writing the newest range out; wait for the older ones and drop their pages."""
        with self._lock:
            self._dirty.append((offset, length))
            self._dirty_bytes += length
            if self._dirty_bytes <= _WRITE_OUT_BYTES:
                return
            older, self._dirty = self._dirty[:-1], self._dirty[-1:]
            self._dirty_bytes = length
        for start, count in older:
            _sync_range(self._descriptor, start, count, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)


class DirectWriter:
    """Appends pieces of any length to a `DirectFile`. For one thread."""

    def __init__(self, path: str, size: int, *, start: int = 0) -> None:
        """`size`: of the whole file; `start` (a multiple of 4096): keep what is before it.

        Raises OSError: ENOSPC at once when the disk has no room for the whole file.
        """
        if start % ALIGNMENT:
            raise ValueError(f"{path}: can go on only at a multiple of {ALIGNMENT}, not at {start}")
        self._file = DirectFile(path, size, keep=start > 0)
        self._position = start  # what is before it lies in the file
        self._memory = mmap.mmap(-1, BOUNCE_BYTES)
        self._buffer = memoryview(self._memory)
        self._held = 0  # bytes at the start of the buffer that wait for a whole block

    @property
    def direct(self) -> bool:
        """Whether writes really go past the page cache."""
        return self._file.direct

    def append(self, data: memoryview | bytes) -> None:
        """Write the next bytes. Whole aligned blocks go to the disk from where they lie."""
        view = memoryview(data).cast("B")
        assert self._position + self._held + len(view) <= self._file.size, "more than promised"
        if self._held:
            view = view[self._hold(view) :]
        whole = len(view) - len(view) % ALIGNMENT
        if not self._held and whole:
            self._file.write_at(self._position, view[:whole])
            self._position += whole
            view = view[whole:]
        while view:
            view = view[self._hold(view) :]

    def finish(self) -> None:
        """Write the rest, set the exact size, fsync, close. Raises OSError."""
        assert self._position + self._held == self._file.size, "less than promised"
        try:
            self._flush(self._held)
            self._file.finish()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close and give the buffer back; the file stays unfinished."""
        self._buffer.release()
        self._memory.close()
        self._file.abort()

    def _hold(self, view: memoryview) -> int:
        """Take bytes into the buffer, write it out when it is full; returns how many it took.

        Once the bytes up to the next block are there, what follows can go directly again.
        """
        missing = (-self._held) % ALIGNMENT or len(self._buffer) - self._held
        count = min(len(view), missing)
        self._buffer[self._held : self._held + count] = view[:count]
        self._held += count
        if self._held % ALIGNMENT == 0:
            self._flush(self._held)
        return count

    def _flush(self, count: int) -> None:
        if count:
            self._file.write_at(self._position, self._buffer[:count])
        self._position += count
        self._held = 0


def _open(path: str, flags: int) -> tuple[int, bool]:
    try:
        return open_shared(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    return open_shared(path, flags), False


def _reserve(descriptor: int, size: int) -> None:
    """Take the blocks now: no write then fails for want of room, and none has to allocate."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        os.ftruncate(descriptor, size)


def _write_all(descriptor: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        offset += count
        view = view[count:]


def _sync_range(descriptor: int, offset: int, length: int, flags: int) -> None:
    """Best effort: a file system that can't is synced by `finish` anyway."""
    _libc.sync_file_range(
        descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags)
    )


def _round_up(size: int) -> int:
    return size + (-size) % ALIGNMENT


class _Buffer(ctypes.Structure):
    """The head of CPython's Py_buffer: all that is needed to learn where bytes lie."""

    _fields_ = (("buf", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))


def _aligned(view: memoryview) -> bool:
    """Whether the bytes begin at an address that O_DIRECT takes."""
    if not view:
        return True
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address % ALIGNMENT == 0
