"""The last build of the previous minor works with the present one: as ranks, sidecar, leader,
neighbour, operator, and as the one that wrote the checkpoints (docs/compatibility.md).

That build is taken out of the git history (support/previous_build.py); without history there is
nothing to test here, and unit/test_formats.py stands alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backstay_protocol import codec
from backstay_protocol.control import Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import FAILED, ErrorReply, RestoreReply, RestoreRequest
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    LOCAL,
    NEIGHBOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    REMOTE,
    URL_RESTORE,
    URL_STATUS,
)
from backstay_protocol.topology import ManualChoice, RestoreOptions
from support.previous_build import NAMES, NoHistory, unpack
from support.s3 import S3Server
from support.sidecar import TOKEN, SidecarJob, random_bytes
from support.training_job import TrainingJob, assert_equal, every_tier, undisturbed_states

pytestmark = pytest.mark.timeout(240)
STEPS = 14
PRESENT = ""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        return unpack(tmp_path_factory.mktemp("previous"))
    except NoHistory as error:
        pytest.skip(f"the previous build is not there: {error}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return undisturbed_states(tmp_path_factory.mktemp("undisturbed"), STEPS)


def start_again(job: TrainingJob, lives: int) -> None:
    """New pods on what is left, and their world."""
    for replica in range(job.replicas):
        if not job.sidecars.alive(replica):
            job.sidecars.start(replica)
    job.start_ranks()
    ranks = range(job.world_size)
    job.wait(lambda: all(len(job.events(r, "restored")) == lives for r in ranks), f"life {lives}")


@pytest.mark.parametrize(
    ("old_sidecars", "old_ranks"),
    [((), True), ((0,), False), ((1,), False)],
    ids=["ranks", "leader", "member"],
)
def test_an_older_part_saves_keeps_copies_and_restores_with_newer_ones(
    tmp_path: Path,
    previous: str,
    undisturbed: list[dict[str, torch.Tensor]],
    old_sidecars: tuple[int, ...],
    old_ranks: bool,
) -> None:
    build = previous if old_ranks else PRESENT
    with TrainingJob(tmp_path, steps=STEPS, step_seconds=0.15, build=build) as job:
        job.sidecars.builds.update(dict.fromkeys(old_sidecars, previous))
        job.start()
        job.wait_complete(NEIGHBOR, 4)
        job.lose_node(1, disk=True)
        start_again(job, lives=2)
        assert NEIGHBOR in job.tiers_read()
        assert job.assert_same_restore()[0] >= 4
        job.finish()
        for rank, expected in enumerate(undisturbed):
            assert_equal(job.final(rank), expected)
        for replica in range(job.replicas):
            assert minor_of_sidecar(job, replica) == PROTOCOL_MINOR - (replica in old_sidecars)
            assert minor_of_rank(job, replica) == PROTOCOL_MINOR - old_ranks


def minor_of_sidecar(job: TrainingJob, replica: int) -> int:
    headers = job.sidecars.request(replica, "GET", URL_STATUS).headers
    spoken = {name.lower(): value for name, value in headers.items()}
    return int(spoken[HEADER_PROTOCOL.lower()].removeprefix(f"{PROTOCOL_MAJOR}."))


def minor_of_rank(job: TrainingJob, rank: int) -> int:
    page = Path(job.sidecars.memory(rank).control(rank)).read_bytes()
    return memoryview(page).cast("q")[Word.MINOR]


@pytest.mark.parametrize("first_is_old", [True, False], ids=["upgraded", "downgraded"])
def test_what_one_build_kept_the_other_goes_on_from_and_back_again(
    tmp_path: Path,
    previous: str,
    s3_server: S3Server,
    undisturbed: list[dict[str, torch.Tensor]],
    first_is_old: bool,
) -> None:
    first, second = (previous, PRESENT) if first_is_old else (PRESENT, previous)
    bucket = s3_server.make_bucket()
    tiers = every_tier(tmp_path / "disk", endpoint=s3_server.endpoint, bucket=bucket)
    keys = (s3_server.access_key, s3_server.secret_key)
    with TrainingJob(tmp_path, steps=STEPS, tiers=tiers, s3_keys=keys, step_seconds=0.25) as job:
        become(job, first)
        job.start()
        job.wait_complete(LOCAL, 4)

        for replica in range(job.replicas):
            job.lose_node(replica, disk=False)
        become(job, second)
        start_again(job, lives=2)
        assert LOCAL in job.tiers_read()
        step, attempt = job.assert_same_restore()
        assert step >= 4

        job.wait_complete(REMOTE, step + 2)
        for replica in range(job.replicas):
            job.lose_node(replica, disk=True)
        become(job, first)
        start_again(job, lives=3)
        assert job.tiers_read() == {REMOTE}
        third_step, third_attempt = job.assert_same_restore()
        assert third_step > step
        assert third_attempt > attempt

        job.finish()
        for rank, expected in enumerate(undisturbed):
            assert_equal(job.final(rank), expected)


def become(job: TrainingJob, build: str) -> None:
    job.build = build
    job.sidecars.builds.update(dict.fromkeys(range(job.replicas), build))


def test_a_promise_and_record_of_the_older_build_bind_the_newer_one(
    tmp_path: Path, previous: str
) -> None:
    """The same pod, in place: only the image of its sidecar is another."""
    with SidecarJob(tmp_path, replicas=2, generations={0: 7, 1: 7}) as job:
        job.builds.update({0: previous, 1: previous})
        job.start(0)
        job.start(1)
        first = job.begin()
        for rank in range(2):
            job.save(rank=rank, step=10, attempt=first.attempt, data=random_bytes(200_000, rank))
        for replica in range(2):
            job.wait_for(lambda r=replica: job.on_disk(r), "a local copy")  # type: ignore[misc]
            job.stop(replica)
            job.builds[replica] = PRESENT
            job.start(replica)
        second = job.begin()
        assert second.attempt == first.attempt + 1
        assert second.base == CheckpointId(10, first.attempt)
        assert second.chain == ((first.attempt, 10),)
        job.wait_for(lambda: job.word(1, Word.SIDECAR_TIME), "the leader's word")


def test_an_older_sidecar_or_library_is_told_that_it_can_not_begin_from_another_run(
    tmp_path: Path, previous: str
) -> None:
    """It would look for the other run's checkpoint in its own."""
    options = RestoreOptions(choice=ManualChoice(token="t", run="test/other"))
    with SidecarJob(tmp_path, replicas=2, topology_fields={"restore": options}) as job:
        job.builds[1] = previous
        job.start(0)
        job.start(1)
        older = RestoreRequest(
            rank=0,
            local_rank=0,
            world_size=2,
            nonce="n",
            pid=1,
            protocol=f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR - 1}",
        )
        reply = job.request(0, "POST", URL_RESTORE, older, port="unix").read(RestoreReply)
        assert reply.status == FAILED
        assert "rank 0's library" in reply.message
        said = job.wait_for(
            lambda: next((r.message for r in [job.join(1)] if r.status == FAILED), ""),
            "the older sidecar to be refused",
        )
        assert "replica 1's sidecar" in said


# --- operator and leader --------------------------------------------------------------------------

OPERATOR = """
import asyncio, json, sys
from backstay_operator.leaders import HttpLeaders
from backstay_operator.observe.leader import facts_of
from backstay_protocol.messages import Policy

async def ask(host, token):
    leaders = HttpLeaders()
    facts = facts_of(await leaders.job(host, token))
    flushed = await leaders.flush(host, token)
    if hasattr(leaders, "set_policy"):
        changed = await leaders.set_policy(host, token, Policy(every_steps=20))
    else:  # of 1.0
        changed = await leaders.set_interval(host, token, 20)
    await leaders.close()
    return [facts.phase, facts.attempt, facts.newest_step, flushed is not None, changed]

print(json.dumps(asyncio.run(ask(*sys.argv[1:]))))
"""


@pytest.mark.parametrize("operator_is_old", [True, False], ids=["operator", "leader"])
def test_an_older_operator_or_leader_is_understood(
    tmp_path: Path, previous: str, operator_is_old: bool
) -> None:
    with SidecarJob(tmp_path, replicas=1) as job:
        job.builds[0] = PRESENT if operator_is_old else previous
        job.start(0)
        attempt = job.begin().attempt
        job.save(rank=0, step=10, attempt=attempt, data=random_bytes(200_000, 1))
        job.wait_for(lambda: job.on_disk(0), "a local copy")
        job.wait_for(lambda: job.word(0, Word.COMPLETE_STEP) == 10, "the leader to have heard")
        told = ask_leader(job.host(0), previous if operator_is_old else PRESENT)
    assert told == ["Training", attempt, 10, True, True]


def ask_leader(host: str, build: str) -> list[object]:
    """What an operator of that build makes of a leader's answers."""
    environment = {**os.environ, **({"PYTHONPATH": build} if build else {})}
    command = [sys.executable, "-c", OPERATOR, host, TOKEN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: list[object] = json.loads(done.stdout)
    return told


# --- further apart --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far(previous: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A build that says that it is two minors ahead."""
    folder = tmp_path_factory.mktemp("far")
    for path in previous.split(os.pathsep):
        shutil.copytree(path, folder / Path(path).name)
    names = folder / NAMES
    ahead = f"PROTOCOL_MINOR = {PROTOCOL_MINOR + 2}"
    text, count = re.subn(r"^PROTOCOL_MINOR = \d+", ahead, names.read_text(), flags=re.MULTILINE)
    assert count == 1
    names.write_text(text)
    return previous.replace(str(Path(previous.split(os.pathsep)[0]).parent), str(folder))


def test_a_build_two_minors_away_is_refused_by_name(tmp_path: Path, far: str) -> None:
    ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    theirs = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR + 2}"
    with SidecarJob(tmp_path, replicas=2) as job:
        job.builds[0] = far
        job.start(0)
        job.start(1)
        refused = job.request(0, "GET", URL_STATUS)
        assert refused.status == 426
        message = codec.loads(ErrorReply, refused.body).error.message
        assert ours in message
        assert theirs in message
        said = job.wait_for(
            lambda: next((r.message for r in [job.join(1)] if theirs in r.message), ""),
            "a sidecar to be refused by a leader of another version",
        )
        assert ours in said
