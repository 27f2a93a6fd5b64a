"""Shared by all tests: hypothesis profiles and a real S3 server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

    from support.s3 import S3Server

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("BACKSTAY_HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """With `--dist loadfile`: files are kept together only where it matters."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.spreading import Spreading

    return Spreading(config, log)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole pytest process, started when the first test asks for it."""
    from support.s3 import running_s3

    with (
        tempfile.TemporaryDirectory(prefix="backstay-s3-") as folder,
        running_s3(Path(folder)) as server,
    ):
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new bucket."""
    return s3_server.make_bucket()
