"""Starts in a row that came to nothing: what the kubelet restarts since all trained last. Pure.

The leader holds the restart budget of worlds; what never joined one it can't count, so it is
counted here, by the containers' restarts.
"""

from __future__ import annotations

from collections.abc import Iterable

from backstay_operator.api.names import SIDECAR, TRAINER
from backstay_operator.cluster import Tree
from backstay_operator.observe.pods import container_state, last_words


def restarts(pods: Iterable[Tree]) -> dict[str, int]:
    """Pod uid and container -> restarts so far."""
    return {
        _key(pod, name): container_state(pod, name).restarts
        for pod in pods
        for name in (TRAINER, SIDECAR)
    }


def early_deaths(pods: Iterable[Tree], calm: dict[str, int]) -> tuple[int, str]:
    """The most in a row, and the last words of what ends. `calm`: `restarts` while all was well."""
    most, words = 0, ""
    for pod in pods:
        trainer, sidecar = container_state(pod, TRAINER), container_state(pod, SIDECAR)
        count = trainer.restarts - calm.get(_key(pod, TRAINER), 0)
        if count > most:
            most = count
            words = f"the trainer ends before training begins: {last_words(pod, TRAINER)}"
        never_ran = not trainer.running and trainer.ended is None
        count = sidecar.restarts - calm.get(_key(pod, SIDECAR), 0)
        if never_ran and count > most:
            most = count
            words = f"the sidecar ends before it is up: {last_words(pod, SIDECAR)}"
    return most, words


def _key(pod: Tree, container: str) -> str:
    return f"{pod['metadata'].get('uid', '')}/{container}"
