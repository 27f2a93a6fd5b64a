"""What a sidecar remembers of people's deletes."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ProgressReply
from backstay_sidecar.replication.deleted import REMEMBERED, Deleted


def at(step: int) -> CheckpointId:
    return CheckpointId(step, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica-0" / "deleted.json"


def test_a_delete_is_known_to_the_next_process(path: Path) -> None:
    deleted = Deleted(str(path))
    assert deleted.recall() == ()
    assert deleted.heed(ProgressReply(attempt=1, unwanted=(at(10),)))
    deleted.save()
    assert Deleted(str(path)).recall() == (at(10),)


def test_a_new_leader_that_knows_of_none_takes_none_away(path: Path) -> None:
    deleted = Deleted(str(path))
    deleted.add((at(10),))
    assert not deleted.heed(ProgressReply(attempt=1))
    assert deleted.checkpoints == (at(10),)


def test_what_people_pin_or_persist_again_is_forgotten(path: Path) -> None:
    deleted = Deleted(str(path))
    deleted.add((at(10), at(20), at(30)))
    assert deleted.heed(ProgressReply(attempt=1, pinned=(at(10),), persist={"remote": (at(20),)}))
    assert deleted.checkpoints == (at(30),)


def test_the_memory_of_deletes_is_bounded(path: Path) -> None:
    deleted = Deleted(str(path))
    deleted.add(tuple(at(step) for step in range(REMEMBERED + 5)))
    assert (deleted.checkpoints[0], len(deleted.checkpoints)) == (at(5), REMEMBERED)


@pytest.mark.parametrize("text", ["", "{", "7", "[7]", '["x"]'])
def test_a_file_that_makes_no_sense_says_nothing(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    assert Deleted(str(path)).recall() == ()
