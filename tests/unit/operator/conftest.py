"""A valid manifest and job for the operator's tests, and a world for whole passes."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_operator.api import TrainingJob, read_job
from support.operator_world import World

VALID: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "team"},
    "spec": {
        "replicas": 3,
        "processesPerReplica": 2,
        "podTemplate": {
            "metadata": {"labels": {"team": "blue"}},
            "spec": {
                "containers": [
                    {
                        "name": "trainer",
                        "image": "registry/gpt:1",
                        "command": ["torchrun", "train.py", "--steps", "100"],
                        "env": [{"name": "SEED", "value": "7"}],
                        "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
                    }
                ]
            },
        },
        "checkpoint": {
            "memory": {"everySteps": 10, "sizeLimit": "1Gi"},
            "local": {"everySteps": 20, "keepLast": 3},
            "neighbor": {"everySteps": 20},
            "remote": {
                "endpoint": "https://s3.example.org",
                "bucket": "models",
                "everySteps": 100,
            },
        },
    },
}


@pytest.fixture(scope="session")
def job() -> TrainingJob:
    return read_job(VALID)


@pytest.fixture
def world() -> World:
    return World()
