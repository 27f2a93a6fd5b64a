import ctypes
import errno
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from backstay_sidecar.transfer.odirect import ALIGNMENT, DirectFile, DirectWriter


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path):
    """A folder on a disk that takes O_DIRECT (where the machine has one) and one that may not."""
    if request.param == "disk":
        yield tmp_path
        return
    path = Path(f"/dev/shm/backstay-test-odirect-{os.getpid()}")
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (8 << 20) + 12345])
@pytest.mark.parametrize("piece", [1000, 4096, 100_003, 8 << 20])
def test_pieces_of_any_length_make_the_exact_file(folder: Path, size: int, piece: int) -> None:
    data = noise(size)
    if size // piece > 2000:
        pytest.skip("too many pieces to be quick")
    writer = DirectWriter(str(folder / "a"), size)
    for start in range(0, size, piece):
        writer.append(data[start : start + piece])
    writer.finish()
    assert (folder / "a").read_bytes() == data


def test_random_pieces_make_the_exact_file(folder: Path) -> None:
    chance = random.Random(7)
    data = noise(3_000_001)
    writer, position = DirectWriter(str(folder / "a"), len(data)), 0
    while position < len(data):
        count = chance.choice([1, 511, 4096, 4097, 8192, 70_000])
        writer.append(memoryview(data)[position : position + count])
        position += count
    writer.finish()
    assert (folder / "a").read_bytes() == data


def test_aligned_memory_goes_to_the_disk_from_where_it_lies(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    memory[:] = noise(1 << 20)
    file = DirectFile(str(tmp_path / "a"), 1 << 20)
    file.write_at(0, memoryview(memory))
    file.finish()
    assert (tmp_path / "a").read_bytes() == memory[:]


def test_chunks_may_be_written_in_any_order_by_several_threads(folder: Path) -> None:
    chunk, data = 64 << 10, noise((40 * 64 << 10) + 77)
    file = DirectFile(str(folder / "a"), len(data))
    starts = list(range(0, len(data), chunk))
    random.Random(1).shuffle(starts)

    def write(mine: list[int]) -> None:
        for start in mine:
            file.write_at(start, data[start : start + chunk])

    threads = [threading.Thread(target=write, args=(starts[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.finish()
    assert (folder / "a").read_bytes() == data


def test_what_was_begun_is_taken_up_again_at_a_block(folder: Path) -> None:
    data = noise(1_000_000)
    first = DirectWriter(str(folder / "a"), len(data))
    first.append(data[: 100 * ALIGNMENT])
    first.abort()
    second = DirectWriter(str(folder / "a"), len(data), start=100 * ALIGNMENT)
    second.append(data[100 * ALIGNMENT :])
    second.finish()
    assert (folder / "a").read_bytes() == data


def test_going_on_inside_a_block_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        DirectWriter(str(tmp_path / "a"), 10_000, start=100)


def test_an_older_longer_file_of_the_name_leaves_nothing_behind(folder: Path) -> None:
    (folder / "a").write_bytes(b"x" * 50_000)
    writer = DirectWriter(str(folder / "a"), 10)
    writer.append(b"0123456789")
    writer.finish()
    assert (folder / "a").read_bytes() == b"0123456789"


def test_a_file_that_does_not_fit_fails_before_the_first_byte(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"No space|too large") as caught:
        DirectFile(str(tmp_path / "a"), 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def resident_pages(path: Path, size: int) -> int:
    """Pages of the file that lie in the page cache, by mincore."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * (-(-size // 4096)))()
        anchor = (ctypes.c_char * size).from_buffer(mapped)
        ctypes.CDLL(None).mincore(ctypes.byref(anchor), ctypes.c_size_t(size), pages)
        del anchor
        return sum(page & 1 for page in pages)


def test_nothing_of_it_stays_in_the_page_cache(tmp_path: Path) -> None:
    data = noise(16 << 20)
    writer = DirectWriter(str(tmp_path / "a"), len(data))
    writer.append(data)
    writer.finish()
    assert resident_pages(tmp_path / "a", len(data)) < len(data) // 4096 // 10
    assert (tmp_path / "a").read_bytes() == data


def test_where_direct_writes_are_refused_it_goes_through_the_cache_and_drops_it(
    tmp_path: Path,
) -> None:
    """No file system of this machine may refuse: the change-over itself is called."""
    chunk, data = 1 << 20, noise((30 << 20) + 77)
    file = DirectFile(str(tmp_path / "a"), len(data))
    file._give_up_direct()
    assert not file.direct
    for start in reversed(range(0, len(data), chunk)):
        file.write_at(start, data[start : start + chunk])
    assert resident_pages(tmp_path / "a", len(data)) < len(data) // 4096 // 2
    file.finish()
    assert (tmp_path / "a").read_bytes() == data
