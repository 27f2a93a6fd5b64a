"""A rank's slots: files in the memory volume, reserved in background threads, mapped once.

The rule for slot files: they are created once and used for ever, also by the next process of the
rank. They are never renamed, re-created or truncated: a reader may hold a lock on or a mapping of
them. They only grow, in place, behind the bytes that any manifest names, so a reader never notices.
Where room runs out while one grows, the new part is given back by punching a hole, not its length.

Storing into a page that the volume has no room for would kill the process (SIGBUS), so a slot
counts only from the moment at which every page of it was populated. Called by capture only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.files import make_folder, open_shared
from backstay_protocol.layout import MemoryLayout

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
PAGE = 4096
PIECE_BYTES = 128 << 20
CUDA_HOST_REGISTER_PORTABLE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


class NoRoom(Exception):
    """The memory volume can't hold what is needed; says how much that is."""


class Mapping:
    """One populated mapping of a slot file. Tensors made from it keep it alive."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        """Take over a mapping in which every page is present."""
        self._memory = memory
        self._address = address
        self._registered = False
        self.size = len(memory)

    def view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes from `at` on as a tensor."""
        count = 1
        for length in shape:
            count *= length
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(shape)

    def write(self, at: int, data: bytes) -> None:
        """Store bytes."""
        self._memory[at : at + len(data)] = data

    def register(self) -> str:
        """Page-lock it for CUDA. Returns why that failed; copies then only block their thread."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(self._address, self.size, CUDA_HOST_REGISTER_PORTABLE))
        self._registered = code == 0
        return "" if self._registered else f"cudaHostRegister of {self.size} bytes: error {code}"

    def unregister(self) -> None:
        """Before it is dropped; nothing may be copying into it."""
        if self._registered:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self._address)
            self._registered = False


@dataclass
class Slot:
    """One slot of a rank. `mapping` is replaced by the background thread when it has grown."""

    index: int
    path: str
    mapping: Mapping | None = None

    @property
    def capacity(self) -> int:
        """Bytes that may be stored."""
        mapping = self.mapping
        return mapping.size if mapping else 0


class SlotMap:
    """The slots of one rank."""

    def __init__(
        self,
        memory: MemoryLayout,
        rank: int,
        num_slots: int,
        *,
        num_threads: int = 2,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Nothing is created before `reserve`. `num_threads`: that populate one slot."""
        self._folder = memory.rank_folder(rank)
        self._volume = memory.root
        self._num_threads = num_threads
        self._clock = clock
        self.slots = tuple(Slot(i, memory.slot(rank, i)) for i in range(num_slots))
        self.trouble = ""
        """Why not every slot has the size that was asked for last; a sentence for people."""
        self._wanted = 0
        self._register = False
        self._retired: list[Mapping] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def reserve(self, size: int, *, register: bool = False) -> None:
        """Begin to bring every slot to `size` bytes, in the background. Never blocks or raises."""
        size = -(-size // PAGE) * PAGE
        with self._changed:
            self._register = self._register or register
            if self._closed or (size <= self._wanted and not self._tries_again(size)):
                return
            self._wanted = max(size, self._wanted)
            self.trouble = ""
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._grow_all, name="backstay-slots", daemon=True
                )
                self._thread.start()

    def _tries_again(self, size: int) -> bool:
        """Room may have come back since it ran out."""
        idle = self._thread is None
        return idle and any(slot.capacity < size for slot in self.slots)

    def wait_for(self, size: int, timeout: float) -> list[Slot]:
        """Slots that hold `size` bytes. Waits until there is one, bounded; may be empty.

        While the background thread is at work a second slot may still be coming.
        """
        deadline = self._clock.monotonic() + timeout
        with self._changed:
            while True:
                ready = [slot for slot in self.slots if slot.capacity >= size]
                left = deadline - self._clock.monotonic()
                if ready or self._thread is None or left <= 0:
                    return ready
                self._changed.wait(left)

    @property
    def asked_for(self) -> int:
        """The size that every slot has or shall get; 0 before the first `reserve`."""
        return self._wanted

    @property
    def busy(self) -> bool:
        """Whether slots are being made just now."""
        return self._thread is not None

    def join(self, timeout: float) -> None:
        """Wait until no slot is being made."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def drop_retired(self) -> None:
        """Let go of mappings that grown ones have replaced; nothing may be copying into them."""
        with self._changed:
            retired, self._retired = self._retired, []
        for mapping in retired:
            mapping.unregister()

    def close(self) -> None:
        """Unmap. The files stay for the sidecar and the next process."""
        with self._changed:
            self._closed = True
        self.drop_retired()
        for slot in self.slots:
            if slot.mapping is not None:
                slot.mapping.unregister()
                slot.mapping = None

    # --- the background thread -----------------------------------------------------------------

    def _grow_all(self) -> None:
        while True:
            size, trouble = self._wanted, ""
            for slot in self.slots:
                if slot.capacity < size and not self._closed:
                    trouble = trouble or self._try_to_grow(slot, size)
            with self._changed:
                done = self._closed or size == self._wanted
                if done:
                    self.trouble = trouble
                    self._thread = None
                self._changed.notify_all()
                if done:
                    return

    def _try_to_grow(self, slot: Slot, size: int) -> str:
        try:
            mapping = self._grow(slot, size)
        except NoRoom as error:
            return str(error)
        except (OSError, ValueError) as error:
            return f"{slot.path}: no slot of {size} bytes can be made: {error}"
        trouble = mapping.register() if self._register else ""
        with self._changed:
            if slot.mapping is not None:
                self._retired.append(slot.mapping)
            slot.mapping = mapping
            self._changed.notify_all()
        return trouble

    def _grow(self, slot: Slot, size: int) -> Mapping:
        make_folder(self._folder)
        self._check_room(slot, size)
        descriptor = open_shared(slot.path, os.O_RDWR | os.O_CREAT)
        try:
            before = os.fstat(descriptor).st_size
            if before < size:
                os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            failure = self._populate(descriptor, address, size)
            if failure:
                if before < size:
                    _punch(descriptor, before, size)
                raise NoRoom(self._no_room(size, os.strerror(failure)))
        finally:
            os.close(descriptor)
        return Mapping(memory, address)

    def _check_room(self, slot: Slot, size: int) -> None:
        """Find out before anything is taken. Another may take it all the same: populate tells."""
        volume = os.statvfs(self._folder)
        try:
            present = os.stat(slot.path).st_blocks * 512
        except FileNotFoundError:
            present = 0
        free = volume.f_bavail * volume.f_frsize
        if volume.f_blocks and size - present > free:
            raise NoRoom(self._no_room(size, f"{free} bytes are free"))

    def _no_room(self, size: int, why: str) -> str:
        total = len(self.slots) * size
        return (
            f"the memory volume {self._volume} is too small: {len(self.slots)} slots of {size} "
            f"bytes need {total}, {why}; give it at least {total * 11 // 10} bytes for this rank "
            f"(checkpoint.memory.sizeLimit), or one slot (checkpoint.memory.slots: 1)"
        )

    def _populate(self, descriptor: int, address: int, size: int) -> int:
        """Make every page present. Returns an error number, 0 if all are."""
        _libc.madvise(address, size, MADV_HUGEPAGE)  # helps where the mount allows, else nothing
        starts = iter(range(0, size, PIECE_BYTES))
        lock = threading.Lock()
        failures: list[int] = []

        def work() -> None:
            while not failures:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                length = min(PIECE_BYTES, size - start)
                if _libc.madvise(address + start, length, MADV_POPULATE_WRITE):
                    failures.append(ctypes.get_errno())

        helpers = min(self._num_threads, -(-size // PIECE_BYTES)) - 1
        _run_all(work, helpers)
        if failures and failures[0] == errno.EINVAL:  # a kernel before 5.14
            return _allocate(descriptor, size)
        return errno.ENOSPC if failures and failures[0] == errno.EFAULT else sum(failures[:1])


def _run_all(work: Callable[[], None], helpers: int) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


def _allocate(descriptor: int, size: int) -> int:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _punch(descriptor: int, start: int, stop: int) -> None:
    mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    _libc.fallocate(descriptor, mode, start, stop - start)
