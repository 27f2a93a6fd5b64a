"""Fixtures of the cluster tests; docs/cluster-tests.md says how to run them.

Where no cluster can run, each test is skipped with one line that says why. The time limit of these
tests is set here. Tests of the one long job come last: it would keep the machine busy all the time.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cluster import built_images, installed_chart, machine, object_store
from cluster.built_images import Image
from cluster.harness import debian
from cluster.installed_chart import Chart
from cluster.kube import Kube
from cluster.machine import Cluster
from cluster.object_store import Store
from cluster.training import SECRET, START_SECONDS, Job, manifest

TEST_SECONDS = 600
ENV_UNTIL = "BACKSTAY_TEST_UNTIL"
TIME_IS_UP = "the time that scripts/test gives them is up"
HERE = Path(__file__).parent
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A longer limit for the test itself; fixtures, which may build Kubernetes, limit their own."""
    reason = _why_not()
    items.sort(key=lambda item: "long_job" in getattr(item, "fixturenames", ()))
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))
        if reason:
            item.add_marker(pytest.mark.skip(reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test begins after BACKSTAY_TEST_UNTIL (Unix time), which scripts/test sets."""
    until = float(os.environ.get(ENV_UNTIL) or "inf")
    if item.path.is_relative_to(HERE) and time.time() > until:
        pytest.skip(TIME_IS_UP)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The one line, whatever pytest was told to report."""
    if reason := _why_not():
        terminalreporter.write_line(f"all of tests/cluster was skipped: {reason}")
    skipped = terminalreporter.stats.get("skipped", [])
    if late := sum(TIME_IS_UP in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{late} of tests/cluster did not run: {TIME_IS_UP}")


def _why_not() -> str:
    if os.environ.get(machine.ENV_KUBECONFIG):
        if os.environ.get(machine.ENV_REGISTRY) or os.environ.get(machine.ENV_LOAD):
            return ""
        return (
            f"{machine.ENV_REGISTRY} must say where images can be pushed to, or {machine.ENV_LOAD} "
            "which command puts an archive on the nodes (docs/cluster-tests.md)"
        )
    return debian.unfit()


@pytest.fixture(scope="session")
def images() -> dict[str, Image]:
    """The images by name, built unless they are cached; pushed where the cluster is not ours."""
    registry = os.environ.get(machine.ENV_REGISTRY, "")
    command = os.environ.get(machine.ENV_LOAD, "")
    machine.build_programs()
    built = built_images.build_all()
    if registry:
        built = {name: built_images.push(image, registry) for name, image in built.items()}
    elif command:
        for image in built.values():
            built_images.load(image, command)
    return built | _trainer_with_torch()


def _trainer_with_torch() -> dict[str, Image]:
    """The trainer's image that was given, because the cluster's nodes have no torch to mount."""
    reference = os.environ.get(machine.ENV_TRAINER)
    if not reference:
        return {}
    path, _, tag = reference.rpartition(":")
    registry, _, name = path.rpartition("/")
    return {"backstay-example-trainer": Image(registry, name, tag, Path())}


@pytest.fixture(scope="session")
def cluster(images: dict[str, Image]) -> Iterator[Cluster]:
    """Three workers in three zones and a control plane, or the cluster that was given."""
    kubeconfig = os.environ.get(machine.ENV_KUBECONFIG, "")
    with ExitStack() as stack:
        if kubeconfig:
            yield stack.enter_context(machine.given(kubeconfig))
        else:
            archives = [image.archive for image in images.values()]
            yield stack.enter_context(machine.booted(archives))


@pytest.fixture(scope="session")
def kube(cluster: Cluster) -> Kube:
    """The cluster's client."""
    return cluster.kube


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A new namespace that allows hostPath volumes."""
    with kube.namespace(f"test-{uuid.uuid4().hex[:8]}", PRIVILEGED) as name:
        yield name


@pytest.fixture
def breakable(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, for a test that breaks nodes: all are on and whole again afterwards."""
    cluster.disk(0)  # skips where the nodes are not ours
    yield cluster
    cluster.repair()


@pytest.fixture(scope="session")
def torch_folder(cluster: Cluster) -> str:
    """Where every node shows the packages of this interpreter, torch among them; '': in the image.

    Skips where torch is in neither.
    """
    if os.environ.get(machine.ENV_TRAINER):
        return ""
    if not cluster.name or not machine.site_packages():
        pytest.skip(
            "torch comes from this interpreter (Python 3.11 with torch, on our own cluster), or "
            f"from the trainer's image that {machine.ENV_TRAINER} names"
        )
    return machine.TORCH_FOLDER


@pytest.fixture(scope="session")
def store(kube: Kube, images: dict[str, Image]) -> Iterator[Store]:
    """An S3 server in the cluster with one bucket."""
    with object_store.running(kube, images["backstay-test-store"].reference) as it:
        yield it


@pytest.fixture(scope="session")
def chart(kube: Kube, images: dict[str, Image]) -> Iterator[Chart]:
    """The chart, installed with the images of this checkout."""
    operator, sidecar = images["backstay-operator"], images["backstay-sidecar"]
    with installed_chart.installed(kube, operator, sidecar) as it:
        yield it


@pytest.fixture(scope="session")
def place(kube: Kube, chart: Chart, store: Store) -> Iterator[str]:
    """A namespace with the store's keys, and an operator that works."""
    with kube.namespace("test-jobs", PRIVILEGED) as name:
        kube.apply(store.secret(SECRET), namespace=name)
        yield name


@pytest.fixture(scope="session")
def make_job(
    kube: Kube, place: str, store: Store, images: dict[str, Image], torch_folder: str
) -> Callable[..., Job]:
    """Name and fields of `training.manifest` to a job, not applied yet."""
    image = images["backstay-example-trainer"].reference

    def make(name: str, **fields: Any) -> Job:
        return Job(kube, place, manifest(name, image, store, torch_folder, **fields))

    return make


@pytest.fixture(scope="session")
def _endless(make_job: Callable[..., Job]) -> Iterator[Job]:
    job = make_job("long")
    job.apply()
    yield job
    job.delete()
    job.wait("its pods are gone", lambda: not job.pods(), 150)


@pytest.fixture
def long_job(_endless: Job) -> Job:
    """One job that trains as long as there are tests: each finds it training and leaves it so."""
    try:
        _endless.wait_training(timeout=START_SECONDS)
    except AssertionError:  # an earlier test has left it in ruins; that one has failed
        _endless.delete()
        _endless.wait("its pods are gone", lambda: not _endless.pods(), 150)
        _endless.apply()
        _endless.wait_training(timeout=START_SECONDS)
    return _endless
