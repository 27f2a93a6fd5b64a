from __future__ import annotations

import threading

import pytest

from backstay.client import SidecarClient
from backstay_protocol.errors import Refused, Unreachable, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CaptureNotice, RestoreReply, RestoreRequest
from backstay_protocol.names import URL_RESTORE
from support.fake_sidecar import FakeSidecar, error_reply

NOTICE = CaptureNotice(rank=0, slot=0, step=3, attempt=1)
REQUEST = RestoreRequest(rank=0, local_rank=0, world_size=1, nonce="n", pid=1)


def quiet(_: str) -> None:
    pass


@pytest.fixture
def volume(tmp_path):
    return str(tmp_path)


def test_a_message_goes_over_the_unix_socket_and_its_answer_comes_back(volume) -> None:
    with FakeSidecar(volume) as sidecar:
        client = SidecarClient(sidecar.memory.socket)

        reply = client.post(URL_RESTORE, REQUEST, RestoreReply, 5)

        assert reply.status == "load"
        assert sidecar.joined == [REQUEST]


def test_a_socket_path_longer_than_the_kernel_takes_works(tmp_path, monkeypatch) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.chdir(folder)
    with FakeSidecar(".") as sidecar:
        client = SidecarClient(f"{folder}/agent.sock")
        assert len(client.socket_path) > 107

        assert client.notify(NOTICE, 2)
        assert sidecar.captures == [NOTICE]


def test_a_notice_that_nobody_hears_is_no_error(volume) -> None:
    assert not SidecarClient(f"{volume}/agent.sock").notify(NOTICE, 0.2)


def test_a_refusal_carries_the_words_of_the_sidecar(volume) -> None:
    with FakeSidecar(volume) as sidecar:
        sidecar.restores.append((409, error_reply("WrongWorld", "rank 9 of 4", "check WORLD_SIZE")))

        with pytest.raises(Refused, match=r"rank 9 of 4 \(check WORLD_SIZE\)") as caught:
            SidecarClient(sidecar.memory.socket).post(URL_RESTORE, REQUEST, RestoreReply, 5)

    assert (caught.value.status, caught.value.code) == (409, "WrongWorld")


def test_a_sidecar_of_another_major_version_is_named_as_that(volume) -> None:
    with (
        FakeSidecar(volume, version="7.0") as sidecar,
        pytest.raises(VersionMismatch, match=r"speaks protocol 7\.0"),
    ):
        SidecarClient(sidecar.memory.socket).status()


def test_a_checkpoint_that_the_sidecar_does_not_know_is_none(volume) -> None:
    with FakeSidecar(volume) as sidecar:
        sidecar.complete_at_once = False

        assert SidecarClient(sidecar.memory.socket).checkpoint(CheckpointId(1, 2)) is None


def test_patience_outlasts_a_sidecar_that_is_still_starting(volume) -> None:
    client = SidecarClient(f"{volume}/agent.sock")
    said: list[str] = []
    refused = threading.Event()
    heard: list[bool] = []

    def say(message: str) -> None:
        said.append(message)
        refused.set()

    def ask() -> RestoreReply:
        return client.post(URL_RESTORE, REQUEST, RestoreReply, 5)

    def wait() -> None:
        heard.append(client.patiently(ask, 30, say).status == "load")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert refused.wait(30)
    with FakeSidecar(volume) as sidecar:
        sidecar.restores.append((503, error_reply("Starting", "not ready yet")))
        waiting.join()

    assert heard == [True]
    assert "agent.sock" in said[0]


def test_patience_ends(volume) -> None:
    client = SidecarClient(f"{volume}/agent.sock")

    with pytest.raises(Unreachable, match=r"agent\.sock"):
        client.patiently(client.status, 0.3, quiet)
