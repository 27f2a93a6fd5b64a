"""`backstay explain-restore`: from the leader, else from what was kept of the restore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import Candidate, RestoreView
from backstay_protocol.names import URL_JOB
from support.calling import call
from support.fake_leader import ATTEMPT, TOKEN, FakeLeader, job_view
from support.plain_run import DEAD, LIVE, PlainRun

OLDER = CheckpointId(1200, ATTEMPT - 1)
NEWER = CheckpointId(1210, ATTEMPT - 2)


def restore(attempt: int, **more: object) -> RestoreView:
    fields = {
        "attempt": attempt,
        "base": OLDER,
        "finished": 1_796_000_000.0,
        "seconds": 2.1,
        "bytes_by_tier": {"local": 3 << 20},
        "lost_steps": 10,
        "reason": "step 1200 is the newest on the lineage",
        "outcome": "base",
        "candidates": (
            Candidate(checkpoint=NEWER, taken=False, why="off the lineage", tiers=("remote",)),
            Candidate(checkpoint=OLDER, taken=True, why="the newest whole one", tiers=("local",)),
        ),
        "more_candidates": 7,
    }
    return RestoreView(**{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def leader() -> Iterator[FakeLeader]:
    with FakeLeader() as found:
        earlier = restore(
            ATTEMPT - 1, base=None, candidates=(), outcome="", reason="nothing was there"
        )
        found.answers[URL_JOB] = job_view(restores=(earlier, restore(ATTEMPT)))
        yield found


def explain(leader: FakeLeader, *options: str):
    return call("explain-restore", "--address", leader.address, *options, BACKSTAY_TOKEN=TOKEN)


def test_the_last_restore_is_told_with_every_candidate(leader: FakeLeader) -> None:
    done = explain(leader)
    assert done.exit_code == 0, done.output
    for words in (
        f"team/gpt: attempt {ATTEMPT} began from step 1200 of attempt {ATTEMPT - 1}",
        "2.1 s, 10 steps lost; told by the leader",
        "read: 3.0 MiB from local",
        f"not    step 1210 of attempt {ATTEMPT - 2} (remote): off the lineage",
        f"taken  step 1200 of attempt {ATTEMPT - 1} (local): the newest whole one",
        "and 7 older ones",
    ):
        assert words in done.stdout


def test_another_restore_is_told_by_its_attempt(leader: FakeLeader) -> None:
    told = json.loads(explain(leader, "--attempt", str(ATTEMPT - 1), "-o", "json").stdout)
    assert (told["run"], told["restore"]["reason"]) == ("team/gpt", "nothing was there")
    text = explain(leader, "--attempt", str(ATTEMPT - 1)).stdout
    assert "began from nothing (step 0)" in text
    assert "nobody kept which ones were in sight" in text
    fresh = restore(ATTEMPT, base=None, candidates=(), outcome="fresh")
    leader.answers[URL_JOB] = job_view(restores=(fresh,))
    assert "no checkpoint was in sight" in explain(leader).stdout


def test_an_attempt_that_nobody_knows_is_told_with_those_that_are(leader: FakeLeader) -> None:
    done = explain(leader, "--attempt", "7")
    assert done.exit_code == 3
    assert "nobody tells of a restore of attempt 7" in done.output
    assert f"known by the leader: {ATTEMPT - 1}, {ATTEMPT}" in done.output


def test_contents_that_were_given_by_hand_are_named(leader: FakeLeader) -> None:
    given = restore(ATTEMPT, base=None, origin="step 9 of attempt 3 of run team/other")
    leader.answers[URL_JOB] = job_view(restores=(given,))
    assert "began from step 9 of attempt 3 of run team/other" in explain(leader).stdout


def test_a_leader_that_is_away_is_unreachable() -> None:
    done = call("explain-restore", "--address", "127.0.0.1:1", BACKSTAY_TOKEN=TOKEN)
    assert done.exit_code == 5


def test_of_a_stopped_local_job_its_disks_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKSTAY_HOME", str(tmp_path / "home"))
    plain = PlainRun(tmp_path)
    where = ("--state-dir", str(plain.state.root))
    nothing = call("explain-restore", *where)
    assert nothing.exit_code == 3
    assert "known by the job's disks: none" in nothing.output
    kept = [restore(LIVE, base=CheckpointId(20, DEAD))]
    Path(plain.disk(0).restores_file).write_bytes(codec.dumps(kept))
    Path(plain.disk(1).restores_file).write_text("torn{")
    done = call("explain-restore", *where)
    assert done.exit_code == 0, done.output
    assert f"attempt {LIVE} began from step 20 of attempt {DEAD}" in done.stdout
    assert "told by the job's disks" in done.stdout
