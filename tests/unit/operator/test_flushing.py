"""`backstay flush`: repeated until it is safe, told what stands in the way, ended in time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from backstay_protocol.messages import FlushReply, ReplicaView
from backstay_protocol.names import URL_FLUSH, URL_JOB
from support.calling import call
from support.fake_leader import TOKEN, FakeLeader, error_reply, job_view, tier


@pytest.fixture
def leader() -> Iterator[FakeLeader]:
    with FakeLeader() as found:
        found.answers[URL_JOB] = job_view(tier("local", 1215), tier("remote", 1215))
        yield found


def flush(leader: FakeLeader, *options: str):
    return call("flush", "--address", leader.address, *options, BACKSTAY_TOKEN=TOKEN)


def replies(leader: FakeLeader, *scripted: object) -> None:
    """One after the other; the last one for ever."""
    left = list(scripted)
    leader.answers[URL_FLUSH] = lambda: left.pop(0) if len(left) > 1 else left[0]


def test_a_flush_is_asked_for_until_it_is_durable_and_the_step_is_told(leader: FakeLeader) -> None:
    replies(
        leader,
        FlushReply(step=0, durable=False, message="step 1200 is the newest in remote"),
        FlushReply(step=1215, durable=False, message="step 1200 is the newest in remote"),
        FlushReply(step=1215, durable=True, message="step 1215 is the newest in remote"),
    )
    done = flush(leader)
    assert done.exit_code == 0, done.output
    assert "team/gpt: step 1215 is durable" in done.stdout
    assert "step 1215 is being saved; step 1200 is the newest in remote" in done.stderr
    assert leader.asked.count(f"POST {URL_FLUSH}") == 3


def test_without_a_remote_tier_it_is_not_called_durable(leader: FakeLeader) -> None:
    leader.answers[URL_JOB] = job_view(tier("memory", 1215), tier("neighbor", 1215))
    replies(leader, FlushReply(step=1215, durable=True))
    told = json.loads(flush(leader, "-o", "json").stdout)
    assert (told["done"], told["tier"], told["durable_step"]) == (True, "neighbor", 1215)
    text = flush(leader).stdout
    assert "complete in neighbor, the outermost tier" in text
    assert "durable" not in text


def test_out_of_time_it_ends_with_1_and_says_why_and_what_is_safe(leader: FakeLeader) -> None:
    silent = ReplicaView(replica=1, generation=1, address="", seen_seconds_ago=60.0)
    leader.answers[URL_JOB] = job_view(
        tier("local", 1215),
        tier("remote", 1200, ok=False, message="leader: bucket 'b' at s3: access is denied"),
        replicas=(silent,),
    )
    replies(leader, FlushReply(step=1215, durable=False, message="step 1200 is the newest"))
    late = flush(leader, "--timeout", "0.1")
    assert late.exit_code == 1
    for words in (
        "step 1215 is not complete in remote",
        "access is denied",
        "does not hear of replicas 1",
        "step 1215 is not reached yet",
        "step 1200 is durable",
    ):
        assert words in late.stderr
    told = json.loads(flush(leader, "--timeout", "0", "-o", "json").stdout)
    assert (told["done"], told["step"], told["durable_step"]) == (False, 1215, 1200)
    assert any("access is denied" in reason for reason in told["why"])


def test_a_job_that_has_not_begun_is_told_so(leader: FakeLeader) -> None:
    leader.answers[URL_JOB] = job_view(
        tier("remote"), phase="Joining", message="waiting for rank 3 to call restore()"
    )
    replies(leader, FlushReply(step=0, durable=False, message="no attempt has begun yet"))
    late = flush(leader, "--timeout", "0")
    assert late.exit_code == 1
    assert "no attempt has begun yet" in late.stderr
    assert "the job is Joining: waiting for rank 3" in late.stderr
    assert "nothing is complete in remote yet" in late.stderr


def test_a_leader_that_is_away_for_a_moment_is_asked_again(leader: FakeLeader) -> None:
    away = (503, error_reply("Unreachable", "replica 0 does not answer"))
    replies(leader, away, FlushReply(step=1215, durable=True))
    done = flush(leader)
    assert done.exit_code == 0, done.output
    assert "replica 0 does not answer" in done.stderr


def test_a_leader_that_never_answers_is_unreachable() -> None:
    silent = call("flush", "--address", "127.0.0.1:1", "--timeout", "0", BACKSTAY_TOKEN=TOKEN)
    assert silent.exit_code == 5
    assert "127.0.0.1:1" in silent.output


def test_a_wrong_token_is_told_at_once(leader: FakeLeader) -> None:
    wrong = call("flush", "--address", leader.address, BACKSTAY_TOKEN="another")
    assert wrong.exit_code == 2
    assert "the token was refused" in wrong.output
