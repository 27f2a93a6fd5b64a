"""Uploaders that are killed with -9 at the worst moments, and processes that race for one key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from backstay_sidecar.tiers.remote import RemoteTier
from support.byte_shards import byte_shard
from support.remote_tier import (
    LARGE,
    assert_not_visible,
    part_of,
    read_whole,
    store_at,
)
from support.s3 import S3Server
from support.s3_faults import S3Faults

pytest_plugins = ["support.remote_tier"]

UPLOADER = Path(__file__).resolve().parents[1] / "support" / "uploader.py"


def upload_in_another_process(
    server: S3Server,
    bucket: str,
    faults: str = "",
    **order: Any,
) -> int:
    order = {
        "endpoint": server.endpoint,
        "bucket": bucket,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "step": 7,
        "sealed": True,
        **order,
    }
    environment = {**os.environ, "BACKSTAY_FAULTS": faults}
    return subprocess.run(
        [sys.executable, str(UPLOADER), json.dumps(order)], env=environment, timeout=50
    ).returncode


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("size", [300_000, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("point", ["remote.mid_upload", "remote.before_manifest"])
def test_an_uploader_killed_with_9_leaves_nothing_visible_and_the_next_one_finishes(
    s3_server: S3Server,
    bucket: str,
    direct: RemoteTier,
    point: str,
    size: int,
    sealed: bool,
) -> None:
    reader = byte_shard(size, sealed=sealed)
    order = {"size": size, "sealed": sealed}
    killed = upload_in_another_process(s3_server, bucket, f"{point}=kill", **order)
    assert killed == -signal.SIGKILL
    assert_not_visible(direct, reader)
    direct.put(reader, threading.Event())
    assert read_whole(direct, reader) == reader.data
    assert store_at(s3_server, bucket).unfinished_uploads("") == ()


def test_what_a_killed_uploader_had_sent_is_not_sent_again(
    s3_server: S3Server,
    bucket: str,
    shaken: RemoteTier,
    faults: S3Faults,
) -> None:
    killed = upload_in_another_process(s3_server, bucket, "remote.mid_upload=kill", size=LARGE)
    assert killed == -signal.SIGKILL
    shaken.put(byte_shard(LARGE), threading.Event())
    assert len([path for _, path in faults.requests if part_of(path)]) <= 2
    again = byte_shard(LARGE, step=8)
    upload_in_another_process(s3_server, bucket, "remote.before_manifest=kill", size=LARGE, step=8)
    faults.requests.clear()
    shaken.put(again, threading.Event())
    assert {method for method, _ in faults.requests} == {"GET", "HEAD", "PUT"}
    assert [path for _, path in faults.requests if part_of(path)] == []
    assert read_whole(shaken, again) == again.data


def test_bytes_that_a_killed_uploader_left_are_not_taken_for_others(
    s3_server: S3Server, bucket: str, direct: RemoteTier
) -> None:
    upload_in_another_process(s3_server, bucket, "remote.before_manifest=kill", size=LARGE)
    other = byte_shard(LARGE, seed=3)
    direct.put(other, threading.Event())
    assert read_whole(direct, other) == other.data


def test_of_two_processes_that_create_one_key_exactly_one_wins(
    s3_server: S3Server,
    bucket: str,
) -> None:
    keys = [f"race/{i}" for i in range(30)]
    order = {
        "endpoint": s3_server.endpoint,
        "bucket": bucket,
        "access_key": s3_server.access_key,
        "secret_key": s3_server.secret_key,
        "create": keys,
    }
    racers = [
        subprocess.Popen(
            [sys.executable, str(UPLOADER), json.dumps({**order, "name": name})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        store = store_at(s3_server, bucket)
        for key in keys:
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            won = [int(racer.stdout.readline()) for racer in racers if racer.stdout]
            assert sorted(won) == [0, 1]
            assert store.get(key) == b"ab"[won.index(1) :][:1]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
