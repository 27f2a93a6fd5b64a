"""HTTPS with an authority of one's own, and keys that come by the pod's identity and run out."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from backstay_protocol.authorities import Authorities
from backstay_protocol.errors import Unreachable
from backstay_protocol.names import (
    ENV_S3_ACCESS_KEY,
    ENV_S3_AMBIENT,
    ENV_S3_CA_FILE,
    ENV_S3_SECRET_KEY,
    REMOTE,
)
from backstay_protocol.pull import Endpoint, get_bytes
from backstay_sidecar.tiers.remote_store import RemoteStore
from backstay_sidecar.transfer.s3_errors import NoIdentity, StoreTlsFailed, StoreUnreachable
from support.byte_shards import byte_shard
from support.local_job import LocalRun, manifest
from support.remote_tier import LARGE, read_whole, store_at, tier_over, wait_until
from support.s3 import S3Server
from support.s3_trust import Certificates, StsServer, TlsFront, make_certificates
from support.training_job import TrainingJob, every_tier

pytest_plugins = ["support.remote_tier"]
pytestmark = pytest.mark.timeout(180)
COUNTING = Path(__file__).parents[1] / "support" / "counting_job.py"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def https(s3_server: S3Server, certificates: Certificates) -> Iterator[str]:
    with TlsFront(s3_server.address, certificates) as front:
        yield front.endpoint


@pytest.fixture
def sts(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StsServer]:
    """And this process is told of it, as a container by EKS."""
    with StsServer(s3_server) as server:
        for name, value in server.env(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield server


def ambient(server: S3Server, bucket: str) -> RemoteStore:
    return store_at(server, bucket, access_key="", secret_key="")


# --- the authority --------------------------------------------------------------------------------


def test_a_store_with_an_unknown_authority_is_refused_and_the_field_is_named(
    s3_server: S3Server, bucket: str, https: str
) -> None:
    store = store_at(s3_server, bucket, https)
    with pytest.raises(StoreTlsFailed, match=r"remote\.caSecret"):
        store.get("key")
    with pytest.raises(StoreTlsFailed, match=r"remote\.caSecret"):
        store.list("")
    tier = tier_over(store)
    with pytest.raises(Unreachable, match=r"remote\.caSecret"):
        get_bytes(Endpoint(store.presign_get("key", 60)))
    with pytest.raises(StoreTlsFailed, match=r"remote\.caSecret"):
        tier.find(byte_shard(10).checkpoint, 0)


def test_all_requests_of_the_tier_trust_the_authority_that_is_given(
    s3_server: S3Server, bucket: str, https: str, certificates: Certificates
) -> None:
    trust = Authorities(str(certificates.authority))
    tier = tier_over(store_at(s3_server, bucket, https, authorities=trust))
    for size in (1000, LARGE):
        reader = byte_shard(size, step=size)
        tier.put(reader, threading.Event())
        assert read_whole(tier, reader) == reader.data
    assert len(list(tier.inventory())) == 2


def test_an_authority_that_comes_late_is_trusted_without_a_restart(
    s3_server: S3Server, bucket: str, https: str, certificates: Certificates, tmp_path: Path
) -> None:
    path = tmp_path / "ca.crt"
    store = store_at(s3_server, bucket, https, authorities=Authorities(str(path)))
    with pytest.raises(StoreTlsFailed, match=rf"{path} can't be read"):
        store.get("key")
    path.write_text("no certificate")
    with pytest.raises(StoreTlsFailed, match=rf"{path} can't be read"):
        store.list("")
    shutil.copy(certificates.authority, path)
    assert store.get("key") is None
    assert store.list("") == []


def test_a_job_saves_and_restores_over_https_and_the_command_reads_its_bucket(
    s3_server: S3Server, bucket: str, https: str, certificates: Certificates, tmp_path: Path
) -> None:
    trust = {ENV_S3_CA_FILE: str(certificates.authority)}
    keys = {ENV_S3_ACCESS_KEY: s3_server.access_key, ENV_S3_SECRET_KEY: s3_server.secret_key}
    tiers = every_tier(tmp_path / "disk", endpoint=https, bucket=bucket, neighbor=False)
    with TrainingJob(tmp_path, replicas=1, steps=8, tiers=tiers, env={**trust, **keys}) as job:
        run_and_lose_everything(job)
        assert job.tiers_read() == {REMOTE}
        run = job.sidecars.topology.run
    where = ["--bucket", bucket, "--endpoint", https, "--run", run, "--prefix", "jobs"]
    listing = ["backstay", "checkpoints", *where]
    refused = command(listing, keys)
    assert refused.returncode != 0
    assert "certificate" in refused.stderr
    found = command([*listing, "--ca-file", trust[ENV_S3_CA_FILE]], keys)
    assert found.returncode == 0, found.stderr
    out = tmp_path / "pulled"
    pulled = command(["backstay", "pull", *where, "--out", str(out)], {**keys, **trust})
    assert pulled.returncode == 0, pulled.stderr
    assert list(out.glob("**/*.safetensors"))


def test_a_local_run_saves_over_https_by_a_file_of_this_machine(
    s3_server: S3Server,
    bucket: str,
    https: str,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "permit").write_text("9")
    job = manifest(
        tmp_path,
        name="counting",
        replicas=1,
        launcher="torchrun",
        command=["torchrun", str(COUNTING), "8", str(tmp_path / "permit")],
        checkpoint={
            "memory": {"everySteps": 2, "sizeLimit": "16Mi"},
            "remote": {"endpoint": https, "bucket": bucket, "caSecret": "my-ca", "everySteps": 4},
        },
    )
    for name, value in {
        ENV_S3_CA_FILE: str(certificates.authority),
        ENV_S3_ACCESS_KEY: s3_server.access_key,
        ENV_S3_SECRET_KEY: s3_server.secret_key,
    }.items():
        monkeypatch.setenv(name, value)
    run = LocalRun(job, fakes=False, patience_seconds=150)
    try:
        assert run.finish() == 0, run.story()
        names = s3_server.client().list_objects(bucket_name=bucket, recursive=True)
        assert any(str(item.object_name).endswith("commit.json") for item in names)
    finally:
        run.close()


def command(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    return subprocess.run(
        program, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, check=False
    )


def run_and_lose_everything(job: TrainingJob) -> None:
    """To the end, then from the remote tier alone."""
    job.start()
    job.finish()
    job.wait_complete(REMOTE, job.steps)
    job.lose_node(0, disk=True)
    job.steps += 2
    job.start()
    job.finish()


# --- keys that run out ----------------------------------------------------------------------------


def test_keys_come_by_a_web_identity_and_are_asked_for_once(
    s3_server: S3Server, bucket: str, sts: StsServer
) -> None:
    tier = tier_over(ambient(s3_server, bucket))
    reader = byte_shard(LARGE)
    tier.put(reader, threading.Event())
    assert read_whole(tier, reader) == reader.data
    assert sts.asked == 1


def test_keys_are_renewed_before_they_run_out_and_no_url_outlives_them(
    s3_server: S3Server, bucket: str, sts: StsServer
) -> None:
    sts.lives_seconds = 20
    store = ambient(s3_server, bucket)
    url = store.presign_get("key", 24 * 3600)
    assert int(parse_qs(urlsplit(url).query)["X-Amz-Expires"][0]) <= 20
    assert store.read_endpoint("key", 3600)[1] <= 20
    wait_until(lambda: store.get("key") is None and sts.asked >= 2, seconds=30)


def test_who_reads_for_longer_than_a_url_lives_signs_another_one(
    s3_server: S3Server, bucket: str, sts: StsServer
) -> None:
    sts.lives_seconds = 12
    tier = tier_over(ambient(s3_server, bucket))
    shard = byte_shard(LARGE)
    tier.put(shard, threading.Event())
    with tier.open(shard.checkpoint, 0) as reader:
        half = LARGE // 2
        first, second = bytearray(half), bytearray(LARGE - half)
        reader.read_into(0, memoryview(first))
        over = time.monotonic() + sts.lives_seconds
        wait_until(lambda: time.monotonic() > over)
        reader.read_into(half, memoryview(second))
    assert bytes(first + second) == shard.data


def test_keys_that_live_are_used_while_nobody_gives_new_ones(
    s3_server: S3Server, bucket: str, sts: StsServer
) -> None:
    sts.lives_seconds = 14
    store = ambient(s3_server, bucket)
    assert store.get("key") is None
    sts.status = 503
    wait_until(lambda: store.get("key") is None and sts.asked >= 2)
    assert store.get("key") is None


def test_who_gets_no_keys_is_told_why_and_never_reads_the_token(
    s3_server: S3Server, bucket: str, sts: StsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sts.status = 403
    with pytest.raises(NoIdentity, match=r"answered 403.*workloadIdentity") as caught:
        ambient(s3_server, bucket).get("key")
    assert sts.TOKEN not in str(caught.value)
    with pytest.raises(NoIdentity, match="answered 403"):
        ambient(s3_server, bucket).list("")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachable) as away:
        ambient(s3_server, bucket).get("key")
    assert sts.TOKEN not in str(away.value)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/token")
    with pytest.raises(NoIdentity, match="/no/such/token"):
        ambient(s3_server, bucket).get("key")


def test_a_job_without_keys_saves_and_restores_by_its_identity(
    s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    tiers = every_tier(
        tmp_path / "disk", endpoint=s3_server.endpoint, bucket=bucket, neighbor=False
    )
    with StsServer(s3_server, lives_seconds=30) as server:
        env = {ENV_S3_AMBIENT: "1", **server.env(tmp_path)}
        with TrainingJob(tmp_path, replicas=1, steps=8, tiers=tiers, env=env) as job:
            run_and_lose_everything(job)
            assert job.tiers_read() == {REMOTE}
            assert server.asked >= 2
