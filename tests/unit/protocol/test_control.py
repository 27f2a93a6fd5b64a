from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.names import CONTROL_BYTES, PROTOCOL_MAJOR, PROTOCOL_MINOR


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "control")


def test_what_one_side_writes_the_other_reads(path: str) -> None:
    trainer = ControlBlock(path, create=True, rank=3)
    sidecar = ControlBlock(path, create=False)
    trainer[Word.STEP] = 2**40
    trainer[Word.STATE] = State.TRAINING
    sidecar[Word.SAVE_AT_STEP] = -17
    assert sidecar[Word.STEP] == 2**40
    assert sidecar[Word.STATE] == State.TRAINING
    assert trainer[Word.SAVE_AT_STEP] == -17
    assert sidecar[Word.RANK] == 3
    assert Path(path).stat().st_size == CONTROL_BYTES
    trainer.close()
    sidecar.close()


def test_words_of_the_two_sides_never_overlap_and_all_fit() -> None:
    assert len(set(Word)) == len(Word)
    half = CONTROL_BYTES // 8 // 2
    sidecar = {word for word in Word if word >= half}
    assert {Word.SAVE_AT_STEP, Word.LEAVE_ATTEMPT, Word.COMPLETE_STEP} <= sidecar
    assert {Word.STEP, Word.ATTEMPT, Word.PUBLISHED_STEP} & sidecar == set()
    assert max(Word) < CONTROL_BYTES // 8


def test_creating_it_again_keeps_what_an_earlier_process_left(path: str) -> None:
    first = ControlBlock(path, create=True, rank=3)
    first[Word.STEP] = 5
    first.close()
    again = ControlBlock(path, create=True, rank=3)
    assert again[Word.STEP] == 5
    again.close()


def test_another_process_sees_the_words(path: str) -> None:
    block = ControlBlock(path, create=True, rank=0)
    code = (
        "import sys; from backstay_protocol.control import ControlBlock, Word\n"
        "block = ControlBlock(sys.argv[1], create=False); block[Word.LEAVE_ATTEMPT] = 9"
    )
    root = Path(__file__).parents[3] / "protocol"
    subprocess.run(
        [sys.executable, "-c", code, path],
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
        timeout=30,
    )
    assert block[Word.LEAVE_ATTEMPT] == 9
    block.close()


def test_a_page_that_is_not_there_is_not_made_by_the_sidecar(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        ControlBlock(path, create=False)


@pytest.mark.parametrize("content", [b"", b"x" * 100], ids=["empty", "short"])
def test_a_page_that_is_too_short_is_refused(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(CorruptData, match="shorter than 4096 bytes"):
        ControlBlock(path, create=False)


def test_what_is_not_a_control_block_is_refused(path: str) -> None:
    Path(path).write_bytes(b"x" * CONTROL_BYTES)
    with pytest.raises(CorruptData, match="not a control block"):
        ControlBlock(path, create=False)


def test_another_major_version_is_refused(path: str) -> None:
    block = ControlBlock(path, create=True, rank=0)
    block[Word.MAJOR] = PROTOCOL_MAJOR + 1
    block.close()
    with pytest.raises(VersionMismatch, match=rf"protocol 2\.{PROTOCOL_MINOR}, here 1\."):
        ControlBlock(path, create=False)


def test_no_descriptor_is_left_open(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    blocks = [ControlBlock(path, create=True, rank=0) for _ in range(3)]
    for block in blocks:
        block.close()
    assert len(os.listdir("/proc/self/fd")) == before
