"""What this machine can give to a local run."""

from __future__ import annotations

import socket
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from backstay_cli.errors import CommandError, UsageError
from backstay_cli.local import machine
from backstay_cli.local.census import last_words
from backstay_cli.local.machine import Nodes
from backstay_cli.local.state import StateFolder, memory_root
from backstay_operator.api import TrainingJob


def test_addresses_are_loopback_stable_and_in_the_order_of_the_replicas() -> None:
    hosts = machine.hosts_of("some-uid", 100)
    assert hosts == machine.hosts_of("some-uid", 100)
    assert all(host.startswith("127.") for host in hosts.values())
    in_order = [hosts[i] for i in range(100)]
    assert in_order == sorted(in_order)
    assert machine.store_host("some-uid") not in hosts.values()
    assert machine.hosts_of("another-uid", 1) != machine.hosts_of("some-uid", 1)


def test_a_taken_address_is_told_with_how_to_find_who_has_it() -> None:
    host = "127.231.17.5"
    with socket.socket() as sock:
        sock.bind((host, 7071))
        sock.listen()
        with pytest.raises(CommandError, match=r"127\.231\.17\.5:7071 is in use.*\n.*ss -ltnp"):
            machine.check_addresses({0: host})
    machine.check_addresses({0: host})


def test_too_little_memory_is_told_with_the_number_needed(job: TrainingJob) -> None:
    uid = str(uuid.uuid4())
    machine.check_memory(_sized(job, 1 << 20), uid)
    with pytest.raises(UsageError) as caught:
        machine.check_memory(_sized(job, 1 << 50), uid)
    told = str(caught.value)
    assert "3 replicas x 1024.0 TiB need 3072.0 TiB in /dev/shm" in told
    assert "mount -o remount,size=3379.2T /dev/shm" in told


def _sized(job: TrainingJob, size: int) -> TrainingJob:
    memory = replace(job.spec.checkpoint.memory, size_limit_bytes=size)
    checkpoint = replace(job.spec.checkpoint, memory=memory)
    return replace(job, spec=replace(job.spec, checkpoint=checkpoint))


def test_too_many_replicas_are_refused(job: TrainingJob) -> None:
    machine.check_size(job)
    with pytest.raises(UsageError, match="got 500"):
        machine.check_size(replace(job, spec=replace(job.spec, replicas=500)))


def test_a_reboot_wipes_memory_and_destruction_wipes_all(tmp_path: Path) -> None:
    uid = str(uuid.uuid4())
    nodes = Nodes(StateFolder(tmp_path), uid)
    try:
        nodes.create("node-0")
        (nodes.memory("node-0") / "slot").write_bytes(b"x" * 5000)
        (nodes.disk("node-0") / "shard").write_bytes(b"x" * 5000)
        assert machine.folder_bytes(memory_root(uid)) >= 5000
        nodes.wipe_memory("node-0")
        assert list(nodes.memory("node-0").iterdir()) == []
        assert (nodes.disk("node-0") / "shard").exists()
        nodes.destroy("node-0")
        assert not nodes.is_alive("node-0")
        assert not nodes.memory("node-0").exists()
        nodes.wipe_memory("node-0")
        assert not nodes.memory("node-0").exists(), "a destroyed node does not come back"
    finally:
        nodes.close()
    assert not memory_root(uid).exists()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("just\nlines\n\n", "lines"),
        ("Traceback:\nValueError: 3 is odd\nmore noise\n", "ValueError: 3 is odd"),
        ("[rank1]: torch.OutOfMemoryError: no\nend\n", "[rank1]: torch.OutOfMemoryError: no"),
        ("SystemExit: 3\nsignal\n", "SystemExit: 3"),
    ],
)
def test_the_telling_line_of_a_log_is_found(tmp_path: Path, log: str, words: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(log)
    assert last_words(path) == words


def test_a_log_that_is_not_there_has_no_last_words(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none") == ""
