"""Slow tests begin first; what a session of integration tests has started is ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.nursery import end_nursery

SLOWEST = (
    "rounds",
    "runner_real",
    "example_restart",
    "main_job",
    "flat",
    "bare_torchrun",
    "worlds",
    "fault_points",
    "s3_trouble",
    "previous_build",
    "bit_rot",
    "trouble_at_home",
    "sidecar_pair",
    "runner",
    "sidecar_saves",
    "load_worlds",
)
"""Modules by the time that their tests take, so that none begins when all others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes the order decides how long the last one runs."""
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _nursery_ends_with_the_session() -> Iterator[None]:
    yield
    end_nursery()
