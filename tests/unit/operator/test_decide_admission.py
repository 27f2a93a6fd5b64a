"""What the definition takes and this version can't do is refused, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_operator.api import Allowances, names, read_job
from backstay_operator.decide.admission import refusal
from support.bad_jobs import GONE, POD, REMOTE, job


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"spec.restore": {"from": {"namespace": "team", "runName": "old"}}}, "spec.restore.from"),
        ({"spec.restore": {"fresh": True}}, "spec.restore.fresh"),
    ],
    ids=["from", "fresh"],
)
def test_what_is_not_there_yet_is_refused_and_not_passed_over(
    changes: dict[str, Any], field: str
) -> None:
    no = refusal(read_job(job(changes), Allowances()), "512Mi")
    assert no is not None
    assert (no.type, no.status, no.reason) == (
        names.ACCEPTED,
        False,
        names.REASON_NOT_SUPPORTED_YET,
    )
    assert no.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {f"{REMOTE}.caSecret": "my-ca"},
        {
            f"{REMOTE}.workloadIdentity": True,
            f"{REMOTE}.credentialsSecret": GONE,
            f"{POD}.serviceAccountName": "default",
        },
    ],
    ids=["caSecret", "workloadIdentity"],
)
def test_an_authority_and_an_identity_are_taken(changes: dict[str, Any]) -> None:
    assert refusal(read_job(job(changes), Allowances()), "512Mi") is None


def test_nothing_stands_against_a_plain_job() -> None:
    assert refusal(read_job(job(), Allowances()), "512Mi") is None
