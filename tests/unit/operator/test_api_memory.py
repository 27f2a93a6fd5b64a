"""Limits that can't hold the slots are refused with the number that is needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from backstay_operator.api import TrainingJob, memory_need, memory_too_small, read_job
from backstay_operator.api.memory import PROCESS_BYTES, SHM_BYTES
from backstay_operator.api.quantity import as_quantity

MIB = 1 << 20
SHM = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}


def job(limit: str = "", *, processes: int = 2, **pod: Any) -> TrainingJob:
    trainer: dict[str, Any] = {"name": "trainer", "command": ["torchrun", "train.py"]}
    if limit:
        trainer["resources"] = {"limits": {"memory": limit}}
    trainer |= pod.pop("trainer", {})
    tree = {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {
            "replicas": 2,
            "processesPerReplica": processes,
            "podTemplate": {"spec": {"containers": [trainer], **pod}},
            "checkpoint": {"memory": {"everySteps": 10, "sizeLimit": "1Gi"}},
        },
    }
    return read_job(copy.deepcopy(tree))


def test_a_trainer_needs_its_volume_its_shared_memory_and_its_processes() -> None:
    need = memory_need(job())
    assert need.volume_bytes == 1024 * MIB
    assert need.shared_bytes == SHM_BYTES == 64 * MIB
    assert need.process_bytes == 2 * PROCESS_BYTES
    assert need.trainer_bytes == (1024 + 64 + 256) * MIB


def test_shared_memory_of_the_templates_own_takes_the_place_of_the_default() -> None:
    mounts = {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    assert memory_need(job(trainer=mounts, volumes=[SHM])).shared_bytes == 2048 * MIB


def test_other_memory_volumes_count_and_disks_do_not() -> None:
    mounts = {"volumeMounts": [{"name": n, "mountPath": f"/{n}"} for n in ("shm", "disk")]}
    volumes = [SHM, {"name": "disk", "emptyDir": {"sizeLimit": "9Gi"}}, {"name": "x"}]
    assert memory_need(job(trainer=mounts, volumes=volumes)).shared_bytes == (2048 + 64) * MIB


def test_a_limit_that_is_too_small_is_told_with_the_number_to_write() -> None:
    why = memory_too_small(job("1343Mi"), "512Mi")
    assert "the trainer's memory limit is 1.3 GiB" in why
    assert "raise resources.limits.memory to 1344Mi or more" in why
    assert memory_too_small(job("1344Mi"), "512Mi") == ""


def test_without_a_limit_nothing_is_refused() -> None:
    assert memory_too_small(job(), "512Mi") == ""


@pytest.mark.parametrize(("limit", "fits"), [("1855Mi", False), ("1856Mi", True)])
def test_a_limit_of_the_whole_pod_holds_the_sidecar_too(limit: str, fits: bool) -> None:
    whole = job(resources={"limits": {"memory": limit}})
    assert (memory_too_small(whole, "512Mi") == "") == fits


def test_quantities_for_people_hold_what_they_must() -> None:
    assert [as_quantity(n) for n in (1, MIB, MIB + 1, 2 << 30)] == ["1Mi", "1Mi", "2Mi", "2Gi"]
