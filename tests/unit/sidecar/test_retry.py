"""When a tier is tried again, and when people are told that it is degraded."""

from __future__ import annotations

from backstay_sidecar.replication.retry import BUDGET_SECONDS, LONGEST_PAUSE_SECONDS, Retry


def test_pauses_grow_up_to_a_bound() -> None:
    retry, now, pauses = Retry(), 100.0, []
    for _ in range(12):
        retry = retry.failed(now, "away", jitter=1.0)
        pauses.append(retry.pause(now))
    assert pauses == sorted(pauses)
    assert pauses[0] < 1
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_a_tier_is_degraded_when_its_budget_is_used_up_and_is_still_tried() -> None:
    retry = Retry().failed(100.0, "away")
    assert not retry.degraded(100.0)
    retry = retry.failed(100.0 + BUDGET_SECONDS, "still away")
    assert retry.degraded(100.0 + BUDGET_SECONDS)
    assert retry.message == "still away"
    assert retry.pause(100.0 + BUDGET_SECONDS + LONGEST_PAUSE_SECONDS) == 0


def test_nothing_failed_is_nothing_degraded() -> None:
    assert not Retry().degraded(1e9)
    assert Retry().pause(0.0) == 0
