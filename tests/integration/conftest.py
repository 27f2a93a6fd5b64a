"""Ends what a session of integration tests has started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.nursery import end_nursery


@pytest.fixture(scope="session", autouse=True)
def _nursery_ends_with_the_session() -> Iterator[None]:
    yield
    end_nursery()
