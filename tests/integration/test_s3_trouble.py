"""S3 in trouble: named as what it is; a running job catches up; a first start fails well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backstay_protocol.names import REMOTE
from backstay_protocol.topology import RestoreOptions, Tiers
from support.s3 import S3Server
from support.s3_faults import S3Faults
from support.training_job import TrainingJob, every_tier

pytestmark = pytest.mark.timeout(180)

TROUBLES: dict[str, tuple[Callable[[S3Faults], None], str]] = {
    "refused": (lambda f: f.refuse(), "refused"),
    "500": (lambda f: f.answer(500, "InternalError"), "InternalError"),
    "hanging": (lambda f: f.hang(), "answer"),
    "slow": (lambda f: f.throttle(200), ""),
    "wrong signature": (lambda f: f.wrong_signature(), "SignatureDoesNotMatch"),
    "expired token": (lambda f: f.expired_token(), "expired"),
}


def make(
    folder: Path, tiers: Tiers, server: S3Server, *, wait: float = 60.0, steps: int = 14
) -> TrainingJob:
    return TrainingJob(
        folder,
        steps=steps,
        tiers=tiers,
        s3_keys=(server.access_key, server.secret_key),
        step_seconds=0.2,
        restore=RestoreOptions(barrier_seconds=60, remote_wait_seconds=wait),
    )


@pytest.mark.parametrize("name", TROUBLES)
def test_a_running_job_is_undisturbed_and_the_backlog_drains(
    name: str,
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    spoil, _ = TROUBLES[name]
    with S3Faults(s3_server.address) as faults:
        tiers = every_tier(
            tmp_path / "disk", endpoint=faults.endpoint, bucket=s3_server.make_bucket()
        )
        with make(tmp_path, tiers, s3_server) as job:
            job.start()
            job.wait_complete(REMOTE, 2)
            spoil(faults)
            job.wait_step(10)
            faults.heal()
            job.finish()
            assert job.restarts == 0
            assert len(job.events(0, "restored")) == 1
            durable = [c.checkpoint.step for c in job.checkpoints() if c.durable]
            assert max(durable) == 14


@pytest.mark.parametrize("name", [name for name, (_, words) in TROUBLES.items() if words])
def test_a_first_start_waits_bounded_and_then_fails_naming_the_cause(
    name: str,
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    spoil, words = TROUBLES[name]
    with S3Faults(s3_server.address) as faults:
        spoil(faults)
        tiers = every_tier(
            tmp_path / "disk", endpoint=faults.endpoint, bucket=s3_server.make_bucket()
        )
        with make(tmp_path, tiers, s3_server, wait=6.0) as job:
            job.start()
            job.wait_failed()
            said = (tmp_path / "rank-0.log").read_text()
            assert words.lower() in said.lower(), said
            assert faults.endpoint.rpartition("/")[2] in said, said


def test_a_first_start_goes_on_when_the_store_comes_back_in_time(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with S3Faults(s3_server.address) as faults:
        faults.refuse()
        tiers = every_tier(
            tmp_path / "disk", endpoint=faults.endpoint, bucket=s3_server.make_bucket()
        )
        with make(tmp_path, tiers, s3_server, steps=4) as job:
            job.start()
            job.wait(lambda: "remote" in (tmp_path / "rank-0.log").read_text(), "word of the wait")
            faults.heal()
            job.finish()
            assert job.restored()[0]["fresh"]


def test_a_missing_bucket_is_named(tmp_path: Path, s3_server: S3Server) -> None:
    tiers = every_tier(tmp_path / "disk", endpoint=s3_server.endpoint, bucket="no-such-bucket")
    with make(tmp_path, tiers, s3_server, wait=5.0) as job:
        job.start()
        job.wait_failed()
        assert "no-such-bucket" in (tmp_path / "rank-0.log").read_text()


def test_wrong_credentials_are_named(tmp_path: Path, s3_server: S3Server) -> None:
    tiers = every_tier(
        tmp_path / "disk", endpoint=s3_server.endpoint, bucket=s3_server.make_bucket()
    )
    job = make(tmp_path, tiers, s3_server, wait=5.0)
    job.s3_keys = ("somebody", "else-entirely")
    with job:
        job.start()
        job.wait_failed()
        said = (tmp_path / "rank-0.log").read_text()
        assert "credential" in said or "access key" in said, said


def test_a_store_without_conditional_writes_is_refused(
    tmp_path: Path,
    s3_server: S3Server,
) -> None:
    with S3Faults(s3_server.address) as faults:
        faults.without_conditional_writes()
        tiers = every_tier(
            tmp_path / "disk", endpoint=faults.endpoint, bucket=s3_server.make_bucket()
        )
        with make(tmp_path, tiers, s3_server, wait=5.0) as job:
            job.start()
            job.wait_failed()
            assert "conditional" in (tmp_path / "rank-0.log").read_text()
