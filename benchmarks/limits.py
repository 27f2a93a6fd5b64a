"""The limits: what the machine does with the same bytes when nothing but the bytes is asked for.

Each is called right before and right after what it is compared with, and returns seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from pathlib import Path

import torch

PIECE = 8 << 20
DISK_THREADS = 2


class Copy:
    """memcpy of all tensors into tmpfs pages that are there already, by one thread."""

    def __init__(self, tensors: list[torch.Tensor], folder: Path) -> None:
        self._parts = [t for t in tensors if t.nbytes]
        self.path = folder / "copied"
        size = -(-sum(t.nbytes for t in self._parts) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.memory = mmap.mmap(file.fileno(), size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self()

    def __call__(self) -> float:
        begun, at = time.perf_counter(), self._address
        for tensor in self._parts:
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return time.perf_counter() - begun


class Disk:
    """O_DIRECT writes into reserved blocks, a few in flight, then fsync of file and folder."""

    def __init__(self, source: mmap.mmap, folder: Path) -> None:
        self._source = memoryview(source)
        self._folder = folder

    def __call__(self) -> float:
        path = self._folder / "written"
        begun = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, len(self._source))
            self._write(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        seconds = time.perf_counter() - begun
        path.unlink()
        return seconds

    def _write(self, descriptor: int) -> None:
        def work(first: int) -> None:
            for at in range(first * PIECE, len(self._source), DISK_THREADS * PIECE):
                piece = self._source[at : at + PIECE]
                assert os.pwrite(descriptor, piece, at) == len(piece)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(DISK_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Existing:
    """Memory whose pages are there, for what is read or received."""

    def __init__(self, size: int) -> None:
        self.view = torch.ones(size, dtype=torch.uint8).numpy().data

    def read(self, path: str) -> float:
        """The whole file by read(2), one thread. The caller sees to it that it is cached."""
        descriptor = os.open(path, os.O_RDONLY)
        begun = time.perf_counter()
        try:
            for at in range(0, len(self.view), PIECE):
                piece = self.view[at : at + PIECE]
                assert os.preadv(descriptor, [piece], at) == len(piece)
        finally:
            os.close(descriptor)
        return time.perf_counter() - begun

    def receive(self, address: tuple[str, int]) -> float:
        """As many bytes over one TCP connection from a `Stream`."""
        begun = time.perf_counter()
        with socket.create_connection(address) as connection:
            connection.sendall(len(self.view).to_bytes(8, "big"))
            at = 0
            while at < len(self.view):
                count = connection.recv_into(self.view[at:])
                assert count, "the stream ended too early"
                at += count
        return time.perf_counter() - begun


def serve(path: str) -> None:
    """Be the sender: whoever connects says how many bytes, and gets those of a file by sendfile."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
                while left:
                    at = 0
                    while at < size and left:
                        count = os.sendfile(
                            connection.fileno(), file.fileno(), at, min(size - at, left)
                        )
                        at, left = at + count, left - count
