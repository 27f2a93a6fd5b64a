"""What the definition takes is carried out; nothing of it is refused as not there yet."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_operator.api import Allowances, read_job
from backstay_operator.decide.admission import refusal
from support.bad_jobs import GONE, POD, REMOTE, job


@pytest.mark.parametrize(
    "changes",
    [
        {f"{REMOTE}.caSecret": "my-ca"},
        {"spec.restore": {"from": {"namespace": "team", "runName": "old"}}},
        {"spec.restore": {"fresh": True}},
        {
            f"{REMOTE}.workloadIdentity": True,
            f"{REMOTE}.credentialsSecret": GONE,
            f"{POD}.serviceAccountName": "default",
        },
    ],
    ids=["caSecret", "from", "fresh", "workloadIdentity"],
)
def test_what_the_definition_has_is_taken(changes: dict[str, Any]) -> None:
    assert refusal(read_job(job(changes), Allowances()), "512Mi") is None


def test_nothing_stands_against_a_plain_job() -> None:
    assert refusal(read_job(job(), Allowances()), "512Mi") is None
