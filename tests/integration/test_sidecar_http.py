"""The listeners of a real sidecar: zero-copy reads, ranges, tokens, events, start and end."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from backstay_protocol import slots
from backstay_protocol.messages import AgentStatus
from backstay_protocol.names import (
    ENV_TOKEN,
    HEADER_PROTOCOL,
    PORT_API,
    PROTOCOL_VERSION,
    URL_EVENTS,
    URL_STATUS,
)
from support.sidecar import TOKEN, Answer, SidecarJob, random_bytes

DATA = random_bytes(3_000_001, 7)
SHARD = "/v1/checkpoints/5-1/shards/0"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarJob]:
    """One sidecar with one checkpoint in memory and on the disk, for tests that only read."""
    with SidecarJob(tmp_path_factory.mktemp("http")) as job:
        job.start()
        job.save(rank=0, step=5, data=DATA)
        job.wait_for(lambda: job.on_disk(0), "the local copy")
        yield job


def get(job: SidecarJob, path: str, **headers: str) -> Answer:
    return job.request(0, "GET", path, headers=headers)


@pytest.mark.parametrize("tier", ["", "memory", "local"])
def test_the_bytes_of_a_shard_are_read_without_a_copy(job: SidecarJob, tier: str) -> None:
    answer = get(job, f"{SHARD}?tier={tier}")
    assert answer.status == 200
    assert answer.body == DATA
    assert answer.headers["backstay-tier"] == (tier or "memory")
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        pytest.param("bytes=0-0", 0, 1, id="first byte"),
        pytest.param("bytes=3000000-", 3_000_000, 3_000_001, id="last byte"),
        pytest.param("bytes=-7", 2_999_994, 3_000_001, id="suffix"),
        pytest.param("bytes=65535-131072", 65_535, 131_073, id="across chunks"),
        pytest.param("bytes=2999999-9999999", 2_999_999, 3_000_001, id="beyond the end"),
    ],
)
@pytest.mark.parametrize("tier", ["memory", "local"])
def test_a_range_is_served_exactly(
    job: SidecarJob, tier: str, asked: str, start: int, stop: int
) -> None:
    answer = get(job, f"{SHARD}?tier={tier}", Range=asked)
    assert answer.status == 206
    assert answer.body == DATA[start:stop]
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


@pytest.mark.parametrize("asked", ["bytes=3000001-", "bytes=0-1,4-5", "bytes=9-8", "bytes=x"])
def test_a_range_that_can_not_be_served_is_416_with_the_size(job: SidecarJob, asked: str) -> None:
    answer = get(job, SHARD, Range=asked)
    assert answer.status == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"
    assert answer.json["error"]["code"] == "RangeNotSatisfiable"


def test_a_head_tells_size_and_fingerprint_and_sends_nothing(job: SidecarJob) -> None:
    answer = job.request(0, "HEAD", SHARD)
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(DATA))
    manifest = get(job, f"{SHARD}/manifest").json
    assert answer.headers["etag"] == f'"{manifest["fingerprint"]}"'
    assert manifest["size"] == len(DATA)


def test_a_range_of_other_bytes_than_these_is_void(job: SidecarJob) -> None:
    etag = job.request(0, "HEAD", SHARD).headers["etag"]
    assert get(job, SHARD, **{"Range": "bytes=0-9", "If-Range": etag}).status == 206
    answer = get(job, SHARD, **{"Range": "bytes=0-9", "If-Range": '"others"'})
    assert (answer.status, len(answer.body)) == (200, len(DATA))


def test_a_connection_serves_on_after_a_zero_copy_send(job: SidecarJob) -> None:
    connection = job.connection(0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path, expected in ((SHARD, DATA), (URL_STATUS, None), (SHARD, DATA)):
        connection.request("GET", path, headers={**headers, "Range": "bytes=0-"})
        response = connection.getresponse()
        body = response.read()
        assert response.status in (200, 206)
        assert expected is None or body == expected
        assert not response.will_close
    connection.close()


def test_many_readers_at_once_each_get_every_byte(job: SidecarJob) -> None:
    connections = [job.connection(0) for _ in range(8)]
    for connection in connections:
        connection.request("GET", SHARD, headers={"Authorization": f"Bearer {TOKEN}"})
    for connection in connections:
        assert connection.getresponse().read() == DATA
        connection.close()


def test_a_shard_is_served_on_the_unix_socket_too(job: SidecarJob) -> None:
    assert job.request(0, "GET", SHARD, port="unix").body == DATA


def test_the_tcp_port_is_closed_without_the_token(job: SidecarJob) -> None:
    document = get(job, "/openapi.json").json
    paths = [
        path.replace("{checkpoint}", "5-1").replace("{rank}", "0") for path in document["paths"]
    ]
    for path in [*paths, "/openapi.json", "/v1/restore"]:
        for token in (None, "wrong-wrong-wrong-wrong"):
            answer = job.request(0, "GET", path, token=token)
            assert answer.status == 401, path
            assert answer.json["error"]["code"] == "Unauthorized"


def test_the_unix_socket_is_for_the_group_and_nobody_else(job: SidecarJob) -> None:
    assert os.stat(job.memory(0).socket).st_mode & 0o777 == 0o660


def test_what_is_no_http_is_refused_in_the_one_shape(job: SidecarJob) -> None:
    answer = raw(job, b"\x16\x03\x01 not http at all\r\n\r\n")
    assert b"400 Bad Request" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["hint"]


def test_headers_without_end_are_cut_off(job: SidecarJob) -> None:
    answer = raw(job, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000 + b"\r\n\r\n")
    assert b" 431 " in answer.partition(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "HeadersTooLarge"


def raw(job: SidecarJob, request: bytes) -> bytes:
    with socket.create_connection((job.host(0), PORT_API), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


def test_events_are_streamed_and_taken_up_where_they_broke_off(job: SidecarJob) -> None:
    def first_of(after: str, *kinds: str) -> list[dict[str, object]]:
        connection = job.connection(0)
        headers = {"Authorization": f"Bearer {TOKEN}", "Last-Event-ID": after}
        connection.request("GET", URL_EVENTS, headers=headers)
        with closing(connection), connection.getresponse() as stream:
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            return [next_event(stream, kind) for kind in kinds]

    started, sealed = first_of("0", "sidecar_started", "shard_sealed")
    assert first_of(str(started["number"]), "shard_sealed") == [sealed]


def next_event(stream: http.client.HTTPResponse, kind: str) -> dict[str, object]:
    while line := stream.readline().decode():
        if line.startswith("data: "):
            event: dict[str, object] = json.loads(line.removeprefix("data: "))
            if event["kind"] == kind:
                return event
    raise AssertionError("the stream ended")


def test_a_slot_is_held_while_it_is_sent_and_free_when_the_reader_goes(tmp_path: Path) -> None:
    with SidecarJob(tmp_path) as job:
        job.start()
        data = random_bytes(64 << 20, 1)
        job.save(rank=0, step=5, data=data, chunk_size=8 << 20)
        job.wait_for(lambda: job.on_disk(0), "the local copy")
        connection = job.connection(0)
        connection.request(
            "GET", f"{SHARD}?tier=memory", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        response = connection.getresponse()
        assert response.read(1000) == data[:1000]
        with pytest.raises(slots.SlotBusy):
            slots.withdraw(job.memory(0), 0, 0)
        assert job.request(0, "GET", URL_STATUS).status == 200, "others are served meanwhile"
        response.close()
        connection.close()
        job.wait_for(lambda: withdrawn(job), "the slot to be free")


def withdrawn(job: SidecarJob) -> bool:
    try:
        slots.withdraw(job.memory(0), 0, 0)
    except slots.SlotBusy:
        return False
    return True


def test_a_stale_socket_is_replaced_and_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    with SidecarJob(tmp_path) as job:
        job._shm = job._shm / ("long" * 25)
        job._shm.mkdir(parents=True)
        try:
            memory = job.memory(0)
            os.makedirs(memory.root)
            Path(memory.socket).write_text("stale")
            job.start()
            folder = os.open(memory.root, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"/proc/self/fd/{folder}/agent.sock")
            os.close(folder)
            assert job.stop() == 0
            assert not os.path.exists(memory.socket)
        finally:
            job._shm = job._shm.parent


def test_a_second_sidecar_on_the_same_volume_is_refused(job: SidecarJob) -> None:
    memory = job.memory(0)
    lock = os.open(f"{memory.root}/agent.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    command = [sys.executable, "-m", "backstay_sidecar", "--replica", "0"]
    command += ["--topology", str(job.folder / "topology.json"), "--volume", memory.root]
    second = subprocess.run(
        command, env={**os.environ, ENV_TOKEN: TOKEN}, capture_output=True, text=True, timeout=50
    )
    assert second.returncode == 2
    assert "another sidecar runs on the memory volume" in second.stderr
    assert job.request(0, "GET", URL_STATUS, port="unix").status == 200


def test_it_ends_in_order_with_open_streams_and_goes_with_its_parent(tmp_path: Path) -> None:
    with SidecarJob(tmp_path) as job:
        job.start()
        connection = job.connection(0, "unix")
        connection.request("GET", URL_EVENTS, headers={HEADER_PROTOCOL: PROTOCOL_VERSION})
        stream = connection.getresponse()
        assert stream.readline()
        assert job.stop() == 0
        connection.close()
        assert "Traceback" not in job.log()
        # A shell that starts the sidecar and is then killed: the sidecar must not stay.
        shell = job.start(prefix=("sh", "-c", '"$0" "$@"; exit 0'))
        shell.kill()
        shell.wait()
        job._processes.clear()
        job.wait_for(lambda: not answers(job), "the orphan to end")
        job.wait_for(lambda: job.log().rstrip().endswith("stopped"), "an orderly end")


def answers(job: SidecarJob) -> bool:
    try:
        return job.request(0, "GET", "/healthz", port="health").status == 200
    except OSError:
        return False


def test_status_says_what_this_sidecar_is(job: SidecarJob) -> None:
    status: AgentStatus = get(job, URL_STATUS).read(AgentStatus)
    assert (status.run, status.replica) == ("test/run", 0)
    assert [state.tier for state in status.tiers] == ["memory", "local"]


def test_health_metrics_and_prestop_need_no_token(job: SidecarJob) -> None:
    for path in ("/healthz", "/readyz"):
        assert job.request(0, "GET", path, port="health").body == b"ok\n"
    text = job.request(0, "GET", "/metrics", port="health").body.decode()
    assert f'backstay_tier_bytes_total{{tier="local"}} {float(len(DATA)):.6e}'[:40] in text
    answer = job.request(0, "GET", "/prestop", port="health")
    assert answer.json["durable"] is True, "no rank trains here"
    assert job.request(0, "GET", URL_STATUS, port="health").status == 404
