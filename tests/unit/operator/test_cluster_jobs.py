"""Which pods and errors of a cluster the command takes for what."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_cli.cluster import _only, _refusal, current_pods
from backstay_cli.commands.look import unattended
from backstay_cli.errors import CommandError, NoAnswer, NotFound, UsageError
from backstay_cli.where import ENV_CLUSTER, Where
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import JobView, RestoreView, TierState


def pod(replica: int, generation: int, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    labels = {
        "backstay.dev/replica-index": str(replica),
        "backstay.dev/generation": str(generation),
    }
    name = f"gpt-{replica}-{generation}"
    return {
        "metadata": {"name": name, "labels": labels, **metadata},
        "status": {"phase": phase},
    }


def test_the_newest_running_pod_of_each_replica_counts() -> None:
    pods = [
        pod(1, 7),
        pod(0, 7),
        pod(0, 9),
        pod(0, 12, "Pending"),
        pod(2, 7, deletionTimestamp="2026-11-30T00:00:00Z"),
    ]
    assert current_pods(pods) == {0: "gpt-0-9", 1: "gpt-1-7"}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ('Error from server (NotFound): trainingjobs.backstay.dev "x" not found', NotFound),
        ('error: the server doesn\'t have a resource type "trainingjobs"', NotFound),
        ("The connection to the server 127.0.0.1:1 was refused", NoAnswer),
        ("Error from server (Forbidden): secrets is forbidden", CommandError),
        ("error: stat /nowhere: no such file or directory", UsageError),
        ("error: context was not found for specified context: x", UsageError),
        ('error: context "x" does not exist', UsageError),
        ("error: current-context must exist in order to minify", UsageError),
    ],
)
def test_what_kubectl_says_becomes_the_documented_exit_code(
    words: str, kind: type[CommandError]
) -> None:
    error = _refusal(words)
    assert type(error) is kind
    assert words in str(error)


def test_without_a_name_the_only_job_is_meant() -> None:
    one = {"metadata": {"name": "gpt"}}
    assert _only({"items": [one]}) is one
    with pytest.raises(NotFound, match="no TrainingJob"):
        _only({"items": []})
    with pytest.raises(UsageError, match="several TrainingJobs: gpt, gpt"):
        _only({"items": [one, one]})


def test_places_exclude_each_other() -> None:
    for places in ({"address": "a"}, {"bucket": "b", "endpoint": "e", "run": "n/r"}):
        with pytest.raises(UsageError, match="exclude each other"):
            Where(namespace="team", **places)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--job exclude"):
        Where(address="a", job="gpt")
    assert Where(namespace="team", job="gpt").in_cluster


def test_as_kubectls_plugin_the_cluster_is_meant_unless_another_place_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Where().in_cluster
    monkeypatch.setenv(ENV_CLUSTER, "1")
    assert Where().in_cluster
    assert Where(job="gpt").in_cluster
    assert not Where(address="a").in_cluster


def test_a_status_that_nobody_writes_any_more_is_noticed() -> None:
    durable = CheckpointId(40, 8)
    view = JobView(
        run="team/gpt",
        attempt=8,
        phase="Training",
        message="",
        step=50,
        tiers=(TierState(tier="remote", newest=durable, newest_time=1000.0),),
        restores=(
            RestoreView(
                attempt=8, base=None, finished=900.0, seconds=1, bytes_by_tier={}, lost_steps=0
            ),
        ),
        newest_durable=durable,
    )
    assert unattended({"durableStep": 40, "attempt": 8}, view, 9000.0) == ""
    assert unattended({"durableStep": 30, "attempt": 8}, view, 1060.0) == "", "it is just told"
    for status in ({"durableStep": 30, "attempt": 8}, {"durableStep": 40, "attempt": 7}, {}):
        assert "does not look after this namespace" in unattended(status, view, 1200.0)
