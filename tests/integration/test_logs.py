"""A real sidecar's log: every line is an object that says what it is about, and shows no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backstay_protocol.names import (
    ENV_LOG_FORMAT,
    ENV_S3_ACCESS_KEY,
    ENV_S3_SECRET_KEY,
    URL_STATUS,
)
from support.s3 import S3Server
from support.sidecar import TOKEN, SidecarJob, random_bytes
from support.training_job import every_tier

pytestmark = pytest.mark.timeout(90)


def test_every_line_of_a_sidecar_is_an_object_and_shows_no_secret(
    tmp_path: Path, s3_server: S3Server
) -> None:
    bucket = s3_server.make_bucket()
    tiers = every_tier(
        tmp_path / "disk", endpoint=s3_server.endpoint, bucket=bucket, neighbor=False
    )
    keys = {ENV_S3_ACCESS_KEY: s3_server.access_key, ENV_S3_SECRET_KEY: s3_server.secret_key}
    env = {ENV_LOG_FORMAT: "json", **keys}
    with SidecarJob(tmp_path, tiers=tiers, env=env) as job:
        job.start()
        attempt = job.begin().attempt
        job.save(rank=0, step=10, attempt=attempt, data=random_bytes(300_000, 1), reason="forced")
        job.train(0, attempt, 11)
        job.wait_for(lambda: '"durable"' in job.log(), "a durable checkpoint")
        assert job.request(0, "GET", URL_STATUS, token="a-wrong-token-0123").status == 401
        assert job.request(0, "POST", "/v1/restore", b"{nonsense").status in (404, 405)
        assert job.request(0, "GET", URL_STATUS).status == 200
        assert job.stop() == 0
        told = lines(job)
        log = job.log()
    for line in told:
        assert {"time", "level", "logger", "message", "namespace", "job", "replica"} <= line.keys()
        assert (line["namespace"], line["job"], line["replica"]) == ("test", "job", 0)
    begun = next(place for place, line in enumerate(told) if line.get("event") == "attempt_begun")
    assert all(line["attempt"] == attempt for line in told[begun:])
    (durable,) = [line for line in told if line.get("event") == "durable"]
    assert (durable["step"], durable["attempt"]) == (10, attempt)
    assert told[-1]["message"] == "stopped"
    assert told[-1]["step"] == 11
    for secret in (TOKEN, s3_server.secret_key, "X-Amz-Signature=0", "a-wrong-token-0123"):
        assert secret not in log
    assert URL_STATUS not in log, "requests are no lines"


def lines(job: SidecarJob) -> list[dict[str, Any]]:
    """Fails where a line is no object."""
    found = [json.loads(line) for line in job.log().splitlines()]
    assert all(isinstance(line, dict) for line in found)
    return found


@pytest.mark.parametrize(
    ("form", "start"),
    [("json", '{"time": '), ("", "backstay agent: "), ("xml", "backstay agent: ")],
)
def test_what_it_refuses_to_start_with_is_said_in_the_same_form(form: str, start: str) -> None:
    env = {**os.environ, ENV_LOG_FORMAT: form}
    done = subprocess.run(
        [sys.executable, "-m", "backstay_sidecar", "--topology", "/nowhere", "--volume", "/x"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(start)
    assert ("expected json or text" if form == "xml" else "/nowhere") in line
