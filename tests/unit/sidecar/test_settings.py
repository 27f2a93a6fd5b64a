"""What a sidecar is told at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay_protocol import codec
from backstay_protocol.names import (
    ENV_EXIT_WITH_PARENT,
    ENV_NODE,
    ENV_POD,
    ENV_POD_IP,
    ENV_REPLICA,
    ENV_S3_ACCESS_KEY,
    ENV_S3_SECRET_KEY,
    ENV_TOKEN,
    ENV_TOPOLOGY,
    ENV_VOLUME,
)
from backstay_protocol.topology import Peer, PodIdentity, RemoteTier, Tiers, Topology
from backstay_sidecar.errors import SettingsError
from backstay_sidecar.settings import read_settings

TOKEN = "0123456789abcdef0123"


def topology_file(folder: Path, tiers: Tiers | None = None, address: str = "127.0.0.9:7070") -> str:
    topology = Topology(
        namespace="ns",
        job="job",
        run_name="run",
        uid="uid",
        replicas=2,
        processes_per_replica=1,
        peers=(Peer(replica=0, address=address), Peer(replica=1, address="127.0.0.10:8000")),
        tiers=tiers or Tiers(),
    )
    path = folder / "topology.json"
    path.write_bytes(codec.dumps(topology))
    return str(path)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        ENV_TOPOLOGY: topology_file(folder),
        ENV_VOLUME: "/mem",
        ENV_TOKEN: TOKEN,
        ENV_REPLICA: "0",
        **more,
    }


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    settings = read_settings([], environment(tmp_path))
    assert (settings.replica, settings.volume, settings.tokens) == (0, "/mem", (TOKEN,))
    assert (settings.listen_host, settings.api_port, settings.health_port) == (
        "127.0.0.9",
        7070,
        7071,
    )
    assert settings.is_leader
    assert not settings.exit_with_parent


def test_arguments_win_over_the_environment(tmp_path: Path) -> None:
    arguments = ["--replica", "1", "--volume", "/other", "--listen", "0.0.0.0"]
    settings = read_settings(arguments, environment(tmp_path, **{ENV_EXIT_WITH_PARENT: "1"}))
    assert (settings.replica, settings.volume, settings.listen_host) == (1, "/other", "0.0.0.0")
    assert (settings.api_port, settings.health_port) == (8000, 8001)
    assert not settings.is_leader
    assert settings.exit_with_parent


def test_a_pod_file_says_which_replica_this_is(tmp_path: Path) -> None:
    pod = PodIdentity(replica=1, generation=5, current={0: 4, 1: 5}, replaces=3, uid="p")
    (tmp_path / "pod.json").write_bytes(codec.dumps(pod))
    settings = read_settings([], environment(tmp_path, **{ENV_POD: str(tmp_path / "pod.json")}))
    assert settings.pod == pod


def test_two_tokens_are_taken_while_they_are_changed(tmp_path: Path) -> None:
    settings = read_settings([], environment(tmp_path, **{ENV_TOKEN: f"{TOKEN}, {TOKEN[::-1]}"}))
    assert settings.tokens == (TOKEN, TOKEN[::-1])


@pytest.mark.parametrize(
    ("changes", "arguments", "why"),
    [
        pytest.param({ENV_TOPOLOGY: ""}, [], "no topology", id="no topology"),
        pytest.param({ENV_TOPOLOGY: "/nowhere"}, [], "/nowhere", id="topology missing"),
        pytest.param({ENV_VOLUME: ""}, [], "no memory volume", id="no volume"),
        pytest.param({ENV_TOKEN: ""}, [], "never open without", id="no token"),
        pytest.param({ENV_TOKEN: "short"}, [], "16 or more", id="short token"),
        pytest.param({ENV_REPLICA: "x"}, [], "which replica", id="replica is no number"),
        pytest.param({ENV_REPLICA: "2"}, [], "has no peer 2", id="replica outside"),
        pytest.param({}, ["--pod", "/p", "--replica", "1"], "not both", id="pod and replica"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, str], arguments: list[str], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        read_settings(arguments, environment(tmp_path, **changes))


def test_a_remote_tier_without_credentials_is_refused_at_start(tmp_path: Path) -> None:
    given = environment(tmp_path)
    tiers = Tiers(remote=RemoteTier(endpoint="http://s3:9000", bucket="b"))
    given[ENV_TOPOLOGY] = topology_file(tmp_path, tiers)
    with pytest.raises(SettingsError, match=ENV_S3_ACCESS_KEY):
        read_settings([], given)
    keys = {ENV_S3_ACCESS_KEY: "a", ENV_S3_SECRET_KEY: "very-secret"}
    settings = read_settings([], {**given, **keys})
    assert "very-secret" not in repr(settings)


def test_an_address_that_can_not_be_listened_on_is_named(tmp_path: Path) -> None:
    given = environment(tmp_path)
    given[ENV_TOPOLOGY] = topology_file(tmp_path, address="host:port")
    with pytest.raises(SettingsError, match="host:port"):
        read_settings([], given)


@pytest.mark.parametrize(
    ("ip", "address"),
    [("", "127.0.0.9:7070"), ("10.0.0.7", "10.0.0.7:7070"), ("fd00::7", "[fd00::7]:7070")],
)
def test_peers_are_told_the_pods_own_address_where_it_is_known(
    tmp_path: Path, ip: str, address: str
) -> None:
    assert read_settings([], environment(tmp_path, **{ENV_POD_IP: ip})).address == address


def test_it_is_told_where_it_runs_and_that_no_trainer_comes(tmp_path: Path) -> None:
    settings = read_settings(["--flush"], environment(tmp_path, **{ENV_NODE: "node-3"}))
    assert (settings.node, settings.flush) == ("node-3", True)
