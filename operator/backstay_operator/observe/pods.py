"""A Pod object to `PodState`: what lives, what ended, what keeps it from coming up. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backstay_operator.api import names
from backstay_operator.api.names import (
    LABEL_GENERATION,
    LABEL_REPLICA,
    SIDECAR,
    TRAINER,
)
from backstay_operator.cluster import Tree
from backstay_operator.decide import ContainerState, Ended, PodState, Trouble
from backstay_operator.manifests.wiring import (
    ANNOTATION_CHOICE,
    ANNOTATION_SPEC,
    LABEL_ROLE,
    ROLE_FLUSH,
)
from backstay_operator.times import seconds
from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.messages import LastWord

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError")
_WORDS = 300


def is_flush_pod(tree: Tree) -> bool:
    """Whether it is the sidecar alone, beside what a replica left."""
    return (tree["metadata"].get("labels") or {}).get(LABEL_ROLE) == ROLE_FLUSH


def identity_of(tree: Tree) -> tuple[int, int] | None:
    """(replica, generation) by its labels; None: not one of ours."""
    labels = tree["metadata"].get("labels") or {}
    replica, generation = labels.get(LABEL_REPLICA, ""), labels.get(LABEL_GENERATION, "")
    if not replica.isdigit() or not generation.isdigit():
        return None
    return int(replica), int(generation)


def pod_state(
    tree: Tree,
    *,
    node_why: str = "",
    drain: str = "",
    domain: str = "",
) -> PodState:
    """`node_why`: why its node is lost (decide.why_lost); empty if it lives."""
    identity = identity_of(tree)
    assert identity is not None
    metadata, spec, status = tree["metadata"], tree["spec"], tree.get("status") or {}
    annotations = metadata.get("annotations") or {}
    main = SIDECAR if is_flush_pod(tree) else TRAINER
    trainer = container_state(tree, main)
    return PodState(
        replica=identity[0],
        generation=identity[1],
        node=spec.get("nodeName") or "",
        node_alive=not node_why,
        node_why=node_why,
        trainer=trainer,
        failed=_why_failed(status),
        terminating=bool(metadata.get("deletionTimestamp")),
        finished=status.get("phase") in ("Succeeded", "Failed"),
        ends_itself=trainer.completed,
        trouble=trouble_of(tree),
        drain=drain,
        domain=domain,
        spec_digest=annotations.get(ANNOTATION_SPEC, ""),
        choice=annotations.get(ANNOTATION_CHOICE),
    )


def container_state(tree: Tree, name: str) -> ContainerState:
    """One container, by name; one that never started is neither running nor ended."""
    status = status_of(tree, name)
    state, last = status.get("state") or {}, status.get("lastState") or {}
    terminated = state.get("terminated") or last.get("terminated")
    running = state.get("running")
    return ContainerState(
        name=name,
        running=running is not None,
        started_at=seconds((running or {}).get("startedAt")),
        restarts=int(status.get("restartCount") or 0),
        ended=_ended(terminated) if terminated else None,
    )


def status_of(tree: Tree, name: str) -> Mapping[str, Any]:
    """The kubelet's word on one container; empty before it has spoken."""
    status = tree.get("status") or {}
    every = [
        *(status.get("containerStatuses") or []),
        *(status.get("initContainerStatuses") or []),
    ]
    found: Mapping[str, Any] = next((one for one in every if one.get("name") == name), {})
    return found


def last_words(tree: Tree, name: str) -> str:
    """What a container said as it ended last, shortened; the exit code where it said nothing."""
    status = status_of(tree, name)
    state, last = status.get("state") or {}, status.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated")
    if not ended:
        return ""
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    if ended.get("reason") == "OOMKilled":
        return f"{name} was OOMKilled: it used more memory than its limit{_limit(tree, name)}"
    words = f"{name} ended with exit code {ended.get('exitCode')}"
    return f"{words}: {_message(lines[-1])[-_WORDS:]}" if lines else words


def _message(line: str) -> str:
    """Of a line of log; where it is JSON, its message."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):
        return line


def kept_of(tree: Tree) -> LastWord | None:
    """What the sidecar said of the last checkpoint as it ended, in its termination message."""
    status = status_of(tree, SIDECAR)
    ended = (status.get("state") or {}).get("terminated") or {}
    try:
        return codec.loads(LastWord, str(ended.get("message") or "").encode())
    except ProtocolError:
        return None


def trouble_of(tree: Tree) -> Trouble | None:
    """Why a pod does not come up, or goes down again and again."""
    for check in (_queued, _unschedulable, _waiting, _ends):
        found = check(tree)
        if found is not None:
            return found
    return None


def _queued(tree: Tree) -> Trouble | None:
    gates = tree["spec"].get("schedulingGates") or []
    if not gates:
        return None
    which = ", ".join(str(gate.get("name")) for gate in gates)
    message = f"pod {tree['metadata']['name']} waits for its queue ({which})"
    return Trouble(reason=names.REASON_QUEUED, message=message)


def _unschedulable(tree: Tree) -> Trouble | None:
    for condition in (tree.get("status") or {}).get("conditions") or []:
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        if condition.get("reason") == "SchedulingGated":
            return None
        words = condition.get("message") or "no node fits"
        message = f"pod {tree['metadata']['name']} finds no node: {words}"
        return Trouble(reason=names.REASON_UNSCHEDULABLE, message=message)
    return None


def _waiting(tree: Tree) -> Trouble | None:
    for name in (SIDECAR, TRAINER):
        waiting = (status_of(tree, name).get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        words = waiting.get("message") or reason
        where = f"container {name} of pod {tree['metadata']['name']}"
        if reason in _PULL:
            image = _container(tree, name).get("image", "")
            message = f"{where} can't get its image {image}: {words}"
            return Trouble(reason=names.REASON_IMAGE_PULL_FAILED, message=message)
        if reason in _CONFIG:
            message = f"{where} can't be made: {words}"
            return Trouble(reason=names.REASON_POD_REFUSED, message=message)
    return None


def _ends(tree: Tree) -> Trouble | None:
    """A container that is down between two restarts, in its own last words."""
    for name, reason in ((SIDECAR, names.REASON_POD_FAILED), (TRAINER, names.REASON_USER_ERROR)):
        state = container_state(tree, name)
        if not state.failed or state.ended is None:
            continue
        if state.ended.reason == "OOMKilled":
            reason = names.REASON_OOM_KILLED
        message = f"pod {tree['metadata']['name']}: {last_words(tree, name)}"
        return Trouble(reason=reason, message=f"{message} ({state.restarts} restarts)")
    return None


def _ended(terminated: Mapping[str, Any]) -> Ended:
    return Ended(
        exit_code=int(terminated.get("exitCode") or 0),
        at=seconds(terminated.get("finishedAt")),
        reason=str(terminated.get("reason") or ""),
    )


def _why_failed(status: Mapping[str, Any]) -> str:
    if status.get("phase") != "Failed":
        return ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason')}: {condition.get('message') or 'disrupted'}"
    reason, message = status.get("reason") or "Failed", status.get("message") or ""
    return f"{reason}: {message}" if message else str(reason)


def _container(tree: Tree, name: str) -> Mapping[str, Any]:
    spec = tree["spec"]
    every = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    found: Mapping[str, Any] = next((one for one in every if one.get("name") == name), {})
    return found


def _limit(tree: Tree, name: str) -> str:
    limits = (_container(tree, name).get("resources") or {}).get("limits") or {}
    return f" ({limits['memory']})" if "memory" in limits else " (it has none; the node was full)"
