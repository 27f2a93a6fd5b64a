"""A checkpoint that makes room for a newer one while it is read is not lost; a lost copy is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay_cli.rotation import replaced_by
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CheckpointList, CheckpointStatus, ReplicaView
from backstay_protocol.names import URL_CHECKPOINTS, URL_JOB, URL_SHARD, URL_SHARD_MANIFEST
from support.calling import call
from support.fake_leader import TOKEN, FakeLeader, job_view
from support.plain_run import LIVE, RUN, WORLD, manifest, shard

OLD, NEW = CheckpointId(25, LIVE), CheckpointId(35, LIVE)


def status(
    checkpoint: CheckpointId, *complete_in: str, on_lineage: bool = True, partly: str = ""
) -> CheckpointStatus:
    present = dict.fromkeys(complete_in, WORLD) | ({partly: 1} if partly else {})
    return CheckpointStatus(
        checkpoint=checkpoint,
        world_size=WORLD,
        complete_in=complete_in,
        present_in=present,
        durable=False,
        pinned=False,
        on_lineage=on_lineage,
        size=1,
    )


def listed(*checkpoints: CheckpointStatus) -> CheckpointList:
    return CheckpointList(run=RUN, attempt=LIVE, checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("now", "tier", "newer"),
    [
        (listed(status(NEW, "local")), "", NEW),
        (listed(status(NEW, "local")), "local", NEW),
        (listed(status(NEW, "local")), "neighbor", None),
        (listed(status(NEW, "local"), status(OLD, partly="local")), "local", NEW),
        (listed(status(NEW, "local"), status(OLD, "local")), "local", None),
        (listed(status(NEW, "memory"), status(OLD, "local")), "memory", NEW),
        (listed(status(NEW, "memory"), status(OLD, "local")), "", None),
        (listed(status(OLD, partly="local")), "local", None),
        (listed(status(NEW, "local", on_lineage=False)), "local", None),
        (listed(status(NEW, partly="local")), "local", None),
        (listed(), "", None),
    ],
    ids=[
        *("gone from all tiers", "gone from a tier", "the newer one is not there"),
        *("being removed", "still listed as whole", "out of memory, still on disk"),
        *("gone from memory only", "nothing newer", "newer, but off the lineage"),
        *("newer, but not whole", "nothing at all"),
    ],
)
def test_what_took_a_checkpoints_place(
    now: CheckpointList, tier: str, newer: CheckpointId | None
) -> None:
    assert replaced_by(OLD, now, tier) == newer


@pytest.fixture
def leader() -> Iterator[FakeLeader]:
    """One sidecar that holds both ranks of the newer checkpoint in local."""
    with FakeLeader() as found:
        replica = ReplicaView(replica=0, generation=1, address=found.address, seen_seconds_ago=0.1)
        found.answers[URL_JOB] = job_view(replicas=(replica,))
        for rank in range(WORLD):
            keep(found, NEW, rank)
        yield found


def keep(leader: FakeLeader, checkpoint: CheckpointId, rank: int) -> None:
    at = {"checkpoint": checkpoint, "rank": rank}
    leader.answers[URL_SHARD_MANIFEST.format(**at) + "?tier=local"] = manifest(checkpoint, rank)
    leader.answers[URL_SHARD.format(**at) + "?tier=local"] = shard(checkpoint.step, rank)


def lists(leader: FakeLeader, *one_after_the_other: CheckpointList) -> None:
    left = list(one_after_the_other)
    leader.answers[URL_CHECKPOINTS] = lambda: left.pop(0) if len(left) > 1 else left[0]


def ask(leader: FakeLeader, command: str, *options: str):
    return call(command, "--address", leader.address, *options, BACKSTAY_TOKEN=TOKEN)


def test_verify_of_the_latest_goes_on_with_the_one_that_took_its_place(leader: FakeLeader) -> None:
    lists(leader, listed(status(OLD, "local")), listed(status(NEW, "local")))
    done = ask(leader, "verify")
    assert done.exit_code == 0, done.output
    assert "step 25 made room for a newer one while it was read: skipped" in done.stderr
    assert "2 of 2 copies are good" in done.stdout


def test_verify_of_a_step_that_was_replaced_says_so_and_calls_nothing_missing(
    leader: FakeLeader,
) -> None:
    lists(leader, listed(status(OLD, "local")), listed(status(NEW, "local")))
    done = ask(leader, "verify", "--step", "25", "-o", "json")
    assert done.exit_code == 3
    copies = json.loads(done.stdout)["copies"]
    assert {copy["verdict"] for copy in copies} == {"rotated"}
    assert {copy["why"] for copy in copies} == {"step 35 took its place while it was read"}


def test_a_rank_that_is_missing_of_a_checkpoint_that_is_still_listed_is_a_loss(
    leader: FakeLeader,
) -> None:
    keep(leader, OLD, 0)
    lists(leader, listed(status(NEW, "local"), status(OLD, "local")))
    done = ask(leader, "verify", "--step", "25", "-o", "json")
    assert done.exit_code == 3
    verdicts = {copy["rank"]: copy["verdict"] for copy in json.loads(done.stdout)["copies"]}
    assert verdicts == {0: "good", 1: "missing"}


def test_pull_of_the_latest_goes_on_with_the_one_that_took_its_place(
    leader: FakeLeader, tmp_path: Path
) -> None:
    old, new = listed(status(OLD, "local")), listed(status(NEW, "local"))
    lists(leader, old, new)
    out = tmp_path / "out"
    done = ask(leader, "pull", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "step 25 made room for step 35 while it was read: skipped" in done.stderr
    assert (out / "00001.safetensors").read_bytes() == shard(35, 1)
    lists(leader, old, new)
    named = ask(leader, "pull", "--step", "25", "--out", str(tmp_path / "named"))
    assert named.exit_code == 3
    assert "step 25 made room for step 35 while it was read" in named.output


def test_pull_tells_a_loss_as_before(leader: FakeLeader, tmp_path: Path) -> None:
    lists(leader, listed(status(OLD, "local")))
    done = ask(leader, "pull", "--out", str(tmp_path / "out"))
    assert done.exit_code == 3
    assert "rank 0 of" in done.output
    assert "no copy is in reach" in done.output
