"""attempt.json: whatever is torn, full or flipped, one whole state is read, never a mixture."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from backstay_protocol.records import HALF_BYTES, AttemptFile, AttemptState
from support.protocol_values import point, record

ONE = AttemptState(promised=7, round="a", record=record(7, point(3)), in_line=1)
TWO = AttemptState(promised=8, round="b", record=record(7, point(3)), in_line=1)
THREE = AttemptState(promised=9, round="c", record=record(8, point(4)), in_line=1)


@pytest.fixture
def file(tmp_path: Path) -> AttemptFile:
    prepared = AttemptFile(str(tmp_path / "attempt.json"))
    prepared.prepare()
    return prepared


def test_where_nothing_was_written_nothing_is_read(tmp_path: Path, file: AttemptFile) -> None:
    assert AttemptFile(str(tmp_path / "none")).read() is None
    assert file.read() is None


def test_the_newest_state_is_read_also_by_another_process(file: AttemptFile) -> None:
    for state in (ONE, TWO, THREE):
        file.write(state)
        assert file.read() == state
        assert AttemptFile(file.path).read() == state


def test_writes_take_turns_so_the_newest_is_never_written_over(file: AttemptFile) -> None:
    file.write(ONE)
    AttemptFile(file.path).write(TWO)  # a restarted sidecar goes on with the other half
    content = Path(file.path).read_bytes()
    assert len(content) == 2 * HALF_BYTES
    assert b'"promised":7' in content
    assert b'"promised":8' in content


def test_preparing_again_keeps_what_is_there(file: AttemptFile) -> None:
    file.write(ONE)
    file.prepare()
    assert file.read() == ONE


def test_a_write_torn_at_any_byte_leaves_the_older_state_or_the_newer_one(
    file: AttemptFile,
) -> None:
    file.write(ONE)
    file.write(TWO)
    before = Path(file.path).read_bytes()
    file.write(THREE)  # over the half that held ONE
    after = Path(file.path).read_bytes()
    start = next(i for i in range(len(before)) if before[i] != after[i])
    end = next(i for i in range(len(before), 0, -1) if before[i - 1] != after[i - 1])
    seen = set()
    for cut in range(start, end + 1):
        Path(file.path).write_bytes(after[:cut] + before[cut:])
        state = AttemptFile(file.path).read()
        assert state in (TWO, THREE), f"torn after byte {cut}"
        seen.add(state.promised)  # type: ignore[union-attr]
    assert seen == {8, 9}


def test_any_flipped_bit_of_the_newest_half_brings_back_the_older_state(file: AttemptFile) -> None:
    file.write(ONE)
    file.write(TWO)
    content = Path(file.path).read_bytes()
    begin = 0 if content.index(b'"promised":8') < HALF_BYTES else HALF_BYTES
    end = begin + len(content[begin : begin + HALF_BYTES].rstrip(b"\0"))
    for offset in range(begin, end):
        flipped = bytearray(content)
        flipped[offset] ^= 0x01
        Path(file.path).write_bytes(flipped)
        state = AttemptFile(file.path).read()
        assert state == ONE or (state == TWO and content[offset : offset + 1] == b"\n")


def test_with_both_halves_ruined_nothing_is_made_up(file: AttemptFile) -> None:
    file.write(ONE)
    Path(file.path).write_bytes(b"\xff" * (2 * HALF_BYTES))
    assert AttemptFile(file.path).read() is None
    file.write(TWO)
    assert AttemptFile(file.path).read() == TWO


def test_a_half_of_another_shape_with_a_right_digest_is_not_believed(file: AttemptFile) -> None:
    body = b'{"promised": "many"}'
    digest = hashlib.blake2b(body + b"4", digest_size=20).hexdigest()
    header = f"{4:020d} {len(body):012d} {digest}".ljust(79) + "\n"
    file.write(ONE)
    whole = bytearray(Path(file.path).read_bytes())
    whole[0 : len(header) + len(body)] = header.encode() + body
    Path(file.path).write_bytes(whole)
    assert AttemptFile(file.path).read() == ONE


def test_a_record_that_does_not_fit_is_refused_and_the_older_one_stays(file: AttemptFile) -> None:
    file.write(ONE)
    long = replace(ONE, record=replace(record(9), chain=tuple((i, i) for i in range(20_000))))
    with pytest.raises(OSError, match="at most 65536 fit"):
        file.write(long)
    assert file.read() == ONE


def test_a_device_without_room_says_so() -> None:
    with pytest.raises(OSError, match="No space left"):
        AttemptFile("/dev/full").write(ONE)


FULL_DISK = """
    import os, sys
    from backstay_protocol.records import AttemptFile, AttemptState
    file = AttemptFile("disk/attempt.json")
    file.prepare()
    file.write(AttemptState(promised=1, round="a"))
    with open("disk/filler", "wb") as filler:
        try:
            while True:
                filler.write(b"x" * 65536)
                filler.flush()
        except OSError:
            pass
    file.write(AttemptState(promised=2, round="b"))
    assert AttemptFile("disk/attempt.json").read().promised == 2
    try:
        AttemptFile("disk/other.json").prepare()
    except OSError as error:
        assert "No space" in str(error), error
    else:
        sys.exit("a full disk promised room")
"""


def test_a_full_disk_is_no_obstacle_to_a_promise(tmp_path: Path) -> None:
    """In a file system of 512 KiB, mounted in a namespace of its own where that is allowed."""
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=512k none {tmp_path}/disk && exec {sys.executable} script.py"
    (tmp_path / "script.py").write_text(textwrap.dedent(FULL_DISK))
    root = Path(__file__).parents[3] / "protocol"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no private file systems here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
