"""Objects of the API as frozen values: pods, nodes, the leader, the persisted record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_operator.api import names
from backstay_operator.cluster import belongs_to
from backstay_operator.decide import JobRecord, NodeState, PodRecord, drain_taint, why_lost
from backstay_operator.observe import pods
from backstay_operator.observe.budgets import selects
from backstay_operator.observe.deaths import early_deaths, restarts
from backstay_operator.observe.leader import facts_of, missed_seconds
from backstay_operator.observe.nodes import node_state
from backstay_operator.observe.reader import last_word
from backstay_operator.observe.record import read_record
from backstay_operator.persisted import parse_record, write_record
from backstay_operator.settings import DRAIN_TAINTS
from backstay_operator.times import seconds, text_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import JobView, LastWord, RankProgress, ReplicaView, TierState

Tree = dict[str, Any]
AT = "2027-01-15T08:00:00Z"


def pod(**changes: Any) -> Tree:
    labels = {"backstay.dev/replica-index": "1", "backstay.dev/generation": "7"}
    container = {"name": "trainer", "image": "gpt:1", "resources": {"limits": {"memory": "2Gi"}}}
    tree: Tree = {
        "metadata": {"name": "gpt-1-7", "namespace": "team", "uid": "u1", "labels": labels},
        "spec": {
            "nodeName": "n1",
            "containers": [container],
            "initContainers": [{"name": "backstay-sidecar", "image": "sidecar:1"}],
        },
        "status": {"phase": "Running"},
    }
    for path, value in changes.items():
        tree[path] = {**tree[path], **value}
    return tree


def trainer(state: Tree, restarts: int = 0, last: Tree | None = None) -> Tree:
    status = {"name": "trainer", "state": state, "restartCount": restarts, "lastState": last or {}}
    return {"containerStatuses": [status]}


def ended(code: int, reason: str = "Error", message: str = "") -> Tree:
    end = {"exitCode": code, "reason": reason, "finishedAt": AT, "message": message}
    return {"terminated": end}


# --- pods ----------------------------------------------------------------------------------------


def test_a_running_pod() -> None:
    state = pods.pod_state(pod(status=trainer({"running": {"startedAt": AT}}, 2)))
    assert (state.replica, state.generation, state.node) == (1, 7, "n1")
    assert state.trainer.running
    assert state.trainer.restarts == 2
    assert state.trainer.started_at == seconds(AT)
    assert state.node_alive
    assert state.trouble is None


def test_a_container_between_two_restarts_has_failed_and_tells_its_last_words() -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    tree = pod(status=trainer(waiting, 3, ended(1, message="\nTraceback\nValueError: no data\n")))
    state = pods.pod_state(tree)
    assert state.trainer.failed
    assert state.trouble is not None
    assert state.trouble.reason == names.REASON_USER_ERROR
    assert "ValueError: no data (3 restarts)" in state.trouble.message


def test_a_container_that_was_killed_for_memory_is_told_by_that_name_with_its_limit() -> None:
    tree = pod(status=trainer({"waiting": {}}, 1, ended(137, "OOMKilled")))
    trouble = pods.trouble_of(tree)
    assert trouble is not None
    assert trouble.reason == names.REASON_OOM_KILLED
    assert "OOMKilled: it used more memory than its limit (2Gi)" in trouble.message


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        (
            {"status": {"conditions": [{"type": "PodScheduled", "status": "False",
                                        "reason": "Unschedulable", "message": "0/3 nodes"}]}},
            names.REASON_UNSCHEDULABLE,
            "0/3 nodes",
        ),
        ({"spec": {"schedulingGates": [{"name": "kueue"}]}}, names.REASON_QUEUED, "kueue"),
        (
            {"status": trainer({"waiting": {"reason": "ImagePullBackOff", "message": "no such"}})},
            names.REASON_IMAGE_PULL_FAILED,
            "image gpt:1: no such",
        ),
        (
            {"status": trainer({"waiting": {"reason": "CreateContainerConfigError",
                                            "message": "secret not found"}})},
            names.REASON_POD_REFUSED,
            "secret not found",
        ),
        ({"status": trainer({"waiting": {"reason": "PodInitializing"}})}, "", ""),
        (
            {"status": {"conditions": [{"type": "PodScheduled", "status": "False",
                                        "reason": "SchedulingGated"}]}},
            "",
            "",
        ),
    ],
    ids=["unschedulable", "queued", "image", "secret", "beginning", "gated"],
)  # fmt: skip
def test_why_a_pod_does_not_come_up(change: Tree, reason: str, word: str) -> None:
    trouble = pods.trouble_of(pod(**change))
    assert (trouble.reason if trouble else "") == reason
    assert word in (trouble.message if trouble else "")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Running"}, ""),
        ({"phase": "Succeeded"}, ""),
        ({"phase": "Failed", "reason": "Evicted", "message": "low"}, "Evicted: low"),
        ({"phase": "Failed"}, "Failed"),
        (
            {
                "phase": "Failed",
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                ],
            },
            "DeletionByPodGC: disrupted",
        ),
    ],
)
def test_why_a_whole_pod_failed(status: Tree, words: str) -> None:
    assert pods.pod_state(pod(status=status)).failed == words


def test_the_sidecars_last_word_is_read_from_its_termination_message() -> None:
    word = '{"newest_step": 9, "durable_step": 7}'
    done = {"name": "backstay-sidecar", "state": ended(0, message=word)}
    kept = pods.kept_of(pod(status={"initContainerStatuses": [done]}))
    assert kept == LastWord(newest_step=9, durable_step=7)
    assert kept is not None
    assert not kept.safe


def test_the_word_of_a_pod_that_was_replaced_proves_nothing() -> None:
    """Its attempt may be no history any more: 40 was saved off the lineage, 30 is not durable."""

    def said(generation: int, newest: int, durable: int) -> Tree:
        word = f'{{"newest_step": {newest}, "durable_step": {durable}}}'
        done = {"name": "backstay-sidecar", "state": ended(0, message=word)}
        tree = pod(status={"initContainerStatuses": [done]})
        tree["metadata"]["labels"] = {
            "backstay.dev/replica-index": "1",
            "backstay.dev/generation": str(generation),
        }
        return tree

    record = JobRecord(first_generation=7, generation=8, pods={1: PodRecord(generation=8)})
    old, now = said(7, 40, 40), said(8, 30, 20)
    assert last_word([old, now], record) == LastWord(newest_step=30, durable_step=20)
    assert last_word([old], record) is None


@pytest.mark.parametrize("message", ["", "stopped", "{}[", '{"newest_step": "x"}'])
def test_other_last_words_prove_nothing(message: str) -> None:
    done = {"name": "backstay-sidecar", "state": ended(0, message=message)}
    assert pods.kept_of(pod(status={"initContainerStatuses": [done]})) is None


def test_a_pod_without_our_labels_is_none_of_ours() -> None:
    assert pods.identity_of(pod(metadata={"labels": {}})) is None
    assert not belongs_to(pod(), "u9")
    assert belongs_to(pod(metadata={"ownerReferences": [{"uid": "u9"}]}), "u9")


def test_starts_that_come_to_nothing_are_counted_since_all_trained() -> None:
    crashing = pod(status=trainer({"waiting": {}}, 5, ended(1, message="boom")))
    assert early_deaths([crashing], {})[0] == 5
    calm = restarts([pod(status=trainer({"running": {}}, 3))])
    count, words = early_deaths([crashing], calm)
    assert count == 2
    assert words.endswith("boom")


def test_what_happens_to_pods_and_nodes_is_no_start_that_came_to_nothing() -> None:
    """Its successor has another uid and no restarts: only what the kubelet restarts is charged."""
    calm = restarts([pod(status=trainer({"running": {}}, 3))])
    evicted = pod(status={"phase": "Failed", "reason": "Evicted"})
    successor = pod(metadata={"uid": "u2"}, status=trainer({"running": {}}))
    assert early_deaths([evicted, successor], calm) == (0, "")
    deleted = pod(metadata={"uid": "u2", "deletionTimestamp": AT}, status=trainer({"waiting": {}}))
    assert early_deaths([deleted], calm) == (0, "")


def test_out_of_memory_while_training_is_charged_only_once_training_does_not_come_back() -> None:
    killed = pod(status=trainer({"waiting": {}}, 4, ended(137, "OOMKilled")))
    assert early_deaths([killed], restarts([killed])) == (0, "")
    count, words = early_deaths([killed], {})
    assert count == 4
    assert "OOMKilled: it used more memory than its limit (2Gi)" in words


def test_a_sidecar_counts_only_where_it_keeps_the_trainer_from_beginning() -> None:
    side = {"name": "backstay-sidecar", "state": {"waiting": {}}, "lastState": ended(2),
            "restartCount": 4}  # fmt: skip
    status = {"initContainerStatuses": [side]}
    count, words = early_deaths([pod(status=status)], {})
    assert count == 4
    assert "sidecar" in words
    running = {**status, **trainer({"running": {}})}
    assert early_deaths([pod(status=running)], {}) == (0, "")


# --- nodes ---------------------------------------------------------------------------------------


def node(status: str = "True", taints: tuple[str, ...] = ()) -> NodeState:
    tree = {
        "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "a", "x": "y"}},
        "spec": {"taints": [{"key": key} for key in taints]},
        "status": {"conditions": [
            {"type": "Ready", "status": status, "lastTransitionTime": AT}
        ]},
    }  # fmt: skip
    return node_state(tree)


def lost(state: NodeState | None, away: float, missed: float = 0.0) -> str:
    now = seconds(AT) + away
    return why_lost("n1", state, missed_seconds=missed, limit_seconds=60, now=now)


def test_a_node_keeps_only_what_decisions_need() -> None:
    state = node()
    assert (state.ready, state.since) == (True, seconds(AT))
    assert dict(state.labels) == {"topology.kubernetes.io/zone": "a"}
    assert node_state({"metadata": {"name": "n2", "labels": {"rack": "7"}}},
                      frozenset({"rack"})).labels == {"rack": "7"}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "away", "missed", "why"),
    [
        (node(), 1000, 1000, ""),
        (None, 0, 0, "there is no Node"),
        (node("Unknown"), 59, 0, ""),
        (node("Unknown"), 60, 0, "Ready=Unknown for 60 s"),
        (node("False"), 61, 0, "Ready=False"),
        (node("Unknown"), 1, 9, ""),
        (node("Unknown"), 1, 12, "silent for 12 s"),
        (node("True", ("node.kubernetes.io/out-of-service",)), 0, 0, "out-of-service"),
    ],
)
def test_when_a_node_is_lost(state: NodeState | None, away: float, missed: float, why: str) -> None:
    words = lost(state, away, missed)
    assert bool(words) == bool(why)
    assert why in words


def test_a_drain_is_known_by_any_of_the_taints() -> None:
    assert drain_taint(node("True", ("other", "karpenter.sh/disrupted")), DRAIN_TAINTS)
    assert not drain_taint(node("True", ("other",)), DRAIN_TAINTS)
    assert not drain_taint(None, DRAIN_TAINTS)


# --- the leader ----------------------------------------------------------------------------------


def test_what_the_leader_says_becomes_facts() -> None:
    view = JobView(
        run="team/gpt",
        attempt=5,
        phase="Training",
        message="m",
        step=12,
        tiers=(
            TierState(tier="memory", newest=CheckpointId(12, 5)),
            TierState(tier="remote", ok=False, message="bucket away"),
        ),
        replicas=(ReplicaView(replica=1, generation=7, address="", seen_seconds_ago=4.0),),
        newest_durable=CheckpointId(8, 5),
    )
    facts = facts_of(view)
    assert facts is not None
    assert (facts.newest_step, facts.durable_step) == (12, 8)
    assert facts.tier_troubles == ("bucket away",)
    assert facts_of(None) is None
    assert missed_seconds(view, 1, 7) == 4.0
    assert missed_seconds(view, 1, 8) == 0.0
    assert missed_seconds(None, 1, 7) == 0.0


# --- what is persisted ---------------------------------------------------------------------------

RECORDS = st.builds(
    JobRecord,
    first_generation=st.integers(1, 10**10),
    generation=st.integers(1, 10**10),
    pods=st.dictionaries(
        st.integers(0, 9999),
        st.builds(
            PodRecord,
            generation=st.integers(1, 10**10),
            replaces=st.integers(0, 10**10),
            created=st.booleans(),
            node=st.sampled_from(["", "node-1", "ip-10-0-0-1.ec2.internal"]),
        ),
        max_size=5,
    ),
    choice=st.sampled_from(["", "100-0"]),
    choice_number=st.integers(0, 10),
    outcome=st.sampled_from(["", "Succeeded", "Failed"]),
    outcome_reason=st.just("R"),
    outcome_message=st.just("a/b"),
    ended_at=st.integers(0, 10**10).map(float),
    drain_since=st.integers(0, 10**10).map(float),
    flush_since=st.integers(0, 10**10).map(float),
    safe_end=st.booleans(),
)


@given(RECORDS)
def test_a_record_comes_back_as_it_was_persisted(record: JobRecord) -> None:
    assert parse_record(write_record(record)) == record


def test_a_thousand_pods_take_few_bytes() -> None:
    pods_of = {
        i: PodRecord(generation=1_800_000_000 + i, replaces=1_800_000_000, node=f"node-{i}")
        for i in range(1000)
    }
    record = JobRecord(first_generation=1, generation=2, pods=pods_of)
    assert len(str(write_record(record))) < 64_000


def test_a_new_jobs_first_generation_is_its_creation_time() -> None:
    job = {"metadata": {"name": "gpt", "creationTimestamp": AT}}
    assert read_record(job, []).first_generation == int(seconds(AT))
    old = read_record(job, [pod()])
    assert old.pods == {1: PodRecord(generation=7, created=True)}
    assert old.generation == int(seconds(AT))


@pytest.mark.parametrize("text", [None, "", "yesterday", 5])
def test_a_time_that_is_none_is_zero(text: object) -> None:
    assert seconds(text) == 0.0


def test_times_come_back() -> None:
    assert text_of(seconds(AT)) == AT


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "gpt"}}, True),
        ({"matchLabels": {"app": "bert"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "gpt"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["gpt"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Later"}]}, False),
    ],
)
def test_a_budget_selects_pods_as_policy_v1_means_it(selector: Tree | None, selected: bool) -> None:
    assert selects(selector, {"app": "gpt"}) == selected


def test_the_leaders_view_tells_who_spoke_and_who_skips() -> None:
    rank = RankProgress(
        rank=2, step=9, step_time=1.0, published_step=4, attempt=5, state=3, saves=2, skipped=20
    )
    view = JobView(
        run="team/gpt",
        attempt=5,
        phase="Training",
        message="",
        step=9,
        replicas=(
            ReplicaView(replica=0, generation=1, address="", seen_seconds_ago=0.1, ranks=(rank,)),
            ReplicaView(replica=1, generation=1, address="", seen_seconds_ago=0.1),
            ReplicaView(replica=2, generation=1, address="", seen_seconds_ago=60.0),
        ),
    )
    facts = facts_of(view)
    assert facts is not None
    assert (facts.heard, facts.spoken) == ({0, 1}, {0})
    assert facts.skipping[0].startswith("rank 2 skipped 20 of 22 saves")
