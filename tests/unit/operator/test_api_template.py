"""Templates of any shape: refused with words, or good enough for all that is built of them."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_operator.api import InvalidJob, memory_too_small, read_allowances, read_job
from backstay_operator.manifests import Addresses, Wiring, build_pod, pod_identity
from backstay_operator.settings import SidecarSettings
from support.bad_jobs import POD, job

STRICT = read_allowances({})
WIRING = Wiring(
    uid="uid-1",
    addresses=Addresses.in_cluster("gpt", 2, "uid-1"),
    first_generation=100,
    sidecar=SidecarSettings(image="backstay-sidecar:1"),
)
RICH: dict[str, Any] = {
    f"{POD}.containers.0.env": [{"name": "SEED", "value": "1"}],
    f"{POD}.containers.0.volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    f"{POD}.containers.0.resources": {"limits": {"memory": "8Gi", "cpu": 4}},
    f"{POD}.containers.0.lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
    f"{POD}.containers.0.ports": [{"containerPort": 80}],
    f"{POD}.containers.0.securityContext": {"capabilities": {"add": ["CHOWN"]}},
    f"{POD}.initContainers": [{"name": "x", "image": "x"}],
    f"{POD}.volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
    f"{POD}.tolerations": [{"operator": "Exists"}],
    f"{POD}.affinity": {"nodeAffinity": {}},
    f"{POD}.securityContext": {"fsGroup": 7},
    f"{POD}.resources": {"limits": {"memory": "9Gi"}},
    "spec.podTemplate.metadata.annotations": {"a": "b"},
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "limits", "memory", "add", "x"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every field and list item of the template."""
    inner = tree.items() if isinstance(tree, dict) else []
    inner = enumerate(tree) if isinstance(tree, list) else inner
    found = [path] if path else []
    for key, value in inner:
        found += places(value, (*path, key))
    return found


TREE = job(RICH)
PLACES = places(TREE["spec"]["podTemplate"])


def built(tree: dict[str, Any]) -> None:
    """Read the manifest, and make what is made of it."""
    found = read_job(tree, STRICT)
    assert isinstance(memory_too_small(found, "512Mi"), str)
    build_pod(found, pod_identity(1, {0: 100, 1: 100}, 0), WIRING)


def test_a_rich_template_is_taken() -> None:
    built(copy.deepcopy(TREE))


@given(place=st.sampled_from(PLACES), junk=JUNK)
def test_junk_in_a_template_is_refused_with_words_or_does_no_harm(
    place: tuple[Any, ...], junk: Any
) -> None:
    tree = copy.deepcopy(TREE)
    node = tree["spec"]["podTemplate"]
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = junk
    with suppress(InvalidJob):
        built(tree)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({f"{POD}.volumes": [{"name": "backstay-local"}]}, f"{POD}.volumes[0].name"),
        (
            {f"{POD}.containers.0.volumeMounts": [{"name": "backstay-config", "mountPath": "/x"}]},
            f"{POD}.containers[0].volumeMounts[0].name",
        ),
        (
            {
                f"{POD}.initContainers": [
                    {"name": "x", "image": "x", "volumeMounts": [{"name": "backstay-memory"}]}
                ]
            },
            f"{POD}.initContainers[0].volumeMounts[0].name",
        ),
    ],
    ids=["volume", "mount", "mount of an init container"],
)
def test_backstays_own_volumes_are_not_the_templates_to_mount(
    changes: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        read_job(job(changes))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert "Backstay's own volumes" in problem.text


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({f"{POD}.ephemeralContainers": [{}]}, f"{POD}.ephemeralContainers", "remove it"),
        ({f"{POD}.tolerations": {}}, f"{POD}.tolerations", "expected a list"),
        ({f"{POD}.affinity": []}, f"{POD}.affinity", "expected fields"),
        (
            {"spec.podTemplate.metadata.labels": {"tier": 1}},
            "spec.podTemplate.metadata.labels.tier",
            'write `tier: "1"`',
        ),
        (
            {f"{POD}.containers": [{"name": "trainer", "image": "x"}, 5]},
            f"{POD}.containers",
            "expected a list with a container named trainer",
        ),
    ],
    ids=["ephemeral containers", "tolerations", "affinity", "label", "containers"],
)
def test_fields_of_another_shape_are_told_by_their_path(
    changes: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(InvalidJob) as caught:
        read_job(job(changes), STRICT)
    (problem,) = caught.value.problems
    assert (problem.path, words in problem.text) == (path, True)


def test_an_allowed_capability_and_other_containers_are_no_mistake() -> None:
    changes = dict(RICH)
    changes[f"{POD}.containers"] = [
        *TREE["spec"]["podTemplate"]["spec"]["containers"],
        {"name": "logs", "image": "logs:1"},
    ]
    built(job(changes))
